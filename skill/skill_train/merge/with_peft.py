"""PEFT's own merge, for adapters that cannot be streamed. It needs the whole model in memory, in fp32."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from skill_train.core.errors import VerificationFailed
from skill_train.model.weight_files import read_folder
from skill_train.reference import load as reference
from skill_train.reference.checkpoint_names import TEXT
from skill_train.reference.low_memory import unloaded


def merge_with_peft(base: Path, adapter: Path, part: Path, dtype: str, task: str = TEXT) -> dict[str, object]:
    """Writes the merged weights (safetensors and, if there are several files, their index) into `part`.

    Args:
        dtype: torch's name of the type of every stored weight.
        task: of `checkpoint_names.task_of`.

    Returns:
        The fields of config.json that the merge changed.

    Raises:
        UsageError: PEFT did not load an adapter tensor, which the message names.
        VerificationFailed: a merged weight, which the message names, is not finite.
    """
    import torch

    with reference.reference_model(base, adapter, partial(reference.read_model, task=task)) as model:
        merged = unloaded(model)  # checked below; PEFT's own check raises a bare ValueError
        merged.to(getattr(torch, dtype))
        for name, tensor in merged.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise VerificationFailed(
                    f"{name} is not finite after the merge",
                    code="not_finite",
                    expected=f"numbers that {dtype} can hold",
                    hint="merge with --dtype float32",
                )
        # PEFT (0.21) unties the model when it merges something into one side of the tie.
        untied = not merged.config.get_text_config().tie_word_embeddings
        merged.save_pretrained(str(part))
        stored = json.loads((part / "config.json").read_text(encoding="utf-8"))
    changed: dict[str, object] = {"tie_word_embeddings": False} if untied else {}
    text = stored if "vocab_size" in stored else stored.get("text_config", {})
    changed |= {"vocab_size": text["vocab_size"]} if "vocab_size" in text else {}
    for file in part.iterdir():  # removes files that transformers rewrote, because the base's own are better
        if not file.name.endswith((".safetensors", ".safetensors.index.json")):
            file.unlink()
    read_folder(part)
    return changed
