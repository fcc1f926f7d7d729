"""The pair as its users run it: llama.cpp resizes the pictures in its own way, with its own limits, and its server puts
them into the chat template in its own way. None of that is a fault of the files. A model that was trained on other
pixels may answer worse, and the figures say by how much. One that was trained on llama.cpp's own pixels
(`preprocess: engine`) must get exactly these: any difference is a fault then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skill_train.llama.logit_distance import finite
from skill_train.llama.pictures.compare import PictureAnswer
from skill_train.program.pictures.engine import ENGINE_VERSION
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import parting_place
from skill_train.verify.pictures.measured import MeasuredPictures, differing, mean_of
from skill_train.verify.thresholds import limits

if TYPE_CHECKING:
    import numpy as np

    from skill_train.reference.pictures import PictureReference

# Nats a token: what q8_0 costs an 8B model (thresholds.py), which nobody notices. Measured on tiny pairs, with the text
# around the picture as in training: 5e-8 to 1e-6 where llama.cpp resizes as Pillow does (SmolVLM; in Qwen-VL and in
# Gemma 3 pictures of the target's shape), and 0.04 or more where it letterboxes, however little. One space more before
# a picture (SmolVLM) is 0.008 to 0.014.
_UNHEARD = 0.001355
_TRAINED = 2e-5  # the same for a model trained on llama.cpp's pixels, as for f16 files (thresholds.py); 0 measured
_OTHER_WAY = (
    f"the training had the pictures of llama.cpp in llama-cpp-python {ENGINE_VERSION} (preprocess: engine), and this "
    "one prepares them in another way"
)


def check_as_used(
    file: str,
    text_type: str,
    measured: MeasuredPictures,
    answers: list[PictureAnswer],
    same: list[PictureAnswer] | None,
) -> Finding:
    """How far llama.cpp's own view of the pictures moves the text behind them.

    Args:
        answers: to the questions in their order, with llama.cpp's own preprocessing.
        same: answers of the same files to the model's own pixels, so that both have the cost of quantization. None if
            there are none; then `answers` is compared with the model's own answers.
    """
    import numpy as np

    both = list(zip(measured.answers, answers, strict=True))
    own = [answer.logits for answer in same] if same else [one.logits for one in measured.answers]
    kls = [_divergences(measured, one, *pair) for one, pair in zip(own, both, strict=True)]
    common = [kl for kl in kls if len(kl)]
    if not common:
        why = "llama.cpp tokenizes the text after the pictures differently"
        if measured.engine:
            return Check("pictures_as_used", file, "fail", None, _TRAINED, f"{why}; {_OTHER_WAY}", {})
        return NotChecked("pictures_as_used", file, why)
    kl, blank = mean_of(common), measured.blank
    shares = [share for reference, answer in both for share in _differing(reference, answer)]
    tokens = [
        (sum(chunk.tokens for chunk in answer.pictures), reference.ids.count(measured.picture_token))
        for reference, answer in both
    ]
    most = (_TRAINED if measured.engine else _UNHEARD) + (0 if same else limits(text_type).kl[0])
    figures: dict[str, object] = {
        "questions": len(both),
        "mean_kl": finite(kl),
        "mean_kl_blank": blank,
        "share_of_blank": kl / blank if blank and math.isfinite(kl) else None,
        "differing_pixels": float(np.mean(shares)) if shares else None,
        "other_sizes": sum(not _same_sizes(reference, answer) for reference, answer in both),
        "picture_tokens": [list(one) for one in tokens],
        "texts_differ": sum(_texts_differ(measured, reference, answer) for reference, answer in both),
        "decoded_otherwise": sum(bool(question.otherwise) for question in measured.questions),
    }
    if not math.isfinite(kl):
        return Check("pictures_as_used", file, "fail", None, most, "the logits are not finite", figures)
    detail = f"{_differences(figures, tokens)}; mean KL {kl:.2g} nats, of a grey picture {blank:.2g}"
    differs = any(figures[name] for name in ("differing_pixels", "other_sizes", "texts_differ"))
    verdict: Verdict = "warn"
    if measured.engine and (differs or kl > most):
        verdict, detail = "fail", f"{detail}; {_OTHER_WAY}"
    elif kl > most:
        detail += "; so users get other answers about pictures than the model was trained to give"
    elif figures["decoded_otherwise"]:
        why = ", ".join(sorted({why for question in measured.questions for why in question.otherwise}))
        detail += f"; but llama.cpp's server decodes files itself, and gets a different picture from some: {why}"
    else:
        verdict = "pass"
    return Check("pictures_as_used", file, verdict, kl, most, detail, figures)


def _differences(figures: dict[str, object], tokens: list[tuple[int, int]]) -> str:
    others = [pair for pair in tokens if pair[0] != pair[1]]
    parts = []
    if figures["differing_pixels"] is not None:
        alone = ", where the size is the same," if figures["other_sizes"] else ""
        parts.append(f"with llama.cpp's own resizing{alone} {figures['differing_pixels']:.0%} of the pixels differ")
    if figures["other_sizes"]:
        parts.append(f"pictures of {figures['other_sizes']} of {len(tokens)} questions get another size")
    if others:
        got, expected = max(others, key=lambda pair: abs(pair[0] - pair[1]))
        parts.append(f"up to {got} tokens in place of {expected}")
    if figures["texts_differ"]:
        parts.append("its server writes the text around a picture in another way")
    return ", ".join(parts) or "llama.cpp's own resizing makes the same pixels"


def _divergences(
    measured: MeasuredPictures, logits: np.ndarray, reference: PictureReference, answer: PictureAnswer
) -> np.ndarray:
    """KL divergences, in nats, of the tokens at the end that both read; the text next to a picture may differ.

    Args:
        logits: for the text behind the picture, with the model's own pixels.
    """
    count = parting_place(reference.following[::-1], answer.following[::-1])
    first, other = len(logits) - count, len(answer.logits) - count
    return measured.divergences(logits[first:], answer.logits[other:])


def _differing(reference: PictureReference, answer: PictureAnswer) -> list[float]:
    """Share of the pixels that differ, of each part of the same size."""
    if len(reference.parts) != len(answer.pictures):
        return []
    pairs = [(one.pixels, other.pixels) for one, other in zip(reference.parts, answer.pictures, strict=True)]
    return [differing(one, other) for one, other in pairs if other is not None and one.shape == other.shape]


def _same_sizes(reference: PictureReference, answer: PictureAnswer) -> bool:
    sizes = [one.embeddings.shape[0] for one in reference.parts]
    return sizes == [chunk.tokens for chunk in answer.pictures]


def _texts_differ(measured: MeasuredPictures, reference: PictureReference, answer: PictureAnswer) -> bool:
    text = [token for token in reference.ids if token != measured.picture_token]
    return text != [token for chunk in answer.chunks for token in chunk.ids or []]
