"""`--quant auto`: what a mix of types may weigh, and the types that are chosen for it, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skill_train.core.console import Console
from skill_train.core.errors import UsageError
from skill_train.estimate.targets import parse_bytes
from skill_train.run.export_record import ExportedFile, QuantizedFile

if TYPE_CHECKING:
    from skill_train.gguf.importance import Matrix
    from skill_train.gguf.mix import Mix, MixTarget
    from skill_train.gguf.mix_file import MixFile
    from skill_train.gguf.quality.texts import RunTexts

AUTO = "auto"


def target_of(
    quant: str, max_size: str | None, bits: float | None, mix: Path | None = None
) -> tuple[list[str], MixTarget | MixFile | None]:
    """The names in `--quant` without `auto`, and what the mix may weigh, or its types; None without `auto`.

    Args:
        mix: a file with a mix.

    Raises:
        UsageError: `auto` without a size, or with two, or there is no such mix in the file.
    """
    from skill_train.gguf.mix import MixTarget
    from skill_train.gguf.mix_file import read_mix

    names = [name.strip() for name in quant.split(",")]
    others = [name for name in names if name.lower() != AUTO]
    sizes = [option for option, value in (("--max-size", max_size), ("--bits", bits)) if value is not None]
    if len(others) == len(names):
        if mix is not None:
            raise _misused("--mix has the types of --quant auto, which is not asked for")
        if sizes:
            raise _misused(f"{sizes[0]} is the size of a mix of types, which --quant auto makes")
        return others, None
    if len(sizes) > 1 or not (sizes or mix):
        raise _misused("--quant auto needs --max-size or --bits, but not both")
    most = None if max_size is None else round(parse_bytes(max_size, "--max-size"))
    target = MixTarget(most_bytes=most, bits=bits) if sizes else None
    return others, target if mix is None else read_mix(mix, target)


def is_mix(quant: str) -> bool:
    """Whether a type is a mix, which `gguf.mix` and `gguf.mix_file` name."""
    return quant.startswith(("auto-", "mix-"))


@dataclass(frozen=True)
class MixBasis:
    """What the types of a mix are measured with, and the folder for the records."""

    source: Path
    matrix: Matrix | None
    texts: RunTexts
    records: Path


def mix_for(target: MixTarget | MixFile, basis: MixBasis, earlier: ExportedFile | None, console: Console) -> Mix:
    """The types of a mix. Those of a file, and of an earlier export of this name, are taken again.

    Raises:
        UsageError: no mix is that small, or there is too little text to measure on.
    """
    from skill_train.gguf import mix
    from skill_train.gguf.mix_file import MixFile

    if isinstance(target, MixFile):
        return mix.replayed(target.types, {"replayed": target.source}, basis.source, basis.texts, target.most_bytes)
    if earlier is not None and "tensor_types" in earlier and "mix" in earlier:
        origin: QuantizedFile = {"mix": earlier["mix"]}
        return mix.replayed(earlier["tensor_types"], origin, basis.source, basis.texts, target.most_bytes)
    request = mix.MixRequest(basis.source, target, basis.matrix, basis.texts, basis.records / mix.FILE)
    with console.progress("measuring the types of each matrix") as progress:
        chosen = mix.choose_mix(request, progress)
    figures = chosen.origin["mix"]
    if figures["measured_pairs"] < figures["pairs"]:
        console.warn(
            "imatrix",
            f"there was time for {figures['measured_pairs']} of {figures['pairs']} measurements; the others were "
            "estimated",
        )
    return chosen


def _misused(why: str) -> UsageError:
    return UsageError(
        why,
        code="bad_usage",
        expected="--quant auto --max-size 400MB, --quant auto --bits 4.5, or --quant auto --mix FILE",
        hint="skill-train export-gguf RUN --quant auto --bits 4.5",
    )
