"""The error of a finished run whose smoke checks failed."""

from __future__ import annotations

from skill_train.commands._shell import quoted
from skill_train.core.errors import TrainingFailed
from skill_train.run.folder import RunDir
from skill_train.run.train_record import TrainRecord


def smoke_failure(run: RunDir, record: TrainRecord) -> TrainingFailed | None:
    """The error of a finished run, local or a job, whose smoke checks failed."""
    failed = [check for check in record.checks if check.verdict == "fail"]
    if not failed:
        return None
    return TrainingFailed(
        f"the smoke test failed: {', '.join(check.name for check in failed)}",
        code="smoke_failed",
        expected="every check to pass",
        got="; ".join(check.detail for check in failed),
        hint=f"read {quoted(run.record('train'))}",
    )
