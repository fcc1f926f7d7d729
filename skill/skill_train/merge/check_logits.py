"""Compares the logits of the merged model with those of base and adapter, in fp32, before anything is made from it.

Distance. A merge in fp32 is compared with base + adapter as PEFT computes it. Correct merges measured at most 1.3e-12
nats (mean KL divergence); the bound is 1e-8. A merge in 16 bits must equal base + adapter after each weight is rounded
once (`reference/rounded_merge.py`). Correct merges of seven families measured 0, and at most 9e-10 if the sums are
added in another order (2026-11). Their distance from the model without rounding, 7e-6 to 3e-3, is not judged.

A weight near the middle of two steps can be rounded differently if its sum is added in another order. This happens to
one weight in some ten thousand, and changes the answers by 1e-3 of the cost of rounding. So the bound of the median is
1e-8 or a hundredth of the median cost of rounding. One such weight can change a router's choice, so the bound of the
mean is half of the mean cost of rounding. A merge by PEFT has the same sums, so only 1e-8 applies.

Share. How much of the adapter's own change of the answers is in the merged model: 1 if correct, 0 if the adapter was
left out, 2 if it was added twice. Rounding loses small changes, because bf16 weights have 8 bits: it keeps 98 % of a
change of 0.5 % of the weights, 82 % of a change of 0.2 %, and 55 % of a change of 0.1 %. So a merge in 16 bits is
compared with the rounded model here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from skill_train.core.console import Bar
from skill_train.core.errors import VerificationFailed
from skill_train.llama.logit_distance import (
    ShareFigures,
    TokenFigures,
    change_of,
    distance_of,
    join,
    normalized,
    summarize,
    summarize_change,
)
from skill_train.model.config import text_config
from skill_train.model.folder import read_config
from skill_train.reference import load as reference
from skill_train.reference import rounded_merge
from skill_train.reference.checkpoint_names import TEXT
from skill_train.reference.low_memory import frugal_model
from skill_train.reference.one_picture import PictureInputs, picture_inputs
from skill_train.run.merge_record import Effect, Figures, Gate, Rounded
from skill_train.run.train_record import FedRow

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 2048
ENOUGH_TOKENS = 512  # enough if every weight was already compared, and only PEFT's computation is still checked
EXACT = 1e-8  # nats: fp32 sums in another order stay far below this
_P99 = 10
_OF_HALF, _OF_MEAN = 0.01, 0.5  # bounds of the median and the mean, as shares of the cost of rounding
_SHARE = 0.05
_LOST = 0.5
_NO_EFFECT = 1e-9
_ROW_TOKENS = 512
_OF_BASE = 4  # the base runs on the first quarter, and on at least 256 tokens: a share uses whole distributions
_LEAST_OF_BASE = 256
_WORDS = {
    "median_kl": "median KL divergence",
    "mean_kl": "mean KL divergence",
    "p99_kl": "99th percentile of the KL divergence",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class Texts:
    """The token ids to compare on, and their source."""

    source: str
    ids: list[list[int]]
    picture: PictureInputs | None = None  # a picture in the first sequence

    def logits(self, model: Any, number: int) -> Any:
        """The logits of one sequence. The first sequence contains the picture, if there is one."""
        inputs = self.picture.inputs if self.picture and not number else {}
        return reference.logits(model, self.ids[number], **inputs)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class GateRequest:
    """A merged folder, and the models that it is compared with."""

    base: Path
    adapter: Path
    merged: Path  # the written folder; it contains files of logits during the check
    rows: Sequence[FedRow]  # texts with `input_ids`, preferably held-out ones; NEUTRAL_TEXTS are used if there are none
    # task, names: as in `Base`
    task: str = TEXT
    names: Mapping[str, str] = field(default_factory=dict)
    pictures: bool = False  # the model reads pictures, so a picture is compared too


def gate(request: GateRequest, *, stored: str, kept_share: float | None, bar: Bar, tokens: int = MAX_TOKENS) -> Gate:
    """Runs the gate. Returns its figures, limits and verdict, as in `merge.json`.

    Args:
        stored: safetensors' dtype of the changed weights (the coarsest one if they differ).
        kept_share: the share of the weights' change that remained after rounding; None if it is unknown.
        tokens: the most tokens to compare.

    Returns:
        `figures` of the merged model against base + adapter; `rounded`: the figures against that model after rounding,
        and the cost of rounding, None in fp32; `effect`: the `share` of the adapter in the merged model, and how far
        the adapter moves the base (`kl_between`); `limits`; `failures` (sentences; empty if it passed); `verdict`.
    """
    reference.require_config(request.base)
    texts = choose_texts(request.rows, request.merged, tokens)
    rounds = stored in rounded_merge.KINDS
    with tempfile.TemporaryDirectory(prefix=".gate-", dir=request.merged) as folder:
        scratch = _Scratch(folder)
        with frugal_model(request.base, request.adapter, request.task) as model:
            picture = picture_inputs(request.base, model, texts.ids[0]) if request.pictures else None
            if isinstance(picture, PictureInputs):
                texts = replace(texts, ids=[picture.ids, *texts.ids], picture=picture)
            _write_reference(model, request, texts, scratch, stored if rounds else None, bar)
            del model
        compared = _compare_merged(request, texts, scratch, bar)
    limits = _limits(compared["rounded"], same_sums=kept_share is None)
    failures = _failures(compared, limits, kept_share)
    outcome: Gate = {
        "texts": texts.source,
        "text_sha256": hashlib.sha256(json.dumps(texts.ids).encode()).hexdigest(),
        "stored_dtype": stored,
        "figures": compared["figures"],
        "effect": compared["effect"],
        "rounded": compared["rounded"],
        "limits": limits,
        "failures": failures,
        "verdict": "fail" if failures else "pass",
    }
    if picture is not None:
        outcome["pictures"] = "one picture" if texts.picture else f"not compared: {picture}"
    return outcome


def _limits(rounded: Rounded | None, *, same_sums: bool) -> dict[str, float]:
    """The limits for `rounded` if it exists, else for `figures`."""
    share = {"share": 1.0, "share_tolerance": _SHARE}
    if rounded is None:
        return {"mean_kl": EXACT, "p99_kl": _P99 * EXACT, **share}
    cost, most = rounded["cost"], 0.0 if same_sums else 1.0
    half, mean = most * _OF_HALF * (cost["median_kl"] or 0.0), most * _OF_MEAN * (cost["mean_kl"] or 0.0)
    return {"median_kl": max(EXACT, half), "mean_kl": max(EXACT, mean), **share}


def has_effect(effect: Effect) -> bool:
    """Whether the adapter changes the base's answers by more than fp32 arithmetic does."""
    return effect["kl_between"] is None or effect["kl_between"] > _NO_EFFECT


