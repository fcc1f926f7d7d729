"""A sandbox: the folder of one task, with the tools that an agent has in it and a record of what it called.

PROMPT.md        what the agent is told
env.sh           sourced first: no network, no token, a home of its own, these tools first on PATH
work/            where it works; with the skill in work/.agents/skills and work/.claude/skills, or without
bin/             skill-train and hf, each call a line in commands.jsonl; python with the same packages, not recorded
facts.json       what the grader has to know: digests of the files as they were handed over, and the like
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skill_train
from skill_train.core import resources
from skill_train.llama import get_converter
from skill_train.machine import read as machine
from skill_train.program.rows import iter_parquet

PACKAGE_ROOT = Path(skill_train.__file__).resolve().parents[1]
DEMO = resources.demo()
# `{package}` is where skill_train lies, `{log}` the list of calls.
_SKILL_TRAIN = """\
#!{python}
import json, os, subprocess, sys, time
started = time.time()
program = "from skill_train.cli import main; main()"
paths = os.pathsep.join(filter(None, [{package!r}, os.environ.get("PYTHONPATH")]))
done = subprocess.run([sys.executable, "-c", program, *sys.argv[1:]], env=os.environ | {{"PYTHONPATH": paths}})
code = done.returncode if done.returncode >= 0 else 128 - done.returncode
call = {{"program": "skill-train", "argv": sys.argv[1:], "code": code, "seconds": round(time.time() - started, 2)}}
with open({log!r}, "a") as file:
    file.write(json.dumps(call) + "\\n")
sys.exit(code)
"""
_PYTHON = """\
#!/bin/sh
exec {python} "$@"
"""
_HF = """\
#!{python}
import json, sys
with open({log!r}, "a") as file:
    file.write(json.dumps({{"program": "hf", "argv": sys.argv[1:], "code": 1}}) + "\\n")
sys.exit("hf: there is no network here")
"""


@dataclass(frozen=True)
class Box:
    """One task's folder."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def log(self) -> Path:
        return self.root / "commands.jsonl"

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.root / "facts.json").read_text(encoding="utf-8"))
        return facts

    def calls(self, *words: str) -> list[dict[str, Any]]:
        """What the agent called, in order; with words only the calls of `skill-train` that begin with them, without
        those that asked for help."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.is_file() else []
        calls = [json.loads(line) for line in lines]
        wanted = list(words)
        if not words:
            return calls
        did = [c for c in calls if c["program"] == "skill-train" and not {"--help", "-h"} & set(c["argv"])]
        return [c for c in did if c["argv"][: len(words)] == wanted]

    def answer(self, name: str) -> dict[str, Any]:
        """A JSON file that the prompt asks for; empty when it is not there or is something else."""
        try:
            found = json.loads((self.work / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def run(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        """The grader's own call of skill-train, in `work` and not in the list: exit code and answer."""
        program = [sys.executable, "-c", "from skill_train.cli import main; main()", *map(str, arguments)]
        environment = {**os.environ, **self.environment(), "PYTHONPATH": str(PACKAGE_ROOT)}
        command = [*program, "--format", "json"]
        done = subprocess.run(command, cwd=self.work, capture_output=True, text=True, env=environment)
        return done.returncode, json.loads(done.stdout)

    def verified(self, reference: Path, *files: Path) -> dict[Path, dict[str, str]]:
        """The grader's own proof: by file the verdict of each check; nothing when verify could not judge."""
        named = [word for file in files for word in ("--gguf", file)]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "verify.json"
            self.run("verify", "--reference", reference, *named, "--tokens", 256, "--out", out)
            proof = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"checks": []}
        return {
            file: {check["name"]: check["verdict"] for check in proof["checks"] if check["file"] == file.name}
            for file in files
        }

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.root / "home"),
            "PATH": os.pathsep.join([str(self.root / "bin"), os.environ["PATH"]]),
            "SKILL_TRAIN_CACHE": str(self.root / "cache"),
            "HF_HOME": str(self.root / "home" / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
            "OMP_WAIT_POLICY": "PASSIVE",
        }


def make(root: Path, prompt: str, *, with_skill: bool) -> Box:
    """An empty sandbox."""
    box = Box(root)
    for folder in (box.work, root / "bin", root / "home", root / "cache"):
        folder.mkdir(parents=True)
    for converter in filter(get_converter.is_whole, machine.cache_dir().glob("llama.cpp-*")):
        (root / "cache" / converter.name).symlink_to(converter, target_is_directory=True)
    filled = {"python": sys.executable, "package": str(PACKAGE_ROOT), "log": str(box.log)}
    for name, text in (("skill-train", _SKILL_TRAIN), ("hf", _HF), ("python", _PYTHON), ("python3", _PYTHON)):
        (root / "bin" / name).write_text(text.format(**filled), encoding="utf-8")
        (root / "bin" / name).chmod(0o755)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in box.environment().items()]
    gone = "unset HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACEHUB_API_TOKEN HF_TOKEN_PATH CLAUDE_CONFIG_DIR"
    lines = [*exports, gone, f"cd {shlex.quote(str(box.work))}"]
    (root / "env.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (root / "PROMPT.md").write_text(prompt + "\n", encoding="utf-8")
    if with_skill:
        code, answer = box.run("skills", "install")
        assert code == 0, answer
    return box


def demo_rows() -> list[Any]:
    """The rows of the demo's dataset."""
    return [row for _, row in iter_parquet(DEMO / "data.parquet")]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSON-lines file; empty when it is not one."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
