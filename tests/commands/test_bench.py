"""`bench`: speeds of real files, and none while others use the processor."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_edit
import gguf_maker
from one_command import answered, called
from skill_train.llama.speed.speed_worker import Round, Timing, share

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))


def test_two_files() -> None:
    """The figures are those of the median run; a shared machine may be busy, and then there are none."""
    export = gguf_maker.exported("qwen2")
    words = ("--prompt-tokens", 200, "--answer-tokens", 16, "--rounds", 3)
    code, answer = answered("bench", export.file("q8_0"), export.file("q4_k_m"), *words)
    files = answer["data"]["files"]
    assert code == 0 and [file["bytes"] for file in files] == [
        export.file(kind).stat().st_size for kind in ("q8_0", "q4_k_m")
    ]
    for file in files:
        assert file["device"] == "cpu" and file["reached_gigabytes_per_second"] is None  # it is small
        for phase, tokens in (("prompt", 200), ("answer", 16)):
            speed = file[phase]
            assert speed["tokens"] == tokens and len(speed["seconds"]) == len(speed["processor_seconds"]) == 3
            assert speed["busy"] == (speed["share"] < 0.9) == (speed["tokens_per_second"] is None)
            if not speed["busy"]:
                assert speed["tokens_per_second"] == pytest.approx(tokens / sorted(speed["seconds"])[1], rel=0.05)
        # One pass over the weights for 200 tokens, or one for each: the same order on any machine.
        assert min(file["prompt"]["seconds"]) / 200 < min(file["answer"]["seconds"]) / 16


def test_a_file_in_parts_has_the_size_of_all(tmp_path: Path) -> None:
    """llama.cpp takes the first for the whole. It has 7 GB of a model of 70 GB, or no tensors at all."""
    whole = gguf_maker.exported("gemma").file("q8_0")
    gguf_edit.rewrite(whole, tmp_path / "model.gguf", most_tensors=9)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    words = ("--prompt-tokens", 16, "--answer-tokens", 4, "--rounds", 1)
    code, answer = answered("bench", parts[0], *words)
    assert code == 0 and len(parts) > 2
    assert answer["data"]["files"][0]["bytes"] == sum(part.stat().st_size for part in parts)


def _work() -> None:
    while True:
        pass


@pytest.fixture
def others() -> Iterator[None]:
    """As many busy programs as there are processors."""
    programs = [multiprocessing.Process(target=_work, daemon=True) for _ in range(multiprocessing.cpu_count())]
    for program in programs:
        program.start()
    yield
    for program in programs:
        program.kill()
        program.join()


@pytest.mark.usefixtures("others")
def test_no_figure_on_a_busy_machine() -> None:
    file = gguf_maker.exported("qwen2").file("q8_0")
    words = (file, "--prompt-tokens", 256, "--answer-tokens", 32, "--rounds", 1)
    code, answer = answered("bench", *words)
    speed = answer["data"]["files"][0]["answer"]
    assert code == 0 and speed["busy"] and speed["tokens_per_second"] is None and speed["share"] < 0.9
    assert speed["seconds"] and answer["warnings"][0]["code"] == "busy"
    assert "was busy" in called("bench", *words, "--format", "human").stdout


def test_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    code, answer = answered("bench", tmp_path / "broken.gguf")
    assert code == 6 and answer["error"]["code"] == "bad_gguf"
    whole = gguf_maker.exported("qwen2").file("q8_0").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    assert answered("bench", tmp_path / "cut.gguf")[0] == 6
    code, answer = answered("bench", gguf_maker.exported("qwen2").file("q8_0"), "--prompt-tokens", 2048)
    assert code == 2 and "was made for 2048 tokens" in answer["error"]["message"]
    # It ran on the processor, and was called the speed of a GPU.
    code, answer = answered("bench", gguf_maker.exported("qwen2").file("q8_0"), "--device", "gpu")
    assert (code, answer["error"]["code"]) == (7, "device_unavailable")
    assert answered("bench", tmp_path)[0] == 2  # a folder that is not a run
    code, answer = answered("bench", tmp_path / "absent.gguf")
    assert (code, answer["error"]["code"]) == (2, "missing_file")  # exit 6 would say that a file is wrong


def test_the_share_by_hand() -> None:
    """Two runs of 1 s on 2 threads: alone, and with a third of the machine for others."""
    timing = Timing(10, [Round(1.0, 2.0, 2.0), Round(1.5, 2.0, 3.0)])
    assert share(timing, 2) == pytest.approx(2 / 3) and timing.rate == 8
    assert share(Timing(10, [Round(1.0, 1.0, None)]), 2) == 0.5  # nobody knows who took the rest
    assert share(Timing(10, [Round(1.0, 2.0, 1.9)]), 2) == 1  # the clocks tick 100 times a second
