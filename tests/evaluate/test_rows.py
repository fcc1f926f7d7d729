"""Rows as questions, and figures of replies that are worked out by hand."""

from __future__ import annotations

import io
import sys
from math import exp
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skill_train.commands.evaluate import draw_evaluation
from skill_train.core.console import _screen
from skill_train.core.errors import NotInstalled, UsageError
from skill_train.evaluate.backends import Model, Question, Replies, backend_of
from skill_train.evaluate.figures import NOISE, ModelReplies, differences, figures
from skill_train.evaluate.step import blind, end_of, questions
from skill_train.model.folder import read_config
from skill_train.reference.load import context_length
from skill_train.run.earlier_start import require_rows
from skill_train.run.evaluate_record import AnsweredRow, Evaluation, EvaluationInputs, EvaluationOptions, spread

NO = -100
# Two turns: 5 and 6 are the first answer, 8 and 9 the second; 7 and 2 belong to the template.
TALK = {
    "kind": "chat",
    "truncated": False,
    "input_ids": [1, 4, 5, 6, 7, 8, 9, 2],
    "labels": [NO, NO, 5, 6, NO, 8, 9, NO],
}


def ask(row: dict[str, Any], *, loss_on: str = "assistant", context: int | None = None) -> Question:
    return questions([row], loss_on=loss_on, room=3, context=context)[0]


def test_the_last_answer_is_asked_for_and_every_trained_token_counts() -> None:
    got = ask(TALK)
    assert (got.prompt, got.answer, got.trained, got.most) == ([1, 4, 5, 6, 7], [8, 9], [2, 3, 5, 6], 2 + 3)


def test_an_answer_stays_inside_the_context() -> None:
    assert ask(TALK, context=7).most == 2


@pytest.mark.parametrize("context", [4, 5])
def test_a_prompt_that_fills_the_context_asks_nothing(context: int) -> None:
    """An answer of no token is an error of transformers."""
    got = ask(TALK, context=context)
    assert (got.prompt, got.answer, got.most) == ([], [], 0)
    assert (got.ids, got.trained) == (TALK["input_ids"], [2, 3, 5, 6])


