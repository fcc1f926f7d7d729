"""One group of readers against every form of a hostile file, in a process of its own.

    python files_child.py GROUP SEED [INPUT]

INPUT is the number of one input, as a failure prints it; without it, all. The last line is a JSON document: how many
ended how, and what failed. `BEGUN`, in the environment, is a file with the input that is under way: what ends the
process itself is then known too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
from hostile_forms import Form, Watched, as_nobody, forms_of
from hostile_readers import GROUPS, Reader
from skill_train import cli
from skill_train.core.console import Console
from skill_train.core.errors import SkillTrainError, from_exit_code
from skill_train.program.events import Refused

PROCESSOR_SECONDS = 5.0
WALL_SECONDS = float(os.environ.get("FILES_WALL_SECONDS", "15"))  # for what waits and takes no time of the processor
MOST_GROWTH = 300 << 20  # of resident memory by one input
# What is known and not mended yet, by group: a pattern of the failure, and why. One that is met no more is one too.
KNOWN: dict[str, dict[str, str]] = {}
ROOM = 700 << 20  # of memory that can be written, above what the process has when it begins
MOST_FAILURES = 15  # of different kinds; those of one kind are told once
Input = tuple[Reader, Form, int]


class Late(BaseException):
    """It waits. No `except Exception` of the code under test can swallow it."""


def inputs(group: str) -> list[Input]:
    return [
        (reader, form, number)
        for reader in GROUPS[group]()
        for form in forms_of(reader.kind)
        for number in range(min(form.times, reader.most))
    ]


def main(group: str, seed: int, only: int | None) -> None:
    planned = inputs(group)
    ended: Counter[str] = Counter()
    failed: dict[str, str] = {}
    more: Counter[str] = Counter()
    known: Counter[str] = Counter(dict.fromkeys(KNOWN.get(group, {}), 0))
    begun = Path(os.environ.get("BEGUN", os.devnull))
    with tempfile.TemporaryDirectory(prefix="skill-train-files-") as sandbox:
        Path(sandbox).chmod(0o755)
        for reader in GROUPS[group]():  # what is imported or made once is not the first input's
            _one(Path(sandbox), reader, None, 0, seed)
        _bound_memory()
        for at, (reader, form, number) in enumerate(planned):
            if only is not None and at != only:
                continue
            begun.write_text(f"input {at}: {reader.name}, {form.name}, {number}")
            try:
                ended[_one(Path(sandbox), reader, form, number, seed)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                what = f"{type(error).__name__}: {str(error)[:900]} {_where(error)}"
                if (pattern := next((one for one in known if re.search(one, what, re.DOTALL)), None)) is not None:
                    known[pattern] += 1
                    continue
                kind = f"{type(error).__name__} {_where(error)}"
                failed.setdefault(kind, f"input {at}: {reader.name}, {form.name}, {number}: {what}")
                more[kind] += 1
            if len(failed) >= MOST_FAILURES:
                break
    told = [f"{said} ({more[kind]} of this kind)" for kind, said in failed.items()]
    count = sum(ended.values()) + sum(known.values())
    print(json.dumps({"inputs": count, "ended": dict(ended.most_common()), "known": known, "failed": told}))


def _one(sandbox: Path, reader: Reader, form: Form | None, number: int, seed: int) -> str:
    """How one input ends; without a form the files are whole, and it must end well."""
    box = Path(tempfile.mkdtemp(dir=sandbox))
    box.chmod(0o777)
    folder = box / "given"
    folder.mkdir()
    folder.chmod(0o777)
    try:
        reader.make(folder)
        path = folder / reader.file
        if form is None:
            return _judged(lambda: reader.call(folder), first=True)
        dice = random.Random(f"{seed} {reader.name} {form.name} {number}")
        whole = path.read_bytes() if path.is_file() else b""
        path.unlink(missing_ok=True)
        form.put(path, whole, dice)
        nobody = form.name in ("not for us", "a folder that is not for us")
        with as_nobody(nobody), Watched.reading(path, form.moment, dice):
            return _judged(lambda: reader.call(folder))
    finally:
        with contextlib.suppress(OSError):
            folder.chmod(0o777)
        shutil.rmtree(box, ignore_errors=True)


def _judged(call: Callable[[], Any], *, first: bool = False) -> str:
    """`done`, or the code of the error, which explains itself; anything else comes through: that is the failure.

    Args:
        first: libraries are loaded, which takes what it takes.
    """
    before = _resident()
    with contextlib.nullcontext() if first else _limits():
        try:
            result = call()
            code = f"exit {result}" if isinstance(result, int) and not isinstance(result, bool) else "done"
        except SkillTrainError as error:
            code = _explained(error)
        except Refused as refusal:
            code = _explained(from_exit_code(refusal.exit_code, refusal.error))
        except OSError as error:
            code = _explained(cli.system_error(error))
        except RuntimeError as error:
            if (loop := cli._odd_path(error)) is None:
                raise
            code = _explained(loop)
    grown = _peak() - before
    assert first or grown < MOST_GROWTH, f"{grown >> 20} MB more memory, and then {code}"
    return code


def _explained(error: SkillTrainError) -> str:
    assert error.exit_code in hostile.CODES - {0}, error
    assert error.message.strip() and error.code, error.as_dict()
    assert error.hint.strip(), f"no hint: {error.as_dict()}"
    for form in ("human", "json"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            Console(form, "x").error(error)  # type: ignore[arg-type]
        said = out.getvalue() + err.getvalue()
        assert not (escape := hostile._ESCAPES.search(said)), f"{escape!r} for the terminal"
        said.encode()
    return error.code


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise Late(f"waited {WALL_SECONDS:g} s, at {''.join(traceback.format_stack(frame, 4))}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS, 1.0)
    try:
        with hostile.limits(PROCESSOR_SECONDS):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _bound_memory() -> None:
    """Of memory that can be written: a file of a terabyte may be mapped. Without it, a device fills the machine."""
    if sys.platform == "linux":
        limit = _status("VmData") + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _resident() -> int:
    """Now; the peak begins anew."""
    if sys.platform != "linux":
        return _peak()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM") if sys.platform == "linux" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def _where(error: BaseException) -> list[str]:
    """The last places of the package, in the order of the calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{Path(f.filename).name}:{f.lineno}" for f in frames if "tests" not in f.filename and "main/s" in f.filename
    ][-3:]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
