"""The model: how it is loaded, which part of it trains, and how its answers are scored."""

import copy
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from skill_train.program.chat.labels import IGNORED
from skill_train.program.events import EXIT_FAILED, FileDigest, Refused, event, file_digest, readable, run_id
from skill_train.program.folders.base import config_with
from skill_train.program.model_files import INDEX, SINGLE, model_file, require_announced, weight_files, weight_map
from skill_train.program.pictures.parts import vision_part
from skill_train.program.plan import LOGITS_AT_ONCE, Placement, Recipe
from skill_train.program.split import Data

# The softmax of a chunk of logits is computed in parts of so many elements, which stay in the cache.
SOFTMAX_AT_ONCE = 1_000_000


def trained_types(model: Any, placement: Placement) -> dict[str, Any]:
    """The torch type of each weight that trains, by name. Makes it float32, unless the plan computes in bfloat16.

    TRL (1.16) makes the adapter of a quantized base bfloat16 in any case. PEFT (0.21) leaves a module that trains whole
    in the type of the base. On CUDA, the scaler of float16's gradients accepts neither.
    """
    import torch

    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in trained.values():
        if placement["dtype"] != "bfloat16":
            weight.data = weight.data.to(torch.float32)
    return {name: weight.dtype for name, weight in trained.items()}


def require_float32(optimizer: Any) -> None:
    """Refuses, before the first step, an optimizer that trains other weights than float32: their gradients cannot be
    scaled for float16."""
    types = [str(weight.dtype) for group in optimizer.param_groups for weight in group["params"]]
    others = Counter(name.removeprefix("torch.") for name in types if name != "torch.float32")
    if others:
        raise Refused(
            "trainable weights are not float32, and float16 would lose their gradients",
            code="unsafe_precision",
            exit_code=EXIT_FAILED,
            expected="float32, which this program sets",
            got=", ".join(f"{count} of {len(types)} weights are {name}" for name, count in others.items()),
            hint="use --dtype float32, or install the versions at the top of this program",
        )


