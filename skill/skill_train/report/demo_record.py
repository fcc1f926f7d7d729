"""`demo.json`: one row for each stage of the demo's chain."""

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The model that one stage made, and its figures."""

    stage: str  # `base`, `adapter`, `merged`, or the type of a GGUF file
    bytes: Whole
    exact_match: Number  # share of the held-out `rows` whose answer is exactly the expected one
    rows: Whole
    mean_kl: Number | None  # divergence from the trained model, in nats; None if it was not measured
    tokens_per_second: Number | None
    verdict: Verdict | None  # None for the base, which is not judged


class DemoFigures(msgspec.Struct, frozen=True):
    stages: list[Stage]


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """`demo.json`: the table, and the digests of the records that it was made from."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "demo"
    inputs: dict[FileName, FileDigest]
    options: dict[str, str] = {}
    outputs: dict[FileName, FileDigest] = {}
    figures: DemoFigures
    finished_at: str
