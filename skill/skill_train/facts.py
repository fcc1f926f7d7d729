"""Facts: what is read from the world before anything is decided. Unknown is None, with the reason in `unknown`."""

from __future__ import annotations

from typing import Any

import msgspec

from skill_train.program.pictures.processor import ImageProcessor

JsonObject = dict[str, Any]
"""An object that others wrote: a model's config.json, an answer of the Hub. Nothing of it is checked: each reader says
what it expects there. What skill-train itself writes and answers has types of its own."""


# The compute capability that torch needs: its builds of CUDA 13, as PyPI has them, begin with Turing (RELEASE.md,
# pytorch/pytorch#164471, 2025-10).
TORCH_NEEDS = 7.5


class ModelFacts(msgspec.Struct, frozen=True):
    """What `config.json` and the safetensors headers say.

    Attributes:
        source: where it was read.
        fingerprint: changes when the model changes; None for a model on the Hub (its revision says it).
        parameters: all of them: counted from the tensor shapes in the headers, else worked out from the config.
        stored_dtype: of most weights, as safetensors names it (`BF16`).
        quantization: the method of a quantized checkpoint, such as `bitsandbytes`.
        parameters_from: `safetensors headers` or `config arithmetic`.
        active_parameters: those that one token passes; below `parameters` in a mixture of experts.
        embedding_parameters: the input embedding, the output head where it is not tied to it, and the embeddings that
            Gemma 3n and 4 have for each layer.
        expert_parameters: those in all experts of a mixture of experts; None where they are unknown.
        further_parameters: those that predict further tokens, in files. transformers does not load them, and they are
            not among `parameters`.
        intermediate_size: width of the MLP; of one expert in a mixture of experts.
        shared_width: of the experts that every token passes beside the chosen ones.
        heads, kv_heads, head_dim: of the attention.
        tied_embeddings: whether the output head is the input embedding.
        context: tokens that the model was made for.
        sliding_window: tokens that a windowed attention layer sees; None when every layer sees all.
        experts, experts_per_token: of a mixture of experts; None for a dense model.
        weight_bytes: size of the weight files.
        vision: it reads images too.
        gated: the Hub asks for consent before download; None for a folder.
        revision: the commit on the Hub; None for a folder.
        convertible: llama.cpp is known to take the architecture, as `config.json` describes it; None when that is not
            known.
        not_convertible: why not, where it is not.
        cached_layers: layers whose keys and values llama.cpp caches; None when config.json does not say which, or all.
        windowed_layers: of these, the ones that see only the sliding window; None when config.json does not say which.
        cached_numbers: the least and the most numbers that such a layer without a window keeps of a token; None for the
            keys and values of `kv_heads`.
        unread_window: the sliding window in tokens, where llama.cpp is not known to compute the model with it.
        at_hand: the weights lie on this machine.
        linear_layers: what LoRA adapts, where the family is on no list; None where nobody looked.
        linear_sizes: of modules that an adapter targets, how often each stands in the model, and the sums of its inputs
            and of its outputs, by its name; of families whose modules have no usual widths.
        tower: of a vision model; None where config.json does not say its sizes.
        image_processor: of a vision model; None where its files do not say how it resizes.
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
    unknown: dict[str, str] = {}
    parameters_from: str | None = None
    active_parameters: int | None = None
    embedding_parameters: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tied_embeddings: bool | None = None
    sliding_window: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    weight_bytes: int | None = None
    vision: bool = False
    gated: bool | None = None
    revision: str | None = None
    convertible: bool | None = None
    not_convertible: str | None = None
    unread_window: int | None = None
    at_hand: bool = False
    linear_layers: tuple[str, ...] | None = None
    tower: TowerFacts | None = None
    image_processor: ImageProcessor | None = None
    windowed_layers: int | None = None
    expert_parameters: int | None = None
    further_parameters: int = 0
    shared_width: int = 0
    cached_layers: int | None = None
    cached_numbers: tuple[int, int] | None = None
    linear_sizes: dict[str, tuple[int, int, int]] = {}


class TowerFacts(msgspec.Struct, frozen=True):
    """The part of a vision model that reads pictures.

    Attributes:
        patches_per_token: squares of pixels that one token of the language model stands for.
        values_per_patch: numbers that describe such a square: 3 colours of each pixel, of each of Qwen's two frames.
        gated: the MLP of a layer has three matrices, else two.
        projector_parameters: of the matrices between tower and language model, for a token of that; None where they are
            unknown.
        windowed_layers: layers in which a patch sees only the `window` patches around it.
        attends_all: the patches of all pictures of a micro-step are compared with each other (Pixtral's mask).
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int
    values_per_patch: int
    gated: bool = False
    projector_parameters: int | None = None
    windowed_layers: int = 0
    window: int = 0
    attends_all: bool = False

    @property
    def patch_parameters(self) -> int:
        """Of the matrices that a patch passes: it becomes a vector, then come attention and MLP of each layer."""
        layer = 4 * self.hidden_size**2 + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        return self.values_per_patch * self.hidden_size + self.layers * layer

    @property
    def parameters(self) -> int:
        """Of all matrices of tower and projector."""
        return self.patch_parameters + (self.projector_parameters or 0)


class TokenFacts(msgspec.Struct, frozen=True):
    """Tokens a row, template included, before anything is cut.

    Attributes:
        basis: how they are known: `counted in all rows`, `counted in 2000 of 50000 rows`, or `2 to 5 bytes a token`.
        counted: made with the model's tokenizer and template. When False the figures are ranges.
        mean: tokens a row, `(low, high)`; equal when counted.
        longest: of the longest row, `(low, high)`.
        trained_share: share of the tokens that are trained, None when not counted.
        truncated_share: share of the rows that are longer than `max_length`, None when not counted.
        mean_cut: tokens a row after cutting at `max_length`, `(low, high)`.
        max_length: the limit these figures were made for.
    """

    basis: str
    counted: bool
    mean: tuple[float, float]
    longest: tuple[int, int]
    mean_cut: tuple[float, float]
    max_length: int
    trained_share: float | None = None
    truncated_share: float | None = None


class PictureTokenFacts(msgspec.Struct, frozen=True):
    """Tokens of the language model that stand for pictures, by arithmetic from the sizes of all pictures.

    Attributes:
        least, most: of one picture.
        mean: of all pictures of a row, the mean of all rows; `longest`: of the row with most.
        mean_fed, longest_fed: the same with the marks and line ends around them.
        mean_squares: of what the tower reads by itself, a picture or a tile, the square of its tokens; the sum of a
            row, the mean of all rows.
    """

    least: int
    most: int
    mean: float
    longest: int
    mean_fed: float
    longest_fed: int
    mean_squares: float


class DatasetFacts(msgspec.Struct, frozen=True):
    """What reading every row once says.

    Attributes:
        fingerprint: SHA-256 of a file's bytes, or of the rows of a folder; None when the data is on the Hub.
        format: how a row becomes an example; `columns` maps the format's names to the dataset's.
        bytes: size on disk; None when unknown.
        text_bytes: UTF-8 bytes of all texts that training reads, without keys and JSON's marks; None when not read.
        longest_text_bytes: of the row with most of them.
        tokens: None when nothing is known of the lengths.
        revision: the commit on the Hub; None for a file.
        turns: messages of all rows, 0 where the rows are plain text; None when not read.
        longest_turns: of the row with most of them.
        images: pictures of all rows; 0 where there are none. None when the rows were read as text.
        most_images: of the row with most of them.
        image_bytes: of the files of all of them; `image_pixels`: of all of them, before they are resized.
        largest_image: width and height of the one with most pixels, upright.
        picture_tokens: None where there are no pictures, or the model's image processor is unknown.
        data_file: the file of rows on the Hub that is a table, or has its pictures beside it; None for other data.
        rows_read: how many of the first rows were read to know this; None where all were.
        rows_estimated: how the number of rows was estimated; None where it is known.
        data_config: the configuration of a dataset on the Hub that the recipe names; None for its only one.
    """

    source: str
    fingerprint: str | None
    rows: int
    column_names: tuple[str, ...]
    format: str
    columns: dict[str, str]
    bytes: int | None
    reason: str
    text_bytes: int | None = None
    longest_text_bytes: int | None = None
    tokens: TokenFacts | None = None
    revision: str | None = None
    turns: int | None = None
    longest_turns: int | None = None
    images: int | None = None
    most_images: int | None = None
    image_bytes: int | None = None
    image_pixels: int | None = None
    largest_image: tuple[int, int] | None = None
    picture_tokens: PictureTokenFacts | None = None
    data_file: str | None = None
    rows_read: int | None = None
    rows_estimated: str | None = None
    data_config: str | None = None


class FirstPictures(msgspec.Struct, frozen=True):
    """The pictures of a dataset of which only first rows were read.

    Attributes:
        count: of all rows, from those that were read; `most`: of the row with most of them.
        lines: of the first rows, where their pictures lie beside a file of rows, and are not checked yet.
    """

    count: int
    most: int
    lines: tuple[int, ...] | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU, or one of a flavor.

    Attributes:
        name: as nvidia-smi prints it, such as `NVIDIA GeForce RTX 4090`.
        memory_bytes, free_bytes: free is None on a machine that is not this one.
        compute_capability: such as 8.9.
        nvlink: the GPUs of this machine reach each other over NVLink; None when there is one GPU or it is unknown.
    """

    name: str
    memory_bytes: int
    free_bytes: int | None
    compute_capability: float | None
    nvlink: bool | None = None


class MeasuredReading(msgspec.Struct, frozen=True):
    """How fast llama.cpp read the weights of a file on this machine, in 10^9 bytes a second, and which file when."""

    gigabytes_per_second: float
    basis: str


class MachineFacts(msgspec.Struct, frozen=True):
    """This machine, probed without torch, or what a flavor promises.

    Attributes:
        chip: the processor of a training run: the GPU's name, Apple's chip, or the CPU's.
        device: `cuda`, `mps` or `cpu`: the best that the hardware offers.
        memory_bytes: what the device can use: GPU memory of one GPU, or all RAM on Apple silicon and CPUs.
        available_bytes: of it, free now.
        compute_capability: CUDA, such as 8.9.
        cores: physical cores; performance cores on Apple silicon.
        bf16_matrix: the processor multiplies in bf16 (AMX, AVX-512 BF16, or Arm BF16).
        gpus: every NVIDIA GPU, equal ones first to last.
        unified: the GPU's memory is the computer's (Apple silicon, DGX Spark).
        ram_bytes, ram_available_bytes: of the computer.
        disk_free_bytes: where runs are written.
        on_battery: None on a machine without a battery or where nothing tells.
        laptop: it has a battery; None when nothing tells.
        intel_mac: a Mac without Apple silicon.
        rosetta: this Python runs under Rosetta and cannot use MPS.
        reading: how fast llama.cpp read weights here; None where `bench` did not measure it.
        cpu: the processor's own name; `cpu_features`: those of avx2, avx512f, avx512_bf16, amx_bf16, bf16, neon it has;
        cpu_mhz: its highest stated clock.
    """

    system: str
    chip: str
    device: str
    memory_bytes: int | None
    available_bytes: int | None
    compute_capability: float | None
    cores: int
    bf16_matrix: bool
    unknown: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    unified: bool = False
    ram_bytes: int | None = None
    ram_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    on_battery: bool | None = None
    laptop: bool | None = None
    intel_mac: bool = False
    rosetta: bool = False
    cpu: str = ""
    cpu_features: tuple[str, ...] = ()
    cpu_mhz: float | None = None
    reading: MeasuredReading | None = None


class Flavor(msgspec.Struct, frozen=True):
    """One kind of machine that Hugging Face Jobs rents out.

    Attributes:
        gpu: as the Jobs API names the accelerator, such as `L40S`; None for a CPU flavor.
        gpu_memory_bytes: of one GPU.
        disk_bytes: None where the Jobs API does not say.
        usd_per_hour: of the whole flavor.
        read_at: the date of the price; `source`: where it was read.
    """

    name: str
    gpu: str | None
    gpus: int
    gpu_memory_bytes: int | None
    cores: int
    ram_bytes: int
    disk_bytes: int | None
    usd_per_hour: float
    read_at: str
    source: str


class Reading(msgspec.Struct, frozen=True):
    """One way to explain a GPU's seconds.

    Attributes:
        speed: floating point operations in a second of computing.
        launches: the time that launches took, as a share of the most that is assumed for them.
    """

    speed: float
    launches: float


class Calibration(msgspec.Struct, frozen=True):
    """What a finished run on this machine measured, to be used instead of an assumed speed.

    Attributes:
        flops_per_second: arithmetic of the training steps over their time, padding included.
        basis: the run it comes from, for the reader.
        same_shape: that run trained the same model shape; otherwise one of about its size on this device and dtype.
        readings: on a GPU, the two ends of what the seconds may mean: computing took as long as is plausible, or
            launching the kernels did. Empty elsewhere, and for a GPU whose peak is unknown.
    """

    flops_per_second: float
    basis: str
    same_shape: bool
    readings: tuple[Reading, ...] = ()
