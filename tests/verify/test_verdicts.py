"""Verdicts from figures written by hand, without a model."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape

from gguf_edit import finish
from skill_train.core.digests import FileDigest
from skill_train.llama.gguf_header import GgufFile, Tensor, read_gguf
from skill_train.llama.inference import VocabularyFacts
from skill_train.llama.logit_distance import (
    Distance,
    TokenFigures,
    TuningShare,
    change_of,
    normalized,
    summarize,
    summarize_change,
)
from skill_train.llama.pictures.compare import PictureAnswer, PictureChunk
from skill_train.llama.template import Rendered
from skill_train.reference.load import context_length
from skill_train.reference.pictures import PictureReference, ReferencePart
from skill_train.run.export_record import MIX_KEY
from skill_train.run.verify_record import Check, NotChecked, worst
from skill_train.verify.check_adapter import _check_metadata, _check_types
from skill_train.verify.check_answers import check_answers
from skill_train.verify.check_header import check_digest, check_types, file_type, name_type
from skill_train.verify.check_logits import check_logits, check_tuned, with_unread_epsilon
from skill_train.verify.check_template import check_chat_template
from skill_train.verify.check_tokens import check_special_tokens, check_tokens, check_trained, difference
from skill_train.verify.metadata.check import check_metadata
from skill_train.verify.metadata.expected import stated
from skill_train.verify.metadata.rope import table_faults
from skill_train.verify.pictures.measured import MeasuredPictures
from skill_train.verify.pictures.same_pixels import Distances, _judged, check_same_pixels
from skill_train.verify.reference_answers import ReferenceAnswer
from skill_train.verify.template_branches import text_difference
from skill_train.verify.thresholds import limits, model_limits
from skill_train.verify.weights.rows import Rows, row_errors
from skill_train.verify.weights.tensors import check_tensors, output_of_its_own, row_chunks, weights_of

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "head": 4}


def gguf(name: str, file_type: int, kinds: list[str], row: int = 256, **metadata: Any) -> GgufFile:
    tensors = {f"blk.{i}.w.weight": Tensor(f"blk.{i}.w.weight", (row, 8), kind, 0, 0) for i, kind in enumerate(kinds)}
    keys = {"general.architecture": "llama", "general.file_type": file_type, **metadata}
    return GgufFile(Path(name), 3, 32, keys, tensors, 0, 0)


def figures(kl: float | None, ratio: float = 1.0, width: float = 0.0) -> Distance:
    return {
        "mean_kl": kl, "p99_kl": kl, "trimmed_kl": kl, "median_kl": kl, "max_kl": kl, "same_top1": 1.0,
        "perplexity": 5.0 * ratio, "perplexity_reference": 5.0, "perplexity_ratio": ratio,
        "perplexity_ratio_half_width": width, "tokens": 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model-q4_k_m.gguf", "q4_k_m"),
        ("Qwen2-0.5B-Instruct.Q4_K_M.gguf", "q4_k_m"),
        ("qwen2-0_5b-instruct-f16.gguf", "f16"),
        ("x_IQ3_XXS.gguf", "iq3_xxs"),
        ("model.gguf", None),
        ("best-of-q.gguf", None),
    ],
)
def test_type_in_a_name(name: str, expected: str | None) -> None:
    assert name_type(Path(name)) == expected


@pytest.mark.parametrize(
    ("name", "number", "kinds", "row", "verdict"),
    [
        # Numbers of LlamaFileType: 1 f16, 7 q8_0, 15 q4_k_m, 12 q3_k_m.
        ("m-f16.gguf", 1, ["F16"], 256, "pass"),
        ("m-q4_k_m.gguf", 15, ["Q4_K", "Q4_K", "Q6_K"], 256, "pass"),
        ("m.gguf", 15, ["Q4_K", "Q4_K", "Q6_K"], 256, "pass"),
        ("m-q4_k_m.gguf", 7, ["Q8_0"], 256, "fail"),
        ("m-q4_k_m.gguf", 15, ["Q8_0"], 256, "fail"),
        ("m-q4_k_m.gguf", 15, ["Q5_0", "Q5_0", "Q8_0"], 64, "warn"),
        ("m-q3_k_m.gguf", 12, ["IQ4_NL", "IQ4_NL", "Q5_1"], 64, "warn"),
        ("m-q4_k_m.gguf", 15, ["F16"], 64, "fail"),
        ("m-q8_0.gguf", 7, ["Q8_0"], 64, "pass"),
        ("m-q8_0.gguf", 7, [], 64, "fail"),
    ],
)
def test_types(name: str, number: int, kinds: list[str], row: int, verdict: str) -> None:
    check = check_types(gguf(name, number, kinds, row))
    assert check.verdict == verdict, check
    assert check.figures["types"] == Counter(kinds)


@pytest.mark.parametrize(
    ("kinds", "expected"), [(["BF16", "BF16", "F32"], "bf16"), (["F32"], "f32"), (["Q8_0"], "unknown"), ([], "unknown")]
)
def test_a_file_that_states_no_type_has_that_of_most_matrices(kinds: list[str], expected: str) -> None:
    file = gguf("m.gguf", 1, kinds)
    del file.metadata["general.file_type"]
    for name in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight"):  # have types of their own
        file.tensors[name] = Tensor(name, (256, 8), "F16", 0, 0)
    assert file_type(file) == expected


@pytest.mark.parametrize(
    ("own", "reference", "verdict"),
    [
        ([Rendered("a"), Rendered("b")], [Rendered("a"), Rendered("b")], "pass"),
        ([Rendered("a"), Rendered("b")], [Rendered("a"), Rendered("c")], "fail"),
        ([Rendered("a"), Rendered()], [Rendered("a"), Rendered("b")], "fail"),  # refused
        ([Rendered("a"), Rendered("b")], [Rendered("a"), Rendered()], "fail"),
        ([Rendered("a"), Rendered(refused="x")], [Rendered("a"), Rendered(refused="y")], "pass"),
        ("it did not end", [Rendered("a")], "fail"),
        ("it did not end", None, "fail"),
        (None, [Rendered("a")], "fail"),
        ([Rendered("a")], None, "warn"),
        (None, None, ""),
    ],
)
def test_chat_template(own: Any, reference: Any, verdict: str) -> None:
    check = check_chat_template("m.gguf", own=own, reference=reference)
    assert (check.verdict if isinstance(check, Check) else "") == verdict
    if verdict == "pass":  # the text decides then
        check = check_chat_template("m.gguf", own=own, reference=reference, text=("warn", "another text"))
        assert isinstance(check, Check) and (check.verdict, check.detail) == ("warn", "another text")


@pytest.mark.parametrize(
    ("name", "kinds", "verdict"),
    [
        ("m-lora-f16.gguf", ["F16", "F16"], "pass"),
        ("m-lora-f16.gguf", ["F16", "F32"], "pass"),
        ("m-lora-f16.gguf", ["F16", "Q8_0"], "fail"),
        ("m-lora-f16.gguf", ["F32", "F32"], "fail"),
        ("m-lora-q8_0.gguf", ["Q8_0", "F16", "F32"], "pass"),  # rows that are no multiple of a block
        ("m-lora-q8_0.gguf", ["F16", "F16"], "fail"),
        ("m-lora-q8_0.gguf", ["Q8_0", "Q4_0"], "fail"),
        ("m-lora-f32.gguf", ["F32", "F16"], "fail"),
        ("m.gguf", ["F16"], "pass"),
    ],
)
def test_types_of_an_adapters_file(name: str, kinds: list[str], verdict: str) -> None:
    assert _check_types(gguf(name, 1, kinds)).verdict == verdict


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("adapter.lora.alpha", value) for value in (None, 16, 0.0, -16.0, math.inf, math.nan)),
        ("adapter.type", "control_vector"),
        ("adapter.alora.invocation_tokens", [5]),
        ("general.architecture", "qwen2"),
    ],
)
def test_metadata_of_an_adapters_file(key: str, value: Any) -> None:
    good = gguf("m-lora-f16.gguf", 1, ["F16"], **{"adapter.type": "lora", "adapter.lora.alpha": 16.0})
    assert _check_metadata(good, "llama").verdict == _check_metadata(good, None).verdict == "pass"
    check = _check_metadata(gguf("m-lora-f16.gguf", 1, ["F16"], **good.metadata | {key: value}), "llama")
    assert (check.verdict, check.figure) == ("fail", 1) and key in check.detail


def test_a_mix_is_held_to_the_types_that_its_export_recorded() -> None:
    mixed = gguf("m.gguf", 15, ["Q4_K", "Q6_K"], **{MIX_KEY: "0.01"})
    names = list(mixed.tensors)
    recorded = {names[0]: "q4_k", names[1]: "q6_k"}
    assert check_types(mixed).verdict == "warn"  # nothing says what it is a mix of
    assert check_types(mixed, recorded).verdict == "pass"
    other = check_types(mixed, recorded | {"blk.9.w.weight": "q4_k"})
    assert (other.verdict, other.figure, other.threshold) == ("fail", 2, 3)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [({"hidden_act": "relu"}, "warn"), ({"hidden_act": "silu"}, "pass"), ({"attention_bias": True}, "pass")],
)
def test_what_llama_cpp_is_known_to_compute_otherwise_never_passes(fields: dict[str, Any], verdict: str) -> None:
    """The logits of a q4_k_m file alone may lie nearer than its type's own loss."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": 2048}
    file = gguf("m-q4_k_m.gguf", 15, ["Q4_K"], **{"llama.block_count": 2, "llama.context_length": 2048})
    check = check_metadata(file, config | fields)
    assert check.verdict == verdict
    assert ("with silu, and hidden_act says another function" in check.detail) == (verdict == "warn")
    other = check_metadata(file, config | fields | {"num_hidden_layers": 3})
    assert other.verdict == "fail"
    foreign = {"architectures": ["BitNetForCausalLM"]}  # which our converter refuses, and others write
    assert check_metadata(file, config | foreign).verdict == "pass"


