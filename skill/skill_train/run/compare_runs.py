"""Compares two runs fact by fact: the recipe, which must be equal, and the placement, which may differ.

A fact is a value under a dotted name, such as `trainer.learning_rate`. Only the facts that are listed here as placement
may differ. Every other fact belongs to the recipe, even if its name is unknown, so that no difference is overlooked.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from msgspec import UNSET, structs

from skill_train.run import export_record, plan_record, train_record
from skill_train.run.export_record import ExportedFile
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import Environment, FedData, FedRow, StepLine, TrainRecord

# Arguments of transformers' and TRL's trainer that may differ (transformers 5.23, trl 1.16): they decide where and in
# which pieces the same rows are computed, and what is written, shown or uploaded meanwhile.
PLACEMENT_ARGUMENTS = {
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "tf32",
    "bf16_full_eval", "fp16_full_eval", "use_cpu", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "activation_offloading", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "parallelism_config", "local_rank",
    "fsdp", "fsdp_config", "deepspeed", "ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_static_graph",
    "ddp_find_unused_parameters", "ddp_broadcast_buffers", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "dataset_num_proc", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_use_gather_object",
    "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "log_level", "log_level_replica",
    "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "include_num_input_tokens_seen", "skip_memory_metrics", "save_strategy", "save_steps",
    "save_on_each_node", "save_only_model", "save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_token",
    "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
}  # fmt: skip
PLACEMENT_OF: dict[str, set[str]] = {
    "trainer": PLACEMENT_ARGUMENTS,
    # PEFT 0.21. The recipe and its fingerprint cover the names of the base. The version is a fact of its own.
    "lora": {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "runtime_config"},
    "optimizer": {"foreach", "fused", "capturable", "differentiable"},  # ways to compute AdamW in torch
    "model": {"dtype", "attn_implementation"},
    "versions": {"numpy", "safetensors", "torch_build"},
}
# Sections that are placement as a whole.
PLACEMENT_SECTIONS = {"placement", "launch", "machine", "processes", "policy"}
ABSENT = "(absent)"
_NAMED_MATRICES = 5  # matrices of different types that are named for two mixes
_MACHINE = ("python", "platform", "device", "device_name", "cuda", "threads")


@dataclass(frozen=True)
class ComparedRun:
    """The files of a run that are compared; None or empty for a missing file."""

    # plan, environment, train: `plan.json`, `environment.json`, `train.json`
    plan: Plan
    environment: Environment | None = None
    train: TrainRecord | None = None
    # metrics, samples: the lines of `metrics.jsonl` and of `samples.jsonl`
    metrics: list[StepLine] = field(default_factory=list)
    samples: list[FedRow] = field(default_factory=list)
    quantized: list[ExportedFile] = field(default_factory=list)  # the files that `quantize.json` names


@dataclass(frozen=True)
class RunDifference:
    fact: str
    a: Any
    b: Any


class Losses(TypedDict):
    """The differences of the losses at the common steps. `at_step` is None if the losses are equal."""

    steps: int
    equal: bool
    largest_difference: float
    at_step: int | None


@dataclass(frozen=True)
class Comparison:
    # recipe, placement: the differences of each group
    recipe: list[RunDifference]
    placement: list[RunDifference]
    not_compared: list[str]  # facts that are not recorded in both runs, each with the reason
    compared: int  # how many facts were compared
    losses: Losses | None  # None if the runs share no step
    same_weights: bool | None  # whether the trained weights are the same bytes; None if one run has none
    # the differences of the quantized files; empty if one run has none
    exports: list[RunDifference] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`different`, `same`, or `incomplete`: no difference, but a record is missing."""
        return "different" if self.recipe else "incomplete" if self.not_compared else "same"

    @property
    def unexplained(self) -> bool:
        """Whether the weights differ although no difference of the runs could change a number."""
        sections = {each.fact.split(".")[0] for each in self.placement}
        return self.same_weights is False and not self.recipe and sections <= {"recipe", "trainer", "policy", "launch"}


def read_run(run: RunDir) -> ComparedRun:
    """The files of a run directory.

    Raises:
        UsageError: a file is not as its step wrote it.
    """
    train = run.record("train")
    return ComparedRun(
        plan=plan_record.read(run.plan),
        environment=train_record.read_environment(run.record("environment")),
        train=train_record.read(train) if train.is_file() else None,
        metrics=train_record.read_steps(run.metrics),
        samples=train_record.read_fed_rows(run.samples),
        quantized=list(export_record.outputs(run.path, "quantize").values()),
    )


