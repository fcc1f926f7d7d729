"""Asks the Hub in a process of its own, because huggingface_hub reads its environment once, when it is imported.

As a program: `python hub_child.py NAME JSON_ARGUMENTS` prints what `ask` gives back.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from hub_emulator import Hub, environment


def ask(hub: Hub | str, home: Path, name: str, *arguments: Any, token: str | None = "", **more: str) -> dict[str, Any]:
    """What one of our functions answers.

    Args:
        hub: the Hub; an address for one that is not there.
        home: the Hub's cache.
        token: None for nobody; that of the hub's user when it is empty.
        name: such as `hub.model_facts`; `hub_dataset.look` takes the fields of a recipe.
        more: for the environment.

    Returns:
        `answer`, or `error` (with `exit_code`); and `seconds`, `words` (everything that was printed).
    """
    command = [sys.executable, __file__, name, json.dumps(arguments)]
    env = environment(hub, home, "hf_madeUp") if isinstance(hub, str) else hub.environment(home, token=token)
    env |= more
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"words": done.stdout + done.stderr}


def _main(name: str, arguments: str) -> None:
    import importlib

    from skill_train.core.errors import SkillTrainError

    module, _, function = name.rpartition(".")
    asked = (
        _look
        if name == "hub.datasets.inspect_dataset"
        else getattr(importlib.import_module(f"skill_train.{module}"), function)
    )
    started = time.perf_counter()
    try:
        answer: dict[str, Any] = {"answer": _plain(asked(*json.loads(arguments)))}
    except SkillTrainError as error:
        answer = {"error": error.as_dict() | {"exit_code": error.exit_code}}
    print(json.dumps(answer | {"seconds": time.perf_counter() - started}, default=str))


def _look(recipe: dict[str, Any]) -> Any:
    """A dataset, with the format detection that `plan` uses; `pictures`: for a model that reads them."""
    from functools import partial

    from skill_train.data import scan as dataset
    from skill_train.hub import datasets as hub_dataset
    from skill_train.recipe.fields import from_dict

    pictures = recipe.pop("pictures", False)
    find_format = partial(dataset.first_format, pictures=pictures)
    return hub_dataset.inspect_dataset(from_dict({"model": "m"} | recipe), find_format, pictures=pictures)


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    _main(*sys.argv[1:])
