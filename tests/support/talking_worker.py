"""A worker that stays, for tests: answers what it is asked, as `python -m talking_worker`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.core.live_worker import Send, live_worker_main


def work(job: Any, receive: Callable[[], Any], send: Send) -> None:
    send({"job": job, "pid": os.getpid(), "arguments": sys.argv[1:]})
    while True:
        request = receive()
        if "signal" in request:
            print("the last words of native code", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.Signals[request["signal"]])
        if "bad_alloc" in request:
            print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
            os.abort()
        if "refuse" in request:
            raise UsageError(request["refuse"], code="bad_usage", hint="try something else")
        if "print" in request:
            print("native code says something on its standard output")
        for part in request.get("parts", []):
            send(part)
        if "end" in request:
            return


if __name__ == "__main__":
    live_worker_main(work)
