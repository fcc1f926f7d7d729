"""The whole chain on the embedded model: train, merge, export, verify, and one table with a proof in each row."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from skill_train.commands import chain, chain_evaluate, chain_gguf, tables
from skill_train.core import resources
from skill_train.core.console import Console, Result
from skill_train.core.digests import digests
from skill_train.core.errors import VerificationFailed
from skill_train.evaluate.backends import Model
from skill_train.evaluate.figures import figures
from skill_train.evaluate.scores import Scoring
from skill_train.evaluate.step import ROOM, measure, questions, spread
from skill_train.reference.load import load_tokenizer, read_rows
from skill_train.run.folder import RunDir, write_record
from skill_train.run.records import read_json

QUANTS = "f16,q8_0,q4_k_m"
LEARNED = 0.9  # share of held-out rows that every stage after training must answer to the letter
NOT_KNOWN = 0.1  # and the base must not


def demo(console: Console, *, run_dir: Path) -> Result:
    """Runs the chain in `run_dir`; what an earlier call finished is reused."""
    from skill_train.llama import get_converter as toolchain

    run = RunDir(run_dir)
    with console.progress("finding the converter") as progress:
        tools = toolchain.find_or_fetch(progress=progress)
    trained = chain.train_run(console, run, chain.plan_of(console, resources.demo() / "recipe.yaml"), resume=True)
    merged = chain.merge_run(console, run)
    exported = chain_gguf.export_run(console, run, QUANTS, tools).data["files"]
    chain_gguf.verify_run(console, run, 2048)
    proof = read_json(run.record("verify"))
    table = _recorded(run) or _table(console, run, trained, merged, exported, proof)
    write_record(run.record("demo"), inputs=_inputs(run), options={}, outputs={}, figures={"stages": table})
    data = {"run_dir": str(run_dir), "stages": table, "verdict": proof["verdict"]}
    following = [
        f"skill-train evaluate {shlex.quote(str(run_dir))}",
        "skill-train local --model MODEL --data DATA --max-steps 50",
    ]
    return Result(
        data,
        human=lambda rich: tables.draw_stages(rich, table),
        quiet=str(run_dir),
        next=following,
        error=_missed(table, run),
    )


def _inputs(run: RunDir) -> dict[str, Any]:
    return digests(run.path, [run.record(step) for step in ("train", "merge", "verify")])


def _recorded(run: RunDir) -> list[dict[str, Any]] | None:
    """The table of an earlier call, when nothing that it stands on has changed since."""
    record = read_json(run.record("demo")) if run.record("demo").is_file() else {}
    stages: list[dict[str, Any]] | None = record.get("figures", {}).get("stages")
    return stages if record.get("inputs") == _inputs(run) else None


def _table(
    console: Console,
    run: RunDir,
    trained: dict[str, Any],
    merged: dict[str, Any],
    exported: list[dict[str, Any]],
    proof: dict[str, Any],
) -> list[dict[str, Any]]:
    """One row a stage: size in bytes, held-out exact match, mean KL to what was trained in nats, tokens/s, verdict."""
    base = chain.base_of(run)
    found = {one["name"]: one for one in chain_evaluate.evaluate_run(console, run)["models"]}
    gate = merged["gate"]
    stages = [
        _row("base", _bytes(base), found["base"], None, None),
        _row("adapter", _bytes(run.adapter), _adapter(console, run, base), None, trained["verdict"]),
        _row("merged", _bytes(run.merged), found["tuned"], gate["figures"]["mean_kl"], gate["verdict"]),
    ]
    for file in exported:
        name = Path(file["path"]).name
        stages.append(_row(file["quant"], file["bytes"], found[name], *_proven(proof, name)))
    return stages


def _adapter(console: Console, run: RunDir, base: Path) -> dict[str, Any]:
    """Figures of the base with the adapter on top, which `evaluate` leaves out once the two are merged."""
    rows = spread(read_rows(run.held_out), chain_evaluate.ROWS)
    asked = questions(rows, loss_on="assistant", room=ROOM, context=None)
    how: dict[str, Any] = {"tokenizer": load_tokenizer(base), "scoring": Scoring(), "backend": "transformers"}
    with console.progress("asking the adapter") as progress:
        return figures(measure(Model("adapter", base, run.adapter), asked, **how, progress=progress), asked)


def _row(stage: str, size: int, found: dict[str, Any], kl: float | None, verdict: str | None) -> dict[str, Any]:
    return {
        "stage": stage,
        "bytes": size,
        "exact_match": round(found["exact_match"], 4),
        "rows": found["asked_rows"],
        "mean_kl": kl,
        "tokens_per_second": found["tokens_per_second"],
        "verdict": verdict,
    }


def _proven(proof: dict[str, Any], name: str) -> tuple[float | None, str]:
    """Mean KL to what was trained, and the worst verdict, of one file."""
    checks = [check for check in proof["checks"] if check["file"] == name]
    kl = next((check["figures"]["trained_kl"] for check in checks if "trained_kl" in check.get("figures", {})), None)
    return kl, next((v for v in ("fail", "warn") if v in {c["verdict"] for c in checks}), "pass")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _missed(table: list[dict[str, Any]], run: RunDir) -> VerificationFailed | None:
    """The demo's own promise: not known before, learned after, and kept in every file."""
    base, after = table[0], table[1:]
    bad = [base] if base["exact_match"] > NOT_KNOWN else []
    bad += [row for row in after if row["exact_match"] < LEARNED or row["verdict"] == "fail"]
    if not bad:
        return None
    return VerificationFailed(
        f"the stage {bad[0]['stage']} does not hold what the demo promises",
        code="demo_failed",
        expected=f"exact match at most {NOT_KNOWN:.0%} before, at least {LEARNED:.0%} after, and no failed check",
        got=f"exact match {bad[0]['exact_match']:.0%}, verdict {bad[0]['verdict']}",
        hint=f"skill-train verify {shlex.quote(str(run.path))}",
    )
