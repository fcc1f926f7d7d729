"""The weights in a GGUF file against those of the model that was trained, tensor by tensor.

Logits of a small or barely trained model hardly move when one projection is wrong; the weights say it at once, and by
name. The reference is the base's weight with PEFT's own change, in fp32; which tensor is which says gguf-py's name map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.adapter import read_adapter
from skill_train.gguf_file import GgufFile, Tensor
from skill_train.reference_stored import frugal_model, merged_weights
from skill_train.verdict import Check, NotChecked, problems
from skill_train.verify_tensors import row_bound, row_errors, row_samples, weights_of

if TYPE_CHECKING:
    import numpy as np

# What the converter does to a weight on its way is known for these. Llama's and Mistral's query and key rows change
# places (two halves of a head are interleaved), GPT-2's matrices are turned, Gemma's norms get 1 added.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi3")
_AT_ONCE = 2  # weights; each is made in fp32 while it is compared
_WHOLE = 1 << 25  # weights that are made fp32 at once; of larger ones, embeddings, only the rows that are looked at
_FLOAT_ROW_ERROR = 0.01  # of a row's length: bf16 rounding is 0.002; an adapter left out is for `tuned` to see


def check_weights(files: list[GgufFile], reference: Path, adapter: Path | None) -> dict[str, Check | NotChecked]:
    """One check a file, by its name. The model is in memory only here, not while llama.cpp is at work."""
    with frugal_model(reference, adapter) as model:
        return compare_weights(files, model, adapter)


def compare_weights(files: list[GgufFile], model: Any, adapter: Path | None) -> dict[str, Check | NotChecked]:
    """The same with the model at hand, of `frugal_model`; what `merged_weights` says of the model afterwards holds."""
    import torch

    config = model.config.get_text_config()
    maps = [_name_map(gguf, config) for gguf in files]

    def look(named: tuple[str, Callable[[], Any]]) -> list[_Seen | None]:
        name, weight = named[0], named[1]()
        if weight.numel() <= _WHOLE:
            weight = weight.float()  # once for all files
        return [_look(gguf, names, name, weight, config) for gguf, names in zip(files, maps, strict=True)]

    threads = torch.get_num_threads()
    try:  # each thread works alone on a weight
        with ThreadPoolExecutor(_AT_ONCE, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            looks = list(pool.map(look, merged_weights(model, adapter)))
    finally:
        torch.set_num_threads(threads)
    seen = [[one for one in column if one is not None] for column in zip(*looks, strict=True)]
    return {gguf.path.name: _check(gguf, names, found) for gguf, names, found in zip(files, maps, seen, strict=True)}


def compared_bytes(adapter: Path | None) -> int:
    """Memory of what is compared at once: of a weight that the adapter changes, itself and its change, in fp32."""
    if adapter is None:
        return 0
    tuned = read_adapter(adapter)
    named = [parts for parts in tuned.modules.values() if {"a", "b"} <= parts.keys()]
    pairs = [(tuned.tensors[parts["a"]].shape, tuned.tensors[parts["b"]].shape) for parts in named]
    sizes = [b[0] * a[1] for a, b in pairs if min(len(a), len(b)) > 1]  # PEFT refuses others later
    return _AT_ONCE * 2 * 4 * max(sizes, default=0)


@dataclass(frozen=True)
class _Seen:
    """A tensor of a file that has a counterpart in the model: how far off, and what is wrong (empty for nothing)."""

    tensor: str
    error: float
    fault: str


def _name_map(gguf: GgufFile, config: Any) -> Any:
    """gguf-py's map of names; None for an architecture that is not known here."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    arch = gguf.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        return None
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    return get_tensor_name_map(number, config.num_hidden_layers)


def _look(gguf: GgufFile, names: Any, name: str, weight: Any, config: Any) -> _Seen | None:
    """Compares one weight, of a large one evenly sampled rows; None where the file has none of its name."""
    mapped = names.get_name(name, try_suffixes=(".weight", ".bias")) if names is not None else None
    tensor = gguf.tensors.get(mapped) if mapped else None
    if tensor is None:
        return None
    (error, row), bound = _distance(gguf, tensor, weight, config), _bound(tensor)
    fault = f"{tensor.name} is not {name}: row {row} is {error:.2g} of its length off, at most {bound}"
    return _Seen(tensor.name, error, "" if error <= bound else fault)


def _check(gguf: GgufFile, names: Any, seen: list[_Seen]) -> Check | NotChecked:
    file = gguf.path.name
    if names is None:
        arch = gguf.metadata.get("general.architecture")
        return NotChecked("weights", file, f"what the converter rearranges in {arch} models is not known here")
    if not seen:
        return NotChecked("weights", file, "no tensor of the file has a name that the name map knows")
    count, worst = len({one.tensor for one in seen}), max(one.error for one in seen)
    good = f"{count} of {len(gguf.tensors)} tensors are those of the trained model, the worst row {worst:.2g} off"
    return problems("weights", file, [one.fault for one in seen if one.fault], looked_at=count, good=good)


def _distance(gguf: GgufFile, tensor: Tensor, weight: Any, config: Any) -> tuple[float, int]:
    """Error of the worst row, and its number, under the rearrangement that fits best. The weight is torch's."""
    import numpy as np

    width, bound = tensor.shape[0], _bound(tensor)  # GGUF names the row length first
    read = weights_of(gguf, tensor)
    best = (float("inf"), 0)
    for candidate in _candidates(weight, config):
        expected = candidate.reshape(1, -1) if candidate.ndim == 1 else candidate
        count = min(len(expected), tensor.elements // width)  # a vocabulary may be padded on one side
        if expected.shape[1] != width:
            continue
        worst = (0.0, 0)
        for rows in row_samples(tensor):
            kept = rows[rows < count]
            if len(kept):
                errors = row_errors(read(kept), _rows(expected, kept))
                errors[np.isnan(errors)] = np.inf  # no comparison would ever choose it
                top = int(np.argmax(errors))
                worst = max(worst, (float(errors[top]), int(kept[top])))
        best = min(best, worst)
        if best[0] <= bound:  # the weight as it is comes first, and fits nearly always
            break
    return best


def _rows(weight: Any, numbers: np.ndarray) -> np.ndarray:
    """Rows by number, in fp32; in that type already, those that follow one another are not copied."""
    first, last = int(numbers[0]), int(numbers[-1])
    rows = weight[first : last + 1] if last - first + 1 == len(numbers) else weight[numbers]
    found: np.ndarray = rows.float().numpy()
    return found


def _candidates(weight: Any, config: Any) -> Iterator[Any]:
    """The weight as it is, and as converters rearrange it."""
    yield weight
    if weight.ndim == 1:
        yield weight.float() + 1
    if weight.ndim == 2:
        yield weight.T
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    for count in sorted(heads):
        if weight.shape[0] % (2 * count) == 0:
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
            yield halves.swapaxes(1, 2).reshape(weight.shape)


def _bound(tensor: Tensor) -> float:
    return max(_FLOAT_ROW_ERROR, row_bound(tensor.kind))
