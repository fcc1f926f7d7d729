"""A dataset on the Hub is looked at and not downloaded: the real client, over real HTTP, real Parquet files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hub_child import ask
from hub_emulator import ALWAYS, Fault, Hub
from picture_bytes import numbered
from skill_train.hub import dataset_card

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

DATA = "me/tickets"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def _look(hub: Hub, home: Path, **recipe: Any) -> dict[str, Any]:
    return ask(hub, home, "hub.datasets.inspect_dataset", {"data": DATA} | recipe)


def _basis(looked: dict[str, Any]) -> str:
    """How the number of rows was determined."""
    reason: str = looked["facts"]["reason"]
    return reason.rpartition("; rows ")[2]


def _lines(rows: int, width: int = 10) -> bytes:
    return b"".join(
        json.dumps({"prompt": f"question {n:09d}", "completion": "x" * width}).encode() + b"\n" for n in range(rows)
    )


def _parquet(rows: int, *, width: int = 10, group: int = 100_000, start: int = 0) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = [str(n % 10) * width for n in range(rows)]
    messages = [
        [{"role": "user", "content": f"question {start + n}"}, {"role": "assistant", "content": text[n]}]
        for n in range(rows)
    ]
    sink = io.BytesIO()
    table = pyarrow.table({"messages": messages, "source": [f"s{n}" for n in range(rows)]})
    parquet.write_table(table, sink, row_group_size=group, compression="none", use_dictionary=False)
    return sink.getvalue()


def test_small_text_files_are_counted(hub: Hub, home: Path) -> None:
    repository = hub.add("dataset", DATA, {"train.jsonl": _lines(300), "test.jsonl": _lines(7), "README.md": b"x"})
    looked = _look(hub, home)["answer"]
    facts = looked["facts"]
    assert (facts["rows"], facts["bytes"], _basis(looked)) == (300, len(_lines(300)), "counted")
    assert (facts["format"], facts["column_names"]) == ("prompt_completion", ["prompt", "completion"])
    assert facts["columns"] == {"prompt": "prompt", "completion": "completion"}
    assert (facts["revision"], facts["fingerprint"]) == (repository.commit("main"), None)
    assert looked["first"][1] == {"prompt": "question 000000001", "completion": "x" * 10}
    assert len(looked["first"]) == 200


def test_a_column_that_only_a_later_row_has_is_read(hub: Hub, home: Path) -> None:
    rows = [{"instruction": "Add", "output": "4"}] * 250 + [{"instruction": "Add", "input": "2 2", "output": "4"}]
    hub.add("dataset", DATA, {"train.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows)})
    columns = {"instruction": "instruction", "output": "output"}
    assert _look(hub, home)["answer"]["facts"]["columns"] == columns | {"input": "input"}
    assert _look(hub, home, format="instruction", columns=columns)["answer"]["facts"]["columns"] == columns
    wrong = _look(hub, home, format="instruction", columns=columns | {"input": "inptu"})["error"]
    assert (wrong["code"], "'inptu'" in wrong["message"]) == ("wrong_columns", True)


@pytest.mark.parametrize(("split", "rows"), [("test", 7), ("train[:50]", 50), ("train[:10%]", 30)])
def test_a_split_and_a_slice(hub: Hub, home: Path, split: str, rows: int) -> None:
    hub.add("dataset", DATA, {"train.jsonl": _lines(300), "test.jsonl": _lines(7)})
    assert _look(hub, home, split=split)["answer"]["facts"]["rows"] == rows


def test_the_start_of_a_large_file_is_enough(hub: Hub, home: Path) -> None:
    """20 MB, of which half a megabyte is read; the card says the rows."""
    data = _lines(20_000, 1000)
    info = {"cardData": {"dataset_info": {"splits": [{"name": "train", "num_examples": 20_000}]}}}
    hub.add("dataset", DATA, {"train.jsonl": data}, info=info)
    looked = _look(hub, home)["answer"]
    assert (looked["facts"]["rows"], _basis(looked)) == (20_000, "as the dataset's card says")
    assert looked["facts"]["rows_estimated"] is None
    assert looked["facts"]["bytes"] == len(data)
    assert hub.sent("resolve") == 512_000


def test_without_a_card_the_rows_of_a_large_file_are_estimated_and_said_to_be(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train.jsonl": _lines(20_000, 1000)})
    looked = _look(hub, home)["answer"]
    assert looked["facts"]["rows"] == pytest.approx(20_000, rel=0.01)
    assert _basis(looked) == "estimated from the first 0.5 of 21 MB"
    assert looked["facts"]["reason"].endswith("rows estimated from the first 0.5 of 21 MB")
    assert looked["facts"]["rows_estimated"] == "estimated from the first 0.5 of 21 MB"
    assert _look(hub, home, split="train[:10%]")["answer"]["facts"]["rows_estimated"] is not None
    exact = _look(hub, home, split="train[:500]")["answer"]["facts"]
    assert (exact["rows"], exact["rows_estimated"]) == (500, None)


def test_parquet_is_read_in_parts(hub: Hub, home: Path) -> None:
    """Two files of 21 MB: their footers, and the first pages of the first."""
    data = _parquet(20_000, width=1000)
    hub.add("dataset", DATA, {f"data/train-{n:05d}-of-00002.parquet": data for n in range(2)})
    looked = _look(hub, home)["answer"]
    assert (looked["facts"]["rows"], _basis(looked)) == (40_000, "counted in the files' footers")
    assert looked["facts"]["bytes"] == 2 * len(data)
    assert (looked["facts"]["format"], looked["facts"]["columns"]) == ("messages", {"messages": "messages"})
    assert looked["first"][3]["messages"][0] == {"role": "user", "content": "question 3"}
    assert hub.sent("resolve") < 3_000_000


def test_calls_of_tools_have_their_own_arguments(hub: Hub, home: Path) -> None:
    """Seen and trained without the nulls that Arrow puts where one call lacks another's arguments."""
    rows = [_calling("get_weather", city="Paris"), _calling("convert", amount=10, to="USD")]
    hub.add("dataset", DATA, {"train.parquet": _table(rows), "README.md": b"---\n---\n"})
    looked = _look(hub, home)["answer"]
    assert [row["messages"] for row in looked["first"]] == [row["messages"] for row in rows]
    words = [json.dumps(message) for message in rows[0]["messages"]]
    program = "from skill_train.program.rows import iter_rows; import json; "
    program += f"print(json.dumps([row for _, row in iter_rows({DATA!r}, split='train')]))"
    env = hub.environment(home)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == rows, done.stderr

    stored = {"messages": [words], "id": [1]}  # as `datasets` 5 writes what has another shape in each row
    hub.add("dataset", DATA, {"train.parquet": _table(stored, json_in="messages")})
    looked = _look(hub, home)["answer"]
    assert (looked["facts"]["format"], looked["first"][0]["messages"]) == ("messages", rows[0]["messages"])

    stored["messages"][0][1] = words[1].replace('"role"', '"role": "system", "role"')
    hub.add("dataset", DATA, {"train.parquet": _table(stored, json_in="messages")})
    error = _look(hub, home)["error"]
    assert error["code"] == "unreadable_dataset" and "has the key 'role' twice" in error["message"]


