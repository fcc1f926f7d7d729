"""The step that writes a model's vision tower and projector to a separate GGUF file (`mmproj`).

llama.cpp reads pictures with two files, the language model and the projector. The converter can exit with 0 after it
wrote a file that llama.cpp cannot load (a Gemma 3 without its projector's norm, llama-cpp-python 0.3.36). So llama.cpp
loads both files before either of them gets its final name.
"""

import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.core.files import require_writable, whole_file
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
from skill_train.run.folder import StepResult, finished_record, note_of

_PARTS = re.compile(r"(?:^|\.)(?:\w*vision\w*|visual|\w*connector|\w*projector\w*|\w*merger\w*)(?:\.|$)")


@dataclass(frozen=True)
class ProjectorRequest(ConvertRequest):
    """A vision model's folder with preprocessor_config.json, and the projector's file to make of it. `outtype` is
    `f16`, `q8_0`, `bf16` or `f32`."""

    @property
    def file(self) -> Path:
        """The projector's path. LM Studio and other programs find it by the prefix `mmproj`."""
        return self.out / f"mmproj-{self.name}-{self.outtype}.gguf"


def require_projector(model: Path, toolchain: Toolchain) -> None:
    """Refuses a model with which llama.cpp cannot read pictures. Reads only the folder's configuration files.

    Raises:
        UsageError: the converter or llama.cpp cannot use the vision tower, or there is no preprocessor_config.json.
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
    """Writes `out/mmproj-<name>-<type>.gguf`. The file gets its name only after llama.cpp loaded it with `text`.

    Args:
        text: the GGUF file of the language model. It may still have a temporary name.
        text_is_new: `text` was not yet loaded with a projector. If False, a recorded projector is not loaded again.

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
    """Checks that llama.cpp loads two files together and reads pictures with them.

    Raises:
        UsageError: llama.cpp refuses the files, or the projector has no vision tower.
    """
    try:
        ask_pictures(Pair(text.resolve(), projector.resolve()), [], any_size=False, threads=1)
    except VerificationFailed as failure:
        # Removes the name of the temporary file, and a question that llama.cpp adds to every failure.
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
