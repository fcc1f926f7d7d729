"""Child process: runs a user's own scorer, so that its crash, its endless loop or its prints do no harm.

The file defines `score(prompt: str, answer: str, expected: str) -> float`. It runs without a sandbox, because the user
wrote it.
"""

import contextlib
import inspect
import math
import numbers
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from skill_train.core.errors import UsageError, quoted
from skill_train.core.worker import worker_main

EXPECTED = "a Python file with score(prompt: str, answer: str, expected: str) -> float"
_TEXTS = ("prompt", "answer", "expected")


class Reply(TypedDict):
    """The arguments of `score`. `prompt` has the special tokens that the model read; the others have none."""

    prompt: str
    answer: str
    expected: str


class ScoreJob(TypedDict):
    file: str
    source: str  # the bytes of the file, decoded as latin-1
    rows: list[Reply]


def run(job: ScoreJob) -> list[float]:
    """One score for each row."""
    score = _load(Path(job["file"]), job["source"].encode("latin-1"))
    return [_score(score, row, number, job["file"]) for number, row in enumerate(job["rows"])]


def _load(file: Path, source: bytes) -> Callable[..., Any]:
    """The function `score` in the source that was read when the command began."""
    if file.suffix != ".py":
        raise _bad(file, "is not a Python file", file.name)
    module = types.ModuleType("skill_train_user_scorer")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look up annotations that are strings there
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - it is the user's own
    except (Exception, SystemExit) as error:
        raise _bad(file, "cannot be loaded", _error_with_line(error, file)) from error
    score = module.__dict__.get("score")
    if not callable(score):
        functions = [name for name, value in module.__dict__.items() if callable(value) and not name.startswith("_")]
        raise _bad(file, "has no function called score", ", ".join(functions[:8]) or "no function")
    with contextlib.suppress(TypeError, ValueError):  # native functions have no names of parameters
        names = list(inspect.signature(score).parameters)
        if any(name in _TEXTS and name != text for name, text in zip(names, _TEXTS, strict=False)):
            raise _bad(file, "takes the three texts in another order", f"score({', '.join(names)})")
    return score  # type: ignore[no-any-return]


def _score(score: Callable[..., Any], row: Reply, number: int, file: str) -> float:
    try:
        value = score(row["prompt"], row["answer"], row["expected"])
        is_number = isinstance(value, numbers.Real) and math.isfinite(value)
    except (Exception, SystemExit) as error:
        problem = f"failed on answer {number + 1}, {row['answer'][:80]!r}"
        raise _bad(Path(file), problem, _error_with_line(error, file)) from error
    if not is_number:
        returned = f"{value!r} ({type(value).__name__})"
        raise _bad(Path(file), f"returned no number for answer {number + 1}, {row['answer'][:80]!r}", returned[:200])
    return float(value)


def _error_with_line(error: BaseException, file: Path | str) -> str:
    """The error with its line number: the last one in the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}"[:400] + where


def _bad(file: Path, problem: str, got: str) -> UsageError:
    return UsageError(
        f"the scorer {file} {problem}",
        code="bad_scorer",
        expected=EXPECTED,
        got=got,
        hint=f"correct {quoted(file)}, then run again",
    )


if __name__ == "__main__":
    worker_main(run, ScoreJob)