def _calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "Do it."}, {"role": "assistant", "tool_calls": [call]}]}


def _table(rows: Any, *, json_in: str | None = None) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else pyarrow.table(rows)
    if json_in is not None:
        column = table[json_in].cast(pyarrow.list_(pyarrow.json_()))
        table = table.set_column(table.column_names.index(json_in), json_in, column)
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def test_rows_of_large_pictures_are_looked_at(hub: Hub, home: Path) -> None:
    """40 photographs of 1 MB in one piece: more than is read of a dataset of text."""
    image = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(image, "PNG")
    content = image.getvalue() + bytes(1_000_000)  # what follows the end of a PNG file counts for nothing
    rows = [{"image": {"bytes": content, "path": None}, "question": "What?", "answer": "A cat."}] * 40
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, compression="none", use_dictionary=False)
    hub.add("dataset", DATA, {"train.parquet": sink.getvalue(), "README.md": b"---\n---\n"})
    looked = _look(hub, home, pictures=True)["answer"]
    assert looked["facts"]["rows"] == 40 and looked["facts"]["columns"]["images"] == "image"
    assert [row["image"]["bytes"] for row in looked["first"]] == [f"{len(content)} bytes"] * 15  # of 16 MB
    assert _look(hub, home)["error"]["code"] == "not_text"