def test_metadata_of_a_config_as_transformers_5_writes_it() -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "rms_norm_eps": 1e-06, "max_position_embeddings": 2048}
    rope = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
    written = {"llama.block_count": 2, "llama.embedding_length": 64, "llama.context_length": 2048}
    exact = {"llama.attention.layer_norm_rms_epsilon": 9.999999974752427e-07, "llama.rope.freq_base": 1e6}  # float32
    good = gguf("m-f16.gguf", 1, ["F16"], **written, **exact)
    assert check_metadata(good, config | rope).verdict == "pass"
    unsaid = gguf("m-f16.gguf", 1, ["F16"], **written, **{k: v for k, v in exact.items() if "eps" in k})
    assert check_metadata(unsaid, config | rope).detail == "rope.freq_base is 10000.0, config.json has 1000000.0"
    stretched = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0}}
    assert check_metadata(good, config | stretched).detail == "rope scaling is missing, config.json has yarn"


@pytest.mark.parametrize(
    ("factors", "rope", "told"),
    [
        (
            [1, 2],
            {"rope_type": "default"},
            "rope_freqs.weight changes the rope frequencies, config.json has default rope",
        ),
        ([1, 2, 3], LLAMA3, "rope_freqs.weight has 3 rope factors, config.json gives 2"),
        ([1, 9], LLAMA3, "rope_freqs.weight: rope factor 1 is 9, config.json gives 8"),
        ([1, math.nan], LLAMA3, "rope_freqs.weight: rope factor 1 is nan, config.json gives 8"),
        ([1, 8], LLAMA3, None),
    ],
)
def test_a_table_of_rope_factors(factors: list[float], rope: dict[str, Any], told: str | None, tmp_path: Path) -> None:
    """Of Llama 3: waves of 6.3 and 628 tokens, of which the second is longer than 64 / 1."""
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    finish(writer)
    assert table_faults(read_gguf(tmp_path / "m.gguf"), rope) == ([] if told is None else [told])


