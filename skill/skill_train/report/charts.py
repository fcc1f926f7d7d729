"""The curves and the comparison of files as SVG, drawn by matplotlib.

The SVG has no colours; the page's style sheet has them, for light, dark and paper. Of the model and the data a chart
contains only numbers and the names of quantization types.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from skill_train.core.errors import not_installed

COLOURS = 8  # colours of the style sheet; further series reuse them, dashed
# Inches of 72 units: the text is still readable if a phone shows the whole chart.
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
    """One curve, with a gap at each value of None. `colour` is the number of the curve's run."""

    colour: int
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over the same steps."""

    unit: str
    series: Sequence[Series]
    # `zero` begins at zero. `log` is logarithmic if the values span a wide range. `free` fits the values.
    scale: Literal["zero", "log", "free"] = "zero"


@dataclass(frozen=True)
class Amount:
    """One file in the comparison. `label` is its type. A file with the value None is not drawn."""

    label: str
    colour: int
    value: float | None


def curves(name: str, title: str, panels: Sequence[Panel]) -> str | None:
    """An SVG of panels, one above the other, with the training's steps as the x axis; None when no value is known.

    Args:
        name: unique among the charts on the page.
        title: for screen readers.

    Raises:
        NotInstalled: matplotlib is missing.
    """
    panels = [panel for panel in panels if any(y is not None for series in panel.series for y in series.ys)]
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
    for place, series in enumerate(panel.series):
        ys = [float("nan") if y is None else y for y in series.ys]
        (line,) = axis.plot(series.xs, ys, "--" if series.dashed else "-", color=_colour(series.colour))
        line.set_gid(f"{gid}-{place}")
        if len(ys) == 1:
            line.set_marker("o")
    values = [y for series in panel.series for y in series.ys]
    log = panel.scale == "log" and _log(axis, "y", values)
    if panel.scale == "zero":
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{panel.unit} (log)" if log else panel.unit)


def bars(name: str, title: str, unit: str, rows: Sequence[Amount]) -> str | None:
    """An SVG of horizontal bars, the first on top; None when no value is known.

    Raises:
        NotInstalled: matplotlib is missing.
    """
    drawn = [row for row in rows if row.value is not None]
    if not drawn:
        return None
    with _figure(BARS_WIDTH, 0.75 + 0.27 * len(drawn)) as figure:
        axis = figure.subplots()
        places = range(len(drawn), 0, -1)
        log = _log(axis, "x", [row.value for row in drawn])
        for place, row in zip(places, drawn, strict=True):
            if log:  # a bar on a log scale has no beginning, so its length means nothing
                axis.plot([row.value], [place], "o", markersize=7, color=_colour(row.colour))
            else:
                axis.barh([place], [row.value], height=0.6, color=_colour(row.colour))
        axis.set_yticks(list(places), [re.sub(r"[^\w.+-]", "?", row.label)[:16] for row in drawn])
        axis.set_ylim(0.4, len(drawn) + 0.6)
        axis.set_xlabel(f"{unit} (log)" if log else unit)
        return _svg(figure, name, title)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("matplotlib", "report") from None
    with rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def _log(axes: Any, which: str, values: Sequence[float | None]) -> bool:
    """Sets a log scale with plain numbers if the values span a wide range. Returns whether it did."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    present = [value for value in values if value is not None]
    log = min(present) > 0 and max(present) >= _SPAN * min(present)
    if log:
        axes.set(**{f"{which}scale": "log"})
        scaled = getattr(axes, f"{which}axis")
        scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scaled.set_minor_formatter(NullFormatter())
    return log


def _colour(number: int) -> str:
    return _SERIES.format(number % COLOURS)


def _svg(figure: Any, name: str, title: str) -> str:
    """The figure as an `<svg>` element, without metadata. Ids begin with `name`, and colours are CSS variables."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": name}):  # the same numbers give the same bytes
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{title}">', text, count=1)
    text = text.replace(_TEXT, "var(--text)").replace(_GRID, "var(--grid)")
    for number in range(COLOURS):
        text = text.replace(_colour(number), f"var(--series-{number})")
    return re.sub(r"\n\s*", "\n", text)
