"""Holds the estimates against what was measured (measured.jsonl) and what others published (published.json).

    python bench/estimates/compare.py             print the tables; exit 1 when a measured peak lies outside its range
    python bench/estimates/compare.py --write     write them to README.md beside this file too

Memory: the range that `plan` would state for the training step, without the libraries' own memory. On CUDA it is as
wide as published runs say: each source is left out once, and held against what the others give. Time before
calibration: the range from the processor's peak. Time after calibration: the speed of one run of the same shape, type
and device, the one of middle length in time, predicts the others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from skill_train.estimate.memory import training_memory
from skill_train.estimate.published import Proven, in_three, widened
from skill_train.estimate.step import MicroStep, Part, Range, total
from skill_train.estimate.time import micro_step_flops, micro_step_seconds
from skill_train.facts import Calibration, MachineFacts, ModelFacts
from skill_train.model.config import StoredWeights, read
from skill_train.train.measured_speed import computing_seconds, read_seconds

HERE = Path(__file__).resolve().parent
SHAPES = json.loads((HERE / "shapes.json").read_text(encoding="utf-8"))
MARKS = ("<!-- table -->", "<!-- /table -->")
LEAST_SPREAD = 0.30  # of a handful of sources
# Bytes for a token and a word, where transformers' own head scores all tokens: the logits (bfloat16 or float32), what
# is shifted, its log-softmax and two gradients. 12 where the trainer lets the logits go before the backward pass, 16
# where it keeps them (measured with both heads on a CPU, torch 2.13, 1,024 tokens x 151,936 words, 2026-11-24).
HEAD_BYTES = (12, 16)


# torch takes cuBLAS's workspaces from its own memory, 32 MiB on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp): one
# for the forward pass, and one for the backward pass, which has a thread of its own.
WORKSPACES = 2 * 2**25


@dataclass(frozen=True)
class Row:
    """One figure beside its estimate.

    Attributes:
        unit: bytes or seconds.
    """

    name: str
    actual: float
    estimate: Range
    note: str = ""

    @property
    def error(self) -> float:
        return self.estimate.middle / self.actual - 1

    @property
    def inside(self) -> bool:
        return self.estimate.low <= self.actual <= self.estimate.high


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables to README.md")
    options = parser.parse_args(arguments)
    text = report()
    print(text)
    if options.write:
        readme = HERE / "README.md"
        before, _, rest = readme.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        readme.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")
    return 0 if all(row.inside for row in memory_rows()) else 1


def report() -> str:
    memory, before, after = memory_rows(), time_rows(), calibrated_rows()
    parts = [
        "### Peak memory of a training step, measured",
        table(memory, gigabytes),
        summary("memory", memory),
        "### Seconds of a micro-step, measured: before calibration",
        table(before, seconds),
        summary("time before calibration", before),
        "### Seconds of a micro-step, measured: after calibration",
        table(after, seconds),
        summary("time after calibration", after),
        "### Published by others",
        table([*published("memory")], gigabytes),
        "### How wide the range is on CUDA: each source left out once",
        left_out_table(),
        "### What published runs prove",
        proven_table(),
        "### Times published by others",
        table([*published("seconds")], seconds),
    ]
    return "\n\n".join(parts)


def left_out_table() -> str:
    lines = [
        "| source left out | rows | farthest of the others | inside by that alone | inside the stated range |",
        "| --- | --: | --: | --: | --: |",
    ]
    for source, rows, others in sources_left_out():
        alone, stated = (sum(abs(off) <= width for off in rows) for width in (others, max(LEAST_SPREAD, others)))
        lines.append(f"| {source} | {len(rows)} | {others:.1%} | {alone} of {len(rows)} | {stated} of {len(rows)} |")
    wide, count, worst = spread_of(residuals())
    lines += [
        "",
        f"**±{wide:.0%} of the middle: {count} runs of {len(residuals())} sources, at most {worst:.0%} off.**",
    ]
    return "\n".join(lines)


def proven_table() -> str:
    lines = ["| run | weights | trained | passes | took at most |", "| --- | --: | --: | --: | --: |"]
    for run in proven():
        sizes = (run.weights, run.trained, run.moving, run.took)
        lines.append(" | ".join([f"| {run.name}", *(gigabytes(size) for size in sizes)]) + " |")
    return "\n".join(lines)


def table(rows: list[Row], shown: Any) -> str:
    lines = ["| what | figure | estimate | middle off by | inside | note |", "| --- | --: | --: | --: | --- | --- |"]
    for row in rows:
        ends = f"{shown(row.estimate.low)} to {shown(row.estimate.high)}"
        inside = "yes" if row.inside else "no"
        lines.append(f"| {row.name} | {shown(row.actual)} | {ends} | {row.error:+.0%} | {inside} | {row.note} |")
    return "\n".join(lines)


def summary(name: str, rows: list[Row]) -> str:
    if not rows:
        return f"**{name}: nothing to compare.**"
    errors = [abs(row.error) for row in rows]
    inside = sum(row.inside for row in rows)
    off = f"{median(errors):.1%} (median), {max(errors):.1%} (worst)"
    return f"**{name}: {len(rows)} configurations, {inside} inside the range; middle off by {off}.**"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else f"{value / 60:.1f} min"


def measured() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "measured.jsonl").read_text(encoding="utf-8").splitlines()]


def memory_rows() -> list[Row]:
    rows = []
    for line in measured():
        parts = training_memory(shape(line["configuration"]["shape"]), step_of(line))
        assert parts is not None
        if line["configuration"]["device"] == "cuda":  # torch's own count leaves out the context and what is cached
            parts = [part for part in parts if part.name not in ("framework", "fragmentation", "spread")]
            parts.append(Part("workspaces", 0, WORKSPACES, "of cuBLAS: one of each thread that computes"))
        rows.append(Row(line["name"], line["peak_bytes"], total(parts, "")))
    return rows


def timed() -> list[dict[str, Any]]:
    """Without the lines whose time is None, because other work ran on the machine meanwhile."""
    return [line for line in measured() if line["seconds_per_micro_step"] is not None]


def time_rows() -> list[Row]:
    rows = []
    for line in timed():
        estimate = micro_step_seconds(shape(line["configuration"]["shape"]), step_of(line), machine_of(line), None)
        if estimate is not None:
            rows.append(Row(line["name"], line["seconds_per_micro_step"], estimate))
    return rows


def calibrated_rows() -> list[Row]:
    """Every configuration that had the machine to itself, but those that calibrate."""
    lines = [line for line in timed() if not line.get("beside_other_work")]
    pairs = [(line, _calibrates(line, lines)) for line in lines]
    return [calibrated(line, by) for line, by in pairs if by is not line]


def calibrated(line: dict[str, Any], by: dict[str, Any]) -> Row:
    """The time of one configuration, as another of the same shape and device predicts it."""
    model, machine, seconds = shape(by["configuration"]["shape"]), machine_of(by), by["seconds_per_micro_step"]
    steps = [(1, step_of(by))]
    flops = micro_step_flops(model, step_of(by))
    assert flops is not None
    computing = computing_seconds(model, machine, seconds, steps)
    readings = read_seconds(model, machine, seconds, steps)
    speed = Calibration(flops / computing, by["name"], same_shape=True, readings=readings)
    estimate = micro_step_seconds(model, step_of(line), machine_of(line), speed)
    assert estimate is not None
    return Row(line["name"], line["seconds_per_micro_step"], estimate, f"by {by['name']}")


def _calibrates(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of the same device, shape and type whose micro-step is in the middle."""
    keys = ("device", "shape", "dtype", "four_bit", "finetuning_type", "pure_bf16")
    alike = [o for o in lines if all(o["configuration"].get(k) == line["configuration"].get(k) for k in keys)]
    alike.sort(key=lambda other: float(other["seconds_per_micro_step"]))
    return alike[len(alike) // 2]


def published(kind: str) -> list[Row]:
    return [_published_memory(row) if kind == "memory" else _published_time(row) for row in published_rows(kind)]


def published_rows(kind: str) -> list[dict[str, Any]]:
    rows = json.loads((HERE / "published.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["kind"] == kind]


def _published_memory(row: dict[str, Any]) -> Row:
    """Beside the range that would be stated of it, without what its own figure proves."""
    low, high = widened(_counted(row))
    left_out = f"left out: {row['left_out']}" if "left_out" in row else ""
    note = "; ".join(filter(None, [row["note"], left_out, row["source"]]))
    return Row(row["name"], row["published"], Range(low, high, ""), note)


def _counted(row: dict[str, Any]) -> list[Part]:
    """The parts of a published run, by its own settings: its head, and what its figure counts."""
    parts = _parts(row)
    if row.get("head") == "transformers":
        parts = [_full_logits(row) if part.name == "logits" else part for part in parts]
    on_top = ("fragmentation", "framework") if row.get("counts") == "torch" else ()
    return [part for part in parts if part.name not in on_top]


def _parts(row: dict[str, Any]) -> list[Part]:
    """What a run of ours with these settings would be counted."""
    step = MicroStep(
        device="cuda",
        dtype=row.get("dtype", "bfloat16"),
        rows=row["rows"],
        length=row["length"],
        checkpointing=row["checkpointing"],
        four_bit=row["four_bit"],
        lora_r=row["lora_r"],
        target_modules=tuple(row["target_modules"]),
        full=row.get("full", False),
        optim="adamw_torch_fused" if row.get("full", False) else row.get("optim", "adamw_torch"),
        pure_bf16=row.get("pure_bf16", False),
    )
    parts = training_memory(shape(row["shape"]), step)
    assert parts is not None
    # Whether a published run repeated keys is unknown. Without them it proves less.
    return [part for part in parts if part.name not in ("spread", "repeated keys")]


def _full_logits(row: dict[str, Any]) -> Part:
    elements = row["rows"] * row["length"] * (shape(row["shape"]).vocab_size or 0)
    low, high = (each * elements for each in HEAD_BYTES)
    return Part("logits", low, high, f"{HEAD_BYTES[0]} to {HEAD_BYTES[1]} bytes for each token and word")


def residuals() -> dict[str, list[float]]:
    """How far each published run lies off the middle of its estimate, as a share of that middle, by source."""
    found: dict[str, list[float]] = {}
    for row in published_rows("memory"):
        if "left_out" not in row:
            off = row["published"] / total(_counted(row), "").middle - 1
            found.setdefault(row["source"].split(",")[0].removesuffix(" wiki"), []).append(off)
    return found


def sources_left_out() -> list[tuple[str, list[float], float]]:
    """Each source, its residuals, and the farthest residual of all others."""
    found = residuals()
    return [(left, rows, spread_of({k: v for k, v in found.items() if k != left})[2]) for left, rows in found.items()]


def spread_of(found: dict[str, list[float]]) -> tuple[float, int, float]:
    """`(spread, runs, worst)`: half the width of the range as a share of its middle."""
    every = [abs(off) for rows in found.values() for off in rows]
    worst = max(every)
    return max(LEAST_SPREAD, math.ceil(100 * worst) / 100), len(every), worst


def proven() -> tuple[Proven, ...]:
    """What the published runs prove, smallest first."""
    rows = [row for row in published_rows("memory") if "left_out" not in row]
    return tuple(sorted((_proven(row) for row in rows), key=lambda run: run.took))


def _proven(row: dict[str, Any]) -> Proven:
    """The figure as it may be read at most: GB as GiB, the last digit rounded down, and on top what its own count
    leaves out and what the run saved by means that ours have not, at the upper end of our count."""
    figure = row["printed"].split()[0]
    most = (float(figure) + 0.5 * 10 ** -len(figure.partition(".")[2])) * 2**30
    ours = _parts(row)
    not_counted = ("fragmentation", "framework") if row.get("counts") == "torch" else ()
    missing = sum(part.high for part in ours if part.name in (*not_counted, *row.get("saves", ())))
    groups = [math.ceil(size) for size in in_three(_counted(row))]
    return Proven(row["name"], row["four_bit"], *groups, math.ceil(most + missing))


def _published_time(row: dict[str, Any]) -> Row:
    step = MicroStep(row["device"], row["dtype"], row["rows"], row["length"], checkpointing=False, full=True)
    one = micro_step_seconds(shape(row["shape"]), step, _machine(row["chip"], row["device"]), None)
    assert one is not None
    factor = row["steps"] * row["accumulation"]
    estimate = Range(one.low * factor, one.high * factor, one.basis)
    return Row(row["name"], row["published"], estimate, f"{row['note']}; {row['source']}")


def shape(name: str) -> ModelFacts:
    return read(SHAPES[name]["config"], source=SHAPES[name]["source"], stored=StoredWeights(), has_chat_template=True)


def step_of(line: dict[str, Any]) -> MicroStep:
    values = line["configuration"]
    return MicroStep(
        device=values["device"],
        dtype=values["dtype"],
        rows=values["batch"],
        length=values["length"],
        checkpointing=values["checkpointing"],
        four_bit=values["four_bit"],
        lora_r=values["lora_r"],
        target_modules=tuple(values["target_modules"]),
        trained_share=line["trained_share"],
        full=values.get("finetuning_type") == "full",
        optim="adamw_torch_fused" if values.get("finetuning_type") == "full" else "adamw_torch",
        pure_bf16=values.get("pure_bf16", False),
        accumulates=values.get("accumulation", 1) > 1,
    )


def machine_of(line: dict[str, Any]) -> MachineFacts:
    was = line["machine"]
    facts = _machine(was["chip"], line["configuration"]["device"])
    return MachineFacts(
        **{
            **msgspec.structs.asdict(facts),
            "cores": was["cores"],
            "cpu_features": tuple(was["cpu_features"]),
            "cpu_mhz": was["cpu_mhz"],
        }
    )


def _machine(chip: str, device: str) -> MachineFacts:
    return MachineFacts("", chip, device, None, None, None, 1, False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
