"""The sections about quality, from `evaluate.json`. If there is no such file, they show the demo's figures and the two
answers of the training.

Pure.
"""

from collections.abc import Iterator

from skill_train.report.figure import Figure, PictureView, ReportedRun, Shown
from skill_train.report.views import AnswersView, AnswerView, ModelDifferenceView, ModelView, PromptView, QualityView
from skill_train.report.words import number, rate, share
from skill_train.run.evaluate_record import AnsweredRow, Evaluation, blind, few_rows, telling
from skill_train.run.merge_record import is_of_earlier_training

MOST_ANSWERS = 12  # prompts that are shown side by side
NOT_MEASURED = "not measured"
_MEASURES: dict[str, Shown] = {
    "loss": number,
    "perplexity": number,
    "exact_match": share,
    "score": number,
    "tokens_per_second": rate,
}


def measured(run: ReportedRun, model: str, key: str, *, stage: str = "") -> Figure:
    """One value of one model: `base`, `tuned` or the name of a GGUF file.

    Args:
        stage: the model's name in the demo's table, which is used if there is no evaluation.
    """
    text_of = _MEASURES[key]
    if run.evaluation is not None:
        names = [evaluated.name for evaluated in run.evaluation.models]
        at = ("models", names.index(model), key) if model in names else ()
        return run["evaluate"].figure(text_of, *at, unknown=NOT_MEASURED) if at else Figure(NOT_MEASURED)
    stages = [row.stage for row in run.demo.figures.stages] if run.demo is not None else []
    if (stage or model) not in stages:
        return Figure(NOT_MEASURED)
    return run["demo"].figure(text_of, "figures", "stages", stages.index(stage or model), key, unknown=NOT_MEASURED)


def quality(run: ReportedRun) -> QualityView | None:
    """Each evaluated model with its figures, and its difference to the model that it was made of."""
    if run.evaluation is None:
        return None
    evaluation, evaluate = run.evaluation, run["evaluate"]
    keys = [key for key in _MEASURES if key != "score" or evaluation.score is not None]
    models: list[ModelView] = [
        {
            "name": model.name,
            "figures": [evaluate.figure(_MEASURES[key], "models", i, key, unknown=NOT_MEASURED) for key in keys],
            "reason": model.reason,
        }
        for i, model in enumerate(evaluation.models)
    ]
    differences: list[ModelDifferenceView] = [
        {
            "model": difference.model,
            "against": difference.against,
            "measure": difference.measure.replace("_", " "),
            "says": difference.says,
            "difference": evaluate.figure(_signed, "differences", i, "difference"),
            "low": evaluate.figure(_signed, "differences", i, "low"),
            "high": evaluate.figure(_signed, "differences", i, "high"),
        }
        for i, difference in enumerate(evaluation.differences)
    ]
    return {
        "doubts": list(_doubts(run, evaluation)),
        "rows": evaluate.figure(number, "rows"),
        "asked": evaluate.figure(number, "asked"),
        "score": evaluation.score,
        "measures": [key.replace("_", " ") for key in keys],
        "models": models,
        "differences": differences,
    }


def worse_than_blind(run: ReportedRun, *, of_base: bool) -> str:
    """A sentence that names the evaluated models that are worse than blind guessing; empty if there are none."""
    models = run.evaluation.models if run.evaluation is not None else []
    vocabulary = run["plan"].get("facts", "model", "vocab_size")
    return blind([model for model in models if of_base or model.name != "base"], vocabulary)


def _doubts(run: ReportedRun, evaluation: Evaluation) -> Iterator[str]:
    yield from filter(None, (few_rows(evaluation.rows), worse_than_blind(run, of_base=True)))
    if run.base_may_know:
        yield "The base was merged by an earlier run, which may have trained on some of these rows."
    if run["train"].get("data", "held_out_trained") != 0:
        yield "The run may have trained on some of these rows: an earlier version divided them."
    keys = (("train", "outputs"), ("merge", "inputs", "adapter"), ("merge", "outputs"), ("convert", "inputs"))
    if run.exported() and is_of_earlier_training(*(run[step].get(*path, default={}) for step, *path in keys)):
        yield "The files were made of an earlier training of this run, by its records."
    for model in evaluation.perhaps_trained:
        yield f"{model} is of another run, which may have trained on some of these rows."


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.3g}"


def answers(run: ReportedRun) -> AnswersView | None:
    """Prompts with the answer of each model. Rows with most different answers come first.

    Without an evaluation, the only prompt is the one that the training asked.
    """
    evaluated = run.evaluation.answers if run.evaluation is not None else []
    if evaluated:
        rows_shown = [
            _answered(row, run.pictures.by_line.get(row.line, [])) for row in telling(evaluated, MOST_ANSWERS)
        ]
        notes = " ".join(filter(None, (sensitive(run), run.pictures.note)))
        return {"rows": rows_shown, "of": len(evaluated), "source": "evaluate.json", "note": notes}
    answer = run["train"].get("answer")
    if answer is None:
        return None
    pair: list[AnswerView] = [{"model": when, "text": answer.get(key), "exact": None} for when, key in _WHEN]
    prompt = answer.get("prompt", "")
    rows: list[PromptView] = [{"prompt": prompt, "pictures": [], "expected": None, "answers": pair}]
    return {"rows": rows, "of": 1, "source": "train.json", "note": sensitive(run)}


def sensitive(run: ReportedRun) -> str:
    """What to know before the page is passed on; empty if the recipe does not call the data sensitive."""
    private = run["plan"].get("policy", "sensitive")
    return "The page shows rows of data that the recipe calls sensitive: do not pass it on." if private else ""


_WHEN = (("base", "before"), ("tuned", "after"))


def _answered(row: AnsweredRow, pictures: list[PictureView]) -> PromptView:
    views: list[AnswerView] = [
        {"model": name, "text": text, "exact": row.exact.get(name)} for name, text in row.answers.items()
    ]
    return {"prompt": row.prompt, "pictures": pictures, "expected": row.expected, "answers": views}
