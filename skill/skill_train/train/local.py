"""Trains on this machine: starts `train.py` as a child process and follows its events. No other module does that.

A plan of several processes is started through `accelerate launch`. The process of rank 0 reports the progress, and the
first process that fails reports its error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from skill_train.core.console import Bar
from skill_train.core.errors import (
    DecisionNeeded,
    Interrupted,
    NativeCrash,
    NotInstalled,
    SkillTrainError,
    TrainingFailed,
    UsageError,
    died_of_memory,
    from_exit_code,
    quoted,
)
from skill_train.core.files import scratch_folder, write_json
from skill_train.core.memory import watch_memory
from skill_train.core.program_events import DataRead, Event, Probed, ProgramFailed, StepDone, events
from skill_train.core.units import gigabytes
from skill_train.facts import MachineFacts, ModelFacts
from skill_train.machine.limits import require_room_for_torch
from skill_train.machine.training_program import train_program
from skill_train.plan.file import require_own_folder, write_plan
from skill_train.program import plan as program_plan
from skill_train.program.folders.checkpoints import is_complete, numbered, step_of, stop_signals
from skill_train.program.plan import (
    kills_for_memory,
    last_stage,
    layout_words,
    memory_ended,
    second_try_message,
    smaller_plan,
    without_launchers,
)
from skill_train.run import cloud_record, plan_record, train_record
from skill_train.run.earlier_start import already_there, forget, has_begun
from skill_train.run.folder import RunDir, StepResult
from skill_train.run.job_spec import ENVIRONMENT
from skill_train.run.lock import locked
from skill_train.run.plan_record import Launch, Plan
from skill_train.run.records import timestamp
from skill_train.run.train_record import TrainRecord
from skill_train.train import precision_probe

_TAIL_LINES = 15
_ATTEMPT = '{"event": "attempt", '  # the beginning of the line in train.log before each attempt


def train(
    run: RunDir, plan: Plan, *, resume: bool, progress: Bar, say: Callable[[str], None]
) -> StepResult[TrainRecord]:
    """Runs the plan in its run directory. A finished run of the same recipe is reused.

    Raises:
        UsageError: the folder holds another run, or a run in the cloud, or a part of this run without `resume`.
        SkillTrainError: the program reported this error.
    """
    cloud_record.require_not_submitted(run)
    require_own_folder(run, plan)
    os.getcwd()  # raises if it was removed: the child could not load its libraries
    there = set(run.path.glob("*"))
    with locked(run, "local") as lock:
        finished = already_there(run, plan, resume)
        if finished is not None:
            return StepResult(finished, reused=True)
        try:
            require_room_for_torch()
        except DecisionNeeded:
            forget(run, there)
            raise
        if not has_begun(run):
            write_plan(run, plan)
        try:
            _run_until_it_fits(run, lock, resume=resume, progress=progress, say=say)
        except (UsageError, NotInstalled):
            forget(run, there)
            raise
        return StepResult(train_record.read(run.record("train")))


def probe_precision(plan: Plan, machine: MachineFacts, model: ModelFacts) -> Probed | None:
    """Times fp32 and bf16 on this machine with this model, and stores the result in the cache. None if the probe
    failed."""
    device = plan.placement.device
    cached = precision_probe.known_probe(device, machine, model)
    if cached is not None:
        return cached
    with scratch_folder() as folder:
        file = folder / "plan.json"
        plan_record.write(file, plan)
        command = [sys.executable, str(train_program()), str(file), "--probe"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    figures = probed(done.stdout)
    if figures is not None:
        precision_probe.remember(device, machine, model, figures)
    return figures


def _run_until_it_fits(
    run: RunDir, lock: TextIO | None, *, resume: bool, progress: Bar, say: Callable[[str], None]
) -> None:
    """Runs the program. If a batch ran out of memory, writes a smaller layout into the plan and runs the program once
    more, from the newest checkpoint."""
    kills = kills_for_memory()
    try:
        return _run_program(run, lock, resume=resume, progress=progress, say=say)
    except DecisionNeeded as error:
        envelope = error.as_dict()
        stage = last_stage(run.log.read_text(encoding="utf-8", errors="replace").rpartition(_ATTEMPT)[2])
        plan: program_plan.Plan = msgspec.to_builtins(plan_record.read(run.plan))
        smaller = smaller_plan(plan, envelope, stage) if memory_ended(envelope, kills) else None
        if smaller is None:
            raise
    say(second_try_message(smaller))
    write_json(run.plan, smaller)
    try:
        _run_program(run, lock, resume=True, progress=progress, say=say)
    except DecisionNeeded as error:
        if error.code == "out_of_memory":
            error.hint = f"{error.hint}; {layout_words(smaller['placement'])} was tried too"
        raise


def _run_program(run: RunDir, lock: TextIO | None, *, resume: bool, progress: Bar, say: Callable[[str], None]) -> None:
    launch = plan_record.read(run.plan).launch
    failure: ProgramFailed | None = None
    with open(run.log, "a+", encoding="utf-8", errors="replace") as log:
        begun = {"at": timestamp(), "resume": resume, "program": str(train_program())}
        log.write(f"{_ATTEMPT}{json.dumps(begun)[1:]}\n")  # an event like those of the program
        log.flush()
        start = log.tell()  # the output of this attempt begins here
        with _child([*_command(run, launch, resume), "--attended"], launch, log, lock) as child:
            for line in child.process.stdout or ():
                log.write(line)
                log.flush()
                for event in events(line):
                    failure = failure or (event if event["event"] == "failed" else None)
                    _show(event, progress, say)
        log.seek(start)
        output = log.read()
    if child.process.returncode != 0:
        printed = output if launch.arguments else ""  # without a launcher, the exit code itself is the cause
        code = _how_it_ended(child.process.returncode, child.stopped, failure, printed)
        interrupted = code == -signal.SIGINT or (failure is not None and failure["error"]["code"] == "interrupted")
        if child.stopped == signal.SIGINT and interrupted:
            raise _interrupted(run, Interrupted, failure["error"]["message"] if failure else None)
        raise _failure(run, code, failure, output)


def _command(run: RunDir, launch: Launch, resume: bool) -> list[str]:
    """The command of the program. Several processes are started by accelerate with the arguments of the plan."""
    launcher = ["-m", "accelerate.commands.launch", *launch.arguments] if launch.arguments else []
    return [sys.executable, *launcher, str(train_program()), str(run.plan), *(["--resume"] if resume else [])]


class _child:
    """A child in its own process group. This process passes Ctrl-C on and waits, so that the child can save its work.

    A launcher passes the signal on to its processes. Their standard input is a pipe from this process. If the launcher
    or this process is killed, the pipe closes, and they save and stop.
    """

    def __init__(self, command: list[str], launch: Launch, log: Any, lock: TextIO | None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            env=without_launchers(os.environ) | ENVIRONMENT | launch.environment,
            process_group=0,
            pass_fds=(lock.fileno(),) if lock else (),  # if this process is killed, the child still has the lock
        )
        watch_memory(self.process.pid)
        if lock is not None and lock.writable():
            lock.write(f", training in process {self.process.pid}")
            lock.flush()
        self.stopped: int | None = None  # the signal that was passed on

    def __enter__(self) -> _child:
        self.old = {number: signal.signal(number, self._pass_on) for number in stop_signals()}
        return self

    def _pass_on(self, number: int, _: Any) -> None:
        self.stopped = number
        self.process.send_signal(number)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        for number, handler in self.old.items():
            signal.signal(number, handler)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _how_it_ended(code: int, stopped: int | None, failure: ProgramFailed | None, launcher: str) -> int:
    """The exit code, or minus the signal, of the process that failed first. A launcher itself always ends with 1.

    The table in the launcher's output lists the failure of each process. If no process reported an error, the first
    failure is the cause. If a process reported that it lost another, the cause is the process that the system killed.
    """
    first = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+) \(pid: ", launcher, re.DOTALL)
    killed = [int(n) for n in re.findall(r"exitcode\s*:\s*(-\d+) \(pid: ", launcher) if int(n) != -signal.SIGTERM]
    if failure is None and stopped is not None:
        return -stopped
    if failure is None and first and int(first[1]) < 0:
        return int(first[1])
    if failure is not None and _lost_another(failure) and killed:
        return killed[0]
    return code


def _interrupted(run: RunDir, kind: type[SkillTrainError], message: str | None, name: str = "") -> SkillTrainError:
    """The error after Ctrl-C or another stop signal. `message` is the program's own; None if it gave none."""
    whole = filter(is_complete, numbered(run.checkpoints))
    step = next(map(step_of, whole), None)
    when = "before its first checkpoint" if step is None else f"after its checkpoint of step {step}"
    again = f"skill-train local --resume --run-dir {quoted(run.path)}"
    return kind(message or f"training was interrupted{name} {when}", code="interrupted", hint=again)


