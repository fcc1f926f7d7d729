"""Searches everything that leaves this machine for secrets. Every byte of a file is read, whatever its kind or size."""

import re
from collections.abc import Iterator
from pathlib import Path

from skill_train.core.secrets import BEGINNINGS, LEAST, token_pattern

_BLOCK = 1 << 20
_OVERLAP = 4096  # bytes that two blocks share: more than a token with every letter escaped
_TOKEN = re.compile(token_pattern().pattern.encode(), re.ASCII)
_TOKEN_BEGINNINGS = tuple(beginning.encode() for beginning in BEGINNINGS)
_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----[\s\\nr]*[A-Za-z0-9+/=:-]{16}")
# An escaped ASCII letter in JSON, Python, a URL or HTML, with one backslash for each time that it was quoted.
_ESCAPED = re.compile(
    rb"\\+(?:u00|x)([2-7][0-9A-Fa-f])|%(?:25)*([2-7][0-9A-Fa-f])|&#[xX]0*([2-7][0-9A-Fa-f]);|&#0*([0-9]{2,3});"
)
_ESCAPES = (b"\\u00", b"\\x", b"%", b"&#")
_WIDE = (b"f\0_", b"f\0\0\0_", b"i\0_", b"i\0\0\0_")  # the beginnings of tokens in UTF-16 and UTF-32


def secret_in(source: Path | bytes, own: str | None = None) -> str | None:
    """The kind of secret that a file or a block of bytes seems to contain: `a token of the Hub`, `a private key`; None
    for none.

    Escaped letters and letters in UTF-16 and UTF-32 are read as plain letters. Compressed or encrypted content cannot
    be read.

    Args:
        own: the token in use. It is found anywhere, even inside a word.
    """
    token = (own or "").encode("utf-8", "replace")
    for block in _blocks(source):
        for text in _readings(block):
            if len(token) >= LEAST and token in text:
                return "a token of the Hub"
            if any(beginning in text for beginning in _TOKEN_BEGINNINGS) and _TOKEN.search(text):
                return "a token of the Hub"
            if b"PRIVATE KEY-----" in text and _KEY.search(text):
                return "a private key"
    return None


def _blocks(source: Path | bytes) -> Iterator[bytes]:
    """Blocks of the file. Each begins with the end of the previous block, so that no secret is cut in two."""
    if isinstance(source, bytes):
        yield source
        return
    end = b""
    with open(source, "rb") as file:
        while read := file.read(_BLOCK):
            block = end + read
            yield block
            end = block[-_OVERLAP:]


def _readings(block: bytes) -> Iterator[bytes]:
    """The block as it is, and with its escapes decoded. In binary blocks only JSON escapes are decoded, as they occur
    in the header of a weight file."""
    yield block
    escapes = _ESCAPES if b"\0" not in block else _ESCAPES[:1]
    if any(escape in block for escape in escapes):
        undone = _ESCAPED.sub(_letter, block)
        if undone != block:
            yield undone
    if any(wide in block for wide in _WIDE):
        yield block.replace(b"\0", b"")


def _letter(match: re.Match[bytes]) -> bytes:
    code = int(match[4]) if match[4] else int(match[1] or match[2] or match[3], 16)
    return bytes([code]) if code < 128 else match[0]
