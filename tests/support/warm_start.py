"""Starts the training program and the converter in milliseconds, for commands that tests run in turn.

Both import torch, transformers and TRL, which takes 5 s of a core. One process imports them once and forks for each
start: `warm_shim.py` stands where the commands expect Python, and hands it the arguments, the environment, the limits
and the open files. What it cannot start alike (`-m`, other scripts, another environment for the libraries, which read
theirs when they are imported) it leaves to Python itself.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

SHIM = Path(__file__).with_name("warm_shim.py")
# What the libraries read when they are imported.
READ_AT_IMPORT = (
    "ACCELERATE", "CUDA", "DATASETS", "DO_NOT_TRACK", "HF_", "HOME", "HUGGING", "KMP", "LD_", "MKL", "NCCL", "OMP",
    "OPENBLAS", "PATH", "PYTHON", "PYTORCH", "RANK", "LOCAL_RANK", "TMP", "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRL",
    "USE_", "WORLD_SIZE", "XDG",
)  # fmt: skip
# What `local` and the converter set for their children, whatever they had themselves.
OF_CHILDREN = {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


class WarmStart:
    """The process that has imported. `python` is the file to start programs with."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        path = Path(self._folder.name) / "socket"
        environment = dict(os.environ) | OF_CHILDREN
        self._server = subprocess.Popen([sys.executable, __file__, str(path)], stdin=subprocess.PIPE, env=environment)
        known: dict[str, Any] = {"socket": str(path), "python": sys.executable, "prefixes": READ_AT_IMPORT}
        known["environment"] = {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}
        (Path(self._folder.name) / "warm.json").write_text(json.dumps(known))
        self.python = Path(self._folder.name) / "python"
        self.python.write_text(f"#!{sys.executable} -ES\n{SHIM.read_text(encoding='utf-8')}")
        self.python.chmod(0o755)

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(20)
        self._folder.cleanup()


def _serve(path: str) -> None:
    """Until the tests that started it end, which closes standard input. Imports when it is first asked."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers of connections
    while True:
        ready, _, _ = select.select([0, listening.fileno()], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        _import()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(connection)
            os._exit(0)
        connection.close()


def _import() -> None:
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from trl import SFTTrainer  # noqa: F401


def _keep(connection: socket.socket) -> None:
    """Forks the program, tells its number and, at its end, how it ended. Kills it when nobody waits for it any more."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 20, 64)
    request = json.loads(text)
    process = os.fork()
    if process == 0:
        connection.close()
        os._exit(_run(request, files))
    for file in {0, 1, 2, *files}:  # theirs to close
        os.close(file)
    connection.sendall(f"{process}\n".encode())
    gone = os.pidfd_open(process)
    ready, _, _ = select.select([gone, connection.fileno()], [], [])
    if gone not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(request: dict[str, Any], files: list[int]) -> int:
    """The program, with what its starter had: open files under their numbers, limits, folder, environment."""
    high = [os.dup2(file, 512 + index) for index, file in enumerate(files)]
    os.closerange(0, 512)
    for number, file in zip(request["files"], high, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    for kind, limits in request["limits"]:
        resource.setrlimit(kind, limits)
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    if request["beside"]:  # as Python has it without -P
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
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
    _serve(sys.argv[1])
