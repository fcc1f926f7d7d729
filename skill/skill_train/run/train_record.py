"""The files that the training program writes: `train.json`, `train.failed.json`, `environment.json`, metrics and
rows."""

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.core.errors import UsageError, quoted
from skill_train.facts import JsonObject
from skill_train.program.chat.labels import system_digest
from skill_train.program.encode import ALREADY_RENDERED, WITHOUT_TEMPLATE
from skill_train.recipe.formats import BARE
from skill_train.run import records
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Reason
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole

_TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_KEYS_OF_KIND: dict[str, tuple[str, ...]] = {"chat": ("messages",), "completion": ("prompt", "completion"), "text": ()}


class SmokeCheck(msgspec.Struct, frozen=True):
    """One check of the smoke verdict after training."""

    name: str
    verdict: Verdict
    figure: Number | None = None
    detail: str = ""


class PromptAnswers(msgspec.Struct, frozen=True):
    """One prompt, answered before and after training; None if no process held the whole model."""

    prompt: str
    before: str | None = None
    after: str | None = None


class TrainedData(msgspec.Struct, frozen=True, kw_only=True):
    rows: Whole
    train_rows: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    held_out_rows: Whole
    truncated_rows: Whole | None = None
    skipped_rows: Whole | None = None
    tokens: Whole | None = None
    longest_row_tokens: Whole | None = None
    trained_token_share: Number | None = None
    # repeated_rows, repeated_groups: rows that repeat an earlier row, and the groups of equal rows. Earlier versions
    # counted neither these nor the next two.
    repeated_rows: Whole | msgspec.UnsetType = msgspec.UNSET
    repeated_groups: Whole | msgspec.UnsetType = msgspec.UNSET
    # held_out_trained, held_out_asked: held-out rows that are also trained on, as a whole or with the same question
    held_out_trained: Whole | msgspec.UnsetType = msgspec.UNSET
    held_out_asked: Whole | msgspec.UnsetType = msgspec.UNSET
    notes: list[str] = []


class TrainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that were measured during the training. Memory is by kind: `rss`, `cuda`, `mps`."""

    first_loss: Number | None = None
    last_loss: Number | None = None
    tokens_per_second: Number | None = None
    seconds_per_step: Number | None = None
    peak_memory_bytes: dict[str, Number | None] = {}
    baseline_memory_bytes: dict[str, Number | None] = {}


class TrainRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`train.json`."""

    schema: StepSchema = "skill-train/step/1"
    step: str = "train"
    # the id of a run in the cloud, which distinguishes two runs of one recipe; None for a run on this machine
    run: str | None = None
    recipe_hash: str | None = None
    steps: Whole
    verdict: Verdict
    outputs: dict[FileName, FileDigest]  # the trained model, environment.json, metrics and samples
    saved_dtype: str | None = None  # of the trained weights, as torch names it
    smaller_layout: Reason | None = None  # why a second try trained with smaller batches; None if the first try fitted
    checks: list[SmokeCheck] = []
    # a decoded row, with the trained parts between ⟦ and ⟧. It and `answer` stay in the folder of the run: a job does
    # not push them.
    example: str | None = None
    answer: PromptAnswers | None = None
    data: TrainedData
    figures: TrainFigures
    seconds: Number | None = None
    finished_at: str | None = None


class FailureWords(msgspec.Struct, frozen=True):
    """The fields of a `SkillTrainError`."""

    code: str
    message: str
    expected: str = ""
    got: str = ""
    hint: str = ""


class TrainFailure(msgspec.Struct, frozen=True):
    """`train.failed.json`: why the program ended."""

    exit_code: Whole
    error: FailureWords


