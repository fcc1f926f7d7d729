"""Commands that are killed at a chosen moment, and what they leave compared with an undisturbed run.

A `Chain` is the undisturbed run, step by step, with a copy of the folder before each. Its `strike` starts a step from
that copy, kills it, looks whether everything under a final name is whole, and finishes as a user would: with
`local --resume`, or the same command again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import tiny
from kill_hook.sitecustomize import LINE

HOOK = Path(__file__).resolve().parent / "kill_hook"
RECORDS = ("train", "merge", "convert", "imatrix", "quantize", "verify", "pull")
LOCAL = ("local", "recipe.yaml", "--dtype", "float32", "--run-dir", "run")
RESUME = ("local", "--resume", "--run-dir", "run")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": LOCAL,
    "merge": ("merge", "run"),
    "convert": ("export-gguf", "run", "--quant", "f16"),
    "quantize": ("export-gguf", "run", "--quant", "q8_0,q4_0"),
    "verify": ("verify", "run", "--tokens", "128"),
}
MIX = ("export-gguf", "run", "--quant", "auto", "--bits", "6")
_TAKES = 600  # seconds, at most, of one command on a busy machine


@dataclass(frozen=True)
class Moment:
    """When a command dies: at a share of its undisturbed seconds, or before its n-th change of a file, or before the
    first that begins with these words."""

    share: float | None = None
    operation: int | str = 0
    whom: str = "all"  # or `parent`: its children are left behind, as when the system kills the command alone

    def __str__(self) -> str:
        when = f"operation {self.operation}" if self.share is None else f"{self.share:.2f} of its time"
        return f"{self.whom} at {when}"


@dataclass
class Step:
    """One command of the undisturbed run.

    Attributes:
        before: a copy of the folder as the command found it.
        operations: what it did to files of the folder, in order.
        after: `state` when it had ended.
    """

    name: str
    command: tuple[str, ...]
    before: Path
    environment: dict[str, str]
    seconds: float = 0.0
    operations: list[str] = field(default_factory=list)
    after: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Struck:
    """What became of one kill: where it hit (`before` the first change of a file, `during`, `after` the last), and
    everything that was wrong."""

    step: str
    moment: Moment
    hit: str
    wrong: list[str]


class Chain:
    """An undisturbed run, step by step."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: dict[str, Step] = {}
        self.whole: dict[str, set[str]] = {}  # digests of each file; the Modelfile has one after each step

    def add(self, name: str, command: tuple[str, ...], place: Path, environment: dict[str, str]) -> None:
        """Runs a further step in `place`, which holds what came before it."""
        step = Step(name, command, Path(shutil.copytree(place, self.root / f"before-{name}")), environment)
        started, log = time.monotonic(), self.root / f"{name}.log"
        child = start(step, place, log)
        said = child.communicate(timeout=_TAKES)[1]
        assert child.returncode == 0, said
        step.seconds, step.operations = time.monotonic() - started, operations(log)
        step.after = state(place / "run")
        for file, digest in contents(place / "run").items():
            self.whole.setdefault(file, set()).add(digest)
        self.steps[name] = step

    def strike(self, name: str, moment: Moment) -> Struck:
        """Kills a step, and finishes it."""
        step = self.steps[name]
        folder = self.root / f"kill-{name}-{random.getrandbits(48):x}"
        place = Path(shutil.copytree(step.before, folder / "place"))
        log = folder / "log"
        ended = struck(step, place, log, moment)
        wrong = torn(place / "run", self.whole) + lost(place / "run", operations(log))
        hit = "after" if ended or state(place / "run") == step.after else "during" if operations(log) else "before"
        wrong += finish(step, place)
        wrong += [f"not as undisturbed: {one}" for one in differences(step.after, state(place / "run"))]
        wrong += torn(place / "run", self.whole)
        if not wrong:
            shutil.rmtree(folder)
        return Struck(name, moment, hit, wrong)


