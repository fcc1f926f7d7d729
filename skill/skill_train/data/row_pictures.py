"""The pictures of rows: checked by their headers, decoded once each, and counted.

Memory does not grow with their number: 24 bytes of each picture are sorted in a file, and a few figures are kept for
the last pictures. `picture_files` finds the files that must lie beside the rows on another machine.
"""

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Container, Iterator
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from skill_train.core.errors import UsageError, quoted, refusals
from skill_train.data.repeats import Repeats
from skill_train.data.token_stats import PictureCounter
from skill_train.program.events import ErrorWords, Refused
from skill_train.program.examples import Row
from skill_train.program.pictures import decode
from skill_train.program.pictures.decode import PictureSize, PictureSource
from skill_train.program.pictures.in_rows import PICTURE, lift_pictures
from skill_train.program.pictures.locations import HubFile, hub_cache_of, picture_folder
from skill_train.program.pictures.tokens import picture_format
from skill_train.program.rows import iter_rows
from skill_train.recipe.fields import Recipe
from skill_train.recipe.resolved import ResolvedRecipe

# Problems for which training refuses a picture, by a part of the message. Any other fault is `bad_picture`.
FAULTS = {
    " does not exist": "missing_picture",
    " cannot be read": "missing_picture",
    " lies outside the folder of the data": "picture_elsewhere",
    " is an address": "picture_elsewhere",
    " has no folder": "picture_elsewhere",
    " has too many pixels": "large_picture",
    " is too large": "large_picture",
    " is too narrow": "narrow_picture",
    " is animated or has several pages": "animated_picture",
    " has the colour mode ": "colour_mode",
}
PROBLEMS = (
    "missing_picture", "picture_elsewhere", "bad_picture", "large_picture", "narrow_picture", "animated_picture",
    "colour_mode", "picture_places", "repeated_picture",
)  # fmt: skip
REPEATED = "a picture of an earlier row, by the bytes of its file"
_RECENT = 4096  # pictures whose figures stay, because rows about one picture often stand together
# What the Hub recommends for a repository (huggingface.co/docs/hub/repositories-recommendations, read 2026-11): fewer
# than 100k files, and fewer than 10k in a folder. It says nothing about buckets, where a job opens each file over the
# network.
MOST_FILES, MOST_IN_A_FOLDER = 100_000, 10_000
_NEVER_SENT = {".git", ".cache"}  # FORBIDDEN_FOLDERS of huggingface_hub 2.4 (utils/_paths.py)
_UNSAFE = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]|^[A-Za-z]:")  # huggingface_hub reads names as Windows does too
_ONE_FILE = "write the pictures as bytes into one Parquet file, or upload the dataset to the Hub and use its id as data"
_GREY, _ALPHA = ("1", "L", "LA", "La"), ("RGBA", "LA", "PA", "RGBa", "La")


def problem_of(refusal: Refused) -> str:
    """The name of the problem for a refusal of a row's pictures."""
    if refusal.error["code"] != "bad_picture":
        return "picture_places"
    message = refusal.error["message"]
    fault = max(FAULTS, key=message.rfind)  # the name of a file may say anything
    return FAULTS[fault] if fault in message else "bad_picture"


class PictureHeader(NamedTuple):
    """What the header of a picture says."""

    size: PictureSize  # once it is upright
    bytes: int  # of the file
    # the ones of `rotated`, `grey`, `cmyk` and `transparent` that apply. Training takes all of them.
    traits: tuple[str, ...]


class PictureFigures(msgspec.Struct):
    """The pictures of all rows."""

    pictures: int = 0
    rows: int = 0  # those with pictures; `most` is the largest number in one row
    most: int = 0
    bytes: int = 0  # of their files, counted again in each row
    pixels: int = 0  # of all pictures, as they are stored
    largest: PictureSize | None = None  # the one with most pixels
    traits: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, headers: list[PictureHeader]) -> None:
        self.rows += bool(headers)
        self.pictures += len(headers)
        self.most = max(self.most, len(headers))
        for size, content, traits in headers:
            self.bytes += content
            self.pixels += size.width * size.height
            self.traits.update(traits)
            if self.largest is None or size.width * size.height > self.largest.width * self.largest.height:
                self.largest = size


