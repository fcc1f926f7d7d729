"""The sections about a run: its verdict, its figures, the decisions and their reasons, its data and its curves.
Pure."""

from skill_train.core.units import dollars, duration
from skill_train.report import artifacts, views
from skill_train.report.figure import Figure, Record, ReportedRun, Shown, differ
from skill_train.report.quality import answers, measured, quality, worse_than_blind
from skill_train.report.words import marked, number, rate, share, size
from skill_train.run.cloud_record import continue_words
from skill_train.run.records import Number
from skill_train.run.train_record import StepLine
from skill_train.run.verify_record import Proof

MOST_POINTS = 600  # points of one curve, about one for each pixel
MOST_ROWS = 200  # rows of the table of steps


def run_view(run: ReportedRun) -> views.RunView:
    """The data of all sections about one run. A section without a record is None."""
    return {
        "name": run.name,
        "verdict": verdict(run),
        "overview": overview(run),
        "missing": artifacts.missing(run),
        "training": training(run),
        "estimates": estimates(run),
        "decision": decision(run),
        "data": data(run),
        "quality": quality(run),
        "answers": answers(run),
        "proof": artifacts.proof(run),
        "files": artifacts.files(run),
        "pairs": artifacts.pairs(run),
        "no_projector": artifacts.no_projector(run),
        "run_it": artifacts.run_it(run),
        "cloud": artifacts.cloud(run),
        "versions": artifacts.versions(run),
        "recipe": run.texts.get("recipe.yaml"),
        "reproduce": artifacts.reproduce(run),
        "steps": steps(run.metrics),
    }


def verdict(run: ReportedRun) -> views.VerdictView:
    """The verdict in one word, its reasons, and the next command if something is left to do."""
    train = run["train"]
    if not train:
        return _not_trained(run)
    if train.get("verdict") == "fail":
        failed = [f"{check['name']}: {check['detail']}" for check in train.get("checks") if check["verdict"] == "fail"]
        return _verdict("fail", "The smoke test failed", failed)
    if run.proof is None:
        because = ["The training passed its smoke test; nothing is known yet of any file that was made from it."]
        following = "verify" if run.is_exported else "export-gguf"
        return _verdict("unknown", "Trained, not verified yet", because, run.command(following))
    stale = _stale(run, run.proof)
    if stale:
        return _verdict("fail", "The proof is of other files", stale, run.command("verify"))
    return _proven(run, run.proof)


def _not_trained(run: ReportedRun) -> views.VerdictView:
    failure = run["train.failed"]
    if failure:
        error = failure.get("error", default={})
        return _verdict("fail", "The training failed", [error.get("message", "")], error.get("hint", ""))
    headline = "Submitted, results not fetched yet" if run.cloud else "Not trained yet"
    return _verdict("unknown", headline, [], run.command(continue_words(run.cloud, run.backend)))


def _proven(run: ReportedRun, proof: Proof) -> views.VerdictView:
    passing = sum(check.verdict == "pass" for check in proof.checks)
    because = [f"{check.file} {check.name}: {check.detail}" for check in proof.checks if check.verdict != "pass"]
    because += [f"{skipped.file} {skipped.name}: not checked, {skipped.reason}" for skipped in proof.not_checked]
    exported = run.exported() | run.projectors()
    here = not exported or len(run.gone) < len(exported)
    because += [f"{file} was exported and is gone" for file in run.gone if here]
    because += [] if here else ["None of the files is here."]
    judged = len(proof.inputs.ggufs)
    of = f"{passing} of {len(proof.checks)} checks pass on {judged} file{'' if judged == 1 else 's'}"
    of += "" if here else ", by the records alone"
    head = {"pass": "Proven", "warn": "Proven, with warnings", "fail": "Not proven"}
    lost, blind = here and run.gone, worse_than_blind(run, of_base=False)
    because += [blind] if blind else []
    word = "warn" if (lost or blind) and proof.verdict == "pass" else proof.verdict
    return _verdict(word, f"{head[word]}: {of}", because, run.command("export-gguf") if lost else "")


def _verdict(word: str, headline: str, because: list[str], following: str = "") -> views.VerdictView:
    return {"word": word, "headline": headline, "because": because, "next": following}


