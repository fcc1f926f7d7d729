"""Explains why a Hugging Face job ended without a result, and what would help. Pure functions.

The Hub describes the end of a job in one sentence (`status.message`). It has no field for the exit code, and a timeout
has the stage ERROR like any failure. The program's own record and its last lines tell why it failed. Each rule below
names the source of its words.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from skill_train.core.errors import DIED_OF_MEMORY, UsageError, quoted
from skill_train.core.units import gigabytes
from skill_train.facts import Flavor
from skill_train.run.records import Number, convert
from skill_train.run.train_record import TrainFailure

BILLING = "https://huggingface.co/settings/billing"
LONG_WAIT_SECONDS = 1200.0  # a shorter wait for a machine needs no explanation


class Ending(msgspec.Struct, frozen=True):
    """Everything that is known about a job that has ended."""

    # stage, message: as the Hub states them
    stage: str
    message: str | None = None
    failure: object = None  # `train.failed.json` from the folder of the run, unchecked; None if it does not exist
    lines: tuple[str, ...] = ()  # the last lines of the log
    flavor: str | None = None
    timeout_seconds: int | None = None
    step: int | None = None  # the last step; None before the first one
    memory_bytes: dict[str, Number] = {}  # the peak memory that the program measured, by kind (`cuda`, `rss`)
    trained: bool = False  # the complete result is in the bucket, however the job ended


class Story(msgspec.Struct, frozen=True):
    """What happened to a job, and what to do next."""

    code: str  # a stable word for programs
    message: str  # one sentence
    help: str  # what would help, as a phrase
    # what the next job needs: `again` (nothing), `time`, `gpu` (more GPU memory), `ram`, `credit`, `token`, `recipe` or
    # `data`
    remedy: str = "again"
    exit_code: int = 5  # 3 does not fit, 4 no access, 8 the Hub was unavailable, 5 everything else
    got: str = ""  # the words that the explanation rests on
    next: tuple[str, ...] = ()  # commands, the best one first

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "help": self.help, "got": self.got}


_BAD_GPU = Story(
    code="bad_machine",
    message="the GPU of the job's machine does not work, so training never began",
    help="start the job again to get another machine, or use another flavor if it happens again",
)
# Words in a log, and their meaning. The first pattern that matches counts. A comment names the source of the words.
SIGNS = {
    # torch.OutOfMemoryError of torch 2.x: pytorch/pytorch#16417 (2024-03), lllyasviel/FramePack#369 (2025-04)
    r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError": Story(
        code="out_of_memory",
        message="the GPU ran out of memory",
        help="a flavor with more memory on each GPU, a smaller max_length, or load_in_4bit",
        remedy="gpu",
        exit_code=3,
    ),
    DIED_OF_MEMORY: Story(
        code="out_of_memory",
        message="the machine of the job ran out of memory (RAM, not the GPU's)",
        help="a flavor with more RAM, or a smaller model",
        remedy="ram",
        exit_code=3,
    ),
    # an H200 whose fabric manager was not ready: huggingface_hub#4134 (2026-04), #4128 (open)
    r"Error 802|system not yet initialized|CUDA-capable device\(s\) is/are busy or unavailable": _BAD_GPU,
    # users' reports, 2026: the answer of POST /api/jobs
    r"[Cc]redit balance is insufficient|402 (?:Client Error|Payment Required)": Story(
        code="no_credit",
        message="the account that pays for the job has no credit left",
        help=f"add credit at {BILLING}",
        remedy="credit",
        exit_code=4,
    ),
    # GatedRepoError of huggingface_hub 2.4; its text also names 401 or 403; datasets 5.2
    (
        r"GatedRepoError|Cannot access gated repo|is restricted and you are not in the authorized list"
        r"|is a gated dataset on the Hub"
    ): Story(
        code="gated",
        message="the job may not read a gated model or dataset",
        help="request access on its page, with the account that the job's token belongs to",
        remedy="token",
        exit_code=4,
    ),
    # huggingface_hub 2.4 with X-Error-Message; hf jobs: users' reports, 2026
    r"403 (?:Forbidden|Client Error)|required permissions to complete this action": Story(
        code="no_permission",
        message="the job's token lacks a permission",
        help="sign in with a token that may write to the model repository and run jobs",
        remedy="token",
        exit_code=4,
    ),
    # huggingface_hub 2.4 [ran]
    r"401 (?:Unauthorized|Client Error)|Invalid user token|Invalid credentials in Authorization header": Story(
        code="bad_token",
        message="the Hub rejected the job's token; it may have been revoked while the job ran",
        help="sign in again",
        remedy="token",
        exit_code=4,
    ),
    # transformers 5.23 and huggingface_hub 2.4, at a Hub that was down, hung up or answered 429 or 5xx [ran]
    (
        r"We couldn't connect to '|LocalEntryNotFoundError: |429 Too Many Requests|\[Retry 5/5\]"
        r"|^httpx2?\.(?:Connect|Read|RemoteProtocol)\w+: |Couldn't reach '\S+' on the Hub"  # the last: datasets 5.2
    ): Story(
        code="hub_unreachable",
        message="the job could not reach the Hub",
        help="start the job again; https://status.huggingface.co shows whether the Hub is down",
        exit_code=8,
    ),
    # the text of errno 28 on Linux
    r"No space left on device": Story(
        code="no_disk",
        message="the job's disk was full",
        help="a flavor with a larger disk, or a smaller model",
        exit_code=3,
    ),
    # words of TRL and datasets, or the KeyError of code without a check
    (
        r"KeyError: '(?:messages|prompt|completion|text|conversations|chosen|rejected|instruction|output)'"
        r"|[Cc]olumn (?:name )?\S+ not in the dataset|has no column"
    ): Story(
        code="wrong_columns",
        message="the data lacks a column that the recipe needs",
        help="list the columns with `skill-train data`, and name them under columns in the recipe",
        remedy="data",
    ),
    # the Trainer of transformers prints {'loss': nan, …}
    r"['\"]loss['\"]: *'?nan\b|\bloss is nan\b": Story(
        code="bad_loss",
        message="the loss became NaN",
        help="halve the learning_rate, shorten max_length, or train in float32",
        remedy="recipe",
    ),
    # uv 0.9, which installs the packages in the program's header
    r"No solution found when resolving|ModuleNotFoundError: No module named": Story(
        code="missing_package",
        message="a package that training needs could not be installed in the job",
        help="start the job again if the package index was down; the header of train.py lists the versions",
    ),
}

# What the next job needs after each failure that the program (scripts/train.py) reports itself; after any other failure
# the recipe or the data has to change.
_OWN_REMEDY = {
    "out_of_memory": "ram",
    "no_disk": "again",
    "interrupted": "again",
    "process_lost": "ram",
    "native_crash": "again",
    "push_failed": "again",
    "output_changed": "again",
    "public_repository": "again",
    "not_kept": "again",
    "missing_package": "again",
    "too_few_devices": "again",  # earlier versions wrote this code into the records of their runs
    "hub_unreachable": "again",
    "bad_loss": "recipe",
    "another_run": "recipe",
    "no_such_target": "recipe",
    "no_permission": "token",
    "bad_token": "token",
    "gated": "token",
    "not_signed_in": "token",
    "no_credit": "credit",
}
_WITHOUT_A_REASON = ("program_failed", "native_crash")  # from `train.py --job`, if the child gave no reason


def explain(ending: Ending, *, run: str, offered: Iterable[Flavor] = ()) -> Story:
    """Explains why the job ended as it did.

    Args:
        run: the run, as the suggested commands name it.
        offered: the available flavors, of which a larger one may be suggested.
    """
    story = _stage_story(ending) or _message_story(ending) or _program_story(ending) or _log_story(ending.lines)
    return _with_next(_with_memory(story or _unknown(ending), ending), ending, run, tuple(offered))


def waiting(stage: str, seconds: float, flavor: str | None) -> str:
    """A sentence about a job that has waited for long; empty if the wait is normal.

    A job of huggingface_hub#4376 waited 12 hours for an h200x8. Waiting for a machine is not billed
    (huggingface.co/docs/hub/jobs-pricing, 2026-08).
    """
    if stage != "SCHEDULING" or seconds < LONG_WAIT_SECONDS:
        return ""
    which = f"a free {flavor}" if flavor else "a free machine"
    return (
        f"the job has waited {seconds / 60:.0f} minutes for {which}; waiting costs nothing, but may take long: "
        "cancel the job, and resume with another --flavor"
    )


def exit_code(message: str | None) -> int | None:
    """The exit code in the Hub's sentence, such as `Job failed with exit code: 137. Reason: OOMKilled`."""
    match = re.search(r"exit code:? (\d{1,9})\b", message or "")
    return int(match[1]) if match else None


