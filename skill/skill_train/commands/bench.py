"""`bench`: measures how many tokens per second each GGUF file reads and writes on this machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from skill_train.commands._chosen_model import warn_of_replaced
from skill_train.commands._command import PATH, Whole, argument, command, engine_device_option, option
from skill_train.commands._drawing import rich_table
from skill_train.core.console import Bar, Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.core.units import size
from skill_train.facts import MachineFacts
from skill_train.llama.gguf_header import GgufFile, read_model_file, with_all_parts
from skill_train.llama.speed import cached
from skill_train.llama.speed.speed_worker import LEAST_SHARE, SpeedJob, SpeedResult, Timing, measure, share
from skill_train.machine.read import physical_cores, read_machine
from skill_train.run.folder import open_run

_MOST_TOKENS, _MOST_ROUNDS = 1 << 17, 100
_PROMPT, _ANSWER = 512, 128  # tokens, as in llama-bench


@dataclass(frozen=True)
class BenchOptions:
    files: tuple[Path, ...] = argument(PATH, metavar="RUN|FILE...", nargs=-1)
    device: str | None = engine_device_option()
    prompt_tokens: int | None = option(
        None,
        f"Tokens that are read at once.  [default: {_PROMPT}, or what the model has]",
        Whole(min=1, max=_MOST_TOKENS),
    )
    answer_tokens: int | None = option(
        None,
        f"Tokens that are written one after the other.  [default: {_ANSWER}, or what the model has]",
        Whole(min=1, max=_MOST_TOKENS),
    )
    rounds: int = option(5, "Runs of each; the median counts.", Whole(min=1, max=_MOST_ROUNDS))


class Phase(TypedDict):
    """Reading a prompt, or writing an answer. `tokens_per_second` is the figure of the median run. It is None if
    `busy`: other programs took more than a tenth of the processor, so the time says nothing about the file."""

    tokens: int
    tokens_per_second: float | None
    seconds: list[float]
    processor_seconds: list[float]
    share: float
    busy: bool


class BenchedFile(TypedDict):
    """One file. `reached_gigabytes_per_second` is the speed at which its weights were read, for later estimates; None
    if the measurement does not show it."""

    path: str
    bytes: int
    device: str
    threads: int
    repacked: bool
    prompt: Phase
    answer: Phase
    reached_gigabytes_per_second: float | None


@command(
    BenchOptions, "skill-train bench runs/first", "skill-train bench model-q4_k_m.gguf --prompt-tokens 256 --rounds 3"
)
def bench(options: BenchOptions, console: Console) -> Result:
    """Measure how many tokens a second GGUF files read and write here; `plan` and `--for here` then use it.

    Files run with llama.cpp's own defaults. A figure is left out if other programs used the processor meanwhile.
    """
    files, machine = _files(options.files, console), read_machine()
    measured = list[BenchedFile]()
    with console.progress("measuring") as progress:
        for number, file in enumerate(files):  # each in a process of its own, one after the other
            measured.append(_measure(file, options, machine, _file_progress(progress, number, len(files))))
    if any(file[phase]["busy"] for file in measured for phase in ("prompt", "answer")):
        console.warn("busy", "other programs took the processor meanwhile, so there is no figure where `busy` is true")
    rates = [file["answer"]["tokens_per_second"] for file in measured]
    quiet = " ".join("busy" if rate is None else f"{rate:.1f}" for rate in rates)
    data = {"files": measured, "chip": machine.chip}
    return Result(data, human=lambda rich: _draw(rich, measured, machine.chip), quiet=quiet)


def _files(paths: Sequence[Path], console: Console) -> list[Path]:
    """The given files, and the files of the given runs. Warns of a file that is not the exported one."""
    files = list[Path]()
    for path in paths:
        run = open_run(path) if path.is_dir() else None
        found = [path] * path.is_file() if run is None else run.ggufs
        if not found:
            why = "does not exist" if run is None else "has no GGUF file of a whole model"
            hint = f"skill-train export-gguf {quoted(path)}" if run is not None else "skill-train export-gguf RUN"
            raise UsageError(f"{path} {why}", code="missing_file", expected="GGUF files or exported runs", hint=hint)
        if run is not None:
            warn_of_replaced(console, run, found)
        files += found
    return files


def _file_progress(progress: Bar, number: int, count: int) -> Bar:
    return lambda done, total, text: progress(number + done / max(total, 1), count, text)


def _measure(path: Path, options: BenchOptions, machine: MachineFacts, progress: Bar) -> BenchedFile:
    file = read_model_file(path)  # raises a clear error for a file that llama.cpp may crash on
    prompt_tokens, answer_tokens = _tokens(options, file)
    result = measure(
        SpeedJob(
            gguf=str(path),
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            rounds=options.rounds,
            threads=physical_cores(),
            device=options.device,
        ),
        progress,
    )
    file = with_all_parts(file)
    prompt, answer = _phase(result.prompt, result), _phase(result.answer, result)
    rate, reached = answer["tokens_per_second"], None
    if rate is not None:
        reached = cached.remember(machine, result.device, file, rate, time.strftime("%Y-%m-%d", time.gmtime()))
    return {
        "path": str(path),
        "bytes": file.size_bytes,
        "device": result.device,
        "threads": result.threads,
        "repacked": result.repacked,
        "prompt": prompt,
        "answer": answer,
        "reached_gigabytes_per_second": None if reached is None else round(reached, 2),
    }


def _tokens(options: BenchOptions, file: GgufFile) -> tuple[int, int]:
    """Tokens of prompt and answer: the requested numbers, or the defaults limited by the model's context."""
    most = max(2, file.count("context_length") or _PROMPT + _ANSWER)
    answer = options.answer_tokens or min(_ANSWER, max(1, most // 4))
    prompt = options.prompt_tokens or min(_PROMPT, max(1, most - answer))
    if prompt + answer > most:
        raise UsageError(
            f"{file.path.name} was made for {most} tokens",
            code="bad_usage",
            expected=f"at most {most} tokens of prompt and answer together",
            got=f"{prompt} and {answer}",
            hint="smaller --prompt-tokens or --answer-tokens",
        )
    return prompt, answer


def _phase(timing: Timing, result: SpeedResult) -> Phase:
    own = share(timing, result.threads)
    busy = result.device == "cpu" and own < LEAST_SHARE  # a run on a GPU hardly needs the processor
    return {
        "tokens": timing.tokens,
        "tokens_per_second": None if busy else round(timing.rate, 2),
        "seconds": [round(round_.seconds, 4) for round_ in timing.rounds],
        "processor_seconds": [round(round_.processor_seconds, 4) for round_ in timing.rounds],
        "share": round(own, 3),
        "busy": busy,
    }


def _draw(rich: Any, measured: list[BenchedFile], chip: str) -> None:
    table = rich_table("file", "size", "on", "reads, tokens/s", "writes, tokens/s")
    for file in measured:
        on = chip if file["device"] == "gpu" else f"{file['threads']} threads of {chip}"
        table.add_row(Path(file["path"]).name, size(file["bytes"]), on, _rate(file["prompt"]), _rate(file["answer"]))
    rich.print(table)


def _rate(phase: Phase) -> str:
    rate = phase["tokens_per_second"]
    if rate is None:
        return f"the machine was busy ({1 - phase['share']:.0%} for others)"
    rates = sorted(phase["tokens"] / seconds for seconds in phase["seconds"] if seconds)
    return f"{rate:,.1f} ({rates[0]:,.1f} to {rates[-1]:,.1f})" if rates else f"{rate:,.1f}"
