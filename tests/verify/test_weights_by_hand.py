"""What `weights` says of a file whose tensors were written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import save_file

from gguf_edit import finish
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify.weights.arrangements import as_in_model
from skill_train.verify.weights.check import _FileComparison, compare_place
from skill_train.verify.weights.places import Place, Places
from skill_train.verify.weights.rows import ChangeSums, Rows, errors, row_bound, wrong_length
from skill_train.verify.weights.tensors import check_tensors, output_of_its_own

EMBEDDING = np.arange(1, 257, dtype=np.float32).reshape(8, 32)
FULL = "token_embd.weight"


def file(path: Path, tensors: dict[str, np.ndarray], **numbers: list[float]) -> GgufFile:
    writer = GGUFWriter(str(path / "m.gguf"), "llama")
    for name, values in numbers.items():
        writer.add_array(name.replace("_", ".", 1), values)
    for name, weights in tensors.items():
        writer.add_tensor(name, weights)
    finish(writer)
    return read_gguf(path / "m.gguf")


def judged(gguf: GgufFile, *weights: tuple[str, np.ndarray], unplaced: tuple[str, ...] = ()) -> list[Any]:
    """The checks of the file after each weight of the model was compared with a tensor."""
    placed = [Place(tensor, f"{tensor} of the model", 0, as_in_model) for tensor, _ in weights]
    comparison = _FileComparison(gguf, Places(placed, {}, list(unplaced)), tuned=False)
    for place, (_, weight) in zip(placed, weights, strict=True):
        compare_place(place, [comparison], torch.from_numpy(weight.copy()))
    return comparison.checks()


@pytest.mark.parametrize(
    ("last", "verdict"), [(0.0, "pass"), (1e-3, "fail")], ids=["filled up with zeros", "with something"]
)
def test_rows_behind_the_models_vocabulary_are_zero(last: float, verdict: str, tmp_path: Path) -> None:
    filled = EMBEDDING.copy()
    filled[6:] = 0.0
    filled[7, 31] = last
    (check,) = judged(file(tmp_path, {FULL: filled}), (FULL, EMBEDDING[:6]))
    assert check.verdict == verdict, check


def test_only_a_vocabulary_may_be_filled_up(tmp_path: Path) -> None:
    """A tensor that is compared in part, and one that no weight was compared with, are no pass."""
    filled = EMBEDDING.copy()
    filled[6:] = 0.0
    gguf = file(tmp_path, {"output_norm.weight": filled, FULL: EMBEDDING})
    check, not_checked = judged(gguf, ("output_norm.weight", EMBEDDING[:6]), unplaced=("model.new.weight",))
    assert isinstance(not_checked, NotChecked) and check.verdict == "warn"
    assert "output_norm.weight" in check.detail and FULL in check.detail and check.figures["looked_at"] == 0
    (check,) = judged(gguf, ("output_norm.weight", EMBEDDING[:6]))  # every weight of the model has its place
    assert check.verdict == "fail" and "output_norm.weight" in check.detail and FULL in check.detail
    (check,) = judged(gguf, ("output_norm.weight", np.tile(EMBEDDING, (2, 1))), (FULL, EMBEDDING))
    assert check.verdict == "fail" and "output_norm.weight has shape" in check.detail
    assert check.figures["looked_at"] == 2


@pytest.mark.parametrize(
    ("tensor", "verdict"),
    [
        ("blk.0.attn_output.bias", "fail"),
        ("blk.0.ffn_down.scale", "fail"),
        ("rope_freqs.weight", "fail"),  # which config.json does not ask for
        ("blk.1.attn_output.bias", "warn"),  # the layer that predicts further tokens
        ("cls.output.weight", "warn"),  # of Qwen3's rerankers
    ],
)
def test_a_tensor_that_no_weight_of_the_model_is_behind(tensor: str, verdict: str, tmp_path: Path) -> None:
    """llama.cpp adds every bias, and multiplies by every scale, that a file of a known architecture has."""
    gguf = file(tmp_path, {FULL: EMBEDDING, tensor: np.full(1, 1.5, np.float32)})
    gguf = replace(gguf, metadata=gguf.metadata | {"llama.block_count": 2, "llama.nextn_predict_layers": 1})
    check, *not_checked = judged(gguf, (FULL, EMBEDDING))
    assert check.verdict == verdict and tensor in check.detail
    assert ["reads no such weights" in one.reason for one in not_checked] == [True] * (verdict == "warn")
    layers = gguf.metadata | {"llama.nextn_predict_layers": 0}
    assert tensor.startswith("cls.") or judged(replace(gguf, metadata=layers), (FULL, EMBEDDING))[0].verdict == "fail"


@pytest.mark.parametrize(("kind", "width", "part"), [("Q4_0", 4096, 256), ("Q5_0", 12032, 256), ("Q4_0", 2880, 64)])
@pytest.mark.parametrize("matrix", [False, True], ids=["", "with a matrix"])
def test_a_part_of_a_long_row(kind: str, width: int, part: int, matrix: bool, tmp_path: Path) -> None:
    """Zeros in a few of its weights are less than a row may be off. With an importance matrix a part of a right row can
    be as far off, so that parts are not judged."""
    found, weight = [], np.random.default_rng(0).standard_normal((3, width), np.float32)
    rows = quants.quantize(weight, GGMLQuantizationType[kind])
    for name in ("right", "wrong"):
        writer = GGUFWriter(str(tmp_path / f"{name}.gguf"), "llama")
        writer.add_tensor(FULL, rows.copy(), raw_dtype=GGMLQuantizationType[kind])
        if matrix:
            writer.add_string("quantize.imatrix.file", "imatrix.gguf")
        finish(writer)
        found += judged(read_gguf(tmp_path / f"{name}.gguf"), (FULL, weight))
        rows[1, -rows.shape[1] * part // width :] = 0
    assert [check.verdict for check in found] == ["pass", "pass" if matrix else "fail"], found
    assert matrix or f"row 1 is 1 of its length off from weight {width - part} on" in found[1].detail


_DRAW = np.random.default_rng(3)
TERNARY_OF = {
    "normal": _DRAW.standard_normal((8, 512)),
    "heavy tails": _DRAW.standard_t(1.5, (8, 512)),
    "almost ternary": _DRAW.integers(-1, 2, (8, 512)) * (1 + 0.02 * _DRAW.standard_normal((8, 512))),
    "outliers": np.where(_DRAW.random((8, 512)) < 0.005, 1, 0.51 * _DRAW.choice([-1, 1], (8, 512))),
    "almost zero": 1e-7 * _DRAW.standard_normal((8, 512)),  # less than two steps of the scale, an f16
}


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("weights", TERNARY_OF)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_a_ternary_type_holds_each_weight_rounded_to_the_largest_of_its_block(
    kind: str, weights: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """llama.cpp (0.3.36) divides 256 weights by the largest, and rounds to -1, 0 and 1. Such a row is often further off
    than its own length. No share of the change and no length of the rows is left to judge."""
    model = TERNARY_OF[weights].astype(np.float32)
    base = model - 0.1 * np.roll(model, 1, axis=0)
    source = torch.from_numpy(model).to(stored).float().numpy()
    scaled, emptied = source.copy(), source.copy()
    scaled[3, :256] *= 1.02
    emptied[5, 256:] = 0
    found = []
    wrong = {"scaled": scaled, "emptied": emptied, "base": base, "twice": 2 * model - base, "moved": source[::-1]}
    for rows in (source, *wrong.values()):
        writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
        quantized = quants.quantize(np.ascontiguousarray(rows, np.float32), GGMLQuantizationType[kind])
        writer.add_tensor(FULL, quantized, raw_dtype=GGMLQuantizationType[kind])
        finish(writer)
        comparison = _FileComparison(read_gguf(tmp_path / "m.gguf"), Places([], {}, []), tuned=True)
        place = Place(FULL, "embed", 0, as_in_model)
        compare_place(place, [comparison], torch.from_numpy(model.copy()), torch.from_numpy(base))
        found += comparison.checks()
    assert found[0].verdict == "pass", found[0].detail
    if weights != "almost zero":
        assert [check.verdict for check in found[1:]] == ["fail"] * len(wrong), found


def test_files_that_are_compared_at_once_are_judged_as_each_alone(tmp_path: Path) -> None:
    """They share what follows from the weight, which one of them has in rows of another width, and one in fewer."""
    shorter = EMBEDDING[:6], EMBEDDING[:4].reshape(8, 16)
    tensors = [EMBEDDING, EMBEDDING[::-1], EMBEDDING.reshape(16, 16), *shorter, EMBEDDING * np.float32(1.001)]
    for number in range(len(tensors)):
        (tmp_path / str(number)).mkdir()
    files = [file(tmp_path / str(number), {FULL: tensor.copy()}) for number, tensor in enumerate(tensors)]
    place, weight = Place(FULL, "embed", 0, as_in_model), torch.from_numpy(EMBEDDING.copy())

    def checks_of(*ggufs: GgufFile) -> list[Any]:
        comparisons = [_FileComparison(gguf, Places([place], {}, []), tuned=False) for gguf in ggufs]
        compare_place(place, comparisons, weight)
        return [comparison.checks() for comparison in comparisons]

    together = checks_of(*files)
    assert together == [checks_of(gguf)[0] for gguf in files]
    assert [found[0].verdict for found in together] == ["pass", "fail", "pass", "pass", "pass", "fail"]


def test_a_weight_of_the_model_without_a_place_is_no_pass(tmp_path: Path) -> None:
    found = judged(file(tmp_path, {FULL: EMBEDDING}), (FULL, EMBEDDING), unplaced=("model.new.weight",))
    assert [one.verdict for one in found if isinstance(one, Check)] == ["warn"]
    assert "model.new.weight" in found[1].reason


@pytest.mark.parametrize(
    ("source", "tensor", "weight", "verdict"),
    [
        ("q.bias", "blk.0.attn_q.bias", np.zeros(4, np.float32), "pass"),  # which changes nothing
        ("q.bias", "blk.0.attn_q.bias", np.array([0, 0, 0, 1e-3], np.float32), "fail"),
        ("q.weight", "blk.0.attn_q.weight", np.zeros((4, 4), np.float32), "fail"),
        ("lm_head.weight", "output.weight", None, "pass"),  # tied: the same memory
        ("lm_head.weight", "output.weight", EMBEDDING, "pass"),
        ("lm_head.weight", "output.weight", EMBEDDING[::-1], "fail"),
    ],
)
def test_a_tensor_that_the_file_lacks(
    source: str, tensor: str, weight: np.ndarray | None, verdict: str, tmp_path: Path
) -> None:
    embedding = torch.from_numpy(EMBEDDING.copy())
    place = Place(FULL, "embed", 0, as_in_model)
    comparison = _FileComparison(file(tmp_path, {FULL: EMBEDDING}), Places([place], {source: tensor}, []), False)
    compare_place(place, [comparison], embedding)
    lacking = embedding if weight is None else torch.from_numpy(weight.copy())
    makers: dict[str, Any] = {"embed": lambda: embedding, source: lambda: lacking}
    comparison.absent(source, tensor, makers)
    (check,) = comparison.checks()
    assert isinstance(check, Check) and check.verdict == verdict, check


def test_weights_of_one_number_are_compared_with_the_metadata(tmp_path: Path) -> None:
    """Of Apertus: one value a layer."""
    gguf = file(tmp_path, {FULL: EMBEDDING}, xielu_alpha_p=[0.5, 0.25])
    for third, verdict in ((0.25, "pass"), (0.26, "fail")):
        names = [f"model.layers.{number}.mlp.act_fn.alpha_p" for number in range(3)]
        values = dict(zip(names, (0.5, third, 0.5), strict=True))
        makers = {name: partial(torch.tensor, value) for name, value in values.items()}
        place = Place(FULL, "embed", 0, as_in_model)
        comparison = _FileComparison(gguf, Places([place], {}, names[:2]), tuned=False)
        compare_place(place, [comparison], torch.from_numpy(EMBEDDING.copy()))
        comparison.compare_metadata(makers)
        (check,) = comparison.checks()
        assert isinstance(check, Check) and check.verdict == verdict, check
    comparison = _FileComparison(gguf, Places([place], {}, names[2:]), tuned=False)  # the file has two numbers
    comparison.compare_metadata(makers)
    assert comparison.unplaced == names[2:]


def test_a_tensor_that_the_converter_computes(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 2.0])
    gguf = file(tmp_path, {"rope_freqs.weight": np.array([1.0, 2.0], np.float32)})
    for values, name, verdict in (
        (factors, "rope_freqs.weight", "pass"),
        (factors * 1.01, "rope_freqs.weight", "fail"),
        (factors, "rope_factors_long.weight", "fail"),
    ):
        comparison = _FileComparison(gguf, Places([], {}, []), tuned=False)
        comparison.compare_computed(name, values)
        assert isinstance(check := comparison.checks()[0], Check) and check.verdict == verdict, check


# Half of the distance of two neighbours: 2^-11 for f16, 2^-8 for bf16. A merge may have been made in bf16.
@pytest.mark.parametrize(
    ("kind", "tuned", "computed", "weight", "most"),
    [
        ("F32", False, False, 1.0, 2**-21),
        ("F16", False, False, 1.0, 2**-11),
        ("BF16", False, False, 1.0, 2**-8),
        ("F16", True, False, 1.0, 2**-11 + 2**-8 + 1e-5),
        ("F16", False, True, 1.0, 2 * (2**-11 + 2**-10)),  # exp, or one more, in f16
        ("F16", False, False, 0.0, 2**-25),  # the smallest number is twice that
        ("BF16", True, False, 0.0, 1e-5),  # of the row's largest: s·B·A in another order
        ("Q8_0", False, False, 1.0, 0.03 * 8),  # of the row's length, which is 8
    ],
)
def test_a_weight_may_be_off_by_its_rounding(
    kind: str, tuned: bool, computed: bool, weight: float, most: float
) -> None:
    expected = np.ones((2, 64), np.float32)
    expected[0, 5] = weight
    rows = Rows(expected)
    for times, wrong in ((0.8, False), (1.3, True)):
        for side in (-1, 1):
            stored = expected.copy()
            stored[0, 5] += side * times * most
            assert errors(kind, rows.off(stored), rows, tuned=tuned, computed=computed)[1].tolist() == [wrong, False]


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize(("own", "there"), [("inf", "inf"), ("inf", "-inf"), ("inf", "1"), ("1", "inf"), ("1", "nan")])
def test_what_is_no_number_is_never_near_enough(kind: str, tuned: bool, own: str, there: str) -> None:
    expected, stored = np.ones((2, 64), np.float32), np.ones((2, 64), np.float32)
    expected[0, 5], stored[0, 5] = float(own), float(there)
    rows = Rows(expected)
    assert errors(kind, rows.off(stored), rows, tuned=tuned, computed=False)[1].tolist() == [True, False]


@pytest.mark.parametrize(
    ("kind", "measured"),  # on normal weights, see tensors.py; a row of zeros is off by 1
    [("Q8_0", 0.006), ("Q6_K", 0.02), ("Q5_K", 0.04), ("Q4_K", 0.08), ("Q3_K", 0.17), ("Q2_K", 0.32), ("IQ1_S", 0.4)],
)
def test_the_bound_of_a_row_lies_between_rounding_and_a_row_of_zeros(kind: str, measured: float) -> None:
    assert 2 * measured <= row_bound(kind) < 1


@pytest.mark.parametrize(
    ("kind", "size", "share", "count", "found"),
    [
        # A quarter may be missing. The sums are of 10,000 weights, each off alike: 6 sigmas are 0.06 of what is off.
        ("F32", 1.0, 1.0, 10_000, False),
        ("F32", 1.0, 0.76, 10_000, False),
        ("F32", 1.0, 0.73, 10_000, True),
        ("F32", 1.0, 1.24, 10_000, False),
        ("F32", 1.0, 1.27, 10_000, True),
        ("F32", 1.0, 0.0, 10_000, True),
        ("F32", 1.0, 2.0, 4, False),  # so few weights say nothing
        ("Q4_K", 1.0, 0.67, 10_000, False),  # rows may be off by 0.3, which makes them shorter by its square
        ("Q4_K", 1.0, 0.60, 10_000, True),
        # A merge in bf16 loses a change of 2^-12: none of it is right then, and each share up to all of it.
        ("BF16", 2**-12, 0.0, 10_000, False),
        ("BF16", 2**-12, 1.0, 10_000, False),
        ("BF16", 2**-12, 1.3, 10_000, True),
        ("BF16", 2**-12, -0.5, 10_000, True),
        ("F32", 0.0, 1.0, 10_000, False),
        ("F32", 3e38, 1.0, 10_000, False),  # its square is no number: the rows show such weights
    ],
)
def test_the_share_of_a_change(kind: str, size: float, share: float, count: int, found: bool) -> None:
    base = np.ones((1, count), np.float32) if size < 1 else np.zeros((1, count), np.float32)
    sums = ChangeSums()
    for half in (base[:, : count // 2], base[:, count // 2 :]):
        rows = Rows(half + np.float32(size), half)
        sums.add(rows.off(half + np.float32(share * size)), rows)
    assert sums.wrong_share(kind) == (pytest.approx(share, abs=1e-3) if found else None)


@pytest.mark.parametrize(
    ("kind", "error", "length", "count", "found"),
    [
        ("Q4_K", 0.08, 1.10, 1 << 18, True),
        ("Q4_K", 0.08, 0.90, 1 << 18, True),
        ("Q4_K", 0.08, 1.04, 1 << 18, False),  # 0.01 and 6 times the square of the error are allowed
        ("Q3_K", 0.17, 0.90, 1 << 18, False),
        ("Q3_K", 0.17, 1.20, 1 << 18, True),
        ("Q2_K", 0.32, 1.70, 1 << 18, True),
        ("Q8_0", 0.006, 1.02, 1 << 18, True),
        ("Q8_0", 0.006, 1.005, 1 << 18, False),
        ("F16", 0.0, 1.10, 1 << 18, False),  # of which each weight is compared
        ("Q4_K", 0.5, 0.7, 4, False),  # so few weights say nothing
        ("Q4_K", 0.0, 0.0, 0, False),
    ],
)
def test_the_length_of_a_weight(kind: str, error: float, length: float, count: int, found: bool) -> None:
    rows, noise = np.random.default_rng(0).normal(size=(2, 1, count)).astype(np.float32)
    stored = np.float32(length) * (rows + np.float32(error) * noise)
    expected = pytest.approx(length, abs=0.005) if found else None
    whole, few = Rows(rows), Rows(rows[:, :50_000])
    assert wrong_length(kind, 0, whole.off(stored), whole) == expected
    assert wrong_length(kind, 64, whole.off(stored), whole) == expected  # a later part of a tensor
    assert wrong_length(kind, 64, few.off(stored[:, :50_000]), few) is None  # the last rows are few


def test_weights_that_a_block_has_no_scale_for_may_have_any_length() -> None:
    """As embeddings of tokens that nobody trained."""
    rows = Rows(np.full((1, 1 << 17), 1e-7, np.float32))
    assert wrong_length("Q4_K", 0, -rows.values, rows) is None


@pytest.mark.parametrize("across", [True, False])
def test_rows_that_a_coarse_type_makes_shorter_hold_the_change_of_dora(across: bool) -> None:
    """DoRA makes these rows 1 % longer and turns them a little, and the type makes them 5 % shorter."""
    rows, turned = np.random.default_rng(1).normal(size=(2, 64, 512)).astype(np.float32)
    sums = ChangeSums()
    model = Rows(rows, rows / np.float32(1.01) + np.float32(0.01) * turned, across=across)
    sums.add(model.off(np.float32(0.95) * rows), model)
    assert (sums.wrong_share("Q2_K") is None) == across


def test_what_a_quantized_file_lacks_of_the_unquantized_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = file(tmp_path / "whole", {FULL: EMBEDDING, "blk.0.conv.weight": np.ones((1, 1, 32), np.float32)})
    lost = file(tmp_path, {FULL: EMBEDDING})
    found = check_tensors(lost, unquantized=whole, needs_output="", reference=tmp_path)
    assert found.verdict == "fail" and "blk.0.conv.weight is missing" in found.detail
    assert check_tensors(whole, unquantized=lost, needs_output="", reference=tmp_path).verdict == "fail"
    other = file(tmp_path, {FULL: EMBEDDING, "blk.0.conv.weight": np.ones(32, np.float32)})  # without its ones
    assert check_tensors(other, unquantized=whole, needs_output="", reference=tmp_path).verdict == "pass"
    other = file(tmp_path, {FULL: EMBEDDING, "blk.0.conv.weight": np.ones((2, 16), np.float32)})
    assert "has shape" in check_tensors(other, unquantized=whole, needs_output="", reference=tmp_path).detail


@pytest.mark.parametrize("confirmed", [False, True])
def test_an_output_layer_that_the_model_needs(confirmed: bool, tmp_path: Path) -> None:
    why = "config.json has tie_word_embeddings false"
    for tensors, verdict in (({}, "fail"), ({"output.weight": EMBEDDING}, "pass")):
        gguf = file(tmp_path, {FULL: EMBEDDING, **tensors})
        options: Any = {"unquantized": None, "needs_output": why, "reference": tmp_path, "confirmed": confirmed}
        assert check_tensors(gguf, **options).verdict == verdict


def test_a_matrix_of_zeros_is_right_where_the_model_has_one_of_its_size(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}  # which trains from zero
    gguf = file(tmp_path, {FULL: np.zeros((8, 32), np.float32), **bias})
    for rows, verdict in ((8, "pass"), (7, "fail")):
        save_file({"zeros": torch.zeros(rows, 32), "ones": torch.ones(8, 32)}, tmp_path / "model.safetensors")
        assert check_tensors(gguf, unquantized=None, needs_output="", reference=tmp_path).verdict == verdict


@pytest.mark.parametrize(
    ("module", "settings", "needs"),
    [
        ("lm_head", {}, "the adapter trained base_model.model.lm_head.lora_A.weight"),
        ("model.embed_tokens", {}, "the adapter trained base_model.model.model.embed_tokens.lora_A.weight"),
        ("lm_head", {"ensure_weight_tying": True}, ""),
        ("model.layers.0.mlp.up_proj", {}, ""),
    ],
)
def test_an_adapter_of_one_end_of_a_tied_model(
    module: str, settings: dict[str, bool], needs: str, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | settings))
    assert output_of_its_own(base, adapter) == "" == output_of_its_own(base, None)
    save_file({f"base_model.model.{module}.lora_A.weight": torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    assert output_of_its_own(base, adapter) == needs
