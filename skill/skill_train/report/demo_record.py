"""`demo.json`: one row for each stage of the chain, as it is written and read."""

from __future__ import annotations

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage made."""

    stage: str  # `base`, `adapter`, `merged`, or the type of a GGUF file
    bytes: Whole
    exact_match: Number  # the share of the held-out `rows` that are answered to the letter
    rows: Whole
    mean_kl: Number | None  # divergence from what was trained, in nats; None where it was not measured
    tokens_per_second: Number | None
    verdict: Verdict | None  # None for the base, which is not judged


class DemoFigures(msgspec.Struct, frozen=True):
    stages: list[Stage]


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """The table, and the records that it was made from."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "demo"
    inputs: dict[FileName, FileDigest]
    options: dict[str, str] = {}
    outputs: dict[FileName, FileDigest] = {}
    figures: DemoFigures
    finished_at: str
