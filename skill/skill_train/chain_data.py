"""`data`: what a dataset is, which method can use it, what is wrong with it, and the rows that are usable."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skill_train import data_fix, survey, tables, tokens
from skill_train.console import Console, Result
from skill_train.data_report import ONLY_SFT, Counted, plain_example, report
from skill_train.data_subject import Subject, look
from skill_train.dataset import wrong_columns
from skill_train.errors import SkillTrainError, UsageError, from_exit_code
from skill_train.facts import DatasetFacts
from skill_train.formats import COLUMNS
from skill_train.recipe import Recipe
from skill_train.resources import train_module
from skill_train.row_check import checker
from skill_train.run_dir import file_digest
from skill_train.survey import Count


def data(
    console: Console,
    *,
    dataset: str | None,
    recipe: Path | None,
    model: str | None,
    method: str,
    split: str | None,
    max_length: int | None,
    fix: Path | None,
) -> Result:
    """Looks, counts, says what training would do, and writes the usable rows when asked to."""
    values = {"data": dataset, "model": model, "split": split, "max_length": max_length}
    asked = _recipe(recipe, {key: value for key, value in values.items() if value is not None})
    if fix is not None:
        data_fix.check_out(fix)
    try:
        return _answer(console, asked, method, recipe, fix)
    except train_module().Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None


def _answer(console: Console, asked: Recipe, method: str, file: Path | None, fix: Path | None) -> Result:
    console.status(f"reading {asked.data}")
    subject = look(asked, method, file)
    counted = _tokens(console, subject)
    answer = report(subject, counted)
    _warn(console, subject)
    if fix is not None and subject.check is not None:
        answer["fix"] = _fix(console, subject, fix)
        left_out = sum(answer["fix"]["left_out"].values())
        console.status(f"{fix}: {answer['fix']['rows']} rows; {left_out} left out")
        following, error = [_after(asked, fix)], None
    else:
        error = _refusal(subject, counted.problems)
        following = _next(subject) if error is None else []
    return Result(
        answer,
        human=lambda rich: tables.draw_data(rich, answer),
        quiet=answer["fix"]["path"] if "fix" in answer else subject.verdict.verdict,
        next=following,
        error=error,
    )


def _recipe(file: Path | None, flags: dict[str, Any]) -> Recipe:
    """The recipe's view of the dataset. Without a model, because data can be looked at alone."""
    from skill_train import recipe as recipes

    loaded = asdict(recipes.load(file)) if file is not None else {}
    values = {key: value for key, value in loaded.items() if value is not None} | flags
    if "data" not in values:
        raise UsageError(
            "data needs a dataset",
            code="bad_usage",
            expected="a file, a folder or a Hub id",
            hint="skill-train data --help",
        )
    checked = recipes.from_dict({"model": "none", **values})
    return dataclasses.replace(checked, model=values.get("model", ""))


def _tokens(console: Console, subject: Subject) -> Counted:
    nothing: dict[str, Count | None] = {"truncated": None, "fully_masked": None, "template": None}
    plain = plain_example(subject)
    if subject.method != "sft" or subject.found is None or not subject.seen.usable:
        return Counted(nothing, plain, why_not="no row that sft could train on")
    if not subject.recipe.model:
        return Counted(nothing, plain, why_not="no --model: its tokenizer and template make the tokens")
    from skill_train import token_count

    console.status(f"counting tokens with the tokenizer of {subject.recipe.model}")
    counter = token_count.Counter(subject.recipe, subject.found)
    rows = survey.usable(subject.recipe, checker(subject.found))
    lengths, problems, example = token_count.count_rows(counter, rows, subject.seen.usable, subject.seen.longest_row)
    for note in counter.notes:
        console.warn("template", note)
    if lengths is not None:
        _keep(subject, lengths)
    return Counted({**problems}, example or plain, lengths, "" if lengths else "the template refuses every row")


def _keep(subject: Subject, lengths: tokens.Lengths) -> None:
    recipe = subject.recipe
    if not subject.seen.refused:
        key = tokens.tokenizer_key(recipe.model, recipe.revision)
        tokens.keep(_facts(subject), key, lengths, split=recipe.split, loss_on=recipe.loss_on)


def _facts(subject: Subject) -> DatasetFacts:
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


