"""Puts every file through every check."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import FileDigest
from skill_train.core.errors import DecisionNeeded, NativeCrash, VerificationFailed
from skill_train.core.worker import ending
from skill_train.llama import inference
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.llama.inference import InferenceJob, InferenceResult, Prompt
from skill_train.llama.template import Conversation, Rendered
from skill_train.machine.read import available_memory_bytes, physical_cores
from skill_train.model.convertible import from_config
from skill_train.program.tokenizer import begins_itself
from skill_train.run import export_record, merge_record
from skill_train.run.export_record import MIX_KEY, ExportedFile
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify import check_answers, check_header, check_logits, check_template, template_branches
from skill_train.verify.check import Findings
from skill_train.verify.check_template import OwnRendering
from skill_train.verify.check_tokens import check_special_tokens, check_tokens, check_trained, with_other_prompts
from skill_train.verify.metadata.check import check_metadata, check_window
from skill_train.verify.metadata.vocabulary import check_stops, check_vocabulary
from skill_train.verify.questions import MeasuredReference
from skill_train.verify.reference_answers import first_of
from skill_train.verify.thresholds import Limits, limits, mix_limits, model_limits
from skill_train.verify.weights.check import WeightChecks
from skill_train.verify.weights.tensors import check_tensors, output_of_its_own

_UNQUANTIZED = ("f32", "f16", "bf16")  # the finest first
_ROOM = 8  # tokens of context to spare
_AT_ONCE = 2  # files; at 0.5B on 2 cores two take 4.2 s, three took 5 to 9 s
_WORK_BYTES = 700_000_000  # of Python, and of llama.cpp for 128 tokens and a vocabulary of 152,000
_PLAIN = ("Hello world", "12 + 30 = 42", "\n")  # texts that get BOS and EOS where the tokenizer adds them


@dataclass(frozen=True)
class Draft:
    """What llama.cpp answered to each prompt with one file. Empty if it was not asked."""

    gguf: GgufFile | None = None
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class PreparedFiles:
    """The files to judge, with everything that was measured of them while the reference was at work.

    Attributes:
        files: the result of `readable`.
        weights: the result of `weights.check.compare_weights`.
        own_templates: the result of the function of that name.
        digests: of all files that are judged, by name.
        exports: the result of `export_records`.
    """

    files: list[GgufFile]
    weights: WeightChecks
    own_templates: dict[str, OwnRendering]
    draft: Draft
    digests: dict[str, FileDigest]
    exports: dict[str, ExportedFile]


def judge(
    reference: MeasuredReference, findings: Findings, run: Path, prepared: PreparedFiles, warn: Warn, progress: Bar
) -> None:
    """Adds the checks of every file to `findings`.

    llama.cpp runs two files at once if memory has room for them, because parts of a run use one core only. On two
    cores, a third file would only make the others wait.
    """
    files, count = prepared.files, len(prepared.digests)
    wrong = {check.file for found in prepared.weights.values() for check in found if _is_wrong(check)}
    plain = unquantized([gguf for gguf in files if gguf.path.name not in wrong])
    largest = sorted(files, key=lambda gguf: gguf.size_bytes)[-_AT_ONCE:]
    at_once = _AT_ONCE if len(largest) == _AT_ONCE and have_room(largest) else 1
    with ending(ThreadPoolExecutor(at_once)) as pool:
        runs = [_started(pool, gguf, reference, prepared, warn, at_once) for gguf in files]
        for number, (gguf, started) in enumerate(zip(files, runs, strict=True)):
            name = gguf.path.name
            progress(number + 1, count + 1, name)
            exported = prepared.exports.get(name)
            findings.add(
                check_header.check_file(gguf),
                check_header.check_digest(gguf, prepared.digests[name], prepared.exports),
                *prepared.weights[name],
                _types(gguf, exported.get("tensor_types") if exported else None),
            )
            confirmed = all(_all_confirmed(prepared.weights[each.path.name], each) for each in (gguf, plain or gguf))
            _judge_static(gguf, plain if plain is not gguf else None, reference, findings, confirmed)
            _judge_running(gguf, reference, started, findings, _limits(gguf, reference, run, exported))
    progress(count + 1, count + 1, "done")


def own_templates(files: list[GgufFile], conversations: list[Conversation]) -> dict[str, OwnRendering]:
    """What each chat template of the files makes of the conversations. The files of one run share one template."""
    by_identity = {check_template.identity(gguf): gguf for gguf in files}
    return {key: check_template.render_own(gguf, conversations) for key, gguf in by_identity.items()}


def draft_of(files: list[GgufFile], prompts: list[list[int]], most: int, reference_bytes: int) -> Draft:
    """Lets llama.cpp answer the prompts while the reference is at work, if memory has room for both.

    It uses half of the cores, and the file that is nearest to the reference. The draft is empty if llama.cpp cannot run
    that file; `judge` reports it later.
    """
    gguf = unquantized(files) or (files[0] if files else None)
    if gguf is None or not prompts or not have_room([gguf], reference_bytes):
        return Draft()
    job = InferenceJob(
        gguf=str(gguf.path),
        context_tokens=max(map(len, prompts), default=0) + most + _ROOM,
        threads=max(1, physical_cores() // 2),
        prompts=[Prompt(ids, most) for ids in prompts],
        together=True,
    )
    try:
        return Draft(gguf, inference.ask(job).answers)
    except (VerificationFailed, NativeCrash, DecisionNeeded):
        return Draft()


def unquantized(files: list[GgufFile]) -> GgufFile | None:
    """The finest unquantized file: the others are compared with it."""
    types = [(check_header.file_type(gguf), gguf) for gguf in files]
    return next((gguf for finest in _UNQUANTIZED for kind, gguf in types if kind == finest), None)


def have_room(files: list[GgufFile], beside_bytes: int = 0) -> bool:
    """Whether free memory has room for the files, for what llama.cpp computes of them, and for `beside_bytes` more."""
    have = available_memory_bytes()
    return have is not None and beside_bytes + sum(gguf.size_bytes + _WORK_BYTES for gguf in files) <= have


@dataclass(frozen=True)
class Shipped:
    """What a user of a file would send for one row.

    Attributes:
        adds: llama.cpp puts its own first token before it.
        refused: why the file's template writes nothing.
    """

    adds: bool
    text: str | None
    refused: str = ""


@dataclass(frozen=True)
class _Run:
    """A run of llama.cpp on one file: what it was sent, and its result to come."""

    own: OwnRendering
    shipped: list[Shipped]
    result: Future[InferenceResult]
    drafted: list[list[int]]


def _started(
    pool: ThreadPoolExecutor,
    gguf: GgufFile,
    reference: MeasuredReference,
    prepared: PreparedFiles,
    warn: Warn,
    at_once: int,
) -> _Run:
    own = prepared.own_templates[check_template.identity(gguf)]
    shipped = _shipped_texts(own, reference, warn)
    more = 1 if at_once > 1 else 0  # while the other run is in a part that uses one core
    job = job_of(gguf, reference, shipped, threads=max(1, physical_cores() // at_once) + more)
    drafted = prepared.draft.answers if gguf is prepared.draft.gguf else []
    if drafted:
        job = msgspec.structs.replace(job, prompts=[])
    return _Run(own, shipped, pool.submit(inference.ask, job), drafted)


def _all_confirmed(weights: list[Finding], gguf: GgufFile) -> bool:
    """Whether the check `weights` found every tensor of the file to be that of the trained model."""
    passed = [check for check in weights if isinstance(check, Check) and check.verdict == "pass"]
    return any(check.figures["looked_at"] == len(gguf.tensors) for check in passed)


def _is_wrong(found: Finding) -> bool:
    return isinstance(found, Check) and found.verdict == "fail"


def readable(ggufs: list[Path], findings: Findings) -> list[GgufFile]:
    """The files whose header makes sense. The others fail here, and llama.cpp never reads them."""
    files = []
    for path in ggufs:
        try:
            files.append(read_gguf(path))
        except VerificationFailed as error:
            findings.add(
                Check("file", path.name, "fail", path.stat().st_size, "whole", error.message),
                NotChecked("everything else", path.name, "the file is damaged"),
            )
    return files


def export_records(run: Path, files: Iterable[Path], other: Path | None = None) -> dict[str, ExportedFile]:
    """What the export steps recorded of each file, by its name. The records come from the run and from the files' own
    folders. Those of `other`, the run of the reference, have their paths for names."""
    recorded = {Path(name).name: exported for name, exported in export_record.outputs(run).items()}
    beside = {file.name: export_record.outputs(file.parent).get(file.name) for file in files}
    elsewhere = {} if other is None else {str(other / name): one for name, one in export_record.outputs(other).items()}
    return elsewhere | recorded | {name: exported for name, exported in beside.items() if exported is not None}


def _judge_static(
    gguf: GgufFile, unquantized: GgufFile | None, reference: MeasuredReference, findings: Findings, confirmed: bool
) -> None:
    output = output_of_its_own(reference.folder, reference.adapter)
    findings.add(check_metadata(gguf, reference.config, reference.generation))
    if (window := check_window(gguf.path.name, reference.config)) is not None:
        findings.add(window)
    own = reference.vocabulary
    findings.add(check_vocabulary(gguf, reference.tokenizer, own, reference.files, reference.config))
    findings.add(
        check_tensors(
            gguf, unquantized=unquantized, needs_output=output, reference=reference.folder, confirmed=confirmed
        )
    )


def _judge_running(gguf: GgufFile, reference: MeasuredReference, run: _Run, findings: Findings, bounds: Limits) -> None:
    file, measured = gguf.path.name, reference.measured
    text = template_branches.text_difference(gguf, reference.tokenizer)
    findings.add(check_template.check_chat_template(file, own=run.own, reference=reference.rendered, text=text))
    try:
        result = run.result.result()
    except (VerificationFailed, NativeCrash) as error:
        findings.cannot_run(file, error, "the file")
        return
    cost = measured.cost["mean_kl"] if measured.cost else None
    logits = check_logits.check_logits(file, result.figures, bounds, result.trained_kl, measured.stored, cost)
    file_answers = run.drafted or result.answers
    findings.add(
        Check("loads", file, "pass", "runs", "runs", f"llama.cpp loads it, {result.facts.tokens} tokens"),
        *_answered(gguf, result, reference, run.shipped),
        check_logits.with_unread_epsilon(logits, from_config.unread_epsilon(reference.config)),
        check_logits.check_tuned(file, result.change, bounds, measured.why_no_base, measured.stored, cost),
        check_answers.check_answers(file, measured.file_answers, file_answers, bounds, reference.tokenizer),
    )


def _types(gguf: GgufFile, mix: dict[str, str] | None) -> Check:
    """The check of the types, which also says which importance matrix the file was made with."""
    check = check_header.check_types(gguf, mix)
    file, data = (gguf.metadata.get(f"quantize.imatrix.{key}") for key in ("file", "dataset"))
    if file is None:
        return check
    note = f"made with the importance matrix {file} of {data or 'data that it does not state'}"
    return msgspec.structs.replace(check, detail=f"{check.detail}; {note}")


def _limits(gguf: GgufFile, reference: MeasuredReference, run: Path, exported: ExportedFile | None) -> Limits:
    """The limits for one file. They depend on the type that the merge stored, or without its record on that of the
    base. A mix is held to what was measured of it, and not to the type that its metadata states."""
    record = run / "merge.json"
    merged = merge_record.read(record).changes["stored_dtype"] if record.is_file() else None
    stored = merged or reference.config.get("dtype") or reference.config.get("torch_dtype")
    # Where the cost of rounding was measured, it is part of the reference already.
    cost_is_measured = reference.measured.rounded is not None
    rounded = reference.adapter is not None and stored in ("BF16", "bfloat16") and not cost_is_measured
    if exported is not None and "measured" in exported and "tensor_types" in exported:
        bounds = mix_limits(exported["bits_per_weight"], exported["measured"]["mean_kl"])
    elif MIX_KEY in gguf.metadata:
        bounds = mix_limits(gguf.bits_per_weight, None)
    else:
        bounds = limits(check_header.file_type(gguf), merged_in_bf16=rounded)
    return model_limits(bounds, reference.measured.cost, check_header.file_type(gguf), reference.measured.noise)


def _answered(
    gguf: GgufFile, result: InferenceResult, reference: MeasuredReference, shipped: list[Shipped]
) -> list[Finding]:
    """The checks of tokens. They use the worker's answers in the order in which `job_of` asked."""
    file, count, tokenizer = gguf.path.name, len(reference.texts), reference.tokenizer
    turn_end = check_template.turn_end(tokenizer)
    ends = {*reference.stops, tokenizer.eos_token_id, turn_end} - {None}
    plain = list(zip(_PLAIN, result.special, strict=False))
    chats, others = iter(result.plain[count:]), iter(result.special[len(_PLAIN) :])
    ids: list[list[int] | str] = [
        row.refused if row.text is None else next(others if row.adds else chats) for row in shipped
    ]
    trained = check_trained(
        file,
        reference.rows,
        ids,
        tokenizer.eos_token_id,
        opening=check_template.opening(tokenizer),
        turn_end=turn_end,
    )
    begins = result.facts.bos if result.facts.add_bos else None
    asked = [] if check_template.reads_clock(tokenizer) or not tokenizer.chat_template else reference.rows
    return [
        check_tokens(file, reference.texts, result.plain[:count], tokenizer),
        check_special_tokens(
            file,
            result.facts,
            tokenizer=tokenizer,
            stops=reference.stops - check_template.openers(tokenizer),
            turn_end=turn_end,
            plain=plain,
        ),
        check_stops(gguf, result.facts.end_of_generation, ends),
        with_other_prompts(trained, asked, tokenizer, begins),
    ]


