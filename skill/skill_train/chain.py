"""What the commands do: facts, plan, and the steps one after another. The only module that composes steps."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

from skill_train.console import Console, Result
from skill_train.console import clean as console_clean
from skill_train.errors import TrainingFailed, UsageError, VerificationFailed
from skill_train.run_dir import RunDir, open_run, read_json, write_text


def local(
    console: Console,
    *,
    recipe: Path | None,
    model: str | None,
    data: str | None,
    split: str | None,
    max_steps: int | None,
    max_length: int | None,
    device: str | None,
    dtype: str | None,
    force: bool,
    run_dir: Path | None,
    resume: bool,
) -> Result:
    """Facts, plan, training, smoke verdict."""
    from skill_train.plan import Choices

    flags = {"model": model, "data": data, "split": split, "max_steps": max_steps, "max_length": max_length}
    flags = {key: value for key, value in flags.items() if value is not None}
    if resume and run_dir is not None and recipe is None and not flags:
        plan = read_json(open_run(run_dir).plan)
    else:
        plan = _plan(console, _recipe(recipe, flags), Choices(device=device, dtype=dtype, force=force))
    run = RunDir(run_dir or _default_run_dir(plan))
    return _local_result(run, plan, train_run(console, run, plan, resume=resume))


def plan_of(console: Console, recipe: Path) -> dict[str, Any]:
    """The plan of a recipe file for this machine."""
    from skill_train.plan import Choices

    return _plan(console, _recipe(recipe, {}), Choices())


def train_run(console: Console, run: RunDir, plan: dict[str, Any], *, resume: bool) -> dict[str, Any]:
    """Trains a plan in its run directory, showing why each value is what it is."""
    from skill_train import local as trainer

    for reason in plan["reasons"]:
        console.status(f"{reason['rule']}: {reason['value']} ({reason['because']})")
    with console.progress("training") as progress:
        return trainer.train(run, plan, resume=resume, progress=progress, say=console.status)


def _recipe(file: Path | None, flags: dict[str, Any]) -> Any:
    from skill_train import recipe as recipes

    if file is None:
        return recipes.from_dict(flags)
    loaded = recipes.load(file)
    return recipes.from_dict({k: v for k, v in dataclasses.asdict(loaded).items() if v is not None} | flags)


def _plan(console: Console, recipe: Any, choices: Any) -> dict[str, Any]:
    """Reads the facts and makes the plan."""
    from skill_train import dataset, hub, local, machine, model, plan

    folder, commit = hub.model_folder(recipe.model, recipe.revision)
    facts: dict[str, Any] = {
        "model": model.read_model(folder),
        "dataset": dataset.scan(recipe),
        "machine": machine.read_machine(),
    }
    recipe = dataclasses.replace(
        recipe, model=str(folder.resolve()) if commit is None else recipe.model, revision=commit
    )
    if Path(recipe.data).exists():
        recipe = dataclasses.replace(recipe, data=str(Path(recipe.data).resolve()))
    made = plan.make_plan(recipe, **facts, choices=choices)
    if plan.wants_probe(facts["machine"], facts["model"], choices):
        console.status("timing bf16 on this processor (once for this model)")
        probe = local.probe_precision(made, facts["machine"], facts["model"])
        made = plan.make_plan(recipe, **facts, choices=choices, probe=probe)
    return made


def _default_run_dir(plan: dict[str, Any]) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(plan["recipe"]["data"]).stem).strip("-") or "run"
    return Path("runs") / f"{name}-{plan['recipe_hash'][:8]}"


def _local_result(run: RunDir, plan: dict[str, Any], record: dict[str, Any]) -> Result:
    failed = [check for check in record["checks"] if check["verdict"] == "fail"]
    data = {
        "run_dir": str(run.path),
        "recipe_hash": plan["recipe_hash"],
        "verdict": record["verdict"],
        "checks": record["checks"],
        "figures": record["figures"],
        "steps": record["steps"],
        "example": record["example"],
        "answer": record["answer"],
        "data": record["data"],
        "placement": plan["placement"],
        "reused": record.get("reused", False),
    }
    error = None
    if failed:
        error = TrainingFailed(
            f"the smoke test failed: {', '.join(check['name'] for check in failed)}",
            code="smoke_failed",
            expected="every check to pass",
            got="; ".join(check["detail"] for check in failed),
            hint=f"read {run.record('train')}",
        )
    following = [] if failed else [f"skill-train export-gguf {_quoted(run.path)}"]
    return Result(
        data,
        human=lambda rich: _draw_checks(rich, "smoke test", data["checks"]),
        quiet=str(run.path),
        next=following,
        error=error,
    )


# --- merge, export, verify ------------------------------------------------------------------------------------------


def merge(
    console: Console,
    *,
    run: Path | None,
    base: str | None,
    adapter: Path | None,
    out: Path | None,
    dtype: str | None,
) -> Result:
    if run is not None:
        _only_one("RUN", {"--base": base, "--adapter": adapter, "--out": out})
        record = merge_run(console, open_run(run), dtype)
        following, folder = [f"skill-train export-gguf {_quoted(run)}"], run / "merged"
    else:
        if base is None or adapter is None or out is None:
            raise UsageError(
                "merge needs a run, or a base, an adapter and a place for the result",
                code="bad_usage",
                expected="skill-train merge RUN, or --base, --adapter and --out",
                hint="skill-train merge --help",
            )
        record = _merge(console, base=_base_folder(base), adapter=adapter, out=out, rows=[], dtype=dtype)
        following, folder = [f"skill-train export-gguf {_quoted(out)}"], out
    data = {"out": str(folder), **{key: record.get(key) for key in ("how", "reasons", "changes", "gate", "seconds")}}
    listed = [file for file in _files(record, folder.parent) if file["path"].endswith(".safetensors")]
    data |= {"files": [file | {"quant": None} for file in listed], "reused": record.get("reused", False)}
    return Result(data, quiet=str(folder), next=following, human=lambda rich: rich.print_json(data=data))


def merge_run(console: Console, run: RunDir, dtype: str | None = None) -> dict[str, Any]:
    """Merges the adapter of a run into `merged/`."""
    from skill_train.reference import read_rows

    _require_trained(run)
    rows = read_rows(run.held_out) or read_rows(run.samples)
    return _merge(console, base=base_of(run), adapter=run.adapter, out=run.merged, rows=rows, dtype=dtype)


def _merge(
    console: Console, *, base: Path, adapter: Path, out: Path, rows: list[dict[str, Any]], dtype: str | None
) -> dict[str, Any]:
    from skill_train.merge import merge as step

    record = RunDir(out.parent).record("merge") if out.name == "merged" else out.with_name(f"{out.name}.merge.json")
    with console.progress("merging") as progress:
        return step(
            base=base,
            adapter=adapter,
            out=out,
            record=record,
            rows=rows,
            dtype=dtype,
            threshold=None,
            progress=progress,
            warn=console.warn,
        )


def base_of(run: RunDir) -> Path:
    """The folder of a run's base model, at the revision that was trained."""
    recipe = read_json(run.plan)["recipe"]
    from skill_train.hub import model_folder

    return model_folder(recipe["model"], recipe["revision"])[0]


