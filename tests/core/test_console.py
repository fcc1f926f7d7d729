"""One result and one error in the four modes, the 8 KB bound, and names that try to steer the terminal."""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import skill_train
from skill_train.cli import cli
from skill_train.commands._drawing import folding_table, rich_table
from skill_train.core.console import Console, Format, Result, clean, runs_as_it_stands
from skill_train.core.errors import UsageError, VerificationFailed

PACKAGE = Path(skill_train.__file__).parent
ERROR = UsageError(
    "no such file: x", code="missing_file", expected="a file", got="nothing", hint="skill-train local --help"
)
EXPLAINED = "error: no such file: x\n  expected: a file\n  got: nothing\n  next: skill-train local --help\n"


def _result() -> Result:
    return Result(
        data={"run_dir": "runs/a"},
        human=lambda rich: rich.print("trained"),
        quiet="runs/a",
        next=["skill-train merge runs/a"],
    )


RESULT_JSON = {
    "schema": "skill-train/1",
    "command": "local",
    "ok": True,
    "data": {"run_dir": "runs/a"},
    "warnings": [],
    "next": ["skill-train merge runs/a"],
}
ERROR_JSON = {
    "schema": "skill-train/1",
    "command": "local",
    "ok": False,
    "error": {
        "code": "missing_file",
        "message": "no such file: x",
        "expected": "a file",
        "got": "nothing",
        "hint": "skill-train local --help",
    },
    "warnings": [],
    "next": ["skill-train local --help"],
}
HUMAN = "trained\nnext: skill-train merge runs/a\n"


