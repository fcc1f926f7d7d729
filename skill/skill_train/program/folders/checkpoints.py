"""The checkpoints of a training on disk, other files of an earlier start, and the signals at which a training writes
its last checkpoint."""

import json
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from skill_train.program.events import Refused, again, file_digest, write_json

Taken = TypeVar("Taken")
COMPLETE, DIGESTS = "complete.json", "sha256.json"  # in a checkpoint: the size and the SHA-256 of each file


def mark(checkpoint: Path) -> None:
    """Writes the digests of all files, then their sizes. A checkpoint without the file of sizes counts as torn."""
    for name in (COMPLETE, DIGESTS):
        (checkpoint / name).unlink(missing_ok=True)
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    write_json(checkpoint / DIGESTS, {name: file_digest(path)["sha256"] for name, path in files.items()})
    files[DIGESTS] = checkpoint / DIGESTS
    write_json(checkpoint / COMPLETE, {name: path.stat().st_size for name, path in files.items()})


def is_complete(checkpoint: Path) -> bool:
    """Whether all its files have the sizes that its marker names. A damaged marker counts as none."""
    marker = checkpoint / COMPLETE
    if not marker.is_file():
        return False
    try:
        sizes = json.loads(marker.read_text(encoding="utf-8"))
        return bool(sizes) and all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, RecursionError):
        return False


def share_weights(folder: Path, like: Path) -> None:
    """Gives the weights in a folder the permissions of the file `like`. safetensors (0.8) lets only the owner read
    them, so the user could not merge a run that root trained in a container."""
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without permissions
            file.chmod(like.stat().st_mode & 0o777)


def without(path: Path) -> str:
    """How to go on without a damaged file or checkpoint."""
    return f"move {shlex.quote(str(path))} away, then {again()}"


def from_earlier_start(path: Path, take: Callable[[Any], Taken], otherwise: str) -> Taken:
    """What `take` finds in a JSON file that an earlier start wrote. `otherwise` is how to go on without the file, if it
    is damaged."""
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(
            f"{path} is damaged",
            code="broken_record",
            expected="the file as an earlier start of this training wrote it",
            got=f"{type(error).__name__}: {error}"[:200],
            hint=f"put it back, or {otherwise}",
        ) from error


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def stop_signals() -> list[int]:
    """The signals that end a training at a checkpoint; under `nohup` not the closing of the terminal."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers
