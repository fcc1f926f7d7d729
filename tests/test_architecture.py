"""The directions of design.md, read from the source with `ast`: who may import whom, and who owns which outside thing.

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

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "skill" / "skill_train"

HEAVY = {
    "accelerate", "datasets", "gguf", "google", "httpx2", "huggingface_hub", "jinja2", "llama_cpp", "markupsafe",
    "matplotlib", "numpy", "peft", "pyarrow", "rich", "safetensors", "sentencepiece", "tokenizers", "torch",
    "transformers", "trl", "vllm", "yaml",
}  # fmt: skip
# Each of these has one owner (or the few that are named).
OWNERS: dict[str, set[str]] = {
    "click": {"cli", "cli_cloud", "cli_export", "cli_frame", "cli_local", "cli_skills"},
    "httpx2": {"hub_errors", "hub_session"},
    "huggingface_hub": {
        "hub", "hub_account", "hub_dataset", "hub_errors", "hub_push", "hub_repository", "hub_session", "jobs",
    },
    "jinja2": {"modelfile", "report_page", "template_worker", "trial_worker", "verify_template"},
    "llama_cpp": {"llama_api", "template_worker"},  # in child processes only
    "markupsafe": {"report_page"},
    "matplotlib": {"report_charts"},
    "platform": {"machine_probe"},
    "psutil": {"machine_probe"},
    "rich": {"console", "tables", "tables_cloud"},
    "subprocess": {"native", "local", "toolchain", "converter", "machine_probe", "rehearsal", "skypilot"},
    "vllm": {"vllm_worker"},  # in a child process, which gives the memory back
}  # fmt: skip
PRINTS = {"console", "native"}  # native prints a worker's progress lines for its parent
PRINTING = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
STEPS = {
    "colab", "convert", "evaluate", "local", "lora_gguf", "merge", "pull", "quantize", "rehearsal", "report", "resume",
    "skypilot", "submission", "verify",
}  # fmt: skip
COMPOSERS = {
    "chain", "chain_data", "chain_diff", "chain_elsewhere", "chain_evaluate", "chain_fetch", "chain_follow",
    "chain_gguf", "chain_plan", "chain_report", "chain_skills", "chain_status", "chain_submit", "demo", "doctor",
    "push",
}  # fmt: skip
ENTRY = "cli"
COMMANDS = {"cli_cloud", "cli_export", "cli_local", "cli_skills"}  # each composes nothing: it calls a composer
PURE = {
    "candidates", "cloud_budget", "convertible", "dataset_card", "devices", "diff", "estimate", "estimate_files",
    "estimate_modules", "estimate_optimizer", "estimate_published", "estimate_report", "estimate_step",
    "estimate_time", "estimate_trained", "facts", "first_rows", "formats", "job_figures", "job_spec", "job_story",
    "launch", "llama_architectures", "methods", "model_arithmetic", "model_card", "model_config", "money", "placement",
    "plan", "push_records", "recipe", "report_figures", "report_files", "report_quality", "report_records",
    "report_same", "report_text", "rubric",
}  # fmt: skip
IMPURE = {
    "asyncio", "datetime", "glob", "http", "multiprocessing", "os", "platform", "random", "secrets", "shutil", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "urllib",
} | (HEAVY - {"yaml"})  # fmt: skip
# The floor: what everything stands on stands on nothing but this.
FLOOR: dict[str, set[str]] = {
    "errors": set(),
    "facts": set(),
    "token_text": {"errors"},
    "console": {"errors", "token_text"},
    "records": {"errors"},
    "digest": set(),
    "garbage": set(),
    "heap": set(),
    "address_space": {"errors"},
    "peak_memory": set(),
    "parts": {"errors"},
    "run_dir": {"digest", "errors", "parts", "peak_memory", "records"},
    "template_trial": {"errors", "native"},
    "run_lock": {"errors", "parts", "run_dir"},
    "begun": {"cloud_record", "errors", "run_dir"},
    "native": {"console", "errors", "garbage", "heap", "peak_memory", "run_dir"},
    "compare": set(),
    "bootstrap": set(),
    "resources": set(),
    "skill_files": {"resources"},
    "skill_install": {"errors", "run_dir", "skill_files"},
    "recipe": {"errors", "token_text"},
    "formats": {"facts", "resources"},
    "methods": {"formats"},
    "repeats": set(),
    "row_check": {"formats", "resources"},
    "rows": {"errors", "recipe", "resources"},
    "text_encoding": set(),
    "dataset": {"errors", "facts", "formats", "recipe", "resources", "row_check", "rows", "text_encoding"},
    "tokens": {"facts", "machine", "resources", "run_dir"},
    "devices": {"facts"},
    "estimate_modules": {"facts"},
    "estimate_optimizer": set(),
    "estimate_step": {"estimate_modules", "estimate_optimizer"},
    "estimate_trained": {"estimate_modules", "estimate_step", "facts"},
    "estimate_published": {"estimate_step"},
    "estimate": {"estimate_modules", "estimate_published", "estimate_step", "estimate_trained", "facts"},
    "estimate_time": {"devices", "estimate", "estimate_modules", "estimate_step", "facts"},
    "estimate_files": {"devices", "estimate_step", "facts", "reference_kinds"},
    "reference_kinds": set(),
    "placement": {"errors", "estimate", "estimate_published", "estimate_step", "estimate_time", "facts"},
    "candidates": {
        "errors",
        "estimate_files",
        "estimate_step",
        "estimate_time",
        "estimate_trained",
        "facts",
        "money",
        "placement",
    },
    "estimate_report": {
        "candidates",
        "estimate_files",
        "estimate_modules",
        "estimate_step",
        "estimate_trained",
        "facts",
    },
    "rubric": {"candidates", "errors", "facts", "placement"},
    "machine": {"facts", "machine_linux", "machine_mac", "machine_nvidia", "machine_probe"},
    "machine_probe": set(),
    "money": set(),
    "machine_linux": {"machine_probe"},
    "machine_mac": {"facts", "machine_linux", "machine_probe"},
    "machine_nvidia": {"facts", "machine_probe"},
    "llama_architectures": set(),
    "llama_vocabulary": {"errors", "model_files"},
    "convertible": {"llama_architectures"},
    "model_arithmetic": set(),
    "model_config": {"convertible", "facts", "model_arithmetic"},
    "causal_types": set(),
    "lora_targets": set(),
    "model_files": {"errors", "resources"},
    "model": {"errors", "facts", "model_config", "model_files"},
    "waiting": set(),
    "hub_session": {"waiting"},
    "hub_errors": {"errors"},
    "hub_client": {"errors", "hub_errors", "hub_session", "waiting"},
    "hub": {"errors", "facts", "hub_client", "model", "model_config"},
    "dataset_card": {"errors"},
    "first_rows": {"errors"},
    "hub_dataset": {"dataset_card", "errors", "facts", "first_rows", "formats", "hub_client", "recipe", "resources"},
    "flavors": {"errors", "facts", "hub", "hub_client", "machine", "run_dir"},
    "hub_account": {"errors", "hub_client"},
    "hub_repository": {"errors", "hub_client"},
    "launch": {"errors", "facts"},
    "diff": set(),
    "cloud_budget": {"errors", "money"},
    "cloud_record": {"errors", "job_spec", "run_dir"},
    "last_look": {"cloud_record", "errors", "run_dir"},
    "job_spec": set(),
    "hub_push": {"errors", "hub_client", "push_files", "waiting"},
    "model_card": set(),
    "push_access": {"errors", "hub_account", "hub_push", "hub_repository"},
    "outgoing": {"token_text"},
    "push_records": set(),
    "push_files": {"cloud_record", "errors", "outgoing", "push_records", "recipe", "run_dir"},
    "jobs": {"errors", "hub_client", "job_spec"},
    "job_figures": {"records"},
    "job_story": {"errors", "facts", "records"},
    "follow": {"errors", "hub_client", "jobs", "waiting"},
    "kept": {"errors", "follow", "jobs"},
    "cloud_run": {
        "cloud_record",
        "errors",
        "follow",
        "hub_account",
        "hub_client",
        "job_figures",
        "job_once",
        "job_spec",
        "jobs",
        "kept",
        "recipe",
        "records",
        "run_dir",
        "run_lock",
    },
    "job_claim": {"cloud_record", "errors", "job_once", "jobs"},
    "job_once": {"cloud_record", "errors", "hub_client", "job_spec", "jobs", "resources", "run_dir", "waiting"},
    "calibration": {"errors", "estimate_step", "estimate_time", "facts", "machine", "run_dir"},
    "report_text": {"console", "token_text"},
    "report_records": set(),
    "report_quality": {"report_records", "report_text"},
    "report_same": {"diff", "report_text"},
    "report_files": {"money", "report_quality", "report_records", "report_text"},
    "report_figures": {"money", "report_files", "report_quality", "report_records", "report_text"},
    "report_charts": {"errors"},
    "report_page": {"errors", "resources"},
    "plan_file": {"dataset", "errors", "machine", "model", "plan", "recipe", "records", "run_dir"},
    "plan": {
        "candidates",
        "errors",
        "estimate_report",
        "facts",
        "formats",
        "launch",
        "lora_targets",
        "placement",
        "recipe",
        "resources",
        "rubric",
    },
}


ERRORS = {
    "AccessError", "DecisionNeeded", "NativeCrash", "NotInstalled", "Temporary", "TrainingFailed", "UsageError",
    "VerificationFailed",
}  # fmt: skip


@dataclass
class Import:
    name: str  # skill_train.errors, torch.nn
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
    def ours(self) -> set[str]:
        """Modules of the package that this one imports, anywhere."""
        return {i.name.split(".")[1] for i in self.imports if i.top == "skill_train" and "." in i.name}

    @property
    def outside(self) -> set[str]:
        return {i.top for i in self.imports if i.top != "skill_train"}

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [n for n in ast.walk(self.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = ".".join(filter(None, ["skill_train" * bool(child.level), child.module]))
            names = [f"{module}.{alias.name}" for alias in child.names] if module == "skill_train" else [module]
            yield from (Import(name, lazy) for name in names)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, lazy=lazy or inside or typing)


def heavy_at_the_top(module: Module) -> list[str]:
    """Libraries that `--help` would pay for."""
    return [f"{module.name} imports {i.name} at its top" for i in module.imports if i.top in HEAVY and not i.lazy]


def foreign_owner(module: Module) -> list[str]:
    return [
        f"{module.name} imports {name}; it belongs to {', '.join(sorted(owners))}"
        for name, owners in OWNERS.items()
        if name in module.outside and module.name not in owners
    ]


def wrong_direction(module: Module) -> list[str]:
    """Steps never import each other; only the composers import steps; nothing imports the command line."""
    allowed = STEPS | COMPOSERS if module.name in COMPOSERS else set()
    if module.name in COMMANDS:
        allowed = COMPOSERS
    if module.name == ENTRY:
        allowed = COMMANDS
    forbidden = (STEPS | COMPOSERS | COMMANDS | {ENTRY}) - allowed
    if not module.name.endswith("_worker"):
        forbidden |= {"llama_api"}  # native code runs in a child, where a crash is an answer
    return [f"{module.name} imports {name}" for name in sorted(module.ours & forbidden)]


def off_the_floor(module: Module) -> list[str]:
    allowed = FLOOR.get(module.name)
    return [] if allowed is None else [f"{module.name} imports {name}" for name in sorted(module.ours - allowed)]


def impure(module: Module) -> list[str]:
    """Same facts, same plan: no clock, no network, no chance, no system."""
    found = module.outside & IMPURE if module.name in PURE else set()
    return [f"{module.name} is pure and imports {name}" for name in sorted(found)]


def prints(module: Module) -> list[str]:
    """Output anywhere but in the console, and questions anywhere."""
    allowed = module.name in PRINTS
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "input" or (called in PRINTING and not allowed):
                found.append(f"{module.name}:{node.lineno} calls {called}")
    return found


def probes_the_system(module: Module) -> list[str]:
    asks = {"os.uname", "os.sysconf", "os.getloadavg", "os.cpu_count", "os.sched_getaffinity", "os.popen", "os.system"}
    if module.name.startswith("machine"):
        return []
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) in asks]
    return [f"{module.name}:{node.lineno} asks {ast.unparse(node)}; machine does that" for node in calls]


def too_long(module: Module) -> list[str]:
    lines = len(module.source.splitlines())
    found = [f"{module.name} has {lines} lines (400 at most)"] if lines > 400 else []
    long = [(f, (f.end_lineno or f.lineno) - f.lineno + 1) for f in module.functions]
    return found + [f"{module.name}.{f.name} has {length} lines (60 at most)" for f, length in long if length > 60]


def leaves_the_user_alone(module: Module) -> list[str]:
    """An error says what to do next: a command, or what to mend."""
    made = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS]
    named = [(node, {keyword.arg for keyword in node.keywords}) for node in made]
    return [f"{module.name}:{node.lineno} has no hint" for node, names in named if not {"hint", None} & names]


RULES = (
    leaves_the_user_alone,
    heavy_at_the_top,
    foreign_owner,
    wrong_direction,
    off_the_floor,
    impure,
    prints,
    probes_the_system,
    too_long,
)
MODULES = {path.stem: Module(path.stem, path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.glob("*.py"))}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule) -> None:
    assert [finding for module in MODULES.values() for finding in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (leaves_the_user_alone, "merge", 'raise UsageError("no", code="bad")'),
        (leaves_the_user_alone, "merge", 'raise Temporary("no", code="bad", expected="x", got="y")'),
        (heavy_at_the_top, "merge", "import torch"),
        (heavy_at_the_top, "merge", "if True:\n    from torch import nn"),
        (heavy_at_the_top, "cli", "from huggingface_hub import HfApi"),
        (foreign_owner, "plan", "def f():\n    import huggingface_hub"),
        (foreign_owner, "merge", "import click"),
        (foreign_owner, "verify", "from subprocess import run"),
        (foreign_owner, "local", "import platform"),
        (wrong_direction, "merge", "def f():\n    from skill_train.verify import verify"),
        (wrong_direction, "convert", "from skill_train import quantize"),
        (wrong_direction, "verify", "from . import merge"),
        (wrong_direction, "machine", "from skill_train import cli"),
        (wrong_direction, "plan", "from skill_train import local"),
        (wrong_direction, "merge", "from skill_train import chain"),
        (wrong_direction, "verify", "from skill_train.llama_api import Llama"),
        (wrong_direction, "plan", "from .cli import main"),
        (off_the_floor, "errors", "from skill_train.console import Console"),
        (off_the_floor, "plan", "from skill_train.machine import read_machine"),
        (impure, "plan", "import time"),
        (impure, "estimate", "def f():\n    import torch"),
        (impure, "recipe", "from os import environ"),
        (prints, "merge", "print('x')"),
        (prints, "plan", "import sys\nsys.stdout.write('x')"),
        (prints, "console", "input('really?')"),
        (probes_the_system, "quantize", "import os\nos.cpu_count()"),
        (too_long, "merge", "x = 1\n" * 401),
        (too_long, "merge", "def f():\n" + "    x = 1\n" * 60),
    ],
)
def test_the_rule_finds_what_breaks_it(rule, name: str, source: str) -> None:
    assert rule(Module(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("merge", "def f():\n    import torch"),
        ("compare", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy as np"),
        ("chain", "def f():\n    from skill_train import merge, verify"),
        ("demo", "from skill_train import chain"),
        ("cli_local", "def f():\n    from skill_train import chain, demo\nimport click"),
        ("cli", "from skill_train import cli_local\nimport click"),
        ("console", "print('x')"),
    ],
)
def test_what_is_right_is_left_alone(name: str, source: str) -> None:
    assert [finding for rule in RULES for finding in rule(Module(name, source))] == []


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: module.ours & set(MODULES) for name, module in MODULES.items()}
    while free := {name for name, needs in graph.items() if not needs & set(graph)}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    assert graph == {}


def test_half_of_the_functions_have_at_most_12_lines() -> None:
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for module in MODULES.values() for f in module.functions]
    assert median(lengths) <= 12


def test_the_training_program_runs_alone() -> None:
    """It imports nothing of ours anywhere, and only the standard library before it has read its plan."""
    program = Module("train", (ROOT / "scripts" / "train.py").read_text(encoding="utf-8"))
    assert program.ours == set()
    assert "skill_train" not in {i.top for i in program.imports}
    assert {i.top for i in program.imports if not i.lazy} - sys.stdlib_module_names == set()


def test_every_step_and_owner_that_the_rules_name_exists_or_is_planned() -> None:
    """A renamed module must not slip out of its rule."""
    planned: set[str] = set()
    named = STEPS | COMPOSERS | PURE | PRINTS | set(FLOOR) | COMMANDS | {ENTRY} | set().union(*OWNERS.values())
    assert named - set(MODULES) - planned == set()