def _stale(run: ReportedRun, proof: Proof) -> list[str]:
    """A sentence for each file that changed after the proof, on the disk or in its record, or that was not verified."""
    # If a file was exchanged before the proof, a check of the proof itself failed.
    exchanged = {check.file for check in proof.checks if check.name == "digest" and check.verdict == "fail"}
    replaced = [file for file in run.replaced if file not in exchanged]
    because = [f"{file} is not the one that was verified: the file was replaced" for file in replaced]
    because += [f"{file} lies in gguf/ and was not verified" for file in run.strange]
    for folder, read in (("adapter", proof.inputs.adapter), ("merged", proof.inputs.reference)):
        if differ(read, run.trained(folder)):
            because.append(f"{folder}/ is not the one that was verified")
    for file, (step, name) in (run.exported() | run.projectors()).items():
        verified = proof.inputs.ggufs.get(file)
        if verified is None:
            because += [] if file in run.gone else [f"{file} was exported and not verified"]
        elif file not in exchanged and verified["sha256"] != run[step].get("outputs", name, "sha256"):
            because.append(f"{file} is not the one that was verified")
    return because


def overview(run: ReportedRun) -> views.Overview:
    """The few figures by which runs are compared. Two figures in one row are the values before and after."""
    plan, train = run["plan"], run["train"]
    loss = [train.figure(number, "figures", name) for name in ("first_loss", "last_loss")]
    exact = [measured(run, "base", "exact_match"), measured(run, "tuned", "exact_match", stage="merged")]
    return [
        ("model", [plan.figure(str, "recipe", "model")]),
        ("parameters", [plan.figure(number, "facts", "model", "parameters")]),
        ("data", [plan.figure(str, "recipe", "data")]),
        ("trained on", [plan.figure(str, "placement", "device"), plan.figure(str, "placement", "dtype")]),
        ("steps", [train.figure(number, "steps")]),
        ("loss, first to last", _change(*loss)),
        ("held-out rows measured", [run["evaluate"].figure(number, "rows")]),
        ("held-out loss, base to tuned", _change(*(measured(run, model, "loss") for model in ("base", "tuned")))),
        ("exact match, base to tuned", _change(*exact)),
        ("training speed", [train.figure(rate, "figures", "tokens_per_second")]),
        ("time", [train.figure(duration, "seconds")]),
        ("peak memory", [_peak(run)]),
        ("smallest file that passes", artifacts.smallest(run)),
        ("recipe", [plan.figure(number, "recipe_hash")]),
    ]


def _change(before: Figure, after: Figure) -> list[Figure]:
    return [before, after] if before.at or after.at else [after]


def _peak(run: ReportedRun) -> Figure:
    """The peak memory of the device that trained, or of the process if the device has no memory of its own."""
    train, device = run["train"], run["plan"].get("placement", "device")
    peaks = train.get("figures", "peak_memory_bytes", default={})
    return train.figure(size, "figures", "peak_memory_bytes", device if device in peaks else "rss")


def training(run: ReportedRun) -> views.TrainingView | None:
    train = run["train"]
    if not train:
        return None
    checks: list[views.SmokeCheckView] = [
        {
            "name": check["name"],
            "verdict": check["verdict"],
            "figure": train.figure(number, "checks", i, "figure", unknown=""),
            "detail": check["detail"],
        }
        for i, check in train.items("checks")
    ]
    return {"verdict": train.get("verdict"), "checks": checks}


def estimates(run: ReportedRun) -> views.EstimatesView:
    """Estimated ranges beside the measurements. `within` is None if one of the two is unknown, or if a second try
    trained with a smaller layout than the estimated one."""
    plan, train = run["plan"], run["train"]
    rows = [
        _estimate(plan, "memory", "memory_bytes", size, _peak(run)),
        _estimate(plan, "time", "seconds", duration, train.figure(duration, "seconds")),
        _estimate(plan, "cost", "cost_usd", dollars, _cost(run)),
    ]
    if smaller := train.get("smaller_layout"):
        other = f"another layout: it trained with {smaller['value']} ({smaller['because']})"
        rows = [{**row, "within": None, "basis": other} for row in rows]
    parts: list[views.EstimatePartView] = [
        {
            "what": f"{quantity}: {part['name']}",
            "low": plan.figure(text_of, "estimates", key, i, "low"),
            "high": plan.figure(text_of, "estimates", key, i, "high"),
            "because": part["because"],
        }
        for quantity, key, text_of in (("memory", "memory_parts", size), ("time", "seconds_parts", duration))
        for i, part in plan.items("estimates", key)
    ]
    return {"rows": rows, "parts": parts}


def _estimate(plan: Record, quantity: str, key: str, text_of: Shown, actual: Figure) -> views.EstimateRow:
    low, high = (plan.figure(text_of, "estimates", key, end) for end in ("low", "high"))
    complete = None not in (low.value, high.value, actual.value)
    return {
        "what": quantity,
        "low": low,
        "high": high,
        "actual": actual,
        "within": low.value <= actual.value <= high.value if complete else None,
        "basis": plan.get("estimates", key, "basis", default=""),
    }