def compare(a: ComparedRun, b: ComparedRun) -> Comparison:
    left, right = _sections(a, b), _sections(b, a)
    differences: list[RunDifference] = []
    missing: list[str] = []
    compared = 0
    for name in left:
        here, there = left[name], right[name]
        if name == "base_weights" and here is None and there is None:
            continue  # earlier versions did not record it
        if here is None or there is None:
            missing.append(_missing(name, here, there))
            continue
        compared += len(here | there)
        differences += [RunDifference(n, here.get(n, ABSENT), there.get(n, ABSENT)) for n in here | there]
    differences = [each for each in differences if each.a != each.b] + _rows(a, b) + _steps(a, b)
    losses, weights = _losses(a, b), (_weights(a), _weights(b))
    missing += [] if losses else [_missing("losses", a.metrics or None, b.metrics or None)]
    missing += [] if all(weights) else [_missing("trained weights", *weights)]
    if len(a.samples) != len(b.samples):
        missing.append(f"samples: run A has {len(a.samples)} rows, run B {len(b.samples)}")
    return Comparison(
        recipe=[each for each in differences if not is_placement(each.fact)],
        placement=[each for each in differences if is_placement(each.fact)],
        not_compared=missing + _other_steps(a, b),
        compared=compared,
        losses=losses,
        same_weights=weights[0] == weights[1] if all(weights) else None,
        exports=_exports(a, b),
    )


def is_placement(fact: str) -> bool:
    """Whether a fact may differ between two runs of one recipe."""
    section, _, name = fact.partition(".")
    if section in PLACEMENT_SECTIONS or fact in ("recipe.model.path", "recipe.data.path"):
        return True
    words = name.split(".")
    argument = words[-1] if section == "optimizer" else words[0]  # optimizer.groups.0.foreach
    return argument in PLACEMENT_OF.get(section, set())


def _sections(run: ComparedRun, other: ComparedRun) -> dict[str, dict[str, object] | None]:
    """The facts by section, in reading order; None for a section without a record."""
    environment, plan = run.environment or Environment(), run.plan
    machine = {name: getattr(environment, name) for name in _MACHINE}
    recorded: dict[str, Mapping[str, object] | None] = {
        "recipe": _recipe(plan, other.plan),
        "program": environment.program,
        "versions": _versions(environment.versions),
        "data": _data(environment.data),
        "trainer": environment.trainer,
        "lora": None if environment.lora is UNSET else environment.lora or {},  # null: the model has no adapter
        "optimizer": environment.optimizer,
        "schedule": environment.schedule,
        "model": environment.model,
        "base_weights": environment.base_weights,
        "processes": environment.processes,
        "placement": structs.asdict(plan.placement),
        "launch": {"flavor": plan.flavor, "arguments": plan.launch.arguments, "environment": plan.launch.environment},
        "policy": structs.asdict(plan.policy),
        "machine": machine if any(value is not None for value in machine.values()) else None,
    }
    return {name: None if values is None else dict(_flat(name, values)) for name, values in recorded.items()}


def _recipe(plan: Plan, other: Plan) -> dict[str, object]:
    """The facts of the recipe. If both runs have a fingerprint of the model or the data, its content is compared, and
    its path is placement."""
    values: dict[str, object] = {"hash": plan.recipe_hash, **plan.recipe.as_dict()}
    for key in ("model", "data"):
        here, there = plan.fingerprints.get(key), other.fingerprints.get(key)
        if here and there:
            values[key] = {"sha256": here, "path": values[key]}
    return values


def _versions(versions: dict[str, str | None] | None) -> dict[str, str | None] | None:
    """The versions, with torch's build (`+cpu`, `+cu130`) as a separate fact, because it depends on the device."""
    if versions is None:
        return None
    torch, _, build = (versions.get("torch") or "").partition("+")
    return {**versions, "torch": torch, "torch_build": build}


def _data(data: FedData | None) -> Mapping[str, object] | None:
    """The facts of the data. The first batches get numbers, so that a difference names its batch."""
    batches = (data or {}).get("first_batches")
    if data is None or not isinstance(batches, list):
        return data
    return {**data, "first_batches": {str(n): each for n, each in enumerate(batches, start=1)}}


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The values by their dotted names. A list of plain values is one value."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(position): item for position, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(name, value)
        else:
            yield name, value


def _missing(name: str, a: Any, b: Any) -> str:
    who = "neither run" if a is None and b is None else "only run B" if a is None else "only run A"
    return f"{name}: {who} has a record"


def _rows(a: ComparedRun, b: ComparedRun) -> list[RunDifference]:
    """The difference of the first recorded rows that differ. The fact has the row's number in the dataset."""
    for row, other_row in zip(a.samples, b.samples, strict=False):
        if row["row"] != other_row["row"]:
            return [RunDifference("samples.row", row["row"], other_row["row"])]
        fed = (("input_ids", row["input_ids"], other_row["input_ids"]), ("labels", row["labels"], other_row["labels"]))
        for name, here, there in fed:
            if here != there:
                pairs = itertools.zip_longest(here, there)
                start = next(position for position, (x, y) in enumerate(pairs) if x != y)
                fact = f"samples.row {row['row']}.{name} from {start}"
                return [RunDifference(fact, here[start : start + 6], there[start : start + 6])]
    return []


