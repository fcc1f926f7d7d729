"""PEFT's own merge, for adapters that cannot be streamed. It needs the whole model in memory, in fp32."""

import itertools
import json
from functools import partial
from pathlib import Path

from skill_train.core.console import Warn
from skill_train.core.errors import VerificationFailed
from skill_train.merge.plan import Base, wanted_parameters
from skill_train.model.adapter import Adapter, is_regex, pattern_value
from skill_train.model.weight_files import read_folder
from skill_train.program.pictures.parts import vision_part
from skill_train.reference import load as reference
from skill_train.reference.checkpoint_names import TEXT, empty_model, unknown_parameters
from skill_train.reference.low_memory import merged as merged_model


def merge_with_peft(
    base: Path, adapter: Path, part: Path, dtype: str, warn: Warn, task: str = TEXT
) -> dict[str, object]:
    """Writes the merged weights (safetensors and, if there are several files, their index) into `part`.

    Args:
        dtype: torch's name of the type of every stored weight.
        task: the result of `checkpoint_names.task_of`.

    Returns:
        The fields of config.json that the merge changed.

    Raises:
        UsageError: PEFT did not load an adapter tensor, which the message names.
        VerificationFailed: a merged weight, which the message names, is not finite.
    """
    import torch

    lacks: list[str] = []
    with reference.reference_model(base, adapter, partial(reference.read_model, task=task), lacks) as model:
        # `left_out` reports all other weights. PEFT's names of experts do not exist in the base's files.
        if experts := [name.replace(".default", "") for name in lacks if ".experts." in name]:
            what = f"the adapter's file lacks {len(experts)} tensors for experts that its config names"
            warn("incomplete_adapter", f"{what}, such as {experts[0]}: the base stays there")
        merged = merged_model(model)  # checked below; PEFT's own check raises a bare ValueError
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


def left_out(base: Base, adapter: Adapter) -> list[str]:
    """The weights that the adapter's config names but its file lacks. Experts are left out, and so are the target
    modules of a config with `layers_to_transform` or `exclude_modules`."""
    if adapter.config["peft_type"] != "LORA":
        return []
    unchanged = {*base.tensors, "lm_head.weight"} - {*wanted_parameters(adapter)}  # a tied head need not be stored
    parts = {vision_part(module) for module in adapter.modules}
    looked_at = (name for name in unchanged if ".experts." not in name and vision_part(name) in parts)
    found = [name for name in looked_at if _is_named(adapter, name)]
    unknown = unknown_parameters(empty_model(base.folder, base.task), found) if found else []
    return sorted({*found} - {*unknown})


def _is_named(adapter: Adapter, name: str) -> bool:
    config, module = adapter.config, name.rpartition(".")[0]
    # PEFT's own test (peft 0.21, `_set_trainable`): the name of a module ends with a name in `modules_to_save`.
    saved = tuple(each for each in config["modules_to_save"] if isinstance(each, str))
    if any(each.endswith(saved) for each in itertools.accumulate(module.split("."), "{}.{}".format)):
        return True
    if name.endswith(".bias"):
        return config.get("bias") == "all" or (config.get("bias") == "lora_only" and module in adapter.modules)
    if config.get("exclude_modules") or config.get("layers_to_transform") not in (None, []):
        return False
    named = config.get("target_modules")
    patterns = {str(each): True for each in (named if isinstance(named, list) else [named]) if is_regex(str(each))}
    return bool(pattern_value(patterns, name.removesuffix(".weight"), default=False))
