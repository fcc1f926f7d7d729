"""Our reader of GGUF headers against gguf-py's writer, and against bytes that make no sense."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from gguf_edit import finish
from skill_train.core.errors import VerificationFailed
from skill_train.llama.gguf_header import read_gguf


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "small-f32.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_string("general.name", "klein ✓")
    writer.add_array("tokenizer.ggml.tokens", ["a", "▁b", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("output_norm.weight", np.ones(5, dtype=np.float16))
    finish(writer)
    return path


def test_reads_what_gguf_py_wrote(written: Path) -> None:
    gguf = read_gguf(written)
    assert gguf.architecture == "llama"
    assert gguf.of_architecture("block_count") == 2
    assert gguf.metadata["general.name"] == "klein ✓"
    assert gguf.metadata["tokenizer.ggml.tokens"] == ["a", "▁b", ""]
    assert gguf.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert gguf.metadata["tokenizer.ggml.add_bos_token"] is True
    embedding, norm = gguf.tensors.values()
    assert (embedding.name, embedding.shape, embedding.kind, embedding.n_bytes) == (
        "token_embd.weight",
        (4, 3),
        "F32",
        48,
    )
    assert (norm.kind, norm.n_bytes) == ("F16", 10)
    data = written.read_bytes()
    assert struct.unpack_from("<12f", data, embedding.offset) == tuple(range(12))
    assert gguf.needed_bytes == norm.offset + 10


def test_every_cut_is_refused(written: Path) -> None:
    needed = read_gguf(written).needed_bytes
    data = written.read_bytes()
    for size in range(needed):
        written.write_bytes(data[:size])
        with pytest.raises(VerificationFailed):
            read_gguf(written)


def test_damaged_headers_never_end_in_a_traceback(written: Path) -> None:
    """Any byte may be wrong; the reader answers or refuses, and reserves no more memory than the file has bytes."""
    data, draw = written.read_bytes(), random.Random(0)
    header = min(tensor.offset for tensor in read_gguf(written).tensors.values())
    refused = 0
    for _ in range(600):
        broken = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(header)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        written.write_bytes(bytes(broken))
        try:
            read_gguf(written)
        except VerificationFailed:
            refused += 1
    assert refused > 200


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(VerificationFailed, match="cannot be read"):
            read_gguf(path)
