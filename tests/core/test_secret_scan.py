"""The scan of what leaves: every byte of any size, whatever escapes stand around or inside of a secret."""

from __future__ import annotations

import json
import random
from pathlib import Path
from urllib.parse import quote

import pytest

from skill_train.core.secret_scan import secret_in

pytestmark = pytest.mark.slow

LETTERS = "aB3" * 11 + "x"  # 34 of them, as huggingface.co makes them
TOKEN = f"hf_{LETTERS}"
JWT = "hf_oauth_eyJh.eyJz-dWIi_OiJh.c2ln-bmF0dXJl"  # a sign-in's: header, claims and signature in base64url
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU=\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize("secret", [TOKEN, JWT, f"hf_oauth_{LETTERS}", f"api_org_{LETTERS}", f"hf_jwt_{JWT[9:]}"])
@pytest.mark.parametrize(
    "place",
    [
        lambda s: s,
        lambda s: json.dumps({"log": f"login\n{s}\tdone"}),
        lambda s: json.dumps({"log": f"login\t{s}"}),
        lambda s: json.dumps(json.dumps({"log": f"\r\n{s}"})),
        lambda s: json.dumps(json.dumps(json.dumps(f"a\b{s}"))),
        lambda s: json.dumps({"a": f"é\x1b[0;32m{s}\x1b[0m"}),
        lambda s: json.dumps({"a": f"\x01{s}"}),
        lambda s: "".join(f"\\u{ord(letter):04x}" for letter in s),
        lambda s: "".join(f"\\\\x{ord(letter):02X}" for letter in s),
        lambda s: s.replace("_", "\\u005F"),
        lambda s: f"https://huggingface.co/x?next={quote('token=' + s, safe='')}",
        lambda s: quote(s.replace("_", "%5F")),
        lambda s: s.replace("_", "&#95;").replace("f", "&#x66;"),
        lambda s: repr(f"a\n{s}".encode()),
        lambda s: f"export HF_TOKEN={s}\n",
    ],
    ids=range(15),
)
def test_a_token_however_it_is_written(secret: str, place) -> None:
    assert secret_in(place(secret).encode()) == "a token of the Hub"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_a_token_in_wide_letters(encoding: str) -> None:
    assert secret_in(f"login {TOKEN}".encode(encoding)) == "a token of the Hub"


@pytest.mark.parametrize("size", [0, 21_000_000])
@pytest.mark.parametrize("at", [1 << 20, (1 << 20) - 20, 3_000_001])
def test_a_file_of_any_size_at_any_place(tmp_path: Path, size: int, at: int) -> None:
    file = tmp_path / "tokenizer.json"
    text = b'"%d": "a word of a tokenizer", ' % 7 * (max(size, 4_000_000) // 31)
    file.write_bytes(text)
    assert secret_in(file) is None
    file.write_bytes(text[:at] + b"\\n" + TOKEN.encode() + text[at:])
    assert secret_in(file) == "a token of the Hub"
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in f" {TOKEN}").encode()
    file.write_bytes(text[:at] + escaped + text[at:])
    assert secret_in(file) == "a token of the Hub"


def test_a_token_between_numbers(tmp_path: Path) -> None:
    """Weights are random bytes to a reader of text; the metadata before them is text."""
    noise = random.Random(5).randbytes(8 << 20)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(noise)
    assert secret_in(file) is None
    file.write_bytes(noise[: 5 << 20] + b"\0" + TOKEN.encode() + b"\0" + noise[5 << 20 :])
    assert secret_in(file) == "a token of the Hub"


def test_a_token_in_bold() -> None:
    """Of Markdown: two underscores on each side."""
    assert secret_in(f"the token __{TOKEN}__ is".encode()) == "a token of the Hub"
    assert secret_in(b"def test__hf_hub_download_of_a_file(): ...") is None


def test_the_token_in_use_is_found_inside_of_a_word() -> None:
    inside = f"prefix_{TOKEN}y and more".encode()
    assert secret_in(inside) is None
    assert secret_in(inside, TOKEN) == "a token of the Hub"
    assert secret_in(json.dumps(inside.decode().replace("_", "\u005f")).encode(), TOKEN) == "a token of the Hub"
    assert secret_in(b"a b c", "b") is None  # nobody's token is so short


def test_a_private_key() -> None:
    assert secret_in(KEY.encode()) == secret_in(json.dumps({"key": KEY}).encode()) == "a private key"
    assert secret_in(b"-----BEGIN PUBLIC KEY-----\nMIIB") is None
    assert secret_in(b"paste it between -----BEGIN PRIVATE KEY----- and the end") is None


@pytest.mark.parametrize(
    "text",
    ["hf_jobs", f"xhf_{LETTERS}", f"my_api_org_{LETTERS}", "import hf_transfer", "hf_oauth_client.login()"],
)
def test_other_words_are_none(text: str) -> None:
    assert secret_in(text.encode()) is None