def failed_event(lines: Iterable[str]) -> TrainFailure | None:
    """The last `failed` event of the program among the lines of a log."""
    for line in reversed(tuple(lines)):
        if '"failed"' in line:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and event.get("event") == "failed" and (failure := _failure(event)):
                return failure
    return None


def _failure(document: Any) -> TrainFailure | None:
    """The failure in a document such as `train.failed.json`; None if the document has another form, because a bucket
    and a log may contain anything."""
    try:
        return convert(document, TrainFailure, Path("train.failed.json"))
    except UsageError:
        return None


def larger(offered: Iterable[Flavor], name: str | None, need: str) -> Flavor | None:
    """The cheapest flavor with more memory and the same number of GPUs, so that the plan can use it; None without one.

    Args:
        need: `gpu` for the memory of each GPU, `ram` for the memory of the machine.
    """
    flavors = tuple(offered)
    now = next((flavor for flavor in flavors if flavor.name == name), None)
    if now is None:
        return None
    have = _memory(now, need)
    fitting = [f for f in flavors if f.gpus == now.gpus and bool(f.gpu) == bool(now.gpu) and _memory(f, need) > have]
    if need == "ram":  # the GPU must not shrink
        fitting = [f for f in fitting if _memory(f, "gpu") >= _memory(now, "gpu")]
    return min(fitting, key=lambda f: (f.usd_per_hour, f.name), default=None)


