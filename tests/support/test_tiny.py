"""The tiny models that other tests stand on are what they claim: real architectures that load, generate and adapt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny

pytestmark = pytest.mark.slow

PLAIN = "Water boils at 100 degrees."


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_loads_and_generates(kind: str) -> None:
    folder = tiny.cached(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(PLAIN)["input_ids"]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert made.shape[1] == ids.shape[1] + 4
    assert made.max() < model.config.vocab_size
    assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == PLAIN


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind != "gpt2"])
def test_chat_marks_are_single_tokens_and_the_answer_ends_with_a_stop(kind: str) -> None:
    folder = tiny.cached(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = tiny.rows(2)[1]["messages"]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    assert any(number in ids[-3:] for number in stops)
    assert messages[-2]["content"] in prompt and messages[-1]["content"] not in prompt


def test_attention_matters_and_logits_are_not_flat() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.cached("llama-spm"))
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        before = model(ids).logits[0].log_softmax(-1)
        weight = model.model.layers[0].self_attn.v_proj.weight
        weight.copy_(weight.roll(1, dims=0))
        after = model(ids).logits[0].log_softmax(-1)
    assert before.std() > 1
    assert (before.exp() * (before - after)).sum(-1).mean() > 0.1  # nats


def test_adapter_changes_the_model(tmp_path: Path) -> None:
    from peft import PeftModel

    base = tiny.cached("gpt2")
    folder = tiny.adapter(base, tmp_path / "adapter", targets=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(100, 120)[None]
    with torch.no_grad():
        before = model(ids).logits
        after = PeftModel.from_pretrained(model, str(folder))(ids).logits
    assert (after - before).abs().mean() > 0.1


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    vocab = tiny.vocab_folder()
    first, second, other = (
        tiny.build("gemma", tmp_path / name, vocab_folder=vocab, seed=seed)
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_test_with_a_cache_of_its_own_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabularies = tiny.vocab_folder()
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    assert tiny.vocab_folder() == vocabularies
    assert list(tmp_path.iterdir()) == []
