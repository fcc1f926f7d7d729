"""A training whose batch finds no memory is tried once more with a smaller layout, here and in a job.

The program is a stand-in without torch: it asks a real limit of its memory for what its plan's layout needs, and its
end is told by the functions of `train.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planning
from skill_train.core.errors import DecisionNeeded
from skill_train.program.cloud.job import SMALLER_PLAN, layout_that_was_left, train_in_job
from skill_train.program.plan import MEASURING, kills_for_memory, memory_ended, smaller_layout
from skill_train.run.folder import RunDir
from skill_train.train import local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of a process's memory"),
]

# Needs 40 MB a row, four times as much without recomputation, of `free` MB.
STAND_IN = """
import json, os, resource, sys
from pathlib import Path
from skill_train.program import events

path = Path(sys.argv[1])
plan = json.loads(path.read_text())
settings = json.loads(Path(__file__).with_name("stand_in.json").read_text())
with open(settings["starts"], "a") as file:
    file.write(json.dumps([plan["placement"], sys.argv[2:]]) + "\\n")
(path.parent / "train.failed.json").unlink(missing_ok=True)
events.event("stage", text=settings["stage"])
used = events.linux_figure("self/status", "VmData:") << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (settings["free"] << 20),) * 2)
if settings["killed"]:
    os.kill(os.getpid(), 9)
layout = plan["placement"]
try:
    with events.explained_errors():
        bytearray((40 << 20) * layout["per_device_train_batch_size"] * (1 if layout["gradient_checkpointing"] else 4))
except events.Refused as refusal:
    events.tell_failure(refusal, path.parent)
    sys.exit(refusal.exit_code)
