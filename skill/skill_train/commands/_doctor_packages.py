"""Compares installed packages with the ranges in skill-train's metadata, and with tested combinations."""

import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from skill_train.run.folder import installed

_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Package:
    """One requirement. `group` is `base`, `train` or `gguf`; `installed` is the installed version, or None."""

    name: str
    specifier: str
    group: str
    installed: str | None

    @property
    def right(self) -> bool:
        return self.installed is not None and within(self.installed, self.specifier)


def packages() -> list[Package]:
    """The packages that skill-train needs; empty if skill-train itself is not installed (a bare source tree)."""
    try:
        lines = metadata.requires("skill-train") or []
    except metadata.PackageNotFoundError:
        return []
    return [package for package in map(_package, lines) if package.group in ("base", "train", "gguf")]


@dataclass(frozen=True)
class Torchvision:
    """The installed torchvision. `specifier` is the torch that it was built for, such as `==2.13.0`; None if unknown.
    `torch` is the installed torch."""

    version: str
    specifier: str | None
    torch: str | None


def torchvision() -> Torchvision | None:
    """None if torchvision is not installed."""
    version = installed("torchvision")
    if version is None:
        return None
    requirements = (re.match(r"torch\s*\(?([<>=!][^;)]*)", line) for line in metadata.requires("torchvision") or [])
    return Torchvision(version, next((match[1].strip() for match in requirements if match), None), installed("torch"))


@dataclass(frozen=True, eq=False)
class VersionSet:
    """Versions with which all tests of `by` (`make test` or `make versions`) passed. `packages` has them by name."""

    by: str
    date: str
    packages: dict[str, str]

    def differs(self, requirements: list[Package]) -> list[Package]:
        """The installed packages that have another version than in this set. Missing packages are ignored."""
        own = [package for package in requirements if package.name in self.packages and package.installed is not None]
        return [package for package in own if not within(package.installed or "", f"=={self.packages[package.name]}")]


def known_sets() -> list[VersionSet]:
    """The combinations that scripts/make_lock.py and scripts/versions.py recorded."""
    path = Path(__file__).with_name("tested.json")
    return [VersionSet(**recorded) for recorded in json.loads(path.read_text(encoding="utf-8"))]


def python_wanted() -> str | None:
    """The range of Python versions, such as `<3.14,>=3.11`."""
    try:
        return metadata.metadata("skill-train")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return None


def within(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as `<2.14,>=2.8`. Only release numbers count: `2.13.0+cpu` is 2.13.0."""
    has = _release(version)
    for clause in filter(None, map(str.strip, specifier.split(","))):
        sign, limit = re.fullmatch(r"([<>=!]+)\s*(\S+)", clause).groups()  # type: ignore[union-attr]
        if not _OPERATORS[sign](has, _release(limit)):
            return False
    return True


def _package(line: str) -> Package:
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
    return Package(name, requirement[len(name) :].strip(), extra[1] if extra else "base", installed(name))


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, without zeros at the end, because 2.0 is 2."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", match[0]).split(".")) if match else ()
