"""`doctor`: checks this installation. Each check comes with the command that fixes it."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.commands import _doctor_checks as checks
from skill_train.commands import _doctor_packages
from skill_train.commands._command import command, option
from skill_train.commands._doctor_checks import DoctorCheck
from skill_train.commands._doctor_packages import Package
from skill_train.commands._drawing import STYLE, rich_table
from skill_train.core.console import Console, Result
from skill_train.core.errors import NotInstalled, SkillTrainError, UsageError
from skill_train.hub.account import Account
from skill_train.machine.probe import this_machine
from skill_train.machine.read import cache_dir, read_machine
from skill_train.machine.torch_worker import TorchAnswer
from skill_train.run.folder import installed

if TYPE_CHECKING:
    from skill_train.commands._doctor_self_test import SelfTest

_TORCH_SECONDS = 60.0  # loading torch takes 2 to 20 s, more from a network disk

_TRAIN, _GGUF = checks.EXTRAS["train"], checks.EXTRAS["gguf"]


@dataclass(frozen=True)
class DoctorOptions:
    self_test: bool = option(False, "Also run all steps on the embedded model, offline: about a minute.")


@command(DoctorOptions, "skill-train doctor", "skill-train doctor --self-test --format json")
def doctor(options: DoctorOptions, console: Console) -> Result:
    """Check this installation and say how to fix each problem: versions, accelerator, memory, disk, token."""
    packages = _doctor_packages.packages()
    requirements = {
        group: [package for package in packages if package.group == group] for group in ("base", "train", "gguf")
    }
    if options.self_test:
        _require(requirements)
    done, account = _checks(requirements)
    able, why_not = _able(done, account)
    error = _broken(done)
    verdict, tested = checks.worst(done), None
    if options.self_test and error is None:
        from skill_train.commands import _doctor_self_test  # it needs packages that may be missing

        tested, error = _doctor_self_test.self_test(console)
        verdict = "fail" if error else verdict
    data: dict[str, object] = {"verdict": verdict, "able": able, "not_able": why_not}
    data |= {"self_test": tested} if tested else {}
    data["checks"] = [_short(check) for check in done]
    fixes = [
        check.fix for check in sorted(done, key=lambda check: check.verdict) if check.fix.startswith("skill-train ")
    ]
    return Result(
        data,
        human=lambda rich: _draw(rich, f"this installation: {verdict}", done, able, why_not, tested),
        quiet=verdict,
        next=list(dict.fromkeys(fixes))[:4] or ["skill-train demo"],
        error=error,
    )


def _checks(requirements: dict[str, list[Package]]) -> tuple[list[DoctorCheck], Account]:
    """All checks in the order of the steps. The slow checks (torch, the Hub) run in parallel."""
    from skill_train.hub import account as hub_account
    from skill_train.llama import get_converter

    probe = this_machine()
    facts = read_machine(probe)
    names = ("torch", "llama-cpp-python", "huggingface-hub")
    has_torch, has_llama_cpp, has_hub = (installed(name) is not None for name in names)
    with ThreadPoolExecutor(2) as beside:
        torch = beside.submit(_ask_torch, facts.device) if has_torch else None
        pending = beside.submit(hub_account.account) if has_hub else None
        done = [
            checks.python(sys.version.split()[0]),
            *(checks.packages(group, packages) for group, packages in requirements.items() if packages),
            checks.together(list(chain.from_iterable(requirements.values())), _doctor_packages.known_sets()),
        ]
        vision = _doctor_packages.torchvision()
        done += [checks.torchvision(vision)] if vision is not None else []
        done += [checks.accelerator(facts), checks.memory(facts), checks.disk(facts), checks.cache(cache_dir())]
        done.append(checks.converter(get_converter.find, gguf_ready=has_llama_cpp))
        if not has_llama_cpp:
            done.append(checks.compiler(probe.has, probe.system))
        done.append(checks.agents(Path.home(), Path.cwd()))
        account = pending.result() if pending else Account("unchecked", why="huggingface_hub is not installed")
        done.append(checks.token(account))
        if torch is not None:
            done.append(checks.torch(facts, torch.result))
    return done, account


def _ask_torch(device: str) -> TorchAnswer:
    from skill_train.core.worker import run_worker

    return run_worker("skill_train.machine.torch_worker", device, TorchAnswer, most_seconds=_TORCH_SECONDS)


def _short(check: DoctorCheck) -> dict[str, str]:
    return {key: value for key, value in dataclasses.asdict(check).items() if value or key in ("name", "verdict")}


def _able(done: list[DoctorCheck], account: Account) -> tuple[dict[str, bool | None], dict[str, str]]:
    """Which commands this installation can run (None if unknown), and the reason for each that is not True."""
    verdicts = {check.name: check for check in done}
    base, train, gguf = (verdicts.get(name) for name in ("packages", "packages [train]", "packages [gguf]"))
    no_train = _lacking(train, _TRAIN) or _fault(verdicts.get("torch"))
    no_gguf = no_train or _lacking(gguf, _GGUF)
    no_base, converter = _fault(base) or _fault(verdicts["python"]), verdicts["converter"]
    no_converter = "" if converter.verdict == "ok" else f"{converter.found}: {converter.fix}"
    reasons = {
        "plan": no_base,
        "local": no_base or no_train,
        "merge": no_base or no_train,
        "export-gguf": no_base or no_gguf or no_converter,
        "verify": no_base or no_gguf,
        "submit": no_base or _no_submit(account),
    }
    unknown = "" if base else f"{checks.NOT_INSTALLED}: {checks.INSTALL}"
    able: dict[str, bool | None] = {name: False if why else None if unknown else True for name, why in reasons.items()}
    reasons = {name: why or unknown for name, why in reasons.items()}
    if account.state == "unchecked" or (account.state == "valid" and account.can_run_jobs is None):
        able["submit"] = None if not no_base else False
    return able, {name: why for name, why in reasons.items() if why}


def _lacking(check: DoctorCheck | None, command: str) -> str:
    """The command that installs missing packages; empty if none is missing. Another version may still work."""
    return command if check is not None and "missing" in check.found else ""


def _fault(check: DoctorCheck | None) -> str:
    return check.because or check.found if check is not None and check.verdict == "fail" else ""


def _no_submit(account: Account) -> str:
    if account.state != "valid":
        reasons = {"none": "no token: hf auth login", "invalid": "the Hub does not know the token: hf auth login"}
        return reasons.get(account.state, account.why)
    if account.can_run_jobs is None:
        return "the Hub does not tell what this token may do"
    if account.may("job.write", account.name) and account.may("repo.write", account.name):
        return ""
    if account.can_run_jobs and account.can_write:
        return f"the token may not run jobs and write as {account.name}; --namespace for an organisation where it may"
    return "the token cannot write and run jobs"


def _broken(done: list[DoctorCheck]) -> SkillTrainError | None:
    check = next((check for check in done if check.verdict == "fail"), None)
    if check is None:
        return None
    kind = UsageError if check.name == "cache" else NotInstalled
    return kind(
        f"{check.name}: {check.found}",
        code="system_error" if check.name == "cache" else "bad_installation",
        expected=check.expected,
        got=check.because,
        hint=check.fix,
    )


def _require(requirements: dict[str, list[Package]]) -> None:
    """Refuses a self-test without all packages, because it runs every step."""
    needed = [package for group in ("train", "gguf") for package in requirements[group]]
    missing = sorted({package.name for package in needed if package.installed is None})
    if missing:
        raise NotInstalled(
            f"the self-test needs {', '.join(missing)}",
            code="missing_package",
            expected="the extras train and gguf",
            hint='pip install "skill-train[train,gguf]"',
        )


def _draw(
    rich: Any,
    title: str,
    done: list[DoctorCheck],
    able: dict[str, bool | None],
    why_not: dict[str, str],
    tested: SelfTest | None,
) -> None:
    table = rich_table("check", "verdict", "found", title=title)
    for check in done:
        table.add_row(check.name, check.verdict, check.found, style=STYLE[check.verdict])
    rich.print(table)
    for check in done:
        if check.verdict != "ok":
            sentences = [check.because, f"fix it with: {check.fix}" if check.fix else ""]
            rich.print(f"{check.name}: " + "; ".join(filter(None, sentences)), soft_wrap=True)
    for name, can in able.items():
        word = {True: "yes", False: "no", None: "not known"}[can]
        reason = f" ({why_not[name]})" if name in why_not else ""
        rich.print(f"{name}: {word}{reason}")
    if tested is not None:
        _draw_self_test(rich, tested)


def _draw_self_test(rich: Any, figures: SelfTest) -> None:
    table = rich_table("stage", "verdict", "seconds", title=f"self-test: {figures['verdict']}")
    for stage in figures["stages"]:
        table.add_row(stage["stage"], stage["verdict"], str(stage.get("seconds", "")), style=STYLE[stage["verdict"]])
    rich.print(table)
    rich.print(f"{figures['seconds']} s in all")
