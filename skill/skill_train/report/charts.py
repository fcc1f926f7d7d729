"""The curves and the comparison of files as SVG, drawn by matplotlib. No colour is in them: the page's style sheet has
them, for light, dark and paper.

Nothing in a chart comes from the model or the data but numbers, and the names of quantization types.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from skill_train.core.errors import NotInstalled

COLOURS = 8  # series that the style sheet has a colour for; further ones begin again, dashed
# Inches of 72 units: the text is readable where a phone shows the chart whole.
WIDTH, HEIGHT, BARS_WIDTH = 4.4, 2.5, 3.6
_TEXT, _GRID = "#0a0b01", "#0a0b02"
_SERIES = "#0a0c{:02x}"  # placeholders; the page has `var(--text)`, `var(--grid)` and `var(--series-0)` instead
_SPAN = 20.0  # a curve whose largest value is this many times its smallest is drawn on a log scale
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "lines.linewidth": 1.4,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Series:
    """One curve: a gap where a value is None. `colour` is the number of its run."""

    colour: int
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over the same steps. The scale begins at zero, is a log one where the values span many times (`log`), or
    takes what the values need (`free`)."""

    unit: str
    series: Sequence[Series]
    scale: Literal["zero", "log", "free"] = "zero"


@dataclass(frozen=True)
class Amount:
    """One file in the comparison: `label` is its type. A value of None is drawn as nothing."""

    label: str
    colour: int
    value: float | None


def curves(name: str, title: str, panels: Sequence[Panel]) -> str | None:
    """An SVG of panels above each other over the training's steps; None when no value is known.

    Args:
        name: unlike that of any other chart on the page.
        title: for those who hear the page.

    Raises:
        NotInstalled: matplotlib is missing.
    """
    panels = [panel for panel in panels if any(y is not None for one in panel.series for y in one.ys)]
    if not panels:
        return None
    with _figure(WIDTH, HEIGHT * (1 + 0.4 * (len(panels) - 1))) as figure:
        ratios = [3, *[1.4] * (len(panels) - 1)]
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            _draw(axis, panel, f"curve-{number}")
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        return _svg(figure, name, title)


def _draw(axis: Any, panel: Panel, gid: str) -> None:
    for place, one in enumerate(panel.series):
        ys = [float("nan") if y is None else y for y in one.ys]
        (line,) = axis.plot(one.xs, ys, "--" if one.dashed else "-", color=_colour(one.colour))
        line.set_gid(f"{gid}-{place}")
        if len(ys) == 1:
            line.set_marker("o")
    values = [y for one in panel.series for y in one.ys]
    log = panel.scale == "log" and _log(axis, "y", values)
    if panel.scale == "zero":
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{panel.unit} (log)" if log else panel.unit)


def bars(name: str, title: str, unit: str, rows: Sequence[Amount]) -> str | None:
    """An SVG of horizontal bars, the first on top; None when no value is known.

    Raises:
        NotInstalled: matplotlib is missing.
    """
    known = [row for row in rows if row.value is not None]
    if not known:
        return None
    with _figure(BARS_WIDTH, 0.75 + 0.27 * len(known)) as figure:
        axis = figure.subplots()
        places = range(len(known), 0, -1)
        log = _log(axis, "x", [row.value for row in known])
        for place, row in zip(places, known, strict=True):
            if log:  # a bar on a log scale has no beginning, so its length says nothing
                axis.plot([row.value], [place], "o", markersize=7, color=_colour(row.colour))
            else:
                axis.barh([place], [row.value], height=0.6, color=_colour(row.colour))
        axis.set_yticks(list(places), [_label(row.label) for row in known])
        axis.set_ylim(0.4, len(known) + 0.6)
        axis.set_xlabel(f"{unit} (log)" if log else unit)
        return _svg(figure, name, title)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise NotInstalled(
            "the charts of the report need matplotlib, which is not installed",
            code="missing_package",
            hint='pip install "skill-train[report]"',
        ) from None
    with rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def _log(axes: Any, which: str, values: Sequence[float | None]) -> bool:
    """A log scale where the values span many times, with plain numbers beside it. Whether it is one."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    known = [value for value in values if value is not None]
    log = min(known) > 0 and max(known) >= _SPAN * min(known)
    if log:
        axes.set(**{f"{which}scale": "log"})
        scaled = getattr(axes, f"{which}axis")
        scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scaled.set_minor_formatter(NullFormatter())
    return log


def _label(text: str) -> str:
    return re.sub(r"[^\w.+-]", "?", text)[:16]


def _colour(number: int) -> str:
    return _SERIES.format(number % COLOURS)


def _svg(figure: Any, name: str, title: str) -> str:
    """The figure as an element for a page: no declaration, no metadata, ids of its own, colours by name."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.hashsalt": name}):  # the same numbers give the same bytes
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{title}">', text, count=1)
    text = text.replace(_TEXT, "var(--text)").replace(_GRID, "var(--grid)")
    for number in range(COLOURS):
        text = text.replace(_colour(number), f"var(--series-{number})")
    return re.sub(r"\n\s*", "\n", text)
