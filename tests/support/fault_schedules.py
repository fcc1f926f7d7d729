"""Random troubles of a run in the cloud, by seed: which requests fail and how, and how its jobs end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hub_emulator import ALWAYS, Fault, Hub, JobFault, faults

LATE_SECONDS = 4.0  # longer than the patience with one request
_JOB = r"/api/jobs/me/[0-9a-f]{24}"
_LOGS = f"GET {_JOB}/logs$"

# Requests by the part of the run that makes them: what is searched in `METHOD /path`.
PLACES = {
    "checks": (
        "GET /api/whoami-v2",
        r"GET /api/models/me/[^/]+$",
        "GET /api/models/Qwen/.*",
        "/auth-check",
        "GET /api/buckets/me/jobs-artifacts$",
        "GET /api/jobs/hardware",
    ),
    "upload": (
        "POST /api/buckets/me/jobs-artifacts$",
        "GET .*/xet-write-token",
        "POST /cas/.*/xorbs",
        "POST /cas/.*/shards",
        "POST /api/buckets/.*/batch$",
    ),
    "start": ("POST /api/jobs/me$", "GET /api/jobs/me$"),
    "follow": (f"GET {_JOB}$", _LOGS, "GET /api/buckets/.*/tree", f"POST {_JOB}/cancel"),
    "fetch": ("GET .*/xet-read-token", "GET /cas/.*/reconstructions", "GET /cas/.*/xorbs", "POST .*/paths-info"),
}
REQUESTS = {
    "401": faults.UNAUTHORIZED,
    "402": faults.NO_CREDIT,
    "403": faults.NO_PERMISSION,
    "404": faults.NOT_FOUND,
    "429": faults.RATE_LIMIT,
    "500": faults.SERVER_ERROR,
    "500 after": faults.DONE_AND_ERROR,
    "502": faults.BAD_GATEWAY,
    "no answer": faults.NO_ANSWER,
    "no answer after": faults.DONE_AND_NO_ANSWER,
    "cut": Fault(cut=2),
    "late": Fault(seconds=LATE_SECONDS),
}
JOBS = ("stuck", "exit", "137", "timeout", "restart")


@dataclass
class Schedule:
    """What goes wrong.

    Attributes:
        requests: `(part of the run, pattern, name of the fault, first call, how many in a row)`.
        jobs: of the first, the second … job: how it ends.
        flags: whether the recipe is said in flags, so that the submission plans too.
    """

    seed: int
    requests: list[tuple[str, str, str, int, float]] = field(default_factory=list)
    jobs: list[JobFault] = field(default_factory=list)
    flags: bool = False

    def arm(self, hub: Hub) -> None:
        for _, pattern, name, call, times in self.requests:
            hub.faults.add(pattern, REQUESTS[name], call=call, times=times)
        for fault in self.jobs:
            hub.faults.add_job(fault)


def draw(seed: int) -> Schedule:
    """Up to three troubles with requests and two with jobs, and never none."""
    dice = random.Random(seed)
    made = Schedule(seed, flags=dice.random() < 0.3)
    made.jobs = [_job(dice, number) for number in range(1, dice.choice((0, 0, 1, 1, 2)) + 1)]
    for _ in range(dice.choice((1, 1, 2, 3) if made.jobs else (1, 2, 3))):
        part = dice.choice(list(PLACES))
        made.requests.append(_request(dice, part, dice.choice(PLACES[part])))
    return made


def each() -> list[Schedule]:
    """Every fault at every request, alone: until it is mended, or once."""
    made = []
    for part, patterns in PLACES.items():
        for pattern in patterns:
            for name in REQUESTS:
                if _fits(pattern, name):
                    seed = 10_000 + len(made)
                    times = ALWAYS if seed % 2 else 1
                    killed = [_ending("137", 1, "step.: 3")] if part in ("start", "fetch") else []
                    made.append(Schedule(seed, [(part, pattern, name, 1, times)], killed))
    return made


def _request(dice: random.Random, part: str, pattern: str) -> tuple[str, str, str, int, float]:
    name = dice.choice([name for name in REQUESTS if _fits(pattern, name)])
    if name == "late":
        return part, pattern, name, dice.randint(1, 3), 1
    return part, pattern, name, dice.randint(1, 4), dice.choice((1, 1, 2, 3, ALWAYS))


def _fits(pattern: str, name: str) -> bool:
    """Only a log is a stream. The store behind a bucket has a client of its own, with tries and pauses of its own."""
    if name == "cut":
        return pattern == _LOGS
    return name in ("403", "404", "500", "no answer") if "/cas/" in pattern else True


def _job(dice: random.Random, number: int) -> JobFault:
    line = f"step.: {dice.randint(1, 3)}"
    return _ending(dice.choice(JOBS), number, line if dice.random() < 0.8 else None, seconds=dice.random() / 3)


def _ending(name: str, number: int, line: str | None, seconds: float = 0.0) -> JobFault:
    code = {"137": 137, "exit": 1 + number}.get(name, 0)
    ending = "exit" if name in ("137", "exit") else name
    return JobFault(ending, code, seconds, None if ending == "stuck" else line, number, 1)
