"""What a cloud job keeps of its training, on real files and real child processes: nothing torn, nothing lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import tiny
from skill_train.data import scan as dataset
from skill_train.machine.training_program import train_program
from skill_train.program.cloud.job import Keeper, child_command, fetch_result, keep_results, restore
from skill_train.program.cloud.push import model_card, on_hub, shown_recipe
from skill_train.program.events import Refused
from skill_train.program.folders.checkpoints import is_complete
from skill_train.program.start.inputs import use_data
from skill_train.program.trainer import reporter
from skill_train.recipe import fields as recipe


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    (made / "checkpoints").mkdir(parents=True)
    (made / "metrics.jsonl").write_text('{"step": 1}\n')
    (made / "environment.json").write_text("{}")
    return made


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    made = tmp_path / "kept"
    made.mkdir()
    return made


def _checkpoint(work: Path, step: int, *, complete: bool = True) -> Path:
    """As the trainer leaves it: files, one in a folder, and the marker with their sizes last."""
    folder = work / "checkpoints" / f"checkpoint-{step}"
    (folder / "parts").mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(os.urandom(3000))
    (folder / "parts" / "weights").write_bytes(b"weights of step %d" % step)
    if complete:
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        (folder / "complete.json").write_text(json.dumps(sizes))
    return folder


def _kept_steps(kept: Path) -> list[int]:
    return sorted(int(p.parent.name.split("-")[1]) for p in kept.glob("checkpoints/checkpoint-*/kept.json"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- Keeping ---


def test_a_complete_checkpoint_is_kept_with_the_digest_of_every_file(work: Path, kept: Path) -> None:
    source = _checkpoint(work, 2)
    _checkpoint(work, 4, complete=False)
    Keeper(work, kept, None).try_to_keep()
    copy = kept / "checkpoints" / "checkpoint-2"
    marker = json.loads((copy / "kept.json").read_text())
    assert set(marker) == {"optimizer.pt", "parts/weights", "complete.json", "metrics.jsonl"}
    for name, digest in marker.items():
        origin = source / name if name != "metrics.jsonl" else work / name
        assert digest == {"bytes": origin.stat().st_size, "sha256": _sha256(origin)}
        assert (copy / name).read_bytes() == origin.read_bytes()
    assert _kept_steps(kept) == [2]
    assert (kept / "metrics.jsonl").read_text() == '{"step": 1}\n' and (kept / "environment.json").exists()


def test_the_newest_two_stay(work: Path, kept: Path) -> None:
    keeper = Keeper(work, kept, None)
    for step in (2, 4, 6, 10):  # 10 is newer than 6, though not in the alphabet
        _checkpoint(work, step)
        keeper.try_to_keep()
    assert _kept_steps(kept) == [6, 10]
    assert {p.name for p in (kept / "checkpoints").iterdir()} == {"checkpoint-6", "checkpoint-10"}


def test_what_has_not_changed_is_not_copied_again(work: Path, kept: Path) -> None:
    keeper = Keeper(work, kept, None)
    _checkpoint(work, 2)
    keeper.try_to_keep()
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()}
    keeper.try_to_keep()
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()} == before
    (work / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    keeper.try_to_keep()
    assert (kept / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("lacks", ["nothing", "links", "room"])
def test_a_checkpoint_that_is_removed_while_it_is_copied(
    work: Path, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """The trainer removes the oldest, and a slow bucket would never get a whole one. Where the disk knows no second
    names, or has no room for two more, nothing is left of it. The copy is held up in a pipe that nobody reads yet."""
    if lacks == "links":
        monkeypatch.setattr(os, "link", _no_links)
    folder = _checkpoint(work, 2)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    usage = shutil.disk_usage(work)._replace(free=2 * size - (lacks == "room"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    whole = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    target = kept / "checkpoints" / "checkpoint-2"
    target.mkdir(parents=True)
    os.mkfifo(target / "complete.json")  # the first of its files
    thread = threading.Thread(target=Keeper(work, kept, None).try_to_keep)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    subprocess.run(["rm", "-r", str(folder)], check=True)
    first = (target / "complete.json").read_bytes()
    thread.join(10)
    assert not thread.is_alive() and [path.name for path in work.iterdir() if path.is_dir()] == ["checkpoints"]
    said = capsys.readouterr().out
    if lacks == "nothing":
        assert first == whole.pop(Path("complete.json")) and '"kept"' in said
        assert all((target / name).read_bytes() == content for name, content in whole.items())
        assert _kept_steps(kept) == [2]
    else:
        assert not target.exists() and said == ""


def _no_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_checkpoint_that_lost_a_file_before_it_was_listed_is_not_kept(work: Path, kept: Path) -> None:
    """Its marker in the bucket would promise a whole one."""
    folder = _checkpoint(work, 2)
    (folder / "optimizer.pt").unlink()
    Keeper(work, kept, None).keep_checkpoint(folder)
    assert not (kept / "checkpoints" / "checkpoint-2").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_makes_room_and_is_tried_again(
    work: Path, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(work, kept, None)
    for step in (2, 4):
        _checkpoint(work, step)
        keeper.try_to_keep()
    (kept / "checkpoints" / "checkpoint-6").mkdir()
    (kept / "checkpoints" / "checkpoint-6" / "optimizer.pt").symlink_to("/dev/full")
    _checkpoint(work, 6)
    keeper.try_to_keep()
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().out
    assert _kept_steps(kept) == [4]
    assert not (kept / "checkpoints" / "checkpoint-6").exists()
    keeper.try_to_keep()
    assert _kept_steps(kept) == [4]  # not every two seconds
    monkeypatch.setattr(keeper, "not_before", 0.0)
    keeper.try_to_keep()
    assert _kept_steps(kept) == [4, 6]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_the_last_checkpoint_is_tried_again_in_the_room_that_was_made(work: Path, kept: Path) -> None:
    """A job that ends has no later turn, and the steps since the checkpoint before would be lost."""
    keeper = Keeper(work, kept, None)
    for step in (2, 4):
        _checkpoint(work, step)
        keeper.try_to_keep()
    (kept / "checkpoints" / "checkpoint-6").mkdir()
    (kept / "checkpoints" / "checkpoint-6" / "optimizer.pt").symlink_to("/dev/full")
    _checkpoint(work, 6)
    keeper.try_to_keep(last=True)
    assert _kept_steps(kept) == [4, 6]


def test_a_bucket_that_takes_nothing_does_not_end_the_job(
    work: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _checkpoint(work, 2)
    shutil.rmtree(kept)
    kept.write_text("no folder")
    Keeper(work, kept, None).try_to_keep(last=True)
    said = capsys.readouterr().out
    assert said.count("could not be kept") == 2 and said.count("will be tried again") == 1


# --- Going on ---


@pytest.fixture
def two_kept(work: Path, kept: Path) -> Path:
    (work / "checkpoints" / "before.json").write_text('{"loss": 3}')
    keeper = Keeper(work, kept, None)
    for step in (2, 4):
        _checkpoint(work, step)
        (work / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(step)))
        keeper.try_to_keep()
    return kept


def test_the_newest_kept_checkpoint_comes_back_as_it_was(two_kept: Path, work: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (two_kept / "metrics.jsonl").write_text('{"ste')  # torn: the job was killed while it copied
    assert restore(two_kept, fresh).name == "checkpoint-4"
    assert [p.name for p in (fresh / "checkpoints").glob("checkpoint-*")] == ["checkpoint-4"]
    for path in (p for p in (work / "checkpoints" / "checkpoint-4").rglob("*") if p.is_file()):
        name = path.relative_to(work)
        assert (fresh / name).read_bytes() == path.read_bytes()
    assert is_complete(fresh / "checkpoints" / "checkpoint-4")
    assert (fresh / "metrics.jsonl").read_text().count("\n") == 4
    assert (fresh / "checkpoints" / "before.json").read_text() == '{"loss": 3}'


def _flip(folder: Path) -> None:
    """The same size, another bit: only a digest shows it."""
    weights = folder / "parts" / "weights"
    weights.write_bytes(b"W" + weights.read_bytes()[1:])


TEARS: dict[str, Callable[[Path], None]] = {
    "a bit": _flip,
    "a file": lambda folder: (folder / "optimizer.pt").unlink(),
    "an end": lambda folder: os.truncate(folder / "optimizer.pt", 100),
    "half a marker": lambda folder: os.truncate(folder / "kept.json", 30),
    "no marker": lambda folder: (folder / "kept.json").unlink(),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_one_is_left_out_and_kept_again(
    two_kept: Path, work: Path, tmp_path: Path, tear: str, capsys: pytest.CaptureFixture[str]
) -> None:
    TEARS[tear](two_kept / "checkpoints" / "checkpoint-4")
    capsys.readouterr()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    restored = restore(two_kept, fresh)
    assert restored.name == "checkpoint-2"
    assert not (fresh / "checkpoints" / "checkpoint-4").exists()
    said = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert said == ["checkpoint-4 was not kept whole and is left out", "checkpoint-2 was kept and is whole"]
    Keeper(work, two_kept, restored).try_to_keep()  # training has made it once more
    again = tmp_path / "again"
    again.mkdir()
    assert restore(two_kept, again).name == "checkpoint-4"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_does_not_cost_the_only_whole_one(two_kept: Path, work: Path, tmp_path: Path) -> None:
    """The newest of an earlier start is torn, and its marker is there."""
    _flip(two_kept / "checkpoints" / "checkpoint-4")
    fresh, again = (tmp_path / name for name in ("fresh", "again"))
    fresh.mkdir()
    keeper = Keeper(work, two_kept, restore(two_kept, fresh))
    (two_kept / "checkpoints" / "checkpoint-6").mkdir()
    (two_kept / "checkpoints" / "checkpoint-6" / "optimizer.pt").symlink_to("/dev/full")
    _checkpoint(work, 6)
    keeper.try_to_keep()
    again.mkdir()
    assert restore(two_kept, again).name == "checkpoint-2"


def test_results_that_are_torn_are_no_results(work: Path, kept: Path, tmp_path: Path) -> None:
    (work / "adapter").mkdir()
    (work / "adapter" / "weights").write_bytes(b"1234")
    (work / "train.json").write_text("{}")
    keep_results(work, kept, None)
    marker = json.loads((kept / "kept.json").read_text())
    assert (marker["state"], marker["exit_code"]) == ("done", 0)
    assert marker["files"]["adapter/weights"] == {"bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}
    fetched = tmp_path / "fetched"
    assert fetch_result(kept, fetched) and (fetched / "adapter" / "weights").read_bytes() == b"1234"
    (kept / "adapter" / "weights").write_bytes(b"1235")
    assert not fetch_result(kept, tmp_path / "other")
    assert not [p for p in (tmp_path / "other").rglob("*") if p.is_file()]


def test_a_failed_run_is_no_result(work: Path, kept: Path, tmp_path: Path) -> None:
    keep_results(work, kept, {"exit_code": 5, "error": {}})
    marker = json.loads((kept / "kept.json").read_text())
    assert (marker["state"], marker["exit_code"]) == ("failed", 5)
    assert not fetch_result(kept, tmp_path / "other")


# --- The child ---

# torchrun's table, as torch 2.13 prints it when the system kills the second process.
TABLE = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os.kill(os.getpid(), 9)", (3, "out_of_memory")),
        ("import os; os.kill(os.getpid(), 11)", (5, "native_crash")),
        ("1 / 0", (5, "program_failed")),
        ("import os; os.kill(os.getppid(), 15); import time; time.sleep(30)", (5, "interrupted")),
    ],
)
def test_a_child_that_does_not_say_why_it_ended(work: Path, code: str, expected: tuple[int, str]) -> None:
    """Each in a process of its own, which gets the signal that is meant for it."""
    failure = _ended(work, code)
    assert (failure["exit_code"], failure["error"]["code"]) == expected
    assert json.loads((work / "train.failed.json").read_text()) == failure
    if expected[1] == "program_failed":
        assert "ZeroDivisionError" in failure["error"]["got"]


def test_a_child_that_says_why_is_believed(work: Path) -> None:
    told = {"exit_code": 2, "error": {"code": "no_eos", "message": ""}}
    (work / "train.failed.json").write_text(json.dumps(told))
    assert _ended(work, "raise SystemExit(2)") == told


def test_a_lost_process_is_explained_by_the_one_that_was_killed(work: Path) -> None:
    told = {"exit_code": 5, "error": {"code": "process_lost", "message": ""}}
    (work / "train.failed.json").write_text(json.dumps(told))
    assert _ended(work, "raise SystemExit(1)", launched=True) == told
    assert _ended(work, f"print({TABLE!r}); raise SystemExit(1)") == told
    said = "print('exitcode : -9'); raise SystemExit(1)"  # of a library, and not the launcher's table
    assert _ended(work, said, launched=True) == told
    failure = _ended(work, f"print({TABLE!r}); raise SystemExit(1)", launched=True)
    assert failure["error"]["code"] == "out_of_memory"


@pytest.mark.parametrize(("launched", "expected"), [(True, (3, "out_of_memory")), (False, (5, "program_failed"))])
def test_only_the_table_of_the_launcher_says_who_was_killed(
    work: Path, launched: bool, expected: tuple[int, str]
) -> None:
    """It itself ends with 1. One process has its own exit code, and may print such a table of others."""
    failure = _ended(work, f"print({TABLE!r}); raise SystemExit(1)", launched=launched)
    assert (failure["exit_code"], failure["error"]["code"]) == expected


_SUPERVISE = """
import json, sys
from pathlib import Path
from skill_train.program.cloud.job import Child, how_it_failed
work = Path(sys.argv[1])
plan = {"launch": {"arguments": sys.argv[3:], "environment": {}}}
with Child([sys.executable, "-c", sys.argv[2]], plan, work / "train.log") as child:
    while child.running(5):
        pass
    print("RESULT " + json.dumps(how_it_failed(child, work)))
