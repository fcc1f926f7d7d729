"""Writes one HTML file about one run, or about several side by side, from the JSON files of their folders.

Each call writes the whole page again, because everything in it comes from the run directories. The page loads and runs
nothing, so it can be sent to somebody as a single file. All text of a run is escaped.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from skill_train.core import resources
from skill_train.core.console import Bar, Warn
from skill_train.core.digests import is_file_of
from skill_train.core.errors import UsageError, not_installed, quoted, system_error
from skill_train.core.files import write_text
from skill_train.recipe.fields import to_yaml
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.report.artifacts import missing
from skill_train.report.charts import COLOURS, Amount, Panel, Series, bars, curves
from skill_train.report.demo_record import Demo
from skill_train.report.figure import ReportedRun
from skill_train.report.quality import sensitive, worse_than_blind
from skill_train.report.same_run import same
from skill_train.report.sections import curve, differences, overview, run_view, verdict
from skill_train.report.thumbnails import MOST_CHARACTERS, shown_pictures
from skill_train.report.views import ChartView, MissingPart, RunView, SameView, SharedView
from skill_train.report.words import placeless
from skill_train.run import (
    cloud_record,
    compare_runs,
    evaluate_record,
    plan_record,
    records,
    train_record,
    verify_record,
)
from skill_train.run.earlier_start import require_as_trained
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import RunDir
from skill_train.run.merge_record import MergeRecord
from skill_train.run.records import Record
from skill_train.run.train_record import Environment, TrainFailure, TrainRecord

_DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "train": TrainRecord, "train.failed": TrainFailure, "environment": Environment, "merge": MergeRecord,
    "convert": ExportRecord, "quantize": ExportRecord, "mmproj": ExportRecord,
    "lora_gguf": ExportRecord,
}  # fmt: skip
_Compared = Literal["bytes", "mean_kl", "speed"]
_OURS = '<meta name="generator" content="skill-train report">'
_SHALLOW = 2  # paths with so few parts, such as `/home` and `/tmp`, say nothing about this machine
_HEAD = 2000  # bytes at the start of a file that are searched for the mark


class RunHeadline(TypedDict):
    """The verdict of a run, the missing parts, and the next command, or None. These commands have the path of the run.
    The commands on the page, which may be sent to somebody, have only the name of its folder."""

    run: str
    word: str
    headline: str
    missing: list[MissingPart]
    next: str | None


class Report(TypedDict):
    """The page that was written, the verdict of each run, and the differences between the first run and each other
    run."""

    report: str
    bytes: int
    runs: list[RunHeadline]
    same: list[SameView]


def report(runs: list[RunDir], *, out: Path, progress: Bar, warn: Warn, base_may_know: tuple[Path, ...] = ()) -> Report:
    """Writes the page; the file is complete or unchanged.

    Args:
        warn: gets a code and a sentence for what a reader of the answer must know of the page.
        base_may_know: runs whose base may have been trained on their held-out rows.

    Raises:
        UsageError: `out` exists and is not a report, or skill-train did not write a record of a run.
        NotInstalled: matplotlib or jinja2 is missing.
    """
    _require_ours(out)
    read = [reported_run(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    progress(1, 3, "drawing")
    try:
        read = [run.without_outdated() for run in read]
        room = MOST_CHARACTERS // len(runs)
        read = [
            dataclasses.replace(
                _on_disk(run, reported),
                pictures=shown_pictures(run, reported.evaluation, room),
                base_may_know=run.path in base_may_know,
            )
            for run, reported in zip(runs, read, strict=True)
        ]
        views, overviews = [run_view(run) for run in read], [overview(run) for run in read]
        shared: SharedView = {
            "overview": [(rows[0][0], [figures for _, figures in rows]) for rows in zip(*overviews, strict=True)],
            "differences": differences(read),
            "same": _same_run_views(runs, read),
            "curves": _curves(read),
            "comparison": _comparison(views),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"a record of {', '.join(run.name for run in read)} is not valid",
            code="broken_record",
            expected="the unchanged records of the run",
            got=f"{type(error).__name__}: {error}",
            hint="move the changed record away, and run its step again",
        ) from error
    progress(2, 3, "writing")
    html = page(views, shared)
    try:
        write_text(out, html)
    except OSError as error:
        refusal = system_error(error)
        refusal.hint += ", or use another --out"
        raise refusal from None
    progress(3, 3, str(out))
    for run, view in zip(read, views, strict=True):
        if blind := worse_than_blind(run, of_base=False):
            warn("blind", f"{run.name}: {blind}")
        for model in run.evaluation.perhaps_trained if run.evaluation is not None else ():
            warn("file_trained", f"{model} is of another run, which may have trained on some of these rows")
        if view["answers"] is not None and (private := sensitive(run)):
            warn("sensitive_rows", f"{run.name}: {private}")
    headlines = [_headline(dataclasses.replace(one, call=str(run.path))) for run, one in zip(runs, read, strict=True)]
    return {"report": str(out), "bytes": out.stat().st_size, "runs": headlines, "same": shared["same"]}


def _headline(run: ReportedRun) -> RunHeadline:
    answer, lacks = verdict(run), missing(run)
    again = answer["next"] if run.proof and answer["word"] == "fail" else ""  # the proof is of other files
    following = again or (lacks[0]["command"] if lacks else None)
    return {
        "run": run.name, "word": answer["word"], "headline": answer["headline"], "missing": lacks, "next": following,
    }  # fmt: skip


def _on_disk(run: RunDir, reported: ReportedRun) -> ReportedRun:
    """The run with its verified files that were replaced or are gone. The merged model is not read, because users run
    its GGUF files."""
    if reported.proof is None:
        return reported
    inputs, outputs = reported.proof.inputs, reported.exported() | reported.projectors()
    adapter = inputs.adapter if isinstance(inputs.adapter, Mapping) else {}
    files = {run.gguf / name: digest for name, digest in inputs.ggufs.items()}
    files |= {run.adapter / name: digest for name, digest in adapter.items()}
    replaced = [file.name for file, digest in files.items() if file.is_file() and not is_file_of(file, digest)]
    gone = [name for name in outputs if not (run.gguf / name).is_file()]
    named = {*inputs.ggufs, *outputs, *(one[0] for one in inputs.unread if one)}
    strange = [file.name for file in run.exported if file.name not in named]
    return dataclasses.replace(reported, replaced=tuple(replaced), gone=tuple(gone), strange=tuple(strange))


def _require_ours(out: Path) -> None:
    if out.is_dir():
        raise UsageError(
            f"{out} is a folder", code="bad_usage", expected="a file", hint=f"--out {quoted(out / 'report.html')}"
        )
    if out.exists() and _OURS not in out.read_bytes()[:_HEAD].decode("utf-8", errors="replace"):
        raise UsageError(
            f"{out} already exists and is not a report",
            code="output_exists",
            expected="a new file, or a report to replace",
            got=str(out),
            hint="use another --out",
        )


def _names(runs: list[RunDir]) -> list[str]:
    """The names of the runs' folders. Equal names get numbers."""
    plain = [run.path.resolve().name for run in runs]
    names = list[str]()
    for name in plain:
        numbered = (f"{name} ({number})" for number in itertools.count(1))
        free = (other for other in numbered if other not in plain and other not in names)
        names.append(name if plain.count(name) == 1 else next(free))
    return names


