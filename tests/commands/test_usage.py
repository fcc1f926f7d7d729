"""What the command line says to a word that it does not know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_tree import commands
from one_command import answered


@pytest.mark.parametrize("command", ["plan", "local", "submit"])
def test_a_field_of_a_recipe_is_no_option(command: str) -> None:
    error = _error(command, "--learning-rate", "1e-3")
    assert "learning_rate: …" in error["hint"] and "references/recipe.md" in error["hint"]


@pytest.mark.parametrize("words", [("plan", "--learn", "1"), ("merge", "--learning-rate", "1")], ids=str)
def test_anything_else_is_explained_by_the_help(words: tuple[str, ...]) -> None:
    assert _error(*words)["hint"] == f"skill-train {words[0]} --help"


def test_rows_of_ones_own_are_no_option_of_evaluate() -> None:
    assert _error("evaluate", "run", "--data", "rows.jsonl")["hint"] == "skill-train evaluate --help"
    assert "rows of your own cannot be given" in " ".join((commands()["evaluate"].help or "").split())


def test_a_run_in_place_of_the_reference_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "merged").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    code, answer = answered("verify", "--reference", tmp_path, "--gguf", tmp_path / "m.gguf")
    assert (code, answer["error"]["hint"]) == (2, f"use the merged model: {tmp_path / 'merged'}")


@pytest.mark.parametrize("command", ["plan", "local"])
def test_a_record_is_no_recipe(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"schema": "skill-train/step/1"}')
    code, answer = answered(command, tmp_path / "train.json")
    assert code == 2 and "no recipe" in answer["error"]["hint"]


NUMBERS = [
    ("submit", "--max-cost"),
    ("submit", "--agreed"),
    ("submit", "--max-hours"),
    ("submit", "--nodes"),
    ("plan", "--max-hours"),
    ("resume", "--max-cost"),
    ("resume", "--agreed"),
    ("wait", "--timeout"),
    ("logs", "--tail"),
    ("evaluate", "--rows"),
    ("verify", "--tokens"),
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e308", "9" * 25, "9" * 400, "9" * 5000])
@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=str)
def test_a_number_that_none_can_mean(command: str, option: str, value: str, tmp_path: Path) -> None:
    """NaN is above and below nothing, so it would pass every check of a cost."""
    error = _error(command, "run", option, value)
    assert option in error["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("merge", ""),
        ("plan", "--model", "m", "--data", "d", "--out", ""),
        ("local", "--model", "m", "--data", "d", "--run-dir", ""),
        ("export-gguf", ""),
        *((command, "") for command in ("status", "logs", "wait", "cancel", "pull", "resume")),
        ("report", "run", "--out", ""),
        ("skills", "install", "--target", ""),
    ],
    ids=str,
)
def test_an_empty_path_is_not_this_folder(words: tuple[str, ...], tmp_path: Path) -> None:
    """`--run-dir "$RUN"` of a variable that is not set."""
    error = _error(*words)
    assert "empty path" in error["message"] or "no folder ''" in error["message"]
    assert list(tmp_path.iterdir()) == []


def _error(*words: str) -> dict[str, str]:
    code, answer = answered(*words)
    assert (code, answer["error"]["code"]) == (2, "bad_usage")
    return dict(answer["error"])


CLOSED = [
    (("plan", "--model", "nowhere", "--data", "nowhere", "--format", "json"), 2),
    pytest.param(("doctor", "--format", "json"), 0, marks=pytest.mark.slow),
    pytest.param(("doctor", "--format", "human"), 0, marks=pytest.mark.slow),
    (("--help",), 141),
]


@pytest.mark.parametrize(("words", "code"), CLOSED, ids=lambda value: str(value))
def test_a_reader_that_goes_is_no_bug(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """`skill-train … | head`: exit 1 would call it a bug. A result that came to its end keeps its exit code."""
    program = "import sys; sys.stdin.read(1); from skill_train.cli import main; main()"
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None and child.stderr is not None
        child.stdout.close()
        child.stdin.write(b"x")
        child.stdin.close()
        errors = child.stderr.read().decode()
        assert child.wait() == code, errors
    assert "Traceback" not in errors