"""


def _ended(work: Path, code: str, *, launched: bool = False) -> dict[str, Any]:
    """How a job saw this program end, which `launched` takes for the launcher of several."""
    command = [sys.executable, "-c", _SUPERVISE, str(work), code, *["--multi_gpu"] * launched]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


def test_what_a_child_says_is_passed_on_whole_and_logged(work: Path) -> None:
    """Two streams, many lines: none is cut by another."""
    code = (
        "import sys, threading\n"
        "def say(out, word): [print(word * 500, file=out, flush=True) for _ in range(200)]\n"
        "threads = [threading.Thread(target=say, args=a) for a in ((sys.stdout, 'o'), (sys.stderr, 'e'))]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    (work / "train.log").write_text("an earlier start\n")
    command = [sys.executable, "-c", _SUPERVISE, str(work), code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines.pop() == "RESULT null"
    assert (lines.count("o" * 500), lines.count("e" * 500), len(lines)) == (200, 200, 400)
    logged = (work / "train.log").read_text().splitlines()
    assert logged[0] == "an earlier start" and sorted(logged[1:]) == sorted(lines)


def test_the_child_is_started_as_local_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skill_train.run.folder import RunDir
    from skill_train.run.plan_record import Launch
    from skill_train.train import local

    monkeypatch.setattr("skill_train.program.cloud.job.PROGRAM", train_program())
    for arguments in ([], ["--num_processes", "2"]):
        plan = {"launch": {"arguments": arguments, "environment": {}}}
        ours = child_command(plan, tmp_path, None)
        assert ours == local._command(RunDir(tmp_path), Launch(arguments), resume=True)
    assert child_command({}, tmp_path, Path("/x"))[-2:] == ["--data", "/x"]


# --- Data that lies elsewhere ---


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_data_is_taken_from_another_place_when_it_is_the_same(tmp_path: Path, kind: str) -> None:
    """The fingerprint is the planner's."""
    rows = tiny.rows(5)
    places = [tmp_path / name for name in ("there.jsonl", "here.jsonl")]
    for place in places:
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "folder":
        import datasets

        for place in places:
            datasets.Dataset.from_list(rows).save_to_disk(str(place.with_suffix("")))
        places = [place.with_suffix("") for place in places]
    planned = dataset.scan(recipe.from_dict({"model": "m", "data": str(places[0])})).fingerprint
    plan = {"recipe": {"data": str(places[0]), "split": "train"}, "fingerprints": {"data": planned}}
    use_data(plan, places[1])
    assert plan["recipe"]["data"] == str(places[1])
    with pytest.raises(Refused) as caught:
        use_data({**plan, "fingerprints": {"data": "0" * 64}}, places[1])
    assert caught.value.error["code"] == "input_changed"


