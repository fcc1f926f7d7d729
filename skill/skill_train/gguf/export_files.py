"""The files of an export: what the steps recorded, and what lies beside."""

from __future__ import annotations

import re
from pathlib import Path

from skill_train.run import export_record
from skill_train.run.folder import RunDir


def unread(run: RunDir) -> tuple[tuple[str, str], ...]:
    """What belongs to an export and cannot be judged, with the reason: what a record names and is gone, and what lies
    in `gguf/` and is no GGUF file."""
    gone = [(path.name, "it was exported, and is not there any more") for path in recorded(run) if not path.is_file()]
    known = {*run.exported, run.gguf / "Modelfile"}
    others = sorted(path.name for path in run.gguf.glob("*") if path not in known)
    return (*gone, *((name, "it is not a GGUF file by its name") for name in others))


def recorded(run: RunDir) -> list[Path]:
    """The files that the steps say they made."""
    return [run.path / name for name in export_record.outputs(run.path)]


def outtype(record: Path, plain: list[str]) -> str:
    """The type to convert to. A conversion already done is kept when it is of the type that is asked for."""
    earlier = export_record.read(record) if record.is_file() else None
    if earlier is None or not earlier.outputs:
        return plain[0] if plain else "auto"
    made = next(iter(earlier.outputs.values()))["quant"]
    return earlier.options.get("outtype", "auto") if not plain or made in plain else plain[0]


def model_of(modelfile: Path) -> str | None:
    """What a Modelfile's FROM names; None without one. Ollama takes instructions in any case."""
    text = modelfile.read_text(encoding="utf-8", errors="replace") if modelfile.is_file() else ""
    found = re.search(r"^from[ \t]+(\S.*?)[ \t]*$", text, re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None
