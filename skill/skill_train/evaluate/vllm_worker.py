"""Child process: losses and greedy answers of one model folder by vLLM, which holds the GPU's memory until it ends.

Written for vllm.LLM and vllm.SamplingParams as in vLLM's repository (vllm/sampling_params.py, vllm/outputs.py, read
2026-08). Prompts are token ids. `prompt_logprobs=0` gives the log-probability of each token of the prompt; the first
token has None.
"""

import math
import time
from typing import Any

import msgspec

from skill_train.core.errors import NotInstalled
from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.inference import Prompt, Scored


class VllmJob(msgspec.Struct, frozen=True):
    folder: str
    context_tokens: int
    scored: list[Scored]
    prompts: list[Prompt]


class VllmResult(msgspec.Struct, frozen=True):
    """The losses and answers, in the order of the job."""

    losses: list[float | None]  # the sum of -log p in nats over each row's trained tokens; None if it is not finite
    answers: list[list[int]]
    answer_seconds: float


def run(job: VllmJob) -> VllmResult:
    try:
        import vllm
    except ImportError:
        raise not_installed() from None
    model = vllm.LLM(
        model=job.folder,
        dtype="float32",  # "auto" would compute in the stored type
        max_model_len=job.context_tokens,
        trust_remote_code=False,
        seed=0,
    )
    report_progress(0, 1, "losses")
    losses = _losses(vllm, model, job.scored)
    report_progress(0, 1, "answering")
    started = time.monotonic()
    answers = _answers(vllm, model, job.prompts)
    return VllmResult(losses, answers, time.monotonic() - started)


def _losses(vllm: Any, model: Any, scored: list[Scored]) -> list[float | None]:
    """For each sequence, the sum of -log p in nats over its trained tokens."""
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": row.ids} for row in scored], sampling, use_tqdm=False)
    sums = []
    for row, output in zip(scored, outputs, strict=True):
        of_prompt = output.prompt_logprobs
        total = -sum(of_prompt[at][row.ids[at]].logprob for at in row.trained)
        sums.append(total if math.isfinite(total) else None)
    return sums


def _answers(vllm: Any, model: Any, prompts: list[Prompt]) -> list[list[int]]:
    if not prompts:
        return []
    sampling = [vllm.SamplingParams(temperature=0.0, max_tokens=prompt.most, detokenize=False) for prompt in prompts]
    outputs = model.generate([{"prompt_token_ids": prompt.ids} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def not_installed() -> NotInstalled:
    return NotInstalled("vllm is not installed", code="missing_package", hint="pip install vllm")


if __name__ == "__main__":
    worker_main(run, VllmJob)
