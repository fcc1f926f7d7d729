"""`--quant auto`: what a mix of types may weigh, and the types that are chosen for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skill_train.core.console import Console
from skill_train.core.errors import UsageError
from skill_train.estimate.targets import parse_bytes
from skill_train.run.export_record import ExportedFile

if TYPE_CHECKING:
    from skill_train.gguf.mix import Mix, MixRequest, MixTarget

AUTO = "auto"


def target_of(quant: str, max_size: str | None, bits: float | None) -> tuple[list[str], MixTarget | None]:
    """The names in `--quant` without `auto`, and what the mix may weigh; None without `auto`.

    Raises:
        UsageError: `auto` without a size, or with two.
    """
    from skill_train.gguf.mix import MixTarget

    names = [name.strip() for name in quant.split(",")]
    others = [name for name in names if name.lower() != AUTO]
    sizes = [option for option, value in (("--max-size", max_size), ("--bits", bits)) if value is not None]
    if len(others) == len(names):
        if sizes:
            raise _misused(f"{sizes[0]} is the size of a mix of types, which --quant auto makes")
        return others, None
    if len(sizes) != 1:
        raise _misused("--quant auto needs the size of the file: --max-size or --bits, one of them")
    most = None if max_size is None else round(parse_bytes(max_size, "--max-size"))
    return others, MixTarget(most_bytes=most, bits=bits)


def mix_for(request: MixRequest, earlier: ExportedFile | None, console: Console) -> Mix:
    """The types of a mix. Those of an earlier file of this name are taken again.

    Raises:
        UsageError: no mix is that small, or there is no text to measure on.
    """
    from skill_train.gguf import mix

    if earlier is not None and "tensor_types" in earlier and "mix" in earlier:
        return mix.replayed(earlier["tensor_types"], earlier["mix"], request.target, request.source, request.texts)
    with console.progress("measuring the types of each matrix") as progress:
        chosen = mix.choose_mix(request, progress)
    if chosen.figures["measured_pairs"] < chosen.figures["pairs"]:
        console.warn(
            "imatrix",
            f"there was time for {chosen.figures['measured_pairs']} of {chosen.figures['pairs']} measurements; the "
            "others were estimated",
        )
    return chosen


def _misused(why: str) -> UsageError:
    return UsageError(
        why,
        code="bad_usage",
        expected="--quant auto --max-size 400MB, or --quant auto --bits 4.5",
        hint="skill-train export-gguf RUN --quant auto --bits 4.5",
    )
