"""A table on the Hub is trained with the values that its file has, and that plan has read: as the same file here.

`datasets` reads it with pandas: no text for `NA` and `None`, numbers for digits, and one column where semicolons part.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import fed_runs
import tiny
from command_child import Commands
from hub_emulator import Fault, Hub, Lie

pytestmark = pytest.mark.slow

pytest.importorskip("datasets")

CELLS = [("Which gas?", "NA"), ("And now?", "None"), ("What number?", "007"), ("Is it so?", "True"), ("So?", "1.50")]
TABLES = {"train.csv": ",", "rows.csv": ";", "data/train.tsv": "\t"}


def _table(delimiter: str) -> bytes:
    return "".join(f"{asked}{delimiter}{said}\n" for asked, said in [("question", "answer"), *CELLS]).encode()


@pytest.mark.parametrize("name", TABLES)
def test_the_values_are_those_of_the_file(desk: tuple[Hub, Commands, Path], tmp_path: Path, name: str) -> None:
    hub, commands, home = desk
    hub.add("dataset", "me/table", {name: _table(TABLES[name]), "README.md": b"# x\n"})
    words = ["plan", "--model", str(tiny.cached("gemma")), "--data", "me/table", "--where", "local"]
    planned = commands.run(tmp_path, hub.environment(home), *words, "--out", "plan.json", "--format", "json")
    assert planned.code == 0, planned.stdout
    recipe: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())["recipe"]
    [fed] = fed_runs.ask(hub.environment(home), "--raw", tmp_path / "plan.json")
    assert fed == [list(cells) for cells in CELLS]
    assert recipe["data_file"] == name and not recipe.get("images")
    words = ["data", "me/table", "--model", str(tiny.cached("gemma")), "--format", "json"]
    inspected = commands.run(tmp_path, hub.environment(home), *words)
    assert inspected.code == 0 and inspected.data["rows"] == inspected.data["usable_rows"] == len(CELLS)


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_the_values_of_several_tables_are_those_of_their_files(
    desk: tuple[Hub, Commands, Path], tmp_path: Path, delimiter: str
) -> None:
    """One of them has only answers that look like numbers, or like nothing."""
    hub, commands, home = desk
    half = "".join(f"{asked}{delimiter}{said}\n" for asked, said in [("question", "answer"), *CELLS[1:3]]).encode()
    hub.add("dataset", "me/table", {"train/a.csv": half, "train/b.csv": _table(delimiter), "README.md": b"# x\n"})
    words = ["plan", "--model", str(tiny.cached("gemma")), "--data", "me/table", "--where", "local"]
    planned = commands.run(tmp_path, hub.environment(home), *words, "--out", "plan.json", "--format", "json")
    assert planned.code == 0, planned.stdout
    [fed] = fed_runs.ask(hub.environment(home), "--raw", tmp_path / "plan.json")
    assert fed == [list(cells) for cells in (*CELLS[1:3], *CELLS)]
    words = ["data", "me/table", "--model", str(tiny.cached("gemma")), "--format", "json"]
    inspected = commands.run(tmp_path, hub.environment(home), *words)
    assert inspected.code == 0 and inspected.data["rows"] == inspected.data["usable_rows"] == 7, inspected.stdout


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_rows_with_other_bytes_than_the_hub_announced_are_refused(
    desk: tuple[Hub, Commands, Path], tmp_path: Path, name: str
) -> None:
    """The client checks their number only. Of a file in LFS the Hub announces the SHA-256."""
    hub, commands, home = desk
    lines = "".join(json.dumps({"question": asked, "answer": said}) + "\n" for asked, said in CELLS).encode()
    content = _table(",") if name.endswith(".csv") else lines
    repository = hub.add("dataset", "me/table", {name: content})
    repository.lfs = {name}
    words = ["plan", "--model", str(tiny.cached("gemma")), "--data", "me/table", "--where", "local"]
    planned = commands.run(tmp_path, hub.environment(home), *words, "--out", "plan.json", "--format", "json")
    assert planned.code == 0, planned.stdout
    commit = repository.commit("main")
    where = f"GET /datasets/me/table/resolve/{commit}/{name}$"
    hub.faults.add(
        where, Lie(200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content.replace(b"007", b"008"))
    )
    [fed] = fed_runs.ask(hub.environment(tmp_path / "home"), tmp_path / "plan.json")
    assert len(hub.faults.struck) == 1 and fed["message"].endswith("has other bytes than the Hub announced"), fed
    [fed] = fed_runs.ask(hub.environment(tmp_path / "other"), "--raw", tmp_path / "plan.json")
    assert fed == [list(cells) for cells in CELLS]
    hub.faults.clear()
    hub.faults.struck.clear()


def test_in_a_job_settings_that_cannot_be_fetched_are_not_taken_for_missing(
    desk: tuple[Hub, Commands, Path], tmp_path: Path
) -> None:
    """`datasets` would read the files that it finds by their names: other rows, without a word."""
    hub, commands, home = desk
    said = [json.dumps({"question": asked, "answer": "yes"}) + "\n" for asked in ("These?", "These too?")]
    settings = b"configs:\n- config_name: default\n  data_files: good/*.jsonl\n"
    files = {"train.jsonl": b'{"question": "Not these?", "answer": "no"}\n', ".huggingface.yaml": settings}
    hub.add("dataset", "me/table", {**files, "good/rows.jsonl": "".join(said).encode()})
    words = ["plan", "--model", str(tiny.cached("gemma")), "--data", "me/table", "--where", "local"]
    planned = commands.run(tmp_path, hub.environment(home), *words, "--out", "plan.json", "--format", "json")
    assert planned.code == 0, planned.stdout
    hub.faults.add("HEAD .*/.huggingface.yaml$", Fault(520), times=2)
    job = hub.environment(tmp_path / "home") | {"SKILL_TRAIN_RUN": "0123456789ab"}
    [fed] = fed_runs.ask(job, tmp_path / "plan.json")
    hub.faults.clear()
    hub.faults.struck.clear()
    assert fed.get("code", "trained") == "hub_unreachable", fed
    [fed] = fed_runs.ask(job, "--raw", tmp_path / "plan.json")
    assert fed == [["These?", "yes"], ["These too?", "yes"]]


def test_a_slice_that_only_datasets_has_is_read_by_it(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> None:
    hub, commands, home = desk
    hub.add("dataset", "me/table", {"train.csv": _table(",")})
    words = ["plan", "--model", str(tiny.cached("gemma")), "--data", "me/table", "--split", "train[-2:]"]
    planned = commands.run(tmp_path, hub.environment(home), *words, "--out", "plan.json", "--format", "json")
    assert planned.code == 0, planned.stdout
    assert "data_file" not in json.loads((tmp_path / "plan.json").read_text())["recipe"]
