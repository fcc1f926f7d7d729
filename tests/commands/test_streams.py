"""Files that are none, streams that take nothing, and links that lead nowhere: one clear end each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import merging
import shared_runs
import tiny

SCRIPT = str(Path(sys.executable).with_name("skill-train"))  # Python itself, whose end a full disk may meet
FULL = Path("/dev/full")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FULL.exists(), reason="Linux has it")]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tiny.write_rows(tmp_path / "rows.jsonl", 4)
    (tmp_path / "row é.jsonl").write_text('{"prompt": "é", "completion": "b"}\n', encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan pipe", "bad_recipe"),
        ("plan /dev/zero", "bad_recipe"),
        ("submit /dev/zero", "bad_recipe"),
        ("data pipe", "missing_file"),
        ("data /dev/zero", "missing_file"),
        ("plan --model MODEL --data pipe", "missing_file"),
        ("plan --model MODEL --data rows.jsonl --out pipe", "output_exists"),
        ("local --model MODEL --data rows.jsonl --run-dir loop", "system_error"),
    ],
)
def test_what_is_no_file_is_not_read_for_ever(here: Path, words: str, code: str) -> None:
    before = set(here.iterdir())
    done = _call(here, words)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, code)
    assert error["expected"] and error["hint"] and "Traceback" not in done.stderr
    assert set(here.iterdir()) == before


@pytest.mark.parametrize("out", ["rows.jsonl", "link", "loop"])
def test_a_merge_into_what_is_no_folder_is_refused_before_it(here: Path, out: str) -> None:
    base = merging.llama(here / "base")
    merging.adapter(base, here / "adapter", targets=["q_proj"])
    (here / "link").symlink_to("nowhere")
    before = set(here.iterdir())
    done = _call(here, f"merge --base base --adapter adapter --out {out}", script=shared_runs.script())
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "system_error" if out == "loop" else "output_exists")
    assert "merging: " not in done.stderr and set(here.iterdir()) == before


def test_a_full_disk_under_stdout(here: Path) -> None:
    with open(FULL, "w") as full:
        done = _call(here, "plan --model MODEL --data rows.jsonl", stdout=full)
    assert done.returncode == 3
    assert "error: no space left on the disk" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_under_stderr_fails_no_finished_work(here: Path) -> None:
    with open(FULL, "w") as full:
        done = _call(here, "plan --model MODEL --data rows.jsonl", stderr=full)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)
    with open(FULL, "w") as full:
        done = _call(here, "plan missing.yaml", stderr=full)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "missing_file")


def test_a_terminal_that_knows_ascii_only(here: Path) -> None:
    done = _call(here, "data 'row é.jsonl'", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii() and json.loads(done.stdout)["data"]["path"] == "row é.jsonl"
    done = _call(here, "data 'row é.jsonl' --format human", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "\\xe9" in done.stdout


def test_a_terminal_of_no_width_and_a_home_that_is_a_file(here: Path) -> None:
    wide, none = (_call(here, "data rows.jsonl --format human", COLUMNS=width).stdout for width in ("80", "0"))
    assert none == wide and len(none) > 100
    assert _call(here, "plan --model MODEL --data rows.jsonl", HOME=str(here / "rows.jsonl")).returncode == 0


def _call(
    folder: Path,
    words: str,
    *,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    script: str = SCRIPT,
    **more: str,
) -> Any:
    import shlex

    arguments = [str(tiny.cached("gemma")) if word == "MODEL" else word for word in shlex.split(words)]
    home = {} if "HOME" in more else {"SKILL_TRAIN_CACHE": str(folder.parent / "cache")}
    kept = {name: value for name, value in os.environ.items() if name != "SKILL_TRAIN_CACHE"}
    return subprocess.run(
        [script, *arguments],
        cwd=folder,
        env=kept | home | more,
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=60,
        check=False,
    )
