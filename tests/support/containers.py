"""A process with numbers of processes of its own, as in another container that shares this folder, or with a
read-only folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

_WORDS = ("unshare", "--pid", "--fork")
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@cache
def possible() -> bool:
    """Linux, and allowed: as root, or where users may make namespaces."""
    return shutil.which("unshare") is not None and not subprocess.run([*_WORDS, "true"], capture_output=True).returncode


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_WORDS, *command], capture_output=True, text=True, timeout=60)


@cache
def may_mount() -> bool:
    return shutil.which("unshare") is not None and not run_read_only(Path("/"), ["true"]).returncode


def run_read_only(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that finds this folder on a read-only disk, for root too."""
    words = ["unshare", "--mount", "sh", "-c", _READ_ONLY, str(folder), *command]
    cold = os.environ | {"READ_ONLY": "1"}  # a warm process (`warm_start.py`) has no such folder
    return subprocess.run(words, env=cold, capture_output=True, text=True, timeout=120)
