"""Puts pairs of a language model and a projector through every check about pictures."""

from pathlib import Path

from skill_train.core.console import Bar
from skill_train.core.errors import NativeCrash, VerificationFailed
from skill_train.llama.gguf_header import GgufFile, read_gguf
from skill_train.llama.pictures.compare import Pair, Picture, PicturePrompt, ask_pictures
from skill_train.machine.read import physical_cores
from skill_train.model.convertible.from_config import LINE_ENDS_WARNING
from skill_train.model.convertible.vocabulary import why_no_picture
from skill_train.program.pictures.engine import LINED
from skill_train.program.pictures.tokens import ImageModel
from skill_train.reference.pictures import PictureQuestion
from skill_train.run.verify_record import Check, Finding, NotChecked
from skill_train.verify.check import problems
from skill_train.verify.check_header import check_file, file_type
from skill_train.verify.pictures.as_used import check_as_used
from skill_train.verify.pictures.measured import MeasuredPictures, measure
from skill_train.verify.pictures.projector import check_projector, check_projector_weights
from skill_train.verify.pictures.same_pixels import check_same_pixels

_SPECIAL = (3, 4)  # llama.cpp's kinds of tokens that it finds in a text: control tokens, and those that a user added


def check_pairs(
    pairs: list[Pair],
    image: ImageModel,
    questions: list[PictureQuestion],
    base: Path | None = None,
    progress: Bar | None = None,
) -> list[Finding]:
    """Of each projector: `file`, `projector` and `projector_weights`. Of each pair, under its language model's name:
    `picture_tokens`, `loads_projector`, `pictures` (given the same pixels) and `pictures_as_used`.

    Args:
        pairs: files of the same model.
        image: the model that was exported (the merged one, where an adapter was trained), and how its recipe reads
            pictures.
        questions: about held-out pictures, with their answers.
        base: the model before the training; None if it is not at hand, or is `image` itself.

    Raises:
        UsageError: the model is of a family whose pictures cannot be verified, or cannot be loaded.
        DecisionNeeded: there was not enough memory.
    """
    measured = measure(image, questions)
    checks: list[Finding] = []
    for number, pair in enumerate(pairs):
        checked = _checked(pair, measured, Path(image["model"]), base, progress)
        earlier = {each.projector for each in pairs[:number]}
        checks += [check for check in checked if pair.projector not in earlier or check.file != pair.projector.name]
    return checks


def _checked(
    pair: Pair, measured: MeasuredPictures, reference: Path, base: Path | None, progress: Bar | None
) -> list[Finding]:
    name = pair.projector.name
    try:
        text, projector = read_gguf(pair.text), read_gguf(pair.projector)
    except VerificationFailed as error:
        size = pair.projector.stat().st_size
        rest = NotChecked("everything else", name, "a file of the pair is damaged")
        return [Check("file", name, "fail", size, "whole", error.message), rest]
    checks: list[Finding] = [
        check_file(projector),
        check_projector(projector, text, reference),
        check_projector_weights(projector, reference, base),
        check_picture_tokens(text, measured, reference),
    ]
    try:
        return checks + _checks_with_llama_cpp(pair, file_type(text), file_type(projector), measured, progress)
    except (VerificationFailed, NativeCrash) as error:
        detail = f"{error.message} ({error.got[-200:]})"
        rest = NotChecked("pictures", pair.text.name, "llama.cpp cannot run the pair")
        return [*checks, Check("loads_projector", pair.text.name, "fail", error.code, "runs", detail), rest]


def _checks_with_llama_cpp(
    pair: Pair, text_type: str, projector_type: str, measured: MeasuredPictures, progress: Bar | None
) -> list[Finding]:
    import numpy as np

    name, checks = pair.text.name, list[Finding]()
    pictures = [
        PicturePrompt(one.as_asked, [Picture(np.asarray(picture)) for picture in question.pictures])
        for one, question in zip(measured.answers, measured.questions, strict=True)
    ]
    threads = physical_cores()
    used = ask_pictures(pair, pictures, any_size=False, threads=threads, progress=progress)
    detail = f"llama.cpp loads {pair.projector.name} with it"
    lined = measured.kind in LINED
    detail += f"; but {LINE_ENDS_WARNING}" if lined else ""
    checks.append(Check("loads_projector", name, "warn" if lined else "pass", "runs", "runs", detail))
    prompts = [
        PicturePrompt(
            one.text,
            [Picture(picture.pixels, picture.overview) for picture in one.pictures],
            [part.embeddings for part in one.parts],
        )
        for one in measured.answers
        if one.pictures is not None
    ]
    same = None
    if len(prompts) == len(measured.answers):
        same = ask_pictures(pair, prompts, any_size=True, threads=threads, progress=progress)
        checks.append(check_same_pixels(name, text_type, projector_type, measured, same))
    else:
        why = "llama.cpp cannot be given the pixels of the model's image processor, which it would round or divide"
        checks.append(NotChecked("pictures", name, why))
    return [*checks, check_as_used(name, text_type, measured, used, same)]


def check_picture_tokens(text: GgufFile, measured: MeasuredPictures, reference: Path) -> Check:
    """The tokens of and around pictures have the ids and texts of the model's tokenizer, and are found in a text."""
    tokens, kinds = text.tokens, text.integers("tokenizer.ggml.token_type")
    missing = why_no_picture(reference, measured.kind)
    faults = [] if missing is None else [missing]
    for token, text_expected in measured.token_texts.items():
        got = tokens[token] if token < len(tokens) else None
        if got != text_expected:
            faults.append(
                f"token {token} is {got!r}, and the model's is {text_expected!r}: a picture token was renamed"
            )
        elif token < len(kinds) and kinds[token] not in _SPECIAL:
            faults.append(f"token {token}, {text_expected!r}, is an ordinary one: llama.cpp does not find it in a text")
    count = len(measured.token_texts)
    good = f"{count} tokens of and around pictures are those of the tokenizer"
    return problems("picture_tokens", text.path.name, faults, looked_at=count, good=good)
