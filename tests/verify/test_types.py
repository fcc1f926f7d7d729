"""The type of a file where few rows fit it, and how much is compared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import gguf_bytes
import gguf_edit
import gguf_maker
import tiny_families
from skill_train.llama.gguf_header import GgufFile, Tensor, read_gguf
from skill_train.verify.check import Findings
from skill_train.verify.check_adapter import files_by_kind
from skill_train.verify.check_header import check_file, check_types, file_type
from skill_train.verify.run_checks import unquantized
from skill_train.verify.sample_texts import sample_of

Q4_K_M = 15  # LLAMA_FTYPE_MOSTLY_Q4_K_M, llama.h
# Qwen2.5-0.5B: 24 layers of width 896, which is not a multiple of 256; only the down projections' rows (4864) fit. Its
# published q4_k_m file stores half of those as Q6_K (use_more_bits in llama.cpp's src/llama-quant.cpp), the rest as
# Q4_K, and falls back to Q5_0 and Q8_0 elsewhere: seen in the file that llama.cpp makes of that shape, 2026-11-21.
LAYERS, WIDTH, INNER = 24, 896, 4864


def a_file(finer: int, coarser: int) -> GgufFile:
    """`finer` down projections as Q6_K and `coarser` as Q4_K, everything else fallen back."""
    tensors = {}
    kinds = ["Q6_K"] * finer + ["Q4_K"] * coarser
    for number, kind in enumerate(kinds):
        for name, shape, stored in (
            (f"blk.{number}.ffn_down.weight", (INNER, WIDTH), kind),
            (f"blk.{number}.ffn_up.weight", (WIDTH, INNER), "Q5_0"),
            (f"blk.{number}.attn_v.weight", (WIDTH, 128), "Q8_0"),
        ):
            tensors[name] = Tensor(name, shape, stored, 0, 0)
    metadata = {"general.architecture": "qwen2", "general.file_type": Q4_K_M}
    return GgufFile(Path("model-q4_k_m.gguf"), 3, 32, metadata, tensors, 0, 0)


@pytest.mark.parametrize(("finer", "coarser", "verdict"), [(12, 12, "pass"), (13, 11, "pass"), (24, 0, "fail")])
def test_a_mixture_whose_finer_half_is_all_that_fits(finer: int, coarser: int, verdict: str) -> None:
    gguf = a_file(finer, coarser)
    assert Counter(tensor.kind for tensor in gguf.tensors.values())["Q5_0"] == LAYERS
    assert check_types(gguf).verdict == verdict


# What llama.cpp (llama-cpp-python 0.3.36) makes of that shape, seen on 2026-11-30: the number of the type, and the
# kinds of the down projections, of up, gate, q and k, and of attn_output and v.
MIXTURES = {
    "q2_k": (10, {"Q3_K": 24}, "Q4_0", "Q4_0"),
    "q3_k_s": (11, {"Q3_K": 24}, "Q4_0", "Q4_0"),
    "q3_k_m": (12, {"Q5_K": 1, "Q4_K": 23}, "Q4_0", "Q5_0"),
    "q3_k_l": (13, {"Q5_K": 24}, "Q4_0", "Q5_1"),
    "q4_k_m": (15, {"Q6_K": 12, "Q4_K": 12}, "Q5_0", "Q5_0"),
}


@pytest.mark.slow
def test_mxfp4_moe_holds_the_experts_alone_in_mxfp4(tmp_path: Path) -> None:
    """llama.cpp stores every other matrix as Q8_0, which is most of them in gpt-oss."""
    good = tmp_path / "model-mxfp4_moe.gguf"
    gguf_maker.quantize(tiny_families.gguf("gptoss"), {"mxfp4_moe": good})
    check = check_types(read_gguf(good))
    assert (check.verdict, check.detail) == ("pass", "6 of 6 matrices are MXFP4")
    wrong = tmp_path / "wrong.gguf"
    gguf_edit.rewrite(tiny_families.gguf("gptoss", "q8_0"), wrong, metadata={"general.file_type": 38})
    assert check_types(read_gguf(wrong)).verdict == "fail"


@pytest.mark.parametrize(("experts", "verdict"), [("MXFP4", "pass"), ("Q8_0", "fail")])
def test_mxfp4_moe_of_gpt_oss_20b(experts: str, verdict: str) -> None:
    """Its width is 2880, so of all matrices only attn_output, with rows of 4096, fits blocks of 256."""
    shapes = [(f"attn_{part}", 2880, "Q8_0") for part in "qkv"] + [("attn_output", 4096, "Q8_0")]
    shapes += [(f"ffn_{part}_exps", 2880, experts) for part in ("gate", "up", "down")]
    tensors = {}
    for name, width, kind in ((f"blk.{n}.{name}.weight", *rest) for n in range(LAYERS) for name, *rest in shapes):
        tensors[name] = Tensor(name, (width, 2880, 32) if "exps" in name else (width, 4096), kind, 0, 0)
    metadata = {"general.architecture": "gpt-oss", "general.file_type": 38}
    assert check_types(GgufFile(Path("model-mxfp4_moe.gguf"), 3, 32, metadata, tensors, 0, 0)).verdict == verdict


def mixture(number: int, down: dict[str, int], others: str, attention: str) -> GgufFile:
    """A file of Qwen2.5-0.5B's shape that states the type of this number, a member of LlamaFileType."""
    shapes = [(f"blk.{n}.ffn_down.weight", INNER, kind) for n, kind in enumerate(Counter(down).elements())]
    for n in range(LAYERS):
        shapes += [(f"blk.{n}.{name}.weight", WIDTH, others) for name in ("ffn_up", "ffn_gate", "attn_q", "attn_k")]
        shapes += [(f"blk.{n}.{name}.weight", WIDTH, attention) for name in ("attn_output", "attn_v")]
    tensors = {name: Tensor(name, (row, WIDTH), kind, 0, 0) for name, row, kind in shapes}
    metadata = {"general.architecture": "qwen2", "general.file_type": number}
    return GgufFile(Path("model.gguf"), 3, 32, metadata, tensors, 0, 0)


