"""Rows that all begin with one system message: whoever asks the model must give it too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import step_records
import tiny
from one_command import answered
from skill_train.gguf.export_files import model_of
from skill_train.gguf.ollama_modelfile import edits, parameters_of
from skill_train.llama.engines import ollama
from skill_train.program.chat.labels import system_digest

pytestmark = pytest.mark.slow

SYSTEM = 'You are "exact".\nFrom now on, say one word.'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("system")
    for row in (rows := tiny.rows(24)):
        turns = [turn for turn in row["messages"] if turn["role"] != "system"]
        row["messages"] = [{"role": "system", "content": SYSTEM}, *turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--max-steps", 2, "--max-length", 256, "--run-dir", folder / "run")
    code, answer = answered("local", "--model", tiny.cached("gemma"), "--data", folder / "rows.jsonl", *words)
    assert code == 0, answer
    code, answer = answered("export-gguf", folder / "run", "--quant", "q8_0", "--imatrix", "none")
    assert code == 0, answer
    assert [each["source"] for each in answer["data"]["modelfile_reasons"] if each["rule"] == "SYSTEM"]
    return folder / "run"


def codes(*words: object) -> set[str]:
    code, answer = answered(*words)
    assert code == 0, answer
    return {warning["code"] for warning in answer["warnings"]}


def test_the_modelfile_has_it(run: Path) -> None:
    text = (run / "gguf" / "Modelfile").read_text()
    assert f'\nSYSTEM """{SYSTEM}"""' in text and model_of(run / "gguf" / "Modelfile") == "./run-q8_0.gguf"
    asked = ollama._modelfile(run / "gguf" / "run-q8_0.gguf", None)  # `verify` judges conversations without one
    assert "SYSTEM" not in asked and "exact" not in asked and "PARAMETER repeat_penalty" in asked
    assert 'PARAMETER stop "<end_of_turn>"' in asked
    assert "modelfile_edited" not in codes("verify", run, "--tokens", 64)


def test_a_question_without_it_is_told(run: Path) -> None:
    ask = ("chat", run, "--prompt", "Hello", "--max-tokens", 1)
    assert "no_system" in codes(*ask)
    assert "no_system" not in codes(*ask, "--system", SYSTEM)
    assert "no_system" not in codes(*ask, "--raw")


def test_a_run_of_an_earlier_version_claims_nothing(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "environment.json").read_text())
    assert record["data"].pop("system_sha256")
    run = Path(shutil.copytree(run, tmp_path / "run"))
    step_records.put_environment(run, record)
    assert "no_system" not in codes("chat", run, "--prompt", "Hello", "--max-tokens", 1)


def _row(*roles: str, text: object = "a") -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role in roles]}


def test_only_one_message_of_all_rows_counts() -> None:
    both, other = _row("system", "user"), _row("system", "user", text="b")
    assert system_digest([both, both]) == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    parts = _row("system", text=[{"type": "text", "text": "a"}])
    for rows in ([both, other], [both, _row("user")], [{"prompt": "a"}], [parts], [_row("system", text="")], []):
        assert system_digest(rows) == ""


def test_what_a_modelfile_cannot_quote_is_said() -> None:
    lines, reasons = parameters_of(tiny.cached("gemma"), system='three """ of them')
    assert not any("SYSTEM" in line for line in lines)
    assert [each["because"] for each in reasons if each["rule"] == "no SYSTEM"]
    for text in ("Réponds\u00a0: oui", "\U0001f469\u200d\U0001f52c", "a\x0bb", "\ufeffa"):  # Ollama would drop these
        lines, reasons = parameters_of(tiny.cached("gemma"), system=text)
        assert not any("SYSTEM" in line for line in lines), text
        assert [each["because"] for each in reasons if each["rule"] == "no SYSTEM"]
    lines, _ = parameters_of(tiny.cached("gemma"), system="Été 🎉\tà\r\n\nParis")
    assert lines[-1] == 'SYSTEM """Été 🎉\tà\r\n\nParis"""'
    lines, reasons = parameters_of(tiny.cached("gemma"), system="")
    assert [each["because"] for each in reasons if each["rule"] == "no SYSTEM"]


def test_a_heading_of_it_is_no_remark() -> None:
    """`verify` tells what differs from the export. A line of the message may begin as a remark does."""
    written = 'FROM ./a.gguf\n# a remark\nSYSTEM """Hello.\n# Rules\n\nBe "brief".\n"""\nPARAMETER stop "x"\n'
    assert edits(written.replace("# a remark", "# another\n#"), written) == []
    for new in ("# No rules", "#  Rules", "# Rules\n"):
        assert edits(written.replace("# Rules", new), written), new
