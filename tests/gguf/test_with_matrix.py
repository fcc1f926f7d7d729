"""Quantized files with an importance matrix: what they hold, what is kept, and what is recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_maker
import tiny
from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.gguf import importance, quantize
from skill_train.gguf.quality.texts import RunTexts
from skill_train.run.export_record import ExportRecord
from told import Warnings, quiet

pytestmark = pytest.mark.slow

ROWS = [[(7 * number + 13 * place) % 600 + 20 for place in range(60)] for number in range(24)]
TEXTS = RunTexts(ROWS[:18], ROWS[18:], "d" * 64, "all that the run keeps")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The f16 file of a tiny Gemma whose rows fit every type, and its importance matrix."""
    root = tmp_path_factory.mktemp("matrix")
    gguf_maker.export(tiny.cached("gemma", hidden=256, tied=False), root / "gguf")
    computed(root)
    return root


def computed(root: Path, texts: RunTexts = TEXTS) -> Any:
    return importance.compute_matrix(
        importance.MatrixRequest(root / "gguf" / "model-f16.gguf", texts, root / "imatrix.gguf", root / "imatrix.json"),
        progress=quiet,
    )


def matrix_in(root: Path, *, compared: bool = True, warn: Warnings | None = None) -> importance.Matrix:
    texts = TEXTS.compared if compared else None
    source = root / "gguf" / "model-f16.gguf"
    return importance.matrix_of(root / "imatrix.gguf", source, warn if warn is not None else Warnings(), texts)


def quantized(root: Path, quants: list[str], matrix: importance.Matrix | None, **options: Any) -> ExportRecord:
    request = quantize.QuantizeRequest(
        source=root / "gguf" / "model-f16.gguf",
        out=root / "gguf",
        record=root / "quantize.json",
        name="model",
        quants=quants,
        matrix=matrix,
        **options,
    )
    return quantize.quantize(request, progress=quiet, warn=Warnings()).record


def copied(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("model-q*", "model-iq*", "quantize.json"))
    return to


def metadata(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items() if "imatrix" in name}


OTHERS = ("iq3_xxs", "iq1_s", "iq1_m", "iq2_xs", "iq2_s", "iq2_m", "iq3_xs", "q2_k_s")


@pytest.mark.parametrize(
    "needing", [["iq2_xxs"], *(pytest.param([quant], marks=pytest.mark.torture) for quant in OTHERS)]
)
def test_every_type_that_needs_a_matrix_can_be_made(root: Path, tmp_path: Path, needing: list[str]) -> None:
    """The list is that of test_export.py, from tensor_requires_imatrix of llama.cpp."""
    made = quantized(copied(root, tmp_path / "run"), needing, matrix_in(root))
    assert {entry["quant"] for entry in made.outputs.values()} == set(needing)
    for name, entry in made.outputs.items():
        assert entry["imatrix"]["sha256"] == file_digest(root / "imatrix.gguf")["sha256"]
        stated = metadata(tmp_path / "run" / name)
        assert stated["quantize.imatrix.file"] == "imatrix.gguf"
        assert stated["quantize.imatrix.dataset"] == f"samples.jsonl sha256 {'d' * 12}, 1080 tokens of 18 rows"
        assert (stated["quantize.imatrix.entries_count"], stated["quantize.imatrix.chunks_count"]) == (14, 2)


def test_the_nearer_of_both_files_is_kept_and_both_figures_are_recorded(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path / "run")
    made = quantized(run, ["q4_k_m", "q8_0"], matrix_in(root))
    by_type = {entry["quant"]: (name, entry) for name, entry in made.outputs.items()}
    for quant in ("q4_k_m",):
        name, entry = by_type[quant]
        near, plain = entry["choice"]["with_matrix"], entry["choice"]["without_matrix"]
        assert near["tokens"] == plain["tokens"] == sum(len(ids) - 1 for ids in TEXTS.compared)
        helps = near["mean_kl"] < plain["mean_kl"]
        assert ("imatrix" in entry) is helps
        assert bool(metadata(run / name)) is helps
        assert near["mean_kl"] != plain["mean_kl"]
    assert "choice" not in by_type["q8_0"][1] and not metadata(run / by_type["q8_0"][0])
    assert json.loads((run / "quantize.json").read_text())["outputs"] == made.outputs
    assert not [path.name for path in (run / "gguf").iterdir() if path.name.startswith(".")]


