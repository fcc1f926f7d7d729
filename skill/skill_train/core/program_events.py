"""The lines of JSON that the training program prints, with the fields that its callers read."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeGuard

import msgspec

from skill_train.program.events import Failure


class ProgramFailed(Failure):
    """Why the program ended. `error` has the fields of a `SkillTrainError`."""

    event: Literal["failed"]


class StageBegan(TypedDict):
    event: Literal["stage"]
    text: str


class Note(TypedDict):
    event: Literal["note"]
    text: str


class DataRead(TypedDict):
    """The figures of the data. Earlier versions of the program did not count repeated rows."""

    event: Literal["data"]
    train_rows: int
    held_out_rows: int
    truncated_rows: int
    repeated_rows: NotRequired[int]
    tokens: int
    trained_token_share: float
    notes: list[str]


class StepDone(TypedDict):
    """A line of `metrics.jsonl`."""

    event: Literal["step"]
    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    memory_bytes: dict[str, int]


class Timed(TypedDict):
    """One forward and backward pass; `loss` is None if it was not finite."""

    seconds: Annotated[float, msgspec.Meta(gt=0)]
    loss: float | None


class Probed(TypedDict):
    """The timed passes of `--probe`. The cache stores them in this form."""

    float32: Timed
    bfloat16: Timed


class ProbeDone(Probed):
    event: Literal["probe"]


class OtherEvent(TypedDict):
    event: Literal["attempt", "checkpoint", "done", "kept", "pushed"]


Event = ProgramFailed | StageBegan | Note | DataRead | StepDone | ProbeDone | OtherEvent


class _Words(TypedDict):
    code: str
    message: str
    hint: str


class _Failed(TypedDict):
    """The fields without which a failure explains nothing."""

    exit_code: int
    error: _Words


_KINDS = {"failed": _Failed, "stage": StageBegan, "note": Note, "data": DataRead, "step": StepDone}


def events(text: str) -> Iterator[Event]:
    """The events among the lines. The other lines come from libraries. Some libraries also log JSON with an `event`."""
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_event(event):
            yield event


def _is_event(document: Any) -> TypeGuard[Event]:
    """Whether a document has the fields of its event. The reader of a `probe` event checks the fields itself."""
    if not isinstance(document, dict) or not isinstance(document.get("event"), str):
        return False
    try:
        msgspec.convert(document, _KINDS.get(document["event"], dict))
    except msgspec.ValidationError:
        return False
    return True
