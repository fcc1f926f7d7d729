"""The documentation names what exists, and what exists is named."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from command_tree import commands
from skill_train.cli import GROUPS
from skill_train.core import errors
from skill_train.core.errors import EXIT_CODES
from skill_train.estimate.step import Range
from skill_train.plan import places as candidates
from skill_train.plan import where as rubric
from skill_train.plan.placement import HEADROOM, Choices
from skill_train.program import events
from skill_train.recipe.fields import Recipe

ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for folder in (".", "references", "templates", "bench", "evals", "scripts", ".github")
    for path in (ROOT / folder).glob("*.md")
)


COMMANDS = commands()
OPTIONS = {name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} for name, c in COMMANDS.items()}
# `skill-train` and the words after it, up to the end of the code or the line.
COMMAND = re.compile(r"skill-train (?P<rest>[a-z][^`\n]*)")
OPTION = re.compile(r"(?<![\w-])(?<!var\()--[a-z][a-z_-]*[a-z]")  # a page's own colours are var(--grid)
# Options of other programs, by the word that names the program in the same text.
FOREIGN = {
    "hf download": {"--local-dir"},
    "hf upload": {"--private"},
    "sky launch": {"--dryrun"},
    "pip install": {"--upgrade", "--force-reinstall"},
    "uv venv": {"--allow-existing", "--python", "--quiet"},
    "uv pip": {"--quiet", "--python"},
    "xcode-select": {"--install"},
    "llama-quantize": {"--imatrix"},
    "ollama show": {"--template"},
    "lms import": {"--copy", "--user-repo"},
    "llama-mtmd-cli": {"--image"},
    "Another host needs a key in a file": {"--api-key-file"},  # of llama-server
    "`--jinja` is its default": {"--jinja"},  # of llama-server
    "by its name (`--chat-template": {"--chat-template"},
    "the file is moved away": {"--copy"},  # of the line below `lms import`
    "powermetrics": {"--samplers"},
    "--rehearse goes with": {"--rehearse", "--job"},  # of train.py
    "with --job:": {"--job"},
    "accelerate launch": {"--cpu", "--num_processes"},
    "Show the version": {"--version"},  # of skill-train itself
}
# Not a command: "which skill-train does not make".
PROSE = re.compile(r"\b(?:which|that|what|with|from|by) skill-train\b")


def test_the_skill_is_short() -> None:
    assert len(SKILL.splitlines()) <= 150


def test_the_frontmatter_is_valid() -> None:
    """https://agentskills.io/specification: these keys only, and their limits."""
    _, front, body = SKILL.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == "skill-train"
    assert 100 < len(fields["description"]) <= 500
    assert len(fields.get("compatibility", "")) <= 500
    assert fields["description"].startswith("Fine-tune")  # the words that a user says come first
    assert body.strip().startswith("# ")


def test_the_skill_names_every_command_and_no_other() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+(?: [a-z-]+)*)", SKILL, re.MULTILINE))
    assert documented == set(COMMANDS)


def test_the_skill_explains_every_exit_code_and_no_other() -> None:
    documented = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", SKILL, re.MULTILINE)}
    assert documented == EXIT_CODES


def test_exit_codes_in_the_text_exist() -> None:
    named = {int(code) for page in PAGES for code in re.findall(r"\bexit (?:code )?(\d+)", _read(page), re.IGNORECASE)}
    assert named
    assert named <= set(EXIT_CODES)


def test_the_skill_says_when_to_read_each_reference() -> None:
    assert set(re.findall(r"references/[\w.-]+", SKILL)) == {
        str(path.relative_to(ROOT)) for path in (ROOT / "references").iterdir()
    }


