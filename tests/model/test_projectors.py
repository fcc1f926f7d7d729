"""What llama.cpp computes of a vision model whatever its config.json says: told before the training, and by verify."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import picture_pairs
import tiny_vision
from picture_runs import write_rows
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.pictures.compare import Pair
from skill_train.llama.run_converter import without_code
from skill_train.model.convertible.from_config import why_no_projector, why_not
from skill_train.model.folder import read_config, read_model
from skill_train.program.pictures.tokens import ImageModel
from skill_train.run.verify_record import Check
from skill_train.verify.pictures.check import check_pairs
from skill_train.verify.pictures.projector import check_projector

QWEN = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
AXIAL = {"rope_parameters": {"rope_type": "axial", "rope_theta": 1000.0}}
# A change of vision_config, and words of the reason why llama.cpp cannot follow it; None where it does. Each was seen
# in the embeddings of a tiny pair, whose error is 0.001 where llama.cpp follows.
SETTINGS: list[tuple[str, dict[str, Any], str | None]] = [
    ("qwen2-vl", {"hidden_act": "gelu"}, "with quick_gelu, and vision_config.hidden_act says gelu"),
    ("qwen2.5-vl", {"hidden_act": "gelu"}, "with silu"),
    ("qwen3-vl", {"hidden_act": "silu"}, "with gelu"),
    ("qwen3-vl", {"hidden_act": "gelu"}, None),
    ("gemma3", {"hidden_act": "quick_gelu"}, "with gelu"),
    ("smolvlm", {"hidden_act": "silu"}, "with gelu"),
    ("idefics3", {"hidden_act": "gelu"}, None),
    ("mistral3", {"hidden_act": "gelu_pytorch_tanh"}, "with silu or gelu"),
    ("pixtral", {"hidden_act": "gelu"}, None),
    *((kind, AXIAL, "rope_theta 10000 for the vision tower of this family, and this model uses 1000") for kind in QWEN),
    *((kind, {"spatial_merge_size": 4}, "spatial_merge_size: 4") for kind in QWEN),
    *((kind, {"temporal_patch_size": 1}, "temporal_patch_size: 1") for kind in QWEN),
    ("qwen2.5-vl", {"window_size": 56}, "window_size: 56"),
    ("qwen2.5-vl", {"window_size": None}, None),  # 112
    ("qwen2.5-vl", {"fullatt_block_indexes": [1]}, "fullatt_block_indexes: [1]"),  # llama.cpp: the fourth too
    ("qwen2.5-vl", {"fullatt_block_indexes": [0, 2]}, "fullatt_block_indexes: [0, 2]"),
    ("qwen2.5-vl", {"fullatt_block_indexes": [0, 1, 2, 3]}, "fullatt_block_indexes: [0, 1, 2, 3]"),
    ("qwen2.5-vl", {"fullatt_block_indexes": []}, "fullatt_block_indexes: []"),
    ("qwen2.5-vl", {"fullatt_block_indexes": [2]}, None),
    ("qwen2.5-vl", {"depth": 6}, "fullatt_block_indexes: [1, 3]"),
    ("qwen2.5-vl", {"depth": 32, "fullatt_block_indexes": None}, None),  # those of the class
    ("qwen3-vl", {"num_position_embeddings": 63}, "num_position_embeddings: 63"),  # llama.cpp aborts
    ("qwen3-vl", {"num_position_embeddings": 36}, None),
    ("qwen3-vl", {"num_position_embeddings": None}, None),  # 48 x 48
]


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    """Of the tiny Qwen3-VL with heads of 32."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*sections], "mrope_interleaved": True}
    return {"rope_parameters": rope} | more


PUBLISHED = {"head_dim": 128, "max_position_embeddings": 262_144}


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The same of text_config; each was seen in the text behind a picture.
TEXTS: list[tuple[str, dict[str, Any], str | None]] = [
    *((kind, {"hidden_act": "gelu"}, "MLP of this family with silu") for kind in (*QWEN, "smolvlm", "mistral3")),
    *((kind, {"rope_parameters": LLAMA3}, "rope_type: llama3") for kind in QWEN),
    ("qwen3-vl", {"attention_bias": True}, "attention_bias: true"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"final_logit_softcapping": None}, None),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}}, "layers with a win"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, None),
    ("smolvlm", {"rope_parameters": LLAMA3}, None),
    ("smolvlm", {"attention_bias": True, "mlp_bias": True}, None),
    ("mistral3", {"hidden_act": "silu", "attention_bias": False}, None),
    ("qwen3-vl", _axes(2, 7, 7), "mrope_section"),
    ("qwen3-vl", _axes(16, 0, 0), "mrope_section"),
    ("qwen3-vl", _axes(1, 1, 1), "mrope_section"),
    ("qwen3-vl", _axes(5, 5, 6), None),
    ("qwen3-vl", _axes(8, 4, 4), None),  # the frequencies that differ turn by less than a degree in this context
    ("qwen3-vl", _axes(24, 20, 20, **PUBLISHED), None),  # those of 61 and 62 too
    ("qwen3-vl", _axes(8, 28, 28, **PUBLISHED), "mrope_section"),
]


