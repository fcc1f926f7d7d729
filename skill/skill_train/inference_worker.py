"""Child process: everything that `verify` asks of llama.cpp about one GGUF file, in one load.

Job: {"gguf", "context_tokens", "threads", "vocabulary" (size of the reference's; None without logits),
      "plain": [texts], "special": [texts], "sequences": [{"ids", "first"}], "tuned": FILE, "base": FILE | None,
      "base_rows", "prompts": [{"ids", "most"}]}
Logits of the reference lie in files, float32 [rows, vocabulary]; `first` is a sequence's first row. They are compared
here, so that full logits never travel.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from skill_train.compare import ShareFigures, compare_change, compare_logits, join, summarize, summarize_change
from skill_train.llama_api import Llama, loaded
from skill_train.native import report_progress, worker_main


def run(job: dict[str, Any]) -> dict[str, Any]:
    with loaded(Path(job["gguf"]), context_tokens=job["context_tokens"], threads=job["threads"]) as llama:
        return {
            "facts": llama.facts(),
            "plain": [llama.tokenize(text, add_special=False) for text in job["plain"]],
            "special": [llama.tokenize(text, add_special=True) for text in job["special"]],
            **_compare(llama, job),
            **_answers(llama, job["prompts"]),
        }


def _answers(llama: Llama, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    started = time.monotonic()
    answers = [llama.greedy(prompt["ids"], most=prompt["most"]) for prompt in prompts]
    return {"answers": answers, "answer_seconds": time.monotonic() - started}


def _compare(llama: Llama, job: dict[str, Any]) -> dict[str, Any]:
    """Figures against the tuned reference and, on the first rows, the share of the tuning."""
    sequences, figures, shares = job["sequences"], [], []
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
                shares += _shares(tuned, base, other, rows, job["base_rows"])
    return {
        "figures": summarize(join(figures)) if figures else None,
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
