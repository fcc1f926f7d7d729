"""`report`: writes an HTML page about one or more runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.commands._command import PATH, argument, command, option
from skill_train.commands._ended_training import warn_of_base_rows
from skill_train.core.console import Console, Result
from skill_train.run.folder import open_run

if TYPE_CHECKING:
    from skill_train.report.step import Report


@dataclass(frozen=True)
class ReportOptions:
    runs: tuple[Path, ...] = argument(PATH, nargs=-1)
    out: Path | None = option(
        None, "File for the page.  [default: report.html, or compared.html, in the first run]", PATH
    )


@command(
    ReportOptions, "skill-train report runs/first", "skill-train report runs/first runs/second --out compared.html"
)
def report(options: ReportOptions, console: Console) -> Result:
    """Write an HTML page about one run, or about several runs side by side. The page loads nothing from the network."""
    from skill_train.report import step

    opened = [open_run(path) for path in options.runs]
    out = options.out or opened[0].path / ("report.html" if len(opened) == 1 else "compared.html")
    evaluated = [run for run in opened if run.record("evaluate").is_file()]
    may_know = tuple(run.path for run in evaluated if warn_of_base_rows(console, run))
    with console.progress("report") as progress:
        data = step.report(opened, out=out, progress=progress, warn=console.warn, base_may_know=may_know)
    following = dict.fromkeys(run["next"] for run in data["runs"] if run["next"])
    return Result(data, human=lambda rich: _draw(rich, data), quiet=data["report"], next=[*following])


def _draw(rich: Any, data: Report) -> None:
    for run in data["runs"]:
        rich.print(f"{run['run']}: {run['headline']}", soft_wrap=True)
    for pair in data["same"]:
        rich.print(f"{pair['b']} and {pair['a']}: {pair['headline']}", soft_wrap=True)
    rich.print(data["report"], soft_wrap=True)
