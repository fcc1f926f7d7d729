"""The training program on a tiny Gemma: the files it leaves, the batch split, resuming, ends that it explains.

Runs are made in this process through the program's own `main`, except where a process is killed or interrupted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shared_runs
import tiny
import training
from skill_train.machine.training_program import train_program
from skill_train.program.events import Refused, readable
from skill_train.program.folders.checkpoints import is_complete
from skill_train.program.main import main
from skill_train.recipe.fields import OPTIMIZERS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_threads", "short_answers")]


# --- A whole run ---


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, dropout on, with a checkpoint every second step."""
    run = training.write_run(tmp_path_factory.mktemp("straight") / "run")
    assert main([str(run / "plan.json")]) == 0
    return run


def test_a_run_leaves_these_files(straight: Path) -> None:
    expected = {"plan.json", "environment.json", "samples.jsonl", "held_out.jsonl", "metrics.jsonl", "train.json"}
    assert {path.name for path in straight.iterdir()} == expected | {"checkpoints", "adapter"}
    assert {path.name for path in (straight / "adapter").glob("adapter*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert sorted(path.name for path in (straight / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-6",
        "checkpoint-8",
    ]
    assert not list(straight.rglob("*.part"))


def test_the_smoke_verdict_has_its_figures(straight: Path) -> None:
    record = json.loads((straight / "train.json").read_text())
    checks = {check["name"]: check for check in record["checks"]}
    names = ["model_loads", "batches_are_valid", "accumulation", "loss_falls", "checkpoint_saves", "adapter_reloads"]
    assert list(checks) == names
    assert record["verdict"] == "pass", record["checks"]
    assert checks["accumulation"]["figure"] < 1e-3 and checks["adapter_reloads"]["figure"] < 1e-4
    # r 16 on q (64 -> 128), k and v (64 -> 64) and o (128 -> 64) of two layers: 16 x (in + out) each
    assert checks["model_loads"]["figure"] == 2 * 16 * (192 + 128 + 128 + 192)
    assert checks["loss_falls"]["figure"] > 0
    # Random weights are surer of wrong tokens than a guess is: ln 640 = 6.4615 by hand.
    assert checks["loss_falls"]["detail"].endswith("the base is worse than blind guessing among 640 tokens, 6.4615")
    assert set(record["answer"]) == {"prompt", "before", "after"}
    assert "⟦" in record["example"] and record["example"].index("⟦") < record["example"].index("<end_of_turn>⟧")
    assert record["figures"]["peak_memory_bytes"]["rss"] > 0


def test_a_line_a_step(straight: Path) -> None:
    lines = training.metrics(straight)
    assert [line["step"] for line in lines] == list(range(1, training.STEPS + 1))
    assert all(line["loss"] > 0 and line["memory_bytes"]["rss"] > 0 for line in lines)
    # linear decay from 2e-4 over eight steps, no warm-up
    assert [line["learning_rate"] for line in lines] == pytest.approx([2e-4 * (1 - n / 8) for n in range(8)])


def test_rows_are_kept_as_they_were_fed(straight: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny.cached("gemma")))
    samples = [json.loads(line) for line in (straight / "samples.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (straight / "held_out.jsonl").read_text().splitlines()]
    assert (len(samples), len(held_out)) == (23, 1)
    assert {row["row"] for row in samples}.isdisjoint(row["row"] for row in held_out)
    for row in samples + held_out:
        assert row["kind"] == "chat"
        assert row["input_ids"] == tokenizer(row["rendered"], add_special_tokens=False)["input_ids"]
        assert row["rendered"] == tokenizer.apply_chat_template(row["messages"], tokenize=False)


def test_the_adapter_loads_with_peft_and_changes_the_answer(straight: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(tiny.cached("gemma")))
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, str(straight / "adapter"))(ids).logits
    assert float((before - after).abs().max()) > 1e-3


# --- The batch split ---


def test_the_batch_split_does_not_change_the_losses(tmp_path: Path) -> None:
    """Dropout off: it draws by batch. Rows differ in length, so averaging by batch instead of by token would show."""
    losses = []
    for rows, accumulated in ((4, 1), (2, 2), (1, 4)):
        run = training.write_run(
            tmp_path / f"{rows}x{accumulated}", split=(rows, accumulated, 1), max_steps=3, lora_dropout=0.0
        )
        assert main([str(run / "plan.json")]) == 0
        losses.append([line["loss"] for line in training.metrics(run)])
    assert len(losses[0]) == 3 and losses[0][0] != losses[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "down_proj"], "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"placement": {"dtype": "bfloat16"}},
    ],
    ids=["dora", "rslora", "a trained head", "other targets", "bfloat16"],
)
def test_other_ways_to_train_pass_the_smoke_test(tmp_path: Path, values: dict[str, Any]) -> None:
    run = training.write_run(
        tmp_path / "run", base=tiny.cached("gemma", tied=False), max_steps=4, learning_rate=2e-3, **values
    )
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    assert record["verdict"] == "pass", record["checks"]