def test_a_named_template_that_the_file_has_lost() -> None:
    tokenizer = SimpleNamespace(chat_template={"default": "a", "tool_use": "b"})
    file = gguf("m.gguf", 1, ["F16"], **{"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"})
    assert text_difference(file, tokenizer) == ("pass", "")
    file.metadata["tokenizer.chat_template.tool_use"] = "c"
    assert text_difference(file, tokenizer)[0] == "fail"
    del file.metadata["tokenizer.chat_template.tool_use"]
    assert text_difference(file, tokenizer) == ("fail", "the template named tool_use differs from the reference's")


def test_a_growing_temperature_that_is_left_out() -> None:
    """Ministral 3 has it behind the length of its first training, so no short text shows it."""
    grown = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "llama_4_scaling_beta": 0.1}}
    key, said = "llama.attention.temperature_scale", {"llama.rope.freq_base": 1e6}
    for file, verdict in (({}, "fail"), ({key: 0.1}, "pass"), ({key: 0.2}, "fail")):
        assert check_metadata(gguf("m-f16.gguf", 1, ["F16"], **said, **file), grown).verdict == verdict


def test_limits_follow_the_published_figures() -> None:
    # llama.cpp, tools/perplexity/README.md, Llama 3 8B: mean KL of q8_0 0.001355, of q4_K_M 0.031273.
    assert limits("q8_0").kl[0] == pytest.approx(10 * 0.001355)
    assert limits("q4_k_m").kl[0] == pytest.approx(10 * 0.031273)
    # Qwen2 0.5B: q4_k_m 15.36 / 15.11 = +1.65 %, and q2_k 16.74 / 15.11 = +10.8 % must pass.
    assert limits("q4_k_m").ratio[0] > 15.36 / 15.11 - 1
    assert limits("q2_k").ratio[0] > 10.58 / 7.93 - 1
    # Correct f16 files of merges that are stored in bf16 measured 7.7e-5 and 1.0e-4; an adapter left out 7e-2.
    assert limits("f16").kl[0] < 7.7e-5 and 1.0e-4 < limits("f16", merged_in_bf16=True).kl[0] < 7e-2 / 10
    assert limits("q8_0", merged_in_bf16=True) == limits("q8_0")
    assert limits("bf16", merged_in_bf16=True) == limits("bf16")  # which allows more
    # A divergence of half the variance: a token is off by the root of twice as much.
    assert limits("q8_0").gap == pytest.approx((10 * math.sqrt(0.00271), 15 * math.sqrt(0.00271)))
    assert "no figures published" in limits("q1_0").source


def test_an_epsilon_that_llama_cpp_does_not_read_is_named_where_a_file_does_not_pass() -> None:
    """The limits stay: it is a difference that users see."""
    judged = [check_logits("m.gguf", figures(kl), limits("f16")) for kl in (2e-6, 1e-4)]
    near, far = (with_unread_epsilon(check, 1e-5) for check in judged)
    assert isinstance(near, Check) and isinstance(far, Check)
    assert (near.verdict, far.verdict) == ("pass", "warn")
    assert "epsilon" not in near.detail
    assert "does not read the epsilon of its norms, 1e-05, and computes with 0" in far.detail
    assert with_unread_epsilon(judged[1], None) == judged[1]


@pytest.mark.parametrize(
    ("kind", "kl", "ratio", "width", "verdict"),
    [
        ("f16", 2e-6, 1.0, 0.0, "pass"),
        ("f16", 1e-4, 1.0, 0.0, "warn"),
        ("f16", 1e-3, 1.0, 0.0, "fail"),
        ("f16", 2e-6, 1.05, 0.0, "fail"),
        ("f16", 2e-6, 1.05, 0.06, "pass"),  # the sample says nothing of the ratio
        ("q8_0", 1e-3, 0.9, 0.0, "pass"),  # better by chance
        ("q4_k_m", 0.07, 1.02, 0.0, "pass"),
        ("q4_k_m", 0.7, 1.02, 0.0, "fail"),
    ],
)
def test_logits(kind: str, kl: float, ratio: float, width: float, verdict: str) -> None:
    check = check_logits("m.gguf", figures(kl, ratio, width), limits(kind))
    assert isinstance(check, Check) and check.verdict == verdict


COST = {"mean_kl": 3e-3, "p99_kl": 0.02, "trimmed_kl": 8e-5, "max_kl": 0.14}  # of rounding a mixture to bf16


