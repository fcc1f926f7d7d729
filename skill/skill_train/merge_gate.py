"""Is the merged model the base with its adapter? Logits of both on the same tokens, in fp32, before anything else is
made from it.

Limits by the dtype that the changed weights are stored in, in nats of mean KL divergence: TO BE MEASURED
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train import compare, reference
from skill_train.console import Bar
from skill_train.errors import VerificationFailed

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 2048
_ROW_TOKENS = 512
LIMITS = {"F32": 1e-7, "F16": 1e-5, "BF16": 1e-3}
_P99 = 20  # the 99th percentile may be this many times the mean
_NO_EFFECT = 1e-9
_LOST = 0.5
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
    threshold: float | None,
    bar: Bar,
) -> dict[str, Any]:
    """The gate's figures, limits and verdict, as `merge.json` keeps them.

    Args:
        merged: the written folder; a scratch file of logits lies in it meanwhile.
        rows: texts with `input_ids`, held-out ones at best; NEUTRAL_TEXTS are used when there are none.
        stored: safetensors' dtype of the changed weights (the coarsest when they differ).
        threshold: the highest mean KL divergence in nats; None is the dtype's own.

    Returns:
        `figures` of the merged model against base + adapter, `effect` of the adapter against the base alone,
        `limits`, `failures` (sentences, empty when it passed), `verdict`.
    """
    texts = choose_texts(rows, merged)
    scratch = merged / ".gate.f32"
    try:
        vocabulary, effect = _write_reference(base, adapter, texts, scratch, bar)
        figures = _compare_merged(merged, texts, scratch, vocabulary, bar)
    finally:
        scratch.unlink(missing_ok=True)
    limit = threshold if threshold is not None else LIMITS[stored]
    failures = _failures(figures, effect, limit)
    return {
        "texts": texts.source,
        "text_sha256": hashlib.sha256(json.dumps(texts.ids).encode()).hexdigest(),
        "stored_dtype": stored,
        "figures": figures,
        "effect": effect,
        "limits": {"mean_kl": limit, "p99_kl": _P99 * limit, "share_of_effect": _LOST},
        "failures": failures,
        "verdict": "fail" if failures else "pass",
    }


def has_effect(outcome: dict[str, Any]) -> bool:
    """The adapter changes the base's answers by more than fp32 arithmetic does."""
    mean = outcome["effect"]["mean_kl"]
    return mean is None or mean > _NO_EFFECT


def choose_texts(rows: list[dict[str, Any]], model: Path) -> Texts:
    """At most MAX_TOKENS tokens: the rows, else NEUTRAL_TEXTS, else made-up ids for a model without a tokenizer."""
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
    return Texts(source, list(_bounded(ids, min(context, _ROW_TOKENS))))


def _made_up(vocabulary: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, size=128).tolist() for _ in range(4)]


def _bounded(rows: list[list[int]], longest: int) -> Iterator[list[int]]:
    left = MAX_TOKENS
    for row in rows:
        cut = row[: min(longest, left)]
        if len(cut) > 1:
            left -= len(cut)
            yield cut


def _write_reference(base: Path, adapter: Path, texts: Texts, scratch: Path, bar: Bar) -> tuple[int, dict[str, Any]]:
    """Logits of base + adapter into `scratch`, one float32 row a token: vocabulary size, and the adapter's effect."""
    parts = []
    vocabulary = 0
    with reference.reference_model(base, adapter) as model, open(scratch, "wb") as file:
        for number, ids in enumerate(texts.ids):
            tuned = reference.logits(model, ids)
            vocabulary = tuned.shape[1]
            file.write(tuned.tobytes())
            with _without_adapter(model):
                untuned = reference.logits(model, ids)
            parts.append(_figures(tuned, untuned, ids))
            bar(number + 1, 2 * len(texts.ids), "gate: base + adapter")
    return vocabulary, compare.summarize(compare.join(parts))


@contextlib.contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    """The base alone; trained biases stay (PEFT warns of it), so the effect is a little understated with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with model.disable_adapter():
            yield


def _compare_merged(merged: Path, texts: Texts, scratch: Path, vocabulary: int, bar: Bar) -> dict[str, Any]:
    import numpy as np

    expected = np.memmap(scratch, dtype=np.float32, mode="r", shape=(texts.tokens, vocabulary))
    parts = []
    position = 0
    with reference.reference_model(merged) as model:
        for number, ids in enumerate(texts.ids):
            found = reference.logits(model, ids)
            if found.shape[1] != vocabulary:
                raise VerificationFailed(
                    "the merged model has another vocabulary than base + adapter",
                    code="merge_gate",
                    expected=f"{vocabulary} logits a token",
                    got=f"{found.shape[1]}",
                )
            parts.append(_figures(expected[position : position + len(ids)], found, ids))
            position += len(ids)
            bar(len(texts.ids) + number + 1, 2 * len(texts.ids), "gate: merged model")
    return compare.summarize(compare.join(parts))


def _figures(expected: np.ndarray, found: np.ndarray, ids: list[int]) -> compare.TokenFigures:
    import numpy as np

    return compare.compare_logits(expected[:-1], found[:-1], np.asarray(ids[1:]))


def _failures(figures: dict[str, Any], effect: dict[str, Any], limit: float) -> list[str]:
    """What is wrong, one sentence each. A figure that is None (NaN or infinite) fails."""
    mean, p99, whole = figures["mean_kl"], figures["p99_kl"], effect["mean_kl"]
    failures = []
    if mean is None or mean > limit:
        failures.append(f"mean KL divergence {_number(mean)} nats is above {limit:g}")
    if p99 is None or p99 > _P99 * limit:
        failures.append(f"99th percentile of the KL divergence {_number(p99)} nats is above {_P99 * limit:g}")
    if not failures and whole is not None and whole > _NO_EFFECT and mean > _LOST * whole:
        failures.append(
            f"the merged model keeps too little of the adapter: {mean:.2g} of its {whole:.2g} nats are lost"
        )
    return failures


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"
