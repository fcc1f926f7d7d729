"""`evaluate` on tiny real models: its losses against transformers' own, its answers against `generate`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import shared_runs
import step_records
import tiny
import tiny_families
import training
from planning import write_recipe_hash
from skill_train.core import resources
from skill_train.core.console import MAX_JSON_BYTES
from skill_train.core.digests import FileDigest, digests
from skill_train.core.errors import NotInstalled, UsageError
from skill_train.evaluate.backends import Model, Question, ask_llama_cpp, ask_transformers, ask_vllm, backend_of
from skill_train.evaluate.scores import Scoring
from skill_train.evaluate.step import ROOM, EvaluateRequest, evaluate, measure, questions
from skill_train.program.encode import Encoder
from skill_train.reference.load import load_tokenizer
from skill_train.run import records
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.export_record import ExportRecord
from skill_train.run.folder import StepResult
from skill_train.run.train_record import read_rows

pytestmark = pytest.mark.slow

KIND = "gemma"
FAKE_VLLM = Path(__file__).parent.parent / "support" / "fake_vllm"


@pytest.fixture(scope="module")
def made() -> gguf_maker.Export:
    return gguf_maker.exported(KIND)


@pytest.fixture(scope="module")
def run(made: gguf_maker.Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as training, merging and exporting leave it, with six held-out rows."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    data = training.write_data(folder.parent, tiny.rows(40))
    training.write_plan(folder, made.base, data, max_steps=1, score="regex", score_pattern=r"so (\d+)")
    write_rows(folder / "held_out.jsonl", encoded(made.base, data, 6))
    shutil.copytree(made.adapter, folder / "adapter")
    shutil.copytree(made.merged, folder / "merged")
    (folder / "gguf").mkdir()
    for file in made.ggufs:
        shutil.copy(file, folder / "gguf")
    write_trained(folder)
    merged = digests(folder, (folder / "merged").iterdir())
    records.write(folder / "merge.json", step_records.merged(digests(folder / "adapter"), merged))
    return folder


@pytest.fixture(scope="module")
def answered(run: Path) -> dict[str, Any]:
    """What `skill-train evaluate RUN` answers."""
    return call("evaluate", run)


def test_the_answer_has_every_model_and_fits(answered: dict[str, Any], made: gguf_maker.Export) -> None:
    data = answered["data"]
    names = ["base", "tuned", *(file.name for file in made.ggufs)]
    assert [one["name"] for one in data["models"]] == names
    assert {(one["model"], one["against"]) for one in data["differences"]} == {
        ("tuned", "base"),
        *((file.name, "tuned") for file in made.ggufs),
    }
    assert {one["measure"] for one in data["differences"]} == {"loss", "exact_match", "score"}
    assert all(one["low"] <= one["difference"] <= one["high"] for one in data["differences"])
    assert (data["rows"], data["asked"], data["score"], data["reused"]) == (6, 6, "regex", False)
    assert set(data["answers"][0]["answers"]) == set(names)
    assert len(json.dumps(answered, ensure_ascii=False).encode()) < MAX_JSON_BYTES and "shortened" not in answered
    assert [warning["code"] for warning in answered["warnings"]] == ["few_rows", "blind"]


def test_losses_are_those_of_transformers(answered: dict[str, Any], run: Path, made: gguf_maker.Export) -> None:
    figures = {one["name"]: one["loss"] for one in answered["data"]["models"]}
    rows = read_rows(run / "held_out.jsonl")
    assert figures["base"] == pytest.approx(own_loss(made.base, rows), rel=1e-5)
    assert figures["tuned"] == pytest.approx(own_loss(made.merged, rows), rel=1e-5)
    assert figures["base"] != pytest.approx(figures["tuned"], rel=1e-3)


def test_a_file_says_what_its_model_says(answered: dict[str, Any], made: gguf_maker.Export) -> None:
    """f16 holds these weights exactly; q8_0 keeps 8 bits of them, q4_k_m about 5."""
    figures = {one["name"]: one["loss"] for one in answered["data"]["models"]}
    away = {kind: abs(figures[made.file(kind).name] - figures["tuned"]) for kind in ("f16", "q8_0", "q4_k_m")}
    assert away["f16"] < 1e-3 < figures["tuned"]
    assert away["f16"] < away["q8_0"] < away["q4_k_m"] < 0.5


def test_the_record_holds_all_rows_and_is_used_again(answered: dict[str, Any], run: Path) -> None:
    record = json.loads((run / "evaluate.json").read_text(encoding="utf-8"))
    assert len(record["answers"]) == 6 and all(len(one["scores"]) == 5 for one in record["answers"])
    again = call("evaluate", run)
    assert again == answered | {"data": answered["data"] | {"reused": True}}  # with its warnings


def test_a_measurement_that_is_replaced_is_named(
    run: Path, answered: dict[str, Any], made: gguf_maker.Export, tmp_path: Path
) -> None:
    """A question on the side took the place of the figures that the report shows."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for options, words in (
        (("--rows", 2), ["2 rows replace a measurement on 6 rows; "]),
        (("--rows", 2, "--gguf", made.file("f16")), ["model-q8_0.gguf"]),
        ((), []),
    ):
        warned = [one["message"] for one in call("evaluate", copy, *options)["warnings"] if one["code"] == "replaced"]
        assert len(warned) == len(words) and all(word in warned[0] for word in words), warned


