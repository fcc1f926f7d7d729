"""Runs as the trainer leaves them, by the program's own functions, without the steps.

As a program, because huggingface_hub reads its environment once: `rows_of` each plan that it is given, or with `--raw`
`values_of`; without a plan, `texts_of` each run whose folder comes in a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny
import training
from skill_train.gguf.quality.texts import texts_of
from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.program.chat.labels import fed_digest
from skill_train.program.events import Refused, explained_errors, write_rows
from skill_train.program.main import SAMPLE_ROWS, load_data, load_pictures
from skill_train.program.rows import iter_rows
from skill_train.program.split import Data
from skill_train.program.tokenizer import load_tokenizer
from skill_train.run.folder import RunDir

# The header of a file, which decides how many tokens are taken.
MODEL = GgufFile(
    Path("m"), 3, 32, {"tokenizer.ggml.tokens": ["a"] * 100}, {"w": Tensor("w", (256, 4), "F16", 0, 2048)}, 0, 0
)


def fed(folder: Path, rows: list[dict[str, Any]], **recipe: Any) -> tuple[RunDir, Data]:
    """A run as the trainer leaves it, and the data that it was fed: by the program's own functions, without the steps.
    The base stands for the merged model."""
    data, base = _written(folder, rows, recipe.pop("kind", "lines")), tiny.cached("gemma")
    values = {"held_out_fraction": 0.2, "seed": 7, "max_length": 96, **recipe}
    run, part = RunDir(folder / "run"), values.pop("split", "train")
    training.write_plan(run.path, base, data, **values)
    edit_plan(run, "recipe", "split", part)
    document = json.loads(run.plan.read_text())["recipe"]
    loaded = load_data(document, load_tokenizer(str(base), None))
    write_rows(run.samples, loaded["train"][:SAMPLE_ROWS])
    write_rows(run.held_out, loaded["held_out"])
    digests = {"held_out_sha256": fed_digest(loaded["held_out"]), "rows_sha256": fed_digest(loaded["train"])}
    run.record("environment").write_text(json.dumps({"data": digests}))
    done = {"steps": 3, "verdict": "pass", "outputs": {}, "figures": {}, "data": loaded["figures"]}
    run.record("train").write_text(json.dumps(done))
    run.merged.symlink_to(base)
    return run, loaded


def _written(folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    """The rows as a file of lines, or as a folder that `datasets` saved."""
    if kind == "lines":
        return training.write_data(folder, rows)
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return folder / "rows"


def edit_plan(run: RunDir, section: str, key: str, value: object) -> None:
    document = json.loads(run.plan.read_text())
    document[section][key] = value
    run.plan.write_text(json.dumps(document))


def rows_of(plan: str) -> dict[str, Any]:
    """The data of a plan as the training reads it: the digest of each row as it is fed, with its line and its
    pictures. Or what it refuses."""
    recipe = json.loads(Path(plan).read_text())["recipe"]
    try:
        with explained_errors():
            tokenizer = load_tokenizer(recipe["model"], None)
            data = load_data(recipe, tokenizer, None, load_pictures(recipe, tokenizer))
    except Refused as refusal:
        return {"exit_code": refusal.exit_code} | refusal.error
    rows = data["train"] + data["held_out"]
    digests = [hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest() for row in rows]
    about = {"lines": [row["line"] for row in rows], "pictures": [row.get("image_sha256", []) for row in rows]}
    return about | {"digests": digests, "order": data["order"]}


def values_of(plan: str) -> list[list[Any]]:
    """The values of each row, before anything is made of them."""
    recipe = json.loads(Path(plan).read_text())["recipe"]
    how = {"config": recipe["data_config"], "revision": recipe["data_revision"], "file": recipe.get("data_file")}
    return [list(row.values()) for _, row in iter_rows(recipe["data"], split=recipe["split"], **how)]


def ask(environment: dict[str, str], *plans: object) -> list[Any]:
    """`rows_of` each, in a process with this environment; with `--raw` before them, `values_of`."""
    command = [sys.executable, os.path.abspath(__file__), *map(str, plans)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "[["))]


if __name__ == "__main__":
    raw, plans = sys.argv[1:2] == ["--raw"], [word for word in sys.argv[1:] if word != "--raw"]
    for path in plans:
        print(json.dumps(values_of(path) if raw else rows_of(path)), flush=True)
    for line in [] if sys.argv[1:] else sys.stdin:
        print(json.dumps(dataclasses.asdict(texts_of(RunDir(Path(line.strip())), MODEL))), flush=True)
