"""Asks engines the same conversations as the reference, and judges prompts, answers and ends.

An engine is judged by what this project's own llama.cpp answers to the right prompt with the same file. That answer was
held against the trained model by the check `answers`. So a difference here is the engine's own.
"""

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from skill_train.core.console import Bar
from skill_train.core.errors import NotInstalled, SkillTrainError, not_installed
from skill_train.llama import inference
from skill_train.llama.engines import llama_server, ollama, python_server
from skill_train.llama.engines.answers import ALL, ENGINES, LLAMA_SERVER, OLLAMA, PYTHON_SERVER, EngineRun
from skill_train.llama.engines.programs import version_of
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.inference import InferenceJob, Prompt, Scored
from skill_train.machine.read import physical_cores
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import judged
from skill_train.verify.engines.partings import Judged, Parting, Vocabulary, gaps, parted, unlike
from skill_train.verify.engines.prompts import difference, unanswered
from skill_train.verify.engines.questions import Expected
from skill_train.verify.thresholds import ENGINE_GAP

_ROOM = 8
_REMEDY = {
    PYTHON_SERVER: "serve it with: skill-train serve, which takes the template from the file",
    LLAMA_SERVER: "let it use the file's own template, not another one by name or from a file",
    OLLAMA: "it takes the nearest of its own templates: start ollama serve with OLLAMA_GO_TEMPLATE=0 (from 0.30 on), "
    "or serve the file with llama.cpp, and the file's own is rendered",
}


def engine_versions(chosen: tuple[str, ...]) -> dict[str, str]:
    """The version of each chosen engine. With `all`, it is empty for an engine that is not installed.

    Raises:
        NotInstalled: an engine that was named is not installed.
    """
    names = ENGINES if ALL in chosen else tuple(dict.fromkeys(chosen))
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if not version]
    if missing and ALL not in chosen:
        raise _not_here(missing[0])
    return versions


def check_engines(
    files: list[GgufFile], expected: list[Expected], engines: list[str], tokenizer: Any, progress: Bar
) -> list[Finding]:
    """The findings of each engine about each file."""
    if not expected:
        why = "the reference has no chat template, so there is no prompt to hold an engine to"
        return [NotChecked("engine_prompts", gguf.path.name, f"{name}: {why}") for name in engines for gguf in files]
    checks: list[Finding] = []
    for number, gguf in enumerate(files):
        own, ends = _own_answers(gguf, expected)
        words = Vocabulary(tokenizer, gguf, ends)
        for name in engines:
            progress(number, len(files), f"{name}: {gguf.path.name}")
            checks += _checked(name, own, expected, words)
    return checks


def _version(name: str) -> str:
    if name == PYTHON_SERVER:
        return "" if python_server.missing_packages() else metadata.version("llama-cpp-python")
    if shutil.which(name) is None:
        return ""
    return version_of(name, "--version") or "unknown"


def _not_here(name: str) -> NotInstalled:
    if name == PYTHON_SERVER:
        return not_installed(name, "gguf,serve")
    return NotInstalled(
        f"{name} is not on PATH",
        code="missing_package",
        expected=f"the program {name}",
        hint="install the program, or use --engine all, which skips the engines that are not installed",
    )


def _checked(name: str, own: list[list[int]], expected: list[Expected], words: Vocabulary) -> list[Finding]:
    path, context = words.gguf.path, _context(expected)
    try:
        run = run_engine(name, path, expected, context)
    except SkillTrainError as error:
        return [unanswered("engine_prompts", path.name, name, error)]
    asked = list(zip(run.answers, own, expected, strict=True))
    differences = [difference(answer, each, len(each.ids), words.tokenizer) for answer, _, each in asked]
    right = [each for each, why in zip(asked, differences, strict=True) if not why]
    return [_check_prompts(run, path.name, differences), *_check_answers(run, right, words, context)]


def run_engine(
    name: str, gguf: Path, expected: list[Expected], context: int, projector: Path | None = None
) -> EngineRun:
    """Asks an engine the questions. llama_cpp.server is asked without a projector."""
    questions, threads = [each.question for each in expected], physical_cores()
    if name == PYTHON_SERVER:
        return python_server.ask(gguf, questions, context_tokens=context, threads=threads)
    if name == LLAMA_SERVER:
        return llama_server.ask(gguf, questions, context_tokens=context, threads=threads, projector=projector)
    return ollama.ask(gguf, questions, context_tokens=context, projector=projector)


