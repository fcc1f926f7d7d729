"""What `export-gguf` converts, and where its files and records go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.commands._for_device import DeviceQuestion
from skill_train.commands._importance import MatrixOrder
from skill_train.run.folder import RunDir

if TYPE_CHECKING:
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import MixFile

UNQUANTIZED = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class Export:
    """What is converted, and where its files and records go.

    Attributes:
        types: that are wanted, in the order of the user.
        matrix: the importance matrix that was asked for.
        modelfile: the type that the Modelfile shall name; None leaves the one that it names.
        mmproj: the type of the projector's file; None where there is none.
        question: the device that the files are for; None for none.
        run: None for a model folder. What follows is of runs alone.
        mix: what a mix of types may weigh, or its types; None where none was asked for.
        trained_length: tokens of the longest row of the training.
        bare: trained without the template of the base.
    """

    model: Path
    out: Path
    records: Path
    name: str
    types: list[str]
    matrix: MatrixOrder
    modelfile: str | None
    mmproj: str | None
    question: DeviceQuestion | None
    run: RunDir | None = None
    mix: MixTarget | MixFile | None = None
    trained_length: int | None = None
    bare: bool = False

    @property
    def unquantized(self) -> list[str]:
        return [kind for kind in self.types if kind in UNQUANTIZED]

    def to_quantize(self, source: Path) -> list[str]:
        """The types that have to be quantized from the unquantized file."""
        done = self.unquantized[:1]
        return [kind for kind in self.types if kind not in done and not source.name.endswith(f"-{kind}.gguf")]
