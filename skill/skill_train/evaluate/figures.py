"""The figures of one evaluated model, and the differences between two with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skill_train.evaluate.backends import Model, Question, Replies
from skill_train.evaluate.bootstrap import Interval, paired
from skill_train.llama.logit_distance import SAME_LOSS
from skill_train.run.evaluate_record import FigureDifference, ModelFigures

NOISE = "inside the noise"
SAME = "same within noise"
FEW_ROWS = 30  # below this many the interval itself is too narrow (Hesterberg 2015, arXiv:1411.5279)
_LOWER_IS_BETTER = ("loss",)
_SAME_SCORE = 1e-6  # of the larger score: what sums of another order do. How much of it matters only its user knows


@dataclass(frozen=True)
class ModelReplies:
    """One model's replies, judged.

    Attributes:
        why: why this backend.
        exact: 1 or 0 for each row that asked.
        scores: of the second score, for the same rows; None where a row cannot be scored. Empty without one.
        texts: the answers to those rows.
    """

    model: Model
    why: str
    replies: Replies
    exact: list[float]
    scores: list[float | None]
    texts: list[str]


def figures(one: ModelReplies, asked: list[Question]) -> ModelFigures:
    """What the tables show of one model. Where there is no loss, there is a reason."""
    loss = _loss(one, asked)
    scored = [score for score in one.scores if score is not None]
    speed = one.replies.tokens_per_second
    return ModelFigures(
        name=one.model.name,
        backend=one.replies.backend,
        why=one.why,
        device=one.replies.device,
        loss=loss,
        perplexity=None if loss is None or loss > 700 else math.exp(loss),  # e^709 is the largest float
        exact_match=_mean(one.exact),
        asked_rows=len(one.exact),
        score=_mean(scored),
        scored_rows=len(scored),
        tokens_per_second=None if speed is None else round(speed, 1),
        reason=one.replies.reason or ("" if loss is not None else "its logits are not finite numbers"),
    )


def differences(measured: list[ModelReplies], asked: list[Question]) -> list[FigureDifference]:
    """Tuned less base, and each file less tuned, in every figure that both have."""
    compared = []
    for one, other in _pairs(measured):
        found = {"loss": _losses(one, other, asked), "exact_match": _paired(one.exact, other.exact)}
        found["score"] = _scores(one, other)
        for measure, interval in found.items():
            if interval is not None:
                rows = len(asked) if measure == "loss" else len(one.exact)
                smallest = _smallest(measure, one, other)
                compared.append(_difference(one.model.name, other.model.name, measure, interval, rows, smallest))
    return compared


def _pairs(measured: list[ModelReplies]) -> list[tuple[ModelReplies, ModelReplies]]:
    """Each model with what it is held against: files against the tuned model, which is held against the base."""
    folders = [one for one in measured if not one.model.is_gguf]
    files = [one for one in measured if one.model.is_gguf]
    pairs = [(folders[-1], folders[0])] if len(folders) > 1 else []
    return pairs + [(file, folders[-1]) for file in files if folders]


def _smallest(measure: str, one: ModelReplies, other: ModelReplies) -> float:
    """The smallest difference that counts as one, however narrow its interval is: the two were asked the same rows, so
    a tiny difference hardly scatters."""
    if measure == "loss":
        return SAME_LOSS
    scores = [abs(score) for each in (one, other) for score in each.scores if score is not None]
    return _SAME_SCORE * max(scores, default=0.0) if measure == "score" else 0.0


def _difference(
    model: str, against: str, measure: str, interval: Interval, rows: int, smallest: float
) -> FigureDifference:
    better = (interval.difference < 0) == (measure in _LOWER_IS_BETTER)
    word = f"{'better' if better else 'worse'}{', of few rows' if rows < FEW_ROWS else ''}"
    return FigureDifference(
        model=model,
        against=against,
        measure=measure,
        difference=interval.difference,
        low=interval.low,
        high=interval.high,
        smallest=smallest,
        says=NOISE if interval.is_noise else SAME if abs(interval.difference) < smallest else word,
    )


def _losses(one: ModelReplies, other: ModelReplies, asked: list[Question]) -> Interval | None:
    """Nats a token. Rows are drawn whole, so a row counts for as many tokens as it has."""
    ours, theirs = _known(one.replies.losses), _known(other.replies.losses)
    if ours is None or theirs is None:
        return None
    return paired(ours, theirs, [len(question.trained) for question in asked])


def _scores(one: ModelReplies, other: ModelReplies) -> Interval | None:
    both = [(a, b) for a, b in zip(one.scores, other.scores, strict=False) if a is not None and b is not None]
    return _paired([a for a, _ in both], [b for _, b in both])


def _paired(ours: list[float], theirs: list[float]) -> Interval | None:
    return paired(ours, theirs) if ours and len(ours) == len(theirs) else None


def _loss(one: ModelReplies, asked: list[Question]) -> float | None:
    sums = _known(one.replies.losses)
    return None if sums is None else sum(sums) / sum(len(question.trained) for question in asked)


def _known(sums: list[float | None]) -> list[float] | None:
    """All of them, or None: a mean that leaves out what overflowed would be a better figure than the model's."""
    known = [value for value in sums if value is not None]
    return known if sums and len(known) == len(sums) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
