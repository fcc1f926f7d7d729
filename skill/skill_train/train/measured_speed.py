"""Speeds that finished runs on this machine measured. They are stored in the cache for later estimates."""

import contextlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

from skill_train.core.errors import UsageError
from skill_train.estimate.step import MicroStep
from skill_train.estimate.time import (
    SPREAD,
    dequantizing_seconds,
    gpu_seconds,
    launch_seconds,
    micro_step_flops,
    optimizer_seconds,
    reading_seconds,
)
from skill_train.facts import Calibration, MachineFacts, ModelFacts, Reading
from skill_train.machine.read import cache_file
from skill_train.plan.placement import micro_step
from skill_train.run import records
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import StepLine

SCHEMA = "skill-train/calibration/1"
Steps = list[tuple[int, MicroStep]]  # for each optimizer step, the number of its micro-steps and one of them
_LEAST_STEPS = 3  # the first step warms up
_ENOUGH_STEPS = 10  # a run with fewer steps does not replace one with more
# The speed of another shape is used only for a model of similar size in parameters. Overhead slows down narrow models:
# on 2 cores a model of hidden size 64 reached 4 to 10 GFLOPS and Qwen3-0.6B 24 to 78 (bench/estimates, 2026-11). Four
# times the parameters is about twice the width. Over that range the share of the peak changes by a third
# (estimate/time.py, _REACHED).
_SIMILAR = 4.0


class MeasuredRun(msgspec.Struct, frozen=True):
    """A run in the cache. Earlier versions stored neither `steps` nor `readings`."""

    flops_per_second: Annotated[float, msgspec.Meta(gt=0)]
    basis: Annotated[str, msgspec.Meta(min_length=1)]
    parameters: Annotated[int, msgspec.Meta(gt=0)]
    steps: int = 0
    readings: tuple[Reading, ...] = ()


