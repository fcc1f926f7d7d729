"""The checks of `doctor`, one function each. A check returns the problem that it finds, and does not raise."""

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.commands._doctor_packages import Package, Torchvision, VersionSet, python_wanted, within
from skill_train.core.errors import SkillTrainError
from skill_train.core.units import gigabytes
from skill_train.facts import MachineFacts
from skill_train.hub.account import Account
from skill_train.machine.torch_worker import TorchAnswer

# Bytes. Each process of the self-test peaks at 0.6 GB (measured: torch 2.13, Linux, CPU), two run at a time.
NEEDS_MEMORY = 2_000_000_000
# Bytes. Base, merged model, f16, q8_0 and q4_k_m of a model with 1e9 parameters: 2 + 2 + 2 + 1.1 + 0.6 GB.
NEEDS_DISK = 10_000_000_000
EXTRAS = {"train": 'pip install "skill-train[train]"', "gguf": 'pip install "skill-train[gguf]"'}
NOT_INSTALLED = "the package runs from its source and is not installed, so its ranges are not known"
INSTALL = "pip install -e ."
_LOGIN = "hf auth login"
_REINSTALL_TORCH = 'pip install --force-reinstall "skill-train[train]"'


@dataclass(frozen=True)
class DoctorCheck:
    """One check. `verdict` is `ok`, `warn` or `fail`; `fix` is the command that fixes the problem, or empty."""

    name: str
    verdict: str
    found: str
    expected: str = ""
    because: str = ""
    fix: str = ""


def python(version: str) -> DoctorCheck:
    wanted = python_wanted()
    if wanted is None:
        return DoctorCheck("python", "warn", version, because=NOT_INSTALLED, fix=INSTALL)
    if within(version, wanted):
        return DoctorCheck("python", "ok", version, wanted)
    return DoctorCheck("python", "fail", version, wanted, "not a tested version", "uv venv --python 3.12")


def packages(group: str, requirements: list[Package]) -> DoctorCheck:
    """Checks one group of packages. A wrong package of an extra is a warning, one of the base a failure."""
    name = "packages" if group == "base" else f"packages [{group}]"
    versions = ", ".join(f"{package.name} {package.installed or 'missing'}" for package in requirements)
    wrong = [package for package in requirements if not package.right]
    wanted = ", ".join(package.name + package.specifier for package in wrong)
    if not wrong:
        return DoctorCheck(name, "ok", versions, "the tested versions")
    broken = "fail" if group == "base" else "warn"
    if group != "base" and any(package.installed is None for package in wrong):
        return DoctorCheck(name, broken, versions, wanted, "not all of it is installed", EXTRAS[group])
    command = "pip install " + " ".join(f'"{package.name}{package.specifier}"' for package in wrong)
    return DoctorCheck(name, broken, versions, wanted, "not the tested versions", command)


def together(requirements: list[Package], sets: list[VersionSet]) -> DoctorCheck:
    """Checks whether the installed versions are a tested combination, not only whether each is in its range."""
    if not requirements:
        return DoctorCheck("versions", "warn", "not known", because=NOT_INSTALLED, fix=INSTALL)
    away = {tested: tested.differs(requirements) for tested in sets}
    nearest = min(sets, key=lambda tested: len(away[tested]))
    wrong = away[nearest]
    if not wrong:
        return DoctorCheck("versions", "ok", f"a set that passed `{nearest.by}`", because=nearest.date)
    pinned = [f"{package.name}=={nearest.packages[package.name]}" for package in wrong]
    versions = ", ".join(f"{package.name} {package.installed}" for package in wrong)
    why = f"not a set that was tested together; the nearest passed `{nearest.by}` on {nearest.date}"
    return DoctorCheck("versions", "warn", versions, ", ".join(pinned), why, f"pip install {' '.join(pinned)}")


