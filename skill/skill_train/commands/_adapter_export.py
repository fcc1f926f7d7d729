"""`export-gguf --lora`: exports only the adapter of a run."""

from pathlib import Path
from typing import Any

import msgspec

from skill_train.commands._base_model import base_of, require_adapter
from skill_train.commands._outputs import draw_files, listed, put_aside, recorded_name, slug, write_modelfile
from skill_train.commands._projector import refuse_adapter_alone
from skill_train.core.console import Console, Result
from skill_train.core.errors import quoted
from skill_train.gguf.export_files import ADAPTER_MODELFILE
from skill_train.llama import run_converter
from skill_train.llama.get_converter import Toolchain
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir

_BASE_TYPE = "q8_0"  # the type of the base's GGUF file in the commands of `next`


def export_adapter(console: Console, run: RunDir, tools: Toolchain) -> Result:
    """Writes the adapter as a GGUF file, for use with a GGUF file of the base model."""
    from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora

    trained(run)
    base = base_of(run)
    run_converter.require_convertible(base, tools)
    refuse_adapter_alone(base)
    require_adapter(run, f"skill-train export-gguf {quoted(run.path)}")
    record = run.record("lora_gguf")
    request = AdapterExportRequest(
        base=base,
        adapter=run.adapter,
        out=run.gguf,
        record=record,
        name=recorded_name(run, record),
        outtype="f16",
        toolchain=tools,
    )
    put_aside(console, request.file, record)
    with console.progress("converting the adapter") as progress:
        exported = export_lora(request, progress=progress, warn=console.warn)
    record_of_adapter = exported.record
    files = listed(record_of_adapter.outputs, run.path)
    data = {
        "files": files,
        "figures": record_of_adapter.figures or {},
        "reasons": msgspec.to_builtins(record_of_adapter.reasons or []),
        "reused": exported.reused,
    }
    adapter = Path(files[0]["path"])
    base_file = run.path / "base-gguf" / f"{slug(base)}-{_BASE_TYPE}.gguf"  # as the command of `next` writes it
    modelfile = _write_modelfile(console, run, base, adapter, base_file)
    data |= {"modelfile": str(modelfile), "ollama": f"ollama create {quoted(adapter.stem)} -f {quoted(modelfile)}"}

    def draw(rich: Any) -> None:
        draw_files(rich, files)
        rich.print(f"for Ollama, when {base_file} is there: {data['ollama']}", soft_wrap=True)

    following = [  # verify the adapter, export the base, run both in llama.cpp
        f"skill-train verify {quoted(run.path)}",
        f"skill-train export-gguf {quoted(base)} --out {quoted(base_file.parent)} --quant {quoted(_BASE_TYPE)}",
        f"llama-server -m {quoted(base_file)} --lora {quoted(adapter)}",
    ]
    return Result(data, quiet=files[0]["path"], human=draw, next=following)


def _write_modelfile(console: Console, run: RunDir, base: Path, adapter: Path, base_file: Path) -> Path:
    """Writes a Modelfile for the base with the adapter. It has no template: Ollama takes it from the base's file."""
    from skill_train.gguf.ollama_modelfile import modelfile, parameters_of_run

    parameters, _ = parameters_of_run(base, run)
    path = run.gguf / ADAPTER_MODELFILE
    text = modelfile(f"../{base_file.parent.name}/{base_file.name}", parameters, adapter=adapter.name)
    write_modelfile(console, path, text)
    return path
