"""`doctor` with the whole installation: torch asked in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from light import SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

_MAIN = "from skill_train.cli import main; main()"
# What `import torch` can do to a process; each takes the place of the installed one.
BROKEN = {
    "missing library": 'raise OSError("libcudart.so.13: cannot open shared object file")',
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}


def test_torch_is_asked() -> None:
    done = _doctor()
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    torch = next(check for check in data["checks"] if check["name"] == "torch")
    assert torch["verdict"] == "ok" and data["able"]["local"] is True


@pytest.mark.parametrize(("source", "word"), [(BROKEN["missing library"], "libcudart"), (BROKEN["crash"], "SIGSEGV")])
def test_a_broken_torch_takes_nothing_down(source: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(source, encoding="utf-8")
    done = _doctor(PYTHONPATH=os.pathsep.join((str(tmp_path), SOURCE)))
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["code"]) == (7, "bad_installation")
    assert word in document["error"]["message"] + document["error"]["got"]
    assert document["error"]["hint"].startswith("pip install --force-reinstall")
    assert document["data"]["able"]["local"] is False and document["data"]["able"]["plan"] is True


def _doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _MAIN, "doctor", *arguments, "--format", "json"]
    full = os.environ | {"PYTHONPATH": SOURCE} | environment
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=280, check=False)
