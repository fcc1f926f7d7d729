"""Which file is chosen for a device, and what is said where none fits."""

from __future__ import annotations

import msgspec
import pytest

import models
from skill_train.estimate.fit import (
    DeviceFile,
    FileSizes,
    ShipLimits,
    choose,
    estimated_file,
    exported_file,
    i_quants_to_try,
    problems_of,
)
from skill_train.estimate.step import Range
from skill_train.estimate.targets import TargetDevice, find_target

ROOM = TargetDevice("a phone", "phone", 6e9, (3e9, 4e9), 50, ())
LLAMA = models.recorded_model("llama-3.2-3b")


def _file(quant: str, size: float, *, speed: float | None = 20, kl: float | None = None) -> DeviceFile:
    memory = Range(size, size + 0.5e9, "")
    rate = None if speed is None else Range(speed, 2 * speed, "")
    return DeviceFile(quant, Range(size, size, ""), memory, rate, kl)


def test_most_bits_of_those_that_fit() -> None:
    choice = choose([_file("q8_0", 3.4e9), _file("q6_k", 2.6e9), _file("q4_k_m", 2e9)], ROOM, ShipLimits())
    assert choice.candidate is not None and choice.candidate.quant == "q4_k_m"  # 2.6 + 0.5 GB are more than 3 GB
    choice = choose([_file("q8_0", 3.4e9), _file("q6_k", 2.5e9), _file("q4_k_m", 2e9)], ROOM, ShipLimits())
    assert choice.candidate is not None and choice.candidate.quant == "q6_k"
    assert choice.because == "q6_k has the most bits a weight of the types that fit a phone; 1 of 3 do not fit"


def test_the_least_divergence_where_it_was_measured() -> None:
    """A mix or an importance matrix can make the smaller file the better one."""
    files = [_file("q5_k_m", 2.4e9, kl=0.004), _file("q4_k_m", 2e9, kl=0.003)]
    choice = choose(files, ROOM, ShipLimits())
    assert choice.candidate is not None and choice.candidate.quant == "q4_k_m"
    assert "0.003 nats" in choice.because


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (ShipLimits(max_bytes=2.2e9), {"q4_k_m", "q2_k"}),
        (ShipLimits(max_kl=0.01), {"q8_0", "q4_k_m"}),
        (ShipLimits(min_speed=15), {"q4_k_m", "q2_k"}),
        (ShipLimits(max_bytes=2.2e9, max_kl=0.01, min_speed=15), {"q4_k_m"}),
    ],
)
def test_each_limit(limits: ShipLimits, kept: set[str]) -> None:
    files = [
        _file("q8_0", 2.4e9, speed=10, kl=0.001),
        _file("q4_k_m", 2e9, speed=15, kl=0.01),
        _file("q2_k", 1e9, speed=30, kl=0.3),
    ]
    choice = choose(files, ROOM, limits)
    assert {quant for quant, problems in choice.problems.items() if not problems} == kept


def test_the_file_that_lacks_least_is_named() -> None:
    choice = choose([_file("q8_0", 4e9), _file("q4_k_m", 2.8e9, speed=8)], ROOM, ShipLimits(min_speed=10))
    assert choice.candidate is None
    assert choice.because == (
        "nothing fits a phone and keeps the limits; the nearest is q4_k_m: it needs up to 3.30 GB of 3.00 GB that can "
        "be used; writes 8.0 to 16.0 tokens/s, and --min-speed is 10"
    )


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (ShipLimits(max_bytes=1e6), "it has up to 1,027,104 bytes, and --max-size is 1,000,000"),
        (ShipLimits(max_bytes=0.9e6), "it has up to 1.0 MB, and --max-size is 0.9 MB"),
        (ShipLimits(max_kl=0.02), "it diverges by 0.0204 nats, and 0.02 are allowed"),
        (ShipLimits(min_speed=10), "it writes 9.9 to 19.9 tokens/s, and --min-speed is 10"),
    ],
)
def test_a_near_miss_is_seen_in_its_figures(limits: ShipLimits, said: str) -> None:
    choice = choose([_file("q3_k_m", 1_027_104, speed=9.96, kl=0.0204)], ROOM, limits)
    assert choice.because.endswith(said)


def test_what_is_unknown_is_not_shipped() -> None:
    """Nothing that cannot be judged counts as good enough."""
    file = _file("q4_k_m", 1e9, speed=None)
    assert choose([file], ROOM, ShipLimits()).candidate is file
    for limits in (ShipLimits(min_speed=1), ShipLimits(max_kl=1)):
        assert choose([file], ROOM, limits).candidate is None
    assert choose([msgspec.structs.replace(file, memory=None)], ROOM, ShipLimits()).candidate is None
    nothing = msgspec.structs.replace(file, bytes=None)
    assert choose([nothing], ROOM, ShipLimits(max_bytes=1e12)).candidate is None
    assert choose([msgspec.structs.replace(file, kl=float("nan"))], ROOM, ShipLimits(max_kl=1)).candidate is None


def test_what_is_unknown_is_told_as_a_sentence() -> None:
    """A message says `it` before each problem, so that none may have a subject of its own."""
    unknown = DeviceFile("q8_0", None, None, None)
    problems = problems_of(unknown, ROOM, ShipLimits(min_speed=10, max_bytes=1, max_kl=0.1))
    assert len(problems) == 4 and all(problem.text.startswith("has no ") for problem in problems)


