"""How a failed converter becomes one clear error, and what of a model folder it gets to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skill_train.core.errors import DecisionNeeded, NativeCrash, NotInstalled, UsageError
from skill_train.llama.converter_child import merge_ranks, with_own_keys
from skill_train.llama.run_converter import explain, without_code

MODEL = Path("my-model")
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "convert_hf_to_gguf.py", line 312, in <module>',
    "    main()",
]


@pytest.mark.parametrize(
    ("line", "kind", "code", "word"),
    [
        (
            "ERROR:hf-to-gguf:Model FooForCausalLM is not supported",
            UsageError,
            "not_convertible",
            "FooForCausal",
        ),
        (
            "NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()",
            UsageError,
            "not_convertible",
            "splits text",
        ),
        ("FileNotFoundError: File not found: m/tokenizer.model", UsageError, "bad_tokenizer", "tokenizer.model"),
        ("KeyError: 'n_ctx'", UsageError, "broken_model", "'n_ctx'"),
        ("ModuleNotFoundError: No module named 'sentencepiece'", NotInstalled, "missing_package", "sentencepiece"),
        (
            "NotImplementedError: Quant method is not yet supported: 'bitsandbytes'",
            UsageError,
            "quantized_base",
            "bitsandbytes",
        ),
        ("OSError: [Errno 28] No space left on device", DecisionNeeded, "no_disk", "disk became full"),
        # numpy's words for a write that was cut short: ndarray.tofile on a full tmpfs, numpy 2, 2026-11-21
        ("OSError: 40960 requested and 1760 written", DecisionNeeded, "no_disk", "disk became full"),
        ("OSError: [Errno 27] File too large", DecisionNeeded, "no_disk", "disk became full"),
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried", DecisionNeeded, "out_of_memory", "memory"),
        ("ValueError: Can not map tensor 'model.x.weight'", UsageError, "not_convertible", "Can not map tensor"),
    ],
)
def test_each_cause_is_named_with_its_way_out(line: str, kind: type, code: str, word: str) -> None:
    error = explain(1, ["INFO:hf-to-gguf:Loading model: my-model", *TRACEBACK, line], model=MODEL)
    assert isinstance(error, kind)
    assert error.code == code
    assert word in error.message
    assert error.hint


def test_a_signal_is_a_crash_and_a_kill_is_memory() -> None:
    crash = explain(-11, ["INFO: last words"], model=MODEL)
    assert isinstance(crash, NativeCrash)
    assert "SIGSEGV" in crash.message
    assert explain(-9, [], model=MODEL).code == "out_of_memory"


@pytest.mark.parametrize(
    "code, words",
    # libstdc++'s words before it aborts, and glibc's (elf/dl-tls.c, dl_fatal) before it ends with 127
    [(-6, "  what():  std::bad_alloc"), (127, "cannot allocate memory for thread-local data: ABORT")],
)
def test_native_code_that_got_no_memory_says_so(code: int, words: str) -> None:
    assert explain(code, ["INFO: last words", words], model=MODEL).code == "out_of_memory"


def test_the_view_of_a_model_holds_no_code(tmp_path: Path) -> None:
    model = tmp_path / "tuned"
    model.mkdir()
    (model / "modeling_x.py").write_text("raise SystemExit")
    (model / ".cache").mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "modeling_x.C"}}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["a--b.C", None]}, "k": 1}))
    (model / "model.safetensors").write_bytes(b"weights")
    with without_code(model) as view:
        assert view.name == "tuned"
        assert sorted(path.name for path in view.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer_config.json",
        ]
        assert json.loads((view / "config.json").read_text()) == {"model_type": "x"}
        assert json.loads((view / "tokenizer_config.json").read_text()) == {"k": 1}
        assert (view / "model.safetensors").read_bytes() == b"weights"
    assert not view.exists()
    assert "auto_map" in (model / "config.json").read_text()  # the model itself is untouched


def test_a_token_that_the_vocabulary_lacks_is_no_key_of_config_json() -> None:
    error = explain(1, [*TRACEBACK, "KeyError: '<|user|>'"], model=MODEL)
    assert error.code == "bad_tokenizer"
    assert "config.json" not in str(error)
    assert explain(1, [*TRACEBACK, "KeyError: '[gMASK]'"], model=MODEL).code == "bad_tokenizer"
    for key in ("'rotary_pct'", "\"could not find any of: ['rotary_dim']\""):
        assert explain(1, [*TRACEBACK, f"KeyError: {key}"], model=MODEL).code == "broken_model"


def test_a_path_in_a_hint_is_one_word_of_a_shell() -> None:
    error = explain(1, [*TRACEBACK, "KeyError: 'n_ctx'"], model=Path("a model; $HOME {found}"))
    assert "'a model; $HOME {found}/config.json'" in error.hint
    assert error.message.startswith("the config.json of a model; $HOME {found} lacks")


def test_own_keys_stand_over_what_transformers_made_of_them() -> None:
    parsed = {"rope_parameters": {"rope_theta": 1.0}, "vocab_size": 8, "text_config": {"a": 1, "b": 2}}
    own = {"rotary_pct": 0.25, "vocab_size": 9, "text_config": {"b": 3, "c": 4}}
    found = with_own_keys(parsed, own)
    assert found == {
        "rope_parameters": {"rope_theta": 1.0},
        "rotary_pct": 0.25,
        "vocab_size": 9,
        "text_config": {"a": 1, "b": 3, "c": 4},
    }


def test_merges_score_their_pieces_in_order() -> None:
    model = {"vocab": {"a": 5, "b": 6, "ab": 9, "abb": 7}, "merges": ["a b", ["ab", "b"], "a bb"]}
    assert merge_ranks(model) == {9: 0, 7: 1}


def test_a_nemotron_h_without_experts_is_described_as_published() -> None:
    """transformers' class has experts in any case, and lists the layers in place of their letters."""
    own = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-"}
    layers = {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
    experts = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    kind = {"model_type": "nemotron_h"}
    assert with_own_keys(kind | layers | experts, own) == own | layers
    assert with_own_keys(kind | layers | experts, kind) == own | layers
    mixture = kind | experts | {"layers_block_type": ["linear_attention", "moe"]}
    assert with_own_keys(mixture, kind) == mixture
