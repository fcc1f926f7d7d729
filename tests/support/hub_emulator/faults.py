"""What can go wrong, and when: faults of a request, and faults of a job."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, field

ALWAYS = math.inf


@dataclass(frozen=True)
class Fault:
    """How a request is answered instead.

    Attributes:
        status: of the answer; 200 together with `seconds` is the right answer, late. 0 is no answer: the connection is
            closed.
        seconds: before anything is sent.
        drop_seconds: between the bytes of the answer, which are sent one by one.
        after: the request is first carried out, and then answered with `status`.
        cut: a stream is answered rightly, and the connection cut after so many events.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "made up"}'
    seconds: float = 0.0
    drop_seconds: float = 0.0
    after: bool = False
    cut: int | None = None

    @property
    def lets_through(self) -> bool:
        return self.status == 200 and not self.drop_seconds


class Lie(Fault):
    """An answer with another body, whatever its status."""

    @property
    def lets_through(self) -> bool:
        return False


# The words: huggingface_hub 2.4 for 401 and 429; users' reports for 402 and 403 (2026).
UNAUTHORIZED = Fault(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
NO_CREDIT = Fault(
    402,
    body=b'{"error": "Pre-paid credit balance is insufficient - add more credits to your account to use Jobs."}',
)
NO_PERMISSION = Fault(403, {"X-Error-Message": "You don't have the required permissions to complete this action"})
NOT_FOUND = Fault(404, {"X-Error-Message": "Not found"})
RATE_LIMIT = Fault(
    429, {"RateLimit": '"api";r=0;t=1', "RateLimit-Policy": '"fixed window";"api";q=500;w=300', "Retry-After": "1"}
)
SERVER_ERROR = Fault(500)
DONE_AND_ERROR = Fault(500, after=True)  # it happened, and the client cannot know
BAD_GATEWAY = Fault(502)
NO_ANSWER = Fault(0)
DONE_AND_NO_ANSWER = Fault(0, after=True)


@dataclass(frozen=True)
class JobFault:
    """How an attempt of a job ends, or does not begin.

    Attributes:
        ending: `stuck` (never leaves SCHEDULING), `exit` (the attempt is killed and reported with `code`), `timeout`
            (the job's time is up), or `restart` (the node is lost, the job starts once more, no attempt is used up).
        code: 137 is what a container killed for its memory reports.
        seconds: after the attempt began.
        line: a pattern; the fault strikes when a line of the log matches, and `seconds` does not count.
        job: which of the jobs, from 1 in the order they were created; None for each.
        attempt: which of its starts, from 1; None for each.
    """

    ending: str
    code: int = 137
    seconds: float = 0.0
    line: str | None = None
    job: int | None = None
    attempt: int | None = 1


@dataclass
class _Planned:
    pattern: str
    fault: Fault
    call: int
    times: float
    seen: int = 0


class Faults:
    """The schedule of one server. `struck` lists what has happened, as `METHOD /path: status`."""

    def __init__(self) -> None:
        self.struck: list[str] = []
        self._requests: list[_Planned] = []
        self._jobs: list[JobFault] = []
        self._lock = threading.Lock()

    def add(self, pattern: str, fault: Fault, *, call: int = 1, times: float = 1) -> None:
        """Plans a fault of requests.

        Args:
            pattern: searched in `METHOD /path`.
            call: the first matching request that it strikes, from 1, counted from now.
            times: how many in a row; `ALWAYS` for all.
        """
        self._requests.append(_Planned(pattern, fault, call, times))

    def add_job(self, fault: JobFault) -> None:
        self._jobs.append(fault)

    def clear(self) -> None:
        self._requests, self._jobs = [], []

    def of_request(self, method: str, path: str) -> Fault | None:
        """The fault that strikes this request; counts it for all that match."""
        struck = None
        with self._lock:
            for planned in self._requests:
                if not re.search(planned.pattern, f"{method} {path}"):
                    continue
                planned.seen += 1
                if struck is None and planned.call <= planned.seen < planned.call + planned.times:
                    struck = planned.fault
                    self.struck.append(f"{method} {path}: {struck.status}")
        return struck

    def of_job(self, number: int, attempt: int) -> JobFault | None:
        """The fault of this start of a job, the first that matches."""
        for fault in self._jobs:
            if fault.job in (None, number) and fault.attempt in (None, attempt):
                return fault
        return None