def trained_chain(root: Path, names: tuple[str, ...] = tuple(COMMANDS)) -> Chain:
    """Train, merge, convert, quantize, verify, on a tiny model in fp32."""
    chain, place = Chain(root), root / "undisturbed"
    place.mkdir(parents=True)
    tiny.write_rows(place / "rows.jsonl", 24)
    recipe = f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nmax_steps: 8\neffective_batch_size: 4\n"
    (place / "recipe.yaml").write_text(recipe + "max_length: 96\n")
    for name in names:
        chain.add(name, COMMANDS[name], place, os.environ | {"OMP_NUM_THREADS": "1"})
    return chain


def moments(step: Step, count: int, seed: int, *, inside: str = "") -> list[Moment]:
    """Half by what is done to files (of `inside`, where that is said), half by the clock; every fifth kills the parent
    alone."""
    draw = random.Random(f"{seed} {step.name} {inside}")
    numbers = [n for n, one in enumerate(step.operations, 1) if inside in one]
    made = []
    for number in range(count):
        whom = "parent" if number % 5 == 4 else "all"
        if inside or number % 2 == 0:
            made.append(Moment(operation=draw.choice(numbers), whom=whom))
        else:
            made.append(Moment(share=draw.uniform(0.1, 1.0), whom=whom))
    return made


def start(step: Step, place: Path, log: Path, moment: Moment | None = None) -> subprocess.Popen[str]:
    """The command in a session of its own, with every process counting what it does to files of `place`."""
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    watched = {"PYTHONPATH": os.pathsep.join(paths)}
    watched |= {"KILL_LOG": str(log), "KILL_FOLDER": str(place / "run"), "KILL_WHOM": moment.whom if moment else "all"}
    watched["KILL_AT"] = str(moment.operation if moment else 0)
    return subprocess.Popen(
        program(*step.command),
        cwd=place,
        env=step.environment | watched,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from skill_train.cli import main; main()", *arguments, "--format", "json"]


def struck(step: Step, place: Path, log: Path, moment: Moment) -> bool:
    """Whether it ended before it could be killed."""
    child = start(step, place, log, moment)
    if moment.share is not None:
        try:
            child.communicate(timeout=moment.share * step.seconds)
        except subprocess.TimeoutExpired:
            kill(child, moment.whom)
    if moment.whom == "parent":  # its children hold the pipes
        child.wait(_TAKES)
        for pipe in (child.stdout, child.stderr):
            assert pipe
            pipe.close()
    else:
        child.communicate(timeout=_TAKES)
    return child.returncode != -signal.SIGKILL


def kill(child: subprocess.Popen[str], whom: str) -> None:
    """The process groups of the command and of all that it started; or the command alone."""
    if whom == "parent":
        return child.kill()
    child.send_signal(signal.SIGSTOP)  # starts nothing more
    try:
        started = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    os.killpg(child.pid, signal.SIGKILL)
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(process.pid), signal.SIGKILL)
    return None


def finish(step: Step, place: Path) -> list[str]:
    """What a user does then; what went wrong in it. A command that is refused says with what to go on."""
    command = step.command
    if step.name == "train" and (place / "run" / "plan.json").is_file():
        command = RESUME
    end = time.monotonic() + _TAKES
    while True:
        done = subprocess.run(
            program(*command),
            cwd=place,
            env=step.environment,
            capture_output=True,
            text=True,
            timeout=_TAKES,
        )
        if done.returncode == 0:
            return []
        error = json.loads(done.stdout)["error"] if done.stdout.startswith("{") else {"code": "no answer"}
        if error["code"] != "run_in_use" or time.monotonic() > end:  # a child that was left behind ends by itself
            return [f"the retry ended with {done.returncode}: {error} {done.stderr[-2000:]}"]
        time.sleep(0.3)


def operations(log: Path) -> list[str]:
    data = log.read_bytes() if log.is_file() else b""
    return [data[at : at + LINE].decode(errors="replace").strip() for at in range(0, len(data), LINE)]


