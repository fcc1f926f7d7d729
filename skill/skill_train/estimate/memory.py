"""How much memory a training step takes, part by part, as a range. Pure arithmetic; every formula names its source.

We observed the tensors that autograd keeps in this project's own training program with
`torch.autograd.graph.saved_tensors_hooks` (torch 2.13, transformers 5.23, peft 0.21, 2026-11-21). If the base is
frozen, a linear layer keeps nothing, and an adapter, the norms, the attention and the activation function keep their
inputs. If every weight trains, each linear layer and each norm also keeps what its gradient needs. bench/estimates
compares the result with measured peaks.
"""

from skill_train.core.units import megabytes
from skill_train.estimate.modules import (
    CAPPED_SCORES,
    EAGER,
    EMBEDDINGS,
    SCANNED,
    largest_linear,
    mlp_tensors_per_token,
    module_widths,
    unquantized,
    widths,
)
from skill_train.estimate.published import spread
from skill_train.estimate.step import BYTES, MicroStep, Part, Range, total
from skill_train.estimate.trained import beside_the_base
from skill_train.facts import ModelFacts
from skill_train.program.plan import LOGITS_AT_ONCE

NF4_BYTES = 4.127 / 8  # a parameter in 4-bit NF4 with double quantization: Dettmers et al. 2023 (QLoRA), section 3
HEAD_TILE = 32768  # words whose logits TRL's head computes at a time
# Model types that scale or cap their logits. For them TRL's own head scores every position on devices other than CUDA.
TRL_HEAD = ("gemma2", "cohere", "cohere2", "granite")


def training_memory(model: ModelFacts, step: MicroStep) -> list[Part] | None:
    """The parts of a training step's peak memory on one device; None if the model's shape is unknown."""
    if not (model.parameters and model.layers and model.hidden_size and model.vocab_size):
        return None
    if step.images and model.tower is None:
        return None
    attention = [_attention_scores(model, step), _repeated_keys(model, step)]
    moving = [_activations(model, step), *attention, _logits(model, step), _pictures(model, step)]
    if step.full:
        fixed = _trained_weights(model, step, model.parameters, total(moving, ""))
    else:
        fixed = [_weights(model, step, model.parameters), *beside_the_base(model, step)]
    parts = [part for part in (*fixed, *moving) if part.high > 0]
    parts += [_fragmentation(model, step, parts), framework(step.device)]
    return [*parts, spread(parts)] if step.device == "cuda" else parts


def _weights(model: ModelFacts, step: MicroStep, parameters: int) -> Part:
    """The frozen weights."""
    if step.four_bit:
        return _in_4_bits(model, step, parameters)
    size = float(parameters * BYTES[step.dtype])
    because = f"{parameters / 1e9:.3f}B parameters x {BYTES[step.dtype]} bytes ({step.dtype})"
    if step.shards == 1:
        return Part("weights", size, size, because)
    gathered = 2 * size / (model.layers or 1)  # FSDP gathers one layer and prefetches the next
    on_device = 0 if step.offload else size / step.shards
    return Part(
        "weights", on_device + gathered, on_device + 2 * gathered, f"{because}, sharded over {step.shards} processes"
    )


def _in_4_bits(model: ModelFacts, step: MicroStep, parameters: int) -> Part:
    """The frozen weights of QLoRA. Only linear layers are quantized; embeddings, head, norms and experts stay in the
    type of the computation (transformers 5.23, integrations/bitsandbytes.py, leaves the output head out, and experts
    are no linear layers there). One layer at a time is dequantized for the computation."""
    whole, least_and_most = largest_linear(model) * BYTES[step.dtype], unquantized(model)
    low, high = ((parameters - n) * NF4_BYTES + n * BYTES[step.dtype] + whole for n in least_and_most)
    sizes = " to ".join(f"{n / 1e9:.2f}" for n in dict.fromkeys(least_and_most))
    rest = " to ".join(f"{(parameters - n) / 1e9:.2f}" for n in dict.fromkeys(reversed(least_and_most)))
    what = "embeddings and experts " if model.experts else ""
    because = f"{rest}B parameters in NF4 (4.127 bits each), {sizes}B {what}in {step.dtype}"
    return Part("weights", low, high, f"{because}, one layer of {megabytes(whole, 0)} computed with")


