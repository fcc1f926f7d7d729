"""The width of the range of CUDA memory by published runs, and what such a run proves to fit. Pure.

Our own runs on an H100 (bench/estimates) had random rows of one length, so the width rests on the runs of others.
bench/estimates/compare.py computes these figures from its published.json, and a test compares both.
"""

import msgspec

from skill_train.estimate.step import MicroStep, Part

RUNS, SOURCES = 13, 3
WORST = 0.13  # the largest distance of a published run from the middle of its estimate, as a share of the middle
SPREAD = 0.30  # the smallest spread, because so few runs say little about the next one
_MOVING = ("activations", "repeated keys", "logits")
_ON_TOP = ("fragmentation", "framework", "spread")


class Proven(msgspec.Struct, frozen=True):
    """A published run with LoRA, and the upper ends of its estimate by these formulas, in bytes."""

    name: str
    four_bit: bool
    weights: int  # the frozen weights
    trained: int  # the trained weights with their gradients and the optimizer's state
    moving: int  # what the forward and backward pass need
    took: int  # the peak of the process, plus memory that this run saved and ours do not save


PROVEN = (
    Proven("LLaMA-Factory 7B QLoRA 1x1024", True, 3_955_412_156, 239_861_760, 1_219_477_504, 6_979_321_856),
    Proven("Qwen 1.8B LoRA 1x256", False, 3_673_362_432, 1_439_170_560, 701_054_976, 7_247_757_312),
    Proven("LLaMA-Factory 7B QLoRA 1x2048", True, 3_955_412_156, 239_861_760, 2_438_955_008, 8_053_063_680),
    Proven("Qwen 1.8B LoRA 1x1024", False, 3_673_362_432, 1_439_170_560, 2_804_219_904, 9_073_118_413),
    Proven("LLaMA-Factory 7B QLoRA 1x4096", True, 3_955_412_156, 239_861_760, 4_877_910_016, 10_200_547_328),
    Proven("torchtune 8B QLoRA", True, 5_819_381_826, 235_929_600, 3_583_033_344, 12_255_374_004),
    Proven("LLaMA-Factory 7B QLoRA 1x8192", True, 3_955_412_156, 239_861_760, 9_755_820_032, 13_421_772_800),
    Proven("Qwen 1.8B LoRA 1x4096", False, 3_673_362_432, 1_439_170_560, 11_216_879_616, 17_448_304_640),
    Proven("LLaMA-Factory 7B LoRA 4x1024", False, 13_476_831_232, 479_723_520, 4_877_910_016, 18_790_481_920),
    Proven("Qwen 7B LoRA 1x256", False, 15_441_862_656, 3_837_788_160, 796_327_936, 21_635_897_754),
    Proven("torchtune 8B LoRA", False, 16_060_522_496, 471_859_200, 3_583_033_344, 21_940_231_655),
    Proven("Qwen 7B LoRA 1x1024", False, 15_441_862_656, 3_837_788_160, 3_185_311_744, 23_139_136_308),
    Proven("Qwen 7B LoRA 1x4096", False, 15_441_862_656, 3_837_788_160, 12_741_246_976, 31_943_819_264),
)  # fmt: skip


def spread(parts: list[Part]) -> Part:
    """The difference between the sum of the other parts and both ends of the range.

    Args:
        parts: all counted parts of a step on CUDA.
    """
    low, high = widened(parts)
    because = f"{RUNS} published runs of {SOURCES} sources lie within {WORST:.0%} of the middle; so few: {SPREAD:.0%}"
    return Part("spread", low - sum(part.low for part in parts), high - sum(part.high for part in parts), because)


def widened(parts: list[Part]) -> tuple[float, float]:
    """The range of the sum; it never begins below the weights, whose size is known."""
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    middle, weights = (low + high) / 2, sum(part.low for part in parts if part.name == "weights")
    return min(low, max(weights, (1 - SPREAD) * middle)), max(high, (1 + SPREAD) * middle)


def proven_bytes(step: MicroStep, parts: list[Part]) -> tuple[float, str] | None:
    """The most bytes that a step takes according to a published run whose passes need at least as much, and the name of
    that run.

    The size of trained weights and of weights in 16 or 32 bit is known exactly, so their excess over the run is added.
    The size of 4-bit weights depends on the library, so they must not exceed those of the run. None if no such run was
    published, or if the step has what no published run had: every weight trained, sharded weights, eager attention.
    """
    if step.full or step.shards > 1 or any(part.name == "attention scores" for part in parts):
        return None
    weights, trained, moving = in_three(parts)
    proven = [
        (run.took + max(0.0, weights - run.weights) + max(0.0, trained - run.trained), run.name)
        for run in PROVEN
        if run.four_bit == step.four_bit and moving <= run.moving and (weights <= run.weights or not step.four_bit)
    ]
    if not proven:
        return None
    took, name = min(proven)
    counted = sum(part.high for part in parts if part.name != "spread")
    return max(took, counted), name


def in_three(parts: list[Part]) -> tuple[float, float, float]:
    """The upper ends in bytes of the weights, of the trained parts beside them, and of what the passes need."""
    weights = sum(part.high for part in parts if part.name == "weights")
    moving = sum(part.high for part in parts if part.name in _MOVING)
    trained = sum(part.high for part in parts if part.name not in ("weights", *_MOVING, *_ON_TOP))
    return weights, trained, moving
