"""`pull`: fetches the files of a cloud run, and checks their digests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.cloud import bucket, find_run
from skill_train.cloud.find_run import CloudRun
from skill_train.cloud.pull import Pull
from skill_train.commands._command import RUN, argument, command, run_dir_option
from skill_train.commands._ended_training import smoke_failure
from skill_train.commands._job_snapshot import from_bucket, from_repository, why_not_pushed
from skill_train.core.console import Console, Result
from skill_train.core.errors import AccessError, VerificationFailed, quoted
from skill_train.core.units import megabytes
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir


@dataclass(frozen=True)
class PullOptions:
    run: str = argument(RUN)
    run_dir: Path | None = run_dir_option()


@command(
    PullOptions,
    "skill-train pull runs/tickets-cloud",
    "skill-train pull me/0123456789abcdef01234567 --run-dir runs/tickets-cloud",
)
def pull(options: PullOptions, console: Console) -> Result:
    """Fetch the adapter and the records of a job, with their digests checked, for merge and export.

    A result that the bucket lacks comes from the repository that it was pushed to. A run that has not finished brings
    its records and its newest checkpoint. Run it again after an interruption.
    """
    cloud, here = find_run.with_run_dir(find_run.find(options.run), options.run_dir)
    record, fetched = _fetched(cloud, here, console)
    source = record.inputs
    done, failure = source.state == "done", None
    if done:
        training = trained(here)
        failure = smoke_failure(here, training)
    else:
        step = source.checkpoint
        stored = "nothing but records" if step is None else f"a checkpoint of step {step}"
        console.warn("unfinished", f"the run has no result yet ({source.state}); fetched so far: {stored}")
    data = {
        "run_dir": str(here.path),
        "state": source.state,
        "trained": done,
        "verdict": training.verdict if done else None,
        "checkpoint": source.checkpoint,
        "from": source.bucket or source.repository,
        "fetched": len(fetched),
        "files": [{"path": str(here.path / name), **digest} for name, digest in record.outputs.items()],
    }
    word = quoted(here.path)
    unfinished = f"skill-train {'wait' if cloud.now.live else 'resume'} {word}"
    return Result(
        data,
        human=lambda rich: _draw(rich, here, record, len(fetched)),
        quiet=str(here.path),
        next=[] if failure else [f"skill-train export-gguf {word}"] if done else [unfinished],
        error=failure,
    )


def _fetched(cloud: CloudRun, here: RunDir, console: Console) -> tuple[Pull, list[str]]:
    """Fetches the files. Returns `pull.json` and the names of the new files. The result may exist only in the
    repository, because the bucket accepted no files, or because its files were changed."""
    from skill_train.cloud import pull

    try:
        there, missing = bucket.stored_run(cloud.record), None
    except VerificationFailed as error:
        if error.code != "kept_file_missing" or cloud.now.live:
            raise
        there, missing = None, error
    try:
        if there is not None and (there.state == "done" or cloud.now.live):
            return from_bucket(console, here, there)
    except VerificationFailed as error:
        if cloud.now.live:
            raise
        there, missing = None, error
    try:
        why = why_not_pushed(cloud, here)
    except AccessError as error:
        if there is None:
            raise missing or error from None
        why = error.message
    if not why:
        return from_repository(cloud, here)
    if there is None:
        completed = cloud.now.stage == "COMPLETED"  # for such a job, `status` suggests `pull`
        helps = "wait" if cloud.now.live else "resume" if completed else "status"
        raise missing or pull.nothing_kept(here.path, why, helps)
    console.status(why)
    return from_bucket(console, here, there)


def _draw(rich: Any, here: RunDir, record: Pull, new: int) -> None:
    source, files = record.inputs, record.outputs.values()
    state = "trained" if source.state == "done" else f"unfinished, checkpoint {source.checkpoint}"
    size = sum(file["bytes"] for file in files)
    rich.print(f"{here.path}: {state}; {len(files)} files, {megabytes(size)}, {new} of them new", soft_wrap=True)
