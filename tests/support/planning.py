"""Plans of recorded models on recorded machines, with rows of known lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from machines import recorded_machine
from models import recorded_model
from skill_train.facts import DatasetFacts, Flavor, MachineFacts, ModelFacts, TokenFacts
from skill_train.hub import flavors
from skill_train.plan.make import make_plan
from skill_train.plan.placement import Choices
from skill_train.recipe.fields import FIELDS, from_dict, recipe_hash
from skill_train.run import plan_record
from skill_train.run.plan_record import Facts, Plan

MEAN_TOKENS = 380  # of MATH's rows with their prompt, the data of this project's seed "From MacBook to Cloud"


def shipped_flavor(name: str) -> Flavor:
    """One of the shipped table."""
    return next(flavor for flavor in flavors.shipped() if flavor.name == name)


def decided(
    model: str | ModelFacts, machine: str | MachineFacts, *, offered: Iterable[Flavor] | None = None, **said: Any
) -> dict[str, Any]:
    """`decided_plan`, as JSON has it."""
    return decided_plan(model, machine, offered=offered, **said).as_dict()


def decided_plan(
    model: str | ModelFacts, machine: str | MachineFacts, *, offered: Iterable[Flavor] | None = None, **said: Any
) -> Plan:
    """A plan by the names of a model and a machine, and whatever differs from a smoke test of 50 steps.

    Args:
        offered: the flavors of the cloud; the shipped table when left out.
        said: keys of the recipe, fields of `Choices`, `rows` of the dataset, `longest` of them in tokens, `free` bytes
            of the device's memory (the recorded ones when left out), and `epochs` in place of the 50 steps.
    """
    facts = recorded_model(model) if isinstance(model, str) else model
    there = recorded_machine(machine) if isinstance(machine, str) else machine
    if "free" in said:
        there = msgspec.structs.replace(there, available_bytes=int(said.pop("free")))
    names = Choices.__struct_fields__
    choices = Choices(**{key: said.pop(key) for key in [*said] if key in names})
    recipe = {"model": facts.source, "data": "rows.jsonl", "max_length": 1024}
    recipe |= {"num_train_epochs": said.pop("epochs")} if "epochs" in said else {"max_steps": 50}
    rows, longest = said.pop("rows", 1000), said.pop("longest", None)
    assert not said.keys() - FIELDS.keys(), said
    asked = from_dict(recipe | said)
    return make_plan(
        asked,
        Facts(facts, rows_of(rows, asked.max_length, longest or asked.max_length, chat=facts.has_chat_template), there),
        choices=choices,
        offered=flavors.shipped() if offered is None else tuple(offered),
    )


def plan_document(**changed: Any) -> dict[str, Any]:
    """`plan.json` of a small run on one GPU, with some values replaced; of objects those that are named."""
    document = decided("qwen2.5-0.5b", "rtx_4090")
    for key, value in changed.items():
        document[key] = document[key] | value if isinstance(value, dict) and document[key] else value
    if "recipe_hash" not in changed:
        document["recipe_hash"] = recipe_hash(document["recipe"], document["fingerprints"])
    return document


def write_recipe_hash(run: Path) -> None:
    """Writes the hash of the planned recipe into `plan.json` and `train.json` of a folder, as planning and training
    do."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    digest = recipe_hash(plan["recipe"], plan["fingerprints"])
    for name in ("plan.json", "train.json"):
        document = json.loads((run / name).read_text(encoding="utf-8"))
        (run / name).write_text(json.dumps(document | {"recipe_hash": digest}), encoding="utf-8")


def plan_with(**changed: Any) -> Plan:
    """The plan of `plan_document`."""
    return plan_record.from_dict(plan_document(**changed), Path("plan.json"))


def rows_of(rows: int, max_length: int, longest: int, *, chat: bool = True) -> DatasetFacts:
    """Rows of `MEAN_TOKENS` on average, counted, half of them trained."""
    mean = float(min(MEAN_TOKENS, max_length, longest))
    cut = min(longest, max_length)
    tokens = TokenFacts(
        "counted in all rows", True, (mean, mean), (longest, longest), (mean, mean), max_length, trained_share=0.5
    )
    name = "messages" if chat else "text"
    print_of_rows = hashlib.sha256(f"{rows} {longest}".encode()).hexdigest()
    return DatasetFacts(
        "rows.jsonl", print_of_rows, rows, (name,), name, {name: name}, rows * cut * 4, "found", tokens=tokens
    )


def says(plan: dict[str, Any]) -> dict[str, str]:
    """What each rule and each choice of the placement says, by its name."""
    return {reason["rule"]: reason["value"] for reason in plan["reasons"]}


def split(plan: dict[str, Any]) -> tuple[int, int, int]:
    """Rows at a time, accumulation, processes."""
    placed = plan["placement"]
    return (
        placed["per_device_train_batch_size"],
        placed["gradient_accumulation_steps"],
        placed["num_processes"],
    )
