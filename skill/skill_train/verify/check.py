"""Verdicts, the check that counts faults, and words that several checks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of the verdicts; `pass` when there is none."""
    return max(verdicts, key=_ORDER.index, default="pass")


def judged(figure: float, bounds: tuple[float, float]) -> Verdict:
    """Above the first bound it is a warning; above the second, or no number, a failure."""
    return "pass" if figure <= bounds[0] else "warn" if figure <= bounds[1] else "fail"


def first_few(items: list[str], most: int = 3) -> str:
    """The first few as one sentence, and how many more there are."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def parting_place(one: Sequence[object], other: Sequence[object]) -> int:
    """The first place where the two differ; the length of the shorter one if it begins the other."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def problems(name: str, file: str, faults: list[str], *, looked_at: int, good: str) -> Check:
    """A check that counts faults. One fault fails it, and its detail names the first three."""
    figures = {"looked_at": looked_at}
    return Check(name, file, "fail" if faults else "pass", len(faults), 0, first_few(faults) or good, figures)
