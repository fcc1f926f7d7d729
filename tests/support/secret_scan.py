"""Looks for a secret in everything that a story wrote anywhere, and in the arguments of every process it started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hub_emulator import Hub
from hub_emulator.buckets import read_file


def hook(folder: Path) -> dict[str, str]:
    """Environment of a `Commands` that writes the arguments of each process that it starts, exactly, into a file."""
    folder.mkdir()
    return {"TEST_ARGUMENTS": str(folder / "argv.jsonl")}


@contextmanager
def arguments_of_processes() -> Iterator[set[bytes]]:
    """The arguments of all processes of this machine meanwhile, also of those that a job starts; none without /proc."""
    seen: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes())
                except OSError:  # it has ended, or is another's
                    continue

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


def places(secret: str, hub: Hub, folder: Path, texts: dict[str, Any]) -> tuple[list[str], int]:
    """Where it is, and in how many places was looked: files below a folder, what the Hub holds, `texts` by name."""
    looked = {name: text if isinstance(text, bytes) else str(text).encode() for name, text in texts.items()}
    looked |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for bucket in hub.buckets.values():  # in the store they are packed
        looked |= {f"{bucket.id}/{path}": read_file(hub, bucket, path) for path in bucket.files}
    for (_, name), repository in hub.repositories.items():
        looked |= {f"{name}/{path}": content for path, content in repository.files.items()}
    for job in hub.jobs.all:
        shown = (job.spec, job.labels, job.info(), job.commands, job.lines, job.message)
        looked[f"job {job.number}"] = repr(shown).encode()
    looked["requests"] = repr(hub.log).encode()
    return [name for name, text in looked.items() if secret.encode() in text], len(looked)
