"""Pairs in engines: pictures as llama-server and Ollama show them, with stand-ins that speak their protocols."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import picture_pairs
import tiny_vision
from command_child import Commands
from serving import put_on_path
from skill_train.llama.engines import llama_server, ollama
from skill_train.llama.engines.answers import EngineQuestion, messages_of
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.pictures.compare import Pair
from skill_train.llama.template import Conversation
from skill_train.reference.load import load_tokenizer
from skill_train.reference.pictures import PictureQuestion
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import Findings
from skill_train.verify.engines.judge import InEngines, judge_in_engines
from skill_train.verify.engines.pictures import check_pair_in_engines, picture_questions
from skill_train.verify.questions import questions_of
from skill_train.verify.sample_texts import Sample

pytestmark = pytest.mark.slow

REAL, REAL_OLLAMA = shutil.which("llama-server"), shutil.which("ollama")
SIZES = ((60, 40), (40, 90), (64, 64))


@pytest.fixture(autouse=True)
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


def question(
    *pictures: object, behind: bool = False, words: str = "What is the colour of the sky here?"
) -> PictureQuestion:
    shown, text = [{"type": "image"} for _ in pictures], [{"type": "text", "text": words}]
    asked = {"role": "user", "content": text + shown if behind else shown + text}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]}
    return PictureQuestion([asked, answer], list(pictures))


def questions(behind: bool = False) -> list[PictureQuestion]:
    return [question(picture_pairs.picture(*size, seed=size[0]), behind=behind) for size in SIZES]


def findings(
    engine: str, asked: list[PictureQuestion], kind: str = "gemma3", pair: Pair | None = None
) -> list[Finding]:
    tokenizer = load_tokenizer(tiny_vision.cached(kind))
    expected = picture_questions(tokenizer, asked, 6)
    return check_pair_in_engines(pair or picture_pairs.pair(kind), expected, [engine], tokenizer, lambda *_: None)


def checked(engine: str, asked: list[PictureQuestion], kind: str = "gemma3") -> Check | NotChecked:
    (found,) = findings(engine, asked, kind)
    assert (found.name, found.file) == ("engine_pictures", "model-f16.gguf")
    return found


def named(engine: str, asked: list[PictureQuestion], kind: str = "gemma3") -> Check:
    found = checked(engine, asked, kind)
    assert isinstance(found, Check), found
    return found


@pytest.mark.parametrize(("engine", "behind"), [("llama-server", False), ("llama-server", True), ("ollama", True)])
def test_an_engine_that_shows_the_pictures_as_trained_passes(engine: str, behind: bool) -> None:
    found = named(engine, questions(behind))
    assert (found.verdict, found.figures["looked_at"]) == ("pass", 3), found
    assert int(str(found.figures["by_picture"])) > 0 and "stand-in" in str(found.figures["version"])


def test_ollama_puts_pictures_behind_the_words() -> None:
    """As 0.33.0-rc2 does: the rows of the training have them in front."""
    found = named("ollama", questions())
    assert (found.verdict, found.figure) == ("fail", 3)
    assert "puts a picture in another place" in found.detail and "train on what Ollama shows" in found.detail


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("blind", "it leaves out a picture"),
        ("grey", "the pair prefers its own token by"),
        ("larger", "tokens in a prompt that has"),
        ("silent", "gives no answer to 3 of 3 questions about pictures: HTTP 500"),
    ],
)
def test_what_an_engine_shows_otherwise_is_named(fault: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`larger` is what Ollama does to pictures of Qwen-VL: the same picture, of more tokens."""
    monkeypatch.setenv("TEST_STAND_IN_FAULT", fault)
    found = named("llama-server", questions(), "qwen2-vl" if fault == "larger" else "gemma3")
    assert found.verdict == "fail" and says in found.detail, found


def test_two_pictures_of_one_message_keep_their_order() -> None:
    first, second = (picture_pairs.picture(64, 64, seed=seed) for seed in (1, 2))
    assert named("llama-server", [question(first, second)]).verdict == "pass"
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "why?"}]},
    ]
    asked = EngineQuestion(Conversation(messages, None, True), 1, (b"one", b"two"))
    shown = messages_of(asked, llama_server._message)[0]["content"]
    assert [part.get("image_url", {}).get("url", "-") for part in shown] == [
        "data:image/png;base64,b25l",
        "-",
        "data:image/png;base64,dHdv",
    ]
    assert messages_of(asked, ollama._message)[::2] == [
        {"role": "user", "content": "or", "images": ["b25l", "dHdv"]},
        {"role": "user", "content": "why?"},
    ]


def test_pictures_that_change_no_answer_prove_nothing() -> None:
    """An engine that shows another picture of the same size would pass."""
    grey = _grey()
    found = checked("llama-server", [question(grey)])
    assert (
        isinstance(found, NotChecked)
        and "grey pictures would change the choice of a token by 0 nats only" in found.reason
    )


def _grey() -> object:
    from PIL import Image

    return Image.new("RGB", (64, 64), (127, 127, 127))


