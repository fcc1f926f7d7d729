"""Prepares what `submit` sends: options, the plan for the cloud, the repository for the result, the run directory."""

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from skill_train.cloud import preflight, stage_data, submit
from skill_train.cloud.elsewhere import skypilot
from skill_train.cloud.submit import Order
from skill_train.commands._command import AGREED, DOLLARS, HOURS, PATH, Whole, argument, option, option_of, set_options
from skill_train.commands._of_hub import OF_HUB
from skill_train.commands._planning import (
    DEFAULT_HOURS,
    RECIPE_OPTIONS,
    RecipeFlags,
    flavor_option,
    load_recipe,
    mapping_in,
    plan_from_metadata,
)
from skill_train.core.console import Console
from skill_train.core.errors import UsageError, quoted
from skill_train.data.problems import PERSONAL
from skill_train.data.row_pictures import require_folders_of_a_repository
from skill_train.hub import flavors
from skill_train.hub.account import Account
from skill_train.model.folder import read_config
from skill_train.plan.ancestry import sensitive_run
from skill_train.plan.file import is_plan, read_unchanged_plan, require_same_recipe
from skill_train.plan.placement import Choices
from skill_train.plan.where import stays_here
from skill_train.recipe import fields
from skill_train.recipe.fields import Recipe
from skill_train.run import cloud_record, plan_record
from skill_train.run.earlier_start import has_begun
from skill_train.run.folder import RUNS, RunDir, open_run, way_to_model
from skill_train.run.plan_record import Plan


@dataclass(frozen=True)
class SubmitOptions(RecipeFlags):
    source: Path | None = argument(PATH, required=False, metavar="[RECIPE|PLAN|RUN]")
    flavor: str | None = flavor_option()
    timeout: str | None = option(None, "Time limit of the job: 90m, 2h, or seconds.  [default: above the estimate]")
    max_cost: float | None = option(
        None,
        "Most dollars that all jobs of the plan together may cost.  [default: none; --yes accepts the shown cost]",
        DOLLARS,
    )
    max_hours: float = option(DEFAULT_HOURS, "Longest acceptable run, in hours, when the flavor is chosen.", HOURS)
    namespace: str | None = option(None, "User or organisation that runs and pays for the job.  [default: you]")
    hub_model_id: str | None = option(
        None, "Repository for the result.  [default: NAMESPACE/<model>-<data>-<recipe hash>]"
    )
    data_repo: str | None = option(
        None, "Private dataset repository for local data.  [default: the bucket of the jobs]"
    )
    run_dir: Path | None = option(None, "Folder of the run.  [default: runs/<data>-<recipe hash>-cloud]", PATH)
    dry_run: bool = option(False, "Check everything and print the job; send nothing.")
    rehearse: bool = option(False, "Run two steps of the job on this machine, in a temporary folder; send nothing.")
    force_new: bool = option(False, "Start another job even if one of this plan is running or done.")
    backend: str = option(
        "hf_jobs",
        "Hugging Face Jobs, a SkyPilot task for other clouds, or a notebook for Google Colab.",
        ("hf_jobs", "skypilot", "colab"),
    )
    nodes: int = option(1, "Number of machines; skypilot only.", Whole(1, 1000))
    infra: str | None = option(
        None, "Clouds to look for machines, separated by commas; skypilot only.  [default: all suitable ones]"
    )
    yes: bool = option(False, "Accept the shown cost and uploads, and start the job.")
    agreed: float | None = option(None, AGREED, DOLLARS)

    @property
    def recipe_flags(self) -> dict[str, object]:
        return set_options(self, RECIPE_OPTIONS)


def command_of(options: SubmitOptions, **more: Any) -> str:
    words = ["skill-train submit", *([] if options.source is None else [quoted(options.source)])]
    for field in dataclasses.fields(options):
        if field.name == "source":
            continue
        value = more.get(field.name, getattr(options, field.name))
        option = option_of(field.name)
        if value is True:
            words.append(option)
        elif value not in (None, False, field.default):
            words += [option, quoted(str(value).removesuffix(".0") if isinstance(value, float) else str(value))]
    return " ".join(words)


