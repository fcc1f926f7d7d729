"""Starts commands, the training program, the converter and the workers in a fraction of a second, for tests that are
not about their start.

The training program, the converter and the commands that read models import torch, transformers and TRL, which takes
5 s of a core. One process imports torch, which reads nothing that tests change, and forks for each environment that it
meets. The fork imports the rest in that environment, and forks for each start. The workers import llama.cpp, without
torch, and the other commands little: two more processes do so for them.

Each Hub of a test has an address and a home of its own, which huggingface_hub, datasets and transformers read when they
are imported. So they are imported with stand-ins, and each start finds its own in their place.

`warm_shim.py` stands where commands expect Python, and hands over arguments, environment and open files. What cannot be
started alike (other modules and scripts, limits, an environment that torch would read) it leaves to Python.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil
import re
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[2] / "skill")
# What `local` and the converter set for their children.
OF_LLAMA_CPP = {"GGML_NO_BACKTRACE": "1"}  # which may read it when it is loaded
OF_CHILDREN = {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
# At an import, for which they are left out. Telemetry is off with or without two of them. Proxies, certificates, the
# folder of temporary files and the settings of hf_xet are read when something is first asked for. llama.cpp is there
# before; `_as_loud_as_told` has transformers read its own variable again.
READ_BY_NO_LIBRARY = (
    "PYTEST_", "TEST_", "SKILL_TRAIN_", "PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES", "TMPDIR", "SSL_CERT_FILE",
    "PYTHONPATH", "ACCELERATOR", "CPU_CORES", "JOB_ID", "MEMORY",
    "DISABLE_TELEMETRY", "DO_NOT_TRACK", "TORCHINDUCTOR_CACHE_DIR", "THP_MEM_ALLOC_ENABLE", "PYTHONUTF8",
    "HF_XET_CLIENT_", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy",
    "GGML_NO_BACKTRACE", "TRANSFORMERS_VERBOSITY",
)  # fmt: skip
FIRST = {
    "training": (
        "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint",
        "torch.distributed.elastic.agent.server.api", "torch.nn.attention.flex_attention", "torch.utils.data", "numpy",
        "pandas", "pyarrow.dataset", "pyarrow.parquet", "PIL.Image", "jinja2", "rich.console", "rich.table", "psutil",
        "yaml", "dill", "multiprocess", "sympy", "xxhash", "regex", "sentencepiece",
    ),
    "worker": (
        "llama_cpp", "numpy", "numpy.ctypeslib", "numpy.ma", "msgspec", "jinja2.ext", "jinja2.sandbox",
        "concurrent.futures", "faulthandler", "queue", "logging", "shutil", "tempfile", "uuid",
    ),
    "command": (
        "click", "msgspec", "yaml", "rich.console", "rich.table", "jinja2", "httpx2", "tqdm", "concurrent.futures",
        "csv", "difflib", "email.utils", "fcntl", "hashlib", "http.client", "platform", "queue", "shutil", "ssl",
        "subprocess", "tempfile", "unicodedata", "urllib.request", "uuid", "zoneinfo",
    ),
}  # fmt: skip
THEN = {
    "training": ("datasets", "peft", "transformers", "trl", "skill_train.commands"),
    "worker": ("gguf", "skill_train.llama.template", "skill_train.run.export_record"),
    "command": ("huggingface_hub.hf_api", "huggingface_hub.hf_file_system", "skill_train.commands"),
}
# What libraries read when they are imported: the texts that can stand aside until a start, and what stands for them.
# The host stays, because a library keeps it by itself.
STAND_INS = {
    "HF_ENDPOINT": (re.compile(r"http://127\.0\.0\.1:\d+"), "http://127.0.0.1:65001"),
    "HF_HOME": (re.compile(r"/[^~$]*[^~$/]"), "/stand-in/hf-home"),
    "HOME": (re.compile(r"/[^~$]*[^~$/]"), "/stand-in/home"),
    "XDG_CACHE_HOME": (re.compile(r"/[^~$]*[^~$/]"), "/stand-in/xdg-cache-home"),
}
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
SET_AT_IMPORT: dict[str, str] = {}  # in the environment, by the libraries
TRAIN = Path(SOURCE).parent / "scripts" / "train.py"
COMPILED: dict[bytes, CodeType] = {}  # sources of which no bytecode is kept: the training program, the converter
# Of a training program that starts here. Its record holds two answers, which took a quarter of a training of some
# steps. With TEST_WHOLE_ANSWERS, and where programs start as users start them, they keep all tokens.
SHORT_ANSWERS = (b"\nANSWER_TOKENS = 48\n", b"\nANSWER_TOKENS = 4\n")
# At most so many processes that have imported everything. Each keeps 150 MB, or 20, or 35; the tests have four
# environments for trainings: without a Hub, with one, of a job, and of the converter where there is a Hub.
ENVIRONMENTS = {"training": 4, "worker": 8, "command": 8}


class WarmStart:
    """The processes that have imported. `python` is the file to start programs with, in a copy of this environment.

    On as many cores as each process of the tests has, because torch counts them when it is imported.
    """

    def __init__(self, cores: set[int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.python = _environment_of_links(Path(self._folder.name))
        environment = dict(os.environ) | OF_CHILDREN
        sockets = {kind: str(Path(self._folder.name) / kind) for kind in FIRST}
        self._servers = [
            subprocess.Popen(
                [sys.executable, __file__, kind, path], stdin=subprocess.PIPE, env=environment | OF_LLAMA_CPP
            )
            for kind, path in sockets.items()
        ]
        for server in self._servers:
            os.sched_setaffinity(server.pid, cores)
        limits = {kind: resource.getrlimit(kind) for kind in LIMITS}
        known = {"sockets": sockets, "python": sys.executable, "environment": environment, "limits": limits}
        known["cores"] = len(cores)
        known["packages"] = [*_packages(environment.get("PYTHONPATH")), SOURCE]
        found = f"sys.path.append({str(Path(__file__).parent)!r})"  # compiled, once
        text = f"#!{sys.executable} -ES\nimport sys\n{found}\nimport warm_shim\nwarm_shim.main({known})\n"
        self.python.write_text(text, encoding="utf-8")

    def close(self) -> None:
        for server in self._servers:
            assert server.stdin
            server.stdin.close()
            server.wait(20)
        self._folder.cleanup()


def _environment_of_links(folder: Path) -> Path:
    """A virtual environment with the packages and scripts of this one. Its Python, which it returns, is the shim."""
    real = Path(sys.executable).parent
    (folder / "bin").mkdir()
    for script in real.iterdir():
        if not script.name.startswith("python"):
            (folder / "bin" / script.name).symlink_to(script)
    for name in ("lib", "pyvenv.cfg"):
        (folder / name).symlink_to(real.parent / name)
    python = folder / "bin" / "python"
    python.touch(0o755)
    command = folder / "bin" / "skill-train"
    if command.is_symlink():
        _, code = command.read_text(encoding="utf-8").split("\n", 1)
        command.unlink()
        command.write_text(f"#!{python}\n{code}")
        command.chmod(0o755)
    return python


@dataclass
class _Environments:
    """One process for each environment that was met, the last ones."""

    kind: str
    sockets: dict[frozenset[tuple[str, str]], socket.socket] = field(default_factory=dict)

    def hand_over(self, connection: socket.socket) -> None:
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if text:
            pair = self._of(ast.literal_eval(text.decode())["environment"])
            socket.send_fds(pair, [text], [connection.fileno(), *files])
        for file in files:
            os.close(file)

    def _of(self, environment: dict[str, str]) -> socket.socket:
        kept = {name: text for name, text in environment.items() if not name.startswith(READ_BY_NO_LIBRARY)}
        kept.pop("HF_TOKEN", None)  # read for each request
        kept |= _stand_ins(environment)
        key = frozenset(kept.items())
        if key in self.sockets:
            self.sockets[key] = self.sockets.pop(key)  # the last one that was asked for
            return self.sockets[key]
        if len(self.sockets) == ENVIRONMENTS[self.kind]:
            self.sockets.pop(next(iter(self.sockets))).close()  # it ends when it has started what it was asked to
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            low = os.dup2(theirs.fileno(), 511)
            os.closerange(3, low)
            _start_in(kept, self.kind, socket.socket(fileno=low))
        theirs.close()
        self.sockets[key] = ours
        return ours


def _serve(kind: str, path: str) -> None:
    """Until the tests that started it end, which closes standard input. Imports when it is first asked."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these
    environments = _Environments(kind)
    while True:
        ready, _, _ = select.select([0, listening.fileno()], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        if not environments.sockets:
            _import(FIRST[kind])
            if kind == "training":
                _compile()
            _use_huge_pages()
        assert not {"huggingface_hub", "gguf", *THEN["training"]} & set(sys.modules)
        environments.hand_over(connection)
        connection.close()


def _import(names: tuple[str, ...]) -> None:
    """What every start needs."""
    before = set(os.environ)
    for name in names:
        importlib.import_module(name)
    if "skill_train.commands" in names:  # our modules read no environment when they are imported
        for command in pkgutil.iter_modules([f"{SOURCE}/skill_train/commands"]):
            importlib.import_module(f"skill_train.commands.{command.name}")
    if names == THEN["training"]:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from trl import SFTTrainer  # noqa: F401

        get_checkpoint_conversion_mapping("llama")  # makes those of all families: a tenth of a short training
    SET_AT_IMPORT.update({name: text for name, text in os.environ.items() if name not in before})
    gc.collect()
    gc.freeze()


def _compile() -> None:
    """Once for all starts: a tenth of a short training, and half of a conversion."""
    cache = Path(os.environ.get("SKILL_TRAIN_CACHE", "/nothing"))
    for source in (TRAIN, *cache.glob("llama.cpp-*/**/*.py")):
        text = source.read_bytes()
        COMPILED[text] = compile(text.replace(*SHORT_ANSWERS), str(source), "exec", dont_inherit=True)
    to_code = SourceFileLoader.source_to_code

    def known(self: SourceFileLoader, data: Any, path: str, **more: Any) -> CodeType:
        code = COMPILED.get(data) if isinstance(data, bytes) else None
        return _at(code, path) if code else to_code(self, data, path, **more)

    SourceFileLoader.source_to_code = known  # type: ignore[method-assign,assignment]


def _start_in(environment: dict[str, str], kind: str, requests: socket.socket) -> None:
    """Starts programs in this environment until nobody can ask any more, and waits for the last of them."""
    os.environ.clear()
    os.environ.update(SET_AT_IMPORT | environment)
    _import(THEN[kind])
    _leave_libraries_as_they_are()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kept = _kept_of_stand_ins()
    asked = [requests]
    programs: list[_Program] = []
    while asked or programs:
        ready, _, _ = select.select([*asked, *(file for program in programs for file in program.files)], [], [])
        for program in [program for program in programs if not program.files.isdisjoint(ready)]:
            program.end()
            programs.remove(program)
        if requests in ready:
            text, files, _, _ = socket.recv_fds(requests, 1 << 20, 64)
            if text:
                programs.append(_Program(ast.literal_eval(text.decode()), files, kept))
            else:
                asked.clear()
    os._exit(0)


def _leave_libraries_as_they_are() -> None:
    """At the end of a program torch takes out each of its operators, which costs half of a start. They end with it."""
    for undone in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        undone.atexit = False


def _use_huge_pages() -> None:
    """A fork copies the table of all pages, and then takes half of the time. Older kernels keep the small ones."""
    size, collapse = 1 << 21, 25  # MADV_COLLAPSE, since Linux 6.1
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for first, last in re.findall(r"(?m)^(\w+)-(\w+) rw-p \w+ 00:00 0 ", Path("/proc/self/maps").read_text()):
        first, last = -(-int(first, 16) // size) * size, int(last, 16) // size * size
        if first < last:
            madvise(first, last - first, collapse)


class _Program:
    """A fork of this process that runs what was asked for. Tells its number and, at its end, how it ended."""

    def __init__(self, request: dict[str, Any], files: list[int], kept: list[tuple[dict[str, Any], str, Any]]) -> None:
        self.number = os.fork()
        if self.number == 0:
            _put_in_place(kept, request["environment"])
            _run(request, files[1:])
        for file in files[1:]:  # theirs to close
            os.close(file)
        self.asker = socket.socket(fileno=files[0])
        self.gone = os.pidfd_open(self.number)
        self.files: set[socket.socket | int] = {self.asker, self.gone}
        self._tell(self.number)

    def end(self) -> None:
        """It is gone, or nobody waits for it any more and it is killed."""
        if self.gone not in select.select([self.gone], [], [], 0)[0]:
            os.kill(self.number, signal.SIGKILL)
        _, status = os.waitpid(self.number, 0)
        os.close(self.gone)
        self._tell(os.waitstatus_to_exitcode(status))
        self.asker.close()

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it does not listen any more
            self.asker.sendall(f"{number}\n".encode())


def _stand_ins(environment: dict[str, str]) -> dict[str, str]:
    return {name: text for name, (form, text) in STAND_INS.items() if form.fullmatch(environment.get(name, ""))}


def _kept_of_stand_ins() -> list[tuple[dict[str, Any], str, Any]]:
    """Where modules keep a stand-in, or what they made of one: their names, one of them, and its value."""
    texts = [text for _, text in STAND_INS.values()]
    modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [
        (names, name, value)
        for names in [*modules, SET_AT_IMPORT]
        for name, value in list(names.items())
        if issubclass(type(value), str | PurePath)
        if any(text in str(value) for text in texts)
    ]


def _put_in_place(kept: list[tuple[dict[str, Any], str, Any]], environment: dict[str, str]) -> None:
    own = {text: environment[name] for name, text in _stand_ins(environment).items()}
    for names, name, value in kept:
        changed = str(value)
        for stand_in, text in own.items():
            changed = changed.replace(stand_in, text)
        names[name] = type(value)(changed)
    kept.clear()


def _run(request: dict[str, Any], files: list[int]) -> None:
    """The program, with what its starter had: open files under their numbers, folder, environment, ignored signals."""
    high = [os.dup2(file, 512 + index) for index, file in enumerate(files)]
    os.closerange(0, 512)
    for number, file in zip(request["files"], high, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _stream(number, getattr(sys, name)) if number in request["files"] else None)
        setattr(sys, f"__{name}__", getattr(sys, name))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # whatever the tests were started with, as by nohup
        own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else own)
    resource.setrlimit(resource.RLIMIT_FSIZE, request["file_limit"])
    os.sched_setaffinity(0, request["cores"])
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(SET_AT_IMPORT | request["environment"])
    tempfile.tempdir = None  # looked for by torch, when it was imported
    _as_loud_as_told()
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.executable = request["executable"]  # what it starts comes here too
    program = request["arguments"]
    how = program[0] if program[0] in ("-m", "-c") else ""
    sys.argv = ["-c", *program[2:]] if how == "-c" else program[1:] if how else program
    found = [*_packages(os.environ.get("PYTHONPATH")), *sys.path[len(_packages(_OWN_PACKAGES)) :]]
    sys.path[:] = dict.fromkeys(found)  # `site` adds no folder of an editable installation that is there
    if request["beside"]:  # as Python has it without -P
        sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(how, str(Path(sys.argv[0]).parent)))
    _forget_what_is_found_elsewhere()
    if how == "-m":
        sys.modules.pop(program[1], None)  # as `__main__` it is another module
    if how == "-c":
        os._exit(_ended(partial(exec, program[1], {"__name__": "__main__"})))
    short = not how and Path(sys.argv[0]).name == TRAIN.name and "TEST_WHOLE_ANSWERS" not in os.environ
    if short and (code := COMPILED.get(Path(sys.argv[0]).read_bytes())):
        sys.modules["__main__"] = main = ModuleType("__main__")
        main.__file__ = sys.argv[0]
        os._exit(_ended(partial(exec, _at(code, sys.argv[0]), vars(main))))
    start = partial(runpy.run_module, alter_sys=True) if how == "-m" else runpy.run_path
    os._exit(_ended(partial(start, sys.argv[0], run_name="__main__")))


