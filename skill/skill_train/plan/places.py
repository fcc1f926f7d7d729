"""The places where a recipe could train, this machine and every flavor, each with its fit, time and price. Pure."""

import math

import msgspec
from msgspec.structs import replace

from skill_train.core.errors import DecisionNeeded
from skill_train.core.program_events import Probed
from skill_train.core.units import bill, dollars, gigabytes, size
from skill_train.estimate.artifacts import disk_bytes, job_disk_bytes
from skill_train.estimate.step import BYTES, Part, Range, total
from skill_train.estimate.time import Schedule, training_seconds
from skill_train.estimate.trained import trained_bytes
from skill_train.facts import Calibration, Flavor, Gpu, MachineFacts, ModelFacts
from skill_train.plan.placement import HEADROOM, Choices, Fit, Workload, fit, has_device, precision
from skill_train.recipe.resolved import ResolvedRecipe

# Compute capability and NVLink by the names of the Jobs API. Sources: NVIDIA's list of CUDA GPUs; hub-docs,
# jobs-configuration.
_CAPABILITY = {"T4": 7.5, "A10G": 8.6, "L4": 8.9, "L40S": 8.9, "A100": 8.0, "H100": 9.0, "H200": 9.0, "RTX": 12.0}
_NVLINK = ("A100", "H100", "H200")
# Seconds to start a job's container: the pull, the installation of torch and the rest by `uv`, and the first imports.
# We found no published measurement, so this is a guess until we measure our own jobs.
_START_SECONDS = (60.0, 300.0)
# Host memory of a process on a GPU, without the weights: 0.46 to 0.7 GB for imports (estimate/memory.py), and 1.9 to
# 2.1 GB to start CUDA (pytorch#12873, pytorch#113326).
_PROCESS_BYTES = 3e9
QUANTS = ("q8_0", "q4_k_m")
CLOUD_PROCESSOR = "a cloud processor"


class Candidate(msgspec.Struct, frozen=True):
    """A place to train."""

    machine: MachineFacts
    flavor: Flavor | None  # the flavor; None for this machine
    dtype: str
    dtype_because: str
    fit: Fit
    time: tuple[Part, ...]
    seconds: Range | None
    cost: Range | None
    problems: tuple[tuple[str, str], ...]  # why the place cannot be used, as `(code, message)`
    unknown: dict[str, str]  # why a figure is None

    @property
    def name(self) -> str:
        return self.flavor.name if self.flavor else "this machine"


def local_candidate(
    workload: Workload,
    machine: MachineFacts,
    choices: Choices,
    probe: Probed | None,
    calibrations: dict[str, Calibration],
) -> Candidate:
    """This machine as a place to train.

    Raises:
        DecisionNeeded: the requested precision is not safe on it.
    """
    device = choices.device or machine.device
    refused: tuple[tuple[str, str], ...] = ()
    try:
        dtype, because = precision(device, machine, choices, probe, workload.model)
    except DecisionNeeded as error:
        if not workload.recipe.pure_bf16:
            raise
        dtype, because = "bfloat16", "pure_bf16"  # set by the recipe, which may train elsewhere
        refused = ((error.code, str(error)),)
    if not has_device(machine, device):
        refused += (("device_unavailable", f"no {device} device was found on this machine, {machine.chip}"),)
    candidate = _candidate(workload, machine, None, device, (dtype, because), calibrations.get(dtype))
    return replace(candidate, problems=candidate.problems + refused)


def flavors(workload: Workload, offered: tuple[Flavor, ...], choices: Choices) -> list[Candidate]:
    """Every GPU flavor. A flavor without a GPU is included only if it is named, because the speed of its processors is
    unknown."""
    candidates = []
    for flavor in offered:
        if flavor.gpu is None and flavor.name != choices.flavor:
            continue
        machine = machine_of(flavor)
        if flavor.gpu is not None and workload.recipe.pure_bf16 and (machine.compute_capability or 0) < 8.0:
            continue  # a GPU older than Ampere has no bf16
        try:
            without_device = Choices(dtype=choices.dtype, force=choices.force)
            kind = precision(machine.device, machine, without_device, None, workload.model)
        except DecisionNeeded:
            continue
        candidates.append(_candidate(workload, machine, flavor, machine.device, kind, None))
    return candidates


