"""Importance matrices: the sums against transformers' inputs, the file against gguf's reader, and what is refused."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_maker
import tiny
import tiny_families
from skill_train.core.errors import UsageError
from skill_train.core.worker import run_worker
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.importance import collect_worker
from skill_train.llama.importance.file import (
    Entry,
    ImportanceMatrix,
    read_matrix,
    require_fit,
    wanted_matrices,
    write_matrix,
)
from skill_train.machine.read import physical_cores
from told import quiet

pytestmark = pytest.mark.slow

IDS = [[5, 17, 100, 42, 7, 300, 18, 9, 61, 250, 33, 400] * 12, [3, 77, 12, 250] * 5]
# Measured: 0.006 % of the worst column, 2e-7 of the sum of all, on f32 files. In an f16 file inputs are rounded.
WORST_COLUMN, TOTAL = 5e-4, 1e-5


def collected(
    gguf: Path, out: Path, ids: list[list[int]] | None = None
) -> tuple[collect_worker.Collected, ImportanceMatrix]:
    job = collect_worker.CollectJob(
        gguf=str(gguf),
        sequences=ids or IDS,
        threads=physical_cores(),
        out=str(out),
        datasets=["samples.jsonl"],
        model="a" * 64,
        data="b" * 64,
    )
    return run_worker(collect_worker.WORKER, job, collect_worker.Collected, progress=quiet), read_matrix(out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.export(tiny.cached("llama-spm", hidden=256), tmp_path_factory.mktemp("llama"), outtype="f32")


@pytest.fixture(scope="module")
def matrix(llama: Path) -> Path:
    out = llama.with_name("imatrix.gguf")
    collected(llama, out)
    return out


def inputs_of(folder: Path, ids: list[list[int]], names: dict[str, str]) -> dict[str, np.ndarray]:
    """The sums of squares of what goes into modules, by the name of the matrix. `names` maps modules to matrices."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    sums: dict[str, np.ndarray] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...]) -> None:
            squares = (given[0].double() ** 2).flatten(0, -2).sum(0).numpy()
            sums[name] = sums.get(name, 0.0) + squares

        return hook

    modules = dict(model.named_modules())
    for module, matrix in names.items():
        modules[module].register_forward_pre_hook(keep(matrix))
    with torch.no_grad():
        for each in ids:
            model(torch.tensor([each]))
    return sums


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found / expected - 1).max() < WORST_COLUMN
    assert abs(found.sum() / expected.sum() - 1) < TOTAL


def test_the_sums_are_those_of_transformers_inputs(llama: Path, matrix: Path) -> None:
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    names = {f"model.layers.{n}.{part}": f"blk.{n}.{own}.weight" for n in (0, 1) for part, own in parts.items()}
    expected = inputs_of(tiny.cached("llama-spm", hidden=256), IDS, names)
    read = read_matrix(matrix)
    assert sorted(read.entries) == sorted(expected)  # the last layer too, whose other tokens llama.cpp would leave out
    for name, entry in read.entries.items():
        assert entry.counts.tolist() == [sum(map(len, IDS))]
        same(entry.sums[0], expected[name])


def test_a_long_row_counts_to_its_end_in_windows(llama: Path, tmp_path: Path) -> None:
    """Each from an empty context, and each with the token that begins a text, as llama.cpp's tool reads its text."""
    row = [1, *((7 * place) % 500 + 20 for place in range(1199))]
    counts, read = collected(llama, tmp_path / "imatrix.gguf", collect_worker.windows(row, 1))
    parts = [row[:512], [1, *row[512:1023]], [1, *row[1023:]]]
    assert counts.tokens == sum(map(len, parts)) == 1202
    names = {f"model.layers.1.{part}": f"blk.1.{own}.weight" for part, own in LAST_LAYER.items()}
    expected = inputs_of(tiny.cached("llama-spm", hidden=256), parts, names)
    for name, sums in expected.items():
        assert read.entries[name].counts.tolist() == [1202]
        same(read.entries[name].sums[0], sums)


LAST_LAYER = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}


