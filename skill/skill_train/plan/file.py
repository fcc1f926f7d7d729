"""A plan as a file: `skill-train plan --out` writes it; `local` or `submit` runs it if nothing has changed."""

import json
from collections.abc import Mapping
from pathlib import Path

from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import write_text
from skill_train.data import scan
from skill_train.machine import read
from skill_train.model import folder as model
from skill_train.recipe import fields
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run import plan_record
from skill_train.run.folder import RunDir, require_unused
from skill_train.run.plan_record import Plan

_LARGEST_BYTES = 10_000_000  # a plan has 20 kB; a larger file is something else
_BEGUN = ("train.log", "environment.json", "train.json")  # any training writes one of these early
_FOR_OTHERS = {"colab": "colab.ipynb", "skypilot": "skypilot"}  # what submit writes beside the plan for such a backend
_OF_A_RUN = (*_BEGUN, "checkpoints", "adapter", "merged", "cloud.json", "colab.ipynb", "skypilot/task.yaml")


def is_plan(path: Path) -> bool:
    """Whether a file is a plan that skill-train wrote."""
    try:
        small = path.is_file() and path.stat().st_size < _LARGEST_BYTES
        document = json.loads(path.read_text(encoding="utf-8")) if small else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("schema") == plan_record.SCHEMA


def write_plan(run: RunDir, plan: Plan) -> None:
    """Writes the plan and the recipe of a run; the plan first, because a recipe without a plan is the user's."""
    plan_record.write(run.plan, plan)
    write_text(run.recipe, fields.to_yaml(plan.recipe_file()))


def read_unchanged_plan(path: Path, options: Mapping[str, object], where: str = "local") -> Plan:
    """A plan from a file, for this machine or for the cloud, if its model and data have not changed.

    Raises:
        UsageError: an option would change the plan, the plan is for another place or machine, it was edited, or its
            inputs have changed.
    """
    others = [f"--{key.replace('_', '-')}" for key, value in options.items() if value is not None]
    again = f"make the plan again, with its recipe and options, and --out {quoted(path)}"
    if _is_of_run(path):  # `plan --out` does not write there
        recipe, command = path.with_name("recipe.yaml"), "submit" if where == "cloud" else "local"
        again = f"begin another run with its recipe: skill-train {command} {quoted(recipe)}"
    if others:
        hint = f"make another plan with {others[0]}, or leave {others[0]} out"
        raise UsageError(f"{path} is a plan, and {others[0]} would change it", code="bad_usage", hint=hint)
    plan = plan_record.read(path)
    _check_usable(path, plan, where, again)
    require_same_inputs(path, plan, again)
    return plan


def require_same_inputs(path: Path, plan: Plan, hint: str) -> None:
    """Compares the fingerprints of local inputs. Inputs on the Hub need no request, because the plan contains their
    revisions.

    Raises:
        UsageError: the model or the data here differ from those of the plan.
    """
    changed = [key for key, now in _fingerprints(plan.recipe).items() if now != plan.fingerprints.get(key)]
    if changed:
        place = str(plan.recipe.as_dict()[changed[0]])
        gone = not Path(place).exists()
        raise UsageError(
            f"the {' and the '.join(changed)} changed after {path} was written, or cannot be found",
            code="outdated_plan",
            expected="the model and the data that it was made for",
            got=place,
            hint=(f"if it was moved, put a link there: ln -s NEW_PLACE {quoted(place)}; or " if gone else "") + hint,
        )


def require_same_recipe(run: RunDir, plan: Plan, hint: str) -> None:
    """Refuses to go on with a run whose `recipe.yaml` was edited: training follows the plan, and would ignore the edit.

    Raises:
        UsageError: a value in the file is not the plan's.
    """
    if not run.recipe.is_file():
        return
    in_run, planned = _yaml(run.recipe.read_text(encoding="utf-8")), _yaml(fields.to_yaml(plan.recipe_file()))
    edited = [key for key, value in in_run.items() if value != planned.get(key)]
    if edited:
        raise UsageError(
            f"{run.recipe} was edited after the run began, and a run goes on with the recipe that it began with",
            code="another_run",
            expected=f"{edited[0]}: {planned.get(edited[0])}",
            got=f"{edited[0]}: {in_run[edited[0]]}",
            hint=hint,
        )


