"""Checks that a base is the model that an adapter was trained on, or that a merged model was made from."""

import os
from pathlib import Path

from skill_train.core.console import Warn
from skill_train.core.digests import FileDigest, digests, is_file_of
from skill_train.core.errors import UsageError, quoted
from skill_train.machine.limits import require_room_for_torch
from skill_train.model.adapter import read_adapter
from skill_train.model.folder import read_model
from skill_train.model.weight_files import FLOAT_BYTES, read_folder, read_tensor, same_bytes, stored_tensors
from skill_train.run import merge_record
from skill_train.run.folder import RunDir
from skill_train.run.train_record import read_environment


def require_named_base(base: Path, adapter: Path, warn: Warn) -> None:
    """Checks that an adapter was trained on this base, by the digests in its run or else by comparing the weights.
    Warns if neither is possible.

    Raises:
        UsageError: the base is another model.
    """
    from skill_train.hub.models import snapshot

    config, place = read_adapter(adapter).config, adapter.resolve().parent
    name = str(config.get("base_model_name_or_path") or "")
    run = RunDir(place.parent if place.name == "checkpoints" else place)
    environment = read_environment(run.record("environment")) if RunDir.is_one(run.path) else None
    recorded = environment and environment.base_weights
    other, unknown = "", f"{name or 'the model'} is not here as it was then"
    try:
        here = _weights(base) if recorded else None
        named = Path(name) if os.path.isdir(name) else snapshot(name, str(config.get("revision") or "main"))
        if here == recorded and (recorded or (named and named.samefile(base))):
            return
        if here and recorded and _sizes(here) == _sizes(recorded):
            other = "files with other digests"
        elif named and (not recorded or _weights(named) == recorded):
            other, unknown = _difference(base, named)
    except UsageError as error:
        unknown = error.message
    if other:
        raise UsageError(
            f"{base} is not the model that {adapter} was trained on",
            code="wrong_base",
            expected=f"the weights of {name}" + (f" that {run.record('environment')} records" if recorded else ""),
            got=other,
            hint=f"give that model as it was then with --base {quoted(name)}"
            + ("" if recorded else ", or correct adapter_config.json"),
        )
    if unknown:
        warn("base_not_compared", f"nothing shows that {adapter} was trained on {base}: {unknown}")


def _weights(folder: Path) -> dict[str, FileDigest]:
    return digests(folder, [folder / shard.name for shard in read_folder(folder)])


def _sizes(files: dict[str, FileDigest]) -> dict[str, int]:
    return {name: digest["bytes"] for name, digest in files.items()}


def _difference(base: Path, named: Path) -> tuple[str, str]:
    """A text that says what differs, and one that says why this is unknown. Both are empty if all weights are equal,
    in the narrower type if their types differ."""
    ours, theirs = stored_tensors(base), stored_tensors(named)
    alone = sorted(name for name in ours.keys() ^ theirs.keys() if not name.endswith("lm_head.weight"))  # a tied head
    for name in sorted(ours.keys() & theirs.keys()):
        one, two = ours[name], theirs[name]
        if same_bytes(one, two):
            continue
        if one.shape != two.shape or not {one.dtype, two.dtype} <= FLOAT_BYTES.keys():
            alone.append(name)
            continue
        require_room_for_torch()
        import torch

        first, second = read_tensor(one), read_tensor(two)
        if not (torch.equal(first, second.to(first.dtype)) or torch.equal(first.to(second.dtype), second)):
            return f"other numbers in {name}", ""
    return "", f"{alone[0]} has no match" if alone else ""


def require_base_of(reference: Path, record: Path, base: Path, warn: Warn) -> None:
    """Checks that `reference` was merged from or trained on this base, by the models' sizes and by the digests in a
    record. Warns if no record has them.

    Args:
        record: the record of the merge that made `reference`. If it is missing, `environment.json` of the run is read.

    Raises:
        UsageError: the base is another model.
    """
    facts = [read_model(folder, weights_needed=False) for folder in (reference, base)]
    size, other = (f"{each.layers} layers of width {each.hidden_size}" for each in facts)
    if size != other:
        raise _other_base(reference, base, size, other)
    recorded = None
    if record.is_file():
        recorded = merge_record.read(record).inputs.base
    elif reference.name == "merged":
        record = RunDir(reference.parent).record("environment")
        environment = read_environment(record)
        recorded = environment.base_weights if environment else None
    files = {base / name: digest for name, digest in (recorded or {}).items() if name.endswith(".safetensors")}
    if files and all(is_file_of(file, digest) for file, digest in files.items()):
        return
    if not files or any(not file.is_file() or file.stat().st_size != files[file]["bytes"] for file in files):
        why = f"{record} records other files" if files else "no record beside it tells"
        warn("base_not_compared", f"nothing shows that {reference} was tuned from {base}: {why}")
        return
    raise _other_base(reference, base, f"the weights that {record} records", "files with other digests")


def _other_base(reference: Path, base: Path, expected: str, got: str) -> UsageError:
    return UsageError(
        f"{base} is not the model that {reference} was tuned from",
        code="wrong_base",
        expected=expected,
        got=got,
        hint="give that model as it was then with --base",
    )
