"""The folder of a base model: which of its files belong to the model, and the model's config."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from skill_train.program.events import write_text
from skill_train.program.model_files import JsonObject, foreign_json

# Endings of a base's files that are not copied: weights in any format, pickles, code, and rows of data.
LEFT_OUT = """
    .safetensors .bin .pt .pth .ckpt .pkl .pickle .h5 .msgpack .onnx .onnx_data .gguf .ggml .npz .ot .tflite .mlmodel
    .nemo .py .pyc .so .sh .exe .jsonl .ndjson .csv .tsv .parquet .arrow .log
"""
OTHER_WORK = ("plan.json", "adapter_config.json", "trainer_state.json")  # they mark a run, an adapter, a checkpoint


def config_with(model: str, revision: str | None, attention: str) -> Any:
    """The model's config with the kernel `attention` in every part. A kernel that config.json names would win over an
    argument of from_pretrained (transformers 5.23)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    config._attn_implementation = attention
    return config


def set_fields(config: JsonObject, changes: Mapping[str, object], dtype: str | None) -> dict[str, object]:
    """Changes fields of a config.json at each level that has them, or else at the first. Returns those that changed.
    `dtype` is torch's name of the new type of every weight; None if the types did not change."""
    levels = [level for level in (config, config.get("text_config")) if isinstance(level, dict)]
    changed: dict[str, object] = {}
    names = [name for name in ("dtype", "torch_dtype") if any(name in level for level in levels)] or ["dtype"]
    for name, value in (*changes.items(), *((name, dtype) for name in names if dtype)):
        holders = [level for level in levels if name in level] or [config]
        if any(level.get(name) != value for level in holders):
            changed[name] = value
            for level in holders:
                level[name] = value
    return changed


def add_stops(folder: Path, ends: Collection[int]) -> list[int]:
    """Adds the token ids `ends` to eos_token_id in a model's generation_config.json, before the ids there. transformers
    and vLLM stop at these tokens. Returns the ids that were added. A missing file is created with the tokens of
    config.json, which transformers uses without that file."""
    path = folder / "generation_config.json"
    if not ends:
        return []
    stated: JsonObject = foreign_json(path) if path.is_file() else {}
    if not stated:
        config = foreign_json(folder / "config.json")
        levels, names = (config, config.get("text_config")), ("bos_token_id", "eos_token_id", "pad_token_id")
        stated = {name: at[name] for at in levels if isinstance(at, dict) for name in names if name in at}
    stops = stated.get("eos_token_id")
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    new = sorted({*ends} - {*listed})
    if new:
        both = [*new, *listed]
        write_text(path, json.dumps(stated | {"eos_token_id": both if both[1:] else both[0]}, indent=2) + "\n")
    return new


def files_of_base(base: Path) -> list[Path]:
    """The files that belong to a model's weights, also in sub-folders. Other files in its folder are left out: the
    tuned model may be published, and a run beside the weights holds the rows that it was trained on."""
    files: list[Path] = []
    for root, folders, names in os.walk(base):
        folders[:] = [name for name in folders if not is_other_work(Path(root, name))]
        files += [Path(root, name) for name in names if goes_along(Path(root, name))]
    return sorted(files)


def is_other_work(folder: Path) -> bool:
    """Whether a folder is hidden, is called `runs`, or holds a run, an adapter, a checkpoint or another model."""
    model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    named = folder.name.startswith(".") or folder.name == "runs"
    return named or model or any((folder / name).is_file() for name in OTHER_WORK)


def goes_along(file: Path) -> bool:
    name = file.name
    named = name == "Modelfile" or name.startswith(".") or name.endswith(".failed.json") or ".safetensors" in name
    if named or file.suffix.lower() in LEFT_OUT.split() or not file.is_file():
        return False
    if file.suffix != ".json":
        return True
    rows = _start(file).startswith(b"[") and name != "modules.json"  # of sentence-transformers, which converters read
    return not rows and not is_own_record(file)


def is_own_record(file: Path) -> bool:
    """Whether a JSON file is a record of a step of ours."""
    return b'"schema": "skill-train/' in _start(file)


def _start(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(200).lstrip()
