"""Tiny real vision models: the shapes, processors and files of published ones, with random weights.

`cached("qwen2-vl")` is a folder with a language model of two layers, a vision tower of two to four, and its projector.
transformers loads it, and llama.cpp converts it to a pair of files. Never change a cached folder: copy it first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tiny
import tiny_vocab

KINDS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3", "smolvlm", "idefics3", "mistral3", "pixtral")
HIDDEN = 64
_FILES = ("tiny_vision.py", "tiny.py", "tiny_vocab.py", "tiny_templates.py")
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def one_of_each(*more: str) -> list[Any]:
    """The families for a test of each way to read a picture: Qwen's, Gemma 3's, and that of tiles. The others run in
    `make walks`."""
    import pytest

    kept = ("qwen3-vl", "gemma3", "smolvlm", *more)
    return [*kept, *(pytest.param(kind, marks=pytest.mark.torture) for kind in KINDS if kind not in kept)]


def cached(kind: str, *, seed: int = 0) -> Path:
    """The folder of a vision model built earlier by the same code, or built now. Processes may ask at once."""
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in _FILES)
    key = hashlib.sha256(code + f"{kind} {seed}".encode()).hexdigest()[:16]
    final = Path(tempfile.gettempdir()) / f"skill-train-tiny-{os.getuid()}" / f"vision-{kind}-{key}"
    return tiny.made_once(final, lambda part: build(kind, part, vocab_folder=tiny.vocab_folder(), seed=seed))


def build(kind: str, folder: Path, *, vocab_folder: Path, seed: int = 0) -> Path:
    """Writes one model folder with tokenizer, template and processor files, and returns it."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    ids = _write_tokenizer(kind, folder, vocab_folder)
    config = _CONFIGS[kind](ids)
    torch.manual_seed(seed)  # buffers are not drawn below
    model = transformers.AutoModelForImageTextToText.from_config(config)
    _fill(model, seed)
    model.config.dtype = "float32"
    model.generation_config.update(bos_token_id=ids["bos"], eos_token_id=ids["stop"], pad_token_id=ids["pad"])
    model.save_pretrained(str(folder))
    if kind == "gemma3":
        _name_as_published(folder / "model.safetensors")
    for name, document in _processor_files(kind).items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return folder


