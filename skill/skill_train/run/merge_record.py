"""`merge.json`: the changes that a merge made, and the verdict of its gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.run import records
from skill_train.run.records import FileName, Number, StepSchema, Verdict, Whole


class MergeInputs(msgspec.Struct, frozen=True):
    """Digests of all files that decide the result."""

    base: dict[str, FileDigest]
    adapter: dict[str, FileDigest]


class MergeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the merge, and the settings that it takes from the run."""

    dtype: str | None = None  # None for the dtype of the base
    threshold: Number | None = None  # always None; in earlier versions the user could set the limit of the gate
    gate: str | msgspec.UnsetType = msgspec.UNSET  # `weights` or `answers`; left out if the step decides
    # min_pixels, max_pixels: the limits in the recipe of the adapter; left out if the recipe sets none
    min_pixels: int | msgspec.UnsetType = msgspec.UNSET
    max_pixels: int | msgspec.UnsetType = msgspec.UNSET
    # tokens that end the answers in the training and are not stop tokens of the base; left out if there are none
    stops: list[Whole] | msgspec.UnsetType = msgspec.UNSET


class Changes(TypedDict):
    """The differences between the merged files and the base. A merge by PEFT counts nothing."""

    changed_tensors: NotRequired[Whole]
    converted_tensors: NotRequired[Whole]
    stored_dtype: str  # safetensors' dtype of the changed weights; the coarsest one if there are several
    change_of_weights: NotRequired[Number | None]  # norm of the change divided by the norm of the base's weights
    kept_after_rounding: NotRequired[Number | None]  # the share of the change that is left after rounding
    rounding_error_of_change: NotRequired[Number | None]  # norm of the rounding error divided by the norm of the change
    from_adapter: NotRequired[list[str]]  # files from the adapter's folder
    config: NotRequired[dict[str, object]]  # fields of config.json that differ
    # settings of the image processor that differ: the limits of a picture's size in the training
    processor: NotRequired[dict[str, object]]
    stops: NotRequired[list[Whole]]  # tokens that were added to eos_token_id in generation_config.json


class Effect(TypedDict):
    """How much of the adapter is in the merged model: `share` is 1 for all of it. The KL distances between the models
    are in nats. A figure that is not finite is None."""

    share: Number | None
    share_half_width: Number | None
    kl_tuned: NotRequired[Number | None]
    kl_base: NotRequired[Number | None]
    kl_between: Number | None
    tokens: NotRequired[Whole]


class Figures(TypedDict, total=False):
    """Distances of answers, as `llama.logit_distance.summarize` returns them, or distances of weights. A figure that is
    not finite is None."""

    mean_kl: Number | None
    p99_kl: Number | None
    trimmed_kl: Number | None
    median_kl: Number | None
    max_kl: Number | None
    same_top1: Number | None
    perplexity: Number | None
    perplexity_reference: Number | None
    perplexity_ratio: Number | None
    perplexity_ratio_half_width: Number | None
    tokens: Whole
    tensors: Whole
    changed: Whole
    worst_row: Number | None
    worst_tensor: str
    rounded_otherwise: Number


class Rounded(Figures, total=False):
    """Figures of the merged model against rounded base + adapter. `cost` has the figures of the rounding itself."""

    cost: Figures
    share: Number | None
    share_half_width: Number | None


class Gate(TypedDict):
    """The comparison that the gate made, and its verdict."""

    by: NotRequired[Literal["weights", "answers"]]  # earlier versions compared only answers, and do not have this field
    # texts, text_sha256: the texts on which answers were compared
    texts: NotRequired[str]
    text_sha256: NotRequired[str]
    pictures: NotRequired[str]  # for a vision model, whether a picture was compared too, or why not
    stored_dtype: str
    figures: Figures  # of the merged model against base + adapter
    effect: Effect
    rounded: NotRequired[Rounded | None]  # None in fp32
    limits: dict[str, Number]
    failures: list[str]  # sentences; empty if the gate passed
    verdict: Verdict
    weights: NotRequired[Gate | None]  # the result for the weights, inside the result for the answers
    no_answers: NotRequired[str]  # why no answers were compared
    seconds: NotRequired[Number]


class MergeRecord(msgspec.Struct, frozen=True, kw_only=True):
    schema: StepSchema = "skill-train/step/1"
    step: str = "merge"
    inputs: MergeInputs
    options: MergeSettings
    # `streamed` from the base's files, or merged by `peft`. For `peft`, `reasons` says why it was not streamed.
    how: Literal["streamed", "peft"]
    reasons: list[str]
    changes: Changes
    gate: Gate
    versions: dict[str, str | None] = {}
    seconds: Number | None = None
    peak_memory_bytes: Whole | None = None
    outputs: dict[FileName, FileDigest]
    finished_at: str | None = None


Digests = Mapping[str, FileDigest]


def is_of_earlier_training(trained: Digests, adapter: Digests, merged: Digests, converted: Digests) -> bool:
    """Whether a merged model, or a GGUF file, was made of another training than the present one.

    Args:
        trained: the outputs of `train.json`.
        adapter, merged: the adapter and the outputs of `merge.json`; empty without one.
        converted: the inputs of `convert.json`; empty for the merged model itself.
    """
    stale = any(trained.get(f"adapter/{name}", digest) != digest for name, digest in adapter.items())
    return stale or any((merged or trained).get(f"merged/{name}", each) != each for name, each in converted.items())


def read(path: Path) -> MergeRecord:
    """The record in a file. Raises as `records.read`."""
    return records.read(path, MergeRecord)
