"""Watches a training: checkpoints, a line a step, and the end of a run that has gone wrong."""

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from skill_train.program.chat.labels import trained_tokens
from skill_train.program.events import (
    EXIT_FAILED,
    FileDigest,
    Refused,
    again,
    any_process,
    event,
    file_digest,
    is_main_process,
    json_object,
    number,
    peak_rss_bytes,
    silence,
    tell_failure,
    wait_for_all,
    write_json,
    write_text,
)
from skill_train.program.folders.checkpoints import (
    COMPLETE,
    DIGESTS,
    from_earlier_start,
    is_complete,
    mark,
    numbered,
    share_weights,
    step_of,
    stop_signals,
    without,
)
from skill_train.program.model import require_float32
from skill_train.program.plan import Placement, Recipe
from skill_train.program.split import SPLIT, Data

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
