"""How a reference model is stored in memory, for the steps that run it and for the plan."""

# `merge` also compares answers for models of up to so many weights: 1 GB in fp32, and a few seconds. With 494 million
# it takes 4 GB and half a minute of 2 cores.
ANSWERS_UP_TO = 250_000_000

# Model types whose code in transformers computes in the type of its input, never in that of its weights, so their
# weights can stay in 16 bits. Gemma is not among them: it rounds the scale of its embedding, which is 1e-3 of the
# logits at width 96. GPT-2 is not, because its layers have their own class.
KEPT_IN_16_BITS = ("llama", "mistral", "phi3", "qwen2", "qwen3")

# The most rows of a 16-bit weight that are converted to fp32 at a time.
ROWS_AT_ONCE = 8192
