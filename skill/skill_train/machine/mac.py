"""Reads the facts of a Mac from one `sysctl`, one `vm_stat` and one `pmset`."""

import re

from skill_train.facts import MachineFacts
from skill_train.machine.linux import FEATURES, stated_mhz
from skill_train.machine.probe import Probe

_KEYS = (
    "hw.memsize",
    "hw.physicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.optional.arm64",
    "hw.optional.neon",
    "hw.optional.arm.FEAT_BF16",
    "hw.cpufrequency_max",
    "machdep.cpu.brand_string",
    "machdep.cpu.leaf7_features",
    "iogpu.wired_limit_mb",
)
# PyTorch's last release with macOS x86_64 wheels is 2.2 (pytorch.org, release notes of 2.3, 2024-04).
_ROSETTA = "this Python is built for Intel and runs under Rosetta, where torch has no MPS: install an arm64 Python"
_INTEL = "a Mac with an Intel processor: torch 2.2 was the last one for it, and it has no MPS"


def read_mac(probe: Probe) -> MachineFacts:
    sysctl = _sysctl(probe)
    chip = sysctl.get("machdep.cpu.brand_string") or probe.processor
    # A translated process sees an Intel processor, but this key still reveals the real one.
    apple = probe.processor == "arm64" or sysctl.get("hw.optional.arm64") == "1"
    rosetta = apple and probe.processor != "arm64"
    mps = apple and not rosetta
    total = int(sysctl.get("hw.memsize") or 0) or None
    free = ram_available_bytes(probe)
    laptop, on_battery = _battery(probe)
    features = _features(sysctl, native=mps)
    return MachineFacts(
        system="Darwin",
        chip=chip,
        device="mps" if mps else "cpu",
        memory_bytes=total,
        available_bytes=_available(total, free, sysctl) if mps else free,
        compute_capability=None,
        cores=int(sysctl.get("hw.perflevel0.physicalcpu") or sysctl.get("hw.physicalcpu") or len(probe.cpus)),
        bf16_matrix="bf16" in features,
        unknown=_unknown(total, free, apple, rosetta),
        unified=mps,
        ram_bytes=total,
        ram_available_bytes=free,
        disk_free_bytes=probe.disk_free_bytes,
        on_battery=on_battery,
        laptop=laptop,
        intel_mac=not apple,
        rosetta=rosetta,
        cpu=chip,
        cpu_features=features,
        cpu_mhz=None if apple else _mhz(sysctl, chip),
    )


def ram_available_bytes(probe: Probe) -> int | None:
    """The bytes that a new process can use without displacing others: free, speculative and inactive pages, as psutil
    counts them (psutil 7, `virtual_memory().available` on macOS). None if vm_stat does not answer."""
    answer = probe.ask("vm_stat")
    text = answer.text if answer is not None and answer.code == 0 else ""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)\.", text, re.MULTILINE)
    return sum(map(int, pages)) * int(size[1]) if size and pages else None


def gpu_share_bytes(ram_bytes: int) -> int:
    """Bytes of a Mac's memory that its GPU may use: two thirds below 36 GiB, three quarters from there on.

    Metal's `recommendedMaxWorkingSetSize`, as llama.cpp prints it: 10922.67 MiB of 16 GiB (llama-cpp-python#687,
    2023-09), 21845.34 of 32 (ollama#434, 2023-08), 73728 of 96 (llama.cpp#3213, 2023-09). Newer systems give large
    machines more (107.52 of 128 GiB on macOS 26, antirez/ds4#893, 2026-08), so this is the smaller of the two.
    """
    return ram_bytes * 2 // 3 if ram_bytes < 36 << 30 else ram_bytes * 3 // 4


def _available(total: int | None, free: int | None, sysctl: dict[str, str]) -> int | None:
    if total is None or free is None:
        return None
    set_by_hand = int(sysctl.get("iogpu.wired_limit_mb") or 0) << 20  # 0: the system decides
    return min(free, set_by_hand or gpu_share_bytes(total))


def _sysctl(probe: Probe) -> dict[str, str]:
    answer = probe.ask("sysctl", "-i", *_KEYS)  # -i: continues if a key is missing
    lines = answer.text.splitlines() if answer is not None else []
    pairs = (line.partition(": ") for line in lines)
    return {key: value.strip() for key, _, value in pairs}


def _features(sysctl: dict[str, str], native: bool) -> tuple[str, ...]:
    """The features that this process can use. A translated process has the features of an Intel processor."""
    if native:
        keys = {"bf16": "hw.optional.arm.FEAT_BF16", "neon": "hw.optional.neon"}
        return tuple(name for name, key in keys.items() if sysctl.get(key) == "1")
    words = sysctl.get("machdep.cpu.leaf7_features", "").lower().split()
    return tuple(name for name in FEATURES if name in words)


def _mhz(sysctl: dict[str, str], chip: str) -> float | None:
    hertz = sysctl.get("hw.cpufrequency_max", "")
    return int(hertz) / 1e6 if hertz.isdigit() else stated_mhz(chip)


def _battery(probe: Probe) -> tuple[bool | None, bool | None]:
    """`(laptop, on_battery)`; None if unknown. A Mac without a battery has no `InternalBattery` line."""
    answer = probe.ask("pmset", "-g", "batt")
    if answer is None or "drawing from" not in answer.text:
        return None, None
    laptop = "InternalBattery" in answer.text
    return laptop, "'Battery Power'" in answer.text if laptop else None


def _unknown(total: int | None, free: int | None, apple: bool, rosetta: bool) -> dict[str, str]:
    unknown = {"cpu_mhz": "Apple does not state the clock of its chips"} if apple else {}
    if rosetta or not apple:
        unknown["device"] = _ROSETTA if rosetta else _INTEL
    if total is None:
        unknown["memory_bytes"] = "sysctl does not tell hw.memsize"
    if free is None:
        unknown["available_bytes"] = "vm_stat does not answer"
    return unknown
