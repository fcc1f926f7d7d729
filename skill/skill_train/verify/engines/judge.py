"""Adds what engines make of the files of a proof to its findings."""

from __future__ import annotations

from dataclasses import dataclass

from skill_train.core.console import Bar
from skill_train.llama.engines.answers import PYTHON_SERVER
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.pictures.compare import Pair
from skill_train.reference.pictures import PictureQuestion
from skill_train.run.train_record import Row
from skill_train.run.verify_record import NotChecked
from skill_train.verify.engines.check import EngineRequest, check_engines
from skill_train.verify.engines.pictures import PairInEngines, check_pair_in_engines
from skill_train.verify.engines.questions import engine_questions
from skill_train.verify.questions import Questions
from skill_train.verify.run_checks import Findings


@dataclass(frozen=True)
class InEngines:
    """What is served, and what is asked.

    Attributes:
        engines: version by name; empty for one that is not here.
        rows: of text, held out where there are some.
        files: language models.
        pictures: what the pairs were asked; empty where none was judged.
    """

    engines: dict[str, str]
    questions: Questions
    rows: list[Row]
    files: list[GgufFile]
    projectors: list[GgufFile]
    pictures: list[PictureQuestion]

    @property
    def here(self) -> list[str]:
        return [name for name, version in self.engines.items() if version]


def judge_in_engines(request: InEngines, findings: Findings, progress: Bar) -> None:
    """Adds the checks of each language model, and of each pair, in each engine."""
    for name, version in request.engines.items():
        if not version:
            why = "not installed" if name == PYTHON_SERVER else "not on PATH"
            findings.add(NotChecked("engine_prompts", "every file", f"{name}: {why}"))
    if not request.here:
        return
    broken = {check.file for check in findings.checks if check.name == "loads" and check.verdict == "fail"}
    files = [gguf for gguf in request.files if gguf.path.name not in broken]
    tokenizer, most = request.questions.tokenizer, request.questions.sample.answer_tokens
    expected = engine_questions(tokenizer, request.rows, most) if tokenizer.chat_template else []
    engine_request = EngineRequest(request.here, expected, tokenizer)
    findings.add(*check_engines(files, engine_request, progress))
    for pair in (Pair(gguf.path, projector.path) for projector in request.projectors for gguf in files):
        _judge_pair(pair, request, findings, progress)


def _judge_pair(pair: Pair, request: InEngines, findings: Findings, progress: Bar) -> None:
    if not request.pictures:
        why = "the pair was not judged, so there is nothing to hold an engine to"
        findings.add(*(NotChecked("engine_pictures", pair.text.name, f"{name}: {why}") for name in request.here))
        return
    tokenizer, most = request.questions.tokenizer, request.questions.sample.answer_tokens
    pair_request = PairInEngines(request.here, pair, request.pictures, tokenizer, most)
    findings.add(*check_pair_in_engines(pair_request, progress))
