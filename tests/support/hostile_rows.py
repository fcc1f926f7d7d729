"""What a hostile dataset may do: a file of any kind, and the start of one on the Hub."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

from hostile import RAW, command, cut, edited, judged, text
from skill_train.hub import dataset_card
from skill_train.hub.rows import first_rows

_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_ASKED, _ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "system", "content": "s"}, _ASKED, _ANSWERED]},
    {"prompt": "q", "completion": "a"},
    {"instruction": "i", "input": "x", "output": "o", "system": "s"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"text": "t"},
    {"question": "q", "answer": "a"},
    {"messages": [_ASKED, _ANSWERED | {"tool_calls": [_CALL]}, {"role": "tool", "content": "1"}], "tools": [_CALL]},
    {"prompt": [_ASKED], "chosen": [_ANSWERED], "rejected": [_ANSWERED | {"content": "b"}]},
    {"prompt": "q", "completion": "a", "label": True},
)


def rows(data: bytes, folder: Path) -> object:
    """`data` on a file of any kind."""
    suffix = ("jsonl", "json", "csv", "tsv", "parquet", "ndjson", "txt", "jsonl")[data[0] % 8] if data else "jsonl"
    path = folder / f"rows.{suffix}"
    path.write_bytes(_rows(data[1:], suffix))
    form = "human" if data[:1] > b"\x7f" else "json"
    return command(["data", str(path), "--format", form], folder)


def _rows(data: bytes, suffix: str) -> bytes:
    kind, rest = data[:1], data[1:]
    if kind < b"\x20":
        return rest
    if kind < b"\x30":
        return RAW[int.from_bytes(rest[:1]) % len(RAW)]
    chosen = [ROWS[b % len(ROWS)] for b in rest[:3]] or [ROWS[0]]
    if suffix == "parquet":
        return cut(_parquet(), rest) if kind < b"\xa0" else _parquet_of(edited(chosen[:1] * 2, rest[3:]))
    if suffix in ("csv", "tsv"):
        sign = "," if suffix == "csv" else "\t"
        lines = [
            sign.join(map(str, row.values()))
            for row in _listed(edited([{"prompt": "q", "completion": "a"}] * 2, rest))
            if isinstance(row, dict)
        ]
        return cut(
            sign.join(["prompt", "completion"]).encode() + b"\n" + "\n".join(lines).encode("utf-8", "surrogatepass"),
            rest,
        )
    changed = edited(chosen, rest[3:])
    if suffix == "json" or not isinstance(changed, list):
        return text(changed)
    whole = b"\n".join(text(row) for row in changed)
    if kind > b"\xf0":
        return whole.decode().encode(("utf-16", "utf-32", "latin-1", "utf-8-sig", "cp1252")[kind[0] % 5])
    return cut(whole, rest) if kind > b"\xd0" else whole


def _listed(changed: Any) -> list[Any]:
    return changed if isinstance(changed, list) else []


@cache
def _parquet() -> bytes:
    return _parquet_of([{"prompt": f"q{i}", "completion": "a" * i} for i in range(20)])


def _parquet_of(changed: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    try:
        parquet.write_table(pyarrow.Table.from_pylist([row for row in _listed(changed) if isinstance(row, dict)]), out)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError, UnicodeError):
        return _parquet()  # Arrow cannot hold it
    return out.getvalue()


def start_of_rows(data: bytes, folder: Path) -> object:
    """The first bytes of a file on the Hub, and the card of its dataset."""
    name = f"x.{('jsonl', 'json', 'csv', 'tsv', 'txt')[data[0] % 5] if data else 'json'}"
    content = _rows(data[1:], name[2:])
    card = {"configs": [{"config_name": "a", "data_files": [{"split": "train", "path": "data/*.json"}]}],
            "dataset_info": {"config_name": "a", "splits": [{"name": "train", "num_examples": 5}]}}  # fmt: skip

    def call() -> None:
        first_rows.numbered(content, name, whole=content[:1] > b"a")
        names = edited(["data/a.json", "data/b.json", "train.csv"], data[1:5])
        changed = edited(card, data[5:])
        if isinstance(changed, dict) and isinstance(names, list):
            names = [name for name in names if isinstance(name, str)]
            found = dataset_card.configuration(changed, names, chosen=None, dataset="me/x")
            dataset_card.split_files(found, "train", dataset="me/x")

    return judged(call, folder)
