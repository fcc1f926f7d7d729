"""What every measurement here shares: ours and the peer's way in turn, as child processes, and the results' form."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("skill-train", "torch", "transformers", "peft", "safetensors", "llama-cpp-python", "gguf")
Command = Sequence[str | Path]
Rows = list[dict[str, Any]]
SIZES = "10M,100M,0.5B"
WITH_TARGETS = ("0.5B", "7B")


def main(
    name: str, doc: str, measure: Callable[[str, Path, int], Rows], targets: Callable[[Rows], Rows], about: str
) -> None:
    """The program of one folder: measures the sizes that are asked for, each in a temporary folder, and writes the
    results. `measure` takes a size, its folder and how often each way runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=SIZES, help=f"sizes, with commas ({SIZES})")
    more = " and ".join(WITH_TARGETS)
    parser.add_argument("--rounds", type=int, default=3, help=f"runs of each way at {more}; other sizes run once (3)")
    options = parser.parse_args()
    rows: Rows = []
    for size in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix=f"skill-train-bench-{name}-") as folder:
            rows += measure(size, Path(folder), options.rounds if size in WITH_TARGETS else 1)
    write_results(name, rows, targets(rows), about)


def timed(*commands: Command, log: Path) -> dict[str, float]:
    """Commands one after the other: wall and processor seconds of all, and the peak memory of their largest process.

    Raises:
        SystemExit: one failed; its last lines are shown. A verification that fails (6) is a result here.
    """
    total = {"seconds": 0.0, "processor_seconds": 0.0, "peak_bytes": 0.0}
    for command in commands:
        started = time.monotonic()
        with open(log, "wb") as out:
            process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=_environment())
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 6):
            raise SystemExit(f"{command[:4]} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        total["seconds"] += time.monotonic() - started
        total["processor_seconds"] += used.ru_utime + used.ru_stime
        unit = 1 if sys.platform == "darwin" else 1024
        total["peak_bytes"] = max(total["peak_bytes"], used.ru_maxrss * unit)
    return total


def made(size: str, work: Path) -> tuple[Path, Path]:
    """A base model and a run directory, made by a process of its own: Linux counts the memory of the process that
    starts a program into the program's peak."""
    subprocess.run([*map(str, python(HERE / "random_models.py", size, work))], check=True, env=_environment())
    return work / "base", work / "run"


def interleaved(ways: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, Any]]:
    """A B A B: by way, the median of each figure, and the fastest and slowest run."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            runs[name].append(way())
            print(f"  round {number + 1} {name}: {runs[name][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    return {name: _summary(found) for name, found in runs.items()}


def ratio(one: dict[str, Any], other: dict[str, Any], key: str = "seconds") -> float:
    return round(one[key] / other[key], 3)


def target(name: str, words: str, measured: float | None, most: float, unit: str, why: str = "") -> dict[str, Any]:
    """A target that is met by a figure of at most `most`."""
    met = None if measured is None else measured <= most
    return {"name": name, "target": words, "measured": measured, "unit": unit, "met": met, "why": why}


def write_results(name: str, rows: list[dict[str, Any]], targets: list[dict[str, Any]], about: str) -> None:
    """results.json of one folder. Rows of an earlier run that this one did not measure are kept, with their date."""
    file, today = HERE / name / "results.json", datetime.datetime.now(datetime.UTC).date().isoformat()
    earlier = json.loads(file.read_text()) if file.is_file() else {"rows": [], "targets": []}
    fresh = [{"date": today, **row} for row in rows]
    done = {_key(row) for row in fresh}
    kept = [row for row in earlier["rows"] if _key(row) not in done]
    measured = {one["name"] for one in targets if one["measured"] is not None}
    old = {one["name"]: one for one in earlier["targets"] if one["name"] not in measured}
    document = {
        "bench": name,
        "about": about,
        "date": today,
        "hardware": hardware(),
        "versions": {"python": sys.version.split()[0]} | {package: _version(package) for package in PACKAGES},
        "rows": sorted([*kept, *fresh], key=lambda row: (row["parameters"], row["what"])),
        "targets": [old.get(one["name"], one) for one in targets],
    }
    file.write_text(json.dumps(document, indent=1) + "\n")


def write_rows(path: Path, count: int, words: int) -> Path:
    """Different conversations of so many words a turn, about 8 bytes each."""
    chance = random.Random(1)
    with open(path, "w") as file:
        for number in range(count):
            said = " ".join(
                chance.choice(("ticket", "order", "refund", "printer", "late", "broken")) for _ in range(words)
            )
            turns = [{"role": "user", "content": f"{number}: {said}?"}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def circumstances(name: str, rounds: int, packages: Sequence[str]) -> dict[str, Any]:
    """The head of results.json, for a folder that writes it itself."""
    versions = {"python": sys.version.split()[0]} | {package: _version(package) for package in packages}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"bench": name, "date": today, "hardware": hardware(), "rounds": rounds, "versions": versions}


def hardware() -> dict[str, Any]:
    from skill_train.machine.read import read_machine

    machine = read_machine()
    memory = None if machine.ram_bytes is None else round(machine.ram_bytes / 1e9, 1)
    return {
        "system": machine.system,
        "processor": machine.cpu,
        "cores": machine.cores,
        "memory_gb": memory,
        "load_at_end": round(os.getloadavg()[0], 1),
    }


def python(*arguments: str | Path) -> Command:
    return (sys.executable, *arguments)


def skill_train(*arguments: str | Path) -> Command:
    return python("-c", "from skill_train.cli import main; main()", *arguments, "--format", "json")


def peer(*arguments: str | Path) -> Command:
    return python(HERE / "peers.py", *arguments)


def module(name: str) -> Any:
    """The program of another folder."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / name / "measure.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # where dataclasses look for the types of their fields
    spec.loader.exec_module(made)
    return made


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    middle = {key: round(statistics.median(run[key] for run in runs), 2) for key in ("seconds", "processor_seconds")}
    seconds = [round(run["seconds"], 2) for run in runs]
    peak = round(max(run["peak_bytes"] for run in runs))
    return {**middle, "fastest": min(seconds), "slowest": max(seconds), "rounds": len(runs), "peak_bytes": peak}


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row["size"], row["what"]


def _environment() -> dict[str, str]:
    return dict(os.environ, HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE", TRANSFORMERS_VERBOSITY="error")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
