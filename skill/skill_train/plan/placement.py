"""Where the steps of a recipe run on one machine: precision, rows at a time, checkpointing, processes. Pure.

The fields of a placement may differ between machines; the fields of the recipe may not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.program_events import Probed
from skill_train.core.units import gigabytes
from skill_train.estimate.memory import libraries, training_memory
from skill_train.estimate.published import proven_bytes
from skill_train.estimate.step import BYTES, MicroStep, Part, Range, total
from skill_train.estimate.time import micro_step_seconds, optimizer_seconds
from skill_train.facts import DatasetFacts, MachineFacts, ModelFacts
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.plan_record import Placement

PROBE_FROM_PARAMETERS = 100_000_000  # a pass of a smaller model is mostly overhead, and bf16 saves too little
PROBE_FASTER = 1.1
PROBE_LOSS_TOLERANCE = 0.005
_WORTH_IT = 1.3  # a split replaces the guide's if the estimate says that it is so many times as fast
# The share of the free memory that a run may use. The rest is for other programs and for what the estimate leaves out.
HEADROOM = {"cuda": 0.95, "mps": 0.90, "cpu": 0.90}


class Choices(msgspec.Struct, frozen=True):
    """The user's choices about the placement. None leaves a choice to the plan; `force` accepts risks."""

    device: str | None = None
    dtype: str | None = None
    force: bool = False
    where: str | None = None  # `local` or `cloud`; flavor: a flavor of Hugging Face Jobs
    flavor: str | None = None
    max_hours: float = 8.0  # the limit for a run, here or in the cloud
    # the reason for `where` if the user did not give --where: the command, or --flavor
    where_because: str | None = None


HERE = Choices(where="local", where_because="this command trains here")


class Fit(msgspec.Struct, frozen=True):
    """How a recipe fits into the memory of one machine."""

    step: MicroStep  # the longest micro-step
    accumulation: int
    processes: int  # one for each used GPU; strategy: `single`, `ddp` or `fsdp`
    strategy: str
    parts: tuple[Part, ...]  # the parts of one device's memory in bytes; `memory`: their sum
    memory: Range | None
    usable_bytes: int | None  # the memory that the device has for the run; None if it is unknown
    # whether the upper estimate is within `usable_bytes`, or a published run proves that it fits; None if one of both
    # numbers is unknown
    fits: bool | None
    # how much faster this split is than the guide's split that also fits, if it replaces that one
    quicker: str | None = None
    # the published run, and the memory that it proves to be enough, if the upper estimate alone does not fit
    proof: str | None = None


def with_precision(choices: Choices, *, pure_bf16: bool) -> Choices:
    """The choices with the precision that `pure_bf16` of the recipe implies.

    Raises:
        UsageError: another precision was requested.
    """
    if not pure_bf16 or choices.dtype == "bfloat16":
        return choices
    if choices.dtype is not None:
        raise UsageError(
            f"pure_bf16: true of the recipe and --dtype {choices.dtype} cannot be used together",
            code="bad_usage",
            expected="--dtype bfloat16, or none",
            got=choices.dtype,
            hint="omit --dtype, or remove pure_bf16 from the recipe",
        )
    return replace(choices, dtype="bfloat16")


def precision(
    device: str, machine: MachineFacts, choices: Choices, probe: Probed | None, model: ModelFacts
) -> tuple[str, str]:
    """`(dtype, reason)` for training on a device.

    Raises:
        DecisionNeeded: float16 on MPS or on a CPU, which ends in NaN; bfloat16 on MPS without a good probe.
    """
    dtype = choices.dtype
    if dtype == "bfloat16" and device == "mps" and not choices.force:
        return dtype, _mps_bf16(probe)
    if dtype == "float16" and device != "cuda" and not choices.force:
        raise DecisionNeeded(
            f"float16 training on {device} often ends with a NaN loss, because gradient scaling is not reliable there",
            code="unsafe_precision",
            expected="float32 (safe), or bfloat16 after a probe",
            got="float16",
            hint="skill-train local --dtype float32, or --force to take the risk",
        )
    if dtype is not None:
        return dtype, "asked for" + (", against the advice" if choices.force else "")
    if device == "cuda":
        capability = machine.compute_capability
        if capability is None:
            return "float32", "the GPU's compute capability is unknown, and float32 works on all"
        if capability >= 8.0:
            return "bfloat16", f"compute capability {capability} has bf16: the range of float32, no gradient scaling"
        if model.model_type.startswith("gemma"):
            return "float32", "Gemma's activations overflow float16, and a GPU older than Ampere has no bf16"
        return "float16", f"compute capability {capability} is older than Ampere: float16 with gradient scaling"
    if device == "mps":
        return "float32", "the safe default on MPS; --dtype bfloat16 on M2 or newer after a short trial"
    return _cpu_precision(machine, probe, model)


