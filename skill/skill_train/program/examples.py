"""Turns a row into an example: messages, a prompt and a completion, or a text."""

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NotRequired, TypedDict

from skill_train.program.chat.choices import all_left_out, is_left_out
from skill_train.program.chat.pairs import hold_turns, read_once
from skill_train.program.events import Refused
from skill_train.program.model_files import JsonObject

# A row of a dataset as its author wrote it, with columns and values of any kind.
Row = dict[str, Any]

ANSWERS = ("completion", "output", "answer")
PAIRS = ("prompt_completion", "question_answer")  # each side a text, or messages
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of an answer, in the order of transformers 5.23
CALLS = ("tool_calls", "function_call", "function_calls")  # keys of an answer; OpenAI's newer and older one, OLMo's
AS_JSON = "write it as JSON (json.dumps in Python), or the rows to a .jsonl file"
ARGUMENTS = "the arguments of a call"
MEND = "correct or remove it; rows are never dropped silently"  # the hint of a row that cannot be read


class Message(TypedDict):
    """A message of a chat. Its other keys stay for the template, such as `name` and `reasoning_content`."""

    role: str
    content: str
    tool_calls: NotRequired[Any]


class Example(TypedDict):
    """What is learned from one row: a chat with `messages`, `tools` and `trained_messages`, a completion with `prompt`
    and `completion`, or a `text`."""

    kind: Literal["chat", "completion", "text"]
    messages: NotRequired[list[Message]]
    tools: NotRequired[list[Any] | None]
    trained_messages: NotRequired[list[int]]  # the indices of the answers that train
    prompt: NotRequired[str]
    completion: NotRequired[str]
    text: NotRequired[str]
    without_template: NotRequired[bool]  # the recipe asks for bare text; only set if the model has a chat template


class Tokens(TypedDict):
    """A row as the model is fed it: ids, and labels, which are `IGNORED` for ids that do not train."""

    input_ids: list[int]
    labels: list[int]


class Pictured(TypedDict, total=False):
    """The pictures of a row, if it has any. In its texts U+FFFC stands for each, in this order."""

    images: list[Any]  # where they are; in `samples.jsonl` and `held_out.jsonl` their names in the folder of the run
    image_sha256: list[str]  # of their files


class EncodedRow(Example, Pictured, Tokens):
    """A line of `samples.jsonl` and `held_out.jsonl`."""

    row: int  # its number in the data, from 0
    line: int  # in its file
    rendered: str  # the text that the template writes
    truncated: bool  # it was longer than max_length
    full_length: int  # in tokens


def to_example(row: Row, data_format: str, columns: dict[str, str]) -> Example:
    """One row as the model is to learn it.

    Args:
        data_format: `messages`, `question_answer`, `instruction` or `sharegpt`, which become turns; `completion` or
            `prompt_completion`, whose texts are joined unchanged; or `text`.
        columns: the dataset's name of each column, by the format's name.
    """

    def value(name: str) -> Any:
        return row.get(columns[name]) if name in columns else None

    if data_format == "messages":
        return chat(with_system(turns_of(value("messages"), "messages"), value("system")), value("tools"), 0)
    if data_format == "sharegpt":
        turns = from_sharegpt(turns_of(value("conversations"), "conversations"))
        return chat(with_system(turns, value("system")), value("tools"), 0)
    if data_format == "text":
        return {"kind": "text", "text": text_of(value("text"), "text")}
    names = ("question", "answer") if data_format == "question_answer" else ("prompt", "completion")
    prompt, completion = value(names[0]), value(names[1])
    if data_format in PAIRS:
        as_json = hold_turns((prompt, completion))
        prompt = turns_of(prompt, names[0]) if as_json[0] else prompt
        completion = turns_of(completion, names[1]) if as_json[1] else completion
    if data_format in PAIRS and (isinstance(prompt, list) or isinstance(completion, list)):
        prompt, completion = as_messages(prompt, "user", names[0]), as_messages(completion, "assistant", names[1])
        prompt, completion = read_once(prompt, completion)
        prompt = with_system(prompt, value("system"))
        return chat([*prompt, *completion], value("tools"), len(prompt))
    if data_format in ("prompt_completion", "completion"):  # texts joined as they stand
        with_system([], value("system"))  # checked as the tools are: chat templates read both
        tools_of(value("tools"))
        texts = text_of(prompt, "prompt"), text_of(completion, "completion")
        return {"kind": "completion", "prompt": texts[0], "completion": texts[1]}
    return chat(from_pair(data_format, value), value("tools"), 0)


