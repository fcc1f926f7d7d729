"""`evaluate`: measures the base, the tuned model and the GGUF files of a run on its held-out rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from skill_train.commands._base_model import base_of
from skill_train.commands._chosen_model import Chosen, doubt_of_training, with_pictures
from skill_train.commands._command import MOST_COUNTED, PATH, Whole, argument, command, option
from skill_train.commands._drawing import figure, rich_table
from skill_train.commands._ended_training import warn_of_base_rows, warn_of_file_rows, warn_of_seen
from skill_train.core.console import Console, Result
from skill_train.core.digests import digests
from skill_train.core.errors import UsageError, quoted
from skill_train.evaluate.backends import Model
from skill_train.evaluate.pictures import RunPictures, pictures_of_run
from skill_train.evaluate.scores import Scoring, scoring_of
from skill_train.run import evaluate_record, export_record, merge_record, plan_record
from skill_train.run.earlier_start import require_rows, trained
from skill_train.run.evaluate_record import AnsweredRow, Evaluation, FigureDifference, ModelFigures, telling
from skill_train.run.folder import RunDir, StepResult, open_run, require_only, require_unchanged
from skill_train.run.lock import locked
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import Row, read_rows

ROWS = 100
_SHOWN, _SHOWN_CHARACTERS = 2, 800  # rows side by side in the answer, and characters of a row; the record has all
_DIGITS = 6
_NAMED = 5  # lines of rows in a warning
_OF_A_ROW = ("line", "prompt", "expected", "answers")  # of an answered row, in the answer
_Figures = TypeVar("_Figures", ModelFigures, FigureDifference)


@dataclass(frozen=True)
class EvaluateOptions:
    run: Path = argument(PATH)
    gguf: tuple[Path, ...] = option((), "GGUF file; repeat for more.  [default: all in RUN/gguf]", PATH)
    rows: int = option(ROWS, "Maximum number of held-out rows, spread evenly over the file.", Whole(1, MOST_COUNTED))
    score: str | None = option(
        None,
        "Score to add to exact match: equal matches of --pattern, or valid JSON.  [default: the recipe's]",
        ("exact", "regex", "json"),
    )
    pattern: str | None = option(
        None, "Regular expression for --score regex; compares its first group, or the whole match."
    )
    scorer: Path | None = option(
        None, "Your own score: a Python file with score(prompt, answer, expected) -> float.", PATH
    )
    backend: str = option(
        "auto",
        "Backend for model folders; auto uses vllm if it is installed and there is a CUDA GPU.",
        ("auto", "transformers", "vllm"),
    )


@command(
    EvaluateOptions,
    "skill-train evaluate runs/first",
    "skill-train evaluate runs/first --rows 50 --scorer my_scorer.py",
)
def evaluate(options: EvaluateOptions, console: Console) -> Result:
    """Measure the base model, the tuned model and GGUF files on held-out rows, with confidence intervals.

    The rows are those that RUN held out: rows of your own cannot be given.
    """
    opened = open_run(options.run)
    plan = plan_record.read(opened.plan)
    scoring = scoring_of(plan.policy, options.score, options.pattern, options.scorer)
    result = evaluate_run(options, console, scoring)
    shown = _shown(result.record)
    quiet = next((f"{model.loss:.4g}" for model in result.record.models if model.name == "tuned" and model.loss), "")
    return Result(
        _data(opened, shown, reused=result.reused),
        human=lambda rich: draw_evaluation(rich, shown),
        quiet=quiet,
        next=_next(opened, options.run, plan),
    )


def _next(opened: RunDir, run: Path, plan: Plan) -> list[str]:
    """The next commands: the missing step of the run, the report, and push if the recipe names a repository."""
    step = "export-gguf" if not opened.ggufs else "verify" if not opened.record("verify").is_file() else None
    steps = [step, "report"] if step else ["report"]
    to_hub = plan.policy.hub_model_id and not plan.policy.sensitive
    pushed = [f"skill-train push {quoted(run)} --dry-run"] if to_hub else []
    return [f"skill-train {word} {quoted(run)}" for word in steps] + pushed


def evaluate_run(options: EvaluateOptions, console: Console, scoring: Scoring) -> StepResult[Evaluation]:
    from skill_train.evaluate import step

    run = RunDir(options.run)
    with locked(run, "evaluate"):
        training = trained(run)
        rows = read_rows(run.held_out)
        require_rows(rows, run.path, training.data.held_out_rows)
        warn_of_seen(console, training.data)
        warn_of_base_rows(console, run)
        base, recipe = base_of(run), plan_record.read(run.plan).recipe
        tuned = tuned_of(run, base)
        pictures = pictures_of(rows, run, base)
        files = [
            replace(model, perhaps_trained=warn_of_file_rows(console, run, model.path))
            for model in _files(list(options.gguf) or run.ggufs)
        ]
        named = [Model("base", base), tuned, *files]
        models = [with_pictures(model, run, pictures) for model in named]
        _require_exported(run, models)
        own = {path.resolve() for path in (run.merged, *run.ggufs)}
        for doubt in (doubt_of_training(Chosen(run.path, model)) for model in models if model.path.resolve() in own):
            if doubt:
                console.warn("other_adapter", doubt)
        if tuned.adapter is not None and run.merged.is_dir():
            console.warn(
                "other_adapter",
                f"no record shows that {run.merged} was made from the current adapter, so base and adapter are "
                "measured; `verify` shows whether the GGUF files were",
            )
        earlier = _earlier(run.record("evaluate"))
        with console.progress("evaluating") as progress:
            result = step.evaluate(
                step.EvaluateRequest(
                    models=models,
                    rows=rows,
                    loss_on=recipe.loss_on,
                    most_rows=options.rows,
                    tokenizer_of=base,
                    scoring=scoring,
                    backend=options.backend,
                    record=run.record("evaluate"),
                ),
                progress=progress,
                warn=console.warn,
            )
        if warning := step.blind(result.record.models, base):
            console.warn("blind", warning)
        _warn_of_unscored(console, result.record)
        if earlier is not None:
            _warn_of_replaced(console, earlier, result.record)
        return result


def _earlier(record: Path) -> Evaluation | None:
    """The measurement that a new one would replace; None without one that can be read."""
    try:
        return evaluate_record.read(record) if record.is_file() else None
    except UsageError:
        return None


def _warn_of_replaced(console: Console, earlier: Evaluation, now: Evaluation) -> None:
    """Warns if fewer rows or models were measured than before: the report shows the last measurement alone."""
    names = {model.name for model in now.models}
    lost = [model.name for model in earlier.models if model.name not in names]
    if lost or now.rows < earlier.rows:
        of = f" of {', '.join(lost)}" if lost else ""
        console.warn(
            "replaced",
            f"{now.rows} rows replace a measurement on {earlier.rows} rows{of}; `report` and `push` show the new one: "
            "repeat the earlier command before them",
        )


def _warn_of_unscored(console: Console, evaluation: Evaluation) -> None:
    """Warns of rows whose expected answer has no match of the pattern, or is not JSON."""
    asked = [row for row in evaluation.answers if row.scores]
    lines = [str(row.line) for row in asked if set(row.scores.values()) == {None}]
    pattern = evaluation.options.pattern
    why = f"{pattern!r} finds nothing in" if pattern else "there is no JSON in"
    if lines and len(lines) == len(asked):
        console.warn("no_score", f"no row could be scored: {why} any expected answer")
    elif lines:
        few = ", ".join(lines[:_NAMED]) + (" …" if lines[_NAMED:] else "")
        count = f"{len(lines)} of {len(asked)} rows were not scored"
        console.warn("no_score", f"{count}: {why} the expected answer of line {few}")


def pictures_of(rows: list[Row], run: RunDir, base: Path) -> RunPictures | None:
    """The settings for reading the pictures of held-out rows; None if they have none."""
    return pictures_of_run(run, base) if any(row.get("images") for row in rows) else None


def _require_exported(run: RunDir, models: list[Model]) -> None:
    """Refuses a file that was replaced since its export or merge: its figures would be those of another file."""
    asked = {path.resolve() for model in models for path in (model.path, model.projector) if path is not None}
    record = run.record("merge")
    if run.merged.resolve() in asked and record.is_file():
        hint = f"move {quoted(record)} and {quoted(run.merged)} away, then skill-train merge {quoted(run.path)}"
        merged = merge_record.read(record).outputs
        for name, digest in merged.items():
            require_unchanged(run.path / name, digest, record, hint)
        require_only(run.merged, map(run.path.joinpath, merged), record)
    for record in map(run.record, ("convert", "quantize", "mmproj")):
        outputs = export_record.read(record).outputs if record.is_file() else {}
        for name, digest in outputs.items():
            if (file := run.path / name).resolve() in asked:
                again = f"skill-train export-gguf {quoted(run.path)}"
                again += export_record.quant_option(digest["quant"]) if record.stem != "mmproj" else ""
                require_unchanged(file, digest, record, f"move {quoted(file)} away and make it again: {again}")


def tuned_of(run: RunDir, base: Path) -> Model:
    """The tuned model: fully trained, or merged from the current adapter, or else the base with the adapter on top."""
    if run.is_full:
        return Model("tuned", run.merged)
    if (run.merged / "config.json").is_file() and _is_merged(run):
        return Model("tuned", run.merged, merged=run.adapter)
    return Model("tuned", base, run.adapter)


def _is_merged(run: RunDir) -> bool:
    """Whether the merged model has the current adapter: another one may have been trained in the folder since."""
    record = run.record("merge")
    read = merge_record.read(record).inputs.adapter if record.is_file() else {}
    files = [run.adapter / name for name in read]
    return bool(read) and all(file.is_file() for file in files) and digests(run.adapter, files) == read


def _files(paths: list[Path]) -> list[Model]:
    """GGUF files by their names, or by their whole paths if two have the same name."""
    names = [path.name for path in paths]
    models = [Model(path.name if names.count(path.name) == 1 else str(path), path) for path in paths]
    for model in models:
        if not model.path.is_file() or not model.is_gguf:
            raise UsageError(
                f"{model.path} is not a GGUF file" if model.path.exists() else f"{model.path} does not exist",
                code="missing_file",
                expected="a file that ends in .gguf",
                got=str(model.path),
                hint="skill-train export-gguf RUN",
            )
    return models


def _shown(evaluation: Evaluation) -> Evaluation:
    """The part of the record that is shown: figures with six digits, and the beginnings of a few answers."""
    return msgspec.structs.replace(
        evaluation,
        models=[_rounded(model) for model in evaluation.models],
        differences=[_rounded(difference) for difference in evaluation.differences],
        answers=[_beginning(row) for row in telling(evaluation.answers, _SHOWN)],
    )


def _rounded(record: _Figures) -> _Figures:
    floats = {key: value for key, value in msgspec.structs.asdict(record).items() if isinstance(value, float)}
    return msgspec.structs.replace(record, **{key: float(f"{value:.{_DIGITS}g}") for key, value in floats.items()})


def _beginning(row: AnsweredRow) -> AnsweredRow:
    from skill_train.evaluate.step import end_of

    most = _SHOWN_CHARACTERS // (2 + len(row.answers))
    answers = {name: text[:most] for name, text in row.answers.items()}
    return msgspec.structs.replace(row, prompt=end_of(row.prompt, most), expected=row.expected[:most], answers=answers)


def _data(run: RunDir, shown: Evaluation, *, reused: bool) -> dict[str, object]:
    """The answer, in at most 8 KB. It has `score` and `scored_rows` only if a second score was requested."""
    left_out = {"why", "asked_rows", *(() if shown.score else ("score", "scored_rows"))}
    models = [msgspec.structs.asdict(model) for model in shown.models]
    return {
        "run_dir": str(run.path),
        "rows": shown.rows,
        "asked": shown.asked,
        "answer_tokens": shown.answer_tokens,
        "score": shown.score,
        "models": [{key: model[key] for key in model if key not in left_out} for model in models],
        "differences": msgspec.to_builtins(shown.differences),
        "answers": [{key: getattr(row, key) for key in _OF_A_ROW} for row in shown.answers],
        "record": str(run.record("evaluate")),
        "reused": reused,
    }


def draw_evaluation(rich: Any, shown: Evaluation) -> None:
    summary = f"{shown.rows} held-out rows, {shown.answer_tokens:,} trained tokens, {shown.asked} questions"
    rich.print(summary)
    models = rich_table()
    models.add_column("model", overflow="fold")
    models.add_column("by", no_wrap=True)
    for name in ("loss", "perplexity", "exact match", *(["score"] if shown.score else []), "tokens/s"):
        models.add_column(name)
    for model in shown.models:
        exact = "" if model.exact_match is None else f"{model.exact_match:.1%}"
        figures = [figure(model.loss), figure(model.perplexity), exact]
        figures += [figure(model.score)] if shown.score else []
        figures += [figure(model.tokens_per_second)]
        device = "" if model.device in ("cpu", "") else f" on {model.device}"
        models.add_row(model.name, model.backend + device, *figures)
    rich.print(models)
    for model in shown.models:
        if model.reason:
            rich.print(f"{model.name} was not measured: {model.reason}")
    _draw_differences(rich, shown.differences)
    for row in shown.answers:
        rich.print(f"line {row.line}: {row.prompt.strip()}")
        for name, text in {"expected": row.expected, **row.answers}.items():
            rich.print(f"  {name}: {text}")


def _draw_differences(rich: Any, differences: list[FigureDifference]) -> None:
    table = rich_table("model - against", "in", "difference (95 % interval)", "says")
    for each in differences:
        interval = f"{each.difference:+.3g} ({each.low:+.3g} to {each.high:+.3g})"
        style = {"better": "green", "worse": "yellow"}.get(each.says.partition(",")[0])
        table.add_row(
            f"{each.model} - {each.against}", each.measure.replace("_", " "), interval, each.says, style=style
        )
    rich.print(table)
