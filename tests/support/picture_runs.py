"""Runs of tiny vision models on rows with pictures: one colour each, whose name is the answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from PIL import Image

import tiny_vision
import training

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230), "white": (240, 240, 240)}
STEPS = 6


def rows_of_colours(folder: Path, count: int = 24) -> list[dict[str, Any]]:
    """Rows, and the files of their pictures in the folder, of three shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), []
    for number in range(count):
        colour, size = draw.choice(list(COLOURS)), draw.choice([(60, 40), (112, 112), (40, 90)])
        image = Image.new("RGB", size, COLOURS[colour])
        image.putpixel((draw.randrange(size[0]), draw.randrange(size[1])), (number, number, number))
        image.save(folder / f"{number}.png")
        messages = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": colour}]
        rows.append({"images": [f"{number}.png"], "messages": messages})
    return rows


def write_rows(folder: Path, count: int = 24) -> Path:
    return training.write_data(folder, rows_of_colours(folder, count))


def write_run(
    run: Path, kind: str, *, data: Path | None = None, placement: dict[str, Any] | None = None, **values: Any
) -> Path:
    """A run directory with a plan for rows with pictures.

    Args:
        data: other rows than those of `write_rows`, which lie beside the run.
    """
    values = {"max_steps": STEPS, "effective_batch_size": 4, "learning_rate": 5e-3, "held_out_fraction": 0.2} | values
    rows = data or write_rows(run.parent / "data")
    base = tiny_vision.cached(kind)
    training.write_plan(run, base, rows, pictures=True, split=(2, 2, 1), placement=placement, **values)
    return run
