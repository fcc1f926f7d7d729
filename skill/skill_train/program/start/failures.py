"""How a process of the training says why it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skill_train.program.events import Refused, explanation, tell, write_json


def tell_failure(refusal: Refused, folder: Path | None) -> None:
    """Reports why this process failed, if it is the first one. The other processes fail because the first one did."""
    if folder is not None and folder.is_dir():
        record = folder / "train.failed.json"
        if record.exists():
            return
        with suppress(OSError):  # the disk may be full; the event below gives the reason too
            write_json(record, refusal.failure)
    tell("failed", **refusal.failure)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turns missing packages, full disks and exhausted memory into a `Refused`. A bug keeps its traceback."""
    try:
        yield
    except Exception as error:
        refusal = explanation(error)
        if refusal is None:
            raise
        raise refusal from error