def _trained_weights(model: ModelFacts, step: MicroStep, parameters: int, moving: Range) -> list[Part]:
    """The memory of full fine-tuning: weights, gradients and the optimizer's state of every parameter (for AdamW two
    moments), 4 bytes each, or 2 with `pure_bf16` (Rajbhandari et al. 2020, ZeRO, section 3.1), divided among the
    shards; and the copies that are computed with.

    Args:
        moving: the memory of the forward and backward pass. Memory that is used only after its release counts as far
            as it is larger: the optimizer's temporaries, and gradients that no earlier micro-step has left.
    """
    each = 2 if step.pure_bf16 else 4
    on_device = 0.0 if step.offload else parameters * each / step.shards
    count = f"{parameters / 1e9:.3f}B parameters x {each} bytes" + f" / {step.shards} shards" * (step.shards > 1)
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    temporary = _temporary_bytes(step, on_device, head, each)
    # The whole gradient of the head is computed in float32 before it is added. A tied embedding computes a second one.
    whole = 4 * head + _beside_the_heads_gradient(model, step)
    late = max(temporary, 4 * head * (1 if model.tied_embeddings is False else 2))
    grown = 0.0 if step.accumulates else on_device
    low, high = max(whole, late + grown - moving.high), max(whole, late + grown - moving.low)
    if step.device == "cpu":  # glibc keeps the memory that the passes freed, and such large blocks get new pages
        high = max(high, late)
    stays = on_device - grown
    return [
        Part("weights", on_device, on_device, f"{count}, trained"),
        _computed_with(model, step, parameters),
        Part("gradients", stays + low, stays + high, f"{count}, and the head's once more"),
        _optimizer(model, step, on_device, each),
    ]


def _beside_the_heads_gradient(model: ModelFacts, step: MicroStep) -> int:
    """Bytes that TRL's head needs on CUDA while the gradient of its weights is whole (trl/kernels/chunked_logprob.py):
    its copy in the type of the weights, or where a 16-bit copy is computed with, the float32 product of one tile. Eight
    runs on an H100 agree (bench/estimates, 2026-11-27)."""
    if step.device != "cuda":
        return 0
    if step.pure_bf16:
        return 2 * (model.vocab_size or 0) * (model.hidden_size or 0)
    return 4 * min(model.vocab_size or 0, HEAD_TILE) * (model.hidden_size or 0) if step.mixed else 0


def _temporary_bytes(step: MicroStep, on_device: float, largest: int, each: int) -> float:
    """The temporaries of an optimizer step. torch's foreach kernels copy every weight once on CUDA, and one weight
    twice elsewhere. Adafactor handles one weight at a time: squares, update, row times column."""
    if step.optimizer.factored:
        return 12.0 * largest
    copies = step.optimizer.temporaries
    return copies * (on_device if step.device == "cuda" else 2.0 * largest * each)


def _optimizer(model: ModelFacts, step: MicroStep, on_device: float, each: int) -> Part:
    """The optimizer's state of every weight; `on_device` is the size in bytes of the weights on one device."""
    if step.optimizer.factored:
        h, q, kv, f = widths(model)
        edges = (model.layers or 0) * (6 * h + 2 * q + 2 * kv + 3 * f * (model.experts or 1)) + (model.vocab_size or 0)
        least = 0.0 if step.offload else 4.0 * edges / step.shards
        return Part("optimizer", least, 2 * least, f"{step.optim}: a row and a column of each matrix, in float32")
    state = on_device / each * step.optimizer.state(each)
    return Part("optimizer", state, state, f"{step.optim} keeps {step.optimizer.state(each):g} bytes a parameter")


