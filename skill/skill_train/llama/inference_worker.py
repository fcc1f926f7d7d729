"""Child process: answers all questions of `verify` and `evaluate` about one GGUF file with a single load of llama.cpp.

Job: {"gguf", "lora" (an adapter's file, if any), "context_tokens", "threads",
      "vocabulary" (size of the reference's; None without logits),
      "plain": [texts], "special": [texts], "sequences": [{"ids", "first"}], "tuned": FILE, "base": FILE | None,
      "trained" (what was trained, where `tuned` is that model rounded; else None), "base_rows",
      "prompts": [{"ids", "most", "expected"}], "scored": [{"ids", "trained": [positions]}]}
Logits of the reference lie in files, float32 [rows, vocabulary]; `first` is a sequence's first row. They are compared
here, so that full logits never travel. With `expected` an answer ends with the first token that is another,
or that follows it.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.llama_cpp import Llama, loaded
from skill_train.llama.logit_distance import (
    ShareFigures,
    compare_change,
    compare_logits,
    join,
    losses,
    summarize,
    summarize_change,
)


def run(job: dict[str, Any]) -> dict[str, Any]:
    lora = Path(job["lora"]) if job.get("lora") else None
    with loaded(Path(job["gguf"]), context_tokens=job["context_tokens"], threads=job["threads"], lora=lora) as llama:
        return {
            "facts": llama.facts(),
            "plain": [llama.tokenize(text, add_special=False) for text in job["plain"]],
            "special": [llama.tokenize(text, add_special=True) for text in job["special"]],
            **_compare(llama, job),
            "losses": _losses(llama, job["scored"]),
            **_answers(llama, job["prompts"]),
        }


def _answers(llama: Llama, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    started, answers = time.monotonic(), []
    for number, prompt in enumerate(prompts):
        report_progress(number, len(prompts), "answering")
        answers.append(_answer(llama, prompt["ids"], prompt["most"], prompt.get("expected")))
    return {"answers": answers, "answer_seconds": time.monotonic() - started}


def _answer(llama: Llama, ids: list[int], most: int, expected: list[int] | None) -> list[int]:
    return llama.greedy(ids, most=most) if expected is None else llama.greedy_like(ids, expected, most=most)


def _losses(llama: Llama, scored: list[dict[str, Any]]) -> list[float | None]:
    """For each sequence, the sum of -log p in nats over its trained tokens; None when it is not a finite number."""
    sums = []
    for number, sequence in enumerate(scored):
        report_progress(number, len(scored), "losses")
        sums.append(_loss(llama, sequence["ids"], sequence["trained"]))
    return sums


def _loss(llama: Llama, ids: list[int], trained: list[int]) -> float | None:
    total, wanted = 0.0, set(trained)
    for start, logits in llama.logits(ids):
        # The row at position p foretells the token at p + 1.
        here = [row for row in range(len(logits)) if start + row + 1 in wanted]
        total += float(losses(logits[here], [ids[start + row + 1] for row in here]).sum())
    return total if math.isfinite(total) else None


def _compare(llama: Llama, job: dict[str, Any]) -> dict[str, Any]:
    """The figures against the tuned reference and, for the first rows, the share of the tuning."""
    sequences, figures, shares = job["sequences"], [], []
    trained, to_trained = _rows(job.get("trained"), job["vocabulary"]), []
    tuned, base = _rows(job["tuned"], job["vocabulary"]), _rows(job["base"], job["vocabulary"])
    columns = min(llama.tokens, job["vocabulary"] or 0)  # a padded vocabulary may be longer on one side
    for number, sequence in enumerate(sequences):
        report_progress(number, len(sequences), "comparing logits")
        ids, first = sequence["ids"], sequence["first"]
        for start, logits in llama.logits(ids):
            following = ids[start + 1 : start + 1 + len(logits)]  # nothing follows the last token
            other = logits[: len(following), :columns]
            rows = slice(first + start, first + start + len(following))
            if following:
                figures.append(compare_logits(tuned[rows, :columns], other, following))
                if trained is not None:
                    to_trained.append(compare_logits(trained[rows, :columns], other, following))
                shares += _shares(tuned, base, other, rows, job["base_rows"])
    found = summarize(join(figures)) if figures else None
    if found is not None:  # where no merge was rounded between them, what was trained is what the file was made of
        found["trained_kl"] = summarize(join(to_trained))["mean_kl"] if to_trained else found["mean_kl"]
    return {
        "figures": found,
        "change": summarize_change(shares) if shares else None,
    }


def _shares(tuned: Any, base: Any, other: Any, rows: slice, base_rows: int) -> list[ShareFigures]:
    if base is None or rows.stop > base_rows:
        return []
    columns = slice(0, other.shape[1])
    return [compare_change(tuned[rows, columns], base[rows, columns], other)]


def _rows(file: str | None, vocabulary: int | None) -> Any:
    import numpy as np

    if file is None or vocabulary is None:
        return None
    return np.memmap(file, dtype=np.float32, mode="r").reshape(-1, vocabulary)


if __name__ == "__main__":
    worker_main(run)
