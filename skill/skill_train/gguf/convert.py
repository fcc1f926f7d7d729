"""The step that converts a model folder to one GGUF file, with llama.cpp's own converter.

All checks come before the weights are written: missing files, too little disk or memory, an unknown architecture or
tokenizer, weights that no type can hold.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.console import Bar, Warn
from skill_train.core.errors import UsageError, nearest, quoted
from skill_train.core.files import require_writable, scratch_folder, whole_file, write_text
from skill_train.core.memory import peak_memory_bytes
from skill_train.llama import run_converter
from skill_train.llama.float_type import BYTES_PER_WEIGHT, OUTTYPES, WeightType, choose
from skill_train.llama.get_converter import Toolchain
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.sampling import KEYS, gguf_settings
from skill_train.machine.limits import require_memory
from skill_train.model.foreign_files import require_sound
from skill_train.model.sidecar_files import model_digests
from skill_train.model.weight_files import StoredTensor, stored_tensors
from skill_train.reference.load import generation_config
from skill_train.run import records
from skill_train.run.export_record import ExportFigures, ExportReason, ExportRecord, exported_file
from skill_train.run.folder import StepResult, finished_record, note_of, require_space, versions
from skill_train.run.records import read_json

_PHI_3, _OF_PHI_3 = re.compile("(phi)-?3", re.IGNORECASE), {"<unk>", "<s>", "</s>", "<|endoftext|>"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")

# Measured with the converter of llama-cpp-python 0.3.36 on Linux: 0.45 GB for the converter, torch and a vocabulary of
# 152k. With a largest tensor of 156 million weights the peak was 1.54 GB: at most 7 bytes per weight of that tensor,
# for every type.
_CONVERTER_BYTES = 600_000_000
_BYTES_PER_WEIGHT_IN_WORK = 8

# With more weights than this, `check_supported` runs before the weights are read, because reading them takes longer.
# For a smaller model it would only repeat the converter's own first checks.
_LONG_BYTES = 2_000_000_000


@dataclass(frozen=True)
class ConvertRequest:
    """A model folder, and the GGUF file to make of it."""

    model: Path  # a folder with config.json, safetensors weights and tokenizer files
    out: Path  # the folder for the file
    record: Path  # the path of `convert.json`
    name: str
    outtype: str  # `auto`, `f16`, `bf16`, `f32` or `q8_0`. Auto takes f16 unless a weight is too large for it.
    toolchain: Toolchain


def convert(
    request: ConvertRequest,
    *,
    ready: run_converter.Process | None = None,
    meanwhile: Callable[[], Any] = lambda: None,
    check: Callable[[Path], Any] = lambda written: None,
    progress: Bar,
    warn: Warn,
) -> StepResult[ExportRecord]:
    """Writes `out/<name>-<type>.gguf`.

    Args:
        ready: the process of `run_converter.ready`.
        meanwhile: called when the converter begins, because the converter leaves all cores but one free. It is not
            called if the file already exists.
        check: called with the written file before it gets its name. If it raises an error, no file is left.

    Raises:
        UsageError: the folder cannot be converted; the message says why.
        DecisionNeeded: there is not enough disk or memory.
    """
    started = time.monotonic()
    _check_files(request.model, request.outtype)
    run_converter.require_convertible(request.model, request.toolchain)
    run_converter.warn_of_window(request.model, warn)
    inputs = model_digests(request.model)
    options = {"name": request.name, "outtype": request.outtype}
    if done := finished_record(request.record, ExportRecord, inputs=inputs, options=options):
        return StepResult(done, reused=True)
    require_writable(request.out)
    chosen = _chosen(request.model, request.out, request.outtype, request.toolchain, progress)
    file = request.out / f"{request.name}-{chosen.outtype}.gguf"
    if done := finished_record(request.record, ExportRecord, inputs=inputs, options=options, result=file):
        return StepResult(done, reused=True)
    refuse_existing(file, request.record)
    meanwhile()
    with whole_file(file) as part, scratch_folder() as folder:
        how = ["--outtype", chosen.outtype, "--model-name", _model_name(request.model, request.name)]
        how += ["--metadata", str(_metadata_file(request.model, folder))]
        convert_with(request.toolchain, request.model, part, how, progress, ready)
        check(part)
        record = ExportRecord(
            step=request.record.stem,
            inputs=inputs,
            options=options,
            outputs={str(file.relative_to(request.record.parent)): exported_file(part, chosen.outtype)},
            figures=_figures(part, chosen),
            reasons=[ExportReason("outtype", f"{chosen.outtype}: {chosen.reason}", "safetensors weights")],
            versions=converter_versions(request.toolchain),
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak_memory_bytes(children=True),
            finished_at=records.timestamp(),
        )
        records.write(note_of(file, request.record), record)
    os.replace(note_of(file, request.record), request.record)
    return StepResult(record)


def _chosen(model: Path, out: Path, outtype: str, toolchain: Toolchain, progress: Bar) -> WeightType:
    """The type to convert to, after all checks that can refuse the model."""
    weights = stored_tensors(model)
    _check_room(weights, model, out, outtype)
    if sum(stored.size for stored in weights.values()) > _LONG_BYTES:
        check_supported(model, toolchain, progress=progress)
    progress(0, 1, "looking at the range of the weights")
    return choose(weights, outtype)


def check_supported(model: Path, toolchain: Toolchain, *, progress: Bar) -> None:
    """Runs the converter with `--vocab-only`. It reads the architecture, the weights' headers and the tokenizer, and
    writes only the vocabulary to a temporary file. This takes seconds for a model of any size.

    Raises:
        UsageError: the converter does not know the architecture or the tokenizer, or the folder is incomplete.
    """
    progress(0, 1, "asking llama.cpp whether it knows this architecture and tokenizer")
    with scratch_folder() as folder:
        vocabulary = folder / "vocabulary.gguf"
        convert_with(toolchain, model, vocabulary, ["--vocab-only"], lambda done, total, text: None)


def output_of(record: ExportRecord, folder: Path) -> Path:
    """The GGUF file that a record of this step names; `folder` is the record's folder."""
    return folder / next(iter(record.outputs))