def test_many_parquet_files_are_not_all_opened(hub: Hub, home: Path) -> None:
    data = _parquet(10)
    files = {f"data/train-{n:05d}-of-00030.parquet": data for n in range(30)}
    hub.add("dataset", DATA, files)
    looked = _look(hub, home)["answer"]
    assert (looked["facts"]["rows"], _basis(looked)) == (300, "estimated from 16 of 30 files")
    hub.repositories["dataset", DATA].info = {
        "cardData": {"dataset_info": {"splits": [{"name": "train", "num_examples": 299}]}}
    }
    assert _look(hub, home)["answer"]["facts"]["rows"] == 299


def test_the_hubs_own_parquet_copy_serves_where_the_files_cannot_be_read(hub: Hub, home: Path) -> None:
    repository = hub.add("dataset", DATA, {"data.arrow": b"x" * 100})
    repository.branches["refs/convert/parquet"] = {"default/train/0000.parquet": _parquet(12)}
    looked = _look(hub, home)["answer"]
    assert (looked["facts"]["rows"], looked["facts"]["revision"]) == (12, repository.commit("main"))


def test_a_revision_is_pinned(hub: Hub, home: Path) -> None:
    repository = hub.add("dataset", DATA, {"train.jsonl": _lines(300)})
    repository.branches["v1"] = {"train.jsonl": _lines(5)}
    facts = _look(hub, home, data_revision="v1")["answer"]["facts"]
    assert (facts["rows"], facts["revision"]) == (5, repository.commit("v1"))
    assert _look(hub, home, data_revision="v2")["error"]["code"] == "unknown_revision"


# --- What it refuses ---


def test_configurations_are_listed_and_not_chosen(hub: Hub, home: Path) -> None:
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("en", "de")]
    hub.add("dataset", DATA, {"en.jsonl": _lines(3), "de.jsonl": _lines(4)}, info={"cardData": {"configs": configs}})
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"], error["expected"]) == ("bad_split", 2, "en, de")
    facts = _look(hub, home, data_config="de")["answer"]["facts"]
    assert (facts["rows"], facts["data_config"]) == (4, "de")


@pytest.mark.parametrize(
    ("files", "recipe", "code"),
    [
        ({"train.jsonl": b'{"a": 1}\n'}, {}, "wrong_columns"),
        ({"train.jsonl": b""}, {}, "empty_dataset"),
        ({"train.jsonl": b"not JSON\n"}, {}, "unreadable_dataset"),
        ({"train.jsonl": _lines(3)}, {"split": "test"}, "bad_split"),
        ({"train.jsonl": _lines(3)}, {"split": "train[3:]"}, "empty_dataset"),
        ({"picture.png": b"x"}, {}, "unreadable_dataset"),
        ({"train.parquet": b"PAR1 no parquet PAR1"}, {}, "unreadable_dataset"),
    ],
)
def test_a_dataset_that_cannot_be_used(
    hub: Hub, home: Path, files: dict[str, bytes], recipe: dict[str, Any], code: str
) -> None:
    hub.add("dataset", DATA, files)
    error = _look(hub, home, **recipe)["error"]
    assert (error["code"], error["exit_code"]) == (code, 2)


def test_an_unknown_dataset_and_a_model(hub: Hub, home: Path) -> None:
    assert _look(hub, home)["error"]["code"] == "unknown_dataset"
    hub.add("model", DATA, {"config.json": b"{}"})
    assert _look(hub, home)["error"]["message"] == "me/tickets is a model on the Hub, not a dataset"


