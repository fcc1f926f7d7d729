"""The estimates of a plan, as the plan keeps them: ranges with what they rest on. Pure."""

from __future__ import annotations

from typing import Any

from skill_train.estimate.artifacts import (
    convert_bytes,
    disk_bytes,
    file_bytes,
    inference_bytes,
    merge_bytes,
    tokens_per_second,
    verify_bytes,
)
from skill_train.estimate.modules import adapter_parameters
from skill_train.estimate.step import Part, Range, total
from skill_train.estimate.trained import trained_bytes
from skill_train.facts import MachineFacts, ModelFacts
from skill_train.plan.places import QUANTS, Candidate

OFFERS = 5  # flavors that a plan lists beside the one it takes


def estimates(
    model: ModelFacts, machine: MachineFacts, taken: Candidate, cloud: list[Candidate], *, context: int, plain: bool
) -> dict[str, Any]:
    """Memory, time and money of training, what the steps after it need, and each quantized file on this machine.

    Args:
        taken: where the plan trains.
        context: tokens of the cache of keys and values.
        plain: the adapter is A and B alone.
    """
    step = taken.fit.step
    adapter = 0 if step.full else adapter_parameters(model, step.target_modules, step.lora_r, dora=step.dora)
    return {
        "memory_bytes": _range(taken.fit.memory, "the model's shape is unknown"),
        "memory_parts": _parts(taken.fit.parts),
        "usable_bytes": taken.fit.usable_bytes,
        "seconds": _range(taken.seconds, taken.unknown.get("seconds", "unknown")),
        "seconds_parts": _parts(taken.time),
        "cost_usd": _dollars(taken),
        "adapter_parameters": adapter or None,
        "merge_bytes": _range(*((None, "nothing to merge") if step.full else (merge_bytes(model, plain), "unknown"))),
        "convert_bytes": _range(convert_bytes(model), "unknown"),
        "verify_bytes": _range(verify_bytes(model, plain), "unknown"),
        "disk_bytes": _range(disk_bytes(model, QUANTS, trained_bytes(model, step)), "unknown"),
        "files": [_file(model, machine, quant, context) for quant in ("f16", *QUANTS)],
        "flavors": _offers(cloud),
        "prices": _prices(cloud),
    }


def _file(model: ModelFacts, machine: MachineFacts, quant: str, context: int) -> dict[str, Any]:
    parts = inference_bytes(model, quant, context)
    memory = None if parts is None else total(parts, f"{context} tokens of context")
    speed = tokens_per_second(model, quant, machine)
    unknown = f"no memory bandwidth of {machine.chip} is known"
    return {
        "quant": quant,
        "bytes": _range(file_bytes(model, quant), "the parameters are unknown"),
        "memory_bytes": _range(memory, "the model's shape is unknown"),
        "tokens_per_second": _range(speed, unknown),
    }


def _offers(cloud: list[Candidate]) -> list[dict[str, Any]]:
    """The cheapest flavors that fit, cheapest first."""
    fitting = [candidate for candidate in cloud if not candidate.problems and candidate.cost is not None]
    fitting.sort(key=lambda c: (c.cost.middle if c.cost else 0.0, c.name))
    return [
        {"flavor": c.name, "seconds": _ends(_range(c.seconds, "")), "cost_usd": _ends(_dollars(c))}
        for c in fitting[:OFFERS]
    ]


def _prices(cloud: list[Candidate]) -> dict[str, str] | None:
    """Whose the prices are, and of what date; None when no flavor is offered."""
    flavor = next((candidate.flavor for candidate in cloud if candidate.flavor is not None), None)
    return None if flavor is None else {"source": flavor.source, "read_at": flavor.read_at}


def _ends(value: dict[str, Any]) -> list[float]:
    return [value["low"], value["high"]]


def _dollars(candidate: Candidate) -> dict[str, Any]:
    if candidate.flavor is None:
        return {"low": 0, "high": 0, "basis": "this machine: no rent"}
    if candidate.cost is None:
        return {"low": None, "high": None, "basis": candidate.unknown.get("seconds", "unknown")}
    cost = candidate.cost
    return {"low": round(cost.low, 3), "high": round(cost.high, 3), "basis": cost.basis}


def _range(value: Range | None, unknown: str) -> dict[str, Any]:
    return {"low": None, "high": None, "basis": unknown} if value is None else value.as_dict()


def _parts(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    return [
        {"name": part.name, "low": round(part.low), "high": round(part.high), "because": part.because} for part in parts
    ]