def keep_input_types(model: Any) -> None:
    """Leaves it to autocast in which type an adapter computes. PEFT (0.21) makes the input of each layer float32, and
    autocast makes it 16-bit again. The values are the same, but each layer copies its input twice: a fifth of the GPU's
    time on an H100. Not for DoRA, which multiplies in float32 too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def score_trained_tokens_only(model: Any, *, fused: bool) -> None:
    """Scores the trained positions alone, some megabytes of logits at a time. On processors without Triton, TRL 1.16
    projects every position onto the vocabulary, trained or not: the same loss takes several times as long on a CPU.

    The model's own forward pass runs without the product with its head, so the balancing loss of a mixture is its own
    too. TRL 1.16 reads that from `config.num_experts`, which Granite's lack, and asks Llama 4 for a `last_hidden_state`
    that it does not return. Where TRL's own fused head is fast (`fused`) and can score the model, it stays.
    """
    import functools
    import types

    import torch
    from transformers.utils import ModelOutput

    head, config = model.get_output_embeddings(), model.config.get_text_config()
    names = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
    changes_logits = any(getattr(config, name, None) is not None for name in names)
    plain_head = not changes_logits and type(head) is torch.nn.Linear and head.bias is None
    experts = hasattr(config, "output_router_logits")
    trl_fails = model.base_model is model or (experts and not hasattr(config, "num_experts"))
    if not trl_fails and (fused or not plain_head):
        return
    original, log_probs = model.forward, log_probs_function()

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"} | {"use_cache": False}
        following = labels[:, 1:]
        mask = following != IGNORED
        if plain_head:
            outputs, hidden = without_product(head, functools.partial(original, *args, **kwargs))
            hidden, kind = hidden[:, :-1][mask], hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
            scored = log_probs.apply(hidden.to(dtype), head.weight.to(dtype), following[mask])
        else:
            outputs = original(*args, **kwargs)
            logits = outputs.logits[:, :-1][mask].float()
            scored = torch.log_softmax(logits, dim=-1).gather(1, following[mask][:, None]).squeeze(1)
        none = scored.detach().new_zeros(mask.shape)
        spread = none.masked_scatter(mask, scored)
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            aux_loss = none.new_zeros(())  # this model's own forward pass has no balancing loss
        return ModelOutput(  # DistributedDataParallel finds in it which weights were used
            loss=None, log_probs=spread, entropy=none, is_top1=none, label_mask=mask, aux_loss=aux_loss
        )

    model.forward = types.MethodType(forward, model)


def without_product(head: Any, forward: Callable[[], Any]) -> tuple[Any, Any]:
    """The outputs of the forward pass without the product of its head, and the hidden states that the head received."""
    hidden_states = []

    def keep(hidden: Any) -> Any:
        hidden_states.append(hidden)
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    head.forward = keep
    try:
        outputs = forward()
    finally:
        del head.forward
    return outputs, hidden_states[-1]


def log_probs_function() -> Any:
    import torch

    class LogProbs(torch.autograd.Function):  # type: ignore[misc]
        """log p of each label. hidden [tokens, width], weight [vocabulary, width], labels [tokens] -> [tokens].

        d log p / d logits = one at the label - softmax(logits). If the weight is frozen, the gradient of `hidden` is
        computed in the forward pass, while the logits of a chunk exist. If it trains, the backward pass computes the
        logits again.
        """

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, labels: Any) -> Any:
            ctx.trained = ctx.needs_input_grad[1]
            log_p = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
            gradient = None if ctx.trained else torch.empty_like(hidden)
            for at in chunks(labels, weight, LOGITS_AT_ONCE):
                logits = hidden[at] @ weight.T
                for part in chunks(logits, weight, SOFTMAX_AT_ONCE):
                    some = logits[part].float()
                    total = torch.logsumexp(some, dim=1, keepdim=True)
                    log_p[at][part] = (some.gather(1, labels[at][part, None]) - total).squeeze(1)
                    if gradient is not None:
                        logits[part] = some.sub_(total).exp_()
                if gradient is not None:
                    gradient[at] = weight[labels[at]] - logits @ weight
            ctx.save_for_backward(*((hidden, weight, labels) if ctx.trained else (gradient,)))
            return log_p

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if not ctx.trained:
                (gradient,) = ctx.saved_tensors
                return (gradient * grad[:, None].to(gradient.dtype)), None, None
            hidden, weight, labels = ctx.saved_tensors
            to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
            for at in chunks(labels, weight, LOGITS_AT_ONCE):
                change = torch.softmax((hidden[at] @ weight.T).float(), dim=1).neg_()
                change.scatter_add_(1, labels[at, None], torch.ones_like(change[:, :1]))
                change *= grad[at, None]
                to_hidden[at] = change.to(weight.dtype) @ weight
                to_weight.addmm_(change.T, hidden[at].float())
            return to_hidden, to_weight.to(weight.dtype), None

    def chunks(tokens: Any, weight: Any, elements: int) -> Iterator[slice]:
        rows = max(1, elements // weight.shape[0])
        return (slice(start, start + rows) for start in range(0, len(tokens), rows))

    return LogProbs


def attention_kernel(recipe: Recipe, kernel: str, config: Any) -> str:
    """The kernel of the plan, or eager if the model's class does not support it. torch's fused attention supports
    neither the capped scores of Gemma 2 nor the sinks of gpt-oss."""
    built = model_class(recipe)._model_mapping.get(type(config), None)
    if kernel != "sdpa" or built is None or built._supports_sdpa:
        return kernel
    event("note", text=f"eager attention in place of sdpa: {built.__name__} has no fused kernel")
    return "eager"


def model_class(recipe: Recipe) -> Any:
    """The class that loads the model: with its vision tower where the rows have pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if recipe.get("images") else AutoModelForCausalLM