def machine_of(flavor: Flavor) -> MachineFacts:
    name = f"NVIDIA {flavor.gpu}" if flavor.gpu else CLOUD_PROCESSOR
    capability = next((value for key, value in _CAPABILITY.items() if key in (flavor.gpu or "").split()), None)
    memory = flavor.gpu_memory_bytes or 0
    nvlink = any(key in name for key in _NVLINK) if flavor.gpus > 1 else None
    return MachineFacts(
        system="Linux",
        chip=name,
        device="cuda" if flavor.gpu else "cpu",
        memory_bytes=memory if flavor.gpu else flavor.ram_bytes,
        available_bytes=None,
        compute_capability=capability,
        cores=flavor.cores,
        bf16_matrix=False,
        gpus=(Gpu(name, memory, None, capability, nvlink),) * flavor.gpus if flavor.gpu else (),
        ram_bytes=flavor.ram_bytes,
        disk_free_bytes=flavor.disk_bytes,
    )


def cheapest(candidates: list[Candidate], max_hours: float) -> Candidate | None:
    """The cheapest place that fits and ends in time by its upper estimate, or the fastest that fits if none ends in
    time. A place that keeps weights in host memory is used only if nothing else fits."""
    usable = [c for c in candidates if not c.problems and c.seconds is not None and c.cost is not None]
    usable = [c for c in usable if not c.fit.step.offload] or usable
    in_time = [c for c in usable if in_hours(c, max_hours)]
    if in_time:
        return min(in_time, key=by_price)
    return min(usable, key=lambda candidate: by_price(candidate)[1:], default=None)


def by_price(candidate: Candidate) -> tuple[float, float, str]:
    """The middles of cost and time, and the name, so that the same facts give the same plan."""
    cost, seconds = (math.inf if each is None else each.middle for each in (candidate.cost, candidate.seconds))
    return cost, seconds, candidate.name


def in_hours(candidate: Candidate, max_hours: float) -> bool:
    return candidate.seconds is not None and candidate.seconds.high <= max_hours * 3600


def timeout_seconds(seconds: Range | None, max_hours: float) -> int:
    """The time after which a job is stopped: the upper estimate, which includes loading and installation, plus a
    quarter of it, plus ten minutes for saving and uploading. Without an estimate it is the longest accepted run. It is
    rounded to whole minutes, because jobs are billed by the minute."""
    most = max_hours * 3600 if seconds is None else seconds.high * 1.25 + 600
    return math.ceil(most / 60) * 60


def _candidate(
    workload: Workload,
    machine: MachineFacts,
    flavor: Flavor | None,
    device: str,
    kind: tuple[str, str],
    calibration: Calibration | None,
) -> Candidate:
    model, chosen = workload.model, fit(workload, machine, device, kind[0])
    parts = training_seconds(model, chosen.step, machine, _schedule(workload, chosen, flavor), calibration)
    seconds = None if parts is None else total(parts, parts[-1].because)
    cost = None
    if flavor is not None and seconds is not None:
        basis = f"{dollars(flavor.usd_per_hour)} an hour, price of {flavor.read_at}"
        cost = Range(bill(seconds.low, flavor.usd_per_hour), bill(seconds.high, flavor.usd_per_hour), basis)
    unknown = dict(machine.unknown)
    if seconds is None:
        unknown["seconds"] = _why_no_time(model, machine, device)
    problems = tuple(_problems(workload.recipe, model, machine, flavor, device, chosen))
    return Candidate(machine, flavor, *kind, chosen, tuple(parts or ()), seconds, cost, problems, unknown)


