"""Tiny real models: the architectures, tokenizers and files of published models, two layers deep, with random weights.

`cached("qwen2")` is a folder that transformers loads and llama.cpp converts. Weights are drawn so that the next token
is distinct, attention matters, and quantization shows. Never change a cached folder: copy it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import tiny_templates
import tiny_vocab

KINDS = ("qwen2", "qwen3", "llama-bpe", "llama-spm", "llama-chatml", "mistral", "gemma", "gpt2", "phi3")
_FILES = ("tiny.py", "tiny_vocab.py", "tiny_templates.py")
CACHE = "SKILL_TRAIN_SHARED_CACHE"  # of all tests, as `conftest` says it: one of them may have an empty one of its own


def cached(kind: str, **options: Any) -> Path:
    """The folder of a model built earlier with the same options by the same code, or built now.

    Options are those of `build`.
    """
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in _FILES)
    key = hashlib.sha256(code + json.dumps([kind, options], sort_keys=True).encode()).hexdigest()[:16]
    final = Path(tempfile.gettempdir()) / f"skill-train-tiny-{os.getuid()}" / f"{kind}-{key}"
    return made_once(final, lambda part: build(kind, part, vocab_folder=vocab_folder(), **options))


def made_once(final: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder `final`. One process makes it, under another name, while the others that want it wait."""
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(final.with_name(f".{final.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            part = final.with_name(f".{final.name}-{secrets.token_hex(4)}.part")
            try:
                make(part)
                part.rename(final)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return final


def vocab_folder() -> Path:
    """The folder of `ggml-vocab-*.gguf` files in the source of the installed llama-cpp-python, fetched when missing."""
    from skill_train.llama import get_converter

    shared = Path(os.environ.get(CACHE, "")) / f"llama.cpp-{metadata.version('llama-cpp-python')}"
    return (shared if shared.is_dir() else get_converter.fetch().folder) / "models"


def build(
    kind: str,
    folder: Path,
    *,
    vocab_folder: Path,
    seed: int = 0,
    tied: bool | None = None,
    dtype: str = "float32",
    hidden: int = 64,
) -> Path:
    """Writes one model folder and returns it.

    Args:
        kind: one of `KINDS`.
        folder: made here; must not exist.
        vocab_folder: holds llama.cpp's `ggml-vocab-*.gguf` files.
        seed: of the weights.
        tied: whether lm_head is the embedding; None is what the family's small models do.
        dtype: of the stored weights, a torch name.
        hidden: width; with 256 every row length is divisible by 256 and K-quants need no other type.
    """
    folder.mkdir(parents=True)
    ids = _write_tokenizer(kind, folder, vocab_folder)
    model = _filled(_config(kind, ids, tied=tied, hidden=hidden), seed, dtype)
    stops = ids["stop"] if len(ids["stop"]) > 1 else ids["stop"][0]
    model.generation_config.update(bos_token_id=ids["bos"], eos_token_id=stops, pad_token_id=ids["pad"])
    model.save_pretrained(str(folder))
    if kind == "gpt2":  # llama.cpp's converter reads n_ctx, which published GPT-2 files have and transformers 5 drops
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "n_ctx": config["n_positions"]}, indent=2) + "\n")
    return folder


def build_without_words(kind: str, folder: Path, *, tokens: int, dtype: str) -> Path:
    """The weights and config.json of a model of `kind` for so many tokens, of which there are no texts."""
    ids = {"vocab_size": tokens, "bos": 1, "eos": 2, "pad": 0}
    _filled(_config(kind, ids, tied=None, hidden=64), 0, dtype).save_pretrained(str(folder))
    return folder


