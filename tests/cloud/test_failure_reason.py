"""Why a job ended, told from messages that users and the Hub have shown. Each has its source."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skill_train.cloud.failure_reason import Ending, Story, exit_code, explain, larger, waiting
from skill_train.hub import flavors

OFFERED = flavors.shipped()
RUN = "runs/tickets cloud"
WORD = "'runs/tickets cloud'"
NAMED = f"skill-train resume {WORD}"
# The Hub's sentence for a program that ended with 1: reported by users of several projects, 2026.
FAILED = "Job failed with exit code: 1. Reason: Error"
FIVE = "Job failed with exit code: 5. Reason: Error"

# Last lines of real logs, cut to what is told here.
CUDA_OOM = (  # pytorch/pytorch#16417, 2024-03-13
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use."
)
CUDA_OOM_OLD = (  # pytorch/pytorch#59778, 2021-06-10
    "RuntimeError: CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already "
    "allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)"
)
ERROR_802 = (  # huggingface_hub#4134, 2026-04-23, on an h200
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
)
NO_CREDIT = (  # users' reports, 2026
    "huggingface_hub.errors.HfHubHTTPError: 402 Client Error: Payment Required. Pre-paid credit balance is "
    "insufficient - add more credits to your account to use Jobs."
)
FORBIDDEN = (  # katanaml/sparrow#31, 2023-07-31, at the push after training
    "huggingface_hub.utils._errors.HfHubHTTPError: 403 Client Error: Forbidden for url: "
    "https://huggingface.co/api/models/katanaml-org/invoices-donut-model-v1/commit/main"
)
JOB_WRITE = (  # users' reports, 2026
    "You don't have the required permissions to complete this action on namespace X, missing permissions: job.write."
)
BAD_TOKEN = "huggingface_hub.errors.HfHubHTTPError: 401 Client Error. Invalid user token."  # huggingface_hub 2.4, [ran]
GATED = (  # the text of huggingface_hub's GatedRepoError
    "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url https://huggingface.co/x."
)
NO_COLUMN = "KeyError: 'messages'"  # trl#1777 and LlamaFactory#5341 end so
NAN = "{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0002, 'epoch': 0.1}"  # the Trainer of transformers
NO_MODULE = "ModuleNotFoundError: No module named 'trl'"
FULL = "OSError: [Errno 28] No space left on device"
BAD_ALLOC = "  what():  std::bad_alloc"  # with an address space of 0.55 GB [ran]

# What `train.py --job` printed, and the last of its child's words that its event repeats: transformers 5.23,
# huggingface_hub 2.4, datasets 5.2, at a Hub that answered so [ran], or not at all.
GATED_CONFIG = (
    "OSError: You are trying to access a gated repo.",
    "Make sure to have access to it at https://huggingface.co/me/tiny.",
    "403 Client Error. (Request ID: made-up)",
    "",
    "Cannot access gated repo for url http://127.0.0.1:36607/me/tiny/resolve/910a37c/config.json.",
)
GATED_ROWS = (  # datasets 5.2, load.py
    "datasets.exceptions.DatasetNotFoundError: Dataset 'me/rows' is a gated dataset on the Hub. Visit the dataset page "
    "at https://huggingface.co/datasets/me/rows to ask for access."
)
NOT_CONNECTED = (
    "OSError: We couldn't connect to 'http://hub.invalid' to load the files, and couldn't find them in the "
    "cached files."
)
NO_ROWS = "ConnectionError: Couldn't reach 'me/rows' on the Hub (ConnectTimeout)"  # datasets 5.2, load.py
GIVEN_UP = (  # every try was answered 503: the last words name no Hub
    "HTTP Error 503 thrown while requesting HEAD http://127.0.0.1:34487/me/tiny/resolve/910a37c/model.safetensors",
    "Retrying in 8s [Retry 5/5].",
    "OSError: me/tiny does not appear to have a file named model.safetensors or model.safetensors.index.json and thus "
    "cannot be loaded with `safetensors`. Please do not set `use_safetensors=True`.",
)
HUNG_UP = (
    "httpx2.RemoteProtocolError: Server disconnected without sending a response.",
    "OSError: Can't load the configuration of 'me/tiny'. If you were trying to load it from "
    "'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
)


@pytest.mark.parametrize(
    ("line", "code", "exit_", "first"),
    [
        (CUDA_OOM, "out_of_memory", 3, f"{NAMED} --flavor a100-large"),
        (CUDA_OOM_OLD, "out_of_memory", 3, f"{NAMED} --flavor a100-large"),
        (ERROR_802, "bad_machine", 5, NAMED),
        (NO_CREDIT, "no_credit", 4, NAMED),
        (FORBIDDEN, "no_permission", 4, "hf auth login"),
        (JOB_WRITE, "no_permission", 4, "hf auth login"),
        (BAD_TOKEN, "bad_token", 4, "hf auth login"),
        (GATED, "gated", 4, "hf auth login"),
        (NO_COLUMN, "wrong_columns", 5, "skill-train logs 'runs/tickets cloud' --tail 200"),
        (NAN, "bad_loss", 5, "skill-train logs 'runs/tickets cloud' --tail 200"),
        (NO_MODULE, "missing_package", 5, NAMED),
        (FULL, "no_disk", 3, NAMED),
        ("AssertionError", "job_failed", 5, NAMED),
    ],
)
def test_a_program_that_said_nothing_but_its_last_words(line: str, code: str, exit_: int, first: str) -> None:
    """An l40sx1 has 48 GB; the cheapest of one GPU with more are rtx-pro-6000 at $2.75 and a100-large at $2.50, of
    96 and 80 GB (huggingface.co/docs/hub/jobs-pricing, 2026-08-22)."""
    story = _story(FAILED, lines=("Traceback (most recent call last):", line), flavor="l40sx1")
    assert (story.code, story.exit_code, story.next[0]) == (code, exit_, first)
    assert story.help


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (  # what transformers 5.23 prints at the end of every start [ran]
            (
                "ValueError: the frobnicator is missing",
                "/venv/lib/transformers/training_args.py:1541: FutureWarning: `gradient_checkpointing` is deprecated",
                "  warnings.warn(",
            ),
            "ended with exit code 1: ValueError: the frobnicator is missing",
        ),
        (("a/b.py:3: UserWarning: old", "  warnings.warn("), "ended with exit code 1"),
        (
            ("Traceback (most recent call last):", "  raise Odd()", "pkg.mod.OddError", "leaving"),
            "code 1: pkg.mod.OddError",
        ),
        (("loading", "Killed by the operator"), "ended with exit code 1: Killed by the operator"),
    ],
)
def test_the_last_words_are_no_warning(lines: tuple[str, ...], said: str) -> None:
    assert _story(FAILED, lines=lines).message.endswith(said)


@pytest.mark.parametrize(
    ("stage", "message", "code", "exit_", "first"),
    [
        # hub-docs and users' reports, 2026: there is no stage for a timeout.
        ("ERROR", "Job timeout", "timeout", 5, NAMED),
        # A VS Code extension whose field names were checked against the live API, 2026-10-09.
        ("ERROR", "Job failed with exit code: 137. Reason: OOMKilled", "out_of_memory", 3, f"{NAMED} --flavor l4x1"),
        ("ERROR", "Job failed with exit code: 137. Reason: Error", "out_of_memory", 3, f"{NAMED} --flavor l4x1"),
        ("CANCELED", None, "cancelled", 5, NAMED),
        # hub-docs, jobs in resource groups, 2026-08.
        ("CANCELED", "Resource group spend limit reached", "no_credit", 4, NAMED),
        ("DELETED", None, "cancelled", 5, NAMED),
        ("ERROR", "Job failed to start: volume me/x not found", "bad_machine", 5, NAMED),
        ("ERROR", FAILED, "job_failed", 5, NAMED),
        ("ERROR", None, "job_failed", 5, NAMED),
    ],
)
def test_the_words_of_the_hub(stage: str, message: str | None, code: str, exit_: int, first: str) -> None:
    """An a10g-small has 15 GB of RAM and a GPU of 24 GB; l4x1 has 30 GB, at $0.80, and its GPU is as large."""
    story = explain(Ending(stage, message, flavor="a10g-small", timeout_seconds=1800), run=RUN, offered=OFFERED)
    assert (story.code, story.exit_code, story.next[0]) == (code, exit_, first)


def test_the_time_that_was_up_is_named() -> None:
    assert "after 30 minutes" in _story("Job timeout", timeout_seconds=1800).message


def test_the_program_speaks_for_itself() -> None:
    """Its event comes before anything that its log resembles."""
    error = {"code": "bad_loss", "message": "the loss is nan at step 7: a learning rate too high", "hint": "half of it"}
    event = json.dumps({"event": "failed", "exit_code": 5, "error": error})
    story = _story("Job failed with exit code: 5. Reason: Error", lines=(CUDA_OOM, event, "torch says goodbye"))
    assert (story.code, story.message, story.help) == ("bad_loss", error["message"], "half of it")


@pytest.mark.parametrize(
    ("lines", "code", "exit_", "first"),
    [
        (GATED_CONFIG, "gated", 4, "hf auth login"),
        ((GATED_ROWS,), "gated", 4, "hf auth login"),
        ((ERROR_802,), "bad_machine", 5, NAMED),
        ((CUDA_OOM,), "out_of_memory", 3, f"{NAMED} --flavor a100-large"),
        ((BAD_ALLOC,), "out_of_memory", 3, f"{NAMED} --flavor a100-large"),
        ((NOT_CONNECTED,), "hub_unreachable", 8, NAMED),
        ((NO_ROWS,), "hub_unreachable", 8, NAMED),
        (GIVEN_UP, "hub_unreachable", 8, NAMED),
        (HUNG_UP, "hub_unreachable", 8, NAMED),
        (("ZeroDivisionError: division by zero",), "program_failed", 5, f"skill-train logs {WORD} --tail 200"),
    ],
)
@pytest.mark.parametrize("kept", [True, False], ids=["with its log", "its log is gone"])
def test_a_child_that_said_nothing_but_its_last_words(
    lines: tuple[str, ...], code: str, exit_: int, first: str, kept: bool
) -> None:
    """Of every uncaught error of its child `train.py --job` says that it failed, and repeats the last lines."""
    failure = _said("program_failed", got="\n".join(lines))
    logged = (*lines, json.dumps({"event": "failed", **failure})) if kept else ()
    story = _story(FIVE, lines=logged, failure=failure, flavor="l40sx1")
    assert (story.code, story.exit_code, story.next[0]) == (code, exit_, first)


def test_a_crash_is_explained_by_what_was_said_before_it() -> None:
    story = _story(FIVE, lines=(ERROR_802, json.dumps({"event": "failed", **_said("native_crash", got="\nAborted")})))
    assert (story.code, story.next[0]) == ("bad_machine", NAMED)


@pytest.mark.parametrize("exit_", [3, 7])
def test_a_job_without_its_gpu_gets_another_machine(exit_: int) -> None:
    """The program's own words advise another device, which nobody can give a job."""
    error = {"code": "device_unavailable", "message": "torch 2.13.0 cannot use cuda here", "hint": "use --device cpu"}
    event = json.dumps({"event": "failed", "exit_code": exit_, "error": error})
    story = _story(f"Job failed with exit code: {exit_}. Reason: Error", lines=(event,))
    assert (story.code, story.exit_code, story.next[0], story.got) == ("bad_machine", 5, NAMED, error["message"])
    assert "--device" not in story.help and "another flavor" in story.help


