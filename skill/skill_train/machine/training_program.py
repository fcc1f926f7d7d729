"""The training program as one file: scripts/train.py in a checkout. A wheel has only its parts, and joins them to the
same bytes.

The parts are the modules of `skill_train.program`. The joined file starts with the head of main.py (pinned versions,
docstring). Then come the imports of all parts, then the parts from events to main.
"""

import ast
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from skill_train.core.errors import NotInstalled
from skill_train.core.files import write_text
from skill_train.core.resources import is_checkout
from skill_train.machine.read import cache_dir

SOURCE = Path(__file__).resolve().parents[1] / "program"
DIGEST = SOURCE / "train.sha256"
PACKAGE = "skill_train.program."
# The parts in the order of the file. A part imports only earlier parts.
PARTS = (
    "events", "model_files", "folders/base", "folders/checkpoints", "plan", "chat/choices", "chat/pairs", "examples",
    "chat/answers", "chat/typed", "chat/row_notes", "chat/labels", "tables/columns", "tables/shape", "parquet",
    "pictures/locations", "pictures/decode", "pictures/in_rows", "pictures/parts", "pictures/engine",
    "pictures/processor", "pictures/tokens", "rows", "start/inputs", "split", "tokenizer", "encode", "model", "watch",
    "trainer", "checks", "cloud/file_names", "cloud/push", "cloud/job", "main",
)  # fmt: skip
_NOTE = "# Written by scripts/build_train.py (`make docs`) from skill/skill_train/program/: change the parts.\n\n"


@cache
def train_program() -> Path:
    """The path of `train.py`. An installation from a wheel writes it to the cache first, unless it is there.

    Raises:
        NotInstalled: a part was changed after the release.
    """
    if is_checkout():
        return SOURCE.parents[2] / "scripts" / "train.py"
    sources = {part: (SOURCE / f"{part}.py").read_text(encoding="utf-8") for part in PARTS}
    text = joined(sources, {part: ast.parse(source) for part, source in sources.items()})
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != DIGEST.read_text(encoding="utf-8").strip():
        raise NotInstalled(
            f"the training program in {SOURCE} was changed after it was installed",
            code="missing_package",
            expected="the files of the release, from which each job gets the same program",
            hint="pip install --force-reinstall skill-train",
        )
    path = cache_dir() / f"train-{digest[:16]}" / "train.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return path


def joined(sources: Mapping[str, str], trees: Mapping[str, ast.Module]) -> str:
    """The text of the whole program, from the source and the syntax tree of each part."""
    head = sources["main"].partition("from __future__")[0]
    bodies = [_banner(part, trees[part]) + _body(sources[part], trees[part]) for part in PARTS]
    return _NOTE + head + _imports(trees) + "\n" + "\n\n".join(bodies)


def origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that an import binds, each with its dotted path."""
    module = f"{node.module or 'skill_train'}." if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name: module + alias.name for alias in node.names}


def _imports(trees: Mapping[str, ast.Module]) -> str:
    """The imports of all parts from outside the program, in ruff's order."""
    nodes = [node for tree in trees.values() for node in tree.body]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not f"{node.module}.".startswith(PACKAGE):
            names[str(node.module)] |= {alias.name for alias in node.names}
    lines = [f"from __future__ import {', '.join(names.pop('__future__'))}\n", *(f"import {m}" for m in sorted(plain))]
    for module in sorted(names):
        ordered = sorted(names[module], key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        lines.append(f"from {module} import {', '.join(ordered)}")
    return "\n".join(lines) + "\n"


def _banner(part: str, tree: ast.Module) -> str:
    """A comment with the name of a part and its docstring; without main's docstring, which heads the whole file."""
    text = "" if part == "main" else ast.get_docstring(tree) or ""
    return f"# --- {part} ---\n" + "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def _body(source: str, tree: ast.Module) -> str:
    last = max(node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    rest = "".join(source.splitlines(keepends=True)[last:]).lstrip("\n")
    return ("\n\n" if rest.startswith(("def ", "class ", "@")) else "\n") + rest
