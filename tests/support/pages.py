"""A page of `skill-train report`, read by the standard library's parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "use", "path", "img"}


class Page(HTMLParser):
    """Tags with their attributes, figures with their text, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.at = Path()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.figures: list[tuple[str, Any, str]] = []
        self.text = ""
        self.cells: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            self.figures.append((found["data-at"], json.loads(found["value"]), ""))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag  # every element is closed where it should be

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "data" in self.open:
            at, value, text = self.figures[-1]
            self.figures[-1] = (at, value, text + data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data


def differing(page: Page, folder: Path, shown: Callable[[str], str]) -> list[str]:
    """Figures that are not the ones in the JSON files of the runs in `folder`; `shown` says a text as the page does."""
    wrong = []
    for at, value, _ in page.figures:
        file, _, pointer = at.partition("#")
        found: Any = json.loads((folder / file).read_text(encoding="utf-8"))
        for key in pointer.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
        if value != (shown(found) if isinstance(found, str) else found):
            wrong.append(f"{at}: {value!r}, and {found!r} in the file")
    return wrong
