"""Which file to ship to a device: the best one that fits its memory and keeps what the user asks for. Pure."""

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from skill_train.core.units import size as shown
from skill_train.estimate.artifacts import BITS, file_bytes, memory_parts, unread_bytes
from skill_train.estimate.decode import tokens_per_second
from skill_train.estimate.step import Range, total
from skill_train.estimate.targets import TargetDevice
from skill_train.facts import ModelFacts

ENOUGH = "q4_k_m"  # the type from which on i-quants, all of which are smaller, are not tried
_MOST_TRIED = 2  # each takes as long to make and to measure as a k-quant


class ShipLimits(msgspec.Struct, frozen=True):
    """What the user asks for; None asks for nothing."""

    max_bytes: float | None = None  # of the file
    max_kl: float | None = None  # nats a token, against the model that was trained
    min_speed: float | None = None  # tokens a second


class DeviceFile(msgspec.Struct, frozen=True):
    """A file that could be shipped."""

    quant: str
    bytes: Range | None  # of the file, or of both files of a pair; None when the parameters are unknown
    memory: Range | None  # to run it; None when the shape of the model is unknown
    speed: Range | None  # tokens a second; None when the bandwidth is unknown
    kl: float | None = None  # measured against the unquantized file, in nats a token; None before there is a file
    same_top1: float | None = None  # measured share of the tokens whose most likely next token is the same


class Problem(msgspec.Struct, frozen=True):
    """Why a file is not shipped. `excess` is how far it is from the limit: 1.2 is a fifth too much, or too slow; None
    when that is not known."""

    text: str
    excess: float | None


class FileToShip(msgspec.Struct, frozen=True):
    """The file to ship, or why there is none."""

    candidate: DeviceFile | None  # None when none fits
    because: str  # one sentence
    problems: dict[str, list[Problem]]  # by quant; an empty list for a file that could be shipped


def estimated_file(
    model: ModelFacts, target: TargetDevice, quant: str, context: int, *, pictures: bool = False
) -> DeviceFile:
    """A file that is not made yet, on a device.

    Args:
        pictures: the vision part gets a file of its own, in f16. Without it a vision model loses it.
    """
    language, vision = _parts_of(model)
    size = file_bytes(language, quant)
    if size is None:
        return DeviceFile(quant, None, None, None)
    read = size.middle - unread_bytes(language, quant)
    speed = tokens_per_second(language, target, quant=quant, read_bytes=read, context=context)
    if pictures and vision:
        size = Range(size.low + 2 * vision, size.high + 2 * vision, f"{size.basis}, the vision part in f16")
    return DeviceFile(quant, size, _memory(language, size, context), speed)


def _parts_of(model: ModelFacts) -> tuple[ModelFacts, int]:
    """The language model, and the parameters of the vision part. If these are unknown, the whole model and 0."""
    vision = 0 if model.tower is None else model.tower.parameters
    if not model.parameters or vision >= model.parameters:
        return model, 0
    active = None if model.active_parameters is None else model.active_parameters - vision
    return replace(model, parameters=model.parameters - vision, active_parameters=active), vision


class FileSizes(msgspec.Struct, frozen=True):
    """Bytes of the language model's file, of its part that a token does not read (an input embedding that is not also
    the output head), and of the projector's file (0 without one). `looked_up` is the share of the weights that a token
    reads which is in i-quants below 4 bits; a mix of types may have some too."""

    text: int
    unread: int
    projector: int
    looked_up: float = 0.0


def exported_file(model: ModelFacts, target: TargetDevice, quant: str, context: int, sizes: FileSizes) -> DeviceFile:
    """A file on disk, on a device."""
    both = sizes.text + sizes.projector
    read = sizes.text - sizes.unread
    speed = tokens_per_second(model, target, quant=quant, read_bytes=read, context=context, looked_up=sizes.looked_up)
    files = Range(both, both, "the files")
    return DeviceFile(quant, files, _memory(model, files, context), speed)


def _memory(model: ModelFacts, files: Range, context: int) -> Range | None:
    parts = memory_parts(model, files, context)
    return None if parts is None else total(parts, f"{context} tokens of context")


def choose(candidates: Sequence[DeviceFile], target: TargetDevice, limits: ShipLimits) -> FileToShip:
    """The candidate of the least measured divergence among those without a problem; before anything is measured, the
    one with most bits."""
    problems = {candidate.quant: problems_of(candidate, target, limits) for candidate in candidates}
    fitting = [candidate for candidate in candidates if not problems[candidate.quant]]
    if not fitting:
        return FileToShip(None, _nearest(problems, target, limits), problems)
    measured = all(candidate.kl is not None for candidate in fitting)
    best = min(fitting, key=lambda c: (c.kl or 0.0, _high(c.bytes))) if measured else max(fitting, key=_bits)
    others = len(candidates) - len(fitting)
    most = f"the least divergence, {best.kl:.2g} nats," if measured else "the most bits a weight"
    left = f"; {others} of {len(candidates)} do not fit" if others else ""
    return FileToShip(best, f"{best.quant} has {most} of the types that fit {target.name}{left}", problems)


