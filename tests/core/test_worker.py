"""A worker that answers, refuses, crashes and is killed; each a real child process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from skill_train.core.errors import DecisionNeeded, Interrupted, NativeCrash, UsageError
from skill_train.core.worker import run_worker
from skill_train.model.template_guard_worker import require_ending

WORKER = "crashing_worker"


@pytest.fixture(autouse=True)
def _worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)


def test_a_result_comes_back_from_another_process() -> None:
    result = run_worker(WORKER, {"steps": 21}, dict)
    assert result["doubled"] == 42
    assert result["pid"] != os.getpid()


def test_a_worker_ends_with_the_command_that_started_it() -> None:
    """Else it would go on writing its part of a file, which the next command may already have looked for."""
    program = (
        "from skill_train.core.worker import run_worker\n"
        "tell = lambda *said: print(said[2], flush=True)\n"
        "run_worker('crashing_worker', {'sleep_seconds': 60, 'steps': 1}, dict, progress=tell)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = psutil.Process(int(command.stdout.readline()))
        command.kill()
    worker.wait(10)


def test_progress_is_passed_on_and_other_output_is_not() -> None:
    seen: list[tuple[Any, ...]] = []
    run_worker(WORKER, {"steps": 2}, dict, progress=lambda done, total, text: seen.append((done, total, text)))
    assert seen == [(1.0, 2.0, "tensor 0"), (2.0, 2.0, "tensor 1")]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGILL"])
def test_a_crash_is_an_error_that_names_the_signal(name: str) -> None:
    with pytest.raises(NativeCrash, match=name) as caught:
        run_worker(WORKER, {"signal": name}, dict)
    assert (caught.value.code, caught.value.exit_code) == ("native_crash", 1)
    assert "the last words of native code" in caught.value.got
    assert caught.value.hint.startswith("skill-train demo")


class Doubled(msgspec.Struct):
    doubled: int


def test_job_and_answer_have_their_types() -> None:
    assert run_worker(WORKER, {"steps": 21}, Doubled) == Doubled(42)
    with pytest.raises(msgspec.ValidationError, match="Expected `str`, got `int`"):
        run_worker(WORKER, {"steps": 1}, dict[str, str])
    with pytest.raises(NativeCrash) as caught:
        run_worker("typed_worker", {}, object)
    assert "missing required field `device`" in caught.value.got


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_an_end_from_outside_is_no_crash(name: str) -> None:
    """`verify` holds a crash against the file, and keeps that as its proof."""
    with pytest.raises(Interrupted, match=name) as caught:
        run_worker(WORKER, {"signal": name, "gguf": "folder/x.gguf"}, dict)
    assert (caught.value.code, caught.value.exit_code) == ("interrupted", 130)


def test_what_the_system_refuses_a_worker_is_no_crash() -> None:
    with pytest.raises(UsageError, match=os.strerror(errno.EMFILE)) as caught:
        run_worker(WORKER, {"errno": errno.EMFILE}, dict)
    assert caught.value.code == "system_error"


def test_a_kill_by_the_system_is_taken_as_out_of_memory() -> None:
    with pytest.raises(DecisionNeeded) as caught:
        run_worker(WORKER, {"signal": "SIGKILL"}, dict)
    assert (caught.value.code, caught.value.exit_code) == ("out_of_memory", 3)


def test_a_worker_that_gets_no_memory_says_so() -> None:
    with pytest.raises(DecisionNeeded) as caught:
        run_worker(WORKER, {"memory": "none"}, dict)
    assert (caught.value.code, caught.value.exit_code) == ("out_of_memory", 3)


@pytest.mark.parametrize("job", [{"bad_alloc": 1}, {"glibc": 1}, {"errno": errno.ENOMEM}])
def test_a_worker_whose_libraries_get_no_memory(job: dict[str, int]) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        run_worker(WORKER, job, dict)
    assert (caught.value.code, caught.value.exit_code) == ("out_of_memory", 3)


def test_a_worker_without_room_for_its_answer_says_so() -> None:
    """In the folder for temporary files, where its words would stand too."""
    with pytest.raises(OSError, match="No space left") as caught:
        run_worker(WORKER, {"most_bytes": 100}, dict)
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).parent == Path(tempfile.gettempdir())


def test_a_worker_without_room_for_a_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        run_worker(WORKER, {"most_bytes": 1000, "writes": str(tmp_path / "file")}, dict)
    assert (caught.value.code, caught.value.exit_code) == ("no_disk", 3)


def test_a_template_is_not_blamed_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))"  # of the worker alone
    (tmp_path / "sitecustomize.py").write_text(limit)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(OSError, match="No space left"):
        require_ending("{{ messages }} on a full disk")


def test_what_the_worker_refuses_arrives_as_it_was() -> None:
    with pytest.raises(UsageError, match="no such type") as caught:
        run_worker(WORKER, {"refuse": "no such type"}, dict)
    assert caught.value.as_dict() == {
        "code": "refused",
        "message": "no such type",
        "expected": "",
        "got": "",
        "hint": "try something else",
    }


def test_an_end_without_a_result_is_an_error() -> None:
    with pytest.raises(NativeCrash, match="exit code 3 and no result"):
        run_worker(WORKER, {"exit": 3}, dict)


def test_a_traceback_in_a_worker_reaches_the_user() -> None:
    with pytest.raises(NativeCrash) as caught:
        run_worker(WORKER, {"neither": "steps nor signal"}, dict)
    assert "KeyError: 'steps'" in caught.value.got


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_command_kills_its_worker(interruption: type[BaseException]) -> None:
    seen: list[int] = []

    def interrupt(done: float, total: float, text: str) -> None:
        seen.append(int(text))
        raise interruption

    started = time.monotonic()
    with pytest.raises(interruption):
        run_worker(WORKER, {"sleep_seconds": 60}, dict, progress=interrupt)
    assert time.monotonic() - started < 30  # it did not wait for the worker's own end
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_a_worker_that_hangs_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(NativeCrash) as caught:
        run_worker(WORKER, {"sleep_seconds": 30}, dict, most_seconds=1)
    assert caught.value.code == "worker_hangs"
    assert time.monotonic() - started < 10


def test_a_crash_on_a_file_names_it_and_what_was_expected() -> None:
    with pytest.raises(NativeCrash) as caught:
        run_worker(
            WORKER, {"signal": "SIGABRT", "gguf": "folder/x.gguf", "says": "a.cpp:7: GGML_ASSERT(n > 0) failed"}, dict
        )
    assert caught.value.message == "llama.cpp crashed with SIGABRT on x.gguf: it expects n > 0"
    assert "export-gguf" in caught.value.hint
