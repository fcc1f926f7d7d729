"""The importance matrix of an export: which one is used, and what the answer says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from skill_train.commands._mixing import AUTO, is_mix
from skill_train.core.console import Console
from skill_train.core.errors import UsageError
from skill_train.run.export_record import ExportedFile
from skill_train.run.folder import RunDir

if TYPE_CHECKING:
    from skill_train.gguf.importance import Matrix
    from skill_train.gguf.quality.texts import RunTexts

NONE = "none"


class MatrixAnswer(TypedDict, total=False):
    """What is said of the importance matrix of one file."""

    file: str
    data: str
    mean_kl_with: float
    mean_kl_without: float


@dataclass(frozen=True)
class MatrixOrder:
    """What was asked for, and what a matrix can be computed of.

    Attributes:
        choice: `auto`, `none` or a file; None leaves it to the measurement, where there is text.
        run: whose rows are used; None for a model folder.
    """

    choice: str | None
    run: RunDir | None

    @property
    def file(self) -> Path | None:
        return None if self.choice in (None, AUTO, NONE) else Path(str(self.choice))

    @property
    def is_possible(self) -> bool:
        """Whether there is a matrix, or one can be made unless the run has too few rows."""
        return self.file is not None or (self.run is not None and self.choice != NONE)


def require_possible(order: MatrixOrder, *, mix: bool) -> None:
    """Refuses what needs the rows of a run, and a file that is not an importance matrix, before anything is made.

    Args:
        mix: a mix of types is wanted too.
    """
    if order.run is None and (order.choice == AUTO or mix):
        raise UsageError(
            f"{'--quant' if mix else '--imatrix'} auto measures on the rows of a run, and this is a model folder",
            code="bad_usage",
            expected="skill-train export-gguf RUN",
            hint="a model folder takes --imatrix FILE of llama-imatrix, and types such as --quant q4_k_m",
        )
    if order.file is not None:
        from skill_train.llama.importance.file import read_matrix

        read_matrix(order.file)


def texts_for(order: MatrixOrder, source: Path, types: list[str], console: Console) -> RunTexts:
    """The texts that these types, which are still to be made, are measured on; empty where nothing is measured."""
    from skill_train.gguf.quality.texts import FEWEST, RunTexts, texts_of
    from skill_train.llama.gguf_header import read_gguf

    by_matrix = order.choice in (None, AUTO) and any(map(_uses_matrix, types))
    if order.run is None or not (by_matrix or any(map(is_mix, types))):
        return RunTexts([], [], "", "nothing is measured")
    with console.progress("importance matrix") as progress:
        progress(0, 1, "reading the training rows")
        texts = texts_of(order.run, read_gguf(source))
    if texts.lacking and texts.tokens >= FEWEST:
        console.warn("imatrix", f"only the rows of {texts.source} are used, {texts.tokens} tokens: {texts.lacking}")
    return texts


def matrix_for(order: MatrixOrder, source: Path, texts: RunTexts, types: list[str], console: Console) -> Matrix | None:
    """The matrix for these types, which are still to be made; None where none is used.

    Raises:
        UsageError: the file is not an importance matrix, or not of this model.
    """
    from skill_train.gguf import importance
    from skill_train.gguf.quality.texts import FEWEST

    if order.file is not None:
        return importance.matrix_of(order.file, source, console.warn)
    if order.choice == NONE or order.run is None or not any(map(_uses_matrix, types)):
        return None
    if texts.tokens < FEWEST and order.choice is None:
        if texts.lacking:
            console.warn("imatrix", f"there is no importance matrix: {importance.why_of(texts)}")
        return None
    with console.progress("importance matrix") as progress:
        request = importance.MatrixRequest(
            source=source,
            texts=texts,
            file=order.run.path / importance.FILE,
            record=order.run.record("imatrix"),
        )
        computed = importance.compute_matrix(request, progress=progress).record
    if computed.unused_experts:
        console.warn(
            "imatrix",
            f"{computed.unused_experts} expert matrices saw no token ({texts.why}): all their columns count equally",
        )
    return importance.matrix_of(request.file, source, console.warn, texts=texts.compared)


def _uses_matrix(quant: str) -> bool:
    """Whether a type looks at a matrix. So does a mix."""
    from skill_train.gguf.importance import takes_matrix

    return takes_matrix(quant) or is_mix(quant)


def matrix_answers(files: Mapping[str, ExportedFile]) -> dict[str, MatrixAnswer]:
    """For each file that was made with an importance matrix, or compared with one that was."""
    answers: dict[str, MatrixAnswer] = {}
    for name, file in files.items():
        answer: MatrixAnswer = {}
        if use := file.get("imatrix"):
            answer |= {"file": use["file"], "data": use["data"]}
        if choice := file.get("choice"):
            answer["mean_kl_with"] = choice["with_matrix"]["mean_kl"]
            answer["mean_kl_without"] = choice["without_matrix"]["mean_kl"]
        if answer:
            answers[name] = answer
    return answers
