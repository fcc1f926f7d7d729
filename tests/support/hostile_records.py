"""What the records of a run may do that came from somewhere else: each command that reads them, on a run with one of
its files changed."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import cloud_runs
from hostile import command, cut, file_bytes, text
from hostile_files import ADAPTER, Target, _entry, _safetensors, in_folder
from skill_train.cloud.pull import Pull
from skill_train.llama import get_converter
from skill_train.report.demo_record import Demo
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.export_record import ExportRecord
from skill_train.run.merge_record import MergeRecord
from skill_train.run.train_record import Environment, TrainFailure, TrainRecord
from skill_train.run.verify_record import Proof

RUNS = Path(__file__).resolve().parent / "data" / "runs"
_METRIC = {"step": 1, "steps": 9, "loss": 2.5, "learning_rate": 1e-4, "seconds": 2.0, "tokens": 9, "trained_tokens": 3,
           "grad_norm": 1.0, "tokens_per_second": 100.0, "memory_bytes": {"rss": 10**9}}  # fmt: skip
_SAMPLE = {"row": 1, "kind": "chat", "rendered": "x", "input_ids": [1, 2], "labels": [-100, 2],
           "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "line": 2,
           "truncated": False, "full_length": 2}  # fmt: skip
CLASSES: dict[str, type[Any]] = {
    "train.json": TrainRecord, "train.failed.json": TrainFailure, "environment.json": Environment,
    "merge.json": MergeRecord, "convert.json": ExportRecord, "quantize.json": ExportRecord,
    "verify.json": Proof, "evaluate.json": Evaluation, "demo.json": Demo, "pull.json": Pull,
}  # fmt: skip


@cache
def documents() -> dict[str, Any]:
    """A recorded run of the demo with everything beside it that a run can have."""
    found = {path.name: json.loads(path.read_text()) for path in (RUNS / "demo").glob("*.json")}
    known = cloud_runs.CloudJob(1, "started", "t4-small", 600, "2026-11-21T10:00:00Z", 0.4, "64f0" * 6, "https://x/y")
    record = cloud_runs.CloudRecord(cloud_runs.RUN_ID, "1" * 16, "me", "me/x", cloud_runs.BUCKET, "f", jobs=(known,))
    found["cloud.json"] = msgspec.to_builtins(record)
    found["train.failed.json"] = {
        "error": {"code": "x", "message": "m", "expected": "", "got": "", "hint": ""},
        "exit_code": 5,
    }
    found["pull.json"] = {
        "inputs": {"bucket": cloud_runs.BUCKET, "state": "done", "checkpoint": 8},
        "outputs": {"train.json": {"bytes": 1, "sha256": "0" * 64}},
        "finished_at": "2026-11-21T10:00:00Z",
    }
    found["plan.json"]["policy"]["hub_model_id"] = "me/x"
    found["train.json"]["outputs"] = {
        "adapter/adapter_config.json": _digest(text(ADAPTER)),
        "adapter/adapter_model.safetensors": _digest(_weights()),
    }
    for step in ("convert", "quantize"):
        found[f"{step}.json"]["outputs"] = {
            name: entry | _digest(b"GGUF") for name, entry in found[f"{step}.json"]["outputs"].items()
        }
    found["verify.json"]["inputs"]["ggufs"] = {
        name: _digest(b"GGUF") for name in found["verify.json"]["inputs"]["ggufs"]
    }
    return found


def _digest(content: bytes) -> dict[str, Any]:
    return cloud_runs.digest(content)


def _weights() -> bytes:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    return _safetensors(
        {f"{name}.lora_A.weight": _entry((4, 8), 0), f"{name}.lora_B.weight": _entry((8, 4), 128)}, b"", 256
    )


def make_run(folder: Path, *, cloud: bool = False) -> Path:
    """The run, whole."""
    run = folder / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "gguf").mkdir()
    for name, document in documents().items():
        if name in ("train.failed.json", "pull.json", "cloud.json") and not cloud:
            continue
        (run / name).write_bytes(text(document))
    (run / "adapter" / "adapter_config.json").write_bytes(text(ADAPTER))
    (run / "adapter" / "adapter_model.safetensors").write_bytes(_weights())
    for step in ("convert", "quantize"):
        for name in documents()[f"{step}.json"]["outputs"]:
            (run / name).write_bytes(b"GGUF")
    shutil.copyfile(RUNS / "demo" / "recipe.yaml", run / "recipe.yaml")
    shutil.copyfile(RUNS / "demo" / "gguf" / "Modelfile", run / "gguf" / "Modelfile")
    (run / "metrics.jsonl").write_bytes(b"\n".join(text(_METRIC | {"step": n}) for n in range(1, 9)) + b"\n")
    for name in ("samples.jsonl", "held_out.jsonl"):
        (run / name).write_bytes(b"\n".join(text(_SAMPLE | {"row": n}) for n in range(1, 25)) + b"\n")
    return run


def hostile_run(data: bytes, folder: Path, *, cloud: bool = False) -> Path:
    """The run with one file changed: a record, lines, a text."""
    run = make_run(folder, cloud=cloud)
    names = sorted(path.name for path in run.glob("*.json"))
    lines = ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
    which, rest = data[0] if data else 0, data[1:]
    if which < 0xC0:
        name = names[which % len(names)]
        (run / name).write_bytes(file_bytes(documents()[name], rest))
    elif which < 0xF0:
        path = run / lines[which % 3]
        first, *others = path.read_bytes().splitlines()
        changed = file_bytes(json.loads(first), rest)
        path.write_bytes(b"\n".join([changed, *others] if which % 2 else [*others, changed]))
    else:
        path = (run / "recipe.yaml", run / "gguf" / "Modelfile", run / "adapter" / "adapter_config.json")[which % 3]
        path.write_bytes(file_bytes(ADAPTER, rest) if path.suffix == ".json" else cut(path.read_bytes(), rest))
    return run


def report(data: bytes, folder: Path) -> object:
    run = hostile_run(data, folder, cloud=bool(data) and data[0] % 2 == 0)
    done = command(["report", str(run), "--format", _form(data)], folder)
    page = run / "report.html"
    if page.is_file():
        html = page.read_text(encoding="utf-8")
        assert "<script" not in html and "javascript:" not in html
    return done


def diff(data: bytes, folder: Path) -> object:
    run, other = hostile_run(data, folder), folder / "other"
    shutil.copytree(RUNS / "tiny" if data[-1:] > b"\x7f" else RUNS / "demo", other)
    pair = [str(run), str(other)] if data[-1:] < b"\xa0" else [str(other), str(run)]
    return command(["diff", *pair, "--format", _form(data)], folder)


def push(data: bytes, folder: Path) -> object:
    """A dry run: what it would send is read, judged and written into a card."""
    run = hostile_run(data, folder)
    return command(["push", str(run), "--repo", "me/x", "--dry-run", "--format", _form(data)], folder)


def status(data: bytes, folder: Path) -> object:
    run = hostile_run(data, folder)
    words = ("status", "logs", "resume", "pull", "cancel")[data[-1] % 5 if data else 0]
    return command([words, str(run), "--format", _form(data)], folder)


def steps(data: bytes, folder: Path) -> object:
    """What needs the base model stops there at the latest: it is not on this machine."""
    run = hostile_run(data, folder)
    words = [["verify"], ["evaluate"], ["merge"], ["submit", "--dry-run"], ["local", "--resume", "--run-dir"]]
    words += [["export-gguf"]] if get_converter._cached() else []  # it would be fetched
    chosen = words[data[-1] % len(words) if data else 0]
    return command([*chosen, str(run), "--format", _form(data)], folder)


def _form(data: bytes) -> str:
    return "human" if sum(data) % 2 else "json"


TARGETS: dict[str, Target] = {"report": report, "diff": diff, "push": push, "status": status, "steps": steps}
__all__ = ["TARGETS", "in_folder"]