def _memory(flavor: Flavor, need: str) -> int:
    return flavor.ram_bytes if need == "ram" else flavor.gpu_memory_bytes or 0


def _stage_story(ending: Ending) -> Story | None:
    words = ending.message or ""
    if ending.stage == "DELETED":
        message, rest = "the job was deleted on the Hub", "its checkpoints may still be in the bucket"
        return Story(code="cancelled", message=message, help=rest, got=words)
    if re.search(r"spend(?:ing)? limit reached", words, re.IGNORECASE):  # hub-docs, jobs in resource groups, 2026-08
        return Story(
            code="no_credit",
            message="the resource group has reached its spending limit",
            help="ask the group's administrators for a higher limit, or use a cheaper flavor",
            remedy="credit",
            exit_code=4,
            got=words,
        )
    if ending.stage == "CANCELED":
        rest = "the next job continues from its newest checkpoint"
        return Story(code="cancelled", message="the job was cancelled", help=rest, got=words)
    return None


def _message_story(ending: Ending) -> Story | None:
    words = ending.message or ""
    if re.search(r"\btime(?:d )?\s?out\b", words, re.IGNORECASE):  # `Job timeout`: hub-docs and users' reports, 2026
        limit = f" after {ending.timeout_seconds / 60:.0f} minutes" if ending.timeout_seconds else ""
        message = f"the job reached its timeout{limit}"
        return Story(code="timeout", message=message, help="use a longer timeout", remedy="time", got=words)
    if exit_code(words) == 137 or "OOMKilled" in words:  # 128 + SIGKILL; the reason: users' reports, 2026
        sure = "ran out of memory" if "OOMKilled" in words else "most likely ran out of memory"
        message = f"the machine of the job {sure} (RAM, not the GPU's)"
        rest = "a flavor with more RAM, or a smaller model"
        return Story(code="out_of_memory", message=message, help=rest, remedy="ram", exit_code=3, got=words)
    if re.search(r"failed to start", words, re.IGNORECASE):
        rest = "start the job again"
        return Story(code="bad_machine", message="the job could not be started", help=rest, got=words)
    return None


