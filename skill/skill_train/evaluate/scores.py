"""Scores answers: by exact match, by a pattern, as JSON, or by the user's own function."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.digests import FileDigest
from skill_train.core.errors import NativeCrash, UsageError, quoted
from skill_train.core.worker import run_worker
from skill_train.evaluate.scorer_worker import Reply, ScoreJob
from skill_train.program.encode import limited
from skill_train.run.plan_record import Policy

# The user's own function: seconds to start (it may import large libraries), and for each answer.
_START_SECONDS, _ANSWER_SECONDS = 60.0, 2.0
_PATTERN_SECONDS = 10.0  # for all answers


@dataclass(frozen=True)
class Scoring:
    """The second score of answers, beside exact match."""

    name: str = "exact"  # `exact` (no second score), `regex`, `json` or `own`
    pattern: str | None = None  # for `regex`: its first group, or else the whole match, is compared
    scorer: Path | None = None  # for `own`: the user's file
    source: bytes = b""  # the file's content when the command began, so that an edit does not affect later models

    @property
    def digest(self) -> FileDigest | None:
        sha256 = hashlib.sha256(self.source).hexdigest()
        return {"bytes": len(self.source), "sha256": sha256} if self.scorer else None


def scoring_of(policy: Policy, score: str | None, pattern: str | None, scorer: Path | None) -> Scoring:
    """The scoring by the command's options, or else by the recipe (`score` and `score_pattern`).

    Raises:
        UsageError: the options contradict each other, the pattern is missing or invalid, or the file does not exist.
    """
    if scorer is not None:
        if score or pattern:
            raise UsageError(
                "--scorer and --score cannot be used together", code="bad_usage", hint="skill-train evaluate --help"
            )
        if not scorer.is_file():
            raise UsageError(
                f"the scorer {scorer} does not exist",
                code="missing_file",
                got=str(scorer),
                hint="use the path of a Python file that defines score; see skill-train evaluate --help",
            )
        return Scoring("own", scorer=scorer.resolve(), source=scorer.read_bytes())
    name = score or ("regex" if pattern else policy.score) or "exact"
    if pattern and name != "regex":
        raise UsageError(
            f"--pattern can only be used with --score regex, not with {name}",
            code="bad_usage",
            hint="--score regex with --pattern, or neither",
        )
    if name != "regex":
        return Scoring(name)
    return Scoring(name, checked_pattern(pattern or policy.score_pattern))


def checked_pattern(pattern: str | None) -> str:
    """Returns the pattern. Raises UsageError if it is empty or Python's `re` refuses it."""
    hint = "skill-train evaluate RUN --score regex --pattern 'answer: (.+)'"
    if not pattern:
        raise UsageError("a regex score needs a pattern", code="bad_scorer", expected="--pattern", hint=hint)
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"the pattern {pattern!r} is not a valid regular expression: {error}", code="bad_scorer", hint=hint
        ) from None
    return pattern


def exact(reply: Reply) -> float:
    return float(reply["answer"] == reply["expected"])


def scores(scoring: Scoring, answers: list[Reply]) -> list[float | None]:
    """A second score of each answer; higher is better. None if the expected answer has no match or is not JSON.

    Raises:
        UsageError: the user's scorer fails, returns no number or takes too long; the pattern takes too long.
    """
    if scoring.scorer is not None:
        return _by_scorer(scoring.scorer, scoring.source, answers)
    if scoring.pattern is not None:
        return _by_patterns(scoring.pattern, answers)
    return [float(_is_json(reply["answer"])) if _is_json(reply["expected"]) else None for reply in answers]


def _by_patterns(pattern: str, answers: list[Reply]) -> list[float | None]:
    """Scores by a pattern, with one time limit for all answers, because a pattern such as `(a+)+b` may never end."""
    try:
        with limited(_PATTERN_SECONDS):
            return [_by_pattern(re.compile(pattern), reply) for reply in answers]
    except TimeoutError:
        raise UsageError(
            f"the pattern {pattern!r} takes too long",
            code="bad_scorer",
            expected=f"all answers searched in {_PATTERN_SECONDS:g} s",
            got=f"{len(answers)} answers of up to {max(len(reply['answer']) for reply in answers)} characters",
            hint="avoid a repetition inside another repetition",
        ) from None


def _by_pattern(pattern: re.Pattern[str], reply: Reply) -> float | None:
    """1 if both first matches are equal, or else 0. None if the expected answer has no match."""
    group = 1 if pattern.groups else 0
    expected, match = pattern.search(reply["expected"]), pattern.search(reply["answer"])
    if expected is None or expected[group] is None:
        return None
    return float(match is not None and match[group] == expected[group])


def _is_json(text: str) -> bool:
    """Whether the text is JSON by RFC 8259. NaN and Infinity are not, although Python's parser accepts them."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _by_scorer(file: Path, source: bytes, answers: list[Reply]) -> list[float | None]:
    job: ScoreJob = {"file": str(file), "source": source.decode("latin-1"), "rows": answers}
    limit = _START_SECONDS + _ANSWER_SECONDS * len(answers)
    try:
        return [*run_worker("skill_train.evaluate.scorer_worker", job, list[float], most_seconds=limit)]
    except NativeCrash as crash:
        slow = crash.code == "worker_hangs"
        raise UsageError(
            f"the scorer {file} " + (f"did not finish within {limit:g} s" if slow else "ended its process"),
            code="bad_scorer",
            expected=f"at most {_START_SECONDS:g} s to load and {_ANSWER_SECONDS:g} s an answer" if slow else "a float",
            got=crash.got,
            hint=f"correct {quoted(file)}, then run again",
        ) from None
