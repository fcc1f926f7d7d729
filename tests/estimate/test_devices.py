"""Names of devices as nvidia-smi and sysctl print them, and the row of the table that each finds, or none.

Names: recorded in tests/support/data/machines, and NVIDIA's `nvidia-smi --query-gpu=name` as public logs show it
(GeForce, RTX, data center; read 2026-11-21). Rates: trl 1.16 `_PEAK_FLOPS_BY_DEVICE`; NVIDIA's whitepapers of
Ampere GA102, Ada and Turing; stas00/ml-engineering, compute/accelerator/README.md.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from machines import NAMES, recorded_machine
from skill_train.estimate import devices
from skill_train.estimate.devices import cpu_flops, device_speed
from skill_train.facts import MachineFacts
from skill_train.hub import flavors
from skill_train.plan.places import machine_of

CUDA = MachineFacts("Linux", "", "cuda", 24 << 30, None, 8.9, 8, False)
MPS = MachineFacts("Darwin", "", "mps", 16 << 30, None, None, 8, False)


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("Tesla T4", 65, 8.1),
        ("Tesla V100-SXM2-16GB", 112, 14),
        ("Tesla V100-PCIE-32GB", 112, 14),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8, 13.4),
        ("NVIDIA GeForce RTX 3060", 25.5, 12.7),
        ("NVIDIA GeForce RTX 3080", 59.5, 29.8),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
        ("NVIDIA GeForce RTX 4060", 30, 15.1),
        ("NVIDIA GeForce RTX 4060 Ti", 44.1, 22.1),
        ("NVIDIA GeForce RTX 4070", 58.3, 29.1),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1),
        ("NVIDIA GeForce RTX 4080", 97.5, 48.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 5080", 112.6, 56.3),
        ("NVIDIA GeForce RTX 5090", 209.5, 104.8),
        ("GeForce RTX 3090", 71, 35.6),  # drivers before 2021 print no "NVIDIA"
        ("A100-SXM4-40GB", 312, 19.5),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA A10G", 70, 31.5),
        ("NVIDIA RTX A5000", 111, 27.8),
        ("NVIDIA RTX A6000", 154.8, 38.7),
        ("NVIDIA RTX 6000 Ada Generation", 364, 91.1),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 500, 125),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 500, 125),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA A100-SXM4-40GB", 312, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA B200", 2250, 80),
        ("NVIDIA GB10", 125, 31),
    ],
)
def test_nvidia_by_name(name: str, half: float, single: float) -> None:
    found = device_speed(msgspec.structs.replace(CUDA, chip=name))
    assert found is not None
    assert (found.half_tflops, found.float_tflops) == (half, single)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # the desktop's name, another chip and half the power
        "NVIDIA GeForce RTX 4080 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3060 Ti",  # 16.2 TFLOPS in float32, not the 12.7 of an RTX 3060
        "NVIDIA GeForce RTX 3070 Ti",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4070 SUPER",
        "NVIDIA GeForce RTX 4070 Ti",  # 40.1 TFLOPS and 504 GB/s, not the 44.1 and 672 of the SUPER
        "NVIDIA GeForce RTX 5070 Ti",
        "NVIDIA GeForce RTX 2080",
        "NVIDIA GeForce GTX 1080 Ti",
        "Quadro RTX 6000",
        "NVIDIA T400",
        "NVIDIA T4G",
        "NVIDIA A100X",
        "NVIDIA A10M",
        "NVIDIA L40",
        "NVIDIA H100 NVL",  # 835 in trl's table
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H20",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_an_nvidia_gpu_that_is_not_in_the_table_is_unknown(name: str) -> None:
    assert device_speed(msgspec.structs.replace(CUDA, chip=name)) is None


@pytest.mark.parametrize(
    ("name", "single", "bandwidth"),
    [
        ("Apple M1", 2.6, 68),
        ("Apple M1 Pro", 5.2, 200),
        ("Apple M1 Max", 10.4, 400),
        ("Apple M1 Ultra", 21, 800),
        ("Apple M2", 3.6, 100),
        ("Apple M2 Pro", 6.8, 200),
        ("Apple M2 Max", 13.5, 400),
        ("Apple M2 Ultra", 27, 800),
        ("Apple M3 Max", 14.2, 400),
        ("Apple M4", 4.3, 120),
        ("Apple M4 Pro", 9.2, 273),
        ("Apple M4 Max", 18, 546),
    ],
)
def test_apple_by_name(name: str, single: float, bandwidth: float) -> None:
    found = device_speed(msgspec.structs.replace(MPS, chip=name))
    assert found is not None
    assert (found.float_tflops, found.gigabytes_per_second) == (single, bandwidth)


@pytest.mark.parametrize("name", ["Apple M5", "Apple M4 Ultra", "Apple M11", "Apple M2 (Virtual)", "Apple A18 Pro", ""])
def test_an_apple_chip_that_is_not_in_the_table_is_unknown(name: str) -> None:
    assert device_speed(msgspec.structs.replace(MPS, chip=name)) is None


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 1555),  # stas00/ml-engineering
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2000),  # the seed's hardware guide: "80 GB HBM2e, 2,000 GB/s"
        ("NVIDIA RTX A6000", 768),
        ("NVIDIA L40S", 864),  # the seed's hardware guide
        ("NVIDIA GeForce RTX 4090", 1008),  # the seed's hardware guide
        ("NVIDIA GB10", 273),  # the seed's framework
    ],
)
def test_bandwidth(name: str, bandwidth: float) -> None:
    found = device_speed(msgspec.structs.replace(CUDA, chip=name))
    assert found is not None
    assert found.gigabytes_per_second == bandwidth


def test_float16_off_geforce_accumulates_at_half_rate() -> None:
    """NVIDIA's Ada whitepaper, GeForce RTX 4090: 330.3 TFLOPS with float16 accumulation, 165.2 with float32."""
    found = device_speed(recorded_machine("rtx_4090"))
    assert found is not None
    assert found.half_tflops == pytest.approx(330.3 / 2, abs=0.1)


@pytest.mark.parametrize("name", [name for name in NAMES if recorded_machine(name).device in ("cuda", "mps")])
def test_every_recorded_gpu_is_known(name: str) -> None:
    assert device_speed(recorded_machine(name)) is not None


def test_every_flavor_with_a_gpu_is_known() -> None:
    unknown = [flavor.name for flavor in flavors.shipped() if flavor.gpu and not device_speed(machine_of(flavor))]
    assert unknown == []


def test_no_name_finds_two_rows() -> None:
    """Otherwise the order of the table would decide. Every pattern is tried on every name that these tests know."""
    module = __import__("pathlib").Path(__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:NVIDIA|Apple|Tesla|GeForce|A100)[^"]*)"', module))
    assert len(names) > 80
    for rows in (devices._NVIDIA, devices._APPLE):
        for name in names:
            assert len([row for row in rows if devices._matches(row, name)]) <= 1, name


def test_a_processor_has_no_row_and_a_clock() -> None:
    cpu = recorded_machine("bare_cpu")
    assert device_speed(cpu) is None
    # 2 cores x 2596.12 MHz x 2 units of 16 floats, a multiply-add counted twice: 64 a clock.
    assert cpu_flops(cpu) == pytest.approx(2 * 2596.12e6 * 64)
    assert cpu_flops(msgspec.structs.replace(cpu, cpu_mhz=None)) is None
    assert cpu_flops(msgspec.structs.replace(cpu, cpu_features=())) is None