def torchvision(installed: Torchvision) -> DoctorCheck:
    """Checks an installed torchvision. skill-train does not use it, but transformers imports it with a vision model. If
    it was built for another torch, the import fails with an error about operators."""
    found = f"torchvision {installed.version}, torch {installed.torch or 'missing'}"
    if installed.specifier is None or installed.torch is None or within(installed.torch, installed.specifier):
        return DoctorCheck("torchvision", "ok", found)
    why = "it was built for another torch, and transformers imports it with vision models"
    fix = "pip uninstall torchvision"  # skill-train does not need it, and its other releases require other torches
    return DoctorCheck("torchvision", "warn", found, f"torch{installed.specifier}", why, fix)


def accelerator(machine: MachineFacts) -> DoctorCheck:
    expected = "an NVIDIA GPU, Apple silicon, or none"
    if machine.device != "cpu":
        count = f"{len(machine.gpus)} × " if len(machine.gpus) > 1 else ""
        why = machine.unknown.get("gpus", "")
        return DoctorCheck(
            "accelerator", "ok", f"{machine.device}: {count}{machine.chip}, {_gb(machine.memory_bytes)}", "", why
        )
    reason = machine.unknown.get("device")
    if reason is None:
        why = "small models train on the processor; larger ones in the cloud"
        return DoctorCheck("accelerator", "ok", f"cpu: {machine.chip}, {machine.cores} cores", expected, why)
    return DoctorCheck(
        "accelerator", "warn", f"cpu: {machine.chip}", expected, reason, _mend_accelerator(machine, reason)
    )


def _mend_accelerator(machine: MachineFacts, reason: str) -> str:
    if machine.rosetta:
        return "uv venv --python cpython-3.12-macos-aarch64-none"
    if "CUDA_VISIBLE_DEVICES" in reason:
        return "unset CUDA_VISIBLE_DEVICES"
    if "mismatch" in reason:
        return "sudo reboot"
    return "nvidia-smi" if "nvidia-smi" in reason else ""


def torch(machine: MachineFacts, ask: Callable[[], TorchAnswer]) -> DoctorCheck:
    """Checks whether torch can use this machine's device. `ask` returns the answer of `torch_worker`, or raises."""
    try:
        answer = ask()
    except SkillTrainError as error:
        why = (error.got.strip().splitlines() or [error.message])[-1]
        return DoctorCheck("torch", "fail", error.message, "a torch that loads", why, _REINSTALL_TORCH)
    found = f"torch {answer['version']}, CUDA {answer['cuda'] or 'not built in'}"
    if answer["usable"]:
        return DoctorCheck("torch", "ok", found, f"{machine.device} usable")
    why = answer["trouble"] or f"this build cannot use {machine.device}; training would run on the processor"
    return DoctorCheck("torch", "warn", found, f"{machine.device} usable", why, _REINSTALL_TORCH)


def memory(machine: MachineFacts) -> DoctorCheck:
    free = machine.ram_available_bytes
    if free is None:
        return DoctorCheck("memory", "warn", "unknown", because=machine.unknown.get("memory_bytes", "nothing tells"))
    found, wanted = f"{_gb(free)} of {_gb(machine.ram_bytes)} available", f"{_gb(NEEDS_MEMORY)} for the smallest run"
    if free >= NEEDS_MEMORY:
        return DoctorCheck("memory", "ok", found, wanted)
    return DoctorCheck("memory", "warn", found, wanted, "close other programs", "ps aux | sort -nrk 4 | head")


def disk(machine: MachineFacts) -> DoctorCheck:
    free = machine.disk_free_bytes
    if free is None:
        return DoctorCheck("disk", "warn", "unknown", because=machine.unknown["disk_free_bytes"], fix="df -h .")
    found, wanted = f"{_gb(free)} free in the current folder", f"{_gb(NEEDS_DISK)}"
    if free >= NEEDS_DISK:
        return DoctorCheck("disk", "ok", found, wanted)
    return DoctorCheck(
        "disk", "warn", found, wanted, "a model is stored three times: base, merged, GGUF", "hf cache prune"
    )