def test_a_pattern_that_no_expected_answer_has_is_told(run: Path, tmp_path: Path) -> None:
    """All scores were unknown, without a word. A record that is used again says it too."""
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("merged", "gguf", "evaluate.json"))
    for reused in (False, True):
        answer = call("evaluate", copy, "--rows", 2, "--score", "regex", "--pattern", "nowhere (.+)")
        assert answer["data"]["reused"] is reused
        assert {(one["score"], one["scored_rows"]) for one in answer["data"]["models"]} == {(None, 0)}
        warned = {warning["code"]: warning["message"] for warning in answer["warnings"]}
        assert warned["no_score"] == "no row could be scored: 'nowhere (.+)' finds nothing in any expected answer"


def test_rows_that_no_score_counts_are_named(run: Path, tmp_path: Path) -> None:
    """Answers of prose were 0 as JSON, without a word."""
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("merged", "gguf", "evaluate.json"))
    answer = call("evaluate", copy, "--rows", 2, "--score", "json")
    assert {(one["score"], one["scored_rows"]) for one in answer["data"]["models"]} == {(None, 0)}
    warned = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert warned["no_score"] == "no row could be scored: there is no JSON in any expected answer"
    (copy / "evaluate.json").unlink()
    rows = json.loads((run / "evaluate.json").read_text(encoding="utf-8"))["answers"]
    first, others = rows[0], [str(row["line"]) for row in rows[1:]]
    answer = call("evaluate", copy, "--score", "regex", "--pattern", f"^{re.escape(first['expected'])}$")
    assert {one["scored_rows"] for one in answer["data"]["models"]} == {1} and len(others) == 5
    warned = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert warned["no_score"].startswith("5 of 6 rows were not scored: ")
    assert warned["no_score"].endswith(f"finds nothing in the expected answer of line {', '.join(others)}")


def test_a_record_in_the_folder_of_the_base_is_found_again(made: gguf_maker.Export, run: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(made.base, tmp_path / "base"))
    rows = read_rows(run / "held_out.jsonl")[:2]
    first = step([Model("base", base)], rows, made, base)
    assert set(first.record.inputs.models["base"].model) == {path.name for path in made.base.iterdir()}
    assert step([Model("base", base)], rows, made, base) == StepResult(first.record, reused=True)


def test_an_adapter_that_is_not_merged_is_asked_on_its_base(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    """Other models than those of the record: measured again, and no GGUF file is needed."""
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("merged", "gguf"))
    answer = call("evaluate", copy, "--rows", 3, "--score", "json")
    data, rows = answer["data"], read_rows(run / "held_out.jsonl")
    assert [one["name"] for one in data["models"]] == ["base", "tuned"]
    assert (data["rows"], data["score"], data["reused"]) == (3, "json", False)
    assert data["models"][1]["loss"] == pytest.approx(own_loss(made.base, rows[::2], made.adapter), rel=1e-5)
    assert answer["next"] == [f"skill-train export-gguf {copy}", f"skill-train report {copy}"]
    assert all(one["says"] != "better" for one in data["differences"])  # three rows


