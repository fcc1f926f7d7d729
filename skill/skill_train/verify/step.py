"""Checks GGUF files against the model that was trained, and writes the proof.

The reference is base + adapter through PEFT, in fp32. It is what was trained, and none of our own steps made it. Each
file is read by our own reader (`llama.gguf_header`) and by llama.cpp in a child process. `verify` does not raise for a
wrong file: it says so in the record, and goes on with the next file.
"""

import os
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from skill_train.core.console import Bar, Warn
from skill_train.core.digests import digests, file_digest
from skill_train.core.errors import UsageError
from skill_train.core.files import require_writable, scratch_folder
from skill_train.core.memory import peak_memory_bytes
from skill_train.core.worker import ending, llama_cpp_folder
from skill_train.llama.gguf_header import GgufFile
from skill_train.llama.pictures.compare import Pair
from skill_train.model.foreign_files import require_sound, require_sound_files
from skill_train.model.sidecar_files import model_digests
from skill_train.model.weight_files import stored_tensors
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import require_pillow
from skill_train.program.pictures.tokens import ImageModel
from skill_train.reference.low_memory import frugal_model, is_plain, peak_bytes
from skill_train.reference.pictures import PictureQuestion
from skill_train.reference.rounded_merge import Rounding, rounding_of
from skill_train.run import records, verify_record
from skill_train.run.evaluate_record import rows_digest
from skill_train.run.folder import StepResult, versions, way_to_model
from skill_train.run.train_record import Row
from skill_train.run.verify_record import Check, Proof, ProofInputs, ProofOptions, worst
from skill_train.verify.check import Findings
from skill_train.verify.check_adapter import files_by_kind, judge_adapters
from skill_train.verify.check_header import check_digest
from skill_train.verify.engines.check import engine_versions
from skill_train.verify.engines.judge import InEngines, judge_in_engines
from skill_train.verify.pictures.check import check_pairs
from skill_train.verify.pictures.questions import drawn_questions, row_questions
from skill_train.verify.questions import MeasuredReference, Questions, questions_of
from skill_train.verify.reference_answers import ReferenceMeasurements, measure, measure_base, measure_rounded
from skill_train.verify.run_checks import Draft, PreparedFiles, draft_of, export_records, judge, own_templates, readable
from skill_train.verify.sample_texts import Sample, sample_of
from skill_train.verify.weights.check import WeightChecks, compare_weights, compared_bytes

_CRASHES = ("native_crash", "program_failed", "worker_hangs")  # of `loads`: the machine may be to blame, so try again
_PROOF_KEYS = {"checks", "not_checked", "samples"}


@dataclass(frozen=True)
class _ProofScope:
    """What a proof is valid for."""

    inputs: ProofInputs
    options: ProofOptions
    versions: dict[str, str | None]


@dataclass(frozen=True)
class PictureContext:
    """What the answers to pictures are judged by.

    Attributes:
        image: the model with its tower (the merged one, where an adapter was trained), and how its recipe reads
            pictures. None: `why_not` says why.
        images: the folder in which the rows' pictures lie.
        expected: why a projector belongs to the files; empty where none does.
    """

    image: ImageModel | None
    images: Path
    why_not: str = ""
    expected: str = ""


@dataclass(frozen=True)
class VerifyRequest:
    """Files to judge, and what they are judged by.

    Attributes:
        reference: model folder. `adapter` is put on top of it; None if the model is merged or plain.
        base: the model that the adapter was trained on. It shows that the files hold the tuned model. None skips that.
        ggufs: the files to judge: whole models, and adapters alone.
        rows: as the trainer was fed them (`samples.jsonl`); may be empty.
        run: the folder with the records of the merge and of the export; None for the folder of `record`. Records that
            lie beside a file are read too.
        held_out: rows to measure on; `rows`, or built-in texts, when empty.
        tokens: most tokens whose logits are compared; None leaves that to `sample_texts.sample_of`.
        unread: why files that belong here cannot be judged, by their names.
        pictures: what pairs with a projector are judged by; None leaves projectors unjudged, and says so.
        engines: names of the programs that the files are asked in, or `all`.
    """

    reference: Path
    adapter: Path | None
    base: Path | None
    ggufs: list[Path]
    rows: list[Row]
    held_out: list[Row]
    record: Path
    run: Path | None = None
    tokens: int | None = None
    unread: tuple[tuple[str, str], ...] = ()
    pictures: PictureContext | None = None
    engines: tuple[str, ...] = ()


