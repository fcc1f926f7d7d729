"""The files of a run that are pushed, and their names on the Hub. Local paths and rows of the data are removed from
them."""

import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from skill_train.core.digests import file_digest, is_file_of
from skill_train.core.errors import UsageError, VerificationFailed, quoted
from skill_train.core.secret_scan import secret_in
from skill_train.hub import account
from skill_train.hub.upload import RECORDS, PushFile
from skill_train.publish.records import published, without_paths
from skill_train.recipe.fields import to_yaml
from skill_train.run import (
    cloud_record,
    evaluate_record,
    export_record,
    merge_record,
    plan_record,
    train_record,
    verify_record,
)
from skill_train.run.evaluate_record import Evaluation, ModelInputs
from skill_train.run.folder import RunDir, require_only, require_unchanged
from skill_train.run.records import read_json
from skill_train.run.train_record import TrainRecord
from skill_train.run.verify_record import Proof

PARTS = ("gguf", "adapter", "merged")
# The files of an adapter or a model that may be pushed: weights without code, settings, tokenizers, and texts.
_KINDS = {".safetensors", ".gguf", ".json", ".jinja", ".txt", ".md", ".yaml", ".model", ".tiktoken", ".vocab", ".bpe"}
_STATEMENTS = {"LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY"}