def test_a_model_trained_whole_has_no_adapter(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    from skill_train.commands.evaluate import tuned_of
    from skill_train.run.folder import RunDir

    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("gguf", "adapter", "merge.json")))
    plan = json.loads((copy / "plan.json").read_text())
    plan["recipe"]["finetuning_type"] = "full"
    (copy / "plan.json").write_text(json.dumps(plan))
    write_recipe_hash(copy)
    assert tuned_of(RunDir(copy), made.base) == Model("tuned", copy / "merged")


def test_a_merge_of_an_earlier_adapter_is_not_the_tuned_model(
    run: Path, made: gguf_maker.Export, tmp_path: Path
) -> None:
    """Another recipe was trained in the folder, and what was made of the first one is still there."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copy / "adapter")
    tiny.adapter(made.base, copy / "adapter", seed=7, size=0.1)
    write_trained(copy)
    answer = call("evaluate", copy, "--rows", 3)
    rows = read_rows(run / "held_out.jsonl")[::2]
    assert answer["data"]["reused"] is False
    assert answer["data"]["models"][1]["loss"] == pytest.approx(own_loss(made.base, rows, copy / "adapter"), rel=1e-5)
    warned = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert f"no record shows that {copy / 'merged'} was made from the current adapter" in warned["other_adapter"]


def test_the_report_leaves_out_an_evaluation_of_a_merge_of_an_earlier_adapter(
    run: Path, answered: dict[str, Any], made: gguf_maker.Export, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    assert answered["data"]["models"][1]["name"] == "tuned"
    assert "other files than these" not in str(call("report", copy)["data"]["runs"][0]["missing"])
    shutil.rmtree(copy / "adapter")
    tiny.adapter(made.base, copy / "adapter", seed=7, size=0.1)
    write_trained(copy)
    assert "evaluated, but other files than these" in str(call("report", copy)["data"]["runs"][0]["missing"])


def test_a_file_of_an_earlier_merge_is_told(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    """In the words of `chat` and `serve`. Nothing is known of a file that lies elsewhere."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    inputs: dict[str, FileDigest] = {"model.safetensors": {"bytes": 1, "sha256": "earlier"}}
    records.write(copy / "convert.json", ExportRecord(inputs=inputs, outputs={}))
    own, other = next((copy / "gguf").iterdir()), made.file("f16")
    answer = call("evaluate", copy, "--rows", 2, "--gguf", own, "--gguf", other)
    said = [warning["message"] for warning in answer["warnings"] if warning["code"] == "other_adapter"]
    assert said == [f"{answer['data']['models'][2]['name']} was made of an earlier training of {copy}, by its records"]


def test_merged_weights_that_were_replaced_are_refused(run: Path, tmp_path: Path) -> None:
    """They stood as the tuned model."""
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("gguf")))
    weights = copy / "merged" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    error = call("evaluate", copy, "--rows", 2, code=2)["error"]
    assert (error["code"], error["message"]) == (
        "output_changed",
        f"{weights} is not the file that merge.json describes",
    )
    assert error["hint"].endswith(f"skill-train merge {copy}")


def test_a_run_without_held_out_rows_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("merged", "gguf"))
    write_rows(copy / "held_out.jsonl", [])
    assert call("evaluate", copy, code=2)["error"]["code"] == "no_held_out"


def test_a_bad_scorer_ends_before_any_model_is_asked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, answer, expected):\n    return answer.no_such_thing\n")
    error = call("evaluate", run, "--scorer", tmp_path / "mine.py", code=2)["error"]
    assert error["code"] == "bad_scorer" and "line 2" in error["got"]


@pytest.mark.parametrize("kind", ["gpt2", "llama-spm", "phi3"])
def test_losses_of_other_architectures_too(kind: str) -> None:
    base = tiny.cached(kind)
    ids = [(7 * n * n + 3 * n) % 90 + 5 for n in range(40)]
    rows = [{"input_ids": ids[n:], "labels": [-100] * 9 + ids[n + 9 :]} for n in range(2)]
    asked = [Question(row["input_ids"], list(range(9, len(row["input_ids"]))), [], [], 0) for row in rows]
    got = ask_transformers(Model("base", base), asked, lambda share: None)
    assert sum(got.losses) / sum(len(one.trained) for one in asked) == pytest.approx(own_loss(base, rows), rel=1e-5)


