"""What lies in the sandbox of each task. A function returns the facts that its grader has to know.

The model is the demo's embedded one (1 million parameters, trains and exports in seconds on two cores); where only a
plan is asked for, the published configuration of a 7B model without its weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from box import DEMO, Box, demo_rows, digest, read_rows, write_rows

from skill_train.core import resources
from skill_train.run import lock as run_lock
from skill_train.run.folder import RunDir

# Its config.json as published: 7,615,616,512 parameters. There are no weights: it is only planned with.
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
SEVEN = "Qwen/Qwen2.5-7B-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of a model that is in the cache
BROKEN_TEMPLATE = (b"<|im_start|>assistant\\n", b"<|im_start|>bystander\\n")  # of the same length
KILLED_AFTER = 10  # steps


def tickets(box: Box) -> dict[str, Any]:
    _base(box)
    write_rows(box.work / "tickets.jsonl", demo_rows())
    return {"tickets": digest(box.work / "tickets.jsonl")}


def pictures(box: Box) -> dict[str, Any]:
    """The demo's vision model and its drawn squares."""
    demo = resources.demo("vision")
    shutil.copytree(demo / "model", box.work / "base")
    shutil.copyfile(demo / "data.parquet", box.work / "pictures.parquet")
    return {"pictures": digest(box.work / "pictures.parquet")}


def preference_rows(box: Box) -> dict[str, Any]:
    numbers = range(1000, 1040)
    rows = [
        {"prompt": f"Where is order {n}?", "chosen": f"Order {n} left our house.", "rejected": f"No idea about {n}."}
        for n in numbers
    ]
    write_rows(box.work / "prefs.jsonl", rows)
    return {"prefs": digest(box.work / "prefs.jsonl")}


def bad_rows(box: Box) -> dict[str, Any]:
    rows = demo_rows()[:43]
    broken = list(rows)
    broken[7] = {"messages": rows[7]["messages"][:1]}  # nobody answers
    broken[19] = {"messages": [rows[19]["messages"][0], {"role": "assistant", "content": ""}]}
    broken[31] = {"mesages": rows[31]["messages"]}
    write_rows(box.work / "tickets.jsonl", broken)
    kept = [row for number, row in enumerate(rows) if number not in (7, 19, 31)]
    return {"tickets": digest(box.work / "tickets.jsonl"), "kept": kept}


def no_token(box: Box) -> dict[str, Any]:
    _in_cache(box, "acme/desk-1m", DEMO / "model")
    write_rows(box.work / "tickets.jsonl", demo_rows()[:200])
    recipe = "model: acme/desk-1m\ndata: tickets.jsonl\nmax_steps: 100\nhub_model_id: acme/tickets-1m\n"
    return _recipe(box, recipe)


def budget(box: Box) -> dict[str, Any]:
    _seven_billion(box)
    return _recipe(box, f"model: {SEVEN}\ndata: rows.jsonl\nmax_steps: 12000\nhub_model_id: acme/tickets-7b\n")


def private(box: Box) -> dict[str, Any]:
    _seven_billion(box)
    return _recipe(box, f"model: {SEVEN}\ndata: rows.jsonl\nmax_steps: 500\nsensitive: true\n")


def card_12gb(box: Box) -> dict[str, Any]:
    _seven_billion(box)
    return {}


def broken_gguf(box: Box) -> dict[str, Any]:
    """The right file, with another word in its chat template: it loads, it talks, and it answers nonsense."""
    _base(box, "merged")
    with tempfile.TemporaryDirectory() as folder:
        code, answer = box.run("export-gguf", "merged", "--out", Path(folder) / "gguf", "--quant", "q8_0")
        assert code == 0, answer
        right = (Path(folder) / "gguf" / "merged-q8_0.gguf").read_bytes()
    assert right.count(BROKEN_TEMPLATE[0]) == 1
    (box.work / "model-q8_0.gguf").write_bytes(right.replace(*BROKEN_TEMPLATE))
    return {"broken": digest(box.work / "model-q8_0.gguf")}


def merged_folder(box: Box) -> dict[str, Any]:
    _base(box, "merged")
    return {"weights": digest(box.work / "merged" / "model.safetensors")}


def killed_run(box: Box) -> dict[str, Any]:
    """A real run, killed hard once it has saved a checkpoint."""
    tickets(box)
    command = [str(box.root / "bin" / "skill-train"), "local", "--model", "base", "--data", "tickets.jsonl"]
    command += ["--max-steps", str(4 * KILLED_AFTER), "--run-dir", "runs/tickets"]
    run = box.work / "runs" / "tickets"
    environment = {**os.environ, **box.environment()}
    with open(box.root / "killed.log", "w") as log:
        child = subprocess.Popen(command, cwd=box.work, stdout=log, stderr=log, env=environment, start_new_session=True)
        metrics = run / "metrics.jsonl"
        until = time.monotonic() + 300
        while len(read_rows(metrics)) <= KILLED_AFTER and child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        while run_lock.is_locked(RunDir(run)) and time.monotonic() < until:
            time.sleep(0.05)  # the training itself ends when nobody reads its next line
    assert not (run / "train.json").exists(), (box.root / "killed.log").read_text()
    box.log.unlink(missing_ok=True)
    first = metrics.read_text(encoding="utf-8").splitlines()[:KILLED_AFTER]
    return {"plan": digest(run / "plan.json"), "first_steps": first, "steps": 4 * KILLED_AFTER}


PREPARE: dict[str, Callable[[Box], dict[str, Any]]] = {
    "tickets": tickets,
    "preference-rows": preference_rows,
    "bad-rows": bad_rows,
    "no-token": no_token,
    "budget": budget,
    "private": private,
    "card-12gb": card_12gb,
    "broken-gguf": broken_gguf,
    "merged-folder": merged_folder,
    "killed-run": killed_run,
    "pictures": pictures,
}


def _base(box: Box, name: str = "base") -> None:
    shutil.copytree(DEMO / "model", box.work / name)


def _seven_billion(box: Box) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
        _in_cache(box, SEVEN, Path(folder))
    row = {"prompt": "Why is the ticket late? " + "word " * 150, "completion": "Because it waits. " + "reason " * 150}
    write_rows(box.work / "rows.jsonl", [{**row, "prompt": f"{n}: {row['prompt']}"} for n in range(2000)])


def _in_cache(box: Box, model: str, files: Path) -> None:
    """The model as the Hub's client keeps it, so that its facts can be read without a network."""
    kept = Path(box.environment()["HF_HOME"]) / "hub" / f"models--{model.replace('/', '--')}"
    shutil.copytree(files, kept / "snapshots" / COMMIT)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT, encoding="utf-8")


def _recipe(box: Box, text: str) -> dict[str, Any]:
    path: Path = box.work / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return {"recipe": digest(path)}
