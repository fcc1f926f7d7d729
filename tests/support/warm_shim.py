"""Stands where a command expects Python: see `warm_start.py`. Imports as little as it can."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WARM = ("train.py", "converter_child.py")


def main() -> None:
    with open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "warm.json")) as file:
        known = json.load(file)
    words = sys.argv[1:]
    beside = words[:1] != ["-P"]
    script = words if beside else words[1:]
    alike = script and os.path.basename(script[0]) in WARM and _reads_alike(known)
    connection = _connected(known["socket"]) if alike else None
    if connection is None:
        os.execv(known["python"], [known["python"], *words])  # noqa: S606
    _stand_for(connection, script, beside)


def _reads_alike(known: dict[str, Any]) -> bool:
    """Whether the libraries would read the environment that the warm process has."""
    own = {name: value for name, value in os.environ.items() if name.startswith(tuple(known["prefixes"]))}
    return bool(own == known["environment"])


def _connected(path: str) -> socket.socket | None:
    """The warm process may not listen yet."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            time.sleep(0.02)
    return None


def _stand_for(connection: socket.socket, script: list[str], beside: bool) -> None:
    numbers = [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if _is_handed_on(number, connection)]
    limits = [(kind, resource.getrlimit(kind)) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
    request = {
        "arguments": script, "beside": beside, "files": numbers, "limits": limits, "folder": os.getcwd(),
        "environment": dict(os.environ),
    }  # fmt: skip
    socket.send_fds(connection, [json.dumps(request).encode()], numbers)
    answers = connection.makefile()
    process = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: os.kill(process, signum))
    os.closerange(0, 2)
    code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:  # as the program ended
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def _is_handed_on(number: int, connection: socket.socket) -> bool:
    try:
        return number != connection.fileno() and os.get_inheritable(number)
    except OSError:
        return False


if __name__ == "__main__":
    main()
