"""The commands of the pages, run as they stand there: those that need neither the Hub nor a job.

`MODEL`, `RUN` and the files that the pages name lie in the folder under just these names, so not a word is replaced.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from command_child import Commands, Done
from skill_train.core import resources
from skill_train.run import records

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "SKILL.md", *(ROOT / "references").glob("*.md")])
# A job or the Hub: tests/commands/test_story.py runs these, and test_push.py; test_serve.py the one without an end.
ELSEWHERE = {"submit", "wait", "logs", "cancel", "pull", "resume", "push", "serve"}
# The whole chain once more: test_demo.py and test_doctor.py run it. The last one is of a model that is not here.
TOO_MUCH = ("demo", "doctor --self-test", "--where cloud", "runs/tickets-cloud", "me/0123456789", "Qwen2.5-7B")
# A minute of measuring; test_mix.py and test_bench.py hold what it measures. `make walks` runs these.
LONG = ("--bits 4.5", "bench model-q4_k_m.gguf")
MODELS = ("MODEL", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct")
FINISHED = ("RUN", "runs/here", "runs/cloud", "runs/a", "runs/b", "runs/second", "runs/first-cloud")
DEFAULT_PATH = [
    "data DATA.jsonl --model MODEL",
    "plan --model MODEL --data DATA.jsonl",
    "local --model MODEL --data DATA.jsonl --max-steps 20 --run-dir runs/smoke",
    "local --model MODEL --data DATA.jsonl --run-dir runs/first",
    "export-gguf runs/first --quant q8_0,q4_k_m",
    "verify runs/first",
]


def _documented(page: Path) -> Iterator[str]:
    """Each command line of the page's code blocks, without `skill-train` and without its remark."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.findall(r"```(?:sh|bash|text)?\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            found = re.match(r"(?:\S*/)?skill-train (?P<rest>[a-z].*?)(?:\s+#.*)?$", line.strip())
            if found and "[OPTIONS]" not in line:
                yield found["rest"].strip()


COMMANDS = sorted({command for page in PAGES for command in _documented(page)})
POSSIBLE = [c for c in COMMANDS if c.split()[0] not in ELSEWHERE and not any(part in c for part in TOO_MUCH)]


def _kind(command: str) -> tuple[str, ...]:
    """Its name and the options that make it other work: one of each kind is run."""
    words = shlex.split(command)
    same = {"--format", "--run-dir", "--out", "--rows", "--max-steps", "--max-length"}
    return (words[0], *(word for word in words if word.startswith("--") and word not in same))


_WALKED = {_kind(command) for command in DEFAULT_PATH}  # by the fixture
RUN_HERE = sorted({_kind(command): command for command in POSSIBLE if _kind(command) not in _WALKED}.values())


@pytest.fixture(scope="module")
def project(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with all that the pages name, and the default path of SKILL.md walked in it."""
    there = tmp_path_factory.mktemp("project")
    for name in MODELS:
        shutil.copytree(resources.demo() / "model", there / name)
    table = pyarrow.parquet.read_table(resources.demo() / "data.parquet")
    rows = [json.dumps(row) for row in table.to_pylist()[:40]]
    for name in ("DATA.jsonl", "tickets.jsonl"):
        (there / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    _write_csv(there / "tickets.csv", rows)
    (there / "recipe.yaml").write_text("model: MODEL\ndata: tickets.jsonl\nmax_steps: 4\n", encoding="utf-8")
    (there / "my_scorer.py").write_text("def score(prompt, answer, expected):\n    return answer == expected\n")
    for command in DEFAULT_PATH:
        done = _call(commands, there, command)
        assert done.code == 0, (command, done.stdout, done.stderr)
    for name in FINISHED:
        shutil.copytree(there / "runs" / "first", there / name)
    for name in ("FOLDER", "merged-model-folder"):
        shutil.copytree(there / "runs" / "first" / "merged", there / name)
    shutil.copytree(there / "runs" / "first" / "adapter", there / "my-adapter")
    for command in (
        "plan recipe.yaml --out plan.json",
        "skills install",
        "skills install --target claude --scope global",
    ):
        assert _call(commands, there, command).code == 0
    shutil.copy(next((there / "runs" / "first" / "gguf").glob("*q4_k_m.gguf")), there / "model-q4_k_m.gguf")
    return there


def _write_csv(path: Path, rows: list[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("question", "answer"))
        table.writerows([message["content"] for message in json.loads(row)["messages"][-2:]] for row in rows)


def _call(commands: Commands, folder: Path, command: str) -> Done:
    env = os.environ | {"HOME": str(folder / "home"), "PYTHONPATH": str(ROOT / "skill")}
    return commands.run(folder, env, *shlex.split(command))


def test_the_default_path_is_what_the_skill_says() -> None:
    """In this order, so that the folder is what a reader of SKILL.md has."""
    told = [command for command in _documented(ROOT / "SKILL.md") if command.split()[0] not in ELSEWHERE | {"demo"}]
    assert told == DEFAULT_PATH


def test_every_command_that_is_left_out_has_its_reason() -> None:
    named, run = ({c.split()[0] for c in some} for some in (COMMANDS, [*RUN_HERE, *DEFAULT_PATH]))
    assert named - run == ELSEWHERE | {"demo", "status"}
    assert len(RUN_HERE) > 15


@pytest.fixture
def folder(project: Path, tmp_path: Path) -> Path:
    """The project for one command. What is written goes under a new name first, so that links keep the first whole."""
    shutil.copytree(project, tmp_path / "project", copy_function=os.link)
    return tmp_path / "project"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.torture] if any(part in command for part in LONG) else [])
        for command in RUN_HERE
    ],
)
def test_a_command_of_the_pages_does_what_it_says(commands: Commands, folder: Path, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "local" and "--run-dir" in words:
        shutil.rmtree(folder / words[words.index("--run-dir") + 1])  # it makes that run
    done = _call(commands, folder, command)
    assert done.code == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] is True
    for record in (*folder.glob("runs/*/*.json"), *folder.glob("RUN/*.json")):
        records.read_json(record)  # what a step wrote is what the next one takes
