"""Estimates what the results need: memory to merge, convert and verify, and the size and memory of each quantized file.
Pure arithmetic; every formula names its source."""

from skill_train.estimate.decode import UBATCH, cache_bytes
from skill_train.estimate.modules import per_layer_embeddings
from skill_train.estimate.step import Part, Range
from skill_train.facts import ModelFacts
from skill_train.model.families import ANSWERS_UP_TO, KEPT_IN_16_BITS, ROWS_AT_ONCE

# Bits a weight of whole files of Llama 3.1 8B, by llama.cpp's own dry run of that shape (llama-cpp-python 0.3.36).
# tools/quantize/README.md of that version has the same figures, where it has any; iq3_xxs is from there.
BITS = {
    "q1_0": 1.48, "iq1_s": 2.00, "iq1_m": 2.15, "tq1_0": 2.19, "iq2_xxs": 2.38, "tq2_0": 2.52, "iq2_xs": 2.59,
    "iq2_s": 2.74, "iq2_m": 2.93, "q2_k_s": 2.97, "q2_k": 3.16, "iq3_xxs": 3.25, "iq3_xs": 3.50,
    "q3_k_s": 3.64, "iq3_s": 3.66, "iq3_m": 3.76, "q3_k_m": 4.00, "q3_k_l": 4.30, "iq4_xs": 4.46, "q4_0": 4.64,
    "q4_k_s": 4.67, "iq4_nl": 4.68, "q4_k_m": 4.89, "q4_1": 5.10, "q5_0": 5.57, "q5_k_s": 5.57, "q5_k_m": 5.70,
    "q5_1": 6.04, "q6_k": 6.56, "mxfp4_moe": 8.50, "q8_0": 8.50, "f16": 16.0, "bf16": 16.0, "f32": 32.0,
}  # fmt: skip
_LAYERS, _EMBEDDING = 6_979_588_096, 525_336_576  # weights of that model: its layers, and each of two embeddings
# The input embedding has the bits of a block of its type; low types store it in a finer one (src/llama-quant.cpp).
_INPUT_BITS = {
    "q1_0": 1.125, "iq1_s": 2.625, "iq1_m": 2.625, "iq2_xxs": 2.625, "iq2_xs": 2.625, "q2_k_s": 2.625, "q2_k": 2.625,
    "iq2_s": 3.4375, "iq2_m": 3.4375, "iq3_xxs": 3.4375, "iq3_xs": 3.4375, "iq3_s": 3.4375, "iq3_m": 3.4375,
    "q3_k_s": 3.4375, "q3_k_m": 3.4375, "q3_k_l": 3.4375, "iq4_xs": 4.25, "tq1_0": 4.5, "tq2_0": 4.5,
    "q4_0": 4.5, "q4_k_s": 4.5, "q4_k_m": 4.5, "iq4_nl": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_k_s": 5.5, "q5_k_m": 5.5,
    "q5_1": 6.0, "q6_k": 6.5625,
}  # fmt: skip
# The output head, which is also the input embedding of a tied model, keeps 6.56 bits, or 5.5 in a file of these types.
_HEAD_BITS, _LOW_HEAD_BITS = 6.5625, 5.5
_LOW_HEAD = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs")
# Rows that are not divisible by 256 are stored in another block: those of the head as q8_0; elsewhere q4_0 or iq4_nl
# for types up to 4 bits, q5_0 for q4_k, q5_1 for q5_k, q8_0 for q6_k. The blocks of these types are small enough.
_SMALL_BLOCKS = ("q1_0", "q4_0", "iq4_nl", "q4_1", "q5_0", "q5_1", "mxfp4_moe", "q8_0", "f16", "bf16", "f32")
_FALLS_TO = {"q4_k_s": 5.5, "q4_k_m": 5.5, "q5_k_s": 6.0, "q5_k_m": 6.0, "q6_k": 8.5}
_LOWEST_FALLBACK, _MOST_OF_LOW_TYPES, _FALLBACK = 4.5, 4.9, 1.3
_EXPERT_BITS = 4.25  # of mxfp4_moe; its other matrices have 8.5
# A token takes 8 bytes for its length, 4 for its type and one of text at least; with merges, a score and long texts 64.
_TOKENIZER_BYTES, _TOKEN_BYTES, _OTHER_METADATA = (0.5e6, 12e6), (13, 64), 0.1e6

# Three checkpoints, two complete ones and one that is being written, as multiples of the trained weights: each includes
# the optimizer's state.
_CHECKPOINTS = 3 * 3