def _cost(run: ReportedRun) -> Figure:
    """The cost. A local run has no rent. The cost of a job is known only after its end was seen."""
    seconds = run["train"].get("seconds")
    if run.cloud is None:
        return Figure("no rent", 0) if run["plan"].get("where") == "local" else Figure("not known")
    begun = [(i, job) for i, job in enumerate(run.cloud.jobs) if job.job_id]
    costs = [job.cost_usd for _, job in begun if job.cost_usd is not None]
    if len(begun) == len(costs) == 1:
        return run["cloud"].figure(dollars, "jobs", begun[0][0], "cost_usd")
    if costs and len(costs) == len(begun):
        return Figure(f"{dollars(sum(costs))} for {len(costs)} jobs", sum(costs))
    price = run.cloud.jobs[0].usd_per_hour if len(run.cloud.jobs) == 1 else None
    if seconds is None or price is None:
        return Figure("not known: the bill of the jobs says it")
    return Figure(f"{dollars(seconds / 3600 * price)} or more: what the training alone took")


def decision(run: ReportedRun) -> views.DecisionView:
    """Where the plan trains, and every derived value with its reason."""
    plan = run["plan"]
    return {
        "where": plan.get("where", default="not known"),
        "flavor": plan.get("flavor"),
        "reasons": [
            {key: str(reason.get(key, "")) for key in ("rule", "value", "because", "source")}
            for reason in plan.get("reasons", default=[])
        ],
        "blockers": [blocker["message"] for blocker in plan.get("blockers", default=[])],
    }


def data(run: ReportedRun) -> views.DataView | None:
    """The numbers of rows and tokens of the training, and one row as it was fed to the model."""
    train = run["train"]
    if not train:
        return None
    rows = [
        ("rows", train.figure(number, "data", "rows")),
        ("trained on", train.figure(number, "data", "train_rows")),
        ("held out", train.figure(number, "data", "held_out_rows")),
        ("cut at max_length", train.figure(number, "data", "truncated_rows")),
        ("left out", train.figure(number, "data", "skipped_rows")),
        ("tokens", train.figure(number, "data", "tokens")),
        ("of them trained", train.figure(share, "data", "trained_token_share")),
        ("tokens of the longest row", train.figure(number, "data", "longest_row_tokens")),
    ]
    notes = [str(note) for note in train.get("data", "notes", default=[])]
    return {"rows": rows, "notes": notes, "example": marked(train.get("example", default=""))}


def differences(runs: list[ReportedRun]) -> list[views.DifferenceView]:
    """Fields of recipe, fingerprints and placement in which the runs differ."""
    differing: list[views.DifferenceView] = []
    for part in ("recipe", "fingerprints", "placement"):
        names = dict.fromkeys(key for run in runs for key in run["plan"].get(part, default={}))
        for name in names:
            cells = [run["plan"].figure(number, part, name, unknown="none") for run in runs]
            if len({repr(cell.value) for cell in cells}) > 1:
                differing.append({"part": part, "name": name, "cells": cells})
    return differing


def curve(metrics: list[StepLine], name: str, kind: str = "") -> tuple[list[int], list[float | None]]:
    """Steps and values of one curve, thinned. A value is None if its line does not have it.

    Args:
        kind: the kind of memory, for a curve of memory.
    """
    values = [(line.memory_bytes or {}).get(kind) if kind else getattr(line, name) for line in metrics]
    indices = thinned(values)
    return [metrics[i].step for i in indices], [values[i] for i in indices]


def thinned(values: list[float | None], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` values: the first and the last, and the lowest and the highest of each stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = (most - 2) // 2
    indices = {0, len(values) - 1}
    for i in range(stretches):
        inside = range(i * len(values) // stretches, (i + 1) * len(values) // stretches)
        present = [j for j in inside if values[j] is not None] or [inside[0]]
        indices |= {min(present, key=lambda j: values[j] or 0.0), max(present, key=lambda j: values[j] or 0.0)}
    return sorted(indices)


def steps(metrics: list[StepLine]) -> views.StepsView:
    """The figures behind the curves: every step, or every n-th step and the last."""
    every = -(-len(metrics) // MOST_ROWS) or 1
    lines = [line for i, line in enumerate(metrics) if i % every == 0 or i == len(metrics) - 1]
    keys = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    rows: list[list[int | str]] = [
        [line.step, *(_cell(getattr(line, key)) for key in keys), _cell(_largest(line.memory_bytes))] for line in lines
    ]
    return {"every": every, "rows": rows, "steps": len(metrics)}


def _largest(memory: dict[str, Number | None] | None) -> Number | None:
    return max((used for used in (memory or {}).values() if used is not None), default=None)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else f"{value}"
