"""The second file of a vision model, for `export-gguf`: its type, and its part in the answer."""

from pathlib import Path

from skill_train.commands._outputs import ListedFile
from skill_train.core.errors import UsageError, quoted
from skill_train.model.config import TEXT_OF_VISION, is_vision
from skill_train.model.convertible import from_config
from skill_train.model.folder import read_config
from skill_train.model.sidecar_files import prepares_pictures
from skill_train.run import export_record

NONE = "none"
CHOICES = ("f16", "q8_0", "bf16", "f32", NONE)
_OLLAMA = "Ollama server/create.go isProjectorGGUF, 2026-08-21"


def projector_type(model: Path, mmproj: str | None, record: Path, *, text_run: bool) -> str | None:
    """The type of the projector's file; None if only the language model is exported.

    The default is the type of an earlier export, or f16. If a model can be trained for text alone, a run of text gets a
    projector only with --mmproj, and a folder of such a model gets one if llama.cpp can read its pictures.

    Args:
        mmproj: one of `CHOICES`.
        record: `mmproj.json`, which may be missing.
        text_run: the model belongs to a run without pictures.
    """
    if mmproj == NONE:
        return None
    if mmproj is None and record.is_file():
        return export_record.read(record).options["outtype"]
    config = read_config(model)
    if is_vision(config):
        can = prepares_pictures(model) and from_config.why_no_projector(config) is None
        text_alone = config.get("model_type") in TEXT_OF_VISION and (text_run or not can)
        return mmproj or (None if text_alone else "f16")
    if mmproj is None:
        return None
    raise UsageError(
        f"{model} reads no pictures, so it has no projector",
        code="bad_usage",
        expected="a vision model",
        got=f"--mmproj {mmproj} and model type {config.get('model_type')}",
        hint="omit --mmproj",
    )


def refuse_adapter_alone(base: Path) -> None:
    """Refuses to export only the adapter if it may change weights that are not in the language model's file."""
    config = read_config(base)
    if is_vision(config) and config.get("model_type") not in TEXT_OF_VISION:
        raise UsageError(
            "the adapter of a vision model cannot be a GGUF file of its own",
            code="not_convertible",
            expected="an adapter of a language model: llama.cpp applies none to a vision tower",
            got=f"model type {config.get('model_type')}",
            hint="export the merged model: the same command without --lora",
        )


def from_line(projector: ListedFile) -> dict[str, str]:
    """The reason of the Modelfile's second FROM."""
    because = "the vision tower and the projector, which Ollama takes from a second FROM"
    return {"rule": f"FROM ./{Path(projector['path']).name}", "because": because, "source": _OLLAMA}


def server(text: str, projector: ListedFile) -> str:
    return f"llama-server -m {quoted(Path(text))} --mmproj {quoted(Path(projector['path']))}"
