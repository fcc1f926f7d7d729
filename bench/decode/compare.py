"""Holds the estimated speed of answers (skill_train/estimate/decode.py) against published rows.

python bench/decode/compare.py            prints a line a row that was not used for the fit, and the totals
python bench/decode/compare.py --write    writes the totals into README.md beside it
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from skill_train.estimate.artifacts import unread_bytes
from skill_train.estimate.decode import tokens_per_second
from skill_train.estimate.step import Range
from skill_train.estimate.targets import TargetDevice, read_table
from skill_train.facts import ModelFacts

HERE = Path(__file__).resolve().parent
MARKS = ("<!-- generated:totals -->", "<!-- /generated:totals -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md")
    options = parser.parse_args()
    published = read()
    if options.write:
        text = (HERE / "README.md").read_text(encoding="utf-8")
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        (HERE / "README.md").write_text(f"{before}{MARKS[0]}\n{totals(published)}\n{MARKS[1]}{after}", encoding="utf-8")
        return 0
    for row in published["rows"]:
        if row["use"] == "test":
            speed = estimate(published, row)
            off = middle(speed) / row["tokens_per_second"]
            inside = "" if is_inside(speed, row) else "  outside"
            name = f"{row['device']}, {row['model']} {row['quant']}"
            print(f"{name:42} {row['tokens_per_second']:8.1f} {speed.low:8.1f} to {speed.high:6.1f} {off:6.2f}{inside}")
    print(totals(published))
    return 0


def read() -> Any:
    """The published rows, with the models and the sizes of their files."""
    return json.loads((HERE / "published.json").read_text(encoding="utf-8"))


def estimate(published: Any, row: Any) -> Range:
    """The estimated speed of one row. A benchmark of n tokens starts with an empty context, so it is half full on the
    average, as the estimate takes it."""
    model, quant = model_of(published, row["model"]), row["quant"]
    speed = tokens_per_second(
        model,
        target_of(row),
        quant=quant,
        read_bytes=published["file_bytes"][row["model"]][quant] - unread_bytes(model, quant),
        context=row["context"],
    )
    assert speed is not None
    return speed


def model_of(published: Any, name: str) -> ModelFacts:
    sizes = published["models"][name]
    known = {"fingerprint": None, "model_type": "", "architecture": "", "context": None, "stored_dtype": None}
    return ModelFacts(source=name, quantization=None, has_chat_template=False, **known, **sizes)


def target_of(row: Any) -> TargetDevice:
    """A row of the table of devices, or what the published row says itself."""
    known = {device.name: device for device in read_table().devices}.get(row["device"])
    family, speed = (known.family, known.gigabytes_per_second) if known else (row["family"], 0.0)
    return TargetDevice(row["device"], family, 0, (0, 0), row.get("gigabytes_per_second", speed), ())


def middle(speed: Range) -> float:
    """The estimate itself: the time that both ends of the range were multiplied with."""
    return (speed.low * speed.high) ** 0.5


def is_inside(speed: Range, row: Any) -> bool:
    return bool(speed.low <= row["tokens_per_second"] <= speed.high)


def errors(published: Any, use: str) -> tuple[list[float], list[bool]]:
    """Of all rows of a use: how far the middle of the range is off, and whether the row lies inside the range."""
    rows = [row for row in published["rows"] if row["use"] == use]
    speeds = [estimate(published, row) for row in rows]
    off = [abs(middle(speed) / row["tokens_per_second"] - 1) for speed, row in zip(speeds, rows, strict=True)]
    return off, [is_inside(speed, row) for speed, row in zip(speeds, rows, strict=True)]


def totals(published: Any) -> str:
    """A table of both uses, and of each kind of chip among the rows that were not used."""
    lines = ["| rows | count | median off | largest | inside the range |", "| --- | --- | --- | --- | --- |"]
    for use, name in (("fit", "used for the fit"), ("test", "not used")):
        off, inside = errors(published, use)
        lines.append(_line(name, off, inside))
    by_family = defaultdict(list)
    for row in published["rows"]:
        if row["use"] == "test":
            by_family[target_of(row).family].append(row)
    for family, rows in sorted(by_family.items()):
        off, inside = errors(published | {"rows": rows}, "test")
        lines.append(_line(f"not used: `{family}`", off, inside))
    return "\n".join(lines)


def _line(name: str, off: list[float], inside: list[bool]) -> str:
    share = f"{sum(inside)} of {len(inside)}"
    return f"| {name} | {len(off)} | {statistics.median(off):.0%} | {max(off):.0%} | {share} |"


if __name__ == "__main__":
    raise SystemExit(main())