events.write_json(path.parent / "train.json", {"verdict": "pass"})
"""


def _layout(rows: int, times: int, checkpointing: bool) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": times,
        "gradient_checkpointing": checkpointing,
    }


@pytest.mark.parametrize(
    ("layout", "smaller"),
    [
        ((8, 2, False), (8, 2, True)),
        ((1, 16, False), (1, 16, True)),
        ((8, 2, True), (4, 4, True)),
        ((6, 1, True), (3, 2, True)),
        ((3, 4, True), (1, 12, True)),
        ((5, 2, True), (2, 5, True)),
        ((7, 1, True), (1, 7, True)),
        ((1, 16, True), None),
    ],
)
def test_the_next_smaller_layout(layout: tuple[int, int, bool], smaller: tuple[int, int, bool] | None) -> None:
    """By hand; a step has as many rows as before."""
    given = {"device": "cpu", "num_processes": 2, **_layout(*layout)}
    assert smaller_layout(given) == (None if smaller is None else given | _layout(*smaller))


# Free memory, first layout, last stage, killed; the layouts that are tried; whether one of them ends well.
CASES = [
    pytest.param(600, (2, 2, False), "training", False, [(2, 2, False)], True, id="fits"),
    pytest.param(200, (2, 2, False), "training", False, [(2, 2, False), (2, 2, True)], True, id="recomputing fits"),
    pytest.param(200, (8, 1, True), "training", False, [(8, 1, True), (4, 2, True)], True, id="fewer rows fit"),
    pytest.param(200, (8, 1, True), MEASURING, False, [(8, 1, True), (4, 2, True)], True, id="before training"),
    pytest.param(90, (8, 1, True), "training", False, [(8, 1, True), (4, 2, True)], False, id="nothing fits"),
    pytest.param(20, (1, 8, True), "training", False, [(1, 8, True)], False, id="nothing smaller"),
    pytest.param(20, (8, 1, False), "loading the model", False, [(8, 1, False)], False, id="no batch yet"),
    pytest.param(20, (8, 1, False), "saving adapter/", False, [(8, 1, False)], False, id="no batch any more"),
    pytest.param(600, (2, 2, False), "training", True, [(2, 2, False)], False, id="killed by somebody"),
]


@pytest.mark.parametrize(("free", "layout", "stage", "killed", "tried", "ends_well"), CASES)
def test_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    layout: tuple[int, int, bool],
    stage: str,
    killed: bool,
    tried: list[tuple[int, int, bool]],
    ends_well: bool,
) -> None:
    run, said = RunDir(tmp_path), list[str]()
    _write(tmp_path, layout)
    _settings(tmp_path, starts=tmp_path / "starts", free=free, stage=stage, killed=killed)
    monkeypatch.setattr(local, "train_program", lambda: _program(tmp_path))
    given: dict[str, Any] = {"resume": False, "progress": lambda *_: None, "say": said.append}
    if ends_well:
        local._run_until_it_fits(run, None, **given)
    else:
        with pytest.raises(DecisionNeeded) as caught:
            local._run_until_it_fits(run, None, **given)
        assert (caught.value.code, caught.value.exit_code) == ("out_of_memory", 3)
        assert ("was tried too" in caught.value.hint) == (len(tried) == 2)
    assert _starts(tmp_path) == [_layout(*each) for each in tried]
    assert [words for _, words in _lines(tmp_path)] == [["--attended"], ["--resume", "--attended"]][: len(tried)]
    _check_plan(json.loads(run.plan.read_text()), tried)
    assert len([line for line in said if "once more" in line]) == len(tried) - 1


@pytest.mark.parametrize(("free", "layout", "stage", "killed", "tried", "ends_well"), CASES)
def test_in_a_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    layout: tuple[int, int, bool],
    stage: str,
    killed: bool,
    tried: list[tuple[int, int, bool]],
    ends_well: bool,
) -> None:
    """A further job of the run begins with the layout that the last one came to."""
    kept = tmp_path / "kept"
    kept.mkdir()
    plan = _write(kept, layout)
    _settings(tmp_path, starts=kept / "starts", free=free, stage=stage, killed=killed)
    before = (kept / "plan.json").read_bytes()
    _command(monkeypatch, tmp_path)
    failure = train_in_job(plan, None, _folder(tmp_path / "one"), kept)
    assert (failure is None) == ends_well
    if failure is not None:
        assert (failure["exit_code"], failure["error"]["code"]) == (3, "out_of_memory")
    assert _starts(kept) == [_layout(*each) for each in tried]
    assert json.loads((kept / "kept.json").read_text())["state"] == ("done" if ends_well else "failed")
    assert (kept / "train.failed.json").is_file() != ends_well
    assert (kept / "plan.json").read_bytes() == before
    _check_plan(json.loads((tmp_path / "one" / "plan.json").read_text()), tried)
    train_in_job(plan, None, _folder(tmp_path / "two"), kept)
    assert _starts(kept)[len(tried)] == _layout(*tried[-1])


def test_a_layout_that_another_plan_came_to_is_left_out(tmp_path: Path) -> None:
    (tmp_path / SMALLER_PLAN).write_text(json.dumps({"recipe_hash": "b", "placement": {}}))
    plan = {"recipe_hash": "a", "placement": _layout(2, 2, True)}
    assert layout_that_was_left(plan, tmp_path) == plan
    (tmp_path / SMALLER_PLAN).write_text('{"recipe_hash"')
    assert layout_that_was_left(plan, tmp_path) == plan


@pytest.mark.parametrize(("before", "certain"), [(-1, True), (0, False), (None, False)])
def test_only_what_the_system_counts_was_killed_for_its_memory(before: int | None, certain: bool) -> None:
    """`before` counts from now; None where nothing was counted."""
    now = subprocess.run(["grep", "^oom_kill ", "/proc/vmstat"], capture_output=True, text=True).stdout.split()
    if not now:
        pytest.skip("this kernel does not count them")
    error = {"code": "out_of_memory", "message": "the system killed the training process (SIGKILL), most likely …"}
    assert kills_for_memory() == int(now[1])
    assert memory_ended(error, None if before is None else int(now[1]) + before) is certain
    assert memory_ended(error | {"message": "out of memory: …"}, before)
    assert not memory_ended(error | {"code": "native_crash"}, before)


def _settings(folder: Path, *, starts: Path, **values: Any) -> None:
    (folder / "stand_in.json").write_text(json.dumps(values | {"starts": str(starts)}))


def _write(folder: Path, layout: tuple[int, int, bool]) -> dict[str, Any]:
    plan = planning.plan_document(
        recipe_hash="a",
        placement={"device": "cpu", **_layout(*layout)},
        reasons=[{"rule": "batch", "value": "1", "because": "", "source": ""}],
        launch={"arguments": [], "environment": {}},
    )
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


def _check_plan(plan: dict[str, Any], tried: list[tuple[int, int, bool]]) -> None:
    """It holds the layout that was tried last, with the reason where it is not the first."""
    assert plan["recipe_hash"] == "a"
    assert {key: plan["placement"][key] for key in _layout(1, 1, True)} == _layout(*tried[-1])
    assert [reason["rule"] for reason in plan["reasons"]] == ["batch", "smaller_layout"][: len(tried)]
    if len(tried) == 2:
        (rows, times, _), reason = tried[1], plan["reasons"][-1]
        assert reason["value"] == f"{rows} x {times} rows with gradient_checkpointing"
        assert re.match(rf"out of memory: .*; it was {tried[0][0]} x {tried[0][1]} rows with", reason["because"])


def _starts(folder: Path) -> list[dict[str, Any]]:
    return [{key: placement[key] for key in _layout(1, 1, True)} for placement, _ in _lines(folder)]


def _lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def _program(folder: Path) -> Path:
    (folder / "stand_in.py").write_text(STAND_IN)
    return folder / "stand_in.py"


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    program = _program(folder)
    command = "skill_train.program.cloud.job.child_command"
    monkeypatch.setattr(command, lambda _, work, __: [sys.executable, str(program), str(work / "plan.json")])
