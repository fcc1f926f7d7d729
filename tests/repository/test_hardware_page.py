"""The table of machines in references/hardware_guide.md says what the estimate says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models import NAMES, recorded, recorded_model
from planning import decided

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "references" / "hardware_guide.md").read_text(encoding="utf-8")
FAMILIES = ("qwen2.5", "qwen3", "llama", "phi", "gemma")
TEXT = [n for n in NAMES if n.startswith(FAMILIES) and not recorded_model(n).vision and n != "qwen3-30b-a3b"]
BY_SIZE = sorted(TEXT, key=lambda name: recorded(name)["published_parameters"])
STOPPING = {"no_memory", "no_flavor", "needs_cuda", "unknown_memory", "no_disk"}
# The machine or the flavor of each row of the page, by its first two cells.
ROWS = {
    "MacBook, M2 Pro | 16 GB unified": {"machine": "m2_pro_16gb"},
    "MacBook, M2 Pro | 32 GB unified": {"machine": "m2_pro_32gb"},
    "Mac, M4 Max | 128 GB unified": {"machine": "m4_max_128gb"},
    "T4 | 16 GB": {"flavor": "t4-small"},
    "RTX 3080 | 10 GB": {"machine": "rtx_3080"},
    "RTX 4090 | 24 GB": {"machine": "rtx_4090"},
    "L4, A10G | 24 GB": {"flavor": "l4x1"},
    "L40S | 48 GB": {"flavor": "l40sx1"},
    "A100 | 80 GB": {"flavor": "a100-large"},
    "H200 | 141 GB": {"flavor": "h200"},
    "DGX Spark (GB10) | 128 GB unified": {"machine": "dgx_spark"},
    "8 x L40S, FSDP | 384 GB": {"machine": "8x_l40s"},
}


def _key(cell: str) -> str:
    """`Qwen2.5 14B, in days` as the record is called: qwen2.5-14b."""
    return cell.split(",")[0].strip().lower().replace(" ", "-")


def _largest(machine: str = "bare_cpu", flavor: str | None = None, **said: bool) -> str | None:
    where = {"where": "local"} if flavor is None else {"where": "cloud", "flavor": flavor}
    fitting = (
        name
        for name in reversed(BY_SIZE)
        if not STOPPING & {blocker["code"] for blocker in decided(name, machine, **where, **said)["blockers"]}
    )
    return next(fitting, None)


def test_the_page_has_these_rows() -> None:
    machines = PAGE.split("## Machines")[1].split("## Precision")[0]
    assert re.findall(r"^\| ([^|]+ \| \d+ GB[^|]*?) \|", machines, re.MULTILINE) == list(ROWS)
    assert f"largest of {len(TEXT)} recorded" in PAGE


@pytest.mark.parametrize("row", ROWS)
def test_what_fits_is_what_the_estimate_says(row: str) -> None:
    line = re.search(rf"^\| {re.escape(row)} \|.*\| ([^|]+) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert line is not None
    lora, qlora = line[1], line[2].strip()
    assert _largest(**ROWS[row]) == _key(lora)
    if qlora == "not on a Mac":
        assert _largest(**ROWS[row], load_in_4bit=True) is None
    elif qlora != "not divided":
        assert _largest(**ROWS[row], load_in_4bit=True) == _key(qlora)


def test_the_skill_says_the_same_of_24_gb() -> None:
    """A GPU of 24 GB is that of the RTX 4090's row."""
    skill = (Path(__file__).resolve().parents[2] / "SKILL.md").read_text(encoding="utf-8")
    said = re.search(r"24 GB: (\S+) LoRA, (\S+) QLoRA", skill)
    row = re.search(r"^\| RTX 4090 \|.*\| \S+ (\S+) \| \S+ (\S+) \|$", PAGE, re.MULTILINE)
    assert said is not None and row is not None and said.groups() == row.groups()
