"""Reads the JSON files of a run. They can come from a bucket, a repository or a colleague, so nothing is trusted: a key
may be missing, a value may have another type, and a name may lead out of the run directory.

`read` returns an object of the class that the step writes. `read_json` returns a document of another program, such as a
model's config.json, unchecked.
"""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import write_json
from skill_train.program.events import Refused
from skill_train.program.model_files import regular_file

Record = TypeVar("Record")

StepSchema = Literal["skill-train/step/1"]
Verdict = Literal["pass", "warn", "fail"]
# Larger numbers than any figure of a run would break arithmetic: 10**400 is not a float, and 1e300 s is not a date. No
# step writes NaN, which JSON does not have.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_LARGEST = 1e300
Number = Whole | Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
# A path below the run directory, where all files of the steps are.
FileName = Annotated[str, msgspec.Meta(pattern=r"(?s)^(?!/)(?!.*(?:^|/)\.\.(?:/|$))[^\\\x00]+$")]

MOST_BYTES = 100_000_000  # our largest record takes a few MB; the tokenizer.json of a base 30 MB
_MOST_OF_LINE = 50_000_000  # a row of a million tokens takes 15 MB

_TIME = "%Y-%m-%dT%H:%M:%SZ"


def _again(path: Path) -> str:
    """The hint for a missing or broken record. It names the run, because in a command on several runs `RUN` would be
    ambiguous."""
    run = quoted(path.parent) if (path.parent / "plan.json").is_file() else "RUN"
    return f"run the step that writes it, or fetch it: skill-train pull {run}"


def read_json(path: Path) -> Any:
    """The JSON document in a file, unchecked.

    Raises:
        UsageError: the file is missing, not JSON, or too large.
    """
    try:
        return json.loads(regular_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", code="missing_file", got=str(path), hint=_again(path)) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError too
        hint = "move it away, then " + _again(path)  # the step itself may read it first
        raise UsageError(f"{path} is not JSON: {error}", code="broken_record", got=str(path), hint=hint) from None


def regular_bytes(path: Path) -> bytes:
    """The content of a file of a run. Never waits for a pipe or reads a device.

    Raises:
        UsageError: the path is not a regular file, or the file is too large.
    """
    try:
        with regular_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except Refused as refusal:
        raise UsageError(
            refusal.error["message"],
            code="broken_record",
            expected="a regular file",
            got=refusal.error["got"],
            hint="move it away, then " + _again(path),
        ) from None
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{path} is too large",
            code="broken_record",
            expected=f"at most {MOST_BYTES} bytes",
            hint="move it away: no record is of this size",
        )
    return content


def read(path: Path, kind: type[Record]) -> Record:
    """The record in a file, as an object of the class that its step writes.

    Raises:
        UsageError: the file is missing, not JSON, or not as its step writes it.
    """
    return convert(read_json(path), kind, path)


def write(path: Path, record: Any) -> None:
    """Writes a record; the file is complete or unchanged."""
    write_json(path, msgspec.to_builtins(record))


def timestamp(moment: datetime | None = None) -> str:
    """A time in UTC as records store it, such as `2026-11-21T10:00:00Z`. The default is the current time."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime(_TIME)


def moment_of(text: str) -> datetime:
    """The moment of a `timestamp`. Raises ValueError for any other text."""
    return datetime.strptime(text, _TIME).replace(tzinfo=UTC)


def read_lines(path: Path, kind: type[Record], *, grows: bool = False) -> list[Record]:
    """The objects of a file with one object a line; empty if there is no such file.

    Args:
        grows: the file is written line by line, such as metrics.jsonl. A last line that a kill cut in two is left out.

    Raises:
        UsageError: a line is broken, or not as its step writes it.
    """
    records = list[Record]()
    if not path.is_file():
        return records
    torn = ""
    with open(path, "rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_MOST_OF_LINE), b""), start=1):
            if torn:
                grows = False  # it is not the last line
                break
            if not raw.strip():
                continue
            try:
                line = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError):
                torn = f"line {number} of {path} is not JSON"
                continue
            records.append(convert(line, kind, path, f"line {number}: "))
    if torn and not grows:
        raise UsageError(torn, code="broken_record", got=str(path), hint="move it away, then " + _again(path))
    return records


def convert(document: Any, kind: type[Record], path: Path, where: str = "") -> Record:
    """Converts the document in `path` to the class that its step writes. Keys that the class lacks are left out.

    Raises:
        UsageError: a key is missing, or a value has another type.
    """
    try:
        record = msgspec.convert(document, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character cannot be encoded
        why = re.sub(
            r"Expected `str` matching regex '.*?' - at `key`", "a name outside of the run directory", str(error)
        )
        raise broken(path, where + why) from None
    if (number := _not_finite(document)) is not None:
        raise broken(path, f"{where}{shortened(number)} is not a number that a step writes")
    return record


def _not_finite(document: Any) -> Any:
    """The first number that breaks arithmetic, at any depth; None when there is none."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
            return value
    return None


def shortened(value: Any) -> str:
    """A value for an error message, in at most 60 characters."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(value)[:60] if not isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e300 else "a huge number"


def broken(path: Path, why: str) -> UsageError:
    """The error of a record that differs from what its step writes."""
    return UsageError(
        f"{path} is not a valid record: {why}",
        code="broken_record",
        expected="the unchanged file",
        got=why,
        hint="move the file away, and run its step again",
    )
