"""Facts: what is read from the world before anything is decided. Unknown is None, with the reason in `unknown`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelFacts:
    """What `config.json` and the safetensors headers say.

    Attributes:
        source: where it was read.
        fingerprint: changes when the model changes; None for a model on the Hub (its revision says it).
        parameters: counted from the tensor shapes in the headers.
        stored_dtype: of most weights, as safetensors names it (`BF16`).
        quantization: the method of a quantized checkpoint, such as `bitsandbytes`.
    """

    source: str
    fingerprint: str | None
    model_type: str
    architecture: str
    parameters: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None
    stored_dtype: str | None
    quantization: str | None
    has_chat_template: bool
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetFacts:
    """What reading every row once says.

    Attributes:
        fingerprint: SHA-256 of the file's bytes (or of its rows); None when the data is on the Hub.
        format: how a row becomes an example; `columns` maps the format's names to the dataset's.
        bytes: size on disk; None when unknown.
    """

    source: str
    fingerprint: str | None
    rows: int
    column_names: tuple[str, ...]
    format: str
    columns: dict[str, str]
    bytes: int | None
    reason: str


@dataclass(frozen=True)
class MachineFacts:
    """This machine, probed without torch.

    Attributes:
        device: `cuda`, `mps` or `cpu`: the best that the hardware offers.
        memory_bytes: what the device can use: GPU memory, or all RAM on Apple silicon and CPUs.
        available_bytes: of it, free now.
        compute_capability: CUDA, such as 8.9.
        cores: physical cores.
        bf16_matrix: the processor has matrix instructions for bf16 (AMX, or Arm BF16).
    """

    system: str
    chip: str
    device: str
    memory_bytes: int | None
    available_bytes: int | None
    compute_capability: float | None
    cores: int
    bf16_matrix: bool
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PrecisionProbe:
    """One forward and backward pass of this model on this processor, in seconds, and its loss, by dtype."""

    seconds: dict[str, float]
    loss: dict[str, float]
