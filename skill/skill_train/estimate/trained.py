"""The memory of the trained parts beside a frozen base: the adapter, whole modules, and DoRA's magnitudes. Pure."""

from skill_train.core.units import megabytes
from skill_train.estimate.modules import EMBEDDINGS, HEADS, adapter_parameters, module_widths, saved_parameters, times
from skill_train.estimate.step import BYTES, MicroStep, Part
from skill_train.facts import ModelFacts


def trained_bytes(model: ModelFacts, step: MicroStep) -> float:
    """The saved size of the trained weights: the adapter and the modules beside it, or every weight."""
    if step.full:
        return float((model.parameters or 0) * (2 if step.pure_bf16 else 4))
    adapter = float(_adapter_size(step)) * adapter_parameters(model, step.target_modules, step.lora_r, dora=step.dora)
    return adapter + _saved_size(step) * sum(saved_parameters(model, name) for name in step.modules_to_save)


def beside_the_base(model: ModelFacts, step: MicroStep) -> list[Part]:
    """The trained parts beside a frozen base, with their gradients and the optimizer's state."""
    return [_adapter(model, step), _saved(model, step), _dora(model, step)]


def _adapter_size(step: MicroStep) -> int:
    """Bytes of a parameter of the adapter, which is float32. TRL 1.16 makes the adapter of a 4-bit base bfloat16.
    `train.py` leaves it so if the computation is in bfloat16, and otherwise makes it float32 again."""
    return 2 if step.four_bit and step.dtype == "bfloat16" else 4


def _adapter(model: ModelFacts, step: MicroStep) -> Part:
    """The adapter's weights, their gradients and the optimizer's state. torch's foreach kernels need up to two more
    copies during a step."""
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
    """Bytes of a parameter of a module that trains whole. PEFT copies the module in the base's type. `train.py` turns
    float16 into float32, because float16's gradient scaling requires that."""
    return 2 if step.dtype == "bfloat16" else 4


def _saved(model: ModelFacts, step: MicroStep) -> Part:
    """A trained copy of each module beside the frozen one, with its gradients and the optimizer's state. The whole
    gradient of the output head is computed in float32 before it is added."""
    least = most = 0.0
    size = _saved_size(step)
    for name in step.modules_to_save:
        leaf, count = name.rsplit(".", 1)[-1], saved_parameters(model, name)
        copy_bytes = count * (2 * size + step.optimizer.state(size, is_embedding=leaf in EMBEDDINGS))
        whole = 4.0 * count * (leaf in HEADS)
        least += (2.0 * count * size if step.optimizer.paged else copy_bytes) + whole
        most += copy_bytes + max(whole, 2.0 * count * size * step.optimizer.temporaries)
    names = ", ".join(step.modules_to_save)
    return Part("saved modules", least, most, f"a copy of {names} that trains, its gradients, and {step.optim}'s own")


def _dora(model: ModelFacts, step: MicroStep) -> Part:
    """The memory of DoRA's norm of base and adapter together: their product and their sum, each as large as the layer,
    and at most an identity matrix and a float32 product in addition. With dropout the layer is computed once more, and
    autograd keeps the weight if it is a copy: always for a 4-bit layer, else if autocast made a 16-bit copy (peft 0.21,
    tuners/lora/dora.py; observed with saved_tensors_hooks)."""
    if not step.dora or not step.target_modules:
        return Part("DoRA", 0, 0, "no magnitudes")
    size = BYTES[step.dtype]
    matrices = [(times(model, name), module_widths(model, name)) for name in step.target_modules]
    largest = max(inputs * outputs for _, (inputs, outputs) in matrices)
    widest = max(inputs for _, (inputs, _) in matrices)
    copied = step.lora_dropout > 0 and (step.four_bit or step.dtype != "float32")
    copies = copied * sum((1 if step.checkpointing else n) * size * i * o for n, (i, o) in matrices)
    low, high = copies + 2 * size * largest, copies + (4 + 3 * size) * largest + 4 * widest**2
    return Part(
        "DoRA", low, high, f"norms of layers of up to {largest / 1e6:.1f}M weights, {megabytes(copies, 0)} of copies"
    )
