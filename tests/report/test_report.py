"""The report of a recorded run of the demo (2026-11-21, on 2 cores of a server): read back as a browser would.

Its records are real; only the folder is one of an imagined user, with a space in its name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import browser
import containers
import light
import shared_runs
import whole_records
from command_tree import commands
from one_command import answered
from pages import Page, differing
from planning import write_recipe_hash
from skill_train.commands._shipping import ExportOptions, wanted_types
from skill_train.core.errors import UsageError
from skill_train.gguf.quant_types import type_names
from skill_train.report.step import report
from skill_train.run.folder import RunDir

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).resolve().parent.parent / "support" / "data" / "runs" / "demo"
HOME = "/home/ada lovelace"
SCALE = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0, "h": 3600.0, "min": 60.0, "s": 1.0, "tokens/s": 1.0, "%": 0.01}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of the run as it was recorded, for the tests that change nothing."""
    return make(RECORDED, out=tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path / "demo")
    return tmp_path / "demo"


@pytest.fixture
def plain(run: Path) -> Path:
    """Its page has no charts, which take a second."""
    for name in ("metrics.jsonl", "evaluate.json", "verify.json", "quantize.json", "convert.json"):
        (run / name).unlink()
    return run


def make(*runs: Path, out: Path | None = None) -> Page:
    target = out or runs[0] / "report.html"
    report([RunDir(run) for run in runs], out=target, progress=lambda done, total, text: None, warn=print)
    page = Page(target.read_text(encoding="utf-8"))
    page.at = target
    return page


def edit(run: Path, name: str, **changes: Any) -> None:
    path = run / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_what_lies_in_the_run_is_held_against_the_proof(tmp_path: Path) -> None:
    """By its bytes: a file of another run of this base has the same size. A folder of records alone says so."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    (run / "metrics.jsonl").unlink()  # curves take time to draw
    file, adapter = run / "gguf" / "run-q8_0.gguf", run / "adapter" / "adapter_model.safetensors"
    replaced = "is not the one that was verified: the file was replaced"
    text = make(run).text
    assert "Proven" in text and replaced not in text and "is gone" not in text and "None of the files" not in text
    for changed in (file, adapter):
        own = changed.read_bytes()
        changed.write_bytes(own[:-64] + bytes(64))
        text = make(run).text
        assert "The proof is of other files" in text and f"{changed.name} {replaced}" in text
        changed.write_bytes(own)
    other = Path(shutil.copy(file, run / "gguf" / "other.gguf"))  # which `push` would send too
    text = make(run).text
    assert "The proof is of other files" in text and "other.gguf lies in gguf/ and was not verified" in text
    other.unlink()
    file.unlink()
    text = make(run).text
    assert "Proven, with warnings" in text and f"{file.name} was exported and is gone" in text
    assert "skill-train export-gguf" in text and "None of the files" not in text
    edit(run, "verify", inputs=_without(run, file.name))  # as `verify` writes it now
    assert "exported and not verified" not in make(run).text
    shutil.rmtree(run / "gguf")
    text = make(run).text
    assert "files, by the records alone" in text and "None of the files is here." in text


def test_a_proof_of_other_files_is_followed_by_verify(tmp_path: Path) -> None:
    """An agent reads `next` alone. It was empty, or named `evaluate`."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    (run / "metrics.jsonl").unlink()

    def following() -> list[str]:
        done = subprocess.run([shared_runs.script(), "report", run], capture_output=True, text=True)
        return list(json.loads(done.stdout)["next"])

    assert following() == [f"skill-train evaluate {run}"]
    file = run / "gguf" / "run-q8_0.gguf"
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    assert following() == [f"skill-train verify {run}"]


