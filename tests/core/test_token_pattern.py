"""What is a token of the Hub is said once: the console, the recipe, the report and the scan of a push agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skill_train.core.secrets import holds_token, masked
from skill_train.hub.upload import PushFile
from skill_train.publish.files import secret_in_files
from skill_train.report.words import placeless

LETTERS = "aB3" * 11 + "x"  # 34 of them, as huggingface.co makes them
KINDS = ("hf", "hf_oauth", "api_org")
PACKAGE = Path(__file__).resolve().parents[2] / "skill" / "skill_train"
# How one stands in a file: alone, in JSON, in an address, after another alphabet, twice.
PLACES = ("{}", '{{"token": "{}"}}', "https://me:{}@huggingface.co/x", "Schlüssel:é{}", "{0} and {0}", "export HF={}\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_reader_knows_every_kind(kind: str, place: str) -> None:
    text = place.format(f"{kind}_{LETTERS}")
    assert holds_token(text) and LETTERS not in masked(text)
    assert LETTERS not in placeless({"a": text}, [])["a"]
    clean = PushFile("a.txt", None, b"clean")
    assert secret_in_files([clean, PushFile("b.txt", None, text.encode())]) == ("b.txt", "a token of the Hub")
    assert secret_in_files([clean, PushFile(text, None, b"clean")]) == (text, "a token of the Hub")


@pytest.mark.parametrize("text", ["hf_jobs", "hf_hub_download", f"xhf_{LETTERS}", f"my_api_org_{LETTERS}", "hf_oauth"])
def test_no_reader_takes_another_word_for_one(text: str) -> None:
    assert not holds_token(text) and masked(text) == text == placeless(text, [])
    assert secret_in_files([PushFile("a.txt", None, text.encode())]) is None


@pytest.mark.parametrize("before", ["\\n", "\\t", "\\\\n", "\x1b[31m", "\\u001b[0m", "token%3D", "\\x0a"])
def test_an_escape_before_it_hides_no_token(before: str) -> None:
    """As a log's line in JSON, or the repr of one."""
    text = f"login:{before}hf_{LETTERS} done"
    assert holds_token(text) and LETTERS not in masked(text) + placeless({"a": text}, [])["a"]


def test_the_whole_of_a_signed_token_is_hidden() -> None:
    """Three parts in base64url, of which the last is the signature."""
    said = masked("Authorization: Bearer hf_oauth_eyJhbGciOiJFZERTQSJ9.eyJz-dWIi_OiJh.c2ln-bmF0dXJl, done")
    assert said == "Authorization: Bearer hf_oauth_…, done"


def test_no_other_module_has_a_pattern_of_its_own() -> None:
    own = [
        path.name
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"hf\b[^\n]*_\[A-Za-z|api_org", path.read_text())
    ]
    assert own == ["secrets.py"]
