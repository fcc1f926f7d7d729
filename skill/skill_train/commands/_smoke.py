"""The error of a finished run whose smoke checks failed."""

from __future__ import annotations

from typing import Any

from skill_train.commands._shell import quoted
from skill_train.core.errors import TrainingFailed
from skill_train.run.folder import RunDir


def smoke_failure(run: RunDir, record: dict[str, Any]) -> TrainingFailed | None:
    """The error of a finished run, local or a job, whose smoke checks failed."""
    failed = [check for check in record.get("checks", []) if check["verdict"] == "fail"]
    if not failed:
        return None
    return TrainingFailed(
        f"the smoke test failed: {', '.join(check['name'] for check in failed)}",
        code="smoke_failed",
        expected="every check to pass",
        got="; ".join(check["detail"] for check in failed),
        hint=f"read {quoted(run.record('train'))}",
    )
