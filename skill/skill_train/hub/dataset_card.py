"""Finds the files of each split of a Hub dataset, by its card or else by the file names, as `datasets` 5.2 does.

Pure functions: the caller requests the card and the names. Source of the rules: datasets/data_files.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject
from skill_train.program.examples import PICTURES

ROW_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
KINDS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
# By split, the words in the name of a file or folder that assign it to the split.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_PICTURE = re.compile(rf".+\.(?:{PICTURES})", re.IGNORECASE)
_SHARD = re.compile(r"data/(?P<split>[\w.]+)-\d{5}-of-\d{5}.*")


@dataclass(frozen=True)
class Configuration:
    name: str
    files: Mapping[str, list[str]]  # the repository's data files by split
    rows: Mapping[str, int]  # the number of rows by split, from the card; empty if the card does not say


def configuration(card: Mapping[str, Any], names: Iterable[str], *, chosen: str | None, dataset: str) -> Configuration:
    """The configuration `chosen` by the recipe, or else the only one, or else the card's default.

    Raises:
        UsageError: `chosen` does not exist, or it is None and there are several without a default.
    """
    stated = {str(c["config_name"]): c for c in _dicts(card.get("configs")) if c.get("config_name")}
    infos = {str(i.get("config_name", "default")): i for i in _dicts(card.get("dataset_info"))}
    available = list(stated or infos)
    name = chosen or _default(stated, available)
    if (name is None or name not in available) and available:
        raise UsageError(
            f"{dataset} has {len(available)} configurations"
            if name is None
            else f"{dataset} has no configuration {name}",
            code="bad_split",
            expected=", ".join(available[:20]),
            got=name or "none named",
            hint=f"data_config: {available[0]}",
        )
    name = name or "default"
    files = [n for n in sorted(names) if _is_data(n)]
    entry = stated.get(name, {})
    splits = _stated_splits(entry, files) if "data_files" in entry else _splits(_below(files, entry.get("data_dir")))
    return Configuration(name, splits, _row_counts(infos.get(name, {})))


def split_files(chosen: Configuration, split: str, *, dataset: str) -> list[str]:
    """The files of a split. `split` must not have a slice.

    Raises:
        UsageError: the split does not exist, or the dataset has no data file of a known type.
    """
    if split in chosen.files:
        return chosen.files[split]
    names = sorted({*chosen.files, *chosen.rows})
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


def has_pictures_beside(file: str, names: Iterable[str]) -> bool:
    """Whether `names` has pictures in the folder of a file of rows, or below it."""
    folder = "" if "/" not in file else f"{PurePosixPath(file).parent}/"
    return any(name.startswith(folder) and _PICTURE.fullmatch(name) for name in names)


def sliced(split: str, rows: int) -> int:
    """The number of rows that `train`, `train[:500]`, `train[10%:]` or `train[-100:]` selects from a split of `rows`.

    Raises:
        UsageError: `datasets` reads the slice in another way, or refuses it.
    """
    _, start, end = parts(split)
    shares = [bound for bound in (start, end) if bound.endswith("%")]
    if any(abs(int(share[:-1])) > 100 for share in shares) or (shares and "" not in (start, end) and len(shares) == 1):
        raise UsageError(
            f"the split {split!r} is not supported for a dataset on the Hub",
            code="bad_split",
            expected="two numbers of rows, or two percentages of at most 100: datasets takes both ends as percentages",
            got=split,
            hint="split: train[:500], or train[10%:20%]",
        )
    return between(split, rows)


def between(split: str, rows: int) -> int:
    """The number of rows in a slice of a split of `rows`. One end may be a percentage and the other a number."""
    _, start, end = parts(split)
    return max(0, _position(end, rows, rows) - _position(start, rows, 0))


def parts(split: str) -> tuple[str, str, str]:
    """`(name, start, end)` of a split; start and end are empty without a slice.

    Raises:
        UsageError: the text is anything else, such as a sum of two splits.
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[(-?\d{1,18}%?)?:(-?\d{1,18}%?)?\])?", split.strip())
    if not match:
        raise UsageError(
            f"the split {split!r} is not supported for a dataset on the Hub",
            code="bad_split",
            expected="one split, such as train, train[:500] or train[:10%]",
            got=split,
            hint="split: train, or a slice of one split",
        )
    return match[1], match[2] or "", match[3] or ""


def _default(stated: Mapping[str, Any], available: list[str]) -> str | None:
    marked = [name for name in available if name == "default" or stated.get(name, {}).get("default") is True]
    return marked[0] if len(marked) == 1 else available[0] if len(available) == 1 else None


def _position(bound: str, rows: int, otherwise: int) -> int:
    if not bound:
        return otherwise
    number = int(bound.rstrip("%"))
    if bound.endswith("%"):
        number = round(number * rows / 100)
    return min(rows, max(0, number + rows if number < 0 else number))


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
    splits = {}
    for split, patterns in stated.items():
        globs = [_glob(p) for p in (patterns if isinstance(patterns, list) else [patterns]) if isinstance(p, str)]
        splits[str(split)] = [f for f in files if any(pattern.fullmatch(f) for pattern in globs)]
    return {split: names for split, names in splits.items() if names}


def _glob(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern: `*` within a folder, `**` across folders, `?` one character."""
    marks = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./"))
    return re.compile("".join(marks.get(piece, re.escape(piece)) for piece in pieces))


def _splits(files: list[str]) -> dict[str, list[str]]:
    """The files by split: by shards in `data/`, or else by folder names, or else by file names, or else all `train`."""
    shards: dict[str, list[str]] = {}
    for file in files:
        match = _SHARD.fullmatch(file)
        if match:
            shards.setdefault(match["split"], []).append(file)
    named = shards or _by_word(files, slice(-1)) or _by_word(files, slice(-1, None))
    return named or ({"train": files} if files else {})


def _by_word(files: list[str], where: slice) -> dict[str, list[str]]:
    """The files by split, according to words in the parts `where` of their paths."""
    splits: dict[str, list[str]] = {}
    for split, words in _WORDS.items():
        pattern = re.compile(rf"(^|[-._ 0-9])({'|'.join(words)})($|[-._ 0-9])")
        matching = [file for file in files if any(map(pattern.search, PurePosixPath(file).parts[where]))]
        if matching:
            splits[split] = matching
    return splits