def chosen_parts(run: RunDir, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts to push: the requested parts. By default the GGUF files and the adapter, or else the merged model.

    Raises:
        UsageError: the run has no such part.
    """
    there = {"gguf": bool(run.exported), "adapter": run.adapter.is_dir(), "merged": run.merged.is_dir()}
    missing = [part for part in parts if not there[part]]
    if missing:
        step = {"gguf": "export-gguf", "merged": "merge"}.get(missing[0])
        hint = f"skill-train {step} {quoted(run.path)}" if step else cloud_record.continue_command(run)
        raise UsageError(
            f"{run.path} has no {missing[0]} to push",
            code="missing_step",
            expected=", ".join(part for part in PARTS if there[part]) or "a trained run",
            hint=hint if step or not run.is_full else f"skill-train push {quoted(run.path)} --part merged",
        )
    chosen = parts or tuple(part for part in ("gguf", "adapter") if there[part]) or ("merged",)
    return tuple(part for part in PARTS if part in chosen)


def files_of(run: RunDir, parts: tuple[str, ...], base: str) -> list[PushFile]:
    """Every file to push except the card and the records.

    Args:
        base: the name of the base to write into the adapter's config.

    Raises:
        UsageError: the merged model was not merged from this adapter and checked, or has changed since.
    """
    files: list[PushFile] = []
    if "gguf" in parts:
        files += [PushFile(file.name, file) for file in _inside(run.gguf, run.exported)]
    if "merged" in parts:
        files += [PushFile(_name(file, run.merged), file) for file in _files(run.merged)]
        _require_checked_merge(run)
    if "adapter" in parts:
        folder = "" if parts == ("adapter",) else "adapter/"
        files += [_adapter_file(file, folder + _name(file, run.adapter), base) for file in _files(run.adapter)]
    return files


def _require_checked_merge(run: RunDir) -> None:
    """Refuses a merged model without a `merge.json` that describes it. Full fine-tuning has none: there `train.json`
    describes the model."""
    record, again = run.record("merge"), f"skill-train merge {quoted(run.path)}"
    if run.is_full:
        return
    if not record.is_file():
        raise UsageError(
            f"{run.merged} has no {record.name}, so nobody knows what it was merged from",
            code="missing_step",
            expected="a merged model that was compared with base + adapter",
            hint=again,
        )
    merge = merge_record.read(record)
    hint = f"move {quoted(record)} and {quoted(run.merged)} away, then {again}"
    described = {run.adapter / name: digest for name, digest in merge.inputs.adapter.items()}
    described |= {run.path / name: digest for name, digest in merge.outputs.items()}
    for file, digest in described.items():
        require_unchanged(file, digest, record, hint)
    require_only(run.merged, described, record)


def records_of(run: RunDir, proof: Proof | None, evaluation: Evaluation | None) -> list[PushFile]:
    """The recipe and the figures, without rows of the data and paths of this machine. `proof` and `evaluation` are None
    if they do not belong to the pushed files."""
    recipe = to_yaml(without_paths(plan_record.read(run.plan).recipe.as_dict()))
    files = [PushFile(f"{RECORDS}/recipe.yaml", None, recipe.encode("utf-8", "replace"), "paths as names")]
    training = train_record.read(run.record("train"))
    records: dict[str, TrainRecord | Proof | Evaluation | None] = {
        "train": training,
        "verify": proof,
        "evaluate": evaluation,
    }
    for step, record in records.items():
        if record is not None:
            content = _json(published(step, record))
            files.append(PushFile(f"{RECORDS}/{step}.json", None, content, "without rows of the data and local paths"))
    return files


def whole_models(run: RunDir, files: list[PushFile]) -> dict[str, Path]:
    """The GGUF files that contain a whole model, by their names in the repository."""
    ggufs = run.ggufs
    return {file.path: file.source for file in files if file.source in ggufs}


def exported_by(step: str, run: RunDir, files: list[PushFile]) -> dict[str, Path]:
    """The projectors (`mmproj`) or the adapters alone (`lora_gguf`), by their names in the repository."""
    exported = {run.path / name for name in export_record.outputs(run.path, step)}
    return {file.path: file.source for file in files if file.source in exported}


def half_of_a_pair(run: RunDir, files: list[PushFile]) -> str:
    """A sentence if only one of the two files of a vision model is pushed; otherwise empty."""
    models, projectors = whole_models(run, files), exported_by("mmproj", run, files)
    is_pair = plan_record.read(run.plan).recipe.images or run.record("mmproj").is_file()
    if models and not projectors and is_pair:
        return "no projector is pushed with the language model: llama.cpp will read text only"
    if projectors and not models:
        return "no language model is pushed with the projector: llama.cpp cannot run it alone"
    return ""


def proof_of(run: RunDir, files: list[PushFile]) -> Proof | None:
    """The proof of the pushed GGUF files, including GGUF adapters. None if no GGUF file is pushed, if a file was not
    verified, if the files were compared with the result of another training, or if they were verified together with a
    projector that is not pushed.

    Raises:
        VerificationFailed: the files failed the verification.
    """
    if not run.record("verify").is_file():
        return None
    proof = verify_record.read(run.record("verify"))
    verified = proof.inputs.ggufs
    pushed = {file.path: file.source for file in files if file.source in run.exported and file.source is not None}
    same = {name for name, source in pushed.items() if verified.get(name) == file_digest(source)}
    whole = bool(pushed) and same == pushed.keys() and _is_of_trained(proof, run)
    failed = [check for check in proof.checks if check.verdict == "fail" and (whole or check.file in same)]
    if failed:
        named = "; ".join(f"{check.file}: {check.name}" for check in failed[:4])
        raise VerificationFailed(
            f"{run.path} failed its verification ({named}), so it was not pushed",
            code="verification_failed",
            expected="files that passed",
            hint=f"skill-train verify {quoted(run.path)}",
        )
    if not whole:
        return None
    projectors = {check.file for check in proof.checks if check.name == "projector"} & verified.keys()
    return proof if projectors <= pushed.keys() else None


def _is_of_trained(proof: Proof, run: RunDir) -> bool:
    """Whether the files were compared with the trained model of this run, as far as `train.json` has its digests."""
    trained = train_record.read(run.record("train")).outputs
    verified = proof.inputs.reference if run.is_full else proof.inputs.adapter or {}
    return all(trained.get(f"{run.tuned.name}/{name}", digest) == digest for name, digest in verified.items())


def evaluation_of(run: RunDir, files: list[PushFile]) -> Evaluation | None:
    """`evaluate.json`; None if it does not exist, or if it is about another adapter or other files than the pushed
    files."""
    if not run.record("evaluate").is_file():
        return None
    evaluation = evaluate_record.read(run.record("evaluate"))
    models = evaluation.inputs.models
    tuned = models.get("tuned")
    part = None if tuned is None else tuned.model if run.is_full else tuned.adapter
    read: dict[Path, object] = {}
    if isinstance(part, dict):
        read = {run.tuned / name: digest for name, digest in part.items()}
    pairs = {source: _pair(models[name]) for name, source in whole_models(run, files).items() if name in models}
    read |= {source: model for source, (model, _) in pairs.items()}
    projectors = exported_by("mmproj", run, files).values()
    together = [any(is_file_of(path, other) for path in projectors) for _, other in pairs.values() if other is not None]
    return evaluation if all(together) and all(is_file_of(path, digest) for path, digest in read.items()) else None


def _pair(read: ModelInputs) -> tuple[object, object]:
    """The digests of a language model, and of the projector that it was evaluated with; None without a projector."""
    if not isinstance(read.model, dict):
        return read.model, None
    return {key: value for key, value in read.model.items() if key != "projector"}, read.model.get("projector")


def require_own_weights(run: RunDir, training: TrainRecord) -> None:
    """Refuses weights in `adapter/` that the training did not write. A licence or a tokenizer may lie beside it.

    Raises:
        UsageError: there are such weights.
    """
    beside = {file for file in _files(run.adapter) if file.suffix != ".safetensors"}
    require_only(run.adapter, beside.union(map(run.path.joinpath, training.outputs)), run.record("train"))


def secret_in_files(files: list[PushFile]) -> tuple[str, str] | None:
    """The first file with a secret in its name or content, as `(name, kind of secret)`; None if there is none."""
    own = account.token()
    for file in files:
        secret = secret_in(file.path.encode("utf-8", "replace"), own)
        if secret is None:
            content = file.content if file.content is not None else file.source
            secret = None if content is None else secret_in(content, own)
        if secret is not None:
            return file.path, secret
    return None


def may_leave(name: str) -> bool:
    """Whether a file with this name belongs to a model or an adapter. Hidden files, programs and pickles do not."""
    last = PurePosixPath(name).name
    hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    return not hidden and (last.upper().split(".")[0] in _STATEMENTS or PurePosixPath(last).suffix.lower() in _KINDS)


def without_others(files: list[PushFile], include: tuple[str, ...]) -> tuple[list[PushFile], list[str]]:
    """The files to push, and the names of the files that are left out because `include` does not name them.

    Raises:
        UsageError: `include` names a missing file.
    """
    names = {file.path for file in files}
    unknown = [name for name in include if name not in names]
    others = [file.path for file in files if not may_leave(file.path)]
    if unknown:
        raise UsageError(
            f"--include {unknown[0]}: the pushed parts have no such file",
            code="missing_file",
            expected=", ".join(others[:8]) or "nothing: every file is sent anyway",
            got=unknown[0],
            hint="use its path inside the pushed part, or omit --include",
        )
    left_out = [name for name in others if name not in include]
    return [file for file in files if file.path not in left_out], left_out


def _files(folder: Path) -> list[Path]:
    return _inside(folder, (path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"))


def _inside(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The sorted paths.

    Raises:
        UsageError: a link leads out of the folder. With such a link, a foreign run could push any file of this machine.
    """
    root, ordered = folder.resolve(), sorted(paths)
    for path in ordered:
        if not path.resolve().is_relative_to(root):
            raise UsageError(
                f"{path} is a link that points outside the run directory, so nothing was pushed",
                code="unsafe_link",
                expected="files of the run itself",
                got=os.readlink(path) if path.is_symlink() else "a folder above it is a link",
                hint="replace the link with the file itself to push it",
            )
    return ordered


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _adapter_file(file: Path, path: str, base: str) -> PushFile:
    if file.name != "adapter_config.json":
        return PushFile(path, file)
    config = dict(read_json(file))
    if config.get("base_model_name_or_path") == base:
        return PushFile(path, file)
    config["base_model_name_or_path"] = base
    return PushFile(path, file, _json(config), "base_model_name_or_path was a path of this machine")


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")