def from_pair(data_format: str, value: Callable[[str], Any]) -> list[Message]:
    """One turn from `instruction`/`input`/`output` or `question`/`answer`, after a system message if there is one."""
    names = ("instruction", "output") if data_format == "instruction" else ("question", "answer")
    asking = [name for name in (names[0], "input") if is_filled(value(name)) or value(name) == 0] or names[:1]
    user = "\n\n".join(text_of(value(name), name) for name in asking)
    answer: Message = {"role": "assistant", "content": text_of(value(names[1]), names[1])}
    return list(with_system([{"role": "user", "content": user}, answer], value("system")))


# Roles that answer a call of the assistant, by the names that templates know. Such an answer may be empty.
TOOLS = ("tool", "function", "ipython", "observation", "environment")
SYSTEMS = ("system", "developer")
ROLES = (*SYSTEMS, "user", "assistant", *TOOLS)
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "function_call": "assistant", "system": "system",
    "tool": "tool", "observation": "tool",
}  # fmt: skip


def is_filled(value: Any) -> bool:
    """Whether an optional column of a row holds anything but blanks."""
    return bool(value.strip() if isinstance(value, str) else value)


def with_system(messages: Any, text: Any) -> Any:
    """The messages with a system message of this text before them, unless the text is empty or they begin with the same
    message already. Empty system messages are removed."""
    if not isinstance(messages, list):
        return messages
    messages = [each for each in messages if not (isinstance(each, dict) and is_silent(each.get("role"), each))]
    if not is_filled(text):
        return messages
    system: Message = {"role": "system", "content": text_of(text, "system")}
    return messages if messages[:1] == [system] else [system, *messages]


def is_silent(role: Any, message: Row) -> bool:
    """Whether a message is the system's and says nothing, neither in its text nor beside it."""
    others = (value for name, value in message.items() if name not in ("role", "from"))
    return role in SYSTEMS and not any(map(is_filled, others))


def speaker_of(turn: Row) -> str | None:
    """The role of a turn of ShareGPT; None for an unknown one."""
    return SHAREGPT_ROLES.get(str(turn.get("from")).lower())


def from_sharegpt(turns: Any) -> list[Message]:
    if not isinstance(turns, list):
        raise bad_row("conversations is not a list", '[{"from", "value"}, …]', repr(turns))
    messages = list[Message]()
    for turn in turns:
        role = speaker_of(turn) if isinstance(turn, dict) else None
        if role is None:
            raise Refused(
                "a turn has an unknown speaker", code="unknown_role", expected="from: human or gpt", got=repr(turn)[:80]
            )
        if is_silent(role, turn):
            continue
        message: Any = {name: value for name, value in turn.items() if name not in ("from", "value")}
        message |= {"role": role, "content": text_of(turn.get("value"), "value")}
        if str(turn["from"]).lower() == "function_call":  # LLaMA-Factory's
            message |= {"content": "", "tool_calls": calls_of(message["content"])}
        messages.append(message)
    return messages


def calls_of(text: str) -> list[JsonObject]:
    """The calls in the text of a turn, which is JSON of one call or of a list of calls."""
    value = json_value(text, "function_call")
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise bad_row("function_call holds no call", '{"name": "…", "arguments": {…}}', text)
    return [{"type": "function", "function": call} for call in calls]


