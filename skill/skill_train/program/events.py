"""The output of the program: refusals with their exit codes, events, and whole files."""

import atexit
import errno
import gc
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypedDict

EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_NOT_INSTALLED = 2, 3, 5, 7
EXIT_NO_ACCESS, EXIT_TEMPORARY = 4, 8
NETWORK = ("httpx2", "httpcore2", "httpx", "httpcore", "hf_xet")
CLIENT = ("huggingface_hub.hf_api", "huggingface_hub.hf_file_system", "huggingface_hub.file_download")
# What the client raises if an answer lacks a key, or has a list instead of a number [ran on 2.4 with invented answers].
UNREAD = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
LAST_BYTES = 4 << 20  # a process that came so near to the limit of its address space has met it
# The program that a job starts and environment.json names: the joined file, or main.py if the parts are a package.
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
    """Ends the program with an explanation and an exit code."""

    def __init__(
        self, message: str, *, code: str, exit_code: int = EXIT_USAGE, expected: str = "", got: str = "", hint: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.error: ErrorWords = {"code": code, "message": message, "expected": expected, "got": got, "hint": hint}

    @property
    def failure(self) -> Failure:
        return {"exit_code": self.exit_code, "error": self.error}


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
    # torch and safetensors have their own words for a full disk. A limit of the size of files counts as one.
    own_words = ("no space left", "file too large", "quota exceeded", "iostream error", "inline_container")
    is_full = any(words in text for words in own_words) and "open file failed" not in text
    if is_full or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Refused(
            f"the disk is full: {first_line(error)}",
            code="no_disk",
            exit_code=EXIT_DOES_NOT_FIT,
            expected="free space for checkpoints and the trained weights",
            hint=f"{again()}, after freeing some space, or with a higher limit of the size of files (ulimit -f)",
        )
    # The words of gloo and NCCL. If the process that ended had had time to explain itself, its reason would have come
    # first.
    lost = ("connection closed by peer", "connection reset by peer", "remote process exited")
    if "WORLD_SIZE" in os.environ and any(words in text for words in lost):
        return Refused(
            "another process of this run ended without an explanation",
            code="process_lost",
            exit_code=EXIT_FAILED,
            expected=f"{os.environ.get('WORLD_SIZE')} processes until the end",
            got=first_line(error)[:200],
            hint="read RUN/train.log; the most likely cause is that the system killed it to free memory",
        )
    if number in (errno.EROFS, errno.EACCES):
        return Refused(
            f"the run directory is not writable: {error}",
            code="system_error",
            expected="a writable folder",
            hint="use another --run-dir",
        )
    if number in (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EPERM, errno.EMFILE, errno.ENFILE):
        return Refused(
            f"the system refuses a file of the training: {error}",
            code="system_error",
            expected="files and folders as the training writes them",
            hint=f"move what is in the way, or raise the limit that the message names, then {again()}",
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
    causes = () if isinstance(error, Refused) else with_causes(error)
    return next(filter(None, (hub_refusal("a file that this run needs", each) for each in causes)), None)


def hub_refusal(what: str, error: BaseException) -> Refused | None:
    """The refusal for an error of huggingface_hub, datasets or the network; None for another one. `what` was requested.

    It knows classes by their names, to import nothing. datasets 5.2 raises ConnectionError and DatasetNotFoundError.
    """
    names = {each.__name__ for each in type(error).__mro__}
    status = error.response.status_code if "HfHubHTTPError" in names else None  # type: ignore[attr-defined]
    away = "LocalEntryNotFoundError" in names or type(error) is ConnectionError
    away = away or type(error).__module__.split(".")[0] in NETWORK or is_garbled(error)
    gone = names & {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "DatasetNotFoundError"}
    gated = "GatedRepoError" in names or (bool(gone) and "is a gated dataset" in str(error))
    if gated or status in (401, 403):
        code, exit_code = "gated" if gated else "bad_token" if status == 401 else "no_permission", EXIT_NO_ACCESS
        fault, hint = "may not be read with this token", "ask for access on its page, and sign in"
    elif gone and not away:
        code, fault, exit_code, hint = "input_changed", "is not on the Hub any more", EXIT_USAGE, "plan again"
    elif away or status is not None:
        code, fault, exit_code = "hub_unreachable", "cannot be read from the Hub", EXIT_TEMPORARY
        hint = "try again when the Hub can be reached"
    else:
        return None
    words = re.sub(r"(?<=//)[^/@\s]*@|\?\S*", "", " ".join(str(error).split()))  # without passwords and signatures
    expected, got = "the commit of the plan, with all its files", words[:300]
    return Refused(f"{what} {fault}", code=code, exit_code=exit_code, expected=expected, got=got, hint=hint)


def is_garbled(error: BaseException) -> bool:
    """Whether huggingface_hub could not read an answer, or a file came with another size than the Hub announced."""
    invalid = type(error).__name__ == "HFValidationError"  # the name of a repository, before a request
    in_client = isinstance(error, UNREAD) and not invalid and raised_in(error, CLIENT)
    return in_client or str(error).startswith("Consistency check failed")  # its own words


def raised_in(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether the error came through a module whose name begins so."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith(modules) for name in names)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, also those that a library hides: transformers and datasets raise another error where
    the network failed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, according to Python, the system or torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, (RuntimeError, ImportError, SystemError)):
        return isinstance(error, MemoryError)
    if re.search(r"out of memory|can't allocate memory|Cannot allocate memory", str(error), re.IGNORECASE):
        return True
    limit = linux_figure("self/limits", "Max address space")
    if limit is None:
        return False
    # glibc gives no reason. Without a limit the reason is another: a disk mounted noexec, or the limit of processes.
    unclear = re.search(r"failed to map segment from shared object(?!: )|can't start new thread", str(error))
    # C code and half-loaded libraries that got no memory raise errors that do not mention memory.
    most = 1024 * (linux_figure("self/status", "VmPeak:") or 0)
    return unclear is not None or (not isinstance(error, RuntimeError) and most > limit - LAST_BYTES)


def linux_figure(file: str, field: str) -> int | None:
    """A figure in a file of /proc: bytes in `self/limits`, KiB in `self/status`, where `self` is this process. None
    without a limit, after the end of the process, or without Linux."""
    try:
        text = Path("/proc", file).read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{field}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


@contextmanager
def readable(model: str) -> Iterator[None]:
    """Turns what transformers raises for a broken model into a `Refused`: each field of a config.json may raise another
    class of error. Errors of the network, the disk, memory and GPUs are not changed."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        if explanation(error) is not None or "cuda" in str(error).lower():
            raise
        raise Refused(
            f"{model} cannot be loaded",
            code="broken_model",
            expected="a config.json that transformers reads, and weights and a tokenizer that fit it",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            hint="correct the fault in `got`, or download the model again",
        ) from error


def tell_failure(refusal: Refused, folder: Path | None) -> None:
    """Reports why this process failed, if it is the first one. The other processes fail because the first one did."""
    if folder is not None and folder.is_dir():
        record = folder / "train.failed.json"
        if record.exists():
            return
        with suppress(OSError):  # the disk may be full; the event below gives the reason too
            write_json(record, refusal.failure)
    tell("failed", **refusal.failure)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turns missing packages, full disks and exhausted memory into a `Refused`. A bug keeps its traceback."""
    try:
        yield
    except Exception as error:
        refusal = explanation(error)
        if refusal is None:
            raise
        raise refusal from error


def run_id() -> str | None:
    return os.environ.get("SKILL_TRAIN_RUN")


def again() -> str:
    """How to continue a run that ended. In a job, its folder has no name for the user."""
    if run_id() is None:
        return "skill-train local --resume --run-dir RUN"
    return "start the run again: it goes on from its newest kept checkpoint"


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def any_process(own_answer: bool, device: Any) -> bool:
    """Whether the answer of one of the processes is yes. Every process must call this."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return own_answer
    answer = torch.tensor([int(own_answer)], device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return bool(answer.item())


def event(name: str, /, **fields: Any) -> None:
    """Writes an event that is the same for all processes. Only the main process writes it."""
    if is_main_process():
        tell(name, **fields)


def tell(name: str, /, **fields: Any) -> None:
    """Writes an event as one JSON line on stdout, in one call, because several processes write there."""
    try:
        sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence()


def silence() -> None:
    """Sends standard output to nowhere. Nobody reads it any more, and a failing write would end the training."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def peak_rss_bytes() -> int:
    """The most memory that this process has had. On Linux this is not `ru_maxrss`, which starts with the parent's."""
    import resource

    peak = linux_figure("self/status", "VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else 1024 * peak  # bytes on macOS


def json_object(text: str | bytes) -> Any:
    """The JSON object in a text in UTF-8. None if there is none, as in a text that a kill or a copy cut in two."""
    try:
        document = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def number(value: Any) -> float | None:
    """A finite float, or None: JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


class FileDigest(TypedDict):
    bytes: int
    sha256: str


def file_digest(path: Path) -> FileDigest:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_rows(path: Path, rows: Iterable[object]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")


def seek_cycles_seldom() -> None:
    """Makes Python's garbage collector look for cycles only after 200,000 new objects, and not at exit.

    By default it looks after every 700 new objects, and imports and vocabularies make millions that stay. This took
    `export-gguf` of 10 million weights and 152,000 tokens from 20.0 to 15.4 s of the processor (2026-11-26), and a
    training of 2 steps of the demo's model from 10.2 to 8.1 s (2026-11-28).
    """
    gc.set_threshold(200_000)
    atexit.register(gc.freeze)


def write_text(path: Path, text: str) -> None:
    write_whole(path, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes the whole file or nothing: under a temporary name, then renames it. Makes no folder: a run directory that
    was moved while it is trained would become two."""
    for left in path.parent.glob(f".{path.name}.*.part"):  # by a start that was killed, or had no disk
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