def test_a_proof_that_found_an_exchanged_file_is_not_said_to_be_of_other_files(tmp_path: Path) -> None:
    """To verify again would change nothing."""
    run = Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))
    (run / "metrics.jsonl").unlink()
    file = run / "gguf" / "run-q8_0.gguf"
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    proof = json.loads((run / "verify.json").read_text())
    proof["inputs"]["ggufs"][file.name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    for check in proof["checks"]:
        if (check["name"], check["file"]) == ("digest", file.name):
            check |= {"verdict": "fail", "detail": "the file changed after it was exported"}
    edit(run, "verify", inputs=proof["inputs"], checks=proof["checks"], verdict="fail")
    text = make(run).text
    assert "Not proven" in text and f"{file.name} digest: the file changed after it was exported" in text
    assert "The proof is of other files" not in text


def _without(run: Path, name: str) -> Any:
    inputs = json.loads((run / "verify.json").read_text())["inputs"]
    del inputs["ggufs"][name]
    return inputs


def test_every_figure_is_the_one_in_its_file(page: Page) -> None:
    assert len(page.figures) > 250
    assert differing(page, RECORDED.parent, lambda text: text.replace(f"{HOME}/models", "…")) == []


def test_every_number_reads_as_its_figure(page: Page) -> None:
    read = 0
    for at, value, text in page.figures:
        match = re.fullmatch(r"([+−×$]?)([\d.,]+(?:e-\d+)?) ?([A-Za-z/%]*)(?:/h)?", text)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or match is None:
            assert isinstance(value, str), (at, text)
            continue
        sign, digits, unit = match.groups()
        number = float(digits.replace(",", "")) * SCALE.get(unit, 1.0) * (-1 if sign == "−" else 1)
        assert number == pytest.approx(value, rel=0.051, abs=1e-3 if unit == "%" else 1e-12), (at, text)
        read += 1
    assert read > 150


def test_the_figures_of_the_headline_and_of_a_file_worked_out_by_hand(page: Page) -> None:
    assert "Proven: 45 of 45 checks pass on 3 files" in page.text
    by_place = {at: text for at, _, text in page.figures}
    assert by_place["demo/quantize.json#/outputs/gguf~1demo-run-q4_k_m.gguf/bytes"] == "1.28 MB"  # 1284448
    assert by_place["demo/train.json#/figures/peak_memory_bytes/rss"] == "610 MB"  # 610144256
    assert by_place["demo/verify.json#/checks/27/figures/mean_kl"] == "0.0011"  # 0.0011259655249274642
    assert by_place["demo/evaluate.json#/models/0/perplexity"] == "138.6"  # 138.57373013134375


def test_the_table_of_steps_is_the_metrics(page: Page) -> None:
    lines = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [cells for cells in page.cells if len(cells) == 6 and cells[0].isdigit()]
    assert len(rows) == len(lines) == 100
    for cells, line in zip(rows, lines, strict=True):
        values = (line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["tokens_per_second"])
        assert [float(cell) for cell in cells[:5]] == pytest.approx(values, rel=1e-4)
        assert int(cells[5]) == line["memory_bytes"]["rss"]


def test_the_curves_are_drawn_where_their_values_are(page: Page) -> None:
    """On a log scale the height is a straight line in the logarithm, on a linear one in the value itself."""
    lines = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for curve, drawn in (
        ("loss-curve-0-0", [math.log(line["loss"]) for line in lines]),
        ("loss-curve-1-0", [line["learning_rate"] for line in lines]),
        ("speed-curve-0-0", [line["tokens_per_second"] for line in lines]),
    ):
        points = _points(page.html, curve)
        assert len(points) == 100
        assert _straight([x for x, _ in points], [line["step"] for line in lines])
        assert _straight([-y for _, y in points], drawn)


def test_the_bars_are_as_long_as_the_files_are_large(page: Page) -> None:
    chart = re.search(r'<figure id="chart-size">.*?</figure>', page.html, re.DOTALL)
    assert chart is not None
    labels = re.findall(r">(f16|q8_0|q4_k_m)<", chart[0])
    drawn = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: var\(--series-0\)', chart[0])
    widths = [_widest(path) for path in drawn]
    assert labels == ["f16", "q8_0", "q4_k_m"]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2190432 / 4095072, 1284448 / 4095072], rel=1e-3)


