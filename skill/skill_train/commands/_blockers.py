"""The reasons why a plan cannot be run, and warnings about its export."""

from __future__ import annotations

from msgspec.structs import replace

from skill_train.core.console import Console
from skill_train.core.errors import DecisionNeeded
from skill_train.core.units import gigabytes
from skill_train.model.convertible.from_config import LINE_ENDS_WARNING, unread_window_warning
from skill_train.program.pictures.engine import LINED
from skill_train.run.plan_record import Plan


def require_room(console: Console, plan: Plan, *, force: bool) -> None:
    """Refuses a run whose lower estimate does not fit into memory; warns if only the upper one does not fit.

    Raises:
        DecisionNeeded: it does not fit, or needs what this machine lacks.
    """
    memory, usable = plan.estimates.memory_bytes, plan.estimates.usable_bytes
    later = {"unknown_memory", "device_unavailable"}  # torch itself will tell
    if memory.low is not None and memory.high is not None and usable is not None and memory.low <= usable < memory.high:
        later.add("no_memory")
        console.warn("little_memory", f"the run may need {gigabytes(memory.high)}; {gigabytes(usable)} can be used")
    stopping = [blocker for blocker in plan.blockers if blocker.code not in later]
    if stopping and not force:
        raise blocked(replace(plan, blockers=stopping))


def require_no_blockers(plan: Plan) -> None:
    if plan.blockers:
        raise blocked(plan)


def blocked(plan: Plan) -> DecisionNeeded:
    """The error for a plan with blockers, with the way out that the plan knows."""
    first = plan.blockers[0]
    cloud = plan.where == "cloud"
    elsewhere = "" if cloud or plan.policy.sensitive else ", or --where cloud"
    larger = "a larger flavor, " if cloud else ""
    hint = {
        "needs_cuda": f"load_in_4bit: false with a smaller model{elsewhere}",
        "no_memory": f"{larger}a smaller model, a shorter max_length, load_in_4bit: true on an NVIDIA GPU{elsewhere}",
        "no_host_ram": f"{larger}a smaller model, or load_in_4bit: true, which reads a weight at a time{elsewhere}",
        "no_disk": "free some space, or choose another place for the run",
        "device_unavailable": "plan on the machine that has it; for another one compare memory_bytes with its memory",
        "no_torch": f"a Python built for arm64 on Apple silicon{elsewhere}",
        "too_slow": "a larger --max-hours, --flavor for the one that you accept, or fewer steps",
        "vision": "rows with pictures, or the text model of the same family: Qwen2.5 for Qwen2.5-VL",
        "local_input": "--where local, or skill-train data DATA --fix NEW_FILE, which writes the paths anew",
    }.get(first.code, "a smaller model, a shorter max_length, or load_in_4bit: true")
    return DecisionNeeded(
        f"the plan cannot be run: {'; '.join(blocker.message for blocker in plan.blockers)}",
        code=first.code,
        expected="a model and rows that fit",
        got=f"{plan.where}, {plan.flavor or plan.facts.machine.chip}",
        hint=hint,
    )


def warn_of_export(console: Console, plan: Plan) -> None:
    """Warns before the training about a model that llama.cpp cannot convert, or computes otherwise."""
    model = plan.facts.model
    if model.not_convertible:
        console.warn(
            "not_convertible", f"{model.not_convertible}; training and merging work, and export-gguf refuses this model"
        )
    elif window := model.unread_window:
        longest = plan.recipe.max_length
        console.warn("unread_window", unread_window_warning(window, model.architecture, longest))
    elif plan.recipe.images and model.model_type in LINED:
        console.warn("line_ends", LINE_ENDS_WARNING)
