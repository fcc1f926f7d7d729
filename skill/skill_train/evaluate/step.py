"""Measures models on held-out rows: loss and perplexity on the expected answers, and scores of the models' own answers.

Every model gets the same token ids, so figures can be compared row by row. The step measures and does not judge: a bad
score is a result, not an error.
"""

import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import FileDigest, digests, file_digest
from skill_train.core.errors import UsageError
from skill_train.core.files import require_writable
from skill_train.core.memory import peak_memory_bytes
from skill_train.evaluate.backends import Model, Question, Replies, backend_of, unknown_token, unmeasured
from skill_train.evaluate.figures import ModelReplies, differences, figures
from skill_train.evaluate.pictures import require_pictures, turns_of
from skill_train.evaluate.scorer_worker import Reply
from skill_train.evaluate.scores import Scoring, exact, scores
from skill_train.llama.gguf_header import read_model_file
from skill_train.model.config import text_config
from skill_train.model.folder import read_config
from skill_train.model.sidecar_files import model_digests
from skill_train.program.chat.labels import IGNORED
from skill_train.reference.load import context_length, load_tokenizer
from skill_train.run import evaluate_record, records
from skill_train.run.folder import StepResult, versions
from skill_train.run.train_record import Row

ROOM = 8  # tokens that an answer may be longer than the expected one
_LONGEST_TEXT = 1000  # characters of a text that the record keeps
_VERSIONS = ("transformers", "torch", "peft", "llama-cpp-python", "vllm")


@dataclass(frozen=True)
class EvaluateRequest:
    """Models, the rows to ask them, and how replies are scored."""

    models: list[Model]  # the base if there is one, then the tuned model, then files made from it; names are unique
    rows: list[Row]  # the rows of `held_out.jsonl`
    loss_on: str  # the field of the recipe. With `all`, rows have no separate answer, so none is asked for.
    most_rows: int  # how many rows to take, spread evenly over the file
    tokenizer_of: Path  # the folder whose tokenizer turns ids into text
    scoring: Scoring
    backend: str  # the backend for folders: `auto`, `transformers` or `vllm`
    record: Path


def evaluate(request: EvaluateRequest, *, progress: Bar, warn: Warn) -> StepResult[evaluate_record.Evaluation]:
    """Measures the models and writes `record`. A record with the same inputs, options and versions is reused.

    Raises:
        UsageError: the user's scorer is wrong, or vllm was requested without CUDA.
        NotInstalled: a library is missing.
        VerificationFailed: llama.cpp refuses a file.
    """
    started = time.monotonic()
    rows = evaluate_record.spread(_askable(request, warn), request.most_rows)
    scoring, context = request.scoring, context_length(read_config(request.tokenizer_of))
    row_questions = questions(rows, loss_on=request.loss_on, room=_room(scoring), context=context)
    _warn(row_questions, request.loss_on, warn)
    inputs, installed = _inputs(request.models, rows, scoring), versions(*_VERSIONS)
    options = evaluate_record.EvaluationOptions(score=scoring.name, pattern=scoring.pattern, backend=request.backend)
    if request.record.is_file():
        earlier = evaluate_record.read(request.record)
        if (earlier.inputs, earlier.options, earlier.versions) == (inputs, options, installed):
            if file := scoring.scorer:
                warn(
                    "reused",
                    f"files that {file.name} reads were not compared; to score again, move {request.record} away",
                )
            return StepResult(earlier, reused=True)
    require_writable(request.record.parent)
    for model in request.models:  # refuses a model that cannot be run, before minutes are spent on others
        backend_of(model, request.backend)
    tokenizer = load_tokenizer(request.tokenizer_of)
    _try_scorer(scoring, row_questions, tokenizer)
    ask = partial(measure, tokenizer=tokenizer, scoring=scoring, backend=request.backend)
    measured = [
        ask(model, row_questions, progress=_model_progress(progress, n, request.models))
        for n, model in enumerate(request.models)
    ]
    evaluation = evaluate_record.Evaluation(
        step=request.record.stem,
        inputs=inputs,
        options=options,
        versions=installed,
        rows=len(rows),
        asked=sum(bool(question.prompt) for question in row_questions),
        answer_tokens=sum(len(question.trained) for question in row_questions),
        score=None if scoring.name == "exact" else scoring.name,
        models=[figures(judged, row_questions) for judged in measured],
        differences=differences(measured, row_questions),
        answers=_answers(rows, row_questions, measured, tokenizer),
        seconds=round(time.monotonic() - started, 2),
        peak_memory_bytes=peak_memory_bytes(),
        peak_memory_children_bytes=peak_memory_bytes(children=True),
        finished_at=records.timestamp(),
    )
    records.write(request.record, evaluation)
    return StepResult(evaluation)


