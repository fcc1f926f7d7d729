"""Reads this machine, without torch. The only module that asks the operating system."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from skill_train.facts import MachineFacts


def read_machine() -> MachineFacts:
    """What this machine offers for training."""
    system = platform.system()
    if system == "Darwin":
        return _mac()
    total, available = _linux_memory()
    gpu = _nvidia()
    chip, flags = _linux_cpu()
    unknown = {} if total else {"memory_bytes": f"no /proc/meminfo on {system}"}
    return MachineFacts(
        system=system,
        chip=gpu[0] if gpu else chip,
        device="cuda" if gpu else "cpu",
        memory_bytes=gpu[1] if gpu else total,
        available_bytes=gpu[2] if gpu else available,
        compute_capability=gpu[3] if gpu else None,
        cores=physical_cores(),
        bf16_matrix=bool(flags & {"amx_bf16", "bf16"}),
        unknown=unknown,
    )


def available_memory_bytes() -> int | None:
    """The computer's own memory that a new process can have, also where a GPU has its own; None where nothing tells."""
    return _mac().available_bytes if platform.system() == "Darwin" else _linux_memory()[1]


def physical_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text(encoding="utf-8").strip() if path.is_file() else str(cpu))
    return max(1, len(siblings))


def cache_dir() -> Path:
    """Where skill-train keeps what it may lose: the fetched converter, probes. `SKILL_TRAIN_CACHE` moves it."""
    if "SKILL_TRAIN_CACHE" in os.environ:
        return Path(os.environ["SKILL_TRAIN_CACHE"])
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "skill-train"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skill-train"


def _mac() -> MachineFacts:
    total = int(_ask("sysctl", "-n", "hw.memsize") or 0) or None
    # Under Rosetta the machine says x86_64; the chip is still Apple's.
    apple = platform.machine() == "arm64" or _ask("sysctl", "-n", "sysctl.proc_translated") == "1"
    free = _ask("memory_pressure", "-Q")
    share = re.search(r"free percentage: (\d+)%", free)
    return MachineFacts(
        system="Darwin",
        chip=_ask("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine(),
        device="mps" if apple else "cpu",
        memory_bytes=total,
        available_bytes=total * int(share.group(1)) // 100 if total and share else None,
        compute_capability=None,
        cores=int(_ask("sysctl", "-n", "hw.perflevel0.physicalcpu") or os.cpu_count() or 1),
        bf16_matrix=False,  # a CPU path that nobody takes on a Mac: MPS trains there
    )


def _nvidia() -> tuple[str, int, int, float | None] | None:
    """Name, total and free bytes, compute capability of the first GPU that nvidia-smi lists."""
    fields = "name,memory.total,memory.free,compute_cap"
    lines = _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if len(values) != 4 or not values[1].isdigit() or not values[2].isdigit():
        return None
    capability = float(values[3]) if re.fullmatch(r"\d+\.\d+", values[3]) else None
    return values[0], int(values[1]) << 20, int(values[2]) << 20, capability


def _linux_memory() -> tuple[int | None, int | None]:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None, None
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", path.read_text(encoding="utf-8"), re.MULTILINE))
    total, available = int(kib["MemTotal"]) * 1024, int(kib.get("MemAvailable") or kib["MemFree"]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")  # a container may own less than the machine has
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return (min(total, int(text)), min(available, int(text))) if text.isdigit() else (total, available)


def _linux_cpu() -> tuple[str, set[str]]:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return (name[1] if name else platform.machine()), set(flags[1].split() if flags else ())


def _ask(program: str, *arguments: str) -> str:
    """What a system tool prints; empty when it is missing or fails."""
    found = shutil.which(program)
    if found is None:
        return ""
    try:
        done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
