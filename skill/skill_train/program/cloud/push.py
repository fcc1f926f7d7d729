"""The push: the result, its records and its card in one commit to the Hub."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from skill_train.program.cloud.file_names import PROOF, result_names, without_rows
from skill_train.program.events import (
    EXIT_DOES_NOT_FIT,
    EXIT_FAILED,
    EXIT_NO_ACCESS,
    EXIT_TEMPORARY,
    UNREAD,
    Refused,
    first_line,
    tell,
)
from skill_train.program.pictures.engine import ENGINE_NOTE
from skill_train.program.plan import Plan, Recipe

PAUSES = (1, 2, 4, 8, 16, 32, 64, 128, 128)  # seconds; together longer than the 300 of the Hub's rate limit
REQUEST_SECONDS = 60.0  # to connect, to write, and for each read; huggingface_hub 2.4 sets no limit of its own


def push(plan: Plan, work: Path) -> None:
    """Pushes the result, its records and its card in one commit. A second push of the same changes nothing."""
    tell("stage", text="pushing the result")
    folder = work / ("adapter" if (work / "adapter").is_dir() else "merged")
    files: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in files_of(folder)}
    files["environment.json"] = work / "environment.json"
    files["train.json"] = as_json(without_rows(json.loads((work / "train.json").read_text(encoding="utf-8"))))
    files["recipe.json"] = as_json(shown_recipe(plan))
    try:
        files["README.md"] = model_card(plan, work, licence(plan)).encode()
        commit_id = commit(plan, files, f"Trained by skill-train, recipe {str(plan.get('recipe_hash'))[:12]}")
    except Refused as refusal:
        raise Refused(
            f"the run is trained and stored, but could not be pushed: {refusal}",
            code="push_failed",
            exit_code=EXIT_FAILED,
            expected=f"{hub_repository(plan)} takes a commit",
            got=refusal.error["got"],
            hint="start the run again, which pushes the stored result without training",
        ) from refusal
    tell("pushed", repo=hub_repository(plan), commit=commit_id)


def commit(plan: Plan, files: Mapping[str, Path | bytes], message: str) -> str:
    """Makes one commit in the private repository of the plan, which is created if it is missing. Returns its id. A
    .gitignore there must name no file of this commit or of the result."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repo = hub_repository(plan)
    if not repo:
        words = "the plan names no repository for the result"
        raise Refused(words, code="bad_plan", expected="hub_model_id: owner/name")
    api = hub()
    names = {*files, *result_names(plan["recipe"]["finetuning_type"])}

    def attempt() -> str:
        api.create_repo(repo, private=True, exist_ok=True)
        if not api.repo_info(repo).private:
            raise Refused(
                f"the repository {repo} is public, and this run stores private files",
                code="public_repository",
                exit_code=EXIT_DOES_NOT_FIT,
                expected="a private one",
                hint=f"https://huggingface.co/{repo}/settings makes it private, then start the run again",
            )
        asked = [CommitOperationAdd(name, b"") for name in sorted(names)]  # an empty file is not sent
        api.preupload_lfs_files(repo, asked)
        if left_out := [each.path_in_repo for each in asked if getattr(each, "_should_ignore", False)]:
            raise Refused(
                f"the .gitignore of {repo} leaves out {', '.join(left_out)}",
                code="output_changed",
                hint="change that file, then start the run again",
            )
        changes: list[Any] = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        if PROOF not in files and api.file_exists(repo, PROOF):
            changes.append(CommitOperationDelete(PROOF))
        return str(api.create_commit(repo, changes, commit_message=message).oid)

    return str(ask_hub(attempt, repo))


def hub_repository(plan: Plan) -> str | None:
    """The repository for the result."""
    return plan.get("policy", {}).get("hub_model_id")


def hub() -> Any:
    """The client of the Hub, without progress bars and with a time limit for each request."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if get_token() is None:
        raise Refused(
            "there is no token for the Hub",
            code="not_signed_in",
            exit_code=EXIT_NO_ACCESS,
            expected="HF_TOKEN among the secrets of the job",
        )
    limit_requests()
    disable_progress_bars()
    return HfApi()


def limit_requests() -> None:
    """Gives every request to the Hub a time limit: a job that waits for ever is paid until its timeout."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        http_client = default_client_factory()
        http_client.event_hooks["request"].append(limit)
        http_client.event_hooks["response"].append(stay_here)
        return http_client

    set_client_factory(client)


def limit(request: Any) -> None:
    """Limits a request for which huggingface_hub set no limit of its own."""
    limits = request.extensions["timeout"]
    named = {name: REQUEST_SECONDS if seconds is None else seconds for name, seconds in limits.items()}
    request.extensions = {**request.extensions, "timeout": named}


def stay_here(response: Any) -> None:
    """Refuses a redirect of a request with a body to another host, and one that would drop the body."""
    request = response.request
    if request.method in ("GET", "HEAD") or not response.has_redirect_location:
        return
    target = request.url.join(response.headers["location"])
    same = all(getattr(target, part) == getattr(request.url, part) for part in ("scheme", "host", "port"))
    if not same or response.status_code not in (307, 308):
        raise Refused(
            "the Hub redirected a request with a body to another host, so the request was not sent",
            code="redirected",
            exit_code=EXIT_NO_ACCESS,
            expected=f"an answer of {request.url.host}",
            got=f"status {response.status_code}, to {target.copy_with(query=None)}",
            hint="check HF_ENDPOINT and the proxy, then start the run again",
        )


