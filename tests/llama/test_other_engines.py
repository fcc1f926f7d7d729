"""llama-server and Ollama: how they are started, asked and ended, with stand-ins that speak their protocols."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import gguf_maker
from serving import STAND_IN, put_on_path
from skill_train.llama.engines import ollama
from skill_train.llama.engines.programs import started
from skill_train.llama.gguf_header import read_gguf
from skill_train.reference.load import load_tokenizer
from skill_train.run.verify_record import Check
from skill_train.verify.engines.check import check_engines, engine_versions
from skill_train.verify.engines.questions import engine_questions

pytestmark = pytest.mark.slow


REAL = shutil.which("llama-server")
REAL_OLLAMA = shutil.which("ollama")


@pytest.fixture(autouse=True)
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


def checked(name: str, file: Path | None = None, *, kind: str = "gemma") -> dict[str, Check]:
    made = gguf_maker.exported(kind)
    tokenizer = load_tokenizer(made.merged)
    gguf, asked = read_gguf(file or made.file("f16")), engine_questions(tokenizer, [], 6)
    found = check_engines([gguf], asked, [name], tokenizer, lambda *_: None)
    return {check.name.removeprefix("engine_"): check for check in found if isinstance(check, Check)}


def stand_ins_left() -> list[list[str]]:
    commands = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended; if nobody has waited for it yet, it is still listed
            commands.append(child.cmdline())
    return [command for command in commands if str(STAND_IN) in " ".join(command)]


@pytest.mark.parametrize("name", ["ollama", "llama-server"])
def test_an_engine_is_asked_and_ended(name: str) -> None:
    assert "stand-in" in engine_versions((name,))[name]
    found = checked(name)
    assert [found[each].verdict for each in ("prompts", "answers", "stops")] == ["pass"] * 3, found
    assert all("stand-in" in str(check.figures["version"]) for check in found.values())
    assert stand_ins_left() == []


def test_stop_words_that_are_no_token_are_left_out_of_the_question(tmp_path: Path) -> None:
    """Those of `stop_strings`: llama.cpp's own answer does not end there, so a right Ollama would fail."""
    file = Path(shutil.copy(gguf_maker.exported("llama-chatml").file("f16"), tmp_path / "a.gguf"))
    lines = ['PARAMETER stop "<|im_end|>"', 'PARAMETER stop "User: "', "PARAMETER num_ctx 64"]
    (tmp_path / "Modelfile").write_text("\n".join(["FROM ./other.gguf", *lines]) + "\n")
    assert ollama._modelfile(file, None).splitlines() == [f"FROM {file}", lines[0], lines[2]]


def test_a_modelfile_in_another_encoding_is_handed_over(tmp_path: Path) -> None:
    """It may be anybody's. Its bytes stay; only its FROM is another."""
    made = gguf_maker.exported("gemma").file("f16")
    file = Path(shutil.copy(made, tmp_path / made.name))
    (tmp_path / "Modelfile").write_bytes(b"FROM ./other.gguf\nSYSTEM caf\xe9\n")
    run = ollama.ask(file, [], context_tokens=64)
    assert (run.engine, run.answers) == ("ollama", [])


@pytest.mark.parametrize("name", ["ollama", "llama-server"])
def test_what_an_engine_gets_wrong_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STAND_IN_FAULT", "chatml")
    found = checked(name)
    assert found["prompts"].verdict == "fail" and "it writes" in found["prompts"].detail
    if name == "ollama":
        assert "nearest of its own templates" in found["prompts"].detail
    monkeypatch.setenv("TEST_STAND_IN_FAULT", "ends")
    found = checked(name)
    assert found["prompts"].verdict == "pass"
    assert "fail" in {found["answers"].verdict, found["stops"].verdict}


@pytest.mark.parametrize("name", ["ollama", "llama-server"])
def test_an_engine_that_gives_no_answer_has_written_the_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STAND_IN_FAULT", "silent")
    found = checked(name)
    assert [*found] == ["prompts", "answers"]
    assert found["prompts"].verdict == "pass"
    assert found["answers"].verdict == "fail" and "gives no answer to" in found["answers"].detail


@pytest.mark.parametrize("name", ["ollama", "llama-server"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [("odd", "an answer of another form"), ("dies", "does not serve the file: {} ended while it was")],
)
def test_an_engine_that_answers_otherwise_or_ends_is_a_failed_check(
    name: str, fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_STAND_IN_FAULT", fault)
    prompts = checked(name)["prompts"]
    assert prompts.verdict == "fail" and says.format(name) in prompts.detail
    assert stand_ins_left() == []


def test_ollama_gets_the_file_of_a_relative_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with Ollama 0.9.3: it took run/gguf/NAME for a model's name, and asked the host `run` for it."""
    folder = gguf_maker.exported("gemma").file("f16").parent
    monkeypatch.chdir(folder.parent)
    assert checked("ollama", Path(folder.name) / "model-f16.gguf")["prompts"].verdict == "pass"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("old", "ollama cannot be asked: this Ollama does not show the prompts that it makes; it takes Ollama 0.11.5"),
        ("crash", "ollama does not serve the file: Ollama crashes on the file (HTTP 500"),
    ],
)
def test_an_ollama_that_cannot_be_judged_says_nothing_of_the_template(
    fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with Ollama 0.5.4, which ended `verify` with a KeyError, and with 0.9.3 without its GPU."""
    monkeypatch.setenv("TEST_STAND_IN_FAULT", fault)
    found = checked("ollama")
    assert [*found] == ["prompts"] and found["prompts"].verdict == "fail"
    assert says in found["prompts"].detail and "template" not in found["prompts"].detail


@pytest.mark.skipif(REAL is None, reason="llama-server is not on PATH")
def test_the_real_llama_server_writes_the_models_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(str(REAL)).parent), prepend=os.pathsep)
    found = checked("llama-server", kind="llama-chatml")
    assert [found[each].verdict for each in ("prompts", "answers", "stops")] == ["pass"] * 3, found
    assert "stand-in" not in str(found["prompts"].figures["version"])


@pytest.mark.skipif(REAL_OLLAMA is None, reason="ollama is not on PATH")
@pytest.mark.parametrize("kind", ["qwen2", "llama-spm", "gemma"])
def test_the_real_ollama_writes_the_models_own_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with 0.33.0-rc2, built from its source of 2026-08-21, on 2026-11-27."""
    monkeypatch.setenv("PATH", str(Path(str(REAL_OLLAMA)).parent), prepend=os.pathsep)
    found = checked("ollama", kind=kind)
    assert [found[each].verdict for each in ("prompts", "answers", "stops")] == ["pass"] * 3, found


@pytest.mark.skipif(REAL_OLLAMA is None, reason="ollama is not on PATH")
def test_the_real_ollama_takes_another_template_for_one_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(str(REAL_OLLAMA)).parent), prepend=os.pathsep)
    found = checked("ollama", kind="phi3")
    assert found["prompts"].verdict == "fail" and "it writes '<|im_start|>" in found["prompts"].detail


def test_an_engine_that_ends_at_once_is_an_error_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "llama-server").write_text("#!/bin/sh\nexit 3\n")
    (prompts,) = checked("llama-server").values()
    assert prompts.verdict == "fail" and "does not serve the file" in prompts.detail


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    with started(["sh", "-c", "sleep 60 & sleep 60"], {}, tmp_path / "log.txt") as process:
        children = psutil.Process(process.pid).children()
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