def _computed_with(model: ModelFacts, step: MicroStep, parameters: int) -> Part:
    """The weights that are computed with, if these are not the trained weights themselves: autocast's copies of all
    linear layers, or the layers that FSDP has gathered, including the next layer and the embedding."""
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    embeddings = model.embedding_parameters if model.embedding_parameters is not None else head
    size = BYTES[step.dtype]
    if step.shards > 1:
        layer = size * (parameters - embeddings) / (model.layers or 1)
        return Part("gathered", 2 * layer, 4 * layer + size * embeddings, "the layer in work, the next, and their ends")
    if not step.mixed:
        return Part("copies", 0, 0, "the weights are computed with as they are")
    tile = 0 if step.device == "cuda" else head * size  # on CUDA TRL's head casts one tile at a time
    copies = size * (parameters - embeddings) + tile
    return Part("copies", copies, copies, f"autocast's copies of the linear layers in {step.dtype}")


def _activations(model: ModelFacts, step: MicroStep) -> Part:
    """The tensors that the forward pass keeps for the backward pass, in all layers. With checkpointing these are the
    inputs of all layers and all tensors of one layer (Chen et al. 2016; Korthikanti et al. 2022, table 2, for the same
    sum with every weight trained)."""
    layers, size = model.layers or 0, BYTES[step.dtype]
    stream = 4 if step.mixed else size  # the hidden states between layers; float32 weights produce float32
    h, _, _, f = widths(model)
    layer = step.tokens * layer_bytes_per_token(model, step)
    times = SCANNED.get(model.model_type, 1.0)
    scanned, scans = (times - 1) * layer, f", up to {times:g} times that for states that are scanned" * (times > 1)
    backward = step.tokens * size * (2 * f + 4 * h)  # gradients in flight through one layer
    ends = step.tokens * h * (4 + size)  # the embedding's output and the last norm
    if not step.checkpointing:
        because = f"{layers} layers x {megabytes(layer)} for {step.rows} x {step.length} tokens{scans}"
        return Part("activations", layers * layer + ends, layers * (layer + scanned) + ends + backward, because)
    inputs = layers * step.tokens * h * stream
    because = f"inputs of {layers} layers ({megabytes(inputs, 0)}) and one recomputed ({megabytes(layer, 0)}{scans})"
    most = layer + 2 * scanned + 2 * backward  # the states, and their gradients
    return Part("activations", inputs + layer + ends, inputs + most + ends, because)


def _pictures(model: ModelFacts, step: MicroStep) -> Part:
    """Pixels, and what the vision tower computes from them. Where the tokens of pictures are unknown, all tokens of a
    row may be of pictures.

    A frozen tower keeps nothing for the backward pass: one layer at a time is in memory. One that trains keeps every
    layer, or with checkpointing the input of each.
    """
    tower = model.tower
    if not step.images or tower is None:
        return Part("pictures", 0, 0, "no pictures")
    most = step.length if step.pictures is None else min(step.length, step.pictures.longest)
    patches, size = step.rows * most * tower.patches_per_token, BYTES[step.dtype]
    pixels = patches * tower.values_per_patch * (4 + 4 + size)  # of the processor, as a tensor, and in the tower's type
    layer = patches * size * (8 * tower.hidden_size + 2 * tower.intermediate_size)
    whole = layer
    if step.tower_trains:
        inputs = tower.layers * patches * tower.hidden_size * size
        whole = inputs + 2 * layer if step.checkpointing else tower.layers * layer
    because = f"up to {patches:,} patches of {tower.values_per_patch} values, and {tower.layers} layers of the tower"
    return Part("pictures", 0, pixels + whole, because)


def layer_bytes_per_token(model: ModelFacts, step: MicroStep) -> float:
    """Bytes that one layer keeps for one token, without attention scores."""
    h, q, kv, f = widths(model)
    size = BYTES[step.dtype]
    gemma = model.model_type.startswith("gemma") and model.model_type != "gemma"
    normed = 2 * h * (2 if gemma else 1)
    # Some models also normalize the queries and keys of each head.
    heads_normed = q + kv if model.model_type.startswith(("qwen3", "gemma3")) else 0
    attention = size * (2 * q + 2 * kv) + 4 * (model.heads or 0)
    per_token = 4 * (normed + heads_normed) + attention + size * mlp_tensors_per_token(model) * f
    if not step.full:
        return per_token + _adapter_inputs(model, step)
    # A norm that trains keeps its result before the weight, in the type of its input; gemma's norms in float32. The
    # linear layers keep their inputs: one input for all layers that read it, or with autocast a copy for each.
    stream = 4 if step.mixed else size
    before_weight = 4 * (normed + heads_normed) if gemma else stream * normed + size * heads_normed
    return per_token + before_weight + size * ((5 if step.mixed else 2) * h + f)


