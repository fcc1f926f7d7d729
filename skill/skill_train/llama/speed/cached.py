"""Caches how fast llama.cpp read weights on this machine. `bench` measures it, and later estimates use it."""

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
# Smaller weights fit a processor's cache (servers have up to 400 MB), so their speed is not that of the memory.
LEAST_BYTES = 400e6


class _CachedReading(msgspec.Struct, frozen=True):
    """The result of `bench` on this machine."""

    schema: str
    chip: str
    gigabytes_per_second: records.Number  # 10^9 bytes of weights per second
    basis: str  # the measured file and the day, shown to the user


def read_tensors(file: GgufFile) -> list[Tensor]:
    """The tensors that are read for each token. Embeddings are left out, because a token reads only one row: the input
    embedding, unless it is also the output head, and the per-layer embeddings of Gemma 3n and 4."""
    unread = {"per_layer_token_embd.weight", "token_embd.weight" if "output.weight" in file.tensors else ""}
    return [tensor for name, tensor in file.tensors.items() if name not in unread]


def read_bytes(file: GgufFile) -> float | None:
    """The bytes that are read for each token. None for a mixture of experts, because a token uses only some of them."""
    if file.of_architecture("expert_count"):
        return None
    return float(sum(tensor.n_bytes for tensor in read_tensors(file)))


def remember(machine: MachineFacts, device: str, file: GgufFile, rate: float, day: str) -> float | None:
    """Stores and returns the speed of reading weights, in 10^9 bytes per second. Returns None if it is unknown: the
    file is small or a mixture of experts, or the fixed time of the layers is over 80 % of the time of a token.

    Args:
        device: `cpu` or `gpu`.
        rate: tokens per second of an answer.
        day: the day of the measurement; shown to the user.
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
    """The cached speed of this machine's GPU, or else of its processor. None if neither is in the cache, or the cached
    file is damaged."""
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
