"""The options of `submit`, and the command line that sets them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.commands._options import DEFAULT_HOURS, RECIPE_OPTIONS, RecipeFlags, set_options
from skill_train.commands._shell import quoted


@dataclass(frozen=True)
class SubmitOptions(RecipeFlags):
    source: Path | None = None
    flavor: str | None = None
    timeout: str | None = None
    max_cost: float | None = None
    max_hours: float = DEFAULT_HOURS
    namespace: str | None = None
    hub_model_id: str | None = None
    data_repo: str | None = None
    run_dir: Path | None = None
    dry_run: bool = False
    rehearse: bool = False
    force_new: bool = False
    backend: str = "hf_jobs"
    nodes: int = 1
    infra: str | None = None
    yes: bool = False

    @property
    def recipe_flags(self) -> dict[str, object]:
        return set_options(self, RECIPE_OPTIONS)


def command_of(options: SubmitOptions, **more: Any) -> str:
    words = ["skill-train submit", *([] if options.source is None else [quoted(options.source)])]
    for field in dataclasses.fields(options):
        if field.name == "source":
            continue
        value = more.get(field.name, getattr(options, field.name))
        option = f"--{field.name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False, field.default):
            words += [option, quoted(str(value).removesuffix(".0") if isinstance(value, float) else str(value))]
    return " ".join(words)
