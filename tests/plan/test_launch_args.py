"""How a plan's processes are started, for machines that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

import planning
from skill_train.core.errors import DecisionNeeded
from skill_train.facts import Gpu, MachineFacts
from skill_train.plan.launch_args import launch
from skill_train.run import plan_record
from skill_train.run.plan_record import Launch, Placement

CPU = MachineFacts("Linux", "a processor", "cpu", 16 << 30, 12 << 30, None, 4, False)
MAC = MachineFacts("Darwin", "Apple M2 Pro", "mps", 16 << 30, 8 << 30, None, 8, False)


def _gpus(name: str, count: int, *, nvlink: bool | None) -> MachineFacts:
    gpu = Gpu(name, 48 << 30, None, 8.9, nvlink)
    return msgspec.structs.replace(CPU, chip=name, device="cuda", cores=64, gpus=(gpu,) * count)


L40S = _gpus("NVIDIA L40S", 8, nvlink=False)
A100 = _gpus("NVIDIA A100-SXM4-80GB", 8, nvlink=True)
RTX_4090 = _gpus("NVIDIA GeForce RTX 4090", 2, nvlink=False)


def test_one_process_is_started_as_it_is() -> None:
    assert launch(_placement("single", 1), CPU) == Launch()


@pytest.mark.parametrize(("machine", "processes", "threads"), [(CPU, 2, 2), (L40S, 8, 8), (L40S, 3, 21)])
def test_ddp(machine: MachineFacts, processes: int, threads: int) -> None:
    """Never `--cpu`: with it accelerate 1.15 starts one process, whatever the number that is asked for."""
    flags = _flags(launch(_placement("ddp", processes, device=machine.device), machine))
    assert "--multi_gpu" in flags and "--cpu" not in flags and "--use_fsdp" not in flags
    assert flags["--num_processes"] == str(processes) and flags["--num_machines"] == "1"
    assert flags["--mixed_precision"] == "no" and flags["--dynamo_backend"] == "no"
    assert flags["--num_cpu_threads_per_process"] == str(threads)


def test_the_threads_of_the_plan_are_taken() -> None:
    flags = _flags(launch(_placement("ddp", 2, threads=1), CPU))
    assert flags["--num_cpu_threads_per_process"] == "1"


def test_fsdp_for_lora() -> None:
    flags = _flags(launch(_placement("fsdp", 8, device="cuda"), L40S))
    assert "--use_fsdp" in flags and "--multi_gpu" not in flags
    assert flags["--fsdp_version"] == "2" and flags["--fsdp_reshard_after_forward"] == "true"
    assert flags["--fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert flags["--fsdp_state_dict_type"] == "FULL_STATE_DICT"  # else the adapter lies in eight parts
    assert flags["--fsdp_cpu_ram_efficient_loading"] == flags["--fsdp_sync_module_states"] == "true"
    assert flags["--fsdp_offload_params"] == "false"


def test_offload_is_said_with_its_reason() -> None:
    made = launch(_placement("fsdp", 2, device="cuda", offload=True), A100)
    assert _flags(made)["--fsdp_offload_params"] == "true"
    assert any(reason.rule == "fsdp_offload_params" for reason in made.reasons)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_on_pcie_is_that_of_the_guide(strategy: str) -> None:
    """Without NCCL_SOCKET_IFNAME=eth0: the name of a network in one cloud's image."""
    environment = launch(_placement(strategy, 8, device="cuda"), L40S).environment
    assert {k: v for k, v in environment.items() if k.startswith("NCCL")} == {
        "NCCL_ALGO": "Ring",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_DEBUG": "WARN",
    }


def test_geforce_40_leaves_peer_access_to_accelerate() -> None:
    """accelerate switches it off for drivers before 550.40.07, unless somebody has set it."""
    environment = launch(_placement("ddp", 2, device="cuda"), RTX_4090).environment
    assert "NCCL_P2P_DISABLE" not in environment and environment["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize("nvlink", [True, None], ids=["nvlink", "unknown"])
def test_nccl_is_left_alone_on_nvlink_and_where_nothing_is_known(nvlink: bool | None) -> None:
    environment = launch(_placement("ddp", 8, device="cuda"), _gpus("A100", 8, nvlink=nvlink)).environment
    assert [name for name in environment if name.startswith("NCCL")] == ["NCCL_DEBUG"]


def test_processors_get_no_nccl() -> None:
    assert not [n for n in launch(_placement("ddp", 2), CPU).environment if n.startswith("NCCL")]


@pytest.mark.parametrize(
    ("machine", "strategy", "processes", "code", "got"),
    [
        (L40S, "ddp", 9, "device_unavailable", "8"),
        (CPU, "ddp", 5, "device_unavailable", "4"),
        (MAC, "ddp", 2, "device_unavailable", "1"),
        (CPU, "fsdp", 2, "needs_cuda", "cpu"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(
    machine: MachineFacts, strategy: str, processes: int, code: str, got: str
) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        launch(_placement(strategy, processes, device=machine.device), machine)
    assert (caught.value.code, caught.value.got, caught.value.exit_code) == (code, got, 3)
    assert caught.value.hint


@pytest.mark.parametrize(("strategy", "machine"), [("ddp", L40S), ("fsdp", A100), ("ddp", CPU)])
def test_every_setting_of_the_environment_has_its_reason(strategy: str, machine: MachineFacts) -> None:
    made = launch(_placement(strategy, 2, device=machine.device), machine)
    assert set(made.environment) <= {reason.rule for reason in made.reasons}
    assert all(all(structs.astuple(reason)) for reason in made.reasons)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("machine", [L40S, A100, _gpus("RTX 4090", 2, nvlink=False)])
def test_what_a_plan_starts_with_is_read_back(strategy: str, machine: MachineFacts) -> None:
    """A plan from elsewhere may set nothing but this."""
    processes = 1 if strategy == "single" else 2
    made = launch(_placement(strategy, processes, device=machine.device), machine)
    plan_record._check_launch(Path("plan.json"), made)


def _placement(strategy: str, processes: int, **changed: Any) -> Placement:
    plain = planning.plan_with(placement={"device": "cpu", "threads": None, "offload": False}).placement
    return replace(plain, strategy=strategy, num_processes=processes, **changed)


def _flags(made: Launch) -> dict[str, str]:
    arguments = made.arguments
    values = [*arguments[1:], "--"]
    return {a: "" if b.startswith("--") else b for a, b in zip(arguments, values, strict=True) if a.startswith("--")}