# Digests and counts of the rows that were fed to the trainer, and digests of the `first_batches`.
FedData = dict[str, Whole | str | list[str]]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """`environment.json`: versions, device, and the final value of every argument of the libraries.

    The arguments have the names that the libraries give them, so they are not listed here. The optimizer and the
    schedule are added when training starts. A part that an earlier version did not record is None.
    """

    program: JsonObject | None = None
    day: date | None = None  # the day on which the run began; a chat template that writes the date wrote this one
    python: str | None = None
    platform: str | None = None
    device: str | None = None
    device_name: str | None = None
    cuda: str | None = None
    threads: Whole | None = None
    versions: dict[str, str | None] | None = None
    processes: JsonObject | None = None
    model: JsonObject | None = None
    # the weight files of the base at the start of the training
    base_weights: dict[FileName, FileDigest] | None = None
    lora: JsonObject | msgspec.UnsetType | None = msgspec.UNSET  # None if the model has no adapter
    trainer: JsonObject | None = None
    data: FedData | None = None
    stops: list[Whole] | None = None  # the tokens that end answers and are not in the base's generation_config.json
    optimizer: JsonObject | None = None
    schedule: JsonObject | None = None


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics.jsonl`."""

    step: Whole
    steps: Whole
    start: Whole | None = None  # the number of the program start that made the step
    job: str | None = None  # the id of the Hub job
    loss: Number | None = None
    grad_norm: Number | None = None
    learning_rate: Number | None = None
    epoch: Number | None = None  # passes over all rows so far
    tokens: Whole | None = None
    trained_tokens: Whole | None = None
    seconds: Number | None = None
    tokens_per_second: Number | None = None
    memory_bytes: dict[str, Number | None] | None = None


class FedRow(TypedDict):
    """The part of a line of `samples.jsonl` or `held_out.jsonl` that was fed to the model."""

    row: Whole
    input_ids: list[_TokenId]
    labels: list[_TokenId]


class Row(FedRow):
    """The whole line, with the row as it was read. `row` is the number of the row in the data, from 0."""

    line: Whole  # the row's line in its file
    kind: Literal["chat", "completion", "text"]
    # messages, tools, trained_messages: for the kind `chat`
    messages: NotRequired[list[JsonObject]]
    tools: NotRequired[list[Any] | None]
    trained_messages: NotRequired[list[Whole]]
    # prompt, completion: for the kind `completion`; `text`: for the kind `text`
    prompt: NotRequired[str]
    completion: NotRequired[str]
    text: NotRequired[str]
    without_template: NotRequired[bool]
    images: NotRequired[list[Any]]  # files of pictures in the folder of the run, with their digests
    image_sha256: NotRequired[list[str]]
    rendered: str  # the text that the template writes
    truncated: bool  # whether the row was longer than max_length; `full_length` is its length in tokens
    full_length: Whole


def read(path: Path) -> TrainRecord:
    """`train.json` in a file. Raises as `records.read`."""
    return records.read(path, TrainRecord)


def is_asked_bare(record: TrainRecord, data_format: str) -> bool:
    """Whether the model is asked without a chat template: it was trained on bare text that no template had rendered."""
    rendered = ALREADY_RENDERED in record.data.notes and WITHOUT_TEMPLATE not in record.data.notes
    return data_format in BARE and not rendered


def read_environment(path: Path) -> Environment | None:
    """`environment.json`; None when there is none."""
    return records.read(path, Environment) if path.is_file() else None


def stops_of(adapter: Path | None) -> list[int]:
    """The tokens that end the answers in an adapter's training and are not stop tokens of its base. Empty for an
    adapter outside of a run."""
    is_in_run = adapter is not None and (adapter.parent / "plan.json").is_file()
    environment = read_environment(adapter.parent / "environment.json") if adapter is not None and is_in_run else None
    return (environment and environment.stops) or []


def trained_system(run: Path) -> str:
    """The digest of the system message that all trained rows begin with; empty if there is none."""
    environment = read_environment(run / "environment.json")
    return str(((environment and environment.data) or {}).get("system_sha256", ""))


def system_of(run: Path) -> str | None:
    """The system message that all trained rows begin with, from `samples.jsonl`. Empty if that file does not show it;
    None if there is no such message."""
    rows = read_rows(run / "samples.jsonl") if (digest := trained_system(run)) else []
    return (rows[0]["messages"][0]["content"] if system_digest(rows) == digest else "") if digest else None


def read_steps(path: Path) -> list[StepLine]:
    """`metrics.jsonl`; empty when there is none."""
    return records.read_lines(path, StepLine, grows=True)


def read_fed_rows(path: Path) -> list[FedRow]:
    """The fed part of the rows in `samples.jsonl` or `held_out.jsonl`; empty if there is no such file."""
    return records.read_lines(path, FedRow)


def read_rows(path: Path) -> list[Row]:
    """The lines of `samples.jsonl` or `held_out.jsonl`; empty when there is none."""
    try:
        rows = records.read_lines(path, Row)
        for row in rows:
            lacking = [key for key in _KEYS_OF_KIND[row["kind"]] if key not in row]
            if lacking or not all("role" in message for message in row.get("messages", ())):
                raise records.broken(path, f"row {row['row']} has no {lacking[0] if lacking else 'role'}")
    except UsageError as error:
        error.hint = way_back(path)
        raise
    return rows


def way_back(file: Path) -> str:
    """A hint for a lost file of rows. A finished run does not write it again, but a new run of one step writes the same
    held-out rows. That is offered only if their digest is recorded, because they could be those of another split."""
    run, again = file.parent, ""
    environment = read_environment(run / "environment.json")
    if file.name == "held_out.jsonl" and environment is not None and "held_out_sha256" in (environment.data or {}):
        again = (
            ", or the one that a run of the same rows writes: "
            f"skill-train local {quoted(run / 'recipe.yaml')} --max-steps 1 "
            f"--run-dir {quoted(RunDir(run).free_name())}"
        )
    return f"put the file back{again}; if a job trained the run: skill-train pull {quoted(run)}"
