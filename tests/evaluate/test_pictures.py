"""Rows with pictures: losses and answers against the model's own, and what cannot be asked says so."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import picture_pairs
import tiny_vision
import training
from skill_train.core.errors import UsageError
from skill_train.evaluate.backends import Model, Replies, ask_pair, ask_transformers, backend_of
from skill_train.evaluate.pictures import require_pictures
from skill_train.evaluate.step import ROOM, questions
from skill_train.program.encode import Encoder
from skill_train.program.main import keep_pictures
from skill_train.program.pictures.tokens import Pictures
from skill_train.program.tokenizer import load_tokenizer
from skill_train.run.evaluate_record import can_be_asked
from skill_train.run.train_record import Row

pytestmark = pytest.mark.slow

SIZES = ((112, 112), (140, 84))
ANSWERS = ("A red square, and a blue one.", "Nothing that I know.")


@cache
def held_out(kind: str, folder: Path, preprocess: str = "model") -> list[Row]:
    """Two rows with a picture, as the training program writes them to the run, and one of text."""
    data = folder / "data"
    data.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, (size, answer) in enumerate(zip(SIZES, ANSWERS, strict=True)):
        picture_pairs.picture(*size, seed=number).save(data / f"{number}.png")
        rows.append({"images": [f"{number}.png"], "messages": _turns("What is it?", answer)})
    rows.append({"images": [], "messages": _turns("What is a square?", "Four equal sides.")})
    base, run = tiny_vision.cached(kind), folder / "run"
    run.mkdir()
    recipe = training.resolved(
        base, training.write_data(data, rows), images=True, max_length=2048, preprocess=preprocess
    )
    tokenizer = load_tokenizer(str(base), None)
    pictures = Pictures(recipe, tokenizer, data)
    encode = Encoder(recipe, tokenizer, pictures)
    encoded = [encode(number, number + 1, row) for number, row in enumerate(rows)]
    kept = keep_pictures(encoded, pictures, run)
    found: list[Row] = json.loads(json.dumps(kept))
    return found


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def asked(kind: str, here: Path, ask: Any, **values: Any) -> tuple[list[Row], Replies]:
    folder, base = here / kind, tiny_vision.cached(kind)
    rows = held_out(kind, folder)
    model = Model("tuned", base, pictures=picture_pairs.read_by(base, folder / "run"))
    model = Model(**{**vars(model), **values})
    return rows, ask(model, questions(rows, loss_on="assistant", room=ROOM, context=None), lambda _: None)


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_losses_and_answers_are_the_models_own(kind: str, here: Path) -> None:
    """The loss that the model itself computes from labels, and one whole pass for each token of an answer."""
    import torch
    from transformers import AutoModelForImageTextToText

    rows, replies = asked(kind, here, ask_transformers)
    base = tiny_vision.cached(kind)
    network = AutoModelForImageTextToText.from_pretrained(str(base), dtype=torch.float32).eval()
    seen = Pictures({"model": str(base), "revision": None}, load_tokenizer(str(base), None), here / kind / "run")
    for row, loss, answer in zip(rows, replies.losses, replies.answers, strict=True):
        ids, tensors = torch.tensor([row["input_ids"]]), seen.tensors([seen.read(row)])
        with torch.no_grad():
            labels = torch.tensor([row["labels"]])
            own = network(input_ids=ids, labels=labels, **tensors, **seen.token_types(ids)).loss
            assert loss == pytest.approx(float(own) * int((labels != -100).sum()), rel=1e-4)
            prompt = ids[:, : row["labels"].index(next(label for label in row["labels"] if label != -100))]
            for token in answer[:6]:
                logits = network(input_ids=prompt, use_cache=False, **tensors, **seen.token_types(prompt)).logits
                assert int(logits[0, -1].argmax()) == token
                prompt = torch.cat([prompt, torch.tensor([[token]])], dim=1)


def test_a_pair_answers_as_the_model_where_it_resizes_alike(here: Path) -> None:
    """A picture of whole patches is copied by both; Qwen's server text is that of the training. Without the picture the
    loss is another one."""
    pair = picture_pairs.pair("qwen3-vl")
    _, own = asked("qwen3-vl", here, ask_transformers)
    _, replies = asked("qwen3-vl", here, ask_pair, path=pair.text, projector=pair.projector)
    first, of_text = own.losses[0], own.losses[2]
    assert replies.backend == "llama.cpp" and first is not None and of_text is not None
    assert replies.losses[0] == pytest.approx(first, rel=2e-3)
    assert replies.losses[2] == pytest.approx(of_text, rel=2e-3)
    assert replies.answers[0] == own.answers[0] and replies.answers[2] == own.answers[2]


def test_a_pair_answers_rows_of_which_none_has_a_picture(here: Path) -> None:
    pair, rows = picture_pairs.pair("qwen3-vl"), held_out("qwen3-vl", here / "qwen3-vl")
    seen = picture_pairs.read_by(tiny_vision.cached("qwen3-vl"), here / "qwen3-vl" / "run")
    model = Model("f16", pair.text, pictures=seen, projector=pair.projector)
    asks = questions(rows, loss_on="assistant", room=ROOM, context=None)
    of_all, of_text = (ask_pair(model, some, lambda _: None) for some in (asks, asks[2:]))
    assert (of_text.losses, of_text.answers) == (of_all.losses[2:], of_all.answers[2:])


def test_a_pair_answers_as_the_model_that_was_trained_on_its_pixels(here: Path) -> None:
    """A wide picture of Gemma 3, amid borders and without the blank lines around it. The pixels of the model's own
    processor, which are as many, give another loss."""
    folder, base, pair = here / "engine", tiny_vision.cached("gemma3"), picture_pairs.pair("gemma3")
    rows = held_out("gemma3", folder, "engine")
    asks = questions(rows, loss_on="assistant", room=ROOM, context=None)
    seen = picture_pairs.read_by(base, folder / "run", "engine")
    own = ask_transformers(Model("tuned", base, pictures=seen), asks, lambda _: None)
    shipped = ask_pair(Model("f16", pair.text, pictures=seen, projector=pair.projector), asks, lambda _: None)
    assert shipped.losses == pytest.approx(own.losses, rel=1e-3) and shipped.answers == own.answers
    stretched = picture_pairs.read_by(base, folder / "run")
    other = ask_transformers(Model("tuned", base, pictures=stretched), asks, lambda _: None)
    assert other.losses[1] != pytest.approx(own.losses[1], rel=1e-2)


def test_a_file_without_its_projector_is_not_asked(here: Path) -> None:
    """It would answer the words alone, and get a score for that."""
    pair = picture_pairs.pair("qwen3-vl")
    _, replies = asked("qwen3-vl", here, ask_pair, path=pair.text)
    assert replies.losses == [] and "no projector" in replies.reason


def test_another_prompt_than_that_of_the_training_is_not_asked(here: Path) -> None:
    pair, rows = picture_pairs.pair("qwen3-vl"), held_out("qwen3-vl", here / "qwen3-vl")
    run = here / "qwen3-vl" / "run"
    changed = [row | {"messages": _turns("Another question?", ANSWERS[0])} for row in rows[:1]]
    about = [message | {"content": "\ufffc" + message["content"]} for message in changed[0]["messages"][:1]]
    changed[0]["messages"][:1] = about
    model = Model(
        "f16", pair.text, pictures=picture_pairs.read_by(tiny_vision.cached("qwen3-vl"), run), projector=pair.projector
    )
    asks = questions(changed, loss_on="assistant", room=ROOM, context=None)
    assert "chat template" in ask_pair(model, asks, lambda _: None).reason


def test_a_changed_or_missing_picture_is_refused(here: Path) -> None:
    rows, run = held_out("qwen3-vl", here / "qwen3-vl"), here / "qwen3-vl" / "run"
    require_pictures(rows, run)
    file = run / str(rows[0]["images"][0])
    whole = file.read_bytes()
    try:
        Image.new("RGB", SIZES[0]).save(file)
        with pytest.raises(UsageError, match="was changed") as changed:
            require_pictures(rows, run)
        file.unlink()
        with pytest.raises(UsageError) as missing:
            require_pictures(rows, run)
    finally:
        file.write_bytes(whole)
    assert (changed.value.code, missing.value.code) == ("bad_picture", "missing_file")


def test_rows_that_ask_nothing_about_their_pictures_are_left_out(here: Path) -> None:
    seen, _, text = held_out("qwen3-vl", here / "qwen3-vl")
    cut: Row = {**seen, "truncated": True}
    assert [can_be_asked(row, "assistant") for row in (seen, cut, text)] == [True, False, True]
    assert [can_be_asked(row, "all") for row in (seen, text)] == [False, True]


def test_vllm_is_not_asked_about_pictures(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skill_train.evaluate import backends

    base = tiny_vision.cached("qwen3-vl")
    model = Model("tuned", base, pictures=picture_pairs.read_by(base, here))
    monkeypatch.setattr(backends, "_has_vllm", lambda: True)
    monkeypatch.setattr(backends, "_has_cuda", lambda: True)
    assert backend_of(model, "auto") == (ask_transformers, "rows with pictures")
    with pytest.raises(UsageError) as refused:
        backend_of(model, "vllm")
    assert refused.value.code == "vision"
