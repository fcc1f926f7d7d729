"""Building blocks for drawing answers: tables and figures. The console cleans all texts and ignores markup in them."""

from typing import Any

STYLE = {"pass": "green", "ok": "green", "warn": "yellow", "fail": "red"}


def rich_table(*columns: str, **options: Any) -> Any:
    from rich.table import Table

    return Table(*columns, title_justify="left", **options)


def folding_table(*columns: str, title: str) -> Any:
    table = rich_table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def draw_bar(rich: Any, done: int, total: int, *, indent: int) -> None:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar

    rich.print(Padding(ProgressBar(total=total, completed=done, width=40), (0, 0, 0, indent)))


def figure(value: Any) -> str:
    """A number with four digits, or the beginning of a digest."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "")
    return text if len(text) <= 40 else text[:12] + "…"
