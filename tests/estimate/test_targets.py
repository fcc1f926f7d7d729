"""Devices by name, and as a user states them."""

from __future__ import annotations

import pytest

from machines import recorded_machine
from skill_train.core.errors import UsageError
from skill_train.estimate.targets import find_target, machine_target, parse_bytes, read_table

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found", "memory"),
    [
        ("iPhone 15", "iPhone 15", 6),
        ("iphone 15 pro max", "iPhone 15 Pro", 8),
        ("iPhone 15 Plus", "iPhone 15", 6),
        ("Apple M2 (16GB)", "M2", 16),
        ("Apple M2 16GB", "M2", 16),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("M1 Max", "M1 Max", 32),
        ("raspberry pi 5 8 gb", "Raspberry Pi 5", 8),
        ("Radeon RX 7900 XTX", "RX 7900 XTX", 24),
        ("Qualcomm Snapdragon 8 Gen 3", "Snapdragon 8 Gen 3", 8),
    ],
)
def test_a_device_by_name(name: str, found: str, memory: int) -> None:
    target = find_target(name, None, None)
    assert (target.name, target.memory_bytes) == (found, memory * GIB)
    low, high = target.usable_bytes
    assert 0 < low < high < target.memory_bytes and target.gigabytes_per_second and len(target.reasons) == 3


def test_every_row_is_found_by_its_name() -> None:
    for row in read_table().devices:
        target = find_target(f"{row.name} {row.memory_gb[0]}GB", None, None)
        assert target.name == row.name and target.gigabytes_per_second == row.gigabytes_per_second
        assert row.source in read_table().sources and row.memory_gb == sorted(row.memory_gb)
        for name in row.names:
            assert find_target(f"{name} {row.memory_gb[0]}GB", None, None) == target


def test_no_name_means_two_devices() -> None:
    """Rows of one name are told apart by their memory alone, so they have no size in common."""
    sold: dict[str, list[int]] = {}
    for row in read_table().devices:
        for name in (row.name, *row.names):
            plain = "".join(name.lower().split())
            assert not {*sold.get(plain, [])} & {*row.memory_gb}, name
            sold[plain] = [*sold.get(plain, []), *row.memory_gb]


@pytest.mark.parametrize(
    ("typed", "sold"),
    [
        ("iPhone 15 Pro 256GB", "8 GB"),
        ("Pixel 8 128 GB", "8 GB"),
        ("M4 512GB", "16, 24, 32 GB"),
        ("A100 60GB", "40, 80"),
    ],
)
def test_a_size_of_storage_is_not_taken_for_memory(typed: str, sold: str) -> None:
    """Phones are sold by their storage, of which there is 10 times as much as memory."""
    with pytest.raises(UsageError, match="is not sold with") as refused:
        find_target(typed, None, None)
    assert sold in refused.value.expected and "--memory" in refused.value.hint


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("MacBook Pro M4 Pro 24GB", "M4 Pro"),
        ("Mac mini M4", "M4"),
        ("iPhone 15 Pro Max", "iPhone 15 Pro"),
        ("iphone16 plus", "iPhone 16"),
        ("NVIDIA GeForce RTX-4090", "RTX 4090"),
        ("rtx3060 12 GB", "RTX 3060"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("galaxy s24 ultra", "Galaxy S24 Ultra"),
        ("Samsung Galaxy S24 Ultra 5G", "Galaxy S24 Ultra"),
        ("S24", "Galaxy S24"),
        ("S24+", "Galaxy S24 Plus"),
        ("Samsung S23 plus", "Galaxy S23"),
        ("Google Pixel 8 Pro", "Pixel 8 Pro"),
        ("pixel 10 pro xl", "Pixel 10 Pro"),
        ("iPad Pro M4", "iPad Pro M4"),
        ("iPad Pro 11-inch (M4)", "iPad Pro M4"),
        ('iPad Pro 13" M5 16GB', "iPad Pro M5"),
        ("Apple iPad mini (6th generation)", "iPad mini A15"),
        ("ipad air 5th gen", "iPad Air M1"),
        ("OnePlus 12", "OnePlus 12"),
        ("Xiaomi 15 Pro", "Xiaomi 15"),
        ("MacBook Pro M5 Pro", "M5 Pro"),
        ("M5 Max", "M5 Max"),
        ("Intel(R) N100", "Intel N100"),
        ("iPhone 13 mini", "iPhone 13"),
        ("M2 8 GiB", "M2"),
        ("M4 (Max)", "M4 Max"),
        ("Apple M5 Max (40-core GPU)", "M5 Max 40-core"),
    ],
)
def test_a_device_as_people_write_it(typed: str, name: str) -> None:
    assert find_target(typed, None, None).name.startswith(name)


