"""Child process: llama.cpp loads a language model and the projector that belongs to it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TypedDict

from skill_train.core.errors import VerificationFailed
from skill_train.core.worker import worker_main
from skill_train.llama.llama_cpp import loaded

_TOKENS = 64  # of a context that is not used
_ERROR = 4  # llama.cpp's level
_ADVICE = "Does this file exist?"  # what it adds to any failure


class PairJob(TypedDict):
    """Paths of GGUF files."""

    text: str
    projector: str


def run(job: PairJob) -> dict[str, bool]:
    """Whether the projector reads pictures, and sounds.

    Raises:
        NotInstalled: llama-cpp-python is missing.
        VerificationFailed: llama.cpp refuses one of the files; `got` holds its first words of why.
    """
    with loaded(Path(job["text"]), context_tokens=_TOKENS, threads=1) as llama:
        # Importing it loads a second native library, which belongs to the same package.
        mtmd = importlib.import_module(f"{llama.api.__name__}.mtmd_cpp")
        errors: list[str] = []

        def keep(level: int, text: bytes, _: object) -> None:
            if level == _ERROR:
                errors.append(text.decode("utf-8", errors="replace").strip())

        log = llama.api.llama_log_callback(keep)
        mtmd.mtmd_helper_log_set(log, None)
        parameters = mtmd.mtmd_context_params_default()
        parameters.use_gpu = parameters.print_timings = parameters.warmup = False
        context = mtmd.mtmd_init_from_file(job["projector"].encode(), llama.model, parameters)
        mtmd.mtmd_helper_log_set(llama.api.llama_log_callback(0), None)  # `log` ends with this function
        if not context:
            raise VerificationFailed(
                f"llama.cpp cannot load {Path(job['projector']).name}",
                code="bad_gguf",
                got=_told(errors),
                hint="pip install -U llama-cpp-python, which brings a newer llama.cpp",
            )
        found = {"pictures": bool(mtmd.mtmd_support_vision(context)), "sounds": bool(mtmd.mtmd_support_audio(context))}
        mtmd.mtmd_free(context)
    return found


def _told(errors: list[str]) -> str:
    """Why, without the name of the temporary file."""
    first = errors[0] if errors else "it said nothing"
    return first.rpartition("': ")[2].removesuffix(_ADVICE).strip()


if __name__ == "__main__":
    worker_main(run)