def reported_run(run: RunDir, name: str) -> ReportedRun:
    """The records of a run, without paths of this machine.

    Raises:
        UsageError: a record is not as its step wrote it, or the recipe, steps or rows are not those of the training.
    """
    documents, plan = _documents(run), plan_record.read(run.plan)
    if run.record("train").is_file():
        record = train_record.read(run.record("train"))
        require_as_trained(run, record, [name for name in record.outputs if (run.path / name).parent == run.path])
    texts = {"recipe.yaml": to_yaml(plan.recipe_file())}  # the user may have edited the file in the folder
    if (run.gguf / "Modelfile").is_file():
        texts["Modelfile"] = (run.gguf / "Modelfile").read_text(encoding="utf-8", errors="replace")
    places = _places(run, plan.recipe)
    call = name if run.path.is_absolute() else str(run.path)
    return ReportedRun(
        name=placeless(name, []),
        call=call,
        documents=placeless(documents, places),
        metrics=train_record.read_steps(run.metrics),
        texts=placeless(texts, places),
        proof=_placeless(_record(run.record("verify"), verify_record.read), places),
        evaluation=_placeless(_record(run.record("evaluate"), evaluate_record.read), places),
        demo=_placeless(_record(run.record("demo"), partial(records.read, kind=Demo)), places),
        cloud=_placeless(cloud_record.read(run), places),
    )


def _record(path: Path, read: Callable[[Path], Record]) -> Record | None:
    return read(path) if path.is_file() else None


def _placeless(record: Record | None, places: list[str]) -> Record | None:
    return record and msgspec.convert(placeless(msgspec.to_builtins(record), places), type(record))


def _documents(run: RunDir) -> dict[str, Mapping[str, object]]:
    """The records as plain JSON, because each figure on the page names its place in the file. Each record is first
    checked by reading it as its own class."""
    paths = {name: run.record(name) for name in _DOCUMENTS if run.record(name).is_file()}
    documents = {name: msgspec.to_builtins(records.read(path, _DOCUMENTS[name])) for name, path in paths.items()}
    return documents | {"plan": plan_record.read(run.plan).as_dict()}


