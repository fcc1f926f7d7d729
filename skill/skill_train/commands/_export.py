"""Makes the quantized files of `export-gguf`, and first the importance matrix and the types of a mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.commands._for_device import CANDIDATES, DeviceQuestion
from skill_train.core.console import Console
from skill_train.core.errors import UsageError, quoted
from skill_train.estimate.targets import parse_bytes
from skill_train.run import export_record
from skill_train.run.export_record import ExportedFile, ExportRecord, QuantizedFile
from skill_train.run.folder import RunDir, StepResult

if TYPE_CHECKING:
    from skill_train.gguf.importance import Matrix
    from skill_train.gguf.mix import Mix, MixTarget
    from skill_train.gguf.mix_file import MixFile
    from skill_train.gguf.quality.texts import RunTexts

UNQUANTIZED = ("f16", "bf16", "f32")
AUTO, NONE = "auto", "none"
DEFAULT_TYPES = "q8_0,q4_k_m"


@dataclass(frozen=True)
class Export:
    """The model to convert, and the places of its files and records."""

    model: Path
    out: Path
    records: Path
    name: str
    types: list[str]  # the wanted types, in the user's order
    matrix: MatrixOrder  # the requested importance matrix
    modelfile: str | None  # the type that the Modelfile shall name; None keeps the file that it names
    mmproj: str | None  # the type of the projector's file; None without a projector
    question: DeviceQuestion | None  # the device that the files are for; None without a device
    run: RunDir | None = None  # None for a model folder, which has no mix
    mix: MixTarget | MixFile | None = None  # the size of a mix of types, or its types; None without a mix

    @property
    def unquantized(self) -> list[str]:
        return [kind for kind in self.types if kind in UNQUANTIZED]

    def to_quantize(self, source: Path) -> list[str]:
        done = self.unquantized[:1]
        return [kind for kind in self.types if kind not in done and not source.name.endswith(f"-{kind}.gguf")]


def quantize_files(export: Export, source: Path, console: Console) -> StepResult[ExportRecord] | None:
    """Makes the missing quantized files of one unquantized file; None if no other type is wanted. The i-quants that
    `--for` tries are left out without a complete importance matrix.

    Raises:
        UsageError: llama.cpp refuses a type, or the importance matrix or the mix is not of this model.
        DecisionNeeded: there is not enough disk or memory.
    """
    from skill_train.gguf import quantize
    from skill_train.gguf.mix_file import MixFile, require_fit, require_matrix

    types, mix = export.to_quantize(source), export.mix
    if not types:
        return None
    outputs = export_record.outputs(export.records, "quantize")
    here = {entry["quant"] for name, entry in outputs.items() if (export.records / name).is_file()}
    pending = [kind for kind in types if kind not in here]
    replayed = mix if isinstance(mix, MixFile) and mix.name in pending else None
    if replayed is not None:
        require_fit(replayed, source)
    measured = pending if mix is None else [*pending, mix.name]
    texts = _texts_for(export.matrix, source, measured, console)
    matrix = matrix_for(export.matrix, source, texts, pending, console)
    _warn_of_texts(console, texts, matrix)
    if replayed is not None:
        require_matrix(replayed, matrix, source)
    unable = export.question.i_quants if export.question and (matrix is None or matrix.missing) else ()
    left_out = [kind for kind in unable if kind in pending]
    mixes = {}
    if mix is not None:
        earlier = next((entry for entry in outputs.values() if entry["quant"] == mix.name), None)
        mixes[mix.name] = _mix_for(export, source, matrix, texts, earlier, console)
    with console.progress("quantizing") as progress:
        return quantize.quantize(
            quantize.QuantizeRequest(
                source=source,
                out=export.out,
                record=export.records / "quantize.json",
                name=export.name,
                quants=[kind for kind in types if kind not in mixes and kind not in left_out],
                matrix=matrix,
                without_matrix=export.matrix.choice == NONE,
                mixes=mixes,
            ),
            progress=progress,
            warn=console.warn,
        )


# --- The importance matrix ---


@dataclass(frozen=True)
class MatrixOrder:
    """The value of `--imatrix`, and the run whose rows a matrix can be computed from."""

    choice: str | None  # `auto`, `none` or a file; None: a measurement decides, if there is enough text
    run: RunDir | None  # the run whose rows are used; None for a model folder

    @property
    def file(self) -> Path | None:
        return None if self.choice in (None, AUTO, NONE) else Path(str(self.choice))

    @property
    def is_possible(self) -> bool:
        """Whether there is a matrix, or it can be computed if the run has enough rows."""
        return self.file is not None or (self.run is not None and self.choice != NONE)


def require_possible(order: MatrixOrder, *, mix: bool) -> None:
    """Refuses, before anything is made, a mix or a matrix that needs the rows of a run if there is no run, and a file
    that is not an importance matrix."""
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


def _texts_for(order: MatrixOrder, source: Path, types: list[str], console: Console) -> RunTexts:
    """The texts that the missing `types` are measured on; empty if nothing is measured."""
    from skill_train.gguf.quality.texts import RunTexts, texts_of
    from skill_train.llama.gguf_header import read_gguf

    by_matrix = order.choice in (None, AUTO) and any(map(_uses_matrix, types))
    if order.run is None or not (by_matrix or any(map(is_mix, types))):
        return RunTexts([], [], "", "nothing is measured")
    with console.progress("importance matrix") as progress:
        progress(0, 1, "reading the training rows")
        return texts_of(order.run, read_gguf(source))


def _warn_of_texts(console: Console, texts: RunTexts, matrix: Matrix | None) -> None:
    """Warns if only samples of the rows could be read, or if the matrix is an earlier one from more rows."""
    from skill_train.gguf.quality.texts import FEWEST, TRAINING

    if not texts.lacking or texts.tokens < FEWEST:
        return
    message = f"only the rows of {texts.source} are used, {texts.tokens} tokens"
    if matrix is not None and not matrix.is_explicit and matrix.use["data"].startswith(TRAINING):
        message = f"{matrix.use['file']} of an earlier export is kept, of {matrix.use['data']}"
        message += f"; files are compared on rows of {texts.source}, which it may have read"
    console.warn("imatrix", f"{message}: {texts.lacking}")


def matrix_for(order: MatrixOrder, source: Path, texts: RunTexts, types: list[str], console: Console) -> Matrix | None:
    """The importance matrix for the missing `types`; None if none is used.

    Raises:
        UsageError: the file is not an importance matrix, or is of another model.
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
            source=source, texts=texts, file=order.run.path / importance.FILE, record=order.run.record("imatrix")
        )
        computed = importance.compute_matrix(request, progress=progress).record
    if computed.unused_experts:
        console.warn(
            "imatrix",
            f"{computed.unused_experts} expert matrices saw none of {computed.tokens} tokens: their columns are alike",
        )
    return importance.matrix_of(request.file, source, console.warn, texts=texts.compared)


