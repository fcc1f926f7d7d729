"""Runs on other clouds through SkyPilot: writes a task with its files, and launches it with the user's own `sky`.

SkyPilot 0.14.1 needs click below 8.2, and huggingface_hub 2.4 needs 8.4.2 or newer. So SkyPilot has its own environment
and is started as a program. `sky/clouds/*.py` and `sky/catalog/__init__.py` of 0.14.1 say what each cloud supports.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

from msgspec.structs import replace

from skill_train.core.errors import AccessError, NotInstalled, TrainingFailed, UsageError, quoted
from skill_train.core.resources import node_program, program_packages
from skill_train.facts import Flavor
from skill_train.machine.training_program import train_program
from skill_train.plan import launch_args
from skill_train.plan.places import machine_of
from skill_train.run.job_spec import ENVIRONMENT
from skill_train.run.plan_record import Plan
from skill_train.run.records import broken, convert

VERSION = "0.14.1"
# SkyPilot takes the cheapest cloud that has such machines, and skips clouds for which it has no credentials.
CLOUDS = ("lambda", "runpod", "vast", "k8s", "aws", "gcp")  # CoreWeave is used through k8s
# "Multi-node not supported yet, as the interconnection among nodes are non-trivial" (clouds/runpod.py, clouds/vast.py).
ONE_NODE_ONLY = ("runpod", "vast")
# SkyPilot's names for the GPUs of the flavors (get_common_gpus). Hugging Face's A100 has 80 GB.
ACCELERATORS = {
    "T4": "T4",
    "L4": "L4",
    "A10G": "A10G",
    "L40S": "L40S",
    "A100": "A100-80GB",
    "H100": "H100",
    "H200": "H200",
    "RTX PRO 6000": "RTXPRO6000",
}
IDLE_MINUTES = 10  # between the end of the run and the release of the machines
_PACKAGES_GB = 100  # image, CUDA libraries and packages
_ONE_MACHINE = ("NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_P2P_DISABLE")  # tuning for a single PCIe machine
_VENV = "~/skill-train-venv"
_LAUNCHED = "launched"  # an empty file beside the task: `sky launch` was started here
_SETUP = f"""\
command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh
export PATH="$HOME/.local/bin:$PATH"
uv venv --allow-existing --quiet --python 3.12 {_VENV}
uv pip install --quiet --python {_VENV} -r requirements.txt
"""


def clouds(places: list[str] | None, nodes: int) -> list[str]:
    """The clouds to search for machines: the given ones, or all that support this number of nodes.

    Raises:
        UsageError: a place is unknown, or does not support several nodes.
    """
    for place in places or ():
        name = place.split("/")[0]
        if name not in CLOUDS:
            raise UsageError(
                f"{place} is not a supported place",
                code="bad_usage",
                expected=", ".join(CLOUDS),
                got=place,
                hint="use --infra with one of these, such as aws or gcp/us-central1",
            )
        if nodes > 1 and name in ONE_NODE_ONLY:
            raise UsageError(
                f"SkyPilot does not support several nodes on {name}",
                code="unknown_flavor",
                expected=f"--nodes 1 with several GPUs, or {', '.join(c for c in CLOUDS if c not in ONE_NODE_ONLY)}",
                got=f"--nodes {nodes} --infra {place}",
                hint="use --nodes 1 or another --infra",
            )
    return places or [name for name in CLOUDS if nodes == 1 or name not in ONE_NODE_ONLY]


def spread(plan: Plan, flavor: Flavor, nodes: int) -> Plan:
    """The plan on this number of machines of a flavor: same recipe and effective batch, one process for each GPU.

    Raises:
        UsageError: SkyPilot has no such machines, or the effective batch cannot be divided by so many processes.
    """
    accelerator(flavor)
    placed = replace(plan.placement, backend="skypilot")
    if nodes == 1:
        return replace(plan, placement=placed)
    effective, processes = plan.recipe.effective_batch_size, nodes * flavor.gpus
    share, rest = divmod(effective, processes)
    if rest or not share:
        raise UsageError(
            f"a batch of {effective} rows cannot be divided among {processes} processes",
            code="unknown_flavor",
            expected=f"effective_batch_size divisible by {processes} ({nodes} nodes x {flavor.gpus} GPUs)",
            got=str(effective),
            hint="use fewer --nodes, another --flavor, or another effective_batch_size in the recipe",
        )
    rows = max(n for n in range(1, placed.per_device_train_batch_size + 1) if share % n == 0)
    placed = replace(
        placed,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        num_processes=processes,
        strategy="fsdp" if placed.strategy == "fsdp" else "ddp",
    )
    on_a_node = replace(placed, num_processes=flavor.gpus)
    started = launch_args.launch(on_a_node, machine_of(flavor))
    environment = {name: value for name, value in started.environment.items() if name not in _ONE_MACHINE}
    arguments = [*started.arguments, "--num_processes", str(processes), "--num_machines", str(nodes)]
    return replace(plan, placement=placed, launch=replace(started, arguments=arguments, environment=environment))


def nodes_of(plan: Plan) -> int:
    """The number of machines on which `spread` put a plan."""
    words = plan.launch.arguments  # if an option is there twice, the later one counts
    return next((int(value) for name, value in reversed(list(pairwise(words))) if name == "--num_machines"), 1)


class Resources(TypedDict):
    accelerators: str
    disk_size: int
    any_of: list[dict[str, str]]
    autostop: dict[str, int | bool]


class Task(TypedDict):
    """A task in SkyPilot's YAML format. A secret has no value: `sky launch --secret` takes it from the environment."""

    name: str
    num_nodes: int
    resources: Resources
    workdir: str
    envs: dict[str, str]
    secrets: dict[str, None]
    setup: str
    run: str