def test_the_page_stands_alone(page: Page) -> None:
    assert len(page.html) < 400_000
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "img", "base", "form"} == set()
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src"):
                assert value.startswith("#") or value == "data:,", (tag, value)
    assert set(re.findall(r"url\((.)", page.html)) <= {"#"}
    assert "@import" not in page.html
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policies[0].startswith("default-src 'none'")
    ids = re.findall(r'\bid="([^"]*)"', page.html)
    assert len(ids) == len(set(ids))


def test_no_place_and_no_secret_of_this_machine_is_on_it(run: Path) -> None:
    secret = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345"
    train = json.loads((run / "train.json").read_text(encoding="utf-8"))
    train["answer"]["after"] = f"read {HOME}/notes and {run.parent}/other, with {secret}"
    train["checks"][0]["detail"] = (
        r"C:\Users\ada\model.gguf, file:///srv/store/model and http://me:word@proxy.example/x"
    )
    edit(run, "train", **train)
    (run / "evaluate.json").unlink()
    html = make(run).html
    for leaked in (HOME, "/home", "lovelace", str(run.parent), secret, secret[:12], "/srv", "Users", "me:word"):
        assert leaked not in html, leaked
    assert "…/model.gguf, …/model and http://…@proxy.example/x" in html


def test_what_a_hostile_run_says_is_only_text(run: Path, page: Page) -> None:
    """Each word of each record ends with markup, a template and an attribute; the page has no element for it."""
    payload = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}{% for %}]]>&amp;⟦</style>\x1b[31m"
    for path in run.glob("*.json"):
        whole = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: whole[key] for key in ("schema",) if key in whole}  # of another schema nothing is read
        if path.name == "verify.json":  # a proof has its own checks, too
            kept["checks"] = _poisoned(whole["checks"], payload) + whole["checks"]
        path.write_text(json.dumps(_poisoned(whole, payload) | kept), encoding="utf-8")
    write_recipe_hash(run)
    hostile = run.with_name("<script>alert(2)</script>".replace("/", "∕"))
    run.rename(hostile)
    poisoned = make(hostile)
    assert {tag for tag, _ in poisoned.tags} == {tag for tag, _ in page.tags}
    assert {name for _, attributes in poisoned.tags for name in attributes if name.startswith("on")} == set()
    assert "{{ 7 * 7 }}" in poisoned.text
    assert "<script>alert(1)" in poisoned.text
    assert "\x1b" not in poisoned.html


@pytest.mark.parametrize(
    ("gone", "headline", "command"),
    [
        (("verify", "evaluate"), "Trained, not verified yet", "skill-train verify demo"),
        (("verify", "convert", "quantize"), "Trained, not verified yet", "skill-train export-gguf demo"),
        (("train", "verify", "convert", "quantize"), "Not trained yet", "skill-train local --resume --run-dir demo"),
        (("evaluate",), "Proven: 45 of 45 checks pass on 3 files", "skill-train evaluate demo"),
    ],
    ids=["not verified", "not exported", "not trained", "not evaluated"],
)
def test_what_is_missing_is_said_and_not_made_up(run: Path, gone: Any, headline: str, command: str) -> None:
    for name in gone:
        (run / f"{name}.json").unlink()
    page = make(run)
    assert headline in page.text
    assert command in page.text
    files = {at.partition("#")[0] for at, _, _ in page.figures}
    assert files & {f"demo/{name}.json" for name in gone} == set()


def test_the_page_says_how_a_file_was_quantized(run: Path) -> None:
    outputs = json.loads((run / "quantize.json").read_text())["outputs"]
    use = {"file": "imatrix.gguf", "sha256": "0" * 64, "model": "", "data": "samples.jsonl sha256 1234"}
    near, far = ({"mean_kl": kl, "same_top1": 0.9, "tokens": 99} for kl in (0.0125, 0.05))
    outputs["gguf/demo-run-q4_k_m.gguf"] |= {"imatrix": use, "choice": {"with_matrix": near, "without_matrix": far}}
    mix = {"target": "auto-5bpw", "estimated_kl": 0.01, "measured_pairs": 9, "pairs": 9}
    types = {"a": "q4_k", "b": "q6_k", "c": "q4_k"}
    outputs["gguf/demo-run-q8_0.gguf"] |= {"measured": near, "tensor_types": types, "mix": mix}
    edit(run, "quantize", outputs=outputs)
    text = make(run).text
    assert "q4_k_m: with the importance matrix imatrix.gguf of samples.jsonl sha256 1234" in text
    assert "KL to the unquantized file 0.013 with the matrix, 0.05 without" in text
    assert "a mix of 2 q4_k, 1 q6_k; KL to the unquantized file 0.013" in text


