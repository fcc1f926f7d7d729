"""Joins the parts of the training program into scripts/train.py: `python scripts/build_train.py [--check]`.

The parts lie in skill/skill_train/program/. The joined file runs alone, here and in a cloud job. It starts with the
head of main.py (pinned versions, docstring), then come the imports of all parts, then the parts from events to main.
The parts have what explains them: the joined file has the docstring of main.py, and of comments what tools read.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "skill" / "skill_train" / "program"
TARGET = ROOT / "scripts" / "train.py"
PACKAGE = "skill_train.program."
# A part imports those before it.
PARTS = (
    "events", "model_files", "folders/base", "folders/checkpoints", "plan", "chat/chosen", "chat/pairs", "examples",
    "chat/answers", "chat/typed", "chat/told", "chat/labels", "parquet", "pictures/beside", "pictures/decode",
    "pictures/find", "pictures/parts", "pictures/engine", "pictures/processor", "pictures/tokens", "tables/shape",
    "rows", "start/given", "split", "tokenizer", "encode", "model", "watch", "trainer", "checks", "cloud/kept",
    "cloud/push", "cloud/job", "main",
)  # fmt: skip
FOR_TOOLS = ("# noqa", "# type:", "# fmt:")
NOTE = "# Written by scripts/build_train.py (`make docs`) from skill/skill_train/program/: change the parts.\n\n"


def main() -> None:
    text = join(SOURCE)
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        raise SystemExit("scripts/train.py differs from its parts: change skill/skill_train/program/, then make docs")


def join(folder: Path) -> str:
    """The whole program. Ends with a message when the parts cannot share one namespace."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.py") if path.name != "__init__.py")
    modules = {path.with_suffix("").as_posix() for path in paths}
    if modules != set(PARTS):
        raise SystemExit(f"{folder}: PARTS and the modules differ by {', '.join(sorted(modules ^ set(PARTS)))}")
    sources = {part: shortened((folder / f"{part}.py").read_text(encoding="utf-8")) for part in PARTS}
    trees = {part: parsed(source) for part, source in sources.items()}
    check_imports(trees)
    check_names(trees)
    head = sources["main"].partition("from __future__")[0]
    bodies = [banner(part, trees[part]) + body(sources[part], trees[part]) for part in PARTS]
    return NOTE + head + imports(trees) + "\n" + "\n\n".join(bodies)


# Cached for the tests, which join the parts again and again with one of them changed.
parsed = cache(ast.parse)


@cache
def shortened(source: str) -> str:
    """A source without comments, but those that tools read, and without docstrings, but those that are all that a class
    has."""
    lines = source.splitlines(keepends=True)
    start = source[: source.index("from __future__")].count("\n")  # before it main.py holds the pinned versions
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT and row > start and not token.string.startswith(FOR_TOOLS):
            code = lines[row - 1][:column].rstrip()
            lines[row - 1] = code + "\n" if code else ""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in nodes:
        text = node.body[0]
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            last = text.end_lineno or 0
            while not lines[last].strip():
                last += 1
            lines[text.lineno - 1 : last] = [""] * (last - text.lineno + 1)
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines))


def first_sentence(text: str) -> str:
    return re.split(r"\n\n|(?<=\.)\s", text, maxsplit=1)[0]


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


def origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """What an import binds: names, and where each is from."""
    module = f"{node.module or 'skill_train'}." if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name: module + alias.name for alias in node.names}


def imports(trees: dict[str, ast.Module]) -> str:
    """Those of the standard library, in the order that ruff wants."""
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


def banner(part: str, tree: ast.Module) -> str:
    """The name of a part, and the first sentence about it; main's docstring is that of the whole."""
    text = "" if part == "main" else first_sentence(ast.get_docstring(tree) or "")
    return f"# --- {part} ---\n" + "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def body(source: str, tree: ast.Module) -> str:
    last = max(node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    rest = "".join(source.splitlines(keepends=True)[last:]).lstrip("\n")
    return ("\n\n" if rest.startswith(("def ", "class ", "@")) else "\n") + rest


if __name__ == "__main__":
    main()
