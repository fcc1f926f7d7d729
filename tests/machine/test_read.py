"""Machine facts, from the recorded answers of machines. Expected figures are the machines' published ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from machines import NAMES, probe_of, record_of, recorded_machine
from skill_train.facts import MachineFacts
from skill_train.machine.linux import read_cpu
from skill_train.machine.mac import gpu_share_bytes
from skill_train.machine.probe import this_machine
from skill_train.machine.read import available_memory_bytes, cache_dir, physical_cores, read_machine

GIB, MIB = 1 << 30, 1 << 20
QUERY = (
    "--query-gpu=index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current --format=csv,noheader,nounits"
)
OLD_QUERY = "--query-gpu=index,uuid,name,memory.total,memory.free --format=csv,noheader,nounits"
NOT_A_FIELD = 'Field "compute_cap" is not a valid field to query.'


@pytest.mark.parametrize(
    ("name", "device", "chip", "memory", "cores"),
    [
        ("m1_8gb", "mps", "Apple M1", 8 * GIB, 4),
        ("m2_pro_16gb", "mps", "Apple M2 Pro", 16 * GIB, 8),
        ("m2_pro_32gb", "mps", "Apple M2 Pro", 32 * GIB, 8),
        ("m4_max_128gb", "mps", "Apple M4 Max", 128 * GIB, 12),
        ("intel_mac", "cpu", "Intel(R) Core(TM) i7-6700K CPU @ 4.00GHz", 16 * GIB, 4),
        ("rosetta_m2", "cpu", "Apple M2", 16 * GIB, 4),
        ("rtx_4090", "cuda", "NVIDIA GeForce RTX 4090", 24564 * MIB, 16),
        ("rtx_3080", "cuda", "NVIDIA GeForce RTX 3080", 10240 * MIB, 8),
        ("dgx_spark", "cuda", "NVIDIA GB10", 128501256192, 20),
        ("a100_80gb", "cuda", "NVIDIA A100-SXM4-80GB", 81920 * MIB, 6),
        ("8x_l40s", "cuda", "NVIDIA L40S", 46068 * MIB, 96),
        ("8x_a100_nvlink", "cuda", "NVIDIA A100-SXM4-80GB", 81920 * MIB, 48),
        ("t4", "cuda", "Tesla T4", 15360 * MIB, 4),
        ("bare_cpu", "cpu", "AMD EPYC", 24684092 * 1024, 2),
        ("amx_server", "cpu", "Intel(R) Xeon(R) 6972P", 790000000 * 1024, 96),
        ("container_4gb", "cpu", "AMD Ryzen 9 5950X 16-Core Processor", 4 * GIB, 1),
        ("broken_nvidia_smi", "cpu", "AMD Ryzen 9 5950X 16-Core Processor", 65773568 * 1024, 16),
    ],
)
def test_a_recorded_machine(name: str, device: str, chip: str, memory: int, cores: int) -> None:
    facts = recorded_machine(name)
    assert (facts.device, facts.chip, facts.memory_bytes, facts.cores) == (device, chip, memory, cores)
    assert facts.ram_bytes is not None and facts.ram_available_bytes is not None
    assert facts.available_bytes is not None and facts.available_bytes <= memory
    assert facts.disk_free_bytes and facts.cpu


def test_every_recorded_machine_is_in_the_table() -> None:
    assert len(NAMES) == 17


# Metal's limits in MiB as llama.cpp printed them: llama-cpp-python#687, ollama#434, llama.cpp#3213.
@pytest.mark.parametrize(("gib", "mib"), [(16, 10922.67), (32, 21845.34), (96, 73728.0)])
def test_what_metal_gives_of_a_macs_memory(gib: int, mib: float) -> None:
    assert gpu_share_bytes(gib * GIB) / MIB == pytest.approx(mib, abs=0.01)


def test_what_is_free_on_a_mac_is_the_smaller_of_the_pages_and_metals_limit() -> None:
    # vm_stat of the record: free 20000 + speculative 8000 + inactive 128000 pages of 16384 bytes.
    assert recorded_machine("m1_8gb").available_bytes == (20000 + 8000 + 128000) * 16384
    assert recorded_machine("m4_max_128gb").available_bytes == 96 * GIB
    assert recorded_machine("m4_max_128gb").ram_available_bytes == 6_400_000 * 16384


def test_a_limit_set_by_hand_replaces_metals() -> None:
    record = record_of("m4_max_128gb")
    record["programs"]["sysctl"] = record["programs"]["sysctl"].replace("wired_limit_mb: 0", "wired_limit_mb: 65536")
    assert read_machine(probe_of(record)).available_bytes == 64 * GIB


def test_a_mac_whose_vm_stat_is_missing_does_not_guess() -> None:
    record = record_of("m1_8gb")
    del record["programs"]["vm_stat"]
    facts = read_machine(probe_of(record))
    assert facts.available_bytes is None and "available_bytes" in facts.unknown


@pytest.mark.parametrize(
    ("name", "laptop", "on_battery"),
    [("m1_8gb", True, True), ("m2_pro_16gb", True, False), ("intel_mac", False, None), ("rtx_4090", None, None)],
)
def test_battery(name: str, laptop: bool | None, on_battery: bool | None) -> None:
    facts = recorded_machine(name)
    assert (facts.laptop, facts.on_battery) == (laptop, on_battery)


@pytest.mark.parametrize(
    ("supplies", "laptop", "on_battery"),
    [
        ({"BAT0/type": "Battery", "BAT0/status": "Discharging", "AC/type": "Mains"}, True, True),
        ({"BAT0/type": "Battery", "BAT0/status": "Charging", "AC/type": "Mains"}, True, False),
        ({"hid-mouse/type": "Battery", "hid-mouse/scope": "Device", "hid-mouse/status": "Discharging"}, False, None),
    ],
)
def test_battery_on_linux(supplies: dict[str, str], laptop: bool, on_battery: bool | None) -> None:
    facts = _changed("rtx_4090", files={f"/sys/class/power_supply/{k}": f"{v}\n" for k, v in supplies.items()})
    assert (facts.laptop, facts.on_battery) == (laptop, on_battery)


def test_a_mac_that_cannot_use_its_gpu_says_why() -> None:
    rosetta, intel = recorded_machine("rosetta_m2"), recorded_machine("intel_mac")
    assert (rosetta.rosetta, rosetta.intel_mac) == (True, False) and "Rosetta" in rosetta.unknown["device"]
    assert (intel.rosetta, intel.intel_mac) == (False, True) and "Intel" in intel.unknown["device"]
    assert not (recorded_machine("m2_pro_16gb").rosetta or recorded_machine("m2_pro_16gb").intel_mac)


@pytest.mark.parametrize(
    ("name", "features", "bf16"),
    [
        ("m1_8gb", {"neon"}, False),
        ("m2_pro_16gb", {"neon", "bf16"}, True),
        ("dgx_spark", {"neon", "bf16"}, True),
        ("amx_server", {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}, True),
        ("bare_cpu", {"avx2", "avx512f", "avx512_bf16"}, True),
        ("rtx_4090", {"avx2"}, False),
        ("intel_mac", {"avx2"}, False),
        ("rosetta_m2", set(), False),
    ],
)
def test_processor_features(name: str, features: set[str], bf16: bool) -> None:
    facts = recorded_machine(name)
    assert (set(facts.cpu_features), facts.bf16_matrix) == (features, bf16)


@pytest.mark.parametrize(
    ("name", "mhz"),
    [("rtx_4090", 5083.398), ("a100_80gb", 2200.0), ("bare_cpu", 2596.12), ("intel_mac", 4000.0), ("m1_8gb", None)],
)
def test_the_highest_stated_clock(name: str, mhz: float | None) -> None:
    facts = recorded_machine(name)
    assert facts.cpu_mhz == mhz
    assert (mhz is None) == ("cpu_mhz" in facts.unknown)


@pytest.mark.parametrize(("name", "nvlink"), [("8x_l40s", False), ("8x_a100_nvlink", True), ("a100_80gb", None)])
def test_interconnect(name: str, nvlink: bool | None) -> None:
    assert {gpu.nvlink for gpu in recorded_machine(name).gpus} == {nvlink}


def test_gpus_that_are_bridged_in_pairs_only_do_not_count_as_nvlink() -> None:
    record = record_of("8x_a100_nvlink")
    matrix = record["programs"]["nvidia-smi"]["topo -m"]
    matrix["text"] = matrix["text"].replace("GPU7\tNV12", "GPU7\tSYS")
    assert read_machine(probe_of(record)).gpus[0].nvlink is False


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("0,1,2,3", 4), ("2,9,3", 1), ("GPU-00000001", 1), ("", 0), ("-1", 0)]
)
def test_cuda_visible_devices(visible: str, count: int) -> None:
    facts = _changed("8x_a100_nvlink", environment={"CUDA_VISIBLE_DEVICES": visible})
    assert len(facts.gpus) == count
    assert facts.device == ("cuda" if count else "cpu")
    assert count or "CUDA_VISIBLE_DEVICES" in facts.unknown["device"]


def test_of_different_gpus_the_equal_best_ones_count() -> None:
    lines = [
        "0, GPU-a, NVIDIA GeForce RTX 3060, 12288, 11000, 8.6, [N/A]",
        "1, GPU-b, NVIDIA GeForce RTX 3090, 24576, 24000, 8.6, [N/A]",
        "2, GPU-c, NVIDIA GeForce RTX 3090, 24576, 20000, 8.6, [N/A]",
        "3, GPU-d, Tesla P40, 24576, 24000, 6.1, [N/A]",
    ]
    matrix = "GPU0\t X \tSYS\tSYS\tSYS\nGPU1\tSYS\t X \tNV4\tSYS\nGPU2\tSYS\tNV4\t X \tSYS\nGPU3\tSYS\tSYS\tSYS\t X "
    facts = _nvidia(lines, **{"topo -m": {"code": 0, "text": matrix}})
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA GeForce RTX 3090"] * 2
    assert facts.gpus[0].nvlink is True
    assert facts.available_bytes == 20000 * MIB  # of the fuller one: a run takes the same on each
    assert "Tesla P40" in facts.unknown["gpus"] and "CUDA_VISIBLE_DEVICES=1,2" in facts.unknown["gpus"]


def test_a_gpu_that_torch_no_longer_supports_comes_last() -> None:
    lines = [
        "0, GPU-a, Tesla P40, 24576, 24000, 6.1, [N/A]",
        "1, GPU-b, NVIDIA GeForce RTX 3060, 12288, 11000, 8.6, [N/A]",
    ]
    assert _nvidia(lines).chip == "NVIDIA GeForce RTX 3060"


def test_a_broken_driver_is_named_in_its_own_words() -> None:
    reason = recorded_machine("broken_nvidia_smi").unknown["device"]
    assert reason == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"


def test_a_mig_share_is_what_its_profile_says() -> None:
    listed = (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef)\n"
        "  MIG 1g.10gb     Device  1: (UUID: MIG-cba663e8)"
    )
    lines = ["0, GPU-5d5ba0d6, NVIDIA A100-SXM4-80GB, 81920, [Insufficient Permissions], 8.0, Enabled"]
    facts = _nvidia(lines, **{"-L": {"code": 0, "text": listed}})
    assert (facts.device, facts.memory_bytes, facts.available_bytes) == ("cuda", 40 * 10**9, None)
    assert "available_bytes" in facts.unknown
    chosen = _nvidia(lines, {"CUDA_VISIBLE_DEVICES": "MIG-cba663e8"}, **{"-L": {"code": 0, "text": listed}})
    assert chosen.memory_bytes == 10 * 10**9


@pytest.mark.parametrize(
    "text", ["", "No devices were found", "0, GPU-a, GRID A10, [Unknown Error], [N/A], [N/A], [N/A]", "0, a"]
)
def test_odd_answers_of_nvidia_smi_leave_the_processor(text: str) -> None:
    facts = _nvidia([text])
    assert facts.device == "cpu" and facts.unknown["device"].startswith("nvidia-smi")


def test_an_old_driver_does_not_tell_the_compute_capability() -> None:
    old = {"code": 0, "text": "0, GPU-a, Tesla T4, 15360, 14910"}
    record = record_of("t4") | {"programs": {"nvidia-smi": {QUERY: {"code": 2, "text": NOT_A_FIELD}, OLD_QUERY: old}}}
    facts = read_machine(probe_of(record))
    assert (facts.device, facts.memory_bytes, facts.compute_capability) == ("cuda", 15360 * MIB, None)
    assert "compute_capability" in facts.unknown


def test_unified_memory_is_the_computers() -> None:
    facts = recorded_machine("dgx_spark")
    assert facts.unified and facts.memory_bytes == facts.ram_bytes == 128501256192
    assert facts.available_bytes == 117000000 * 1024 and facts.compute_capability == 12.1


@pytest.mark.parametrize(
    ("files", "programs", "word"),
    [
        ({"/proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0"}, {}, "Jetson"),
        ({"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64"}, {}, "nvidia-smi is missing"),
        ({"/dev/kfd": ""}, {}, "ROCm"),
        ({}, {"rocm-smi": {}}, "ROCm"),
        ({}, {"xpu-smi": {}}, "XPU"),
    ],
)
def test_a_gpu_that_is_not_used_is_named(files: dict[str, str], programs: dict[str, Any], word: str) -> None:
    facts = _changed("bare_cpu", files=files, programs=programs)
    assert facts.device == "cpu" and word in facts.unknown["device"]


def test_a_container_owns_its_limit_less_what_it_holds() -> None:
    facts = recorded_machine("container_4gb")
    assert facts.ram_bytes == facts.memory_bytes == 4 * GIB
    assert facts.available_bytes == 4 * GIB - (1 * GIB - 256 * MIB)  # file pages that are taken back do not count
    assert facts.cores == 1


def test_control_groups_of_version_1() -> None:
    memory, cpu = "/sys/fs/cgroup/memory/docker/abc", "/sys/fs/cgroup/cpu"
    files = {
        "/proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        f"{memory}/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{memory}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{memory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {1 * GIB}\n",
        f"{cpu}/cpu.cfs_quota_us": "200000\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
    }
    facts = _changed("rtx_4090", files=files)
    assert (facts.ram_bytes, facts.ram_available_bytes, facts.cores) == (8 * GIB, 6 * GIB, 2)


def test_a_limit_above_this_process_s_group_counts() -> None:
    files = {"/proc/self/cgroup": "0::/user.slice/job", "/sys/fs/cgroup/user.slice/memory.max": f"{2 * GIB}\n"}
    assert _changed("rtx_4090", files=files).ram_bytes == 2 * GIB


def test_a_system_that_tells_nothing_says_so() -> None:
    record = record_of("bare_cpu") | {"system": "Windows", "files": {}, "disk_free_bytes": None}
    facts = read_machine(probe_of(record))
    assert facts.memory_bytes is None and facts.available_bytes is None
    assert {"memory_bytes", "cpu", "cpu_mhz", "disk_free_bytes"} <= set(facts.unknown)


def test_this_machine_against_the_standard_library() -> None:
    facts, probe = read_machine(), this_machine()
    if facts.system == "Linux":
        assert facts.ram_bytes is not None and facts.ram_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf(
            "SC_PAGE_SIZE"
        )
        assert read_cpu(probe).name in (probe.read("/proc/cpuinfo") or "")
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert 0 < (available_memory_bytes() or 0) <= (facts.ram_bytes or 0)


def test_reading_takes_less_than_60_ms_without_gpu_tools() -> None:
    if this_machine().system == "Darwin" or this_machine().has("nvidia-smi"):
        pytest.skip("the tools of this machine take their own time")
    seconds = []
    for _ in range(5):
        started = time.process_time()
        read_machine()
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.06


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys; from skill_train.machine.read import read_machine; read_machine(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_empty_variable_names_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SKILL_TRAIN_CACHE= skill-train …` took the current folder."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SKILL_TRAIN_CACHE", "")
    assert cache_dir() == tmp_path / "skill-train"


def _changed(name: str, **changes: Any) -> MachineFacts:
    record = record_of(name)
    return read_machine(probe_of(record | {key: record[key] | value for key, value in changes.items()}))


def _nvidia(lines: list[str], environment: dict[str, str] | None = None, **more: dict[str, Any]) -> MachineFacts:
    answers = {QUERY: {"code": 0, "text": "\n".join(lines)}} | more
    record = record_of("rtx_4090") | {"environment": environment or {}}
    return read_machine(probe_of(record | {"programs": {"nvidia-smi": answers}}))
