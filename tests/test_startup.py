"""`--help` answers at once: it loads none of the libraries that a command may need."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from skill_train.cli import cli

SCRIPT = str(Path(sys.executable).with_name("skill-train"))  # the console script of this environment
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
    [["--help"], ["--version"], ["nonsense"], *([name, "--help"] for name in cli.commands)],
    ids=" ".join,
)
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    done = _run("-c", PROGRAM, *arguments)
    assert done.returncode == (2 if arguments == ["nonsense"] else 0), done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []
    assert done.stdout


def test_the_probe_sees_what_is_loaded() -> None:
    """The same program finds a library that was loaded, so an empty list means something."""
    done = _run("-c", "import yaml\n" + PROGRAM, "--help")
    assert json.loads(done.stderr.splitlines()[-1]) == ["yaml"]


def test_help_takes_less_than_a_fifth_of_a_second() -> None:
    """Processor time of the best of five, so that a busy machine does not fail it. Measured on 2 cores: 0.09 s."""
    assert min(_cpu_seconds(SCRIPT, "--help") for _ in range(5)) < 0.2


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def _cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert b"Commands:" in subprocess.run(command, capture_output=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
