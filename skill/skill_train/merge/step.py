"""The step `merge`: base + adapter → one model in the base's own files.

The weights are streamed from the base's shards into new ones with the same names, a block of rows at a time. The
adapter's change is computed in fp32 (`model/lora_math.py`, `merge/plan.py`). Unchanged tensors and all other files are
copied byte for byte. An adapter that cannot be streamed is merged by PEFT, and the record says why. A gate compares the
result with base + adapter before it gets its name: the weights (`check_weights`), and the answers of a model that is
small enough to run twice (`check_logits`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import digests
from skill_train.core.errors import UsageError, not_installed, quoted, refusals
from skill_train.core.files import require_writable, whole_folder
from skill_train.core.memory import peak_memory_bytes
from skill_train.core.units import gigabytes
from skill_train.facts import JsonObject
from skill_train.machine.limits import require_room_for_torch
from skill_train.merge import check_logits, check_weights, with_peft
from skill_train.merge.judge import judge
from skill_train.merge.plan import Base, MergePlan, plan_merge, vocabulary_rows
from skill_train.merge.vision import as_stored, with_names
from skill_train.merge.write import Target, computing_threads, planned_bytes, write_shards
from skill_train.model import adapter as adapters
from skill_train.model.adapter import Adapter
from skill_train.model.config import is_vision
from skill_train.model.families import ANSWERS_UP_TO
from skill_train.model.folder import read_config
from skill_train.model.new_tokens import TOKENIZER, require_rows
from skill_train.model.sidecar_files import adapter_files, companion_files, copy_companions, write_config
from skill_train.model.weight_files import Shard, read_folder
from skill_train.program.folders.base import add_stops
from skill_train.program.model_files import INDEX
from skill_train.program.pictures.tokens import PixelLimits, write_limits
from skill_train.reference.causal_types import causal_model_types, require_known_type
from skill_train.reference.checkpoint_names import empty_model, unknown_parameters
from skill_train.reference.load import NotLoaded
from skill_train.reference.low_memory import peak_bytes
from skill_train.run import records
from skill_train.run.folder import StepResult, finished_record, note_of, require_only, require_space, versions
from skill_train.run.merge_record import Changes, Gate, MergeInputs, MergeRecord, MergeSettings
from skill_train.run.train_record import FedRow

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class MergeRequest:
    """What to merge, where to write it, and how to check it."""

    # base, adapter: the folders of the full-precision base model and of the PEFT adapter
    base: Path
    adapter: Path
    out: Path
    record: Path  # the path of `merge.json`; `out` is in its folder or is its folder
    rows: Sequence[FedRow]  # texts for the gate; may be empty
    dtype: str | None  # `float32`, `float16` or `bfloat16` for every weight; None keeps the base's types
    # `weights`, `answers` (logits, in fp32) or `auto`: weights if they can be compared, answers of small models
    gate: str = "auto"
    # limits of a picture's size in the training; they are written to the files of the image processor
    limits: PixelLimits = PixelLimits(None, None)
    stops: Sequence[int] = ()  # tokens that end the answers of the training; they go into generation_config.json


def merge(request: MergeRequest, *, progress: Bar, warn: Warn) -> StepResult[MergeRecord]:
    """Writes the merged model to `out`.

    Raises:
        UsageError: base and adapter cannot be merged, or `out` holds something else.
        DecisionNeeded: there is not enough disk, or no address space for torch.
        VerificationFailed: the gate failed, or a weight is not finite. `out` is then not written. `merge.failed.json`
            has the figures of a failed gate.
    """
    started = time.monotonic()
    tuned = adapters.read_adapter(request.adapter)
    model = _read_base(request.base, tuned, request.out)
    options = _settings(request)
    if done := _earlier(request.record, request.out, model, tuned, options):
        return StepResult(done, reused=True)
    require_writable(request.out.parent)
    with _digesting(model, tuned) as inputs:
        planned = _fitting_plan(model, tuned)
        if lacks := with_peft.left_out(planned.base, planned.adapter):
            names = f"the adapter's file lacks {len(lacks)} weights that its config names, such as {lacks[0]}"
            warn("incomplete_adapter", f"{names}: the base stays there")
        ways = _ways(request.gate, planned)
        need = planned_bytes(planned.base, planned.plan, DTYPES[request.dtype] if request.dtype else None)
        require_space(request.out.parent, need, "the merged model")
        with whole_folder(request.out) as part:
            changes, comparison = _write(planned, part, request.dtype, progress, warn, weights=ways.weights)
            if limited := write_limits(part, str(read_config(part).get("model_type")), request.limits):
                changes["processor"] = limited
            with refusals():
                if added := add_stops(part, request.stops):
                    changes["stops"] = added
            gate_request = check_logits.GateRequest(
                base=request.base,
                adapter=request.adapter,
                merged=part,
                rows=request.rows,
                task=planned.base.task,
                names=planned.base.names,
                pictures=is_vision(planned.base.config),
            )
            result = MergeRecord(
                step=request.record.stem,
                inputs=inputs.result(),
                options=options,
                how="peft" if planned.reasons else "streamed",
                reasons=planned.reasons,
                changes=changes,
                gate=_gate(ways, comparison, changes, partial(check_logits.gate, gate_request, bar=progress), warn),
                versions=versions("torch", "transformers", "peft", "safetensors"),
                seconds=round(time.monotonic() - started, 2),
                peak_memory_bytes=peak_memory_bytes(),
                outputs={},
            )
            judge(result, request.record, request.out, warn)
            result = _noted(result, part, request.out, request.record)
    os.replace(note_of(request.out, request.record), request.record)
    return StepResult(result)


def _settings(request: MergeRequest) -> MergeSettings:
    least, most = (msgspec.UNSET if limit is None else limit for limit in request.limits)
    gate = msgspec.UNSET if request.gate == "auto" else request.gate
    return MergeSettings(request.dtype, None, gate, least, most, list(request.stops) or msgspec.UNSET)


def _earlier(record: Path, out: Path, base: Base, adapter: Adapter, options: MergeSettings) -> MergeRecord | None:
    """The result of `finished_record`, which needs digests of all inputs. Skips them if there is no record or note."""
    if not record.is_file() and not note_of(out, record).is_file():
        return None
    named = records.read(record, MergeRecord).outputs if record.is_file() else {}
    other = next((name for name in named if (record.parent / name).parent.name != out.name), None)
    if other is not None:
        raise UsageError(
            f"{record} describes another folder than {out}",
            code="output_exists",
            expected=f"a record of files in {out.name}",
            got=other,
            hint=f"move {quoted(record)} and {quoted(out)} away, or use another --out",
        )
    earlier = finished_record(record, MergeRecord, inputs=_inputs(base, adapter), options=options, result=out)
    if earlier is not None:
        require_only(out, (record.parent / name for name in earlier.outputs), record)
    return earlier


def _noted(result: MergeRecord, part: Path, out: Path, record: Path) -> MergeRecord:
    """The record with its files. It is also written as a note that counts until the files have their final names."""
    outputs = {str(out.relative_to(record.parent) / name): digest for name, digest in digests(part).items()}
    result = msgspec.structs.replace(result, outputs=outputs, finished_at=records.timestamp())
    records.write(note_of(out, record), result)
    return result


@dataclass(frozen=True)
class _Ways:
    """What the gate compares: the weights, the answers or both."""

    weights: bool
    no_answers: str  # why it does not compare the answers; empty if it does
    must_ask: bool = False  # the user requested the answers, so the weights alone are not enough


def _ways(gate: str, planned: _Planned) -> _Ways:
    base, adapter = planned.base, planned.adapter
    blind = check_weights.why_not(base, adapter, planned.reasons)
    if gate == "weights" and blind:
        raise UsageError(
            f"this merge cannot be checked by its weights alone: {blind}",
            code="bad_usage",
            expected="a LoRA of A and B on linear layers",
            got=blind,
            hint="run the same command with --gate answers",
        )
    count = sum(stored.elements for stored in base.tensors.values())
    if gate == "answers" or blind or (gate == "auto" and count <= ANSWERS_UP_TO):
        return _Ways(not blind, "", must_ask=gate == "answers")
    size = f"running the model takes {gigabytes(peak_bytes(base.folder, adapter.folder))}"
    return _Ways(True, f"{size}; `verify` compares the answers of each exported file, and --gate answers does it here")


def _gate(
    ways: _Ways, comparison: check_weights.WeightComparison, changes: Changes, ask: Callable[..., Gate], warn: Warn
) -> Gate:
    """The outcome for the answers, with the outcome for the weights inside; or the outcome for the weights alone.

    Args:
        ask: `check_logits.gate` for these models and texts.
    """
    kept_share, stored = changes.get("kept_after_rounding"), changes["stored_dtype"]
    weights = check_weights.outcome(comparison, stored=stored, kept_share=kept_share) if ways.weights else None
    if weights is not None and (ways.no_answers or weights["failures"]):
        return {**weights, "no_answers": ways.no_answers or "the weights are wrong already"}
    started = time.monotonic()
    tokens = check_logits.MAX_TOKENS if weights is None else check_logits.ENOUGH_TOKENS
    try:
        outcome = ask(stored=stored, kept_share=kept_share, tokens=tokens)
    except NotLoaded as unloaded:
        if weights is None or ways.must_ask:
            raise
        warn("weights_alone", f"only the weights of the merged model were compared: {unloaded.message}")
        return {**weights, "no_answers": unloaded.message}
    seconds = round(time.monotonic() - started, 2)
    return {**outcome, "by": "answers", "weights": weights, "seconds": seconds}


def _read_base(folder: Path, adapter: Adapter, out: Path) -> Base:
    """The base's config and weight headers.

    Raises:
        UsageError: the folder is an adapter or a quantized model, transformers does not know its type, or it has no
            safetensors weights.
    """
    if (folder / adapters.CONFIG).is_file():
        raise UsageError(
            f"{folder} is an adapter, not a base model",
            code="not_a_model",
            expected="a folder with the whole model",
            got=f"{adapters.CONFIG} in it",
            hint=f"skill-train merge --base BASE --adapter {quoted(folder)} --out {quoted(out)}",
        )
    config = read_config(folder)
    _refuse_quantized(folder, config, adapter, out)
    if causal_model_types() is None:
        raise not_installed("transformers", "train")
    require_known_type(folder, str(config.get("model_type")), vision=is_vision(config))  # the gate runs no foreign code
    return Base(folder, config, read_folder(folder))


def _refuse_quantized(folder: Path, config: JsonObject, adapter: Adapter, out: Path) -> None:
    """Refuses a quantized base, because a change cannot be added to packed integers."""
    levels = [level for level in (config, config.get("text_config")) if isinstance(level, dict)]
    quantization = next((q for level in levels if isinstance(q := level.get("quantization_config"), dict)), None)
    if quantization is None:
        return
    names = (adapter.config.get("base_model_name_or_path"), config.get("_name_or_path"))
    way = next(
        (name for name in names if isinstance(name, str) and name not in ("", str(folder))), "FULL_PRECISION_BASE"
    )
    method = quantization.get("quant_method", "unknown method")
    raise UsageError(
        f"{folder} is quantized ({method}); an adapter merges into full precision",
        code="quantized_base",
        expected="the float32, float16 or bfloat16 model that it was quantized from",
        got=f"quantization_config in {folder / 'config.json'}",
        hint=shlex.join(["skill-train", "merge", "--base", way, "--adapter", str(adapter.folder), "--out", str(out)]),
    )


@contextlib.contextmanager
def _digesting(base: Base, adapter: Adapter) -> Iterator[Future[MergeInputs]]:
    """Computes `_inputs` in a thread while torch is imported and the model is written. Any exception stops the
    thread."""
    abandoned = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(_inputs, base, adapter, abandoned.is_set)
        except BaseException:
            abandoned.set()
            raise


def _inputs(base: Base, adapter: Adapter, unwanted: Callable[[], bool] = lambda: False) -> MergeInputs:
    """The digests of everything that determines the result: all files that are read or copied."""
    weights = [base.folder / shard.name for shard in base.shards]
    index = [base.folder / INDEX] if (base.folder / INDEX).is_file() else []
    read = [adapter.folder / adapters.CONFIG, adapter.folder / adapters.WEIGHTS, *adapter_files(adapter.folder)]
    return MergeInputs(
        base=digests(base.folder, [*companion_files(base.folder), *weights, *index], unwanted),
        adapter=digests(adapter.folder, read, unwanted),
    )


@dataclass(frozen=True)
class _Planned:
    """How an adapter is merged into a base. The plan is empty if PEFT has to merge; `reasons` say why."""

    base: Base
    adapter: Adapter
    plan: MergePlan
    reasons: list[str]


def _fitting_plan(base: Base, adapter: Adapter) -> _Planned:
    """The result of `_plan`. Refuses a tokenizer beside the adapter that does not fit the rows of the merged model."""
    require_room_for_torch()
    base = with_names(base, adapter)
    adapter = as_stored(adapter, base)
    plan, reasons = _plan(base, adapter)
    rows, whole, fewer = vocabulary_rows(base, adapter)
    require_rows(base.folder, adapter.folder, rows, trained_whole=whole, fewer=fewer)
    return _Planned(base, adapter, plan, reasons)


def _plan(base: Base, adapter: Adapter) -> tuple[MergePlan, list[str]]:
    """The plan, and the reasons not to stream it.

    Raises:
        UsageError: the model has no place for an adapter tensor, which the message names.
    """
    reasons = adapters.why_not_streamed(adapter)
    if reasons:
        return MergePlan(), reasons
    plan = plan_merge(base, adapter)
    if plan.ambiguous:
        return MergePlan(), ["the adapter's names fit the checkpoint's in more than one way"]
    if not plan.unmatched:
        return plan, []
    unknown = unknown_parameters(empty_model(base.folder, base.task), plan.unmatched)
    if unknown and all(plan.unmatched[name].endswith(".lora_B.bias") for name in unknown):
        raise adapters.bad_adapter(
            f"{adapter.folder} cannot be merged: its lora_bias has no place in this base",
            expected=f"a base with {unknown[0]}",
            got=f"{len(unknown)} trained biases of layers without a bias",
            hint="keep the adapter beside the base model instead of merging",
        )
    if unknown:
        raise UsageError(
            f"the adapter's tensor {plan.unmatched[unknown[0]]!r} matches nothing in {base.folder}",
            code="wrong_base",
            expected=f"a base model with {unknown[0]}",
            got=f"{len(unknown)} of the adapter's modules are not in this model",
            hint="use the base model that the adapter was trained on "
            f"({adapter.config.get('base_model_name_or_path') or 'adapter_config.json does not name it'})",
        )
    return MergePlan(), [f"the checkpoint stores {next(iter(plan.unmatched))} under another name"]


def _write(
    planned: _Planned, part: Path, dtype: str | None, progress: Bar, warn: Warn, *, weights: bool
) -> tuple[Changes, check_weights.WeightComparison]:
    """Fills `part`; returns the changes, and the result of comparing the weights if `weights` is set."""
    base, adapter, comparison = planned.base, planned.adapter, check_weights.WeightComparison()
    if planned.reasons:
        stored = DTYPES[dtype] if dtype else _main_dtype(base)
        torch_name = next(name for name, code in DTYPES.items() if code == stored)
        config = with_peft.merge_with_peft(base.folder, adapter.folder, part, torch_name, warn, base.task)
        changes: Changes = {"stored_dtype": stored}
    else:
        config, kind = planned.plan.config, DTYPES[dtype] if dtype else None
        scales = check_weights.scales_of(adapter, list(base.tensors)) if weights else {}

        with computing_threads() as pool:

            def compare(shard: Shard, written: Path, names: list[str]) -> None:
                if weights:
                    comparison.add(check_weights.compare_tensors(names, shard, written, adapter, scales, pool))

            changes = write_shards(base, planned.plan, Target(part, kind), progress, pool, compare).changes()
    changes["from_adapter"] = copy_companions(base.folder, adapter.folder, part, warn)
    changes["config"] = write_config(base.folder, part, config, dtype)
    tokenizer = {*changes["from_adapter"]} & {*TOKENIZER} or (adapter.folder / "tokenizer.json").is_file()
    if "vocab_size" in changes["config"] and not tokenizer:
        lacks = "the adapter resizes the vocabulary, but its folder has no tokenizer.json for it"
        warn("resized_without_tokenizer", lacks)
    return changes, comparison


def _main_dtype(base: Base) -> str:
    """The float type of most of the base's bytes, among the types in which a whole model can be written."""
    sizes = dict.fromkeys(DTYPES.values(), 0)
    for stored in base.tensors.values():
        if stored.dtype in sizes:
            sizes[stored.dtype] += stored.size
    return max(sizes, key=lambda dtype: sizes[dtype])
