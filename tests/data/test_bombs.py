"""A small file cannot take the memory or the time of a machine by what it unpacks to. Ordinary ones are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bombs
from bombs import FILES, FOLDERS

pytestmark = pytest.mark.slow

pytest.importorskip("pyarrow")
MOST_MB, MOST_SECONDS = 700, 60  # a Python with pyarrow takes 120 MB, and one with datasets 250

PEAK = """
import sys
if sys.argv[1] == "train":
    from skill_train.program.rows import Refused, iter_rows
    try:
        print(sum(1 for _ in iter_rows(sys.argv[2], split="train")))
    except Refused as refusal:
        print(refusal.error["code"], refusal.exit_code)
else:
    from skill_train.cli import main
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        print(end.code, file=sys.stderr)
from skill_train.core import memory
print(memory.peak_memory_bytes() / 1e6, file=sys.stderr)
"""


def _marked(make: Callable[[Path], None]) -> Any:
    """Two that take many seconds to make run in the walks: others share one dictionary and many rows too."""
    dear = make.__name__ in ("texts_that_share_their_beginning", "one_text_a_million_times")
    return pytest.param(make, marks=pytest.mark.torture) if dear else make


@pytest.fixture(scope="module", params=map(_marked, (*FILES, *FOLDERS)), ids=lambda make: make.__name__)
def bomb(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for both readers: it takes seconds."""
    if request.param in FOLDERS:
        pytest.importorskip("datasets")
    path = tmp_path_factory.mktemp(request.param.__name__) / ("saved" if request.param in FOLDERS else "rows.parquet")
    request.param(path)
    return path


@pytest.mark.parametrize("command", ["data", "train"])
def test_what_unpacks_to_too_much_is_refused_by_name(bomb: Path, command: str) -> None:
    started = time.monotonic()
    said, told, peak = _read(command, bomb)
    print(f"{bomb.parent.name}: {peak:.0f} MB, {time.monotonic() - started:.1f} s")
    if command == "train":
        assert said == "unsafe_file 2\n"
    else:
        error = json.loads(said)["error"]
        assert (error["code"], told) == ("unsafe_file", "2") and str(bomb) in error["message"], error
    assert peak < MOST_MB and time.monotonic() - started < MOST_SECONDS


def test_many_equal_rows_are_a_dataset(tmp_path: Path) -> None:
    """29 times as many as the bytes of their file."""
    path = tmp_path / "rows.parquet"
    bombs.equal_rows(path)
    assert path.stat().st_size < 4000
    assert _read("train", path)[0] == "100000\n"
    said, _, peak = _read("data", path)
    assert json.loads(said)["data"]["rows"] == 100_000 and peak < MOST_MB, said


def _read(command: str, path: Path) -> tuple[str, str, float]:
    """What it said, its exit code, and the most megabytes that it took."""
    program = [sys.executable, "-c", PEAK, command, str(path)]
    done = subprocess.run(program, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    lines = done.stderr.splitlines()
    assert lines and "Traceback" not in done.stderr, done.stderr
    return done.stdout, lines[-2] if len(lines) > 1 else "0", float(lines[-1])
