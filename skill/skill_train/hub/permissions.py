"""Checks before a push, without writing anything: the token, the repository, the permission."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from skill_train.core.errors import AccessError, SkillTrainError, Temporary
from skill_train.hub import account, repositories
from skill_train.hub.account import Account
from skill_train.hub.upload import public_refusal


class PushAccess(TypedDict):
    """The state of a push target; a value is None if it could not be checked.

    Attributes:
        repository: `new`, `private` or `public`.
    """

    account: str | None
    repository: str | None
    may_write: bool | None


def check_push_access(
    repo: str, *, private: bool, warn: Callable[[str, str], None]
) -> tuple[PushAccess, SkillTrainError | None]:
    """The state of the push target, and the error with which the push would end. Warns about what could not be
    checked."""
    access: PushAccess = {"account": None, "repository": None, "may_write": None}
    who = account.account()
    if who.state == "unchecked":
        warn("not_checked", f"token, repository and write access were not checked: {who.why}")
        return access, None
    try:
        _require_token(who)
        access["account"] = who.name
        there = repositories.find("model", repo)
        access["repository"] = "new" if there is None else "private" if there.private else "public"
        if there is not None:
            repositories.check_access("model", repo, write=True)
            access["may_write"] = True
        else:
            access["may_write"] = _may_create(who, repo)
    except Temporary as error:
        warn("not_checked", f"write access to {repo} was not checked, because the Hub did not answer: {error.message}")
        return access, None
    except SkillTrainError as error:
        access["may_write"] = False
        return access, error
    if access["may_write"] is None:
        warn("not_checked", f"the Hub does not say whether this token may write to {repo}; the push will show it")
    return access, public_refusal(repo) if private and access["repository"] == "public" else None


def _require_token(who: Account) -> None:
    if who.state == "valid":
        return
    none = who.state == "none"
    raise AccessError(
        "you are not signed in to the Hugging Face Hub" if none else "the Hub does not accept your token",
        code="not_signed_in" if none else "bad_token",
        expected="a token with write access",
        hint="hf auth login",
    )


def _may_create(who: Account, repo: str) -> bool | None:
    """Whether the token may create this repository; None if the Hub does not say.

    Raises:
        AccessError: it may not.
    """
    namespace = repo.split("/")[0]
    theirs = namespace not in (who.name, *who.orgs) and who.role != "fineGrained"
    may = who.may("repo.write", repo)
    if theirs or may is False:
        raise AccessError(
            f"{namespace} is neither your user name nor one of your organisations"
            if theirs
            else f"your token may not write to {namespace}",
            code="no_permission",
            expected=f"{who.name}/… or one of its organisations, and a token that may write there",
            got=f"{repo}, by {who.name} with a {who.role or 'signed-in'} token",
            hint="https://huggingface.co/settings/tokens",
        )
    return may
