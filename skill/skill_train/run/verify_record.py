"""`verify.json`: the checks of each GGUF file, as they are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class Check(msgspec.Struct, frozen=True):
    """What was measured on one file, and its limit.

    Attributes:
        name: a stable word, such as `logits`.
        file: name of the GGUF file.
        figure: the measured value that decides the verdict.
        threshold: the value that it is compared with.
        detail: one sentence for a person.
        figures: further values, for programs.
    """

    name: str
    file: str
    verdict: Verdict
    figure: Number | str | None
    threshold: Number | str | None
    detail: str
    figures: Mapping[str, object] = {}


class NotChecked(msgspec.Struct, frozen=True):
    """A check that could not be made on one file, and why."""

    name: str
    file: str
    reason: str


Finding = Check | NotChecked


class ProofInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a proof is valid for.

    Attributes:
        base: digests of its files; or the words `the reference`.
        rows, held_out: sha256 of the rows.
        unread: files that could not be judged, each with the reason.
        pictures: the model folder whose answers to pictures a projector was held against.
    """

    reference: dict[str, FileDigest]
    adapter: dict[str, FileDigest] | None
    base: dict[str, FileDigest] | str | None
    ggufs: dict[FileName, FileDigest]
    rows: str
    held_out: str
    unread: list[list[str]] = []
    pictures: dict[str, FileDigest] | None = None


class ProofOptions(msgspec.Struct, frozen=True):
    """How much was compared.

    Attributes:
        engines: the programs that the files were asked in, with their versions; empty for one that is not here.
    """

    tokens: Whole
    engines: dict[str, str] = {}


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of each file, and what they are valid for.

    Attributes:
        verdict: the worst of the checks.
        samples: how much was compared: tokens, texts, rows, conversations, answers.
        finished_at: UTC.
    """

    schema: StepSchema = "skill-train/step/1"
    step: str
    inputs: ProofInputs
    options: ProofOptions
    versions: dict[str, str | None]
    outputs: dict[FileName, FileDigest] = {}
    verdict: Verdict
    checks: list[Check]
    not_checked: list[NotChecked]
    samples: dict[str, Whole]
    seconds: Number
    peak_memory_bytes: Whole | None = None
    peak_memory_children_bytes: Whole | None = None
    finished_at: str


def read(path: Path) -> Proof:
    """The proof in a file. Raises as `records.read`."""
    return records.read(path, Proof)