def _base_folder(model: str) -> Path:
    from skill_train.hub import model_folder

    return model_folder(model, None)[0]


def _require_trained(run: RunDir) -> None:
    if not run.record("train").is_file() or not run.adapter.is_dir():
        raise UsageError(
            f"{run.path} is not trained yet",
            code="not_trained",
            expected="train.json and adapter/",
            hint=f"skill-train local --resume --run-dir {_quoted(run.path)}",
        )


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
    from skill_train import toolchain

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
        _only_one("RUN", {"--out": out})
        if lora:
            return _export_lora(console, open_run(run), tools)
        return export_run(console, open_run(run), quant, tools)
    if not (run / "config.json").is_file():
        open_run(run)  # says what is missing
    folder = out or run.with_name(f"{run.resolve().name}-gguf")
    return _export(console, model=run, out=folder, records=folder, name=_slug(run), quant=quant, tools=tools)


def export_run(console: Console, run: RunDir, quant: str, tools: Any) -> Result:
    """Merges when that is not done, then converts and quantizes into `gguf/`."""
    from skill_train.quantize import type_names

    types = type_names(quant.split(","))  # a wrong name is refused before anything runs
    merge_run(console, run, _merged_dtype(run))
    length = read_json(run.plan)["recipe"]["max_length"]
    return _export(
        console,
        model=run.merged,
        out=run.gguf,
        records=run.path,
        name=_slug(run.path),
        quant=",".join(types),
        tools=tools,
        trained_length=length,
    )


