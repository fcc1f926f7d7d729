"""Prepares held-out rows with pictures: checks the pictures, and makes the inputs of each backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject
from skill_train.llama.template import Conversation, by_tokenizer
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSize, picture_digest, picture_size
from skill_train.program.pictures.in_rows import picture_parts
from skill_train.program.pictures.tokens import ImageModel, Pictures
from skill_train.reference.pictures import with_markers
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
from skill_train.run.train_record import Row


@dataclass(frozen=True)
class RunPictures:
    """The folder of the rows' pictures, and the model that reads them."""

    folder: Path  # the run directory
    image: ImageModel  # the model folder with the image processor, and the recipe's settings for pictures

    def read_by(self, tokenizer: Any) -> Pictures:
        return Pictures(self.image, tokenizer, self.folder)


def pictures_of_run(run: RunDir, base: Path) -> RunPictures:
    recipe = plan_record.read(run.plan).recipe
    image: ImageModel = {
        "model": str(base),
        "revision": None,
        "preprocess": recipe.preprocess,
        "min_pixels": recipe.min_pixels,
        "max_pixels": recipe.max_pixels,
    }
    return RunPictures(run.path, image)


@dataclass(frozen=True)
class PictureTurns:
    """The turns before an answer, and their pictures."""

    messages: list[JsonObject]  # `content` is a list of parts, with one `{"type": "image"}` for each picture
    tools: list[Any] | None
    images: list[str]  # files in the run directory
    image_sha256: list[str]  # the digests of `images`


def turns_of(row: Row) -> PictureTurns | None:
    """The turns of a row before its last trained answer; None for a row without pictures."""
    images = row.get("images")
    if not images:
        return None
    end = max(row.get("trained_messages") or [len(row["messages"]) - 1])
    before = [m | {"content": picture_parts(str(m.get("content") or ""))} for m in row["messages"][:end]]
    return PictureTurns(before, row.get("tools"), [str(image) for image in images], row.get("image_sha256") or [])


def require_pictures(rows: list[Row], folder: Path) -> None:
    """Checks that the pictures of held-out rows did not change since the training.

    Raises:
        UsageError: a picture is missing or was changed.
    """
    for row in rows:
        for image, expected in zip(row.get("images") or (), row.get("image_sha256") or (), strict=True):
            try:
                digest = picture_digest(image, folder)
            except (Refused, OSError):
                digest = "no such file"
            if digest != expected:
                raise UsageError(
                    f"line {row['line']} of the held-out rows has a picture that was changed: {image}",
                    code="missing_file" if digest == "no such file" else "bad_picture",
                    expected=f"the file whose SHA-256 is {expected}",
                    got=digest,
                    hint="train again in a new folder with --run-dir, or put the picture back",
                )


def picture_tensors(pictures: Pictures, turns: PictureTurns | None, ids: Any) -> dict[str, Any]:
    """The inputs of a transformers model beside `input_ids`, by name.

    Args:
        ids: the ids of the row, a tensor [1, tokens] on the model's device.
    """
    images = [] if turns is None else pictures.read({"images": turns.images, "image_sha256": turns.image_sha256})
    tensors = {name: value.to(ids.device) for name, value in pictures.tensors([images]).items()}
    return tensors | pictures.token_types(ids)


@contextmanager
def plain_generation(network: Any) -> Iterator[None]:
    """In the block, `generate` ignores generation_config.json, such as penalties that llama.cpp does not have."""
    from transformers import GenerationConfig

    own = network.generation_config
    network.generation_config = GenerationConfig()
    try:
        yield
    finally:
        network.generation_config = own


def server_prompt(tokenizer: Any, turns: PictureTurns, marker: str) -> str:
    """The prompt as llama.cpp's server writes it, with a marker in the text for each picture."""
    return by_tokenizer(tokenizer, Conversation(with_markers(turns.messages, marker), turns.tools, True))


def is_asked_alike(pictures: Pictures, tokenizer: Any, turns: PictureTurns, prompt: list[int]) -> bool:
    """Whether the chat template gives the same ids as the row has before its answer (`prompt`)."""
    messages = turns.messages if pictures.engine is None else with_markers(turns.messages, pictures.mark)
    text = by_tokenizer(tokenizer, Conversation(messages, turns.tools, True))
    sizes: list[PictureSize] = [picture_size(image, pictures.folder) for image in turns.images]
    fed, _ = pictures.expanded(text, sizes)
    return list(tokenizer(fed, add_special_tokens=False)["input_ids"]) == prompt
