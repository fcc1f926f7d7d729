"""`verify --engine`: a file in the programs that serve it. llama_cpp.server is real; what it gets wrong is named."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import serving
import verify_rows
from command_child import Commands, Done
from skill_train.core.errors import NotInstalled
from skill_train.llama.engines.answers import ENGINES, EngineAnswer, EngineQuestion, EngineRun
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.template import Conversation
from skill_train.reference.load import load_tokenizer
from skill_train.run.verify_record import Check
from skill_train.verify.engines import check
from skill_train.verify.engines.check import check_engines, engine_versions
from skill_train.verify.engines.questions import Expected, engine_questions

pytestmark = pytest.mark.slow

SERVER = "llama_cpp.server"


@pytest.fixture(scope="module")
def made() -> gguf_maker.Export:
    return gguf_maker.exported("llama-chatml")


@pytest.fixture(scope="module")
def small() -> gguf_maker.Export:
    """Of few words, for whole verifications: four times as fast."""
    return gguf_maker.exported("gemma")


def of_engines(proof: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in proof["checks"] if check["name"].startswith("engine_")}


def verified(commands: Commands, folder: Path, file: Path, out: Path, *engines: str) -> tuple[Done, dict[str, Any]]:
    words = [word for engine in engines for word in ("--engine", engine)]
    done = commands.run(
        out.parent,
        dict(os.environ),
        *("verify", "--reference", folder, "--base", folder, "--gguf", file, "--out", out, "--tokens", 64, *words),
    )
    return done, json.loads(out.read_text()) if out.is_file() else {}


def test_a_good_file_passes_in_the_server(commands: Commands, small: gguf_maker.Export, tmp_path: Path) -> None:
    done, proof = verified(commands, small.merged, small.file("q8_0"), tmp_path / "verify.json", SERVER)
    found = of_engines(proof)
    assert set(found) == {"engine_prompts", "engine_answers", "engine_stops"}, done.stdout
    assert {check["verdict"] for check in found.values()} == {"pass"}, found
    assert all(check["figures"]["version"] == "0.3.36" for check in found.values())
    assert found["engine_prompts"]["figures"]["looked_at"] >= 5
    assert proof["options"]["engines"] == {SERVER: "0.3.36"}
    shown = [check for check in done.answer["data"]["checks"] if check["name"] == "engine_prompts"]
    assert f"{SERVER} 0.3.36" in shown[0]["detail"]
    processor = Path("/proc/cpuinfo")
    has_amx = processor.is_file() and "amx_int8" in processor.read_text()
    without = [check["detail"] for check in found.values() if "without AMX repacking" in check["detail"]]
    assert len(without) == (3 if has_amx else 0)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("missing", "llama-2's prompt"),
        pytest.param("1024 bytes", "cannot read the chat template", marks=pytest.mark.torture),
        pytest.param("other", "at character", marks=pytest.mark.torture),
        pytest.param("bos", "in front of the prompt", marks=pytest.mark.torture),
        pytest.param("refuses", "refuses a conversation", marks=pytest.mark.torture),
    ],
)
def test_a_broken_template_is_named(
    commands: Commands, small: gguf_maker.Export, tmp_path: Path, fault: str, named: str
) -> None:
    good = str(read_gguf(small.file("f16")).metadata["tokenizer.chat_template"])
    templates = {
        "missing": None,
        "other": good.replace("start_of_turn", "end_of_turn"),
        "bos": "{{- '<pad>' -}}" + good,
        "1024 bytes": good + "{#" + "x" * (1024 - len(good.encode()) - 4) + "#}",
        "refuses": good + "{{ raise_exception('never') if messages | length == 1 }}",
    }
    file = serving.templated(small.file("q8_0"), tmp_path / "model-q8_0.gguf", templates[fault])
    done, proof = verified(commands, small.merged, file, tmp_path / "verify.json", SERVER)
    assert done.code == 6 and done.answer["error"]["code"] == "verification_failed"
    prompts = of_engines(proof)["engine_prompts"]
    assert prompts["verdict"] == "fail" and named in prompts["detail"], prompts
    assert "engine_prompts" in done.answer["error"]["message"]


def test_an_engine_that_is_not_here_is_never_a_pass(
    commands: Commands, small: gguf_maker.Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("true") or "/bin/true"))
    for name in ("ollama", "llama-server"):
        with pytest.raises(NotInstalled, match="is not on PATH"):
            engine_versions((name,))
        done, proof = verified(commands, small.merged, small.file("q8_0"), tmp_path / "verify.json", name)
        assert done.error == (7, "missing_package") and proof == {}
    here = engine_versions(("all",))
    assert here == {SERVER: "0.3.36", "ollama": "", "llama-server": ""}
    done, proof = verified(commands, small.merged, small.file("q8_0"), tmp_path / "verify.json", "all")
    missing = {(each["name"], each["reason"]) for each in proof["not_checked"]}
    assert {("engine_prompts", f"{name}: not on PATH") for name in ("ollama", "llama-server")} <= missing
    assert done.code == 0 and of_engines(proof)["engine_prompts"]["figures"]["engine"] == SERVER


def test_the_conversations_are_those_that_were_held_out(made: gguf_maker.Export) -> None:
    tokenizer = load_tokenizer(made.merged)
    rows = verify_rows.chats(made.merged, 3, system="You are exact.")
    asked = engine_questions(tokenizer, rows, 8)
    for row, expected in zip(rows, asked[:3], strict=True):
        assert row["messages"][-1]["role"] == "assistant"
        assert expected.question.conversation.messages == row["messages"][:-1]
        assert row["rendered"].startswith(expected.text) and row["input_ids"][: len(expected.ids)] == expected.ids
    assert len(asked) > 6


# --- What an engine may answer, each with the verdict ---


@pytest.fixture(scope="module")
def expected(made: gguf_maker.Export) -> tuple[Any, list[Expected]]:
    tokenizer = load_tokenizer(made.merged)
    return tokenizer, engine_questions(tokenizer, [], 8)


@cache
def own_answers(file: Path) -> tuple[list[list[int]], frozenset[int]]:
    return check._own_answers(read_gguf(file), engine_questions(load_tokenizer(file.parents[1] / "merged"), [], 8))


def judged(made: gguf_maker.Export, expected: tuple[Any, list[Expected]], monkeypatch: Any, change: Any) -> Any:
    """The checks of an engine that answers as the file does, but for a change of its first answer."""
    tokenizer, asked = expected
    gguf = read_gguf(made.file("f16"))
    own, ends = own_answers(gguf.path)
    monkeypatch.setattr(check, "_own_answers", lambda gguf, asked: (own, ends))
    answers = [
        EngineAnswer(
            ids=each.ids,
            text=tokenizer.decode(ids, skip_special_tokens=True),
            stopped=ids[-1] in ends,
        )
        for each, ids in zip(asked, own, strict=True)
    ]
    answers[0] = change(answers[0], own[0], tokenizer)
    run = EngineRun("ollama", "1.2.3", answers)
    monkeypatch.setattr(check, "run_engine", lambda *_: run)
    return {each.name: each for each in check_engines([gguf], asked, ["ollama"], tokenizer, lambda *_: None)}


def _with(answer: EngineAnswer, **values: Any) -> EngineAnswer:
    return EngineAnswer(**{**vars(answer), **values})


def test_what_an_engine_may_get_wrong(made: gguf_maker.Export, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts(change: Any) -> tuple[str, ...]:
        found = judged(made, expected, monkeypatch, change)
        return tuple(found[f"engine_{name}"].verdict for name in ("prompts", "answers", "stops"))

    assert verdicts(lambda answer, ids, tokenizer: answer) == ("pass", "pass", "pass")
    assert verdicts(lambda answer, ids, tokenizer: _with(answer, ids=answer.ids[1:]))[0] == "fail"
    assert verdicts(lambda answer, ids, tokenizer: _with(answer, refused="HTTP 500"))[0] == "fail"
    assert verdicts(lambda answer, ids, tokenizer: _with(answer, text="nothing of the kind at all"))[1] == "fail"
    cut = verdicts(lambda answer, ids, tokenizer: _with(answer, text=tokenizer.decode(ids[:2]), stopped=True))
    assert cut == ("pass", "pass", "fail")
    text = verdicts(lambda answer, ids, tokenizer: _with(answer, ids=None, prompt="another prompt"))
    assert text[0] == "fail"
    same = expected[1][0].text
    counted = verdicts(lambda answer, ids, tokenizer: _with(answer, ids=None, prompt=same, prompt_tokens=3))
    assert counted[0] == "fail"
    uncounted = verdicts(lambda answer, ids, tokenizer: _with(answer, ids=None, prompt=same))  # BOS twice has this text
    assert uncounted[0] == "fail"
    right = verdicts(
        lambda answer, ids, tokenizer: _with(answer, ids=None, prompt=same, prompt_tokens=len(expected[1][0].ids))
    )
    assert right == ("pass", "pass", "pass")


def test_a_prompt_without_an_answer_is_a_fault_of_the_answers(
    made: gguf_maker.Export, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with llama-server and Ollama 0.33: HTTP 500 for an answer that their parsers do not take."""
    found = judged(made, expected, monkeypatch, lambda answer, ids, tokenizer: _with(answer, no_answer="HTTP 500: no"))
    assert found["engine_prompts"].verdict == found["engine_stops"].verdict == "pass"
    assert found["engine_answers"].verdict == "fail" and "no answer to 1: HTTP 500" in found["engine_answers"].detail
    asked = len(expected[1])
    assert [found[f"engine_{name}"].figures["looked_at"] for name in ("answers", "stops")] == [asked, asked - 1]


@pytest.mark.parametrize("kind", ["mistral", pytest.param("llama-bpe", marks=pytest.mark.torture)])
def test_another_of_two_like_tokens_is_no_fault(kind: str) -> None:
    """A tiny model's first two tokens are often equal to a thousandth of a nat. The token of another engine was taken
    from its text, and SentencePiece reads a space in front of each text: 2.5 to 6 nats."""
    made = gguf_maker.exported(kind)
    tokenizer = load_tokenizer(made.merged)
    asked, file = engine_questions(tokenizer, [], 14), read_gguf(made.file("f16"))
    found = check_engines([file], asked, [SERVER], tokenizer, lambda *_: None)
    assert {each.name: each.verdict for each in found if isinstance(each, Check)} == {
        "engine_prompts": "pass",
        "engine_answers": "pass",
        "engine_stops": "pass",
    }


def test_every_engine_has_a_remedy() -> None:
    assert set(check._REMEDY) == set(ENGINES)
    assert EngineQuestion(Conversation([], None, True), 1).most == 1
