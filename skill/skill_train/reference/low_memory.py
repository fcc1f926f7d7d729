"""Runs a reference in half of the memory: weights keep their stored type, and each is converted to fp32 when used.

A 16-bit weight is the same number in fp32, so every sum equals the sum of a model in fp32 to the last bit (tested for
each family in `KEPT_IN_16_BITS`). The weights are a memory map of the file: nothing is read twice, and the system may
drop pages if it needs memory. With 494M weights `verify` peaks at 2.2 GB, and at 3.3 GB with the reference in fp32.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from skill_train.model.adapter import read_adapter, why_not_streamed
from skill_train.model.families import KEPT_IN_16_BITS, ROWS_AT_ONCE
from skill_train.model.weight_files import stored_tensors
from skill_train.program.model_files import INDEX, SINGLE
from skill_train.program.pictures.parts import vision_part
from skill_train.reference.checkpoint_names import TEXT, task_with
from skill_train.reference.load import library_errors, read_model, reference_model
from skill_train.run.records import read_json

_TYPES = {"BF16": "bfloat16", "F16": "float16"}
_MERGEABLE = "an adapter that PEFT adds to the weights of this base"
_TILE = 64  # a multiple of the number of rows that matrix products process at a time


@contextlib.contextmanager
def frugal_model(base: Path, adapter: Path | None = None, task: str | None = None) -> Iterator[Any]:
    """Loads a model with the same answers as `reference_model`, in half of its memory if possible. Do not change its
    weights. `merged_weights` returns them with the adapter's change."""
    task = task or task_with(base, adapter)
    dtype, room = _stored_type(base, adapter), _Room()
    whole = partial(read_model, task=task)
    read = whole if dtype is None or task != TEXT else partial(_read_as_stored, dtype=dtype, room=room)
    with reference_model(base, adapter, read) as model:
        try:
            yield model
        finally:
            room.free()  # the caller may hold the model a little longer


def is_plain(adapter: Path) -> bool:
    """Whether the adapter consists of A and B only. Then PEFT's model without it is the base, and each merged weight is
    the base's weight plus one product."""
    tuned = read_adapter(adapter)
    pairs = all(set(parts) == {"a", "b"} for parts in tuned.modules.values())
    return pairs and not tuned.replaced and not why_not_streamed(tuned)


def peak_bytes(base: Path, adapter: Path | None) -> int:
    """The bytes of the weights in `frugal_model`: all in their stored type, plus the largest part that is in fp32 at a
    time; or all in fp32."""
    shapes = [stored.shape for stored in stored_tensors(base).values()]
    count = sum(map(math.prod, shapes))
    if _stored_type(base, adapter) is None:
        return 4 * count
    return 2 * count + 4 * max(math.prod((min(shape[0], ROWS_AT_ONCE), *shape[1:])) for shape in shapes if shape)


