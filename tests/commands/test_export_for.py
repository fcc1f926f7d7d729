"""`export-gguf --for DEVICE`: each candidate is made and measured, and one is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shared_runs
from one_command import answered, called
from skill_train.estimate.fit import estimated_file
from skill_train.estimate.targets import find_target
from skill_train.model.folder import read_model
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the shared run, with its q8_0 and q4_k_m."""
    shutil.copytree(shared_runs.chain().run, tmp_path / "run")
    return Path("run")  # in the folder of the test


QUANTS = ("--quant", "q8_0,q4_k_m")


def test_the_best_file_for_a_phone(run: Path) -> None:
    code, answer = answered("export-gguf", run, *QUANTS, "--for", "iPhone 15", "--context", 128)
    on = answer["data"]["for"]
    assert (code, on["device"], on["context"], on["recommended"]) == (0, "iPhone 15", 128, "q8_0")
    kl = {file["quant"]: file["kl"] for file in on["files"]}
    assert 0 < kl["q8_0"] < kl["q4_k_m"] and on["because"].startswith(
        f"q8_0 has the least divergence, {kl['q8_0']:.2g}"
    )
    sizes = {file["quant"]: file["bytes"] for file in answer["data"]["files"]}
    assert all(file["bytes"] == [sizes[file["quant"]]] * 2 and file["problems"] == [] for file in on["files"])
    same = {file["quant"]: file["same_top1"] for file in on["files"]}
    assert 0.5 < same["q4_k_m"] <= same["q8_0"] <= 1
    assert f"FROM ./{next(RunDir(run).gguf.glob('*q8_0*')).name}\n" in (run / "gguf" / "Modelfile").read_text()
    shown = called("export-gguf", run, *QUANTS, "--for", "iPhone 15", "--context", 128, "--format", "human").stdout
    assert "ship q8_0: " in shown


def test_limits_leave_the_smaller_file(run: Path) -> None:
    small, large = (next((run / "gguf").glob(f"*{quant}*")).stat().st_size for quant in ("q4_k_m", "q8_0"))
    between = f"{(small + large) / 2e6:.3f}MB"
    code, answer = answered(
        "export-gguf", run, *QUANTS, "--memory", "8GB", "--bandwidth", "68GB/s", "--max-size", between
    )
    on = answer["data"]["for"]
    assert (code, on["recommended"]) == (0, "q4_k_m") and "--max-size is" in on["files"][0]["problems"][0]


def test_the_file_that_lacks_least_is_named(run: Path) -> None:
    """The files are there all the same, and the Modelfile stays as it was."""
    before = (run / "gguf" / "Modelfile").read_bytes()
    code, answer = answered("export-gguf", run, *QUANTS, "--for", "Raspberry Pi 5", "--max-kl", "1e-9")
    on = answer["data"]["for"]
    assert (code, answer["error"]["code"], on["recommended"], answer["next"]) == (3, "no_memory", None, [])
    assert (
        "nothing fits Raspberry Pi 5 and keeps the limits; the nearest is q8_0: it diverges by"
        in answer["error"]["message"]
    )
    assert (run / "gguf" / "Modelfile").read_bytes() == before and len(answer["data"]["files"]) >= 2


def test_all_candidates_are_made_without_a_type(tmp_path: Path) -> None:
    """And all are in the answer, of a path of 200 characters too, with what speaks against each."""
    run = tmp_path / ("a long name " * 12) / ("x" * 60) / "run"
    shutil.copytree(shared_runs.chain().run, run)
    assert len(str(run)) > 200
    code, answer = answered("export-gguf", run, "--for", "M2", "--memory", "100kB", "--min-speed", "1e5")
    on = answer["data"]["for"]
    assert (code, answer["error"]["code"]) == (3, "no_memory")
    assert {file["quant"] for file in on["files"]} >= {"q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"}
    assert all(file["kl"] > 0 and len(file["problems"]) == 2 for file in on["files"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--for", "iPhone 99"), "no device"),
        (("--max-kl", "0.1"), "--max-kl needs a device"),
        (("--min-speed", "3"), "--min-speed needs a device"),
        (("--max-size", "1MB"), "is the size of a mix"),
    ],
)
def test_refused_before_anything_is_made(run: Path, options: tuple[str, ...], says: str) -> None:
    before = sorted(path.name for path in (run / "gguf").iterdir())
    code, answer = answered("export-gguf", run, "--quant", "q5_k_m", *options)
    assert code == 2 and says in answer["error"]["message"]
    assert sorted(path.name for path in (run / "gguf").iterdir()) == before


def test_a_model_folder_is_not_measured(run: Path, tmp_path: Path) -> None:
    """It has no rows: the type with most bits is named, and --max-kl fits nothing."""
    words = (run / "merged", "--out", tmp_path / "out", "--quant", "q8_0,q4_k_m", "--for", "M1")
    code, answer = answered("export-gguf", *words)
    on = answer["data"]["for"]
    assert (code, on["recommended"], on["files"][0]["kl"]) == (0, "q8_0", None) and "most bits" in on["because"]
    assert answered("export-gguf", *words, "--max-kl", "1")[0] == 3


def _without_q4(run: Path) -> str:
    """A size between q4_k_m and iq4_xs. Those of the tiny model are only known from its files."""
    small = next((run / "gguf").glob("*q4_k_m*")).stat().st_size
    return f"{small / 1e6 - 0.001:.3f}MB"


def test_i_quants_are_made_and_measured(run: Path) -> None:
    """A speed between those of q4_k_m and iq4_xs, before there are files; these are so small that all keep it."""
    device = find_target("Raspberry Pi 5", None, "0.001GB/s")
    model = read_model(run / "merged")
    slow, fast = (estimated_file(model, device, quant, 128).speed for quant in ("q4_k_m", "iq4_xs"))
    assert slow is not None and fast is not None and slow.low < fast.low
    between = (slow.low + fast.low) / 2
    words = ("--for", "Raspberry Pi 5", "--bandwidth", "0.001GB/s", "--context", 128, "--min-speed", between)
    code, answer = answered("export-gguf", run, *words)
    on = answer["data"]["for"]
    made = [file["quant"] for file in on["files"] if file["quant"].startswith("iq")]
    assert code == 0 and made == ["iq4_xs"] and all(file["kl"] > 0 for file in on["files"])
    reason = "i-quants: iq4_xs too, because q4_k_m does not fit; iq3_m, iq3_xxs, iq2_m, iq2_xxs were not tried"
    assert reason in on["reasons"]


def test_no_i_quants_without_a_matrix(run: Path, tmp_path: Path) -> None:
    """A model folder has no rows to make one of."""
    words = (run / "merged", "--out", tmp_path / "out", "--for", "M2", "--max-size", _without_q4(run))
    on = answered("export-gguf", *words)[1]["data"]["for"]
    assert [file["quant"] for file in on["files"]] and not any(file["quant"].startswith("iq") for file in on["files"])
    assert "i-quants: not tried without an importance matrix" in on["reasons"]
