"""What a job runs in place of `train.py` where only its files matter: it keeps what that keeps, in the same order,
in a tenth of a second, and ends with the same bytes however often it was stopped.

    python stand_in.py PLAN --job [--data PATH]
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

STEPS, STEP_SECONDS = 4, 0.04
ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
RECORDS = ("environment.json", "train.json")
OF_CHECKPOINT = ("adapter_model.safetensors", "before.json", "complete.json", "optimizer.pt")


def content(name: str, run: Path) -> bytes:
    """The bytes of a file, by the name that it has in the run directory `run`, which holds the plan."""
    if name == "train.json":
        outputs = {each: digest(content(each, run)) for each in ADAPTER}
        data = {"rows": 40, "train_rows": 40, "held_out_rows": 0}
        recipe_hash = json.loads((run / "plan.json").read_text())["recipe_hash"]
        record = {"recipe_hash": recipe_hash, "steps": STEPS, "verdict": "pass", "outputs": outputs, "data": data}
        return json.dumps(record | {"figures": {}}).encode()
    if name.endswith(".json"):
        return json.dumps({"name": name}).encode()
    return random.Random(name).randbytes(3000)


def metrics(steps: int) -> bytes:
    lines = ({"step": n, "steps": STEPS, "loss": 3 - n / 8, "seconds": STEP_SECONDS} for n in range(1, steps + 1))
    return "".join(json.dumps(line | {"tokens_per_second": 100.0}) + "\n" for line in lines).encode()


def digest(data: bytes) -> dict[str, object]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def main(kept: Path) -> int:
    if not os.environ.get("HF_TOKEN") or not (kept / "plan.json").is_file():
        raise SystemExit("no token, or no plan")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(end(kept, "failed", 5)))
    if whole(kept / "kept.json") and json.loads((kept / "kept.json").read_text())["state"] == "done":
        return 0
    done = restored(kept)
    for step in range(done + 1, STEPS + 1):
        time.sleep(STEP_SECONDS)
        print(json.dumps({"event": "step", "step": step, "steps": STEPS}), flush=True)
        put(kept / "metrics.jsonl", metrics(step))
        keep(kept, step)
    for name in (*ADAPTER, *RECORDS):
        put(kept / name, content(name, kept))
    return end(kept, "done", 0)


def keep(kept: Path, step: int) -> None:
    """A checkpoint, its marker last; the two newest stay."""
    name = f"checkpoints/checkpoint-{step}"
    for file in OF_CHECKPOINT:
        put(kept / name / file, content(f"{name}/{file}", kept))
    marker = {file: digest(content(f"{name}/{file}", kept)) for file in OF_CHECKPOINT}
    put(kept / name / "kept.json", json.dumps(marker).encode())
    old = kept / "checkpoints" / f"checkpoint-{step - 2}"
    (old / "kept.json").unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def restored(kept: Path) -> int:
    """The newest step whose checkpoint is whole; 0 for none."""
    for step in range(STEPS, 0, -1):
        folder = kept / "checkpoints" / f"checkpoint-{step}"
        if whole(folder / "kept.json"):
            files = json.loads((folder / "kept.json").read_text())
            if all(
                (folder / name).is_file() and digest((folder / name).read_bytes()) == d for name, d in files.items()
            ):
                return step
    return 0


def end(kept: Path, state: str, code: int) -> int:
    names = [n for n in (*ADAPTER, *RECORDS, "metrics.jsonl") if (kept / n).is_file()]
    files = {name: digest((kept / name).read_bytes()) for name in names}
    run = os.environ["SKILL_TRAIN_RUN"]
    put(kept / "kept.json", json.dumps({"run": run, "state": state, "exit_code": code, "files": files}).encode())
    return code


def whole(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).parent))
