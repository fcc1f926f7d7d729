"""`chat`: a conversation with a model of a run, with a GGUF file, or with two models side by side."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from skill_train.commands._chosen_model import Chosen, chosen, other, warn_of_proof, warn_of_system
from skill_train.commands._command import (
    PATH,
    Number,
    Whole,
    argument,
    command,
    context_option,
    engine_device_option,
    option,
)
from skill_train.commands._drawing import rich_table
from skill_train.core.console import Console, Result
from skill_train.core.errors import UsageError, quoted
from skill_train.core.files import scratch_folder
from skill_train.evaluate.chat.answering import Answering, CheckedAnswer, Settings, answering
from skill_train.evaluate.pictures import RunPictures
from skill_train.facts import JsonObject
from skill_train.llama.sampling import Sampling, sampling_of, sampling_of_gguf, shown

TOKENS = 512
_SIGN = "> "


@dataclass(frozen=True)
class ChatOptions:
    model: Path = argument(PATH, metavar="RUN|FILE.gguf")
    prompt: str | None = option(None, "Ask once and end.  [default: a conversation in the terminal]")
    file: str | None = option(
        None,
        "base, adapter, merged, or a GGUF file by its type (q4_k_m) or name.  [default: the file of the Modelfile, "
        "or else merged or adapter]",
    )
    compare: str | None = option(None, "Second model, side by side: as --file, or another run or GGUF file.")
    image: tuple[Path, ...] = option((), "Picture for the first question; repeat for more.", PATH)
    mmproj: Path | None = option(None, "File of the projector, for a GGUF file without a run.", PATH)
    system: str | None = option(None, "System message.")
    temperature: float | None = option(
        None,
        "0 takes the most likely token.  [default: that of generation_config.json, like the rest of the sampling]",
        Number(min=0, max=10),
    )
    seed: int = option(0, "Seed of the random numbers.", Whole(0))
    max_tokens: int = option(TOKENS, "Longest answer, in tokens.", Whole(1, 100_000))
    context: int = context_option()
    device: str | None = engine_device_option()
    raw: bool = option(False, "Continue the text as it stands, without a chat template.")


@dataclass
class _Speaker:
    """A loaded model, and the turns of its conversation so far."""

    name: str
    loaded: Answering
    settings: Settings
    source: str
    pictured: bool
    messages: list[JsonObject]

    def ask(self, text: str, images: list[str], on_text: Callable[[str], None]) -> CheckedAnswer:
        """Asks the next turn. A model that continues text does not see earlier turns."""
        turn = {"role": "user", "content": _content(text, len(images) if self._is_first else 0, self.pictured)}
        if self.settings.raw:
            images = images if self._is_first else []
            self.messages.clear()
        self.messages.append(turn)
        reply = self.loaded.answer(self.messages, images, on_text)
        answer = _content(reply.answer.text, 0, self.pictured)
        self.messages.append({"role": "assistant", "content": answer})
        return reply

    @property
    def _is_first(self) -> bool:
        return all(message["role"] == "system" for message in self.messages)


@command(
    ChatOptions,
    'skill-train chat runs/first --prompt "Where is my parcel?"',
    'skill-train chat runs/first --prompt "Where is my parcel?" --file q4_k_m --compare base',
)
def chat(options: ChatOptions, console: Console) -> Result:
    """Talk to a model of a run or a GGUF file, in a terminal or once with --prompt; compare two side by side."""
    if options.prompt is None and not console.is_conversation:
        raise UsageError(
            "chat needs a terminal, or a prompt",
            code="bad_usage",
            expected="--prompt TEXT, which asks once",
            got="no terminal, or an answer that is not for a person",
            hint=f"skill-train chat {quoted(options.model)} --prompt TEXT",
        )
    f"{options.prompt}{options.system}".encode()  # what is not UTF-8 ends here: no tokenizer reads it
    first = chosen(options.model, options.file)
    models = [first] if options.compare is None else [first, other(first, options.compare)]
    for model in models:
        warn_of_proof(console, model)
    if options.system is None and not options.raw:
        warn_of_system(console, first, "give it with --system")
    with scratch_folder() as pictures, contextlib.ExitStack() as stack:
        images = _copied_images(options.image, pictures)
        models = [_with_pictures(options, model, pictures, bool(images)) for model in models]
        with console.progress("loading") as progress:
            speakers = []
            for number, (model, name) in enumerate(zip(models, _names(models), strict=True)):
                progress(number, len(models), name)
                speakers.append(stack.enter_context(_speaker(options, model, name)))
        if options.prompt is not None:
            return _asked_once(console, speakers, options.prompt, images)
        return _conversation(console, speakers, images)


def _asked_once(console: Console, speakers: list[_Speaker], prompt: str, images: list[str]) -> Result:
    answers = _answers(console, speakers, prompt, images)
    data = {
        "mode": "completion" if speakers[0].settings.raw else "chat",
        "prompt": prompt,
        "answers": [_data(speaker, reply) for speaker, reply in answers],
    }
    first = answers[0][1]
    human = _side_by_side(answers) if len(answers) > 1 else lambda rich: rich.print(_cut(first))
    return Result(data, human=human, quiet=first.answer.text)


def _cut(reply: CheckedAnswer) -> str:
    """The note after an answer that the model did not end; empty after others."""
    return "" if reply.answer.stopped else "\n(cut by --max-tokens, or by the context)"


def _conversation(console: Console, speakers: list[_Speaker], images: list[str]) -> Result:
    for speaker in speakers:
        settings = ", ".join(f"{name} {value:g}" for name, value in shown(speaker.settings.sampling).items())
        console.status(f"{speaker.name} on the {speaker.loaded.device.upper()}: {settings} ({speaker.source})")
    if speakers[0].settings.raw:
        console.status("no chat template: each line is continued by itself, as the training rows were")
    console.status("Ctrl-D ends the conversation")
    turns = 0
    with contextlib.suppress(KeyboardInterrupt):
        while (line := console.typed(_SIGN)) is not None:
            if not line.strip():
                continue
            earlier = [[*speaker.messages] for speaker in speakers]
            try:
                answers = _answers(console, speakers, line, images)
            except UsageError as refusal:  # such as a turn beyond the context: the conversation goes on without it
                for speaker, messages in zip(speakers, earlier, strict=True):
                    speaker.messages = messages
                console.error(refusal)
                continue
            turns += 1
            if len(answers) > 1:
                console.draw(_side_by_side(answers))
            else:
                console.piece(f"{_cut(answers[0][1])}\n")
    return Result({"models": [speaker.name for speaker in speakers], "turns": turns})


def _answers(
    console: Console, speakers: list[_Speaker], prompt: str, images: list[str]
) -> list[tuple[_Speaker, CheckedAnswer]]:
    """The answer of each model. If there is only one model, its answer is shown while it is written."""
    on_text = console.piece if len(speakers) == 1 else lambda text: None
    answers = [(speaker, speaker.ask(prompt, images, on_text)) for speaker in speakers]
    for speaker, reply in answers:
        if reply.ids_equal is False:
            console.warn(
                "verdict_warn", f"{speaker.name}: llama.cpp reads other tokens in the prompt than the tokenizer does"
            )
    return answers


@contextlib.contextmanager
def _speaker(options: ChatOptions, chosen: Chosen, name: str) -> Iterator[_Speaker]:
    sampling, source = _sampling_of(chosen)
    if options.temperature is not None:
        sampling, source = (
            msgspec.structs.replace(sampling, temperature=options.temperature),
            f"{source}; --temperature",
        )
    settings = Settings(
        sampling=msgspec.structs.replace(sampling, seed=options.seed),
        most=options.max_tokens,
        context=options.context,
        raw=chosen.raw or options.raw,
        tokenizer_of=chosen.folder,
        device=options.device,
    )
    if settings.raw and options.system is not None:
        raise UsageError(
            "a model that continues text takes no system message",
            code="bad_usage",
            expected="a prompt alone",
            got="--system",
            hint="write the whole text into --prompt",
        )
    pictured = chosen.model.pictures is not None
    system = [] if options.system is None else [{"role": "system", "content": _content(options.system, 0, pictured)}]
    with answering(chosen.model, settings) as loaded:
        yield _Speaker(name, loaded, settings, source, pictured, system)


def _sampling_of(chosen: Chosen) -> tuple[Sampling, str]:
    from skill_train.llama.gguf_header import read_gguf

    if chosen.folder is not None:
        return sampling_of(chosen.folder)
    return sampling_of_gguf(read_gguf(chosen.model.path).metadata, chosen.model.path)


def _names(models: list[Chosen]) -> list[str]:
    """The names of the models. Files have their own names, or their paths if two have the same name."""
    names = [each.model.name if each.model.is_gguf else f"{each.where}: {each.model.name}" for each in models]
    return names if len({*names}) == len(names) else [str(each.model.path) for each in models]


# --- Pictures ---


def _copied_images(images: tuple[Path, ...], folder: Path) -> list[str]:
    """Copies the pictures under unique names, and returns the names."""
    names = []
    for number, image in enumerate(images):
        if not image.is_file():
            raise UsageError(
                f"{image} does not exist",
                code="missing_file",
                expected="a still picture, such as PNG or JPEG",
                got=str(image),
                hint="give the path of the picture with --image",
            )
        name = image.name
        while name in names:
            name = f"{number}-{name}"
        names.append(name)
        shutil.copy(image, folder / name)
    return names


def _with_pictures(options: ChatOptions, chosen: Chosen, folder: Path, has_images: bool) -> Chosen:
    """The model with what it needs to read pictures. A projector is loaded only if there is a picture."""
    of_run, is_alone = chosen.model.pictures, chosen.folder is None
    if not (has_images or of_run):
        return chosen
    if not (of_run or is_alone):
        raise UsageError(
            f"{chosen.model.name} reads no pictures",
            code="vision",
            expected="a run that was trained with pictures, or a GGUF file with --mmproj",
            got="--image",
            hint="ask without --image",
        )
    projector = (options.mmproj or chosen.model.projector) if has_images else None
    if has_images and chosen.model.is_gguf and projector is None:
        raise UsageError(
            f"{chosen.model.name} has no projector, so it would answer without the picture",
            code="vision",
            expected="the file of its projector",
            got=f"a GGUF file {'without --mmproj' if is_alone else 'of a run without a projector'}",
            hint=_projector_hint(chosen) if is_alone else f"skill-train export-gguf {quoted(chosen.where)}",
        )
    beside = RunPictures(folder, {"model": str(chosen.model.path.parent), "revision": None})
    pictures = replace(of_run, folder=folder) if of_run else beside
    return replace(chosen, model=replace(chosen.model, pictures=pictures, projector=projector))


def _projector_hint(chosen: Chosen) -> str:
    """The hint to give the projector of a file. It names the projectors in the same folder."""
    beside = sorted(chosen.model.path.parent.glob("mmproj-*.gguf"))
    return f"give it with --mmproj{' ' if beside else ''}{' or '.join(map(quoted, beside))}"


def _content(text: str | None, images: int, pictured: bool) -> Any:
    """The content of a message. For a model that reads pictures, it is a list of parts."""
    if not pictured:
        return text
    return [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]


def _data(speaker: _Speaker, reply: CheckedAnswer) -> dict[str, object]:
    """The answer of one model. `prompt_ids_equal`: llama.cpp read the same ids in the prompt as the model's tokenizer;
    None if the tokenizer's ids are unknown."""
    return {
        "model": speaker.name,
        "answer": reply.answer.text,
        "stopped": reply.answer.stopped,
        "prompt_tokens": reply.answer.prompt_tokens,
        "answer_tokens": reply.answer.tokens,
        "prompt_ids_equal": reply.ids_equal,
        "seconds": round(reply.answer.seconds, 2),
        "device": speaker.loaded.device,
        "sampling": shown(speaker.settings.sampling),
        "sampling_from": speaker.source,
    }


def _side_by_side(answers: list[tuple[_Speaker, CheckedAnswer]]) -> Callable[[Any], None]:
    def draw(rich: Any) -> None:
        table = rich_table(show_lines=True)
        for speaker, _ in answers:
            table.add_column(speaker.name, overflow="fold", ratio=1)
        table.add_row(*(f"{reply.answer.text}{_cut(reply)}" for _, reply in answers))
        rich.print(table)

    return draw
