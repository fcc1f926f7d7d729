"""`export-gguf`: makes GGUF files and Ollama's Modelfile from a trained run or a model folder."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skill_train.commands._adapter_export import export_adapter
from skill_train.commands._base_model import base_of, merge_choices, merge_locked
from skill_train.commands._command import command, option_of, require_only_run
from skill_train.commands._ended_training import warn_of_smoke_run
from skill_train.commands._export import (
    UNQUANTIZED,
    Export,
    MatrixOrder,
    is_mix,
    matrix_answers,
    quantize_files,
    require_possible,
)
from skill_train.commands._export_answer import ExportedFiles, modelfile_of, require_file_for_modelfile, result_of
from skill_train.commands._outputs import (
    beside,
    listed,
    put_aside,
    recorded_name,
    require_as_merged,
    slug,
    write_modelfile,
)
from skill_train.commands._projector import CHOICES, from_line, projector_type
from skill_train.commands._shipping import ExportOptions, question_of, shipped, wanted_types
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import remove_leftovers
from skill_train.core.worker import ending
from skill_train.gguf import export_room
from skill_train.gguf.export_files import model_of, outtype, recorded
from skill_train.llama import run_converter
from skill_train.run import plan_record
from skill_train.run.earlier_start import trained
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import RunDir, StepResult, has_note, open_run, renamed_aside, require_no_run
from skill_train.run.lock import locked, locked_out

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import MixFile


@command(
    ExportOptions,
    "skill-train export-gguf runs/first --quant q8_0,q4_k_m",
    "skill-train export-gguf merged-model-folder --out gguf --quant q6_k",
)
def export_gguf(options: ExportOptions, console: Console) -> Result:
    """Convert a run, or a model folder, to GGUF and quantize it. Merges first when that is not done."""
    from skill_train.llama import get_converter

    if options.run is None:
        return _fetch_converter(options, console)
    with console.progress("finding the converter") as progress:
        tools = get_converter.find_or_fetch(options.llama_cpp, progress=progress)
    if not RunDir.is_one(options.run):
        return _export_folder(options, options.run, console, tools)
    require_only_run("export-gguf", {"--out": options.out})
    opened = open_run(options.run)
    if not options.lora:
        return export_run(console, opened, options, tools)
    _refuse_file_options(options)
    with locked(opened, "export-gguf"):
        return export_adapter(console, opened, tools)


def _refuse_file_options(options: ExportOptions) -> None:
    """Refuses options that --lora ignores: an adapter is one file of one type."""
    allowed = ("run", "lora", "llama_cpp", "fetch")
    ignored = [name for name, value in vars(options).items() if name not in allowed and value is not None]
    if ignored:
        option = option_of(ignored[0])
        raise UsageError(
            f"--lora and {option} cannot be used together",
            code="bad_usage",
            expected="--lora alone, which makes one file",
            got=option,
            hint="leave one of the two out",
        )


def _fetch_converter(options: ExportOptions, console: Console) -> Result:
    from skill_train.llama import get_converter

    if not options.fetch:
        raise UsageError(
            "export-gguf needs a run or a model folder",
            code="bad_usage",
            expected="skill-train export-gguf RUN",
            hint="skill-train export-gguf --help",
        )
    with console.progress("fetching the converter") as progress:
        toolchain = get_converter.fetch(progress=progress)
    return Result({"converter": str(toolchain.folder)}, quiet=str(toolchain.folder))


def _export_folder(options: ExportOptions, model: Path, console: Console, tools: Any) -> Result:
    from skill_train.gguf.quant_types import type_names

    if not (model / "config.json").is_file():
        open_run(model)  # raises the error
    if options.lora:
        raise UsageError(
            f"--lora converts the adapter of a run, and {model} is a model folder",
            code="bad_usage",
            expected="skill-train export-gguf RUN --lora",
            hint=f"skill-train export-gguf {quoted(model)}",
        )
    require_as_merged(model)
    out = options.out or beside(model, "-gguf")
    require_no_run(out, f"skill-train export-gguf {quoted(model)}")
    matrix = MatrixOrder(options.imatrix, None)
    names, mix = wanted_types(options)
    require_possible(matrix, mix=mix is not None)
    types = type_names(names)
    mmproj = projector_type(model, options.mmproj, out / "mmproj.json", text_run=False)
    with locked_out(out, "export-gguf"):
        question = question_of(options, model, matrix=matrix.is_possible)
        types += question.i_quants if question else ()
        task = Export(model, out, out, slug(model), types, matrix, _modelfile_type(options), mmproj, question)
        require_file_for_modelfile(task)
        return _export(console, task, tools)


def _modelfile_type(options: ExportOptions) -> str | None:
    """The type in --modelfile, by llama.cpp's name. The name of a mix is not changed."""
    from skill_train.gguf.quant_types import plain_type

    chosen = options.modelfile
    return chosen if chosen is None or is_mix(chosen) else plain_type(chosen)