def as_messages(value: Any, role: str, name: str) -> list[Any]:
    """The messages of a row unchanged, or its text as one message."""
    if isinstance(value, list):
        return value
    return [{"role": role, "content": text_of(value, name)}]


PICTURES = (
    "png|jpe?g|jfif|jp2|j2k|jxl|webp|gif|bmp|tiff?|heic|heif|avif|svg|ico|tga|exr|p[bgpn]m|psd|dng|nef|cr[23]|arw|dcm"
    "|pdf|djvu"
)
SOUNDS = "wav|mp3|flac|ogg|oga|opus|m4a|aac|aiff?|wma|amr|sph|caf|midi?"
FILMS = "mp4|m4v|mov|webm|mkv|avi|mpe?g|wmv|flv|ogv|3gp"
MEDIA = f"(?:{PICTURES}|{SOUNDS}|{FILMS})"
# A file name alone, or a path or an address, with or without spaces. A sentence that ends with a file name is neither.
# An address may name the kind of picture in its parameters.
MEDIA_NAME = re.compile(
    rf"\S+\.{MEDIA}(?:[?#]\S*)?|\S*[/\\][^\n]*\.{MEDIA}(?:[?#]\S*)?|https?://\S+[?&](?:format|fmt|type|ext)=(?:image/)?{MEDIA}(?:&\S*)?",
    re.IGNORECASE,
)
MEDIA_URI = re.compile(r"data:(?:image|audio|video)/", re.IGNORECASE)
MEDIA_KEYS = {"bytes", "path", "array", "sampling_rate"}  # datasets' Image and Audio; Parquet may leave out the empty
MEDIA_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
MEDIA_HEX = re.compile(r"(?:0x|\\x)?((?:[0-9A-Fa-f]{2}){24})")
# First bytes: PNG, JPEG, GIF, TIFF, FLAC, Ogg, MP3, Matroska and WebM; WebP, WAV and AVI; MP4, HEIC and AVIF.
MEDIA_MAGIC = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|fLaC|OggS\0|ID3[\2-\4]|\x1a\x45\xdf\xa3"
    rb"|RIFF.{4}(?:WEBP|WAVE|AVI )|.{4}ftyp",
    re.DOTALL,
)
# Marks of vision and audio models: of Qwen, Phi, Gemma, Pixtral, Llama 3.2, InternVL, Idefics, DeepSeek and MiniCPM.
MEDIA_MARK = re.compile(
    r"<\|(?:image|img|vision|video|audio)[^|<>\n]*\|>|<(?:start|end)_of_(?:image|audio)>"
    r"|<(?:image|img|video|audio)[_ -]?(?:soft_token|placeholder|context|token|pad|patch|here|#?\d+)>"
    r"|<fake_token_around_image>|<im_patch>|<im(?:g|age)>[^<>\n]+</im(?:g|age)>|\[IMG\](?!.*\[/IMG\])",
    re.IGNORECASE,
)
# Bare tags, such as those of LLaVA, at an end of a text or of a line, and other brackets at an end of a text. HTML
# closes such a tag.
TAGGED = "(?:image|img|photo|video|audio|speech)"
# Within a sentence `<image>` stands for a picture too, unless the sentence is about the tag.
IN_SENTENCE = r"(?<![\w`\"'])<image>(?![`\"'])(?!\s*(?:tag|element|node|attribute|label|field)s?\b)"
MEDIA_TAG = re.compile(rf"(?:^|\n)\s*<{TAGGED}>|<{TAGGED}>\s*(?:\n|$)|{IN_SENTENCE}", re.IGNORECASE)
BRACKETED = r"(?:\[(?:image|IMAGE|img)(?: ?#?\d+)?\]|\{\{?image\}?\})"
MEDIA_FIRST, MEDIA_LAST = re.compile(rf"\s*{BRACKETED}"), re.compile(rf"{BRACKETED}\s*\Z")


