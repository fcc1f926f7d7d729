"""What llama.cpp needs to run a file, and how many tokens a second it writes. Pure arithmetic.

The time of a token is the time to read what it needs, and a fixed time for each layer:

    weights / (bandwidth x share) + cache / (bandwidth x cache_share) + layers x seconds_per_layer

Shares and seconds were fitted to published rows (bench/decode, 2026-11-26), most of them of XiongjieDai's
GPU-Benchmarks-on-LLM-Inference: 8B and 70B, q4_k_m and f16, contexts of 512 to 8192. Rows that were not used for the
fit lie 10 % off (median), and 9 of 10 inside the range.
"""

import re

import msgspec

from skill_train.estimate.modules import per_layer_embeddings
from skill_train.estimate.step import Range
from skill_train.estimate.targets import UNKNOWN_FAMILY, TargetDevice
from skill_train.facts import ModelFacts

UBATCH = 512  # llama.cpp's default
_PADDING = 256  # of a cache with a window: src/llama-kv-cache-iswa.cpp, GGML_PAD(window + ubatch, 256), read 2026-11-26
_CACHE_BYTES = 2  # float16


class Family(msgspec.Struct, frozen=True):
    """How chips of a kind read their memory."""

    # share of the bandwidth that quantized weights below 8 bits reach; `wide_share` is for weights of 8 bits and more,
    # which take less work to unpack
    share: float
    wide_share: float
    cache_share: float  # share of the bandwidth that the cache of keys and values reaches
    seconds_per_layer: float  # to start the work of one layer
    # the slowest and the fastest published row of such chips, relative to this estimate
    range: tuple[float, float] = (0.7, 1.4)


FAMILIES = {
    "nvidia": Family(0.84, 0.86, 0.4, 60e-6),
    "nvidia_hbm": Family(0.60, 0.54, 0.2, 100e-6),
    "apple": Family(0.80, 0.86, 0.4, 100e-6),
    "apple_max": Family(0.58, 0.82, 0.2, 100e-6),
    "apple_ultra": Family(0.60, 0.82, 0.2, 100e-6),
    "amd": Family(0.80, 0.80, 0.4, 80e-6),
    "cpu": Family(0.66, 0.66, 0.66, 70e-6),
    "ios": Family(0.74, 0.80, 0.4, 100e-6, (0.6, 1.3)),  # phones become slower while they are warm
    "phone": Family(0.58, 0.58, 0.58, 80e-6, (0.5, 1.3)),
    UNKNOWN_FAMILY: Family(0.66, 0.72, 0.4, 80e-6, (0.5, 1.5)),
}
_MEASURED_RANGE = (0.75, 1.3)  # other types unpack at another speed, and other layers take another time
_WIDE = ("q8_0", "f16", "bf16", "f32")
# Types of fewer bits take more work to unpack. Of Llama 3.1 8B iq4_xs wrote 78 tokens a second, and none of q3_k, q2_k,
# iq3, iq2 and iq1 more than 80, but for q2_k_s (90): tools/quantize/README.md of llama-cpp-python 0.3.36, one GPU.
_FASTEST_BITS = 4.25
# A processor looks the weights of i-quants below 4 bits up in tables: on that of an M2 Max a weight in iq3_s took 3.3
# times as long as one in iq4_xs (ggml-org/llama.cpp, pull 5747, 2024-02: 28.8 tokens a second, and 21 with 16 % of the
# weights in iq3_s). On a GPU, i-quants are among the types in the comment above.
_TABLES = re.compile(r"iq[123]_\w+")
_TABLE_SLOWNESS = 3.3
_ON_PROCESSORS = ("cpu", "phone", UNKNOWN_FAMILY)


def cache_bytes(model: ModelFacts, context: int) -> Range | None:
    """The cache of keys and values in float16, for one sequence. A layer with a sliding window keeps the window and one
    ubatch. A layer without attention keeps nothing that grows. None if the shape is unknown."""
    if not (model.layers and (model.kv_heads or model.heads) and (model.head_dim or model.hidden_size)):
        return None
    least, most = _windowed(model)
    layers = model.layers if model.cached_layers is None else model.cached_layers
    window = min(context, -(-((model.sliding_window or 0) + UBATCH) // _PADDING) * _PADDING)
    heads, head = model.kv_heads or model.heads or 1, model.head_dim or (model.hidden_size or 0) // (model.heads or 1)
    usual = 2 * heads * head  # keys and values of a token in a layer
    fewest, widest = model.cached_numbers or (usual, usual)
    low = most * window * usual + (layers - most) * context * fewest
    high = least * window * usual + (layers - least) * context * widest
    in_layers = "" if model.cached_layers in (None, model.layers) else f" in {layers} of {model.layers} layers"
    some = f", of which {least} of {layers} layers keep {window}" if least else ""
    return Range(low * _CACHE_BYTES, high * _CACHE_BYTES, f"{context} tokens in float16{in_layers}{some}")


def tokens_per_second(
    model: ModelFacts,
    target: TargetDevice,
    *,
    quant: str,
    read_bytes: float,
    context: int,
    looked_up: float | None = None,
) -> Range | None:
    """The speed of writing an answer with the context half full. None if the bandwidth or the shape is unknown.

    Args:
        read_bytes: bytes of all weights, without an input embedding that is not also the output head: a token reads
            only one row of it.
        looked_up: the share of those weights that is in i-quants below 4 bits; None to take it from `quant`.
    """
    family, cache = FAMILIES[target.family], cache_bytes(model, max(1, context // 2))
    stated = target.gigabytes_per_second if target.reached is None else target.reached
    if stated is None or cache is None or not model.layers:
        return None
    share, cache_share = family.wide_share if quant in _WIDE else family.share, family.cache_share
    reached, (slow, fast) = f"{stated:g} GB/s, of which {share:.0%} are reached", family.range
    if target.reached is not None:
        share, cache_share, (slow, fast) = 1.0, 1.0, _MEASURED_RANGE
        reached = f"{stated:.1f} GB/s as measured"
    active = (model.active_parameters or model.parameters or 1) / (model.parameters or 1)
    rest = cache.high / (stated * 1e9 * cache_share) + model.layers * family.seconds_per_layer
    weights = (model.parameters or 0) - per_layer_embeddings(model)
    at_most = _slowness(target, quant, looked_up) * max(read_bytes, _FASTEST_BITS * weights / 8)
    least, most = (count * active / (stated * 1e9 * share) + rest for count in (read_bytes, at_most))
    unpacked = "; few bits take longer to unpack" if at_most > read_bytes else ""
    return Range(slow / most, fast / least, f"{reached}; {context // 2} tokens of context{unpacked}")


def _slowness(target: TargetDevice, quant: str, looked_up: float | None) -> float:
    """How many times as long a token takes as with a file whose weights need no table."""
    share = float(is_looked_up(quant)) if looked_up is None else looked_up
    return 1 + (_TABLE_SLOWNESS - 1) * share if target.family in _ON_PROCESSORS else 1.0


def is_looked_up(kind: str) -> bool:
    """Whether a processor looks the weights of this type up in tables: an i-quant below 4 bits."""
    return _TABLES.fullmatch(kind) is not None


def _windowed(model: ModelFacts) -> tuple[int, int]:
    """The least and the most layers that keep only their window in llama.cpp."""
    layers = (model.layers or 0) if model.cached_layers is None else model.cached_layers
    if model.sliding_window is None or model.unread_window is not None:
        return 0, 0
    return (0, layers) if model.windowed_layers is None else (model.windowed_layers, model.windowed_layers)
