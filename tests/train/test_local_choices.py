"""What `local` says of a run directory and of a training process that ended badly, without training anything."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import planning
import step_records
from skill_train.commands._planning import require_room
from skill_train.commands.local import LocalOptions, _epochs, _is_finished, _steps_were_set, _whole_training
from skill_train.core.console import Console
from skill_train.core.digests import digests
from skill_train.core.errors import DecisionNeeded, NativeCrash, SkillTrainError, TrainingFailed, UsageError
from skill_train.plan import file as plan_file
from skill_train.run import earlier_start, plan_record, records
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Blocker, Launch, Reason
from skill_train.train import local

PLAN = planning.plan_with(recipe={"max_steps": 40}, fingerprints={"data": "x"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run whose adapter is the two bytes `42`."""
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter.parent.mkdir()
    adapter.write_bytes(b"42")
    record = replace(step_records.trained(digests(tmp_path, [adapter])), recipe_hash=PLAN.recipe_hash)
    records.write(tmp_path / "train.json", record)
    plan_record.write(tmp_path / "plan.json", PLAN)
    (tmp_path / "train.log").write_text("some words\n")
    return RunDir(tmp_path)


def test_a_finished_run_is_found(run: RunDir) -> None:
    assert earlier_start.trained(run).outputs.keys() == {"adapter/adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("content", "there"),
    [(b"43", f"2 bytes, sha256 {sha256(b'43').hexdigest()[:12]}…"), (b"4", "1 bytes"), (None, "missing")],
)
def test_another_adapter_in_its_place_is_noticed(run: RunDir, content: bytes | None, there: str) -> None:
    """Else the adapter of another run would be merged, exported and proven as this one's."""
    file = run.adapter / "adapter_model.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        earlier_start.trained(run)
    assert caught.value.code == "output_changed"
    assert caught.value.got == there


def test_a_run_without_its_adapter_is_not_called_untrained(run: RunDir) -> None:
    run.adapter.rename(run.path / "moved")
    with pytest.raises(UsageError, match="has no adapter/"):
        earlier_start.trained(run)
    run.record("train").unlink()
    with pytest.raises(UsageError, match="has not been trained yet"):
        earlier_start.trained(run)


def test_only_a_finished_run_of_the_same_recipe_needs_no_memory(run: RunDir) -> None:
    assert _is_finished(run, PLAN)
    assert not _is_finished(run, replace(PLAN, recipe_hash="b"))
    run.record("train").unlink()
    assert not _is_finished(run, PLAN)
    assert not _is_finished(RunDir(run.path / "new"), PLAN)


def test_the_disk_that_counts_is_that_of_the_run_directory(tmp_path: Path) -> None:
    """`plan` has looked at the disk of the current folder. `--run-dir` may be on another one, larger or smaller."""
    console, folder = Console("json", "local"), tmp_path / "new" / "run"
    for low, blockers, refused in ((1 << 60, [], True), (1.0, [Blocker("no_disk", "the run writes 9 GB")], False)):
        disk = replace(PLAN.estimates.disk_bytes, low=low, high=low)
        plan = replace(PLAN, blockers=blockers, estimates=replace(PLAN.estimates, disk_bytes=disk))
        with pytest.raises(DecisionNeeded) if refused else contextlib.nullcontext() as caught:
            require_room(console, plan, folder, force=False)
        if caught is not None:
            assert caught.value.code == "no_disk" and str(tmp_path) in caught.value.message
        require_room(console, plan, folder, force=True)


def test_another_recipe_in_the_same_folder_is_told_apart(run: RunDir) -> None:
    other = planning.plan_with(recipe={"max_steps": 41}, fingerprints={"data": "y"})
    with pytest.raises(UsageError) as caught:
        local.train(run, other, resume=False, progress=lambda *_: None, say=lambda _: None)
    assert caught.value.code == "another_run"
    assert caught.value.got == "the data has changed; max_steps: 40 → 41"
    assert caught.value.hint == f"the same command with --run-dir {run.path}-2"
    Path(f"{run.path}-2").mkdir()
    assert run.free_name() == f"{run.path}-3"