def verify(request: VerifyRequest, *, progress: Bar, warn: Warn) -> StepResult[Proof]:
    """The proof, as written to `record`.

    A proof with the same inputs, options and versions is reused. Any other is replaced, because a proof of other files
    is worth nothing.

    Raises:
        UsageError: no file can be judged, a file is missing, or the record cannot be written.
        NotInstalled: transformers, peft, gguf or llama-cpp-python is missing.
    """
    started = time.monotonic()
    _require(request.ggufs, request.reference, request.adapter, request.base)
    _require_proof(request.record)
    engines = engine_versions(request.engines)
    weights = sum(stored.elements for stored in stored_tensors(request.reference).values())
    sample = sample_of(weights, request.tokens)
    run = request.run or request.record.parent
    with ending(ThreadPoolExecutor(3)) as beside:  # for what needs no reference: it runs beside it
        scoping = beside.submit(_scope, request, sample, engines)
        earlier = _earlier(request.record, scoping.result()) if request.record.is_file() else None
        if earlier is not None:
            return StepResult(earlier, reused=True)
        require_writable(request.record.parent)
        findings = Findings()
        files, adapters, projectors = files_by_kind(readable(request.ggufs, findings), request.unread, findings)
        _require_judged([*files, *(adapters if request.adapter else [])], request.ggufs, findings)
        progress(0, len(request.ggufs) + 1, "reference")
        rows, held_out = _text_rows(request.rows), _text_rows(request.held_out or request.rows)
        questions = questions_of(
            request.reference, adapter=request.adapter, rows=rows, held_out=held_out, sample=sample
        )
        busy = peak_bytes(request.reference, request.adapter) + compared_bytes(request.adapter, request.base)
        drafting = beside.submit(draft_of, files, questions.prompts, sample.answer_tokens, busy)
        rendering = beside.submit(own_templates, files, questions.conversations)
        with scratch_folder() as scratch:
            rounding = rounding_of(run / "merge.json", request.reference) if request.adapter and files else None
            measured, compared = _measure(questions, request.base, files, scratch, drafting, rounding)
            reference = MeasuredReference(**vars(questions), measured=measured)
            scope = scoping.result()
            owner = request.reference.parent  # the run, if the reference is its merged model
            other = owner if request.run is None and (owner / "plan.json").is_file() else None
            exports = export_records(run, request.ggufs, other)
            sums = scope.inputs.ggufs
            prepared = PreparedFiles(files, compared, rendering.result(), drafting.result(), sums, exports)
            judge(reference, findings, run, prepared, warn, progress)
            judge_adapters(adapters, reference, findings, exports, sums, scratch)
            findings.doubt_tuned()
            if request.run is None:
                findings.doubt_source(request.ggufs, scope.inputs.reference)
        for gguf in projectors:
            findings.add(check_digest(gguf, scope.inputs.ggufs[gguf.path.name], exports))
        picture_questions = judge_projectors(projectors, files, request, findings, progress)
        judge_in_engines(
            InEngines(engines, reference, held_out, files, projectors, picture_questions), findings, progress
        )
    return StepResult(_write_proof(request.record, scope, findings, reference.samples, time.monotonic() - started))


def _measure(
    questions: Questions,
    base: Path | None,
    files: list[GgufFile],
    folder: Path,
    drafting: Future[Draft],
    rounding: Rounding | None = None,
) -> tuple[ReferenceMeasurements, WeightChecks]:
    """Measures the reference and the base, and compares the weights of each file while the reference is in memory."""
    plain = questions.adapter is None or is_plain(questions.adapter)
    with frugal_model(questions.folder, questions.adapter) as model:
        weights = {}
        if plain:  # while a draft is made
            weights = compare_weights(files, model, questions.folder, questions.adapter, base)
        measured = measure(
            model,
            questions,
            folder=folder,
            switches_off=base == questions.folder and questions.adapter is not None and plain,
            drafts=lambda: drafting.result().answers,
        )
        if not plain:  # it is merged into the model, which is then no longer base and adapter
            weights = compare_weights(files, model, questions.folder, questions.adapter, base)
        measured = measure_rounded(model, questions, questions.adapter, rounding, measured, folder)
    del model  # before another one is read
    if base is not None and measured.base is None:
        measured = measure_base(base, measured, folder)
    return measured, weights


def _text_rows(rows: list[Row]) -> list[Row]:
    """Rows without pictures. The others are asked about with their pictures, by `judge_projectors`."""
    return [row for row in rows if not row.get("images")]


def judge_projectors(
    projectors: list[GgufFile], models: list[GgufFile], request: VerifyRequest, findings: Findings, progress: Bar
) -> list[PictureQuestion]:
    """Adds the checks of each projector with each language model to `findings`. Returns the questions that were asked;
    none where nothing was judged.

    A projector that cannot be judged is a warning, and so are language models that are missing their projector.
    """
    if not projectors:
        if request.pictures is not None and request.pictures.expected:
            findings.add(Check("projector", "mmproj", "warn", "missing", "a projector", request.pictures.expected))
        return []
    pictures = request.pictures
    if pictures is None or pictures.image is None or not models:
        why = "the run has no rows with pictures" if pictures is None else pictures.why_not
        return _unjudged(projectors, findings, why or "there is no language model beside it")
    try:
        require_pillow()
    except Refused as refusal:
        return _unjudged(projectors, findings, refusal.error["message"])
    questions = row_questions(request.held_out or request.rows, pictures.images) or drawn_questions()
    pairs = [Pair(model.path, projector.path) for projector in projectors for model in models]
    try:
        checked = check_pairs(pairs, pictures.image, questions, request.base, progress)
    except UsageError as error:
        if error.code != "vision":
            raise
        return _unjudged(projectors, findings, error.message)
    findings.add(*checked)
    return questions


