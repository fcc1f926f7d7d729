"""Writes requirements.lock from the environment that it runs in, and the set into tested.json: `make lock`.

One `name==version` a line for everything that our dependencies and extras pull in, without index addresses, local
versions (`+cpu`) or packages that exist for one platform only (CUDA libraries). pip and uv read it as constraints.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from versions import NAMES, record

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
HEADER = """\
# The versions that were tested together; constraints for pip and uv (`-c requirements.lock`).
# Written by scripts/make_lock.py (`make lock`).
"""
ONE_PLATFORM = re.compile(r"nvidia-|cuda-|triton|pytorch-triton|colorama$|pywin32")


def locked() -> dict[str, str]:
    """Version by normalized name of everything installed that skill-train and its extras need."""
    todo = [Requirement("skill-train[train,gguf,serve,vision,report,dev]")]
    seen: set[str] = set()
    versions: dict[str, str] = {}
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        distribution = metadata.distribution(requirement.name)
        versions[_normalized(requirement.name)] = distribution.version.split("+")[0]
        todo += _needed(distribution, requirement.extras)
    return {name: versions[name] for name in sorted(versions) if name != "skill-train" and not ONE_PLATFORM.match(name)}


def _needed(distribution: metadata.Distribution, extras: set[str]) -> list[Requirement]:
    parsed = [Requirement(line) for line in distribution.requires or ()]
    return [r for r in parsed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras or {""})]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    VERSIONS = locked()
    LOCK.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in VERSIONS.items()), encoding="utf-8")
    record("make test", {name: VERSIONS[name] for name in NAMES})
