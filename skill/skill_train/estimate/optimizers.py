"""Bytes that an optimizer keeps for what it trains, and what its step needs for a moment. Pure.

Read from torch 2.13 (`torch/optim/*.py`), transformers 5.23 (`optimization.py`: Adafactor; `trainer_optimizer.py`: none
gets a momentum). bitsandbytes since 0.44: blocks of 256 with a float32 scale each.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCKWISE = 2 * (1 + 4 / 256)  # two moments of a byte, and a float32 scale for each 256


@dataclass(frozen=True)
class Optimizer:
    """Attributes:
    copies: numbers kept for a parameter, in the parameter's own type.
    fixed: bytes kept for a parameter, whatever its type.
    factored: keeps a row and a column of each matrix instead, in float32.
    paged: what it keeps may lie in host memory.
    temporaries: copies of all parameters that a step makes for a moment.
    """

    copies: int = 0
    fixed: float = 0.0
    factored: bool = False
    paged: bool = False
    temporaries: int = 0

    def state(self, each: int, *, is_embedding: bool = False) -> float:
        """Bytes kept for one parameter of `each` bytes. transformers' trainer keeps 32 bit for an embedding where the
        optimizer keeps 8 (`register_module_override`)."""
        return 8.0 if is_embedding and self.fixed == _BLOCKWISE else self.copies * each + self.fixed


OPTIMIZERS = {
    "adamw_torch": Optimizer(copies=2, temporaries=1),
    "adamw_torch_fused": Optimizer(copies=2),
    "adagrad": Optimizer(copies=1, temporaries=1),
    "rmsprop": Optimizer(copies=1, temporaries=1),
    "sgd": Optimizer(),
    "adafactor": Optimizer(factored=True),
    "adamw_8bit": Optimizer(fixed=_BLOCKWISE),
    "adamw_bnb_8bit": Optimizer(fixed=_BLOCKWISE),
    "paged_adamw_8bit": Optimizer(fixed=_BLOCKWISE, paged=True),
    "paged_adamw_32bit": Optimizer(fixed=8.0, paged=True),
}