@pytest.mark.parametrize(
    ("kind", "mean", "trimmed", "verdict"),
    [
        # 100 tokens. All but the farthest: 2e-5 and a quarter of 8e-5 pass. With those: four times 0.14 nats, ten fail.
        ("f16", 1.4e-3, 1e-6, "pass"),  # one token whose router turned: 0.14 / 100
        ("f16", 5.7e-3, 1e-6, "warn"),
        ("f16", 1.5e-2, 1e-6, "fail"),
        ("f16", 4.2e-5, 4.2e-5, "warn"),  # every token a little: no router does that
        ("f16", 3e-4, 3e-4, "fail"),
        ("bf16", 4e-3, 1.1e-3, "pass"),
    ],
)
def test_logits_of_a_model_whose_routers_turn(kind: str, mean: float, trimmed: float, verdict: str) -> None:
    seen = figures(mean) | {"trimmed_kl": trimmed}
    check = check_logits("m.gguf", seen, model_limits(limits(kind), COST, kind))
    assert isinstance(check, Check) and check.verdict == verdict


# Of rounding what goes into products of a tiny Qwen3-Next, 177 tokens: three routers turn, the token in the middle is
# 3e-6 nats off.
NOISE = {
    "f16": {"mean_kl": 0.012, "trimmed_kl": 1.8e-3, "median_kl": 3e-6, "p99_kl": 0.38, "max_kl": 1.1},
    "bf16": {"mean_kl": 0.006, "trimmed_kl": 6e-4, "median_kl": 2e-4, "p99_kl": 0.026, "max_kl": 0.97},
}


@pytest.mark.parametrize(
    ("kind", "mean", "trimmed", "median", "verdict"),
    [
        ("f16", 0.012, 1.8e-3, 3e-6, "pass"),  # what rounding alone does
        ("f16", 0.012, 1.8e-3, 4e-5, "warn"),  # every token a little: 2e-5 and twice 3e-6 pass
        ("f16", 0.012, 1.8e-3, 3e-4, "fail"),
        ("f16", 0.012, 4e-3, 3e-6, "fail"),  # 2e-4 and twice 1.8e-3
        ("f16", 0.2, 1.8e-3, 3e-6, "fail"),  # ten times 1.1 nats / 100 tokens
        ("bf16", 0.006, 6e-4, 2e-4, "pass"),
        ("f32", 0.001, 1e-3, 1e-3, "fail"),  # rounds nothing
        ("f32", 0.006, 1e-6, 1e-7, "pass"),  # two sums in another order turn one router
    ],
)
def test_logits_of_a_mixture_by_its_own_noise(
    kind: str, mean: float, trimmed: float, median: float, verdict: str
) -> None:
    seen = figures(mean) | {"trimmed_kl": trimmed, "median_kl": median}
    check = check_logits("m.gguf", seen, model_limits(limits(kind), None, kind, NOISE))
    assert isinstance(check, Check) and check.verdict == verdict


def test_the_noise_of_a_mixture_is_that_of_the_files_type() -> None:
    """An f32 file rounds nothing, and a type of 8 bits or fewer is held to bf16. One token may be as far as either."""
    for kind, more in (("f32", 0.0), ("f16", 2 * 1.8e-3), ("bf16", 2 * 6e-4), ("q8_0", 6e-4)):
        bounds = model_limits(limits(kind), None, kind, NOISE)
        assert bounds.kl[0] == pytest.approx(limits(kind).kl[0] + more) and bounds.far == 1.1


def test_a_file_that_changed_after_its_export() -> None:
    file, digest = gguf("m.gguf", 1, ["F16"]), FileDigest(bytes=3, sha256="a")
    assert check_digest(file, digest, {"m.gguf": digest}).verdict == "pass"  # type: ignore[union-attr]
    for other in (FileDigest(bytes=4, sha256="a"), FileDigest(bytes=3, sha256="b")):
        assert check_digest(file, digest, {"m.gguf": other}).verdict == "fail"  # type: ignore[union-attr]
    assert isinstance(check_digest(file, digest, {}), NotChecked)


def test_a_file_of_another_name_is_known_by_its_bytes() -> None:
    """One that no export wrote is not proven by the figures alone: within their bounds lies a changed bit."""
    file, digest = gguf("m.gguf", 1, ["F16"]), FileDigest(bytes=3, sha256="a")
    own = check_digest(file, digest, {"x.gguf": FileDigest(bytes=9, sha256="z"), "runs/a/gguf/n.gguf": digest})
    assert isinstance(own, Check) and own.verdict == "pass" and "exported as runs/a/gguf/n.gguf" in own.detail
    strange = check_digest(file, digest, {"n.gguf": FileDigest(bytes=3, sha256="b")})
    assert isinstance(strange, Check) and (strange.verdict, strange.threshold) == ("warn", "one of 1 exported files")


def test_a_model_without_routers_gets_no_wider_bounds() -> None:
    """Rounding a dense model to bf16: 4e-5 nats, no token farther than 2e-4."""
    dense = {"mean_kl": 4.4e-5, "p99_kl": 1.7e-4, "trimmed_kl": 4.0e-5, "max_kl": 2e-4}
    bounds = model_limits(limits("f16"), dense, "f16")
    assert bounds.kl == pytest.approx((3e-5, 2.1e-4)) and bounds.far == 2e-4
    assert model_limits(limits("f16"), None, "f16") == limits("f16")


def test_the_farthest_hundredth_is_left_out_by_hand() -> None:
    found = summarize(
        TokenFigures(*(np.array(one) for one in ([0.01] * 198 + [5.0, 7.0], [True] * 200, [1.0] * 200, [1.0] * 200)))
    )
    assert found["trimmed_kl"] == pytest.approx(0.01) and found["mean_kl"] == pytest.approx((1.98 + 12) / 200)
    assert found["median_kl"] == 0.01


