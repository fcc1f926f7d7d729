"""NVIDIA GPUs, read from nvidia-smi."""

import re
from dataclasses import dataclass

import msgspec

from skill_train.facts import TORCH_NEEDS, Gpu
from skill_train.machine.probe import Probe, ProgramOutput

_OLD = "index,uuid,name,memory.total,memory.free"
_FIELDS = f"{_OLD},compute_cap,mig.mode.current"
_FORMAT = "--format=csv,noheader,nounits"
_NO_VALUE = ("[N/A]", "[Not Supported]", "N/A", "Not Supported")


@dataclass(frozen=True)
class Gpus:
    """The equal GPUs that a run would use. `unknown` says why there are none, or why some are not used."""

    usable: tuple[Gpu, ...]
    unified: bool
    unknown: dict[str, str]


@dataclass(frozen=True)
class _GpuRow:
    index: int
    uuid: str
    gpu: Gpu
    mig: bool
    unified: bool = False


def read_gpus(probe: Probe, ram_bytes: int | None, ram_available_bytes: int | None) -> Gpus:
    """The GPUs that this process can see. On a machine with unified memory they share its RAM."""
    answer = _query(probe)
    if answer is None:
        return _without_nvidia(probe)
    if answer.code != 0:
        first = next((line for line in answer.text.splitlines() if line.strip()), f"exit code {answer.code}")
        return _none(f"nvidia-smi: {first.strip()}")
    rows = [row for line in answer.text.splitlines() if (row := _row(line, ram_bytes, ram_available_bytes))]
    if not rows:
        return _none(f"nvidia-smi lists no GPU with its memory: {answer.text.strip()[:200] or 'nothing'}")
    visible = _visible(rows, probe.environment.get("CUDA_VISIBLE_DEVICES"))
    if not visible:
        return _none(f"CUDA_VISIBLE_DEVICES={probe.environment['CUDA_VISIBLE_DEVICES']} hides the GPUs")
    best, unknown = _equal_best(visible)
    return _gpus_of(probe, best, unknown)


def _query(probe: Probe) -> ProgramOutput | None:
    answer = probe.ask("nvidia-smi", f"--query-gpu={_FIELDS}", _FORMAT)
    if answer is not None and "not a valid field" in answer.text:  # a driver older than compute_cap
        answer = probe.ask("nvidia-smi", f"--query-gpu={_OLD}", _FORMAT)
    return answer


def _row(line: str, ram: int | None, ram_available: int | None) -> _GpuRow | None:
    """One GPU; None if its memory is unknown and is not the computer's memory."""
    values = [value.strip() for value in line.split(",")]
    if len(values) not in (5, 7) or not values[0].isdigit():
        return None
    index, uuid, name, total, free, capability, mig = (*values, "", "")[:7]
    compute = float(capability) if re.fullmatch(r"\d+\.\d+", capability) else None
    if total.isdigit():
        size, free_bytes = int(total) << 20, int(free) << 20 if free.isdigit() else None
        return _GpuRow(int(index), uuid, Gpu(name, size, free_bytes, compute), mig == "Enabled")
    # GB10 and Thor have no memory of their own (docs.nvidia.com/dgx/dgx-spark/known-issues.html, 2025-12).
    if total in _NO_VALUE and compute is not None and ram is not None:
        return _GpuRow(int(index), uuid, Gpu(name, ram, ram_available, compute), False, unified=True)
    return None


