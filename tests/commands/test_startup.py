"""`--help` and `plan` answer at once: they load none of the libraries that a command may need."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from skill_train.cli import COMMANDS, GROUPS, cli

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

SCRIPT = str(Path(sys.executable).with_name("skill-train"))  # the console script of this environment
CONFIGS = Path(__file__).resolve().parents[1] / "support" / "data" / "configs"
HEAVY = ("torch", "transformers", "huggingface_hub", "llama_cpp", "numpy", "rich", "datasets", "peft", "trl", "yaml")
# Runs the command line as the console script does, then says which of the libraries are loaded.
PROGRAM = f"""
import json, sys
from skill_train.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["nonsense"],
        *([name, "--help"] for name in COMMANDS),
        ["skills", "check", "--help"],
    ],
    ids=" ".join,
)
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    done = _run("-c", PROGRAM, *arguments)
    assert done.returncode == (2 if arguments == ["nonsense"] else 0), done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []
    assert done.stdout


def test_the_help_page_imports_no_command() -> None:
    """And the help of a command imports that one."""
    modules = {name.replace("-", "_") for name in COMMANDS}
    program = (
        "import sys\nfrom skill_train.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        f"    found = [name for name in {modules!r} if f'skill_train.commands.{{name}}' in sys.modules]\n"
        "    print(*found, file=sys.stderr)"
    )
    assert _run("-c", program, "--help").stderr.split() == []
    assert _run("-c", program, "export-gguf", "--help").stderr.split() == ["export_gguf"]


def test_the_table_of_commands_says_what_they_say() -> None:
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in COMMANDS}
    helps = {name: " ".join(command.help.split()) for name, command in found.items()}
    assert {name: text for name, text in COMMANDS.items() if not f"{helps[name]} ".startswith(f"{text} ")} == {}
    assert {name for name, command in found.items() if isinstance(command, click.Group)} == GROUPS
    assert cli.get_command(context, "nonsense") is None


def test_the_package_runs_as_a_module() -> None:
    done, script = _run("-m", "skill_train", "--help"), subprocess.run([SCRIPT, "--help"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, script.stdout.decode())
    assert _run("-m", "skill_train", "nonsense").returncode == 2


def test_the_probe_sees_what_is_loaded() -> None:
    """The same program finds a library that was loaded, so an empty list means something."""
    done = _run("-c", "import yaml\n" + PROGRAM, "--help")
    assert json.loads(done.stderr.splitlines()[-1]) == ["yaml"]


def test_help_takes_less_than_a_fifth_of_a_second() -> None:
    """Processor time of the best of five, so that a busy machine does not fail it. Measured on 2 cores: 0.06 s."""
    assert min(_cpu_seconds(SCRIPT, "--help", says=b"Commands:") for _ in range(5)) < 0.2


def test_a_plan_loads_no_heavy_library(tmp_path: Path) -> None:
    done = _run("-c", PROGRAM, *_plan(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["where"] in ("local", "cloud")
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_a_plan_loads_no_slow_module_of_the_standard_library(tmp_path: Path) -> None:
    """importlib.metadata loads email, csv and zipfile, and concurrent.futures logging: a tenth of the time each."""
    program = PROGRAM.replace(repr(HEAVY), repr(("importlib.metadata", "logging", "asyncio", "http.client")))
    done = _run("-c", program, *_plan(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_a_plan_of_a_recipe_file_loads_what_reads_it(tmp_path: Path) -> None:
    _, _, model, _, data, *_ = _plan(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"model: {model}\ndata: {data}\n")
    done = _run("-c", PROGRAM, "plan", str(tmp_path / "recipe.yaml"), "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == ["yaml"]


def test_a_plan_takes_little_more_than_its_imports(tmp_path: Path) -> None:
    """Processor time of the best of five, of 1,000 rows, beside that of modules of the standard library, because
    machines differ by three times. Measured on 2 cores: 2.5 to 2.9 times theirs; huggingface_hub alone adds more than
    the rest. bench/startup has seconds, and a model of real size."""
    library = "import asyncio, email.message, http.client, xml.dom.minidom; print(1)"
    pairs = [
        (
            _cpu_seconds(SCRIPT, *_plan(tmp_path), says=b'"where"'),
            _cpu_seconds(sys.executable, "-c", library, says=b"1"),
        )
        for _ in range(5)
    ]
    plans, others = zip(*pairs, strict=True)
    assert min(plans) < 4 * min(others)


def test_a_plan_reads_the_machine_once(tmp_path: Path) -> None:
    """As many questions to the driver as one reading asks."""
    program, asked = tmp_path / "bin" / "nvidia-smi", tmp_path / "asked"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexit 9\n')
    program.chmod(0o755)
    environment = dict(os.environ, PATH=f"{program.parent}:{os.environ['PATH']}")
    counts = []
    for words in (["-c", "from skill_train.machine.read import read_machine; read_machine()"], _plan(tmp_path)):
        asked.write_text("")
        command = [sys.executable, *words] if words[0] == "-c" else [SCRIPT, *words]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        counts.append(len(asked.read_text().splitlines()))
    assert counts[1] == counts[0] > 0


def _plan(folder: Path) -> list[str]:
    """The arguments for a plan of a model folder without weights, whose parameters come from its config."""
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.is_dir():
        model.mkdir()
        recorded = json.loads((CONFIGS / "qwen2.5-0.5b.json").read_text())
        (model / "config.json").write_text(json.dumps(recorded["config"]))
        rows.write_text('{"prompt": "What is late?", "completion": "The ticket."}\n' * 1000)
    return ["plan", "--model", str(model), "--data", str(rows), "--format", "json"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def _cpu_seconds(*command: str, says: bytes) -> float:
    """With bytecode kept, as an installation has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert says in subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
