"""Measures the reference: logits on held-out text, which go into files, and greedy answers.

The reference and the base are computed one after the other and freed, so they are never in memory together. llama.cpp
works on a file beside the reference only if memory has room for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.llama.inference import Sequence, sequences_of
from skill_train.llama.logit_distance import Distance, compare_logits, join, summarize
from skill_train.reference.load import logits
from skill_train.reference.low_memory import frugal_model
from skill_train.reference.rounded_merge import Rounding, rounded
from skill_train.reference.rounding_noise import TYPES, is_mixture, rounded_products
from skill_train.run.folder import require_space
from skill_train.verify.sample_texts import Sample

if TYPE_CHECKING:
    import numpy as np

_PASS_TOKENS = 512  # of 152,000 logits each: 311 MB
_PASS_COST = 40  # tokens that take as long to compute as reading the weights (494M parameters, 2 cores, 2026-11)


@dataclass(frozen=True)
class ReferenceAnswer:
    """The greedy answer of the reference to `prompt`. `rows` holds its log-probabilities, [steps, vocabulary]."""

    prompt: list[int]
    ids: list[int]
    stopped: bool
    rows: np.ndarray


@dataclass(frozen=True)
class ReferenceMeasurements:
    """Everything that files are compared with."""

    sequences: list[Sequence]
    vocabulary: int  # width of the logits
    tuned: Path  # file of float32 logits [tokens, vocabulary]
    base: Path | None  # file of the base's logits for the first `base_rows` tokens; None without a base
    base_rows: int
    why_no_base: str  # the reason when `base` is None
    answers: list[ReferenceAnswer] = field(default_factory=list)
    sample: Sample = field(default_factory=Sample)
    # file of the logits of the reference with its weights rounded as the merge stored them; None if the merge rounded
    # nothing, or if the rounding is unknown
    rounded: Path | None = None
    stored: str = ""  # the type that the weights are rounded to
    cost: Distance | None = None  # how far the rounded reference is from the reference
    rounded_answers: list[ReferenceAnswer] = field(default_factory=list)  # of the rounded reference, as `answers`
    # for a mixture of experts, by type of file: how far the model moves when both factors of its products are rounded
    # to that type
    noise: dict[str, Distance] = field(default_factory=dict)

    @property
    def made_of(self) -> Path:
        """The logits that a correct file should have: those of the model that the files were made of."""
        return self.rounded or self.tuned

    @property
    def file_answers(self) -> list[ReferenceAnswer]:
        """The answers that a correct file should give: those of the model that the files were made of."""
        return self.rounded_answers or self.answers

    @property
    def longest(self) -> int:
        """Tokens of context that llama.cpp needs."""
        lengths = [len(s.ids) for s in self.sequences] + [
            len(a.prompt) + self.sample.answer_tokens for a in self.answers
        ]
        return max(lengths, default=1)


@dataclass(frozen=True)
class MeasureRequest:
    """What the reference is asked."""

    sequences: list[list[int]]  # token ids whose logits are compared
    prompts: list[list[int]]  # token ids to answer
    stops: set[int]  # ids that end an answer
    sample: Sample  # how much is asked


def measure(
    model: Any,
    request: MeasureRequest,
    *,
    folder: Path,
    switches_off: bool,
    drafts: Callable[[], list[list[int]]] = list,
) -> ReferenceMeasurements:
    """Runs the reference.

    Args:
        model: the result of `frugal_model`.
        folder: temporary, on a disk with room for the logits.
        switches_off: whether the model without its adapter is the base. The base is then measured too.
        drafts: what a file answers to each prompt, or nothing. As far as the reference agrees with a draft, its answer
            needs one pass, which it shares with texts of that length, instead of one pass a token.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    sequences, vocabulary = sequences_of(request.sequences), _vocabulary(model)
    tuned_file, base_file = folder / "tuned.f32", folder / "base.f32"
    chosen = first_of(sequences, request.sample.base_tokens) if switches_off else []
    require_space(folder, 4 * vocabulary * (_tokens(sequences) + request.sample.base_tokens), "the reference's logits")
    guessed = _guessed(drafts(), request.prompts, vocabulary, request.sample.answer_tokens)
    after = _write(model, sequences, tuned_file, _beside(request, guessed))
    if chosen:
        with model.disable_adapter():
            _write(model, chosen, base_file)
    answers = _answers(model, request, guessed, after)
    why = "" if switches_off else "there is no base to compare with"
    files = (tuned_file, base_file if chosen else None)
    return ReferenceMeasurements(
        sequences, vocabulary, *files, _tokens(chosen), why, answers=answers, sample=request.sample
    )


