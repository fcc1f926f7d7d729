"""A mix of types: the choice against all others that there are, the measurement against whole files, and the file."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from pathlib import Path

import msgspec
import pytest

import gguf_maker
import tiny
from skill_train.core.errors import UsageError
from skill_train.gguf import importance, mix, quantize
from skill_train.gguf.quality import mix as mixing
from skill_train.gguf.quality import sensitivity
from skill_train.gguf.quality.distance import distance, judging
from skill_train.gguf.quality.texts import RunTexts
from skill_train.llama.gguf_header import read_gguf
from skill_train.run.export_record import ExportedFile
from skill_train.verify.check_header import check_types
from skill_train.verify.thresholds import limits, mix_limits
from told import quiet

ROWS = [[(7 * number + 13 * place) % 600 + 20 for place in range(40)] for number in range(8)]
TEXTS = RunTexts(ROWS[:4], ROWS[4:], "d" * 64, "all that the run keeps")


# --- The choice ---


def best(elements: dict[str, int], kls: dict[tuple[str, str], float], most: int) -> float | None:
    """The least sum under the size, by trying every mix."""
    kinds = [[kind for name, kind in kls if name == tensor] for tensor in elements]
    sums = [
        sum(kls[tensor, kind] for tensor, kind in zip(elements, chosen, strict=True))
        for chosen in itertools.product(*kinds)
        if sum(mixing.bytes_of(elements[t], kind) for t, kind in zip(elements, chosen, strict=True)) <= most
    ]
    return min(sums, default=None)


def test_the_choice_is_as_good_as_the_best_of_all_mixes_but_for_one_step() -> None:
    """A greedy search over convex steps can only miss by the step that did not fit any more."""
    draw, kinds = random.Random(1), ["iq3_s", "iq4_xs", "q4_k", "q6_k", "q8_0"]
    for _ in range(60):
        elements = {f"blk.{n}.ffn_up.weight": 256 * draw.choice((64, 256, 1024)) for n in range(4)}
        kls = {
            (tensor, kind): draw.uniform(0.5, 2) * draw.choice((0.01, 1.0)) * 4.0 ** -mixing.BITS[kind]
            for tensor in elements
            for kind in kinds
        }
        most = round(sum(elements.values()) * draw.uniform(3.3, 9) / 8)
        least = best(elements, kls, most)
        if least is None:
            continue
        choice = mixing.choose(elements, kls, most)
        assert choice.n_bytes <= most
        assert choice.n_bytes == sum(mixing.bytes_of(elements[tensor], kind) for tensor, kind in choice.types.items())
        assert choice.kl == pytest.approx(sum(kls[pair] for pair in choice.types.items()))
        step = max(kls[tensor, one] - kls[tensor, other] for tensor in elements for one in kinds for other in kinds)
        assert least <= choice.kl <= least + step


def test_a_matrix_that_minds_more_gets_more_bits() -> None:
    elements = {"blk.0.attn_v.weight": 65536, "blk.0.ffn_up.weight": 65536}
    kls = {("blk.0.attn_v.weight", "q4_k"): 1.0, ("blk.0.attn_v.weight", "q6_k"): 0.1,
           ("blk.0.ffn_up.weight", "q4_k"): 0.01, ("blk.0.ffn_up.weight", "q6_k"): 0.001}  # fmt: skip
    most = mixing.bytes_of(65536, "q4_k") + mixing.bytes_of(65536, "q6_k")
    choice = mixing.choose(elements, kls, most)
    assert choice.types == {"blk.0.attn_v.weight": "q6_k", "blk.0.ffn_up.weight": "q4_k"}


def test_types_that_cannot_be_made_are_no_candidates() -> None:
    assert "iq3_xxs" not in mixing.candidates(256, 3.5, with_matrix=False)
    assert "iq3_xxs" in mixing.candidates(256, 3.5, with_matrix=True)
    assert set(mixing.candidates(64, 4.5, with_matrix=True)) == {"q4_0", "iq4_nl", "q5_0", "q5_1"}
    assert mixing.candidates(20, 4.5, with_matrix=True) == []
    assert mixing.candidates(64, 9.0, with_matrix=True) == ["q8_0"]


def test_what_was_not_measured_is_estimated_from_what_was() -> None:
    a, b, c = "blk.0.a.weight", "blk.0.b.weight", "blk.0.c.weight"
    kls = {(a, "q4_k"): 0.4, (a, "q6_k"): 0.1, (b, "q4_k"): 0.8}
    kinds = {a: ["q4_k", "q6_k"], b: ["q4_k", "q6_k"], c: ["q4_k"]}
    complete = mixing.completed(kls, kinds)
    assert complete[b, "q6_k"] == pytest.approx(0.2)  # a quarter, as of the other one
    assert complete[c, "q4_k"] == pytest.approx(0.8)  # as the most sensitive of the others
    assert {pair: complete[pair] for pair in kls} == kls
    only = mixing.completed({(a, "q4_k"): 0.4}, {a: ["q4_k", "q5_k"]})
    assert only[a, "q5_k"] == pytest.approx(0.1)  # one bit: a quarter


# --- The file ---

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    gguf_maker.export(tiny.cached("gemma", hidden=256, tied=False), root / "gguf")
    importance.compute_matrix(
        importance.MatrixRequest(root / "gguf" / "model-f16.gguf", TEXTS, root / "imatrix.gguf", root / "imatrix.json"),
        progress=quiet,
    )
    return root


def request_in(root: Path, target: mix.MixTarget) -> mix.MixRequest:
    source = root / "gguf" / "model-f16.gguf"
    matrix = importance.matrix_of(root / "imatrix.gguf", source, lambda code, message: None, TEXTS.compared)
    return mix.MixRequest(source, target, matrix, TEXTS, root / mix.FILE)


def made(root: Path, target: mix.MixTarget) -> tuple[Path, ExportedFile, mix.Mix]:
    request = request_in(root, target)
    chosen = mix.choose_mix(request, quiet)
    quantized = quantize.quantize(
        quantize.QuantizeRequest(
            source=request.source,
            out=root / "gguf",
            record=root / "quantize.json",
            name="model",
            quants=[],
            matrix=request.matrix,
            mixes={target.name: chosen},
        ),
        progress=quiet,
        warn=lambda code, message: None,
    )
    name = f"gguf/model-{target.name}.gguf"
    return root / name, quantized.record.outputs[name], chosen


def kinds_in(file: Path) -> dict[str, str]:
    """By gguf's own reader."""
    from gguf import GGUFReader

    return {tensor.name: tensor.tensor_type.name.lower() for tensor in GGUFReader(file).tensors}


