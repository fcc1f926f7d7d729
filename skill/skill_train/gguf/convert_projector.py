"""The step that writes the vision tower and the projector of a model to a GGUF file of their own (`mmproj`).

llama.cpp reads pictures with two files: that of the language model and this one. The converter can write a file that
llama.cpp cannot load, and answer 0 (a Gemma 3 without the norm of its projector, llama-cpp-python 0.3.36), so both
are loaded before either gets its name.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.core.files import whole_file
from skill_train.core.memory import peak_memory_bytes
from skill_train.gguf.convert import ConvertRequest, convert_with, converter_versions, refuse_existing
from skill_train.llama.float_type import choose
from skill_train.llama.get_converter import Toolchain
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.pictures.compare import Pair, ask_pictures
from skill_train.model.convertible import from_config
from skill_train.model.convertible.vocabulary import why_no_picture
from skill_train.model.folder import read_config
from skill_train.model.sidecar_files import model_digests, prepares_pictures
from skill_train.model.weight_files import stored_tensors
from skill_train.program.pictures.processor import OWN_FILE
from skill_train.run import records
from skill_train.run.export_record import ExportReason, ExportRecord, exported_file
from skill_train.run.folder import StepResult, finished_record, note_of, require_writable

_PARTS = re.compile(r"(?:^|\.)(?:\w*vision\w*|visual|\w*connector|\w*projector\w*|\w*merger\w*)(?:\.|$)")


@dataclass(frozen=True)
class ProjectorRequest(ConvertRequest):
    """A vision model's folder with preprocessor_config.json, and the projector's file to make of it. `outtype` is
    `f16`, `q8_0`, `bf16` or `f32`."""

    @property
    def file(self) -> Path:
        """By its first word LM Studio and other programs find it beside the model."""
        return self.out / f"mmproj-{self.name}-{self.outtype}.gguf"


def require_projector(model: Path, toolchain: Toolchain) -> None:
    """Refuses a model whose pictures llama.cpp cannot read, before anything is written.

    Raises:
        UsageError: the converter or llama.cpp is known not to take it, or the folder does not say how pictures are
            prepared.
    """
    config = read_config(model)
    why = from_config.why_no_projector(config, toolchain.projectors())
    why = why or why_no_picture(model, str(config.get("model_type")))
    if why is not None:
        raise UsageError(
            f"{model} cannot become a pair of GGUF files: {why}",
            code="not_convertible",
            expected="a model whose vision tower this llama.cpp can run",
            got=str(config.get("model_type")),
            hint="use the merged model with transformers or vLLM; or --mmproj none, for a file that reads text only",
        )
    if not prepares_pictures(model):
        raise UsageError(
            f"{model} has no {OWN_FILE}, which says how pictures are prepared",
            code="missing_file",
            expected=f"the files of the base model's processor beside its weights, {OWN_FILE} among them",
            hint="copy the file from the base model; or --mmproj none, for a file that reads text only",
        )


def convert_projector(
    request: ProjectorRequest, text: Path, *, text_is_new: bool = True, progress: Bar
) -> StepResult[ExportRecord]:
    """Writes `out/mmproj-<name>-<type>.gguf`, once llama.cpp has loaded it together with `text`.

    Args:
        text: the GGUF file of the language model, which need not have its final name yet.
        text_is_new: it was not loaded with an earlier projector.

    Raises:
        UsageError: the projector cannot be converted, or llama.cpp cannot load the pair.
    """
    started, file = time.monotonic(), request.file
    require_projector(request.model, request.toolchain)
    inputs = model_digests(request.model)
    options = {"name": request.name, "outtype": request.outtype}
    if done := finished_record(request.record, ExportRecord, inputs=inputs, options=options, result=file):
        if text_is_new:
            require_pair(request.model, text, file)
        return StepResult(done, reused=True)
    require_writable(request.out)
    weights = {name: stored for name, stored in stored_tensors(request.model).items() if _PARTS.search(name)}
    choose(weights, request.outtype)  # refuses f16 for a weight that is too large for it, and one that is not finite
    refuse_existing(file, request.record)
    progress(0, 1, "vision tower and projector")
    with whole_file(file) as part:
        convert_with(request.toolchain, request.model, part, ["--mmproj", "--outtype", request.outtype], progress)
        progress(1, 1, "llama.cpp loads the pair")
        require_pair(request.model, text, part)
        kinds = Counter(tensor.kind.lower() for tensor in read_gguf(part).tensors.values())
        record = ExportRecord(
            step=request.record.stem,
            inputs=inputs,
            options=options,
            outputs={str(file.relative_to(request.record.parent)): exported_file(part, request.outtype)},
            figures={"tensors": kinds.total(), "types": dict(kinds)},
            reasons=[
                ExportReason("mmproj", f"{request.outtype}; llama.cpp loaded it with the language model", "llama.cpp")
            ],
            versions=converter_versions(request.toolchain),
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak_memory_bytes(children=True),
            finished_at=records.timestamp(),
        )
        records.write(note_of(file, request.record), record)
    os.replace(note_of(file, request.record), request.record)
    return StepResult(record)


def require_pair(model: Path, text: Path, projector: Path) -> None:
    """Refuses two files that llama.cpp does not load together, or that read no pictures.

    Raises:
        UsageError: they do not.
    """
    try:
        ask_pictures(Pair(text.resolve(), projector.resolve()), [], any_size=False, threads=1)
    except VerificationFailed as failure:
        # Without the name of the temporary file, and without what llama.cpp adds to any failure.
        why = failure.message.rpartition("': ")[2].removesuffix("Does this file exist?").strip()
        raise _not_loaded(model, why) from None


def _not_loaded(model: Path, why: str) -> UsageError:
    kind = read_config(model).get("model_type")
    return UsageError(
        f"llama.cpp's converter made files of {model} that llama.cpp cannot load together: {why}",
        code="not_convertible",
        expected="a language model and a projector that llama.cpp loads",
        got=f"model type {kind}: {why}",
        hint="use the merged model with transformers or vLLM; a newer llama-cpp-python may convert it: "
        "pip install -U llama-cpp-python; or --mmproj none, for a file that reads text only",
    )
