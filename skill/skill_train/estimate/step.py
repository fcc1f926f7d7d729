"""A micro-step, whose memory and time are estimated, and the range of an estimate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skill_train.estimate.modules import HEADS
from skill_train.estimate.optimizers import OPTIMIZERS, Optimizer
from skill_train.facts import PictureTokenFacts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Range:
    """An estimate from `low` to `high`, and its basis."""

    low: float
    high: float
    basis: str

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Part:
    """One term of a sum, in bytes."""

    name: str
    low: float
    high: float
    because: str


@dataclass(frozen=True)
class MicroStep:
    """One forward and backward pass on one device.

    Attributes:
        rows, length: the size of the batch in rows and tokens; rows are padded to the longest.
        trained_share: the share of the tokens that the loss counts.
        shards: the processes that share the weights (FSDP); 1 if each process has all weights.
        offload: sharded weights and optimizer states stay in host memory until they are needed.
        full: every weight trains, in float32 with autocast in `dtype`, or with `pure_bf16` completely in bfloat16.
        optim: the optimizer, as the recipe names it.
        modules_to_save: modules that train whole beside the adapter.
        dora: the adapter has magnitudes.
        accumulates: gradients of earlier micro-steps already exist.
        images: rows have pictures. `pictures` are their tokens; None where these are unknown.
        tower_trains, projector_trains: gradients pass through the vision tower, or the projector behind it.
    """

    device: str
    dtype: str
    rows: int
    length: int
    checkpointing: bool
    four_bit: bool = False
    lora_r: int = 16
    lora_dropout: float = 0.05
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    trained_share: float = 1.0
    shards: int = 1
    offload: bool = False
    full: bool = False
    pure_bf16: bool = False
    optim: str = "adamw_torch_fused"
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    accumulates: bool = True
    images: bool = False
    pictures: PictureTokenFacts | None = None
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