def _lost_another(failure: ProgramFailed) -> bool:
    return bool(failure["error"]["code"] == "process_lost")


def _show(event: Event, progress: Bar, say: Callable[[str], None]) -> None:
    if event["event"] == "stage" or event["event"] == "note":
        say(event["text"])
    elif event["event"] == "data":
        say(_data_line(event))
    elif event["event"] == "step":
        progress(event["step"], event["steps"], _step_line(event))


def _step_line(event: StepDone) -> str:
    loss = "not a number" if event["loss"] is None else f"{event['loss']:.4f}"  # the program stops then and says why
    speed = "" if event["tokens_per_second"] is None else f"{event['tokens_per_second']:g} tokens/s · "
    return f"loss {loss} · {speed}{gigabytes(max(event['memory_bytes'].values()), 2)}"


def _data_line(figures: DataRead) -> str:
    cut = f", {figures['truncated_rows']} cut at max_length" if figures["truncated_rows"] else ""
    cut += f", {figures['repeated_rows']} repeat an earlier row" if figures.get("repeated_rows") else ""
    notes = "".join(f"; {note}" for note in figures["notes"])
    return (
        f"{figures['train_rows']} training rows, {figures['held_out_rows']} held out, {figures['tokens']} tokens, "
        f"{figures['trained_token_share']:.0%} of them trained{cut}{notes}"
    )


