"""Rejects a chat template that loops forever or writes gigabytes, before it is rendered here: a child process tries it.

A template is a program from somebody else. transformers renders it in jinja2's immutable sandbox, which neither ends a
loop nor limits a text such as `{{ 'a' * 10**10 }}`. `{{ 10**10**9 }}` is computed when the template is compiled, and no
signal interrupts that. Both end with the child.
"""

import contextlib
import re
from functools import cache
from typing import Any, TypedDict

from skill_train.core.errors import DecisionNeeded, NativeCrash, UsageError
from skill_train.core.memory import limit_process
from skill_train.core.worker import run_worker, worker_main

WORKER = "skill_train.model.template_guard_worker"
SECONDS = 2  # of processor time; the longest published template takes a hundredth of one
_MEMORY_BYTES = 800_000_000  # limit of the address space; this process takes 100 MB
_MOST_CHARACTERS = 10_000_000  # limit of one rendered conversation, all of which are short
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag that transformers adds to jinja2
_USER, _ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}
_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
_TALKS: tuple[dict[str, object], ...] = (
    {"messages": [_USER], "tools": None, "add_generation_prompt": True},
    {"messages": [_USER, _ANSWER], "tools": None, "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be exact."}, _USER, _ANSWER, _USER, _ANSWER], "tools": None},
    {"messages": [_USER, _ANSWER], "tools": [_TOOL]},
)


class TrialJob(TypedDict):
    """The templates, and the variables of the conversations to render with each."""

    templates: list[str]
    conversations: list[dict[str, object]]


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
        run_worker(WORKER, job, object, most_seconds=10 * SECONDS)
    except (NativeCrash, DecisionNeeded) as error:
        big = error.code == "out_of_memory"
        raise UsageError(
            "the model's chat template " + ("uses too much memory" if big else "does not finish"),
            code="unsafe_file",
            expected=f"a template that renders a short conversation in {SECONDS} seconds",
            got=error.got.splitlines()[-1][:200] if error.got else error.message,
            hint="do not use this model, or correct its chat_template",
        ) from None


def run(job: TrialJob) -> None:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    limit_process(_MEMORY_BYTES, seconds=SECONDS)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: "01 Jan 2026"}
    # Other errors of a template are reported where it is used, with the row that it refuses.
    errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
    for text in job["templates"]:
        try:
            template = environment.from_string(_GENERATION.sub("", text))
        except errors:
            continue
        for conversation in job["conversations"]:
            with contextlib.suppress(*errors):
                if len(template.render(**conversation)) > _MOST_CHARACTERS:
                    raise MemoryError


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    worker_main(run, TrialJob)