def test_the_first_token_is_never_counted() -> None:
    """Nothing stands before it, so nobody foretells it."""
    row = {"kind": "text", "truncated": False, "input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    assert ask(row).trained == [1, 2]


@pytest.mark.parametrize(
    ("row", "loss_on"),
    [
        (TALK | {"kind": "text"}, "assistant"),
        (TALK | {"truncated": True}, "assistant"),
        (TALK | {"labels": TALK["input_ids"]}, "all"),
    ],
)
def test_what_has_no_whole_answer_is_not_asked(row: dict[str, Any], loss_on: str) -> None:
    got = ask(row, loss_on=loss_on)
    assert (got.prompt, got.answer) == ([], []) and got.trained


def test_rows_are_taken_evenly() -> None:
    rows = [{"row": number} for number in range(10)]
    assert [row["row"] for row in spread(rows, 4)] == [0, 2, 5, 7]
    assert spread(rows, 10) == spread(rows, 99) == rows


def test_a_run_without_held_out_rows_is_told_what_to_change() -> None:
    with pytest.raises(UsageError, match="no held-out rows") as caught:
        require_rows([], Path("runs/a"), 0)
    assert (caught.value.code, caught.value.exit_code) == ("no_held_out", 2)
    assert "held_out_fraction" in caught.value.expected and "held_out_fraction" in caught.value.hint


def test_a_missing_library_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as Python marks what cannot be imported
    with pytest.raises(NotInstalled) as caught:
        backend_of(Model("a", Path("a.gguf")), "auto")
    assert (caught.value.exit_code, caught.value.hint) == (7, 'pip install "skill-train[gguf]"')


ASKED = [Question([1, 2, 3], [1, 2], [1], [2], 4), Question([1] * 9, list(range(1, 9)), [1], [2], 4)]  # 2 and 8 tokens


def measured(
    name: str, sums: list[float | None], exact: list[float], scores: list[float | None] | None = None
) -> ModelReplies:
    model = Model(name, Path(f"{name}"))
    texts = ["yes" if right else "no" for right in exact]
    return ModelReplies(model, "", Replies("transformers", "cpu", sums, [[2], [2]], 10.04), exact, scores or [], texts)


def test_loss_is_a_mean_over_tokens() -> None:
    """1 nat over 2 tokens and 4 over 8: 5 nats over 10 tokens."""
    got = figures(measured("base", [1.0, 4.0], [1.0, 0.0], [3.0, None]), ASKED)
    assert (got.loss, got.perplexity) == (pytest.approx(0.5), pytest.approx(exp(0.5)))
    assert (got.exact_match, got.score, got.scored_rows, got.tokens_per_second) == (0.5, 3.0, 1, 10.0)


def test_a_loss_that_is_no_number_is_unknown_with_its_reason() -> None:
    got = figures(measured("base", [None, 4.0], [1.0, 0.0]), ASKED)
    assert (got.loss, got.perplexity) == (None, None)
    assert "not finite" in got.reason


def test_a_perplexity_beyond_floats_is_unknown() -> None:
    assert figures(measured("base", [2e4, 0.0], [1.0, 0.0]), ASKED).perplexity is None


def test_tuned_is_held_against_base_and_files_against_tuned() -> None:
    base = measured("base", [20.0, 80.0], [0.0, 0.0])
    tuned = measured("tuned", [2.0, 8.0], [1.0, 1.0])
    file = measured("a.gguf", [4.0, 16.0], [1.0, 1.0])
    broken = measured("b.gguf", [None, 16.0], [])
    got = {(one.model, one.against, one.measure): one for one in differences([base, tuned, file, broken], ASKED)}
    assert list(got) == [
        ("tuned", "base", "loss"),
        ("tuned", "base", "exact_match"),
        ("a.gguf", "tuned", "loss"),
        ("a.gguf", "tuned", "exact_match"),
    ]
    # Every resample has the same mean: (20 - 2) / 2 = (80 - 8) / 8 = 9 nats a token.
    loss = got["tuned", "base", "loss"]
    assert [loss.difference, loss.low, loss.high] == pytest.approx([-9.0] * 3)
    few = ", of few rows"  # two rows
    assert (loss.says, got["tuned", "base", "exact_match"].says) == (f"better{few}", f"better{few}")
    assert got["a.gguf", "tuned", "loss"].says == f"worse{few}"
    assert got["a.gguf", "tuned", "exact_match"].says == NOISE


def test_rows_that_only_one_model_could_be_scored_on_are_left_out() -> None:
    tuned = measured("tuned", [1.0, 1.0], [1.0, 1.0], [5.0, None])
    base = measured("base", [1.0, 1.0], [1.0, 1.0], [2.0, 9.0])
    score = next(one for one in differences([base, tuned], ASKED) if one.measure == "score")
    assert (score.difference, score.says) == (3.0, "better, of few rows")


def test_few_scored_rows_are_few_however_many_were_asked() -> None:
    """A pattern that only the expected answers of three rows match."""
    asked, unscored = ASKED * 15, [None] * 27
    tuned = measured("tuned", [1.0] * 30, [1.0] * 30, [5.0, 6.0, 7.0, *unscored])
    base = measured("base", [1.0] * 30, [0.0] * 30, [2.0, 3.0, 4.0, *unscored])
    says = {one.measure: one.says for one in differences([base, tuned], asked)}
    assert (says["exact_match"], says["score"]) == ("better", "better, of few rows")


def test_thirty_rows_are_not_few() -> None:
    asked = ASKED * 15
    base, tuned = measured("base", [20.0, 80.0] * 15, [0.0] * 30), measured("tuned", [2.0, 8.0] * 15, [1.0] * 30)
    assert {one.says for one in differences([base, tuned], asked)} == {"better"}


def test_more_than_the_size_of_the_vocabulary_is_worse_than_guessing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 1000}}')
    one = figures(measured("base", [1.0, 1.0], []), ASKED)
    models = [
        msgspec.structs.replace(one, name=name, loss=loss)
        for name, loss in (("base", 6.9), ("tuned", 6.92), ("a", None), ("b", 900.0))
    ]
    said = blind(models, tmp_path)  # ln 1000 = 6.908
    assert said.startswith("tuned (loss 6.92), b (loss 900): worse than blind guessing among 1,000 tokens")
    assert blind(models[:1], tmp_path) == ""


