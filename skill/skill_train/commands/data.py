"""`data`: inspects a dataset: its format, the methods that can use it, its problems, and its usable rows."""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from skill_train.commands._data_view import draw_data
from skill_train.commands._frame import command
from skill_train.commands._inspecting import inspected
from skill_train.commands._options import PATH, set_options
from skill_train.core.console import Console, Result
from skill_train.core.digests import file_digest
from skill_train.core.errors import NotInstalled, SkillTrainError, Temporary, UsageError, from_exit_code
from skill_train.data import problems, read_rows, token_stats, write_fixed
from skill_train.data.check_row import checker
from skill_train.data.errors import rewriting_command, wrong_columns
from skill_train.data.inspect import Inspection
from skill_train.data.inspect_report import ONLY_SFT, Counted, plain_example, report
from skill_train.data.problems import PERSONAL, RefusedRows
from skill_train.data.row_pictures import with_tags
from skill_train.data.scan import unread_media, unread_text_told
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.model.folder import read_model
from skill_train.model.tower import trains_on_pictures
from skill_train.program.events import Refused
from skill_train.program.examples import Row
from skill_train.recipe import fields
from skill_train.recipe.fields import Recipe
from skill_train.recipe.formats import COLUMNS

if TYPE_CHECKING:
    from skill_train.data.count_tokens import Counter

_UNMAPPED = (
    "plan and local refuse these columns as they are: put the recipe lines of methods.sft into a recipe, or write a "
    "mapped copy with --fix"
)


@dataclass(frozen=True)
class DataOptions:
    dataset: str | None = None
    recipe: Path | None = None
    model: str | None = None
    method: str = "sft"
    split: str | None = None
    max_length: int | None = None
    fix: Path | None = None


@command(
    "data",
    DataOptions,
    examples=(
        "skill-train data tickets.jsonl",
        "skill-train data tickets.csv --model Qwen/Qwen2.5-0.5B-Instruct --fix tickets.fixed.jsonl",
    ),
)
@click.argument("dataset", required=False)
@click.option("--recipe", type=PATH, help="Recipe with the mapping to use (format, columns); replaces DATASET.")
@click.option("--model", help="Model whose tokenizer and chat template count the tokens: folder or Hub id.")
@click.option(
    "--method",
    type=click.Choice(("sft", "dpo", "kto", "grpo", "reward")),
    default="sft",
    show_default=True,
    help="Method to check the dataset for; only sft can be trained here.",
)
@click.option("--split", help="Part of the dataset, such as train[:500].  [default: train]")
@click.option("--max-length", type=click.IntRange(min=2), help="Longest row, in tokens.  [default: 1024]")
@click.option("--fix", type=PATH, help="New .jsonl file for the usable rows, mapped. The dataset is not changed.")
def data(options: DataOptions, console: Console) -> Result:
    """Show the format of a dataset, the methods that can use it, and the rows that training would reject."""
    named = {"data": options.dataset} if options.dataset is not None else {}
    asked = _recipe(options.recipe, named | set_options(options, ("model", "split", "max_length")))
    if options.fix is not None:
        write_fixed.check_out(options.fix)
    try:
        with _hub_within_limits(asked.data):
            return _answer(console, asked, options)
    except Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None


def _hub_within_limits(name: str) -> AbstractContextManager[None]:
    if Path(name).exists() or not read_rows.is_id(name):
        return nullcontext()
    from skill_train.hub import dataset_library

    return dataset_library.within_limits(name)


