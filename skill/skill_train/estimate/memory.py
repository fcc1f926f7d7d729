"""How much memory a training step takes, part by part, as a range. Pure arithmetic; every formula names its source.

What autograd keeps was read off this project's own training program with `torch.autograd.graph.saved_tensors_hooks`
(torch 2.13, transformers 5.23, peft 0.21, 2026-11-21): with the base frozen, a linear layer keeps nothing, an adapter
keeps its input, and the norms, the attention and the activation function keep theirs. Where every weight trains, each
linear layer and each norm keeps what its gradient needs too. bench/estimates holds the result against measured peaks.
"""

from __future__ import annotations

from skill_train.core.units import megabytes
from skill_train.estimate.modules import CAPPED_SCORES, EAGER, kept_by_mlp, largest_linear, module_widths, widths
from skill_train.estimate.published import spread
from skill_train.estimate.step import BYTES, MicroStep, Part, Range, total
from skill_train.estimate.trained import beside_the_base
from skill_train.facts import ModelFacts
from skill_train.program.model import LOGITS_AT_ONCE

NF4_BYTES = 4.127 / 8  # a parameter in 4-bit NF4 with double quantization: Dettmers et al. 2023 (QLoRA), section 3
# Model types that scale or cap their logits, so that off CUDA TRL's own head scores every position.
TRL_HEAD = ("gemma2", "cohere", "cohere2", "granite")


def training_memory(model: ModelFacts, step: MicroStep) -> list[Part] | None:
    """The parts of the peak of a training step on one device; None when the model's shape is unknown."""
    if not (model.parameters and model.layers and model.hidden_size and model.vocab_size):
        return None
    moving = [_activations(model, step), _attention_scores(model, step), _logits(model, step)]
    if step.full:
        fixed = _trained_weights(model, step, model.parameters, total(moving, ""))
    else:
        fixed = [_weights(model, step, model.parameters), *beside_the_base(model, step)]
    parts = [part for part in (*fixed, *moving) if part.high > 0]
    parts += [_fragmentation(model, step, parts), framework(step.device)]
    return [*parts, spread(parts)] if step.device == "cuda" else parts


def _weights(model: ModelFacts, step: MicroStep, parameters: int) -> Part:
    """Frozen weights. 4-bit: only linear layers are quantized; embeddings, head and norms stay in the type
    that is computed in (transformers' bitsandbytes integration leaves the output head out). One
    layer at a time is computed with whole."""
    if step.four_bit:
        kept = model.embedding_parameters if model.embedding_parameters is not None else 0
        whole = largest_linear(model) * BYTES[step.dtype]
        size = (parameters - kept) * NF4_BYTES + kept * BYTES[step.dtype] + whole
        quantized = f"{(parameters - kept) / 1e9:.2f}B parameters in NF4 (4.127 bits each)"
        because = f"{quantized}, {kept / 1e9:.2f}B in {step.dtype}, one layer of {megabytes(whole, 0)} computed with"
    else:
        size = float(parameters * BYTES[step.dtype])
        because = f"{parameters / 1e9:.3f}B parameters x {BYTES[step.dtype]} bytes ({step.dtype})"
    if step.shards == 1:
        return Part("weights", size, size, because)
    gathered = 2 * size / (model.layers or 1)  # FSDP gathers one layer and prefetches the next
    held = 0 if step.offload else size / step.shards
    return Part("weights", held + gathered, held + 2 * gathered, f"{because}, sharded over {step.shards} processes")