def _adapter_inputs(model: ModelFacts, step: MicroStep) -> float:
    """Bytes that the adapters keep for one token. An adapter keeps its input after dropout, and what dropout needs: a
    mask of one byte on CUDA, the noise in the type of the input elsewhere. DoRA's input is cast to float32 for that.
    With neither dropout nor casts, layers that read the same input keep it once, and the attention keeps its own
    output.
    """
    size = BYTES[step.dtype]
    ranks = len(step.target_modules) * step.lora_r * size
    if step.dora:  # the results of the layer and of the adapter, which the magnitude multiplies
        ranks += 2 * size * sum(module_widths(model, target)[1] for target in step.target_modules)
    layers = [target for target in step.target_modules if target not in EMBEDDINGS]  # these read ids
    inputs = [(_input_of(target), module_widths(model, target)[0]) for target in layers]
    casts = step.dora and step.dtype != "float32"
    if not step.lora_dropout and not casts:
        return ranks + size * sum(width for name, width in set(inputs) if name != "attention output")
    noise = 1 if step.device == "cuda" else 4 if casts else size
    dropout = noise if step.lora_dropout else 0
    return ranks + sum(width * (size + dropout) for _, width in inputs)


def _input_of(target: str) -> str:
    """The input of a linear layer, by the layer's usual name."""
    if target in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"):
        return "attention norm"
    if target in ("o_proj", "out_proj", "dense"):
        return "attention output"
    return "mlp norm" if target in ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1") else target


def _attention_scores(model: ModelFacts, step: MicroStep) -> Part:
    """The memory of attention scores. Fused kernels (CUDA, CPU) keep none. torch's MPS kernel has no fused backward
    pass, so it keeps scores and their softmax in every layer, or with checkpointing in one layer."""
    if model.model_type in EAGER:
        return _written_out(model, step)
    if step.device != "mps":
        return Part("attention scores", 0, 0, "the fused kernel keeps none")
    each = step.rows * (model.heads or 1) * step.length**2 * BYTES[step.dtype]
    layers = 1 if step.checkpointing else model.layers or 1
    because = (
        f"{layers} layers x {step.rows} x {model.heads} heads x {step.length} x {step.length} tokens, once or twice"
    )
    return Part("attention scores", layers * each, 2 * layers * each, because)


def _repeated_keys(model: ModelFacts, step: MicroStep) -> Part:
    """Keys and values on CUDA, repeated for the heads that share them. transformers 5.23 repeats them where rows are
    padded, and the program where torch's flash kernel does not run (`repeat_shared_heads`): in float32, and on the GPUs
    that compute in float16."""
    _, q, kv, _ = widths(model)
    if step.device != "cuda" or q == kv or model.model_type in EAGER:
        return Part("repeated keys", 0, 0, "none are")
    layers = 1 if step.checkpointing else model.layers or 1
    size = 2.0 * layers * step.tokens * (q - kv) * BYTES[step.dtype]
    always, padded = step.dtype != "bfloat16", step.rows > 1
    because = f"{layers} layers x {step.tokens} tokens" + ("" if always else ", where rows are padded")
    return Part("repeated keys", size * always, size * (always or padded), because)


def _written_out(model: ModelFacts, step: MicroStep) -> Part:
    """The memory of attention without a fused kernel. It keeps its softmax in float32, a 16-bit copy of that, and the
    result of the tanh that caps scores. The backward pass computes the gradients of one layer at a time (transformers,
    `eager_attention_forward`)."""
    size, layers = BYTES[step.dtype], 1 if step.checkpointing else model.layers or 1
    scores = step.rows * (model.heads or 1) * step.length**2
    each = 4 + size * (size < 4) + size * (model.model_type in CAPPED_SCORES)
    because = (
        f"no fused kernel: {layers} layers x {step.rows} x {model.heads} heads x {step.length}² tokens x {each} bytes"
    )
    return Part("attention scores", layers * each * scores, (layers * each + 8 + 2 * size) * scores, because)