def export_run(console: Console, run: RunDir, options: ExportOptions, tools: Any) -> Result:
    """Merges the adapter if that is not done yet, then converts and quantizes into `gguf/`."""
    from skill_train.gguf.convert_projector import require_projector
    from skill_train.gguf.quant_types import type_names

    names, mix = wanted_types(options)
    chosen_types = type_names(names) + ([mix.name] if mix else [])  # a wrong name is refused before anything runs
    with locked(run, "export-gguf"):
        trained(run)
        warn_of_smoke_run(console, run)
        merges = not run.is_full
        if merges and run.merged.is_dir() and run.record("merge").is_file():  # before a changed file of it is read
            merge_locked(console, run, *merge_choices(run))
            merges = False
        model = run.merged if run.merged.is_dir() else base_of(run)
        run_converter.require_convertible(model, tools)
        matrix = MatrixOrder(options.imatrix, run)
        require_possible(matrix, mix=mix is not None)
        question = question_of(options, model, matrix=matrix.is_possible)
        more = list(question.i_quants) if question else []
        text_run = not plan_record.read(run.plan).recipe.images
        mmproj = projector_type(model, options.mmproj, run.record("mmproj"), text_run=text_run)
        if mmproj is not None or not (text_run or options.mmproj):  # a run with pictures does not lose them silently
            require_projector(model, tools)
        name, types = recorded_name(run, run.record("convert")), chosen_types + more
        task = Export(run.merged, run.gguf, run.path, name, types, matrix, _modelfile_type(options), mmproj, question)
        task = replace(task, run=run, mix=mix)
        require_file_for_modelfile(task)
        waits = contextlib.nullcontext() if run.record("convert").is_file() else run_converter.ready(tools)
        with waits as ready:  # it imports torch while the adapter is merged
            if merges:
                _say_room(console, run, type_names(names) + more, mix)
                merge_locked(console, run, *merge_choices(run))
            _put_unrecorded_aside(console, run, name, types)
            return _export(console, task, tools, ready)


def _put_unrecorded_aside(console: Console, run: RunDir, name: str, types: list[str]) -> None:
    """Renames files that no record describes. A kill may also come between one of several files and their record, which
    then names only the others."""
    for kind in CHOICES:
        put_aside(console, run.gguf / f"mmproj-{name}-{kind}.gguf", run.record("mmproj"))
    for kind in UNQUANTIZED:
        put_aside(console, run.gguf / f"{name}-{kind}.gguf", run.record("convert"))
    recorded_files = recorded(run)
    for file in [run.gguf / f"{name}-{kind}.gguf" for kind in types]:
        if file.is_file() and file not in recorded_files and not has_note(file, run.record("quantize")):
            aside = renamed_aside(file)
            console.warn(
                "set_aside", f"no record describes {file}; it was renamed to {aside.name}, and is exported again"
            )


def _say_room(console: Console, run: RunDir, types: list[str], mix: MixTarget | MixFile | None) -> None:
    """Shows the sizes of the files before anything is written, and refuses if the disk has no room for them."""
    from skill_train.model.folder import read_model

    if run.record("merge").is_file():
        return  # each later step checks the room for its own files
    with console.progress("exporting") as progress:
        sizes = export_room.room(read_model(base_of(run)), types, mix)
        progress(0, 1, export_room.require_room(sizes, run.path))


