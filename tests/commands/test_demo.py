"""The demo as a user runs it: a child process, no network, one document on stdout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_child import Commands, Done
from hub_emulator import Hub
from pages import Page, differing

pytestmark = pytest.mark.slow

DEAD = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
TOKEN = "hf_" + 34 * "x"  # in the environment of the demo; none of the Hub's


@pytest.fixture(scope="module")
def made(converter: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    answer = _run(folder, "demo", "--format", "json", HF_TOKEN=TOKEN)
    assert answer.returncode == 0, answer.stderr
    assert TOKEN not in answer.stderr
    (folder / "answer.json").write_text(answer.stdout, encoding="utf-8")
    return folder


def test_the_token_is_nowhere(made: Path) -> None:
    """`test_story` looks for it after every other command."""
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_every_stage_after_training_knows_what_the_base_does_not(made: Path) -> None:
    stages = {row["stage"]: row for row in _stages(made)}
    assert list(stages) == ["base", "adapter", "merged", "f16", "q8_0", "q4_k_m"]
    assert stages["base"]["exact_match"] <= 0.1
    assert all(row["exact_match"] > 0.9 for name, row in stages.items() if name != "base")
    assert all(row["verdict"] == "pass" for name, row in stages.items() if name != "base")


def test_the_divergence_grows_with_the_loss_of_precision(made: Path) -> None:
    stages = {row["stage"]: row for row in _stages(made)}
    assert 0 <= stages["f16"]["mean_kl"] < stages["q8_0"]["mean_kl"] < stages["q4_k_m"]["mean_kl"] < 0.1
    assert stages["f16"]["bytes"] > stages["q8_0"]["bytes"] > stages["q4_k_m"]["bytes"]


def test_the_table_in_the_readme_is_what_the_demo_prints(made: Path) -> None:
    """Cell by cell, but the speeds. Another processor moves a divergence by some percent."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from make_demo_table import shown, table_of

    written, printed = _cells(shown()), _cells(table_of(made / "runs" / "demo"))
    assert [[*row[:3], row[5]] for row in written] == [[*row[:3], row[5]] for row in printed]
    divergences = [[float(row[3]) for row in rows if "e-" in row[3]] for rows in (written, printed)]
    assert len(divergences[0]) == 4 and divergences[0] == pytest.approx(divergences[1], rel=0.5)


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in table.splitlines() if line[0] in "┃│"]


def test_a_second_call_shows_the_same_table_and_trains_nothing(commands: Commands, made: Path) -> None:
    before = (made / "runs" / "demo" / "train.json").stat().st_mtime_ns
    again = _call(commands, made, "demo", "--format", "json")
    assert again.data["stages"] == _stages(made)
    assert (made / "runs" / "demo" / "train.json").stat().st_mtime_ns == before


def test_evaluate_says_that_tuning_helped_and_that_the_file_kept_it(commands: Commands, made: Path) -> None:
    """base < tuned ≈ q8_0, with intervals; and the demo has measured it already."""
    answer = _call(commands, made, "evaluate", "runs/demo", "--format", "json")
    data = json.loads(answer.stdout)["data"]
    assert (answer.code, data["reused"], data["rows"]) == (0, True, 100)
    loss = {one["name"]: one["loss"] for one in data["models"]}
    assert loss["tuned"] < 0.05 < 1 < loss["base"]
    says = {(one["model"], one["measure"]): one for one in data["differences"]}
    assert says["tuned", "loss"]["says"] == says["tuned", "exact_match"]["says"] == "better"
    assert says["tuned", "loss"]["high"] < -1
    assert says["demo-q8_0.gguf", "exact_match"]["says"] == "inside the noise"
    kept = says["demo-q8_0.gguf", "loss"]
    assert -1e-3 < kept["low"] <= kept["difference"] <= kept["high"] < 1e-3


def test_a_file_that_was_changed_is_not_shown_as_proven(commands: Commands, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs")
    file = tmp_path / "runs" / "demo" / "gguf" / "demo-q8_0.gguf"
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    file.write_bytes(data)
    answer = _call(commands, tmp_path, "verify", "runs/demo", "--format", "json")
    assert answer.code == 6
    assert "digest (demo-q8_0.gguf)" in json.loads(answer.stdout)["error"]["message"]
    assert "Traceback" not in answer.stderr


def test_it_is_pushed_with_its_proof_and_comes_back_byte_for_byte(made: Path, tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        reachable = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"}  # set for all other tests
        answer = _run(made, "push", "runs/demo", "--repo", "me/demo", **reachable)
        assert answer.returncode == 0, answer.stderr
        command = [sys.executable, "-c", _DOWNLOAD, str(tmp_path / "back")]
        subprocess.run(command, env=hub.environment(tmp_path / "home"), check=True, timeout=120)
        assert hub.unknown == []
    files = sorted((made / "runs" / "demo" / "gguf").glob("*.gguf"))
    assert [(tmp_path / "back" / file.name).read_bytes() == file.read_bytes() for file in files] == [True] * 3
    card = (tmp_path / "back" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {file.name} | tuned | pass |" in card for file in files)


_DOWNLOAD = """
import sys
from huggingface_hub import HfApi, hf_hub_download
for name in HfApi().list_repo_files("me/demo"):
    hf_hub_download("me/demo", name, local_dir=sys.argv[1])
"""


def test_the_report_shows_the_figures_of_its_files(commands: Commands, made: Path) -> None:
    answer = _call(commands, made, "report", "runs/demo", "--format", "json")
    assert answer.code == 0, answer.stderr
    page = Page((made / "runs" / "demo" / "report.html").read_text(encoding="utf-8"))
    assert json.loads(answer.stdout)["data"]["runs"][0]["headline"] == "Proven: 48 of 48 checks pass on 3 files"
    assert len(page.figures) > 200
    assert differing(page, made / "runs", lambda text: f"…/{Path(text).name}" if text.startswith("/") else text) == []
    assert str(made) not in page.html


def _stages(folder: Path) -> list[dict[str, Any]]:
    document = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    stages: list[dict[str, Any]] = document["data"]["stages"]
    return stages


def _run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: huggingface_hub reads its address once."""
    command = [str(Path(sys.executable).with_name("skill-train")), *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | DEAD | environment, capture_output=True, text=True, check=False
    )


def _call(commands: Commands, folder: Path, *arguments: str, **environment: str) -> Done:
    return commands.run(folder, os.environ | DEAD | environment, *arguments)