def measure(
    model: Model, questions: list[Question], *, tokenizer: Any, scoring: Scoring, backend: str, progress: Bar
) -> ModelReplies:
    """One model's replies, with the scores of its answers."""
    ask, why = backend_of(model, backend)
    if other := _other_tokens(model, questions, tokenizer):
        replies = unmeasured("llama.cpp", other)
    else:
        replies = ask(model, questions, lambda share: progress(share, 1, model.name))
    texts = _texts(questions, replies, tokenizer)
    own = scores(scoring, texts) if scoring.name != "exact" and texts else []
    right = _exact(questions, replies, texts, tokenizer)
    return ModelReplies(model, why, replies, right, own, [reply["answer"] for reply in texts])


def _other_tokens(model: Model, questions: list[Question], tokenizer: Any) -> str:
    """A sentence if a GGUF file has another vocabulary than the base, in which the ids of the rows are other words;
    otherwise empty. The converter writes a few tokens in another way."""
    if not model.is_gguf:
        return ""
    texts, used = read_model_file(model.path).tokens, sorted({token for each in questions for token in each.ids})
    if used[-1] >= len(texts):
        return unknown_token(len(texts), used[-1])
    own = tokenizer.convert_ids_to_tokens(used)
    others = sum(texts[token] != text for token, text in zip(used, own, strict=True))
    return (
        f"it has other texts than the base for {others} of the rows' {len(used)} tokens"
        if 2 * others > len(used)
        else ""
    )


def _exact(questions: list[Question], replies: Replies, texts: list[Reply], tokenizer: Any) -> list[float]:
    """1 for each answer whose text and inner special tokens equal the expected ones, or else 0."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def inside(ids: list[int]) -> list[int]:
        """The special tokens before the last token of text, such as one that begins a tool call."""
        texts_at = [at for at, token in enumerate(ids) if token not in special and tokenizer.decode(token).strip()]
        return [token for token in ids[: max(texts_at, default=0)] if token in special]

    pairs = zip(questions, replies.answers, strict=bool(replies.answers))
    same = [inside(ids) == inside(question.answer) for question, ids in pairs if question.prompt]
    return [exact(reply) * alike for reply, alike in zip(texts, same, strict=True)]


def questions(rows: list[Row], *, loss_on: str, room: int, context: int | None) -> list[Question]:
    """Turns rows into questions. A row that is plain text, was cut, or has a prompt that fills the context is measured
    by its loss only: its question has no prompt.

    Args:
        room: how many tokens an answer may be longer than the row's own answer.
        context: the most tokens that the model takes; None if unknown.
    """
    return [_question(row, loss_on, room, context) for row in rows]


def _question(row: Row, loss_on: str, room: int, context: int | None) -> Question:
    ids, labels = row["input_ids"], row["labels"]
    trained = [at for at, label in enumerate(labels) if label != IGNORED and at > 0]
    if row["kind"] == "text" or loss_on == "all" or row["truncated"]:
        return Question(ids, trained, [], [], 0)
    end = trained[-1] + 1
    start = next((at + 1 for at in range(end - 1, -1, -1) if labels[at] == IGNORED), 0)
    about = turns_of(row)
    if about is None and context is not None and start >= context:
        return Question(ids, trained, [], [], 0)  # no room for an answer
    most = end - start + room
    if context is not None:
        most = min(most, context - start)
    if about is not None:  # llama.cpp is asked for this answer alone
        trained = [at for at in trained if at >= start]
    return Question(ids, trained, ids[:start], ids[start:end], most, about)


def _askable(request: EvaluateRequest, warn: Warn) -> list[Row]:
    """Leaves out rows that have pictures but no question, with a warning. Returns the other rows.

    Raises:
        UsageError: no row is left, or a picture is missing or was changed.
    """
    rows = [row for row in request.rows if evaluate_record.can_be_asked(row, request.loss_on)]
    left_out = len(request.rows) - len(rows)
    if left_out and not rows:
        raise UsageError(
            "no held-out row asks something about its pictures",
            code="vision",
            expected="rows that max_length does not cut, and a recipe with loss_on: assistant",
            got=f"{left_out} rows, all cut" if request.loss_on != "all" else "loss_on: all",
            hint="skill-train verify RUN, which compares the files with the model on these pictures",
        )
    if left_out:
        why = "have no question, because of loss_on: all" if request.loss_on == "all" else "were cut by max_length"
        warn("not_asked", f"{left_out} rows with pictures {why}: they are left out")
    if any(row.get("images") for row in rows):
        require_pictures(rows, request.record.parent)
    return rows


def _room(scoring: Scoring) -> int:
    """How many tokens an answer may be longer than the expected one. Exact match needs few, because every longer answer
    is wrong. Another score may find its match later in the answer."""
    return ROOM if scoring.name == "exact" else 8 * ROOM


def _texts(questions: list[Question], replies: Replies, tokenizer: Any) -> list[Reply]:
    """The replies to the questions with a prompt; empty if the model was not measured."""

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    return [
        Reply(prompt=_asked_text(question, tokenizer), answer=text(ids), expected=text(question.answer))
        for question, ids in zip(questions, replies.answers, strict=bool(replies.answers))
        if question.prompt
    ]


def _asked_text(question: Question, tokenizer: Any) -> str:
    """The text of the prompt. The many equal tokens of a picture are written as one."""
    ids = question.prompt
    if question.turns is not None:
        ids = [token for token, _ in itertools.groupby(ids)]
    return str(tokenizer.decode(ids))


def _try_scorer(scoring: Scoring, questions: list[Question], tokenizer: Any) -> None:
    """Runs the user's scorer on one expected answer, before minutes are spent on the models."""
    first = next((question for question in questions if question.prompt), None)
    if scoring.scorer is not None and first is not None:
        scores(scoring, _texts([first], Replies("", "", [], [first.answer], None), tokenizer))


