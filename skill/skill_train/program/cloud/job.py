"""In a cloud job: the supervisor of a training, and the files that it stores.

The plan's folder is a mounted bucket (`bucket`), which outlives the job. A file in it is uploaded when it is closed
(hf-mount: it must be written from start to end, and not changed afterwards). So this process does not train itself.
It starts the program on the job's own disk (`work`), as `skill-train local` does, and copies whole files from there.
A marker with the SHA-256 of each file comes last. Files without a marker, or with other bytes, were not stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from skill_train.program.cloud.file_names import MARKER, PROOF
from skill_train.program.cloud.push import PAUSES, as_json, commit, files_of, hub_repository, push
from skill_train.program.events import (
    EXIT_DOES_NOT_FIT,
    EXIT_FAILED,
    EXIT_TEMPORARY,
    PROGRAM,
    Failure,
    FileDigest,
    Refused,
    again,
    explained_errors,
    json_object,
    run_id,
    tell,
    write_json,
)
from skill_train.program.folders.checkpoints import is_complete, numbered, step_of
from skill_train.program.plan import Plan, kills_for_memory, last_stage, memory_ended, second_try_message, smaller_plan
from skill_train.program.start.inputs import load_plan, prepare_environment

KEEP_SECONDS = 2.0
KEEP_AGAIN_SECONDS = 60.0  # after a failure, such as a full disk
KEPT_CHECKPOINTS = 2
LINKS = "being-kept"
SMALLER_PLAN = "smaller_plan.json"  # the plan with which a later job of this run begins
RECORDS = ("train.json", "environment.json", "samples.jsonl", "held_out.jsonl", "metrics.jsonl", "train.log")
RESULTS = ("adapter", "merged", "images", *RECORDS, "train.failed.json")


def run_job(path: Path, data: Path | None, *, rehearse: bool) -> int:
    """Trains, stores everything in the plan's folder, and pushes. A run that was trained before is only pushed."""
    bucket = path.resolve().parent
    try:
        plan = load_plan(path)
        prepare_environment(plan["placement"])
        scratch = tempfile.TemporaryDirectory(prefix="skill-train-", ignore_cleanup_errors=True)
        with explained_errors(), scratch as folder:
            work = Path(folder)
            if not fetch_result(bucket, work):
                start_job(plan, bucket, rehearse=rehearse)
                failure = train_in_job(plan, data, work, bucket, () if rehearse else PAUSES)
                if failure is not None:
                    return failure["exit_code"]
            if not rehearse:
                push(plan, work)
            require_kept(bucket)
    except Refused as refusal:
        with suppress(OSError):
            if not (bucket / MARKER).exists():  # it was refused before it was trained
                put_json(bucket / "train.failed.json", refusal.failure)
        tell("failed", **refusal.failure)
        return refusal.exit_code
    return 0


def start_job(plan: Plan, bucket: Path, *, rehearse: bool) -> None:
    """Checks that both places for the result can be written. Removes the records of an earlier end."""
    for name in (MARKER, "train.failed.json"):
        (bucket / name).unlink(missing_ok=True)
    put_json(bucket / ".writable", {})
    (bucket / ".writable").unlink()
    if rehearse:
        return
    tell("stage", text="proving that the result can be pushed")
    state = {"run": run_id(), "recipe_hash": plan.get("recipe_hash"), "state": "training"}
    commit_id = commit(plan, {PROOF: as_json(state)}, "Training has begun")
    tell("note", text=f"{hub_repository(plan)} can be written: {commit_id}")


def train_in_job(
    plan: Plan, data: Path | None, work: Path, bucket: Path, pauses: tuple[int, ...] = PAUSES
) -> Failure | None:
    """Trains in a child process, and stores its files while it runs. Returns why it failed, or None. A child that did
    not reach the Hub is started again after each of the `pauses`. What it fetched stays on this disk."""
    plan = layout_that_was_left(plan, bucket)
    keeper, begun, left, tried = Keeper(work, bucket, restore(bucket, work)), kills_for_memory(), iter(pauses), False
    while True:
        put_json(work / "plan.json", plan)
        (work / "train.failed.json").unlink(missing_ok=True)  # of the try before
        with Child(child_command(plan, work, data), plan, work / "train.log") as child:
            while child.running(KEEP_SECONDS):
                keeper.try_to_keep()
            failure = how_it_failed(child, work)
            keeper.try_to_keep(last=True)
            away = failure is not None and failure["exit_code"] == EXIT_TEMPORARY and not child.stopped
            pause = next(left, None) if away else None
            smaller = None if tried or child.stopped else after_memory(plan, failure, begun, child)
            if pause is None and smaller is None:
                try:
                    keep_results(work, bucket, failure)
                except OSError as error:  # the push may still succeed; `require_kept` reports it afterwards
                    tell("note", text=f"the results could not be kept: {error}")
                return failure
        if pause is not None:
            tell("note", text=f"the Hub could not be reached; the training starts again in {pause} s")
            time.sleep(pause)
        if smaller is not None:
            plan, tried = smaller, True
            tell("note", text=second_try_message(plan))
            with suppress(OSError):  # otherwise a later job would run out of memory first too
                put_json(bucket / SMALLER_PLAN, plan)


