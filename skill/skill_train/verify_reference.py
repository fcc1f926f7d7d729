"""What the reference says: logits on held-out text and greedy answers, kept in files while llama.cpp is at work.

The models are computed one after the other and freed, so reference and base never lie in memory together; llama.cpp
works on a file beside the reference only where memory has room for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.reference import logits
from skill_train.reference_stored import frugal_model
from skill_train.run_dir import require_space
from skill_train.verify_texts import Sample

if TYPE_CHECKING:
    import numpy as np

_PASS_TOKENS = 512  # of 152,000 logits each: 311 MB
_PASS_COST = 40  # tokens: reading the weights of 494M takes as long as computing so many (2 cores, 2026-11)


@dataclass(frozen=True)
class Sequence:
    """Tokens that are compared; `first` is the row of its first token in the files of logits."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class Answer:
    """What the reference answers greedily to `prompt`; `rows` holds its log-probabilities, [steps, vocabulary]."""

    prompt: list[int]
    ids: list[int]
    stopped: bool
    rows: np.ndarray


@dataclass(frozen=True)
class Measured:
    """Everything that files are compared with.

    Attributes:
        vocabulary: width of the logits.
        tuned: file of float32 logits [tokens, vocabulary].
        base: the same of the base, for the first `base_rows` tokens; None without a base.
        why_no_base: the reason then.
    """

    sequences: list[Sequence]
    vocabulary: int
    tuned: Path
    base: Path | None
    base_rows: int
    why_no_base: str
    answers: list[Answer] = field(default_factory=list)
    sample: Sample = field(default_factory=Sample)

    @property
    def longest(self) -> int:
        """Tokens of context that llama.cpp needs."""
        lengths = [len(s.ids) for s in self.sequences] + [
            len(a.prompt) + self.sample.answer_tokens for a in self.answers
        ]
        return max(lengths, default=1)


def measure(
    model: Any,
    *,
    texts: list[list[int]],
    prompts: list[list[int]],
    stops: set[int],
    sample: Sample,
    folder: Path,
    switches_off: bool,
    drafts: Callable[[], list[list[int]]] = list,
) -> Measured:
    """Runs the reference.

    Args:
        model: of `frugal_model`.
        texts: token ids to compare on.
        prompts: token ids to answer.
        stops: ids that end an answer.
        sample: how many tokens of the base and of each answer.
        folder: temporary, on a disk with room for the logits.
        switches_off: without its adapter the model is the base, which is measured too.
        drafts: asked after the base: what a file answers to each prompt, or nothing; where the reference agrees, it
            answers in one pass, that of `texts` where they are as long.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    sequences = _sequences(texts)
    tuned_file, base_file = folder / "tuned.f32", folder / "base.f32"
    chosen, vocabulary = first_of(sequences, sample.base_tokens), _vocabulary(model)
    require_space(folder, 4 * vocabulary * (_tokens(sequences) + sample.base_tokens), "the reference's logits")
    if switches_off:
        with model.disable_adapter():
            _write(model, chosen, base_file)
    guessed = _guessed(drafts(), prompts, vocabulary, sample.answer_tokens)
    asked = list(zip(prompts, guessed, strict=True))
    after = _write(model, sequences, tuned_file, asked)
    answers = [_answer(model, *one, rows, stops, sample.answer_tokens) for one, rows in zip(asked, after, strict=True)]
    base_rows, why = (_tokens(chosen), "") if switches_off else (0, "there is no base to compare with")
    files = (tuned_file, base_file if base_rows else None)
    return Measured(sequences, vocabulary, *files, base_rows, why, answers=answers, sample=sample)


def measure_base(base: Path, found: Measured, folder: Path) -> Measured:
    """The same with a base that is a model of its own, run after the reference was freed."""
    chosen, file = first_of(found.sequences, found.sample.base_tokens), folder / "base.f32"
    with frugal_model(base) as model:
        width = _vocabulary(model)
        if width != found.vocabulary:
            why = f"the base knows {width} tokens and the tuned model {found.vocabulary}"
            return replace(found, why_no_base=why)
        _write(model, chosen, file)
    return replace(found, base=file, base_rows=_tokens(chosen), why_no_base="")


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


def _write(
    model: Any, sequences: list[Sequence], file: Path, asked: Collection[tuple[list[int], list[int]]] = ()
) -> list[np.ndarray]:
    """Writes the logits of sequences to a file.

    Args:
        asked: prompts and what may follow them.

    Returns:
        for each prompt the logits [1 + draft, vocabulary] that follow it, and each token of its draft.
    """
    firsts = [len(prompt) - 1 for prompt, _ in asked]
    texts = [*(sequence.ids for sequence in sequences), *(prompt + draft for prompt, draft in asked)]
    after: list[Any] = [None] * len(firsts)
    with open(file, "wb") as out:
        for number, rows in _passes(model, texts):
            if number < len(sequences):
                out.seek(sequences[number].first * rows.shape[1] * rows.itemsize)
                rows.tofile(out)
            else:
                at = number - len(sequences)
                after[at] = rows[firsts[at] :].copy()
    return after


def _passes(model: Any, texts: list[list[int]]) -> Iterator[tuple[int, np.ndarray]]:
    """Number and logits [tokens, vocabulary] of each text, in any order. What fills short texts up stands after them,
    where a causal model never looks."""
    import torch

    for group in _groups([len(ids) for ids in texts]):
        longest = len(texts[group[-1]])
        filled = torch.tensor([texts[number] + [0] * (longest - len(texts[number])) for number in group])
        with torch.no_grad():
            found = model(input_ids=filled, use_cache=False).logits.float().numpy()
        for number, rows in zip(group, found, strict=True):
            yield number, rows[: len(texts[number])]


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


def _answer(model: Any, prompt: list[int], draft: list[int], pass_: np.ndarray, stops: set[int], most: int) -> Answer:
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
            past = out.past_key_values
            take(out.logits[0, -1])
            given = ids[-1:]
    return Answer(prompt, ids, ids[-1] in stops, np.stack(rows))
