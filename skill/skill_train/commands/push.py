"""`push`: sends a run's adapter, merged model or GGUF files to the Hub, with a card that contains the proof."""

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from skill_train.commands._chosen_model import warn_of_origin
from skill_train.commands._command import PATH, argument, command, option
from skill_train.commands._ended_training import smoke_failure, warn_of_base_rows
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.gguf.export_files import parameters_in
from skill_train.hub import repositories, upload
from skill_train.hub.upload import PushFile, Uploaded
from skill_train.plan.ancestry import sensitive_run
from skill_train.plan.where import stays_here
from skill_train.publish.files import (
    chosen_parts,
    evaluation_of,
    exported_by,
    files_of,
    half_of_a_pair,
    proof_of,
    records_of,
    require_own_weights,
    secret_in_files,
    whole_models,
    without_others,
)
from skill_train.publish.model_card import CardFacts, card
from skill_train.publish.push_record import Push, PushedFile, PushInputs, PushTarget
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run import export_record, plan_record, records
from skill_train.run.earlier_start import trained
from skill_train.run.folder import RunDir, open_run
from skill_train.run.lock import locked


@dataclass(frozen=True)
class PushOptions:
    run: Path = argument(PATH)
    repo: str | None = option(None, "Repository on the Hub, NAMESPACE/NAME.  [default: the recipe's hub_model_id]")
    part: tuple[str, ...] = option(
        (), "Part to push; repeat for more.  [default: gguf and adapter, or else merged]", ("gguf", "adapter", "merged")
    )
    include: tuple[str, ...] = option((), "Another file to push that is left out by default, such as a program.")
    public: bool = option(False, "Make a new repository public.  [default: private]")
    dry_run: bool = option(False, "List files and sizes; send nothing.")


@dataclass(frozen=True)
class _Push:
    run: RunDir
    recipe: ResolvedRecipe
    facts: CardFacts  # without the licence, which is read later
    files: list[PushFile]
    left_out: list[str]  # files of the run that do not belong to a model or an adapter

    def data(self) -> dict[str, object]:
        return {
            "repo": self.facts.repo,
            "parts": list(self.facts.parts),
            "private": self.facts.private,
            "verdict": self.facts.proof.verdict if self.facts.proof else None,
            "bytes": sum(file.size for file in self.files),
            "left_out": self.left_out,
            "files": msgspec.to_builtins(self.pushed),
        }

    @property
    def pushed(self) -> list[PushedFile]:
        return [PushedFile(file.path, file.size, file.changed) for file in self.files]


@command(
    PushOptions,
    "skill-train push runs/first --repo me/tickets-0.5b --dry-run",
    "skill-train push runs/first --repo me/tickets-0.5b --part gguf --public",
)
def push(options: PushOptions, console: Console) -> Result:
    """Push a run's adapter, merged model or GGUF files to the Hub, with a model card that contains the proof."""
    with locked(open_run(options.run), "push"):  # no step can change the files between the check and the upload
        return _push_locked(options, console)


def _push_locked(options: PushOptions, console: Console) -> Result:
    push = gathered(options, console)
    facts = push.facts
    if "gguf" in facts.parts and facts.proof is None:
        again = f"skill-train verify {quoted(options.run)}"
        console.warn("not_verified", f"some of these GGUF files have not been verified in their current state: {again}")
        warn_of_origin(console, push.run)
    if failure := smoke_failure(push.run, facts.training):
        console.warn("smoke_failed", f"{failure.message}; the card says so")
    half = half_of_a_pair(push.run, push.files)
    if half:
        console.warn("verdict_warn", f"{half}; skill-train export-gguf {quoted(options.run)}")
    shown = push
    if options.public and (private := repositories.is_private(facts.repo)) is not False:
        is_it = "is private" if private else "may be private, as the Hub does not say"
        opens = f"to open it: hf repos settings {facts.repo} --public"
        console.warn("stays_private", f"{facts.repo} {is_it}, which a push does not change; {opens}")
        shown = replace(push, facts=replace(facts, private=True))
    push.files.append(card_file(shown, half))
    _refuse_secrets(push.files)
    if "adapter" in facts.parts:
        require_own_weights(push.run, facts.training)
    if options.dry_run:
        return _dry_run(options, console, push)
    message = f"skill-train: {', '.join(facts.parts)}"
    sent = upload.upload(facts.repo, push.files, private=facts.private, message=message, say=console.status)
    if sent.other_weights:
        named = ", ".join(sent.other_weights[:8])
        console.warn("other_files", f"{facts.repo} also holds {named}, not of this push; its card is silent on them")
    try:
        _record(push, sent)
    except OSError as error:  # only a warning, because the push is done
        console.warn("not_recorded", f"{facts.repo} has the files, but push.json could not be written: {error}")
    return Result(push.data() | asdict(sent), quiet=sent.url)