def _merged_dtype(run: RunDir) -> str | None:
    """The dtype that a merge already done was asked for, so that it is found done."""
    record = run.record("merge")
    return read_json(record)["options"].get("dtype") if record.is_file() else None


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
) -> Result:
    from skill_train import convert, modelfile, quantize

    types = quantize.type_names(quant.split(","))
    plain = [t for t in types if t in ("f16", "bf16", "f32")]
    with console.progress("converting") as progress:
        converted = convert.convert(
            model=model,
            out=out,
            record=records / "convert.json",
            name=name,
            outtype=_outtype(records / "convert.json", plain),
            toolchain=tools,
            progress=progress,
            warn=console.warn,
        )
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
    outputs = _files(converted, records) + _files(quantized, records)
    chosen = next((Path(f["path"]).name for f in reversed(outputs)), source.name)
    text, reasons = modelfile.modelfile(model=model, gguf=chosen, trained_length=trained_length)
    write_text(out / "Modelfile", text)
    return _export_result(
        console, model, out, outputs, converted, quantized, [vars(r) if not isinstance(r, dict) else r for r in reasons]
    )


def _outtype(record: Path, plain: list[str]) -> str:
    """The type to convert to. A conversion already done is kept when it is of the type that is asked for."""
    earlier = read_json(record) if record.is_file() else None
    if earlier is None:
        return plain[0] if plain else "auto"
    made = next(iter(earlier["outputs"].values()))["quant"]
    return str(earlier["options"]["outtype"]) if not plain or made in plain else plain[0]


def _export_lora(console: Console, run: RunDir, tools: Any) -> Result:
    from skill_train.lora_gguf import export_lora

    _require_trained(run)
    with console.progress("converting the adapter") as progress:
        record = export_lora(
            base=base_of(run),
            adapter=run.adapter,
            out=run.gguf,
            record=run.record("lora_gguf"),
            name=_slug(run.path),
            outtype="f16",
            toolchain=tools,
            progress=progress,
            warn=console.warn,
        )
    listed = _files(record, run.path)
    data = {"files": listed, "figures": record["figures"], "reasons": record["reasons"]}
    return Result(data | {"reused": record.get("reused", False)}, quiet=listed[0]["path"], human=_files_table(listed))


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
    in_run = RunDir.is_one(out.parent)
    target = (
        _quoted(out.parent)
        if in_run
        else " ".join(["--reference", _quoted(model), *(f"--gguf {_quoted(Path(f['path']))}" for f in listed)])
    )
    return Result(data, human=_files_table(listed), quiet=listed[-1]["path"], next=[f"skill-train verify {target}"])


def verify(
    console: Console,
    *,
    run: Path | None,
    reference: str | None,
    base: str | None,
    gguf: tuple[Path, ...],
    tokens: int,
    out: Path | None,
) -> Result:
    if run is not None:
        _only_one("RUN", {"--reference": reference, "--base": base, "--gguf": gguf})
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
        reference=_base_folder(reference),
        adapter=None,
        base=_base_folder(base) if base else None,
        ggufs=list(gguf),
        rows=[],
        held_out=[],
        record=out or gguf[0].with_name("verify.json"),
        tokens=tokens,
    )


