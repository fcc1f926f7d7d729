"""Token figures: ranges by hand, counted ones from lengths written out here, and what is kept is found again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from skill_train.data import token_stats
from skill_train.data.token_stats import Lengths
from skill_train.facts import DatasetFacts

# Ten rows: tokens, trained tokens, position of the first trained one.
ROWS = [(10, 4, 6), (12, 4, 8), (20, 10, 10), (20, 10, 10), (30, 10, 20), (40, 10, 30), (50, 5, 45), (60, 6, 54)]
LENGTHS = Lengths(8, ROWS, 60)
DATA = DatasetFacts("d.jsonl", "f" * 64, 8, ("messages",), "messages", {"messages": "messages"}, 1, "found")


def test_the_range_of_plain_text() -> None:
    """1000 bytes in 10 rows: 100 bytes a row are 20 to 50 tokens; an end token, and at most a first one beside it."""
    facts = token_stats.token_range(10, 1000, 400, 60)
    assert (facts.counted, facts.basis, facts.max_length) == (False, "2 to 5 bytes a token", 60)
    assert facts.mean == (21, 52)
    assert facts.longest == (81, 202)
    assert facts.mean_cut == (21, 52)
    assert token_stats.token_range(10, 1000, 400, 30).mean_cut == (21, 30)
    assert (facts.trained_share, facts.truncated_share) == (None, None)


def test_the_range_of_conversations_adds_the_template() -> None:
    """Two turns a row: 2 to 12 tokens, and up to 40 of a system message that the template writes itself."""
    facts = token_stats.token_range(10, 1000, 400, 1024, turns=20, longest_turns=8)
    assert facts.mean == (20 + 2, 50 + 12 + 40)
    assert facts.longest == (80 + 8, 200 + 48 + 40)


def test_counted_figures() -> None:
    """242 tokens in 8 rows, 59 of them trained; cut at 30: 10 + 12 + 20 + 20 + 4 * 30 = 182."""
    facts = token_stats.token_facts(LENGTHS, 30)
    assert (facts.counted, facts.basis) == (True, "counted in all rows")
    assert facts.mean == (242 / 8, 242 / 8)
    assert facts.longest == (60, 60)
    assert facts.mean_cut == (182 / 8, 182 / 8)
    assert facts.trained_share == 59 / 242
    assert facts.truncated_share == 3 / 8


def test_a_sample_says_so() -> None:
    facts = token_stats.token_facts(Lengths(1000, ROWS, 900), 100)
    assert facts.basis == "counted in 8 of 1000 rows"
    assert facts.longest == (900, 900)


def test_what_max_length_cuts_away_is_told() -> None:
    """182 of 242 tokens stay at 30; at 59, 241 of 242. Rows of 21 to 52 tokens surely lose something below 21."""
    said = token_stats.cut_away(token_stats.token_facts(LENGTHS, 30))
    assert said is not None and said.startswith("max_length 30 cuts away 25% of the tokens")
    assert "up to 60" in said
    assert token_stats.cut_away(token_stats.token_facts(LENGTHS, 59)) is None
    least = token_stats.cut_away(token_stats.token_range(10, 1000, 400, 7))
    assert least is not None and least.startswith("max_length 7 cuts away at least 67% of the tokens")
    assert token_stats.cut_away(token_stats.token_range(10, 1000, 400, 21)) is None
    assert token_stats.cut_away(token_stats.token_range(0, 0, 0, 21)) is None


@pytest.mark.parametrize(
    ("max_length", "context", "advice"),
    [
        (30, None, "Raise it, or part such rows"),
        (30, 60, "Raise it, or part such rows"),
        (30, 59, "The model has 59 positions: raise it no further, and part longer rows"),
        (30, 30, "The model has 30 positions: raise it no further, and part longer rows"),
        (30, 16, "The model has 16 positions: raise it no further, and part longer rows"),
    ],
)
def test_no_length_beyond_the_positions_of_the_model_is_advised(
    max_length: int, context: int | None, advice: str
) -> None:
    said = token_stats.cut_away(token_stats.token_facts(LENGTHS, max_length), context)
    assert said is not None and said.endswith(f"a row has up to 60. {advice}")


def test_counts_that_cannot_be_kept_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written: the answer of `data` was there, and it ended with an error."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "file" / "cache"))
    token_stats.keep(DATA, "tokenizer", LENGTHS, split="train", loss_on=None)
    assert token_stats.known_tokens(DATA, "tokenizer", split="train", loss_on=None, max_length=30) is None


def test_percentiles_and_histogram() -> None:
    """Nearest rank of 8: p50 is the 4th, p90 the 8th. Buckets end at powers of two."""
    percentiles, histogram = token_stats.distribution(LENGTHS)
    assert percentiles == (20, 60, 60)
    assert [(bucket.up_to, bucket.rows) for bucket in histogram] == [(16, 2), (32, 3), (64, 3)]


def test_what_was_counted_is_found_for_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    assert _known(30) is None
    token_stats.keep(DATA, "key", LENGTHS, split="train", loss_on=None)
    for limit in (30, 1024):
        assert _known(limit) == token_stats.token_facts(LENGTHS, limit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "e" * 64}, {}),
        ({"columns": {"messages": "chosen"}}, {}),
        ({"format": "sharegpt"}, {}),
        ({}, {"tokenizer": "another"}),
        ({}, {"tokenizer": None}),
        ({}, {"split": "train[:4]"}),
        ({}, {"loss_on": "all"}),
    ],
    ids=str,
)
def test_figures_of_something_else_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: dict[str, str]
) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    token_stats.keep(DATA, "key", LENGTHS, split="train", loss_on=None)
    asked = {"tokenizer": "key", "split": "train", "loss_on": None} | words
    tokenizer = asked.pop("tokenizer")
    changed = msgspec.structs.replace(DATA, **change)  # type: ignore[arg-type]
    assert token_stats.known_tokens(changed, tokenizer, **asked, max_length=30) is None  # type: ignore[arg-type]


ON_THE_HUB = msgspec.structs.replace(DATA, source="me/tickets", fingerprint=None, revision="c" * 40)


@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        ({"data_file": "a.jsonl"}, {"data_file": "b.jsonl"}),
        ({"data_file": "a.jsonl"}, {}),
        ({"data_config": "en"}, {"data_config": "fr"}),
        ({}, {"data_config": "fr"}),
    ],
    ids=str,
)
def test_figures_of_another_part_of_a_dataset_on_the_hub_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: dict[str, str], asked: dict[str, str]
) -> None:
    """All have one commit."""
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    this, other = (msgspec.structs.replace(ON_THE_HUB, **part) for part in (kept, asked))  # type: ignore[arg-type]
    token_stats.keep(this, "key", LENGTHS, split="train", loss_on=None)
    found = [
        token_stats.known_tokens(facts, "key", split="train", loss_on=None, max_length=30) for facts in (this, other)
    ]
    assert found == [token_stats.token_facts(LENGTHS, 30), None]


def test_the_choice_of_the_plan_finds_what_was_counted_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`loss_on: assistant` is what a conversation gets by itself."""
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    token_stats.keep(DATA, "key", LENGTHS, split="train", loss_on=None)
    assert token_stats.known_tokens(DATA, "key", split="train", loss_on="assistant", max_length=30) is not None


