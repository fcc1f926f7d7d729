"""The memory of what trains beside a frozen base: the adapter, whole modules, and DoRA's magnitudes. Pure."""

from __future__ import annotations

from skill_train.core.units import megabytes
from skill_train.estimate.modules import EMBEDDINGS, HEADS, adapter_parameters, module_widths, saved_parameters, times
from skill_train.estimate.step import BYTES, MicroStep, Part
from skill_train.facts import ModelFacts


def trained_bytes(model: ModelFacts, step: MicroStep) -> float:
    """What is trained, as it is saved: the adapter and the modules beside it, or every weight."""
    if step.full:
        return float((model.parameters or 0) * (2 if step.pure_bf16 else 4))
    adapter = float(_adapter_size(step)) * adapter_parameters(model, step.target_modules, step.lora_r, dora=step.dora)
    return adapter + _saved_size(step) * sum(saved_parameters(model, name) for name in step.modules_to_save)


def beside_the_base(model: ModelFacts, step: MicroStep) -> list[Part]:
    """What trains beside a frozen base, with gradients and what the optimizer keeps."""
    return [_adapter(model, step), _saved(model, step), _dora(model, step)]


def _adapter_size(step: MicroStep) -> int:
    """Bytes of a parameter: float32. TRL 1.16 makes the adapter of a 4-bit base bfloat16, and `train.py` keeps it so
    where bfloat16 is computed in; without it, float32 again."""
    return 2 if step.four_bit and step.dtype == "bfloat16" else 4


def _adapter(model: ModelFacts, step: MicroStep) -> Part:
    """Weights, gradients and what the optimizer keeps. torch's foreach kernels need up to two copies more for a
    step."""
    size = _adapter_size(step)
    count = adapter_parameters(model, step.target_modules, step.lora_r, dora=step.dora)
    if step.optimizer.factored:
        matrices = ((times(model, name), module_widths(model, name)) for name in step.target_modules)
        state = 4.0 * sum(n * (sum(edges) + 2 * step.lora_r) for n, edges in matrices)
    else:
        state = count * step.optimizer.state(size)
    least = 2 * size * count + (0.0 if step.optimizer.paged else state)
    most = 2 * size * count + state + 2 * size * count * step.optimizer.temporaries
    because = (
        f"{count / 1e6:.2f}M parameters of {size} bytes: weights, gradients, and {megabytes(state)} of {step.optim}"
    )
    return Part("adapter", least, most, because)


def _saved_size(step: MicroStep) -> int:
    """Bytes of a number of a module that trains whole: PEFT copies it in the base's type, and `train.py` makes float16
    float32, because float16's gradient scaling takes nothing else."""
    return 2 if step.dtype == "bfloat16" else 4


def _saved(model: ModelFacts, step: MicroStep) -> Part:
    """A trained copy of each module beside the frozen one, with gradients and what the optimizer keeps. The output
    head's gradient is made whole, in float32, before it is added."""
    least = most = 0.0
    size = _saved_size(step)
    for name in step.modules_to_save:
        leaf, count = name.rsplit(".", 1)[-1], saved_parameters(model, name)
        kept = count * (2 * size + step.optimizer.state(size, is_embedding=leaf in EMBEDDINGS))
        whole = 4.0 * count * (leaf in HEADS)
        least += (2.0 * count * size if step.optimizer.paged else kept) + whole
        most += kept + max(whole, 2.0 * count * size * step.optimizer.temporaries)
    names = ", ".join(step.modules_to_save)
    return Part("saved modules", least, most, f"a copy of {names} that trains, its gradients, and {step.optim}'s own")


def _dora(model: ModelFacts, step: MicroStep) -> Part:
    """DoRA's norm of base and adapter together: their product and their sum, each as large as the layer, and at most an
    identity and a float32 product besides. With dropout the layer is computed with once more, and autograd keeps the
    weight where that is a copy: of a 4-bit layer always, else of what autocast made 16 bit
    (peft 0.21, tuners/lora/dora.py; read off with saved_tensors_hooks)."""
    if not step.dora or not step.target_modules:
        return Part("DoRA", 0, 0, "no magnitudes")
    size = BYTES[step.dtype]
    matrices = [(times(model, name), module_widths(model, name)) for name in step.target_modules]
    largest = max(inputs * outputs for _, (inputs, outputs) in matrices)
    widest = max(inputs for _, (inputs, _) in matrices)
    copied = step.lora_dropout > 0 and (step.four_bit or step.dtype != "float32")
    kept = copied * sum((1 if step.checkpointing else n) * size * i * o for n, (i, o) in matrices)
    low, high = kept + 2 * size * largest, kept + (4 + 3 * size) * largest + 4 * widest**2
    return Part(
        "DoRA", low, high, f"norms of layers of up to {largest / 1e6:.1f}M weights, {megabytes(kept, 0)} of copies"
    )