def _trained_weights(model: ModelFacts, step: MicroStep, parameters: int, moving: Range) -> list[Part]:
    """Full fine-tuning: weights, gradients and what the optimizer keeps of every parameter (AdamW two moments),
    4 bytes each, or 2 with `pure_bf16` (Rajbhandari et al. 2020, ZeRO, section 3.1), divided among the shards, and what
    is computed with.

    Args:
        moving: what the passes need. What comes when it is gone counts as far as it is larger: the optimizer's
            temporaries, and gradients that no earlier micro-step has left.
    """
    each = 2 if step.pure_bf16 else 4
    held = 0.0 if step.offload else parameters * each / step.shards
    count = f"{parameters / 1e9:.3f}B parameters x {each} bytes" + f" / {step.shards} shards" * (step.shards > 1)
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    temporary = _of_a_step(step, held, head, each)
    # The head's gradient is made whole, in float32, before it is added; a tied embedding makes a second one.
    whole = 4 * head
    late = max(temporary, whole * (1 if model.tied_embeddings is False else 2))
    grown = 0.0 if step.accumulates else held
    low, high = max(whole, late + grown - moving.high), max(whole, late + grown - moving.low)
    if step.device == "cpu":  # glibc keeps what the passes gave back, and such large ones get pages of their own
        high = max(high, late)
    stays = held - grown
    return [
        Part("weights", held, held, f"{count}, trained"),
        _computed_with(model, step, parameters),
        Part("gradients", stays + low, stays + high, f"{count}, and the head's once more"),
        _optimizer(model, step, held, each),
    ]


def _of_a_step(step: MicroStep, held: float, largest: int, each: int) -> float:
    """What a step of the optimizer makes for a moment. torch's foreach kernels: one more of every weight on CUDA,
    two of one weight elsewhere. Adafactor goes weight by weight: squares, update, row times column."""
    if step.optimizer.factored:
        return 12.0 * largest
    copies = step.optimizer.temporaries
    return copies * (held if step.device == "cuda" else 2.0 * largest * each)


def _optimizer(model: ModelFacts, step: MicroStep, held: float, each: int) -> Part:
    """What the optimizer keeps of every weight; `held` are the bytes of the weights that one device holds."""
    if step.optimizer.factored:
        h, q, kv, f = widths(model)
        edges = (model.layers or 0) * (6 * h + 2 * q + 2 * kv + 3 * f * (model.experts or 1)) + (model.vocab_size or 0)
        least = 0.0 if step.offload else 4.0 * edges / step.shards
        return Part("optimizer", least, 2 * least, f"{step.optim}: a row and a column of each matrix, in float32")
    kept = held / each * step.optimizer.state(each)
    return Part("optimizer", kept, kept, f"{step.optim} keeps {step.optimizer.state(each):g} bytes a parameter")


def _computed_with(model: ModelFacts, step: MicroStep, parameters: int) -> Part:
    """What is computed with, where it is not the trained weights: autocast's copies of all linear layers, or the layers
    that FSDP has gathered, the next one and the embedding among them."""
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    embeddings = model.embedding_parameters if model.embedding_parameters is not None else head
    size = BYTES[step.dtype]
    if step.shards > 1:
        layer = size * (parameters - embeddings) / (model.layers or 1)
        return Part("gathered", 2 * layer, 4 * layer + size * embeddings, "the layer in work, the next, and their ends")
    if not step.mixed:
        return Part("copies", 0, 0, "the weights are computed with as they are")
    tile = 0 if step.device == "cuda" else head * size  # TRL's head casts a tile at a time on CUDA
    copies = size * (parameters - embeddings) + tile
    return Part("copies", copies, copies, f"autocast's copies of the linear layers in {step.dtype}")


def _activations(model: ModelFacts, step: MicroStep) -> Part:
    """What the forward pass keeps for the backward pass, all layers; with checkpointing every layer's input and one
    layer whole (Chen et al. 2016; Korthikanti et al. 2022, table 2, for the same sum with every weight trained)."""
    layers, size = model.layers or 0, BYTES[step.dtype]
    stream = 4 if step.mixed else size  # between layers: float32 weights make it so
    h, _, _, f = widths(model)
    layer = step.tokens * layer_bytes_per_token(model, step)
    backward = step.tokens * size * (2 * f + 4 * h)  # gradients in flight through one layer
    ends = step.tokens * h * (4 + size)  # the embedding's output and the last norm
    if not step.checkpointing:
        because = f"{layers} layers x {megabytes(layer)} for {step.rows} x {step.length} tokens"
        return Part("activations", layers * layer + ends, layers * layer + ends + backward, because)
    kept = layers * step.tokens * h * stream
    because = f"inputs of {layers} layers ({megabytes(kept, 0)}) and one layer recomputed ({megabytes(layer, 0)})"
    return Part("activations", kept + layer + ends, kept + layer + ends + 2 * backward, because)


