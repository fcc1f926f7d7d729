"""Files that are shipped with the package: the demo, the skill, the program of a SkyPilot node. In a checkout they are
read from the repository."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "shipped"  # only in the wheel


def is_checkout() -> bool:
    return not _SHIPPED.is_dir()


def program_packages() -> list[str]:
    """The packages in the header of the training program, each with its version."""
    header = (_PACKAGE / "program" / "main.py").read_text(encoding="utf-8").split("# ///")[1]
    return re.findall(r'^#\s+"([\w.-]+==[\w.]+)",$', header, re.MULTILINE)


def node_program() -> Path:
    """`skypilot_node.py`, which runs beside `train.py` on each machine of a SkyPilot task."""
    return (_PACKAGE.parents[1] / "scripts" if is_checkout() else _SHIPPED) / "skypilot_node.py"


def demo(method: str = "text") -> Path:
    """The folder with the embedded model, dataset and recipe, for text or for the method `vision`."""
    return _PACKAGE / "demo" if method == "text" else _PACKAGE / "demo" / method


def report() -> Path:
    """The folder with the template and the style sheet of the report."""
    return _PACKAGE / "report"


def template(name: str) -> Path:
    return skill() / "templates" / name


def skill() -> Path:
    """The folder with SKILL.md, references, templates and scripts: in the package in a wheel, or else the checkout."""
    shipped = _SHIPPED / "skill"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1]
