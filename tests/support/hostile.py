"""Hostile values and what a command may do with them: one judge for the short form, the campaigns and the regressions.

`edited` changes a document as a string of bytes says, so that hypothesis and a coverage-guided mutator can drive the
same changes and a failure can be replayed from its bytes. `judged` runs a call under a limit of time, with every file
that is opened outside the sandbox written down.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from command_child import Done
from one_command import called
from skill_train.core.errors import SkillTrainError

REPOSITORY = str(Path(__file__).resolve().parents[2])
SECONDS = 10.0  # of processor time for one input; the slowest honest one, a page with charts, takes one
CODES = {0, 2, 3, 4, 5, 6, 7, 8}
_ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CANARY = Path(tempfile.gettempdir()) / f"skill-train-canary-{os.getpid()}" / "secret.json"

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "-1", "nan", "1e999999", "2026-13-45T99:00:00Z",
    "../../../../etc/passwd", "/etc/passwd", str(CANARY), "..", ".", "a/../../b", "C:\\x", "a\\..\\b", "file:///etc",
    "\x1b[31mred\x1b]0;title\x07", "\u202egnp.exe", "\x00", "a\nb", "a\r\nb\t", "\ud800", "\ufeff", "🜚" * 50,
    "[/b][bold]x[/", "[link=file:///etc/passwd]x", "{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}",
    "${HOME}", "$(touch canary)", "`touch canary`", "'; touch canary; '", '"', "'", "--yes", "-rf", "a b",
    "<script>x()", "</script>", "=1+1", "null", "pass", "fail", "done", "LORA", "q8_0", "A" * 70_000,
    "(a+)+$", "%s%n{0}", "~",
)  # fmt: skip
CONTAINERS: tuple[Any, ...] = (
    [], {}, [[]], [{}], [None], {"": None}, {"x": {}}, [1, "x", None], {"../x": {"bytes": 1, "sha256": "0" * 64}},
    ["x"] * 3000, {str(i): i for i in range(300)}, [[[[[[[[[[]]]]]]]]]], {"data_offsets": [0, 2**60]}, {"\x1b[2J": 1},
)  # fmt: skip
VALUES = SCALARS + CONTAINERS
# Whole files that no document is.
RAW: tuple[bytes, ...] = (
    b"", b"\0", b"null", b"[]", b"0", b'"x"', b"{", b"{}", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"[" * 100_000,
    b'{"a":' * 50_000, b"9" * 6000, b'{"a": ' + b"9" * 6000 + b"}", b"NaN", b"\x80\x81", b"{}{}", b'{"a": 1e999999}',
    b'["' + b"\\u" + b'"]', b"\n" * 1000,
)  # fmt: skip


class Hang(BaseException):
    """Longer than the limit. No `except Exception` of the code under test can swallow it."""


def edited(document: Any, program: bytes) -> Any:
    """The document after the changes that `program` says: four bytes each, where (two), what, and with which value."""
    root = [copy.deepcopy(document)]
    for at in range(0, len(program) - 3, 4):
        places = list(_places(root))
        holder, key = places[int.from_bytes(program[at : at + 2]) % len(places)]
        _change(holder, key, program[at + 2], VALUES[program[at + 3] % len(VALUES)], whole=holder is root)
    return root[0]


def text(document: Any) -> bytes:
    return json.dumps(document).encode()


def file_bytes(document: Any, program: bytes) -> bytes:
    """A JSON file: edited, or now and then no document at all."""
    if program[:1] == b"\xff" and len(program) > 1:
        return RAW[program[1] % len(RAW)]
    return text(edited(document, program))


def cut(content: bytes, program: bytes) -> bytes:
    """Bytes changed, put in, taken out, or the end cut off."""
    changed = bytearray(content)
    for at in range(0, len(program) - 3, 4):
        where, what, byte = (
            int.from_bytes(program[at : at + 2]) % (len(changed) + 1),
            program[at + 2] % 4,
            program[at + 3],
        )
        if what == 0:
            changed[where : where + 1] = bytes([byte])
        elif what == 1:
            changed[where:where] = (
                b"\xff\xfe",
                b"\x00",
                b'"',
                b"\n",
                b"\r",
                b"\x1b[2J",
                b"\xed\xa0\x80",
                b"}" * 9,
                b"\x80",
                b"," * 40,
                b"9" * 5000,
            )[byte % 11]
        elif what == 2:
            del changed[where : where + byte]
        else:
            del changed[where:]
    return bytes(changed)


@contextlib.contextmanager
def limits(seconds: float = SECONDS) -> Iterator[None]:
    """Raises `Hang` when that much processor time is gone: a busy machine, or another timer, changes nothing."""

    def end(number: int, frame: Any) -> None:
        raise Hang(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def confined(*folders: Path) -> Iterator[None]:
    """Fails when a file is opened elsewhere than in these folders; Python's own may be read."""
    CANARY.parent.mkdir(exist_ok=True)
    CANARY.write_text("{}")
    _Watch.start()
    own = (os.environ[name] for name in ("SKILL_TRAIN_CACHE", "HF_HOME", "MPLCONFIGDIR") if name in os.environ)
    _Watch.allowed = [os.path.realpath(folder) for folder in (*folders, *own)]
    try:
        yield
    finally:
        found, _Watch.allowed, _Watch.seen = _Watch.seen, None, []
    assert not found, f"opened outside of the run: {sorted(set(found))}"


