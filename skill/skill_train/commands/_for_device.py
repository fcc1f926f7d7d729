"""`--for DEVICE`: the options that describe a device and the limits of a file, and the answer of `plan` and
`export-gguf`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import msgspec

from skill_train.commands._command import DEFAULT_CONTEXT, Number, Whole, option
from skill_train.commands._drawing import rich_table
from skill_train.core.errors import DecisionNeeded, UsageError, nearest
from skill_train.core.units import gigabytes, megabytes, speed
from skill_train.estimate.artifacts import BITS
from skill_train.estimate.fit import DeviceFile, FileToShip, ShipLimits, choose, estimated_file, i_quants_to_try
from skill_train.estimate.step import Range
from skill_train.estimate.targets import TargetDevice, find_target, machine_target, parse_bytes
from skill_train.facts import MachineFacts, ModelFacts
from skill_train.gguf.quant_types import plain_type

HERE = "here"  # the value of --for that means this machine
CANDIDATES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
I_QUANTS = ("iq4_xs", "iq3_m", "iq3_xxs", "iq2_m", "iq2_xxs")
_MOST_CONTEXT = 1 << 24


@dataclass(frozen=True)
class DeviceOptions:
    """The options that describe a device, and the limits of its file. `for_device` is the value of `--for`."""

    for_device: str | None = option(None, 'Device that the file is for, such as "iPhone 15", "M2 16GB" or here.')
    memory: str | None = option(None, "Memory of the device, such as 8GB.  [default: from the table of devices]")
    bandwidth: str | None = option(None, "Its memory bandwidth, such as 68GB/s.  [default: from the table of devices]")
    context: int | None = option(
        None,
        f"Tokens of a conversation on the device.  [default: {DEFAULT_CONTEXT}, or what the model has]",
        Whole(min=1, max=_MOST_CONTEXT),
    )
    max_size: str | None = option(None, "Largest file, such as 1.5GB.")
    min_speed: float | None = option(None, "Minimum tokens per second.", Number(min=0, min_open=True, max=1e6))


class FileAnswer(TypedDict):
    """One file on the device. An estimate is `[least, most]`, or None if unknown. `kl` (in nats per token) and
    `same_top1` are measured; None if they were not. `problems` is empty for a file that can be shipped."""

    quant: str
    bytes: list[float] | None
    memory_bytes: list[float] | None
    tokens_per_second: list[float] | None
    kl: float | None
    same_top1: float | None
    problems: list[str]


class DeviceAnswer(TypedDict):
    """The device, the files on it, and the file to ship. `recommended` is None if no file fits."""

    device: str
    memory_bytes: float
    usable_bytes: list[float]
    gigabytes_per_second: float | None
    context: int
    reasons: list[str]
    files: list[FileAnswer]
    recommended: str | None
    because: str


@dataclass(frozen=True)
class DeviceQuestion:
    """A device, the tokens of context, the limits, and the i-quants that are tried in addition to the types of
    `--quant`. With `pictures`, the device also needs the file of the vision part."""

    target: TargetDevice
    context: int
    limits: ShipLimits
    i_quants: tuple[str, ...] = ()
    pictures: bool = False


def device_question(
    options: DeviceOptions, model: ModelFacts, here: MachineFacts, *, max_kl: float | None = None
) -> DeviceQuestion | None:
    """The question about the device of the options; None if they describe none. `here` is this machine."""
    if options.for_device is None and options.memory is None and options.bandwidth is None:
        limits = (
            ("--context", options.context),
            ("--max-size", options.max_size),
            ("--max-kl", max_kl),
            ("--min-speed", options.min_speed),
        )
        alone = next((option for option, value in limits if value is not None), None)
        if alone is not None:
            expected = "--for with the name of a device, or --memory"
            hint = "skill-train plan --help"
            raise UsageError(f"{alone} needs a device", code="bad_usage", expected=expected, hint=hint)
        return None
    target = _target(options, here)
    most = None if options.max_size is None else parse_bytes(options.max_size, "--max-size")
    context, why = _context(options.context, model.context)
    target = msgspec.structs.replace(target, reasons=(*target.reasons, why))
    return DeviceQuestion(target, context, ShipLimits(most, max_kl, options.min_speed))


def candidates_of(quant: str) -> list[str]:
    """The types that `--quant` names."""
    names = [plain_type(name) for name in quant.split(",")]
    if unknown := [name for name in names if name not in BITS]:
        raise UsageError(
            f"{unknown[0][:60]!r} is not a type of GGUF files{nearest(unknown[0][:60], BITS)}",
            code="bad_usage",
            expected=", ".join(sorted(BITS)),
            got=unknown[0],
            hint="--quant q4_k_m,iq4_xs",
        )
    return list(dict.fromkeys(names))


def with_i_quants(question: DeviceQuestion, model: ModelFacts, *, matrix: bool) -> DeviceQuestion:
    """The question with the i-quants to try in addition to `CANDIDATES`, and a sentence about them. They need an
    importance matrix: `matrix` says whether there is one or it can be made."""
    tried, why = list[str](), "not tried without an importance matrix"
    if matrix:
        k_quants, i_quants = (
            [estimated(question, model, quant) for quant in types] for types in (CANDIDATES, I_QUANTS)
        )
        tried, why = i_quants_to_try(k_quants, i_quants, question.target, question.limits)
    reasons = (*question.target.reasons, f"i-quants: {why}")
    target = msgspec.structs.replace(question.target, reasons=reasons)
    return replace(question, target=target, i_quants=tuple(tried))


def estimated(question: DeviceQuestion, model: ModelFacts, quant: str) -> DeviceFile:
    return estimated_file(model, question.target, quant, question.context, pictures=question.pictures)


def _target(options: DeviceOptions, here: MachineFacts) -> TargetDevice:
    if options.for_device != HERE:
        return find_target(options.for_device, options.memory, options.bandwidth)
    if options.memory is not None or options.bandwidth is not None:
        raise UsageError(
            "--for here knows its memory and bandwidth", code="bad_usage", hint="leave out --for or the rest"
        )
    return machine_target(here)


def _context(chosen: int | None, trained: int | None) -> tuple[int, str]:
    """The tokens of context, and the reason. The context of the model is the upper limit."""
    context = chosen or DEFAULT_CONTEXT
    if trained is not None and context > trained:
        return trained, f"context: {trained} tokens, all that the model was made for; {context} were asked for"
    return context, "context: " + ("--context" if chosen else "the default")


def answer_of(question: DeviceQuestion, candidates: Sequence[DeviceFile]) -> tuple[DeviceAnswer, DecisionNeeded | None]:
    """The answer, and the error if no file fits."""
    choice, target = choose(candidates, question.target, question.limits), question.target
    answer: DeviceAnswer = {
        "device": target.name,
        "memory_bytes": round(target.memory_bytes),
        "usable_bytes": [round(end) for end in target.usable_bytes],
        "gigabytes_per_second": target.gigabytes_per_second,
        "context": question.context,
        "reasons": list(target.reasons),
        "files": [_file(candidate, choice) for candidate in candidates],
        "recommended": choice.candidate.quant if choice.candidate else None,
        "because": choice.because,
    }
    if choice.candidate:
        return answer, None
    return answer, DecisionNeeded(
        choice.because,
        code="no_memory",
        expected="a file that fits the device and keeps the limits",
        hint="another --quant, a limit that allows more, a smaller model or --context, or a device with more memory",
    )


def _file(candidate: DeviceFile, choice: FileToShip) -> FileAnswer:
    return {
        "quant": candidate.quant,
        "bytes": _ends(candidate.bytes),
        "memory_bytes": _ends(candidate.memory),
        "tokens_per_second": _ends(candidate.speed, digits=1),
        "kl": None if candidate.kl is None else float(f"{candidate.kl:.4g}"),
        "same_top1": None if candidate.same_top1 is None else round(candidate.same_top1, 4),
        "problems": [problem.text for problem in choice.problems[candidate.quant]],
    }


def _ends(value: Range | None, digits: int | None = None) -> list[float] | None:
    return None if value is None else [round(value.low, digits), round(value.high, digits)]


def draw_answer(rich: Any, answer: DeviceAnswer) -> None:
    """Draws a row for each file, then the file to ship, and the sources of the device's figures."""
    title = f"on {answer['device']}, with {answer['context']} tokens of context"
    table = rich_table("file", "size", "memory", "tokens/s", "divergence", "fits", title=title)
    for file in answer["files"]:
        table_row = (_sizes(file["bytes"]), _sizes(file["memory_bytes"]), _rates(file["tokens_per_second"]))
        kl = "not measured" if file["kl"] is None else f"{file['kl']:.2g} nats"
        style = "bold" if file["quant"] == answer["recommended"] else None
        fits = "no: it " + "; ".join(file["problems"]) if file["problems"] else "yes"
        table.add_row(file["quant"], *table_row, kl, fits, style=style)
    rich.print(table)
    ship = f"ship {answer['recommended']}: " if answer["recommended"] else ""
    rich.print(ship + answer["because"], style="bold")
    for reason in answer["reasons"]:
        rich.print(reason, style="dim")


def _sizes(ends: list[float] | None) -> str:
    if ends is None:
        return "unknown"
    low, high = ends
    if high < 1e8:
        return megabytes(high) if low == high else f"{low / 1e6:.1f} to {megabytes(high)}"
    return gigabytes(high, 2) if low == high else f"{low / 1e9:.2f} to {gigabytes(high, 2)}"


def _rates(ends: list[float] | None) -> str:
    return "unknown" if ends is None else " to ".join(map(speed, ends))
