"""What a file may be in place of the one that was meant: no file at all, no text, no end, or another document.

    for form in FORMS: form.put(path, whole, dice)

makes a path hostile; `whole` are the bytes that should be there. Each input is made again from its seed alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hostile

Put = Callable[[Path, bytes, random.Random], None]
NOBODY = 65_534
SPARSE_BYTES = 10**12
_MARK, _MOST_DIGITS, _DEEP = "@@mark@@", 5000, 100_000
_SAMPLE_MOMENTS = 60  # calls after a file was opened, in which it is changed


@dataclass(frozen=True)
class Form:
    """One kind of hostile file.

    Attributes:
        put: makes it at the path.
        times: inputs of it; more than one where the dice decide.
        of: the content that it needs (`Kind`); empty for every file.
        moment: what is done to the file while it is read; nothing for most.
    """

    name: str
    put: Put
    times: int = 1
    of: tuple[str, ...] = ()
    moment: Moment | None = None


@dataclass(frozen=True)
class Moment:
    """A change of a file in the midst of its reading: just before it is opened, or so many calls later."""

    change: Callable[[Path], None]
    calls: int = 0


# --- What is no file ---


def _fifo(path: Path, whole: bytes, dice: random.Random) -> None:
    os.mkfifo(path)


def _socket(path: Path, whole: bytes, dice: random.Random) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link(target: str) -> Put:
    return lambda path, whole, dice: path.symlink_to(target)


def _folder(path: Path, whole: bytes, dice: random.Random) -> None:
    path.mkdir()
    (path / "x").write_bytes(whole)


def _loop(path: Path, whole: bytes, dice: random.Random) -> None:
    other = path.with_name(f"{path.name}.other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _outside(path: Path, whole: bytes, dice: random.Random) -> None:
    """A link to a whole file, out of the folder."""
    away = path.parents[1] / "elsewhere"
    away.mkdir(exist_ok=True)
    (away / path.name).write_bytes(whole)
    path.symlink_to(away / path.name)


def _closed(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(whole)
    path.chmod(0)


def _closed_folder(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(whole)
    path.parent.chmod(0)


# --- What is no text ---


def _bytes(made: Callable[[bytes], bytes]) -> Put:
    return lambda path, whole, dice: _write(path, made(whole))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _encoded(name: str) -> Put:
    return _bytes(lambda whole: whole.decode("utf-8", "replace").encode(name, "replace"))


def _with_nul(path: Path, whole: bytes, dice: random.Random) -> None:
    at = dice.randrange(len(whole) + 1)
    path.write_bytes(whole[:at] + b"\0" * dice.choice((1, 9)) + whole[at:])


def _truncated(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(whole[: dice.randrange(max(1, len(whole)))])


def _random(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(dice.randbytes(dice.choice((1, 7, 8, 100, 5000))))


def _changed_bytes(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(hostile.cut(whole, dice.randbytes(4 * dice.choice((1, 1, 2, 5)))))


def _changed_head(path: Path, whole: bytes, dice: random.Random) -> None:
    """Only near its beginning, where the headers of binary files are."""
    content = bytearray(whole)
    for _ in range(dice.choice((1, 2, 5))):
        at = dice.randrange(min(len(content), 400))
        wide = dice.choice((b"\xff", b"\0", b"\xff" * 8, struct.pack("<Q", 2**40), dice.randbytes(1)))
        content[at : at + len(wide)] = wide
    path.write_bytes(content)


def _sparse(path: Path, whole: bytes, dice: random.Random) -> None:
    """The file, and then a terabyte of nothing that takes no room."""
    with open(path, "wb") as file:
        file.write(whole)
        file.truncate(SPARSE_BYTES)


def _only_sparse(path: Path, whole: bytes, dice: random.Random) -> None:
    with open(path, "wb") as file:
        file.truncate(SPARSE_BYTES)


# --- What is no document of its kind ---


def documents(kind: str, whole: bytes) -> list[Any]:
    """Those in a file: one, or one a line."""
    if kind == "safetensors":
        return [json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])]
    return [json.loads(line) for line in whole.splitlines()] if kind == "jsonl" else [json.loads(whole)]


def as_file(kind: str, texts: list[str], whole: bytes) -> bytes:
    content = "\n".join(texts).encode("utf-8", "surrogatepass")
    if kind == "safetensors":
        return struct.pack("<Q", len(content)) + content + whole[8 + struct.unpack("<Q", whole[:8])[0] :]
    return content


def _mutated(kind: str) -> Put:
    """One value of one document is another: null, a list, a huge number, a name that leads out, and so on."""

    def put(path: Path, whole: bytes, dice: random.Random) -> None:
        found = documents(kind, whole)
        at = dice.randrange(len(found))
        found[at] = hostile.edited(found[at], dice.randbytes(4 * dice.choice((1, 1, 1, 2, 4))))
        path.write_bytes(as_file(kind, [json.dumps(one) for one in found], whole))

    return put


def _placed(kind: str, text: str) -> Put:
    """A value that Python writes in no other way, in place of any in a document."""

    def put(path: Path, whole: bytes, dice: random.Random) -> None:
        found: list[Any] = documents(kind, whole)
        at = dice.randrange(len(found))
        root = [found[at]]
        holder, key = dice.choice(list(hostile._places(root)))
        holder[key] = _MARK
        texts = [json.dumps(root[0] if number == at else one) for number, one in enumerate(found)]
        path.write_bytes(as_file(kind, [one.replace(f'"{_MARK}"', text) for one in texts], whole))

    return put


def _twice(kind: str) -> Put:
    """Each key of a document stands twice, with another value the second time."""

    def put(path: Path, whole: bytes, dice: random.Random) -> None:
        found = documents(kind, whole)
        at = dice.randrange(len(found))
        texts = [json.dumps(one) for one in found]
        if isinstance(found[at], dict):
            again = {key: dice.choice(hostile.VALUES) for key in found[at]}
            texts[at] = texts[at][:-1] + ", " + json.dumps(again)[1:]
        path.write_bytes(as_file(kind, texts, whole))

    return put


_VALUES = {
    "digits": "9" * _MOST_DIGITS,
    "minus digits": "-" + "9" * _MOST_DIGITS,
    "1e999": "1e999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "deep lists": "[" * _DEEP + "]" * _DEEP,
    "deep objects": '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "half a pair": r'"\ud800"',
    "control characters": r'"\u001b[2J\u001b]0;x\u0007\u0000\u202e\u009b31m\u0085"',
    "1 MB": '"' + "x" * 1_000_000 + '"',
    "a name of 5000": '"' + "a/" * 2500 + '"',
}
_WHOLE = {
    "only deep lists": b"[" * _DEEP,
    "only deep objects": b'{"a":' * _DEEP,
    "only digits": b"9" * _MOST_DIGITS,
    "only NaN": b"NaN",
    "only null": b"null",
    "only a list": b"[]",
    "only an object": b"{}",
    "only a text": b'"x"',
    "only line ends": b"\n" * 10_000,
    "only quotes": b'"' * 10_001,
    "only escapes": b"\x1b[2J\x1b]0;x\x07" * 100,
}
KEYED = ("json", "jsonl", "safetensors")
TEXT = ("json", "jsonl", "yaml", "csv", "text")
BINARY = ("gguf", "parquet", "safetensors", "binary")


def _keyed() -> list[Form]:
    made = []
    for kind in KEYED:
        of = ("yaml", kind) if kind == "json" else (kind,)  # every JSON document is a YAML one
        made += [Form("a value of another kind", _mutated(kind), 30, of), Form("keys twice", _twice(kind), 3, of)]
        made += [Form(name, _placed(kind, text), 2, of) for name, text in _VALUES.items()]
    return made


# --- What changes while it is read ---


def _gone(path: Path) -> None:
    path.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\xff" * 100_000)


def _another(path: Path) -> None:
    path.write_bytes(b'{"a": [1, {"b": "\\u001b"}]}')


def _now_a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _whole(path: Path, whole: bytes, dice: random.Random) -> None:
    path.write_bytes(whole)


def _moments() -> list[Form]:
    changes = (_gone, _empty, _half, _grown, _another, _now_a_folder)
    made = [Form(f"{change.__name__} when opened", _whole, moment=Moment(change)) for change in changes]
    return made + [
        Form(f"{change.__name__} later", _whole, 3, moment=Moment(change, _SAMPLE_MOMENTS)) for change in changes[1:5]
    ]


FORMS: tuple[Form, ...] = (
    Form("a pipe", _fifo),
    Form("a socket", _socket),
    Form("a link to /dev/zero", _link("/dev/zero")),
    Form("a link to /dev/tty", _link("/dev/tty")),
    Form("a link to nothing", _link("nothing")),
    Form("a link to its folder", _link(".")),
    Form("links in a ring", _loop),
    Form("a link out of the folder", _outside),
    Form("a folder", _folder),
    Form("not for us", _closed),
    Form("a folder that is not for us", _closed_folder),
    Form("empty", _bytes(lambda whole: b"")),
    Form("nulls", _bytes(lambda whole: b"\0" * 1000)),
    Form("a null in it", _with_nul, 3),
    Form("latin-1", _bytes(lambda whole: b"\xe4\xf6\xfc" + whole + b"\xe4"), of=TEXT),
    Form("UTF-16", _encoded("utf-16"), of=TEXT),
    Form("UTF-32", _encoded("utf-32"), of=TEXT),
    Form("a mark of UTF-8", _encoded("utf-8-sig"), of=TEXT),
    Form("cut off", _truncated, 8),
    Form("chance", _random, 5),
    Form("bytes changed", _changed_bytes, 12),
    Form("a head changed", _changed_head, 16, of=BINARY),
    Form("a terabyte behind it", _sparse),
    Form("a terabyte", _only_sparse),
    *(Form(name, _bytes(lambda whole, content=content: content), of=TEXT) for name, content in _WHOLE.items()),
    *_keyed(),
    *_moments(),
)


def forms_of(kind: str) -> list[Form]:
    return [form for form in FORMS if not form.of or kind in form.of]


class Watched:
    """Changes a file while it is read. An audit hook stays for the life of a process, so there is one."""

    _on = False
    _busy = False
    _path: ClassVar[str] = ""
    _moment: ClassVar[Moment | None] = None
    _calls: ClassVar[int] = 0

    @classmethod
    @contextlib.contextmanager
    def reading(cls, path: Path, moment: Moment | None, dice: random.Random) -> Iterator[None]:
        if moment is None:
            yield
            return
        if not cls._on:
            cls._on = True
            sys.addaudithook(cls._note)
        cls._path, cls._moment = str(path), moment
        cls._calls = dice.randrange(1, moment.calls) if moment.calls else 0
        try:
            yield
        finally:
            cls._moment = None
            sys.setprofile(None)

    @classmethod
    def _note(cls, event: str, details: tuple[Any, ...]) -> None:
        if cls._moment is None or cls._busy or event != "open" or str(details[0]) != cls._path:
            return
        if cls._calls:
            sys.setprofile(cls._count)
        else:
            cls._strike()

    @classmethod
    def _count(cls, frame: Any, event: str, argument: Any) -> None:
        cls._calls -= 1
        if cls._calls <= 0:
            sys.setprofile(None)
            cls._strike()

    @classmethod
    def _strike(cls) -> None:
        moment, cls._moment, cls._busy = cls._moment, None, True
        try:
            if moment is not None:
                with contextlib.suppress(OSError):
                    moment.change(Path(cls._path))
        finally:
            cls._busy = False


@contextlib.contextmanager
def as_nobody(wanted: bool) -> Iterator[None]:
    """Without the rights of root, who may read everything."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def plain(name: str) -> str:
    return re.sub(r"\W+", "-", name)