def test_the_last_words_come_before_older_ones() -> None:
    """It was waited for, and came back; what ended the run is another."""
    lines = (GIVEN_UP[0], GIVEN_UP[1], CUDA_OOM)
    failure = _said("program_failed", got=CUDA_OOM)
    note = json.dumps({"event": "note", "text": "me/x: 403 Forbidden; again in 1 s"})
    story = _story(FIVE, lines=(note, *lines, json.dumps({"event": "failed", **failure})), flavor="l40sx1")
    assert (story.code, story.got) == ("out_of_memory", CUDA_OOM[:300])
    other = _said("program_failed", got="ZeroDivisionError")
    assert _story(FIVE, lines=(note, json.dumps({"event": "failed", **other}))).code == "program_failed"


@pytest.mark.parametrize(("code", "exit_"), [("hub_unreachable", 8), ("not_kept", 5)])
def test_what_the_program_could_not_do_at_the_hub_is_done_again(code: str, exit_: int) -> None:
    event = json.dumps({"event": "failed", **_said(code, exit_code=exit_)})
    story = _story(f"Job failed with exit code: {exit_}. Reason: Error", lines=(event,))
    assert (story.code, story.exit_code, story.remedy) == (code, exit_, "again") and NAMED in story.next


@pytest.mark.parametrize(
    ("message", "flavor", "remedy", "next_"),
    [
        # Both are the words of scripts/train.py: of torch, and of the system's SIGKILL.
        ("out of memory: CUDA out of memory. Tried to allocate 2 GiB", "l4x1", "gpu", "l40sx1"),
        ("the system killed the training process (SIGKILL)", "t4-small", "ram", "t4-medium"),
    ],
)
def test_which_memory_was_too_small(message: str, flavor: str, remedy: str, next_: str) -> None:
    """L4: 24 GB; the next larger one is an L40S. A t4-small has 15 GB of RAM, a t4-medium 30 GB."""
    failure = {"exit_code": 3, "error": {"code": "out_of_memory", "message": message, "hint": ""}}
    story = _story("Job failed with exit code: 3. Reason: Error", failure=failure, flavor=flavor)
    assert (story.remedy, story.exit_code, story.next[0]) == (remedy, 3, f"{NAMED} --flavor {next_}")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Job failed with exit code: 137. Reason: OOMKilled", "ran out of memory"),
        ("Job failed with exit code: 1. Reason: OOMKilled", "ran out of memory"),
        ("Job failed with exit code: 137. Reason: Error", "most likely ran out of memory"),
    ],
)
def test_a_machine_whose_memory_was_full_is_told_as_far_as_it_is_known(message: str, words: str) -> None:
    story = _story(message, flavor="t4-small")
    assert story.message == f"the machine of the job {words} (RAM, not the GPU's)"
    assert (story.code, story.exit_code, story.remedy, story.got) == ("out_of_memory", 3, "ram", message)


