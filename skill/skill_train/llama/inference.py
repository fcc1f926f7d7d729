"""The job and the result of the child process that runs llama.cpp on one GGUF file for `verify` and `evaluate`.

The reference's logits are in files, float32 [rows, vocabulary]. The child compares its own logits with them, so no
logits are sent between the processes.
"""

import itertools

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker
from skill_train.llama.logit_distance import Distance, TuningShare

WORKER = "skill_train.llama.inference_worker"


class Sequence(msgspec.Struct, frozen=True):
    """A sequence of tokens to compare; `first` is the row of its first token in the files of logits."""

    ids: list[int]
    first: int


def sequences_of(texts: list[list[int]]) -> list[Sequence]:
    """A `Sequence` for each text. The rows of their logits follow each other without gaps."""
    firsts = itertools.accumulate(map(len, texts), initial=0)
    return [Sequence(ids, first) for ids, first in zip(texts, firsts, strict=False)]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as tokens, and the limit of the answer in tokens."""

    ids: list[int]
    most: int
    # if given, the answer stops at its first token that differs from these tokens or follows them
    expected: list[int] | None = None


class Scored(msgspec.Struct, frozen=True):
    """A row, and the positions of its tokens that count in the training loss."""

    ids: list[int]
    trained: list[int]


class InferenceJob(msgspec.Struct, frozen=True, kw_only=True):
    """All requests for one load of the file."""

    gguf: str
    lora: str | None = None  # the file of an adapter to load beside the model
    context_tokens: int
    threads: int
    vocabulary: int | None = None  # the size of the reference's vocabulary; None without logits
    # plain, special: texts to tokenize; the latter get BOS and EOS if the tokenizer adds them
    plain: list[str] = []
    special: list[str] = []
    sequences: list[Sequence] = []
    tuned: str | None = None  # the file of the reference logits for `sequences`
    logits: str | None = None  # the file to write the logits of `sequences` to, as the reference of another job
    trained: str | None = None  # the file of the logits of the trained model, if `tuned` is that model after rounding
    base: str | None = None  # the file of the logits of the base, for the first `base_rows`
    base_rows: int = 0
    prompts: list[Prompt] = []
    together: bool = False  # answers all prompts in one batch, and ignores `expected`
    scored: list[Scored] = []


class VocabularyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The special tokens and settings as llama.cpp applies them. An id is None if the file does not name the token."""

    bos: int | None
    eos: int | None
    pad: int | None
    add_bos: bool
    end_of_generation: list[int]
    tokens: int


class InferenceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, in the order of the job."""

    facts: VocabularyFacts
    plain: list[list[int]]
    special: list[list[int]]
    figures: Distance | None  # the figures of all `sequences` together; None without a sequence
    trained_kl: float | None  # the mean divergence from the trained model in nats
    change: TuningShare | None  # None without a base
    # for each row of `scored`, the sum of -log p in nats over its trained tokens; None if it is not finite
    losses: list[float | None]
    answers: list[list[int]]
    answer_seconds: float


def ask(job: InferenceJob, progress: Bar | None = None) -> InferenceResult:
    """Runs the job in a child process.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: llama.cpp refuses the file.
        DecisionNeeded: there was not enough memory.
    """
    return run_worker(WORKER, job, InferenceResult, progress=progress)