def judged(call: Callable[[], Any], *folders: Path) -> str:
    """`done`, or the code of the SkillTrainError. Anything else comes through as it is: that is the failure."""
    with confined(*folders), limits():
        try:
            call()
        except SkillTrainError as error:
            assert error.exit_code in CODES, error
            json.dumps(error.as_dict())
            return error.code
    return "done"


def command(arguments: list[str], *folders: Path) -> int:
    """Runs one command in this process and checks what it says: one document, no traceback, nothing for a terminal."""
    with confined(*folders), limits():
        done = called(*arguments)
    check_output(done, arguments)
    return done.code


def check_output(done: Done, arguments: Sequence[object]) -> None:
    said, told = done.stdout, done.stderr
    assert done.code in CODES, f"exit {done.code}: {arguments}\n{said[-2000:]}{told[-3000:]}"
    assert "Traceback" not in told, told[-3000:]
    assert not (escape := _ESCAPES.search(said + told)), f"{escape!r} for the terminal"
    (said + told).encode()
    if "json" in arguments:
        assert isinstance(done.answer, dict)


class _Watch:
    """An audit hook stays for the life of a process, so there is one, and it is mostly asleep."""

    allowed: list[str] | None = None
    seen: ClassVar[list[str]] = []
    _on = False
    _python = tuple(
        os.path.realpath(path)
        for path in {REPOSITORY, sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *filter(None, sys.path)}
    )
    _system = (
        "/dev/",
        "/proc/",
        "/sys/",
        "/usr/share/",
        "/etc/mime.types",
        "/etc/localtime",
        "/etc/nv_tegra_release",
        "/etc/ssl/",
    )

    @classmethod
    def start(cls) -> None:
        if not cls._on:
            cls._on = True
            sys.addaudithook(cls._note)

    @classmethod
    def _note(cls, event: str, details: tuple[Any, ...]) -> None:
        if cls.allowed is None or event != "open" or not isinstance(details[0], (str, bytes)):
            return
        if details[1] is None and not os.path.isabs(os.fsdecode(details[0])):
            return  # os.open below an open folder, as shutil.rmtree does; its own name was seen before
        allowed, cls.allowed = cls.allowed, None  # realpath opens nothing, but stay on the safe side
        path, writes = os.path.realpath(os.fsdecode(details[0])), bool(int(details[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        fine = path.startswith(("/dev/",)) if writes else path.startswith((*cls._python, *cls._system))
        if not fine and not any(path == root or path.startswith(root + os.sep) for root in allowed):
            cls.seen.append(("wrote " if writes else "read ") + path)
        cls.allowed = allowed


def _places(root: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Every `(container, key)` below `root`, the document itself first."""
    todo: list[Any] = [root]
    while todo:
        holder = todo.pop()
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            yield holder, key
            if isinstance(value, (dict, list)):
                todo.append(value)


def _change(holder: Any, key: Any, what: int, value: Any, *, whole: bool) -> None:
    kind = what % 6
    if whole or kind in (4, 5):
        holder[key] = copy.deepcopy(value)
    elif kind == 0:
        del holder[key]
    elif isinstance(holder, list):
        holder.extend(copy.deepcopy(holder[key]) for _ in range(what // 60))
    elif kind == 1:
        holder[str(value)[:200]] = copy.deepcopy(holder[key])
    else:
        holder[str(value)[:200]] = holder.pop(key)
