"""Child process: answers all requests of `verify` or `evaluate` about one GGUF file in one load of llama.cpp."""

import time
from pathlib import Path
from typing import Any

from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.inference import InferenceJob, InferenceResult, Prompt, Scored, Sequence
from skill_train.llama.llama_cpp import Llama, loaded
from skill_train.llama.logit_distance import (
    Distance,
    ShareFigures,
    TokenFigures,
    TuningShare,
    change_of,
    distance_of,
    finite,
    join,
    losses,
    normalized,
    summarize,
    summarize_change,
)


def run(job: InferenceJob) -> InferenceResult:
    lora, sequences = Path(job.lora) if job.lora else None, len(job.prompts) if job.together else 1
    size = {"context_tokens": job.context_tokens, "threads": job.threads, "sequences": sequences}
    with loaded(Path(job.gguf), lora=lora, **size) as llama:
        return _answered(llama, job)


def _answered(llama: Llama, job: InferenceJob) -> InferenceResult:
    if job.logits is not None:
        _write_logits(llama, job.sequences, job.logits)
    figures, trained_kl, change = _compare(llama, job) if job.tuned is not None else (None, None, None)
    sums, started = _losses(llama, job.scored), time.monotonic()
    answers = llama.greedy_together(job.prompts) if job.together else _answers(llama, job.prompts)
    return InferenceResult(
        facts=llama.facts(),
        plain=[llama.tokenize(text, add_special=False) for text in job.plain],
        special=[llama.tokenize(text, add_special=True) for text in job.special],
        figures=figures,
        trained_kl=trained_kl,
        change=change,
        losses=sums,
        answers=answers,
        answer_seconds=time.monotonic() - started,
    )


def _write_logits(llama: Llama, sequences: list[Sequence], file: str) -> None:
    """Writes the logits of all tokens, float32 [rows, vocabulary]."""
    with open(file, "wb") as out:
        for number, sequence in enumerate(sequences):
            report_progress(number, len(sequences), "logits of the unquantized file")
            for _, logits in llama.logits(sequence.ids):
                out.write(logits.astype("<f4", copy=False).tobytes())


def _answers(llama: Llama, prompts: list[Prompt]) -> list[list[int]]:
    answers = []
    for number, prompt in enumerate(prompts):
        report_progress(number, len(prompts), "answering")
        if prompt.expected is None:
            answers.append(llama.greedy(prompt.ids, most=prompt.most))
        else:
            answers.append(llama.greedy_like(prompt.ids, prompt.expected, most=prompt.most))
    return answers


def _losses(llama: Llama, scored: list[Scored]) -> list[float | None]:
    """For each sequence, the sum of -log p in nats over its trained tokens; None when it is not a finite number."""
    sums = []
    for number, sequence in enumerate(scored):
        report_progress(number, len(scored), "losses")
        sums.append(_loss(llama, sequence.ids, sequence.trained))
    return sums


def _loss(llama: Llama, ids: list[int], trained: list[int]) -> float | None:
    total, scored = 0.0, set(trained)
    for start, logits in llama.logits(ids):
        # The row at position p predicts the token at p + 1.
        here = [row for row in range(len(logits)) if start + row + 1 in scored]
        total += float(losses(logits[here], [ids[start + row + 1] for row in here]).sum())
    return finite(total)


def _compare(llama: Llama, job: InferenceJob) -> tuple[Distance | None, float | None, TuningShare | None]:
    """The distance from the tuned reference, the mean divergence from the trained model in nats, and the share of the
    tuning. The share is computed from the first `base_rows` rows; None without a base."""
    import numpy as np

    figures, to_trained, shares = list[TokenFigures](), list[TokenFigures](), list[ShareFigures]()
    tuned, trained, base = (_rows(file, job.vocabulary) for file in (job.tuned, job.trained, job.base))
    columns = min(llama.tokens, job.vocabulary or 0)  # a padded vocabulary may be longer on one side
    for number, sequence in enumerate(job.sequences):
        report_progress(number, len(job.sequences), "comparing logits")
        ids, first = sequence.ids, sequence.first
        for start, logits in llama.logits(ids):
            following = np.asarray(ids[start + 1 : start + 1 + len(logits)])  # nothing follows the last token
            other = logits[: len(following), :columns]
            rows = slice(first + start, first + start + len(following))
            if not len(following):
                continue
            there = {"tuned": tuned, "trained": trained, "base": base if rows.stop <= job.base_rows else None}
            reference = {name: each[rows, :columns] for name, each in there.items() if each is not None}
            for part, log_p in normalized(other=other, **reference):
                figures.append(distance_of(log_p["tuned"], log_p["other"], following[part]))
                if "trained" in log_p:
                    to_trained.append(distance_of(log_p["trained"], log_p["other"], following[part]))
                if "base" in log_p:
                    shares.append(change_of(log_p["tuned"], log_p["base"], log_p["other"]))
    distance = summarize(join(figures)) if figures else None
    # Without a rounded merge in between, the file was made from the trained model itself.
    to = summarize(join(to_trained)) if to_trained else distance
    return distance, to["mean_kl"] if to else None, summarize_change(shares) if shares else None


def _rows(file: str | None, vocabulary: int | None) -> Any:
    import numpy as np

    if file is None or vocabulary is None:
        return None
    return np.memmap(file, dtype=np.float32, mode="r").reshape(-1, vocabulary)


if __name__ == "__main__":
    worker_main(run, InferenceJob)