def _mps_bf16(probe: Probed | None) -> str:
    drift = _drift(probe) if probe else math.nan
    if not drift <= PROBE_LOSS_TOLERANCE:
        raise DecisionNeeded(
            "bfloat16 on MPS is used only if a probe on this machine gives the same loss as float32",
            code="unsafe_precision",
            expected=f"a loss at most {PROBE_LOSS_TOLERANCE:.1%} off",
            got=f"{drift:.2%} off" if probe else "the probe did not run",
            hint="skill-train local --dtype float32, or --force to take the risk",
        )
    return f"asked for, and the probe on this machine is {drift:.2%} off in the loss"


def _drift(probe: Probed) -> float:
    exact, rounded = probe["float32"]["loss"], probe["bfloat16"]["loss"]
    return math.nan if not exact or rounded is None else abs(rounded / exact - 1)


def _cpu_precision(machine: MachineFacts, probe: Probed | None, model: ModelFacts) -> tuple[str, str]:
    if not machine.bf16_matrix:
        return "float32", "this processor has no bf16 instructions"
    if probe is None and (model.parameters or 0) < PROBE_FROM_PARAMETERS:
        return "float32", "no probe was made: below 100M parameters bf16 saves little on a CPU"
    if probe is None:
        return "float32", "no probe was made yet: `skill-train local` times bf16 here before it trains"
    ratio = probe["float32"]["seconds"] / probe["bfloat16"]["seconds"]
    drift = _drift(probe)
    figures = f"probe: bf16 {ratio:.2f} times as fast, loss {drift:.2%} off"
    if ratio >= PROBE_FASTER and drift <= PROBE_LOSS_TOLERANCE:
        return "bfloat16", figures
    return "float32", figures + f" (needs {PROBE_FASTER} times and at most {PROBE_LOSS_TOLERANCE:.1%})"


# The most rows at a time by device memory, each up to a limit in 1e9 bytes, from the tables of the user's guide. A GPU
# has its own memory; a Mac shares its memory with all other programs.
_ROWS_AT_ONCE: dict[str, tuple[tuple[float, int], ...]] = {
    "mps": ((18, 1), (38, 2), (60, 4), (150, 8), (math.inf, 16)),
    "cuda": ((14, 1), (20, 2), (38, 4), (75, 8), (math.inf, 16)),
}


def has_device(machine: MachineFacts, device: str) -> bool:
    return device in (machine.device, "cpu")


def usable_bytes(machine: MachineFacts, device: str) -> int | None:
    """The memory that a run may use: a share of the memory that is free now, or of all memory on another machine. None
    for a GPU that was not found, because the main memory says nothing about it."""
    if not has_device(machine, device):
        return None
    free = machine.available_bytes if machine.available_bytes is not None else machine.memory_bytes
    if device == "cpu" and machine.device != "cpu":
        free = machine.ram_available_bytes if machine.ram_available_bytes is not None else machine.ram_bytes
    return None if free is None else int(free * HEADROOM[device])


@dataclass(frozen=True)
class Workload:
    """The recipe, the model and the data of a training. `counted` keeps the memory of steps for the next flavors."""

    recipe: ResolvedRecipe
    model: ModelFacts
    dataset: DatasetFacts
    counted: dict[MicroStep, list[Part] | None] = field(default_factory=dict, compare=False, repr=False)


def fit(workload: Workload, machine: MachineFacts, device: str, dtype: str) -> Fit:
    """The first layout that fits, in the order from fast to frugal, or a much faster one; the last if none fits."""
    model, dataset, usable = workload.model, workload.dataset, usable_bytes(machine, device)
    laid = [_laid(workload, usable, *way) for way in _ways(workload.recipe, model, dataset, machine, device, dtype)]
    fitting = [layout for layout in laid if layout.fits]
    if fitting:
        return _quickest(fitting, model, dataset, machine)
    careful = (layout for layout in laid if layout.fits is None and layout.step.checkpointing)  # nothing is known
    return next(careful, laid[-1])


