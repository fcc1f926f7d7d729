"""What a person sees: the same figures as the JSON answer, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skill_train.core.console import clean
from skill_train.core.units import dollars
from skill_train.plan.where import duration

_STYLE = {"pass": "green", "ok": "green", "warn": "yellow", "fail": "red"}


def draw_checks(rich: Any, title: str, checks: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("check", "verdict", "figure", "detail"):
        table.add_column(column, overflow="fold")
    for check in checks:
        cells = (check["name"], check["verdict"], _figure(check["figure"]), str(check["detail"]))
        table.add_row(*(clean(cell) for cell in cells), style=_STYLE[check["verdict"]])
    rich.print(table)


def draw_smoke(rich: Any, data: dict[str, Any]) -> None:
    """The verdict of a training run, one row as it was fed, and one prompt answered before and after."""
    draw_checks(rich, f"smoke test: {data['verdict']}", data["checks"])
    rich.print(clean("one row as it was fed, ⟦trained parts⟧ marked:\n" + data["example"][:600]), markup=False)
    rich.print(clean("prompt: " + data["answer"]["prompt"][-300:]), markup=False)
    for when in ("before", "after"):
        answer = data["answer"][when]
        rich.print(clean(f"{when}: {'not measured' if answer is None else repr(answer[:200])}"), markup=False)


def draw_proof(rich: Any, record: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"proof: {record['verdict']}", title_justify="left")
    for column in ("file", "check", "verdict", "figure", "threshold"):
        table.add_column(column, overflow="fold")
    for check in record["checks"]:
        cells = (
            str(check["file"]),
            check["name"],
            check["verdict"],
            _figure(check["figure"]),
            _figure(check["threshold"]),
        )
        table.add_row(*(clean(cell) for cell in cells), style=_STYLE[check["verdict"]])
    rich.print(table)
    for check in record["checks"]:
        if check["verdict"] != "pass":
            rich.print(clean(f"{check['file']} {check['name']}: {check['detail']}"), markup=False)


def files_table(listed: list[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(rich: Any) -> None:
        from rich.table import Table

        table = Table("file", "type", "bytes", "sha256", title_justify="left")
        for file in listed:
            table.add_row(file["path"], file["quant"], f"{file['bytes']:,}", file["sha256"][:12])
        rich.print(table)

    return draw


def _figure(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "")
    return text if len(text) <= 40 else text[:12] + "…"  # a digest


def draw_evaluation(rich: Any, data: dict[str, Any]) -> None:
    """Figures of each model, their differences with intervals, and a few answers side by side."""
    from rich.table import Table

    said = f"{data['rows']} held-out rows, {data['answer_tokens']:,} trained tokens, {data['asked']} questions"
    rich.print(clean(said), markup=False)
    names = ["loss", "perplexity", "exact_match", *(["score"] if data["score"] else []), "tokens_per_second"]
    models = Table(title_justify="left")
    models.add_column("model", overflow="fold")
    models.add_column("by", no_wrap=True)
    for name in names:
        models.add_column({"exact_match": "exact match", "tokens_per_second": "tokens/s"}.get(name, name))
    for one in data["models"]:
        figures = (_share(one[name]) if name == "exact_match" else _figure(one[name]) for name in names)
        device = "" if one["device"] in ("cpu", "") else f" on {one['device']}"
        _add(models, one["name"], one["backend"] + device, *figures)
    rich.print(models)
    for one in data["models"]:
        if one["reason"]:
            rich.print(clean(f"{one['name']} was not measured: {one['reason']}"), markup=False)
    _draw_differences(rich, data["differences"])
    for row in data["answers"]:
        rich.print(clean(f"line {row['line']}: {row['prompt'].strip()}"), markup=False)
        for name, text in {"expected": row["expected"], **row["answers"]}.items():
            rich.print(clean(f"  {name}: {text}"), markup=False)


def _draw_differences(rich: Any, differences: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("model - against", "in", "difference (95 % interval)", "says", title_justify="left")
    for one in differences:
        figure = f"{one['difference']:+.3g} ({one['low']:+.3g} to {one['high']:+.3g})"
        style = {"better": "green", "worse": "yellow"}.get(one["says"].partition(",")[0])
        pair = f"{one['model']} - {one['against']}"
        _add(table, pair, one["measure"].replace("_", " "), figure, one["says"], style=style)
    rich.print(table)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def draw_stages(rich: Any, table: list[dict[str, Any]]) -> None:
    from rich.table import Table

    rows = table[0]["rows"]
    drawn = Table("stage", "size", f"exact match ({rows} held out)", "KL to trained", "tokens/s", "verdict")
    for row in table:
        kl = "" if row["mean_kl"] is None else f"{row['mean_kl']:.1e}"
        speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        cells = (row["stage"], f"{row['bytes'] / 1e6:.2f} MB", f"{row['exact_match']:.1%}", kl, speed)
        drawn.add_row(*cells, row["verdict"] or "")
    rich.print(drawn)


def draw_doctor(rich: Any, data: dict[str, Any]) -> None:
    """Checks, the remedy of each that is not ok, what this installation can do, and the stages of the self-test."""
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "verdict", "found", title=f"this installation: {data['verdict']}", title_justify="left")
    for check in data["checks"]:
        cells = (check["name"], check["verdict"], check["found"])
        table.add_row(*(Text(clean(cell)) for cell in cells), style=_STYLE[check["verdict"]])
    rich.print(table)
    for check in data["checks"]:
        if check["verdict"] != "ok":
            said = [check.get("because", ""), f"mend it with: {check['fix']}" if "fix" in check else ""]
            rich.print(clean(f"{check['name']}: " + "; ".join(filter(None, said))), markup=False, soft_wrap=True)
    for name, able in data["able"].items():
        word = {True: "yes", False: "no", None: "not known"}[able]
        reason = f" ({data['not_able'][name]})" if name in data["not_able"] else ""
        rich.print(clean(f"{name}: {word}{reason}"), markup=False)
    if "self_test" in data:
        _draw_self_test(rich, data["self_test"])


def _draw_self_test(rich: Any, figures: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("stage", "verdict", "seconds", title=f"self-test: {figures['verdict']}", title_justify="left")
    for stage in figures["stages"]:
        table.add_row(stage["stage"], stage["verdict"], str(stage.get("seconds", "")), style=_STYLE[stage["verdict"]])
    rich.print(table)
    rich.print(f"{figures['seconds']} s in all")


def draw_submit(rich: Any, data: dict[str, Any]) -> None:
    """A job that was started or would be: where, what it costs, what leaves this machine."""
    cost = data["cost_usd"]
    estimate = "not known" if cost["low"] is None else f"{dollars(cost['low'])} to {dollars(cost['high'])}"
    most = "" if cost["most"] is None else f"; at most {dollars(cost['most'])}, at its timeout"
    limit = data["timeout_seconds"]
    stopped = "a time that is not known" if limit is None else f"{limit / 3600:.2f} h"
    lines = [f"job: {data['job_id']}, {data['stage']}, {data['url']}"] if "job_id" in data else []
    lines += [f"run directory: {data['run_dir']}"] if "run_dir" in data else []
    lines += [
        f"machine: {data['flavor']} of {data['namespace']}, stopped after {stopped}",
        f"cost: {estimate}{most} ({cost['basis']})",
        f"result: the private repository {data['hub_model_id']}, which the job makes",
    ]
    end = data.get("expected_end", {"low": None})
    lines += [f"expected end: {end['low']} to {end['high']}"] if end["low"] is not None else []
    for upload in data["uploads"]:
        if upload["what"] == "result":
            continue
        size = f"{upload['bytes'] / 1e6:.2f} MB" + (f" in {upload['files']} files" if upload["files"] > 1 else "")
        lines.append(f"upload: {upload['what']} {upload['name']}, {size}, to {upload['to']}")
    for line in lines:
        rich.print(clean(line), markup=False, soft_wrap=True)


def draw_rehearsal(rich: Any, data: dict[str, Any]) -> None:
    lines = [
        f"rehearsal: {data['verdict']}, {data['steps']} steps in {data['seconds']} s, {data['kept_files']} files kept"
    ]
    lines += [f"not rehearsed: {text}" for text in data["not_rehearsed"]]
    for line in lines:
        rich.print(clean(line), markup=False, soft_wrap=True)


def draw_data(rich: Any, data: dict[str, Any]) -> None:
    """What a dataset is, who can use it, what is wrong with it, how long its rows are, and one of them."""
    from rich.table import Table

    said = f"{data['rows']:,} rows, columns {', '.join(f'{name} ({kind})' for name, kind in data['columns'].items())}"
    rich.print(clean(f"{data['path']}: {said}"), markup=False)
    verdicts = Table("method", "verdict", "because", "recipe lines", title_justify="left")
    colours = {"ready": "green", "needs_mapping": "yellow", "impossible": "red"}
    for name, verdict in data["methods"].items():
        cells = (name, verdict["verdict"], verdict["because"], "\n".join(verdict["recipe"]))
        verdicts.add_row(*(clean(cell) for cell in cells), style=colours[verdict["verdict"]])
    rich.print(verdicts)
    rich.print(clean(data["note"]), markup=False)
    _draw_problems(rich, data)
    if data["tokens"] is not None:
        _draw_tokens(rich, data["tokens"])
    rich.print(clean("one row, ⟦trained parts⟧ marked:\n" + data["example"][:600]), markup=False)
    if "fix" in data:
        left_out = ", ".join(f"{count} {kind}" for kind, count in data["fix"]["left_out"].items()) or "none"
        rich.print(clean(f"{data['fix']['path']}: {data['fix']['rows']:,} rows; left out: {left_out}"), markup=False)


def _draw_problems(rich: Any, data: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("problem", "rows", "training refuses", "lines", "first", title_justify="left")
    for name, count in data["problems"].items():
        if count is None:
            table.add_row(name, "unknown", "", "", clean(data["unknown"].get(name, "")), style="dim")
        elif count["rows"]:
            share = f"{count['rows']:,}" + (f" of {count['of_rows']:,}" if "of_rows" in count else "")
            lines = ", ".join(map(str, count["lines"]))
            cells = (name, share, f"{count['refused']:,}", lines, clean(count["first"]))
            table.add_row(*cells, style="red" if count["refused"] else "yellow")
    rich.print(table)


def _draw_tokens(rich: Any, tokens: dict[str, Any]) -> None:
    from rich.table import Table

    names = ("mean", "p50", "p90", "p99", "longest", "trained_share", "truncated_share")
    figures = ", ".join(f"{name} {tokens[name]}" for name in names if tokens.get(name) is not None)
    rich.print(clean(f"tokens a row ({tokens['basis']}): {figures}; max_length {tokens['max_length']}"), markup=False)
    if "histogram" in tokens:
        table, most = Table("tokens", "rows", ""), max(bucket["rows"] for bucket in tokens["histogram"])
        for bucket in tokens["histogram"]:
            table.add_row(f"up to {bucket['up_to']:,}", f"{bucket['rows']:,}", "█" * -(-30 * bucket["rows"] // most))
        rich.print(table)


def draw_plan(rich: Any, data: dict[str, Any]) -> None:
    """Where and why, then memory and time with their parts, money, and what each file will need."""
    from rich.table import Table

    where = data["where"] + (f" ({data['flavor']})" if data["flavor"] else "")
    rules = Table(title=clean(f"train: {where}"), title_justify="left")
    rules.add_column("rule", no_wrap=True)
    rules.add_column("says", overflow="fold", max_width=24)
    rules.add_column("because (source)", overflow="fold")
    for reason in data["reasons"]:
        _add(rules, reason["rule"], reason["value"], f"{reason['because']} ({reason['source']})")
    rich.print(rules)
    for blocker in data["blockers"]:
        rich.print(clean(f"blocked: {blocker['message']}"), style="red", markup=False)
    rich.print(_figures(data))
    if data["flavors"]:
        rich.print(_flavors(data["flavors"], data["prices"]))
    if "actual" in data:
        rich.print(_actual(data["actual"]))


def _figures(data: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("what", "from", "to", "because", title_justify="left")
    for part in data["memory_parts"]:
        _add(table, part["name"], _bytes(part["low"]), _bytes(part["high"]), part["because"])
    _add(table, "memory", *_ends(data["memory_bytes"], _bytes), style="bold", end_section=True)
    for part in data["seconds_parts"]:
        _add(table, part["name"], _time(part["low"]), _time(part["high"]), part["because"])
    _add(table, "time", *_ends(data["seconds"], _time), style="bold", end_section=True)
    _add(table, "cost", *_ends(data["cost_usd"], dollars), end_section=True)
    for name in ("merge", "convert", "verify", "disk"):
        _add(table, f"{name} {'space' if name == 'disk' else 'memory'}", *_ends(data[f"{name}_bytes"], _bytes))
    for file in data["files"]:
        _add(table, f"{file['quant']} file", *_ends(file["bytes"], _bytes))
        _add(table, f"{file['quant']} tokens/s here", *_ends(file["tokens_per_second"], lambda rate: f"{rate:,.0f}"))
    return table


def _flavors(offers: list[dict[str, Any]], prices: dict[str, str] | None) -> Any:
    from rich.table import Table

    whose = clean(f"prices of {prices['source']}, {prices['read_at']}") if prices else None
    table = Table("in the cloud", "time", "cost", caption=whose, caption_justify="left")
    for offer in offers:
        (fast, slow), (low, high) = offer["seconds"], offer["cost_usd"]
        _add(table, offer["flavor"], f"{_time(fast)} to {_time(slow)}", f"{dollars(low)} to {dollars(high)}")
    return table


def _actual(figures: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("finished run", "estimated", "measured", "inside the range", title_justify="left")
    for name, both in figures.items():
        shown, word = (_bytes, "memory") if name == "memory_bytes" else (_time, "time")
        ends = [both["low"], both["high"]]
        estimated = "unknown" if None in ends else " to ".join(map(shown, ends))
        measured = "unknown" if both["actual"] is None else shown(both["actual"])
        _add(table, word, estimated, measured, {True: "yes", False: "no", None: "unknown"}[both["within"]])
    return table


def _add(table: Any, *cells: str, **options: Any) -> None:
    """A row whose cells are text and never markup."""
    from rich.text import Text

    table.add_row(*(Text(clean(cell)) for cell in cells), **options)


def _ends(value: dict[str, Any], shown: Any) -> tuple[str, str, str]:
    if value["low"] is None:
        return "unknown", "unknown", value["basis"]
    return shown(value["low"]), shown(value["high"]), value["basis"]


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 5400
        else f"{seconds / 60:.1f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


def draw_status(rich: Any, data: dict[str, Any]) -> None:
    """A run in one look: a line for each thing that is known."""
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar

    for name, value in _status_lines(data):
        if value:
            rich.print(clean(f"{name:<10}{value}"), markup=False, soft_wrap=True)
        if value and name == "step" and rich.is_terminal:
            rich.print(Padding(ProgressBar(total=data["steps"], completed=data["step"], width=40), (0, 0, 0, 10)))


def _status_lines(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    seconds, cost, progress = data["seconds"], data.get("cost_usd") or {}, data["progress"]
    said = f": {data['message']}" if data.get("message") else ""
    yield "stage", f"{data['stage']}{said}"
    yield "job", " · ".join(str(part) for part in (data["job_id"], data.get("flavor"), data.get("url")) if part)
    loss = "" if data["loss"] is None else f" · loss {data['loss']:.4f}"
    speed = "" if data["tokens_per_second"] is None else f" · {data['tokens_per_second']:,.0f} tokens/s"
    yield "step", "" if data["step"] is None else f"{data['step']} of {data['steps']}{loss}{speed}"
    age = progress["age_seconds"]
    yield "from", (progress["source"] or "") + ("" if age is None else f", {duration(age)} old")
    yield "time", _of(seconds.get("ran"), seconds.get("expected"), seconds.get("estimated"), duration)
    left = seconds.get("left")
    yield "left", "" if left is None else f"about {duration(left)}"
    in_all = cost.get("all_jobs")
    before = f"; {dollars(in_all)} with the jobs before it" if in_all is not None and data.get("attempt", 1) > 1 else ""
    yield "cost", _of(cost.get("so_far"), cost.get("expected"), cost.get("estimated"), dollars) + before
    yield "ends by", data.get("ends_by") or ""
    yield "waiting", data.get("waiting") or ""
    why = data["why"] or {}
    yield "why", why.get("message", "")
    yield "helps", why.get("help", "")


def _of(so_far: Any, expected: Any, estimated: Any, words: Callable[[float], str]) -> str:
    """So much of so much, beside what was estimated."""
    if so_far is None:
        return ""
    of = "" if expected is None else f" of {words(expected)}"
    known = estimated and estimated["low"] is not None
    return (
        words(so_far) + of + (f" (estimated {words(estimated['low'])} to {words(estimated['high'])})" if known else "")
    )


def draw_cancelled(rich: Any, data: dict[str, Any]) -> None:
    there = data["kept"]
    step = "" if not there or there["checkpoint"] is None else f"a checkpoint of step {there['checkpoint']}"
    what = "the whole result" if there and there["state"] == "done" else step or "nothing"
    rich.print(clean(f"{data['job_id']}: {data['stage']}; kept: {what}"), markup=False)


def draw_pulled(rich: Any, data: dict[str, Any]) -> None:
    what = "trained" if data["trained"] else f"unfinished, checkpoint {data['checkpoint']}"
    size = sum(file["bytes"] for file in data["files"])
    told = f"{data['run_dir']}: {what}; {len(data['files'])} files, {size / 1e6:.1f} MB, {data['fetched']} of them new"
    draw_line(rich, told)


def draw_line(rich: Any, text: str) -> None:
    rich.print(clean(text), markup=False, soft_wrap=True)