class SkyRun(NamedTuple):
    id: str
    bucket: str  # the folder in a bucket of the Hub that receives all files of the run, `hf://buckets/…`
    data: str | None  # the path of local data, relative to the folder of the task
    timeout_seconds: int


def task(plan: Plan, flavor: Flavor, run: SkyRun, *, nodes: int, places: list[str]) -> Task:
    need = plan.estimates.disk_bytes.high or 0
    words = ["skypilot_node.py", run.bucket, "--timeout", str(run.timeout_seconds)]
    words += ["--data", run.data] if run.data else []
    return {
        "name": name_of(run.id),
        "num_nodes": nodes,
        "resources": {
            "accelerators": f"{accelerator(flavor)}:{flavor.gpus}",
            "disk_size": _PACKAGES_GB + math.ceil(need / 1e9),
            "any_of": [{"infra": place} for place in places],
            "autostop": {"idle_minutes": IDLE_MINUTES, "down": True},
        },
        "workdir": ".",
        "envs": {"SKILL_TRAIN_RUN": run.id} | ENVIRONMENT,
        "secrets": {"HF_TOKEN": None},  # the name only: `sky launch --secret HF_TOKEN` takes the value
        "setup": _SETUP,
        "run": f"{_VENV}/bin/python {shlex.join(words)}\n",
    }


def written_task(folder: Path) -> Task | None:
    """Reads the task that `write_task` wrote to this folder; None if there is none.

    Raises:
        UsageError: the file was edited and is not a task any more.
    """
    import yaml

    path = folder / "task.yaml"
    if not path.is_file():
        return None
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise broken(path, str(error).partition("\n")[0]) from None
    return convert(document, Task, path)


def chosen_places(task: Task) -> list[str] | None:
    """The clouds that the user named for a task; None if it may run on all suitable clouds."""
    places = [place["infra"] for place in task["resources"]["any_of"]]
    return None if places == clouds(None, task["num_nodes"]) else places


