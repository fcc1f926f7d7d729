"""The device that a training runs on: whether torch can use it, and which of its kernels compute."""

from __future__ import annotations

import os
from typing import Any

from skill_train.program.events import EXIT_DOES_NOT_FIT, EXIT_NOT_INSTALLED, Refused
from skill_train.program.plan import Placement

FLASH_FROM = (8, 0)  # the compute capability of Ampere


def prepare_device(torch: Any, placement: Placement) -> None:
    require_device(torch, placement)
    if placement["device"] == "cuda":  # compiled anew for every length: a quarter more tokens a second without it
        torch.backends.cuda.enable_cudnn_sdp(False)
        if not flash_attention_runs(placement["dtype"], torch.cuda.get_device_capability()):
            repeat_shared_heads()
    elif placement["device"] == "cpu" and placement["threads"]:
        torch.set_num_threads(placement["threads"])


def flash_attention_runs(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether torch's flash kernel computes this type on a GPU of this compute capability."""
    return dtype in ("bfloat16", "float16") and capability >= FLASH_FROM


def repeat_shared_heads() -> None:
    """Lets transformers repeat the keys and values that several query heads share, before attention.

    On CUDA only the flash kernel reads shared heads. Where it does not run, transformers 5.23 has torch fall back to
    the kernel that keeps every attention score for the backward pass (huggingface/transformers#45776): 0.35 GB more
    for 512 tokens of Qwen2.5-0.5B in float32 (bench/estimates), 16 times that for 2,048. The memory-efficient kernel
    keeps none, and takes repeated heads.
    """
    from transformers.integrations import sdpa_attention

    if hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


def require_device(torch: Any, placement: Placement) -> None:
    device = placement["device"]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device, False):
        raise Refused(
            f"torch {torch.__version__} cannot use {device} here",
            code="device_unavailable",
            exit_code=EXIT_NOT_INSTALLED,
            expected=f"a build of torch for {device}, and a driver",
            got=", ".join(name for name, there in available.items() if there),
            hint="use --device cpu, or install the torch build for this machine",
        )
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", placement["num_processes"]))  # the rest are elsewhere
    if device == "cuda" and torch.cuda.device_count() < processes_here:
        raise Refused(
            "the plan has more processes than this machine has GPUs",
            code="device_unavailable",
            exit_code=EXIT_DOES_NOT_FIT,
            expected=f"{processes_here} GPUs, one a process",
            got=f"{torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})",
            hint="plan again on this machine: skill-train local RECIPE",
        )
