"""Finds the files of an export: the files in the steps' records, and other files beside them."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from skill_train.run import export_record
from skill_train.run.folder import RunDir

ADAPTER_MODELFILE = "Modelfile-lora"  # the Modelfile that loads the adapter's GGUF file
# Ollama reads instructions in upper or lower case.
_FROM = re.compile(r"^from[ \t]+(\S.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


def unread(run: RunDir) -> tuple[tuple[str, str], ...]:
    """The names of files that cannot be checked, each with the reason: recorded files that are missing, and files in
    `gguf/` that are not GGUF files."""
    gone = [(path.name, "it was exported, and is not there any more") for path in recorded(run) if not path.is_file()]
    expected, texts = run.exported, ("Modelfile", ADAPTER_MODELFILE)
    names = (path.name for path in sorted(run.gguf.glob("*")) if path not in expected)
    others = [name for name in names if name.split(".unrecorded-")[0] not in texts]
    return (*gone, *((name, "its name is not that of a GGUF file") for name in others))


def recorded(run: RunDir) -> list[Path]:
    """The paths in the records of the export's steps. A file may be missing."""
    return [run.path / name for name in export_record.outputs(run.path)]


def outtype(record: Path, plain: list[str]) -> str:
    """The type to convert to: the first of the unquantized types `plain`, or `auto`. The earlier conversion in `record`
    is kept if `plain` has its type or is empty."""
    earlier = export_record.read(record) if record.is_file() else None
    if earlier is None or not earlier.outputs:
        return plain[0] if plain else "auto"
    quant = next(iter(earlier.outputs.values()))["quant"]
    return earlier.options.get("outtype", "auto") if not plain or quant in plain else plain[0]


def model_of(modelfile: Path) -> str | None:
    """The model that a Modelfile's FROM names; None without a FROM."""
    match = _FROM.search(modelfile.read_text(encoding="utf-8", errors="replace") if modelfile.is_file() else "")
    return match[1] if match else None


def parameters_in(modelfile: Path) -> dict[str, Any]:
    """The PARAMETER lines of a Modelfile, of which `stop` is a list; empty if there is no file. Text inside of SYSTEM
    is not read."""
    text = modelfile.read_text(encoding="utf-8", errors="replace") if modelfile.is_file() else ""
    text = re.sub(r'(?ms)^SYSTEM """.*?"""$', "", text)
    parameters: dict[str, Any] = {}
    for name, value in re.findall(r"^parameter[ \t]+(\S+)[ \t]+(\S.*?)[ \t]*$", text, re.IGNORECASE | re.MULTILINE):
        if name == "stop":
            parameters.setdefault(name, []).append(value[1:-1] if value[0] == value[-1] == '"' else value)
        else:
            with suppress(ValueError):
                parameters[name] = json.loads(value)
    return parameters


def with_model(text: str, name: str) -> str:
    """The text of a Modelfile with this name in its first FROM. Adds a FROM if there is none."""
    return _FROM.sub(lambda _: f"FROM {name}", text, count=1) if _FROM.search(text) else f"FROM {name}\n{text}"