def _warn(console: Console, subject: Subject) -> None:
    if subject.verdict.guessed:
        console.warn("guessed_mapping", subject.verdict.because)
    if subject.seen.at_least:
        console.warn("many_repeats", "more different rows repeat than are counted: duplicate is a lower bound")
    if subject.method != "sft":
        console.warn("not_trained_here", ONLY_SFT)


def _fix(console: Console, subject: Subject, out: Path) -> dict[str, Any]:
    check = subject.check
    assert check is not None
    refuses = _refuses(subject) if subject.method == "sft" and subject.recipe.model else None
    columns = subject.verdict.columns
    console.status(f"writing {out}")
    names = [name for name in columns if name in COLUMNS.get(subject.verdict.format or "", {})]
    ordered = {name: columns[name] for name in [*names, *columns]}
    return data_fix.write_fixed(subject.recipe, ordered, check, refuses, out)


def _refuses(subject: Subject) -> data_fix.Refuses:
    """Every row through the tokenizer: what is left out must be what training would refuse."""
    from skill_train import token_count

    assert subject.found is not None
    counter = token_count.Counter(subject.recipe, subject.found)

    def refuses(line: int, row: dict[str, Any]) -> str | None:
        encoded = counter.encode(line, row)
        if encoded is None:
            return "template"
        return None if counter.trained(encoded) or subject.recipe.skip_untrained_rows else "fully_masked"

    return refuses


def _refusal(subject: Subject, counted: dict[str, Count | None]) -> SkillTrainError | None:
    """What training would end with, when it would."""
    asked = subject.recipe
    if subject.verdict.verdict == "impossible" and subject.row:
        error = wrong_columns(asked, subject.row, subject.verdict.because)
        error.message = f"{asked.data} cannot be used for {subject.method}: {subject.verdict.because}"
        return error
    problems = subject.seen.problems | {name: count for name, count in counted.items() if count is not None}
    refused = {name: count for name, count in problems.items() if count.refused}
    if not refused:
        return None
    total = sum(count.refused for count in refused.values())
    name, first = min(refused.items(), key=lambda item: item[1].lines[0])
    mends = subject.check is not None and subject.seen.usable > 0
    where = first.why if first.why.startswith("line ") else f"line {first.lines[0]}: {first.why}"
    return UsageError(
        f"training would refuse {total} of {subject.seen.rows} rows; first {where}",
        code="unusable_rows",
        expected="every row whole, with something to train on",
        got=", ".join(f"{count.refused} {name}" for name, count in refused.items()),
        hint=_fix_command(subject) if mends else f"mend line {first.lines[0]} ({name})",
    )


def _next(subject: Subject) -> list[str]:
    """After a good answer: the mapped file when one is needed, else the training where the model is known."""
    if subject.verdict.verdict == "needs_mapping":
        return [_fix_command(subject)]
    if subject.method != "sft" or not subject.recipe.model:
        return []
    return [_train_command(subject.recipe, subject.recipe.data)]


def _after(asked: Recipe, fixed: Path) -> str:
    return _train_command(asked, str(fixed)) if asked.model else shlex.join(["skill-train", "data", str(fixed)])


def _train_command(asked: Recipe, dataset: str) -> str:
    limit = [] if asked.max_length == Recipe.max_length else ["--max-length", str(asked.max_length)]
    return shlex.join(["skill-train", "local", "--model", asked.model, "--data", dataset, *limit])


def _fix_command(subject: Subject) -> str:
    asked, path = subject.recipe, Path(subject.recipe.data)
    words = ["skill-train", "data", asked.data]
    words += ["--recipe", str(subject.file)] if subject.file else []
    words += ["--model", asked.model] if asked.model else []
    words += ["--method", subject.method] if subject.method != "sft" else []
    words += ["--split", asked.split] if asked.split != Recipe.split else []
    words += ["--max-length", str(asked.max_length)] if asked.max_length != Recipe.max_length else []
    return shlex.join([*words, "--fix", _free_name(path)])


def _free_name(path: Path) -> str:
    """A name beside the dataset that is not taken."""
    beside = path.with_name(path.stem if path.exists() else path.name)
    names = (beside.with_name(f"{beside.name}.fixed{n}.jsonl") for n in ["", *(f"-{i}" for i in range(2, 1000))])
    return str(next(name for name in names if not name.exists()))
