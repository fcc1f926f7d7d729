"""What llama.cpp's converter computes from config.json, and weights that it writes as metadata."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_XIELU = re.compile(r"\.layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)$")


def metadata_of(source: str) -> tuple[str, int] | None:
    """Key of the metadata that holds a weight, and its place in that list; None of a weight that is a tensor."""
    found = _XIELU.search(source)
    return (f"xielu.{found[2]}", int(found[1])) if found else None


def computed_tensors(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """Values by the tensor's name in a file; empty for a model without them.

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
        return {f"rope_factors_{one}.weight": torch.tensor(rope[f"{one}_factor"]) for one in ("long", "short")}
    return {}
