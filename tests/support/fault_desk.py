"""Works through schedules of faults, several at a time: a Hub, a process for commands and a user for each."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import stand_in
from command_child import Commands
from fault_schedules import Schedule
from fault_user import User
from hub_emulator import Hub
from hub_models import add_model

WORKERS = 4  # most of a schedule is waiting
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
        add_model(hub)
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
            assert self.hub.unknown == [], self.hub.unknown
        except AssertionError as error:
            raise AssertionError("\n".join([repr(schedule), *user.said, str(error)])) from error
        finally:
            for job in self.hub.jobs.all:
                job.cancelled.set()
        return user.counts

    def close(self) -> None:
        self.commands.close()
        self.hub.__exit__()


@contextmanager
def desks(folder: Callable[[str], Path]) -> Iterator[ThreadPoolExecutor]:
    """Threads that have a desk each; `folder` makes a new one of a name."""
    made: list[Desk] = []

    def sit_down() -> None:
        _here.desk = Desk(folder("desk"))
        made.append(_here.desk)

    with ThreadPoolExecutor(WORKERS, initializer=sit_down) as pool:
        yield pool
    for desk in made:
        desk.close()


_here = threading.local()


def work_through(pool: ThreadPoolExecutor, schedules: list[Schedule]) -> None:
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