def _shipped_texts(own: OwnRendering, reference: MeasuredReference, warn: Warn) -> list[Shipped]:
    """For each row, the text that a user of the file would send."""
    first, why = len(check_template.CONVERSATIONS), own if isinstance(own, str) else "it has no chat template"
    rendered = iter(zip(own[first:], (reference.rendered or own)[first:], strict=True) if isinstance(own, list) else [])
    shipped: list[Shipped] = []
    for row in reference.rows:
        if row["kind"] != "chat":
            whole = begins_itself(row["rendered"], reference.tokenizer.bos_token)
            shipped.append(Shipped(not whole, row["rendered"]))
            continue
        by_file, by_reference = next(rendered, (Rendered(refused=why), Rendered(refused=why)))
        if by_file == by_reference and check_template.reads_clock(reference.tokenizer):
            warn(
                "date_in_template",
                "the chat template writes the date, so prompts differ from those of the training day",
            )
            by_file = Rendered(row["rendered"])
        shipped.append(Shipped(False, by_file.text, by_file.refused))
    return shipped


def job_of(gguf: GgufFile, reference: MeasuredReference, shipped: list[Shipped], threads: int) -> InferenceJob:
    """What the worker is asked about one file.

    Args:
        shipped: the result of `_shipped_texts`.
    """
    measured = reference.measured
    coarse = check_header.file_type(gguf) not in _UNQUANTIZED
    tokens = measured.sample.quantized_tokens if coarse else measured.sample.tokens
    return InferenceJob(
        gguf=str(gguf.path),
        context_tokens=measured.longest + _ROOM,
        threads=threads,
        vocabulary=measured.vocabulary,
        plain=[*reference.texts, *(row.text for row in shipped if not row.adds and row.text is not None)],
        special=[*_PLAIN, *(row.text for row in shipped if row.adds and row.text is not None)],
        sequences=first_of(measured.sequences, tokens),
        tuned=str(measured.made_of),
        trained=str(measured.tuned) if measured.made_of != measured.tuned else None,
        base=str(measured.base) if measured.base else None,
        base_rows=measured.base_rows,
        prompts=[Prompt(each.prompt, measured.sample.answer_tokens, each.ids) for each in measured.file_answers],
    )
