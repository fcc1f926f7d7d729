"""Programs of others that import torch and transformers, each in a process of its own: one process has imported both
and forks for each, so that their start costs milliseconds and not seconds."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path


def run(script: Path, *arguments: object, log: Path, environment: dict[str, str]) -> int:
    """The exit code of `python script arguments…`; what it writes is in `log`."""
    request = {"arguments": [str(script), *map(str, arguments)], "log": str(log), "environment": environment}
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[str]:
    """Ends when this process does: its requests end. Its folder is not that of the first test, which may go with it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], cwd=Path(__file__).parent, text=True, **pipes)


def _serve() -> None:
    import torch._dynamo  # noqa: F401 - else torch imports it in each fork, at the first operation without gradients
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(_run(json.loads(line)))
        _, status = os.waitpid(process, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _run(request: dict[str, object]) -> int:
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(dict(request["environment"]))  # type: ignore[call-overload]
    sys.argv = list(request["arguments"])  # type: ignore[call-overload]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    _serve()
