"""Computes the figures of an evaluated model, and the differences between two models with their intervals."""

import math
from dataclasses import dataclass

from skill_train.evaluate.backends import Model, Question, Replies
from skill_train.evaluate.bootstrap import Interval, paired
from skill_train.llama.logit_distance import SAME_LOSS
from skill_train.run.evaluate_record import FEW_ROWS, FigureDifference, ModelFigures

NOISE = "inside the noise"
SAME = "same within noise"
_LOWER_IS_BETTER = ("loss",)
_SAME_SCORE = 1e-6  # of the larger score, for sums in another order; only the user knows which difference matters


@dataclass(frozen=True)
class ModelReplies:
    """One model's replies with their scores. The lists have an entry for each question with a prompt."""

    model: Model
    why: str  # the reason for this backend
    replies: Replies
    exact: list[float]  # 1 for an exact match, or else 0
    scores: list[float | None]  # the second score; None if a row cannot be scored. Empty without a second score.
    texts: list[str]  # the texts of the answers


def figures(judged: ModelReplies, questions: list[Question]) -> ModelFigures:
    """The figures of one model for the tables. If `loss` is None, `reason` says why."""
    loss = _loss(judged, questions)
    scored = [score for score in judged.scores if score is not None]
    speed = judged.replies.tokens_per_second
    return ModelFigures(
        name=judged.model.name,
        backend=judged.replies.backend,
        why=judged.why,
        device=judged.replies.device,
        loss=loss,
        perplexity=None if loss is None or loss > 700 else math.exp(loss),  # e^709 is the largest float
        exact_match=_mean(judged.exact),
        asked_rows=len(judged.exact),
        score=_mean(scored),
        scored_rows=len(scored),
        tokens_per_second=None if speed is None else round(speed, 1),
        reason=judged.replies.reason or ("" if loss is not None else "its logits are not finite numbers"),
    )


def differences(measured: list[ModelReplies], questions: list[Question]) -> list[FigureDifference]:
    """The differences tuned - base and file - tuned, in every figure that both models have."""
    compared = []
    for judged, other in _pairs(measured):
        ours, theirs = _scores_of_both(judged, other)
        intervals = {
            "loss": (_losses(judged, other, questions), len(questions)),
            "exact_match": (_paired(judged.exact, other.exact), len(judged.exact)),
            "score": (_paired(ours, theirs), len(ours)),
        }
        for measure, (interval, rows) in intervals.items():
            if interval is not None:
                smallest = _smallest(measure, judged, other)
                compared.append(_difference(judged.model.name, other.model.name, measure, interval, rows, smallest))
    return compared


def _pairs(measured: list[ModelReplies]) -> list[tuple[ModelReplies, ModelReplies]]:
    """Each model with the model that it is compared with: the tuned model with the base, and files with the tuned
    model."""
    folders = [judged for judged in measured if not judged.model.is_gguf]
    files = [judged for judged in measured if judged.model.is_gguf]
    pairs = [(folders[-1], folders[0])] if len(folders) > 1 else []
    return pairs + [(file, folders[-1]) for file in files if folders]


def _smallest(measure: str, judged: ModelReplies, other: ModelReplies) -> float:
    """The smallest difference that counts, however narrow its interval is.

    Both models were asked the same rows, so even a tiny difference may have a narrow interval.
    """
    if measure == "loss":
        return SAME_LOSS
    scores = [abs(score) for each in (judged, other) for score in each.scores if score is not None]
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


def _losses(judged: ModelReplies, other: ModelReplies, questions: list[Question]) -> Interval | None:
    """The difference in nats per token. Rows are drawn whole, and count by the number of their trained tokens."""
    ours, theirs = _all_finite(judged.replies.losses), _all_finite(other.replies.losses)
    if ours is None or theirs is None:
        return None
    return paired(ours, theirs, [len(question.trained) for question in questions])


def _scores_of_both(judged: ModelReplies, other: ModelReplies) -> tuple[list[float], list[float]]:
    """The scores of the rows that both models could be scored on."""
    both = [(a, b) for a, b in zip(judged.scores, other.scores, strict=False) if a is not None and b is not None]
    return [a for a, _ in both], [b for _, b in both]


def _paired(ours: list[float], theirs: list[float]) -> Interval | None:
    return paired(ours, theirs) if ours and len(ours) == len(theirs) else None


def _loss(judged: ModelReplies, questions: list[Question]) -> float | None:
    sums = _all_finite(judged.replies.losses)
    return None if sums is None else sum(sums) / sum(len(question.trained) for question in questions)


def _all_finite(sums: list[float | None]) -> list[float] | None:
    """All sums, or None if one is not finite. A mean of only the finite sums would be too good."""
    finite = [value for value in sums if value is not None]
    return finite if sums and len(finite) == len(sums) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
