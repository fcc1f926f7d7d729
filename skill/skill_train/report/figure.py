"""The JSON files of one run as the report reads them: each figure on the page knows the place that it was read from.

Pure: the files were read before.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from skill_train.run.cloud_record import CloudRecord
from skill_train.run.demo_record import Demo
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import StepLine
from skill_train.run.verify_record import Proof

NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Figure:
    """One value on the page.

    Attributes:
        text: as a person reads it.
        value: as it stands in its file; None when it does not.
        at: `run/train.json#/figures/last_loss`, a JSON pointer (RFC 6901) behind the file; empty when unknown.
    """

    text: str
    value: Any = None
    at: str = ""


@dataclass(frozen=True)
class Record:
    """One JSON document of a run; `content` is empty or None when there is no such file."""

    run: str
    file: str
    content: Mapping[str, object] | msgspec.Struct | None

    def __bool__(self) -> bool:
        return bool(self.content)

    def get(self, *keys: str | int, default: Any = None) -> Any:
        """The value at these keys; `default` where one of them is missing or the value is null."""
        found: Any = self.content
        for key in keys:
            try:
                found = getattr(found, str(key)) if isinstance(found, msgspec.Struct) else found[key]
            except (AttributeError, KeyError, IndexError, TypeError):
                return default
        return default if found is None else found

    def figure(self, shown: Callable[[Any], str], *keys: str | int, unknown: str = NOT_KNOWN) -> Figure:
        value = self.get(*keys)
        if value is None:
            return Figure(unknown)
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        return Figure(shown(value), value, f"{self.run}/{self.file}#{pointer}")

    def items(self, *keys: str | int) -> Iterator[tuple[str | int, Any]]:
        """Keys and values of the object or list at these keys."""
        found = self.get(*keys, default={})
        yield from found.items() if isinstance(found, dict) else enumerate(found)


@dataclass(frozen=True)
class ReportedRun:
    """All that the report knows of one run.

    Attributes:
        name: of its folder, and unlike that of any other run on the page.
        call: what a command is given to find it.
        documents: further JSON documents by the name of their file without `.json`.
        outdated: documents that were left out, because they are of other files than those of the run.
        metrics: a line a step, in order.
        texts: `recipe.yaml` and `Modelfile`, where there are such files.
    """

    name: str
    call: str
    documents: dict[str, Mapping[str, object]]
    metrics: list[StepLine]
    texts: dict[str, str]
    proof: Proof | None = None
    evaluation: Evaluation | None = None
    demo: Demo | None = None
    cloud: CloudRecord | None = None
    outdated: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Record:
        typed = {"verify": self.proof, "evaluate": self.evaluation, "demo": self.demo, "cloud": self.cloud}
        return Record(self.name, f"{name}.json", typed.get(name) or self.documents.get(name))

    def exported(self) -> dict[str, tuple[str, str]]:
        """File name to the step that made it, and its name in that step's record."""
        return {
            str(name).rpartition("/")[2]: (step, str(name))
            for step in ("convert", "quantize")
            for name, _ in self[step].items("outputs")
        }

    def trained(self, folder: str) -> dict[str, str]:
        """Digests of what the training wrote into `adapter` or, trained whole, into `merged`, by file name."""
        made = self["train"].get("outputs", default={})
        return {
            name.removeprefix(f"{folder}/"): digest["sha256"]
            for name, digest in made.items()
            if name.startswith(f"{folder}/")
        }

    def without_outdated(self) -> ReportedRun:
        """Without an evaluation of other files: its figures would stand beside files that they are not of."""
        if self.evaluation is None or not self._is_outdated(self.evaluation):
            return self
        return dataclasses.replace(self, evaluation=None, outdated=(*self.outdated, "evaluate"))

    def _is_outdated(self, evaluation: Evaluation) -> bool:
        models = evaluation.inputs.models
        for file, (step, name) in self.exported().items():
            read = _sha256(models[file].model) if file in models else None
            if read is not None and read != self[step].get("outputs", name, "sha256"):
                return True
        tuned = models.get("tuned")
        return tuned is not None and (
            differ(tuned.adapter, self.trained("adapter")) or differ(tuned.model, self.trained("merged"))
        )

    def command(self, words: str) -> str:
        """`skill-train …` on this run."""
        return f"skill-train {words} {shlex.quote(self.call)}"


def differ(digests: Mapping[str, object] | str | None, made: dict[str, str]) -> bool:
    """Whether a step read other files than these; False where it, or the training, names none."""
    known = digests if isinstance(digests, Mapping) else {}
    return bool(known) and any(_sha256(known.get(name)) != made[name] for name in made)


def _sha256(digest: object) -> object:
    return digest.get("sha256") if isinstance(digest, dict) else None
