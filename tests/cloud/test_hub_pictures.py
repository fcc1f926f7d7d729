"""Rows on the Hub whose pictures lie in files beside them are read as those of the same folder here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fed_runs
import tiny_vision
from command_child import Commands, Done
from hub_emulator import Hub
from picture_bytes import encoded
from skill_train.machine.training_program import train_program

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def hub(desk: tuple[Hub, Commands, Path]) -> Hub:
    desk[0].log.clear()
    return desk[0]


@pytest.fixture
def call(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> Callable[..., Done]:
    server, commands, home = desk
    return lambda *words: commands.run(tmp_path, server.environment(home), *words)


def _png(number: int) -> bytes:
    return encoded(Image.new("RGB", (40 + number, 30), (number, 0, 90)))


def _ask(number: int) -> dict[str, Any]:
    return {"image": f"shots/{number}.png", "question": f"What is {number}?", "answer": f"It is {number}."}


ASKED = [_ask(number) for number in range(24)]
PICTURES = {f"shots/{number}.png": _png(number) for number in range(24)}


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    """With a blank line before each row but the first."""
    return "\n\n".join(map(json.dumps, rows)).encode() + b"\n"


def _llava(rows: list[dict[str, Any]]) -> bytes:
    turns = [
        [{"from": "human", "value": f"<image>\n{row['question']}"}, {"from": "gpt", "value": row["answer"]}]
        for row in rows
    ]
    pairs = zip(rows, turns, strict=True)
    return json.dumps(
        [{"id": f"{row['answer']}", "image": row["image"], "conversations": t} for row, t in pairs]
    ).encode()


def _table(mark: str) -> Callable[[list[dict[str, Any]]], bytes]:
    def write(rows: list[dict[str, Any]]) -> bytes:
        lines = [mark.join(row) for row in (rows[0], *(row.values() for row in rows))]
        return "\n".join(lines).encode() + b"\n"

    return write


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


FILES: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "train.jsonl": _jsonl,
    "train.json": _llava,
    "data/train.csv": _table(","),
    "train.tsv": _table("\t"),
    "data/train-00000-of-00001.parquet": _parquet,
}


def _files(name: str, rows: list[dict[str, Any]] = ASKED) -> dict[str, bytes]:
    """The files of a dataset: the rows, and the pictures beside them."""
    folder = f"{name.rpartition('/')[0]}/" if "/" in name else ""
    return {name: FILES[name](rows), "README.md": b"# x\n"} | {f"{folder}{path}": png for path, png in PICTURES.items()}


def _plan(call: Callable[..., Done], data: object, out: Path, *words: object) -> Done:
    said = ("--model", tiny_vision.cached("gemma3"), "--data", data, "--max-steps", 3, "--max-length", 256)
    return call("plan", *words, *said, "--where", "local", "--out", out)


def _fed(hub: Hub, home: Path, *plans: Path) -> list[dict[str, Any]]:
    return fed_runs.ask(hub.environment(home), *plans)


@pytest.fixture(scope="module")
def same(desk: tuple[Hub, Commands, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each kind of file what was said and read of it: in a folder here, and on the Hub."""
    server, commands, home = desk
    folder, sets, plans = tmp_path_factory.mktemp("same"), dict[str, list[Any]](), list[Path]()
    for number, name in enumerate(FILES):
        for path, content in _files(name).items():
            (folder / f"here{number}" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"here{number}" / path).write_bytes(content)
        server.add("dataset", f"me/set{number}", _files(name))
        sets[name] = []
        for place, data in (("here", f"here{number}/{name}"), ("there", f"me/set{number}")):

            def call(*words: object) -> Done:
                return commands.run(folder, server.environment(home), *words)

            plans.append(folder / f"{place}{number}.json")
            done = _plan(call, data, plans[-1])
            sets[name].append([done, call("data", data, "--model", tiny_vision.cached("gemma3")), plans[-1]])
    fed = iter(_fed(server, home, *(plan for plan in plans if plan.exists())))
    for each in (each for places in sets.values() for each in places):
        each.append(next(fed) if each[-1].exists() else None)
    return sets


@pytest.mark.parametrize("name", FILES)
def test_the_rows_and_pictures_are_those_of_the_same_folder_here(same: dict[str, list[Any]], name: str) -> None:
    """As they are fed, with their lines, the digests of their pictures and their order."""
    for planned, inspected, *_ in same[name]:
        assert planned.code == 0, planned.answer
        assert inspected.code == 0, inspected.answer
    (_, data_here, plan_here, here), (_, data_there, plan_there, there) = same[name]
    assert here == there and len(there["digests"]) == 24
    assert data_here.data["pictures"] == data_there.data["pictures"] and data_there.data["pictures"]["count"] == 24
    facts = [json.loads(plan.read_text())["facts"]["dataset"] for plan in (plan_here, plan_there)]
    assert facts[0]["images"] == facts[1]["images"] == 24 and facts[0]["format"] == facts[1]["format"]
    if name == "train.jsonl":
        assert sorted(there["lines"]) == list(range(1, 48, 2))
    if name == "train.tsv":
        assert sorted(there["lines"]) == list(range(2, 26))


