"""`skill-train data --model` with real tokenizers: its counts are those of training, and its output trains."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
import training
from one_command import answered
from skill_train.data import scan as dataset
from skill_train.data import token_stats
from skill_train.program.main import load_data
from skill_train.program.tokenizer import load_tokenizer
from skill_train.recipe.fields import Recipe

pytestmark = pytest.mark.slow

MAIN = ["-c", "from skill_train.cli import main; main()"]
USER, BOT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))


def test_counts_are_those_of_training(tmp_path: Path) -> None:
    """`load_data` is what training itself calls; at 40 tokens some rows are cut, at 1024 none."""
    model, path = tiny.cached("llama-chatml"), tiny.write_rows(tmp_path / "rows.jsonl", 60)
    recipe = {
        "model": str(model), "revision": None, "data": str(path), "data_revision": None, "data_config": None,
        "split": "train", "format": "messages", "columns": {"messages": "messages"}, "loss_on": "assistant",
        "max_length": 1024, "held_out_fraction": 0.0, "skip_untrained_rows": True, "seed": 1, "max_steps": 1,
        "effective_batch_size": 1,
    }  # fmt: skip
    tokenizer = load_tokenizer(recipe["model"], recipe["revision"])
    whole = load_data(recipe, tokenizer)["figures"]
    cut = load_data(recipe | {"max_length": 40}, tokenizer)
    code, answer = answered("data", path, "--model", model, "--max-length", 40)
    figures, problems = answer["data"]["tokens"], answer["data"]["problems"]
    assert (figures["counted"], figures["basis"]) == (True, "counted in all rows")
    assert figures["mean"] == round(whole["tokens"] / 60, 1)
    assert figures["longest"] == whole["longest_row_tokens"]
    assert figures["trained_share"] == whole["trained_token_share"]
    assert problems["fully_masked"]["rows"] == cut["figures"]["skipped_rows"]
    longer = [len(row["input_ids"]) for row in load_data(recipe, tokenizer)["train"]]
    assert problems["truncated"]["rows"] == sum(length > 40 for length in longer) > 0
    assert code == (2 if cut["figures"]["skipped_rows"] else 0)


# What a template does to these rows alone: the trial, with conversations of our own, sees nothing of it.
AT_ROWS = "{% if 'What' in messages[0].content %}"
ENDLESS = {
    "a loop a row": "{% for i in range(9999) %}{% for j in range(20) %}{% endfor %}{% endfor %}",
    "one loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ (messages|length + 7) ** (10 ** 8) > 5 }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_long_with_the_rows_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for all rows together: one that takes a tenth of a second for each would take minutes."""
    monkeypatch.setattr("skill_train.program.encode.TEMPLATE_SECONDS", 0.5)
    model = Path(shutil.copytree(tiny.cached("llama-chatml"), tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink(missing_ok=True)
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    config["chat_template"] = AT_ROWS + ENDLESS[name] + "{% endif %}" + plain
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}, BOT]} for n in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = time.thread_time()
    code, answer = answered("data", path, "--model", model)
    assert (code, answer["error"]["code"]) == (2, "unsafe_file")
    assert str(model) in answer["error"]["message"]
    assert time.thread_time() - started < 10


