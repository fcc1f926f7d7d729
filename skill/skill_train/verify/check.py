"""One check of a proof, and the verdict of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]
_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """What was measured on one file, and what it may be at most.

    Attributes:
        name: a stable word, such as `logits`.
        file: name of the GGUF file.
        figure: the measured value that the verdict rests on.
        threshold: what it is held against.
        detail: one sentence for a person.
        figures: further values, for programs.
    """

    name: str
    file: str
    verdict: Verdict
    figure: float | int | str | None
    threshold: float | int | str | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NotChecked:
    """A check that could not be made on one file, and why."""

    name: str
    file: str
    reason: str


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; `pass` for none."""
    return max(verdicts, key=_ORDER.index, default="pass")


def problems(name: str, file: str, found: list[str], *, looked_at: int, good: str) -> Check:
    """A check that counts faults: any of them fails it, and the first ones are told."""
    detail = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    figures = {"looked_at": looked_at}
    return Check(name, file, "fail" if found else "pass", len(found), 0, detail or good, figures)
