"""Names and texts with quotes, newlines, shell and template signs travel as data: through files, commands, notebooks
and tasks, and past the terminal."""

from __future__ import annotations

import ast
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from one_command import answered, called
from planning import decided_plan
from skill_train.cloud import start_once
from skill_train.cloud.elsewhere import colab, skypilot
from skill_train.commands.local import draw_checks
from skill_train.core.console import Console, Result, clean
from skill_train.hub import flavors
from skill_train.recipe import fields as recipe
from skill_train.run import job_spec
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.train_record import SmokeCheck

NAMES = (
    "it's.jsonl", 'a"b.jsonl', "a\nb.jsonl", "two words.jsonl", "$(touch canary).jsonl", "`touch canary`.jsonl",
    "x; touch canary #.jsonl", "{{ 7 * 7 }}{% raw %}.jsonl", "--yes.jsonl", "a|b&c>d.jsonl",
    "\\'\\\".jsonl", "'''.jsonl",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_recipe(name: str, tmp_path: Path) -> None:
    values = {"model": name, "data": name, "format": "text", "columns": {"text": name}, "hub_model_id": name}
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(values), encoding="utf-8")
    loaded = recipe.load(tmp_path / "r.yaml")
    assert {key: getattr(loaded, key) for key in values} == values


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_next_command(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"prompt": "q", "completion": "a"}\nbroken\n', encoding="utf-8")
    words = shlex.split(answered("data", path)[1]["error"]["hint"])
    assert words[:3] == ["skill-train", "data", str(path)] and words[3] == "--fix" and len(words) == 5
    assert not (tmp_path / "canary").exists() and not Path("canary").exists()


def test_a_run_that_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(__file__).resolve().parents[1] / "support" / "data" / "runs" / "tiny", tmp_path / "-run")
    monkeypatch.chdir(tmp_path)
    for words in (["./-run"], ["--", "-run"]):
        done = called("report", "--format", "json", *words)
        (following,) = done.answer["next"]
        assert (done.code, shlex.split(following)[-1]) == (0, str(tmp_path / "-run"))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_notebook(name: str, tmp_path: Path) -> None:
    for file in (tmp_path / name, tmp_path / "plan.json"):
        file.write_text("{}")
    made = tmp_path / "colab.ipynb"
    colab.write_notebook(made, tmp_path / "plan.json", gpu="T4", run_id="x", data={name: tmp_path / name}, packages=())
    sources = ["".join(cell["source"]) for cell in json.loads(made.read_text())["cells"]]
    settings, files = (next(s for s in sources if s.startswith(word)) for word in ("SETTINGS = ", "FILES = "))
    assert ast.literal_eval(settings.removeprefix("SETTINGS = "))["data"] == f"data/{name}"
    assert f"data/{name}" in ast.literal_eval(files.removeprefix("FILES = "))


def test_a_name_in_a_task_and_in_a_job(tmp_path: Path) -> None:
    cloud = decided_plan("qwen2.5-0.5b", "rtx_4090", where="cloud", flavor="l40sx1", hub_model_id="me/x")
    flavor = next(each for each in flavors.shipped() if each.name == "l40sx1")
    data = CloudData("/dataset", None, None, bucket="me/b", folder="f")
    record, job = CloudRecord("0" * 12, "0" * 16, "me", "me/x", data=data), CloudJob(1, "starting", "t4-small", 60, "")
    for name in NAMES:
        plan = replace(cloud, recipe=replace(cloud.recipe, data=f"/here/{name}"))
        run = skypilot.SkyRun("x", "hf://b", data=f"data/{name}", timeout_seconds=60)
        task = skypilot.task(plan, flavor, run, nodes=1, places=["lambda"])
        assert shlex.split(yaml.safe_load(yaml.safe_dump(task))["run"])[-1] == f"data/{name}"
        made = start_once.specification(RunDir(tmp_path), plan, record, job)
        assert job_spec.command(made)[-2:] == ["--data", f"/dataset/{name}"]


def test_markup_and_escapes_in_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[/b][bold]x[link=file:///etc/passwd]\x1b[31m:smile:\u202egnp"
    check = SmokeCheck(name=hostile, verdict="pass", figure=1, detail=hostile)
    console = Console("human", "x")
    console.result(Result({}, human=lambda rich: draw_checks(rich, f"title {hostile}", [check]), next=[hostile]))
    console.result(Result({}, human=lambda rich: rich.print_json(data={hostile: [hostile]})))
    text = capsys.readouterr().out
    assert "[/b][bold]x[link" in text.replace("\n", "") and "\x1b" not in text and "\u202e" not in text
    assert ":smile:" in text and clean("\u2066a\u2069") == "�a�"
