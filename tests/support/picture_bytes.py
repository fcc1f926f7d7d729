"""Pictures as the bytes of their files."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def numbered(number: int, **options: Any) -> bytes:
    """A small PNG file in a colour of its own."""
    return encoded(Image.new("RGB", (40, 30), (number, 0, 255 - number)), **options)


def header(width: int, height: int) -> bytes:
    """That of a PNG file, with hardly a pixel behind it."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(b"0"), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