@pytest.mark.parametrize(("exit_", "ours"), [(2, 5), (3, 3), (4, 4), (7, 5), (8, 8), (1, 5)])
def test_a_job_ends_with_one_of_the_codes_of_a_job(exit_: int, ours: int) -> None:
    """The words CUDA in an error of another kind say nothing about memory."""
    error = {"code": "bad_row", "message": "row 3 has no CUDA", "hint": ""}
    story = _story(f"Job failed with exit code: {exit_}. Reason: Error", failure={"exit_code": exit_, "error": error})
    assert (story.exit_code, story.remedy) == (ours, "data")


def test_what_nobody_explains_has_the_words_of_the_hub() -> None:
    for message, lines, told in (
        (FAILED, (), "the program of the job ended with exit code 1"),
        (None, (), "the job failed"),
        ("lost", ("", "the last words"), "the job failed: the last words"),
    ):
        story = _story(message, lines=lines)
        assert (story.code, story.message, story.got) == ("job_failed", told, message or "")


def test_the_record_of_an_earlier_job_is_not_believed() -> None:
    """It stays in the bucket when the next job is killed before it writes its own."""
    failure = {"exit_code": 2, "error": {"code": "bad_row", "message": "row 3 has no text"}}
    assert _story(FAILED, failure=failure).code == "job_failed"
    assert _story("Job failed with exit code: 2. Reason: Error", failure=failure).code == "bad_row"
    assert _story("Job timeout", failure=failure).code == "timeout"


