"""`export-gguf` and `verify`: from a trained run, or a model folder, to GGUF files and their proof."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from skill_train.commands import run_warnings, tables
from skill_train.commands.chain import (
    base_folder,
    base_of,
    beside,
    merge_locked,
    only_one,
    outputs_of,
    put_aside,
    quoted,
    require_trained,
    slug,
)
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, VerificationFailed
from skill_train.core.files import remove_leftovers, write_text
from skill_train.core.worker import ending
from skill_train.gguf import export_room
from skill_train.gguf.export_files import model_of, outtype, recorded, unread
from skill_train.llama import run_converter as converter
from skill_train.recipe.formats import BARE
from skill_train.run.folder import RunDir, open_run, renamed_aside, require_no_run
from skill_train.run.lock import locked, locked_out
from skill_train.run.records import read_json

UNQUANTIZED = ("f16", "bf16", "f32")


def export_gguf(
    console: Console,
    *,
    run: Path | None,
    quant: str,
    out: Path | None,
    lora: bool,
    llama_cpp: Path | None,
    fetch: bool,
) -> Result:
    from skill_train.llama import get_converter as toolchain

    if run is None:
        if not fetch:
            raise UsageError(
                "export-gguf needs a run or a model folder",
                code="bad_usage",
                expected="skill-train export-gguf RUN",
                hint="skill-train export-gguf --help",
            )
        with console.progress("fetching the converter") as progress:
            found = toolchain.fetch(progress=progress)
        return Result({"converter": str(found.folder)}, quiet=str(found.folder))
    with console.progress("finding the converter") as progress:
        tools = toolchain.find_or_fetch(llama_cpp, progress=progress)
    if RunDir.is_one(run):
        only_one("export-gguf", {"--out": out})
        if lora:
            with locked(open_run(run), "export-gguf"):
                return _export_lora(console, open_run(run), tools)
        return export_run(console, open_run(run), quant, tools)
    if not (run / "config.json").is_file():
        open_run(run)  # says what is missing
    if lora:
        raise UsageError(
            f"{run} is a model folder, and --lora converts the adapter of a run",
            code="bad_usage",
            expected="skill-train export-gguf RUN --lora",
            hint=f"skill-train export-gguf {quoted(run)}",
        )
    folder = out or beside(run, "-gguf")
    require_no_run(folder, f"skill-train export-gguf {quoted(run)}")
    with locked_out(folder, "export-gguf"):
        return _export(console, model=run, out=folder, records=folder, name=slug(run), quant=quant, tools=tools)


def export_run(console: Console, run: RunDir, quant: str, tools: Any) -> Result:
    """Merges an adapter when that is not done, then converts and quantizes into `gguf/`."""
    from skill_train.gguf.quantize import type_names

    types = type_names(quant.split(","))  # a wrong name is refused before anything runs
    with locked(run, "export-gguf"):
        require_trained(run)
        run_warnings.warn_of_part(console, run)
        converter.require_convertible(run.merged if run.merged.is_dir() else base_of(run), tools)
        waits = contextlib.nullcontext() if run.record("convert").is_file() else converter.ready(tools)
        with waits as ready:  # it imports torch while the adapter is merged
            if not run.is_full:
                _say_room(console, run, types)
                merge_locked(console, run, **_merged_options(run))
            return _export_merged(console, run, types, tools, ready)


def _export_merged(console: Console, run: RunDir, types: list[str], tools: Any, ready: Any) -> Result:
    recipe, name = read_json(run.plan)["recipe"], _name(run)
    for kind in UNQUANTIZED:
        put_aside(console, run.gguf / f"{name}-{kind}.gguf", run.record("convert"))
    _put_unrecorded_aside(console, run, [run.gguf / f"{name}-{kind}.gguf" for kind in types])
    return _export(
        console,
        ready=ready,
        model=run.merged,
        out=run.gguf,
        records=run.path,
        name=name,
        quant=",".join(types),
        tools=tools,
        trained_length=recipe["max_length"],
        bare=recipe.get("format") in BARE,
    )


def _put_unrecorded_aside(console: Console, run: RunDir, files: list[Path]) -> None:
    """A kill may come between one of several files and the record, which then names the others alone."""
    known = recorded(run)
    for file in files:
        if file.is_file() and file not in known:
            aside = renamed_aside(file)
            console.warn("set_aside", f"no record names {file}; it is now {aside.name}, and is made again")


def _name(run: RunDir) -> str:
    """Of the files: that of the folder, or the one that it had when they were made."""
    record = run.record("convert")
    return str(read_json(record)["options"]["name"]) if record.is_file() else slug(run.path)


def _say_room(console: Console, run: RunDir, types: list[str]) -> None:
    """Says what will be on disk before anything is written.

    Raises:
        DecisionNeeded: not enough disk for all of it.
    """
    from skill_train.model.folder import read_model

    if run.record("merge").is_file():
        return  # the steps that are left each ask for their own
    with console.progress("exporting") as progress:
        progress(0, 1, export_room.require_room(export_room.room(read_model(base_of(run)), types), run.path))


def _merged_options(run: RunDir) -> dict[str, Any]:
    """What a merge already done was asked for, so that it is found done."""
    record = run.record("merge")
    asked = read_json(record)["options"] if record.is_file() else {}
    return {"dtype": asked.get("dtype"), "gate": asked.get("gate", "auto")}


def _export(
    console: Console,
    *,
    model: Path,
    out: Path,
    records: Path,
    name: str,
    quant: str,
    tools: Any,
    trained_length: int | None = None,
    bare: bool = False,
    ready: Any = None,
) -> Result:
    from skill_train.gguf import convert, quantize
    from skill_train.gguf import ollama_modelfile as modelfile

    types = quantize.type_names(quant.split(","))
    plain = [t for t in types if t in UNQUANTIZED]
    reading: list[Future[Any]] = []  # the tokenizer is read while the converter works: both use one core
    with ending(ThreadPoolExecutor(1)) as beside, console.progress("converting") as progress:
        converted = convert.convert(
            model=model,
            out=out,
            record=records / "convert.json",
            name=name,
            outtype=outtype(records / "convert.json", plain),
            toolchain=tools,
            ready=ready,
            meanwhile=lambda: reading.append(beside.submit(modelfile.load_tokenizer, model)),
            progress=progress,
            warn=console.warn,
        )
    tokenizer = reading[0].result() if reading else None
    parameters, reasons = modelfile.parameters_of(model, trained_length, bare=bare, tokenizer=tokenizer)
    source = convert.output_of(converted, records)
    rest = [t for t in types if t not in plain[:1] and not source.name.endswith(f"-{t}.gguf")]
    quantized: dict[str, Any] = {"outputs": {}, "reused": True}
    if rest:
        with console.progress("quantizing") as progress:
            quantized = quantize.quantize(
                source=source,
                out=out,
                record=records / "quantize.json",
                name=name,
                quants=rest,
                progress=progress,
                warn=console.warn,
            )
    outputs = outputs_of(converted, records) + outputs_of(quantized, records)
    for made in outputs:  # a converter whose command was killed may have begun its part after the next command looked
        remove_leftovers(Path(made["path"]))
    chosen = _for_ollama(outputs, types)
    before, now = model_of(out / "Modelfile"), f"./{chosen or source.name}"
    write_text(out / "Modelfile", modelfile.modelfile(chosen or source.name, parameters))
    if before not in (None, now):
        console.warn("modelfile_changed", f"{out / 'Modelfile'} said FROM {before}; it says FROM {now} now")
    because = "the last of the types that were asked for" if chosen else "the only file"
    reasons = [{"rule": f"FROM ./{chosen or source.name}", "because": because, "source": "--quant"}, *reasons]
    return _export_result(console, model, out, outputs, converted, quantized, reasons)


def _for_ollama(outputs: list[dict[str, Any]], types: list[str]) -> str:
    """The file of the last type that was asked for; a record has them in another order after a kill."""
    made = {each["quant"]: Path(each["path"]).name for each in outputs}
    return next((made[quant] for quant in reversed(types) if quant in made), "")


def _export_lora(console: Console, run: RunDir, tools: Any) -> Result:
    from skill_train.gguf.convert_adapter import export_lora

    require_trained(run)
    converter.require_convertible(base_of(run), tools)
    if run.is_full:
        raise UsageError(
            f"{run.path} has no adapter: every weight was trained",
            code="no_adapter",
            expected="a run that trained an adapter",
            got="finetuning_type full",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    with console.progress("converting the adapter") as progress:
        record = export_lora(
            base=base_of(run),
            adapter=run.adapter,
            out=run.gguf,
            record=run.record("lora_gguf"),
            name=slug(run.path),
            outtype="f16",
            toolchain=tools,
            progress=progress,
            warn=console.warn,
        )
    listed = outputs_of(record, run.path)
    data = {"files": listed, **{key: record.get(key, False) for key in ("figures", "reasons", "reused")}}
    return Result(data, quiet=listed[0]["path"], human=tables.files_table(listed))


def _export_result(
    console: Console,
    model: Path,
    out: Path,
    listed: list[dict[str, Any]],
    converted: dict[str, Any],
    quantized: dict[str, Any],
    reasons: list[dict[str, Any]],
) -> Result:
    fallbacks = {f["path"]: f.pop("fallbacks") for f in listed if f.get("fallbacks")}
    data = {
        "files": [{k: f[k] for k in ("path", "bytes", "sha256", "quant")} for f in listed],
        "modelfile": str(out / "Modelfile"),
        "modelfile_reasons": reasons,
        "fallbacks": {path: len(tensors) for path, tensors in fallbacks.items()},
        "reasons": converted["reasons"],
        "reused": bool(converted.get("reused") and quantized.get("reused")),
    }
    files = " ".join(f"--gguf {quoted(Path(f['path']))}" for f in listed)
    target = quoted(out.parent) if RunDir.is_one(out.parent) else f"--reference {quoted(model)} {files}"
    return Result(
        data, human=tables.files_table(listed), quiet=listed[-1]["path"], next=[f"skill-train verify {target}"]
    )


def verify(
    console: Console,
    *,
    run: Path | None,
    reference: str | None,
    base: str | None,
    gguf: tuple[Path, ...],
    tokens: int | None,
    out: Path | None,
) -> Result:
    if run is not None:
        only_one("verify", {"--reference": reference, "--base": base, "--gguf": gguf})
        return verify_run(console, open_run(run), tokens, out)
    if reference is None or not gguf:
        raise UsageError(
            "verify needs a run, or a reference and at least one GGUF file",
            code="bad_usage",
            expected="skill-train verify RUN, or --reference and --gguf",
            hint="skill-train verify --help",
        )
    return _verify(
        console,
        reference=base_folder(reference),
        adapter=None,
        base=base_folder(base) if base else None,
        ggufs=list(gguf),
        rows=[],
        held_out=[],
        record=out or gguf[0].parent / "verify.json",
        tokens=tokens,
        following=[],
    )


def verify_run(console: Console, run: RunDir, tokens: int | None, out: Path | None = None) -> Result:
    """Judges every GGUF file of a run against base + adapter, or against the whole model that was trained."""
    with locked(run, "verify"):
        return _verify_locked(console, run, tokens, out)


def _verify_locked(console: Console, run: RunDir, tokens: int | None, out: Path | None) -> Result:
    from skill_train.reference.load import read_rows

    require_trained(run)
    if not run.exported:
        raise UsageError(
            f"{run.path} has no GGUF file yet",
            code="not_exported",
            expected="files in gguf/",
            hint=f"skill-train export-gguf {quoted(run.path)}",
        )
    gone = [str(path) for path in recorded(run) if not path.is_file()]
    if gone:
        console.warn("missing_file", f"exported and not there any more, so not verified: {', '.join(gone)}")
    base = base_of(run)
    steps = ["evaluate", "report"] if run.held_out.is_file() else ["report"]
    return _verify(
        console,
        following=[f"skill-train {step} {quoted(run.path)}" for step in steps],
        reference=run.merged if run.is_full else base,
        adapter=None if run.is_full else run.adapter,
        base=base,
        ggufs=run.exported,
        unread=unread(run),
        rows=read_rows(run.samples),
        held_out=read_rows(run.held_out),
        record=out or run.record("verify"),
        tokens=tokens,
    )


def _verify(console: Console, *, following: list[str], **arguments: Any) -> Result:
    from skill_train.verify.step import verify as step

    proof: Path = arguments["record"]
    if proof.is_dir():
        hint = f"--out {quoted(proof / 'verify.json')}"
        raise UsageError(f"{proof} is a folder", code="bad_out", expected="a file for the proof", hint=hint)
    with console.progress("verifying") as progress:
        record = step(**arguments, progress=progress, warn=console.warn)
    order = {"fail": 0, "warn": 1, "pass": 2}
    checks = sorted(record["checks"], key=lambda check: order[check["verdict"]])
    data = {
        "verdict": record["verdict"],
        "checks": [_short(check) for check in checks],
        "not_checked": record["not_checked"],
        "samples": record["samples"],
        "proof": str(arguments["record"]),
        "reused": record.get("reused", False),
    }
    failed = [check for check in checks if check["verdict"] == "fail"]
    for check in checks:
        if check["verdict"] == "warn":
            console.warn("verdict_warn", f"{check['file']}: {check['name']}: {check['detail']}")
    if arguments["base"] is None:
        console.warn("no_base", "without --base a small tuning that was left out of a coarse type may go unseen")
    return Result(
        data,
        human=lambda rich: tables.draw_proof(rich, record),
        quiet=record["verdict"],
        next=[] if failed else following,
        error=_not_proven(failed, arguments["record"]) if failed else None,
    )


def _short(check: dict[str, Any]) -> dict[str, Any]:
    """A check in a line: the proof on disk has the further figures, and the words of those that pass."""
    return {k: v for k, v in check.items() if k != "figures" and (k != "detail" or check["verdict"] != "pass")}


def _not_proven(failed: list[dict[str, Any]], record: Path) -> VerificationFailed:
    names = list(dict.fromkeys(f"{check['name']} ({check['file']})" for check in failed))
    return VerificationFailed(
        f"verification failed: {', '.join(names[:12])}",
        code="verification_failed",
        expected="every check to pass",
        got=str(failed[0].get("detail") or failed[0]["figure"])[:600],
        hint=f"read {quoted(record)}",
    )
