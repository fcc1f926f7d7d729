"""Runs every measurement that needs no GPU inside a time budget, prints each target, and writes the page.

    python bench/run.py                    all of them: `make bench`
    python bench/run.py --only merge       some, with commas
    python bench/run.py --large            also 1.5B, 3B and 7B: about 60 GB of disk, and an hour
    python bench/run.py --page             only write README.md from the results that are there
    python bench/run.py --targets          only print the targets of the results that are there

A measurement is a folder with `measure.py`, which writes `results.json` beside itself. Three are not run here, because
they train for an hour or more, and their own pages say how: `estimates` trains 38 configurations, `pixels` 18 models,
and `quantize` a model of 10M weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
MARKS = ("<!-- generated:results -->", "<!-- /generated:results -->")
BUDGET_SECONDS = 1740  # of all together, so that `make bench` ends within 30 minutes
AT_LEAST = {"training": 1150}  # seconds that all its rounds took in a slow hour of a shared machine; else one round
ELSEWHERE = ("estimates", "pixels", "quantize")
LARGE = {"merge": "1.5B,3B,7B", "export": "1.5B,3B", "verify": "1.5B,3B"}
# In the tables: what is measured comes first, and what a reader can look up in results.json is left out.
_FIRST = ("size", "what", "name", "command")
_LEFT_OUT = ("parameters", "rounds", "reason", "why")
_VERDICTS = {True: "met", False: "**not met**", None: "not measured"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="folders, with commas")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help=f"seconds for all ({BUDGET_SECONDS})")
    parser.add_argument("--large", action="store_true", help="also the large models; the budget does not hold then")
    parser.add_argument("--page", action="store_true", help="measure nothing, write README.md")
    parser.add_argument("--targets", action="store_true", help="measure nothing, print the targets")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else benches()
    failed = [] if options.page or options.targets else run_all(wanted, options.budget, options.large)
    if not options.targets:
        write_page()
    for line in target_lines():
        print(line)
    for name in failed:
        print(f"{name}: not measured now, its results are earlier ones")
    return 1 if failed else 0


def benches() -> list[str]:
    """Folders with a program to run, the quickest first."""
    order = ("startup", "data", "merge", "export", "verify", "training", "gpu")
    found = {path.parent.name for path in HERE.glob("*/measure.py")} - set(ELSEWHERE)
    return [name for name in order if name in found] + sorted(found - set(order))


def run_all(names: list[str], budget: float, large: bool) -> list[str]:
    """Runs each, and returns those that failed or had no time left."""
    failed, end = [], time.monotonic() + budget
    for name in names:
        left = end - time.monotonic()
        print(f"{name}: {left:.0f} s left", file=sys.stderr, flush=True)
        usual = ["--rounds", "1"] if not large and left < AT_LEAST.get(name, 0) else []
        calls = [usual, *([["--only", LARGE[name]]] if large and name in LARGE else [])]
        if not all(_run(name, call, 7200 if large else left) for call in calls):
            failed.append(name)
    return failed


def _run(name: str, arguments: list[str], seconds: float) -> bool:
    """Whether it ended well in time. Its children end with it."""
    if seconds <= 0:
        return False
    command = [sys.executable, str(HERE / name / "measure.py"), *arguments]
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
        try:
            return process.wait(timeout=seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def results() -> list[dict[str, Any]]:
    """What was measured, in the form that a table can be made of: with the name of its folder in it."""
    files = (HERE / name / "results.json" for name in benches())
    read = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    return [one for one in read if "bench" in one]


def target_lines() -> Iterator[str]:
    for one in results():
        for target in one.get("targets", []):
            measured = "" if target["measured"] is None else f" {target['measured']:g} {target['unit']}"
            why = f" ({target['why']})" if target.get("why") else ""
            yield f"{_VERDICTS[target['met']].strip('*'):12} {target['name']}: {target['target']}:{measured}{why}"


def page() -> str:
    """The generated part of README.md."""
    return "\n\n".join([_targets(), *(_section(one) for one in results() if one.get("rows"))])


def write_page() -> None:
    text = README.read_text(encoding="utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    README.write_text(f"{before}{MARKS[0]}\n{page()}\n{MARKS[1]}{after}", encoding="utf-8")


def _targets() -> str:
    rows = [
        [t["name"], t["target"], "" if t["measured"] is None else f"{t['measured']:g} {t['unit']}", _VERDICTS[t["met"]],
         t.get("why", "")]
        for one in results()
        for t in one.get("targets", [])
    ]  # fmt: skip
    return _table(["what", "target", "measured", "", "note"], rows)


def _section(one: dict[str, Any]) -> str:
    hardware = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in one.get("hardware", {}).items())
    versions = ", ".join(f"{name} {value}" for name, value in one.get("versions", {}).items() if value)
    about = one.get("about", "")
    parts = [f"### {one['bench']}", *([about[:1].upper() + about[1:] + "."] if about else [])]
    parts += [_rows(one["rows"])] if one.get("rows") else []
    reasons = [f"- {row['size']}: {row['reason']}" for row in one.get("rows", []) if row.get("reason")]
    parts += ["\n".join(reasons)] if reasons else []
    return "\n\n".join([*parts, f"{one.get('date', '')}; {hardware}; {versions}."])


def _rows(rows: list[dict[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (dict, list))))
    same_day = len({row.get("date") for row in rows}) == 1
    left_out = (*_LEFT_OUT, "date") if same_day else _LEFT_OUT
    shown = [key for key in keys if key not in left_out and any(row.get(key) not in (None, "") for row in rows)]
    shown = [*(key for key in _FIRST if key in shown), *(key for key in shown if key not in _FIRST)]
    heads = [key.replace("_bytes", " GB").replace("_", " ") for key in shown]
    return _table(heads, [[_cell(key, row.get(key)) for key in shown] for row in rows])


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return f"{value / 1e9:.2f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
