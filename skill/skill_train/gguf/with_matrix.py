"""Makes one quantized file with an importance matrix, and keeps the one without where that is nearer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.files import scratch_file
from skill_train.core.worker import run_worker
from skill_train.gguf.importance import Matrix
from skill_train.gguf.quality.distance import Judge, distance
from skill_train.gguf.quantize_worker import QuantizeJob
from skill_train.run.export_record import MatrixChoice, QuantizedFile

WORKER = "skill_train.gguf.quantize_worker"


@dataclass(frozen=True)
class WithMatrix:
    """The importance matrix for one type.

    Attributes:
        judge: compares the file with one without; None where the type needs a matrix, or nothing is compared.
    """

    matrix: Matrix
    judge: Judge | None

    def make(self, job: QuantizeJob, part: Path, final: Path, progress: Bar) -> QuantizedFile:
        """Writes `part`, which gets the name `final`. Returns what is recorded of the matrix."""
        run_worker(WORKER, {**job, "out": str(part), "matrix": str(self.matrix.file)}, progress=progress)
        if self.judge is None:
            return {"imatrix": self.matrix.use}
        with scratch_file(final) as plain:
            run_worker(WORKER, {**job, "out": str(plain)}, progress=progress)
            near, plainly = distance(self.judge, part, progress), distance(self.judge, plain, progress)
            choice = MatrixChoice(with_matrix=near, without_matrix=plainly)
            if near["mean_kl"] < plainly["mean_kl"]:
                return {"imatrix": self.matrix.use, "choice": choice}
            os.replace(plain, part)
        return {"choice": choice}
