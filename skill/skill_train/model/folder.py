"""Reads a model folder: `config.json` and the safetensors headers, never the weights, never code."""

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject, ModelFacts
from skill_train.model import config as model_config
from skill_train.model import foreign_files
from skill_train.model.config import Origin, StoredWeights
from skill_train.model.parameter_count import knows, with_files
from skill_train.model.tower import reads_processor, with_image_processor
from skill_train.model.weight_files import read_shard
from skill_train.program.folders.base import is_own_record
from skill_train.program.model_files import INDEX, MOST_HEADER, SINGLE
from skill_train.program.pictures.processor import PROCESSOR_FILES
from skill_train.run.folder import way_to_model

_SAMPLE_BYTES = 1 << 16
_WORDS = ("merges.txt", "vocab.txt")
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")


def read_model(folder: Path, *, weights_needed: bool = True) -> ModelFacts:
    """The facts of one model folder.

    Args:
        weights_needed: False also accepts a folder without weights; then the parameters come from the config alone.

    Raises:
        UsageError: there is no folder or no `config.json`, or a safetensors file is broken or missing.
    """
    config = read_config(folder)
    lacking = None if weights_needed else _lacking(folder)
    stored = StoredWeights(unknown=lacking) if lacking else _stored(weight_files(folder))
    facts = model_config.read(
        config,
        source=str(folder),
        stored=stored,
        origin=Origin(fingerprint=fingerprint(folder)),
        has_chat_template=_has_chat_template(folder),
        files={path.name for path in folder.iterdir()},
    )
    if lacking is None and not knows(facts.model_type):
        facts = with_files(facts, tensor_shapes(folder))
    facts = with_image_processor(facts, config, processor_files(folder) if reads_processor(config) else {})
    return msgspec.structs.replace(facts, at_hand=lacking is None)


def read_config(folder: Path) -> JsonObject:
    """`config.json` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} is not a model folder",
            code="not_a_model",
            expected="config.json, tokenizer files and *.safetensors, or the id of a model on the Hub",
            got="no such folder" if not folder.is_dir() else "a folder without config.json",
            hint=way_to_model(folder) or "download the whole model, or use its id on the Hub",
        )
    foreign_files.require_sound(folder)
    config: JsonObject = foreign_files.foreign_json(path)  # an object, as `require_sound` refuses others
    return config


def processor_files(folder: Path) -> dict[str, object]:
    """The documents of the image processor by file name. For a file that cannot be read, the reason as a text."""
    documents: dict[str, object] = {}
    for path in (folder / name for name in PROCESSOR_FILES if (folder / name).is_file()):
        try:
            documents[path.name] = foreign_files.foreign_json(path)
        except UsageError as error:
            documents[path.name] = error.message
    return documents


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder that transformers would load, by name.

    Raises:
        UsageError: there are none, or a part is missing.
    """
    used = _used_files(folder)
    if not used:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise UsageError(
            f"{folder} has no safetensors weights",
            code="no_safetensors",
            expected="model.safetensors or model-*-of-*.safetensors",
            got=", ".join(pickled[:3]) + " (pickle files are never opened)" if pickled else "no weights",
            hint="save the model again with model.save_pretrained(folder), which writes safetensors",
        )
    missing = _missing(used)
    if missing:
        raise UsageError(
            f"{folder} is incomplete: {missing}",
            code="broken_model",
            expected="every weight file of the model",
            got=missing,
            hint="download the model again",
        )
    return used


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model folder by name; empty if weights are missing.

    Raises:
        UsageError: a safetensors file is broken.
    """
    if _lacking(folder):
        return {}
    return {name: tensor.shape for path in weight_files(folder) for name, tensor in read_shard(path).tensors.items()}


def used_weights(names: Iterable[str]) -> list[str]:
    """The safetensors files beside a config that transformers loads, sorted.

    A repository can contain the same weights twice: Mistral's has `consolidated.safetensors` beside the shards.
    """
    ordered = sorted(names)
    if SINGLE in ordered:
        return [SINGLE]
    return [name for name in ordered if _SHARD.fullmatch(name)] or ordered


def _used_files(folder: Path) -> list[Path]:
    """The files that the folder's index names, or else all that exist."""
    if (folder / INDEX).is_file():
        return foreign_files.weight_files(folder)
    return [folder / name for name in used_weights(path.name for path in folder.glob("*.safetensors"))]


def _lacking(folder: Path) -> str | None:
    """Why the weights cannot be counted; None if they can."""
    used = _used_files(folder)
    return _missing(used) if used else "the folder holds no safetensors"


def _missing(used: list[Path]) -> str | None:
    """A sentence if files are missing, by the index or by the numbers in the names of the shards; otherwise None."""
    there = sum(path.is_file() for path in used)
    shard = _SHARD.fullmatch(used[0].name)
    whole = max(len(used), int(shard[1]) if shard else 1)
    return None if there == whole else f"only {there} of {whole} weight files are there"


def fingerprint(folder: Path) -> str:
    """A SHA-256 that changes with the model, computed without reading gigabytes.

    It covers the whole content of small files. For a weight file it covers the name, the size, the header, and the
    first and last 64 KiB of the data.
    """
    sha256 = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and _decides(p)):
        size = path.stat().st_size
        sha256.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors" or size <= 4 * _SAMPLE_BYTES:
                sha256.update(file.read())
                continue
            header = min(struct.unpack("<Q", file.read(8))[0], MOST_HEADER)  # of a damaged file it is any number
            sha256.update(file.read(header + _SAMPLE_BYTES))
            file.seek(-_SAMPLE_BYTES, 2)
            sha256.update(file.read())
    return sha256.hexdigest()


def _decides(file: Path) -> bool:
    """Whether loaders read this file: weights, tokenizer, template or settings, but not the record of a step."""
    if file.suffix == ".json":
        return not is_own_record(file)
    return file.suffix in (".model", ".jinja", ".safetensors", ".tiktoken") or file.name in _WORDS


def _stored(files: list[Path]) -> StoredWeights:
    elements: Counter[str] = Counter()
    for path in files:
        for tensor in read_shard(path).tensors.values():
            elements[tensor.dtype] += math.prod(tensor.shape)
    return StoredWeights(elements, sum(path.stat().st_size for path in files))


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(foreign_files.foreign_json(config).get("chat_template"))