def test_a_published_file_on_a_phone() -> None:
    """Llama 3.2 3B q4_k_m has 1.87 GiB, 112 KiB a token of cache, and 128,256 x 512 logits of 4 bytes."""
    phone = find_target("iPhone 16", None, None)
    file = exported_file(LLAMA, phone, "q4_k_m", 4096, FileSizes(2_007_897_497, 0, 0))
    assert file.memory is not None
    cache, logits = 4096 * 112 * 1024, 128_256 * 512 * 4
    assert file.memory.low == 2_007_897_497 + cache + logits / 2
    assert file.memory.high == 2_007_897_497 + cache + logits + 150e6
    estimated = estimated_file(LLAMA, phone, "q4_k_m", 4096)
    assert estimated.bytes is not None and estimated.bytes.low < 2_007_897_497 < estimated.bytes.high


def test_a_projector_takes_memory_and_not_speed() -> None:
    phone = find_target("iPhone 16", None, None)
    alone = exported_file(LLAMA, phone, "q4_k_m", 4096, FileSizes(2_000_000_000, 0, 0))
    pair = exported_file(LLAMA, phone, "q4_k_m", 4096, FileSizes(2_000_000_000, 0, 800_000_000))
    assert pair.memory is not None and alone.memory is not None
    assert pair.memory.low - alone.memory.low == 800e6 and pair.speed == alone.speed


@pytest.mark.parametrize(
    ("room", "tried", "says"),
    [
        (2.6, [], "q4_k_m or a larger type fits"),  # q4_k_m of 2.0 GB needs 2.5
        (2.4, ["iq4_xs", "iq3_m"], "q4_k_m does not fit; iq3_xxs, iq2_m were not tried"),  # q3_k_m fits
        (2.2, ["iq3_m", "iq3_xxs"], "iq4_xs, iq2_m were not tried"),  # q2_k fits; iq4_xs needs 2.3
        (1.75, ["iq2_m"], "iq4_xs, iq3_m, iq3_xxs were not tried"),  # no k-quant fits
        (1.0, [], "none of them fits"),
    ],
)
def test_i_quants_are_tried_where_the_k_quants_leave_a_gap(room: float, tried: list[str], says: str) -> None:
    target = msgspec.structs.replace(ROOM, usable_bytes=(room * 1e9, 4e9))
    k_quants = [_file("q8_0", 3.4e9), _file("q4_k_m", 2e9), _file("q3_k_m", 1.85e9), _file("q2_k", 1.4e9)]
    i_quants = [_file("iq4_xs", 1.8e9), _file("iq3_m", 1.6e9), _file("iq3_xxs", 1.5e9), _file("iq2_m", 1.2e9)]
    found, why = i_quants_to_try(k_quants, i_quants, target, ShipLimits(max_kl=0.1))
    assert found == tried and says in why
    if tried:  # one that is too slow is no candidate
        slow = [msgspec.structs.replace(file, speed=Range(1, 2, "")) for file in i_quants]
        assert i_quants_to_try(k_quants, slow, target, ShipLimits(min_speed=5))[0] == []


@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (1.9e9, ["iq4_xs", "iq3_m"]),  # both fit in any case
        (1.7e9, ["iq4_xs", "iq3_m"]),  # the first if it comes out small
        (1.55e9, ["iq3_m", "iq2_m"]),  # iq3_xxs may not fit either
        (1.1e9, ["iq2_m"]),  # that alone, if it comes out small
        (0.9e9, []),
    ],
)
def test_an_i_quant_that_may_fit_is_tried(most: float, tried: list[str]) -> None:
    """A file that turned out to fit `--max-size` was never made, and the answer was that nothing fits."""

    def wide(quant: str, size: float) -> DeviceFile:
        low, high = size - 0.1e9, size + 0.1e9
        return msgspec.structs.replace(
            _file(quant, 0, speed=20), bytes=Range(low, high, ""), memory=Range(low, high, "")
        )

    k_quants = [_file("q8_0", 3.4e9)]
    i_quants = [wide("iq4_xs", 1.75e9), wide("iq3_m", 1.6e9), wide("iq3_xxs", 1.5e9), wide("iq2_m", 1.1e9)]
    for room, limits in ((2.2e9, ShipLimits(max_bytes=most)), (most, ShipLimits())):
        target = msgspec.structs.replace(ROOM, usable_bytes=(room, 4e9))
        assert i_quants_to_try(k_quants, i_quants, target, limits)[0] == tried


@pytest.mark.parametrize(("quant", "published"), [("q4_k_m", 2.49e9), ("q8_0", 4.13e9)])
def test_the_files_of_a_vision_model_as_published(quant: str, published: float) -> None:
    """Gemma 3 4B of ggml-org on the Hub: 2.49 and 4.13 GB, and 0.851 GB of vision in f16, where pictures are read."""
    model, phone = models.recorded_model("gemma-3-4b"), find_target("iPhone 15", None, None)
    alone, pair = (estimated_file(model, phone, quant, 4096, pictures=each) for each in (False, True))
    assert alone.bytes is not None and pair.bytes is not None
    assert alone.bytes.low <= published <= alone.bytes.high
    assert pair.bytes.low <= published + 0.851e9 <= pair.bytes.high
    assert pair.bytes.low - alone.bytes.low == pytest.approx(0.851e9, rel=0.04)
    assert alone.speed == pair.speed  # a token reads no tower
