"""`evaluate.json`: how good the models of a run are on its held-out rows."""

import hashlib
import json
import math
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Whole
from skill_train.run.train_record import Row

FEW_ROWS = 30  # below this many an interval itself is too narrow (Hesterberg 2015, arXiv:1411.5279)


class ModelInputs(msgspec.Struct, frozen=True):
    """The files that one model was read from."""

    # the digest of a file, or the digests of a folder's files; or the words `the folder of base`
    model: dict[str, int | str | FileDigest] | str
    adapter: dict[str, FileDigest] | None = None  # applied to the model, or merged into it
    perhaps_trained: bool = False  # a file of another run, which may have trained on the rows


class EvaluationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    models: dict[str, ModelInputs]
    rows: str  # `rows_digest` of the rows
    scorer: FileDigest | None = None  # the user's own scorer


class EvaluationOptions(msgspec.Struct, frozen=True, kw_only=True):
    score: str
    pattern: str | None = None
    backend: str


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one model. `exact_match` is measured on `asked_rows` rows, and `score` on `scored_rows` rows."""

    name: str
    backend: str
    why: str  # the reason for this backend
    device: str
    loss: Number | None  # nats per token, mean over all trained tokens
    perplexity: Number | None
    exact_match: Number | None
    asked_rows: Whole
    score: Number | None
    scored_rows: Whole
    tokens_per_second: Number | None
    reason: str  # why something was not measured; empty if all was


class FigureDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of `model` minus the same figure of `against`. `low` and `high` are the ends of the 95 % interval."""

    model: str
    against: str
    measure: str
    difference: Number
    low: Number
    high: Number
    smallest: Number = 0.0  # the smallest value that counts as a difference
    says: str  # the result in words


class AnsweredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out row: the end of the prompt, the expected answer, and the answers by the name of the model."""

    line: Whole
    prompt: str
    expected: str
    answers: dict[str, str]
    exact: dict[str, bool] = {}
    scores: dict[str, Number | None] = {}

    @property
    def different_answers(self) -> Whole:
        return len(set(self.answers.values()))


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`evaluate.json`."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "evaluate"
    inputs: EvaluationInputs
    options: EvaluationOptions
    versions: dict[str, str | None]
    outputs: dict[FileName, FileDigest] = {}
    # rows, asked, answer_tokens: the measured rows, the rows that ask for an answer, and the tokens of the loss
    rows: Whole
    asked: Whole
    answer_tokens: Whole
    score: str | None  # the name of the second score; None without one
    models: list[ModelFigures]
    differences: list[FigureDifference]
    answers: list[AnsweredRow]
    seconds: Number
    peak_memory_bytes: Whole | None = None
    peak_memory_children_bytes: Whole | None = None
    finished_at: str  # UTC

    @property
    def perhaps_trained(self) -> list[str]:
        """The names of the files of other runs that may have trained on the rows."""
        return [name for name, model in self.inputs.models.items() if model.perhaps_trained]


def read(path: Path) -> Evaluation:
    """The measurement in a file.

    Raises:
        UsageError: missing, no measurement, or a figure is not that of the answers beside it.
    """
    evaluation = records.read(path, Evaluation)
    for model in evaluation.models:
        exact = [row.exact.get(model.name) for row in evaluation.answers]
        scores = [row.scores.get(model.name) for row in evaluation.answers]
        for what, figure, count, each in (
            ("exact match", model.exact_match, model.asked_rows, [one for one in exact if one is not None]),
            ("score", model.score, model.scored_rows, [one for one in scores if one is not None]),
        ):
            if figure is not None and len(each) == count > 0 and not math.isclose(figure, mean := sum(each) / count):
                raise records.broken(path, f"{model.name} has the {what} {figure:.3g}, and its answers {mean:.3g}")
    return evaluation


def can_be_asked(row: Row, loss_on: str) -> bool:
    """Whether a row is one of text, or asks something about its pictures. Only answers about pictures are compared, and
    no loss, because llama.cpp reads another number of tokens for a picture."""
    return not row.get("images") or not (row["truncated"] or loss_on == "all")


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows, spread evenly over the list, because the first ones may all be of one kind."""
    return rows if len(rows) <= most else [rows[i * len(rows) // most] for i in range(most)]


def few_rows(rows: int) -> str:
    """A sentence that says that the rows are few; empty if they are not."""
    why = f"{rows} rows: below {FEW_ROWS} the intervals are too narrow; trust only large differences"
    return why if rows < FEW_ROWS else ""


def blind(models: list[ModelFigures], vocabulary: int | None) -> str:
    """A sentence that names the models that are worse than blind guessing; empty if there are none.

    Blind guessing gives each of the `vocabulary` tokens the same chance, so its perplexity is that number.
    """
    guess = math.log(vocabulary) if vocabulary else math.inf
    worse = [f"{model.name} (loss {model.loss:.4g})" for model in models if (model.loss or 0.0) > guess]
    among = f"worse than blind guessing among {vocabulary:,} tokens, which has {guess:.4g}" if worse else ""
    return f"{', '.join(worse)}: {among}" if worse else ""


def telling(rows: list[AnsweredRow], most: int) -> list[AnsweredRow]:
    """At most `most` rows. The rows with the most different answers come first: they show what the figures mean."""
    return sorted(rows, key=lambda row: -row.different_answers)[:most]


def rows_digest(rows: list[Row]) -> str:
    """The sha256 of rows, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