def test_only_what_stands_before_the_last_answer_is_asked() -> None:
    one, two = (picture_pairs.picture(64, 64, seed=seed) for seed in (1, 2))
    turns = [*question(one).messages, *question(two, words="And here?").messages]
    tokenizer = load_tokenizer(tiny_vision.cached("gemma3"))
    (asked,) = picture_questions(tokenizer, [PictureQuestion(turns, [one, two])], 6)
    assert len(asked.question.pictures) == 2 and len(asked.question.conversation.messages) == 3
    assert asked.text.count("<__media__>") == 2 and asked.text.endswith("<start_of_turn>model\n")
    assert picture_questions(tokenizer, [PictureQuestion(turns[:1], [one])], 6) == []


def test_the_pythons_server_is_not_judged() -> None:
    found = checked("llama_cpp.server", questions())
    assert isinstance(found, NotChecked) and "handlers of its own" in found.reason


def test_a_pair_that_llama_cpp_cannot_run_is_not_judged(tmp_path: Path) -> None:
    pair = picture_pairs.pair("gemma3")
    broken = tmp_path / "mmproj.gguf"
    broken.write_bytes(pair.projector.read_bytes()[:4000])
    (found,) = findings("ollama", questions(), pair=Pair(pair.text, broken))
    assert isinstance(found, NotChecked) and "llama.cpp cannot run the pair" in found.reason


def test_each_pair_is_judged_in_each_engine_that_is_here() -> None:
    """The texts are asked too, and of an engine that is not here it is said once."""
    pair = picture_pairs.pair("gemma3")
    asked = questions_of(
        tiny_vision.cached("gemma3"), adapter=None, rows=[], held_out=[], sample=Sample(answer_tokens=6)
    )
    engines, texts, projectors = (
        {"llama-server": "1", "ollama": ""},
        [read_gguf(pair.text)],
        [read_gguf(pair.projector)],
    )
    found = {}
    for pictures in (questions(), []):
        findings = Findings()
        request = InEngines(engines, asked, [], texts, projectors, pictures)
        judge_in_engines(request, findings, lambda *_: None)
        found[bool(pictures)] = {check.name: check.verdict for check in findings.checks}
        whys = [(each.name, each.file, each.reason) for each in findings.not_checked]
        unjudged = "llama-server: the pair was not judged, so there is nothing to hold an engine to"
        assert whys == [
            ("engine_prompts", "every file", "ollama: not on PATH"),
            *([] if pictures else [("engine_pictures", "model-f16.gguf", unjudged)]),
        ]
    assert found[False] == dict.fromkeys(("engine_prompts", "engine_answers", "engine_stops"), "pass")
    assert found[True] == found[False] | {"engine_pictures": "pass"}


def test_an_engine_that_ends_at_once_fails(tmp_path: Path) -> None:
    (tmp_path / "llama-server").write_text("#!/bin/sh\nexit 3\n")
    found = named("llama-server", questions())
    assert found.verdict == "fail" and "does not serve the file" in found.detail


def test_verify_judges_the_pair_in_the_engine(commands: Commands, tmp_path: Path) -> None:
    folder, pair, out = tiny_vision.cached("gemma3"), picture_pairs.pair("gemma3"), tmp_path / "verify.json"
    files = ("--gguf", pair.text, "--gguf", pair.projector)
    words = ("verify", "--reference", folder, *files, "--out", out, "--tokens", 64, "--engine", "llama-server")
    done = commands.run(tmp_path, dict(os.environ), *words)
    found = [each for each in json.loads(out.read_text())["checks"] if each["name"] == "engine_pictures"]
    assert [(each["file"], each["verdict"]) for each in found] == [(pair.text.name, "pass")], done.stdout
    assert found[0]["figures"]["looked_at"] == 2


@pytest.mark.skipif(REAL is None, reason="llama-server is not on PATH")
@pytest.mark.parametrize("kind", ["qwen2-vl", "gemma3"])
def test_the_real_llama_server_shows_pictures_as_here(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on 2026-11-27 with b10454, which makes other pixels of SmolVLM's pictures than llama-cpp-python 0.3.36 does,
    and with one of 0.3.36's sources, which answers as here in all families."""
    monkeypatch.setenv("PATH", str(Path(str(REAL)).parent), prepend=os.pathsep)
    assert named("llama-server", questions(), kind).verdict == "pass"


@pytest.mark.skipif(REAL_OLLAMA is None, reason="ollama is not on PATH")
@pytest.mark.parametrize(
    ("kind", "behind", "says"),
    [
        ("gemma3", True, "like it"),
        ("gemma3", False, "puts a picture in another place"),
        ("qwen2-vl", True, "tokens in a prompt that has"),
    ],
)
def test_what_the_real_ollama_shows(kind: str, behind: bool, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with 0.33.0-rc2, built from its source of 2026-08-21, on 2026-11-27."""
    monkeypatch.setenv("PATH", str(Path(str(REAL_OLLAMA)).parent), prepend=os.pathsep)
    found = named("ollama", questions(behind), kind)
    assert says in found.detail and (found.verdict == "pass") == (says == "like it"), found
