"""Runs llama.cpp's converters as child processes, on a view of the model folder that contains no code.

The converters load tokenizers with `trust_remote_code=True`. The view is a folder of links without the model's Python
files and without `auto_map` in its configuration files, so it contains no code that could run.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skill_train.core.console import Warn
from skill_train.core.errors import (
    DecisionNeeded,
    NativeCrash,
    NotInstalled,
    SkillTrainError,
    UsageError,
    died_of_memory,
    quoted,
)
from skill_train.core.files import scratch_folder, write_text
from skill_train.core.memory import watch_memory
from skill_train.facts import JsonObject
from skill_train.llama.get_converter import Toolchain
from skill_train.machine.training_program import train_program
from skill_train.model.config import text_config, unread_window
from skill_train.model.convertible import from_config
from skill_train.model.convertible.vocabulary import why_rows_without_tokens
from skill_train.model.folder import read_config
from skill_train.model.foreign_files import weight_files
from skill_train.program.pictures.processor import OWN_FILE, PROCESSOR_DEFAULTS, WHOLE_FILE
from skill_train.run.records import read_json

_WRITING = re.compile(r"Writing:\s+(\d+)%")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]+\.)*([A-Z]\w*(?:Error|Exception|Interrupt)): ?(.*)")
_KEPT_LINES = 400

_CHILD = Path(__file__).with_name("converter_child.py")
Process = subprocess.Popen[str]


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """A failure that is recognised by its log line. Its texts may hold {model}, {line} (the exception), {found} (the
    match of the pattern's group) and {config} (the path of config.json, quoted for a hint)."""

    pattern: str = ""
    kind: type[SkillTrainError] = UsageError
    code: str
    message: str
    expected: str = ""
    got: str = "{line}"
    hint: str

    def error(self, model: Path, line: str, found: str = "") -> SkillTrainError:
        words = {"model": model, "line": line, "found": found, "config": quoted(model / "config.json")}
        message, expected, got, hint = (
            text.format(**words) for text in (self.message, self.expected, self.got, self.hint)
        )
        return self.kind(message, code=self.code, expected=expected, got=got, hint=hint)


def require_convertible(model: Path, toolchain: Toolchain) -> None:
    """Refuses, by `config.json` and file names alone, models that cannot become a GGUF file. `plan` warns about them.

    Args:
        model: the model folder, or the folder of the base whose merged weights will be converted.

    Raises:
        UsageError: the converter does not know the architecture, or llama.cpp computes it differently.
    """
    config = read_config(model)
    text = text_config(config)
    architectures, files = toolchain.architectures(), {path.name for path in model.iterdir()}
    name = from_config.architecture(text, config)
    why = from_config.why_not(text, config, architectures, files) or why_rows_without_tokens(model, str(name))
    if why is None:
        return
    expected = "a model that llama.cpp and transformers compute alike, with all files that the converter reads"
    otherwise = "choose another base model, or download this one completely"
    if name not in architectures:
        expected = "an architecture that this llama.cpp can run"
        otherwise = "choose another base, or a newer llama-cpp-python: pip install -U llama-cpp-python"
    raise UsageError(
        f"{model} cannot become a GGUF file: {why}",
        code="not_convertible",
        expected=expected,
        got=str(name),
        hint="use the adapter or the merged model with transformers or vLLM: skill-train merge RUN; for a GGUF file "
        + otherwise,
    )


def warn_of_window(model: Path, warn: Warn) -> None:
    """Warns if a GGUF file of this model would compute long texts differently, because of a sliding window."""
    config = read_config(model)
    window = unread_window(config)
    if window is not None:
        name = from_config.architecture(text_config(config), config)
        warn("unread_window", from_config.unread_window_warning(window, str(name)))


@contextlib.contextmanager
def without_code(model: Path, **changes: Any) -> Iterator[Path]:
    """A temporary folder with the name and the content of `model`, but without executable code.

    Args:
        changes: keys to set in `adapter_config.json`.
    """
    with scratch_folder() as folder:
        view = folder / (model.resolve().name or "model")
        view.mkdir()
        loaded = weight_files(model)
        for entry in sorted(model.iterdir()):
            other = entry.suffix == ".safetensors" and loaded[0].exists() and entry not in loaded
            if other or entry.suffix == ".py" or entry.name.startswith("."):
                continue
            plain = _plain_config(entry, changes) if entry.name.endswith("config.json") else None
            if plain is None:
                (view / entry.name).symlink_to(entry.resolve())
            else:
                write_text(view / entry.name, json.dumps(plain))
        yield view


@contextlib.contextmanager
def ready(toolchain: Toolchain) -> Iterator[Process]:
    """Starts a converter process for `run`. It imports its packages while the caller prepares the job."""
    with _start(toolchain) as process:
        try:
            yield process
        finally:
            process.kill()  # a process that was used has already ended


def run(
    toolchain: Toolchain,
    arguments: list[str],
    *,
    model: Path,
    on_percent: Callable[[int], None],
    script: str = "convert_hf_to_gguf.py",
    process: Process | None = None,
) -> list[str]:
    """Runs a converter to its end, and returns the last lines of its log.

    Args:
        model: the folder to name in messages.
        on_percent: called with the percentage of the file that is written.
        process: the process of `ready`; None starts a new one.

    Raises:
        UsageError: the converter cannot convert this model; the message says why.
        NotInstalled: the converter needs a package that is missing.
        DecisionNeeded: disk or memory ran out.
        NativeCrash: a signal ended the converter.
    """
    lines: list[str] = []
    with process or _start(toolchain) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has already ended, and its log says why
            process.stdin.write(json.dumps([str(toolchain.folder / script), *arguments]) + "\n")
            process.stdin.flush()
        try:
            for line in process.stdout or ():  # a bar's carriage returns count as line ends
                percent = _WRITING.search(line)
                if percent:
                    on_percent(int(percent[1]))
                elif line.strip():
                    lines = [*lines[-_KEPT_LINES:], line.rstrip()]
            with contextlib.suppress(BrokenPipeError):  # open until here: a closed input ends the converter
                process.stdin.close()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise explain(process.returncode, lines, model=model)
    return lines


def _start(toolchain: Toolchain) -> Process:
    process = subprocess.Popen(
        [sys.executable, "-P", str(_CHILD), str(train_program())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
        cwd=toolchain.folder,
    )
    watch_memory(process.pid)
    return process


def explain(returncode: int, lines: list[str], *, model: Path) -> SkillTrainError:
    """The error for a converter that failed with this log."""
    last = _last_meaningful(lines)
    if returncode == -signal.SIGKILL or (returncode < 0 and died_of_memory("\n".join(lines))):
        return _OUT_OF_MEMORY.error(model, last)
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return NativeCrash(
            f"llama.cpp's converter crashed with {name}",
            code="native_crash",
            got=last,
            hint="skill-train doctor --self-test",
        )
    for cause in _CAUSES:
        for line in reversed(lines):
            if match := re.search(cause.pattern, line):
                found = next(filter(None, match.groups()), "").strip()
                if cause is _MISSING_KEY and _is_token(found):
                    cause = _MISSING_TOKEN
                return cause.error(model, last, found)
    return _UNKNOWN.error(model, last)


def _is_token(key: str) -> bool:
    """Whether the key in a KeyError is a token such as '<|user|>', and not a key of config.json."""
    return not re.search(r"[A-Za-z]\w+", key) or bool(re.fullmatch(r"""['"][^'"]*[<>|\[\]][^'"]*['"]""", key))


def _plain_config(file: Path, changes: Mapping[str, object]) -> JsonObject | None:
    """The configuration without `auto_map`, and with `changes` and the keys that the converter needs. None if the file
    needs no change."""
    config = read_json(file)
    if not isinstance(config, dict):
        return None
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    if file.name == "tokenizer_config.json":
        plain |= _prefix_of(file.with_name("tokenizer.json"), file.with_name("tokenizer.model"))
    if file.name == "config.json":
        plain |= from_config.as_published(config)
    if file.name == "adapter_config.json":
        plain |= changes
    if file.name in (OWN_FILE, WHOLE_FILE):
        plain = _with_own_pictures(file.name, plain, str(read_config(file.parent).get("model_type")))
    return plain if plain != config else None


def _with_own_pictures(name: str, plain: JsonObject, kind: str) -> JsonObject:
    """A processor's file with what the converter needs and a file may leave to its class. The converter joins both
    files. transformers reads the `image_processor` of the second alone, or else the first."""
    of_class = PROCESSOR_DEFAULTS.get(kind, {})
    needed = {key: of_class[key] for key in ("image_mean", "image_std", "size") if key in of_class}
    if name == OWN_FILE:
        return needed | plain
    rest = {key: value for key, value in plain.items() if key not in needed}
    nested = plain.get("image_processor")
    return rest | ({"image_processor": needed | nested} if isinstance(nested, dict) else {})


def _prefix_of(file: Path, pieces: Path) -> dict[str, bool]:
    """`add_prefix_space`, which the converter reads in tokenizer_config.json: whether a sentencepiece vocabulary puts a
    space before text. In training, tokenizer.json or else tokenizer.model decides. Empty for other tokenizers."""
    if not file.is_file() and pieces.is_file():
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(pieces.read_bytes())
        return {"add_prefix_space": bool(proto.normalizer_spec.add_dummy_prefix)}
    tokenizer = _object(read_json(file)) if file.is_file() else {}
    model = _object(tokenizer.get("model"))
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        return {}
    normalizer = _object(tokenizer.get("normalizer"))
    others = normalizer.get("normalizers")
    steps = [_object(step).get("type") for step in [normalizer, *(others if isinstance(others, list) else [])]]
    scheme = _object(tokenizer.get("pre_tokenizer")).get("prepend_scheme", "never")
    return {"add_prefix_space": "Prepend" in steps or scheme != "never"}


def _object(value: Any) -> JsonObject:
    """The value if it is an object, or else an empty one: a file from elsewhere may hold any type."""
    return value if isinstance(value, dict) else {}


def _environment() -> dict[str, str]:
    environment = dict(
        os.environ,
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TRANSFORMERS_VERBOSITY="error",
        PYTHONUTF8="1",
        PYTHONUNBUFFERED="1",
        PYTHONDONTWRITEBYTECODE="1",  # the converter's folder must match its manifest
    )
    for name in ("PYTHONPATH", "NO_LOCAL_GGUF", "HF_TOKEN"):  # the converter has its own gguf-py, and needs no token
        environment.pop(name, None)
    return environment


def _last_meaningful(lines: list[str]) -> str:
    """The exception of a traceback with its message, or else the last error line, or else the last line."""
    for line in reversed(lines):
        if _EXCEPTION.match(line) or line.startswith("ERROR:"):
            return line
    return lines[-1] if lines else "it said nothing"


_OUT_OF_MEMORY = _Cause(
    pattern=r"MemoryError|not enough memory|[Cc]annot allocate memory", kind=DecisionNeeded, code="out_of_memory",
    message="memory ran out while the model was converted",
    hint="close other programs, or run this step on a machine with more memory",
)  # fmt: skip
_MISSING_KEY = _Cause(
    pattern=r"^KeyError: (.*)", code="broken_model",
    message="the config.json of {model} lacks a key that llama.cpp's converter needs: {found}",
    expected="the config.json that the base model was published with", got="without {found}",
    hint="add {found} to {config}, with the value that the base model was published with",
)  # fmt: skip
_MISSING_TOKEN = _Cause(
    code="bad_tokenizer",
    message="the vocabulary of {model} lacks a token that llama.cpp's converter needs: {found}",
    expected="the tokenizer files that the base model was published with, which hold {found}", got="without {found}",
    hint="train on the whole, unchanged base model, whose tokenizer.json contains {found}",
)  # fmt: skip
_UNKNOWN = _Cause(
    code="not_convertible",
    message="llama.cpp's converter cannot convert {model}: {line}",
    hint="pip install -U llama-cpp-python, which brings a newer converter; the model itself was not changed",
)
# Log lines of the converters (llama.cpp of llama-cpp-python 0.3.36), the most specific first.
_CAUSES = (
    _Cause(
        pattern=r"Model (\w+) is not supported|Architecture '(\w+)' not supported", code="not_convertible",
        message="llama.cpp's converter does not know the architecture {found} of {model}",
        expected="an architecture that this llama.cpp can run", got="{found}",
        hint="use a base model of a known architecture (Llama, Qwen, Mistral, Gemma, Phi, …), "
        "or a newer llama-cpp-python: pip install -U llama-cpp-python",
    ),
    _Cause(
        pattern="BPE pre-tokenizer was not recognized", code="not_convertible",
        message="llama.cpp does not know how the tokenizer of {model} splits text before its merges",
        expected="a tokenizer whose pre-tokenizer is in llama.cpp's list, unchanged from its base model",
        hint="copy the base model's tokenizer files into the folder unchanged; a home-made tokenizer "
        "converts when it is a sentencepiece one (tokenizer.model)",
    ),
    _Cause(
        pattern=r"ModuleNotFoundError: No module named '([\w.]+)'", kind=NotInstalled, code="missing_package",
        message="llama.cpp's converter needs the package {found}",
        hint='pip install "skill-train[train,gguf]"',
    ),
    _Cause(
        pattern=r"Quant method is not yet supported: '?([\w-]+)", code="quantized_base",
        message="the weights of {model} are already quantized ({found})",
        expected="full-precision weights", got="{found}",
        hint="merge the adapter into the full-precision base model and convert that",
    ),
    _Cause(
        # The last one is numpy's.
        pattern=r"No space left on device|File too large|Disk quota exceeded|\d+ requested and \d+ written",
        kind=DecisionNeeded, code="no_disk",
        message="the disk became full while the GGUF file was written",
        hint="free some space, or choose a folder on another disk",
    ),
    _OUT_OF_MEMORY,
    _Cause(
        pattern="^FileNotFoundError|File not found", code="bad_tokenizer",
        message="{model} lacks a file that llama.cpp's converter needs: {line}",
        expected="the tokenizer files of the base model, unchanged",
        hint="copy the base model's tokenizer files (tokenizer.model for sentencepiece models) into the folder",
    ),
    _MISSING_KEY,
)  # fmt: skip
