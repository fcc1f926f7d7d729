"""`push.json`: the pushed files, and their repository."""

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run.records import StepSchema


class PushInputs(msgspec.Struct, frozen=True):
    recipe_hash: str


class PushTarget(msgspec.Struct, frozen=True):
    """The request; `parts` are some of `gguf`, `adapter`, `merged`."""

    repo: str
    parts: list[str]
    private: bool


class PushedFile(msgspec.Struct, frozen=True):
    """One file of the repository. `changed` says how it differs from the local file; None if it is the same."""

    path: str
    bytes: int
    changed: str | None


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """`push.json`. `commit`, `created` and `reused` are the same as in `Uploaded`."""

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
