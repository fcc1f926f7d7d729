"""The step that converts an adapter alone to a GGUF file, which is loaded beside the base model's GGUF file.

llama.cpp's converter accepts adapters that llama.cpp then applies wrongly, or on which it crashes. A file has only one
alpha, and the scale is alpha / rank. llama.cpp applies only pairs of matrices on layers that it knows. An adapter that
would not be applied exactly is refused here, with the name of the part.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import digests
from skill_train.core.errors import UsageError
from skill_train.core.files import require_writable, whole_file
from skill_train.core.memory import peak_memory_bytes
from skill_train.facts import JsonObject
from skill_train.gguf.convert import refuse_existing
from skill_train.llama import run_converter
from skill_train.llama.get_converter import Toolchain
from skill_train.llama.gguf_header import read_gguf
from skill_train.model.adapter import CONFIG, WEIGHTS, Adapter, pattern_value, read_adapter, why_not_streamed
from skill_train.model.new_tokens import new_tokens
from skill_train.run import records
from skill_train.run.export_record import ExportReason, ExportRecord, exported_file
from skill_train.run.folder import StepResult, finished_record, note_of, require_space, versions
from skill_train.run.records import read_json

_WHAT = {
    "magnitude": "DoRA",
    "b_bias": "a bias of its own (lora_bias)",
    "embedding_a": "LoRA on an embedding, which llama.cpp cannot apply",
    "embedding_b": "LoRA on an embedding, which llama.cpp cannot apply",
    "token_rows": "trained token rows",
}
# Matrices of latent attention, as in DeepSeek, which llama.cpp (0.3.36) multiplies by without their adapters.
_LEFT_OUT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
_LARGEST = 65504.0  # the largest number of an f16


@dataclass(frozen=True)
class AdapterExportRequest:
    """An adapter, and the GGUF file to make of it."""

    base: Path  # the base model's folder; its weights are not read
    adapter: Path
    out: Path
    record: Path
    name: str
    outtype: str  # `f32`, `f16`, `bf16` or `q8_0`
    toolchain: Toolchain

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}-lora-{self.outtype}.gguf"


def export_lora(request: AdapterExportRequest, *, progress: Bar, warn: Warn) -> StepResult[ExportRecord]:
    """Writes `request.file`.

    Raises:
        UsageError: the folder has no adapter, or llama.cpp cannot apply it exactly; the message names the part.
    """
    started = time.monotonic()
    read = read_adapter(request.adapter)
    alpha, reason = _check_convertible(read, request.base)
    run_converter.warn_of_window(request.base, warn)
    inputs = digests(request.adapter, [request.adapter / CONFIG, request.adapter / WEIGHTS]) | digests(
        request.base, [request.base / "config.json"]
    )
    options = {"name": request.name, "outtype": request.outtype}
    note = note_of(request.file, request.record)
    done = finished_record(request.record, ExportRecord, inputs=inputs, options=options, result=request.file)
    if done is not None:
        return StepResult(done, reused=True)
    refuse_existing(request.file, request.record)
    require_writable(request.out)
    require_space(request.out, 2 * (request.adapter / WEIGHTS).stat().st_size, "the adapter's GGUF file")
    with (
        whole_file(request.file) as part,
        run_converter.without_code(request.base) as base,
        run_converter.without_code(request.adapter, lora_alpha=alpha) as view,
    ):
        try:
            run_converter.run(
                request.toolchain,
                [str(view), "--base", str(base), "--outfile", str(part.resolve()), "--outtype", request.outtype],
                model=request.adapter,
                on_percent=lambda percent: progress(percent / 100, 1, "written"),
                script="convert_lora_to_gguf.py",
            )
        except UsageError as error:
            if error.code != "not_convertible":
                raise
            raise _refused([f"its converter fails: {error.got}"]) from error
        tensors = len(_pairs(part, read))
        output = exported_file(part, request.outtype)
        record = ExportRecord(
            step=request.record.stem,
            inputs=inputs,
            options=options,
            outputs={str(request.file.relative_to(request.record.parent)): output},
            figures={"tensors": tensors, "modules": len(read.modules), "alpha": alpha},
            reasons=[ExportReason("alpha", reason, CONFIG)],
            versions=versions("llama-cpp-python", "torch", "transformers"),
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak_memory_bytes(children=True),
            finished_at=records.timestamp(),
        )
        records.write(note, record)
    os.replace(note, request.record)
    return StepResult(record)


def _pairs(file: Path, adapter: Adapter) -> list[str]:
    """The names of the tensors in the file. Refuses anything but pairs of A and B: for some families the converter
    writes the weights of the base instead."""
    names = list(read_gguf(file).tensors)
    if len(names) < 2 * len(adapter.modules) or not all(name.endswith((".lora_a", ".lora_b")) for name in names):
        raise _refused([f"llama.cpp's converter wrote something else: {len(names)} tensors, such as {names[:1]}"])
    return names


def _problems(adapter: Adapter, base_config: JsonObject) -> list[str]:
    """The parts of the adapter that llama.cpp cannot apply exactly; empty if it can apply all of them."""
    reasons = why_not_streamed(adapter)
    if adapter.config.get("fan_in_fan_out"):
        reasons.append("its layers are transposed (fan_in_fan_out, as in GPT-2): llama.cpp aborts on the result")
    reasons += [
        f"{name} is stored whole (modules_to_save, a bias or an embedding)" for name in sorted(adapter.replaced)
    ]
    for module, parts in sorted(adapter.modules.items()):
        leaf = module.rpartition(".")[2]
        reasons += sorted({f"{module} has {_WHAT[kind]}" for kind in parts if kind in _WHAT})
        reasons += _unlike_config(adapter, module)
        if leaf == "lm_head" and base_config.get("tie_word_embeddings"):
            reasons.append(f"{module} is tied to the embedding in the base model: llama.cpp crashes on the result")
        if leaf in _LEFT_OUT:
            reasons.append(f"{module}: llama.cpp multiplies by it without its adapter")
    if len(_alphas(adapter)) > 1:
        reasons.append(
            "its layers have different scales, and a file holds one alpha: "
            + ", ".join(f"alpha {alpha:g} in {module}" for alpha, module in sorted(_alphas(adapter).items()))
        )
    return reasons


def _unlike_config(adapter: Adapter, module: str) -> list[str]:
    """How a module's A and B matrices differ from the adapter's config. PEFT would compute something else with them."""
    parts, config = adapter.modules[module], adapter.config
    expected = {"a", "b", *(["magnitude"] if config.get("use_dora") else [])}
    if "a" not in parts and "b" not in parts:
        return []
    reasons = [f"{module} lacks its {kind}" for kind in sorted(expected - parts.keys())]
    rank, alpha = (
        pattern_value(config[pattern], module, config[name])
        for pattern, name in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if "a" in parts and adapter.tensors[parts["a"]].shape[0] != rank:
        reasons.append(f"{module} has rank {adapter.tensors[parts['a']].shape[0]}, the config says {rank}")
    matrices = (adapter.tensor(parts[kind]).float() for kind in "ab" if kind in parts)
    if not all(bool((matrix.abs() <= _LARGEST).all()) for matrix in matrices):
        reasons.append(f"{module} has a number that an f16 does not hold, or that is not finite")
    if not alpha or not math.isfinite(alpha):
        reasons.append(f"alpha is {alpha} in {module}: llama.cpp needs a number other than 0")
    return reasons


def _check_convertible(adapter: Adapter, base: Path) -> tuple[float, str]:
    """The alpha for the file, and the reason for it. Refuses an adapter that llama.cpp cannot apply exactly."""
    reasons = _problems(adapter, read_json(base / "config.json"))
    if not adapter.modules:
        reasons.append("it has no LoRA matrices")
    if new := new_tokens(base, adapter.folder):
        some = ", ".join(repr(text) for text in list(new.values())[:3])
        reasons.append(f"its tokenizer adds {len(new)} tokens ({some}), which the base's GGUF file lacks")
    if reasons:
        raise _refused(reasons)
    (alpha,) = _alphas(adapter)
    written = float(adapter.config["lora_alpha"])
    if math.isclose(alpha, written):
        return alpha, f"alpha {alpha:g}, as trained"
    return alpha, f"alpha {alpha:g} instead of {written:g}: llama.cpp scales by alpha / rank, the adapter otherwise"


def _refused(reasons: list[str]) -> UsageError:
    return UsageError(
        f"llama.cpp cannot apply this adapter exactly: {reasons[0]}"
        + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""),
        code="not_convertible",
        expected="LoRA matrices on attention and MLP layers, with one scale",
        got="; ".join(reasons[:8]),
        hint="merge it instead: skill-train merge RUN, then skill-train export-gguf RUN",
    )


def _alphas(adapter: Adapter) -> dict[float, str]:
    """Each alpha that makes llama.cpp's scale, alpha / rank, equal to PEFT's, with one module that needs it.

    PEFT's scale is alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732).
    """
    needed: dict[float, str] = {}
    for module, parts in adapter.modules.items():
        if "a" not in parts:
            continue
        rank = adapter.tensors[parts["a"]].shape[0]
        alpha = float(pattern_value(adapter.config["alpha_pattern"], module, adapter.config["lora_alpha"]))
        needed.setdefault(round(alpha * math.sqrt(rank) if adapter.config.get("use_rslora") else alpha, 9), module)
    return needed
