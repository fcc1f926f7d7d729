"""Trained on llama.cpp's own pixels (`preprocess: engine`): what the training feeds of a picture is what llama.cpp
computes of it, to the last bit, with the same tokens around it; and `verify` fails a pair that shows others."""

from __future__ import annotations

import io
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gguf_edit
import gguf_maker
import picture_pairs
import tiny_vision
from skill_train.llama.pictures.compare import MARKER, Pair, Picture, PictureAnswer, PicturePrompt, ask_pictures
from skill_train.program.encode import Encoder
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import read_picture
from skill_train.program.pictures.in_rows import picture_parts
from skill_train.program.pictures.tokens import ImageModel, Pictures, PixelLimits, write_limits
from skill_train.program.tokenizer import load_tokenizer
from skill_train.reference.pictures import with_markers
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify.pictures.as_used import check_as_used
from skill_train.verify.pictures.check import check_pairs
from skill_train.verify.pictures.measured import measure
from skill_train.verify.pictures.questions import decoded_otherwise, row_questions

pytestmark = pytest.mark.slow

# Wide, high, halves of a square, a few pixels, one whose size depends on single precision, and the narrowest.
SIZES = ((300, 150), (150, 300), (70, 70), (98, 42), (5, 5), (6, 3), (1, 30), (400, 3), (640, 481))
# A photograph, and more than 4,096 tokens of Qwen-VL, which take ten seconds: `make walks` shows them to two of three.
LARGE = ((2000, 1500), (2600, 2100))
KINDS = ("L", "RGBA", "CMYK", "rotated", "webp")
ALL_AT_ONCE = 4  # pictures of one row, in two turns


def _encoder(kind: str, folder: Path) -> Encoder:
    base = str(tiny_vision.cached(kind))
    tokenizer = load_tokenizer(base, None)
    feeding: Any = {"data": "rows.jsonl", "format": "messages", "loss_on": "assistant", "max_length": 10_000}
    columns = {"columns": {"messages": "messages", "images": "images"}}
    recipe: Any = {"model": base, "revision": None, "preprocess": "engine"}
    return Encoder(feeding | columns, tokenizer, Pictures(recipe, tokenizer, folder))


def _write(folder: Path, kind: str) -> list[str]:
    sizes = SIZES if kind == "qwen3-vl" else SIZES + LARGE
    for width, height in sizes:
        picture_pairs.picture(width, height, seed=width).save(folder / f"{width}x{height}.png", compress_level=1)
    for stored in KINDS:
        image = picture_pairs.stored(stored)  # as it lies in a file, so its bytes are written as they are
        (folder / stored).write_bytes(_bytes(image))
    return [*(f"{width}x{height}.png" for width, height in sizes), *KINDS]


def _bytes(image: Image.Image) -> bytes:
    file: Any = image.fp
    file.seek(0)
    content: bytes = file.read()
    return content


def _rows(names: list[str]) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": " What is it? "}, {"role": "assistant", "content": "A sky."}
    rows = [{"images": [name], "messages": list(asked)} for name in names]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image><image>\nBoth?\n\n<image>"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "And\n<image>\n?"},
        {"role": "assistant", "content": "no"},
    ]
    return [*rows, {"images": names[:ALL_AT_ONCE], "messages": turns}]


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_the_training_feeds_what_llama_cpp_shows(kind: str, tmp_path: Path) -> None:
    encode = _encoder(kind, tmp_path)
    rows = [encode(number, number + 1, row) for number, row in enumerate(_rows(_write(tmp_path, kind)))]
    seen = encode.pictures
    assert seen is not None
    prompts, fed = [], []
    for row in rows:
        messages = [message | {"content": picture_parts(message["content"])} for message in row["messages"]]
        text = encode.tokenizer.apply_chat_template(with_markers(messages, MARKER), tokenize=False)
        pictures = seen.read(row)
        prompts.append(PicturePrompt(str(text), [Picture(_array(picture)) for picture in pictures]))
        fed.append(_planes(seen, seen.tensors([pictures])))
    answers = ask_pictures(picture_pairs.pair(kind), prompts, any_size=False, threads=2)
    for row, planes, answer in zip(rows, fed, answers, strict=True):
        ends = () if kind not in ("mistral3", "pixtral") else encode.tokenizer.convert_tokens_to_ids(["[IMG_BREAK]"])
        ids = [seen.token_id if token in ends else token for token in row["input_ids"]]  # they are of the projector
        assert ids == answer.tokens(seen.token_id), row["images"]
        assert _difference(planes, answer) == 0, row["images"]


