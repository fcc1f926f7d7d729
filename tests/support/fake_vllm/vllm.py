"""vLLM's names, as skill_train.evaluate.vllm_worker uses them, over transformers on the CPU: vLLM itself needs CUDA.

Only what that worker may ask for is taken: another argument is an error. Shapes are those of vllm/outputs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    detokenize: bool
    prompt_logprobs: int | None = None


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    token_ids: list[int]


@dataclass
class RequestOutput:
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[Completion]


class LLM:
    def __init__(self, *, model: str, dtype: str, max_model_len: int, trust_remote_code: bool, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        assert not trust_remote_code
        self.longest = max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        if max_model_len > self.model.config.max_position_embeddings:
            raise ValueError(
                f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len"
            )

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [self._one(one["prompt_token_ids"], params) for one, params in zip(prompts, each, strict=True)]

    def _one(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        import torch

        assert len(ids) + params.max_tokens <= self.longest and params.temperature == 0
        prompt = torch.tensor([ids])
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=params.max_tokens
        )
        return RequestOutput(self._of_prompt(prompt, params), [Completion(out[0, len(ids) :].tolist())])

    def _of_prompt(self, prompt: Any, params: SamplingParams) -> list[dict[int, Logprob] | None] | None:
        import torch

        if params.prompt_logprobs is None:
            return None
        with torch.no_grad():
            log_p = torch.log_softmax(self.model(prompt).logits[0], dim=-1)
        following = prompt[0, 1:].tolist()
        return [None, *({token: Logprob(float(log_p[at, token]))} for at, token in enumerate(following))]