def test_a_recipe_of_pictures_in_the_folder_of_one_of_text_is_told_apart(run: RunDir) -> None:
    """Only a recipe of pictures has fields of pictures."""
    values = {"max_steps": 40, "images": True, "lora_parts": ["language"]}
    other = planning.plan_with(recipe=values, fingerprints={"data": "x"})
    with pytest.raises(UsageError) as caught:
        local.train(run, other, resume=False, progress=lambda *_: None, say=lambda _: None)
    assert caught.value.got == "images: None → True; lora_parts: None → ['language']; preprocess: None → 'model'"
    plan_record.write(run.plan, other)
    with pytest.raises(UsageError) as caught:
        local.train(run, PLAN, resume=False, progress=lambda *_: None, say=lambda _: None)
    assert caught.value.got == "images: True → None; lora_parts: ['language'] → None; preprocess: 'model' → None"


def test_of_the_hub_nobody_is_asked_whether_a_run_may_go_on() -> None:
    """Its revision says which model and which rows; without a network they come from the cache."""
    here = {"model": "me/tiny", "revision": "a" * 40, "data": "me/rows", "data_revision": "b" * 40}
    plan = planning.plan_with(recipe=here, fingerprints={"model": None, "data": None})
    plan_file.require_same_inputs(Path("plan.json"), plan, "")
    with pytest.raises(UsageError):  # a folder that is gone is not on the Hub
        plan_file.require_same_inputs(Path("plan.json"), replace(plan, fingerprints={"model": None, "data": "f"}), "")


@pytest.mark.parametrize(
    ("ended", "kind", "code"),
    [
        (-signal.SIGINT, TrainingFailed, "interrupted"),
        (-signal.SIGTERM, TrainingFailed, "interrupted"),
        (-signal.SIGKILL, DecisionNeeded, "out_of_memory"),
        (-signal.SIGSEGV, NativeCrash, "native_crash"),
        (1, NativeCrash, "program_failed"),
    ],
)
def test_how_a_training_process_ended(run: RunDir, ended: int, kind: type[SkillTrainError], code: str) -> None:
    error = local._failure(run, ended, None, "some words\n")
    assert isinstance(error, kind)
    assert error.code == code
    assert error.hint


def test_who_interrupts_is_told_from_where_it_goes_on(run: RunDir) -> None:
    """Also while the adapter is saved, when the program has no word for it any more."""
    name = signal.SIGINT.name
    assert local._failure(run, -signal.SIGINT, None, "").message.endswith(f"({name}) before its first checkpoint")
    for step in (5, 10, 20):
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"1234")
        (checkpoint / "complete.json").write_text('{"weights": 4}')
    (checkpoint / "weights").write_bytes(b"1")  # torn
    assert local._failure(run, -signal.SIGINT, None, "").message.endswith(f"({name}) after its checkpoint of step 10")


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (-signal.SIGABRT, "  what():  std::bad_alloc\n"),
        (-signal.SIGABRT, "memory allocation of 6 bytes failed\nskipping\n"),
        (127, "cannot allocate memory for thread-local data: ABORT\n"),
    ],
)
def test_native_code_that_got_no_memory_has_not_crashed(run: RunDir, code: int, last: str) -> None:
    error = local._failure(run, code, None, last)
    assert isinstance(error, DecisionNeeded)
    assert error.code == "out_of_memory"


def test_each_attempt_begins_with_a_line_in_the_log(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that says nothing: what is told of an attempt is its own words, and the line is none of them."""
    program = run.path / "silent.py"
    program.write_text("raise SystemExit(1)")
    monkeypatch.setattr(local, "train_program", lambda: program)
    for resume in (False, True):
        with pytest.raises(NativeCrash, match="no output"):
            local._run_program(run, None, resume=resume, progress=lambda *_: None, say=lambda _: None)
    earlier, *attempts = run.log.read_text().splitlines()
    assert earlier == "some words"
    said = [json.loads(line) for line in attempts]
    assert [(e["event"], e["resume"], e["program"]) for e in said] == [
        ("attempt", False, str(program)),
        ("attempt", True, str(program)),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", e["at"]) for e in said)


# What torch 2.13 wrote to train.log, recorded 2026-11-21: the second of two processes killed, and failed with a bug.
KILLED = """\
Failures:
[1]:
  time      : 2026-11-21_14:14:43
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11141)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 11141
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_14:14:43
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 11142)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 11142
"""
BUG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 1513, in <module>
[rank1]: RuntimeError: open file failed with strerror: Is a directory
E1121 14:02:59.363000 7737 failed (exitcode: 1) local_rank: 1 (pid: 7744) of binary: python
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 10811)
"""
LOST = {"exit_code": 5, "error": {"code": "process_lost", "message": "lost", "expected": "", "got": "", "hint": ""}}
OTHER = {"exit_code": 3, "error": {"code": "no_disk", "message": "full", "expected": "", "got": "", "hint": ""}}


