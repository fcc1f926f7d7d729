"""The quantized files of an export: the importance matrix first, then the types of a mix, then the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.commands._importance import NONE, MatrixOrder, matrix_for, texts_for
from skill_train.commands._mixing import mix_for
from skill_train.core.console import Console
from skill_train.run import export_record

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.quantize import Quantized


@dataclass(frozen=True)
class QuantizeOrder:
    """What is made of one unquantized file.

    Attributes:
        types: with the name of the mix.
        mix: what it may weigh; None where none is among the types.
    """

    source: Path
    out: Path
    records: Path
    name: str
    types: list[str]
    matrix: MatrixOrder
    mix: MixTarget | None


def quantize_files(order: QuantizeOrder, console: Console) -> Quantized:
    """Makes the files that are not there yet.

    Raises:
        UsageError: llama.cpp refuses a type, or the importance matrix is not of this model.
        DecisionNeeded: there is not enough disk or memory.
    """
    from skill_train.gguf import mix, quantize

    record = order.records / "quantize.json"
    made = export_record.read(record).outputs if record.is_file() else {}
    here = {entry["quant"] for name, entry in made.items() if (order.records / name).is_file()}
    pending = [kind for kind in order.types if kind not in here]
    texts = texts_for(order.matrix, order.source, pending, console)
    matrix = matrix_for(order.matrix, order.source, texts, pending, console)
    mixes = {}
    if order.mix is not None:
        earlier = next((entry for entry in made.values() if entry["quant"] == order.mix.name), None)
        request = mix.MixRequest(order.source, order.mix, matrix, texts, order.records / mix.FILE)
        mixes[order.mix.name] = mix_for(request, earlier, console)
    with console.progress("quantizing") as progress:
        return quantize.quantize(
            quantize.QuantizeRequest(
                source=order.source,
                out=order.out,
                record=record,
                name=order.name,
                quants=[kind for kind in order.types if kind not in mixes],
                matrix=matrix,
                without_matrix=order.matrix.asked == NONE,
                mixes=mixes,
            ),
            progress=progress,
            warn=console.warn,
        )
