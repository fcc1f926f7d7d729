"""Which files of a Hub dataset belong to which split: by its card, or else by the file names, as `datasets` 5.2
decides.

Pure: the caller has asked the Hub for the card and the names. Source of the rules: datasets/data_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.core.foreign import JsonObject

KINDS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
# Words in a file's or folder's name that make it a split.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SHARD = re.compile(r"data/(?P<split>[\w.]+)-\d{5}-of-\d{5}.*")


@dataclass(frozen=True)
class Configuration:
    """One configuration of a dataset.

    Attributes:
        files: by split, the repository's data files.
        rows: by split, as the card says; empty when it does not.
    """

    name: str
    files: Mapping[str, list[str]]
    rows: Mapping[str, int]


def configuration(card: Mapping[str, Any], names: Iterable[str], *, wanted: str | None, dataset: str) -> Configuration:
    """The configuration that the recipe names, or the only one, or the default of the card.

    Raises:
        UsageError: there are several and none is named, or there is no such one.
    """
    stated = {str(c["config_name"]): c for c in _dicts(card.get("configs")) if c.get("config_name")}
    infos = {str(i.get("config_name", "default")): i for i in _dicts(card.get("dataset_info"))}
    known = list(stated or infos)
    name = wanted or _default(stated, known)
    if (name is None or name not in known) and known:
        raise UsageError(
            f"{dataset} has {len(known)} configurations" if name is None else f"{dataset} has no configuration {name}",
            code="bad_split",
            expected=", ".join(known[:20]),
            got=name or "none named",
            hint=f"data_config: {known[0]}",
        )
    name = name or "default"
    files = [n for n in sorted(names) if _is_data(n)]
    entry = stated.get(name, {})
    splits = _stated_splits(entry, files) if "data_files" in entry else _splits(_below(files, entry.get("data_dir")))
    return Configuration(name, splits, _row_counts(infos.get(name, {})))


def split_files(found: Configuration, split: str, *, dataset: str) -> list[str]:
    """The files of a split. `split` has no slice.

    Raises:
        UsageError: there is no such split, or no file that can be read.
    """
    if split in found.files:
        return found.files[split]
    names = sorted({*found.files, *found.rows})
    if not names:
        raise UsageError(
            f"{dataset} has no data file that skill-train can read",
            code="unreadable_dataset",
            expected=", ".join(KINDS),
            hint="save it as JSON Lines and use that file",
        )
    raise UsageError(
        f"{dataset} has no split {split}",
        code="bad_split",
        expected=", ".join(names),
        got=split,
        hint=f"split: {names[0]}",
    )


def sliced(split: str, rows: int) -> int:
    """The rows that `train`, `train[:500]`, `train[10%:]` or `train[-100:]` selects from a split of this size."""
    _, start, end = parts(split)
    first = _position(start, rows, 0)
    return max(0, _position(end, rows, rows) - first)


def parts(split: str) -> tuple[str, str, str]:
    """`(name, start, end)` of a split; start and end are empty without a slice.

    Raises:
        UsageError: anything else, such as two splits added up.
    """
    found = re.fullmatch(r"([\w.-]+)(?:\[(-?\d{1,18}%?)?:(-?\d{1,18}%?)?\])?", split.strip())
    if not found:
        raise UsageError(
            f"the split {split!r} is not supported for a dataset on the Hub",
            code="bad_split",
            expected="one split, such as train, train[:500] or train[:10%]",
            got=split,
            hint="split: train, or a slice of one split",
        )
    return found[1], found[2] or "", found[3] or ""


def _default(stated: Mapping[str, Any], known: list[str]) -> str | None:
    marked = [name for name in known if name == "default" or stated.get(name, {}).get("default") is True]
    return marked[0] if len(marked) == 1 else known[0] if len(known) == 1 else None


def _position(said: str, rows: int, otherwise: int) -> int:
    if not said:
        return otherwise
    number = int(said.rstrip("%"))
    if said.endswith("%"):
        number = round(number * rows / 100)
    return min(rows, max(0, number + rows if said.startswith("-") else number))


def _dicts(value: Any) -> list[JsonObject]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, dict)]


def _row_counts(info: Mapping[str, Any]) -> dict[str, int]:
    splits = _dicts(info.get("splits"))
    return {str(s["name"]): s["num_examples"] for s in splits if "name" in s and isinstance(s.get("num_examples"), int)}


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return not hidden and path.name not in _NOT_DATA and name.endswith(KINDS)


def _below(files: list[str], folder: Any) -> list[str]:
    return [f for f in files if f.startswith(f"{folder.strip('/')}/")] if isinstance(folder, str) else files


def _stated_splits(entry: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """The splits of the card's `data_files`: one pattern, several, or patterns for each split."""
    stated = entry["data_files"]
    if isinstance(stated, list) and _dicts(stated):
        stated = {str(d["split"]): d.get("path", []) for d in _dicts(stated) if "split" in d}
    if not isinstance(stated, dict):
        stated = {"train": stated}
    found = {}
    for split, patterns in stated.items():
        wanted = [_glob(p) for p in (patterns if isinstance(patterns, list) else [patterns]) if isinstance(p, str)]
        found[str(split)] = [f for f in files if any(pattern.fullmatch(f) for pattern in wanted)]
    return {split: names for split, names in found.items() if names}


def _glob(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern: `*` within a folder, `**` across folders, `?` one character."""
    marks = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./"))
    return re.compile("".join(marks.get(piece, re.escape(piece)) for piece in pieces))


def _splits(files: list[str]) -> dict[str, list[str]]:
    """The files by split: shards in `data/`, or else folders, or else file names; otherwise everything is `train`."""
    shards: dict[str, list[str]] = {}
    for file in files:
        found = _SHARD.fullmatch(file)
        if found:
            shards.setdefault(found["split"], []).append(file)
    named = shards or _by_word(files, _folders) or _by_word(files, _file_name)
    return named or ({"train": files} if files else {})


def _by_word(files: list[str], part_of: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for split, words in _WORDS.items():
        pattern = re.compile(rf"(^|[-._ 0-9])({'|'.join(words)})($|[-._ 0-9])")
        matching = [file for file in files if any(pattern.search(part) for part in part_of(file))]
        if matching:
            found[split] = matching
    return found


def _folders(file: str) -> tuple[str, ...]:
    return PurePosixPath(file).parts[:-1]


def _file_name(file: str) -> tuple[str, ...]:
    return PurePosixPath(file).parts[-1:]
