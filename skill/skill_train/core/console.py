"""The only module that prints.

stdout carries exactly one result: a JSON document, a human summary, or one bare value. Progress, warnings and hints go
to stderr. No command asks a question. Only `typed` reads input: what a person types to a model in a terminal.
"""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from skill_train.core.envelope import MAX_JSON_BYTES as MAX_JSON_BYTES
from skill_train.core.envelope import SCHEMA, Envelope, bounded, cleaned
from skill_train.core.envelope import clean as clean
from skill_train.core.errors import SkillTrainError, Temporary

Format = Literal["auto", "human", "json", "quiet"]
Bar = Callable[[float, float, str], None]  # shows the progress of a step: done, the total in the same unit, a few words
Warn = Callable[[str, str], None]  # shows a warning: a code, a sentence

_FILLED_IN = re.compile(r"[A-Z][A-Z_]+(?:/[A-Z][A-Z_]+)?")  # RUN, NAMESPACE/ID


@dataclass
class Result:
    """The answer of one command."""

    data: Mapping[str, object]  # the `data` of the JSON answer
    human: Callable[[Any], None] | None = None  # prints the same for a person; receives a rich console on stdout
    quiet: str = ""  # the one value that `--format quiet` prints; empty if its lines were already printed
    next: list[str] = field(default_factory=list)  # the commands to run next
    # set if the command did its work and the answer is "no" (a failed verification)
    error: SkillTrainError | None = None


class ReaderGone(Exception):
    """Nobody reads the lines any more (`| head`). This is not an OSError, because click would end the command on
    one."""


class Console:
    """The output of one command. The mode `auto` is human on a terminal and JSON otherwise."""

    def __init__(self, mode: Format, command: str) -> None:
        self.mode = ("human" if sys.stdout.isatty() else "json") if mode == "auto" else mode
        self.command = command
        self.warnings: list[dict[str, str]] = []

    def status(self, text: str) -> None:
        if self.mode != "quiet":
            _say(text)

    def line(self, text: str, *, now: bool) -> None:
        """Prints one line of a result that arrives in parts, such as a log, on stdout for a person.

        A program gets one document at the end. It can read the lines that arrive `now` on stderr.
        """
        if self.mode != "json":
            try:
                print(clean(text), flush=now)
            except BrokenPipeError:
                raise ReaderGone from None
        elif now:
            self.status(text)

    def piece(self, text: str) -> None:
        """Prints a part of a line on stdout for a person, such as the next words of an answer."""
        if self.mode == "human":
            try:
                print(clean(text), end="", flush=True)
            except BrokenPipeError:
                raise ReaderGone from None

    def draw(self, human: Callable[[Any], None]) -> None:
        """Draws a part of a conversation for a person, on stdout."""
        if self.mode == "human":
            human(_screen())

    def typed(self, sign: str) -> str | None:
        """The next line that a person types in a terminal; None at the end of the input. `sign` is the prompt."""
        self.piece(sign)
        line = sys.stdin.buffer.readline().decode(sys.stdin.encoding, "replace")
        if not line:
            self.piece("\n")
        return line.rstrip("\r\n") if line else None

    @property
    def is_conversation(self) -> bool:
        """Whether a person reads the output and types the input."""
        return self.mode == "human" and sys.stdin.isatty()

    def warn(self, code: str, message: str) -> None:
        """Prints a warning on stderr at once and keeps it for the envelope. Each message is printed once."""
        if all(warning["message"] != message for warning in self.warnings):
            self.warnings.append({"code": code, "message": message})
            self.status(f"warning: {message}")

    @contextmanager
    def progress(self, title: str) -> Iterator[Bar]:
        """A live bar on a terminal, and a line for each tenth otherwise."""
        if self.mode == "quiet":
            yield lambda done, total, text: None
        elif sys.stderr.isatty():
            with _live_bar(title) as bar:
                yield bar
        else:
            yield _plain_bar(title)

    def watch(self, read_result: Callable[[], tuple[Result, bool]], *, pause_seconds: float) -> Result:
        """Calls `read_result` until no further result will come; returns the last result.

        On a terminal each result is drawn over the previous one. Ctrl-C ends only the watching. Without a terminal
        `read_result` is called once.
        """
        result, more = read_result()
        if self.mode == "human" and sys.stdout.isatty():
            with suppress(KeyboardInterrupt), _ctrl_c() as key, _live_view(self.command) as draw:
                while more:
                    draw(result)
                    if key.wait(pause_seconds):
                        break
                    self.warnings.clear()  # the warnings of the previous result
                    with suppress(Temporary):  # the next pass asks again; the view keeps the last result
                        result, more = read_result()
        return result

    def result(self, result: Result) -> int:
        """Prints the result and returns the exit code of the work, even when nobody reads the output to its end."""
        with _reader_may_go():
            if self.mode == "json":
                print(self._envelope(result))
            elif self.mode == "quiet":
                if result.quiet:
                    print(clean(result.quiet))
            else:
                _print_human(result)
        if result.error is not None and self.mode != "json":
            self._explain(result.error)
        return result.error.exit_code if result.error else 0

    def error(self, error: SkillTrainError) -> int:
        if self.mode == "json":
            try:
                with _reader_may_go():
                    print(self._envelope(Result(data={}, error=error)))
            except OSError:  # the disk under stdout is full, which may be what the error reports
                _send_nowhere(sys.stdout)
                self._explain(error)
        else:
            self._explain(error)
        return error.exit_code

    def _explain(self, error: SkillTrainError) -> None:
        lines = [f"error: {error.message}"]
        lines += [
            f"  {name}: {value}"
            for name, value in (("expected", error.expected), ("got", error.got), ("next", error.hint))
            if value
        ]
        _say("\n".join(lines))

    def _envelope(self, result: Result) -> str:
        document: Envelope = {"schema": SCHEMA, "command": self.command, "ok": result.error is None}
        if result.data or result.error is None:
            document["data"] = result.data
        if result.error is not None:
            document["error"] = result.error.as_dict()
        document["warnings"] = self.warnings
        hint = result.error.hint if result.error else ""
        document["next"] = result.next or ([hint] if runs_as_it_stands(hint) else [])
        return bounded(document)


