"""Writes a run as a notebook for Google Colab: the cells of templates/colab.ipynb, with the program, the plan and the
data as compressed base64."""

import base64
import hashlib
import json
import zlib
from pathlib import Path

from skill_train.core.digests import FileDigest
from skill_train.core.errors import UsageError
from skill_train.core.files import write_text
from skill_train.core.resources import template
from skill_train.core.units import megabytes
from skill_train.facts import Flavor, JsonObject
from skill_train.machine.training_program import train_program
from skill_train.run.job_spec import ENVIRONMENT

# The GPUs that Colab and the flavors have in common (colab.research.google.com, Change runtime type; 2026-11-21).
GPUS = ("T4", "L4", "A100")
FLAVOR = "t4-small"  # a T4 and 15 GB of memory, which Colab gives free of charge
LARGEST_BYTES = 10_000_000  # limit of the compressed data; Colab opens notebooks of up to 20 MB
_LINE = 120


def gpu_of(flavor: Flavor) -> str:
    """Colab's name for the GPU of a flavor.

    Raises:
        UsageError: Colab does not have this GPU, or the flavor has more than one.
    """
    if flavor.gpus != 1 or flavor.gpu not in GPUS:
        raise UsageError(
            f"Google Colab has no machine that matches {flavor.name}",
            code="unknown_flavor",
            expected=f"one of {', '.join(GPUS)}",
            got=f"{flavor.gpus} x {flavor.gpu}",
            hint=f"plan with --flavor {FLAVOR}, l4x1 or a100-large",
        )
    return flavor.gpu


def write_notebook(
    path: Path, plan: Path, *, gpu: str, run_id: str, data: dict[str, Path], packages: tuple[str, ...]
) -> dict[str, FileDigest]:
    """Writes the notebook. Returns the digest of each file in it.

    Args:
        plan: the file of the plan.
        data: the files of local data by their path below `data/`; empty for data on the Hub.
        packages: more packages, `name==version`, in addition to those in the header of the training program.

    Raises:
        UsageError: the data is too large to lie in a notebook.
    """
    sources = {"train.py": train_program(), "plan.json": plan} | {f"data/{name}": file for name, file in data.items()}
    digests, packed, size = dict[str, FileDigest](), dict[str, str](), 0
    for name, source in sources.items():
        content = source.read_bytes()
        digests[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        packed[name] = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
        size += len(packed[name])
        if size > LARGEST_BYTES:
            raise UsageError(
                f"the data is too large for a notebook: at least {megabytes(size)}, compressed and as text",
                code="local_input",
                expected=f"at most {megabytes(LARGEST_BYTES, 0)}",
                got=f"{size} bytes",
                hint="upload the dataset to the Hub and pass its id as --data",
            )
    settings = {
        "run": run_id,
        "data": f"data/{next(iter(data)).split('/')[0]}" if data else None,
        "packages": list(packages),
        "environment": ENVIRONMENT | {"SKILL_TRAIN_RUN": run_id},
    }
    notebook: JsonObject = json.loads(template("colab.ipynb").read_text(encoding="utf-8"))
    notebook["metadata"]["colab"]["gpuType"] = gpu
    _fill(notebook, "settings", f"SETTINGS = {settings!r}\n")
    _fill(notebook, "files", _as_source(digests, packed))
    write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return digests


def _as_source(digests: dict[str, FileDigest], packed: dict[str, str]) -> str:
    """Base64 and digests as a Python literal in short lines. No byte of a file becomes code."""
    lines = ["FILES = {"]
    for name, file in digests.items():
        text = packed[name]
        lines += [f"    {name!r}: {{", f'        "bytes": {file["bytes"]},', f'        "sha256": "{file["sha256"]}",']
        lines += [
            '        "content": """',
            *(text[at : at + _LINE] for at in range(0, len(text), _LINE)),
            '""",',
            "    },",
        ]
    return "\n".join([*lines, "}\n"])


def _fill(notebook: JsonObject, tag: str, source: str) -> None:
    (cell,) = (cell for cell in notebook["cells"] if tag in cell["metadata"].get("tags", []))
    cell["source"] = source.splitlines(keepends=True)
