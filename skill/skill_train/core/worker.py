"""Runs a worker module in a child process, so that a crash of native code does not end the command.

llama-cpp-python 0.3.36 segfaults on some processors (AMX weight buffers), and aborts on files it does not like. A
worker is `python -m skill_train.<name>_worker JOB RESULT`: it reads a JSON job, writes a JSON result, and may print
progress lines `@progress DONE TOTAL TEXT` on stdout.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from skill_train.core.console import Bar
from skill_train.core.errors import (
    DecisionNeeded,
    Interrupted,
    NativeCrash,
    died_of_memory,
    failure_of,
    from_exit_code,
    no_disk,
    not_installed,
)
from skill_train.core.files import scratch_folder, write_json
from skill_train.core.memory import keep_freed, note_memory, peak_memory_bytes, watch_memory
from skill_train.program.events import seek_cycles_seldom

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor  # it loads logging, which `plan` does not need

PROGRESS = "@progress "
PEAK = "@peak "  # a worker prints its peak memory in bytes as its last line
_TAIL_LINES = 12
_WANTED = re.compile(r"GGML_ASSERT\((.*)\) failed")  # what llama.cpp checks before it ends its process
_SHOWN = 200  # characters of such a check in a message
# Variables for the processes of llama.cpp. OpenMP's waiting threads spin, which made small steps ten times slower on a
# busy machine. A failed check starts gdb if it is installed: that took 15 s, and once a minute.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "GGML_NO_BACKTRACE": "1"}
# Signals with which native code never ends itself, so the GGUF file is not to blame.
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) if os.name == "posix" else ()
Job = TypeVar("Job")
Answer = TypeVar("Answer")
_AT_WORK: set[subprocess.Popen[str]] = set()
_ENDING = threading.Event()


def llama_cpp_folder() -> Path:
    """The folder of llama-cpp-python, without importing it: only workers may load its native library.

    Raises:
        NotInstalled: llama-cpp-python is missing.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise not_installed("llama-cpp-python", "gguf")
    return Path(spec.submodule_search_locations[0])


