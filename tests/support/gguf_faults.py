"""Faults that are planted in correct GGUF files, by a name, and the check of `verify` that must fail on each."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gguf_edit
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.reference.low_memory import frugal_model
from skill_train.verify.weights.check import WeightChecks, compare_weights

Edit = Callable[[np.ndarray], None]
BLOCK = 34  # bytes of Q8_0: a scale in f16, and 32 numbers
_SCALARS = {0: "<B", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}  # by GGUF's number of the type
# Ways that cut words otherwise. For Qwen that is not llama-bpe: its vocabulary has no token of several digits.
_PRE = {"qwen2": "gpt-2", "gpt-2": "llama-bpe", "llama-bpe": "gpt-2", "smollm": "gpt-2"}


@dataclass(frozen=True)
class Fault:
    """Attributes:
    check: the one that must fail.
    tensor, edit: whose content is changed, and how.
    metadata: new values by key.
    numbers: the same, numbers and switches, of keys that the file does not have.
    """

    check: str
    tensor: str = ""
    edit: Edit | None = None
    metadata: dict[str, Any] | None = None
    numbers: dict[str, int] | None = None

    def plant(self, good: GgufFile, out: Path) -> Path:
        if self.edit is not None:
            return planted(good, self.tensor, self.edit, out).path
        if not self.numbers and all(isinstance(value, int | float) for value in (self.metadata or {}).values()):
            return _with_other_numbers(good, self.metadata or {}, out)
        return gguf_edit.rewrite(good.path, out, metadata=self.metadata, numbers=self.numbers)


def _with_other_numbers(good: GgufFile, numbers: dict[str, Any], out: Path) -> Path:
    """A copy with other numbers in their places. A file is not taken apart for that, which takes a second."""
    data = bytearray(good.path.read_bytes())
    for key, value in numbers.items():
        named = struct.pack("<Q", len(key)) + key.encode()
        at = data.index(named) + len(named)
        struct.pack_into(_SCALARS[struct.unpack_from("<I", data, at)[0]], data, at + 4, value)
    out.write_bytes(data)
    assert {key: read_gguf(out).metadata[key] for key in numbers} != {key: good.metadata[key] for key in numbers}
    return out


def planted(good: GgufFile, tensor: str, edit: Edit, out: Path) -> GgufFile:
    """A copy of a file with another content of one tensor: `edit` gets its rows, numbers or bytes of Q8_0."""
    shutil.copy(good.path, out)
    where = good.tensors[tensor]
    data = np.memmap(out, dtype=np.uint8, mode="r+", offset=where.offset, shape=(where.n_bytes,))
    rows = data.reshape(where.elements // where.shape[0], -1)
    before = rows.copy()
    edit(rows.view({"F32": np.float32, "F16": np.float16}.get(where.kind, np.uint8)))
    assert (rows != before).any()
    return read_gguf(out)


def times(factor: float, row: int | slice = slice(None)) -> Edit:
    def edit(rows: np.ndarray) -> None:
        if rows.dtype == np.uint8:
            rows = rows.reshape(len(rows), -1, BLOCK)[..., :2].view(np.float16)
        rows[row] = rows[row] * np.asarray(factor, rows.dtype)

    return edit


def exchanged(a: Any, b: Any) -> Edit:
    def edit(rows: np.ndarray) -> None:
        rows[a], rows[b] = rows[b].copy(), rows[a].copy()

    return edit


def filled(value: float, row: int | slice = slice(None)) -> Edit:
    def edit(rows: np.ndarray) -> None:
        rows[row] = value

    return edit


def less_one(rows: np.ndarray) -> None:
    rows -= 1


def one_weight(rows: np.ndarray) -> None:
    """Too little for any figure of a row; of Q8_0 the signs of a block."""
    if rows.dtype == np.uint8:
        rows[11, 2:BLOCK].view(np.int8)[:] *= -1
    else:
        rows[11, 5] *= 1.01


def as_in(good: GgufFile, tensor: str) -> Edit:
    """The content of another tensor."""
    where = good.tensors[tensor]
    data = np.fromfile(good.path, np.uint8, where.n_bytes, offset=where.offset)

    def edit(rows: np.ndarray) -> None:
        rows[:] = data.view(rows.dtype).reshape(rows.shape)

    return edit


def of_weights(good: GgufFile) -> dict[str, tuple[str, Edit]]:
    """What can be wrong with the tensors of this file: each with the tensor and the change."""
    last = good.tensors["token_embd.weight"].shape[1] - 1
    rows = 16 if "gemma" not in good.metadata["general.architecture"] else 32
    up = good.tensors.get("blk.1.ffn_up_exps.weight")
    per_expert, experts = up.shape[1:] if up is not None else (0, 0)
    last_expert = (experts - 1) * per_expert
    found: dict[str, tuple[str, Edit]] = {
        "norm by 2 %": ("blk.1.attn_norm.weight", times(1.02)),
        "norm of the layer before": ("blk.1.attn_norm.weight", as_in(good, "blk.0.attn_norm.weight"))
        if "blk.0.attn_norm.weight" in good.tensors
        else ("", less_one),
        "norm after attention by 2 %": ("blk.1.post_attention_norm.weight", times(1.02)),
        "norm of the keys by 2 %": ("blk.1.attn_k_norm.weight", times(1.02)),
        "norm + 1 dropped": ("blk.0.attn_norm.weight", less_one),
        "last norm + 1 dropped": ("output_norm.weight", less_one),
        "two embedding rows exchanged": ("token_embd.weight", exchanged(17, last - 5)),
        "neighbours in the embedding exchanged": ("token_embd.weight", exchanged(last // 2, last // 2 + 1)),
        "q bias of zeros": ("blk.0.attn_q.bias", filled(0.0)),
        "qkv bias of zeros": ("blk.0.attn_qkv.bias", filled(0.0)),
        "row of ffn_down of zeros": ("blk.1.ffn_down.weight", filled(0, 7)),
        "last row of ffn_up by 5 %": ("blk.0.ffn_up.weight", times(1.05, -1)),
        "two heads exchanged": ("blk.1.attn_q.weight", exchanged(slice(0, rows), slice(rows, 2 * rows))),
        "rows of q exchanged": ("blk.0.attn_q.weight", exchanged(2, 3)),
        "rows of qkv exchanged": ("blk.0.attn_qkv.weight", exchanged(2, 3)),
        "ffn_up of the other layer": ("blk.1.ffn_up.weight", as_in(good, "blk.0.ffn_up.weight"))
        if "blk.0.ffn_up.weight" in good.tensors
        else ("", less_one),
        "row of an expert by 5 %": ("blk.1.ffn_up_exps.weight", times(1.05, last_expert + 9)),
        "row of an expert's way down of zeros": ("blk.0.ffn_down_exps.weight", filled(0, -1)),
        "two experts exchanged": (
            "blk.0.ffn_gate_exps.weight",
            exchanged(slice(0, per_expert), slice(last_expert, last_expert + per_expert)),
        ),
        "rows of the router exchanged": ("blk.1.ffn_gate_inp.weight", exchanged(0, -1)),
        "rope factors of one": ("rope_freqs.weight", filled(1.0)),
        "long rope factors of one": ("rope_factors_long.weight", filled(1.0)),
        "short rope factors exchanged": ("rope_factors_short.weight", lambda rows: exchanged(2, 3)(rows.T)),
        "one weight of the embedding": ("token_embd.weight", one_weight),
        "the embedding as output": ("output.weight", as_in(good, "token_embd.weight")),
    }
    return {name: (tensor, edit) for name, (tensor, edit) in found.items() if tensor in good.tensors}


def of_numbers(good: GgufFile) -> dict[str, Fault]:
    """Each number of the architecture by 5 %, and ten times."""
    found = {}
    for key, value in good.metadata.items():
        if not key.startswith(f"{good.architecture}.") or isinstance(value, bool | str | list) or not value:
            continue
        near = value + max(1, value // 20) if isinstance(value, int) else 1.05 * value
        found[f"{key} by 5 %"] = Fault("metadata", metadata={key: near})
        found[f"{key} ten times"] = Fault("metadata", metadata={key: 10 * value})
    return found


def of_text(good: GgufFile) -> dict[str, Fault]:
    """What can be wrong with the tokenizer of this file and with its chat template."""
    return {**_of_order(good), **_of_ids(good), **_of_template(good)}


def _of_order(good: GgufFile) -> dict[str, Fault]:
    found = {}
    merges, scores = (good.metadata.get(f"tokenizer.ggml.{name}") for name in ("merges", "scores"))
    if merges:
        at = len(merges) // 2
        lists = {
            "one merge dropped": merges[:at] + merges[at + 1 :],
            "two merges exchanged": [*merges[:at], merges[at + 1], merges[at], *merges[at + 2 :]],
            "2 % of the merges dropped": [one for number, one in enumerate(merges) if number % 50 != 49],
        }
        found = {name: Fault("vocabulary", metadata={"tokenizer.ggml.merges": one}) for name, one in lists.items()}
    if scores and not merges:  # llama.cpp reads no scores of Gemma 4
        found["scores reversed"] = Fault("vocabulary", metadata={"tokenizer.ggml.scores": scores[::-1]})
    return found


def _of_ids(good: GgufFile) -> dict[str, Fault]:
    """An ordinary token where text ends; plain text that begins with another token; text cut into other words."""
    found = {
        "an ordinary token as eos": _number(good, "special_tokens", "eos_token_id", 300),
        "an ordinary token as eot": _number(good, "stop_tokens", "eot_token_id", 300),
    }
    adds = {"llama": True, "gpt2": False}.get(good.metadata["tokenizer.ggml.model"])  # what llama.cpp does by itself
    adds = good.metadata.get("tokenizer.ggml.add_bos_token", adds)
    if good.metadata["tokenizer.ggml.model"] != "gemma4":  # whose texts begin with it whatever the file says
        found["add_bos_token flipped"] = _number(good, "special_tokens", "add_bos_token", not adds)
    if good.metadata["tokenizer.ggml.model"] == "gpt2":
        other_pre = {"tokenizer.ggml.pre": _PRE.get(str(good.metadata.get("tokenizer.ggml.pre")), "gpt-2")}
        found["another way to cut words"] = Fault("tokens", metadata=other_pre)
    return found


def _number(good: GgufFile, check: str, name: str, value: int) -> Fault:
    """Another one, or one that the file does not have."""
    key = f"tokenizer.ggml.{name}"
    return Fault(check, metadata={key: value}) if key in good.metadata else Fault(check, numbers={key: value})


def _of_template(good: GgufFile) -> dict[str, Fault]:
    key = "tokenizer.chat_template"
    template = good.metadata.get(key)
    if not template:
        return {}
    added = {
        "tools": "{% if tools %}x{% endif %}",
        "more than six messages": "{% if messages | length > 6 %}x{% endif %}",
        "a system message": "{% if messages[0].role == 'system' %}x{% endif %}",
    }
    return {
        f"template changed for {what}": Fault("chat_template", metadata={key: template + more})
        for what, more in added.items()
    }


def of_file(good: GgufFile) -> dict[str, Fault]:
    """All of them, by name."""
    tensors = {name: Fault("weights", tensor, edit) for name, (tensor, edit) in of_weights(good).items()}
    return {**tensors, **of_text(good), **of_numbers(good)}


def check_weights(
    files: list[GgufFile], reference: Path, adapter: Path | None, base: Path | None = None
) -> WeightChecks:
    """The check `weights` of each file alone. `base` is what was trained fully."""
    with frugal_model(reference, adapter) as model:
        return compare_weights(files, model, reference, adapter, base)
