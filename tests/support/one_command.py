"""One command in the test's own process: a new one would take seconds to load the libraries."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from command_child import Done
from skill_train.cli import main


def called(*words: object) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*map(str, words)])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), "it ends with an exit code"
    return Done(code, out.getvalue(), err.getvalue())


def answered(*words: object) -> tuple[int, dict[str, Any]]:
    """The exit code, and the one document on stdout."""
    done = called(*words, "--format", "json")
    return done.code, done.answer
