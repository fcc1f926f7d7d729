"""The estimates in a plan: ranges with their basis. Pure."""

from skill_train.estimate.artifacts import convert_bytes, disk_bytes, merge_bytes, verify_bytes
from skill_train.estimate.fit import estimated_file
from skill_train.estimate.modules import EMBEDDINGS, HEADS, adapter_parameters
from skill_train.estimate.step import Part, Range
from skill_train.estimate.targets import TargetDevice, machine_target
from skill_train.estimate.trained import trained_bytes
from skill_train.facts import MachineFacts, ModelFacts
from skill_train.model.lora_targets import TARGETS
from skill_train.plan.places import QUANTS, Candidate, by_price
from skill_train.run.plan_record import Estimate, EstimatePart, Estimates, FileEstimate, Offer, Prices

UNSHAPED = "the model's shape is unknown"
OFFERS = 5  # flavors that a plan lists in addition to the chosen one


def estimates(
    model: ModelFacts, machine: MachineFacts, chosen: Candidate, cloud: list[Candidate], *, context: int, plain: bool
) -> Estimates:
    """The memory, time and cost of training, the needs of the later steps, and each quantized file on this machine.

    Args:
        chosen: the place where the plan trains.
        context: the tokens of the cache of keys and values.
        plain: the adapter consists of A and B only.
    """
    step, here = chosen.fit.step, machine_target(machine)
    usual = model.model_type in TARGETS  # its modules have usual widths; those of the vision part have no formula
    counted = usual or all(name in (*model.linear_sizes, *EMBEDDINGS, *HEADS) for name in step.target_modules)
    counted = counted and not (step.full or step.tower_trains or step.projector_trains)
    adapter = adapter_parameters(model, step.target_modules, step.lora_r, dora=step.dora) if counted else 0
    return Estimates(
        memory_bytes=_range(chosen.fit.memory, UNSHAPED),
        memory_parts=_parts(chosen.fit.parts),
        usable_bytes=chosen.fit.usable_bytes,
        seconds=_range(chosen.seconds, chosen.unknown.get("seconds", "unknown")),
        seconds_parts=_parts(chosen.time),
        cost_usd=_dollars(chosen),
        adapter_parameters=adapter or None,
        merge_bytes=_range(*((None, "nothing to merge") if step.full else (merge_bytes(model, plain), UNSHAPED))),
        convert_bytes=_range(convert_bytes(model), UNSHAPED),
        verify_bytes=_range(verify_bytes(model, plain), UNSHAPED),
        disk_bytes=_range(disk_bytes(model, QUANTS, trained_bytes(model, step)), UNSHAPED),
        files=[_file(model, here, quant, context, step.images) for quant in ("f16", *QUANTS)],
        flavors=_offers(cloud),
        prices=_prices(cloud),
    )


def _file(model: ModelFacts, here: TargetDevice, quant: str, context: int, pictures: bool) -> FileEstimate:
    file = estimated_file(model, here, quant, context, pictures=pictures)
    return FileEstimate(
        quant=quant,
        bytes=_range(file.bytes, "the parameters are unknown"),
        memory_bytes=_range(file.memory, UNSHAPED),
        tokens_per_second=_range(file.speed, "its memory bandwidth is unknown" if file.memory else UNSHAPED, digits=1),
    )


def _offers(cloud: list[Candidate]) -> list[Offer]:
    """The cheapest flavors that fit, in order of price."""
    fitting = sorted((each for each in cloud if not each.problems and each.cost is not None), key=by_price)
    return [Offer(each.name, _ends(_range(each.seconds, "")), _ends(_dollars(each))) for each in fitting[:OFFERS]]


def _prices(cloud: list[Candidate]) -> Prices | None:
    """The source and the date of the prices; None if there is no flavor."""
    flavor = next((candidate.flavor for candidate in cloud if candidate.flavor is not None), None)
    return None if flavor is None else Prices(flavor.source, flavor.read_at)


def _ends(value: Estimate) -> list[float | None]:
    return [value.low, value.high]


def _dollars(candidate: Candidate) -> Estimate:
    if candidate.flavor is None:
        return Estimate(0, 0, "this machine: no rent")
    if candidate.cost is None:
        return Estimate(None, None, candidate.unknown.get("seconds", "unknown"))
    cost = candidate.cost
    return Estimate(round(cost.low, 3), round(cost.high, 3), cost.basis)


def _range(value: Range | None, unknown: str, digits: int | None = None) -> Estimate:
    if value is None:
        return Estimate(None, None, unknown)
    return Estimate(round(value.low, digits), round(value.high, digits), value.basis)


def _parts(parts: tuple[Part, ...]) -> list[EstimatePart]:
    return [EstimatePart(part.name, round(part.low), round(part.high), part.because) for part in parts]
