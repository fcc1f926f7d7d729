"""`bench`, `chat` and `serve` on GGUF files that are broken or meant to harm: one clear error each, and nothing served.

The kinds that our reader refuses are in the first test, those that only llama.cpp finds or dies of in the others.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_bytes
from command_child import Commands, Done
from gguf_bytes import FLOAT32, Gguf, number, numbers, string, strings

pytestmark = pytest.mark.slow
pytest.importorskip("llama_cpp")

ASKED = {
    "bench": ("--rounds", 1, "--prompt-tokens", 8, "--answer-tokens", 2),
    "chat": ("--prompt", "Hi", "--max-tokens", 2),
    "serve": ("--port", 0),
}
Change = Callable[[Gguf], object]


def _ask(commands: Commands, command: str, file: Path) -> Done:
    return commands.run(file.parent, dict(os.environ), command, file.name, *ASKED[command])


def _refused(commands: Commands, command: str, file: Path, code: int, kind: str) -> str:
    done = _ask(commands, command, file)
    assert done.error == (code, kind), (command, done.stdout)
    message = str(done.answer["error"]["message"])
    assert len(message) < 500 and "worker" not in message
    return message


def _row(**changes: object) -> Change:
    def change(file: Gguf) -> None:
        row = file.row("blk.0.attn_q.weight")
        for name, value in changes.items():
            setattr(row, name, value)

    return change


def _file(**changes: object) -> Change:
    def change(file: Gguf) -> None:
        for name, value in changes.items():
            setattr(file, name, value)

    return change


def _set(key: str, value: bytes | None) -> Change:
    return lambda file: file.set(key, value)


def _all(*changes: Change) -> Change:
    return lambda file: [change(file) for change in changes]


def _array(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", gguf_bytes.ARRAY, kind, count)


HEADERS: dict[str, tuple[Change, str]] = {
    "another magic number": (_file(magic=b"ggla"), "does not begin with GGUF"),
    "version 1": (_file(version=1), "its version is 1"),
    "version 4": (_file(version=4), "its version is 4"),
    "big endian": (_file(order=">"), "its version is 50331648"),
    "2^63 tensors": (_file(tensor_count=1 << 63), "ends inside a tensor's name"),
    "2^64 - 1 values": (_file(value_count=(1 << 64) - 1), "ends inside a metadata key"),
    "a string of 2^62 bytes": (_set("general.name", struct.pack("<IQ", 8, 1 << 62)), "ends inside general.name"),
    "an array of 2^62 numbers": (_set("a.b", _array(4, 1 << 62)), "ends inside a.b"),
    "an array of 2^60 strings": (_set("a.b", _array(8, 1 << 60)), "more than the file can hold"),
    "an array of arrays": (_set("a.b", _array(9, 1) + _array(4, 0)), "array of the unknown type 9"),
    "a value of no type": (_set("a.b", struct.pack("<II", 77, 1)), "has the unknown type 77"),
    "a key twice": (_file(again=[b"general.name"]), "is there twice"),
    "no dimension": (_row(dims=[]), "has 0 dimensions"),
    "five dimensions": (_row(dims=[32, 32, 1, 1, 1]), "has 5 dimensions"),
    "a product that overflows": (_row(dims=[1 << 33, 1 << 33]), "is cut off"),
    "a dimension of 0": (_row(dims=[0, 32]), "impossible shape"),
    "a type of no name": (_row(kind=99), "unknown type 99"),
    "an offset behind the end": (_row(offset=1 << 40), "is cut off"),
    "an offset that wraps": (_row(offset=(1 << 64) - 32), "is cut off"),
    "an offset over another": (_row(offset=0), "lies over the one before it"),
    "an offset between": (_row(offset=100), "not aligned to 32 bytes"),
    "alignment 0": (_set("general.alignment", number(0)), "its alignment is 0"),
    "alignment 3": (_set("general.alignment", number(3)), "its alignment is 3"),
    "alignment 2^31": (_set("general.alignment", number(1 << 31)), "is cut off"),
    "a tensor twice": (lambda file: file.rows.append(file.rows[-1]), "two tensors have the same name"),
}


def test_headers(commands: Commands, tmp_path: Path) -> None:
    for name, (change, words) in HEADERS.items():
        file = gguf_bytes.whole()
        change(file)
        path = file.write(tmp_path / "broken.gguf")
        for command in ASKED:
            assert words in _refused(commands, command, path, 6, "bad_gguf"), name


def test_cut_in_each_part(commands: Commands, tmp_path: Path) -> None:
    whole, header = gguf_bytes.whole().bytes(), len(gguf_bytes.whole().described())
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 20, 400, header - 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for command in ASKED:
            _refused(commands, command, path, 6, "bad_gguf")


def test_what_is_no_file_of_bytes(commands: Commands, tmp_path: Path) -> None:
    """A pipe, a loop of links, a device without end, a folder: nothing waits for them."""
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe", "loop", "zero", "folder"):
        for command in ASKED:
            done = _ask(commands, command, tmp_path / f"{name}.gguf")
            assert done.code in (2, 6) and done.answer["error"]["hint"], (command, name, done.stdout)


def _no_model(kind: str) -> Change:
    def change(file: Gguf) -> None:
        file.values = {b"general.type": string(kind), b"general.architecture": string("llama")}
        file.rows = [gguf_bytes.Row(b"blk.0.attn_q.weight.lora_a", [32, 4], bytes(512))]

    return change


@pytest.mark.parametrize(
    ("kind", "words"),
    [("adapter", "an adapter"), ("imatrix", "an importance matrix"), ("mmproj", "a projector")],
)
def test_files_that_hold_no_model(commands: Commands, tmp_path: Path, kind: str, words: str) -> None:
    """`chat` said that an adapter has no chat template, and to add --raw."""
    file = gguf_bytes.whole()
    _no_model(kind)(file)
    for command in ASKED:
        message = _refused(commands, command, file.write(tmp_path / "x.gguf"), 6, "bad_gguf")
        assert message == f"x.gguf holds {words} and no model"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "is missing"),
        (string(" "), "is empty"),
        (number(7), "is no text but 7"),
        (strings([b"a"]), "is no text but"),
    ],
)
def test_templates_that_are_no_text(commands: Commands, tmp_path: Path, template: bytes | None, words: str) -> None:
    file = gguf_bytes.whole().set("tokenizer.chat_template", template)
    for command in ("chat", "serve"):
        done = _ask(commands, command, file.write(tmp_path / "x.gguf"))
        assert done.error == (2, "no_chat_template"), (command, done.stdout)
        assert words in done.answer["error"]["got"]


TOKENS = "tokenizer.ggml.tokens"
LOADED: dict[str, tuple[str, Change, str]] = {
    "other types than tokens": ("chat", _set("tokenizer.ggml.token_type", numbers([1] * 10, 5)), "toktypes"),
    "fewer tokens than rows": ("chat", _set(TOKENS, strings(gguf_bytes._letters()[:100])), "wrong shape"),
    "an unknown architecture": ("bench", _set("general.architecture", string("weird\x1b[31m")), "unknown model arch"),
    "no tokenizer": ("bench", _set("tokenizer.ggml.model", None), "tokenizer.ggml.model"),
    "no heads": ("serve", _set("llama.attention.head_count", number(0)), "cannot load"),
    "a context that is true": ("chat", _set("llama.context_length", struct.pack("<IB", 7, 1)), "wrong type bool"),
    "one part of two": ("bench", _set("split.count", number(2, 2)), "split"),
}


@pytest.mark.parametrize("kind", LOADED)
def test_what_llama_cpp_refuses(commands: Commands, tmp_path: Path, kind: str) -> None:
    command, change, words = LOADED[kind]
    file = gguf_bytes.whole()
    change(file)
    if kind == "one part of two":
        file.set("split.no", number(0, 2)).set("split.tensors.count", number(99, 5))
    assert words in _refused(commands, command, file.write(tmp_path / "x.gguf"), 6, "bad_gguf")


CRASHES: dict[str, tuple[str, Change, str]] = {
    "4,096 layers": ("bench", _set("llama.block_count", number(4096)), "it expects hparams.n_layer_all > 0"),
    "experts that no token uses": ("chat", _set("llama.expert_count", number(8)), "it expects n_expert_used_max > 0"),
    "an epsilon below 0": (
        "bench", _set("llama.attention.layer_norm_rms_epsilon", number(-1, FLOAT32)), "it expects eps >= 0",
    ),
    "alignment 8": ("serve", _set("general.alignment", number(8)), ""),
    "weights of whole numbers": ("bench", _row(kind=26), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", CRASHES)
def test_what_llama_cpp_dies_of(commands: Commands, tmp_path: Path, kind: str) -> None:
    """The error names the file and what llama.cpp expects. Where gdb was, it was started first: for 15 s, and once for
    ever."""
    command, change, words = CRASHES[kind]
    file = gguf_bytes.whole()
    change(file)
    path, started = file.write(tmp_path / "x.gguf"), time.monotonic()
    message = _refused(commands, command, path, 1, "native_crash")
    assert message.startswith("llama.cpp crashed with SIG") and " on x.gguf" in message and words in message
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("command", ASKED)
def test_weights_that_are_no_numbers(commands: Commands, tmp_path: Path, command: str) -> None:
    """`chat` and `serve` answered with the first token of the vocabulary, and `bench` stated a speed."""
    file = gguf_bytes.whole()
    row = file.row("output.weight")
    row.data = struct.pack("<f", float("nan")) + row.data[4:]
    message = _refused(commands, command, file.write(tmp_path / "x.gguf"), 6, "not_finite")
    assert "computes nan in place of a score" in message


TEMPLATES: dict[str, tuple[str, str | None, str]] = {
    "none": ("serve", None, "no_chat_template"),
    "no end of a block": ("serve", "{% for m in messages %}{{ m", "template_mismatch"),
    "a text of 3 GB": ("serve", "{{ 'x' * 2999999999 }}", "unsafe_file"),
    "loops without end": (
        "chat",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "unsafe_file",
    ),
    "a class": ("chat", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "template_mismatch"),
    "a macro that calls itself": ("chat", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "template_mismatch"),
    "500 blocks in each other": ("chat", "{% if 1 %}" * 500 + "{% endif %}" * 500, "template_mismatch"),
    "its own refusal": ("chat", "{{ raise_exception('no \x1b[31m talk') }}", "template_mismatch"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates(commands: Commands, tmp_path: Path, kind: str) -> None:
    """`serve` began to serve a template that writes no prompt, and one that calls itself ended `chat` as a bug."""
    command, template, code = TEMPLATES[kind]
    file = gguf_bytes.whole().set("tokenizer.chat_template", None if template is None else string(template))
    _refused(commands, command, file.write(tmp_path / "x.gguf"), 2, code)


def test_the_whole_file_answers(commands: Commands, tmp_path: Path) -> None:
    """Else every test above would pass for another reason."""
    path = gguf_bytes.whole().write(tmp_path / "x.gguf")
    for command in ("bench", "chat"):
        assert _ask(commands, command, path).code == 0
