"""The model's own answers to questions about pictures, which every pair of files is held against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from skill_train.llama.logit_distance import compare_logits
from skill_train.llama.pictures.compare import MARKER
from skill_train.program.pictures.tokens import ImageModel
from skill_train.reference.pictures import PictureQuestion, PictureReference, picture_model

if TYPE_CHECKING:
    import numpy as np

SAME = 1e-4  # tolerance for a normalized colour, whose steps are 0.008 or more


@dataclass(frozen=True)
class MeasuredPictures:
    kind: str  # `model_type` of config.json
    engine: bool  # the model was trained on the pixels of llama.cpp, and is asked with them
    picture_token: int  # the id that stands for a part of a picture
    token_texts: dict[int, str]  # tokens of and around pictures, by id
    texts: list[str]  # of all tokens, by id
    vocabulary: int  # number of tokens that the model answers with
    # mean, std: of the colours, as the model's processor normalizes them
    mean: list[float]
    std: list[float]
    questions: list[PictureQuestion]
    answers: list[PictureReference]

    @cached_property
    def blank(self) -> float:
        """Mean KL divergence, in nats, of the model's logits for grey pictures from those for the real ones."""
        return mean_of(self.divergences(one.logits, one.blank) for one in self.answers)

    def text(self, ids: list[int]) -> str:
        """Tokens by their texts, for a message."""
        return " ".join(self.texts[one] if 0 <= one < len(self.texts) else str(one) for one in ids)

    def divergences(self, reference: np.ndarray, other: np.ndarray) -> np.ndarray:
        """KL of `other` from the reference at each position, in nats; both are logits [positions, tokens]."""
        import numpy as np

        columns = min(reference.shape[1], other.shape[1], self.vocabulary)
        following = np.zeros(len(reference), dtype=np.int64)  # of no interest here
        return compare_logits(reference[:, :columns], other[:, :columns], following).kl


def measure(image: ImageModel, questions: list[PictureQuestion]) -> MeasuredPictures:
    """Asks the model, which is in memory only here."""
    with picture_model(image, MARKER) as model:
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        tokenizer = model.tokenizer
        return MeasuredPictures(
            kind=model.kind,
            engine=model.pictures.engine is not None,
            picture_token=model.picture_token,
            token_texts=model.written_tokens(),
            texts=[str(one) for one in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))],
            vocabulary=vocabulary,
            mean=list(model.pictures.settings.image_mean),
            std=list(model.pictures.settings.image_std),
            questions=questions,
            answers=[model.answer(question) for question in questions],
        )


def mean_of(parts: Iterable[np.ndarray]) -> float:
    """The mean of all numbers together; NaN where there are none."""
    import numpy as np

    arrays = list(parts)
    return float(np.concatenate(arrays).mean()) if arrays else math.nan


def differing(expected: np.ndarray, got: np.ndarray) -> float:
    """Share of the pixels of which a colour differs; 1 if the sizes differ."""
    import numpy as np

    if expected.shape != got.shape:
        return 1.0
    return float((~(np.abs(expected - got) <= SAME)).any(axis=0).mean())