def _write_tokenizer(kind: str, folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """The ids that config.json needs, with those of the tokens around and in place of a picture."""
    if kind.startswith("qwen"):
        return tiny_vocab.write_qwen_pictures(folder, vocab_folder)
    if kind == "gemma3":
        ids = tiny_vocab.write_gemma(folder, pictures=True)
        return ids | {"picture": {"boi_token_index": 7, "eoi_token_index": 8, "image_token_index": 9}}
    if kind in ("mistral3", "pixtral"):
        ids = tiny_vocab.write_mistral3(folder, vocab_folder)
        return ids | {"picture": {"image_token_index": ids.pop("image")}}
    ids = tiny_vocab.write_smolvlm(folder, vocab_folder)
    return ids | {"picture": {"image_token_id": ids.pop("image")}}


def _qwen2_vl(ids: dict[str, Any]) -> Any:
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(
        text_config=_text(ids) | {"rope_parameters": _sections(mrope_section=[2, 3, 3])},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **ids["picture"],
        tie_word_embeddings=True,
    )


def _qwen2_5_vl(ids: dict[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=_text(ids) | {"rope_parameters": _sections(mrope_section=[2, 3, 3])},
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        **ids["picture"],
        tie_word_embeddings=True,
    )


def _qwen3_vl(ids: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config=_text(ids) | {"head_dim": 32, "rope_parameters": _sections(**sections)},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **ids["picture"],
        tie_word_embeddings=True,
    )


def _gemma3(ids: dict[str, Any]) -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(
        text_config=_text(ids) | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        **ids["picture"],
        eos_token_id=ids["stop"],
    )


def _smolvlm(ids: dict[str, Any]) -> Any:
    from transformers import SmolVLMConfig

    return _tiled(SmolVLMConfig, ids)


def _idefics3(ids: dict[str, Any]) -> Any:
    from transformers import Idefics3Config

    return _tiled(Idefics3Config, ids)


def _mistral3(ids: dict[str, Any]) -> Any:
    from transformers import Mistral3Config

    return Mistral3Config(**_lined(ids), spatial_merge_size=2)


def _pixtral(ids: dict[str, Any]) -> Any:
    """A Llava, as Pixtral is published in the form of Hugging Face: one token for each patch."""
    from transformers import LlavaConfig

    whole = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return LlavaConfig(**_lined(ids), **whole)


def _lined(ids: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return {
        "text_config": _text(ids) | {"model_type": "mistral", "tie_word_embeddings": False, "rope_parameters": rope},
        "vision_config": tower
        | {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16, "hidden_act": "silu"},
        "tie_word_embeddings": False,
        **ids["picture"],
    }


def _tiled(made: Any, ids: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    own = {"model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "tie_word_embeddings": False}
    return made(
        text_config=_text(ids) | own | {"rope_parameters": rope},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        scale_factor=2,
        tie_word_embeddings=False,
        **ids["picture"],
    )


_CONFIGS = {
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "mistral3": _mistral3,
    "pixtral": _pixtral,
}


def _text(ids: dict[str, Any]) -> dict[str, Any]:
    tokens = {"vocab_size": ids["vocab_size"], "bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    return _TEXT | tokens | {"pad_token_id": ids["pad"], "tie_word_embeddings": True}


def _sections(**sections: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1000000.0, **sections}


def _processor_files(kind: str) -> dict[str, Any]:
    """As the published models have them, with fewer pixels."""
    if kind in ("qwen2-vl", "qwen2.5-vl"):
        patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        limits = {"min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}
        return {"preprocessor_config.json": _qwen_pictures(kind, patches | limits | _CLIP)}
    if kind == "qwen3-vl":
        patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
        limits = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}}
        return {"preprocessor_config.json": _qwen_pictures(kind, patches | limits | _HALF)}
    if kind == "gemma3":
        pictures = {
            "do_pan_and_scan": None,
            "size": {"height": 112, "width": 112},
            "resample": 2,
            "image_seq_length": 4,
        }
        document = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
        return {
            "preprocessor_config.json": document | _STEPS | pictures | _HALF,
            "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        }
    if kind in ("mistral3", "pixtral"):
        merge = {"spatial_merge_size": 2} if kind == "mistral3" else {}
        pictures = {"size": {"longest_edge": 112}, "patch_size": 14, "resample": 3}
        document = {"image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"}
        return {
            "preprocessor_config.json": document | _STEPS | pictures | _CLIP,
            "processor_config.json": {"patch_size": 14, "processor_class": "PixtralProcessor"} | merge,
        }
    pictures = {
        "do_image_splitting": True,
        "do_pad": True,
        "max_image_size": {"longest_edge": 64},
        "size": {"longest_edge": 256},
        "resample": 1,
    }
    name = "SmolVLM" if kind == "smolvlm" else "Idefics3"
    document = {"image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor"}
    return {
        "preprocessor_config.json": document | _STEPS | pictures | _HALF,
        "processor_config.json": {"image_seq_len": 16, "processor_class": f"{name}Processor"},
    }


_STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


def _qwen_pictures(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    names = {"qwen2-vl": "Qwen2VLProcessor", "qwen2.5-vl": "Qwen2_5_VLProcessor", "qwen3-vl": "Qwen3VLProcessor"}
    types = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": names[kind]}
    return types | _STEPS | {"resample": 3} | values


def _name_as_published(file: Path) -> None:
    """Published Gemma 3 weights, which llama.cpp's converter reads, have one level more in the names of the tower."""
    from safetensors.torch import load_file, save_file

    weights = load_file(str(file))
    tower = "vision_tower."
    renamed = {name.replace(tower, f"{tower}vision_model.", 1): weight for name, weight in weights.items()}
    save_file(renamed, str(file), metadata={"format": "pt"})


def _fill(model: Any, seed: int) -> None:
    """Draws every weight anew, as in `tiny`; the tower too, so that two pictures get distinct features."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_scaled(name, noise, gemma=gemma).to(torch.bfloat16))


def _scaled(name: str, noise: Any, *, gemma: bool) -> Any:
    in_tower = any(part in name for part in ("visual", "vision", "connector", "projector"))
    if not in_tower:
        return tiny.scaled(name, noise, gemma=gemma)
    if noise.dim() == 1:  # a norm or a bias; that of Gemma's projector multiplies by 1 + weight
        plain = name.endswith("bias") or "soft_emb_norm" in name
        return 0.1 * noise + (0.0 if plain else 1.0)
    if "position" in name or "pos_embed" in name:
        return 0.3 * noise
    return 1.2 / noise[0].numel() ** 0.5 * noise


def without_tile_tokens(folder: Path) -> Path:
    """An Idefics3 whose vocabulary has no token for the places of tiles, as that of Idefics3-8B-Llama3 has none: the
    processor writes them as words."""
    shutil.copytree(cached("idefics3"), folder)
    tokenizer, config = (folder / name for name in ("tokenizer.json", "tokenizer_config.json"))
    document, settings = (json.loads(file.read_text(encoding="utf-8")) for file in (tokenizer, config))
    document["added_tokens"] = [one for one in document["added_tokens"] if not _is_of_tiles(one)]
    kept = {number: one for number, one in settings["added_tokens_decoder"].items() if not _is_of_tiles(one)}
    tokenizer.write_text(json.dumps(document), encoding="utf-8")
    config.write_text(json.dumps(settings | {"added_tokens_decoder": kept}), encoding="utf-8")
    return folder


def _is_of_tiles(token: dict[str, Any]) -> bool:
    return token["content"] == "<global-img>" or token["content"].startswith("<row_")