def test_logits_that_are_not_finite_fail() -> None:
    alone = ("mean_kl", "trimmed_kl", "median_kl", "perplexity_ratio", "perplexity_ratio_half_width")
    for broken in (figures(None), *(figures(2e-6) | {name: None} for name in alone)):
        check = check_logits("m.gguf", broken, limits("f16"))
        assert isinstance(check, Check) and check.verdict == "fail"
    unmeasured = check_logits("m.gguf", None, limits("f16"))
    assert isinstance(unmeasured, NotChecked) and with_unread_epsilon(unmeasured, 1e-5) == unmeasured


def change(share: float, width: float = 0.001, between: float = 0.1) -> dict[str, Any]:
    return {"share": share, "share_half_width": width, "kl_tuned": 0.0, "kl_base": 0.1, "kl_between": between}


@pytest.mark.parametrize(
    ("kind", "share", "width", "verdict"),
    [
        ("f16", 1.001, 0.001, "pass"),
        ("f16", 0.95, 0.001, "warn"),
        ("f16", 0.0, 0.001, "fail"),
        ("f16", 2.0, 0.001, "fail"),
        ("q4_k_m", 0.9, 0.02, "pass"),
        ("q4_k_m", 0.5, 0.02, "fail"),
        ("q4_k_m", 0.5, 0.4, "warn"),  # too few tokens to tell
        ("q8_0", 0.9, 0.02, "warn"),
    ],
)
def test_tuned(kind: str, share: float, width: float, verdict: str) -> None:
    check = check_tuned("m.gguf", change(share, width), limits(kind), "")
    assert isinstance(check, Check) and check.verdict == verdict


@pytest.mark.parametrize(
    ("kind", "share", "width", "between", "cause"),
    [
        ("f16", 0.0, 0.1, 0.1, "the tuning is missing"),
        ("f16", 0.129, 0.477, 0.1, None),  # missing, too weak or nothing amiss
        ("f16", 0.095, 2.631, 0.1, None),
        ("f16", 0.5, 0.1, 0.1, "the tuning is too weak"),
        ("f16", 0.5, 0.3, 0.1, None),
        ("f16", 1.001, 0.001, 0.1, "the tuning is there once"),
        ("f16", 2.0, 0.5, 0.1, "the tuning is too strong, or there twice"),
        ("f16", 1.402, 0.236, 0.1, "the tuning is too strong, or there twice"),
        ("q4_k_m", 1.402, 0.236, 0.018, None),  # a right file: the type itself loses 0.031
    ],
)
def test_a_cause_is_named_where_the_interval_supports_one(
    kind: str, share: float, width: float, between: float, cause: str | None
) -> None:
    """A model trained whole has no adapter, so no cause speaks of one."""
    check = check_tuned("m.gguf", change(share, width, between), limits(kind), "")
    assert isinstance(check, Check) and f"file ({cause or 'too uncertain to name a cause'}); it is" in check.detail
    nothing = check_tuned("m.gguf", change(share, width, between=1e-9), limits(kind), "")
    assert isinstance(nothing, Check) and "adapter" not in check.detail + nothing.detail


def test_an_adapter_that_changes_nothing_is_a_warning() -> None:
    check = check_tuned("m.gguf", change(0.0, 5.0, between=1e-9), limits("f16"), "")
    assert isinstance(check, Check) and check.verdict == "warn" and "nothing measurable" in check.detail
    small = check_tuned("m.gguf", change(0.0, between=0.03), limits("q4_k_m"), "")  # the type itself loses 0.031
    assert isinstance(small, Check) and small.verdict == "warn"
    large = check_tuned("m.gguf", change(0.0, between=0.032), limits("q4_k_m"), "")
    assert isinstance(large, Check) and large.verdict == "fail"


@pytest.mark.parametrize("name", ["share", "share_half_width", "kl_between", "kl_tuned", "kl_base"])
def test_a_change_that_is_not_finite_fails(name: str) -> None:
    check = check_tuned("m.gguf", change(1.0) | {name: None}, limits("f16"), "")
    assert isinstance(check, Check) and check.verdict == "fail"


@pytest.mark.parametrize(
    ("share", "cost", "verdict"), [(1.0, 0.04, "pass"), (1.0, 0.06, "warn"), (0.0, 0.06, "fail"), (1.0, None, "pass")]
)
def test_a_merge_whose_rounding_costs_more_than_half_of_the_tuning_warns(
    share: float, cost: float | None, verdict: str
) -> None:
    check = check_tuned("m.gguf", change(share, between=0.1), limits("f16"), "", "bfloat16", cost)
    assert isinstance(check, Check) and check.verdict == verdict


def share_of(tuned: np.ndarray, base: np.ndarray, compared: np.ndarray) -> TuningShare:
    models = normalized(tuned=tuned, base=base, compared=compared)
    return summarize_change([change_of(one["tuned"], one["base"], one["compared"]) for _, one in models])


@pytest.mark.parametrize("times", [0.0, 0.5, 1.0, 2.0])
def test_share_is_how_often_the_change_was_made(times: float) -> None:
    """A change of the logits that is small enough is a change of log-probabilities, up to its centre."""
    draw = np.random.default_rng(0)
    base, step = draw.normal(size=(50, 20)), 1e-4 * draw.normal(size=(50, 20))
    found = share_of(base + step, base, base + times * step + 7.0)  # a constant is no change
    assert found["share"] == pytest.approx(times, abs=1e-3)
    assert found["tokens"] == 50


