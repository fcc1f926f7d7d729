"""What a person reads of a proof, and where it lies."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import whole_records
from skill_train.commands import verify
from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.run.verify_record import Proof


def test_what_was_not_checked_is_named_below_the_table() -> None:
    left_out = {"name": "answers", "file": "m-f16.gguf", "reason": "no prompt fits into the context"}
    checks = [{"name": "logits", "file": "m-f16.gguf", "verdict": "pass", "detail": ""}]
    proof = msgspec.convert(whole_records.proof(checks=checks, not_checked=[left_out]), Proof)
    drawn = io.StringIO()
    verify._draw(Console(file=drawn, width=100), proof)
    assert drawn.getvalue().splitlines()[-1] == "m-f16.gguf answers: not checked, no prompt fits into the context"


def test_the_proof_of_another_file_is_not_lost(tmp_path: Path) -> None:
    """A second file beside it needs a name of its own for its proof, unless the first is verified again with it."""
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    for file in (one, two):
        file.write_bytes(b"GGUF")
    digest = {"bytes": 4, "sha256": "0" * 64}
    write_json(tmp_path / "verify.json", whole_records.whole_proof(inputs={"ggufs": {"one.gguf": digest}}))
    with pytest.raises(UsageError, match=r"is the proof of one\.gguf") as caught:
        verify._record_beside((two,))
    assert (caught.value.code, "--out" in caught.value.hint) == ("output_exists", True)
    assert verify._record_beside((two, one)) == tmp_path / "verify.json"
    one.unlink()
    assert verify._record_beside((two,)) == tmp_path / "verify.json"


def test_an_out_that_is_named_keeps_the_proof_of_other_files_too(tmp_path: Path) -> None:
    """Such as that of another run, whose files may have the same names."""
    mine, other = (tmp_path / name / "gguf" / "run-f16.gguf" for name in ("mine", "other"))
    for file in (mine, other):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"GGUF")
    record = other.parents[1] / "verify.json"
    write_json(record, whole_records.whole_proof(inputs={"ggufs": {other.name: {"bytes": 4, "sha256": "0" * 64}}}))
    with pytest.raises(UsageError, match=r"other/verify\.json is the proof of run-f16\.gguf") as caught:
        verify._record_beside((mine,), record)
    assert caught.value.code == "output_exists"
    assert verify._record_beside((other,), record) == record
    assert verify._record_beside((mine,), tmp_path / "new.json") == tmp_path / "new.json"
    shutil.copy(record, tmp_path / "mine.json")  # its files are not here: an older proof to replace
    assert verify._record_beside((mine,), tmp_path / "mine.json") == tmp_path / "mine.json"
