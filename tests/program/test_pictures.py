"""Pictures as the training program reads them: decoded as other readers decode them, and written into a text as the
processors of transformers write them."""

from __future__ import annotations

import base64
import importlib
import io
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import tiny_vision
from picture_bytes import encoded, header
from skill_train.program.events import Refused
from skill_train.program.examples import to_example
from skill_train.program.pictures.decode import PictureSize, picture_digest, picture_size, read_picture
from skill_train.program.pictures.in_rows import PICTURE, lift_pictures, picture_parts, source_of_part
from skill_train.program.pictures.tokens import Pictures

RED, GREEN = (255, 0, 0), (0, 128, 0)


def _two(mode: str = "RGB") -> Image.Image:
    """Red on the left, green on the right."""
    image = Image.new("RGB", (40, 30), RED)
    image.paste(GREEN, (20, 0, 40, 30))
    return image.convert("P", palette=Image.Palette.ADAPTIVE) if mode == "P" else image.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
def test_modes_give_the_same_colours(mode: str) -> None:
    image = read_picture(encoded(_two(mode), "TIFF" if mode == "CMYK" else "PNG"), None)
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert (image.getpixel((5, 5)), image.getpixel((35, 5))) == (RED, GREEN)


@pytest.mark.parametrize(("mode", "value", "grey"), [("L", 200, 200), ("LA", (200, 255), 200), ("I;16", 51200, 200)])
def test_grey(mode: str, value: Any, grey: int) -> None:
    """16-bit grey: Pillow's own conversion would make every value above 255 white."""
    assert read_picture(encoded(Image.new(mode, (4, 4), value)), None).getpixel((1, 1)) == (grey,) * 3


