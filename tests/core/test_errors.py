"""The exit codes are a promise; the numbers here are those of the design, written by hand."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skill_train.core import errors

PROMISED = {
    "UsageError": 2,
    "DecisionNeeded": 3,
    "AccessError": 4,
    "TrainingFailed": 5,
    "VerificationFailed": 6,
    "NotInstalled": 7,
    "Temporary": 8,
    "Interrupted": 130,
    "NativeCrash": 1,
}


def test_every_error_has_its_promised_exit_code() -> None:
    kinds = [k for k in errors.SkillTrainError.__subclasses__() if k.__module__ == errors.__name__]
    assert {kind.__name__: kind.exit_code for kind in kinds} == PROMISED


def test_every_exit_code_is_explained() -> None:
    assert list(errors.EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 130]
    assert all(errors.EXIT_CODES.values())


def test_the_hierarchy_is_drawn_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    drawn = [line for line in errors.__doc__.splitlines() if "── " in line]
    assert {line.split()[1]: int(line.split("exit ")[1].split()[0]) for line in drawn} == PROMISED


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 7, 8])
def test_an_error_survives_the_way_through_a_child(code: int) -> None:
    sent = {"code": "unreadable_dataset", "message": "line 3", "expected": "JSON", "got": "{", "hint": "fix it"}
    error = errors.from_exit_code(code, sent)
    assert error.exit_code == code
    assert error.as_dict() == sent


def test_a_child_that_says_nothing_has_failed_in_training() -> None:
    error = errors.from_exit_code(139, {})
    assert (error.exit_code, error.code) == (5, "unknown")
    assert error.message


def test_nearest_names_the_close_word_only() -> None:
    assert errors.nearest("learning_rat", ["learning_rate", "seed"]) == " (did you mean 'learning_rate'?)"
    assert errors.nearest("zzz", ["learning_rate", "seed"]) == ""


def test_nearest_names_the_words_that_begin_so() -> None:
    """The nearest to a10g by letters is a machine of eight GPUs."""
    flavors = ["cpu-basic", "a10g-small", "a10g-large", "a10g-largex2", "a10g-largex4", "a100x8"]
    assert errors.nearest("a10g", flavors) == " (did you mean 'a10g-small' or 'a10g-large' or 'a10g-largex2'?)"
    assert errors.nearest("a1", ["a10g-small", "a2"]) == ""  # too short to mean all that begin so


def test_an_error_of_a_rename_names_what_is_in_the_way(tmp_path: Path) -> None:
    """It named the temporary file alone, which was whole."""
    (tmp_path / "merge.json").mkdir()
    (tmp_path / "part").touch()
    with pytest.raises(OSError) as caught:
        (tmp_path / "part").replace(tmp_path / "merge.json")
    told = errors.system_error(caught.value)
    assert (told.code, told.got) == ("system_error", str(tmp_path / "merge.json"))
    assert told.message.endswith(f": {tmp_path}/part → {tmp_path}/merge.json")


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (MemoryError(), True),
        # torch 2.13's words, for more than there is on the processor and on a GPU
        (RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("a bug"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_no_bug(error: Exception, known: bool) -> None:
    explained = errors.out_of_memory(error)
    assert (explained is not None) is known
    assert explained is None or (explained.exit_code, explained.code) == (3, "out_of_memory")


# What `merge` and training ended with when their address space was limited to 0.36 to 1.6 GB (Linux, glibc, torch 2.13,
# trl 1.16, pyarrow 26) [ran].
MAPPED = "libtorch_cpu.so: failed to map segment from shared object"
ARROW = f"The pyarrow installation is not built with support for 'dataset' (_dataset.so: {MAPPED[17:]})"
NO_THREAD = "can't start new thread"


def _with_cause() -> Exception:
    """trl's: the cause has no text."""
    error = RuntimeError("Failed to import trl.trainer.sft_trainer because of the following error (look up …):\n")
    error.__cause__ = MemoryError()
    return error


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RuntimeError("unable to mmap 39195600 bytes from file <a.safetensors>: Cannot allocate memory (12)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError(f"{MAPPED}: Cannot allocate memory"), True),
        (_with_cause(), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "out of memory.jsonl"), False),
        (ImportError(f"{MAPPED}: Operation not permitted"), False),  # a disk that is mounted noexec
        (ImportError("cannot import name 'x' from 'torch'"), False),
        # Without a limit it is not known: a disk that is mounted noexec, or the limit of processes, say the same.
        (ImportError(MAPPED), False),
        (RuntimeError(NO_THREAD), False),
    ],
)
def test_the_words_of_libraries_that_got_no_memory(error: Exception, known: bool) -> None:
    assert (errors.out_of_memory(error) is not None) is known


@pytest.mark.parametrize("error", [ImportError(MAPPED), ImportError(ARROW), RuntimeError(NO_THREAD)], ids=str)
def test_under_a_limit_of_the_address_space_it_is_memory(error: Exception, address_space: None) -> None:
    explained = errors.out_of_memory(error)
    assert explained is not None and str(error) in explained.message
    assert errors.out_of_memory(ImportError(f"{MAPPED}: Operation not permitted")) is None


@pytest.fixture
def address_space() -> Iterator[None]:
    """A limit that nothing here reaches: 64 TB."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


UNRELATED = [  # seen when the address space was full, to the last megabyte [ran]
    "SystemError('error return without exception set')",
    "SystemError('<function _find_and_load at 0x7fd30e917ce0> returned NULL without setting an exception')",
    """ImportError("cannot import name 'NP_SUPPORTED_MODULES' from 'torch._dynamo.utils'")""",
]
FULL = """
import mmap, resource
from skill_train.core import errors
from skill_train.program.events import explanation
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
def known(error):
    return errors.out_of_memory(error) is not None, explanation(error) is not None
print(known(THIS))
kept = []
try:
    while True:
        kept.append(mmap.mmap(-1, 1 << 20))
except OSError:
    kept.clear()
print(known(THIS), known(KeyError()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of the address space")
@pytest.mark.parametrize("error", UNRELATED)
def test_in_an_address_space_that_was_full_it_is_memory(error: str) -> None:
    program = [sys.executable, "-c", FULL.replace("THIS", error)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["(False, False)", "(True, True) (False, False)"], done.stderr


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", True),
        ("memory allocation of 6 bytes failed\nskipping backtrace printing to avoid potential recursion", True),
        ("cannot allocate memory for thread-local data: ABORT", True),  # glibc, with exit code 127
        ("terminate called after throwing an instance of 'std::runtime_error'", False),
    ],
)
def test_the_last_words_of_native_code_that_got_no_memory(words: str, known: bool) -> None:
    assert errors.died_of_memory(words) is known