def ways_to(run: Path) -> tuple[str, str, str] | None:
    """The commands that follow, fetch and stop a run; None if its task was not launched from this folder."""
    task = written_task(run / "skypilot") if (run / "skypilot" / _LAUNCHED).is_file() else None
    if task is None:
        return None
    bucket = re.search(r"hf://\S+", task["run"])
    back = f"hf buckets sync {bucket[0] if bucket else 'BUCKET'} {quoted(run)}"
    return f"sky logs {quoted(task['name'])}", back, f"sky down {quoted(task['name'])}"


def require_not_launched(run: Path) -> None:
    if ways := ways_to(run):
        follow, back, stop = ways
        raise UsageError(
            f"{run} was launched by SkyPilot, which tells this machine nothing of it",
            code="missing_step",
            hint=f"{follow} shows it, {stop} stops its machines, and {back} fetches its files",
        )


def timeout_of(task: Task) -> int | None:
    found = re.search(r" --timeout (\d+)", task["run"])
    return int(found[1]) if found else None


def accelerator(flavor: Flavor) -> str:
    name = ACCELERATORS.get(flavor.gpu or "")
    if name is None:
        raise UsageError(
            f"SkyPilot has no known name for the GPU of {flavor.name}",
            code="unknown_flavor",
            expected=", ".join(ACCELERATORS),
            got=str(flavor.gpu),
            hint="choose another --flavor",
        )
    return name


def name_of(run_id: str) -> str:
    """The name of the task and of its cluster."""
    return f"skill-train-{run_id}"


def write_task(folder: Path, task: Task, plan: Path, data: dict[str, Path], packages: tuple[str, ...]) -> None:
    """Writes all files of the task to one folder, which SkyPilot copies to each machine.

    Args:
        folder: created if needed; files from an earlier call are rewritten.
        data: files of local data, by their path below `data/`.
        packages: more packages, `name==version`, in addition to those in the header of the training program.
    """
    import yaml

    launched = (folder / _LAUNCHED).is_file()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if launched:
        (folder / _LAUNCHED).touch()
    for source in (train_program(), node_program(), plan):
        shutil.copyfile(source, folder / source.name)
    for name, source in data.items():
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "data" / name)
    (folder / "requirements.txt").write_text("\n".join([*program_packages(), *packages]) + "\n", encoding="utf-8")
    first = f"# Launch it from this folder: {' '.join(command('sky', task['name']))}\n"
    text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=120)
    (folder / "task.yaml").write_text(first + text, encoding="utf-8")


def command(sky: str, name: str) -> list[str]:
    """The launch command. It reuses a cluster of this name, so a second launch waits for the first one and repeats no
    work."""
    return [sky, "launch", "--cluster", name, "--yes", "--detach-run", "--secret", "HF_TOKEN", "task.yaml"]


def run_sky(folder: Path, name: str, token: str | None) -> None:
    """Launches the task with the `sky` of this machine. Its output goes to stderr.

    Raises:
        NotInstalled: `sky` is missing.
        AccessError: there is no token.
        TrainingFailed: `sky launch` failed.
    """
    sky = shutil.which("sky")
    if sky is None:
        raise NotInstalled(
            f"`sky` is not on PATH; the task was written to {folder}",
            code="missing_package",
            expected=f"SkyPilot {VERSION}, installed in its own environment",
            hint=f'uv tool install "skypilot[lambda,kubernetes]=={VERSION}", then `sky check`',
        )
    if token is None:
        raise AccessError(
            "the rented machines need a token to read the model and to store the result",
            code="not_signed_in",
            hint="hf auth login",
        )
    words = command(sky, name)
    (folder / _LAUNCHED).touch()  # before the launch, because a failed launch may have rented machines
    done = subprocess.run(words, cwd=folder, env=os.environ | {"HF_TOKEN": token}, stdout=2, check=False)
    if done.returncode != 0:
        raise TrainingFailed(
            f"sky launch ended with exit code {done.returncode}",
            code="sky_failed",
            expected="a cluster with the task on it",
            got="the output of `sky` is above",
            hint=f"run sky check and sky status; sky down {name} stops the machines that were started",
        )
