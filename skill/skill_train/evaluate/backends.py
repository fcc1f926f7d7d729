"""Asks one model the held-out rows: the loss of the right answers, and the model's own answers.

Each backend has a function with the same signature: `ask(model, questions, progress) -> Replies`. transformers reads
folders, llama.cpp reads GGUF files, and vLLM reads folders on CUDA. All losses are computed in fp32.
"""

import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skill_train.core.console import Bar
from skill_train.core.errors import UsageError
from skill_train.core.worker import llama_cpp_folder, run_worker
from skill_train.evaluate.pictures import (
    PictureTurns,
    RunPictures,
    is_asked_alike,
    picture_tensors,
    plain_generation,
    server_prompt,
)
from skill_train.evaluate.vllm_worker import VllmJob, VllmResult, not_installed
from skill_train.llama import inference
from skill_train.llama.inference import Prompt, Scored
from skill_train.llama.pictures import answers_worker as picture_answers
from skill_train.llama.pictures.compare import MARKER, Pair
from skill_train.machine.read import physical_cores
from skill_train.model.foreign_files import require_sound
from skill_train.program.pictures.tokens import Pictures
from skill_train.reference.load import load_tokenizer, read_model, reference_model, stop_ids

_Item = TypeVar("_Item")
Progress = Callable[[float], None]  # the share of the questions that is done, 0 to 1
_ROWS_AT_ONCE, _TOKENS_AT_ONCE = 16, 4096  # the most rows, and the most tokens in the cache, that are answered together
_ROOM = 1.3  # memory for the fp32 weights and the rows, as a multiple of the weights' bytes


@dataclass(frozen=True)
class Model:
    """A model to ask: a folder, a folder with an adapter on top, or a GGUF file."""

    name: str  # the name in the tables
    path: Path
    adapter: Path | None = None
    merged: Path | None = None  # the adapter that is already merged into the folder
    pictures: RunPictures | None = None  # the pictures of the questions; None for a run of text
    projector: Path | None = None  # the GGUF file that reads pictures for a GGUF file; None if there is none
    perhaps_trained: bool = False  # a GGUF file of another run, which may have trained on the rows

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


@dataclass(frozen=True)
class Question:
    """One held-out row as a question to a model."""

    ids: list[int]  # the token ids of the whole row, as the trainer would have been fed it
    trained: list[int]  # positions in `ids` of the tokens that would count in the training loss; never 0
    prompt: list[int]  # the ids before the row's last answer; empty if no answer is asked for
    answer: list[int]  # the ids of the row's last answer
    most: int  # the most tokens of a model's answer
    turns: PictureTurns | None = None  # the messages and pictures before the answer; None for a row of text


@dataclass(frozen=True)
class Replies:
    """One model's losses and answers, in the order of the questions."""

    backend: str
    device: str
    losses: list[float | None]  # -log p in nats, summed over a row's trained tokens; None if it is not finite
    answers: list[list[int]]  # ids of the greedy answer; empty for a question without a prompt
    tokens_per_second: float | None  # answer tokens divided by the time of answering, which includes reading the prompt
    reason: str = ""  # why nothing was measured. Then `losses` and `answers` are empty.


Ask = Callable[[Model, list[Question], Progress], Replies]


def backend_of(model: Model, name: str) -> tuple[Ask, str]:
    """The function that asks a model, and the reason for this choice. llama.cpp always reads GGUF files.

    Args:
        name: the backend for folders: `auto`, `transformers` or `vllm`.

    Raises:
        NotInstalled: the requested vllm, or llama.cpp for a GGUF file, is not installed.
        UsageError: vllm was requested, but there is no CUDA or the rows have pictures.
    """
    if model.is_gguf:
        llama_cpp_folder()
        return (ask_llama_cpp if model.pictures is None else ask_pair), "a GGUF file"
    if name == "vllm":
        _require_vllm(model)
    if name == "transformers":
        return ask_transformers, "asked for"
    if model.adapter is not None:
        return ask_transformers, "an adapter that is not merged yet"
    if model.pictures is not None:
        return ask_transformers, "rows with pictures"
    if name == "vllm":
        return ask_vllm, "asked for"
    if _has_vllm() and _has_cuda():
        return ask_vllm, "CUDA is here and vllm is installed"
    return ask_transformers, "vllm is not installed" if not _has_vllm() else "there is no CUDA"


