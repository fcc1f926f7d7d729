"""What `verify` and `evaluate` ask of llama.cpp about one GGUF file, and what it answers: the job of a child process
and its result.

Logits of the reference lie in files, float32 [rows, vocabulary]. They are compared in the child, so that full logits
never travel.
"""

from __future__ import annotations

import msgspec

from skill_train.core.console import Bar
from skill_train.core.worker import run_worker
from skill_train.llama.logit_distance import Distance, TuningShare

WORKER = "skill_train.llama.inference_worker"


class Sequence(msgspec.Struct, frozen=True):
    """Tokens that are compared; `first` is the row of its first token in the files of logits."""

    ids: list[int]
    first: int


class Prompt(msgspec.Struct, frozen=True):
    """Tokens to answer, with at most so many tokens.

    Attributes:
        expected: the answer ends with the first token that is another, or that follows it.
    """

    ids: list[int]
    most: int
    expected: list[int] | None = None


class Scored(msgspec.Struct, frozen=True):
    """A row, and the positions in it whose tokens the trainer would have been taught."""

    ids: list[int]
    trained: list[int]


class InferenceJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, in one load of the file.

    Attributes:
        lora: an adapter's file, beside the model.
        vocabulary: size of the reference's; None without logits.
        plain, special: texts to tokenize; the latter get BOS and EOS where the tokenizer adds them.
        tuned: file of the logits that those of `sequences` are compared with.
        trained: those of what was trained, where `tuned` is that model rounded.
        base: those of the base, for the first `base_rows`.
    """

    gguf: str
    lora: str | None = None
    context_tokens: int
    threads: int
    vocabulary: int | None = None
    plain: list[str] = []
    special: list[str] = []
    sequences: list[Sequence] = []
    tuned: str | None = None
    trained: str | None = None
    base: str | None = None
    base_rows: int = 0
    prompts: list[Prompt] = []
    scored: list[Scored] = []


class VocabularyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Special tokens and habits as llama.cpp applies them; ids are None where the file names none."""

    bos: int | None
    eos: int | None
    eot: int | None
    pad: int | None
    add_bos: bool
    add_eos: bool
    end_of_generation: list[int]
    tokens: int
    context_length: int


class InferenceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was answered, in the order of the job.

    Attributes:
        figures: of all `sequences` together; None without one.
        trained_kl: mean divergence from what was trained, nats.
        change: None without a base.
        losses: the sum of -log p in nats over each row's trained tokens; None where it is not finite.
    """

    facts: VocabularyFacts
    plain: list[list[int]]
    special: list[list[int]]
    figures: Distance | None
    trained_kl: float | None
    change: TuningShare | None
    losses: list[float | None]
    answers: list[list[int]]
    answer_seconds: float


def ask(job: InferenceJob, progress: Bar | None = None) -> InferenceResult:
    """The result of one job, from a child process.

    Raises:
        NativeCrash: llama.cpp crashed.
        VerificationFailed: it refuses the file.
        DecisionNeeded: there was not enough memory.
    """
    return msgspec.convert(run_worker(WORKER, msgspec.to_builtins(job), progress=progress), InferenceResult)
