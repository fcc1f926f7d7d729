"""Checks a pair on pictures of which llama.cpp sees exactly the model's pixels, so that any difference is the files'.

Pictures come in the size that the model's own processor makes of them, so llama.cpp copies them. The text behind a
picture is read twice: with the embeddings of the file, and with those of the model. So an error is the projector's or
the language model's, and it is not hidden by what quantization costs the language model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skill_train.llama.logit_distance import finite
from skill_train.llama.pictures.compare import PictureAnswer
from skill_train.run.verify_record import Check, Finding, NotChecked, worst
from skill_train.verify.check import judged, parting_place
from skill_train.verify.pictures.measured import SAME, MeasuredPictures, differing, mean_of
from skill_train.verify.thresholds import limits

if TYPE_CHECKING:
    import numpy as np

    from skill_train.reference.pictures import PictureReference, ReferencePart

_BLANK_SHARE = 0.01  # share of what a grey picture changes: a larger error could be the picture itself
# Error of the embeddings relative to their length, by type of the projector's file: bounds of a warning and a failure.
# Measured on correct tiny pairs of five families: f32 and f16 0.0002 to 0.0015, bf16 0.001 to 0.006, q8_0 0.01 to 0.03;
# real towers have ten times the layers. Of another model, or with the colours exchanged, it is 0.3 to 1.5.
_EMBEDDING_ERROR = {"f32": (0.01, 0.1), "f16": (0.01, 0.1), "bf16": (0.03, 0.2), "q8_0": (0.1, 0.3)}
_WIDEST_EMBEDDING_ERROR = (0.3, 0.6)


def check_same_pixels(
    file: str, text_type: str, projector_type: str, measured: MeasuredPictures, answers: list[PictureAnswer]
) -> Finding:
    """Compares pixels, tokens, embeddings and the text behind the picture.

    Args:
        text_type, projector_type: of the two files, such as `f16`.
        answers: to the questions in their order, with the model's embeddings beside.
    """
    figures: dict[str, object] = {"questions": len(answers)}
    unread = next((one.unread for one in answers if one.unread), "")
    both = list(zip(measured.answers, answers, strict=True))
    faults = [fault for reference, answer in both if (fault := _token_fault(measured, reference, answer))]
    if faults:
        return Check("pictures", file, "fail", len(faults), 0, f"the tokens are others: {faults[0]}", figures)
    parts = [pair for reference, answer in both for pair in zip(reference.parts, answer.pictures, strict=True)]
    read = [(one, part.pixels) for one, part in parts if part.pixels is not None]
    shares = [differing(one.pixels, pixels) for one, pixels in read]
    figures |= {"differing_pixels": max(shares, default=None), "pixels_unread": unread or None}
    if any(shares):
        share = max(shares)
        reason = _colours(*read[shares.index(share)], measured)
        return Check("pictures", file, "fail", share, 0, f"{share:.1%} of the pixels are others: {reason}", figures)
    pairs = [(one, answer, answer.logits_of_given) for one, answer in both if answer.logits_of_given is not None]
    distances = Distances(
        embedding_error=max(_error(one, part.embeddings) for one, part in parts),
        mean_kl=mean_of(measured.divergences(one.logits, answer.logits) for one, answer in both),
        mean_kl_given_embeddings=mean_of(measured.divergences(one.logits, logits) for one, _, logits in pairs),
        mean_kl_of_embeddings=mean_of(measured.divergences(logits, answer.logits) for _, answer, logits in pairs),
        mean_kl_blank=measured.blank,
    )
    figures |= {name: finite(value) for name, value in vars(distances).items()}
    figures["tokens"] = sum(len(one.following) for one, _ in both)
    return _judged(file, text_type, projector_type, distances, figures, unread)


@dataclass(frozen=True)
class Distances:
    """How far the pair is from the model, by the names of the figures; divergences are means in nats."""

    embedding_error: float  # relative to their length; of the worst picture or tile
    mean_kl: float  # of the text behind the pictures
    mean_kl_given_embeddings: float  # the same with the model's embeddings: the language model's part
    mean_kl_of_embeddings: float  # between the two: the projector's part
    mean_kl_blank: float  # of the model's answers to grey pictures from its answers to the real ones


def _judged(
    file: str, text_type: str, projector_type: str, distances: Distances, figures: dict[str, object], unread: str
) -> Finding:
    of_text, of_projector = limits(text_type).kl, limits(projector_type).kl
    most = _EMBEDDING_ERROR.get(projector_type, _WIDEST_EMBEDDING_ERROR)
    error, kl, blank = distances.embedding_error, distances.mean_kl, distances.mean_kl_blank
    from_embeddings, own = distances.mean_kl_given_embeddings, distances.mean_kl_of_embeddings
    if not all(map(math.isfinite, (error, kl, from_embeddings, own))):
        return Check("pictures", file, "fail", None, of_text[0], "embeddings or logits are not finite", figures)
    if error > most[1]:
        detail = f"the pixels are the same, and the embeddings {error:.2g} of their length off: "
        detail += "tower or projector are not the model's"
        return Check("pictures", file, "fail", error, most[1], detail, figures)
    # A quantized language model rounds what it reads, so a hair between two embeddings can become a step.
    verdicts = {
        "the language model reads the model's own embeddings in another way: positions, attention or weights": (
            judged(from_embeddings, of_text)
        ),
        "the projector's embeddings change the text": judged(own, max(of_text, of_projector)),
        "the projector's embeddings are farther off than rounding puts them": judged(error, most),
        "": judged(kl, (of_text[0] + of_projector[0], of_text[1] + of_projector[1])),
    }
    verdict = worst(verdicts.values())
    pixels = f"pixels not read ({unread})" if unread else "no pixel differs"
    power = max(own, kl) if text_type in ("f32", "f16") else own
    detail = (
        f"{pixels}, the same tokens, embeddings {error:.1g} off, mean KL of the text behind the picture "
        f"{kl:.2g} nats ({own:.2g} by the projector), of a grey picture {blank:.2g}"
    )
    if verdict == "pass" and power > _BLANK_SHARE * blank:
        why = f"cannot be judged: a grey picture changes the text by {blank:.2g} nats only, and the files by "
        return NotChecked("pictures", file, f"{why}{power:.2g}; ask questions whose answers depend on the picture")
    if verdict != "pass":
        reason = next((why for why, one in verdicts.items() if one == verdict and why), "")
        detail = f"{reason}; {detail}" if reason else detail
    bound = of_text[0] + of_projector[0]
    return Check("pictures", file, verdict, kl, min(bound, _BLANK_SHARE * blank), detail, figures)


def _token_fault(measured: MeasuredPictures, reference: PictureReference, answer: PictureAnswer) -> str:
    """The first token that differs; empty for none."""
    ids, parts = reference.ids, len(reference.parts)
    got = answer.tokens(measured.picture_token)
    if got == ids:
        return "" if len(answer.pictures) == parts else f"llama.cpp has {len(answer.pictures)} parts, the model {parts}"
    place = parting_place(ids, got)
    own, theirs = (measured.text(one[place : place + 4]) or "nothing" for one in (ids, got))
    return f"at {place} of {len(ids)} the model reads {own!r}, llama.cpp {theirs!r}"


def _colours(part: ReferencePart, got: np.ndarray, measured: MeasuredPictures) -> str:
    """Why the pixels differ."""
    import numpy as np

    pixels = part.pixels
    if pixels.shape != got.shape:
        return f"{got.shape[2]}x{got.shape[1]} in place of {pixels.shape[2]}x{pixels.shape[1]}"
    mean, std = (np.array(one)[:, None, None] for one in (measured.mean, measured.std))
    whole = pixels * std + mean  # 0 to 1, before it was normalized
    reverse = (whole[::-1] - mean) / std
    if np.abs(reverse - got).max() <= SAME:
        return "the colours are exchanged, blue for red"
    lines = [np.polyfit(one.ravel(), other.ravel(), 1) for one, other in zip(whole, got, strict=True)]
    fitted = np.stack([slope * one + start for (slope, start), one in zip(lines, whole, strict=True)])
    if np.abs(fitted - got).max() <= SAME:
        used = ", ".join(f"{-start / slope:.4g} and {1 / slope:.4g}" for slope, start in lines)
        right = ", ".join(f"{one:.4g} and {other:.4g}" for one, other in zip(measured.mean, measured.std, strict=True))
        return f"each colour has another mean or deviation ({used}; the model has {right})"
    return "the picture itself is another"


def _error(part: ReferencePart, got: np.ndarray | None) -> float:
    import numpy as np

    if got is None or got.shape != part.embeddings.shape:
        return math.inf
    return float(np.linalg.norm(got - part.embeddings) / np.linalg.norm(part.embeddings))
