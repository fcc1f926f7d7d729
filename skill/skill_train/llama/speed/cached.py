"""How fast llama.cpp read weights on this machine, as `bench` measured it. It is in the cache, so that later estimates
can use it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from skill_train.core.errors import UsageError
from skill_train.estimate.decode import FAMILIES
from skill_train.estimate.targets import family_of
from skill_train.facts import MachineFacts, MeasuredReading
from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.machine.read import cache_file
from skill_train.run import records

SCHEMA = "skill-train/reading/1"
# Smaller weights stay in the caches of a processor, so they say nothing about its memory. Servers have up to 400 MB.
LEAST_BYTES = 400e6


class _CachedReading(msgspec.Struct, frozen=True):
    """What a bench of this machine measured."""

    schema: str
    chip: str
    gigabytes_per_second: records.Number  # 10^9 bytes of weights
    basis: str  # the file and the day, for the reader


def read_tensors(file: GgufFile) -> list[Tensor]:
    """The tensors that one token reads: all but the embeddings of which it takes one row. An input embedding that is
    also the output head is read, and those of each layer (Gemma 3n and 4) are not."""
    unread = {"per_layer_token_embd.weight", "token_embd.weight" if "output.weight" in file.tensors else ""}
    return [tensor for name, tensor in file.tensors.items() if name not in unread]


def read_bytes(file: GgufFile) -> float | None:
    """Bytes that one token reads. None for a mixture of experts, of which it reads a part."""
    if file.of_architecture("expert_count"):
        return None
    return float(sum(tensor.n_bytes for tensor in read_tensors(file)))


def remember(machine: MachineFacts, device: str, file: GgufFile, rate: float, day: str) -> float | None:
    """Stores how fast weights were read, in 10^9 bytes a second. None when the file does not tell it: it is small, a
    mixture of experts, or the time was that of the layers.

    Args:
        device: where it ran, `cpu` or `gpu`.
        rate: tokens a second of an answer.
        day: when it was measured; shown to the reader.
    """
    count, layers = read_bytes(file), file.of_architecture("block_count")
    if count is None or count < LEAST_BYTES or not isinstance(layers, int):
        return None
    seconds = 1 / rate - layers * FAMILIES[family_of(machine)].seconds_per_layer
    if seconds <= 0.2 / rate:
        return None
    reached = count / seconds / 1e9
    basis = f"{file.path.name}, {day}"
    with contextlib.suppress(OSError):  # the figures are printed; a cache that cannot be written costs an estimate
        records.write(_path(machine, device), _CachedReading(SCHEMA, machine.chip, reached, basis))
    return reached


def known_reading(machine: MachineFacts) -> MeasuredReading | None:
    """What was measured on this machine: with the GPU where it was, or else with the processor. A cache may be lost or
    torn: then nothing is known."""
    for device in ("gpu", "cpu"):
        try:
            cached = records.read(_path(machine, device), _CachedReading)
        except (OSError, UsageError):
            continue
        if cached.schema == SCHEMA and cached.gigabytes_per_second > 0:
            return MeasuredReading(cached.gigabytes_per_second, cached.basis)
    return None


def _path(machine: MachineFacts, device: str) -> Path:
    return cache_file("reading", machine.system, machine.chip, machine.cores, device)
