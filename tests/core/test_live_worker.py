"""A worker that stays: answers, refuses, crashes, and ends with its command; each a real child process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skill_train.core.errors import DecisionNeeded, NativeCrash, UsageError
from skill_train.core.live_worker import live_worker

WORKER = "talking_worker"
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True)
def _worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT, prepend=os.pathsep)


def test_it_answers_many_requests_and_ends_with_the_block() -> None:
    with live_worker(WORKER, {"key": "a secret of the job"}) as worker:
        first = worker.receive()
        assert first["job"] == {"key": "a secret of the job"} and first["arguments"] == []
        worker.send({"parts": [1, "две", {"three": 3}]})
        assert [worker.receive() for _ in range(3)] == [1, "две", {"three": 3}]
        worker.send({"print": True, "parts": ["after"]})  # what native code prints is no answer
        assert worker.receive() == "after"
        child = psutil.Process(first["pid"])
        told = [*child.cmdline(), *child.environ().values()]
        assert not any("a secret of the job" in word for word in told)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_is_an_error_that_names_the_signal(name: str) -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        worker.send({"signal": name})
        with pytest.raises(NativeCrash, match=name) as caught:
            worker.receive()
    assert "the last words of native code" in caught.value.got


def test_memory_that_ran_out_is_said() -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        worker.send({"bad_alloc": True})
        with pytest.raises(DecisionNeeded) as caught:
            worker.receive()
    assert caught.value.code == "out_of_memory"


def test_one_that_is_killed_in_the_middle_of_an_answer_is_one_without_an_answer() -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        worker.send({"parts": ["more than a pipe holds" * 100_000]})
        select.select([worker.process.stdout], [], [], 60)
        worker.process.kill()  # as the system does where memory ends
        with pytest.raises(DecisionNeeded) as caught:
            worker.receive()
    assert caught.value.code == "out_of_memory"


def test_its_own_refusal_comes_through() -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        worker.send({"refuse": "no"})
        with pytest.raises(UsageError, match="no"):
            worker.receive()


def test_an_end_without_an_answer_is_an_error() -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        worker.send({"end": True})
        with pytest.raises(NativeCrash, match="exit code 0 and no result"):
            worker.receive()
        worker.send({"parts": [1]})  # to nobody
        with pytest.raises(NativeCrash):
            worker.receive()


def test_one_that_says_nothing_is_ended() -> None:
    with live_worker(WORKER, {}) as worker:
        worker.receive()
        with pytest.raises(NativeCrash) as caught:
            worker.receive_within(0.2)
    assert caught.value.code == "worker_hangs"


def test_it_ends_with_the_command_that_started_it() -> None:
    program = (
        "from skill_train.core.live_worker import live_worker\n"
        "with live_worker('talking_worker', {}) as worker:\n"
        "    print(worker.receive()['pid'], flush=True)\n"
        "    worker.receive()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = psutil.Process(int(command.stdout.readline()))
        command.kill()
    worker.wait(10)