def layer_bytes_per_token(model: ModelFacts, step: MicroStep) -> float:
    """Bytes that one layer keeps for one token, without attention scores."""
    h, q, kv, f = widths(model)
    size = BYTES[step.dtype]
    gemma = model.model_type.startswith("gemma") and model.model_type != "gemma"
    normed = 2 * h * (2 if gemma else 1)
    # Some normalize each head's queries and keys too.
    heads_normed = q + kv if model.model_type.startswith(("qwen3", "gemma3")) else 0
    attention = size * (2 * q + 2 * kv) + 4 * (model.heads or 0)
    kept = 4 * (normed + heads_normed) + attention + size * kept_by_mlp(model) * f
    if not step.full:
        return kept + _adapter_inputs(model, step)
    # A norm that trains keeps its result before the weight, in the type of what it normalizes; gemma's in float32. The
    # linear layers keep their inputs: one for all that read it, or with autocast a copy each.
    stream = 4 if step.mixed else size
    before_weight = 4 * (normed + heads_normed) if gemma else stream * normed + size * heads_normed
    return kept + before_weight + size * ((5 if step.mixed else 2) * h + f)


def _adapter_inputs(model: ModelFacts, step: MicroStep) -> float:
    """An adapter keeps its input, after dropout, and what dropout needs: a mask of one byte on CUDA, the noise in
    float32 elsewhere. On a 16-bit base the adapter is float32, its input is cast for dropout and cast back by autocast.
    With neither dropout nor casts, layers that read the same input keep it once, and the attention keeps its own
    output.
    """
    size = BYTES[step.dtype]
    ranks = len(step.target_modules) * step.lora_r * size
    if step.dora:  # the layer's result and the adapter's, which the magnitude multiplies
        ranks += 2 * size * sum(module_widths(model, target)[1] for target in step.target_modules)
    inputs = [(_input_of(target), module_widths(model, target)[0]) for target in step.target_modules]
    if not step.lora_dropout and step.dtype == "float32":
        return ranks + size * sum(width for name, width in set(inputs) if name != "attention output")
    dropout = 0 if not step.lora_dropout else 1 if step.device == "cuda" else 4
    return ranks + sum(width * (size + dropout) for _, width in inputs)


def _input_of(target: str) -> str:
    """What a linear layer reads, by its usual name."""
    if target in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"):
        return "attention norm"
    if target in ("o_proj", "out_proj", "dense"):
        return "attention output"
    return "mlp norm" if target in ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1") else target


def _attention_scores(model: ModelFacts, step: MicroStep) -> Part:
    """Fused kernels (CUDA, CPU) keep no scores. torch's MPS kernel has no fused backward: scores and their softmax are
    kept, in every layer or, with checkpointing, in one."""
    if model.model_type in EAGER:
        return _written_out(model, step)
    if step.device != "mps":
        return Part("attention scores", 0, 0, "the fused kernel keeps none")
    seen = step.length
    each = step.rows * (model.heads or 1) * step.length * seen * BYTES[step.dtype]
    layers = 1 if step.checkpointing else model.layers or 1
    because = f"{layers} layers x {step.rows} x {model.heads} heads x {step.length} x {seen} tokens, once or twice"
    return Part("attention scores", layers * each, 2 * layers * each, because)


def _written_out(model: ModelFacts, step: MicroStep) -> Part:
    """Attention without a fused kernel keeps its softmax in float32, its 16-bit copy, and the result of the tanh that
    caps scores; the backward pass makes gradients of one layer's (transformers, `eager_attention_forward`)."""
    size, layers = BYTES[step.dtype], 1 if step.checkpointing else model.layers or 1
    scores = step.rows * (model.heads or 1) * step.length**2
    each = 4 + size * (size < 4) + size * (model.model_type in CAPPED_SCORES)
    because = (
        f"no fused kernel: {layers} layers x {step.rows} x {model.heads} heads x {step.length}² tokens x {each} bytes"
    )
    return Part("attention scores", layers * each * scores, (layers * each + 8 + 2 * size) * scores, because)


