"""The checks before anything is uploaded or paid for. Each error has a hint with the next command."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skill_train.core.errors import AccessError, Temporary, UsageError, nearest, quoted
from skill_train.facts import Flavor
from skill_train.hub import account as hub_account
from skill_train.hub import models, repositories
from skill_train.hub.account import Account
from skill_train.hub.client import ask, patiently
from skill_train.hub.errors import HubResource, not_signed_in, sign_in
from skill_train.hub.repositories import Repository, public_place
from skill_train.program.cloud.file_names import PROOF, result_names
from skill_train.run.plan_record import Plan

_TOKENS = "https://huggingface.co/settings/tokens"
# The files of a repository that holds no work yet.
_EMPTY = {".gitattributes", "README.md", PROOF}


def signed_in_account() -> Account:
    """The account that the token on this machine belongs to.

    Raises:
        AccessError: there is no token, or the Hub does not know or refuses it.
        UsageError: HF_ENDPOINT does not name a Hub.
        Temporary: the Hub does not answer.
    """

    def question() -> Account:
        account = hub_account.account()
        if account.status in (402, 403, 404):
            raise _refused(account.status)
        if account.state == "unchecked":
            raise hub_account.no_answer(account)
        return account

    account = patiently(question)
    if account.state == "none":
        raise not_signed_in(expected="a token that may write and run jobs (job.write)")
    if account.state == "invalid":
        raise AccessError(
            "the Hub does not accept your token", code="bad_token", got=account.why or "status 401", hint=sign_in()
        )
    return account


def namespace(account: Account, requested: str | None, *, of_job: bool = True) -> str:
    """The user or organisation that runs and pays for the job, or that owns the bucket of a run on another cloud.

    Raises:
        AccessError: the namespace belongs to somebody else, or the token may not run jobs or write there.
    """
    name = requested or account.name
    allowed = (account.name, *account.orgs)
    if name not in allowed:
        raise AccessError(
            f"{name} is neither your user name nor one of your organisations",
            code="no_permission",
            expected=" or ".join(allowed),
            got=name,
            hint=f"use --namespace {account.name}, or omit the option",
        )
    for permission in ("job.write", "repo.write") if of_job else ("repo.write",):
        _require(account, permission, name)
    return name


def result_repository(account: Account, name: str, method: str) -> tuple[str, ...]:
    """Checks the repository for the result. Returns its files; empty if it does not exist or holds no work yet.

    Raises:
        UsageError: the name is not a repository id, or the repository's .gitignore leaves files of the result out.
        AccessError: the repository belongs to somebody else, or the token may not write there.
        DecisionNeeded: the repository is public.
    """
    _require_own(account, name, "the result", "--hub-model-id")
    owner = name.split("/")[0]
    repository = patiently(lambda: repositories.find("model", name))
    if repository is None:
        return ()
    patiently(lambda: repositories.check_access("model", name, write=True))
    _require_private(repository, f"make it private, or --hub-model-id {owner}/ANOTHER-NAME")
    _ask_taken(repository, method)
    return tuple(file for file in repository.files if file not in _EMPTY)


def require_places_of_next_job(plan: Plan, bucket: str | None) -> None:
    """Checks that the bucket and the repository, to which the next job of a run writes, are still private, and that the
    repository takes the result. A place that does not exist, or that the token may not see, is skipped.

    Raises:
        DecisionNeeded: the bucket or the repository is public.
        UsageError: the .gitignore of the repository leaves files of the result out.
    """
    name = plan.policy.hub_model_id
    with contextlib.suppress(AccessError):
        if bucket:
            _require_private_bucket(bucket)
    with contextlib.suppress(AccessError):
        if name and (repository := patiently(lambda: repositories.find("model", name))):
            _require_private(repository, f"https://huggingface.co/{name}/settings makes it private")
            _ask_taken(repository, plan.recipe.finetuning_type)


def _require_private_bucket(bucket: str) -> None:
    if patiently(lambda: repositories.bucket_is_private(bucket)) is False:
        raise public_place(f"the bucket {bucket}", f"make it private on https://huggingface.co/buckets/{bucket}")


def _require_private(result: Repository, hint: str) -> None:
    if not result.private:
        raise public_place(f"the repository {result.name}", hint)


def _ask_taken(repository: Repository, method: str) -> None:
    name = repository.name
    if ".gitignore" in repository.files:
        names = {PROOF, *result_names(method)}
        patiently(lambda: ask(HubResource("model", name), lambda: repositories.ask_taken("model", name, names)))


def require_readable(plan: Plan) -> None:
    """Checks that the token can read the model and the dataset.

    Raises:
        UsageError: one of them is unknown or private.
        AccessError: one of them is gated.
    """
    patiently(lambda: repositories.check_access("model", plan.recipe.model))
    if not local_data(plan):
        patiently(lambda: repositories.check_access("dataset", plan.recipe.data))


def flavor(name: str) -> Flavor:
    """The machine with its current price, from the Jobs API.

    Raises:
        UsageError: the flavor is not offered.
        Temporary: the Hub does not answer.
    """
    offered = {each.name: each for each in patiently(models.live_flavors)}
    if name not in offered:
        raise UsageError(
            f"Hugging Face Jobs does not offer {name}{nearest(name, offered)}",
            code="unknown_flavor",
            expected=", ".join(offered),
            got=name,
            hint="omit --flavor, or plan again",
        )
    return offered[name]


def require_private_places(place: str, data_repo: str | None, account: Account, *, with_data: bool) -> tuple[str, ...]:
    """Checks that the bucket (program, plan, checkpoints) and the dataset repository are private. Returns the files
    that the dataset repository already has.

    Raises:
        DecisionNeeded: one of them already exists and is public.
        AccessError: the token may not write to the dataset repository.
    """
    _require_private_bucket(f"{place}/jobs-artifacts")
    if data_repo is None or not with_data:
        return ()
    _require_own(account, data_repo, "the data", "--data-repo")
    repository = patiently(lambda: repositories.find("dataset", data_repo))
    if repository is None:
        return ()
    patiently(lambda: repositories.check_access("dataset", data_repo, write=True))
    if not repository.private:
        raise public_place(f"the dataset {data_repo}", "another --data-repo, or leave it out")
    return repository.files


def local_model_error(folder: str, owner: str | None) -> UsageError:
    name = Path(folder).resolve().name
    own = name if name != "merged" else f"{Path(folder).resolve().parent.name}-merged"  # every run has a `merged`
    where = f"{owner or 'NAMESPACE'}/{own}"
    return UsageError(
        f"the model {folder} is on this machine only, and a job cannot read it",
        code="local_input",
        expected="the id of a model on the Hub, public or private",
        got=folder,
        hint=f"hf upload {quoted(where)} {quoted(folder)} --private, then --model {quoted(where)}",
    )


def local_data(plan: Plan) -> bool:
    return plan.fingerprints["data"] is not None


def unless_unavailable(check: Callable[[], Any], what: str, unchecked: list[str]) -> Any:
    """The result of a check. If the Hub does not answer, it returns None and adds a sentence to `unchecked`."""
    try:
        return check()
    except Temporary as error:
        unchecked.append(f"{what}: {error.message}")
        return None


def _refused(status: int) -> AccessError | UsageError:
    """The error if the Hub permanently refuses to identify a token, with status 402, 403 or 404."""
    context = {"expected": "an account", "got": f"status {status}"}
    if status == 404:
        message = "this Hub cannot say who a token belongs to"
        return UsageError(message, code="hub_refused", **context, hint="check HF_ENDPOINT or unset it")
    code = "no_credit" if status == 402 else "no_permission"
    return AccessError("the Hub does not say who the token belongs to", code=code, **context, hint=sign_in())


def _require_own(account: Account, name: str, what: str, option: str) -> None:
    """Refuses a repository of somebody else, and a repository that the token may not write to."""
    repositories.check_name(name, f"{option} NAMESPACE/NAME")
    owner = name.split("/")[0]
    if owner not in (account.name, *account.orgs):
        raise AccessError(
            f"{what} cannot be pushed to {name}: {owner} is neither your user name nor one of your organisations",
            code="no_permission",
            expected=f"a repository of {' or '.join((account.name, *account.orgs))}",
            got=name,
            hint=f"{option} {account.name}/{name.split('/')[1]}",
        )
    _require(account, "repo.write", name)


def _require(account: Account, permission: str, where: str) -> None:
    if account.may(permission, where) is False:
        raise AccessError(
            f"your token may not {'run jobs' if permission == 'job.write' else 'write'} in {where}",
            code="no_permission",
            expected=f"a token with the role write, or with the permission {permission} for {where.split('/')[0]}",
            got=f"role {account.role}",
            hint=f"{sign_in()}, with a new token of {_TOKENS}",
        )
