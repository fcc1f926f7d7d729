"""Loads the models with which exported files are compared, through transformers and PEFT, in fp32 on the CPU.

Computing in bf16 alone is 6e-5 nats off, so a reference always computes in fp32, also if its weights have 16 bits.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skill_train.core.errors import NotInstalled, SkillTrainError, UsageError, not_installed, out_of_memory
from skill_train.core.memory import keep_freed
from skill_train.facts import JsonObject
from skill_train.machine.limits import require_room_for_torch
from skill_train.model.adapter import PREFIX, bad_adapter, read_adapter, scale_of
from skill_train.model.config import text_config
from skill_train.model.foreign_files import block_hub_kernels, require_sound
from skill_train.model.template_guard_worker import require_ending
from skill_train.model.weight_files import read_shard
from skill_train.program.events import first_line
from skill_train.program.folders.base import config_with
from skill_train.program.tokenizer import read_tokenizer
from skill_train.run.records import read_json
from skill_train.run.train_record import stops_of

# Texts for a model without its own data: plain prose, code, digits and other scripts.
NEUTRAL_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Water boils at 100 degrees Celsius at sea level, and at about 71 degrees on top of Mount Everest.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(2, 40))  # 42\n",
    "Am Anfang war das Wort. Au commencement était la parole. В начале было слово. 最初に言葉があった。",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946",
)

_MISSING = "Found missing adapter keys"  # the begin of a warning of PEFT 0.21
_LATER = "Unexpected keyword arguments"
_NO_MODULE = ("Target modules", "Cannot convert PEFT target")  # how error messages of PEFT 0.21 begin
# Tensors that PEFT loads under another name: modules that were trained whole, and the rows of a tied head.
_SAVED_TWICE = re.compile(r"\.(modules_to_save|original_module|token_adapter)\.[\w.]+$")
_EXPERT = re.compile(r"\.experts\.\d+\.")  # an expert's name in transformers 4
# By the parameter of transformers 5 that holds all experts: the names that transformers 4 had for an expert's parts.
_PARTS = {"gate_up_proj": (".gate_proj", ".up_proj", ".w1", ".w3"), "down_proj": (".down_proj", ".w2")}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")


class NotLoaded(UsageError):
    """PEFT cannot load a part of an adapter. The part may still fit the tensors in the base's files."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder as the training program reads it, never with remote code.

    Raises:
        UsageError: its files cannot be read, or its chat template does not end.
    """
    require_sound(folder)
    _transformers()
    expected = "tokenizer files that transformers loads without code of the model's own"
    try:
        with library_errors(f"the tokenizer in {folder} cannot be read", expected, hint="download the model again"):
            tokenizer = read_tokenizer(str(folder), None)
    except SkillTrainError:
        if (folder / "config.json").is_file():
            require_config(folder)
        raise
    require_ending(tokenizer.chat_template)
    return tokenizer


def require_config(folder: Path) -> None:
    """Refuses a config.json that transformers cannot read. Otherwise a later error would blame the tokenizer.

    Raises:
        UsageError: transformers cannot read the file.
    """
    require_sound(folder)
    with library_errors(f"{folder / 'config.json'} cannot be read", "a config.json that transformers reads"):
        _transformers().AutoConfig.from_pretrained(str(folder), trust_remote_code=False)


@contextlib.contextmanager
def library_errors(
    message: str,
    expected: str,
    code: str = "broken_model",
    hint: str = "correct the fault in `got`, or download the model again",
) -> Iterator[None]:
    """Translates errors of a library that loads a folder. It catches Exception, because the library raises another
    class for every field, and tokenizers raises Exception itself."""
    try:
        yield
    except SkillTrainError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        install = 'pip install "skill-train[train,gguf]", or the package that `got` names'
        needs = f"{message}: it needs a package that is not installed"
        package = NotInstalled(needs, code="missing_package", got=got, hint=install)
        refusal = UsageError(message, code=code, expected=expected, got=got, hint=hint)
        raise out_of_memory(error) or (package if isinstance(error, ImportError) else refusal) from error


@contextlib.contextmanager
def reference_model(
    base: Path,
    adapter: Path | None = None,
    read: Callable[[Path], Any] | None = None,
    lacks: list[str] | None = None,
) -> Iterator[Any]:
    """Loads the model of `base`, with a PEFT adapter if there is one, in fp32, in evaluation mode, on the CPU.

    It is freed when the block ends, so two models are never in memory together. `read` replaces the function that reads
    the base. `lacks` receives the tensors of LoRA layers for which the adapter has no tensor at all.
    """
    _transformers()
    model = (read or read_model)(base)
    if adapter is not None:
        model = _with_adapter(model, adapter, [] if lacks is None else lacks)
    yield model.eval()


def read_model(base: Path, dtype: str = "float32", task: str = "CausalLM") -> Any:
    """Loads the model of a folder, with weights in torch's type `dtype`.

    Args:
        task: the ending of transformers' class AutoModelFor…; `ImageTextToText` also loads the vision tower.
    """
    require_sound(base)
    # torch reads it at its first large tensor (c10/core/impl/alloc_cpu.cpp): it then uses pages of 2 MB if possible.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import torch

    model_class = getattr(_transformers(), f"AutoModelFor{task}")
    with library_errors(f"the model in {base} cannot be loaded", "weights that fit its config.json"):
        # Without sdpa a tower keeps the attention scores of all patches at once: 0.9 GB for each head and photograph.
        config = config_with(str(base), None, "eager" if task == "CausalLM" else "sdpa")
        return model_class.from_pretrained(
            str(base), config=config, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
        )


def logits(model: Any, ids: list[int], **pictures: Any) -> Any:
    """Logits of one sequence as a float32 array [len(ids), vocabulary].

    Args:
        pictures: further inputs of the model.
    """
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False, **pictures).logits[0].float().numpy()


def generation_config(folder: Path) -> JsonObject:
    """The content of a model folder's generation_config.json; empty if there is no such file, or no object in it."""
    file = folder / "generation_config.json"
    stated = read_json(file) if file.is_file() else None
    return stated if isinstance(stated, dict) else {}


