"""Is this installation able: each check with the command that mends it, and a self-test of the whole chain."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from skill_train.commands import doctor_checks as checks
from skill_train.commands import doctor_packages, tables
from skill_train.commands.doctor_checks import Check
from skill_train.commands.doctor_packages import Package
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.errors import DecisionNeeded, NotInstalled, SkillTrainError, TrainingFailed, UsageError
from skill_train.core.files import write_text
from skill_train.core.peak_memory import peak_memory_bytes
from skill_train.hub.account import Account
from skill_train.machine import read as machine
from skill_train.machine.probe import this_machine
from skill_train.run.folder import RunDir

_TORCH_SECONDS = 60.0  # loading torch takes 2 to 20 s, more from a network disk
_KINDS = {"cache": UsageError, "disk": DecisionNeeded, "memory": DecisionNeeded}
_TRAIN, _GGUF = checks.EXTRAS["train"], checks.EXTRAS["gguf"]

# The self-test: a tenth of the demo's rows, a fifth of its steps, one quantized type, an eighth of its tokens.
_ROWS, _STEPS, _QUANT, _TOKENS = 100, 20, "q8_0", 256


def doctor(console: Console, *, self_test: bool) -> Result:
    """Every check, what this installation can do, and with `self_test` the figures of the chain."""
    found = {group: _group(group) for group in ("base", "train", "gguf")}
    if self_test:
        _require(found)
    done, account = _checks(found)
    able, why_not = _able(done, account)
    error = _broken(done)
    data: dict[str, Any] = {"verdict": checks.worst(done), "able": able, "not_able": why_not}
    if self_test and error is None:
        data["self_test"], error = _self_test(console)
        data["verdict"] = "fail" if error else data["verdict"]
    data["checks"] = [_short(check) for check in done]
    fixes = [
        check.fix for check in sorted(done, key=lambda check: check.verdict) if check.fix.startswith("skill-train ")
    ]
    return Result(
        data,
        human=lambda rich: tables.draw_doctor(rich, data),
        quiet=data["verdict"],
        next=list(dict.fromkeys(fixes))[:4] or ["skill-train demo"],
        error=error,
    )


def _group(group: str) -> list[Package]:
    return [package for package in doctor_packages.packages() if package.group == group]


def _checks(found: dict[str, list[Package]]) -> tuple[list[Check], Account]:
    """All checks, in the order of the chain; what has to wait (torch, the Hub) runs beside the others."""
    from skill_train.hub import account as hub_account
    from skill_train.llama import get_converter as toolchain

    probe = this_machine()
    facts = machine.read_machine(probe)
    has_torch = _has(found, "train", "torch")
    with ThreadPoolExecutor(2) as beside:
        torch = beside.submit(_ask_torch, facts.device) if has_torch else None
        asked = beside.submit(hub_account.account) if _has(found, "base", "huggingface-hub") else None
        done = [
            checks.python(sys.version.split()[0]),
            *(checks.packages(group, some) for group, some in found.items() if some),
            checks.together([package for some in found.values() for package in some], doctor_packages.known_sets()),
        ]
        done += [checks.accelerator(facts), checks.memory(facts), checks.disk(facts), checks.cache(machine.cache_dir())]
        done.append(checks.converter(toolchain.find, gguf_ready=_has(found, "gguf", "llama-cpp-python")))
        if not _has(found, "gguf", "llama-cpp-python"):
            done.append(checks.compiler(probe.has, probe.system))
        done.append(checks.agents(Path.home(), Path.cwd()))
        account = asked.result() if asked else Account("unchecked", why="huggingface_hub is not installed")
        done.append(checks.token(account))
        if torch is not None:
            done.append(checks.torch(facts, torch.result))
    return done, account


def _ask_torch(device: str) -> dict[str, Any]:
    from skill_train.core.worker import run_worker

    return run_worker("skill_train.machine.torch_worker", {"device": device}, most_seconds=_TORCH_SECONDS)


def _has(found: dict[str, list[Package]], group: str, name: str) -> bool:
    return any(package.name == name and package.installed for package in found[group])


def _short(check: Check) -> dict[str, str]:
    return {key: value for key, value in dataclasses.asdict(check).items() if value or key in ("name", "verdict")}


def _able(done: list[Check], account: Account) -> tuple[dict[str, bool | None], dict[str, str]]:
    """What this installation can do, None where that is not known, and the reason for each that is not True."""
    verdicts = {check.name: check for check in done}
    base, train, gguf = (verdicts.get(name) for name in ("packages", "packages [train]", "packages [gguf]"))
    no_train = _lacking(train, _TRAIN) or _fault(verdicts.get("torch"))
    no_gguf = no_train or _lacking(gguf, _GGUF)
    no_base = _fault(base) or _fault(verdicts["python"])
    found = verdicts["converter"]
    reasons = {
        "plan": no_base,
        "local": no_base or no_train,
        "merge": no_base or no_train,
        "export-gguf": no_base or no_gguf or ("" if found.verdict == "ok" else f"{found.found}: {found.fix}"),
        "verify": no_base or no_gguf,
        "submit": no_base or _no_submit(account),
    }
    able: dict[str, bool | None] = {name: not why for name, why in reasons.items()}
    if account.state == "unchecked" or (account.state == "valid" and account.can_run_jobs is None):
        able["submit"] = None if not no_base else False
    return able, {name: why for name, why in reasons.items() if why}


def _lacking(check: Check | None, command: str) -> str:
    """Packages that are there in another version may still work; those that are missing do not."""
    return command if check is not None and "missing" in check.found else ""


def _fault(check: Check | None) -> str:
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


def _broken(done: list[Check]) -> SkillTrainError | None:
    check = next((check for check in done if check.verdict == "fail"), None)
    if check is None:
        return None
    kind = _KINDS.get(check.name, NotInstalled)
    code = f"bad_{check.name.split()[0]}"
    return kind(f"{check.name}: {check.found}", code=code, expected=check.expected, got=check.because, hint=check.fix)


def _require(found: dict[str, list[Package]]) -> None:
    """The self-test runs every stage, so it needs every package.

    Raises:
        NotInstalled: one of them is missing.
    """
    needed = [package for group in ("train", "gguf") for package in found[group]]
    missing = sorted({package.name for package in needed if package.installed is None})
    if missing:
        raise NotInstalled(
            f"the self-test needs {', '.join(missing)}",
            code="missing_package",
            expected="the extras train and gguf",
            hint='pip install "skill-train[train,gguf]"',
        )


def _self_test(console: Console) -> tuple[dict[str, Any], SkillTrainError | None]:
    """The chain on the embedded model in a folder that is removed again: seconds and verdict of each stage."""
    stages: list[dict[str, Any]] = []
    started, error = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="skill-train-self-test-") as folder:
        try:
            _chain(console, Path(folder), stages)
        except SkillTrainError as problem:
            error = problem
            if folder in error.hint:  # which is about to go
                error.hint = "skill-train demo   (the same chain, in a folder that stays)"
    figures = {
        "verdict": "fail" if error else "pass",
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": max(peak_memory_bytes() or 0, peak_memory_bytes(children=True) or 0) or None,
        "stages": stages,
    }
    return figures, error


def _chain(console: Console, folder: Path, stages: list[dict[str, Any]]) -> None:
    from skill_train.commands import chain, chain_gguf
    from skill_train.llama import get_converter as toolchain

    run = RunDir(folder / "run")

    def stage(name: str, work: Any) -> Any:
        started = time.monotonic()
        stages.append({"stage": name, "verdict": "fail"})  # until it has ended
        result = work()
        stages[-1] = {"stage": name, "verdict": "pass", "seconds": round(time.monotonic() - started, 1)}
        return result

    tools = stage("find the converter", toolchain.find)
    plan = stage("plan", partial(chain.plan_of, console, _recipe(folder)))
    stage("train", partial(_trained, console, run, plan))
    stage("merge", partial(chain.merge_run, console, run))
    stage("convert and quantize", partial(chain_gguf.export_run, console, run, _QUANT, tools))
    stage("verify", partial(_verified, console, run))


def _recipe(folder: Path) -> Path:
    """The demo's recipe with less to do."""
    shipped = resources.demo()
    rows = islice(resources.train_module().iter_parquet(shipped / "data.parquet"), _ROWS)
    lines = [json.dumps(row, ensure_ascii=False) for _, row in rows]
    write_text(folder / "data.jsonl", "\n".join(lines) + "\n")
    changed = {"model": str(shipped / "model"), "data": str(folder / "data.jsonl"), "max_steps": _STEPS}
    kept = (shipped / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    text = [line for line in kept if line.split(":")[0] not in changed]
    write_text(folder / "recipe.yaml", "\n".join([*text, *(f"{k}: {json.dumps(v)}" for k, v in changed.items())]))
    return folder / "recipe.yaml"


def _trained(console: Console, run: RunDir, plan: dict[str, Any]) -> None:
    from skill_train.commands import chain

    record = chain.train_run(console, run, plan, resume=False)
    failed = [check for check in record["checks"] if check["verdict"] == "fail"]
    if failed:
        raise TrainingFailed(
            f"the self-test's training failed: {', '.join(check['name'] for check in failed)}",
            code="self_test_failed",
            expected="every check of the smoke verdict to pass",
            got="; ".join(check["detail"] for check in failed),
            hint="skill-train demo",
        )


def _verified(console: Console, run: RunDir) -> None:
    from skill_train.commands import chain_gguf

    result = chain_gguf.verify_run(console, run, _TOKENS)
    if result.error is not None:
        raise result.error
