"""`export-gguf --lora`: what comes next can be run as it stands."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import shared_runs
from skill_train.cli import main
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow


def test_the_adapter_runs_beside_its_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    answer = _call(capsys, "export-gguf", str(run.path), "--lora")
    adapter = Path(answer["data"]["files"][0]["path"])
    verify, export, server = (shlex.split(line) for line in answer["next"])
    assert verify == ["skill-train", "verify", str(run.path)]  # tests/verify/test_lora.py
    assert _call(capsys, *export[1:])["ok"]
    assert server[:2] == ["llama-server", "-m"] and Path(server[2]).is_file()
    assert server[3:] == ["--lora", str(adapter)]
    lines = (run.gguf / "Modelfile-lora").read_text().splitlines()
    base, added = (next(line.split()[1] for line in lines if line.startswith(word)) for word in ("FROM", "ADAPTER"))
    assert (run.gguf / base).resolve() == Path(server[2]).resolve() and (run.gguf / added).samefile(adapter)
    assert not any(line.startswith("TEMPLATE") for line in lines)


@pytest.mark.parametrize(
    "option",
    ["--quant q8_0", "--for 'iPhone 15'", "--max-size 1GB", "--imatrix none", "--modelfile q8_0", "--mmproj none"],
)
def test_what_an_adapter_alone_would_ignore_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(option)
    with pytest.raises(SystemExit) as ended:
        main(["export-gguf", str(shared_runs.chain().run), "--lora", *words, "--format", "json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, error["code"], error["got"]) == (2, "bad_usage", words[0])


def _call(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--format", "json"])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    return json.loads(out)