def contents(run: Path) -> dict[str, str]:
    """Digest of each file of what was made, by its name in the run directory."""
    folders = [folder for name in ("adapter", "merged", "gguf") for folder in [run / name] if folder.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    others = ("samples.jsonl", "held_out.jsonl", "imatrix.gguf")
    files += [run / name for name in others if (run / name).is_file()]
    names = {str(path.relative_to(run)): path for path in files}
    return {name: _digest(path) for name, path in names.items() if not _is_part(name)}


def state(run: Path) -> dict[str, Any]:
    """What must be the same in the end: every file that was made, and each record but for times and memory."""
    records = {}
    for name in RECORDS:
        if (run / f"{name}.json").is_file():
            records[name] = lasting(name, json.loads((run / f"{name}.json").read_text()))
    lines = _lines(run / "metrics.jsonl")
    files = {name: digest for name, digest in contents(run).items() if ".unrecorded-" not in name}  # set aside
    losses = [json.loads(line).get("loss") for line in lines]
    return {"files": files, "losses": losses, "measured": _lines(run / "sensitivity.jsonl"), **records}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def lasting(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that does not change from one run to the next."""
    outputs = {file: [d["bytes"], d["sha256"]] for file, d in record.get("outputs", {}).items()}
    outputs.pop("environment.json", None)  # it names the folder, which is another one after a kill
    kept = {"outputs": outputs, "inputs": record.get("inputs"), "options": record.get("options")}
    if name == "train":
        kept |= {key: record.get(key) for key in ("verdict", "steps", "answer")}
    if name == "verify":
        kept |= {
            "verdict": record["verdict"],
            "checks": [[c["name"], c["file"], c["verdict"]] for c in record["checks"]],
        }
    return kept


def differences(wanted: Any, found: Any, where: str = "") -> list[str]:
    if not (isinstance(wanted, dict) and isinstance(found, dict)):
        return [] if wanted == found else [f"{where}: {str(found)[:200]} instead of {str(wanted)[:200]}"]
    return [
        one
        for key in sorted(set(wanted) | set(found))
        for one in differences(wanted.get(key), found.get(key), f"{where}/{key}")
    ]


def lost(run: Path, done: list[str]) -> list[str]:
    """Once a checkpoint was whole, there is always one that is."""
    marked = [one for one in done[:-1] if one.startswith("os.rename checkpoints") and ".complete.json" in one]
    there = any(run.glob("checkpoints/*/complete.json"))
    return ["no whole checkpoint is left"] if marked and not there else []


def torn(run: Path, whole: dict[str, set[str]]) -> list[str]:
    """Every final name whose file is not the undisturbed run's; records and marked checkpoints that do not hold."""
    wrong = [
        f"{name} is half" for name, digest in contents(run).items() if digest not in whole.get(_plain(name), set())
    ]
    for path in (*run.glob("*.json"), *run.glob("checkpoints/*.json"), *run.glob("checkpoints/*/complete.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError:
            wrong.append(f"{path.relative_to(run)} is not JSON")
            continue
        if path.name == "complete.json":
            sizes = {name: (path.parent / name).stat().st_size for name in document if (path.parent / name).is_file()}
            gone = len(sizes) < len(document) and not _rotated(path, run)
            if gone or any(document[name] != size for name, size in sizes.items()):
                wrong.append(f"{path.relative_to(run)} promises other files")
        elif path.stem in RECORDS and path.parent == run:
            wrong += [
                f"{path.name} promises {name}"
                for name, digest in document.get("outputs", {}).items()
                if not (run / name).is_file() or _digest(run / name) != digest["sha256"]
            ]
    return wrong


def _rotated(marker: Path, run: Path) -> bool:
    """A kill came while this checkpoint was being removed: newer ones are there, and nothing reads it."""
    steps = [int(p.parent.name.split("-")[1]) for p in run.glob("checkpoints/checkpoint-*/complete.json")]
    return int(marker.parent.name.split("-")[1]) < max(steps)


def _plain(name: str) -> str:
    """`merged.unrecorded-1/config.json` is `merged/config.json`, set aside."""
    return "/".join(part.split(".unrecorded-")[0] for part in name.split("/"))


def _is_part(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