def test_a_matrix_that_misleads_is_measured_and_left_out(root: Path, tmp_path: Path) -> None:
    """By this matrix only the first of 64 columns matters, and the others may be anything."""
    from skill_train.llama.importance.file import Entry, ImportanceMatrix, read_matrix, write_matrix

    run = copied(root, tmp_path / "run")
    read = read_matrix(root / "imatrix.gguf")
    turned = {
        name: Entry(np.where(np.arange(entry.sums.shape[1]) % 64, 1e-5, 1.0)[None], entry.counts)
        for name, entry in read.entries.items()
    }
    write_matrix(run / "imatrix.gguf", ImportanceMatrix(turned, ["turned"], 1, 512))
    made = quantized(run, ["q4_k_s"], matrix_in(run))
    [(name, entry)] = made.outputs.items()
    assert entry["choice"]["with_matrix"]["mean_kl"] > entry["choice"]["without_matrix"]["mean_kl"]
    assert "imatrix" not in entry and not metadata(run / name)
    without = quantized(copied(root, tmp_path / "plain"), ["q4_k_s"], None)
    assert [each["sha256"] for each in without.outputs.values()] == [entry["sha256"]]


@pytest.mark.parametrize("size", [1e35, 1e-38])
def test_a_matrix_of_any_size_makes_as_near_a_file(root: Path, tmp_path: Path, size: float) -> None:
    """With such numbers the quantizer rounded all weights to nearly 0: 1.7 nats in place of 0.07."""
    from skill_train.llama.importance.file import Entry, ImportanceMatrix, read_matrix, write_matrix

    run = copied(root, tmp_path / "run")
    read = read_matrix(root / "imatrix.gguf")
    sized = {name: Entry(entry.sums * np.float32(size), entry.counts) for name, entry in read.entries.items()}
    write_matrix(run / "imatrix.gguf", ImportanceMatrix(sized, ["of another size"], 1, 512))
    [entry] = quantized(run, ["q4_k_m"], matrix_in(run)).outputs.values()
    choice = entry["choice"]
    assert choice["with_matrix"]["mean_kl"] < 1.5 * choice["without_matrix"]["mean_kl"]


def test_a_matrix_by_name_is_used_wherever_a_type_takes_one_and_another_is_refused(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path / "run")
    by_name = matrix_in(root, compared=False)
    [entry] = quantized(run, ["q4_k_m"], by_name).outputs.values()
    assert "imatrix" in entry and "choice" not in entry
    assert quantized(run, ["q4_k_m"], by_name).outputs  # the same again is reused
    with pytest.raises(UsageError, match="asks for it without one") as caught:
        quantized(run, ["q4_k_m"], None, without_matrix=True)
    assert caught.value.code == "output_exists"
    other = copied(root, tmp_path / "other")
    quantized(other, ["q4_k_m"], None)
    with pytest.raises(UsageError, match="made without an importance matrix"):
        quantized(other, ["q4_k_m"], by_name)


def test_the_matrix_is_recorded_reused_and_never_of_other_text(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path / "run")
    record = computed(run)
    assert record.reused and record.record.entries == 14 and record.record.unseen == []
    assert record.record.tokens == TEXTS.tokens and record.record.options["data"] == "d" * 64
    other = computed(run, RunTexts(ROWS[1:18], ROWS[18:], "e" * 64, "other text"))
    assert not other.reused and other.record.outputs != record.record.outputs
    assert json.loads((run / "imatrix.json").read_text())["options"]["data"] == "e" * 64
    (run / "imatrix.json").unlink()  # now it may be somebody's own
    computed(run)
    assert file_digest(run / "imatrix.gguf.unrecorded-1") == other.record.outputs["imatrix.gguf"]
    assert file_digest(run / "imatrix.gguf") == record.record.outputs["imatrix.gguf"]
    (run / "imatrix.gguf").unlink()
    (run / "imatrix.gguf" / "in the way").mkdir(parents=True)  # it ends between the record before and the new file
    with pytest.raises(OSError, match="irectory"):
        computed(run, RunTexts(ROWS[1:18], ROWS[18:], "e" * 64, "other text"))
    assert not (run / "imatrix.json").exists()  # nothing describes another file than the one that is there
    with pytest.raises(UsageError, match="says nothing"):
        computed(tmp_path / "new", RunTexts([[1, 2, 3]], [], "f" * 64, "3 tokens"))
    assert not (tmp_path / "new").exists()


def test_a_matrix_of_the_same_shape_but_another_file_is_said(root: Path, tmp_path: Path) -> None:
    from skill_train.llama.importance.file import ImportanceMatrix, read_matrix, write_matrix

    same = Warnings()
    assert matrix_in(root, warn=same).use["model"] == file_digest(root / "gguf" / "model-f16.gguf")["sha256"]
    assert same == []
    run = copied(root, tmp_path / "run")
    read = read_matrix(root / "imatrix.gguf")
    for model, words in (("0" * 64, "computed with another file"), ("", "does not say which model")):
        write_matrix(run / "imatrix.gguf", ImportanceMatrix(read.entries, [], 1, 512, model))
        warnings = Warnings()
        matrix_in(run, warn=warnings)
        assert len(warnings) == 1 and words in warnings[0][1]