def _export(console: Console, task: Export, tools: Any, ready: Any = None) -> Result:
    """Converts, quantizes, and writes the Modelfile. `ready` is a started converter that waits for its model."""
    from skill_train.gguf import convert, ollama_modelfile

    converted, tokenizer, projected = _convert(console, task, tools, ready)
    parameters, reasons = ollama_modelfile.parameters_of_run(task.model, task.run, tokenizer)
    source = convert.output_of(converted.record, task.records)
    quantized = quantize_files(task, source, console)
    recorded_files = converted.record.outputs | (quantized.record.outputs if quantized else {})
    outputs = listed(recorded_files, task.records)
    projector = listed(projected.record.outputs, task.records)[0] if projected else None
    # A converter whose command was killed may have begun its temporary file after this command looked for such files.
    for output in [*outputs, *([projector] if projector else [])]:
        remove_leftovers(Path(output["path"]))
    answer, nothing_fits = shipped(task, outputs, source, projector, console)
    modelfile = task.out / "Modelfile"
    before = model_of(modelfile)
    best = answer["recommended"] if answer else None
    chosen, because = modelfile_of(task, task.modelfile or best, outputs, source.name)
    now = f"./{chosen}"
    beside = Path(projector["path"]).name if projector else None
    text = ollama_modelfile.modelfile(chosen, parameters, beside)
    write_modelfile(console, modelfile, text)
    if before not in (None, now):
        console.warn("modelfile_changed", f"{modelfile}: FROM was changed from {before} to {now}")
    second = [from_line(projector)] if projector else []
    reasons = [{"rule": f"FROM {now}", "because": because, "source": "--quant"}, *second, *reasons]
    by_name = {Path(name).name: file for name, file in recorded_files.items()}
    data = {
        "files": outputs,
        "modelfile": str(modelfile),
        "ollama": f"ollama create {quoted(task.name)} -f {quoted(modelfile)}",
        "modelfile_reasons": reasons,
        "fallbacks": {name: len(tensors) for name, file in by_name.items() if (tensors := file.get("fallbacks"))},
        "reasons": msgspec.to_builtins(converted.record.reasons or []),
        "reused": all(step.reused for step in (converted, quantized, projected) if step is not None),
        **({"imatrix": matrices} if (matrices := matrix_answers(by_name)) else {}),
    }
    done = ExportedFiles(task, outputs, projector, chosen, because)
    return result_of(done, data, answer, nothing_fits)


def _convert(
    console: Console, task: Export, tools: Any, ready: Any
) -> tuple[StepResult[ExportRecord], Any, StepResult[ExportRecord] | None]:
    """Makes the unquantized file and the projector's file, and reads the tokenizer meanwhile (each uses one core). The
    projector is made, and llama.cpp loads both files, before the language model gets its final name."""
    from skill_train.gguf import convert, ollama_modelfile
    from skill_train.gguf.convert_projector import ProjectorRequest, convert_projector

    reading: list[Future[Any]] = []
    pairs: list[StepResult[ExportRecord]] = []

    def project(text: Path, *, is_new: bool = True) -> None:
        if task.mmproj is not None:
            request = ProjectorRequest(
                task.model, task.out, task.records / "mmproj.json", task.name, task.mmproj, tools
            )
            pairs.append(convert_projector(request, text, text_is_new=is_new, progress=progress))

    with ending(ThreadPoolExecutor(1)) as thread, console.progress("converting") as progress:
        converted = convert.convert(
            convert.ConvertRequest(
                model=task.model,
                out=task.out,
                record=task.records / "convert.json",
                name=task.name,
                outtype=outtype(task.records / "convert.json", task.unquantized),
                toolchain=tools,
            ),
            ready=ready,
            meanwhile=lambda: reading.append(thread.submit(ollama_modelfile.load_tokenizer, task.model)),
            check=project,
            progress=progress,
            warn=console.warn,
        )
        if converted.reused:
            project(convert.output_of(converted.record, task.records), is_new=False)
    return converted, reading[0].result() if reading else None, pairs[0] if pairs else None
