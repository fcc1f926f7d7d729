"""`make audit`: what was not audited is never called clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from by_path import load

AUDIT = Path(__file__).resolve().parents[2] / "scripts" / "audit.py"
# The form of pip-audit 2.9's own documentation (README, "--format json", 2025).
FLASK = {
    "name": "flask",
    "version": "0.5",
    "vulns": [{"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": [], "description": "…"}],
}
CLEAN = {"name": "click", "version": "8.1.0", "vulns": []}
SKIPPED = {"name": "trl", "skip_reason": "Dependency not found on PyPI and could not be audited: trl (1.16.0)"}


@pytest.fixture(scope="module")
def audit() -> Any:
    return load(AUDIT, "audit")


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([CLEAN, CLEAN], 0, "2 of 2 versions audited, 0 known"),
        ([CLEAN, FLASK], 6, "flask 0.5: PYSEC-2019-179, mended in 1.0"),
        ([FLASK, SKIPPED], 6, "not known to the service: trl"),
        ([CLEAN, SKIPPED], 8, "1 of 2 versions audited"),
        ([SKIPPED, SKIPPED], 8, "could not be reached"),
        ([], 8, "0 of 0"),
    ],
)
def test_verdicts(audit: Any, packages: list[dict[str, Any]], code: int, words: str) -> None:
    ended, lines = audit.verdict({"dependencies": packages, "fixes": []})
    assert ended == code and words in "\n".join(lines)