def test_a_gated_dataset(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train.jsonl": _lines(3)}, gated=True)
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"]) == ("gated", 4)
    assert f"https://huggingface.co/datasets/{DATA}" in error["hint"]


def test_a_hub_in_trouble(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train.jsonl": _lines(3)})
    for path, status, code in (("/api/datasets", 500, "hub_error"), ("resolve", 429, "rate_limit")):
        hub.faults.clear()
        hub.faults.add(path, Fault(status), times=ALWAYS)
        error = _look(hub, home)["error"]
        assert (error["code"], error["exit_code"]) == (code, 8)


def test_a_server_without_ranges_is_not_listened_to_to_the_end(hub: Hub, home: Path) -> None:
    data = _lines(60_000, 1000)  # 62 MB
    hub.add("dataset", DATA, {"train.jsonl": data})
    hub.ranges = False
    assert _look(hub, home)["answer"]["facts"]["rows"] == pytest.approx(60_000, rel=0.01)
    assert hub.sent("resolve") < 20_000_000


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize("start", [0, 1])
def test_another_part_than_was_asked_for_is_not_read(hub: Hub, home: Path, name: str, start: int) -> None:
    """Fewer rows would be counted. The part is one byte too short, or begins one byte too late."""
    data = _lines(50) if name.endswith("jsonl") else _parquet(50)
    hub.add("dataset", DATA, {name: data})
    part = data[start : len(data) + start - 1]
    stated = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}
    hub.faults.add("GET /datasets/.*/resolve/", Fault(206, stated, part + b" " * start), times=ALWAYS)
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"]) == ("hub_error", 8)
    assert "arrived incomplete" in error["message"]


def test_a_pointer_is_not_the_file(hub: Hub, home: Path) -> None:
    """Somebody committed what Git LFS leaves in a clone without the content. It was read as three rows of text."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    for name in ("train.txt", "train.jsonl"):
        hub.add("dataset", DATA, {name: pointer})
        error = _look(hub, home)["error"]
        assert (error["code"], error["exit_code"]) == ("unreadable_dataset", 2)
        assert "pointer of Git LFS" in error["message"]


def test_rows_that_are_too_large_to_look_at(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train.parquet": _parquet(4, width=20_000_000)})
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"]) == ("unreadable_dataset", 2)


def test_a_dataset_with_a_program_is_refused_and_can_be_read_in_other_ways(hub: Hub, home: Path) -> None:
    """`datasets` 5 loads no dataset whose repository has a program of its name."""
    files = {"tickets.py": b"import datasets\n", "train.jsonl": _lines(7), "helper.py": b""}
    repository = hub.add("dataset", DATA, files)
    repository.branches["refs/convert/parquet"] = {"default/train/0000.parquet": _parquet(12)}
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"], error["got"]) == ("unreadable_dataset", 2, "tickets.py")
    assert "data_file: train.jsonl" in error["hint"] and "data_revision: refs/convert/parquet" in error["hint"]
    assert _look(hub, home, data_file="train.jsonl")["answer"]["facts"]["rows"] == 7
    assert _look(hub, home, data_revision="refs/convert/parquet")["answer"]["facts"]["rows"] == 12
    hub.add("dataset", "me/plain", {"helper.py": b"", "train.jsonl": _lines(7)})
    assert _look(hub, home, data="me/plain")["answer"]["facts"]["rows"] == 7


def test_the_library_refuses_a_program_in_our_words(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub.add("dataset", DATA, {"tickets.py": b"import datasets\n", "train.jsonl": _lines(7)})
    program = f"""
import datasets
from skill_train.core.errors import UsageError
from skill_train.hub.dataset_library import within_limits
try:
    with within_limits({DATA!r}):
        datasets.load_dataset({DATA!r}, split="train")
except UsageError as error:
    print(error.code, error.got)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=hub.environment(tmp_path / "home")
    )
    said = "unreadable_dataset Dataset scripts are no longer supported, but found tickets.py"
    assert done.stdout.splitlines()[-1:] == [said], done.stderr


