"""The exit codes are a promise; the numbers here are those of the design, written by hand."""

from __future__ import annotations

import pytest

from skill_train import errors

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
    sent = {"code": "broken_line", "message": "line 3", "expected": "JSON", "got": "{", "hint": "fix it"}
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
