"""An installation with chosen packages only: links to those of this environment, in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

BASE = ("click", "huggingface_hub", "msgspec", "pyyaml", "rich", "safetensors")
SOURCE = str(Path(__file__).resolve().parents[2] / "skill")
_MAIN = "import sys; from skill_train.cli import main; main(sys.argv[1:])"


def installation(folder: Path, names: tuple[str, ...] = BASE) -> Path:
    """Links these distributions and all that they need, and skill-train's own metadata, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tops = {top for name in _with_needs(names) for top in _tops(name)}
    for top in tops | {top for top in _tops("skill-train") if top.suffix == ".dist-info"}:
        (folder / top.name).symlink_to(top)
    return folder


def run(site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line with the packages of `site` alone: `-S` leaves this environment's own out."""
    paths = os.pathsep.join((str(site), SOURCE))
    return subprocess.run(
        [sys.executable, "-S", "-c", _MAIN, *arguments],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _with_needs(names: tuple[str, ...]) -> set[str]:
    needed, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name in needed:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another system
        needed.add(name)
        todo += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    return needed


def _tops(name: str) -> set[Path]:
    """Top-level files and folders of a distribution, where they lie."""
    found = metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {Path(str(found.locate_file(top))) for top in tops}