def _failure(run: RunDir, code: int, failure: ProgramFailed | None, output: str) -> Exception:
    tail = _tail(output)
    if code == -signal.SIGKILL or (failure is None and died_of_memory(tail)):
        killed = "the system killed the training process (SIGKILL), most likely for its memory"
        return DecisionNeeded(
            killed if code == -signal.SIGKILL else "the training process ended because it could not allocate memory",
            code="out_of_memory",
            expected="memory for the model, its activations and one batch",
            hint=f"skill-train local --resume --run-dir {quoted(run.path)}; or a smaller max_length or model",
        )
    if -code in stop_signals():
        return _interrupted(run, TrainingFailed, None, f" ({signal.Signals(-code).name})")
    if code < 0:
        name = signal.Signals(-code).name
        return NativeCrash(
            f"the training process crashed with {name}", code="native_crash", got=tail, hint=str(run.log)
        )
    if failure is not None and not (_lost_another(failure) and tail.startswith("[rank")):  # its traceback says more
        error = failure["error"].copy()
        error["hint"] = error["hint"].replace("RUN", quoted(run.path))
        return from_exit_code(failure["exit_code"], error)
    return NativeCrash(
        f"the training program ended with exit code {code}: {tail.splitlines()[-1] if tail else 'no output'}",
        code="program_failed",
        got=tail,
        hint=f"read {quoted(run.log)}",
    )


def _tail(output: str) -> str:
    """The last lines. If torch marks lines with their process (`[rank1]: `), only those of the first marked process,
    because several processes may write at once."""
    lines = output.splitlines()
    marked = [line for line in lines if re.match(r"\[rank\d+\]: ", line)]
    own = [line for line in marked if line.split(":")[0] == marked[0].split(":")[0]]
    return "\n".join((own or lines)[-_TAIL_LINES:])


def probed(output: str) -> Probed | None:
    """The figures of the program's `probe` event. None if it printed none, or impossible ones such as 0 seconds."""
    for event in events(output):
        if event["event"] == "probe":
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(event, Probed)
    return None
