"""Which files make which split. The expectations are what `datasets` 5.2 documents for its structures of repositories
(huggingface.co/docs/datasets/repository_structure)."""

from __future__ import annotations

from typing import Any

import pytest

from skill_train.core.errors import UsageError
from skill_train.hub import dataset_card
from skill_train.hub.dataset_card import Configuration
from skill_train.program.rows import iter_slice

SHARDED = [f"data/{split}-{n:05d}-of-00002.parquet" for split in ("train", "test") for n in range(2)]
THREE: dict[str, Any] = {
    "configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("a", "b", "c")]
}


def _read(card: dict[str, Any], names: list[str], wanted: str | None = None) -> Configuration:
    return dataset_card.configuration(card, names, chosen=wanted, dataset="me/data")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.csv", "test.csv", "README.md"], {"train": ["train.csv"], "test": ["test.csv"]}),
        (
            ["data/train.csv", "data/validation.csv"],
            {"train": ["data/train.csv"], "validation": ["data/validation.csv"]},
        ),
        (["train/a.jsonl", "dev/b.jsonl"], {"train": ["train/a.jsonl"], "validation": ["dev/b.jsonl"]}),
        (SHARDED, {"train": SHARDED[:2], "test": SHARDED[2:]}),
        (["data/random-00000-of-00001.parquet"], {"random": ["data/random-00000-of-00001.parquet"]}),
        (["my_train_file.csv", "my-test-file.csv"], {"train": ["my_train_file.csv"], "test": ["my-test-file.csv"]}),
        (["alpaca.json"], {"train": ["alpaca.json"]}),
        (["a.jsonl", "b.jsonl"], {"train": ["a.jsonl", "b.jsonl"]}),
        (["contest.csv"], {"train": ["contest.csv"]}),  # a word inside a word is no split
        (["config.json", "dataset_infos.json", ".hidden/train.csv", "picture.png"], {}),
    ],
)
def test_splits_by_name(names: list[str], splits: dict[str, list[str]]) -> None:
    assert _read({}, names).files == splits


@pytest.mark.parametrize(
    "data_files",
    [
        [{"split": "train", "path": "x/*.csv"}, {"split": "test", "path": ["y/one.csv", "y/two.csv"]}],
        {"train": "x/**", "test": ["y/*"]},
    ],
)
def test_splits_by_the_card(data_files: Any) -> None:
    card = {"configs": [{"config_name": "default", "data_files": data_files}]}
    names = ["x/1.csv", "x/2.csv", "y/one.csv", "y/two.csv", "other.csv"]
    assert _read(card, names).files == {"train": ["x/1.csv", "x/2.csv"], "test": ["y/one.csv", "y/two.csv"]}


def test_a_star_stays_in_its_folder() -> None:
    card = {"configs": [{"config_name": "default", "data_files": "data/*.csv"}]}
    assert _read(card, ["data/a.csv", "data/deep/b.csv"]).files == {"train": ["data/a.csv"]}


def test_a_folder_of_the_card() -> None:
    card = {"configs": [{"config_name": "en", "data_dir": "english"}, {"config_name": "de", "data_dir": "german"}]}
    assert _read(card, ["english/train.csv", "german/train.csv"], "de").files == {"train": ["german/train.csv"]}


def test_several_configurations_are_never_chosen_from() -> None:
    with pytest.raises(UsageError) as caught:
        _read(THREE, ["a/1.jsonl", "b/1.jsonl", "c/1.jsonl"])
    error = caught.value
    assert (error.code, error.expected, error.got) == ("bad_split", "a, b, c", "none named")
    assert error.hint == "data_config: a"
    assert _read(THREE, ["a/1.jsonl", "b/1.jsonl"], "b").files == {"train": ["b/1.jsonl"]}


def test_a_configuration_that_is_not_there() -> None:
    with pytest.raises(UsageError) as caught:
        _read(THREE, [], "d")
    assert (caught.value.code, caught.value.expected, caught.value.got) == ("bad_split", "a, b, c", "d")


@pytest.mark.parametrize("change", [{"default": True}, {"config_name": "default"}])
def test_the_default_is_the_cards(change: dict[str, Any]) -> None:
    card = {"configs": [*THREE["configs"][:2], THREE["configs"][2] | change]}
    assert _read(card, ["c/1.jsonl"]).files == {"train": ["c/1.jsonl"]}


def test_rows_of_the_card() -> None:
    splits = [{"name": "train", "num_examples": 2061, "num_bytes": 1}, {"name": "test", "num_examples": 7}]
    for info in ({"splits": splits}, [{"config_name": "default", "splits": splits}]):
        assert _read({"dataset_info": info}, ["train.csv"]).rows == {"train": 2061, "test": 7}


@pytest.mark.parametrize(
    "card",
    [
        {"configs": "x"},
        {"configs": [None, 3]},
        {"dataset_info": [[]]},
        {"configs": [{"config_name": "d", "data_files": 7}]},
    ],
)
def test_a_card_of_nonsense_is_no_crash(card: dict[str, Any]) -> None:
    assert _read(card, ["train.csv"]).rows == {}


def test_a_split_that_is_not_there() -> None:
    with pytest.raises(UsageError) as caught:
        dataset_card.split_files(_read({}, ["train.csv", "test.csv"]), "validation", dataset="me/data")
    assert (caught.value.code, caught.value.expected) == ("bad_split", "test, train")


def test_no_file_that_can_be_read() -> None:
    with pytest.raises(UsageError) as caught:
        dataset_card.split_files(_read({}, ["a.png", "b.tar"]), "train", dataset="me/data")
    assert caught.value.code == "unreadable_dataset"


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", 1000),
        ("train[:500]", 500),
        ("train[:10%]", 100),
        ("train[90%:]", 100),
        ("train[-5:]", 5),
        ("train[100:300]", 200),
        ("train[:2000]", 1000),
        ("train[300:100]", 0),
        ("train[:]", 1000),
        ("train[:-10%]", 900),
    ],
)
def test_slices(split: str, rows: int) -> None:
    assert dataset_card.sliced(split, 1000) == rows


@pytest.mark.parametrize("split", ["train[10:50%]", "train[10%:50]", "train[-5:50%]", "train[:200%]", "train[-101%:]"])
def test_a_slice_that_datasets_reads_otherwise_is_refused(split: str) -> None:
    """Both ends are percentages to `datasets` where one of them is, and none is more than 100."""
    with pytest.raises(UsageError, match="is not supported for a dataset on the Hub") as caught:
        dataset_card.sliced(split, 1000)
    assert caught.value.code == "bad_split"


@pytest.mark.parametrize("rows", [5, 15, 25, 99, 150, 1001])
@pytest.mark.parametrize("split", ["train[:10%]", "train[10%:50%]", "train[33%:]", "train[:99%]", "train[-10%:]"])
def test_a_percentage_is_rounded_as_datasets_rounds_it(split: str, rows: int) -> None:
    datasets = pytest.importorskip("datasets")
    [theirs] = datasets.ReadInstruction.from_spec(split).to_absolute({"train": rows})
    assert dataset_card.sliced(split, rows) == theirs.to - theirs.from_
    if "-" not in split:
        kept = [place for place, _ in iter_slice(((place, {}) for place in range(rows)), split)]
        assert kept == list(range(theirs.from_, theirs.to))


@pytest.mark.parametrize(
    "split",
    ["train+test", "", "train[5]", "train[a:b]", "train[:-%]", f"train[:{'9' * 400}%]", f"train[:{'9' * 5000}]"],
)
def test_a_split_that_cannot_be_planned(split: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataset_card.parts(split)
    assert caught.value.code == "bad_split"