def _uses_matrix(quant: str) -> bool:
    """Whether a type uses an importance matrix. A mix does."""
    from skill_train.gguf.importance import takes_matrix

    return takes_matrix(quant) or is_mix(quant)


def matrix_answers(files: Mapping[str, ExportedFile]) -> dict[str, dict[str, object]]:
    """The figures of the importance matrix for each file that was made with one, or compared with such a file."""
    answers: dict[str, dict[str, object]] = {}
    for name, file in files.items():
        answer: dict[str, object] = {}
        if use := file.get("imatrix"):
            answer |= {"file": use["file"], "data": use["data"]}
        if choice := file.get("choice"):
            answer["mean_kl_with"] = choice["with_matrix"]["mean_kl"]
            answer["mean_kl_without"] = choice["without_matrix"]["mean_kl"]
        if answer:
            answers[name] = answer
    return answers


# --- The mix of types ---


def target_of(
    quant: str, max_size: str | None, bits: float | None, mix: Path | None = None
) -> tuple[list[str], MixTarget | MixFile | None]:
    """The names in `--quant` without `auto`, and the size of the mix, or its types from the file `mix`. The second is
    None without `auto`.

    Raises:
        UsageError: `auto` has no size or two sizes, or the file has no such mix.
    """
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import read_mix

    names = [name.strip() for name in quant.split(",")]
    others = [name for name in names if name.lower() != AUTO]
    asked = {"--max-size": max_size, "--bits": None if bits is None else f"{bits:g}"}
    sizes = {option: value for option, value in asked.items() if value is not None}
    mixed = {} if mix is None else {"--mix": str(mix)}
    if len(others) == len(names):
        types = AUTO if quant in (DEFAULT_TYPES, ",".join(CANDIDATES)) else f"{quant},{AUTO}"
        if mix is not None:
            raise _misused("--mix has the types of --quant auto, which is not asked for", types, mixed | sizes)
        if sizes:
            raise _misused(f"{next(iter(sizes))} is the size of a mix of types, which --quant auto makes", types, sizes)
        return others, None
    if len(sizes) > 1 or not (sizes or mix):
        raise _misused(
            "--quant auto needs --max-size or --bits, but not both", quant, mixed | (sizes or {"--bits": "4.5"})
        )
    most = None if max_size is None else round(parse_bytes(max_size, "--max-size"))
    target = MixTarget(most_bytes=most, bits=bits) if sizes else None
    return others, target if mix is None else read_mix(mix, target)


def is_mix(quant: str) -> bool:
    """Whether a type is the name of a mix, as `gguf.mix` and `gguf.mix_file` make it."""
    return quant.startswith(("auto-", "mix-"))


def _mix_for(
    export: Export, source: Path, matrix: Matrix | None, texts: RunTexts, earlier: ExportedFile | None, console: Console
) -> Mix:
    """The types of a mix: from a file, from an earlier export of the same name, or else newly chosen.

    Raises:
        UsageError: no mix is that small, or there is too little text to measure on.
    """
    from skill_train.gguf import mix
    from skill_train.gguf.mix_file import MixFile

    target = export.mix
    assert target is not None  # a mix is wanted
    if isinstance(target, MixFile):
        return mix.replayed(target.types, {"replayed": target.source}, source, texts, target.most_bytes)
    if earlier is not None and "tensor_types" in earlier and "mix" in earlier:
        origin: QuantizedFile = {"mix": earlier["mix"]}
        return mix.replayed(earlier["tensor_types"], origin, source, texts, target.most_bytes)
    request = mix.MixRequest(source, target, matrix, texts, export.records / mix.FILE)
    with console.progress("measuring the types of each matrix") as progress:
        chosen = mix.choose_mix(request, progress)
    figures = chosen.origin["mix"]
    if figures["measured_pairs"] < figures["pairs"]:
        console.warn(
            "imatrix",
            f"there was time for {figures['measured_pairs']} of {figures['pairs']} measurements; the others were "
            "estimated",
        )
    return chosen


def _misused(why: str, types: str, options: Mapping[str, str]) -> UsageError:
    """The error of a wrong combination of options. The hint repeats the options, and of two sizes only the first."""
    chosen = [name for name in options if name != "--bits" or "--max-size" not in options]
    asked = "".join(f" {name} {quoted(options[name])}" for name in chosen)
    return UsageError(
        why,
        code="bad_usage",
        expected="--quant auto --max-size 400MB, --quant auto --bits 4.5, or --quant auto --mix FILE",
        hint=f"skill-train export-gguf RUN --quant {quoted(types)}{asked}",
    )
