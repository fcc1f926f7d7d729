"""The model types that transformers can run as a language model, read from its source without importing it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def causal_model_types() -> list[str] | None:
    """The values of `model_type` that AutoModelForCausalLM knows; None where transformers is not installed."""
    return _types_in("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def picture_model_types() -> list[str] | None:
    """Those that AutoModelForImageTextToText knows."""
    return _types_in("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def _types_in(table: str) -> list[str] | None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8").partition(f"\n{table} = ")[2].partition("]\n")[0]
    return re.findall(r'^ +\("([\w.-]+)"', text, re.MULTILINE)
