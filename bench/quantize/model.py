"""Makes the model that the quantizers are measured on, and its texts, from nothing but this repository.

It is a Llama of 10 million weights, trained from random weights for some minutes on letters to a help desk and on
questions about them (scripts/make_demo.py writes both, and the tokenizer). Every row length is divisible by 256.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import make_demo  # noqa: E402

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
BATCH = 4  # conversations of about 150 tokens
FASTEST, WARM_UP = 1.5e-3, 30
MADE = "made.json"  # in the folder: how it was trained


def write_model(folder: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """A model folder. Returns the parameters, the loss in nats a token at the end, and the seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    tokenizer = make_demo.write_tokenizer(folder, seed=seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPE,
        vocab_size=make_demo.VOCAB_SIZE,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FASTEST, betas=(0.9, 0.95), weight_decay=0.05)
    draw, started, losses = random.Random(seed), time.monotonic(), list[float]()
    for step in range(steps):
        pace = min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = FASTEST * pace
        ids, labels = _batch(texts(tokenizer, draw, BATCH))
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if step % 20 == 0:
            print(f"step {step}: {losses[-1]:.3f}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    made = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": steps,
        "loss": round(sum(losses[-20:]) / len(losses[-20:]), 3),
        "seconds": round(time.monotonic() - started, 1),
    }
    (folder / MADE).write_text(json.dumps(made) + "\n")
    return made


def texts(tokenizer: Any, draw: random.Random, count: int) -> list[list[int]]:
    """Conversations about letters, through the chat template, as token ids."""
    rendered = (tokenizer.apply_chat_template(make_demo.lesson(draw), tokenize=False) for _ in range(count))
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def own_texts(tokenizer: Any, seed: int, tokens: int) -> list[list[int]]:
    """So many tokens of conversations that this seed draws."""
    draw, chosen = random.Random(seed), list[list[int]]()
    while sum(map(len, chosen)) < tokens:
        chosen += texts(tokenizer, draw, 1)
    return chosen


def foreign_texts(tokenizer: Any, tokens: int, *, length: int = 256) -> list[list[int]]:
    """So many tokens of another kind of text: the pages in references/."""
    pages = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "references").glob("*.md")))
    ids = tokenizer(pages, add_special_tokens=False)["input_ids"][:tokens]
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _batch(rows: list[list[int]]) -> tuple[Any, Any]:
    """Token ids and labels [batch, tokens]; padding, at the end of rows, is not learned."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    return ids, labels


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1]), steps=int(sys.argv[2]), seed=int(sys.argv[3])))