def test_recomputing_activations_changes_no_loss(tmp_path: Path) -> None:
    losses = []
    for name, recompute in (("kept", False), ("recomputed", True)):
        run = training.write_run(tmp_path / name, max_steps=3, placement={"gradient_checkpointing": recompute})
        assert main([str(run / "plan.json")]) == 0
        assert json.loads((run / "environment.json").read_text())["trainer"]["gradient_checkpointing"] is recompute
        losses.append([line["loss"] for line in training.metrics(run)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_probe_times_both_precisions_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = training.write_run(tmp_path / "run")
    assert main([str(run / "plan.json"), "--probe"]) == 0
    (event,) = training.events(capsys.readouterr().out)
    assert event["event"] == "probe" and set(event) == {"event", "float32", "bfloat16"}
    assert all(event[name]["seconds"] > 0 for name in ("float32", "bfloat16"))
    assert event["bfloat16"]["loss"] == pytest.approx(event["float32"]["loss"], rel=0.02)
    assert [path.name for path in run.iterdir()] == ["plan.json"]


# --- Resuming ---


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed when it has told of its fifth step."""
    run = training.write_run(tmp_path_factory.mktemp("killed") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_WHOLE_ANSWERS", "1")  # as `straight` and `resumed`
        stopped = _stop_at(run, step=5, how=lambda process: process.kill())
    assert stopped == -signal.SIGKILL
    assert not (run / "train.json").exists() and not (run / "adapter").exists()
    return run


@pytest.fixture(scope="module")
def resumed(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the long answers of the program, as the two before it."""
    run = _copied(killed, tmp_path_factory.mktemp("resumed"))
    assert main([str(run / "plan.json"), "--resume"]) == 0
    return run


def test_a_killed_run_goes_on_to_the_same_bytes(resumed: Path, straight: Path) -> None:
    run = resumed
    assert _adapter(run) == _adapter(straight)
    lines = training.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, training.STEPS + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in training.metrics(straight)]
    record = json.loads((run / "train.json").read_text())
    assert record["steps"] == training.STEPS
    first = json.loads((straight / "train.json").read_text())
    assert record["answer"] == first["answer"]  # the answer before training is that of the first start


def test_what_a_resumed_run_took_is_of_all_its_starts(killed: Path, tmp_path: Path) -> None:
    """An hour for each step of the first start, before the checkpoint of step 4; the speed is that of the last one."""
    run = _copied(killed, tmp_path)
    slow = [line | {"seconds": 3600.0, "tokens_per_second": 0.01} for line in training.metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
    assert main([str(run / "plan.json"), "--resume"]) == 0
    lines, record = training.metrics(run), json.loads((run / "train.json").read_text())
    assert [line["start"] for line in lines] == [1] * 4 + [2] * 4
    assert 4 * 3600 < record["seconds"] < 4 * 3600 + 600
    own = lines[5:]  # the first of a start warms up
    assert record["figures"]["seconds_per_step"] == pytest.approx(sum(line["seconds"] for line in own) / 3, abs=1e-3)
    speed = sum(line["tokens"] for line in own) / sum(line["seconds"] for line in own)
    assert record["figures"]["tokens_per_second"] == pytest.approx(speed, rel=0.01)


@pytest.mark.parametrize("steps", [0, 3])
def test_lost_lines_come_from_the_checkpoint(straight: Path, tmp_path: Path, steps: int) -> None:
    """All was trained and saved but the adapter, and metrics.jsonl is gone, or a part of it: losses come back."""
    run, before = _copied(straight, tmp_path), training.metrics(straight)
    shutil.rmtree(run / "adapter")
    (run / "train.json").unlink()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before[:steps]))
    if not steps:
        (run / "metrics.jsonl").unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert _adapter(run) == _adapter(straight)
    names = ("step", "steps", "loss", "grad_norm", "learning_rate", "epoch", "tokens", "trained_tokens")
    lines = training.metrics(run)
    assert [[line[name] for name in names] for line in lines] == [[line[name] for name in names] for line in before]
    assert [line["seconds"] is None for line in lines] == [n >= steps for n in range(len(before))]
    figures, whole = (json.loads((path / "train.json").read_text())["figures"] for path in (run, straight))
    assert [figures[name] for name in ("first_loss", "last_loss")] == [whole["first_loss"], whole["last_loss"]]
    assert (figures["tokens_per_second"] is None) == (not steps)
    for command in (["report", str(run), "--out", str(run / "report.html")], ["diff", str(run), str(straight)]):
        done = subprocess.run([shared_runs.script(), *command, "--format", "json"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["optimizer.pt", "adapter_model.safetensors", "sha256.json"])
def test_a_checkpoint_that_was_damaged_at_the_same_size_is_left_out(
    killed: Path, straight: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of the weights would train on, and be in the result."""
    run = _copied(killed, tmp_path)
    saved = sorted((run / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    newest, older = saved[-1], saved[-2]
    content = bytearray((newest / name).read_bytes())
    content[-1 if name.endswith("json") else len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    assert main([str(run / "plan.json"), "--resume"]) == 0
    aside = f"damaged-{newest.name}"
    notes = [event["text"] for event in training.events(capsys.readouterr().out) if event["event"] == "note"]
    told = f"{newest.name} is damaged ({name}), is left out, and is now {aside}"
    assert notes == [told, f"resuming from {older.name}"]
    assert _adapter(run) == _adapter(straight)
    assert (run / "checkpoints" / aside / name).read_bytes() == bytes(content)


@pytest.mark.parametrize("torn", ["a byte", "a file", "the marker"])
def test_a_torn_checkpoint_is_left_out(
    killed: Path, straight: Path, tmp_path: Path, torn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _copied(killed, tmp_path)
    saved = sorted((run / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    newest, older = saved[-1], saved[-2]
    weights = newest / "adapter_model.safetensors"
    if torn == "a byte":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif torn == "a file":
        (newest / "optimizer.pt").unlink()
    else:
        (newest / "complete.json").unlink()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    notes = [event["text"] for event in training.events(capsys.readouterr().out) if event["event"] == "note"]
    assert notes == [f"{newest.name} is torn and is left out", f"resuming from {older.name}"]
    assert _adapter(run) == _adapter(straight)


@pytest.mark.parametrize("own", [{"learning_rate": 1e-5}, {"lora_r": 4}, {"finetuning_type": "full"}])
def test_a_checkpoint_of_another_recipe_is_refused(
    killed: Path, tmp_path: Path, own: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its schedule would go on, whatever this run asks for, or its weights would not fit."""
    run = training.write_run(tmp_path / "run", **own)
    shutil.copytree(killed / "checkpoints", run / "checkpoints")
    assert main([str(run / "plan.json"), "--resume"]) == 2
    error = training.events(capsys.readouterr().out)[-1]["error"]
    newest = run / "checkpoints" / "checkpoint-4"
    assert (error["code"], error["message"]) == ("another_run", "checkpoint-4 is of a run with another recipe")
    assert error["hint"] == f"move {newest} away, then skill-train local --resume --run-dir RUN"
    assert newest.is_dir()


def test_with_no_checkpoint_it_starts_again(straight: Path, tmp_path: Path) -> None:
    run = training.write_run(tmp_path / "run")
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert _adapter(run) == _adapter(straight)


def test_an_interrupted_run_saves_and_goes_on_to_the_same_bytes(straight: Path, tmp_path: Path) -> None:
    run = training.write_run(
        tmp_path / "run", save_steps=100
    )  # no checkpoint of its own: only the interruption saves one
    assert _stop_at(run, step=5, how=lambda process: process.send_signal(signal.SIGINT)) == 5
    failure = json.loads((run / "train.failed.json").read_text())
    assert (failure["exit_code"], failure["error"]["code"]) == (5, "interrupted")
    saved = list((run / "checkpoints").glob("checkpoint-*"))
    assert len(saved) == 1 and is_complete(saved[0])
    assert not (run / "train.json").exists()
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert _adapter(run) == _adapter(straight)
    assert [line["step"] for line in training.metrics(run)] == list(range(1, training.STEPS + 1))
    assert not (run / "train.failed.json").exists()


# --- Ends that are explained ---


def test_a_weight_that_is_no_number_ends_training(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run = training.write_run(tmp_path / "run", base=base)
    assert main([str(run / "plan.json")]) == 5
    assert _failure(run)["code"] == "bad_loss"
    assert "is nan at step 1" in _failure(run)["message"]
    assert not (run / "train.json").exists() and not (run / "adapter").exists()
    assert training.metrics(run)[0]["loss"] is None  # and the line is JSON


def test_a_learning_rate_beyond_reason_ends_training_and_keeps_what_was_saved(tmp_path: Path) -> None:
    run = _edited(training.write_run(tmp_path / "run", save_steps=1), learning_rate=1e17)  # a recipe refuses it
    assert main([str(run / "plan.json")]) == 5
    failure = _failure(run)
    assert failure["code"] == "bad_loss"
    assert "learning rate" in failure["message"] and "learning_rate" in failure["hint"]
    assert is_complete(run / "checkpoints" / "checkpoint-1")
    assert not (run / "train.json").exists()


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"hidden_size": -1}, {"rope_parameters": 5}], ids=str)
def test_a_config_that_fits_no_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    base = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "base"))
    run = training.write_run(tmp_path / "run", base=base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | change))
    assert main([str(run / "plan.json")]) == 2
    failure = _failure(run)
    assert (failure["code"], failure["message"]) == ("broken_model", f"{base} cannot be loaded")
    assert ": " in failure["got"] and failure["hint"]


