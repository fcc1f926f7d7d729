"""A million rows looked at: `skill-train data FILE`, beside `datasets.load_dataset` and a look at what it loaded.

    python bench/data/measure.py [--rounds 3] [--rows 1000000] [--only ours]

Each round runs both, each in a process of its own, on a tenth of the rows and on all of them, in turn. `skill-train
data` reads every row, checks it and counts repeats. The peer's way is what a user runs to see a dataset: load it (into
a fresh cache, in Arrow), read its columns and its first row, and count its repeats. Writes results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import side

HERE = Path(__file__).resolve().parent
PACKAGES = ("skill-train", "datasets", "pyarrow")
# Each prints its peak memory (kB on Linux, bytes on macOS) and its processor seconds, last.
_FIGURES = """
import json, resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), used.ru_utime + used.ru_stime]))
"""
OURS = f"""
import contextlib, io, sys
from skill_train.cli import main
try:
    with contextlib.redirect_stdout(io.StringIO()):
        main(["data", sys.argv[1], "--format", "json"])
except SystemExit as end:
    assert end.code == 0, end.code
{_FIGURES}"""
PEER = f"""
import sys
from datasets import load_dataset
rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
print(rows.features, rows[0], len(rows) - len({{str(row) for row in rows}}), file=sys.stderr)
{_FIGURES}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large file (1000000)")
    parser.add_argument("--only", choices=("ours", "peer"), help="results.json is left as it is")
    arguments = parser.parse_args()
    ways = [way for way in ("ours", "peer") if arguments.only in (None, way)]
    with tempfile.TemporaryDirectory(prefix="skill-train-bench-") as folder:
        rows = measure(Path(folder), arguments.rounds, arguments.rows, ways)
    for row in rows:
        print(json.dumps(row))
    if arguments.only is None:
        written = side.circumstances("data", arguments.rounds, PACKAGES) | {"rows": rows, "targets": targets(rows)}
        (HERE / "results.json").write_text(json.dumps(written, indent=1) + "\n")


def measure(folder: Path, rounds: int, count: int, ways: list[str]) -> list[dict[str, Any]]:
    files = {number: side.write_rows(folder / f"{number}.jsonl", number, 12) for number in (count // 10, count)}
    seen: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for turn in range(rounds):
        for number, file in files.items():
            for way in ways:
                cache = folder / f"cache-{way}-{number}-{turn}"
                seen.setdefault((way, number), []).append(run(OURS if way == "ours" else PEER, file, cache))
    return [summary(way, number, files[number], figures) for (way, number), figures in seen.items()]


def run(program: str, file: Path, cache: Path) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak bytes of a process."""
    environment = os.environ | {"SKILL_TRAIN_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, str(file), str(cache)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - start
    peak, processor = json.loads(done.stdout.splitlines()[-1])
    return wall, processor, peak


def summary(way: str, count: int, file: Path, figures: list[tuple[float, float, float]]) -> dict[str, Any]:
    wall, processor, peak = zip(*figures, strict=True)
    return {
        "way": "skill-train data" if way == "ours" else "datasets.load_dataset",
        "rows": count,
        "file_bytes": file.stat().st_size,
        "seconds": {
            "best": round(min(wall), 2),
            "median": round(statistics.median(wall), 2),
            "worst": round(max(wall), 2),
        },
        "best_processor_seconds": round(min(processor), 2),
        "peak_bytes": max(peak),
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    few, many = sorted((row for row in rows if row["way"] == "skill-train data"), key=lambda row: row["rows"])
    peer = max((row for row in rows if row["way"] != "skill-train data"), key=lambda row: row["rows"])
    memory = round(many["peak_bytes"] / few["peak_bytes"], 3)
    times = round(many["best_processor_seconds"] / few["best_processor_seconds"], 1)
    ratio = round(peer["seconds"]["median"] / many["seconds"]["median"], 2)
    peak = (
        f"{many['peak_bytes'] / 1e6:.0f} MB for {many['rows']:,} rows; the peer's way {peer['peak_bytes'] / 1e6:.0f} MB"
    )
    return [
        {"name": "memory of ten times the rows", "target": "within 10 %", "measured": memory, "unit": "x"}
        | {"met": 0.9 <= memory <= 1.1, "why": peak},
        {"name": "processor time of ten times the rows", "target": "at most 15 x", "measured": times, "unit": "x"}
        | {
            "met": times <= 15,
            "why": f"the start is in it, {few['best_processor_seconds']} s for {few['rows']:,} rows",
        },
        {"name": "time against the peer's way", "target": "at least 1 x", "measured": ratio, "unit": "x"}
        | {"met": ratio >= 1, "why": f"{many['seconds']['median']} s against {peer['seconds']['median']} s, medians"},
    ]


if __name__ == "__main__":
    main()
