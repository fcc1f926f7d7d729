"""Rows of the commit that was asked for. Without an answer of the Hub, `datasets` takes the newest commit in its
cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from command_child import Commands, Done
from hub_emulator import Hub

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")
pytest.importorskip("datasets")


def _files(rows: int) -> dict[str, bytes]:
    lines = "".join(f'{{"prompt": "{number} of {rows}?", "completion": "a {number}"}}\n' for number in range(rows))
    return {"train.jsonl": lines.encode(), "README.md": b"---\nlicense: mit\n---\n"}


def test_without_the_hub_no_other_commit_is_taken_for_it(tmp_path: Path) -> None:
    def read(environment: dict[str, str], *commits: str) -> list[Done]:
        commands = Commands(environment)
        done = [
            commands.run(tmp_path, environment, "data", "--recipe", _recipe(tmp_path, commit)) for commit in commits
        ]
        commands.close()
        return done

    with Hub(tmp_path / "hub") as hub:
        repository = hub.add("dataset", "me/rows", _files(10))
        old, new = repository.commit("main"), repository.add_commit("main", _files(20), "other rows", "me")
        environment = hub.environment(tmp_path / "home")
        assert [done.data["rows"] for done in read(environment, old, new)] == [10, 20]
    refused, newest = read(environment | {"HF_HUB_OFFLINE": "1"}, old, new)
    assert refused.error == (8, "hub_unreachable"), refused.stdout
    error = refused.answer["error"]
    assert f"at commit {old[:12]}" in error["message"] and new in error["got"]
    assert newest.data["rows"] == 20


def _recipe(folder: Path, commit: str) -> Path:
    recipe = folder / f"{commit}.yaml"
    recipe.write_text(f"model: {tiny.cached('gemma')}\ndata: me/rows\ndata_revision: {commit}\n")
    return recipe
