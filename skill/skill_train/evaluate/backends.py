"""Puts held-out rows to one model: how likely it finds the right answers, and what it answers itself.

One function a backend, all of one shape: `ask(model, questions, progress) -> Replies`. transformers for folders,
llama.cpp for GGUF files, vLLM for folders on CUDA. Losses are of fp32 arithmetic everywhere.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.console import Bar
from skill_train.core.errors import NotInstalled, UsageError
from skill_train.core.worker import llama_cpp_folder
from skill_train.evaluate import vllm_job
from skill_train.llama import inference
from skill_train.llama.inference import Prompt, Scored
from skill_train.model.foreign_files import require_sound
from skill_train.reference.load import load_tokenizer, reference_model, stop_ids

Progress = Callable[[float], None]  # the share of the questions that is done, 0 to 1
_ROOM = 1.3  # of the fp32 weights' bytes: what one row takes beside them


@dataclass(frozen=True)
class Model:
    """What is asked: a folder, a folder with an adapter on top, or a GGUF file. `name` is its name in the tables.

    Attributes:
        merged: the adapter that is in the folder already.
    """

    name: str
    path: Path
    adapter: Path | None = None
    merged: Path | None = None

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


@dataclass(frozen=True)
class Question:
    """One held-out row.

    Attributes:
        ids: the whole row, as the trainer would have been fed it.
        trained: positions in `ids` whose token the trainer would have been taught; never 0.
        prompt: ids before the row's last answer; empty when the row asks nothing.
        wanted: ids of that answer.
        most: tokens that an answer may have.
    """

    ids: list[int]
    trained: list[int]
    prompt: list[int]
    wanted: list[int]
    most: int


@dataclass(frozen=True)
class Replies:
    """What one model replied, in the order of the questions.

    Attributes:
        losses: -log p in nats, summed over a row's trained tokens; None where it is not a finite number.
        answers: ids of the greedy answer; empty for a row that asks nothing.
        tokens_per_second: answer tokens by the time of answering, reading the prompt included.
        reason: why nothing was measured; `losses` and `answers` are empty then.
    """

    backend: str
    device: str
    losses: list[float | None]
    answers: list[list[int]]
    tokens_per_second: float | None
    reason: str = ""


Ask = Callable[[Model, list[Question], Progress], Replies]


def backend_of(model: Model, wanted: str) -> tuple[Ask, str]:
    """How to ask a model, and why so. `wanted` is auto, transformers or vllm; a GGUF file is llama.cpp's.

    Raises:
        NotInstalled: vllm was asked for, or llama.cpp is needed, and is not there.
        UsageError: vllm was asked for, and there is no CUDA.
    """
    if model.is_gguf:
        llama_cpp_folder()
        return ask_llama_cpp, "a GGUF file"
    if wanted == "vllm":
        _require_vllm()
    if wanted == "transformers":
        return ask_transformers, "asked for"
    if model.adapter is not None:
        return ask_transformers, "an adapter that is not merged yet"
    if wanted == "vllm":
        return ask_vllm, "asked for"
    if _has_vllm() and _has_cuda():
        return ask_vllm, "CUDA is here and vllm is installed"
    return ask_transformers, "vllm is not installed" if not _has_vllm() else "there is no CUDA"


def ask_transformers(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """A folder through transformers (and PEFT), in fp32, one row at a time; on CUDA where the weights fit."""
    stops = stop_ids(model.path, load_tokenizer(model.path))
    sums: list[float | None] = []
    answers: list[list[int]] = []
    seconds = 0.0
    with reference_model(model.path, model.adapter) as network:
        rows, highest = len(network.get_input_embeddings().weight), max(max(one.ids) for one in questions)
        if highest >= rows:
            return _unmeasured("transformers", f"it knows {rows} tokens, and the rows use number {highest}")
        device = _device(network)
        network.to(device)
        for number, question in enumerate(questions):
            progress(number / len(questions))
            sums.append(_loss(network, question, device))
            started = time.monotonic()
            answers.append(_greedy(network, question, stops, device) if question.prompt else [])
            seconds += time.monotonic() - started
    return Replies("transformers", device, sums, answers, _speed(answers, seconds))


def ask_llama_cpp(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """A GGUF file through llama.cpp on the CPU, in a child process, one row at a time."""
    from skill_train.machine.read import physical_cores

    longest = max(max(len(one.ids), len(one.prompt) + one.most) for one in questions)
    job = inference.InferenceJob(
        gguf=str(model.path),
        context_tokens=longest + 8,
        threads=physical_cores(),
        scored=_scored(questions),
        prompts=_prompts(questions),
    )
    result = inference.ask(job, progress=_halves(progress))
    speed = _speed(result.answers, result.answer_seconds)
    return Replies("llama.cpp", "cpu", result.losses, _in_place(questions, result.answers), speed)


def ask_vllm(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """A folder through vLLM in fp32, all rows at once, in a child process that gives the GPU's memory back."""
    require_sound(model.path)
    longest = max(max(len(one.ids), len(one.prompt) + one.most) for one in questions)
    job = vllm_job.VllmJob(str(model.path), longest + 8, _scored(questions), _prompts(questions))
    result = vllm_job.ask(job, progress=_halves(progress))
    speed = _speed(result.answers, result.answer_seconds)
    return Replies("vllm", "cuda", result.losses, _in_place(questions, result.answers), speed)