def _steps(a: ComparedRun, b: ComparedRun) -> list[RunDifference]:
    """The first step that differs in its tokens, its trained tokens and its learning rate."""
    differences = []
    for name in ("tokens", "trained_tokens", "learning_rate"):
        pairs = ((x.step, getattr(x, name), getattr(y, name)) for x, y in _pairs(a, b))
        first = next((pair for pair in pairs if pair[1] != pair[2]), None)
        if first is not None:
            differences.append(RunDifference(f"step {first[0]}.{name}", *first[1:]))
    return differences


def _other_steps(a: ComparedRun, b: ComparedRun) -> list[str]:
    """The steps, or losses, that only one run has. A run that has not ended, or that failed, has fewer steps. A loss
    that was no number has no record."""
    missing = [
        _missing(f"loss of step {x.step}", x.loss, y.loss)
        for x, y in _pairs(a, b)
        if (x.loss is None) != (y.loss is None)
    ][:1]
    counts = len(a.metrics), len(b.metrics)
    if all(counts) and counts[0] != counts[1]:
        missing.append(f"steps after {min(counts)}: only run {'A' if counts[0] > counts[1] else 'B'} has a record")
    return missing


def _losses(a: ComparedRun, b: ComparedRun) -> Losses | None:
    """The distance of the losses. It is reported and not judged: losses are results, not part of the recipe."""
    pairs = [(line.step, line.loss, other_line.loss) for line, other_line in _pairs(a, b)]
    far = [(abs(x - y), step) for step, x, y in pairs if x is not None and y is not None]
    if not far:
        return None
    largest, step = max(far)
    return {
        "steps": len(far), "equal": not largest, "largest_difference": largest, "at_step": step if largest else None,
    }  # fmt: skip


def _pairs(a: ComparedRun, b: ComparedRun) -> list[tuple[StepLine, StepLine]]:
    others = {line.step: line for line in b.metrics}
    return [(line, others[line.step]) for line in a.metrics if line.step in others]


def _weights(run: ComparedRun) -> dict[str, str] | None:
    """Digests of the trained weights, without the configuration beside them, which contains the path of the base."""
    outputs = run.train.outputs if run.train else {}
    return {name: each["sha256"] for name, each in outputs.items() if name.endswith(".safetensors")} or None


def _exports(a: ComparedRun, b: ComparedRun) -> list[RunDifference]:
    """The differences of the quantized files, by type. Like the losses, they are reported and not judged."""
    if not a.quantized or not b.quantized:
        return []
    left, right = ({file["quant"]: file for file in run.quantized} for run in (a, b))
    differences = []
    for quant in left | right:
        if quant not in left or quant not in right:
            sizes = [f"{files[quant]['bytes']} bytes" if quant in files else ABSENT for files in (left, right)]
            differences.append(RunDifference(f"export.{quant}", *sizes))
            continue
        here, there = _export_facts(left[quant]), _export_facts(right[quant])
        pairs = [(name, here.get(name, ABSENT), there.get(name, ABSENT)) for name in here | there]
        pairs += _other_types(left[quant].get("tensor_types", {}), right[quant].get("tensor_types", {}))
        differences += [RunDifference(f"export.{quant}.{name}", x, y) for name, x, y in pairs if x != y]
    return differences


def _export_facts(file: ExportedFile) -> dict[str, object]:
    """What was chosen and measured for a quantized file. A file without an importance matrix has fewer facts."""
    facts: dict[str, object] = {"sha256": file["sha256"]}
    if use := file.get("imatrix"):
        facts |= {"imatrix.data": use["data"], "imatrix.sha256": use["sha256"]}
    if choice := file.get("choice"):
        facts["choice.kl_with_matrix"] = choice["with_matrix"]["mean_kl"]
        facts["choice.kl_without_matrix"] = choice["without_matrix"]["mean_kl"]
    if measured := file.get("measured"):
        facts["mean_kl"] = measured["mean_kl"]
    if "mix" in file:
        facts["types"] = ", ".join(f"{count} {kind}" for kind, count in sorted(file.get("types", {}).items()))
    return facts


def _other_types(here: dict[str, str], there: dict[str, str]) -> list[tuple[str, str, str]]:
    """The first matrices that two mixes store in different types."""
    pairs = ((f"types.{name}", here.get(name, ABSENT), there.get(name, ABSENT)) for name in here | there)
    return [pair for pair in pairs if pair[1] != pair[2]][:_NAMED_MATRICES]
