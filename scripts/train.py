# Written by scripts/build_train.py (`make docs`) from skill/skill_train/program/: change the parts.

# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0",
#   "transformers==5.24.0",
#   "trl==1.16.0",
#   "peft==0.21.2",
#   "datasets==5.2.0",
#   "accelerate==1.15.0",
#   "jinja2==3.1.6",
#   "huggingface_hub==2.4.0",
#   "sentencepiece==0.2.3",
#   "protobuf==7.36.2",
# ]
# ///
"""Fine-tunes a model exactly as a plan says: a LoRA adapter, or every weight. The same bytes run on a laptop and in a
cloud job.

    python train.py RUN/plan.json             train; the run directory is the plan's own folder
    python train.py RUN/plan.json --resume    go on from the newest complete checkpoint
    python train.py RUN/plan.json --probe     time this model in fp32 and bf16 on this processor; print one JSON line
    python train.py RUN/plan.json --job       as a cloud job: see below
    python train.py … --data PATH             read the plan's data from PATH; its fingerprint must match
    python train.py … --attended              end at a checkpoint when standard input closes: who started it has ended

Rows with pictures need Pillow too: `uv run --with pillow train.py …`.

Every value comes from the plan. `accelerate launch` starts a plan of several processes, with the arguments and the
environment under `launch` in the plan. On stdout: one JSON event a line. In the run directory:

    environment.json    versions, device, and every argument of the trainer as the trainer saw it
    samples.jsonl       rows as they were fed: text, token ids, labels        held_out.jsonl    rows that never train
    metrics.jsonl       one line a step                                       checkpoints/      each with complete.json
    adapter/            the adapter, in PEFT's format, or merged/: the whole model, where every weight was trained
    train.json          last: figures, verdict

With `--job` the run directory is a mounted bucket, and the job's own disk is lost with it. The program proves that the
token can write to `policy.hub_model_id`, starts itself without `--job` in a folder of that disk, and brings back each
complete checkpoint (the newest two stay), then everything above with train.log, each folder's kept.json last. Then it
pushes the adapter, with its records and no row of the data. A second start goes on from the newest kept checkpoint, or
with the push. `--rehearse` writes nothing to the Hub.

Exit codes: 0 done · 2 bad plan or data · 3 does not fit · 4 not signed in, or no permission to write · 5 training or
the push failed · 7 a package is missing · 8 the Hub cannot be reached before training. train.failed.json says why.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import binascii
import copy
import csv
import difflib
import errno
import gc
import hashlib
import io
import json
import math
import os
import posixpath
import random
import re
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path
from traceback import walk_tb
from types import UnionType
from typing import IO, Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, get_args, get_origin, get_type_hints

# --- events ---
# The output of the program: refusals with their exit codes, events, and whole files.

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


# --- model_files ---
# A model folder from elsewhere: files of bounded size, checked before a library reads them.

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# In a model's repository: the files beside its weights, and copies of the weights in other formats.
BESIDE_WEIGHTS = ["*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]
# The files of a model folder that libraries read, with the most bytes of each: several times the largest published one.
FOREIGN_JSON = {
    **dict.fromkeys(("config.json", "generation_config.json", "adapter_config.json", "chat_template.json"), 1 << 24),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), 1 << 26),
    **dict.fromkeys(("tokenizer.json", "vocab.json", INDEX), 1 << 28),
}
VOCABULARIES = ("tokenizer.json", "vocab.json", INDEX)  # read only where needed, because one takes half a second
FOREIGN_BYTES = {".jinja": 1 << 22, ".model": 1 << 27, ".tiktoken": 1 << 27, ".txt": 1 << 27}
# Values take time and memory, not bytes: each takes 64 bytes or more in Python. 85 million empty objects in 256 MB took
# 27 s and 7.5 GB. A tokenizer.json of 33 MB has 2 million values.
BYTES_A_VALUE = 32
MOST_MARKS = 8_000_000  # in the header of a safetensors file: a million tensors
DEEPEST = 64  # levels of nested lists and objects; the deepest published config has 6
MOST_DIGITS = 40  # `model_max_length` of many tokenizers is 10**30
LARGEST = (1 << 63) - 1
HALF = re.compile("[\ud800-\udfff]")
MOST_HEADER = 100_000_000  # bytes, as safetensors allows
MOST_AXES = 64  # of a tensor, as numpy allows
# Bits of one number by dtype (safetensors 0.8, `Dtype`).
ITEM_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
PARTS = ("text_config", "vision_config", "llm_config", "language_config", "thinker_config", "quantization_config")
KINDS_OF_JSON = {
    list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value", type(None): "null"
}  # fmt: skip
# Keys of config.json that say how many or how large tensors a loader creates.
COUNTS = re.compile(r"(layer|block|expert|head)s?(_per_\w+)?$|(^|_)depth$")
SIZES = re.compile(
    r"(hidden|intermediate|vocab|inner|ffn|embed|embedding|model|state|proj)_size$|^n_(embd|inner)$|^d_|_(dim|rank)$"
    r"|^num_labels$"
)
MANY, WIDE = 256, 1 << 18  # always allowed, because so much is created in a moment
MOST_LAYERS, WIDEST = 10_000, 1 << 21  # of a folder without weights; published models have 126 layers, 262,208 rows
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
EXPERTS = ("eager", "grouped_mm", "batched_mm")
# Keys in which transformers 5.23 accepts the name of code or of another file to load, with the values that are neither.
NAMES_OF_CODE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), ATTENTION),
    **dict.fromkeys(("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), EXPERTS),
    **dict.fromkeys(
        ("kernel_config", "use_kernels", "allow_all_kernels", "custom_generate", "transformers_weights"), ()
    ),
}


JsonObject = dict[str, Any]  # of a document that somebody else wrote


def check_model(folder: Path) -> None:
    """Refuses a model folder that leads libraries to files outside it, or to endless work. Call it before a library
    reads the folder. It looks for devices, pipes, links to elsewhere, files that are too large or not JSON, an index of
    files that are not safetensors files of this folder, and a config that claims far more than the weights hold. It
    refuses an adapter beside a model too: transformers would load it silently, and other programs would not."""
    check_files(folder)
    if all((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise Refused(
            f"{folder} holds an adapter beside its model",
            code="not_a_model",
            expected="a folder with the whole model alone",
            got="adapter_config.json in it",
            hint="move adapter_config.json and the adapter's weights out of the folder",
        )
    check_claims(folder, stored_shapes(weight_files(folder)))


def check_files(folder: Path) -> None:
    """As `check_model`, for any folder of such files, such as an adapter or a tokenizer."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        check_file(path, folder)
    for name in FOREIGN_JSON:
        if name not in VOCABULARIES and (folder / name).is_file():
            document = foreign_json(folder / name)
            if not isinstance(document, dict):
                raise unsound(folder / name, f"it holds {KINDS_OF_JSON.get(type(document), 'a value')}, not an object")
            check_values(document, folder / name)
            if name.endswith("config.json"):
                check_settings(document, folder / name)
            if name in ("config.json", "generation_config.json"):
                check_ids(document, folder / name)


def check_settings(document: Any, path: Path) -> None:
    """Refuses settings that name code to fetch and run, at any depth. `auto_map` and `custom_pipelines` are allowed:
    they have an effect only with trust_remote_code, which is off everywhere."""
    for holder in (value for _, value in nodes_in(document) if isinstance(value, dict)):
        for key, allowed in NAMES_OF_CODE.items():
            setting = holder.get(key)
            for value in setting.values() if isinstance(setting, dict) else [setting]:
                if value and not (isinstance(value, str) and value in allowed):
                    raise Refused(
                        f"{path} requests code to be loaded: {key}",
                        code="unsafe_file",
                        expected=" or ".join(allowed) or f"no {key}",
                        got=repr(value)[:200],
                        hint=f"remove {key} from the file if you trust the rest of the model",
                    )


def check_values(document: JsonObject, path: Path) -> None:
    """Refuses values that libraries in C or Rust cannot store: whole numbers above 2**63, and half a surrogate pair as
    a character. `model_max_length` may be 10**30, for "no limit"."""
    for key, value in nodes_in(document):
        if isinstance(value, int) and abs(value) > LARGEST and key != "model_max_length":
            raise unsound(path, f"{key} is a number of {len(str(value))} digits")
        if isinstance(value, str) and HALF.search(value):
            raise unsound(path, f"{key} holds half of a character")


def check_ids(document: JsonObject, path: Path) -> None:
    """Refuses token ids, parts and a model type of the wrong JSON type. Libraries would fail on them much later."""
    if not isinstance(document.get("model_type", ""), str):
        raise unsound(path, f"model_type is {json.dumps(document['model_type'])[:100]}, not text")
    for key, value in document.items():
        if key in PARTS and value is not None and not isinstance(value, dict):
            raise unsound(path, f"{key} is {json.dumps(value)[:100]}, not an object")
        listed = value if isinstance(value, list) else [value]
        if key.endswith(("_token_id", "suppress_tokens")) and not all(is_id(element) for element in listed):
            raise unsound(path, f"{key} is {json.dumps(value)[:100]}, not a token id or a list of token ids")


def is_id(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 31)


def check_claims(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Refuses a config that claims far more layers, experts or columns than the weights hold, or, without weights, than
    any published model has. A loader would create them all before it sees that their weights are missing."""
    if not (folder / "config.json").is_file():
        return
    for key, value in nodes_in(foreign_json(folder / "config.json")):
        most = most_claimed(key, shapes)
        if most is not None and isinstance(value, (int, float)) and value > most:
            message = f"{folder / 'config.json'} does not match the weights: {key} is {value:g}"
            expected = f"at most {most}" + (f" of a model of {len(shapes)} tensors" if shapes else "")
            raise broken_model(message, expected, f"{value:g}")


def most_claimed(key: str, shapes: dict[str, list[int]]) -> int | None:
    """The largest value that a key of a config may have with these weights; None for a key that creates nothing."""
    if "window" in key:  # Qwen 2 counts layers there that its small models do not have
        return None
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    if COUNTS.search(key):  # experts lie in a tensor each, or all in one
        return max(MANY, len(shapes), widest if "expert" in key else 0) if shapes else MOST_LAYERS
    return (max(WIDE, widest) if shapes else WIDEST) if SIZES.search(key) else None


def stored_shapes(files: list[Path]) -> dict[str, list[int]]:
    """The shapes of the tensors in these files, by name; empty if a file is missing or broken, which the reader of its
    weights reports. Empty tensors are left out, because they may claim any shape."""
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            tensors = safetensors_header(path).tensors
        except (FileNotFoundError, Refused):
            return {}
        shapes |= {name: entry["shape"] for name, entry in tensors.items() if 0 not in entry["shape"]}
    return shapes


class TensorEntry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


class Header(NamedTuple):
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int  # the byte of the file from which the offsets of the tensors count


def safetensors_header(path: Path) -> Header:
    """The header of a safetensors file: dtype, shape and byte range by tensor, and its `__metadata__`.

    Source: https://github.com/huggingface/safetensors, README, "Format". The tensors lie one after the other, from the
    end of the header to the end of the file.
    """
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MOST_HEADER):
            raise broken_weights(path, f"its header claims {length} bytes, the file has {size}")
        content = file.read(length)
    if marks_in(content) > MOST_MARKS:
        raise broken_weights(path, "its header has more values than a million tensors need")
    try:
        document = json.loads(content.decode("utf-8"), parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        raise broken_weights(path, f"its header is not JSON: {error}") from None
    metadata = document.get("__metadata__", {}) if isinstance(document, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken_weights(path, "its header is not an object of tensors")
    header = Header(metadata=document.pop("__metadata__", {}), tensors=document, data_start=8 + length)
    check_ranges(path, header.tensors, size - 8 - length)
    return header


def check_ranges(path: Path, tensors: dict[str, TensorEntry], size: int) -> None:
    """Refuses tensors that do not fill these bytes exactly, each with the bytes that its dtype and shape need."""
    for name, entry in tensors.items():
        if not is_entry(entry):
            raise broken_weights(path, f"the entry of {name!r} is malformed")
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != position or (end - begin) * 8 != math.prod(entry["shape"]) * ITEM_BITS[entry["dtype"]]:
            raise broken_weights(path, f"{name!r} does not lie at the bytes {begin} to {end}")
        position = end
    if position != size:
        raise broken_weights(path, f"its tensors have {position} bytes, the file has {size} for them")


def is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in ITEM_BITS:
        return False
    return are_sizes(entry.get("shape"), range(MOST_AXES + 1)) and are_sizes(entry.get("data_offsets"), (2,))


def are_sizes(values: Any, lengths: Container[int]) -> bool:
    """Whether this is a list of such a length, of whole numbers that are not below zero."""
    is_list = isinstance(values, list) and len(values) in lengths
    return is_list and all(type(value) is int and value >= 0 for value in values)


def broken_weights(path: Path, why: str) -> Refused:
    return broken_model(f"{path} is broken: {why}", "a whole safetensors file", why, hint="download it again")


def broken_model(message: str, expected: str, got: str, *, hint: str = "download the model again") -> Refused:
    return Refused(message, code="broken_model", expected=expected, got=got[:300], hint=hint)


def nodes_in(document: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a document, the outer before the inner, with its key or the key of its list."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, part) for part in value]


def block_hub_kernels() -> None:
    """Hides the package `kernels`; call it before transformers is imported. With that package, transformers would fetch
    compiled code from the Hub for a kind of attention, of experts or of quantization that a config names."""
    sys.modules["kernels"] = None  # type: ignore[assignment]


def check_regular(path: Path, *, hint: str = "download the model again") -> None:
    """Refuses a pipe, a device or a socket. A missing file is reported by its reader."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise not_a_file(path, str(error), hint=hint) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise not_a_file(path, KINDS.get(stat.S_IFMT(mode), "something else"), hint=hint)


def check_file(path: Path, folder: Path) -> None:
    """Refuses all but regular files of this folder, and links to files in it or in the `blobs` of its Hub cache."""
    check_regular(path)
    if not path.is_file():
        return
    target = path.resolve()
    if path.is_symlink() and not any(target.is_relative_to(root) for root in roots_of(folder)):
        raise Refused(
            f"{path} is a link that points outside its folder",
            code="unsafe_link",
            expected="files inside the folder, or links of the Hugging Face cache",
            got=os.readlink(path),
            hint="if you trust the file, copy it into the folder",
        )
    most = FOREIGN_JSON.get(path.name) or FOREIGN_BYTES.get(path.suffix)
    if most is not None and path.stat().st_size > most:
        got = f"{path.stat().st_size} bytes"
        raise broken_model(f"{path} is too large for a file of this name", f"at most {most} bytes", got)


KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def roots_of(folder: Path) -> list[Path]:
    """The folders that may hold the files of a model folder: itself, and the blobs beside a snapshot of the cache."""
    real = folder.resolve()
    cache = real.parent.parent
    in_cache = real.parent.name == "snapshots" and cache.name.startswith("models--")
    return [real, *([cache / "blobs"] if in_cache else [])]


def not_a_file(path: Path, got: str, *, hint: str = "download the model again") -> Refused:
    return Refused(f"{path} is not a regular file", code="missing_file", expected="a regular file", got=got, hint=hint)


@contextmanager
def regular_file(path: Path, *, hint: str = "download the model again") -> Iterator[IO[bytes]]:
    """A regular file, open for reading. A pipe is never waited for, and a device is never read."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(path, KINDS.get(stat.S_IFMT(status.st_mode), "something else"), hint=hint)
        yield file


def read_foreign(path: Path, most: int) -> bytes:
    """The bytes of a regular file. Refuses one that has more than `most` bytes."""
    with regular_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise unsound(path, f"it has more than {most} bytes")
    return content


def foreign_json(path: Path) -> Any:
    """A JSON document that somebody else wrote. It must not have numbers of too many digits, nor be nested too deep."""
    most = FOREIGN_JSON.get(path.name, FOREIGN_JSON["config.json"])
    content = read_foreign(path, most)
    if marks_in(content) > most // BYTES_A_VALUE:
        raise unsound(path, f"it has more than {most // BYTES_A_VALUE} values")
    try:
        document = json.loads(content.decode("utf-8"), parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        raise unsound(path, f"it is not JSON: {error}") from None
    if depth_of(document) > DEEPEST:
        raise unsound(path, f"its values are nested more than {DEEPEST} deep")
    return document


def marks_in(content: bytes) -> int:
    """An upper limit for the number of values in a JSON document, counted before it is parsed."""
    return sum(content.count(mark) for mark in (b",", b"[", b"{"))


def whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def depth_of(document: Any) -> int:
    """How deep lists and objects are nested, counted up to one more than `DEEPEST`."""
    level, depth = [document], 0
    while depth <= DEEPEST:
        level = [value for value in level if isinstance(value, (dict, list))]
        if not level:
            break
        depth += 1
        level = [part for value in level for part in (value.values() if isinstance(value, dict) else value)]
    return depth


def unsound(path: Path, why: str) -> Refused:
    expected, hint = "a JSON file as transformers writes it", "download the file again"
    return broken_model(f"{path} cannot be read: {why}", expected, why, hint=hint)


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights: the single one, or those that the index names. They may be
    missing, but an index must not disagree with a single file."""
    if not (folder / INDEX).is_file():
        return [folder / SINGLE]
    names = sorted(set(weight_map(folder / INDEX).values()))
    if (folder / SINGLE).is_file() and names != [SINGLE]:
        raise bad_index(folder, f"{SINGLE}, and an index that names {names[0]}", "one of the two, or the same in both")
    return [folder / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names: each a plain name of a safetensors file, no path and no pickle."""
    document = foreign_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names:
        raise bad_index(index.parent, "no weight_map", "file names by tensor name")
    bad = [name for name in names.values() if not is_plain_name(name)]
    if bad:
        raise bad_index(index.parent, repr(bad[0])[:200], "names of safetensors files in the same folder")
    return names


def is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not any(mark in name for mark in ("/", "\\", "\0")) and not name.startswith(".")


def bad_index(folder: Path, got: str, expected: str) -> Refused:
    return broken_model(f"{folder / INDEX} does not match the weights in this folder", expected, got)


def require_announced(path: Path, sha256: str | None = None) -> None:
    """Refuses a file in the cache of the Hub with other bytes than the Hub announced: its client checks their number
    only, and names a file of LFS by its SHA-256. `sha256` is that of the bytes, where it is known."""
    blob = path.resolve()
    announced = re.search(r"/(model|dataset)s--[^/]+/blobs/([0-9a-f]{64})$", blob.as_posix())
    if announced is None or (found := sha256 or file_digest(blob)["sha256"]) == announced[2]:
        return
    raise Refused(
        f"{blob} has other bytes than the Hub announced",
        code="broken_model" if announced[1] == "model" else "unreadable_dataset",
        expected=f"sha256 {announced[2]}, by the name of the file",
        got=f"sha256 {found}",
        hint=f"run the same command again, which downloads the file anew, after: rm {shlex.quote(str(blob))}",
    )


def model_file(model: str, revision: str | None, name: str) -> str | None:
    """The path of one file of a model, which is fetched if needed; None if the model does not have it."""
    from transformers.utils import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(model, name, revision=revision, **missing)  # type: ignore[no-any-return]


# --- folders/base ---
# The folder of a base model: which of its files belong to the model, and the model's config.

# Endings of a base's files that are not copied: weights in any format, pickles, code, and rows of data.
LEFT_OUT = """
    .safetensors .bin .pt .pth .ckpt .pkl .pickle .h5 .msgpack .onnx .onnx_data .gguf .ggml .npz .ot .tflite .mlmodel
    .nemo .py .pyc .so .sh .exe .jsonl .ndjson .csv .tsv .parquet .arrow .log
"""
OTHER_WORK = ("plan.json", "adapter_config.json", "trainer_state.json")  # they mark a run, an adapter, a checkpoint


def config_with(model: str, revision: str | None, attention: str) -> Any:
    """The model's config with the kernel `attention` in every part. A kernel that config.json names would win over an
    argument of from_pretrained (transformers 5.23)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    config._attn_implementation = attention
    return config


def set_fields(config: JsonObject, changes: Mapping[str, object], dtype: str | None) -> dict[str, object]:
    """Changes fields of a config.json at each level that has them, or else at the first. Returns those that changed.
    `dtype` is torch's name of the new type of every weight; None if the types did not change."""
    levels = [level for level in (config, config.get("text_config")) if isinstance(level, dict)]
    changed: dict[str, object] = {}
    names = [name for name in ("dtype", "torch_dtype") if any(name in level for level in levels)] or ["dtype"]
    for name, value in (*changes.items(), *((name, dtype) for name in names if dtype)):
        holders = [level for level in levels if name in level] or [config]
        if any(level.get(name) != value for level in holders):
            changed[name] = value
            for level in holders:
                level[name] = value
    return changed


def add_stops(folder: Path, ends: Collection[int]) -> list[int]:
    """Adds the token ids `ends` to eos_token_id in a model's generation_config.json, before the ids there. transformers
    and vLLM stop at these tokens. Returns the ids that were added. A missing file is created with the tokens of
    config.json, which transformers uses without that file."""
    path = folder / "generation_config.json"
    if not ends:
        return []
    stated: JsonObject = foreign_json(path) if path.is_file() else {}
    if not stated:
        config = foreign_json(folder / "config.json")
        levels, names = (config, config.get("text_config")), ("bos_token_id", "eos_token_id", "pad_token_id")
        stated = {name: at[name] for at in levels if isinstance(at, dict) for name in names if name in at}
    stops = stated.get("eos_token_id")
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    new = sorted({*ends} - {*listed})
    if new:
        both = [*new, *listed]
        write_text(path, json.dumps(stated | {"eos_token_id": both if both[1:] else both[0]}, indent=2) + "\n")
    return new


def files_of_base(base: Path) -> list[Path]:
    """The files that belong to a model's weights, also in sub-folders. Other files in its folder are left out: the
    tuned model may be published, and a run beside the weights holds the rows that it was trained on."""
    files: list[Path] = []
    for root, folders, names in os.walk(base):
        folders[:] = [name for name in folders if not is_other_work(Path(root, name))]
        files += [Path(root, name) for name in names if goes_along(Path(root, name))]
    return sorted(files)


def is_other_work(folder: Path) -> bool:
    """Whether a folder is hidden, is called `runs`, or holds a run, an adapter, a checkpoint or another model."""
    model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    named = folder.name.startswith(".") or folder.name == "runs"
    return named or model or any((folder / name).is_file() for name in OTHER_WORK)


def goes_along(file: Path) -> bool:
    name = file.name
    named = name == "Modelfile" or name.startswith(".") or name.endswith(".failed.json") or ".safetensors" in name
    if named or file.suffix.lower() in LEFT_OUT.split() or not file.is_file():
        return False
    if file.suffix != ".json":
        return True
    rows = _start(file).startswith(b"[") and name != "modules.json"  # of sentence-transformers, which converters read
    return not rows and not is_own_record(file)


def is_own_record(file: Path) -> bool:
    """Whether a JSON file is a record of a step of ours."""
    return b'"schema": "skill-train/' in _start(file)


def _start(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(200).lstrip()


# --- folders/checkpoints ---
# The checkpoints of a training on disk, other files of an earlier start, and the signals at which a training writes
# its last checkpoint.

Taken = TypeVar("Taken")
COMPLETE, DIGESTS = "complete.json", "sha256.json"  # in a checkpoint: the size and the SHA-256 of each file


def mark(checkpoint: Path) -> None:
    """Writes the digests of all files, then their sizes. A checkpoint without the file of sizes counts as torn."""
    for name in (COMPLETE, DIGESTS):
        (checkpoint / name).unlink(missing_ok=True)
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    write_json(checkpoint / DIGESTS, {name: file_digest(path)["sha256"] for name, path in files.items()})
    files[DIGESTS] = checkpoint / DIGESTS
    write_json(checkpoint / COMPLETE, {name: path.stat().st_size for name, path in files.items()})


def is_complete(checkpoint: Path) -> bool:
    """Whether all its files have the sizes that its marker names. A damaged marker counts as none."""
    marker = checkpoint / COMPLETE
    if not marker.is_file():
        return False
    try:
        sizes = json.loads(marker.read_text(encoding="utf-8"))
        return bool(sizes) and all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError, RecursionError):
        return False


def share_weights(folder: Path, like: Path) -> None:
    """Gives the weights in a folder the permissions of the file `like`. safetensors (0.8) lets only the owner read
    them, so the user could not merge a run that root trained in a container."""
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without permissions
            file.chmod(like.stat().st_mode & 0o777)


def without(path: Path) -> str:
    """How to go on without a damaged file or checkpoint."""
    return f"move {shlex.quote(str(path))} away, then {again()}"


def from_earlier_start(path: Path, take: Callable[[Any], Taken], otherwise: str) -> Taken:
    """What `take` finds in a JSON file that an earlier start wrote. `otherwise` is how to go on without the file, if it
    is damaged."""
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(
            f"{path} is damaged",
            code="broken_record",
            expected="the file as an earlier start of this training wrote it",
            got=f"{type(error).__name__}: {error}"[:200],
            hint=f"put it back, or {otherwise}",
        ) from error


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def stop_signals() -> list[int]:
    """The signals that end a training at a checkpoint; under `nohup` not the closing of the terminal."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


# --- plan ---
# The plan: its fields, and the smaller layout for a second try after memory ran out.


class Recipe(TypedDict):
    """What is trained. `skill_train.recipe.fields` holds the meaning of each field, and the defaults."""

    model: str
    revision: str | None
    data: str
    data_revision: str | None
    data_config: str | None
    split: str
    format: str
    columns: dict[str, str]
    loss_on: str
    method: str
    finetuning_type: str
    pure_bf16: bool
    max_length: int
    max_steps: int
    effective_batch_size: int
    learning_rate: float | int
    lr_scheduler_type: str
    warmup_steps: int
    weight_decay: float | int
    adam_beta1: float | int
    adam_beta2: float | int
    adam_epsilon: float | int
    max_grad_norm: float | int
    optim: str
    lora_r: int
    lora_alpha: float | int
    lora_dropout: float | int
    target_modules: list[str]
    modules_to_save: list[str] | None
    use_rslora: bool
    use_dora: bool
    load_in_4bit: bool
    held_out_fraction: float | int
    skip_untrained_rows: bool
    seed: int
    images: NotRequired[bool]
    lora_parts: NotRequired[list[str] | None]
    preprocess: NotRequired[str]
    min_pixels: NotRequired[int | None]
    max_pixels: NotRequired[int | None]
    data_file: NotRequired[str | None]


class Placement(TypedDict):
    """The device, the precision, the processes and the batches with which the recipe is computed."""

    backend: str
    device: str
    dtype: str
    attn_implementation: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_processes: int
    strategy: str
    offload: bool
    gradient_checkpointing: bool
    threads: int | None
    save_steps: int
    save_total_limit: int
    report_to: str


class Policy(TypedDict):
    """Choices of the user that do not affect the training."""

    sensitive: bool
    hub_model_id: str | None
    score: str | None
    score_pattern: str | None
    report_to: str


class Reason(TypedDict):
    """Why a value is what it is, and where the rule comes from."""

    rule: str
    value: str
    because: str
    source: str


class Launch(TypedDict):
    """Arguments of `accelerate launch` and variables of the environment."""

    arguments: list[str]
    environment: dict[str, str]
    reasons: list[Reason]


class Plan(TypedDict):
    """`plan.json`, as far as the program reads it. `recipe` and `placement` must be there, with all their fields."""

    schema: str
    recipe: Recipe
    placement: Placement
    recipe_hash: NotRequired[str]
    fingerprints: NotRequired[dict[str, str | None]]
    policy: NotRequired[Policy]
    launch: NotRequired[Launch]
    reasons: NotRequired[list[Reason]]
    asked: NotRequired[dict[str, object]]


# Elements of logits. The whole head is read for each chunk of logits, so chunks are large: 105 tokens of Qwen2.5's
# 151,936 words take half the time of 4 chunks of 26 in bf16, two thirds in fp32.
LOGITS_AT_ONCE = 16_000_000
# Model types with a table of position embeddings, which ends. Other types compute the embedding of any position.
POSITIONS_IN_TABLE = ("gpt2", "gpt_neo", "gpt_bigcode", "gptj", "codegen", "opt", "biogpt", "openai-gpt")
TUNED = {"lora": "adapter", "full": "merged"}  # the folder of what was trained
HELD_OUT_ROWS = 200  # rows held out at most
SAMPLE_ROWS = 32  # rows that train, kept in samples.jsonl
MEASURING, TRAINS = "measuring the model before training", "training"  # the stages with a batch in memory
# Variables by which torchrun, accelerate and MPI tell a process which one it is, and accelerate how to compute.
OF_LAUNCHERS = re.compile(
    r"(ACCELERATE|FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG|TORCHELASTIC|PET|PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_.+"
    r"|((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|FORK_LAUNCHED"
)
SMALLER = "smaller_layout"  # the rule in the reason of a smaller layout, after the first one ran out of memory


def without_launchers(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment without those of another launch, such as ACCELERATE_MIXED_PRECISION=bf16 of the
    user's shell: transformers (5.23) would train by it, whatever its arguments say. The plan holds all that counts."""
    return {name: value for name, value in variables.items() if not OF_LAUNCHERS.fullmatch(name)}


def forget_launchers() -> None:
    for name in set(os.environ) - set(without_launchers(os.environ)):
        del os.environ[name]


def held_out_count(rows: int, fraction: float) -> int:
    """How many rows never train. Fewer than 20 all train: one row less would cost more than its loss shows."""
    return min(HELD_OUT_ROWS, int(rows * fraction)) if rows >= 20 else 0


def smaller_plan(plan: Plan, error: ErrorWords, stage: str | None) -> Plan | None:
    """The plan for another try of a training that ran out of memory, with its reason; None if a smaller layout would
    not help. `stage` is the last stage that it reported: only in `MEASURING` and `TRAINS` a batch needs memory."""
    placement = smaller_layout(plan["placement"]) if stage in (MEASURING, TRAINS) else None
    if placement is None:
        return None
    reason: Reason = {
        "rule": SMALLER,
        "value": layout_words(placement),
        "because": f"{error['message']}; it was {layout_words(plan['placement'])}",
        "source": "this run",
    }
    return plan | {"placement": placement, "reasons": [*(plan.get("reasons") or []), reason]}


def smaller_layout(placement: Placement) -> Placement | None:
    """The next layout in the planner's order that needs less memory: first recomputed activations, then fewer rows at a
    time. Each step trains the same rows. None after the smallest layout."""
    if not placement["gradient_checkpointing"]:
        return placement | {"gradient_checkpointing": True}
    rows = placement["per_device_train_batch_size"]
    whole = rows * placement["gradient_accumulation_steps"]
    fewer = next((count for count in range(rows // 2, 0, -1) if whole % count == 0), None)
    if fewer is None:
        return None
    return placement | {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": whole // fewer}


def layout_words(placement: Placement) -> str:
    rows, times = placement["per_device_train_batch_size"], placement["gradient_accumulation_steps"]
    with_or_without = "with" if placement["gradient_checkpointing"] else "without"
    return f"{rows} x {times} rows {with_or_without} gradient_checkpointing"


def memory_ended(error: ErrorWords, kills: int | None) -> bool:
    """Whether a training certainly ran out of memory. A killed one gave no reason, and anybody may have killed it.
    `kills` is `kills_for_memory` from before the training."""
    if error["code"] != "out_of_memory" or "SIGKILL" not in error["message"]:
        return error["code"] == "out_of_memory"
    now = kills_for_memory()
    return kills is not None and now is not None and now > kills


def kills_for_memory() -> int | None:
    """How many processes this computer has killed for memory since it started; None if the system hides it."""
    return linux_figure("vmstat", "oom_kill")


def last_stage(output: str) -> str | None:
    """The last stage that a training reported in its output, in which libraries write too."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"event": "stage"'):
            with suppress(ValueError, KeyError):
                return str(json.loads(line)["text"])
    return None


def second_try_message(plan: Plan) -> str:
    reason = plan["reasons"][-1]
    return f"{reason['because']}; once more, with {reason['value']}"


# --- chat/choices ---
# Keys of a message with which its author chooses what is trained, as other tools read them.

# The tools that read these keys, in the order of the keys. Of answers: OpenAI and mistral-finetune; ms-swift; slime;
# others. Of all roles: axolotl (the second was its default); torchtune; verl; others. Of parts of a text: axolotl.
ANSWER_KEYS = ("weight", "loss", "loss_scale", "step_loss_mask", "loss_weight")
MESSAGE_KEYS = ("train", "training", "masked", "loss_mask", "trainable")
SPAN_KEYS = ("train_detail", "training_detail")
# Columns that rate a row as good or bad; the last one is LLaMA-Factory's.
VERDICTS = ("label", "desirable", "preferred", "liked", "thumbs_up", "is_good", "kto_tag")
ROW_MARKS = {*ANSWER_KEYS, *MESSAGE_KEYS, *VERDICTS}
NOTHING_LEFT = "nothing is left to learn from"
YES_OR_NO = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def is_left_out(message: Any) -> bool:
    """Whether the author of an answer leaves it out of the training. Keys that cannot be followed, or that contradict
    each other, are refused."""
    is_answer = message["role"] == "assistant"
    if is_answer and message.get("mask") is not None:
        raise cannot(message, ["mask"], "may mean that it trains, or that it does not")
    if is_answer and message.get("channel") == "analysis":
        raise cannot(message, ["channel"], "marks thoughts, which would be trained as an answer")
    names = [*ANSWER_KEYS, *MESSAGE_KEYS] if is_answer else MESSAGE_KEYS
    choices = {name: str(message[name]).strip().lower() for name in names if message.get(name) is not None}
    if odd := [name for name, value in choices.items() if value not in YES_OR_NO]:
        raise cannot(message, odd, "is neither 0 nor 1")
    trained = [name for name, value in choices.items() if YES_OR_NO[value] != (name == "masked")]
    if trained and not is_answer:
        raise cannot(message, trained, "of another role than assistant trains")
    if trained and len(trained) < len(choices):
        raise cannot(message, list(choices), "contradict each other")
    left_out = bool(choices) and not trained
    if is_answer and not left_out and (spans := [name for name in SPAN_KEYS if message.get(name)]):
        raise cannot(message, spans, "chooses parts of an answer")
    return left_out and is_answer


def marks(name: str, row: Any) -> list[bool]:
    """Whether a column says that its row, or each of the row's messages, trains. Empty for a column that says nothing
    about it. A `label` of 0 is a verdict only beside the other columns of KTO; elsewhere it may be a class."""
    words = re.findall(r"[\w.]+", str(row.get(name)).lower()) if name in ROW_MARKS else []
    if name in VERDICTS:
        kto = {"prompt", "completion", "label"} <= row.keys()
        return [False] if words in [["false"], *([["0"], ["0.0"]] if kto else [])] else []
    values = [YES_OR_NO.get(word) for word in words]
    return [] if None in values else [each != (name == "masked") for each in values]


def all_left_out(messages: list[Any]) -> Refused | None:
    """The refusal of a conversation whose answers are all left out; None if it has no answers."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return None
    choice = next(f"{name}: {answers[-1][name]}" for name in (*ANSWER_KEYS, *MESSAGE_KEYS) if name in answers[-1])
    return Refused(
        f"every answer of a row is left out by its author ({choice[:60]}), so {NOTHING_LEFT}",
        code="bad_row",
        expected="an answer that trains",
        got=repr(answers[-1])[:80],
    )


def cannot(message: Any, keys: list[str], why: str) -> Refused:
    choices = ", ".join(f"{name}: {message[name]!r}"[:60] for name in keys)
    return Refused(
        f"{choices} of a message {why}",
        code="bad_row",
        expected="0 or 1, true or false, for a whole answer",
        got=repr(message)[:80],
        hint="correct or remove the key in the rows; without it every answer is trained, and nothing else",
    )


# --- chat/pairs ---
# A prompt and its completion as messages: which texts hold them, and a prompt that the completion repeats.

TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")  # a list of messages as text, in JSON or from Python
ROLE_KEY = re.compile(r"""["']role["']\s*:\s*["'](?:system|developer|user|assistant|tool)["']""")


def hold_turns(pair: tuple[Any, Any]) -> list[bool]:
    """Whether each side is a list of messages as text. If only one begins so, it must also end so and have a role."""
    like = [side if isinstance(side, str) and TURNS.match(side) else "" for side in pair]
    return [all(like) or (text.rstrip()[-1:] == "]" and bool(ROLE_KEY.search(text))) for text in like]


def read_once(prompt: list[Any], completion: list[Any]) -> tuple[list[Any], list[Any]]:
    """Removes the prompt from a completion that is the whole conversation. Blanks around texts do not count, nor which
    of the two has the system message. Refuses a completion that begins with another question."""
    (first, asked), (other, answered) = without_system(prompt), without_system(completion)
    whole, begun = [*(other and first), *asked], [*(first and other), *answered[: len(asked)]]
    asks = "user" in map(role_of, asked) or completion[: len(prompt)] == prompt  # an answer alone may come again
    if asks and list(map(compared, whole)) == list(map(compared, begun)):
        return [*(first or other), *asked], answered[len(asked) :]
    if asked and "assistant" in map(role_of, answered) and role_of(asked[-1]) == role_of(answered[0]) == "user":
        raise Refused(
            "the completion begins with another question than its prompt, so one of them would be read twice",
            code="bad_row",
            expected="the answer alone, or behind the same prompt",
            got=repr(answered[0])[:80],
            hint="take the question out of the completion; a text of messages as an answer needs a word before it",
        )
    return prompt, completion


def without_system(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    count = int(role_of(messages[0]) in ("system", "developer")) if messages else 0
    return messages[:count], messages[count:]


def role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def compared(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    present = {key: value for key, value in message.items() if value is not None}
    return present | {"content": str(present.get("content", "")).strip()}


# --- examples ---
# Turns a row into an example: messages, a prompt and a completion, or a text.

# A row of a dataset as its author wrote it, with columns and values of any kind.
Row = dict[str, Any]

ANSWERS = ("completion", "output", "answer")
PAIRS = ("prompt_completion", "question_answer")  # each side a text, or messages
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of an answer, in the order of transformers 5.23
CALLS = ("tool_calls", "function_call", "function_calls")  # keys of an answer; OpenAI's newer and older one, OLMo's
AS_JSON = "write it as JSON (json.dumps in Python), or the rows to a .jsonl file"
ARGUMENTS = "the arguments of a call"
MEND = "correct or remove it; rows are never dropped silently"  # the hint of a row that cannot be read


class Message(TypedDict):
    """A message of a chat. Its other keys stay for the template, such as `name` and `reasoning_content`."""

    role: str
    content: str
    tool_calls: NotRequired[Any]


class Example(TypedDict):
    """What is learned from one row: a chat with `messages`, `tools` and `trained_messages`, a completion with `prompt`
    and `completion`, or a `text`."""

    kind: Literal["chat", "completion", "text"]
    messages: NotRequired[list[Message]]
    tools: NotRequired[list[Any] | None]
    trained_messages: NotRequired[list[int]]  # the indices of the answers that train
    prompt: NotRequired[str]
    completion: NotRequired[str]
    text: NotRequired[str]
    without_template: NotRequired[bool]  # the recipe asks for bare text; only set if the model has a chat template


class Tokens(TypedDict):
    """A row as the model is fed it: ids, and labels, which are `IGNORED` for ids that do not train."""

    input_ids: list[int]
    labels: list[int]


class Pictured(TypedDict, total=False):
    """The pictures of a row, if it has any. In its texts U+FFFC stands for each, in this order."""

    images: list[Any]  # where they are; in `samples.jsonl` and `held_out.jsonl` their names in the folder of the run
    image_sha256: list[str]  # of their files


class EncodedRow(Example, Pictured, Tokens):
    """A line of `samples.jsonl` and `held_out.jsonl`."""

    row: int  # its number in the data, from 0
    line: int  # in its file
    rendered: str  # the text that the template writes
    truncated: bool  # it was longer than max_length
    full_length: int  # in tokens


def to_example(row: Row, data_format: str, columns: dict[str, str]) -> Example:
    """One row as the model is to learn it.

    Args:
        data_format: `messages`, `question_answer`, `instruction` or `sharegpt`, which become turns; `completion` or
            `prompt_completion`, whose texts are joined unchanged; or `text`.
        columns: the dataset's name of each column, by the format's name.
    """

    def value(name: str) -> Any:
        return row.get(columns[name]) if name in columns else None

    if data_format == "messages":
        return chat(with_system(turns_of(value("messages"), "messages"), value("system")), value("tools"), 0)
    if data_format == "sharegpt":
        turns = from_sharegpt(turns_of(value("conversations"), "conversations"))
        return chat(with_system(turns, value("system")), value("tools"), 0)
    if data_format == "text":
        return {"kind": "text", "text": text_of(value("text"), "text")}
    names = ("question", "answer") if data_format == "question_answer" else ("prompt", "completion")
    prompt, completion = value(names[0]), value(names[1])
    if data_format in PAIRS:
        as_json = hold_turns((prompt, completion))
        prompt = turns_of(prompt, names[0]) if as_json[0] else prompt
        completion = turns_of(completion, names[1]) if as_json[1] else completion
    if data_format in PAIRS and (isinstance(prompt, list) or isinstance(completion, list)):
        prompt, completion = as_messages(prompt, "user", names[0]), as_messages(completion, "assistant", names[1])
        prompt, completion = read_once(prompt, completion)
        prompt = with_system(prompt, value("system"))
        return chat([*prompt, *completion], value("tools"), len(prompt))
    if data_format in ("prompt_completion", "completion"):  # texts joined as they stand
        with_system([], value("system"))  # checked as the tools are: chat templates read both
        tools_of(value("tools"))
        texts = text_of(prompt, "prompt"), text_of(completion, "completion")
        return {"kind": "completion", "prompt": texts[0], "completion": texts[1]}
    return chat(from_pair(data_format, value), value("tools"), 0)


def from_pair(data_format: str, value: Callable[[str], Any]) -> list[Message]:
    """One turn from `instruction`/`input`/`output` or `question`/`answer`, after a system message if there is one."""
    names = ("instruction", "output") if data_format == "instruction" else ("question", "answer")
    asking = [name for name in (names[0], "input") if is_filled(value(name)) or value(name) == 0] or names[:1]
    user = "\n\n".join(text_of(value(name), name) for name in asking)
    answer: Message = {"role": "assistant", "content": text_of(value(names[1]), names[1])}
    return list(with_system([{"role": "user", "content": user}, answer], value("system")))


# Roles that answer a call of the assistant, by the names that templates know. Such an answer may be empty.
TOOLS = ("tool", "function", "ipython", "observation", "environment")
SYSTEMS = ("system", "developer")
ROLES = (*SYSTEMS, "user", "assistant", *TOOLS)
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "function_call": "assistant", "system": "system",
    "tool": "tool", "observation": "tool",
}  # fmt: skip


def is_filled(value: Any) -> bool:
    """Whether an optional column of a row holds anything but blanks."""
    return bool(value.strip() if isinstance(value, str) else value)


def with_system(messages: Any, text: Any) -> Any:
    """The messages with a system message of this text before them, unless the text is empty or they begin with the same
    message already. Empty system messages are removed."""
    if not isinstance(messages, list):
        return messages
    messages = [each for each in messages if not (isinstance(each, dict) and is_silent(each.get("role"), each))]
    if not is_filled(text):
        return messages
    system: Message = {"role": "system", "content": text_of(text, "system")}
    return messages if messages[:1] == [system] else [system, *messages]


def is_silent(role: Any, message: Row) -> bool:
    """Whether a message is the system's and says nothing, neither in its text nor beside it."""
    others = (value for name, value in message.items() if name not in ("role", "from"))
    return role in SYSTEMS and not any(map(is_filled, others))


def speaker_of(turn: Row) -> str | None:
    """The role of a turn of ShareGPT; None for an unknown one."""
    return SHAREGPT_ROLES.get(str(turn.get("from")).lower())


def from_sharegpt(turns: Any) -> list[Message]:
    if not isinstance(turns, list):
        raise bad_row("conversations is not a list", '[{"from", "value"}, …]', repr(turns))
    messages = list[Message]()
    for turn in turns:
        role = speaker_of(turn) if isinstance(turn, dict) else None
        if role is None:
            raise Refused(
                "a turn has an unknown speaker", code="unknown_role", expected="from: human or gpt", got=repr(turn)[:80]
            )
        if is_silent(role, turn):
            continue
        message: Any = {name: value for name, value in turn.items() if name not in ("from", "value")}
        message |= {"role": role, "content": text_of(turn.get("value"), "value")}
        if str(turn["from"]).lower() == "function_call":  # LLaMA-Factory's
            message |= {"content": "", "tool_calls": calls_of(message["content"])}
        messages.append(message)
    return messages


def calls_of(text: str) -> list[JsonObject]:
    """The calls in the text of a turn, which is JSON of one call or of a list of calls."""
    value = json_value(text, "function_call")
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise bad_row("function_call holds no call", '{"name": "…", "arguments": {…}}', text)
    return [{"type": "function", "function": call} for call in calls]


def as_messages(value: Any, role: str, name: str) -> list[Any]:
    """The messages of a row unchanged, or its text as one message."""
    if isinstance(value, list):
        return value
    return [{"role": role, "content": text_of(value, name)}]


PICTURES = (
    "png|jpe?g|jfif|jp2|j2k|jxl|webp|gif|bmp|tiff?|heic|heif|avif|svg|ico|tga|exr|p[bgpn]m|psd|dng|nef|cr[23]|arw|dcm"
    "|pdf|djvu"
)
SOUNDS = "wav|mp3|flac|ogg|oga|opus|m4a|aac|aiff?|wma|amr|sph|caf|midi?"
FILMS = "mp4|m4v|mov|webm|mkv|avi|mpe?g|wmv|flv|ogv|3gp"
MEDIA = f"(?:{PICTURES}|{SOUNDS}|{FILMS})"
# A file name alone, or a path or an address, with or without spaces. A sentence that ends with a file name is neither.
# An address may name the kind of picture in its parameters.
MEDIA_NAME = re.compile(
    rf"\S+\.{MEDIA}(?:[?#]\S*)?|\S*[/\\][^\n]*\.{MEDIA}(?:[?#]\S*)?|https?://\S+[?&](?:format|fmt|type|ext)=(?:image/)?{MEDIA}(?:&\S*)?",
    re.IGNORECASE,
)
MEDIA_URI = re.compile(r"data:(?:image|audio|video)/", re.IGNORECASE)
MEDIA_KEYS = {"bytes", "path", "array", "sampling_rate"}  # datasets' Image and Audio; Parquet may leave out the empty
MEDIA_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
MEDIA_HEX = re.compile(r"(?:0x|\\x)?((?:[0-9A-Fa-f]{2}){24})")
# First bytes: PNG, JPEG, GIF, TIFF, FLAC, Ogg, MP3, Matroska and WebM; WebP, WAV and AVI; MP4, HEIC and AVIF.
MEDIA_MAGIC = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|fLaC|OggS\0|ID3[\2-\4]|\x1a\x45\xdf\xa3"
    rb"|RIFF.{4}(?:WEBP|WAVE|AVI )|.{4}ftyp",
    re.DOTALL,
)
# Marks of vision and audio models: of Qwen, Phi, Gemma, Pixtral, Llama 3.2, InternVL, Idefics, DeepSeek and MiniCPM.
MEDIA_MARK = re.compile(
    r"<\|(?:image|img|vision|video|audio)[^|<>\n]*\|>|<(?:start|end)_of_(?:image|audio)>"
    r"|<(?:image|img|video|audio)[_ -]?(?:soft_token|placeholder|context|token|pad|patch|here|#?\d+)>"
    r"|<fake_token_around_image>|<im_patch>|<im(?:g|age)>[^<>\n]+</im(?:g|age)>|\[IMG\](?!.*\[/IMG\])",
    re.IGNORECASE,
)
# Bare tags, such as those of LLaVA, at an end of a text or of a line, and other brackets at an end of a text. HTML
# closes such a tag.
TAGGED = "(?:image|img|photo|video|audio|speech)"
# Within a sentence `<image>` stands for a picture too, unless the sentence is about the tag.
IN_SENTENCE = r"(?<![\w`\"'])<image>(?![`\"'])(?!\s*(?:tag|element|node|attribute|label|field)s?\b)"
MEDIA_TAG = re.compile(rf"(?:^|\n)\s*<{TAGGED}>|<{TAGGED}>\s*(?:\n|$)|{IN_SENTENCE}", re.IGNORECASE)
BRACKETED = r"(?:\[(?:image|IMAGE|img)(?: ?#?\d+)?\]|\{\{?image\}?\})"
MEDIA_FIRST, MEDIA_LAST = re.compile(rf"\s*{BRACKETED}"), re.compile(rf"{BRACKETED}\s*\Z")


def media_in(value: Any, *, answer: bool = False) -> str | None:
    """The part of a value that stands for a picture, sound or film: a file's name or address, its data, or a mark in a
    text. None for a text. An `answer` may be the bare name of a file."""
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, dict):
        has_media = any(
            name == "array" or media_in(each) is not None or (name == "bytes" and not isinstance(each, int))
            for name, each in value.items()
        )
        return "{" + ", ".join(sorted(value)) + "}" if has_media and MEDIA_KEYS.issuperset(value) else None
    if isinstance(value, list):
        return next((media for each in value if (media := media_in(each)) is not None), None)
    if not isinstance(value, str):
        return None
    short = value[:4096].strip()
    if MEDIA_URI.match(short):
        return short[:40]
    if len(value) < 1024 and MEDIA_NAME.fullmatch(short) and not (answer and "/" not in short and "\\" not in short):
        return short[:80]
    start = short[:32].replace("+", "-").replace("/", "_")  # in either alphabet
    if MEDIA_BASE64.match(short[:64]) and MEDIA_MAGIC.match(base64.urlsafe_b64decode(start)):
        return f"{short[:16]}…, a file as base64"
    if (digits := MEDIA_HEX.match(short)) and MEDIA_MAGIC.match(bytes.fromhex(digits[1])):
        return f"{short[:16]}…, a file in hexadecimal digits"
    return media_mark(value)


def media_mark(text: str) -> str | None:
    """The mark that stands for a picture, sound or film in this text; None if there is none."""
    mark = MEDIA_MARK.search(text) if "<" in text or "[IMG]" in text else None
    if mark is None and "<" in text and "</" not in text:
        mark = MEDIA_TAG.search(text)
    if mark is None and (text.lstrip()[:1] in ("[", "{") or text.rstrip()[-1:] in ("]", "}")):
        mark = MEDIA_FIRST.match(text) or MEDIA_LAST.search(text[-64:])
    return None if mark is None else mark.group().strip()


def bad_row(message: str, expected: str = "", got: str = "", hint: str = "") -> Refused:
    return Refused(message, code="bad_row", expected=expected, got=got[:80], hint=hint)


def require_text(value: Any, name: str, *, answer: bool = False) -> None:
    media = media_in(value, answer=answer)
    if media is not None:
        raise Refused(
            f"{name} contains an image, audio or video, and only text is trained there",
            code="not_text",
            expected=f"text in {name}",
            got=media,
            hint="train a vision model on pictures (references/vision.md), or use a dataset of text",
        )


def text_of(value: Any, name: str) -> str:
    require_text(value, name, answer=name in ANSWERS)
    if not isinstance(value, (str, list, dict, type(None))):  # a number, a date
        raise bad_row(f"{name} is {value!r} and not text", f"text in {name}, such as {str(value)!r}", repr(value))
    if not isinstance(value, str) or not value.strip():
        raise bad_row(f"{name} is empty or not text", f"text in {name}", repr(value))
    return value


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text", ""), str)


def is_unicode(fields: JsonObject) -> bool:
    try:
        return (len(fields) < 2 and fields["role"].isascii()) or bool(
            json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8")
        )
    except UnicodeEncodeError:
        return False


def chat(messages: Any, tools: Any, prompt_messages: int) -> Example:
    """A conversation of well-formed messages. Its first `prompt_messages` messages never train, nor do the answers that
    a key leaves out, such as OpenAI's `weight` of 0."""
    if not isinstance(messages, list) or not messages:
        raise bad_row("messages is empty or not a list", '[{"role", "content"}, …]', repr(messages))
    cleaned: list[Message] = [checked_message(message) for message in messages]
    chosen = [not is_left_out(message) for message in cleaned]
    answers = [i for i in range(prompt_messages, len(cleaned)) if chosen[i] and cleaned[i]["role"] == "assistant"]
    if not answers:
        raise all_left_out(cleaned[prompt_messages:]) or no_answer(cleaned)
    return {"kind": "chat", "messages": cleaned, "tools": tools_of(tools), "trained_messages": answers}


def tools_of(value: Any) -> list[Any] | None:
    """The tools of a row. Many datasets write them as JSON text, which no template reads."""
    tools = list_of(value or [], "tools")
    json.dumps(tools, default=not_json)
    return tools or None


def list_of(value: Any, name: str) -> list[Any]:
    """A list of tools or of calls, which may be JSON text; empty for an empty text."""
    read = value if not isinstance(value, str) else json_value(value, name) if value.strip() else []
    if not isinstance(read, list) or not all(isinstance(each, dict) for each in read):
        raise bad_row(f"{name} is not a list of objects", '[{"type": "function", "function": {…}}, …]', str(value))
    return read


def json_value(text: str, name: str) -> Any:
    """The value of a JSON text in a row. Refuses an object that has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=with_distinct_keys)
    except RepeatedKey as error:
        raise bad_row(f"{name} has the key {str(error)[:80]!r} twice in one object", "each key once", text) from None
    except (ValueError, RecursionError) as error:
        hint = AS_JSON if text.lstrip()[:1] == "[" else ""
        raise bad_row(f"{name} is text that is not JSON: {error}", "JSON", text, hint) from None


def not_json(value: Any) -> None:
    """Refuses a value of Arrow, such as a date, in whose place transformers writes `<datetime>`."""
    what = f"a call or a tool has a value of the type {type(value).__name__}, which JSON does not have"
    raise bad_row(what, f"a text, such as {str(value)!r}", repr(value), "write the value as text")


def checked_call(call: Any) -> Any:
    """The call, if its arguments are an object or JSON text of one. Missing or blank arguments become an empty object,
    as in vLLM."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": checked_call(call["function"])}
    arguments = call.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        other = next((name for name, value in call.items() if str(value).lstrip()[:1] in ("{", "[")), None)
        if other is not None:
            raise bad_row(f"a call has no arguments, but {other!r}", "arguments", repr(call))
        return call | {"arguments": {}}
    read = json_value(arguments, ARGUMENTS) if isinstance(arguments, str) else arguments
    json.dumps(read, default=not_json)
    if not isinstance(read, dict):
        raise bad_row(f"{ARGUMENTS} are not an object", '{"name": value, …}, or JSON text of it', repr(arguments))
    return call


def turns_of(value: Any, name: str) -> Any:
    """The turns of a row, parsed if they are JSON text, because a cell of a table holds only text."""
    return json_value(value, name) if isinstance(value, str) and value.strip() else value


def checked_message(message: Any) -> Any:
    """The message of a row as a `Message`, with the text of all its parts and without keys that are null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_row("a message has no role", '{"role", "content"}', repr(message))
    # `datasets` fills the keys that a row lacks with None; a template must not see them.
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = list(map(checked_call, list_of(message["tool_calls"], "tool_calls")))
    if "function_call" in message:
        message["function_call"] = checked_call(message["function_call"])
    content = message.get("content", "")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            if not mentions_media(str(part["type"])):  # such as thinking, tool_use and refusal
                raise bad_row(f"a part of type {part['type']!r} is not read", "parts of type text", repr(part))
            require_text({"bytes": None, "path": None}, f"a part of type {part['type']}")
    require_text(content, f"the {message['role']} message", answer=message["role"] == "assistant")
    if isinstance(content, list) and all(map(is_text_part, content)):
        content = "".join(part.get("text", "") for part in content)
    text = content.strip() if message["role"] == "assistant" and isinstance(content, str) else content
    if not isinstance(content, str) or not (text or any(map(message.get, CALLS)) or message["role"] in TOOLS):
        found = f"has {content!r} and not text" if isinstance(content, (int, float)) else "has no text"
        raise bad_row(f"the {message['role']} message {found}", got=repr(message))
    if not is_unicode({key: value for key, value in message.items() if key != "content"}):  # templates write it too
        half = "half a surrogate pair stands in a message, which no tokenizer reads"
        raise bad_row(half, "text in Unicode", repr(message))
    return {**message, "content": content}


def no_answer(messages: list[Message]) -> Refused:
    """The refusal of a conversation without a message of the assistant after its prompt."""
    unknown = next((message["role"] for message in messages if message["role"] not in ROLES), None)
    if unknown is None:
        return bad_row("a conversation has no assistant message to learn from", got=repr(messages))
    return Refused(
        f"the role {unknown[:40]!r} is unknown, and there is no message of the assistant",
        code="unknown_role",
        expected=f"one of {', '.join(ROLES)}",
        got=repr(messages)[:80],
        hint="rename the role that answers to assistant in the dataset",
    )


def unreadable(message: str, expected: str, got: str = "", hint: str = "") -> Refused:
    return Refused(message, code="unreadable_dataset", expected=expected, got=got, hint=hint)


class RepeatedKey(ValueError):
    """A JSON object has a key twice. Python's reader, like most, drops the first value silently."""


def with_distinct_keys(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object, as the `object_pairs_hook` of `json`. Raises `RepeatedKey` for a key that it has twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise RepeatedKey(repeated_in(pairs))
    return row


def repeated_in(pairs: list[tuple[str, Any]]) -> str:
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def repeated_key(where: str, key: str) -> Refused:
    expected = "each key once in an object; of two values one would be dropped silently"
    return unreadable(f"{where} has the key {key[:80]!r} twice in one object", expected, hint=MEND)


# Names of columns of pictures, sounds or films, in the languages in which we found such datasets.
MEDIA_WORDS = (
    "image|img|picture|pic|photo|photograph|screenshot|scan|thumbnail|pixel_value|jpe?g|png|webp|tiff?"
    "|video|clip|mp4|audio|wav|mp3|flac|foto|fotografie|bild|bilder|abbildung|imagene?|imagem"
    "|fotografia|immagine|immagini|obraz|zdjęcie|obrázek|kép|resim|görsel|gambar|afbeelding|kuva|billede"
    "|изображение|картинка|фото|видео|аудио|图片|图像|圖片|圖像|照片|图|視頻|视频|音频|画像|写真|動画|音声|이미지|사진|영상"
    "|صورة|فيديو|תמונה|चित्र|εικόνα|φωτογραφία|รูปภาพ|vídeo|vidéo|áudio"
)
MEDIA_COLUMN = re.compile(
    rf"(?!(?:n|num|count|has|is|no|with|without)_)(?:\w+_)?(?:{MEDIA_WORDS})(?:e?s|i)?"
    r"(?:_(?:id|path|url|uri|link|file|filename|file_name|name|bytes|data|base64|b64|key|ref|src)s?)?_?\d*"
)
MEDIA_PATH = re.compile(r"\S*[/\\]\S+")
SENTENCE_WORDS = 3  # words


@lru_cache(maxsize=4096)
def names_media(column: str) -> bool:
    """Whether a column has a usual name for images, audio or video: `image`, `img_path`, `Foto`, `图片`."""
    return MEDIA_COLUMN.fullmatch("_".join(words_of_name(column))) is not None


@lru_cache(maxsize=4096)
def mentions_media(column: str) -> bool:
    """Whether one word of a column's name is usual for images, audio or video: `foto_pfad`."""
    return any(re.fullmatch(rf"(?:{MEDIA_WORDS})(?:e?s|i)?", word) for word in words_of_name(column))


def words_of_name(column: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()
    return re.sub(r"[\W_]+", "_", parted).strip("_").split("_")


def is_media(column: str, value: Any) -> bool:
    """Whether a value is an image, audio or video: by itself, or by the name of its column if it is not a sentence."""
    if media_in(value) is not None:
        return True
    if isinstance(value, str) and MEDIA_PATH.fullmatch(value.strip()) and mentions_media(column):
        return True
    if not value or isinstance(value, bool) or not names_media(column):
        return False
    if isinstance(value, dict):
        return any(each is not None for each in value.values())
    if isinstance(value, str):  # a sentence about a picture is text
        return len(value.split()) < SENTENCE_WORDS and (value.isascii() or len(value) < 12)
    return True


# --- chat/answers ---
# What an answer holds beside its text: its calls of tools and its thoughts.

IN_ORDER = "put the roles in the order that it expects: often system once, then user and assistant in turn"
TEMPLATE_FAILS = (
    "the template itself fails on them: correct chat_template.jinja in the model's folder, or use a model whose "
    "template takes messages of text as they are"
)
MARK = "skill train mark 7f3a"  # stands in for an answer to find where a template puts it
THOUGHTS_LEFT_OUT = (
    "the chat template leaves out the thoughts of answers (reasoning_content, thinking, or <think> in the content), so "
    "they are not trained"
)
EARLIER_THOUGHTS = (
    "the chat template leaves out the thoughts of earlier answers of a row, so these answers are trained without them: "
    "make a row of each answer to train its thoughts"
)
BESIDE_THOUGHTS = (
    "the chat template leaves out text of answers before or between their thoughts, so it is not trained: write one "
    "<think>, at the start of an answer"
)
ARGUMENTS_READ = (
    "the arguments of calls are JSON text in the rows, and the model's chat template takes objects: it gets them as "
    "objects, as it does from llama.cpp and vLLM"
)
AS_JSON_TEXT = "the chat template would write arguments of calls as Python does ({'a': True}): it gets their JSON text"
AS_PYTHON = (
    "the chat template writes values of calls or tools as Python does ({'a': True}), and not as JSON: correct it"
)
# Test arguments of a call. They show how a template writes arguments as JSON text, as an object, and each value.
PROBE = {f"skill train mark {number}": value for number, value in enumerate((True, None, {"a": None}))}
PYTHON_WORD = re.compile(r"(skill train mark \d.{1,40}?)(True|None)", re.DOTALL)


def with_arguments(messages: list[Message], changed: Callable[[Any], Any]) -> list[Message]:
    def of_call(call: Any) -> Any:
        if isinstance(call, list):
            return list(map(of_call, call))
        name = "function" if isinstance(call, dict) and isinstance(call.get("function"), dict) else "arguments"
        if not isinstance(call, dict) or name not in call:
            return call
        return call | {name: of_call(call[name]) if name == "function" else changed(call[name])}

    copies: Any = [dict(message) for message in messages]
    return [each | {name: of_call(each[name]) for name in CALLS if name in each} for each in copies]


def text_of_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def with_json_values(value: Any) -> Any:
    """Arguments with JSON text for each value that Python writes in another way."""
    if isinstance(value, str):
        return value
    return {name: each if str(each) == text_of_json(each) else text_of_json(each) for name, each in value.items()}


def as_taken(messages: list[Message], render: Callable[[list[Message]], str | None]) -> tuple[list[Message], list[str]]:
    """The messages with the arguments of calls in the form that the template needs, and notes for the user.

    In rows, arguments are objects, or JSON text as in OpenAI's format. A template that joins them to a text gets JSON
    text, any other template gets objects. A template that writes objects or values as Python does gets JSON text for
    them. The example keeps this form, so that the row renders to the same text again.
    """

    def probed(change: Callable[[Any], Any]) -> str | None:
        return render(with_arguments(messages, lambda _: change(PROBE)))

    notes = list[str]()
    if with_arguments(messages, lambda _: PROBE) == messages:
        return messages, notes
    joins = text_of_json(PROBE) in (probed(text_of_json) or "")
    if not joins:
        objects = with_arguments(messages, lambda value: json.loads(value) if isinstance(value, str) else value)
        messages, notes = objects, [ARGUMENTS_READ] if objects != messages else []
    if (written := probed(dict)) == (wanted := written and in_json(written)) and (written or not joins):
        return messages, notes
    for change in (text_of_json, with_json_values):
        if joins if written is None else probed(change) == wanted:
            changed = with_arguments(messages, change)
            return changed, notes + [AS_JSON_TEXT] * (changed != messages)
    return messages, notes + [AS_PYTHON] * (with_arguments(messages, with_json_values) != messages)


def in_json(text: str) -> str:
    """The text, with the values of `PROBE` in JSON instead of Python's notation."""
    for value in (PROBE, {"a": None}):
        text = text.replace(str(value), text_of_json(value))
    return PYTHON_WORD.sub(lambda found: found[1] + ("true" if found[2] == "True" else "null"), text)


def python_notes(messages: list[Message], tools: Any, rendered: str) -> list[str]:
    """The note, if the rendered text has objects or lists of calls or tools in Python's notation; else empty."""
    values = [tools, *(message.get(name) for message in messages for name in CALLS)]
    own = "\n".join(message["content"] for message in messages)
    for each in values if "{'" in rendered or "['" in rendered else ():
        if isinstance(each, (dict, list)):
            values += each.values() if isinstance(each, dict) else each
            if (text := str(each)) != text_of_json(each) and rendered.count(text) > own.count(text):
                return [AS_PYTHON]
    return []


def thoughts_of(message: Message) -> list[str]:
    """The thoughts of an answer: from the keys of `THOUGHTS`, and from before `</think>` in its text."""
    beside = [message.get(name) for name in THOUGHTS]
    opened, mark, _ = message["content"].partition("</think>")
    inside = opened.split("<think>")[-1] if mark else ""  # some models' prompts already end with <think>
    return [thought.strip() for thought in (*beside, inside) if isinstance(thought, str) and thought.strip()]


def with_names(message: Message) -> Any:
    """The message with its thoughts under both keys that templates read. transformers 5.23 adds them for a template,
    and llama-cpp-python does not, so the example keeps both keys."""
    thoughts: Any = next((message.get(name) for name in THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def marked_texts(text: str) -> list[str]:
    """Stand-ins for an answer's text: `MARK` alone, and, if it has thoughts, `MARK` as thought and as rest."""
    return [MARK] + [f"<think>\n{MARK}\n</think>\n\n{MARK}"] * ("</think>" in text)


def with_marks(
    example: Example, index: int, content: str, without: tuple[str, ...] = ()
) -> tuple[list[Message], list[Any] | None]:
    """The messages and tools. Message `index` has this `content`, `MARK` as thoughts, and no key of `without`."""
    messages = example["messages"]
    marked: Any = {name: value for name, value in messages[index].items() if name not in without}
    marked |= {name: MARK for name in THOUGHTS if marked.get(name)} | {"content": content}
    return [*messages[:index], marked, *messages[index + 1 :]], example["tools"]


def left_out_answer() -> Refused:
    return Refused(
        "the chat template leaves out the text of an answer, so it would not be trained",
        code="template_mismatch",
        expected="a template that writes texts; those of some vision models write lists of parts alone",
        hint="use a model whose chat template writes texts, or correct chat_template.jinja in the model's folder",
    )


def left_out_call(call: Any) -> Refused:
    return Refused(
        f"the chat template leaves out the call of {name_of_call(call)}, so it would not be trained",
        code="template_mismatch",
        expected="a template that writes the calls of tools, and calls in tool_calls",
        hint="use a model whose chat template has calls, or write them into the content of the message",
    )


def left_out_thoughts(messages: list[Message], rendered: str) -> Iterator[str]:
    """Notes on answers whose thoughts, or whose text around the thoughts, are missing in the rendered text."""
    for message in messages:
        opened, _, rest = message["content"].partition("</think>")
        beside = [opened.rpartition("<think>")[0], *re.split("</?think>", rest)] if rest else []
        if message["role"] == "assistant" and not all(text.strip() in rendered for text in beside):
            yield BESIDE_THOUGHTS
        thoughts = thoughts_of(message) if message["role"] == "assistant" else []
        if thoughts and not any(thought in rendered for thought in thoughts):
            yield THOUGHTS_LEFT_OUT if message is messages[-1] else EARLIER_THOUGHTS


def with_fewer_calls(message: Message) -> Iterator[tuple[Message, Any]]:
    """The message without all its `tool_calls`, without the last one, and without the calls of OpenAI's older format
    or of OLMo. Each variant comes with one call that it lacks."""
    calls: Any = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        for first in ([], calls[:-1]) if len(calls) > 1 else ([],):
            fewer: Message = message | {"tool_calls": first}
            yield fewer, calls[len(first)]
    for key in CALLS[1:]:
        if (call := message.get(key)) not in (None, "", []):
            without: Any = {name: value for name, value in message.items() if name != key}
            yield without, call


def name_of_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    return str(function.get("name"))[:80] if isinstance(function, dict) else "a tool"


# --- chat/typed ---
# Control tokens in the text of a message. A tokenizer reads a typed `<|im_end|>` as the token that ends a turn.

# Tokens that answers rightly have in their texts: around thoughts, calls of tools and their answers.
WITHIN_ANSWERS = re.compile("think|thought|reason|tool|call|func", re.IGNORECASE)
TYPED_INSIDE = (
    "have control tokens of the model in the text of a message (the first: {}), which the tokenizer reads as the token "
    "itself: an answer is trained to stop there, and a text can open a turn: take them out, unless that is meant"
)
TYPED_AT_END = (
    "have answers that end with a control token in their text (the first: {}), which the tokenizer reads as the token "
    "itself: both it and the end that the chat template writes are trained: take it out"
)


def control_tokens(added: Iterable[Any], around_turns: str) -> re.Pattern[str] | None:
    """The added tokens of a tokenizer that stand in this text. DeepSeek's `<｜User｜>` is not special."""
    marks = {token.content for token in added if token.special or token.content[:1] in ("<", "[")}
    found = {mark for mark in marks if mark.strip() and mark in around_turns and not WITHIN_ANSWERS.search(mark)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


def typed_tokens(messages: list[Message], tokens: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The note on a row with control tokens in its texts, or only at the end of answers, with the first such token."""
    inside, ended = list[str](), list[str]()
    for message in messages:
        found = list(tokens.finditer(message["content"]))
        if found and message["role"] == "assistant" and found[-1].end() == len(message["content"].rstrip()):
            ended.append(f", {found.pop().group()!r}")
        if len(message) > 2:  # its thoughts and calls
            found += tokens.finditer(json.dumps({**message, "content": ""}, ensure_ascii=False, default=str))
        inside += [f", {match.group()!r} in a text of {message['role']}" for match in found]
    if inside:
        yield TYPED_INSIDE, inside[0]
    elif ended:
        yield TYPED_AT_END, ended[0]


# --- chat/row_notes ---
# Notes that count rows whose text is trained unchanged, though the author of the data hardly meant it so.

# Texts that stand for nothing: those of Alpaca, and an empty cell as programs write it. In answers only Alpaca's texts
# count, because `None` may be a real answer.
NO_ANSWER = re.compile(r"<no ?(?:input|output)>", re.IGNORECASE)
NOTHING = re.compile(rf"{NO_ANSWER.pattern}|no ?input|nan|none|null|n/a", re.IGNORECASE)
# An empty or broken cell as pandas, Excel, MySQL, JavaScript and web pages (invisible characters) write it. `NaN` is
# not in it, because it may be an answer about JavaScript.
BROKEN_CELL = re.compile(
    r"nan|<NA>|NaT|#(?:N/A|REF!|VALUE!|NAME\?|NUM!|NULL!|DIV/0!)|\\N|\[object Object\]"
    r"|[\s\xad\u200b-\u200f\u2060\ufeff]+"
)
# UTF-8 that was read as Windows-1252 or Latin-1: letters such as ü, quotes, Cyrillic; U+FFFD for undecodable bytes.
WRONG_LETTERS = re.compile(
    r"Ã[Ÿ\x80-\x9f¡-ª¬-º¼-¿]|â(?:€[™œ“”¦\x9d]|\x80[\x93-\xa6])|(?:Ð[\xa0-¿]|Ñ[€‚ƒ„…†‡ˆ‰Š‹Œ\x80-\x8f]){3}|\ufffd"
)
IN_WRONG_LETTERS = ("Ã", "â€", "\x80", "Ð", "\ufffd")  # searched first: WRONG_LETTERS takes a minute for 200 MB
ALONE = ("prompt", "completion", "text")  # keys of an example without messages
# What chat templates write around turns: <|im_start|>, <|user|>, <｜User｜>, <start_of_turn>, [INST], ### Instruction:
TURN_MARK = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_turn>|\[/?INST\]"
    r"|^### ?(?:Instruction|Response|Human|User|Assistant):",
    re.MULTILINE,
)
# In answers fewer marks count: a document in an answer has such lines, and its thoughts have such marks.
MARK_IN_ANSWER = re.compile(
    r"(?:<\|(?:im_end|eo[mt]_id|eot|end|endoftext|end_of_text)\|>|<｜[^<>｜\s]+｜>|<end_of_turn>|</s>|<eos>)\s*\Z"
    r"|\[INST\](?=[^\[]*\[/INST\])|\A\s*### ?(?:Response|Assistant):|^### ?(?:Instruction|Human):",
    re.MULTILINE,
)
FLOAT = re.compile(r"\s*-?\d+\.0\s*")
TAGS_TWICE = re.compile(r"<tool_response>\s*<tool_response>")
PYTHON_VALUE = re.compile(r"\s*[\[{]\s*(?:'|array\().*[\]}]\s*", re.DOTALL)  # not JSON, which has double quotes
FOR_NOTHING = "have a text that stands for nothing (the first: {}), which is read: empty the cell, or leave the row out"
WRONGLY_READ = (
    "have letters that were read in a wrong encoding (the first: {}), and that the model learns so: take the texts "
    "again from where they came, as UTF-8"
)
UNKNOWN_ROLE = (
    "have a role that chat templates do not know (the first: {}): it is written as it is, and no chat in use has such "
    "a turn. Rename it, as human to user; the call of a tool belongs into tool_calls of the assistant's message"
)
TWO_SYSTEMS = "have a system message in their column and another in their messages (the first: {}): both are read"
RENDERED_TWICE = (
    "hold marks of turns in the question (the first: {}), and the model's own template writes its marks around them: "
    "take them out; format: completion trains rows that are rendered already"
)
MARKED_ANSWERS = "hold marks of turns in an answer (the first: {}), which the model learns to write: take them out"
PYTHON_ANSWERS = (
    "have an answer that is a list or an object as Python writes it (the first: {}), and that is trained: put the text "
    "that is meant in its place"
)
# Keys of a message that answers need, and keys that are handled elsewhere. Of all other keys only sentences are noted.
NEEDED_KEYS = ("attachments", "context", "documents", "functions", "reasoning_details", "tools")
READ_KEYS = ("role", "content", *CALLS, *THOUGHTS)
UNREAD_KEYS = (
    "have a text in a key that the chat template does not write (the first: {}): the content needs it, if answers do"
)
FLOAT_ANSWERS = (
    "have an answer that is a whole number written as a float (the first: {}), as pandas writes a column with an empty "
    "cell: read it with dtype=str"
)
MOSTLY = {PYTHON_ANSWERS: 0.5, FLOAT_ANSWERS: 0.9}  # the least share of rows for a note: a few may be meant so
LEFT_OUT_ROW = "are marked to be left out (the first: {}), in a column that is not read: they train like the others"
TOOLS_TWICE = (
    "describe their tools twice (the first: {}), in the system message and in the column of tools, which the chat "
    "template writes too: keep one of them, as it will be in use"
)
WRITTEN_NULLS = (
    "have a null in a call or a tool that was hardly meant (the first: {}), and that is trained: `datasets` and pandas "
    "write a null for each name that only others have. Use the Parquet file, or take the nulls out"
)
RESPONSE_TWICE = (
    "have the answer of a tool in <tool_response> twice (the first: {}): the chat template writes the tags too"
)
ACROSS = (
    "have one token for the end of the prompt and the start of the answer (the first: {}): a prompt that is asked "
    "alone gets other tokens than it was trained with. End the prompt without a space, and begin the answer with it"
)
ACROSS_IN_CHAT = (
    "have one token for the end of the prompt that the chat template writes and the start of an answer (the first: "
    "{}): in use the prompt has other tokens. Begin answers without a newline, and with a thought where it opens one"
)


class RowNotes:
    """Notes about rows: for each note, the places that it is about."""

    def __init__(self, *notes: str) -> None:
        """`notes` come first, in this order; other notes follow in the order in which they are found."""
        self.places: dict[str, list[str]] = {note: [] for note in notes}
        self.rows = 0  # rows that were looked at

    def add(self, line: int, found: Iterable[tuple[str, str]]) -> None:
        """Adds the notes about the row at this line. `found` holds each note with a text to show behind the line."""
        self.rows += 1
        for note, place in found:
            self.places.setdefault(note, []).append(f"line {line}{place}")

    def notes(self, count: int) -> list[str]:
        """The notes as sentences, after `count` rows were looked at. Leaves out notes below their share in `MOSTLY`."""
        rare = {note for note, places in self.places.items() if len(places) < count * MOSTLY.get(note, 0)}
        places_of = {note: places for note, places in self.places.items() if places and note not in rare}
        return [f"{len(places)} of {count} rows {note.format(places[0])}" for note, places in places_of.items()]


def findings(row: Row, columns: dict[str, str], encoded: Any, own: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """The notes about a row, each at most once and with the text that it is about. `encoded` is the encoded row, or its
    example if there is no model. `own` holds the model's added tokens, which typed.py reports."""
    unread = row.keys() - columns.values()
    marked = min((name for name in unread if (values := marks(name, row)) and not any(values)), default=None)
    if marked is not None:
        yield LEFT_OUT_ROW, f", {marked}: {str(row[marked])[:40]}"
    messages: list[Any] = encoded.get("messages", [])
    if unknown := [message["role"] for message in messages if message["role"] not in ROLES]:
        yield UNKNOWN_ROLE, f", {unknown[0][:40]!r}"
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    beside = [row.get(columns.get(name, "")) for name in ("input", "system")]
    column = row.get(columns.get("question", columns.get("instruction", "")))
    yield from of_texts(
        [text for text in beside if isinstance(text, str)], [column, *map(encoded.get, ALONE)], messages
    )
    users = [message["content"].lstrip() for message in messages if message["role"] == "user"]
    # A message may be about such marks, so in a message only a mark at its start counts.
    asked = map(TURN_MARK.search, [column]) if isinstance(column, str) else map(TURN_MARK.match, users)
    for note, found in ((RENDERED_TWICE, asked), (MARKED_ANSWERS, map(MARK_IN_ANSWER.search, answers))):
        if foreign := [mark for each in found if each and (mark := each.group().strip()) not in own]:
            yield note, f", {foreign[0]!r}"
    if as_python := [text for text in (*answers, encoded.get("completion", "")) if PYTHON_VALUE.fullmatch(text)]:
        yield PYTHON_ANSWERS, f", {as_python[0].strip()[:60]}"
    if floats := [text for text in answers if FLOAT.fullmatch(text)]:
        yield FLOAT_ANSWERS, f", {floats[0]}"
    if encoded.get("rendered"):
        yield from islice(unread_keys(messages, encoded["rendered"]), 1)
        yield from [(RESPONSE_TWICE, "")] * bool(TAGS_TWICE.search(encoded["rendered"]))
    systems = [message["content"] for message in messages[:2] if message["role"] in SYSTEMS]
    if len(systems) > 1 and systems[0] == row.get(columns.get("system", "")):
        yield TWO_SYSTEMS, ""
    yield from islice(written_nulls(row, encoded.get("tools")), 1)
    tools = functions_of(encoded.get("tools"))
    texts = [message["content"] for message in messages if message["role"] in SYSTEMS]
    if any(is_described(tools, text) for text in texts):
        yield TOOLS_TWICE, ""


def of_texts(beside: list[str], others: list[Any], messages: list[Any]) -> Iterator[tuple[str, str]]:
    """Notes on empty or wrongly decoded texts. `beside`: the input and the system message; `others`: further texts that
    are in no message. The answers of tools are not checked."""
    spoken = [message for message in messages if message["role"] not in TOOLS]
    texts = [text for text in (*others, *(message["content"] for message in spoken)) if isinstance(text, str)]
    nothing = [text for text in beside if NOTHING.fullmatch(text.strip())]
    answers = [message["content"] for message in spoken if message["role"] == "assistant"]
    nothing += [text for text in answers if NO_ANSWER.fullmatch(text.strip())]
    nothing += [text for text in texts if BROKEN_CELL.fullmatch(text.strip())]
    if nothing:
        yield FOR_NOTHING, f", {nothing[0].strip()!r}"
    odd = [text for text in (*beside, *texts) if any(sign in text for sign in IN_WRONG_LETTERS)]
    if wrong := [found.group() for found in map(WRONG_LETTERS.search, odd) if found]:
        yield WRONGLY_READ, f", {wrong[0]!r}"


def unread_keys(messages: list[Any], rendered: str) -> Iterator[tuple[str, str]]:
    for name, value, role in ((name, each[name], each["role"]) for each in messages for name in each):
        is_needed = len(str(value)) > 2 if name in NEEDED_KEYS else isinstance(value, str) and len(value.split()) > 4
        if is_needed and name not in READ_KEYS and str(value).strip() not in rendered:
            yield UNREAD_KEYS, f", {name} of a message of {role}"


def functions_of(items: Any) -> list[Row]:
    """The functions of these tools or calls, each of which may hold one or be one."""
    functions = [item.get("function", item) for item in items or () if isinstance(item, dict)]
    return [function for function in functions if isinstance(function, dict)]


def written_nulls(row: Row, tools: Any) -> Iterator[tuple[str, str]]:
    """Notes on nulls of Arrow in JSON: parameters of tools, and arguments of calls where another message has a null for
    its calls too."""
    parameters = (function.get("parameters") for function in functions_of(tools))
    objects = [each.get("properties") for each in parameters if isinstance(each, dict)]
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, dict)]
    called: list[Any] = [turn["tool_calls"] for turn in turns if "tool_calls" in turn]
    if None in called:
        objects += [call.get("arguments") for calls in called for call in functions_of(calls)]
    for each in objects:
        yield from (
            ((WRITTEN_NULLS, f", {key!r}") for key in each if each[key] is None) if isinstance(each, dict) else ()
        )


def is_described(tools: list[Row], text: str) -> bool:
    """Whether a text has each of these tools, and one or more, as JSON or as Python writes it."""
    names = [re.escape(str(tool["name"])) for tool in tools if is_filled(tool.get("name"))]
    return names != [] and all(re.search(rf"""["']name\\?["']: ?\\?["']{name}\\?["']""", text) for name in names)


# --- chat/labels ---
# The labels of an encoded row, which say which of its tokens are trained.

IGNORED = -100  # the label of a token that is read and not trained


def end_of_turn(special: list[str], end: str | None) -> re.Pattern[str] | None:
    """What ends an answer: a special token, or several in a row up to the end token, as in Command R7B's template."""
    if not special:
        return None
    one = "(?:" + "|".join(map(re.escape, special)) + ")"
    return re.compile(rf"\s*(?:{one}*?{re.escape(end)}|{one})" if end else rf"\s*{one}")


def labels_of(text: str, ids: list[int], offsets: Any, spans: Any, added: Container[int]) -> list[int]:
    """The ids of the tokens with a part inside a span, and `IGNORED` for others.

    Some tokenizers leave spaces out of their offsets, so that a token begins where the one before it ends. An added
    token may take the spaces behind it, as Phi-3's `<|assistant|>` does: it belongs to the prompt all the same.
    """
    labels, ends = list[int](), accumulate((end for _, end in offsets), max, initial=0)
    for token, (first, end), before in zip(ids, offsets, ends, strict=False):
        start = min(first, before)
        inside = (a for a, b in spans if start < b and end > max(a, start))
        trained = any(token not in added or not text[start:a].strip() for a in inside)
        labels.append(token if trained else IGNORED)
    return labels


def text_across(text: str, labels: list[int], offsets: Any, starts: list[int]) -> str:
    """The text of the first trained token that begins before an answer and ends in it; else empty."""
    ends = accumulate((end for _, end in offsets), max, initial=0)
    for label, (first, end), before in zip(labels, offsets, ends, strict=False):
        begin = min(first, before)
        if label != IGNORED and any(begin < start < end for start in starts):
            return text[begin:end]
    return ""


def trained_tokens(row: Tokens) -> int:
    """The number of labels that count. The first one is never predicted, because nothing comes before it."""
    return sum(label != IGNORED for label in row["labels"][1:])


def marked_text(tokenizer: Any, row: Tokens) -> str:
    """The row decoded, with the trained parts between ⟦ and ⟧."""
    text, pairs = "", zip(row["input_ids"], row["labels"], strict=True)
    for trained, piece in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        decoded = tokenizer.decode([token for token, _ in piece])
        text += f"⟦{decoded}⟧" if trained else decoded
    return text


def fed_digest(rows: Any) -> str:
    """SHA-256 of token ids and labels, each list with its length before it, as 32-bit little-endian numbers, and of the
    digests of a row's pictures."""
    digest = hashlib.sha256()
    for row in rows:
        for values in (row["input_ids"], row["labels"]):
            digest.update(struct.pack(f"<i{len(values)}i", len(values), *values))
        for picture in row.get("image_sha256") or ():
            digest.update(bytes.fromhex(picture))
    return digest.hexdigest()


def system_digest(rows: Any) -> str:
    """SHA-256 of the system message with which every row begins; empty if there is no such one."""
    firsts = [(row.get("messages") or [{}])[0] for row in rows]
    texts = {json.dumps(first.get("content") if first.get("role") == "system" else None) for first in firsts}
    text = json.loads(texts.pop()) if len(texts) == 1 else None
    return hashlib.sha256(text.encode()).hexdigest() if text and isinstance(text, str) else ""


# --- tables/columns ---
# Columns of Arrow: their values as they were written.


def as_written(rows: Iterable[Row], schema: Any, *, json_read: bool = False) -> Iterator[Row]:
    """Rows of Arrow without the nulls that Arrow added. A column has one type, so each call of a tool would have the
    arguments of all the others. JSON inside a column is parsed, unless `json_read` says that it was; its nulls stay.
    Numbers of classes become their names, and bytes of a text become the text."""
    readers = {field.name: read for field in schema if (read := arrow_reader(field.type, json_read=json_read))}
    readers |= class_readers(schema)
    for row in rows:
        yield {**row, **{name: read(row[name]) for name, read in readers.items()}} if readers else row


def class_readers(schema: Any) -> dict[str, Callable[[Any], Any]]:
    """A function for each column of `datasets`' ClassLabel, which turns a number into the name of its class. -1, and
    what is no number of a class, stands for none."""
    import pyarrow

    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
        texts: dict[str, dict[Any, str]] = {name: dict(enumerate(map(str, names))) for name, names in named.items()}
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return {}
    whole = [field.name for field in schema if pyarrow.types.is_integer(field.type)]
    return {name: texts[name].get for name in texts.keys() & whole}


def text_in_bytes(value: Any) -> Any:
    """The text in these bytes. Bytes that are no UTF-8 or have a 0 stay, as those of pictures, sounds and films."""
    try:
        return value.decode() if isinstance(value, bytes) and b"\0" not in value else value
    except UnicodeDecodeError:
        return value


def arrow_reader(kind: Any, *, json_read: bool) -> Callable[[Any], Any] | None:
    """A function that turns a value of this Arrow type into the value that was written; None if both are the same."""
    import pyarrow

    types = pyarrow.types
    if getattr(kind, "extension_name", None) == "arrow.json":
        return None if json_read else json_in_column
    if types.is_binary(kind) or types.is_large_binary(kind):
        return text_in_bytes
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = arrow_reader(kind.value_type, json_read=json_read)
        return item and (lambda values: [item(value) for value in values] if isinstance(values, list) else values)
    if types.is_map(kind) and types.is_string(kind.key_type):  # as Spark writes dictionaries of Python
        each = arrow_reader(kind.item_type, json_read=json_read) or (lambda part: part)
        return lambda pairs: (
            pairs if pairs is None else with_distinct_keys([(name, each(part)) for name, part in pairs])
        )
    if not types.is_struct(kind):
        return None
    fields = {each.name: arrow_reader(each.type, json_read=json_read) for each in kind}
    if fields.get("bytes") is text_in_bytes:  # of a picture
        del fields["bytes"]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):  # null, or what `datasets` makes of an image
            return value
        return {
            name: field(part) if (field := fields.get(name)) else part
            for name, part in value.items()
            if part is not None
        }

    return read


def json_in_column(text: Any) -> Any:
    """The value of a column of JSON; null stays."""
    return json.loads(text, object_pairs_hook=with_distinct_keys) if isinstance(text, str) else text


# --- tables/shape ---
# How a table is written: the sign between its cells, its quotes, and the JSON that pandas makes of one.

SIGN_SAID = re.compile(r'"?sep=(?P<sign>\t|[^\w\s"])"?\s*')  # a first line for Excel
QUOTED = re.compile(r'(?<![^,;|\t])"[^"]*(?:""[^"]*)*"')  # a cell, whose signs are text
SPLITS_ALONE = {"train", "validation", "valid", "val", "dev", "test", "eval"}  # keys of a document
Record = tuple[int, list[str], list[str], csv.Error | None]  # of a row: its first line's number, cells, lines, fault


def sign_of(first_line: str, suffix: str, lines: Iterable[str]) -> str:
    """The sign between cells. In a .csv it is one that the header has outside of quotes: Excel writes a semicolon where
    the comma is for decimals. Of several signs it is the first that most `lines` have as often as the header."""
    if (sign_line := SIGN_SAID.fullmatch(first_line)) is not None:
        return sign_line["sign"]
    header = QUOTED.sub("", first_line)
    signs = "\t" if suffix == ".tsv" else [sign for sign in ",;\t|" if sign in header] or ","
    rows = [QUOTED.sub("", line) for line in islice(lines, 1, 100)] if len(signs) > 1 else []
    return max(signs, key=lambda sign: sum(row.count(sign) == header.count(sign) for row in rows))


MARKED = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def utf16(raw: bytes) -> str | None:
    """The kind of UTF-16 or UTF-32, or None. Plain letters without a mark are UTF-8 too, with zeros."""
    zeros = raw[::2].count(0), raw[1::2].count(0)
    width = 32 if 3 * sum(zeros) > 2 * len(raw) else 16
    unmarked = f"UTF-{width}{('BE', 'LE')[zeros[1] > zeros[0]]}" if max(zeros) - min(zeros) > len(raw) // 8 else None
    return next((kind for mark, kind in MARKED.items() if raw.startswith(mark)), unmarked)


# Encodings of any other text, by the names of iconv: that of Windows, which includes Latin-1; of DOS (Excel's "CSV
# (MS-DOS)"); of old Macs ("CSV (Macintosh)").
OLD_ENCODINGS = {"WINDOWS-1252": "cp1252", "CP850": "cp850", "MACINTOSH": "mac_roman"}
IN_WORDS = "’\xad"  # an apostrophe, and the sign for a soft hyphen


def old_encoding(raw: bytes) -> str | None:
    """The encoding in `OLD_ENCODINGS` in which a text reads most like words; of equal ones the first. None if
    it is not the first one of all, and no letter inside a word speaks for it."""
    odd: dict[str, tuple[int, int]] = {}
    for name, codec in OLD_ENCODINGS.items():
        with suppress(UnicodeDecodeError):
            odd[name] = odd_letters(raw.decode(codec))
    best = min(odd, key=lambda name: odd[name][0], default=None)
    return best if best == "WINDOWS-1252" or (best is not None and odd[best][1]) else None


def odd_letters(text: str) -> tuple[int, int]:
    """Counts the characters beyond ASCII inside a word. The first number is of those that no word has there: signs, and
    letters of another case than their neighbours. The second is of all."""
    odd = count = 0
    for before, one, after in zip(text, text[1:], text[2:], strict=False):
        if not one.isascii() and one not in IN_WORDS and before.isalpha() and after.isalpha():
            odd += not one.isalpha() or one.isupper() != (before + after).isupper()
            count += 1
    return odd, count


def require_distinct(names: Iterable[str], table: Path) -> None:
    """Refuses a table with two columns of one name: a row would keep only the last of them."""
    for name, count in Counter(filter(None, names)).most_common(1):
        if count > 1:
            message = f"{table} has {count} columns with the name {name[:200]!r}"
            raise unreadable(message, "one name for each column", hint="rename or remove one of them")


def records_of(lines: Iterable[str], sign: str) -> Iterator[Record]:
    taken = list[str]()

    def taking() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    reader = csv.reader(taking(), delimiter=sign, strict=True)
    while True:
        start, cells, error = reader.line_num + 1, list[str](), None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as caught:
            error = caught
        yield start, cells, taken[:], error
        taken.clear()


def vote(record: Record, sign: str, columns: int) -> int:
    """1 for a row that needs its quotes, -1 for lines that would be rows too if quotes were text, 0 for others. All
    programs that write commas quote a text with a line break, so with commas two lines may well be one row: 0 too."""
    _, cells, lines, _ = record
    counts = [line.count(sign) + 1 for line in lines if line.strip()]
    if columns == 1 or len(cells) != columns:
        return 0
    return 1 if set(counts) != {columns} else -(len(counts) > (2 if sign == "," else 1))


def require_quotes(records: Iterable[Record], several: Record, sign: str, table: object) -> None:
    """Refuses a table whose row `several` may be several rows, unless more rows need their quotes. Most programs write
    a .tsv without quotes, and readers make one row of all text between two quotes. In a table with commas, one other
    row of several lines is enough: then nobody forgot to close a quote."""
    start, cells, lines, _ = several
    if sign == ",":
        needed = sum(len(record[2]) > 1 for record in records) > 1
    else:
        needed = sum(vote(record, sign, len(cells)) for record in records) > 0
    if not needed:
        raise unreadable(
            f"a quote in line {start} of {table} and one in line {start + len(lines) - 1} may make one row of several",
            "a table that shows whether its quotes hold line breaks",
            lines[0][:80].rstrip(),
            "write the rows to a .jsonl file: if each line is one, pandas reads the table with quoting=3 and dtype=str",
        )


def require_no_space(record: Record, sign: str, columns: int, table: object) -> None:
    """Refuses quotes behind a sign and a space: they would be text. In a .tsv, mostly without quotes, they may be."""
    start, cells, lines, _ = record
    text = sign + "".join(lines)
    spaced = [cell for cell in cells if cell.lstrip(" ")[:1] == '"' != cell[:1]] if ' "' in text else []
    if sign == "\t" or not any(sign + cell in text for cell in spaced):  # a quoted cell has its own quotes twice
        return
    if len(next(csv.reader(lines, delimiter=sign, skipinitialspace=True))) == columns:
        found = f"in line {start} of {table} a space stands before the quote of a cell, so the quote would be text"
        hint = "remove such spaces; pandas reads the table with skipinitialspace=True and dtype=str"
        raise unreadable(found, "no space there", lines[0][:80].rstrip(), hint)


# Keys beside the rows of a document, whose value is meant for all rows and stands in none.
FOR_ALL = re.compile(r"sys(?:tem|[_ -]).*|instructions?|prompt|persona|context|tools|functions", re.IGNORECASE)


def items_of(document: Any, path: object) -> list[Any]:
    """The rows of a document: the list that it is or holds, alone or as `train`, a table of pandas, or itself alone."""
    if not isinstance(document, dict):
        return document if isinstance(document, list) else [document]
    if len(document) == 1 and isinstance(splits := next(iter(document.values())), dict) and "train" in splits:
        return items_of(splits, path) if splits.keys() <= SPLITS_ALONE else [document]
    if rows := by_lists(document):
        return rows
    lists = [value for value in document.values() if isinstance(value, list)]
    if isinstance(train := document.get("train"), list) and document.keys() <= SPLITS_ALONE:
        return train
    if len(lists) == 1 and not is_chat(lists[0]):
        texts = (name for name, value in document.items() if value and isinstance(value, (str, dict)))
        name = next(filter(FOR_ALL.fullmatch, texts), None)
        if name is not None and lists[0] and isinstance(lists[0][0], dict):
            hint = "write it into each row, a system prompt as its column `system`, or remove it"
            raise unreadable(f"{path} has {name!r} beside its rows", "rows alone", str(document[name])[:80], hint)
        return lists[0]
    return by_columns(document) or by_index(document) or by_cells(document) or [document]


def is_message(names: Iterable[str]) -> bool:
    """Whether these are the columns of one message, which is no row."""
    there = {*names}
    part = {"role", "text"} <= there and not there.isdisjoint({"message_id", "parent_id", "conversation_id"})
    return part or {"role", "content"} <= there or {"from", "value"} <= there


def is_chat(item: Any) -> bool:
    return isinstance(item, list) and item != [] and all(isinstance(each, dict) and is_message(each) for each in item)


def not_an_object(where: str, item: Any) -> Refused:
    found, row = "not a JSON object", '{"column": value, …}'
    if is_chat(item):
        row = '{"messages": […]}'
        found = f"a list of messages, and a row is {row}"
    return unreadable(f"{where} is {found}", row, repr(item)[:80], MEND)


def by_columns(table: Row) -> list[Row]:
    """The rows of `{"column": {"0": value, "1": …}, …}`; empty for anything else."""
    columns = list(table.values())
    if not all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        return []
    index = list(columns[0]) if columns else []
    return [{name: table[name][key] for name in table} for key in index] if all(map(str.isdigit, index)) else []


def by_lists(table: Row) -> list[Row]:
    """The same of `{"column": [value, …], …}`, where no value is an object: messages and tools are lists of one row."""
    columns = list(table.values())
    if table.keys() >= {"columns", "data"} or not all(isinstance(column, list) for column in columns):
        return []
    plain = not any(isinstance(value, dict) for column in columns for value in column)
    alike = plain and len({*map(len, columns)}) == 1
    return [dict(zip(table, values, strict=True)) for values in zip(*columns, strict=True)] if alike else []


def by_index(table: Row) -> list[Row]:
    """The same of `{"0": {"column": value, …}, "1": …}`."""
    rows = list(table.values())
    return rows if all(map(str.isdigit, table)) and all(isinstance(row, dict) for row in rows) else []


def by_cells(table: Row) -> list[Row]:
    """The same of `{"columns": […], "index": […], "data": [[…], …]}`."""
    names, rows = table.get("columns"), table.get("data")
    if not (isinstance(names, list) and isinstance(rows, list) and table.keys() <= {"columns", "index", "data"}):
        return []
    alike = all(isinstance(row, list) and len(row) == len(names) for row in rows)
    alike = alike and all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    return [dict(zip(names, row, strict=True)) for row in rows] if alike else []


# --- parquet ---
# Parquet and Arrow: checks tables before they are unpacked.

# A table of one kilobyte can unpack to gigabytes: by its codec, by numbers that stand for a long text in a dictionary,
# by texts that repeat the beginning of the one before, by runs of rows or of parts of a row. `most_in_all` and
# `most_at_once` say what a file of a size may hold: as rows of Python, and in one page of each column or in one row.
ROWS_AT_ONCE = 1024
BATCH_BYTES = 32_000_000  # of one batch, if its rows are large, as with pictures
PIECE_BYTES = 1 << 20
VALUE_BYTES = 100  # of a value in Python, beside its text
# Numbers in Parquet: BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY, DICTIONARY_PAGE, DELTA_BYTE_ARRAY; codecs by pyarrow's names.
TEXTS, FIXED, DICTIONARY_PAGE, PREFIXES = 6, 7, 2, 7
CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 5: "lz4_raw", 6: "zstd", 7: "lz4_raw"}
DICTIONARY_BYTES = 1 << 20  # writers add nothing to a dictionary of this size


def most_in_all(size: int) -> int:
    return max(1_000_000_000, 1000 * size)


def most_at_once(size: int) -> int:
    return max(32_000_000, 100 * size)


def too_much(path: Any, size: int, contents: str) -> Refused:
    return Refused(
        f"{path} has {size:,} bytes and unpacks to {contents}",
        code="unsafe_file",
        expected=f"at most {most_in_all(size):,} bytes in all, and {most_at_once(size):,} in one row or page",
        got=contents,
        hint="do not use this file; if you wrote it yourself, write its rows to a .jsonl file and use that",
    )


def parquet_batches(path: Path, size: int) -> Iterator[Any]:
    """The rows of a Parquet file, in batches that are small enough in memory. Its footer, and the headers of its pages,
    must not claim more than a file of this size may hold."""
    from pyarrow import parquet

    with open(path, "rb") as raw:
        groups, most = row_groups(raw, size), most_at_once(size)
        check_footer(groups, path, size)
        file = parquet.ParquetFile(path, **in_pieces(groups))
        if any(len(group.chunks) != len(file.schema) for group in groups):
            raise ValueError("its footer lacks a column")
        numbered = {i for group in groups for i, chunk in enumerate(group.chunks) if chunk.numbered}
        names = [file.schema.column(i).path for i in sorted(numbered)]
        by_number = parquet.ParquetFile(path, read_dictionary=names, **in_pieces(groups))
        for number, group in enumerate(groups):
            columns = [Column(raw, chunk, file.schema.column(i), most) for i, chunk in enumerate(group.chunks)]
            page, parts = sum(c.page for c in columns), sum(c.values for c in columns if c.repeated)
            if page > most:
                raise too_much(path, size, f"{page:,} bytes in one page of each column")
            if parts * VALUE_BYTES > most_in_all(size):
                raise too_much(path, size, f"{parts:,} parts of rows")
            # One row may hold the parts of all rows, and each part may be the longest text.
            wide = [c for c in columns if c.repeated and c.width * c.values > most_in_all(size)]
            if any(not c.numbered for c in wide):
                raise too_much(path, size, f"up to {max(c.width * c.values for c in wide):,} bytes of texts")
            rows = min(ROWS_AT_ONCE, most // max(1, sum(c.width for c in columns)), BATCH_BYTES // mean_row(group))
            # Read by number, a repeated text is in memory only once, but the rows take six times as long.
            yield from (by_number if wide else file).iter_batches(batch_size=max(1, rows), row_groups=[number])


def mean_row(group: Group) -> int:
    """Bytes of a row in a file, by its footer. Pictures make it large."""
    return 1 + sum(chunk.unpacked for chunk in group.chunks) // max(1, group.rows)


def in_pieces(groups: list[Group]) -> dict[str, Any]:
    """Options with which pyarrow reads a column of large rows piece by piece; none for small rows. By default it reads
    all rows of a group at once, which may be gigabytes with pictures."""
    large = any(mean_row(group) * ROWS_AT_ONCE > BATCH_BYTES for group in groups)
    return {"pre_buffer": False, "buffer_size": PIECE_BYTES} if large else {}


class Chunk(NamedTuple):
    """One column of one row group, as the footer describes it."""

    kind: int
    codec: int
    values: int
    unpacked: int
    packed: int
    data_at: int
    dictionary_at: int  # 0: none

    @property
    def numbered(self) -> bool:
        """Whether its texts are in a dictionary."""
        return self.kind == TEXTS and self.dictionary_at > 0


class Group(NamedTuple):
    rows: int
    chunks: list[Chunk]


def row_groups(raw: IO[bytes], size: int) -> list[Group]:
    """The row groups of a Parquet file, read without pyarrow (26), which crashes on a footer that it does not know."""
    raw.seek(max(0, size - 8))
    length, mark = int.from_bytes(raw.read(4), "little"), raw.read(4)
    if mark != b"PAR1" or length > size - 8:
        raise ValueError("it does not end as a Parquet file")
    raw.seek(size - 8 - length)
    try:
        footer, _ = thrift_struct(raw.read(length), 0)
        return [Group(group[3], [chunk_of(column[3]) for column in group[1]]) for group in footer[4]]
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("its footer is broken") from None


def chunk_of(fields: dict[int, Any]) -> Chunk:
    chunk = Chunk(fields[1], fields[4], fields[5], fields[6], fields[7], fields[9], fields.get(11, 0))
    if any(type(number) is not int or number < 0 for number in chunk):
        raise ValueError("its footer has an invalid number")
    return chunk


def check_footer(groups: list[Group], path: Path, size: int) -> None:
    """Refuses a Parquet file whose footer claims more than a file of `size` bytes may hold."""
    rows = sum(group.rows for group in groups)
    if rows * VALUE_BYTES > most_in_all(size):
        raise too_much(path, size, f"{rows:,} rows")
    unpacked = sum(chunk.unpacked for group in groups for chunk in group.chunks)
    if unpacked > most_in_all(size):
        raise too_much(path, size, f"{unpacked:,} bytes")


class Column:
    """The claims of the pages of one column of one row group. pyarrow believes these, and not the footer."""

    def __init__(self, raw: IO[bytes], chunk: Chunk, column: Any, most: int) -> None:
        self.repeated = column.max_repetition_level > 0
        self.numbered = chunk.numbered
        self.page = 0  # bytes of the largest page
        self.values = 0
        self.width = 8  # most bytes of one value, which may be stored outside its page
        for page in pages(raw, chunk):
            self.page = max(self.page, page.unpacked)
            if page.kind == DICTIONARY_PAGE:
                self.width = max(self.width, longest_text(raw, page, chunk) if page.unpacked <= most else page.unpacked)
            else:
                self.values += page.values
            if page.encoding == PREFIXES:
                self.width, self.numbered = max(self.width, page.unpacked), False
        if chunk.kind == FIXED:
            self.width = column.length


class Page(NamedTuple):
    """A page as its header describes it."""

    kind: int
    at: int  # where its bytes begin
    packed: int  # bytes
    unpacked: int
    values: int
    encoding: int


def pages(raw: IO[bytes], chunk: Chunk) -> Iterator[Page]:
    """Each page that pyarrow would read."""
    at = chunk.dictionary_at if 0 < chunk.dictionary_at < chunk.data_at else chunk.data_at
    end, values_read = at + chunk.packed, 0
    while at < end and values_read < chunk.values:
        header, length = page_header(raw, at)
        inner: dict[int, Any] = next((header[n] for n in (5, 7, 8) if isinstance(header.get(n), dict)), {})
        values, encoding = inner.get(1, 0), inner.get(4 if 8 in header else 2, 0)
        page = Page(header.get(1, -1), at + length, header.get(3, -1), header.get(2, -1), values, encoding)
        if any(type(part) is not int or part < 0 for part in page):
            raise ValueError("the header of a page has an invalid number")
        yield page
        values_read += values if page.kind != DICTIONARY_PAGE else 0
        at = page.at + page.packed


def longest_text(raw: IO[bytes], page: Page, chunk: Chunk) -> int:
    """Bytes of the longest text in a dictionary. For a very large dictionary, or an unknown codec, the bytes of all."""
    import pyarrow

    if chunk.kind != TEXTS or page.unpacked > 8 * DICTIONARY_BYTES or chunk.codec not in CODECS:
        return page.unpacked
    raw.seek(page.at)
    data, codec = raw.read(min(page.packed, chunk.packed)), CODECS[chunk.codec]
    if codec is not None:
        try:
            data = pyarrow.decompress(data, page.unpacked, codec=codec, asbytes=True)
        except (pyarrow.ArrowException, OSError, ValueError):
            return page.unpacked
    at = longest = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return longest


def page_header(raw: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """The header of a page, by field number, and its length."""
    for most in (1 << 14, 1 << 24):  # a header may hold a long text, such as the smallest value of the page
        raw.seek(at)
        try:
            return thrift_struct(raw.read(most), 0)
        except IndexError:
            continue
    raise ValueError("the header of a page is cut off")


def thrift_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact protocol, by field number, and the position of its end."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        number, at = (number + (head >> 4), at + 1) if head >> 4 else thrift_number(data, at + 1)
        fields[number], at = thrift_value(data, at, head & 15)
    return fields, at + 1


def thrift_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return thrift_number(data, at)
    if kind == 7:  # a float
        return None, at + 8
    if kind == 8:  # bytes; their length has no sign
        length, at = thrift_varint(data, at)
        return data[at : at + length], at + length
    if kind in (9, 10):
        return thrift_list(data, at)
    if kind == 12:
        return thrift_struct(data, at)
    raise ValueError("it has a value of an unknown type")


def thrift_list(data: bytes, at: int) -> tuple[list[Any], int]:
    head, values = data[at], []
    count, at = (head >> 4, at + 1) if head >> 4 < 15 else thrift_varint(data, at + 1)
    for _ in range(count):
        value, at = (data[at], at + 1) if head & 15 in (1, 2) else thrift_value(data, at, head & 15)
        values.append(value)
    return values, at


def thrift_number(data: bytes, at: int) -> tuple[int, int]:
    value, at = thrift_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def thrift_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number in it is too long")


def believable(batches: Iterable[Any], path: Any, size: int) -> Iterator[Any]:
    """Batches of Arrow that are small enough as rows of Python too. One row, and all rows so far, must not be larger
    than a file of this size may hold."""
    total = 0
    for batch in batches:
        for part, weight in small_parts(batch, most_at_once(size)):
            total += weight
            if weight > most_at_once(size):
                raise too_much(path, size, f"{weight:,} bytes in one row")
            if total > most_in_all(size):
                raise too_much(path, size, f"more than {most_in_all(size):,} bytes of rows")
            yield part


def small_parts(batch: Any, most: int) -> Iterator[tuple[Any, int]]:
    """The batch in parts of at most so many bytes, or of one row, with the bytes of each."""
    weight = sum(python_bytes(column) for column in batch.columns)
    if weight <= most or batch.num_rows < 2:
        yield batch, weight
        return
    half = batch.num_rows // 2
    yield from small_parts(batch.slice(0, half), most)
    yield from small_parts(batch.slice(half), most)


def python_bytes(array: Any) -> int:
    """About the number of bytes that its values take in Python."""
    import pyarrow
    from pyarrow import compute

    kind, own = array.type, VALUE_BYTES * len(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return python_bytes(array.storage)
    if pyarrow.types.is_struct(kind):
        return own + sum(map(python_bytes, array.flatten()))
    if pyarrow.types.is_map(kind):
        array = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
    if isinstance(array, (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)):
        return own + python_bytes(array.flatten())
    if not pyarrow.types.is_dictionary(kind):
        return own + int(array.nbytes)
    lengths = compute.binary_length(array.dictionary)
    return own + (compute.sum(lengths.take(array.indices)).as_py() or 0)


SAVE_AGAIN = "save the dataset again with Dataset.save_to_disk, or write the rows to a .jsonl file"
# Files that `datasets` writes: two beside the rows of each split, and one beside the folders of several splits.
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def undecoded(loaded: Any) -> Any:
    """The dataset with all columns as values of Python, whatever `set_format` chose before it was saved. Pictures,
    sounds and films stay bytes or a path, which `datasets` would decode."""
    loaded.reset_format()
    loaded.info.features = type(loaded.features)(as_stored(loaded.features))
    return loaded


DECODED = ("Image", "Audio", "Video", "Pdf")  # classes of `datasets`


def as_stored(feature: Any) -> Any:
    """The same column, undecoded. `datasets` nests columns in lists of its own, lists and dictionaries."""
    if isinstance(feature, dict):
        return {name: as_stored(part) for name, part in feature.items()}
    if isinstance(feature, list):
        return [as_stored(part) for part in feature]
    stored = copy.copy(feature)
    if type(feature).__name__ in DECODED:
        stored.decode = False
    elif hasattr(feature, "feature"):
        stored.feature = as_stored(feature.feature)
    return stored


def broken_arrow(path: Path, error: Exception) -> Refused:
    got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    message = f"{path} cannot be read as part of a saved dataset"
    return unreadable(message, "the files that Dataset.save_to_disk wrote, unchanged", got, SAVE_AGAIN)


def saved_json(path: Path) -> JsonObject:
    """Reads a JSON object that lies beside the rows of a saved dataset."""
    try:
        document = foreign_json(path)
    except Refused as refusal:
        raise broken_arrow(path, ValueError(refusal.error["got"])) from None
    if not isinstance(document, dict):
        raise broken_arrow(path, ValueError(f"it holds {KINDS_OF_JSON.get(type(document), 'a value')}, not an object"))
    return document


def check_arrow(folder: Path) -> None:
    """Refuses a folder with too many rows, or with compressed ones, which `datasets` does not write."""
    import pyarrow

    for path in arrow_files(folder):
        size, rows = path.stat().st_size, 0
        try:
            with pyarrow.memory_map(str(path)) as file:
                for message in pyarrow.ipc.MessageReader.open_stream(file):
                    batch = record_batch(message)
                    if batch.get(3):
                        raise too_much(path, size, "an unknown size: its parts are compressed")
                    rows += batch.get(0, 0)
        except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
            raise broken_arrow(path, error) from None
        if rows * VALUE_BYTES > most_in_all(size):
            raise too_much(path, size, f"{rows:,} rows")


def arrow_files(folder: Path) -> Iterator[Path]:
    """The data files that `datasets` will open, whatever their names."""
    saved_json(folder / INFO)
    files = saved_json(folder / STATE).get("_data_files")
    for file in files if isinstance(files, list) else []:
        name = file.get("filename") if isinstance(file, dict) else None
        if isinstance(name, str) and (path := folder / name).exists():  # datasets reports a missing file
            check_regular(path, hint=SAVE_AGAIN)
            yield path


def record_batch(message: Any) -> dict[int, int]:
    """The number of rows (0) of a batch in an Arrow stream, and whether it is compressed (3). pyarrow shows neither
    before it has unpacked the batch. In Arrow's table of FlatBuffers field 2 of a message is the batch."""
    data = message.metadata.to_pybytes()

    def fields(table: int) -> dict[int, int]:
        """The position of each field of a table."""
        places = table - struct.unpack_from("<i", data, table)[0]
        (length,) = struct.unpack_from("<H", data, places)
        offsets = struct.unpack_from(f"<{(length - 4) // 2}H", data, places + 4)
        return {number: table + offset for number, offset in enumerate(offsets) if offset}

    (root,) = struct.unpack_from("<I", data, 0)
    header = fields(root).get(2)
    if message.type == "dictionary" or header is None:
        raise ValueError("it has a dictionary, and datasets writes none")
    if message.type != "record batch":
        return {}
    batch = fields(header + struct.unpack_from("<I", data, header)[0])
    rows = struct.unpack_from("<q", data, batch[0])[0] if 0 in batch else 0
    return {0: max(0, rows), 3: int(3 in batch)}


def iter_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a Parquet file, numbered from 1."""
    import pyarrow.parquet

    number = 0
    try:
        size = path.stat().st_size
        batches = believable(parquet_batches(path, size), path, size)
        rows = (row for batch in batches for row in batch.to_pylist())
        schema = pyarrow.parquet.read_schema(path)
        require_distinct(schema.names, path)
        for row in as_written(rows, schema):
            number += 1
            yield number, row
    except RepeatedKey as error:
        raise repeated_key(f"row {number + 1} of {path}", str(error)) from None
    # Text that is not UTF-8, a year 99999, text that is not JSON.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        message = f"{path} cannot be read as Parquet: {first_line(error)}"
        raise unreadable(message, "a whole Parquet file", hint="download or write the file again") from None


# --- pictures/locations ---
# Where the pictures of rows lie: beside a table of an imagefolder, or beside a file of rows, here or on the Hub.
#
# A file of rows on the Hub is read as the same file in a folder here: it and the pictures that its rows name are
# brought to the cache of huggingface_hub, at one commit. The paths in its rows begin in its folder.

HUB_FOLDER = "datasets--"  # how huggingface_hub begins the name of a dataset's folder in its cache
ROWS_AHEAD, FILES_AT_ONCE = 64, 8  # rows whose pictures are brought together, and requests at the same time
NAME_CHARACTERS = 1024  # a longer text in a row names no file
# The table beside the pictures of a folder, as the `imagefolder` of `datasets` has it: its column `file_name`, or
# another that ends so, names a file beside the table.
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_NAME = re.compile(r"(?:\w+_)?file_names?")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubFile(NamedTuple):
    """A file of rows in a dataset on the Hub."""

    dataset: str
    commit: str
    name: str  # its path in the repository

    def __str__(self) -> str:
        return rows_named(self.dataset, self.name)

    @property
    def root(self) -> Path:
        """The files of this commit in the cache of huggingface_hub."""
        return cache_of(self.dataset) / "snapshots" / self.commit

    @property
    def folder(self) -> Path:
        """Where the paths of its pictures begin."""
        return (self.root / self.name).parent

    def beside(self, text: str) -> str:
        """The path in the repository of the file that a text in a row names, if it names one."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), text))


def hub_file(dataset: str, commit: str | None, name: str) -> HubFile:
    """The file of rows that a recipe names. It needs a commit, and lies in the repository."""
    if commit is None or not COMMIT.fullmatch(commit) or not is_inside(name):
        raise Refused(
            f"{name[:200]} is not a file of a commit of {dataset}",
            code="bad_plan",
            expected="a path in the repository, and the commit as data_revision",
            got=f"data_file {name[:200]}, data_revision {commit}",
            hint="make the plan again: skill-train plan finds the commit",
        )
    return HubFile(dataset, commit, name)


def is_inside(name: str) -> bool:
    """Whether a name is that of a file in a repository, written in the usual way."""
    return name == posixpath.normpath(name) and not name.startswith(("/", "..")) and "\\" not in name and name != "."


def rows_named(data: str, file: str | None) -> str:
    """The rows in words: `rows.jsonl`, or `train.jsonl in owner/name`."""
    return data if file is None else f"{file} in {data}"


def picture_folder(data: str, file: str | None = None, commit: str | None = None) -> Path:
    """The folder where the paths of pictures begin, and which they may not leave: the data itself, if it is a
    folder, or the folder of the data file, with links followed. For data on the Hub it lies in the cache: the folder of
    the file of rows, or of the dataset. `file` and `commit` are `data_file` and `data_revision` of the recipe."""
    path = Path(data)
    if path.exists():
        return path if path.is_dir() else path.resolve().parent
    if file is not None:
        return hub_file(data, commit, file).folder
    return cache_of(data)


def cache_of(dataset: str) -> Path:
    """The folder of a dataset in the cache of huggingface_hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"{HUB_FOLDER}{dataset.replace('/', '--')}"


def hub_cache_of(folder: Path) -> Path | None:
    """The dataset's folder in the cache of huggingface_hub, for a folder in one of its snapshots, whose files are links
    to others in `blobs`. None for a folder of the user."""
    snapshots = (each for each in folder.parents if each.name == "snapshots")
    return next((each.parent for each in snapshots if each.parent.name.startswith(HUB_FOLDER)), None)


# --- A file of rows on the Hub ---

Numbered = TypeVar("Numbered", bound="tuple[Any, ...]")  # a line number, and its row


def with_files(rows: Iterator[Numbered], file: HubFile) -> Iterator[Numbered]:
    """The rows, once the files of the repository that they name lie in the cache. Only a few rows are held at once."""
    while ahead := list(islice(rows, ROWS_AHEAD)):
        texts = {text for each in ahead for _, text in nodes_in(each[1]) if isinstance(text, str)}
        named = {file.beside(text) for text in texts if 0 < len(text) < NAME_CHARACTERS}
        bring_files(file, named & files_at(file) if named else ())
        yield from ahead


@lru_cache(maxsize=1)
def files_at(file: HubFile) -> frozenset[str]:
    """The names of all files in the repository."""
    from huggingface_hub import HfApi

    with explained_hub(file):
        listed = HfApi().list_repo_files(file.dataset, repo_type="dataset", revision=file.commit)
        return frozenset(map(str, listed))


def bring_files(file: HubFile, names: Iterable[str]) -> None:
    """Brings files of the repository to the cache. Those that lie there cost no request."""
    from concurrent.futures import ThreadPoolExecutor  # it loads logging, which a plan does not need

    from huggingface_hub import hf_hub_download

    def bring(name: str) -> None:
        hf_hub_download(file.dataset, name, repo_type="dataset", revision=file.commit)

    missing = [name for name in names if not (file.root / name).is_file()]
    with explained_hub(file), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for _ in pool.map(bring, missing):
            pass


def brought_file(file: HubFile) -> Path:
    """The file of rows in the cache, with the bytes that the Hub announced."""
    bring_files(file, [file.name])
    require_announced(file.root / file.name)
    return file.root / file.name


@contextmanager
def explained_hub(file: HubFile) -> Iterator[None]:
    """Turns what huggingface_hub raises into a `Refused`."""
    try:
        yield
    except Exception as error:
        refusal = hub_refusal(f"{file} at commit {file.commit[:12]}", error)
        if refusal is None:
            raise
        raise refusal from None


@contextmanager
def named_as(path: Path, name: str) -> Iterator[None]:
    """Makes refusals in the block call a file in the cache by the name that the user knows."""
    try:
        yield
    except Refused as refusal:
        rename(refusal, path, name)
        raise


def rename(refusal: Refused, path: Path, name: str) -> None:
    words = refusal.error
    for key in ("message", "expected", "got", "hint"):
        words[key] = words[key].replace(str(path), name)
    refusal.args = (words["message"],)


# --- A folder of pictures with a table ---


def picture_table(folder: Path, split: str) -> Path | None:
    """The table of a folder of pictures: in the folder itself for the split train, or in the subfolder of the split.
    None for another folder. Refuses several tables, because only one of them would be read, silently."""
    name = split.split("[")[0]
    if (folder / STATE).is_file() or (folder / SPLITS).is_file():
        return None
    places = ([folder] if name == "train" else []) + ([folder / name] if is_name_of_folder(name) else [])
    tables = [place / table for place in places for table in TABLES if (place / table).is_file()]
    if len(tables) > 1:
        names = [table.relative_to(folder).as_posix() for table in tables]
        raise unreadable(
            f"{folder} has several tables of pictures for the split {name}",
            f"one of {', '.join(names)}",
            f"{len(names)} tables",
            "remove those that are not meant; the rows of only one would be read",
        )
    return tables[0] if tables else None


def is_name_of_folder(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\:\0]", name)


def in_folder(row: Row, folder: Path, table: Path) -> Row:
    """A row of the table, with its file names relative to the folder. It may not name a picture for `file_name` and
    another for `image`: `datasets` calls both `image`."""
    for name, column in (("file_name", "image"), ("file_names", "images")):
        if row.get(name) and row.get(column) and row[name] != row[column]:
            raise unreadable(
                f"{table} has the columns {name} and {column}, of which one would be read",
                f"one of both: `datasets` calls {name} {column} too",
                f"{name}, {column}",
                "rename or remove one of them in the table",
            )
    below = table.parent.relative_to(folder).as_posix()
    return {name: seen_from(name, value, below, folder) for name, value in row.items()}


def seen_from(column: str, value: Any, below: str, folder: Path) -> Any:
    """A value of the table in the folder `below`, with file names relative to `folder`. A name without a picture's
    ending may be a text: if its file is a picture, it becomes the dictionary that `datasets` makes of every name."""
    if not FILE_NAME.fullmatch(column):
        return value
    if isinstance(value, list):
        return [seen_from(column, each, below, folder) for each in value]
    if not isinstance(value, str) or not value:
        return value
    path = value if below == "." else f"{below}/{value}"
    plain = column in ("file_name", "file_names") and media_in(value) is None and is_picture_file(folder / path)
    return {"bytes": None, "path": path} if plain else path


def is_picture_file(path: Path) -> bool:
    """Whether it is a file that begins as pictures do."""
    try:
        if not path.is_file():  # to open a pipe would wait
            return False
        with open(path, "rb") as file:
            return MEDIA_MAGIC.match(file.read(24)) is not None
    except (OSError, ValueError):  # a name that no file can have
        return False


# --- pictures/decode ---
# How a picture is read: found in a file or a row, checked by its header, decoded, upright, and in RGB.
#
# Pillow decodes each picture once, so training, evaluation and verification see the same pixels.

# Where a row's picture is: the path of a file, a data URI, or its bytes. `datasets` and Parquet write the last two.
PictureSource = str | bytes | dict[str, Any]

PICTURE_BYTES = 100_000_000  # of one file; a photograph has 3 to 20 million
PICTURE_PIXELS = 100_000_000  # decoded, 300 MB; a larger one is a bomb or a map
PICTURE_RATIO = 200  # of the longer side to the shorter one: what Qwen's processor still takes
# What Pillow may open. Some others are not pictures: it gives PostScript to another program to run.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "ICO", "AVIF")
PICTURE_HINT = "repair or remove the row: skill-train data FILE lists all of them"
ADDRESS_HINT = "download the pictures beside the rows and name the files; what is at an address can change or go"
HUB_HINT = (
    "upload the pictures beside one file of rows, name one of several files as data_file in the recipe, or upload the "
    "rows as Parquet with the feature Image of datasets"
)


def require_pillow() -> None:
    if find_spec("PIL") is None:
        raise Refused(
            "Pillow is not installed, and pictures are read with it",
            code="missing_package",
            exit_code=EXIT_NOT_INSTALLED,
            hint='pip install "skill-train[vision]"',
        )


class PictureSize(NamedTuple):
    """Pixels of an upright picture."""

    width: int
    height: int


def read_picture(source: PictureSource, folder: Path | None) -> Any:
    """The picture, upright, as a PIL image in RGB. Transparent pixels become white. Refuses what is no picture, too
    large, too narrow, animated or broken. Paths lie in the `folder` of the dataset; without one they are refused."""
    from PIL import ImageOps

    with opened_picture(source, folder) as (image, _):
        image.load()
        return in_rgb(ImageOps.exif_transpose(image))


def picture_size(source: PictureSource, folder: Path | None) -> PictureSize:
    """Its size once it is upright, from the header of the file. The pixels are not decoded, so they may be broken."""
    with opened_picture(source, folder) as (image, _):
        return upright_size(image)


def upright_size(image: Any) -> PictureSize:
    """The size of a PIL image once it is upright."""
    width, height = image.size
    on_its_side = orientation(image) in (5, 6, 7, 8)
    return PictureSize(height, width) if on_its_side else PictureSize(width, height)


def orientation(image: Any) -> int:
    """The orientation that EXIF says, from 1 (upright) to 8. EXIF behind the pixels of a PNG file does not count:
    Pillow's own method would decode the file to find it."""
    from PIL import Image

    value = Image.Image.getexif(image).get(0x0112)
    return value if isinstance(value, int) else 1


def picture_digest(source: PictureSource, folder: Path | None) -> str:
    """The SHA-256 of the file, in hexadecimal digits."""
    return hashlib.sha256(picture_bytes(source, folder)).hexdigest()


def picture_path(source: PictureSource) -> str | None:
    """The path that a row names; None where the row holds the picture itself."""
    if isinstance(source, dict):
        source = source["path"] if source.get("bytes") is None and isinstance(source.get("path"), str) else b""
    return source if isinstance(source, str) and source[:5].lower() != "data:" else None


class PicturesDigest:
    """The digest of the pictures of a dataset, in the order of its rows. The file of the rows may only name them."""

    def __init__(self, folder: Path | None, digests: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.digests = digests or {}  # of files that need not be read again, by the paths in the rows
        self.digest = hashlib.sha256()
        self.count = 0

    def add(self, sources: list[PictureSource]) -> None:
        self.count += len(sources)
        for source in sources:
            digest = self.digests.get(picture_path(source) or "")
            self.digest.update(bytes.fromhex(digest or picture_digest(source, self.folder)))

    def with_rows(self, fingerprint: str) -> str:
        """The fingerprint of the rows and their pictures; that of the rows where they have none."""
        both = f"{fingerprint} {self.digest.hexdigest()}"
        return hashlib.sha256(both.encode()).hexdigest() if self.count else fingerprint


@contextmanager
def opened_picture(source: PictureSource, folder: Path | None) -> Iterator[tuple[Any, int]]:
    """The lazily opened PIL image, once its header is checked, and the size of its file. Any error of Pillow in the
    block is a refusal: damaged files raise struct.error, IndexError and more."""
    from PIL import Image

    name = picture_name(source)
    with picture_file(source, folder) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            with warnings.catch_warnings():
                # Our own limit is below that of Pillow's error, and a cut EXIF leaves the picture as it is.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                warnings.simplefilter("ignore", UserWarning)
                Image.init()
                image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
                check_header(image, name)
                orientation(image)  # Pillow remembers it for exif_transpose
            yield image, size
        except Exception as error:
            if isinstance(error, (Refused, ImportError)):
                raise
            raise unread_picture(name, file, error) from None


def unread_picture(name: str, file: IO[bytes], error: Exception) -> Refused:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        file.seek(0)
        return bad_picture(name, "is not a picture", f"{file.read(12)!r} at its start")
    if isinstance(error, Image.DecompressionBombError):
        return bad_picture(name, "has too many pixels", str(error))
    return bad_picture(name, "is broken", f"{type(error).__name__}: {error}")


def check_header(image: Any, name: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise bad_picture(name, "has no pixels", f"{width} x {height}")
    if width * height > PICTURE_PIXELS:
        raise bad_picture(name, "has too many pixels", f"{width} x {height}", f"at most {PICTURE_PIXELS:,} pixels")
    if max(width, height) > PICTURE_RATIO * min(width, height):
        expected = f"a longer side of at most {PICTURE_RATIO} times the shorter one"
        raise bad_picture(name, "is too narrow", f"{width} x {height}", expected)
    if image.mode in ("I", "F"):
        raise bad_picture(name, f"has the colour mode {image.mode}", "numbers without a range", "8 or 16 bits a colour")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # MPO is a JPEG of a telephone, with a second view behind it
        raise bad_picture(name, "is animated or has several pages", f"{frames} frames", "one still picture a file")


def in_rgb(image: Any) -> Any:
    """RGB from any mode of Pillow: 16-bit grey is scaled, and transparent pixels get white behind them."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture)
        return white.convert("RGB")
    return image.convert("RGB")


def picture_name(source: PictureSource) -> str:
    if isinstance(source, dict):
        return str(source.get("path") or "a picture in the row")[:200]
    return "a picture in the row" if isinstance(source, bytes) or source[:5].lower() == "data:" else source[:200]


def picture_bytes(source: PictureSource, folder: Path | None) -> bytes:
    """The content of the file, which must not be too large."""
    with picture_file(source, folder) as file:
        return file.read()


def picture_file(source: PictureSource, folder: Path | None) -> IO[bytes]:
    """The picture's file, opened and not read yet, or the bytes in the row as such a file."""
    if isinstance(source, dict):
        content = source.get("bytes")
        if content is None and isinstance(source.get("path"), str):
            return picture_file(source["path"], folder)
        if not isinstance(content, bytes):
            got = repr({key: type(value).__name__ for key, value in source.items()})
            raise bad_picture("a picture in the row", "has neither bytes nor a path", got, "a path, or bytes")
        source = content
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = data_uri(source)
    if isinstance(source, str):
        return opened_file(source, folder)
    require_size(len(source), "a picture in the row")
    return io.BytesIO(source)


def require_size(size: int, name: str) -> None:
    if not size:
        raise bad_picture(name, "is empty", "0 bytes")
    if size > PICTURE_BYTES:
        raise bad_picture(name, "is too large", f"{size:,} bytes", f"at most {PICTURE_BYTES:,} bytes")


def data_uri(source: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad_picture("a data URI", "is not base64", head[:60], "data:image/png;base64,…")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_picture("a data URI", "is not base64", str(error), "data:image/png;base64,…") from None


def opened_file(path: str, folder: Path | None) -> IO[bytes]:
    """A file in the folder of the dataset. A dataset from elsewhere must not name the user's own files."""
    name = path[:200]
    try:
        file, where = placed_file(path, folder)
        if not file.is_file():
            raise bad_picture(name, "does not exist", str(file), where)
        require_size(file.stat().st_size, name)
        return open(file, "rb")
    except (OSError, ValueError, RuntimeError) as error:  # no permission; a null character; a link to itself
        raise bad_picture(name, "cannot be read", str(error)) from None


def placed_file(path: str, folder: Path | None) -> tuple[Path, str]:
    """The file that a row names, which need not exist, and in words where it must lie. Refuses an address, and a file
    outside the folder of the data."""
    name = path[:200]
    if "://" in path:
        expected = "a file beside the data, or the bytes of the picture in the row"
        raise bad_picture(name, "is an address", path, expected, ADDRESS_HINT)
    if folder is None or (folder.name.startswith(HUB_FOLDER) and not os.path.isabs(path)):
        expected = "bytes in the rows, a metadata.jsonl whose column file_name names files, or files beside one file"
        raise bad_picture(name, "has no folder", "a path in data from the Hub", f"{expected} of rows", HUB_HINT)
    if not path.strip():
        raise bad_picture("the name of a picture", "is empty", repr(path[:60]))
    cache = hub_cache_of(folder)
    root = folder.resolve() if cache is None else Path(os.path.abspath(folder))
    where = f"a file in {root}" if cache is None else "a file beside the rows in the dataset on the Hub, or below them"
    # The files in the cache of huggingface_hub are links to others, so a path there is judged as it is written.
    file = (root / path).resolve() if cache is None else Path(os.path.normpath(root / path))
    if not file.is_relative_to(root) or not (cache is None or file.resolve().is_relative_to(cache.resolve())):
        raise bad_picture(name, "lies outside the folder of the data", str(file) if cache is None else path, where)
    return file, where


def bad_picture(
    name: str, fault: str, got: str, expected: str = "a still picture, such as PNG or JPEG", hint: str = PICTURE_HINT
) -> Refused:
    return Refused(f"{name} {fault}", code="bad_picture", expected=expected, got=got[:200], hint=hint)


# --- pictures/in_rows ---
# Where a row has its pictures, and where they stand in its texts.

PICTURE = "\ufffc"  # U+FFFC, object replacement character: stands for a picture in the text of a message
PICTURE_TAG = re.compile(r"\n?<image>\n?", re.IGNORECASE)  # LLaVA writes it on a line of its own
PART_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")  # keys of a part that may hold its picture
PICTURE_PARTS = ("image", "image_url", "input_image")  # types of parts; the last two are OpenAI's


def lift_pictures(row: Row, columns: dict[str, str]) -> tuple[Row, list[PictureSource]]:
    """The row with `PICTURE` in its texts where a picture stands, and the pictures in that order.

    A picture stands in a message as a part of its content, or as the tag `<image>` whose picture is the next one of the
    column `images`. Pictures of a row without any such place come before the first question. Answers must have none.
    """
    column = columns.get("images")
    column_pictures = pictures_of_column(row.get(column)) if column is not None else []
    waiting, pictures = list(column_pictures), list[PictureSource]()
    texts = {name: row[place] for name, place in columns.items() if name != "images" and place in row}
    texts |= {name: turns_of(texts[name], name) for name in ("messages", "conversations") if name in texts}
    lifted = dict[str, Any]()
    for name, value in texts.items():
        before = len(pictures)
        lifted[columns[name]] = lifted_value(value, waiting, pictures)
        if name in ANSWERS and len(pictures) > before:
            raise picture_in_answer(value)
    if column_pictures and len(waiting) == len(column_pictures):
        lifted = before_first_question(lifted, columns, len(column_pictures))
        waiting, pictures = [], column_pictures
    if waiting:
        raise bad_row(
            "a row has more pictures than places for them",
            f"{len(column_pictures)} times <image> in its texts, or none, for {len(column_pictures)} pictures",
            f"{len(column_pictures) - len(waiting)} places",
            "write <image> where each picture stands, or nothing: they come before the question then",
        )
    for value in lifted.values():
        require_no_tag(value, has_pictures=bool(pictures))
    return {name: value for name, value in row.items() if name != column} | lifted, pictures


def require_no_tag(value: Any, *, has_pictures: bool) -> None:
    """Refuses a tag `<image>` for which no picture was left. A text of a row without pictures may be about the tag."""
    if isinstance(value, list):
        for message in value:
            for key in ("content", "value"):
                require_no_tag(message.get(key) if isinstance(message, dict) else None, has_pictures=has_pictures)
    elif isinstance(value, str) and (tag := PICTURE_TAG.search(value)) and (has_pictures or media_mark(value)):
        expected = "a picture for each <image>, in a column such as `images`"
        raise bad_row("a row has more places for pictures than pictures", expected, value[max(0, tag.start() - 20) :])


def pictures_of_column(value: Any) -> list[PictureSource]:
    """The pictures of a cell: one, a list of them, or none."""
    values = value if isinstance(value, list) else [] if value in (None, "") else [value]
    for each in values:
        if not isinstance(each, (str, bytes, dict)):
            raise Refused(
                "a row has something else in place of a picture",
                code="bad_picture",
                expected="the path of a file, a data URI, or bytes",
                got=repr(each)[:80],
                hint=PICTURE_HINT,
            )
    return values


def lifted_value(value: Any, waiting: list[PictureSource], pictures: list[PictureSource]) -> Any:
    """A text or messages with `PICTURE` for each picture. Adds the pictures to `pictures`; tags use up `waiting`."""
    if isinstance(value, str):
        return lifted_text(value, waiting, pictures)
    if not isinstance(value, list):
        return value
    return [lifted_message(message, waiting, pictures) if isinstance(message, dict) else message for message in value]


def lifted_message(message: dict[str, Any], waiting: list[PictureSource], pictures: list[PictureSource]) -> Any:
    before = len(pictures)
    lifted = dict(message)
    for key in ("content", "value"):  # `value` is ShareGPT's
        content = message.get(key)
        if isinstance(content, str):
            lifted[key] = lifted_text(content, waiting, pictures)
        elif isinstance(content, list):
            lifted[key] = "".join(lifted_part(part, waiting, pictures) for part in content)
    if len(pictures) > before and "assistant" in (message.get("role"), speaker_of(message)):
        raise picture_in_answer(message)
    return lifted


def picture_in_answer(answer: Any) -> Refused:
    return bad_row("an answer holds a picture", "text in answers", repr(answer))


def lifted_text(text: str, waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    if PICTURE in text:
        raise bad_row("a text holds the character U+FFFC, which stands for a picture here", "text without it", text)
    return PICTURE_TAG.sub(lambda tag: next_picture(waiting, pictures) or tag.group(), text)


def next_picture(waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    """The mark of the next picture of the column. Empty where none is left, and the tag stays: it is refused later."""
    if not waiting:
        return ""
    pictures.append(waiting.pop(0))
    return PICTURE


def lifted_part(part: Any, waiting: list[PictureSource], pictures: list[PictureSource]) -> str:
    """The text of one part of a message's content, or the mark of its picture."""
    kind = part.get("type") if isinstance(part, dict) else None
    require_one_thing(part, kind)
    text = part.get("text") if isinstance(part, dict) else None
    if (kind is None or kind == "text") and isinstance(text, str):
        return lifted_text(text, waiting, pictures)
    if kind == "text" and text is None:
        return ""
    if kind not in PICTURE_PARTS:
        expected = '{"type": "text"} or {"type": "image"}'
        raise bad_row("a message holds a part that is neither text nor a picture", expected, repr(part))
    source = source_of_part(part)
    if source is None:
        if not waiting:
            wrong = "a message holds a place for a picture, and the row has no picture for it"
            raise bad_row(wrong, "the picture in the part, or in a column `images`", repr(part))
        return next_picture(waiting, pictures)
    pictures.append(source)
    return PICTURE


def require_one_thing(part: Any, kind: Any) -> None:
    """Refuses a part that holds more than its type says, which would be dropped silently. Arrow adds nulls."""
    other = part.get("text") if kind in PICTURE_PARTS else source_of_part(part) if kind == "text" else None
    if other:
        wrong = f"a part of the type {kind!r} holds a text and a picture, but only one of them would be read"
        expected = '{"type": "text", "text": …} and {"type": "image", "image": …}, each alone'
        raise bad_row(wrong, expected, repr(part))


def source_of_part(part: dict[str, Any]) -> PictureSource | None:
    """Where the picture of a part is; None where the part only marks its place."""
    cells = (part.get(key) for key in PART_KEYS)
    values = [each.get("url") if isinstance(each, dict) and "url" in each else each for each in cells]
    sources = [each for each in values if any(each.values() if isinstance(each, dict) else [each])]  # Arrow adds nulls
    if isinstance(part.get("bytes"), bytes) and len(sources) == 2 and isinstance(part.get("path"), str):
        return {"bytes": part["bytes"], "path": part["path"]}  # a name beside the bytes, as `datasets` writes them
    if len(sources) > 1 and len({which_picture(each) for each in sources}) > 1:
        there = ", ".join(key for key in PART_KEYS if part.get(key))
        wrong = "a part of a message holds several pictures, but only one of them would be read"
        raise bad_row(wrong, "one of " + ", ".join(PART_KEYS), there)
    value = sources[0] if sources else None
    return value if isinstance(value, (str, bytes, dict)) else None


def which_picture(value: Any) -> str:
    """A text that is equal for two ways to name one picture: its path, and its bytes with the path."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("bytes")
    return posixpath.normpath(value) if isinstance(value, str) else repr(value)


def before_first_question(lifted: Row, columns: dict[str, str], count: int) -> Row:
    """The texts with all pictures before the first message of the user, or before the question."""
    for name in ("messages", "conversations", "prompt", "question", "instruction"):
        value: Any = lifted.get(columns.get(name, ""))
        if isinstance(value, str):
            return lifted | {columns[name]: PICTURE * count + value}
        for index, message in enumerate(value if isinstance(value, list) else []):
            if isinstance(message, dict) and "user" in (message.get("role"), speaker_of(message)):
                key = "content" if "content" in message else "value"
                changed = message | {key: PICTURE * count + str(message.get(key) or "")}
                return lifted | {columns[name]: [*value[:index], changed, *value[index + 1 :]]}
    raise bad_row("a row has pictures and no question", "a message of the user", "none")


def picture_parts(content: str) -> list[dict[str, str]]:
    """The content of a message as the parts that a chat template reads."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def require_places(example: Example, pictures: int) -> None:
    """Refuses an example that is no chat, or that has more or fewer places for pictures than the row has pictures."""
    if example["kind"] != "chat":
        expected = "format messages, sharegpt, question_answer or instruction"
        raise bad_row("rows with pictures need turns of a chat", expected, f"format {example['kind']}")
    places = sum(str(message["content"]).count(PICTURE) for message in example["messages"])
    if places != pictures:
        raise bad_row("a row's pictures do not stand in its messages", f"{pictures} places", f"{places}")


# The name of a column beside the pictures that only says which picture it is, or how large.
NAMES_PICTURE = re.compile(
    r"(?:\w+_)?(?:id|name|filename|file|path|url|uri|link|key|index|width|height|size)s?", re.IGNORECASE
)


def tells_which_picture(column: str, value: Any) -> bool:
    """Whether a column beside the pictures only names them: `image_id`, `coco_url`, `width`."""
    return isinstance(value, (str, int, float)) and NAMES_PICTURE.fullmatch(column) is not None


def media_beside(row: Row, columns: dict[str, str], *, pictures: bool = False) -> str | None:
    """The first column that is not read and contains images, audio or video; None if there is none. With `pictures`,
    columns that only name the pictures of the format's own column are allowed."""
    read = set(columns.values())
    beside = ((name, value) for name, value in row.items() if name not in read)
    if pictures and "images" in columns:
        beside = ((name, value) for name, value in beside if not tells_which_picture(name, value))
    return next((name for name, value in beside if is_media(name, value)), None)


# --- pictures/parts ---
# Which part of a vision model a module belongs to, by its name.

# Where the modules of transformers lie: Qwen has the projector, which it calls merger, in the tower.
PROJECTOR = re.compile(r"(?:^|\.)(?:visual\.(?:merger|deepstack_merger_list)|multi_modal_projector|connector)(?:\.|$)")
TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model)(?:\.|$)")


def vision_part(module: str) -> str:
    """The part of a vision model that a module belongs to: `language`, `projector` or `tower`."""
    return "projector" if PROJECTOR.search(module) else "tower" if TOWER.search(module) else "language"


# --- pictures/engine ---
# A picture as llama.cpp feeds it to the tower: resized, padded and divided as its server does it.
#
# Follows tools/mtmd of the llama.cpp in llama-cpp-python 0.3.36 (mtmd-image.cpp, clip.cpp, mtmd.cpp; read 2026-11-26).
# It resamples with Pillow's own algorithm, in the same whole numbers, so Pillow does it here. Tests compare the tensors
# with those that llama.cpp computes.

TILED = ("smolvlm", "idefics3")  # families that divide a picture into tiles
LINED = ("mistral3", "llava")  # those with a token at the end of each line of a picture; Llava with Pixtral's tower
ENGINE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", *TILED, *LINED)  # their tensors are llama.cpp's own
ENGINE_LIMITS = dict.fromkeys(TILED, ("max_pixels",))  # limits of a recipe that a projector's file carries to llama.cpp
ENGINE_VERSION = "0.3.36"  # of llama-cpp-python
ENGINE_TOKENS = (8, 4096)  # least and most tokens of a picture of Qwen-VL, whatever the model's own limits are
LINED_TOKENS = (8, 1024)  # the same for Pixtral and Mistral 3, without the ends of lines
PADDING = (0, 0, 0)
ENGINE_NOTE = (
    "It was trained on the pixels and the text that llama.cpp makes of a picture (`preprocess: engine`). The model's "
    "own image processor, as transformers runs it, makes other ones."
)  # for the card


def ignored_limit(recipe: Mapping[str, object], kind: str) -> str | None:
    """The limit of a recipe that llama.cpp ignores for the family; None without one."""
    ignored = (name for name in ("min_pixels", "max_pixels") if name not in ENGINE_LIMITS.get(kind, ()))
    return next((name for name in ignored if recipe.get(name) is not None), None)


def require_engine(recipe: Mapping[str, object], kind: str) -> None:
    """Refuses `preprocess: engine` where the training could not see what llama.cpp would: for families whose tensors
    were not found equal, and with limits that llama.cpp ignores."""
    if kind not in ENGINE_FAMILIES:
        raise Refused(
            f"preprocess: engine is not known for the family {kind}",
            code="bad_recipe",
            expected=", ".join(ENGINE_FAMILIES),
            got=kind,
            hint="set preprocess: model, or remove preprocess",
        )
    limit = ignored_limit(recipe, kind)
    if limit is not None:
        raise Refused(
            f"{limit} and preprocess: engine cannot be used together: llama.cpp ignores the limit",
            code="bad_recipe",
            expected="one of the two",
            got=f"{limit}: {recipe.get(limit)}",
            hint="remove the limit and make the pictures smaller, or set preprocess: model",
        )


class TileGrid(NamedTuple):
    """How many rows and columns of tiles or tokens a picture has."""

    rows: int
    columns: int


class Engine:
    """llama.cpp's way to prepare pictures for one model. Its lengths are in pixels."""

    def __init__(self, processor: Any) -> None:
        """`processor` is an `ImageProcessor`."""
        self.kind, self.processor = processor.kind, processor
        self.patch, self.merge = processor.patch_size, processor.merge_size  # patches along a token
        self.square = processor.square or self.patch * self.merge  # of one token (Qwen-VL, Pixtral, Mistral 3)
        # The square that the tower reads: a whole picture (Gemma 3), or a tile (SmolVLM, Idefics3).
        own = {"gemma3": ("size", "height"), **dict.fromkeys(TILED, ("max_image_size", "longest_edge"))}.get(self.kind)
        self.side: int = processor.tower_side or getattr(processor, own[0])[own[1]] if own else 0
        # The longer side of a picture that is divided.
        self.longest = processor.size["longest_edge"] if self.kind in TILED else 0

    def size(self, size: PictureSize) -> PictureSize:
        """The size of a picture after all resizing; the size of all tiles together if it is divided."""
        if self.kind == "gemma3":
            return PictureSize(self.side, self.side)
        if self.kind in TILED:
            rows, columns = self.grid(size)
            return PictureSize(columns * self.side, rows * self.side)
        least, most = LINED_TOKENS if self.kind in LINED else ENGINE_TOKENS
        return aligned_size(size, self.square, (least * self.square**2, most * self.square**2))

    def grid(self, size: PictureSize) -> TileGrid:
        """The tokens of a picture of Qwen-VL, Pixtral or Mistral 3, or the tiles of a picture of SmolVLM or Idefics3:
        at least one tile, although the model's own processor does not divide small pictures."""
        if self.kind not in TILED:
            resized = self.size(size)
            return TileGrid(resized.height // self.square, resized.width // self.square)
        reduced = reduced_size(size, self.longest)
        return TileGrid(math.ceil(reduced.height / self.side), math.ceil(reduced.width / self.side))

    def parts(self, image: Any) -> list[Any]:
        """The PIL images in RGB that the tower reads: the picture, or its tiles and a small copy of it."""
        from PIL.Image import Resampling

        size = PictureSize(*image.size)
        if self.kind not in TILED:
            kernel = Resampling.BILINEAR if self.kind == "gemma3" else Resampling.BICUBIC
            return [letterboxed(image, self.size(size), kernel)]
        reduced = resampled(image, reduced_size(size, self.longest), Resampling.LANCZOS)
        whole = resampled(reduced, self.size(size), Resampling.LANCZOS)
        corners = [(x, y) for y in range(0, whole.height, self.side) for x in range(0, whole.width, self.side)]
        tiles = [whole.crop((x, y, x + self.side, y + self.side)) for x, y in corners]
        return [*tiles, resampled(whole, PictureSize(self.side, self.side), Resampling.LANCZOS)]

    def pixels(self, part: Any) -> Any:
        """The numbers that the tower reads of a part, float32 [3, height, width]."""
        import numpy as np

        mean, std = (np.array(getattr(self.processor, name), dtype=np.float32) for name in ("image_mean", "image_std"))
        whole = np.asarray(part).astype(np.float32) / np.float32(255)
        return ((whole - mean) / std).transpose(2, 0, 1)

    def tensors(self, rows: list[list[Any]]) -> dict[str, Any]:
        """The tensors of the pictures of each row, in the layout of the model's own processor."""
        import numpy as np
        import torch

        parts = [[self.pixels(part) for image in row for part in self.parts(image)] for row in rows]
        every = [part for row in parts for part in row]
        if self.kind == "gemma3":
            return {"pixel_values": torch.from_numpy(np.stack(every))}
        if self.kind in TILED:
            shape = (len(parts), max(map(len, parts)))
            values = np.zeros((*shape, 3, self.side, self.side), dtype=np.float32)
            mask = np.zeros((*shape, self.side, self.side), dtype=np.int64)
            for place, row in enumerate(parts):
                if row:
                    values[place, : len(row)], mask[place, : len(row)] = np.stack(row), 1
            return {"pixel_values": torch.from_numpy(values), "pixel_attention_mask": torch.from_numpy(mask)}
        if self.kind in LINED:
            return self.padded(every)
        grids = [[1, part.shape[1] // self.patch, part.shape[2] // self.patch] for part in every]
        patches = np.concatenate([self.patches(part) for part in every])
        return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(grids)}

    def padded(self, parts: list[Any]) -> dict[str, Any]:
        """The tensors of Pixtral and Mistral 3: each picture in the top left corner of a plane of one common size."""
        import numpy as np
        import torch

        sizes = [part.shape[1:] for part in parts]
        values = np.zeros((len(parts), 3, *map(max, zip(*sizes, strict=True))), dtype=np.float32)
        for place, (part, (height, width)) in enumerate(zip(parts, sizes, strict=True)):
            values[place, :, :height, :width] = part
        return {"pixel_values": torch.from_numpy(values), "image_sizes": torch.tensor(sizes)}

    def patches(self, pixels: Any) -> Any:
        """The patches of a picture of Qwen-VL, grouped by token. Each patch is repeated as the equal frames of a film.
        [3, height, width] -> [patches, numbers]"""
        import numpy as np

        size, merge, frames = self.patch, self.merge, int(self.processor.temporal_patch_size)
        high, wide = (side // size // merge for side in pixels.shape[1:])
        grid = pixels.reshape(3, high, merge, size, wide, merge, size).transpose(1, 4, 2, 5, 0, 3, 6)
        films = np.broadcast_to(grid[:, :, :, :, :, None], (*grid.shape[:5], frames, size, size))
        return films.reshape(high * wide * merge**2, -1)


def reduced_size(size: PictureSize, longest: int) -> PictureSize:
    """The size before both sides become whole tiles: the longer side is `longest`, the other one an even number."""
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return PictureSize(longest, height + height % 2)
    width = int(longest * ratio)
    return PictureSize(width + width % 2, longest)


def aligned_size(size: PictureSize, align: int, limits: tuple[int, int]) -> PictureSize:
    """The size with both sides a multiple of `align`, about in the shape of the picture, and its pixels within the
    limits. As llama.cpp computes it: in single precision, which changes some sides, and with halves rounded up."""
    least, most = limits

    def squares(side: float) -> float:
        return single(single(side) / align)

    width, height = (max(align, math.floor(squares(side) + 0.5) * align) for side in size)
    if width * height > most:
        shrink = single(math.sqrt(single(single(size.height * size.width) / most)))
        width, height = (max(align, math.floor(squares(side / shrink)) * align) for side in size)
    elif width * height < least:
        grow = single(math.sqrt(single(least / single(size.height * size.width))))
        width, height = (math.ceil(squares(side * grow)) * align for side in size)
    return PictureSize(width, height)


def single(number: float) -> float:
    """The nearest number in single precision. An operation in double precision, rounded so, equals one in single."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def letterboxed(image: Any, target: PictureSize, kernel: Any) -> Any:
    """The picture in its own shape, as large as it fits, centred on black; unchanged if it has the target size."""
    from PIL import Image

    if image.size == target:
        return image
    scale = min(single(target.width / image.width), single(target.height / image.height))
    width = min(math.ceil(single(image.width * scale)), target.width)
    height = min(math.ceil(single(image.height * scale)), target.height)
    inner = resampled(image, PictureSize(width, height), kernel)
    whole = Image.new("RGB", target, PADDING)
    whole.paste(inner, ((target.width - width) // 2, (target.height - height) // 2))
    return whole


def resampled(image: Any, size: PictureSize, kernel: Any) -> Any:
    """Along the lines first, then along the columns. Pillow 13 by itself begins with the columns of some pictures, and
    some pixels are one level off then."""
    return image.resize((size.width, image.height), kernel).resize(size, kernel)


# --- pictures/processor ---
# The image processor that a model's files describe, and the number of tokens of a picture, by arithmetic alone.
#
# Nothing is loaded for it, so a plan counts tokens without transformers. The arithmetic follows the image processors of
# transformers 5.23 in their Pillow version, and a test compares it with them over many sizes.

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
OWN_FILE, WHOLE_FILE = PROCESSOR_FILES
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_QWEN = _CLIP | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_TILES = _HALF | {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
# Defaults of the processor classes, for settings that a file leaves out. A null counts as set, except Qwen's `size`.
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": _HALF | {"size": {"height": 224, "width": 224}},
    "smolvlm": _TILES,
    "idefics3": _TILES,
    **dict.fromkeys(LINED, _CLIP | {"size": {"longest_edge": 1024}}),  # Llava is last: messages add which tower it has
}
# The classes of each family's image processors, without the endings Fast and Pil. The first files of Qwen2.5-VL name
# its second class, which transformers does not know: it uses the class of the family then.
_CLASSES = {
    "qwen2_vl": ("Qwen2VLImageProcessor",),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
    "qwen3_vl": ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor"),
    "gemma3": ("Gemma3ImageProcessor",),
    "smolvlm": ("SmolVLMImageProcessor", "Idefics3ImageProcessor"),
    "idefics3": ("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    "mistral3": ("PixtralImageProcessor", "Mistral3ImageProcessor"),
    "llava": ("PixtralImageProcessor",),
}
_NUMBERS = ("patch_size", "merge_size", "temporal_patch_size")
_TILED_SIDE = 4096  # MAX_IMAGE_SIZE of SmolVLM's and Idefics3's processors: the longest side that is divided


@dataclass
class ImageProcessor:
    """The settings of a model's image processor, by the names that transformers gives them. A family without a setting
    has the value below."""

    kind: str  # the model type in config.json
    size: dict[str, int]  # of Qwen-VL the least and the most pixels, under its names `shortest_edge`, `longest_edge`
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    patch_size: int = 1
    merge_size: int = 1
    temporal_patch_size: int = 1
    max_image_size: dict[str, int] | None = None  # the side of a tile (SmolVLM, Idefics3)
    do_image_splitting: bool = False
    count: int = 0  # tokens of a picture (Gemma 3) or of a tile (SmolVLM, Idefics3)
    square: int = 0  # pixels along the square of patches that one token stands for (Mistral 3, Pixtral)
    tower_side: int | None = None  # `image_size` in config.json, where llama.cpp's converter finds a picture's side


class PictureTokens(NamedTuple):
    """How many tokens the language model reads for a picture."""

    parts: int  # tokens that stand for parts of it
    around: int  # tokens that are written around them: marks, and ends of lines
    read: int = 1  # pictures that the tower reads one by one: the picture, or its tiles and a small copy of it


def read_processor(config: Mapping[str, Any], files: Mapping[str, Any]) -> ImageProcessor:
    """The image processor of a model of `PROCESSOR_DEFAULTS`, from its config.json and those of `PROCESSOR_FILES` that
    it has, by name."""
    kind, whole = str(config.get("model_type")), _object(files.get(WHOLE_FILE))
    nested = whole.get("image_processor")
    own = nested if nested is not None else files.get(OWN_FILE)
    if not isinstance(own, Mapping):
        raise _unknown(OWN_FILE, "no such file" if own is None else repr(own)[:80])
    _require_family(kind, own)
    defaults = PROCESSOR_DEFAULTS[kind]
    values = defaults | {name: own[name] for name in defaults if name in own}
    size = _object(values["size"])
    if kind.startswith("qwen"):
        earlier = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of earlier files; they win
        size = dict(defaults["size"]) if values["size"] is None else size
        size |= {name: own[key] for key, name in earlier.items() if own.get(key) is not None}
    sides = ("shortest_edge", "longest_edge") if kind.startswith("qwen") else ("longest_edge",)
    for name in ("height", "width") if kind == "gemma3" else sides:
        _positive(size, name, "size")
    if kind in TILED:
        _positive(_object(values["max_image_size"]), "longest_edge", "max_image_size")
    for name in _NUMBERS:
        if name in values:
            _positive(values, name, OWN_FILE)
    tower = _object(config.get("vision_config")).get("image_size")
    processor = ImageProcessor(
        kind=kind,
        size=size,
        **{name: values[name] for name in (*_NUMBERS, "max_image_size") if name in values},
        do_image_splitting=bool(values.get("do_image_splitting")),
        image_mean=_colours(values["image_mean"]),
        image_std=_colours(values["image_std"]),
        count=_count(kind, whole),
        square=_square(whole) if kind in LINED else 0,
        tower_side=tower if isinstance(tower, int) and tower > 0 else None,
    )
    _require_agreement(config, processor)
    return processor


def _require_agreement(config: Mapping[str, Any], processor: ImageProcessor) -> None:
    """Refuses files that disagree about the tokens of a picture: the model would expect another number than the text
    has. Values that config.json leaves out are not compared."""
    kind, vision = processor.kind, _object(config.get("vision_config"))
    patch, scale = vision.get("patch_size"), config.get("scale_factor")
    compared: list[tuple[str, int, list[Any]]] = []
    if kind.startswith("qwen"):
        stated = (("patch_size", patch), ("merge_size", vision.get("spatial_merge_size")))
        compared = [(name, getattr(processor, name), [value]) for name, value in stated]
    elif kind == "gemma3":
        compared = [("image_seq_length", processor.count, [config.get("mm_tokens_per_image")])]
    elif kind in LINED and isinstance(patch, int):
        merged = 1 if kind == "llava" else config.get("spatial_merge_size")
        compared = [("patch_size with spatial_merge_size", processor.square, [merged and patch * merged])]
    elif kind in TILED and isinstance(patch, int) and isinstance(scale, int) and min(patch, scale) > 0:
        sides = (_object(processor.max_image_size).get("longest_edge"), processor.tower_side)
        counts = [(side // patch // scale) ** 2 for side in sides if side]
        compared = [("image_seq_len", processor.count, counts)]
    for name, value, right in compared:
        if value not in right and None not in right:
            raise Refused(
                f"the files of the model disagree about the tokens of a picture: {name} of its processor is {value}, "
                f"and config.json makes it {right[0]}",
                code="not_a_model",
                expected=str(right[0]),
                got=f"{name}: {value}",
                hint=f"download the whole model, or copy {OWN_FILE} and {WHOLE_FILE} from its base model",
            )


def _require_family(kind: str, own: Mapping[str, Any]) -> None:
    """Refuses a processor of another class, and steps that this arithmetic leaves out."""
    name = own.get("image_processor_type")
    if name is not None and str(name).removesuffix("Fast").removesuffix("Pil") not in _CLASSES.get(kind, ()):
        raise _unknown(f"image_processor_type of {kind}", repr(name)[:80], " or ".join(_CLASSES.get(kind, ("none",))))
    usual_steps = {"do_resize": True, "do_rescale": True, "do_normalize": True}
    for step, usual in (usual_steps | {"do_pan_and_scan": False, "do_center_crop": False}).items():
        value = own.get(step)
        if value is not None and bool(value) is not usual:
            raise _unknown(step, repr(value)[:80], str(usual).lower())
    factor = own.get("rescale_factor")
    if factor is not None and not (isinstance(factor, (int, float)) and math.isclose(255 * factor, 1, rel_tol=1e-4)):
        raise _unknown("rescale_factor", repr(factor)[:80], "1/255")


def _object(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _positive(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unknown(f"{name} of {where}", repr(value)[:80], "a whole number above 0")
    return value


def _square(whole: dict[str, Any]) -> int:
    side = _positive({"patch_size": 16} | whole, "patch_size", WHOLE_FILE)
    return side * _positive({"spatial_merge_size": 1} | whole, "spatial_merge_size", WHOLE_FILE)


def _count(kind: str, whole: dict[str, Any]) -> int:
    names = {"gemma3": ("image_seq_length", 256), "smolvlm": ("image_seq_len", 169), "idefics3": ("image_seq_len", 169)}
    if kind not in names:
        return 0
    name, default = names[kind]
    return _positive({name: default} | whole, name, WHOLE_FILE)


def _colours(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, (int, float)) for each in value):
        raise _unknown("image_mean or image_std", repr(value)[:80], "three numbers")
    return tuple(float(each) for each in value)


def _unknown(what: str, got: str, expected: str = "the file of an image processor") -> Refused:
    return Refused(
        f"how this model prepares a picture is not known: {what} is {got}",
        code="not_a_model",
        expected=expected,
        got=got,
        hint="download the whole model, or copy preprocessor_config.json from its base model",
    )


def grid_of(processor: ImageProcessor, size: PictureSize, engine: Engine | None = None) -> TileGrid:
    """How a picture is divided: into tokens (Qwen-VL, Mistral 3, Pixtral) or tiles (SmolVLM, Idefics3; 0 x 0 of a
    picture that is not divided). Gemma 3 divides none. A picture of which nothing would be left is refused."""
    if processor.kind == "gemma3":
        return TileGrid(1, 1)
    if engine is not None:
        return engine.grid(size)
    if processor.kind.startswith("qwen"):
        return _squares(processor, size)
    return _lines(processor, size) if processor.kind in LINED else _tiles(processor, size)


def picture_tokens(processor: ImageProcessor, size: PictureSize, engine: Engine | None = None) -> PictureTokens:
    """The tokens of a picture of this size, once it is upright."""
    rows, columns = grid_of(processor, size, engine)
    if processor.kind == "gemma3":  # two marks; the processor adds a blank line before and behind
        return PictureTokens(processor.count, 2 if engine is not None else 4)
    if processor.kind.startswith("qwen"):
        return PictureTokens(rows * columns, 2)
    if processor.kind in LINED:
        return PictureTokens(rows * columns, rows)
    read = rows * columns + 1  # two marks a part, a line end a row and one after all, and a last mark
    return PictureTokens(processor.count * read, 2 * read + rows + bool(rows) + 1, read)


def _squares(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """`smart_resize` of Qwen2-VL's processor, divided by the square of a token."""
    side = processor.patch_size * processor.merge_size
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    rows, columns = round(size.height / side), round(size.width / side)
    if rows * side * columns * side > most:
        shrink = math.sqrt(size.height * size.width / most)
        rows = max(1, math.floor(size.height / shrink / side))
        columns = max(1, math.floor(size.width / shrink / side))
    elif rows * side * columns * side < least:
        grow = math.sqrt(least / (size.height * size.width))
        rows, columns = math.ceil(size.height * grow / side), math.ceil(size.width * grow / side)
    return TileGrid(rows, columns)


def _tiles(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """As `_preprocess` of both processors resizes and divides. Their `get_number_of_image_patches` rounds one side
    from the size before the other was rounded, and counts fewer tiles where `size` is not a multiple of a tile."""
    if not processor.do_image_splitting or processor.max_image_size is None:
        return TileGrid(0, 0)
    tile = processor.max_image_size["longest_edge"]
    width, height = _reduced(size, processor.size["longest_edge"])
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return TileGrid(rows, columns) if max(rows, columns) > 1 else TileGrid(0, 0)


def _reduced(size: PictureSize, longest: int) -> PictureSize:
    """The size as llama.cpp reduces it, then made smaller until no side is above `_TILED_SIDE`."""
    width, height = (max(side, 1) for side in reduced_size(size, longest))
    ratio = width / height
    if width >= height and width > _TILED_SIDE:
        width, height = _TILED_SIDE, int(_TILED_SIDE / ratio)
    elif height > width and height > _TILED_SIDE:
        width, height = int(_TILED_SIDE * ratio), _TILED_SIDE
    return PictureSize(max(width, 1), max(height, 1))


def _lines(processor: ImageProcessor, size: PictureSize) -> TileGrid:
    """Mistral 3 and Pixtral: PixtralProcessor resizes pictures to whole squares of patches."""
    longest = processor.size["longest_edge"]
    ratio = max(size.height / longest, size.width / longest)
    width, height = (math.floor(edge / ratio) for edge in size) if ratio > 1 else size
    if not width or not height:
        expected = f"a side of at least a pixel, once the longer one has {longest}"
        raise bad_picture("a picture", "is too narrow", f"{size.width} x {size.height}", expected)
    return TileGrid((height - 1) // processor.square + 1, (width - 1) // processor.square + 1)


def limited_size(kind: str, size: Any, tile: Any, least: int | None, most: int | None) -> Any:
    """The `size` of an image processor with the recipe's limits, each family in its own terms. `tile` is its
    `max_image_size`. Refuses a limit that the family does not have."""
    if least is None and most is None:
        return size
    if kind.startswith("qwen"):
        edges = {"shortest_edge": least, "longest_edge": most}  # Qwen's names for numbers of pixels
        return {**dict(size), **{name: value for name, value in edges.items() if value is not None}}
    if least is not None or kind == "gemma3":
        name = "min_pixels" if least is not None else "max_pixels"
        raise Refused(
            f"{name} has no meaning for the family {kind}",
            code="bad_recipe",
            expected="every picture is resized to one size" if kind == "gemma3" else "max_pixels alone",
            got=f"{name}: {least if least is not None else most}",
            hint="remove the limit from the recipe",
        )
    edge = math.isqrt(most or 0)
    if kind in TILED:
        side = int(tile["longest_edge"])
        edge = max(1, edge // side) * side
    return {"longest_edge": edge}


def limited_processor(processor: ImageProcessor, least: int | None, most: int | None) -> ImageProcessor:
    """The image processor with the limits of a recipe. Raises as `limited_size`."""
    return replace(processor, size=limited_size(processor.kind, processor.size, processor.max_image_size, least, most))


# --- pictures/tokens ---
# The tokens that stand for a picture in the model's text, and the tensors that the model gets.
#
# The model's own image processor makes the tensors, in its Pillow version; torchvision is not needed. With
# `preprocess: engine`, the tensors and the text around a picture are those of llama.cpp.

LINE_END = "[IMG_BREAK]"


class Places(NamedTuple):
    """How a family writes pictures into a text."""

    mark: str  # the token that the chat template writes for a picture
    token: str  # the token that stands for a part of a picture; the tower's output takes its place


class ImageModel(TypedDict):
    """The fields of a recipe that say how its pictures are read. A limit of None stands for that of the model's image
    processor. Without `preprocess`, the image processor reads the pictures."""

    model: str
    revision: str | None
    preprocess: NotRequired[str]
    min_pixels: NotRequired[int | None]
    max_pixels: NotRequired[int | None]


class Pictures:
    """How one model reads pictures, with the pixel limits of a recipe."""

    def __init__(self, recipe: ImageModel, tokenizer: Any, folder: Path | None = None) -> None:
        """`folder` is where the paths in the rows begin."""
        require_pillow()
        name, revision = recipe["model"], recipe["revision"]
        self.model, self.folder = (name, revision), folder
        self.is_grey = False
        documents = {file: model_document(name, revision, file) for file in ("config.json", *PROCESSOR_FILES)}
        config = documents["config.json"] or {}
        self.kind = str(config.get("model_type", "unknown"))
        tower = config.get("vision_config") or {}
        if self.kind not in PROCESSOR_DEFAULTS or (self.kind == "llava" and tower.get("model_type") != "pixtral"):
            raise Refused(
                f"the model family {self.kind} cannot be trained on pictures",
                code="vision",
                expected=", ".join(PROCESSOR_DEFAULTS) + " with Pixtral's tower",
                got=f"{self.kind} with the tower {tower.get('model_type')}" if self.kind == "llava" else self.kind,
                hint="use a base model of one of these families",
            )
        settings = read_processor(config, documents)
        self.tokenizer = tokenizer
        self.places = self._places()
        self.token_id = int(tokenizer.convert_tokens_to_ids(self.places.token))
        self.limits = PixelLimits(recipe.get("min_pixels"), recipe.get("max_pixels"))
        self.settings = limited_processor(settings, *self.limits)  # used to count tokens
        self.engine: Engine | None = None  # prepares the pictures in place of the processor, as llama.cpp does
        if recipe.get("preprocess") == "engine":
            require_engine(recipe, self.kind)
            self.engine = Engine(self.settings)
        self.mark = self.places.mark if self.engine is None else PICTURE  # of a picture in a rendered text

    def parts(self, content: str) -> list[dict[str, str]]:
        """The content of a message as the parts that the chat template reads. llama.cpp's server gives it one text,
        with a mark of its own where a picture stands."""
        return picture_parts(content) if self.engine is None else [{"type": "text", "text": content}]

    @cached_property
    def processor(self) -> Any:
        """The image processor of transformers, which makes the tensors without `preprocess: engine`."""
        from transformers import AutoImageProcessor

        name, revision = self.model
        processor = AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil", trust_remote_code=False)
        tile = getattr(processor, "max_image_size", None)
        processor.size = limited_size(self.kind, processor.size, tile, *self.limits)
        return processor

    def grid(self, size: PictureSize) -> TileGrid:
        """Tokens or tiles of a picture, by row and column."""
        return grid_of(self.settings, size, self.engine)

    def _places(self) -> Places:
        if self.kind == "gemma3":
            return Places(self.tokenizer.boi_token, self.tokenizer.image_token)
        name = dict.fromkeys(TILED, "<image>") | dict.fromkeys(LINED, "[IMG]")
        token = name.get(self.kind, "<|image_pad|>")
        return Places(token, token)

    def expansion(self, size: PictureSize) -> str:
        """The text that stands for one picture, as `replace_image_token` of each processor of transformers 5.23 writes
        it, which a test compares. The processors themselves need torchvision, for films."""
        token, by_engine = self.places.token, self.engine is not None
        if self.kind == "gemma3":  # its processor puts the marks on lines of their own, and llama.cpp does not
            text = f"{self.tokenizer.boi_token}{token * self.tokens(size)}{self.tokenizer.eoi_token}"
            return text if by_engine else f"\n\n{text}\n\n"
        if self.kind.startswith("qwen"):
            tokens = token * self.tokens(size)
            return f"<|vision_start|>{tokens}<|vision_end|>" if by_engine else tokens
        rows, columns = self.grid(size)
        if self.kind in LINED:
            return LINE_END.join([token * columns] * rows) + "[IMG_END]"
        around, parts, tiles = "<fake_token_around_image>", token * self.settings.count, ""
        for row in range(1, rows + 1):
            tiles += "".join(f"{around}<row_{row}_col_{column}>{parts}" for column in range(1, columns + 1)) + "\n"
        return tiles + "\n" * bool(tiles) + f"{around}<global-img>{parts}{around}"

    def expanded(self, rendered: str, sizes: list[PictureSize]) -> tuple[str, list[tuple[int, int, int]]]:
        """The text with each mark of a picture replaced by its `expansion`, and the pieces between the marks: their
        start and end in `rendered`, and by how many characters they moved."""
        marks = [match.span() for match in re.finditer(re.escape(self.mark), rendered)]
        marks_of_engine = 0 if self.engine is None else sum(rendered.count(text) for text in {*self.places})
        if len(marks) != len(sizes) or marks_of_engine:
            raise Refused(
                "the model's chat template does not write one mark for each picture",
                code="template_mismatch",
                expected=f"{len(sizes)} times {self.mark}",
                got=f"{len(marks)} times" + f", and {marks_of_engine} times {self.places.mark}" * bool(marks_of_engine),
                hint="use a base model whose chat template reads pictures, such as an Instruct version",
            )
        text, end, pieces = "", 0, list[tuple[int, int, int]]()
        for (start, stop), size in zip(marks, sizes, strict=True):
            pieces.append((end, start, len(text) - end))
            text += rendered[end:start] + self.expansion(size)
            end = stop
        return text + rendered[end:], [*pieces, (end, len(rendered), len(text) - end)]

    def fed(
        self, rendered: str, spans: list[tuple[int, int]], images: list[PictureSource]
    ) -> tuple[str, list[tuple[int, int]], Pictured]:
        """The rendered text with its pictures expanded, the trained spans in this text without the tokens of pictures,
        and the pictures with their digests."""
        fed, pieces = self.expanded(rendered, [picture_size(image, self.folder) for image in images])
        outside = [
            (max(start, a) + shift, min(stop, b) + shift)
            for a, b in spans
            for start, stop, shift in pieces
            if max(start, a) < min(stop, b)
        ]
        if not images:
            return fed, outside, {}
        digests = [picture_digest(image, self.folder) for image in images]
        return fed, outside, {"images": images, "image_sha256": digests}

    def require_whole(self, ids: list[int], fed: str, limit: int) -> None:
        """Refuses a row whose pictures are cut by max_length: the model would fail, or see a part of a picture."""
        whole, token = fed.count(self.places.token), self.token_id
        if ids.count(token) != whole:
            raise Refused(
                "the tokenizer does not encode each token of a picture separately",
                code="bad_tokenizer",
                expected=f"{whole} times {self.places.token}",
                got=f"{ids.count(token)} times",
            )
        if ids[:limit].count(token) != whole:
            last = max(place for place, each in enumerate(ids) if each == token)
            raise Refused(
                "max_length ends inside of a picture, or before it",
                code="nothing_to_train",
                expected=f"max_length above {last + 1}: the row has {whole} tokens of pictures",
                got=f"max_length {limit}",
                hint=f"raise max_length to {len(ids)}, or set max_pixels in the recipe for smaller pictures"
                if self.engine is None
                else f"raise max_length to {len(ids)}, or make the pictures smaller",
            )

    def tokens(self, size: PictureSize) -> int:
        """The parts of a picture that the language model reads."""
        return picture_tokens(self.settings, size, self.engine).parts

    def read(self, row: Mapping[str, Any]) -> list[Any]:
        """The pictures of an encoded row, as PIL images."""
        from PIL import Image

        encoded = zip(row.get("images") or (), row.get("image_sha256") or (), strict=True)
        files = [(picture_name(image), encoded_bytes(image, digest, self.folder)) for image, digest in encoded]
        images = [read_picture({"bytes": content, "path": name}, None) for name, content in files]
        return [Image.new("RGB", image.size, "grey") for image in images] if self.is_grey else images

    @contextmanager
    def all_grey(self) -> Iterator[None]:
        """In the block every picture is grey, of its own size."""
        self.is_grey = True
        try:
            yield
        finally:
            self.is_grey = False

    def tensors(self, rows: list[list[Any]]) -> dict[str, Any]:
        """The tensors that the model takes beside the ids, made of the PIL images of each row. They hold pixels by
        patch (Qwen), by picture (Gemma 3) or by row and tile (SmolVLM, Idefics3)."""
        if not any(rows):
            return {}
        if self.engine is not None:
            return self.engine.tensors(rows)
        nested = self.kind in TILED
        images = rows if nested else [image for row in rows for image in row]
        more = {"patch_size": self.settings.square} if self.kind in LINED else {}
        features = dict(self.processor(images=images, return_tensors="pt", **more))
        return {name: value for name, value in features.items() if name not in ("rows", "cols", "num_crops")}

    def token_types(self, ids: Any) -> dict[str, Any]:
        """Where pictures stand, for the families whose model asks: Qwen's positions and Gemma's attention depend on it.
        ids [rows, tokens] -> the same shape, 0 or 1."""
        if self.kind != "gemma3" and not self.kind.startswith("qwen"):
            return {}
        name = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
        return {name: (ids == self.token_id).long()}


def model_document(model: str, revision: str | None, name: str) -> dict[str, Any] | None:
    """A JSON file of a model; None where there is none, or it holds no object."""
    path = model_file(model, revision, name)
    document = foreign_json(Path(path)) if path is not None else None
    return document if isinstance(document, dict) else None


class PixelLimits(NamedTuple):
    """The limits of a recipe; None stands for the limit of the model's processor."""

    least: int | None
    most: int | None


def write_limits(folder: Path, kind: str, limits: PixelLimits) -> dict[str, Any]:
    """Writes the limits into the files of a model's image processor, so that whoever loads the model resizes pictures
    as the training did. Returns what was changed, by its name; a file without a change stays as it is."""
    changed: dict[str, Any] = {}
    for path in (folder / name for name in PROCESSOR_FILES):
        document = foreign_json(path) if path.is_file() and limits != PixelLimits(None, None) else None
        if not isinstance(document, dict):
            continue
        nested = document.get("image_processor")
        own = nested if isinstance(nested, dict) else document
        new = {name: value for name, value in limited_settings(own, kind, limits).items() if own.get(name) != value}
        if new:
            own.update(new)
            changed |= new
            write_text(path, json.dumps(document, indent=1) + "\n")
    return changed


def limited_settings(own: dict[str, Any], kind: str, limits: PixelLimits) -> dict[str, Any]:
    """The settings of an image processor's file that hold the limits, by the file's names; empty for another file."""
    size = own.get("size") if isinstance(own.get("size"), dict) else None
    named = {"min_pixels": limits.least, "max_pixels": limits.most}  # earlier files of Qwen-VL; they win over `size`
    if size is None and not named.keys() & own.keys():
        return {}
    settings = {name: value for name, value in named.items() if value is not None and name in own}
    if size is not None:
        settings["size"] = limited_size(kind, size, own.get("max_image_size"), *limits)
    return settings


def encoded_bytes(source: PictureSource, digest: str, folder: Path | None) -> bytes:
    """The content of a picture's file. Refuses a file that changed after its row was encoded, because the checks and
    the record of what was fed are about the earlier content."""
    content = picture_bytes(source, folder)
    got = hashlib.sha256(content).hexdigest()
    if got != digest:
        raise Refused(
            f"{picture_name(source)} changed after the training had begun",
            code="input_changed",
            expected=f"sha256 {digest[:12]}…",
            got=f"sha256 {got[:12]}…",
            hint="train again once nothing writes to the data",
        )
    return content


def picture_format(source: PictureSource, folder: Path | None) -> str:
    """The suffix of its format: png, jpeg, webp."""
    with opened_picture(source, folder) as (image, _):
        return str(image.format or "bin").lower()


# --- rows ---
# Rows: from a file, a saved folder or the Hub.

TABLE_FILES = (".csv", ".tsv")
CELL_CHARACTERS = 10_000_000  # of a table; Python's own limit is 131,072. A quote that nobody closes ends here
LINE_BYTES = 50_000_000  # of a line of a dataset: a row of a million tokens takes 15 MB
DOCUMENT_BYTES = 2_000_000_000  # of a dataset in .json, which is read whole and takes several times as much memory
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"  # how it begins
# Texts of hints.
ROWS_IN_LINES = "write the rows to a .jsonl file, one object per line, and use that file"
DOCUMENT = "one JSON document is a .json file: rename it; or else remove the commas behind the lines"
PART_OF_FILE = "use train, or a part of it, such as train[:500]"


def iter_rows(
    data: str, *, split: str, config: str | None = None, revision: str | None = None, file: str | None = None
) -> Iterator[tuple[int, Row]]:
    """`(line, row)` for each row of the chosen split. `line` is the line in the file if there are lines, or else its
    number. A line that is not a JSON object is refused, because a training without it would be on other data. `config`,
    `revision` and `file` are of a dataset on the Hub, as in the recipe."""
    path = Path(data)
    if path.is_dir() and (table := picture_table(path, split)) is not None:
        rows = iter_slice(((line, in_folder(row, path, table)) for line, row in iter_file(table)), split)
    elif path.is_dir():
        rows = iter_saved(path, split)
    elif path.is_file():
        if not split.startswith("train"):
            raise bad_split(f"{path} is one file and has no split {split!r}", "train, train[:500]", split)
        rows = iter_slice(iter_file(path), split)
    elif path.exists():
        raise not_a_file(path, "a pipe or a device", hint=ROWS_IN_LINES)
    elif file is not None:
        rows = iter_hub_file(hub_file(data, revision, file), split)
    else:
        rows = iter_hub(data, split, config, revision)
    yield from rows


class RowsRecipe(TypedDict):
    """The fields of a recipe that say which rows and pictures are read."""

    split: str
    columns: dict[str, str]
    images: NotRequired[bool]


def data_fingerprint(data: Path, recipe: RowsRecipe, digests: Mapping[str, str] | None = None) -> str:
    """SHA-256 of a file's bytes, or of the rows of a folder, with that of the pictures, as in the plan. `digests` are
    of pictures that need not be read again, by the paths in the rows."""
    rows, pictures = hashlib.sha256(), PicturesDigest(picture_folder(str(data)), digests)
    whole = data.is_file()
    for _, row in iter_rows(str(data), split=recipe["split"]) if recipe.get("images") or not whole else ():
        if recipe.get("images"):
            pictures.add(lift_pictures(row, recipe["columns"])[1])
        if not whole:
            rows.update(canonical(row))
    return pictures.with_rows(file_digest(data)["sha256"] if whole else rows.hexdigest())


def canonical(row: Row) -> bytes:
    """Bytes that are equal for equal rows, whatever the kind of file."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace")


@dataclass(frozen=True)
class Broken:
    """A line that is not a row, or `lines` of a table between two quotes, which may be any number of rows. Training
    ends with the `refusal`."""

    kind: Literal["broken_json", "not_utf8", "not_an_object"]
    refusal: Refused
    lines: int = 1


# The line number, from 1 as an editor counts; the row; its bytes in a file with one row on each line. A plain tuple,
# because a million are created.
Line = tuple[int, Row | Broken, bytes | None]


def iter_file(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a file, up to the first line that is not a row: that is refused."""
    for number, row, _ in lines_of(path):
        if isinstance(row, Broken):
            raise row.refusal
        yield number, row


def lines_of(path: Path) -> Iterator[Line]:
    """Every row of a file, and what is not a row as `Broken`. Refuses other kinds of files, lines and documents that
    are too long, and two columns of one name."""
    kind = path.suffix.lower()
    if path.is_file() and read_start(path) == LFS_POINTER:
        words, rows = f"{path} is a pointer of Git LFS, not the file itself", "the rows, to which the pointer leads"
        raise unreadable(words, rows, LFS_POINTER.decode(), "git lfs pull")
    if kind in (".jsonl", ".ndjson"):
        yield from json_lines(path)
    elif kind == ".json":
        yield from json_document(path)
    elif kind in TABLE_FILES:
        yield from table_rows(path)
    elif kind == ".parquet":
        yield from ((number, row, None) for number, row in iter_parquet(path))
    else:
        raise unreadable(
            f"{path} has an extension that is not supported for a dataset",
            ".jsonl, .json, .csv, .tsv, .parquet, a folder saved by datasets, or a Hub id",
            kind or "no extension",
            ROWS_IN_LINES,
        )


def read_start(path: Path) -> bytes:
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        return file.read(len(LFS_POINTER))


def json_lines(path: Path) -> Iterator[Line]:
    """One object for each line."""
    # The function inside json.loads, without its checks: half the time. Unusual lines go through json.loads.
    decoder = json.JSONDecoder(object_pairs_hook=with_distinct_keys)
    scan_once: Callable[[str, int], tuple[Any, int]] = decoder.scan_once  # type: ignore[attr-defined]
    for number, raw in numbered_lines(path):
        try:
            text = str(raw, "utf-8")
            row, end = scan_once(text, 0)
            usual = type(row) is dict and text[end:] in ("\n", "\r\n", "")
        except (ValueError, StopIteration, RecursionError):
            usual = False
        if usual:
            yield number, row, raw
        elif raw.strip():
            row = parsed(raw, f"line {number} of {path}")
            if number == 1 and isinstance(row, Broken) and raw.rstrip()[-1:] in b",[{" and path.suffix != ".json":
                row.refusal.error["hint"] = DOCUMENT  # of its lines one may be an object by chance
                raise row.refusal
            yield number, row, raw


def parsed(raw: bytes, where: str) -> Row | Broken:
    try:
        row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=with_distinct_keys)
    except RepeatedKey as error:
        return Broken("broken_json", repeated_key(where, str(error)))
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError too
        if isinstance(error, UnicodeDecodeError) or utf16(raw):
            return Broken("not_utf8", not_utf8(where, raw))
        expected = "one JSON object a line, in UTF-8"
        return Broken("broken_json", unreadable(f"{where} is not JSON: {error}", expected, beginning(raw), MEND))
    return row if isinstance(row, dict) else Broken("not_an_object", not_an_object(where, row))


def json_document(path: Path) -> Iterator[Line]:
    """A list of objects, an object with one such list, or one object a line in spite of the file's name."""
    items = json_items(path)
    if items is None:
        yield from json_lines(path)
        return
    for number, row in enumerate(items, start=1):
        if not isinstance(row, dict):
            row = Broken("not_an_object", not_an_object(f"item {number} of {path}", row))
        yield number, row, None


def table_rows(path: Path, text: str | None = None, *, whole: bool = True) -> Iterator[Line]:
    """The rows of a table whose first row has the names of the columns. `text` is its text if no file is here; if that
    is not `whole`, a later row may need its quotes."""
    wrong_bytes = list[tuple[int, bytes]]()
    csv.field_size_limit(CELL_CHARACTERS)
    read = partial(text_lines, path, text)
    first = next(read([]), "")
    sign = sign_of(first, path.suffix.lower(), read([]))
    unsure = not first.startswith('"') and (whole or sign != ",")
    names: list[str] | None = None
    for record in records_of(read(wrong_bytes), sign):
        start, cells, lines, _ = record
        end = start + len(lines) - 1
        require_no_space(record, sign, len(names or cells), path)
        if (broken := unread_record(path, record, wrong_bytes, ", its header," if names is None else "")) is not None:
            yield broken
            if names is None:  # no other row may take its place
                return
        elif names is None:
            if end > 1 or not SIGN_SAID.fullmatch(first):
                names = cells
                require_distinct(names, path)
        elif cells and (cells == names or len(cells) != len(names)):  # the first of a second table behind this one
            what = "repeats the header" if cells == names else "does not have as many columns as the header"
            expected = f"rows of {len(names)} columns: {', '.join(names)}"
            wrong = unreadable(f"line {end} of {path} {what}", expected, lines[0][:80].rstrip(), MEND)
            yield end, Broken("broken_json", wrong, len(lines)), None
        elif cells:
            if unsure and vote(record, sign, len(names)) < 0:
                require_quotes(records_of(read([]), sign), record, sign, path)
                unsure = False
            yield end, dict(zip(names, cells, strict=True)), None


def unread_record(path: Path, record: Record, wrong_bytes: list[tuple[int, bytes]], what: str) -> Line | None:
    """What is wrong with a row of a table; None if it can be read."""
    start, _, lines, error = record
    if wrong_bytes:
        start, raw = wrong_bytes[0]
        wrong_bytes.clear()
        wrong = not_utf8(f"line {start} of {path}{what}", raw)
        return start, Broken("not_utf8", wrong, 1 if error is None else len(lines)), None
    if error is not None:
        expected = "a table whose quotes are closed, and doubled inside of a cell"
        end = start + len(lines) - 1
        where = f"line {start}" if end == start else f"line {start}, where a quote opens, to line {end}"
        wrong = unreadable(f"{where} of {path}{what} is broken: {error}", expected, lines[0][:80].rstrip(), MEND)
        return start, Broken("broken_json", wrong, len(lines)), None
    return None


def text_lines(path: Path, text: str | None, wrong_bytes: list[tuple[int, bytes]]) -> Iterator[str]:
    """The lines of a text, or else of a file. Lines that are not UTF-8 go to `wrong_bytes` with their numbers."""
    if text is not None:
        yield from io.StringIO(text, newline="\n")
        return
    for number, raw in numbered_lines(path):
        if b"\0" in raw and utf16(raw):
            wrong_bytes.append((number, raw))
        try:
            yield raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            wrong_bytes.append((number, raw))
            yield raw.decode("utf-8", "replace")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a dataset, from 1 as an editor counts. Of a line that is too long only the limit is read."""
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        for number, raw in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), start=1):
            if len(raw) > LINE_BYTES:
                expected = f"at most {LINE_BYTES:,} bytes a line; a row of a million tokens takes 15 MB"
                raise unreadable(f"line {number} of {path} is too long", expected, beginning(raw), ROWS_IN_LINES)
            yield number, raw


def whole_text(path: Path) -> str:
    """The text of a dataset that is one document. One that is too large is not read."""
    with regular_file(path, hint=ROWS_IN_LINES) as file:
        size = os.fstat(file.fileno()).st_size
        if size > DOCUMENT_BYTES:
            raise unreadable(
                f"{path} is one JSON document, and too large to be read at once",
                f"at most {DOCUMENT_BYTES:,} bytes; a .jsonl file is read by lines and may have any size",
                f"{size:,} bytes",
                ROWS_IN_LINES,
            )
        return file.read(size).decode("utf-8-sig")


def beginning(raw: bytes) -> str:
    return raw[:80].decode("utf-8", "replace").rstrip()


def not_utf8(where: str, raw: bytes) -> Refused:
    """The refusal of text that is not UTF-8: it is UTF-16, or an older encoding."""
    old = None if utf16(raw) else old_encoding(raw)
    encoding = utf16(raw) or old or "WINDOWS-1252"
    message, hint = f"{where} is not UTF-8, most likely {encoding}", f"iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
    got = beginning(raw) if old is None else f"{raw[:80].decode(OLD_ENCODINGS[old], 'replace').rstrip()!r} in {old}"
    return unreadable(message, "text in UTF-8", got, hint)


def json_items(path: Path) -> list[Any] | None:
    """The items of a JSON document. Refuses an object that has a key twice. None for a file that is not one document,
    such as one with an object a line: the reader of lines then reports a broken line."""
    repeating = list[tuple[Row, str]]()  # each object with a key twice, and that key

    def noted(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            repeating.append((row, repeated_in(pairs)))
        return row

    try:
        items = items_of(json.loads(whole_text(path), object_pairs_hook=noted), path)
    except (ValueError, RecursionError):
        return None
    if repeating:
        objects = {id(row) for row, _ in repeating}
        holding = (n for n, item in enumerate(items, start=1) if any(id(node) in objects for _, node in nodes_in(item)))
        number = next(holding, None)
        raise repeated_key(str(path) if number is None else f"item {number} of {path}", repeating[0][1])
    return items


def bad_split(message: str, expected: str, got: str, hint: str = PART_OF_FILE) -> Refused:
    return Refused(message, code="bad_split", expected=expected, got=got, hint=hint)


FILE_ON_HUB = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<commit>[0-9a-f]{40})/(?P<file>.+)")
SLICE = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<from>\d{1,18}%?)?:(?P<to>\d{1,18}%?)?\])?")


def iter_slice(rows: Iterator[tuple[int, Any]], split: str) -> Iterator[tuple[int, Any]]:
    """The rows of `train[10:500]` or `train[:10%]`. A plain file is one split, whatever its name."""
    match = SLICE.fullmatch(split)
    if match is None:
        raise bad_split(f"split {split!r} is not valid", "train, train[:500], train[:10%]", split)
    bounds = [match["from"] or "0", match["to"] or ""]
    if any(bound.endswith("%") for bound in bounds):
        rows = iter(all_rows := list(rows))
        # Rounded as `datasets` does.
        bounds = [str(round(len(all_rows) * int(b[:-1]) / 100)) if b.endswith("%") else b for b in bounds]
    for index, row in enumerate(rows):
        if bounds[1] and index >= int(bounds[1]):
            return
        if index >= int(bounds[0]):
            yield row


def iter_saved(folder: Path, split: str) -> Iterator[tuple[int, Row]]:
    """A folder that `datasets` saved."""
    if not any((folder / name).is_file() for name in (SPLITS, STATE)):
        raise unreadable(
            f"{folder} is not a dataset folder",
            "a folder written by Dataset.save_to_disk, or one file; of pictures a folder with metadata.jsonl",
            f"a folder without {STATE} and without {SPLITS}",
            "use one file of rows, or a folder that Dataset.save_to_disk wrote",
        )
    saved = undecoded(load_saved(folder, split.split("[")[0]))
    rows = as_written(rows_of(saved, folder), saved.features.arrow_schema, json_read=True)
    yield from iter_slice(enumerate(rows, start=1), split)


def load_saved(folder: Path, name: str) -> Any:
    """One split of a saved folder. All files that `datasets` will open are checked first."""
    import datasets

    with broken_saved(folder):
        for part in saved_parts(folder):
            check_arrow(part)
        saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if name not in saved:
        hint = "name one of these with --split, or as split in the recipe"
        raise bad_split(f"{folder} has no split {name!r}", ", ".join(saved), name, hint)
    return saved[name]


def rows_of(saved: Any, folder: Path) -> Iterator[Row]:
    with broken_saved(folder):
        yield from saved


@contextmanager
def broken_saved(folder: Path) -> Iterator[None]:
    """Turns the errors of a damaged folder into a `Refused`: `datasets` and pyarrow raise any class."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Refused, ImportError, PermissionError)) or lacks_memory(error):
            raise
        raise broken_arrow(folder, error) from None


def saved_parts(folder: Path) -> list[Path]:
    """The folders that `datasets` will open: this one, or the folder of each split."""
    if all((folder / name).is_file() for name in (INFO, STATE)):
        return [folder]
    document = saved_json(folder / SPLITS)
    names = document.get("splits")
    if not isinstance(names, list) or any(not is_name_of_folder(name) for name in names):
        raise broken_arrow(folder / SPLITS, ValueError("its splits are not names of folders beside it"))
    return [folder / name for name in names]


def iter_hub(name: str, split: str, config: str | None, revision: str | None) -> Iterator[tuple[int, Row]]:
    import datasets

    if run_id() is not None:
        bring_settings(name, revision)
    files = files_of_split(datasets.load_dataset_builder(name, config, revision=revision), split.split("[")[0])
    # Of tables, `datasets` would make numbers of texts, and nothing of `NA`.
    if files and all(file.name.endswith(TABLE_FILES) for file in files) and SLICE.fullmatch(split):
        yield from iter_slice((row for file in files for row in iter_hub_file(hub_file(*file), "train")), split)
        return
    # On disk, because the name of the folder is the commit.
    loaded = datasets.load_dataset(name, config, split=split, revision=revision, keep_in_memory=False)
    if revision is not None and COMMIT.fullmatch(revision):
        require_commit(loaded, name, revision)
    for path in (file.root / file.name for file in files):
        if path.is_file():
            require_announced(path)
    loaded = undecoded(loaded)
    yield from enumerate(as_written(loaded, loaded.features.arrow_schema, json_read=True), start=1)


def bring_settings(name: str, revision: str | None) -> None:
    """Brings the settings of a dataset to the cache. `datasets` 5.2 takes one that it cannot fetch for one that the
    dataset does not have, and reads other files. A job has fetched nothing yet."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in (".huggingface.yaml", "dataset_infos.json"):
        try:
            hf_hub_download(name, file, repo_type="dataset", revision=revision)
        except LocalEntryNotFoundError:  # it could not be fetched
            raise
        except EntryNotFoundError:
            continue


def files_of_split(builder: Any, split: str) -> list[HubFile]:
    """The files of a split; empty unless all of them lie in one commit of a dataset on the Hub."""
    matches = [FILE_ON_HUB.fullmatch(str(url)) for url in (builder.config.data_files or {}).get(split, [])]
    return [] if None in matches else [HubFile(*match.group("name", "commit", "file")) for match in matches if match]


def require_commit(loaded: Any, name: str, commit: str) -> None:
    """Refuses the rows of another commit. Where the Hub does not answer, `datasets` 5.2 takes the newest folder of its
    cache, whatever revision was asked for."""
    commits = {Path(file["filename"]).parent.name for file in loaded.cache_files}
    if commits != {commit}:
        raise Refused(
            f"the Hub does not give {name} at commit {commit[:12]}",
            code="hub_unreachable",
            exit_code=EXIT_TEMPORARY,
            expected="an answer of the Hub, or these rows as the newest of this dataset in the cache",
            got=f"the rows of {', '.join(sorted(commits)) or 'no commit'} in the cache",
            hint="try again when the Hub can be reached",
        )


def iter_hub_file(file: HubFile, split: str) -> Iterator[tuple[int, Row]]:
    """The rows of one file on the Hub, read as a file here, with the pictures that they name in the cache."""
    path = brought_file(file)
    with named_as(path, str(file)):
        yield from with_files(iter_slice(iter_file(path), split), file)


# --- start/inputs ---
# The start of the training: the fields of its plan, its inputs, and the device that it names.

PLAN_SCHEMA = "skill-train/plan/1"
STRATEGIES = ("single", "ddp", "fsdp")


def load_plan(path: Path) -> Plan:
    """The plan, with every field present and of its type. No library is loaded, so a bad plan fails at once."""
    plan: Plan = plan_document(path)
    tuning = plan["recipe"]["finetuning_type"]
    if tuning not in TUNED:
        raise bad_plan("recipe.finetuning_type is unknown", expected=" or ".join(TUNED), got=tuning)
    check_batch(plan["recipe"], plan["placement"])
    attention = plan["placement"]["attn_implementation"]
    if attention not in ATTENTION:  # the name of a repository would be fetched from the Hub and run
        expected = " or ".join(ATTENTION)
        raise bad_plan("placement.attn_implementation is unknown", expected=expected, got=attention)
    return plan


def plan_document(path: Path) -> Any:
    """The JSON object of a plan. Its recipe and placement have all their fields."""
    document = read_document(path)
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        got = str(document.get("schema")) if isinstance(document, dict) else type(document).__name__
        raise bad_plan(f"{path} is not a plan", expected=PLAN_SCHEMA, got=got)
    check_fields(document.get("recipe"), Recipe, "recipe")
    check_fields(document.get("placement"), Placement, "placement")
    return document


def read_document(path: Path) -> Any:
    try:
        return foreign_json(path)
    except FileNotFoundError:
        raise Refused(
            f"{path} does not exist",
            code="missing_file",
            expected="the plan of a run",
            got=str(path),
            hint="check the path; skill-train local RECIPE makes a plan and trains it",
        ) from None
    except Refused as refusal:
        raise bad_plan(refusal.error["message"], expected="a plan in JSON", got=refusal.error["got"]) from None
    except OSError as error:  # a folder, a file of another user
        raise bad_plan(f"{path} cannot be read: {error.strerror}", expected="a plan in JSON") from None


def bad_plan(message: str, *, expected: str = "", got: str = "") -> Refused:
    hint = "make the plan again: skill-train local RECIPE, which trains it too"
    return Refused(message, code="bad_plan", expected=expected, got=got, hint=hint)


def json_types(fields: type) -> dict[str, tuple[type, ...]]:
    """The types of each field for `isinstance`, such as `list` for `list[str]`."""
    hints = get_type_hints(fields, globals()).items()
    parts = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints}
    return {name: tuple(get_origin(part) or part for part in types) for name, types in parts.items()}


def check_fields(values: Any, described: Any, name: str) -> None:
    """Refuses what is not an object with the fields of the TypedDict `described`."""
    if not isinstance(values, dict):
        raise bad_plan(f"the plan has no {name}", expected=f"an object called {name}")
    fields, hints = json_types(described), get_type_hints(described, globals(), include_extras=True).items()
    newer = {key for key, hint in hints if get_origin(hint) is NotRequired}  # missing in plans of earlier versions
    for key in sorted(set(values) ^ set(fields)):
        if key in values or key not in newer:
            raise bad_plan(f"{name}.{key} is {'unknown' if key in values else 'missing'}")
    for key, value in values.items():
        types = fields[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(t.__name__ for t in types)
            raise bad_plan(f"{name}.{key} has the wrong type", expected=expected, got=repr(value))


def check_batch(recipe: Recipe, placement: Placement) -> None:
    processes = placement["num_processes"]
    parts = (placement["per_device_train_batch_size"], placement["gradient_accumulation_steps"], processes)
    if math.prod(parts) != recipe["effective_batch_size"]:
        raise bad_plan(
            "the batch split does not make the effective batch size",
            expected=f"effective_batch_size {recipe['effective_batch_size']}",
            got=" x ".join(map(str, parts)) + " (per device x accumulation x processes)",
        )
    strategy = placement["strategy"]
    if strategy not in STRATEGIES or (strategy == "single") != (processes == 1):
        raise bad_plan(
            "placement.strategy does not go with the number of processes",
            expected="single with one process, ddp or fsdp with several",
            got=f"{strategy} with {processes}",
        )


def check_processes(placement: Placement) -> None:
    """Refuses another number of processes than the plan's. A missing process would leave out its part of every batch,
    and the loss would look healthy. `accelerate launch --cpu --num_processes 2` starts one (accelerate 1.15)."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != placement["num_processes"]:
        raise wrong_launch(f"{placement['num_processes']} processes", f"{started}")


def wrong_launch(expected: str, got: str) -> Refused:
    return Refused(
        "the program was not started with the arguments of its plan",
        code="bad_plan",
        expected=expected,
        got=got,
        hint="start it with skill-train local, or with accelerate launch and the arguments under `launch` in the plan",
    )


def require_hub_inputs(plan: Plan) -> None:
    """Refuses a local folder or file with the name of the model or dataset on the Hub: it would be loaded instead."""
    prints = plan.get("fingerprints", {})
    places: list[tuple[Literal["model", "data"], str]] = [("model", "the model"), ("data", "the dataset")]
    for key, noun in places:
        name = plan["recipe"][key]
        if key in prints and prints[key] is None and Path(name).exists():
            raise Refused(
                f"the plan means {noun} {name} on the Hub, and {Path(name).resolve()} has the same name",
                code="input_changed",
                expected=f"no folder or file {name} where the training starts",
                got=str(Path(name).resolve()),
                hint="start the training from another folder; to train on what lies here, plan again",
            )


def use_data(plan: Plan, data: Path | None) -> None:
    """Reads the data of a plan from its place, or from another one. They must have the planned bytes; those of the Hub
    have a revision instead."""
    planned = plan.get("fingerprints", {}).get("data")
    if data is None and planned is None:
        return
    data = data or Path(plan["recipe"]["data"])
    if not data.exists():
        raise Refused(
            f"{data} does not exist",
            code="missing_file",
            expected="the file or folder that the plan was made with",
            got=str(data),
            hint=f"if it was moved, put a link there: ln -s NEW_PLACE {shlex.quote(str(data))}; or plan again",
        )
    try:
        fingerprint = data_fingerprint(data, plan["recipe"])
        got = f"sha256 {fingerprint[:12]}…"
    except Refused as refusal:  # a picture that is missing, or empty
        if refusal.error["code"] != "bad_picture":
            raise
        fingerprint, got = None, str(refusal)
    if fingerprint is None or fingerprint != planned:
        raise Refused(
            f"{data} is not the data that was planned",
            code="input_changed",
            expected=f"sha256 {planned[:12]}…" if planned else "a plan of a file or folder, with its fingerprint",
            got=got,
            hint="use the planned file, or plan again with this file",
        )
    plan["recipe"]["data"] = str(data)


def check_base(model: str, revision: str | None) -> None:
    """As `check_model`, for the model of a plan. For a model on the Hub it checks the config and the index, which name
    all files that are fetched later. A job has fetched nothing yet: all but the weights is fetched before, because
    transformers takes a file that it cannot fetch for one that the model does not have."""
    if Path(model).is_dir():
        return check_model(Path(model))
    if run_id() is not None:
        from huggingface_hub import snapshot_download

        snapshot_download(model, revision=revision, allow_patterns=BESIDE_WEIGHTS, ignore_patterns=OTHER_FORMATS)
    paths = [model_file(model, revision, name) for name in ("config.json", INDEX)]
    for file in filter(None, paths):
        check_files(Path(file).parent)
        for path in (path for kind in BESIDE_WEIGHTS for path in Path(file).parent.glob(kind)):
            require_announced(path)
        if Path(file).name == INDEX:
            weight_map(Path(file))
    return None


def prepare_environment(placement: Placement) -> None:
    """Sets variables of the environment. Call it before any library is imported."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    block_hub_kernels()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin while they wait slow each other down on a busy machine: by a factor of 10, measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Rows have many lengths. Without this, 58 GB are reserved on an H100 where 33 GB are in use.
    if placement["device"] == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if placement["device"] == "mps":
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        event("note", text="PYTORCH_ENABLE_MPS_FALLBACK=1: operators that MPS lacks run on the CPU, slower")


def prepare_device(torch: Any, placement: Placement) -> None:
    require_device(torch, placement)
    if placement["device"] == "cuda":  # cuDNN compiles anew for every length: without it, a quarter more tokens/s
        torch.backends.cuda.enable_cudnn_sdp(False)
        if not flash_attention_runs(placement["dtype"], torch.cuda.get_device_capability()):
            repeat_shared_heads()
    elif placement["device"] == "cpu" and placement["threads"]:
        torch.set_num_threads(placement["threads"])


def flash_attention_runs(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether torch's flash kernel computes this type on a GPU of this compute capability."""
    return dtype in ("bfloat16", "float16") and capability >= (8, 0)


def repeat_shared_heads() -> None:
    """Lets transformers repeat the keys and values that several query heads share, before attention.

    On CUDA only the flash kernel reads shared heads. Where it does not run, transformers 5.23 has torch fall back to
    the kernel that keeps every attention score for the backward pass (huggingface/transformers#45776): 0.35 GB more
    for 512 tokens of Qwen2.5-0.5B in float32 (bench/estimates), 16 times that for 2,048. The memory-efficient kernel
    keeps none, and takes repeated heads.
    """
    from transformers.integrations import sdpa_attention

    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


def require_device(torch: Any, placement: Placement) -> None:
    device = placement["device"]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device, False):
        raise Refused(
            f"torch {torch.__version__} cannot use {device} here",
            code="device_unavailable",
            exit_code=EXIT_NOT_INSTALLED,
            expected=f"a build of torch for {device}, and a driver",
            got=", ".join(name for name, there in available.items() if there),
            hint="use --device cpu, or install the torch build for this machine",
        )
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", placement["num_processes"]))  # the rest are elsewhere
    if device == "cuda" and torch.cuda.device_count() < processes_here:
        raise Refused(
            "the plan has more processes than this machine has GPUs",
            code="device_unavailable",
            exit_code=EXIT_DOES_NOT_FIT,
            expected=f"{processes_here} GPUs, one a process",
            got=f"{torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})",
            hint="plan again on this machine: skill-train local RECIPE",
        )


# --- split ---
# The split: rows that can be trained, rows that are held out, and the order in which rows are fed.

SPLIT = "held_out.json"  # in a checkpoint: the hash of its recipe, and the numbers of the rows that never train


class Repeated(TypedDict):
    """Rows that repeat an earlier one, the groups that they form, and held-out rows that training has seen: the whole
    row, or its question."""

    repeated_rows: int
    repeated_groups: int
    held_out_trained: int
    held_out_asked: int


class DataFigures(Repeated):
    """Rows and tokens of the data. The tokens are those of the rows that train."""

    rows: int
    train_rows: int
    held_out_rows: int
    truncated_rows: int
    skipped_rows: int
    tokens: int
    longest_row_tokens: int
    trained_token_share: float
    notes: list[str]


class Data(TypedDict):
    """The data that is fed."""

    train: list[EncodedRow]
    held_out: list[EncodedRow]
    figures: DataFigures
    order: list[int]  # indices into `train`, one for each row of each step
    pictures: Pictures | None  # the reader of the rows' pictures; None for rows of text


def trainable_rows(rows: list[EncodedRow], recipe: Recipe) -> list[EncodedRow]:
    """The rows with a trained token. Refuses other rows, unless the recipe skips them: a batch of them would train at
    loss 0, which looks like success (trl#6668)."""
    empty = [row for row in rows if not trained_tokens(row)]
    if not empty or (recipe["skip_untrained_rows"] and len(empty) < len(rows)):
        return [row for row in rows if trained_tokens(row)]
    lines = ", ".join(str(row["line"]) for row in empty[:5]) + (", …" if len(empty) > 5 else "")
    cut = [row["full_length"] for row in empty if row["truncated"]]
    longer = f"raise max_length as far as the model has positions (the longest of them has {max(cut or [0])} tokens)"
    hint = longer if cut else "check what the rows hold"
    skip = "" if len(empty) == len(rows) else ", or set skip_untrained_rows: true to leave them out"
    raise Refused(
        f"{len(empty)} of {len(rows)} rows have no token to train on (lines {lines})",
        code="nothing_to_train",
        expected="at least one trained token in each row",
        got=f"answers cut away by max_length {recipe['max_length']}" if cut else "every label masked",
        hint=hint + skip,
    )


def held_out_rows(
    contents: list[int],
    questions: list[bytes],
    fraction: float,
    seed: int,
    images: list[list[str]] | None = None,
    exchanges: list[bytes] | None = None,
) -> set[int]:
    """Indices of rows that never train. Rows with the same content, the same question, a picture in common or the same
    exchange are held out or trained together: for a model that has seen such a row, the question is not new.

    A picture of nearly all rows is a form, and a question that nearly all rows share is an instruction. If too few rows
    are left to hold out, exchanges are ignored first, because the system messages may be what is asked, then pictures,
    then questions. `images` are the digests of the pictures of each row.
    """
    count = held_out_count(len(contents), fraction)
    chosen: set[int] = set()
    keys: list[Sequence[Any]] = [contents, questions, *(key for key in (images, exchanges) if key is not None)]
    while keys:
        chosen = chosen_groups(joined(*keys), count, seed)
        if 2 * len(chosen) >= count:
            break
        keys.pop()
    return chosen


def chosen_groups(groups: list[int], count: int, seed: int) -> set[int]:
    """The indices of whole groups, with at most `count` rows. If every group is larger, it is the smallest group, up to
    a fifth of the rows. Rows that are all different are drawn as the first version did."""
    sizes = Counter(groups)
    names = list(sizes)
    drawn = random.Random(seed).sample(range(len(names)), min(count, len(names)))
    order = [names[place] for place in dict.fromkeys([*drawn, *feeding_order(len(names), len(names), seed)])]
    chosen: set[int] = set()
    rows_left = count
    for name in order:
        if sizes[name] <= rows_left:
            chosen.add(name)
            rows_left -= sizes[name]
    smallest = min(order, key=sizes.__getitem__)
    if count and not chosen and sizes[smallest] <= min(HELD_OUT_ROWS, len(groups) // 5):
        chosen.add(smallest)
    return {index for index, name in enumerate(groups) if name in chosen}


def joined(*keys: Sequence[Any]) -> list[int]:
    """The group of each row. Rows with an equal key are in one group, and groups that share a row are one group. A key
    may be a list: one equal value is enough."""
    parents = list(range(len(keys[0])))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for key in keys:
        first: dict[Any, int] = {}
        for index, values in enumerate(key):
            for value in values if isinstance(values, list) else [values]:
                parents[root(index)] = root(first.setdefault(value, index))
    return [root(index) for index in range(len(parents))]


def contents_of(rows: list[EncodedRow]) -> list[int]:
    """Equal numbers for rows that train the same: equal texts after `normalised`, or equal parts within max_length."""
    texts = [digest_of(normalised(row["rendered"]) + seen_in(row)) for row in rows]
    left = [digest_of(str(row["input_ids"])) if row["truncated"] else b"%d" % i for i, row in enumerate(rows)]
    return joined(texts, left)


def seen_in(row: EncodedRow) -> str:
    """The digests of a row's pictures, as a text; empty without pictures."""
    return "".join(f"\n{digest}" for digest in row.get("image_sha256") or ())


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# What chat templates write before an answer
ANSWER_MARK = re.compile(
    r"<[|｜]\w+[|｜]?>(?:assistant|model)\b|<[|｜](?:(?:im_)?assistant|chatbot_token)[|｜]>|<start_of_turn>model\b|\[/INST\]"
    r"|^### ?(?:Response|Assistant):",
    re.IGNORECASE | re.MULTILINE,
)


def question_of(row: EncodedRow) -> str:
    """What a row asks: a conversation up to its first message of the user, rendered or not; a prompt; or the whole of
    another text."""
    if row["kind"] == "completion":
        return row["prompt"]
    if row["kind"] == "text":
        return ANSWER_MARK.split(row["rendered"], 1)[0].strip() or row["rendered"]
    messages = row["messages"] if row["kind"] == "chat" else []
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return row["rendered"]
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages[: first + 1])
    return text + seen_in(row)


def exchanges_of(rows: list[EncodedRow]) -> list[bytes] | None:
    """Equal digests for conversations that are equal but for their system messages; None if no row has one."""
    chats = [row.get("messages") or [] for row in rows]
    if not any(message["role"] in SYSTEMS for messages in chats for message in messages):
        return None
    rest = [[message for message in messages if message["role"] not in SYSTEMS] for messages in chats]
    texts = [json.dumps(turns, ensure_ascii=False, sort_keys=True, default=str) for turns in rest]
    return [
        digest_of(normalised(text if turns else row["rendered"]) + seen_in(row))
        for text, turns, row in zip(texts, rest, rows, strict=True)
    ]


# Characters that look alike or are invisible. NFKC does not make them equal.
ALIKE = str.maketrans(
    dict.fromkeys(map(chr, (0x2018, 0x2019, 0x201A, 0x201B)), "'")
    | dict.fromkeys(map(chr, (0x201C, 0x201D, 0x201E, 0x201F, 0xAB, 0xBB)), '"')
    | dict.fromkeys(map(chr, (*range(0x2010, 0x2016), 0x2212)), "-")
    | dict.fromkeys(map(chr, (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), 0xFEFF)))
)


def normalised(text: str) -> str:
    """The text without differences that make no other row: case, spaces, Unicode forms, kinds of quotes and dashes."""
    same = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(same.translate(ALIKE).split())


def repeated(contents: list[int], questions: list[bytes], held_out: set[int]) -> Repeated:
    sizes = Counter(contents).values()
    train = [index for index in range(len(contents)) if index not in held_out]
    trained, trained_questions = {contents[index] for index in train}, {questions[index] for index in train}
    return {
        "repeated_rows": len(contents) - len(sizes),
        "repeated_groups": sum(size > 1 for size in sizes),
        "held_out_trained": sum(contents[index] in trained for index in held_out),
        "held_out_asked": sum(questions[index] in trained_questions for index in held_out),
    }


def recorded_split(folder: Path, checkpoint: Path | None, recipe_hash: str | None) -> set[int] | None:
    """The rows that the run of a checkpoint held out. The checkpoint names them; with one of an earlier version,
    held_out.jsonl does. None if there is neither. Refuses a checkpoint of another recipe, whose schedule and optimizer
    would go on."""
    if checkpoint is None:
        return None
    if (checkpoint / SPLIT).is_file():
        own, rows = from_earlier_start(checkpoint / SPLIT, recipe_and_rows, without(checkpoint))
        if None not in (own, recipe_hash) and own != recipe_hash:
            raise Refused(
                f"{checkpoint.name} is of a run with another recipe",
                code="another_run",
                expected=f"a checkpoint of the recipe {recipe_hash!s:.12}…",
                got=f"{own!s:.12}…",
                hint=without(checkpoint),
            )
        return rows
    if not (folder / "held_out.jsonl").is_file():
        return None
    with open(folder / "held_out.jsonl", encoding="utf-8") as file:
        return {json.loads(line)["row"] for line in file}


def recipe_and_rows(state: Any) -> tuple[str | None, set[int]]:
    """What `SPLIT` holds; earlier versions wrote the rows alone."""
    return (None, set(state)) if isinstance(state, list) else (state["recipe_hash"], set(state["rows"]))


def feeding_order(rows: int, needed: int, seed: int) -> list[int]:
    """Row indices in the order in which they are fed: one seeded shuffle an epoch. The trainer reads it in sequence, so
    it is the same for every batch split and number of processes, unlike that of the library's own sampler."""
    shuffler = random.Random(seed)
    order: list[int] = []
    while len(order) < needed:
        epoch = list(range(rows))
        shuffler.shuffle(epoch)
        order += epoch
    return order[:needed]


def longest_first(order: list[int], lengths: list[int], step: int) -> list[int]:
    """The order with the rows of each step from long to short. Rows that are padded together then have similar lengths,
    and memory peaks at the beginning. A step learns from the same rows in any order."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [index for rows in steps for index in sorted(rows, key=lambda index: -lengths[index])]


# --- tokenizer ---
# The model's tokenizer, read so that llama.cpp gives the same ids.

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
# The fields of a tokenizer.json that decide which ids a text gets: of its model, and of each added token.
FLAGS = ("byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix", "fuse_unk", "ignore_merges")
MARKS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
PROBES = ("    two  words", " word", "1234 don't\n\n x", "<s>[INST] hi [/INST]", "<s>hi", "é🙂 你好")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer. Without one, transformers makes an empty one of the model's type."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def load_tokenizer(model: str, revision: str | None) -> Any:
    """The model's own tokenizer, with its chat template. Its attribute `ends` holds the ids at which answers end."""
    check_files(Path(model))
    if Path(model).is_dir() and not has_tokenizer(Path(model)):
        raise no_tokenizer(model, f"one of {', '.join(TOKENIZERS)} in the model folder", "none of them")
    with readable(model):
        tokenizer = read_tokenizer(model, revision)
    special = {*tokenizer.all_special_tokens}
    if len(tokenizer) <= len(special) and {*tokenizer.get_vocab()} <= special:  # listing a large one takes 0.1 s
        raise no_tokenizer(model, "a vocabulary", f"{len(tokenizer)} special tokens and nothing else")
    require_one_vocabulary(model, revision, tokenizer)
    if not tokenizer.chat_template:  # older processors kept it in a file that llama.cpp's converter reads too
        template = (model_document(model, revision, "chat_template.json") or {}).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    names = ("generation_config.json", "config.json")  # transformers reads the second without the first
    documents = (model_document(model, revision, name) for name in names)
    stated = next((document for document in documents if document), {}).get("eos_token_id")
    tokenizer.ends = set(stated) if isinstance(stated, list) else {stated, tokenizer.eos_token_id}
    tokenizer.unlisted_ends = frozenset()  # other ids at which rows end, added as the rows are encoded
    tokenizer.day = date.today()  # for templates that write the date; `main` sets that of an earlier start
    return tokenizer


def set_date(tokenizer: Any, written: Callable[[str], str]) -> None:
    """Makes `strftime_now` of the chat template call `written`, which gets the format of the time. transformers (5.23)
    gives a template the present time, and accepts no function of the caller."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokenizer.chat_template
    if isinstance(template, str) and "strftime_now" in template:
        _compile_jinja_template(template).environment.globals["strftime_now"] = written


def require_one_vocabulary(model: str, revision: str | None, tokenizer: Any) -> None:
    """Refuses a tokenizer.model with another vocabulary than the tokenizer.json beside it, which training uses. For
    most families that have both, llama.cpp's converter reads tokenizer.model."""
    pieces = model_file(model, revision, "tokenizer.model")
    if pieces is None or model_file(model, revision, "tokenizer.json") is None:
        return
    try:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=pieces)
    except (ImportError, RuntimeError):
        return  # the file is not of sentencepiece, with which the converter reads it; or sentencepiece is not here
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    marks = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
    for number in range(processor.get_piece_size()):
        piece = processor.id_to_piece(number)
        if vocabulary.get(piece) != number and number not in added and not any(is_mark(number) for is_mark in marks):
            raise Refused(
                f"tokenizer.model and tokenizer.json of {model} have different vocabularies",
                code="bad_tokenizer",
                expected="one vocabulary: training uses tokenizer.json, llama.cpp's converter tokenizer.model",
                got=f"{piece!r} is {number} in tokenizer.model and {vocabulary.get(piece)} in tokenizer.json",
                hint="restore the published files of the model, or remove the file that does not belong to it",
            )


def read_tokenizer(model: str, revision: str | None) -> Any:
    """The tokenizer with the ids of llama.cpp.

    llama.cpp makes the ids of tokenizer.json, whatever class tokenizer_config.json names (measured for each class of
    transformers 5.23 that a decoder uses). Classes such as LlamaTokenizer take the vocabulary of that file, and split
    text in a way of their own. If the two disagree, `tokenizer.read_as` says so.
    """
    # Not transformers.AutoTokenizer: skill-train puts its own class there for llama.cpp's converter.
    from transformers.models.auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    published = model_file(model, revision, "tokenizer.json")
    pieces = model_file(model, revision, "tokenizer.model") if published is None else None
    if pieces is not None:
        return by_scores(tokenizer, pieces)
    # TokenizersBackend uses tokenizer.json unchanged. Other fast classes build it anew.
    if published is not None and tokenizer.is_fast and type(tokenizer).__name__ != "TokenizersBackend":
        tokenizer = as_published(tokenizer, published, model, revision)
    return with_prefix_of_llama_cpp(tokenizer)


def by_scores(tokenizer: Any, file: str) -> Any:
    """The tokenizer of a model that has only a tokenizer.model, as llama.cpp reads that file: it joins pieces by their
    scores, and puts a space before the text if the file says so. transformers 5.23 joins them by their ids, and decides
    about the space by the class."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import decoders, models, normalizers

    model_proto = sentencepiece_model_pb2.ModelProto.FromString(Path(file).read_bytes())
    if not tokenizer.is_fast or model_proto.trainer_spec.model_type != model_proto.trainer_spec.BPE:
        return tokenizer
    before = {text: ids_of(tokenizer, text) for text in PROBES}
    vocab = {piece.piece: number for number, piece in enumerate(model_proto.pieces)}
    unknown = next((piece.piece for piece in model_proto.pieces if piece.type == piece.UNKNOWN), None)
    bytes_too = any(piece.type == piece.BYTE for piece in model_proto.pieces)
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE(
        vocab=vocab, merges=merges_of(model_proto, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too
    )
    space = model_proto.normalizer_spec.add_dummy_prefix
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(steps if space else steps[1:]), None
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(joined if space else joined[:-1])
    differing = next((text for text, ids in before.items() if ids_of(tokenizer, text) != ids), None)
    if differing is not None:
        tokenizer.read_as = (
            f"the tokenizer is read from tokenizer.model by the scores of its pieces, which is how llama.cpp reads it: "
            f"transformers' {type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return tokenizer


def merges_of(model_proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first."""
    merges = []
    for piece in model_proto.pieces:
        if piece.type == piece.NORMAL:
            parts = ((piece.piece[:cut], piece.piece[cut:]) for cut in range(1, len(piece.piece)))
            merges += [(-piece.score, left, right) for left, right in parts if left in vocab and right in vocab]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def as_published(tokenizer: Any, file: str, model: str, revision: str | None) -> Any:
    """The tokenizer itself if it does all that its tokenizer.json says, or else the tokenizer of that file."""
    from transformers import PreTrainedTokenizerFast

    document = json.loads(Path(file).read_text(encoding="utf-8"))
    added = {token["id"]: [token[name] for name in MARKS] for token in document["added_tokens"]}
    done = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    same = added == {number: [getattr(token, name) for name in MARKS] for number, token in done.items()}
    if same and splitting(without_words(document)) == splitting(tokenizer.backend_tokenizer):
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(model, revision=revision, trust_remote_code=False)
    differing = next((text for text in PROBES if ids_of(plain, text) != ids_of(tokenizer, text)), None)
    if differing is not None:
        plain.read_as = (
            f"the tokenizer is read as tokenizer.json has it, which is how llama.cpp reads it: transformers' "
            f"{type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return plain


def without_words(document: JsonObject) -> Any:
    """The tokenizer of a tokenizer.json, without its vocabulary, which transformers always takes from the file."""
    from tokenizers import Tokenizer

    empty: JsonObject = {"vocab": {}, "merges": []} if document["model"].get("type") == "BPE" else {}
    return Tokenizer.from_str(json.dumps({**document, "model": {**document["model"], **empty}, "added_tokens": []}))


def splitting(backend: Any) -> list[Any]:
    """The settings, beside vocabulary and merges, that decide which ids a text gets. An empty prefix or suffix of
    pieces, which Qwen's class sets, counts as none."""
    steps = [step and step.__getstate__() for step in (backend.normalizer, backend.pre_tokenizer)]
    return [type(backend.model), *steps, *(getattr(backend.model, name, None) or None for name in FLAGS)]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def with_prefix_of_llama_cpp(tokenizer: Any) -> Any:
    """Puts a space before text that follows a special token, if the tokenizer puts one only before the first word. For
    pieces of sentencepiece, llama.cpp does so before each stretch of text between special tokens."""
    if not tokenizer.is_fast:
        return tokenizer
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    step = backend.pre_tokenizer
    splitter = json.loads(step.__getstate__()) if step else {}
    is_sentencepiece = type(backend.model).__name__ == "BPE" and backend.model.byte_fallback
    if not is_sentencepiece or backend.normalizer or splitter.get("prepend_scheme", "never") == "never":
        return tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    if splitter["prepend_scheme"] == "first":
        tokenizer.read_as = (
            "text after a special token begins with a space, as llama.cpp reads this vocabulary; "
            "tokenizer.json puts one before the first word only"
        )
    return tokenizer


def no_tokenizer(model: str, expected: str, got: str) -> Refused:
    return Refused(
        f"{model} has no tokenizer",
        code="bad_tokenizer",
        expected=expected,
        got=got,
        hint="download the whole model, or copy the tokenizer files from its base model",
    )


def begins_itself(text: str, bos: str | None) -> bool:
    """Whether a text begins with the start token, as rendered rows do, so that none is to be put before it."""
    return bool(bos) and text.startswith(str(bos))


# --- encode ---
# Tokens and labels: what is fed, and which part of it is trained.

# Time limits of a chat template; a published one takes less than a millisecond a conversation. The first limits each
# rendering, and all of them together. To the limit of all, a rendering and each of its characters add the other two.
TEMPLATE_SECONDS, SECONDS_A_RENDERING, SECONDS_A_CHARACTER = 10.0, 0.003, 2e-6
WITHOUT_TEMPLATE = (
    "the rows are trained without the model's chat template, so in a chat the model sees a different prompt "
    "from the one it was trained on"
)
ALREADY_RENDERED = "the rows hold the marks of the model's chat template, so a chat is asked with it"
ANOTHER_PROMPT = (
    "the chat template asks for an answer with another prompt than it writes before the answers of rows (a <think> or "
    "a system message more): in use the model sees a prompt that it was not trained on"
)
NOT_RENDERED = "the chat template leaves out {}, so the model is trained without them"
NO_TOOLS = NOT_RENDERED.format("the descriptions of tools")
BEGINS_OTHERWISE = (
    "the rows are trained without the token that begins each text, which llama-server and Ollama put before each "
    "prompt: begin the chat template with {{ bos_token }}"
)
ENDS_PROMPTS = (
    "the tokenizer puts an end token behind each text, and so do llama-server and Ollama behind each prompt: take it "
    "out of tokenizer.json (post_processor), and set add_eos_token to false"
)
SYSTEM_UNREAD = (
    "the system messages that stand beside the prompts are not read, because this model has no chat template: write "
    "them into the prompts if the answers need them"
)
WRITES_DATE = (
    "the chat template writes the date: all rows are trained with that of the day on which the training begins, and in "
    "use the model sees another one"
)
LEFT_OUT_TRAINED = "loss_on: all trains whole rows, and with them the answers that the rows leave out (weight: 0)"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer: chat templates are programs of somebody else. Only the main thread
    can be interrupted, so there is no limit in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    before, timer_before = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, before)


def endless_template(model: str) -> Refused:
    """The refusal of a chat template that is too slow. It names the model, because the next row would be as slow."""
    return Refused(
        f"the chat template of {model} is too slow for the conversations",
        code="unsafe_file",
        expected=f"at most {TEMPLATE_SECONDS:g} seconds more than a plain template needs for the same rows",
        got="it did not finish in that time",
        hint="correct chat_template.jinja or tokenizer_config.json in the model's folder, or use another model",
    )


class Feeding(TypedDict):
    """The fields of a recipe that say how a row is fed."""

    data: str
    format: str
    columns: dict[str, str]
    loss_on: str
    max_length: int
    data_file: NotRequired[str | None]


class Encoder:
    """Turns rows into token ids and labels, with the model's own template and tokenizer."""

    def __init__(self, recipe: Feeding, tokenizer: Any, pictures: Pictures | None = None) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.pictures = pictures  # None: the rows are text
        self.asked = list[bool]()  # by answer of the last row: whether its prompt is in the text as a chat asks it
        self.across = ""  # in the last row, a token that begins in the prompt and ends in the answer
        self.decodes = False  # whether to decode each picture once, so that broken ones are found before the training
        self.leaves_out = True  # whether to ignore pictures in columns that are not read; else they are refused
        self.count = 0
        self.noted: list[str] = [tokenizer.read_as] if hasattr(tokenizer, "read_as") else []
        self.typed, self.row_notes = RowNotes(TYPED_INSIDE, TYPED_AT_END), RowNotes()
        self.patience = TEMPLATE_SECONDS  # seconds left for the chat template
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted(added | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self.special, self.end_of_turn = tuple(special), end_of_turn(special, tokenizer.eos_token)
        self.added = frozenset(tokenizer.added_tokens_decoder)
        self.own = frozenset(map(str, tokenizer.added_tokens_decoder.values()))
        if not tokenizer.is_fast:
            raise Refused("this model has no fast tokenizer", code="bad_tokenizer", expected="a tokenizer with offsets")

    @property
    def notes(self) -> list[str]:
        return [*self.noted, *self.typed.notes(self.count), *self.row_notes.notes(self.count)]

    def __call__(self, index: int, line: int, row: Row) -> EncodedRow:
        self.count += 1
        try:
            encoded = self.encoded(index, line, row)
            seen = encoded | {"tools": None} if NO_TOOLS in self.noted else encoded
            note = ACROSS_IN_CHAT if encoded["kind"] == "chat" else ACROSS
            across = [(note, f", {self.across!r}")] if self.across else []
            self.row_notes.add(line, [*findings(row, self.recipe["columns"], seen, self.own), *across])
            if encoded["kind"] == "chat" and self.control is not None:
                self.typed.add(line, typed_tokens(encoded["messages"], self.control))
            return encoded
        except Refused as refusal:
            rows = rows_named(self.recipe["data"], self.recipe.get("data_file"))
            refusal.error["message"] = f"line {line} of {rows}: {refusal.error['message']}"
            raise

    def encoded(self, index: int, line: int, row: Row) -> EncodedRow:
        columns = self.recipe["columns"]
        images: list[PictureSource] = []
        if not self.leaves_out:
            self.require_read(row)
        if self.pictures is not None:
            row, images = lift_pictures(row, columns)
        example = to_example(row, self.recipe["format"], columns)
        if images:
            require_places(example, len(images))
        if example["kind"] != "chat" and is_filled(row.get(columns.get("system", ""))):
            self.note(SYSTEM_UNREAD)
        self.asked = [example["kind"] != "chat"]
        rendered, spans = self.chat_spans(example) if example["kind"] == "chat" else self.plain_spans(example)
        if self.recipe["loss_on"] == "all":
            spans = [(0, len(rendered))]
        fed, pictured = rendered, Pictured()
        if self.pictures is not None:
            fed, spans, pictured = self.pictures.fed(rendered, spans, images)
            if self.decodes:
                self.pictures.read(pictured)
        ids, labels = self.tokens(fed, spans, is_chat=example["kind"] == "chat")
        if example["kind"] == "chat" and example["trained_messages"][-1] == len(example["messages"]) - 1:
            self.look_for_stop(next((label for label in reversed(labels) if label != IGNORED), IGNORED))
        limit = self.recipe["max_length"]
        if self.pictures is not None:
            self.pictures.require_whole(ids, fed, limit)
        return {
            "row": index,
            "line": line,
            **example,
            **pictured,
            "rendered": rendered,
            "input_ids": ids[:limit],
            "labels": labels[:limit],
            "truncated": len(ids) > limit,
            "full_length": len(ids),
        }

    def require_read(self, row: Row) -> None:
        """Refuses a row with a picture, sound or film in a column that is not read: the plan was made from the first
        rows, and the text alone would teach something else."""
        column = media_beside(row, self.recipe["columns"], pictures=self.pictures is not None)
        if column is not None:
            raise Refused(
                f"the column {column!r} contains an image, audio or video; no row that the plan was made from had one",
                code="not_text",
                expected=f"nothing beside {', '.join(self.recipe['columns'].values())}",
                got=media_in(row[column]) or repr(row[column])[:80],
                hint="to train on the pictures, set images: true, format, and columns with this column as images; "
                "to train on the text alone, set format and only the columns of the text",
            )

    def tokens(self, rendered: str, spans: list[tuple[int, int]], *, is_chat: bool) -> tuple[list[int], list[int]]:
        """Ids of the whole text, and labels. A token is trained if a part of it lies in a trained span: after the
        prompt "is ", the token " four" is trained, although it begins with a space of the prompt.

        A template writes its own special tokens. Plain text gets the tokenizer's usual ones, unless it begins with the
        first of them, and an end token, which is trained so that the model learns to stop.
        """
        adds = not is_chat and not begins_itself(rendered, self.tokenizer.bos_token)
        encoded = self.tokenizer(rendered, add_special_tokens=adds, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        labels = labels_of(rendered, ids, encoded["offset_mapping"], spans, self.added)
        starts = [start for (start, _), asked in zip(spans, self.asked, strict=False) if asked]
        self.across = text_across(rendered, labels, encoded["offset_mapping"], starts)
        if not is_chat:
            if not ids or ids[-1] != self.end_token():
                ids, labels = [*ids, IGNORED], [*labels, IGNORED]
            ids[-1] = labels[-1] = self.end_token()  # an end token that the tokenizer appends itself is in no span
        return ids, labels

    def end_token(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise Refused(
                "the tokenizer has no end token", code="bad_tokenizer", hint="set eos_token in tokenizer_config.json"
            )
        return int(self.tokenizer.eos_token_id)

    def chat_spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation and the character spans of the assistant's answers, end token included."""
        if self.recipe["format"] in ("question_answer", "instruction"):
            self.require_unrendered(example["messages"])
        tools = example["tools"]
        messages, notes = as_taken(
            list(map(with_names, example["messages"])), lambda taken: self.try_render(taken, tools)
        )
        example["messages"] = messages
        rendered = self.render(messages, tools)
        self.require_calls(messages, tools, rendered)
        for note in (*notes, *python_notes(messages, tools, rendered), *left_out_thoughts(messages, rendered)):
            self.note(note)
        self.look_for_the_rest(example, rendered)
        if self.around[0] == self.tokenizer.bos_token_id and not begins_itself(rendered, self.tokenizer.bos_token):
            self.note(BEGINS_OTHERWISE)
        if self.around[1] == self.tokenizer.eos_token_id:
            self.note(ENDS_PROMPTS)
        if self.recipe["loss_on"] == "all":
            if any(message["role"] == "assistant" and is_left_out(message) for message in messages):
                self.note(LEFT_OUT_TRAINED)
            return rendered, []  # the whole text is trained, wherever the answers stand
        self.asked.clear()
        return rendered, [self.answer_span(example, rendered, i) for i in example["trained_messages"]]

    def require_calls(self, messages: list[Message], tools: Any, rendered: str) -> None:
        """Refuses calls of tools that the template does not write: all calls of an answer, or those after the first.
        The text is the same without such calls, and often an empty answer would be trained."""
        for index, message in enumerate(messages):
            for fewer, call in with_fewer_calls(message):
                if self.try_render([*messages[:index], fewer, *messages[index + 1 :]], tools) == rendered:
                    raise left_out_call(call)

    def look_for_the_rest(self, example: Example, rendered: str) -> None:
        """Notes that tools, or messages of a role such as system, do not stand in the text. Templates that do not know
        them leave them out without an error, and some write the calls of an answer without its text."""
        messages, tools = example["messages"], example["tools"]
        if tools and self.try_render(messages, None) == rendered:
            self.note(NO_TOOLS)
        for index, message in enumerate(messages):
            text, role = message["content"], message["role"]
            if not isinstance(text, str) or text.strip() in rendered:
                continue
            marked = message | {"content": MARK}
            if self.try_render([*messages[:index], marked, *messages[index + 1 :]], tools) == rendered:
                calls = role == "assistant" and any(map(message.get, CALLS))
                if index in example["trained_messages"] and not calls:
                    raise left_out_answer()
                what = "the text of answers that call a tool" if calls else f"messages of the role {role}"
                self.note(NOT_RENDERED.format(what))

    def look_for_stop(self, last: int) -> None:
        """Notes that transformers does not stop at the special token that ends a row, as with some base models."""
        ends = getattr(self.tokenizer, "ends", None)
        token = self.tokenizer.added_tokens_decoder.get(last)
        if ends is not None and token is not None and token.special and last not in ends:
            self.tokenizer.unlisted_ends |= {last}
            self.note(
                f"the answers end with {token.content}, at which transformers and vLLM do not stop by the base's "
                f"generation_config.json: that of the merged or fully trained model gets {last} in eos_token_id"
            )

    def answer_span(self, example: Example, rendered: str, index: int) -> tuple[int, int]:
        """The span of one answer: its text, its calls of tools, and the token that ends the turn. It starts where the
        generation prompt ends, because from there on the model writes."""
        messages, tools = example["messages"], example["tools"]
        calls = any(map(messages[index].get, CALLS))
        before = self.render(messages[:index], tools, add_generation_prompt=True) if index else ""
        prefix = len(before) if rendered.startswith(before) else 0
        self.asked.append(prefix > 0)
        if before and not prefix and index == example["trained_messages"][-1]:
            self.note(ANOTHER_PROMPT)  # many templates write earlier turns in another way, without their thoughts
        span = None if calls else self.around_answer(example, rendered, index)
        if span is None:
            through = self.render(messages[: index + 1], tools)
            # Some templates always open another answer behind it (Command R7B), as at the end of `before`.
            answer, eos, opening = through.rpartition(self.tokenizer.eos_token or MARK)
            through = answer + eos if before.endswith(opening) else through.rstrip()
            whole = rendered.startswith(through)
            span = self.around_calls(example, rendered, index) if calls and not (prefix and whole) else None
            begin = prefix or (self.start_of_calls(example, rendered, index) if calls and span is None else 0)
            if span is None and begin and whole:
                return begin, len(through) if through.endswith(self.special) else self.turn_end(rendered, len(through))
        if span is None:
            raise Refused(
                "the answers cannot be trained alone, because the chat template does not show where they are",
                code="template_mismatch",
                expected="a template that renders each answer in one piece",
                hint="set loss_on: all in the recipe to train on the whole conversation",
            )
        start, end = span
        return (prefix if 0 < prefix < end else start), self.turn_end(rendered, end)

    def around_answer(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """The span of the answer without the token that ends it: what changes in the text when marks take the place of
        its text and thoughts, and its calls are left out. None if the row itself has the mark."""
        for content in marked_texts(example["messages"][index]["content"]) if MARK not in rendered else ():
            text = self.render(*with_marks(example, index, content, CALLS))
            (head, mark, _), tail = text.partition(MARK), text.rpartition(MARK)[2]
            if mark and rendered.startswith(head) and rendered.endswith(tail):
                return len(head), len(rendered) - len(tail)
            if text == rendered:
                raise left_out_answer()
        return None

    def start_of_calls(self, example: Example, rendered: str, index: int) -> int:
        """Where an answer with calls begins; 0 if its text does not stand before them, or no token alone ends it."""
        until: Any = example | {"messages": example["messages"][: index + 1]}
        with_calls, alone = (self.try_render(*with_marks(until, index, MARK, keys)) or "" for keys in ((), CALLS))
        head, mark, tail = alone.partition(MARK)
        ends = mark and self.end_of_turn and self.end_of_turn.fullmatch(tail.rstrip())
        return len(head) if ends and with_calls.startswith(head + MARK) and rendered.startswith(head) else 0

    def around_calls(self, example: Example, rendered: str, index: int) -> tuple[int, int] | None:
        """As `around_answer`, for an answer with calls of a template that writes the last message in another way (Qwen3
        thinks there). None if the span changes with later messages: some templates put the tool's answer into it."""
        messages = example["messages"]
        others = [message | {"content": MARK} for message in messages[index + 1 :]]
        try:
            span = self.around_answer(example, rendered, index)
            other = self.render([*messages[: index + 1], *others], example["tools"])
        except Refused as refusal:  # a tool that answers without a call
            if refusal.error["code"] == "unsafe_file":
                raise
            return None
        return span if span is not None and span[0] < span[1] and other.startswith(rendered[: span[1]]) else None

    def turn_end(self, rendered: str, end: int) -> int:
        match = self.end_of_turn.match(rendered, end) if self.end_of_turn else None
        if match is None:
            self.note("the template has no end token after an answer: the model will not learn where to stop")
            return end
        return match.end()

    def try_render(self, messages: list[Message], tools: Any) -> str | None:
        """The conversation as the template writes it; None where the template refuses it."""
        try:
            return self.render(messages, tools)
        except Refused as refusal:
            if refusal.error["code"] == "unsafe_file":
                raise
            return None

    def render(self, messages: list[Message], tools: Any, *, add_generation_prompt: bool = False) -> str:
        import jinja2

        if not self.tokenizer.chat_template:
            raise Refused(
                "the model has no chat template, so a conversation cannot be rendered",
                code="no_chat_template",
                expected="a model with a chat template (most Instruct models), or rows of plain text",
                hint="use the model's Instruct version, or data with `prompt` and `completion`, or `text`",
            )
        # The template's own refusal, and what its expressions raise.
        errors = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
        started = time.thread_time()
        try:
            with limited(max(0.001, min(TEMPLATE_SECONDS, self.patience))):
                set_date(self.tokenizer, self.written_day)
                return str(
                    self.tokenizer.apply_chat_template(
                        self.in_parts(messages),
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                    )
                )
        except TimeoutError:
            raise endless_template(self.tokenizer.name_or_path) from None
        except (*errors, TypeError, ValueError) as error:
            raise Refused(
                f"the model's chat template rejects these messages: {error}",
                code="template_mismatch",
                got=" ".join(message["role"] for message in messages),
                hint=IN_ORDER if type(error) is jinja2.TemplateError else TEMPLATE_FAILS,  # the first: raise_exception
            ) from None
        finally:
            size = sum(len(message["content"]) for message in messages if isinstance(message.get("content"), str))
            earned = SECONDS_A_RENDERING + SECONDS_A_CHARACTER * size
            self.patience += earned - (time.thread_time() - started)

    def written_day(self, form: str) -> str:
        """The answer to a template that asks for the time: the day alone, so that a row is always the same text."""
        self.note(WRITES_DATE)
        return str(getattr(self.tokenizer, "day", date.today()).strftime(form))

    def in_parts(self, messages: list[Message]) -> list[Any]:
        """The messages as the template reads them. Templates of vision models expect parts, also of text alone."""
        if self.pictures is None:
            return list(messages)
        return [message | {"content": self.pictures.parts(message["content"])} for message in messages]

    def plain_spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        if self.tokenizer.chat_template:
            text = example["text"] if example["kind"] == "text" else example["prompt"]
            before = self.before_question()
            self.note(ALREADY_RENDERED if before and before in text else WITHOUT_TEMPLATE)
            example["without_template"] = self.recipe["format"] in ("completion", "text")  # these two ask for it
        if example["kind"] == "text":
            return example["text"], [(0, len(example["text"]))]
        rendered = example["prompt"] + example["completion"]
        return rendered, [(len(example["prompt"]), len(rendered))]

    def require_unrendered(self, messages: list[Message]) -> None:
        """Refuses a question that was rendered with the template before: it would be rendered twice."""
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        mark = next((mark for mark in self.template_marks if mark in question), None)
        if mark is not None:
            raise Refused(
                f"a question contains {mark!r}, which the model's chat template adds itself",
                code="template_mismatch",
                expected="a question without the markers of a template",
                got=question[:80],
                hint="set format: completion in the recipe to train rows that are already rendered",
            )

    @cached_property
    def template_marks(self) -> list[str]:
        """The text that the template writes right before a question, and every special token before it."""
        last = self.before_question()
        signed = {last} if last[:1] in ("<", "[") else set()
        return sorted({token for token in self.special if token and token in self.head} | signed)

    @cached_property
    def control(self) -> re.Pattern[str] | None:
        """A pattern for the tokens with which this template begins or ends a turn or a text; None if there are none."""
        turns: list[Message] = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        written = [self.try_render(turns, None), self.try_render([{"role": "system", "content": MARK}, *turns], None)]
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        ends = [added[end].content for end in getattr(self.tokenizer, "ends", ()) if end in added]
        texts = [self.tokenizer.bos_token, self.tokenizer.eos_token, *ends, *written]
        return control_tokens(added.values(), " ".join(filter(None, texts)))

    @cached_property
    def around(self) -> tuple[int, int]:
        """The first and the last token of a plain text, which may be tokens that the tokenizer adds."""
        ids = self.tokenizer("a").input_ids or [IGNORED]  # a vocabulary may lack the letter
        return ids[0], ids[-1]

    def before_question(self) -> str:
        """The line that the template writes right before a question; empty if it writes none."""
        return self.head.removeprefix(self.tokenizer.bos_token or "").strip().rpartition("\n")[2]

    @cached_property
    def head(self) -> str:
        """What the template writes before a question; empty for a template that needs more than a question."""
        try:
            return self.render([{"role": "user", "content": MARK}], None).partition(MARK)[0]
        except Refused:
            return ""

    def note(self, text: str) -> None:
        if text not in self.noted:
            self.noted.append(text)


# --- model ---
# The model: how it is loaded, which part of it trains, and how its answers are scored.

# The softmax of a chunk of logits is computed in parts of so many elements, which stay in the cache.
SOFTMAX_AT_ONCE = 1_000_000


def trained_types(model: Any, placement: Placement) -> dict[str, Any]:
    """The torch type of each weight that trains, by name. Makes it float32, unless the plan computes in bfloat16.

    TRL (1.16) makes the adapter of a quantized base bfloat16 in any case. PEFT (0.21) leaves a module that trains whole
    in the type of the base. On CUDA, the scaler of float16's gradients accepts neither.
    """
    import torch

    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in trained.values():
        if placement["dtype"] != "bfloat16":
            weight.data = weight.data.to(torch.float32)
    return {name: weight.dtype for name, weight in trained.items()}


def require_float32(optimizer: Any) -> None:
    """Refuses, before the first step, an optimizer that trains other weights than float32: their gradients cannot be
    scaled for float16."""
    types = [str(weight.dtype) for group in optimizer.param_groups for weight in group["params"]]
    others = Counter(name.removeprefix("torch.") for name in types if name != "torch.float32")
    if others:
        raise Refused(
            "trainable weights are not float32, and float16 would lose their gradients",
            code="unsafe_precision",
            exit_code=EXIT_FAILED,
            expected="float32, which this program sets",
            got=", ".join(f"{count} of {len(types)} weights are {name}" for name, count in others.items()),
            hint="use --dtype float32, or install the versions at the top of this program",
        )


def keep_input_types(model: Any) -> None:
    """Leaves it to autocast in which type an adapter computes. PEFT (0.21) makes the input of each layer float32, and
    autocast makes it 16-bit again. The values are the same, but each layer copies its input twice: a fifth of the GPU's
    time on an H100. Not for DoRA, which multiplies in float32 too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def score_trained_tokens_only(model: Any, *, fused: bool) -> None:
    """Scores the trained positions alone, some megabytes of logits at a time. On processors without Triton, TRL 1.16
    projects every position onto the vocabulary, trained or not: the same loss takes several times as long on a CPU.

    The model's own forward pass runs without the product with its head, so the balancing loss of a mixture is its own
    too. TRL 1.16 reads that from `config.num_experts`, which Granite's lack, and asks Llama 4 for a `last_hidden_state`
    that it does not return. Where TRL's own fused head is fast (`fused`) and can score the model, it stays.
    """
    import functools
    import types

    import torch
    from transformers.utils import ModelOutput

    head, config = model.get_output_embeddings(), model.config.get_text_config()
    names = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
    changes_logits = any(getattr(config, name, None) is not None for name in names)
    plain_head = not changes_logits and type(head) is torch.nn.Linear and head.bias is None
    experts = hasattr(config, "output_router_logits")
    trl_fails = model.base_model is model or (experts and not hasattr(config, "num_experts"))
    if not trl_fails and (fused or not plain_head):
        return
    original, log_probs = model.forward, log_probs_function()

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"} | {"use_cache": False}
        following = labels[:, 1:]
        mask = following != IGNORED
        if plain_head:
            outputs, hidden = without_product(head, functools.partial(original, *args, **kwargs))
            hidden, kind = hidden[:, :-1][mask], hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
            scored = log_probs.apply(hidden.to(dtype), head.weight.to(dtype), following[mask])
        else:
            outputs = original(*args, **kwargs)
            logits = outputs.logits[:, :-1][mask].float()
            scored = torch.log_softmax(logits, dim=-1).gather(1, following[mask][:, None]).squeeze(1)
        none = scored.detach().new_zeros(mask.shape)
        spread = none.masked_scatter(mask, scored)
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            aux_loss = none.new_zeros(())  # this model's own forward pass has no balancing loss
        return ModelOutput(  # DistributedDataParallel finds in it which weights were used
            loss=None, log_probs=spread, entropy=none, is_top1=none, label_mask=mask, aux_loss=aux_loss
        )

    model.forward = types.MethodType(forward, model)


def without_product(head: Any, forward: Callable[[], Any]) -> tuple[Any, Any]:
    """The outputs of the forward pass without the product of its head, and the hidden states that the head received."""
    hidden_states = []

    def keep(hidden: Any) -> Any:
        hidden_states.append(hidden)
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    head.forward = keep
    try:
        outputs = forward()
    finally:
        del head.forward
    return outputs, hidden_states[-1]


def log_probs_function() -> Any:
    import torch

    class LogProbs(torch.autograd.Function):  # type: ignore[misc]
        """log p of each label. hidden [tokens, width], weight [vocabulary, width], labels [tokens] -> [tokens].

        d log p / d logits = one at the label - softmax(logits). If the weight is frozen, the gradient of `hidden` is
        computed in the forward pass, while the logits of a chunk exist. If it trains, the backward pass computes the
        logits again.
        """

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, labels: Any) -> Any:
            ctx.trained = ctx.needs_input_grad[1]
            log_p = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
            gradient = None if ctx.trained else torch.empty_like(hidden)
            for at in chunks(labels, weight, LOGITS_AT_ONCE):
                logits = hidden[at] @ weight.T
                for part in chunks(logits, weight, SOFTMAX_AT_ONCE):
                    some = logits[part].float()
                    total = torch.logsumexp(some, dim=1, keepdim=True)
                    log_p[at][part] = (some.gather(1, labels[at][part, None]) - total).squeeze(1)
                    if gradient is not None:
                        logits[part] = some.sub_(total).exp_()
                if gradient is not None:
                    gradient[at] = weight[labels[at]] - logits @ weight
            ctx.save_for_backward(*((hidden, weight, labels) if ctx.trained else (gradient,)))
            return log_p

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if not ctx.trained:
                (gradient,) = ctx.saved_tensors
                return (gradient * grad[:, None].to(gradient.dtype)), None, None
            hidden, weight, labels = ctx.saved_tensors
            to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
            for at in chunks(labels, weight, LOGITS_AT_ONCE):
                change = torch.softmax((hidden[at] @ weight.T).float(), dim=1).neg_()
                change.scatter_add_(1, labels[at, None], torch.ones_like(change[:, :1]))
                change *= grad[at, None]
                to_hidden[at] = change.to(weight.dtype) @ weight
                to_weight.addmm_(change.T, hidden[at].float())
            return to_hidden, to_weight.to(weight.dtype), None

    def chunks(tokens: Any, weight: Any, elements: int) -> Iterator[slice]:
        rows = max(1, elements // weight.shape[0])
        return (slice(start, start + rows) for start in range(0, len(tokens), rows))

    return LogProbs


def attention_kernel(recipe: Recipe, kernel: str, config: Any) -> str:
    """The kernel of the plan, or eager if the model's class does not support it. torch's fused attention supports
    neither the capped scores of Gemma 2 nor the sinks of gpt-oss."""
    built = model_class(recipe)._model_mapping.get(type(config), None)
    if kernel != "sdpa" or built is None or built._supports_sdpa:
        return kernel
    event("note", text=f"eager attention in place of sdpa: {built.__name__} has no fused kernel")
    return "eager"


def model_class(recipe: Recipe) -> Any:
    """The class that loads the model: with its vision tower where the rows have pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if recipe.get("images") else AutoModelForCausalLM


def load_model(recipe: Recipe, placement: Placement) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    # A frozen base has the type of the computation. Weights that train are float32: a step that moves a bfloat16 by
    # less than 1/256 of it changes nothing. `pure_bf16` accepts that.
    in_full = is_full(recipe) and not recipe["pure_bf16"]
    dtype = torch.float32 if in_full else getattr(torch, placement["dtype"])
    quantization = None
    if recipe["load_in_4bit"]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # FSDP shards only floating point weights, so with it the 4-bit values are stored in numbers of that type.
            bnb_4bit_quant_storage=dtype if placement["strategy"] == "fsdp" else torch.uint8,
        )
    if run_id() is not None and not Path(recipe["model"]).is_dir():
        bring_weights(recipe)
    with readable(recipe["model"]):
        config = config_with(recipe["model"], recipe["revision"], placement["attn_implementation"])
        config._attn_implementation = attention_kernel(recipe, placement["attn_implementation"], config)
        model = model_class(recipe).from_pretrained(
            recipe["model"],
            revision=recipe["revision"],
            config=config,
            dtype=dtype,
            quantization_config=quantization,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model.config.use_cache = False  # a cache and gradient checkpointing cannot be used together
    return model


def bring_weights(recipe: Recipe) -> None:
    """Brings the weights of a base on the Hub to the cache: transformers 5.23 takes weights that it cannot fetch for
    missing ones. A job has fetched none yet."""
    from huggingface_hub import snapshot_download

    index = model_file(recipe["model"], recipe["revision"], INDEX)
    names = sorted(set(weight_map(Path(index)).values())) if index is not None else [SINGLE]
    snapshot_download(recipe["model"], revision=recipe["revision"], allow_patterns=names)


def read_back(recipe: Recipe, folder: Path, like: Any) -> Any:
    """The whole model that a folder holds, in the type and with the kernel of the model `like`."""
    config = config_with(str(folder), None, like.config._attn_implementation)
    options = {"dtype": like.dtype, "trust_remote_code": False, "use_safetensors": True}
    return model_class(recipe).from_pretrained(folder, config=config, **options)


def base_weights(recipe: Recipe) -> dict[str, FileDigest]:
    """The digests of the files from which `load_model` has read the weights, by name."""
    name, revision = recipe["model"], recipe["revision"]
    files = [model_file(name, revision, file) for file in (INDEX, SINGLE)]
    first = next((Path(file) for file in files if file is not None), None)
    paths = weight_files(first.parent) if first is not None else []
    digests = {path: file_digest(path) for path in paths if path.is_file()}
    for path, digest in digests.items():
        require_announced(path, digest["sha256"])
    return {path.name: digest for path, digest in digests.items()}


def is_full(recipe: Recipe) -> bool:
    """Whether every weight trains, instead of an adapter."""
    return recipe["finetuning_type"] == "full"


def check_optimizer(recipe: Recipe) -> None:
    """Refuses an unknown optimizer before the model is loaded. The trainer would refuse it afterwards."""
    from transformers.training_args import OptimizerNames

    names = [name.value for name in OptimizerNames]
    if recipe["optim"] not in names:
        close = difflib.get_close_matches(recipe["optim"], names, n=1)
        raise Refused(
            f"optim: {recipe['optim']!r} is unknown",
            code="bad_recipe",
            expected=", ".join(names),
            got=recipe["optim"],
            hint=f"did you mean {close[0]!r}?" if close else "leave optim out of the recipe for AdamW",
        )


def lora_config(recipe: Recipe, model: Any) -> Any:
    from peft import LoraConfig

    modules = list(model.named_modules(remove_duplicate=False))
    language = [each for each in modules if vision_part(each[0]) == "language"]
    sees = len(language) < len(modules)  # it has a vision part, which rows of text do not train
    for target in recipe["target_modules"]:
        check_target(target, language, model.get_output_embeddings())
    for name in recipe["modules_to_save"] or []:
        check_saved(name, modules)
    config = LoraConfig(
        r=recipe["lora_r"],
        lora_alpha=recipe["lora_alpha"],
        lora_dropout=recipe["lora_dropout"],
        target_modules=vision_targets(recipe, modules) if sees else recipe["target_modules"],
        modules_to_save=recipe["modules_to_save"],
        use_rslora=recipe["use_rslora"],
        use_dora=recipe["use_dora"],
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        bias="none",
        task_type="CAUSAL_LM",
    )
    check_experts(config, model)
    check_apart(config, modules)
    return config


def vision_targets(recipe: Recipe, modules: list[tuple[str, Any]]) -> str | list[str]:
    """The modules that get an adapter: the recipe's targets in the language model, and all linear layers of the other
    chosen parts. The names of targets alone would match the tower too, which has its own `q_proj`."""
    targets, parts = "|".join(map(re.escape, recipe["target_modules"])), recipe.get("lora_parts") or ["language"]
    if parts == ["language"]:
        return rf"(?=(?:.*\.)?(?:language_model|text_model)\.)(?:.*\.)?(?:{targets})"
    ends = re.compile(rf"(?:^|\.)(?:{targets})$")
    linear = [(name, vision_part(name)) for name, module in modules if is_linear(module)]
    for part in sorted(set(parts) - {found for _, found in linear}):
        raise Refused(
            f"the {part} of this model has no linear layer for an adapter",
            code="no_such_target",
            expected="parts with linear layers",
            got=part,
            hint=f"remove {part} from lora_parts, or train it whole: modules_to_save with the name of its module",
        )
    return [name for name, part in linear if part in parts and (part != "language" or ends.search(name))]


def check_experts(config: Any, model: Any) -> None:
    """Refuses targets by the names that experts had before transformers 5. PEFT makes one adapter for all experts of
    such names, in dense layers too, for which `skill-train merge` has no rule."""
    from peft.utils import transformers_weight_conversion

    convert = getattr(transformers_weight_conversion, "_convert_peft_config_moe", None)
    if convert is None:
        return
    trial = copy.deepcopy(config)
    try:
        convert(trial, model)
        of_experts = sorted(set(config.target_modules) - set(trial.target_modules))
    except ValueError:  # only some of the names that belong together are there
        of_experts = sorted(config.target_modules)
    if of_experts:
        raise Refused(
            f"the LoRA targets {', '.join(of_experts)} belong to experts, whose adapters cannot be merged",
            code="no_such_target",
            expected="modules outside the experts, such as those of the attention",
            got=", ".join(of_experts),
            hint="remove target_modules from the recipe to use the targets of the architecture",
        )


def check_target(target: str, modules: list[tuple[str, Any]], head: Any) -> None:
    """Refuses a target that PEFT does not find, that cannot have an adapter, or that could not be merged."""
    import torch

    matching = [module for name, module in modules if name == target or name.endswith(f".{target}")]
    other = next((m for m in matching if not is_linear(m) and not isinstance(m, torch.nn.Embedding)), None)
    got, hint = target, "set target_modules in the recipe, or leave it out to have it chosen by the architecture"
    if not matching:
        message = f"the LoRA target {target!r} is not a module of this model"
    elif other is not None:
        message, got = f"the LoRA target {target!r} is not a linear layer", f"{target} ({type(other).__name__})"
    elif any(module is head for module in matching):  # TRL 1.16 computes the loss with its weight alone
        message, hint = (
            f"the output head {target!r} cannot have an adapter",
            f"modules_to_save: [{target}] trains it whole",
        )
    else:
        return
    leaves = {name.rsplit(".", 1)[-1] for name, module in modules if is_linear(module) and module is not head}
    expected = f"one of: {', '.join(sorted(leaves - {'lm_head'}))}"
    raise Refused(message, code="no_such_target", expected=expected, got=got, hint=hint)


def check_saved(saved_name: str, modules: list[tuple[str, Any]]) -> None:
    """Refuses a name with which no module's name ends: PEFT, which saves every module that ends so, ignores it."""
    import torch

    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    saved = [module for name, module in modules if saved_name and name.endswith(saved_name)]
    trained = any(next(module.parameters(), None) is not None for module in saved)
    if trained and not any(isinstance(module, containers) for module in saved):
        return
    trainable = {
        name.rsplit(".", 1)[-1] for name, module in modules if next(module.parameters(recurse=False), None) is not None
    }
    raise Refused(
        f"modules_to_save: {saved_name!r} is not a trainable module of this model",
        code="no_such_target",
        expected=f"one of: {', '.join(sorted(trainable))}",
        got=saved_name or "''",
        hint="correct modules_to_save in the recipe, or remove it",
    )


def check_apart(config: Any, modules: list[tuple[str, Any]]) -> None:
    """Refuses `modules_to_save` that leave no module for an adapter, and those that would train a module whole together
    with its adapter: PEFT (0.21) leaves out a target only below a module that is named by whole parts of its name."""
    from peft.tuners.tuners_utils import check_target_module_exists

    ends = tuple(config.modules_to_save or ())
    adapted = [name for name, _ in modules if check_target_module_exists(config, name)]
    both = (n for n in adapted if any(part.endswith(ends) for part in accumulate(n.split("."), "{}.{}".format)))
    found = next(both, None) if adapted else "no module is left for an adapter"
    if found is not None:
        raise Refused(
            f"modules_to_save: {', '.join(ends)} trains whole what target_modules adapts",
            code="bad_recipe",
            expected="modules beside the targets, by whole parts of their names",
            got=found,
            hint="take these modules out of modules_to_save or out of target_modules in the recipe",
        )


def is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit", "Linear8bitLt")


def check_vocabulary(model: Any, data: Data) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    highest = max(max(row["input_ids"]) for row in data["train"] + data["held_out"])
    if highest >= size:
        raise Refused(
            "the tokenizer has a token without an embedding in the model",
            code="bad_tokenizer",
            expected=f"token ids below {size}",
            got=str(highest),
            hint="use the tokenizer that belongs to the model",
        )


# --- watch ---
# Watches a training: checkpoints, a line a step, and the end of a run that has gone wrong.

TOKENS = "rows_sha256"  # under `data` in environment.json: the digest of the rows as they are fed
NEEDED = {"step", "loss", "tokens", "seconds", "tokens_per_second"}  # keys of a whole line of an earlier start
# A pipe on standard input ties the processes of a run to the command that started them. The system closes it when that
# command ends in any way, and a launcher passes it on to all its processes.
PARENT_GONE = threading.Event()
ROWS = ("samples.jsonl", "held_out.jsonl")  # every run directory has them before its training begins
TRAINING = threading.Event()  # set while a step can end with a checkpoint


def watch_standard_input(folder: Path) -> None:
    """Watches standard input in a thread. Before training begins the process ends at once: there is nothing to save."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        silence()
        PARENT_GONE.set()
        if not TRAINING.is_set():
            tell_failure(abandoned("before its first step"), folder)
            os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True).start()


def abandoned(when: str) -> Refused:
    return Refused(
        f"training was stopped {when}, because the command that started it has ended",
        code="interrupted",
        exit_code=EXIT_FAILED,
        expected="a command that waits for the training; it was killed, or its terminal was closed",
        hint=again(),
    )


@contextmanager
def in_place(folder: Path) -> Iterator[None]:
    """Explains errors after the run directory was moved: every file is missing then."""
    try:
        yield
    except Exception:
        if folder.is_dir():
            raise
        raise moved(folder) from None


def moved(folder: Path) -> Refused:
    return Refused(
        f"{folder} was moved, renamed or removed while it was trained",
        code="not_a_run",
        expected="one folder until the training has ended",
        hint=f"move it back, then {again()}; or put its new name in place of RUN",
    )


def damaged_file(checkpoint: Path) -> str | None:
    """The first file of a complete checkpoint with other bytes than were written. Earlier versions wrote no digests."""
    digests = checkpoint / DIGESTS
    try:
        written = json.loads(digests.read_text(encoding="utf-8")) if digests.is_file() else {}
        return next((name for name in written if file_digest(checkpoint / name)["sha256"] != written[name]), None)
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError, RecursionError):  # also: it was moved away
        return DIGESTS


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint with its marker and all its bytes. Newer checkpoints are removed if they are torn, and
    renamed if they are damaged. Every process calls this, but only the main process changes files: a checkpoint that it
    removes is torn for the others too."""
    for path in numbered(folder):
        damaged = damaged_file(path) if is_complete(path) else COMPLETE
        if damaged is None:
            event("note", text=f"resuming from {path.name}")
            return path
        if damaged == COMPLETE:
            event("note", text=f"{path.name} is torn and is left out")
            if is_main_process():
                shutil.rmtree(path)
            continue
        aside = path.with_name(f"damaged-{path.name}")
        event("note", text=f"{path.name} is damaged ({damaged}), is left out, and is now {aside.name}")
        if is_main_process():
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    event("note", text="no complete checkpoint: starting from the first step")
    return None


def check_split(checkpoint: Path, placement: Placement) -> None:
    """Refuses a checkpoint of FSDP without FSDP, and the reverse: only FSDP reads what FSDP saves. The number of
    processes may change, which changes the dropout alone: each process draws its own."""
    if any(checkpoint.glob("pytorch_model_fsdp*")) != (placement["strategy"] == "fsdp"):
        raise Refused(
            f"{checkpoint.name} cannot be resumed with strategy {placement['strategy']}",
            code="another_run",
            expected="the plan that the run was started with",
            got="FSDP on one side only: it stores its state in parts",
            hint="resume with the original plan, or train into a new --run-dir",
        )
    processes = len(list(checkpoint.glob("rng_state*.pth")))
    if processes != placement["num_processes"]:
        text = f"{checkpoint.name} is of {processes} processes: rows and batches stay the same, dropout is drawn anew"
        event("note", text=text)


def first_day(folder: Path) -> date | None:
    """The day on which the run began. Its rows have that date, where the chat template writes one. Earlier versions
    recorded none."""
    path, read = folder / "environment.json", lambda earlier: earlier.get("day") and date.fromisoformat(earlier["day"])
    return from_earlier_start(path, read, "train into a new --run-dir") if path.is_file() else None


def check_inputs(folder: Path, weights: dict[str, FileDigest], rows_sha256: str) -> None:
    """Refuses to go on with other weights of the base, or other tokens of the rows, than those that `environment.json`
    of the earlier start names. Earlier versions recorded none."""
    path, anew = folder / "environment.json", "train into a new --run-dir"
    now = {name: digest["sha256"] for name, digest in weights.items()} | {TOKENS: rows_sha256}

    def recorded(earlier: Any) -> dict[str, str | None]:
        files: Any = earlier.get("base_weights") or weights
        rows = earlier.get("data", {}).get(TOKENS, rows_sha256)
        return {name: files.get(name, {}).get("sha256") for name in weights} | {TOKENS: rows}

    was = from_earlier_start(path, recorded, anew) if path.is_file() else now
    changed = [name for name in now if now[name] != was[name]]
    if changed:
        rows = "tokens of the rows (by the data, the chat template or a library)"
        what = rows if changed == [TOKENS] else "weights of the base model"
        raise Refused(
            f"the {what} have changed since this run began: {', '.join(changed)}",
            code="input_changed",
            expected=f"the digest {was[changed[0]]!s:.12}… of environment.json",
            got=f"sha256 {now[changed[0]]:.12}…",
            hint=f"put them back as they were, or {anew}",
        )


class Fed(TypedDict):
    """The data that one step was fed. `epoch`: how often all rows had been fed by then."""

    epoch: float
    tokens: int
    trained_tokens: int


class StepLine(Fed):
    """One line of `metrics.jsonl`."""

    step: int
    steps: int
    start: NotRequired[int]  # which start of the program made the step
    job: NotRequired[str | None]  # id in Hugging Face Jobs; the next job of a run may have another machine
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: float | None
    tokens_per_second: float | None
    memory_bytes: dict[str, int] | None  # the highest use so far, by kind


class Watch:
    """Writes a line a step, marks complete checkpoints, and stops a run that has gone wrong."""

    def __init__(self, folder: Path, data: Data, recipe: Recipe, checkpoint: Path | None, *, keep: int) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.data, self.recipe, self.keep = data, recipe, keep
        self.problem: Refused | None = None
        self.recipe_hash: str | None = None  # of the plan
        self.interrupted = False
        self.parent = os.getppid()
        self.step_started = time.monotonic()
        self.baseline_bytes: dict[str, int] = {}
        self.peak_bytes: dict[str, int] = {}
        self.lines = self.kept_lines(checkpoint) if checkpoint else []
        self.start = 1 + max((line.get("start", 1) for line in self.lines), default=0)
        self.losses = [line["loss"] for line in self.lines if line["loss"] is not None]
        if is_main_process():
            write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in self.lines))

    def kept_lines(self, checkpoint: Path) -> list[StepLine]:
        """The lines of the steps that the checkpoint holds; later steps will be made again. A lost line is replaced by
        the trainer's own log, which has losses and no times."""

        def of_trainer(state: Any) -> dict[int, StepLine]:
            logged = {entry["step"]: entry for entry in state["log_history"] if "loss" in entry}
            return {step: self.lost_line(step, state["max_steps"], entry) for step, entry in logged.items()}

        lines = from_earlier_start(checkpoint / "trainer_state.json", of_trainer, without(checkpoint))
        for text in self.metrics.read_bytes().splitlines() if self.metrics.is_file() else ():
            line = json_object(text)
            if line is None or not line.keys() >= NEEDED:  # a kill cut it in two
                break
            lines[line["step"]] = line
        held_lines = [lines[step] for step in sorted(lines) if step <= step_of(checkpoint)]
        self.require_same_rows(checkpoint, held_lines)
        return held_lines

    def lost_line(self, step: int, steps: int, logs: dict[str, float]) -> StepLine:
        fed = self.fed(step)
        return {
            "step": step,
            "steps": steps,
            "start": 1,
            "loss": number(logs.get("loss")),
            "grad_norm": number(logs.get("grad_norm")),
            "learning_rate": number(logs.get("learning_rate")),
            "epoch": fed["epoch"],
            "tokens": fed["tokens"],
            "trained_tokens": fed["trained_tokens"],
            "seconds": None,
            "tokens_per_second": None,
            "memory_bytes": None,
        }

    def require_same_rows(self, checkpoint: Path, lines: list[StepLine]) -> None:
        """Refuses to continue with another split: trained rows would count as new ones."""
        for line in lines:
            fed = self.fed(line["step"])
            was = {name: line.get(name, value) for name, value in fed.items()}
            if was != fed:
                raise Refused(
                    f"{checkpoint.name} was trained on different rows than this run would use",
                    code="another_run",
                    expected=f"step {line['step']} with {was['tokens']} tokens in epoch {was['epoch']}",
                    got=f"{fed['tokens']} tokens in epoch {fed['epoch']}",
                    hint="resume with the version that started the run, or train into a new --run-dir",
                )

    def callback(self) -> Any:
        from transformers import TrainerCallback

        watch = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
                if args.fp16:
                    require_float32(parts["optimizer"])
                watch.on_start(parts["optimizer"], parts["lr_scheduler"])

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.step_started = time.monotonic()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if watch.asked_to_stop(args.device):
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
                if "loss" in logs and not watch.on_loss(state.global_step, state.max_steps, logs):
                    control.should_save, control.should_training_stop = False, True

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                wait_for_all()  # each process writes a part of the checkpoint
                watch.mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        return Callback()

    def on_start(self, optimizer: Any, scheduler: Any) -> None:
        """Adds the optimizer and its schedule to the recorded arguments. The trainer creates them only now."""
        record = self.metrics.with_name("environment.json")
        if is_main_process() and record.is_file():
            recorded = json.loads(record.read_text(encoding="utf-8"))
            built = {"optimizer": built_optimizer(optimizer), "schedule": built_schedule(scheduler)}
            write_json(record, recorded | built)

    def on_loss(self, step: int, steps: int, logs: dict[str, float]) -> bool:
        """Records one step. False when the run must stop."""
        fed, seconds = self.fed(step), time.monotonic() - self.step_started
        loss, grad_norm = float(logs["loss"]), number(logs.get("grad_norm"))
        bad = self.bad_loss(step, loss, grad_norm)
        self.problem = bad or self.problem  # an interruption alone still saves its checkpoint
        line: StepLine = {
            "step": step,
            "steps": steps,
            "start": self.start,
            "job": os.environ.get("JOB_ID"),
            "loss": number(loss),
            "grad_norm": grad_norm,
            "learning_rate": number(logs.get("learning_rate")),
            **fed,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(fed["tokens"] / seconds, 1) if seconds > 0 else None,
            "memory_bytes": self.memory(),
        }
        self.lines.append(line)
        self.require_folder()
        if is_main_process():
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            event("step", **line)
        return bad is None

    def require_folder(self) -> None:
        """Refuses to go on in another folder of the same name, which libraries make after the run was moved."""
        if is_main_process() and not any((self.metrics.with_name(name)).is_file() for name in ROWS):
            raise moved(self.metrics.parent)

    def fed(self, step: int) -> Fed:
        batch, rows = self.recipe["effective_batch_size"], self.data["train"]
        read = [rows[i] for i in self.data["order"][(step - 1) * batch : step * batch]]
        return {
            "epoch": round(step * batch / len(rows), 4),
            "tokens": sum(len(row["input_ids"]) for row in read),
            "trained_tokens": sum(trained_tokens(row) for row in read),
        }

    def bad_loss(self, step: int, loss: float, grad_norm: float | None) -> Refused | None:
        """The refusal of a loss that shows a failed training: NaN, infinite, exactly 0 at once, a gradient of 0,
        or above 20 nats and four times the first loss. A loss that falls to 0 was learned, and has a small gradient."""
        self.losses.append(loss)
        first = self.losses[0]
        if math.isnan(loss) or math.isinf(loss):
            symptom, causes = f"is {loss}", "float16 or bfloat16 overflow, a learning rate too high, rows too long"
        elif loss == first == 0.0:
            symptom, causes = "is exactly 0", "every label masked, or answers cut away by max_length"
        elif loss > 4 * first and loss > 20:
            symptom, causes = f"exploded to {loss:.3g}", "a learning rate too high"
        elif grad_norm == 0.0:  # norms keep the loss of a broken model finite, but it learns nothing any more
            symptom, causes = "has a gradient of exactly 0", "a learning rate too high"
        else:
            return None
        return Refused(
            f"the loss {symptom} at step {step}: {causes}",
            code="bad_loss",
            exit_code=EXIT_FAILED,
            expected="a finite loss above 0",
            got=f"{loss} (first loss {first:.4g})",
            hint="dtype float32, half the learning_rate, or a shorter max_length; checkpoints already saved are kept",
        )

    def memory(self) -> dict[str, int]:
        """The highest number of bytes in use so far, by kind; for `mps` the current number, because it has no peak. The
        first answer becomes the baseline."""
        import torch

        now = {"rss": peak_rss_bytes()}
        if torch.cuda.is_available():
            now["cuda"] = torch.cuda.max_memory_allocated()
        if torch.backends.mps.is_available():
            now["mps"] = torch.mps.driver_allocated_memory()
        self.baseline_bytes = self.baseline_bytes or now
        for name, value in now.items():
            self.peak_bytes[name] = max(value, self.peak_bytes.get(name, 0))
        return now

    def mark_complete(self, checkpoint: Path) -> None:
        """Adds the recipe, the rows that are held out and the marker, and removes older checkpoints."""
        if is_main_process() and checkpoint.is_dir():
            rows = [row["row"] for row in self.data["held_out"]]
            write_json(checkpoint / SPLIT, {"recipe_hash": self.recipe_hash, "rows": rows})
            share_weights(checkpoint, checkpoint / SPLIT)
            mark(checkpoint)
            self.remove_older(checkpoint)
            event("checkpoint", name=checkpoint.name)

    def remove_older(self, checkpoint: Path) -> None:
        """Removes older checkpoints, once the newest has its marker. The trainer itself (transformers 5.23) would
        remove them earlier, and by time: after the clock was set back, it would remove the newest."""
        before = [path for path in numbered(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
        for path in before[self.keep - 1 :]:
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)

    def asked_to_stop(self, device: Any) -> bool:
        """Whether a signal reached any of the processes: all must stop after the same step, or the rest would wait for
        ever. A process whose launcher was killed notices it by another parent."""
        alone = "LOCAL_RANK" in os.environ and os.getppid() != self.parent
        if any_process(self.interrupted or alone or PARENT_GONE.is_set(), device):
            self.problem = self.problem or self.interruption()
            self.interrupted = True
        return self.interrupted

    def interruption(self) -> Refused:
        if PARENT_GONE.is_set():
            return abandoned("at a checkpoint")
        text = "training was interrupted; a checkpoint is saved"
        return Refused(text, code="interrupted", exit_code=EXIT_FAILED, hint=again())

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Lets Ctrl-C, SIGTERM and the closing of the terminal save a checkpoint after the current step and stop."""

        def stop(*_: Any) -> None:
            self.interrupted = True

        old = {number: signal.signal(number, stop) for number in stop_signals()}
        TRAINING.set()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def built_optimizer(optimizer: Any) -> dict[str, object]:
    """The class and the groups of an optimizer, without `lr`, which changes with each step."""
    inner = getattr(optimizer, "optimizer", optimizer)
    groups = [{key: value for key, value in g.items() if key not in ("params", "lr")} for g in inner.param_groups]
    sizes = [len(group["params"]) for group in inner.param_groups]
    return {
        "class": type(inner).__name__,
        "groups": [group | {"tensors": n} for group, n in zip(groups, sizes, strict=True)],
    }


def built_schedule(scheduler: Any) -> dict[str, object]:
    inner = getattr(scheduler, "scheduler", scheduler)
    first = next(iter(getattr(inner, "lr_lambdas", [])), None)
    function = getattr(first, "func", first)
    return {
        "class": type(inner).__name__,
        "function": getattr(function, "__name__", None),
        **getattr(first, "keywords", {}),
    }


# --- trainer ---
# The trainer: its arguments, their record, and the folder of what was trained.

SETS_OF_NAMES = ("target_modules", "exclude_modules")  # in adapter_config.json
FIRST_BATCHES = 4  # each has a digest in the record, so that a difference can be located


def build_trainer(recipe: Recipe, placement: Placement, folder: Path, tokenizer: Any, data: Data, watch: Watch) -> Any:
    """TRL's trainer with every argument set. Rows are already tokenized and masked, so TRL prepares nothing."""
    import torch
    import transformers
    from trl import SFTTrainer

    quiet_libraries()
    prepare_device(torch, placement)
    transformers.set_seed(recipe["seed"])
    # Before the model is loaded: the arguments join the processes and select the GPU of this one, on which 4-bit
    # weights are loaded. Without that, every process of FSDP would read all the weights into RAM.
    arguments = trainer_arguments(recipe, placement, folder)
    watch.memory()  # the memory of the libraries, before the model is loaded
    model = load_model(recipe, placement)
    check_vocabulary(model, data)
    check_positions(model.config, data)
    pictures = data.get("pictures")

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def create_optimizer(self, *positional: Any) -> Any:
            """Restores the types of the run first: PEFT (0.21) reads the adapter of a checkpoint as float32."""
            for name, weight in self.model.named_parameters():
                if weight.dtype != types.get(name, weight.dtype):
                    weight.data = weight.data.to(types[name])
            return super().create_optimizer(*positional)

        def _load_from_checkpoint(self, checkpoint: str, *positional: Any) -> None:
            """Reads a whole model as `load_model` does. transformers (5.23) compares the names in the file with those
            of the modules, and leaves out, without an error, all that the model's class writes by other names."""
            if is_full(recipe) and not self.is_fsdp_enabled:
                self.model.load_state_dict(read_back(recipe, Path(checkpoint), self.model).state_dict())
            else:
                super()._load_from_checkpoint(checkpoint, *positional)

        def autocast_smart_context_manager(self, *positional: Any) -> Any:
            """Casts outside training too, where Accelerate (1.15) does not, and for float16 on a CPU. So the checks
            before the training compute as the training does."""
            half = torch.float16 if self.args.fp16 else torch.bfloat16 if self.args.bf16 else None
            plain = super().autocast_smart_context_manager
            return plain(*positional) if half is None else torch.autocast(placement["device"], half)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows_as_fed(recipe, data),
        processing_class=tokenizer,
        data_collator=None if pictures is None else PictureCollator(data["train"], pictures, tokenizer),
        peft_config=None if is_full(recipe) else lora_config(recipe, model),
        callbacks=[watch.callback()],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its print ends the training once nobody reads the output
    types = trained_types(trainer.model, placement)
    if (arguments.bf16 or arguments.fp16) and not recipe["use_dora"]:
        keep_input_types(trainer.model)
    require_plans_way(trainer, placement)
    score_trained_tokens_only(model, fused=placement["device"] == "cuda")
    # transformers (5.23) decides both by the model's class, wrongly for TRL's loss: GPT-2, and Qwen2.5-VL and Qwen3-VL,
    # whose tokens it would count in each batch alone, so that they weigh more in a batch with few of them.
    trainer._loss_shifts_labels = trainer.model_accepts_loss_kwargs = True
    return trainer


def quiet_libraries() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def rows_as_fed(recipe: Recipe, data: Data) -> Any:
    """The training rows, in the order in which the trainer reads them. Rows with pictures have their places."""
    import datasets

    rows: list[dict[str, Any]] = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in data["train"]]
    if data.get("pictures") is not None:
        rows = [row | {"place": place} for place, row in enumerate(rows)]
    order = longest_first(data["order"], [len(row["input_ids"]) for row in rows], recipe["effective_batch_size"])
    return datasets.Dataset.from_list(rows).select(order)


def require_plans_way(trainer: Any, placement: Placement) -> None:
    """Refuses a trainer whose sharding or mixed precision is not that of the plan."""
    if trainer.is_fsdp_enabled != (placement["strategy"] == "fsdp"):
        raise wrong_launch(f"strategy {placement['strategy']}", "FSDP" if trainer.is_fsdp_enabled else "no FSDP")
    precision = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "no"
    if trainer.accelerator.mixed_precision != precision:
        raise wrong_launch(f"mixed precision: {precision}", trainer.accelerator.mixed_precision)


def check_positions(config: Any, data: Data) -> None:
    """Refuses rows that are longer than a table of positions, which is an IndexError in the first step that has one."""
    longest = max(len(row["input_ids"]) for row in data["train"] + data["held_out"])
    if config.model_type in POSITIONS_IN_TABLE and longest > config.max_position_embeddings:
        raise Refused(
            f"a row has more tokens than {config.model_type} has positions",
            code="bad_recipe",
            expected=f"max_length of at most {config.max_position_embeddings}",
            got=f"{longest} tokens",
            hint=f"max_length: {config.max_position_embeddings} in the recipe",
        )


class PictureCollator:
    """Makes a batch of rows with pictures: padded ids and labels, and the tensors of the pictures, which it reads."""

    def __init__(self, rows: Sequence[EncodedRow], pictures: Pictures, tokenizer: Any) -> None:
        self.rows, self.pictures = rows, pictures
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """A feature holds the `place` of its row in `rows`, or is a row itself."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [self.rows[feature["place"]] if "place" in feature else feature for feature in features]
        each = [torch.tensor(row["input_ids"]) for row in rows]
        ids = pad_sequence(each, batch_first=True, padding_value=self.pad)
        mask = pad_sequence([torch.ones_like(own) for own in each], batch_first=True)
        batch = {"input_ids": ids, "attention_mask": mask}
        if all("labels" in row for row in rows):
            labels = [torch.tensor(row["labels"]) for row in rows]
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        tensors = self.pictures.tensors([self.pictures.read(row) for row in rows])
        return batch | tensors | self.pictures.token_types(ids * mask)


def may_leave_unused(recipe: Recipe) -> bool:
    """Whether a batch may use only a part of the weights that train: a row without pictures uses those of the language
    model alone. To look for the unused ones takes time in every pass."""
    parts = recipe.get("lora_parts") or ["language"]
    outside = is_full(recipe) or parts != ["language"] or bool(recipe["modules_to_save"])
    return bool(recipe.get("images")) and outside


def trainer_arguments(recipe: Recipe, placement: Placement, folder: Path) -> Any:
    """All arguments. None is left to a default of TRL (1.16: bf16 on every device, checkpointing on, 1024 tokens)."""
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=recipe["max_steps"],
        per_device_train_batch_size=placement["per_device_train_batch_size"],
        gradient_accumulation_steps=placement["gradient_accumulation_steps"],
        learning_rate=recipe["learning_rate"],
        lr_scheduler_type=recipe["lr_scheduler_type"],
        warmup_steps=recipe["warmup_steps"],
        weight_decay=recipe["weight_decay"],
        adam_beta1=recipe["adam_beta1"],
        adam_beta2=recipe["adam_beta2"],
        adam_epsilon=recipe["adam_epsilon"],
        max_grad_norm=recipe["max_grad_norm"],
        optim=recipe["optim"],
        seed=recipe["seed"],
        data_seed=recipe["seed"],
        bf16=placement["dtype"] == "bfloat16" and not recipe["pure_bf16"],
        fp16=placement["dtype"] == "float16",
        use_cpu=placement["device"] == "cpu",
        gradient_checkpointing=placement["gradient_checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False},
        # The rows arrive tokenized, masked, cut and in order.
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        max_length=None,
        packing=False,
        padding_free=False,
        completion_only_loss=False,
        assistant_only_loss=False,
        loss_type="nll",
        label_smoothing_factor=0.0,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=may_leave_unused(recipe),
        ddp_broadcast_buffers=False,
        dataloader_num_workers=0,
        dataloader_drop_last=False,
        remove_unused_columns=not recipe.get("images"),  # the collator of pictures reads `place`
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="steps",
        save_steps=placement["save_steps"],
        save_total_limit=None,  # `Watch` removes older ones
        save_only_model=False,
        report_to=reporter(placement["report_to"]),
        push_to_hub=False,
        disable_tqdm=True,
        torch_compile=False,
        trust_remote_code=False,
    )


def reporter(name: str) -> str:
    """The service that gets the metrics too; `none` if its package is not installed."""
    from importlib.util import find_spec

    if name == "none" or find_spec(name) is not None:
        return name
    event("note", text=f"report_to {name}: the package is not installed, so the metrics are in metrics.jsonl alone")
    return "none"


def train(trainer: Any, watch: Watch, seed: int, checkpoint: Path | None) -> None:
    """Trains, or continues from a checkpoint. The seed is set again, so that the checks before have no effect on it.
    Each process draws its own dropout."""
    import transformers

    # No card of TRL or PEFT beside a checkpoint: the one of the result is written when it is pushed.
    trainer.create_model_card = trainer.model.create_or_update_model_card = lambda *_, **__: None
    transformers.set_seed((seed + int(os.environ.get("RANK", "0"))) % 2**32)  # numpy takes no larger one
    with watch.signals():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        watch.asked_to_stop(trainer.args.device)  # also after the last step
    if watch.problem is not None:
        raise watch.problem


def save(trainer: Any, folder: Path, base: Path | None, pictures: Pictures | None = None) -> None:
    """Writes the adapter, or the whole model with the files of its `base`, under a temporary name first. When this
    returns, it exists for all processes."""
    part = folder.with_name(f".{folder.name}.part")
    weights = gathered_weights(trainer.model) if trainer.is_fsdp_enabled else None
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(str(part), state_dict=weights)
        settle_order(part / "adapter_config.json")
        share_weights(part, next(part.glob("*config.json")))
        if base is not None:
            take_files(base, part, str(model.dtype).removeprefix("torch."))
            add_stops(part, getattr(trainer.processing_class, "unlisted_ends", ()))
            if pictures is not None:  # whoever loads the model resizes them as the training did
                write_limits(part, pictures.kind, pictures.limits)
        replace_folder(part, folder)
    wait_for_all()


def settle_order(config: Path) -> None:
    """Sorts the sets of names in a config. PEFT (0.21) writes them in the order of Python's hashes, which differs in
    each process, so the same run would never give the same file twice."""
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        sets = {name: sorted(values[name]) for name in SETS_OF_NAMES if isinstance(values.get(name), list)}
        write_text(config, json.dumps(values | sets, indent=2, sort_keys=True))


def replace_folder(part: Path, folder: Path) -> None:
    """Replaces a folder of an earlier start as a whole. A kill must not leave a part of it under its name."""
    old = folder.with_name(f".{folder.name}.old.part")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def take_files(base: Path, part: Path, dtype: str) -> None:
    """Copies tokenizer, template and configs of the base, byte for byte: converters may not read what transformers
    saves. In config.json only the type of the weights changes. The card stays behind: a push writes one."""
    for new_file in part.iterdir():
        if ".safetensors" not in new_file.name:
            new_file.unlink()
    for file in files_of_base(base):
        if file == base / "README.md":
            continue
        target = part / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if set_fields(config, {}, dtype):
        write_json(part / "config.json", config)


def gathered_weights(model: Any) -> dict[str, Any]:
    """The trained weights of a sharded model, whole, in the RAM of the first process. Every process must call this. The
    second name of a weight that is tied to another one is left out."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: weight for name, weight in get_model_state_dict(model, options=options).items() if name in names}


def base_folder(recipe: Recipe) -> Path:
    """The folder with the base's files other than weights, fetched before a lost connection would cost the run."""
    if Path(recipe["model"]).is_dir():
        return Path(recipe["model"])
    from huggingface_hub import snapshot_download

    left_out = [f"*{suffix}" for suffix in LEFT_OUT.split()]
    return Path(snapshot_download(recipe["model"], revision=recipe["revision"], ignore_patterns=left_out))


class Processes(TypedDict):
    count: int
    distributed: str
    mixed_precision: str


class FedData(TypedDict):
    """Counts of tokens, and digests of token ids and labels: of all rows, and of the first batches of the trainer.
    `held_out_file_sha256` is of held_out.jsonl, `order_sha256` of the order, `system_sha256` from `system_digest`."""

    train_rows: int
    held_out_rows: int
    rows_sha256: str
    held_out_sha256: str
    held_out_file_sha256: str
    system_sha256: str
    order_sha256: str
    fed_rows: int
    fed_tokens: int
    fed_trained_tokens: int
    first_batches: list[str]


class Environment(TypedDict):
    """`environment.json` before training. Objects of libraries have the field names that the libraries chose."""

    program: FileDigest
    day: str
    python: str
    platform: str
    device: str
    device_name: str
    cuda: str | None
    threads: int
    versions: dict[str, str]
    processes: Processes
    model: dict[str, object]
    base_weights: dict[str, FileDigest]
    lora: dict[str, object] | None
    trainer: dict[str, object]
    data: FedData
    stops: list[int]


def environment(trainer: Any, data: Data, base_weights: dict[str, FileDigest], folder: Path) -> Environment:
    """Versions, device, what is fed, and every argument as the trainer holds it after construction. The optimizer and
    the schedule are added when training starts."""
    import platform
    from importlib import metadata

    import torch

    names = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "tokenizers", "safetensors", "numpy"]
    if data["pictures"] is not None:
        names.append("pillow")  # it decodes them: another version may give other pixels
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "program": file_digest(PROGRAM),
        "day": getattr(trainer.processing_class, "day", date.today()).isoformat(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(trainer.model.device),
        "device_name": device,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in names},
        "processes": {
            "count": trainer.accelerator.num_processes,
            "distributed": str(trainer.accelerator.distributed_type.value),
            "mixed_precision": trainer.accelerator.mixed_precision,
        },
        "model": built_model(trainer.model),
        "base_weights": base_weights,
        "lora": built_lora(trainer.model),
        "trainer": json.loads(trainer.args.to_json_string()),
        "data": fed_data(data, trainer.train_dataset, trainer.args.max_steps, folder),
        "stops": sorted(getattr(trainer.processing_class, "unlisted_ends", ())),
    }


def built_model(model: Any) -> dict[str, object]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        "class": type(base).__name__,
        "dtype": str(base.dtype),
        "attn_implementation": base.config._attn_implementation,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def built_lora(model: Any) -> dict[str, object] | None:
    """Every field of PEFT's configuration, with sorted sets; None if the model has no adapter."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return dict(json.loads(json.dumps(fields, default=str)))


def fed_data(data: Data, dataset: Any, steps: int, folder: Path) -> FedData:
    train, order = data["train"], data["order"]
    batch = len(order) // steps
    first_rows = dataset.select(range(min(len(order), FIRST_BATCHES * batch)))
    batches = [first_rows.select(range(at, at + batch)) for at in range(0, len(first_rows), batch)]
    return {
        "train_rows": len(train),
        "held_out_rows": len(data["held_out"]),
        "rows_sha256": fed_digest(train),
        "held_out_sha256": fed_digest(data["held_out"]),
        "held_out_file_sha256": file_digest(folder / "held_out.jsonl")["sha256"],
        "system_sha256": system_digest(train),
        "order_sha256": hashlib.sha256(json.dumps(order).encode()).hexdigest(),
        "fed_rows": len(order),
        "fed_tokens": sum(len(train[i]["input_ids"]) for i in order),
        "fed_trained_tokens": sum(trained_tokens(train[i]) for i in order),
        "first_batches": [fed_digest(rows)[:16] for rows in batches],
    }


# --- checks ---
# The checks before and after a training, each with its figure, and the verdict over all of them.

FIXED_ROWS = 8  # training rows whose loss is measured before and after
LEAST_FALL = 1e-4  # share of the loss; a smaller change may be rounding
LOOKED_AT, LEAST_MOVED = 4096, 0.001  # values of each weight, and the share of them that a training moves
ANSWER_TOKENS = 48
PICTURE_CHANGE = 1e-5  # least relative change of the loss; in float32 the same pictures give the same loss to 1e-7
RELOAD_TOKENS = 64  # enough to see a wrong adapter; the logits of a long row would need more memory than training


Verdict = Literal["pass", "warn", "fail"]


class TrainingCheck(TypedDict):
    """The result of one check."""

    name: str
    verdict: Verdict
    figure: float | None
    detail: str


class Answer(TypedDict, total=False):
    """One prompt, answered before and after training; None if no process holds the whole model."""

    prompt: str
    before: str | None
    after: str | None


class Checks:
    """Runs the checks of a training, and collects their results."""

    def __init__(self, trainer: Any, tokenizer: Any, data: Data, recipe: Recipe) -> None:
        self.trainer, self.tokenizer, self.data, self.recipe = trainer, tokenizer, data, recipe
        self.pictures = data.get("pictures")
        fed = list(dict.fromkeys(data["order"]))
        self.rows = [data["train"][i] for i in fed[:FIXED_ROWS]]
        self.results: list[TrainingCheck] = []
        self.answer: Answer = {}
        self.loss_before: float | None = None
        self.started: list[Any] = []  # of each weight the first values, where all are trained, before that

    def add(self, name: str, verdict: Verdict, figure: float | None, detail: str) -> None:
        figure = number(figure) if isinstance(figure, float) else figure
        self.results.append({"name": name, "verdict": verdict, "figure": figure, "detail": detail})

    def verdict(self) -> Verdict:
        verdicts = [result["verdict"] for result in self.results]
        return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "pass"

    def before_training(self, *, resumed: bool, folder: Path) -> None:
        """Measures what training will change. A resumed run reads these figures from its first start."""
        model = self.trainer.model
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.add("model_loads", "pass", trainable, f"{trainable:,} trainable parameters")
        self.check_batches()
        if self.trainer.is_fsdp_enabled:
            self.answer = {"prompt": self.prompt()[0], "before": None, "after": None}
            why = "FSDP: no process holds the whole model; accumulation, loss on fixed rows and reload are not measured"
            return self.add("whole_model", "warn", None, why)
        first_start = folder / "checkpoints" / "before.json"
        if resumed and first_start.is_file():
            before = from_earlier_start(first_start, itemgetter("loss", "answer", "results"), without(first_start))
            self.loss_before, self.answer = before[:2]
            self.results += before[2]
            return
        self.check_accumulation()
        self.check_pictures_are_read()
        self.loss_before, self.started = self.mean_loss(self.rows), self.first_values() if is_full(self.recipe) else []
        self.answer = {"prompt": self.prompt()[0], "before": self.answer_now()}
        if is_main_process():
            before = {"loss": self.loss_before, "answer": self.answer, "results": self.results[2:]}
            write_json(first_start, before)

    def after_training(self, folder: Path, tuned: Path) -> None:
        sharded = self.trainer.is_fsdp_enabled
        if not sharded:
            self.check_loss()
            self.check_pictures_help()
        saved = sorted(p.name for p in (folder / "checkpoints").glob("checkpoint-*") if is_complete(p))
        self.add("checkpoint_saves", "pass" if saved else "fail", len(saved), ", ".join(saved) or "none")
        if not sharded:
            self.answer["after"] = self.answer_now()
            if tuned.is_dir():  # only the first machine has it
                self.check_reload(tuned)

    def check_batches(self) -> None:
        """Checks that the trainer's loss of a row is the cross-entropy of its trained tokens. Where a library
        moves labels or leaves some out, every other check passes: the loss of the wrong tokens falls as well."""
        figures = self.data["figures"]
        verdict: Verdict = "pass"
        share = figures["trained_token_share"]
        detail = f"{share:.0%} of the tokens are trained in {figures['train_rows']} rows"
        rows = [] if self.trainer.is_fsdp_enabled else self.rows[:2]  # with FSDP no process holds the whole model
        for row in rows:
            stated, plain = self.losses_of_end(row)
            if not abs(stated - plain) <= (0.05 if self.is_coarse else 1e-3) * max(1.0, plain):
                verdict = "fail"
                detail += (
                    f"; of line {row['line']} the trainer's loss is {stated:.4f}, and the cross-entropy {plain:.4f}"
                )
        self.add("batches_are_valid", verdict, share, detail)

    def losses_of_end(self, row: EncodedRow) -> tuple[float, float]:
        """The trainer's loss of a row, and the cross-entropy of the model's logits, over its last tokens."""
        import torch

        some = self.end_of(row, RELOAD_TOKENS)
        logits = self.logits(self.trainer.model, some)[0, :-1]
        labels = torch.tensor(some["labels"][1:], device=logits.device)
        plain = float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED))
        return self.mean_loss([some]), plain

    @property
    def is_coarse(self) -> bool:
        return bool(self.trainer.args.bf16 or self.trainer.args.fp16 or self.recipe["pure_bf16"])

    def check_accumulation(self) -> None:
        """Checks that accumulated gradients equal those of the large batch: a wrong scale shows in nothing else."""
        import torch

        rows = self.short_rows(self.rows[: min(4, self.recipe["effective_batch_size"])])
        if len(rows) < 2:
            return self.add("accumulation", "warn", None, "one row only: nothing to accumulate")
        large = self.gradient([rows])
        small = self.gradient([[row] for row in rows])
        apart = sum(float(torch.linalg.norm(a.float() - b.float())) ** 2 for a, b in zip(large, small, strict=True))
        size = sum(float(torch.linalg.norm(a.float())) ** 2 for a in large)
        if not size:
            return self.add("accumulation", "warn", None, "these rows change no weight: nothing to accumulate")
        error = math.sqrt(apart) / max(math.sqrt(size), 1e-12)
        limit = 0.05 if self.is_coarse else 1e-3
        self.add("accumulation", "pass" if error <= limit else "fail", error, f"relative difference, at most {limit}")

    def picture_losses(self) -> tuple[float, float] | None:
        """The mean loss of the fixed rows that have pictures: with their own pictures, and with grey pictures of the
        same size, so of as many tokens. None if no row has a picture."""
        rows = [row for row in self.rows if row.get("images")]
        if self.pictures is None or not rows:
            return None
        own = self.mean_loss(rows)
        with self.pictures.all_grey():
            return own, self.mean_loss(rows)

    def check_pictures_are_read(self) -> None:
        """Checks that another picture gives another loss. A model that ignores pictures still learns from the words."""
        if (losses := self.picture_losses()) is None:
            return
        own, grey = losses
        change = abs(own - grey) / max(abs(own), 1e-12)
        verdict: Verdict = "pass" if change > PICTURE_CHANGE else "fail"
        detail = f"loss {own:.4f}, and {grey:.4f} with grey pictures; they must differ by more than {PICTURE_CHANGE:g}"
        self.add("pictures_are_read", verdict, change, f"{detail} of it")

    def check_pictures_help(self) -> None:
        """Checks whether the trained answers depend on what the pictures show."""
        if (losses := self.picture_losses()) is None:
            return
        own, grey = losses
        detail = f"loss {own:.4f} after training, and {grey:.4f} with grey pictures, on the same rows"
        if grey > own:
            return self.add("pictures_help", "pass", grey - own, detail)
        self.add("pictures_help", "warn", grey - own, f"{detail}: the answers do not depend on what the pictures show")

    def short_rows(self, rows: Sequence[Tokens]) -> list[Tokens]:
        """The end of each row. Together they need the memory of one batch at most, where they have no pictures."""
        batch = self.trainer.args.per_device_train_batch_size
        return [self.end_of(row, max(2, self.recipe["max_length"] * batch // len(rows))) for row in rows]

    def end_of(self, row: Any, keep: int) -> Any:
        """The row up to its last trained token, with so many tokens. A row with pictures stays: they cannot be cut."""
        if row.get("images"):
            return row
        end = max(i for i, label in enumerate(row["labels"]) if label != IGNORED) + 1
        return row | {name: row[name][max(0, end - keep) : end] for name in ("input_ids", "labels")}

    def gradient(self, batches: list[list[Tokens]]) -> list[Any]:
        """The gradient of the trainer's own mean loss over all batches, without dropout, one tensor a weight. The
        trainer counts the trained tokens, as it does in each step."""
        model = self.trainer.model
        model.eval()
        total = self.trainer._get_num_items_in_batch(list(map(self.collated, batches)), model.device)
        for batch in batches:
            self.loss(batch, total).backward()
        gradient = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model.train()
        return gradient

    def loss(self, rows: Sequence[Tokens], items: Any) -> Any:
        """The loss of the trained tokens, without the balancing loss of experts. That is a mean over each batch, so it
        would depend on how the rows are split."""
        inputs = {key: value.to(self.trainer.model.device) for key, value in self.collated(rows).items()}
        balanced, self.trainer.aux_loss_enabled = self.trainer.aux_loss_enabled, False
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.trainer.model, inputs, num_items_in_batch=items)
        self.trainer.aux_loss_enabled = balanced
        self.trainer._metrics["eval"].clear()
        return loss / max(1, self.trainer.accelerator.num_processes)

    def collated(self, rows: Sequence[Tokens]) -> Any:
        plain = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
        return self.trainer.data_collator(plain if self.pictures is None else rows)

    def mean_loss(self, rows: Sequence[EncodedRow]) -> float:
        """Mean loss on some training rows, without dropout."""
        import torch

        self.trainer.model.eval()
        with torch.no_grad():
            items = torch.tensor(sum(trained_tokens(row) for row in rows), device=self.trainer.model.device)
            loss = sum(float(self.loss([row], items)) for row in rows)
        self.trainer.model.train()
        return loss

    def first_values(self) -> list[Any]:
        weights = (weight for weight in self.trainer.model.parameters() if weight.requires_grad)
        return [weight.detach().flatten()[:LOOKED_AT].clone() for weight in weights]

    def check_loss(self) -> None:
        import torch

        after, before = self.mean_loss(self.rows), self.loss_before or 0.0
        detail = f"{before:.4f} before, {after:.4f} after, on the same {len(self.rows)} training rows"
        balance = [logs["aux_loss"] for logs in self.trainer.state.log_history if logs.get("aux_loss")]
        if balance:
            more = self.trainer.router_aux_loss_coef * balance[-1]
            detail += f"; the loss of the last step holds {more:.4f} more, for the balance of the experts"
        size = self.trainer.model.config.get_text_config().vocab_size
        if before > math.log(size):  # a perplexity above the size of the vocabulary: wrong weights or tokenizer
            detail += f"; the base is worse than blind guessing among {size:,} tokens, {math.log(size):.4f}"
        least = before * (1 - LEAST_FALL)
        verdict: Verdict = "pass" if after < least else "warn" if after < 1.05 * before else "fail"
        if abs(after - before) <= before - least:
            detail += f"; it changed by less than {LEAST_FALL:.2%}: raise learning_rate, or train more steps"
        started_at_zero = [w for name, w in self.trainer.model.named_parameters() if ".lora_B." in name]
        if started_at_zero and not any(bool(weight.any()) for weight in started_at_zero):
            verdict, detail = "fail", f"{detail}; every B of the adapter is zero as before, so it changes nothing"
        if after == before and self.started:
            pairs = zip(self.started, self.first_values(), strict=True)
            moved = float(torch.cat([(own != other).cpu() for own, other in pairs]).float().mean())
            if moved < LEAST_MOVED:
                verdict, detail = "fail", f"{detail}; {moved:.2%} of the weights have moved"
        self.add("loss_falls", verdict if math.isfinite(after) else "fail", number(before - after), detail)

    def check_reload(self, tuned: Path) -> None:
        """Checks that the saved files, read back, give the logits of the model that was trained."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        row = self.rows[0]
        trained = self.logits(model, row)
        if is_full(self.recipe):
            self.trainer.model.zero_grad()  # makes room for a second model, as the next line does
            self.trainer.optimizer.state.clear()
            name, reloaded = "model_reloads", self.logits(read_back(self.recipe, tuned, model).to(model.device), row)
        else:
            self.load_again(tuned, model)
            name, reloaded = "adapter_reloads", self.logits(model, row)
        difference = float((trained - reloaded).abs().max().cpu())
        limit = 1e-4 * max(1.0, float(trained.abs().max().cpu()))
        verdict: Verdict = "pass" if difference <= limit else "fail"
        self.add(name, verdict, difference, f"largest difference of the logits, at most {limit:.1e}")

    def load_again(self, tuned: Path, model: Any) -> None:
        """Loads the saved adapter as a second one, in the types of the first. PEFT (0.21) would round a module that
        trained whole to the type of the base."""
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        model.load_adapter(str(tuned), adapter_name="reloaded", is_trainable=False)
        weights = dict(model.named_parameters(remove_duplicate=False))
        for name in (name for name in weights if ".reloaded" in name):
            first = weights[name.replace(".reloaded", ".default")]
            weights[name].data = weights[name].data.to(first.dtype)
        set_peft_model_state_dict(model, load_peft_weights(str(tuned), device="cpu"), adapter_name="reloaded")
        model.set_adapter("reloaded")

    def logits(self, model: Any, row: EncodedRow) -> Any:
        import torch

        model.eval()
        short = row["input_ids"] if row.get("images") else row["input_ids"][:RELOAD_TOKENS]
        inputs = self.inputs(row, short, model.device)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return model(**inputs).logits.float()

    def inputs(self, row: EncodedRow, ids: list[int], device: Any) -> dict[str, Any]:
        """Some ids of a row, with its pictures, as the model takes them."""
        import torch

        if self.pictures is None:
            tensor = torch.tensor([ids], device=device)
            return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        pictures = {name: row.get(name) or [] for name in ("images", "image_sha256")}
        batch = self.trainer.data_collator([{"input_ids": ids, **pictures}])
        return {name: value.to(device) for name, value in batch.items()}

    def prompt(self) -> tuple[str, list[int]]:
        """The text and ids before the first trained token of a held-out row, or of a training row if none is held out.
        They hold all pictures of the row, without which the model cannot be asked."""
        ids, labels = (self.asked_row()[name] for name in ("input_ids", "labels"))
        picture = self.pictures.token_id if self.pictures is not None else None
        least = max((at for at, token in enumerate(ids) if token == picture), default=0) + 1
        first = next((at for at in range(least, len(ids)) if labels[at] != IGNORED), len(ids))
        return self.tokenizer.decode(ids[:first]), ids[:first]

    def asked_row(self) -> EncodedRow:
        return (self.data["held_out"] or self.rows)[0]

    def answer_now(self) -> str:
        import torch

        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        model.eval()
        inputs = self.inputs(self.asked_row(), self.prompt()[1], model.device)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            out = model.generate(
                **inputs,
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
            )
        model.train()
        return str(self.tokenizer.decode(out[0][inputs["input_ids"].shape[1] :], skip_special_tokens=False))


# --- cloud/file_names ---
# Names of the files that a job leaves in its bucket and in the repository.

MARKER = "kept.json"  # in a folder of a bucket, once everything that it lists is there
PROOF = "training.json"  # in the repository, while it has no result
# Fields of train.json in the repository, which others may read. `example` and `answer` hold rows of the data.
PUBLISHED = {
    "schema", "step", "run", "recipe_hash", "steps", "verdict", "outputs", "saved_dtype", SMALLER, "checks", "data",
    "figures", "seconds", "finished_at",
}  # fmt: skip


def result_names(method: str) -> set[str]:
    """File names of a result. Before the training, the repository is asked whether it accepts them."""
    whole = {"config.json", "tokenizer_config.json", "model.safetensors", "model-00001-of-00002.safetensors"}
    own = whole if method == "full" else {"adapter_config.json", "adapter_model.safetensors"}
    return own | {"README.md", "train.json", "environment.json", "recipe.json", "tokenizer.json"}


def without_rows(record: Mapping[str, object]) -> dict[str, object]:
    """`train.json` as it is pushed. The folder of the run has the whole record."""
    return {key: value for key, value in record.items() if key in PUBLISHED}


# --- cloud/push ---
# The push: the result, its records and its card in one commit to the Hub.

PAUSES = (1, 2, 4, 8, 16, 32, 64, 128, 128)  # seconds; together longer than the 300 of the Hub's rate limit
REQUEST_SECONDS = 60.0  # to connect, to write, and for each read; huggingface_hub 2.4 sets no limit of its own


def push(plan: Plan, work: Path) -> None:
    """Pushes the result, its records and its card in one commit. A second push of the same changes nothing."""
    tell("stage", text="pushing the result")
    folder = work / ("adapter" if (work / "adapter").is_dir() else "merged")
    files: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in files_of(folder)}
    files["environment.json"] = work / "environment.json"
    files["train.json"] = as_json(without_rows(json.loads((work / "train.json").read_text(encoding="utf-8"))))
    files["recipe.json"] = as_json(shown_recipe(plan))
    try:
        files["README.md"] = model_card(plan, work, licence(plan)).encode()
        commit_id = commit(plan, files, f"Trained by skill-train, recipe {str(plan.get('recipe_hash'))[:12]}")
    except Refused as refusal:
        raise Refused(
            f"the run is trained and stored, but could not be pushed: {refusal}",
            code="push_failed",
            exit_code=EXIT_FAILED,
            expected=f"{hub_repository(plan)} takes a commit",
            got=refusal.error["got"],
            hint="start the run again, which pushes the stored result without training",
        ) from refusal
    tell("pushed", repo=hub_repository(plan), commit=commit_id)


def commit(plan: Plan, files: Mapping[str, Path | bytes], message: str) -> str:
    """Makes one commit in the private repository of the plan, which is created if it is missing. Returns its id. A
    .gitignore there must name no file of this commit or of the result."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repo = hub_repository(plan)
    if not repo:
        words = "the plan names no repository for the result"
        raise Refused(words, code="bad_plan", expected="hub_model_id: owner/name")
    api = hub()
    names = {*files, *result_names(plan["recipe"]["finetuning_type"])}

    def attempt() -> str:
        api.create_repo(repo, private=True, exist_ok=True)
        if not api.repo_info(repo).private:
            raise Refused(
                f"the repository {repo} is public, and this run stores private files",
                code="public_repository",
                exit_code=EXIT_DOES_NOT_FIT,
                expected="a private one",
                hint=f"https://huggingface.co/{repo}/settings makes it private, then start the run again",
            )
        asked = [CommitOperationAdd(name, b"") for name in sorted(names)]  # an empty file is not sent
        api.preupload_lfs_files(repo, asked)
        if left_out := [each.path_in_repo for each in asked if getattr(each, "_should_ignore", False)]:
            raise Refused(
                f"the .gitignore of {repo} leaves out {', '.join(left_out)}",
                code="output_changed",
                hint="change that file, then start the run again",
            )
        changes: list[Any] = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        if PROOF not in files and api.file_exists(repo, PROOF):
            changes.append(CommitOperationDelete(PROOF))
        return str(api.create_commit(repo, changes, commit_message=message).oid)

    return str(ask_hub(attempt, repo))


def hub_repository(plan: Plan) -> str | None:
    """The repository for the result."""
    return plan.get("policy", {}).get("hub_model_id")


def hub() -> Any:
    """The client of the Hub, without progress bars and with a time limit for each request."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if get_token() is None:
        raise Refused(
            "there is no token for the Hub",
            code="not_signed_in",
            exit_code=EXIT_NO_ACCESS,
            expected="HF_TOKEN among the secrets of the job",
        )
    limit_requests()
    disable_progress_bars()
    return HfApi()


def limit_requests() -> None:
    """Gives every request to the Hub a time limit: a job that waits for ever is paid until its timeout."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        http_client = default_client_factory()
        http_client.event_hooks["request"].append(limit)
        http_client.event_hooks["response"].append(stay_here)
        return http_client

    set_client_factory(client)


def limit(request: Any) -> None:
    """Limits a request for which huggingface_hub set no limit of its own."""
    limits = request.extensions["timeout"]
    named = {name: REQUEST_SECONDS if seconds is None else seconds for name, seconds in limits.items()}
    request.extensions = {**request.extensions, "timeout": named}


def stay_here(response: Any) -> None:
    """Refuses a redirect of a request with a body to another host, and one that would drop the body."""
    request = response.request
    if request.method in ("GET", "HEAD") or not response.has_redirect_location:
        return
    target = request.url.join(response.headers["location"])
    same = all(getattr(target, part) == getattr(request.url, part) for part in ("scheme", "host", "port"))
    if not same or response.status_code not in (307, 308):
        raise Refused(
            "the Hub redirected a request with a body to another host, so the request was not sent",
            code="redirected",
            exit_code=EXIT_NO_ACCESS,
            expected=f"an answer of {request.url.host}",
            got=f"status {response.status_code}, to {target.copy_with(query=None)}",
            hint="check HF_ENDPOINT and the proxy, then start the run again",
        )


def ask_hub(question: Callable[[], Any], repo: str) -> Any:
    """The Hub's answer. Waits while trouble may pass: too many requests, errors of the Hub, and lost connections."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    read = (httpx2.HTTPError, OSError, RuntimeError, *UNREAD)
    for pause in (*PAUSES, None):
        try:
            return question()
        except HFValidationError as error:
            raise Refused(f"{repo} is not a valid repository id", code="bad_plan", got=str(error)) from None
        except read as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            got = first_line(error)[:200]
            if status is not None and status < 500 and status not in (408, 409, 412, 429):
                raise no_access(repo, got) from None
            if pause is None:
                raise unreachable(repo, got) from None
            tell("note", text=f"{repo}: {got}; again in {pause} s")
            time.sleep(pause)


def no_access(repo: str, got: str) -> Refused:
    return Refused(
        f"the token may not write to {repo}",
        code="no_permission",
        exit_code=EXIT_NO_ACCESS,
        expected="a token with write access to that repository",
        got=got,
        hint="hf auth login with a token that may write there, then start the run again",
    )


def unreachable(repo: str, got: str) -> Refused:
    return Refused(
        f"the Hub did not accept a commit to {repo}",
        code="hub_unreachable",
        exit_code=EXIT_TEMPORARY,
        got=got,
        hint="start the run again; https://status.huggingface.co shows whether the Hub is down",
    )


def on_hub(plan: Plan, key: Literal["model", "data"]) -> str | None:
    """The Hub id of the model or the data; None if it was on the machine that planned."""
    name = plan["recipe"][key]
    local = plan.get("fingerprints", {}).get(key) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    return None if local else name


def shown_recipe(plan: Plan) -> Recipe:
    """The recipe without the folders of the machine that planned."""
    model, data = Path(plan["recipe"]["model"]).name, Path(plan["recipe"]["data"]).name
    return plan["recipe"] | {"model": on_hub(plan, "model") or model, "data": on_hub(plan, "data") or data}


def licence(plan: Plan) -> dict[str, str]:
    """The licence in the card of the base; empty if it has none or cannot be read."""
    base = on_hub(plan, "model")
    if base is None:
        return {}
    import httpx2

    with suppress(httpx2.HTTPError, OSError, *UNREAD):
        card = hub().model_info(base, revision=plan["recipe"]["revision"]).card_data
        fields = {key: card.get(key) for key in ("license", "license_name")} if card is not None else {}
        return {key: value for key, value in fields.items() if isinstance(value, str)}
    return {}


def model_card(plan: Plan, work: Path, licence: dict[str, str]) -> str:
    """README.md: metadata for the Hub between the lines of ---, then text for a reader."""
    from huggingface_hub import ModelCardData

    recipe, repo = plan["recipe"], hub_repository(plan) or ""
    adapter, data = (work / "adapter").is_dir(), on_hub(plan, "data")
    about = ModelCardData(
        base_model=on_hub(plan, "model"),
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text" if recipe.get("images") else "text-generation",
        tags=["skill-train", recipe["method"], *(["lora"] if adapter else [])],
        datasets=[data] if data else None,
        **licence,
    )
    kind = "LoRA adapter" if adapter else "fine-tuned model"
    base = shown_recipe(plan)["model"] + (f" at revision {recipe['revision']}" if recipe["revision"] else "")
    return f"""---
{about.to_yaml()}
---

# {repo.rsplit("/", 1)[-1]}

A {kind} of {base}, trained by skill-train. `recipe.json` is the whole recipe, `train.json` the record of the training
without rows of the data, `environment.json` every argument of the trainer and every version.

```python
{card_use(plan, adapter)}
```
{f"{chr(10)}{ENGINE_NOTE}{chr(10)}" if recipe.get("preprocess") == "engine" else ""}
{card_figures(plan, work)}"""


def card_use(plan: Plan, adapter: bool) -> str:
    """The lines of Python that load the result. PEFT has no class that finds the base of a vision adapter itself."""
    repo, kind = hub_repository(plan) or "", "ImageTextToText" if plan["recipe"].get("images") else "CausalLM"
    if adapter and kind != "CausalLM":
        base = json.dumps(shown_recipe(plan)["model"])
        imports = f"from peft import PeftModel\nfrom transformers import AutoModelFor{kind} as Model\n\n"
        return f'{imports}model = Model.from_pretrained({base})\nmodel = PeftModel.from_pretrained(model, "{repo}")'
    source = "peft import AutoPeftModelForCausalLM" if adapter else f"transformers import AutoModelFor{kind}"
    return f'from {source} as Model\n\nmodel = Model.from_pretrained("{repo}")'


def card_figures(plan: Plan, work: Path) -> str:
    recipe: Mapping[str, object] = plan["recipe"]
    record = json.loads((work / "train.json").read_text(encoding="utf-8"))
    versions = json.loads((work / "environment.json").read_text(encoding="utf-8"))["versions"]
    figures, data = record["figures"], record["data"]
    chosen = ("method", "learning_rate", "lr_scheduler_type", "effective_batch_size", "max_length", "lora_r")
    rows = {
        "recipe hash": f"`{plan.get('recipe_hash')}`",
        "steps": record["steps"],
        "training loss, first and last step": f"{figures['first_loss']:.4f}, {figures['last_loss']:.4f}",
        "training rows, tokens": f"{data['train_rows']}, {data['tokens']}",
        "share of the tokens that is trained": f"{data['trained_token_share']:.0%}",
        **({"notes": "; ".join(data["notes"])} if data.get("notes") else {}),
        **{name: recipe[name] for name in chosen if name in recipe},
        "checks of the training program": record["verdict"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines) + "\n"


def as_json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def files_of(path: Path) -> list[Path]:
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in paths if file.is_file()]


# --- cloud/job ---
# In a cloud job: the supervisor of a training, and the files that it stores.
#
# The plan's folder is a mounted bucket (`bucket`), which outlives the job. A file in it is uploaded when it is closed
# (hf-mount: it must be written from start to end, and not changed afterwards). So this process does not train itself.
# It starts the program on the job's own disk (`work`), as `skill-train local` does, and copies whole files from there.
# A marker with the SHA-256 of each file comes last. Files without a marker, or with other bytes, were not stored.

KEEP_SECONDS = 2.0
KEEP_AGAIN_SECONDS = 60.0  # after a failure, such as a full disk
KEPT_CHECKPOINTS = 2
LINKS = "being-kept"
SMALLER_PLAN = "smaller_plan.json"  # the plan with which a later job of this run begins
RECORDS = ("train.json", "environment.json", "samples.jsonl", "held_out.jsonl", "metrics.jsonl", "train.log")
RESULTS = ("adapter", "merged", "images", *RECORDS, "train.failed.json")


def run_job(path: Path, data: Path | None, *, rehearse: bool) -> int:
    """Trains, stores everything in the plan's folder, and pushes. A run that was trained before is only pushed."""
    bucket = path.resolve().parent
    try:
        plan = load_plan(path)
        prepare_environment(plan["placement"])
        scratch = tempfile.TemporaryDirectory(prefix="skill-train-", ignore_cleanup_errors=True)
        with explained_errors(), scratch as folder:
            work = Path(folder)
            if not fetch_result(bucket, work):
                start_job(plan, bucket, rehearse=rehearse)
                failure = train_in_job(plan, data, work, bucket, () if rehearse else PAUSES)
                if failure is not None:
                    return failure["exit_code"]
            if not rehearse:
                push(plan, work)
            require_kept(bucket)
    except Refused as refusal:
        with suppress(OSError):
            if not (bucket / MARKER).exists():  # it was refused before it was trained
                put_json(bucket / "train.failed.json", refusal.failure)
        tell("failed", **refusal.failure)
        return refusal.exit_code
    return 0


def start_job(plan: Plan, bucket: Path, *, rehearse: bool) -> None:
    """Checks that both places for the result can be written. Removes the records of an earlier end."""
    for name in (MARKER, "train.failed.json"):
        (bucket / name).unlink(missing_ok=True)
    put_json(bucket / ".writable", {})
    (bucket / ".writable").unlink()
    if rehearse:
        return
    tell("stage", text="proving that the result can be pushed")
    state = {"run": run_id(), "recipe_hash": plan.get("recipe_hash"), "state": "training"}
    commit_id = commit(plan, {PROOF: as_json(state)}, "Training has begun")
    tell("note", text=f"{hub_repository(plan)} can be written: {commit_id}")


def train_in_job(
    plan: Plan, data: Path | None, work: Path, bucket: Path, pauses: tuple[int, ...] = PAUSES
) -> Failure | None:
    """Trains in a child process, and stores its files while it runs. Returns why it failed, or None. A child that did
    not reach the Hub is started again after each of the `pauses`. What it fetched stays on this disk."""
    plan = layout_that_was_left(plan, bucket)
    keeper, begun, left, tried = Keeper(work, bucket, restore(bucket, work)), kills_for_memory(), iter(pauses), False
    while True:
        put_json(work / "plan.json", plan)
        (work / "train.failed.json").unlink(missing_ok=True)  # of the try before
        with Child(child_command(plan, work, data), plan, work / "train.log") as child:
            while child.running(KEEP_SECONDS):
                keeper.try_to_keep()
            failure = how_it_failed(child, work)
            keeper.try_to_keep(last=True)
            away = failure is not None and failure["exit_code"] == EXIT_TEMPORARY and not child.stopped
            pause = next(left, None) if away else None
            smaller = None if tried or child.stopped else after_memory(plan, failure, begun, child)
            if pause is None and smaller is None:
                try:
                    keep_results(work, bucket, failure)
                except OSError as error:  # the push may still succeed; `require_kept` reports it afterwards
                    tell("note", text=f"the results could not be kept: {error}")
                return failure
        if pause is not None:
            tell("note", text=f"the Hub could not be reached; the training starts again in {pause} s")
            time.sleep(pause)
        if smaller is not None:
            plan, tried = smaller, True
            tell("note", text=second_try_message(plan))
            with suppress(OSError):  # otherwise a later job would run out of memory first too
                put_json(bucket / SMALLER_PLAN, plan)


def layout_that_was_left(plan: Plan, bucket: Path) -> Plan:
    """The plan. If an earlier job of it continued with a smaller layout, the plan with that layout."""
    smaller: Plan | None = read_object(bucket / SMALLER_PLAN)
    same = smaller is not None and smaller.get("recipe_hash") == plan.get("recipe_hash")
    return smaller if smaller is not None and same else plan


def after_memory(plan: Plan, failure: Failure | None, kills: int | None, child: Child) -> Plan | None:
    """The plan of a second try after memory ran out; None if there is none."""
    if failure is None or not memory_ended(failure["error"], kills):
        return None
    return smaller_plan(plan, failure["error"], last_stage(child.output()))


def child_command(plan: Plan, work: Path, data: Path | None) -> list[str]:
    """The command that `skill-train local` would start for this plan."""
    arguments = plan.get("launch", {}).get("arguments") or []
    launcher = ["-m", "accelerate.commands.launch", *arguments] if arguments else []
    where = ["--data", str(data.resolve())] if data else []
    return [sys.executable, *launcher, str(PROGRAM.resolve()), str(work / "plan.json"), "--resume", *where]


class Child:
    """The training program. Its output goes to our output and into train.log. A signal to us is passed on: the child
    saves a checkpoint and ends, and everything is stored before we end. The child stays in our process group, so that
    killing the group leaves no process behind."""

    def __init__(self, command: list[str], plan: Plan, log: Path) -> None:
        self.stopped = False
        self.has_launcher = bool(plan.get("launch", {}).get("arguments"))
        self.log = open(log, "ab")  # noqa: SIM115 - closed on exit
        self.start = self.log.tell()
        self.lock = threading.Lock()
        environment = {"PYTHONUNBUFFERED": "1"} | plan.get("launch", {}).get("environment", {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=os.environ | environment
        )
        streams = (self.process.stdout, self.process.stderr)
        self.readers = [threading.Thread(target=self.read, args=(stream,), daemon=True) for stream in streams]

    def __enter__(self) -> Child:
        self.old = {number: signal.signal(number, self.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        for reader in self.readers:
            reader.start()
        return self

    def pass_on(self, number: int, _: Any) -> None:
        self.stopped = True
        self.process.send_signal(number)

    def read(self, stream: IO[bytes]) -> None:
        """Copies whole lines, and never stops reading: a child that cannot write would wait for ever."""
        with stream:
            for line in stream:
                with self.lock:
                    for out in (self.log, sys.stdout.buffer):
                        with suppress(OSError, ValueError):  # closed: a process of the child still writes
                            out.write(line)
                            out.flush()

    def running(self, seconds: float) -> bool:
        """Waits up to `seconds` for the child's end. Returns False after the end, when all its output has been read."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        for reader in self.readers:
            reader.join(timeout=10)  # a process that the child left behind may hold the pipe open
        return False

    def output(self) -> str:
        return Path(self.log.name).read_bytes()[self.start :].decode("utf-8", "replace")

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.process.kill()
        self.process.wait()
        with self.lock:
            self.log.close()
        for number, handler in self.old.items():
            signal.signal(number, handler)


def how_it_failed(child: Child, work: Path) -> Failure | None:
    """The failure in train.failed.json, or one made from the exit code: a killed program writes nothing, and its
    launcher ends with 1."""
    code, record = child.process.returncode, work / "train.failed.json"
    if code == 0:
        return None
    recorded: Failure | None = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if recorded is not None and recorded["error"]["code"] != "process_lost":
        return recorded
    output = child.output() if child.has_launcher else ""  # a launcher prints how its processes ended
    killed = [int(n) for n in re.findall(r"exitcode\s*:\s*(-\d+) \(pid: ", output) if int(n) != -signal.SIGTERM]
    if recorded is not None and not killed:
        return recorded
    failure = ended(killed[0] if killed and code > 0 else code, child).failure
    write_json(record, failure)
    tell("failed", **failure)
    return failure


def ended(code: int, child: Child) -> Refused:
    """The reason for a program that gave none itself. `code` is below 0 for a signal."""
    tail = "\n".join(child.output().splitlines()[-15:])
    if code == -signal.SIGKILL:
        return Refused(
            "the system killed the training process (SIGKILL), most likely to free memory",
            code="out_of_memory",
            exit_code=EXIT_DOES_NOT_FIT,
            expected="memory for the model, its activations and one batch",
            hint=f"a larger machine, or a smaller max_length or model; {again()}",
        )
    if child.stopped:
        return Refused(
            "training was interrupted before its first step", code="interrupted", exit_code=EXIT_FAILED, hint=again()
        )
    how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Refused(
        f"the training program {how}",
        code="native_crash" if code < 0 else "program_failed",
        exit_code=EXIT_FAILED,
        got=tail,
        hint="read the end of its log above",
    )


class Keeper:
    """Copies the files of the training to the bucket, which may be full, slow or gone for a while."""

    def __init__(self, work: Path, bucket: Path, restored: Path | None) -> None:
        self.work, self.bucket = work, bucket
        self.whole = {restored.name} if restored else set()  # names of checkpoints that are stored
        self.not_before = 0.0
        self.kept: dict[str, tuple[int, int]] = {}

    def try_to_keep(self, *, last: bool = False) -> None:
        """Stores new files. A failure does not end the training: it is reported, and older checkpoints are removed. The
        next try is a minute later, or at once if this is the `last` one."""
        if time.monotonic() < self.not_before and not last:
            return
        try:
            self.keep()
        except OSError as error:
            self.not_before = time.monotonic() + KEEP_AGAIN_SECONDS
            tell("note", text=f"could not be kept, and will be tried again: {error}")
            self.prune(1)
            if last:
                self.keep_in_room()

    def keep_in_room(self) -> None:
        try:
            self.keep()
        except OSError as error:
            tell("note", text=f"could not be kept: {error}")

    def keep(self) -> None:
        complete = [path for path in numbered(self.work / "checkpoints") if is_complete(path)]
        for name in ("metrics.jsonl", "environment.json"):
            self.keep_changed(name)
        for checkpoint in complete[:KEPT_CHECKPOINTS]:
            if checkpoint.name not in self.whole:
                self.keep_checkpoint(checkpoint)
        self.prune(KEPT_CHECKPOINTS)

    def keep_changed(self, name: str) -> None:
        """Copies a file if it has changed, for those who look on. A restart uses the copy in a checkpoint."""
        path = self.work / name
        if path.is_file():
            now = (path.stat().st_size, path.stat().st_mtime_ns)
            if self.kept.get(name) != now:
                copy_file(path, self.bucket / name)
                self.kept[name] = now

    def keep_checkpoint(self, checkpoint: Path) -> None:
        """Copies a checkpoint, and what else a restart needs: metrics.jsonl, and before.json of the first checks."""
        started, target = time.monotonic(), self.bucket / "checkpoints" / checkpoint.name
        beside = (self.work / "metrics.jsonl", self.work / "checkpoints" / "before.json")
        source = self.linked(checkpoint)
        try:
            files = {path.relative_to(source).as_posix(): path for path in files_of(source)}
            files |= {path.name: path for path in beside if path.is_file()}
            digests = {name: copy_file(path, target / name) for name, path in files.items()}
            if not is_complete(source):  # some of its files may have been removed before they were listed
                raise FileNotFoundError(checkpoint)
            put_json(target / MARKER, digests)
        except OSError:
            remove_kept(target)
            if is_complete(source):
                raise
            return  # the trainer removed it meanwhile, because it has newer ones
        finally:
            shutil.rmtree(self.work / LINKS, ignore_errors=True)
        self.whole.add(checkpoint.name)
        size = sum(digest["bytes"] for digest in digests.values())
        tell("kept", name=checkpoint.name, bytes=size, seconds=round(time.monotonic() - started, 2))

    def linked(self, checkpoint: Path) -> Path:
        """A folder of hard links to the files of a checkpoint. The trainer removes a checkpoint when there are two
        newer ones, so a slow bucket would never get a whole one. Returns the checkpoint itself if the disk has no hard
        links, or no room for two more checkpoints beside the linked bytes."""
        links = self.work / LINKS
        shutil.rmtree(links, ignore_errors=True)
        try:
            files = list(files_of(checkpoint))
            if shutil.disk_usage(self.work).free < 2 * sum(path.stat().st_size for path in files):
                return checkpoint
            for path in files:
                name = links / path.relative_to(checkpoint)
                name.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, name)
        except OSError:
            return checkpoint
        return links

    def prune(self, count: int) -> None:
        """Removes older checkpoints from the bucket, and leaves the newest `count` that are known to be whole. Other
        checkpoints of an earlier start do not count: their files may be missing."""
        checkpoints = numbered(self.bucket / "checkpoints")
        whole = [path for path in checkpoints if path.name in self.whole]
        for path in checkpoints:
            if whole[count - 1 :] and step_of(path) < step_of(whole[count - 1]):
                remove_kept(path)


def keep_results(work: Path, bucket: Path, failure: Failure | None) -> None:
    files = {path.relative_to(work).as_posix(): path for name in RESULTS for path in files_of(work / name)}
    digests = {name: copy_file(path, bucket / name) for name, path in files.items()}
    state, exit_code = ("done", 0) if failure is None else ("failed", failure["exit_code"])
    put_json(bucket / MARKER, {"run": run_id(), "state": state, "exit_code": exit_code, "files": digests})


def require_kept(bucket: Path) -> None:
    if not (bucket / MARKER).is_file():
        raise Refused(
            "the run is trained, but its results could not be stored",
            code="not_kept",
            exit_code=EXIT_FAILED,
            expected="free space in the folder of the plan",
            hint="read the reason above; unless this is a rehearsal, the result was pushed to the Hub",
        )


def fetch_result(bucket: Path, work: Path) -> bool:
    """Whether this run was trained before. If so, copies its results to `work`."""
    marker = read_object(bucket / MARKER)
    if marker is None or marker.get("state") != "done":
        return False
    if fetch(bucket, work, marker["files"]):
        tell("note", text="this run was trained before")
        return True
    tell("note", text="the results that were kept are torn: going on from the newest checkpoint")
    return False


def restore(bucket: Path, work: Path) -> Path | None:
    """Brings back the newest checkpoint that was stored whole, the lines of its steps and the log of earlier starts. A
    torn one stays in the bucket, because the mount may only show an old state of it."""
    if (bucket / "train.log").is_file():
        copy_file(bucket / "train.log", work / "train.log")
    for checkpoint in numbered(bucket / "checkpoints"):
        target, marker = work / "checkpoints" / checkpoint.name, read_object(checkpoint / MARKER)
        if marker is not None and fetch(checkpoint, target, marker):
            tell("note", text=f"{checkpoint.name} was kept and is whole")
            for name, place in (("metrics.jsonl", work), ("before.json", work / "checkpoints")):
                if (target / name).is_file():
                    os.replace(target / name, place / name)
            return checkpoint
        tell("note", text=f"{checkpoint.name} was not kept whole and is left out")
    return None


def fetch(source: Path, target: Path, files: dict[str, FileDigest]) -> bool:
    """Copies files, and returns whether all have the bytes that were stored. If not, `target` is removed."""
    for name, digest in files.items():
        try:
            whole = copy_file(source / name, target / name) == digest
        except FileNotFoundError:
            whole = False
        if not whole:
            shutil.rmtree(target, ignore_errors=True)
            return False
    return True


def read_object(path: Path) -> Any:
    """The marker or the plan of an earlier job; None if there is none, or if it is torn."""
    with suppress(FileNotFoundError):
        return json_object(path.read_bytes())
    return None


def remove_kept(folder: Path) -> None:
    """Removes a checkpoint, its marker first, so that nobody finds the marker without its files."""
    with suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def copy_file(source: Path, target: Path) -> FileDigest:
    """Copies a file, and returns the digest of what was read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as file, open(target, "wb") as copy:
        while block := file.read(1 << 20):
            digest.update(block)
            copy.write(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def put_json(path: Path, document: Any) -> None:
    """Writes JSON directly under its final name, because a mounted bucket may not support renaming."""
    path.write_bytes(as_json(document))


# --- main ---


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])  # none with PYTHONOPTIMIZE=2
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--probe", action="store_true", help="time fp32 and bf16 on this processor and stop")
    parser.add_argument("--data", type=Path, help="path of the plan's data on this machine")
    parser.add_argument("--attended", action="store_true", help="end at a checkpoint when standard input closes")
    parser.add_argument("--job", action="store_true", help="as a cloud job: keep what it makes in the plan's folder")
    parser.add_argument("--rehearse", action="store_true", help="with --job: write nothing to the Hub")
    arguments = parser.parse_args(argv)
    if arguments.rehearse and not arguments.job:
        parser.error("--rehearse goes with --job")
    if arguments.job or arguments.probe or "TORCHELASTIC_RUN_ID" not in os.environ:  # no launcher started this process
        forget_launchers()
    if arguments.job:
        return run_job(arguments.plan, arguments.data, rehearse=arguments.rehearse)
    folder = arguments.plan.resolve().parent
    if is_main_process() and not arguments.probe:  # at once: another process of this run may write it later
        with suppress(OSError):
            (folder / "train.failed.json").unlink(missing_ok=True)
    try:
        plan = load_plan(arguments.plan)
        if not arguments.probe:
            check_processes(plan["placement"])
        prepare_environment(plan["placement"])
        with explained_errors():
            if arguments.probe:
                event("probe", **probe(plan))
            else:
                if arguments.attended:
                    watch_standard_input(folder)
                use_data(plan, arguments.data)
                limit_requests()
                require_hub_inputs(plan)
                with in_place(folder):
                    run(plan, folder, resume=arguments.resume)
    except Refused as refusal:
        tell_failure(refusal, None if arguments.probe else folder)
        return refusal.exit_code
    return 0


def run(plan: Plan, folder: Path, *, resume: bool) -> None:
    """Reads the data, loads the model, checks, trains and checks again. Writes `train.json` last."""
    started = time.monotonic()
    recipe, placement = plan["recipe"], plan["placement"]
    tuned = folder / TUNED[recipe["finetuning_type"]]
    check_optimizer(recipe)
    event("stage", text="reading the data")
    check_base(recipe["model"], recipe["revision"])
    tokenizer = load_tokenizer(recipe["model"], recipe["revision"])
    checkpoint = newest_checkpoint(folder / "checkpoints") if resume else None
    if checkpoint is not None:
        tokenizer.day = first_day(folder) or tokenizer.day
    pictures = load_pictures(recipe, tokenizer)
    named = plan.get("asked", {}).get("columns", True) is not None
    recorded = recorded_split(folder, checkpoint, plan.get("recipe_hash"))
    data = load_data(recipe, tokenizer, recorded, pictures, named=named)
    event("data", **data["figures"])
    keep_rows(data, pictures, folder)

    event("stage", text="loading the model")
    base = base_folder(recipe) if is_full(recipe) else None
    if checkpoint is not None:
        check_split(checkpoint, placement)
    watch = Watch(folder, data, recipe, checkpoint, keep=placement["save_total_limit"])
    watch.recipe_hash = plan.get("recipe_hash")
    trainer = build_trainer(recipe, placement, folder, tokenizer, data, watch)
    watch.require_folder()  # the trainer makes one if there is none
    if is_main_process():
        started_with = environment(trainer, data, base_weights(recipe), folder)
        if checkpoint is not None:
            check_inputs(folder, started_with["base_weights"], started_with["data"]["rows_sha256"])
        write_json(folder / "environment.json", started_with)
    # Every process takes part in the checks: the loss is gathered from all, and they would wait for a missing one.
    event("stage", text=MEASURING)
    checks = Checks(trainer, tokenizer, data, recipe)
    checks.before_training(resumed=checkpoint is not None, folder=folder)

    event("stage", text=TRAINS)
    train(trainer, watch, recipe["seed"], checkpoint)
    event("stage", text=f"saving {tuned.name}/")
    save(trainer, tuned, base, pictures)
    checks.after_training(folder, tuned)
    if is_main_process():
        write_json(folder / "train.json", report(plan, watch, checks, tuned, time.monotonic() - started))
        event("done", verdict=checks.verdict())
    trainer.accelerator.end_training()


def keep_rows(data: Data, pictures: Pictures | None, folder: Path) -> None:
    """Writes samples.jsonl and held_out.jsonl, and the pictures of their rows. Only the main process writes them."""
    if not is_main_process():
        return
    write_rows(folder / "samples.jsonl", keep_pictures(data["train"][:SAMPLE_ROWS], pictures, folder))
    write_rows(folder / "held_out.jsonl", keep_pictures(data["held_out"], pictures, folder))


def keep_pictures(rows: list[Any], pictures: Pictures | None, folder: Path) -> list[Any]:
    """Stores the pictures of rows under `images/` of the run directory. Returns the rows with the names of these files.
    A file is named by its digest, so a picture of many rows is stored once."""
    if pictures is None:
        return rows
    images = folder / "images"
    images.mkdir(exist_ok=True)
    named = []
    for row in rows:
        names = []
        for image, digest in zip(row.get("images") or (), row.get("image_sha256") or (), strict=True):
            name = f"{digest}.{picture_format(image, pictures.folder)}"
            if not (images / name).is_file():
                write_whole(images / name, encoded_bytes(image, digest, pictures.folder))
            names.append(f"images/{name}")
        named.append({**row, "images": names} if names else row)
    return named


def load_pictures(recipe: Recipe, tokenizer: Any) -> Pictures | None:
    """The reader of the pictures in rows; None for a recipe of text."""
    if not recipe.get("images"):
        return None
    folder = picture_folder(recipe["data"], recipe.get("data_file"), recipe["data_revision"])
    return Pictures(recipe, tokenizer, folder)


def load_data(
    recipe: Recipe,
    tokenizer: Any,
    recorded: set[int] | None = None,
    pictures: Pictures | None = None,
    *,
    named: bool = True,
) -> Data:
    """Encoded rows, split into `train` and `held_out`, with their figures and the order in which they are fed. The rows
    with the numbers `recorded` stay held out, as in an earlier start. `named`: the user chose the columns."""
    encode = Encoder(recipe, tokenizer, pictures)
    if not Path(recipe["data"]).exists():  # the planner has seen only the first rows
        encode.decodes, encode.leaves_out = True, named
    source = iter_rows(
        recipe["data"],
        split=recipe["split"],
        config=recipe["data_config"],
        revision=recipe["data_revision"],
        file=recipe.get("data_file"),
    )
    rows = [encode(index, line, row) for index, (line, row) in enumerate(source)]
    if not rows:
        raise Refused(
            f"{recipe['data']} has no rows",
            code="empty_dataset",
            expected="at least one row",
            got=f"no rows in {recipe['split']}",
            hint="use another file, or another split, such as split: train",
        )
    rows = trainable_rows(rows, recipe)
    contents, questions = contents_of(rows), [digest_of(normalised(question_of(row))) for row in rows]
    if recorded is None:
        images = [row.get("image_sha256", []) for row in rows]
        exchanges = exchanges_of(rows)
        held_out = held_out_rows(contents, questions, recipe["held_out_fraction"], recipe["seed"], images, exchanges)
    else:
        held_out = {index for index, row in enumerate(rows) if row["row"] in recorded}
    train = [row for index, row in enumerate(rows) if index not in held_out]
    lengths, trained = [len(r["input_ids"]) for r in train], [trained_tokens(r) for r in train]
    figures: DataFigures = {
        "rows": len(rows),
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "truncated_rows": sum(r["truncated"] for r in rows),
        "skipped_rows": encode.count - len(rows),
        "tokens": sum(lengths),
        "longest_row_tokens": max(lengths),
        "trained_token_share": round(sum(trained) / sum(lengths), 4),
        **repeated(contents, questions, held_out),
        "notes": encode.notes,
    }
    order = feeding_order(len(train), recipe["max_steps"] * recipe["effective_batch_size"], recipe["seed"])
    rows_held_out = [rows[i] for i in sorted(held_out)]
    return {"train": train, "held_out": rows_held_out, "figures": figures, "order": order, "pictures": pictures}


class TrainFigures(TypedDict):
    """Figures that were measured during training. Memory is by kind: `rss`, `cuda`, `mps`."""

    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    peak_memory_bytes: dict[str, int]
    baseline_memory_bytes: dict[str, int]


class TrainRecord(TypedDict):
    """`train.json`."""

    schema: Literal["skill-train/step/1"]
    step: Literal["train"]
    run: str | None  # the id of a run in the cloud
    recipe_hash: str | None
    steps: int
    verdict: Verdict
    outputs: dict[str, FileDigest]
    saved_dtype: str
    smaller_layout: Reason | None  # why a second try trained with smaller batches
    checks: list[TrainingCheck]
    example: str
    answer: Answer
    data: DataFigures
    figures: TrainFigures
    seconds: float
    finished_at: str


def report(plan: Plan, watch: Watch, checks: Checks, tuned: Path, seconds: float) -> TrainRecord:
    """Builds `train.json`. `seconds` are those of this start; the record adds the steps of earlier starts."""
    steps = [line for line in watch.lines if line["tokens_per_second"]]
    last = [line for line in steps if line.get("start", 1) == watch.start]
    settled = last[1:] or steps[1:] or steps  # the first step warms up
    timed = sum(line["seconds"] or 0.0 for line in settled)
    earlier = sum(line["seconds"] or 0.0 for line in steps if line.get("start", 1) < watch.start)
    beside = (tuned.with_name(name) for name in ("environment.json", watch.metrics.name, ROWS[0]))
    described = [*files_of(tuned), *(path for file in beside for path in files_of(file))]
    smaller = [reason for reason in plan.get("reasons") or [] if reason.get("rule") == SMALLER]
    return {
        "schema": "skill-train/step/1",
        "step": "train",
        "run": run_id(),
        "recipe_hash": plan.get("recipe_hash"),
        "steps": checks.trainer.state.global_step,
        "verdict": checks.verdict(),
        "outputs": {str(path.relative_to(tuned.parent)): file_digest(path) for path in described},
        "saved_dtype": saved_type(tuned),
        "smaller_layout": smaller[-1] if smaller else None,
        "checks": checks.results,
        "example": marked_text(checks.tokenizer, checks.rows[0])[:2000],
        "answer": checks.answer,
        "data": checks.data["figures"],
        "figures": {
            "first_loss": watch.lines[0]["loss"],
            "last_loss": watch.lines[-1]["loss"],
            "tokens_per_second": round(sum(line["tokens"] for line in settled) / timed, 1) if timed else None,
            "seconds_per_step": round(timed / len(settled), 4) if timed else None,
            "peak_memory_bytes": watch.peak_bytes,
            "baseline_memory_bytes": watch.baseline_bytes,
        },
        "seconds": round(seconds + earlier, 2),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def saved_type(folder: Path) -> str:
    """The dtype of the first weight in the first file of a folder, by torch's name. Other weights may differ."""
    from safetensors import safe_open

    with safe_open(str(min(folder.glob("*.safetensors"))), "pt") as file:
        weight = file.get_tensor(min(file.keys()))
    return str(weight.dtype).removeprefix("torch.")


class TimedPass(TypedDict):
    seconds: float
    loss: float | None


def probe(plan: Plan) -> dict[str, TimedPass]:
    """Seconds of a forward and backward pass, and the loss, in fp32 and in bf16: the plan's model on its device."""
    import torch

    recipe, placement = plan["recipe"], plan["placement"]
    if placement["threads"]:
        torch.set_num_threads(placement["threads"])
    check_base(recipe["model"], recipe["revision"])
    model = load_model(recipe, placement | {"dtype": "float32"})
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(0, size, (1, 128), generator=torch.manual_seed(0)).to(placement["device"])
    figures: dict[str, TimedPass] = {}
    for name in ("float32", "bfloat16"):
        model.to(device=placement["device"], dtype=getattr(torch, name))
        model.requires_grad_(False)  # as with an adapter: only activations get gradients
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            loss = model(inputs_embeds=embedded, labels=ids).loss
            loss.backward()
            value = number(loss.item())  # waits for the device
            seconds.append(time.monotonic() - started)
        figures[name] = {"seconds": min(seconds), "loss": value}
    return figures


if __name__ == "__main__":
    seek_cycles_seldom()
    sys.exit(main(sys.argv[1:]))
