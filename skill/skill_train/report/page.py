"""Renders the page from the views and the charts. All text of a run is escaped."""

from __future__ import annotations

import json

from skill_train.core import resources
from skill_train.core.errors import NotInstalled
from skill_train.report.charts import COLOURS
from skill_train.report.views import RunView, SharedView


def page(runs: list[RunView], shared: SharedView) -> str:
    """One HTML document that loads nothing.

    Args:
        runs: the result of `sections.run_view` for each run.
        shared: what is on the page once. The `svg` of a chart is inserted unchanged.

    Raises:
        NotInstalled: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise NotInstalled(
            "the page of the report needs jinja2, which is not installed",
            code="missing_package",
            hint='pip install "skill-train[report]"',
        ) from None
    folder = resources.report()
    templates = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    templates.filters["figure"] = lambda value: json.dumps(value, ensure_ascii=False)
    style = Markup((folder / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - ours
    for chart in (*shared["curves"], *shared["comparison"]):
        chart["svg"] = Markup(chart["svg"])  # noqa: S704 - drawn from numbers alone
    return templates.get_template("page.html").render(runs=runs, style=style, colours=COLOURS, **shared) + "\n"
