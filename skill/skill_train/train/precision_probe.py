"""The times of a step in fp32 and in bf16 on this machine. The cache stores them, so that `plan` need not measure."""

import contextlib
from importlib.util import find_spec
from pathlib import Path

from skill_train.core.errors import UsageError
from skill_train.core.files import write_json
from skill_train.core.program_events import Probed
from skill_train.facts import MachineFacts, ModelFacts
from skill_train.machine.read import cache_file
from skill_train.run import records


def known_probe(device: str, machine: MachineFacts, model: ModelFacts) -> Probed | None:
    """The result of an earlier probe; None if there is none."""
    try:
        return records.read(_probe_file(device, machine, model), Probed)
    except (OSError, UsageError):
        return None  # the file may be missing or broken


def remember(device: str, machine: MachineFacts, model: ModelFacts, figures: Probed) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written costs another probe next time
        write_json(_probe_file(device, machine, model), figures)


def _probe_file(device: str, machine: MachineFacts, model: ModelFacts) -> Path:
    where = [machine.system, machine.chip, machine.cores, device]
    return cache_file("probes", where, model.fingerprint or [model.source, model.revision], _torch())


def _torch() -> str:
    """The text of torch's version.py; empty without torch. importlib.metadata would take a tenth of `plan`'s time."""
    spec = find_spec("torch")
    return Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
