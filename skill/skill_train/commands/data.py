"""`data`: inspects a dataset: its format, the methods that can use it, its problems, and its usable rows."""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skill_train.commands._command import PATH, Whole, argument, command, option, set_options
from skill_train.commands._data_view import draw_data
from skill_train.commands._inspecting import inspected
from skill_train.commands._of_hub import require_on_hub, with_flags
from skill_train.core.console import Console, Result
from skill_train.core.digests import file_digest
from skill_train.core.errors import NotInstalled, SkillTrainError, Temporary, UsageError, refusals
from skill_train.data import problems, read_rows, token_stats, write_fixed
from skill_train.data.check_row import checker
from skill_train.data.errors import columns_alone, hint_for_all, no_row, open_quote, rewriting_command, wrong_columns
from skill_train.data.inspect import Inspection
from skill_train.data.inspect_report import ONLY_SFT, Counted, plain_example, report
from skill_train.data.problems import PERSONAL, RefusedRows
from skill_train.data.row_pictures import with_tags
from skill_train.data.scan import unread_media
from skill_train.data.unread import unread_text_warning
from skill_train.facts import DatasetFacts, ModelFacts
from skill_train.model.folder import read_model
from skill_train.model.tower import trains_on_pictures
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
    dataset: str | None = argument(required=False)
    recipe: Path | None = option(
        None, "Recipe with the mapping to use (format, columns), and its dataset without DATASET.", PATH
    )
    model: str | None = option(None, "Model whose tokenizer and chat template count the tokens: folder or Hub id.")
    method: str = option(
        "sft", "Method to check the dataset for; only sft can be trained here.", ("sft", "dpo", "kto", "grpo", "reward")
    )
    split: str | None = option(None, "Part of the dataset, such as train[:500].  [default: train]")
    max_length: int | None = option(None, "Longest row, in tokens.  [default: 1024]", Whole(min=2))
    fix: Path | None = option(
        None,
        "New .jsonl file for the usable rows, in the columns of their format or of --recipe. The dataset stays.",
        PATH,
    )


@command(
    DataOptions,
    "skill-train data tickets.jsonl",
    "skill-train data tickets.csv --model Qwen/Qwen2.5-0.5B-Instruct --fix tickets.fixed.jsonl",
)
def data(options: DataOptions, console: Console) -> Result:
    """Show the format of a dataset, the methods that can use it, and the rows that training would reject."""
    named = {"data": options.dataset} if options.dataset is not None else {}
    recipe = _recipe(options.recipe, named | set_options(options, ("model", "split", "max_length")))
    if options.fix is not None:
        write_fixed.check_out(options.fix)
    with refusals(), _hub_within_limits(recipe.data):
        return _answer(console, recipe, options)


def _hub_within_limits(name: str) -> AbstractContextManager[None]:
    if Path(name).exists() or not read_rows.is_id(name):
        return nullcontext()
    from skill_train.hub import dataset_library

    return dataset_library.within_limits(name)


def _answer(console: Console, recipe: Recipe, options: DataOptions) -> Result:
    fix = options.fix
    model = _base_model(recipe) if options.method == "sft" else _BaseModel()
    console.status(f"reading {recipe.data}")
    reads_pictures = model.images if recipe.model else None
    inspection = inspected(recipe, options.method, options.recipe, reads_pictures)
    counted = _tokens(console, inspection, model)
    answer = report(inspection, counted)
    _warn(console, inspection)
    if fix is None and inspection.method == "sft" and inspection.verdict.verdict == "needs_mapping":
        console.warn("needs_mapping", _UNMAPPED)
    if fix is not None and inspection.check is not None and counted.error is None:
        fixed = _fix(console, inspection, counted.counter, fix)
        answer = msgspec.structs.replace(answer, fix=fixed)
        console.status(f"{fix}: {fixed.rows} rows; {sum(fixed.left_out.values())} left out")
        if (lost := fixed.left_out.get("not_utf8")) and (keeps := rewriting_command(Path(recipe.data))):
            console.warn("not_utf8", f"{lost} rows left out are whole, in another encoding. To keep them: {keeps}")
        following, error = [_next_with_fixed(inspection, fix)], None
    else:
        error = counted.error or _refusal(inspection, counted)
        following = _next(inspection) if error is None else []
    return Result(
        msgspec.to_builtins(answer),
        human=lambda rich: draw_data(rich, answer),
        quiet=answer.fix.path if answer.fix else inspection.verdict.verdict,
        next=following,
        error=error,
    )


