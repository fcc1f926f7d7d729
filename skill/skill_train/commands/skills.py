"""`skills install` and `skills check`: installs the skill for coding agents, and checks installed copies."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from skill_train.commands._command import Commands, command, option
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, NotInstalled, UsageError, nearest, quoted
from skill_train.run.folder import versions
from skill_train.skill import install
from skill_train.skill.files import NAME, skill_files
from skill_train.skill.install import Copy, Done, Skill

TARGETS = ("agents", "claude")
_TARGET = "agents|claude|PATH"
_DEFAULTS = ("agents", "project")


def _scope_option(default: str) -> str | None:
    help_text = f"project: the current folder; global: the user's home.  [default: {default}]"
    return option(None, help_text, ("project", "global"))


@dataclass(frozen=True)
class InstallOptions:
    target: str = option(
        "agents",
        "agents: .agents/skills and a link in .claude/skills; claude: .claude/skills; PATH: a folder of skills.",
        metavar=_TARGET,
    )
    scope: str | None = _scope_option("project")
    force: bool = option(False, "Also replace edited files, and files with the same names from other sources.")


@dataclass(frozen=True)
class CheckOptions:
    target: str | None = option(None, "Place to check.  [default: all known places]", metavar=_TARGET)
    scope: str | None = _scope_option("both")


@command(
    InstallOptions,
    "skill-train skills install",
    "skill-train skills install --target claude --scope global",
    name="skills install",
)
def install_command(options: InstallOptions, console: Console) -> Result:
    """Copy the skill (instructions, references, templates, programs) to the folders that agents read."""
    skill = _skill()
    main, linked = _places(options.target, options.scope)
    if not options.force:
        install.refuse_foreign(main)
    if linked is not None and not options.force:
        install.refuse_foreign_link(linked, main)
    done = [install.install(skill, main, force=options.force)]
    if linked is not None:
        done.append(install.link(skill, linked, main, force=options.force))
    for place in done:
        if place.kept:
            named = ", ".join(place.kept)
            console.warn("edited_files", f"{place.path}: edited files were kept: {named}; --force replaces them")
    places = [_shown_place(place) for place in done]
    return Result(
        {"version": skill.version, "files": len(skill.files), "places": places},
        human=lambda rich: _draw(rich, places),
        quiet=str(main),
        next=[shlex.join(["skill-train", "skills", "check", *_options(main)])],
    )


@command(
    CheckOptions,
    "skill-train skills check",
    "skill-train skills check --scope global --format json",
    name="skills check",
)
def check_command(options: CheckOptions, console: Console) -> Result:
    """Compare each installed copy of the skill with this package: current, older, newer, edited or different."""
    skill = _skill()
    folders = dict.fromkeys(_unlinked(place) for place in _all_places(options.target, options.scope))
    copies = [copy for folder in folders if (copy := install.read_copy(skill, folder))]
    if not copies:
        raise NotInstalled(
            "the skill is not installed for any agent here",
            code="skill_missing",
            expected=", ".join(str(folder) for folder in folders),
            hint=_install_command(next(iter(folders))),
        )
    places = [_shown_place(copy) for copy in copies]
    wrong = [copy for copy in copies if copy.state != "current"]
    return Result(
        {"version": skill.version, "places": places},
        human=lambda rich: _draw(rich, places),
        quiet=wrong[0].state if wrong else "current",
        error=_outdated(wrong[0], skill) if wrong else None,
    )


def _skill() -> Skill:
    version = versions()["skill-train"]
    return Skill(version or "unknown", skill_files(version))


def _all_places(target: str | None, scope: str | None) -> Iterator[Path]:
    targets = TARGETS if target is None else (target,)
    scopes: tuple[str | None, ...] = ("project", "global") if scope is None else (scope,)
    for agent in targets:
        for which in scopes if agent in TARGETS else (scope,):
            main, linked = _places(agent, which)
            yield from (main, linked) if linked is not None else (main,)


def _places(target: str, scope: str | None) -> tuple[Path, Path | None]:
    """The folder of the skill, and the place for a link to it; None without a link."""
    root = Path.home() if scope == "global" else Path.cwd()
    claude = Path(os.environ.get("CLAUDE_CONFIG_DIR") or root / ".claude") if scope == "global" else root / ".claude"
    if target == "agents":
        return root / ".agents" / "skills" / NAME, claude / "skills" / NAME
    if target == "claude":
        return claude / "skills" / NAME, None
    if scope is not None:
        raise UsageError(f"--scope cannot be used with a folder: {target}", code="bad_usage", hint="omit --scope")
    if not target or (not Path(target).is_dir() and os.sep not in target):
        raise UsageError(
            f"no folder {target!r}{nearest(target, TARGETS)}",
            code="bad_usage",
            expected="agents, claude, or the folder that holds an agent's skills",
            hint=f"for a new folder with this name, use {quoted('./' + target)}",
        )
    return Path(target).absolute() / NAME, None


def _unlinked(place: Path) -> Path:
    """The place behind a link, because a link and its target are one copy."""
    return place.resolve() if place.is_dir() else place


def _shown_place(place: Done | Copy) -> dict[str, object]:
    """A place in the answer. Empty lists of files are left out."""
    values = dataclasses.asdict(place) | {"path": str(place.path)}
    return {key: value for key, value in values.items() if value or key == "version"}


def _draw(rich: Any, places: list[dict[str, object]]) -> None:
    for place in places:
        rest = [f"{key}: {', '.join(value)}" for key, value in place.items() if isinstance(value, list)]
        end = f" -> {place['link_to']}" if "link_to" in place else ""
        rich.print(f"{place['state']:9} {place['path']}{end}", *rest, sep="\n  ", soft_wrap=True)


def _outdated(copy: Copy, skill: Skill) -> DecisionNeeded:
    descriptions = {
        "older": "is older than the package",
        "newer": "is newer than the package",
        "edited": "was edited",
        "unmanaged": "is another one and was not put there by this package",
        "different": "is not what this package has",
    }
    again = _install_command(copy.path) + (" --force" if copy.state in ("edited", "unmanaged") else "")
    return DecisionNeeded(
        f"{copy.path} {descriptions.get(copy.state, copy.state)}",
        code="skill_outdated",
        expected=skill.version,
        got=copy.version or "no version",
        hint="pip install --upgrade skill-train" if copy.state == "newer" else again,
    )


def _install_command(folder: Path) -> str:
    return shlex.join(["skill-train", "skills", "install", *_options(folder)])


def _options(folder: Path) -> list[str]:
    """The options that select this folder."""
    for scope in ("project", "global"):
        for target in TARGETS:
            if _unlinked(_places(target, scope)[0]) == _unlinked(folder):
                named = {"--target": target, "--scope": scope}
                return [word for option, value in named.items() if value not in _DEFAULTS for word in (option, value)]
    return ["--target", str(folder.parent)]


@click.group("skills", cls=Commands)
def skills() -> None:
    """Install this skill for coding agents, and check whether the installed copies are current."""


skills.add_command(install_command)
skills.add_command(check_command)