class RowPictures:
    """Checks and counts the pictures of the rows of one dataset.

    Attributes:
        folder: where their paths begin; None for data from the Hub.
        figures: of the rows that were counted.
        tokens: of their pictures; None where no model reads them, or its image processor is unknown.
    """

    def __init__(self, folder: Path | None, tokens: PictureCounter | None = None) -> None:
        self.folder = folder
        self.tokens = tokens
        self.figures = PictureFigures()
        self._header_of = lru_cache(_RECENT)(partial(read_header, folder=folder))  # by path
        self._digests: dict[bytes, bytes] = {}
        self._broken: dict[bytes, ErrorWords] = {}  # those whose pixels cannot be decoded, by their keys
        self._repeats = Repeats()

    def check(self, sources: list[PictureSource]) -> None:
        """Checks what the headers say, and what `decode` found.

        Raises:
            Refused: training refuses one of them.
        """
        for source in sources:
            size = self.header(source).size
            if self.tokens is not None:
                self.tokens.of(size)
            if self._broken and (words := self._broken.get(_key(source))) is not None:
                raise Refused(**words)

    def header(self, source: PictureSource) -> PictureHeader:
        """What the header of a picture says. A file that was read lately is not read again."""
        path = decode.picture_path(source)
        return self._header_of(path) if path else read_header(source, self.folder)

    def count(self, sources: list[PictureSource]) -> None:
        """Counts the pictures of a row that `check` took."""
        headers = [self.header(source) for source in sources]
        self.figures.add(headers)
        if self.tokens is not None:
            self.tokens.add([header.size for header in headers])

    def decode(self, line: int, sources: list[PictureSource]) -> None:
        """Decodes the pictures of a row that `check` took, and notes which they are.

        Raises:
            Refused: one of them is broken. `check` refuses it from now on.
        """
        for digest in {self._decoded(source) for source in sources}:
            self._repeats.add(digest, line)

    def _decoded(self, source: PictureSource) -> bytes:
        """The digest of a picture's file, after its pixels were decoded once."""
        key = _key(source)
        if key not in self._digests:
            content = decode.picture_bytes(source, self.folder)
            try:
                decode.read_picture({"bytes": content, "path": decode.picture_name(source)}, None)
            except Refused as refusal:
                self._broken[key] = refusal.error
                raise
            if len(self._digests) == _RECENT:
                self._digests.clear()
            self._digests[key] = hashlib.sha256(content).digest()
        return self._digests[key]

    def repeated(self) -> Iterator[int]:
        """The lines of the rows with a picture of an earlier row, in order. Ask once."""
        return (line for line, _ in groupby(self._repeats.places()))


class ListedPictures(RowPictures):
    """Checks the pictures beside a file of rows on the Hub by the names in the repository, and reads none of them. It
    reads those that the rows hold themselves."""

    def __init__(self, file: HubFile, names: Container[str]) -> None:
        super().__init__(file.folder)
        self._file, self._names = file, names

    def check(self, sources: list[PictureSource]) -> None:
        for source in sources:
            if (path := decode.picture_path(source)) is None:
                super().check([source])
                continue
            place, where = decode.placed_file(path, self.folder)
            if place.relative_to(self._file.root).as_posix() not in self._names:
                raise decode.bad_picture(path[:200], "does not exist", path, where)


def folder_of(recipe: Recipe) -> Path:
    """The folder where the paths of the pictures of a dataset begin."""
    return picture_folder(recipe.data, recipe.data_file, recipe.data_revision)


def _key(source: PictureSource) -> bytes:
    """Equal for equal sources."""
    if isinstance(source, dict):
        content = source.get("bytes")
        source = content if isinstance(content, bytes) else str(source.get("path"))
    content = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    return hashlib.sha256(content).digest()


def read_header(source: PictureSource, folder: Path | None) -> PictureHeader:
    """What the header of a picture says; its pixels are not decoded.

    Raises:
        Refused: it cannot be read, or training refuses it for what the header says.
        NotInstalled: Pillow is missing.
    """
    with refusals():  # the package's fault, not the row's
        decode.require_pillow()
    with decode.opened_picture(source, folder) as (image, size):
        return PictureHeader(decode.upright_size(image), size, tuple(traits_of(image)))


def traits_of(image: Any) -> Iterator[str]:
    """What training changes in a picture before the model sees it upright and in RGB."""
    if decode.orientation(image) in range(2, 9):
        yield "rotated"
    if image.mode in _GREY or image.mode.startswith("I;16"):
        yield "grey"
    if image.mode == "CMYK":
        yield "cmyk"
    if image.mode in _ALPHA or "transparency" in image.info:
        yield "transparent"


def with_tags(row: Row, columns: dict[str, str], folder: Path | None, out: Path) -> Row:
    """A row with the standard columns of its format, a tag in place of each picture, and its pictures in `images`:
    as a path that begins at the folder of `out`, or as a data URI.

    Raises:
        UsageError: `out` lies where such a path would leave its folder.
    """
    lifted, sources = lift_pictures(row, columns)
    texts = {key: _tagged(lifted.get(column)) for key, column in columns.items() if key != "images"}
    return texts | ({"images": [_portable(source, folder, out) for source in sources]} if sources else {})


