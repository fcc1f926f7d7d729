"""How long a training takes: the arithmetic of the steps divided by a rate, plus the time before and after. Pure.

The rate is measured if there was a run on this machine (`Calibration`). Otherwise it is the device's published peak
times a share that published runs reached.
"""

import math
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from skill_train.core.units import gigabytes
from skill_train.estimate.devices import Device, cpu_flops, device_speed
from skill_train.estimate.modules import adapted_weights, adapter_parameters, saved_parameters
from skill_train.estimate.step import BYTES, MicroStep, Part, Range
from skill_train.facts import Calibration, MachineFacts, ModelFacts, PictureTokenFacts
from skill_train.program.plan import LOGITS_AT_ONCE

# The share of the peak (half precision, float32 accumulation) that LoRA training with plain Hugging Face code reaches
# on an A100 with a large micro-batch, by hidden size. Computed from QwenLM/Qwen, README, "Profiling of Memory and
# Speed" (LoRA, 1.8B, 7B and 14B, 256 to 8192 tokens). These values and the floor below reproduce its 18 figures within
# 12 %.
_REACHED = ((1024, 0.30), (1536, 0.33), (2048, 0.36), (3072, 0.42), (4096, 0.48), (5120, 0.53))
# Seconds that a processor needs in a micro-step to launch the kernels of one layer, with and without checkpointing. The
# least: same source. The most: a virtual machine with 16 cores and an H100 took 0.0038 to 0.0078 and 0.0082 to 0.0127
# with transformers 5.23 and PEFT 0.21, which is within SPREAD of these (bench/estimates, 2026-11-27).
_LAUNCHES = {True: (0.0045, 0.0080), False: (0.0030, 0.0050)}
_FOUR_BIT_LAUNCHES = 1.2  # times as long: each linear layer is dequantized on its own. Same measurement.
# The least share of the float32 peak, which plain kernels come nearer to than tensor cores to theirs: 0.38 in a
# micro-step of 512 tokens of a 1.5B model on an H100, launches included. Same measurement.
_FLOAT_REACHED = 0.45
# Seconds to dequantize a billion parameters in a micro-step at 2000 GB/s: QLoRA compared with LoRA, same source.
_FOUR_BIT_SECONDS = 0.010
# MPS: 0.41 to 0.44 of the float32 peak for 8B with long rows, 0.14 with rows of 84 tokens (MLX on an M1 Max,
# mlx-train-perf 0.9.1); about 0.5 for 8B on an M4 Pro (PyTorch, unslothai/unsloth PR 1289).
_MPS_REACHED = (0.15, 0.45)
# CPU, in addition to reading the weights: measured in bench/estimates on 2 cores of an AMD EPYC with AVX-512, 0.13 to
# 0.46, from Gemma 3 at 128 tokens to Qwen2.5 0.5B at 1024. A processor that multiplies bfloat16 is so many times as
# fast in it. The upper end allows for better cores.
_CPU_REACHED = (0.13, 0.60)
_CPU_HALF = 3.0
# Bytes of weights that a core reads in a second while it multiplies few rows with them. Measured on the same 2 cores,
# 2026-11-21: a float32 matrix of 0.67 GB times 15 rows at 5.5 GB/s, transposed at 7.4 (times one row: 15 and 22).
_CPU_READS = 4e9
# The reads and writes of each adapted weight, in float32, for DoRA's norm: an identity matrix, B times A, the sum with
# the weights (peft 0.21, tuners/lora/dora.py). A core of an Intel Xeon took 7.9 ns a weight more in a pass of 64 tokens
# without dropout (70M weights, torch 2.13, 2026-11-29).
_NORM_PASSES = 7
# The reads and writes of each weight: 3 by clipping (norm, mul), and by torch 2.13's AdamW 4 and 3 if it is fused, else
# 18 (_multi_tensor_adamw: lerp, mul, addcmul, sqrt, div, add, addcdiv).
_OPTIMIZER_PASSES = {True: 10, False: 21}
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
SPREAD = 1.6  # an uncalibrated time may be off by this factor, as published runs are
_CALIBRATED = {True: 1.25, False: 1.6}  # the key says whether the measured run had the same model shape


