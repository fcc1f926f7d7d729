"""`python -m skill_train` is `skill-train`."""

import os
import signal


def main() -> None:
    """The console script. Ctrl-C while it loads, when nothing has begun, ends it without Python's traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from skill_train import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    try:
        main()
    finally:
        # Ctrl-C inside a text that was run as code is remembered by Python, which ends by that signal. Another text
        # makes it forget.
        exec("")  # noqa: S102
