"""What stands for Python in tests starts the same program, and ends as it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

import pytest

import warm_start
from skill_train.core.worker import QUIET

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
os.write(int(sys.argv[1]), b"kept")
print(json.dumps([sys.argv, os.getcwd(), os.environ["TEST_OWN"], sys.stdin.read(), "torch" in sys.modules]))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
SHOW_ALL = """
import atexit, json, os, random, signal, sys, threading
from pathlib import Path
from types import CodeType
import numpy
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it
os.umask(mask := os.umask(0))
signals = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
standard = (sys.stdin, sys.stdout, sys.stderr)
standard = [(file.fileno(), file.encoding, file.errors, file.line_buffering) for file in standard]
files = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
shown = [sys.argv, sys.path, sys.prefix, sys.dont_write_bytecode, dict(os.environ), os.getcwd(), mask]
shown += [signals, standard, files, __name__, __file__, threading.active_count(), sys.getrecursionlimit()]
threading.Thread(target=lambda: print(end=" ")).start()
atexit.register(print, '"at the end"]')
print("[", json.dumps(shown), ",")
"""
SLEEP = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(os.getpid(), flush=True)
time.sleep(60)
"""
REAL = sys.executable
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(warm_python: Path, tmp_path: Path) -> Start:
    def started(source: str, *words: str, pass_fds: tuple[int, ...] = (), **more: str) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(source)
        return subprocess.Popen(
            [str(warm_python), str(tmp_path / "train.py"), *words],
            env=os.environ | warm_start.OF_CHILDREN | {"TEST_OWN": "value"} | more,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )

    return started


def test_arguments_files_and_exit_code(start: Start, tmp_path: Path) -> None:
    read, write = os.pipe()
    process = start(SHOW, str(write), pass_fds=(write,))
    out, err = process.communicate("from stdin")
    os.close(write)
    assert os.read(read, 10) == b"kept"
    assert json.loads(out) == [[str(tmp_path / "train.py"), str(write)], str(tmp_path), "value", "from stdin", True]
    assert (process.returncode, err) == (7, "to stderr\n")


def test_the_limit_of_the_size_of_files(start: Start, tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    process = start("import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE)[0])")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most))
    assert process.communicate()[0] == "5000\n"


def test_the_libraries_read_the_environment_of_the_start(start: Start) -> None:
    program = "import sys; from huggingface_hub import constants; print(constants.ENDPOINT, 'torch' in sys.modules)"
    for port in (1, 2, 3, 4, 1):
        process = start(program, HF_ENDPOINT=f"http://127.0.0.1:{port}")
        assert process.communicate()[0] == f"http://127.0.0.1:{port} True\n"


LOOK_FOR = """
import gc, linecache, re, sys
from pathlib import PurePath
from urllib.parse import urlsplit
from huggingface_hub import constants
words, found = sys.argv[1].split(","), set()
urlsplit.cache_clear()
linecache.clearcache()
gc.unfreeze()  # what is frozen is not listed
for one in gc.get_objects():
    values = [*one, *one.values()] if type(one) is dict else one if type(one) in (set, frozenset) else ()
    for value in values:
        text = value.pattern if type(value) is re.Pattern else value
        if issubclass(type(text), (str, PurePath)) and any(word in str(text) for word in words):
            found.add(str(text))
print(constants.ENDPOINT, constants.HF_HOME, len(found), "torch" in sys.modules)
print(found, file=sys.stderr)
"""


def test_nothing_of_another_start_is_left(start: Start, tmp_path: Path) -> None:
    """What the libraries made of addresses and folders when they were imported is made of those of the start."""
    stand_ins = ",".join(text for _, text in warm_start.STAND_INS.values())
    other = {name: str(tmp_path / "other" / name) for name in warm_start.STAND_INS} | {
        "HF_ENDPOINT": "http://127.0.0.1:5",
        "HF_TOKEN": "hf_other",
    }
    changed = {"HF_HOME": str(tmp_path / "own"), "HF_ENDPOINT": "http://127.0.0.1:6", "HF_TOKEN": "hf_own"}
    for own in (other, other | changed):
        process = start(LOOK_FOR, stand_ins, **own)
        shown, found = process.communicate()
        assert shown == f"{own['HF_ENDPOINT']} {own['HF_HOME']} 0 True\n", found
    process = start(LOOK_FOR, str(tmp_path / "own"), **own)
    assert int(process.communicate()[0].split()[2]) > 10  # it finds what is there