def test_share_by_hand() -> None:
    """Two tokens, p = 1/2 each after tuning: logits (0, 0) from (0, log 3), where p was 1/4 and 3/4."""
    tuned, base = np.zeros((2, 2)), np.array([[0.0, math.log(3)]] * 2)
    found = share_of(tuned, base, base)
    assert found["share"] == pytest.approx(0)
    assert found["kl_between"] == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert found["kl_tuned"] == pytest.approx(found["kl_between"])
    assert found["kl_base"] == pytest.approx(0)


TOKENIZER: Any = SimpleNamespace(decode=str, all_special_ids=[9], added_tokens_decoder={})


def answer(ids: list[int], *, stopped: bool, second: float = 5.0) -> ReferenceAnswer:
    """The reference prefers its own token by `second` nats to every other."""
    rows = np.full((len(ids), 10), -second, dtype=np.float32)
    rows[np.arange(len(ids)), ids] = 0
    return ReferenceAnswer([1], ids, stopped, rows)


@pytest.mark.parametrize(
    ("given", "second", "verdict"),
    [
        ([3, 4, 9], 5.0, "pass"),
        ([3, 5, 9], 5.0, "fail"),
        ([3, 5, 9], 0.01, "pass"),  # a near-tie
        ([3, 5, 9], 0.05, "warn"),
        ([3, 4, 9, 2], 5.0, "fail"),  # llama.cpp does not stop
        ([3], 5.0, "fail"),  # stops early, at a common token
    ],
)
def test_answers(given: list[int], second: float, verdict: str) -> None:
    own = answer([3, 4, 9], stopped=True, second=second)
    check = check_answers("m.gguf", [own], [given], limits("f16"), TOKENIZER)
    assert isinstance(check, Check) and check.verdict == verdict


def test_an_answer_may_end_at_a_special_token_that_the_reference_does_not_list() -> None:
    check = check_answers("m.gguf", [answer([3, 9, 4], stopped=False)], [[3, 9]], limits("f16"), TOKENIZER)
    assert isinstance(check, Check) and check.verdict == "pass"
    longer = check_answers("m.gguf", [answer([3, 4], stopped=True)], [[3, 4, 9]], limits("f16"), TOKENIZER)
    assert isinstance(longer, Check) and longer.verdict == "fail"


def test_the_figure_of_the_answers_is_the_widest_gap() -> None:
    own = [answer([3, 4, 9], stopped=True, second=second) for second in (0.01, 0.05, 0.03, 5.0)]
    given = [[3, 5, 9], [3, 6, 9], [3, 5, 9], [3, 4, 9]]
    check = check_answers("m.gguf", own, given, limits("f16"), TOKENIZER)
    assert isinstance(check, Check) and check.figure == pytest.approx(0.05)
    assert check.figures["equal"] == 1 and "answers [6] for [4]" in check.detail.replace("'", "")
    unknown = check_answers("m.gguf", own[:1], [[3, 10, 9]], limits("f16"), TOKENIZER)  # the reference has ten tokens
    assert isinstance(unknown, Check) and unknown.verdict == "fail"
    assert unknown.figure == "it does not end where the reference ends"  # JSON has no infinity


def letters(text: str, add_special_tokens: bool = True) -> Any:
    """A tokenizer of letters that composes accents first, as Qwen's does."""
    composed = text.replace("e\u0301", "é")
    return SimpleNamespace(input_ids=[1] * add_special_tokens + [ord(letter) for letter in composed])


letters.added_tokens_decoder = {}  # type: ignore[attr-defined]


def ended_letters(text: str, add_special_tokens: bool = True) -> Any:
    return SimpleNamespace(input_ids=letters(text, add_special_tokens).input_ids + [2] * add_special_tokens)


def test_tokens_name_the_first_difference() -> None:
    check = check_tokens("m.gguf", ["abc", "xyz"], [[97, 98, 99], [120, 0, 122]], letters)
    assert check.verdict == "fail" and check.figure == 1
    assert check.detail == "'xyz': at token 1 llama.cpp has [120 0 122], the reference [120 121 122]"


def test_letters_with_separate_accents_are_no_fault_of_the_file() -> None:
    separate = check_tokens("m.gguf", ["e\u0301", "é"], [[101, 769], [233]], letters)
    assert separate.verdict == "pass" and "does not compose" in separate.detail
    assert check_tokens("m.gguf", ["e\u0301", "é"], [[101, 769], [234]], letters).verdict == "fail"


def test_special_tokens() -> None:
    own: Any = SimpleNamespace(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, convert_ids_to_tokens=lambda token: f"<|{token}|>"
    )
    facts = VocabularyFacts(bos=1, eos=2, pad=None, add_bos=True, end_of_generation=[2, 7], tokens=8)

    def check(tokenizer: Any = letters, **changes: Any) -> Check:
        for name, value in vars(own).items():
            setattr(tokenizer, name, value)
        arguments = {"stops": {2, 7}, "turn_end": 7, "plain": [("a", [1, 97])]} | changes
        return check_special_tokens("m.gguf", facts, tokenizer=tokenizer, **arguments)

    assert check().verdict == "pass" and check(turn_end=None).verdict == "pass"
    runs_on = check(stops={2})  # llama.cpp stops at 7 by its text
    assert runs_on.verdict == "warn" and "transformers and vLLM do not stop at token 7" in runs_on.detail
    ended = check(tokenizer=ended_letters, plain=[("a", [1, 97, 2])])
    assert ended.verdict == "warn" and "put token 2 behind each prompt" in ended.detail
    assert "does not stop at token 5" in check(turn_end=5).detail
    assert "does not stop at token 8 ('<|8|>')" in check(stops={2, 8}).detail
    assert "eos_token_id in its generation_config.json" in check(stops={2, 8}).detail
    assert "added in another way" in check(plain=[("a", [97])]).detail
    assert "added in another way" in check(plain=[("a", [1, 97, 2])]).detail
    assert "added in another way" in check(plain=[("a", [1, 1, 97])]).detail