def _answer(console: Console, asked: Recipe, options: DataOptions) -> Result:
    fix = options.fix
    model = _base_model(asked) if options.method == "sft" else _BaseModel()
    console.status(f"reading {asked.data}")
    reads_pictures = model.images if asked.model else None
    subject = inspected(asked, options.method, options.recipe, reads_pictures)
    counted = _tokens(console, subject, model)
    answer = report(subject, counted)
    _warn(console, subject)
    if fix is None and subject.method == "sft" and subject.verdict.verdict == "needs_mapping":
        console.warn("needs_mapping", _UNMAPPED)
    if fix is not None and subject.check is not None and counted.error is None:
        fixed = _fix(console, subject, counted.counter, fix)
        answer = msgspec.structs.replace(answer, fix=fixed)
        console.status(f"{fix}: {fixed.rows} rows; {sum(fixed.left_out.values())} left out")
        following, error = [_after(subject, fix)], None
    else:
        error = counted.error or _refusal(subject, counted)
        following = _next(subject) if error is None else []
    return Result(
        msgspec.to_builtins(answer),
        human=lambda rich: draw_data(rich, answer),
        quiet=answer.fix.path if answer.fix else subject.verdict.verdict,
        next=following,
        error=error,
    )


def _recipe(file: Path | None, flags: dict[str, object]) -> Recipe:
    """The recipe for reading the dataset. The model may be missing, because data can be inspected alone."""
    loaded = asdict(fields.load(file)) if file is not None else {}
    values = {key: value for key, value in loaded.items() if value is not None} | flags
    if "data" not in values:
        raise UsageError(
            "no dataset was given",
            code="bad_usage",
            expected="a file, a folder or a Hub id",
            hint="skill-train data --help",
        )
    checked = fields.from_dict({"model": "none", **values})
    return dataclasses.replace(checked, model=values.get("model", ""))


@dataclass(frozen=True)
class _BaseModel:
    """The model that was named, as far as it is known before its tokenizer is read.

    Attributes:
        revision: its commit; of a folder what the recipe says.
        images: it reads pictures, and is of a family whose pictures can be trained.
        error: why the Hub did not answer.
    """

    revision: str | None = None
    images: bool = False
    error: SkillTrainError | None = None


def _base_model(asked: Recipe) -> _BaseModel:
    """Asked of the Hub within time limits, because the tokenizer's own requests are repeated for a minute."""
    if not asked.model:
        return _BaseModel()
    try:
        about = _facts_of(asked)
    except SkillTrainError as error:
        return _BaseModel(asked.revision, error=None if Path(asked.model).exists() else error)
    return _BaseModel(about.revision or asked.revision, trains_on_pictures(about))


def _facts_of(asked: Recipe) -> ModelFacts:
    if Path(asked.model).exists():
        return read_model(Path(asked.model), weights_needed=False)
    from skill_train.hub import models

    return models.model_facts(asked.model, asked.revision)


def _tokens(console: Console, subject: Inspection, model: _BaseModel) -> Counted:
    nothing: dict[str, RefusedRows | None] = {"truncated": None, "fully_masked": None, "template": None}
    plain = plain_example(subject)
    if subject.method != "sft" or subject.found is None or not subject.seen.usable:
        return Counted(nothing, plain, why_not="no row that sft could train on")
    if not subject.recipe.model:
        return Counted(nothing, plain, why_not="no --model: its tokenizer and template make the tokens")
    from skill_train.data import count_tokens

    console.status(f"counting tokens with the tokenizer of {subject.recipe.model}")
    try:
        if model.error is not None:
            raise model.error
        subject.recipe = dataclasses.replace(subject.recipe, revision=model.revision)
        counter = count_tokens.Counter(
            subject.recipe, subject.found, images=model.images and subject.pictures is not None
        )
        subject.found = counter.found
    except (NotInstalled, Temporary) as error:  # what the dataset is does not depend on it
        console.warn(error.code, f"{error.message}; token counts are estimates, and the chat template was not tried")
        return Counted(nothing, plain, why_not=error.message)
    except UsageError as error:  # the model's fault: the report of the dataset stands
        return Counted(nothing, plain, why_not=error.message, error=error)
    usable = problems.usable(subject.recipe, checker(subject.found, subject.pictures))
    total, longest_row = subject.seen.usable, subject.seen.longest_row
    try:
        lengths, refused, example = count_tokens.count_rows(counter, usable, total, longest_row)
    except UsageError as error:  # the model's fault, not a row's: the report of the dataset stands
        return Counted(nothing, plain, why_not=error.message, error=error)
    for note in counter.notes:
        console.warn("template", note)
    if lengths is not None:
        _keep(subject, lengths)
    why_not = "" if lengths else "the template refuses every row"
    return Counted({**refused}, example or plain, lengths, why_not, counter=counter)


