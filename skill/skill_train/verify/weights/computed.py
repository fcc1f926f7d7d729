"""Tensors that llama.cpp's converter computes from config.json, and weights that it writes as metadata."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_XIELU = re.compile(r"\.layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)$")


def metadata_of(source: str) -> tuple[str, int] | None:
    """The metadata key that holds a weight, and its place in that list; None for a weight that is a tensor."""
    match = _XIELU.search(source)
    return (f"xielu.{match[2]}", int(match[1])) if match else None


def computed_tensors(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """The values of such tensors by their names in a file; empty for a model without them.

    Llama 3's factors are those by which transformers lowered the model's own frequencies.
    """
    import torch

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    if rope.get("rope_type") == "llama3":
        lowered = next(value for name, value in model.named_buffers() if name.endswith("rotary_emb.inv_freq"))
        powers = torch.arange(len(lowered), dtype=torch.float64) / len(lowered)
        return {"rope_freqs.weight": (rope["rope_theta"] ** -powers / lowered.double()).float()}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    return {}
