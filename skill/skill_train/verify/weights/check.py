"""Compares every row of every tensor in a GGUF file with the model that was trained.

Logits of a barely trained model hardly move when one projection is wrong; the weights show it by name. The reference is
the base's weight with PEFT's own change, in fp32. A file with a tensor that has no known counterpart does not pass, and
fails if llama.cpp computes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from skill_train.llama.gguf_header import GgufFile, Tensor
from skill_train.model.adapter import read_adapter
from skill_train.model.weight_files import StoredTensor, read_tensor, stored_tensors
from skill_train.reference.low_memory import is_plain, merged_weights
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import first_few
from skill_train.verify.weights.arrangements import as_in_model, one_more
from skill_train.verify.weights.further_layers import further_weights
from skill_train.verify.weights.places import EMBEDDING, OUTPUT, TRIED, VOCABULARY, Place, Places, places
from skill_train.verify.weights.rows import ENOUGH_OF_CHANGE, ChangeSums, Rows, errors, wrong_length, wrong_part
from skill_train.verify.weights.tensors import row_chunks, weights_of

_AT_ONCE = 2  # weights. One that the adapter changes is computed in fp32 while it is compared
_SHOWN = 5  # names of tensors in a sentence
_LAYER = re.compile(r"blk\.(\d+)\.")
_KEYS, _SHARED = re.compile(r"\.attn_[kv](_norm)?\.weight$"), "attention.shared_kv_layers"
_XIELU = re.compile(r"\.layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)$")  # lists in the metadata

# The checks of each file, by its name.
WeightChecks = dict[str, list[Finding]]


def compare_weights(
    files: list[GgufFile], model: Any, folder: Path, adapter: Path | None, base: Path | None
) -> WeightChecks:
    """The checks of each file, by its name.

    Args:
        model: of `folder` and `adapter`, as `frugal_model` gives it. `merged_weights` says what becomes of it.
        base: the model before the training, if it is known, for models without an adapter.
    """
    import torch

    before = _before(folder, adapter, base)
    config = model.config.get_text_config()
    further = dict(further_weights(folder, config.num_hidden_layers))
    makers = dict(merged_weights(model, adapter)) | further
    shapes = {name: tuple(make.args[0].shape) for name, make in makers.items()}
    placed = cache(lambda arch, widths: places(arch, config, shapes, dict(widths)))  # mostly the same for all files
    comparisons = [_FileComparison(gguf, placed(*_laid_out(gguf)), adapter is not None, bool(before)) for gguf in files]

    def compare(named: tuple[str, partial[Any]]) -> None:
        chosen: dict[Place, list[_FileComparison]] = {}
        for comparison in comparisons:
            for place in comparison.of_source.get(named[0], ()):
                chosen.setdefault(place, []).append(comparison)
        if chosen:
            weight, stored = named[1](), named[1].args[0]
            own = stored if weight is not stored and named[0] not in further else None
            if own is None and named[0] in before and before[named[0]].shape == tuple(weight.shape):
                own = read_tensor(before[named[0]])
            for place, files_of_place in chosen.items():
                compare_place(place, files_of_place, weight, own)

    threads = torch.get_num_threads()
    try:  # each thread works alone on a weight
        with ThreadPoolExecutor(_AT_ONCE, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(compare, makers.items()))
    finally:
        torch.set_num_threads(threads)
    for comparison in comparisons:
        comparison.compare_metadata(makers)
        for source, tensor in comparison.places.missing.items():
            comparison.absent(source, tensor, makers)
        for name, values in _computed_tensors(model, config).items():
            comparison.compare_computed(name, values)
    return {comparison.gguf.path.name: comparison.checks() for comparison in comparisons}


def _before(folder: Path, adapter: Path | None, base: Path | None) -> dict[str, StoredTensor]:
    """The tensors before the training that the model lacks: of a full training, or where the adapter was merged into
    it. Those with another name in the base's files are left out."""
    if adapter is None:
        return stored_tensors(base) if base else {}
    if is_plain(adapter):
        return {}
    tuned, tensors = read_adapter(adapter), stored_tensors(folder)
    changed = {f"{module}.weight" for module in tuned.modules} | tuned.replaced.keys()
    return {name: tensors[name] for name in changed & tensors.keys()}


