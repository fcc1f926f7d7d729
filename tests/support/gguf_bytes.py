"""A small GGUF model written byte by byte, so that each of its parts can be wrong. It loads in llama.cpp in 10 ms."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

UINT32, FLOAT32, STRING, ARRAY, UINT64 = 4, 6, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", FLOAT32: "f", 7: "?", UINT64: "Q", 11: "q", 12: "d"}
_ALIGNMENT, _LAYERS, _WIDTH, _FORWARD = 32, 2, 32, 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Row:
    """One tensor: in the header, and its data. `offset` None is the right one."""

    name: bytes
    dims: list[int]
    data: bytes
    kind: int = 0
    offset: int | None = None


@dataclass
class Gguf:
    """A file in parts. `values` holds each value with its type, as bytes; the counts are those of the parts unless they
    are set."""

    values: dict[bytes, bytes]
    rows: list[Row]
    magic: bytes = b"GGUF"
    version: int = 3
    order: str = "<"
    tensor_count: int | None = None
    value_count: int | None = None
    again: list[bytes] = field(default_factory=list)
    tail: bytes = b""

    def set(self, key: str, value: bytes | None) -> Gguf:
        if value is None:
            del self.values[key.encode()]
        else:
            self.values[key.encode()] = value
        return self

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name.encode())

    def head(self) -> bytes:
        counts = (
            len(self.rows) if self.tensor_count is None else self.tensor_count,
            len(self.values) + len(self.again) if self.value_count is None else self.value_count,
        )
        return self.magic + struct.pack(self.order + "IQQ", self.version, *counts)

    def described(self) -> bytes:
        """The header with its values and its tensors."""
        parts = [self.head()]
        for key in [*self.values, *self.again]:
            parts += [text(key), self.values[key]]
        place = 0
        for row in self.rows:
            offset = place if row.offset is None else row.offset
            parts.append(text(row.name) + struct.pack("<I", len(row.dims)))
            parts.append(b"".join(struct.pack("<Q", length) for length in row.dims))
            parts.append(struct.pack("<IQ", row.kind, offset))
            place += _padded(len(row.data))
        return b"".join(parts)

    def bytes(self) -> bytes:
        head = self.described()
        data = b"".join(row.data.ljust(_padded(len(row.data)), b"\0") for row in self.rows)
        return head.ljust(_padded(len(head)), b"\0") + data + self.tail

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def text(value: bytes) -> bytes:
    """A string without its type."""
    return struct.pack("<Q", len(value)) + value


def string(value: bytes | str) -> bytes:
    return struct.pack("<I", STRING) + text(value.encode() if isinstance(value, str) else value)


def number(value: float, kind: int = UINT32) -> bytes:
    return struct.pack("<I" + _CODES[kind], kind, value)


def strings(values: list[bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def numbers(values: list[float], kind: int = UINT32) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{_CODES[kind]}", ARRAY, kind, len(values), *values)


def _letters() -> list[bytes]:
    """The 256 bytes as a byte-level vocabulary writes them, and the special tokens."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte].encode() for byte in range(256)] + [b"<|im_start|>", b"<|im_end|>"]


def whole() -> Gguf:
    """A Llama of two layers that llama.cpp loads and that answers."""
    tokens = _letters()
    values = {
        "general.architecture": string("llama"),
        "general.name": string("small"),
        "llama.block_count": number(_LAYERS),
        "llama.context_length": number(512),
        "llama.embedding_length": number(_WIDTH),
        "llama.feed_forward_length": number(_FORWARD),
        "llama.attention.head_count": number(2),
        "llama.attention.head_count_kv": number(1),
        "llama.rope.dimension_count": number(_WIDTH // 2),
        "llama.rope.freq_base": number(10000.0, FLOAT32),
        "llama.attention.layer_norm_rms_epsilon": number(1e-5, FLOAT32),
        "llama.vocab_size": number(len(tokens)),
        "general.file_type": number(0),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("qwen2"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": numbers([1] * 256 + [3, 3], 5),
        "tokenizer.ggml.merges": strings([b"t h", b"i n"]),
        "tokenizer.ggml.eos_token_id": number(257),
        "tokenizer.ggml.bos_token_id": number(256),
        "tokenizer.chat_template": string(TEMPLATE),
    }
    draw = random.Random(0)
    shapes = {"token_embd.weight": [_WIDTH, len(tokens)], "output.weight": [_WIDTH, len(tokens)]}
    shapes["output_norm.weight"] = [_WIDTH]
    for layer in range(_LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in _of_layer().items()}
    rows = []
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        data = [1.0] * count if len(shape) == 1 else [draw.gauss(0, 0.2) for _ in range(count)]
        rows.append(Row(name.encode(), shape, struct.pack(f"<{count}f", *data)))
    return Gguf({key.encode(): value for key, value in values.items()}, rows)


def _of_layer() -> dict[str, list[int]]:
    half = _WIDTH // 2
    return {
        "attn_norm": [_WIDTH],
        "attn_q": [_WIDTH, _WIDTH],
        "attn_k": [_WIDTH, half],
        "attn_v": [_WIDTH, half],
        "attn_output": [_WIDTH, _WIDTH],
        "ffn_norm": [_WIDTH],
        "ffn_gate": [_WIDTH, _FORWARD],
        "ffn_up": [_WIDTH, _FORWARD],
        "ffn_down": [_FORWARD, _WIDTH],
    }
