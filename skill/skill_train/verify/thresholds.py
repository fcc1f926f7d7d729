"""How much a correct file may differ, and where each number comes from.

Published figures of quantized files against f16, both on Wikitext-2:
[kld]  mean KL divergence in nats, Llama 3 8B: llama.cpp, tools/perplexity/README.md, "LLaMA 3 8b Scoreboard".
[ppl]  perplexity over that of f16: model cards of Qwen2-*-Instruct-GGUF. 0.5B: 15.11 -> q8_0 15.13, q6_k 15.14,
       q5_k_m 15.24, q4_k_m 15.36, q2_k 16.74. 1.5B: 10.43 -> q4_k_m 10.61, q2_k 13.04. 7B: 7.93 -> 8.02, q2_k 10.58.
       The scoreboard of [kld] has ratios too; the worst of all counts.
A figure up to the first factor times the published one passes, above the second it fails, between the two it warns.
The factors are wide because small models lose more: correct q4_k_m files of two layers measured 0.03 to 0.2 nats (1 to
6 times), q8_0 0.0005 to 0.002; with the rows of one attention matrix shifted by one, 0.7 to 1.5.
"""

from dataclasses import dataclass, replace

from skill_train.llama.logit_distance import SAME_LOSS, Distance

_FACTORS = (10.0, 15.0)

# Type: (mean KL divergence in nats [kld], perplexity ratio - 1 [ppl]).
_PUBLISHED: dict[str, tuple[float, float]] = {
    "q8_0": (0.001355, 0.0013),
    "q6_k": (0.005452, 0.0035),
    "q5_k_m": (0.010762, 0.0091),
    "q5_k_s": (0.016595, 0.0168),
    "q5_1": (0.018045, 0.0170),
    "q5_0": (0.022239, 0.0211),
    "q4_k_m": (0.031273, 0.0282),
    "iq4_nl": (0.035742, 0.0359),
    "iq4_xs": (0.036334, 0.0366),
    "q4_k_s": (0.043136, 0.0431),
    "q4_1": (0.071683, 0.0724),
    "q4_0": (0.071940, 0.0752),
    "q3_k_l": (0.087176, 0.0892),
    "q3_k_m": (0.101913, 0.1054),
    "iq3_m": (0.102534, 0.1070),
    "iq3_s": (0.111278, 0.1178),
    "iq3_xs": (0.138693, 0.1494),
    "iq3_xxs": (0.183625, 0.1968),
    "q3_k_s": (0.228217, 0.2619),
    "iq2_m": (0.325989, 0.3801),
    "q2_k_s": (0.403360, 0.4960),
    "iq2_s": (0.439197, 0.5487),
    "q2_k": (0.445132, 0.5647),
    "iq2_xs": (0.546290, 0.7268),
    "iq2_xxs": (0.812022, 1.2610),
    "iq1_m": (1.393084, 3.0910),
    "iq1_s": (2.211278, 9.3227),
}
_UNKNOWN = "q2_k"  # the weakest common type; its bounds hold for types without published figures, and the proof says so

# Bits a weight of these files, for a mix of types: llama.cpp, tools/quantize/README.md, Llama 3.1 8B (read 2026-11-26).
_BITS = {
    "q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.7, "q5_k_s": 5.57, "q4_k_m": 4.89, "q4_k_s": 4.67, "iq4_xs": 4.46,
    "q3_k_l": 4.3, "q3_k_m": 4.0, "iq3_m": 3.76, "iq3_xs": 3.5, "iq3_xxs": 3.25, "q2_k": 3.16, "iq2_m": 2.93,
    "iq2_xs": 2.59, "iq2_xxs": 2.38, "iq1_m": 2.15, "iq1_s": 2.0,
}  # fmt: skip
# Factors for a mix on held-out rows, over its divergence on training rows that the mix was not made from. Above the
# first it warns, above the second it fails. A matrix that was exchanged multiplies the divergence by a hundred.
_OF_MEASURED = (3.0, 10.0)

