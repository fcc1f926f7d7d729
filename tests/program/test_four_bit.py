"""QLoRA, computed by bitsandbytes on this processor: the 4-bit base, the adapter, a resume, and the merge.

bitsandbytes is installed apart (`make .venv/.installed`): PEFT imports it wherever it is found, which takes a second.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
import training
from skill_train.run.job_spec import FOUR_BIT

BITSANDBYTES = Path(sys.prefix) / "four-bit"
PROGRAM = Path(__file__).parents[1] / "support" / "four_bit_on_cpu.py"
ROWS = 24
# The levels of NF4: QLoRA (arXiv:2305.14314), appendix E.
NF4 = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BITSANDBYTES.is_dir(), reason=f"{FOUR_BIT} is not in {BITSANDBYTES.name}/"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, each of all rows, of which all tokens train."""
    run = write_run(tmp_path_factory.mktemp("straight") / "run")
    assert trained(run) == 0, (run / "log").read_text()[-3000:]
    return run


def write_run(run: Path, **values: Any) -> Path:
    options = {
        "loss_on": "all",
        "held_out_fraction": 0.0,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "learning_rate": 1e-3,
    }
    batch = {"effective_batch_size": ROWS, "split": (8, 3, 1), "max_steps": 4}
    return training.write_run(run, load_in_4bit=True, **batch, **options, **values)


def trained(run: Path, *options: str) -> int:
    environment = os.environ | {"PYTHONPATH": str(BITSANDBYTES)}
    with open(run / "log", "w") as log:
        command = [sys.executable, str(PROGRAM), str(run / "plan.json"), *options]
        return subprocess.call(command, env=environment, stdout=log, stderr=log)


def test_every_check_passes(straight: Path) -> None:
    checks = json.loads((straight / "train.json").read_text())["checks"]
    assert {check["name"]: check["verdict"] for check in checks} == dict.fromkeys(
        ("model_loads", "batches_are_valid", "accumulation", "loss_falls", "checkpoint_saves", "adapter_reloads"),
        "pass",
    )


def test_the_first_loss_is_that_of_the_base_in_nf4(straight: Path) -> None:
    first = training.metrics(straight)[0]["loss"]
    in_full, in_nf4 = loss_of_base(in_nf4=False), loss_of_base(in_nf4=True)
    assert abs(first - in_nf4) < abs(in_full - in_nf4) / 10, (first, in_full, in_nf4)


def test_a_resumed_training_ends_with_the_same_adapter(straight: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    (run / "train.json").unlink()
    assert trained(run, "--resume") == 0, (run / "log").read_text()[-3000:]
    names = [f"{folder}/adapter/adapter_model.safetensors" for folder in (run, straight)]
    assert Path(names[0]).read_bytes() == Path(names[1]).read_bytes()


@pytest.mark.parametrize(("dtype", "adapter"), [("float16", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_type_of_the_adapter_in_half_precision(tmp_path: Path, dtype: str, adapter: torch.dtype) -> None:
    """TRL makes the adapter of a 4-bit base bfloat16, where the training computes in it."""
    few = {"base": tiny.cached("gemma"), "load_in_4bit": True, "max_steps": 2}  # a processor is slow in float16
    run = training.write_run(tmp_path / "run", placement={"dtype": dtype}, learning_rate=1e-3, **few)
    assert trained(run) == 0, (run / "log").read_text()[-3000:]
    record = json.loads((run / "train.json").read_text())
    assert {check["verdict"] for check in record["checks"]} == {"pass"}, record["checks"]
    assert {weight.dtype for weight in load_file(run / "adapter" / "adapter_model.safetensors").values()} == {adapter}


def test_the_adapter_is_merged_into_the_base_in_full_precision(straight: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    done = subprocess.run([sys.executable, "-m", "skill_train", "merge", str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny.cached("gemma"), run / "merged"))
    adapter, config = load_file(run / "adapter" / "adapter_model.safetensors"), run / "adapter" / "adapter_config.json"
    scale = json.loads(config.read_text())["lora_alpha"] / json.loads(config.read_text())["r"]
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            weight = weight + scale * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            assert not torch.equal(merged[name], base[name]), name
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)


def loss_of_base(*, in_nf4: bool) -> float:
    """The mean loss of all tokens of all rows, by transformers. `in_nf4`: the linear layers of the blocks are rounded
    as QLoRA says it, without the second rounding, of the scales."""
    folder = tiny.cached("gemma")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if in_nf4:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = nf4(module.weight.data)
    total, count = 0.0, 0
    for row in tiny.rows(ROWS):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(logits)
    return total / count


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Each 64 values in a row share the scale that makes the largest 1."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale)[:, :, None] - torch.tensor(NF4)).abs().argmin(dim=2)
    return (torch.tensor(NF4)[nearest] * scale).reshape(weight.shape)
