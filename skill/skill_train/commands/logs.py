"""`logs`: shows the log of a job, and follows it."""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from skill_train.cloud import find_run, poll
from skill_train.commands._command import MOST_COUNTED, RUN, Whole, argument, command, option
from skill_train.core import waiting
from skill_train.core.console import Console, Result

_LOG_BYTES = 6000  # bytes of log lines in a JSON answer, which has at most 8 KB


@dataclass(frozen=True)
class LogsOptions:
    run: str = argument(RUN)
    follow: bool = option(False, "Keep printing until the job has ended.")
    tail: int | None = option(None, "Number of lines to show, from the end.  [default: all]", Whole(1, MOST_COUNTED))


@command(LogsOptions, "skill-train logs runs/tickets-cloud --tail 50", "skill-train logs runs/tickets-cloud --follow")
def logs(options: LogsOptions, console: Console) -> Result:
    """Show the log of a job, and reconnect when the connection breaks. JSON holds the last lines that fit."""
    cloud = find_run.find(options.run)
    tail = options.tail
    live = options.follow and cloud.now.live
    there = [] if live and tail is None else poll.log_so_far(cloud.now, tail=None if live else tail)
    there_asked = there[-tail:] if tail else there
    last, count = deque[str](maxlen=tail or 1000), len(there_asked)
    for line in there_asked:
        last.append(line)
        console.line(line, now=options.follow)
    if live:
        with waiting.for_hours():
            for line in poll.lines(cloud.record, cloud.now.id, skip=len(there)):
                last.append(line)
                count += 1
                console.line(line, now=True)
        cloud = find_run.with_current_job(cloud)
    shown = _that_fit(last)
    data = {
        "job_id": cloud.now.id,
        "stage": cloud.now.stage,
        "lines": shown,
        "left_out": min(count, tail or count) - len(shown),
    }
    following = [f"skill-train {'wait' if cloud.now.live else 'status'} {cloud.word}"]
    return Result(data, next=following if console.mode == "json" else [])  # a person sees only the lines


def _that_fit(lines: Iterable[str]) -> list[str]:
    kept_lines: list[str] = []
    size = 0
    for line in reversed(list(lines)):
        size += len(json.dumps(line, ensure_ascii=False).encode(errors="replace")) + 2
        if size > _LOG_BYTES:
            break
        kept_lines.append(line)
    return kept_lines[::-1]