def _logits(model: ModelFacts, step: MicroStep) -> Part:
    """The term that kills small models with large vocabularies: full logits would be vocabulary x tokens x 4 bytes.

    On CUDA TRL 1.16 projects trained tokens only, in tiles of at most 4096 x 32768 in 16 bit, and keeps 8 bytes x
    hidden size a token (trl/trainer/utils.py `add_fused_lm_head`, kernels/chunked_logprob.py). Elsewhere train.py does
    it, some megabytes at a time; where it cannot, TRL scores all tokens at 32 bytes an element of a tile (measured).
    """
    h, vocabulary = model.hidden_size or 0, model.vocab_size or 0
    trained = max(1.0, step.tokens * step.trained_share)
    if step.device == "cuda":
        tile = min(trained, 4096) * 32768 * 2
        return Part("logits", tile, 2 * tile + trained * (8 * h + 44), f"a tile of {megabytes(tile, 0)} at a time")
    if model.model_type in TRL_HEAD:
        tile = 32.0 * min(step.tokens, 4096) * min(vocabulary, 32768)
        return Part("logits", tile, 1.25 * tile, "TRL's head on this device: all tokens, 32 bytes an element")
    rows = min(trained, max(1, LOGITS_AT_ONCE // vocabulary))
    chunk = rows * vocabulary * BYTES[step.dtype]
    copies = 3 if step.head_trains else 1.5  # a head that trains: the softmax and its gradient, whole and in float32
    most = rows * vocabulary * 4 * copies if step.head_trains else chunk * copies
    kept = trained * h * BYTES[step.dtype]
    return Part("logits", chunk + kept, most + 3 * kept, f"{rows:.0f} trained tokens at a time")


# What the allocator holds on top, as a share. CUDA and MPS: of what the step needs at once (reserved over allocated in
# torch's caching allocator). CPU: of all that passes through the heap in a step, also with checkpointing, because glibc
# finds little room for the next layer in what the last one left; measured in bench/estimates.
_FRAGMENTATION = {"cuda": (0.02, 0.10), "mps": (0.05, 0.25), "cpu": (0.22, 0.72), "cpu checkpointing": (0.06, 0.50)}


def _fragmentation(model: ModelFacts, step: MicroStep, parts: list[Part]) -> Part:
    low, high = _FRAGMENTATION[step.device + " checkpointing" * (step.device == "cpu" and step.checkpointing)]
    if step.device == "cpu":
        least = most = step.tokens * layer_bytes_per_token(model, step) * (model.layers or 0)
        what = "of all that a step allocates"
    else:
        moving = [part for part in parts if part.name in ("activations", "attention scores", "logits")]
        least, most = sum(part.low for part in moving), sum(part.high for part in moving)
        what = "of what a step needs at once"
    return Part("fragmentation", low * least, high * most, f"{low:.0%} to {high:.0%} {what}")


# Bytes outside the tensors. CUDA: context and cuBLAS's workspace, 0.14 GB on a T4 to 0.75 GB on Blackwell
# (pytorch#107667, invoke-ai#9413, llama.cpp#27953). CPU: threads, oneDNN and kernels paged in while they run.
_FRAMEWORK = {"cuda": (0.2e9, 0.75e9), "mps": (0.3e9, 1.0e9), "cpu": (0.03e9, 0.12e9)}


def framework(device: str) -> Part:
    low, high = _FRAMEWORK[device]
    what = {"cuda": "CUDA context and workspaces", "mps": "Metal's heaps", "cpu": "kernels and their buffers"}[device]
    return Part("framework", low, high, what)


def libraries(device: str) -> list[Part]:
    """Host memory of torch, transformers, trl and their imports: 0.46 GB resident on Linux (bench/estimates), where the
    device's memory is the computer's."""
    return [] if device == "cuda" else [Part("libraries", 0.4e9, 0.7e9, "torch, transformers, trl, as imported")]