def stop_ids(folder: Path, tokenizer: Any, adapter: Path | None = None) -> set[int]:
    """The ids that end an answer: those in generation_config.json, or else in config.json, as transformers reads them.
    The tokenizer's EOS counts too unless the file has a list, and so do the ids that a merge of `adapter` would add."""
    stated = (generation_config(folder) or read_json(folder / "config.json")).get("eos_token_id")
    listed = stated if isinstance(stated, list) else [stated, tokenizer.eos_token_id]
    return {token for token in [*listed, *stops_of(adapter)] if token is not None}


def context_length(config: JsonObject) -> int | None:
    """The most tokens that a model accepts, from its config.json; None if the config does not say."""
    text = {**config, **text_config(config)}
    return next((int(text[key]) for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None)


def bounded(rows: list[list[int]], longest: int, most: int) -> list[list[int]]:
    """The rows, each cut to its first `longest` tokens, up to `most` tokens in all."""
    chosen: list[list[int]] = []
    for ids in rows:
        cut = ids[: min(longest, most)]
        if len(cut) > 1:  # a single token predicts nothing that could be compared
            chosen.append(cut)
            most -= len(cut)
    return chosen


def _with_adapter(model: Any, adapter: Path, lacks: list[str]) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise not_installed("peft", "train") from None
    expected, hint = "an adapter as PEFT's save_pretrained writes it", "save the adapter again with save_pretrained"
    with (
        warnings.catch_warnings(record=True) as warned,  # most are advice for training; the results are measured
        library_errors(f"PEFT cannot load {adapter}", expected, "bad_adapter", hint),
    ):
        warnings.simplefilter("always")
        _match_vocabulary(model, adapter)
        try:
            tuned = PeftModel.from_pretrained(model, str(adapter), is_trainable=False)
        except ValueError as error:
            if str(error).startswith(_NO_MODULE):
                raise _not_loaded(f"PEFT cannot put the adapter on this model: {first_line(error)}") from error
            raise
        lacks += _require_whole(adapter, [str(warning.message) for warning in warned])
        _require_loaded(tuned, adapter)
        tuned.get_layer_status()  # raises an error where PEFT found no layer for the adapter
        return tuned


def _require_whole(adapter: Path, warned: list[str]) -> list[str]:
    """Refuses an option that PEFT does not know, and an adapter that lacks tensors. PEFT only warns, leaves the option
    out, and takes the values from before a training. A LoRA layer without any of its tensors changes nothing: returns
    the tensors of those."""
    later, lacks = (
        [name for text in warned if text.startswith(start) for name in re.findall(r"'([^']+)'", text)]
        for start in (_LATER, _MISSING)
    )
    files, nothing = read_adapter(adapter), list[str]()
    if used := [name for name in later if files.config.get(name)]:
        raise bad_adapter(
            f"{adapter} has an option that the installed PEFT does not know, and would leave out",
            expected="options of this PEFT",
            got=f"{used[0]}: {str(files.config[used[0]])[:80]}",
            hint="pip install -U peft; or, if it does not change the answers, remove it from adapter_config.json",
        )
    if files.config["peft_type"] == "LORA":
        nothing = [name for name in lacks if name.removeprefix(PREFIX).partition(".lora_")[0] not in files.modules]
    wrong = [name for name in lacks if name not in nothing]
    if wrong:
        raise bad_adapter(
            f"{adapter} lacks {len(wrong)} tensors of its layers",
            expected=f"{wrong[0].replace('.default', '')}, as its config says",
            got="no such tensor, so PEFT takes its value from before the training",
        )
    return nothing


def _require_loaded(tuned: Any, adapter: Path) -> None:
    """Checks that PEFT loaded the whole adapter with the right scales. Otherwise the reference would be another model.

    In a mixture, PEFT (0.21) applies a target such as `down_proj` to the experts only, and loads nothing for the same
    name in a dense layer or a shared expert (huggingface/peft#3711). It also joins the adapters of gate and up of
    transformers 4's experts, and doubles rank and alpha, which is wrong if the scale is not alpha / rank.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    if tuned.peft_config["default"].peft_type == "ADALORA":
        tuned.peft_config["default"].rank_pattern = None  # masks, which loading has applied
    # Only a second loading reports the tensors that fit no layer.
    left = set_peft_model_state_dict(tuned, load_peft_weights(str(adapter), device="cpu")).unexpected_keys
    left = [name for name in left if not _SAVED_TWICE.search(name)]
    if left:
        raise _not_loaded(
            f"PEFT has no place for {len(left)} of the adapter's tensors in this model, such as {left[0]}"
        )
    files = read_adapter(adapter)
    experts = [module for module in files.modules if _EXPERT.search(module)]
    for layer in (layer for layer in tuned.modules() if hasattr(layer, "parameter_name")):
        parts = [module for module in experts if module.endswith(_PARTS.get(layer.parameter_name, ()))]
        if {scale_of(files.config, module) for module in parts} - {layer.scaling["default"]}:
            raise _not_loaded(f"PEFT gives the adapters of {layer.parameter_name}, which it joins, another scale")


def _not_loaded(message: str) -> NotLoaded:
    return NotLoaded(
        f"{message}, so base + adapter cannot be computed",
        code="wrong_base",
        expected="an adapter that PEFT loads on this base, all of it and as its config says",
        got="another model than the one that was trained",
        hint="use the base that base_model_name_or_path in adapter_config.json names; if this is it, "
        "`skill-train merge` without --gate answers compares the weights alone, where it can",
    )


def _match_vocabulary(model: Any, adapter: Path) -> None:
    """Resizes the model's vocabulary to that of the adapter, because PEFT (0.21) does not resize it."""
    sides = [side for side in (model.get_input_embeddings(), model.get_output_embeddings()) if side is not None]
    names = [name for name, module in model.named_modules() if any(module is side for side in sides)]
    parts = ("", "base_layer.", "token_adapter.base_layer.")
    saved = {f"base_model.model.{name}.{part}weight" for name in names for part in parts}
    tensors = read_shard(adapter / "adapter_model.safetensors").tensors
    rows = {stored.shape[0] for name, stored in tensors.items() if name in saved}
    if len(rows) == 1 and rows != {len(sides[0].weight)}:
        model.resize_token_embeddings(rows.pop(), mean_resizing=False)


def _transformers() -> Any:
    keep_freed()
    require_room_for_torch()
    block_hub_kernels()
    try:
        import transformers
    except ImportError as error:
        raise out_of_memory(error) or not_installed("transformers", "train") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