@slow
def test_a_mix_has_its_types_its_size_and_its_measured_distance(root: Path) -> None:
    most = 1_300_000
    file, entry, chosen = made(root, mix.MixTarget(most_bytes=most))
    assert file.name == "model-auto-1.3mb.gguf"
    assert 0.97 * most < file.stat().st_size <= most
    stored = kinds_in(file)
    assert {name: stored[name] for name in chosen.types} == chosen.types == entry["tensor_types"]
    # Every matrix is named. `attn_output.weight` ends with `output.weight`, and patterns match whole names only.
    assert set(chosen.types) == {name for name, kind in stored.items() if kind not in ("f32", "f16")}
    assert {"output.weight", "blk.0.attn_output.weight", "token_embd.weight"} <= set(chosen.types)
    with judging(root / "gguf" / "model-f16.gguf", TEXTS.compared, 640, quiet) as judge:
        assert entry["measured"] == distance(judge, file)
    assert entry["mix"]["measured_pairs"] == entry["mix"]["pairs"] > 40
    # The sum of what each matrix costs alone is near what all cost together.
    assert 0.4 < entry["mix"]["estimated_kl"] / entry["measured"]["mean_kl"] < 2
    # The figures are kept: the same again measures nothing, and makes the same file.
    lines = (root / mix.FILE).read_text()
    file.unlink()
    again, second, _ = made(root, mix.MixTarget(most_bytes=most))
    assert (again, second["sha256"]) == (file, entry["sha256"])
    assert (root / mix.FILE).read_text() == lines
    replayed = mix.replayed(
        entry["tensor_types"], {"mix": entry["mix"]}, root / "gguf/model-f16.gguf", TEXTS, most_bytes=most
    )
    assert (replayed.types, replayed.nominal) == (chosen.types, chosen.nominal)


@slow
def test_one_matrix_rounded_in_memory_is_the_file_with_that_matrix_rounded(root: Path, tmp_path: Path) -> None:
    """A figure of the sensitivity against llama.cpp's own quantizer on that one matrix."""
    made(root, mix.MixTarget(most_bytes=1_300_000))
    outcomes = {
        (each["tensor"], each["kind"]): each["kl"]
        for each in map(json.loads, (root / mix.FILE).read_text().splitlines()[1:])
    }
    source, name = root / "gguf" / "model-f16.gguf", "blk.1.ffn_down.weight"
    everything = dict.fromkeys(made(root, mix.MixTarget(most_bytes=9000000))[2].types, "f16")
    job = {"source": str(source), "types": {"q4_k_m": 15}, "out": str(tmp_path / "one.gguf"),
           "matrix": str(root / "imatrix.gguf"), "tensor_types": everything | {name: "q4_k"}}  # fmt: skip
    quantize.run_worker(quantize.WORKER, job, object)
    assert [tensor for tensor, kind in kinds_in(tmp_path / "one.gguf").items() if kind == "q4_k"] == [name]
    with judging(source, TEXTS.computed, 640, quiet) as judge:
        assert outcomes[name, "q4_k"] == pytest.approx(distance(judge, tmp_path / "one.gguf")["mean_kl"], rel=0.3)