@pytest.mark.parametrize(
    ("split", "refused"),
    [("train", True), ("train[:3]", True), ("train[2:]", True), ("train[:2]", False), ("train[3:]", False)],
)
def test_a_row_that_the_training_refuses_is_refused_with_its_line(
    hub: Hub, home: Path, split: str, refused: bool
) -> None:
    """As of the same rows in a file here; of a slice the rows that it has."""
    rows = [{"prompt": f"question {n}", "completion": "  " if n == 2 else "x"} for n in range(5)]
    hub.add("dataset", DATA, {"train.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows)})
    looked = _look(hub, home, split=split)
    assert ("error" in looked) is refused
    if refused:
        error = looked["error"]
        assert (error["code"], error["exit_code"]) == ("bad_row", 2)
        assert error["message"] == f"line 3 of {DATA}: completion is empty or not text"
        assert f"skill-train data {DATA}" in error["hint"]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_first_row_that_is_larger_than_the_start_is_read_to_its_end(hub: Hub, home: Path, ending: str) -> None:
    """9 rows of a megabyte."""
    text = "word " * 200_000
    lines = [json.dumps({"text": text}) if ending == "jsonl" else text for _ in range(9)]
    data = "\n".join([*(["text"] if ending == "csv" else []), *lines, ""]).encode()
    hub.add("dataset", DATA, {f"train.{ending}": data})
    looked = _look(hub, home)["answer"]
    assert looked["first"][0] == {"text": text}
    assert looked["facts"]["rows"] == pytest.approx(9, abs=1)
    assert hub.sent("resolve") < 5_000_000


def test_a_first_row_of_more_bytes_than_are_read_is_said_to_be_too_large(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train.jsonl": json.dumps({"text": "x" * 40_000_000}).encode() + b"\n"})
    error = _look(hub, home)["error"]
    assert (error["code"], error["exit_code"]) == ("unreadable_dataset", 2)
    assert "too large to inspect" in error["message"]
    assert hub.sent("resolve") < 32_000_000


def test_an_empty_first_file_is_passed_over(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train-0.jsonl": b"", "train-1.jsonl": _lines(10_000, 1000)})
    assert _look(hub, home)["answer"]["facts"]["rows"] == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize(
    "names",
    [
        ["train.csv", "test.csv", "README.md"],
        ["data/train.csv", "data/dev.csv"],
        ["train/a.jsonl", "dev/b.jsonl", "c.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/extra-00000-of-00001.jsonl", "other.jsonl"],
        ["my_train_file.csv", "my-test-file.csv"],
        ["alpaca.json", "config.json"],
        ["a.jsonl", "b.jsonl"],
        ["contest.csv"],
        ["deep/er/training_set/x.csv", "deep/er/x.csv"],
        [".hidden/train.csv", "b.csv"],
        ["1.train.csv", "2 test.csv", "val_3.csv"],
    ],
)
def test_the_splits_are_those_that_datasets_would_load(tmp_path: Path, names: list[str]) -> None:
    """The library that loads them, asked about the same names in a folder."""
    data_files = pytest.importorskip("datasets.data_files")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    patterns = data_files.get_data_patterns(str(tmp_path))
    loaded = data_files.DataFilesDict.from_patterns(patterns, base_path=str(tmp_path))
    theirs = {
        str(split): sorted(Path(f).relative_to(tmp_path).as_posix() for f in files if not f.endswith(".md"))
        for split, files in loaded.items()
    }
    assert dataset_card.configuration({}, names, chosen=None, dataset="x").files == theirs


# --- A folder of pictures ---


def _metadata(names: list[Any], column: str = "file_name") -> bytes:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}]
    return b"".join(json.dumps({column: name, "messages": turns}).encode() + b"\n" for name in names)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        ("file_name", "image"),
        ("file_names", "images"),
        ("photo_file_name", "photo"),
        ("pictures_file_names", "pictures"),
    ],
)
def test_a_folder_of_pictures_has_the_columns_that_datasets_makes(
    column: str, wanted: str, hub: Hub, home: Path
) -> None:
    names = [f"deep/{number}.png" for number in range(20)]
    files = {f"train/{name}": numbered(number) for number, name in enumerate(names)}
    cells = [[name] for name in names] if column.endswith("s") else names
    hub.add("dataset", DATA, files | {"train/metadata.jsonl": _metadata(cells, column)})
    looked = _look(hub, home, pictures=True)["answer"]
    facts = looked["facts"]
    assert (facts["rows"], facts["columns"]) == (20, {"messages": "messages", "images": wanted})
    first = looked["first"][3][wanted]
    shown = {"bytes": f"{len(numbered(3))} bytes", "path": "deep/3.png"}
    assert first == ([shown] if column.endswith("s") else shown)
    assert len(looked["first"]) == 16 and len([r for r in hub.log if r.path.endswith(".png")]) == 16


