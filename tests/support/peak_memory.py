"""The most memory that one command takes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import sys
from skill_train.cli import main
from skill_train.core.memory import peak_memory_bytes
try:
    main(sys.argv[1:])
finally:
    print(peak_memory_bytes() / (1 << 20), file=sys.stderr)
"""


def peak_mb(*arguments: str) -> float:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return float(done.stderr.splitlines()[-1])
