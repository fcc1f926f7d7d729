"""Adds the checks in engines to the findings of a proof."""

from dataclasses import dataclass

from skill_train.core.console import Bar
from skill_train.llama.engines.answers import PYTHON_SERVER
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.pictures.compare import Pair
from skill_train.reference.pictures import PictureQuestion
from skill_train.run.train_record import Row
from skill_train.run.verify_record import NotChecked
from skill_train.verify.check import Findings
from skill_train.verify.engines.check import check_engines
from skill_train.verify.engines.pictures import check_pair_in_engines, picture_questions
from skill_train.verify.engines.questions import engine_questions
from skill_train.verify.questions import Questions


@dataclass(frozen=True)
class InEngines:
    """What is served, and what is asked."""

    engines: dict[str, str]  # version by name; empty for one that is not here
    questions: Questions
    rows: list[Row]  # of text, held out where there are some
    files: list[GgufFile]  # language models
    projectors: list[GgufFile]
    pictures: list[PictureQuestion]  # what the pairs were asked; empty where none was judged


def judge_in_engines(request: InEngines, findings: Findings, progress: Bar) -> None:
    """Adds the checks of each language model, and of each pair, in each engine."""
    for name, version in request.engines.items():
        if not version:
            why = "not installed" if name == PYTHON_SERVER else "not on PATH"
            findings.add(NotChecked("engine_prompts", "every file", f"{name}: {why}"))
    here = [name for name, version in request.engines.items() if version]
    if not here:
        return
    broken = {check.file for check in findings.checks if check.name == "loads" and check.verdict == "fail"}
    files = [gguf for gguf in request.files if gguf.path.name not in broken]
    tokenizer, most = request.questions.tokenizer, request.questions.sample.answer_tokens
    expected = engine_questions(tokenizer, request.rows, most) if tokenizer.chat_template else []
    findings.add(*check_engines(files, expected, here, tokenizer, progress))
    asked = picture_questions(tokenizer, request.pictures, most) if request.pictures else []
    for pair in (Pair(gguf.path, projector.path) for projector in request.projectors for gguf in files):
        if request.pictures:
            findings.add(*check_pair_in_engines(pair, asked, here, tokenizer, progress))
        else:
            why = "the pair was not judged, so there is nothing to hold an engine to"
            findings.add(*(NotChecked("engine_pictures", pair.text.name, f"{name}: {why}") for name in here))
