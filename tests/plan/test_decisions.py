"""Where each recipe trains: real models, recorded machines, and expectations from the project's documents and from
published measurements, never from what the code said.

Sources, by the names used below:
  rubric      seed "Local training on macOS (Apple Silicon)": Agent Decision Rubric, Scope, memory guidance, Intel Macs
  notes       seed "From MacBook to Cloud": dtype table, memory scaling table, performance table
  guide       seed "Hardware Guide": RTX 4090, A100, 8 x L40S, NCCL, DDP or FSDP
  framework   seed "Develop locally, deploy to the cloud": RTX 3080 10 GB, DGX Spark, when to use which
  issue       this project's issue 3, section 2
  torchtune   its README, memory and performance tables (read 2026-11-21)
  qwen        QwenLM/Qwen README, Profiling of Memory and Speed (A100 80 GB)
  qlora       Dettmers et al. 2023, arXiv 2305.14314, figure 6: 7B 6.9, 13B 11.3, 33B 24.7, 65B 45.0 GB
  llamafactory  hiyouga/LLaMA-Factory README, hardware requirements
  arithmetic  parameters of the recorded config x bytes, by hand
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from machines import recorded_machine
from models import recorded_model
from planning import decided, decided_plan, says, split
from skill_train.commands._planning import blocked
from skill_train.core.errors import DecisionNeeded
from skill_train.model import config as model_config
from skill_train.plan import where as rubric

# What Metal gives a 16 GB Mac's GPU when nothing else runs: 10922.67 MiB (llama-cpp-python#687). The recorded ones are
# Macs in use, with 7.5 and 2.6 GB free.
IDLE_16 = int(10_922.67 * 2**20)
IDLE_8 = IDLE_16 // 2  # the same share of 8 GB


@dataclass(frozen=True)
class Row:
    """One decision. What is None or left out is not stated by the source."""

    model: str
    machine: str
    where: str
    source: str
    said: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    strategy: str | None = None
    split: tuple[int, int, int] | None = None
    blockers: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = "-".join(f"{key}={value}" for key, value in self.said.items())
        return f"{self.model}-{self.machine}" + f"-{said}" * bool(said)


def row(model: str, machine: str, where: str, source: str, /, **more: Any) -> Row:
    known = {f.name for f in dataclasses.fields(Row)}
    expected = {key: more.pop(key) for key in [*more] if key in known}
    return Row(model, machine, where, source, more, **expected)


SMALL = {"model size": "local", "context": "local"}
LARGE = {"model size": "cloud"}
GAP = {"model size": "either"}
SENSITIVE = {"sensitive": True}

MACS = [
    row("qwen2.5-0.5b", "m2_pro_16gb", "local", "rubric: up to 3B, up to 1024 tokens, LoRA; notes: float32 on MPS",
        rules=SMALL, dtype="float32", strategy="single", split=(1, 16, 1)),
    row("qwen2.5-0.5b", "m2_pro_16gb", "local", "rubric: its own script, 500 rows of at most 512 tokens, one epoch",
        rows=500, epochs=1.0, max_length=512, rules=SMALL | {"time": "local"}),
    row("qwen3-0.6b", "m2_pro_16gb", "local", "rubric, memory: 16 GB, start with 0.5B to 1.5B", rules=SMALL),
    row("smollm2-135m", "m1_8gb", "local", "arithmetic: 0.5 GB of weights in float32; notes: 8 GB, 1 x 16",
        max_length=512, free=IDLE_8, split=(1, 16, 1)),
    row("smollm2-360m", "m2_pro_16gb", "local", "rubric: up to 3B", rules=SMALL),
    row("gemma-3-1b", "m2_pro_16gb", "local", "rubric, memory: 16 GB, 0.5B to 1.5B; 512 tokens to start with",
        max_length=512, free=IDLE_16, rules=SMALL, dtype="float32"),
    row("llama-3.2-1b", "m2_pro_16gb", "local", "rubric, memory: 16 GB, 0.5B to 1.5B",
        max_length=512, free=IDLE_16, rules=SMALL),
    row("qwen2.5-1.5b", "m2_pro_16gb", "local", "rubric, memory: 16 GB, 0.5B to 1.5B",
        max_length=512, free=IDLE_16, rules=SMALL),
    row("qwen2.5-1.5b", "m2_pro_32gb", "local", "rubric, memory: 32 GB, 1.5B to 3B; notes: Pro, 2 x 8 to 4 x 4",
        rules=SMALL, split=(2, 8, 1), dtype="float32"),
    row("qwen3-1.7b", "m2_pro_32gb", "local", "rubric, memory: 32 GB, 1.5B to 3B", rules=SMALL),
    row("smollm2-1.7b", "m2_pro_32gb", "local", "rubric, memory: 32 GB, 1.5B to 3B", rules=SMALL),
    row("qwen2.5-3b", "m2_pro_32gb", "local", "rubric, memory: 32 GB, 1.5B to 3B", max_length=512, rules=SMALL),
    row("gemma-2-2b", "m2_pro_32gb", "local", "rubric, memory: 32 GB, 1.5B to 3B", max_length=512, rules=SMALL),
    row("qwen2.5-3b", "m2_pro_16gb", "cloud", "issue: float32 on a 16 GB Mac, where even 3B does not fit",
        rules={"model size": "local", "memory": "cloud"}),
    row("qwen2.5-3b", "m2_pro_16gb", "cloud", "issue: the same with nothing else running: 12.3 GB of weights",
        free=IDLE_16, rules={"model size": "local", "memory": "cloud"}),
    row("llama-3.2-3b", "m2_pro_16gb", "cloud", "issue: float32 on a 16 GB Mac, where even 3B does not fit",
        rules={"model size": "local", "memory": "cloud"}),
    row("llama-3.2-3b", "m4_max_128gb", "local", "rubric: up to 3B; notes: Max, 4 x 4 to 8 x 2", rules=SMALL,
        split=(8, 2, 1), dtype="float32"),
    row("qwen2.5-1.5b", "m1_8gb", "cloud", "arithmetic: 6.2 GB of weights in float32, 2.6 GB free; rubric: from 16 GB",
        rules={"memory": "cloud"}),
    row("qwen3-4b", "m4_max_128gb", "local", "issue: 3B to 7B by the estimate; 16 GB of weights in 103 GB",
        max_length=512, rules=GAP | {"memory": "local"}),
    row("phi-4-mini", "m4_max_128gb", "local", "issue: 3B to 7B by the estimate; 15 GB of weights in 103 GB",
        max_length=512, rules=GAP | {"memory": "local"}),
    row("qwen3-4b", "m2_pro_16gb", "cloud", "arithmetic: 16.1 GB of weights in float32", free=IDLE_16,
        rules=GAP | {"memory": "cloud"}),
    row("phi-3-mini-4k", "m2_pro_16gb", "cloud", "arithmetic: 15.3 GB of weights in float32", free=IDLE_16,
        rules=GAP | {"memory": "cloud"}),
    row("qwen2.5-7b", "m1_8gb", "cloud", "rubric: 7B and more", rules=LARGE | {"memory": "cloud"}),
    row("qwen2.5-7b", "m2_pro_16gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("qwen2.5-7b", "m2_pro_32gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("qwen2.5-7b", "m4_max_128gb", "cloud", "rubric: 7B and more on a Mac laptop, though 30 GB would fit",
        rules=LARGE | {"memory": "local"}),
    row("llama-3.1-8b", "m4_max_128gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("mistral-7b-v0.3", "m4_max_128gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("gemma-2-9b", "m4_max_128gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("phi-4", "m4_max_128gb", "cloud", "rubric: 7B and more", rules=LARGE),
    row("qwen3-30b-a3b", "m4_max_128gb", "cloud", "rubric: 7B and more; all experts are in memory", rules=LARGE),
    row("qwen1.5-moe-a2.7b", "m2_pro_32gb", "cloud", "arithmetic: 57 GB of weights though 2.7B are active",
        rules=LARGE | {"memory": "cloud"}),
    row("gemma-3-4b", "m4_max_128gb", "cloud", "rubric: vision-language models", rules={"vision": "cloud"}),
    row("qwen2.5-vl-7b", "m4_max_128gb", "cloud", "rubric: vision-language models", rules={"vision": "cloud"},
        blockers=("vision",)),
    row("qwen2.5-0.5b", "m4_max_128gb", "cloud", "rubric: QLoRA 4-bit needs CUDA", load_in_4bit=True,
        rules={"4-bit": "cloud"}),
    row("qwen2.5-7b", "m2_pro_16gb", "cloud", "rubric: QLoRA 4-bit needs CUDA", load_in_4bit=True,
        rules=LARGE | {"4-bit": "cloud"}),
    row("qwen2.5-0.5b", "m2_pro_32gb", "cloud", "rubric: long context", max_length=8192, rules={"context": "cloud"}),
    row("qwen2.5-1.5b", "m4_max_128gb", "cloud", "rubric: long context", max_length=8192, rules={"context": "cloud"}),
    row("qwen2.5-0.5b", "m2_pro_32gb", "local", "rubric: short context; no row is longer than 300 tokens",
        max_length=8192, longest=300, rules=SMALL),
    row("qwen2.5-0.5b", "m4_max_128gb", "local", "issue: 1k to 4k tokens by the estimate", max_length=2048,
        rules={"context": "either", "memory": "local"}),
    row("qwen2.5-1.5b", "m2_pro_32gb", "cloud", "rubric: production runs; notes: 27 s a step of 8 rows on an M2 Pro",
        rows=100_000, epochs=3.0, rules=SMALL | {"time": "cloud"}),
    row("qwen2.5-0.5b", "intel_mac", "cloud", "rubric: Intel Macs, cloud for all training",
        rules={"intel mac": "cloud"}),
    row("smollm2-135m", "intel_mac", "cloud", "rubric: Intel Macs, cloud for all training",
        rules={"intel mac": "cloud"}),
    row("smollm2-135m", "intel_mac", "local", "issue: what would stop it; torch 2.2 was the last for Intel Macs",
        where_asked="local", blockers=("no_torch",)),
    row("qwen2.5-0.5b", "rosetta_m2", "local", "issue: Rosetta recognised; such a Python has no torch of today",
        rules={"rosetta": "either"}, blockers=("no_torch",)),
]  # fmt: skip

ONE_GPU = [
    row("qwen2.5-7b", "rtx_4090", "local", "issue: 24 GB, LoRA up to about 7B in bf16; notes: bf16 on Ampere and newer",
        rules={"memory": "local"}, dtype="bfloat16", strategy="single"),
    row("mistral-7b-v0.3", "rtx_4090", "local", "guide: RTX 4090, fine-tuning up to 7B", dtype="bfloat16"),
    row("llama-3.1-8b", "rtx_4090", "local", "torchtune: 8B LoRA 16.2 GiB on a 4090, 2 x 2048 tokens",
        max_length=2048, dtype="bfloat16"),
    row("qwen3-8b", "rtx_4090", "local", "torchtune: 8B LoRA 16.2 GiB on a 4090, 2 x 2048 tokens"),
    row("qwen2.5-14b", "rtx_4090", "cloud", "arithmetic: 29.5 GB of weights in 16 bit", rules={"memory": "cloud"}),
    row("phi-4", "rtx_4090", "cloud", "arithmetic: 29.3 GB of weights in 16 bit", rules={"memory": "cloud"}),
    row("qwen2.5-14b", "rtx_4090", "local", "issue: QLoRA above 7B on 24 GB; qwen: 14B QLoRA 18.4 GB at 512 tokens",
        load_in_4bit=True, rules={"memory": "local"}),
    row("phi-4", "rtx_4090", "local", "issue: QLoRA above 7B on 24 GB; qlora: 13B 11.3 GB", load_in_4bit=True),
    row("llama-3.1-70b", "rtx_4090", "cloud", "guide: 70B in 4 bit is 35 GB before anything else", load_in_4bit=True,
        rules={"memory": "cloud"}),
    row("llama-3.2-11b-vision", "rtx_4090", "cloud", "issue: vision models", rules={"vision": "cloud"},
        load_in_4bit=True),
    row("qwen2.5-0.5b", "rtx_4090", "local", "issue: a CUDA workstation by its memory, not by the Mac rule",
        max_length=8192),
    row("llama-3.1-8b", "rtx_3080", "local", "framework: 10 GB, 7B and 8B with 4-bit; torchtune: QLoRA 7.4 GiB",
        load_in_4bit=True, max_length=512, rules={"memory": "local"}, split=(1, 16, 1)),
    row("qwen2.5-7b", "rtx_3080", "local", "framework: 10 GB, 7B and 8B with 4-bit; llamafactory: 6 GB",
        load_in_4bit=True, max_length=512),
    row("qwen2.5-7b", "rtx_3080", "cloud", "arithmetic: 15.2 GB of weights in 16 bit", rules={"memory": "cloud"}),
    row("qwen2.5-14b", "rtx_3080", "cloud", "framework: 10 GB, 13B and 14B only by offloading", load_in_4bit=True,
        rules={"memory": "cloud"}),
    row("qwen2.5-1.5b", "rtx_3080", "local", "qwen: 1.8B LoRA 7.4 GB at 512 tokens", max_length=512,
        dtype="bfloat16"),
    row("qwen2.5-1.5b", "t4", "local", "notes: T4, float16, batch 2 x 8", dtype="float16", split=(2, 8, 1)),
    row("gemma-2-2b", "t4", "local", "arithmetic: 10.5 GB; Gemma overflows float16 (transformers docs, Gemma 2)",
        max_length=384, dtype="float32"),
    row("gemma-2-2b", "t4", "cloud", "its attention is written out, and no published run proves 11.5 GB to be enough",
        max_length=512, rules={"memory": "cloud"}),
    row("gemma-3-1b", "t4", "local", "arithmetic: 4 GB; Gemma overflows float16 (transformers docs, Gemma 3)",
        dtype="float32"),
    row("llama-3.1-8b", "t4", "local", "torchtune: QLoRA 7.4 GiB; notes: float16 before Ampere",
        load_in_4bit=True, dtype="float16"),
    row("qwen2.5-7b", "t4", "cloud", "arithmetic: 15.2 GB of weights in 16 bit of 15.6 free",
        rules={"memory": "cloud"}),
    row("qwen2.5-1.5b", "a100_80gb", "local", "notes: A100 80 GB, 16 x 1; guide: bf16", split=(16, 1, 1),
        dtype="bfloat16"),
    row("qwen2.5-14b", "a100_80gb", "local", "qwen: 14B LoRA 35.3 GB at 1024 tokens", dtype="bfloat16"),
    row("llama-3.1-70b", "a100_80gb", "local", "guide: 70B in 4 bit with LoRA, 42 to 48 GB", load_in_4bit=True,
        rules={"memory": "local"}, strategy="single"),
    row("qwen2.5-72b", "a100_80gb", "local", "qwen: 72B QLoRA 61.4 to 75.6 GB on one A100", load_in_4bit=True),
    row("llama-3.1-70b", "a100_80gb", "cloud", "guide: 140 GB of weights in bf16", rules={"memory": "cloud"}),
    row("qwen3-30b-a3b", "a100_80gb", "local", "arithmetic: 61 GB of weights in 16 bit", max_length=512),
    row("qwen3-30b-a3b", "rtx_4090", "cloud", "transformers: 29B in experts stay in 16 bit under QLoRA, 58 GB",
        load_in_4bit=True, rules={"memory": "cloud"}),
    row("qwen2.5-14b", "dgx_spark", "local", "framework: DGX Spark, 128 GB, made for fine-tuning; 29.5 GB of weights",
        dtype="bfloat16", strategy="single"),
    row("llama-3.1-70b", "dgx_spark", "local", "guide: 70B in 4 bit with LoRA, 42 to 48 GB of 128", load_in_4bit=True),
    row("llama-3.1-70b", "dgx_spark", "cloud", "guide: 140 GB of weights in bf16", rules={"memory": "cloud"}),
]  # fmt: skip

MANY_GPUS_AND_NONE = [
    row("qwen2.5-7b", "8x_l40s", "local", "guide: the model fits on one GPU, DDP", strategy="ddp", dtype="bfloat16"),
    row("qwen2.5-14b", "8x_l40s", "local", "guide: 29.5 GB fit on one GPU of 48, DDP", strategy="ddp"),
    row("llama-3.1-70b", "8x_l40s", "local", "guide: 70B in bf16 is 17.5 GB a GPU, FSDP", strategy="fsdp"),
    row("qwen2.5-32b", "8x_l40s", "local", "arithmetic: 65.5 GB of weights, more than one GPU of 48", strategy="fsdp"),
    row("mixtral-8x7b", "8x_l40s", "local", "arithmetic: 93 GB of weights, more than one GPU of 48", strategy="fsdp"),
    row("qwen2.5-7b", "8x_a100_nvlink", "local", "guide: the model fits on one GPU, DDP", strategy="ddp"),
    row("llama-3.1-70b", "8x_a100_nvlink", "local", "torchtune: 70B LoRA on 8 A100, 27.6 GiB each", strategy="fsdp"),
    row("qwen2.5-72b", "8x_a100_nvlink", "local", "arithmetic: 145 GB of weights, 18 GB a GPU", strategy="fsdp"),
    row("smollm2-135m", "bare_cpu", "local", "notes: CPU, float32; framework: small-scale experiments stay local",
        max_length=256, max_steps=20, dtype="float32", strategy="single"),
    row("qwen2.5-7b", "bare_cpu", "cloud", "arithmetic: 30.5 GB of weights in float32, 20 GB free",
        rules={"memory": "cloud"}),
    row("qwen2.5-1.5b", "bare_cpu", "cloud", "rubric: CPU only is impractically slow; production runs",
        rows=100_000, epochs=3.0, rules={"time": "cloud"}),
    row("smollm2-360m", "container_4gb", "cloud", "rubric: production runs", rows=100_000, epochs=3.0,
        rules={"time": "cloud"}),
    row("qwen2.5-3b", "container_4gb", "cloud", "arithmetic: 12.3 GB of weights, 3.5 GB free",
        rules={"memory": "cloud"}),
    row("smollm2-360m", "amx_server", "local", "framework: small-scale experiments stay local", max_length=256),
    row("qwen2.5-7b", "amx_server", "local", "issue: 7B and more goes to the cloud on a laptop; this is a server",
        max_length=512, rules=GAP | {"memory": "local"}),
]  # fmt: skip

ASKED = [
    row("qwen2.5-7b", "m2_pro_16gb", "local", "issue: --where overrides, and what cannot run is a blocker",
        where_asked="local", rules={"asked": "local"} | LARGE, blockers=("no_memory",)),
    row("qwen2.5-7b", "m4_max_128gb", "local", "issue: --where overrides the advice", where_asked="local",
        rules={"asked": "local"} | LARGE),
    row("qwen2.5-0.5b", "m2_pro_16gb", "cloud", "issue: --where overrides the advice", where_asked="cloud",
        rules={"asked": "cloud"} | SMALL),
    row("qwen2.5-0.5b", "m2_pro_16gb", "local", "rubric: QLoRA 4-bit needs CUDA", where_asked="local",
        load_in_4bit=True, blockers=("needs_cuda",)),
    row("qwen2.5-7b", "bare_cpu", "local", "a computer's memory says nothing of a GPU that is not there",
        where_asked="local", device="cuda", rules={"memory": "either"}, blockers=("device_unavailable",)),
    row("qwen2.5-0.5b", "m2_pro_16gb", "local", "framework: sensitive data stays local", sensitive=True,
        rules={"sensitive": "local"}),
    row("qwen2.5-7b", "m2_pro_16gb", "local", "issue: sensitive keeps everything here, or refuses", sensitive=True,
        rules={"sensitive": "local"} | LARGE, blockers=("no_memory",)),
    row("qwen2.5-0.5b", "m2_pro_32gb", "local", "issue: sensitive keeps everything here, or refuses", sensitive=True,
        load_in_4bit=True, rules={"sensitive": "local", "4-bit": "cloud"}, blockers=("needs_cuda",)),
    row("qwen2.5-1.5b", "m2_pro_32gb", "local", "issue: sensitive keeps everything here, however long it takes",
        sensitive=True, rows=100_000, epochs=3.0, rules={"sensitive": "local", "time": "cloud"}),
    row("qwen2.5-14b", "rtx_4090", "local", "issue: sensitive keeps everything here, or refuses", sensitive=True,
        where_asked="local", blockers=("no_memory",)),
]  # fmt: skip

# Full fine-tuning, `full`; without autocast's copies 16 bytes a parameter, 8 with pure_bf16.
FULL: dict[str, Any] = {"finetuning_type": "full"}
PURE = FULL | {"pure_bf16": True}
WHOLE = [
    row("qwen2.5-0.5b", "m4_max_128gb", "cloud", "rubric: full fine-tuning, though 8 GB fit", **FULL,
        rules=SMALL | {"full fine-tuning": "cloud", "memory": "local"}),
    row("smollm2-135m", "bare_cpu", "cloud", "rubric: full fine-tuning", **FULL, max_length=256, max_steps=20,
        rules={"full fine-tuning": "cloud"}),
    row("smollm2-135m", "bare_cpu", "local", "issue: --where overrides the advice", **FULL, where_asked="local",
        max_length=256, max_steps=20, rules={"asked": "local", "full fine-tuning": "cloud"}, dtype="float32"),
    row("qwen2.5-0.5b", "m2_pro_16gb", "local", "framework: sensitive data stays local; 8 GB of 7.5 free", **FULL,
        sensitive=True, rules={"sensitive": "local", "memory": "cloud"}, blockers=("no_memory",)),
    row("qwen2.5-0.5b", "rtx_4090", "local", "issue: a CUDA workstation by its memory; arithmetic: 9 GB of 24", **FULL,
        rules={"memory": "local"}, dtype="bfloat16", strategy="single"),
    row("llama-3.2-3b", "rtx_4090", "cloud", "arithmetic: 51 GB", **FULL, rules={"memory": "cloud"}),
    row("mistral-7b-v0.3", "a100_80gb", "local", "guide: A100, full in bf16, 7B is about 56 GB of 80", **PURE,
        rules={"memory": "local"}, dtype="bfloat16", strategy="single"),
    row("mistral-7b-v0.3", "a100_80gb", "cloud", "llamafactory: 7B full, bf16 or fp16, 120 GB", **FULL,
        rules={"memory": "cloud"}),
    row("phi-4", "a100_80gb", "cloud", "guide: 13B full in bf16 is about 104 GB, too large for one", **PURE,
        rules={"memory": "cloud"}),
    row("mistral-7b-v0.3", "8x_l40s", "local", "guide: FSDP where one GPU does not hold it; 120 GB / 8", **FULL,
        strategy="fsdp", dtype="bfloat16"),
    row("qwen2.5-14b", "8x_a100_nvlink", "local", "guide: 13B needs FSDP; 236 GB / 8", **FULL, strategy="fsdp"),
    row("llama-3.1-70b", "8x_a100_nvlink", "cloud", "arithmetic: 1130 GB of 640", **FULL, rules={"memory": "cloud"}),
]  # fmt: skip

TABLE = [*MACS, *ONE_GPU, *MANY_GPUS_AND_NONE, *ASKED, *WHOLE]


@cache
def _plan_of(number: int) -> dict[str, Any]:
    """Of this row of the table, made once for the tests that read it."""
    return _plan(TABLE[number])


def _plan(row: Row) -> dict[str, Any]:
    said = {("where" if key == "where_asked" else key): value for key, value in row.said.items()}
    return decided(row.model, row.machine, **said)


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[str(row) for row in TABLE])
def test_where_it_trains(number: int) -> None:
    row, plan = TABLE[number], _plan_of(number)
    why = {reason["rule"]: reason["because"] for reason in plan["reasons"]}
    assert plan["where"] == row.where, (row.source, why)
    said = says(plan)
    assert {rule: said.get(rule) for rule in row.rules} == row.rules, (row.source, why)
    assert tuple(blocker["code"] for blocker in plan["blockers"]) == row.blockers, (row.source, plan["blockers"])
    placed = plan["placement"]
    assert row.dtype in (None, placed["dtype"]), row.source
    assert row.strategy in (None, placed["strategy"]), row.source
    assert row.split in (None, split(plan)), row.source


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.torture) for first in (1, 2))])
def test_the_same_facts_give_the_same_plan(first: int) -> None:
    """Every third row in `make test`, and the rest in the walks."""
    for number, row in list(enumerate(TABLE))[first::3]:
        assert _plan(row) == _plan_of(number), row


def test_every_rule_has_its_figure_and_its_source() -> None:
    """A figure unless what is compared has none, such as the kind of a model, or is unknown, which decides nothing."""
    without = {"vision", "4-bit", "intel mac", "rosetta", "sensitive", "asked", "full fine-tuning"}
    rules = {"model size", "context", "memory", "time"} | without
    seen = set()
    for number, row in enumerate(TABLE):
        for reason in _plan_of(number)["reasons"]:
            assert reason["source"] and reason["because"], row
            if reason["rule"] in rules:
                seen.add(reason["rule"])
                assert reason["value"] in ("local", "cloud", "either")
                figure = any(character.isdigit() for character in reason["because"])
                unknown = reason["value"] == "either" and "unknown" in reason["because"]
                assert reason["rule"] in without or figure or unknown, (row, reason)
    assert seen == rules


@pytest.mark.parametrize("machine", ["m2_pro_16gb", "rtx_4090", "intel_mac"])
def test_sensitive_data_is_never_sent(machine: str) -> None:
    with pytest.raises(DecisionNeeded) as caught:
        decided("qwen2.5-0.5b", machine, sensitive=True, where="cloud")
    assert (caught.value.code, caught.value.exit_code) == ("sensitive", 3)
    assert "--where" in caught.value.got


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_sensitive_keeps_every_decision_here(row: Row) -> None:
    plan = _plan(dataclasses.replace(row, said={k: v for k, v in row.said.items() if k != "where_asked"} | SENSITIVE))
    assert (plan["where"], plan["flavor"], plan["placement"]["backend"]) == ("local", None, "local")
    assert plan["policy"]["sensitive"] is True


@pytest.mark.parametrize(
    ("model", "machine", "where", "against"),
    [
        ("qwen2.5-7b", "m4_max_128gb", "local", "against model size"),
        ("qwen2.5-7b", "m2_pro_16gb", "local", "against model size, memory"),
        ("qwen2.5-0.5b", "intel_mac", "local", "against intel mac"),
        ("qwen2.5-0.5b", "m2_pro_16gb", "cloud", "against model size, context, memory, time"),
        ("qwen2.5-0.5b", "m2_pro_16gb", "local", "the rules say the same"),
        ("qwen2.5-7b", "m2_pro_16gb", "cloud", "the rules say the same"),
    ],
)
def test_what_is_asked_for_says_what_it_overrode(model: str, machine: str, where: str, against: str) -> None:
    plan = decided(model, machine, where=where)
    assert plan["where"] == where
    (because,) = [reason["because"] for reason in plan["reasons"] if reason["rule"] == "asked"]
    assert because.startswith(f"--where {where}") and because.endswith(against)


def test_nccl_over_pcie_is_set_as_the_guide_says() -> None:
    """Hardware Guide, "NCCL Tuning for PCIe Topology". NCCL_SOCKET_IFNAME=eth0 is left out: launch.py says why."""
    plan = decided("qwen2.5-7b", "8x_l40s")
    environment = plan["launch"]["environment"]
    guide = {"P2P_DISABLE": "0", "IB_DISABLE": "1", "DEBUG": "WARN", "ALGO": "Ring", "BUFFSIZE": "16777216"}
    assert {name: environment.get(f"NCCL_{name}") for name in guide} == guide
    assert "--multi_gpu" in plan["launch"]["arguments"]
    nvlink = decided("qwen2.5-7b", "8x_a100_nvlink")["launch"]["environment"]
    assert {name for name in nvlink if name.startswith("NCCL")} == {"NCCL_DEBUG"}


def test_the_effective_batch_is_the_same_everywhere() -> None:
    """Seed "From MacBook to Cloud": the effective batch stays 16 on every device."""
    for number, row in enumerate(TABLE):
        rows, accumulation, processes = split(_plan_of(number))
        assert rows * accumulation * processes == 16, row


def test_70b_in_4_bit_needs_what_the_guide_says() -> None:
    """Hardware Guide: "Llama 3 70B + bitsandbytes 4-bit + LoRA, typical: 42-48 GB". With 64 GB free, a
    third more, it is frugal."""
    plan = decided("llama-3.1-70b", "a100_80gb", load_in_4bit=True, free=64e9)
    assert (plan["where"], plan["placement"]["gradient_checkpointing"]) == ("local", True)
    memory = plan["estimates"]["memory_bytes"]
    assert memory["high"] >= 42e9 and memory["low"] <= 48e9


@pytest.mark.parametrize(
    ("chip", "capability", "where"),
    [("Tesla P100-PCIE-16GB", 6.0, "cloud"), ("Tesla V100-SXM2-16GB", 7.0, "cloud"), ("Tesla T4", 7.5, "local")],
)
def test_a_gpu_that_torch_has_no_kernels_for(chip: str, capability: float, where: str) -> None:
    """RELEASE.md of PyTorch: its builds of CUDA 13 begin with Turing, 7.5. `--where local` is for another build."""
    machine = msgspec.structs.replace(recorded_machine("t4"), chip=chip, compute_capability=capability)
    plan = decided("qwen2.5-0.5b", machine)
    assert (plan["where"], says(plan).get("old gpu")) == (where, "cloud" if where == "cloud" else None)
    assert decided("qwen2.5-0.5b", machine, where="local")["blockers"] == []


def test_what_of_the_shape_is_unknown_is_named_once() -> None:
    silent = model_config.read({"model_type": "qwen2", "num_hidden_layers": 24}, source="me/silent")
    plan = decided(silent, "rtx_4090", target_modules=["q_proj"])
    missing = (
        "parameters: config.json leaves out a size that the arithmetic needs; hidden_size: config.json does not say"
    )
    shape = f"the model's shape is unknown: {missing}; vocab_size: config.json does not say"
    assert plan["estimates"]["seconds"]["basis"] == shape
    assert [reason["because"] for reason in plan["reasons"] if reason["rule"] == "time"] == [shape]


def test_what_is_unknown_decides_nothing() -> None:
    """A model without a shape and a chip without a published speed: no figure is made up, and nothing is blocked
    because of it but the memory."""
    shapeless = msgspec.structs.replace(
        recorded_model("qwen2.5-0.5b"), parameters=None, layers=None, unknown={"parameters": "no config arithmetic"}
    )
    plan = decided(shapeless, "m2_pro_16gb")
    assert {rule: says(plan)[rule] for rule in ("model size", "memory", "time")} == dict.fromkeys(
        ("model size", "memory", "time"), "either"
    )
    assert [blocker["code"] for blocker in plan["blockers"]] == ["unknown_memory"]
    laptop = msgspec.structs.replace(recorded_machine("rtx_4090"), chip="NVIDIA GeForce RTX 4090 Laptop GPU")
    plan = decided("qwen2.5-0.5b", laptop)
    assert (plan["where"], says(plan)["time"], plan["estimates"]["seconds"]["low"]) == ("local", "either", None)


def test_the_way_out_of_a_blocked_plan_is_one() -> None:
    """No cloud for sensitive data, and none for a plan that is for the cloud already."""
    here = {"where": "local"}
    way = "or in the cloud: plan with --where cloud, then submit"  # `local` has no such option
    assert way in blocked(decided_plan("qwen2.5-7b", "m2_pro_16gb", **here)).hint
    assert "cloud" not in blocked(decided_plan("qwen2.5-7b", "m2_pro_16gb", sensitive=True)).hint
    rented = blocked(decided_plan("qwen2.5-14b", "m2_pro_16gb", flavor="t4-small", where="cloud"))
    assert "a larger flavor" in rented.hint and "--where" not in rented.hint


@pytest.mark.parametrize(
    ("longest", "counted", "said"),
    [(162, False, "162 tokens (estimated from bytes), "), (105, True, "105 tokens, "), (4000, False, "1024 tokens, ")],
)
def test_a_bound_on_the_rows_says_whether_it_was_counted(longest: int, counted: bool, said: str) -> None:
    """A row that is cut has as many tokens as the limit, whoever counts."""
    here: Any = SimpleNamespace(fit=SimpleNamespace(step=SimpleNamespace(length=longest)))
    assert said in rubric._length(1024, here, counted).because


def test_a_slow_file_writes_more_than_no_token() -> None:
    files = decided("gemma-2-27b", "m1_8gb", max_length=131_072)["estimates"]["files"]
    speed = next(file["tokens_per_second"] for file in files if file["quant"] == "f16")
    assert 0.3 < speed["low"] < 0.6 < speed["high"] < 1.5  # 54 GB at 68 GB/s, and a cache of half as much