def _visible(rows: list[_GpuRow], visible: str | None) -> list[_GpuRow]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects. CUDA reads numbers or prefixes of UUIDs, up to the first one without
    a GPU."""
    if visible is None:
        return rows
    if visible.strip().startswith("MIG-"):
        return [row for row in rows if row.mig]
    seen: list[_GpuRow] = []
    for name in map(str.strip, visible.split(",")):
        matching = [
            row for row in rows if str(row.index) == name or (name.startswith("GPU-") and row.uuid.startswith(name))
        ]
        if not matching:
            break
        seen += matching
    return seen


def _equal_best(rows: list[_GpuRow]) -> tuple[list[_GpuRow], dict[str, str]]:
    """The best group of equal GPUs, by support in torch, then by memory, then by compute capability."""

    def kind(row: _GpuRow) -> tuple[bool, int, float, str]:
        capability = row.gpu.compute_capability or 0.0
        return capability >= TORCH_NEEDS, row.gpu.memory_bytes, capability, row.gpu.name

    best = [row for row in rows if kind(row) == max(map(kind, rows))]
    others = sorted({row.gpu.name for row in rows if row not in best})
    if not others:
        return best, {}
    numbers = ",".join(str(row.index) for row in best)
    why = f"GPUs of different kinds: {len(best)} × {best[0].gpu.name} counted, {', '.join(others)} left out; set "
    return best, {"gpus": f"{why}CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}"}


def _gpus_of(probe: Probe, rows: list[_GpuRow], unknown: dict[str, str]) -> Gpus:
    if rows[0].mig:
        return _slice(probe, rows[0], unknown)
    gpus = [row.gpu for row in rows]
    if len(rows) > 1:
        link = _nvlink(probe, [row.index for row in rows])
        gpus = [msgspec.structs.replace(gpu, nvlink=link) for gpu in gpus]
        if link is None:
            unknown |= {"nvlink": "nvidia-smi topo -m does not answer"}
    if gpus[0].compute_capability is None:
        unknown |= {"compute_capability": "nvidia-smi does not tell it"}
    return Gpus(tuple(gpus), rows[0].unified, unknown)


def _slice(probe: Probe, row: _GpuRow, unknown: dict[str, str]) -> Gpus:
    """The first visible MIG slice, because one process can use only one. Its profile states the size (`3g.40gb`). With
    10^9 bytes for each GB it is a lower bound: 40 are 39.25 GiB (NVIDIA MIG user guide, profiles of the A100)."""
    listed = probe.ask("nvidia-smi", "-L")
    visible = probe.environment.get("CUDA_VISIBLE_DEVICES", "").strip()
    shares = re.findall(r"^\s+MIG (\S*?(\d+)gb\S*).*UUID: (\S+?)\)", listed.text if listed else "", re.MULTILINE)
    share = next((s for s in shares if not visible.startswith("MIG-") or s[2] == visible.split(",")[0]), None)
    if share is None:
        return _none(f"MIG is on for {row.gpu.name}, and nvidia-smi -L lists no share of it")
    gpu = Gpu(f"{row.gpu.name} MIG {share[0]}", int(share[1]) * 10**9, None, row.gpu.compute_capability)
    return Gpus((gpu,), False, unknown | {"available_bytes": "a MIG share does not tell what is free"})


def _nvlink(probe: Probe, indices: list[int]) -> bool | None:
    """Whether each of these GPUs reaches every other one over NVLink (`NV#` in the matrix); None if unknown."""
    answer = probe.ask("nvidia-smi", "topo", "-m")
    lines = re.findall(
        r"^GPU(\d+)\s+(.+)$", answer.text if answer is not None and answer.code == 0 else "", re.MULTILINE
    )
    rows = {int(number): words.split() for number, words in lines if not words.startswith("GPU")}  # without the header
    pairs = [(a, b) for a in indices for b in indices if a != b]
    if any(a not in rows or b >= len(rows[a]) for a, b in pairs):
        return None
    return all(re.fullmatch(r"NV\d+", rows[a][b]) for a, b in pairs)


def _without_nvidia(probe: Probe) -> Gpus:
    """No GPUs, with the reason if nvidia-smi should have answered or an unsupported GPU was found."""
    if "NVIDIA Jetson" in (probe.read("/proc/device-tree/model") or "") or probe.read("/etc/nv_tegra_release"):
        return _none("a Jetson without nvidia-smi: its GPU is not recognised, so the processor is counted")
    if probe.has("nvidia-smi"):
        return _none("nvidia-smi does not answer")
    if probe.read("/proc/driver/nvidia/version"):
        return _none("the NVIDIA driver is loaded, but nvidia-smi is missing")
    if probe.has("rocm-smi") or "kfd" in probe.names("/dev"):
        return _none("an AMD GPU (ROCm) is not supported: CUDA, Apple silicon and processors are")
    if probe.has("xpu-smi"):
        return _none("an Intel GPU (XPU) is not supported: CUDA, Apple silicon and processors are")
    return Gpus((), False, {})


def _none(why: str) -> Gpus:
    return Gpus((), False, {"device": why})
