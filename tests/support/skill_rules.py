"""What agents' loaders ask of a skill, as one list of findings.

Sources, read 2026-11-21: agentskills.io/specification (frontmatter, folder name, at most 500 lines and 5,000 tokens);
the checks that Anthropic's packager makes before it zips a skill (no angle brackets in a description, these keys only);
this project's own limits (150 lines, a description of 500 characters, which Codex and Claude Code list whole).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

KEYS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
MOST_LINES, MOST_CHARACTERS = 150, 20_000  # 5,000 tokens of 4 characters
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
_NAMED = re.compile(r"`((?:references|templates|scripts)/[\w./-]+)`")


def findings(folder: Path) -> list[str]:
    """Everything that is wrong with the skill in a folder; an empty list when a loader takes it."""
    page = folder / "SKILL.md"
    if not page.is_file():
        return ["no SKILL.md"]
    text = page.read_text(encoding="utf-8")
    match = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if match is None:
        return ["no frontmatter"]
    try:
        front = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"frontmatter is not YAML: {error}"]
    return [*_frontmatter(front, folder.name), *_body(match[2]), *_links(folder)]


def _frontmatter(front: Any, folder: str) -> list[str]:
    if not isinstance(front, dict):
        return ["frontmatter is not a mapping"]
    name, description = str(front.get("name", "")), str(front.get("description", ""))
    rules = {
        f"unknown keys {sorted(set(front) - KEYS)}": not set(front) <= KEYS,
        f"name {name!r} is not lowercase words with hyphens": not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name),
        f"name of {len(name)} characters": len(name) > 64,
        f"name {name!r} in a folder {folder!r}": name != folder,
        f"description of {len(description)} characters": not 0 < len(description) <= 500,
        "angle brackets in the description": bool(re.search(r"[<>]", description)),
        "compatibility is too long": len(str(front.get("compatibility", ""))) > 500,
        "allowed-tools is not one text": not isinstance(front.get("allowed-tools", ""), str),
        "metadata has values that are not texts": not _texts(front.get("metadata", {})),
    }
    return [finding for finding, broken in rules.items() if broken]


def _texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _body(body: str) -> list[str]:
    lines = len(body.splitlines())
    found = [f"{lines} lines"] if lines > MOST_LINES else []
    return found + ([f"{len(body)} characters"] if len(body) > MOST_CHARACTERS else [])


def _links(folder: Path) -> list[str]:
    """Links of all pages, and the files that SKILL.md names, lead to something inside the skill."""
    found = []
    for page in (folder / "SKILL.md", *sorted((folder / "references").glob("*.md"))):
        targets = [t for t in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in t]
        found += [f"{page.name} links to {t}" for t in targets if not _inside(folder, page.parent / t)]
    named = _NAMED.findall((folder / "SKILL.md").read_text(encoding="utf-8"))
    return found + [f"SKILL.md names {name}" for name in named if not _inside(folder, folder / name)]


def _inside(folder: Path, target: Path) -> bool:
    return target.exists() and target.resolve().is_relative_to(folder.resolve())