def _laid(workload: Workload, usable: int | None, processes: int, strategy: str, step: MicroStep) -> Fit:
    if step not in workload.counted:
        workload.counted[step] = _parts(workload.model, workload.dataset, step)
    parts = workload.counted[step]
    memory = None if parts is None else total(parts, _basis(step))
    fits = None if memory is None or usable is None else memory.high <= usable
    proof = None if fits is not False else _proof(step, parts or [], usable or 0)
    accumulation = workload.recipe.effective_batch_size // (step.rows * processes)
    fits = fits if proof is None else True
    return Fit(step, accumulation, processes, strategy, tuple(parts or ()), memory, usable, fits, proof=proof)


def _proof(step: MicroStep, parts: list[Part], usable: int) -> str | None:
    """The published run which proves that a layout fits although its upper estimate does not."""
    proven = proven_bytes(step, parts) if step.device == "cuda" else None
    if proven is None or proven[0] > usable:
        return None
    return f"at most {gigabytes(proven[0])} by what was published of {proven[1]}"


def _quickest(fitting: list[Fit], model: ModelFacts, dataset: DatasetFacts, machine: MachineFacts) -> Fit:
    """The first layout, as in the guide's tables, or a much faster one on a GPU of known speed. Many rows at a time may
    need recomputation while fewer rows do not, and a model of billions keeps a GPU busy with few rows. Layouts that
    divide the weights are not compared, because speed is not their purpose."""
    first = fitting[0]
    if first.step.device != "cuda" or first.strategy == "fsdp":
        return first
    tokens = None if dataset.tokens is None else dataset.tokens.mean_cut[1]
    seconds = [
        (_step_seconds(layout, tokens, model, machine), layout)
        for layout in fitting
        if layout.strategy == first.strategy
    ]
    timed = [(each, layout) for each, layout in seconds if each is not None]
    if len(timed) < len(seconds):
        return first
    least, quickest = min(timed, key=lambda pair: pair[0])
    times = timed[0][0] / least
    if times <= _WORTH_IT:
        return first
    how = "with" if first.step.checkpointing else "without"
    return replace(quickest, quicker=f"about {times:.1f} times as quick as {split_of(first)} {how} checkpointing")


def split_of(laid: Fit) -> str:
    """Rows at a time, accumulation steps, and processes if there are several."""
    return f"{laid.step.rows} x {laid.accumulation}" + (f" x {laid.processes} processes" if laid.processes > 1 else "")


def _step_seconds(laid: Fit, tokens: float | None, model: ModelFacts, machine: MachineFacts) -> float | None:
    """The seconds of one optimizer step by the published figures, because a calibration has no small micro-steps. Rows
    count with their mean length. The padding is unknown, and would favour few rows."""
    length = laid.step.length if tokens is None else max(1, min(laid.step.length, math.ceil(tokens)))
    estimate = micro_step_seconds(model, replace(laid.step, length=length), machine, None)
    if estimate is None:
        return None
    middle = math.sqrt(estimate.low * estimate.high)  # the range is a middle times and by a factor
    return middle * laid.accumulation + optimizer_seconds(model, laid.step, machine)


