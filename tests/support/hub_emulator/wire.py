"""What goes over the wire: a request as a route sees it, and the answer that a route gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hub_emulator.account import Access
    from hub_emulator.server import Hub


@dataclass
class Call:
    """A request.

    Attributes:
        path: without the query, still quoted.
        access: who asks; None for nobody.
        parts: what the route's pattern found, unquoted.
    """

    hub: Hub
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Any
    body: bytes
    access: Access | None
    parts: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """The body, which must be JSON."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError:
            raise Refused(400, "the body is not JSON") from None

    def lines(self) -> list[dict[str, Any]]:
        """The body, one JSON document a line."""
        try:
            return [json.loads(line) for line in self.body.splitlines() if line.strip()]
        except ValueError:
            raise Refused(400, "the body is not JSON lines") from None


@dataclass
class Answer:
    """A body that is an iterator is sent in chunks, as it comes."""

    body: bytes | Iterator[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


class Refused(Exception):
    """An answer other than success. `code` is the Hub's `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = headers or {}

    def answer(self) -> Answer:
        said = {"X-Error-Message": self.message} | ({"X-Error-Code": self.code} if self.code else {})
        return json_answer({"error": self.message}, said | self.headers, status=self.status)


def json_answer(document: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> Answer:
    body = json.dumps(document).encode()
    return Answer(body, {"Content-Type": "application/json"} | (headers or {}), status)


def file_answer(data: bytes, headers: dict[str, str], asked: str | None) -> Answer:
    """A file, or the part of it that a `Range` header asks for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
    if not found:
        return Answer(data, headers)
    start, end = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
    if start > end:
        return Answer(b"", {"Content-Range": f"bytes */{len(data)}"}, 416)
    return Answer(data[start : end + 1], headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"}, 206)


def paged(call: Call, items: list[Any]) -> Answer:
    """One page, with the address of the next one in its `Link` header."""
    start = int(call.query.get("cursor", ["0"])[0])
    end = start + call.hub.page
    link = {}
    if end < len(items):
        rest = [
            f"{name}={_quoted(value)}" for name, values in call.query.items() if name != "cursor" for value in values
        ]
        link = {"Link": f'<{call.hub.endpoint}{call.path}?{"&".join([*rest, f"cursor={end}"])}>; rel="next"'}
    return json_answer(items[start:end], link)


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
