"""Processor, memory, control groups and battery of a Linux machine or container, read from /proc and /sys."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skill_train.machine.probe import Probe

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "neon")
_CPU = "/sys/devices/system/cpu"
_GROUPS = "/sys/fs/cgroup"
_STAT = Path("/proc/stat")
_IDLE, _LAST = (3, 4), 8  # idle and iowait; guest times (8, 9) are in user and nice already (man 5 proc)


@dataclass(frozen=True)
class Cpu:
    """A processor. `name` is empty and `mhz` None if the system does not report them."""

    name: str
    features: tuple[str, ...]
    mhz: float | None


def read_cpu(probe: Probe) -> Cpu:
    text = probe.read("/proc/cpuinfo") or ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    words = set(flags[1].split() if flags else ())
    if "asimd" in words:  # 64-bit Arm's name for NEON
        words.add("neon")
    called = name[1].strip() if name else ""
    return Cpu(called, tuple(f for f in FEATURES if f in words), _mhz(probe, called, text))


def stated_mhz(name: str) -> float | None:
    """The clock in a processor's own name, such as `@ 2.60GHz`."""
    stated = re.search(r"@ ([\d.]+)\s?GHz", name)
    return float(stated[1]) * 1000 if stated else None


def _mhz(probe: Probe, name: str, cpuinfo: str) -> float | None:
    """The highest clock from cpufreq, else from the name, else the current clock (all that a virtual machine
    reports)."""
    files = (f"{_CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq" for cpu in probe.cpus)
    highest = [int(khz) / 1000 for khz in map(probe.read, files) if khz and khz.strip().isdigit()]
    now = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*: ([\d.]+)$", cpuinfo, re.MULTILINE)]
    return max(highest, default=None) or stated_mhz(name) or max(now, default=None)


def physical_cores(probe: Probe) -> int:
    """The cores that this process may use. Two hardware threads of one core count once. A quota of processor time
    (`docker --cpus=1.5`) is rounded down, because threads above it are paused in the middle of a step."""
    siblings = set()
    for cpu in probe.cpus:
        text = probe.read(f"{_CPU}/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(text.strip() if text else str(cpu))
    quota = min(_quotas(probe), default=None)
    return max(1, len(siblings) if quota is None else min(len(siblings), int(quota)))


def read_memory(probe: Probe) -> tuple[int | None, int | None]:
    """Total and available bytes; None if unknown. In a container its limit counts instead of the machine's memory. The
    memory that the container uses is not available, except for file pages that the kernel can reclaim (`inactive_file`,
    which `docker stats` leaves out too)."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", probe.read("/proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" not in kib:
        return None, None
    total = int(kib["MemTotal"]) * 1024
    available = int(kib.get("MemAvailable") or kib.get("MemFree") or 0) * 1024
    for limit, used in _limits(probe):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _limits(probe: Probe) -> Iterator[tuple[int, int]]:
    """The limit and the usage in bytes of each control group that this process is in."""
    for folder in _folders(probe, "", _GROUPS):
        limit, used = probe.read(f"{folder}/memory.max"), probe.read(f"{folder}/memory.current")
        yield from _limit(limit, used, _stat(probe, folder, "inactive_file"))
    for folder in _folders(probe, "memory", f"{_GROUPS}/memory"):
        limit, used = probe.read(f"{folder}/memory.limit_in_bytes"), probe.read(f"{folder}/memory.usage_in_bytes")
        yield from _limit(limit, used, _stat(probe, folder, "total_inactive_file"))


def _limit(limit: str | None, used: str | None, reclaimable: int) -> Iterator[tuple[int, int]]:
    if limit is not None and limit.strip().isdigit():  # `max` means no limit
        used_bytes = int(used) if used is not None and used.strip().isdigit() else 0
        yield int(limit), max(0, used_bytes - reclaimable)


def _stat(probe: Probe, folder: str, key: str) -> int:
    match = re.search(rf"^{key} (\d+)$", probe.read(f"{folder}/memory.stat") or "", re.MULTILINE)
    return int(match[1]) if match else 0


def _quotas(probe: Probe) -> Iterator[float]:
    """The processor time that each control group grants, in processors."""
    for folder in _folders(probe, "", _GROUPS):
        words = (probe.read(f"{folder}/cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            yield int(words[0]) / int(words[1])
    for folder in _folders(probe, "cpu", f"{_GROUPS}/cpu"):
        quota, period = probe.read(f"{folder}/cpu.cfs_quota_us"), probe.read(f"{folder}/cpu.cfs_period_us")
        if quota and period and int(quota) > 0:  # -1 means no limit
            yield int(quota) / int(period)


def _folders(probe: Probe, controller: str, root: str) -> list[str]:
    """This process's control group and those above it, for one controller of version 1, or `""` for version 2.

    Inside a container /proc/self/cgroup may name a path outside of it. Then only the root exists: this process's group.
    """
    paths = [line.split(":", 2) for line in (probe.read("/proc/self/cgroup") or "").splitlines()]
    own = next((line[2] for line in paths if len(line) == 3 and controller in line[1].split(",")), "/")
    parts = [part for part in own.split("/") if part and part != ".."]
    return [root + "".join(f"/{part}" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]


def read_battery(probe: Probe) -> tuple[bool | None, bool | None]:
    """`(laptop, on_battery)`; None if the system does not report it."""
    root = "/sys/class/power_supply"
    supplies = probe.names(root)
    own = [name for name in supplies if _file_text(probe, f"{root}/{name}/type") == "Battery"]
    own = [name for name in own if _file_text(probe, f"{root}/{name}/scope") != "Device"]  # a mouse has one too
    if not own:
        return (False if supplies else None), None
    return True, any(_file_text(probe, f"{root}/{name}/status") == "Discharging" for name in own)


def _file_text(probe: Probe, path: str) -> str:
    return (probe.read(path) or "").strip()


def busy_seconds() -> float | None:
    """Processor seconds that all programs of this machine used since its start, with the seconds that the host took
    from a virtual machine (steal). None if /proc/stat does not report them."""
    try:
        words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1 : 1 + _LAST]]
    except (OSError, ValueError):
        return None
    if not words or words[0] != "cpu" or len(ticks) < _LAST:
        return None
    return sum(count for place, count in enumerate(ticks) if place not in _IDLE) / os.sysconf("SC_CLK_TCK")
