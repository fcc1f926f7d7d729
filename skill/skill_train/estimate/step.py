"""A micro-step, whose memory and time are estimated, its optimizer, and the range of an estimate. Pure.

Sources for the optimizers: torch 2.13 (`torch/optim/*.py`), transformers 5.23 (`optimization.py`: Adafactor;
`trainer_optimizer.py`: no optimizer gets a momentum). bitsandbytes since 0.44 uses blocks of 256 with a float32 scale
each.
"""

from collections.abc import Iterable

import msgspec

from skill_train.estimate.modules import HEADS
from skill_train.facts import PictureTokenFacts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCKWISE = 2 * (1 + 4 / 256)  # two moments of a byte, and a float32 scale for each 256


class Optimizer(msgspec.Struct, frozen=True):
    """The memory of one optimizer."""

    copies: int = 0  # numbers that it keeps for each parameter, in the parameter's own type
    fixed: float = 0.0  # bytes that it keeps for each parameter, whatever the type
    factored: bool = False  # it keeps only a row and a column of each matrix, in float32
    paged: bool = False  # its state may be in host memory
    temporaries: int = 0  # copies of all parameters that exist during a step

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


class Range(msgspec.Struct, frozen=True):
    """An estimate from `low` to `high`, and its basis."""

    low: float
    high: float
    basis: str

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class Part(msgspec.Struct, frozen=True):
    """One term of a sum, in bytes."""

    name: str
    low: float
    high: float
    because: str


class MicroStep(msgspec.Struct, frozen=True):
    """One forward and backward pass on one device."""

    device: str
    dtype: str
    # rows, length: the size of the batch in rows and tokens; rows are padded to the longest
    rows: int
    length: int
    checkpointing: bool
    four_bit: bool = False
    lora_r: int = 16
    lora_dropout: float = 0.05
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    trained_share: float = 1.0  # the share of the tokens that the loss counts
    shards: int = 1  # the processes that share the weights (FSDP); 1 if each process has all weights
    offload: bool = False  # sharded weights and optimizer states stay in host memory until they are needed
    # every weight trains, in float32 with autocast in `dtype`, or with `pure_bf16` completely in bfloat16
    full: bool = False
    pure_bf16: bool = False
    optim: str = "adamw_torch_fused"  # the optimizer, as the recipe names it
    modules_to_save: tuple[str, ...] = ()  # modules that train whole beside the adapter
    dora: bool = False  # the adapter has magnitudes
    accumulates: bool = True  # gradients of earlier micro-steps already exist
    images: bool = False  # rows have pictures. `pictures` are their tokens; None where these are unknown.
    pictures: PictureTokenFacts | None = None
    # tower_trains, projector_trains: gradients pass through the vision tower, or the projector behind it
    tower_trains: bool = False
    projector_trains: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def fused(self) -> bool:
        """Whether the optimizer is one kernel without temporaries."""
        return self.optim.endswith("fused")

    @property
    def optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.optim]

    @property
    def head_trains(self) -> bool:
        return self.full or any(name.rsplit(".", 1)[-1] in HEADS for name in self.modules_to_save)

    @property
    def mixed(self) -> bool:
        """Whether the weights are float32 and autocast computes with 16-bit copies of them."""
        return self.full and not self.pure_bf16 and self.dtype != "float32"


def total(parts: Iterable[Part], basis: str) -> Range:
    parts = list(parts)
    return Range(sum(part.low for part in parts), sum(part.high for part in parts), basis)
