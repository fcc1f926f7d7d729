"""The runs that made a base, and what a run on top of them inherits."""

from __future__ import annotations

import json
from pathlib import Path

import planning
from skill_train.plan.ancestry import made_by, sensitive_run
from skill_train.run.folder import RunDir


def run_on(model: Path | str, folder: Path, *, sensitive: bool = False) -> Path:
    """The merged model of a run on this base."""
    (folder / "merged").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    document = planning.plan_document(recipe={"model": str(model)}, policy={"sensitive": sensitive})
    (folder / "plan.json").write_text(json.dumps(document))
    return folder / "merged"


def test_the_latest_sensitive_run_below_a_base_is_found(tmp_path: Path) -> None:
    first = run_on("Qwen/Qwen2.5-0.5B-Instruct", tmp_path / "first", sensitive=True)
    second = run_on(first, tmp_path / "second")
    third = run_on(second.parent / "checkpoints" / "checkpoint-2", tmp_path / "third")
    assert made_by(str(third)) == [RunDir(folder.parent) for folder in (third, second, first)]
    assert sensitive_run(str(third)) == sensitive_run(str(first)) == first.parent
    (link := tmp_path / "link").symlink_to(second)
    assert sensitive_run(str(link)) == first.parent


def test_other_models_inherit_nothing(tmp_path: Path) -> None:
    free = run_on("Qwen/Qwen2.5-0.5B-Instruct", tmp_path / "free")
    sensitive = run_on(free, tmp_path / "sensitive", sensitive=True)
    beside = sensitive.with_name("model")  # a model of the user's own that lies in the folder of a run
    beside.mkdir()
    for model in ("Qwen/Qwen2.5-0.5B-Instruct", "me/merged", str(free), str(beside), str(tmp_path)):
        assert sensitive_run(model) is None, model
    assert made_by(str(free)) == [RunDir(free.parent)]


def test_runs_that_name_each_other_have_an_end(tmp_path: Path) -> None:
    first, second = (tmp_path / name / "merged" for name in ("first", "second"))
    run_on(second, first.parent)
    run_on(first, second.parent)
    assert made_by(str(first)) == [RunDir(first.parent), RunDir(second.parent)]
    assert sensitive_run(str(first)) is None
