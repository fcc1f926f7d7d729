"""Several texts in one pass, and answers with the help of a draft: the same figures as one by one."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import gguf_edit
import gguf_maker
import tiny
import tiny_families
from skill_train.core.errors import DecisionNeeded
from skill_train.core.worker import ending, run_worker
from skill_train.llama import inference
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.inference import Prompt
from skill_train.machine.read import available_memory_bytes
from skill_train.reference.load import load_tokenizer, reference_model
from skill_train.reference.low_memory import frugal_model, is_plain
from skill_train.verify import run_checks
from skill_train.verify.reference_answers import MeasureRequest, ReferenceMeasurements, _groups, measure
from skill_train.verify.run_checks import draft_of
from skill_train.verify.sample_texts import Sample, prompts
from skill_train.verify.weights.check import compared_bytes

pytestmark = pytest.mark.slow

TEXTS = [[5, 9, 2, 40, 11, 7], [3, 3, 8], list(range(20, 60)), [4, 90]]
PROMPTS = [[5, 9, 2, 40], [17, 3, 25, 60, 61, 9, 33]]
KINDS = ("llama-chatml", "llama-spm", "gemma", "gpt2")
MOST = 6


def measured(
    model: Path, folder: Path, drafts: list[list[int]], stops: frozenset[int] = frozenset()
) -> ReferenceMeasurements:
    asked = MeasureRequest(TEXTS, PROMPTS, set(stops), Sample(answer_tokens=MOST))
    with frugal_model(model) as loaded:
        return measure(loaded, asked, folder=folder, switches_off=False, drafts=lambda: drafts)


def generated(model: Path) -> list[list[int]]:
    """transformers' own greedy answers."""
    with reference_model(model) as loaded:
        options: dict[str, Any] = {"max_new_tokens": MOST, "min_new_tokens": MOST, "do_sample": False}
        made = [loaded.generate(torch.tensor([ids]), **options, repetition_penalty=1.0)[0] for ids in PROMPTS]
    return [row.tolist()[len(ids) :] for ids, row in zip(PROMPTS, made, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_over_several_texts_says_of_each_what_it_says_alone(kind: str, tmp_path: Path) -> None:
    model = tiny.cached(kind)
    found = measured(model, tmp_path, [])
    rows = np.fromfile(found.tuned, dtype=np.float32).reshape(-1, found.vocabulary)
    assert [len(sequence.ids) for sequence in found.sequences] == [len(ids) for ids in TEXTS]
    for sequence, ids in zip(found.sequences, TEXTS, strict=True):
        alone = _alone(model, ids)
        together = rows[sequence.first : sequence.first + len(ids)]
        assert np.abs(together - alone).max() <= 1e-4 * np.abs(alone).max()


def _alone(model: Path, ids: list[int], adapter: Path | None = None) -> Any:
    with reference_model(model, adapter) as loaded, torch.no_grad():
        return loaded(input_ids=torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("kind", tiny_families.by_default(tiny.KINDS, KINDS))
def test_without_its_adapter_the_reference_is_the_base(kind: str, tmp_path: Path) -> None:
    """Half of the texts, with the adapter and without it: what PEFT and transformers say of each."""
    base = tiny.cached(kind)
    _require_base_and_tuned(base, tiny.adapter(base, tmp_path / "adapter"), tmp_path)


@pytest.mark.parametrize(
    ("family", "targets", "shape"),
    [
        ("mpt", ["Wqkv"], {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
        ("opt", ["fc1"], {"hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}),
        ("qwen2_moe", ["gate_proj"], {"hidden_size": 64, "num_experts": 4, "num_attention_heads": 4}),
    ],
)
def test_the_base_of_a_family_that_is_built_otherwise(
    family: str, targets: list[str], shape: dict[str, Any], tmp_path: Path
) -> None:
    """Experts are given their tokens alone; MPT's code is of its own making."""
    small = {"num_hidden_layers": 2, "vocab_size": 128, "num_key_value_heads": 4, "intermediate_size": 64}
    small |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **({"vocab_size": 128} if family == "mpt" else small), **shape)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    assert is_plain(tmp_path / "adapter")
    _require_base_and_tuned(tmp_path / "base", tmp_path / "adapter", tmp_path)


def _require_base_and_tuned(base: Path, adapter: Path, folder: Path) -> None:
    sample = Sample(answer_tokens=MOST, base_tokens=len(TEXTS[0]) + len(TEXTS[1]))
    with frugal_model(base, adapter) as model:
        found = measure(model, MeasureRequest(TEXTS, PROMPTS, set(), sample), folder=folder, switches_off=True)
    assert found.base is not None and found.base_rows == len(TEXTS[0]) + len(TEXTS[1])
    tuned, off = (
        np.fromfile(file, dtype=np.float32).reshape(-1, found.vocabulary) for file in (found.tuned, found.base)
    )
    assert len(off) == found.base_rows
    for sequence, ids in zip(found.sequences[:2], TEXTS, strict=False):
        here = slice(sequence.first, sequence.first + len(ids))
        expected, changed = _alone(base, ids), _alone(base, ids, adapter)
        assert np.abs(expected - changed).max() > 1e-2 * np.abs(expected).max()
        assert np.abs(off[here] - expected).max() <= 1e-4 * np.abs(expected).max()
        assert np.abs(tuned[here] - changed).max() <= 1e-4 * np.abs(changed).max()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_the_draft(kind: str, tmp_path: Path) -> None:
    """A right draft, a wrong one, one that goes wrong half way, one that is short, one that is too long, none."""
    model = tiny.cached(kind)
    expected = generated(model)
    wrong = [[(token + 1) % 50 for token in ids] for ids in expected]
    half = [[*ids[:3], *other[3:]] for ids, other in zip(expected, wrong, strict=True)]
    short, long = [ids[:2] for ids in expected], [[*ids, *ids] for ids in expected]
    for drafts in (expected, wrong, half, short, long, []):
        answers = measured(model, tmp_path, drafts).answers
        assert [answer.ids for answer in answers] == expected
        assert [answer.prompt for answer in answers] == PROMPTS
        assert all(answer.rows.argmax(axis=1).tolist() == answer.ids for answer in answers)
        assert all(np.abs(np.exp(answer.rows).sum(axis=1) - 1).max() < 1e-4 for answer in answers)


def test_a_stop_in_the_draft_ends_the_answer(tmp_path: Path) -> None:
    model = tiny.cached("llama-chatml")
    expected = generated(model)
    stop = expected[0][2]
    for drafts in (expected, []):
        first = measured(model, tmp_path, drafts, frozenset({stop})).answers[0]
        assert first.stopped and first.ids == expected[0][: expected[0].index(stop) + 1]


def test_texts_of_like_length_share_a_pass() -> None:
    assert list(_groups([])) == []
    assert list(_groups([58, 105, 51, 42, 53, 100])) == [[3, 2, 4, 0], [5, 1]]  # filling: 9, 2 x 2, 3 x 5; then 4 x 42
    assert list(_groups([300, 300])) == [[0], [1]]  # 600 logits of one pass are too many
    assert list(_groups([900])) == [[0]]


def test_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    """A file of another model may answer with tokens that the reference has no embedding for."""
    model = tiny.cached("llama-chatml")
    expected = generated(model)
    foreign = [[ids[0], 10_000_000, *ids[1:]] for ids in expected]
    assert [answer.ids for answer in measured(model, tmp_path, foreign).answers] == expected


def test_a_file_answers_in_one_pass_as_far_as_the_reference() -> None:
    """Free, and with every answer that one may expect of it: up to the first token that is another, or one more."""
    file, free = gguf_maker.exported("gemma").file("f16"), draft_of_file("f16")
    for cut in range(MOST):
        other = [ids[cut] + 1 for ids in free]
        wrong = [[*ids[:cut], token, *ids[cut + 1 :]] for ids, token in zip(free, other, strict=True)]
        assert answered(file, wrong) == [ids[: cut + 1] for ids in free]
        assert answered(file, [ids[:cut] for ids in free]) == [ids[: cut + 1] for ids in free]
    assert answered(file, free) == free
    unknown = [[*ids[:2], 10_000_000, *ids[3:]] for ids in free]  # the reference has more tokens than the file
    assert answered(file, unknown) == [ids[:3] for ids in free]


@pytest.mark.parametrize("family", ["gemma3", "granitehybrid", "llama3"])
def test_prompts_are_answered_together_as_one_by_one(family: str, tmp_path: Path) -> None:
    """Each to its own end: a limit, or the token that the file names as its end. One is longer than a step."""
    file, sizes = tiny_families.gguf(family), {4: 9, 130: 6, 7: 1, 1: 12}
    asked = [Prompt([5 + (3 * n + place) % 40 for place in range(n)], most) for n, most in sizes.items()]

    def answers(together: bool, file: Path) -> list[list[int]]:
        job: dict[str, Any] = {"context_tokens": 142, "threads": 2, "prompts": asked, "together": together}
        return inference.ask(inference.InferenceJob(gguf=str(file), **job)).answers

    free = answers(together=False, file=file)
    assert answers(together=True, file=file) == free and [len(ids) for ids in free] == list(sizes.values())
    ends = gguf_edit.rewrite(file, tmp_path / "m.gguf", metadata={"tokenizer.ggml.eos_token_id": free[0][3]})
    ended = answers(together=False, file=ends)
    assert answers(together=True, file=ends) == ended and len(ended[0]) <= 4


def test_a_long_prompt_is_answered_in_pieces() -> None:
    """llama.cpp gets 128 tokens at a time; the answer's rows lie in the last piece or in two."""
    file = gguf_maker.exported("gemma").file("f16")
    for length in (123, 125, 127, 128, 129, 256):
        prompts = [[5 + number % 40 for number in range(length)]]
        (free,) = answered(file, None, prompts)
        assert answered(file, [free], prompts) == [free] and len(free) == MOST


def test_the_memory_of_what_is_compared_beside_a_draft(tmp_path: Path) -> None:
    """Two weights at once, each with its change, in fp32. The largest that is adapted: the MLP's, by the config."""
    base = tiny.cached("llama-chatml")
    config = json.loads((base / "config.json").read_text())
    largest = config["hidden_size"] * config["intermediate_size"]
    assert compared_bytes(tiny.adapter(base, tmp_path / "adapter"), base) == 2 * 2 * 4 * largest
    assert compared_bytes(None, None) == 0  # fully trained: two of the base's, which is stored in fp32
    assert compared_bytes(None, base) == 2 * 4 * config["vocab_size"] * config["hidden_size"]


def test_an_adapter_that_peft_cannot_load_takes_no_memory(tmp_path: Path) -> None:
    """A of one dimension: the refusal comes from PEFT, with its words."""
    adapter = tiny.adapter(tiny.cached("llama-chatml"), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    flat = {name: tensor.flatten() if "lora_A" in name else tensor for name, tensor in load_file(file).items()}
    save_file(flat, file)
    assert compared_bytes(adapter, None) == 0


def test_rows_whose_questions_are_too_long_leave_the_built_in_ones() -> None:
    """Else no answer would be compared, and the proof would pass."""
    tokenizer = load_tokenizer(tiny.cached("gemma"))
    long = {"row": 1, "kind": "completion", "prompt": "one word " * 2000, "input_ids": [2]}
    short = {"row": 2, "kind": "completion", "prompt": "two", "input_ids": [2]}
    chosen = Sample(prompts=2)
    asked = {"tokenizer": tokenizer, "config": {"max_position_embeddings": 512}, "sample": chosen}
    built_in = prompts([], **asked)
    assert len(built_in) == 2 and prompts([long], **asked) == built_in
    assert prompts([long, short], **asked) == [tokenizer("two").input_ids]


def draft_of_file(quant: str) -> list[list[int]]:
    return draft_of([read_gguf(gguf_maker.exported("gemma").file(quant))], PROMPTS, MOST, 0).answers


def answered(file: Path, expected: list[list[int]] | None, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    asked = [Prompt(ids, MOST, one) for ids, one in zip(prompts, expected or [None] * len(prompts), strict=True)]
    return inference.ask(inference.InferenceJob(gguf=str(file), context_tokens=300, threads=2, prompts=asked)).answers


def test_a_draft_asks_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is run beside the reference only where there is room for both."""
    export = gguf_maker.exported("gemma")
    files = [read_gguf(export.file("q8_0")), read_gguf(export.file("f16"))]
    draft = draft_of(files, PROMPTS, MOST, 0)
    assert draft.gguf is files[1] and [len(ids) for ids in draft.answers] == [MOST, MOST]
    free = available_memory_bytes()
    assert free is not None
    assert draft_of(files, PROMPTS, MOST, free).answers == []
    monkeypatch.setattr(run_checks, "available_memory_bytes", lambda: None)
    assert draft_of(files, PROMPTS, MOST, 0).answers == []


def test_a_worker_that_starts_after_ctrl_c_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's thread has its job, and no process yet, when the main thread is stopped."""
    (tmp_path / "sleeping_worker.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()

    def late() -> None:
        time.sleep(0.5)
        run_worker("sleeping_worker", {}, object)

    with pytest.raises(KeyboardInterrupt), ending(ThreadPoolExecutor(1)) as pool:
        running = pool.submit(late)
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert time.monotonic() - started < 20
    assert isinstance(running.exception(), DecisionNeeded)  # SIGKILL