def convert_with(
    toolchain: Toolchain,
    model: Path,
    out: Path,
    options: list[str],
    progress: Bar,
    ready: run_converter.Process | None = None,
) -> None:
    """Runs the converter on the model.

    Args:
        options: further options of the converter, after the model folder and `--outfile`.
    """
    with run_converter.without_code(model) as view:
        arguments = [str(view), "--outfile", str(out.resolve()), *options]
        run_converter.run(
            toolchain,
            arguments,
            model=model,
            on_percent=lambda percent: progress(percent / 100, 1, "written"),
            process=ready,
        )


def _model_name(model: Path, name: str) -> str:
    """The value for `general.name`. llama.cpp lets special tokens swallow white space if and only if that name contains
    "phi-3" or "phi3", and does not load such a file without all of `_OF_PHI_3` (src/llama-vocab.cpp)."""
    if read_json(model / "config.json").get("model_type") != "phi3" or not _swallows_space(model):
        return _PHI_3.sub(r"\1_3", name)
    return name if _PHI_3.search(name) else f"{name} (phi-3)"


def _metadata_file(model: Path, folder: Path) -> Path:
    """A file with the sampling settings for the converter, in `folder`. Without it the converter takes the temperature
    of a model that transformers decodes greedily."""
    file, settings = folder / "metadata.json", gguf_settings(generation_config(model))
    write_text(file, json.dumps({**dict.fromkeys(KEYS.values()), **settings}))
    return file


def _swallows_space(model: Path) -> bool:
    file = model / "tokenizer.json"
    added = read_json(file).get("added_tokens", []) if file.is_file() else []
    return any(token.get("rstrip") for token in added) and {token["content"] for token in added} >= _OF_PHI_3


def _check_files(model: Path, outtype: str) -> None:
    if outtype not in OUTTYPES:
        raise UsageError(
            f"{outtype!r} is not a GGUF type for conversion{nearest(outtype, OUTTYPES)}",
            code="cannot_quantize",
            expected=", ".join(OUTTYPES),
            got=outtype,
            hint="convert to auto, and quantize the result with --quant",
        )
    if not (model / "config.json").is_file():
        raise UsageError(
            f"{model} is not a model folder: it has no config.json",
            code="not_a_model",
            expected="config.json, safetensors weights and tokenizer files",
            got="no such folder" if not model.is_dir() else "a folder without config.json",
            hint="use the folder of the merged model, or merge first: skill-train merge RUN",
        )
    require_sound(model)
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(
            f"{model} contains no tokenizer files",
            code="bad_tokenizer",
            expected=" or ".join(_TOKENIZER_FILES[:3]),
            got=", ".join(sorted(path.name for path in model.iterdir())[:8]),
            hint="copy the base model's tokenizer files into the folder",
        )


def _check_room(weights: dict[str, StoredTensor], model: Path, out: Path, outtype: str) -> None:
    width = BYTES_PER_WEIGHT.get(outtype, BYTES_PER_WEIGHT["f16"])
    counts = {name: stored.elements for name, stored in weights.items()}
    size = sum(count * (width if len(weights[name].shape) > 1 else 4) for name, count in counts.items())
    vocabulary = sum((model / name).stat().st_size for name in _TOKENIZER_FILES if (model / name).is_file())
    require_space(out, int(size) + vocabulary, "the GGUF file")
    largest = max(_written_together(counts).values(), default=0)
    require_memory(_CONVERTER_BYTES + _BYTES_PER_WEIGHT_IN_WORK * largest, "converting the largest tensor")


def _written_together(counts: dict[str, int]) -> Counter[str]:
    """The number of weights of each output tensor. The converter stacks the experts of a layer into one tensor."""
    together: Counter[str] = Counter()
    for name, count in counts.items():
        together[re.sub(r"experts\.\d+\.", "experts.", name)] += count
    return together


def converter_versions(toolchain: Toolchain) -> dict[str, str | None]:
    packages = versions("llama-cpp-python", "torch", "transformers", "sentencepiece")
    return packages | {"converter": f"{toolchain.source} {toolchain.folder.name}"}


def _figures(file: Path, chosen: WeightType) -> ExportFigures:
    kinds = Counter(tensor.kind.lower() for tensor in read_gguf(file).tensors.values())
    return {"tensors": kinds.total(), "types": dict(kinds), "largest_weight": chosen.largest_weight}


def refuse_existing(file: Path, record: Path) -> None:
    """Refuses to overwrite a file that no record describes."""
    if file.exists():
        raise UsageError(
            f"{file} already exists, and {record.name} does not describe it",
            code="output_exists",
            expected="a path where no file exists",
            hint=f"move {quoted(file)} away, or use another --out",
        )
