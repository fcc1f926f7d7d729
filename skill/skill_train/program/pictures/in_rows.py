"""Where a row has its pictures, and where they stand in its texts."""

import posixpath
import re
from typing import Any

from skill_train.program.events import Refused
from skill_train.program.examples import ANSWERS, Example, Row, bad_row, is_media, media_mark, speaker_of, turns_of
from skill_train.program.pictures.decode import PICTURE_HINT, PictureSource

PICTURE = "\ufffc"  # U+FFFC, object replacement character: stands for a picture in the text of a message
PICTURE_TAG = re.compile(r"\n?<image>\n?", re.IGNORECASE)  # LLaVA writes it on a line of its own
PART_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")  # keys of a part that may hold its picture
PICTURE_PARTS = ("image", "image_url", "input_image")  # types of parts; the last two are OpenAI's


def lift_pictures(row: Row, columns: dict[str, str]) -> tuple[Row, list[PictureSource]]:
    """The row with `PICTURE` in its texts where a picture stands, and the pictures in that order.

    A picture stands in a message as a part of its content, or as the tag `<image>` whose picture is the next one of the
    column `images`. Pictures of a row without any such place come before the first question. Answers must have none.
    """
    column = columns.get("images")
    column_pictures = pictures_of_column(row.get(column)) if column is not None else []
    waiting, pictures = list(column_pictures), list[PictureSource]()
    texts = {name: row[place] for name, place in columns.items() if name != "images" and place in row}
    texts |= {name: turns_of(texts[name], name) for name in ("messages", "conversations") if name in texts}
    lifted = dict[str, Any]()
    for name, value in texts.items():
        before = len(pictures)
        lifted[columns[name]] = lifted_value(value, waiting, pictures)
        if name in ANSWERS and len(pictures) > before:
            raise picture_in_answer(value)
    if column_pictures and len(waiting) == len(column_pictures):
        lifted = before_first_question(lifted, columns, len(column_pictures))
        waiting, pictures = [], column_pictures
    if waiting:
        raise bad_row(
            "a row has more pictures than places for them",
            f"{len(column_pictures)} times <image> in its texts, or none, for {len(column_pictures)} pictures",
            f"{len(column_pictures) - len(waiting)} places",
            "write <image> where each picture stands, or nothing: they come before the question then",
        )
    for value in lifted.values():
        require_no_tag(value, has_pictures=bool(pictures))
    return {name: value for name, value in row.items() if name != column} | lifted, pictures


def require_no_tag(value: Any, *, has_pictures: bool) -> None:
    """Refuses a tag `<image>` for which no picture was left. A text of a row without pictures may be about the tag."""
    if isinstance(value, list):
        for message in value:
            for key in ("content", "value"):
                require_no_tag(message.get(key) if isinstance(message, dict) else None, has_pictures=has_pictures)
    elif isinstance(value, str) and (tag := PICTURE_TAG.search(value)) and (has_pictures or media_mark(value)):
        expected = "a picture for each <image>, in a column such as `images`"
        raise bad_row("a row has more places for pictures than pictures", expected, value[max(0, tag.start() - 20) :])


def pictures_of_column(value: Any) -> list[PictureSource]:
    """The pictures of a cell: one, a list of them, or none."""
    values = value if isinstance(value, list) else [] if value in (None, "") else [value]
    for each in values:
        if not isinstance(each, (str, bytes, dict)):
            raise Refused(
                "a row has something else in place of a picture",
                code="bad_picture",
                expected="the path of a file, a data URI, or bytes",
                got=repr(each)[:80],
                hint=PICTURE_HINT,
            )
    return values


def lifted_value(value: Any, waiting: list[PictureSource], pictures: list[PictureSource]) -> Any:
    """A text or messages with `PICTURE` for each picture. Adds the pictures to `pictures`; tags use up `waiting`."""
    if isinstance(value, str):
        return lifted_text(value, waiting, pictures)
    if not isinstance(value, list):
        return value
    return [lifted_message(message, waiting, pictures) if isinstance(message, dict) else message for message in value]


def lifted_message(message: dict[str, Any], waiting: list[PictureSource], pictures: list[PictureSource]) -> Any:
    before = len(pictures)
    lifted = dict(message)
    for key in ("content", "value"):  # `value` is ShareGPT's
        content = message.get(key)
        if isinstance(content, str):
            lifted[key] = lifted_text(content, waiting, pictures)
        elif isinstance(content, list):
            lifted[key] = "".join(lifted_part(part, waiting, pictures) for part in content)
    if len(pictures) > before and "assistant" in (message.get("role"), speaker_of(message)):
        raise picture_in_answer(message)
    return lifted


def picture_in_answer(answer: Any) -> Refused:
    return bad_row("an answer holds a picture", "text in answers", repr(answer))