def ask_hub(question: Callable[[], Any], repo: str) -> Any:
    """The Hub's answer. Waits while trouble may pass: too many requests, errors of the Hub, and lost connections."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    read = (httpx2.HTTPError, OSError, RuntimeError, *UNREAD)
    for pause in (*PAUSES, None):
        try:
            return question()
        except HFValidationError as error:
            raise Refused(f"{repo} is not a valid repository id", code="bad_plan", got=str(error)) from None
        except read as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            got = first_line(error)[:200]
            if status is not None and status < 500 and status not in (408, 409, 412, 429):
                raise no_access(repo, got) from None
            if pause is None:
                raise unreachable(repo, got) from None
            tell("note", text=f"{repo}: {got}; again in {pause} s")
            time.sleep(pause)


def no_access(repo: str, got: str) -> Refused:
    return Refused(
        f"the token may not write to {repo}",
        code="no_permission",
        exit_code=EXIT_NO_ACCESS,
        expected="a token with write access to that repository",
        got=got,
        hint="hf auth login with a token that may write there, then start the run again",
    )


def unreachable(repo: str, got: str) -> Refused:
    return Refused(
        f"the Hub did not accept a commit to {repo}",
        code="hub_unreachable",
        exit_code=EXIT_TEMPORARY,
        got=got,
        hint="start the run again; https://status.huggingface.co shows whether the Hub is down",
    )


def on_hub(plan: Plan, key: Literal["model", "data"]) -> str | None:
    """The Hub id of the model or the data; None if it was on the machine that planned."""
    name = plan["recipe"][key]
    local = plan.get("fingerprints", {}).get(key) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    return None if local else name


def shown_recipe(plan: Plan) -> Recipe:
    """The recipe without the folders of the machine that planned."""
    model, data = Path(plan["recipe"]["model"]).name, Path(plan["recipe"]["data"]).name
    return plan["recipe"] | {"model": on_hub(plan, "model") or model, "data": on_hub(plan, "data") or data}


def licence(plan: Plan) -> dict[str, str]:
    """The licence in the card of the base; empty if it has none or cannot be read."""
    base = on_hub(plan, "model")
    if base is None:
        return {}
    import httpx2

    with suppress(httpx2.HTTPError, OSError, *UNREAD):
        card = hub().model_info(base, revision=plan["recipe"]["revision"]).card_data
        fields = {key: card.get(key) for key in ("license", "license_name")} if card is not None else {}
        return {key: value for key, value in fields.items() if isinstance(value, str)}
    return {}


def model_card(plan: Plan, work: Path, licence: dict[str, str]) -> str:
    """README.md: metadata for the Hub between the lines of ---, then text for a reader."""
    from huggingface_hub import ModelCardData

    recipe, repo = plan["recipe"], hub_repository(plan) or ""
    adapter, data = (work / "adapter").is_dir(), on_hub(plan, "data")
    about = ModelCardData(
        base_model=on_hub(plan, "model"),
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text" if recipe.get("images") else "text-generation",
        tags=["skill-train", recipe["method"], *(["lora"] if adapter else [])],
        datasets=[data] if data else None,
        **licence,
    )
    kind = "LoRA adapter" if adapter else "fine-tuned model"
    base = shown_recipe(plan)["model"] + (f" at revision {recipe['revision']}" if recipe["revision"] else "")
    return f"""---
{about.to_yaml()}
---

# {repo.rsplit("/", 1)[-1]}

A {kind} of {base}, trained by skill-train. `recipe.json` is the whole recipe, `train.json` the record of the training
without rows of the data, `environment.json` every argument of the trainer and every version.

```python
{card_use(plan, adapter)}
```
{f"{chr(10)}{ENGINE_NOTE}{chr(10)}" if recipe.get("preprocess") == "engine" else ""}
{card_figures(plan, work)}"""


def card_use(plan: Plan, adapter: bool) -> str:
    """The lines of Python that load the result. PEFT has no class that finds the base of a vision adapter itself."""
    repo, kind = hub_repository(plan) or "", "ImageTextToText" if plan["recipe"].get("images") else "CausalLM"
    if adapter and kind != "CausalLM":
        base = json.dumps(shown_recipe(plan)["model"])
        imports = f"from peft import PeftModel\nfrom transformers import AutoModelFor{kind} as Model\n\n"
        return f'{imports}model = Model.from_pretrained({base})\nmodel = PeftModel.from_pretrained(model, "{repo}")'
    source = "peft import AutoPeftModelForCausalLM" if adapter else f"transformers import AutoModelFor{kind}"
    return f'from {source} as Model\n\nmodel = Model.from_pretrained("{repo}")'


def card_figures(plan: Plan, work: Path) -> str:
    recipe: Mapping[str, object] = plan["recipe"]
    record = json.loads((work / "train.json").read_text(encoding="utf-8"))
    versions = json.loads((work / "environment.json").read_text(encoding="utf-8"))["versions"]
    figures, data = record["figures"], record["data"]
    chosen = ("method", "learning_rate", "lr_scheduler_type", "effective_batch_size", "max_length", "lora_r")
    rows = {
        "recipe hash": f"`{plan.get('recipe_hash')}`",
        "steps": record["steps"],
        "training loss, first and last step": f"{figures['first_loss']:.4f}, {figures['last_loss']:.4f}",
        "training rows, tokens": f"{data['train_rows']}, {data['tokens']}",
        "share of the tokens that is trained": f"{data['trained_token_share']:.0%}",
        **({"notes": "; ".join(data["notes"])} if data.get("notes") else {}),
        **{name: recipe[name] for name in chosen if name in recipe},
        "checks of the training program": record["verdict"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines) + "\n"


def as_json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def files_of(path: Path) -> list[Path]:
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in paths if file.is_file()]
