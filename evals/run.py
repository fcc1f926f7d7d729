"""Prepares the sandboxes and grades what was left in them: `python evals/run.py prepare|grade [--out DIR] [--task ID]`.

    prepare    makes the sandboxes that are not there yet; --without-skill leaves the skill out, for the comparison
    grade      writes grading.json into each sandbox and prints one JSON document: tasks, passed and failed assertions

Running an agent in them is yours: evals/README.md says how. Exit code 0; 2 for an unknown task.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from box import Box, make
from graders import GRADE
from sandboxes import PREPARE

EVALS = json.loads((Path(__file__).parent / "evals.json").read_text(encoding="utf-8"))["evals"]


def main() -> int:
    arguments = _arguments()
    chosen = [task for task in EVALS if arguments.task in (None, task["id"])]
    if not chosen:
        print(f"no task {arguments.task!r}; there are: {', '.join(PREPARE)}", file=sys.stderr)
        return 2
    for task in chosen:
        root = arguments.out.absolute() / task["id"]
        if arguments.do == "prepare" and not root.exists():
            print(f"preparing {root}", file=sys.stderr)
            prepare(task, root, with_skill=not arguments.without_skill)
    if arguments.do == "grade":
        roots = {task["id"]: arguments.out.absolute() / task["id"] for task in chosen}
        print(json.dumps(_summary([grade(task, Box(roots[task["id"]])) for task in chosen]), indent=1))
    return 0


def prepare(task: dict[str, Any], root: Path, *, with_skill: bool) -> None:
    """A whole sandbox or none: what fails half-way is removed."""
    try:
        box = make(root, task["prompt"], with_skill=with_skill)
        facts = PREPARE[task["id"]](box)
        (root / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def grade(task: dict[str, Any], box: Box) -> dict[str, Any]:
    """One task: each assertion with its verdict and what was seen."""
    if not (box.root / "facts.json").is_file():
        return {"id": task["id"], "state": "not prepared"}
    verdicts = zip(task["assertions"], GRADE[task["id"]](box), strict=True)
    results = [{"text": text, "passed": passed, "evidence": seen} for text, (passed, seen) in verdicts]
    passed = sum(result["passed"] for result in results)
    calls = box.calls()
    summary = {"passed": passed, "failed": len(results) - passed, "total": len(results)}
    summary["pass_rate"] = round(passed / len(results), 3)
    grading = {"assertion_results": results, "summary": summary, "commands": len(calls)}
    (box.root / "grading.json").write_text(json.dumps(grading, indent=1) + "\n", encoding="utf-8")
    state = "passed" if passed == len(results) else "failed" if calls else "untouched"
    failed = [f"{r['text']} ({r['evidence']})" for r in results if not r["passed"]]
    return {"id": task["id"], "state": state, **summary, "commands": len(calls), "missed": failed}


def _summary(graded: list[dict[str, Any]]) -> dict[str, Any]:
    states = [task["state"] for task in graded]
    return {"tasks": graded, **{state: states.count(state) for state in dict.fromkeys(states)}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("prepare", "grade"))
    parser.add_argument("--out", type=Path, default=Path("runs/evals"), help="folder of the sandboxes  [%(default)s]")
    parser.add_argument("--task", help="one task alone, by its id in evals.json")
    parser.add_argument("--without-skill", action="store_true", help="no skill in the sandbox")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