# Unquantized files. Correct f16 files measured 4e-8 to 2e-6 (the latter on two-layer models with large random weights),
# and llama.cpp gives bf16 against f16 of Llama 3 8B as 0.00000 (same README). Its bf16 compute rounds activations to
# 8 bits: 6e-5 measured.
_UNQUANTIZED: dict[str, tuple[float, float]] = {"f32": (2e-5, 2e-4), "f16": (2e-5, 2e-4), "bf16": (1e-3, 1e-2)}
_UNQUANTIZED_RATIO = (SAME_LOSS, 0.01)
_OF_ROUNDING = {"f32": 0.25, "f16": 0.25, "bf16": 2.0}  # twice the expected share of the cost of bf16: 1/8, and 1
# Factors for the distance that the same rounding moves the reference. Measured on tiny mixtures, file over reference:
# 0.7 to 1.5 (qwen3next, granitehybrid, qwen3moe, gpt-oss; f16 and bf16); an f32 file rounds nothing.
_OF_NOISE = {"f32": 0.0, "f16": 2.0, "bf16": 2.0}
# So many tokens may be as far off as the farthest one is after rounding to 16 bits. More than the first number warns,
# more than the second fails. Of a tiny Mixtral, f16 turned no router or one in 430 tokens, and that token was up to 2.5
# times as far off (six adapters).
FAR_TOKENS = (4, 10)

# A merge that is stored in bf16 rounds base + adapter once more, for every type of file. Measured on correct exports:
# 7.7e-5 (tiny models), 1.0e-4 (494M random weights).
_BF16_MERGE = (5e-4, 5e-3)

# Share of the tuning in the file, off 1. Measured: f16 1.0000 (half width 0.0002), q8_0 0.99 to 1.00, q4_k_m 0.95 to
# 1.03. Left out it is 0, applied twice about 2, with half of alpha about 0.5.
_SHARE, _SHARE_COARSE, _SHARE_FROM = (0.05, 0.2), (0.15, 0.35), 0.01


@dataclass(frozen=True)
class Limits:
    """Bounds for one type, each as a pair: above the first is a warning, above the second a failure."""

    kl: tuple[float, float]  # mean KL divergence from the reference, nats
    ratio: tuple[float, float]  # perplexity ratio - 1, beyond its 95 % interval
    # log-probability, in nats, by which the reference may prefer its own token where the answers part
    gap: tuple[float, float]
    share: tuple[float, float]  # |share of the tuning in the file - 1|
    # KL divergence between tuned model and base, nats, from which on `share` may fail. A smaller tuning is less than
    # what the type itself loses, and rounding swallows a part of it.
    tuning: float
    source: str  # where the bounds come from
    # nats by which rounding alone moves one token. A few tokens of a correct file may be so far off, because a mixture
    # of experts has near-ties between experts, and they turn.
    far: float = 0.0
    # median divergence, nats. It is used for mixtures, where routers that turn move the other tokens.
    typical: tuple[float, float] | None = None
    noise: float | None = None  # mean KL divergence, nats, by which rounding in products alone moves this model


def limits(kind: str, *, merged_in_bf16: bool = False) -> Limits:
    """The bounds for a file type such as `f16` or `q4_k_m`.

    Args:
        merged_in_bf16: the file is of a merged model that is stored in bf16, and the reference is base + adapter.
    """
    if kind in _UNQUANTIZED:
        kl, source = _UNQUANTIZED[kind], "measured on correct exports"
        if merged_in_bf16 and kl < _BF16_MERGE:
            kl, source = _BF16_MERGE, "measured on correct exports of merges in bf16"
        return Limits(kl=kl, ratio=_UNQUANTIZED_RATIO, gap=(0.02, 0.1), share=(0.02, 0.1), tuning=1e-3, source=source)
    is_published = kind in _PUBLISHED
    kld, excess = _PUBLISHED[kind if is_published else _UNKNOWN]
    source = "llama.cpp perplexity README and Qwen2 GGUF model cards"
    return Limits(
        kl=_times(kld),
        ratio=_times(excess),
        gap=_times(_spread(kld)),
        share=_SHARE if kld < _SHARE_FROM else _SHARE_COARSE,
        tuning=kld,
        source=source if is_published else f"no figures published for {kind}: those of {_UNKNOWN}",
    )


