"""`push`: a run's adapter, merged model or GGUF files to the Hub, with a card that carries the proof."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from skill_train.commands.chain import require_trained
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.hub import permissions as push_access
from skill_train.hub import upload as hub_push
from skill_train.hub.upload import PushFile
from skill_train.publish.files import (
    chosen_parts,
    evaluation_of,
    files_of,
    proof_of,
    records_of,
    secret_in_files,
    whole_models,
    without_others,
)
from skill_train.publish.model_card import CardFacts, card
from skill_train.publish.records import published
from skill_train.run.folder import RunDir, open_run, write_record
from skill_train.run.records import read_json

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def push(
    console: Console,
    *,
    run: Path,
    repo: str | None,
    part: tuple[str, ...],
    include: tuple[str, ...],
    public: bool,
    dry_run: bool,
) -> Result:
    """Lists what would be sent, or sends it."""
    folder = open_run(run)
    require_trained(folder)
    plan = read_json(folder.plan)
    if plan["policy"]["sensitive"]:
        raise DecisionNeeded(
            "the recipe says sensitive: true, so nothing of it may leave this machine",
            code="sensitive",
            hint="keep it here, or take sensitive: true out of the recipe if it may leave",
        )
    target = _repository(repo or plan["policy"]["hub_model_id"], run)
    parts = chosen_parts(folder, part)
    base, on_hub = _base(plan["recipe"])
    files, others = without_others(files_of(folder, parts, base), include)
    if others:
        named = ", ".join(others[:8])
        console.warn("left_out", f"not of a model or an adapter, so not pushed: {named}; --include sends one")
    proof, evaluation = proof_of(folder, files), evaluation_of(folder, files)
    files += records_of(folder, proof, evaluation)
    if "gguf" in parts and proof is None:
        again = f"skill-train verify {shlex.quote(str(run))}"
        console.warn("not_verified", f"not each of these GGUF files was verified as it is now: {again}")
    files.append(_card(folder, target, parts, plan, files, base, on_hub, proof, evaluation, private=not public))
    _refuse_secrets(files)
    data = {
        "repo": target,
        "parts": list(parts),
        "private": not public,
        "verdict": proof["verdict"] if proof else None,
        "bytes": sum(file.size for file in files),
        "left_out": others,
        "files": [{"path": file.path, "bytes": file.size, "changed": file.changed} for file in files],
    }
    if dry_run:
        said = [word for name in part for word in ("--part", name)] + ["--public"] * public
        said += [word for name in include for word in ("--include", name)]
        following = [shlex.join(["skill-train", "push", str(run), "--repo", target, *said])]
        access, error = push_access.look(target, private=not public, warn=console.warn)
        return Result(
            {"dry_run": True, **data, "access": access}, quiet=target, next=[] if error else following, error=error
        )
    sent = hub_push.upload(
        target, files, private=not public, message=f"skill-train: {', '.join(parts)}", say=console.status
    )
    _record(folder, data, sent, plan)
    return Result(data | sent, quiet=sent["url"])


def _repository(repo: str | None, run: Path) -> str:
    if repo is None:
        raise UsageError(
            "no repository is named, and the recipe has no hub_model_id",
            code="bad_usage",
            expected="--repo NAMESPACE/NAME",
            hint=f"skill-train push {shlex.quote(str(run))} --repo NAMESPACE/NAME",
        )
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise UsageError(
            f"{repo!r} is not the id of a repository",
            code="bad_repo",
            expected="NAMESPACE/NAME of letters, digits, -, _ and .",
            got=repo,
            hint=f"skill-train push {shlex.quote(str(run))} --repo NAMESPACE/NAME",
        )
    return repo


def _base(recipe: dict[str, Any]) -> tuple[str, bool]:
    """`(name of the base, whether the Hub has it)`; of a folder its name only."""
    path = Path(recipe["model"])
    return (path.name, False) if path.is_dir() or path.is_absolute() else (recipe["model"], True)


def _card(
    run: RunDir,
    repo: str,
    parts: tuple[str, ...],
    plan: dict[str, Any],
    files: list[PushFile],
    base: str,
    on_hub: bool,
    proof: dict[str, Any] | None,
    evaluation: dict[str, Any] | None,
    *,
    private: bool,
) -> PushFile:
    recipe, data = plan["recipe"], plan["recipe"]["data"]
    licence = hub_push.licence_of(base) if on_hub else hub_push.licence_in(Path(recipe["model"]))
    reason = "as its card says" if licence else "the card of the base names none, or could not be read"
    local_data = Path(data).is_absolute()
    facts = CardFacts(
        repo=repo,
        parts=parts,
        base=base,
        base_on_hub=on_hub,
        licence=licence,
        licence_reason=reason,
        data=Path(data).name if local_data else data,
        data_on_hub=not local_data,
        recipe=recipe,
        recipe_hash=plan["recipe_hash"],
        training=read_json(run.record("train")),
        proof=None if proof is None else published("verify", proof),
        evaluation=evaluation,
        private=private,
        ggufs={name: file.stat().st_size for name, file in whole_models(run, files).items()},
    )
    template = resources.template("model_card.md").read_text(encoding="utf-8")
    return PushFile("README.md", None, card(facts, template).encode("utf-8", "replace"), "made from the run")


def _refuse_secrets(files: list[PushFile]) -> None:
    found = secret_in_files(files)
    if found is None:
        return
    name, what = found
    mend = "revoke the token at https://huggingface.co/settings/tokens" if "token" in what else "replace the key"
    raise UsageError(
        f"{name} holds what looks like {what}, so nothing is pushed",
        code="secret_found",
        expected="files and names without secrets",
        hint=f"take it out, and {mend}",
    )


def _record(run: RunDir, data: dict[str, Any], sent: dict[str, Any], plan: dict[str, Any]) -> None:
    write_record(
        run.record("push"),
        inputs={"recipe_hash": plan["recipe_hash"]},
        options={"repo": data["repo"], "parts": data["parts"], "private": data["private"]},
        outputs={},
        files=data["files"],
        **sent,
    )