def test_only_the_plan_is_enough(run: Path) -> None:
    for path in run.iterdir():
        if path.name != "plan.json":
            path.unlink() if path.is_file() else shutil.rmtree(path)
    page = make(run)
    assert "No step was recorded." in page.text
    assert "Not verified yet." in page.text


def test_a_line_that_a_kill_cut_in_two_and_a_loss_that_is_no_number(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:5]
    lines[2] = json.dumps(json.loads(lines[2]) | {"loss": None})
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 6, "lo']), encoding="utf-8")
    page = make(run)
    rows = [cells for cells in page.cells if len(cells) == 6 and cells[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[2][1] == ""
    assert len(_points(page.html, "loss-curve-0-0")) == 4


def test_two_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    plan = json.loads((other / "plan.json").read_text(encoding="utf-8"))
    edit(other, "plan", recipe=plan["recipe"] | {"learning_rate": 0.0005})
    write_recipe_hash(other)
    (other / "verify.json").unlink()
    page = make(run, other)
    assert ["", "demo", "other"] in page.cells
    assert ["recipe: learning_rate", "0.001", "0.0005"] in page.cells
    assert ["loss, first to last", "4.797 → 0.002782", "4.797 → 0.002782"] in page.cells
    assert _points(page.html, "loss-curve-0-1") == _points(page.html, "loss-curve-0-0")
    assert "var(--series-1)" in page.html
    assert {at.partition("/")[0] for at, _, _ in page.figures} == {"demo", "other"}
    assert "Proven: 45 of 45" in page.text
    assert "skill-train verify other" in page.text
    assert "other and demo: not the same run: the recipe differs" in page.text
    assert "recipe.learning_rate: 0.001 → 0.0005" in page.text
    assert "the losses of 100 steps are equal, so the curves coincide" in page.text
    assert "other held-out rows" not in page.text
    inputs = json.loads((other / "evaluate.json").read_text(encoding="utf-8"))["inputs"]
    edit(other, "evaluate", inputs=inputs | {"rows": "0" * 64})
    (other / "metrics.jsonl").unlink()  # curves take time to draw
    assert "the recipe differs; evaluated on other held-out rows" in make(run, other).text


def test_the_same_run_twice_is_said_and_both_curves_are_seen(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RECORDED.with_name("tiny"), tmp_path / "tiny"))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    page = make(run, other)
    assert "other and tiny: the same run: nothing of the recipe differs" in page.text
    assert "none of the recipe differ, none of the placement" in page.text
    assert "the trained weights are the same bytes" in page.text
    assert ["stroke-dasharray" in _curve(page.html, f"loss-curve-0-{n}") for n in (0, 1)] == [False, True]
    lines = (other / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    first["loss"] += 0.5
    (other / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]), encoding="utf-8")
    page = make(run, other)
    assert "the losses of 8 steps differ by up to 0.5, at step 1" in page.text
    assert "stroke-dasharray" not in _curve(page.html, "loss-curve-0-1")


def _curve(html: str, gid: str) -> str:
    found = re.search(rf'<g id="[^"]*{gid}">.*?</g>', html, re.DOTALL)
    assert found is not None
    return found[0]


