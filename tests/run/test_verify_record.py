"""A proof whose checks were taken out is none: no command takes it for a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.run import verify_record

DEMO = Path(__file__).parents[1] / "support" / "data" / "runs" / "demo" / "verify.json"


def _without(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(proof: dict[str, Any]) -> None:
        proof["checks"] = [one for one in proof["checks"] if one["name"] not in names]

    return edit


def _failed(proof: dict[str, Any]) -> None:
    proof["checks"][5]["verdict"] = "fail"  # and the verdict of the whole stays


def _of_another_file(proof: dict[str, Any]) -> None:
    proof["inputs"]["ggufs"]["other-q8_0.gguf"] = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_without("logits"), "demo-run-f16.gguf lacks logits"),
        (_without("weights", "tuned", "answers"), "demo-run-f16.gguf lacks answers, tuned, weights"),
        (_without("chat_template"), "demo-run-f16.gguf lacks chat_template"),
        (lambda proof: proof.update(checks=[]), "demo-run-f16.gguf lacks"),
        (_of_another_file, "other-q8_0.gguf lacks"),
        (_failed, "the verdict is pass, and the worst of its checks fail"),
    ],
)
def test_a_proof_without_its_checks_is_refused(
    edit: Callable[[dict[str, Any]], None], why: str, tmp_path: Path
) -> None:
    proof = json.loads(DEMO.read_text())
    edit(proof)
    path = tmp_path / "verify.json"
    path.write_text(json.dumps(proof))
    with pytest.raises(UsageError, match=why) as raised:
        verify_record.read(path)
    assert raised.value.code == "broken_record"


def _left_out(proof: dict[str, Any]) -> None:
    """As of a damaged file: one check fails, and nothing else was looked at."""
    file = "demo-run-f16.gguf"
    proof["checks"] = [one for one in proof["checks"] if one["file"] != file]
    proof["checks"].append({"name": "file", "file": file, "verdict": "fail", "figure": 0, "threshold": 0, "detail": ""})
    proof["not_checked"] = [{"name": "everything else", "file": file, "reason": "the file is damaged"}]
    proof["verdict"] = "fail"


def _not_judged(proof: dict[str, Any]) -> None:
    _without("tuned")(proof)
    proof["not_checked"] = [{"name": "tuned", "file": file, "reason": "no base"} for file in proof["inputs"]["ggufs"]]


def _as_an_adapter(proof: dict[str, Any]) -> None:
    _without("vocabulary", "tensors", "chat_template", "tokens", "special_tokens", "trained_is_shipped")(proof)


def _with_a_projector(proof: dict[str, Any]) -> None:
    file = "mmproj-demo-run-f16.gguf"
    proof["inputs"]["ggufs"][file] = {"bytes": 1, "sha256": "0" * 64}
    check = {"file": file, "verdict": "pass", "figure": 0, "threshold": 0, "detail": ""}
    proof["checks"] += [check | {"name": name} for name in ("digest", "file", "projector", "projector_weights")]


@pytest.mark.parametrize("edit", [lambda proof: None, _left_out, _not_judged, _as_an_adapter, _with_a_projector])
def test_a_whole_proof_is_read(edit: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    proof = json.loads(DEMO.read_text())
    edit(proof)
    path = tmp_path / "verify.json"
    path.write_text(json.dumps(proof))
    assert set(verify_record.read(path).inputs.ggufs) == set(proof["inputs"]["ggufs"])
