"""The errors that are meant for the user.

    SkillTrainError
    ├── UsageError           exit 2  bad usage, recipe or dataset
    ├── DecisionNeeded       exit 3  does not fit, or somebody must decide
    ├── AccessError          exit 4  not signed in, no permission, gated or unpaid
    ├── TrainingFailed       exit 5  training or the remote job failed
    ├── VerificationFailed   exit 6  an artifact is not what it should be
    ├── NotInstalled         exit 7  something is missing; the hint installs it
    ├── Temporary            exit 8  network, rate limit or server; try again
    ├── Interrupted          exit 130  Ctrl-C
    └── NativeCrash          exit 1  native code (llama.cpp) ended by a signal

A message says what is wrong and with which value; `expected` and `got` are the two sides; `hint` is the next command.
`cli` prints the error and exits with its code. Any other exception is a bug and keeps its traceback.
"""

import errno
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from skill_train.program.events import ErrorWords, Failure, Refused, lacks_memory

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "a bug in skill-train, or native code crashed",
    2: "bad usage, recipe or dataset",
    3: "does not fit, or a decision or budget is needed",
    4: "not signed in, no permission, gated or unpaid",
    5: "training or the remote job failed",
    6: "an artifact failed its verification",
    7: "something is not installed (the message names the command that installs it)",
    8: "temporary: network, rate limit, server; try again",
    130: "interrupted (Ctrl-C); what was finished is kept, run the same command again",
}

# What native code prints when it runs out of memory. C++ and Rust then end by SIGABRT, and glibc with code 127 [ran].
DIED_OF_MEMORY = r"std::bad_alloc|memory allocation of \d+ bytes failed|cannot allocate memory for thread-local data"
_TELLING = 3  # a word with fewer letters could be the start of too many choices


class SkillTrainError(Exception):
    """Base of all errors that are meant for the user. `code` is a stable word for programs, such as `bad_row`."""

    exit_code = 1

    def __init__(self, message: str, *, code: str, expected: str = "", got: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.expected = expected
        self.got = got
        self.hint = hint

    def as_dict(self) -> ErrorWords:
        return {
            "code": self.code,
            "message": self.message,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
        }


class UsageError(SkillTrainError):
    exit_code = 2


class DecisionNeeded(SkillTrainError):
    exit_code = 3


class AccessError(SkillTrainError):
    exit_code = 4


class TrainingFailed(SkillTrainError):
    exit_code = 5


class VerificationFailed(SkillTrainError):
    exit_code = 6


class NotInstalled(SkillTrainError):
    exit_code = 7


class Temporary(SkillTrainError):
    exit_code = 8


class Interrupted(SkillTrainError):
    exit_code = 130


class NativeCrash(SkillTrainError):
    exit_code = 1


def not_installed(package: str, extra: str) -> NotInstalled:
    """The error of a missing package that `pip install "skill-train[extra]"` brings."""
    return NotInstalled(
        f"{package} is not installed", code="missing_package", hint=f'pip install "skill-train[{extra}]"'
    )


def from_exit_code(exit_code: int, error: ErrorWords) -> SkillTrainError:
    """The error that a child program reported as JSON. The exit code decides its class."""
    classes = (UsageError, DecisionNeeded, AccessError, TrainingFailed, VerificationFailed, NotInstalled, Temporary)
    kind = next((c for c in classes if c.exit_code == exit_code), TrainingFailed)
    return kind(
        error.get("message", "the program ended without saying why"),
        code=error.get("code", "unknown"),
        expected=error.get("expected", ""),
        got=error.get("got", ""),
        hint=error.get("hint", ""),
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Converts a `Refused` of the training program, raised in this block, to a `SkillTrainError`."""
    try:
        yield
    except Refused as refusal:
        raise from_exit_code(refusal.exit_code, refusal.error) from None


@contextmanager
def in_hints(placeholder: str, words: str) -> Iterator[None]:
    """Replaces a placeholder in the hint of an error that is raised in this block. The packages below do not know
    `words`, such as the name of the run."""
    try:
        yield
    except SkillTrainError as error:
        error.hint = error.hint.replace(placeholder, words)
        raise


def out_of_memory(error: BaseException) -> DecisionNeeded | None:
    """The error for memory that ran out, as Python, the system or torch report it; None for any other error. Also
    follows the cause of an import that failed for lack of memory."""
    if not lacks_memory(error):
        return None if error.__cause__ is None else out_of_memory(error.__cause__)
    text = str(error)
    return DecisionNeeded(
        f"out of memory{f': {text.splitlines()[0]}' if text else ''}",
        code="out_of_memory",
        expected="enough memory for the files that this step reads",
        hint="close other programs and run the same command again, or use a machine with more memory",
    )


def no_disk(error: BaseException) -> DecisionNeeded | None:
    """The error for a disk, a quota or a limit of the size of files that is full; None for any other error."""
    if not isinstance(error, OSError):
        return None
    cut_off = error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error))  # numpy's words
    if not cut_off and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return DecisionNeeded(
        f"no space left on the disk{f': {error.filename}' if error.filename else ''}",
        code="no_disk",
        expected="free space for the result",
        hint="free some space, or raise the limit of the size of files (ulimit -f), then run the same again",
    )


def system_error(error: OSError) -> SkillTrainError:
    """The error for a full or read-only disk, or a missing permission, with the path. The user can mend it."""
    names = [str(name) for name in (error.filename, error.filename2) if name]  # a rename has two
    if error.errno == errno.ENOENT and not names:  # as `os.getcwd` raises it; other functions name the file
        return UsageError(
            "the current directory was removed",
            code="system_error",
            hint="cd to a folder that exists, and run the same command again",
        )
    return no_disk(error) or UsageError(
        f"{error.strerror or error}{': ' if names else ''}{' → '.join(names)}",
        code="system_error",
        got=names[-1] if names else "",
        hint="check the path, its permissions and the free space, then run the same command again",
    )


def failure_of(error: Exception) -> Failure | None:
    """An error as a child program reports it; None for a bug."""
    understood = error if isinstance(error, SkillTrainError) else out_of_memory(error)
    if understood is None and isinstance(error, OSError) and (error.errno is not None or no_disk(error)):
        understood = system_error(error)  # an OSError without a number comes from a library, such as Pillow
    return None if understood is None else {"error": understood.as_dict(), "exit_code": understood.exit_code}


def died_of_memory(words: str) -> bool:
    """Whether native code that ended without an exception reported that it could not allocate memory."""
    return re.search(DIED_OF_MEMORY, words) is not None


def quoted(value: object) -> str:
    """The value as one word for a shell, for the commands in hints."""
    return shlex.quote(str(value))


def nearest(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the choices that begin with this word, or else with the most similar choice; empty if
    no choice is similar."""
    import difflib

    words = list(choices)
    longer = [choice for choice in words if len(word) >= _TELLING and choice.startswith(word)]
    close = longer[:3] or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