def _recipe(file: Path | None, flags: dict[str, object]) -> Recipe:
    """The recipe for reading the dataset. The model may be missing, because data can be inspected without one."""
    read = with_flags(fields.read(file) if file else {}, flags)
    values = {key: value for key, value in read.items() if value is not None}
    if "data" not in values:
        raise UsageError(
            "no dataset was given",
            code="bad_usage",
            expected="a file, a folder or a Hub id",
            hint="skill-train data --help",
        )
    checked = fields.from_dict({"model": "none", **values})
    require_on_hub(checked)
    return checked if "model" in values else dataclasses.replace(checked, model="")


@dataclass(frozen=True)
class _BaseModel:
    """The facts of the given model that are known before its tokenizer is read."""

    revision: str | None = None  # its commit; for a folder the revision in the recipe
    images: bool = False  # the model reads pictures, and pictures of its family can be trained
    context: int | None = None  # tokens that the model was made for
    error: SkillTrainError | None = None  # the error of the request to the Hub


def _base_model(recipe: Recipe) -> _BaseModel:
    """Asks the Hub within time limits first, because the requests for the tokenizer are repeated for a minute."""
    if not recipe.model:
        return _BaseModel()
    try:
        facts = _facts_of(recipe)
    except SkillTrainError as error:
        return _BaseModel(recipe.revision, error=None if Path(recipe.model).exists() else error)
    return _BaseModel(facts.revision or recipe.revision, trains_on_pictures(facts), facts.context)


def _facts_of(recipe: Recipe) -> ModelFacts:
    if Path(recipe.model).exists():
        return read_model(Path(recipe.model), weights_needed=False)
    from skill_train.hub import models

    return models.model_facts(recipe.model, recipe.revision)


def _tokens(console: Console, inspection: Inspection, model: _BaseModel) -> Counted:
    nothing: dict[str, RefusedRows | None] = {"truncated": None, "fully_masked": None, "template": None}
    plain = plain_example(inspection)
    if inspection.method != "sft" or inspection.detected is None or not inspection.survey.usable:
        why = "no row that sft could train on" if inspection.method == "sft" else "counted for sft alone"
        return Counted(nothing, plain, why_not=why)
    if not inspection.recipe.model:
        return Counted(nothing, plain, why_not="no --model: its tokenizer and template make the tokens")
    from skill_train.data import count_tokens

    console.status(f"counting tokens with the tokenizer of {inspection.recipe.model}")
    try:
        if model.error is not None:
            raise model.error
        inspection.recipe = dataclasses.replace(inspection.recipe, revision=model.revision)
        counter = count_tokens.Counter(
            inspection.recipe, inspection.detected, images=model.images and inspection.pictures is not None
        )
        inspection.detected = counter.detected
    except (NotInstalled, Temporary) as error:  # the rest of the report does not need the tokens
        console.warn(error.code, f"{error.message}; token counts are estimates, and the chat template was not tried")
        return Counted(nothing, plain, why_not=error.message)
    except UsageError as error:  # an error of the model, so the report of the dataset is still valid
        return Counted(nothing, plain, why_not=error.message, error=error)
    usable = problems.usable(inspection.recipe, checker(inspection.detected, inspection.pictures))
    total, longest_row = inspection.survey.usable, inspection.survey.longest_row
    try:
        lengths, refused, example = count_tokens.count_rows(counter, usable, total, longest_row)
    except UsageError as error:  # an error of the model and not of a row, so the report of the dataset is still valid
        return Counted(nothing, plain, why_not=error.message, error=error)
    for note in counter.notes:
        console.warn("template", note)
    if lengths is not None:
        _keep(inspection, lengths)
        if cut := token_stats.cut_away(token_stats.token_facts(lengths, inspection.recipe.max_length), model.context):
            console.warn("truncated", cut)
    why_not = "" if lengths else "the template refuses every row"
    return Counted({**refused}, example or plain, lengths, why_not, counter=counter, context=model.context)


def _keep(inspection: Inspection, lengths: token_stats.Lengths) -> None:
    recipe = inspection.recipe
    if not inspection.survey.refused and inspection.pictures is None:  # the key has nothing about resized pictures
        key = token_stats.tokenizer_key(recipe.model, recipe.revision)
        token_stats.keep(_dataset_facts(inspection), key, lengths, split=recipe.split, loss_on=recipe.loss_on)


