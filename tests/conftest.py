"""Every test runs away from the user's home, without a token, and without the network."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_temporary: tempfile.TemporaryDirectory[str] | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports huggingface_hub, which reads its environment once."""
    global _temporary
    if config.option.markexpr == "live":
        return
    _temporary = tempfile.TemporaryDirectory(prefix="skill-train-tests-")
    # The converter is downloaded once and checked by its digests, so tests share it with the user's own runs.
    os.environ.setdefault("SKILL_TRAIN_CACHE", str(_user_cache() / "skill-train"))
    os.environ.update(_environment(Path(_temporary.name)))
    for name in _TOKENS:
        os.environ.pop(name, None)


def pytest_unconfigure() -> None:
    if _temporary is not None:
        _temporary.cleanup()


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
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
    }


def _user_cache() -> Path:
    if os.uname().sysname == "Darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
