"""A measurement counts again only for the same models, rows, score and versions. Where it does not count, the models
are asked, which ends with an error: vLLM is not installed here, and the files hold no weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import whole_records
from skill_train.core.digests import digests, file_digest
from skill_train.core.errors import SkillTrainError
from skill_train.evaluate.backends import Model
from skill_train.evaluate.pictures import RunPictures
from skill_train.evaluate.scores import scoring_of
from skill_train.evaluate.step import EvaluateRequest, evaluate
from skill_train.run.evaluate_record import rows_digest
from skill_train.run.folder import versions
from skill_train.run.plan_record import Policy

ROW = {"row": 0, "line": 1, "kind": "text", "truncated": False, "input_ids": [1, 5, 6], "labels": [1, 5, 6]}
SCORER = "def score(prompt, answer, expected):\n    return 1\n"


@pytest.fixture
def request_here(tmp_path: Path) -> EvaluateRequest:
    """A base, its adapter, a file and a scorer, with the record of their measurement."""
    files = {"base/config.json": "{}", "base/tokenizer.json": "{}", "base/model.safetensors": "weights"}
    files |= {"adapter/adapter_config.json": "{}", "adapter/adapter_model.safetensors": "change"}
    files |= {"a.gguf": "file", "mmproj.gguf": "projector", "scorer.py": SCORER}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    base, adapter, file = tmp_path / "base", tmp_path / "adapter", tmp_path / "a.gguf"
    pictures = RunPictures(tmp_path, {"model": str(base), "revision": None})
    read: dict[str, Any] = {
        "base": {"model": digests(base), "adapter": None},
        "tuned": {"model": "the folder of base", "adapter": digests(adapter)},
        "a.gguf": {"model": {**file_digest(file), "projector": file_digest(tmp_path / "mmproj.gguf")}, "adapter": None},
    }
    inputs = {"models": read, "rows": rows_digest([ROW]), "scorer": file_digest(tmp_path / "scorer.py")}
    record = whole_records.evaluation(
        inputs=inputs,
        options={"score": "own", "pattern": None, "backend": "vllm"},
        versions=versions("transformers", "torch", "peft", "llama-cpp-python", "vllm"),
    )
    (tmp_path / "evaluate.json").write_text(json.dumps(record))
    return EvaluateRequest(
        models=[
            Model("base", base),
            Model("tuned", base, adapter),
            Model("a.gguf", file, pictures=pictures, projector=tmp_path / "mmproj.gguf"),
        ],
        rows=[ROW],
        loss_on="assistant",
        most_rows=100,
        tokenizer_of=base,
        scoring=scoring_of(Policy(), None, None, tmp_path / "scorer.py"),
        backend="vllm",
        record=tmp_path / "evaluate.json",
    )


def test_the_same_measurement_is_shown_again(request_here: EvaluateRequest) -> None:
    told: list[str] = []
    assert measured_again(request_here, warned=told) is False
    [warning] = [message for message in told if "scorer.py" in message]  # it may import another file
    assert str(request_here.record) in warning


@pytest.mark.parametrize(
    "name",
    [
        "base/model.safetensors",
        "base/tokenizer.json",
        "adapter/adapter_config.json",
        "a.gguf",
        "mmproj.gguf",
        "scorer.py",
    ],
)
def test_another_file_is_measured_again(request_here: EvaluateRequest, name: str) -> None:
    (request_here.record.parent / name).write_text("{ }" if name.endswith(".json") else "other")
    scorer = request_here.record.parent / "scorer.py"
    assert measured_again(request_here, scoring=scoring_of(Policy(), None, None, scorer))


@pytest.mark.parametrize(
    "other",
    [
        {"rows": [ROW | {"labels": [-100, 5, 6]}]},
        {"rows": [ROW, ROW]},
        {"scoring": scoring_of(Policy(), "json", None, None)},
        {"backend": "auto"},
    ],
)
def test_another_measurement_is_made(request_here: EvaluateRequest, other: dict[str, Any]) -> None:
    assert measured_again(request_here, **other)


def test_a_measurement_by_other_libraries_is_made_again(request_here: EvaluateRequest) -> None:
    record = json.loads(request_here.record.read_text())
    record["versions"]["llama-cpp-python"] = "0.0.1"
    request_here.record.write_text(json.dumps(record))
    assert measured_again(request_here)


def measured_again(request: EvaluateRequest, *, warned: list[str] | None = None, **other: Any) -> bool:
    changed, told = dataclasses.replace(request, **other), [] if warned is None else warned
    try:
        return not evaluate(changed, progress=lambda *_: None, warn=lambda code, message: told.append(message)).reused
    except SkillTrainError as error:
        assert error.code in ("missing_package", "bad_tokenizer", "broken_model"), error
        return True
