"""Names of quantization types, and what llama.cpp's log says about a file. No native code, no torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType

from skill_train.core.errors import NotInstalled, UsageError
from skill_train.gguf.quant_types import fallbacks_of, quantization_types, type_names
from skill_train.gguf.quantize_worker import _Log, _refused
from skill_train.llama.gguf_header import GgufFile, Tensor

# Numbers of enum llama_ftype in llama.cpp's include/llama.h, copied by hand.
LLAMA_H = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q2_k": 10, "q4_k_m": 15, "q6_k": 18, "iq4_xs": 30, "bf16": 32}


def test_every_type_of_the_installed_llama_cpp_is_known_by_its_number() -> None:
    known = quantization_types()
    assert {name: known[name] for name in LLAMA_H} == LLAMA_H
    assert len(known) >= 34
    assert set(known.values()) <= set(map(int, LlamaFileType))  # a file of another could not be read back
    assert not {"guessed", "nvfp4"} & set(known)


def test_without_gguf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(NotInstalled, match="gguf is not installed"):
        quantization_types()


def test_names_are_understood_in_any_usual_spelling_and_kept_once() -> None:
    assert type_names(["Q4_K_M", "q4-k-m", "q4_k", " q8_0"]) == ["q4_k_m", "q8_0"]


@pytest.mark.parametrize(("wrong", "near"), [("q4_km", "q4_k_m"), ("q80", "q8_0"), ("fp16", "f16")])
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(wrong: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{near}'") as caught:
        type_names(["q8_0", wrong])
    assert (caught.value.code, caught.value.got) == ("cannot_quantize", wrong)
    assert "q4_k_m" in caught.value.expected.split(", ")


def test_the_log_is_read_in_pieces_as_llama_cpp_writes_it() -> None:
    tensors: list[tuple[int, int, str]] = []
    log = _Log(lambda *seen: tensors.append(seen))
    for piece in (
        "warning: blk.0.attn_k.weight            - ncols     64 not divisible by 256 (required for type    q4_K) ",
        "-> falling back to    q5_0\n",
        "warning: blk.0.odd.weight - ncols 20 not divisible by 256 (required for type q6_K) ",
        "(WARNING: must use F16 due to unusual shape) ",
        "-> falling back to     f16\n",
        "[   1/  26] output_norm.weight                   - [   64,     1,     1,     1], type =    f32, ",
        "size =    0.000 MiB\n",
        "[   2/  26] token_embd.weight                    - [   64, 151936,     1,     1], type =    f16, ",
        "converting to q8_0 .. ",
        "size =    18.55 MiB ->     9.85 MiB\n",
        "llama_model_quantize_impl: quant size  =     9.99 MiB (8.51 BPW)\nline: failed to quantize: out of luck\n",
    ):
        log.take(piece)
    why = "rows of 64 weights are not divisible by 256"
    fallbacks = log.plan["fallbacks"]
    assert fallbacks[0] == {"tensor": "blk.0.attn_k.weight", "wanted": "q4_k", "got": "q5_0", "why": why}
    assert (fallbacks[1]["tensor"], fallbacks[1]["got"]) == ("blk.0.odd.weight", "f16")
    assert (0, 26, "output_norm.weight") in tensors
    assert (1, 26, "token_embd.weight") in tensors
    assert log.plan["changed"] == 1
    assert log.plan["size_bytes"] == 10_485_760  # 10 MiB: 9.99 rounded up by a hundredth
    assert log.errors == ["out of luck"]
    assert not log.plan["needs_imatrix"]


def gguf(*tensors: Tensor) -> GgufFile:
    return GgufFile(Path("x.gguf"), 3, 32, {}, {tensor.name: tensor for tensor in tensors}, 0, 0)


def test_an_embedding_that_llama_cpp_demotes_without_a_word_is_a_fallback_too() -> None:
    file = gguf(
        Tensor("token_embd.weight", (64, 1000), "Q8_0", 0, 0),
        Tensor("blk.0.attn_q.weight", (64, 64), "Q5_0", 0, 0),
        Tensor("blk.0.ffn_down.weight", (256, 64), "Q6_K", 0, 0),
    )
    said = [{"tensor": "blk.0.attn_q.weight", "wanted": "q4_k", "got": "?", "why": "w"}]
    found = fallbacks_of(file, said, "q4_k_m")
    assert [(f["tensor"], f["wanted"], f["got"]) for f in found] == [
        ("blk.0.attn_q.weight", "q4_k", "q5_0"),  # what the file has, whatever was said
        ("token_embd.weight", "q6_k", "q8_0"),
    ]
    assert fallbacks_of(file, [], "q8_0") == []  # in a q8_0 file it is what it should be


def test_rows_that_fit_are_no_fallback() -> None:
    assert fallbacks_of(gguf(Tensor("token_embd.weight", (256, 1000), "Q8_0", 0, 0)), [], "q4_k_m") == []


@pytest.mark.parametrize("name", ["q8_0", "Q8_0", "q4_k_m", "q5_k_m", "iq2_xs"])
def test_a_type_that_was_refused_is_not_recommended(name: str) -> None:
    """As of DeepSeek-V2, of which llama.cpp refused q8_0."""
    error = _refused("tensor has an odd shape", {"source": "m-f16.gguf", "out": "m.gguf"}, name)
    assert (error.exit_code, error.code) == (2, "cannot_quantize")
    assert name.lower() not in error.hint.lower() and "_" in error.hint.partition("choose ")[2]