def hints_in(source: str) -> list[str]:
    """The commands of a module that are hints, each value in them by a word."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.keyword, ast.Assign))]
    named = [node.value for node in nodes if "hint" in _name(node)]
    texts = [text for value in named for text in _texts(value)]
    return [text for text in texts if text.startswith("skill-train ")]


def _name(node: ast.keyword | ast.Assign) -> str:
    return (node.arg or "") if isinstance(node, ast.keyword) else ast.unparse(node.targets[0])


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
        return ["".join(str(part) for part in parts).replace("skill-train x", "skill-train verify")]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    return [text for child in ast.iter_child_nodes(node) for text in _texts(child)]


def takes(command: str) -> bool:
    """Whether the command line has such a command, with such arguments."""
    group, words = cli, shlex.split(command)[1:]
    try:
        while isinstance(group, click.Group):
            _, found, words = group.resolve_command(click.Context(group), words)
            assert found is not None
            group = found
        group.make_context(group.name, list(words))
    except click.exceptions.Exit:  # --help
        return True
    except click.ClickException:
        return False
    return True


@pytest.mark.parametrize(
    ("mode", "terminal", "out"),
    [
        ("human", False, HUMAN),
        ("auto", True, HUMAN),
        ("auto", False, RESULT_JSON),
        ("json", True, RESULT_JSON),
        ("quiet", True, "runs/a\n"),
    ],
)
def test_one_result_in_each_mode(mode: Format, terminal: bool, out: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert Console(mode, "local").result(_result()) == 0
    said = capsys.readouterr()
    assert _read(said.out) == out
    assert said.err == ""


@pytest.mark.parametrize(
    ("mode", "terminal", "out", "err"),
    [
        ("human", False, "", EXPLAINED),
        ("auto", True, "", EXPLAINED),
        ("auto", False, ERROR_JSON, ""),
        ("json", True, ERROR_JSON, ""),
        ("quiet", True, "", EXPLAINED),
    ],
)
def test_one_error_in_each_mode(
    mode: Format, terminal: bool, out: Any, err: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert Console(mode, "local").error(ERROR) == 2
    said = capsys.readouterr()
    assert _read(said.out) == out
    assert said.err == err


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_an_answer_that_is_no_has_data_and_the_exit_code_of_its_error(mode: Format, capsys: Any) -> None:
    error = VerificationFailed("logits differ", code="verification_failed", hint="look at verify.json")
    result = Result(data={"verdict": "fail"}, human=lambda rich: rich.print("fail"), quiet="fail", error=error)
    assert Console(mode, "verify").result(result) == 6
    said = capsys.readouterr()
    if mode == "json":
        document = json.loads(said.out)
        assert (document["ok"], document["data"], document["error"]["code"]) == (
            False,
            {"verdict": "fail"},
            "verification_failed",
        )
    else:
        assert said.out == "fail\n"
        assert said.err.startswith("error: logits differ\n")


def test_progress_and_warnings_stay_off_stdout(capsys: Any) -> None:
    console = Console("json", "local")
    console.warn("slow", "this is slow")
    console.warn("slow", "this is slow")
    console.warn("template", "this is slow")  # what the plan said, and then the training
    with console.progress("training") as bar:
        for step in range(101):
            bar(step, 100, "loss 1.0")
    console.result(Result(data={}))
    said = capsys.readouterr()
    assert json.loads(said.out)["warnings"] == [{"code": "slow", "message": "this is slow"}]
    lines = said.err.splitlines()
    assert lines[0] == "warning: this is slow"
    assert lines[1:] == [f"training: {tenth}0/100 loss 1.0".replace(": 00/", ": 0/") for tenth in range(11)]


def test_a_part_of_one_thing_is_told_in_per_cent(capsys: Any) -> None:
    with Console("json", "export-gguf").progress("quantizing") as bar:
        for done, total in ((0, 1), (0.308, 1), (1.5, 2), (1, 1)):
            bar(done, total, "q8_0")
    told = capsys.readouterr().err.splitlines()
    assert told == [f"quantizing: {share} q8_0" for share in ("0%", "31%", "75%", "100%")]


def test_quiet_says_nothing_on_stderr(capsys: Any) -> None:
    console = Console("quiet", "local")
    console.warn("slow", "this is slow")
    with console.progress("training") as bar:
        bar(1, 1, "")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "data",
    [
        {"rows": [{"name": f"row {number}", "text": "x" * 40} for number in range(1000)]},
        {"text": "é" * 30_000},
        {"many": {f"key {number}": ["value " * 30] * 20 for number in range(15)}},
        {"keys": {f"key {number}": "value" for number in range(2000)}},
        {"deep": [[[["word " * 20] * 12] * 12] * 12]},
    ],
    ids=["long list", "long text", "many lists", "many keys", "deep lists"],
)
def test_json_is_one_document_of_at_most_8_kb(data: dict[str, Any], capsys: Any) -> None:
    Console("json", "verify").result(Result(data=data))
    text = capsys.readouterr().out
    assert len(text.encode()) <= 8192
    document = json.loads(text)
    assert document["ok"] is True
    assert document["shortened"]
    assert document["data"].keys() == data.keys()


def test_what_no_shortening_makes_small_is_left_out(capsys: Any) -> None:
    deep = {f"k{n}": {f"k{n}": ["v" * 99] * 9 for n in range(9)} for n in range(9)}
    Console("json", "verify").result(Result(data={"deep": [deep] * 9}, next=["skill-train verify runs/a"]))
    text = capsys.readouterr().out
    assert len(text.encode()) <= 8192
    document = json.loads(text)
    assert (document["data"], document["next"]) == ({}, ["skill-train verify runs/a"])


DEEP_PATH = "/" + "/".join(["a folder of a long name" * 4] * 20)


@pytest.mark.parametrize(
    "data", [{"text": "x" * 20_000}, {"rows": [{"n": n, "text": "word " * 40} for n in range(300)]}, {"n": {}}]
)
@pytest.mark.parametrize("said", ["", "told " * 3000])
def test_no_command_is_cut(data: dict[str, Any], said: str, capsys: Any) -> None:
    """Half of one does something else, or nothing. What is told beside it gives way, and data first."""
    commands = [f"skill-train {step} {shlex.quote(DEEP_PATH)}" for step in ("pull", "resume", "status")]
    error = UsageError(said or "no", code="x" * 100, hint=f"{commands[0]}; or free some space", got=said)
    for answer in (Result(data=data, next=commands), Result(data=data, next=commands[:1], error=error)):
        console = Console("json", "status")
        console.warnings.append({"code": "c" * 70, "message": said or "small"})
        console.result(answer)
        text = capsys.readouterr().out
        assert len(text.encode()) <= 8192
        document = json.loads(text)
        assert document["next"] == answer.next
        assert document["warnings"][0]["code"] == "c" * 70
        if answer.error is not None:
            assert (document["error"]["code"], document["error"]["hint"]) == (error.code, error.hint)
        if not said:
            assert document["warnings"][0]["message"] == "small" and ("shortened" in document) == (data != {"n": {}})


def test_commands_that_cannot_all_be_told_are_left_out_whole(capsys: Any) -> None:
    """Two paths as long as a system allows."""
    commands = [f"skill-train pull {letter * 4000}" for letter in "abc"]
    Console("json", "status").result(Result(data={"n": 1}, next=commands))
    text = capsys.readouterr().out
    document = json.loads(text)
    assert (document["next"], len(text.encode()) <= 8192) == (commands[:2], True) and "next" in document["shortened"]
    hint = f"skill-train merge --base {'b' * 4000} --out {'o' * 4100}"
    Console("json", "merge").error(UsageError("no", code="bad", hint=hint))
    document = json.loads(capsys.readouterr().out)
    assert (document["error"]["code"], document["error"]["hint"], document["next"]) == ("bad", "", [])


@pytest.mark.parametrize(
    ("hint", "runs"),
    [
        ("skill-train verify 'runs/a b'", True),
        ("skill-train submit x --yes", False),
        ("skill-train export-gguf RUN", False),
        ("skill-train status NAMESPACE/ID", False),
        ("skill-train cancel x; or a larger --max-cost", False),
        ("skill-train local --dtype float32, or --force", False),
        ("skill-train demo   (the same chain)", False),
        ("skill-train verify 'x", False),
        ("hf auth login", False),
        ("", False),
    ],
)
def test_only_a_whole_command_that_decides_nothing_is_next(hint: str, runs: bool, capsys: Any) -> None:
    Console("json", "verify").error(UsageError("no", code="bad", hint=hint))
    assert json.loads(capsys.readouterr().out)["next"] == ([hint] if runs else [])


SOURCES = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
HINTS = [hint for source in SOURCES if '"skill-train ' in source for hint in hints_in(source)]


@pytest.mark.parametrize("hint", dict.fromkeys(hint for hint in HINTS if runs_as_it_stands(hint)))
def test_every_hint_that_becomes_next_is_one_the_command_line_takes(hint: str) -> None:
    assert takes(hint)


def test_the_hints_are_found_and_prose_is_seen() -> None:
    assert len(HINTS) > 30
    assert hints_in('f(hint=f"skill-train submit {x} sends it")') == ["skill-train submit x sends it"]
    assert not takes("skill-train submit x sends it") and not takes("skill-train nothing x")


@pytest.mark.parametrize(("size", "whole"), [(8192, True), (8193, False)])
def test_the_bound_is_8_kb_to_the_byte(size: int, whole: bool, capsys: Any) -> None:
    """Of an answer without spaces between its parts, which is how a long one is written."""
    Console("json", "plan").result(Result(data={"text": ""}))
    empty = json.loads(capsys.readouterr().out)
    frame = len(json.dumps(empty, separators=(",", ":")).encode()) + 1  # the newline
    Console("json", "plan").result(Result(data={"text": "x" * (size - frame)}))
    text = capsys.readouterr().out
    assert ("shortened" not in json.loads(text)) is whole
    assert (len(text.encode()) == size) is whole


def test_a_long_error_is_bounded_and_keeps_its_code(capsys: Any) -> None:
    Console("json", "local").error(UsageError("m" * 20_000, code="c", got="g" * 20_000, hint="h" * 20_000))
    text = capsys.readouterr().out
    assert len(text.encode()) <= 8192
    assert json.loads(text)["error"]["code"] == "c"


def test_a_small_answer_is_not_shortened(capsys: Any) -> None:
    data = {"rows": list(range(60)), "text": "x" * 2000}
    Console("json", "plan").result(Result(data=data))
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == data
    assert "shortened" not in document


@pytest.mark.parametrize("before", ["", "\n", "\t", "\r", "\b", "\x1b[31m", "\x01", "é", "\u2028", '"', "\\n"])
def test_no_escape_hides_a_token(before: str, capsys: Any) -> None:
    """Of a log's line in an answer, its keys, a warning and an error."""
    token = "hf_" + "a1B2c3D4" * 4
    console = Console("json", "logs")
    console.warn("x", f"warned:{before}{token}")
    error = UsageError("no", code="x", got=f"got:{before}{token}", hint="x")
    console.result(Result({"lines": [f"login:{before}{token} done"], f"key:{before}{token}": 1}, error=error))
    said = capsys.readouterr()
    assert "a1B2c3D4" not in said.out + said.err
    assert json.loads(said.out)["data"]["lines"] == [f"login:{before}hf_… done"]


