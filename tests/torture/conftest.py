"""What each campaign counted (`record_property("counts", …)`) is printed at the end."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    counts = [value for report in reports for name, value in report.user_properties if name == "counts"]
    if counts:
        terminalreporter.section("torture")
        for line in counts:
            terminalreporter.write_line(line)