class Schedule(msgspec.Struct, frozen=True):
    """What a whole training does."""

    steps: int  # optimizer steps; accumulation: micro-steps in each
    accumulation: int
    row_tokens: tuple[float, float]  # the mean tokens of a row after cutting, `(low, high)`
    rows: int  # rows that are read and tokenized
    local_weights: bool  # the model's files are already on this machine
    # the time before the program runs: zero here; in the cloud for the image and the installation
    start_seconds: tuple[float, float] = (0, 0)


def micro_step_flops(model: ModelFacts, step: MicroStep) -> float | None:
    """Floating point operations of one micro-step, a multiply-add counted twice; None for an unknown shape.

    The forward pass takes 2 x parameters x tokens (Kaplan et al. 2020, section 2.1). The backward pass takes the same
    for the gradients of the inputs. Gradients of frozen weights are not computed (Hu et al. 2021); if all weights
    train, their gradients take the same once more. Recomputation takes another forward pass. Attention takes 2 matmuls
    over the causal half, and 2.5 times that in the backward pass (Dao 2023, FlashAttention-2, section 4.1). The output
    head processes only trained tokens: forward, backward, and again if TRL (on CUDA) or a head that trains computes its
    logits twice. `picture_flops` has the pictures.
    """
    active = model.active_parameters or model.parameters
    if not (active and model.layers and model.hidden_size and model.vocab_size):
        return None
    head, body = model.vocab_size * model.hidden_size, _body_parameters(model)
    forward = 2 if step.checkpointing else 1
    linear = 2 * body * step.tokens * (forward + 1 + step.full)
    adapter = 2 * adapter_parameters(model, step.target_modules, step.lora_r) * step.tokens * (forward + 2)
    if step.dora:  # the product of A and B, from the identity matrix; and with dropout the layers once more
        again = step.tokens * (forward + 1) * (step.lora_dropout > 0)
        adapter += 2 * adapted_weights(model, step.target_modules) * (again + 2 * step.lora_r * forward)
    queries = (model.heads or 1) * (model.head_dim or model.hidden_size // (model.heads or 1))
    attended = min(step.length, model.sliding_window or step.length)
    attention = 2 * queries * attended * step.tokens * model.layers * (forward + 2.5)
    trained = step.tokens * step.trained_share
    head_passes = 4 if step.head_trains else 3 if step.device == "cuda" else 2
    language = linear + adapter * (not step.full) + attention + 2 * head * trained * head_passes
    return language + picture_flops(model, step)


def picture_flops(model: ModelFacts, step: MicroStep) -> float:
    """Operations of vision tower and projector in one micro-step, as in `micro_step_flops`; 0 without pictures.

    Every patch passes the layers of the tower, and every token of the language model the projector. A frozen tower only
    computes its output. Attention compares all patches of a picture or tile, or those of a window: 2 matmuls of
    2 x hidden size for each pair. The few operations of adapters on the tower are left out.
    """
    tower, pictures = model.tower, step.pictures
    if not step.images or tower is None or pictures is None:
        return 0.0
    tokens = step.rows * pictures.mean
    patches = tokens * tower.patches_per_token
    pairs = patches**2 if tower.attends_all else step.rows * pictures.mean_squares * tower.patches_per_token**2
    near = min(pairs, patches * tower.window)
    seen_pairs = (tower.layers - tower.windowed_layers) * pairs + tower.windowed_layers * near
    forward = 2 if step.checkpointing and step.tower_trains else 1
    through_tower = forward + (1 + step.full) * step.tower_trains
    through_projector = 1 + (1 + step.full) * step.projector_trains
    linear = 2 * patches * tower.patch_parameters * through_tower
    projector = 2 * tokens * (tower.projector_parameters or 0) * through_projector
    return linear + projector + 4 * tower.hidden_size * seen_pairs * (forward + 2.5 * step.tower_trains)


def _body_parameters(model: ModelFacts) -> int:
    """The weights of the language model's layers, which every token passes."""
    head = (model.vocab_size or 0) * (model.hidden_size or 0)
    embeddings = model.embedding_parameters if model.embedding_parameters is not None else head
    tower = 0 if model.tower is None else model.tower.parameters
    return max((model.active_parameters or model.parameters or 0) - embeddings - tower, 0)


def reading_seconds(model: ModelFacts, step: MicroStep, machine: MachineFacts) -> float:
    """Seconds of a micro-step for reading weights on a processor, where short rows do not hide them behind arithmetic.
    A pass reads the weights of the layers once, and those of the output head twice for each chunk of logits. Zero on a
    GPU, where `_LAUNCHES` and the reached share include this time.
    """
    if step.device != "cpu":
        return 0.0
    head, body = (model.vocab_size or 0) * (model.hidden_size or 0), _body_parameters(model)
    passes = (2 if step.checkpointing else 1) + 1 + step.full
    tower = model.tower.parameters * (passes if step.tower_trains else 1) if step.images and model.tower else 0
    chunks = math.ceil(step.tokens * step.trained_share / max(1, LOGITS_AT_ONCE // (model.vocab_size or 1)))
    read = body * passes + tower + head * chunks * (4 if step.head_trains else 2)
    return (read * BYTES[step.dtype] + _norm_bytes(model, step)) / (_CPU_READS * machine.cores)


def _norm_bytes(model: ModelFacts, step: MicroStep) -> float:
    """What DoRA reads and writes in a micro-step for the norms of its layers."""
    forward = 2 if step.checkpointing else 1
    return 4.0 * _NORM_PASSES * forward * adapted_weights(model, step.target_modules) * step.dora


def launch_seconds(model: ModelFacts, step: MicroStep) -> Range:
    """The seconds in which the processor launches a micro-step's kernels on a GPU, however few its tokens: by a fast
    processor and by a slow one."""
    if step.device != "cuda":
        return Range(0, 0, "")
    low, high = ((model.layers or 0) * each for each in _LAUNCHES[step.checkpointing])
    return Range(low, high * (_FOUR_BIT_LAUNCHES if step.four_bit else 1), "")


def optimizer_seconds(model: ModelFacts, step: MicroStep, machine: MachineFacts) -> float:
    """Seconds of AdamW for every weight, or for the modules that train whole beside an adapter, limited by the memory
    bandwidth. For the few weights of the adapter itself they are left out."""
    device = device_speed(machine)
    bandwidth = _CPU_READS * machine.cores if step.device == "cpu" else device and device.gigabytes_per_second * 1e9
    saved = sum(saved_parameters(model, name) for name in step.modules_to_save)
    trained = (model.parameters or 0) if step.full else saved
    each = 2 if step.pure_bf16 or (step.dtype == "bfloat16" and not step.full) else 4
    return trained / step.shards * each * _OPTIMIZER_PASSES[step.fused] / bandwidth if bandwidth else 0.0


def micro_step_seconds(
    model: ModelFacts, step: MicroStep, machine: MachineFacts, calibration: Calibration | None
) -> Range | None:
    """Seconds of one micro-step; None when the shape or the device's speed is unknown."""
    flops = micro_step_flops(model, step)
    if flops is None:
        return None
    reading = reading_seconds(model, step, machine)
    if calibration is not None:
        return _as_measured(model, step, machine, calibration, flops)
    if step.device == "cuda":
        return _on_cuda(model, step, machine, flops)
    if step.device == "mps":
        device = device_speed(machine)
        if device is None:
            return None
        peak = device.float_tflops * 1e12
        basis = f"{machine.chip}: {device.float_tflops:g} TFLOPS x {_MPS_REACHED[0]:.0%} to {_MPS_REACHED[1]:.0%}"
        return Range(flops / (peak * _MPS_REACHED[1]), flops / (peak * _MPS_REACHED[0]), basis)
    peak_cpu = cpu_flops(machine)
    if peak_cpu is None:
        return None
    if step.dtype == "bfloat16" and _BF16_FEATURES & set(machine.cpu_features):
        peak_cpu *= _CPU_HALF
    low, high = _CPU_REACHED
    basis = f"{machine.cores} cores, {peak_cpu / 1e9:.0f} GFLOPS x {low:.0%} to {high:.0%}"
    return Range(flops / (peak_cpu * high) + reading, flops / (peak_cpu * low) + reading, basis)


def _as_measured(
    model: ModelFacts, step: MicroStep, machine: MachineFacts, calibration: Calibration, flops: float
) -> Range:
    launches, spread = launch_seconds(model, step), _CALIBRATED[calibration.same_shape]
    if calibration.readings:
        beside = dequantizing_seconds(model, step, machine)
        pairs = [(each.launches * launches.high, flops / each.speed) for each in calibration.readings]
    else:
        beside = reading_seconds(model, step, machine)
        pairs = [(launches.low, flops / calibration.flops_per_second)]
    seconds = [math.hypot(*pair) + beside for pair in pairs]
    return Range(min(seconds) / spread, max(seconds) * spread, f"measured: {calibration.basis}")


def _on_cuda(model: ModelFacts, step: MicroStep, machine: MachineFacts, flops: float) -> Range | None:
    device, computing = device_speed(machine), gpu_seconds(model, step, machine, flops)
    if device is None or computing is None:
        return None
    launches, beside = launch_seconds(model, step), dequantizing_seconds(model, step, machine)
    low, high = (math.hypot(each, computing) + beside for each in (launches.low, launches.high))
    at_least = f"at least {launches.low * 1000:.0f} to {launches.high * 1000:.0f} ms"
    basis = f"{_peak_tflops(device, step):g} TFLOPS of {machine.chip} x {_reached(model, step, device):.0%}, {at_least}"
    return Range(low / SPREAD, high * SPREAD, basis)


def gpu_seconds(model: ModelFacts, step: MicroStep, machine: MachineFacts, flops: float) -> float | None:
    """Seconds that a GPU of this name computes, at the share of its peak that published runs reached; None for one
    whose peak is unknown."""
    device = device_speed(machine)
    if device is None:
        return None
    return flops / (_peak_tflops(device, step) * 1e12 * _reached(model, step, device))


def dequantizing_seconds(model: ModelFacts, step: MicroStep, machine: MachineFacts) -> float:
    """Seconds of a micro-step on a GPU in which the 4-bit weights become 16-bit ones, and DoRA takes its norms, however
    few its tokens; 0 for a GPU of unknown bandwidth."""
    device = device_speed(machine)
    if step.device != "cuda" or device is None:
        return 0.0
    quantized = (model.parameters or 0) - (model.expert_parameters or 0)  # experts stay in 16 bits
    seconds = _FOUR_BIT_SECONDS * quantized / 1e9 * 2000 * step.four_bit
    return (seconds + _norm_bytes(model, step) / 1e9) / device.gigabytes_per_second


def _peak_tflops(device: Device, step: MicroStep) -> float:
    return device.float_tflops if step.dtype == "float32" else device.half_tflops


def _reached(model: ModelFacts, step: MicroStep, device: Device) -> float:
    share = _interpolate(_REACHED, model.hidden_size or 0)
    return (max(share, _FLOAT_REACHED) if step.dtype == "float32" else share) * device.sustained


def _interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def training_seconds(
    model: ModelFacts, step: MicroStep, machine: MachineFacts, schedule: Schedule, calibration: Calibration | None
) -> list[Part] | None:
    """The parts of a whole run, in seconds; None when a micro-step's time is unknown.

    Args:
        step: the longest micro-step; the mean length of the rows comes from the schedule.
    """
    low_tokens, high_tokens = schedule.row_tokens
    padding = 1.0 if step.rows == 1 else 1.3  # a batch is as long as its longest row
    shortest, longest = _with_length(step, low_tokens), _with_length(step, min(step.length, high_tokens * padding))
    most = longest.length  # one picture that fills the row, where the tokens of pictures are unknown
    unknown = PictureTokenFacts(0, most, most, most, most, most, float(most**2))
    longest = replace(longest, pictures=step.pictures or unknown)
    ends = [(shortest, longest), (replace(shortest, images=False), replace(longest, images=False))]
    measured = [[micro_step_seconds(model, end, machine, calibration) for end in pair] for pair in ends]
    (short, long), (short_text, long_text) = measured
    if short is None or long is None or short_text is None or long_text is None:
        return None
    micro_steps = schedule.steps * schedule.accumulation
    optimizer = schedule.steps * optimizer_seconds(model, step, machine)
    low, high = short.low - short_text.low, long.high - long_text.high
    pictures = Part("pictures", low * micro_steps, high * micro_steps, _why_pictures(model, step))
    steps = Part(
        "training",
        short_text.low * micro_steps + optimizer,
        long_text.high * micro_steps + optimizer,
        f"{schedule.steps} steps x {schedule.accumulation} micro-steps; {long.basis}",
    )
    start = Part("start", *schedule.start_seconds, "image, installation and scheduling")
    parts = [start, *_loading(model, schedule), _checks(short, long), pictures, steps]
    return [part for part in parts if part.high > 0]


def _why_pictures(model: ModelFacts, step: MicroStep) -> str:
    tower = model.tower
    if tower is None:
        return "the sizes of the tower are unknown"
    how = "forward and backward" if step.tower_trains else "forward alone"
    tokens = step.length if step.pictures is None else step.pictures.mean
    patches = f"{'up to ' * (step.pictures is None)}{tokens * tower.patches_per_token:,.0f} patches a row"
    return (
        f"{patches} through {tower.layers} layers, {how}; {tower.parameters / 1e6:,.1f}M parameters with the projector"
    )


def _with_length(step: MicroStep, tokens: float) -> MicroStep:
    return replace(step, length=max(1, min(step.length, math.ceil(tokens))))


def _loading(model: ModelFacts, schedule: Schedule) -> list[Part]:
    """The time before the first step, at rates from slow to fast: download by a home line or in a data centre (30 to
    300 MB/s), a disk (0.3 to 3 GB/s), rendering and tokenizing (1,000 to 10,000 rows of a few hundred tokens a second;
    each row is rendered twice to locate its answers)."""
    stored = model.weight_bytes or 2 * (model.parameters or 0)
    parts = [Part("imports", 5, 30, "torch, transformers, trl")]
    if not schedule.local_weights:
        parts.append(Part("download", stored / 300e6, stored / 30e6, f"{gigabytes(stored)} at 30 to 300 MB/s"))
    parts.append(Part("loading", stored / 3e9, stored / 0.3e9, f"{gigabytes(stored)} at 0.3 to 3 GB/s"))
    tokens = schedule.rows * schedule.row_tokens[1]
    parts.append(Part("tokenizing", tokens / 2e6, tokens / 1e5, f"{schedule.rows} rows"))
    return parts


def _checks(short: Range, long: Range) -> Part:
    """The time of the smoke checks: two gradients, 16 forward passes of one row, two answers of 48 tokens, and
    reloading the adapter."""
    return Part("checks", 4 * short.low, 12 * long.high + 5, "the smoke verdict, before and after")
