"""Draws the answer of `data`."""

from typing import Any

from msgspec import UNSET

from skill_train.commands._drawing import rich_table
from skill_train.data.inspect_report import DataReport, PictureReport, TokenReport


def draw_data(rich: Any, data: DataReport) -> None:
    summary = f"{data.rows:,} rows, columns {', '.join(f'{name} ({kind})' for name, kind in data.columns.items())}"
    rich.print(f"{data.path}: {summary}")
    verdicts = rich_table("method", "verdict", "because", "recipe lines")
    colours = {"ready": "green", "needs_mapping": "yellow", "impossible": "red"}
    for name, method in data.methods.items():
        cells = (name, method.verdict, method.because, "\n".join(method.recipe))
        verdicts.add_row(*cells, style=colours[method.verdict])
    rich.print(verdicts)
    rich.print(data.note)
    _draw_problems(rich, data)
    if data.pictures is not UNSET:
        rich.print(_pictures(data.pictures))
    if data.tokens is not None:
        _draw_tokens(rich, data.tokens)
    rich.print("one row, ⟦trained parts⟧ marked:\n" + data.example[:600])
    if data.fix:
        left_out = ", ".join(f"{count} {kind}" for kind, count in data.fix.left_out.items()) or "none"
        rich.print(f"{data.fix.path}: {data.fix.rows:,} rows; left out: {left_out}")


def _pictures(pictures: PictureReport) -> str:
    size = "" if pictures.largest is None else f", the largest {pictures.largest[0]} x {pictures.largest[1]} pixels"
    text = f"{pictures.count:,} pictures in {pictures.rows:,} rows, {pictures.bytes / 1e6:,.1f} MB{size}"
    traits = {name: getattr(pictures, name) for name in ("rotated", "grey", "cmyk", "transparent")}
    changed = ", ".join(f"{count:,} {name}" for name, count in traits.items() if count)
    text += f"; made upright RGB on white: {changed}" if changed else ""
    if pictures.mean_tokens is not UNSET:
        text += f"; tokens a row: mean {pictures.mean_tokens}, longest {pictures.longest_tokens}"
    return text


def _draw_problems(rich: Any, data: DataReport) -> None:
    table = rich_table("problem", "rows", "training refuses", "lines", "first")
    for name, count in data.problems.items():
        if count is None:
            table.add_row(name, "unknown", "", "", data.unknown.get(name, ""), style="dim")
        elif count.rows:
            share = f"{count.rows:,}" + (f" of {count.of_rows:,}" if count.of_rows is not UNSET else "")
            lines = ", ".join(map(str, count.lines or ()))
            cells = (name, share, f"{count.refused or 0:,}", lines, count.first or "")
            table.add_row(*cells, style="red" if count.refused else "yellow")
    rich.print(table)


def _draw_tokens(rich: Any, tokens: TokenReport) -> None:
    names = ("mean", "p50", "p90", "p99", "longest", "trained_share", "truncated_share")
    measured = [(name, getattr(tokens, name)) for name in names if getattr(tokens, name) not in (None, UNSET)]
    figures = ", ".join(f"{name} {value}" for name, value in measured)
    rich.print(f"tokens a row ({tokens.basis}): {figures}; max_length {tokens.max_length}")
    if tokens.histogram:
        table, most = rich_table("tokens", "rows", ""), max(bucket.rows for bucket in tokens.histogram)
        for bucket in tokens.histogram:
            table.add_row(f"up to {bucket.up_to:,}", f"{bucket.rows:,}", "█" * -(-30 * bucket.rows // most))
        rich.print(table)
