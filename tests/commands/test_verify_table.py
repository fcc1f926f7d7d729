"""What a person reads of a proof."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

import whole_records
from skill_train.commands import verify
from skill_train.run.verify_record import Proof


def test_what_was_not_checked_is_named_below_the_table() -> None:
    left_out = {"name": "answers", "file": "m-f16.gguf", "reason": "no prompt fits into the context"}
    checks = [{"name": "logits", "file": "m-f16.gguf", "verdict": "pass", "detail": ""}]
    proof = msgspec.convert(whole_records.proof(checks=checks, not_checked=[left_out]), Proof)
    drawn = io.StringIO()
    verify._draw(Console(file=drawn, width=100), proof)
    assert drawn.getvalue().splitlines()[-1] == "m-f16.gguf answers: not checked, no prompt fits into the context"
