"""Estimates what the results need: memory to merge, convert and verify, and the size and memory of each quantized file.
Pure arithmetic; every formula names its source."""

from __future__ import annotations

from skill_train.estimate.decode import UBATCH, cache_bytes
from skill_train.estimate.step import Part, Range
from skill_train.facts import ModelFacts
from skill_train.model.families import ANSWERS_UP_TO, KEPT_IN_16_BITS, ROWS_AT_ONCE

# Bits a weight of whole files, Llama 3.1 8B: llama.cpp, tools/quantize/README.md (read 2026-11-21).
BITS = {
    "q2_k": 3.16,
    "q3_k_s": 3.64,
    "q3_k_m": 4.00,
    "q3_k_l": 4.30,
    "q4_0": 4.61,
    "q4_k_s": 4.67,
    "q4_k_m": 4.89,
    "q5_k_s": 5.57,
    "q5_k_m": 5.70,
    "q6_k": 6.56,
    "q8_0": 8.50,
    "f16": 16.0,
    "bf16": 16.0,
    "f32": 32.0,
}
# An embedding that is also the output head keeps 6 bits, or 8 if its row length is no multiple of 256. In that case the
# other K-quants also fall back to coarser blocks, q4_k to q5_0 (llama.cpp, src/llama-quant.cpp).
_TIED_BITS = (6.56, 8.5)
_FALLBACK = 1.3
_TOKENIZER_BYTES = (0.5e6, 12e6)


def file_bytes(model: ModelFacts, quant: str) -> Range | None:
    """The size of a GGUF file; None if the parameters are unknown."""
    if not model.parameters or quant not in BITS:
        return None
    bits = BITS[quant]
    embeddings = model.embedding_parameters or 0 if model.tied_embeddings is not False else 0
    body = model.parameters - embeddings
    least, most = (max(bits, edge) if bits < 16 else bits for edge in _TIED_BITS)
    coarse = _FALLBACK if "_k" in quant and (model.hidden_size or 0) % 256 else 1.04
    low = (body * bits * 0.96 + embeddings * least) / 8
    high = (body * bits * coarse + embeddings * most) / 8
    return Range(low + _TOKENIZER_BYTES[0], high + _TOKENIZER_BYTES[1], f"{bits} bits a weight")


def memory_parts(model: ModelFacts, file: Range, context: int) -> list[Part] | None:
    """Memory of llama.cpp with one sequence: the file, the cache of keys and values, and the compute buffer (llama.cpp
    reserves logits of one ubatch in float32)."""
    cache = cache_bytes(model, context)
    if cache is None or not model.vocab_size:
        return None
    compute = UBATCH * model.vocab_size * 4
    return [
        Part("weights", file.low, file.high, file.basis),
        Part("kv cache", cache.low, cache.high, cache.basis),
        Part("compute", 0.5 * compute, compute + 150e6, f"{UBATCH} rows of logits, graph and context"),
    ]


def unread_bytes(model: ModelFacts, quant: str) -> float:
    """The input embedding in a file, where the output head is another tensor: a token reads one row of it."""
    if model.tied_embeddings is not False or not (model.vocab_size and model.hidden_size):
        return 0.0
    return model.vocab_size * model.hidden_size * BITS.get(quant, 16.0) / 8


def merge_bytes(model: ModelFacts, plain: bool = True) -> Range | None:
    """Memory to merge and to pass the merge's gate. Large models are streamed, and their weights are compared block by
    block (bench/merge: 0.31 GB at 0.5B, 0.44 GB at 7B). For small models, and for adapters with more than A and B, the
    gate runs the reference, in float32 at most, one model at a time.

    Args:
        plain: the adapter consists of A and B only: no DoRA, no module saved whole.
    """
    if plain and model.parameters and model.parameters > ANSWERS_UP_TO:
        return Range(0.25e9, 1e9, "streamed, a few blocks at a time")
    return _in_float32(model, "the gate's reference in float32; the merge itself streams")


def verify_bytes(model: ModelFacts, plain: bool = True) -> Range | None:
    """Memory to verify: first the reference, then each file in its own process, two at once if both fit. A reference in
    16 bits stays in 16 bits, with some rows of one weight in float32 (reference/low_memory.py)."""
    files = "then the files, two at once where there is room"
    stored = model.weight_bytes or 2 * (model.parameters or 0)
    stays_in_16_bits = plain and model.stored_dtype in ("BF16", "F16") and model.model_type in KEPT_IN_16_BITS
    if not (stays_in_16_bits and stored and model.vocab_size and model.hidden_size):
        return _in_float32(model, f"the reference in float32, {files}")
    inner = model.intermediate_size or 4 * model.hidden_size
    widest = max(min(ROWS_AT_ONCE, model.vocab_size) * model.hidden_size, min(ROWS_AT_ONCE, model.hidden_size) * inner)
    least = stored + 4 * widest + 0.5e9
    return Range(least, least + 2e9, f"the reference as it is stored, {files}")


def convert_bytes(model: ModelFacts) -> Range | None:
    """Memory to convert: the largest tensor in float32 and its intermediate copies (gguf/convert.py has the same
    sum)."""
    if not (model.vocab_size and model.hidden_size):
        return None
    largest = model.vocab_size * model.hidden_size
    return Range(0.3e9 + 4 * largest, 0.8e9 + 12 * largest, "llama.cpp's converter, one tensor at a time")


def disk_bytes(model: ModelFacts, quants: tuple[str, ...], trained_bytes: float) -> Range | None:
    """Disk for a whole run: the merged model, one unquantized GGUF, the quantized files, and three checkpoints (two
    complete ones and one that is being written). A checkpoint is three times as large as the trained weights, because
    it includes the optimizer's state."""
    sizes = [file_bytes(model, quant) for quant in quants]
    if not model.parameters or None in sizes:
        return None
    stored = max(model.weight_bytes or 2 * model.parameters, trained_bytes)
    file_sizes = [size for size in sizes if size is not None]
    fixed = stored + 2 * model.parameters + 9 * trained_bytes
    return Range(
        fixed + sum(s.low for s in file_sizes),
        fixed + sum(s.high for s in file_sizes),
        "merged, f16 and quantized files",
    )


def _in_float32(model: ModelFacts, basis: str) -> Range | None:
    """Memory of a reference in float32, one model at a time."""
    if not model.parameters:
        return None
    stored = model.weight_bytes or 2 * model.parameters
    return Range(4 * model.parameters + 0.5e9, 4 * model.parameters + 0.5 * stored + 2.0e9, basis)