def test_data_of_a_plan_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path / "rows.jsonl", 2)
    with pytest.raises(Refused) as caught:
        use_data({"recipe": {"split": "train"}, "fingerprints": {"data": None}}, tmp_path / "rows.jsonl")
    assert caught.value.error["code"] == "input_changed"
    with pytest.raises(Refused) as caught:
        use_data({"recipe": {"split": "train"}}, tmp_path / "none.jsonl")
    assert caught.value.error["code"] == "missing_file"


# --- The card ---


@pytest.fixture
def trained(work: Path) -> Path:
    (work / "adapter").mkdir()
    record = {
        "steps": 8,
        "verdict": "pass",
        "figures": {"first_loss": 3.25, "last_loss": 1.5},
        "data": {"train_rows": 23, "tokens": 1944, "trained_token_share": 0.3328},
    }
    (work / "train.json").write_text(json.dumps(record))
    (work / "environment.json").write_text('{"versions": {"torch": "2.13.0", "peft": "0.21.2"}}')
    return work


def _plan(*, model: str, data: str, local: bool) -> dict[str, Any]:
    values = {"method": "sft", "learning_rate": 2e-4, "lora_r": 16, "max_length": 512, "revision": None}
    prints = {"model": "f" * 64, "data": "d" * 64} if local else {"model": None, "data": None}
    return {
        "recipe": {"model": model, "data": data, **values},
        "recipe_hash": "abc123",
        "fingerprints": prints,
        "policy": {"hub_model_id": "me/tuned"},
    }


