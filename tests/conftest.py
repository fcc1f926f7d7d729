"""Every test runs away from the user's home, without a token, and without the network."""

from __future__ import annotations

import compileall
import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shared_runs
import tiny
from command_child import Commands
from warm_start import WarmStart

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT")
_WARM_PYTHON = "SKILL_TRAIN_WARM_PYTHON"  # of the process that started the others with `-n`
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_temporary: tempfile.TemporaryDirectory[str] | None = None
_shared = Path()  # the user's cache
_warm: WarmStart | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports huggingface_hub, which reads its environment once."""
    global _shared, _temporary, _warm
    _keep_to_one_core()
    sys.dont_write_bytecode = False  # pytest keeps what it compiles: half the time of collecting
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _compile_modules()
    gc.set_threshold(200_000)  # as the command sets it: the libraries' objects stay, and are looked at seldom
    if config.option.markexpr == "live":
        return
    _temporary = tempfile.TemporaryDirectory(prefix="skill-train-tests-")
    _shared = Path(os.environ.get("SKILL_TRAIN_CACHE") or _user_cache() / "skill-train")
    os.environ["SKILL_TRAIN_CACHE"] = str(_own_cache(Path(_temporary.name) / "skill-train", _shared))
    os.environ.update(_environment(Path(_temporary.name)))
    os.environ.setdefault(shared_runs.FOLDER, str(Path(_temporary.name) / "shared"))  # the first process says it to all
    os.environ.setdefault(tiny.CACHE, os.environ["SKILL_TRAIN_CACHE"])
    for name in _TOKENS:
        os.environ.pop(name, None)
    starts_others = bool(getattr(config.option, "tx", None))
    if starts_others:
        _download_converter(Path(_temporary.name) / "skill-train")
    if starts_others and _can_start_warm() and "not slow" not in config.option.markexpr:
        _warm = WarmStart({min(os.sched_getaffinity(0))})
        os.environ[_WARM_PYTHON] = str(_warm.python)


def _can_start_warm() -> bool:
    return sys.platform == "linux" and sys.prefix != sys.base_prefix


def _compile_modules() -> None:
    """Where the environment forbids Python to write bytecode, as containers do, each of thousands of processes would
    compile our modules anew: 0.4 s of a plan's 0.6."""
    for folder in (Path(__file__).parents[1] / "skill", Path(__file__).with_name("support")):
        compileall.compile_dir(folder, quiet=2)


def _keep_to_one_core() -> None:
    """One of several processes, with all that it starts. Threads of torch and llama.cpp that wait for each other on
    shared cores took a fifth of the time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all left out by `-m` is not imported. `make check` spent a third of its time on that."""
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if not left_out or " or " in config.option.markexpr or collection_path.suffix != ".py":
        return None
    marked = re.search(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", collection_path.read_text(encoding="utf-8"), re.M)
    return True if marked and marked[1] in left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no core waits for the last of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_unconfigure() -> None:
    if _warm is not None:
        _warm.close()
    if _temporary is not None:
        _share_converter(Path(_temporary.name) / "skill-train", _shared)
        _temporary.cleanup()


def _own_cache(cache: Path, shared: Path) -> Path:
    """What tests measure and count stays in a cache of their own. The converter in it is the user's, because it is
    downloaded once and checked by its digests."""
    from skill_train.llama.get_converter import is_whole

    cache.mkdir()
    for converter in filter(is_whole, shared.glob("llama.cpp-*")):
        (cache / converter.name).symlink_to(converter, target_is_directory=True)
    return cache


def _download_converter(cache: Path) -> None:
    """Once for all processes, before they start. Tests that need it say what is wrong if this fails."""
    from skill_train.core.errors import SkillTrainError
    from skill_train.llama.get_converter import fetch

    with contextlib.suppress(SkillTrainError):
        fetch()
    _share_converter(cache, _shared)


def _share_converter(cache: Path, shared: Path) -> None:
    """One that the tests had to download serves the next time, and the processes that start after this one."""
    for converter in cache.glob("llama.cpp-*"):
        if not converter.is_symlink() and not (shared / converter.name).exists():
            shared.mkdir(parents=True, exist_ok=True)
            shutil.move(converter, shared / converter.name)
            converter.symlink_to(shared / converter.name, target_is_directory=True)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path that a test forgets lands in its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections other than to this machine fail, and say who wanted them."""
    if request.node.get_closest_marker("live") is None:
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, _only_here(getattr(socket.socket, name)))
    yield


@pytest.fixture(scope="module", autouse=True)
def _libraries_stay() -> None:
    """What the files before this one imported is not searched again. A training looks for cycles three times, which
    took a third of a second each among the objects of torch and transformers."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def own_threads() -> Iterator[None]:
    """For files that train in their own process: a plan says one thread, and the files after them get theirs back."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For trainings in the tests' own process whose answers are not compared: the two of 48 tokens that the record
    holds take a third of a training of a few steps. Fixtures of a whole file come before this and keep them."""
    from skill_train.program import checks

    monkeypatch.setattr(checks, "ANSWER_TOKENS", 4)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Any]:
    """A Hub for tests, of which nothing is asked that it does not know."""
    from hub_emulator import Hub

    with Hub(tmp_path / "hub") as server:
        yield server
    assert server.unknown == []