def _keep(subject: Inspection, lengths: token_stats.Lengths) -> None:
    recipe = subject.recipe
    if not subject.seen.refused and subject.pictures is None:  # the key does not tell how pictures are resized
        key = token_stats.tokenizer_key(recipe.model, recipe.revision)
        token_stats.keep(_facts(subject), key, lengths, split=recipe.split, loss_on=recipe.loss_on)


def _facts(subject: Inspection) -> DatasetFacts:
    path, seen = Path(subject.recipe.data), subject.seen
    assert subject.found is not None
    return DatasetFacts(
        source=subject.recipe.data,
        fingerprint=file_digest(path)["sha256"] if path.is_file() else None,
        rows=seen.usable,
        column_names=tuple(seen.columns),
        format=subject.found.format,
        columns=subject.found.columns,
        bytes=path.stat().st_size if path.is_file() else None,
        reason=subject.found.reason,
        revision=subject.recipe.data_revision,
    )


def _warn(console: Console, subject: Inspection) -> None:
    if subject.verdict.guessed:
        console.warn("guessed_mapping", subject.verdict.because)
    if subject.unread and subject.found is not None:
        console.warn("unread_text", unread_text_told(list(subject.unread), subject.found.columns))
    if subject.found is not None and (unread := unread_media(subject.recipe, subject.found.columns)) is not None:
        console.warn("pictures", unread)
    if subject.pictures is not None and not subject.recipe.model and (count := subject.pictures.figures.pictures):
        console.warn("needs_vision_model", f"{count} pictures; needs a vision model")
    if subject.method != "sft":
        console.warn("not_trained_here", ONLY_SFT)
    personal = subject.seen.problems["personal_data"]
    if personal.rows:
        lines = ", ".join(map(str, personal.lines)) + (" …" if personal.rows > len(personal.lines) else "")
        seem, line, them = ("row seems", "line", "it") if personal.rows == 1 else ("rows seem", "lines", "them")
        console.warn(
            "personal_data",
            f"{personal.rows} {seem} to contain {PERSONAL} ({line} {lines}), which a tuned model can repeat. Remove "
            f"{them}, or set sensitive: true in a recipe, and nothing leaves this machine",
        )
    repeated = subject.seen.problems.get("duplicate")
    if repeated is not None and repeated.rows:
        console.warn(
            "duplicates",
            "1 row repeats an earlier row; it is trained again, and --fix drops it"
            if repeated.rows == 1
            else f"{repeated.rows} rows repeat an earlier row; they are trained again, and --fix drops them",
        )


def _fix(console: Console, subject: Inspection, counter: Counter | None, out: Path) -> write_fixed.Fixed:
    check = subject.check
    assert check is not None
    refuses = _refuses(subject, counter) if counter is not None else None
    columns = subject.verdict.columns
    console.status(f"writing {out}")
    names = [name for name in columns if name in COLUMNS.get(subject.verdict.format or "", {})]
    ordered = {name: columns[name] for name in [*names, *columns]}

    def mapped(row: Row) -> Row:
        if subject.pictures is not None:
            return with_tags(row, ordered, subject.pictures.folder, out)
        return {wanted: row.get(column) for wanted, column in ordered.items()}

    return write_fixed.write_fixed(subject.recipe, check, refuses, mapped, out)


def _refuses(subject: Inspection, counter: Counter) -> write_fixed.Refuses:
    """Encodes every row: exactly the rows that training would reject are left out."""

    def refuses(line: int, row: Row) -> str | None:
        encoded = counter.encode(line, row)
        if encoded is None:
            return "template"
        why = counter.refusal(encoded)
        return None if why == "fully_masked" and subject.recipe.skip_untrained_rows else why

    return refuses


