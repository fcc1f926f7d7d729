"""Reads and writes a model folder's safetensors files, a block of rows at a time.

A safetensors file is an 8-byte length, a JSON header (name, dtype, shape, byte range) and the raw bytes, without gaps
(https://huggingface.co/docs/safetensors). So the header of a new file can be written first, when shapes and dtypes are
known, and then the tensors in any order. Memory holds a few blocks and never a whole file. Files are read with seek and
not as a memory map, so that the pages of a 5 GB shard do not count as memory of this process.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from skill_train.core.errors import UsageError
from skill_train.model.foreign_files import safetensors_header, weight_files, weight_map
from skill_train.program.model_files import INDEX, ITEM_BITS, SINGLE

BLOCK_BYTES = 2**20  # in fp32: four such blocks fit the cache of one core; with 4 MB, sums take three times as long
_COPIED_BYTES = 4 * 2**20
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class StoredTensor(msgspec.Struct, frozen=True):
    file: Path
    dtype: str  # safetensors' name of the type, such as `BF16`
    shape: tuple[int, ...]
    start: int  # the position of its first byte in the file
    size: int  # its size in bytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def flat(self) -> StoredTensor:
        """The same numbers in one row of them."""
        return replace(self, shape=(self.elements,))


class Shard(msgspec.Struct, frozen=True):
    """One file: its tensors in the order of their bytes, and the text metadata of its header."""

    name: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_folder(folder: Path) -> list[Shard]:
    """The weight files in the folder's index, or its only one. Other safetensors files do not belong to the model.

    Raises:
        UsageError: there are no safetensors weights, a file is broken, or the index does not match its files.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise _no_weights(folder)
        return [read_shard(folder / SINGLE)]
    weight_files(folder)  # refuses an index beside a single file that it does not name
    named = weight_map(folder / INDEX)
    shards = [read_shard(folder / name) for name in sorted(set(named.values()))]
    file_names = {tensor: shard.name for shard in shards for tensor in shard.tensors}
    wrong = [tensor for tensor, name in named.items() if file_names.get(tensor) != name]
    if wrong or sum(len(shard.tensors) for shard in shards) != len(file_names):
        raise UsageError(
            f"{folder / INDEX} does not match the weight files",
            code="broken_model",
            expected="each tensor in the one file that the index names",
            got=f"{wrong[0]!r} is not in {named[wrong[0]]} alone" if wrong else "a tensor in two files",
            hint="download the base model again",
        )
    return shards


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The header entry of every tensor of a model folder, by name. Raises what `read_folder` raises."""
    return {name: stored for shard in read_folder(folder) for name, stored in shard.tensors.items()}


def read_shard(file: Path) -> Shard:
    """The header of one file.

    Raises:
        UsageError: the file is missing or truncated, or its header is wrong.
    """
    try:
        header = safetensors_header(file)
    except FileNotFoundError:
        raise UsageError(
            f"{file} does not exist",
            code="missing_file",
            expected="a safetensors file",
            got="no such file",
            hint="download or save the file again",
        ) from None
    tensors = {
        name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]), header.data_start + begin, end - begin)
        for name, entry in sorted(header.tensors.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        for begin, end in [entry["data_offsets"]]
    }
    return Shard(file.name, tensors, header.metadata)


@contextlib.contextmanager
def wide_rows(stored: StoredTensor, most: int) -> Iterator[Callable[[int, int], tuple[Any, Any]]]:
    """A function that reads the rows `start` to `stop`, at most `most`, both in the stored type and in fp32. All calls
    share the same memory, so that the system need not map and zero as many bytes as the model has."""
    import torch

    columns, row_bytes = math.prod(stored.shape[1:]), stored.size // max(1, stored.shape[0])
    raw = bytearray(most * row_bytes)
    wide = torch.empty(most, columns, dtype=torch.float32)
    with open(stored.file, "rb", buffering=0) as file:

        def read(start: int, stop: int) -> tuple[Any, Any]:
            file.seek(stored.start + start * row_bytes)
            if file.readinto(memoryview(raw)[: (stop - start) * row_bytes]) != (stop - start) * row_bytes:
                raise _incomplete(stored)
            values = torch.frombuffer(raw, dtype=torch_dtype(stored.dtype), count=(stop - start) * columns)
            values = values.view(stop - start, columns)
            return values, wide[: stop - start].copy_(values)

        yield read


def read_rows(stored: StoredTensor, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of the first axis as a torch tensor in the stored dtype, on the CPU."""
    import torch

    row_bytes = stored.size // max(1, stored.shape[0])
    buffer = bytearray((stop - start) * row_bytes)
    with open(stored.file, "rb", buffering=0) as file:
        file.seek(stored.start + start * row_bytes)
        read = 0
        while read < len(buffer):  # one read returns at most 2 GiB
            count = file.readinto(memoryview(buffer)[read:])
            if not count:
                raise _incomplete(stored)
            read += count
    return torch.frombuffer(buffer, dtype=torch_dtype(stored.dtype)).reshape(stop - start, *stored.shape[1:])