def token(account: Account) -> DoctorCheck:
    """Checks the token: present, valid, and its permissions. Shows only the account's name and role."""
    wanted = "a token that can write and run jobs"
    another = f"unset HF_TOKEN && {_LOGIN}" if os.environ.get("HF_TOKEN") else f"{_LOGIN} --force"
    if account.state == "none":
        why = "only cloud jobs, uploads and private or gated models need one"
        return DoctorCheck("token", "warn", "no token", wanted, why, _LOGIN)
    if account.state == "invalid":
        return DoctorCheck(
            "token", "warn", "the Hub does not know this token", wanted, "expired, revoked or mistyped", another
        )
    if account.state == "unchecked":
        fix = "unset HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in account.why else "skill-train doctor"
        return DoctorCheck("token", "warn", f"present, not checked: {account.why}", wanted, "", fix)
    found = f"valid: {account.name}, role {account.role or 'not told'}"
    lacks = [word for word, may in (("write", account.can_write), ("run jobs", account.can_run_jobs)) if may is False]
    if lacks:
        why = f"it cannot {' or '.join(lacks)}; a token has the role write, or repo.write and job.write"
        return DoctorCheck("token", "warn", found, wanted, why, another)
    why = "the Hub does not tell what a sign-in by browser may do" if account.can_write is None else ""
    return DoctorCheck("token", "ok", found, wanted, why)


def converter(find: Callable[[], Any], gguf_ready: bool) -> DoctorCheck:
    """Checks the converter. `find` returns the toolchain, or raises an error with the command that downloads it."""
    from skill_train.llama.get_converter import FETCH_COMMAND

    try:
        tools = find()
    except SkillTrainError as error:
        fix = FETCH_COMMAND if gguf_ready else f"{EXTRAS['gguf']} && {FETCH_COMMAND}"
        return DoctorCheck(
            "converter", "warn", error.message, error.expected, "export-gguf fetches it when it is online", fix
        )
    return DoctorCheck("converter", "ok", f"{tools.source}: {tools.version or tools.folder}")


def compiler(has: Callable[[str], bool], system: str) -> DoctorCheck:
    """Checks for a C++ compiler, because llama-cpp-python is compiled during its installation."""
    found = next((name for name in ("c++", "g++", "clang++", "cl") if has(name)), None)
    if found is not None:
        return DoctorCheck("compiler", "ok", found, "a C++ compiler, for llama-cpp-python")
    fix = "xcode-select --install" if system == "Darwin" else "sudo apt-get install g++"
    return DoctorCheck(
        "compiler", "warn", "none", "a C++ compiler", "llama-cpp-python compiles when it is installed", fix
    )


def cache(folder: Path) -> DoctorCheck:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return DoctorCheck("cache", "ok", str(folder), "a folder that can be written")
    except OSError as error:
        another = Path(tempfile.gettempdir()) / "skill-train"
        found, fix = f"{folder}: {error.strerror}", f"export SKILL_TRAIN_CACHE={another}"
        return DoctorCheck("cache", "fail", found, "a folder that can be written", "the converter is kept there", fix)


def agents(home: Path, here: Path) -> DoctorCheck:
    """Checks whether this skill is in a folder where coding agents look for skills."""
    claude = Path(os.environ.get("CLAUDE_CONFIG_DIR") or home / ".claude")
    near = [here / ".claude", here / ".agents"]
    folders = [root / "skills" for root in dict.fromkeys([claude, home / ".agents", *near]) if root.is_dir()]
    expected = "this skill in a folder where coding agents look"
    if not folders:
        return DoctorCheck("agents", "ok", "none", expected, "no folder of a coding agent is here")
    named = "; ".join(f"{folder}: {_skills_in(folder)}" for folder in folders)
    if any((folder / "skill-train" / "SKILL.md").is_file() for folder in folders):
        return DoctorCheck("agents", "ok", named, expected)
    beside = any(root.is_dir() for root in near)
    fix = "skill-train skills install" if beside else "skill-train skills install --scope global"
    return DoctorCheck("agents", "warn", named, expected, "the agents here do not know this skill", fix)


def _skills_in(folder: Path) -> str:
    names = sorted(path.parent.name for path in folder.glob("*/SKILL.md")) if folder.is_dir() else []
    return f"{len(names)} skills" + (", this one among them" if "skill-train" in names else "")


def worst(checks: Iterable[DoctorCheck]) -> str:
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in ("fail", "warn") if verdict in verdicts), "ok")


def _gb(number: int | None) -> str:
    return "unknown" if number is None else gigabytes(number)
