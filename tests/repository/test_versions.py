"""Sets of versions that were tested together: recorded, told from others by `doctor`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from skill_train.commands import _doctor_checks as checks
from skill_train.commands._doctor_packages import Package, VersionSet, known_sets

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WANTED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
]
NEW = VersionSet("make test", "2026-11-21", {"trl": "1.17.0", "torch": "2.13.0"})
OLD = VersionSet("make versions", "2026-11-20", {"trl": "1.16.0", "torch": "2.8.0"})


def _installed(**versions: str | None) -> list[Package]:
    return [Package(name, "", "train", version) for name, version in versions.items()]


def test_the_locked_versions_are_a_tested_set() -> None:
    (locked,) = [one for one in known_sets() if one.by == "make test"]
    assert locked.packages == {name: PINS[name] for name in locked.packages} and len(locked.packages) == 9


def test_each_tested_version_is_in_the_range_of_the_package() -> None:
    for one in known_sets():
        for name, version in one.packages.items():
            ranges = [wanted.specifier for wanted in WANTED if wanted.name.replace("_", "-") == name]
            assert ranges and all(Version(version) in each for each in ranges), (name, version)


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (_installed(trl="1.17.0", torch="2.13.0+cpu", numpy="1.0"), "ok", "make test"),
        (_installed(trl="1.16.0", torch="2.8.0"), "ok", "make versions"),
        (_installed(trl=None, torch=None), "ok", "make test"),  # the light base
        (_installed(trl="1.17.1", torch="2.13.0"), "warn", "trl==1.17.0"),
        (_installed(trl="1.16.0", torch="2.13.0"), "warn", "trl==1.17.0"),  # each was tested, not together
    ],
)
def test_a_tested_set_is_told_from_another(found: list[Package], verdict: str, words: str) -> None:
    check = checks.together(found, [NEW, OLD])
    assert check.verdict == verdict and words in f"{check.found} {check.fix}"
