"""Reads the header of a GGUF file: metadata, and the place of each tensor. Invalid bytes are an error.

This is our own reader, because it must survive hostile bytes, and read 150 000 tokens in a fraction of a second.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from skill_train.core.errors import VerificationFailed, not_installed

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_ONLY_COMPUTED = ("Q8_1", "Q8_K")  # types of activations, which are in no file
_DEFAULT_ALIGNMENT = 32
_LEAST_READ, _MOST_READ = 1 << 20, 1 << 30  # bytes; a header with 300,000 tokens and their merges has 15 MB

Value = str | int | float | list[str] | list[int] | list[float]  # a metadata value; all items of an array have one type


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # in GGUF's order, row length first
    kind: str  # the name of the storage type, such as `Q4_K`
    offset: int  # the position of its first byte in the file
    n_bytes: int  # the size of its data

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The checked header of a file."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Value]  # the values by key
    tensors: dict[str, Tensor]  # the tensors by name, in the order of the file
    size_bytes: int  # the actual size of the file
    needed_bytes: int  # the end of the last tensor; its padding may follow

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def tokens(self) -> list[str]:
        """The texts of the vocabulary's tokens, by id."""
        return self.strings("tokenizer.ggml.tokens")

    @property
    def matrices(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]

    @property
    def bits_per_weight(self) -> float:
        """The mean over all matrices, with the scales of quantized blocks."""
        return 8 * sum(t.n_bytes for t in self.matrices) / max(1, sum(t.elements for t in self.matrices))

    def of_architecture(self, key: str) -> Value | None:
        """Value of `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str) -> int | None:
        """Value of `<architecture>.<key>` if it is a whole number above 0, or else None."""
        value = self.of_architecture(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty if the key is missing or has another type."""
        return self._array(key, str)

    def integers(self, key: str) -> list[int]:
        """An array of whole numbers; empty as in `strings`."""
        return self._array(key, int)

    def numbers(self, key: str) -> list[float]:
        """An array of numbers of any kind; empty as in `strings`."""
        return self._array(key, (int, float))

    def _array(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self.metadata.get(key)  # an array has one type, so the first value shows it
        return value if isinstance(value, list) and all(isinstance(first, kind) for first in value[:1]) else []


_SHOWN = 300  # characters of an error message: a name in a damaged file may have any length


class _Broken(Exception):
    """Internal: what is wrong with the bytes. `read_gguf` turns it into VerificationFailed."""


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header of a file.

    Raises:
        VerificationFailed: the file cannot be read, is not GGUF, is truncated or contradicts itself.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _Broken("it is a pipe, a device or a folder")
            return _parse(path, _Cursor(file, status.st_size))
    except OSError as error:
        hint = "check the file and its permissions, or export it again: skill-train export-gguf RUN"
        raise bad_gguf(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except ValueError as error:  # names may not be UTF-8
        raise bad_gguf(f"{path.name} is not a GGUF file: {error}") from None
    except _Broken as error:
        hint = "make it again: skill-train export-gguf RUN"
        raise bad_gguf(f"{path.name} is damaged: {str(error)[:_SHOWN]}", hint=hint) from None


def bad_gguf(
    message: str, *, expected: str = "", got: str = "", hint: str = "export it again: skill-train export-gguf RUN"
) -> VerificationFailed:
    """The error of a file that cannot be read, or that llama.cpp does not run."""
    return VerificationFailed(message, code="bad_gguf", expected=expected, got=got, hint=hint)


_NO_MODELS = {"adapter": "an adapter", "mmproj": "a projector", "imatrix": "an importance matrix"}  # `general.type`


def is_model(file: GgufFile) -> bool:
    """Whether `general.type` is `model` or missing, or is an unknown type while the file has a token embedding."""
    kind = file.metadata.get("general.type", "model")
    return kind == "model" or (str(kind) not in _NO_MODELS and "token_embd.weight" in file.tensors)


def read_model_file(path: Path) -> GgufFile:
    """Reads the header of a language model.

    Raises:
        VerificationFailed: as for `read_gguf`, or the file is an adapter, a projector or an importance matrix.
    """
    file = read_gguf(path)
    kind = _NO_MODELS.get(str(file.metadata.get("general.type")))
    if kind is not None and "token_embd.weight" not in file.tensors:
        raise bad_gguf(
            f"{path.name} holds {kind} and no model",
            expected="the GGUF file of a language model",
            got=f"general.type {file.metadata['general.type']}",
            hint="give the file of the model: skill-train export-gguf RUN makes it",
        )
    return file


def with_all_parts(file: GgufFile) -> GgufFile:
    """Adds the tensors and sizes of the other parts to the first part of a split model. Reads the other parts."""
    count = file.metadata.get("split.count")
    numbers = range(2, count + 1) if isinstance(count, int) else ()
    names = (re.sub(r"00001(?=-of-\d{5}\.gguf$)", f"{number:05}", file.path.name) for number in numbers)
    parts = [file, *(read_gguf(file.path.with_name(name)) for name in names)]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    return replace(file, tensors=tensors, size_bytes=sum(part.size_bytes for part in parts))


def _at_once(path: str, flags: int) -> int:
    """Opens a file. Does not wait for a writer if the file is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Cursor:
    """Reads a file from its start, and never past its end. `data` is the part that was read so far. With a memory map,
    a file that is truncated meanwhile would end the process."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size
        self.data = b""
        self.at = 0

    def need(self, end: int, part: str) -> bytes:
        """Returns `data`, after reading the file at least up to the byte `end`. `part` is for the error message."""
        if end > self.size:
            count = end - self.at
            raise _Broken(f"it ends inside {part} (byte {self.at}, {count} more needed, {self.size} bytes long)")
        if end > _MOST_READ:
            raise _Broken(f"{part} ends at byte {end}, and no header is that long")
        if end > len(self.data):  # reads at least twice as much, so that few copies are needed
            self.data += self._file.read(max(end - len(self.data), len(self.data), _LEAST_READ))
        if end > len(self.data):
            raise _Broken(f"it ends inside {part}: it was cut while it was read")
        return self.data

    def take(self, count: int, part: str) -> bytes:
        start, end = self.at, self.at + count
        data, self.at = self.need(end, part), end
        return data[start:end]

    def number(self, code: str, part: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), part))[0]

    def text(self, part: str) -> str:
        return self.take(self.number("Q", part), part).decode("utf-8", errors="surrogateescape")


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.take(4, "the magic number") != b"GGUF":
        raise _Broken("it does not begin with GGUF")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise _Broken(f"its version is {version}, this reads {_VERSIONS}")
    tensor_count, entry_count = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    metadata = _metadata(cursor, entry_count)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Broken(f"its alignment is {alignment!r}, not a power of two")
    tensors = _tensors(cursor, tensor_count, alignment)
    needed = _check_layout(tensors, cursor.at, alignment, cursor.size)
    return GgufFile(path, version, alignment, metadata, {t.name: t for t in tensors}, cursor.size, needed)


