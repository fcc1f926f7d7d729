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
    """What `config.json` and the safetensors headers say."""

    source: str  # where it was read
    fingerprint: str | None  # changes when the model changes; None for a model on the Hub (its revision says it)
    model_type: str
    architecture: str
    # all of them: counted from the tensor shapes in the headers, else worked out from the config
    parameters: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None  # tokens that the model was made for
    stored_dtype: str | None  # of most weights, as safetensors names it (`BF16`)
    quantization: str | None  # the method of a quantized checkpoint, such as `bitsandbytes`
    has_chat_template: bool
    unknown: dict[str, str] = {}
    parameters_from: str | None = None  # `safetensors headers` or `config arithmetic`
    active_parameters: int | None = None  # those that one token passes; below `parameters` in a mixture of experts
    # the input embedding, the output head where it is not tied to it, and the embeddings that Gemma 3n and 4 have for
    # each layer
    embedding_parameters: int | None = None
    intermediate_size: int | None = None  # width of the MLP; of one expert in a mixture of experts
    # heads, kv_heads, head_dim: of the attention
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tied_embeddings: bool | None = None  # whether the output head is the input embedding
    sliding_window: int | None = None  # tokens that a windowed attention layer sees; None when every layer sees all
    # experts, experts_per_token: of a mixture of experts; None for a dense model
    experts: int | None = None
    experts_per_token: int | None = None
    weight_bytes: int | None = None  # size of the weight files
    vision: bool = False  # it reads images too
    gated: bool | None = None  # the Hub asks for consent before download; None for a folder
    revision: str | None = None  # the commit on the Hub; None for a folder
    # llama.cpp is known to take the architecture, as `config.json` describes it; None when that is not known
    convertible: bool | None = None
    not_convertible: str | None = None  # why not, where it is not
    no_projector: str | None = None  # why llama.cpp reads no pictures with a model whose text it computes
    # the sliding window in tokens, where llama.cpp is not known to compute the model with it
    unread_window: int | None = None
    at_hand: bool = False  # the weights lie on this machine
    # what LoRA adapts, where the family is on no list; None where nobody looked
    linear_layers: tuple[str, ...] | None = None
    tower: TowerFacts | None = None  # of a vision model; None where config.json does not say its sizes
    image_processor: ImageProcessor | None = None  # of a vision model; None where its files do not say how it resizes
    # of these, the ones that see only the sliding window; None when config.json does not say which
    windowed_layers: int | None = None
    expert_parameters: int | None = None  # those in all experts of a mixture of experts; None where they are unknown
    # those that predict further tokens, in files. transformers does not load them, and they are not among `parameters`.
    further_parameters: int = 0
    shared_width: int = 0  # of the experts that every token passes beside the chosen ones
    # layers whose keys and values llama.cpp caches; None when config.json does not say which, or all
    cached_layers: int | None = None
    # the least and the most numbers that such a layer without a window keeps of a token; None for the keys and values
    # of `kv_heads`
    cached_numbers: tuple[int, int] | None = None
    # of modules that an adapter targets, how often each stands in the model, and the sums of its inputs and of its
    # outputs, by its name; of families whose modules have no usual widths
    linear_sizes: dict[str, tuple[int, int, int]] = {}


class TowerFacts(msgspec.Struct, frozen=True):
    """The part of a vision model that reads pictures."""

    layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int  # squares of pixels that one token of the language model stands for
    values_per_patch: int  # numbers that describe such a square: 3 colours of each pixel, of each of Qwen's two frames
    gated: bool = False  # the MLP of a layer has three matrices, else two
    # of the matrices between tower and language model, for a token of that; None where they are unknown
    projector_parameters: int | None = None
    windowed_layers: int = 0  # layers in which a patch sees only the `window` patches around it
    window: int = 0
    # the patches of all pictures of a micro-step are compared with each other (Pixtral's mask)
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
    """Tokens a row, template included, before anything is cut."""

    basis: str  # how they are known: `counted in all rows`, `counted in 2000 of 50000 rows`, or `2 to 5 bytes a token`
    counted: bool  # made with the model's tokenizer and template. When False the figures are ranges.
    mean: tuple[float, float]  # tokens a row, `(low, high)`; equal when counted
    longest: tuple[int, int]  # of the longest row, `(low, high)`
    mean_cut: tuple[float, float]  # tokens a row after cutting at `max_length`, `(low, high)`
    max_length: int  # the limit these figures were made for
    trained_share: float | None = None  # share of the tokens that are trained, None when not counted
    truncated_share: float | None = None  # share of the rows that are longer than `max_length`, None when not counted


class PictureTokenFacts(msgspec.Struct, frozen=True):
    """Tokens of the language model that stand for pictures, by arithmetic from the sizes of all pictures."""

    # least, most: of one picture
    least: int
    most: int
    mean: float  # of all pictures of a row, the mean of all rows; `longest`: of the row with most
    longest: int
    # mean_fed, longest_fed: the same with the marks and line ends around them
    mean_fed: float
    longest_fed: int
    # of what the tower reads by itself, a picture or a tile, the square of its tokens; the sum of a row, the mean of
    # all rows
    mean_squares: float


