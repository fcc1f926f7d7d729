"""The files of the skill: SKILL.md, the references, the templates and the standalone programs.

In the wheel they lie in `skill_train/shipped/skill/`, in a checkout where git has them. A copy is the same bytes, but
for the programs: in a checkout they find the package beside them, in a copy they ask for the version that made it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from skill_train.core import resources

NAME = "skill-train"  # of the folder too: the specification wants them equal
PROGRAMS = ("export_gguf.py", "inspect_dataset.py", "plan.py")  # train.py travels in the package
# In the header of each program: where a checkout has the package.
_BESIDE = '#\n# [tool.uv.sources]\n# skill-train = { path = ".." }\n'
_WANTED = re.compile(r'"skill-train(\[[a-z,]+\])?"')


def skill_files(version: str | None) -> dict[str, bytes]:
    """The contents of the skill by path. `version` is the one that its programs require; None for any."""
    root = resources.skill()
    return {path.relative_to(root).as_posix(): _content(path, version) for path in _paths(root)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _paths(root: Path) -> list[Path]:
    templates = (p for p in (root / "templates").rglob("*") if p.is_file() and not p.name.startswith("."))
    programs = (root / "scripts" / name for name in PROGRAMS)
    return [root / "SKILL.md", *sorted((root / "references").glob("*.md")), *sorted(templates), *programs]


def _content(path: Path, version: str | None) -> bytes:
    if path.name not in PROGRAMS:
        return path.read_bytes()
    pin = f"=={version}" if version else ""
    text = path.read_text(encoding="utf-8").replace(_BESIDE, "", 1)
    return _WANTED.sub(rf'"skill-train\g<1>{pin}"', text, count=1).encode()