def _schedule(workload: Workload, chosen: Fit, flavor: Flavor | None) -> Schedule:
    recipe, model, dataset = workload.recipe, workload.model, workload.dataset
    longest = float(recipe.max_length)
    tokens = dataset.tokens
    mean = (0.1 * longest, longest) if tokens is None else tokens.mean_cut
    return Schedule(
        steps=recipe.max_steps,
        accumulation=chosen.accumulation,
        row_tokens=(min(mean[0], longest), min(mean[1], longest)),
        rows=dataset.rows,
        local_weights=flavor is None and (model.at_hand or model.revision is None),
        start_seconds=_START_SECONDS if flavor else (0, 0),
    )


def _why_no_time(model: ModelFacts, machine: MachineFacts, device: str) -> str:
    missing = [name for name in ("parameters", "layers", "hidden_size", "vocab_size") if not getattr(model, name)]
    if missing:
        why = [f"{name}: {model.unknown.get(name, 'unknown')}" for name in missing]
        return "the model's shape is unknown: " + "; ".join(why)
    if machine.chip == CLOUD_PROCESSOR:
        return "nothing tells how fast the processors of this flavor are"
    if not has_device(machine, device):
        return f"how fast it would be is unknown: no {device} device was found here"
    if device == "cpu":
        return "the processor's clock or its vector unit is unknown; a short run here measures it"
    return f"no published speed of {machine.chip} is known; a short run here measures it"


def _problems(
    recipe: ResolvedRecipe, model: ModelFacts, machine: MachineFacts, flavor: Flavor | None, device: str, chosen: Fit
) -> list[tuple[str, str]]:
    problems = []
    if machine.intel_mac or machine.rosetta:
        problems.append(("no_torch", machine.unknown.get("device", "torch has no build for Intel processors on a Mac")))
    if recipe.load_in_4bit and device != "cuda":
        problems.append(
            ("needs_cuda", f"load_in_4bit needs CUDA (bitsandbytes); {machine.chip} would train on {device}")
        )
    if chosen.fits is False and chosen.memory is not None and chosen.usable_bytes is not None:
        need, have = chosen.memory.high / 1e9, chosen.usable_bytes / 1e9
        problems.append(("no_memory", f"needs up to {need:.1f} GB, {have:.1f} GB can be used on {machine.chip}"))
    host, ram = _host_bytes(model, chosen) if flavor and device == "cuda" else None, machine.ram_bytes
    if host is not None and ram is not None and host > ram * HEADROOM["cpu"]:
        room = f"{ram * HEADROOM['cpu'] / 1e9:.1f} of {gigabytes(ram, 0)} can be used"
        problems.append(("no_host_ram", f"reading the weights needs {gigabytes(host)} of host memory, {room}"))
    trained = trained_bytes(model, chosen.step) if chosen.step.full else 0
    whole, free = disk_bytes(model, QUANTS, trained), machine.disk_free_bytes
    disk = job_disk_bytes(model, trained) if flavor else whole.low if whole else None
    if disk is not None and free is not None and disk > free:
        writer = "the job" if flavor else "the run"
        problems.append(("no_disk", f"{writer} writes {size(disk)}, {size(free)} are free"))
    return problems


def _host_bytes(model: ModelFacts, chosen: Fit) -> float | None:
    """Host memory of a job that trains on GPUs. Each process reads the weights into host memory, in the type that it
    keeps them in, before it moves them to its GPU. With `fsdp` only the first process reads them (plan/launch_args.py
    sets this). Offloaded weights are in host memory at the same time (accelerate's fsdp_utils.py frees the first copy
    last), with gradients and moments if they train. A 4-bit base is moved to the GPU weight by weight
    (transformers#27708: 7B with the 12.7 GB of a Colab). Nothing is merged in a job."""
    if not model.parameters:
        return None
    step, readers = chosen.step, 1 if chosen.strategy == "fsdp" else chosen.processes
    each = 4.0 if step.full and not step.pure_bf16 else 0.0 if step.four_bit else float(BYTES[step.dtype])
    most = readers * each
    if step.offload:
        most = max(2 * each, 4 * each if step.full else 0.0)
    return _PROCESS_BYTES * chosen.processes + most * model.parameters
