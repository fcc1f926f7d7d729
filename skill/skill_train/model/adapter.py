"""Reads a PEFT adapter folder: its config, its tensors, and whether the streaming merge supports it."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError, quoted
from skill_train.facts import JsonObject
from skill_train.model.foreign_files import require_sound_files
from skill_train.model.lora_math import scaling
from skill_train.model.weight_files import FLOAT_BYTES, StoredTensor, read_shard, read_tensor, same_bytes
from skill_train.program.encode import limited
from skill_train.run.records import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PATTERN_SECONDS = 2.0
PREFIX = "base_model.model."

# What PEFT 0.21 appends to a module's name, by our word for its role.
_KINDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "b_bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".token_adapter.trainable_tokens_delta": "token_rows",
}
_BASE_LAYER = re.compile(r"(\.token_adapter)?\.base_layer(?=\.(weight|bias)$)")
# If PEFT saves the embeddings, it also writes these two for a module that is saved whole: the trained values once more,
# and the base's own parameter, which the other side of a tie still uses.
_SAVED_TWICE = re.compile(r"\.(modules_to_save|original_module)(?=\.(weight|bias)$)")

# Fields of LoraConfig (peft 0.21) that do not change how `lora_math` computes the merged weight: they act only in
# training, choose modules (which the tensors show too), or are read below.
_UNDERSTOOD = """
    alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias
    lora_dropout megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules task_type trainable_token_indices use_dora use_rslora corda_config lora_ga_config
"""
# Initialisations that do not change the base's weights. The others subtract something from them whenever PEFT loads.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Loading these needs data that an adapter folder does not contain; `pissa_niter_…` draws a random start.
_UNLOADABLE_STARTS = ("corda", "lora_ga", "loftq")
# Methods of peft 0.21 whose layers implement `merge`.
_MERGEABLE = """
    LORA ADALORA ADAMSS BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT
    OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT
"""


@dataclass(frozen=True)
class Adapter:
    """An adapter folder that has been read."""

    folder: Path
    config: JsonObject  # the content of adapter_config.json
    tensors: dict[str, StoredTensor]  # the header entries by PEFT's names
    # for each adapted module, the names of its tensors by role (`a`, `b`, `magnitude`, …)
    modules: dict[str, dict[str, str]]
    replaced: dict[str, str]  # for each parameter that the adapter contains completely, the name of the tensor
    # those of `replaced` that PEFT loads into the base's own parameter, not into a copy for one module
    shared: frozenset[str]
    # for each parameter of a module saved whole, the tensor with the base's own parameter below it
    originals: dict[str, str]

    def tensor(self, name: str) -> Any:
        """One tensor as a torch tensor, in its stored dtype."""
        return read_tensor(self.tensors[name])


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`.

    Raises:
        UsageError: the folder is not an adapter, is unreadable, or has a kind that cannot be merged into weights.
    """
    config = _read_config(folder)
    _require_mergeable(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise _no_weights(folder)
    tensors = read_shard(folder / WEIGHTS).tensors
    modules: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    shared = set()
    # PEFT's own test (peft 0.21, `_set_trainable`): the name of a module ends with a listed one.
    saved_names = tuple(name for name in config["modules_to_save"] if isinstance(name, str))
    twice: dict[str, dict[str, str]] = {"modules_to_save": {}, "original_module": {}}
    for name in tensors if config["peft_type"] == "LORA" else ():
        module, kind = _kind(name, tensors[name], others=bool(_options(config)))
        if kind is not None:
            modules.setdefault(module, {})[kind] = name
            continue
        if match := _SAVED_TWICE.search(module):
            twice[match[1]][_SAVED_TWICE.sub("", module)] = name
            continue
        plain = _BASE_LAYER.sub("", module)
        if plain in replaced:
            raise _unreadable(name, f"a second value for {plain}")
        replaced[plain] = name
        if plain != module or not plain.rpartition(".")[0].endswith(saved_names):
            shared.add(plain)
    copies, originals = twice.values()
    _require_same(tensors, replaced, copies, originals)
    return Adapter(folder, config, tensors, modules, replaced, frozenset(shared - {*copies, *originals}), originals)


def _require_same(
    tensors: dict[str, StoredTensor], replaced: dict[str, str], copies: dict[str, str], originals: dict[str, str]
) -> None:
    """Refuses a parameter that is saved twice with different values, because PEFT reads only the plain name."""
    for plain, name in (originals | copies).items():
        if plain not in replaced:
            raise _unreadable(name, f"no {PREFIX}{plain} beside it, which PEFT loads")
    for plain, name in copies.items():
        if not same_bytes(tensors[name], tensors[replaced[plain]]):
            raise _unreadable(name, f"another value than {replaced[plain]}, which is the same parameter")


def why_not_streamed(adapter: Adapter) -> list[str]:
    """The reasons in the config and the shapes for a merge by PEFT; empty if `lora_math` can do it."""
    config = adapter.config
    if config["peft_type"] != "LORA":
        return [f"the method {config['peft_type']} is not LoRA"]
    reasons = [f"the option {name} changes what the adapter computes" for name in _options(config)]
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        reasons.append(f"init_lora_weights {start!r} changes the base's weights when PEFT loads the adapter")
    for module, parts in adapter.modules.items():
        matrices = [adapter.tensors[parts[kind]].shape for kind in ("a", "b") if kind in parts]
        if any(len(shape) != 2 for shape in matrices):
            reasons.append(f"{module} is a convolution")
        if "token_rows" in parts and len(parts) > 1:
            reasons.append(f"{module} has trained token rows and LoRA at once")
    return reasons


def _options(config: JsonObject) -> list[str]:
    """The options in use that `lora_math` does not know."""
    return sorted(name for name, value in config.items() if value and name not in _UNDERSTOOD.split())


def whole_tensors(adapter: Adapter) -> dict[str, StoredTensor]:
    """The complete tensors in the adapter, by their names in the base; for adapters of any method."""
    plain = {_SAVED_TWICE.sub("", _BASE_LAYER.sub("", name.removeprefix(PREFIX))): name for name in adapter.tensors}
    return {name: adapter.tensors[tensor] for name, tensor in plain.items()}


def bad_adapter(
    message: str, expected: str, got: str = "", hint: str = "save the adapter again with PEFT's save_pretrained"
) -> UsageError:
    """The error of an adapter that cannot be read, or cannot be put on a base."""
    return UsageError(message, code="bad_adapter", expected=expected, got=got, hint=hint)


def pattern_value(pattern: JsonObject, module: str, default: Any) -> Any:
    """The value for a module from `rank_pattern` or `alpha_pattern`. The keys are regular expressions. The first one
    that matches the whole name or the end of it counts (peft 0.21, `get_pattern_key`).

    Raises:
        UsageError: a key takes seconds to match, such as `(a+)+b`.
    """
    for key, value in pattern.items():
        try:
            with limited(_PATTERN_SECONDS):
                match = re.match(rf"(.*\.)?({key})$", module)
        except TimeoutError:
            raise bad_adapter(
                f"the pattern {key!r} in adapter_config.json takes too long to match",
                expected="names of modules, or short regular expressions",
                got=f"more than {_PATTERN_SECONDS:g} s for {module[:80]!r}",
                hint="write the full names of the modules into rank_pattern and alpha_pattern",
            ) from None
        if match:
            return value
    return default


def scale_of(config: JsonObject, module: str) -> float:
    """The factor of the product of B and A of a module.

    Args:
        config: the config of an `Adapter`.
    """
    rank = pattern_value(config["rank_pattern"], module, config["r"])
    alpha = pattern_value(config["alpha_pattern"], module, config["lora_alpha"])
    return scaling(alpha, rank, bool(config.get("use_rslora")))


def _read_config(folder: Path) -> JsonObject:
    if not (folder / CONFIG).is_file():
        named = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))  # as PEFT saves adapters with names
        raise bad_adapter(
            f"{folder} is not a PEFT adapter",
            expected=f"a folder with {CONFIG} and {WEIGHTS}",
            got="no such folder" if not folder.is_dir() else f"no {CONFIG}",
            hint=f"give an adapter that lies in it, such as {quoted(named[0])}"
            if named
            else "use the run's adapter/ folder, or a folder that PEFT's save_pretrained wrote",
        )
    require_sound_files(folder)
    config: JsonObject = read_json(folder / CONFIG)  # an object, as `require_sound_files` refuses others
    for name, types, default in (
        ("peft_type", str, None),
        ("r", int, 8),
        ("lora_alpha", (int, float), 8),
        ("rank_pattern", dict, {}),
        ("alpha_pattern", dict, {}),
        ("modules_to_save", list, []),
    ):
        value: Any = default if config.get(name) is None else config[name]
        no_rank = name == "r" and isinstance(value, int) and value < 1
        if not isinstance(value, types) or isinstance(value, bool) or (no_rank and config["peft_type"] == "LORA"):
            raise _bad_field(folder, name, value, "what PEFT writes there")
        config[name] = value
    # Other methods have another meaning for these: 0 is OFT's own default of r, AdaLoRA's patterns are masks.
    for pattern in (config["rank_pattern"], config["alpha_pattern"]) if config["peft_type"] == "LORA" else ():
        for key, value in pattern.items():
            if not is_regex(key) or not isinstance(value, (int, float)):
                raise _bad_field(folder, f"the pattern {key!r}", value, "a regular expression and a number")
    return config


