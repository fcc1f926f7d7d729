"""`skill-train verify` of a run's f16, q8_0 and q4_k_m files beside the export that made them.

    python bench/verify/measure.py                   10M, 100M and 0.5B
    python bench/verify/measure.py --only 1.5B,3B    the large ones: fp32 references of 6 and 12 GB

Each row says how many tokens were compared and the 95 % interval of what they say about the f16 file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import random_models as models
import side

REASONS = {
    "100M": "2048 tokens up to 250M weights",
    "1.5B": "the same 256 tokens, while the export grows with the weights",
    "0.5B": "256 tokens above 250M weights; each costs as many operations as the model has weights, twice; "
    "four runs of 2026-11-23, of 3 or 5 rounds: 0.94, 1.00, 1.16 and 1.01 times the export, so about as long",
}


def main() -> None:
    side.main("verify", __doc__, measure, targets, "the proof of three files beside the export that made them")


def targets(rows: side.Rows) -> side.Rows:
    half = next((row for row in rows if (row["size"], row["what"]) == ("0.5B", "verify")), {})
    sample = f"{half['tokens']} tokens, f16 perplexity x{half['perplexity']}" if half else ""
    return [side.target("verify 0.5B: time", "no longer than the export", half.get("time_ratio"), 1.0, "x", sample)]


def measure(size: str, work: Path, rounds: int) -> list[dict[str, Any]]:
    print(f"verify {size}", file=sys.stderr, flush=True)
    export = side.module("export")
    base, run = side.made(size, work)

    def exporting() -> dict[str, float]:
        export.clean(run)
        return side.timed(export.export(run), log=work / "log")

    def verifying() -> dict[str, float]:
        (run / "verify.json").unlink(missing_ok=True)
        return side.timed(side.skill_train("verify", run), log=work / "log")

    found = side.interleaved({"export": exporting, "verify": verifying}, rounds)
    about = {"size": size, "parameters": models.parameters(base)}
    ratio = {"time_ratio": side.ratio(found["verify"], found["export"]), "reason": REASONS.get(size, "")}
    return [
        {**about, "what": "export", **found["export"]},
        {**about, "what": "verify", **found["verify"], **_proof(run / "verify.json"), **ratio},
    ]


def _proof(file: Path) -> dict[str, Any]:
    """Verdict, sample, and what the logits of the f16 file say, with its interval."""
    proof = json.loads(file.read_text())
    logits = {c["file"].split("-")[-1]: c["figures"] for c in proof["checks"] if c["name"] == "logits"}
    f16 = logits["f16.gguf"]
    figures = {
        f"mean_kl_{name.removesuffix('.gguf')}": float(f"{found['mean_kl']:.2g}") for name, found in logits.items()
    }
    perplexity = f"{f16['perplexity_ratio']:.4f} ± {f16['perplexity_ratio_half_width']:.4f}"
    return {"verdict": proof["verdict"], "tokens": f16["tokens"], **figures, "perplexity": perplexity}


if __name__ == "__main__":
    main()
