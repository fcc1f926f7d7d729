"""The streaming merge against PEFT's own merge, on real tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import merging
from skill_train.core.errors import UsageError
from skill_train.merge import write as merge_write
from skill_train.model import new_tokens

pytestmark = pytest.mark.slow

ATTENTION = ["q_proj", "v_proj"]

# What an adapter can be, on a base whose embeddings are not tied: PEFT's merge is right for all of them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"targets": ATTENTION, "use_rslora": True},
    "dora": {"targets": [*ATTENTION, "down_proj"], "use_dora": True},
    "dora embedding": {"targets": ["embed_tokens"], "use_dora": True},
    "patterns": {
        "targets": ATTENTION,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "v_proj": 3},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 5, r".*\.1\..*": 40},
    },
    "patterns with rslora": {"targets": ATTENTION, "rank_pattern": {"q_proj": 4}, "use_rslora": True},
    "embedding": {"targets": ["embed_tokens", "q_proj"]},
    "head": {"targets": ["lm_head", "q_proj"]},
    "whole modules": {"targets": ATTENTION, "modules_to_save": ["lm_head", "input_layernorm", "embed_tokens"]},
    "token rows": {"targets": ATTENTION, "trainable_token_indices": [3, 100, 5]},
    "token rows of the head": {"targets": ATTENTION, "trainable_token_indices": {"lm_head": [1, 127]}},
    "all biases": {"targets": ATTENTION, "bias": "all"},
    "adapted biases": {"targets": ATTENTION, "bias": "lora_only"},
    "lora bias": {"targets": ATTENTION, "lora_bias": True},
    "some layers": {"targets": ATTENTION, "layers_to_transform": [1]},
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows of 64 numbers at a time, so that every tensor here takes several blocks."""
    monkeypatch.setattr(merge_write, "BLOCK_BYTES", 16 * 64 * 4)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging.llama(tmp_path_factory.mktemp("untied") / "base", bias=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging.llama(tmp_path_factory.mktemp("tied") / "base", tied=True)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging.gpt2(tmp_path_factory.mktemp("gpt2") / "base")


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        largest = expected[name].abs().max()
        assert (tensor - expected[name]).abs().max() <= 1e-6 * largest, name


@pytest.mark.parametrize("kind", ADAPTERS)
def test_equals_peft(kind: str, untied: Path, tmp_path: Path) -> None:
    adapter = merging.adapter(untied, tmp_path / "adapter", **ADAPTERS[kind])
    record = merging.run(untied, adapter, tmp_path)
    assert record["how"] == "streamed"
    found = merging.weights(tmp_path / "merged")
    assert_same_weights(found, merging.peft_merged(untied, adapter))
    base = merging.weights(untied)
    changed = [name for name in found if not torch.equal(found[name], base[name])]
    assert len(changed) == record["changes"]["changed_tensors"] > 0
    assert record["gate"]["verdict"] == "pass" and record["gate"]["effect"]["share"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dora", [False, True])
def test_gpt2_weights_lie_transposed(dora: bool, gpt2: Path, tmp_path: Path) -> None:
    targets = ["c_attn", "c_proj", "c_fc"]
    adapter = merging.adapter(gpt2, tmp_path / "adapter", targets=targets, fan_in_fan_out=True, use_dora=dora)
    assert merging.run(gpt2, adapter, tmp_path)["how"] == "streamed"
    expected = merging.peft_merged(gpt2, adapter)
    expected.pop("lm_head.weight")  # tied, so not stored
    assert_same_weights(merging.weights(tmp_path / "merged"), expected)


def test_orientation_comes_from_the_model_not_from_a_wrong_flag(gpt2: Path, tmp_path: Path) -> None:
    """PEFT writes the flag as it was for the last module it saw, and corrects it when it loads."""
    adapter = merging.adapter(gpt2, tmp_path / "adapter", targets=["c_proj", "lm_head"])
    merging.edit(adapter / "adapter_config.json", fan_in_fan_out=False)
    record = merging.run(gpt2, adapter, tmp_path)
    assert record["gate"]["figures"]["mean_kl"] < 1e-9
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(gpt2, adapter), rtol=0, atol=2e-5)


def test_checkpoint_without_the_models_prefix(gpt2: Path, tmp_path: Path) -> None:
    """The first GPT-2 files on the Hub say `h.0.…` where the model says `transformer.h.0.…`."""
    from safetensors.torch import save_file

    old = tmp_path / "old"
    old.mkdir()
    short = {name.removeprefix("transformer."): tensor for name, tensor in merging.weights(gpt2).items()}
    save_file(short, old / "model.safetensors", metadata={"format": "pt"})
    (old / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    adapter = merging.adapter(gpt2, tmp_path / "adapter", targets=["c_attn"])
    merging.run(old, adapter, tmp_path)
    assert set(merging.weights(tmp_path / "merged")) == set(short)
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(gpt2, adapter), rtol=0, atol=2e-5)


# Tied embeddings. PEFT's own merge changes the shared tensor for both sides, so its unmerged logits are the truth.
TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing of both": ({"targets": ATTENTION}, True),
    "head adapted": ({"targets": ["lm_head"]}, False),
    "head whole": ({"targets": ATTENTION, "modules_to_save": ["lm_head"]}, False),
    "embedding adapted": ({"targets": ["embed_tokens"]}, False),
    "embedding whole": ({"targets": ATTENTION, "modules_to_save": ["embed_tokens"]}, False),
    "token rows": ({"targets": ATTENTION, "trainable_token_indices": [3, 100]}, True),
    "both adapted alike": ({"targets": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "both whole alike": (
        {"targets": ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        True,
    ),
}


@pytest.mark.parametrize("kind", TIED)
def test_tied_embeddings(kind: str, tied: Path, tmp_path: Path) -> None:
    options, stays_tied = TIED[kind]
    adapter = merging.adapter(tied, tmp_path / "adapter", **options)
    record = merging.run(tied, adapter, tmp_path)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (record["how"], config["tie_word_embeddings"]) == ("streamed", stays_tied)
    assert ("lm_head.weight" in merging.weights(tmp_path / "merged")) is not stays_tied
    merged, truth = merging.logits(tmp_path / "merged"), merging.logits(tied, adapter)
    torch.testing.assert_close(merged, truth, rtol=0, atol=5e-5)
    assert (merging.logits(tied) - truth).abs().max() > 0.05


def test_tied_and_stored_twice(tied: Path, tmp_path: Path) -> None:
    """Some folders hold a tied head as a second copy; both must follow, or transformers unties them."""
    from safetensors.torch import save_file

    twice = tmp_path / "twice"
    twice.mkdir()
    tensors = merging.weights(tied)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, twice / "model.safetensors")
    (twice / "config.json").write_bytes((tied / "config.json").read_bytes())
    adapter = merging.adapter(tied, tmp_path / "adapter", targets=ATTENTION, trainable_token_indices=[3])
    merging.run(twice, adapter, tmp_path)
    found = merging.weights(tmp_path / "merged")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("more", [{}, {"trainable_token_indices": [128, 129]}, {"target_modules": ["embed_tokens"]}])
def test_resized_vocabulary(tie: bool, more: dict[str, Any], untied: Path, tied: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tied if tie else untied
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    model.resize_token_embeddings(130, mean_resizing=False)
    tuned = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"} | more))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name or "embedding_A" in name or "trainable_tokens" in name:
                weight.normal_(std=0.3)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    if more.get("target_modules") and not tie:  # PEFT saves the resized embedding and not the resized head
        with pytest.raises(UsageError, match="resizes only one of the embedding and the output head"):
            merging.run(base, tmp_path / "adapter", tmp_path)
        return
    record = merging.run(base, tmp_path / "adapter", tmp_path)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (130, tie and "target_modules" not in more)
    merged = merging.logits(tmp_path / "merged")
    with torch.no_grad():
        truth = tuned.eval()(input_ids=torch.tensor([row["input_ids"] for row in merging.ROWS])).logits
    assert merged.shape == truth.shape == (4, 60, 130)
    torch.testing.assert_close(merged, truth, rtol=0, atol=5e-5)
    assert record["warned"] == ["resized_without_tokenizer"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_dtype_is_the_rounded_exact_merge(dtype: str, tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base", dtype=dtype, shards="40KB")
    adapter = merging.adapter(base, tmp_path / "adapter")
    record = merging.run(base, adapter, tmp_path)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in merging.peft_merged(base, adapter).items()}
    found = merging.weights(tmp_path / "merged")
    for name, tensor in found.items():
        # Two fp32 sums in another order may round to neighbours, rarely.
        assert (tensor == expected[name]).float().mean() > 0.999, name
        assert (tensor.float() - expected[name].float()).abs().max() <= 0.01 * expected[name].abs().max(), name
    assert record["gate"]["stored_dtype"] == {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == dtype


def test_shards_index_and_other_files_stay_the_bases(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base", tied=True, shards="40KB")
    for name, text in {
        "tokenizer.model": "bytes of a tokenizer",
        "generation_config.json": '{"eos_token_id": [2,  7]}',
        "chat_template.jinja": "{{ messages }}",
        "LICENSE": "a licence",
        "original/params.json": "{}",
        "pytorch_model.bin": "a pickle",
        "consolidated.safetensors": "the same weights again, not merged",
        "modeling_other.py": "import os",
        ".gitattributes": "*",
    }.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    adapter = merging.adapter(base, tmp_path / "adapter", targets=ATTENTION)
    merging.run(base, adapter, tmp_path)
    merged = tmp_path / "merged"
    names = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
    left_out = {"pytorch_model.bin", "consolidated.safetensors", "modeling_other.py", ".gitattributes"}
    assert {str(path.relative_to(merged)) for path in merged.rglob("*") if path.is_file()} == names - left_out
    for name in names - left_out:
        if not name.endswith(".safetensors"):
            assert (merged / name).read_bytes() == (base / name).read_bytes(), name


def test_an_untied_head_enters_the_index(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base", tied=True, shards="40KB")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=ATTENTION, modules_to_save=["lm_head"])
    merging.run(base, adapter, tmp_path)
    before, after = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (base, tmp_path / "merged")
    )
    head = {"lm_head.weight": before["weight_map"]["model.embed_tokens.weight"]}
    assert after["weight_map"] == before["weight_map"] | head
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"] + 128 * 64 * 4
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(base, adapter), rtol=0, atol=5e-5)


def test_another_dtype_for_everything(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base", shards="40KB")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=ATTENTION)
    record = merging.run(base, adapter, tmp_path, dtype="float16")
    assert {tensor.dtype for tensor in merging.weights(tmp_path / "merged").values()} == {torch.float16}
    assert record["changes"]["config"] == {"dtype": "float16"}
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in merging.weights(tmp_path / "merged").values())


def test_tokenizer_with_new_tokens_comes_from_the_adapter(tmp_path: Path) -> None:
    base = merging.llama(tmp_path / "base")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=ATTENTION)
    for folder, tokens in ((base, ["<s>"]), (adapter, ["<s>", "<call>"])):
        added = [{"id": 126 + number, "content": token} for number, token in enumerate(tokens)]  # of 128 rows
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    template = {"eos_token": "<s>", "chat_template": "{{ 'base' }}"}
    (base / "tokenizer_config.json").write_text(json.dumps(template))
    record = merging.run(base, adapter, tmp_path)
    merged = tmp_path / "merged"
    assert record["changes"]["from_adapter"] == ["tokenizer.json", "tokenizer_config.json"]
    assert (merged / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
    stated = json.loads((merged / "tokenizer_config.json").read_text())  # the base's, with the list of added tokens
    assert (stated["chat_template"], stated["eos_token"]) == ("{{ 'base' }}", "<s>")
    listed = {number: entry["content"] for number, entry in stated["added_tokens_decoder"].items()}
    assert listed == {"126": "<s>", "127": "<call>"} and not (merged / "chat_template.jinja").exists()


def test_a_start_that_changes_the_base_goes_through_peft(untied: Path, tmp_path: Path) -> None:
    adapter = merging.adapter(untied, tmp_path / "adapter", targets=ATTENTION, init_lora_weights="pissa")
    record = merging.run(untied, adapter, tmp_path)
    assert record["how"] == "peft" and "init_lora_weights 'pissa'" in record["reasons"][0]
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(untied, adapter), rtol=0, atol=5e-5)


def test_peft_unties_a_trained_head(tied: Path, tmp_path: Path) -> None:
    options = {"init_lora_weights": "olora", "modules_to_save": ["lm_head"]}
    adapter = merging.adapter(tied, tmp_path / "adapter", targets=ATTENTION, **options)
    record = merging.run(tied, adapter, tmp_path)
    assert (record["how"], record["changes"]["config"]) == ("peft", {"tie_word_embeddings": False})
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(tied, adapter), rtol=0, atol=5e-5)


def test_ia3_goes_through_peft(untied: Path, tmp_path: Path) -> None:
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(untied))
    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "ia3" in name:
                weight.normal_(mean=1.0, std=0.3)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    record = merging.run(untied, tmp_path / "adapter", tmp_path, dtype="bfloat16")
    assert (record["how"], record["reasons"]) == ("peft", ["the method IA3 is not LoRA"])
    assert {tensor.dtype for tensor in merging.weights(tmp_path / "merged").values()} == {torch.bfloat16}


def test_experts_go_through_peft(tmp_path: Path) -> None:
    """Experts lie apart in the checkpoint and as one tensor in the model."""
    from transformers import MixtralConfig

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False}
    base = merging.save(MixtralConfig(**sizes, **heads), tmp_path / "base")
    adapter = merging.adapter(base, tmp_path / "adapter", targets=[], target_parameters=["mlp.experts.down_proj"])
    record = merging.run(base, adapter, tmp_path)
    assert record["how"] == "peft" and "target_parameters" in record["reasons"][0]
    assert set(merging.weights(tmp_path / "merged")) == set(merging.weights(base))
    torch.testing.assert_close(merging.logits(tmp_path / "merged"), merging.logits(base, adapter), rtol=0, atol=5e-5)


def test_a_second_call_reuses_and_other_inputs_are_refused(untied: Path, tmp_path: Path) -> None:
    adapter = merging.adapter(untied, tmp_path / "adapter", targets=ATTENTION)
    first = merging.run(untied, adapter, tmp_path)
    stamp = (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns
    second = merging.run(untied, adapter, tmp_path)
    assert first.pop("reused") is False and second.pop("reused") is True and second == first
    assert (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(UsageError) as raised:
        merging.run(untied, adapter, tmp_path, dtype="float16")
    assert raised.value.code == "output_exists"
    other = merging.adapter(untied, tmp_path / "other", targets=ATTENTION, seed=2)
    with pytest.raises(UsageError) as raised:
        merging.run(untied, other, tmp_path)
    assert raised.value.code == "output_exists"


@pytest.mark.parametrize("place", ["runs/first", "."])
def test_a_run_in_the_folder_of_its_base_stays_out_of_the_merged_model(
    untied: Path, tmp_path: Path, place: str
) -> None:
    """`cd model; skill-train local --model .`; or the merged model and its record right beside the base's weights."""
    base = Path(shutil.copytree(untied, tmp_path / "base"))
    work = base / place
    adapter = merging.adapter(base, base / "runs" / "first" / "adapter", targets=ATTENTION)
    for name in ("plan.json", "samples.jsonl", "train.log"):
        (base / "runs" / "first" / name).write_text('{"secret": 1}')
    merging.run(base, adapter, work)
    made = {str(path.relative_to(work / "merged")) for path in (work / "merged").rglob("*") if path.is_file()}
    assert made == {path.name for path in untied.iterdir()}
    assert merging.run(base, adapter, work)["reused"] is True


@pytest.mark.parametrize(("dora", "most"), [(False, 512), (True, 2048)])
def test_answers_are_a_small_sample_where_weights_were_compared(
    dora: bool, most: int, untied: Path, tmp_path: Path
) -> None:
    """40 rows of 60 tokens: the last row that is begun is cut, and nothing follows the last token of a row."""
    adapter = merging.adapter(untied, tmp_path / "adapter", use_dora=dora)
    record = merging.run(untied, adapter, tmp_path, rows=10 * merging.ROWS)
    assert record["gate"]["by"] == "answers" and (record["gate"]["weights"] is None) == dora
    assert record["gate"]["figures"]["tokens"] == most - -(-most // 60)


def test_the_bases_tokenizer_is_not_read_where_the_adapters_is_the_same(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one of 150,000 tokens takes 84 MB (2026-11, Qwen2.5)."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    read: list[Path] = []
    monkeypatch.setattr(new_tokens, "object_in", lambda file: read.append(file) or {})
    assert new_tokens.takes_tokenizer(base, adapter) is False and read == []
    (adapter / "tokenizer.json").write_text('{"added_tokens": [{"content": "<new>", "id": 7}]}')
    monkeypatch.undo()
    assert new_tokens.takes_tokenizer(base, adapter) is True
