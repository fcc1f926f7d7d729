"""Runs a vision model on pictures through transformers, in fp32 on the CPU: pixels, embeddings, and the logits of the
text that follows. Pictures are prepared, and the text around them is written, as in the training."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject
from skill_train.program.pictures.decode import PictureSize
from skill_train.program.pictures.engine import LINED, TILED
from skill_train.program.pictures.tokens import LINE_END, ImageModel, Pictures
from skill_train.reference.load import load_tokenizer, read_model, reference_model

if TYPE_CHECKING:
    import numpy as np

GREY = (127, 127, 127)  # not exactly 0 after normalization, because models with tiles take zeros for padding
_WHITE = 255
_NEAR = 0.02  # of 255: whole numbers come back from float32 within 0.0001; the results of a resize in floats do not
_PATCHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*_PATCHED, "gemma3", *TILED, *LINED)
# Tokens that llama.cpp looks up by their text (tools/mtmd/mtmd.cpp). A token that it does not find becomes plain text.
_LOOKED_UP = {
    **dict.fromkeys(_PATCHED, ("<|vision_start|>", "<|vision_end|>")),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(TILED, ("<fake_token_around_image>", "<global-img>")),
    **dict.fromkeys(LINED, (LINE_END, "[IMG_END]")),
}
_TILE = re.compile(r"<row_\d+_col_\d+>")


@dataclass(frozen=True)
class PictureQuestion:
    """A conversation about pictures."""

    messages: list[JsonObject]  # `content` is a list of parts, with one `{"type": "image"}` for each picture
    pictures: list[Any]  # PIL images in RGB, upright
    otherwise: tuple[str, ...] = ()  # why llama.cpp's server decodes a file to other pixels; empty if it does not


@dataclass(frozen=True)
class ReferencePart:
    """A picture, or a tile of one."""

    pixels: np.ndarray  # the tower's input, float32 [3, height, width]
    # The language model's input, float32 [tokens, width]. With Qwen3-VL, `width` includes the embeddings that are added
    # in later layers.
    embeddings: np.ndarray


@dataclass(frozen=True)
class WholePicture:
    """The tower's input for a picture before normalization, uint8 [height, width, 3]."""

    pixels: np.ndarray
    overview: np.ndarray | None = None  # the small picture that comes with the tiles; None without tiles


@dataclass(frozen=True)
class PictureReference:
    """The model's own results for one question."""

    # The whole conversation, with the image token for each embedding in the projector's output. This output includes
    # the ends of Pixtral's lines.
    ids: list[int]
    following: list[int]  # the ids after the last picture
    text: str  # for llama.cpp: a marker stands for each picture and the tokens that llama.cpp writes around it
    as_asked: str  # the conversation as llama.cpp's server renders it: the marker is a part of the message
    # Pictures for llama.cpp, which does not resize them. None if the model's processor does not give whole numbers, or
    # makes no tiles of a picture.
    pictures: list[WholePicture] | None
    parts: list[ReferencePart]
    logits: np.ndarray  # after each token of `following`, float32 [tokens, vocabulary]
    blank: np.ndarray  # `logits` for grey pictures of the same sizes


