"""Ctrl-C where Python itself would answer in the place of skill-train, and what ends a command as Ctrl-C does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import killing
import shared_runs

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

# Interrupts the load of a command in a text that runs as code: dataclasses makes methods so.
IN_A_TEXT = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "skill_train.commands.diff":
            exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
sys.meta_path.insert(0, Finder())
"""
# Of what a finalizer raises Python says that it is ignored.
IN_A_FINALIZER = IN_A_TEXT.replace(
    'exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")',
    """
            import os, signal, time
            class Group:
                def __del__(self):
                    os.kill(os.getpid(), signal.SIGINT)
            Group()
            print("was ignored", file=sys.stderr, flush=True)
            time.sleep(30)
""",
)
# While torch's C code imports numpy: it drops whatever that raises, and left half of numpy behind.
IN_TORCH = IN_A_TEXT.replace("skill_train.commands.diff", "numpy.matrixlib").replace(
    "exec(", "sys.meta_path.remove(self); exec("
)
SLOW = "import time\nprint('loading', flush=True)\ntime.sleep(30)\n"


def _start(first: Path, *words: str) -> subprocess.Popen[str]:
    """The command, for which the modules in a folder stand first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(first), *filter(None, sys.path)))}
    command = [sys.executable, "-m", "skill_train", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("where", [IN_A_TEXT, IN_A_FINALIZER], ids=["a text", "a finalizer"])
def test_the_exit_code_is_130_wherever_it_strikes(tmp_path: Path, where: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(where)
    child = _start(tmp_path, "diff", "one", "two", "--format", "json")
    out, err = child.communicate(timeout=20)
    assert json.loads(out)["error"]["code"] == "interrupted", err
    assert child.returncode == 130 and "Traceback" not in err
    assert ("was ignored" in err) is (where == IN_A_FINALIZER)


def test_it_is_not_lost_while_torch_loads(tmp_path: Path) -> None:
    """`merge` went on to its gate, and said then that a package is not installed."""
    (tmp_path / "sitecustomize.py").write_text(IN_TORCH)
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    shutil.rmtree(run / "merged")
    child = _start(tmp_path, "merge", str(run), "--format", "json")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, json.loads(out)["error"]["code"]) == (130, "interrupted"), err
    assert "Traceback" not in err and not (run / "merged").exists()


def test_while_it_loads_there_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(SLOW)
    child = _start(tmp_path, "--help")
    assert child.stdout and child.stdout.readline() == "loading\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=20) == ("", "")
    assert child.returncode == 130


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    """By `kill`, `timeout`, a scheduler, or a terminal that is closed. The command alone is told."""
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    run = Path(shutil.copytree(shared_runs.chain().run, place / "run"))
    temporary.mkdir()
    before, environment = killing.contents(run), dict(os.environ, TMPDIR=str(temporary))
    step = killing.Step("quantize", ("export-gguf", "run", "--quant", "q5_0"), place, environment)
    own = signal.signal(how, signal.SIG_DFL)  # `nohup make test` ignores it, and so would what starts here
    child = killing.start(step, place, tmp_path / "log")
    signal.signal(how, own)
    while not list(temporary.glob("skill-train-*")):
        assert child.poll() is None
        time.sleep(0.01)
    children = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(how)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, json.loads(out)["error"]["code"]) == (130, "interrupted"), err
    assert "Traceback" not in err and not list(temporary.glob("skill-train-*"))
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert killing.contents(run) == before and not list(place.rglob("*.part"))
