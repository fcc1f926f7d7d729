"""Which file a Modelfile names."""

from __future__ import annotations

from itertools import permutations

from skill_train.chain_gguf import _for_ollama

OUTPUTS = [{"quant": quant, "path": f"gguf/run-{quant}.gguf"} for quant in ("f16", "q8_0", "q4_k_m")]


def test_the_last_type_that_was_asked_for_whatever_the_order_of_the_record() -> None:
    """A quantization that was killed and goes on records its files in another order."""
    for outputs in permutations(OUTPUTS):
        assert _for_ollama(list(outputs), ["q8_0", "q4_k_m"]) == "run-q4_k_m.gguf"
        assert _for_ollama(list(outputs), ["q4_k_m", "q8_0"]) == "run-q8_0.gguf"


def test_a_type_that_was_not_made_is_not_named() -> None:
    assert _for_ollama(OUTPUTS[:1], ["q8_0"]) == ""