class _Cache(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The measured runs of one processor or GPU in one dtype, by model shape."""

    chip: str = ""
    dtype: str = ""
    shapes: dict[str, MeasuredRun]


def remember(plan: Plan, lines: list[StepLine], finished_at: str) -> Calibration | None:
    """Stores the speed of a run, from the lines of its `metrics.jsonl`. None if the run was too short, or much shorter
    than the run in the cache."""
    settled = [line for last, line in pairwise(lines) if line.seconds and line.tokens and line.start == last.start]
    model, machine = plan.facts.model, plan.facts.machine
    if len(lines) < _LEAST_STEPS or not settled or plan.placement.num_processes > 1:
        return None
    if plan.recipe.images and (plan.facts.dataset.picture_tokens is None or model.tower is None):
        return None  # the number of computed operations is unknown
    steps = [_micro_steps(plan, line) for line in settled]
    flops = sum(count * (micro_step_flops(model, step) or 0) for count, step in steps)
    if not flops or model.parameters is None:
        return None
    whole = sum(line.seconds or 0 for line in settled)
    seconds, readings = computing_seconds(model, machine, whole, steps), read_seconds(model, machine, whole, steps)
    dtype, shape = plan.placement.dtype, _shape(model)
    basis = f"{len(settled)} steps of {Path(model.source).name} in {dtype}, {finished_at[:10]}"
    path = _path(machine, plan.placement.device, dtype)
    measured = MeasuredRun(flops / seconds, basis, model.parameters, len(settled), readings)
    earlier = _read(path)
    if len(settled) < min(_ENOUGH_STEPS, earlier[shape].steps if shape in earlier else 0):
        return None
    with contextlib.suppress(OSError):  # the run is done; a cache that cannot be written costs an estimate
        records.write(path, _Cache(chip=machine.chip, dtype=dtype, shapes=earlier | {shape: measured}))
    return Calibration(flops / seconds, basis, same_shape=True, readings=readings)


def known_speeds(machine: MachineFacts, model: ModelFacts, device: str) -> dict[str, Calibration]:
    """Measured speeds of this machine by dtype, for this model shape or else for the shape nearest in size."""
    speeds = {}
    for dtype in ("float32", "bfloat16", "float16"):
        shapes = _read(_path(machine, device, dtype))
        same = shapes.get(_shape(model))
        best = same or _nearest(shapes, model.parameters)
        if best is not None:
            speeds[dtype] = Calibration(
                best.flops_per_second, best.basis, same_shape=same is not None, readings=best.readings
            )
    return speeds


def _nearest(shapes: dict[str, MeasuredRun], parameters: int | None) -> MeasuredRun | None:
    """The measured run of the model nearest in size. None if none is near enough, or the size is unknown."""
    if not parameters:
        return None
    apart = {key: abs(math.log(measured.parameters / parameters)) for key, measured in shapes.items()}
    nearest = min(apart, key=lambda key: apart[key], default=None)
    return shapes[nearest] if nearest is not None and apart[nearest] <= math.log(_SIMILAR) else None


def computing_seconds(model: ModelFacts, machine: MachineFacts, seconds: float, steps: Steps) -> float:
    """The part of the measured seconds of some optimizer steps that was spent computing. The estimated time of reading
    the weights and of AdamW is subtracted, and on a GPU also that of launching kernels, which large micro-batches hide.

    Because these times are estimates, at least a fifth of the seconds is left.
    """
    seconds, least = _without_memory(model, machine, seconds, steps), seconds / 5
    launches = sum(count * launch_seconds(model, step).low for count, step in steps)
    return max(math.sqrt(max(0.0, seconds**2 - launches**2)), least)


def read_seconds(model: ModelFacts, machine: MachineFacts, seconds: float, steps: Steps) -> tuple[Reading, ...]:
    """The two extreme explanations of the measured seconds of some optimizer steps on a GPU. Empty if the GPU's peak is
    unknown.

    A few seconds do not show whether the GPU computed or waited for kernel launches. If all of them counted as
    computing, an estimate from rows of 512 tokens would be up to ten times too long for four times as many tokens
    (bench/estimates). So the computing is bounded by the fastest and the slowest published speed, unless the seconds
    are too many for that."""
    flops = [count * (micro_step_flops(model, step) or 0) for count, step in steps]
    each = [gpu_seconds(model, step, machine, all_of) for all_of, (_, step) in zip(flops, steps, strict=True)]
    computing = sum(one or 0 for one in each)
    most = sum(count * launch_seconds(model, step).high for count, step in steps)
    if not (most and computing) or None in each:
        return ()
    slowest = computing_seconds(model, machine, seconds, steps)
    beside = sum(count * dequantizing_seconds(model, step, machine) for count, step in steps)
    seconds = max(_without_memory(model, machine, seconds, steps) - beside, seconds / 5)
    if seconds <= math.hypot(most, computing) * SPREAD:
        slowest = computing * SPREAD
    computing_only = math.sqrt(max(0.0, seconds**2 - (most * SPREAD) ** 2))  # launches take no longer than is assumed
    ends = (min(seconds, slowest), min(seconds, max(computing / SPREAD, computing_only)))
    return tuple(Reading(sum(flops) / end, math.sqrt(max(0.0, seconds**2 - end**2)) / most) for end in ends)


def _without_memory(model: ModelFacts, machine: MachineFacts, seconds: float, steps: Steps) -> float:
    memory = sum(
        count * reading_seconds(model, step, machine) + optimizer_seconds(model, step, machine) for count, step in steps
    )
    return max(seconds - memory, seconds / 5)


def _micro_steps(plan: Plan, line: StepLine) -> tuple[int, MicroStep]:
    """The number of micro-steps in one optimizer step, and one micro-step with the mean tokens of that step."""
    placement, tokens = plan.placement, line.tokens or 1
    step = replace(
        micro_step(plan.recipe, plan.facts.dataset, placement.device, placement.dtype),
        rows=placement.per_device_train_batch_size,
        length=max(1, round(tokens / plan.recipe.effective_batch_size)),
        checkpointing=placement.gradient_checkpointing,
        trained_share=(line.trained_tokens or 0) / tokens,
    )
    return placement.gradient_accumulation_steps, step


def _shape(model: ModelFacts) -> str:
    values = asdict(model)
    return json.dumps([values[k] for k in ("model_type", "layers", "hidden_size", "intermediate_size", "vocab_size")])


def _path(machine: MachineFacts, device: str, dtype: str) -> Path:
    return cache_file("calibration", machine.system, machine.chip, machine.cores, device, dtype)


def _read(path: Path) -> dict[str, MeasuredRun]:
    """The measured runs in a cache file, by model shape. Empty if the file is missing or broken."""
    try:
        shapes = records.read(path, _Cache).shapes
    except (OSError, UsageError):
        return {}
    return {key: run for key, run in shapes.items() if all(each.speed > 0 <= each.launches for each in run.readings)}
