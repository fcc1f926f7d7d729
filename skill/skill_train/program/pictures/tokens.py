"""The tokens that stand for a picture in the model's text, and the tensors that the model gets.

The model's own image processor makes the tensors, in its Pillow version; torchvision is not needed. With
`preprocess: engine`, the tensors and the text around a picture are those of llama.cpp.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from skill_train.program.events import Refused, write_text
from skill_train.program.examples import Pictured
from skill_train.program.model_files import foreign_json, model_file
from skill_train.program.pictures.decode import (
    PictureSize,
    PictureSource,
    opened_picture,
    picture_bytes,
    picture_digest,
    picture_name,
    picture_size,
    read_picture,
    require_pillow,
)
from skill_train.program.pictures.engine import LINED, TILED, Engine, TileGrid, require_engine
from skill_train.program.pictures.in_rows import PICTURE, picture_parts
from skill_train.program.pictures.processor import (
    PROCESSOR_DEFAULTS,
    PROCESSOR_FILES,
    grid_of,
    limited_processor,
    limited_size,
    picture_tokens,
    read_processor,
)

LINE_END = "[IMG_BREAK]"


class Places(NamedTuple):
    """How a family writes pictures into a text."""

    mark: str  # the token that the chat template writes for a picture
    token: str  # the token that stands for a part of a picture; the tower's output takes its place


class ImageModel(TypedDict):
    """The fields of a recipe that say how its pictures are read. A limit of None stands for that of the model's image
    processor. Without `preprocess`, the image processor reads the pictures."""

    model: str
    revision: str | None
    preprocess: NotRequired[str]
    min_pixels: NotRequired[int | None]
    max_pixels: NotRequired[int | None]


class Pictures:
    """How one model reads pictures, with the pixel limits of a recipe."""

    def __init__(self, recipe: ImageModel, tokenizer: Any, folder: Path | None = None) -> None:
        """`folder` is where the paths in the rows begin."""
        require_pillow()
        name, revision = recipe["model"], recipe["revision"]
        self.model, self.folder = (name, revision), folder
        self.is_grey = False
        documents = {file: model_document(name, revision, file) for file in ("config.json", *PROCESSOR_FILES)}
        config = documents["config.json"] or {}
        self.kind = str(config.get("model_type", "unknown"))
        tower = config.get("vision_config") or {}
        if self.kind not in PROCESSOR_DEFAULTS or (self.kind == "llava" and tower.get("model_type") != "pixtral"):
            raise Refused(
                f"the model family {self.kind} cannot be trained on pictures",
                code="vision",
                expected=", ".join(PROCESSOR_DEFAULTS) + " with Pixtral's tower",
                got=f"{self.kind} with the tower {tower.get('model_type')}" if self.kind == "llava" else self.kind,
                hint="use a base model of one of these families",
            )
        settings = read_processor(config, documents)
        self.tokenizer = tokenizer
        self.places = self._places()
        self.token_id = int(tokenizer.convert_tokens_to_ids(self.places.token))
        self.limits = PixelLimits(recipe.get("min_pixels"), recipe.get("max_pixels"))
        self.settings = limited_processor(settings, *self.limits)  # used to count tokens
        self.engine: Engine | None = None  # prepares the pictures in place of the processor, as llama.cpp does
        if recipe.get("preprocess") == "engine":
            require_engine(recipe, self.kind)
            self.engine = Engine(self.settings)
        self.mark = self.places.mark if self.engine is None else PICTURE  # of a picture in a rendered text

    def parts(self, content: str) -> list[dict[str, str]]:
        """The content of a message as the parts that the chat template reads. llama.cpp's server gives it one text,
        with a mark of its own where a picture stands."""
        return picture_parts(content) if self.engine is None else [{"type": "text", "text": content}]

    @cached_property
    def processor(self) -> Any:
        """The image processor of transformers, which makes the tensors without `preprocess: engine`."""
        from transformers import AutoImageProcessor

        name, revision = self.model
        processor = AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil", trust_remote_code=False)
        tile = getattr(processor, "max_image_size", None)
        processor.size = limited_size(self.kind, processor.size, tile, *self.limits)
        return processor

    def grid(self, size: PictureSize) -> TileGrid:
        """Tokens or tiles of a picture, by row and column."""
        return grid_of(self.settings, size, self.engine)

    def _places(self) -> Places:
        if self.kind == "gemma3":
            return Places(self.tokenizer.boi_token, self.tokenizer.image_token)
        name = dict.fromkeys(TILED, "<image>") | dict.fromkeys(LINED, "[IMG]")
        token = name.get(self.kind, "<|image_pad|>")
        return Places(token, token)

    def expansion(self, size: PictureSize) -> str:
        """The text that stands for one picture, as `replace_image_token` of each processor of transformers 5.23 writes
        it, which a test compares. The processors themselves need torchvision, for films."""
        token, by_engine = self.places.token, self.engine is not None
        if self.kind == "gemma3":  # its processor puts the marks on lines of their own, and llama.cpp does not
            text = f"{self.tokenizer.boi_token}{token * self.tokens(size)}{self.tokenizer.eoi_token}"
            return text if by_engine else f"\n\n{text}\n\n"
        if self.kind.startswith("qwen"):
            tokens = token * self.tokens(size)
            return f"<|vision_start|>{tokens}<|vision_end|>" if by_engine else tokens
        rows, columns = self.grid(size)
        if self.kind in LINED:
            return LINE_END.join([token * columns] * rows) + "[IMG_END]"
        around, parts, tiles = "<fake_token_around_image>", token * self.settings.count, ""
        for row in range(1, rows + 1):
            tiles += "".join(f"{around}<row_{row}_col_{column}>{parts}" for column in range(1, columns + 1)) + "\n"
        return tiles + "\n" * bool(tiles) + f"{around}<global-img>{parts}{around}"

    def expanded(self, rendered: str, sizes: list[PictureSize]) -> tuple[str, list[tuple[int, int, int]]]:
        """The text with each mark of a picture replaced by its `expansion`, and the pieces between the marks: their
        start and end in `rendered`, and by how many characters they moved."""
        marks = [match.span() for match in re.finditer(re.escape(self.mark), rendered)]
        marks_of_engine = 0 if self.engine is None else sum(rendered.count(text) for text in {*self.places})
        if len(marks) != len(sizes) or marks_of_engine:
            raise Refused(
                "the model's chat template does not write one mark for each picture",
                code="template_mismatch",
                expected=f"{len(sizes)} times {self.mark}",
                got=f"{len(marks)} times" + f", and {marks_of_engine} times {self.places.mark}" * bool(marks_of_engine),
                hint="use a base model whose chat template reads pictures, such as an Instruct version",
            )
        text, end, pieces = "", 0, list[tuple[int, int, int]]()
        for (start, stop), size in zip(marks, sizes, strict=True):
            pieces.append((end, start, len(text) - end))
            text += rendered[end:start] + self.expansion(size)
            end = stop
        return text + rendered[end:], [*pieces, (end, len(rendered), len(text) - end)]

    def fed(
        self, rendered: str, spans: list[tuple[int, int]], images: list[PictureSource]
    ) -> tuple[str, list[tuple[int, int]], Pictured]:
        """The rendered text with its pictures expanded, the trained spans in this text without the tokens of pictures,
        and the pictures with their digests."""
        fed, pieces = self.expanded(rendered, [picture_size(image, self.folder) for image in images])
        outside = [
            (max(start, a) + shift, min(stop, b) + shift)
            for a, b in spans
            for start, stop, shift in pieces
            if max(start, a) < min(stop, b)
        ]
        if not images:
            return fed, outside, {}
        digests = [picture_digest(image, self.folder) for image in images]
        return fed, outside, {"images": images, "image_sha256": digests}

    def require_whole(self, ids: list[int], fed: str, limit: int) -> None:
        """Refuses a row whose pictures are cut by max_length: the model would fail, or see a part of a picture."""
        whole, token = fed.count(self.places.token), self.token_id
        if ids.count(token) != whole:
            raise Refused(
                "the tokenizer does not encode each token of a picture separately",
                code="bad_tokenizer",
                expected=f"{whole} times {self.places.token}",
                got=f"{ids.count(token)} times",
            )
        if ids[:limit].count(token) != whole:
            last = max(place for place, each in enumerate(ids) if each == token)
            raise Refused(
                "max_length ends inside of a picture, or before it",
                code="nothing_to_train",
                expected=f"max_length above {last + 1}: the row has {whole} tokens of pictures",
                got=f"max_length {limit}",
                hint=f"raise max_length to {len(ids)}, or set max_pixels in the recipe for smaller pictures"
                if self.engine is None
                else f"raise max_length to {len(ids)}, or make the pictures smaller",
            )

    def tokens(self, size: PictureSize) -> int:
        """The parts of a picture that the language model reads."""
        return picture_tokens(self.settings, size, self.engine).parts

    def read(self, row: Mapping[str, Any]) -> list[Any]:
        """The pictures of an encoded row, as PIL images."""
        from PIL import Image

        encoded = zip(row.get("images") or (), row.get("image_sha256") or (), strict=True)
        files = [(picture_name(image), encoded_bytes(image, digest, self.folder)) for image, digest in encoded]
        images = [read_picture({"bytes": content, "path": name}, None) for name, content in files]
        return [Image.new("RGB", image.size, "grey") for image in images] if self.is_grey else images

    @contextmanager
    def all_grey(self) -> Iterator[None]:
        """In the block every picture is grey, of its own size."""
        self.is_grey = True
        try:
            yield
        finally:
            self.is_grey = False

    def tensors(self, rows: list[list[Any]]) -> dict[str, Any]:
        """The tensors that the model takes beside the ids, made of the PIL images of each row. They hold pixels by
        patch (Qwen), by picture (Gemma 3) or by row and tile (SmolVLM, Idefics3)."""
        if not any(rows):
            return {}
        if self.engine is not None:
            return self.engine.tensors(rows)
        nested = self.kind in TILED
        images = rows if nested else [image for row in rows for image in row]
        more = {"patch_size": self.settings.square} if self.kind in LINED else {}
        features = dict(self.processor(images=images, return_tensors="pt", **more))
        return {name: value for name, value in features.items() if name not in ("rows", "cols", "num_crops")}

    def token_types(self, ids: Any) -> dict[str, Any]:
        """Where pictures stand, for the families whose model asks: Qwen's positions and Gemma's attention depend on it.
        ids [rows, tokens] -> the same shape, 0 or 1."""
        if self.kind != "gemma3" and not self.kind.startswith("qwen"):
            return {}
        name = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
        return {name: (ids == self.token_id).long()}


def model_document(model: str, revision: str | None, name: str) -> dict[str, Any] | None:
    """A JSON file of a model; None where there is none, or it holds no object."""
    path = model_file(model, revision, name)
    document = foreign_json(Path(path)) if path is not None else None
    return document if isinstance(document, dict) else None


class PixelLimits(NamedTuple):
    """The limits of a recipe; None stands for the limit of the model's processor."""

    least: int | None
    most: int | None