def file_bytes(model: ModelFacts, quant: str) -> Range | None:
    """The size of a GGUF file; None if the parameters are unknown."""
    if not model.parameters or quant not in BITS:
        return None
    embeddings, (least, most) = model.embedding_parameters or 0, _layer_bits(model, quant)
    (least_input, most_input), (least_head, most_head) = _embedding_bits(model, quant)
    if model.tied_embeddings is not False:
        low, high = embeddings * least_head, embeddings * most_head
    else:
        low, high = embeddings * (least_input + least_head) / 2, embeddings * (most_input + most_head) / 2
    layers = model.parameters - embeddings
    header = _header_bytes(model)
    further = model.further_parameters  # the converter exports them for some families
    sizes = (layers * least + low) / 8 + header[0], ((layers + further) * most + high) / 8 + header[1]
    return Range(*sizes, f"{BITS[quant]} bits a weight")


def _header_bytes(model: ModelFacts) -> tuple[float, float]:
    """The tokenizer and the other metadata."""
    least, most = _TOKENIZER_BYTES
    if model.vocab_size is None:
        return least, most
    return min(least, _TOKEN_BYTES[0] * model.vocab_size), min(
        most, _TOKEN_BYTES[1] * model.vocab_size + _OTHER_METADATA
    )


def _layer_bits(model: ModelFacts, quant: str) -> tuple[float, float]:
    """The least and the most bits a weight of the layers. How many get a finer type depends on their number and on the
    heads."""
    bits = (BITS[quant] * (_LAYERS + 2 * _EMBEDDING) - _EMBEDDING * (_input_bits(quant) + _head_bits(quant))) / _LAYERS
    least, most = 0.96 * bits, 1.04 * bits
    if quant == "mxfp4_moe" and model.experts:
        least = 0.96 * _EXPERT_BITS
    if quant in _SMALL_BLOCKS:
        return least, most
    if model.hidden_size and model.hidden_size % 256:  # the rows of at least two thirds of the weights
        least = 0.96 * (bits + 2 * max(bits, _FALLS_TO.get(quant, _LOWEST_FALLBACK))) / 3
    if (model.hidden_size or 0) % 256 or (model.intermediate_size or 0) % 256:
        most = max(_FALLBACK * bits, _MOST_OF_LOW_TYPES)
    return least, most


def _embedding_bits(model: ModelFacts, quant: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The least and the most bits a weight of the input embedding, and of the output head."""
    first, head = _input_bits(quant), _head_bits(quant)
    if quant in _SMALL_BLOCKS or not (model.hidden_size or 0) % 256:
        coarse = first
    else:
        coarse = max(first, _FALLS_TO.get(quant, _LOWEST_FALLBACK))
    return (first, coarse), (head, max(head, 8.5))


def _input_bits(quant: str) -> float:
    return _INPUT_BITS.get(quant, BITS[quant])


def _head_bits(quant: str) -> float:
    return max(BITS[quant], _LOW_HEAD_BITS if quant in _LOW_HEAD else _HEAD_BITS)


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
    """Bytes of the embeddings in a file of which a token reads one row: the embeddings of each layer, and the input
    embedding if the output head is another tensor. Otherwise the layers' embeddings have the type of the head."""
    if model.tied_embeddings is None or not (model.vocab_size and model.hidden_size):
        return 0.0
    if model.tied_embeddings:
        return per_layer_embeddings(model) * sum(_embedding_bits(model, quant)[1]) / 16
    return (per_layer_embeddings(model) + model.vocab_size * model.hidden_size) * _input_bits(quant) / 8


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
    """Disk for a whole run: the merged model, one unquantized GGUF, the quantized files, and three checkpoints."""
    sizes = [size for quant in quants if (size := file_bytes(model, quant)) is not None]
    if not model.parameters or len(sizes) < len(quants):
        return None
    stored = max(model.weight_bytes or 2 * model.parameters, trained_bytes)
    fixed = stored + 2 * model.parameters + _CHECKPOINTS * trained_bytes
    low, high = sum(size.low for size in sizes), sum(size.high for size in sizes)
    return Range(fixed + low, fixed + high, "three checkpoints, merged, f16 and quantized files")


def job_disk_bytes(model: ModelFacts, trained_bytes: float) -> float | None:
    """The least disk for a job: what it downloads, and three checkpoints. It merges and converts nothing."""
    if not model.parameters:
        return None
    return (model.weight_bytes or 2 * model.parameters) + _CHECKPOINTS * trained_bytes


def _in_float32(model: ModelFacts, basis: str) -> Range | None:
    """Memory of a reference in float32, one model at a time."""
    if not model.parameters:
        return None
    stored = model.weight_bytes or 2 * model.parameters
    return Range(4 * model.parameters + 0.5e9, 4 * model.parameters + 0.5 * stored + 2.0e9, basis)
