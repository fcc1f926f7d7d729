"""The JSON files of one run as the report reads them: each figure on the page knows the place that it was read from.

Pure: the files were read before.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skill_train.run.train_record import StepLine

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
    """One JSON document of a run; `content` is empty when there is no such file."""

    run: str
    file: str
    content: dict[str, Any]

    def __bool__(self) -> bool:
        return bool(self.content)

    def get(self, *keys: str | int, default: Any = None) -> Any:
        """The value at these keys; `default` where one of them is missing or the value is null."""
        found: Any = self.content
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
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
class Run:
    """All that the report knows of one run.

    Attributes:
        name: of its folder, and unlike that of any other run on the page.
        call: what a command is given to find it.
        documents: JSON documents by the name of their file without `.json`.
        outdated: documents that were left out, because they are of other files than those of the run.
        metrics: a line a step, in order.
        texts: `recipe.yaml` and `Modelfile`, where there are such files.
    """

    name: str
    call: str
    documents: dict[str, dict[str, Any]]
    metrics: list[StepLine]
    texts: dict[str, str]
    outdated: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Record:
        return Record(self.name, f"{name}.json", self.documents.get(name, {}))

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

    def without_outdated(self) -> Run:
        """Without an evaluation of other files: its figures would stand beside files that they are not of."""
        evaluate = self["evaluate"]
        for file, (step, name) in self.exported().items():
            read = evaluate.get("inputs", "models", file, "model", "sha256")
            if read is not None and read != self[step].get("outputs", name, "sha256"):
                return self._without("evaluate")
        for folder, read in (("adapter", "adapter"), ("merged", "model")):
            if differ(evaluate.get("inputs", "models", "tuned", read), self.trained(folder)):
                return self._without("evaluate")
        return self

    def _without(self, gone: str) -> Run:
        kept = {name: document for name, document in self.documents.items() if name != gone}
        return dataclasses.replace(self, documents=kept, outdated=(*self.outdated, gone))

    def command(self, words: str) -> str:
        """`skill-train …` on this run."""
        return f"skill-train {words} {shlex.quote(self.call)}"


def differ(digests: dict[str, Any] | None, made: dict[str, str]) -> bool:
    """Whether a step read other files than these; False where it, or the training, names none."""
    return bool(digests and made) and any((digests or {}).get(name, {}).get("sha256") != made[name] for name in made)
