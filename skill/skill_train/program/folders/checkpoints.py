"""The checkpoints of a training on disk, and the signals at which it writes its last one."""

from __future__ import annotations

import json
import signal
from pathlib import Path


def is_complete(checkpoint: Path) -> bool:
    marker = checkpoint / "complete.json"
    if not marker.is_file():
        return False
    try:
        sizes = json.loads(marker.read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def stop_signals() -> list[int]:
    """The signals that end a training at a checkpoint. Under `nohup`, the closing of the terminal is not one of
    them."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers
