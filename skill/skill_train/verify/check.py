"""Verdicts, the findings so far, the check that counts faults, and small helpers that several checks share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.core.errors import SkillTrainError
from skill_train.run import export_record
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check, Finding, NotChecked


def judged(figure: float, bounds: tuple[float, float]) -> Verdict:
    """`warn` above the first bound; `fail` above the second, or if the figure is NaN; otherwise `pass`."""
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


@dataclass
class Findings:
    """The checks made so far, and those that could not be made."""

    checks: list[Check] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            if isinstance(finding, Check):
                self.checks.append(finding)
            else:
                self.not_checked.append(finding)

    def doubt_tuned(self) -> None:
        """If `tuned` does not pass and the file is not the exported one, says so at the start of the check's detail."""
        why = {one.file: one.detail for one in self.checks if one.name == "digest" and one.verdict != "pass"}
        for place, one in enumerate(self.checks):
            if one.name == "tuned" and one.verdict != "pass" and one.file in why:
                detail = f"{why[one.file]}, and may hold another tuning; if it is this one: {one.detail}"
                self.checks[place] = msgspec.structs.replace(one, detail=detail)

    def doubt_source(self, files: list[Path], reference: dict[str, FileDigest]) -> None:
        """Warns of a file that was converted from another model than the reference, as the records beside it say."""
        other = {file.name for file in files if _weights(export_record.converted_from(file)) - _weights(reference)}
        for place, one in enumerate(self.checks):
            if one.name == "digest" and one.verdict == "pass" and one.file in other:
                detail = f"{one.detail}, and its record says that it was made of another model than the reference"
                self.checks[place] = msgspec.structs.replace(one, verdict="warn", detail=detail)

    def leave_out(self, file: str, reason: str) -> None:
        """Reports a file that is not judged. The verdict of the proof is then not a pass."""
        self.add(
            Check("file", file, "warn", "not checked", "checked", reason), NotChecked("everything else", file, reason)
        )

    def cannot_run(self, file: str, error: SkillTrainError, what: str) -> None:
        """Reports a file that llama.cpp refuses, or crashes on."""
        self.add(
            Check("loads", file, "fail", error.code, "runs", f"{error.message} ({error.got[-200:]})"),
            NotChecked("everything else", file, f"llama.cpp cannot run {what}"),
        )


def _weights(model: dict[str, FileDigest]) -> set[str]:
    """The sha256 of the files of weights."""
    return {digest["sha256"] for name, digest in model.items() if name.endswith(".safetensors")}
