"""Is the merged model the base with its adapter? Logits of both on the same tokens, in fp32, before anything else is
made from it.

Distance. Mean KL divergence in nats, with limits by the dtype that the changed weights are stored in. Correct merges
measured (2026-11; random weights; two layers of Qwen2, Llama, Gemma and GPT-2 with real tokenizers, 24 layers of width
64, 8 of width 256; changes of 0.02 % to 50 % of the weights): F32 at most 1.3e-12, F16 1.2e-6, BF16 7.7e-5, and the
99th percentile at most 5.1 times the mean. The limits are about 15 times that, fp32's more because longer sums round
more. For scale: q8_0, 6 times as coarse as bf16, is 1.4e-3 off on Llama 3 8B (llama.cpp, tools/perplexity/README.md).

Share. How much of the adapter's own change of the answers is in the merged model: 1, or 0 when it was left out, 2 when
it was added twice. It finds a wrong scale that bf16's distance would hide. Rounding loses small changes, because bf16
weights have 8 bits: of a change of 0.5 % of the weights 98 % is kept, of 0.2 % 82 %, of 0.1 % 55 %. The writer knows
what it kept, and the share measured here followed that within 0.11; so the share must be what was kept, within 0.05 and
half of what was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train import compare, reference
from skill_train.console import Bar
from skill_train.errors import VerificationFailed
from skill_train.reference_stored import frugal_model

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 2048
ENOUGH_TOKENS = 512  # where every weight was compared already, and this asks whether PEFT sees it the same way
LIMITS = {"F64": 1e-8, "F32": 1e-8, "F16": 2e-5, "BF16": 1e-3}
_P99 = 10
_SHARE = 0.05
_SHARE_UNKNOWN = 0.5  # rounded by PEFT, which does not say what it kept
_LOST = 0.5
_NO_EFFECT = 1e-9
_ROW_TOKENS = 512
_OF_BASE = 4  # the base runs on the first quarter, and 256 tokens at least: a share uses whole distributions
_LEAST_OF_BASE = 256
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class Texts:
    """Token ids to compare on, and what they are."""

    source: str
    ids: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def gate(
    *,
    base: Path,
    adapter: Path,
    merged: Path,
    rows: list[dict[str, Any]],
    stored: str,
    kept: float | None,
    threshold: float | None,
    bar: Bar,
    tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """The gate's figures, limits and verdict, as `merge.json` keeps them.

    Args:
        merged: the written folder; a scratch file of logits lies in it meanwhile.
        rows: texts with `input_ids`, held-out ones at best; NEUTRAL_TEXTS are used when there are none.
        stored: safetensors' dtype of the changed weights (the coarsest when they differ).
        kept: the share of the change of the weights that rounding left; None when nobody knows.
        threshold: the highest mean KL divergence in nats; None is the dtype's own.
        tokens: the most to compare.

    Returns:
        `figures` of the merged model against base + adapter; `effect`: the `share` of the adapter that is in the merged
        model, and how far the adapter moves the base (`kl_between`); `limits`; `failures` (sentences, empty when it
        passed); `verdict`.
    """
    reference.require_config(base)
    texts = choose_texts(rows, merged, tokens)
    with _Scratch(merged, texts) as scratch:
        _write_reference(base, adapter, texts, scratch, bar)
        figures, effect = _compare_merged(merged, texts, scratch, bar)
    limit = threshold if threshold is not None else LIMITS[stored]
    unknown = _SHARE if stored in ("F64", "F32") else _SHARE_UNKNOWN
    limits = {
        "mean_kl": limit,
        "p99_kl": _P99 * limit,
        "share": 1.0 if kept is None else kept,
        "share_tolerance": unknown if kept is None else _SHARE + abs(1 - kept) / 2,
    }
    failures = _failures(figures, effect, limits)
    return {
        "texts": texts.source,
        "text_sha256": hashlib.sha256(json.dumps(texts.ids).encode()).hexdigest(),
        "stored_dtype": stored,
        "figures": figures,
        "effect": effect,
        "limits": limits,
        "failures": failures,
        "verdict": "fail" if failures else "pass",
    }


def has_effect(effect: dict[str, Any]) -> bool:
    """The adapter changes the base's answers by more than fp32 arithmetic does."""
    return effect["kl_between"] is None or effect["kl_between"] > _NO_EFFECT