def _program_story(ending: Ending) -> Story | None:
    """The explanation by the training program itself. If the exit code in the record differs from the job's, the record
    belongs to an earlier job and does not count."""
    code = exit_code(ending.message)
    record = _failure(ending.failure)
    failure = failed_event(ending.lines) or (record if record and code in (None, record.exit_code) else None)
    if failure is None:
        return None
    error = failure.error
    if error.code in _WITHOUT_A_REASON:
        story = _log_story(error.got.splitlines()) or _log_story(ending.lines)
        if story is not None:
            return story
    if error.code == "device_unavailable":  # its own words are for a machine that one can change
        return replace(_BAD_GPU, got=error.message)
    remedy = _OWN_REMEDY.get(error.code, "data")
    if error.code == "out_of_memory" and "cuda" in error.message.lower():
        remedy = "gpu"
    ours = failure.exit_code if failure.exit_code in (3, 4, 8) else 5
    return Story(error.code, error.message, error.hint, remedy, ours, error.got)


def _log_story(lines: Sequence[str]) -> Story | None:
    """The explanation by known words of libraries in the log. Events of the program, such as notes on retries, are
    skipped."""
    words_of_others = [line for line in reversed(lines) if not line.startswith('{"event"')]
    for pattern, story in SIGNS.items():
        matching = next((line for line in words_of_others if re.search(pattern, line)), None)
        if matching is not None:
            return replace(story, got=matching.strip()[:300])
    return None


def _unknown(ending: Ending) -> Story:
    code = exit_code(ending.message)
    words = [line.rstrip() for line in reversed(ending.lines) if not line.startswith('{"event"')]
    errors = [line for line in words if re.match(r"\S", line) and not re.search(r"\w*Warning: ", line)]
    last = next((line for line in errors if re.match(r"[\w.]*(?:Error|Exception)(?::|$)", line)), (errors or [""])[0])
    outcome = "the job failed" if code is None else f"the program of the job ended with exit code {code}"
    message = f"{outcome}: {last[:200]}" if last else outcome
    return Story(code="job_failed", message=message, help="read its log", got=ending.message or "")


def _with_memory(story: Story, ending: Ending) -> Story:
    kind = {"gpu": "cuda", "ram": "rss"}.get(story.remedy)
    used = ending.memory_bytes.get(kind) if kind else None
    if used is None or story.exit_code != 3:
        return story
    step = f" up to step {ending.step}" if ending.step else ""
    return replace(story, message=f"{story.message}; {gigabytes(used)} were in use{step}")


def _with_next(story: Story, ending: Ending, run: str, offered: tuple[Flavor, ...]) -> Story:
    word = quoted(run)
    if ending.trained:
        place = "the complete result is in the bucket"
        both = f"{story.help}; {place}" if story.help else place
        return replace(story, help=both, next=(f"skill-train pull {word}", f"skill-train resume {word}"))
    again, log = f"skill-train resume {word}", f"skill-train logs {word} --tail 200"
    if story.code == "not_kept":  # the result was pushed, and `pull` also looks in the repository
        return replace(story, next=(f"skill-train pull {word}", again))
    if story.remedy in ("gpu", "ram"):
        bigger = larger(offered, ending.flavor, story.remedy)
        return replace(story, next=(f"{again} --flavor {bigger.name}", log) if bigger else (log,))
    following = {
        "again": (again, log),
        "time": (again,),
        "credit": (again,),
        "token": ("hf auth login", again),
        "recipe": (log,),
        "data": (log,),
    }
    return replace(story, next=following[story.remedy])