def _unjudged(projectors: list[GgufFile], findings: Findings, why: str) -> list[PictureQuestion]:
    for projector in projectors:
        findings.leave_out(projector.path.name, why)
    return []


def _write_proof(
    record: Path, scope: _ProofScope, findings: Findings, samples: dict[str, int], seconds: float
) -> Proof:
    proof = Proof(
        step=record.stem,
        inputs=scope.inputs,
        options=scope.options,
        versions=scope.versions,
        verdict=worst(check.verdict for check in findings.checks),
        checks=findings.checks,
        not_checked=findings.not_checked,
        samples=samples,
        seconds=round(seconds, 2),
        peak_memory_bytes=peak_memory_bytes(),
        peak_memory_children_bytes=peak_memory_bytes(children=True),
        finished_at=records.timestamp(),
    )
    records.write(record, proof)
    return proof


def _require(ggufs: list[Path], reference: Path, adapter: Path | None, base: Path | None) -> None:
    llama_cpp_folder()  # before the reference is at work for minutes
    missing = [path for path in (*ggufs, reference / "config.json") if not path.is_file()]
    if missing or not ggufs:
        wrong = [f"{path} {'is not a file' if path.exists() else 'does not exist'}" for path in missing]
        raise UsageError(
            wrong[0] if wrong else "there is no GGUF file to verify",
            code="missing_file",
            expected="GGUF files, and a model folder as the reference",
            hint=way_to_model(reference)
            or "check the path of --gguf, or write such files: skill-train export-gguf RUN",
        )
    twice = next((name for name, count in Counter(path.name for path in ggufs).items() if count > 1), None)
    if twice:  # digests and figures are kept by name
        raise UsageError(
            f"two files have the name {twice}",
            code="bad_usage",
            expected="files with different names in one proof",
            got=", ".join(str(path) for path in ggufs if path.name == twice),
            hint="verify them one by one, each with its own --out",
        )
    for folder in {reference, base or reference}:
        require_sound(folder)
    if adapter is not None:
        require_sound_files(adapter)


def _require_judged(compared: list[GgufFile], named: list[Path], findings: Findings) -> None:
    """Refuses a proof in which no file is compared with anything, because it would pass."""
    if compared or any(check.verdict == "fail" for check in findings.checks):
        return
    raise UsageError(
        "none of the files can be compared with the reference",
        code="missing_file",
        expected="the file of a language model; an adapter's file is compared only in its own run",
        got=", ".join(path.name for path in named),
        hint="skill-train verify RUN, or --gguf with the file of a language model too",
    )


def _require_proof(record: Path) -> None:
    """Refuses to replace a file that is not a proof. A broken verify.json may be one, so its own error is raised."""
    document = None
    try:
        document = records.read_json(record) if record.is_file() else None
    except UsageError:
        if record.name == "verify.json":
            raise
    if os.path.lexists(record) and not (isinstance(document, dict) and document.keys() >= _PROOF_KEYS):
        raise UsageError(
            f"{record} already exists and is not a proof",
            code="output_exists",
            expected="a new file, or a proof to replace",
            got=str(record),
            hint="use another --out",
        )


def _scope(request: VerifyRequest, sample: Sample, engines: dict[str, str]) -> _ProofScope:
    base, pictured = request.base, request.pictures.image if request.pictures else None
    inputs = ProofInputs(
        reference=model_digests(request.reference),
        adapter=digests(request.adapter) if request.adapter else None,
        base=None if base is None else "the reference" if base == request.reference else model_digests(base),
        ggufs={path.name: file_digest(path) for path in request.ggufs},
        rows=rows_digest(request.rows),
        held_out=rows_digest(request.held_out),
        unread=[list(each) for each in request.unread],
        pictures=None if pictured is None else model_digests(Path(pictured["model"])),
    )
    libraries = versions("llama-cpp-python", "gguf", "transformers", "torch", "peft")
    return _ProofScope(inputs, ProofOptions(sample.tokens, engines), libraries)


def _earlier(record: Path, scope: _ProofScope) -> Proof | None:
    earlier = verify_record.read(record)
    same = (earlier.inputs, earlier.options, earlier.versions) == (scope.inputs, scope.options, scope.versions)
    crashed = any(check.figure in _CRASHES for check in earlier.checks)
    return earlier if same and not crashed else None
