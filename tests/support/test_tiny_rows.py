"""The little conversations that tests train on."""

from __future__ import annotations

import json
from pathlib import Path

import tiny


def test_rows_are_seeded_and_well_formed(tmp_path: Path) -> None:
    rows = tiny.rows(30, seed=3)
    assert rows == tiny.rows(30, seed=3) != tiny.rows(30, seed=4)
    for row in rows:
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    lines = tiny.write_rows(tmp_path / "rows.jsonl", 30, seed=3).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