def test_control_characters_are_cleaned() -> None:
    assert clean("a\x1b[31mred\x07\r\x9bb\x7f") == "a�[31mred���b�"
    assert clean("two\n\tlines, 日本語 é") == "two\n\tlines, 日本語 é"


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_a_file_name_that_is_not_utf_8_can_be_printed(mode: Format, capsys: Any) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    Console(mode, "local").result(Result(data={"file": name}, quiet=name, next=[f"ls {name}"]))
    said = capsys.readouterr().out
    assert "caf�.jsonl" in said
    said.encode()


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_a_name_cannot_steer_the_terminal(mode: Format, capsys: Any) -> None:
    name = "model\x1b]0;title\x07"
    console = Console(mode, "local")
    console.warn("odd_name", name)
    console.status(name)
    console.error(UsageError(name, code="odd_name", got=name, hint=name))
    console.result(Result(data={"model": name}, quiet=name, next=[name]))
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err


def test_what_is_drawn_is_plain_text(capsys: Any) -> None:
    """In each part of a table, in a line and in a next command: no markup, no escape, and no token."""
    token = "hf_" + "a1B2c3D4" * 4
    text = f"[/b]\x1b[31m:smile: {token}"

    def draw(rich: Any) -> None:
        table = rich_table(text, title=text, caption=text)
        table.add_column(text, overflow="fold")
        table.add_row(text, text, style="red")
        for drawn in (table, folding_table(text, title=text)):
            rich.print(drawn)
        rich.print(text)
        rich.print(text, soft_wrap=True, style="bold")
        rich.print_json(data={"name": text})

    console = Console("human", "plan")
    console.draw(draw)
    console.result(Result({}, human=draw, next=[text]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a1B2c3D4" not in out
    assert out.count("[/b]\ufffd[31m:smile: hf_…") == 2 * 11 + 1


def _read(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [("human", "a�[31m line\n", ""), ("quiet", "a�[31m line\n", ""), ("json", "", "a�[31m line\n")],
)
def test_a_line_of_a_log_is_the_result_of_a_person(mode: Format, out: str, err: str, capsys: Any) -> None:
    """A program reads one document on stdout; the lines that come now it can see beside it."""
    console = Console(mode, "logs")
    console.line("a\x1b[31m line", now=True)
    assert capsys.readouterr() == (out, err)
    console.line("later", now=False)
    assert capsys.readouterr().out == ("" if mode == "json" else "later\n")
