"""Stands where a command expects Python: see `warm_start.py`. Imports as little as it can: json, signal and socket
would take a third of its time."""

from __future__ import annotations

import _signal
import _socket
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRAINING = ("train.py", "converter_child.py", "command_child.py", "fed_runs.py")
OF_THE_HUB = "hub_child.py"
OURS = "skill_train."  # the workers, which are started as modules
TORCH_WORKER = "skill_train.machine.torch_worker"
COMMAND, MAIN = "skill-train", "from skill_train.cli import main; main()"  # the console script, and what it does
OF_TORCH = ("chat", "demo", "evaluate", "export-gguf", "merge", "verify")  # commands that import what a training does
# What is read by libraries that are imported in the environment of the start, or by nobody at an import.
MAY_DIFFER = (
    "HF_", "HUGGING", "HOME", "XDG_", "TMP", "SKILL_TRAIN_", "TEST_", "PYTEST_", "TRANSFORMERS_VERBOSITY", "NO_PROXY",
    "PWD", "OLDPWD", "_", "SHLVL", "NO_LOCAL_GGUF", "DISABLE_TELEMETRY", "DO_NOT_TRACK", "TORCHINDUCTOR_CACHE_DIR",
    "THP_MEM_ALLOC_ENABLE", "PYTHONPATH", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "GGML_NO_BACKTRACE",
    "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "SSL_CERT_FILE",
    "ACCELERATOR", "CPU_CORES", "JOB_ID", "MEMORY",  # of a job
    "COLUMNS", "LINES",  # which readline sets for the children of whoever imports it
)  # fmt: skip
PASSED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


def main(known: dict[str, Any]) -> None:
    """With what is known of the warm processes."""
    words = sys.argv[1:]
    beside = words[:1] != ["-P"]
    program = words if beside else words[1:]
    kind = _kind(program)
    socket_path = known["sockets"].get(kind) if _starts_alike(known, kind) else None
    connection = _connected(socket_path) if socket_path else None
    if connection is None:
        os.execv(known["python"], [os.path.abspath(sys.argv[0]), *words])  # noqa: S606 - what it starts comes here too
    _stand_for(connection, program, beside)


def _kind(program: list[str]) -> str | None:
    """Of the libraries that it needs. None for what starts from Python: a job's supervisor, say, imports little."""
    if program[:2] == ["-m", TORCH_WORKER]:
        return "training"
    if program[:1] == ["-m"]:
        return "worker" if program[1].startswith(OURS) and program[1].endswith("_worker") else None
    if program[:2] == ["-c", MAIN]:
        return _kind_of_command(program[2:])
    name = os.path.basename(program[0]) if program else ""
    if name == COMMAND:
        return _kind_of_command(program[1:])
    if name == OF_THE_HUB:
        return "command"
    if name == "command_child.py" and program[1:]:
        return _kind_of_command(program[1:])
    return "training" if name in TRAINING and "--job" not in program else None


def _kind_of_command(words: list[str]) -> str | None:
    if any(map(_stays_here, (0, 1, 2))):
        return None
    imports_torch = "--self-test" in words or any(word in OF_TORCH for word in words[:1])
    return "training" if imports_torch else "command"


def _stays_here(number: int) -> bool:
    """A terminal, which belongs to the processes of one session, or a standard stream that is closed."""
    try:
        os.fstat(number)
    except OSError:
        return True
    return os.isatty(number)


def _starts_alike(known: dict[str, Any], kind: str | None) -> bool:
    """Whether torch would read the environment that it was imported in, and find the same packages, with the same
    limits and as many cores."""
    may_differ = MAY_DIFFER if kind == "training" else (*MAY_DIFFER, "PATH")  # llama.cpp looks for no program
    own, theirs = (
        {name: text for name, text in environment.items() if not name.startswith(may_differ)}
        for environment in (os.environ, known["environment"])
    )
    packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # another's could replace a library, or start code
    limits = {kind: resource.getrlimit(kind) for kind in known["limits"]}
    alike = limits == known["limits"] and len(os.sched_getaffinity(0)) == known["cores"]
    return bool(own == theirs and alike and {*packages} <= {"", *known["packages"]})


def _connected(path: str) -> _socket.socket | None:
    """The warm process may not listen yet."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            time.sleep(0.02)
    return None


def _stand_for(connection: _socket.socket, program: list[str], beside: bool) -> None:
    numbers = [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if _is_handed_on(number, connection)]
    mask = os.umask(0)
    os.umask(mask)
    ignored = [number for number in PASSED_ON if _signal.getsignal(number) is _signal.SIG_IGN]
    request = {
        "executable": os.path.abspath(sys.argv[0]), "arguments": program, "beside": beside,
        "files": numbers, "umask": mask, "folder": os.getcwd(),
        "file_limit": resource.getrlimit(resource.RLIMIT_FSIZE), "environment": dict(os.environ),
        "ignored": ignored, "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    connection.sendmsg([repr(request).encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    process = int(connection.recv(64))
    for number in PASSED_ON:
        if number not in ignored:
            _signal.signal(number, lambda signum, _: os.kill(process, signum))
    os.closerange(0, 2)
    code = int(connection.recv(64) or -_signal.SIGKILL)
    if code < 0:  # as the program ended
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        _signal.pause()
    os._exit(code)


def _is_handed_on(number: int, connection: _socket.socket) -> bool:
    try:
        return number != connection.fileno() and os.get_inheritable(number)
    except OSError:
        return False