def test_what_is_transparent_is_white() -> None:
    image = _two("RGBA")
    image.putalpha(Image.new("L", (40, 30), 0))
    assert read_picture(encoded(image), None).getpixel((5, 5)) == (255, 255, 255)
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert read_picture(encoded(half), None).getpixel((0, 0)) == (127, 127, 127)
    palette = _two("P")
    palette.info["transparency"] = palette.getpixel((5, 5))
    assert read_picture(encoded(palette, "GIF"), None).getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01" * 20,  # tags that are not there
        b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x12\0\x03\0\0\0\x01\0\x06",  # one tag of two, cut in it
        b"Exif\0\0garbage",
    ],
)
def test_a_broken_exif_is_upright_and_says_nothing(exif: bytes) -> None:
    """Pillow warns of it for each picture."""
    content = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(content, "JPEG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_picture({"bytes": content.getvalue(), "path": "x.jpg"}, None).size == (40, 30)
        assert picture_size(content.getvalue(), None) == PictureSize(40, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_it_upright(orientation: int) -> None:
    """The EXIF standard: 6 is what a telephone that is held upright writes: the first row is the right side."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(_two(), "JPEG", exif=exif, quality=100, subsampling=0)
    image = read_picture(content, None)
    assert image.size == ((40, 30) if orientation < 5 else (30, 40)) == tuple(picture_size(content, None))
    red = {1: (3, 15), 2: (36, 15), 3: (36, 15), 4: (3, 15), 5: (15, 3), 6: (15, 3), 7: (15, 36), 8: (15, 36)}
    assert image.getpixel(red[orientation])[0] > 240


def test_sources_of_one_picture(tmp_path: Path) -> None:
    content = encoded(_two())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    sources = ["in/a.png", uri, content, {"bytes": content, "path": "x.png"}, {"bytes": None, "path": "in/a.png"}]
    assert len({picture_digest(source, tmp_path) for source in sources}) == 1
    assert {read_picture(source, tmp_path).tobytes() for source in sources} == {_two().tobytes()}


def _frames(kind: str) -> bytes:
    return encoded(_two(), kind, save_all=True, append_images=[Image.new("RGB", (40, 30))])


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (b"", "is empty"),
        (b"hello, I am text", "is not a picture"),
        (encoded(_two(), "EPS"), "is not a picture"),
        (encoded(_two())[:-40], "is broken"),
        (encoded(_two(), "JPEG")[:-20], "is broken"),
        (header(60_000, 60_000), "has too many pixels"),
        (header(12_000, 12_000), "has too many pixels"),
        (header(2010, 10), "is too narrow"),
        (_frames("GIF"), "is animated"),
        (_frames("WEBP"), "is animated"),
        (_frames("TIFF"), "is animated"),
        (encoded(Image.new("I", (4, 4), 70_000), "TIFF"), "has the colour mode I"),
        ("data:image/png,abc", "is not base64"),
        ("data:image/png;base64,a$c", "is not base64"),
        ({"bytes": None, "path": None}, "has neither bytes nor a path"),
        ("https://example.org/a.png", "is an address"),
        ("missing.png", "does not exist"),
        ("../outside.png", "lies outside"),
        ("/etc/hostname", "lies outside"),
        ("link.png", "lies outside"),
        ("folder", "does not exist"),
        ("a\0b.png", "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refused_with_its_fault(source: Any, fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(encoded(_two()))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(Refused, match=fault) as caught:
        read_picture(source, folder)
    assert caught.value.error["code"] == "bad_picture"


def test_the_header_of_a_png_tells_its_orientation() -> None:
    """An eXIf chunk stands before the pixels. One behind them counts nowhere, so that the size of the header is that of
    the picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    before = encoded(_two(), "PNG", exif=exif)
    chunk = before[before.index(b"eXIf") - 4 :]
    chunk = chunk[: 12 + int.from_bytes(chunk[:4], "big")]
    plain = encoded(_two())
    behind = plain[:-12] + chunk + plain[-12:]
    assert tuple(picture_size(before, None)) == read_picture(before, None).size == (30, 40)
    assert tuple(picture_size(behind, None)) == read_picture(behind, None).size == (40, 30)


def test_a_broken_second_half_is_found_when_it_is_decoded_and_not_before() -> None:
    content = encoded(_two(), "JPEG")[:-20]
    assert picture_size(content, None) == (40, 30)


# --- The text of a picture ---

SIZES = [(40, 30), (300, 200), (2000, 1500), (33, 400), (5, 5), (640, 480)]
TILED = ("smolvlm", "idefics3")
LINED = ("mistral3", "pixtral")
NAMES = {"qwen2-vl": "qwen2_vl", "qwen2.5-vl": "qwen2_5_vl", "qwen3-vl": "qwen3_vl"}


@cache
def _tokenizer(folder: Path) -> Any:
    from skill_train.program.tokenizer import load_tokenizer

    return load_tokenizer(str(folder), None)


def _read(kind: str, **limits: Any) -> Pictures:
    folder = tiny_vision.cached(kind)
    model: Any = {"model": str(folder), "revision": None, **limits}
    return Pictures(model, _tokenizer(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_vision.KINDS if kind not in LINED])
def test_a_picture_becomes_the_text_that_its_processor_writes(kind: str) -> None:
    """`replace_image_token` of transformers' own processor, which cannot be made without torchvision."""
    made = _read(kind)
    name = NAMES.get(kind, kind)
    module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    processor = getattr(module, module.__all__[0])
    marks = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    marks |= {"global_image_tag": "<global-img>"}
    gemma = "\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\n"
    stand_in = SimpleNamespace(
        image_processor=made.processor,
        image_token=made.places.token,
        image_seq_len=16,
        full_image_sequence=gemma,
        **marks,
    )
    more = {"return_row_col_info": True} if kind in TILED else {}
    for size in SIZES:
        image = Image.new("RGB", size, "red")
        features = made.processor(images=[[image]] if kind in TILED else [image], return_tensors="np", **more)
        assert made.expansion(PictureSize(*size)) == processor.replace_image_token(stand_in, features, 0), size


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "square"), [("mistral3", 28), ("pixtral", 14)])
def test_a_picture_becomes_lines_of_the_size_that_its_processor_makes(kind: str, square: int) -> None:
    """As `replace_image_token` of PixtralProcessor, whose module cannot be imported without torchvision."""
    made = _read(kind)
    for size in SIZES:
        features = made.processor(images=[Image.new("RGB", size, "red")], return_tensors="np", patch_size=square)
        [(height, width)] = features["image_sizes"]
        line = "[IMG]" * (width // square)
        expected = "[IMG_BREAK]".join([line] * (height // square)) + "[IMG_END]"
        assert made.expansion(PictureSize(*size)) == expected, size


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit", "tokens"), [("qwen2-vl", 16 * 28 * 28, 12), ("smolvlm", 128 * 128, 80)])
def test_max_pixels(kind: str, limit: int, tokens: int) -> None:
    """By hand: 16 squares of 28 pixels at 2000 x 1500 are 4 x 3; two tiles a side and the whole are 5 x 16 tokens."""
    assert _read(kind, max_pixels=limit).tokens(PictureSize(2000, 1500)) == tokens


@pytest.mark.slow
def test_a_limit_that_a_family_does_not_have_is_refused() -> None:
    for kind, limits in (("gemma3", {"max_pixels": 9}), ("gemma3", {"min_pixels": 9}), ("smolvlm", {"min_pixels": 9})):
        with pytest.raises(Refused, match="has no meaning"):
            _read(kind, **limits)


# --- The places of pictures in a row ---

CHAT = {"messages": "messages", "images": "images"}
PAIR = ("prompt", "completion")


def _row(content: Any, images: Any, answer: Any = "A cat.") -> dict[str, Any]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"image": "a.png", "url": ""}, "a.png"),
        ({"image": "a.png", "image_url": {"url": None, "detail": None}}, "a.png"),
        ({"image": "a.png", "bytes": None, "image_url": None}, "a.png"),
        ({"image_url": {"url": "a.png"}, "path": ""}, "a.png"),
        ({"image": {"bytes": b"x", "path": "a.png"}, "path": "a.png"}, {"bytes": b"x", "path": "a.png"}),
        ({"image": {"bytes": None, "path": None}, "path": "a.png"}, "a.png"),
        ({"image": "a.png", "path": "./a.png"}, "a.png"),
        ({"bytes": b"x", "path": "a.png"}, {"bytes": b"x", "path": "a.png"}),
        ({"bytes": b"", "path": "a.png"}, "a.png"),
        ({"image": ""}, None),
    ],
)
def test_one_picture_may_be_given_twice(part: dict[str, Any], source: Any) -> None:
    assert source_of_part({"type": "image"} | part) == source


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (_row("<image>\n<image>\nWhat?", ["a.png"]), "more places for pictures than pictures"),
        (_row("<image>\nWhat?", None), "more places for pictures than pictures"),
        (_row("<image>\nWhat?", ["a.png", "b.png"]), "more pictures than places"),
        (_row("What?", ["a.png"], "<image>"), "an answer holds a picture"),
        (_row([{"type": "image"}, {"type": "image"}], ["a.png"]), "no picture for it"),
        (_row([{"type": "image", "path": "a.png"}, {"type": "text", "text": "`<image>`?"}], None), "more places"),
        (_row([{"type": "video"}], ["a.png"]), "neither text nor a picture"),
        (_row([{"type": "text", "text": 5}], ["a.png"]), "neither text nor a picture"),
        (_row([{"type": "image", "image": "a.png", "text": "What?"}], None), "type 'image' holds a text and a picture"),
        (_row([{"type": "text", "image": "a.png", "text": "What?"}], None), "type 'text' holds a text and a picture"),
        (_row([{"type": "image", "image": "a.png", "path": "b.png"}], None), "several pictures"),
        (_row([{"type": "image", "bytes": b"x", "url": "b.png"}], None), "several pictures"),
        (_row("a\ufffcb", ["a.png"]), "U\\+FFFC"),
        (_row("What?", [7]), "something else in place"),
    ],
)
def test_places_and_pictures_that_do_not_agree_are_refused(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(Refused, match=fault):
        lift_pictures(row, CHAT)


@pytest.mark.parametrize("speaker", ["gpt", "chatgpt", "assistant", "model"])
def test_a_picture_in_an_answer_is_refused_whoever_gives_it(speaker: str) -> None:
    turns = [{"from": "human", "value": "Draw."}, {"from": speaker, "value": "<image>"}]
    with pytest.raises(Refused, match="an answer holds a picture"):
        lift_pictures({"conversations": turns, "image": "a.png"}, {"conversations": "conversations", "images": "image"})


@pytest.mark.parametrize(("asked", "answered"), [("question", "answer"), ("instruction", "output"), PAIR])
def test_a_picture_in_a_column_of_answers_is_refused(asked: str, answered: str) -> None:
    row = {"q": "Draw.", "a": "Here: <image>", "image": "a.png"}
    with pytest.raises(Refused, match="an answer holds a picture"):
        lift_pictures(row, {asked: "q", answered: "a", "images": "image"})


@pytest.mark.parametrize("content", ["", "<image>", None, [{"type": "image"}], [{"type": "image"}, {"type": "text"}]])
def test_a_picture_alone_is_a_question(content: Any) -> None:
    """As in datasets of captions: the answer describes the picture. The template gets the picture and no text."""
    row, pictures = lift_pictures(_row(content, ["a.png"]), CHAT)
    [asked, answered] = to_example(row, "messages", {"messages": "messages"})["messages"]
    assert (picture_parts(asked["content"]), answered["content"]) == ([{"type": "image"}], "A cat.")
    assert pictures == ["a.png"]


SPOKEN = {"conversations": "conversations", "images": "images"}


@pytest.mark.parametrize(("asks", "answers"), [("human", "gpt"), ("Human", "GPT"), ("USER", "Assistant")])
def test_speakers_are_those_of_the_training(asks: str, answers: str) -> None:
    turns = [{"from": asks, "value": "What?"}, {"from": answers, "value": "A cat."}]
    row = {"conversations": turns, "images": ["a.png"]}
    lifted, pictures = lift_pictures(row, SPOKEN)
    [asked, answered] = to_example(lifted, "sharegpt", {"conversations": "conversations"})["messages"]
    assert (asked["role"], asked["content"], answered["role"]) == ("user", f"{PICTURE}What?", "assistant")
    assert pictures == ["a.png"]
    turns[1]["value"] = "This: <image>"
    with pytest.raises(Refused, match="an answer holds a picture"):
        lift_pictures(row, SPOKEN)


@pytest.mark.parametrize("answer", ["", " \n", None, [], [{"type": "text", "text": " "}]])
def test_an_answer_without_words_is_refused_beside_a_picture(answer: Any) -> None:
    row, _ = lift_pictures(_row("What?", ["a.png"], answer), CHAT)
    with pytest.raises(Refused, match="the assistant message has no text"):
        to_example(row, "messages", {"messages": "messages"})


def test_a_text_without_pictures_may_speak_of_the_tag() -> None:
    row = _row("What is the `<image>` tag in SVG?", None)
    assert lift_pictures(row, CHAT) == ({"messages": row["messages"]}, [])
