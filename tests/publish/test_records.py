"""What is published of a run's records: figures and names, no text that a check quotes, no path of this machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import step_records
import whole_records
from skill_train.publish.records import published, without_paths
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import PromptAnswers, SmokeCheck
from skill_train.run.verify_record import Proof

ROW = "the row of a customer"


def test_a_training_without_its_rows() -> None:
    outputs = {"adapter/w.safetensors": {"bytes": 1, "sha256": "0" * 64}}
    record = step_records.trained(outputs, first_loss=2.5)
    record = replace(
        record, example=ROW, answer=PromptAnswers(ROW), checks=[SmokeCheck("x", "warn", 1.5, ROW)], run=ROW
    )
    public = published("train", record)
    assert public["checks"] == [{"name": "x", "verdict": "warn", "figure": 1.5, "figures": {}}]
    assert (public["outputs"], public["figures"]["first_loss"], public["steps"]) == (outputs, 2.5, 1)
    assert (public["schema"], public["step"], public["recipe_hash"]) == ("skill-train/step/1", "train", "0" * 64)
    assert ROW not in str(public) and not {"example", "answer", "run"} & set(public)


@pytest.mark.parametrize("name", ["tuned", "tokens"])
def test_a_check_that_quotes_texts_is_published_as_numbers(name: str) -> None:
    figures = {"a": 1, "b": ROW, "c": {"d": 0.5, "e": [1], "f": None}, "g": [2], "h": True}
    check = {"name": name, "file": "m.gguf", "verdict": "fail", "figure": ROW, "threshold": 0.5, "detail": ROW}
    left_out = {"name": "answers", "file": "m.gguf", "reason": ROW}
    given = whole_records.proof(checks=[check | {"figures": figures}], not_checked=[left_out], inputs={"rows": "ab"})
    public = published("verify", msgspec.convert(given, Proof))
    quoted = {"figure": ROW, "detail": ROW} if name == "tuned" else {}
    numbers = {"a": 1, "c": {"d": 0.5, "f": None}, "h": True}
    expected = {"name": name, "file": "m.gguf", "verdict": "fail", "threshold": 0.5, "figures": numbers}
    assert public["checks"] == [expected | quoted]
    assert public["not_checked"] == [{"name": "answers", "file": "m.gguf"}]
    assert public["inputs"]["rows"] == "ab" and public["verdict"] == "pass" and "outputs" not in public


def test_an_evaluation_without_its_answers() -> None:
    answer = {"line": 1, "prompt": ROW, "expected": ROW, "answers": {"base": ROW}}
    given = whole_records.evaluation(models=[{"name": "base"}], answers=[answer])
    public = published("evaluate", msgspec.convert(given, Evaluation))
    assert ROW not in str(public) and not {"checks", "not_checked", "answers"} & set(public)
    assert (public["rows"], public["asked"], public["models"][0]["name"]) == (20, 20, "base")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/srv/customers/rows.jsonl", "rows.jsonl"), ("customers/rows.jsonl", "customers/rows.jsonl"), ("", ""),
        ({"/srv/x/a": ["/srv/x/b", {"k": "/srv/x/c"}]}, {"a": ["b", {"k": "c"}]}), (1, 1), (None, None),
        ("/first line\nof a text", "/first line\nof a text"), (["a/b", 2.5, True], ["a/b", 2.5, True]),
    ],
)  # fmt: skip
def test_a_path_of_this_machine_is_published_as_a_name(value: Any, shown: Any) -> None:
    assert without_paths(value) == shown