def _metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise _Broken(f"metadata key {key!r} is there twice")
        metadata[key] = _value(cursor, cursor.number("I", key), key)
    return metadata


def _value(cursor: _Cursor, kind: int, key: str) -> Value:
    if kind == _STRING:
        return cursor.text(key)
    if kind in _SCALARS:
        number: int | float = cursor.number(_SCALARS[kind], key)
        return number
    if kind != _ARRAY:
        raise _Broken(f"metadata {key!r} has the unknown type {kind}")
    item, count = cursor.number("I", key), cursor.number("Q", key)
    if item == _STRING:
        return _strings(cursor, count, key)
    if item not in _SCALARS:
        raise _Broken(f"metadata {key!r} is an array of the unknown type {item}")
    code = _SCALARS[item]
    return list(struct.unpack(f"<{count}{code}", cursor.take(count * struct.calcsize(code), key)))


def _strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    if count * 8 > cursor.size - cursor.at:  # each has a length of 8 bytes
        raise _Broken(f"metadata {key!r} claims {count} strings, more than the file can hold")
    # A vocabulary has up to 300,000 strings, so this loop does the same as `text` without its calls.
    strings, data, at, length = [], cursor.data, cursor.at, struct.Struct("<Q")
    for _ in range(count):
        start = at + length.size
        if start > len(data):
            data = cursor.need(start, key)
        at = start + length.unpack_from(data, at)[0]
        if at > len(data):
            data = cursor.need(at, key)
        strings.append(data[start:at].decode("utf-8", errors="surrogateescape"))
    cursor.at = at
    return strings


def _tensors(cursor: _Cursor, count: int, alignment: int) -> list[Tensor]:
    sizes, tensors = _type_sizes(), []
    for _ in range(count):
        name = cursor.text("a tensor's name")
        dimensions = cursor.number("I", name)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Broken(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(cursor.number("Q", name) for _ in range(dimensions))
        kind, offset = cursor.number("I", name), cursor.number("Q", name)
        if kind not in sizes:
            raise _Broken(f"tensor {name!r} has the unknown type {kind}")
        type_name, block, block_bytes = sizes[kind]
        if 0 in shape or shape[0] % block:
            raise _Broken(f"tensor {name!r} of type {type_name} has the impossible shape {list(shape)}")
        tensors.append(Tensor(name, shape, type_name, offset, math.prod(shape) // block * block_bytes))
    start = -(-cursor.at // alignment) * alignment
    return [replace(tensor, offset=start + tensor.offset) for tensor in tensors]


def _check_layout(tensors: list[Tensor], header_end: int, alignment: int, size: int) -> int:
    """Checks that the tensors are aligned, inside the file, without overlap, and have unique names. Returns the end of
    the last one."""
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise _Broken("two tensors have the same name")
    end = header_end
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset % alignment:
            raise _Broken(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            raise _Broken(f"tensor {tensor.name!r} lies over the one before it")
        end = tensor.offset + tensor.n_bytes
        if end > size:
            raise _Broken(f"tensor {tensor.name!r} ends at byte {end}, the file at {size}: it is cut off")
    return end


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """By the number of a storage type: its name, the elements of one block, and the bytes of one block."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise not_installed("gguf", "gguf") from None
    sizes = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    return {number: size for number, size in sizes.items() if size[0] not in _ONLY_COMPUTED}
