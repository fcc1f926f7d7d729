"""Small base models and the check that every merge test makes. Vocabularies of 128 made-up tokens: no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import step_records
import tiny
from skill_train.merge.step import MergeRequest, merge

ROWS = [{"input_ids": [(7 * n * n + 3 * n + row) % 120 for n in range(60)]} for row in range(4)]


def llama(folder: Path, *, tied: bool = False, bias: bool = False, shards: str = "5GB", dtype: str = "float32") -> Path:
    """A two-layer Llama with random weights of ordinary size."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, attention_bias=bias)
    return save(config, folder, shards=shards, dtype=dtype)


def gpt2(folder: Path) -> Path:
    from transformers import GPT2Config

    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return save(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0), folder)


def save(config: Any, folder: Path, *, shards: str = "5GB", dtype: str = "float32") -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            one_d = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
            weight.copy_(one_d if noise.dim() == 1 else noise / noise.shape[-1] ** 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(str(folder), max_shard_size=shards)
    return folder


def run(base: Path, adapter: Path, work: Path, **options: Any) -> dict[str, Any]:
    """`merge` into `work/merged` with the record beside it, warnings under `warned`, with words under `said`."""
    warned: list[str] = []
    said: list[tuple[str, str]] = []
    settings: dict[str, Any] = {"rows": ROWS, "dtype": None} | options
    merged = merge(
        MergeRequest(base=base, adapter=adapter, out=work / "merged", record=work / "merge.json", **settings),
        progress=lambda done, total, text: None,
        warn=lambda code, message: (warned.append(code), said.append((code, message))),
    )
    return step_records.as_dict(merged) | {"warned": warned, "said": said}


def logits(folder: Path, adapter: Path | None = None, *, resize: int | None = None) -> Any:
    """Logits of ROWS by transformers and PEFT themselves."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([row["input_ids"] for row in ROWS])).logits


def peft_merged(base: Path, adapter: Path) -> dict[str, Any]:
    """The weights of PEFT's own merge, in fp32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True).state_dict()


def weights(folder: Path) -> dict[str, Any]:
    """All tensors of a folder, by safetensors' own reader."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adapter(base: Path, folder: Path, **options: Any) -> Path:
    return tiny.adapter(base, folder, **options)
