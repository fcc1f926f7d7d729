"""Runs two steps of a job on this machine, with the same program, plan, arguments, environment and folders."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from msgspec.structs import replace

from skill_train.cloud import stage_data
from skill_train.cloud.stage_data import Staged
from skill_train.core.digests import FileDigest, is_file_of
from skill_train.core.errors import SkillTrainError, TrainingFailed, from_exit_code
from skill_train.core.files import scratch_folder
from skill_train.core.program_events import Event, ProgramFailed, events
from skill_train.core.resources import program_packages
from skill_train.program.cloud.file_names import MARKER
from skill_train.run import plan_record, records, train_record
from skill_train.run.folder import versions
from skill_train.run.job_spec import MOUNT_PATH, JobSpec, command, packages
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import TrainRecord

STEPS = 2


def shortened(plan: Plan, local_plan: Plan) -> Plan:
    """The plan of the job with the placement of this machine, limited to two steps.

    Args:
        local_plan: a plan of the same recipe for this machine.
    """
    recipe = replace(plan.recipe, max_steps=STEPS, warmup_steps=min(plan.recipe.warmup_steps, STEPS))
    return replace(plan, recipe=recipe, placement=local_plan.placement, launch=local_plan.launch)


class _Marker(TypedDict):
    """`kept.json`, as the job writes it."""

    state: str
    files: dict[str, FileDigest]


class Rehearsal(TypedDict):
    """The figures of a rehearsal. `kept_files` is the number of stored files, `checkpoints` the checkpoints' names."""

    steps: int
    seconds: float
    kept_files: int
    checkpoints: list[str]


def rehearse(
    plan: Plan, spec: JobSpec, staged: Staged | None, say: Callable[[str], None]
) -> tuple[Rehearsal, TrainRecord]:
    """Runs the rehearsal in a temporary folder. Returns its figures, and the record of its training.

    Args:
        plan: the result of `shortened`.
        staged: the local data of the job; None for data on the Hub.

    Raises:
        SkillTrainError: the error that the program reported, or TrainingFailed if it stored less than a job must store.
    """
    with scratch_folder() as temporary:
        root = temporary
        mount = root / MOUNT_PATH.strip("/")
        mount.mkdir()
        shutil.copyfile(spec.program, mount / spec.program.name)
        plan_record.write(mount / spec.plan.name, plan)
        started = time.monotonic()
        if staged is None:
            _run(spec, {MOUNT_PATH: mount}, root, say)
        else:
            with stage_data.folder_of(staged, links=False) as folder:
                _run(spec, {MOUNT_PATH: mount, spec.mounts[0].mount_path: folder}, root, say)
        seconds = round(time.monotonic() - started, 1)
        files, checkpoints = _stored(mount)
        figures: Rehearsal = {"steps": STEPS, "seconds": seconds, "kept_files": files, "checkpoints": checkpoints}
        return figures, train_record.read(mount / "train.json")


def differences(plan: Plan, local_plan: Plan) -> list[str]:
    """Sentences that say how the rehearsal differed from the job, and what it could not test."""
    job, this = plan.placement, local_plan.placement
    where = f"{job.num_processes} x {job.device} in {job.dtype}"
    listed = [
        f"the machine: {plan.flavor} trains on {where}; this was {this.num_processes} x {this.device} in "
        f"{this.dtype}. Its memory and speed stay estimates",
        f"{plan.recipe.max_steps} steps: these were {STEPS}",
        "the container: uv installs the program's packages there; these were the ones of this Python"
        + _other_versions(plan),
        "the bucket: a mounted volume there, a folder here",
        "the push: nothing was written to the Hub, so write access was not tested",
    ]
    if plan.recipe.load_in_4bit:
        listed.append("4-bit weights: they need CUDA and bitsandbytes")
    return listed


def _run(spec: JobSpec, mounts: dict[str, Path], root: Path, say: Callable[[str], None]) -> None:
    """Runs the job's command with this Python instead of uv, and with local folders instead of its volumes."""
    line = command(spec)
    words = [
        sys.executable,
        *(_local_path(word, mounts) for word in line[line.index(f"{MOUNT_PATH}/{spec.program.name}") :]),
    ]
    error_log = root / "stderr"
    failure: ProgramFailed | None = None
    with open(error_log, "wb") as errors:
        child = subprocess.Popen(
            [*words, "--rehearse"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=os.environ | spec.environment,
        )
        try:
            for text in child.stdout or ():
                for event in events(text):
                    failure = event if event["event"] == "failed" else failure
                    _show(event, say)
            child.wait()
        finally:
            if child.poll() is None:  # Ctrl-C reached the child too, which now saves its checkpoint
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
    if child.returncode != 0:
        raise _failed(child.returncode, failure, error_log.read_text(encoding="utf-8", errors="replace"))


def _local_path(word: str, mounts: dict[str, Path]) -> str:
    for path, folder in mounts.items():
        if word == path or word.startswith(f"{path}/"):
            return str(folder) + word[len(path) :]
    return word


def _show(event: Event, say: Callable[[str], None]) -> None:
    if event["event"] == "stage" or event["event"] == "note":
        say(event["text"])
    elif event["event"] == "step":
        say(f"step {event['step']} of {event['steps']}, loss {event['loss']}")


def _failed(code: int, failure: ProgramFailed | None, errors: str) -> SkillTrainError:
    if failure is not None:
        return from_exit_code(failure["exit_code"], failure["error"])
    tail = "\n".join(errors.splitlines()[-15:])
    return TrainingFailed(
        f"the program ended with exit code {code}", code="self_test_failed", got=tail, hint="skill-train doctor"
    )


def _stored(mount: Path) -> tuple[int, list[str]]:
    """Checks the stored files against their markers. Returns their number and the names of the checkpoints.

    Raises:
        TrainingFailed: a file is missing or torn.
    """
    marker = records.read(mount / MARKER, _Marker)
    checkpoints = sorted(path.parent.name for path in (mount / "checkpoints").glob(f"*/{MARKER}"))
    torn = [name for name, digest in marker["files"].items() if not is_file_of(mount / name, digest)]
    trained = [name for name in marker["files"] if name.startswith(("adapter/", "merged/"))]
    if marker["state"] != "done" or torn or not checkpoints or not trained:
        raise TrainingFailed(
            "the rehearsal did not store all the files that a job must store",
            code="self_test_failed",
            expected="the trained weights, the records and a checkpoint, all as listed in kept.json",
            got=f"incomplete: {', '.join(torn) or 'none'}; checkpoints: {', '.join(checkpoints) or 'none'}",
            hint="skill-train doctor --self-test",
        )
    return len(marker["files"]), checkpoints


def _other_versions(plan: Plan) -> str:
    """A text with the packages that have another version on this machine than in the job."""
    pins = (package.split("==") for package in (*program_packages(), *packages(plan)))
    other = [f"{name} {here or 'missing'} for {pin}" for name, pin in pins if (here := _release(name)) != pin]
    return f" ({', '.join(other)})" if other else ", in the same versions"


def _release(name: str) -> str:
    return (versions(name)[name] or "").partition("+")[0]
