"""`export-gguf --lora`: what comes next can be run as it stands."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import shared_runs
from one_command import answered
from skill_train.gguf.export_files import unread
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow


def test_the_adapter_runs_beside_its_base(tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run")))
    code, answer = answered("export-gguf", run.path, "--lora")
    assert code == 0, answer
    adapter = Path(answer["data"]["files"][0]["path"])
    verify, export, server = (shlex.split(line) for line in answer["next"])
    assert verify == ["skill-train", "verify", str(run.path)]  # tests/verify/test_lora.py
    code, again = answered(*export[1:])
    assert code == 0 and again["ok"], again
    assert server[:2] == ["llama-server", "-m"] and Path(server[2]).is_file()
    assert server[3:] == ["--lora", str(adapter)]
    lines = (run.gguf / "Modelfile-lora").read_text().splitlines()
    base, added = (next(line.split()[1] for line in lines if line.startswith(word)) for word in ("FROM", "ADAPTER"))
    assert (run.gguf / base).resolve() == Path(server[2]).resolve() and (run.gguf / added).samefile(adapter)
    assert not any(line.startswith("TEMPLATE") for line in lines)
    edited = (run.gguf / "Modelfile-lora").read_text() + "SYSTEM Be brief.\n"
    (run.gguf / "Modelfile-lora").write_text(edited)
    code, again = answered("export-gguf", run.path, "--lora")
    assert [each["code"] for each in again["warnings"]] == ["set_aside"], again
    assert (run.gguf / "Modelfile-lora.unrecorded-1").read_text() == edited
    assert (run.gguf / "Modelfile-lora").read_text().splitlines() == lines
    assert unread(run) == ()  # `verify` reports every file here that it cannot judge


def test_a_run_that_was_renamed_keeps_its_file_and_no_earlier_one_is_lost(tmp_path: Path) -> None:
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "first"))
    file = Path(answered("export-gguf", run, "--lora")[1]["data"]["files"][0]["path"])
    renamed = run.rename(tmp_path / "second")
    code, answer = answered("export-gguf", renamed, "--lora")
    assert (code, answer["data"]["reused"]) == (0, True), answer
    kept = renamed / "gguf" / file.name
    kept.write_bytes(b"of an earlier training")
    (renamed / "lora_gguf.json").unlink()
    kept = kept.rename(kept.with_name(kept.name.replace("first", "second")))
    code, answer = answered("export-gguf", renamed, "--lora")
    assert code == 0 and [each["code"] for each in answer["warnings"]] == ["set_aside"], answer
    aside = [
        path for path in kept.parent.iterdir() if path.is_file() and path.read_bytes() == b"of an earlier training"
    ]
    assert len(aside) == 1 and kept.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    "option",
    ["--quant q8_0", "--for 'iPhone 15'", "--max-size 1GB", "--imatrix none", "--modelfile q8_0", "--mmproj none"],
)
def test_what_an_adapter_alone_would_ignore_is_refused(option: str) -> None:
    words = shlex.split(option)
    code, answer = answered("export-gguf", shared_runs.chain().run, "--lora", *words)
    error = answer["error"]
    assert (code, error["code"], error["got"]) == (2, "bad_usage", words[0])
