"""The rows of a run's data, read again for importance matrices: the very rows that the trainer was fed, never held-out
ones, and none where that is not proved."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from fed_runs import MODEL, edit_plan, fed
from skill_train.gguf.quality.texts import SAMPLES, TRAINING, _Draw, texts_of
from skill_train.gguf.quality.training_rows import RowsNotHere, spread, training_rows
from skill_train.program.plan import SAMPLE_ROWS
from skill_train.run.folder import RunDir
from skill_train.run.train_record import FedRow

pytestmark = pytest.mark.slow

ROWS = 90  # of which a fifth is held out, so that samples.jsonl does not keep all that train


def asked(number: int) -> str:
    return f"How many {('apples', 'boats', 'doors')[number % 3]} are {number} and {number + 4} of them together?"


def pairs(question: str, answer: str) -> list[dict[str, Any]]:
    return [{question: asked(number), answer: f" There are {2 * number + 4}."} for number in range(ROWS)]


FORMATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "messages": (tiny.rows(ROWS), {}),
    "answers to questions": (pairs("question", "answer"), {}),
    "completions": (pairs("prompt", "completion"), {"format": "completion"}),
    "texts": ([{"text": asked(number)} for number in range(ROWS)], {"format": "text"}),
    "a saved folder": (tiny.rows(ROWS), {"kind": "folder"}),
    "a part of the file": (tiny.rows(ROWS), {"split": "train[10:80]"}),
    "the whole conversation trains": (tiny.rows(ROWS), {"loss_on": "all"}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_they_are_the_rows_that_the_trainer_was_fed(tmp_path: Path, kind: str) -> None:
    rows, recipe = FORMATS[kind]
    run, data = fed(tmp_path, rows, **recipe)
    train, held_out = data["train"], {tuple(row["input_ids"]) for row in data["held_out"]}
    assert len(train) > SAMPLE_ROWS and len(held_out) > 10
    read = list(training_rows(run))
    assert sorted(read) == sorted(row["input_ids"] for row in train)
    assert not held_out & set(map(tuple, read))


@pytest.mark.parametrize("count", [1, 2, 90, 1000, 54321])
def test_any_first_numbers_are_spread_evenly(count: int) -> None:
    """Over ten parts of the data, and over the remainders of each small number: each has its share, but for 3 rows and
    2 % of what is taken."""
    order = spread(count, count)
    assert sorted(order) == list(range(count)) and spread(count, 20) == order[:20]
    for first in (32, 100, 500):
        taken = order[:first] if first < count / 2 else []
        for kinds in (2, 3, 4, 5, 7, 8, 10):
            share, room = len(taken) / kinds, 3 + len(taken) / 50
            parts = Counter(number * kinds // count for number in taken)
            remainders = Counter(number % kinds for number in taken)
            for kind in range(kinds if taken else 0):
                assert abs(parts[kind] - share) <= room and abs(remainders[kind] - share) <= room, (first, kinds)


def test_rows_that_were_skipped_are_skipped_again(tmp_path: Path) -> None:
    rows = tiny.rows(ROWS)
    for row in rows[::5]:
        row["messages"] = [{"role": "user", "content": "long " * 80}, {"role": "assistant", "content": "Yes."}]
    run, data = fed(tmp_path, rows, skip_untrained_rows=True)
    assert data["figures"]["skipped_rows"] == 18
    read = list(training_rows(run))
    assert sorted(read) == sorted(row["input_ids"] for row in data["train"])


def test_texts_are_spread_over_the_data_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = fed(tmp_path, tiny.rows(ROWS))
    texts = texts_of(run, MODEL)
    assert (texts.source, texts.lacking) == (TRAINING, "")
    both = [*texts.computed, *texts.compared]
    known = {tuple(row["input_ids"]): row["row"] for row in data["train"]}
    numbers = [known[tuple(ids)] for ids in both]
    assert len(set(numbers)) == len(numbers) == len(known) > SAMPLE_ROWS  # each once: all of them, of so few
    assert "all that there are" in texts.why
    monkeypatch.setattr("skill_train.gguf.quality.texts._MOST", 1800)
    fewer = texts_of(run, MODEL)
    assert 1798 < fewer.tokens <= 1800 and "at most 1800" in fewer.why
    first = [known[tuple(ids)] for ids in fewer.computed[:-1]]  # the last one is cut
    thirds = [sum(number * 3 // ROWS == third for number in first) for third in range(3)]
    assert len(first) < 25 and min(thirds) > 5 and fewer.computed == texts_of(run, MODEL).computed


def test_a_held_out_row_is_not_read_under_another_number(tmp_path: Path) -> None:
    """Nor what a row has in common with it: a whole window of it."""
    begin = [*range(20, 532)]
    held_out: list[FedRow] = [{"row": 3, "input_ids": [*begin, 1], "labels": []}]
    drawn = _Draw(1000, 1000, held_out, None).of([[*begin, 2], begin, [5, 6, 7], [*begin, 8, 9]])
    assert drawn.computed.texts == [[5, 6, 7], [8, 9]] and drawn.compared.texts == []


def _long(number: int, tokens: int) -> list[int]:
    """A row of which each token says the row and the place."""
    return [1, *(100_000 * number + place for place in range(1, tokens))]


def test_a_long_row_is_read_to_its_end_in_windows_that_begin_as_a_text(tmp_path: Path) -> None:
    row = _long(3, 1300)
    drawn = _Draw(5000, 500, [], 1).of([row])
    assert sorted(drawn.computed.texts, key=lambda ids: ids[1]) == [
        row[:512], [1, *row[512:1023]], [1, *row[1023:]],
    ]  # fmt: skip
    assert (drawn.computed.rows, drawn.computed.tokens, drawn.compared.texts) == ({1}, 1302, [])
    without = _Draw(5000, 500, [], None).of([row])
    assert sorted(without.computed.texts) == sorted([row[:512], row[512:1024], row[1024:]])


def test_of_long_rows_each_gives_a_window_before_one_gives_two(tmp_path: Path) -> None:
    """Beginnings, middles and ends: the answer that was trained is not left out because it comes late. No row is for
    computing and for comparing."""
    drawn = _Draw(12 * 512, 4 * 512, [], 1).of(_long(number, 2045) for number in range(1, 100))
    assert drawn.read == 16 and len(drawn.computed.rows) == len(drawn.computed.texts) == 12
    places = Counter(ids[-1] % 100_000 // 512 for ids in drawn.computed.texts)
    assert len(places) >= 4 and max(places.values()) <= 4
    few = _Draw(6 * 512, 2 * 512, [], 1).of(_long(number, 2045) for number in range(1, 5))
    assert len(few.computed.texts) == 6 and len(few.computed.rows) == 3 and not few.computed.rows & few.compared.rows
    assert len({tuple(ids) for ids in few.computed.texts}) == 6


def test_one_long_beginning_of_all_rows_is_read_once(tmp_path: Path) -> None:
    """Such as a system prompt of more than a window."""
    begin = [*range(1, 513)]
    drawn = _Draw(5000, 2000, [], None).of([*begin, *_long(number, 100)] for number in range(1, 9))
    texts = [*drawn.computed.texts, *drawn.compared.texts]
    assert texts.count(begin) == 1 and sum(len(ids) == 100 for ids in texts) == 8


# --- Where it is not proved ---


def _edit(path: Path, edit: Callable[[str], str]) -> None:
    before = path.read_text()
    path.unlink()
    path.write_text(edit(before))
    assert path.read_text() != before


def _other_template(run: RunDir) -> None:
    base = run.merged.resolve()
    run.merged.unlink()
    run.merged.mkdir()
    for file in base.iterdir():
        (run.merged / file.name).write_bytes(file.read_bytes())
    _edit(run.merged / "tokenizer_config.json", lambda text: text.replace("<start_of_turn>' +", "<start_of_turn> ' +"))


def data_of(run: RunDir) -> Path:
    return run.path.parent / "rows.jsonl"


def _without_a_held_out_row(run: RunDir) -> None:
    """The row would count as one that trained."""
    _edit(run.held_out, lambda text: text.split("\n", 1)[1])


def _held_out_under_another_number(run: RunDir) -> None:
    def swapped(text: str) -> str:
        lines = [json.loads(line) for line in text.splitlines()]
        lines[0]["row"] = next(n for n in range(ROWS) if n not in {line["row"] for line in lines})
        return "".join(json.dumps(line) + "\n" for line in lines)

    _edit(run.held_out, swapped)


CHANGES: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "the data is gone": (lambda run: data_of(run).unlink(), "rows.jsonl is not here"),
    "a word was changed": (
        lambda run: _edit(data_of(run), lambda text: text.replace("apples", "apple", 1)), "has changed since"
    ),
    "a row was added": (lambda run: _edit(data_of(run), lambda text: text + text.split("\n")[0]), "has changed since"),
    "two rows were swapped": (
        lambda run: _edit(data_of(run), lambda text: "\n".join(reversed(text.split("\n")))), "has changed since"
    ),
    "a held-out row is missing": (_without_a_held_out_row, "held_out.jsonl is not what the trainer recorded"),
    "held_out.jsonl is gone": (lambda run: run.held_out.unlink(), "held_out.jsonl is not what the trainer recorded"),
    "a held-out row has another number": (_held_out_under_another_number, "is not encoded as the trainer was fed it"),
    "nobody recorded what was held out": (
        lambda run: run.record("environment").unlink(), "held_out.jsonl is not what the trainer recorded"
    ),
    "the template is another": (_other_template, "is not encoded as the trainer was fed it"),
    "the tokenizer is gone": (lambda run: run.merged.unlink(), ""),
    "answers are cut elsewhere": (lambda run: edit_plan(run, "recipe", "max_length", 40), "is not encoded as"),
    "other tokens train": (lambda run: edit_plan(run, "recipe", "loss_on", "all"), "is not encoded as"),
    "the plan has no digest": (lambda run: edit_plan(run, "fingerprints", "data", None), "not say at which commit"),
    "the rows have pictures": (lambda run: edit_plan(run, "recipe", "images", True), "rows with pictures are not read"),
    "another method": (lambda run: edit_plan(run, "recipe", "method", "dpo"), "the method dpo"),
}  # fmt: skip


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, _ = fed(tmp_path_factory.mktemp("rows"), tiny.rows(ROWS))
    assert texts_of(run, MODEL).source == TRAINING
    return run.path.parent


@pytest.mark.parametrize("change", CHANGES)
def test_where_it_is_not_proved_the_kept_rows_are_used_and_it_is_said(
    untouched: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(untouched, tmp_path / "copy", symlinks=True)
    run = RunDir(tmp_path / "copy" / "run")
    edit_plan(run, "recipe", "data", str(data_of(run)))
    assert next(iter(training_rows(run)))  # the copy is sound
    alter, words = CHANGES[change]
    alter(run)
    with pytest.raises(RowsNotHere) as caught:
        list(training_rows(run))
    assert words in str(caught.value)
    texts = texts_of(run, MODEL)
    assert (texts.source, texts.lacking) == (SAMPLES, str(caught.value))
    assert SAMPLE_ROWS - 1 <= len(texts.computed) + len(texts.compared) <= SAMPLE_ROWS
    assert "all that the run keeps" in texts.why
    recorded = [
        json.loads(line)["input_ids"] for line in (untouched / "run" / "held_out.jsonl").read_text().splitlines()
    ]
    assert recorded and not [ids for ids in recorded if ids in [*texts.computed, *texts.compared]]


def test_a_run_that_keeps_no_row_proves_nothing(tmp_path: Path) -> None:
    run, _ = fed(tmp_path, tiny.rows(12))  # too few to hold any out
    run.samples.unlink()
    with pytest.raises(RowsNotHere, match="keeps no row"):
        list(training_rows(run))
