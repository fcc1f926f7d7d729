"""The layers that LoRA adapts: the list of a known family, or else the linear layers in the weight files."""

import re
from collections.abc import Iterable, Mapping, Sequence

from skill_train.core.errors import UsageError
from skill_train.model.parameter_count import OF_EXPERTS

# The attention projections by model_type, under the names of each architecture (transformers' modeling files; PEFT's
# own table is in peft/utils/constants.py).
_QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[str, list[str]] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
            "gemma3_text", "smollm3", "olmo", "olmo2", "granite", "cohere", "cohere2", "stablelm", "starcoder2",
            "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "mistral3", "llava",
            "glm", "exaone",
        ),
        _QKVO,
    ),
    "phi": ["q_proj", "k_proj", "v_proj", "dense"],
    "phi3": ["qkv_proj", "o_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "bloom": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense"],
}  # fmt: skip

_WEIGHT = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+\.(?P<inside>.+)\.weight")
_ROUTER = re.compile(r"(?:^|\.)(?:\w*router\w*|gate|wg|\w*_gate)(?:\.|$)")
_OTHER_PARTS = re.compile(r"(?:^|\.)(?:\w*vision\w*|visual|\w*audio\w*|\w*image\w*|mtp|nextn)(?:\.|$)")
_IN_MEMORY = {"lm_head", "mlp", "language_model", "model", "transformer"}  # modules that files name otherwise, or not
_EMBEDS = re.compile(r"emb|wte|wpe|position|rotary|relative")


def linear_layers(shapes: Mapping[str, Sequence[int]], *, vocab_size: int | None, experts: int | None) -> list[str]:
    """The names of the linear layers inside the blocks of a language model, as `target_modules` takes them.

    These are PEFT's `all-linear` layers without routers. Experts are not layers in transformers 5, and PEFT would
    create one adapter for all of them, so their names are left out. Of a state-space mixer (which has `A_log`) only the
    input projection is adapted: its fused kernels read the other weights without their adapters, and PEFT refuses some
    of them. A name that is left out in one place is left out everywhere.

    Args:
        shapes: of the tensors that transformers loads (`parameter_count.loaded`), by their names in the weight files.
        vocab_size, experts: the numbers in the config. A matrix with as many rows belongs to the vocabulary or is a
            router.
    """
    mixers = {name.rpartition(".")[0] for name in shapes if name.endswith(".A_log")}
    adapted: dict[str, None] = {}
    left_out: set[str] = set()
    for name in sorted(shapes):
        match = _WEIGHT.search(name)
        if match is None or len(shapes[name]) != 2 or _OTHER_PARTS.search(name):
            continue
        leaf = match["inside"].rpartition(".")[2]
        adapted[leaf] = None
        of_mixer = name.removesuffix(f".{leaf}.weight") in mixers and not leaf.startswith("in_proj")
        counted = shapes[name][0] in (vocab_size, experts)
        elsewhere = any(pattern.search(match["inside"]) for pattern in (_ROUTER, OF_EXPERTS))
        if of_mixer or counted or elsewhere or _EMBEDS.search(leaf):
            left_out.add(leaf)
    return [leaf for leaf in adapted if leaf not in left_out]


def require_targets(targets: Iterable[str], shapes: Mapping[str, Sequence[int]], found: list[str]) -> None:
    """Refuses a target that is not the name of a layer, because the training would refuse it only in a paid job.

    Args:
        found: the result of `linear_layers`.
    """
    matrices = (name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2)
    inside = (name for name in matrices if not (_OTHER_PARTS.search(name) or OF_EXPERTS.search(name)))
    names = {name.rpartition(".")[2] for name in inside} - {"lm_head", "embed_out", "gate"}  # a router is no layer
    for target in targets if names else ():
        if target.rpartition(".")[2] not in names:
            raise UsageError(
                f"the LoRA target {target!r} is not a layer of this model that can have an adapter",
                code="no_such_target",
                expected=f"all-linear, or of: {', '.join(sorted(found))}",
                got=target,
                hint="correct target_modules in the recipe, or leave it out",
            )


def require_saved(saved: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> None:
    """As `require_targets`, for `modules_to_save`. PEFT takes each module whose name ends with such a name."""
    parts = {part for name in shapes for part in name.split(".")[:-1]} | _IN_MEMORY
    for name in saved if shapes else ():
        leaf = name.rpartition(".")[2]
        if not leaf or not any(part.endswith(leaf) for part in parts):
            holders = {f".{key}".split(".")[-2] for key in shapes} | {"lm_head"}
            raise UsageError(
                f"modules_to_save: {name!r} is not a module of this model",
                code="no_such_target",
                expected=f"one of: {', '.join(sorted(holder for holder in holders if not holder.isdigit()))}",
                got=name or "''",
                hint="correct modules_to_save in the recipe, or leave it out",
            )


def linear_sizes(shapes: Mapping[str, Sequence[int]], names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """How often each of these modules stands in the blocks of a language model, and the sums of its inputs and outputs.

    Args:
        shapes: of the tensors that transformers loads (`parameter_count.loaded`).
        names: as `target_modules` has them.
    """
    sizes = dict[str, tuple[int, int, int]]()
    for name, shape in shapes.items():
        match = _WEIGHT.search(name)
        if match is None or len(shape) != 2 or _OTHER_PARTS.search(name) or OF_EXPERTS.search(name):
            continue
        for target in names:
            if f".{name.removesuffix('.weight')}".endswith(f".{target}"):
                count, inputs, outputs = sizes.get(target, (0, 0, 0))
                sizes[target] = count + 1, inputs + shape[1], outputs + shape[0]
    return sizes
