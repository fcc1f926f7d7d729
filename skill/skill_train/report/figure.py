"""The JSON files of one run for the report. Each figure on the page knows the file and the key that it was read from.

Pure: the files were read before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from skill_train.core.errors import quoted
from skill_train.report.demo_record import Demo
from skill_train.run.cloud_record import CloudRecord
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import StepLine
from skill_train.run.verify_record import Proof

NOT_KNOWN = "not known"
Shown = Callable[[Any], str]  # the text of a value


@dataclass(frozen=True)
class Figure:
    """One value on the page."""

    text: str  # the value in words for a person
    value: Any = None  # the value in the file; None if the file does not have it
    # the file and a JSON pointer (RFC 6901), such as `run/train.json#/figures/last_loss`; empty if unknown
    at: str = ""


@dataclass(frozen=True)
class Record:
    """One JSON document of a run; `content` is empty or None if there is no such file."""

    run: str
    file: str
    content: Mapping[str, object] | msgspec.Struct | None

    def __bool__(self) -> bool:
        return bool(self.content)

    def get(self, *keys: str | int, default: Any = None) -> Any:
        """The value at these keys; `default` if a key is missing or the value is null."""
        value: Any = self.content
        for key in keys:
            try:
                value = getattr(value, str(key)) if isinstance(value, msgspec.Struct) else value[key]
            except (AttributeError, KeyError, IndexError, TypeError):
                return default
        return default if value is None else value

    def figure(self, text_of: Shown, *keys: str | int, unknown: str = NOT_KNOWN) -> Figure:
        value = self.get(*keys)
        if value is None:
            return Figure(unknown)
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        return Figure(text_of(value), value, f"{self.run}/{self.file}#{pointer}")

    def items(self, *keys: str | int) -> Iterator[tuple[str | int, Any]]:
        """Keys and values of the object or list at these keys."""
        children = self.get(*keys, default={})
        yield from children.items() if isinstance(children, dict) else enumerate(children)


class PictureView(TypedDict):
    """One picture of a row: a small copy as a data URI, or the reason why there is none."""

    thumbnail: str | None
    width: int
    height: int
    why_not: str


@dataclass(frozen=True)
class ShownPictures:
    """The pictures of the shown rows, by the lines of the rows. `note` is the reason if there are none at all."""

    by_line: dict[int, list[PictureView]]
    note: str = ""


@dataclass(frozen=True)
class ReportedRun:
    """Everything that the report knows about one run."""

    name: str  # the name of the run's folder, made unique among the runs on the page
    call: str  # the argument with which a command finds the run
    documents: dict[str, Mapping[str, object]]  # further JSON documents by the name of their file without `.json`
    metrics: list[StepLine]  # a line for each step, in order
    texts: dict[str, str]  # `recipe.yaml` and `Modelfile`, if there are such files
    proof: Proof | None = None
    evaluation: Evaluation | None = None
    demo: Demo | None = None
    cloud: CloudRecord | None = None
    pictures: ShownPictures = ShownPictures({})  # the pictures of the shown answers
    # documents that were left out, because they are about other files than the run has now
    outdated: tuple[str, ...] = ()
    # replaced, gone: verified files with another content on the disk, and exported files that are missing
    replaced: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()  # files in gguf/ that neither the proof nor an export names
    base_may_know: bool = False  # the base was made by runs that may have trained on held-out rows

    def __getitem__(self, name: str) -> Record:
        typed = {"verify": self.proof, "evaluate": self.evaluation, "demo": self.demo, "cloud": self.cloud}
        return Record(self.name, f"{name}.json", typed.get(name) or self.documents.get(name))

    @property
    def backend(self) -> str | None:
        """The backend in the plan, such as `local`."""
        backend: str | None = self["plan"].get("placement", "backend")
        return backend

    @property
    def is_exported(self) -> bool:
        """Whether a model was converted, or the adapter alone."""
        return bool(self["convert"] or self["lora_gguf"])

    def exported(self, *steps: str) -> dict[str, tuple[str, str]]:
        """By file name: the step that made the file, and its name in that step's record. The default are the language
        models."""
        return {
            str(name).rpartition("/")[2]: (step, str(name))
            for step in steps or ("convert", "quantize")
            for name, _ in self[step].items("outputs")
        }

    def projectors(self) -> dict[str, tuple[str, str]]:
        """The files that read pictures, in the form of `exported`."""
        return self.exported("mmproj")

    def trained(self, folder: str) -> dict[str, str]:
        """Digests of the files that training wrote, by file name: in `adapter`, or in `merged` if every weight was
        trained."""
        outputs = self["train"].get("outputs", default={})
        return {
            name.removeprefix(f"{folder}/"): digest["sha256"]
            for name, digest in outputs.items()
            if name.startswith(f"{folder}/")
        }

    def without_outdated(self) -> ReportedRun:
        """The run without its evaluation, if that is of other files and its figures would be beside the wrong files.
        The demo's figures are from the evaluation."""
        if self.evaluation is None or not self._is_outdated(self.evaluation):
            return self
        return dataclasses.replace(self, evaluation=None, demo=None, outdated=(*self.outdated, "evaluate"))

    def _is_outdated(self, evaluation: Evaluation) -> bool:
        models = evaluation.inputs.models
        for file, (step, name) in self.exported().items():
            model = models[file].model if file in models else None
            read = _sha256(model)
            if read is not None and read != self[step].get("outputs", name, "sha256"):
                return True
            if isinstance(model, dict) and "projector" in model and not self._has_projector(model["projector"]):
                return True
        tuned = models.get("tuned")
        return tuned is not None and (
            differ(tuned.adapter, self.trained("adapter")) or differ(tuned.model, self.trained("merged"))
        )

    def is_proof_of(self, file: str) -> bool:
        """Whether the proof is of the present exported file of this name, and of the present trained model."""
        if self.proof is None:
            return False
        read, (step, name) = self.proof.inputs, (self.exported() | self.projectors())[file]
        other_model = differ(read.adapter, self.trained("adapter")) or differ(read.reference, self.trained("merged"))
        verified = read.ggufs.get(file)
        same = verified is None or verified["sha256"] == self[step].get("outputs", name, "sha256")
        return same and not other_model

    def _has_projector(self, digest: object) -> bool:
        recorded = [self[step].get("outputs", name, "sha256") for step, name in self.projectors().values()]
        return _sha256(digest) in recorded

    def command(self, words: str) -> str:
        """`skill-train …` on this run."""
        return f"skill-train {words} {quoted(self.call)}"


def differ(digests: Mapping[str, object] | str | None, recorded: dict[str, str]) -> bool:
    """Whether a step read other files than the recorded ones. False if either side has no digests."""
    read = digests if isinstance(digests, Mapping) else {}
    return bool(read) and any(_sha256(read.get(name)) != recorded[name] for name in recorded)


def _sha256(digest: object) -> object:
    return digest.get("sha256") if isinstance(digest, dict) else None
