"""Several processes on this processor (gloo): the same training as one, ends that are explained, nothing left behind.

The model is a tiny Qwen2. Runs of several processes are started by `local`, as a user's are. Dropout is off where a run
is compared with one of another split: it draws by process and by batch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace

import planning
import tiny
import training
from skill_train.core.errors import DecisionNeeded
from skill_train.facts import Gpu
from skill_train.plan.launch_args import launch
from skill_train.program.events import Refused
from skill_train.program.folders.checkpoints import is_complete
from skill_train.program.main import main
from skill_train.program.watch import check_split
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
from skill_train.run.train_record import TrainRecord
from skill_train.train import local

pytestmark = [pytest.mark.slow, pytest.mark.real_python, pytest.mark.usefixtures("own_threads")]

STEPS = 4
SEED = 2**32 - 1  # the last that numpy takes: each process adds its rank
GPUS = (Gpu("NVIDIA L40S", 48 << 30, None, 8.9, False),) * 2


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, two rows at a time, two batches a step."""
    run = _write(tmp_path_factory.mktemp("one") / "run", split=(2, 2, 1), lora_dropout=0.0, seed=SEED)
    assert main([str(run / "plan.json")]) == 0
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes, two rows at a time each, one batch a step. The shell has variables of another launch."""
    run = _write(tmp_path_factory.mktemp("two") / "run", lora_dropout=0.0, seed=SEED)
    others = {"ACCELERATE_USE_DEEPSPEED": "true", "PET_NNODES": "2", "RANK": "16", "TORCHELASTIC_RUN_ID": "none"}
    with pytest.MonkeyPatch.context() as shell:
        for name, value in others.items():
            shell.setenv(name, value)
        assert _train(run).verdict == "pass"
    return run


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes with dropout, never stopped."""
    run = _write(tmp_path_factory.mktemp("straight") / "run")
    assert _train(run).verdict == "pass"
    return run


# --- The same training ---


def test_two_processes_train_what_one_does(one: Path, two: Path) -> None:
    """The losses of every step, and the adapter: weights around 1e-3 with float32's 1e-7 of them, four Adam steps."""
    losses = [[line["loss"] for line in training.metrics(run)] for run in (one, two)]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert _difference(one, two) <= 1e-6
    assert _largest(two) > 3e-4  # trained, not as it was made: B starts at zero


