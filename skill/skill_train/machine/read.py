"""Reads the facts of this machine without torch. Only the modules of `machine` query the operating system."""

import hashlib
import json
import os
import sys
from pathlib import Path

from skill_train.facts import MachineFacts
from skill_train.machine import linux
from skill_train.machine.mac import ram_available_bytes, read_mac
from skill_train.machine.nvidia import read_gpus
from skill_train.machine.probe import Probe, this_machine


def read_machine(probe: Probe | None = None) -> MachineFacts:
    """The facts of a machine for training: this one, or a recorded one."""
    probe = probe or this_machine()
    return read_mac(probe) if probe.system == "Darwin" else _linux(probe)


def available_memory_bytes() -> int | None:
    """The bytes of main memory that a new process can use, also on a machine with a GPU; None if unknown."""
    probe = this_machine()
    return ram_available_bytes(probe) if probe.system == "Darwin" else linux.read_memory(probe)[1]


def physical_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    return linux.physical_cores(this_machine())


def cache_dir() -> Path:
    """The folder for files that can be recreated: the downloaded converter, probes. `SKILL_TRAIN_CACHE` sets it."""
    if stated := os.environ.get("SKILL_TRAIN_CACHE"):
        return Path(stated)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "skill-train"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skill-train"


def cache_file(folder: str, *values: object) -> Path:
    """The JSON file for these values in a folder of the cache."""
    return cache_dir() / folder / f"{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]}.json"


def _linux(probe: Probe) -> MachineFacts:
    ram, ram_available = linux.read_memory(probe)
    cpu = linux.read_cpu(probe)
    laptop, on_battery = linux.read_battery(probe)
    detected = read_gpus(probe, ram, ram_available)
    gpu = detected.usable[0] if detected.usable else None
    free = [card.free_bytes for card in detected.usable if card.free_bytes is not None]  # a run uses each GPU alike
    return MachineFacts(
        system=probe.system,
        chip=gpu.name if gpu else cpu.name or probe.processor,
        device="cuda" if gpu else "cpu",
        memory_bytes=gpu.memory_bytes if gpu else ram,
        available_bytes=min(free, default=None) if gpu else ram_available,
        compute_capability=gpu.compute_capability if gpu else None,
        cores=linux.physical_cores(probe),
        bf16_matrix=bool({"amx_bf16", "avx512_bf16", "bf16"} & set(cpu.features)),
        unknown=_unknown(probe, ram, cpu) | detected.unknown,
        gpus=detected.usable,
        unified=detected.unified,
        ram_bytes=ram,
        ram_available_bytes=ram_available,
        disk_free_bytes=probe.disk_free_bytes,
        on_battery=on_battery,
        laptop=laptop,
        cpu=cpu.name or probe.processor,
        cpu_features=cpu.features,
        cpu_mhz=cpu.mhz,
    )


def _unknown(probe: Probe, ram: int | None, cpu: linux.Cpu) -> dict[str, str]:
    unknown = {} if ram else {"memory_bytes": f"no /proc/meminfo on {probe.system}"}
    if not cpu.name:
        unknown["cpu"] = "/proc/cpuinfo has no model name"
    if cpu.mhz is None:
        unknown["cpu_mhz"] = "neither cpufreq nor /proc/cpuinfo tells it"
    if probe.disk_free_bytes is None:
        unknown["disk_free_bytes"] = "the current folder does not tell"
    return unknown
