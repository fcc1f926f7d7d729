"""A disk that fills up, a folder that cannot be written, memory that runs out, Ctrl-C: each step explains itself with
its exit code, leaves nothing half under a final name, and the same command then finishes with the same bytes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import killing
from killing import COMMANDS, Chain, Step, trained_chain

pytestmark = [pytest.mark.torture, pytest.mark.xdist_group("faults"), pytest.mark.timeout(3600)]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return trained_chain(tmp_path_factory.mktemp("faults") / "chain")


# --- The disk is full ---

LARGEST = {
    "train": "checkpoints/checkpoint-8/optimizer.pt",
    "merge": "merged/model.safetensors",
    "convert": "gguf/run-f16.gguf",
    "quantize": "gguf/run-q8_0.gguf",
}


@pytest.mark.parametrize("name", list(LARGEST))
@pytest.mark.parametrize("share", [0.05, 0.7])
def test_a_file_that_may_not_grow(
    chain: Chain, tmp_path: Path, name: str, share: float, record_property: Record
) -> None:
    """A limit on the size of files, which needs no rights: as a quota, it is met where the file is written."""
    step, place = _fresh(chain, name, tmp_path)
    made = LARGEST[name]
    limit = int(share * (chain.root / "undisturbed" / "run" / made).stat().st_size)
    done = _run(step, place, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _explained(done, (3,), ("no_disk",))
    _goes_on(chain, step, place)
    record_property("counts", f"disk full, {name}: files of at most {limit} bytes; refused, then finished")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_disk_that_is_full(chain: Chain, tmp_path: Path, name: str, record_property: Record) -> None:
    """A real one, with less room than any file that a step makes needs."""
    step, place = _fresh(chain, name, tmp_path / "copy")
    with _mounted(tmp_path / "disk", "tmpfs", "size=200M") as disk:
        there = Path(shutil.copytree(place, disk / "place"))
        used = shutil.disk_usage(disk).used
        subprocess.run(["mount", "-o", f"remount,size={used + 60_000}", str(disk)], check=True)
        done = _run(step, there)
        if name != "verify":  # its record is small
            _explained(done, (3,), ("no_disk",))
        subprocess.run(["mount", "-o", "remount,size=200M", str(disk)], check=True)
        _goes_on(chain, step, there)
    record_property("counts", f"disk full, {name}: a tmpfs; refused, then finished")


# --- The folder cannot be written ---


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_read_only_folder(chain: Chain, tmp_path: Path, name: str, record_property: Record) -> None:
    step, place = _fresh(chain, name, tmp_path)
    (place / "run").mkdir(exist_ok=True)
    with _read_only(place / "run"):
        done = _run(step, place)
    _explained(done, (2,), ("system_error",))
    assert not any(word in done.stderr for word in ("training:", "gate", "% written", "read back", "1/4")), done.stderr
    _goes_on(chain, step, place)
    record_property("counts", f"read-only, {name}: refused before the work, then finished")


def test_a_proof_can_be_read_in_a_read_only_folder(chain: Chain, tmp_path: Path) -> None:
    place = Path(shutil.copytree(chain.root / "undisturbed", tmp_path / "place"))
    with _read_only(place / "run"):
        done = _run(chain.steps["verify"], place)
    assert done.returncode == 0 and json.loads(done.stdout)["data"]["reused"], done.stderr


# --- Memory runs out ---


@pytest.mark.parametrize("name", ["train", "convert", "quantize", "verify"])
def test_the_system_kills_the_child(chain: Chain, tmp_path: Path, name: str, record_property: Record) -> None:
    """Not the command itself, which explains it. A checkpoint stays."""
    step, place = _fresh(chain, name, tmp_path)
    child = killing.start(step, place, tmp_path / "log")
    victim = _first_child(child.pid, WORKERS[name], 2 if name == "verify" else 1)  # one alone only drafts answers
    time.sleep({"train": 0.5 * step.seconds, "verify": 0.0, "quantize": 0.0}.get(name, 0.2))  # short ones: at once
    os.kill(victim, signal.SIGKILL)
    out, err = child.communicate(timeout=180)
    _explained(subprocess.CompletedProcess([], child.returncode, out, err), (3,), ("out_of_memory",))
    _goes_on(chain, step, place)
    record_property("counts", f"out of memory, {name}: its child killed; exit 3, then finished")


# The converter has no name yet when its process starts.
WORKERS = {
    "train": "train.py",
    "convert": "converter_child",
    "quantize": "quantize_worker",
    "verify": "inference_worker",
}


@pytest.mark.parametrize("name", ["train", "merge", "verify"])
def test_no_memory_is_given(chain: Chain, tmp_path: Path, name: str, record_property: Record) -> None:
    """A limit on the address space: enough to load the libraries, not to work. Some libraries abort; none may hang or
    leave a traceback of ours."""
    step, place = _fresh(chain, name, tmp_path)
    seen = []
    for gigabytes in (0.6, 1.0, 1.6, 2.4):
        limit = int(gigabytes * 2**30)
        done = _run(step, place, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))  # noqa: B023
        seen.append(f"{gigabytes} GB: {done.returncode} {_code(done)}")
        assert done.returncode >= 0, done.stderr
        assert killing.torn(place / "run", chain.whole) == []
        if done.returncode == 0:
            break
    _goes_on(chain, step, place)
    record_property("counts", f"address space, {name}: {'; '.join(seen)}; then finished")


# --- Ctrl-C ---


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_ctrl_c(chain: Chain, tmp_path: Path, name: str, share: float, record_property: Record) -> None:
    """As a terminal does it: to every process of the group. The hint finishes it."""
    step, place = _fresh(chain, name, tmp_path)
    child = killing.start(step, place, tmp_path / "log")
    time.sleep(share * step.seconds)
    ended = child.poll() is not None
    if not ended:
        os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=180)
    if child.returncode != 0:  # else it was through, or had just begun to leave
        done = subprocess.CompletedProcess([], child.returncode, out, err)
        _explained(done, (130,), ("interrupted",))
        hint = json.loads(out)["error"]["hint"]
        wanted = "skill-train local --resume --run-dir run" if name == "train" else "skill-train"
        assert hint.startswith(wanted) or "local" in hint, hint
        if name == "train" and killing.operations(tmp_path / "log") and "training: 1/8" in err:
            assert list((place / "run" / "checkpoints").glob("checkpoint-*/complete.json")), err
    _goes_on(chain, step, place)
    record_property("counts", f"Ctrl-C, {name} at {share}: exit {child.returncode}, then finished")


# --- Help ---


def _fresh(chain: Chain, name: str, folder: Path) -> tuple[Step, Path]:
    step = chain.steps[name]
    return step, Path(shutil.copytree(step.before, folder / "place"))


def _run(step: Step, place: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = step.environment | {"OMP_NUM_THREADS": "1"}
    command = killing.program(*step.command)
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, **more)


def _explained(done: subprocess.CompletedProcess[str], exits: tuple[int, ...], codes: tuple[str, ...]) -> None:
    assert done.returncode in exits, (done.returncode, done.stdout, done.stderr[-3000:])
    error = json.loads(done.stdout)["error"]
    assert error["code"] in codes and error["message"] and error["hint"], error
    assert "Traceback" not in done.stderr, done.stderr


def _code(done: subprocess.CompletedProcess[str]) -> str:
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return "no answer"
    return "done" if answer["ok"] else str(answer["error"]["code"])


def _goes_on(chain: Chain, step: Step, place: Path) -> None:
    assert killing.torn(place / "run", chain.whole) == []
    assert killing.finish(step, place) == []
    assert killing.differences(step.after, killing.state(place / "run")) == []


def _first_child(parent: int, word: str, count: int = 1) -> int:
    """The first of so many that are there at once."""
    import psutil

    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = []
        for process in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.Error):
                found += [process.pid] if any(word in part for part in process.cmdline()) else []
        if len(found) >= count:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError(f"no child with {word}")


@contextmanager
def _mounted(folder: Path, kind: str, options: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """By a mount where this user is root, whom no mode stops."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        return
    for arguments in (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)]):
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