def test_the_range_holds_what_is_counted(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", 60)
    figures = answered("data", path)[1]["data"]["tokens"]
    for kind in ("qwen2", "llama-chatml", "mistral"):
        counted = answered("data", path, "--model", tiny.cached(kind))[1]["data"]["tokens"]
        for name in ("mean", "longest", "mean_cut"):
            assert figures[name][0] <= counted[name] <= figures[name][1], (kind, name)


def test_the_plan_finds_what_was_counted(tmp_path: Path) -> None:
    model, path = tiny.cached("llama-chatml"), tiny.write_rows(tmp_path / "rows.jsonl", 30)
    key = token_stats.tokenizer_key(str(model), None)
    facts = dataset.scan(Recipe(data=str(path)))
    assert token_stats.known_tokens(facts, key, split="train", loss_on=None, max_length=40) is None
    counted = answered("data", path, "--model", model)[1]["data"]["tokens"]
    counts = token_stats.known_tokens(facts, key, split="train", loss_on="assistant", max_length=1024)
    assert counts is not None
    assert (round(counts.mean[0], 1), counts.longest[0], counts.counted) == (counted["mean"], counted["longest"], True)
    shorter = token_stats.known_tokens(facts, key, split="train", loss_on=None, max_length=30)
    assert shorter is not None
    assert shorter.mean_cut[0] <= 30


def test_rows_that_the_template_refuses_are_left_out(tmp_path: Path) -> None:
    """Mistral's template wants user and assistant in turn; ChatML takes two in a row."""
    conversations = [[USER, BOT], [USER, USER, BOT], [USER, BOT, USER, BOT]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    assert answered("data", path, "--model", tiny.cached("llama-chatml"))[0] == 0
    code, answer = answered("data", path, "--model", tiny.cached("mistral"))
    assert (code, answer["data"]["problems"]["template"]["lines"]) == (2, [2])
    code, answer = answered("data", path, "--model", tiny.cached("mistral"), "--fix", tmp_path / "out.jsonl")
    assert (code, answer["data"]["fix"]["left_out"]) == (0, {"template": 1})


@pytest.mark.parametrize("sample", [2000, 4])
def test_what_the_tokenizer_refuses_is_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    """The template refuses 2 rows of 8; of 2 more nothing is left to train on. A part of the rows tells no number."""
    monkeypatch.setattr("skill_train.data.count_tokens.SAMPLE", sample)
    late = [USER | {"content": "2 " * 90}, BOT]
    conversations = [[USER, BOT], [USER, USER, BOT], late, [USER, BOT]] * 2
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    answer = answered("data", path, "--model", tiny.cached("mistral"), "--max-length", 40)[1]["data"]
    problems, usable = answer["problems"], answer["usable_rows"]
    template, masked = problems["template"], problems["fully_masked"]
    if sample == 2000:
        assert (usable, template["rows"], template.get("of_rows")) == (4, 2, None)
        assert (masked["rows"], masked["of_rows"]) == (2, 6)
        assert "usable_rows" not in answer["unknown"]
    else:  # rows 1, 3, 5 and 7
        assert (usable, template["rows"], template["of_rows"]) == (None, 0, 4)
        assert (masked["rows"], masked["of_rows"]) == (2, 4)
        assert answer["unknown"]["usable_rows"] == "2 of the 4 rows that were tokenized would be rejected"


def test_a_template_that_refuses_each_row_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [USER, USER, BOT]}) + "\n")
    told = answered("data", tmp_path / "rows.jsonl", "--model", tiny.cached("mistral"))[1]
    answer = told["data"]
    assert told["error"]["hint"].startswith("no row can be used, so --fix would leave none")
    assert (answer["usable_rows"], answer["problems"]["template"]["rows"]) == (0, 1)
    assert answer["problems"]["truncated"]["of_rows"] == 0


def test_the_example_shows_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [USER, BOT]}) + "\n")
    answer = answered("data", tmp_path / "rows.jsonl", "--model", tiny.cached("llama-chatml"))[1]
    assert "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧" in answer["data"]["example"]


