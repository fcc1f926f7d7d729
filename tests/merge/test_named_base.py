"""`merge --base --adapter`: the base must be the model that the adapter was trained on."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import merging
import one_command
from skill_train.commands import merge as command
from skill_train.core.console import Console
from skill_train.core.digests import digests
from skill_train.core.errors import UsageError

pytestmark = pytest.mark.slow

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    merging.adapter(merging.llama(folder / "base", tied=True, dtype="bfloat16"), folder / "adapter")
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    """A run of the adapter without records, its base, and a tune of that: each weight of one norm is another."""
    shutil.copytree(made / "base", tmp_path / "base")
    shutil.copytree(made / "adapter", tmp_path / "run" / "adapter")
    _name(tmp_path, str(tmp_path / "base"))
    _changed(tmp_path, "tuned", lambda tensors: tensors.update({NORM: tensors[NORM] + 1}))
    return tmp_path


def _name(work: Path, name: str | None, **more: Any) -> None:
    merging.edit(work / "run" / "adapter" / "adapter_config.json", base_model_name_or_path=name, **more)


def _changed(work: Path, name: str, change: Any) -> Path:
    """A copy of the base with other tensors."""
    shutil.copytree(work / "base", work / name)
    tensors = load_file(work / name / "model.safetensors")
    change(tensors)
    save_file(tensors, work / name / "model.safetensors", metadata={"format": "pt"})
    return work / name


def _record(work: Path) -> None:
    """The digests that a training of skill-train leaves."""
    weights = digests(work / "base", [work / "base" / "model.safetensors"])
    (work / "run" / "environment.json").write_text(json.dumps({"base_weights": weights}))
    (work / "run" / "plan.json").write_text("{}")


def merged(work: Path, base: Path | str, adapter: str = "run/adapter") -> list[str]:
    """The warnings about the base."""
    console = Console("quiet", "merge")
    options = command.MergeOptions(base=str(base), adapter=work / adapter, out=work / "out")
    inspect.unwrap(command.merge.callback)(options, console)
    return [warning["message"] for warning in console.warnings if warning["code"] == "base_not_compared"]


def refused(work: Path, base: Path, adapter: str = "run/adapter") -> UsageError:
    with pytest.raises(UsageError) as caught:
        merged(work, base, adapter)
    assert caught.value.code == "wrong_base" and str(base) in caught.value.message
    assert not (work / "out").exists()
    return caught.value


@pytest.mark.parametrize("recorded", [True, False])
def test_another_model_of_the_same_shape(work: Path, recorded: bool) -> None:
    if recorded:
        _record(work)
    error = refused(work, work / "tuned")
    assert ("other digests" if recorded else NORM) in error.got and str(work / "base") in error.hint


def test_the_model_that_holds_the_adapter_already(work: Path) -> None:
    assert merged(work, work / "base") == []
    (work / "out").rename(work / "merged")
    refused(work, work / "merged")


def test_another_model_in_another_type_than_was_recorded(work: Path) -> None:
    _record(work)
    _changed(work, "wide", lambda t: t.update({k: v.float() + (k == NORM) for k, v in t.items()}))
    assert NORM in refused(work, work / "wide").got


def test_an_adapter_of_a_checkpoint(work: Path) -> None:
    _record(work)
    shutil.copytree(work / "run" / "adapter", work / "run" / "checkpoints" / "checkpoint-8")
    _name(work, "org/elsewhere")
    refused(work, work / "tuned", "run/checkpoints/checkpoint-8")


@pytest.mark.parametrize("recorded", [True, False])
def test_the_same_weights_in_other_files(work: Path, recorded: bool) -> None:
    """Another path, a wider type, a narrower one, shards, and a head that was untied."""
    if recorded:
        _record(work)
    (work / "base" / "model.safetensors").chmod(0o600)
    _changed(work, "moved", lambda tensors: None)
    _changed(work, "wide", lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()}))
    _changed(work, "narrow", lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    head = "lm_head.weight"
    untied = _changed(work, "untied", lambda t: t.update({head: t["model.embed_tokens.weight"].clone()}))
    merging.edit(untied / "config.json", tie_word_embeddings=False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(work / "base"), dtype=torch.bfloat16)
    model.save_pretrained(str(work / "sharded"), max_shard_size="50KB")
    assert (work / "sharded" / "model.safetensors.index.json").is_file()
    for name in ("moved", "wide", "narrow", "untied", "sharded"):
        assert merged(work, work / name) == [], name
        shutil.rmtree(work / "out")
        (work / "out.merge.json").unlink()


def test_a_base_that_is_gone(work: Path) -> None:
    """With its digests a file of the same name and size is another model's; nothing else can be judged."""
    _record(work)
    wide = _changed(work, "wide", lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()}))
    (work / "base").rename(work / "moved")
    refused(work, work / "tuned")
    [said] = merged(work, wide)
    assert str(wide) in said and str(work / "base") in said
    shutil.rmtree(work / "out")
    (work / "out.merge.json").unlink()
    assert merged(work, work / "moved") == []