def test_a_run_in_the_cloud_shows_its_jobs(plain: Path) -> None:
    run = plain
    job = {"number": 1, "state": "started", "job_id": "64f0", "url": "https://huggingface.co/jobs/ada/64f0"}
    job |= {"flavor": "a10g-small", "timeout_seconds": 7200, "usd_per_hour": 1.0, "asked_at": "2026-11-21T10:00:00Z"}
    spoofed = job | {"number": 2, "job_id": "64f1", "url": "javascript:alert(1)"}
    cloud = whole_records.cloud(job, bucket="ada/jobs-artifacts")
    (run / "cloud.json").write_text(json.dumps(cloud), encoding="utf-8")
    page = make(run)
    assert [
        "1",
        "64f0 open",
        "started",
        "a10g-small",
        "$1.00/h",
        "not known",
        "2 h",
        "2026-11-21T10:00:00Z",
    ] in page.cells
    assert "$0.0099 or more: what the training alone took" in page.text  # 35.73 s of an hour at one dollar
    ended = job | {"stage": "COMPLETED", "seconds": 93.0, "cost_usd": 0.0333}  # two minutes of a dollar an hour
    edit(run, "cloud", jobs=[ended])
    page = make(run)
    cells = ["1", "64f0 open", "COMPLETED", "a10g-small", "$1.00/h", "$0.033", "2 h", "2026-11-21T10:00:00Z"]
    assert cells in page.cells
    assert "what the training alone took" not in page.text
    edit(run, "cloud", jobs=[ended, ended | {"number": 2, "job_id": "64f1", "cost_usd": 0.5}])
    assert "$0.53 for 2 jobs" in make(run).text
    edit(run, "cloud", jobs=[job, spoofed])
    page = make(run)
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["https://huggingface.co/jobs/ada/64f0"]
    assert "the bill of the jobs says it" in page.text


def test_the_same_run_gives_the_same_page(run: Path, page: Page) -> None:
    assert make(run).html == page.html


def test_a_long_run_stays_small(run: Path) -> None:
    line = {
        "steps": 50_000,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "tokens_per_second": 100.0,
        "memory_bytes": {"rss": 1, "cuda": 2},
    }
    with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 50_001):
            file.write(json.dumps(line | {"step": step, "loss": 9.5 if step == 31_416 else 1 + step % 7 / 7}) + "\n")
    page = make(run)
    assert len(page.html) < 1_500_000
    points = _points(page.html, "loss-curve-0-0")
    assert len(points) <= 600
    assert [round(x) for x, y in points if y == min(y for _, y in points)]  # the spike is there
    assert "one in 250 of them and the last" in page.text


