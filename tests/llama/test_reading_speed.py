"""What `bench` measured is used by later estimates, and only what says something about the memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import models
from machines import recorded_machine
from skill_train.estimate.fit import estimated_file
from skill_train.estimate.targets import machine_target
from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.llama.speed.cached import known_reading, read_bytes, remember

CPU = recorded_machine("bare_cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    return tmp_path


def _file(size: int, embedding: int = 0, *, experts: int = 0) -> GgufFile:
    tensors = {
        "token_embd.weight": Tensor("token_embd.weight", (1, 1), "Q8_0", 0, embedding),
        "output.weight": Tensor("output.weight", (1, 1), "Q8_0", 0, size),
    }
    metadata: dict[str, int | str] = {"general.architecture": "llama", "llama.block_count": 10}
    metadata |= {"llama.expert_count": experts} if experts else {}
    return GgufFile(Path("model-q8_0.gguf"), 3, 32, dict(metadata), tensors, 0, 0)


def test_by_hand() -> None:
    """1 GB at 10 tokens a second, without 10 layers of 70 us: 1 / 0.0993 = 10.07 GB/s."""
    assert remember(CPU, "cpu", _file(10**9, 10**8), 10.0, "2026-11-26") == pytest.approx(10.0705, rel=1e-3)
    known = known_reading(CPU)
    assert known is not None and known.basis == "model-q8_0.gguf, 2026-11-26"
    assert known_reading(msgspec.structs.replace(CPU, chip="another")) is None


def test_estimates_use_it() -> None:
    model = models.recorded_model("llama-3.2-1b")
    assert estimated_file(model, machine_target(CPU), "q8_0", 512).speed is None
    remember(CPU, "cpu", _file(10**9), 10.0, "2026-11-26")
    speed = estimated_file(
        model, machine_target(msgspec.structs.replace(CPU, reading=known_reading(CPU))), "q8_0", 512
    ).speed
    assert speed is not None and 5.5 < speed.low < 7.5 < speed.high < 11 and "as measured" in speed.basis


@pytest.mark.parametrize(
    ("file", "rate"),
    [
        (_file(10**8), 100.0),  # it fits the caches of a processor
        (_file(10**9, experts=8), 10.0),
        (_file(10**9), 1200.0),  # 10 layers take 0.7 of its 0.83 ms
    ],
)
def test_what_says_nothing_is_not_kept(file: GgufFile, rate: float) -> None:
    assert remember(CPU, "cpu", file, rate, "2026-11-26") is None and known_reading(CPU) is None


def test_a_tied_embedding_is_read() -> None:
    file = _file(10**9, 10**8)
    assert read_bytes(file) == 10**9
    del file.tensors["output.weight"]
    assert read_bytes(file) == 10**8


def test_a_torn_cache_is_empty(cache: Path) -> None:
    remember(CPU, "cpu", _file(10**9), 10.0, "2026-11-26")
    (path,) = (cache / "reading").iterdir()
    for text in ("{", "[]", '{"schema": "skill-train/reading/1"}', '{"gigabytes_per_second": "x", "basis": 1}'):
        path.write_text(text)
        assert known_reading(CPU) is None


def test_the_embeddings_of_each_layer_are_not_read() -> None:
    """Gemma 3n and 4 take one row of them for a token."""
    file = _file(10**9, 10**8)
    file.tensors["per_layer_token_embd.weight"] = Tensor("per_layer_token_embd.weight", (1, 1), "Q6_K", 0, 10**9)
    assert read_bytes(file) == 10**9
