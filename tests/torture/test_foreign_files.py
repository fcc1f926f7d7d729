"""Every reader of files that somebody else made × every form of a hostile file, at least 18,000 inputs.

The readers are in `hostile_readers`, the forms in `hostile_forms`. Each group runs in a child process, `files_child`,
which says what an input may not do: a traceback, an error without its next command, five seconds of the processor,
waiting for a pipe, 300 MB, a control character for the terminal. `SKILL_TRAIN_SEED` chooses other bytes and values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torture, pytest.mark.skipif(sys.platform == "win32", reason="needs signals and limits")]

DEFAULT = 20261121
SEED = int(os.environ.get("SKILL_TRAIN_SEED", DEFAULT))
CHILD = Path(__file__).with_name("files_child.py")
# What each has at least. The long ones come first, so that one core does not wait for the other.
LEAST = {
    "runs": 7000,
    "models": 5000,
    "records": 2500,
    "datasets": 2000,
    "reports": 900,
    "recipes and plans": 600,
    "caches": 600,
    "adapters": 400,
    "folders of rows": 300,
    "ggufs": 70,
}


def test_there_are_enough_of_them() -> None:
    assert sum(LEAST.values()) >= 18_000


@pytest.mark.parametrize("group", LEAST)
def test_every_form_of_a_file(group: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    if group == "folders of rows":
        pytest.importorskip("datasets")
    paths = [str(CHILD.parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    begun = tmp_path / "begun"
    own = {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    own |= {"HF_HOME": str(tmp_path / "hf"), "SKILL_TRAIN_CACHE": str(tmp_path / "cache"), "BEGUN": str(begun)}
    words = [sys.executable, str(CHILD), group, str(SEED)]
    started = time.monotonic()
    done = subprocess.run(words, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=850)
    at = begun.read_text() if begun.is_file() else "before the first input"
    assert done.returncode == 0, f"exit {done.returncode} at {at}\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    again = f"again: PYTHONPATH=tests python {CHILD} '{group}' {SEED} NUMBER"
    assert not found["failed"], "\n".join([*found["failed"], again])
    stale = [pattern for pattern, count in found["known"].items() if not count]
    assert not stale or SEED != DEFAULT, f"these are mended; take them out of KNOWN in {CHILD.name}: {stale}"
    assert found["inputs"] >= LEAST[group]
    known = f", {sum(found['known'].values())} known and not mended" if found["known"] else ""
    seconds = time.monotonic() - started
    ended = ", ".join(f"{count} {code}" for code, count in list(found["ended"].items())[:4])
    record_property("counts", f"foreign files, {group}: {found['inputs']} inputs ({ended}){known}; {seconds:.0f} s")