def test_answers_are_greedy_whatever_generation_config_says(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    """Published models have penalties there, which llama.cpp knows nothing of. Its end tokens count."""
    model = shutil.copytree(made.merged, tmp_path / "model")
    config = json.loads((model / "generation_config.json").read_text())
    penalties = {"repetition_penalty": 1.8, "do_sample": True, "temperature": 0.7}
    end = own_answers(made.merged, held_out(run)[:1])[0][2]  # the third token of the first answer
    (model / "generation_config.json").write_text(json.dumps(config | penalties | {"eos_token_id": [end]}))
    got = ask_transformers(Model("tuned", model), held_out(run), lambda share: None)
    assert got.answers == own_answers(made.merged, held_out(run), eos_token_id=end)
    assert len(got.answers[0]) <= 3
    assert got.answers != own_answers(made.merged, held_out(run), eos_token_id=end, repetition_penalty=1.8)


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "granitehybrid"])
def test_rows_that_are_answered_together_get_the_answers_that_they_get_alone(name: str) -> None:
    """A sliding window, experts, and a state that padding would change. Prompts of three lengths, of which 20 are
    alike; some answers end at a stop token, others at their own limit."""
    base = tiny_families.folder(name)
    asked = []
    for number, length in enumerate([30] * 20 + [7, 90, 7]):
        ids = [(5 * number * number + 3 * at * at + at) % 400 + 20 for at in range(length)]
        asked.append(Question(ids, [length - 1], ids, [], 3 + number % 5 * 3))
    asked.insert(4, Question([5, 6, 7], [2], [], [], 0))  # asks nothing
    got = ask_transformers(Model("base", base), asked, lambda share: None).answers
    alone = own_answers(base, [one for one in asked if one.prompt])
    alone.insert(4, [])
    assert got == alone
    assert len({len(answer) for answer in got}) > 3


