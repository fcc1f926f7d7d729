"""What `chat` and `serve` say of a model that an earlier training of the run left, by the records of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

import step_records
from skill_train.commands._chosen_model import Chosen, doubt_of_training, with_pictures
from skill_train.core.digests import FileDigest
from skill_train.evaluate.backends import Model
from skill_train.evaluate.pictures import RunPictures
from skill_train.run import records
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import RunDir


def digest(word: str) -> FileDigest:
    return {"bytes": 1, "sha256": word}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Trained, merged and converted; each record names what the step before it made."""
    (tmp_path / "plan.json").write_text("{}")
    trained, merged = {"adapter/a": digest("trained")}, {"merged/m": digest("merged")}
    records.write(tmp_path / "train.json", step_records.trained(trained))
    records.write(tmp_path / "merge.json", step_records.merged({"a": digest("trained")}, merged))
    records.write(tmp_path / "convert.json", ExportRecord(inputs={"m": digest("merged")}, outputs={}))
    return tmp_path


def doubted(run: Path) -> list[str]:
    """The models of which it is said."""
    models = [Model("base", run / "b"), Model("adapter", run / "b", run / "adapter"), Model("merged", run / "merged")]
    models.append(Model("q8", run / "gguf" / "q8.gguf"))
    return [model.name for model in models if doubt_of_training(Chosen(run, model))]


def test_what_was_made_of_this_training_is_not_doubted(run: Path) -> None:
    assert doubted(run) == []


def test_another_adapter_leaves_merged_model_and_files_behind(run: Path) -> None:
    records.write(run / "train.json", step_records.trained({"adapter/a": digest("again")}))
    assert doubted(run) == ["merged", "q8"]


def test_another_merge_leaves_the_files_behind(run: Path) -> None:
    records.write(run / "merge.json", step_records.merged({"a": digest("trained")}, {"merged/m": digest("again")}))
    assert doubted(run) == ["q8"]


def test_a_model_that_was_trained_whole_is_what_the_files_are_made_of(run: Path) -> None:
    (run / "merge.json").unlink()
    records.write(run / "train.json", step_records.trained({"merged/m": digest("merged")}))
    assert doubted(run) == []
    records.write(run / "train.json", step_records.trained({"merged/m": digest("again")}))
    assert doubted(run) == ["q8"]


def test_without_records_nothing_is_said(run: Path) -> None:
    records.write(run / "train.json", step_records.trained({"adapter/a": digest("again")}))
    for name in ("merge", "convert"):
        (run / f"{name}.json").unlink()
    assert doubted(run) == []
    assert doubt_of_training(Chosen(run / "a.gguf", Model("a.gguf", run / "a.gguf"))) == ""


def test_a_file_reads_pictures_with_the_projector_of_its_own_run(tmp_path: Path) -> None:
    """`evaluate RUN --gguf` measured the file of another run with the projector of this one, without a word."""
    for name in ("run", "other", "text"):
        (tmp_path / name / "gguf").mkdir(parents=True)
        (tmp_path / name / "plan.json").write_text("{}")
    for name in ("run", "other"):
        (tmp_path / name / "gguf" / "mmproj.gguf").write_bytes(b"")
        outputs = {"gguf/mmproj.gguf": digest("0") | {"quant": "f16"}}
        records.write(tmp_path / name / "mmproj.json", ExportRecord(inputs={}, outputs=outputs))
    (tmp_path / "run" / "gguf" / "linked.gguf").symlink_to(tmp_path / "other" / "gguf" / "b.gguf")
    pictures = RunPictures(tmp_path, {"model": "m", "revision": None})

    def read_with(file: str) -> Path | None:
        read = with_pictures(Model("a", tmp_path / file), RunDir(tmp_path / "run"), pictures)
        return read.projector and read.projector.resolve().relative_to(tmp_path).parent.parent

    assert read_with("run/gguf/a.gguf") == read_with("elsewhere.gguf") == Path("run")
    assert read_with("other/gguf/b.gguf") == read_with("run/gguf/linked.gguf") == Path("other")
    assert read_with("text/gguf/a.gguf") is None
