"""Stands in for the package that fetches compiled code from the Hub: whoever asks it for something is written down."""

from __future__ import annotations

import os
from typing import Any


def _shout(*asked: Any, **more: Any) -> Any:
    with open(os.environ["SHOUTED"], "a", encoding="utf-8") as file:
        file.write(f"{asked} {more}\n")
    raise RuntimeError("code from the Hub was asked for")


def _leave(*_: Any, **__: Any) -> Any:
    """A decorator that leaves a class or function as it is: naming a layer asks the Hub for nothing yet."""
    return lambda decorated: decorated


class _Named:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _Named()


get_kernel = kernelize = replace_kernel_forward_from_hub = use_kernel_mapping = _shout
use_kernel_forward_from_hub = use_kernelized_func = _leave
register_kernel_mapping = _leave
CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = ROCMProperties = _Named
FuncRepository = LocalFuncRepository = LockedLayerRepository = _Named
Mode = _Named()