def test_trouble_of_the_network_is_not_the_models() -> None:
    """Left as it is, a job's log tells of it, and the same job once more is what helps."""
    import httpx2

    with pytest.raises(httpx2.ReadTimeout), readable("me/model"):
        raise httpx2.ReadTimeout("the read operation timed out")
    with pytest.raises(RuntimeError), readable("me/model"):
        raise RuntimeError("cannot fetch") from httpx2.ConnectError("refused")
    with pytest.raises(Refused, match="me/model cannot be loaded"), readable("me/model"):
        raise RuntimeError("shapes differ") from ValueError("hidden_size")


def test_a_target_that_matches_nothing_names_what_there_is(tmp_path: Path) -> None:
    run = training.write_run(tmp_path / "run", target_modules=["q_proj", "c_attn"])
    assert main([str(run / "plan.json")]) == 2
    failure = _failure(run)
    assert (failure["code"], failure["got"]) == ("no_such_target", "c_attn")
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert failure["expected"] == "one of: " + ", ".join(names)


@pytest.mark.parametrize(
    ("values", "code", "got", "expected", "hint"),
    [
        ({"target_modules": ["q_proj", "mlp"]}, "no_such_target", "mlp (Gemma3MLP)", "up_proj", "target_modules"),
        ({"target_modules": ["input_layernorm"]}, "no_such_target", "Gemma3RMSNorm", "up_proj", "target_modules"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "no_such_target",
            "lm_head",
            "up_proj",
            "modules_to_save: [lm_head]",
        ),
        ({"modules_to_save": ["lm_hed"]}, "no_such_target", "lm_hed", "lm_head", "modules_to_save"),
        ({"modules_to_save": ["norm", ""]}, "no_such_target", "''", "lm_head", "modules_to_save"),
        ({"modules_to_save": ["act_fn"]}, "no_such_target", "act_fn", "lm_head", "modules_to_save"),
        ({"modules_to_save": ["layers"]}, "no_such_target", "layers", "lm_head", "modules_to_save"),
        *(
            ({"modules_to_save": [name], "target_modules": ["q_proj"]}, "bad_recipe", got, "beside", "target_modules")
            for name, got in (
                ("q_proj", "no module is left"),
                ("self_attn", "no module is left"),
                ("model", "no module is left"),
                ("attn", "model.layers.0.self_attn.q_proj"),
                ("_proj", "model.layers.0.self_attn.q_proj"),
            )
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_value_that_the_libraries_do_not_know_is_refused(
    tmp_path: Path, values: dict[str, Any], code: str, got: str, expected: str, hint: str
) -> None:
    run = training.write_run(tmp_path / "run", base=tiny.cached("gemma", tied=False), **values)
    assert main([str(run / "plan.json")]) == 2
    failure = _failure(run)
    assert failure["code"] == code
    assert got in failure["got"] and expected in failure["expected"] and hint in failure["hint"]
    assert not (run / "checkpoints").exists()


def test_an_optimizer_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    """In a plan that somebody wrote or edited: a recipe takes no such name."""
    run = _edited(training.write_run(tmp_path / "run"), optim="adamw_torhc")
    assert main([str(run / "plan.json")]) == 2
    failure = _failure(run)
    assert (failure["code"], failure["got"]) == ("bad_recipe", "adamw_torhc")
    assert "adamw_torch," in failure["expected"] and "'adamw_torch'" in failure["hint"]
    assert not (run / "samples.jsonl").exists()  # before anything is loaded


@pytest.mark.parametrize(
    ("optim", "torch_name"),
    list(zip(OPTIMIZERS, ("AdamW", "AdamW", "Adafactor", "Adagrad", "RMSprop", "SGD"), strict=True)),
)
def test_an_optimizer_that_a_recipe_may_name_trains(tmp_path: Path, optim: str, torch_name: str) -> None:
    """Without a package that skill-train does not install."""
    run = training.write_run(tmp_path / "run", max_steps=2, optim=optim)
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    assert not [check for check in record["checks"] if check["verdict"] == "fail"], record["checks"]
    built = json.loads((run / "environment.json").read_text())["optimizer"]
    assert built["class"] == torch_name
    assert all(group.get("fused") is True for group in built["groups"]) is (optim == "adamw_torch_fused")


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_is_a_target(tmp_path: Path, tied: bool) -> None:
    run = training.write_run(
        tmp_path / "run", base=tiny.cached("gemma", tied=tied), max_steps=4, learning_rate=2e-3,
        target_modules=["embed_tokens", "q_proj"],
    )  # fmt: skip
    assert main([str(run / "plan.json")]) == 0
    record = json.loads((run / "train.json").read_text())
    assert record["verdict"] == "pass", record["checks"]


def test_gpt2_trains_on_its_own_names(tmp_path: Path) -> None:
    data = training.write_data(tmp_path, [{"text": f"{n} and {n} is {2 * n}."} for n in range(6)])
    plan = training.write_plan(tmp_path / "run", tiny.cached("gpt2"), data, max_steps=2, effective_batch_size=2)
    assert main([str(plan)]) == 0
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"c_attn", "c_proj"} and config["fan_in_fan_out"] is True
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["verdict"] != "fail", record["checks"]
    assert not [check for check in record["checks"] if check["verdict"] == "fail"]


def test_the_loss_of_gpt2_is_the_mean_over_the_tokens_that_are_predicted(tmp_path: Path) -> None:
    """The first token of a text is trained by its label and predicted by nothing. transformers (5.23) counts it, of a
    model whose class is not called ...ForCausalLM: the loss of texts of two tokens was half of what it is."""
    import torch
    from transformers import AutoModelForCausalLM

    base, texts = tmp_path / "base", ["one", "one two three", "four", "five and six", "Seven is more than six", "eight"]
    shutil.copytree(tiny.cached("gpt2"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps(config | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0))
    )
    data = training.write_data(tmp_path, [{"text": text} for text in texts])
    plan = training.write_plan(tmp_path / "run", base, data, max_steps=1, effective_batch_size=6, split=(3, 2, 1))
    assert main([str(plan)]) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    model, losses = AutoModelForCausalLM.from_pretrained(base), []
    for row in map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines()):
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    assert line["trained_tokens"] == sum(map(len, losses))
    assert line["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def _edited(run: Path, **values: Any) -> Path:
    plan = json.loads((run / "plan.json").read_text())
    plan["recipe"] |= values
    (run / "plan.json").write_text(json.dumps(plan))
    return run


def _stop_at(run: Path, *, step: int, how: Callable[[subprocess.Popen[str]], None]) -> int:
    """Runs the program as a process, does `how` to it when it tells of a step, and returns its exit code."""
    command = [sys.executable, str(train_program()), str(run / "plan.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            event = next(iter(training.events(line)), {})
            if event.get("event") == "step" and event["step"] == step:
                how(process)
    return process.returncode


def _copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def _adapter(run: Path) -> str:
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def _failure(run: Path) -> dict[str, str]:
    failure = json.loads((run / "train.failed.json").read_text())
    return dict(failure["error"])
