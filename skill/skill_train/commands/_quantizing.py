"""The quantized files of an export: the importance matrix first, then the types of a mix, then the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.commands._importance import NONE, MatrixOrder, matrix_for, texts_for
from skill_train.commands._mixing import MixBasis, mix_for
from skill_train.core.console import Console
from skill_train.run import export_record
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import StepResult

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import MixFile


@dataclass(frozen=True)
class QuantizeOrder:
    """What is made of one unquantized file.

    Attributes:
        types: with the name of the mix.
        mix: what it may weigh, or its types; None where none is among the types.
        i_quants: of the types, those that are left out where there is no whole importance matrix.
    """

    source: Path
    out: Path
    records: Path
    name: str
    types: list[str]
    matrix: MatrixOrder
    mix: MixTarget | MixFile | None
    i_quants: tuple[str, ...] = ()


def quantize_files(order: QuantizeOrder, console: Console) -> StepResult[ExportRecord]:
    """Makes the files that are not there yet.

    Raises:
        UsageError: llama.cpp refuses a type, or the importance matrix or the mix is not of this model.
        DecisionNeeded: there is not enough disk or memory.
    """
    from skill_train.gguf import quantize
    from skill_train.gguf.mix_file import MixFile, require_fit, require_matrix

    record = order.records / "quantize.json"
    made = export_record.read(record).outputs if record.is_file() else {}
    here = {entry["quant"] for name, entry in made.items() if (order.records / name).is_file()}
    pending = [kind for kind in order.types if kind not in here]
    replayed = order.mix if isinstance(order.mix, MixFile) and order.mix.name in pending else None
    if replayed is not None:
        require_fit(replayed, order.source)
    measured = pending if order.mix is None else [*pending, order.mix.name]
    texts = texts_for(order.matrix, order.source, measured, console)
    matrix = matrix_for(order.matrix, order.source, texts, pending, console)
    if replayed is not None:
        require_matrix(replayed, matrix, order.source)
    unable = order.i_quants if matrix is None or matrix.missing else ()
    left_out = [kind for kind in unable if kind in pending]
    mixes = {}
    if order.mix is not None:
        earlier = next((entry for entry in made.values() if entry["quant"] == order.mix.name), None)
        basis = MixBasis(order.source, matrix, texts, order.records)
        mixes[order.mix.name] = mix_for(order.mix, basis, earlier, console)
    with console.progress("quantizing") as progress:
        return quantize.quantize(
            quantize.QuantizeRequest(
                source=order.source,
                out=order.out,
                record=record,
                name=order.name,
                quants=[kind for kind in order.types if kind not in mixes and kind not in left_out],
                matrix=matrix,
                without_matrix=order.matrix.asked == NONE,
                mixes=mixes,
            ),
            progress=progress,
            warn=console.warn,
        )
