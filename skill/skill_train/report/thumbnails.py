"""Small copies of the pictures of held-out rows, for the page.

A picture is copied only if it is unchanged since the training, and belongs to a row that was asked. A copy has only the
pixels of the file, because EXIF data may contain the place and the author of a photograph.
"""

import base64
import hashlib
import io
from collections import Counter

from skill_train.program.events import Refused
from skill_train.program.pictures.decode import picture_bytes, read_picture, require_pillow
from skill_train.report.figure import PictureView, ShownPictures
from skill_train.report.quality import MOST_ANSWERS
from skill_train.run import plan_record, train_record
from skill_train.run.evaluate_record import Evaluation, can_be_asked, rows_digest, spread, telling
from skill_train.run.folder import RunDir
from skill_train.run.train_record import Row

EDGE = 160  # pixels of the longer edge
MOST_CHARACTERS = 400_000  # of all copies on a page; one has 2,000 to 30,000
MOST_OF_ROW = 4
_QUALITY = 75  # of JPEG


def shown_pictures(run: RunDir, evaluation: Evaluation | None, room: int) -> ShownPictures:
    """The pictures of the rows that the page shows, by the line of the row.

    Args:
        room: the largest number of characters of all copies together.
    """
    recipe = plan_record.read(run.plan).recipe
    if evaluation is None or not evaluation.answers or not recipe.images:
        return ShownPictures({})
    try:
        require_pillow()
    except Refused as refusal:
        return ShownPictures({}, f"Pictures are not shown: {refusal.error['message']}.")
    held_out = [row for row in train_record.read_rows(run.held_out) if can_be_asked(row, recipe.loss_on)]
    rows = spread(held_out, evaluation.rows)
    if rows_digest(rows) != evaluation.inputs.rows:
        return ShownPictures({}, "Pictures are not shown: held_out.jsonl has other rows than those that were asked.")
    by_line, bytes_left = dict[int, list[PictureView]](), room
    often = Counter(row["line"] for row in rows)
    of_line = {row["line"]: row for row in rows}
    for answered in telling(evaluation.answers, MOST_ANSWERS):
        row = of_line.get(answered.line)
        if row is None or not row.get("images"):
            continue
        views = (
            [_none("not shown: several rows have this line")]
            if often[answered.line] > 1
            else _row_views(row, run, bytes_left)
        )
        bytes_left -= sum(len(view["thumbnail"] or "") for view in views)
        by_line[answered.line] = views
    return ShownPictures(by_line)


def _row_views(row: Row, run: RunDir, room: int) -> list[PictureView]:
    images, digests = row.get("images") or [], row.get("image_sha256") or []
    views = list[PictureView]()
    for number, image in enumerate(images[:MOST_OF_ROW]):
        view = _view(image, digests[number] if number < len(digests) else "", run)
        characters = len(view["thumbnail"] or "")
        views.append(view if characters <= room else _none("not shown: the page would be too large"))
        room -= characters if characters <= room else 0
    more = len(images) - MOST_OF_ROW
    return [*views, _none(f"and {more} more")] if more > 0 else views


def _view(image: object, digest: str, run: RunDir) -> PictureView:
    try:
        content = picture_bytes(image, run.path) if isinstance(image, str) else b""
    except (Refused, OSError):
        return _none("not shown: the picture is missing")
    if hashlib.sha256(content).hexdigest() != digest:
        return _none("not shown: the picture was changed since the training")
    try:
        return _copy(content)
    except Refused as refusal:
        return _none(f"not shown: {refusal.error['message']}")


def _copy(content: bytes) -> PictureView:
    """A small JPEG of a picture's pixels.

    Raises:
        Refused: the picture cannot be read.
    """
    from PIL import Image

    picture = read_picture(content, None)
    picture.thumbnail((EDGE, EDGE))
    plain = Image.new("RGB", picture.size)  # saving `picture` itself would also write the comments and XMP of its file
    plain.paste(picture)
    file = io.BytesIO()
    plain.save(file, "JPEG", quality=_QUALITY)
    address = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")
    return {"thumbnail": address, "width": plain.width, "height": plain.height, "why_not": ""}


def _none(why_not: str) -> PictureView:
    return {"thumbnail": None, "width": 0, "height": 0, "why_not": why_not}
