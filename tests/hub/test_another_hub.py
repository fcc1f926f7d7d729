"""`submit` against a Hub that nobody had in mind when it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from another_hub import TOKEN, AnotherHub
from command_child import Commands
from hub_emulator import Hub, environment
from hub_models import add_model

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def test_submit_to_another_hub(tmp_path: Path) -> None:
    """Pages, missing and new fields, other codes of success, foreign jobs, an answer without volumes."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    _plan(tmp_path)
    with AnotherHub() as hub:
        env = environment(hub.endpoint, tmp_path / "other-home", TOKEN)
        commands = Commands(env)
        done = commands.run(tmp_path, env, "submit", "plan.json", "--run-dir", "run", "--yes")
        again = commands.run(tmp_path, env, "submit", "plan.json", "--run-dir", "run", "--yes")
        elsewhere = commands.run(tmp_path, env, "submit", "plan.json", "--run-dir", "other", "--yes")
        commands.close()
    data = done.data
    [spec] = hub.posted
    assert (data["job_id"], data["stage"], data["reused"]) == ("a1b2c3d4e5f6a1b2c3d4e5f6", "UPDATING", False)
    assert [each.data["reused"] for each in (again, elsewhere)] == [True, True]
    assert {each.data["job_id"] for each in (again, elsewhere)} == {data["job_id"]}
    kept = next(volume for volume in spec["volumes"] if volume["mountPath"] == "/data")
    record = json.loads((tmp_path / "run" / "cloud.json").read_text())
    assert (record["bucket"], record["folder"]) == (kept["source"], kept["path"])
    sent = {name.split("/")[-1] for name in hub.files if not name.startswith("claims/")}
    assert sent == {"train.py", "plan.json", "rows.jsonl"}
    assert spec["secrets"] == {"HF_TOKEN": TOKEN}
    assert TOKEN not in json.dumps({**spec, "secrets": None}) + done.stdout + done.stderr + json.dumps(record)


def _plan(folder: Path) -> None:
    with Hub(folder / "hub") as hub:
        add_model(hub)
        env = hub.environment(folder / "home")
        commands = Commands(env)
        words = ("--model", MODEL, "--data", "rows.jsonl", "--where", "cloud", "--flavor", "t4-small")
        assert commands.run(folder, env, "plan", *words, "--out", "plan.json").code == 0
        commands.close()
