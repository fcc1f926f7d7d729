"""`wait`: waits until a job has ended, or until a time limit."""

import math
import time
from dataclasses import dataclass

from skill_train.cloud import find_run
from skill_train.commands._command import MOST_HOURS, RUN, Number, argument, command, option
from skill_train.commands._job_snapshot import Snapshot, snapshot, until_end
from skill_train.commands._status_view import state_result
from skill_train.core import waiting
from skill_train.core.console import Console, Result
from skill_train.core.errors import SkillTrainError, Temporary, from_exit_code
from skill_train.program.events import ErrorWords

_LAST_SNAPSHOT_SECONDS = 5.0  # after the time limit of `wait`, for the last state of the job


@dataclass(frozen=True)
class WaitOptions:
    run: str = argument(RUN)
    timeout: float | None = option(
        None, "Seconds to wait; the job continues.  [default: no limit]", Number(0, MOST_HOURS * 3600)
    )


@command(WaitOptions, "skill-train wait runs/tickets-cloud", "skill-train wait runs/tickets-cloud --timeout 3600")
def wait(options: WaitOptions, console: Console) -> Result:
    """Wait until a job has ended; exit 0 if it completed, otherwise explain why it failed. Waits through outages."""
    timeout = options.timeout
    end = math.inf if timeout is None else time.monotonic() + timeout
    with waiting.until(end + _LAST_SNAPSHOT_SECONDS):  # answers of the Hub after that time are left out
        cloud = find_run.find(options.run)
        if cloud.now.live:
            seconds = None if timeout is None else max(end - time.monotonic(), 0.0)
            cloud = until_end(cloud, console, seconds)
        state = snapshot(cloud, console, in_time=timeout is not None and cloud.now.live)
    return state_result(state.data(), state.next(), _wait_error(state, timeout))


def _wait_error(state: Snapshot, timeout: float | None) -> SkillTrainError | None:
    hint, waited = f"skill-train wait {state.cloud.word}", f"after {timeout or 0:g} seconds of waiting"
    if state.now.stage == "SCHEDULING":
        message = f"the job has no machine yet {waited}"
        return Temporary(message, code="not_started", expected="RUNNING", got=state.now.stage, hint=hint)
    if state.now.live:
        message = f"the job still runs {waited}; it goes on"
        return Temporary(message, code="still_running", expected="COMPLETED", got=state.now.stage, hint=hint)
    if state.story is None:
        return None
    story = state.story
    error_words: ErrorWords = {
        "code": story.code,
        "message": story.message,
        "expected": story.help,
        "got": story.got,
        "hint": story.next[0] if story.next else "",
    }
    return from_exit_code(story.exit_code, error_words)
