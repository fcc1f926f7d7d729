"""Checks GGUF files against the model that was trained, and writes the proof.

The reference is base + adapter through PEFT, in fp32: what was trained, made by none of our own steps. Each file is
read by our own reader (`gguf_file`) and by llama.cpp in a child process. `verify` never raises because a file is wrong:
it says so in the record, and goes on with the next file.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skill_train import run_dir
from skill_train.console import Bar
from skill_train.errors import UsageError
from skill_train.gguf_file import GgufFile
from skill_train.native import ending
from skill_train.shards import read_folder
from skill_train.verdict import worst
from skill_train.verify_judge import Proof, answers_of, have_room, judge, readable, unquantized
from skill_train.verify_subject import subject_of
from skill_train.verify_texts import Sample, sample_of
from skill_train.verify_weights import compare_weights

Warn = Callable[[str, str], None]


def verify(
    *,
    reference: Path,
    adapter: Path | None,
    base: Path | None,
    ggufs: list[Path],
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    record: Path,
    tokens: int | None = None,
    progress: Bar,
    warn: Warn,
) -> dict[str, Any]:
    """The proof, as written to `record`: `verdict`, `checks`, `not_checked`, `samples`, versions and digests.

    Args:
        reference: model folder. With `adapter` on top, or as it is (a merged or plain model).
        base: what the adapter was trained on, to see that the files hold the tuned model; None to leave that out.
        ggufs: the files to judge.
        rows: as the trainer was fed them (`samples.jsonl`); may be empty.
        held_out: rows to measure on; `rows`, or built-in texts, when empty.
        tokens: most tokens to compare logits on; None takes what `verify_texts.sample_of` has for the model's size.

    A record of the same inputs, options and versions is returned as it is, with `reused`; any other is replaced,
    because a proof of other files is worth nothing.

    Raises:
        UsageError: nothing to judge, a file is missing, or the record cannot be written.
        NotInstalled: transformers, peft, gguf or llama-cpp-python is missing.
    """
    started = time.monotonic()
    _require(ggufs, reference)
    count = _weights(reference)
    sample = sample_of(count, tokens)
    with ending(ThreadPoolExecutor(2)) as beside:  # digests and first answers are made while libraries are imported
        fixing = beside.submit(_fixed, reference, adapter, base, ggufs, rows, held_out, sample)
        earlier = _earlier(record, fixing.result()) if record.is_file() else None
        if earlier is not None:
            return earlier | {"reused": True}
        run_dir.require_writable(record.parent)
        proof, weights = Proof(), dict[str, Any]()
        files = readable(ggufs, proof)
        with tempfile.TemporaryDirectory(prefix="skill-train-verify-") as folder:
            progress(0, len(ggufs) + 1, "reference")
            measured_on: dict[str, Any] = {"rows": rows, "held_out": held_out or rows, "sample": sample}
            measured_on["also"] = lambda merged: weights.update(compare_weights(files, merged))
            drafts: dict[str, list[list[int]]] = {}
            measured_on["ask"] = lambda prompts, most: _draft(beside, files, prompts, most, 4 * count, drafts)
            subject = subject_of(reference, adapter=adapter, base=base, **measured_on, folder=Path(folder))
            fixed = fixing.result()
            judging: dict[str, Any] = {
                "digests": fixed["inputs"]["ggufs"],
                "files": files,
                "weights": weights,
                "drafts": drafts,
            }
            judge(ggufs, subject, proof, run=record.parent, **judging, warn=warn, progress=progress)
    figures = {"samples": subject.samples, "seconds": round(time.monotonic() - started, 2)}
    return _write(record, fixed, proof, figures)


def _draft(
    beside: ThreadPoolExecutor,
    files: list[GgufFile],
    prompts: list[list[int]],
    most: int,
    reference_bytes: int,
    drafts: dict[str, list[list[int]]],
) -> Callable[[], list[list[int]]]:
    """Lets llama.cpp answer while the reference is read, by the file that is nearest to it, where memory has room for
    both; keeps that in `drafts`."""
    gguf = unquantized(files) or (files[0] if files else None)
    if gguf is None or not prompts or not have_room([gguf], reference_bytes):
        return list
    answering = beside.submit(answers_of, gguf, prompts, most)

    def wait() -> list[list[int]]:
        drafts[str(gguf.path)] = answering.result()
        return drafts[str(gguf.path)]

    return wait


def _write(record: Path, fixed: dict[str, Any], proof: Proof, figures: dict[str, Any]) -> dict[str, Any]:
    return run_dir.write_record(
        record,
        **fixed,
        outputs={},
        verdict=worst(check.verdict for check in proof.checks),
        checks=[asdict(check) for check in proof.checks],
        not_checked=[asdict(one) for one in proof.not_checked],
        **figures,
        peak_memory_bytes=run_dir.peak_memory_bytes(),
        peak_memory_children_bytes=run_dir.peak_memory_bytes(children=True),
    )


def _require(ggufs: list[Path], reference: Path) -> None:
    missing = [path for path in (*ggufs, reference / "config.json") if not path.is_file()]
    if missing or not ggufs:
        raise UsageError(
            f"{missing[0]} does not exist" if missing else "there is no GGUF file to verify",
            code="missing_file",
            expected="GGUF files, and a model folder as the reference",
            hint="skill-train export-gguf RUN",
        )
    twice = next((name for name, count in Counter(path.name for path in ggufs).items() if count > 1), None)
    if twice:  # digests and figures are kept by name
        raise UsageError(
            f"two of the files are called {twice}",
            code="bad_usage",
            expected="files of different names in one proof",
            got=", ".join(str(path) for path in ggufs if path.name == twice),
            hint="verify them one by one, each with its own --out",
        )


def _fixed(
    reference: Path,
    adapter: Path | None,
    base: Path | None,
    ggufs: list[Path],
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    sample: Sample,
) -> dict[str, Any]:
    """What a proof is a proof of."""
    return {
        "inputs": {
            "reference": run_dir.digests(reference),
            "adapter": run_dir.digests(adapter) if adapter else None,
            "base": None if base is None else "the reference" if base == reference else run_dir.digests(base),
            "ggufs": {path.name: run_dir.file_digest(path) for path in ggufs},
            "rows": _digest(rows),
            "held_out": _digest(held_out),
        },
        "options": {"tokens": sample.tokens},
        "versions": run_dir.versions("llama-cpp-python", "gguf", "transformers", "torch", "peft"),
    }


def _weights(model: Path) -> int:
    return sum(math.prod(stored.shape) for shard in read_folder(model) for stored in shard.tensors.values())


def _digest(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _earlier(record: Path, fixed: dict[str, Any]) -> dict[str, Any] | None:
    earlier: dict[str, Any] = run_dir.read_json(record)
    return earlier if all(earlier.get(key) == value for key, value in fixed.items()) else None
