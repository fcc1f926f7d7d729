"""Templates that write the date: a run has one day, that on which it began, also when it goes on later."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from skill_train.gguf.quality.training_rows import training_rows
from skill_train.llama import template as rendering
from skill_train.program import tokenizer as program_tokenizer
from skill_train.program.encode import WRITES_DATE, Encoder
from skill_train.program.main import main
from skill_train.run.folder import RunDir

CLOCK = "{{- strftime_now('%d %b %Y %H:%M:%S.%f') + '\\n' -}}"
MONDAY, TUESDAY = datetime.date(2026, 11, 23), datetime.date(2026, 11, 24)


def _set_day(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    class Day(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return day

    monkeypatch.setattr(program_tokenizer, "date", Day)


def _dated_base(folder: Path) -> Path:
    base = Path(shutil.copytree(tiny.cached("qwen2"), folder / "base"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    file = base / "chat_template.jinja"
    template = file.read_text() if file.is_file() else config.pop("chat_template")
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    file.write_text(CLOCK + template)
    return base


@pytest.mark.slow
@pytest.mark.usefixtures("short_answers")
def test_a_resumed_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_day(monkeypatch, MONDAY)
    run = training.write_run(tmp_path / "run", base=_dated_base(tmp_path), max_steps=4, held_out_fraction=0.1)
    assert main([str(run / "plan.json")]) == 0
    straight = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    rows = {name: (run / name).read_text() for name in ("samples.jsonl", "held_out.jsonl")}
    assert all("23 Nov 2026 00:00:00" in text and "24 Nov" not in text for text in rows.values())
    assert WRITES_DATE in json.loads((run / "train.json").read_text())["data"]["notes"]
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    _set_day(monkeypatch, TUESDAY)
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == straight
    assert {name: (run / name).read_text() for name in rows} == rows
    assert json.loads((run / "environment.json").read_text())["day"] == "2026-11-23"
    shutil.copytree(tmp_path / "base", run / "merged")  # as far as its tokenizer is read
    assert len(list(training_rows(RunDir(run)))) == 22
    (run / "environment.json").write_text('{"day": 3}')
    assert main([str(run / "plan.json"), "--resume"]) == 2


def test_a_template_that_writes_the_time_renders_a_row_twice_alike(tmp_path: Path) -> None:
    """Each answer is found by rendering its row again: with the microsecond, no second text began like the first."""
    tokenizer = training.tokenizer("qwen2")
    feeding: Any = {"data": "d", "format": "messages", "columns": {"messages": "messages"}, "loss_on": "assistant"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    plain = Encoder(feeding | {"max_length": 999}, tokenizer)
    plain(0, 1, {"messages": messages})
    assert WRITES_DATE not in plain.notes
    tokenizer.chat_template = CLOCK + tokenizer.chat_template
    encode = Encoder(feeding | {"max_length": 999}, tokenizer)
    row = encode(0, 1, {"messages": messages})
    assert tokenizer.decode([token for token in row["labels"] if token >= 0]).startswith("Hello")
    assert encode.notes.count(WRITES_DATE) == 1


def test_the_template_of_a_file_and_the_references_write_the_same_time() -> None:
    tokenizer = training.tokenizer("qwen2")
    tokenizer.chat_template = CLOCK + tokenizer.chat_template
    conversation = rendering.Conversation([{"role": "user", "content": "Hi"}], None, True)
    (reference,) = rendering.render_reference(tokenizer, [conversation])
    job = rendering.TemplateJob(
        template=tokenizer.chat_template, bos="", eos="", seconds=20, conversations=[conversation]
    )
    (own,) = rendering.run_worker(rendering.WORKER, job, list[rendering.Rendered])
    assert own == reference and "00:00:00.000000" in str(own.text)
