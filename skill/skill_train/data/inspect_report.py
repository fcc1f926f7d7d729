"""The answer of `data`: the findings of an inspection as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from skill_train.core.digests import file_digest
from skill_train.core.errors import SkillTrainError
from skill_train.data import problems, token_stats
from skill_train.data.inspect import Inspection
from skill_train.data.methods import Verdict
from skill_train.data.problems import RefusedRows, Survey
from skill_train.data.write_fixed import Fixed
from skill_train.facts import TokenFacts
from skill_train.program.examples import CALLS, Row, to_example
from skill_train.program.pictures.in_rows import PICTURE, lift_pictures
from skill_train.recipe.formats import DetectedFormat

if TYPE_CHECKING:
    from skill_train.data.count_tokens import Counter

ONLY_SFT = "the only method that skill-train trains is sft; the other verdicts are for TRL's own trainers"
_EXAMPLE = 1200  # characters


@dataclass
class Counted:
    """The findings of the tokenizer: lengths, problems and a rendered row, or the reason why there are none.

    `error`: why the model cannot be trained on this format at all. `counter`: the object that counted. `context`: the
    positions of the model.
    """

    problems: dict[str, RefusedRows | None]
    example: str
    lengths: token_stats.Lengths | None = None
    why_not: str = ""
    error: SkillTrainError | None = None
    counter: Counter | None = None
    context: int | None = None

    @property
    def refused(self) -> int:
        return sum(count.refused for count in self.problems.values() if count is not None)

    def tried(self, problem: str) -> int:
        """The rows in which the tokenizer looked for a problem. A row that the template refuses has no length."""
        template = self.problems["template"] if problem == "template" else None
        return (len(self.lengths.counted) if self.lengths else 0) + (template.rows if template else 0)


class MappingReport(msgspec.Struct, frozen=True):
    """The format and its columns. `with_chat_template`: how a model with a chat template reads them instead."""

    name: str
    columns: dict[str, str]
    because: str
    with_chat_template: str | UnsetType = UNSET


class MethodReport(msgspec.Struct, frozen=True):
    """The verdict on one method, and the lines of a recipe that map the columns."""

    verdict: str
    because: str
    recipe: list[str]


class ProblemReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of problem. `refused` of its rows would end the training. Without a row, only the count is set."""

    rows: int
    refused: int | UnsetType = UNSET
    lines: list[int] | UnsetType = UNSET
    first: str | UnsetType = UNSET  # the reason for the first row
    of_rows: int | UnsetType = UNSET  # the number of checked rows, if not all were checked


class TokenReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of each row, as in `TokenFacts`. Without a count they are a range, and there is no distribution."""

    basis: str
    counted: bool
    mean: float | list[float]
    longest: float | list[float]
    mean_cut: float | list[float]
    max_length: int
    trained_share: float | None
    truncated_share: float | None
    p50: int | UnsetType = UNSET
    p90: int | UnsetType = UNSET
    p99: int | UnsetType = UNSET
    histogram: list[token_stats.Bucket] | UnsetType = UNSET


class PictureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of the rows that training takes."""

    count: int
    rows: int  # with pictures; `most` is the largest number in one row
    most: int
    bytes: int  # of their files
    largest: list[int] | None  # width and height of the one with most pixels
    # rotated, grey, cmyk, transparent: those that training turns upright, and makes RGB on white
    rotated: int
    grey: int
    cmyk: int
    transparent: int
    # mean_tokens, longest_tokens: of the pictures of a counted row, where a model was named
    mean_tokens: float | UnsetType = UNSET
    longest_tokens: int | UnsetType = UNSET


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    # bytes, sha256: of a file
    bytes: int | None
    sha256: str | None
    rows: int
    usable_rows: int | None
    columns: dict[str, str]  # the kinds of value of each
    not_read: list[str]
    format: MappingReport | None  # None where nothing is known
    method: str
    methods: dict[str, MethodReport]
    note: str
    problems: dict[str, ProblemReport | None]  # None for a problem in `unknown`, which has the reason
    unknown: dict[str, str]
    tokens: TokenReport | None
    example: str
    # set if the dataset has pictures, and its model reads them or is not named
    pictures: PictureReport | UnsetType = UNSET
    fix: Fixed | UnsetType = UNSET  # what `--fix` wrote


