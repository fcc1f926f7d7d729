"""Finds the model that the user chose: base, adapter, merged or a GGUF file of a run, or a GGUF file without a run."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from skill_train.commands._base_model import base_of, require_adapter
from skill_train.core.console import Console
from skill_train.core.digests import FileDigest, is_file_of
from skill_train.core.errors import UsageError, nearest, quoted
from skill_train.estimate.artifacts import BITS
from skill_train.evaluate.backends import Model
from skill_train.evaluate.pictures import RunPictures, pictures_of_run
from skill_train.gguf.export_files import model_of
from skill_train.gguf.quant_types import plain_type
from skill_train.run import export_record, merge_record, plan_record, train_record, verify_record
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir, open_run
from skill_train.run.records import timestamp
from skill_train.run.train_record import is_asked_bare, trained_system

_FOLDERS = ("base", "adapter", "merged")


@dataclass(frozen=True)
class Chosen:
    """A model, and whether its prompts have a chat template."""

    where: Path  # the run or the file that the user gave
    model: Model
    raw: bool = False  # the model was trained without a chat template, so its prompts have none
    folder: Path | None = None  # has the model's tokenizer and generation_config.json; None for a GGUF file alone


def chosen(where: Path, word: str | None, folders: tuple[str, ...] = _FOLDERS) -> Chosen:
    """The model that the user chose.

    Args:
        where: a run, or a GGUF file.
        word: one of `folders`, or the type or name of a GGUF file. None for the file that the Modelfile names, or else
            the last GGUF file, or else the trained model.
        folders: empty for `serve`, which chooses a GGUF file by `--quant`.
    """
    if where.is_file() or where.suffix == ".gguf":
        return _file_alone(where, word, "--file" if folders else "--quant")
    run = open_run(where)
    record = trained(run)
    recipe = plan_record.read(run.plan).recipe
    try:
        base = base_of(run)
    except UsageError as error:
        alone = run.ggufs and not recipe.images and not is_asked_bare(record, recipe.format)
        if alone and error.code == "missing_file":
            error.hint += f"; or give a file alone, which needs no base: {quoted(run.gguf / _shipped(run))}"
        raise
    model = _model(run, base, word or _shipped(run), folders)
    if recipe.images:
        model = with_pictures(model, run, pictures_of_run(run, base))
    return Chosen(where, model, is_asked_bare(record, recipe.format), run.merged if run.is_full else base)


def other(first: Chosen, word: str) -> Chosen:
    """The model to compare with `first`: `word` is a model of the same run, or the path of another run or file."""
    path = Path(word)
    by_path = RunDir.is_one(path) or (path.suffix == ".gguf" and path.is_file())
    if by_path or first.where.suffix == ".gguf":  # a single file has no other model: `chosen` raises the error
        return chosen(path, None)
    return chosen(first.where, word)


def gguf_of(where: Path, word: str | None) -> Chosen:
    """As `chosen`, but accepts only a GGUF file."""
    choice = chosen(where, word, () if word else _FOLDERS)
    if not choice.model.is_gguf:
        raise UsageError(
            f"{where} has no GGUF file of a whole model",
            code="missing_step",
            expected="a file in gguf/",
            got=choice.model.name,
            hint=f"skill-train export-gguf {quoted(where)}",
        )
    return choice


def warn_of_system(console: Console, choice: Chosen, how: str) -> None:
    """Warns that prompts lack the system message, if every trained row began with the same one."""
    if RunDir.is_one(choice.where) and trained_system(choice.where):
        words = "every row was trained after one system message, without which the model is asked otherwise"
        console.warn("no_system", f"{words}: {how}; it stands in {choice.where / 'samples.jsonl'}")


def warn_of_proof(console: Console, choice: Chosen) -> None:
    """Warns of a file of a run that belongs to an earlier training, is not the exported file, failed its proof, or
    changed after the proof."""
    if doubt := doubt_of_training(choice):
        console.warn("other_adapter", doubt)
    run, file = RunDir(choice.where), choice.model.path
    if not choice.model.is_gguf:
        return
    if doubt := _doubt_of_proof(run.record("verify"), file):
        console.warn("not_proven", doubt)
    else:
        warn_of_replaced(console, run, [file, choice.model.projector or file])


def _doubt_of_proof(record: Path, file: Path) -> str:
    """Why the proof of a file cannot be relied on: the file failed it, or changed after it. Otherwise empty."""
    if not record.is_file():
        return ""
    try:
        proof = verify_record.read(record)
    except UsageError as error:
        return error.message
    failed = [check.name for check in proof.checks if check.file == file.name and check.verdict == "fail"]
    if failed:
        return f"{record}: {file.name} failed it: {', '.join(failed)}"
    stated = proof.inputs.ggufs.get(file.name)
    changed = stated is not None and not _is_as_recorded(file, stated, proof.finished_at)
    return f"{record}: {file.name} changed after it" if changed else ""


def warn_of_origin(console: Console, run: RunDir) -> None:
    """Warns of GGUF files of a run that belong to an earlier training, or are not the exported files."""
    for doubt in (doubt_of_training(Chosen(run.path, Model(file.name, file))) for file in run.ggufs):
        if doubt:
            console.warn("other_adapter", doubt)
    warn_of_replaced(console, run, run.ggufs)


def warn_of_replaced(console: Console, run: RunDir, files: list[Path]) -> None:
    """Warns of files of a run that are not the exported files."""
    names = [file.name for file in files]
    for record in filter(Path.is_file, map(run.record, ("convert", "quantize", "mmproj"))):
        exported = export_record.read(record)
        for name, digest in exported.outputs.items():
            file = run.path / name
            if file.name in names and file.is_file() and not _is_as_recorded(file, digest, exported.finished_at or ""):
                again = f"move it away, then skill-train export-gguf {quoted(run.path)}"
                again += export_record.quant_option(digest["quant"]) if record.stem != "mmproj" else ""
                console.warn("not_proven", f"{record}: {file.name} is not the file that was exported; {again}")


def _is_as_recorded(file: Path, stated: FileDigest, finished_at: str) -> bool:
    """Whether a file is the one that its record describes. A digest takes seconds, so a file is read only if it was
    written, copied or moved there after the record."""
    stat = file.stat()
    placed = timestamp(datetime.fromtimestamp(max(stat.st_mtime, stat.st_ctime), UTC))
    return (stat.st_size == stated["bytes"] and placed <= finished_at) or is_file_of(file, stated)


def with_pictures(model: Model, run: RunDir, pictures: RunPictures | None) -> Model:
    """A model of a run with the settings of its pictures. A GGUF file reads pictures with the projector of the run
    that it lies in; elsewhere, with that of this run."""
    if pictures is None:
        return model
    around = model.path.resolve().parent.parent
    place = around if RunDir.is_one(around) else run.path
    files = [place / name for name in export_record.outputs(place, "mmproj")] if model.is_gguf else []
    return replace(model, pictures=pictures, projector=next((file for file in files if file.is_file()), None))


def doubt_of_training(choice: Chosen) -> str:
    """A sentence if, by the records, a model or a file belongs to an earlier training of its run; otherwise empty."""
    run, model = RunDir(choice.where), choice.model
    if not RunDir.is_one(run.path) or not (model.is_gguf or model.path == run.merged):
        return ""
    outputs = train_record.read(run.record("train")).outputs
    record, convert = run.record("merge"), run.record("convert")
    merge = merge_record.read(record) if record.is_file() else None
    adapter, merged = (merge.inputs.adapter, merge.outputs) if merge is not None else ({}, {})
    converted = export_record.read(convert).inputs if model.is_gguf and convert.is_file() else {}
    stale = merge_record.is_of_earlier_training(outputs, adapter, merged, converted)
    return f"{model.name} was made of an earlier training of {run.path}, by its records" if stale else ""


def _file_alone(file: Path, word: str | None, option: str) -> Chosen:
    if word is not None:
        raise UsageError(
            f"{file} is one file: there is nothing to choose in it",
            code="bad_usage",
            expected="a run, whose models have names",
            got=f"{option} {word}",
            hint=f"leave {quoted(option)} out",
        )
    if not file.is_file() or file.suffix != ".gguf":
        raise UsageError(
            f"{file} does not end in .gguf" if file.is_file() else f"{file} does not exist",
            code="missing_file",
            expected="a run, or a file that ends in .gguf",
            got=str(file),
            hint="skill-train export-gguf RUN",
        )
    return Chosen(file, Model(file.name, file))


def _shipped(run: RunDir) -> str:
    """The file that the Modelfile names, or else the last GGUF file, or else the trained model."""
    named = model_of(run.gguf / "Modelfile")
    names = [path.name for path in run.ggufs]
    if named is not None and Path(named).name in names:
        return Path(named).name
    if names:
        return names[-1]
    return "merged" if run.is_full or (run.merged / "config.json").is_file() else "adapter"


def _model(run: RunDir, base: Path, word: str, folders: tuple[str, ...]) -> Model:
    folder = word if word in folders else None
    if folder == "base":
        return Model("base", base)
    if folder == "merged":
        if not (run.merged / "config.json").is_file():
            raise UsageError(
                f"{run.path} has no merged model yet",
                code="missing_step",
                expected="a model in merged/",
                hint=f"skill-train merge {quoted(run.path)}",
            )
        return Model("merged", run.merged)
    if folder == "adapter":
        require_adapter(run, f"skill-train chat {quoted(run.path)} --file merged")
        return Model("adapter", base, run.adapter)
    files = {path.name: path for path in run.ggufs}
    endings = (f"-{word}.gguf", f"-{plain_type(word)}.gguf")
    by_type = {name: path for name, path in files.items() if name.endswith(endings)}
    if word in files or len(by_type) == 1:
        path = files.get(word) or next(iter(by_type.values()))
        return Model(path.name, path)
    raise UsageError(
        f"{run.path} has no {'model' if folders else 'GGUF file'} {word!r}{nearest(word, [*folders, *files])}",
        code="missing_file",
        expected=", ".join([*folders, *files]) or "a file in gguf/",
        got=word,
        hint="give the whole name of the file" if by_type else _way_to(run, word, bool(folders or files)),
    )


def _way_to(run: RunDir, word: str, has_others: bool) -> str:
    """The hint for a missing model: a known type can be exported."""
    if plain_type(word) not in BITS:
        return "give one of the expected names" if has_others else f"skill-train export-gguf {quoted(run.path)}"
    return f"skill-train export-gguf {quoted(run.path)} --quant {quoted(plain_type(word))}"