def test_a_model_without_a_template_is_refused_with_the_report(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", 3)
    code, answer = answered("data", path, "--model", tiny.cached("gpt2"))
    assert (code, answer["error"]["code"], answer["data"]["rows"]) == (2, "no_chat_template", 3)


def test_a_model_without_a_tokenizer_is_refused_with_the_report(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of the model's type, whose rows have one token each."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny.cached("llama-chatml") / name, model / name)
    code, answer = answered("data", tiny.write_rows(tmp_path / "d.jsonl", 30), "--model", model)
    assert (code, answer["error"]["code"]) == (2, "bad_tokenizer")
    assert (answer["data"]["rows"], answer["next"]) == (30, [])


def test_a_cache_without_the_tokenizer_is_no_count(tmp_path: Path) -> None:
    """A model of the Hub of which nothing but config.json is at hand, and no network: `plan` must not take one token a
    row for counted. In a process of its own, because the Hub's client reads its environment once."""
    cached = tmp_path / "hf" / "hub" / "models--owner--name"
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots" / ("a" * 40) / "config.json").write_bytes(
        (tiny.cached("llama-chatml") / "config.json").read_bytes()
    )
    rows = tiny.write_rows(tmp_path / "rows.jsonl", 30)
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    words = [sys.executable, *MAIN, "data", str(rows), "--model", "owner/name", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["data"]["tokens"]["counted"]) == (0, False), done.stderr
    assert "hub_unreachable" in [warning["code"] for warning in answer["warnings"]]
    assert list((tmp_path / "cache").rglob("*.json")) == []


def test_an_answer_that_is_always_cut_away_asks_for_more_length(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", 5)
    code, answer = answered("data", path, "--model", tiny.cached("llama-chatml"), "--max-length", 4)
    assert (code, answer["data"]["problems"]["fully_masked"]["rows"]) == (2, 5)
    assert answer["error"]["hint"].startswith("raise --max-length")
    assert "truncated" in [warning["code"] for warning in answer["warnings"]]


def test_no_length_that_the_model_does_not_have_is_advised(tmp_path: Path) -> None:
    """The tiny model has 2048 positions. It said to raise --max-length to the length of the longest row."""
    path, words = tmp_path / "rows.jsonl", ("--model", tiny.cached("llama-chatml"), "--max-length")
    for asked, length, hint in (
        (10, 4, "raise --max-length: the longest row has "),
        (1000, 4, "raise --max-length to 2048, the positions of the model, and part longer rows"),
        (3000, 4, "shorten what stands before the answers: they begin at token 3"),
        (3000, 2048, "shorten what stands before the answers: they begin at token 3"),
    ):
        answer = {"role": "assistant", "content": "four " * (10 if asked == 10 else 2000)}
        row = {"messages": [{"role": "user", "content": "word " * asked}, answer]}
        path.write_text(f"{json.dumps(row)}\n" * 3)
        code, said = answered("data", path, *words, length)
        assert (code, said["data"]["problems"]["fully_masked"]["rows"]) == (2, 3)
        assert said["error"]["hint"].startswith(hint)
        assert ("the model has 2048 positions" in said["error"]["hint"]) == (asked == 3000)


def test_rows_beyond_the_positions_of_the_model_are_to_be_parted(tmp_path: Path) -> None:
    """The tiny model has 2048 positions."""
    rows = [{"messages": [USER, {"role": "assistant", "content": "four " * 3000}]}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("--model", tiny.cached("llama-chatml"), "--max-length")
    for length in (2048, 1024):
        code, answer = answered("data", tmp_path / "rows.jsonl", *words, length)
        warned = {warning["code"]: warning["message"] for warning in answer["warnings"]}
        assert code == 0 and "has 2048 positions: raise it no further, and part" in warned["truncated"]


def test_a_model_out_of_reach_leaves_the_report_and_a_recipe_gives_the_mapping(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"Frage": "2+2?", "Antwort": "4", "text": "not this"}\n')
    mapping = "format: prompt_completion\ncolumns: {prompt: Frage, completion: Antwort}\n"
    (tmp_path / "r.yaml").write_text("model: owner/name\ndata: rows.jsonl\n" + mapping)
    code, answer = answered("data", "--recipe", tmp_path / "r.yaml")
    assert (code, answer["data"]["example"]) == (0, "2+2?⟦4⟧")
    assert [warning["code"] for warning in answer["warnings"]] == ["hub_unreachable"]
    assert answer["data"]["tokens"]["counted"] is False


def test_the_fixed_file_trains(tmp_path: Path) -> None:
    """Broken, empty, repeated and cut-away rows go; what stays is planned and trained by `local`."""
    model, path, out = tiny.cached("gemma"), tiny.write_rows(tmp_path / "rows.jsonl", 24), tmp_path / "out.jsonl"
    question = {"role": "user", "content": "how many " * 200}
    bad = ["{", "[1]", '{"messages": []}', json.dumps({"messages": [question, BOT]}), path.read_text().splitlines()[0]]
    path.write_text(path.read_text() + "\n".join(bad))
    code, answer = answered("data", path, "--model", model, "--max-length", 256, "--fix", out)
    left_out = {"broken_json": 1, "not_an_object": 1, "empty": 1, "fully_masked": 1, "duplicate": 1}
    assert (code, answer["data"]["fix"]["left_out"], answer["data"]["fix"]["rows"]) == (0, left_out, 24)
    assert answered("data", out, "--model", model, "--max-length", 256)[0] == 0
    words = answer["next"][0].split()[1:]
    assert words[0] == "plan"
    done = _call("local", *words[1:], "--max-steps", 2, "--run-dir", tmp_path / "run")
    assert done.returncode in (0, 5), done.stderr  # two steps on random weights may fail the smoke test
    assert json.loads((tmp_path / "run" / "train.json").read_text())["data"]["rows"] == 24


def test_a_large_dataset_is_sampled_and_the_longest_row_still_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for number in range(5000):
            text = "word " * (300 if number == 4001 else 5)
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    answer = answered("data", path, "--model", tiny.cached("llama-chatml"))[1]["data"]
    assert answer["tokens"]["basis"] == "counted in 2000 of 5000 rows"
    assert answer["tokens"]["longest"] > 300 > answer["tokens"]["p99"]
    assert answer["tokens"]["histogram"][-1]["up_to"] <= 32  # row 4001 is not among every 2.5th


def _call(*arguments: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *MAIN, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))


@pytest.mark.parametrize("mapping", ["", "columns: {question: Frage, answer: Antwort}\n"])
def test_the_next_command_for_a_written_file_keeps_the_settings_of_the_recipe(tmp_path: Path, mapping: str) -> None:
    """Without the recipe, another learning rate and other epochs would train the file."""
    asked, said = ("Frage", "Antwort") if mapping else ("question", "answer")
    rows = [{asked: f"{n}+2?", said: f"It is {n + 2}.", "note": "n"} for n in range(12)]
    path, recipe = training.write_data(tmp_path, [*rows, {asked: "", said: "4"}]), tmp_path / "my recipe.yaml"
    settings = "split: train[:100]\nlearning_rate: 0.003\nnum_train_epochs: 2\nheld_out_fraction: 0.25\n"
    model = tiny.cached("llama-chatml")
    recipe.write_text(f"data: {path}\nmodel: {model}\nformat: question_answer\n{mapping}{settings}")
    new = tmp_path / "new.jsonl"
    _, answer = answered("data", "--recipe", recipe, "--fix", new)
    words = shlex.split(answer["next"][0])
    assert words[:5] == ["skill-train", "plan", str(recipe), "--data", str(new)]
    code, _ = answered(*words[1:], "--out", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    planned = plan["recipe"]
    assert (code, plan["facts"]["dataset"]["rows"], planned["data"], planned["split"]) == (0, 12, str(new), "train")
    kept = (planned["learning_rate"], planned["held_out_fraction"])
    assert kept == (0.003, 0.25)


@pytest.mark.parametrize("command", ["plan", "local"])
def test_the_command_that_leaves_a_row_out_names_the_recipe_with_the_mapping(tmp_path: Path, command: str) -> None:
    """It can be pasted, and does what it says."""
    path = training.write_data(tmp_path, [{"q": "2+2?", "a": "4"}, {"q": "", "a": "4"}])
    recipe = tmp_path / "my recipe.yaml"
    model = tiny.cached("llama-chatml")
    recipe.write_text(f"data: {path}\nmodel: {model}\nformat: question_answer\ncolumns: {{question: q, answer: a}}\n")
    hint = answered(command, recipe)[1]["error"]["hint"]
    words = shlex.split(hint.partition("skill-train ")[2])
    assert words[:3] == ["data", "--recipe", str(recipe)]
    code, answer = answered(*words)
    assert (code, answer["data"]["fix"]["rows"]) == (0, 1)
