"""What the report shows, without drawing it: verdicts, words, thinning, and what must not be on a page."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

import whole_records
from skill_train.core.units import dollars, duration
from skill_train.report.demo_record import Demo
from skill_train.report.figure import Record, ReportedRun
from skill_train.report.sections import curve, differences, estimates, run_view, steps, thinned, verdict
from skill_train.report.words import marked, nats, number, placeless, rate, share, size
from skill_train.run.cloud_record import CloudRecord
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import StepLine
from skill_train.run.verify_record import Proof

ADAPTER = {"bytes": 10, "sha256": "aa"}
FILE = {"bytes": 20, "sha256": "bb", "quant": "q8_0"}


def run(verify: Any = None, evaluate: Any = None, demo: Any = None, cloud: Any = None, **documents: Any) -> ReportedRun:
    return ReportedRun(
        name="first",
        call="runs/first",
        documents=documents,
        metrics=[],
        texts={},
        proof=verify and msgspec.convert(verify, Proof),
        evaluation=evaluate and msgspec.convert(evaluate, Evaluation),
        demo=demo and msgspec.convert(demo, Demo),
        cloud=cloud and msgspec.convert(cloud, CloudRecord),
    )


def trained(word: str = "pass") -> dict[str, Any]:
    check = {"name": "loss_falls", "verdict": word, "figure": 1.0, "detail": "1 before, 2 after"}
    return {"verdict": word, "outputs": {"adapter/adapter_model.safetensors": ADAPTER}, "checks": [check]}


def proven(*words: str, file: str = "m-q8_0.gguf", sha256: str = "bb", adapter: Any = ADAPTER) -> dict[str, Any]:
    checks = [
        {"name": f"c{i}", "file": file, "verdict": word, "detail": f"it is {word}"} for i, word in enumerate(words)
    ]
    worst = next(word for word in ("fail", "warn", "pass") if word in words)
    inputs = {"adapter": {"adapter_model.safetensors": adapter}, "ggufs": {file: {"bytes": 20, "sha256": sha256}}}
    return whole_records.proof(verdict=worst, checks=checks, inputs=inputs)


CONVERT = {"outputs": {"gguf/m-q8_0.gguf": FILE}}


@pytest.mark.parametrize(
    ("documents", "word", "headline", "said", "following"),
    [
        ({}, "unknown", "Not trained yet", "", "skill-train local --resume --run-dir runs/first"),
        (
            {"cloud": whole_records.cloud({"number": 1})},
            "unknown",
            "Submitted, results not fetched yet",
            "",
            "skill-train pull runs/first",
        ),
        (
            {"train.failed": {"exit_code": 5, "error": {"message": "the loss is nan", "hint": "a smaller rate"}}},
            "fail",
            "The training failed",
            "the loss is nan",
            "a smaller rate",
        ),
        ({"train": trained("fail")}, "fail", "The smoke test failed", "loss_falls: 1 before, 2 after", ""),
        ({"train": trained()}, "unknown", "Trained, not verified yet", "", "skill-train export-gguf runs/first"),
        (
            {"train": trained(), "convert": CONVERT},
            "unknown",
            "Trained, not verified yet",
            "",
            "skill-train verify runs/first",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", "pass")},
            "pass",
            "Proven: 2 of 2 checks pass on 1 file",
            "",
            "",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", "warn")},
            "warn",
            "Proven, with warnings: 1 of 2 checks pass on 1 file",
            "m-q8_0.gguf c1: it is warn",
            "",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", "warn", "fail")},
            "fail",
            "Not proven: 1 of 3 checks pass on 1 file",
            "m-q8_0.gguf c2: it is fail",
            "",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", adapter={"bytes": 10, "sha256": "cc"})},
            "fail",
            "The proof is of other files",
            "adapter/ is not the one that was verified",
            "skill-train verify runs/first",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", sha256="dd")},
            "fail",
            "The proof is of other files",
            "m-q8_0.gguf is not the one that was verified",
            "skill-train verify runs/first",
        ),
        (
            {"train": trained(), "convert": CONVERT, "verify": proven("pass", file="m-f16.gguf")},
            "fail",
            "The proof is of other files",
            "m-q8_0.gguf was exported and not verified",
            "skill-train verify runs/first",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.istitle() else None,
)
def test_the_verdict(documents: Any, word: str, headline: str, said: str, following: str) -> None:
    found = verdict(run(**documents))
    assert (found["word"], found["headline"], found["next"]) == (word, headline, following)
    assert said in "\n".join(found["because"])


def test_what_could_not_be_checked_is_said_under_a_verdict_that_passes() -> None:
    proof = proven("pass") | {"not_checked": [{"name": "answers", "file": "m", "reason": "no prompt was short enough"}]}
    found = verdict(run(train=trained(), convert=CONVERT, verify=proof))
    assert found["word"] == "pass"
    assert found["because"] == ["m answers: not checked, no prompt was short enough"]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/srv/ada/work/rows.jsonl", "…/rows.jsonl"),
        ("read '/srv/models/base/config.json' first", "read '…/config.json' first"),
        ("~/.cache/huggingface/hub/x", "…/x"),
        ("file:///srv/store/model", "…/model"),
        (r"C:\Users\ada\rows.jsonl", "…/rows.jsonl"),
        ("C:/Users/ada/rows.jsonl", "…/rows.jsonl"),
        (r"\\server\share\rows.jsonl", "…/rows.jsonl"),
        ("https://huggingface.co/ada/model", "https://huggingface.co/ada/model"),
        ("references/local_training.md and 300 tokens/s", "references/local_training.md and 300 tokens/s"),
        ("./runs/first/plan.json", "./runs/first/plan.json"),
        ("token hf_AbCdEfGhIj here", "token … here"),
        ("http://me:word@proxy:80/x", "http://…@proxy:80/x"),
        ("bell\x07 and \x1b[31m", "bell� and �[31m"),
    ],
)
def test_a_record_loses_its_places_and_its_secrets(given: str, left: str) -> None:
    assert placeless({"detail": [given]}, []) == {"detail": [left]}


def test_a_known_place_goes_with_its_spaces_and_from_what_the_model_says_too() -> None:
    document = {
        "source": r"C:\Users\Ada Lovelace\rows.jsonl, again",
        "after": "/home/ada b/notes/x.txt and /etc/ssh/key",
    }
    places = [r"C:\Users\Ada Lovelace\rows.jsonl", "/home/ada b", "/"]
    assert placeless(document, places) == {"source": "…/rows.jsonl, again", "after": "…/x.txt and /etc/ssh/key"}


def test_a_figure_knows_its_place_and_an_unknown_one_has_none() -> None:
    record = Record("first", "convert.json", {"outputs": {"gguf/a~b.gguf": {"bytes": 1_500_000, "quant": None}}})
    figure = record.figure(size, "outputs", "gguf/a~b.gguf", "bytes")
    assert (figure.text, figure.value) == ("1.5 MB", 1_500_000)
    assert figure.at == "first/convert.json#/outputs/gguf~1a~0b.gguf/bytes"  # RFC 6901
    unknown = record.figure(size, "outputs", "gguf/a~b.gguf", "quant")
    assert (unknown.text, unknown.value, unknown.at) == ("not known", None, "")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (size(999), "999 bytes"),
        (size(1_284_448), "1.28 MB"),
        (size(999_600_000), "1,000 MB"),
        (size(15e9), "15 GB"),
        (duration(35.73), "35.7 s"),
        (duration(90), "1.5 min"),
        (duration(5400), "1.5 h"),
        (share(0.3715), "37.1%"),
        (share(1.0), "100%"),
        (dollars(0), "$0.00"),
        (dollars(0.0099), "$0.0099"),
        (dollars(0.005), "$0.0050"),  # half a cent, which was "$0.01" and "$0.00"
        (dollars(0.00002), "$0.000020"),
        (dollars(0.4), "$0.40"),
        (dollars(12.345), "$12.35"),
        (rate(4013.0), "4,013 tokens/s"),
        (nats(7.16100877009245e-07), "7.2e-07"),
        (number(2_033_408), "2,033,408"),
        (number(True), "yes"),
        (number("efd62d9b36bd5a798454e834062b52fd750e0b1dcd674ba1f6aabd0cfce4118d"), "efd62d9b36bd…"),
    ],
)
def test_numbers_in_words(text: str, wanted: str) -> None:
    assert text == wanted


def test_the_trained_parts_of_an_example() -> None:
    assert marked("<s>Hi ⟦yes\nno⟧ end⟦!⟧") == [("<s>Hi ", False), ("yes\nno", True), (" end", False), ("!", True)]


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[1234], values[8765], values[5000] = 9.0, -9.0, None
    kept = thinned(values, most=100)
    assert len(kept) <= 100
    assert kept == sorted(set(kept))
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert thinned(values[:100], most=100) == list(range(100))


def test_a_curve_has_a_gap_where_a_value_is_not_known() -> None:
    used = {5: {"cuda": 7}, 6: None, 7: {"rss": 9}}
    metrics = [StepLine(step=step, steps=7, memory_bytes=memory) for step, memory in used.items()]
    assert curve(metrics, "memory_bytes", "cuda") == ([5, 6, 7], [7, None, None])


def test_the_table_of_steps_has_at_most_two_hundred_and_the_last() -> None:
    table = steps([StepLine(step=step, steps=1000, loss=0.5) for step in range(1, 1001)])
    assert (table["every"], table["steps"], len(table["rows"])) == (5, 1000, 201)
    assert table["rows"][-1] == [1000, "0.5", "", "", "", ""]
    assert steps([]) == {"every": 1, "rows": [], "steps": 0}


def test_an_estimate_without_a_measurement_is_neither_right_nor_wrong() -> None:
    plan = {"estimates": {"seconds": {"low": 10, "high": 20, "basis": "b"}, "memory_bytes": {"low": None}}}
    inside = {row["what"]: row["within"] for row in estimates(run(plan=plan, train={"seconds": 15.0}))["rows"]}
    assert inside == {"memory": None, "time": True, "cost": None}
    outside = estimates(run(plan=plan, train={"seconds": 21.0}))["rows"][1]
    assert outside["within"] is False


def test_a_second_try_with_a_smaller_layout_has_no_estimate() -> None:
    """As in the answer of `local`: the plan estimated the layout for which memory did not suffice."""
    plan = {"estimates": {"seconds": {"low": 10, "high": 20, "basis": "b"}}}
    smaller = {"rule": "smaller_layout", "value": "batches of 2", "because": "8 rows did not fit", "source": "s"}
    row = estimates(run(plan=plan, train={"seconds": 15.0, "smaller_layout": smaller}))["rows"][1]
    assert (row["within"], row["basis"]) == (None, "another layout: it trained with batches of 2 (8 rows did not fit)")


def test_the_cost_of_a_run_whose_first_request_made_no_job() -> None:
    begun = {"state": "started", "job_id": "a" * 24, "cost_usd": 0.4}
    cost = estimates(run(plan={"where": "cloud"}, cloud=whole_records.cloud({}, begun)))["rows"][2]["actual"]
    assert (cost.text, cost.at) == ("$0.40", "first/cloud.json#/jobs/1/cost_usd")


def test_runs_differ_in_what_is_another_and_in_nothing_else() -> None:
    one, other = ({"recipe": {"seed": 42, "lora_r": r}, "placement": {"device": "cpu"}} for r in (8, 16))
    other["placement"] |= {"offload": True}
    found = differences([run(plan=one), run(plan=other)])
    assert [(row["name"], [cell.text for cell in row["cells"]]) for row in found] == [
        ("lora_r", ["8", "16"]),
        ("offload", ["none", "yes"]),
    ]


def test_runs_are_compared_by_the_loss_on_rows_that_never_trained() -> None:
    """As `evaluate` measured it; nothing takes its place."""
    models = [{"name": name, "exact_match": 0.0, "loss": loss} for name, loss in (("base", 13.099), ("tuned", 9.57))]
    evaluate = whole_records.evaluation(models=models)
    cells = dict(run_view(run(train=trained(), evaluate=evaluate))["overview"])["held-out loss, base to tuned"]
    assert [cell.text for cell in cells] == ["13.1", "9.57"]
    cells = dict(run_view(run(train=trained()))["overview"])["held-out loss, base to tuned"]
    assert [cell.text for cell in cells] == ["not measured"]


@pytest.mark.parametrize(("data", "doubted"), [({"held_out_trained": 0}, 0), ({"held_out_trained": 2}, 1), ({}, 1)])
def test_held_out_rows_that_may_have_trained_are_doubted(data: dict[str, int], doubted: int) -> None:
    """`evaluate` warns of them, and the page called them held out."""
    quality = run_view(run(train=trained() | {"data": data}, evaluate=whole_records.evaluation(rows=30)))["quality"]
    assert quality is not None and len(quality["doubts"]) == doubted


@pytest.mark.parametrize(("adapter", "merged", "doubted"), [("aa", "mm", 0), ("ee", "mm", 1), ("aa", "ee", 1)])
def test_files_of_an_earlier_training_are_doubted(adapter: str, merged: str, doubted: int) -> None:
    """`evaluate` warns of them, and their figures stood beside those of the new model."""
    merge = {
        "inputs": {"adapter": {"adapter_model.safetensors": ADAPTER | {"sha256": adapter}}},
        "outputs": {"merged/config.json": {"bytes": 1, "sha256": "mm"}},
    }
    convert = CONVERT | {"inputs": {"config.json": {"bytes": 1, "sha256": merged}}}
    train = trained() | {"data": {"held_out_trained": 0}}
    quality = run_view(run(train=train, merge=merge, convert=convert, evaluate=whole_records.evaluation(rows=30)))[
        "quality"
    ]
    assert quality is not None and len(quality["doubts"]) == doubted


@pytest.mark.parametrize(("loss", "word", "headline"), [(6.9, "pass", "Proven: "), (6.91, "warn", "Proven, with w")])
def test_files_that_guess_worse_than_chance_are_no_success(loss: float, word: str, headline: str) -> None:
    """They are those of the trained model, and `evaluate` alone said that it learned nothing. ln 1000 is 6.9078."""
    models = [{"name": "base", "loss": 9.0}, {"name": "tuned", "loss": loss}]
    documents = {"train": trained(), "convert": CONVERT, "plan": {"facts": {"model": {"vocab_size": 1000}}}}
    view = run_view(run(verify=proven("pass"), evaluate=whole_records.evaluation(models=models), **documents))
    told, quality = view["verdict"], view["quality"]
    assert told["word"] == word and told["headline"].startswith(headline)
    assert ["tuned (loss 6.91): worse than blind" in line for line in told["because"]] == [True] * (word == "warn")
    assert quality is not None and "base (loss 9)" in " ".join(quality["doubts"])
    assert "20 rows: below 30 the intervals are too narrow" in quality["doubts"][0]


@pytest.mark.parametrize(("private", "notes"), [(True, 2), (False, 0)])
def test_rows_of_sensitive_data_are_not_shown_without_a_word(private: bool, notes: int) -> None:
    """The page is the one file of a run that people send."""
    row = {"line": 1, "prompt": "a", "expected": "b", "answers": {"base": "c"}, "exact": {}, "scores": {}}
    answer = {"prompt": "a", "before": "b", "after": "c"}
    plan = {"policy": {"sensitive": private}}
    evaluated = run(plan=plan, train=trained(), evaluate=whole_records.evaluation(answers=[row]))
    views = [run_view(one)["answers"] for one in (evaluated, run(plan=plan, train=trained() | {"answer": answer}))]
    assert sum("do not pass it on" in view["note"] for view in views if view is not None) == notes


def test_an_evaluation_is_taken_before_the_demo_and_never_mixed_with_it() -> None:
    stage = {"stage": "q8_0", "exact_match": 1.0, "tokens_per_second": 100.0}
    model = {"name": "m-q8_0.gguf", "exact_match": 0.25, "tokens_per_second": None, "loss": 1.0, "perplexity": 2.7}
    documents = {"convert": CONVERT, "demo": whole_records.demo(stage), "train": trained()}
    (file,) = run_view(run(**documents))["files"]
    assert (file["exact_match"].text, file["speed"].text) == ("100%", "100 tokens/s")
    (file,) = run_view(run(**documents, evaluate=whole_records.evaluation(models=[model])))["files"]
    assert (file["exact_match"].text, file["speed"].text) == ("25.0%", "not measured")
    other = model | {"name": "m-f16.gguf"}
    (file,) = run_view(run(**documents, evaluate=whole_records.evaluation(models=[other])))["files"]
    assert (file["exact_match"].text, file["speed"].text) == ("not measured", "not measured")


@pytest.mark.parametrize(
    ("file", "adapter", "left_out"),
    [("bb", "aa", False), ("ee", "aa", True), ("bb", "ee", True)],
    ids=["of these files", "of another file", "of another adapter"],
)
def test_an_evaluation_of_other_files_is_left_out_and_said(file: str, adapter: str, left_out: bool) -> None:
    tuned = {"model": "the folder of base", "adapter": {"adapter_model.safetensors": {"bytes": 10, "sha256": adapter}}}
    inputs = {"models": {"tuned": tuned, "m-q8_0.gguf": {"model": {"bytes": 20, "sha256": file}, "adapter": None}}}
    record = whole_records.evaluation(inputs=inputs, models=[{"name": "tuned", "loss": 1.0}])
    view = run_view(run(train=trained(), convert=CONVERT, evaluate=record).without_outdated())
    assert (view["quality"] is None) is left_out
    assert ("evaluated, but other files than these" in [one["said"] for one in view["missing"]]) is left_out


def test_the_figures_of_the_demo_go_with_the_evaluation_that_they_are_from() -> None:
    """`demo` measures with `evaluate`: the figures of other files came back from its own table."""
    model: dict[str, Any] = {"model": FILE | {"sha256": "ee"}}
    record = whole_records.evaluation(inputs={"models": {"m-q8_0.gguf": model}}, models=[{"name": "m-q8_0.gguf"}])
    demo = whole_records.demo({"stage": "q8_0", "tokens_per_second": 100.0})
    (file,) = run_view(run(train=trained(), convert=CONVERT, evaluate=record, demo=demo).without_outdated())["files"]
    assert (file["exact_match"].text, file["speed"].text) == ("not measured", "not measured")


def test_an_evaluation_of_an_earlier_model_that_was_trained_whole_is_left_out() -> None:
    train = trained() | {"outputs": {"merged/model.safetensors": ADAPTER}}
    tuned = {"model": {"model.safetensors": ADAPTER}, "adapter": None}
    record = whole_records.evaluation(inputs={"models": {"tuned": tuned}}, models=[{"name": "tuned"}])
    assert run(train=train, evaluate=record).without_outdated()["evaluate"]
    tuned["model"] = {"model.safetensors": ADAPTER | {"sha256": "ee"}}
    assert not run(train=train, evaluate=record).without_outdated()["evaluate"]


@pytest.mark.parametrize(("file", "adapter", "judged"), [("bb", "aa", True), ("ee", "aa", False), ("bb", "ee", False)])
def test_a_file_has_no_figure_of_the_one_that_was_verified_before_it(file: str, adapter: str, judged: bool) -> None:
    """It was exported again under its name, or the adapter is another one."""
    record = proven("pass", sha256=file, adapter=ADAPTER | {"sha256": adapter})
    record["checks"][0] |= {"name": "logits", "figures": {"mean_kl": 0.001, "same_top1": 0.99}}
    view = run_view(run(train=trained(), convert=CONVERT, verify=record))
    (shown,) = view["files"]
    words = [shown["verdict"], shown["same_top1"].text, dict(view["overview"])["smallest file that passes"][0].text]
    assert words == (["pass", "99.0%", "q8_0"] if judged else ["unknown", "not verified", "none yet"])
    assert view["run_it"] is not None and view["run_it"]["verdict"] == words[0]


def test_a_model_that_was_trained_whole_is_held_against_its_proof() -> None:
    train = trained() | {"outputs": {"merged/model.safetensors": ADAPTER}}
    proof = whole_records.proof(inputs={"reference": {"model.safetensors": ADAPTER}})
    assert verdict(run(train=train, verify=proof))["word"] == "pass"
    proof["inputs"]["reference"] = {"model.safetensors": ADAPTER | {"sha256": "cc"}}
    assert verdict(run(train=train, verify=proof))["because"] == ["merged/ is not the one that was verified"]


def test_an_adapter_that_was_exported_alone_is_exported() -> None:
    """The next command was to export it."""
    lora = {"outputs": {"gguf/m-lora-f16.gguf": FILE}}
    assert verdict(run(train=trained(), lora_gguf=lora))["next"] == "skill-train verify runs/first"
    view = run_view(run(train=trained(), lora_gguf=lora, verify=proven("pass", file="m-lora-f16.gguf")))
    assert (view["verdict"]["word"], [each["part"] for each in view["missing"]]) == ("pass", ["evaluate"])


def test_the_file_to_run_is_the_smallest_that_passes() -> None:
    outputs = {
        f"gguf/m {q}.gguf": {"bytes": b, "sha256": q, "quant": q} for q, b in (("f16", 9), ("q8_0", 5), ("q4_k_m", 3))
    }
    checks = [
        {"name": "logits", "file": f"m {quant}.gguf", "verdict": word, "detail": ""}
        for quant, word in (("f16", "pass"), ("q8_0", "pass"), ("q4_k_m", "fail"))
    ]
    shown = run(
        convert={"outputs": outputs}, verify=whole_records.proof(checks=checks, verdict="fail"), train=trained()
    )
    view = run_view(shown)
    assert view["run_it"]["quant"] == "q8_0"
    for named, told in (
        ("q4_k_m", True),
        ("q8_0", False),
    ):  # the file that failed is not run under a verdict that passes
        modelfile = {"Modelfile": f'FROM "./m {named}.gguf"\nPARAMETER top_p 0.9'}
        ollama = run_view(dataclasses.replace(shown, texts=modelfile))["run_it"]["commands"][0]
        assert ollama["program"] == "Ollama"
        assert ollama["mind"].startswith("its FROM names another file: write ./m q8_0.gguf there first; ") is told
    lines = [line for one in view["run_it"]["commands"] for line in one["lines"]]
    assert "llama-cli -m 'gguf/m q8_0.gguf' -cnv" in lines
    assert "lms import --copy 'gguf/m q8_0.gguf'" in lines  # without --copy, the file leaves the run
