"""What the program tells and writes: refusals with their exit codes, events, whole files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_NOT_INSTALLED = 2, 3, 5, 7
EXIT_NO_ACCESS, EXIT_TEMPORARY = 4, 8
NETWORK = ("httpx2", "httpcore2", "httpx", "httpcore", "hf_xet")
LAST_BYTES = 4 << 20  # of a limited address space: what came so near to the limit has met it
# What a job starts, and environment.json names: the joined program, or main.py where the parts are a package.
PROGRAM = Path(__file__).with_name("main.py") if __package__ else Path(__file__)


class ErrorWords(TypedDict):
    """What is wrong, what was expected, what was there, what to do next."""

    code: str
    message: str
    expected: str
    got: str
    hint: str


class Failure(TypedDict):
    """`train.failed.json`, and the event of that name."""

    exit_code: int
    error: ErrorWords


class Refused(Exception):
    """An end that is explained: what is wrong, what was expected, what was there, what to do next."""

    def __init__(
        self, message: str, *, code: str, exit_code: int = EXIT_USAGE, expected: str = "", got: str = "", hint: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.error: ErrorWords = {
            "code": code,
            "message": message,
            "expected": expected,
            "got": got,
            "hint": hint,
        }

    @property
    def failure(self) -> Failure:
        return {"exit_code": self.exit_code, "error": self.error}


def tell_failure(refusal: Refused, folder: Path | None) -> None:
    """The first process that fails tells why, whichever it is: the others fail because it did."""
    if folder is not None and folder.is_dir():
        record = folder / "train.failed.json"
        if record.exists():
            return
        with suppress(OSError):  # a full disk is what it may have to tell of; the event below says it too
            write_json(record, refusal.failure)
    tell("failed", **refusal.failure)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Missing packages, full disks and exhausted memory are ends that are explained; a bug keeps its traceback."""
    try:
        yield
    except Exception as error:
        refusal = explanation(error)
        if refusal is None:
            raise
        raise refusal from error


def explanation(error: Exception) -> Refused | None:
    text = str(error).lower()
    if isinstance(error, ModuleNotFoundError):
        return Refused(
            f"the package {error.name} is not installed",
            code="missing_package",
            exit_code=EXIT_NOT_INSTALLED,
            hint='pip install "skill-train[train]"',
        )
    number = error.errno if isinstance(error, OSError) else None
    # torch and safetensors say a full disk in words of their own; a limit of the size of files is met as one.
    own_words = ("no space left", "file too large", "quota exceeded", "iostream error", "inline_container")
    cannot_open = "open file failed" in text
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or (
        any(words in text for words in own_words) and not cannot_open
    ):
        return Refused(
            f"the disk is full: {str(error).splitlines()[0]}",
            code="no_disk",
            exit_code=EXIT_DOES_NOT_FIT,
            expected="free space for checkpoints and the trained weights",
            hint=f"{again()}, after freeing some space, or with a higher limit of the size of files (ulimit -f)",
        )
    # In the words of gloo and NCCL. The process that ended had no time to tell why, or this would not be heard first.
    lost = ("connection closed by peer", "connection reset by peer", "remote process exited")
    if "WORLD_SIZE" in os.environ and any(words in text for words in lost):
        return Refused(
            "another process of this run ended without an explanation",
            code="process_lost",
            exit_code=EXIT_FAILED,
            expected=f"{os.environ.get('WORLD_SIZE')} processes until the end",
            got=str(error).splitlines()[0][:200],
            hint="read RUN/train.log; the most likely cause is that the system killed it to free memory",
        )
    if number in (errno.EROFS, errno.EACCES):
        return Refused(
            f"the run directory is not writable: {error}",
            code="system_error",
            expected="a writable folder",
            hint="use another --run-dir",
        )
    lacking = next((each for each in with_causes(error) if lacks_memory(each)), None)
    if lacking is not None:
        return Refused(
            f"out of memory: {(str(lacking).splitlines() or ['the system has none left'])[0]}",
            code="out_of_memory",
            exit_code=EXIT_DOES_NOT_FIT,
            expected="memory for the model, its activations and one batch",
            hint="use a smaller max_length, per_device_train_batch_size 1, gradient_checkpointing, or a smaller model",
        )
    return None


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """A library that could not load another has the reason as its cause."""
    while error is not None:
        yield error
        error = error.__cause__


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, in Python's words, the system's or torch's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, (RuntimeError, ImportError, SystemError)):
        return isinstance(error, MemoryError)
    if re.search(r"out of memory|can't allocate memory|Cannot allocate memory", str(error), re.IGNORECASE):
        return True
    limit = process_figure("limits", "Max address space")
    if limit is None:
        return False
    # glibc says no reason. Without a limit it is another: a disk that is mounted noexec, the limit of processes.
    unclear = re.search(r"failed to map segment from shared object(?!: )|can't start new thread", str(error))
    # What C code, and half a library, say that got none has nothing to do with memory.
    most = 1024 * (process_figure("status", "VmPeak:") or 0)
    return unclear is not None or (not isinstance(error, RuntimeError) and most > limit - LAST_BYTES)


def process_figure(file: str, what: str) -> int | None:
    """What Linux has of this process: bytes in `limits`, KiB in `status`. None without a limit, and elsewhere."""
    path = Path("/proc/self") / file
    found = re.search(rf"^{what}\s+(\d+)", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return int(found[1]) if found else None


@contextmanager
def readable(model: str) -> Iterator[None]:
    """What transformers says of a config.json that fits no model: it has another class of error for every field. The
    network, the disk, memory and GPUs have their own words."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        # httpx2's own are no OSError, and a job that could not fetch its model is started again.
        of_network = any(type(each).__module__.split(".")[0] in NETWORK for each in with_causes(error))
        if of_network or explanation(error) is not None or "cuda" in str(error).lower():
            raise
        raise Refused(
            f"{model} cannot be loaded",
            code="broken_model",
            expected="a config.json that transformers reads, and weights and a tokenizer that fit it",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            hint="correct the fault in `got`, or download the model again",
        ) from error


def run_id() -> str | None:
    return os.environ.get("SKILL_TRAIN_RUN")


def again() -> str:
    """How a run goes on that was ended: in a job nobody can name its folder."""
    if run_id() is None:
        return "skill-train local --resume --run-dir RUN"
    return "start the run again: it goes on from its newest kept checkpoint"


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def any_process(said: bool, device: Any) -> bool:
    """Whether one of the processes said yes. Every process must ask."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return said
    answer = torch.tensor([int(said)], device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return bool(answer.item())


def event(name: str, /, **fields: Any) -> None:
    """An event that all processes see alike: only the first one speaks."""
    if is_main_process():
        tell(name, **fields)


def tell(name: str, /, **fields: Any) -> None:
    """One JSON line on stdout, in one piece: several processes write there."""
    try:
        sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence()


def silence() -> None:
    """Nobody reads standard output any more, and writing to it would end the training."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def peak_rss_bytes() -> int:
    """The most memory that this process has had. Not `ru_maxrss` on Linux: it starts with what the parent had."""
    import resource

    peak = process_figure("status", "VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else 1024 * peak  # bytes on macOS


def number(value: Any) -> float | None:
    """A finite float, or None: JSON has no NaN."""
    value = float(value) if value is not None else math.nan
    return value if math.isfinite(value) else None


class FileDigest(TypedDict):
    bytes: int
    sha256: str


def file_digest(path: Path) -> FileDigest:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_rows(path: Path, rows: Iterable[object]) -> None:
    if is_main_process():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """The whole file or nothing: a temporary name, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
