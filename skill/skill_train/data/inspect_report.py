"""The answer of `data`: the findings of an inspection as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skill_train.core.digests import file_digest
from skill_train.core.errors import SkillTrainError
from skill_train.data import problems as survey
from skill_train.data import token_stats
from skill_train.data.inspect import Inspection
from skill_train.data.methods import Verdict
from skill_train.data.problems import Count, Survey
from skill_train.facts import TokenFacts
from skill_train.program.examples import to_example
from skill_train.recipe.formats import DetectedFormat

ONLY_SFT = "the only method that skill-train trains is sft; the other verdicts are for TRL's own trainers"
_EXAMPLE = 1200  # characters


@dataclass
class Counted:
    """The findings of the tokenizer: lengths, problems and a rendered row, or the reason why there are none.

    `error`: the model cannot be trained on this format at all. `counter`: the `token_count.Counter` that counted.
    """

    problems: dict[str, Count | None]
    example: str
    lengths: token_stats.Lengths | None = None
    why_not: str = ""
    error: SkillTrainError | None = None
    counter: Any = None


def report(subject: Inspection, counted: Counted) -> dict[str, Any]:
    path, seen = Path(subject.recipe.data), subject.seen
    digest = file_digest(path) if path.is_file() else {"bytes": None, "sha256": None}
    found = subject.found
    mapped = None if found is None else {"name": found.format, "columns": found.columns, "because": found.reason}
    if mapped is not None and mapped["name"] == "prompt_completion" and not subject.recipe.model:
        mapped["with_chat_template"] = "question_answer"  # a model that has one makes turns of them
    used = set(subject.verdict.columns.values())
    return {
        "path": subject.recipe.data,
        **digest,
        "rows": seen.rows,
        "usable_rows": seen.usable if subject.check else None,
        "columns": {name: " or ".join(kinds) for name, kinds in list(seen.columns.items())[:40]},
        "not_read": [name for name in seen.columns if name not in used][:20],
        "format": mapped,
        "method": subject.method,
        "methods": {name: _verdict(verdict) for name, verdict in subject.verdicts.items()},
        "note": ONLY_SFT,
        "problems": _problems(seen, counted),
        "unknown": _unknown(subject, counted),
        "tokens": _token_report(subject, counted),
        "example": _short(counted.example),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"verdict": verdict.verdict, "because": verdict.because, "recipe": verdict.lines}


def _problems(seen: Survey, counted: Counted) -> dict[str, Any]:
    named: dict[str, Count | None] = {name: seen.problems.get(name) for name in survey.READING + survey.MAPPED}
    counts = {name: _count(count) for name, count in (named | counted.problems).items()}
    sampled = counted.lengths is not None and len(counted.lengths.counted) < seen.usable
    for name in ("truncated", "fully_masked", "template"):
        if sampled and counted.lengths is not None and counts[name] is not None:
            counts[name]["of_rows"] = len(counted.lengths.counted)
    return counts


def _count(count: Count | None) -> Any:
    if count is None:
        return None
    if not count.rows:
        return {"rows": 0}
    return {"rows": count.rows, "refused": count.refused, "lines": count.lines, "first": _short(count.why, 160)}


def _unknown(subject: Inspection, counted: Counted) -> dict[str, str]:
    """The reasons for problems and figures that are null."""
    unknown: dict[str, str] = {}
    if subject.check is None:
        unknown |= dict.fromkeys(survey.MAPPED, f"no mapping for {subject.method}")
    if counted.lengths is None:
        unknown |= dict.fromkeys(("truncated", "fully_masked", "template"), counted.why_not)
    return unknown


def _token_report(subject: Inspection, counted: Counted) -> dict[str, Any] | None:
    seen, limit = subject.seen, subject.recipe.max_length
    if not seen.usable:
        return None
    if counted.lengths is not None:
        return _rounded(token_stats.token_facts(counted.lengths, limit)) | token_stats.distribution(counted.lengths)
    return _rounded(
        token_stats.token_range(
            seen.usable, seen.text_bytes, seen.longest_text_bytes, limit, seen.turns, seen.longest_turns
        )
    )


def _rounded(facts: TokenFacts) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in asdict(facts).items():
        if isinstance(value, tuple):
            values[name] = round(value[0], 1) if facts.counted else [round(part, 1) for part in value]
        else:
            values[name] = round(value, 4) if isinstance(value, float) else value
    return values


def plain_example(subject: Inspection) -> str:
    """The first usable row without a template: speakers by name, trained parts marked as far as possible."""
    check = subject.check
    row = next((row for _, row in survey.usable(subject.recipe, check)), None) if check is not None else None
    if row is None:
        return ""
    if subject.method != "sft" or subject.found is None:
        return "\n".join(f"{name}: {row[column]}" for name, column in subject.verdict.columns.items())
    return marked(row, subject.found, subject.recipe.loss_on)


def marked(row: dict[str, Any], detected: DetectedFormat, loss_on: str | None) -> str:
    """A row as training reads it, before the template, with the trained parts between ⟦ and ⟧."""
    example = to_example(row, detected.format, detected.columns)
    if example["kind"] == "text":
        return f"⟦{example['text']}⟧"
    if example["kind"] == "completion":
        whole = loss_on == "all"
        return (
            f"⟦{example['prompt']}{example['completion']}⟧"
            if whole
            else f"{example['prompt']}⟦{example['completion']}⟧"
        )
    said = []
    for index, message in enumerate(example["messages"]):
        text = "\n".join(str(part) for part in (message["content"], message.get("tool_calls")) if part)
        trained = loss_on == "all" or (message["role"] == "assistant" and index >= example["prompt_messages"])
        said.append(f"{message['role']}: ⟦{text}⟧" if trained else f"{message['role']}: {text}")
    return "\n".join(said)


def _short(text: str, limit: int = _EXAMPLE) -> str:
    """The text without its middle, so that its start and its trained end are kept."""
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
