"""What the reference says: logits on held-out text and greedy answers, kept in files while llama.cpp is at work.

The models are computed one after the other and freed, so the reference, the base and llama.cpp never lie in memory
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.adapter import read_adapter
from skill_train.reference import logits, reference_model
from skill_train.run_dir import require_space
from skill_train.verify_texts import Sample

if TYPE_CHECKING:
    import numpy as np


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
    answer_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens of context that llama.cpp needs."""
        lengths = [len(s.ids) for s in self.sequences] + [len(a.prompt) + self.answer_tokens for a in self.answers]
        return max(lengths, default=1)


def measure(
    reference: Path,
    *,
    adapter: Path | None,
    base: Path | None,
    texts: list[list[int]],
    prompts: list[list[int]],
    stops: set[int],
    sample: Sample,
    folder: Path,
    also: Callable[[Any], None] = lambda model: None,
) -> Measured:
    """Runs the reference, then the base: the same model without its adapter, where that is what it was trained on.

    Args:
        reference: model folder; with `adapter` on top it is the model that was trained.
        texts: token ids to compare on.
        prompts: token ids to answer.
        stops: ids that end an answer.
        sample: how many tokens of the base and of each answer.
        folder: temporary, on a disk with room for the logits.
        also: called with the reference before it is freed, with the adapter merged into it.

    Raises:
        DecisionNeeded: not enough disk for the logits.
    """
    sequences = _sequences(texts)
    tuned_file, base_file = folder / "tuned.f32", folder / "base.f32"
    with reference_model(reference, adapter) as model:
        vocabulary = _vocabulary(model)
        require_space(folder, 4 * vocabulary * (_tokens(sequences) + sample.base_tokens), "the reference's logits")
        _write(model, sequences, tuned_file)
        answers = [_answer(model, prompt, stops, sample.answer_tokens) for prompt in prompts]
        chosen, switched = _of_base(sequences, sample.base_tokens), base == reference and _switches_off(adapter)
        if switched:
            with model.disable_adapter():
                _write(model, chosen, base_file)
        also(model.merge_and_unload() if adapter is not None else model)
    base_rows, why = (_tokens(chosen), "") if switched else (0, "there is no base to compare with")
    if base is not None and not switched:
        base_rows, why = _write_base(base, chosen, vocabulary, base_file)
    files = (tuned_file, base_file if base_rows else None)
    return Measured(sequences, vocabulary, *files, base_rows, why, answers=answers, answer_tokens=sample.answer_tokens)


def _of_base(sequences: list[Sequence], tokens: int) -> list[Sequence]:
    """The first few: the share of the tuning uses every token's whole distribution."""
    return [s for s in sequences if s is sequences[0] or s.first + len(s.ids) <= tokens]


def _switches_off(adapter: Path | None) -> bool:
    """Without its adapter, PEFT's model is the base: A and B alone, no trained biases and nothing saved whole."""
    if adapter is None:
        return False
    tuned = read_adapter(adapter)
    return not tuned.replaced and all(set(parts) == {"a", "b"} for parts in tuned.modules.values())


def _sequences(texts: list[list[int]]) -> list[Sequence]:
    made, first = [], 0
    for ids in texts:
        made.append(Sequence(ids, first))
        first += len(ids)
    return made


def _tokens(sequences: Iterable[Sequence]) -> int:
    return sum(len(sequence.ids) for sequence in sequences)


def _vocabulary(model: Any) -> int:
    return int(logits(model, [0]).shape[1])


def _write(model: Any, sequences: list[Sequence], file: Path) -> None:
    with open(file, "wb") as out:
        for sequence in sequences:
            logits(model, sequence.ids).tofile(out)


def _write_base(base: Path, chosen: list[Sequence], vocabulary: int, file: Path) -> tuple[int, str]:
    """Rows written, and why none were."""
    with reference_model(base) as model:
        if _vocabulary(model) != vocabulary:
            return 0, f"the base knows {_vocabulary(model)} tokens and the tuned model {vocabulary}"
        _write(model, chosen, file)
    return _tokens(chosen), ""


def _answer(model: Any, prompt: list[int], stops: set[int], most: int) -> Answer:
    import numpy as np
    import torch

    ids: list[int] = []
    rows, past, given = [], None, prompt
    with torch.no_grad():
        while len(ids) < most and not (ids and ids[-1] in stops):
            out = model(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            past, row = out.past_key_values, torch.log_softmax(out.logits[0, -1].float(), dim=-1)
            rows.append(row.numpy())
            ids.append(int(row.argmax()))
            given = ids[-1:]
    return Answer(prompt, ids, ids[-1] in stops, np.stack(rows))
