"""The verdict of many checks, and the check that counts faults."""

from __future__ import annotations

from collections.abc import Iterable

from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of the verdicts; `pass` when there is none."""
    return max(verdicts, key=_ORDER.index, default="pass")


def problems(name: str, file: str, faults: list[str], *, looked_at: int, good: str) -> Check:
    """A check that counts faults. One fault fails it, and its detail names the first three."""
    detail = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    figures = {"looked_at": looked_at}
    return Check(name, file, "fail" if faults else "pass", len(faults), 0, detail or good, figures)