def compared_bytes(adapter: Path | None, base: Path | None) -> int:
    """Bytes of the weights that are compared at once: one that the adapter changes and its change, in fp32; or the
    base's."""
    if adapter is None:
        return _AT_ONCE * max((stored.size for stored in _before(Path(), None, base).values()), default=0)
    tuned = read_adapter(adapter)
    named = [parts for parts in tuned.modules.values() if {"a", "b"} <= parts.keys()]
    pairs = [(tuned.tensors[parts["a"]].shape, tuned.tensors[parts["b"]].shape) for parts in named]
    sizes = [b[0] * a[1] for a, b in pairs if min(len(a), len(b)) > 1]  # PEFT refuses others later
    return _AT_ONCE * 2 * 4 * max(sizes, default=0)


@dataclass(frozen=True)
class _ComparedWeight:
    """A weight of the model beside a tensor of a file.

    Attributes:
        rows: how many were compared.
        error: of the worst row.
        fault: what is wrong; empty if nothing is.
    """

    tensor: str
    rows: int
    error: float
    fault: str


class _FileComparison:
    def __init__(self, gguf: GgufFile, places: Places, tuned: bool, across: bool = False) -> None:
        self.gguf, self.places, self.tuned, self.across = gguf, places, tuned, across
        self.unplaced = places.unplaced.copy()
        self.compared: list[_ComparedWeight] = []  # appended to by several threads
        self.of_source: dict[str, list[Place]] = {}
        for place in places.placed:
            self.of_source.setdefault(place.source, []).append(place)

    def wrong(self, tensor: str, fault: str, error: float = 0.0) -> None:
        """Reports a tensor of which no row was compared."""
        self.compared.append(_ComparedWeight(tensor, 0, error, fault))

    def begun(self, place: Place, weight: Any) -> _TensorComparison | None:
        """The comparison of a tensor with a weight that is arranged as the file has it; None if the shapes differ."""
        tensor = self.gguf.tensors[place.tensor]
        width = tensor.shape[0]
        room = tensor.elements // width - place.start
        if weight.numel() % width or (weight.numel() > room * width and tensor.name not in VOCABULARY):
            fault = f"{tensor.name} has shape {list(tensor.shape)}, and {place.source} {list(weight.shape)[::-1]}"
            self.wrong(tensor.name, fault, float("inf"))
            return None
        return _TensorComparison(self.gguf, place, min(room, weight.numel() // width), self.tuned)

    def end(self, one: _TensorComparison) -> None:
        """Takes the result of a comparison that was begun."""
        self.compared.append(one.result())
        beyond = one.place.start + one.shape[0]
        if one.tensor.name in VOCABULARY and beyond < one.tensor.elements // one.tensor.shape[0]:
            self._beyond(one.tensor, beyond)

    def compare_computed(self, name: str, values: Any) -> None:
        """Compares a tensor that the converter computes."""
        if name in self.gguf.tensors:
            compare_place(Place(name, "config.json", 0, as_in_model), [self], values)
        else:
            self.wrong(name, f"{name} is missing, which config.json asks for")

    def compare_metadata(self, makers: dict[str, partial[Any]]) -> None:
        """Compares weights of one number, which the file holds as metadata."""
        for source in self.unplaced.copy():
            match = _XIELU.search(source)
            key, number = (f"xielu.{match[2]}", int(match[1])) if match else ("", 0)
            stated = self.gguf.numbers(key)
            if number >= len(stated):
                continue
            self.unplaced.remove(source)
            value = Rows(makers[source]().float().reshape(1, 1).numpy())
            off = value.off(value.values * 0 + stated[number])
            error, wrong = errors("F32", off, value, tuned=self.tuned, computed=False)
            fault = f"{key} has {stated[number]:.6g} as number {number}, and {source} is {value.values[0, 0]:.6g}"
            self.wrong(key, fault if wrong[0] else "", float(error[0]))

    def absent(self, source: str, tensor: str, makers: dict[str, partial[Any]]) -> None:
        """Judges a weight whose tensor the file lacks. The output layer may be the embedding, and a bias may be
        zero."""
        weight = makers[source]()
        embedding = [place for place in self.places.placed if place.tensor == EMBEDDING]
        if tensor == OUTPUT and embedding:
            if makers[embedding[0].source]().data_ptr() != weight.data_ptr():
                compare_place(Place(EMBEDDING, source, 0, as_in_model), [self], weight)
        elif not source.endswith("bias") or weight.any():
            self.wrong(tensor, f"{tensor} is missing, which is {source} of the model")

    def _beyond(self, tensor: Tensor, first: int) -> None:
        """Checks that the rows after the model's vocabulary are zero."""
        last = tensor.elements // tensor.shape[0]
        full = weights_of(self.gguf, tensor)(slice(first, last)).any()
        fault = f"{tensor.name} has {last} rows, the model {first}, and the others are not zero" if full else ""
        self.compared.append(_ComparedWeight(tensor.name, last - first, 0.0, fault))

    def _used(self, tensor: str) -> bool:
        """Whether llama.cpp answers with a tensor. It does not use the layers that predict further tokens, the output
        of a ranking, nor the keys and values of a layer that has those of an earlier one."""
        layer, first = _LAYER.match(tensor), self.gguf.of_architecture("block_count")
        further = self.gguf.count("nextn_predict_layers")
        predicts = layer and further and isinstance(first, int) and int(layer[1]) >= first - further
        borrows = layer and isinstance(first, int) and int(layer[1]) >= first - (self.gguf.count(_SHARED) or 0)
        return not predicts and not (borrows and _KEYS.search(tensor)) and not tensor.startswith("cls.")

    def checks(self) -> list[Finding]:
        file, tensors = self.gguf.path.name, self.gguf.tensors
        rows: dict[str, int] = {}
        for weight in self.compared:
            rows[weight.tensor] = rows.get(weight.tensor, 0) + weight.rows
        arch = self.gguf.metadata.get("general.architecture")
        faults = {weight.tensor: weight.fault for weight in self.compared if weight.fault}
        unknown = [name for name, tensor in tensors.items() if rows.get(name, 0) < tensor.elements // tensor.shape[0]]
        unknown = [name for name in unknown if name not in faults] + self.unplaced
        why = f"where the weights of {arch} models lie, or how they are arranged, is not known"
        if not self.places.placed:
            why = f"the installed package gguf has no names for {arch} models; a newer one may have them"
        if arch not in TRIED:  # a difference may be an arrangement
            unknown, faults = [*faults, *unknown], {}
        elif not self.unplaced:
            why = "llama.cpp answers without them, and transformers reads no such weights"
            extra = "holds what the trained model has no weight for"
            faults |= {name: f"{name} {extra}" for name in unknown if self._used(name)}
            unknown = [name for name in unknown if name not in faults]
        looked_at = len(tensors.keys() & rows.keys() - set(unknown))
        worst = max((weight.error for weight in self.compared if weight.tensor not in unknown), default=0.0)
        fault_lines = [faults[name] for name in (*tensors, *faults.keys() - tensors.keys()) if name in faults]
        good = f"{looked_at} of {len(tensors)} tensors are those of the trained model, the worst row {worst:.2g} off"
        verdict: Verdict = "fail" if fault_lines else "warn" if unknown else "pass"
        left_out = f"; not compared: {first_few(unknown, _SHOWN)}" if unknown else ""
        detail = first_few(fault_lines, _SHOWN) or good + left_out
        check = Check("weights", file, verdict, len(fault_lines), 0, detail, {"looked_at": looked_at})
        return [check, NotChecked("weights", file, f"{first_few(unknown, _SHOWN)}: {why}")] if unknown else [check]


class _TensorComparison:
    """The comparison of a tensor with a weight of the model, some rows at a time.

    Attributes:
        shape: how many rows are compared, and their width.
    """

    def __init__(self, gguf: GgufFile, place: Place, count: int, tuned: bool) -> None:
        self.place, self.tuned, self.tensor = place, tuned, gguf.tensors[place.tensor]
        self.shape = count, self.tensor.shape[0]
        self.read = weights_of(gguf, self.tensor)
        self.weighed = "quantize.imatrix.file" in gguf.metadata
        self.computed = place.arrange is one_more or place.source.endswith(".A_log")
        self.worst, self.fault, self.sums = 0.0, "", ChangeSums()

    def add(self, start: int, rows: Rows) -> None:
        """Compares some rows of the weight; `start` is the number of the first."""
        first, kind = self.place.start + start, self.tensor.kind
        stored = self.read(slice(first, first + len(rows.values)))
        off = rows.off(stored, out=stored)
        error, wrong = errors(kind, off, rows, tuned=self.tuned, computed=self.computed)
        self.worst = max(self.worst, float(error.max()))
        # f16 makes errors that do not cancel out of a bf16 base with a small change of one size.
        if rows.base is not None and not self.computed and (self.tuned or self.tensor.kind != "F16"):
            self.sums.add(off, rows)
        if not self.fault and wrong.any():
            row = int(wrong.argmax())
            detail = f"row {first + row} is {error[row]:.2g} of its length off, more than {kind} may be"
            self.fault = f"{self.tensor.name} is not {self.place.source}: {detail}"
        if not self.fault and not self.weighed and (part := wrong_part(kind, off, rows)) is not None:
            detail = f"row {first + part[0]} is {part[2]:.2g} of its length off from weight {part[1]} on"
            self.fault = f"{self.tensor.name} is not {self.place.source}: {detail}, more than {kind} may be"
        length = None if self.fault else wrong_length(kind, start, off, rows)
        if length is not None:
            self.fault = f"{self.tensor.name} is {length:.3g} times {self.place.source}"

    def result(self) -> _ComparedWeight:
        share = self.sums.wrong_share(self.tensor.kind)
        if not self.fault and share is not None:
            whose = "adapter" if self.tuned else "training"
            held = f"{self.tensor.name} holds {share:.2f} of the {whose}'s change of {self.place.source}"
            self.fault = f"{held}, and not all of it once"
        return _ComparedWeight(self.tensor.name, self.shape[0], self.worst, self.fault)


def compare_place(place: Place, files: list[_FileComparison], weight: Any, base: Any = None) -> None:
    """Compares every row of a weight with the tensor of each file. It cannot be arranged if the files are of another
    architecture.

    Args:
        weight: as the model has it.
        base: the weight without the adapter's change; None where it changes nothing.
    """
    try:
        arranged = place.arrange(weight)
        arranged_base = None if base is None else place.arrange(base)
    except (RuntimeError, ZeroDivisionError):
        fault = f"{place.tensor} is not {place.source}, whose shape {list(weight.shape)} is of another architecture"
        for file in files:
            file.wrong(place.tensor, fault, float("inf"))
        return
    begun = [(file, one) for file in files if (one := file.begun(place, arranged)) is not None]
    for count, width in {one.shape for _, one in begun}:
        alike = [(file, one) for file, one in begun if one.shape == (count, width)]
        for start, rows in _rows(arranged, arranged_base, count, width, files[0].across):
            for _, one in alike:
                one.add(start, rows)
        for file, one in alike:
            file.end(one)


def _rows(weight: Any, base: Any, count: int, width: int, across: bool) -> Iterator[tuple[int, Rows]]:
    """The first `count` rows of a weight, some at a time, each time with the number of the first. Of a large weight
    only some have a base."""
    weight = weight.reshape(-1, width)
    base = None if base is None else base.reshape(-1, width)
    every = max(1, count * width // ENOUGH_OF_CHANGE)
    for number, part in enumerate(row_chunks(count, width)):
        own = base[part].float().numpy() if base is not None and number % every == 0 else None
        yield part.start, Rows(weight[part].float().numpy(), own, across=across)


def _computed_tensors(model: Any, config: Any) -> dict[str, Any]:
    """The tensors that llama.cpp's converter computes from config.json, by their names in a file.

    The factors of Llama 3 and Gemma 4 are those by which transformers lowered the model's own frequencies; 1e30 stands
    for a frequency of 0.
    """
    import torch

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    if rope.get("rope_type") in ("llama3", "proportional"):
        end = "rotary_emb.inv_freq" if rope["rope_type"] == "llama3" else "rotary_emb.full_attention_inv_freq"
        lowered = next(value for name, value in model.named_buffers() if name.endswith(end))
        powers = torch.arange(len(lowered), dtype=torch.float64) / len(lowered)
        return {"rope_freqs.weight": (rope["rope_theta"] ** -powers / lowered.double()).clamp(max=1e30).float()}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    return {}


def _laid_out(gguf: GgufFile) -> tuple[str, tuple[tuple[str, int], ...]]:
    """What the places of weights depend on: the architecture, and the row lengths of the tensors by name."""
    widths = tuple((name, tensor.shape[0]) for name, tensor in gguf.tensors.items())
    return str(gguf.metadata.get("general.architecture")), widths
