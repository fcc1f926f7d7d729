"""The files of the skill: SKILL.md, the references, the templates and the standalone programs.

In the wheel they are in `skill_train/shipped/skill/`, in a checkout at their places in git. A copy has the same bytes,
except for the header of the programs. In a checkout they use the package beside them; in a copy they require the
version of skill-train that wrote the copy.
"""

import hashlib
import re
from pathlib import Path

from skill_train.core import resources

NAME = "skill-train"  # also the name of the folder, as the specification requires
PROGRAMS = ("export_gguf.py", "inspect_dataset.py", "plan.py")  # train.py is in the package
# The line in the header of each program that names the package of a checkout.
_BESIDE = '#\n# [tool.uv.sources]\n# skill-train = { path = ".." }\n'
_WANTED = re.compile(r'"skill-train(\[[a-z,]+\])?"')


def skill_files(version: str | None) -> dict[str, bytes]:
    """The contents of the skill by path. `version` is the version that its programs require; None for any."""
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