def _at(code: CodeType, path: str) -> CodeType:
    """The code as if it had been compiled from this file."""
    inside = tuple(_at(each, path) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=path, co_consts=inside)


def _as_loud_as_told() -> None:
    """What transformers makes of TRANSFORMERS_VERBOSITY when it is imported. It was a quarter of all environments."""
    if logging := sys.modules.get("transformers.utils.logging"):
        logging._reset_library_root_logger()
        logging._configure_library_root_logger()


def _forget_what_is_found_elsewhere() -> None:
    """Our package, where a folder of the start holds another one of its name."""
    ours, found = sys.modules.get("skill_train"), PathFinder.find_spec("skill_train")
    if ours and (found is None or found.origin != ours.__file__):
        for name in [name for name in sys.modules if name.split(".")[0] == "skill_train"]:
            del sys.modules[name]


def _stream(number: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream of the file that it is now: the old one may know a place in a file that this one has not."""
    unbuffered = like.write_through
    binary: Any = open(number, "rb" if number == 0 else "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    by_line = like.line_buffering or (number == 1 and os.isatty(1))
    return io.TextIOWrapper(binary, like.encoding, like.errors, line_buffering=by_line, write_through=unbuffered)


def _ended(start: Callable[[], object]) -> int:
    """The exit code, after what Python does at its end."""
    code: Any = 0
    try:
        start()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    return code or 0


def _packages(path: str | None) -> list[str]:
    return path.split(os.pathsep) if path else []


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    _OWN_PACKAGES = os.environ.get("PYTHONPATH")
    _serve(*sys.argv[1:])
