"""`chat --image`: a pair of files and a model folder answer about a picture as `evaluate` asks them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import picture_pairs
import tiny_vision
from skill_train.commands import chat as chat_command
from skill_train.commands.chat import ChatOptions, _Speaker, chat
from skill_train.core.console import Console
from skill_train.core.errors import UsageError
from skill_train.evaluate.backends import Model
from skill_train.evaluate.backends import Question as Row
from skill_train.evaluate.chat.answering import Settings, answering
from skill_train.evaluate.pictures import PictureTurns, server_prompt
from skill_train.llama.pictures.answers_worker import PairQuestion, ask
from skill_train.llama.pictures.compare import MARKER
from skill_train.llama.sampling import Sampling
from skill_train.program.pictures.decode import picture_digest, picture_size
from skill_train.reference.load import load_tokenizer
from skill_train.reference.pictures import with_markers

pytestmark = pytest.mark.slow

KIND, MOST = "qwen2-vl", 6
run = inspect.unwrap(chat.callback)
QUESTION = "What is the colour of the sky here?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("pictures")
    for number in (1, 2):
        picture_pairs.picture(112, 84, seed=number).save(here / f"{number}.png")
    return here


def turns(folder: Path, *images: str) -> PictureTurns:
    parts: list[Any] = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    digests = [picture_digest(image, folder) for image in images]
    return PictureTurns([{"role": "user", "content": parts}], None, list(images), digests)


def chatted(file: Path, *images: Path, **options: Any) -> dict[str, Any]:
    asked = ChatOptions(file, prompt=QUESTION, image=images, max_tokens=MOST, **options)
    data: Any = run(asked, Console("json", "chat")).data
    answer: dict[str, Any] = data["answers"][0]
    return answer


def test_a_pair_answers_as_evaluate_asks_it(folder: Path) -> None:
    pair = picture_pairs.pair(KIND)
    base = tiny_vision.cached(KIND)
    found = []
    for name in ("1.png", "2.png"):
        text = server_prompt(load_tokenizer(base), turns(folder, name), MARKER)
        ids = ask(pair, [PairQuestion(text, [name], [0], MOST)], folder=folder, threads=2).answers[0]
        expected = load_tokenizer(base).decode(ids, skip_special_tokens=True)
        answer = chatted(pair.text, folder / name, mmproj=pair.projector)
        assert answer["answer"] == expected
        assert answer["prompt_tokens"] > 20  # with those of the picture
        found.append(answer["answer"])
    assert found[0] != found[1]  # it sees the picture


def test_a_text_is_continued_as_it_stands(folder: Path) -> None:
    """By hand: the ids of the text alone, with those of the picture before them."""
    pair, base = picture_pairs.pair(KIND), tiny_vision.cached(KIND)
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    ids = list(load_tokenizer(base)(QUESTION)["input_ids"])
    settings = Settings(sampling=Sampling(), most=MOST, context=4096, raw=True, tokenizer_of=base)
    for path in (pair.text, base):
        model = Model("m", path, pictures=picture_pairs.read_by(base, folder))
        with answering(model, settings) as loaded:
            assert loaded.answer(asked, [], lambda _: None).answer.prompt_ids == ids
    assert chatted(pair.text, raw=True)["prompt_tokens"] == len(ids)
    seen = chatted(pair.text, folder / "1.png", mmproj=pair.projector, raw=True)
    assert seen["prompt_tokens"] - len(ids) == 14  # 4 x 3 of 28 x 28 pixels, between two marks


def test_the_picture_stands_before_the_first_text_alone(folder: Path) -> None:
    """A model that continues text has no turns before the second one, and so no picture."""
    pair, base = picture_pairs.pair(KIND), tiny_vision.cached(KIND)
    ids = list(load_tokenizer(base)(QUESTION)["input_ids"])
    settings = Settings(sampling=Sampling(), most=MOST, context=4096, raw=True, tokenizer_of=base)
    for path, own in ((pair.text, 14), (base, 12)):  # llama.cpp writes the marks around a picture too
        model = Model(
            "m", path, pictures=picture_pairs.read_by(base, folder), projector=pair.projector if own == 14 else None
        )
        with answering(model, settings) as loaded:
            speaker = _Speaker("m", loaded, settings, "", True, [])
            tokens = [speaker.ask(QUESTION, ["1.png"], lambda _: None).answer.prompt_tokens for _ in range(2)]
        assert tokens == [own + len(ids), len(ids)]


def test_pictures_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Also where the name that one would get is that of another: the model would be asked about another picture."""
    images = [tmp_path / name for name in ("2-a.png", "a.png", "below/a.png")]
    for number, image in enumerate(images):
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(bytes([number]))
    (copies := tmp_path / "copies").mkdir()
    names = chat_command._copied_images(tuple(images), copies)
    assert [(copies / name).read_bytes() for name in names] == [b"\0", b"\1", b"\2"]