def choose_texts(rows: Sequence[FedRow], model: Path, most: int = MAX_TOKENS) -> Texts:
    """The texts, at most `most` tokens: the rows, or else NEUTRAL_TEXTS, or random ids if there is no tokenizer either.
    Rows with a picture are left out, because their pixels are not available."""
    config = read_config(model)
    context = reference.context_length(config) or _ROW_TOKENS
    sizes = (text_config(config).get("vocab_size"), config.get("vocab_size"), 256)
    vocabulary = next(size for size in sizes if isinstance(size, int))
    places = {config.get("image_token_id"), config.get("image_token_index")} - {None}
    ids = [row["input_ids"] for row in rows if len(row["input_ids"]) > 1 and places.isdisjoint(row["input_ids"])]
    source = "rows of the data"
    if not ids and any((model / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = reference.load_tokenizer(model)
        ids, source = [tokenizer(text)["input_ids"] for text in reference.NEUTRAL_TEXTS], "neutral texts"
    if not ids:
        ids, source = _random_ids(vocabulary), "made-up token ids: no rows, and the base has no tokenizer"
    return Texts(source, reference.bounded(ids, min(context, _ROW_TOKENS), most))


def _random_ids(vocabulary: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, size=128).tolist() for _ in range(4)]


class _Scratch:
    """Files of logits, so that two models are never in memory at once. `base` has only the first `base_rows`
    sequences."""

    def __init__(self, folder: str) -> None:
        self.tuned, self.base, self.rounded = (Path(folder, name) for name in ("tuned", "base", "rounded"))
        self.base_rows = 0
        self.vocabulary = 0

    def read(self, file: Path) -> np.ndarray:
        """All logits of one file as [tokens, vocabulary], not loaded."""
        import numpy as np

        return np.memmap(file, dtype=np.float32, mode="r").reshape(-1, self.vocabulary)


def _write_reference(
    model: Any, request: GateRequest, texts: Texts, scratch: _Scratch, stored: str | None, bar: Bar
) -> None:
    """Writes the logits of the reference models. `stored` is the type for the rounded model; None writes none."""
    most = max(_LEAST_OF_BASE, texts.tokens // _OF_BASE)
    scratch.base_rows = sum(1 for total in itertools.accumulate(map(len, texts.ids)) if total <= most) or 1
    # A first pass whose result is not used. After a change of torch's threads it can be off by 1e-3 in a logit. On an
    # Intel Xeon with AMX, torch 2.13, it was off in 5 of 22 merges, by the same amount; the second pass never was.
    texts.logits(model, 0)
    with open(scratch.tuned, "wb") as tuned_file, open(scratch.base, "wb") as base_file:
        for number in range(len(texts.ids)):
            tuned = texts.logits(model, number)
            scratch.vocabulary = tuned.shape[1]
            tuned_file.write(tuned.tobytes())
            if number < scratch.base_rows:
                with _without_adapter(model):
                    base_file.write(texts.logits(model, number).tobytes())
            bar(number + 1, 3 * len(texts.ids), "gate: base + adapter")
    if stored is None:
        return
    kinds = rounded_merge.stored_kinds(request.merged, request.names)
    with rounded_merge.rounded(model, request.adapter, kinds, stored) as model, open(scratch.rounded, "wb") as file:
        for number in range(len(texts.ids)):
            file.write(texts.logits(model, number).tobytes())
            bar(len(texts.ids) + number + 1, 3 * len(texts.ids), "gate: base + adapter, rounded")


@contextlib.contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    """The base without the adapter. Trained biases stay (PEFT warns of this), so they make the effect seem smaller."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with model.disable_adapter():
            yield


def _compare_merged(request: GateRequest, texts: Texts, scratch: _Scratch, bar: Bar) -> _Compared:
    import numpy as np

    tuned, base = scratch.read(scratch.tuned), scratch.read(scratch.base)
    rounded = scratch.read(scratch.rounded) if scratch.rounded.is_file() else None
    to_tuned, to_rounded, cost = (list[TokenFigures]() for _ in range(3))
    changes, rounded_changes = (list[ShareFigures]() for _ in range(2))
    start, of_rounded = 0, None
    with frugal_model(request.merged, task=request.task) as model:
        for number, ids in enumerate(texts.ids):
            logits = texts.logits(model, number)
            if logits.shape[1] != scratch.vocabulary:
                raise _other_vocabulary(scratch.vocabulary, logits.shape[1])
            rows, following = slice(start, start + len(ids) - 1), np.asarray(ids[1:])  # no token follows the last one
            there = {"tuned": tuned, "rounded": rounded, "base": base if number < scratch.base_rows else None}
            reference = {name: each[rows] for name, each in there.items() if each is not None}
            for part, log_p in normalized(merged=logits[:-1], **reference):
                own, merged, at = log_p["tuned"], log_p["merged"], following[part]
                to_tuned.append(distance_of(own, merged, at))
                if "base" in log_p:
                    changes.append(change_of(own, log_p["base"], merged))
                if "rounded" in log_p:
                    to_rounded.append(distance_of(log_p["rounded"], merged, at))
                    cost.append(distance_of(own, log_p["rounded"], at))
                if "base" in log_p and "rounded" in log_p:
                    rounded_changes.append(change_of(log_p["rounded"], log_p["base"], merged))
            start += len(ids)
            bar(2 * len(texts.ids) + number + 1, 3 * len(texts.ids), "gate: merged model")
    if rounded is not None:
        of_rounded = cast(Rounded, {**_summary(to_rounded), "cost": _summary(cost)})
        share = summarize_change(rounded_changes)
        of_rounded["share"], of_rounded["share_half_width"] = share["share"], share["share_half_width"]
    effect = cast(Effect, summarize_change(changes))
    return {"figures": _summary(to_tuned), "effect": effect, "rounded": of_rounded}


class _Compared(TypedDict):
    """The figures of the comparison, as in `Gate`."""

    figures: Figures
    effect: Effect
    rounded: Rounded | None


def _summary(parts: list[TokenFigures]) -> Figures:
    return cast(Figures, summarize(join(parts)))


def _other_vocabulary(expected: int, got: int) -> VerificationFailed:
    return VerificationFailed(
        "the vocabulary of the merged model differs from that of base + adapter",
        code="merge_gate",
        expected=f"{expected} logits a token",
        got=f"{got}",
        hint="use the base model that the adapter was trained on: base_model_name_or_path in adapter_config.json",
    )


def _failures(compared: _Compared, limits: dict[str, float], kept_share: float | None) -> list[str]:
    """The faults, one sentence each. A figure that is None (NaN or infinite) fails."""
    rounded, effect = compared["rounded"], compared["effect"]
    judged: Any = rounded or compared["figures"]
    of, failures = " from base + adapter, rounded," if rounded else "", []
    for name, words in _WORDS.items():
        value = judged[name]
        if name in limits and (value is None or value > limits[name]):
            failures.append(f"{words} {_number(value)} nats{of} is above {limits[name]:.3g}")
    if failures or not has_effect(effect):
        return failures
    share, width = (rounded or effect)["share"], (rounded or effect)["share_half_width"] or 0.0
    if share is None or abs(share - limits["share"]) - width > limits["share_tolerance"]:
        expected = f"{limits['share']:.3f} ± {limits['share_tolerance']:.3f}"
        failures.append(f"{_number(share)} of the adapter is in the merged model, expected {expected}")
    remaining = kept_share
    if kept_share is None and effect["share"] is not None:
        remaining = effect["share"] + (effect["share_half_width"] or 0)
    if remaining is not None and remaining < _LOST:
        failures.append(f"rounding leaves only {remaining:.2f} of the adapter in the stored weights")
    return failures


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"
