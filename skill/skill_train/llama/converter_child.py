"""Runs one of llama.cpp's converters in a child process that `run_converter` starts: `python -P converter_child.py
TRAIN.PY`.

It first imports the packages that every converter imports, which takes two seconds of one core. Then it waits for its
arguments, one line of JSON. The converter is patched to read the model as it was trained. It takes the keys of
config.json as the file has them (transformers drops some and adds others), and the training program's tokenizer.
"""

import gc
import importlib
import importlib.util
import json
import os
import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]  # a config.json or a tokenizer.json; this process imports nothing from skill-train
# New objects between two runs of the garbage collector, as in core/memory.py: a vocabulary is many objects, all in use.
_NEW_OBJECTS = 200_000
_QWEN_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_QWEN_TOWER_EPSILON = 1e-6  # the epsilon of the vision tower's norms, in the code of transformers
_LAYER, _MTP = re.compile(r"(?:\w+\.)*?layers\.(\d+)\."), re.compile(r"(?:model\.)?mtp\.")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # llama_token_type of llama.cpp
_ADDED_SCORE = -1000.0  # the converter's own score of added tokens
_GLM_THETA = 10000.0  # llama.cpp's converter multiplies it by `rope_ratio`
# In transformers 5 the routers of these models are sigmoids, but config.json does not say so. Without the key llama.cpp
# uses the softmax of DeepSeek-V2, refuses the file or aborts.
_SIGMOID_ROUTERS = ("deepseek_v3", "dots1", "exaone_moe", "glm4_moe_lite", "minimax_m2")


def main(train_program: str) -> None:
    gc.set_threshold(_NEW_OBJECTS)
    import torch  # noqa: F401
    import transformers

    transformers.AutoTokenizer = _tokenizers(Path(train_program))
    gc.freeze()
    arguments = json.loads(sys.stdin.readline() or "null")
    if not arguments:
        return
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    _read_own_keys()
    _score_by_merges()
    _read_added_tokens()
    _leave_out_missing_mtp()
    _keep_the_end_of_a_line()
    _keep_the_epsilon_of_towers()
    runpy.run_path(arguments[0], run_name="__main__")


def _end_with_the_command() -> None:
    """Ends this process when its standard input closes, because then the command that started it has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


def with_own_keys(parsed: JsonObject, own: JsonObject) -> JsonObject:
    """Overwrites the config that transformers parsed with the keys and values of config.json itself.

    Keys that the file leaves out keep transformers' defaults, which many converters need.
    """
    stated = {key: value for key, value in own.items() if value is not None or key not in parsed}
    inner = {
        key: with_own_keys(parsed[key], value)
        for key, value in stated.items()
        if key.endswith("_config") and isinstance(value, dict) and isinstance(parsed.get(key), dict)
    }
    return _with_old_names(_with_letters(_with_shared_heads({**parsed, **stated, **inner})))


def _with_old_names(config: JsonObject) -> JsonObject:
    """Adds keys that the converter reads and that transformers 5 writes only under other names."""
    turned = (config.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    old: dict[str, JsonObject] = {
        "gpt2": {"n_ctx": config.get("n_positions")},
        "gpt_neox": {"rotary_pct": turned},
        "cohere2": {"rotary_pct": turned},
        "afmoe": {"route_norm": True},
    }
    kind = config.get("model_type", "")
    if kind == "glm":
        theta = (config.get("rope_parameters") or config).get("rope_theta") or _GLM_THETA
        old["glm"] = {
            "seq_length": config.get("max_position_embeddings"),
            "layernorm_epsilon": config.get("rms_norm_eps"),
            "rope_ratio": theta / _GLM_THETA,
        }
    added = {"scoring_func": "sigmoid"} if kind in _SIGMOID_ROUTERS else old.get(kind, {})
    return {**{key: value for key, value in added.items() if value is not None}, **config}


def _with_shared_heads(config: JsonObject) -> JsonObject:
    """Corrects the number of key heads of Falcon 7B. With `multi_query` there is one, but transformers writes the
    number of query heads."""
    one_head = config.get("multi_query") and not config.get("new_decoder_architecture")
    return {**config, "num_kv_heads": 1} if config.get("model_type") == "falcon" and one_head else config


def _with_letters(config: JsonObject) -> JsonObject:
    """Describes a Nemotron-H without experts as its published config.json does. transformers' class always has numbers
    of experts. By them the converter takes the model for a mixture, and leaves out its MLPs."""
    layers = config.get("layers_block_type") or ()
    if config.get("model_type") != "nemotron_h" or "moe" in layers:
        return config
    letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
    of_experts = ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")
    rest = {key: value for key, value in config.items() if key not in of_experts}
    return rest | {"hybrid_override_pattern": "".join(map(letters.__getitem__, layers))}


def _tokenizers(train_program: Path) -> type:
    spec = importlib.util.spec_from_file_location("skill_train_program", train_program)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program
    spec.loader.exec_module(program)

    class AutoTokenizer:
        """Replaces transformers' class in the converter only."""

        @staticmethod
        def from_pretrained(folder: Any, **_: Any) -> Any:
            return program.read_tokenizer(str(folder), None)

    return AutoTokenizer


