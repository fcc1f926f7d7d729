"""Recipes that no run could train: they are refused before anything is planned."""

from skill_train.core.errors import UsageError, quoted
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.program.plan import POSITIONS_IN_TABLE
from skill_train.recipe.fields import Recipe

# peft 0.21: `mamba_model_types` of tuners/tuners_utils.py
OF_MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
# peft 0.21, `_convert_peft_config_moe`: by these names it adapts all experts together, and dense layers too
OF_EXPERTS = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), ("gate", "w1", "w2", "w3")),
    **dict.fromkeys(
        (
            "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
            "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
            "longcat_flash", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text",
            "qwen3_omni_moe_thinker", "sarvam_mla", "solar_open",
        ),
        ("gate", "gate_proj", "up_proj", "down_proj"),
    ),
}  # fmt: skip
MOST_ROWS_FED = 10**9  # the order of the rows takes 8 bytes for each


def require_positions(recipe: Recipe, model: ModelFacts, dataset: DatasetFacts) -> None:
    """Refuses a `max_length` that leaves the longest row longer than the model's table of positions, as far as the
    lengths are known; the training program knows them all.

    Raises:
        UsageError: the training would end in the step with that row.
    """
    context, tokens = model.context, dataset.tokens
    if context is None or tokens is None or model.model_type not in POSITIONS_IN_TABLE:
        return
    if min(recipe.max_length, tokens.longest[0]) > context:
        raise UsageError(
            f"max_length {recipe.max_length} is more than the {context} positions of {recipe.model}",
            code="bad_recipe",
            expected=f"max_length of at most {context}",
            got=f"rows of {tokens.longest[0]} tokens and more ({tokens.basis})",
            hint=f"max_length: {context} in the recipe, or --max-length {context}",
        )


def require_full_precision(recipe: Recipe, model: ModelFacts) -> None:
    """Refuses a quantized checkpoint as the base, and a model that no training can have in 4 bits.

    Raises:
        UsageError: the model is quantized, and not by bitsandbytes for a training in 4 bits; or it is a Mamba.
    """
    if recipe.load_in_4bit and model.model_type == "mamba":  # transformers 5.24 multiplies by `dt_proj.weight` itself
        raise UsageError(
            f"{recipe.model} is a Mamba, which transformers cannot compute in 4 bits",
            code="bad_recipe",
            expected="load_in_4bit: false for models of the type mamba",
            got="load_in_4bit true",
            hint="remove load_in_4bit from the recipe",
        )
    # transformers reads a checkpoint of bitsandbytes with load_in_4bit, and refuses one of any other kind
    if model.quantization and not (recipe.load_in_4bit and model.quantization == "bitsandbytes"):
        raise UsageError(
            f"{recipe.model} is quantized ({model.quantization}), and an adapter cannot be merged into it exactly",
            code="quantized_base",
            expected="the full-precision model that it was made from",
            hint="use the original model; load_in_4bit: true quantizes it while training (QLoRA)",
        )


def require_adaptable(recipe: Recipe, model: ModelFacts) -> None:
    """Refuses targets for which PEFT makes no adapter, or none that `merge` could take: the training would end there.

    Raises:
        UsageError: the recipe names such a target.
    """
    kind, named = model.model_type, (recipe.target_modules or []) if recipe.finetuning_type == "lora" else []
    refused = ("out_proj",) if kind in OF_MAMBA else OF_EXPERTS.get(kind, ())
    target = next((name for name in named if name.rpartition(".")[2] in refused), None)
    if target is not None:
        leaf, others = target.rpartition(".")[2], "in_proj" if kind in OF_MAMBA else "those of the attention"
        why = "" if kind in OF_MAMBA else " that could be merged: it makes one for all experts"
        raise UsageError(
            f"PEFT has no adapter for {leaf} of models of the type {kind}{why}",
            code="no_such_target",
            expected=f"other linear layers, such as {others}",
            got=target,
            hint=f"remove {quoted(target)} from target_modules in the recipe, or use target_modules: all-linear",
        )


def require_feedable(steps: int, recipe: Recipe) -> None:
    """Refuses more rows than fit in memory, because the training program orders all rows before the first step.

    Raises:
        UsageError: the run would read more than `MOST_ROWS_FED` rows.
    """
    rows = steps * recipe.effective_batch_size
    if rows > MOST_ROWS_FED:
        raise UsageError(
            f"this run would read {rows:,} rows: {steps:,} steps of {recipe.effective_batch_size:,}",
            code="bad_recipe",
            expected=f"at most {MOST_ROWS_FED:,}",
            got=f"{rows:,}",
            hint="use fewer steps or epochs, a smaller effective_batch_size, or a part such as split: train[:1000000]",
        )
