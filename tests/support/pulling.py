"""The step `pull` of a chain that is killed: a finished run in a bucket of the Hub for tests."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import cloud_runs
from hub_emulator import Hub
from killing import Chain
from skill_train.core.files import write_json
from skill_train.run.folder import RunDir


@contextlib.contextmanager
def fetched_run(root: Path) -> Iterator[Chain]:
    """A chain of this step; the Hub lives as long as the block."""
    with Hub(root / "hub") as hub:
        place = root / "pulled"
        run = RunDir(place / "run")
        write_json(run.plan, cloud_runs.plan())
        cloud = cloud_runs.Cloud(hub, run)
        draw = random.Random(0)
        more = {f"adapter/part-{n}.bin": draw.randbytes(40_000) for n in range(24)}  # some groups of files
        samples = b'{"row": 1}\n' * 50
        cloud.keep({"plan.json": run.plan.read_bytes(), **cloud_runs.result(**more, **{"samples.jsonl": samples})})
        job = cloud.start("pass")
        while not job.ended:
            time.sleep(0.02)
        chain = Chain(root)
        chain.add("pull", ("pull", "run"), place, hub.environment(root / "home"))
        yield chain
    assert hub.unknown == []
