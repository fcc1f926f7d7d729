"""How fast each device computes and reads its memory. These are published figures; this project measured none of them.

Half precision is the dense tensor rate with float32 accumulation, which torch uses: half of the advertised one on
GeForce cards. Sources, read 2026-11-21: `trl/trainer/utils.py` of TRL 1.16.0
(`_PEAK_FLOPS_BY_DEVICE`: A10, A6000, L4, L40S, A100, H100, H200, B200, RTX PRO 6000); stas00/ml-engineering,
compute/accelerator/README.md, 2026-08-22 (A100, H100, H200, B200, L40S); NVIDIA's architecture whitepapers of Turing,
Ampere GA102, Ada and Blackwell and data sheets (the others); for Apple exo-explore/exo, device_capabilities.py, and
ggml-org/llama.cpp discussion 4167 (bandwidth). DGX Spark: half of half of half of NVIDIA's "1 PFLOP sparse FP4".
"""

import re
from functools import cache

import msgspec

from skill_train.facts import MachineFacts


class Device(msgspec.Struct, frozen=True):
    """Speeds of one kind of GPU or Apple chip."""

    name: str  # a regular expression that matches its name, without maker and family
    half_tflops: float  # float16 or bfloat16 with float32 accumulation, 1e12 operations a second
    float_tflops: float  # float32
    gigabytes_per_second: float  # memory bandwidth, 1e9 bytes
    # the share of the peak that training code reaches, relative to an A100. It is below 1 for cards that reach their
    # power limit or that need larger batches (stas00's MAMF table; we judged it, and did not measure).
    sustained: float = 1.0


# The expression must match the whole name, because a Laptop GPU, a Ti or a SUPER is another chip. A chip without a row
# is unknown.
_NVIDIA = (
    Device(r"T4", 65, 8.1, 320, 0.7),
    Device(r"V100-.+", 112, 14, 900, 0.7),
    Device(r"RTX 2080 Ti", 53.8, 13.4, 616, 0.7),
    Device(r"RTX 3060", 25.5, 12.7, 360),
    Device(r"RTX 3070", 40.6, 20.3, 448),
    Device(r"RTX 3080", 59.5, 29.8, 760),
    Device(r"RTX 3090", 71, 35.6, 936),
    Device(r"RTX 4060", 30, 15.1, 272),
    Device(r"RTX 4060 Ti", 44.1, 22.1, 288),
    Device(r"RTX 4070", 58.3, 29.1, 504),
    Device(r"RTX 4070 Ti SUPER", 88.2, 44.1, 672),
    Device(r"RTX 4080( SUPER)?", 97.5, 48.7, 717),
    Device(r"RTX 4090", 165.2, 82.6, 1008),
    Device(r"RTX 5070", 61.7, 30.9, 672),
    Device(r"RTX 5080", 112.6, 56.3, 960),
    Device(r"RTX 5090", 209.5, 104.8, 1792),
    Device(r"A10", 125, 31.2, 600, 0.7),
    Device(r"A10G", 70, 31.5, 600, 0.7),
    Device(r"RTX A5000", 111, 27.8, 768, 0.8),
    Device(r"RTX A6000", 154.8, 38.7, 768, 0.8),
    Device(r"RTX 6000 Ada Generation", 364, 91.1, 960, 0.8),
    Device(r"RTX PRO 6000( Blackwell (Workstation|Server) Edition)?", 500, 125, 1597, 0.6),
    Device(r"L4", 121, 30.3, 300, 0.5),
    Device(r"L40S", 362, 91.6, 864, 0.6),
    Device(r"A100-.+-40GB", 312, 19.5, 1555),
    Device(r"A100(-.+-80GB| 80GB PCIe)?", 312, 19.5, 2000),  # the flavors of the Jobs API have the 80 GB version
    Device(r"H100 PCIe", 756, 51, 2000, 0.75),
    Device(r"H100( 80GB HBM3)?", 989, 67, 3350, 0.75),
    Device(r"H200", 989, 67, 4800, 0.75),
    Device(r"B200", 2250, 80, 8000, 0.6),
    Device(r"GB10", 125, 31, 273, 0.7),
)
# A chip is sold with several numbers of GPU cores. These rates are for the most; `sustained` allows for fewer.
_APPLE = (
    Device(r"M1", 2.6, 2.6, 68),
    Device(r"M1 Pro", 5.2, 5.2, 200),
    Device(r"M1 Max", 10.4, 10.4, 400),
    Device(r"M1 Ultra", 21, 21, 800),
    Device(r"M2", 3.6, 3.6, 100),
    Device(r"M2 Pro", 6.8, 6.8, 200),
    Device(r"M2 Max", 13.5, 13.5, 400),
    Device(r"M2 Ultra", 27, 27, 800),
    Device(r"M3", 3.6, 3.6, 100),
    Device(r"M3 Pro", 6.4, 6.4, 150),
    Device(r"M3 Max", 14.2, 14.2, 400),
    Device(r"M3 Ultra", 28, 28, 819),
    Device(r"M4", 4.3, 4.3, 120),
    Device(r"M4 Pro", 9.2, 9.2, 273),
    Device(r"M4 Max", 18, 18, 546),
)


def device_speed(machine: MachineFacts) -> Device | None:
    """The row of this machine's GPU or Apple chip; None if the table lacks it, and for a CPU."""
    return _row_of(machine.device, machine.chip)


@cache  # a plan asks a hundred times
def _row_of(device: str, chip: str) -> Device | None:
    rows = {"cuda": _NVIDIA, "mps": _APPLE}.get(device, ())
    return next((row for row in rows if _matches(row, chip)), None)


def _matches(row: Device, name: str) -> bool:
    """Whether a row of the table describes this device. Drivers before 2021 print no `NVIDIA`; `Tesla` and `GeForce`
    are families."""
    for start in ("NVIDIA ", "Apple ", "GeForce ", "Tesla "):
        name = name.removeprefix(start)
    if not set("(+") & set(row.name):  # a plain name; an expression takes longer to compile than all names to compare
        return name == row.name
    return re.fullmatch(row.name, name) is not None


# Floating point operations in float32 that a core can start in one clock; a multiply-add counts twice. A core has two
# units of the vector width. Sources: Intel's and AMD's optimization manuals, Arm's Neoverse and Apple's documents.
_PER_CLOCK = (("avx512f", 64), ("avx2", 32), ("neon", 16), ("asimd", 16))


def cpu_flops(machine: MachineFacts) -> float | None:
    """Peak float32 operations a second of the processor; None when its clock or its vector unit is unknown.

    A cloud's "core" may be half a core, and AMD's Zen 4 splits each 512-bit operation. The utilisation includes both.
    """
    width = next((flops for feature, flops in _PER_CLOCK if feature in machine.cpu_features), None)
    if width is None or machine.cpu_mhz is None:
        return None
    return machine.cores * machine.cpu_mhz * 1e6 * width
