"""A merge that is stored in bf16 is not base + adapter to the last bit. A correct file of it passes without a warning,
whatever rounding costs that model; a wrong one fails, though rounding costs more than the fault does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import families
import gguf_maker
import merging
import tiny
import verify_rows
from gguf_faults import planted, times
from skill_train.llama.gguf_header import read_gguf
from skill_train.merge.step import MergeRequest, merge
from skill_train.run.verify_record import Check
from skill_train.verify.step import VerifyRequest, verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param("mixtral", marks=pytest.mark.torture), "llama-spm"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run folder as far as `verify` looks: an adapter of a small tuning, its merge in bf16, and an f16 file."""
    work = tmp_path_factory.mktemp(request.param)
    if request.param == "mixtral":
        base = families.base("mixtral", work / "base", tokenizer=True)
    else:
        base = tiny.cached("llama-spm", dtype="bfloat16")
    adapter, rows = merging.adapter(base, work / "adapter", size=0.004, seed=2), verify_rows.chats(base, 6)
    merged = merge(
        MergeRequest(
            base=base,
            adapter=adapter,
            out=work / "merged",
            record=work / "merge.json",
            rows=rows,
            dtype=None,
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    )
    (work / "gguf").mkdir()
    gguf_maker.export(work / "merged", work / "gguf")
    return {"base": base, "adapter": adapter, "rows": rows, "work": work, "merge": merged.record}


def of_mixtral(work: Path, size: float, seed: int, dtype: str) -> dict[str, Any]:
    """What `checks` judges: an adapter of a tiny Mixtral, its merge in that type, and an f16 file."""
    base = families.base("mixtral", work / "base", tokenizer=True)
    adapter, rows = merging.adapter(base, work / "adapter", size=size, seed=seed), verify_rows.chats(base, 8)
    merge(
        MergeRequest(
            base=base, adapter=adapter, out=work / "merged", record=work / "merge.json", rows=rows, dtype=dtype
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    )
    (work / "gguf").mkdir()
    gguf_maker.export(work / "merged", work / "gguf")
    return {"work": work, "base": base, "adapter": adapter, "rows": rows}


def test_a_correct_file_of_a_mixture_merged_in_fp32_passes(tmp_path: Path) -> None:
    """f16 turns one router of 477 tokens: 0.14 nats there, 6e-7 on all others."""
    found = checks(of_mixtral(tmp_path, 0.03, 1, "float32"), tokens=512)
    assert found["logits"].figures["max_kl"] > 0.05  # a router did turn
    assert {name: found[name].verdict for name in ("logits", "tuned", "answers")} == dict.fromkeys(
        ("logits", "tuned", "answers"), "pass"
    )


def test_a_router_that_the_weights_of_an_f16_file_turn_turns_in_the_noise_too(tmp_path: Path) -> None:
    """What goes into products turns none of this model: 3.1e-7 nats. Its weights in f16 turn one: 4e-4."""
    logits = checks(of_mixtral(tmp_path, 0.03, 5, "float32"), tokens=512)["logits"]
    assert logits.verdict == "pass" and logits.figures["max_kl"] > 0.05
    noise = float(logits.detail.rpartition("moves this model by ")[2].removesuffix(" nats"))
    assert noise == pytest.approx(logits.figure, rel=0.1), logits.detail


def test_a_correct_file_of_a_mixture_answers_as_its_merge_in_bf16(tmp_path: Path) -> None:
    """The merge turns routers: no answer is that of what was trained, by up to 0.25 nats. One has a tie of its own."""
    answers = checks(of_mixtral(tmp_path, 0.03, 5, "bfloat16"))["answers"]
    assert answers.verdict == "pass" and answers.figure < 0.01, answers.detail


def checks(made: dict[str, Any], file: Path | None = None, tokens: int = 256) -> dict[str, Check]:
    work = made["work"]
    record = verify(
        VerifyRequest(
            reference=made["base"],
            adapter=made["adapter"],
            base=made["base"],
            ggufs=[file or work / "gguf" / "model-f16.gguf"],
            rows=made["rows"],
            held_out=made["rows"],
            record=work / "verify.json",
            tokens=tokens,
        ),
        progress=lambda *_: None,
        warn=lambda *_: None,
    ).record
    return {check.name: check for check in record.checks}


@pytest.fixture(scope="module")
def correct(made: dict[str, Any]) -> dict[str, Check]:
    """The checks of the file of that merge."""
    return checks(made)


def test_a_correct_file_of_a_bf16_merge_gets_no_warning(made: dict[str, Any], correct: dict[str, Check]) -> None:
    assert {name: correct[name].verdict for name in ("logits", "answers")} == {"logits": "pass", "answers": "pass"}
    # A correct f16 file of a model that needs no rounding is at most 2e-6 off (references/verification.md).
    assert correct["logits"].figure < 5e-6
    assert correct["logits"].figures["rounding"] == pytest.approx(made["merge"].gate["figures"]["mean_kl"], rel=2)
    assert "BF16" in correct["logits"].detail
    # What tables show is the distance from what was trained, the rounding of the merge included.
    assert correct["logits"].figures["trained_kl"] == pytest.approx(correct["logits"].figures["rounding"], rel=0.5)
    assert correct["tuned"].figures["share"] == pytest.approx(1, abs=0.005)


def test_a_fault_below_the_cost_of_rounding_is_found(made: dict[str, Any]) -> None:
    """One norm 2 % larger."""
    work = made["work"]
    (work / "wrong").mkdir(exist_ok=True)
    right, wrong = read_gguf(work / "gguf" / "model-f16.gguf"), work / "wrong" / "model-f16.gguf"
    planted(right, "blk.1.attn_norm.weight", times(1.02), wrong)
    assert checks(made, wrong)["logits"].verdict != "pass"


def test_rounding_that_costs_as_much_as_the_tuning_is_told(made: dict[str, Any], correct: dict[str, Check]) -> None:
    moved, cost = made["merge"].gate["effect"]["kl_between"], correct["logits"].figures["rounding"]
    assert (correct["tuned"].verdict == "warn") == (cost > correct["tuned"].figures["kl_between"] / 2)
    assert correct["tuned"].verdict != "warn" or "--dtype float32" in correct["tuned"].detail
    assert moved > 0