def test_every_expert_has_its_own_sums_and_count(tmp_path: Path) -> None:
    """Mixtral's experts lie in one tensor, so their inputs are computed here from what the hooks of router and block
    saw."""
    import torch
    from transformers import AutoModelForCausalLM

    gguf = tiny_families.gguf("mixtral", "f32")
    counts, read = collected(gguf, tmp_path / "imatrix.gguf")
    model = AutoModelForCausalLM.from_pretrained(str(tiny_families.folder("mixtral")), dtype=torch.float32)
    blocks = [layer.mlp for layer in model.model.layers]
    given: dict[int, list[Any]] = {0: [], 1: []}
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, inputs, number=number: given[number].append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        for each in IDS:
            model(torch.tensor([each]))
        for number, block in enumerate(blocks):
            rows = torch.cat(given[number])
            chosen = (rows @ block.gate.weight.T).softmax(-1).topk(2).indices
            up = read.entries[f"blk.{number}.ffn_up_exps.weight"]
            down = read.entries[f"blk.{number}.ffn_down_exps.weight"]
            assert len(up.counts) == 4 and up.counts.sum() == 2 * len(rows)
            for expert in range(4):
                own = rows[(chosen == expert).any(-1)]
                assert up.counts[expert] == down.counts[expert] == len(own)
                if len(own):
                    same(up.sums[expert], (own.double() ** 2).sum(0).numpy())
                    gate, lift = (own @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
                    inner = torch.nn.functional.silu(gate) * lift
                    same(down.sums[expert], (inner.double() ** 2).sum(0).numpy())
    unused = sum(int((entry.counts == 0).sum()) for entry in read.entries.values())
    assert counts.unused_experts == unused
    assert counts.unseen == []


def test_the_file_is_what_llama_cpps_tools_read(matrix: Path) -> None:
    """By gguf's reader: the keys and the names of tools/imatrix and common/imatrix-loader.cpp."""
    from gguf import GGUFReader

    reader = GGUFReader(matrix)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == ["samples.jsonl"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (1, 512)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.1.ffn_down.weight.in_sum2"].shape.tolist() == [512, 1]
    assert tensors["blk.1.ffn_down.weight.counts"].shape.tolist() == [1, 1]
    own = read_matrix(matrix)
    assert (tensors["blk.1.ffn_down.weight.in_sum2"].data[0] == own.entries["blk.1.ffn_down.weight"].sums[0]).all()
    assert (own.model, own.data) == ("a" * 64, "b" * 64)


def test_a_matrix_of_llama_cpps_tool_brings_no_path_of_a_machine_along(tmp_path: Path) -> None:
    """The tool writes the path of its text. What it says goes into each file that is quantized with it, and onto the
    card of a repository."""
    entry = Entry(np.array([[8.0, 4.0]], dtype=np.float32), np.array([2.0], dtype=np.float32))
    said = ["/srv/customers/rows, 2.txt", r"D:\customers\rows.txt", "me/tickets sha256 12", "data/rows.txt"]
    write_matrix(tmp_path / "imatrix.gguf", ImportanceMatrix({"blk.0.ffn_up.weight": entry}, said, 1, 512))
    names = ["rows, 2.txt", "rows.txt", "me/tickets sha256 12", "data/rows.txt"]
    assert read_matrix(tmp_path / "imatrix.gguf").datasets == names


def test_means_are_sums_over_counts_and_an_unused_expert_counts_every_column_alike() -> None:
    entry = Entry(np.array([[8.0, 4.0], [0.0, 0.0]], dtype=np.float32), np.array([2.0, 0.0], dtype=np.float32))
    assert entry.means().tolist() == [4.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [3e38, 1e30, 1e13, 1e-13, 1e-30, 1e-44])
def test_means_that_no_sum_of_float32_holds_are_scaled(size: float) -> None:
    """Their proportions stay. Usual ones are left alone."""
    sums = np.float32(size) * np.array([[1.0, 0.5, 1.0, 0.25] * 64], dtype=np.float32)
    means = Entry(sums, np.array([1.0], dtype=np.float32)).means()
    assert 0.25 < means.mean() < 2 and np.isfinite(means).all()
    assert np.allclose(means / means[0], sums[0].astype(np.float64) / float(sums[0, 0]), rtol=1e-6)
    usual = Entry(np.array([[1e11, 1e-11]], dtype=np.float32), np.array([1.0], dtype=np.float32)).means()
    assert usual[0] == np.float32(1e11)


def test_an_error_inside_the_callback_ends_the_command(llama: Path) -> None:
    """llama.cpp calls Python, which cannot raise through C. A width that is not the model's makes the sum fail."""
    code = (
        "import sys\n"
        "from skill_train.llama.importance import collect_worker\n"
        "files = dict(gguf=sys.argv[1], out='x', datasets=[''], model='', data='')\n"
        "job = collect_worker.CollectJob(sequences=[[5, 6, 7]], threads=1, **files)\n"
        "collect_worker.summed(job, {'blk.0.attn_q.weight': (1, 3)})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError" in done.stderr and "broadcast" in done.stderr


def test_a_dataset_whose_name_is_no_utf8_is_named_in_the_file(tmp_path: Path) -> None:
    entries = {"blk.0.attn_q.weight": Entry(np.ones(32, np.float32), np.array([4.0]))}
    write_matrix(tmp_path / "m.gguf", ImportanceMatrix(entries, ["caf\udce9.jsonl"], 1, 512))
    assert read_matrix(tmp_path / "m.gguf").datasets == ["caf\udce9.jsonl"]


def changed(matrix: Path, out: Path, change: Callable[[dict[str, Entry]], None]) -> Path:
    read = read_matrix(matrix)
    entries = {name: Entry(entry.sums.copy(), entry.counts.copy()) for name, entry in read.entries.items()}
    change(entries)
    write_matrix(out, ImportanceMatrix(entries, read.datasets, read.chunk_count, read.chunk_size))
    return out


Q = "blk.0.attn_q.weight"


def nan(entries: dict[str, Entry]) -> None:
    entries[Q].sums[0, 3] = np.nan


def negative(entries: dict[str, Entry]) -> None:
    entries[Q].sums[0, 3] = -1


def no_counts(entries: dict[str, Entry]) -> None:
    entries[Q].counts[:] = 0


def no_sums(entries: dict[str, Entry]) -> None:
    entries[Q].sums[:] = 0


@pytest.mark.parametrize(
    ("change", "word"), [(nan, "NaN"), (negative, "negative"), (no_counts, "counts"), (no_sums, "sums are zeros")]
)
def test_numbers_that_are_no_sums_of_squares_are_refused(matrix: Path, tmp_path: Path, change: Any, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        read_matrix(changed(matrix, tmp_path / "m.gguf", change))
    assert caught.value.code == "cannot_quantize"


def narrower(entries: dict[str, Entry]) -> None:
    entries[Q] = Entry(entries[Q].sums[:, :128], entries[Q].counts)


def renamed(entries: dict[str, Entry]) -> None:
    entries["blk.7.attn_q.weight"] = entries.pop(Q)


def of_experts(entries: dict[str, Entry]) -> None:
    entries[Q] = Entry(entries[Q].sums.reshape(2, -1), np.array([4.0, 4.0], dtype=np.float32))


@pytest.mark.parametrize("change", [narrower, renamed, of_experts])
def test_a_matrix_of_another_model_is_refused(matrix: Path, llama: Path, tmp_path: Path, change: Any) -> None:
    file = changed(matrix, tmp_path / "m.gguf", change)
    with pytest.raises(UsageError, match="not of this model") as caught:
        require_fit(file, read_matrix(file), read_gguf(llama))
    assert caught.value.code == "cannot_quantize"


def test_what_a_matrix_says_nothing_about_is_named(matrix: Path, llama: Path, tmp_path: Path) -> None:
    file = changed(matrix, tmp_path / "m.gguf", lambda entries: entries.__delitem__(Q))
    assert require_fit(file, read_matrix(file), read_gguf(llama)) == [Q]
    assert require_fit(matrix, read_matrix(matrix), read_gguf(llama)) == []


def test_a_damaged_header_is_refused_in_a_short_sentence(matrix: Path, llama: Path, tmp_path: Path) -> None:
    """Bytes and lengths that were changed at random: a wrong length makes a name of thousands of letters."""
    draw, data, file = random.Random(0), matrix.read_bytes(), tmp_path / "damaged.gguf"
    header = min(tensor.offset for tensor in read_gguf(matrix).tensors.values())
    lengths = [struct.pack("<Q", number) for number in (0, 1, 20_000, 1 << 31, 1 << 63, (1 << 64) - 1)]
    refused = 0
    for _ in range(400):
        new, at = draw.choice([*lengths, bytes([draw.randrange(256)])]), draw.randrange(header - 8)
        file.write_bytes(data[:at] + new + data[at + len(new) :])
        try:
            require_fit(file, read_matrix(file), read_gguf(llama))
        except UsageError as error:
            refused += 1
            assert (error.code, len(error.message) < 700) == ("cannot_quantize", True), error.message[:1000]
    assert refused > 300


@pytest.mark.parametrize("kept", [0, 3, 40, 0.5, 0.99])
def test_a_cut_file_is_refused(matrix: Path, tmp_path: Path, kept: float) -> None:
    data, file = matrix.read_bytes(), tmp_path / "cut.gguf"
    file.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(UsageError, match="not an importance matrix"):
        read_matrix(file)


def test_other_files_are_refused_by_what_they_are(matrix: Path, llama: Path, tmp_path: Path) -> None:
    old = tmp_path / "imatrix.dat"
    old.write_bytes(
        struct.pack("<ii", 1, 19) + b"blk.0.attn_q.weight" + struct.pack("<ii", 1, 1) + struct.pack("<f", 1)
    )
    lacking = tmp_path / "lacking.gguf"
    lacking.write_bytes(matrix.read_bytes().replace(b"blk.0.attn_q.weight.counts", b"blk.0.attn_q.weight.cuonts"))
    for file, word in (
        (llama, "general.type is 'model'"),
        (old, "older form"),
        (lacking, "no partner"),
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "not a file"),
    ):
        with pytest.raises(UsageError, match=word) as caught:
            read_matrix(file)
        assert caught.value.code == "cannot_quantize" and caught.value.hint


def test_what_the_quantizer_never_rounds_is_not_wanted(llama: Path) -> None:
    names = wanted_matrices(read_gguf(tiny_families.gguf("mixtral", "f16")))
    assert "blk.0.ffn_gate_inp.weight" not in names and "blk.0.ffn_gate_exps.weight" in names
    assert not {"token_embd.weight", "output.weight"} & set(wanted_matrices(read_gguf(llama)))
