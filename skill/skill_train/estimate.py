"""How much memory a run will take. Pure arithmetic; every formula names its source."""

from __future__ import annotations

from skill_train.facts import ModelFacts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def training_bytes(
    model: ModelFacts, *, dtype: str, max_length: int, batch: int, checkpointing: bool, four_bit: bool
) -> int | None:
    """Bytes of one LoRA training step: weights, activations, adapter; None when the model's shape is unknown.

    Weights: parameters x bytes; 4-bit NF4 with double quantization is 4.127 bits a parameter (Dettmers et al. 2023,
    QLoRA, section 3). Activations: 34 x tokens x hidden bytes a layer in 16 bit, 2 x tokens x hidden when only the
    layer's input is kept (Korthikanti et al. 2022, "Reducing Activation Recomputation", table 2, without attention
    scores, which fused attention does not keep). The adapter, its gradient and AdamW's moments are below 5 % of the
    weights at the ranks used here and are counted as that. Logits are made in chunks and not counted.
    """
    if not model.parameters or not model.layers or not model.hidden_size:
        return None
    weights = model.parameters * (4.127 / 8 if four_bit else BYTES[dtype])
    tokens = batch * max_length
    layer = 34 * tokens * model.hidden_size * BYTES[dtype] / 2
    kept = 2 * tokens * model.hidden_size * BYTES[dtype] / 2
    activations = layer + kept * model.layers if checkpointing else layer * model.layers
    return int(weights * 1.05 + activations)
