"""A process with numbers of processes of its own, as in another container that shares this folder."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

_WORDS = ("unshare", "--pid", "--fork")


@cache
def possible() -> bool:
    """Linux, and allowed: as root, or where users may make namespaces."""
    return shutil.which("unshare") is not None and not subprocess.run([*_WORDS, "true"], capture_output=True).returncode


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_WORDS, *command], capture_output=True, text=True, timeout=60)