@pytest.mark.parametrize(
    "typed",
    [
        "M5 Ultra", "M1 Pro Max", "RTX 3060 Ti", "RTX 4090 Laptop", "iPad Pro", "4090", "Galaxy Tab S9", "Galaxy S20",
        "Pixel", "iPhone 15 Ultra", "Galaxy S24 FE", "12",
    ],
)  # fmt: skip
def test_another_chip_is_not_taken_for_one_of_the_table(typed: str) -> None:
    """An M5 Max reads its memory three times as fast as an M5."""
    with pytest.raises(UsageError, match="no device"):
        find_target(typed, None, None)


@pytest.mark.parametrize(
    ("typed", "memory", "bandwidth"),
    [
        ("M3 Max", None, 300),  # the smallest that is sold has 14 cores
        ("M3 Max 64GB", None, 400),
        ("M3 Max", "96GB", 300),
        ("M4 Max 128GB", None, 546),
        ("RTX 3080 12GB", None, 912),
        ("RTX 3080", None, 760),
        ("A100 80GB", None, 2000),
        ("A100", "60GB", 1555),
    ],
)
def test_the_memory_decides_between_chips_of_one_name(typed: str, memory: str | None, bandwidth: int) -> None:
    assert find_target(typed, memory, None).gigabytes_per_second == bandwidth


def test_a_stated_value_takes_the_place_of_the_row() -> None:
    target = find_target("M2", "24GB", "90GB/s")
    assert (target.memory_bytes, target.gigabytes_per_second) == (24e9, 90)
    assert target.reasons[0] == "memory: as stated" and target.reasons[2] == "bandwidth: --bandwidth"


def test_a_device_that_is_only_stated() -> None:
    target = find_target(None, "8GB", "68GB/s")
    assert (target.memory_bytes, target.usable_bytes, target.gigabytes_per_second) == (8e9, (6e9, 7.2e9), 68)
    assert find_target(None, "8GB", None).gigabytes_per_second is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("iPhone 99", None, None), "no device 'iPhone 99'"),
        (("M2 8GB 16GB", None, None), "no device"),
        (("", None, None), "no device ''"),
        ((None, None, "68GB/s"), "--bandwidth alone"),
        ((None, "lots", None), "--memory is not a size"),
        ((None, "8", None), "--memory is not a size"),  # 8 bytes
        ((None, "0GB", None), "--memory is not a size"),
        ((None, "-8GB", None), "--memory is not a size"),
        ((None, "8GB", "fast"), "--bandwidth is not a bandwidth"),
        ((None, "8GB", "0"), "--bandwidth is not a bandwidth"),
        ((None, "8GB", "nan"), "--bandwidth is not a bandwidth"),
    ],
)
def test_refused(arguments: tuple[str | None, str | None, str | None], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_target(*arguments)


def test_the_nearest_names_are_told() -> None:
    with pytest.raises(UsageError) as refused:
        find_target("RTX 4095", None, None)
    assert "RTX 4090" in refused.value.expected and "--memory" in refused.value.hint
    with pytest.raises(UsageError) as refused:
        find_target("Samsung Galaxy S26 Ultra", None, None)
    assert "Galaxy S25 Ultra" in refused.value.expected
    assert "--memory 8GB --bandwidth 51GB/s" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "count"), [("8GB", 8e9), ("1.5 gb", 1.5e9), ("700MB", 7e8), ("2GiB", 2 * GIB), ("1000000", 1e6)]
)
def test_sizes(text: str, count: float) -> None:
    assert parse_bytes(text, "--max-size") == count


@pytest.mark.parametrize(
    ("machine", "family", "bandwidth"),
    [
        ("rtx_4090", "nvidia", 1008),
        ("a100_80gb", "nvidia_hbm", 2000),
        ("m1_8gb", "apple", 68),
        ("m4_max_128gb", "apple_max", 546),
        ("bare_cpu", "cpu", None),
    ],
)
def test_this_machine(machine: str, family: str, bandwidth: float | None) -> None:
    target = machine_target(recorded_machine(machine))
    assert (target.family, target.gigabytes_per_second) == (family, bandwidth)


def test_memory_alone_is_told_to_be_that_of_a_computer() -> None:
    """A phone gives an app less: the least of 8 GB is 5.2 GB there, and 6 GB here."""
    plain, phone = find_target(None, "8GB", None), find_target("Android mid-range", "8GB", None)
    assert (plain.usable_bytes[0], phone.usable_bytes[0]) == (6.0e9, 5.2e9)
    assert "usable: as of a computer, judged, not measured: the system takes 10 to 25 %; a phone takes more" in (
        plain.reasons
    )
    with pytest.raises(UsageError) as raised:
        find_target("Nokia 3310", None, None)
    assert "phone: --for 'Android mid-range' --memory 8GB" in raised.value.hint