def _read_own_keys() -> None:
    base = importlib.import_module("conversion.base")  # llama.cpp's
    parsed = base.ModelBase.load_hparams

    def load_hparams(folder: Path, is_mistral_format: bool) -> JsonObject:
        config = parsed(folder, is_mistral_format)
        file = Path(folder) / "config.json"
        if is_mistral_format or not file.is_file():
            return config  # type: ignore[no-any-return]
        return with_own_keys(config, json.loads(file.read_text(encoding="utf-8")))

    base.ModelBase.load_hparams = staticmethod(load_hparams)


def _score_by_merges() -> None:
    """Sets the scores of sentencepiece's pieces if there is no tokenizer.model, because the converter would write the
    same score for all pieces."""
    from gguf import vocab  # llama.cpp's

    constant = vocab.LlamaHfVocab.get_token_score

    def get_token_score(self: Any, token: int) -> float:
        if not hasattr(self, "merge_ranks"):
            self.merge_ranks = merge_ranks(json.loads(self.fname_tokenizer.read_text(encoding="utf-8"))["model"])
        rank = self.merge_ranks.get(token)
        return float(constant(self, token) if rank is None else -rank)

    vocab.LlamaHfVocab.get_token_score = get_token_score


def _read_added_tokens() -> None:
    """Adds the tokens that tokenizer.json adds to a tokenizer.model. transformers 5 lists them in no other file, and
    the converter would write padding instead of them."""
    model = importlib.import_module("conversion.base").TextModel
    created = model._create_vocab_sentencepiece

    def create_vocab(self: Any) -> Any:
        tokens, scores, types = created(self)
        file = self.dir_model / "tokenizer.json"
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") if file.is_file() else None
        for token in added or ():
            number, text = token["id"], token["content"]
            if number < len(tokens) and types[number] == _UNUSED:
                control = token.get("special") or self.does_token_look_special(text)
                types[number] = _CONTROL if control else _USER_DEFINED
                tokens[number], scores[number] = text.encode(), _ADDED_SCORE
        return tokens, scores, types

    model._create_vocab_sentencepiece = create_vocab


def _leave_out_missing_mtp() -> None:
    """Converts a checkpoint without layers for multi-token prediction (MTP) as a model that has none, whatever its
    config.json counts. transformers does not write them, but converters assert that they exist, or count them."""
    model = importlib.import_module("conversion.base").ModelBase
    index = model.index_tensors

    def index_tensors(self: Any, *arguments: Any, **named: Any) -> Any:
        tensors = index(self, *arguments, **named)
        texts = (self.hparams, self.hparams.get("text_config") or {})
        layers = next((text["num_hidden_layers"] for text in reversed(texts) if "num_hidden_layers" in text), None)
        numbers = [int(found[1]) for found in map(_LAYER.match, tensors) if found]
        if layers and numbers and max(numbers) < layers and not any(map(_MTP.match, tensors)):
            type(self).no_mtp = True
            for text in texts:
                text |= {"num_nextn_predict_layers": 0} if text.get("num_nextn_predict_layers") else {}
        return tensors

    model.index_tensors = index_tensors


def _keep_the_end_of_a_line() -> None:
    """Keeps the embedding of [IMG_BREAK] in the projector of Pixtral and Mistral 3. llama.cpp does not load a projector
    without it. The converter reads it from the token embedding, but drops all tensors of the language model before.
    The converter also knows no tensor whose name begins with `model.` (ggml-org/llama.cpp#24235)."""
    if importlib.util.find_spec("conversion.llava") is None:  # another version of llama.cpp
        return
    vision = importlib.import_module("conversion.llava").LlavaVisionModel
    filtered = vision.filter_tensors

    def filter_tensors(cls: Any, item: tuple[str, Any]) -> tuple[str, Any] | None:
        name, read = item
        if name.endswith("embed_tokens.weight"):
            return ("embed_tokens.weight", read) if getattr(cls, "use_break_tok", False) else None
        return filtered.__func__(cls, (name.removeprefix("model."), read))  # type: ignore[no-any-return]

    vision.filter_tensors = classmethod(filter_tensors)


def _keep_the_epsilon_of_towers() -> None:
    """Writes the epsilon that a Qwen vision tower's norms have in transformers. The converter would write the epsilon
    of the language model into the projector."""
    for module, name in (("conversion.qwenvl", "Qwen2VLVisionModel"), ("conversion.qwen3vl", "Qwen3VLVisionModel")):
        if importlib.util.find_spec(module) is None:  # another version of llama.cpp
            continue
        vision = getattr(importlib.import_module(module), name)
        vision.set_gguf_parameters = _with_epsilon_of_tower(vision.set_gguf_parameters)


def _with_epsilon_of_tower(written: Any) -> Any:
    def set_gguf_parameters(self: Any) -> None:
        if self.global_config.get("model_type") in _QWEN_TOWERS:  # other families share the class
            text = {**self.global_config.get("text_config", {}), "rms_norm_eps": _QWEN_TOWER_EPSILON}
            self.global_config = {**self.global_config, "rms_norm_eps": _QWEN_TOWER_EPSILON, "text_config": text}
        written(self)

    return set_gguf_parameters


def merge_ranks(model: JsonObject) -> dict[int, int]:
    """Ranks the tokens that merges produce: 0 is the first. Merges are in the order of their scores."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    pieces = dict.fromkeys("".join(pair) for pair in pairs)
    return {model["vocab"][piece]: rank for rank, piece in enumerate(pieces)}


if __name__ == "__main__":
    main(sys.argv[1])
