"""The model types that transformers can run as a language model. They are read from its source without an import. The
model's own code is never run."""

import importlib.util
import re
from pathlib import Path

from skill_train.core.errors import UsageError, nearest


def causal_model_types() -> list[str] | None:
    """The values of `model_type` that AutoModelForCausalLM knows; None if transformers is not installed."""
    return _types_in("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def require_known_type(source: str | Path, model_type: str, *, vision: bool) -> None:
    """Refuses a model type that transformers does not have. Does nothing if transformers is not installed.

    Args:
        source: the model, for the message.
        vision: the model reads pictures, so AutoModelForImageTextToText may know it instead.

    Raises:
        UsageError: transformers has no such type.
    """
    text_types, picture_types = causal_model_types(), _types_in("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    if text_types is None or picture_types is None:
        return
    types = text_types + picture_types * vision
    if model_type not in types:
        raise UsageError(
            f"{source} is of model type {model_type!r}, which transformers cannot run as a causal language model"
            + nearest(model_type, types),
            code="unknown_model_type",
            expected="a model type that transformers has without remote code",
            got=model_type,
            hint="pip install --upgrade transformers, if the model is newer than it",
        )


def _types_in(table: str) -> list[str] | None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8").partition(f"\n{table} = ")[2].partition("]\n")[0]
    return re.findall(r'^ +\("([\w.-]+)"', text, re.MULTILINE)