def mix_limits(bits: float, measured_kl: float | None) -> Limits:
    """The bounds for a mix of types with so many bits a weight.

    Args:
        measured_kl: of this file against the unquantized one, at the export. It counts where its bounds are narrower
            than the published ones for types of this size.
    """
    kind = next((kind for kind, its in _BITS.items() if its <= bits), "iq1_s")
    bounds = limits(kind)
    if measured_kl is None:
        return replace(bounds, source=f"a mix of {bits:.2f} bits a weight, held to {kind}: {bounds.source}")
    least = _UNQUANTIZED["f16"]
    own = [bound + times * measured_kl for bound, times in zip(least, _OF_MEASURED, strict=True)]
    kl = (min(own[0], bounds.kl[0]), min(own[1], bounds.kl[1]))
    return replace(bounds, kl=kl, source=f"{measured_kl:.2g} nats measured of this mix at its export, and {kind}")


def model_limits(bounds: Limits, cost: Distance | None, kind: str, noise: dict[str, Distance] | None = None) -> Limits:
    """The bounds for this model, widened by its own noise: by how far rounding to 16 bits moves it.

    llama.cpp rounds what goes into a product to the type of the file. f16 errs by an eighth of what bf16 does. Where a
    near-tie of a router turns, the answers move in proportion to that error, so by an eighth and not by a 64th.

    Args:
        cost: for weights in 16 bits; None if that was not measured.
        noise: `noise` of `ReferenceMeasurements`. A mixture has it, and it then counts instead of `cost`.
    """
    if noise:
        return _with_noise(bounds, noise, kind)
    if cost is None or cost["p99_kl"] is None or cost["trimmed_kl"] is None or cost["max_kl"] is None:
        return bounds
    gap, more = _spread(cost["p99_kl"]), _OF_ROUNDING.get(kind, 1.0) * cost["trimmed_kl"]
    return replace(bounds, gap=_plus(bounds.gap, gap), kl=_plus(bounds.kl, more), far=cost["max_kl"])


def _with_noise(bounds: Limits, noise: dict[str, Distance], kind: str) -> Limits:
    """Widens the bounds by the noise of the file's type. A type of 8 bits or fewer takes that of bf16, which has 8
    too."""
    own, times = noise.get("f16" if kind == "f32" else kind, noise["bf16"]), _OF_NOISE.get(kind, 1.0)
    if own["p99_kl"] is None or own["trimmed_kl"] is None or own["median_kl"] is None or own["max_kl"] is None:
        return bounds
    return replace(
        bounds,
        gap=_plus(bounds.gap, _spread(own["p99_kl"])),
        kl=_plus(bounds.kl, times * own["trimmed_kl"]),
        typical=_plus(bounds.kl, times * own["median_kl"]),
        far=max(each["max_kl"] or 0.0 for each in noise.values()),
        noise=own["mean_kl"],
    )


def _plus(bounds: tuple[float, float], more: float) -> tuple[float, float]:
    return bounds[0] + more, bounds[1] + more


def _times(figure: float) -> tuple[float, float]:
    return figure * _FACTORS[0], figure * _FACTORS[1]


def _spread(kld: float) -> float:
    """Spread of one token's log-probability, in nats, at this divergence: KL is about half its variance."""
    return float((2 * kld) ** 0.5)


# Nats by which a file may prefer its own token where an engine's greedy answer parts from it: an engine keeps keys and
# values in f16 and repacks weights, which moves the logits of q4_k_m by 0.01 and less (tiny models, 0.3.36).
ENGINE_GAP = (0.1, 1.0)