def test_the_columns_are_those_of_the_library(hub: Hub, tmp_path: Path) -> None:
    """`datasets` itself, which a job reads with."""
    hub.add(
        "dataset", DATA, {"train/0.png": numbered(0), "train/metadata.jsonl": _metadata(["0.png"], "photo_file_name")}
    )
    ask = f"import datasets; print(datasets.load_dataset({DATA!r}, split='train').column_names)"
    env = hub.environment(tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.strip() == "['photo', 'messages']", done.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("1.png", "train/1.png does not exist"), ("../0.png", "lies outside the folder of")]
)
def test_a_picture_that_a_repository_lacks_is_named_with_its_row(name: str, said: str, hub: Hub, home: Path) -> None:
    files = {"0.png": numbered(0), "train/0.png": numbered(0), "train/metadata.jsonl": _metadata(["0.png", name])}
    hub.add("dataset", DATA, files)
    error = _look(hub, home, pictures=True)["error"]
    assert (error["code"], error["exit_code"]) == ("bad_picture", 2)
    assert error["message"].startswith("row 2 of train/metadata.jsonl in me/tickets: ") and said in error["message"]


@pytest.mark.parametrize("columns", [("file_name", "image"), ("image", "file_name"), ("x_file_name", "x")])
def test_two_columns_of_one_name_are_refused(columns: tuple[str, str], hub: Hub, home: Path) -> None:
    """`datasets` 5.2 keeps the text of the last, and its column is not a picture: tried with a folder, 2026-11-27."""
    row = dict.fromkeys(columns, "0.png") | json.loads(_metadata(["0.png"], "name"))
    hub.add("dataset", DATA, {"train/0.png": numbered(0), "train/metadata.jsonl": json.dumps(row).encode() + b"\n"})
    error = _look(hub, home, pictures=True)["error"]
    assert (error["code"], error["exit_code"]) == ("unreadable_dataset", 2)
    assert f"has two columns that `datasets` calls {'x' if 'x' in columns else 'image'}" in error["message"]
    assert error["message"].startswith("row 1 of train/metadata.jsonl in me/tickets")


def test_a_name_without_an_ending_is_a_picture_too(hub: Hub, home: Path) -> None:
    hub.add("dataset", DATA, {"train/scan-1": numbered(0), "train/metadata.jsonl": _metadata(["scan-1"])})
    looked = _look(hub, home, pictures=True)["answer"]
    assert looked["facts"]["columns"] == {"messages": "messages", "images": "image"}
    assert looked["first"][0]["image"]["path"] == "scan-1"


def test_each_of_several_tables_names_its_own_files(hub: Hub, home: Path) -> None:
    files = {f"{part}/{number}.png": numbered(number) for part, number in (("a", 0), ("a", 1), ("b", 0))}
    tables = {"a/metadata.jsonl": _metadata(["0.png", "1.png"]), "b/metadata.jsonl": _metadata(["0.png"])}
    hub.add("dataset", DATA, files | tables)
    looked = _look(hub, home, pictures=True)["answer"]
    assert looked["facts"]["rows"] == 3 and len(looked["first"]) == 2