def _require_vllm() -> None:
    if not _has_vllm():
        raise NotInstalled("vllm is not installed", code="missing_package", hint="pip install vllm")
    if not _has_cuda():
        raise UsageError(
            "vllm needs CUDA, which this machine does not have",
            code="bad_usage",
            expected="--backend auto or --backend transformers",
            hint="run the same command without --backend",
        )


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _device(network: Any) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    need = 4 * sum(weight.numel() for weight in network.parameters())
    return "cuda" if torch.cuda.mem_get_info()[0] > _ROOM * need else "cpu"


def _loss(network: Any, question: Question, device: str) -> float | None:
    """-log p summed over the trained tokens; logits of other tokens are left out where the architecture can do that."""
    import torch

    ids = torch.tensor(question.ids, device=device)
    before = torch.tensor([position - 1 for position in question.trained], device=device)
    kept = {"logits_to_keep": before} if network._supports_logits_to_keep() else {}
    with torch.no_grad():
        logits = network(input_ids=ids[None], use_cache=False, **kept).logits[0].float()
    rows = logits if kept else logits[before]
    total = float(torch.nn.functional.cross_entropy(rows, ids[before + 1], reduction="sum"))
    return total if math.isfinite(total) else None


def _greedy(network: Any, question: Question, stops: set[int], device: str) -> list[int]:
    """The most likely token each time. `generate` would apply the penalties of generation_config.json, and llama.cpp
    knows none of them."""
    import torch

    answer: list[int] = []
    past, given = None, question.prompt
    with torch.no_grad():
        while len(answer) < question.most and not (answer and answer[-1] in stops):
            out = network(input_ids=torch.tensor([given], device=device), past_key_values=past, use_cache=True)
            past = out.past_key_values
            answer.append(int(out.logits[0, -1].argmax()))
            given = answer[-1:]
    return answer


def _scored(questions: list[Question]) -> list[Scored]:
    return [Scored(one.ids, one.trained) for one in questions]


def _prompts(questions: list[Question]) -> list[Prompt]:
    return [Prompt(one.prompt, one.most) for one in questions if one.prompt]


def _in_place(questions: list[Question], answers: list[list[int]]) -> list[list[int]]:
    """Answers to the rows that asked, with an empty one for each row that did not."""
    given = iter(answers)
    return [next(given) if one.prompt else [] for one in questions]


def _halves(progress: Progress) -> Bar:
    """A worker counts the losses first and then the answers."""
    return lambda done, total, text: progress(done / total / 2 + (0.5 if text == "answering" else 0.0))


def _speed(answers: list[list[int]], seconds: float) -> float | None:
    made = sum(map(len, answers))
    return made / seconds if made and seconds else None


def _unmeasured(backend: str, reason: str) -> Replies:
    return Replies(backend, "", [], [], None, reason)
