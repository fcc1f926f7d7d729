"""Exact match on a held-out split: greedy answers of a model, or of a GGUF file, against the answers of the data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train import native
from skill_train.reference import load_tokenizer, reference_model

_IGNORED = -100


@dataclass(frozen=True)
class Score:
    """Share of rows answered to the letter, 0 to 1, on `rows` rows, and the speed of generation, one row at a time."""

    exact_match: float
    rows: int
    tokens_per_second: float | None


def score_model(folder: Path, *, adapter: Path | None, rows: list[dict[str, Any]]) -> Score:
    """Scores a model folder, with an adapter on top when one is given, through transformers in fp32 on the CPU."""
    import torch

    tokenizer = load_tokenizer(folder)
    answers, made, seconds = [], 0, 0.0
    with reference_model(folder, adapter) as model:
        for row in rows:
            prompt, wanted = _split(row)
            ids, started = torch.tensor([prompt]), time.monotonic()
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_most(wanted),
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
            answers.append(out[0, len(prompt) :].tolist())
            seconds += time.monotonic() - started
            made += len(answers[-1])
    return _score(tokenizer, rows, answers, made / seconds if seconds else None)


def score_gguf(file: Path, *, tokenizer_of: Path, rows: list[dict[str, Any]]) -> Score:
    """Scores a GGUF file through llama.cpp in a child process; `tokenizer_of` only turns ids into text."""
    prompts: list[dict[str, Any]] = [{"ids": prompt, "most": _most(wanted)} for prompt, wanted in map(_split, rows)]
    longest = max(len(prompt["ids"]) + prompt["most"] for prompt in prompts)
    job: dict[str, Any] = {"gguf": str(file), "context_tokens": longest, "threads": 0, "vocabulary": None}
    job |= {"plain": [], "special": [], "sequences": [], "tuned": None, "base": None, "base_rows": 0}
    result = native.run_worker("skill_train.inference_worker", job | {"prompts": prompts})
    speed = sum(map(len, result["answers"])) / result["answer_seconds"] if result["answer_seconds"] else None
    return _score(load_tokenizer(tokenizer_of), rows, result["answers"], speed)


def _split(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt's ids and the answer's, of the first trained span."""
    labels = row["labels"]
    first = next(i for i, label in enumerate(labels) if label != _IGNORED)
    last = next((i for i in range(first, len(labels)) if labels[i] == _IGNORED), len(labels))
    return row["input_ids"][:first], row["input_ids"][first:last]


def _most(wanted: list[int]) -> int:
    return len(wanted) + 8  # room to run on, which is an answer of its own and a wrong one


def _score(tokenizer: Any, rows: list[dict[str, Any]], answers: list[list[int]], speed: float | None) -> Score:
    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    right = sum(text(answer) == text(_split(row)[1]) for row, answer in zip(rows, answers, strict=True))
    return Score(exact_match=right / len(rows), rows=len(rows), tokens_per_second=speed)