# --- The plan ---


def given_plan(source: Path) -> Plan | None:
    """The plan in a file or a run directory; None for a recipe."""
    file = open_run(source).plan if source.is_dir() else source
    return plan_record.read(file) if is_plan(file) else None


def cloud_plan(console: Console, options: SubmitOptions) -> Plan:
    source = options.source
    file = open_run(source).plan if source is not None and source.is_dir() else source
    if file is None or not is_plan(file):
        with mapping_in(file):
            flags = options.recipe_flags | set_options(options, ("hub_model_id",))
            return _planned(console, options, load_recipe(file, flags))
    there, run = plan_record.read(file), RunDir(file.parent)
    if source is not None and source.is_dir() and (has_begun(run) or cloud_record.record_path(run).is_file()):
        require_same_recipe(run, there, f"skill-train submit {quoted(run.recipe)}")
    if there.where == "cloud":
        chosen = {"flavor": options.flavor, "dtype": options.dtype}
        plan = read_unchanged_plan(file, options.recipe_flags | chosen, where="cloud")
        _require_remote(plan.recipe.model, sensitive=plan.policy.sensitive, owner=options.namespace)
        return plan if options.backend == "skypilot" else _for_one_machine(plan, source or file)
    console.status(f"{source} is for this machine; its recipe is planned again, for the cloud")
    if options.recipe_flags:
        return _planned(console, options, _recipe_with(there, options.recipe_flags))
    with contextlib.suppress(UsageError):  # other data may have other columns
        plan = _planned(console, options, recipe_of(there))
        if plan.recipe_hash == there.recipe_hash:
            return replace(plan, asked=there.asked)
    plan = _planned(console, options, _recipe_with(there, {}))
    console.warn("another_recipe", f"the model or the data have changed since {source}, so this is not the same run")
    return plan


def _for_one_machine(plan: Plan, source: Path) -> Plan:
    """The plan of a SkyPilot task or a notebook, with the backend of Hub jobs again, so that its hash finds its job."""
    if (machines := skypilot.nodes_of(plan)) > 1:
        raise UsageError(
            f"{source} is a plan for {machines} machines, which only SkyPilot starts together",
            code="cloud_plan",
            expected="a plan for one machine",
            got=f"{plan.placement.num_processes} processes on {machines} machines of {plan.flavor}",
            hint=f"skill-train submit --backend skypilot {quoted(source)}",
        )
    return replace(plan, placement=replace(plan.placement, backend=cloud_record.BACKEND))


def _planned(console: Console, options: SubmitOptions, recipe: Recipe) -> Plan:
    _require_remote(recipe.model, sensitive=recipe.sensitive, owner=options.namespace)
    why = "this command sends a job"
    choices = Choices(
        dtype=options.dtype, where="cloud", where_because=why, flavor=options.flavor, max_hours=options.max_hours
    )
    return plan_from_metadata(console, recipe, choices)


def recipe_of(plan: Plan, **values: Any) -> Recipe:
    """The recipe of a plan, with all its decisions."""
    recipe_values = plan.recipe_file() | values
    return fields.from_dict({key: value for key, value in recipe_values.items() if key in fields.FIELDS})


def _recipe_with(there: Plan, flags: dict[str, object]) -> Recipe:
    """The recipe as the user wrote it, with changes. The planner chooses the other values again, and another model or
    dataset gets another revision."""
    gone = {name: None for key, names in OF_HUB.items() if key in flags for name in names}
    return recipe_of(there, **(there.asked | gone | flags))


def _require_remote(model: str, *, sensitive: bool, owner: str | None) -> None:
    """Refuses, before any request, a model or data that cannot or may not leave this machine."""
    base_of = sensitive_run(model)
    if sensitive or base_of:
        raise stays_here("submit", base_of)
    if Path(model).is_dir():
        if way_to_model(Path(model)):  # a run or an adapter is no model: read_config raises the error of `plan`
            read_config(Path(model))
        raise preflight.local_model_error(model, owner)


