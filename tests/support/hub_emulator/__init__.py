"""A Hugging Face Hub on this machine, for tests: the unmodified huggingface_hub client talks to it over real HTTP.

    with Hub(folder) as hub:
        run a child process with `hub.environment(home)`
    assert hub.unknown == []

It has an account, models and datasets, buckets with their Xet store, and Jobs, which it really runs as child
processes. What it answers was captured from the client 2.4.0 (2026-11) or read in its source. An answer of
the real Hub that could not be checked says "made up" in a comment.
"""

from hub_emulator.faults import ALWAYS, Fault, JobFault, Lie
from hub_emulator.repos import Repository
from hub_emulator.server import Hub, environment

__all__ = ["ALWAYS", "Fault", "Hub", "JobFault", "Lie", "Repository", "environment"]