def test_rows_as_the_trainer_was_fed_them() -> None:
    chat = {"row": 4, "kind": "chat", "input_ids": [5, 6, 7], "truncated": False}
    text = {"row": 5, "kind": "text", "input_ids": [5, 6, 2], "truncated": False}
    cut = {"row": 6, "kind": "chat", "input_ids": [5, 6], "truncated": True}
    good = check_trained("m.gguf", [chat, text, cut], [[5, 6, 7], [5, 6], [5, 6, 7]], eos=2)
    assert isinstance(good, Check) and good.verdict == "pass"
    wrong = check_trained("m.gguf", [chat], [[5, 6]], eos=2)
    assert isinstance(wrong, Check)
    assert wrong.detail == "row 4: at token 2 llama.cpp has [5 6], the trainer [5 6 7]"
    refused = check_trained("m.gguf", [chat], ["no system role"], eos=2)
    assert isinstance(refused, Check) and "no system role" in refused.detail
    assert (refused.verdict, refused.figure) == ("fail", 1)


def test_a_text_that_ends_with_the_end_token_gets_no_second_one() -> None:
    """Rows that were rendered before training, or a tokenizer that appends the token itself."""
    text = {"row": 5, "kind": "text", "input_ids": [5, 6, 2], "truncated": False}
    good = check_trained("m.gguf", [text], [[5, 6, 2]], eos=2)
    assert isinstance(good, Check) and good.verdict == "pass"
    wrong = check_trained("m.gguf", [text], [[5, 6, 2, 2]], eos=2)
    assert isinstance(wrong, Check) and wrong.verdict == "fail"
    without_eos = check_trained("m.gguf", [text], [[5, 6, 2]], eos=None)
    assert isinstance(without_eos, Check) and without_eos.verdict == "pass"


@pytest.mark.parametrize(
    ("kind", "ids", "asked", "verdict"),
    [
        ("completion", [5, 6, 2], False, "fail"),
        ("completion", [5, 6, 2], True, "warn"),
        ("completion", [5, 6, 9], True, "fail"),  # others than the trainer was fed
        ("text", [5, 6, 2], False, "warn"),
        ("text", [5, 7, 6, 2], False, "pass"),  # the turn ends at 7: rendered before training
        ("text", [5, 6, 7], False, "warn"),  # the end token of training alone
        ("chat", [5, 6, 2], False, "pass"),
    ],
)
def test_rows_without_the_template_that_the_file_writes(kind: str, ids: list[int], asked: bool, verdict: str) -> None:
    row: Any = {"row": 5, "kind": kind, "input_ids": [2 if token == 9 else token for token in ids]}
    row |= {"without_template": True} if asked else {}
    check = check_trained("m.gguf", [row], [ids], eos=ids[-1], opening="", turn_end=7)
    assert isinstance(check, Check) and check.verdict == verdict, check
    without = check_trained("m.gguf", [row], [row["input_ids"]], eos=None)  # a file that writes no template
    assert isinstance(without, Check) and without.verdict == "pass"


@pytest.mark.parametrize(("rendered", "verdict"), [("<s>[INST] 2+2? [/INST] 4", "pass"), ("2+2? 4", "warn")])
def test_a_row_that_begins_as_the_template_writes_was_rendered_before(rendered: str, verdict: str) -> None:
    """Mistral's template writes no end token behind a question."""
    row: Any = {"row": 5, "kind": "completion", "input_ids": [5, 6, 2], "rendered": rendered, "without_template": True}
    check = check_trained("m.gguf", [row], [[5, 6, 2]], eos=2, opening="[INST]", turn_end=2)
    assert isinstance(check, Check) and check.verdict == verdict, check


def test_difference_shows_both_lists_around_the_first_one() -> None:
    assert difference([*range(20)], [*range(10), 99, *range(11, 20)]).startswith(
        "at token 10 llama.cpp has [6 7 8 9 10 "
    )


def test_the_worst_verdict_counts() -> None:
    assert worst([]) == "pass"
    assert worst(["pass", "fail", "warn"]) == "fail"


@pytest.mark.parametrize(("count", "width"), [(4096, 1024), (152_000, 1024), (3, 1 << 20), (1, 1)])
def test_every_row_of_a_tensor_is_compared(count: int, width: int) -> None:
    """Rows of large tensors were sampled once, and two exchanged rows of an embedding went unseen."""
    chunks = list(row_chunks(count, width))
    assert all((chunk.stop - chunk.start) * width <= max(1 << 18, width) for chunk in chunks)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(count))


def test_the_error_of_a_row_is_its_length_over_that_of_the_row() -> None:
    """A 3-4-5 triangle off a row of length 10; a row of zeros; what is lost; what is too large for a square."""
    expected = np.array([[6, 8], [0, 0], [1, 0], [3e38, 3e38]], dtype=np.float32)
    got = np.array([[9, 12], [0, 0], [0, 0], [3e38, -3e38]], dtype=np.float32)
    rows = Rows(expected)
    assert row_errors(rows.off(got), rows)[:3].tolist() == [0.5, 0.0, 1.0]
    assert not row_errors(rows.off(got), rows)[3] <= 0.01