def test_the_card_of_an_adapter_of_the_hub(trained: Path) -> None:
    plan = _plan(model="Qwen/Qwen2.5-0.5B-Instruct", data="owner/tickets", local=False)
    card = ModelCard(model_card(plan, trained, {"license": "apache-2.0"}))
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["skill-train", "sft", "lora"],
        "datasets": ["owner/tickets"],
    }
    for words in ("abc123", "3.2500, 1.5000", "1944", "33%", "torch 2.13.0", 'from_pretrained("me/tuned")'):
        assert words in card.text, words


@pytest.mark.parametrize(
    ("part", "loads"),
    [
        ("adapter", ['Model.from_pretrained("Qwen/Qwen2-VL-2B")', 'PeftModel.from_pretrained(model, "me/tuned")']),
        ("merged", ['Model.from_pretrained("me/tuned")']),
    ],
)
def test_the_card_of_a_model_that_was_trained_on_pictures(trained: Path, part: str, loads: list[str]) -> None:
    plan = _plan(model="Qwen/Qwen2-VL-2B", data="owner/pictures", local=False)
    plan["recipe"]["images"] = True
    if part == "merged":
        (trained / "adapter").rmdir()
    card = ModelCard(model_card(plan, trained, {}))
    assert card.data.pipeline_tag == "image-text-to-text"
    for words in ("from transformers import AutoModelForImageTextToText as Model", *loads):
        assert words in card.text
    assert "CausalLM" not in card.text


