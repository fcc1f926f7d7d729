"""A mix of types from a file: what is refused of it, and the file that is made with it, again and of another model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import shared_runs
import tiny
from skill_train.core.errors import UsageError
from skill_train.gguf import importance, mix, quantize
from skill_train.gguf.mix_file import MixFile, read_mix, require_fit, require_matrix
from skill_train.gguf.quality import mix as mixing
from skill_train.gguf.quality.distance import distance, judging
from skill_train.gguf.quality.texts import RunTexts
from skill_train.llama.gguf_header import read_gguf
from skill_train.run.export_record import ExportedFile
from skill_train.verify.check_header import check_types
from told import quiet

ROWS = [[(7 * number + 13 * place) % 600 + 20 for place in range(60)] for number in range(24)]
TEXTS = RunTexts(ROWS[:18], ROWS[18:], "d" * 64, "all that the run keeps")


# --- The file ---


def written(folder: Path, document: Any) -> Path:
    file = folder / "mix.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def record_of(**mixes: dict[str, str]) -> dict[str, Any]:
    """A `quantize.json` with these mixes."""
    plain = {"bytes": 1, "sha256": "0" * 64, "quant": "q8_0"}
    files = {
        f"gguf/m-{name}.gguf": plain | {"quant": name, "tensor_types": types} if types else plain
        for name, types in mixes.items()
    }
    return {"schema": "skill-train/step/1", "step": "quantize", "outputs": files}


ONE, OTHER = {"a.weight": "q4_k"}, {"a.weight": "q6_k"}
RECORD = {"q8_0": {}, "auto-5bpw": ONE, "auto-6bpw": OTHER}


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ('{"a": NaN}', "not a name"),
        ([ONE], "not an object"),
        ({}, "it is empty"),
        ("\x00\x01\xff" * 50, "it is not JSON"),
        ('{"a.weight": ' + "9" * 5000 + "}", "it is not JSON"),
        ({"a.weight": "q" * 1_000_000}, "which is not a type of a matrix"),
        ({"a" * 1_000_000: "q9_z"}, "which is not a type of a matrix"),
        (record_of(**{f"auto-{'5' * 1000}{n}bpw": {f"{n}.weight": "q4_k"} for n in range(99)}), "and 94 more"),
        ({"a.weight": 4}, "the type of 'a.weight' is 4"),
        ({"a.weight": {"b": "q4_k"}}, "is an object of 1"),
        ('{"a.weight": "q4_k", "a.weight": "q6_k"}', "'a.weight' appears twice"),
        ({"a.weight": "q4_k_m"}, "which is not a type of a matrix (did you mean 'q4_k'?)"),
        ({"a.weight": "q8_k"}, "which is not a type of a matrix"),
        ({"a.weight": "f16"}, "it rounds no matrix"),
        (record_of(), "no file in it is a mix"),
        (record_of(q8_0={}), "no file in it is a mix"),
        (record_of(**RECORD), "several mixes, and --bits or --max-size names none; there are auto-5bpw, auto-6bpw"),
    ],
    ids=lambda value: str(value)[:40].encode("unicode_escape").decode(),
)
def test_a_file_that_is_no_mix_is_refused_with_the_reason(tmp_path: Path, document: Any, why: str) -> None:
    """In one sentence, however long a name in it is."""
    with pytest.raises(UsageError, match=re.escape(why)) as caught:
        read_mix(written(tmp_path, document), None)
    assert (caught.value.code, caught.value.exit_code) == ("cannot_quantize", 2)
    assert len(caught.value.message) < 700


def test_the_hint_names_a_mix_that_is_in_the_file(tmp_path: Path) -> None:
    record, target = written(tmp_path, record_of(**RECORD)), mix.MixTarget(bits=7.0)
    for asked in (None, target):
        with pytest.raises(UsageError) as caught:
            read_mix(record, asked)
        assert caught.value.hint == f"skill-train export-gguf RUN --mix {record} --bits 5"
    assert read_mix(record, mix.MixTarget(bits=5.0)).types == ONE
    with pytest.raises(UsageError) as caught:
        read_mix(written(tmp_path, ONE), target)
    assert caught.value.hint == f"skill-train export-gguf RUN --mix {record}"
    with pytest.raises(UsageError) as caught:
        read_mix(written(tmp_path, record_of(q8_0={})), None)
    assert caught.value.hint.endswith("--quant auto --bits 4.5")


def test_what_is_no_file_or_another_record_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="not a mix of types that can be used"):
            read_mix(path, None)
    with pytest.raises(UsageError, match="not a valid record"):
        read_mix(written(tmp_path, {"schema": "skill-train/step/2", "outputs": {}}), None)


def test_a_mix_is_named_by_its_types_and_chosen_by_the_size_it_was_made_for(tmp_path: Path) -> None:
    record = written(tmp_path, record_of(**RECORD))
    chosen = read_mix(record, mix.MixTarget(bits=6.0))
    assert (chosen.types, chosen.source["mix"], chosen.source["file"]) == (OTHER, "auto-6bpw", "mix.json")
    assert chosen.name == MixFile({"a.weight": "q6_k"}, chosen.source).name != MixFile(ONE, chosen.source).name
    with pytest.raises(UsageError, match=r"it has no auto-7bpw; there are auto-5bpw, auto-6bpw"):
        read_mix(record, mix.MixTarget(bits=7.0))
    same = read_mix(written(tmp_path, record_of(**{"auto-5bpw": ONE, "mix-12345678": ONE})), None)
    assert same.types == ONE  # the same types twice are one mix
    listed = read_mix(written(tmp_path, {"a.weight": "Q4_K", "b.weight": "F16"}), None)
    assert (listed.types, listed.source["mix"]) == ({"a.weight": "q4_k", "b.weight": "f16"}, "")
    with pytest.raises(UsageError, match="no mix named auto-6bpw"):
        read_mix(written(tmp_path, ONE), mix.MixTarget(bits=6.0))


def test_the_blocks_of_the_types_are_those_of_llama_cpp() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind, bits in mixing.BITS.items():
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
        assert (mixing.block_of(kind), bits) == (weights, 8 * size / weights)


# --- The model ---


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in `one`, with an importance matrix."""
    root = tmp_path_factory.mktemp("replay")
    write_model(root / "one", base())
    return root