def media_in(value: Any, *, answer: bool = False) -> str | None:
    """The part of a value that stands for a picture, sound or film: a file's name or address, its data, or a mark in a
    text. None for a text. An `answer` may be the bare name of a file."""
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, dict):
        has_media = any(
            name == "array" or media_in(each) is not None or (name == "bytes" and not isinstance(each, int))
            for name, each in value.items()
        )
        return "{" + ", ".join(sorted(value)) + "}" if has_media and MEDIA_KEYS.issuperset(value) else None
    if isinstance(value, list):
        return next((media for each in value if (media := media_in(each)) is not None), None)
    if not isinstance(value, str):
        return None
    short = value[:4096].strip()
    if MEDIA_URI.match(short):
        return short[:40]
    if len(value) < 1024 and MEDIA_NAME.fullmatch(short) and not (answer and "/" not in short and "\\" not in short):
        return short[:80]
    start = short[:32].replace("+", "-").replace("/", "_")  # in either alphabet
    if MEDIA_BASE64.match(short[:64]) and MEDIA_MAGIC.match(base64.urlsafe_b64decode(start)):
        return f"{short[:16]}…, a file as base64"
    if (digits := MEDIA_HEX.match(short)) and MEDIA_MAGIC.match(bytes.fromhex(digits[1])):
        return f"{short[:16]}…, a file in hexadecimal digits"
    return media_mark(value)


def media_mark(text: str) -> str | None:
    """The mark that stands for a picture, sound or film in this text; None if there is none."""
    mark = MEDIA_MARK.search(text) if "<" in text or "[IMG]" in text else None
    if mark is None and "<" in text and "</" not in text:
        mark = MEDIA_TAG.search(text)
    if mark is None and (text.lstrip()[:1] in ("[", "{") or text.rstrip()[-1:] in ("]", "}")):
        mark = MEDIA_FIRST.match(text) or MEDIA_LAST.search(text[-64:])
    return None if mark is None else mark.group().strip()


def bad_row(message: str, expected: str = "", got: str = "", hint: str = "") -> Refused:
    return Refused(message, code="bad_row", expected=expected, got=got[:80], hint=hint)


def require_text(value: Any, name: str, *, answer: bool = False) -> None:
    media = media_in(value, answer=answer)
    if media is not None:
        raise Refused(
            f"{name} contains an image, audio or video, and only text is trained there",
            code="not_text",
            expected=f"text in {name}",
            got=media,
            hint="train a vision model on pictures (references/vision.md), or use a dataset of text",
        )


def text_of(value: Any, name: str) -> str:
    require_text(value, name, answer=name in ANSWERS)
    if not isinstance(value, (str, list, dict, type(None))):  # a number, a date
        raise bad_row(f"{name} is {value!r} and not text", f"text in {name}, such as {str(value)!r}", repr(value))
    if not isinstance(value, str) or not value.strip():
        raise bad_row(f"{name} is empty or not text", f"text in {name}", repr(value))
    return value


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text", ""), str)


def is_unicode(fields: JsonObject) -> bool:
    try:
        return (len(fields) < 2 and fields["role"].isascii()) or bool(
            json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8")
        )
    except UnicodeEncodeError:
        return False


def chat(messages: Any, tools: Any, prompt_messages: int) -> Example:
    """A conversation of well-formed messages. Its first `prompt_messages` messages never train, nor do the answers that
    a key leaves out, such as OpenAI's `weight` of 0."""
    if not isinstance(messages, list) or not messages:
        raise bad_row("messages is empty or not a list", '[{"role", "content"}, …]', repr(messages))
    cleaned: list[Message] = [checked_message(message) for message in messages]
    chosen = [not is_left_out(message) for message in cleaned]
    answers = [i for i in range(prompt_messages, len(cleaned)) if chosen[i] and cleaned[i]["role"] == "assistant"]
    if not answers:
        raise all_left_out(cleaned[prompt_messages:]) or no_answer(cleaned)
    return {"kind": "chat", "messages": cleaned, "tools": tools_of(tools), "trained_messages": answers}


