"""Reads a mix of types from a file, so that it can be made again, and checks that it fits the model.

The file is `quantize.json` of an export, or a JSON object that has a type for the name of each matrix. It is not
trusted: its names are only compared with the names in the model.
"""

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

_SHOWN = 5  # the most mixes that a message names
_UNROUNDED = ("f16", "bf16")
_LEAST_BLOCK = 32  # if a matrix's rows are not a multiple of it, no type fits, and the mix may leave the matrix out


@dataclass(frozen=True)
class MixFile:
    """The types of a mix, by the name of the matrix, and the file that they were read from."""

    types: dict[str, str]
    source: MixSource
    most_bytes: int | None = None  # the limit of the whole file; None for no limit
    bits: float | None = None  # bits per weight, over all matrices; None if the user named none

    @property
    def name(self) -> str:
        """The part of the file's name that follows the model's name. Mixes with the same types have the same name."""
        return f"mix-{identity(self.types)[:8]}"


def read_mix(path: Path, target: MixTarget | None) -> MixFile:
    """Reads the mix in a file.

    Args:
        target: the size for which the mix was chosen, if a record has several mixes.

    Raises:
        UsageError: the file or the mix does not exist, or the file is not JSON with names and types.
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
    """Checks that the names and types of the mix fit the matrices of the model.

    Raises:
        UsageError: the model has other matrices, or its rows are not whole blocks of their type.
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
    """Checks that the importance matrix has an entry for each matrix whose type needs one.

    Raises:
        UsageError: an entry is missing, or there is no importance matrix.
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
    """Builds a JSON object. Refuses a name that appears twice, because either type could be meant."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{records.shortened(name)} appears twice")
        entries[name] = value
    return entries


def _recorded(path: Path, record: ExportRecord, target: MixTarget | None) -> tuple[str, dict[str, str]]:
    """The name and the types of a mix in a record: the mix for `target`, or the only one if `target` is None."""
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
    """The first name, and how many more there are."""
    first, *others = names
    return records.shortened(first) + (f" and {len(others)} more" if others else "")


def _listed_names(names: list[str]) -> str:
    """The first few names, each shortened, because the record is not trusted."""
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
