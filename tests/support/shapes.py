"""GGUF files with the shapes of recorded models and without weights: a header, and zeros that no disk has to hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

import models
from skill_train.facts import ModelFacts

_ALIGNMENT = 32


def empty_gguf(name: str, path: Path) -> ModelFacts:
    """Writes an f16 file of a recorded `llama` or `qwen2`, which llama.cpp can quantize. Returns the model's facts."""
    model = models.recorded_model(name)
    heads, layers = model.heads or 0, model.layers or 0
    writer = GGUFWriter(str(path), model.model_type)
    writer.add_block_count(layers)
    writer.add_embedding_length(model.hidden_size or 0)
    writer.add_feed_forward_length(model.intermediate_size or 0)
    writer.add_head_count(heads)
    writer.add_head_count_kv(model.kv_heads or heads)
    writer.add_context_length(model.context or 0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocab_size or 0)
    end = 0
    for tensor, shape in _shapes(model).items():
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        n_bytes = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(tensor, shape, kind, n_bytes)
        end += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT + end)
    return model


def _shapes(model: ModelFacts) -> dict[str, tuple[int, ...]]:
    """In the order of numpy: rows first."""
    hidden, inner, vocabulary = model.hidden_size or 0, model.intermediate_size or 0, model.vocab_size or 0
    head = model.head_dim or hidden // (model.heads or 1)
    queries, keys = (model.heads or 0) * head, (model.kv_heads or model.heads or 0) * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden), "attn_v.weight": (keys, hidden), "attn_output.weight": (hidden, queries),
        "ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden), "ffn_down.weight": (hidden, inner),
    }  # fmt: skip
    if model.model_type == "qwen2":
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    head_shape = {} if model.tied_embeddings else {"output.weight": (vocabulary, hidden)}
    layers = {f"blk.{at}.{name}": shape for at in range(model.layers or 0) for name, shape in layer.items()}
    return {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,), **head_shape, **layers}
