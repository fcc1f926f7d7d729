"""How a picture is read: found in a file or a row, checked by its header, decoded, upright, and in RGB.

Pillow decodes each picture once, so training, evaluation and verification see the same pixels.
"""

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from skill_train.program.events import EXIT_NOT_INSTALLED, Refused
from skill_train.program.pictures.locations import HUB_FOLDER, hub_cache_of

# Where a row's picture is: the path of a file, a data URI, or its bytes. `datasets` and Parquet write the last two.
PictureSource = str | bytes | dict[str, Any]

PICTURE_BYTES = 100_000_000  # of one file; a photograph has 3 to 20 million
PICTURE_PIXELS = 100_000_000  # decoded, 300 MB; a larger one is a bomb or a map
PICTURE_RATIO = 200  # of the longer side to the shorter one: what Qwen's processor still takes
# What Pillow may open. Some others are not pictures: it gives PostScript to another program to run.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF")
PICTURE_HINT = "repair or remove the row: skill-train data FILE lists all of them"
ADDRESS_HINT = "download the pictures beside the rows and name the files; what is at an address can change or go"
HUB_HINT = (
    "upload the pictures beside one file of rows, name one of several files as data_file in the recipe, or upload the "
    "rows as Parquet with the feature Image of datasets"
)


def require_pillow() -> None:
    if find_spec("PIL") is None:
        raise Refused(
            "Pillow is not installed, and pictures are read with it",
            code="missing_package",
            exit_code=EXIT_NOT_INSTALLED,
            hint='pip install "skill-train[vision]"',
        )


class PictureSize(NamedTuple):
    """Pixels of an upright picture."""

    width: int
    height: int


def read_picture(source: PictureSource, folder: Path | None) -> Any:
    """The picture, upright, as a PIL image in RGB. Transparent pixels become white. Refuses what is no picture, too
    large, too narrow, animated or broken. Paths lie in the `folder` of the dataset; without one they are refused."""
    from PIL import ImageOps

    with opened_picture(source, folder) as (image, _):
        image.load()
        return in_rgb(ImageOps.exif_transpose(image))


def picture_size(source: PictureSource, folder: Path | None) -> PictureSize:
    """Its size once it is upright, from the header of the file. The pixels are not decoded, so they may be broken."""
    with opened_picture(source, folder) as (image, _):
        return upright_size(image)


def upright_size(image: Any) -> PictureSize:
    """The size of a PIL image once it is upright."""
    width, height = image.size
    on_its_side = orientation(image) in (5, 6, 7, 8)
    return PictureSize(height, width) if on_its_side else PictureSize(width, height)


def orientation(image: Any) -> int:
    """The orientation that EXIF says, from 1 (upright) to 8. EXIF behind the pixels of a PNG file does not count:
    Pillow's own method would decode the file to find it."""
    from PIL import Image

    value = Image.Image.getexif(image).get(0x0112)
    return value if isinstance(value, int) else 1


def picture_digest(source: PictureSource, folder: Path | None) -> str:
    """The SHA-256 of the file, in hexadecimal digits."""
    return hashlib.sha256(picture_bytes(source, folder)).hexdigest()


def picture_path(source: PictureSource) -> str | None:
    """The path that a row names; None where the row holds the picture itself."""
    if isinstance(source, dict):
        source = source["path"] if source.get("bytes") is None and isinstance(source.get("path"), str) else b""
    return source if isinstance(source, str) and source[:5].lower() != "data:" else None


