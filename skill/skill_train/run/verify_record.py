"""`verify.json`: the checks of each GGUF file."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")
# What every version says of each file that it could judge: a check, or why there is none.
_OF_AN_ADAPTER = frozenset(["file", "digest", "types", "metadata", "weights", "loads", "logits", "tuned", "answers"])
_OF_A_MODEL = _OF_AN_ADAPTER.union(["vocabulary", "tensors", "chat_template", "tokens", "special_tokens"])
_OF_A_PROJECTOR = frozenset(["file", "digest", "projector", "projector_weights"])


class Check(msgspec.Struct, frozen=True):
    """A measurement on one file, and its limit."""

    name: str  # a stable word, such as `logits`
    file: str  # name of the GGUF file
    verdict: Verdict
    figure: Number | str | None  # the measured value that decides the verdict
    threshold: Number | str | None  # the value that it is compared with
    detail: str  # one sentence for a person
    figures: Mapping[str, object] = {}  # further values, for programs


class NotChecked(msgspec.Struct, frozen=True):
    """A check that could not be made on one file, and why."""

    name: str
    file: str
    reason: str


Finding = Check | NotChecked


class ProofInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The files and rows that a proof is valid for."""

    reference: dict[str, FileDigest]
    adapter: dict[str, FileDigest] | None
    base: dict[str, FileDigest] | str | None  # digests of the base's files; or the words `the reference`
    ggufs: dict[FileName, FileDigest]
    # rows, held_out: sha256 of the rows
    rows: str
    held_out: str
    unread: list[list[str]] = []  # files that could not be judged, each with the reason
    # the model folder whose answers to pictures a projector was compared with
    pictures: dict[str, FileDigest] | None = None


class ProofOptions(msgspec.Struct, frozen=True):
    """How much was compared."""

    tokens: Whole
    # the inference programs that the files ran in, with their versions; the version of a missing program is empty
    engines: dict[str, str] = {}


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """`verify.json`: the checks of each file, and the inputs that they are valid for."""

    schema: StepSchema = "skill-train/step/1"
    step: str
    inputs: ProofInputs
    options: ProofOptions
    versions: dict[str, str | None]
    outputs: dict[FileName, FileDigest] = {}
    verdict: Verdict  # the worst of the checks
    checks: list[Check]
    not_checked: list[NotChecked]
    samples: dict[str, Whole]  # the numbers of compared tokens, texts, rows, conversations and answers
    seconds: Number
    peak_memory_bytes: Whole | None = None
    peak_memory_children_bytes: Whole | None = None
    finished_at: str  # UTC


def read(path: Path) -> Proof:
    """The proof in a file.

    Raises:
        UsageError: missing, no proof, or checks were taken out of it.
    """
    proof = records.read(path, Proof)
    if lacks := _lacks(proof):
        raise records.broken(path, lacks)
    return proof


def _lacks(proof: Proof) -> str:
    """Why these are not all the checks that `verify` made; empty if they are. A proof of nothing would be green."""
    findings: list[Finding] = [*proof.checks, *proof.not_checked]
    for file in sorted(proof.inputs.ggufs):
        found = {one.name for one in findings if one.file == file}
        kind = _OF_A_MODEL if found & _OF_A_MODEL - _OF_AN_ADAPTER else _OF_AN_ADAPTER
        kind = _OF_A_PROJECTOR if "projector" in found else kind
        if kind - found and "everything else" not in found:
            return f"{file} lacks {', '.join(sorted(kind - found))}"
    verdict = worst(check.verdict for check in proof.checks)
    return "" if proof.verdict == verdict else f"the verdict is {proof.verdict}, and the worst of its checks {verdict}"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of the verdicts; `pass` when there is none."""
    return max(verdicts, key=_ORDER.index, default="pass")