def test_a_config_whose_text_part_is_null_is_read_as_one_without(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": null, "vocab_size": 3, "max_position_embeddings": 64}')
    one = msgspec.structs.replace(figures(measured("base", [1.0, 1.0], []), ASKED), loss=1.2)  # ln 3 = 1.099
    assert "among 3 tokens" in blind([one], tmp_path)
    assert context_length(read_config(tmp_path)) == 64


def test_a_prompt_that_is_cut_says_so() -> None:
    assert (end_of("abcde", 5), end_of("abcdef", 5)) == ("abcde", "…cdef")


def test_a_person_sees_figures_intervals_and_answers() -> None:
    base, tuned = measured("base", [20.0, 80.0], [0.0, 0.0]), measured("tuned", [2.0, 8.0], [1.0, 0.5])
    models = [figures(one, ASKED) for one in (base, tuned)]
    models.append(msgspec.structs.replace(models[0], name="small", loss=None, reason="it knows 5 tokens"))
    answers = {"base": "no", "tuned": "yes"}
    shown = Evaluation(
        inputs=EvaluationInputs(models={}, rows=""),
        options=EvaluationOptions(score="exact", backend="auto"),
        versions={},
        rows=2,
        asked=2,
        answer_tokens=10,
        score=None,
        models=models,
        differences=differences([base, tuned], ASKED),
        answers=[AnsweredRow(line=7, prompt="[b]what?", expected="yes", answers=answers)],
        seconds=1.0,
        finished_at="",
    )
    screen, out = _screen(), io.StringIO()  # as the command has it: a text is no markup
    screen.file, screen.width = out, 120
    draw_evaluation(screen, shown)
    seen = out.getvalue()
    for text in (
        "75.0%",
        "-9 (-9 to -9)",
        "better",
        "line 7: [b]what?",
        "  base: no",
        "small was not measured: it knows",
    ):
        assert text in seen


def against_tuned(away: list[float], tokens: int = 50, *, gguf: bool = True, score: float = 0.0) -> dict[str, str]:
    """What is said of a file whose loss is so many nats a token off the tuned model's, a row each, by measure."""
    asked = [Question(list(range(tokens + 1)), list(range(1, tokens + 1)), [0], [1], 4) for _ in away]
    theirs = [2.0 * tokens + row for row in range(len(away))]
    ours = [nats + tokens * more for nats, more in zip(theirs, away, strict=True)]
    scores = [0.1 + 0.01 * row for row in range(len(away))]
    tuned = measured("tuned", list(theirs), [1.0] * len(away), list(scores))
    other = measured("a.gguf" if gguf else "a", list(ours), [1.0] * len(away), [one + score for one in scores])
    return {one.measure: one.says for one in differences([tuned, other], asked)}


def steady(size: float, rows: int = 40) -> list[float]:
    """Differences of one sign that hardly scatter: their interval never contains 0."""
    return [size * (1 + 0.05 * (row % 3 - 1)) for row in range(rows)]


@pytest.mark.parametrize("rows", [12, 40])
@pytest.mark.parametrize("size", [2.4e-05, -2.4e-05, 1e-07, 1.9e-03, -1.9e-03])
def test_a_difference_too_small_to_matter_is_no_verdict(size: float, rows: int) -> None:
    """`verify` passes an unquantized file whose perplexity is up to 0.2 % off, which is 0.002 nats a token."""
    assert against_tuned(steady(size, rows))["loss"] == "same within noise"
    assert against_tuned(steady(size, rows), gguf=False)["loss"] == "same within noise"


@pytest.mark.parametrize(("size", "says"), [(2.2e-03, "worse"), (-2.2e-03, "better"), (0.05, "worse"), (1.0, "worse")])
def test_a_worse_file_is_called_worse(size: float, says: str) -> None:
    assert against_tuned(steady(size))["loss"] == says
    assert against_tuned(steady(size, 12))["loss"] == f"{says}, of few rows"


def test_a_large_difference_that_scatters_stays_inside_the_noise() -> None:
    assert against_tuned([0.5 * (-1) ** row for row in range(40)])["loss"] == NOISE


@pytest.mark.parametrize(
    ("more", "says"), [(1e-9, "same within noise"), (-1e-9, "same within noise"), (0.001, "better")]
)
def test_a_score_that_differs_in_its_last_digits_is_the_same(more: float, says: str) -> None:
    """The scale of a user's own score is not known, so only what arithmetic itself does to it is left out."""
    assert against_tuned([0.0] * 40, score=more)["score"] == says


def test_rows_that_are_gone_were_not_trained_on(tmp_path: Path) -> None:
    """It said that every row was trained on, and to train again."""
    with pytest.raises(UsageError) as caught:
        require_rows([], tmp_path / "my run", 2)
    assert (caught.value.code, caught.value.got) == ("broken_record", "no such file")
    assert "0 of the 2 rows" in caught.value.message and caught.value.hint.endswith(f"'{tmp_path}/my run'")
