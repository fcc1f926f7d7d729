"""What the reference says: logits on held-out text and greedy answers, kept in files while llama.cpp is at work.

The models are computed one after the other and freed, so reference and base never lie in memory together; llama.cpp
works on a file beside the reference only where memory has room for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from skill_train.llama.inference import Sequence
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
_PASS_COST = 40  # tokens: reading the weights of 494M takes as long as computing so many (2 cores, 2026-11)


@dataclass(frozen=True)
class ReferenceAnswer:
    """What the reference answers greedily to `prompt`; `rows` holds its log-probabilities, [steps, vocabulary]."""

    prompt: list[int]
    ids: list[int]
    stopped: bool
    rows: np.ndarray


@dataclass(frozen=True)
class ReferenceMeasurements:
    """Everything that files are compared with.

    Attributes:
        vocabulary: width of the logits.
        tuned: file of float32 logits [tokens, vocabulary].
        base: the same of the base, for the first `base_rows` tokens; None without a base.
        why_no_base: the reason then.
        rounded: logits [tokens, vocabulary] of the reference with its weights rounded as the merge stored them; None
            where it rounded nothing, or nobody knows how.
        stored: the type that they are rounded to.
        cost: how far that is from the reference.
        noise: of a mixture of experts, the same by type of file: how far rounding what goes into products to that type
            puts it from what files are made of.
    """

    sequences: list[Sequence]
    vocabulary: int
    tuned: Path
    base: Path | None
    base_rows: int
    why_no_base: str
    answers: list[ReferenceAnswer] = field(default_factory=list)
    sample: Sample = field(default_factory=Sample)
    rounded: Path | None = None
    stored: str = ""
    cost: Distance | None = None
    noise: dict[str, Distance] = field(default_factory=dict)

    @property
    def made_of(self) -> Path:
        """Logits of what files were made of."""
        return self.rounded or self.tuned

    @property
    def longest(self) -> int:
        """Tokens of context that llama.cpp needs."""
        lengths = [len(s.ids) for s in self.sequences] + [
            len(a.prompt) + self.sample.answer_tokens for a in self.answers
        ]
        return max(lengths, default=1)


@dataclass(frozen=True)
class MeasureRequest:
    """What the reference is asked.

    Attributes:
        texts: token ids to compare on.
        prompts: token ids to answer.
        stops: ids that end an answer.
        sample: how many tokens of the base and of each answer.
    """

    texts: list[list[int]]
    prompts: list[list[int]]
    stops: set[int]
    sample: Sample


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
        model: of `frugal_model`.
        folder: temporary, on a disk with room for the logits.
        switches_off: without its adapter the model is the base, which is measured too.
        drafts: what a file answers to each prompt, or nothing; where the reference agrees, it answers in one pass, that
            of `texts` where they are as long.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    sequences, vocabulary = _sequences(request.texts), _vocabulary(model)
    tuned_file, base_file = folder / "tuned.f32", folder / "base.f32"
    chosen = first_of(sequences, request.sample.base_tokens) if switches_off else []
    require_space(folder, 4 * vocabulary * (_tokens(sequences) + request.sample.base_tokens), "the reference's logits")
    guessed = _guessed(drafts(), request.prompts, vocabulary, request.sample.answer_tokens)
    asked = list(zip(request.prompts, guessed, strict=True))
    after: list[Any] = [None] * len(asked)
    with open(tuned_file, "wb") as tuned:
        _pass(
            model,
            [
                *(_Text(sequence.ids, partial(_put, tuned, sequence.first)) for sequence in sequences),
                *(_Text(ids + more, partial(_keep, after, n, len(ids))) for n, (ids, more) in enumerate(asked)),
            ],
        )
    if chosen:
        with model.disable_adapter(), open(base_file, "wb") as off:
            _pass(model, [_Text(sequence.ids, partial(_put, off, sequence.first)) for sequence in chosen])
    answers = [
        _answer(model, *one, rows, request.stops, request.sample.answer_tokens)
        for one, rows in zip(asked, after, strict=True)
    ]
    why = "" if switches_off else "there is no base to compare with"
    files = (tuned_file, base_file if chosen else None)
    return ReferenceMeasurements(
        sequences, vocabulary, *files, _tokens(chosen), why, answers=answers, sample=request.sample
    )


def measure_base(base: Path, found: ReferenceMeasurements, folder: Path) -> ReferenceMeasurements:
    """The same with a base that is a model of its own, run after the reference was freed."""
    chosen, file = first_of(found.sequences, found.sample.base_tokens), folder / "base.f32"
    with frugal_model(base) as model:
        width = _vocabulary(model)
        if width != found.vocabulary:
            why = f"the base knows {width} tokens and the tuned model {found.vocabulary}"
            return replace(found, why_no_base=why)
        with open(file, "wb") as out:
            _pass(model, [_Text(sequence.ids, partial(_put, out, sequence.first)) for sequence in chosen])
    return replace(found, base=file, base_rows=_tokens(chosen), why_no_base="")


def measure_rounded(
    model: Any, adapter: Path | None, rounding: Rounding | None, found: ReferenceMeasurements, folder: Path
) -> ReferenceMeasurements:
    """The same texts by the reference with its weights rounded as the merge stored them, which it has from then on; and
    of a mixture of experts how far rounding in products moves it.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    if not found.sequences:
        return found
    if adapter is None or rounding is None:
        return _with_noise(model, found, folder)
    file = folder / "rounded.f32"
    require_space(folder, 4 * found.vocabulary * _tokens(found.sequences), "the rounded reference's logits")
    with rounded(model, adapter, rounding.kinds, rounding.stored) as merged:
        cost = _distance(merged, found.tuned, file, found)
        return _with_noise(merged, replace(found, rounded=file, stored=rounding.stored, cost=cost), folder)


