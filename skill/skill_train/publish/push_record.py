"""`push.json`: what was pushed, and where it lies."""

from __future__ import annotations

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run.records import StepSchema


class PushInputs(msgspec.Struct, frozen=True):
    """Of which run."""

    recipe_hash: str


class PushTarget(msgspec.Struct, frozen=True):
    """What was asked for: parts of `gguf`, `adapter`, `merged`."""

    repo: str
    parts: list[str]
    private: bool


class PushedFile(msgspec.Struct, frozen=True):
    """One file of the repository; `changed` says what of it is not as it lies here."""

    path: str
    bytes: int
    changed: str | None


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """The push.

    Attributes:
        commit: its id on the Hub.
        created: the repository is new.
        reused: it had all of this already.
        private: the repository is.
    """

    schema: StepSchema = "skill-train/step/1"
    step: str = "push"
    inputs: PushInputs
    options: PushTarget
    outputs: dict[str, FileDigest] = {}
    files: list[PushedFile]
    url: str
    commit: str
    created: bool
    reused: bool
    private: bool
    finished_at: str
