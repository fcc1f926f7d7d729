"""Recorded models on the Hub for tests, with weights that nobody reads."""

from __future__ import annotations

import json
from typing import Any

from hub_emulator import Hub, Repository
from models import recorded


def add_model(
    hub: Hub, place: str | None = None, name: str = "qwen2.5-0.5b", *, weights: bytes = bytes(1000), **config: Any
) -> Repository:
    """`place` is its repository, if that is not its own; `config` changes what it says of itself."""
    about = recorded(name)
    files = {
        "config.json": json.dumps(about["config"] | config).encode(),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "model.safetensors": weights,
    }
    count = about["published_parameters"]
    info = {"safetensors": {"parameters": {"BF16": count}, "total": count}}
    return hub.add("model", place or about["model"], files, info=info)
