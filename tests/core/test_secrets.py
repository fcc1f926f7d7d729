"""A token that somebody pastes where none belongs: refused before anything is done, and echoed nowhere."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from command_tree import commands
from one_command import called
from skill_train.cloud import preflight
from skill_train.core.errors import AccessError, UsageError
from skill_train.core.secrets import holds_token, masked
from skill_train.recipe import fields as recipes

LETTERS = "aB3" * 11 + "x"  # 34 of them, as huggingface.co makes them
TOKENS = [f"hf_{LETTERS}", f"api_org_{LETTERS}", f"hf_oauth_{LETTERS}"]


# Each option of each command that takes text, and its first argument: `--repo`, `--model`, RUN …
PLACES = [
    [*name.split(), *([parameter.opts[0]] if isinstance(parameter, click.Option) else [])]
    for name, command in commands().items()
    for parameter in command.params
    if isinstance(parameter.type, (click.types.StringParamType, click.Path)) or isinstance(parameter, click.Argument)
]


@pytest.mark.parametrize("words", PLACES, ids=" ".join)
def test_in_an_argument(words: list[str], tmp_path: Path) -> None:
    for token, format_ in zip(TOKENS, ("json", "human", "json"), strict=True):
        done = called(*words, token, "--format", format_)
        assert (done.code, LETTERS in done.stdout + done.stderr) == (2, False)
        if format_ == "json":
            assert done.error == (2, "secret_found")
    assert list(tmp_path.rglob("*")) == []


def test_the_places_are_those_of_all_commands() -> None:
    assert len(PLACES) > 50 and {"push --repo", "submit --hub-model-id", "status"} <= set(map(" ".join, PLACES))


@pytest.mark.parametrize("name", ["model", "data", "hub_model_id", "system_prompt", "lora_r", "no_such_key"])
@pytest.mark.parametrize("token", TOKENS)
def test_in_a_recipe(name: str, token: str) -> None:
    with pytest.raises(UsageError) as refused:
        recipes.from_dict({"model": "a/b", "data": "rows.jsonl", name: f"x {token}"})
    assert refused.value.code == "secret_found" and LETTERS not in str(refused.value.as_dict())


def test_in_a_list_of_a_recipe() -> None:
    with pytest.raises(UsageError, match="columns"):
        recipes.from_dict({"model": "a/b", "data": "rows.jsonl", "columns": {"prompt": [TOKENS[0]]}})


def test_in_the_key_of_a_recipe_file(tmp_path: Path) -> None:
    """A file that is no YAML is quoted by its reader."""
    for text in (f"{TOKENS[0]}: 1", f"model: [{TOKENS[0]}", f"model: a/b\ndata: {TOKENS[0]}"):
        (tmp_path / "recipe.yaml").write_text(text)
        for format_ in ("json", "human"):
            done = called("plan", tmp_path / "recipe.yaml", "--format", format_)
            assert (done.code, LETTERS in done.stdout + done.stderr) == (2, False)


def test_the_token_in_use_is_masked_inside_of_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"key_{TOKENS[0]}"
    assert masked(text) == text
    monkeypatch.setenv("HF_TOKEN", TOKENS[0])
    assert masked(text) == "key_hf_…"
    monkeypatch.setenv("HF_TOKEN", "key")
    assert masked(text) == text


def test_what_is_no_token_stays() -> None:
    for text in ("hf_jobs", "hf_hub_download", "me/hf_tiny-model", "sha256 " + 64 * "a", f"xhf_{LETTERS}"):
        assert masked(text) == text and not holds_token(text)
    assert masked(f"--token {TOKENS[0]}!") == "--token hf_…!"


@pytest.mark.parametrize("token", ["hf_madeUpAbc…xyz", "“hf_madeUpAbc”", "hf_\u00a0madeUpAbc"])
def test_a_token_that_no_request_can_carry_is_refused_unshown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is ASCII. Pages show `hf_…xyz`, and a text program makes its own quotes."""
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(AccessError) as caught:
        preflight.signed_in_account()
    error = caught.value
    assert (error.code, error.exit_code, error.hint) == ("bad_token", 4, "unset HF_TOKEN && hf auth login")
    assert "madeUpAbc" not in str(error.as_dict()) and "401" not in error.got