def choose_texts(rows: list[dict[str, Any]], model: Path, most: int = MAX_TOKENS) -> Texts:
    """At most so many tokens: the rows, else NEUTRAL_TEXTS, else made-up ids for a model without a tokenizer."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    context = next(
        (n for n in map(text.get, ("max_position_embeddings", "n_positions")) if isinstance(n, int)), _ROW_TOKENS
    )
    vocabulary = next(n for n in (text.get("vocab_size"), config.get("vocab_size"), 256) if isinstance(n, int))
    ids = [row["input_ids"] for row in rows if len(row.get("input_ids") or ()) > 1]
    source = "rows of the data"
    if not ids and any((model / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = reference.load_tokenizer(model)
        ids, source = [tokenizer(text)["input_ids"] for text in reference.NEUTRAL_TEXTS], "neutral texts"
    if not ids:
        ids, source = _made_up(vocabulary), "made-up token ids: no rows, and the base has no tokenizer"
    return Texts(source, list(_bounded(ids, min(context, _ROW_TOKENS), most)))


def _made_up(vocabulary: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, size=128).tolist() for _ in range(4)]


def _bounded(rows: list[list[int]], longest: int, left: int) -> Iterator[list[int]]:
    for row in rows:
        cut = row[: min(longest, left)]
        if len(cut) > 1:
            left -= len(cut)
            yield cut


class _Scratch:
    """Logits on disk, so that two models never lie in memory at once: all of base + adapter, the first of the base."""

    def __init__(self, folder: Path, texts: Texts) -> None:
        self.tuned, self.base = folder / ".gate-tuned.f32", folder / ".gate-base.f32"
        most = max(_LEAST_OF_BASE, texts.tokens // _OF_BASE)
        self.base_rows = sum(1 for total in itertools.accumulate(map(len, texts.ids)) if total <= most) or 1
        self.vocabulary = 0

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.tuned.unlink(missing_ok=True)
        self.base.unlink(missing_ok=True)

    def read(self, file: Path) -> np.ndarray:
        """All logits of one file as [tokens, vocabulary], not loaded."""
        import numpy as np

        return np.memmap(file, dtype=np.float32, mode="r").reshape(-1, self.vocabulary)


def _write_reference(base: Path, adapter: Path, texts: Texts, scratch: _Scratch, bar: Bar) -> None:
    with (
        frugal_model(base, adapter) as model,
        open(scratch.tuned, "wb") as tuned_file,
        open(scratch.base, "wb") as base_file,
    ):
        for number, ids in enumerate(texts.ids):
            tuned = reference.logits(model, ids)
            scratch.vocabulary = tuned.shape[1]
            tuned_file.write(tuned.tobytes())
            if number < scratch.base_rows:
                with _without_adapter(model):
                    base_file.write(reference.logits(model, ids).tobytes())
            bar(number + 1, 2 * len(texts.ids), "gate: base + adapter")


@contextlib.contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    """The base alone; trained biases stay (PEFT warns of it), so the effect is a little understated with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with model.disable_adapter():
            yield


def _compare_merged(merged: Path, texts: Texts, scratch: _Scratch, bar: Bar) -> tuple[dict[str, Any], dict[str, Any]]:
    import numpy as np

    tuned, base = scratch.read(scratch.tuned), scratch.read(scratch.base)
    figures, changes = [], []
    start = 0
    with frugal_model(merged) as model:
        for number, ids in enumerate(texts.ids):
            found = reference.logits(model, ids)
            if found.shape[1] != scratch.vocabulary:
                raise _other_vocabulary(scratch.vocabulary, found.shape[1])
            rows = slice(start, start + len(ids) - 1)  # the last token has none that follows it
            figures.append(compare.compare_logits(tuned[rows], found[:-1], np.asarray(ids[1:])))
            if number < scratch.base_rows:
                changes.append(compare.compare_change(tuned[rows], base[rows], found[:-1]))
            start += len(ids)
            bar(len(texts.ids) + number + 1, 2 * len(texts.ids), "gate: merged model")
    return compare.summarize(compare.join(figures)), compare.summarize_change(changes)


def _other_vocabulary(expected: int, got: int) -> VerificationFailed:
    return VerificationFailed(
        "the merged model has another vocabulary than base + adapter",
        code="merge_gate",
        expected=f"{expected} logits a token",
        got=f"{got}",
        hint="the base model that the adapter was trained on: base_model_name_or_path in adapter_config.json",
    )


def _failures(figures: dict[str, Any], effect: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """What is wrong, one sentence each. A figure that is None (NaN or infinite) fails."""
    failures = []
    for name, words in (("mean_kl", "mean KL divergence"), ("p99_kl", "99th percentile of the KL divergence")):
        value = figures[name]
        if value is None or value > limits[name]:
            failures.append(f"{words} {_number(value)} nats is above {limits[name]:g}")
    if failures or not has_effect(effect):
        return failures
    share, width = effect["share"], effect["share_half_width"]
    if share is None or abs(share - limits["share"]) - width > limits["share_tolerance"]:
        expected = f"{limits['share']:.3f} ± {limits['share_tolerance']:.3f}"
        failures.append(f"{_number(share)} of the adapter is in the merged model, expected {expected}")
    elif limits["share"] < _LOST:
        failures.append(f"rounding leaves only {limits['share']:.2f} of the adapter in the stored weights")
    return failures


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"