def _tagged(value: Any) -> Any:
    """The value with a tag for each picture, and around it the line ends that are read as parts of the tag."""
    if isinstance(value, list):
        return [_tagged(each) for each in value]
    if isinstance(value, dict):
        return {name: _tagged(part) for name, part in value.items()}
    return value.replace(PICTURE, "\n<image>\n") if isinstance(value, str) else value


def _portable(source: PictureSource, folder: Path | None, out: Path) -> str:
    if isinstance(source, dict) and source.get("bytes") is None:
        source = str(source.get("path"))
    if isinstance(source, str) and source[:5].lower() == "data:":
        return source
    if not isinstance(source, str) or folder is None or hub_cache_of(folder) is not None:
        encoded = base64.b64encode(decode.picture_bytes(source, folder)).decode("ascii")
        return f"data:image/{picture_format(source, folder)};base64,{encoded}"
    path = Path(os.path.relpath((folder / source).resolve(), out.parent.resolve())).as_posix()
    if path.startswith("../"):
        raise UsageError(
            f"{out} lies outside the folder of the pictures, and a row names them from its own folder",
            code="bad_usage",
            expected=f"a file in {folder}",
            got=str(out),
            hint=f"--fix {quoted(folder / out.name)}",
        )
    return path


def picture_files(data: Path, recipe: ResolvedRecipe) -> dict[str, Path]:
    """The files by the paths in the rows, each once, in the order of the rows. Empty where the rows hold the pictures
    themselves, and for a recipe without pictures.

    Raises:
        UsageError: a row cannot be read, a path means something else on another machine, or there are too many files.
    """
    files: dict[str, Path] = {}
    folder = picture_folder(str(data)) if recipe.images else None
    if folder is None:
        return files
    root = folder.resolve()
    with refusals():
        for line, row in iter_rows(str(data), split=recipe.split):
            for source in lift_pictures(row, recipe.columns)[1]:
                path = decode.picture_path(source)
                if path is not None and path not in files:
                    files[path] = _file(path, root, f"line {line} of {data}")
                    if len(files) > MOST_FILES:
                        raise _too_many(data, f"more than {MOST_FILES:,} files", f"at most {MOST_FILES:,} files")
    return files


def name_below(path: str) -> str:
    """The name of a picture's file in the folder of the data."""
    return os.path.normpath(path).replace(os.sep, "/")


def require_folders_of_a_repository(data: Path, names: list[str]) -> None:
    """Refuses more files in one folder than a repository of the Hub should have.

    Raises:
        UsageError: a folder has more.
    """
    [(folder, count)] = Counter(str(PurePosixPath(name).parent) for name in names).most_common(1) or [("", 0)]
    if count > MOST_IN_A_FOLDER:
        expected = f"at most {MOST_IN_A_FOLDER:,} files in each folder of a dataset repository"
        raise _too_many(data, f"{count:,} files in the folder {folder}", expected)


def _file(path: str, root: Path, where: str) -> Path:
    """The file that a path in a row means here, and under the same name on another machine."""
    name = name_below(path)
    file = (root / path).resolve()
    if os.path.isabs(path) or name.startswith("../") or _UNSAFE.search(name) or _NEVER_SENT & set(name.split("/")):
        raise _unsent(where, f"the picture {path[:200]!r} cannot have the same name in a job", path)
    if name != path and (root / name).resolve() != file:  # `link/../a.png`, where the link leads to another folder
        raise _unsent(where, f"the picture {path[:200]!r} is another file where there are no links", path)
    if not file.is_relative_to(root) or not file.is_file():
        raise _unsent(where, f"the picture {path[:200]!r} is not a file in the folder of the data", path)
    return file


def _unsent(where: str, why: str, path: str) -> UsageError:
    return UsageError(
        f"{where}: {why}, so nothing was sent",
        code="local_input",
        expected="a relative path in the folder of the data, without a backslash, .git or .cache in it",
        got=path[:200],
        hint="skill-train data DATA --fix NEW_FILE writes paths that begin in the folder of NEW_FILE",
    )


def _too_many(data: Path, got: str, expected: str) -> UsageError:
    return UsageError(
        f"the rows of {quoted(data)} name too many files of pictures to send them to a job",
        code="local_input",
        expected=expected,
        got=got,
        hint=_ONE_FILE,
    )
