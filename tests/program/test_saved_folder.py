"""A folder that `datasets` saved and somebody changed is refused in one line, before it leads anywhere else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skill_train.program.events import Refused
from skill_train.program.rows import broken_saved, iter_rows

datasets = pytest.importorskip("datasets")
ROWS = [{"prompt": f"q{n}", "completion": "a"} for n in range(3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved") / "rows"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    return folder


def _without(key: str) -> Callable[[Path], object]:
    return lambda folder: _change(folder / "state.json", lambda said: said.pop(key))


def _change(path: Path, change: Callable[[Any], object]) -> None:
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no list of files": _without("_data_files"),
    "no fingerprint": _without("_fingerprint"),
    "a file that is not there": lambda folder: (folder / "data-00000-of-00001.arrow").unlink(),
    "an empty file": lambda folder: (folder / "data-00000-of-00001.arrow").write_bytes(b""),
    "a list for an object": lambda folder: (folder / "state.json").write_text("[]"),
    "a number for an object": lambda folder: (folder / "dataset_info.json").write_text("NaN"),
    "no JSON": lambda folder: (folder / "dataset_info.json").write_text("{"),
    "deep lists": lambda folder: (folder / "dataset_info.json").write_text("[" * 100_000),
    "a kind of column that is none": lambda folder: _change(
        folder / "dataset_info.json", lambda said: said["features"]["prompt"].update(_type=["x"])
    ),
    "only half": lambda folder: (folder / "dataset_info.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(saved: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(saved, folder)
    assert _rows(folder) == ROWS
    DAMAGES[damage](folder)
    _is_refused(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_a_folder_with_a_terabyte_a_pipe_or_a_device(saved: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(saved, folder)
    os.truncate(folder / name, 10**12)
    _is_refused(folder)
    for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo):
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(Refused):  # without a regular file of that name it is no dataset folder
            _rows(folder)


@pytest.mark.parametrize("name", ["../rows", "..", "", "a:b", 5, ["train"]])
def test_a_split_is_a_folder_beside_the_list_of_splits(saved: Path, tmp_path: Path, name: Any) -> None:
    shutil.copytree(saved, tmp_path / "rows")
    folder = tmp_path / "several"
    shutil.copytree(saved, folder / "train")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert _rows(folder) == ROWS
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    _is_refused(folder)


def test_a_split_that_is_not_there_names_the_others(saved: Path, tmp_path: Path) -> None:
    """Without `--split` it is train, which may be the one that is not there."""
    for name in ("validation", "test"):
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["validation", "test"]}))
    with pytest.raises(Refused) as caught:
        list(iter_rows(str(tmp_path), split="train"))
    error = caught.value.error
    assert (error["code"], error["expected"], error["got"]) == ("bad_split", "validation, test", "train")
    assert "train" not in error["hint"] and "--split" in error["hint"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_split_behind_a_link_is_looked_at_too(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "elsewhere" / "data-00000-of-00001.arrow").symlink_to("/dev/zero")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "rows" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(Refused) as caught:
        _rows(tmp_path / "rows")
    assert caught.value.error["code"] == "missing_file" and "save the dataset" in caught.value.error["hint"]


def test_a_folder_of_something_else_has_a_way_on(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        _rows(tmp_path)
    assert caught.value.error["code"] == "unreadable_dataset" and caught.value.error["hint"]


def test_an_end_of_the_memory_is_not_the_folder_s_fault(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), broken_saved(tmp_path):
        raise MemoryError


@pytest.mark.parametrize("chosen", [{"type": "pandas"}, {"type": "numpy"}, {"columns": ["completion"]}], ids=str)
def test_a_format_that_was_saved_changes_no_row(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """`set_format` before `save_to_disk`: `datasets` then gives series, arrays, or only some of the columns."""
    data = datasets.Dataset.from_list([row | {"system": "Be brief.", "marks": [1, 2]} for row in ROWS])
    data.set_format(**chosen)
    data.save_to_disk(str(tmp_path / "rows"))
    assert _rows(tmp_path / "rows") == [row | {"system": "Be brief.", "marks": [1, 2]} for row in ROWS]


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(str(folder), split="train")]


def _is_refused(folder: Path) -> None:
    with pytest.raises(Refused) as caught:
        _rows(folder)
    error = caught.value.error
    assert (error["code"], caught.value.exit_code) == ("unreadable_dataset", 2), error
    assert str(folder) in error["message"] and error["got"] and "save the dataset again" in error["hint"]
