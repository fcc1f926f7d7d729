"""Facts that are read before anything is decided. An unknown fact is None, with the reason in `unknown`."""

from __future__ import annotations

from typing import Any

import msgspec

from skill_train.program.pictures.processor import ImageProcessor

JsonObject = dict[str, Any]
"""A JSON object from another program, such as a model's config.json or an answer of the Hub. It is not validated: each
reader checks the fields that it uses. The files and answers of skill-train itself have types of their own."""


# The lowest compute capability that torch supports: its CUDA 13 builds on PyPI begin with Turing (RELEASE.md,
# pytorch/pytorch#164471, 2025-10).
TORCH_NEEDS = 7.5


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts of a model, from `config.json` and the safetensors headers."""

    source: str  # where it was read
    fingerprint: str | None  # changes when the model changes; None for a model on the Hub, which has a `revision`
    model_type: str
    architecture: str
    # all parameters: counted from the tensor shapes in the headers, or else computed from the config
    parameters: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context: int | None  # tokens that the model was made for
    stored_dtype: str | None  # the dtype of most weights, as safetensors names it (`BF16`)
    quantization: str | None  # the method of a quantized checkpoint, such as `bitsandbytes`
    has_chat_template: bool
    unknown: dict[str, str] = {}
    parameters_from: str | None = None  # `safetensors headers` or `config arithmetic`
    active_parameters: int | None = None  # parameters that one token uses; fewer than all in a mixture of experts
    # the input embedding, the output head if it is not tied, and the embeddings per layer of Gemma 3n and 4
    embedding_parameters: int | None = None
    intermediate_size: int | None = None  # width of the MLP; of one expert in a mixture of experts
    # heads, kv_heads, head_dim: the sizes of the attention
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tied_embeddings: bool | None = None  # whether the output head is the input embedding
    sliding_window: int | None = None  # tokens that a windowed attention layer sees; None when every layer sees all
    # experts, experts_per_token: the sizes of a mixture of experts; None for a dense model
    experts: int | None = None
    experts_per_token: int | None = None
    weight_bytes: int | None = None  # size of the weight files
    vision: bool = False  # the model also reads images
    gated: bool | None = None  # the Hub asks for consent before download; None for a folder
    revision: str | None = None  # the commit on the Hub; None for a folder
    # llama.cpp is known to convert the architecture that `config.json` describes; None when that is not known
    convertible: bool | None = None
    not_convertible: str | None = None  # why llama.cpp cannot convert the model
    no_projector: str | None = None  # why llama.cpp cannot read pictures with this model, though it computes its text
    # the sliding window in tokens, if llama.cpp is not known to apply it
    unread_window: int | None = None
    at_hand: bool = False  # the weights are on this machine
    # the modules that LoRA adapts, for a family that is on no list; None if they were not looked up
    linear_layers: tuple[str, ...] | None = None
    # tower, image_processor: of a vision model; None if its files do not state the sizes, or how it resizes a picture
    tower: TowerFacts | None = None
    image_processor: ImageProcessor | None = None
    # the layers with a cache of their own that see only the sliding window; None when config.json does not say which
    windowed_layers: int | None = None
    expert_parameters: int | None = None  # parameters of all experts of a mixture of experts; None if unknown
    # parameters in the files that predict further tokens, and those of keys that no layer uses. transformers does not
    # load them; `parameters` excludes them.
    further_parameters: int = 0
    borrowing_layers: int = (
        0  # the last layers of a Gemma 4, if transformers gives them no keys and values of their own
    )
    shared_width: int = 0  # MLP width of the shared experts, which every token uses
    # layers whose keys and values llama.cpp caches; None when config.json does not say which, and it may be all
    cached_layers: int | None = None
    # the least and the most numbers that a cached layer without a window keeps for each token; None for the keys and
    # values of `kv_heads`
    cached_numbers: tuple[int, int] | None = None
    # for families whose modules have no usual widths: the name of each module that an adapter targets, with its number
    # of occurrences, the sum of its inputs and the sum of its outputs
    linear_sizes: dict[str, tuple[int, int, int]] = {}


class TowerFacts(msgspec.Struct, frozen=True):
    """The part of a vision model that reads pictures."""

    layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int  # patches (squares of pixels) that one token of the language model stands for
    values_per_patch: int  # numbers that describe a patch: 3 colours of each pixel, in each of Qwen's two frames
    gated: bool = False  # the MLP of a layer has three matrices, else two
    # parameters of the matrices between tower and language model that one token uses; None if unknown
    projector_parameters: int | None = None
    windowed_layers: int = 0  # layers in which a patch sees only the `window` patches around it
    window: int = 0
    # a patch attends to the patches of all pictures of a micro-step (Pixtral's mask)
    attends_all: bool = False

    @property
    def patch_parameters(self) -> int:
        """Parameters of the matrices that a patch uses: the patch embedding, and attention and MLP of each layer."""
        layer = 4 * self.hidden_size**2 + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        return self.values_per_patch * self.hidden_size + self.layers * layer

    @property
    def parameters(self) -> int:
        """Parameters of all matrices of tower and projector."""
        return self.patch_parameters + (self.projector_parameters or 0)


class TokenFacts(msgspec.Struct, frozen=True):
    """Tokens of a row, with the template, before rows are cut."""

    basis: str  # the source: `counted in all rows`, `counted in 2000 of 50000 rows`, or `2 to 5 bytes a token`
    counted: bool  # counted with the model's tokenizer and template. When False the figures are ranges.
    mean: tuple[float, float]  # mean tokens of a row, `(low, high)`; both equal when counted
    longest: tuple[int, int]  # tokens of the longest row, `(low, high)`
    mean_cut: tuple[float, float]  # mean tokens of a row after the cut at `max_length`, `(low, high)`
    max_length: int  # the `max_length` that these figures are for
    trained_share: float | None = None  # share of the tokens that are trained, None when not counted
    truncated_share: float | None = None  # share of the rows that are longer than `max_length`, None when not counted


class PictureTokenFacts(msgspec.Struct, frozen=True):
    """Tokens of the language model that stand for pictures, computed from the sizes of all pictures."""

    # least, most: tokens of one picture
    least: int
    most: int
    # mean, longest: tokens of all pictures of a row, as the mean of all rows and in the row with the most
    mean: float
    longest: int
    # mean_fed, longest_fed: the same, with the marks and line ends around the pictures
    mean_fed: float
    longest_fed: int
    # the squared token count of each picture or tile that the tower reads alone; summed in a row, the mean of all rows
    mean_squares: float


class DatasetFacts(msgspec.Struct, frozen=True):
    """What is known of a dataset after every row was read once."""

    source: str
    fingerprint: str | None  # SHA-256 of a file's bytes, or of the rows of a folder; None when the data is on the Hub
    rows: int
    column_names: tuple[str, ...]
    format: str  # how a row becomes an example; `columns` maps the format's names to the dataset's
    columns: dict[str, str]
    bytes: int | None  # size on disk; None when unknown
    reason: str
    # UTF-8 bytes of all texts that training reads, without JSON's keys and punctuation; None when not read
    text_bytes: int | None = None
    longest_text_bytes: int | None = None  # text bytes of the row with the most
    tokens: TokenFacts | None = None  # None when nothing is known of the lengths
    revision: str | None = None  # the commit on the Hub; None for a file
    turns: int | None = None  # messages of all rows; 0 if the rows are plain text; None when not read
    longest_turns: int | None = None  # messages of the row with the most
    images: int | None = None  # pictures of all rows; 0 if there are none. None when the rows were read as text.
    most_images: int | None = None  # pictures of the row with the most
    # image_bytes, image_pixels: the sizes of all picture files, and their pixels before they are resized
    image_bytes: int | None = None
    image_pixels: int | None = None
    largest_image: tuple[int, int] | None = None  # width and height of the picture with the most pixels, upright
    # None if there are no pictures, or the model's image processor is unknown
    picture_tokens: PictureTokenFacts | None = None
    # the file of rows on the Hub, if it is a table or has its pictures beside it; None for other data
    data_file: str | None = None
    rows_read: int | None = None  # the number of first rows that were read for these facts; None if all were read
    rows_estimated: str | None = None  # how the number of rows was estimated; None if it is known
    # the configuration that the recipe names, of a dataset on the Hub; None for its only one
    data_config: str | None = None


class FirstPictures(msgspec.Struct, frozen=True):
    """The pictures of a dataset of which only the first rows were read."""

    count: int  # pictures of all rows, extrapolated from the rows that were read
    most: int  # pictures of the row with the most
    # the lines of the first rows, if their pictures are beside the file of rows and not checked yet
    lines: tuple[int, ...] | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU of this machine or of a flavor."""

    name: str  # as nvidia-smi prints it, such as `NVIDIA GeForce RTX 4090`
    # free_bytes: None for a GPU of a flavor
    memory_bytes: int
    free_bytes: int | None
    compute_capability: float | None  # such as 8.9
    # the GPUs of this machine reach each other over NVLink; None when there is one GPU or it is unknown
    nvlink: bool | None = None


