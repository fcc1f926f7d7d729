"""The quantized files of an export: the importance matrix first, then the types of a mix, then the files."""

from __future__ import annotations

from pathlib import Path

from skill_train.commands._export import Export
from skill_train.commands._importance import NONE, matrix_for, texts_for
from skill_train.commands._mixing import MixBasis, mix_for
from skill_train.core.console import Console
from skill_train.run import export_record
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import StepResult


def quantize_files(export: Export, source: Path, console: Console) -> StepResult[ExportRecord] | None:
    """Makes the files of one unquantized file that are not there yet; None where no other type is wanted. The i-quants
    that `--for` tries are left out where there is no whole importance matrix.

    Raises:
        UsageError: llama.cpp refuses a type, or the importance matrix or the mix is not of this model.
        DecisionNeeded: there is not enough disk or memory.
    """
    from skill_train.gguf import quantize
    from skill_train.gguf.mix_file import MixFile, require_fit, require_matrix

    types, mix = export.to_quantize(source), export.mix
    if not types:
        return None
    record = export.records / "quantize.json"
    outputs = export_record.read(record).outputs if record.is_file() else {}
    here = {entry["quant"] for name, entry in outputs.items() if (export.records / name).is_file()}
    pending = [kind for kind in types if kind not in here]
    replayed = mix if isinstance(mix, MixFile) and mix.name in pending else None
    if replayed is not None:
        require_fit(replayed, source)
    measured = pending if mix is None else [*pending, mix.name]
    texts = texts_for(export.matrix, source, measured, console)
    matrix = matrix_for(export.matrix, source, texts, pending, console)
    if replayed is not None:
        require_matrix(replayed, matrix, source)
    unable = export.question.i_quants if export.question and (matrix is None or matrix.missing) else ()
    left_out = [kind for kind in unable if kind in pending]
    mixes = {}
    if mix is not None:
        earlier = next((entry for entry in outputs.values() if entry["quant"] == mix.name), None)
        mixes[mix.name] = mix_for(mix, MixBasis(source, matrix, texts, export.records), earlier, console)
    with console.progress("quantizing") as progress:
        return quantize.quantize(
            quantize.QuantizeRequest(
                source=source,
                out=export.out,
                record=record,
                name=export.name,
                quants=[kind for kind in types if kind not in mixes and kind not in left_out],
                matrix=matrix,
                without_matrix=export.matrix.choice == NONE,
                mixes=mixes,
            ),
            progress=progress,
            warn=console.warn,
        )
