"""Bytes that an optimizer keeps for the trained weights, and the temporary memory of its step. Pure.

Sources: torch 2.13 (`torch/optim/*.py`), transformers 5.23 (`optimization.py`: Adafactor; `trainer_optimizer.py`: no
optimizer gets a momentum). bitsandbytes since 0.44 uses blocks of 256 with a float32 scale each.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCKWISE = 2 * (1 + 4 / 256)  # two moments of a byte, and a float32 scale for each 256


@dataclass(frozen=True)
class Optimizer:
    """The memory of one optimizer.

    Attributes:
        copies: numbers that it keeps for each parameter, in the parameter's own type.
        fixed: bytes that it keeps for each parameter, whatever the type.
        factored: it keeps only a row and a column of each matrix, in float32.
        paged: its state may be in host memory.
        temporaries: copies of all parameters that exist during a step.
    """

    copies: int = 0
    fixed: float = 0.0
    factored: bool = False
    paged: bool = False
    temporaries: int = 0

    def state(self, each: int, *, is_embedding: bool = False) -> float:
        """Bytes kept for one parameter of `each` bytes. If the optimizer keeps 8 bits, transformers' trainer makes it
        keep 32 bits for an embedding (`register_module_override`)."""
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