def merged_weights(model: Any, adapter: Path | None) -> Iterator[tuple[str, partial[Any]]]:
    """The name of every tensor of a reference, and a function that returns its weight with PEFT's change. A weight that
    the adapter changes is computed on each call, in fp32; the others have their stored type. The function is a
    `partial`, and its first argument has the shape of the weight.

    An adapter that is more than A and B is merged into the model, which is then no longer base + adapter. The tower and
    the projector of a vision model are left out, because they are in another GGUF file.
    """
    if adapter is None or not is_plain(adapter):
        whole = model if adapter is None else merged(model)
        weights = whole.state_dict().items()
        yield from ((name, partial(_unchanged, weight)) for name, weight in weights if vision_part(name) == "language")
        return
    base = model.get_base_model()
    layers = {f"{name}.base_layer.weight": module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    for name, weight in base.state_dict().items():
        if ".lora_" in name or vision_part(name) != "language":
            continue
        layer = layers.get(name)
        make = partial(_unchanged, weight) if layer is None else partial(_changed, weight, layer)
        yield name.replace(".base_layer.", "."), make


def merged(model: Any) -> Any:
    """Merges the adapter with PEFT. In a tied model, embedding and head share one matrix. PEFT (0.21) would merge the
    change of one of them into the shared matrix, so each of them gets its own matrix first."""
    import torch

    base = model.get_base_model()
    wrapped = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    layers = [getattr(end, "token_adapter", end) for end in wrapped]  # `token_adapter` if single rows were trained
    ends = [end.get_base_layer() if hasattr(end, "get_base_layer") else end for end in layers]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    tied = tied and "weight" in dict(ends[1].named_parameters(recurse=False))  # not one copy of both, trained whole
    if tied:
        ends[1].weight = torch.nn.Parameter(ends[0].weight.detach().clone(), requires_grad=False)
    whole = _unloaded(model)
    if tied:
        first, last = whole.get_input_embeddings(), whole.get_output_embeddings()
        same = torch.equal(first.weight, last.weight)
        last.weight = first.weight if same else last.weight
        for config in (whole.config, whole.config.get_text_config()):
            config.tie_word_embeddings = same
    return whole


def _unloaded(model: Any) -> Any:
    """PEFT's own merge. Its warning that embedding and head are no longer tied is hidden, because that is intended:
    `merge` writes it to config.json and reports it, and a reference needs no config."""
    hint = "keep the adapter beside the base model instead of merging"
    with warnings.catch_warnings(), library_errors("PEFT cannot merge the adapter", _MERGEABLE, "bad_adapter", hint):
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        whole = model.merge_and_unload()
        for name, module in list(whole.named_modules()):
            if hasattr(module, "unload_and_optionally_merge_module"):  # left by LN tuning (peft 0.21): trained whole
                bare = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
                whole.set_submodule(name, bare)
        return whole


def _unchanged(weight: Any) -> Any:
    return weight


def _changed(weight: Any, layer: Any) -> Any:
    return layer.get_delta_weight("default").detach().add_(weight)  # a new tensor, in fp32


def _stored_type(folder: Path, adapter: Path | None) -> str | None:
    """The 16-bit type of all tensors. None if a tensor has another type, if the adapter is more than A and B, or if the
    family is not known to give the same answers."""
    if adapter is not None and not is_plain(adapter):
        return None
    if read_json(folder / "config.json").get("model_type") not in KEPT_IN_16_BITS:
        return None
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():  # transformers reads the first, we read the second
        return None
    types = {stored.dtype for stored in stored_tensors(folder).values()}
    return _TYPES.get(types.pop()) if len(types) == 1 else None


def _read_as_stored(base: Path, dtype: str, room: _Room) -> Any:
    """The model of a folder, whose linear layers and embeddings convert their weights to fp32 when they are used."""
    model = read_model(base, dtype)
    from torch import nn

    wide_linear = _wide_linear()
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            # Sets the class, because a `forward` in the module would be a reference cycle, which only gc would free.
            module.__class__, module.room = wide_linear, room
        elif type(module) is nn.Embedding:
            module.register_forward_hook(_as_fp32)
        else:  # norms and all other modules: small, or unknown
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return model


def _as_fp32(module: Any, inputs: Any, output: Any) -> Any:
    return output.float()


class _Room:
    """Memory for one weight in fp32, reused for the next one, because new pages would cost as much as the product."""

    def __init__(self) -> None:
        self._memory: Any = ()

    def wide(self, weight: Any) -> Any:
        import torch

        count = weight.numel()
        if len(self._memory) < count:
            self._memory = torch.empty(count)
        return self._memory[:count].view(weight.shape).copy_(weight)

    def free(self) -> None:
        self._memory = ()


def parts_of(rows: int) -> list[slice]:
    """Slices of at most about `ROWS_AT_ONCE` rows and of about equal size. With few rows in a slice, products would be
    summed in another order."""
    step = _TILE * math.ceil(rows / math.ceil(rows / ROWS_AT_ONCE) / _TILE)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


@cache
def _wide_linear() -> Any:
    import torch
    from torch import nn

    class WideLinear(nn.Linear):  # type: ignore[misc]
        room: _Room

        def forward(self, input: Any) -> Any:
            bias = None if self.bias is None else self.bias.float()
            if self.out_features > ROWS_AT_ONCE:
                return self.in_parts(input, bias)
            return nn.functional.linear(input, self.room.wide(self.weight), bias)

        def in_parts(self, input: Any, bias: Any) -> Any:
            """The product with a large weight in parts, because a vocabulary's weights in fp32 would take most of the
            memory. It has no gradients."""
            flat = input.reshape(-1, self.in_features)
            out = torch.empty(len(flat), self.out_features)
            for part in parts_of(self.out_features):
                rows, here = self.room.wide(self.weight[part]).T, out[:, part]
                torch.mm(flat, rows, out=here) if bias is None else torch.addmm(bias[part], flat, rows, out=here)
            return out.view(*input.shape[:-1], -1)

    return WideLinear