def is_regex(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `[[` will change its meaning in a later Python; PEFT uses the present one
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError):
            return False
    return True


def _bad_field(folder: Path, name: str, value: Any, expected: str) -> UsageError:
    return bad_adapter(f"{folder / CONFIG}: {name} is {value!r}", expected, repr(value)[:80])


def _require_mergeable(folder: Path, config: JsonObject) -> None:
    method, start = config["peft_type"], config.get("init_lora_weights")
    hint = "keep the adapter beside the base model instead of merging"
    if method not in _MERGEABLE.split():
        reason = f"{method} is not a change of weights"
    elif config.get("alora_invocation_tokens"):
        reason = "an activated LoRA (alora_invocation_tokens) works only after certain tokens"
    elif config.get("layer_replication"):
        reason = "layer_replication changes the number of layers"
    elif config.get("task_type") not in (None, "CAUSAL_LM"):
        reason = f"its task_type is {config['task_type']}, not CAUSAL_LM"
    elif config.get("sample_at_inference"):
        reason = "sample_at_inference draws its change of each answer at random"
    elif start in _UNLOADABLE_STARTS or str(start).startswith("pissa_niter"):
        reason = f"init_lora_weights {start!r} needs data that an adapter folder does not hold"
        if start not in _UNLOADABLE_STARTS:
            reason = f"init_lora_weights {start!r} subtracts other random numbers whenever PEFT loads the adapter"
        hint = (
            "save it again with save_pretrained(…, path_initial_model_for_weight_conversion=INITIAL_ADAPTER); if the "
            "base folder already is the residual model, set init_lora_weights to true in adapter_config.json"
        )
    else:
        return
    raise bad_adapter(f"{folder} cannot be merged: {reason}", "a LoRA adapter", hint=hint)


def _no_weights(folder: Path) -> UsageError:
    pickled = (folder / "adapter_model.bin").is_file()
    return UsageError(
        f"{folder} has no {WEIGHTS}",
        code="no_safetensors" if pickled else "missing_file",
        expected=WEIGHTS,
        got="adapter_model.bin, a pickle, which can run code when it is read" if pickled else "no weights",
        hint="load the adapter with PEFT where you trust it, and save it with save_pretrained"
        if pickled
        else "give the run's adapter/ folder, or the one that PEFT's save_pretrained wrote",
    )


def _kind(name: str, stored: StoredTensor, *, others: bool) -> tuple[str, str | None]:
    """The module of a tensor and its role; for a complete parameter its own name and None.

    Args:
        others: whether there may be LoRA tensors of another kind, which only PEFT merges; their role is `other`.
    """
    if not name.startswith(PREFIX):
        raise _unreadable(name, f"a name without {PREFIX!r}")
    if stored.dtype not in FLOAT_BYTES:
        raise _unreadable(name, f"dtype {stored.dtype}")
    path = name.removeprefix(PREFIX)
    for suffix, kind in _KINDS.items():
        if path.endswith(suffix):
            return path.removesuffix(suffix), kind
    if "lora_" in path.rpartition(".")[2] or ".lora_" in path:
        if others:
            return path.partition(".lora_")[0], "other"
        raise _unreadable(name, "an unknown kind of LoRA tensor")
    return path, None


def _unreadable(name: str, got: str) -> UsageError:
    names = "names and types as PEFT's save_pretrained writes them"
    return bad_adapter(f"the adapter's tensor {name!r} is not supported", names, got)
