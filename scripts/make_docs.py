"""Writes the documentation that the program itself knows: `python scripts/make_docs.py [--check]`.

    SKILL.md, README.md    the blocks between `<!-- generated:NAME -->` and `<!-- /generated -->`
    references/cli.md      every command as its `--help` prints it, without columns and what all have in common
    references/recipe.md   every recipe field with its type, default, unit and meaning
    references/devices.md  its table of devices
    references/verification.md  the architectures of which `verify` knows every weight

With `--check` nothing is written; exit 1 and the names of the files that are out of date.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from skill_train.cli import cli
from skill_train.commands._command import FORMATS
from skill_train.core.errors import EXIT_CODES
from skill_train.estimate.targets import read_table
from skill_train.recipe.fields import Recipe
from skill_train.verify.weights.places import TRIED

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by scripts/make_docs.py (`make docs`); change the program, not this page. -->\n"
_BLOCK = re.compile(r"(<!-- generated:(?P<name>[a-z-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_WITH_BLOCKS = ("devices.md", "verification.md")
_HELP_COLUMNS = 110
_TYPES = {
    "bool": "true or false",
    "dict[str, str]": "text: text",
    "float": "number",
    "int": "whole number",
    "list[str]": "list of text",
    "str": "text",
}


# What the help of each command says again: two options, the exit codes behind all others, and the list of commands.
_SHARED = re.compile(r"^  (--format|-h, --help) .*\n?(^ {8,}\S.*\n)*|^ *(Exit codes|Commands):\n(.*\n?)*", re.MULTILINE)
_NO_OPTIONS = re.compile(r"\n+Options:\Z")


def main() -> int:
    """Exit code: 0, or 1 when `--check` found a stale page."""
    pages = {ROOT / "references" / "cli.md": cli_page(), ROOT / "references" / "recipe.md": recipe_page()}
    for page in (ROOT / "SKILL.md", ROOT / "README.md", *(ROOT / "references" / name for name in _WITH_BLOCKS)):
        pages[page] = with_blocks(page.read_text(encoding="utf-8"))
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" not in sys.argv[1:]:
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date: make docs' if '--check' in sys.argv else 'written'}")
    return int(bool(stale) and "--check" in sys.argv[1:])


def with_blocks(text: str) -> str:
    """The page with each generated block renewed."""
    blocks = {
        "architectures": lambda: f"{textwrap.fill(', '.join(sorted(TRIED)), 140, break_on_hyphens=False)}.\n",
        "commands": command_table,
        "exit-codes": exit_code_table,
        "devices": device_table,
    }
    return _BLOCK.sub(lambda match: match[1] + blocks[match["name"]]() + match[3], text)


def command_table() -> str:
    """Name, arguments and first sentence of every command, as a Markdown table."""
    rows = [
        f"| `{_cell(' '.join([name, *_arguments(command)]))}` | {_cell(_first_sentence(command))} |"
        for name, command in commands()
    ]
    return _table("| command | does |", rows)


def exit_code_table() -> str:
    """Exit codes and their meaning, as a Markdown table."""
    return _table("| exit code | means |", [f"| {code} | {_cell(text)} |" for code, text in EXIT_CODES.items()])


def device_table() -> str:
    """Every device that `--for` knows, and the sources of its values, as Markdown."""
    table = read_table()
    rows = [
        f"| {', '.join([row.name, *row.names])} | {', '.join(map(str, row.memory_gb))} | {row.usable} "
        f"| {row.gigabytes_per_second:g} | {row.source} |"
        for row in table.devices
    ]
    shares = [
        f"| {name} | {usable.share[0]:.0%} to {usable.share[1]:.0%} | {_cell(usable.source)} |"
        for name, usable in table.usable.items()
    ]
    sources = [f"| {name} | {_cell(text)} |" for name, text in table.sources.items()]
    return "\n".join(
        [
            _table("| device | memory, GB | usable as | bandwidth, GB/s | source |", rows),
            _table("| usable as | share of the memory | source |", shares),
            _table("| source | is |", sources),
        ]
    )


def cli_page() -> str:
    """references/cli.md."""
    shared = (
        f"Every command takes `-h` and `--format [{'|'.join(FORMATS)}]`: auto is human on a terminal and json "
        "otherwise; quiet prints one value, such as the verdict. SKILL.md lists the commands and their exit codes."
    )
    parts = ["# The command line\n", NOTE, shared + "\n", *_help_section("", cli, None)]
    for name, command in commands():
        parts += _help_section(name, command, click.Context(cli, info_name="skill-train", **cli.context_settings))
    return "\n".join(parts)


def recipe_page() -> str:
    """references/recipe.md."""
    rows = [
        f"| `{field.name}` | {_cell(_type(field))} | {_default(field)} | {_cell(field.metadata.get('unit', ''))} "
        f"| {_cell(field.metadata['help'])} |"
        for field in dataclasses.fields(Recipe)
    ]
    intro = "A recipe is a YAML file of these keys. The least that works is `model` and `data`.\n"
    return "\n".join(["# Recipe fields\n", NOTE, intro, _table("| key | type | default | unit | meaning |", rows)])


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups opened, in the order of the help page."""
    yield from _walk(cli, "")


def _walk(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from _walk(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _help_section(name: str, command: click.Command, parent: click.Context | None) -> list[str]:
    # Its own width, so that the page does not depend on the terminal that writes it.
    settings = {**command.context_settings, "terminal_width": _HELP_COLUMNS, "max_content_width": _HELP_COLUMNS}
    context = click.Context(command, info_name=name or "skill-train", parent=parent, **settings)
    title = f"skill-train {name}".rstrip()
    own = _NO_OPTIONS.sub("", _SHARED.sub("", command.get_help(context)).rstrip())
    own = re.sub(r"(?<=\S) {3,}", "  ", re.sub(r"\n {7,}", "\n      ", own))  # the columns of --help are 4 kB of blanks
    return [f"## {title}\n", f"```text\n{own}\n```\n"]


def _arguments(command: click.Command) -> list[str]:
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    return [a.human_readable_name if a.required else f"[{a.human_readable_name.strip('[]')}]" for a in arguments]


def _first_sentence(command: click.Command) -> str:
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(".")


def _type(field: dataclasses.Field[Any]) -> str:
    return _TYPES[str(field.type).removesuffix(" | None")]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default in ("", dataclasses.MISSING):
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def _table(header: str, rows: list[str]) -> str:
    rule = "|" + " --- |" * (header.count("|") - 1)
    return "\n".join([header, rule, *rows]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
