"""`local` and `merge`: facts, plan, and the steps in turn. Beside it only `chain_gguf`, `demo`, `doctor` compose."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skill_train.commands import tables
from skill_train.commands.chain_plan import actual, load_recipe, local_plan, require_room, warn_of_export
from skill_train.commands.run_warnings import warn_of_run
from skill_train.core.console import Console, Result
from skill_train.core.errors import TrainingFailed, UsageError, VerificationFailed
from skill_train.model.folder import fingerprint
from skill_train.plan.file import given_plan, is_plan, require_same_inputs
from skill_train.plan.placement import HERE
from skill_train.reference.load import read_rows
from skill_train.run import cloud_record
from skill_train.run.begun import require_resumable
from skill_train.run.folder import RunDir, open_run, set_aside
from skill_train.run.lock import locked, locked_out
from skill_train.run.records import read_json
from skill_train.train import measured_speed as calibration


def local(
    console: Console,
    *,
    recipe: Path | None,
    run_dir: Path | None,
    resume: bool,
    device: str | None,
    dtype: str | None,
    force: bool,
    **flags: Any,
) -> Result:
    """Facts, plan, training, smoke verdict.

    Args:
        recipe: a recipe file, or a plan that `skill-train plan --out` wrote.
        flags: values of the recipe, None where they were not said.
    """
    said = {key: value for key, value in flags.items() if value is not None}
    if resume and run_dir is None and recipe is None and not said:
        raise UsageError(
            "--resume needs the run to go on with",
            code="bad_usage",
            expected="--run-dir, or the recipe and options that the run began with",
            hint="skill-train local --resume --run-dir RUN",
        )
    goes_on = resume and run_dir is not None and recipe is None and not said
    if run_dir is not None:
        cloud_record.require_of_this_machine(RunDir(run_dir))
    if goes_on and run_dir is not None:
        plan = _plan_to_go_on_with(run_dir)
    elif recipe is not None and is_plan(recipe):
        plan = given_plan(recipe, said | {"device": device, "dtype": dtype})
    else:
        choices = dataclasses.replace(HERE, device=device, dtype=dtype, force=force)
        plan = local_plan(console, load_recipe(recipe, said), choices)
    run = _run_at(run_dir or _default_run_dir(plan))
    words = _words("local", recipe, said | {"device": device, "dtype": dtype}) + ["--force"] * force
    place = ["--run-dir", str(run_dir)] if run_dir is not None else []
    with _elsewhere(run, words):
        if resume and not goes_on:
            require_resumable(run, plan, shlex.join([*words, *place]))
        if not goes_on and not _is_finished(run, plan):
            require_room(console, plan, force=force)
            warn_of_export(console, plan)
        record = train_run(console, run, plan, resume=resume)
    plan = read_json(run.plan)  # a run that had begun keeps the one it began with
    for key, value in (("device", device), ("dtype", dtype)):
        if value not in (None, plan["placement"][key]):
            console.warn("kept_plan", f"the run began with {key} {plan['placement'][key]}, not {value}, and keeps it")
    epochs = _epochs(plan, record)
    if epochs > 1 and _steps_were_said(plan):
        rows, steps = record["data"]["train_rows"], record["steps"]
        console.warn("epochs", f"{steps} steps are {epochs:.2g} epochs of the {rows} rows: each row is seen again")
    warn_of_run(console, plan, record, actual(plan, record))
    whole = _whole(recipe, said) if epochs < 1 and not goes_on else []
    return _local_result(run, plan, record, epochs, whole)


def _run_at(path: Path) -> RunDir:
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"{path} is a file",
            code="bad_run_dir",
            expected="a new folder, or one of an earlier run",
            hint="another --run-dir",
        )
    return RunDir(path)


def _words(command: str, recipe: Path | None, options: dict[str, Any]) -> list[str]:
    """A command with what the user gave."""
    words = ["skill-train", command, *([str(recipe)] if recipe is not None else [])]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)] if value is not None else []
    return words


@contextlib.contextmanager
def _elsewhere(run: RunDir, words: list[str]) -> Iterator[None]:
    """Where the folder holds another run, the way out is this command in a folder of its own, without --resume."""
    try:
        yield
    except UsageError as error:
        if error.code == "another_run":
            error.hint = shlex.join([*words, "--run-dir", run.free_name()])
        raise


def _plan_to_go_on_with(folder: Path) -> dict[str, Any]:
    """The plan of a run as it began. One that is unfinished needs the model and the data that it began with."""
    try:
        run = open_run(folder)
    except UsageError as error:
        error.hint = f"skill-train local --model MODEL --data DATA --run-dir {quoted(folder)}"
        raise
    plan: dict[str, Any] = read_json(run.plan)
    if not _is_finished(run, plan):
        anew = f"skill-train local {quoted(run.recipe)} --run-dir NEW_RUN"
        require_same_inputs(run.plan, plan, f"bring back what it began with; or begin anew: {anew}")
    return plan


def _epochs(plan: dict[str, Any], record: dict[str, Any]) -> float:
    """How often the training saw each row."""
    return float(record["steps"] * plan["recipe"]["effective_batch_size"] / record["data"]["train_rows"])


def _steps_were_said(plan: dict[str, Any]) -> bool:
    """Not worked out from epochs, which the plan then gives as a reason."""
    return all(reason["rule"] != "max_steps" for reason in plan["reasons"])


def _whole(recipe: Path | None, said: dict[str, Any]) -> list[str]:
    """After a smoke run that was cut short on the command line: the plan of the whole training, here or elsewhere."""
    if "max_steps" not in said:
        return []
    return [shlex.join(_words("plan", recipe, {key: value for key, value in said.items() if key != "max_steps"}))]


def _is_finished(run: RunDir, plan: dict[str, Any]) -> bool:
    """Nothing is left to train, so nothing needs memory."""
    done = run.plan.is_file() and run.record("train").is_file() and run.tuned.is_dir()
    kept = read_json(run.plan) if done else {}
    return bool(kept.get("recipe_hash") == plan["recipe_hash"])


def plan_of(console: Console, recipe: Path) -> dict[str, Any]:
    """The plan of a recipe file for this machine."""
    return local_plan(console, load_recipe(recipe, {}), HERE)


def train_run(console: Console, run: RunDir, plan: dict[str, Any], *, resume: bool) -> dict[str, Any]:
    """Trains a plan in its run directory, showing why each value is what it is."""
    from skill_train.train import local as trainer

    for reason in plan["reasons"]:
        console.status(f"{reason['rule']}: {reason['value']} ({reason['because']})")
    with console.progress("training") as progress:
        record = trainer.train(run, plan, resume=resume, progress=progress, say=console.status)
    for note in record["data"]["notes"]:
        console.warn("template", note)
    if not record.get("reused"):
        calibration.remember(read_json(run.plan), read_rows(run.metrics), record["finished_at"])
    return record


def _default_run_dir(plan: dict[str, Any]) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(plan["recipe"]["data"]).stem).strip("-") or "run"
    return Path("runs") / f"{name}-{plan['recipe_hash'][:8]}"


def _local_result(run: RunDir, plan: dict[str, Any], record: dict[str, Any], epochs: float, whole: list[str]) -> Result:
    error = smoke_failure(run, record)
    data = {
        "run_dir": str(run.path),
        "recipe_hash": plan["recipe_hash"],
        "verdict": record["verdict"],
        "checks": record["checks"],
        "figures": record["figures"],
        "steps": record["steps"],
        "epochs": round(epochs, 3),
        "example": record["example"],
        "answer": record["answer"],
        "data": record["data"],
        "placement": plan["placement"],
        "estimates": actual(plan, record),
        "reused": record.get("reused", False),
    }
    following = [] if error else [*whole, f"skill-train export-gguf {quoted(run.path)}"]
    return Result(
        data,
        human=lambda rich: tables.draw_smoke(rich, data),
        quiet=str(run.path),
        next=following,
        error=error,
    )


def smoke_failure(run: RunDir, record: dict[str, Any]) -> TrainingFailed | None:
    """Of a run that trained to its end, here or as a job, and whose checks say that it went wrong."""
    failed = [check for check in record.get("checks", []) if check["verdict"] == "fail"]
    if not failed:
        return None
    return TrainingFailed(
        f"the smoke test failed: {', '.join(check['name'] for check in failed)}",
        code="smoke_failed",
        expected="every check to pass",
        got="; ".join(check["detail"] for check in failed),
        hint=f"read {shlex.quote(str(run.record('train')))}",
    )


def merge(
    console: Console,
    *,
    run: Path | None,
    base: str | None,
    adapter: Path | None,
    out: Path | None,
    dtype: str | None,
    gate: str,
) -> Result:
    if run is not None:
        only_one("merge", {"--base": base, "--adapter": adapter, "--out": out})
        record = merge_run(console, open_run(run), dtype, gate)
        following, folder = [f"skill-train export-gguf {quoted(run)}"], run / "merged"
    else:
        if base is None or adapter is None or out is None:
            raise UsageError(
                "merge needs a run, or a base, an adapter and a place for the result",
                code="bad_usage",
                expected="skill-train merge RUN, or --base, --adapter and --out",
                hint="skill-train merge --help",
            )
        given: dict[str, Any] = {"adapter": adapter, "out": out, "rows": [], "dtype": dtype, "gate": gate}
        with locked_out(out, "merge"):
            record = _merge(console, base=base_folder(base), **given)
        following, folder = [f"skill-train export-gguf {quoted(out)}"], out
    data = {"out": str(folder), **{key: record.get(key) for key in ("how", "reasons", "changes", "gate", "seconds")}}
    listed = [file for file in outputs_of(record, folder.parent) if file["path"].endswith(".safetensors")]
    data |= {"files": [file | {"quant": None} for file in listed], "reused": record.get("reused", False)}
    return Result(data, quiet=str(folder), next=following, human=lambda rich: rich.print_json(data=data))


def merge_run(console: Console, run: RunDir, dtype: str | None = None, gate: str = "auto") -> dict[str, Any]:
    """Merges the adapter of a run into `merged/`.

    Raises:
        UsageError: not trained yet, or there is no adapter because every weight was trained; or the run is in use.
    """
    with locked(run, "merge"):
        return merge_locked(console, run, dtype, gate)


def merge_locked(console: Console, run: RunDir, dtype: str | None, gate: str) -> dict[str, Any]:
    """`merge_run` for a caller that has the lock of the run."""
    require_trained(run)
    if run.is_full:
        raise UsageError(
            f"{run.path} has nothing to merge: every weight was trained, and merged/ is the whole model",
            code="nothing_to_merge",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    rows = read_rows(run.held_out) or read_rows(run.samples)
    put_aside(console, run.merged, run.record("merge"))
    try:
        given: dict[str, Any] = {"out": run.merged, "rows": rows, "dtype": dtype, "gate": gate}
        return _merge(console, base=base_of(run), adapter=run.adapter, **given)
    except VerificationFailed as failure:
        if failure.code == "merge_gate" and dtype != "float32":
            failure.hint = f"skill-train merge {quoted(run.path)} --dtype float32"
        raise


def put_aside(console: Console, made: Path, record: Path) -> None:
    """A result of ours without its record is made again; it stays beside, under another name."""
    aside = set_aside(made, record)
    if aside is not None:
        console.warn("set_aside", f"{made} has no {record.name}; it is now {aside.name}, and is made again")


def _merge(
    console: Console,
    *,
    base: Path,
    adapter: Path,
    out: Path,
    rows: list[dict[str, Any]],
    dtype: str | None,
    gate: str,
) -> dict[str, Any]:
    from skill_train.merge.step import merge as step

    record = RunDir(out.parent).record("merge") if out.name == "merged" else beside(out, ".merge.json")
    with console.progress("merging") as progress:
        return step(
            base=base,
            adapter=adapter,
            out=out,
            record=record,
            rows=rows,
            dtype=dtype,
            threshold=None,
            gate=gate,
            progress=progress,
            warn=console.warn,
        )


def base_of(run: RunDir) -> Path:
    """The folder of a run's base model, at the revision that was trained.

    Raises:
        UsageError: the folder holds another model now.
    """
    from skill_train.hub.models import model_folder

    plan = read_json(run.plan)
    folder = model_folder(plan["recipe"]["model"], plan["recipe"]["revision"])[0]
    trained = plan.get("fingerprints", {}).get("model")  # none of a model on the Hub: its revision says which it is
    if trained is not None and (now := fingerprint(folder)) != trained:
        raise UsageError(
            f"the model in {folder} is not the one that {run.path} was trained on",
            code="base_changed",
            expected=f"fingerprint {trained!s:.12}…",
            got=f"fingerprint {now:.12}…",
            hint="put the files of the model back as they were, or train again on those that are there now",
        )
    return folder


def base_folder(model: str) -> Path:
    from skill_train.hub.models import model_folder

    return model_folder(model, None)[0]


def require_trained(run: RunDir) -> None:
    from skill_train.train.local import trained

    trained(run)


def only_one(command: str, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"RUN and {given[0]} exclude each other", code="bad_usage", hint=f"skill-train {command} --help"
        )


def outputs_of(record: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    return [{"path": str(root / name), **digest} for name, digest in record.get("outputs", {}).items()]


def beside(folder: Path, ending: str) -> Path:
    """The folder's own name and an ending, beside it. `.` and `..` lead to a folder that has a name."""
    place = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return place / f"{folder.resolve().name}{ending}"


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def slug(path: Path) -> str:
    """A file name from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"
