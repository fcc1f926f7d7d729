"""No run is lost and no job is there twice, whatever fails: random schedules by seed, and each fault at each request.

The commands are the package's own; a job runs `stand_in.py`. `SKILL_TRAIN_SEED` is added to the seeds.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stand_in
from command_child import Commands
from fault_schedules import Schedule, draw, each
from fault_user import User
from hub_emulator import Hub
from models import recorded

pytest.importorskip("huggingface_hub")

SEED = int(os.environ.get("SKILL_TRAIN_SEED", "0"))
WORKERS = 3  # most of a schedule is waiting
SCHEDULES = 200
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SAID = ["--model", MODEL, "--data", "rows.jsonl", "--flavor", "t4-small"]


class Desk:
    """A Hub and a process for commands, which work through one schedule after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.hub = Hub(folder / "hub").__enter__()
        self.hub.jobs.stand_in = Path(stand_in.__file__)
        self.hub.jobs.grace_seconds = 0.5
        self.commands = Commands(self.hub.environment(self.home))
        config = json.dumps(recorded("qwen2.5-0.5b")["config"]).encode()
        files = {"config.json": config, "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'}
        self.info = {"safetensors": {"parameters": {"BF16": 494_032_768}, "total": 494_032_768}}
        self.files = files | {"model.safetensors": bytes(1000)}
        rows = ({"prompt": f"What is late {n}?", "completion": "The ticket."} for n in range(40))
        self.rows = "".join(json.dumps(row) + "\n" for row in rows)
        self.plan = self._plan()

    def _plan(self) -> str:
        folder = self._fresh("plan")
        self.commands.run(
            folder, self.hub.environment(self.home), "plan", *SAID, "--where", "cloud", "--out", "plan.json"
        )
        return (folder / "plan.json").read_text()

    def _fresh(self, name: str) -> Path:
        """A Hub as on the first day, and a folder with the data."""
        hub = self.hub
        for kept in (hub.jobs.all, hub.log, hub.faults.struck, hub.repositories, hub.buckets):
            kept.clear()  # type: ignore[attr-defined]
        hub.faults.clear()
        hub.add("model", MODEL, self.files, info=self.info)
        folder = self.folder / name
        folder.mkdir()
        (folder / "rows.jsonl").write_text(self.rows)
        return folder

    def work(self, schedule: Schedule) -> Counter[tuple[str, str]]:
        folder = self._fresh(str(schedule.seed))
        (folder / "plan.json").write_text(self.plan)
        user = User(self.hub, self.commands, self.home, folder, schedule)
        try:
            user.get(["submit", *(SAID if schedule.flags else ["plan.json"]), "--run-dir", "run", "--yes"])
            assert self.hub.unknown == []
        except AssertionError as error:
            raise AssertionError("\n".join([repr(schedule), *user.said, str(error)])) from error
        finally:
            for job in self.hub.jobs.all:
                job.cancelled.set()
        return user.counts

    def close(self) -> None:
        self.commands.close()
        self.hub.__exit__()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadPoolExecutor]:
    desks: list[Desk] = []

    def sit_down() -> None:
        _here.desk = Desk(tmp_path_factory.mktemp("desk"))
        desks.append(_here.desk)

    with ThreadPoolExecutor(WORKERS, initializer=sit_down) as made:
        yield made
    for desk in desks:
        desk.close()


_here = threading.local()


def _all(pool: ThreadPoolExecutor, schedules: list[Schedule]) -> None:
    """Works through them, and prints what came of them; the first three that failed are told."""
    counts: Counter[tuple[str, str]] = Counter()
    failed = []
    for future in [pool.submit(lambda schedule: _here.desk.work(schedule), one) for one in schedules]:
        if error := future.exception():
            failed.append(error)
        else:
            counts += future.result()
    for key, count in sorted(counts.items()):
        print(*key, count)
    if failed:
        raise AssertionError(f"{len(failed)} of {len(schedules)} failed:\n" + "\n\n".join(map(str, failed[:3])))


@pytest.mark.timeout(900)
def test_random_schedules(pool: ThreadPoolExecutor) -> None:
    number = int(os.environ.get("SKILL_TRAIN_SCHEDULES", SCHEDULES))
    _all(pool, [draw(seed) for seed in range(SEED, SEED + number)])


@pytest.mark.timeout(900)
def test_each_fault_at_each_request(pool: ThreadPoolExecutor) -> None:
    """Every fourth of them; with `SKILL_TRAIN_EVERY=1` all, in ten minutes."""
    every = int(os.environ.get("SKILL_TRAIN_EVERY", "4"))
    _all(pool, each()[SEED % every :: every])