def report(inspection: Inspection, counted: Counted) -> DataReport:
    path, survey = Path(inspection.recipe.data), inspection.survey
    digest = file_digest(path) if path.is_file() else None
    used = set(inspection.verdict.columns.values())
    counts = {**survey.problems, **{name: count for name, count in counted.problems.items() if count is not None}}
    refused = sum(count.refused for count in counts.values())
    unknown = _unknown(inspection, counted)
    counted_all = inspection.check is not None and "usable_rows" not in unknown
    return DataReport(
        path=inspection.recipe.data,
        bytes=digest and digest["bytes"],
        sha256=digest and digest["sha256"],
        rows=survey.rows,
        usable_rows=survey.usable - counted.refused if counted_all else None,
        columns={name: " or ".join(kinds) for name, kinds in list(survey.columns.items())[:40]},
        not_read=[name for name in survey.columns if name not in used][:20],
        format=None if inspection.detected is None else _mapping(inspection.detected, inspection.recipe.model),
        method=inspection.method,
        methods={
            name: _verdict(verdict, refused if name == inspection.method else 0)
            for name, verdict in inspection.verdicts.items()
        },
        note=ONLY_SFT,
        problems=_problems(survey, counted),
        unknown=unknown,
        tokens=_token_report(inspection, counted),
        example=_short(counted.example),
        pictures=_pictures(inspection, counted),
    )


def _pictures(inspection: Inspection, counted: Counted) -> PictureReport | UnsetType:
    if inspection.pictures is None or not inspection.pictures.figures.pictures:
        return UNSET
    figures, tokens = inspection.pictures.figures, counted.counter.pictures_of_rows if counted.counter else []
    return PictureReport(
        count=figures.pictures,
        rows=figures.rows,
        most=figures.most,
        bytes=figures.bytes,
        largest=None if figures.largest is None else list(figures.largest),
        **{trait: figures.traits[trait] for trait in ("rotated", "grey", "cmyk", "transparent")},
        mean_tokens=round(sum(tokens) / len(tokens), 1) if tokens else UNSET,
        longest_tokens=max(tokens) if tokens else UNSET,
    )


def _mapping(detected: DetectedFormat, model: str) -> MappingReport:
    turns = detected.format == "prompt_completion" and not model  # a model with a chat template makes turns of them
    return MappingReport(detected.format, detected.columns, detected.reason, "question_answer" if turns else UNSET)


def _verdict(verdict: Verdict, refused: int) -> MethodReport:
    """`refused`: rows that the method would reject, though its columns are there."""
    rows = f"; {refused} rows would be rejected" if refused > 1 else "; 1 row would be rejected"
    return MethodReport(verdict.verdict, verdict.because + (rows if refused else ""), verdict.lines)


def _problems(survey: Survey, counted: Counted) -> dict[str, ProblemReport | None]:
    names = problems.READING + problems.MAPPED
    named: dict[str, RefusedRows | None] = {name: survey.problems.get(name) for name in names} | {
        name: count for name, count in survey.problems.items() if name not in names and count.rows
    }
    tried = {name: counted.tried(name) for name in counted.problems}
    return {
        name: _count(count, tried[name] if tried.get(name, survey.usable) < survey.usable else UNSET)
        for name, count in (named | counted.problems).items()
    }


def _count(count: RefusedRows | None, of_rows: int | UnsetType) -> ProblemReport | None:
    if count is None:
        return None
    if not count.rows:
        return ProblemReport(rows=0, of_rows=of_rows)
    first = _short(count.why, 160)
    return ProblemReport(rows=count.rows, refused=count.refused, lines=count.lines, first=first, of_rows=of_rows)


