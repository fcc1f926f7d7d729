"""Asks engines about pictures: a language model and its projector in the programs that serve them.

As with texts, an engine is judged by what this project's own llama.cpp makes of the same pair: the prompt with a marker
for each picture, the number of its tokens, the greedy answer and its end. That pair was held against the trained model
by the checks of `verify.pictures`. Each picture is sent as a PNG file, which every engine decodes alike.
"""

import io
from dataclasses import dataclass, replace
from typing import Any

from skill_train.core.console import Bar
from skill_train.core.errors import NativeCrash, SkillTrainError, VerificationFailed
from skill_train.core.files import scratch_folder
from skill_train.llama.engines.answers import LLAMA_SERVER, OLLAMA, PYTHON_SERVER, EngineQuestion, EngineRun
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.pictures.answers_worker import PairAnswers, PairQuestion, ask
from skill_train.llama.pictures.compare import MARKER, Pair
from skill_train.llama.template import Conversation, before_last_answer
from skill_train.machine.read import physical_cores
from skill_train.reference.pictures import GREY, PictureQuestion, with_markers
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import judged, parting_place
from skill_train.verify.engines.check import run_engine
from skill_train.verify.engines.partings import Parting, Vocabulary, gaps, parted, unlike
from skill_train.verify.engines.prompts import difference, unanswered
from skill_train.verify.engines.questions import Expected, with_prompts
from skill_train.verify.thresholds import ENGINE_GAP

_NAME = "engine_pictures"
_ROOM = 2048  # tokens: an engine may make more of a picture, as Ollama does
_OF_BLANK = (0.25, 0.5)  # shares of the gap of grey pictures: an engine that shows grey pictures must not pass
_OWN_PROMPTS = (
    f"{PYTHON_SERVER}: it writes prompts with pictures by handlers of its own, one for each family, and not by the "
    "file's template: serve a pair with llama-server"
)
# Ollama's: see its llm/llama_server.go of 2026-08-21 (`llamaServerChatMessage`, `qwenVLServerArgs`), and seen
# with 0.33.0-rc2: pictures of 36 tokens had 1,024 and more.
_REMEDY = {
    LLAMA_SERVER: "compare its version with that of llama-cpp-python, and let it take the file's own template",
    OLLAMA: "0.30 and newer puts pictures behind the words of their message, and gives Qwen-VL 1,024 tokens for each: "
    "serve the pair with llama-server, or train on what Ollama shows (references/engines.md)",
}


@dataclass(frozen=True)
class _Own:
    """What llama.cpp makes of the pair here, in the order of the questions."""

    answers: list[list[int]]
    ends: frozenset[int]  # the tokens that ended them
    prompt_tokens: list[int]
    # The pair is also asked about grey pictures of the same sizes. Where the two answers part: the nats by which it
    # prefers its own token to the one for grey pictures. Equal answers have no gap.
    blank_gaps: list[float]


def check_pair_in_engines(
    pair: Pair, expected: list[Expected], engines: list[str], tokenizer: Any, progress: Bar
) -> list[Finding]:
    """`engine_pictures` of each engine, under the name of the language model.

    Args:
        expected: the result of `picture_questions`.
    """
    name = pair.text.name
    if not expected:
        why = "no picture can be asked about: there is no chat template, or no question before an answer"
        return [NotChecked(_NAME, name, f"{engine}: {why}") for engine in engines]
    not_checked = [NotChecked(_NAME, name, _OWN_PROMPTS) for engine in engines if engine == PYTHON_SERVER]
    engines = [engine for engine in engines if engine != PYTHON_SERVER]
    if not engines:
        return [*not_checked]
    try:
        own = _own_answers(pair, expected)
    except (VerificationFailed, NativeCrash) as error:
        why = f"llama.cpp cannot run the pair: {error.message}"
        return [*not_checked, *(NotChecked(_NAME, name, f"{engine}: {why}") for engine in engines)]
    checks = list[Finding]()
    for number, engine in enumerate(engines):
        progress(number, len(engines), f"{engine}: {name} with pictures")
        checks.append(_checked(engine, pair, own, expected, tokenizer))
    return [*not_checked, *checks]


def picture_questions(tokenizer: Any, questions: list[PictureQuestion], most: int) -> list[Expected]:
    """Questions as engines get them, each with the prompt of llama.cpp's server.

    Args:
        questions: with their answers, which engines do not get.
        most: tokens that an answer may have.
    """
    if not tokenizer.chat_template:
        return []
    pictured = [each for question in questions if (each := _engine_question(question, most)).pictures]
    marked = [Conversation(with_markers(each.conversation.messages, MARKER), None, True) for each in pictured]
    return with_prompts(tokenizer, pictured, marked)


def _engine_question(question: PictureQuestion, most: int) -> EngineQuestion:
    """The turns before the last answer, with their pictures."""
    before = before_last_answer(question.messages)
    count = sum(part["type"] == "image" for message in before for part in message["content"])
    return EngineQuestion(Conversation(before, None, True), most, tuple(map(_png, question.pictures[:count])))


def _png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


# --- What llama.cpp answers here ---