def run_worker(
    module: str, job: object, answer: type[Answer], *, progress: Bar | None = None, most_seconds: float | None = None
) -> Answer:
    """Runs one job in a worker and returns its result.

    Args:
        module: the worker, such as `skill_train.llama.inference_worker`.
        job: an object of the class that the worker reads.
        answer: the class of the worker's result; `object` if nobody reads it.
        progress: called with the worker's progress lines.
        most_seconds: the worker is ended after this time.

    Raises:
        NativeCrash: a signal ended the worker, or it took longer than `most_seconds`.
        DecisionNeeded: the system killed the worker (SIGKILL: most likely out of memory).
        Interrupted: somebody ended the worker.
        SkillTrainError: the worker itself reported this error.
        OSError: there was no room for its answer in the folder for temporary files.
    """
    with scratch_folder() as folder:
        job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "log.txt"))
        write_json(job_file, document := msgspec.to_builtins(job))
        started = time.monotonic()
        code = _run(module, job_file, result_file, log_file, progress, most_seconds)
        log = log_file.read_text(encoding="utf-8", errors="replace")
        if most_seconds is not None and code < 0 and time.monotonic() - started >= most_seconds:
            raise hangs(f"{module} did not finish within {most_seconds:g} s", _tail(log))
        if code == errno.ENOSPC:
            raise OSError(code, os.strerror(code), str(folder))
        if code < 0 or not result_file.is_file():
            raise ended_without_result(module, code, log, file_of(document))
        result = json.loads(result_file.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "error" in result:
            raise from_exit_code(int(result["exit_code"]), result["error"])
        return msgspec.convert(result, answer)


def file_of(job: object) -> str:
    """The name of a job's GGUF file; empty if it has none."""
    return Path(str(job["gguf"])).name if isinstance(job, Mapping) and job.get("gguf") else ""


def ended_without_result(module: str, code: int, log: str, file: str) -> DecisionNeeded | NativeCrash | Interrupted:
    """The error of a worker that ended without a result. `code` is its exit code, negative for a signal. `file` is the
    name of its GGUF file, or empty."""
    if code == -signal.SIGKILL or died_of_memory(log):  # glibc ends with exit 127 then
        return _no_memory(module, code, log)
    if -code in _FROM_OUTSIDE:
        return Interrupted(
            f"{module} was ended with {signal.Signals(-code).name}",
            code="interrupted",
            expected="a process that nobody ends",
            hint="run the same command again",
        )
    if code < 0:
        return _crash(module, -code, log, file)
    return NativeCrash(
        f"{module} ended with exit code {code} and no result",
        code="program_failed",
        got=_tail(log),
        hint="skill-train demo",
    )


def hangs(message: str, got: str = "") -> NativeCrash:
    """The error of a worker that was ended because it took too long."""
    hint = "run the same command again when the machine is less busy; skill-train doctor --self-test"
    return NativeCrash(message, code="worker_hangs", got=got, hint=hint)


def report_progress(done: float, total: float, text: str) -> None:
    """Prints one progress line. For workers."""
    print(f"{PROGRESS}{done} {total} {text}", flush=True)


def worker_main(run: Callable[[Job], object], kind: type[Job]) -> None:
    """Reads the job of this kind, calls `run(job)`, and writes its result or its error. For workers."""
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    keep_freed()
    seek_cycles_seldom()
    job, result_file = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    try:
        result: object = msgspec.to_builtins(run(msgspec.convert(job, kind)))
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        result = failure
    try:
        write_json(result_file, result)
    except OSError as error:
        if no_disk(error) is None:
            raise
        sys.exit(errno.ENOSPC)  # the log in the same folder can hold no words either
    if peak := peak_memory_bytes():
        print(f"\n{PEAK}{peak}", flush=True)  # native code may have left a line without an end


def _end_with_the_command() -> None:
    """Ends this worker when its standard input closes, because then the command that started it has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


@contextlib.contextmanager
def ending(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """Ends the workers of all threads when an exception is raised. Ctrl-C reaches only the main thread, and a pool
    would wait for its threads. A worker that is started during this is ended at once."""
    try:
        with pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _ENDING.set()
                for process in list(_AT_WORK):
                    process.kill()
                raise
    finally:
        _ENDING.clear()


@contextlib.contextmanager
def started(log: Path, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a worker with pipes for its input and its output. Its stderr goes to `log`."""
    environment = QUIET | dict(os.environ, PYTHONUNBUFFERED="1", HF_HUB_DISABLE_TELEMETRY="1")
    command = [sys.executable, "-m", module, *arguments]
    with (
        open(log, "w", encoding="utf-8") as log_file,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True, env=environment
        ) as process,
    ):
        watch_memory(process.pid)
        yield process


def _run(module: str, job: Path, result: Path, log: Path, progress: Bar | None, most_seconds: float | None) -> int:
    with started(log, module, str(job), str(result)) as process:
        _AT_WORK.add(process)
        if _ENDING.is_set():
            process.kill()
        limit = threading.Timer(most_seconds or 0, process.kill)
        if most_seconds is not None:
            limit.start()
        try:
            for line in process.stdout or ():
                if line.startswith(PEAK):
                    note_memory(int(line.removeprefix(PEAK)))
                if line.startswith(PROGRESS) and progress is not None:
                    done, total, *text = line.removeprefix(PROGRESS).rstrip("\n").split(" ", 2)
                    progress(float(done), float(total), " ".join(text))
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
            _AT_WORK.discard(process)
    return process.returncode


def _no_memory(module: str, code: int, log: str) -> DecisionNeeded:
    killed = code == -signal.SIGKILL
    return DecisionNeeded(
        f"the system killed {module} (SIGKILL)" if killed else f"{module} ended because it could not allocate memory",
        code="out_of_memory",
        expected="enough memory for the model",
        got=_tail(log),
        hint="close other programs, or run this step on a machine with more memory",
    )


def _crash(module: str, number: int, log: str, file: str) -> NativeCrash:
    where, hint = module, "skill-train demo; if that crashes too, try another version of llama-cpp-python"
    if file:
        where, hint = (
            file,
            "make the file again: skill-train export-gguf RUN; skill-train demo tells whether others work",
        )
    crashed = f"llama.cpp crashed with {signal.Signals(number).name}"
    expectation = _WANTED.search(log)
    why = f": it expects {expectation[1][:_SHOWN]}" if expectation else ""
    return NativeCrash(
        f"{crashed} {'on' if file else 'in'} {where}{why}", code="native_crash", got=_tail(log), hint=hint
    )


def _tail(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-_TAIL_LINES:])