def gathered(options: PushOptions, console: Console) -> _Push:
    """The files and records to push, and the facts for the card."""
    folder = open_run(options.run)
    training, plan = trained(folder), plan_record.read(folder.plan)
    base_of = sensitive_run(plan.recipe.model)
    if plan.policy.sensitive or base_of:
        raise stays_here(f"push {options.run}", base_of)
    repo = _repository(options.repo or plan.policy.hub_model_id, options.run)
    parts = chosen_parts(folder, options.part)
    base, on_hub = _base(plan.recipe)
    files, others = without_others(files_of(folder, parts, base), options.include)
    if others:
        named = ", ".join(others[:8])
        console.warn(
            "left_out", f"not pushed, because they are not files of a model or an adapter: {named}; --include adds one"
        )
    proof, evaluation = proof_of(folder, files), evaluation_of(folder, files)
    local_data = Path(plan.recipe.data).is_absolute()
    facts = CardFacts(
        repo=repo,
        parts=parts,
        base=base,
        base_on_hub=on_hub,
        data=Path(plan.recipe.data).name if local_data else plan.recipe.data,
        data_on_hub=not local_data,
        recipe=plan.recipe.as_dict(),
        recipe_hash=plan.recipe_hash,
        training=training,
        proof=proof,
        evaluation=evaluation,
        base_may_know=evaluation is not None and warn_of_base_rows(console, folder),
        private=not options.public,
    )
    sampling = _ollama_parameters(folder) if "gguf" in parts else []
    return _Push(folder, plan.recipe, facts, [*files, *sampling, *records_of(folder, proof, evaluation)], others)


def _ollama_parameters(run: RunDir) -> list[PushFile]:
    """`params`, from which `ollama run hf.co/…` takes sampling and stop words (https://huggingface.co/docs/hub/ollama).
    The system message of the Modelfile is of the data, and is not sent."""
    parameters = parameters_in(run.gguf / "Modelfile")
    content = (json.dumps(parameters, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")
    return [PushFile("params", None, content, "of the Modelfile")] if parameters else []


def _dry_run(options: PushOptions, console: Console, push: _Push) -> Result:
    words = [word for name in options.part for word in ("--part", name)] + ["--public"] * options.public
    words += [word for name in options.include for word in ("--include", name)]
    following = [shlex.join(["skill-train", "push", str(options.run), "--repo", push.facts.repo, *words])]
    access, error = upload.check_push_access(push.facts.repo, private=push.facts.private, warn=console.warn)
    return Result(
        {"dry_run": True, **push.data(), "access": access},
        quiet=push.facts.repo,
        next=[] if error else following,
        error=error,
    )


def _repository(repo: str | None, run: Path) -> str:
    hint = f"skill-train push {quoted(run)} --repo NAMESPACE/NAME"
    if repo is None:
        raise UsageError(
            "no repository was given, and the recipe has no hub_model_id",
            code="bad_usage",
            expected="--repo NAMESPACE/NAME",
            hint=hint,
        )
    repositories.check_name(repo, hint)
    return repo


def _base(recipe: ResolvedRecipe) -> tuple[str, bool]:
    """The name of the base, and whether it is on the Hub. For a folder, the name is that of the folder."""
    path = Path(recipe.model)
    return (path.name, False) if path.is_dir() or path.is_absolute() else (recipe.model, True)


def card_file(push: _Push, half: str) -> PushFile:
    """The card of the repository. `half` is the sentence about a missing model or projector, or empty."""
    facts = push.facts
    licence = upload.licence_of(facts.base) if facts.base_on_hub else upload.licence_in(Path(push.recipe.model))
    reason = "as its card says" if licence else "the card of the base names none, or could not be read"
    facts = replace(
        facts,
        licence=licence,
        licence_reason=reason,
        projector=next(iter(exported_by("mmproj", push.run, push.files)), None),
        lora=next(iter(exported_by("lora_gguf", push.run, push.files)), None),
        half_of_a_pair=half,
        ggufs={name: file.stat().st_size for name, file in whole_models(push.run, push.files).items()},
        matrices=_matrices(push.run),
    )
    template = resources.template("model_card.md").read_text(encoding="utf-8")
    return PushFile("README.md", None, card(facts, template).encode("utf-8", "replace"), "made from the run")


def _matrices(run: RunDir) -> dict[str, str]:
    files = export_record.outputs(run.path)
    uses = {Path(name).name: file["imatrix"] for name, file in files.items() if "imatrix" in file}
    return {name: f"{use['file']}, of {use['data']}" for name, use in uses.items()}


def _refuse_secrets(files: list[PushFile]) -> None:
    secret = secret_in_files(files)
    if secret is None:
        return
    name, kind = secret
    mend = "revoke the token at https://huggingface.co/settings/tokens" if "token" in kind else "replace the key"
    raise UsageError(
        f"{name} seems to contain {kind}, so nothing was pushed",
        code="secret_found",
        expected="files and names without secrets",
        hint=f"remove it, and {mend}",
    )


def _record(push: _Push, sent: Uploaded) -> None:
    record = Push(
        inputs=PushInputs(push.facts.recipe_hash),
        options=PushTarget(push.facts.repo, list(push.facts.parts), push.facts.private),
        files=push.pushed,
        url=sent.url,
        commit=sent.commit,
        created=sent.created,
        reused=sent.reused,
        private=sent.private,
        finished_at=records.timestamp(),
    )
    records.write(push.run.record("push"), record)
