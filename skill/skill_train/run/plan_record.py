"""`plan.json`: the plan of a run."""

import re
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.files import write_json
from skill_train.facts import DatasetFacts, MachineFacts, ModelFacts
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.records import broken, convert, read_json, shortened

SCHEMA = "skill-train/plan/1"
Number = int | float

# Arguments of `accelerate launch`, as plan/launch_args writes them.
_ARGUMENTS = re.compile(
    r"(?:--(?:multi_gpu|use_fsdp|cpu) |--(?:num_\w+|machine_rank|main_process_port|gpu_ids|mixed_precision|"
    r"dynamo_backend|fsdp_\w+) [\w.,:]+ )*"
)
# No other variables are allowed: some variables of NCCL and OpenMP name libraries to load.
_VARIABLES = {
    "PET_SHUTDOWN_TIMEOUT": r"\d{1,6}", "NCCL_DEBUG": r"VERSION|WARN|INFO", "NCCL_ALGO": r"Ring|Tree",
    "NCCL_BUFFSIZE": r"\d{1,12}", "NCCL_IB_DISABLE": r"[01]", "NCCL_P2P_DISABLE": r"[01]",
}  # fmt: skip


class Reason(msgspec.Struct, frozen=True):
    """The reason for a value, and the source of the rule."""

    rule: str
    value: str
    because: str
    source: str


class Blocker(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reason why the plan cannot run. `hint` says what to do, if `code` is not enough to know it."""

    code: str
    message: str
    hint: str | None = None


class Estimate(msgspec.Struct, frozen=True):
    """A range from `low` to `high`, in the unit of the field's name; None if unknown. `basis` is the source of the
    estimate, or the reason why it is unknown."""

    low: Number | None
    high: Number | None
    basis: str


class EstimatePart(msgspec.Struct, frozen=True):
    name: str
    low: Number
    high: Number
    because: str


class FileEstimate(msgspec.Struct, frozen=True):
    """One GGUF file: its size, the memory to run it, and its speed on this machine."""

    quant: str
    bytes: Estimate
    memory_bytes: Estimate
    tokens_per_second: Estimate


class Offer(msgspec.Struct, frozen=True):
    """A flavor that could train the plan: `[low, high]` seconds and dollars."""

    flavor: str
    seconds: list[Number | None]
    cost_usd: list[Number | None]


class Prices(msgspec.Struct, frozen=True):
    """The source of the prices, and their date."""

    source: str
    read_at: str


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes, seconds and dollars that the plan needs."""

    memory_bytes: Estimate
    memory_parts: list[EstimatePart] = []
    usable_bytes: Number | None = None  # the part of the device's memory that training may use
    seconds: Estimate
    seconds_parts: list[EstimatePart] = []
    cost_usd: Estimate
    # None if every weight trains, if adapters lie on the vision part, or if the width of a target is unknown
    adapter_parameters: int | None = None
    merge_bytes: Estimate
    convert_bytes: Estimate
    verify_bytes: Estimate
    disk_bytes: Estimate
    files: list[FileEstimate] = []  # one for each GGUF type
    flavors: list[Offer] = []
    prices: Prices | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where and in which pieces the recipe is computed. Two placements of one recipe train the same model."""

    backend: str  # `local`, `hf_jobs`, `skypilot` or `colab`
    device: str
    dtype: str
    attn_implementation: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_processes: int
    strategy: str
    offload: bool
    gradient_checkpointing: bool
    threads: int | None  # on a CPU; None on a GPU
    save_steps: int  # steps between two checkpoints
    save_total_limit: int
    report_to: str


class Launch(msgspec.Struct, frozen=True):
    """Arguments of `accelerate launch` and variables of the environment; both empty for one process."""

    arguments: list[str] = []
    environment: dict[str, str] = {}
    reasons: list[Reason] = []


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of the user that do not affect the trained model."""

    sensitive: bool = False
    hub_model_id: str | None = None
    score: str | None = None
    score_pattern: str | None = None
    report_to: str = "none"


class Facts(msgspec.Struct, frozen=True):
    model: ModelFacts
    dataset: DatasetFacts
    machine: MachineFacts


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a run begins."""

    schema: str = SCHEMA
    where: str  # `local` or `cloud`
    recipe: ResolvedRecipe
    recipe_hash: str
    fingerprints: dict[str, str | None]  # of `model` and `data`; None for a model or dataset on the Hub
    asked: dict[str, object] = {}  # the user's own values that differ from the resolved recipe
    policy: Policy
    placement: Placement
    launch: Launch = Launch()
    # flavor, timeout_seconds: of the job; None for this machine
    flavor: str | None = None
    timeout_seconds: int | None = None
    blockers: list[Blocker] = []  # empty if the plan can run
    estimates: Estimates
    facts: Facts
    reasons: list[Reason] = []

    def recipe_file(self) -> dict[str, object]:
        """Keys and values of `recipe.yaml`."""
        return self.recipe.as_dict() | msgspec.structs.asdict(self.policy)

    def as_dict(self) -> dict[str, object]:
        document: dict[str, object] = msgspec.to_builtins(self)
        return document | {"recipe": self.recipe.as_dict()}


def read(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: the file is missing or not JSON, skill-train did not write it, or it would start another program.
    """
    return from_dict(read_json(path), path)


def from_dict(document: Any, path: Path) -> Plan:
    """The plan in a JSON document. Raises as `read`; the error names `path`."""
    plan = convert(document, Plan, path)
    if plan.schema != SCHEMA:
        raise broken(path, f"schema is {shortened(plan.schema)}, not {SCHEMA}")
    _check_launch(path, plan.launch)
    return plan


def write(path: Path, plan: Plan) -> None:
    write_json(path, plan.as_dict())


def _check_launch(path: Path, launch: Launch) -> None:
    """Checks that the arguments and variables of a plan start no other program and load no library."""
    words = launch.arguments
    if not _ARGUMENTS.fullmatch("".join(f"{word} " for word in words)) or any(" " in word for word in words):
        raise broken(path, f"launch.arguments has {shortened(' '.join(words))}, which starts something else")
    for name, value in launch.environment.items():
        if not re.fullmatch(_VARIABLES.get(name, r"(?!)"), value):
            raise broken(path, f"launch.environment sets {shortened(name)} to {shortened(value)}")