def read_tensor(stored: StoredTensor) -> Any:
    """The whole tensor as a torch tensor, in its stored dtype."""
    import torch

    if not stored.size:
        return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    return read_rows(stored.flat, 0, stored.elements).reshape(stored.shape)


def copy_bytes(stored: StoredTensor, write: Callable[[Any], None]) -> None:
    """Passes the bytes of the tensor to `write`, unchanged, whatever their type."""
    for block in _pieces(stored):
        write(block)


def same_bytes(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Whether both have the same dtype, shape and bytes."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return all(first == second for first, second in zip(_pieces(tensor), _pieces(other), strict=True))


def _pieces(stored: StoredTensor) -> Iterator[bytes]:
    with open(stored.file, "rb") as file:
        file.seek(stored.start)
        bytes_left = stored.size
        while bytes_left:
            block = file.read(min(bytes_left, _COPIED_BYTES))
            if not block:
                raise _incomplete(stored)
            yield block
            bytes_left -= len(block)


def new_shard(
    file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> dict[str, StoredTensor]:
    """Writes the header of a file and sets its full size; returns the place of each tensor.

    Args:
        tensors: dtype and shape by name, in the order of their bytes (see `in_order`). Only float types.
    """
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + position)
    return read_shard(file).tensors


@contextlib.contextmanager
def written_to(place: StoredTensor) -> Iterator[Callable[[Any], None]]:
    """A function that appends bytes to one tensor of a `new_shard`."""
    with open(place.file, "r+b") as opened:
        opened.seek(place.start)
        yield opened.write  # type: ignore[misc]
        written = opened.tell() - place.start
    if written != place.size:
        raise AssertionError(f"{place.file.name}: header promises {place.size} bytes, {written} were written")


def in_order(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors with the widest types first, so that each starts at a multiple of its item size."""
    return dict(sorted(tensors.items(), key=lambda item: -ITEM_BITS[item[1][0]]))


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ITEM_BITS[dtype] // 8


def torch_dtype(dtype: str) -> Any:
    """torch's type for one of the float types that a merge can compute with."""
    import torch

    return {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]


def _incomplete(stored: StoredTensor) -> UsageError:
    return UsageError(f"{stored.file} is incomplete", code="broken_model", hint="download the file again")


def _no_weights(folder: Path) -> UsageError:
    if not folder.is_dir():
        return UsageError(
            f"{folder} is not a folder", code="missing_file", got=str(folder), hint="use the path of a model folder"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return UsageError(
            f"{folder} holds only pickle weights ({pickles[0]}), which can run code when they are read",
            code="no_safetensors",
            expected=SINGLE,
            got=", ".join(pickles[:3]),
            hint="use a revision of the model with safetensors; or, if you trust the file, load it with transformers, "
            "save_pretrained(NEW_FOLDER), and copy the tokenizer beside it",
        )
    return UsageError(
        f"{folder} has no weights",
        code="missing_file",
        expected=f"{SINGLE}, or {INDEX} and the files that it names",
        got="neither",
        hint="use the folder of a full-precision Hugging Face model",
    )
