"""No config brings in code from the Hub: `kernels`, which fetches and runs it, is a stand-in here that writes down
whoever asks it for something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import training
from hub_emulator import Hub
from skill_train.core.resources import demo
from skill_train.machine.training_program import train_program
from torch_forks import TorchForks

pytestmark = pytest.mark.slow

Ran = Callable[..., subprocess.CompletedProcess[str]]
STAND_IN = Path(__file__).resolve().parent.parent / "support" / "shouting_kernels"
ROWS = demo() / "data.parquet"
# Each in a process of its own: a library looks for `kernels` once, when it is imported.
LOADERS = {
    "gate, verify and evaluate": "from skill_train.reference import load as reference\n"
    "with reference.reference_model(Path(sys.argv[1])) as model:\n"
    "    print('loaded' if model.config._attn_implementation == 'eager' else model.config._attn_implementation)",
    "names of a merge": "from skill_train.reference.checkpoint_names import TEXT, empty_model\n"
    "empty_model(Path(sys.argv[1]), TEXT); print('loaded')",
    "token counting": "from skill_train.recipe import fields as recipe\n"
    "from skill_train.data import count_tokens as token_count\n"
    "token_count._tokenizer(recipe.from_dict({'model': sys.argv[1], 'data': 'x'})); print('loaded')",
}
# What a config can name, with whether the model still loads.
NAMED: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"_attn_implementation": "evil/evil:fn"}, False),
    ({"attn_implementation": "evil/evil:fn"}, False),
    ({"attn_implementation": {"": "eager", "text_config": "evil/evil"}}, False),
    ({"text_config": {"_attn_implementation": "evil/evil@main"}}, False),
    ({"_attn_implementation_internal": "evil/evil"}, False),
    ({"_experts_implementation": "evil/evil"}, False),
    ({"experts_implementation": "deepgemm"}, False),
    ({"kernel_config": {"kernel_mapping": {"RMSNorm": "evil/evil:RMSNorm"}}}, False),
    ({"use_kernels": True}, False),
    ({"transformers_weights": "../other/model.safetensors"}, False),
    ({"attn_implementation": "flash_attention_2"}, True),
    ({"_attn_implementation": "flash_attention_3", "use_kernels": False}, True),
    ({"auto_map": {"AutoModelForCausalLM": "evil/evil--modeling.Model"}, "custom_pipelines": {"x": {}}}, True),
)


@pytest.fixture
def shouted(tmp_path: Path) -> Path:
    return tmp_path / "shouted"


def base_with(settings: dict[str, Any], folder: Path) -> Path:
    base = Path(shutil.copytree(demo() / "model", folder / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | settings))
    return base


@pytest.fixture(scope="module")
def forks() -> Iterator[TorchForks]:
    """torch looks for no `kernels`, and its import is most of what a process costs."""
    started = TorchForks(dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    yield started
    started.close()


@pytest.fixture
def ran(forks: TorchForks, tmp_path: Path, shouted: Path) -> Ran:
    """What a program answers that finds the stand-in."""
    path = f"{STAND_IN}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    own = {"PYTHONPATH": path, "SHOUTED": str(shouted), "OMP_NUM_THREADS": "1"}

    def run(*words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return forks.run(tmp_path, (environment or dict(os.environ)) | own, *words)

    return run


def test_the_stand_in_shouts(tmp_path: Path, shouted: Path, ran: Ran) -> None:
    """transformers by itself asks for what a config names: were it otherwise, no test here could fail."""
    code = "import sys, transformers as t\nt.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    ran("-c", code, base_with({"_attn_implementation": "evil/evil:fn"}, tmp_path))
    assert "evil/evil" in shouted.read_text()


@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_of_ours_asks(loader: str, tmp_path: Path, shouted: Path, ran: Ran) -> None:
    every = "import json, sys\nfrom pathlib import Path\nfrom skill_train.core.errors import SkillTrainError\n"
    every += "changes, config = json.loads(sys.argv[2]), Path(sys.argv[1], 'config.json')\n"
    every += "before = json.loads(config.read_text())\nfor change in changes:\n"
    every += "    config.write_text(json.dumps(before | change))\n    try:\n"
    every += "".join(f"        {line}\n" for line in LOADERS[loader].splitlines())
    every += "    except SkillTrainError as error:\n        print(error.code)\n"
    base = base_with({}, tmp_path)
    done = ran("-c", every, base, json.dumps([change for change, _ in NAMED]))
    assert done.stdout.split() == ["loaded" if loads else "unsafe_file" for _, loads in NAMED], done.stderr
    assert not shouted.exists()


@pytest.mark.parametrize(
    "arguments",
    [[], pytest.param(["--probe"], marks=pytest.mark.torture), ["--job"]],
    ids=["local", "probe", "a job"],
)
def test_the_training_program_does_not_ask(arguments: list[str], tmp_path: Path, shouted: Path, ran: Ran) -> None:
    """The plan was made before the config was changed."""
    base = base_with({}, tmp_path)
    plan = training.write_plan(tmp_path / "run", base, ROWS, max_steps=1, effective_batch_size=1, max_length=32)
    settings = json.loads((base / "config.json").read_text()) | {"_attn_implementation": "evil/evil:fn"}
    (base / "config.json").write_text(json.dumps(settings))
    done = ran(train_program(), plan, *arguments)
    assert done.returncode in (2, 4) and not shouted.exists()  # 4: no token, so a job ends before it begins
    if arguments != ["--job"]:
        assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "unsafe_file"


@pytest.mark.parametrize("where", [pytest.param("a folder", marks=pytest.mark.torture), "the Hub"])
def test_a_job_does_not_ask(where: str, tmp_path: Path, shouted: Path, ran: Ran) -> None:
    """To its end: it may push, its child reads the config, and both tell why they ended."""
    base = base_with({}, tmp_path)
    values = {"max_steps": 1, "effective_batch_size": 1, "max_length": 32, "hub_model_id": "me/tuned"}
    plan = training.write_plan(tmp_path / "run", base, ROWS, **values)
    settings = json.loads((base / "config.json").read_text()) | {"_attn_implementation": "evil/evil:fn"}
    (base / "config.json").write_text(json.dumps(settings))
    with Hub(tmp_path / "hub") as hub:
        if where == "the Hub":
            files = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
            document = json.loads(plan.read_text())
            document["recipe"] |= {"model": "me/evil", "revision": hub.add("model", "me/evil", files).commit("main")}
            plan.write_text(json.dumps(document))
        more = hub.environment(tmp_path / "home") | {"TMPDIR": str(tmp_path)}
        done = ran(train_program(), plan, "--job", environment=more)
        assert set(hub.repositories["model", "me/tuned"].files) == {".gitattributes", "training.json"}
    failed = json.loads((plan.parent / "train.failed.json").read_text())
    assert (done.returncode, failed["exit_code"], failed["error"]["code"]) == (2, 2, "unsafe_file"), done.stdout
    assert json.loads((plan.parent / "kept.json").read_text())["state"] == "failed"
    assert not shouted.exists() and "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "eager"},
        pytest.param({"attn_implementation": "eager"}, marks=pytest.mark.torture),
        pytest.param({}, marks=pytest.mark.torture),  # as in every other training of a test
    ],
)
def test_the_kernel_of_the_plan_is_the_one_that_trains(
    settings: dict[str, Any], tmp_path: Path, shouted: Path, ran: Ran
) -> None:
    """Whatever another one a config names."""
    base = base_with(settings, tmp_path)
    plan = training.write_plan(tmp_path / "run", base, ROWS, max_steps=1, effective_batch_size=1, max_length=128)
    done = ran(train_program(), plan)
    assert done.returncode == 0, done.stderr
    trained = json.loads((plan.parent / "environment.json").read_text())["model"]
    planned = json.loads(plan.read_text())["placement"]
    assert trained["attn_implementation"] == planned["attn_implementation"] == "sdpa"
    assert "eager attention in place" not in done.stdout


@pytest.mark.parametrize("name", ["evil/evil:fn", "kernels-community/flash-attn2", "paged|eager", ""])
def test_a_plan_names_no_kernel_of_the_hub(name: str, tmp_path: Path, shouted: Path, ran: Ran) -> None:
    base = base_with({}, tmp_path)
    placement = {"attn_implementation": name}
    plan = training.write_plan(tmp_path / "run", base, ROWS, placement=placement, max_steps=1, effective_batch_size=1)
    done = ran(train_program(), plan)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "bad_plan")
    assert not shouted.exists()


def test_the_package_is_out_of_reach_whatever_asks_for_it(tmp_path: Path, shouted: Path, ran: Ran) -> None:
    """Integrations of transformers ask by themselves too, for some quantizations and experts."""
    code = (
        "from skill_train.reference import load as reference\nt = reference._transformers()\n"
        "from transformers.utils import is_kernels_available\nprint(is_kernels_available())\n"
        "import kernels"
    )
    done = ran("-c", code)
    assert done.stdout.split() == ["False"] and "ModuleNotFoundError" in done.stderr