def _array(picture: Any) -> Any:
    import numpy as np

    return np.asarray(picture)


def _difference(planes: list[Any], answer: PictureAnswer) -> float:
    """Of the normalized colours, at most."""
    import numpy as np

    shown = [chunk.pixels for chunk in answer.pictures if chunk.pixels is not None]
    assert [plane.shape for plane in planes] == [pixels.shape for pixels in shown]
    return max(float(np.abs(plane - pixels).max()) for plane, pixels in zip(planes, shown, strict=True))


def _planes(seen: Pictures, tensors: dict[str, Any]) -> list[Any]:
    """What the tower is fed of each part, [3, height, width]. Qwen's patches are laid out one by one."""
    import numpy as np

    values = tensors["pixel_values"].numpy()
    if "image_sizes" in tensors:  # smaller ones are padded
        sizes = tensors["image_sizes"].tolist()
        return [plane[:, :high, :wide] for plane, (high, wide) in zip(values, sizes, strict=True)]
    if "image_grid_thw" not in tensors:
        return list(values.reshape(-1, *values.shape[-3:]))
    side, planes, first = seen.settings.patch_size, [], 0
    for _, high, wide in tensors["image_grid_thw"].tolist():
        plane = np.empty((3, high * side, wide * side), dtype=np.float32)
        places = ((y + b, x + a) for y in range(0, high, 2) for x in range(0, wide, 2) for b in (0, 1) for a in (0, 1))
        for row, (y, x) in enumerate(places, start=first):
            patch = values[row].reshape(3, 2, side, side)
            assert (patch[:, 0] == patch[:, 1]).all()  # both frames of the film
            plane[:, y * side : (y + 1) * side, x * side : (x + 1) * side] = patch[:, 0]
        first += high * wide
        planes.append(plane)
    return planes


def test_a_template_that_writes_a_picture_by_itself_is_refused(tmp_path: Path) -> None:
    """Its tokens would stand for no picture."""
    encode = _encoder("qwen3-vl", tmp_path)
    encode.tokenizer.chat_template = "<|image_pad|>" + encode.tokenizer.chat_template
    picture_pairs.picture(64, 64).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A sky."}]
    with pytest.raises(Refused, match="does not write one mark for each picture") as caught:
        encode(0, 1, {"images": ["a.png"], "messages": turns})
    assert caught.value.error["got"] == "1 times, and 1 times <|image_pad|>"


# --- The check of a run that was trained so ---


def read_by(folder: Path, preprocess: str = "engine") -> ImageModel:
    return {"model": str(folder), "revision": None, "preprocess": preprocess}


def judged(pair: Pair, kind: str, *sizes: tuple[int, int], preprocess: str = "engine") -> list[Check | NotChecked]:
    shown = [picture_pairs.question(picture_pairs.picture(*size, seed=size[0])) for size in sizes]
    return check_pairs([pair], read_by(tiny_vision.cached(kind), preprocess), shown)


