"""Checks the GGUF file of an adapter alone, as `export-gguf --lora` makes it: its metadata, its tensors, and what
llama.cpp answers with it beside the base.

For the last check the base is converted into a temporary folder. A small base is converted in fp32, so that only the
rounding of the adapter can make a difference.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from skill_train.core.digests import FileDigest
from skill_train.core.errors import NativeCrash, SkillTrainError, VerificationFailed
from skill_train.llama import get_converter, inference, run_converter
from skill_train.llama.float_type import BYTES_PER_WEIGHT, choose
from skill_train.llama.gguf_header import GgufFile, is_model, read_gguf
from skill_train.machine.read import physical_cores
from skill_train.model.families import ANSWERS_UP_TO
from skill_train.model.weight_files import stored_tensors
from skill_train.run.folder import require_space
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify import check_answers, check_header, check_logits
from skill_train.verify.check import Findings, problems
from skill_train.verify.questions import MeasuredReference
from skill_train.verify.run_checks import job_of
from skill_train.verify.thresholds import limits, model_limits
from skill_train.verify.weights.adapter import check_lora_weights

_RUNNING = ("logits", "tuned", "answers")
_FLOATS = {"F32", "F16"}  # a file of any type may hold these too, for rows that are not a multiple of a block


def files_by_kind(
    files: list[GgufFile], unread: tuple[tuple[str, str], ...], findings: Findings
) -> tuple[list[GgufFile], list[GgufFile], list[GgufFile]]:
    """The files of whole language models, those of adapters, and those of projectors for pictures. Other files, and
    those of `unread`, are reported as not checked."""
    for name, why in unread:
        findings.leave_out(name, why)
    models = [gguf for gguf in files if is_model(gguf)]
    adapters = [gguf for gguf in files if gguf.metadata.get("general.type") == "adapter"]
    projectors = [gguf for gguf in files if gguf.metadata.get("general.type") == "mmproj"]
    for gguf in files:
        if not any(gguf in kind for kind in (models, adapters, projectors)):
            kind = gguf.metadata.get("general.type")
            reason = f"it is a file of the kind {kind!r}, which is not compared with anything"
            findings.leave_out(gguf.path.name, reason)
    return models, adapters, projectors


def judge_adapters(
    adapters: list[GgufFile],
    reference: MeasuredReference,
    findings: Findings,
    exports: Mapping[str, FileDigest],
    digests: dict[str, FileDigest],
    folder: Path,
) -> None:
    """Adds the checks of each adapter's file to `findings`.

    Args:
        folder: temporary; the base's GGUF file is written there.
    """
    base: GgufFile | SkillTrainError | None = None
    for gguf in adapters:
        name = gguf.path.name
        if reference.adapter is None:
            findings.leave_out(name, "it is an adapter, and the reference has no adapter to compare it with")
            continue
        base = base or _base_file(reference.folder, folder)
        findings.add(
            check_header.check_file(gguf),
            check_header.check_digest(gguf, digests[name], exports),
            _check_types(gguf),
            _check_metadata(gguf, base.architecture if isinstance(base, GgufFile) else None),
        )
        if isinstance(base, GgufFile):
            findings.add(check_lora_weights(gguf, base, reference.folder, reference.adapter))
            _judge_running(gguf, base, reference, findings)
        else:
            reason = f"no GGUF file of the base could be made: {base.message}"
            findings.add(
                Check("loads", name, "warn", "not run", "runs", reason),
                *(NotChecked(check, name, reason) for check in ("weights", *_RUNNING)),
            )


def _base_file(base: Path, folder: Path) -> GgufFile | SkillTrainError:
    """The base as one GGUF file, or the error that says why there is none."""
    try:
        weights = stored_tensors(base)
        count = sum(stored.elements for stored in weights.values())
        outtype = "f32" if count <= ANSWERS_UP_TO else choose(weights, "auto").outtype
        require_space(folder, int(BYTES_PER_WEIGHT[outtype] * count), "a GGUF file of the base, for the adapter's")
        out = folder / "base.gguf"
        tools = get_converter.find_or_fetch()
        with run_converter.without_code(base) as view:
            arguments = [str(view), "--outfile", str(out), "--outtype", outtype]
            run_converter.run(tools, arguments, model=base, on_percent=lambda percent: None)
        return read_gguf(out)
    except SkillTrainError as error:
        return error


def _check_types(gguf: GgufFile) -> Check:
    """Checks that the tensors have the type that the file name states."""
    name, named = gguf.path.name, check_header.name_type(gguf.path)
    kinds = Counter(tensor.kind for tensor in gguf.tensors.values())
    figures = {"types": dict(kinds)}
    most = kinds.most_common(1)[0][0].lower() if kinds else "nothing"
    allowed = {str(named).upper(), *(_FLOATS if named not in ("f32", "f16") else {"F32"})}
    if named is not None and (named.upper() not in kinds or kinds.keys() - allowed):
        return Check("types", name, "fail", most, named, f"the name says {named}, its tensors are {most}", figures)
    return Check("types", name, "pass", most, named or most, f"{kinds.total()} tensors, most of them {most}", figures)


def _check_metadata(gguf: GgufFile, architecture: str | None) -> Check:
    """Checks that this is an adapter for the architecture, and that it acts on every token. The check `weights`
    compares its scale, module by module.

    Args:
        architecture: of the base's GGUF file; None when there is none.
    """
    faults, alpha = [], gguf.metadata.get("adapter.lora.alpha")
    if gguf.metadata.get("adapter.type") != "lora":
        faults.append(f"adapter.type is {gguf.metadata.get('adapter.type')!r}, not 'lora'")
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha <= 0:  # with alpha 0 llama.cpp uses the rank
        faults.append(f"adapter.lora.alpha is {alpha!r}, not a number above 0")
    if architecture is not None and gguf.architecture != architecture:
        faults.append(f"general.architecture is {gguf.architecture!r}, the base's is {architecture!r}")
    if gguf.metadata.get("adapter.alora.invocation_tokens"):
        faults.append("it acts after certain tokens only (adapter.alora.invocation_tokens)")
    good = f"a LoRA adapter with alpha {alpha} for {gguf.architecture}"
    return problems("metadata", gguf.path.name, faults, looked_at=4, good=good)


def _judge_running(gguf: GgufFile, base: GgufFile, reference: MeasuredReference, findings: Findings) -> None:
    """Compares the answers of llama.cpp, with the adapter beside the base, with those of base + adapter in PEFT."""
    # The reference is not rounded, because nothing was merged and the base's file has the base's own weights.
    file, measured = gguf.path.name, replace(reference.measured, rounded_answers=[])
    job_of_base = job_of(base, replace(reference, measured=measured), [], threads=physical_cores())
    job = msgspec.structs.replace(job_of_base, lora=str(gguf.path), plain=[], special=[], tuned=str(measured.tuned))
    try:
        result = inference.ask(job)
    except (VerificationFailed, NativeCrash) as error:
        findings.cannot_run(file, error, "the base with the file")
        return
    kind = check_header.file_type(base)
    bounds = model_limits(limits(kind), measured.cost, kind, measured.noise)
    findings.add(
        Check("loads", file, "pass", "runs", "runs", "llama.cpp loads it beside the base"),
        check_logits.check_logits(file, result.figures, bounds, result.trained_kl),
        check_logits.check_tuned(file, result.change, bounds, measured.why_no_base),
        check_answers.check_answers(file, measured.answers, result.answers, bounds, reference.tokenizer),
    )