def layout_that_was_left(plan: Plan, bucket: Path) -> Plan:
    """The plan. If an earlier job of it continued with a smaller layout, the plan with that layout."""
    smaller: Plan | None = read_object(bucket / SMALLER_PLAN)
    same = smaller is not None and smaller.get("recipe_hash") == plan.get("recipe_hash")
    return smaller if smaller is not None and same else plan


def after_memory(plan: Plan, failure: Failure | None, kills: int | None, child: Child) -> Plan | None:
    """The plan of a second try after memory ran out; None if there is none."""
    if failure is None or not memory_ended(failure["error"], kills):
        return None
    return smaller_plan(plan, failure["error"], last_stage(child.output()))


def child_command(plan: Plan, work: Path, data: Path | None) -> list[str]:
    """The command that `skill-train local` would start for this plan."""
    arguments = plan.get("launch", {}).get("arguments") or []
    launcher = ["-m", "accelerate.commands.launch", *arguments] if arguments else []
    where = ["--data", str(data.resolve())] if data else []
    return [sys.executable, *launcher, str(PROGRAM.resolve()), str(work / "plan.json"), "--resume", *where]


class Child:
    """The training program. Its output goes to our output and into train.log. A signal to us is passed on: the child
    saves a checkpoint and ends, and everything is stored before we end. The child stays in our process group, so that
    killing the group leaves no process behind."""

    def __init__(self, command: list[str], plan: Plan, log: Path) -> None:
        self.stopped = False
        self.has_launcher = bool(plan.get("launch", {}).get("arguments"))
        self.log = open(log, "ab")  # noqa: SIM115 - closed on exit
        self.start = self.log.tell()
        self.lock = threading.Lock()
        environment = {"PYTHONUNBUFFERED": "1"} | plan.get("launch", {}).get("environment", {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=os.environ | environment
        )
        streams = (self.process.stdout, self.process.stderr)
        self.readers = [threading.Thread(target=self.read, args=(stream,), daemon=True) for stream in streams]

    def __enter__(self) -> Child:
        self.old = {number: signal.signal(number, self.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        for reader in self.readers:
            reader.start()
        return self

    def pass_on(self, number: int, _: Any) -> None:
        self.stopped = True
        self.process.send_signal(number)

    def read(self, stream: IO[bytes]) -> None:
        """Copies whole lines, and never stops reading: a child that cannot write would wait for ever."""
        with stream:
            for line in stream:
                with self.lock:
                    for out in (self.log, sys.stdout.buffer):
                        with suppress(OSError, ValueError):  # closed: a process of the child still writes
                            out.write(line)
                            out.flush()

    def running(self, seconds: float) -> bool:
        """Waits up to `seconds` for the child's end. Returns False after the end, when all its output has been read."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        for reader in self.readers:
            reader.join(timeout=10)  # a process that the child left behind may hold the pipe open
        return False

    def output(self) -> str:
        return Path(self.log.name).read_bytes()[self.start :].decode("utf-8", "replace")

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.process.kill()
        self.process.wait()
        with self.lock:
            self.log.close()
        for number, handler in self.old.items():
            signal.signal(number, handler)


def how_it_failed(child: Child, work: Path) -> Failure | None:
    """The failure in train.failed.json, or one made from the exit code: a killed program writes nothing, and its
    launcher ends with 1."""
    code, record = child.process.returncode, work / "train.failed.json"
    if code == 0:
        return None
    recorded: Failure | None = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if recorded is not None and recorded["error"]["code"] != "process_lost":
        return recorded
    output = child.output() if child.has_launcher else ""  # a launcher prints how its processes ended
    killed = [int(n) for n in re.findall(r"exitcode\s*:\s*(-\d+) \(pid: ", output) if int(n) != -signal.SIGTERM]
    if recorded is not None and not killed:
        return recorded
    failure = ended(killed[0] if killed and code > 0 else code, child).failure
    write_json(record, failure)
    tell("failed", **failure)
    return failure


def ended(code: int, child: Child) -> Refused:
    """The reason for a program that gave none itself. `code` is below 0 for a signal."""
    tail = "\n".join(child.output().splitlines()[-15:])
    if code == -signal.SIGKILL:
        return Refused(
            "the system killed the training process (SIGKILL), most likely to free memory",
            code="out_of_memory",
            exit_code=EXIT_DOES_NOT_FIT,
            expected="memory for the model, its activations and one batch",
            hint=f"a larger machine, or a smaller max_length or model; {again()}",
        )
    if child.stopped:
        return Refused(
            "training was interrupted before its first step", code="interrupted", exit_code=EXIT_FAILED, hint=again()
        )
    how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Refused(
        f"the training program {how}",
        code="native_crash" if code < 0 else "program_failed",
        exit_code=EXIT_FAILED,
        got=tail,
        hint="read the end of its log above",
    )


class Keeper:
    """Copies the files of the training to the bucket, which may be full, slow or gone for a while."""

    def __init__(self, work: Path, bucket: Path, restored: Path | None) -> None:
        self.work, self.bucket = work, bucket
        self.whole = {restored.name} if restored else set()  # names of checkpoints that are stored
        self.not_before = 0.0
        self.kept: dict[str, tuple[int, int]] = {}

    def try_to_keep(self, *, last: bool = False) -> None:
        """Stores new files. A failure does not end the training: it is reported, and older checkpoints are removed. The
        next try is a minute later, or at once if this is the `last` one."""
        if time.monotonic() < self.not_before and not last:
            return
        try:
            self.keep()
        except OSError as error:
            self.not_before = time.monotonic() + KEEP_AGAIN_SECONDS
            tell("note", text=f"could not be kept, and will be tried again: {error}")
            self.prune(1)
            if last:
                self.keep_in_room()

    def keep_in_room(self) -> None:
        try:
            self.keep()
        except OSError as error:
            tell("note", text=f"could not be kept: {error}")

    def keep(self) -> None:
        complete = [path for path in numbered(self.work / "checkpoints") if is_complete(path)]
        for name in ("metrics.jsonl", "environment.json"):
            self.keep_changed(name)
        for checkpoint in complete[:KEPT_CHECKPOINTS]:
            if checkpoint.name not in self.whole:
                self.keep_checkpoint(checkpoint)
        self.prune(KEPT_CHECKPOINTS)

    def keep_changed(self, name: str) -> None:
        """Copies a file if it has changed, for those who look on. A restart uses the copy in a checkpoint."""
        path = self.work / name
        if path.is_file():
            now = (path.stat().st_size, path.stat().st_mtime_ns)
            if self.kept.get(name) != now:
                copy_file(path, self.bucket / name)
                self.kept[name] = now

    def keep_checkpoint(self, checkpoint: Path) -> None:
        """Copies a checkpoint, and what else a restart needs: metrics.jsonl, and before.json of the first checks."""
        started, target = time.monotonic(), self.bucket / "checkpoints" / checkpoint.name
        beside = (self.work / "metrics.jsonl", self.work / "checkpoints" / "before.json")
        source = self.linked(checkpoint)
        try:
            files = {path.relative_to(source).as_posix(): path for path in files_of(source)}
            files |= {path.name: path for path in beside if path.is_file()}
            digests = {name: copy_file(path, target / name) for name, path in files.items()}
            if not is_complete(source):  # some of its files may have been removed before they were listed
                raise FileNotFoundError(checkpoint)
            put_json(target / MARKER, digests)
        except OSError:
            remove_kept(target)
            if is_complete(source):
                raise
            return  # the trainer removed it meanwhile, because it has newer ones
        finally:
            shutil.rmtree(self.work / LINKS, ignore_errors=True)
        self.whole.add(checkpoint.name)
        size = sum(digest["bytes"] for digest in digests.values())
        tell("kept", name=checkpoint.name, bytes=size, seconds=round(time.monotonic() - started, 2))

    def linked(self, checkpoint: Path) -> Path:
        """A folder of hard links to the files of a checkpoint. The trainer removes a checkpoint when there are two
        newer ones, so a slow bucket would never get a whole one. Returns the checkpoint itself if the disk has no hard
        links, or no room for two more checkpoints beside the linked bytes."""
        links = self.work / LINKS
        shutil.rmtree(links, ignore_errors=True)
        try:
            files = list(files_of(checkpoint))
            if shutil.disk_usage(self.work).free < 2 * sum(path.stat().st_size for path in files):
                return checkpoint
            for path in files:
                name = links / path.relative_to(checkpoint)
                name.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, name)
        except OSError:
            return checkpoint
        return links

    def prune(self, count: int) -> None:
        """Removes older checkpoints from the bucket, and leaves the newest `count` that are known to be whole. Other
        checkpoints of an earlier start do not count: their files may be missing."""
        checkpoints = numbered(self.bucket / "checkpoints")
        whole = [path for path in checkpoints if path.name in self.whole]
        for path in checkpoints:
            if whole[count - 1 :] and step_of(path) < step_of(whole[count - 1]):
                remove_kept(path)


def keep_results(work: Path, bucket: Path, failure: Failure | None) -> None:
    files = {path.relative_to(work).as_posix(): path for name in RESULTS for path in files_of(work / name)}
    digests = {name: copy_file(path, bucket / name) for name, path in files.items()}
    state, exit_code = ("done", 0) if failure is None else ("failed", failure["exit_code"])
    put_json(bucket / MARKER, {"run": run_id(), "state": state, "exit_code": exit_code, "files": digests})


def require_kept(bucket: Path) -> None:
    if not (bucket / MARKER).is_file():
        raise Refused(
            "the run is trained, but its results could not be stored",
            code="not_kept",
            exit_code=EXIT_FAILED,
            expected="free space in the folder of the plan",
            hint="read the reason above; unless this is a rehearsal, the result was pushed to the Hub",
        )


def fetch_result(bucket: Path, work: Path) -> bool:
    """Whether this run was trained before. If so, copies its results to `work`."""
    marker = read_object(bucket / MARKER)
    if marker is None or marker.get("state") != "done":
        return False
    if fetch(bucket, work, marker["files"]):
        tell("note", text="this run was trained before")
        return True
    tell("note", text="the results that were kept are torn: going on from the newest checkpoint")
    return False


def restore(bucket: Path, work: Path) -> Path | None:
    """Brings back the newest checkpoint that was stored whole, the lines of its steps and the log of earlier starts. A
    torn one stays in the bucket, because the mount may only show an old state of it."""
    if (bucket / "train.log").is_file():
        copy_file(bucket / "train.log", work / "train.log")
    for checkpoint in numbered(bucket / "checkpoints"):
        target, marker = work / "checkpoints" / checkpoint.name, read_object(checkpoint / MARKER)
        if marker is not None and fetch(checkpoint, target, marker):
            tell("note", text=f"{checkpoint.name} was kept and is whole")
            for name, place in (("metrics.jsonl", work), ("before.json", work / "checkpoints")):
                if (target / name).is_file():
                    os.replace(target / name, place / name)
            return checkpoint
        tell("note", text=f"{checkpoint.name} was not kept whole and is left out")
    return None


def fetch(source: Path, target: Path, files: dict[str, FileDigest]) -> bool:
    """Copies files, and returns whether all have the bytes that were stored. If not, `target` is removed."""
    for name, digest in files.items():
        try:
            whole = copy_file(source / name, target / name) == digest
        except FileNotFoundError:
            whole = False
        if not whole:
            shutil.rmtree(target, ignore_errors=True)
            return False
    return True


def read_object(path: Path) -> Any:
    """The marker or the plan of an earlier job; None if there is none, or if it is torn."""
    with suppress(FileNotFoundError):
        return json_object(path.read_bytes())
    return None


def remove_kept(folder: Path) -> None:
    """Removes a checkpoint, its marker first, so that nobody finds the marker without its files."""
    with suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def copy_file(source: Path, target: Path) -> FileDigest:
    """Copies a file, and returns the digest of what was read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as file, open(target, "wb") as copy:
        while block := file.read(1 << 20):
            digest.update(block)
            copy.write(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def put_json(path: Path, document: Any) -> None:
    """Writes JSON directly under its final name, because a mounted bucket may not support renaming."""
    path.write_bytes(as_json(document))