def base() -> Path:
    return tiny.cached("gemma", hidden=256, tied=False)


def write_model(run: Path, model: Path) -> None:
    run.mkdir()
    gguf_maker.export(model, run / "gguf")
    matrix_of(run)


def matrix_of(run: Path) -> importance.Matrix:
    source, file = run / "gguf" / "model-f16.gguf", run / "imatrix.gguf"
    request = importance.MatrixRequest(source, TEXTS, file, run / "imatrix.json")
    importance.compute_matrix(request, progress=quiet)
    return importance.matrix_of(file, source, lambda code, message: None, TEXTS.compared)


def all_types(run: Path) -> dict[str, str]:
    """A mix of all kinds of types: one that needs a matrix, one of small blocks, one that is not rounded."""
    names = [*mix.quantizable(read_gguf(run / "gguf" / "model-f16.gguf"))]
    kinds = ("iq2_xs", "q4_k", "q5_0", "f16")
    return {name: kinds[at % 4] if name.startswith("blk.") else "q6_k" for at, name in enumerate(names)}


def replayed(run: Path, types: dict[str, str]) -> tuple[Path, ExportedFile]:
    asked = read_mix(written(run, types), None)
    source, matrix = run / "gguf" / "model-f16.gguf", matrix_of(run)
    require_fit(asked, source)
    require_matrix(asked, matrix, source)
    quantized = quantize.quantize(
        quantize.QuantizeRequest(
            source=source,
            out=run / "gguf",
            record=run / "quantize.json",
            name="model",
            quants=[],
            matrix=matrix,
            mixes={asked.name: mix.replayed(asked.types, {"replayed": asked.source}, source, TEXTS, None)},
        ),
        progress=quiet,
        warn=lambda code, message: None,
    )
    name = f"gguf/model-{asked.name}.gguf"
    return run / name, quantized.record.outputs[name]


