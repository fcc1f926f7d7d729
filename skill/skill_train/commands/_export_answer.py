"""The answer of `export-gguf`: the files, the one to ship, the one that the Modelfile names, and the next commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.commands._export import UNQUANTIZED, Export, is_mix
from skill_train.commands._for_device import DeviceAnswer, draw_answer
from skill_train.commands._outputs import ListedFile, draw_files
from skill_train.commands._projector import server
from skill_train.core.console import Result
from skill_train.core.errors import DecisionNeeded, UsageError, quoted
from skill_train.gguf.export_files import model_of, outtype
from skill_train.run.export_record import quant_option


@dataclass(frozen=True)
class ExportedFiles:
    """The files of an export. The Modelfile names `named`, and `chat` and `serve` use it; `because` is the reason."""

    export: Export
    outputs: list[ListedFile]
    projector: ListedFile | None
    named: str
    because: str

    @property
    def newest(self) -> str | None:
        """The last requested type, if the Modelfile names none of the requested types; otherwise None."""
        types = self.export.types
        names = {file["quant"]: Path(file["path"]).name for file in self.outputs if file["quant"] in types}
        return None if self.named in names.values() else next((kind for kind in reversed(types) if kind in names), None)


def result_of(
    done: ExportedFiles, data: Mapping[str, object], answer: DeviceAnswer | None, error: DecisionNeeded | None
) -> Result:
    """The answer of an export.

    Args:
        answer: the file to ship; None if no device was named.
        error: no file fits the device. The files were made nevertheless.
    """
    files = [*done.outputs, *([done.projector] if done.projector else [])]
    last = done.outputs[-1]["path"]
    if answer is not None:
        last = next((file["path"] for file in done.outputs if file["quant"] == answer["recommended"]), last)

    def draw(rich: Any) -> None:
        draw_files(rich, files)
        rich.print(f"for Ollama: {data['ollama']}", soft_wrap=True)
        rich.print(f"Modelfile, chat and serve use {done.named}: {done.because}", soft_wrap=True)
        if answer is not None:
            draw_answer(rich, answer)

    data = {**data, **({"mmproj": done.projector} if done.projector else {}), **({"for": answer} if answer else {})}
    return Result(data, human=draw, quiet=last, next=[] if error else _next(done, last), error=error)


def _next(done: ExportedFiles, last: str) -> list[str]:
    """The next commands: verify the files, serve a model with its projector, ask one question, and let the Modelfile
    name another type."""
    run = done.export.run
    named = " ".join(f"--gguf {quoted(output['path'])}" for output in done.outputs)
    target = quoted(run.path) if run else f"--reference {quoted(done.export.model)} {named}"
    pair = [server(last, done.projector)] if done.projector else []
    chat = f"skill-train chat {quoted(run.path if run else last)} --prompt Hello"
    if run is None or done.newest is None:
        return [f"skill-train verify {target}", *pair, chat]
    chosen = (
        f"skill-train export-gguf {quoted(run.path)} --quant {quoted(done.newest)} --modelfile {quoted(done.newest)}"
    )
    others = [] if is_mix(done.newest) else [chosen]  # `--quant` has no word for a mix
    return [f"skill-train verify {target}", *pair, f"{chat} --file {quoted(done.newest)}", *others]


def modelfile_of(
    export: Export, named_type: str | None, outputs: list[ListedFile], unquantized: str
) -> tuple[str, str]:
    """The file that the Modelfile names, and the reason.

    The Modelfile keeps the file of an earlier export until the user names another type, or the file is gone. Otherwise
    a user who made an Ollama model of it would serve another file unknowingly.

    Args:
        named_type: the type that the Modelfile shall name; None if the user named none.
        unquantized: the name of the file that all others are made from.
    """
    out, names = export.out, {output["quant"]: Path(output["path"]).name for output in outputs}
    if named_type is not None:
        chosen = names.get(named_type, f"{export.name}-{named_type}.gguf")
        if not (out / chosen).is_file():
            raise _no_file_of(named_type, list(names))
        return chosen, "chosen with --modelfile, or for the device"
    earlier = out / (model_of(out / "Modelfile") or "")
    if earlier.is_file() and earlier.parent == out:
        return earlier.name, "an earlier export chose it; --modelfile TYPE names another"
    last = next((names[quant] for quant in reversed(export.types) if quant in names), "")
    return (last, "the last of the types that were asked for") if last else (unquantized, "the only file")


def require_file_for_modelfile(export: Export) -> None:
    """Refuses, before anything is converted, a type for the Modelfile if there will be no file of that type."""
    chosen, unquantized = export.modelfile, outtype(export.records / "convert.json", export.unquantized)
    coming = {*export.types, *(UNQUANTIZED if unquantized == "auto" else (unquantized,))}
    if chosen is None or chosen in coming or (export.out / f"{export.name}-{chosen}.gguf").is_file():
        return
    raise _no_file_of(chosen, export.types)


def _no_file_of(kind: str, there: list[str]) -> UsageError:
    return UsageError(
        f"there is no file of type {kind} for the Modelfile",
        code="bad_usage",
        expected=", ".join(sorted(there)),
        got=kind,
        hint=f"name the type in --quant too:{quant_option(kind) or ' --mix FILE'}",
    )
