"""Measures the effect of rounding alone on a mixture of experts: runs the reference with rounded products.

A file holds its weights in its type (f16 for an f16 file), and llama.cpp rounds what they are multiplied by to it too.
If two experts are nearly tied, that can change the router's choice, and then one token is far off in a correct file.
The same rounding in the reference changes the same choices, so it shows how far off a correct file may be.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

_PRODUCTS = {"linear", "matmul", "bmm", "grouped_mm", "_grouped_mm", "embedding"}  # what takes a weight second
TYPES = {"f16": "float16", "bf16": "bfloat16"}  # a file's type and torch's name of it


def is_mixture(config: Any) -> bool:
    """Whether the config has a number of experts, under any of its names."""
    return bool(_expert_counts(config))


@contextlib.contextmanager
def rounded_products(model: Any, kind: str) -> Iterator[None]:
    """Rounds both factors of every product with a weight of the model, except of routers, which files keep in f32.

    Args:
        kind: a key of `TYPES`.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    dtype, routers = getattr(torch, TYPES[kind]), _expert_counts(model.config)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters() if weight.ndim > 1}

    def is_rounded(weight: Any) -> bool:
        is_own = torch.is_tensor(weight) and weight.ndim > 1 and weight.untyped_storage().data_ptr() in own
        return is_own and not (weight.ndim == 2 and len(weight) in routers)

    def rounded(factor: Any) -> Any:
        return factor.to(dtype).to(factor.dtype) if factor.is_floating_point() else factor  # or the ids of tokens

    class Rounding(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in _PRODUCTS and len(args) > 1 and is_rounded(args[1]):
                args = (*map(rounded, args[:2]), *args[2:])
            return func(*args, **(kwargs or {}))

    with Rounding():
        yield


def _expert_counts(config: Any) -> set[int]:
    fields = config.get_text_config().to_dict()
    counts = {value for name, value in fields.items() if "expert" in name and "size" not in name and type(value) is int}
    return counts - {0, 1}