def lifted_text(text: str, waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    if PICTURE in text:
        raise bad_row("a text holds the character U+FFFC, which stands for a picture here", "text without it", text)
    return PICTURE_TAG.sub(lambda tag: next_picture(waiting, pictures) or tag.group(), text)


def next_picture(waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    """The mark of the next picture of the column. Empty where none is left, and the tag stays: it is refused later."""
    if not waiting:
        return ""
    pictures.append(waiting.pop(0))
    return PICTURE


def lifted_part(part: Any, waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    """The text of one part of a message's content, or the mark of its picture."""
    kind = part.get("type") if isinstance(part, dict) else None
    require_one_thing(part, kind)
    text = part.get("text") if isinstance(part, dict) else None
    if (kind is None or kind == "text") and isinstance(text, str):
        return lifted_text(text, waiting, pictures)
    if kind == "text" and text is None:
        return ""
    if kind not in PICTURE_PARTS:
        expected = '{"type": "text"} or {"type": "image"}'
        raise bad_row("a message holds a part that is neither text nor a picture", expected, repr(part))
    source = source_of_part(part)
    if source is None:
        if not waiting:
            wrong = "a message holds a place for a picture, and the row has no picture for it"
            raise bad_row(wrong, "the picture in the part, or in a column `images`", repr(part))
        return next_picture(waiting, pictures)
    pictures.append(source)
    return PICTURE


def require_one_thing(part: Any, kind: Any) -> None:
    """Refuses a part that holds more than its type says, which would be dropped silently. Arrow adds nulls."""
    other = part.get("text") if kind in PICTURE_PARTS else source_of_part(part) if kind == "text" else None
    if other:
        wrong = f"a part of the type {kind!r} holds a text and a picture, but only one of them would be read"
        expected = '{"type": "text", "text": …} and {"type": "image", "image": …}, each alone'
        raise bad_row(wrong, expected, repr(part))


def source_of_part(part: dict[str, Any]) -> PictureSource | None:
    """Where the picture of a part is; None where the part only marks its place."""
    cells = (part.get(key) for key in PART_KEYS)
    values = [each.get("url") if isinstance(each, dict) and "url" in each else each for each in cells]
    sources = [each for each in values if any(each.values() if isinstance(each, dict) else [each])]  # Arrow adds nulls
    if isinstance(part.get("bytes"), bytes) and len(sources) == 2 and isinstance(part.get("path"), str):
        return {"bytes": part["bytes"], "path": part["path"]}  # a name beside the bytes, as `datasets` writes them
    if len(sources) > 1 and len({which_picture(each) for each in sources}) > 1:
        there = ", ".join(key for key in PART_KEYS if part.get(key))
        wrong = "a part of a message holds several pictures, but only one of them would be read"
        raise bad_row(wrong, "one of " + ", ".join(PART_KEYS), there)
    value = sources[0] if sources else None
    return value if isinstance(value, (str, bytes, dict)) else None


def which_picture(value: Any) -> str:
    """A text that is equal for two ways to name one picture: its path, and its bytes with the path."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("bytes")
    return posixpath.normpath(value) if isinstance(value, str) else repr(value)


def before_first_question(lifted: Row, columns: dict[str, str], count: int) -> Row:
    """The texts with all pictures before the first message of the user, or before the question."""
    for name in ("messages", "conversations", "prompt", "question", "instruction"):
        value: Any = lifted.get(columns.get(name, ""))
        if isinstance(value, str):
            return lifted | {columns[name]: PICTURE * count + value}
        for index, message in enumerate(value if isinstance(value, list) else []):
            if isinstance(message, dict) and "user" in (message.get("role"), speaker_of(message)):
                key = "content" if "content" in message else "value"
                changed = message | {key: PICTURE * count + str(message.get(key) or "")}
                return lifted | {columns[name]: [*value[:index], changed, *value[index + 1 :]]}
    raise bad_row("a row has pictures and no question", "a message of the user", "none")


def picture_parts(content: str) -> list[dict[str, str]]:
    """The content of a message as the parts that a chat template reads."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def require_places(example: Example, pictures: int) -> None:
    """Refuses an example that is no chat, or that has more or fewer places for pictures than the row has pictures."""
    if example["kind"] != "chat":
        expected = "format messages, sharegpt, question_answer or instruction"
        raise bad_row("rows with pictures need turns of a chat", expected, f"format {example['kind']}")
    places = sum(str(message["content"]).count(PICTURE) for message in example["messages"])
    if places != pictures:
        raise bad_row("a row's pictures do not stand in its messages", f"{pictures} places", f"{places}")


# The name of a column beside the pictures that only says which picture it is, or how large.
NAMES_PICTURE = re.compile(
    r"(?:\w+_)?(?:id|name|filename|file|path|url|uri|link|key|index|width|height|size)s?", re.IGNORECASE
)


def tells_which_picture(column: str, value: Any) -> bool:
    """Whether a column beside the pictures only names them: `image_id`, `coco_url`, `width`."""
    return isinstance(value, (str, int, float)) and NAMES_PICTURE.fullmatch(column) is not None


def media_beside(row: Row, columns: dict[str, str], *, pictures: bool = False) -> str | None:
    """The first column that is not read and contains images, audio or video; None if there is none. With `pictures`,
    columns that only name the pictures of the format's own column are allowed."""
    read = set(columns.values())
    beside = ((name, value) for name, value in row.items() if name not in read)
    if pictures and "images" in columns:
        beside = ((name, value) for name, value in beside if not tells_which_picture(name, value))
    return next((name for name, value in beside if is_media(name, value)), None)