def test_a_torn_file_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))
    token_stats.keep(DATA, "key", LENGTHS, split="train", loss_on=None)
    kept = next((tmp_path / "tokens").iterdir())
    for text in ("", "{", "[]", "[" * 99_999, '{"schema": "skill-train/tokens/1"}', kept.read_text()[:60]):
        kept.write_text(text)
        assert _known(30) is None


def test_the_key_of_a_tokenizer_changes_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    key = token_stats.tokenizer_key(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert token_stats.tokenizer_key(str(tmp_path), None) == key
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    changed = token_stats.tokenizer_key(str(tmp_path), None)
    assert changed != key
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.seek(6 << 20)
        file.write(b"}")
    large = token_stats.tokenizer_key(str(tmp_path), None)
    assert large not in (key, changed)
    with open(tmp_path / "tokenizer.json", "r+b") as file:  # a token in the middle, with no other size
        file.seek(9 << 19)
        file.write(b"x")
    assert token_stats.tokenizer_key(str(tmp_path), None) not in (key, changed, large)


def test_a_folder_without_a_tokenizer_has_no_key(tmp_path: Path) -> None:
    """Else the counts of one such model would be found for every other."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert token_stats.tokenizer_key(str(tmp_path), None) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert token_stats.tokenizer_key(str(tmp_path), None) is not None


def test_the_key_of_a_model_on_the_hub_is_its_commit() -> None:
    assert token_stats.tokenizer_key("owner/name", "abc") == "owner/name@abc"
    assert token_stats.tokenizer_key("owner/name", None) is None


def _known(max_length: int) -> object:
    return token_stats.known_tokens(DATA, "key", split="train", loss_on=None, max_length=max_length)
