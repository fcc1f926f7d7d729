"""A clock that was set back: what was written before lies in the future."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skill_train.commands._job_snapshot import _moment, age
from skill_train.program.folders.checkpoints import is_complete
from skill_train.program.watch import Watch

AN_HOUR = 3600


def _checkpoint(folder: Path, step: int, ahead: float) -> Path:
    made = folder / "checkpoints" / f"checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "optimizer.pt").write_bytes(b"state")
    os.utime(made, (time.time() + ahead,) * 2)
    return made


def test_the_newest_checkpoint_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    """transformers' own rotation takes the one of the earliest time for the oldest, and would remove the newest
    (`rotate_checkpoints(use_mtime=True)` of trainer.py, 5.23)."""
    watch = Watch(tmp_path, {"held_out": []}, {}, None, keep=2)
    for step in (2, 4):
        _checkpoint(tmp_path, step, ahead=AN_HOUR + step)
    newest = _checkpoint(tmp_path, 10, ahead=0)
    watch.mark_complete(newest)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["checkpoint-10", "checkpoint-4"]
    assert is_complete(newest)


@pytest.mark.parametrize(("seconds", "known"), [(-AN_HOUR, False), (AN_HOUR, True)])
def test_no_age_is_below_zero(seconds: int, known: bool) -> None:
    found = age(datetime.now(UTC) - timedelta(seconds=seconds))
    assert (found is not None) is known
    assert found is None or found == pytest.approx(seconds, abs=60)
    assert age(None) is None


def test_an_end_that_no_calendar_has_is_not_known() -> None:
    assert _moment(datetime(2026, 11, 27, tzinfo=UTC), 90.0) == "2026-11-27T00:01:30Z"
    assert _moment(datetime(2026, 11, 27, tzinfo=UTC), 2**62) is None
