"""A worker that stays: it loads once and answers many requests, each with one or more lines.

`run_worker` gives its job in a file. Here the job and each request are a line of JSON on the child's standard input.
Their content is thus in no list of arguments, no environment and no file.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from skill_train.core.errors import SkillTrainError, failure_of, from_exit_code
from skill_train.core.files import scratch_folder
from skill_train.core.memory import keep_freed
from skill_train.core.worker import ended_without_result, file_of, hangs, started
from skill_train.program.events import seek_cycles_seldom

Send = Callable[[object], None]


@dataclass
class LiveWorker:
    """The parent's side of a worker."""

    module: str
    process: subprocess.Popen[str]
    log: Path  # the output of native code; it grows while the worker lives
    file: str  # the name of the job's GGUF file; empty for none

    def send(self, request: object) -> None:
        """Sends one request. If the worker has ended, the next `receive` raises the error."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        """The next line of the worker.

        Raises:
            SkillTrainError: the worker reported this error.
            NativeCrash: the worker ended.
            DecisionNeeded: there was not enough memory.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # nothing, or a part of an answer
            code = self.process.wait()
            log = self.log.read_text(encoding="utf-8", errors="replace")
            raise ended_without_result(self.module, code, log, self.file)
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise from_exit_code(int(answer["exit_code"]), answer["error"])
        return answer

    def receive_within(self, seconds: float) -> Any:
        """As `receive`, but ends a worker that sends nothing within `seconds`.

        Raises:
            NativeCrash: the worker sent nothing.
        """
        limit = threading.Timer(seconds, self.process.kill)
        limit.start()
        try:
            return self.receive()
        except SkillTrainError:
            if limit.is_alive():
                raise
            raise hangs(f"{self.module} did not begin within {seconds:g} s") from None
        finally:
            limit.cancel()


@contextlib.contextmanager
def live_worker(module: str, job: object) -> Iterator[LiveWorker]:
    """Starts a worker and sends its job. The worker is ended with the block."""
    with scratch_folder() as folder:
        log = folder / "log.txt"
        with started(log, module) as process:
            worker = LiveWorker(module, process, log, file_of(job))
            try:
                worker.send(job)
                yield worker
            finally:
                process.kill()
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the worker did not read the last request
                    process.stdin.close()


def live_worker_main(work: Callable[[Any, Callable[[], Any], Send], None]) -> None:
    """Calls `work(job, receive, send)`. For workers: the process ends after `work`, or when the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends this process
    # The output of native code goes to the log, and not between the answers.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    keep_freed()
    seek_cycles_seldom()
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()

    def receive() -> Any:
        return json.loads(requests.get())

    def send(answer: object) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    try:
        work(receive(), receive, send)
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        send(failure)


def _read(stream: IO[str], requests: queue.Queue[str]) -> None:
    for line in stream:
        requests.put(line)
    os._exit(0)  # the command has ended