def tools_of(value: Any) -> list[Any] | None:
    """The tools of a row. Many datasets write them as JSON text, which no template reads."""
    tools = list_of(value or [], "tools")
    json.dumps(tools, default=not_json)
    return tools or None


def list_of(value: Any, name: str) -> list[Any]:
    """A list of tools or of calls, which may be JSON text; empty for an empty text."""
    read = value if not isinstance(value, str) else json_value(value, name) if value.strip() else []
    if not isinstance(read, list) or not all(isinstance(each, dict) for each in read):
        raise bad_row(f"{name} is not a list of objects", '[{"type": "function", "function": {…}}, …]', str(value))
    return read


def json_value(text: str, name: str) -> Any:
    """The value of a JSON text in a row. Refuses an object that has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=with_distinct_keys)
    except RepeatedKey as error:
        raise bad_row(f"{name} has the key {str(error)[:80]!r} twice in one object", "each key once", text) from None
    except (ValueError, RecursionError) as error:
        hint = AS_JSON if text.lstrip()[:1] == "[" else ""
        raise bad_row(f"{name} is text that is not JSON: {error}", "JSON", text, hint) from None


def not_json(value: Any) -> None:
    """Refuses a value of Arrow, such as a date, in whose place transformers writes `<datetime>`."""
    what = f"a call or a tool has a value of the type {type(value).__name__}, which JSON does not have"
    raise bad_row(what, f"a text, such as {str(value)!r}", repr(value), "write the value as text")


def checked_call(call: Any) -> Any:
    """The call, if its arguments are an object or JSON text of one. Missing or blank arguments become an empty object,
    as in vLLM."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": checked_call(call["function"])}
    arguments = call.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        other = next((name for name, value in call.items() if str(value).lstrip()[:1] in ("{", "[")), None)
        if other is not None:
            raise bad_row(f"a call has no arguments, but {other!r}", "arguments", repr(call))
        return call | {"arguments": {}}
    read = json_value(arguments, ARGUMENTS) if isinstance(arguments, str) else arguments
    json.dumps(read, default=not_json)
    if not isinstance(read, dict):
        raise bad_row(f"{ARGUMENTS} are not an object", '{"name": value, …}, or JSON text of it', repr(arguments))
    return call


def turns_of(value: Any, name: str) -> Any:
    """The turns of a row, parsed if they are JSON text, because a cell of a table holds only text."""
    return json_value(value, name) if isinstance(value, str) and value.strip() else value


def checked_message(message: Any) -> Any:
    """The message of a row as a `Message`, with the text of all its parts and without keys that are null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_row("a message has no role", '{"role", "content"}', repr(message))
    # `datasets` fills the keys that a row lacks with None; a template must not see them.
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = list(map(checked_call, list_of(message["tool_calls"], "tool_calls")))
    if "function_call" in message:
        message["function_call"] = checked_call(message["function_call"])
    content = message.get("content", "")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            if not mentions_media(str(part["type"])):  # such as thinking, tool_use and refusal
                raise bad_row(f"a part of type {part['type']!r} is not read", "parts of type text", repr(part))
            require_text({"bytes": None, "path": None}, f"a part of type {part['type']}")
    require_text(content, f"the {message['role']} message", answer=message["role"] == "assistant")
    if isinstance(content, list) and all(map(is_text_part, content)):
        content = "".join(part.get("text", "") for part in content)
    text = content.strip() if message["role"] == "assistant" and isinstance(content, str) else content
    if not isinstance(content, str) or not (text or any(map(message.get, CALLS)) or message["role"] in TOOLS):
        found = f"has {content!r} and not text" if isinstance(content, (int, float)) else "has no text"
        raise bad_row(f"the {message['role']} message {found}", got=repr(message))
    if not is_unicode({key: value for key, value in message.items() if key != "content"}):  # templates write it too
        half = "half a surrogate pair stands in a message, which no tokenizer reads"
        raise bad_row(half, "text in Unicode", repr(message))
    return {**message, "content": content}


def no_answer(messages: list[Message]) -> Refused:
    """The refusal of a conversation without a message of the assistant after its prompt."""
    unknown = next((message["role"] for message in messages if message["role"] not in ROLES), None)
    if unknown is None:
        return bad_row("a conversation has no assistant message to learn from", got=repr(messages))
    return Refused(
        f"the role {unknown[:40]!r} is unknown, and there is no message of the assistant",
        code="unknown_role",
        expected=f"one of {', '.join(ROLES)}",
        got=repr(messages)[:80],
        hint="rename the role that answers to assistant in the dataset",
    )


def unreadable(message: str, expected: str, got: str = "", hint: str = "") -> Refused:
    return Refused(message, code="unreadable_dataset", expected=expected, got=got, hint=hint)


class RepeatedKey(ValueError):
    """A JSON object has a key twice. Python's reader, like most, drops the first value silently."""