class MeasuredReading(msgspec.Struct, frozen=True):
    """How fast llama.cpp read the weights of a file on this machine."""

    gigabytes_per_second: float  # GB are 10^9 bytes
    basis: str  # which file, and when


class MachineFacts(msgspec.Struct, frozen=True):
    """This machine, probed without torch, or the machine of a flavor."""

    system: str
    chip: str  # the processor of a training run: the GPU's name, Apple's chip, or the CPU's
    device: str  # `cuda`, `mps` or `cpu`: the best that the hardware offers
    memory_bytes: int | None  # memory of the device: that of one GPU, or all RAM on Apple silicon and CPUs
    available_bytes: int | None  # the part of `memory_bytes` that is free now
    compute_capability: float | None  # of CUDA, such as 8.9
    cores: int  # physical cores; performance cores on Apple silicon
    bf16_matrix: bool  # the processor multiplies in bf16 (AMX, AVX-512 BF16, or Arm BF16)
    unknown: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()  # the equal NVIDIA GPUs that a run would use
    unified: bool = False  # the GPU shares the computer's memory (Apple silicon, DGX Spark)
    # ram_bytes, ram_available_bytes: the computer's memory
    ram_bytes: int | None = None
    ram_available_bytes: int | None = None
    disk_free_bytes: int | None = None  # on the disk to which runs are written
    on_battery: bool | None = None  # None for a machine without a battery, or if unknown
    laptop: bool | None = None  # the machine has a battery; None if unknown
    intel_mac: bool = False  # a Mac without Apple silicon
    rosetta: bool = False  # this Python runs under Rosetta and cannot use MPS
    cpu: str = ""  # the processor's own name
    cpu_features: tuple[str, ...] = ()  # any of avx2, avx512f, avx512_bf16, amx_bf16, bf16 and neon
    cpu_mhz: float | None = None  # the processor's highest stated clock
    # how fast llama.cpp reads weights here; None if `bench` has not measured it
    reading: MeasuredReading | None = None


