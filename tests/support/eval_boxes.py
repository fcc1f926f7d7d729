"""The evals as somebody uses them who runs an agent: prepare, work in the sandbox with its own tools, grade."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVALS = Path(__file__).resolve().parents[2] / "evals"
TASKS = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))["evals"]


@dataclass(frozen=True)
class Sandbox:
    task: str
    out: Path

    @property
    def work(self) -> Path:
        return self.out / self.task / "work"

    def sh(self, *words: object, code: int = 0) -> dict[str, Any]:
        """One command in the sandbox, as an agent's shell runs it; its JSON answer."""
        line = f". {shlex.quote(str(self.out / self.task / 'env.sh'))} && {shlex.join(map(str, words))}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def write(self, name: str, document: Any) -> None:
        (self.work / name).write_text(json.dumps(document), encoding="utf-8")

    def grade(self) -> dict[str, Any]:
        done = _run("grade", self.task, self.out)
        (task,) = json.loads(done.stdout)["tasks"]
        return task


def prepare(task: str, out: Path) -> Sandbox:
    _run("prepare", task, out)
    return Sandbox(task, out)


def _run(do: str, task: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EVALS / "run.py"), do, "--task", task, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done