@pytest.mark.parametrize("quant", MIXTURES)
def test_a_mixture_that_stores_all_that_fits_in_a_finer_type(quant: str) -> None:
    assert check_types(mixture(*MIXTURES[quant])).verdict == "pass"


@pytest.mark.parametrize(("stated", "made"), [("q3_k_m", "q4_k_m"), ("q4_k_m", "q3_k_m"), ("q2_k", "q4_k_m")])
def test_rows_that_fit_no_type_tell_another_type_too(stated: str, made: str) -> None:
    assert check_types(mixture(MIXTURES[stated][0], *MIXTURES[made][1:])).verdict == "fail"


def test_a_file_that_does_not_say_its_type_has_that_of_its_matrices() -> None:
    """The converter writes no general.file_type for MPT."""
    tensors = {f"blk.{n}.ffn_up.weight": Tensor(f"blk.{n}.ffn_up.weight", (64, 256), "F16", 0, 0) for n in range(2)}
    gguf = GgufFile(Path("model-f16.gguf"), 3, 32, {"general.architecture": "mpt"}, tensors, 0, 0)
    assert file_type(gguf) == "f16" and check_types(gguf).verdict == "pass"
    named = GgufFile(Path("model-bf16.gguf"), 3, 32, {"general.architecture": "mpt"}, tensors, 0, 0)
    assert check_types(named).verdict == "fail"


def test_rows_too_short_for_any_block_say_nothing_of_the_type() -> None:
    """Of Mamba 2, two matrices of a layer are stored as the file's type; four more are kernels and decays in F32."""
    shapes = {"ssm_in": (64, 280), "ssm_out": (128, 64), "ssm_a": (1, 8), "ssm_d": (1, 8), "ssm_conv1d": (4, 160)}
    kinds = {"ssm_in": "F16", "ssm_out": "F16"}
    tensors = {
        f"blk.0.{name}.weight": Tensor(f"blk.0.{name}.weight", shape, kinds.get(name, "F32"), 0, 0)
        for name, shape in shapes.items()
    }
    metadata = {"general.architecture": "mamba2", "general.file_type": 1}  # LLAMA_FTYPE_MOSTLY_F16
    assert check_types(GgufFile(Path("model-f16.gguf"), 3, 32, metadata, tensors, 0, 0)).verdict == "pass"


def test_the_sample_follows_the_model_and_the_user_decides() -> None:
    assert sample_of(135_000_000, None).tokens == 2048
    large = sample_of(494_032_768, None)
    assert (large.tokens, large.prompts, large.answer_tokens) == (256, 2, 16)
    assert sample_of(494_032_768, 4096).tokens == 4096


@pytest.mark.parametrize(("kind", "verdict"), [(None, "pass"), ("model", "pass"), ("modal", "fail")])
def test_a_kind_that_nobody_knows_is_a_broken_file(kind: str | None, verdict: str, tmp_path: Path) -> None:
    """It was left out with a warning, and so the model of a run was judged by nothing."""
    written = gguf_bytes.whole()
    if kind is not None:
        written.set("general.type", gguf_bytes.string(kind))
    file = read_gguf(written.write(tmp_path / "model-f32.gguf"))
    findings = Findings()
    assert files_by_kind([file], (), findings) == ([file], [], []) and findings.not_checked == []
    assert check_file(file).verdict == verdict


@pytest.mark.parametrize(("more", "verdict"), [(0, "pass"), (1, "fail"), (4096, "fail")])
def test_bytes_behind_the_last_tensor(more: int, verdict: str, tmp_path: Path) -> None:
    path = gguf_bytes.whole().write(tmp_path / "model-f32.gguf")
    path.write_bytes(path.read_bytes() + bytes(more))
    assert check_file(read_gguf(path)).verdict == verdict


def test_a_matrix_is_compared_with_nothing(tmp_path: Path) -> None:
    written = gguf_bytes.whole().set("general.type", gguf_bytes.string("imatrix"))
    findings = Findings()
    assert files_by_kind([read_gguf(written.write(tmp_path / "imatrix.gguf"))], (), findings) == ([], [], [])
    assert [check.verdict for check in findings.checks] == ["warn"] and findings.not_checked


def test_the_finest_file_is_the_measure_of_the_others() -> None:
    """By the order of their names f16 comes first, and f32 would be off by its rounding."""
    made = [
        GgufFile(Path(f"m-{name}.gguf"), 3, 32, {"general.file_type": kind}, {}, 0, 0)
        for name, kind in (("bf16", 32), ("f16", 1), ("f32", 0), ("q8_0", 7))
    ]
    assert unquantized(made) is made[2]
    assert unquantized(made[:2]) is made[1]
    assert unquantized(made[3:]) is None
