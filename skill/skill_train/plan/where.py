"""Decides between this machine and the cloud: each rule compares one figure and says what follows. Pure: the same facts
give the same answer.

The rules for Macs come from this project's first document ("Local training on macOS", Agent Decision Rubric). Where it
has no rule, the estimate decides. A CUDA workstation is judged by its memory. references/planning.md lists the rules.
"""

from collections.abc import Iterator
from pathlib import Path

from skill_train.core.errors import DecisionNeeded
from skill_train.core.units import duration, gigabytes
from skill_train.facts import TORCH_NEEDS, MachineFacts, ModelFacts
from skill_train.plan.placement import Choices, has_device
from skill_train.plan.places import Candidate
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.plan_record import Reason

# "Up to 3B" and "7B and more" by the names of models: Llama 3.2 3B has 3.21e9 parameters, Llama 2 7B 6.74e9.
SMALL, LARGE = 3.5e9, 6.5e9
SMALL_VISION = 0.6e9  # SmolVLM of 256M and 500M
SHORT, LONG = 1024, 4096  # tokens: that document's "short context", and a length that exceeds the memory of laptops
SEED = "Local training on macOS: agent decision rubric"
FRAMEWORK = "Develop locally, deploy to the cloud: decision framework"
GUIDE = "Hardware guide"


def decide(
    recipe: ResolvedRecipe, *, sensitive: bool, model: ModelFacts, here: Candidate, choices: Choices, counted: bool
) -> tuple[str, list[Reason]]:
    """The place to train, and the rules that apply: local unless a rule says cloud. The user's choice overrides the
    rules, and sensitive data overrides both. The value of a rule is its answer: `local`, `cloud`, or `either`, which
    leaves it to the others.

    Args:
        counted: whether the rows' tokens were counted; else the longest row is a bound computed from its bytes.

    Raises:
        DecisionNeeded: the user requested the cloud, and the data is sensitive.
    """
    fired = list(rules(recipe, model, here, choices.max_hours, counted))
    advice = "cloud" if any(rule.value == "cloud" for rule in fired) else "local"
    if sensitive:
        if choices.where == "cloud":
            raise stays_here(choices.where_because or "--where cloud")
        stays = Reason("sensitive", "local", "sensitive: true: data, adapter and model stay on this machine", FRAMEWORK)
        return "local", [stays, *fired]
    if choices.where is not None:
        against = [rule.rule for rule in fired if rule.value not in (choices.where, "either")]
        overrode = f", against {', '.join(against)}" if advice != choices.where else "; the rules say the same"
        return choices.where, [_chosen(choices, choices.where, overrode), *fired]
    return advice, fired


def _chosen(choices: Choices, where: str, overrode: str) -> Reason:
    """The rule for a choice of the user. Only an option counts as `asked`."""
    reason = choices.where_because or f"--where {where}"
    option = reason.startswith("--")
    return Reason("asked" if option else "command", where, reason + overrode, "user" if option else "command line")


def stays_here(got: str, base_of: Path | None = None) -> DecisionNeeded:
    """The refusal for sensitive data. `base_of`: the run that made the base, if that run's recipe says sensitive."""
    return DecisionNeeded(
        f"the recipe{f' of {base_of}, which made the base,' if base_of else ''} has sensitive: true, so its data and "
        "model may not leave this machine",
        code="sensitive",
        expected="a run that stays on this machine",
        got=got,
        hint="train on this machine, and keep the result here; only the owner of the data may decide that it can leave",
    )


def rules(
    recipe: ResolvedRecipe, model: ModelFacts, local: Candidate, max_hours: float, counted: bool
) -> Iterator[Reason]:
    """All rules that apply, in a natural reading order."""
    machine = local.machine
    if machine.intel_mac:
        yield Reason("intel mac", "cloud", "no MPS on an Intel Mac, and training on its processor takes days", SEED)
    if machine.rosetta:
        yield Reason(
            "rosetta", "either", "this Python runs under Rosetta and cannot use MPS; install an arm64 Python", GUIDE
        )
    if local.fit.step.device == "cuda" and (machine.compute_capability or TORCH_NEEDS) < TORCH_NEEDS:
        yield _old_gpu(machine)
    if recipe.load_in_4bit and local.fit.step.device != "cuda":
        yield Reason("4-bit", "cloud", "QLoRA needs CUDA (bitsandbytes)", SEED)
    if model.vision:
        yield _vision(recipe, model)
    if local.fit.step.device != "cuda":
        yield _size(model, machine)
        yield _length(recipe.max_length, local, counted)
        if recipe.is_full:
            yield Reason("full fine-tuning", "cloud", "every weight trains, with gradients and AdamW's moments", SEED)
    yield _memory(local)
    yield _time(local, max_hours)