def _dataset_facts(inspection: Inspection) -> DatasetFacts:
    path, survey = Path(inspection.recipe.data), inspection.survey
    assert inspection.detected is not None
    return DatasetFacts(
        source=inspection.recipe.data,
        fingerprint=file_digest(path)["sha256"] if path.is_file() else None,
        rows=survey.usable,
        column_names=tuple(survey.columns),
        format=inspection.detected.format,
        columns=inspection.detected.columns,
        bytes=path.stat().st_size if path.is_file() else None,
        reason=inspection.detected.reason,
        revision=inspection.recipe.data_revision,
        data_file=inspection.recipe.data_file,
        data_config=inspection.recipe.data_config,
    )


def _warn(console: Console, inspection: Inspection) -> None:
    if inspection.verdict.guessed:
        console.warn("guessed_mapping", inspection.verdict.because)
    named, detected = bool(inspection.recipe.columns), inspection.detected
    if inspection.unread and detected is not None:
        console.warn("unread_text", unread_text_warning(list(inspection.unread), detected.columns, named=named))
    for note in problems.told_notes(inspection.survey, named=bool(inspection.recipe.model)):
        console.warn("template", note)
    if detected is not None and (unread := unread_media(inspection.recipe, detected.columns)) is not None:
        console.warn("pictures", unread)
    pictures = inspection.pictures
    if pictures is not None and not inspection.recipe.model and (count := pictures.figures.pictures):
        console.warn("needs_vision_model", f"{count} pictures; needs a vision model")
    if inspection.method != "sft":
        console.warn("not_trained_here", ONLY_SFT)
    personal = inspection.survey.problems["personal_data"]
    if personal.rows:
        lines = ", ".join(map(str, personal.lines)) + (" …" if personal.rows > len(personal.lines) else "")
        seem, line, them = ("row seems", "line", "it") if personal.rows == 1 else ("rows seem", "lines", "them")
        console.warn(
            "personal_data",
            f"{personal.rows} {seem} to contain {PERSONAL} ({line} {lines}), which a tuned model can repeat. Remove "
            f"{them}, or set sensitive: true in a recipe, and nothing leaves this machine",
        )
    if (repeated := inspection.survey.problems.get("duplicate")) is not None and repeated.rows:
        console.warn(
            "duplicates",
            "1 row repeats an earlier row; it is trained again, and --fix drops it"
            if repeated.rows == 1
            else f"{repeated.rows} rows repeat an earlier row; they are trained again, and --fix drops them",
        )


def _fix(console: Console, inspection: Inspection, counter: Counter | None, out: Path) -> write_fixed.Fixed:
    check = inspection.check
    assert check is not None
    refuses = _refuses(inspection, counter) if counter is not None else None
    columns = inspection.verdict.columns
    console.status(f"writing {out}")
    names = [name for name in columns if name in COLUMNS.get(inspection.verdict.format or "", {})]
    ordered = {name: columns[name] for name in [*names, *columns]}
    written_names = columns if inspection.recipe.columns else {}  # keeps the names: the recipe also fits the new file

    def mapped(row: Row) -> Row:
        if inspection.pictures is None:
            return {written_names.get(name, name): row.get(column) for name, column in ordered.items()}
        renamed = with_tags(row, ordered, inspection.pictures.folder, out)
        return {written_names.get(name, name): value for name, value in renamed.items()}

    return write_fixed.write_fixed(inspection.recipe, check, refuses, mapped, out)


def _refuses(inspection: Inspection, counter: Counter) -> write_fixed.Refuses:
    """Refuses exactly the rows that training would reject, by encoding every row."""

    def refuses(line: int, row: Row) -> str | None:
        if (encoded := counter.encode(line, row)) is None:
            return "template"
        why = counter.refusal(encoded)
        return None if why == "fully_masked" and inspection.recipe.skip_untrained_rows else why

    return refuses


def _refusal(inspection: Inspection, counted: Counted) -> SkillTrainError | None:
    """The error that training would raise for this dataset; None if it would accept it."""
    if inspection.verdict.verdict == "impossible" and (inspection.row or not inspection.survey.refused):
        return _impossible(inspection)
    counts = inspection.survey.problems | {name: count for name, count in counted.problems.items() if count is not None}
    refused = {name: count for name, count in counts.items() if count.refused}
    if not refused:
        return None
    total = sum(count.refused for count in refused.values())
    name, first = min(refused.items(), key=lambda item: item[1].lines[0])
    of_file = "" if inspection.recipe.data_file is None else f" of {inspection.recipe.data_file}"
    where = first.why if first.why.startswith("line ") else f"line {first.lines[0]}{of_file}: {first.why}"
    return UsageError(
        f"training would reject {total} of {inspection.survey.rows} rows; the first: {where}",
        code="bad_row",
        expected="complete rows, each with something to train on",
        got=", ".join(f"{count.refused} {name}" for name, count in refused.items()),
        hint=_fix_hint(inspection, counted, f"mend line {first.lines[0]} ({name})"),
    )


