"""`python -m skill_train` is `skill-train`."""

import os
import signal
import sys


def main() -> None:
    """The console script. Ctrl-C while it loads, when nothing has begun, ends it without Python's traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from skill_train import cli

    signal.signal(signal.SIGINT, before)
    try:
        cli.main()
    except KeyboardInterrupt:  # while an error was said
        sys.exit(130)


if __name__ == "__main__":
    try:
        main()
    finally:
        # A KeyboardInterrupt that leaves an exec(), such as that of dataclasses, makes CPython end by SIGINT instead of
        # with our exit code (`run_eval_code_obj` in pythonrun.c). The next exec() resets this.
        exec("")  # noqa: S102