def measure_base(base: Path, measurements: ReferenceMeasurements, folder: Path) -> ReferenceMeasurements:
    """Adds the logits of a base that is a model of its own. It runs after the reference was freed."""
    chosen, file = first_of(measurements.sequences, measurements.sample.base_tokens), folder / "base.f32"
    with frugal_model(base) as model:
        width = _vocabulary(model)
        if width != measurements.vocabulary:
            why = f"the base knows {width} tokens and the tuned model {measurements.vocabulary}"
            return replace(measurements, why_no_base=why)
        _write(model, chosen, file)
    return replace(measurements, base=file, base_rows=_tokens(chosen), why_no_base="")


def measure_rounded(
    model: Any,
    request: MeasureRequest,
    adapter: Path | None,
    rounding: Rounding | None,
    measurements: ReferenceMeasurements,
    folder: Path,
) -> ReferenceMeasurements:
    """Adds the logits and the answers of the reference with its weights rounded as the merge stored them. The model has
    these weights from then on. For a mixture of experts, adds how far rounding to the types of files moves the model.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    if not measurements.sequences:
        return measurements
    if adapter is None or not (rounding or is_mixture(model.config)):
        return _with_noise(model, measurements, folder)
    if rounding is None:
        with rounded(model, adapter, {}, "F32") as merged:
            return _with_noise(merged, measurements, folder)
    file = folder / "rounded.f32"
    _require_room(measurements, folder, "the rounded reference's logits")
    with rounded(model, adapter, rounding.kinds, rounding.stored) as merged:
        drafts = [answer.ids for answer in measurements.answers]
        after = _write(merged, measurements.sequences, file, _beside(request, drafts))
        result = replace(
            measurements,
            rounded=file,
            stored=rounding.stored,
            cost=_distance(file, measurements.tuned, measurements),
            rounded_answers=_answers(merged, request, drafts, after),
        )
        return _with_noise(merged, result, folder)


def _with_noise(model: Any, measurements: ReferenceMeasurements, folder: Path) -> ReferenceMeasurements:
    if not is_mixture(model.config):
        return measurements
    noise, file = {}, folder / "noise.f32"
    _require_room(measurements, folder, "the logits of rounded products")
    for kind in TYPES:
        with rounded_products(model, kind):
            _write(model, measurements.sequences, file)
        moved = _distance(file, measurements.made_of, measurements)
        if moved is not None:
            noise[kind] = moved
    file.unlink()
    return replace(measurements, noise=noise)


def _distance(file: Path, reference: Path, measurements: ReferenceMeasurements) -> Distance | None:
    """How far the logits in `file` are from those in `reference`, on the same texts; None when no text has two
    tokens."""
    import numpy as np

    own, other = (np.memmap(each, np.float32, "r").reshape(-1, measurements.vocabulary) for each in (reference, file))
    parts = [
        compare_logits(own[sequence.first : end], other[sequence.first : end], np.asarray(sequence.ids[1:]))
        for sequence in measurements.sequences
        if (end := sequence.first + len(sequence.ids) - 1) > sequence.first
    ]
    return summarize(join(parts)) if parts else None


def first_of(sequences: list[Sequence], tokens: int) -> list[Sequence]:
    """The first sequences with at most so many tokens together, and at least one."""
    return [s for s in sequences if s is sequences[0] or s.first + len(s.ids) <= tokens]


def _require_room(measurements: ReferenceMeasurements, folder: Path, result: str) -> None:
    require_space(folder, 4 * measurements.vocabulary * _tokens(measurements.sequences), result)


def _tokens(sequences: Iterable[Sequence]) -> int:
    return sum(len(sequence.ids) for sequence in sequences)


def _vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    return int((logits(model, [0]).shape[1]) if head is None else len(head.weight))


def _write(
    model: Any, sequences: list[Sequence], file: Path, beside: Iterable[tuple[list[int], int]] = ()
) -> list[np.ndarray]:
    """Writes the logits of the sequences, each from its row on.

    Args:
        beside: other texts, each with a place in it.

    Returns:
        The logits of the other texts from that place on.
    """
    others = list(beside)
    logits_of: dict[int, np.ndarray] = {}
    with open(file, "wb") as out:
        for number, rows in _passes(model, [*(one.ids for one in sequences), *(ids for ids, _ in others)]):
            if number < len(sequences):
                out.seek(sequences[number].first * rows.shape[1] * rows.itemsize)
                rows.tofile(out)
            else:
                logits_of[number - len(sequences)] = rows[others[number - len(sequences)][1] :].copy()
    return [logits_of[number] for number in range(len(others))]


def _passes(model: Any, texts: list[list[int]]) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each text, in any order, and its logits [tokens, vocabulary].

    Texts of one pass are filled up to one length. The filling comes last, so a causal model does not see it.
    """
    import torch

    for group in _groups(list(map(len, texts))):
        longest = len(texts[group[-1]])
        filled = torch.tensor([texts[number] + [0] * (longest - len(texts[number])) for number in group])
        with torch.no_grad():
            outputs = model(input_ids=filled, use_cache=False).logits.float().numpy()
        for number, rows in zip(group, outputs, strict=True):
            yield number, rows[: len(texts[number])]


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Numbers of texts for one pass each, short ones first. Texts share a pass if filling them up costs less than a
    pass."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        filling = len(group) * (lengths[number] - lengths[group[-1]]) if group else 0
        if group and (filling > _PASS_COST or (len(group) + 1) * lengths[number] > _PASS_TOKENS):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _guessed(drafts: list[list[int]], prompts: list[list[int]], vocabulary: int, most: int) -> list[list[int]]:
    """A draft for each prompt, up to the first token that this model does not have: a file may be of another model."""
    return [list(takewhile(lambda token: token < vocabulary, draft))[:most] for draft in drafts] or [[]] * len(prompts)


