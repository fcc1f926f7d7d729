"""The weights in a GGUF file against those of the model that was trained, tensor by tensor.

Logits of a small or barely trained model hardly move when one projection is wrong; the weights say it at once, and by
name. The reference is PEFT's own merge of base and adapter, in fp32; which tensor is which says gguf-py's name map.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.gguf_file import GgufFile, Tensor
from skill_train.reference import reference_model
from skill_train.verdict import Check, NotChecked, problems
from skill_train.verify_tensors import row_bound, row_errors, row_samples, weights_of

if TYPE_CHECKING:
    import numpy as np

# What the converter does to a weight on its way is known for these. Llama's and Mistral's query and key rows change
# places (two halves of a head are interleaved), GPT-2's matrices are turned, Gemma's norms get 1 added.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi3")
_AT_ONCE = 2  # files; a few MB of each are in work
_FLOAT_ROW_ERROR = 0.01  # of a row's length: bf16 rounding is 0.002; an adapter left out is for `tuned` to see


def check_weights(files: list[GgufFile], reference: Path, adapter: Path | None) -> dict[str, Check | NotChecked]:
    """One check a file, by its name. The model is in memory only here, not while llama.cpp is at work."""
    with reference_model(reference, adapter) as model:
        return compare_weights(files, model.merge_and_unload() if adapter is not None else model)


def compare_weights(files: list[GgufFile], merged: Any) -> dict[str, Check | NotChecked]:
    """The same with the model at hand: a transformers model in fp32, its adapter merged."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        checks = pool.map(lambda gguf: _check_file(gguf, merged), files)
        return {gguf.path.name: check for gguf, check in zip(files, checks, strict=True)}


def _check_file(gguf: GgufFile, model: Any) -> Check | NotChecked:
    """Compares every tensor that the name map knows, of large ones evenly sampled rows.

    Args:
        model: the reference with its adapter merged, a transformers model in fp32.
    """
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    file, arch = gguf.path.name, gguf.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        return NotChecked("weights", file, f"what the converter rearranges in {arch} models is not known here")
    config = model.config.get_text_config()
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    found, seen, worst = [], set(), 0.0
    for name, weight in model.state_dict().items():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = gguf.tensors.get(mapped) if mapped else None
        if tensor is None:
            continue
        error, row = _distance(gguf, tensor, weight.float().numpy(), config)
        seen.add(tensor.name)
        worst = max(worst, error)
        bound = _bound(tensor)
        if not error <= bound:
            found.append(f"{tensor.name} is not {name}: row {row} is {error:.2g} of its length off, at most {bound}")
    if not seen:
        return NotChecked("weights", file, "no tensor of the file has a name that the name map knows")
    good = f"{len(seen)} of {len(gguf.tensors)} tensors are those of the trained model, the worst row {worst:.2g} off"
    return problems("weights", file, found, looked_at=len(seen), good=good)


def _distance(gguf: GgufFile, tensor: Tensor, weight: np.ndarray, config: Any) -> tuple[float, int]:
    """Error of the worst row, and its number, under the rearrangement that fits best."""
    import numpy as np

    width, bound = tensor.shape[0], _bound(tensor)  # GGUF names the row length first
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
                errors = row_errors(weights_of(gguf, tensor, kept), _rows(expected, kept))
                errors[np.isnan(errors)] = np.inf  # no comparison would ever choose it
                top = int(np.argmax(errors))
                worst = max(worst, (float(errors[top]), int(kept[top])))
        best = min(best, worst)
        if best[0] <= bound:  # the weight as it is comes first, and fits nearly always
            break
    return best


def _rows(weight: np.ndarray, numbers: Any) -> np.ndarray:
    """Rows by number, without a copy where they follow one another."""
    first, last = int(numbers[0]), int(numbers[-1])
    return weight[first : last + 1] if last - first + 1 == len(numbers) else weight[numbers]


def _candidates(weight: np.ndarray, config: Any) -> Iterator[np.ndarray]:
    """The weight as it is, and as converters rearrange it."""
    yield weight
    if weight.ndim == 1:
        yield weight + 1
    if weight.ndim == 2:
        yield weight.T
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    for count in sorted(heads):
        if weight.shape[0] % (2 * count) == 0:
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
            yield halves.swapaxes(1, 2).reshape(weight.shape)


def _bound(tensor: Tensor) -> float:
    return max(_FLOAT_ROW_ERROR, row_bound(tensor.kind))
