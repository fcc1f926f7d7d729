"""Who asks, and what they may do."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from hub_emulator.wire import Answer, Call, Refused, json_answer

_REAL = re.compile(
    r"(Bearer\s+)?(hf|api_org|hf_oauth)_[A-Za-z0-9]{30,}"
)  # one made by this server has a second underscore


@dataclass(frozen=True)
class Access:
    """A token's rights.

    Attributes:
        user: its owner.
        role: `write`, `read` or `fineGrained`, as the Hub says it.
        may: of `repo.write` (buckets too) and `job.write`; reading is allowed to all.
    """

    user: str
    role: str
    may: frozenset[str]


class Accounts:
    """One user, in one organisation, with as many tokens as a test makes."""

    def __init__(self, user: str, organisation: str) -> None:
        self.user, self.organisation = user, organisation
        self._tokens: dict[str, Access] = {}

    def token(self, role: str, may: tuple[str, ...]) -> str:
        """A new token. It cannot be taken for a real one, nor a real one for it."""
        made = f"hf_emulator_{secrets.token_hex(12)}"
        self._tokens[made] = Access(self.user, role, frozenset(may))
        return made

    def access(self, authorization: str | None) -> Access | None:
        """Who asks; None for nobody.

        Raises:
            Refused: 401 for a token that this server did not make.
        """
        if authorization is None:
            return None
        if looks_real(authorization):
            raise Refused(401, "Invalid credentials in Authorization header: this is no place for a real token")
        found = self._tokens.get(authorization.removeprefix("Bearer "))
        if found is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return found


def looks_real(authorization: str) -> bool:
    return _REAL.fullmatch(authorization) is not None


def check_write(call: Call, namespace: str, right: str = "repo.write") -> None:
    """Refuses who may not write there. The words: users' reports of huggingface.co, 2026."""
    accounts = call.hub.accounts
    mine = namespace in (accounts.user, accounts.organisation)
    if call.access is None or not mine or right not in call.access.may:
        raise Refused(
            403,
            "You don't have the required permissions to complete this action on namespace "
            f"{namespace}, missing permissions: {right}.",
        )


def whoami(call: Call) -> Answer:
    accounts, access = call.hub.accounts, call.access
    assert access is not None
    token: dict[str, Any] = {"displayName": "emulator", "role": access.role}
    if access.role == "fineGrained":
        scope = {"entity": {"type": "user", "name": access.user}, "permissions": sorted(access.may)}
        token["fineGrained"] = {"global": [], "scoped": [scope]}
    owner = {"type": "user", "id": "1" * 24, "name": access.user, "fullname": access.user, "isPro": False}
    orgs = [{"type": "org", "id": "2" * 24, "name": accounts.organisation}]
    return json_answer(owner | {"orgs": orgs, "auth": {"type": "access_token", "accessToken": token}})


def harnesses(call: Call) -> Answer:
    """The client asks for this list once a day."""
    return json_answer({})
