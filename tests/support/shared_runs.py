"""A run that tests share: trained, merged, exported and verified once a session, whatever the number of workers.

Nobody changes it: who writes takes a copy. `conftest` says where it lies.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tiny
from command_child import Done

FOLDER = "SKILL_TRAIN_SHARED_RUNS"
SMALL = ("--max-steps", "3", "--max-length", "256")


def script() -> str:
    """The console script of this environment."""
    return str(Path(sys.executable).with_name("skill-train"))


@dataclass(frozen=True)
class Chain:
    """A run of 24 rows, and what each command of the chain answered."""

    rows: Path
    run: Path
    answers: dict[str, Done]


def chain(kind: str = "gemma") -> Chain:
    """The run of this tiny model. One process makes it and the others wait."""
    folder = Path(os.environ[FOLDER]) / kind
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "answers.json").is_file():
            _make(kind, folder)
    answers = json.loads((folder / "answers.json").read_text())
    return Chain(folder / "rows.jsonl", folder / "run", {name: Done(**done) for name, done in answers.items()})


def _make(kind: str, folder: Path) -> None:
    rows, run = tiny.write_rows(folder / "rows.jsonl", 24), folder / "run"
    local = ("local", "--model", tiny.cached(kind), "--data", rows, *SMALL, "--run-dir", run)
    commands: dict[str, tuple[object, ...]] = {
        "local": local,
        "again": local,
        "from its file": ("local", run / "recipe.yaml", "--run-dir", run),
        "merge": ("merge", run),
        "export-gguf": ("export-gguf", run, "--quant", "q8_0,q4_k_m"),
        "verify": ("verify", run),
    }
    answers = {name: asdict(_call(folder, *words)) for name, words in commands.items()}
    (folder / "part").write_text(json.dumps(answers))
    (folder / "part").rename(folder / "answers.json")


def _call(folder: Path, *words: object) -> Done:
    done = subprocess.run([script(), *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=280)
    return Done(done.returncode, done.stdout, done.stderr)