def _fix_hint(inspection: Inspection, counted: Counted, otherwise: str) -> str:
    """The command that leaves out the rejected rows. If that is not possible or no row would remain, another hint."""
    masked, lengths = counted.problems["fully_masked"], counted.lengths
    if masked is not None and lengths is not None and masked.refused == len(lengths.counted):
        return token_stats.way_to_answers(lengths, inspection.recipe.max_length, counted.context)
    if inspection.survey.problems["not_utf8"].refused and (command := rewriting_command(Path(inspection.recipe.data))):
        return command
    if inspection.check is None:
        return otherwise if inspection.row else no_row(inspection.recipe.data_file or inspection.recipe.data)
    if (line := inspection.survey.open_quote) is not None:
        return open_quote(line)
    if inspection.survey.usable > counted.refused:
        return _fix_command(inspection)
    detected = inspection.detected if inspection.method == "sft" else None
    return hint_for_all(inspection.recipe, detected, inspection.pictures)


def _impossible(inspection: Inspection) -> UsageError:
    error = wrong_columns(inspection.recipe, inspection.row, "")
    error.message = f"{inspection.recipe.data} cannot be used for {inspection.method}: {inspection.verdict.because}"
    if why := inspection.survey.problems["not_utf8"].why:
        error.message += f"; {why}"
    others = [name for name, verdict in inspection.verdicts.items() if verdict.verdict != "impossible"]
    if inspection.method != "sft":
        error.expected = "the columns of that method, as references/datasets.md has them"
    if "sft" in others:
        error.hint = shlex.join(["skill-train", "data", inspection.recipe.data, "--method", "sft"])
    elif inspection.method == "sft" and inspection.detected is not None:  # the dataset also has a column of pictures
        error.hint = columns_alone(inspection.detected, inspection.row)
    elif others and (others != ["grpo"] or len(inspection.row) == 1):
        error.hint = f"another dataset; this one is for {', '.join(others)}, and {ONLY_SFT.partition(';')[0]}"
    return error


def _next(inspection: Inspection) -> list[str]:
    """The next command after a good answer: write the mapped file if needed, or else plan if a model was given."""
    if inspection.verdict.verdict == "needs_mapping":
        return [_fix_command(inspection)]
    file = [str(inspection.file)] if inspection.file else []
    if inspection.method != "sft" and inspection.verdicts["sft"].verdict != "impossible":
        named = ["--recipe", *file] if file else []
        return [shlex.join(["skill-train", "data", *named, inspection.recipe.data, *_flags(inspection.recipe)])]
    if inspection.method != "sft" or not inspection.recipe.model:
        return []
    return [shlex.join(["skill-train", "plan", *file, "--data", inspection.recipe.data, *_flags(inspection.recipe)])]


def _next_with_fixed(inspection: Inspection, fixed: Path) -> str:
    """The next command for the written file, which has one split. It uses the recipe file again, for its settings."""
    recipe = dataclasses.replace(inspection.recipe, split=Recipe.split)
    file = [str(inspection.file)] if inspection.file and recipe.data_file is None else []  # data_file is for the Hub
    flags = _flags(recipe) + (["--split", Recipe.split] if file and inspection.recipe.split != Recipe.split else [])
    if inspection.method != "sft" or not recipe.model:
        named = ["--recipe", *file] if file else []
        method = ["--method", inspection.method] if inspection.method != "sft" else []
        return shlex.join(["skill-train", "data", *named, str(fixed), *method, *flags])
    return shlex.join(["skill-train", "plan", *file, "--data", str(fixed), *flags])


def _fix_command(inspection: Inspection) -> str:
    words = ["skill-train", "data", inspection.recipe.data]
    words += ["--recipe", str(inspection.file)] if inspection.file else []
    words += ["--method", inspection.method] if inspection.method != "sft" else []
    return shlex.join([*words, *_flags(inspection.recipe), "--fix", read_rows.free_name(Path(inspection.recipe.data))])


def _flags(recipe: Recipe) -> list[str]:
    """The options that `data` and `plan` share, if they differ from the defaults."""
    flags = ["--model", recipe.model] if recipe.model else []
    flags += ["--split", recipe.split] if recipe.split != Recipe.split else []
    return flags + (["--max-length", str(recipe.max_length)] if recipe.max_length != Recipe.max_length else [])