class PicturesDigest:
    """The digest of the pictures of a dataset, in the order of its rows. The file of the rows may only name them."""

    def __init__(self, folder: Path | None, digests: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.digests = digests or {}  # of files that need not be read again, by the paths in the rows
        self.digest = hashlib.sha256()
        self.count = 0

    def add(self, sources: list[PictureSource]) -> None:
        self.count += len(sources)
        for source in sources:
            digest = self.digests.get(picture_path(source) or "")
            self.digest.update(bytes.fromhex(digest or picture_digest(source, self.folder)))

    def with_rows(self, fingerprint: str) -> str:
        """The fingerprint of the rows and their pictures; that of the rows where they have none."""
        both = f"{fingerprint} {self.digest.hexdigest()}"
        return hashlib.sha256(both.encode()).hexdigest() if self.count else fingerprint


@contextmanager
def opened_picture(source: PictureSource, folder: Path | None) -> Iterator[tuple[Any, int]]:
    """The lazily opened PIL image, once its header is checked, and the size of its file. Any error of Pillow in the
    block is a refusal: damaged files raise struct.error, IndexError and more."""
    from PIL import Image

    name = picture_name(source)
    with picture_file(source, folder) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            with warnings.catch_warnings():
                # Our own limit is below that of Pillow's error, and a cut EXIF leaves the picture as it is.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                warnings.simplefilter("ignore", UserWarning)
                Image.init()
                image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
                check_header(image, name)
                orientation(image)  # Pillow remembers it for exif_transpose
            yield image, size
        except Exception as error:
            if isinstance(error, (Refused, ImportError)):
                raise
            raise unread_picture(name, file, error) from None


def unread_picture(name: str, file: IO[bytes], error: Exception) -> Refused:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        file.seek(0)
        return bad_picture(name, "is not a picture", f"{file.read(12)!r} at its start")
    if isinstance(error, Image.DecompressionBombError):
        return bad_picture(name, "has too many pixels", str(error))
    return bad_picture(name, "is broken", f"{type(error).__name__}: {error}")


def check_header(image: Any, name: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise bad_picture(name, "has no pixels", f"{width} x {height}")
    if width * height > PICTURE_PIXELS:
        raise bad_picture(name, "has too many pixels", f"{width} x {height}", f"at most {PICTURE_PIXELS:,} pixels")
    if max(width, height) > PICTURE_RATIO * min(width, height):
        expected = f"a longer side of at most {PICTURE_RATIO} times the shorter one"
        raise bad_picture(name, "is too narrow", f"{width} x {height}", expected)
    if image.mode in ("I", "F"):
        raise bad_picture(name, f"has the colour mode {image.mode}", "numbers without a range", "8 or 16 bits a colour")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # MPO is a JPEG of a telephone, with a second view behind it
        raise bad_picture(name, "is animated or has several pages", f"{frames} frames", "one still picture a file")


def in_rgb(image: Any) -> Any:
    """RGB from any mode of Pillow: 16-bit grey is scaled, and transparent pixels get white behind them."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture)
        return white.convert("RGB")
    return image.convert("RGB")


def picture_name(source: PictureSource) -> str:
    if isinstance(source, dict):
        return str(source.get("path") or "a picture in the row")[:200]
    return "a picture in the row" if isinstance(source, bytes) or source[:5].lower() == "data:" else source[:200]


def picture_bytes(source: PictureSource, folder: Path | None) -> bytes:
    """The content of the file, which must not be too large."""
    with picture_file(source, folder) as file:
        return file.read()


def picture_file(source: PictureSource, folder: Path | None) -> IO[bytes]:
    """The picture's file, opened and not read yet, or the bytes in the row as such a file."""
    if isinstance(source, dict):
        content = source.get("bytes")
        if content is None and isinstance(source.get("path"), str):
            return picture_file(source["path"], folder)
        if not isinstance(content, bytes):
            got = repr({key: type(value).__name__ for key, value in source.items()})
            raise bad_picture("a picture in the row", "has neither bytes nor a path", got, "a path, or bytes")
        source = content
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = data_uri(source)
    if isinstance(source, str):
        return opened_file(source, folder)
    require_size(len(source), "a picture in the row")
    return io.BytesIO(source)


def require_size(size: int, name: str) -> None:
    if not size:
        raise bad_picture(name, "is empty", "0 bytes")
    if size > PICTURE_BYTES:
        raise bad_picture(name, "is too large", f"{size:,} bytes", f"at most {PICTURE_BYTES:,} bytes")


def data_uri(source: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad_picture("a data URI", "is not base64", head[:60], "data:image/png;base64,…")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_picture("a data URI", "is not base64", str(error), "data:image/png;base64,…") from None


def opened_file(path: str, folder: Path | None) -> IO[bytes]:
    """A file in the folder of the dataset. A dataset from elsewhere must not name the user's own files."""
    name = path[:200]
    try:
        file, where = placed_file(path, folder)
        if not file.is_file():
            raise bad_picture(name, "does not exist", str(file), where)
        require_size(file.stat().st_size, name)
        return open(file, "rb")
    except (OSError, ValueError, RuntimeError) as error:  # no permission; a null character; a link to itself
        raise bad_picture(name, "cannot be read", str(error)) from None


def placed_file(path: str, folder: Path | None) -> tuple[Path, str]:
    """The file that a row names, which need not exist, and in words where it must lie. Refuses an address, and a file
    outside the folder of the data."""
    name = path[:200]
    if "://" in path:
        expected = "a file beside the data, or the bytes of the picture in the row"
        raise bad_picture(name, "is an address", path, expected, ADDRESS_HINT)
    if folder is None or (folder.name.startswith(HUB_FOLDER) and not os.path.isabs(path)):
        expected = "bytes in the rows, a metadata.jsonl whose column file_name names files, or files beside one file"
        raise bad_picture(name, "has no folder", "a path in data from the Hub", f"{expected} of rows", HUB_HINT)
    if not path.strip():
        raise bad_picture("the name of a picture", "is empty", repr(path[:60]))
    cache = hub_cache_of(folder)
    root = folder.resolve() if cache is None else Path(os.path.abspath(folder))
    where = f"a file in {root}" if cache is None else "a file beside the rows in the dataset on the Hub, or below them"
    # The files in the cache of huggingface_hub are links to others, so a path there is judged as it is written.
    file = (root / path).resolve() if cache is None else Path(os.path.normpath(root / path))
    if not file.is_relative_to(root) or not (cache is None or file.resolve().is_relative_to(cache.resolve())):
        raise bad_picture(name, "lies outside the folder of the data", str(file) if cache is None else path, where)
    return file, where


def bad_picture(
    name: str, fault: str, got: str, expected: str = "a still picture, such as PNG or JPEG", hint: str = PICTURE_HINT
) -> Refused:
    return Refused(f"{name} {fault}", code="bad_picture", expected=expected, got=got[:200], hint=hint)