def test_the_plan_names_the_file_of_rows_and_the_commit(hub: Hub, same: dict[str, list[Any]]) -> None:
    recipe = json.loads(same["data/train.csv"][1][2].read_text())["recipe"]
    assert recipe["data_file"] == "data/train.csv"
    assert recipe["data_revision"] == hub.repositories["dataset", "me/set2"].commit("main")


# --- What is refused ---

BAD: dict[str, tuple[str, str, bytes | None]] = {
    "no such file": ("shots/none.png", "shots/none.png does not exist", None),
    "outside of the folder": ("../shots/1.png", "../shots/1.png lies outside the folder of the data", None),
    "an absolute path": ("/etc/hosts", "/etc/hosts lies outside the folder of the data", None),
    "an address": ("https://example.com/a.png", "https://example.com/a.png is an address", None),
    "no picture": ("shots/bad.png", "shots/bad.png is not a picture", b"I am a text"),
    "a half picture": ("shots/half.png", "shots/half.png is broken", None),
    "nothing": ("shots/empty.png", "shots/empty.png is empty", b""),
    "a film": ("shots/film.gif", "shots/film.gif is animated", None),
}


def _film() -> bytes:
    frames = [Image.new("RGB", (40, 30), (n * 80, 0, 0)) for n in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _half() -> bytes:
    return encoded(Image.effect_noise((64, 64), 50))[:900]


BYTES = {"a half picture": _half(), "a film": _film()}


@pytest.fixture(scope="module")
def refused(desk: tuple[Hub, Commands, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training says of each bad row, of a plan that was made before the row was bad."""
    server, commands, home = desk
    folder, plans = tmp_path_factory.mktemp("refused"), list[Path]()
    server.add("dataset", "me/good", {"deep/rows.jsonl": _jsonl(ASKED[:3])} | _below("deep", PICTURES))
    done = _plan(lambda *words: commands.run(folder, server.environment(home), *words), "me/good", folder / "good.json")
    assert done.code == 0, done.answer
    for number, name in enumerate(BAD):
        server.add("dataset", f"me/bad{number}", _bad(name))
        plan = json.loads((folder / "good.json").read_text())
        commit = server.repositories["dataset", f"me/bad{number}"].commit("main")
        plan["recipe"] |= {"data": f"me/bad{number}", "data_revision": commit}
        plans.append(folder / f"{number}.json")
        plans[-1].write_text(json.dumps(plan))
    return dict(zip(BAD, _fed(server, home, *plans), strict=True))


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{path}": content for path, content in files.items()}


def _bad(name: str) -> dict[str, bytes]:
    """Rows of which the third is bad, on line 5."""
    picture, _, content = BAD[name]
    files = PICTURES | ({picture: BYTES.get(name, content)} if BYTES.get(name, content) is not None else {})
    rows = [*ASKED[:2], ASKED[2] | {"image": picture}]
    return {"deep/rows.jsonl": _jsonl(rows), "shots/1.png": _png(1)} | _below("deep", files)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_with_file_and_line(
    name: str, hub: Hub, refused: dict[str, Any], call: Callable[..., Done], tmp_path: Path
) -> None:
    """By the plan, by `data` and by the training."""
    data, words = f"me/bad{list(BAD).index(name)}", BAD[name][1]
    where = f"line 5 of deep/rows.jsonl in {data}: "
    assert (refused[name]["exit_code"], refused[name]["code"]) == (2, "bad_picture")
    assert refused[name]["message"].startswith(where + words) and refused[name]["expected"]
    planned = _plan(call, data, tmp_path / "plan.json")
    if name != "a half picture":  # the planner looks at headers alone
        assert planned.error == (2, "bad_picture") and not (tmp_path / "plan.json").exists()
        assert planned.answer["error"]["message"].startswith(where + words)
    inspected = call("data", data)
    assert inspected.error == (2, "bad_row")
    assert f"line 5 of deep/rows.jsonl: {words}" in inspected.answer["error"]["message"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_broken_row_is_named_with_its_own_line(
    suffix: str, hub: Hub, call: Callable[..., Done], tmp_path: Path
) -> None:
    content = FILES[f"train.{'tsv' if suffix == 'csv' else suffix}"](ASKED[:2])
    content = content.replace(b"\t", b",") + (b"one cell\n" if suffix == "csv" else b"\n{]\n")
    hub.add("dataset", "me/broken", {f"train.{suffix}": content} | PICTURES)
    line = 4 if suffix == "csv" else 5
    for done in (_plan(call, "me/broken", tmp_path / "plan.json"), call("data", "me/broken")):
        assert done.code == 2
        assert f"line {line} of train.{suffix} in me/broken" in done.answer["error"]["message"]


# --- One commit ---


@pytest.mark.torture
def test_what_the_hub_has_after_the_plan_does_not_train(hub: Hub, call: Callable[..., Done], tmp_path: Path) -> None:
    """Another picture under the same name: the training reads the commit of the plan, and ends where that is gone."""
    repository = hub.add("dataset", "me/moving", _files("train.jsonl"))
    assert _plan(call, "me/moving", tmp_path / "plan.json").code == 0
    [before] = _fed(hub, tmp_path / "first", tmp_path / "plan.json")
    planned = repository.commit("main")
    repository.add_commit("main", repository.files | {"shots/3.png": _png(200)}, "another", "me")
    [after] = _fed(hub, tmp_path / "second", tmp_path / "plan.json")
    assert after == before and len(before["digests"]) == 24
    assert _plan(call, "me/moving", tmp_path / "again.json").code == 0
    [again] = _fed(hub, tmp_path / "third", tmp_path / "again.json")
    assert sum(a != b for a, b in zip(again["pictures"], before["pictures"], strict=True)) == 1
    del repository.old[planned]
    [gone] = _fed(hub, tmp_path / "fourth", tmp_path / "plan.json")
    assert (gone["exit_code"], gone["code"]) == (2, "input_changed")
    assert gone["message"].startswith(f"train.jsonl in me/moving at commit {planned[:12]} is not on the Hub any more")


# --- Pictures that begin after the first rows ---

TEXT = {"question": "What is it?", "answer": "It is text."}


def test_late_pictures_of_a_small_file_are_known(hub: Hub, call: Callable[..., Done], tmp_path: Path) -> None:
    """A small file is read whole, so plan and data say the same."""
    hub.add("dataset", "me/late", {"train.jsonl": _jsonl([TEXT] * 250 + ASKED)} | PICTURES)
    assert _plan(call, "me/late", tmp_path / "plan.json").code == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["recipe"]["images"] and plan["recipe"]["columns"]["images"] == "image"
    assert plan["facts"]["dataset"]["images"] == call("data", "me/late").data["pictures"]["count"] == 24


def test_late_pictures_of_a_large_file_are_unknown_and_not_trained_as_text(
    hub: Hub, call: Callable[..., Done], tmp_path: Path
) -> None:
    content = _jsonl([TEXT | {"key": "0" * 210_000}] * 40 + ASKED)
    assert len(content) > 8_000_000
    hub.add("dataset", "me/large", {"train.jsonl": content} | PICTURES)
    assert call("data", "me/large").data["pictures"]["count"] == 24
    (tmp_path / "run").mkdir()
    assert _plan(call, "me/large", tmp_path / "run" / "plan.json").code == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    said = {reason["rule"]: reason for reason in plan["reasons"]}["images"]
    assert said["value"] == "unknown" and "the training refuses a later one" in said["because"]
    assert "images" not in plan["recipe"] and plan["facts"]["dataset"]["rows_read"] == 2
    command = [sys.executable, str(train_program()), str(tmp_path / "run" / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=hub.environment(tmp_path / "home"), timeout=200)
    assert done.returncode == 2, done.stdout + done.stderr
    error = json.loads((tmp_path / "run" / "train.failed.json").read_text())["error"]
    assert error["code"] == "not_text" and "the column 'image' contains an image" in error["message"]
    assert not (tmp_path / "run" / "adapter").exists()
    columns = {"question": "question", "answer": "answer", "images": "image"}
    recipe = {"model": str(tiny_vision.cached("gemma3")), "data": "me/large", "format": "question_answer"}
    (tmp_path / "asked.yaml").write_text(json.dumps(recipe | {"images": True, "columns": columns}))
    assert _plan(call, "me/large", tmp_path / "asked.json", tmp_path / "asked.yaml").code == 0
    [fed] = _fed(hub, tmp_path / "home", tmp_path / "asked.json")
    assert sum(map(len, fed["pictures"])) == 24


# --- How much is read ---


def test_only_the_pictures_of_the_first_rows_are_fetched_for_a_plan(
    hub: Hub, call: Callable[..., Done], tmp_path: Path
) -> None:
    rows, pictures = [_ask(number) for number in range(120)], {f"shots/{n}.png": _png(n) for n in range(120)}
    hub.add("dataset", "me/many", {"train.jsonl": _jsonl(rows)} | pictures)
    assert _plan(call, "me/many", tmp_path / "plan.json").code == 0
    assert len({r.path for r in hub.log if r.path.endswith(".png")}) == 16
    assert json.loads((tmp_path / "plan.json").read_text())["facts"]["dataset"]["images"] == 120
    hub.log.clear()
    commit = hub.repositories["dataset", "me/many"].commit("main")
    ask = (
        "from skill_train.program.rows import iter_rows\n"
        f"next(iter_rows('me/many', split='train[:100]', revision={commit!r}, file='train.jsonl'))"
    )
    env = hub.environment(tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len({r.path for r in hub.log if r.path.endswith(".png")}) == 64
