"""How the processes of a plan are started: arguments and environment of `accelerate launch`. Pure.

A single process is started without both. Versions: accelerate 1.15, torch 2.13, PEFT 0.21.
"""

from skill_train.core.errors import DecisionNeeded
from skill_train.facts import MachineFacts
from skill_train.run.plan_record import Launch, Placement, Reason

SHUTDOWN_SECONDS = 600  # time after Ctrl-C for a step and a checkpoint; torchrun's 30 would cut long steps off

_GUIDE = "the user's guide, NCCL tuning for PCIe"


def launch(placement: Placement, machine: MachineFacts) -> Launch:
    """`arguments` (of `accelerate launch`, before the program), `environment`, and `reasons` for both.

    Args:
        placement: the placement of the plan; `strategy`, `num_processes`, `device`, `threads` and `offload` are read.
        machine: the machine that it will run on: this one, or the description of a flavor.

    Raises:
        DecisionNeeded: there are more processes than devices, or FSDP is used without CUDA.
    """
    if placement.strategy == "single":
        return Launch()
    _check_devices(placement, machine)
    reasons: list[Reason] = []
    arguments = _common(placement, machine, reasons)
    arguments += _fsdp(placement, reasons) if placement.strategy == "fsdp" else ["--multi_gpu"]
    return Launch(arguments, _environment(placement, machine, reasons), reasons)


def _check_devices(placement: Placement, machine: MachineFacts) -> None:
    device, processes = placement.device, placement.num_processes
    there = {"cuda": len(machine.gpus), "cpu": machine.cores}.get(device, 1)
    unit = {"cuda": "GPUs", "cpu": "cores"}.get(device, f"{device} devices")
    if processes > there:
        raise DecisionNeeded(
            f"{processes} processes were requested, but {machine.chip} has fewer {unit}",
            code="device_unavailable",
            expected=f"at least {processes} {unit}, one a process",
            got=str(there),
            hint=f"use at most {there} processes, or a machine with more {unit}",
        )
    if placement.strategy == "fsdp" and device != "cuda":
        raise DecisionNeeded(
            f"FSDP needs CUDA; this plan trains on {device}",
            code="needs_cuda",
            expected="several NVIDIA GPUs to share one model",
            got=device,
            hint="train with one process, or on a machine with NVIDIA GPUs",
        )


def _common(placement: Placement, machine: MachineFacts, reasons: list[Reason]) -> list[str]:
    """The arguments that DDP and FSDP share. All are set, so that the user's default_config.yaml has no influence."""
    processes = placement.num_processes
    threads = placement.threads or max(1, machine.cores // processes)
    why = "each GPU" if placement.device == "cuda" else "each share of the cores"
    reasons += [
        Reason("processes", str(processes), f"one for {why}", "machine"),
        Reason("mixed_precision", "no", "the training program sets bf16 or fp16 itself, as the plan says", "plan"),
        Reason("main_process_port", "0", "a free port: two runs on one machine do not meet", "accelerate launch"),
        Reason("threads", str(threads), f"{machine.cores} cores shared by {processes} processes", "machine"),
    ]
    values = {
        "num_processes": processes,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_port": 0,
        "gpu_ids": "all",
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "num_cpu_threads_per_process": threads,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _fsdp(placement: Placement, reasons: list[Reason]) -> list[str]:
    """The arguments that divide parameters among the GPUs by whole transformer layers, as PEFT and transformers
    document it for LoRA.

    Sources: transformers docs, "FSDP2" (v5.13, read 2026-11-21); PEFT examples/sft/configs/fsdp_config.yaml. The
    layer class is not named: PEFT reads it from the model (`_no_split_modules`).
    """
    values = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": "true",
        "fsdp_sync_module_states": "true",
        "fsdp_offload_params": str(placement.offload).lower(),
        "fsdp_activation_checkpointing": "false",
        "fsdp_reshard_after_forward": "true",
    }
    version = "what transformers documents; it shares each weight out by itself, so LoRA and base may differ in dtype"
    reasons += [
        Reason("fsdp_version", "2", version, "transformers docs, FSDP2"),
        Reason("fsdp_state_dict_type", "FULL_STATE_DICT", "one whole adapter instead of a part a GPU", _GUIDE),
        Reason("fsdp_cpu_ram_efficient_loading", "true", "only one process reads the weights into RAM", "PEFT docs"),
    ]
    if placement.offload:
        why = "nothing else fits: weights wait in RAM, slower"
        reasons.append(Reason("fsdp_offload_params", "true", why, "plan"))
    return ["--use_fsdp", *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def _environment(placement: Placement, machine: MachineFacts, reasons: list[Reason]) -> dict[str, str]:
    """The environment of the processes. It leaves out NCCL_SOCKET_IFNAME=eth0 of the user's guide, which names the
    network of that guide's cloud image. The GPUs of one machine do not use a network, and without an eth0 NCCL
    fails."""
    stop = "seconds to finish the step and save after Ctrl-C, before processes are killed"
    chosen = {"PET_SHUTDOWN_TIMEOUT": (str(SHUTDOWN_SECONDS), stop)}
    if placement.device == "cuda":
        chosen["NCCL_DEBUG"] = "WARN", "errors of NCCL in the log, and nothing more"
        if any(gpu.nvlink is False for gpu in machine.gpus):
            buffers = "PCIe: buffers of 16 MB instead of 4, fewer and larger transfers"
            chosen |= {
                "NCCL_ALGO": ("Ring", "PCIe: a ring suits its topology"),
                "NCCL_BUFFSIZE": (str(16 << 20), buffers),
                "NCCL_IB_DISABLE": ("1", "one machine: InfiniBand is not looked for"),
            }
            # GeForce 40 has no direct access with drivers before 550.40.07. accelerate sets the variables, unless they
            # are set.
            if not any("RTX 40" in gpu.name for gpu in machine.gpus):
                chosen["NCCL_P2P_DISABLE"] = "0", "GPUs read from each other where they can"
    for name, (value, why) in chosen.items():
        reasons.append(Reason(name, value, why, _GUIDE if name.startswith("NCCL") else "torchrun"))
    return {name: value for name, (value, _) in chosen.items()}