def test_every_line_of_the_threat_model_names_a_test_that_is_there() -> None:
    page = _read(ROOT / "SECURITY.md")
    rows = re.findall(r"^\| (?!---|hostile).*\|$", page, re.MULTILINE)
    named = [re.search(r"`([\w/]+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) > 20 and [row for row, found in zip(rows, named, strict=True) if found is None] == []
    places = [(ROOT / "tests" / found[1], found[2]) for found in named if found]
    assert [name for path, name in places if f"\ndef {name}(" not in _read(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", _read(page)) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_pages_run(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", _read(page), flags=re.DOTALL)
    code = "\n".join(re.findall(r"```(?:sh|bash|text)?\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    assert list(_wrong_commands(code)) == []


def test_hints_in_the_program_name_commands_that_exist() -> None:
    """A hint is the exact next command, so it must be one."""
    wrong = []
    for name, text in _said():
        wrong += [f"{name}: {problem}" for problem in _wrong_commands(PROSE.sub("", text))]
    assert wrong == []


def test_options_that_messages_name_exist() -> None:
    """Also without a command before them: "the same command with --gate answers"."""
    wrong = []
    for name, text in _said():
        wrong += [f"{name}: {option}" for option in _unknown_options(text)]
    assert wrong == []


@pytest.mark.parametrize("page", sorted((ROOT / "references").glob("*.md")), ids=lambda page: page.name)
def test_options_that_references_name_exist(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", _read(page), flags=re.DOTALL)
    assert [option for line in text.splitlines() for option in _unknown_options(line)] == []


def test_the_check_of_options_finds_mistakes() -> None:
    assert list(_unknown_options("export again with --outtype bf16")) == ["--outtype"]
    assert list(_unknown_options("the same command with --gate=answers, or --dtype float32")) == []
    assert list(_unknown_options("--dtpye float32")) == ["--dtpye"]
    assert list(_unknown_options("use `--merge`.")) == ["--merge"]
    assert list(_unknown_options("--outtype")) == []  # a word of another program's command line
    assert list(_unknown_options("a -- b, ---, model--name")) == []


def test_the_check_of_commands_finds_mistakes() -> None:
    assert list(_wrong_commands("skill-train local --model M --data D")) == []
    assert list(_wrong_commands("skill-train lokal")) == ["skill-train lokal"]
    assert list(_wrong_commands("skill-train local --modle M")) == ["skill-train local --modle"]
    assert list(_wrong_commands("skill-train skills check --force")) == ["skill-train skills check --force"]
    assert list(_wrong_commands("skill-train skills")) == ["skill-train skills"]


def test_every_command_has_its_help() -> None:
    """One sentence, two examples, the exit codes, and every option explained."""
    for name, command in COMMANDS.items():
        assert re.match(r"[A-Z][^.]+\.", command.help or ""), name
        assert (command.help or "").count(f"\n  skill-train {name}") >= 2, name
        assert "Exit codes:" in (command.epilog or ""), name
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [p.opts for p in options if not p.help] == [], name


def test_every_recipe_field_is_explained() -> None:
    page = _read(ROOT / "references" / "recipe.md")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\S.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(Recipe.__dataclass_fields__)


def test_the_changelog_begins_with_this_version() -> None:
    project = tomllib.loads(_read(ROOT / "pyproject.toml"))["project"]
    newest = re.search(r"^## \[([^\]]+)\]", _read(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"]


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_rules_of_planning_are_those_of_the_program() -> None:
    """Every rule has its row, and every limit on the page is the one that is compared with."""
    page = re.sub(r"\s+", " ", _read(ROOT / "references" / "planning.md"))
    source = _read(ROOT / "skill" / "skill_train" / "plan" / "where.py")
    named = set(re.findall(r"Reason\(\s*\"([\w\s-]+)\"", source)) - {"sensitive", "asked"}
    assert named >= {"memory", "time", "context"}
    for rule in named:
        assert f"| `{rule}`" in page, rule
    assert f"from {rubric.LARGE / 1e9:g} billion" in page and f"up to {rubric.SMALL / 1e9:g} billion" in page
    assert f"longer than {rubric.LONG:,} tokens" in page and f"up to {rubric.SHORT:,} tokens" in page
    assert f"`--max-hours` ({Choices().max_hours:g})" in page
    assert [f"{HEADROOM[device]:.0%}".replace("%", " %") for device in ("cuda", "mps", "cpu")] == [
        "95 %",
        "90 %",
        "90 %",
    ]
    assert "95 % on CUDA, and 90 % on a Mac" in page
    assert candidates.timeout_seconds(Range(0, 3600, ""), 8.0) == 1.25 * 3600 + 600  # "a quarter more, and ten minutes"


def _wrong_commands(text: str) -> Iterator[str]:
    """Commands and options in the text that the command line does not have."""
    for match in COMMAND.finditer(text):
        words = _words(match["rest"])
        name = " ".join(words[: 1 + (words[0] in GROUPS)]) if words else ""
        if name not in OPTIONS:
            yield f"skill-train {name}"
            continue
        known = OPTIONS[name] | {"--help", "-h"}
        yield from (f"skill-train {name} {w}" for w in words if w.startswith("--") and w.split("=")[0] not in known)


def _unknown_options(text: str) -> Iterator[str]:
    """Options in a text that no command has, but for those of a program that the text names. One word alone is a part
    of another program's command line."""
    if not text.startswith("--") or " " in text.strip():
        of_others = {option for program, options in FOREIGN.items() if program in text for option in options}
        known = set().union(*OPTIONS.values()) | {"--help"} | of_others
        yield from (option for option in OPTION.findall(text) if option not in known)


def _words(text: str) -> list[str]:
    """The words of one command: a remark, another command or the end of a sentence ends it."""
    text = re.split(r"   |[;,()#|&]|\. | and | or ", text)[0]
    try:
        return shlex.split(text.rstrip(".:"))
    except ValueError:  # a quotation mark of the sentence around it
        return text.replace('"', " ").replace("'", " ").split()


@cache
def _said() -> list[tuple[str, str]]:
    """Each text of each module, with the module's name."""
    paths = sorted((ROOT / "skill" / "skill_train").rglob("*.py"))
    return [(path.name, text) for path in paths for text in _strings(ast.parse(_read(path)))]


def _strings(tree: ast.AST) -> Iterator[str]:
    """String constants that are not documentation; of an f-string its fixed parts with `…` for the others."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Expr, ast.JoinedStr)):  # a docstring, or a part of what was yielded whole
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in child.values)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child.value


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_check_of_verify_is_explained_and_no_other() -> None:
    """Names in the code are the first argument of Check(…) or problems(…), or the `_NAME` of a module that has one."""
    package = ROOT / "skill" / "skill_train" / "verify"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    named = set(re.findall(r"(?:\b(?:Check|problems)\(\s*|^_NAME = )\"(\w+)\"", source, re.MULTILINE))
    page = (ROOT / "references" / "verification.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == named


def test_every_error_code_is_explained_under_its_exit_code_and_no_other() -> None:
    page = _read(ROOT / "references" / "troubleshooting.md")
    explained = {
        (int(section[0]), code)
        for section in re.findall(r"^## Exit (\d+)(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        for code in re.findall(r"^\| `([a-z0-9_]+)` \|", section[1], re.MULTILINE)
    }
    used = set(_error_codes())
    assert explained >= {(exit_code, code) for exit_code, code in used if exit_code is not None}
    assert {code for _, code in explained} == {code for _, code in used}
    assert len({code for _, code in used}) <= 115  # a code says what to do; the message says what happened


def _error_codes() -> Iterator[tuple[int | None, str]]:
    """Exit code and code of every error that the package makes; None where the class is chosen at run time.

    Warnings and the problems of `data` have words of their own.
    """
    for path in sorted((ROOT / "skill" / "skill_train").rglob("*.py")):
        for node in ast.walk(ast.parse(_read(path))):
            if isinstance(node, ast.Call):
                fields = {keyword.arg: keyword.value for keyword in node.keywords}
                yield from ((_exit_code(node, fields), code) for code in _texts(fields.get("code")))
                if isinstance(node.func, ast.Name) and node.func.id == "Blocker":
                    yield from ((3, code) for code in _texts(node.args[0]))
    places = _read(ROOT / "skill" / "skill_train" / "plan" / "places.py")
    yield from ((3, code) for code in re.findall(r"\(\(\"(\w+)\", ", places))
    yield from ((2, f"unknown_{kind}") for kind in ("model", "dataset", "bucket"))  # hub/errors.unknown


def _exit_code(call: ast.Call, fields: dict[str | None, ast.expr]) -> int | None:
    """That of the error's class, or the one that is written out."""
    chosen = fields.get("exit_code")
    if isinstance(chosen, ast.Constant):
        return int(str(chosen.value))
    if isinstance(chosen, ast.Name):
        return int(getattr(events, chosen.id))
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    defaults = {"Refused": events.EXIT_USAGE, "Story": 5}
    kind = getattr(errors, name, None)
    return defaults[name] if name in defaults else getattr(kind, "exit_code", None)


def _texts(value: ast.expr | None) -> list[str]:
    choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    return [choice.value for choice in choices if isinstance(choice, ast.Constant) and isinstance(choice.value, str)]
