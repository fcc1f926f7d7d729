"""Which kernel computes attention on a GPU: the one that keeps every score is never left to be the only one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skill_train.program.start import inputs as program

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
sdpa_attention = pytest.importorskip("transformers.integrations.sdpa_attention")


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)


@pytest.mark.parametrize(
    ("dtype", "capability", "runs"),
    [
        ("bfloat16", (8, 0), True),  # A100
        ("float16", (8, 9), True),  # L4
        ("float16", (7, 5), False),  # T4: "only supports gpu architectures in the range [sm80, sm121]", torch 2.10
        ("float32", (9, 0), False),  # H100
    ],
)
def test_where_the_flash_kernel_runs(dtype: str, capability: tuple[int, int], runs: bool) -> None:
    assert program.flash_attention_runs(dtype, capability) is runs


def test_shared_heads_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads of queries, 2 of keys: torch is given 4 of each, and the same comes out."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model, ids = Qwen2ForCausalLM(config).eval(), torch.arange(9)[None]
    seen: list[tuple[int, int, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, **said: Any) -> Any:
        seen.append((key.shape[1], value.shape[1], said.get("enable_gqa", False)))
        return attend(query, key, value, **said)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        before = model(ids).logits
        program.repeat_shared_heads()
        after = model(ids).logits
    assert seen == [(2, 2, True), (4, 4, False)]
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(("dtype", "capability"), [("float16", (7, 5)), ("float32", (9, 0)), ("bfloat16", (9, 0))])
def test_a_gpu_is_asked_for_its_capability(dtype: str, capability: tuple[int, int]) -> None:
    """There is no GPU here: what torch would say of one is said for it."""
    choices: list[bool] = []
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_capability=lambda: capability)
    off = SimpleNamespace(is_available=lambda: False)
    backends = SimpleNamespace(cuda=SimpleNamespace(enable_cudnn_sdp=choices.append), mps=off)
    gpu = SimpleNamespace(cuda=cuda, backends=backends, __version__="2.13.0")
    installed = sdpa_attention.use_gqa_in_sdpa
    program.prepare_device(gpu, {"device": "cuda", "dtype": dtype, "num_processes": 1})  # type: ignore[arg-type, typeddict-item]
    assert choices == [False]
    key = torch.zeros(1, 2, 3, 8)
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key) is (dtype == "bfloat16")
    assert (sdpa_attention.use_gqa_in_sdpa is installed) is (dtype == "bfloat16")