def _yaml(text: str) -> dict[str, object]:
    """The keys and values of a recipe file; none if it cannot be read, because the run does not need it."""
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _check_usable(path: Path, plan: Plan, where: str, again: str) -> None:
    if where == "local" and plan.where != "local":
        again += "" if _is_of_run(path) else " --where local"
        raise UsageError(
            f"{path} is a plan for the cloud ({plan.flavor})",
            code="cloud_plan",
            expected="a plan for this machine",
            got=plan.where,
            hint=f"skill-train submit {quoted(path)}; or {again}",
        )
    there, this = plan.facts.machine.chip, read.read_machine().chip
    if where == "local" and there != this:
        raise UsageError(
            f"{path} was planned on another machine", code="outdated_plan", expected=there, got=this, hint=again
        )
    if fields.recipe_hash(plan.recipe.as_dict(), plan.fingerprints) != plan.recipe_hash:
        raise UsageError(
            f"the recipe in {path} was edited after planning",
            code="outdated_plan",
            expected=f"recipe_hash {plan.recipe_hash[:12]}…",
            hint=again,
        )


def _fingerprints(planned: ResolvedRecipe) -> dict[str, str | None]:
    """The fingerprints of local inputs; None for inputs on the Hub, which have a revision."""
    stated = {key: value for key, value in planned.as_dict().items() if value is not None}
    folder = Path(planned.model)
    there = Path(planned.data).exists()
    data = scan.scan(fields.from_dict(stated), pictures=planned.images).fingerprint if there else None
    return {"model": model.fingerprint(folder) if folder.is_dir() else None, "data": data}


def _is_of_run(path: Path) -> bool:
    """Whether a plan lies in a run directory."""
    return any((path.parent / name).exists() for name in _OF_A_RUN)


def require_free(out: Path) -> None:
    """Allows only a plan to be overwritten, but not the plan of a run."""
    of_run = _is_of_run(out)
    if out.exists() and (of_run or not is_plan(out)):
        state = "is the plan of a run" if of_run and is_plan(out) else "exists and is not a plan"
        raise UsageError(
            f"{out} {state}",
            code="output_exists",
            expected="a new file, or a plan to replace",
            got=str(out),
            hint="use another --out",
        )


def require_own_folder(run: RunDir, plan: Plan) -> None:
    """Refuses to begin a run in a folder where it would overwrite files that no run made. A folder with only a plan is
    accepted, because `plan --out` may write there.

    Raises:
        UsageError: the folder has such files, or is the folder of the base model.
    """
    if run.plan.is_file() and any((run.path / name).exists() for name in _BEGUN):
        return
    if run.path.resolve() == Path(plan.recipe.model):
        raise UsageError(
            f"{run.path} is the folder of the base model, and a run may not write into it",
            code="bad_usage",
            expected="a separate folder for the run",
            hint="use another --run-dir, or omit it for a new folder below runs/",
        )
    own = []
    if run.plan.is_file():
        existing = plan_record.read(run.plan)
        wrote = fields.to_yaml(existing.recipe_file()).encode()
        if run.recipe.is_file() and run.recipe.read_bytes() == wrote:
            own = ["plan.json", "recipe.yaml"]  # an earlier start was killed
        elif existing.recipe_hash == plan.recipe_hash:
            own = ["plan.json"]
        if plan.where == "cloud" and existing.placement.backend in _FOR_OTHERS:
            own += _FOR_OTHERS.values()
    require_unused(run, *own)
