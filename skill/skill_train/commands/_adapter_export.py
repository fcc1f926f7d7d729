"""`export-gguf --lora`: the adapter of a run alone."""

from __future__ import annotations

import msgspec

from skill_train.commands._base_model import base_of
from skill_train.commands._exported_files import files_table, listed
from skill_train.commands._outputs import slug
from skill_train.commands._projector import refuse_adapter_alone
from skill_train.commands._shell import quoted
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError
from skill_train.llama import run_converter
from skill_train.llama.get_converter import Toolchain
from skill_train.run.begun import trained
from skill_train.run.folder import RunDir


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
    return Result(data, quiet=files[0]["path"], human=files_table(files))