def _with_noise(model: Any, found: ReferenceMeasurements, folder: Path) -> ReferenceMeasurements:
    if not is_mixture(model.config):
        return found
    noise, file = {}, folder / "noise.f32"
    require_space(folder, 4 * found.vocabulary * _tokens(found.sequences), "the logits of rounded products")
    for kind in TYPES:
        with rounded_products(model, kind):
            moved = _distance(model, found.made_of, file, found)
        if moved is not None:
            noise[kind] = moved
    file.unlink()
    return replace(found, noise=noise)


def _distance(model: Any, reference: Path, file: Path, found: ReferenceMeasurements) -> Distance | None:
    """How far the model is, on the same texts, from the logits in a file. Its own go into
    `file`. None where no token follows another."""
    import numpy as np

    with open(file, "wb") as out:
        _pass(model, [_Text(one.ids, partial(_put, out, one.first)) for one in found.sequences])
    own, other = (np.memmap(each, np.float32, "r").reshape(-1, found.vocabulary) for each in (reference, file))
    parts = [
        compare_logits(own[one.first : end], other[one.first : end], np.asarray(one.ids[1:]))
        for one in found.sequences
        if (end := one.first + len(one.ids) - 1) > one.first
    ]
    return summarize(join(parts)) if parts else None


def first_of(sequences: list[Sequence], tokens: int) -> list[Sequence]:
    """The first few, of at most so many tokens, and one at least."""
    return [s for s in sequences if s is sequences[0] or s.first + len(s.ids) <= tokens]


def _sequences(texts: list[list[int]]) -> list[Sequence]:
    made, first = [], 0
    for ids in texts:
        made.append(Sequence(ids, first))
        first += len(ids)
    return made


def _tokens(sequences: Iterable[Sequence]) -> int:
    return sum(len(sequence.ids) for sequence in sequences)


def _vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    return int((logits(model, [0]).shape[1]) if head is None else len(head.weight))


@dataclass(frozen=True)
class _Text:
    """One of those that a model reads; `take` is given its logits [tokens, vocabulary]."""

    ids: list[int]
    take: Callable[[np.ndarray], object]


def _put(file: BinaryIO, first: int, rows: np.ndarray) -> None:
    """Writes logits where those of row `first` belong."""
    file.seek(first * rows.shape[1] * rows.itemsize)
    rows.tofile(file)


def _keep(after: list[Any], number: int, prompt_tokens: int, rows: np.ndarray) -> None:
    """Keeps what follows a prompt, and each token of its draft: [1 + draft, vocabulary]."""
    after[number] = rows[prompt_tokens - 1 :].copy()


def _pass(model: Any, texts: list[_Text]) -> None:
    """In any order. What fills short ones up stands after them, where a causal model never looks."""
    import torch

    for group in _groups([len(text.ids) for text in texts]):
        chosen = [texts[number] for number in group]
        longest = len(chosen[-1].ids)
        filled = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in chosen])
        with torch.no_grad():
            found = model(input_ids=filled, use_cache=False).logits.float().numpy()
        for text, rows in zip(chosen, found, strict=True):
            text.take(rows[: len(text.ids)])


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Numbers of texts that one pass takes together, short ones first: as long as filling up costs less than a pass."""
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
    """A draft for each prompt. A file of another model may answer with tokens that this one does not have."""
    return [list(takewhile(lambda token: token < vocabulary, draft))[:most] for draft in drafts] or [[]] * len(prompts)


def _answer(
    model: Any, prompt: list[int], draft: list[int], pass_: np.ndarray, stops: set[int], most: int
) -> ReferenceAnswer:
    """The greedy answer. One pass over prompt and draft said what the model answers after each token of the draft; as
    far as the two agree (https://arxiv.org/abs/2211.17192) nothing is computed a token at a time.

    Args:
        pass_: logits that follow the prompt, and each token of the draft.
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
    past, given = None, prompt + ids
    with torch.no_grad():
        while not done():
            out = model(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            past = getattr(out, "past_key_values", None)  # Mamba has another memory, so it reads all again
            take(out.logits[0, -1])
            given = prompt + ids if past is None else ids[-1:]
    return ReferenceAnswer(prompt, ids, ids[-1] in stops, np.stack(rows))
