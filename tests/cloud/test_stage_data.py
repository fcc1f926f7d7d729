"""What of a dataset leaves this machine: the files that its format names, and nothing that only lies beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skill_train.cloud import stage_data
from skill_train.cloud.stage_data import stage
from skill_train.core.errors import UsageError
from skill_train.program.rows import iter_rows


def save(folder: Path, *, shards: tuple[str, ...] = ("data-00000-of-00001.arrow",)) -> Path:
    """A folder as `Dataset.save_to_disk` of datasets 5.2 writes it."""
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in shards]}))
    for name in shards:
        if "/" not in name:
            (folder / name).write_bytes(b"ARROW1")
    return folder


def save_splits(folder: Path, *splits: str) -> Path:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split in splits:
        save(folder / split)
    return folder


@pytest.mark.parametrize("splits", [False, True])
def test_what_datasets_saves_is_what_is_staged(tmp_path: Path, splits: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": str(n)} for n in range(9)])
    folder = tmp_path / "rows"
    (datasets.DatasetDict({"train": rows, "test": rows}) if splits else rows).save_to_disk(str(folder))
    written = {f"rows/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}
    assert set(stage(folder).files) == written and len(written) == (7 if splits else 3)
    assert stage(folder).left_out == ()


def test_a_dataset_that_was_saved_over_splits_is_the_one(tmp_path: Path) -> None:
    """`datasets` and a training here read its rows, and so must a job."""
    datasets = pytest.importorskip("datasets")
    old, new = (datasets.Dataset.from_list([{"text": text}]) for text in ("old", "new"))
    datasets.DatasetDict({"train": old}).save_to_disk(str(tmp_path / "rows"))
    new.save_to_disk(str(tmp_path / "rows"))
    staged = stage(tmp_path / "rows")
    for name, path in staged.files.items():
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).write_bytes(path.read_bytes())
    for folder in (tmp_path / "rows", tmp_path / "job" / "rows"):
        assert [row for _, row in iter_rows(str(folder), split="train")] == [{"text": "new"}]


def test_what_lies_beside_it_stays_here(tmp_path: Path) -> None:
    folder = save_splits(tmp_path / "rows", "train")
    before = stage(folder).name
    beside = (
        "notes.txt",
        ".t",
        "id_rsa",
        "train/cache-0a1b.arrow",
        "train/.secret",
        "test/data-0.arrow",
        ".git/config",
    )
    for name in beside:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    staged = stage(folder)
    assert {name.removeprefix("rows/") for name in staged.files} == {
        "dataset_dict.json",
        "train/dataset_info.json",
        "train/state.json",
        "train/data-00000-of-00001.arrow",
    }
    assert (set(staged.left_out), staged.name) == (set(beside), before)


@pytest.mark.parametrize(
    "link",
    [
        "notes.txt",
        ".t",
        "train/state.json",
        "train/data-00000-of-00001.arrow",
        "train/cache.arrow",
        "dataset_dict.json",
    ],
)
def test_a_link_that_leaves_the_folder_is_refused_by_its_name(tmp_path: Path, link: str) -> None:
    folder = save_splits(tmp_path / "rows", "train")
    (tmp_path / "id_rsa").write_bytes((folder / link).read_bytes() if (folder / link).is_file() else b"private")
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UsageError) as refused:
        stage(folder)
    assert refused.value.code == "unsafe_link" and link in refused.value.message


def test_a_folder_that_is_a_link_is_one_too(tmp_path: Path) -> None:
    folder = save_splits(tmp_path / "rows", "train", "test")
    (tmp_path / "home").mkdir()
    (folder / "test").rename(tmp_path / "home" / "test")
    (folder / "test").symlink_to(tmp_path / "home" / "test")
    with pytest.raises(UsageError, match="test"):
        stage(folder)
    (folder / "test").unlink()
    save(folder / "test")
    (folder / "beside").symlink_to(tmp_path / "home")
    with pytest.raises(UsageError, match="beside"):
        stage(folder)


def test_a_link_inside_of_the_folder_is_a_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "rows", shards=("data-0.arrow", "data-1.arrow"))
    (folder / "data-1.arrow").unlink()
    (folder / "data-1.arrow").symlink_to("data-0.arrow")
    assert "rows/data-1.arrow" in stage(folder).files
    (tmp_path / "alias").symlink_to(folder)
    assert "alias/data-1.arrow" in stage(tmp_path / "alias").files


@pytest.mark.parametrize("name", ["../id_rsa", "/etc/passwd", ".t", "a/../../id_rsa", "sub/x.arrow", "", "..", "x\0y"])
def test_a_record_that_names_another_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "id_rsa").write_text("private")
    folder = save(tmp_path / "rows")
    (folder / ".t").write_text("x")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UsageError) as refused:
        stage(folder)
    assert refused.value.code == "unreadable_dataset"
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(UsageError) as refused:
        stage(folder)
    assert refused.value.code == "unreadable_dataset"


@pytest.mark.parametrize("text", ["[]", "{", '{"_data_files": 3}', '{"_data_files": [3]}', "{}", "\udcff"])
def test_a_record_that_says_nothing(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "rows")
    (folder / "state.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as refused:
        stage(folder)
    assert refused.value.code == "unreadable_dataset"


def test_a_file_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    folder = save(tmp_path / "rows")
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UsageError, match="data-00000-of-00001"):
        stage(folder)
    os.mkfifo(folder / "data-00000-of-00001.arrow")
    with pytest.raises(UsageError, match="data-00000-of-00001"):
        stage(folder)


def test_what_is_sent_is_what_was_looked_at(tmp_path: Path) -> None:
    """A link that is turned elsewhere between the question and the upload takes nothing along."""
    folder = save(tmp_path / "rows", shards=("data-0.arrow", "data-1.arrow"))
    (tmp_path / "key").write_text("private")
    (folder / "data-1.arrow").unlink()
    (folder / "data-1.arrow").symlink_to("data-0.arrow")
    staged = stage(folder)
    (folder / "data-1.arrow").unlink()
    (folder / "data-1.arrow").symlink_to(tmp_path / "key")
    with stage_data.folder_of(staged) as made:
        assert (made / "rows" / "data-1.arrow").read_bytes() == b"ARROW1"
