"""Reads a model folder: `config.json` and the safetensors headers, never the weights, never code."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from skill_train.errors import UsageError
from skill_train.facts import ModelFacts

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SAMPLE_BYTES = 1 << 20


def read_model(folder: Path) -> ModelFacts:
    """The facts of one model folder.

    Raises:
        UsageError: no folder, no `config.json`, no safetensors, or a broken one.
    """
    config = read_config(folder)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    headers = {path.name: read_header(path) for path in weight_files(folder)}
    tensors = [t for header in headers.values() for name, t in header.items() if name != "__metadata__"]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[tensor["dtype"]] += math.prod(tensor["shape"])
    quantization = config.get("quantization_config")
    unknown = {key: "config.json does not say" for key in ("num_hidden_layers", "hidden_size") if key not in text}
    return ModelFacts(
        source=str(folder),
        fingerprint=fingerprint(folder),
        model_type=str(config.get("model_type", "unknown")),
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        parameters=sum(dtypes.values()) if not quantization else None,
        layers=_first(text, "num_hidden_layers", "n_layer"),
        hidden_size=_first(text, "hidden_size", "n_embd"),
        vocab_size=_first(text, "vocab_size"),
        context=_first(text, "max_position_embeddings", "n_positions", "n_ctx"),
        stored_dtype=dtypes.most_common(1)[0][0] if dtypes else None,
        quantization=str(quantization.get("quant_method", "unknown")) if quantization else None,
        has_chat_template=_has_chat_template(folder),
        unknown=unknown,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} is not a model folder",
            code="not_a_model",
            expected="config.json, tokenizer files and *.safetensors, or the id of a model on the Hub",
            got="no such folder" if not folder.is_dir() else "a folder without config.json",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}", code="broken_model") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object", code="broken_model")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by name.

    Raises:
        UsageError: there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise UsageError(
            f"{folder} has no safetensors weights",
            code="no_safetensors",
            expected="model.safetensors or model-*-of-*.safetensors",
            got=", ".join(pickled[:3]) + " (pickle files are never opened)" if pickled else "no weights",
            hint="save the model again with model.save_pretrained(folder), which writes safetensors",
        )
    return files


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, bounded and checked for its shape.

    Source: the format's description, huggingface/safetensors README, "Format".
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise _broken(path, f"its header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length).decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _broken(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    end = max((_tensor_end(path, name, t) for name, t in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise _broken(path, f"its tensors end at byte {8 + length + end}, the file at {size}")
    return header


def fingerprint(folder: Path) -> str:
    """SHA-256 that changes when the model changes, without reading gigabytes.

    Small files count whole; of a weight file its name, size, header, and its first and last mebibyte of data.
    """
    sha256 = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".model", ".jinja", ".safetensors")):
        size = path.stat().st_size
        sha256.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors" or size <= 4 * _SAMPLE_BYTES:
                sha256.update(file.read())
                continue
            sha256.update(file.read(struct.unpack("<Q", file.read(8))[0] + _SAMPLE_BYTES))
            file.seek(-_SAMPLE_BYTES, 2)
            sha256.update(file.read())
    return sha256.hexdigest()


def _tensor_end(path: Path, name: str, tensor: Any) -> int:
    try:
        start, end = tensor["data_offsets"]
        shape_ok = all(isinstance(n, int) and n >= 0 for n in tensor["shape"]) and isinstance(tensor["dtype"], str)
    except (TypeError, KeyError, ValueError):
        raise _broken(path, f"the entry of {name!r} is malformed") from None
    if not shape_ok or not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
        raise _broken(path, f"the entry of {name!r} is malformed")
    return end


def _broken(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is broken: {why}",
        code="broken_safetensors",
        expected="a whole safetensors file",
        hint="download it again",
    )


def _first(config: dict[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    try:
        return bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template")) if config.is_file() else False
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        return False