def load_model(recipe: Recipe, placement: Placement) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    # A frozen base has the type of the computation. Weights that train are float32: a step that moves a bfloat16 by
    # less than 1/256 of it changes nothing. `pure_bf16` accepts that.
    in_full = is_full(recipe) and not recipe["pure_bf16"]
    dtype = torch.float32 if in_full else getattr(torch, placement["dtype"])
    quantization = None
    if recipe["load_in_4bit"]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # FSDP shards only floating point weights, so with it the 4-bit values are stored in numbers of that type.
            bnb_4bit_quant_storage=dtype if placement["strategy"] == "fsdp" else torch.uint8,
        )
    if run_id() is not None and not Path(recipe["model"]).is_dir():
        bring_weights(recipe)
    with readable(recipe["model"]):
        config = config_with(recipe["model"], recipe["revision"], placement["attn_implementation"])
        config._attn_implementation = attention_kernel(recipe, placement["attn_implementation"], config)
        model = model_class(recipe).from_pretrained(
            recipe["model"],
            revision=recipe["revision"],
            config=config,
            dtype=dtype,
            quantization_config=quantization,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model.config.use_cache = False  # a cache and gradient checkpointing cannot be used together
    return model


def bring_weights(recipe: Recipe) -> None:
    """Brings the weights of a base on the Hub to the cache: transformers 5.23 takes weights that it cannot fetch for
    missing ones. A job has fetched none yet."""
    from huggingface_hub import snapshot_download

    index = model_file(recipe["model"], recipe["revision"], INDEX)
    names = sorted(set(weight_map(Path(index)).values())) if index is not None else [SINGLE]
    snapshot_download(recipe["model"], revision=recipe["revision"], allow_patterns=names)


def read_back(recipe: Recipe, folder: Path, like: Any) -> Any:
    """The whole model that a folder holds, in the type and with the kernel of the model `like`."""
    config = config_with(str(folder), None, like.config._attn_implementation)
    options = {"dtype": like.dtype, "trust_remote_code": False, "use_safetensors": True}
    return model_class(recipe).from_pretrained(folder, config=config, **options)


def base_weights(recipe: Recipe) -> dict[str, FileDigest]:
    """The digests of the files from which `load_model` has read the weights, by name."""
    name, revision = recipe["model"], recipe["revision"]
    files = [model_file(name, revision, file) for file in (INDEX, SINGLE)]
    first = next((Path(file) for file in files if file is not None), None)
    paths = weight_files(first.parent) if first is not None else []
    digests = {path: file_digest(path) for path in paths if path.is_file()}
    for path, digest in digests.items():
        require_announced(path, digest["sha256"])
    return {path.name: digest for path, digest in digests.items()}


def is_full(recipe: Recipe) -> bool:
    """Whether every weight trains, instead of an adapter."""
    return recipe["finetuning_type"] == "full"


def check_optimizer(recipe: Recipe) -> None:
    """Refuses an unknown optimizer before the model is loaded. The trainer would refuse it afterwards."""
    from transformers.training_args import OptimizerNames

    names = [name.value for name in OptimizerNames]
    if recipe["optim"] not in names:
        close = difflib.get_close_matches(recipe["optim"], names, n=1)
        raise Refused(
            f"optim: {recipe['optim']!r} is unknown",
            code="bad_recipe",
            expected=", ".join(names),
            got=recipe["optim"],
            hint=f"did you mean {close[0]!r}?" if close else "leave optim out of the recipe for AdamW",
        )


def lora_config(recipe: Recipe, model: Any) -> Any:
    from peft import LoraConfig

    modules = list(model.named_modules(remove_duplicate=False))
    language = [each for each in modules if vision_part(each[0]) == "language"]
    sees = len(language) < len(modules)  # it has a vision part, which rows of text do not train
    for target in recipe["target_modules"]:
        check_target(target, language, model.get_output_embeddings())
    for name in recipe["modules_to_save"] or []:
        check_saved(name, modules)
    config = LoraConfig(
        r=recipe["lora_r"],
        lora_alpha=recipe["lora_alpha"],
        lora_dropout=recipe["lora_dropout"],
        target_modules=vision_targets(recipe, modules) if sees else recipe["target_modules"],
        modules_to_save=recipe["modules_to_save"],
        use_rslora=recipe["use_rslora"],
        use_dora=recipe["use_dora"],
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        bias="none",
        task_type="CAUSAL_LM",
    )
    check_experts(config, model)
    check_apart(config, modules)
    return config


def vision_targets(recipe: Recipe, modules: list[tuple[str, Any]]) -> str | list[str]:
    """The modules that get an adapter: the recipe's targets in the language model, and all linear layers of the other
    chosen parts. The names of targets alone would match the tower too, which has its own `q_proj`."""
    targets, parts = "|".join(map(re.escape, recipe["target_modules"])), recipe.get("lora_parts") or ["language"]
    if parts == ["language"]:
        return rf"(?=(?:.*\.)?(?:language_model|text_model)\.)(?:.*\.)?(?:{targets})"
    ends = re.compile(rf"(?:^|\.)(?:{targets})$")
    linear = [(name, vision_part(name)) for name, module in modules if is_linear(module)]
    for part in sorted(set(parts) - {found for _, found in linear}):
        raise Refused(
            f"the {part} of this model has no linear layer for an adapter",
            code="no_such_target",
            expected="parts with linear layers",
            got=part,
            hint=f"remove {part} from lora_parts, or train it whole: modules_to_save with the name of its module",
        )
    return [name for name, part in linear if part in parts and (part != "language" or ends.search(name))]


def check_experts(config: Any, model: Any) -> None:
    """Refuses targets by the names that experts had before transformers 5. PEFT makes one adapter for all experts of
    such names, in dense layers too, for which `skill-train merge` has no rule."""
    from peft.utils import transformers_weight_conversion

    convert = getattr(transformers_weight_conversion, "_convert_peft_config_moe", None)
    if convert is None:
        return
    trial = copy.deepcopy(config)
    try:
        convert(trial, model)
        of_experts = sorted(set(config.target_modules) - set(trial.target_modules))
    except ValueError:  # only some of the names that belong together are there
        of_experts = sorted(config.target_modules)
    if of_experts:
        raise Refused(
            f"the LoRA targets {', '.join(of_experts)} belong to experts, whose adapters cannot be merged",
            code="no_such_target",
            expected="modules outside the experts, such as those of the attention",
            got=", ".join(of_experts),
            hint="remove target_modules from the recipe to use the targets of the architecture",
        )


def check_target(target: str, modules: list[tuple[str, Any]], head: Any) -> None:
    """Refuses a target that PEFT does not find, that cannot have an adapter, or that could not be merged."""
    import torch

    matching = [module for name, module in modules if name == target or name.endswith(f".{target}")]
    other = next((m for m in matching if not is_linear(m) and not isinstance(m, torch.nn.Embedding)), None)
    got, hint = target, "set target_modules in the recipe, or leave it out to have it chosen by the architecture"
    if not matching:
        message = f"the LoRA target {target!r} is not a module of this model"
    elif other is not None:
        message, got = f"the LoRA target {target!r} is not a linear layer", f"{target} ({type(other).__name__})"
    elif any(module is head for module in matching):  # TRL 1.16 computes the loss with its weight alone
        message, hint = (
            f"the output head {target!r} cannot have an adapter",
            f"modules_to_save: [{target}] trains it whole",
        )
    else:
        return
    leaves = {name.rsplit(".", 1)[-1] for name, module in modules if is_linear(module) and module is not head}
    expected = f"one of: {', '.join(sorted(leaves - {'lm_head'}))}"
    raise Refused(message, code="no_such_target", expected=expected, got=got, hint=hint)


def check_saved(saved_name: str, modules: list[tuple[str, Any]]) -> None:
    """Refuses a name with which no module's name ends: PEFT, which saves every module that ends so, ignores it."""
    import torch

    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    saved = [module for name, module in modules if saved_name and name.endswith(saved_name)]
    trained = any(next(module.parameters(), None) is not None for module in saved)
    if trained and not any(isinstance(module, containers) for module in saved):
        return
    trainable = {
        name.rsplit(".", 1)[-1] for name, module in modules if next(module.parameters(recurse=False), None) is not None
    }
    raise Refused(
        f"modules_to_save: {saved_name!r} is not a trainable module of this model",
        code="no_such_target",
        expected=f"one of: {', '.join(sorted(trainable))}",
        got=saved_name or "''",
        hint="correct modules_to_save in the recipe, or remove it",
    )


def check_apart(config: Any, modules: list[tuple[str, Any]]) -> None:
    """Refuses `modules_to_save` that leave no module for an adapter, and those that would train a module whole together
    with its adapter: PEFT (0.21) leaves out a target only below a module that is named by whole parts of its name."""
    from peft.tuners.tuners_utils import check_target_module_exists

    ends = tuple(config.modules_to_save or ())
    adapted = [name for name, _ in modules if check_target_module_exists(config, name)]
    both = (n for n in adapted if any(part.endswith(ends) for part in accumulate(n.split("."), "{}.{}".format)))
    found = next(both, None) if adapted else "no module is left for an adapter"
    if found is not None:
        raise Refused(
            f"modules_to_save: {', '.join(ends)} trains whole what target_modules adapts",
            code="bad_recipe",
            expected="modules beside the targets, by whole parts of their names",
            got=found,
            hint="take these modules out of modules_to_save or out of target_modules in the recipe",
        )


def is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit", "Linear8bitLt")


def check_vocabulary(model: Any, data: Data) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    highest = max(max(row["input_ids"]) for row in data["train"] + data["held_out"])
    if highest >= size:
        raise Refused(
            "the tokenizer has a token without an embedding in the model",
            code="bad_tokenizer",
            expected=f"token ids below {size}",
            got=str(highest),
            hint="use the tokenizer that belongs to the model",
        )