def test_a_base_that_was_changed_since(work: Path) -> None:
    _record(work)
    shutil.copytree(work / "base", work / "before")
    shutil.copy(work / "tuned" / "model.safetensors", work / "base")
    refused(work, work / "base")
    assert merged(work, work / "before") == []


def test_a_name_on_the_hub(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "a" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(work / "hub"))
    _name(work, "org/base")
    [said] = merged(work, work / "base")
    assert str(work / "base") in said and "org/base" in said
    shutil.rmtree(work / "out")
    snapshots = work / "hub" / "models--org--base" / "snapshots"
    snapshots.mkdir(parents=True)
    (work / "base").rename(snapshots / commit)
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text(commit)
    (work / "out.merge.json").unlink()
    assert merged(work, snapshots / commit) == []
    shutil.rmtree(work / "out")
    (work / "out.merge.json").unlink()
    refused(work, work / "tuned")
    _name(work, "org/base", revision="b" * 40)
    assert len(merged(work, snapshots / commit)) == 1


@pytest.mark.parametrize("name", ["", None])
def test_no_name(work: Path, name: str | None) -> None:
    _name(work, name)
    assert len(merged(work, work / "base")) == 1


def verified(work: Path, base: str, reference: str = "out") -> tuple[str, bool]:
    """The error of `verify`, which gets no GGUF file, and whether it says that it could not compare."""
    words = ("--reference", work / reference, "--base", work / base, "--gguf", work / "none.gguf")
    done = one_command.called("verify", *words, "--format", "json")
    assert done.code == 2
    return done.answer["error"]["code"], "nothing shows that" in done.stderr


@pytest.mark.parametrize("name", ["out", "merged"])
def test_verify_compares_with_the_base_that_was_merged(work: Path, name: str) -> None:
    merged(work, work / "base")
    record = work / ("merge.json" if name == "merged" else "out.merge.json")
    (work / "out").rename(work / name)
    (work / "out.merge.json").rename(record)
    _changed(work, "wide", lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()}))
    assert verified(work, "tuned", name) == ("wrong_base", False)
    assert verified(work, "base", name) == ("missing_file", False)
    assert verified(work, "wide", name) == ("missing_file", True)
    record.unlink()
    assert verified(work, "tuned", name) == ("missing_file", True)
    merging.edit(work / "tuned" / "config.json", num_hidden_layers=3)
    assert verified(work, "tuned", name) == ("wrong_base", False)


def test_verify_compares_with_the_base_of_a_full_training(work: Path) -> None:
    _record(work)
    shutil.copytree(work / "tuned", work / "run" / "merged")
    shutil.rmtree(work / "run" / "adapter")
    assert verified(work, "tuned", "run/merged") == ("wrong_base", False)
    assert verified(work, "base", "run/merged") == ("missing_file", False)


def test_nothing_is_written_into_the_adapter(work: Path) -> None:
    """Its files are digested by `verify` and `evaluate`, and pushed."""
    before = sorted((work / "run").rglob("*"))
    for out in ("run/adapter/merged", "run/adapter/deep/x"):
        options = command.MergeOptions(base=str(work / "base"), adapter=work / "run" / "adapter", out=work / out)
        with pytest.raises(UsageError, match="inside the adapter's folder") as caught:
            inspect.unwrap(command.merge.callback)(options, Console("quiet", "merge"))
        assert caught.value.code == "bad_usage" and sorted((work / "run").rglob("*")) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_merged_folder_that_was_changed_is_neither_exported_nor_a_reference(work: Path, name: str) -> None:
    merged(work, work / "base")
    file = work / "out" / name
    whole = file.read_bytes()
    file.write_bytes(whole + b" " if name == "config.json" else whole[:-1] + bytes([whole[-1] ^ 1]))
    export = one_command.called("export-gguf", work / "out", "--quant", "f16", "--format", "json")
    assert (export.code, export.answer["error"]["code"]) == (2, "output_changed")
    assert str(file) in export.answer["error"]["message"] and not (work / "out-gguf").exists()
    assert verified(work, "base") == ("output_changed", False)
    (work / "out.merge.json").unlink()  # as the hint says, where the change is meant
    assert verified(work, "base")[0] == "missing_file"


def test_a_record_that_was_copied_with_its_folder_does_not_vouch_for_the_copy(work: Path) -> None:
    merged(work, work / "base")
    shutil.copytree(work / "out", work / "copy")
    shutil.copyfile(work / "out.merge.json", work / "copy.merge.json")
    (work / "copy" / "config.json").unlink()
    words = ("--base", work / "base", "--adapter", work / "run" / "adapter", "--out", work / "copy")
    done = one_command.called("merge", *words, "--format", "json")
    assert (done.code, done.answer["error"]["code"]) == (2, "output_exists")
    assert "describes another folder" in done.answer["error"]["message"]
