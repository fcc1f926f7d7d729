"""scripts/train.py is its parts, joined; parts that cannot share one file are refused."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from by_path import load

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "build_train.py"


def _script(path: Path = SCRIPT) -> ModuleType:
    return load(path, "build_train")


BUILD = _script()


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILD.SOURCE, tmp_path / "program", ignore=shutil.ignore_patterns("__pycache__")))


def test_the_program_defines_no_name_twice() -> None:
    tree = ast.parse((ROOT / "scripts" / "train.py").read_text(encoding="utf-8"))
    names = Counter(name for node in tree.body for name in BUILD.defined(node))
    assert len(names) > 300 and [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("part", "line", "said"),
    [
        ("rows.py", "def event() -> None: ...", r"event \(events.py, line \d+; rows.py, line \d+\)"),
        ("rows.py", "MARKER = 1", r"MARKER \(cloud/file_names.py, line \d+; rows.py, line \d+\)"),
        ("rows.py", "first, shutil = 1, 2", r"shutil \(import of shutil; rows.py, line \d+\)"),
        ("rows.py", "def of() -> None: ...\ndef of() -> None: ...", r"of \(rows.py, line \d+; rows.py, line \d+\)"),
        ("rows.py", "from skill_train.program import events", "rows.py, line"),
        ("rows.py", "import skill_train.program.events", "rows.py, line"),
        ("rows.py", "from skill_train.program.events import event as said", "rows.py, line"),
        ("rows.py", "from skill_train.program.cloud.job import run_job", "rows.py, line"),  # a later part
        ("rows.py", "from skill_train.core.errors import nearest", "rows.py, line"),
        ("rows.py", "def of() -> None:\n    from skill_train.program.events import event", "rows.py, line"),
        ("rows.py", "import torch", "rows.py, line"),
        ("more.py", "", "differ by more"),
    ],
)
def test_parts_that_cannot_be_joined_are_refused(parts: Path, part: str, line: str, said: str) -> None:
    with open(parts / part, "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(SystemExit, match=said):
        BUILD.join(parts)


def test_each_part_is_joined_whole_behind_its_imports() -> None:
    """With its comments and docstrings: whoever reads the program of a job has all of it."""
    whole = (ROOT / "scripts" / "train.py").read_text(encoding="utf-8")
    for part in BUILD.PARTS:
        source = (BUILD.SOURCE / f"{part}.py").read_text(encoding="utf-8")
        last = max(
            node.end_lineno or 0 for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
        )
        assert "\n".join(source.splitlines()[last:]).strip() in whole


def test_a_difference_is_found_and_mended(tmp_path: Path) -> None:
    """In a copy of the checkout: --check fails and changes nothing, then the script writes the file again."""
    shutil.copytree(BUILD.SOURCE, tmp_path / "skill" / "skill_train" / "program")
    (tmp_path / "scripts").mkdir()
    script, program = (shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts") for name in (SCRIPT.name, "train.py"))
    whole = Path(program).read_bytes()
    Path(program).write_bytes(whole.replace(b"IGNORED = -100", b"IGNORED = -101"))
    planted = Path(program).read_bytes()
    assert planted != whole
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert (done.returncode, Path(program).read_bytes()) == (1, planted) and "make docs" in done.stderr
    subprocess.run([sys.executable, script], check=True)
    assert Path(program).read_bytes() == whole