def test_a_card_names_no_folder_of_the_machine_that_planned(trained: Path) -> None:
    plan = _plan(model="/srv/somebody/models/base", data="/srv/somebody/tickets.jsonl", local=True)
    text = model_card(plan, trained, {})
    assert {"base_model", "datasets", "license"}.isdisjoint(ModelCard(text).data.to_dict())
    shown = shown_recipe(plan)
    assert (shown["model"], shown["data"]) == ("base", "tickets.jsonl")
    assert "/home" not in text + json.dumps(shown)
    assert on_hub(_plan(model="m", data="tickets.jsonl", local=True), "data") is None


# --- Its arguments ---


def test_a_rehearsal_is_of_a_job(tmp_path: Path) -> None:
    command = [sys.executable, str(train_program()), str(tmp_path / "plan.json"), "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--job" in done.stderr


def test_a_job_without_a_plan_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(train_program()), str(tmp_path / "none" / "plan.json"), "--job"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "missing_file")
    assert not list(tmp_path.iterdir())


def test_metrics_for_others_need_their_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert reporter("none") == "none" and capsys.readouterr().out == ""
    assert reporter("json") == "json"  # a package that is there
    assert reporter("trackio_that_is_not_there") == "none"
    assert json.loads(capsys.readouterr().out)["event"] == "note"
