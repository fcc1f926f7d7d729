"""Child process: tries the chat templates of a model folder, so that a hostile one cannot harm the main process.

A template is a program from somebody else. transformers renders it in jinja2's immutable sandbox, which neither ends a
loop nor limits a text such as `{{ 'a' * 10**10 }}`. `{{ 10**10**9 }}` is computed when the template is compiled, and no
signal interrupts that. Here both end with this process.
"""

from __future__ import annotations

import contextlib
import re
from typing import TypedDict

from skill_train.core.memory import limit_process
from skill_train.core.worker import worker_main

SECONDS = 2  # of processor time; the longest published template takes a hundredth of one
_MEMORY_BYTES = 800_000_000  # limit of the address space; this process takes 100 MB
_MOST_CHARACTERS = 10_000_000  # limit of one rendered conversation, all of which are short
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag that transformers adds to jinja2


class TrialJob(TypedDict):
    """The templates, and the variables of the conversations to render with each."""

    templates: list[str]
    conversations: list[dict[str, object]]


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