@pytest.mark.parametrize(
    "changed",
    [
        {"OMP_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "1"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"PYTHONPATH": "/of/users"},  # a library of another's, or a sitecustomize
    ],
)
def test_another_environment_than_it_has_is_left_to_python(start: Start, changed: dict[str, str]) -> None:
    process = start("import sys; print('torch' in sys.modules)", **changed)
    assert process.communicate()[0] == "False\n"


@pytest.mark.parametrize("changed", [{"COLUMNS": "80", "LINES": "24"}, {"HTTPS_PROXY": "http://127.0.0.1:9"}])
def test_what_torch_does_not_read_may_differ(start: Start, changed: dict[str, str]) -> None:
    process = start("import sys; print('torch' in sys.modules)", **changed)
    assert process.communicate()[0] == "True\n"


def test_a_start_of_the_converter_needs_no_other_imports(start: Start) -> None:
    """transformers reads how loud it is when it is imported, and once more in the start: 30 warns, 40 tells errors."""
    program = "import os; from transformers import logging; print(logging.get_verbosity(), os.getppid())"
    settings: list[dict[str, str]] = [{}, QUIET | {"TRANSFORMERS_VERBOSITY": "error"}, {}]
    levels, parents = zip(*(start(program, **more).communicate()[0].split() for more in settings), strict=True)
    assert (levels, len(set(parents))) == (("30", "40", "30"), 1)


def test_it_finds_its_own_folder_for_temporary_files(start: Start, tmp_path: Path) -> None:
    """torch looks for one when it is imported, which Python keeps."""
    process = start("import sys, tempfile; print('torch' in sys.modules, tempfile.gettempdir())", TMPDIR=str(tmp_path))
    assert process.communicate()[0] == f"True {tmp_path}\n"


@pytest.fixture
def all_cores() -> Iterator[list[int]]:
    """Those that this process may choose from."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, before)


def test_it_runs_on_the_cores_of_its_start(start: Start, all_cores: list[int]) -> None:
    """With a thread of torch for each, whatever core the libraries were imported on."""
    program = "import os, torch; print(*os.sched_getaffinity(0), torch.get_num_threads())"
    for core in all_cores:
        os.sched_setaffinity(0, {core})
        assert start(program).communicate()[0] == f"{core} 1\n"


def test_another_number_of_cores_is_left_to_python(start: Start, all_cores: list[int]) -> None:
    """torch has counted them."""
    cores = 1 if "PYTEST_XDIST_WORKER" in os.environ else len(all_cores)
    for number in range(1, len(all_cores) + 1):
        os.sched_setaffinity(0, all_cores[:number])
        process = start("import sys; print('torch' in sys.modules)")
        assert process.communicate()[0] == f"{number == cores}\n"


def test_a_limit_of_memory_is_left_to_python(start: Start) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, most[1]))
    process = start("import sys; print('torch' in sys.modules)")
    resource.setrlimit(resource.RLIMIT_AS, most)
    assert process.communicate()[0] == "False\n"


def test_what_it_starts_comes_warm_too(start: Start, warm_python: Path) -> None:
    """A command starts the training program and the workers with the Python that it runs in."""
    inner = "print('torch' in sys.modules, sys.executable)"
    process = start(
        f"import subprocess, sys\nif sys.argv[1:]: {inner}\nelse: subprocess.run([sys.executable, __file__, 'again'])"
    )
    assert process.communicate()[0] == f"True {warm_python}\n"


@pytest.mark.parametrize("changed", [{}, {"PYTHONPATH": warm_start.SOURCE, "PYTHONDONTWRITEBYTECODE": "1"}])
@pytest.mark.parametrize("words", [[], ["-P"]])
def test_all_else_is_as_python_has_it(
    warm_python: Path, tmp_path: Path, words: list[str], changed: dict[str, str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text(SHOW_ALL)
    environment = os.environ | warm_start.OF_CHILDREN | changed
    warm, real = (
        subprocess.run([python, *words, program, "--word"], env=environment, capture_output=True, text=True, check=True)
        for python in (warm_python, REAL)
    )
    assert json.loads(warm.stdout) == json.loads(real.stdout)
    assert (warm.stdout.count("at the end"), warm.stderr) == (1, real.stderr)


def test_a_worker_is_started_as_python_starts_it(warm_python: Path, tmp_path: Path) -> None:
    """A module of this folder, which comes first without -P. With -P there is none, and it fails."""
    (tmp_path / "skill_train").mkdir()
    (tmp_path / "skill_train" / "__init__.py").touch()
    (tmp_path / "skill_train" / "own_worker.py").write_text(SHOW_ALL)
    command, environment = ["-m", "skill_train.own_worker", "--word"], os.environ | warm_start.OF_CHILDREN
    warm, real = (
        subprocess.run([python, *command], env=environment, capture_output=True, text=True, check=True)
        for python in (warm_python, REAL)
    )
    assert json.loads(warm.stdout) == json.loads(real.stdout)
    assert (warm.stdout.count("at the end"), warm.stderr) == (1, real.stderr)
    without = subprocess.run([warm_python, "-P", *command], env=environment, capture_output=True, text=True)
    assert without.returncode == 1 and "No module named" in without.stderr


def test_a_worker_has_llama_cpp_and_no_torch(warm_python: Path, tmp_path: Path) -> None:
    """In the environment that workers are started with."""
    (tmp_path / "skill_train").mkdir()
    (tmp_path / "skill_train" / "__init__.py").touch()
    for name in ("own_worker", "other"):
        (tmp_path / "skill_train" / f"{name}.py").write_text(
            "import sys; print(*({'llama_cpp', 'torch'} & set(sys.modules)), end='.')"
        )
    command = [str(warm_python), "-m"]
    environment = QUIET | os.environ | warm_start.OF_CHILDREN | {"PATH": str(tmp_path)}  # a program's that tests made
    shown = [
        subprocess.check_output([*command, name], env=environment, text=True)
        for name in ("skill_train.own_worker", "skill_train.other")
    ]
    assert shown == ["llama_cpp.", "."]


@pytest.mark.parametrize(("words", "libraries"), [(["plan"], ["click", "huggingface_hub"]), (["merge"], ["torch"])])
def test_a_command_is_started_as_python_starts_it(
    warm_python: Path, tmp_path: Path, words: list[str], libraries: list[str]
) -> None:
    """With a package of this folder in place of ours. The console script goes the same way."""
    (tmp_path / "skill_train").mkdir()
    (tmp_path / "skill_train" / "__init__.py").touch()
    shown = SHOW_ALL.replace("__file__, ", "").replace("import numpy", f"here = {{*{libraries}}} <= {{*sys.modules}}")
    program = "def main():\n" + textwrap.indent(f'{shown}print(here, "]")', "    ")
    (tmp_path / "skill_train" / "cli.py").write_text(program)
    environment, found = os.environ | warm_start.OF_CHILDREN, []
    for python in (warm_python, REAL):
        command = [python, "-c", "from skill_train.cli import main; main()", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        found.append(done.stdout.replace(" ", ""))  # one of them comes from a thread
    assert found[0].count("True]") == 1 and found[0].replace("True]", "False]") == found[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_program(start: Start, number: int) -> None:
    process = start(SLEEP)
    assert process.stdout is not None
    other = Path("/proc") / process.stdout.readline().strip()
    process.send_signal(number)
    assert process.wait(20) == -number
    end = time.monotonic() + 10
    while other.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not other.exists()


def test_a_program_ends_while_another_runs(start: Start) -> None:
    longer = start(SLEEP)
    assert longer.stdout is not None and longer.stdout.readline()
    assert start("print('short')").communicate(timeout=20)[0] == "short\n"
    assert longer.poll() is None
    longer.kill()
    longer.wait(20)


def test_an_error_keeps_its_traceback(start: Start) -> None:
    process = start("raise ValueError('so')")
    _, err = process.communicate()
    assert process.returncode == 1 and "ValueError: so" in err


def test_a_copy_of_the_training_program_is_compiled_as_if_from_there(start: Start, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    process = start(warm_start.TRAIN.read_text(), "plan.json")
    told, _ = process.communicate()
    real = subprocess.run([REAL, tmp_path / "train.py", "plan.json"], cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, told) == (real.returncode, real.stdout) and "bad_plan" in told
    codes = [warm_start._at(compile("def f():\n    return lambda: 1", "there.py", "exec"), "here.py")]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    assert [(code.co_name, code.co_filename) for code in codes] == [
        ("<module>", "here.py"), ("f", "here.py"), ("<lambda>", "here.py"),
    ]  # fmt: skip
