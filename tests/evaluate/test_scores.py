"""What an answer is worth, and what a user's own scorer may do wrong. Each scorer is a real child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hostile
from skill_train.core.digests import file_digest
from skill_train.core.errors import UsageError
from skill_train.evaluate import scores as evaluate_score
from skill_train.evaluate.scorer_worker import Reply
from skill_train.evaluate.scores import Scoring, exact, scores, scoring_of
from skill_train.run.plan_record import Policy


def answer(text: str, expected: str = "so: 42") -> Reply:
    return Reply(prompt="a question", answer=text, expected=expected)


def test_exact_is_to_the_letter() -> None:
    assert [exact(answer(text)) for text in ("so: 42", "so: 42.", "So: 42")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "text", "worth"),
    [
        (r"(\d+)", "it is 42 or 43", 1.0),  # the first match counts
        (r"(\d+)", "43, no, 42", 0.0),
        (r"\d+", "42!", 1.0),  # without a group, the whole match
        (r"so: (\d)\d", "so: 49", 1.0),
        (r"(\d+)", "forty-two", 0.0),
        (r"answer (\d+)", "answer 42", None),  # the row's own answer has no match
        (r"(never)?\d+", "42", None),  # it has one, in which the group took no part
    ],
)
def test_a_pattern_compares_what_it_finds(pattern: str, text: str, worth: float | None) -> None:
    assert scores(Scoring("regex", pattern), [answer(text)]) == [worth]


def test_a_pattern_that_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is for all answers together."""
    monkeypatch.setattr(evaluate_score, "_PATTERN_SECONDS", 0.3)
    with hostile.limits(5), pytest.raises(UsageError) as caught:
        scores(Scoring("regex", "(a+)+b"), [answer("x" + "a" * 40)])
    assert caught.value.code == "bad_scorer" and "(a+)+b" in caught.value.message


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"a": [1, 2.5e3, null, true]}', 1.0),
        ("42", 1.0),  # RFC 8259, section 2: any value is a JSON text
        ("{'a': 1}", 0.0),
        ('{"a": 1,}', 0.0),
        ('```json\n{"a": 1}\n```', 0.0),
        ("NaN", 0.0),  # RFC 8259, section 6: not permitted
        ('{"a": -Infinity}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_is_what_the_rfc_says(text: str, worth: float) -> None:
    assert scores(Scoring("json"), [answer(text, "{}")]) == [worth]


def test_a_row_whose_own_answer_is_no_json_has_no_score() -> None:
    assert scores(Scoring("json"), [answer(text) for text in ("{}", "so: 42")]) == [None, None]


def test_the_recipe_names_the_score_and_an_option_another() -> None:
    policy = Policy(score="regex", score_pattern="(.+)")
    assert scoring_of(policy, None, None, None) == Scoring("regex", "(.+)")
    assert scoring_of(policy, "json", None, None) == Scoring("json")
    assert scoring_of(policy, "regex", "b", None) == Scoring("regex", "b")
    assert scoring_of(Policy(), None, "c", None) == Scoring("regex", "c")
    assert scoring_of(Policy(), None, None, None) == Scoring("exact")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("regex", None, None), "bad_scorer"),
        (("regex", "(open", None), "bad_scorer"),
        (("json", "x", None), "bad_usage"),
        (("json", None, Path("scorer.py")), "bad_usage"),
        ((None, None, Path("no-such-scorer.py")), "missing_file"),
    ],
)
def test_what_cannot_be_scored_is_refused(options: tuple[Any, Any, Any], code: str) -> None:
    Path("scorer.py").write_text("")
    with pytest.raises(UsageError) as caught:
        scoring_of(Policy(), *options)
    assert caught.value.code == code


def test_an_own_scorer_gets_the_three_texts_and_may_print() -> None:
    got = own("def score(prompt, answer, expected):\n    print('@progress oops')\n    return len(prompt + answer) / 2")
    assert got == [len("a question" + "so: 42") / 2, len("a question" + "so") / 2]


def test_an_own_scorer_may_have_a_dataclass_whose_annotations_are_texts() -> None:
    """dataclasses look in the module, by its name, for what an annotation says."""
    part = "from dataclasses import dataclass\n@dataclass\nclass Part:\n    worth: int\n"
    score = "def score(prompt, answer, expected):\n    return Part(1).worth\n"
    assert own(f"from __future__ import annotations\n{part}{score}") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("code", "message", "got"),
    [
        ("x = 1", "has no function called score", "no function"),
        ("def scores(p, a, e): return 1", "has no function called score", "scores"),
        ("import no_such_module_anywhere", "cannot be loaded", "ModuleNotFoundError: No module named 'no_such_mod"),
        ("def score(p, a, e) return 1", "cannot be loaded", "SyntaxError"),
        ("raise SystemExit(3)", "cannot be loaded", "SystemExit: 3 (line 1)"),
        ("def score(p, a, e):\n    return 1 / 0", "failed on answer 1, 'so: 42'", "division by zero (line 2)"),
        ("def score(p, a): return 1", "failed on answer 1", "TypeError: score() takes 2 positional arguments"),
        ("def score(p, a, e): return 'good'", "returned no number for answer 1", "'good' (str)"),
        ("def score(p, a, e): return float('nan')", "returned no number", "nan (float)"),
        ("def score(p, a, e): return None", "returned no number", "None (NoneType)"),
        ("def score(p, a, e): return 10**400", "failed on answer 1", "OverflowError: int too large"),
        ("import os\ndef score(p, a, e): os.abort()", "ended its process", ""),
        ("def score(expected, answer, prompt): return 1", "takes the three", "score(expected, answer, prompt)"),
        ("def score(answer, expected): return 1", "takes the three texts in another order", "score(answer, expected)"),
    ],
)
def test_what_a_scorer_does_wrong_is_told(code: str, message: str, got: str) -> None:
    with pytest.raises(UsageError, match="scorer.py " + message.replace("(", "\\(")) as caught:
        own(code)
    assert caught.value.code == "bad_scorer"
    assert got in caught.value.got
    assert caught.value.hint.startswith("correct ")


def test_a_scorer_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_score, "_START_SECONDS", 1.0)
    monkeypatch.setattr(evaluate_score, "_ANSWER_SECONDS", 0.5)
    with pytest.raises(UsageError, match="did not finish within 2 s"):
        own("import time\ndef score(p, a, e):\n    while True: time.sleep(1)")


def test_a_scorer_that_is_edited_while_models_answer_scores_all_of_them_alike() -> None:
    scoring = own_scoring("def score(prompt, answer, expected): return 1")
    other = own_scoring("def score(prompt, answer, expected): return 0")  # the same file
    assert (scores(scoring, [answer("so")]), scores(other, [answer("so")])) == ([1.0], [0.0])
    assert scoring.digest != other.digest == file_digest(Path("scorer.py"))


def own_scoring(code: str) -> Scoring:
    Path("scorer.py").write_text(code + "\n", encoding="utf-8")
    return scoring_of(Policy(), None, None, Path("scorer.py"))


def own(code: str) -> list[float | None]:
    return scores(own_scoring(code), [answer("so: 42"), answer("so")])
