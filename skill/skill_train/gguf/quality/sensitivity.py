"""Measures the divergence of each matrix with each type. Stores every figure, so an interrupted call can continue.

The first line of the file is the `Basis`. The following lines are an `Outcome` each.
"""

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from skill_train.core.console import Bar
from skill_train.core.files import write_text
from skill_train.core.worker import run_worker
from skill_train.llama.importance.sensitivity_worker import Outcome, SensitivityJob, TypeTrial
from skill_train.machine.limits import require_memory

WORKER = "skill_train.llama.importance.sensitivity_worker"
Line = TypeVar("Line", "Basis", Outcome)
MOST_SECONDS = 1200.0  # the most time that one call measures
_WORK_BYTES = 700_000_000


class Basis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured: the sha256 of the GGUF file, of the importance matrix and of the token ids."""

    model: str
    matrix: str
    data: str


def measured(job: SensitivityJob, basis: Basis, progress: Bar) -> dict[tuple[str, str], float]:
    """The mean KL divergence by matrix and type, in nats. Pairs that there was no time for are missing.

    Args:
        job: the job with all wanted trials. Trials whose figures are already in `job.out` are not repeated.

    Raises:
        NativeCrash, VerificationFailed: llama.cpp crashed, or refuses the file.
        DecisionNeeded: there was not enough memory.
    """
    divergences = _read_measured(job, basis)
    trials = [trial for trial in job.trials if (trial.tensor, trial.kind) not in divergences]
    if trials:
        require_memory(Path(job.gguf).stat().st_size + _WORK_BYTES, "measuring the types of each matrix")
        run_worker(WORKER, msgspec.structs.replace(job, trials=trials), object, progress=progress)
        divergences = _read_measured(job, basis)
    return divergences


def in_order(kinds_by_tensor: dict[str, list[str]]) -> list[TypeTrial]:
    """The trials in the order to measure them: one type of every matrix, then the next type of every matrix. When the
    time ends, every matrix has some figures. The middle types come first, because they estimate the others best."""
    trials: list[TypeTrial] = []
    turns = {tensor: _from_the_middle(kinds) for tensor, kinds in kinds_by_tensor.items()}
    for place in range(max(map(len, turns.values()), default=0)):
        trials += [TypeTrial(tensor, kinds[place]) for tensor, kinds in turns.items() if place < len(kinds)]
    return trials


def _from_the_middle(kinds: list[str]) -> list[str]:
    middle = (len(kinds) - 1) / 2
    return [kinds[at] for at in sorted(range(len(kinds)), key=lambda at: abs(at - middle))]


def _read_measured(job: SensitivityJob, basis: Basis) -> dict[tuple[str, str], float]:
    """The figures in the file for the job's trials. A missing file, or one of another basis, is replaced by a file
    without figures. Broken lines of a killed call are removed, so that the next figure begins a new line."""
    file, wanted = Path(job.out), {(trial.tensor, trial.kind) for trial in job.trials}
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    first, *lines = text.splitlines() or [""]
    outcomes = {line: outcome for line in lines if (outcome := _read(line, Outcome)) is not None}
    if _read(first, Basis) != basis:
        first, outcomes = json.dumps(msgspec.to_builtins(basis)), {}
    whole = "".join(f"{line}\n" for line in [first, *outcomes])
    if whole != text:
        write_text(file, whole)
    figures = {(outcome.tensor, outcome.kind): outcome.kl for outcome in outcomes.values()}
    return {pair: kl for pair, kl in figures.items() if pair in wanted}


def _read(line: str, kind: type[Line]) -> Line | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return None
