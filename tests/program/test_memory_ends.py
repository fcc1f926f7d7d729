"""`local` on a real model under a real limit of its memory, set when the first batch is about to need it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import tiny
import training

pytestmark = [pytest.mark.torture, pytest.mark.real_python]

SCRIPT = str(Path(sys.executable).with_name("skill-train"))
TRAINS = '{"event": "stage", "text": "training"}'


@pytest.mark.skipif(sys.platform != "linux", reason="no other system sets a limit for another process")
@pytest.mark.parametrize(("free", "code"), [(150, 0), (1, 3)], ids=["the second fits", "none fits"])
def test_a_batch_without_memory_is_tried_once_more(tmp_path: Path, free: int, code: int) -> None:
    """Eight layers keep 8 x 1024 tokens without recomputation, 300 MB; with it 20 MB are enough that it has by then."""
    base = _deep(tmp_path / "base", layers=8)
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, _answer(n)]} for n in range(16)]
    data = training.write_data(tmp_path, rows)
    values = {"model": str(base), "data": str(data), "max_length": 1024, "effective_batch_size": 8, "max_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values | {"held_out_fraction": 0.0}))
    command = [SCRIPT, "local", "recipe.yaml", "--run-dir", "run", "--dtype", "float32", "--format", "json"]
    # Without a threshold of its own, glibc keeps what earlier passes gave back.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watcher = threading.Thread(target=_limit, args=(process, tmp_path / "run" / "train.log", free << 20))
        watcher.start()
        out, err = process.communicate(timeout=300)
        watcher.join()
    answer = json.loads(out)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert process.returncode == code, err
    assert (tmp_path / "run" / "train.log").read_text().count('"event": "attempt"') == 2
    assert _split(plan["placement"]) == (8, 1, True)
    reason = plan["reasons"][-1]
    assert (reason["rule"], reason["value"]) == ("smaller_layout", "8 x 1 rows with gradient_checkpointing")
    assert reason["because"].startswith("out of memory: ") and "it was 8 x 1 rows without" in reason["because"]
    assert "once more, with 8 x 1 rows with gradient_checkpointing" in err
    if code:
        assert answer["error"]["code"] == "out_of_memory"
        assert "8 x 1 rows with gradient_checkpointing was tried too" in answer["error"]["hint"]
        return
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["smaller_layout"] == reason
    assert record["recipe_hash"] == plan["recipe_hash"] == answer["data"]["recipe_hash"]
    assert _split(answer["data"]["placement"]) == (8, 1, True)
    assert {each["low"] for each in answer["data"]["estimates"].values()} == {None}
    warnings = {warning["code"]: warning["message"] for warning in answer["warnings"]}
    assert "trained with 8 x 1 rows with gradient_checkpointing" in warnings["smaller_layout"]
    assert "estimate_missed" not in warnings


def _limit(process: subprocess.Popen[str], log: Path, free: int) -> None:
    """Gives each training so much more than it has when it begins, of address space."""
    limited = 0
    while process.poll() is None:
        begun = log.read_text(errors="replace").count(TRAINS) if log.is_file() else 0
        if begun > limited:
            limited = begun
            for child in psutil.Process(process.pid).children():
                most = child.memory_info().vms + free
                child.rlimit(psutil.RLIMIT_AS, (most, most))
        time.sleep(0.005)


def _deep(folder: Path, *, layers: int) -> Path:
    """The tiny Gemma with more layers, whose weights are random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny.cached("gemma"), folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"{number} words of an answer " * 300}


def _split(placement: dict[str, Any]) -> tuple[int, int, bool]:
    return (
        placement["per_device_train_batch_size"],
        placement["gradient_accumulation_steps"],
        placement["gradient_checkpointing"],
    )