def i_quants_to_try(
    k_quants: Sequence[DeviceFile], i_quants: Sequence[DeviceFile], target: TargetDevice, limits: ShipLimits
) -> tuple[list[str], str]:
    """The i-quants to try, and a sentence about them. They must be smaller than the smallest k-quant above those that
    fit. Tried are the largest that may fit, and of the others the largest that surely fits, or else that may fit.
    Before there are files no divergence is known, so it is no limit."""
    measurable = replace(limits, max_kl=None)

    def fits(file: DeviceFile) -> bool:
        return not problems_of(file, target, measurable)

    def may_fit(file: DeviceFile) -> bool:
        return fits(_at_best(file))

    best = max((_bits(file) for file in k_quants if fits(file)), default=0.0)
    if best >= BITS[ENOUGH]:
        return [], f"not tried, because {ENOUGH} or a larger type fits"
    below = min(bits for bits in map(_bits, k_quants) if bits > best)
    perhaps = [file for file in i_quants if _bits(file) < below and may_fit(file)]
    sure = [file for file in perhaps[1:] if fits(file)]
    tried = [file.quant for file in (perhaps[:1] + (sure or perhaps[1:]))[:_MOST_TRIED]]
    untried = ", ".join(file.quant for file in i_quants if file.quant not in tried)
    if not tried:
        return [], "not tried, because none of them fits"
    return tried, f"{' and '.join(tried)} too, because {ENOUGH} does not fit; {untried} were not tried"


def _at_best(file: DeviceFile) -> DeviceFile:
    """The file as small as it may come out."""
    size, memory = file.bytes, file.memory
    if size is None or memory is None:
        return file
    spared = size.high - size.low
    return replace(
        file,
        bytes=Range(size.low, size.low, size.basis),
        memory=Range(min(memory.low, memory.high - spared), memory.high - spared, memory.basis),
    )


def problems_of(candidate: DeviceFile, target: TargetDevice, limits: ShipLimits) -> list[Problem]:
    """What speaks against a file. The most that it may need must fit into the least that the device gives, and the
    slowest speed must be enough. What is unknown speaks against it too."""
    problems, room = list[Problem](), target.usable_bytes[0]
    if candidate.memory is None:
        problems.append(Problem("has no known memory, because the shape of the model is unknown", None))
    elif candidate.memory.high > room:
        needs = f"needs up to {' of '.join(_apart(candidate.memory.high, room))} that can be used"
        problems.append(Problem(needs, candidate.memory.high / room if room else None))
    if limits.max_bytes is not None and _high(candidate.bytes) > limits.max_bytes:
        problems.append(_too_large(candidate.bytes, limits.max_bytes))
    if limits.max_kl is not None and (candidate.kl is None or not candidate.kl <= limits.max_kl):
        problems.append(_divergence(candidate.kl, limits.max_kl))
    if limits.min_speed is not None:
        problems += _too_slow(candidate.speed, limits.min_speed)
    return problems


def _too_large(size: Range | None, most: float) -> Problem:
    if size is None:
        return Problem("has no known size, so it cannot be judged", None)
    return Problem(f"has up to {', and --max-size is '.join(_apart(size.high, most))}", size.high / most)


def _apart(size: float, most: float) -> list[str]:
    """Both sizes, in bytes where they would read alike."""
    texts = [shown(size), shown(most)]
    return texts if texts[0] != texts[1] else [f"{size:,.0f} bytes", f"{most:,.0f}"]


def _divergence(kl: float | None, most: float) -> Problem:
    if kl is None:
        return Problem("has no measured divergence, so it cannot be judged", None)
    digits = ".2g" if float(f"{kl:.2g}") > most else "g"
    return Problem(f"diverges by {kl:{digits}} nats, and {most:g} are allowed", kl / most if most else None)


def _too_slow(speed: Range | None, least: float) -> list[Problem]:
    if speed is None:
        return [Problem("has no known speed without the bandwidth of the device, which --bandwidth sets", None)]
    if speed.low >= least:
        return []
    message = f"writes {math.floor(10 * speed.low) / 10:.1f} to {speed.high:.1f} tokens/s, and --min-speed is {least:g}"
    return [Problem(message, least / speed.low)]


def _nearest(problems: dict[str, list[Problem]], target: TargetDevice, limits: ShipLimits) -> str:
    """The file that misses by least, with what it misses."""

    def miss(quant: str) -> float:
        return max(problem.excess if problem.excess is not None else float("inf") for problem in problems[quant])

    nearest = min(problems, key=miss)
    reasons = "; ".join(problem.text for problem in problems[nearest])
    within = "" if limits == ShipLimits() else " and keeps the limits"
    return f"nothing fits {target.name}{within}; the nearest is {nearest}: it {reasons}"


def _high(size: Range | None) -> float:
    return float("inf") if size is None else size.high


def _bits(candidate: DeviceFile) -> float:
    return BITS.get(candidate.quant, 0.0)
