"""`verify.json`: the checks of each GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class Check(msgspec.Struct, frozen=True):
    """A measurement on one file, and its limit."""

    name: str  # a stable word, such as `logits`
    file: str  # name of the GGUF file
    verdict: Verdict
    figure: Number | str | None  # the measured value that decides the verdict
    threshold: Number | str | None  # the value that it is compared with
    detail: str  # one sentence for a person
    figures: Mapping[str, object] = {}  # further values, for programs


class NotChecked(msgspec.Struct, frozen=True):
    """A check that could not be made on one file, and why."""

    name: str
    file: str
    reason: str


Finding = Check | NotChecked


class ProofInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The files and rows that a proof is valid for."""

    reference: dict[str, FileDigest]
    adapter: dict[str, FileDigest] | None
    base: dict[str, FileDigest] | str | None  # digests of the base's files; or the words `the reference`
    ggufs: dict[FileName, FileDigest]
    # rows, held_out: sha256 of the rows
    rows: str
    held_out: str
    unread: list[list[str]] = []  # files that could not be judged, each with the reason
    # the model folder whose answers to pictures a projector was compared with
    pictures: dict[str, FileDigest] | None = None


class ProofOptions(msgspec.Struct, frozen=True):
    """How much was compared."""

    tokens: Whole
    # the inference programs that the files ran in, with their versions; the version of a missing program is empty
    engines: dict[str, str] = {}


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """`verify.json`: the checks of each file, and the inputs that they are valid for."""

    schema: StepSchema = "skill-train/step/1"
    step: str
    inputs: ProofInputs
    options: ProofOptions
    versions: dict[str, str | None]
    outputs: dict[FileName, FileDigest] = {}
    verdict: Verdict  # the worst of the checks
    checks: list[Check]
    not_checked: list[NotChecked]
    samples: dict[str, Whole]  # the numbers of compared tokens, texts, rows, conversations and answers
    seconds: Number
    peak_memory_bytes: Whole | None = None
    peak_memory_children_bytes: Whole | None = None
    finished_at: str  # UTC


def read(path: Path) -> Proof:
    """The proof in a file. Raises as `records.read`."""
    return records.read(path, Proof)