def runs_as_it_stands(hint: str) -> bool:
    """Whether a hint is a complete command that can be run without a decision: no prose, no placeholder.

    A hint that begins with a command and goes on without punctuation is a mistake; a test parses them all.
    """
    try:
        words = shlex.split(hint)
    except ValueError:
        return False
    if words[:1] != ["skill-train"] or "--yes" in words:
        return False
    return not any(word.startswith("(") or word.endswith((",", ";")) or _FILLED_IN.fullmatch(word) for word in words)


@contextmanager
def _reader_may_go() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich ends the whole program at a closed pipe
        silence()


def silence() -> None:
    """Sends further output for a closed pipe to nowhere, so that the interpreter ends without an error."""
    for stream in (sys.stdout, sys.stderr):
        _send_nowhere(stream)


def _send_nowhere(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Writes to stderr and ignores a closed pipe or a full disk, so that the work continues."""
    try:
        print(clean(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        return
    except OSError:
        _send_nowhere(sys.stderr)


def _print_human(result: Result) -> None:
    rich = _screen()
    if result.human is not None:
        result.human(rich)
    for number, command in enumerate(result.next):
        rich.print(("next: " if number == 0 else "      ") + command, soft_wrap=True)


class _Key:
    """Whether a key was pressed. A `threading.Event` would not do: its lock is held during a wait, and the signal
    handler, which runs in the middle of that wait, needs the same lock."""

    pressed = False

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.pressed and time.monotonic() < end:
            time.sleep(0.05)
        return self.pressed


@contextmanager
def _ctrl_c() -> Iterator[_Key]:
    """Turns the first Ctrl-C into a key, because an exception could be raised where nothing catches it, such as while
    drawing. The second Ctrl-C raises the exception, because a request may be waiting for the network."""
    key = _Key()

    def press(*_: Any) -> None:
        if key.pressed:
            raise KeyboardInterrupt
        key.pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield key
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _live_view(title: str) -> Iterator[Callable[[Result], None]]:
    """Gives a function that draws each result over the previous one. The last drawing is removed from the screen."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    rich = _screen()
    with Live(console=rich, auto_refresh=False, transient=True) as live:

        def draw(result: Result) -> None:
            with rich.capture() as drawn:
                if result.human is not None:
                    result.human(rich)
            foot = Text(f"{title}: looks again by itself; Ctrl-C stops looking, the run goes on", style="dim")
            live.update(Group(Text.from_ansi(drawn.get().rstrip("\n")), foot), refresh=True)

        yield draw


def _screen() -> Any:
    from rich.console import Console as RichConsole

    class Screen(RichConsole):
        """Treats every text as plain text: `[/b]` in a name is not markup, and an escape is not a colour."""

        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(clean(text), **how)

        def print_json(self, json: str | None = None, **how: Any) -> None:
            super().print_json(json, **(how | {"data": cleaned(how["data"])}))

    plain = bool(os.environ.get("NO_COLOR")) or None
    width = 80 if os.environ.get("COLUMNS", "").strip() == "0" else None  # rich would draw nothing
    return Screen(markup=False, emoji=False, highlight=False, soft_wrap=False, no_color=plain, width=width)


@contextmanager
def _live_bar(title: str) -> Iterator[Bar]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=RichConsole(stderr=True), transient=False) as progress:
        task = progress.add_task(title, total=None, text="")

        def update(done: float, total: float, text: str) -> None:
            progress.update(task, completed=done, total=total, text=clean(text).replace("[", "\\["))

        yield update


def _plain_bar(title: str) -> Bar:
    shown = -1

    def update(done: float, total: float, text: str) -> None:
        nonlocal shown
        tenth = int(10 * done / total) if total else 0
        if tenth != shown:
            shown = tenth
            _say(f"{title}: {_so_far(done, total)} {text}")

    return update


def _so_far(done: float, total: float) -> str:
    """`3/20` for things that are counted; a percentage for a part of one thing."""
    whole = done == int(done) and total > 1
    return f"{done:g}/{total:g}" if whole or not total else f"{done / total:.0%}"
