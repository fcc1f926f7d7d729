"""Building blocks for drawing answers: tables, lines and figures. Texts are never markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skill_train.core.console import clean

STYLE = {"pass": "green", "ok": "green", "warn": "yellow", "fail": "red"}


def rich_table(*columns: str, **options: Any) -> Any:
    from rich.table import Table

    return Table(*columns, title_justify="left", **options)


def folding_table(*columns: str, title: str) -> Any:
    table = rich_table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Any, *cells: str, **options: Any) -> None:
    from rich.text import Text

    table.add_row(*(Text(clean(cell)) for cell in cells), **options)


def draw_line(rich: Any, text: str) -> None:
    """Draws a line that the terminal wraps."""
    rich.print(clean(text), markup=False, soft_wrap=True)


def draw_lines(rich: Any, lines: Iterable[str]) -> None:
    for line in lines:
        draw_line(rich, line)


def draw_text(rich: Any, text: str) -> None:
    """Draws lines that are wrapped between words."""
    rich.print(clean(text), markup=False)


def draw_bar(rich: Any, done: int, total: int, *, indent: int) -> None:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar

    rich.print(Padding(ProgressBar(total=total, completed=done, width=40), (0, 0, 0, indent)))


def figure(value: Any) -> str:
    """A number with four digits, or the beginning of a digest."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "")
    return text if len(text) <= 40 else text[:12] + "…"
