"""On PYTHONPATH of a command that is to be killed: every Python process of it counts what it does to files below a
folder, and the whole command dies before a chosen one of these changes. `support/killing.py` sets the environment.

Native code (llama.cpp, safetensors, torch's archives) is not seen; kills by the clock hit it.
"""

import os
import signal
import sys

LINE = 200  # bytes of a record, so that the size of the file is the count
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
WRITING = os.O_WRONLY | os.O_RDWR


def install(log: str, folder: str, at: str, whom: str) -> None:
    top = int(os.environ.setdefault("KILL_TOP", str(os.getpid())))
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event not in WATCHED or (event == "open" and not int(str(arguments[2] or 0)) & WRITING):
            return
        if not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.path.abspath(arguments[0])
        if path.startswith(folder):
            line = f"{event} {os.path.relpath(path, folder)}"
            os.write(file, line[: LINE - 1].ljust(LINE - 1).encode() + b"\n")
            if str(os.fstat(file).st_size // LINE) == at or (not at.isdigit() and line.startswith(at)):
                kill(top, whom)

    sys.addaudithook(watch)


def kill(top: int, whom: str) -> None:
    if whom == "parent":
        os.kill(top, signal.SIGKILL)
        return
    os.killpg(top, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)  # the training program is in a group of its own


if os.environ.get("KILL_LOG"):
    install(os.environ["KILL_LOG"], os.environ["KILL_FOLDER"], os.environ["KILL_AT"], os.environ["KILL_WHOM"])