@pytest.mark.torture
def test_the_same_mix_makes_the_same_file_and_that_of_another_model_is_measured_anew(root: Path) -> None:
    tiny.adapter(base(), root / "adapter", size=0.1)
    gguf_maker.merge(base(), root / "adapter", root / "merged", times=1)
    write_model(root / "other", root / "merged")  # of the same shapes
    types = all_types(root / "one")
    file, entry = replayed(root / "one", types)
    first = file.read_bytes()
    stored = {tensor.name: tensor.kind.lower() for tensor in read_gguf(file).tensors.values()}
    assert {name: stored[name] for name in types} == types == entry["tensor_types"]
    assert {"output.weight", "blk.0.attn_output.weight"} <= types.keys()  # the end of one is the other
    assert entry["replayed"]["file"] == "mix.json" and "mix" not in entry
    file.unlink()
    turned, _ = replayed(root / "one", dict(reversed(types.items())))
    assert (turned, turned.read_bytes()) == (file, first)
    of_other, other = replayed(root / "other", types)
    assert other["tensor_types"] == types and of_other.name == file.name and of_other.read_bytes() != first
    with judging(root / "other" / "gguf" / "model-f16.gguf", TEXTS.compared, 640, quiet) as judge:
        assert other["measured"] == distance(judge, of_other) != entry["measured"]
    assert check_types(read_gguf(of_other), other["tensor_types"]).verdict == "pass"


@pytest.mark.slow
def test_a_mix_that_the_model_cannot_have_is_refused_before_anything_is_made(root: Path) -> None:
    run = root / "one"
    source, types, matrix = run / "gguf" / "model-f16.gguf", all_types(run), matrix_of(run)
    without = {name: kind for name, kind in types.items() if name != "blk.1.ffn_up.weight"}
    for other, why in (
        (types | {"blk.9.ffn_up.weight": "q4_k", "c": "q4_k"}, "no matrix 'blk.9.ffn_up.weight' and 1 more"),
        # Names that would match as patterns of llama.cpp's own option, and a vector.
        (without | {"blk.*": "q4_k"}, "no matrix 'blk.*'"),
        (without | {r"blk\.1\.ffn_up.weight": "q4_k"}, "no matrix"),
        (without | {"blk.1.ffn_up.weight|output.weight": "q4_k"}, "no matrix"),
        (types | {"output_norm.weight": "q4_k"}, "no matrix 'output_norm.weight'"),
        (without, "no type for 'blk.1.ffn_up.weight'"),
    ):
        with pytest.raises(UsageError, match=re.escape(why)) as caught:
            require_fit(read_mix(written(run, other), None), source)
        assert caught.value.code == "cannot_quantize"
    head = read_mix(written(run, types | {"output.weight": "iq2_xs"}), None)
    require_fit(head, source)
    # llama.cpp ends by an assertion where a matrix says nothing about an embedding or a head.
    with pytest.raises(UsageError, match=r"'output\.weight' cannot be iq2_xs without an importance matrix"):
        require_matrix(head, matrix, source)
    needing = sum(kind == "iq2_xs" for kind in types.values())
    with pytest.raises(UsageError, match=rf"and {needing - 1} more cannot be iq2_xs .* there is none"):
        require_matrix(read_mix(written(run, types), None), None, source)


@pytest.mark.slow
def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    source = next((shared_runs.chain().run / "gguf").glob("*-f16.gguf"))
    names = mix.quantizable(read_gguf(source))
    require_fit(read_mix(written(tmp_path, dict.fromkeys(names, "q5_0")), None), source)
    with pytest.raises(UsageError, match=r"cannot be q4_k: rows of .* weights are not divisible by 256"):
        require_fit(read_mix(written(tmp_path, dict.fromkeys(names, "q4_k")), None), source)


def test_a_file_that_became_another_mix_is_not_named_by_its_temporary_name(tmp_path: Path) -> None:
    """As `whole_file` names it while it is made."""
    source = next((shared_runs.chain().run / "gguf").glob("*-f16.gguf"))
    part = Path(shutil.copy(source, tmp_path / ".model-mix.gguf.0123456789ab-1.cd.part"))
    wanted = mix.Mix({"blk.0.attn_q.weight": "q8_0"}, "q8_0", None, [], {})
    with pytest.raises(UsageError, match="is not the mix that was chosen") as caught:
        mix.entry_of(wanted, read_gguf(part), None, lambda *_: None)  # type: ignore[arg-type]
    assert ".part" not in caught.value.message
    assert (caught.value.expected, caught.value.got) == ("blk.0.attn_q.weight as q8_0", "f16")