def _refusal(subject: Inspection, counted: Counted) -> SkillTrainError | None:
    """The error with which training would end; None if it would not."""
    if subject.verdict.verdict == "impossible" and (subject.row or not subject.seen.refused):
        return _impossible(subject)

    counts = subject.seen.problems | {name: count for name, count in counted.problems.items() if count is not None}
    refused = {name: count for name, count in counts.items() if count.refused}
    if not refused:
        return None
    total = sum(count.refused for count in refused.values())
    name, first = min(refused.items(), key=lambda item: item[1].lines[0])
    of_file = "" if subject.recipe.data_file is None else f" of {subject.recipe.data_file}"
    where = first.why if first.why.startswith("line ") else f"line {first.lines[0]}{of_file}: {first.why}"
    return UsageError(
        f"training would reject {total} of {subject.seen.rows} rows; the first: {where}",
        code="bad_row",
        expected="complete rows, each with something to train on",
        got=", ".join(f"{count.refused} {name}" for name, count in refused.items()),
        hint=_mend(subject, counted, f"mend line {first.lines[0]} ({name})"),
    )


def _mend(subject: Inspection, counted: Counted, otherwise: str) -> str:
    """The command that leaves out the rejected rows, unless no row would remain."""
    masked, lengths = counted.problems["fully_masked"], counted.lengths
    if masked is not None and lengths is not None and masked.refused == len(lengths.counted):
        return f"raise --max-length: the longest row has {lengths.longest} tokens"
    if subject.seen.problems["not_utf8"].refused and (command := rewriting_command(Path(subject.recipe.data))):
        return command
    return _fix_command(subject) if subject.check is not None and subject.seen.usable else otherwise


def _impossible(subject: Inspection) -> UsageError:
    error = wrong_columns(subject.recipe, subject.row, "")
    error.message = f"{subject.recipe.data} cannot be used for {subject.method}: {subject.verdict.because}"
    others = [name for name, verdict in subject.verdicts.items() if verdict.verdict != "impossible"]
    if subject.method != "sft":
        error.expected = "the columns of that method, as references/datasets.md has them"
    if "sft" in others:
        error.hint = shlex.join(["skill-train", "data", subject.recipe.data, "--method", "sft"])
    elif others:
        error.hint = f"another dataset; this one is for {', '.join(others)}, and {ONLY_SFT.partition(';')[0]}"
    return error


def _next(subject: Inspection) -> list[str]:
    """The next command after a good answer: write the mapped file if needed, or else plan if the model is known."""
    if subject.verdict.verdict == "needs_mapping":
        return [_fix_command(subject)]
    if subject.method != "sft" or not subject.recipe.model:
        return []
    file = [str(subject.file)] if subject.file else []
    return [shlex.join(["skill-train", "plan", *file, "--data", subject.recipe.data, *_flags(subject.recipe)])]


def _after(subject: Inspection, fixed: Path) -> str:
    """The next command for the written file, which is mapped and has one split."""
    asked = dataclasses.replace(subject.recipe, split=Recipe.split)
    if subject.method != "sft" or not asked.model:
        method = ["--method", subject.method] if subject.method != "sft" else []
        return shlex.join(["skill-train", "data", str(fixed), *method, *_flags(asked)])
    return shlex.join(["skill-train", "plan", "--data", str(fixed), *_flags(asked)])


def _fix_command(subject: Inspection) -> str:
    words = ["skill-train", "data", subject.recipe.data]
    words += ["--recipe", str(subject.file)] if subject.file else []
    words += ["--method", subject.method] if subject.method != "sft" else []
    return shlex.join([*words, *_flags(subject.recipe), "--fix", read_rows.free_name(Path(subject.recipe.data))])


def _flags(asked: Recipe) -> list[str]:
    """The options that `data` and `plan` share, if they differ from the defaults."""
    flags = ["--model", asked.model] if asked.model else []
    flags += ["--split", asked.split] if asked.split != Recipe.split else []
    return flags + (["--max-length", str(asked.max_length)] if asked.max_length != Recipe.max_length else [])
