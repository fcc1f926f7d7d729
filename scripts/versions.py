"""Tests on the lowest versions that pyproject.toml allows, in an environment of their own: `make versions`.

    python scripts/versions.py [--venv DIR] [--override torch==2.13.0] [--record]

uv installs the lowest version of each direct dependency (`--resolution lowest-direct`), with the index settings of your
own environment. The newest versions are those of requirements.lock, on which `make test` runs all. What runs here
is what stands on trl, transformers, peft, huggingface_hub and llama.cpp; it takes about 15 minutes on 2 cores, more
where llama-cpp-python must be compiled. With --record a set that passes is written where `doctor` reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ROOT / "skill" / "skill_train" / "commands" / "tested.json"
CORE = (
    *(f"tests/{name}" for name in (
        "core", "data", "estimate", "evaluate", "llama", "machine", "plan", "recipe", "run",
    )),
    *(f"tests/{name}.py" for name in (
        "cloud/test_poll", "cloud/test_pull", "cloud/test_submit", "commands/test_cli", "commands/test_startup",
        "gguf/test_export", "hub/test_datasets", "hub/test_hub", "merge/test_merge", "model/test_config",
        "model/test_folder", "program/test_job", "program/test_loss", "program/test_masks", "program/test_plan_checks",
        "program/test_train", "publish/test_push", "verify/test_reference", "verify/test_verdicts",
        "verify/test_verify",
    )),
)  # fmt: skip
# What a run stands on: a set of them is tested, or it is not.
NAMES = (
    "accelerate", "datasets", "gguf", "huggingface-hub", "llama-cpp-python", "peft", "torch", "transformers", "trl",
)  # fmt: skip
_VERSIONS = (
    "import json, sys; from importlib.metadata import version; print(json.dumps([version(n) for n in sys.argv[1:]]))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="made there and kept; one that is there is used as it is")
    parser.add_argument("--override", action="append", default=[], help="a requirement in place of the lowest one")
    parser.add_argument("--record", action="store_true", help="write the versions into tested.json when all passes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skill-train-versions-") as folder:
        venv = (arguments.venv or Path(folder) / "venv").absolute()
        if not venv.exists():
            install(venv, Path(folder), arguments.override)
        python = venv / "bin" / "python"
        versions = installed(python)
        print("testing", ", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
        code = subprocess.run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE], cwd=ROOT).returncode
    if code == 0 and arguments.record:
        record(" ".join(["make versions", *arguments.override]), versions)
    return code


def install(venv: Path, folder: Path, overrides: list[str]) -> None:
    uv = str(Path(sysconfig.get_path("scripts")) / "uv")
    (folder / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
    subprocess.run([uv, "venv", "--python", sys.executable, str(venv)], check=True)
    command = [uv, "pip", "install", "--python", str(venv / "bin" / "python"), "--resolution", "lowest-direct"]
    command += ["--override", str(folder / "overrides.txt"), "-e", ".[train,gguf,serve,vision,report,dev]"]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "2"})


def installed(python: Path) -> dict[str, str]:
    done = subprocess.run([str(python), "-c", _VERSIONS, *NAMES], capture_output=True, text=True, check=True)
    return {name: release(version) for name, version in zip(NAMES, json.loads(done.stdout), strict=True)}


def release(version: str) -> str:
    """Without the local part: `2.13.0+cpu` is 2.13.0."""
    return re.split(r"[+]", version)[0]


def record(by: str, versions: dict[str, str]) -> None:
    """In place of the set that the same command recorded before."""
    sets = json.loads(TESTED.read_text(encoding="utf-8")) if TESTED.is_file() else []
    entry = {"by": by, "date": time.strftime("%Y-%m-%d", time.gmtime()), "packages": versions}
    others = [entry if one["by"] == by else one for one in sets]
    lines = map(json.dumps, others if entry in others else [*others, entry])
    TESTED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