def adapter(
    base: Path,
    folder: Path,
    *,
    r: int = 8,
    alpha: float = 16,
    seed: int = 1,
    targets: list[str] | None = None,
    size: float = 0.5,
    **lora_config: Any,
) -> Path:
    """Writes a PEFT LoRA adapter whose A and B are both random, and returns its folder.

    Args:
        base: the model folder.
        targets: module names; None is every linear layer except lm_head.
        size: the change of a weight matrix relative to the matrix, by Frobenius norm, roughly.
        lora_config: further fields of `peft.LoraConfig`.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    names: Any = targets if targets is not None else "all-linear"
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM", **lora_config)
    tuned = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in tuned.named_parameters():
        if weight.requires_grad:
            perturb(name, weight, generator, size=size, r=r, alpha=alpha)
    tuned.save_pretrained(str(folder))
    return folder


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """`n` short conversations in messages format; every third has a system message, every fifth two turns."""
    draw = random.Random(seed)
    return [{"messages": _conversation(draw, number)} for number in range(n)]


def write_rows(path: Path, n: int, seed: int = 0) -> Path:
    """`rows` as a JSONL file."""
    lines = (json.dumps(row, ensure_ascii=False) for row in rows(n, seed))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _write_tokenizer(kind: str, folder: Path, vocab: Path) -> dict[str, Any]:
    if kind in ("qwen2", "qwen3"):
        return tiny_vocab.write_qwen(folder, vocab, thinking=kind == "qwen3")
    if kind in ("llama-spm", "mistral"):
        template = tiny_templates.MISTRAL if kind == "mistral" else tiny_templates.LLAMA_2
        return tiny_vocab.write_llama_spm(folder, vocab, template=template)
    if kind == "gemma":
        return tiny_vocab.write_gemma(folder)
    writers = {
        "llama-bpe": tiny_vocab.write_llama_bpe,
        "llama-chatml": tiny_vocab.write_chatml,
        "gpt2": tiny_vocab.write_gpt2,
        "phi3": tiny_vocab.write_phi3,
    }
    return writers[kind](folder, vocab)


def _config(kind: str, ids: dict[str, Any], *, tied: bool | None, hidden: int) -> Any:
    """The transformers configuration of a family, small, with the family's own switches."""
    import transformers

    family = "llama" if kind.startswith("llama") else kind
    tokens = {"vocab_size": ids["vocab_size"], "bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    common = {
        **tokens,
        "pad_token_id": ids["pad"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": family in ("qwen2", "qwen3", "gemma") if tied is None else tied,
    }
    if family == "gpt2":
        shape = {"n_embd": hidden, "n_layer": 2, "n_head": 4, "n_positions": 1024}
        return transformers.GPT2Config(**tokens, **shape, tie_word_embeddings=tied is not False)
    own: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "mistral": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "sliding_window": None},
        "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        # Qwen3 and Gemma fix the head size apart from hidden / heads.
        "qwen3": {"head_dim": hidden // 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        "gemma": {"head_dim": hidden // 2, "query_pre_attn_scalar": hidden // 2, "sliding_window": 512},
        "phi3": {"original_max_position_embeddings": 2048},
    }
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma3Text", "phi3": "Phi3"}.get(family, family.capitalize())
    return getattr(transformers, f"{name}Config")(**common, **own[family])


def _filled(config: Any, seed: int, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    _fill(model, seed)
    model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    return model


def _fill(model: Any, seed: int) -> None:
    """Draws every weight anew: logits spread over several nats, attention picks tokens, norms differ from one.

    Values are rounded to bf16 even when they are stored wider: published weights are, and f16 holds them exactly.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(scaled(name, noise, gemma=gemma).to(torch.bfloat16))


def scaled(name: str, noise: Any, *, gemma: bool) -> Any:
    """The values of one weight, from noise of unit variance."""
    if "norm" in name or ".ln_" in name:
        return 0.1 * noise + _norm_centre(name, gemma=gemma)
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed" in name or ".wte" in name or ".wpe" in name or "lm_head" in name:
        return (0.3 if ".wpe" in name else 1.5) / noise.shape[1] ** 0.5 * noise
    fan_in = noise.shape[0] if _is_conv1d(name) else noise.shape[1]
    gain = 1.2 if any(part in name for part in ("q_proj", "k_proj", "c_attn", "qkv_proj")) else 1.0
    return gain / fan_in**0.5 * noise


def _norm_centre(name: str, *, gemma: bool) -> float:
    if gemma:  # multiplies by 1 + weight; a large norm after each block, or the scaled embedding drowns the blocks
        return 2.0 if "post_" in name else 0.0
    return 0.0 if name.endswith("bias") else 1.0


def _is_conv1d(name: str) -> bool:
    """GPT-2 stores its matrices as [in, out]."""
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def perturb(name: str, weight: Any, generator: Any, *, size: float, r: int, alpha: float) -> None:
    """A has rows of length one; B is scaled so that alpha/r * B A is `size` times as large as a matrix of gain one."""
    import torch

    noise = torch.randn(weight.shape, generator=generator)
    with torch.no_grad():
        if "lora_A" in name or "lora_embedding_A" in name:
            weight.copy_(noise / weight.shape[1] ** 0.5)
        elif "lora_B" in name or "lora_embedding_B" in name:
            weight.copy_(noise * size * (r**0.5 / alpha))
        else:  # a bias, a magnitude, or a module saved whole: moved a little
            weight.mul_(1 + 0.1 * noise).add_(0.01 * noise)


def _conversation(draw: random.Random, number: int) -> list[dict[str, str]]:
    things = ("apples", "boats", "candles", "doors", "eggs", "flags")
    messages: list[dict[str, str]] = []
    if number % 3 == 0:
        messages.append({"role": "system", "content": draw.choice(("Answer briefly.", "You count things."))})
    for _ in range(2 if number % 5 == 0 else 1):
        a, b, thing = draw.randint(1, 99), draw.randint(1, 99), draw.choice(things)
        messages.append({"role": "user", "content": f"I have {a} {thing} and get {b} more. How many {thing} now?"})
        messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}, so {a + b} {thing}."})
    return messages
