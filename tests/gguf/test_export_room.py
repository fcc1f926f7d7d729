"""The disk that an export asks for is what it writes: files of published sizes, and one intermediate."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from skill_train.core.errors import DecisionNeeded
from skill_train.gguf.export_room import require_room, room
from skill_train.gguf.mix import MixTarget
from skill_train.gguf.mix_file import MixFile

QWEN = models.recorded_model("qwen2.5-0.5b")
WEIGHTS = 494_032_768  # its model card: 0.49B; counted from config.json


def test_outputs_and_the_merged_model() -> None:
    sizes = room(QWEN, ["q8_0", "q4_k_m"])
    assert list(sizes) == ["merged", "f16", "q8_0", "q4_k_m"]  # f16 is made too: the quantized files come from it
    assert sizes["merged"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    # huggingface.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF, 2024-09, and the f16 file of the same weights.
    for kind, published in (("f16", 2 * WEIGHTS), ("q8_0", 531_068_000), ("q4_k_m", 397_807_000)):
        assert published <= (sizes[kind] or 0) <= 1.25 * published


def test_an_unquantized_type_that_is_asked_for_is_the_one() -> None:
    assert list(room(QWEN, ["bf16", "q8_0"])) == ["merged", "bf16", "q8_0"]


def test_a_mix_takes_what_it_may_weigh() -> None:
    assert room(QWEN, ["q8_0"], MixTarget(most_bytes=400_000_000))["auto-400mb"] == 400_000_000
    of_bits = room(QWEN, [], MixTarget(bits=4.5))
    assert of_bits["f16"] and WEIGHTS * 4.5 / 8 < (of_bits["auto-4.5bpw"] or 0) < WEIGHTS * 4.5 / 8 + 13e6
    listed = MixFile({"a.weight": "q4_k"}, {"file": "m", "sha256": "", "mix": ""})
    assert room(QWEN, [], listed)[listed.name] is None


def test_it_is_said_before_the_start_and_refused_when_it_does_not_fit(tmp_path: Path) -> None:
    said = require_room({"merged": 1_000_000, "f16": 2_000_000, "tq1_0": None}, tmp_path)
    assert said.startswith("needs up to 3.0 MB of disk (merged 1.0 MB, f16 2.0 MB), and what tq1_0 take;")
    with pytest.raises(DecisionNeeded) as raised:
        require_room({"merged": 1 << 60, "f16": 1 << 60}, tmp_path)
    assert raised.value.code == "no_disk" and str(2 << 60) in raised.value.expected
