"""What the demo's table calls proven, and when it says that a promise was not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import whole_records
from skill_train.commands import demo
from skill_train.report.demo_record import Demo, Stage
from skill_train.run.folder import RunDir
from skill_train.run.verify_record import Proof

TEXT, PROJECTOR = "demo-f16.gguf", "mmproj-demo-f16.gguf"
LOGITS = {"name": "logits", "file": TEXT, "verdict": "pass", "detail": "", "figures": {"trained_kl": 0.25}}
PICTURES = {"name": "pictures", "file": TEXT, "verdict": "pass", "detail": "", "figures": {"mean_kl": 0.5}}
PIXELS = {"name": "projector", "file": PROJECTOR, "verdict": "pass", "detail": ""}


def proven(*checks: dict[str, Any], projector: str | None) -> tuple[float | None, str]:
    proof = msgspec.convert(whole_records.proof(checks=list(checks)), Proof)
    return demo._proven(proof, TEXT, projector)


def test_a_pair_has_the_divergence_behind_its_pictures_and_a_file_of_text_its_own() -> None:
    assert proven(LOGITS, PICTURES, PIXELS, projector=PROJECTOR) == (0.5, "pass")
    assert proven(LOGITS, projector=None) == (0.25, "pass")


def test_a_projector_that_failed_fails_each_file_that_needs_it() -> None:
    failed = PIXELS | {"verdict": "fail"}
    assert proven(LOGITS, PICTURES, failed, projector=PROJECTOR) == (0.5, "fail")


def test_a_pair_whose_pictures_were_not_judged_has_no_divergence() -> None:
    """Not that of its words, which it has too."""
    assert proven(LOGITS, PIXELS, projector=PROJECTOR) == (None, "pass")


def stages(**last: Any) -> list[Stage]:
    """A table that keeps every promise, but for what is given of its last row."""
    learned = {"verdict": "pass", "mean_kl": 0.1}
    rows = [{"stage": "base", "exact_match": 0.0}, {"stage": "adapter", "verdict": "pass"}]
    rows += [{"stage": "merged", **learned}, {"stage": "f16", **learned}, {"stage": "q4_k_m", **learned, **last}]
    return msgspec.convert(whole_records.demo(*rows), Demo).figures.stages


def test_a_table_that_keeps_every_promise_is_no_error() -> None:
    assert demo._missed(stages(), RunDir(Path("runs/demo"))) is None


@pytest.mark.parametrize(
    ("last", "got"),
    [
        ({"exact_match": 0.89}, "exact match 89%, verdict pass"),
        ({"verdict": "fail"}, "exact match 100%, verdict fail"),
        ({"mean_kl": None}, "exact match 100%, verdict pass, and no KL"),
    ],
)
def test_a_promise_that_was_not_kept_is_an_error(last: dict[str, Any], got: str) -> None:
    error = demo._missed(stages(**last), RunDir(Path("runs/demo")))
    assert error is not None and (error.code, error.got) == ("self_test_failed", got)
    assert "q4_k_m" in error.message


def test_each_method_has_its_own_folder() -> None:
    folders = {str(demo.DemoOptions(method).folder) for method in demo.METHODS}
    assert folders == {"runs/demo", "runs/demo-vision"}
    assert demo.DemoOptions("vision", Path("mine")).folder == Path("mine")