def test_parts_of_a_config_that_are_null_are_none(tmp_path: Path) -> None:
    """`program.model_files` takes null for a part that a model does not have."""
    config = {"model_type": "llama", "text_config": None, "vision_config": None, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert (context_length(config), stated(config)("max_position_embeddings")) == (64, 64)
    assert output_of_its_own(tmp_path, None) == "config.json has tie_word_embeddings false"


@pytest.mark.parametrize("row", [0, 1999])
def test_a_weight_that_is_no_number_is_found_in_every_part_of_a_tensor(row: int, tmp_path: Path) -> None:
    """A NaN is neither above nor below anything, so that the largest of the other parts took its place."""
    whole = np.ones((2000, 256), np.float32)
    broken = whole.copy()
    broken[row, 7] = np.nan
    good, bad = (written(tmp_path / name, weights) for name, weights in (("good.gguf", whole), ("bad.gguf", broken)))
    for file, unquantized in ((bad, None), (bad, good), (good, bad)):
        found = check_tensors(file, unquantized=unquantized, needs_output="", reference=tmp_path)
        assert (found.verdict, found.figure) == ("fail", 1), found.detail
    assert check_tensors(good, unquantized=good, needs_output="", reference=tmp_path).verdict == "pass"


@pytest.mark.parametrize("kind", ["float64", "int8", "int16", "int32", "int64"])
def test_a_table_of_numbers_is_read_whatever_their_type(kind: str, tmp_path: Path) -> None:
    numbers = np.arange(64).reshape(2, 32).astype(kind)
    other = numbers.copy()
    other[1, 3] += 1
    good, bad = written(tmp_path / "good.gguf", numbers), written(tmp_path / "bad.gguf", other)
    verdicts = [
        check_tensors(file, unquantized=good, needs_output="", reference=tmp_path).verdict for file in (good, bad)
    ]
    assert verdicts == ["pass", "fail"]


def test_the_signs_of_q1_0_are_read(tmp_path: Path) -> None:
    """A scale of 0.5, and the bit of the second weight alone."""
    block = np.frombuffer(np.float16(0.5).tobytes() + bytes([2] + [0] * 15), np.uint8)
    file = written(tmp_path / "m.gguf", np.stack([block, block]), raw_dtype=GGMLQuantizationType.Q1_0)
    rows = weights_of(file, file.tensors["token_embd.weight"])(slice(0, 2))
    assert rows.tolist() == [[-0.5, 0.5] + [-0.5] * 126] * 2


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "IQ2_XS", "IQ4_NL", "MXFP4"])
def test_the_weights_of_a_file_are_those_that_gguf_py_reads(kind: str, tmp_path: Path) -> None:
    """Also after the caller has overwritten them. Any bytes are numbers, but for a scale that is none."""
    row_bytes = int(quant_shape_to_byte_shape((512,), GGMLQuantizationType[kind])[0])
    stored = np.random.default_rng(1).integers(0, 60, (6, row_bytes), np.uint8)
    file = written(tmp_path / "m.gguf", stored, raw_dtype=GGMLQuantizationType[kind])
    read, expected = weights_of(file, file.tensors["token_embd.weight"]), dequantize(stored, GGMLQuantizationType[kind])
    for _ in range(2):
        there = read(slice(1, 5))
        assert there.dtype == np.float32 and np.array_equal(there, expected[1:5]) and there.any()
        there[:] = 0


@pytest.mark.parametrize("name", ["blk.a.ffn_down.weight", "blk.²b.ffn_down.weight", "blk.ffn_down.weight", "blk"])
def test_a_layer_without_a_number_is_no_layer(name: str) -> None:
    """A name in a file may be anything."""
    tensors = {name: Tensor(name, (64, 8), "F32", 0, 0)}
    keys = {"general.architecture": "llama", "llama.feed_forward_length": 3}
    found = check_metadata(GgufFile(Path("m.gguf"), 3, 32, keys, tensors, 0, 0), {"model_type": "llama"})
    assert "feed_forward_length is 3" in found.detail


def test_the_reason_why_pixels_differ_is_that_of_the_picture_that_differs() -> None:
    """The first of two pictures is the same, and the second one is smaller."""
    pictures = [np.random.default_rng(number).random((3, 4, 6), np.float32) for number in range(2)]
    embeddings, logits = np.ones((1, 8), np.float32), np.ones((1, 4), np.float32)
    parts = [ReferencePart(pixels, embeddings) for pixels in pictures]
    own = PictureReference([9, 9, 1], [1], "", "", None, parts, logits, logits)
    measured = MeasuredPictures("gemma3", False, 9, {}, [], 4, [0.5] * 3, [0.5] * 3, [], [own])
    shown = [PictureChunk(None, 1, pixels, embeddings) for pixels in (pictures[0], pictures[1][:, :3])]
    answer = PictureAnswer([*shown, PictureChunk([1], 1, None, None)], logits, None, "")
    found = check_same_pixels("m.gguf", "f16", "f16", measured, [answer])
    assert isinstance(found, Check) and found.verdict == "fail"
    assert found.detail == "100.0% of the pixels are others: 6x3 in place of 6x4"


def test_embeddings_that_are_off_are_told_where_the_text_cannot_be_judged() -> None:
    """5 % off, and a text that hardly depends on its picture: the first is measured, whatever the second says."""
    off = _judged("m.gguf", "f16", "f16", Distances(0.05, 2e-5, 0.0, 2e-5, 0.001), {}, "")
    assert isinstance(off, Check) and off.verdict == "warn" and "farther off than rounding" in off.detail
    right = _judged("m.gguf", "f16", "f16", Distances(0.001, 2e-5, 0.0, 2e-5, 0.001), {}, "")
    assert isinstance(right, NotChecked)


def written(path: Path, weights: np.ndarray, **options: Any) -> GgufFile:
    writer = GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", weights, **options)
    finish(writer)
    return read_gguf(path)
