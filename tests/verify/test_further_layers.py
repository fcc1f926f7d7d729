"""Checkpoints with layers that predict further tokens (MTP), as Qwen3.5 and Qwen3-Next are published. transformers
neither reads nor writes these layers, and the converter puts them behind the others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_families
from converting import converted
from gguf_faults import check_weights, planted, times
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.run.verify_record import Check
from skill_train.verify.metadata.check import check_metadata
from skill_train.verify.weights.further_layers import further_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen35", pytest.param("qwen3next", marks=pytest.mark.torture)])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GgufFile]:
    """A model with one such layer, and its file."""
    work = tmp_path_factory.mktemp("published")
    model = Path(shutil.copytree(tiny_families.folder(request.param), work / "model"))
    weights = load_file(model / "model.safetensors")
    last = [name for name in weights if "layers.1." in name]
    width = len(weights["model.norm.weight"])
    shapes = {f"mtp.layers.0.{name.partition('layers.1.')[2]}": weights[name].shape for name in last}
    shapes |= dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), torch.Size([width]))
    shapes |= {"mtp.pre_fc_norm_hidden.weight": torch.Size([width]), "mtp.fc.weight": torch.Size([width, 2 * width])}
    torch.manual_seed(1)
    further = {name: torch.randn(shape) / 8 for name, shape in shapes.items()}
    save_file(weights | further, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    return model, read_gguf(converted(model, work, "f16"))


def _weights(gguf: GgufFile, model: Path) -> Check:
    return next(one for one in check_weights([gguf], model, None)[gguf.path.name] if isinstance(one, Check))


def _config(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))


def test_their_weights_are_those_of_the_checkpoint(published: tuple[Path, GgufFile], tmp_path: Path) -> None:
    model, gguf = published
    good = _weights(gguf, model)
    assert (good.verdict, good.figures) == ("pass", {"looked_at": len(gguf.tensors)}), good.detail
    of_layer = [name for name in gguf.tensors if name.startswith("blk.2.")]
    assert len(of_layer) > 10 and sum(".nextn." in name for name in of_layer) == 4
    for name in of_layer:
        wrong = planted(gguf, name, times(1.1), tmp_path / "wrong.gguf")
        check = _weights(wrong, model)
        assert check.verdict == "fail" and name in check.detail, (name, check.detail)


def test_a_file_without_them_is_whole(published: tuple[Path, GgufFile], tmp_path: Path) -> None:
    """llama.cpp answers without them."""
    model, gguf = published
    plain = Path(shutil.copytree(model, tmp_path / "plain"))
    weights = load_file(plain / "model.safetensors")
    own = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    save_file(own, plain / "model.safetensors", metadata={"format": "pt"})
    file = read_gguf(converted(plain, tmp_path / "gguf", "f16"))
    assert len(file.tensors) < len(gguf.tensors)
    assert _weights(file, model).verdict == "pass"
    assert check_metadata(file, _config(model)).verdict == "pass"


def test_they_are_counted_as_layers(published: tuple[Path, GgufFile]) -> None:
    model, gguf = published
    config, key = _config(model), f"{gguf.architecture}.attention.recurrent_layers"
    check = check_metadata(gguf, config)
    assert check.verdict == "pass", check.detail
    assert gguf.metadata[key] == [True, False, False]
    for wrong in ([True, False], [True, False, True], [False, False, False]):
        assert check_metadata(replace(gguf, metadata=gguf.metadata | {key: wrong}), config).verdict == "fail"


def test_names_of_deepseek_and_glm(tmp_path: Path) -> None:
    """Theirs are numbered like the other layers: the published zai-org/GLM-4.5-Air has 46 and layer 46."""
    names = [f"model.layers.{layer}.{part}" for layer in (45, 46) for part in ("eh_proj.weight", "mlp.gate.weight")]
    save_file({name: torch.ones(2, 2) for name in (*names, "model.norm.weight")}, tmp_path / "model.safetensors")
    assert sorted(dict(further_weights(tmp_path, 46))) == sorted(names[2:])


@pytest.mark.parametrize("family", ["glm4moe", pytest.param("exaonemoe", marks=pytest.mark.torture)])
def test_layers_that_a_config_only_counts(family: str, tmp_path: Path) -> None:
    """transformers saves such a checkpoint: the number without the layers. Of K-EXAONE llama.cpp loads no such file."""
    model = Path(shutil.copytree(tiny_families.folder(family), tmp_path / "model"))
    config = _config(model) | {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    gguf = read_gguf(converted(model, tmp_path, "f16"))
    assert gguf.of_architecture("block_count") == config["num_hidden_layers"] == 2
    llama_cpp.Llama(str(gguf.path), n_ctx=64, verbose=False).close()
    assert check_metadata(gguf, config).verdict == "pass"
    none = replace(gguf, metadata=gguf.metadata | {f"{gguf.architecture}.nextn_predict_layers": 0})
    assert check_metadata(none, config).verdict == "pass"
    layers = replace(none, tensors=none.tensors | {"blk.2.attn_norm.weight": none.tensors["blk.1.attn_norm.weight"]})
    check = check_metadata(layers, config)
    assert check.verdict == "fail" and "nextn_predict_layers" in check.detail
