"""Which GGUF file the Modelfile of an export names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skill_train.commands._outputs import ListedFile
from skill_train.commands._shell import quoted
from skill_train.core.errors import UsageError
from skill_train.gguf.export_files import model_of


@dataclass(frozen=True)
class WantedModelfile:
    """The export that writes a Modelfile.

    Attributes:
        out: the folder of the files.
        name: of the files, before their types.
        types: that the export makes, in the order of the user.
        asked: the type that the Modelfile shall name; None for nothing.
    """

    out: Path
    name: str
    types: list[str]
    asked: str | None


def file_of(wanted: WantedModelfile, outputs: list[ListedFile], unquantized: str) -> tuple[str, str]:
    """The name of the file, and why.

    Whoever made an Ollama model of one file would serve another without knowing. So the file of an earlier export stays
    until another type is asked for, or the file is gone.

    Args:
        unquantized: the name of the file that all others are made of.

    Raises:
        UsageError: there is no file of the type that was asked for.
    """
    names = {output["quant"]: Path(output["path"]).name for output in outputs}
    if wanted.asked is not None:
        name = names.get(wanted.asked, f"{wanted.name}-{wanted.asked}.gguf")
        if not (wanted.out / name).is_file():
            raise UsageError(
                f"there is no file of type {wanted.asked} for the Modelfile",
                code="bad_usage",
                expected=", ".join(sorted(names)),
                got=wanted.asked,
                hint=f"name the type in --quant too: --quant {quoted(wanted.asked)}",
            )
        return name, "asked for with --modelfile"
    earlier = wanted.out / (model_of(wanted.out / "Modelfile") or "")
    if earlier.is_file() and earlier.parent == wanted.out:
        return earlier.name, "an earlier export chose it; --modelfile TYPE names another"
    last = next((names[quant] for quant in reversed(wanted.types) if quant in names), "")
    return (last, "the last of the types that were asked for") if last else (unquantized, "the only file")
