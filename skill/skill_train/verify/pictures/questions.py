"""The questions about pictures that a pair of files is asked: held-out rows of the run, or pictures drawn here."""

from pathlib import Path
from typing import Any

from skill_train.data.row_pictures import traits_of
from skill_train.facts import JsonObject
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSource, opened_picture, read_picture
from skill_train.program.pictures.in_rows import picture_parts
from skill_train.reference.pictures import PictureQuestion

_QUESTIONS = 4  # rows; each is asked of each pair three times, and once with grey pictures
_DRAWN = ((96, 64), (64, 112))  # pixels
# Formats that llama.cpp's server opens by itself, with stb_image. Of its JPEG some pixels are up to three levels off.
_OPENED = ("PNG", "JPEG", "MPO", "GIF", "BMP", "DIB", "PPM")
# The server ignores these traits: it does not turn a picture, and shows the colour below what is transparent.
_SHOWN_OTHERWISE = {"rotated": "turned by EXIF", "transparent": "transparent"}


def row_questions(rows: list[Any], folder: Path) -> list[PictureQuestion]:
    """The first rows whose pictures lie in the folder of the run; rows with the same pictures count once.

    Args:
        rows: of `held_out.jsonl` or `samples.jsonl`.
    """
    questions: list[PictureQuestion] = []
    seen: set[str] = set()
    for row in rows:
        images, digests = row.get("images") or [], str(row.get("image_sha256"))
        if not images or digests in seen or len(questions) == _QUESTIONS:
            continue
        try:
            pictures = [read_picture(image, folder) for image in images]
        except Refused:  # the picture is gone from the run; other rows may have theirs
            continue
        seen.add(digests)
        otherwise = {why for image in images for why in decoded_otherwise(image, folder)}
        messages = [one | {"content": picture_parts(str(one.get("content", "")))} for one in row["messages"]]
        questions.append(PictureQuestion(messages, pictures, tuple(sorted(otherwise))))
    return questions


def decoded_otherwise(source: PictureSource, folder: Path | None) -> list[str]:
    """Why llama.cpp's server makes another picture of the file than the training; empty where it does not."""
    with opened_picture(source, folder) as (image, _):
        reasons = [_SHOWN_OTHERWISE[trait] for trait in traits_of(image) if trait in _SHOWN_OTHERWISE]
        if image.format not in _OPENED:
            reasons.append(f"{image.format}, which it opens with ffmpeg or not at all")
        if image.format == "PPM" and (image.tile[0][0] != "raw" or image.mode == "1"):
            reasons.append("PPM with another range of colours, or as text")
        if image.format == "GIF" and image.tile[0][1] != (0, 0, *image.size):
            reasons.append("GIF with a frame smaller than its canvas")
        return reasons


def drawn_questions() -> list[PictureQuestion]:
    """Pictures of two colours in squares, for a model without rows."""
    from PIL import Image

    questions = []
    for width, height in _DRAWN:
        picture = Image.new("RGB", (width, height), (200, 40, 40))
        for left in range(0, width, 32):
            picture.paste((30, 90, 210), (left, left % height, left + 16, left % height + 24))
        asked: list[JsonObject] = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What does the picture show?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Blue rectangles on a red ground."}]},
        ]
        questions.append(PictureQuestion(asked, [picture]))
    return questions
