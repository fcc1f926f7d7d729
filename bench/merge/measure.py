"""`skill-train merge` beside PEFT: load, merge_and_unload, save_pretrained. And beside copying the files, at 14 GB.

    python bench/merge/measure.py                      10M, 100M and 0.5B
    python bench/merge/measure.py --only 1.5B,3B,7B    the large ones: 7B needs 45 GB of disk and takes minutes

Ours is measured whole: digests of what it read and wrote, and its gate (`gate_seconds`), which PEFT has not. 7B is not
run through PEFT; it is held against copying its files, both from and into the system's page cache as far as that goes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import random_models as models
import side

NOT_WITH_PEFT = ("7B",)
REASONS = {
    "10M": "starting torch is all of it; the gate compares answers too, for which it starts transformers and PEFT",
    "100M": "the gate compares answers too (up to 250M weights): most of the time, and of the memory",
    "0.5B": "from here on the gate compares weights alone, and memory is that of torch and a few blocks",
    "3B": "starting torch counts no more; time grows as the bytes do, for both",
    "7B": "beside copying: digests of 30 GB, at 1.6 GB/s of a core, and each weight changed and compared. "
    "Copying took 16 to 57 s on that day, as free memory was at hand or had to be fetched from the host, ours 41 to 59",
}


def main() -> None:
    side.main("merge", __doc__, measure, targets, "`skill-train merge` beside PEFT, and beside copying the files")


def measure(size: str, work: Path, rounds: int) -> list[dict[str, Any]]:
    print(f"merge {size}", file=sys.stderr, flush=True)
    base, run = side.made(size, work)
    adapter = run / "adapter"
    gates: list[float] = []

    def ours() -> dict[str, float]:
        command = side.skill_train("merge", "--base", base, "--adapter", adapter, "--out", work / "ours")
        found = side.timed(command, log=work / "log")
        gate = json.loads((work / "ours.merge.json").read_text())["gate"]
        gates.append(gate["seconds"] + (gate.get("weights") or {}).get("seconds", 0))
        shutil.rmtree(work / "ours")
        (work / "ours.merge.json").unlink()
        return found

    def theirs() -> dict[str, float]:
        way = ("copy", base) if size in NOT_WITH_PEFT else ("merge", base, adapter)
        found = side.timed(side.peer(*way, work / "theirs"), log=work / "log")
        shutil.rmtree(work / "theirs")
        return found

    other = "copying" if size in NOT_WITH_PEFT else "PEFT"
    found = side.interleaved({other: theirs, "ours": ours}, rounds)
    about = {"size": size, "parameters": models.parameters(base)}
    gate_seconds = round(sorted(gates)[len(gates) // 2], 2)
    extra = {"gate_seconds": gate_seconds, "reason": REASONS.get(size, "")}
    return [
        {**about, "what": other, **found[other]},
        {**about, "what": "ours", **found["ours"], **extra, "time_ratio": side.ratio(found["ours"], found[other]),
         "memory_ratio": side.ratio(found["ours"], found[other], "peak_bytes")},
    ]  # fmt: skip


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours = {row["size"]: row for row in rows if row["what"] == "ours"}
    half, seven = ours.get("0.5B", {}), ours.get("7B", {})
    peak = None if not seven else round(seven["peak_bytes"] / 1e9, 2)
    share = f"with the gate, {half['gate_seconds'] / half['seconds']:.0%} of the time" if half else ""
    return [
        side.target("merge 0.5B: memory", "at most 1/4 of PEFT's", half.get("memory_ratio"), 0.25, "x"),
        side.target("merge 0.5B: time", "at most half of PEFT's", half.get("time_ratio"), 0.5, "x", share),
        side.target("merge 7B: memory", "under 2 GB", peak, 2.0, "GB"),
        side.target("merge 7B: time", "at most 1.5 x copying", seven.get("time_ratio"), 1.5, "x"),
    ]


if __name__ == "__main__":
    main()
