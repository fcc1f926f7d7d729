"""The data of the report's templates. The fields have the names that the templates use."""

from typing import TypedDict

from skill_train.report.figure import Figure, PictureView
from skill_train.run.compare_runs import Losses
from skill_train.run.verify_record import NotChecked

Overview = list[tuple[str, list[Figure]]]


class VerdictView(TypedDict):
    """The verdict in one word, its reasons, and the next command. `next` is empty if nothing is left to do."""

    word: str
    headline: str
    because: list[str]
    next: str


class MissingPart(TypedDict):
    part: str
    said: str
    command: str


class SmokeCheckView(TypedDict):
    name: str
    verdict: str
    figure: Figure
    detail: str


class TrainingView(TypedDict):
    verdict: str
    checks: list[SmokeCheckView]


class EstimateRow(TypedDict):
    """An estimated range beside the measurement. `within` is None if one of the two is unknown."""

    what: str
    low: Figure
    high: Figure
    actual: Figure
    within: bool | None
    basis: str


class EstimatePartView(TypedDict):
    what: str
    low: Figure
    high: Figure
    because: str


class EstimatesView(TypedDict):
    rows: list[EstimateRow]
    parts: list[EstimatePartView]


class DecisionView(TypedDict):
    where: str
    flavor: str | None
    reasons: list[dict[str, str]]
    blockers: list[str]


class DataView(TypedDict):
    """`example` is a list of parts, each with whether it is trained."""

    rows: list[tuple[str, Figure]]
    notes: list[str]
    example: list[tuple[str, bool]]


class StepsView(TypedDict):
    """`rows` has every `every`-th step, and the last."""

    every: int
    rows: list[list[int | str]]
    steps: int


class ModelView(TypedDict):
    name: str
    figures: list[Figure]
    reason: str


class ModelDifferenceView(TypedDict):
    model: str
    against: str
    measure: str
    says: str
    difference: Figure
    low: Figure
    high: Figure


class QualityView(TypedDict):
    """The `figures` are in the order of `measures`. `doubts`: what to know before they are read."""

    doubts: list[str]
    rows: Figure
    asked: Figure
    score: str | None
    measures: list[str]
    models: list[ModelView]
    differences: list[ModelDifferenceView]


class AnswerView(TypedDict):
    model: str
    text: str | None
    exact: bool | None


class PromptView(TypedDict):
    prompt: str
    pictures: list[PictureView]
    expected: str | None
    answers: list[AnswerView]


class AnswersView(TypedDict):
    """`of` is the number of all prompts. `source` is their file. `note` says why pictures are not shown."""

    rows: list[PromptView]
    note: str
    of: int
    source: str


class CheckView(TypedDict):
    name: str
    file: str
    verdict: str
    figure: Figure
    threshold: Figure
    detail: str


class ProofView(TypedDict):
    """`rows` has each kind of check with an entry for each file; None if a file does not have that check."""

    files: list[tuple[str, str]]
    rows: list[tuple[str, list[CheckView | None]]]
    checks: list[CheckView]
    not_checked: list[NotChecked]
    samples: list[tuple[str, Figure]]


class FileView(TypedDict):
    """`path` is relative to the run. `fallbacks` counts the tensors that are stored in another type. `made` has
    sentences about the importance matrix and the mix of types."""

    file: str
    path: str
    quant: str
    bytes: Figure
    bits: Figure
    verdict: str
    mean_kl: Figure
    same_top1: Figure
    perplexity: Figure
    half_width: Figure
    exact_match: Figure
    speed: Figure
    fallbacks: int
    made: list[str]


class PairView(TypedDict):
    """A language model and its projector. `path` is the path of the projector, relative to the run."""

    model: str
    quant: str
    model_verdict: str
    projector: str
    path: str
    projector_quant: str
    bytes: Figure
    projector_verdict: str
    verdict: str


class ProgramView(TypedDict):
    program: str
    lines: list[str]
    mind: str


class RunItView(TypedDict):
    file: str
    projector: str | None
    quant: str
    verdict: str
    commands: list[ProgramView]
    modelfile: str | None


class JobView(TypedDict):
    number: Figure
    state: str
    cost: Figure
    job_id: Figure
    url: str | None
    flavor: Figure
    price: Figure
    timeout: Figure
    asked_at: str


class CloudView(TypedDict):
    jobs: list[JobView]
    kept: list[tuple[str, Figure]]


class ReproduceView(TypedDict):
    lines: list[str]
    fingerprints: list[tuple[str, Figure]]


class RunView(TypedDict):
    """One run. A part without a record is None."""

    name: str
    verdict: VerdictView
    overview: Overview
    missing: list[MissingPart]
    training: TrainingView | None
    estimates: EstimatesView
    decision: DecisionView
    data: DataView | None
    quality: QualityView | None
    answers: AnswersView | None
    proof: ProofView | None
    files: list[FileView]
    pairs: list[PairView]
    no_projector: str
    run_it: RunItView | None
    cloud: CloudView | None
    versions: list[tuple[str, Figure]]
    recipe: str | None
    reproduce: ReproduceView
    steps: StepsView


class DifferenceView(TypedDict):
    """A field in which the runs differ, with a cell for each run."""

    part: str
    name: str
    cells: list[Figure]


class SameView(TypedDict):
    """The differences that `diff` finds between the runs `a` and `b`, in words and in figures."""

    a: str
    b: str
    verdict: str
    headline: str
    recipe_facts: int
    placement_facts: int
    losses: Losses | None
    same_weights: bool | None
    lines: list[str]


class ChartView(TypedDict):
    name: str
    title: str
    svg: str


class SharedView(TypedDict):
    """The parts that are on the page once. Each row of `overview` has the figures of every run."""

    overview: list[tuple[str, list[list[Figure]]]]
    differences: list[DifferenceView]
    same: list[SameView]
    curves: list[ChartView]
    comparison: list[ChartView]