def _old_gpu(machine: MachineFacts) -> Reason:
    needs = f"the torch of PyPI has kernels from {TORCH_NEEDS} on"
    why = f"{machine.chip} has compute capability {machine.compute_capability}, and {needs}; --where local for another"
    return Reason("old gpu", "cloud", f"{why} build of it, which doctor tries", "pytorch/pytorch#164471")


def _vision(recipe: ResolvedRecipe, model: ModelFacts) -> Reason:
    """The rubric's rule for vision models. It was written before there were models of 256 million parameters."""
    if recipe.images and model.parameters is not None and model.parameters <= SMALL_VISION:
        small = f"{model.architecture} with {model.parameters / 1e9:.2f}B parameters is small enough to train here"
        return Reason("vision", "local", small, GUIDE)
    return Reason("vision", "cloud", f"{model.architecture} reads images too", SEED)


def _size(model: ModelFacts, machine: MachineFacts) -> Reason:
    if model.parameters is None:
        return Reason("model size", "either", model.unknown.get("parameters", "unknown"), "config.json")
    billions = f"{model.parameters / 1e9:.2f}B parameters"
    if model.parameters <= SMALL:
        return Reason("model size", "local", f"{billions}, up to 3B is small enough", SEED)
    # If nobody knows, a Mac counts as a laptop and a server does not.
    laptop = machine.system == "Darwin" if machine.laptop is None else machine.laptop
    if model.parameters >= LARGE and laptop:
        return Reason("model size", "cloud", f"{billions}, 7B and more is too slow on a laptop without CUDA", SEED)
    which = "between 3B and 7B" if model.parameters < LARGE else "on no laptop"
    return Reason("model size", "either", f"{billions}, {which}: memory and time decide", GUIDE)


def _length(limit: int, here: Candidate, counted: bool) -> Reason:
    """The rule for the row length, by the real rows if their lengths are known."""
    length = min(limit, here.fit.step.length)
    how = " (estimated from bytes)" if length < limit and not counted else ""
    if length <= SHORT:
        return Reason("context", "local", f"rows of at most {length} tokens{how}, {SHORT} is short", SEED)
    if length > LONG:
        return Reason("context", "cloud", f"rows of up to {length} tokens{how}, more than {LONG} is long", SEED)
    return Reason("context", "either", f"rows of up to {length} tokens{how}: memory and time decide", "estimate")


def _memory(here: Candidate) -> Reason:
    fit = here.fit
    if fit.memory is None:
        return Reason("memory", "either", "the memory it needs is unknown", "estimate")
    need = f"needs {fit.memory.low / 1e9:.1f} to {gigabytes(fit.memory.high)}"
    if not has_device(here.machine, fit.step.device):
        return Reason("memory", "either", f"{need}; no {fit.step.device} device was found here to compare", "estimate")
    if fit.usable_bytes is None:
        return Reason("memory", "either", f"{need}; the memory of {here.machine.chip} is unknown", "estimate")
    have = f"{gigabytes(fit.usable_bytes)} can be used on {here.machine.chip}"
    proof = f"; {fit.proof}" if fit.proof else ""
    return Reason("memory", "local" if fit.fits else "cloud", f"{need}, {have}{proof}", "estimate")


def _time(here: Candidate, max_hours: float) -> Reason:
    if here.seconds is None:
        return Reason("time", "either", here.unknown.get("seconds", "unknown"), "estimate")
    limit = f"{duration(max_hours * 3600, estimated=True)} (--max-hours)"
    low, high = (duration(seconds, estimated=True) for seconds in (here.seconds.low, here.seconds.high))
    hours = f"{low} to {high}"
    if here.seconds.middle > max_hours * 3600:
        return Reason("time", "cloud", f"{hours} here, the middle above {limit}: a production run", SEED)
    return Reason("time", "local", f"{hours} here, the middle within {limit}", "estimate")