def _ways(
    recipe: ResolvedRecipe, model: ModelFacts, dataset: DatasetFacts, machine: MachineFacts, device: str, dtype: str
) -> Iterator[tuple[int, str, MicroStep]]:
    """The layouts to try: many rows first, and without recomputation before with it. Weights are divided among GPUs
    only if one GPU cannot hold them, and stay in host memory only if nothing else fits. A 4-bit base is not divided."""
    effective = recipe.effective_batch_size
    gpus = len(machine.gpus) if device == "cuda" else 1
    processes = max(n for n in range(1, max(gpus, 1) + 1) if effective % n == 0)
    base = micro_step(recipe, dataset, device, dtype)
    rows = rows_at_once(effective // processes, device, machine, model)
    for count in (n for n in range(rows, 0, -1) if (effective // processes) % n == 0):
        for checkpointing in (False, True):
            yield (
                processes,
                "ddp" if processes > 1 else "single",
                replace(base, rows=count, checkpointing=checkpointing, accumulates=effective > count * processes),
            )
    if processes > 1 and not base.four_bit:
        for offload in (False, True)[: 1 + _host_holds(model, machine, base)]:
            frugal = replace(base, checkpointing=True, accumulates=effective > processes)
            yield processes, "fsdp", replace(frugal, shards=processes, offload=offload)


def micro_step(recipe: ResolvedRecipe, dataset: DatasetFacts, device: str, dtype: str) -> MicroStep:
    """A micro-step of the longest row alone, without recomputation."""
    tower, tokens, limit = _trains_part("tower", recipe), dataset.tokens, recipe.max_length
    share = tokens.trained_share if tokens else None
    return MicroStep(
        device=device,
        dtype=dtype,
        rows=1,
        length=min(limit, tokens.longest[1]) if tokens else limit,
        checkpointing=False,
        four_bit=recipe.load_in_4bit,
        full=recipe.is_full,
        pure_bf16=recipe.pure_bf16,
        optim=recipe.optim,
        modules_to_save=tuple(recipe.modules_to_save or ()),
        dora=recipe.use_dora,
        lora_r=recipe.lora_r,
        lora_dropout=recipe.lora_dropout,
        target_modules=tuple(recipe.target_modules),
        trained_share=1.0 if share is None else share,
        images=recipe.images,
        pictures=dataset.picture_tokens,
        tower_trains=tower,
        projector_trains=tower or _trains_part("projector", recipe),
    )


def _trains_part(part: str, recipe: ResolvedRecipe) -> bool:
    return recipe.images and (recipe.is_full or part in (recipe.lora_parts or ()))


def _host_holds(model: ModelFacts, machine: MachineFacts, step: MicroStep) -> bool:
    """Whether host memory can hold the weights, with gradients and moments if they are trained; False if unknown."""
    free = machine.ram_bytes if machine.ram_available_bytes is None else machine.ram_available_bytes
    each = BYTES[step.dtype] if not step.full else 8 if step.pure_bf16 else 16
    return free is not None and (model.parameters or 0) * each <= free * HEADROOM["cpu"]


def _parts(model: ModelFacts, dataset: DatasetFacts, step: MicroStep) -> list[Part] | None:
    """The parts of the memory: upper ends for the highest estimate of the longest row, lower ends for the lowest."""
    high = training_memory(model, step)
    short = min(step.length, dataset.tokens.longest[0]) if dataset.tokens else step.length
    low = training_memory(model, replace(step, length=max(1, short)))
    if high is None or low is None:
        return None
    floors = {part.name: part.low for part in low}
    parts = [replace(part, low=floors.get(part.name, 0.0)) for part in high]
    return [*parts, *libraries(step.device)]


# The kind of memory of each device.
_MEANT = {
    "cuda": "the process's on one GPU, as nvidia-smi shows it",
    "mps": "what Metal's driver holds, and the libraries' resident memory",
    "cpu": "resident memory of the process",
}


def _basis(step: MicroStep) -> str:
    checkpointing = "with" if step.checkpointing else "without"
    return f"{step.rows} x {step.length} tokens in {step.dtype}, {checkpointing} checkpointing; {_MEANT[step.device]}"


def rows_at_once(most: int, device: str, machine: MachineFacts, model: ModelFacts) -> int:
    """The most rows at a time, a divisor of `most`, from 1 at 8 to 16 GB to 16 at 80 GB. On CPUs small models take 8
    rows, because overhead dominates. Large models take 1 row, because padding would cost time."""
    if device == "cpu":
        rows_wanted = 8 if (model.parameters or PROBE_FROM_PARAMETERS) < PROBE_FROM_PARAMETERS else 1
    else:
        gigabytes = (machine.memory_bytes or 0) / 1e9
        rows_wanted = next(rows for limit, rows in _ROWS_AT_ONCE[device] if gigabytes < limit)
    return max(n for n in range(1, min(rows_wanted, most) + 1) if most % n == 0)


def placement(recipe: ResolvedRecipe, machine: MachineFacts, chosen: Fit, backend: str, report_to: str) -> Placement:
    """The placement in the form that the training program reads."""
    step = chosen.step
    return Placement(
        backend=backend,
        device=step.device,
        dtype=step.dtype,
        attn_implementation="sdpa",
        per_device_train_batch_size=step.rows,
        gradient_accumulation_steps=chosen.accumulation,
        num_processes=chosen.processes,
        strategy=chosen.strategy,
        offload=step.offload,
        gradient_checkpointing=step.checkpointing,
        threads=machine.cores if step.device == "cpu" else None,
        save_steps=max(1, min(200, math.ceil(recipe.max_steps / 4))),
        save_total_limit=2,
        report_to=report_to,
    )