def _unknown(inspection: Inspection, counted: Counted) -> dict[str, str]:
    """The reasons for problems and figures that are null."""
    unknown: dict[str, str] = {}
    if inspection.check is None:
        unknown |= dict.fromkeys(problems.MAPPED, f"no mapping for {inspection.method}")
    if counted.lengths is None:
        unknown |= dict.fromkeys(("truncated", "fully_masked", "template"), counted.why_not)
    if counted.refused and (tried := counted.tried("template")) < inspection.survey.usable:
        unknown["usable_rows"] = f"{counted.refused} of the {tried} rows that were tokenized would be rejected"
    return unknown


def _token_report(inspection: Inspection, counted: Counted) -> TokenReport | None:
    survey, limit = inspection.survey, inspection.recipe.max_length
    if not survey.usable:
        return None
    if counted.lengths is None:
        sizes = (survey.usable, survey.text_bytes, survey.longest_text_bytes)
        tokens = _rounded(token_stats.token_range(*sizes, limit, survey.turns, survey.longest_turns))
        pictures = inspection.pictures is not None and inspection.pictures.figures.pictures
        return msgspec.structs.replace(tokens, basis=f"{tokens.basis}, without the pictures") if pictures else tokens
    tokens = _rounded(token_stats.token_facts(counted.lengths, limit))
    (p50, p90, p99), histogram = token_stats.distribution(counted.lengths)
    return msgspec.structs.replace(tokens, p50=p50, p90=p90, p99=p99, histogram=histogram)


def _rounded(facts: TokenFacts) -> TokenReport:
    def size(ends: tuple[float, float]) -> float | list[float]:
        return round(ends[0], 1) if facts.counted else [round(end, 1) for end in ends]

    def share(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    values = msgspec.structs.asdict(facts)
    values |= {name: size(values[name]) for name in ("mean", "longest", "mean_cut")}
    values |= {name: share(values[name]) for name in ("trained_share", "truncated_share")}
    return TokenReport(**values)


def plain_example(inspection: Inspection) -> str:
    """The first usable row without a template: speakers by name, trained parts marked as far as possible."""
    check = inspection.check
    row = next((row for _, row in problems.usable(inspection.recipe, check)), None) if check is not None else None
    if row is None:
        return ""
    if inspection.method != "sft" or inspection.detected is None:
        return "\n".join(f"{name}: {row[column]}" for name, column in inspection.verdict.columns.items())
    if inspection.pictures is None:
        return marked(row, inspection.detected, inspection.recipe.loss_on)
    row = lift_pictures(row, inspection.detected.columns)[0]
    return marked(row, inspection.detected, inspection.recipe.loss_on).replace(PICTURE, "<image>")


def marked(row: Row, detected: DetectedFormat, loss_on: str | None) -> str:
    """A row as training reads it, before the template, with the trained parts between ⟦ and ⟧."""
    example = to_example(row, detected.format, detected.columns)
    if example["kind"] == "text":
        return f"⟦{example['text']}⟧"
    if example["kind"] == "completion":
        prompt, completion = example["prompt"], example["completion"]
        return f"⟦{prompt}{completion}⟧" if loss_on == "all" else f"{prompt}⟦{completion}⟧"
    lines = []
    for index, message in enumerate(example["messages"]):
        text = "\n".join(str(part) for part in (message["content"], *map(message.get, CALLS)) if part)
        trained = loss_on == "all" or index in example["trained_messages"]
        lines.append(f"{message['role']}: ⟦{text}⟧" if trained else f"{message['role']}: {text}")
    return "\n".join(lines)


def _short(text: str, limit: int = _EXAMPLE) -> str:
    """The text without its middle, so that its start and its trained end are kept."""
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