def _context(expected: list[Expected]) -> int:
    return 2 * max(len(each.ids) + each.question.most for each in expected) + _ROOM  # a wrong prompt may be longer


# --- Prompts ---


def _check_prompts(run: EngineRun, file: str, differences: list[str]) -> Check:
    wrong, count = [why for why in differences if why], len(run.answers)
    figures = {"engine": run.engine, "version": run.version, "looked_at": count, **run.figures}
    if wrong:
        detail = f"{run.description}: {wrong[0]}; {_REMEDY[run.engine]}"
        return Check("engine_prompts", file, "fail", len(wrong), 0, detail, figures)
    detail = f"{run.description} writes {count} prompts as the trained model reads them"
    return Check("engine_prompts", file, "pass", 0, 0, detail, figures)


# --- Answers ---


def _own_answers(gguf: GgufFile, expected: list[Expected]) -> tuple[list[list[int]], frozenset[int]]:
    """What llama.cpp answers here to the right prompts, and the tokens that end an answer."""
    prompts = [Prompt(each.ids, each.question.most) for each in expected]
    own = inference.ask(_job(gguf, _context(expected), prompts=prompts))
    return own.answers, frozenset(own.facts.end_of_generation)


def _job(gguf: GgufFile, context: int, **request: Any) -> InferenceJob:
    return InferenceJob(gguf=str(gguf.path), context_tokens=context, threads=physical_cores(), **request)


def _check_answers(run: EngineRun, right: list[Judged], words: Vocabulary, context: int) -> list[Finding]:
    """Judges the answers and their ends, but only for the prompts that the engine wrote right."""
    name, file = run.engine, words.gguf.path.name
    if not right:
        why = f"{name}: no prompt is the model's own, so the answers are to other prompts"
        return [NotChecked("engine_answers", file, why), NotChecked("engine_stops", file, why)]
    silent = [answer.no_answer for answer, _, _ in right if answer.no_answer]
    answered = [each for each in right if not each[0].no_answer]
    partings, ends = parted(answered, words)
    gap = max(_gaps(words.gguf, partings, context), default=0.0)
    equal = len(answered) - len(partings)
    figures = {"engine": name, "version": run.version, "looked_at": len(right), "equal": equal}
    verdict = judged(gap, ENGINE_GAP)
    detail = f"{run.description} gives the same answer as llama.cpp here to {equal} of {len(right)} prompts"
    if silent:
        verdict = "fail"
        detail += f"; it gives no answer to {len(silent)}: {silent[0]}"
    if gap > ENGINE_GAP[0]:
        detail += f"; the file prefers its own token by {gap:.2g} nats: the engine does not take the most likely one"
    answers = Check("engine_answers", file, verdict, gap, ENGINE_GAP[0], detail, figures)
    wrong = unlike(ends, ENGINE_GAP[0], lambda choices: _gaps(words.gguf, choices, context))
    return [answers, _check_stops(run, file, wrong, len(answered), len(ends))]


def _check_stops(run: EngineRun, file: str, wrong: list[str], answered: int, others: int) -> Finding:
    """Whether the engine ends its answers where the file does; `others` counts those with another end."""
    if not answered:
        return NotChecked("engine_stops", file, f"{run.engine}: it gives no answer to a prompt that is the model's own")
    detail = f"{run.description} ends {answered - others} answers where llama.cpp ends them here"
    if others:
        detail += f", and {others} where another token is almost as likely"
    if wrong:
        detail = f"{run.description}: {wrong[0]}"
    figures = {"engine": run.engine, "version": run.version, "looked_at": answered}
    return Check("engine_stops", file, "fail" if wrong else "pass", len(wrong), 0, detail, figures)


def _gaps(gguf: GgufFile, partings: list[tuple[Expected, Parting]], context: int) -> list[float]:
    """By how many nats the file prefers its own token at each parting."""
    if not partings:
        return []
    rows = [
        Scored([*each.before, token], [len(each.before)]) for _, each in partings for token in (each.own, each.other)
    ]
    return gaps(inference.ask(_job(gguf, context, scored=rows)).losses)