class PictureModel:
    """A vision model with its tokenizer and its image processor.

    Attributes:
        kind: `model_type` of config.json.
        marker: the text that stands for a picture in llama.cpp's prompts.
        pictures: the image processor, and the tokens that represent pictures.
    """

    def __init__(self, image: ImageModel, model: Any, marker: str) -> None:
        folder = Path(image["model"])
        self.kind, self.model, self.tokenizer = str(model.config.model_type), model, load_tokenizer(folder)
        self.marker = marker
        if self.kind not in FAMILIES:
            raise UsageError(
                f"pictures of the family {self.kind} cannot be verified",
                code="vision",
                expected=", ".join(FAMILIES),
                got=self.kind,
                hint="use a base model of one of these families",
            )
        self.pictures = Pictures(image, self.tokenizer)

    @property
    def picture_token(self) -> int:
        return self.pictures.token_id

    @property
    def line_end(self) -> int | None:
        """The id of the token that ends each line of a picture but the last; None for families without it."""
        return int(self.tokenizer.convert_tokens_to_ids(LINE_END)) if self.kind in LINED else None

    def written_tokens(self) -> dict[int, str]:
        """The texts, by id, of tokens that stand for a picture or around it: the tokens of the chat template, and the
        tokens that llama.cpp looks up by their text."""
        texts = {*self.pictures.places, *_LOOKED_UP.get(self.kind, ())}
        vocabulary = self.tokenizer.get_vocab()
        if self.kind in TILED:
            texts |= {text for text in vocabulary if _TILE.fullmatch(text)}
        return {vocabulary[text]: text for text in sorted(texts) if text in vocabulary}

    def answer(self, question: PictureQuestion) -> PictureReference:
        from PIL import Image

        as_asked = self._rendered(with_markers(question.messages, self.marker))
        rendered = self._rendered(question.messages) if self.pictures.engine is None else as_asked
        mark = self.pictures.mark if self.pictures.engine is None else self.marker
        expansions = [self.pictures.expansion(PictureSize(*picture.size)) for picture in question.pictures]
        fed = list(self.tokenizer(_with_texts(rendered, mark, expansions), add_special_tokens=False)["input_ids"])
        ids = [self.picture_token if token == self.line_end else token for token in fed]
        behind = ids[::-1].index(self.picture_token)
        inputs = self.pictures.tensors([question.pictures])
        grey = self.pictures.tensors([[Image.new("RGB", picture.size, GREY) for picture in question.pictures]])
        pixels = list(self._pixels(inputs))
        return PictureReference(
            ids=ids,
            following=ids[len(ids) - behind :],
            text=as_asked if self.pictures.engine is not None else self._for_llama_cpp(rendered, expansions),
            as_asked=as_asked,
            pictures=self._copied(pixels, [PictureSize(*picture.size) for picture in question.pictures]),
            parts=[ReferencePart(*one) for one in zip(pixels, self._embeddings(inputs, len(pixels)), strict=True)],
            logits=self._logits(fed, inputs, behind),
            blank=self._logits(fed, grey, behind),
        )

    def _rendered(self, messages: list[JsonObject]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    def _for_llama_cpp(self, rendered: str, expansions: list[str]) -> str:
        """The text for llama.cpp, without the tokens that llama.cpp itself writes around a picture."""
        mark = self.pictures.places.mark
        if self.kind in _PATCHED:
            return rendered.replace(f"<|vision_start|>{mark}<|vision_end|>", self.marker)
        if self.kind in (*TILED, *LINED):
            return rendered.replace(mark, self.marker)
        begin, end = self.tokenizer.boi_token, self.tokenizer.eoi_token
        outside = [one[: one.index(begin)] + self.marker + one[one.rindex(end) + len(end) :] for one in expansions]
        return _with_texts(rendered, mark, outside)

    def _pixels(self, inputs: dict[str, Any]) -> Iterator[np.ndarray]:
        """The tower's input for each picture or tile, [3, height, width]."""
        values = inputs["pixel_values"].float().numpy()
        if self.kind in LINED:  # smaller pictures are padded
            yield from (one[:, :high, :wide] for one, (high, wide) in zip(values, inputs["image_sizes"], strict=True))
            return
        if self.kind not in _PATCHED:
            yield from values.reshape(-1, *values.shape[-3:])
            return
        processor, rows = self.pictures.settings, iter(values)
        merge, size = processor.merge_size, processor.patch_size
        for _, high, wide in inputs["image_grid_thw"].tolist():
            import numpy as np

            patches = np.stack(list(islice(rows, high * wide)))
            grid = patches.reshape(high // merge, wide // merge, merge, merge, 3, -1, size, size)[..., 0, :, :]
            yield grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, high * size, wide * size)

    def _copied(self, pixels: list[np.ndarray], sizes: list[PictureSize]) -> list[WholePicture] | None:
        pictures_made = [whole for one in pixels if (whole := self._whole_numbers(one)) is not None]
        if len(pictures_made) < len(pixels):
            return None
        if self.kind not in TILED:
            return [WholePicture(one) for one in pictures_made]
        parts, pictures = iter(pictures_made), []
        for size in sizes:
            rows, columns = self.pictures.grid(size)
            if not rows:  # llama.cpp divides every picture
                return None
            tiles = list(islice(parts, rows * columns))
            pictures.append(WholePicture(_joined(tiles, columns), overview=next(parts)))
        return pictures

    def _whole_numbers(self, pixels: np.ndarray) -> np.ndarray | None:
        """The picture before normalization, uint8 [height, width, 3]; None if the values are not whole numbers."""
        import numpy as np

        mean, std = (
            np.array(getattr(self.pictures.settings, name))[:, None, None] for name in ("image_mean", "image_std")
        )
        values = (pixels * std + mean) * _WHITE
        whole = np.rint(values)
        if np.abs(values - whole).max() > _NEAR:
            return None
        numbers: np.ndarray = whole.astype(np.uint8).transpose(1, 2, 0)
        return numbers

    def _embeddings(self, inputs: dict[str, Any], parts: int) -> Iterator[np.ndarray]:
        """The language model's input for each picture or tile, float32 [tokens, width]."""
        import torch

        with torch.no_grad():
            output = self.model.get_image_features(**inputs)
        embeddings = list(output.pooler_output)
        if self.kind in TILED:
            embeddings = [tile for row in embeddings for tile in row.chunk(parts // len(embeddings))]
        if self.kind in LINED:
            embeddings = [
                self._with_line_ends(*one) for one in zip(embeddings, inputs["image_sizes"].tolist(), strict=True)
            ]
        layers = getattr(output, "deepstack_features", None) or []
        for number, one in enumerate(embeddings):
            yield torch.cat([one, *(layer[number] for layer in layers)], dim=-1).float().numpy()

    def _with_line_ends(self, embeddings: Any, size: list[int]) -> Any:
        """Adds the embedding of the line end after each line of a picture but the last. `size` is [height, width] in
        pixels."""
        import torch

        columns = size[1] // self.pictures.settings.square
        end = self.model.get_input_embeddings().weight[self.line_end].detach()
        lines = embeddings.reshape(-1, columns, embeddings.shape[-1])
        ended = torch.cat([lines, end.expand(len(lines), 1, -1)], dim=1)
        return ended.reshape(-1, embeddings.shape[-1])[:-1]

    def _logits(self, ids: list[int], inputs: dict[str, Any], count: int) -> np.ndarray:
        """The logits of the last `count` tokens, float32 [count, vocabulary]."""
        import torch

        tokens = torch.tensor([ids])
        with torch.no_grad():
            output = self.model(
                input_ids=tokens, **inputs, **self.pictures.token_types(tokens), logits_to_keep=count, use_cache=False
            )
        found: np.ndarray = output.logits[0].float().numpy()
        return found


@contextlib.contextmanager
def picture_model(image: ImageModel, marker: str) -> Iterator[PictureModel]:
    """Loads the vision model of a folder. It is freed when the block ends.

    Args:
        image: the folder, and the limits of a picture's size in the training.
        marker: as in `PictureModel`.
    """
    with reference_model(Path(image["model"]), None, partial(read_model, task="ImageTextToText")) as model:
        yield PictureModel(image, model, marker)


def with_markers(messages: list[JsonObject], marker: str) -> list[JsonObject]:
    """Messages as llama.cpp's server gives them to the chat template: one text, with a marker in place of each picture
    (`common_chat_msg::to_json_oaicompat` in common/chat.cpp)."""
    return [message | {"content": [_one_text(message["content"], marker)]} for message in messages]


def _one_text(parts: list[JsonObject], marker: str) -> JsonObject:
    texts = (marker if part["type"] == "image" else str(part["text"]) for part in parts)
    return {"type": "text", "text": "".join(texts)}


def _with_texts(text: str, mark: str, texts: list[str]) -> str:
    """The text with one of `texts` in place of each mark."""
    parts = text.split(mark)
    return parts[0] + "".join(put + part for put, part in zip(texts, parts[1:], strict=True))


def _joined(tiles: list[np.ndarray], columns: int) -> np.ndarray:
    """Joins tiles, which are in rows of `columns`, to the whole picture."""
    import numpy as np

    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])
