"""A mix of types to make again: read from a file, and checked against the model before anything is made.

The file is `quantize.json` of an export, or a JSON object with a type for the name of each matrix. It may be anybody's:
a name is only ever compared with the names of the model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError, nearest, quoted
from skill_train.gguf.importance import Matrix
from skill_train.gguf.mix import MixTarget, identity, quantizable
from skill_train.gguf.quality.mix import BITS, NEED_MATRIX, block_of
from skill_train.llama.gguf_header import read_gguf
from skill_train.run import records
from skill_train.run.export_record import ExportRecord, MixSource, size_option

_SHOWN = 5  # mixes in a message
_UNROUNDED = ("f16", "bf16")
_LEAST_BLOCK = 32  # a matrix whose rows are not a multiple of it fits no type, and stays as it is where it is not named


@dataclass(frozen=True)
class MixFile:
    """The types of a mix, by matrix, and where they were read from."""

    types: dict[str, str]
    source: MixSource
    most_bytes: int | None = None  # of the whole file; None asks for nothing
    bits: float | None = None  # a weight of all matrices; None where no size was named

    @property
    def name(self) -> str:
        """Of the file, after the name of the model: the same types have the same name."""
        return f"mix-{identity(self.types)[:8]}"


def read_mix(path: Path, target: MixTarget | None) -> MixFile:
    """The mix in a file.

    Args:
        target: the size that it was chosen for, where a record has several mixes.

    Raises:
        UsageError: there is no such file or no such mix, or it is no JSON of names and types.
    """
    try:
        content = records.regular_bytes(path)
    except OSError as error:
        raise _no_mix(path, error.strerror or str(error)) from None
    document = _document(path, content)
    if "schema" in document:
        mix, types = _recorded(path, records.convert(document, ExportRecord, path), target)
    elif target is not None:
        why = f"it is a plain list of types, so it has no mix named {target.name}"
        raise _no_mix(path, why, f"--mix {quoted(path)}")
    else:
        mix, types = "", _listed(path, document)
    types = {name: _type_of(path, name, kind) for name, kind in types.items()}
    if all(kind in _UNROUNDED for kind in types.values()):
        raise _no_mix(path, "it rounds no matrix")
    source: MixSource = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "mix": mix}
    most, bits = (target.most_bytes, target.bits) if target else (None, None)
    return MixFile(types, source, most, bits)


def require_fit(mix: MixFile, source: Path) -> None:
    """Checks the names and the lengths of rows.

    Raises:
        UsageError: the model has other matrices, or rows that are not whole blocks of their type.
    """
    gguf = read_gguf(source)
    matrices = quantizable(gguf)
    if unknown := [name for name in mix.types if name not in matrices]:
        raise _other_model(mix, source, f"the model has no matrix {_first_of(unknown)} that can be rounded")
    lacking = [name for name in matrices if name not in mix.types and gguf.tensors[name].shape[0] % _LEAST_BLOCK == 0]
    if lacking:
        raise _other_model(mix, source, f"it has no type for {_first_of(lacking)}")
    for name, kind in mix.types.items():
        if gguf.tensors[name].shape[0] % block_of(kind):
            rows = f"rows of {gguf.tensors[name].shape[0]} weights are not divisible by {block_of(kind)}"
            raise _other_model(mix, source, f"{name} cannot be {kind}: {rows}")


def require_matrix(mix: MixFile, matrix: Matrix | None, source: Path) -> None:
    """Checks that the importance matrix has what the types need.

    Raises:
        UsageError: a type needs it for a matrix that it says nothing about.
    """
    covered = set() if matrix is None else {name for name in mix.types if name.startswith("blk.")} - {*matrix.missing}
    lacking = [name for name, kind in mix.types.items() if kind in NEED_MATRIX and name not in covered]
    if lacking:
        none = "there is none" if matrix is None else f"{matrix.file.name} says nothing about it"
        raise _other_model(
            mix,
            source,
            f"{_first_of(lacking)} cannot be {mix.types[lacking[0]]} without an importance matrix, and {none}",
        )


def _document(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _no_mix(path, f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _no_mix(path, "it is not an object of names and types")
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds the object. Refuses a name that appears twice, because either of its types could be meant."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{records.shortened(name)} appears twice")
        entries[name] = value
    return entries


def _recorded(path: Path, record: ExportRecord, target: MixTarget | None) -> tuple[str, dict[str, str]]:
    """The name and the types of the mix in a record: the only one, or that of the size that was asked for."""
    mixes = {entry["quant"]: entry["tensor_types"] for entry in record.outputs.values() if "tensor_types" in entry}
    chosen = mixes if target is None else {name: types for name, types in mixes.items() if name == target.name}
    if len({identity(types) for types in chosen.values()}) == 1:
        return next(iter(chosen.items()))
    if not mixes:
        raise _no_mix(path, "no file in it is a mix of types")
    missing = f"it has no {target.name}" if target else "it has several mixes, and --bits or --max-size names none"
    sizes = [option for name in mixes if (option := size_option(name))]
    options = f"--mix {quoted(path)}{sizes[0]}" if sizes else ""
    raise _no_mix(path, f"{missing}; there are {_listed_names([*mixes])}", options)


def _listed(path: Path, document: dict[str, Any]) -> dict[str, str]:
    if not document:
        raise _no_mix(path, "it is empty")
    odd = next((name for name, kind in document.items() if not isinstance(kind, str)), None)
    if odd is not None:
        raise _no_mix(path, f"the type of {records.shortened(odd)} is {records.shortened(document[odd])}, not a name")
    return document


def _type_of(path: Path, name: str, kind: str) -> str:
    if kind.lower() not in BITS:
        why = f"{records.shortened(name)} is to be {records.shortened(kind)}, which is not a type of a matrix"
        raise _no_mix(path, why + nearest(kind.lower()[:60], BITS))
    return kind.lower()


def _first_of(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    first, *others = names
    return records.shortened(first) + (f" and {len(others)} more" if others else "")


def _listed_names(names: list[str]) -> str:
    """A few of some names, each short. A record may be anybody's."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:60] for name in names[:_SHOWN]) + more


def _no_mix(path: Path, why: str, options: str = "") -> UsageError:
    return UsageError(
        f"{path} is not a mix of types that can be used: {why}",
        code="cannot_quantize",
        expected="quantize.json of an export with --quant auto, or an object of the names of matrices and their types",
        got=why,
        hint=f"skill-train export-gguf RUN {options or '--quant auto --bits 4.5'}",
    )


def _other_model(mix: MixFile, source: Path, why: str) -> UsageError:
    size = size_option(mix.source["mix"]) or " --bits 4.5"
    return UsageError(
        f"the mix of {mix.source['file']} does not fit {source.name}: {why}",
        code="cannot_quantize",
        expected="a mix of a model with the same matrices",
        got=why,
        hint=f"skill-train export-gguf {quoted(source.parent.parent)} --quant auto{size}",
    )
