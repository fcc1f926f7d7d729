"""The verdict of many checks, and the check that counts faults."""

from __future__ import annotations

from collections.abc import Iterable

from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; `pass` for none."""
    return max(verdicts, key=_ORDER.index, default="pass")


def problems(name: str, file: str, found: list[str], *, looked_at: int, good: str) -> Check:
    """A check that counts faults: any of them fails it, and the first ones are told."""
    detail = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    figures = {"looked_at": looked_at}
    return Check(name, file, "fail" if found else "pass", len(found), 0, detail or good, figures)
