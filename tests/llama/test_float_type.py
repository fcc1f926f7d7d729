"""f16 or bf16: decided from the weights. Files are written here byte by byte, not by the code under test."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from skill_train.core.errors import UsageError
from skill_train.llama.float_type import choose, largest_magnitude
from skill_train.model.weight_files import stored_tensors

# Values by hand: IEEE 754 binary16 ends at 65504; bfloat16 0x4780 is 2^16 = 65536, 0x477F is 65280.
BF16 = {65536.0: 0x4780, 65280.0: 0x477F, -65536.0: 0xC780, 1.0: 0x3F80, -2.0: 0xC000, float("inf"): 0x7F80}
BF16_NAN = 0x7FC0


def model(folder: Path, **tensors: tuple[str, list[int], bytes]) -> Path:
    """A safetensors file of these tensors (dtype, shape, bytes), as https://huggingface.co/docs/safetensors says."""
    folder.mkdir(exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def bf16(*values: float) -> bytes:
    return b"".join(struct.pack("<H", BF16[value]) for value in values)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    ("dtype", "content", "largest"),
    [
        ("BF16", bf16(1.0, -2.0), 2.0),
        ("BF16", bf16(-65536.0, 1.0), 65536.0),
        ("F32", f32(0.5, -3.25), 3.25),
        ("F16", struct.pack("<2e", -65504.0, 1.0), 65504.0),
        ("F64", struct.pack("<2d", 1e300, -1.0), 1e300),
    ],
)
def test_the_largest_weight_of_each_type(tmp_path: Path, dtype: str, content: bytes, largest: float) -> None:
    weights = stored_tensors(model(tmp_path, w=(dtype, [1, 2], content)))
    assert largest_magnitude(weights["w"]) == largest


def test_a_tensor_read_in_pieces_has_the_same_largest_weight(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("skill_train.llama.float_type._PIECE", 2)
    weights = stored_tensors(model(tmp_path, w=("BF16", [5], bf16(1.0, 1.0, 1.0, -65536.0, 1.0))))
    assert largest_magnitude(weights["w"]) == 65536.0


@pytest.mark.parametrize(
    ("tensor", "outtype", "word"),
    [
        (("BF16", [1, 2], bf16(1.0, 65280.0)), "f16", "keeps 10 bits"),
        (("BF16", [1, 2], bf16(1.0, -65536.0)), "bf16", "too large for f16"),
        (("F16", [1, 1], struct.pack("<e", 65504.0)), "f16", "usual type"),
        (("F32", [1, 1], f32(65504.0)), "f16", "usual type"),
        (("F32", [1, 1], f32(65505.0)), "f32", "bf16 would lose 16 bits"),
        (("F8_E4M3", [1, 2], b"\x00\x00"), "bf16", "F8_E4M3"),
    ],
)
def test_auto_takes_f16_unless_a_matrix_does_not_fit(tmp_path: Path, tensor, outtype: str, word: str) -> None:
    chosen = choose(stored_tensors(model(tmp_path, w=tensor)), "auto")
    assert chosen.outtype == outtype
    assert word in chosen.reason


def test_a_vector_may_be_large_because_it_stays_f32(tmp_path: Path) -> None:
    weights = stored_tensors(model(tmp_path, norm=("BF16", [1], bf16(65536.0)), w=("BF16", [1, 1], bf16(1.0))))
    chosen = choose(weights, "auto")
    assert (chosen.outtype, chosen.largest_weight) == ("f16", 1.0)


def test_f16_that_was_asked_for_and_overflows_is_refused_by_name(tmp_path: Path) -> None:
    weights = stored_tensors(model(tmp_path, big=("BF16", [1, 1], bf16(65536.0))))
    with pytest.raises(UsageError, match="big holds a weight of 65536") as caught:
        choose(weights, "f16")
    assert caught.value.code == "bad_weights"
    assert choose(weights, "bf16").outtype == "bf16"


@pytest.mark.parametrize("content", [bf16(1.0, float("inf")), struct.pack("<2H", 0x3F80, BF16_NAN)])
def test_weights_that_are_not_finite_are_refused_whatever_is_asked(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="NaN or infinity, such as w") as caught:
        choose(stored_tensors(model(tmp_path, w=("BF16", [2], content))), "f32")
    assert caught.value.code == "bad_weights"


def test_float32_nan_is_seen_too(tmp_path: Path) -> None:
    weights = stored_tensors(model(tmp_path, w=("F32", [1, 3], f32(1.0, float("nan"), 2.0))))
    with pytest.raises(UsageError, match="NaN"):
        choose(weights, "auto")