class DatasetFacts(msgspec.Struct, frozen=True):
    """What reading every row once says."""

    source: str
    fingerprint: str | None  # SHA-256 of a file's bytes, or of the rows of a folder; None when the data is on the Hub
    rows: int
    column_names: tuple[str, ...]
    format: str  # how a row becomes an example; `columns` maps the format's names to the dataset's
    columns: dict[str, str]
    bytes: int | None  # size on disk; None when unknown
    reason: str
    # UTF-8 bytes of all texts that training reads, without keys and JSON's marks; None when not read
    text_bytes: int | None = None
    longest_text_bytes: int | None = None  # of the row with most of them
    tokens: TokenFacts | None = None  # None when nothing is known of the lengths
    revision: str | None = None  # the commit on the Hub; None for a file
    turns: int | None = None  # messages of all rows, 0 where the rows are plain text; None when not read
    longest_turns: int | None = None  # of the row with most of them
    images: int | None = None  # pictures of all rows; 0 where there are none. None when the rows were read as text.
    most_images: int | None = None  # of the row with most of them
    # of the files of all of them; `image_pixels`: of all of them, before they are resized
    image_bytes: int | None = None
    image_pixels: int | None = None
    largest_image: tuple[int, int] | None = None  # width and height of the one with most pixels, upright
    # None where there are no pictures, or the model's image processor is unknown
    picture_tokens: PictureTokenFacts | None = None
    # the file of rows on the Hub that is a table, or has its pictures beside it; None for other data
    data_file: str | None = None
    rows_read: int | None = None  # how many of the first rows were read to know this; None where all were
    rows_estimated: str | None = None  # how the number of rows was estimated; None where it is known
    # the configuration of a dataset on the Hub that the recipe names; None for its only one
    data_config: str | None = None


class FirstPictures(msgspec.Struct, frozen=True):
    """The pictures of a dataset of which only first rows were read."""

    count: int  # of all rows, from those that were read; `most`: of the row with most of them
    most: int
    # of the first rows, where their pictures lie beside a file of rows, and are not checked yet
    lines: tuple[int, ...] | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU, or one of a flavor."""

    name: str  # as nvidia-smi prints it, such as `NVIDIA GeForce RTX 4090`
    # memory_bytes, free_bytes: free is None on a machine that is not this one
    memory_bytes: int
    free_bytes: int | None
    compute_capability: float | None  # such as 8.9
    # the GPUs of this machine reach each other over NVLink; None when there is one GPU or it is unknown
    nvlink: bool | None = None


class MeasuredReading(msgspec.Struct, frozen=True):
    """How fast llama.cpp read the weights of a file on this machine, in 10^9 bytes a second, and which file when."""

    gigabytes_per_second: float
    basis: str


class MachineFacts(msgspec.Struct, frozen=True):
    """This machine, probed without torch, or what a flavor promises."""

    system: str
    chip: str  # the processor of a training run: the GPU's name, Apple's chip, or the CPU's
    device: str  # `cuda`, `mps` or `cpu`: the best that the hardware offers
    memory_bytes: int | None  # what the device can use: GPU memory of one GPU, or all RAM on Apple silicon and CPUs
    available_bytes: int | None  # of it, free now
    compute_capability: float | None  # CUDA, such as 8.9
    cores: int  # physical cores; performance cores on Apple silicon
    bf16_matrix: bool  # the processor multiplies in bf16 (AMX, AVX-512 BF16, or Arm BF16)
    unknown: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()  # every NVIDIA GPU, equal ones first to last
    unified: bool = False  # the GPU's memory is the computer's (Apple silicon, DGX Spark)
    # ram_bytes, ram_available_bytes: of the computer
    ram_bytes: int | None = None
    ram_available_bytes: int | None = None
    disk_free_bytes: int | None = None  # where runs are written
    on_battery: bool | None = None  # None on a machine without a battery or where nothing tells
    laptop: bool | None = None  # it has a battery; None when nothing tells
    intel_mac: bool = False  # a Mac without Apple silicon
    rosetta: bool = False  # this Python runs under Rosetta and cannot use MPS
    # the processor's own name; `cpu_features`: those of avx2, avx512f, avx512_bf16, amx_bf16, bf16, neon it has;
    cpu: str = ""
    cpu_features: tuple[str, ...] = ()
    cpu_mhz: float | None = None  # its highest stated clock
    # how fast llama.cpp read weights here; None where `bench` did not measure it
    reading: MeasuredReading | None = None


class Flavor(msgspec.Struct, frozen=True):
    """One kind of machine that Hugging Face Jobs rents out."""

    name: str
    gpu: str | None  # as the Jobs API names the accelerator, such as `L40S`; None for a CPU flavor
    gpus: int
    gpu_memory_bytes: int | None  # of one GPU
    cores: int
    ram_bytes: int
    disk_bytes: int | None  # None where the Jobs API does not say
    usd_per_hour: float  # of the whole flavor
    read_at: str  # the date of the price; `source`: where it was read
    source: str


class Reading(msgspec.Struct, frozen=True):
    """One way to explain a GPU's seconds."""

    speed: float  # floating point operations in a second of computing
    launches: float  # the time that launches took, as a share of the most that is assumed for them


class Calibration(msgspec.Struct, frozen=True):
    """What a finished run on this machine measured, to be used instead of an assumed speed."""

    flops_per_second: float  # arithmetic of the training steps over their time, padding included
    basis: str  # the run it comes from, for the reader
    same_shape: bool  # that run trained the same model shape; otherwise one of about its size on this device and dtype
    # on a GPU, the two ends of what the seconds may mean: computing took as long as is plausible, or launching the
    # kernels did. Empty elsewhere, and for a GPU whose peak is unknown.
    readings: tuple[Reading, ...] = ()
