"""Writes the table of a demo run into README.md: `python scripts/make_demo_table.py runs/demo`.

It is what `skill-train demo` prints on a terminal of 80 columns, drawn by the same function from the same record.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from skill_train.commands.demo import draw_stages
from skill_train.report.demo_record import Demo
from skill_train.run import records

README = Path(__file__).resolve().parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- made by scripts/make_demo_table.py -->\n```text\n).*?(```\n)", re.DOTALL)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    table = table_of(Path(sys.argv[1]))
    README.write_text(_BLOCK.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")


def table_of(run: Path) -> str:
    """The table of a run with `demo.json`."""
    out = io.StringIO()
    draw_stages(Console(file=out, width=80, color_system=None), records.read(run / "demo.json", Demo).figures.stages)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def shown() -> str:
    """The table as it stands in README.md."""
    table = _BLOCK.search(README.read_text(encoding="utf-8"))
    assert table is not None, "README.md has no place for the table"
    return table[0].removeprefix(table[1]).removesuffix(table[2])


if __name__ == "__main__":
    main()