class Flavor(msgspec.Struct, frozen=True):
    """One kind of machine that Hugging Face Jobs rents out."""

    name: str
    gpu: str | None  # as the Jobs API names the accelerator, such as `L40S`; None for a CPU flavor
    gpus: int
    gpu_memory_bytes: int | None  # of one GPU
    cores: int
    ram_bytes: int
    disk_bytes: int | None  # None if the Jobs API does not state it
    usd_per_hour: float  # for the whole machine
    # read_at, source: the date on which the price was read, and where
    read_at: str
    source: str


class Reading(msgspec.Struct, frozen=True):
    """One way to divide a GPU's measured seconds between computing and launching kernels."""

    speed: float  # floating point operations in a second of computing
    launches: float  # the time of the kernel launches, as a share of the most that is assumed for them


class Calibration(msgspec.Struct, frozen=True):
    """The speed that a finished run on this machine measured. It replaces an assumed speed."""

    flops_per_second: float  # arithmetic of the training steps, with padding, divided by their time
    basis: str  # the run that measured it, in words for the user
    same_shape: bool  # that run trained the same model shape; otherwise one of about its size on this device and dtype
    # on a GPU, the two extremes: computing took as long as is plausible, or launching the kernels did. Empty on other
    # devices, and for a GPU whose peak is unknown.
    readings: tuple[Reading, ...] = ()