def _own_answers(pair: Pair, expected: list[Expected]) -> _Own:
    count, grey = len(expected), [replace(each, question=_grey(each.question)) for each in expected]
    result = _ask(pair, [*expected, *grey], [[] for _ in range(2 * count)])
    ends = {ids[-1] for ids, stopped in zip(result.answers, result.stopped, strict=True) if stopped}
    blank = [
        (each, Parting(answer[:at], answer[at], other[at]))
        for each, answer, other in zip(expected, result.answers[:count], result.answers[count:], strict=True)
        if (at := parting_place(answer, other)) < min(len(answer), len(other))
    ]
    return _Own(result.answers[:count], frozenset(ends), result.prompt_tokens[:count], _gaps(pair, blank))


def _grey(question: EngineQuestion) -> EngineQuestion:
    from PIL import Image

    sizes = [Image.open(io.BytesIO(picture)).size for picture in question.pictures]
    return replace(question, pictures=tuple(_png(Image.new("RGB", size, GREY)) for size in sizes))


def _gaps(pair: Pair, partings: list[tuple[Expected, Parting]]) -> list[float]:
    """By how many nats the pair prefers its own token at each parting."""
    if not partings:
        return []
    answers = [[*parting.before, token] for _, parting in partings for token in (parting.own, parting.other)]
    return gaps(_ask(pair, [expected for expected, _ in partings for _ in range(2)], answers).losses)


def _ask(pair: Pair, expected: list[Expected], answers: list[list[int]]) -> PairAnswers:
    with scratch_folder() as folder:
        questions = []
        for number, (each, tokens) in enumerate(zip(expected, answers, strict=True)):
            names = [f"{number}-{place}.png" for place in range(len(each.question.pictures))]
            for name, content in zip(names, each.question.pictures, strict=True):
                (folder / name).write_bytes(content)
            questions.append(PairQuestion(each.text, names, tokens, 1 if tokens else each.question.most))
        return ask(pair, questions, folder=folder, threads=physical_cores())


# --- What an engine answers ---


def _checked(engine: str, pair: Pair, own: _Own, expected: list[Expected], tokenizer: Any) -> Finding:
    asked = zip(own.prompt_tokens, expected, strict=True)
    context = 2 * max(tokens + each.question.most for tokens, each in asked) + _ROOM
    try:
        run = run_engine(engine, pair.text, expected, context, pair.projector)
    except SkillTrainError as error:
        return unanswered(_NAME, pair.text.name, engine, error)
    return _judged(run, pair, own, expected, tokenizer)


def _judged(run: EngineRun, pair: Pair, own: _Own, expected: list[Expected], tokenizer: Any) -> Finding:
    asked = zip(run.answers, expected, own.prompt_tokens, strict=True)
    wrong = [why for each in asked if (why := difference(*each, tokenizer))]
    silent = [answer.no_answer for answer in run.answers if answer.no_answer]
    if not wrong and not silent:
        return _judged_answers(run, pair, own, expected, tokenizer)
    count, who = len(expected), f"{run.engine} {run.version}"
    detail = (
        f"{who} passes {len(wrong)} of {count} questions about pictures to the model wrongly: {wrong[0]}; "
        f"{_REMEDY[run.engine]}"
        if wrong
        else f"{who} gives no answer to {len(silent)} of {count} questions about pictures: {silent[0]}"
    )
    figures = {"engine": run.engine, "version": run.version, "looked_at": count}
    return Check(_NAME, pair.text.name, "fail", len(wrong or silent), 0, detail, figures)


def _judged_answers(run: EngineRun, pair: Pair, own: _Own, expected: list[Expected], tokenizer: Any) -> Finding:
    """Judges the answers to right prompts. Only the pictures could still be others than the ones of the question."""
    words = Vocabulary(tokenizer, read_gguf(pair.text), own.ends)
    partings, ends = parted(zip(run.answers, own.answers, expected, strict=True), words)
    gap, blank = max(_gaps(pair, partings), default=0.0), max(own.blank_gaps, default=0.0)
    name, count, equal = pair.text.name, len(expected), len(expected) - len(partings)
    figures: dict[str, object] = {"engine": run.engine, "version": run.version, "looked_at": count, "equal": equal}
    figures |= {"by_picture": len(own.blank_gaps), "gap_blank": blank}
    detail = f"{run.engine} {run.version} writes {count} questions about pictures as llama.cpp does here, with as many "
    detail += f"tokens, and gives {equal} of {count} answers like it"
    most = min(ENGINE_GAP[0], _OF_BLANK[0] * blank), min(ENGINE_GAP[1], _OF_BLANK[1] * blank)
    if wrong := unlike(ends, most[0], lambda choices: _gaps(pair, choices)):
        return Check(_NAME, name, "fail", len(wrong), 0, f"{detail}; {wrong[0]}", figures)
    if max(gap, blank) < ENGINE_GAP[0]:
        why = f"grey pictures would change the choice of a token by {blank:.2g} nats only, so wrong ones would pass"
        return NotChecked(_NAME, name, f"{detail}; but {why}: ask questions whose answers depend on the picture")
    if gap > most[0]:
        detail += f"; the pair prefers its own token by {gap:.2g} nats: another llama.cpp prepares pictures differently"
    return Check(_NAME, name, judged(gap, most), gap, most[0], detail, figures)