def test_what_reads_no_picture_says_so(folder: Path) -> None:
    pair = picture_pairs.pair(KIND)
    with pytest.raises(UsageError, match="no projector") as caught:
        chatted(pair.text, folder / "1.png")
    assert caught.value.code == "vision" and f"--mmproj {pair.projector}" in caught.value.hint
    broken = folder / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(UsageError) as caught:
        chatted(pair.text, broken, mmproj=pair.projector)
    assert caught.value.code == "bad_picture" and caught.value.message.startswith("broken.png")


@pytest.mark.parametrize("preprocess", ["model", "engine"])
def test_a_folder_answers_as_evaluate_asks_it(folder: Path, preprocess: str) -> None:
    from skill_train.evaluate.backends import ask_transformers

    base = tiny_vision.cached(KIND)
    pictures = picture_pairs.read_by(base, folder, preprocess)
    model = Model("base", base, pictures=pictures)
    tokenizer = load_tokenizer(base)
    asked = turns(folder, "1.png")
    seen = pictures.read_by(tokenizer)
    messages = asked.messages if preprocess == "model" else with_markers(asked.messages, seen.mark)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    fed, _ = seen.expanded(text, [picture_size("1.png", folder)])
    ids = tokenizer(fed, add_special_tokens=False).input_ids
    row = Row([*ids, 5], [len(ids)], ids, [5], MOST, asked)
    expected = ask_transformers(model, [row], lambda _: None).answers[0]
    settings = Settings(sampling=Sampling(), most=MOST, context=4096, raw=False, tokenizer_of=base)
    pieces: list[str] = []
    with answering(model, settings) as loaded:
        said = loaded.answer(asked.messages, ["1.png"], pieces.append)
    assert said.answer.prompt_ids == ids
    assert said.answer.text == "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("preprocess", "mark"), [("model", "<|image_pad|>"), ("engine", "<|image_pad|>"), ("engine", "\ufffc")]
)
def test_a_folder_takes_no_text_with_a_mark_of_a_picture(folder: Path, preprocess: str, mark: str) -> None:
    """The model would look for a picture that is not there."""
    base = tiny_vision.cached(KIND)
    model = Model("base", base, pictures=picture_pairs.read_by(base, folder, preprocess))
    settings = Settings(sampling=Sampling(), most=MOST, context=4096, raw=False, tokenizer_of=base)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"What is {mark}?"}]}]
    with answering(model, settings) as loaded, pytest.raises(UsageError, match="stands for a picture") as caught:
        loaded.answer(asked, ["1.png"], lambda _: None)
    assert (caught.value.code, caught.value.got) == ("bad_usage", mark)


def test_a_pair_takes_no_text_with_llama_cpps_mark_of_a_picture(folder: Path) -> None:
    pair = picture_pairs.pair(KIND)
    asked = ChatOptions(pair.text, prompt=f"What is {MARKER}?", image=(folder / "1.png",), mmproj=pair.projector)
    with pytest.raises(UsageError, match="stands for a picture") as caught:
        run(asked, Console("json", "chat"))
    assert caught.value.code == "bad_usage"