@pytest.fixture(scope="module")
def desk(_starts_warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Hub for all tests of a file, a process for the commands that ask it, and its home."""
    from hub_emulator import Hub

    root = tmp_path_factory.mktemp("desk")
    with Hub(root / "hub") as server:
        commands = Commands(server.environment(root / "home"))
        yield server, commands, root / "home"
        commands.close()
    assert server.unknown == []


@pytest.fixture(scope="session")
def converter() -> None:
    """What a command downloads once, for tests of commands that reach no network."""
    from skill_train.llama.get_converter import find_or_fetch

    find_or_fetch()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Path]:
    """Stands for Python, and starts the training program in a fraction of a second. All processes share one."""
    if shared := os.environ.get(_WARM_PYTHON):
        yield Path(shared)
        return
    started = WarmStart(os.sched_getaffinity(0))
    yield started.python
    started.close()


@pytest.fixture(scope="module", autouse=True)
def _starts_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """In files with slow tests that are not about processes, what this process starts and what those start."""
    with pytest.MonkeyPatch.context() as patch:
        slow = any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path)
        real = request.node.get_closest_marker("real_python")
        if slow and not real and _can_start_warm():
            patch.setattr(sys, "executable", str(request.getfixturevalue("warm_python")))
        yield


@pytest.fixture(scope="session")
def _command_children() -> Iterator[dict[str, Commands]]:
    children: dict[str, Commands] = {}
    yield children
    for child in children.values():
        child.close()


@pytest.fixture(scope="module")
def commands(_starts_warm: None, _command_children: dict[str, Commands]) -> Commands:
    """Many commands, without the seconds in which Python starts each. One process for all files that start the same
    Python."""
    if sys.executable not in _command_children:
        _command_children[sys.executable] = Commands(dict(os.environ))
    return _command_children[sys.executable]


def _only_here(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOOPBACK:
            raise PermissionError(f"a test tried to reach {address}; only tests marked `live` may")
        return connect(self, address)

    return guarded


def _environment(root: Path) -> dict[str, str]:
    home = Path.home()
    folders = {"HOME": root, "HF_HOME": root / "huggingface", "XDG_CACHE_HOME": root / "cache"}
    kept = {"PIP_CACHE_DIR": _user_cache() / "pip"}  # the converter's archive comes through the user's own pip
    for config in (home / ".config" / "pip" / "pip.conf", home / ".pip" / "pip.conf"):
        if config.is_file():
            kept.setdefault("PIP_CONFIG_FILE", config)
    kept = {name: path for name, path in kept.items() if name not in os.environ}
    return {name: str(path) for name, path in (folders | kept).items()} | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_EXPERIMENTAL_WARNING": "1",
        "HF_XET_TELEMETRY_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the processor from the other worker: twice the time
        "NO_COLOR": "1",
    }


def _user_cache() -> Path:
    if os.uname().sysname == "Darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
