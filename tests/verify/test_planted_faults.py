"""Faults planted in correct f16 files of many families, and the whole of `verify` on each: the check whose matter it
is fails, and the correct file beside them passes. `make test` has a few of them; `make walks` has all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import gguf_faults
import tiny_families
from gguf_faults import Fault
from skill_train.verify.step import VerifyRequest, verify

pytestmark = pytest.mark.slow

# What only llama.cpp can tell, which runs the file; and one of each list.
SHORT = ("norm by 2 %", "an ordinary token as eos", "scores reversed", "template changed for tools")
LONG = ("qwen2", "qwen3", "mistral", "gpt2", "llama-spm", "qwen3moe", "olmo2", "gemma2", "gemma4", "granite", "smollm3")


def missed(family: str, work: Path, only: tuple[str, ...] | None = None) -> dict[str, set[str]]:
    """Checks that failed on each file whose fault its own check did not name; and those on the correct file."""
    reference, good = tiny_families.converted(family)
    faults = {name: one for name, one in gguf_faults.of_file(good).items() if only is None or name in only}
    assert only is None or set(faults) == set(only)
    files = [Path(shutil.copy(good.path, work / "good.gguf"))]
    files += [one.plant(good, work / f"{number}.gguf") for number, one in enumerate(faults.values())]
    record = verify(
        VerifyRequest(
            reference=reference,
            adapter=None,
            base=None,
            ggufs=files,
            rows=[],
            held_out=[],
            record=work / "verify.json",
            tokens=64,
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    ).record
    failed: dict[str, set[str]] = {file.name: set() for file in files}
    for check in record.checks:
        if check.verdict == "fail":
            failed[check.file].add(check.name)
    expected: dict[str, Fault | None] = dict(zip(failed, (None, *faults.values()), strict=True))
    names = dict(zip(failed, ("nothing", *faults), strict=True))
    return {
        names[file]: failed[file]
        for file, fault in expected.items()
        if (failed[file] if fault is None else fault.check not in failed[file])
    }


def test_each_fault_of_a_few_is_named(tmp_path: Path) -> None:
    assert missed("gemma", tmp_path, SHORT) == {}


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", LONG)
def test_each_fault_is_named(family: str, tmp_path: Path) -> None:
    assert missed(family, tmp_path) == {}
