"""Greedy answers by llama.cpp against the reference's, up to the first near-tie."""

from typing import Any

from skill_train.run.verify_record import Check, Finding, NotChecked, worst
from skill_train.verify.check import judged, parting_place
from skill_train.verify.reference_answers import ReferenceAnswer
from skill_train.verify.thresholds import Limits

_NEVER = float("inf")  # the gap when only one of the two answers ends


def check_answers(
    file: str, answers: list[ReferenceAnswer], file_answers: list[list[int]], limits: Limits, tokenizer: Any
) -> Finding:
    """Checks that the answers agree token by token until the reference itself is undecided, and end where it ends.

    Where an answer parts from the reference, the reference prefers its own token by some nats. The figure is the
    largest of these gaps.
    """
    if not answers:
        return NotChecked("answers", file, "no prompt was short enough to answer")
    gaps, verdicts, widest_parting = [0.0], [], ""
    for answer, ids in zip(answers, file_answers, strict=True):
        gap, parting = _parting(answer, ids, tokenizer)
        if gap > max(gaps):
            widest_parting = parting
        gaps.append(gap)
        verdicts.append(judged(gap, limits.gap))
    equal = sum(answer.ids == ids for answer, ids in zip(answers, file_answers, strict=True))
    ended = sum(answer.stopped for answer in answers)
    detail = f"{equal} of {len(answers)} answers are equal, the reference ends {ended} of them itself"
    figures = {"equal": equal, "answers": len(answers), "reference_stopped": ended, "fail_above": limits.gap[1]}
    figure = max(gaps) if max(gaps) < _NEVER else "it does not end where the reference ends"
    detail += f"; {widest_parting}" if widest_parting else ""
    return Check("answers", file, worst(verdicts), figure, limits.gap[0], detail, figures)


def _parting(answer: ReferenceAnswer, ids: list[int], tokenizer: Any) -> tuple[float, str]:
    """By how many nats the reference prefers its own token where the two part, and what each wrote there.

    Equal answers have a gap of 0.
    """
    at = parting_place(answer.ids, ids)
    if at == min(len(answer.ids), len(ids)):
        if len(answer.ids) == len(ids):
            return 0.0, ""
        # The answers are equal so far, and only one of the two ends here. llama.cpp may know more special tokens that
        # end an answer than the reference lists, such as those for filling gaps in code.
        if len(ids) < len(answer.ids) and ids[-1] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder):
            return 0.0, ""
        who = "llama.cpp goes on" if len(ids) > len(answer.ids) else "llama.cpp stops"
        return _NEVER, f"{who} after {tokenizer.decode(answer.ids)[-40:]!r}, where the reference does not"
    row = answer.rows[at]
    gap = float(row[answer.ids[at]] - row[ids[at]]) if ids[at] < len(row) else _NEVER
    own, other = tokenizer.decode([answer.ids[at]]), tokenizer.decode([ids[at]])
    return gap, f"at token {at} llama.cpp answers {other!r} for {own!r}, which the reference prefers by {gap:.2g} nats"
