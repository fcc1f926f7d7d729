"""The self-test of `doctor`: all steps on the embedded model, in a temporary folder."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from skill_train.commands._base_model import merge_run
from skill_train.core import resources
from skill_train.core.console import Console
from skill_train.core.errors import SkillTrainError, TrainingFailed
from skill_train.core.files import scratch_folder
from skill_train.core.memory import peak_memory_bytes
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan

# The self-test: a tenth of the demo's rows, a fifth of its steps, one quantized type, an eighth of its tokens.
_ROWS, _STEPS, _QUANT, _TOKENS = 100, 20, "q8_0", 256


class TestedStage(TypedDict):
    """`seconds` is there only if the stage passed."""

    stage: str
    verdict: str
    seconds: NotRequired[float]


class SelfTest(TypedDict):
    verdict: str
    seconds: float
    peak_memory_bytes: int | None
    stages: list[TestedStage]


def self_test(console: Console) -> tuple[SelfTest, SkillTrainError | None]:
    """Runs all steps on the embedded model in a temporary folder. Returns the figures, and a failed step's error."""
    stages: list[TestedStage] = []
    started, error = time.monotonic(), None
    with scratch_folder() as folder:
        try:
            _chain(console, folder, stages)
        except SkillTrainError as problem:
            error = problem
            if str(folder) in error.hint:  # the folder is about to be removed
                error.hint = "run the same chain in a folder that stays: skill-train demo"
    figures: SelfTest = {
        "verdict": "fail" if error else "pass",
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": max(peak_memory_bytes() or 0, peak_memory_bytes(children=True) or 0) or None,
        "stages": stages,
    }
    return figures, error


def _chain(console: Console, folder: Path, stages: list[TestedStage]) -> None:
    from skill_train.commands import export_gguf, local
    from skill_train.commands._shipping import ExportOptions
    from skill_train.llama import get_converter

    run = RunDir(folder / "run")

    def stage(name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        stages.append({"stage": name, "verdict": "fail"})  # until the work has succeeded
        result = work()
        stages[-1] = {"stage": name, "verdict": "pass", "seconds": round(time.monotonic() - started, 1)}
        return result

    tools = stage("find the converter", get_converter.find)
    recipe, rows = resources.demo() / "recipe.yaml", f"train[:{_ROWS}]"
    plan = stage("plan", partial(local.plan_of, console, recipe, split=rows, max_steps=_STEPS))
    stage("train", partial(_trained, console, run, plan))
    stage("merge", partial(merge_run, console, run))
    options = ExportOptions(quant=_QUANT)
    stage("convert and quantize", partial(export_gguf.export_run, console, run, options, tools))
    stage("verify", partial(_verified, console, run))


def _trained(console: Console, run: RunDir, plan: Plan) -> None:
    from skill_train.commands import local

    record = local.train_run(console, run, plan, resume=False).record
    failed = [check for check in record.checks if check.verdict == "fail"]
    if failed:
        raise TrainingFailed(
            f"the self-test's training failed: {', '.join(check.name for check in failed)}",
            code="self_test_failed",
            expected="every smoke check to pass",
            got="; ".join(check.detail for check in failed),
            hint="skill-train demo",
        )


def _verified(console: Console, run: RunDir) -> None:
    from skill_train.commands import verify

    result = verify.verify_run(console, run, verify.VerifyOptions(tokens=_TOKENS))
    if result.error is not None:
        raise result.error