def _same_run_views(runs: list[RunDir], reported: list[ReportedRun]) -> list[SameView]:
    """The comparison of the first run with each other run. It compares the unchanged files; the result has no paths of
    this machine."""
    read = [compare_runs.read_run(run) for run in runs]
    measured = [None if run.evaluation is None else run.evaluation.inputs.rows for run in reported]
    views = [
        same((reported[0].name, run.name), compare_runs.compare(read[0], other), (measured[0], rows))
        for run, other, rows in zip(reported[1:], read[1:], measured[1:], strict=True)
    ]
    places = [place for run, other in zip(runs, read, strict=True) for place in _places(run, other.plan.recipe)]
    placeless_views: list[SameView] = placeless(views, places)
    return placeless_views


def _places(run: RunDir, recipe: ResolvedRecipe) -> list[str]:
    """Paths of this machine and of the machine that planned, with their parent folders. Names may contain spaces."""
    paths = (Path(recipe.model), Path(recipe.data), run.path.resolve(), Path.cwd(), Path.home())
    absolute = [path for path in paths if path.is_absolute()]
    return [str(place) for path in absolute for place in (path, *path.parents) if len(place.parts) > _SHALLOW]


def _curves(runs: list[ReportedRun]) -> list[ChartView]:
    """The charts that have values: loss above the learning rate, gradient norm, tokens a second, and memory."""

    def series(name: str, kind: str = "", *, scale: float = 1.0, dashed: bool = False) -> list[Series]:
        points = [curve(run.metrics, name, kind) for run in runs]
        curves_of_runs = []
        for number, (xs, ys) in enumerate(points):
            scaled = [None if y is None else y * scale for y in ys]
            curves_of_runs.append(Series(number, xs, scaled, dashed or number >= COLOURS))
        return _apart(curves_of_runs)

    kinds = dict.fromkeys(kind for run in runs for line in run.metrics for kind in line.memory_bytes or {})
    several = len(kinds) > 1  # the memory of the process and of a device
    memory = [s for kind in kinds for s in series("memory_bytes", kind, scale=1e-9, dashed=several and kind == "rss")]
    aside = ", that of the process dashed" if several else ""
    loss = [Panel("loss", series("loss"), "log"), Panel("rate", series("learning_rate"), "free")]
    drawn = (
        ("loss", "Loss, and the learning rate below it", loss),
        ("gradient", "Gradient norm", [Panel("norm", series("grad_norm"), "log")]),
        ("speed", "Training speed", [Panel("tokens/s", series("tokens_per_second"))]),
        ("memory", f"Memory in use{aside}", [Panel("GB", memory)]),
    )
    return _charts((name, title, curves(name, title, panels)) for name, title, panels in drawn)


def _apart(series: list[Series]) -> list[Series]:
    """The curves. A curve that equals an earlier one is dashed, so that both can be seen."""
    drawn: list[Series] = []
    for line in series:
        coincides = bool(line.xs) and any((line.xs, line.ys) == (earlier.xs, earlier.ys) for earlier in drawn)
        drawn.append(dataclasses.replace(line, dashed=True) if coincides else line)
    return drawn


def _comparison(views: list[RunView]) -> list[ChartView]:
    """Bar charts of size, distance and speed of each file, in the order of the table."""
    drawn: tuple[tuple[str, str, str, _Compared, float], ...] = (
        ("size", "Size: smaller is easier to ship", "MB", "bytes", 1e-6),
        ("nearness", "KL to what was trained: smaller is nearer", "nats", "mean_kl", 1.0),
        ("answers", "Speed of answering, one prompt at a time", "tokens/s", "speed", 1.0),
    )
    return _charts(
        (name, title, bars(name, title, unit, _bars(views, key, scale))) for name, title, unit, key, scale in drawn
    )


def _bars(views: list[RunView], key: _Compared, scale: float) -> list[Amount]:
    files = [(number, file) for number, view in enumerate(views) for file in view["files"]]
    files.sort(key=lambda pair: -(pair[1]["bytes"].value or 0))
    values = [(number, file["quant"], file[key].value) for number, file in files]
    return [Amount(quant, number, None if value is None else value * scale) for number, quant, value in values]


def _charts(drawn: Iterable[tuple[str, str, str | None]]) -> list[ChartView]:
    return [{"name": name, "title": title, "svg": svg} for name, title, svg in drawn if svg is not None]


def page(runs: list[RunView], shared: SharedView) -> str:
    """One HTML document that loads nothing.

    Args:
        runs: the result of `sections.run_view` for each run.
        shared: the parts that are on the page once. The `svg` of a chart is inserted unchanged.

    Raises:
        NotInstalled: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise not_installed("jinja2", "report") from None
    folder = resources.report()
    templates = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    templates.filters["figure"] = lambda value: json.dumps(value, ensure_ascii=False)
    style = Markup((folder / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - ours
    for chart in (*shared["curves"], *shared["comparison"]):
        chart["svg"] = Markup(chart["svg"])  # noqa: S704 - drawn from numbers alone
    return templates.get_template("page.html").render(runs=runs, style=style, colours=COLOURS, **shared) + "\n"