def verify_run(console: Console, run: RunDir, tokens: int, out: Path | None = None) -> Result:
    """Judges every GGUF file of a run against base + adapter."""
    from skill_train.reference import read_rows

    _require_trained(run)
    ggufs = sorted(path for path in run.gguf.glob("*.gguf") if "-lora-" not in path.name)
    if not ggufs:
        raise UsageError(
            f"{run.path} has no GGUF file yet",
            code="not_exported",
            expected="files in gguf/",
            hint=f"skill-train export-gguf {_quoted(run.path)}",
        )
    base = base_of(run)
    return _verify(
        console,
        reference=base,
        adapter=run.adapter,
        base=base,
        ggufs=ggufs,
        rows=read_rows(run.samples),
        held_out=read_rows(run.held_out),
        record=out or run.record("verify"),
        tokens=tokens,
    )


def _verify(console: Console, **arguments: Any) -> Result:
    from skill_train.verify import verify as step

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
    return Result(
        data,
        human=lambda rich: _draw_proof(rich, record),
        quiet=record["verdict"],
        error=_not_proven(failed, arguments["record"]) if failed else None,
    )


def _short(check: dict[str, Any]) -> dict[str, Any]:
    """A check without the words that a passing one does not need."""
    return {k: v for k, v in check.items() if k != "detail" or check["verdict"] != "pass"}


def _not_proven(failed: list[dict[str, Any]], record: Path) -> VerificationFailed:
    names = list(dict.fromkeys(f"{check['name']} ({check['file']})" for check in failed))
    return VerificationFailed(
        f"verification failed: {', '.join(names[:12])}",
        code="verification_failed",
        expected="every check to pass",
        got=str(failed[0].get("detail") or failed[0]["figure"])[:600],
        hint=f"read {record}",
    )


def _draw_proof(rich: Any, record: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"proof: {record['verdict']}", title_justify="left")
    for column in ("file", "check", "verdict", "figure", "threshold"):
        table.add_column(column, overflow="fold")
    for check in record["checks"]:
        cells = (
            str(check["file"]),
            check["name"],
            check["verdict"],
            _figure(check["figure"]),
            _figure(check["threshold"]),
        )
        table.add_row(*(console_clean(cell) for cell in cells), style=_STYLE[check["verdict"]])
    rich.print(table)
    for check in record["checks"]:
        if check["verdict"] != "pass":
            rich.print(console_clean(f"{check['file']} {check['name']}: {check['detail']}"), markup=False)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "")


def _files_table(listed: list[dict[str, Any]]) -> Any:
    def draw(rich: Any) -> None:
        from rich.table import Table

        table = Table("file", "type", "bytes", "sha256", title_justify="left")
        for file in listed:
            table.add_row(file["path"], file["quant"], f"{file['bytes']:,}", file["sha256"][:12])
        rich.print(table)

    return draw


def _slug(path: Path) -> str:
    """A file name from a folder's name."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name).strip("-.") or "model"


def _only_one(first: str, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"{first} and {given[0]} exclude each other", code="bad_usage", hint="skill-train --help")


def _files(record: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    return [{"path": str(root / name), **digest} for name, digest in record.get("outputs", {}).items()]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _draw_checks(rich: Any, title: str, checks: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("check", "verdict", "figure", "detail"):
        table.add_column(column, overflow="fold")
    for check in checks:
        cells = (check["name"], check["verdict"], _figure(check["figure"]), str(check["detail"]))
        table.add_row(*(console_clean(cell) for cell in cells), style=_STYLE[check["verdict"]])
    rich.print(table)


_STYLE = {"pass": "green", "warn": "yellow", "fail": "red"}