def test_the_last_words_are_not_an_event() -> None:
    story = _story(FAILED, lines=("Segmentation fault", '{"event": "step", "step": 5}', ""))
    assert story.message == "the program of the job ended with exit code 1: Segmentation fault"


def test_what_was_measured_is_told() -> None:
    ending = Ending("ERROR", FAILED, lines=(CUDA_OOM,), step=12, memory_bytes={"cuda": 23_100_000_000, "rss": 9})
    assert "23.1 GB were in use up to step 12" in explain(ending, run=RUN).message


def test_a_result_that_lies_in_the_bucket_is_fetched() -> None:
    error = {"code": "push_failed", "message": "the model could not be pushed", "hint": ""}
    event = json.dumps({"event": "failed", "exit_code": 5, "error": error})
    story = _story("Job failed with exit code: 5. Reason: Error", lines=(event,), trained=True)
    assert (story.code, story.next) == ("push_failed", ("skill-train pull 'runs/tickets cloud'", NAMED))


def test_a_result_that_lies_in_the_repository_only_is_fetched() -> None:
    error = {"code": "not_kept", "message": "the results could not be kept", "hint": ""}
    event = json.dumps({"event": "failed", "exit_code": 5, "error": error})
    story = _story("Job failed with exit code: 5. Reason: Error", lines=(event,))
    assert (story.code, story.next) == ("not_kept", ("skill-train pull 'runs/tickets cloud'", NAMED))