@slow
def test_a_call_that_was_ended_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(root, run)
    request = request_in(run, mix.MixTarget(bits=5.0))
    gguf, matrices = read_gguf(request.source), mix.quantizable(read_gguf(request.source))
    kinds = mix._kinds_to_try(gguf, matrices, 5.0, request.matrix)
    job, basis = mix._measurement(request, kinds, sum(matrices.values()))
    (run / mix.FILE).unlink(missing_ok=True)
    none = msgspec.structs.replace(job, most_seconds=0.0)
    assert sensitivity.measured(none, basis, quiet) == {}
    some = {"tensor": "blk.0.attn_q.weight", "kind": "q4_k", "kl": 123.0}
    with open(run / mix.FILE, "a") as file:
        file.write(json.dumps(some) + '\n{"tensor": "blk.0.attn')  # the kill came here
    kls = sensitivity.measured(none, basis, quiet)
    assert kls == {("blk.0.attn_q.weight", "q4_k"): 123.0}
    # What the next call adds begins a line of its own: else both figures would be lost, and estimated.
    whole = "".join((run / mix.FILE).read_text().splitlines(keepends=True)[:2])
    for torn in (whole + '{"tensor": "blk.0.attn', whole.removesuffix("\n")):
        (run / mix.FILE).write_text(torn)
        assert sensitivity.measured(none, basis, quiet) == kls and (run / mix.FILE).read_text() == whole
    other = sensitivity.Basis("other", "", "")
    assert sensitivity.measured(none, other, quiet) == {}  # of another model: nothing is taken over


@slow
def test_a_mix_that_cannot_be_that_small_says_what_can(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no mix is that small") as caught:
        mix.choose_mix(request_in(root, mix.MixTarget(most_bytes=400_000)), quiet)
    assert caught.value.code == "cannot_quantize" and "--bits" in caught.value.expected
    assert caught.value.got == "--max-size 0.4 MB"
    smallest = re.search(r"--max-size of ([\d.]+) MB or more", caught.value.expected)
    assert smallest is not None and f"smallest file has {smallest[1]} MB" in caught.value.message
    bits = re.search(r"--bits ([\d.]+) or more", caught.value.expected)
    assert bits is not None
    shutil.copytree(root, tmp_path / "run")
    for target in (mix.MixTarget(most_bytes=round(float(smallest[1]) * 1e6)), mix.MixTarget(bits=float(bits[1]))):
        request = request_in(tmp_path / "run", target)
        _, basis = mix._measurement(request, {}, 1)  # as if all types were measured: the smallest ones take long
        equal = [
            sensitivity.Outcome(name, kind, 1.0)
            for name in mix.quantizable(read_gguf(request.source))
            for kind in mixing.BITS
        ]
        request.file.write_text("".join(f"{json.dumps(msgspec.to_builtins(line))}\n" for line in [basis, *equal]))
        assert mix.choose_mix(request, quiet).types
    with pytest.raises(UsageError, match="no mix is that small"):  # it is the least one, but for its four digits
        mix.choose_mix(request_in(root, mix.MixTarget(most_bytes=round(float(smallest[1]) * 0.999e6))), quiet)


# --- What verify makes of it ---


@slow
def test_verify_judges_a_mix_by_its_record_and_not_by_its_nominal_type(root: Path) -> None:
    file, entry, _ = made(root, mix.MixTarget(most_bytes=1_300_000))
    gguf = read_gguf(file)
    assert check_types(gguf, entry["tensor_types"]).verdict == "pass"
    unrecorded = check_types(gguf)
    assert (unrecorded.verdict, "no export record" in unrecorded.detail) == ("warn", True)
    other = check_types(gguf, entry["tensor_types"] | {"blk.0.attn_q.weight": "q2_k"})
    assert other.verdict == "fail" and "blk.0.attn_q.weight" in other.detail


def test_a_mix_is_held_to_what_was_measured_of_it() -> None:
    near = mix_limits(4.9, 0.001)
    assert near.kl == pytest.approx((0.003 + 2e-5, 0.01 + 2e-4))
    far = mix_limits(4.9, 1.0)
    assert far.kl == limits("q4_k_m").kl  # never wider than the published type of that size
    assert mix_limits(4.9, None).kl == limits("q4_k_m").kl
    assert mix_limits(1.0, None).kl == limits("iq1_s").kl
