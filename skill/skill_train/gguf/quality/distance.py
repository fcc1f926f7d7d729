"""Measures how far GGUF files are from the unquantized file. llama.cpp runs both on the same texts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.errors import UsageError
from skill_train.core.files import scratch_folder
from skill_train.llama import inference
from skill_train.llama.inference import InferenceJob, Sequence, sequences_of
from skill_train.machine.read import physical_cores
from skill_train.run.export_record import Measured
from skill_train.run.folder import require_space

_ROOM = 8  # tokens of context to spare


@dataclass(frozen=True)
class Judge:
    """Texts, and the logits of the unquantized file for them."""

    sequences: list[Sequence]
    logits: Path  # the file of the logits, float32 [tokens, vocabulary]
    vocabulary: int

    @property
    def context_tokens(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences) + _ROOM


@contextlib.contextmanager
def judging(source: Path, texts: list[list[int]], vocabulary: int, progress: Bar) -> Iterator[Judge]:
    """Computes the logits of `source`, and yields the judge for files made from it. Removes the logits at the end.

    Args:
        texts: token ids. At least one text has two tokens.

    Raises:
        DecisionNeeded: the disk has no room for the logits, or there is too little memory.
        VerificationFailed: llama.cpp refuses the file.
    """
    sequences, tokens = sequences_of(texts), sum(map(len, texts))
    with scratch_folder() as folder:
        require_space(folder, 4 * tokens * vocabulary, "the logits of the unquantized file")
        judge = Judge(sequences, folder / "logits", vocabulary)
        job = InferenceJob(
            gguf=str(source),
            context_tokens=judge.context_tokens,
            threads=physical_cores(),
            sequences=sequences,
            logits=str(judge.logits),
        )
        inference.ask(job, progress)
        yield judge


def distance(judge: Judge, file: Path, progress: Bar | None = None) -> Measured:
    """The distance of one file from the unquantized file.

    Raises:
        UsageError: the file's logits are not finite.
        NativeCrash, VerificationFailed: llama.cpp crashed on the file, or refuses it.
    """
    job = InferenceJob(
        gguf=str(file),
        context_tokens=judge.context_tokens,
        threads=physical_cores(),
        vocabulary=judge.vocabulary,
        sequences=judge.sequences,
        tuned=str(judge.logits),
    )
    figures = inference.ask(job, progress).figures
    if figures is None or figures["mean_kl"] is None or figures["same_top1"] is None:
        raise UsageError(
            f"{file.name} answers with numbers that are not finite",
            code="bad_weights",
            expected="finite logits",
            hint="export with --imatrix none, or with a larger type such as --quant q8_0",
        )
    return {"mean_kl": figures["mean_kl"], "same_top1": figures["same_top1"], "tokens": figures["tokens"]}
