"""Text for the report: numbers with their units, and texts without paths of this machine and without tokens. Pure."""

import re
from collections.abc import Iterable
from typing import Any

from skill_train.core.console import clean
from skill_train.core.secrets import token_pattern

# Keys with text of the model or the data. A path in such a text is not one of this machine, and stays unchanged.
CONTENT_KEYS = {"example", "prompt", "before", "after", "answer", "answers", "expected", "messages", "text"}
_POSIX = re.compile(
    r"(?<![\w.:/~…-])(?:file://|[A-Za-z]:)?~?(?:/[^\s/'\"`<>|;,()\[\]{}…]+)+/([^\s/'\"`<>|;,()\[\]{}]+)"
)
_WINDOWS = re.compile(r"(?<!\w)(?:[A-Za-z]:|\\)\\(?:[^\\\s'\"<>|]+\\)+([^\\\s'\"<>|]+)")
_TOKEN = token_pattern(least=8)  # a report is shown to others, so a token that was cut off is hidden too
_SIGNED_IN = re.compile(r"(?<=://)[^\s/@]+:[^\s/@]+(?=@)")  # a name and a password in front of a host
_MARKED = re.compile(r"⟦(.*?)⟧", re.DOTALL)


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:,.0f} bytes"


def share(value: float) -> str:
    return f"{value:.1%}" if 0 < value < 1 else f"{value:.0%}"


def number(value: Any) -> str:
    """A figure as text: whole numbers with commas, others with four digits, and the beginning of a digest."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"


def rate(value: float) -> str:
    return f"{value:,.0f} tokens/s" if value >= 10 else f"{value:.2g} tokens/s"


def ratio(value: float) -> str:
    return f"×{value:.4f}"


def nats(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def placeless(value: Any, places: Iterable[str]) -> Any:
    """The document without tokens, without `places` (paths of this machine), and without other absolute paths.

    A path keeps its last name: `…/tickets.jsonl`. Text of the model or the data keeps its other paths.
    """
    longest_first = sorted({place.rstrip("/") for place in places} - {""}, key=len, reverse=True)
    return _placeless(value, longest_first, is_content=False)


def _placeless(value: Any, places: list[str], *, is_content: bool) -> Any:
    if isinstance(value, dict):
        return {
            _text(key, places, is_content): _placeless(item, places, is_content=is_content or key in CONTENT_KEYS)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_placeless(item, places, is_content=is_content) for item in value]
    return _text(value, places, is_content) if isinstance(value, str) else value


def _text(text: str, places: list[str], is_content: bool) -> str:
    for place in places:
        text = re.sub(re.escape(place) + r"(?:/[^\s'\"`<>|;,()\[\]{}]*)?", _last_name, text)
    text = _SIGNED_IN.sub("…", _TOKEN.sub("…", text))
    if not is_content:
        text = _WINDOWS.sub(r"…/\1", _POSIX.sub(r"…/\1", text))
    return clean(text)


def _last_name(path: re.Match[str]) -> str:
    return "…/" + re.split(r"[/\\]", path[0].rstrip("/"))[-1]


def marked(example: str) -> list[tuple[str, bool]]:
    """The parts of an example, and whether each is trained. Trained parts are between ⟦ and ⟧."""
    parts = [(text, index % 2 == 1) for index, text in enumerate(_MARKED.split(example))]
    return [(text, trained) for text, trained in parts if text]