def write_limits(folder: Path, kind: str, limits: PixelLimits) -> dict[str, Any]:
    """Writes the limits into the files of a model's image processor, so that whoever loads the model resizes pictures
    as the training did. Returns what was changed, by its name; a file without a change stays as it is."""
    changed: dict[str, Any] = {}
    for path in (folder / name for name in PROCESSOR_FILES):
        document = foreign_json(path) if path.is_file() and limits != PixelLimits(None, None) else None
        if not isinstance(document, dict):
            continue
        nested = document.get("image_processor")
        own = nested if isinstance(nested, dict) else document
        new = {name: value for name, value in limited_settings(own, kind, limits).items() if own.get(name) != value}
        if new:
            own.update(new)
            changed |= new
            write_text(path, json.dumps(document, indent=1) + "\n")
    return changed


def limited_settings(own: dict[str, Any], kind: str, limits: PixelLimits) -> dict[str, Any]:
    """The settings of an image processor's file that hold the limits, by the file's names; empty for another file."""
    size = own.get("size") if isinstance(own.get("size"), dict) else None
    named = {"min_pixels": limits.least, "max_pixels": limits.most}  # earlier files of Qwen-VL; they win over `size`
    if size is None and not named.keys() & own.keys():
        return {}
    settings = {name: value for name, value in named.items() if value is not None and name in own}
    if size is not None:
        settings["size"] = limited_size(kind, size, own.get("max_image_size"), *limits)
    return settings


def encoded_bytes(source: PictureSource, digest: str, folder: Path | None) -> bytes:
    """The content of a picture's file. Refuses a file that changed after its row was encoded, because the checks and
    the record of what was fed are about the earlier content."""
    content = picture_bytes(source, folder)
    got = hashlib.sha256(content).hexdigest()
    if got != digest:
        raise Refused(
            f"{picture_name(source)} changed after the training had begun",
            code="input_changed",
            expected=f"sha256 {digest[:12]}…",
            got=f"sha256 {got[:12]}…",
            hint="train again once nothing writes to the data",
        )
    return content


def picture_format(source: PictureSource, folder: Path | None) -> str:
    """The suffix of its format: png, jpeg, webp."""
    with opened_picture(source, folder) as (image, _):
        return str(image.format or "bin").lower()
