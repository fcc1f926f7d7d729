"""Judges the logits of llama.cpp: how near they are to the reference, and whether they are those of the tuned model."""

import msgspec

from skill_train.llama.logit_distance import Distance, TuningShare
from skill_train.run.records import Verdict
from skill_train.run.verify_record import Check, Finding, NotChecked, worst
from skill_train.verify.check import judged
from skill_train.verify.thresholds import FAR_TOKENS, Limits

_COSTLY = 0.5  # share of the tuning's own effect: rounding that costs more is worth a warning
_SAMPLING_NOISE = 1e-6  # nats: below this the base and the tuned model are one model, up to rounding


def check_logits(
    file: str,
    figures: Distance | None,
    limits: Limits,
    trained_kl: float | None = None,
    stored: str = "",
    cost: float | None = None,
) -> Finding:
    """Judges the mean KL divergence, and the perplexity ratio beyond its interval.

    Args:
        figures: against the reference. Where the merge was stored in 16 bits, the reference is rounded too.
        trained_kl: mean KL divergence from what was trained, nats.
        stored: the type that the merge was rounded to; empty when it was not rounded.
        cost: how far that rounding moved the answers: mean KL divergence in nats.
    """
    if figures is None:
        return NotChecked("logits", file, "no text was long enough to compare")
    measured = {**figures, "trained_kl": trained_kl}
    kl, ratio, width = figures["mean_kl"], figures["perplexity_ratio"], figures["perplexity_ratio_half_width"]
    trimmed, median = figures["trimmed_kl"], figures["median_kl"]
    if kl is None or ratio is None or width is None or trimmed is None or median is None:
        return Check("logits", file, "fail", None, limits.kl[0], "the logits are not finite", measured)
    # How much worse the file is than the sample's own uncertainty allows. A file that happens to be better is no fault.
    beyond = max(0.0, ratio - 1 - width)
    # `trimmed` leaves out the farthest tokens, which may be near-ties that turned. The mean over all tokens may
    # therefore be larger, by as much as rounding alone moves a few of them.
    with_far = [
        bound + most * limits.far / figures["tokens"] for bound, most in zip(limits.kl, FAR_TOKENS, strict=True)
    ]
    nearer = [judged(trimmed, limits.kl)]
    if limits.typical is not None:
        nearer.append(judged(median, limits.typical))
    verdict = worst([*nearer, judged(kl, (with_far[0], with_far[1])), judged(beyond, limits.ratio)])
    detail = (
        f"mean KL {kl:.2g} nats, 99th percentile {figures['p99_kl']:.2g}, same first token {figures['same_top1']:.1%}, "
        f"perplexity x{ratio:.4f} ± {width:.4f} on {figures['tokens']} tokens"
    )
    if cost is not None:
        detail += f"; the merge itself is {cost:.2g} nats from what was trained, because it is stored in {stored}"
    if limits.noise is not None:
        detail += f"; rounding in products alone, which turns routers, moves this model by {limits.noise:.2g} nats"
    bounds = {
        "fail_above": with_far[1],
        "typical": limits.typical and list(limits.typical),
        "trimmed": list(limits.kl),
        "ratio": list(limits.ratio),
        "source": limits.source,
    }
    return Check("logits", file, verdict, kl, with_far[0], detail, measured | {"limits": bounds, "rounding": cost})


def with_unread_epsilon(check: Finding, epsilon: float | None) -> Finding:
    """The check of logits. If it does not pass, its detail names the epsilon of norms that llama.cpp does not read."""
    if epsilon is None or isinstance(check, NotChecked) or check.verdict == "pass":
        return check
    why = (
        f"llama.cpp does not read the epsilon of its norms, {epsilon:g}, and computes with 0, which moves small hidden "
        "states most, in files of every type"
    )
    return msgspec.structs.replace(check, detail=f"{check.detail}; {why}")


def check_tuned(
    file: str,
    change: TuningShare | None,
    limits: Limits,
    why_not: str,
    stored: str = "",
    cost: float | None = None,
) -> Finding:
    """The share of the tuning that is in the file: 1 when the adapter was applied once, as it was trained.

    Args:
        why_not: the reason when `change` is None.
        stored, cost: as for `check_logits`.
    """
    if change is None:
        return NotChecked("tuned", file, why_not)
    share, width, between, figures = change["share"], change["share_half_width"], change["kl_between"], {**change}
    tuned, base = change["kl_tuned"], change["kl_base"]
    if between is not None and between < _SAMPLING_NOISE:
        detail = f"the tuning changes nothing measurable: tuned and base differ by {between:.1g} nats"
        return Check("tuned", file, "warn", share, 1.0, detail, figures)
    if share is None or width is None or between is None or tuned is None or base is None:
        return Check("tuned", file, "fail", None, 1.0, "the logits are not finite", figures)
    # A share that is surely outside the bounds fails. One that is inside passes. A sample too small to tell warns.
    off = abs(share - 1)
    large = between >= limits.tuning
    sure: Verdict = "fail" if large and off - width > limits.share[1] else "warn"
    verdict: Verdict = "pass" if off <= limits.share[0] else sure
    low, high = _means(share - width), _means(share + width)
    cause = low if large and low == high else "too uncertain to name a cause"
    nearer = "tuned model" if tuned < base else "base"
    detail = (
        f"{share:.3f} ± {width:.3f} of the tuning is in the file ({cause}); it is nearer to the {nearer}: "
        f"KL {tuned:.2g} from the tuned model, {base:.2g} from the base"
    )
    if cost is not None and cost > _COSTLY * between:
        verdict = worst([verdict, "warn"])
        detail += (
            f"; storing the merge in {stored} moved the answers by {cost:.2g} nats, and the tuning by "
            f"{between:.2g}: skill-train merge RUN --dtype float32 rounds nothing"
        )
    if not large:
        detail += f"; the tuning itself is only {between:.2g} nats, less than this type reliably preserves"
    return Check("tuned", file, verdict, share, f"1 ± {limits.share[0]}", detail, figures)


def _means(share: float) -> str:
    if share < 0.25:
        return "the tuning is missing"
    if share < 0.85:
        return "the tuning is too weak"
    if share <= 1.15:
        return "the tuning is there once"
    return "the tuning is too strong, or there twice"
