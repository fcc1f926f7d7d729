"""Machines whose answers were recorded in `data/machines/*.json`; each file says where its figures come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.facts import MachineFacts
from skill_train.machine.probe import Probe, ProgramOutput
from skill_train.machine.read import read_machine

FOLDER = Path(__file__).resolve().parent / "data" / "machines"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def recorded_machine(name: str) -> MachineFacts:
    return read_machine(probe_of(record_of(name)))


def record_of(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record


@dataclass(frozen=True)
class RecordedMachine(Probe):
    """Answers as a record says; a question that was not recorded fails loudly."""

    files: dict[str, str]
    programs: dict[str, Any]

    def has(self, program: str) -> bool:
        return program in self.programs

    def ask(self, program: str, *arguments: str) -> ProgramOutput | None:
        if program not in self.programs:
            return None
        if program == "sysctl":
            return _sysctl(self.programs[program], arguments)
        return ProgramOutput(**self.programs[program][" ".join(arguments)])

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> tuple[str, ...]:
        inside = [path.removeprefix(f"{folder}/") for path in self.files if path.startswith(f"{folder}/")]
        return tuple(sorted({path.split("/")[0] for path in inside}))


def probe_of(record: dict[str, Any]) -> Probe:
    return RecordedMachine(
        system=record["system"],
        processor=record["processor"],
        cpus=tuple(range(record["cpus"])),
        environment=record["environment"],
        disk_free_bytes=record["disk_free_bytes"],
        files=_topology(record) | record["files"],
        programs=record["programs"],
    )


def _sysctl(text: str, arguments: tuple[str, ...]) -> ProgramOutput:
    """The lines asked for; `-i` leaves out what is missing."""
    assert arguments[0] == "-i"
    return ProgramOutput(0, "\n".join(line for line in text.splitlines() if line.split(": ")[0] in arguments[1:]))


def _topology(record: dict[str, Any]) -> dict[str, str]:
    """As Linux numbers two threads a core on x86: processor n and n + cores are one core."""
    if record["system"] != "Linux":
        return {}
    cpus, cores = record["cpus"], record["cores"]
    siblings = {cpu: ",".join(str(n) for n in range(cpu % cores, cpus, cores)) for cpu in range(cpus)}
    folder = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {folder.format(cpu): f"{text}\n" for cpu, text in siblings.items()}