def test_a_line_and_a_figure_are_of_the_whole_step(one: Path, two: Path) -> None:
    for name in ("step", "tokens", "trained_tokens", "epoch", "learning_rate"):
        assert [line[name] for line in training.metrics(two)] == [line[name] for line in training.metrics(one)], name
    norms = [[line["grad_norm"] for line in training.metrics(run)] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_two_processes_leave_the_files_of_one(one: Path, two: Path) -> None:
    extra = {"recipe.yaml", "train.log", ".lock"}  # local's own
    assert {path.name for path in two.iterdir()} - extra == {path.name for path in one.iterdir()}
    for name in ("samples.jsonl", "held_out.jsonl"):
        assert (two / name).read_bytes() == (one / name).read_bytes()
    assert not list(two.rglob("*.part"))
    checks = [json.loads((run / "train.json").read_text())["checks"] for run in (one, two)]
    assert [c["name"] for c in checks[0]] == [c["name"] for c in checks[1]]
    assert {c["verdict"] for c in checks[1]} == {"pass"}


def test_a_checkpoint_is_complete_when_all_have_written(two: Path) -> None:
    marker = json.loads((two / "checkpoints" / "checkpoint-2" / "complete.json").read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(marker)


@pytest.mark.torture
def test_sharded_by_fsdp_it_is_the_same_training(one: Path, tmp_path: Path) -> None:
    """FSDP 2 over gloo, with the arguments that a plan gets for two GPUs, and checkpoint and adapter put together."""
    run = _write(tmp_path / "run", lora_dropout=0.0, seed=SEED, placement={"strategy": "fsdp", "offload": False})
    assert training.sharded(run) == 0, (run / "log").read_text()[-3000:]
    losses = [[line["loss"] for line in training.metrics(r)] for r in (one, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert _difference(one, run) <= 1e-6
    record = json.loads((run / "train.json").read_text())
    assert record["verdict"] == "warn"
    assert [c["name"] for c in record["checks"] if c["verdict"] == "warn"] == ["whole_model"]


# --- Stopped and resumed ---


@pytest.mark.torture
def test_interrupted_and_resumed_is_the_same_as_straight(straight: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes, after the same step. Dropout is on: each has its own random state to go on with."""
    run = _write(tmp_path / "run", save_steps=100)  # only the interruption saves
    driver, _ = _stop(run, "driver", signal.SIGINT)
    assert driver.returncode == 130 and "interrupted" in (run / "train.failed.json").read_text()
    (saved,) = (run / "checkpoints").glob("checkpoint-*")
    assert is_complete(saved)
    assert _train(run, resume=True).steps == STEPS
    assert _weights(run).read_bytes() == _weights(straight).read_bytes()
    losses = [[line["loss"] for line in training.metrics(r)] for r in (run, straight)]
    assert losses[0] == losses[1]
    assert not (run / "train.failed.json").exists()


def test_a_run_of_two_goes_on_with_one(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(two, tmp_path / "run"))
    for path in (run / "adapter", run / "checkpoints" / "checkpoint-4"):
        shutil.rmtree(path)
    plan = json.loads((run / "plan.json").read_text())
    plan["placement"] |= {"gradient_accumulation_steps": 2, "num_processes": 1, "strategy": "single"}
    (run / "plan.json").write_text(json.dumps(plan))
    assert main([str(run / "plan.json"), "--resume"]) == 0
    assert _difference(run, two) <= 1e-6
    notes = [event["text"] for event in training.events(capsys.readouterr().out) if event["event"] == "note"]
    assert "checkpoint-2 is of 2 processes: rows and batches stay the same, dropout is drawn anew" in notes


def test_parts_of_fsdp_are_not_resumed_by_others(two: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(two, tmp_path / "run"))
    placement = json.loads((run / "plan.json").read_text())["placement"]
    with pytest.raises(Refused) as caught:
        check_split(run / "checkpoints" / "checkpoint-2", placement | {"strategy": "fsdp"})
    assert caught.value.error["code"] == "another_run"


# --- Ends ---


@pytest.mark.torture
def test_a_disk_that_is_full_for_the_second_process_is_explained(tmp_path: Path) -> None:
    """Only the second process writes rng_state_1.pth; /dev/full takes no byte."""
    run = _write(tmp_path / "run")

    def say(text: str) -> None:
        if text == "training":
            folder = run / "checkpoints" / "checkpoint-2"
            folder.mkdir()
            (folder / "rng_state_1.pth").symlink_to("/dev/full")

    with pytest.raises(DecisionNeeded) as caught:
        _train(run, say=say)
    assert caught.value.code == "no_disk"
    assert json.loads((run / "train.failed.json").read_text())["error"]["code"] == "no_disk"


@pytest.mark.torture
@pytest.mark.parametrize("whom", ["driver", "launcher", "second"])
def test_what_is_killed_takes_all_processes_with_it(tmp_path: Path, whom: str) -> None:
    run = _write(tmp_path / "run", max_steps=200)
    driver, processes = _stop(run, whom, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert alive == []
    if whom != "driver":
        assert driver.returncode == 3
        assert "out_of_memory" in (run / "said").read_text()


@pytest.mark.parametrize(("world", "processes"), [(None, 2), ("2", 1)])
def test_another_number_of_processes_than_planned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str | None, processes: int
) -> None:
    """A process that was never started would leave out its rows."""
    run = _write(tmp_path / "run", split=(2, 2 // processes, processes))
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun, which accelerate uses, sets both
    assert main([str(run / "plan.json")]) == 2
    error = json.loads((run / "train.failed.json").read_text())["error"]
    assert (error["code"], error["got"]) == ("bad_plan", world or "1")


# --- accelerate's own parser ---


@pytest.fixture
def _own_environment() -> Iterator[None]:
    """The parser, and the plugin that is made of what it says, change it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def _parsed(arguments: tuple[str, ...]) -> dict[str, Any]:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
    from accelerate.utils.launch import prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args([*arguments, "train.py", "plan.json"])
    environment = prepare_multi_gpu_env(parsed)
    seen = {"processes": parsed.nproc_per_node, "program": [parsed.training_script, *parsed.training_script_args]}
    seen |= {k: v for k, v in environment.items() if k in ("FSDP_VERSION", "FSDP_SHARDING_STRATEGY")}
    if parsed.fsdp_version == "2":  # the plugin of version 1 wants a GPU
        with patch_environment(**{k: v for k, v in environment.items() if k.startswith("FSDP_")}):
            plugin = FullyShardedDataParallelPlugin()
        seen |= {
            "state": plugin.state_dict_type.name,
            "wrap": plugin.auto_wrap_policy.__name__,
            "ram": plugin.cpu_ram_efficient_loading,
            "offload": type(plugin.cpu_offload).__name__,
            "reshard": plugin.reshard_after_forward,
        }
    return seen


@pytest.mark.usefixtures("_own_environment")
def test_accelerate_understands_the_arguments() -> None:
    """Parsed by the parser of `accelerate launch`; for FSDP 2, made into its plugin from what it would set."""
    gpus = msgspec.structs.replace(training.TWO_CORES, device="cuda", gpus=GPUS)
    placement = {"device": "cuda", "threads": None, "num_processes": 2, "strategy": "fsdp", "offload": False}
    plain = planning.plan_with(placement=placement).placement
    made = [
        launch(replace(plain, strategy="ddp"), gpus),
        launch(plain, gpus),
        launch(replace(plain, offload=True), gpus),
    ]
    ddp, sharded, offloaded = (_parsed(one.arguments) for one in made)
    assert ddp == {"processes": "2", "program": ["train.py", "plan.json"]}
    assert sharded["state"] == "FULL_STATE_DICT" and sharded["wrap"] == "transformer_auto_wrap_policy"
    assert (sharded["FSDP_VERSION"], sharded["ram"], sharded["reshard"]) == ("2", True, True)
    assert (sharded["offload"], offloaded["offload"]) == ("OffloadPolicy", "CPUOffloadPolicy")


# --- How ---


def _write(run: Path, *, split: tuple[int, int, int] = (2, 1, 2), **values: Any) -> Path:
    return training.write_run(run, base=tiny.cached("llama-chatml"), split=split, **{"max_steps": STEPS, **values})


def _train(run: Path, *, resume: bool = False, say: Any = lambda _: None) -> TrainRecord:
    plan = plan_record.read(run / "plan.json")
    return local.train(RunDir(run), plan, resume=resume, progress=lambda *_: None, say=say).record


_DRIVER = """
import json, sys
from pathlib import Path
from skill_train.train import local
from skill_train.core.errors import SkillTrainError
from skill_train.run import plan_record
from skill_train.run.folder import RunDir
from skill_train.run.train_record import TrainRecord
run = Path(sys.argv[1])
plan = plan_record.read(run / "plan.json")
tell = lambda step, *_: print("step", step, flush=True)
try:
    local.train(RunDir(run), plan, resume=False, progress=tell, say=lambda _: None)
except SkillTrainError as error:
    (run / "said").write_text(json.dumps(error.as_dict()))
    sys.exit(error.exit_code)
"""


def _stop(run: Path, whom: str, how: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """`local` in a process of its own; after the second step, `how` is sent to it, to its launcher or to the second of
    the training processes. Returns it, ended, and all that it had started."""
    package = str(Path(local.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": package}
    command = [sys.executable, "-c", _DRIVER, str(run)]
    started: list[psutil.Process] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        for line in driver.stdout or ():
            if line == "step 2\n":
                started = psutil.Process(driver.pid).children(recursive=True)
                ranks = {p.environ().get("RANK"): p for p in started}
                {"driver": driver, "launcher": started[0], "second": ranks["1"]}[whom].send_signal(how)
    assert len(started) == 3
    return driver, started


def _weights(run: Path) -> Path:
    return run / "adapter" / "adapter_model.safetensors"


def _difference(first: Path, second: Path) -> float:
    """The largest difference of a weight."""
    from safetensors.torch import load_file

    a, b = load_file(_weights(first)), load_file(_weights(second))
    assert a.keys() == b.keys() and a
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def _largest(run: Path) -> float:
    from safetensors.torch import load_file

    return max(float(w.abs().max()) for name, w in load_file(_weights(run)).items() if "lora_B" in name)
