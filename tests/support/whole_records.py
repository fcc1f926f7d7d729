"""Whole records of `verify`, `evaluate`, `demo` and `submit`: a test says only what it is about."""

from __future__ import annotations

from typing import Any

_STEP = {"schema": "skill-train/step/1", "options": {}, "versions": {}, "outputs": {}, "seconds": 1.0}
_STEP |= {"finished_at": "2026-11-21T10:00:00Z"}
_CHECK = {"figure": 0, "threshold": 0, "figures": {}}
_OF_A_MODEL = ("types", "metadata", "vocabulary", "weights", "tensors", "loads", "tokens", "chat_template")
_OF_A_MODEL += ("special_tokens", "logits", "tuned", "answers")
_MODEL = {"backend": "transformers", "why": "asked for", "device": "cpu", "loss": None, "perplexity": None}
_MODEL |= {"exact_match": None, "asked_rows": 0, "score": None, "scored_rows": 0, "tokens_per_second": None}


def proof(**given: Any) -> dict[str, Any]:
    """`verify.json`; what `inputs` and `checks` leave out is filled in."""
    inputs = {"reference": {}, "adapter": None, "base": None, "ggufs": {}, "rows": "", "held_out": "", "unread": []}
    whole = _STEP | {"step": "verify", "options": {"tokens": 2048}, "verdict": "pass", "not_checked": []} | given
    whole["inputs"] = inputs | given.get("inputs", {})
    whole["checks"] = [_CHECK | check for check in given.get("checks", [])]
    return {"samples": {"tokens": 2048}, **whole}


def whole_proof(**given: Any) -> dict[str, Any]:
    """A proof that a command reads: of each file it has all checks, those that are not given passed."""
    whole = proof(**given)
    for file in whole["inputs"]["ggufs"]:
        found = {one["name"] for one in (*whole["checks"], *whole["not_checked"]) if one["file"] == file}
        kind = ("projector", "projector_weights") if file.startswith("mmproj") else _OF_A_MODEL
        passed = _CHECK | {"file": file, "verdict": "pass", "detail": ""}
        whole["checks"] += [passed | {"name": name} for name in ("file", "digest", *kind) if name not in found]
    return whole


def evaluation(**given: Any) -> dict[str, Any]:
    """`evaluate.json`; what `inputs`, `models` and `differences` leave out is filled in."""
    options = {"score": "exact", "pattern": None, "backend": "auto"}
    whole = _STEP | {"step": "evaluate", "options": options, "rows": 20, "asked": 20, "answer_tokens": 100} | given
    whole["inputs"] = {"models": {}, "rows": "", "scorer": None} | given.get("inputs", {})
    whole["models"] = [_MODEL | {"reason": ""} | one for one in given.get("models", [])]
    whole["differences"] = given.get("differences", [])
    return {"score": None, "answers": [], **whole}


def demo(*stages: dict[str, Any]) -> dict[str, Any]:
    """`demo.json`."""
    stage = {"bytes": 1, "exact_match": 1.0, "rows": 100, "mean_kl": None, "tokens_per_second": None, "verdict": None}
    whole = {key: value for key, value in _STEP.items() if key not in ("versions", "seconds")}
    return whole | {"step": "demo", "inputs": {}, "figures": {"stages": [stage | each for each in stages]}}


def cloud(*jobs: dict[str, Any], **given: Any) -> dict[str, Any]:
    """`cloud.json`."""
    job = {"state": "starting", "flavor": "t4-small", "timeout_seconds": 600, "asked_at": "2026-11-21T10:00:00Z"}
    whole = {"schema": "skill-train/cloud/1", "backend": "hf_jobs", "run_id": "0" * 12, "plan_hash": "1" * 16}
    whole |= {"namespace": "ada", "hub_model_id": "ada/tickets", "bucket": None, "folder": None, "data": None}
    return whole | given | {"jobs": [{"number": number} | job | each for number, each in enumerate(jobs, 1)]}