def test_a_special_token_inside_an_answer_is_a_part_of_it() -> None:
    """Such as the one that begins a call of a tool: the texts alone, without it, are equal."""
    model = Model("demo", resources.demo() / "model")
    tokenizer = load_tokenizer(model.path)
    prompt = tokenizer("<|im_start|>user\nWhere is 5?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    asked = Question([*prompt, prompt[0]], [len(prompt)], prompt, [], 12)
    [own] = ask_transformers(model, [asked], lambda share: None).answers
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert len(own) > 2 and special not in own

    def right(answer: list[int]) -> list[float]:
        told = {"scoring": Scoring(), "backend": "transformers", "progress": lambda *_: None}
        return measure(model, [dataclasses.replace(asked, answer=answer)], tokenizer=tokenizer, **told).exact

    assert right(own) == right([*own, special]) == [1.0]  # what ends an answer is no part of it
    assert right([special, *own]) == right([*own[:1], special, *own[1:]]) == [0.0]


def test_a_base_that_does_not_know_every_token_is_left_out(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    """As when the tuning added tokens to the vocabulary."""
    rows = read_rows(run / "held_out.jsonl")[:4]
    rows[1]["input_ids"][3] = 700
    models = [Model("base", made.base), Model("tuned", tiny.cached("phi3"))]
    evaluation = step(models, rows, made, tmp_path).record
    base, tuned = evaluation.models
    assert (base.loss, base.exact_match) == (None, None)
    assert base.reason == "it knows 640 tokens, and the rows use number 700"
    assert tuned.loss > 0 and evaluation.differences == []


def test_a_file_of_another_vocabulary_is_not_asked(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    """It read other words under the same ids, and got a loss. Beyond its tokens llama.cpp failed in its midst."""
    rows = read_rows(run / "held_out.jsonl")[:2]
    models = [Model("own", made.file("q4_k_m")), Model("other", gguf_maker.exported("llama-spm").file("q8_0"))]
    own, other = step(models, rows, made, tmp_path).record.models
    assert own.loss > 0 and own.reason == ""
    assert other.loss is None and other.reason.startswith("it has other texts than the base for ")
    rows[1]["input_ids"][3] = 700
    (own,) = step(models[:1], rows, made, tmp_path).record.models
    assert (own.loss, own.reason) == (None, "it knows 640 tokens, and the rows use number 700")


def test_whole_texts_have_a_loss_and_no_answers(run: Path, made: gguf_maker.Export, tmp_path: Path) -> None:
    rows = [row | {"kind": "text", "labels": row["input_ids"]} for row in read_rows(run / "held_out.jsonl")[:4]]
    warned: list[str] = []
    models = [Model("base", made.base), Model("q8", made.file("q8_0"))]
    found = step(models, rows, made, tmp_path, warned, "all").record
    assert found.models[0].loss == pytest.approx(own_loss(made.base, rows), rel=1e-5)
    assert [one.exact_match for one in found.models] == [None, None]
    assert (found.asked, found.answers, warned) == (0, [], ["no_questions", "few_rows"])


def test_vllm_is_asked_for_where_there_is_none(made: gguf_maker.Export) -> None:
    with pytest.raises(NotInstalled, match="vllm is not installed"):
        backend_of(Model("base", made.base), "vllm")
    assert backend_of(Model("base", made.base), "auto")[0] is ask_transformers
    assert backend_of(Model("file", made.ggufs[0]), "vllm")[0] is ask_llama_cpp


def test_vllm_gives_what_transformers_gives(
    run: Path, made: gguf_maker.Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through a stand-in with vLLM's names, in the worker's own process: vLLM itself needs CUDA. The model has no more
    context than the rows and their answers need."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_VLLM), prepend=":")
    asked = held_out(run)
    longest = max(len(question.prompt) + question.most for question in asked)
    assert longest > max(len(question.ids) for question in asked)
    folder = Path(shutil.copytree(made.merged, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
    model = Model("tuned", folder)
    got, wanted = (ask(model, asked, lambda share: None) for ask in (ask_vllm, ask_transformers))
    assert got.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert got.answers == wanted.answers
    monkeypatch.syspath_prepend(str(FAKE_VLLM))
    with pytest.raises(UsageError) as caught:  # it is "installed" now, and there is no CUDA
        backend_of(model, "vllm")
    assert caught.value.code == "bad_usage"
    assert backend_of(model, "auto") == (ask_transformers, "there is no CUDA")


def step(
    models: list[Model],
    rows: list[dict[str, Any]],
    made: gguf_maker.Export,
    folder: Path,
    warned: list[str] | None = None,
    loss_on: str = "assistant",
) -> StepResult[Evaluation]:
    told = [] if warned is None else warned
    return evaluate(
        EvaluateRequest(
            models=models,
            rows=rows,
            loss_on=loss_on,
            most_rows=100,
            tokenizer_of=made.merged,
            scoring=Scoring(),
            backend="auto",
            record=folder / "evaluate.json",
        ),
        progress=lambda done, total, text: None,
        warn=lambda code, message: told.append(code),
    )


def held_out(run: Path) -> list[Question]:
    return questions(read_rows(run / "held_out.jsonl")[:4], loss_on="assistant", room=ROOM, context=None)


def encoded(base: Path, data: Path, count: int) -> list[dict[str, Any]]:
    """The first rows as the training program writes them."""
    from transformers import AutoTokenizer

    encode = Encoder(training.resolved(base, data), AutoTokenizer.from_pretrained(str(base)))
    lines = data.read_text(encoding="utf-8").splitlines()[:count]
    return [encode(number, number + 1, json.loads(line)) for number, line in enumerate(lines)]


def write_trained(run: Path) -> None:
    outputs = digests(run, (run / "adapter").iterdir())
    records.write(run / "train.json", step_records.trained(outputs))
    write_recipe_hash(run)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def own_loss(folder: Path, rows: list[dict[str, Any]], adapter: Path | None = None) -> float:
    """Mean over all trained tokens, of the loss that transformers itself returns for labels."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    total, tokens = 0.0, 0
    for row in rows:
        count = sum(label != -100 for label in row["labels"][1:])
        with torch.no_grad():
            out = model.eval()(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]]))
        total, tokens = total + float(out.loss) * count, tokens + count
    return total / tokens


def own_answers(folder: Path, asked: list[Question], **options: Any) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model, answers = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32), []
    for one in asked:
        ids = torch.tensor([one.prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=one.most, **options)
        answers.append(out[0, len(one.prompt) :].tolist())
    return answers


def call(*words: Any, code: int = 0) -> dict[str, Any]:
    command = [shared_runs.script(), *map(str, words), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
