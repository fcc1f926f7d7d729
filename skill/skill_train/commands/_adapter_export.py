"""`export-gguf --lora`: the adapter of a run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from skill_train.commands._base_model import base_of
from skill_train.commands._drawing import draw_line
from skill_train.commands._outputs import draw_files, listed, slug
from skill_train.commands._projector import refuse_adapter_alone
from skill_train.commands._shell import quoted
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError
from skill_train.core.files import write_text
from skill_train.llama import run_converter
from skill_train.llama.get_converter import Toolchain
from skill_train.recipe.formats import BARE
from skill_train.run import plan_record
from skill_train.run.begun import trained
from skill_train.run.folder import RunDir

_BASE_TYPE = "q8_0"  # of the base's file in `next`


def export_adapter(console: Console, run: RunDir, tools: Toolchain) -> Result:
    """Writes the adapter as a GGUF file, for use beside one of the base model."""
    from skill_train.gguf.convert_adapter import AdapterExportRequest, export_lora

    trained(run)
    run_converter.require_convertible(base_of(run), tools)
    refuse_adapter_alone(base_of(run))
    if run.is_full:
        raise UsageError(
            f"{run.path} has no adapter: every weight was trained",
            code="no_adapter",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    with console.progress("converting the adapter") as progress:
        exported = export_lora(
            AdapterExportRequest(
                base=base_of(run),
                adapter=run.adapter,
                out=run.gguf,
                record=run.record("lora_gguf"),
                name=slug(run.path),
                outtype="f16",
                toolchain=tools,
            ),
            progress=progress,
            warn=console.warn,
        )
    record = exported.record
    files = listed(record.outputs, run.path)
    data = {
        "files": files,
        "figures": record.figures or {},
        "reasons": msgspec.to_builtins(record.reasons or []),
        "reused": exported.reused,
    }
    adapter, base = Path(files[0]["path"]), _base_file(run)
    modelfile = _write_modelfile(run, adapter, base)
    data |= {"modelfile": str(modelfile), "ollama": f"ollama create {quoted(adapter.stem)} -f {quoted(modelfile)}"}

    def draw(rich: Any) -> None:
        draw_files(rich, files)
        draw_line(rich, f"for Ollama, when {base} is there: {data['ollama']}")

    return Result(data, quiet=files[0]["path"], human=draw, next=_next(run, adapter, base))


def _base_file(run: RunDir) -> Path:
    """Where the base model's own GGUF file is written by the command of `next`."""
    return run.path / "base-gguf" / f"{slug(base_of(run))}-{_BASE_TYPE}.gguf"


def _write_modelfile(run: RunDir, adapter: Path, base: Path) -> Path:
    """The Modelfile of the base with the adapter. The template is that of the base's own file."""
    from skill_train.gguf.ollama_modelfile import modelfile, parameters_of

    recipe = plan_record.read(run.plan).recipe
    parameters, _ = parameters_of(base_of(run), recipe.max_length, bare=recipe.format in BARE)
    path = run.gguf / "Modelfile-lora"
    write_text(path, modelfile(f"../{base.parent.name}/{base.name}", parameters, adapter=adapter.name))
    return path


def _next(run: RunDir, adapter: Path, base: Path) -> list[str]:
    """The proof of the adapter, a file of the base, and both in llama.cpp."""
    return [
        f"skill-train verify {quoted(run.path)}",
        f"skill-train export-gguf {quoted(base_of(run))} --out {quoted(base.parent)} --quant {quoted(_BASE_TYPE)}",
        f"llama-server -m {quoted(base)} --lora {quoted(adapter)}",
    ]