def test_something_that_is_not_a_report_is_not_replaced(run: Path) -> None:
    (run / "report.html").write_text("<html>mine</html>", encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        make(run)
    assert refused.value.code == "output_exists"
    assert (run / "report.html").read_text(encoding="utf-8") == "<html>mine</html>"
    with pytest.raises(UsageError) as refused:
        make(run, out=run)
    assert refused.value.code == "bad_usage"


def test_a_record_of_another_shape_is_named_as_such(run: Path) -> None:
    edit(run, "train", checks=[{"name": "model_loads"}])
    with pytest.raises(UsageError) as refused:
        make(run)
    assert refused.value.code == "broken_record"
    assert "verdict" in refused.value.got


def test_the_command_answers_with_one_document(run: Path, page: Page) -> None:
    (run / "evaluate.json").unlink()
    done = subprocess.run(
        [shared_runs.script(), "report", run.name, "--format", "json"], cwd=run.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["data"]["report"] == "demo/report.html"
    assert answer["data"]["bytes"] == (run / "report.html").stat().st_size
    assert answer["data"]["runs"][0]["headline"] == "Proven: 45 of 45 checks pass on 3 files, by the records alone"
    assert answer["next"] == ["skill-train evaluate demo"]
    elsewhere = subprocess.run(
        [shared_runs.script(), "report", run, "--format", "json"], cwd="/", capture_output=True, text=True
    )
    answer = json.loads(elsewhere.stdout)
    assert answer["next"] == [answer["data"]["runs"][0]["missing"][0]["command"]] == [f"skill-train evaluate {run}"]
    assert str(run.parent) not in (run / "report.html").read_text()
    refused = subprocess.run(
        [shared_runs.script(), "report", "nowhere"], cwd=run.parent, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["code"] == "not_a_run"


def test_one_run_twice_has_one_next_command(run: Path) -> None:
    (run / "evaluate.json").unlink()
    assert answered("report", run, run)[1]["next"] == [f"skill-train evaluate {run}"]


@pytest.mark.skipif(not containers.may_mount(), reason="needs a mount of its own")
def test_a_run_that_may_only_be_read_is_reported_elsewhere(run: Path) -> None:
    done = containers.run_read_only(run, [shared_runs.script(), "report", str(run), "--format", "json"])
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "system_error") and error["hint"].endswith("or use another --out")
    assert error["message"] == f"Read-only file system: {run / 'report.html'}"


def test_names_like_numbered_ones_are_told_apart_and_the_page_of_one_stays(plain: Path, tmp_path: Path) -> None:
    others = [tmp_path / "a" / "demo", tmp_path / "demo (2)"]
    for other in others:
        shutil.copytree(plain, other)
    code, answer = answered("report", plain)
    page = plain / "report.html"
    assert (code, answer["data"]["report"]) == (0, str(page))
    of_one = page.read_bytes()
    code, answer = answered("report", plain, *others)
    assert [each["run"] for each in answer["data"]["runs"]] == ["demo (1)", "demo (3)", "demo (2)"]
    assert (answer["data"]["report"], page.read_bytes()) == (str(plain / "compared.html"), of_one)


def test_without_its_libraries_it_says_what_to_install(run: Path, tmp_path: Path) -> None:
    done = light.run(light.installation(tmp_path / "site"), "report", str(run), "--format", "json")
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)["error"]["hint"] == 'pip install "skill-train[report]"'
    assert not (run / "report.html").exists()


def test_the_commands_on_the_page_exist(run: Path) -> None:
    for name in ("verify", "evaluate"):
        (run / f"{name}.json").unlink()
    named = [shlex.split(line) for line in re.findall(r"skill-train [a-z][^<\n]*", make(run).text)]
    assert len(named) >= 5
    for words in named:
        if words[1] == "report":  # in a sentence
            continue
        command = commands()[words[1]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_commands_that_export_again_can_be_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix is asked for by its size or its file, and a matrix of elsewhere by its file."""
    outputs = json.loads((run / "quantize.json").read_text())["outputs"]
    used, measured = outputs["gguf/demo-run-q8_0.gguf"], {"mean_kl": 0.01, "same_top1": 0.9, "tokens": 99}
    own, (other, third) = {"a": "q4_k"}, ({"a": "q5_k"}, {"a": "q6_k"})
    (source,) = (each["sha256"] for each in json.loads((run / "quantize.json").read_text())["inputs"].values())
    matrix = {"file": "imatrix.gguf", "sha256": "0" * 64, "model": source, "data": "training rows"}
    foreign = matrix | {"file": "my wiki.gguf", "model": ""}
    seen = {"file": "quantize.json", "sha256": "0" * 64, "mix": "auto-5bpw"}
    far = seen | {"file": "far.json", "mix": "auto-2.5mb"}
    for name, more in {
        "iq2_m": {"imatrix": matrix},
        "iq3_m": {"imatrix": foreign},
        "auto-5bpw": {"imatrix": matrix, "measured": measured, "tensor_types": own},
        "auto-1.23457mb": {"imatrix": foreign, "measured": measured, "tensor_types": other},
        "mix-1111": {"imatrix": matrix, "measured": measured, "tensor_types": own, "replayed": seen},
        "mix-2222": {"imatrix": matrix, "measured": measured, "tensor_types": third, "replayed": far},
    }.items():
        outputs[f"gguf/demo-run-{name}.gguf"] = used | {"bytes": len(outputs), "quant": name} | more
    edit(run, "quantize", outputs=outputs)
    (run.parent / "far.json").write_text(json.dumps({"schema": "skill-train/step/1", "outputs": {
        "gguf/far.gguf": used | {"quant": "auto-2.5mb", "tensor_types": third, "measured": measured}}}))  # fmt: skip
    monkeypatch.chdir(run.parent)
    lines = re.findall(r"skill-train export-gguf again ([^<\n]*)", html.unescape(make(run).html))
    asked = []
    for line in lines:
        words = commands()["export-gguf"].make_context("", ["again", *shlex.split(line)]).params
        options = ExportOptions(**{field.name: words[field.name] for field in dataclasses.fields(ExportOptions)})
        types, mix = wanted_types(options)
        asked.append((type_names(types), mix and mix.name, options.imatrix))
    assert [each for each in asked if each[0]] == [
        (["f16", "q8_0", "iq2_m"], None, None), (["q4_k_m"], None, "none"), (["iq3_m"], None, "my wiki.gguf")
    ]  # fmt: skip
    assert ([], "auto-5bpw", None) in asked and ([], "auto-1.23457mb", "my wiki.gguf") in asked
    assert [line for line in lines if "--mix" in line] == [
        "--mix far.json --max-size 2.5MB", "--mix demo/quantize.json --bits 5"]  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    if browser.found() is None:
        pytest.skip(f"none of {', '.join(browser.NAMES)} is on the path")
    with browser.Browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it_whole(chromium: browser.Browser, page: Page, width: int, dark: bool) -> None:
    seen = chromium.show(page.at, width=width, dark=dark)
    assert seen.problems == []
    assert seen.requests == [page.at.as_uri()]
    assert chromium.value("document.documentElement.scrollWidth") <= width
    shown = chromium.value("[...document.querySelectorAll('data')].map(d => [d.dataset.at, d.value, d.textContent])")
    assert [(at, json.loads(value), text) for at, value, text in shown] == page.figures
    assert chromium.value("document.querySelectorAll('figure svg path').length") > 20
    assert _contrast(chromium, "body") > 7
    assert _contrast(chromium, ".verdict > strong") > 4.5  # WCAG 2.2, 1.4.3
    assert _luminance(chromium.value("getComputedStyle(document.body).backgroundColor")) < 0.1 if dark else True


def test_a_browser_runs_nothing_of_a_hostile_run(chromium: browser.Browser, run: Path) -> None:
    train = json.loads((run / "train.json").read_text(encoding="utf-8"))
    edit(run, "train", example="<img src=https://evil.example/x onerror=\"document.title='run'\">⟦<script>1</script>⟧")
    (run / "evaluate.json").unlink()
    train["answer"]["after"] = "</div><iframe src=https://evil.example/></iframe>"
    edit(run, "train", answer=train["answer"])
    make(run)
    seen = chromium.show(run / "report.html", width=1280)
    assert seen.problems == []
    assert len(seen.requests) == 1
    assert chromium.value("document.images.length + document.scripts.length + window.length") == 0


def _poisoned(value: Any, payload: str, key: str = "") -> Any:
    """Each string, but the words that choose what is shown."""
    if isinstance(value, dict):
        return {name: _poisoned(item, payload, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, payload, key) for item in value]
    return value + payload if isinstance(value, str) and key not in ("verdict", "sha256", "how") else value


def _points(html: str, gid: str) -> list[tuple[float, float]]:
    drawn = re.search(rf'<g id="{gid}">\s*<path d="([^"]*)"', html)
    assert drawn is not None, gid
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", drawn[1])]


def _widest(path: str) -> float:
    xs = [float(x) for x in re.findall(r"[ML] (\S+) \S+", path)]
    return max(xs) - min(xs)


def _straight(drawn: list[float], values: list[float]) -> bool:
    """Whether one is a rising straight line in the other: the correlation is 1."""
    mean_d, mean_v = sum(drawn) / len(drawn), sum(values) / len(values)
    covariance = sum((d - mean_d) * (v - mean_v) for d, v in zip(drawn, values, strict=True))
    spread = math.sqrt(sum((d - mean_d) ** 2 for d in drawn) * sum((v - mean_v) ** 2 for v in values))
    return covariance / spread > 1 - 1e-6


def _luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(chromium: browser.Browser, selector: str) -> float:
    ground = chromium.value("getComputedStyle(document.body).backgroundColor")
    text = chromium.value(f"getComputedStyle(document.querySelector({selector!r})).color")
    light_one, dark_one = sorted((_luminance(ground), _luminance(text)), reverse=True)
    return (light_one + 0.05) / (dark_one + 0.05)
