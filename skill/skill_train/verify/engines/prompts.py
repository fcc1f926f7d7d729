"""How the prompt that an engine makes of a conversation differs from the model's own."""

from typing import Any

from skill_train.core.errors import NotInstalled, SkillTrainError
from skill_train.llama.engines.answers import EngineAnswer
from skill_train.llama.pictures.compare import MARKER
from skill_train.run.verify_record import Check
from skill_train.verify.check import parting_place
from skill_train.verify.engines.questions import Expected

_AROUND = 40


def difference(answer: EngineAnswer, expected: Expected, tokens: int, tokenizer: Any) -> str:
    """What is wrong with the prompt of an answer, or with the number of its tokens; empty for nothing."""
    if answer.refused:
        return f"it refuses a conversation that the model's template takes: {answer.refused}"
    if answer.ids is not None:
        if answer.ids == expected.ids:
            return ""
        return _described(str(tokenizer.decode(answer.ids)), str(tokenizer.decode(expected.ids)), tokenizer)
    if why := difference_of_texts(answer.prompt, expected.text, tokenizer):
        return why
    return _difference_of_lengths(answer, tokens)


def difference_of_texts(own: str | None, expected: str, tokenizer: Any) -> str:
    """How the text of a prompt differs; empty for nothing. A missing BOS is left to the engine's tokenizer."""
    bos = tokenizer.bos_token or ""
    if own is not None and own.removeprefix(bos) == expected.removeprefix(bos):
        return ""
    own = own or ""
    return _described(bos + own if expected.startswith(bos) and not own.startswith(bos) else own, expected, tokenizer)


def _difference_of_lengths(answer: EngineAnswer, expected: int) -> str:
    """How the number of tokens that the engine read differs. A BOS that it reads twice is not in the prompt's text."""
    if answer.no_answer or answer.prompt_tokens == expected:
        return ""
    if answer.prompt_tokens is None:
        return "it does not tell how many tokens it makes of the prompt"
    return f"it reads {answer.prompt_tokens} tokens in a prompt that has {expected}"


def unanswered(check: str, file: str, engine: str, error: SkillTrainError) -> Check:
    """A failed check of an engine that could not be asked, or did not serve the file."""
    detail, expected = f"{engine} does not serve the file: {error.message} ({error.got[-200:]})", "serves it"
    if isinstance(error, NotInstalled):
        detail, expected = (
            f"{engine} cannot be asked: {error.message}; it takes {error.expected or error.hint}",
            "an answer",
        )
    return Check(check, file, "fail", error.code, expected, detail, {"engine": engine})


def _described(own: str, expected: str, tokenizer: Any) -> str:
    """The difference, and its name where it is a known one."""
    bos = tokenizer.bos_token or ""
    if bos and own == bos + expected:
        return f"it puts an extra {bos!r} in front of the prompt"
    if "[INST]" in own and "[INST]" not in expected:
        return "it writes llama-2's prompt in place of the model's own template"
    if own.endswith(expected):
        return f"it puts {own[: -len(expected)][:_AROUND]!r} in front of the prompt"
    at = parting_place(own, expected)
    around = slice(max(0, at - 20), at + _AROUND)
    difference = f"at character {at} it writes {own[around]!r}, and the trained model read {expected[around]!r}"
    if own.count(MARKER) < expected.count(MARKER):
        return f"it leaves out a picture: {difference}"
    if MARKER in own and own.replace(MARKER, "") == expected.replace(MARKER, ""):
        return f"it puts a picture in another place: {difference}"
    return difference