def with_distinct_keys(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object, as the `object_pairs_hook` of `json`. Raises `RepeatedKey` for a key that it has twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise RepeatedKey(repeated_in(pairs))
    return row


def repeated_in(pairs: list[tuple[str, Any]]) -> str:
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def repeated_key(where: str, key: str) -> Refused:
    expected = "each key once in an object; of two values one would be dropped silently"
    return unreadable(f"{where} has the key {key[:80]!r} twice in one object", expected, hint=MEND)


# Names of columns of pictures, sounds or films, in the languages in which we found such datasets.
MEDIA_WORDS = (
    "image|img|picture|pic|photo|photograph|screenshot|scan|thumbnail|pixel_value|jpe?g|png|webp|tiff?"
    "|video|clip|mp4|audio|wav|mp3|flac|foto|fotografie|bild|bilder|abbildung|imagene?|imagem"
    "|fotografia|immagine|immagini|obraz|zdjęcie|obrázek|kép|resim|görsel|gambar|afbeelding|kuva|billede"
    "|изображение|картинка|фото|видео|аудио|图片|图像|圖片|圖像|照片|图|視頻|视频|音频|画像|写真|動画|音声|이미지|사진|영상"
    "|صورة|فيديو|תמונה|चित्र|εικόνα|φωτογραφία|รูปภาพ|vídeo|vidéo|áudio"
)
MEDIA_COLUMN = re.compile(
    rf"(?!(?:n|num|count|has|is|no|with|without)_)(?:\w+_)?(?:{MEDIA_WORDS})(?:e?s|i)?"
    r"(?:_(?:id|path|url|uri|link|file|filename|file_name|name|bytes|data|base64|b64|key|ref|src)s?)?_?\d*"
)
MEDIA_PATH = re.compile(r"\S*[/\\]\S+")
SENTENCE_WORDS = 3  # words


@lru_cache(maxsize=4096)
def names_media(column: str) -> bool:
    """Whether a column has a usual name for images, audio or video: `image`, `img_path`, `Foto`, `图片`."""
    return MEDIA_COLUMN.fullmatch("_".join(words_of_name(column))) is not None


@lru_cache(maxsize=4096)
def mentions_media(column: str) -> bool:
    """Whether one word of a column's name is usual for images, audio or video: `foto_pfad`."""
    return any(re.fullmatch(rf"(?:{MEDIA_WORDS})(?:e?s|i)?", word) for word in words_of_name(column))


def words_of_name(column: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()
    return re.sub(r"[\W_]+", "_", parted).strip("_").split("_")


def is_media(column: str, value: Any) -> bool:
    """Whether a value is an image, audio or video: by itself, or by the name of its column if it is not a sentence."""
    if media_in(value) is not None:
        return True
    if isinstance(value, str) and MEDIA_PATH.fullmatch(value.strip()) and mentions_media(column):
        return True
    if not value or isinstance(value, bool) or not names_media(column):
        return False
    if isinstance(value, dict):
        return any(each is not None for each in value.values())
    if isinstance(value, str):  # a sentence about a picture is text
        return len(value.split()) < SENTENCE_WORDS and (value.isascii() or len(value) < 12)
    return True