# --- The order ---


def order_of(options: SubmitOptions, plan: Plan, account: Account) -> Order:
    """The order: the plan with its repository and data, and the last known price. The checks get today's price."""
    place, of_job = account.name, options.backend == cloud_record.BACKEND
    if account.state == "valid":
        place = preflight.namespace(account, options.namespace, of_job=of_job)
    staged = stage_data.stage_plan(plan)
    if staged is not None:
        stage_data.require_no_secrets(staged)
        if options.data_repo is not None:
            require_folders_of_a_repository(Path(plan.recipe.data), sorted(staged.pictures))
    price = flavors.usd_per_hour(plan.flavor)
    return Order(with_repository(plan, options, place), place, price, staged, options.data_repo, options.max_cost)


def warn_of_personal(console: Console, order: Order) -> None:
    """Warns of personal data in the rows, as `data` does, before the user agrees to an upload."""
    count = 0 if order.staged is None else stage_data.personal_lines(order.staged)
    if count:
        seem = "1 line of the data seems" if count == 1 else f"{count} lines of the data seem"
        named = f"skill-train data {quoted(order.plan.recipe.data)} names them"
        keep = "sensitive: true in the recipe keeps them on this machine"
        console.warn("personal_data", f"{seem} to contain {PERSONAL}, and would leave this machine: {named}; {keep}")


def with_repository(plan: Plan, options: SubmitOptions, place: str) -> Plan:
    repository = options.hub_model_id or plan.policy.hub_model_id
    return replace(plan, policy=replace(plan.policy, hub_model_id=repository or _repository(plan, place)))


def _repository(plan: Plan, place: str) -> str:
    """`NAMESPACE/<model>-<data>-<recipe hash>`, in 96 characters at most (huggingface_hub 2.4, validate_repo_id)."""
    words = [_slug(plan.recipe.model.split("/")[-1]), _slug(_data_name(plan))]
    name = "-".join((*words, plan.recipe_hash[:8]))
    return f"{place}/{name[-(96 - len(place) - 1) :].strip('-.')}"


def _belongs_to(run: RunDir, backend: str) -> bool:
    """Whether a run directory holds a run that was submitted to this backend."""
    if backend == cloud_record.BACKEND:
        return cloud_record.record_path(run).is_file()
    return run.plan.is_file() and plan_record.read(run.plan).placement.backend == backend


def _data_name(plan: Plan) -> str:
    data = plan.recipe.data
    return Path(data).stem if preflight.local_data(plan) else data.split("/")[-1]


def _slug(text: str) -> str:
    """A text reduced to the characters that the Hub allows in a name. `-` and `.` never follow each other."""
    return re.sub(r"[-.]*-[-.]*|\.{2,}", "-", re.sub(r"[^A-Za-z0-9.]+", "-", text)).strip("-.").lower() or "data"


# --- The folder ---


def run_dir_of(options: SubmitOptions, plan: Plan) -> Path:
    """The run directory: that of --run-dir, that of a submitted run, or a name made from data and recipe.

    With --force-new it is a new folder, or the folder of an earlier identical command whose job never began.
    """
    if options.run_dir is not None:
        return options.run_dir
    kind = "cloud" if options.backend == "hf_jobs" else options.backend
    source = None if options.force_new else options.source
    if source is not None and _belongs_to(RunDir(source), options.backend):
        return source
    first = RUNS / f"{_slug(_data_name(plan))}-{plan.recipe_hash[:8]}-{kind}"
    if not options.force_new:
        return first
    later = (first.with_name(f"{first.name}-{number}") for number in range(2, 1000))
    plan_hash = cloud_record.plan_hash(plan)
    return next(path for path in (first, *later) if not path.exists() or submit.never_began(RunDir(path), plan_hash))