def ask_transformers(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """Asks a folder through transformers (and PEFT), in fp32. Uses CUDA if the weights fit."""
    tokenizer = load_tokenizer(model.path)
    stops, inputs, read = stop_ids(model.path, tokenizer, model.adapter), None, None
    if model.pictures is not None:
        inputs = model.pictures.read_by(tokenizer)
        read = partial(read_model, task="ImageTextToText")
    with reference_model(model.path, model.adapter, read) as network, plain_generation(network):
        rows, highest = len(network.get_input_embeddings().weight), max(max(question.ids) for question in questions)
        if highest >= rows:
            return unmeasured("transformers", unknown_token(rows, highest))
        device = device_of(network)
        network.to(device)
        sums = [
            _loss(network, question, device, inputs)
            for question in _with_progress(questions, lambda share: progress(share / 2))
        ]
        started, answers = time.monotonic(), [list[int]() for _ in questions]
        for group in _with_progress(
            _groups(questions, alone=inputs is not None), lambda share: progress((1 + share) / 2)
        ):
            replies = _answered(network, [questions[number] for number in group], stops, inputs)
            for number, answer in zip(group, replies, strict=True):
                answers[number] = answer
        seconds = time.monotonic() - started
    return Replies("transformers", device, sums, answers, _speed(answers, seconds))


def ask_llama_cpp(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """Asks a GGUF file through llama.cpp on the CPU, in a child process, one row at a time."""
    job = inference.InferenceJob(
        gguf=str(model.path),
        context_tokens=_context(questions),
        threads=physical_cores(),
        scored=_scored(questions),
        prompts=_prompts(questions),
    )
    return _replies("llama.cpp", "cpu", questions, inference.ask(job, progress=_halves(progress)))


def ask_pair(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """Asks a GGUF file and its projector through llama.cpp. As in its server, llama.cpp resizes the pictures, and the
    chat template writes the prompt. Rows without pictures are asked by `ask_llama_cpp`."""
    if model.projector is None:
        return unmeasured("llama.cpp", "it has no projector, so it would answer without the pictures")
    assert model.pictures is not None
    tokenizer = load_tokenizer(Path(model.pictures.image["model"]))
    reader = model.pictures.read_by(tokenizer)
    picture_questions = []
    for question in questions:
        if question.turns is None:
            continue
        if not is_asked_alike(reader, tokenizer, question.turns, question.prompt):
            return unmeasured("llama.cpp", "the chat template does not end a prompt as the rows of the training do")
        text = server_prompt(tokenizer, question.turns, MARKER)
        picture_questions.append(
            picture_answers.PairQuestion(text, question.turns.images, question.answer, question.most)
        )
    if not picture_questions:
        return ask_llama_cpp(model, questions, progress)
    result = picture_answers.ask(
        Pair(model.path, model.projector),
        picture_questions,
        folder=model.pictures.folder,
        threads=physical_cores(),
        progress=lambda done, total, _: progress(done / total),
    )
    others = [question for question in questions if question.turns is None]
    text_replies = ask_llama_cpp(model, others, progress) if others else Replies("llama.cpp", "cpu", [], [], None)
    sums, answers = iter(result.losses), iter(result.answers)
    other_sums, other_answers = iter(text_replies.losses), iter(text_replies.answers)
    return Replies(
        "llama.cpp",
        "cpu",
        [next(other_sums if question.turns is None else sums) for question in questions],
        [next(other_answers if question.turns is None else answers) for question in questions],
        _speed(result.answers, result.answer_seconds),
    )


def ask_vllm(model: Model, questions: list[Question], progress: Progress) -> Replies:
    """Asks a folder through vLLM in fp32, all rows at once. A child process runs it, so the GPU's memory is freed."""
    require_sound(model.path)
    # vLLM writes at least one token after a row, and refuses a context that is even one token longer than the model's.
    context = max(max(len(question.ids) + 1, len(question.prompt) + question.most) for question in questions)
    job = VllmJob(str(model.path), context, _scored(questions), _prompts(questions))
    answer = run_worker("skill_train.evaluate.vllm_worker", job, VllmResult, progress=_halves(progress))
    return _replies("vllm", "cuda", questions, answer)


def _require_vllm(model: Model) -> None:
    if model.pictures is not None:
        raise _not_vllm("rows with pictures are not evaluated with vllm", "vision")
    if not _has_vllm():
        raise not_installed()
    if not _has_cuda():
        raise _not_vllm("vllm needs CUDA, which this machine does not have", "bad_usage")


def _not_vllm(message: str, code: str) -> UsageError:
    expected, hint = "--backend auto or --backend transformers", "run the same command without --backend"
    return UsageError(message, code=code, expected=expected, hint=hint)


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def device_of(network: Any) -> str:
    """`cuda` if the weights fit in fp32, or else `cpu`."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    need = 4 * sum(weight.numel() for weight in network.parameters())
    return "cuda" if torch.cuda.mem_get_info()[0] > _ROOM * need else "cpu"


def _loss(network: Any, question: Question, device: str, inputs: Pictures | None) -> float | None:
    """-log p summed over the trained tokens. Logits of other tokens are not computed if the architecture allows
    that."""
    import torch

    ids = torch.tensor(question.ids, device=device)
    before = torch.tensor([position - 1 for position in question.trained], device=device)
    selection = {"logits_to_keep": before} if network._supports_logits_to_keep() else {}
    pictures = {} if inputs is None else picture_tensors(inputs, question.turns, ids[None])
    with torch.no_grad():
        logits = network(input_ids=ids[None], use_cache=False, **selection, **pictures).logits[0].float()
    rows = logits if selection else logits[before]
    total = float(torch.nn.functional.cross_entropy(rows, ids[before + 1], reduction="sum"))
    return total if math.isfinite(total) else None


def _groups(questions: list[Question], *, alone: bool) -> list[list[int]]:
    """Groups the numbers of questions that are answered together. Their prompts have the same length, because some
    architectures would read the padding. With `alone`, each question is a group."""
    alike: dict[int, list[int]] = {}
    for number, question in enumerate(questions):
        if question.prompt:
            alike.setdefault(len(question.prompt), []).append(number)
    groups = []
    for length, numbers in alike.items():
        most = max(questions[number].most for number in numbers)
        size = 1 if alone else max(1, min(_ROWS_AT_ONCE, _TOKENS_AT_ONCE // (length + most)))
        groups += [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return groups


def _answered(network: Any, questions: list[Question], stops: set[int], inputs: Pictures | None) -> list[list[int]]:
    """The greedy answers to prompts of the same length."""
    import torch

    ids = torch.tensor([question.prompt for question in questions], device=network.device)
    pictures = {} if inputs is None else picture_tensors(inputs, questions[0].turns, ids)
    generated = generate(network, ids, max(question.most for question in questions), stops, **pictures)
    answers: list[list[int]] = generated[:, ids.shape[1] :].tolist()
    return [_until_stop(answer[: question.most], stops) for answer, question in zip(answers, questions, strict=True)]


def generate(network: Any, ids: Any, most: int, stops: set[int], **more: Any) -> Any:
    """The ids [rows, tokens] with at most `most` greedy tokens after them. Rows are padded after their first stop."""
    import torch

    with torch.no_grad():
        return network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
            **more,
        )


def _until_stop(answer: list[int], stops: set[int]) -> list[int]:
    """The answer up to its first stop token, which is included."""
    return answer[: next((at + 1 for at, token in enumerate(answer) if token in stops), len(answer))]


def _context(questions: list[Question]) -> int:
    return max(max(len(question.ids), len(question.prompt) + question.most) for question in questions) + 8


def _scored(questions: list[Question]) -> list[Scored]:
    return [Scored(question.ids, question.trained) for question in questions]


def _prompts(questions: list[Question]) -> list[Prompt]:
    return [Prompt(question.prompt, question.most) for question in questions if question.prompt]


def _replies(
    backend: str, device: str, questions: list[Question], result: inference.InferenceResult | VllmResult
) -> Replies:
    """The replies of a worker, with an empty answer for each question without a prompt."""
    remaining = iter(result.answers)
    answers = [next(remaining) if question.prompt else [] for question in questions]
    return Replies(backend, device, result.losses, answers, _speed(result.answers, result.answer_seconds))


def _halves(progress: Progress) -> Bar:
    """The progress of a worker that computes the losses in the first half and the answers in the second."""
    return lambda done, total, text: progress(done / total / 2 + (0.5 if text == "answering" else 0.0))


def _with_progress(items: list[_Item], progress: Progress) -> Iterator[_Item]:
    """Yields the items. Reports the share of finished items before each of them."""
    for number, item in enumerate(items):
        progress(number / len(items))
        yield item


def _speed(answers: list[list[int]], seconds: float) -> float | None:
    tokens = sum(map(len, answers))
    return tokens / seconds if tokens and seconds else None


def unmeasured(backend: str, reason: str) -> Replies:
    return Replies(backend, "", [], [], None, reason)


def unknown_token(size: int, highest: int) -> str:
    return f"it knows {size} tokens, and the rows use number {highest}"
