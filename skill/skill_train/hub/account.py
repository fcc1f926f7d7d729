"""The account that the token on this machine belongs to. The token stays inside huggingface_hub."""

from dataclasses import dataclass
from typing import Any

from skill_train.core.errors import SkillTrainError, Temporary
from skill_train.facts import JsonObject
from skill_train.hub.client import ask, prepare
from skill_train.hub.errors import GARBLED, HubResource, OfflineMode, understood


@dataclass(frozen=True)
class Account:
    """The account that the token on this machine belongs to, and its permissions."""

    state: str  # `valid`, `invalid`, `none` (no token) or `unchecked` (the Hub was not asked, or did not answer)
    # name, role: set for a valid token. The role is the Hub's name for it, such as `write` or `fineGrained`.
    name: str = ""
    role: str = ""
    # can_write, can_run_jobs: whether the token has the permission anywhere; None if that is unknown
    can_write: bool | None = None
    can_run_jobs: bool | None = None
    why: str = ""  # the reason for `unchecked`, or why the text is not a token
    status: int | None = None  # the HTTP status of the Hub's answer, if it is neither 200 nor 401
    orgs: tuple[str, ...] = ()  # the names of the owner's organisations
    # for a fine-grained token, `(user, organisation or repository, permissions)`; an empty name means everywhere
    scopes: tuple[tuple[str, frozenset[str]], ...] = ()

    def may(self, permission: str, where: str) -> bool | None:
        """Whether the token has a permission (`repo.write`, `job.write`) in a namespace or for one repository; None if
        the Hub does not say."""
        if self.role != "fineGrained":
            return self.can_write
        places = ("", where, where.split("/")[0])
        return any(permission in permissions for name, permissions in self.scopes if name in places)


def account(seconds: float = 4.0) -> Account:
    """Asks the Hub once who the token belongs to. Never raises, and the answer contains no part of the token."""
    prepare()
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, get_token

    token = get_token()
    if token is None:
        return Account("none")
    if not token.isascii():
        return Account("invalid", why=GARBLED)
    if constants.is_offline_mode():
        return Account("unchecked", why="HF_HUB_OFFLINE is set")

    def question() -> Any:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        try:
            return get_session().get(url, headers=build_hf_headers(token=token), timeout=seconds)
        except HfHubHTTPError as error:  # the Hub asks for a long pause
            return error.response

    try:
        answer = ask(HubResource("token"), question, seconds=2 * seconds)
        if answer.status_code == 401:
            return Account("invalid")
        if answer.status_code != 200:
            status = answer.status_code
            return Account("unchecked", why=f"the Hub answered {status}", status=status)
        with understood(HubResource("token")):
            return _account(answer.json())
    except Temporary as error:
        reason = f"the Hub cannot be reached ({error.got.partition(':')[0]})"
        return Account("unchecked", why=reason if error.code == "hub_unreachable" else error.message)
    except (SkillTrainError, OSError, ValueError) as error:
        return Account("unchecked", why=f"the Hub cannot be reached ({type(error).__name__})")


def no_answer(account: Account) -> Temporary:
    offline = "HF_HUB_OFFLINE" in account.why
    return (OfflineMode if offline else Temporary)(
        f"the token cannot be checked: {account.why}",
        code={None: "hub_unreachable", 429: "rate_limit"}.get(account.status, "hub_error"),
        expected="an answer of the Hub",
        got=account.why,
        hint="unset HF_HUB_OFFLINE" if offline else "try again in a few minutes",
    )


def token() -> str | None:
    """The token itself, for a program that reads it from an environment variable."""
    from huggingface_hub import get_token

    value: str | None = get_token()
    return value


def _account(answer: JsonObject) -> Account:
    """Reads the account and the token's permissions. A `write` token has all permissions of its owner. A `fineGrained`
    token has the permissions that it lists."""
    token = (answer.get("auth") or {}).get("accessToken") or {}
    role, name = str(token.get("role") or ""), str(answer.get("name") or "")
    orgs = tuple(str(org.get("name")) for org in answer.get("orgs") or ())
    if role == "fineGrained":
        scopes = tuple(_scopes(token.get("fineGrained") or {}))
        may = {permission for _, permissions in scopes for permission in permissions}
        return Account("valid", name, role, "repo.write" in may, "job.write" in may, orgs=orgs, scopes=scopes)
    allowed = {"write": True, "admin": True, "read": False}.get(role)  # a sign-in by browser (OAuth) has no role
    return Account("valid", name, role, allowed, allowed, orgs=orgs)


def _scopes(fine: JsonObject) -> list[tuple[str, frozenset[str]]]:
    """The permissions of a fine-grained token, in the form that trufflehog's analyzer reads (2026). An entity is a
    user, an organisation or a repository."""
    scopes = [("", frozenset(fine.get("global") or ()))]
    for scope in fine.get("scoped") or ():
        entity = scope.get("entity") or {}
        # A scope without a name matches no namespace and no repository.
        scopes.append((str(entity.get("name") or "?"), frozenset(scope.get("permissions") or ())))
    return scopes
