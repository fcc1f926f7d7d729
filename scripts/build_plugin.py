"""Writes what plugin systems read: `python scripts/build_plugin.py [--check]`.

    plugins/skill-train/            one folder that is a plugin for each of them
        plugin.json                 Agent Plugins 1.0.0 (vendor-neutral)
        .claude-plugin/plugin.json  .codex-plugin/plugin.json  .cursor-plugin/plugin.json  gemini-extension.json
        skills/skill-train/         the skill, as `skill-train skills install` copies it
    .claude-plugin/marketplace.json    `/plugin marketplace add OWNER/REPO` of Claude Code
    .agents/plugins/marketplace.json   `codex plugin marketplace add OWNER/REPO`

Version, licence and keywords are those of pyproject.toml, name and description those of SKILL.md. There is no
gemini-extension.json at the root: Gemini would look for a folder `skills` beside it, and one there hides the root's
SKILL.md from Claude Code. With `--check` nothing is written; exit 1 and the names of the files that are out of date.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from skill_train.skill.files import skill_files

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "plugins/skill-train"
GENERATED = (PLUGIN, ".claude-plugin", ".agents/plugins")  # nothing else lies there
OWNER = "The skill-train authors"
# https://agent-plugins.org/schemas/1.0.0/plugin.schema.json, a closed set of fields (agent-plugins-spec, spec/1.0.0.md)
AGENT_PLUGINS = "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"


def main() -> int:
    """Exit code: 0, or 1 when `--check` found a difference."""
    expected = files()
    there = {path.relative_to(ROOT).as_posix() for folder in GENERATED for path in _files_in(ROOT / folder)}
    stale = [name for name, content in expected.items() if name not in there or (ROOT / name).read_bytes() != content]
    gone = sorted(there - set(expected))
    check = "--check" in sys.argv[1:]
    if not check:
        for name in stale:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_bytes(expected[name])
        for name in gone:
            (ROOT / name).unlink()
    for name in [*stale, *gone]:
        print(f"{name} {'is out of date: make docs' if check else 'written' if name in expected else 'removed'}")
    return int(check and bool(stale or gone))


def files() -> dict[str, bytes]:
    """Content by path in the repository."""
    about = _common_fields()
    manifests = {f"{PLUGIN}/{name}": document for name, document in _manifests(about).items()} | _catalogues(about)
    skill = skill_files(about["version"])
    return {
        **{name: (json.dumps(document, indent=2) + "\n").encode() for name, document in manifests.items()},
        **{f"{PLUGIN}/skills/{about['name']}/{name}": content for name, content in skill.items()},
        f"{PLUGIN}/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def _common_fields() -> dict[str, Any]:
    """What every manifest says alike."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    front = yaml.safe_load((ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n")[1])
    return {
        "name": front["name"],
        "version": project["version"],
        "description": front["description"],
        "author": {"name": OWNER},
        "license": project["license"],
        "keywords": project["keywords"],
    }


def _manifests(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    short = {key: about[key] for key in ("name", "version", "description")}
    return {
        "plugin.json": {"$schema": AGENT_PLUGINS, **about},
        ".claude-plugin/plugin.json": about,  # finds skills/ by itself
        ".codex-plugin/plugin.json": {**about, "skills": "./skills/"},
        ".cursor-plugin/plugin.json": {**about, "skills": "skills"},
        "gemini-extension.json": short,  # finds skills/ by itself
    }


def _catalogues(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The repository as a marketplace of one plugin."""
    entry = {"name": about["name"], "description": about["description"]}
    codex = {"installation": "AVAILABLE", "authentication": "ON_INSTALL"}
    source = {"source": "local", "path": f"./{PLUGIN}"}
    return {
        ".claude-plugin/marketplace.json": {
            "name": about["name"],
            "owner": about["author"],
            "plugins": [{**entry, "source": f"./{PLUGIN}"}],
        },
        ".agents/plugins/marketplace.json": {
            "name": about["name"],
            "interface": {"displayName": about["name"]},
            "plugins": [{"name": about["name"], "source": source, "policy": codex, "category": "Developer Tools"}],
        },
    }


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


if __name__ == "__main__":
    sys.exit(main())
