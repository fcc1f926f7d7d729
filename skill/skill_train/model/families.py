"""How the reference of a model is kept in memory, for the steps that run it and for the plan."""

from __future__ import annotations

# Weights up to which `merge` compares answers too: 1 GB in fp32, and a few seconds; 494 million take 4 GB and half a
# minute of 2 cores.
ANSWERS_UP_TO = 250_000_000

# Model types of transformers whose code computes in the type of its input, never in that of its weights: their weights
# can stay in 16 bits. Gemma's does not: it rounds its embedding's scale, 1e-3 of the logits at width 96. Those of
# GPT-2 are of a class of their own.
KEPT_IN_16_BITS = ("llama", "mistral", "phi3", "qwen2", "qwen3")

# Most rows of a weight in 16 bits that are made fp32 at a time.
ROWS_AT_ONCE = 8192
