"""`export-gguf --for DEVICE`: measures the files of an export, and chooses the file to ship."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skill_train.commands._command import BITS, DIVERGENCE, PATH, argument, option
from skill_train.commands._export import AUTO, DEFAULT_TYPES, Export, target_of
from skill_train.commands._for_device import (
    CANDIDATES,
    DeviceAnswer,
    DeviceOptions,
    DeviceQuestion,
    answer_of,
    device_question,
    with_i_quants,
)
from skill_train.commands._outputs import ListedFile
from skill_train.commands._projector import CHOICES
from skill_train.core.console import Console
from skill_train.core.errors import DecisionNeeded
from skill_train.estimate.decode import is_looked_up
from skill_train.estimate.fit import FileSizes, exported_file
from skill_train.run.folder import RunDir

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import MixFile
    from skill_train.run.export_record import Measured


@dataclass(frozen=True)
class _FileOptions:
    """The options that the help shows before the options of a device."""

    run: Path | None = argument(PATH, required=False)
    quant: str | None = option(
        None,
        "Types, separated by commas; f16, bf16 or f32 sets the type of the unquantized file. auto measures a type for "
        f"each matrix, under --max-size or --bits.  [default: {DEFAULT_TYPES}; with --for {','.join(CANDIDATES)}, and "
        "up to two i-quants]",
    )
    out: Path | None = option(
        None, "Folder for the files of a model folder; those of RUN go to RUN/gguf.  [default: FOLDER-gguf]", PATH
    )
    lora: bool = option(False, "Export only the adapter, for use with a GGUF file of its base model.")
    mmproj: str | None = option(
        None,
        "Type of the second file of a vision model, its tower and projector; none for text only.  [default: f16; none "
        "for a run on text alone of a model such as Gemma 3]",
        CHOICES,
    )
    modelfile: str | None = option(
        None,
        "Type of the file that the Modelfile names.  [default: the one that it names; at first the last of --quant]",
    )
    imatrix: str | None = option(
        None,
        "Importance matrix for types below q6: auto computes it from RUN's training rows and uses it where that is "
        "measured to help, FILE is one of llama-imatrix.  [default: auto for RUN, none for a model folder]",
        metavar="auto|none|FILE",
    )


@dataclass(frozen=True)
class ExportOptions(DeviceOptions, _FileOptions):
    max_kl: float | None = option(
        None, "Largest divergence from the unquantized file, in nats a token, for --for.", DIVERGENCE
    )
    bits: float | None = option(None, "Average bits per weight for --quant auto, instead of --max-size.", BITS)
    mix: Path | None = option(
        None, "File with the types of --quant auto, such as quantize.json of another run; none is measured.", PATH
    )
    llama_cpp: Path | None = option(
        None, "llama.cpp checkout with the converter.  [default: downloaded once and cached]", PATH
    )
    fetch: bool = option(False, "Download the converter into the cache; without RUN, do nothing else.")

    @property
    def is_for_device(self) -> bool:
        return self.for_device is not None or self.memory is not None


def wanted_types(options: ExportOptions) -> tuple[list[str], MixTarget | MixFile | None]:
    """The types to make, and the size of a mix or its types. For a device the default types are the candidates, and
    `--max-size` is a limit unless a mix is requested too."""
    usual = ",".join(CANDIDATES) if options.is_for_device else DEFAULT_TYPES
    quant = options.quant if options.quant is not None else AUTO if options.mix else usual
    is_mixed = AUTO in [name.strip().lower() for name in quant.split(",")]
    size = options.max_size if is_mixed or not options.is_for_device else None
    return target_of(quant, size, options.bits, options.mix)


def question_of(options: ExportOptions, model: Path, *, matrix: bool) -> DeviceQuestion | None:
    """The device that the files are for; None without a device. `matrix` as in `with_i_quants`."""
    from skill_train.commands._planning import machine_with_speeds
    from skill_train.model.folder import read_model

    # Without a device, --max-size is the size of a mix.
    device_options = options if options.is_for_device else dataclasses.replace(options, max_size=None)
    facts = read_model(model, weights_needed=False)
    question = device_question(device_options, facts, machine_with_speeds(), max_kl=options.max_kl)
    if question is None or options.quant is not None or options.mix is not None:
        return question
    return with_i_quants(question, facts, matrix=matrix)


def shipped(
    export: Export, outputs: list[ListedFile], source: Path, projector: ListedFile | None, console: Console
) -> tuple[DeviceAnswer | None, DecisionNeeded | None]:
    """The answer about each requested file on the device, and the error if none fits; None without a device.

    Args:
        outputs: the files, each made from `source`.
        projector: the second file of a vision model; None without one.
    """
    from skill_train.model.folder import read_model

    question = export.question
    if question is None:
        return None, None
    files = [file for file in outputs if file["quant"] in export.types]
    model, measured = read_model(export.model, weights_needed=False), _measured(export.run, source, files, console)
    candidates = []
    for file in files:
        sizes = _sizes(file, projector["bytes"] if projector else 0)
        candidate = exported_file(model, question.target, file["quant"], question.context, sizes)
        if figures := measured.get(file["path"]):
            candidate = msgspec.structs.replace(candidate, kl=figures["mean_kl"], same_top1=figures["same_top1"])
        candidates.append(candidate)
    candidate_quants = {candidate.quant for candidate in candidates}
    if untried := [quant for quant in question.i_quants if quant not in candidate_quants]:
        why = f"i-quants: {', '.join(untried)} need an importance matrix, and there were too few rows to make one of"
        target = msgspec.structs.replace(question.target, reasons=(*question.target.reasons, why))
        question = dataclasses.replace(question, target=target)
    return answer_of(question, candidates)


def _sizes(file: ListedFile, projector_bytes: int) -> FileSizes:
    """The bytes of a file, and the parts of it that are not read for each token."""
    from skill_train.llama.gguf_header import read_gguf
    from skill_train.llama.speed.cached import read_tensors

    header = read_gguf(Path(file["path"]))
    tensors = read_tensors(header)
    unread = sum(tensor.n_bytes for tensor in header.tensors.values()) - sum(tensor.n_bytes for tensor in tensors)
    looked_up = sum(tensor.elements for tensor in tensors if is_looked_up(tensor.kind.lower()))
    read = sum(tensor.elements for tensor in tensors)
    return FileSizes(file["bytes"], unread, projector_bytes, looked_up / read if read else 0.0)


def _measured(run: RunDir | None, source: Path, files: list[ListedFile], console: Console) -> dict[str, Measured]:
    """The distance of each file from the unquantized file, by path. Empty without a run, or if it has too few rows."""
    from skill_train.gguf.quality.distance import distance, judging
    from skill_train.gguf.quality.texts import FEWEST, texts_of
    from skill_train.llama.gguf_header import read_gguf

    if run is None:
        return {}
    header = read_gguf(source)
    texts = texts_of(run, header).compared
    if sum(map(len, texts)) < FEWEST:
        return {}
    vocabulary = len(header.tokens)
    with console.progress("measuring the files") as progress, judging(source, texts, vocabulary, progress) as judge:
        return {file["path"]: distance(judge, Path(file["path"]), progress) for file in files}
