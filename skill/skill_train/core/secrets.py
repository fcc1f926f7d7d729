"""Secrets: refuses Hub tokens in the wrong place, such as an argument, and reads keys from a variable or a file.

A token that was found is not printed, and the command ends.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError

# A user token is hf_ and 34 letters, an older token of an organisation api_org_ and 34 (huggingface.co/docs/hub,
# 2026-08). Tokens of a sign-in with the browser begin with hf_oauth_. Tokens that the Hub signs begin with hf_jwt_:
# three parts in base64url with dots between. Letters of other alphabets are not part of a word here.
BEGINNINGS = ("hf_", "api_org_")
_LEAST_KEY = 16  # characters of a key that a stranger must not guess
LEAST = 20  # letters; names such as hf_transfer are shorter
# A word begins after a character that is not part of a word, or after its escape, as JSON (\\n, \\u001b), Python
# (\\x1b), a URL (%3D) or a terminal colour writes it, or after Markdown's two underscores.
_BEGINS = (
    r"(?:(?<![A-Za-z0-9_])|(?<=__)|(?<=\\[abefnrtv0])|(?<=\\u[0-9A-Fa-f]{4})|(?<=\\x[0-9A-Fa-f]{2})|(?<=%[0-9A-Fa-f]{2})"
    r"|(?<=[0-9;\[]m))"
)


def token_pattern(least: int = LEAST) -> re.Pattern[str]:
    """The pattern of a Hub token. Group 1 is the kind of token; at least `least` letters follow it. With a smaller
    `least` it also matches words that may be no tokens."""
    signed = rf"(?:(?<=oauth_)|(?<=jwt_))[\w.~+/=-]{{{least},}}"
    return re.compile(rf"{_BEGINS}(hf_oauth|hf_jwt|hf|api_org)_(?:{signed}|[A-Za-z0-9]{{{least},}})", re.ASCII)


_TOKEN = token_pattern()


def masked(text: str) -> str:
    """The text with each token replaced by its kind and three dots. The token in use is replaced even inside a word."""
    own = os.environ.get("HF_TOKEN", "")
    text = text.replace(own, "hf_…") if len(own) >= LEAST else text
    if not any(beginning in text for beginning in BEGINNINGS):  # a hundred times faster than the pattern
        return text
    return _TOKEN.sub(r"\1_…", text)


def holds_token(value: Any) -> bool:
    """Whether a text, or a text inside a list or mapping, contains a token. Values that YAML anchors repeat are checked
    once."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and masked(value) != value:
            return True
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
    return False


def refuse_in_arguments(arguments: Iterable[str]) -> None:
    """Raises UsageError if an argument contains a token, which is then in the shell's history and the process list."""
    for position, argument in enumerate(arguments, start=1):
        if holds_token(argument):
            raise pasted(f"argument {position}", "a command line without a token")


def pasted(where: str, expected: str) -> UsageError:
    return UsageError(
        f"{where} seems to contain a Hugging Face token",
        code="secret_found",
        expected=expected,
        hint="remove it, revoke it at https://huggingface.co/settings/tokens, then sign in with: hf auth login",
    )


def read_key(source: str) -> str:
    """The key in a variable (`env:NAME`) or a file. Neither the key nor `source`, which may be the key, is printed.

    Raises:
        UsageError: there is no key, or it is too short.
    """
    name = source.removeprefix("env:")
    if name != source:
        key, where = os.environ.get(name, "").strip(), "the variable"
    else:
        try:
            key, where = Path(source).read_text(encoding="utf-8").strip(), "the file"
        except (OSError, ValueError):
            raise _no_key("the key stands neither in a variable nor in a file that can be read") from None
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise _no_key(f"{where} holds no usable key")
    return key


def _no_key(message: str) -> UsageError:
    return UsageError(
        message,
        code="secret_found" if message.startswith("the key") else "bad_usage",
        expected=f"env:NAME or a file, with {_LEAST_KEY} characters or more, without spaces",
        hint="write the key into a variable or a file: everybody on this machine sees the arguments of a command",
    )
