"""What it is worth to train on the pixels that llama.cpp will show: `preprocess: engine` beside `preprocess: model`.

    python bench/pixels/measure.py                       all tasks, three seeds: about an hour on two cores
    python bench/pixels/measure.py --only gemma3 --seeds 3,4

A small vision model learns to describe a square on its ground: "It is large red on grey". The pictures are not of the
shape, or not of the size, that the model's own processor makes of them, so llama.cpp shows other pixels than the
processor. Both ways train on the same rows in the same order, and differ in that one field of the recipe. Then all are
asked about the same held-out pictures, by `skill-train evaluate`: the tuned model through transformers, with the pixels
of its training, and its pair of f16 files through llama.cpp, as its server prepares pictures. Writes results.json
beside this file, and the table of README.md.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "support")]

import side  # noqa: E402 - in the folder above

WAYS = ("model", "engine")
PACKAGES = ("skill-train", "torch", "transformers", "trl", "peft", "pillow", "llama-cpp-python")
MARKS = ("<!-- table -->", "<!-- /table -->")
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 230), "yellow": (240, 220, 40)}
GROUNDS = {"white": (240, 240, 240), "grey": (125, 125, 125), "black": (15, 15, 15)}
SIDES = {"small": (0.17, 0.24), "large": (0.40, 0.52)}  # of the square, as a share of the picture's shorter side
ROWS, HELD_OUT = 600, 100  # of the rows that many are kept out


@dataclass(frozen=True)
class Task:
    """One model, and pictures of some shapes.

    Attributes:
        sizes: width and height of the pictures, in pixels.
        about: how what llama.cpp shows differs from what the model's own processor makes.
        recipe: fields beside those of all tasks.
    """

    model: str
    sizes: tuple[tuple[int, int], ...]
    about: str
    recipe: dict[str, Any] = field(default_factory=dict)


_FULL = {"finetuning_type": "full", "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 20}
TASKS = {
    "qwen2-vl, shape": Task(
        "demo",
        ((150, 75), (75, 150), (130, 100)),
        "borders in place of a stretched picture",
        _FULL,
    ),
    "qwen2-vl, limits": Task(
        "demo",
        ((420, 210), (210, 420), (392, 224)),
        "112 or 120 tokens in place of 55 or 60: the model's limit of 64 is ignored",
        _FULL,
    ),
    "gemma3, shape": Task(
        "gemma3",
        ((200, 100), (100, 200), (150, 90)),
        "borders in place of a stretched picture, and no blank lines around it",
        _FULL,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--seeds", default="0,1,2", help="one run of each way for each (0,1,2)")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of a run (250)")
    parser.add_argument("--page", action="store_true", help="measure nothing, write README.md")
    options = parser.parse_args()
    if not options.page:
        for name in (name for name in TASKS if options.only in name):
            for seed in map(int, options.seeds.split(",")):
                write_results([measured(name, way, seed, options.steps) for way in WAYS], options.steps)
    write_page()


def measured(name: str, way: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: the share of held-out answers that are right, before the training and after it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skill-train-bench-pixels-") as text:
        folder = Path(text)
        write_rows(folder / "data.parquet", TASKS[name], seed)
        (folder / "recipe.yaml").write_text(json.dumps(recipe_of(TASKS[name], way, seed, steps)))
        run = folder / "run"
        command(folder, "local", "recipe.yaml", "--dtype", "float32", "--run-dir", str(run))
        command(folder, "export-gguf", str(run), "--quant", "f16")
        command(folder, "evaluate", str(run), "--rows", str(HELD_OUT))
        models = {model["name"]: model for model in json.loads((run / "evaluate.json").read_text())["models"]}
    shipped = next(model for file, model in models.items() if file.endswith("f16.gguf"))
    figures = {"base": models["base"], "transformers": models["tuned"], "llama.cpp": shipped}
    row = {"task": name, "way": way, "seed": seed, "seconds": round(time.monotonic() - started)}
    row |= {f"right_{key}": model["exact_match"] for key, model in figures.items()}
    row |= {f"loss_{key}": round(model["loss"], 4) for key, model in figures.items()}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def recipe_of(task: Task, way: str, seed: int, steps: int) -> dict[str, Any]:
    values = {"model": str(base_of(task)), "data": "data.parquet", "preprocess": way, "seed": 42 + seed}
    values |= {"max_steps": steps, "effective_batch_size": 16, "max_length": 512}
    return values | {"held_out_fraction": HELD_OUT / ROWS} | task.recipe


def base_of(task: Task) -> Path:
    if task.model == "demo":
        return HERE.parents[1] / "skill" / "skill_train" / "demo" / "vision" / "model"
    import tiny_vision

    return Path(tiny_vision.cached(task.model))


def write_rows(path: Path, task: Task, seed: int) -> None:
    """Rows with one picture each, with its bytes; no picture twice."""
    import pyarrow
    import pyarrow.parquet

    draw, pictures = random.Random(f"pixels {seed}"), dict[bytes, str]()
    while len(pictures) < ROWS:
        content, answer = picture(draw, draw.choice(task.sizes))
        pictures.setdefault(content, answer)
    rows = [
        {
            "images": [{"bytes": content, "path": None}],
            "messages": [
                {"role": "user", "content": "Describe the picture."},
                {"role": "assistant", "content": answer},
            ],
        }
        for content, answer in pictures.items()
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def picture(draw: random.Random, size: tuple[int, int]) -> tuple[bytes, str]:
    """A square anywhere, as a PNG file, and the right answer."""
    from PIL import Image

    colour, ground, kind = (draw.choice(list(words)) for words in (COLOURS, GROUNDS, SIDES))
    pixels = round(draw.uniform(*SIDES[kind]) * min(size))
    x, y = (draw.randint(0, edge - pixels) for edge in size)
    image = Image.new("RGB", size, GROUNDS[ground])
    image.paste(COLOURS[colour], (x, y, x + pixels, y + pixels))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), f"It is {kind} {colour} on {ground}"


def command(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [*map(str, side.skill_train(*words))], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 6):
        raise SystemExit(f"{words} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def write_results(rows: list[dict[str, Any]], steps: int) -> None:
    """Rows of other tasks and seeds that were measured earlier are kept."""
    file = HERE / "results.json"
    earlier = json.loads(file.read_text())["rows"] if file.is_file() else []
    done = {(row["task"], row["seed"]) for row in rows}
    kept = [row for row in earlier if (row["task"], row["seed"]) not in done]
    head = side.circumstances("pixels", len({row["seed"] for row in (*kept, *rows)}), PACKAGES)
    order = list(TASKS)
    found = sorted([*kept, *rows], key=lambda row: (order.index(row["task"]), row["seed"]))
    document = {**head, "steps": steps, "held_out": HELD_OUT, "rows": found}
    file.write_text(json.dumps(document, indent=1) + "\n")


def table(document: dict[str, Any]) -> str:
    """For each task and way the mean over the seeds, and what each seed gave."""
    lines = [
        "| task | what llama.cpp does otherwise | trained on | right in transformers | right in llama.cpp | by seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["task"] for row in document["rows"]):
        for way in WAYS:
            rows = [row for row in document["rows"] if (row["task"], row["way"]) == (name, way)]
            mean = {key: sum(row[f"right_{key}"] for row in rows) / len(rows) for key in ("transformers", "llama.cpp")}
            each = ", ".join(f"{row['right_llama.cpp']:.0%}" for row in rows)
            shown = f"| {name} | {TASKS[name].about} | `{way}` | {mean['transformers']:.0%} | {mean['llama.cpp']:.0%} |"
            lines.append(f"{shown} {each} |")
    facts: dict[str, Any] = document["hardware"] | document["versions"]
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    return "\n".join([*lines, "", f"{document['date']}; {document['steps']} steps; {told}."])


def write_page() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    document = json.loads((HERE / "results.json").read_text())
    page.write_text(f"{before}{MARKS[0]}\n{table(document)}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