def _warn(questions: list[Question], loss_on: str, warn: Warn) -> None:
    able = sum(bool(question.prompt) for question in questions)
    if not able:
        why = "the recipe trains on whole texts" if loss_on == "all" else "every held-out row is a text, or was cut"
        warn("no_questions", f"{why}, so no answers are compared: loss and perplexity only")
    elif able < len(questions):
        warn(
            "not_asked",
            f"{len(questions) - able} of {len(questions)} rows are texts or were cut: they count for the loss only",
        )
    if few := evaluate_record.few_rows(len(questions)):
        warn("few_rows", few)


def _model_progress(progress: Bar, number: int, models: list[Model]) -> Bar:
    return lambda done, total, text: progress(number + done / total, len(models), text)


def _answers(
    rows: list[Row], questions: list[Question], measured: list[ModelReplies], tokenizer: Any
) -> list[evaluate_record.AnsweredRow]:
    able = [(row["line"], question) for row, question in zip(rows, questions, strict=True) if question.prompt]
    return [
        evaluate_record.AnsweredRow(
            line=line,
            prompt=end_of(_asked_text(question, tokenizer), _LONGEST_TEXT),
            expected=str(tokenizer.decode(question.answer, skip_special_tokens=True)).strip()[:_LONGEST_TEXT],
            answers={judged.model.name: judged.texts[place][:_LONGEST_TEXT] for judged in measured if judged.texts},
            exact={judged.model.name: bool(judged.exact[place]) for judged in measured if judged.texts},
            scores={judged.model.name: judged.scores[place] for judged in measured if judged.scores},
        )
        for place, (line, question) in enumerate(able)
    ]


def end_of(text: str, most: int) -> str:
    """The end of a prompt, with an ellipsis if its front was cut."""
    return text if len(text) <= most else "…" + text[1 - most :]


def blind(models: list[evaluate_record.ModelFigures], base: Path) -> str:
    """A sentence that names the models that are worse than blind guessing; empty if there are none."""
    config = read_config(base)
    return evaluate_record.blind(models, text_config(config).get("vocab_size") or config.get("vocab_size"))


def _inputs(models: list[Model], rows: list[Row], scoring: Scoring) -> evaluate_record.EvaluationInputs:
    folders = {model.path: model.name for model in reversed(models)}
    read: dict[str, evaluate_record.ModelInputs] = {}
    for model in models:
        same, adapter = folders[model.path], model.adapter or model.merged
        content = _content(model.path) if same == model.name else f"the folder of {same}"
        if model.projector is not None and isinstance(content, dict):
            content["projector"] = file_digest(model.projector)
        applied = digests(adapter) if adapter else None
        read[model.name] = evaluate_record.ModelInputs(content, applied, model.perhaps_trained)
    return evaluate_record.EvaluationInputs(models=read, rows=evaluate_record.rows_digest(rows), scorer=scoring.digest)


def _content(path: Path) -> dict[str, int | str | FileDigest]:
    if not path.is_file():
        return {**model_digests(path)}
    digest = file_digest(path)
    return {"bytes": digest["bytes"], "sha256": digest["sha256"]}