def _logits(model: ModelFacts, step: MicroStep) -> Part:
    """The memory of the logits, which matters most for small models with large vocabularies: full logits would take
    vocabulary x tokens x 4 bytes.

    On CUDA TRL 1.16 projects only trained tokens, in tiles of at most 4096 x 32768 in 16 bit, and keeps 8 bytes x
    hidden size for each token (trl/trainer/utils.py `add_fused_lm_head`, kernels/chunked_logprob.py). On other devices
    train.py projects them, some megabytes at a time. For models where it cannot, TRL scores all tokens at 32 bytes for
    each element of a tile (measured).
    """
    h, vocabulary = model.hidden_size or 0, model.vocab_size or 0
    trained = max(1.0, step.tokens * step.trained_share)
    if step.device == "cuda":
        tile = min(trained, 4096) * HEAD_TILE * 2
        return Part("logits", tile, 2 * tile + trained * (8 * h + 44), f"a tile of {megabytes(tile, 0)} at a time")
    if model.model_type in TRL_HEAD:
        tile = 32.0 * min(step.tokens, 4096) * min(vocabulary, HEAD_TILE)
        return Part("logits", tile, 1.25 * tile, "TRL's head on this device: all tokens, 32 bytes an element")
    rows = min(trained, max(1, LOGITS_AT_ONCE // vocabulary))
    chunk = rows * vocabulary * BYTES[step.dtype]
    copies = 3 if step.head_trains else 1.5  # a head that trains needs the whole softmax and its gradient in float32
    most = rows * vocabulary * 4 * copies if step.head_trains else chunk * copies
    hidden_states = trained * h * BYTES[step.dtype]
    return Part("logits", chunk + hidden_states, most + 3 * hidden_states, f"{rows:.0f} trained tokens at a time")


# Additional memory of the allocator, as a share. CUDA and MPS: a share of what the step needs at once (reserved over
# allocated memory in torch's caching allocator). CPU: a share of all allocations of a step, also with checkpointing,
# because glibc can reuse little of one layer's memory for the next layer; measured in bench/estimates.
_FRAGMENTATION = {"cuda": (0.02, 0.10), "mps": (0.05, 0.25), "cpu": (0.22, 0.72), "cpu checkpointing": (0.06, 0.50)}


def _fragmentation(model: ModelFacts, step: MicroStep, parts: list[Part]) -> Part:
    low, high = _FRAGMENTATION[step.device + " checkpointing" * (step.device == "cpu" and step.checkpointing)]
    if step.device == "cpu":
        least = most = step.tokens * layer_bytes_per_token(model, step) * (model.layers or 0)
        basis = "of all that a step allocates"
    else:
        moving = [part for part in parts if part.name in ("activations", "attention scores", "logits")]
        least, most = sum(part.low for part in moving), sum(part.high for part in moving)
        basis = "of what a step needs at once"
    return Part("fragmentation", low * least, high * most, f"{low:.0%} to {high:.0%} {basis}")


# Memory outside the tensors, in bytes. CUDA: the context and cuBLAS's workspace, 0.14 GB on a T4 to 0.75 GB on
# Blackwell (pytorch#107667, invoke-ai#9413, llama.cpp#27953). CPU: threads, oneDNN and the loaded pages of kernels.
_FRAMEWORK = {"cuda": (0.2e9, 0.75e9), "mps": (0.3e9, 1.0e9), "cpu": (0.03e9, 0.12e9)}


def framework(device: str) -> Part:
    low, high = _FRAMEWORK[device]
    contents = {"cuda": "CUDA context and workspaces", "mps": "Metal's heaps", "cpu": "kernels and their buffers"}
    return Part("framework", low, high, contents[device])


def libraries(device: str) -> list[Part]:
    """Host memory of torch, transformers, trl and their imports: 0.46 GB resident on Linux (bench/estimates). It counts
    if the device uses the computer's memory."""
    return [] if device == "cuda" else [Part("libraries", 0.4e9, 0.7e9, "torch, transformers, trl, as imported")]
