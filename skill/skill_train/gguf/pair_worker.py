"""Child process: llama.cpp loads a language model and the projector that belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from skill_train.core.worker import worker_main
from skill_train.llama.llama_cpp import in_context, loaded_model
from skill_train.llama.pictures.mtmd import projector

_TOKENS = 64  # of a context that is not used


class PairJob(TypedDict):
    """Paths of GGUF files."""

    text: str
    projector: str


def run(job: PairJob) -> bool:
    """Whether the projector reads pictures.

    Raises:
        NotInstalled: llama-cpp-python is missing.
        VerificationFailed: llama.cpp refuses one of the files.
    """
    with (
        loaded_model(Path(job["text"])) as file,
        in_context(file, context_tokens=_TOKENS, threads=1),
        projector(file, Path(job["projector"]), threads=1, any_size=False) as encoder,
    ):
        return bool(encoder.api.mtmd_support_vision(encoder.context))


if __name__ == "__main__":
    worker_main(run, PairJob)
