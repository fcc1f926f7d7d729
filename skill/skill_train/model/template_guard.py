"""Rejects a chat template that loops forever or writes gigabytes, before it is rendered here."""

from __future__ import annotations

from functools import cache
from typing import Any

from skill_train.core.errors import DecisionNeeded, NativeCrash, UsageError
from skill_train.core.worker import run_worker
from skill_train.model.template_guard_worker import SECONDS, TrialJob

_USER, _ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}
_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
_TALKS: tuple[dict[str, object], ...] = (
    {"messages": [_USER], "tools": None, "add_generation_prompt": True},
    {"messages": [_USER, _ANSWER], "tools": None, "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be exact."}, _USER, _ANSWER, _USER, _ANSWER], "tools": None},
    {"messages": [_USER, _ANSWER], "tools": [_TOOL]},
)


def require_ending(template: Any) -> None:
    """Tries each template of a tokenizer in a child process, once for each text.

    Raises:
        UsageError: a template does not end, or takes too much memory.
    """
    texts = list(template.values()) if isinstance(template, dict) else [template]
    _tried(tuple(text for text in texts if isinstance(text, str) and ("{%" in text or "{{" in text)))


@cache
def _tried(templates: tuple[str, ...]) -> None:
    if not templates:
        return
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    talks: list[dict[str, object]] = [{**marks, "add_generation_prompt": False, **talk} for talk in _TALKS]
    job = TrialJob(templates=list(templates), conversations=talks)
    try:
        run_worker("skill_train.model.template_guard_worker", job, object, most_seconds=10 * SECONDS)
    except (NativeCrash, DecisionNeeded) as error:
        big = error.code == "out_of_memory"
        raise UsageError(
            "the model's chat template " + ("uses too much memory" if big else "does not finish"),
            code="unsafe_file",
            expected=f"a template that renders a short conversation in {SECONDS} seconds",
            got=error.got.splitlines()[-1][:200] if error.got else error.message,
            hint="do not use this model, or correct its chat_template",
        ) from None