def _changed(kind: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A tiny model with another vision_config; a value of None leaves the key out."""
    shutil.copytree(tiny_vision.cached(kind), folder)
    config = read_config(folder)
    vision = {**config["vision_config"], **changes}
    config["vision_config"] = {key: value for key, value in vision.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("kind", "changes", "word"), SETTINGS)
def test_what_llama_cpp_computes_of_a_tower_whatever_its_config_says(
    kind: str, changes: dict[str, Any], word: str | None, tmp_path: Path
) -> None:
    folder = _changed(kind, tmp_path / "model", changes)
    told = why_no_projector(read_config(folder))
    assert told is None if word is None else word in str(told)
    if kind != "gemma3":  # whose text alone may be used
        assert read_model(folder).not_convertible == told


@pytest.mark.parametrize(("kind", "changes", "word"), TEXTS)
def test_what_llama_cpp_computes_of_the_text_whatever_its_config_says(
    kind: str, changes: dict[str, Any], word: str | None
) -> None:
    config = read_config(tiny_vision.cached(kind))
    text = config["text_config"] | changes
    told = why_not(text, config)
    assert told is None if word is None else word in str(told)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("smolvlm", {"scale_factor": 1}, "scale_factor: 1"),  # llama.cpp aborts
        ("idefics3", {"scale_factor": 1}, "scale_factor: 1"),
        ("smolvlm", {"scale_factor": 4}, None),
        ("pixtral", {"spatial_merge_size": 2}, None),  # which a Llava does not read
    ],
)
def test_what_llama_cpp_computes_between_tower_and_text(kind: str, changes: dict[str, Any], word: str | None) -> None:
    told = why_no_projector(read_config(tiny_vision.cached(kind)) | changes)
    assert told is None if word is None else word in str(told)


@pytest.mark.slow
def test_a_llava_does_not_read_the_merging_of_mistral_3(tmp_path: Path) -> None:
    """The converter does, and llama.cpp aborted for want of a layer that merges."""
    folder = Path(shutil.copytree(tiny_vision.cached("pixtral"), tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"spatial_merge_size": 2}))
    pair = Pair(picture_pairs.pair("pixtral").text, picture_pairs.projector(folder, tmp_path / "mmproj-f16.gguf"))
    image: ImageModel = {"model": str(folder), "revision": None, "preprocess": "engine"}
    found = check_pairs([pair], image, [picture_pairs.question(picture_pairs.picture(300, 200))])
    verdicts = {one.name: one.verdict for one in found if isinstance(one, Check)}
    assert verdicts.pop("loads_projector") == "warn"  # of the ends of its lines
    assert set(verdicts.values()) == {"pass"}, verdicts


@pytest.mark.parametrize("change", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {}])
def test_a_mixture_has_experts_in_every_layer(change: dict[str, Any]) -> None:
    """The converter has no place for `mlp.down_proj` of a layer without experts."""
    text = {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, **change}
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    assert (why_not(text, config | {"text_config": text}) is not None) is bool(change)


def _checked(kind: str, folder: Path, *, width: int = 300) -> dict[str, tuple[str, str]]:
    image: ImageModel = {"model": str(folder), "revision": None, "preprocess": "engine"}
    question = picture_pairs.question(picture_pairs.picture(width, 2 * width // 3))
    found = check_pairs([picture_pairs.pair(kind)], image, [question])
    return {one.name: (one.verdict, one.detail) for one in found if isinstance(one, Check)}


@pytest.mark.slow
def test_a_tower_that_llama_cpp_computes_otherwise_never_passes(tmp_path: Path) -> None:
    """Of a picture that is not larger than a window of 112 pixels nothing differs, and of a larger one all."""
    folder = _changed("qwen2.5-vl", tmp_path / "model", {"window_size": 224})
    small, large = _checked("qwen2.5-vl", folder, width=100), _checked("qwen2.5-vl", folder)
    assert (small["pictures"][0], large["pictures"][0]) == ("pass", "fail")
    assert small["projector"][0] == large["projector"][0] == "warn"
    assert "window_size: 224" in small["projector"][1]


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.parametrize("kind", QWEN)
def test_the_positions_of_qwens_towers_have_one_base(kind: str, tmp_path: Path) -> None:
    assert _checked(kind, _changed(kind, tmp_path / "model", AXIAL))["pictures"][0] == "fail"


@pytest.mark.parametrize(("layer", "activation"), [([-1], "gelu"), (-1, "gelu_pytorch_tanh")])
def test_what_is_the_same_to_llama_cpp_is_not_refused(layer: Any, activation: str) -> None:
    """It computes GELU by its tanh approximation."""
    config = read_config(tiny_vision.cached("mistral3"))
    assert why_no_projector(config | {"vision_feature_layer": layer, "projector_hidden_act": activation}) is None


@pytest.mark.slow
def test_the_norms_of_a_qwen_tower_keep_their_own_epsilon(tmp_path: Path) -> None:
    """The converter writes that of the text; transformers has 1e-6 in the tower, whatever the text has."""
    folder = Path(shutil.copytree(tiny_vision.cached("qwen3-vl"), tmp_path / "model"))
    config = read_config(folder)
    config["text_config"]["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    made, text = picture_pairs.projector(folder, tmp_path / "mmproj.gguf"), picture_pairs.pair("qwen3-vl").text
    check = check_projector(read_gguf(made), read_gguf(text), folder)
    assert check.verdict == "pass", check.detail


def test_the_order_in_which_layers_are_named_is_not_their_order(tmp_path: Path) -> None:
    """Of Qwen3-VL: each output is added in the order of the tower's layers, in transformers too."""
    folder, pair = _changed("qwen3-vl", tmp_path / "model", {"deepstack_visual_indexes": [1, 0]}), "qwen3-vl"
    text, made = (read_gguf(file) for file in (picture_pairs.pair(pair).text, picture_pairs.pair(pair).projector))
    for layers, verdict in (([True, True], "pass"), ([True, False], "fail")):
        text.metadata["qwen3vl.n_deepstack_layers"] = 2
        made.metadata["clip.vision.is_deepstack_layers"] = layers
        assert check_projector(made, text, folder).verdict == verdict


def test_the_converter_reads_what_a_processor_leaves_to_its_class(tmp_path: Path) -> None:
    """It takes the side of a tile for SmolVLM's longest edge otherwise, and the training four tiles."""
    folder = Path(shutil.copytree(tiny_vision.cached("smolvlm"), tmp_path / "model"))
    own = folder / "preprocessor_config.json"
    document = json.loads(own.read_text())
    del document["size"]
    own.write_text(json.dumps(document))
    with without_code(folder) as view:
        assert json.loads((view / own.name).read_text())["size"] == {"longest_edge": 4 * 364}
        assert json.loads((view / own.name).read_text())["max_image_size"] == document["max_image_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole",
    [
        {"image_mean": [0.1, 0.2, 0.3], "size": {"longest_edge": 640}},
        {"image_processor": {"image_processor_type": "SmolVLMImageProcessor", "image_std": [0.25, 0.25, 0.25]}},
    ],
)
def test_the_projector_says_of_pictures_what_transformers_reads(whole: dict[str, Any], tmp_path: Path) -> None:
    """Of processor_config.json that is `image_processor` alone, and then nothing of preprocessor_config.json: colours
    that the file says beside it belong to no picture."""
    from transformers import AutoImageProcessor

    folder = Path(shutil.copytree(tiny_vision.cached("smolvlm"), tmp_path / "model"))
    own = folder / "preprocessor_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"image_mean": [0.4, 0.4, 0.4]}))
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | whole))
    made = read_gguf(picture_pairs.projector(folder, tmp_path / "mmproj.gguf"))
    read = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    for key, value in (
        ("image_mean", read.image_mean),
        ("image_std", read.image_std),
        ("preproc_image_size", read.size["longest_edge"]),
    ):
        assert made.metadata[f"clip.vision.{key}"] == pytest.approx(value), key
    check = check_projector(made, read_gguf(picture_pairs.pair("smolvlm").text), folder)
    assert check.verdict == "pass", check.detail
    made.metadata["clip.vision.image_mean"] = [0.1, 0.2, 0.3]
    assert check_projector(made, read_gguf(picture_pairs.pair("smolvlm").text), folder).verdict == "fail"


def test_plan_tells_of_pictures_whose_model_may_be_trained_on_text(tmp_path: Path, commands: Any) -> None:
    """Of a Gemma 3, whose text llama.cpp computes: before a training with pictures, and of text nothing."""
    _changed("gemma3", tmp_path / "model", {"hidden_act": "quick_gelu"})
    pictures, text = write_rows(tmp_path / "data"), tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "Blue, as ever."}]
    text.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(9)))
    told = []
    for data in (pictures, text):
        recipe = {"model": "model", "data": str(data), "max_steps": 6, "max_length": 1024}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        answer = json.loads(commands.run(tmp_path, dict(os.environ), "plan", "recipe.yaml", "--format", "json").stdout)
        warned = (one["message"] for one in answer["warnings"] if one["code"] == "not_convertible")
        told.append(" ".join(warned))
    assert "with gelu, and vision_config.hidden_act says quick_gelu" in told[0] and "--mmproj none" in told[0]
    assert not told[1]