def _beside(request: MeasureRequest, drafts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Each prompt with its draft, and the place of the last token of the prompt: `beside` of `_write`."""
    return [(prompt + draft, len(prompt) - 1) for prompt, draft in zip(request.prompts, drafts, strict=True)]


def _answers(
    model: Any, request: MeasureRequest, drafts: list[list[int]], after: list[np.ndarray]
) -> list[ReferenceAnswer]:
    """The greedy answer to each prompt, with the logits that `_write` returned for `_beside`."""
    asked = zip(request.prompts, drafts, after, strict=True)
    return [_answer(model, *each, request.stops, request.sample.answer_tokens) for each in asked]


def _answer(
    model: Any, prompt: list[int], draft: list[int], pass_: np.ndarray, stops: set[int], most: int
) -> ReferenceAnswer:
    """The greedy answer. One pass over prompt and draft shows what the model answers after each token of the draft. As
    far as the two agree (https://arxiv.org/abs/2211.17192), nothing is computed token by token.

    Args:
        pass_: the logits after the prompt and after each token of the draft.
    """
    import numpy as np
    import torch

    ids: list[int] = []
    rows: list[Any] = []

    def done() -> bool:
        return len(ids) == most or bool(ids and ids[-1] in stops)

    def take(row: Any) -> None:
        chances = torch.log_softmax(row.float(), dim=-1)
        rows.append(chances.numpy())
        ids.append(int(chances.argmax()))

    while not done() and len(ids) < len(pass_) and ids == draft[: len(ids)]:
        take(torch.from_numpy(pass_[len(ids)]))
    past, input_ids = None, prompt + ids
    with torch.no_grad():
        while not done():
            out = model(input_ids=torch.tensor([input_ids]), past_key_values=past, use_cache=True)
            past = getattr(out, "past_key_values", None)  # Mamba has another memory, so it reads all again
            take(out.logits[0, -1])
            input_ids = prompt + ids if past is None else ids[-1:]
    return ReferenceAnswer(prompt, ids, ids[-1] in stops, np.stack(rows))