@pytest.mark.parametrize(
    ("failure", "stopped", "said", "code"),
    [
        (LOST, None, KILLED, -signal.SIGKILL),
        (None, None, KILLED, -signal.SIGKILL),
        (OTHER, None, KILLED, 1),  # its own word: the rest was killed because it ended
        (LOST, None, BUG, 1),
        (None, None, BUG, 1),
        (None, signal.SIGINT, BUG, -signal.SIGINT),
        (LOST, None, "", 1),
    ],
)
def test_how_several_processes_ended(failure: dict[str, Any] | None, stopped: int | None, said: str, code: int) -> None:
    """Their launcher ends with 1 whatever they did."""
    assert local._how_it_ended(1, stopped, failure, said) == code


def test_one_process_has_its_own_exit_code_whatever_it_printed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that starts processes of its own may print such a table about them."""
    program = run.path / "printing.py"
    program.write_text(f"print({KILLED!r})\nraise SystemExit(1)")
    monkeypatch.setattr(local, "train_program", lambda: program)
    with pytest.raises(NativeCrash) as caught:
        local._run_program(run, None, resume=False, progress=lambda *_: None, say=lambda _: None)
    assert caught.value.code == "program_failed"
    assert local._how_it_ended(1, None, LOST, "exitcode : -9, says a library of its worker\n") == 1


def test_a_bug_in_one_of_several_processes_shows_its_traceback(run: RunDir) -> None:
    error = local._failure(run, 1, LOST, BUG)
    assert isinstance(error, NativeCrash)
    assert error.code == "program_failed"
    assert "Is a directory" in error.message
    assert all(line.startswith("[rank1]") for line in error.got.splitlines())


def test_a_lost_process_without_a_traceback_is_told(run: RunDir) -> None:
    error = local._failure(run, 1, LOST, "some words")
    assert isinstance(error, TrainingFailed)
    assert error.code == "process_lost"


def test_the_launcher_is_started_with_the_arguments_of_the_plan(run: RunDir) -> None:
    command = local._command(run, Launch(["--multi_gpu"]), resume=True)
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
    assert Path(command[4]).name == "train.py" and command[5:] == [str(run.plan), "--resume"]
    assert local._command(run, Launch(), resume=False)[1:] == command[4:6]


def test_the_words_of_the_program_count_before_its_exit_code(run: RunDir) -> None:
    said = {"code": "no_disk", "message": "full", "expected": "", "got": "", "hint": "skill-train local --run-dir RUN"}
    error = local._failure(run, 3, {"exit_code": 3, "error": said}, "")
    assert isinstance(error, DecisionNeeded)
    assert error.hint == f"skill-train local --run-dir {run.path}"


@pytest.mark.parametrize(
    ("recipe", "said", "following"),
    [
        (None, {"model": "m", "data": "my rows.jsonl", "max_steps": 5}, "skill-train plan --model m --data 'my rows.jsonl'"),  # noqa: E501
        (Path("r.yaml"), {"max_steps": 5, "max_length": 64}, "skill-train plan r.yaml --max-length 64"),
        (Path("r.yaml"), {}, None),
    ],
)  # fmt: skip
def test_after_a_smoke_run_comes_the_whole_training(
    recipe: Path | None, said: dict[str, Any], following: str | None
) -> None:
    assert _whole_training(LocalOptions(recipe=recipe, **said)) == ([following] if following else [])


def test_only_steps_that_were_said_can_be_too_many() -> None:
    record = step_records.trained({}, rows=143, steps=20)
    assert _epochs(planning.plan_with(recipe={"effective_batch_size": 16}), record) == pytest.approx(2.2378, abs=1e-4)
    assert _steps_were_set(replace(PLAN, reasons=[Reason("format", "", "", "")]))
    assert not _steps_were_set(replace(PLAN, reasons=[Reason("max_steps", "", "", "")]))
