"""Real models as `plan` sees them on the Hub: their recorded `config.json` and published parameter count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skill_train.facts import ModelFacts
from skill_train.model import config as model_config

CONFIGS = Path(__file__).resolve().parent / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))

_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_GATED = ("google/", "meta-llama/", "mistralai/")
_WITHOUT_TEMPLATE = ("gpt2", "mixtral-8x7b", "olmo-2-7b")


def recorded(name: str) -> dict[str, Any]:
    """`model` (its id), `source`, `date`, `published_parameters` (what its files hold) and `config`.

    Args:
        name: such as `qwen2.5-0.5b`; `NAMES` has them all.
    """
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def write_model(folder: Path, name: str) -> None:
    """The files of a recorded model without its weights: its config tells its size."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(recorded(name)["config"]))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


def recorded_model(name: str) -> ModelFacts:
    """The facts of a recorded model, with a made-up commit."""
    data = recorded(name)
    dtype = _DTYPES[data["config"]["torch_dtype"]] if "torch_dtype" in data["config"] else "F32"
    parameters = data["published_parameters"]
    return model_config.read(
        data["config"],
        source=data["model"],
        stored=model_config.StoredWeights({dtype: parameters}, parameters * _BYTES[dtype]),
        has_chat_template=name not in _WITHOUT_TEMPLATE,
        origin=model_config.Origin(revision="0" * 40, gated=data["model"].startswith(_GATED)),
    )