@pytest.mark.parametrize(
    ("flavor", "need", "expected"),
    [
        ("t4-small", "ram", "t4-medium"),
        ("l4x1", "gpu", "l40sx1"),
        ("a10g-largex2", "gpu", "rtx-pro-6000x2"),  # of two GPUs, at $5.50; h200x2 costs $10
        ("h200x8", "gpu", None),
        ("cpu-basic", "ram", "cpu-upgrade"),
        ("moon", "gpu", None),
        (None, "ram", None),
    ],
)
def test_the_cheapest_larger_machine_of_the_same_shape(flavor: str | None, need: str, expected: str | None) -> None:
    """By the table of huggingface.co/docs/hub/jobs-pricing, 2026-08-22."""
    found = larger(OFFERED, flavor, need)
    assert (found.name if found else None) == expected


def test_without_a_larger_machine_the_recipe_must_change() -> None:
    story = _story(FAILED, lines=(CUDA_OOM,), flavor="h200x8")
    assert story.next == ("skill-train logs 'runs/tickets cloud' --tail 200",)
    assert "smaller max_length" in story.help


@pytest.mark.parametrize(
    ("message", "expected"),
    [("Job failed with exit code: 137. Reason: OOMKilled", 137), ("Job timeout", None), (None, None)],
)
def test_the_exit_code_is_in_the_sentence_only(message: str | None, expected: int | None) -> None:
    assert exit_code(message) == expected


def test_a_long_queue_is_explained() -> None:
    """12 hours for an h200x8: huggingface_hub#4376."""
    assert waiting("SCHEDULING", 60, "h200x8") == ""
    assert "720 minutes for a free h200x8; waiting costs nothing" in waiting("SCHEDULING", 12 * 3600, "h200x8")
    assert waiting("RUNNING", 12 * 3600, "h200x8") == ""


def _said(code: str, *, exit_code: int = 5, got: str = "") -> dict[str, Any]:
    """`train.failed.json`."""
    error = {"code": code, "message": "the training program failed", "expected": "", "got": got, "hint": "the log"}
    return {"exit_code": exit_code, "error": error}


def _story(message: str | None, **known: object) -> Story:
    return explain(Ending("ERROR", message, **known), run=RUN, offered=OFFERED)  # type: ignore[arg-type]
