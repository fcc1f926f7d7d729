"""`report`: which runs, and where the page goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skill_train.core.console import Console, Result, clean
from skill_train.run.folder import open_run


def report(console: Console, *, runs: tuple[Path, ...], out: Path | None) -> Result:
    """One page about all the runs, beside the records of the first."""
    from skill_train.report.step import report as step

    opened = [open_run(path) for path in runs]
    with console.progress("report") as progress:
        data = step(opened, out=out or opened[0].path / "report.html", progress=progress)

    def human(rich: Any) -> None:
        for run in data["runs"]:
            rich.print(clean(f"{run['run']}: {run['headline']}"), markup=False, soft_wrap=True)
        for one in data["same"]:
            rich.print(clean(f"{one['b']} and {one['a']}: {one['headline']}"), markup=False, soft_wrap=True)
        rich.print(clean(data["report"]), markup=False, soft_wrap=True)

    following = [one["command"] for run in data["runs"] for one in run["missing"][:1]]
    return Result(data, human=human, quiet=data["report"], next=following)
