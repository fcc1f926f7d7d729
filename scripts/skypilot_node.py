"""One machine of a SkyPilot task: brings back what the run has kept, trains, and keeps what it makes.

    python skypilot_node.py hf://buckets/NAMESPACE/BUCKET/FOLDER --timeout SECONDS [--data PATH]

SkyPilot runs it on every machine of the task, in the folder with train.py and plan.json, and says with SKYPILOT_* which
machine this is. One machine trains with `train.py --job`. Several start the processes of one training with
`accelerate launch`, each machine its own; the first of them keeps the files.

What is kept goes through `hf buckets sync`, once a minute and at the end: RunPod and Vast can mount no bucket. Standard
library only. Exit codes: those of train.py; 4 also when the bucket cannot be used, before anything is trained, and 5
when it does not take the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEEP_SECONDS = 60.0
STOP_SECONDS = 600.0  # to finish a step and save a checkpoint after a polite end
PAUSES = (5, 20, 60)  # seconds between tries of the bucket
PORT = "29500"  # torch's own
RUN = Path("run")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bucket", help="folder of a bucket, hf://buckets/…")
    parser.add_argument("--timeout", type=float, required=True, help="seconds of training, then it is ended politely")
    parser.add_argument("--data", type=Path, help="where the plan's data lies here")
    arguments = parser.parse_args(argv)
    first = os.environ["SKYPILOT_NODE_RANK"] == "0"
    if not (bring_back(arguments.bucket) and (keep(arguments.bucket) if first else True)):
        return 4
    plan = json.loads((RUN / "plan.json").read_text(encoding="utf-8"))
    code = trained(command(plan, arguments.data), plan, arguments.bucket if first else None, arguments.timeout)
    is_kept = keep(arguments.bucket) if first else True
    return code if is_kept else code or 5


def bring_back(bucket: str) -> bool:
    """The bucket is there and may be written, and what it has of this run lies in `run/`."""
    owner_and_name = "/".join(bucket.removeprefix("hf://buckets/").split("/")[:2])
    there = hf("buckets", "create", owner_and_name, "--private", "--exist-ok") and hf(
        "buckets", "sync", bucket, str(RUN)
    )
    RUN.mkdir(exist_ok=True)
    shutil.copyfile("plan.json", RUN / "plan.json")
    return there


def keep(bucket: str) -> bool:
    """What is removed here, such as an old checkpoint, is removed there too; files that are being written stay here."""
    return hf("buckets", "sync", str(RUN), bucket, "--delete", "--exclude", "*.part")


def hf(*words: str) -> bool:
    """One command of the Hub's client, tried again when it fails."""
    client = str(Path(sys.executable).with_name("hf"))
    for pause in (*PAUSES, None):
        if subprocess.run([client, *words, "--quiet"], stdout=subprocess.DEVNULL, check=False).returncode == 0:
            return True
        if pause is not None:
            time.sleep(pause)
    print(f"the bucket could not be used: hf {' '.join(words)}", file=sys.stderr, flush=True)
    return False


def command(plan: dict[str, Any], data: Path | None) -> list[str]:
    """How this machine trains. Of two equal options of accelerate the later one counts."""
    program = ["train.py", str(RUN / "plan.json")]
    where = ["--data", str(data)] if data else []
    if os.environ["SKYPILOT_NUM_NODES"] == "1":
        return [sys.executable, *program, "--job", *where]
    launcher = ["-m", "accelerate.commands.launch", *plan["launch"]["arguments"]]
    launcher += ["--num_machines", os.environ["SKYPILOT_NUM_NODES"]]
    launcher += ["--machine_rank", os.environ["SKYPILOT_NODE_RANK"]]
    launcher += ["--main_process_ip", os.environ["SKYPILOT_NODE_IPS"].split()[0], "--main_process_port", PORT]
    return [sys.executable, *launcher, *program, "--resume", *where]


def trained(words: list[str], plan: dict[str, Any], bucket: str | None, timeout: float) -> int:
    """Its exit code. While it runs, what it makes is kept; after `timeout` seconds it saves a checkpoint and ends."""
    child = subprocess.Popen(words, env=os.environ | plan["launch"]["environment"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: child.send_signal(got))
    end = time.monotonic() + timeout
    while child.poll() is None:
        seconds_left = end - time.monotonic()
        if seconds_left <= 0:
            return stopped(child)
        try:
            child.wait(min(KEEP_SECONDS, seconds_left))
        except subprocess.TimeoutExpired:
            if bucket is not None:
                keep(bucket)
    return child.returncode


def stopped(child: subprocess.Popen[bytes]) -> int:
    print("the time is over: the run saves a checkpoint and ends", file=sys.stderr, flush=True)
    child.terminate()
    try:
        return child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
