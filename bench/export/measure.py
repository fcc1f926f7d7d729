"""Adapter to f16, q8_0 and q4_k_m: `skill-train export-gguf`, and PEFT's merge, llama.cpp's converter and its quantizer
twice, one after the other.

    python bench/export/measure.py                   10M, 100M and 0.5B
    python bench/export/measure.py --only 1.5B,3B    the large ones

Ours leaves besides what the others leave a gate over the merged weights, digests of every file, and a Modelfile.
`peak_disk_bytes` is the most that the run's folder held, looked at every 50 ms; `disk_ratio` is that over what is left:
the outputs and the merged model.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import random_models as models
import side

QUANTS = ("q8_0", "q4_k_m")
REASONS = {
    "10M": "starting programs and the vocabulary of 151,936 tokens are all of it",
    "100M": "the gate compares answers too (up to 250M weights)",
    "0.5B": "weights outgrow the vocabulary; both quantizers run side by side",
    "1.5B": "above 2 GB the converter is asked first whether it knows the model: seconds, in place of a late refusal",
}


def main() -> None:
    side.main("export", __doc__, measure, targets, "adapter to f16, q8_0 and q4_k_m, beside four programs in a row")


def targets(rows: side.Rows) -> side.Rows:
    half = next((row for row in rows if (row["size"], row["what"]) == ("0.5B", "ours")), {})
    words = "at most the outputs and one intermediate"
    return [
        side.target(
            "export 0.5B: time", "at most 0.7 x PEFT, converter, quantizer twice", half.get("time_ratio"), 0.7, "x"
        ),
        side.target("export 0.5B: disk", words, half.get("disk_ratio"), 1.01, "x", "0.01 for folders and small files"),
    ]


def measure(size: str, work: Path, rounds: int) -> list[dict[str, Any]]:
    print(f"export {size}", file=sys.stderr, flush=True)
    base, run = side.made(size, work)
    disk = [0, 0]  # at its peak, and at the end

    def ours() -> dict[str, float]:
        with sampled(run, disk):
            found = side.timed(export(run), log=work / "log")
        disk[1] = max(disk[1], held(run))
        clean(run)
        return found

    def theirs() -> dict[str, float]:
        out = work / "theirs"
        out.mkdir()
        found = side.timed(*without(base, run / "adapter", out), log=work / "log")
        shutil.rmtree(out)
        return found

    found = side.interleaved({"four programs": theirs, "ours": ours}, rounds)
    about = {"size": size, "parameters": models.parameters(base)}
    ratio = {"time_ratio": side.ratio(found["ours"], found["four programs"]), "peak_disk_bytes": disk[0],
             "disk_ratio": round(disk[0] / disk[1], 3)}  # fmt: skip
    return [
        {**about, "what": "four programs", **found["four programs"]},
        {**about, "what": "ours", **found["ours"], **ratio, "reason": REASONS.get(size, "")},
    ]


@contextlib.contextmanager
def sampled(folder: Path, disk: list[int]) -> Iterator[None]:
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            disk[0] = max(disk[0], held(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def held(folder: Path) -> int:
    """Bytes on the disk of everything below; a file may go while it is looked at."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            total += 512 * path.lstat().st_blocks
    return total


def export(run: Path) -> side.Command:
    # Without an importance matrix: the other programs make none, and measure no file.
    return side.skill_train("export-gguf", run, "--quant", ",".join(("f16", *QUANTS)), "--imatrix", "none")


def without(base: Path, adapter: Path, out: Path) -> list[side.Command]:
    from skill_train.llama import get_converter

    merged, f16 = out / "merged", out / "model-f16.gguf"
    converter = get_converter.find_or_fetch().folder / "convert_hf_to_gguf.py"
    return [
        side.peer("merge", base, adapter, merged),
        side.python(converter, merged, "--outfile", f16, "--outtype", "f16"),
        *(side.peer("quantize", f16, out / f"model-{kind}.gguf", kind) for kind in QUANTS),
    ]


def clean(run: Path) -> None:
    """Back to a run that was trained and nothing else."""
    for folder in ("merged", "gguf"):
        shutil.rmtree(run / folder, ignore_errors=True)
    for step in ("merge", "convert", "quantize", "verify"):
        (run / f"{step}.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
