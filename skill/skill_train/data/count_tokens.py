"""Counts tokens with the model's own tokenizer and template, by the encoder of the training program."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skill_train.core.errors import NotInstalled, Temporary, UsageError, from_exit_code, refusals
from skill_train.data.problems import LENGTHS, RefusedRows
from skill_train.data.row_pictures import folder_of
from skill_train.data.token_stats import Lengths
from skill_train.model.foreign_files import block_hub_kernels
from skill_train.model.template_guard_worker import require_ending
from skill_train.program.chat.labels import IGNORED, marked_text, trained_tokens
from skill_train.program.encode import Encoder, Feeding
from skill_train.program.events import Refused, first_line
from skill_train.program.examples import EncodedRow, Row, Tokens
from skill_train.program.pictures.tokens import ImageModel, Pictures, model_document
from skill_train.program.tokenizer import has_tokenizer, load_tokenizer
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import DetectedFormat, as_turns
from skill_train.recipe.preprocess import preprocess_of
from skill_train.run.folder import way_to_model

SAMPLE = 2000  # rows
TRAINED = "⟦"  # opens a trained part of an example
_UNCUT = 1 << 40  # a max_length that cuts nothing
_OF_THE_MODEL = ("no_chat_template", "bad_tokenizer", "unsafe_file")  # faults of the model, not of a row


class Counter:
    """Encodes rows one by one as training does.

    Attributes:
        detected: the format as this model reads it.
        template: rows that the model's template refuses.
        notes: the notes of the encoder.
        pictures: prepares the pictures as this model reads them; None where it reads only text.
        pictures_of_rows: tokens of pictures in each counted row.
    """

    def __init__(self, recipe: Recipe, detected: DetectedFormat, *, images: bool = False) -> None:
        self.recipe = recipe
        self.tokenizer = _tokenizer(recipe)
        self.detected = as_turns(detected) if self.tokenizer.chat_template else detected
        feeding: Feeding = {
            "data": recipe.data,
            "format": self.detected.format,
            "columns": self.detected.columns,
            "loss_on": recipe.loss_on or ("all" if self.detected.format == "text" else "assistant"),
            "max_length": _UNCUT,
            "data_file": recipe.data_file,
        }
        self.pictures = _pictures(recipe, self.tokenizer) if images else None
        self._encode = Encoder(feeding, self.tokenizer, self.pictures)
        self.template = RefusedRows()
        self.pictures_of_rows: list[int] = []

    @property
    def notes(self) -> list[str]:
        return list(self._encode.notes)

    def encode(self, line: int, row: Row) -> EncodedRow | None:
        """The encoded row without a cut; None if the model's template rejects it.

        Raises:
            UsageError: the model cannot render any conversation.
        """
        try:
            return self._encode(0, line, row)
        except Refused as refusal:
            if refusal.error["code"] in _OF_THE_MODEL:
                raise from_exit_code(refusal.exit_code, refusal.error) from None
            self.template.add(line, refusal.error["message"], refused=True)
            return None

    def refusal(self, encoded: Tokens) -> str | None:
        """Why training refuses the row for its length: `picture_cut`, or `fully_masked`."""
        if self.pictures is not None and self.pictures.token_id in encoded["input_ids"][self.recipe.max_length :]:
            return "picture_cut"
        return None if self.trained(encoded) else "fully_masked"

    def trained(self, encoded: Tokens) -> bool:
        """Whether the row still has something to train on after the cut."""
        return first_trained(encoded) < self.recipe.max_length

    def picture_tokens(self, encoded: Tokens) -> int:
        """The tokens of the row that stand for parts of pictures."""
        return 0 if self.pictures is None else encoded["input_ids"].count(self.pictures.token_id)

    def example(self, encoded: Tokens) -> str:
        """The row as the model sees it, with the trained parts between ⟦ and ⟧."""
        limit = self.recipe.max_length
        fed: Tokens = {"input_ids": encoded["input_ids"][:limit], "labels": encoded["labels"][:limit]}
        text = marked_text(self.tokenizer, fed)
        return text if self.pictures is None else shortened(text, self.pictures.places.token)


def count_rows(
    counter: Counter, rows: Iterator[tuple[int, Row]], total: int, longest_row: int
) -> tuple[Lengths | None, dict[str, RefusedRows], str]:
    """The lengths of an even sample of `total` rows, the problems that only a tokenizer finds, and the first row with a
    trained part, rendered.

    The row at ordinal `longest_row` is always counted too, so that the longest row is known. None if no row was
    encoded.
    """
    count = min(total, SAMPLE)
    sample = {index * total // count for index in range(count)}
    problems = {name: RefusedRows() for name in LENGTHS if name != "picture_cut" or counter.pictures is not None}
    problems |= {"template": counter.template}
    lengths, longest, example = [], 0, ""
    for index, (line, row) in enumerate(rows):
        if index not in sample and index != longest_row:
            continue
        encoded = counter.encode(line, row)
        if encoded is None:
            continue
        size = encoded["full_length"]
        longest = max(longest, size)
        if not example or (TRAINED not in example and counter.trained(encoded)):
            example = counter.example(encoded)
        if index in sample:
            lengths.append((size, trained_tokens(encoded), first_trained(encoded)))
            counter.pictures_of_rows.append(counter.picture_tokens(encoded))
            _note(problems, line, size, counter.refusal(encoded), counter.recipe)
    return (Lengths(total, sorted(lengths), longest) if lengths else None), problems, example


def first_trained(encoded: Tokens) -> int:
    """The position of the first label that counts, or `_UNCUT` if none does. The first position is never predicted."""
    labels = encoded["labels"]
    return next((i for i in range(1, len(labels)) if labels[i] != IGNORED), _UNCUT)


def _note(problems: dict[str, RefusedRows], line: int, size: int, refusal: str | None, recipe: Recipe) -> None:
    if size > recipe.max_length:
        problems["truncated"].add(line, f"more than max_length {recipe.max_length} tokens", refused=False)
    if refusal == "picture_cut":
        why = f"max_length {recipe.max_length} ends inside of a picture, or before it: the row has {size} tokens"
        problems["picture_cut"].add(line, why, refused=True)
    if refusal == "fully_masked":
        why = f"no token is left to train on within max_length {recipe.max_length}"
        problems["fully_masked"].add(line, why, refused=not recipe.skip_untrained_rows)


def shortened(text: str, token: str) -> str:
    """The text with each run of a token written as the token, × and the length of the run."""
    runs = re.compile(f"(?:{re.escape(token)}){{2,}}")
    return runs.sub(lambda run: f"{token}×{len(run.group()) // len(token)}", text)


def _pictures(recipe: Recipe, tokenizer: Any) -> Pictures:
    config = model_document(recipe.model, recipe.revision, "config.json") or {}
    image_model: ImageModel = {
        "model": recipe.model,
        "revision": recipe.revision,
        "preprocess": preprocess_of(recipe, str(config.get("model_type"))).value,
        "min_pixels": recipe.min_pixels,
        "max_pixels": recipe.max_pixels,
    }
    try:
        with refusals():
            return Pictures(image_model, tokenizer, folder_of(recipe))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{recipe.model} has no image processor that can be read",
            code="not_a_model",
            expected="a folder with preprocessor_config.json, or the id of a vision model on the Hub",
            got=first_line(error),
            hint="download the whole model, or copy preprocessor_config.json from its base model",
        ) from None


def _tokenizer(recipe: Recipe) -> Any:
    block_hub_kernels()
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotInstalled(
            "transformers is not installed, so tokens cannot be counted",
            code="missing_package",
            hint='pip install "skill-train[train]"',
        ) from None
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = load_tokenizer(recipe.model, recipe.revision)
        require_ending(tokenizer.chat_template)
        return tokenizer
    except Refused as refusal:
        if not Path(recipe.model).exists():  # for a model on the Hub, only config.json was available
            raise _no_tokenizer(recipe, refusal.error["got"]) from None
        error = from_exit_code(refusal.exit_code, refusal.error)
        if not has_tokenizer(Path(recipe.model)):
            error.hint = way_to_model(Path(recipe.model)) or error.hint
        raise error from None
    except (OSError, ValueError) as error:
        raise _no_tokenizer(recipe, first_line(error)) from None


def _no_tokenizer(recipe: Recipe, reason: str) -> UsageError | Temporary:
    if Path(recipe.model).exists() or recipe.model.count("/") != 1 or recipe.model.startswith((".", "/")):
        return UsageError(
            f"{recipe.model} has no readable tokenizer",
            code="not_a_model",
            expected="a folder with tokenizer.json and tokenizer_config.json, or the id of a model on the Hub",
            got=reason,
            hint="download the whole model, or copy the tokenizer files from its base model",
        )
    return Temporary(
        f"the tokenizer of {recipe.model} cannot be fetched: {reason}",
        code="hub_unreachable",
        expected="a connection to the Hub, a token that may read the model, or a local model folder",
        hint="try again when the Hub can be reached, or use a local model folder",
    )
