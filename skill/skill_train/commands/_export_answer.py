"""The answer of `export-gguf`: the files, which one to ship, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.commands._drawing import draw_line
from skill_train.commands._exported_files import ListedFile, files_table
from skill_train.commands._for_device import DeviceAnswer, draw_answer
from skill_train.commands._projector import server
from skill_train.commands._shell import quoted
from skill_train.core.console import Result
from skill_train.core.errors import DecisionNeeded
from skill_train.run.folder import RunDir


@dataclass(frozen=True)
class ExportedFiles:
    """What an export made: `out` holds the files of `model`, which are called `name`."""

    model: Path
    out: Path
    name: str
    outputs: list[ListedFile]
    projector: ListedFile | None


def result_of(
    done: ExportedFiles, data: Mapping[str, object], answer: DeviceAnswer | None, error: DecisionNeeded | None
) -> Result:
    """The answer of an export.

    Args:
        answer: which file to ship; None when no device was named.
        error: no file fits the device. The files are there all the same.
    """
    files = [*done.outputs, *([done.projector] if done.projector else [])]
    last = done.outputs[-1]["path"]
    if answer is not None:
        last = next((file["path"] for file in done.outputs if file["quant"] == answer["recommended"]), last)

    def draw(rich: Any) -> None:
        files_table(files)(rich)
        draw_line(rich, f"for Ollama: {data['ollama']}")
        if answer is not None:
            draw_answer(rich, answer)

    data = {**data, **({"mmproj": done.projector} if done.projector else {}), **({"for": answer} if answer else {})}
    return Result(data, human=draw, quiet=last, next=[] if error else _next(done, last), error=error)


def _next(done: ExportedFiles, last: str) -> list[str]:
    """The proof, the server for a pair, and a conversation."""
    run = done.out.parent
    named = " ".join(f"--gguf {quoted(output['path'])}" for output in done.outputs)
    is_run = RunDir.is_one(run)
    target = quoted(run) if is_run else f"--reference {quoted(done.model)} {named}"
    pair = [server(last, done.projector)] if done.projector else []
    return [f"skill-train verify {target}", *pair, f"skill-train chat {quoted(run if is_run else last)}"]
