"""`verify.json`: what was found of each GGUF file, as it is written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class Check(msgspec.Struct, frozen=True):
    """What was measured on one file, and what it may be at most.

    Attributes:
        name: a stable word, such as `logits`.
        file: name of the GGUF file.
        figure: the measured value that the verdict rests on.
        threshold: what it is held against.
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


class ProofInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a proof is of.

    Attributes:
        base: its files; `the reference` where it is that.
        rows, held_out: sha256 of them.
        unread: files that could not be judged, each with the reason.
    """

    reference: dict[str, FileDigest]
    adapter: dict[str, FileDigest] | None
    base: dict[str, FileDigest] | str | None
    ggufs: dict[FileName, FileDigest]
    rows: str
    held_out: str
    unread: list[list[str]] = []


class ProofOptions(msgspec.Struct, frozen=True):
    """How much was compared."""

    tokens: Whole


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of each file, and of what it was found.

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
    """The proof in a file.

    Raises:
        UsageError: missing, no JSON, or not as `verify` writes it.
    """
    return records.read(path, Proof)
