"""Loads a program of bench/ or scripts/, which are no packages, by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load(file: Path, name: str) -> Any:
    """The module of a file, under a name of its own: several benches have a `measure.py`."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
