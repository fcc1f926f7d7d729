"""Changes GGUF files on purpose, with gguf-py: its reader takes a file apart, its writer puts it together again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from skill_train.llama.gguf_header import read_gguf

_OWN = ("GGUF.", "general.architecture")  # what the writer adds by itself


def rewrite(
    source: Path,
    out: Path,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Callable[[Any], Any]] | None = None,
    without: tuple[str, ...] = (),
    texts: dict[str, str] | None = None,
    numbers: dict[str, int | list[int]] | None = None,
    most_tensors: int = 0,
) -> Path:
    """`source` with changes, as `out`.

    Args:
        metadata: new values by key; None removes the key.
        tensors: functions from a tensor's data (rows of bytes for quantized ones) to the new data.
        without: tensors to leave out.
        texts, numbers: keys that the source does not have.
        most_tensors: of a part, where the file is written in parts.
    """
    reader, changed = GGUFReader(source), metadata or {}
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(str(out), arch, split_max_tensors=most_tensors)
    for key, field in reader.fields.items():
        value = changed.get(key, field.contents())
        if not key.startswith(_OWN) and value is not None:
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], inner)
    for key, text in (texts or {}).items():
        writer.add_string(key, text)
    for key, number in (numbers or {}).items():
        add = {bool: writer.add_bool, list: writer.add_array}.get(type(number), writer.add_uint32)
        add(key, number)
    for tensor in reader.tensors:
        if tensor.name not in without:
            data = (tensors or {}).get(tensor.name, lambda data: data)(tensor.data.copy())
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


def without_tensor(source: Path, out: Path, name: str) -> Path:
    """`source` without one tensor, as `out`. Its metadata stay as they lie, which saves three seconds of a vocabulary
    of 50,000."""
    data, infos, content = source.read_bytes(), b"", b""
    gguf = read_gguf(source)
    first = next(iter(gguf.tensors)).encode()
    begin = at = data.index(struct.pack("<Q", len(first)) + first)
    for tensor in gguf.tensors.values():  # name, dimensions, type; then the place
        end = at + 8 + len(tensor.name.encode()) + 4 + 8 * len(tensor.shape) + 4
        if tensor.name != name:
            infos += data[at:end] + struct.pack("<Q", len(content))
            content += data[tensor.offset : tensor.offset + tensor.n_bytes]
            content += bytes(-len(content) % gguf.alignment)
        at = end + 8
    head = data[:8] + struct.pack("<Q", len(gguf.tensors) - 1) + data[16:begin] + infos
    out.write_bytes(head + bytes(-len(head) % gguf.alignment) + content)
    return out


def finish(writer: GGUFWriter) -> None:
    """Writes the file, with all that the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(source: Path, key: str) -> Any:
    """One value of a file."""
    return GGUFReader(source).fields[key].contents()
