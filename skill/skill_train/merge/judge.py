"""Turns the outcome of the gate into a refusal, with its figures in a file, or into warnings."""

from pathlib import Path

import msgspec

from skill_train.core.console import Warn
from skill_train.core.errors import VerificationFailed, quoted
from skill_train.core.files import write_json
from skill_train.merge import check_logits
from skill_train.run.merge_record import Changes, Gate, MergeRecord

_COSTLY = 0.5  # warn if rounding costs more than this share of the tuning's own effect in nats
_OF_FINISHED = ("schema", "step", "outputs", "finished_at")  # keys that do not apply to a failed merge
_LEAST_KEPT_SHARE = 0.9  # warn if rounding keeps less than this share of the change of the weights


def judge(merged: MergeRecord, record: Path, out: Path, warn: Warn) -> None:
    """Warns of costly rounding and of an adapter without effect. Raises VerificationFailed if the gate failed, and
    writes the figures to `<record>.failed.json`."""
    outcome = merged.gate
    failed = (out.parent if record.parent == out else record.parent) / f"{record.stem}.failed.json"
    failed.unlink(missing_ok=True)
    if outcome["failures"]:
        document = msgspec.to_builtins(merged)
        write_json(failed, {key: document[key] for key in document if key not in _OF_FINISHED})
        raise VerificationFailed(
            f"the merged model is not base + adapter: {'; '.join(outcome['failures'][:5])}",
            code="merge_gate",
            **_expected_and_got(outcome, failed),
            hint=f"read {quoted(failed)}"
            if outcome["stored_dtype"] == "F32"
            else "the same command with --dtype float32, which rounds nothing",
        )
    kept_share = merged.changes.get("kept_after_rounding")
    if kept_share is not None and kept_share < _LEAST_KEPT_SHARE:
        warn(
            "rounding_loss",
            f"{outcome['stored_dtype']} keeps {kept_share:.0%} of the adapter's change; --dtype float32 keeps it all",
        )
    if cost := _rounding_cost(outcome, merged.changes):
        warn("rounding_cost", f"{cost}; --dtype float32 rounds nothing")
    if not check_logits.has_effect(outcome["effect"]):
        warn("no_effect", "the adapter does not change the base's answers: was it trained, and is it the right one?")


def _rounding_cost(outcome: Gate, changes: Changes) -> str:
    """A sentence that compares the effect of rounding with the tuning's effect; empty if it is less than half."""
    figures, stored, error = outcome["figures"], outcome["stored_dtype"], changes.get("rounding_error_of_change")
    if outcome["by"] == "answers" and outcome["rounded"] is not None:
        cost, moved = figures["mean_kl"] or 0.0, outcome["effect"]["kl_between"] or 0.0
        if cost > _COSTLY * moved and check_logits.has_effect(outcome["effect"]):
            return (
                f"rounding to {stored} moves the answers by {cost:.2g} nats, and the tuning itself by {moved:.2g} "
                f"(mean KL divergence, {figures['tokens']} tokens)"
            )
    elif outcome["by"] == "weights" and error is not None and error**2 > _COSTLY:  # nats grow with the square
        return f"rounding to {stored} moves the weights {error:.1f} times as far as the tuning does"
    return ""


def _expected_and_got(outcome: Gate, failed: Path) -> dict[str, str]:
    figures, limits = outcome["figures"], outcome["limits"]
    if outcome["by"] == "weights":
        expected = f"rows within {limits['worst_row']:.2g} of their length ({outcome['stored_dtype']})"
        return {"expected": expected, "got": f"{figures['worst_row']}; all figures in {failed}"}
    moved = f"the adapter itself moves the base by {outcome['effect']['kl_between']} nats"
    of = ""
    if outcome["rounded"] is not None:
        figures, of = outcome["rounded"], f" from base + adapter, rounded to {outcome['stored_dtype']}"
    return {
        "expected": f"mean KL divergence of at most {limits['mean_kl']:.3g} nats{of}",
        "got": f"{figures['mean_kl']} nats; {moved}; all figures in {failed}",
    }
