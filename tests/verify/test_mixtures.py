"""A mixture of experts without an adapter: f16 rounds what goes into products, and routers turn at near-ties. A correct
file passes, however far that puts a token; a wrong one does not hide behind it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiny_families
from gguf_faults import planted, times
from skill_train.llama.gguf_header import read_gguf
from skill_train.run.verify_record import Check
from skill_train.verify.step import VerifyRequest, verify

pytestmark = pytest.mark.slow


def found(family: str, files: list[Path], record: Path) -> dict[tuple[str, str], Check]:
    """Checks of `verify` by file and name."""
    made = verify(
        VerifyRequest(
            reference=tiny_families.folder(family),
            adapter=None,
            base=None,
            ggufs=files,
            rows=[],
            held_out=[],
            record=record,
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    ).record
    return {(check.file, check.name): check for check in made.checks}


@pytest.mark.parametrize("family", [pytest.param("qwen3next", marks=pytest.mark.torture), "granitehybrid"])
def test_a_correct_file_passes_and_a_norm_by_two_percent_does_not(family: str, tmp_path: Path) -> None:
    good = Path(shutil.copy(tiny_families.gguf(family), tmp_path / "good.gguf"))
    wrong = planted(read_gguf(good), "blk.1.attn_norm.weight", times(1.02), tmp_path / "norm.gguf").path
    checks = found(family, [good, wrong], tmp_path / "verify.json")
    assert {name: check.detail for (file, name), check in checks.items() if file == "good.gguf"
            and check.verdict != "pass"} == {}  # fmt: skip
    assert checks["good.gguf", "logits"].figures["max_kl"] > 1e-3  # a router did turn
    assert checks["norm.gguf", "weights"].verdict == "fail"
    assert checks["norm.gguf", "logits"].verdict != "pass", checks["norm.gguf", "logits"]