def named(found: list[Check | NotChecked], name: str) -> Check:
    return next(one for one in found if one.name == name and isinstance(one, Check))


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_as_used_is_as_trained(kind: str) -> None:
    """A right pair passes on pictures of which llama.cpp's and the model's own pixels differ."""
    sizes = ((300, 150), (150, 310), (70, 70))
    found = judged(picture_pairs.pair(kind), kind, *sizes)
    warned = {one.name for one in found if isinstance(one, Check) and one.verdict != "pass"}
    assert warned == ({"loads_projector"} if kind in ("mistral3", "pixtral") else set())
    assert [one for one in found if isinstance(one, NotChecked)] == []
    used = named(found, "pictures_as_used")
    names = ("differing_pixels", "other_sizes", "texts_differ")
    assert [used.figures[name] for name in names] == [0, 0, 0]
    assert float(str(used.figure)) < 1e-6 and used.threshold == 2e-5
    same = named(found, "pictures")
    assert same.figures["differing_pixels"] == 0 and float(str(same.figures["mean_kl"])) < 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gemma3", {"clip.vision.image_mean": [0.5, 0.5, 0.4]}, "of the pixels differ"),
        ("smolvlm", {"clip.vision.preproc_image_size": 128}, "get another size"),
    ],
)
def test_other_pixels_than_the_trained_ones_fail(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    pair = picture_pairs.pair(kind)
    other = gguf_edit.rewrite(pair.projector, tmp_path / "mmproj.gguf", metadata=changes)
    used = named(judged(replace(pair, projector=other), kind, (300, 150)), "pictures_as_used")
    assert (used.verdict, said in used.detail) == ("fail", True), used.detail
    assert "the training had the pictures of llama.cpp in llama-cpp-python 0.3.36" in used.detail


def test_another_text_around_a_picture_fails(tmp_path: Path) -> None:
    """A file that reads the words beside a picture as other tokens than the training did."""
    pair = picture_pairs.pair("gemma3")
    tokens = gguf_edit.metadata(pair.text, "tokenizer.ggml.tokens")
    tokens[tokens.index("<end_of_image>")] = "<end_of_picture>"
    text = gguf_edit.rewrite(pair.text, tmp_path / "text.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    renamed = Pair(text, Path(shutil.copy(pair.projector, tmp_path / "mmproj.gguf")))
    used = named(judged(renamed, "gemma3", (200, 200)), "pictures_as_used")
    assert used.verdict == "fail" and "the text around a picture in another way" in used.detail


def test_no_token_in_common_behind_a_picture_fails() -> None:
    """One text of several is enough to be told apart, and none is a failure of its own."""
    pair, question = picture_pairs.pair("gemma3"), picture_pairs.question(picture_pairs.picture(200, 200))
    measured = measure(read_by(tiny_vision.cached("gemma3")), [question, question])
    prompts = [PicturePrompt(one.as_asked, [Picture(np.asarray(question.pictures[0]))]) for one in measured.answers]
    right, other = ask_pictures(pair, prompts, any_size=False, threads=1)
    assert other.chunks[-1].ids is not None
    other.chunks[-1].ids[-1] += 1
    [some, none] = (check_as_used("x", "f16", measured, answers, None) for answers in ([right, other], [other, other]))
    assert isinstance(some, Check) and some.verdict == "fail" and some.figure is not None
    assert isinstance(none, Check) and none.verdict == "fail" and none.figure is None
    assert "tokenizes the text after the pictures differently" in none.detail


def test_a_limit_that_the_projector_carries_is_llama_cpps_own(tmp_path: Path) -> None:
    """SmolVLM with a longest edge of 128 in place of 256: 2 tiles a side, here and there."""
    limits = PixelLimits(None, 128 * 128)
    folder = Path(shutil.copytree(tiny_vision.cached("smolvlm"), tmp_path / "model"))
    assert write_limits(folder, "smolvlm", limits) == {"size": {"longest_edge": 128}}
    projector = gguf_maker.export(folder, tmp_path, options=("--mmproj",))
    pair = replace(picture_pairs.pair("smolvlm"), projector=projector)
    image: ImageModel = {**read_by(folder), "max_pixels": limits.most}
    found = check_pairs([pair], image, [picture_pairs.question(picture_pairs.picture(300, 290))])
    used = named(found, "pictures_as_used")
    assert (used.verdict, used.figures["picture_tokens"]) == ("pass", [[5 * 16, 5 * 16]]), used.detail


# --- Files that llama.cpp's server decodes otherwise ---


def _decoded_by_llama_cpp(content: bytes) -> Any:
    """[height, width, 3]; None where it cannot open the file."""
    import ctypes

    import numpy as np
    from llama_cpp import mtmd_cpp

    no_context: Any = None
    buffer = (ctypes.c_uint8 * len(content)).from_buffer_copy(content)
    bitmap = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(no_context, buffer, len(content), False)
    if not bitmap:
        return None
    shape = (mtmd_cpp.mtmd_bitmap_get_ny(bitmap), mtmd_cpp.mtmd_bitmap_get_nx(bitmap), 3)
    data = ctypes.cast(mtmd_cpp.mtmd_bitmap_get_data(bitmap), ctypes.POINTER(ctypes.c_uint8))
    found = np.ctypeslib.as_array(data, shape=shape).copy()
    mtmd_cpp.mtmd_bitmap_free(bitmap)
    return found


@pytest.mark.parametrize("kind", ["L", "RGBA", "CMYK", "rotated"])
def test_it_is_known_which_files_llama_cpp_decodes_otherwise(kind: str) -> None:
    """Of a JPEG file some colours are up to three levels off; of others all are equal."""
    import numpy as np

    content = _bytes(picture_pairs.stored(kind))
    ours, theirs = _array(read_picture(content, None)), _decoded_by_llama_cpp(content)
    alike = ours.shape == theirs.shape and int(np.abs(ours.astype(int) - theirs.astype(int)).max()) <= 3
    assert alike == (decoded_otherwise(content, None) == [])


def _unusual(kind: str) -> bytes:
    """A file of a usual format in a form that few programs write."""
    plain = picture_pairs.picture(96, 64)
    if kind == "levels":  # 0 to 100
        return b"P6\n96 64\n100\n" + bytes(value // 3 for value in plain.tobytes())
    if kind == "text":
        return b"P3\n96 64\n255\n" + b" ".join(b"%d" % value for value in plain.tobytes())
    formats = {"small frame": "GIF", "frame": "GIF", "bits": "PPM", "PPM": "PPM", "webp": "WEBP"}
    file = io.BytesIO()
    plain.convert({"bits": "1", "PPM": "RGB"}.get(kind, "P")).save(file, formats[kind])
    content = bytearray(file.getvalue())
    if kind == "small frame":  # on a canvas of 116 x 74
        content[6:10] = struct.pack("<HH", 116, 74)
    return bytes(content)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("levels", "PPM with another range of colours, or as text"),
        ("text", "PPM with another range of colours, or as text"),
        ("bits", "PPM with another range of colours, or as text"),
        ("small frame", "GIF with a frame smaller than its canvas"),
        ("webp", "WEBP, which it opens with ffmpeg or not at all"),
        ("PPM", ""),
        ("frame", ""),
    ],
)
def test_an_unusual_form_that_llama_cpp_decodes_otherwise_is_told(kind: str, said: str) -> None:
    content = _unusual(kind)
    ours, theirs = _array(read_picture(content, None)), _decoded_by_llama_cpp(content)
    assert (theirs is not None and np.array_equal(ours, theirs)) == (not said)
    assert decoded_otherwise(content, None) == ([said] if said else [])


def test_a_file_that_the_server_shows_otherwise_is_told(tmp_path: Path) -> None:
    """A photograph that EXIF turns upright: the training saw it upright, and llama.cpp's users see it on its side."""
    for kind in ("rotated", "L"):
        (tmp_path / kind).write_bytes(_bytes(picture_pairs.stored(kind)))
    turns = [{"role": "user", "content": "\ufffcWhat?"}, {"role": "assistant", "content": "A sky."}]
    rows = [{"images": [kind], "image_sha256": [kind], "messages": turns} for kind in ("rotated", "L")]
    verdicts = []
    for asked in (rows, rows[1:]):
        image, questions = read_by(tiny_vision.cached("gemma3")), row_questions(asked, tmp_path)
        used = named(check_pairs([picture_pairs.pair("gemma3")], image, questions), "pictures_as_used")
        verdicts.append((used.verdict, used.figures["decoded_otherwise"], "turned by EXIF" in used.detail))
    assert verdicts == [("warn", 1, True), ("pass", 0, False)]


def test_a_run_of_the_models_own_pixels_is_only_warned() -> None:
    """Of the same files: what a run without `preprocess` gets."""
    used = named(judged(picture_pairs.pair("gemma3"), "gemma3", (300, 150), preprocess="model"), "pictures_as_used")
    assert used.verdict == "warn"
