"""The order of the packages, read from the source with `ast`: who may import whom, and who owns which outside thing.

Each rule is tried on a small source that breaks it, so a rule that has gone blind fails here too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "skill" / "skill_train"

# From the top down. A package imports what is below it; packages on one line never import each other.
LAYERS = (
    "cli",
    "commands",
    "train merge gguf verify evaluate report publish cloud skill",
    "plan llama reference",
    "data hub estimate",
    "model",
    "machine",
    "run",
    "recipe",
    "facts",
    "core",
    "program",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}

HEAVY = {
    "accelerate", "datasets", "fastapi", "gguf", "google", "hf_xet", "httpx2", "huggingface_hub", "jinja2", "llama_cpp",
    "markupsafe", "matplotlib", "numpy", "peft", "pyarrow", "pydantic", "rich", "safetensors", "sentencepiece",
    "starlette", "tokenizers", "torch", "transformers", "trl", "uvicorn", "vllm", "yaml",
}  # fmt: skip
# One module a command; what several share begins with an underscore.
COMMANDS = {f"commands.{path.stem}" for path in (PACKAGE / "commands").glob("[a-z]*.py")}
# The two that run the other commands, one after another.
WHOLE_CHAIN = {"commands.demo", "commands._doctor_self_test"}
# Each of these has one owner (or the few that are named).
OWNERS: dict[str, set[str]] = {
    "click": {"cli", "commands._command"} | COMMANDS,
    "hf_xet": {"hub.jobs"},
    "httpx2": {"hub.errors", "hub.session"},
    "huggingface_hub": {
        "hub.account",
        "hub.client",
        "hub.datasets",
        "hub.errors",
        "hub.jobs",
        "hub.models",
        "hub.repositories",
        "hub.rows.remote",
        "hub.session",
        "hub.upload",
    },
    "fastapi": set(),  # of llama_cpp.server
    "jinja2": {
        "llama.engines.python_server_worker",
        "llama.template",
        "model.template_guard_worker",
        "report.step",
    },
    # In child processes only.
    "llama_cpp": {
        "llama.engines.python_requests",
        "llama.engines.python_server_worker",
        "llama.llama_cpp",
        "llama.pictures.mtmd",
        "llama.template_worker",
    },
    "markupsafe": {"report.step"},
    "matplotlib": {"report.charts"},
    "platform": {"machine.probe"},
    "psutil": {"machine.probe"},
    "pydantic": {"llama.engines.python_requests"},
    "rich": {"commands._drawing", "core.console"},
    "subprocess": {
        "cloud.elsewhere.skypilot",
        "cloud.rehearse",
        "core.live_worker",
        "core.worker",
        "llama.engines.programs",
        "llama.get_converter",
        "llama.run_converter",
        "machine.probe",
        "train.local",
    },
    "starlette": {"llama.engines.python_server_worker"},
    "uvicorn": {"llama.engines.python_server_worker"},
    "vllm": {"evaluate.vllm_worker"},  # in a child process, which gives the memory back
}
PRINTS = {"core.console", "core.worker"}  # the worker prints its progress lines for its parent
PRINTING = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
PURE = {
    "cloud.budget", "cloud.failure_reason", "core.units", "data.methods", "data.unread", "estimate.artifacts",
    "estimate.devices", "estimate.memory", "estimate.modules", "estimate.published", "estimate.step",
    "estimate.time", "estimate.trained", "facts", "hub.dataset_card", "hub.rows.first_rows", "model.config",
    "model.convertible.architectures", "model.convertible.from_config", "model.parameter_count", "plan.estimates",
    "plan.launch_args", "plan.make", "plan.pictures",
    "plan.placement", "plan.places", "plan.refusals", "plan.where", "publish.model_card",
    "publish.records", "recipe.fields", "recipe.formats", "recipe.resolved", "report.artifacts",
    "report.figure", "report.quality", "report.same_run", "report.sections", "report.words",
    "run.compare_runs", "run.job_spec", "run.progress",
}  # fmt: skip
IMPURE = {
    "asyncio", "datetime", "glob", "http", "multiprocessing", "os", "platform", "random", "secrets", "shutil", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "urllib",
} | (HEAVY - {"yaml"})  # fmt: skip
ERRORS = {
    "AccessError", "DecisionNeeded", "NativeCrash", "NotInstalled", "Temporary", "TrainingFailed", "UsageError",
    "VerificationFailed",
}  # fmt: skip


VAGUE = {"given", "kept", "known", "look", "looks", "made", "said", "says", "subject", "told"}


@dataclass
class Import:
    name: str  # skill_train.core.errors, torch.nn
    lazy: bool  # inside a function, or for the type checker only

    @property
    def top(self) -> str:
        return self.name.split(".")[0]


@dataclass
class Module:
    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, lazy=False))

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def ours(self) -> set[str]:
        """Modules of the package that this one imports, anywhere."""
        return {i.name.removeprefix("skill_train.") for i in self.imports if i.name.startswith("skill_train.")}

    @property
    def outside(self) -> set[str]:
        return {i.top for i in self.imports if i.top != "skill_train"}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def fields(self) -> set[ast.AST]:
        """The names of the fields of classes."""
        bodies = [node.body for node in self.nodes if isinstance(node, ast.ClassDef)]
        return {each.target for body in bodies for each in body if isinstance(each, ast.AnnAssign)}

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [n for n in self.nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = ".".join(filter(None, ["skill_train" * bool(child.level), child.module]))
            inside = module.split(".")[0] == "skill_train"
            names = [f"{module}.{alias.name}" if inside else module for alias in child.names]
            yield from (Import(name, lazy) for name in names)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, lazy=lazy or inside or typing)


def runs_alone(module: Module) -> bool:
    """A part of the training program, which is joined into one file. It cannot use the owners of outside things."""
    return module.package == "program"


def heavy_at_the_top(module: Module) -> list[str]:
    """Libraries that `--help` would pay for."""
    return [f"{module.name} imports {i.name} at its top" for i in module.imports if i.top in HEAVY and not i.lazy]


def foreign_owner(module: Module) -> list[str]:
    if runs_alone(module):
        return []
    return [
        f"{module.name} imports {name}; it belongs to {', '.join(sorted(owners))}"
        for name, owners in OWNERS.items()
        if name in module.outside and module.name not in owners
    ]


def wrong_direction(module: Module) -> list[str]:
    """A package imports only what is below it. Native code runs in a child, where a crash is an answer."""
    found = []
    for name in sorted(module.ours):
        there = name.split(".")[0]
        if there in LEVEL and there != module.package and LEVEL[there] <= LEVEL[module.package]:
            found.append(f"{module.name} imports {name}, which is not below it")
        native = name.startswith(("llama.llama_cpp", "llama.pictures.mtmd"))
        if native and not module.name.endswith("_worker") and module.name != "llama.pictures.mtmd":
            found.append(f"{module.name} imports {name}, which belongs to workers")
    return found


def calls_another_command(module: Module) -> list[str]:
    """A command composes steps; what it shares with another command stands in a module of both."""
    if module.package != "commands" or module.name in WHOLE_CHAIN:
        return []
    others = {name for name in COMMANDS - {module.name} for used in module.ours if f"{used}.".startswith(f"{name}.")}
    return [f"{module.name} imports {name}, which is another command" for name in sorted(others)]


def too_many_parameters(module: Module) -> list[str]:
    """What belongs together travels as one object."""
    counts = {f.name: len([*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]) for f in module.functions}
    own = {f.name for f in module.functions if f.args.args and f.args.args[0].arg in ("self", "cls")}
    counts = {name: count - (name in own) for name, count in counts.items()}
    return [f"{module.name}.{name} has {count} parameters (6 at most)" for name, count in counts.items() if count > 6]


def impure(module: Module) -> list[str]:
    """Same facts, same plan: no clock, no network, no chance, no system."""
    found = module.outside & IMPURE if module.name in PURE else set()
    return [f"{module.name} is pure and imports {name}" for name in sorted(found)]


def prints(module: Module) -> list[str]:
    """Output anywhere but in the console, and questions anywhere."""
    allowed = module.name in PRINTS or runs_alone(module)
    found = []
    for node in module.nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "input" or (called in PRINTING and not allowed):
                found.append(f"{module.name}:{node.lineno} calls {called}")
    return found


def probes_the_system(module: Module) -> list[str]:
    asks = {"os.uname", "os.sysconf", "os.getloadavg", "os.cpu_count", "os.sched_getaffinity", "os.popen", "os.system"}
    if module.package == "machine" or runs_alone(module):
        return []
    calls = [node for node in module.nodes if isinstance(node, ast.Attribute) and ast.unparse(node) in asks]
    return [f"{module.name}:{node.lineno} asks {ast.unparse(node)}; machine does that" for node in calls]


def too_long(module: Module) -> list[str]:
    lines = len(module.source.splitlines())
    most = 500 if runs_alone(module) else 400  # a part more would be one more than a folder holds
    found = [f"{module.name} has {lines} lines ({most} at most)"] if lines > most else []
    long = [(f, (f.end_lineno or f.lineno) - f.lineno + 1) for f in module.functions]
    return found + [f"{module.name}.{f.name} has {length} lines (60 at most)" for f, length in long if length > 60]


def leaves_the_user_alone(module: Module) -> list[str]:
    """An error says what to do next: a command, or what to mend."""
    made = [node for node in module.nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS]
    named = [(node, {keyword.arg for keyword in node.keywords}) for node in made]
    return [f"{module.name}:{node.lineno} has no hint" for node, names in named if not {"hint", None} & names]


def vague_names(module: Module) -> list[str]:
    """A name says what it holds in another file too. Fields of records stay, because they are keys of answers."""
    named = [(0, module.name.split(".")[-1])]
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            named.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            named.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in module.fields:
            named.append((node.lineno, node.id))
    return [f"{module.name}:{line} {name} is vague" for line, name in named if name.strip("_").lower() in VAGUE]


RULES = (
    vague_names,
    leaves_the_user_alone,
    heavy_at_the_top,
    foreign_owner,
    wrong_direction,
    calls_another_command,
    too_many_parameters,
    impure,
    prints,
    probes_the_system,
    too_long,
)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {
    _name(path): Module(_name(path), path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule) -> None:
    assert [finding for module in MODULES.values() for finding in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (vague_names, "program.told", ""),
        (vague_names, "merge.step", "class Subject: ..."),
        (vague_names, "merge.step", "def _look(): ..."),
        (vague_names, "merge.step", "def f(kept): ..."),
        (vague_names, "merge.step", "KNOWN = 1"),
        (vague_names, "merge.step", "class A:\n    def f(self):\n        for made in (): ..."),
        (leaves_the_user_alone, "merge.step", 'raise UsageError("no", code="bad")'),
        (leaves_the_user_alone, "merge.step", 'raise Temporary("no", code="bad", expected="x", got="y")'),
        (heavy_at_the_top, "merge.step", "import torch"),
        (heavy_at_the_top, "merge.step", "if True:\n    from torch import nn"),
        (heavy_at_the_top, "cli", "from huggingface_hub import HfApi"),
        (foreign_owner, "plan.make", "def f():\n    import huggingface_hub"),
        (foreign_owner, "merge.step", "import click"),
        (foreign_owner, "verify.step", "from subprocess import run"),
        (foreign_owner, "train.local", "import platform"),
        (wrong_direction, "merge.step", "def f():\n    from skill_train.verify.step import verify"),
        (wrong_direction, "gguf.convert", "from skill_train.merge import step"),
        (wrong_direction, "verify.step", "from skill_train import merge"),
        (wrong_direction, "machine.read", "from skill_train import cli"),
        (wrong_direction, "plan.make", "from skill_train.train import local"),
        (wrong_direction, "merge.step", "from skill_train.commands import local"),
        (wrong_direction, "hub.models", "from skill_train.data.scan import look"),
        (wrong_direction, "verify.step", "from skill_train.llama.llama_cpp import Llama"),
        (wrong_direction, "core.errors", "from skill_train.facts import ModelFacts"),
        (wrong_direction, "cli", "from skill_train.llama import llama_cpp"),
        (calls_another_command, "commands.merge", "from skill_train.commands import local"),
        (calls_another_command, "commands.merge", "def f():\n    from skill_train.commands.local import run"),
        (calls_another_command, "commands._base_model", "from skill_train.commands import merge"),
        (too_many_parameters, "commands.merge", "def f(a, b, c, d, *, e, f, g): ..."),
        (too_many_parameters, "merge.step", "class A:\n    def f(self, a, b, c, d, *, e, f, g): ..."),
        (wrong_direction, "program.rows", "def f():\n    from skill_train.core import files"),
        (impure, "plan.make", "import time"),
        (impure, "estimate.memory", "def f():\n    import torch"),
        (impure, "recipe.fields", "from os import environ"),
        (prints, "merge.step", "print('x')"),
        (prints, "plan.make", "import sys\nsys.stdout.write('x')"),
        (prints, "core.console", "input('really?')"),
        (probes_the_system, "gguf.quantize", "import os\nos.cpu_count()"),
        (too_long, "merge.step", "x = 1\n" * 401),
        (too_long, "program.rows", "x = 1\n" * 501),
        (too_long, "merge.step", "def f():\n" + "    x = 1\n" * 60),
    ],
)
def test_the_rule_finds_what_breaks_it(rule, name: str, source: str) -> None:
    assert rule(Module(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("merge.step", "def f():\n    import torch"),
        ("llama.logit_distance", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy as np"),
        ("commands.merge", "def f():\n    from skill_train.merge import step\n    from skill_train import verify"),
        (
            "commands.merge",
            "from skill_train.commands import _base_model\nfrom skill_train.commands._command import command",
        ),
        ("commands.demo", "from skill_train.commands import local"),
        ("commands.local", "import click"),
        ("cli", "def f():\n    from skill_train.commands import local\nimport click"),
        ("core.console", "print('x')"),
        ("merge.step", "class A:\n    kept: int\n\ndef known_rows(): ..."),
        ("program.events", "import os, subprocess\nprint(os.cpu_count())"),
    ],
)
def test_what_is_right_is_left_alone(name: str, source: str) -> None:
    assert [finding for rule in RULES for finding in rule(Module(name, source))] == []


def test_no_two_classes_have_one_name() -> None:
    """The typed dictionaries of the training program have the names of the records that they are tested equal to."""
    places: dict[str, list[str]] = {}
    for module in MODULES.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not runs_alone(module):
                places.setdefault(node.name, []).append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_listing_is_the_table_of_contents() -> None:
    """Packages and a handful of files at the top, no folder of more modules than one takes in at a look."""
    names = [path for path in PACKAGE.iterdir() if path.is_file()]
    assert len(names) <= 6, names
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE / "commands"}
    counts = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > 15} == {}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"demo", "__pycache__"} == set(LEVEL) - {
        "cli",
        "facts",
    }


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: _known(module.ours) for name, module in MODULES.items()}
    while free := {name for name, needs in graph.items() if not needs & set(graph)}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    assert graph == {}


def _known(imported: set[str]) -> set[str]:
    """Of names that were imported, the modules: a function counts for the module that it is of."""
    return {name if name in MODULES else name.rpartition(".")[0] for name in imported} & set(MODULES)


def test_each_command_of_the_table_is_one_module() -> None:
    from skill_train.cli import COMMANDS as table

    assert {f"commands.{name.replace('-', '_')}" for name in table} == COMMANDS


def test_half_of_the_functions_have_at_most_12_lines() -> None:
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for module in MODULES.values() for f in module.functions]
    assert median(lengths) <= 12


def test_the_training_program_runs_alone() -> None:
    """It imports nothing of ours anywhere, and only the standard library before it has read its plan."""
    program = Module("train", (ROOT / "scripts" / "train.py").read_text(encoding="utf-8"))
    assert program.ours == set()
    assert "skill_train" not in {i.top for i in program.imports}
    assert {i.top for i in program.imports if not i.lazy} - sys.stdlib_module_names == set()


def test_every_module_that_the_rules_name_exists() -> None:
    """A renamed module must not slip out of its rule."""
    assert (PURE | PRINTS | WHOLE_CHAIN | set().union(*OWNERS.values())) - set(MODULES) == set()
