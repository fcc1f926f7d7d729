"""Joins the parts of the training program into scripts/train.py: `python scripts/build_train.py [--check]`.

The parts lie in skill/skill_train/program/. The joined file runs alone, here and in a cloud job. A wheel has the parts
and the digest of the joined file, and joins them in the same way (skill_train/machine/training_program.py).
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skill_train.machine.training_program import PACKAGE, PARTS, joined, origins

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "skill" / "skill_train" / "program"
TARGET = ROOT / "scripts" / "train.py"
DIGEST = SOURCE / "train.sha256"


def main() -> None:
    text = join(SOURCE)
    for path, content in ((TARGET, text), (DIGEST, hashlib.sha256(text.encode()).hexdigest() + "\n")):
        if "--check" not in sys.argv[1:]:
            path.write_text(content, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != content:
            raise SystemExit(f"{path.name} differs from its parts: change skill/skill_train/program/, then make docs")


def join(folder: Path) -> str:
    """The whole program. Ends with a message when the parts cannot share one namespace."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.py") if path.name != "__init__.py")
    modules = {path.with_suffix("").as_posix() for path in paths}
    if modules != set(PARTS):
        raise SystemExit(f"{folder}: PARTS and the modules differ by {', '.join(sorted(modules ^ set(PARTS)))}")
    sources = {part: (folder / f"{part}.py").read_text(encoding="utf-8") for part in PARTS}
    trees = {part: parsed(source) for part, source in sources.items()}
    check_imports(trees)
    check_names(trees)
    return joined(sources, trees)


# Cached for the tests, which join the parts again and again with one of them changed.
parsed = cache(ast.parse)


def check_imports(trees: dict[str, ast.Module]) -> None:
    """At the top the standard library and names of earlier parts, under their own names; elsewhere nothing of ours."""
    for part, tree in trees.items():
        earlier = {PACKAGE + each.replace("/", ".") for each in PARTS[: PARTS.index(part)]}
        for node in imports_in(tree):
            modules = origins(node).values()
            if node in tree.body and all(module.split(".")[0] in sys.stdlib_module_names for module in modules):
                continue
            plain = isinstance(node, ast.ImportFrom) and not any(alias.asname for alias in node.names)
            from_earlier = plain and node in tree.body and getattr(node, "module", None) in earlier
            heavy = node not in tree.body and not any(module.startswith("skill_train") for module in modules)
            if not (from_earlier or heavy):
                raise SystemExit(f"{part}.py, line {node.lineno}: a part cannot do this: {ast.unparse(node)}")


@cache
def imports_in(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def check_names(trees: dict[str, ast.Module]) -> None:
    """A name has one definition, or one import, over all parts."""
    found: dict[str, set[str]] = defaultdict(set)
    for part, tree in trees.items():
        for node in tree.body:
            for name in defined(node):
                found[name].add(f"{part}.py, line {node.lineno}")
            if isinstance(node, (ast.Import, ast.ImportFrom)) and PACKAGE not in ast.unparse(node):
                for name, origin in origins(node).items():
                    found[name].add(f"import of {origin}")
    twice = [f"{name} ({'; '.join(sorted(places))})" for name, places in found.items() if len(places) > 1]
    if twice:
        raise SystemExit(f"defined more than once: {', '.join(twice)}")


def defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


if __name__ == "__main__":
    main()
