"""Asks about known vulnerabilities of every version in requirements.lock: `python scripts/audit.py` (`make audit`).

pip-audit does the asking (PyPI's JSON API), in an environment of its own that uv makes. It calls a package that the
index does not describe skipped and ends with 0; here nothing that was skipped counts as audited.

Exit codes: 0 none is known; 6 at least one is; 8 the service could not be reached, or does not know every package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
PIP_AUDIT = "pip-audit==2.9.0"


def main() -> int:
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [
        str(uv),
        "tool",
        "run",
        "--from",
        PIP_AUDIT,
        "pip-audit",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    command += ["--requirement", str(LOCK), "--no-deps", "--disable-pip", "--timeout", "15"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"nothing was audited: {last}", file=sys.stderr)
        return 8
    code, lines = verdict(document)
    print("\n".join(lines))
    return code


def verdict(document: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit code and lines, of what pip-audit 2.9 answers with `--format json`."""
    packages = document["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    lines = [_summary(package, flaw) for package in packages for flaw in package.get("vulns", ())]
    count = len(lines)
    audited = len(packages) - len(skipped)
    lines.append(f"{audited} of {len(packages)} versions audited, {count} known vulnerabilities")
    if not audited:
        lines.append("the service could not be reached, or this index does not offer it: nothing is known")
    elif skipped:
        lines.append(f"not known to the service: {', '.join(skipped)}")
    return (6 if count else 8 if skipped or not audited else 0), lines


def _summary(package: dict[str, Any], flaw: dict[str, Any]) -> str:
    mended = ", ".join(flaw["fix_versions"]) or "none yet"
    return f"{package['name']} {package['version']}: {flaw['id']}, mended in {mended}"


if __name__ == "__main__":
    sys.exit(main())
