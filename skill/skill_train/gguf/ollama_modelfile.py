"""Writes the Modelfile, which tells Ollama how to run a GGUF file: stop tokens, sampling and context, with a reason for
each line. The frame is `templates/Modelfile`.

A model that was trained with its chat template gets no TEMPLATE. Ollama would use TEMPLATE instead of the template in
the file. TEMPLATE is written in Go's template language, so it would be a second, untested version.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

from skill_train.core import resources
from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject
from skill_train.llama.sampling import not_done, read_sampling
from skill_train.llama.template import Conversation, render_reference
from skill_train.model.config import text_config
from skill_train.program.encode import TEMPLATE_SECONDS
from skill_train.reference.load import generation_config
from skill_train.reference.load import load_tokenizer as load_tokenizer
from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.records import read_json

Reason = dict[str, str]

# Pairs of the name in generation_config.json and the name in a Modelfile. Source:
# https://github.com/ollama/ollama/blob/main/docs/modelfile.md
_SAMPLING = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("repetition_penalty", "repeat_penalty"),
)
_OLLAMA_CONTEXT = 4096  # tokens; Ollama's default context on most machines
# Source: `llamaServerChatMessage` and `qwenVLServerArgs` in Ollama's llm/llama_server.go of 2026-08-21.
_PICTURES = (
    "# Ollama 0.30 and newer puts a picture behind the words of its message, and gives Qwen-VL 1,024 tokens for it.",
    "# `verify` judged the pair with pictures where the rows have them, and of llama.cpp's own size.",
)
BARE_TEMPLATE = "TEMPLATE {{ .Prompt }}"
_PROBE = "Zebra quartz 8162."  # an answer that no template contains


def modelfile(gguf: str, parameters: list[str], projector: str | None = None, *, adapter: str | None = None) -> str:
    """The text of a Modelfile.

    Args:
        gguf: the file name for FROM, relative to the Modelfile.
        parameters: the lines of `parameters_of`.
        projector: the GGUF file that reads pictures for the model. Ollama takes it from a second FROM
            (server/create.go, `isProjectorGGUF`, 2026-08-21).
        adapter: the GGUF file of a LoRA adapter for the model.

    Raises:
        UsageError: a file name has a character that a Modelfile cannot hold.
    """
    template = Template(resources.template("Modelfile").read_text(encoding="utf-8"))
    files = [gguf] if projector is None else [gguf, projector]
    lines = "\nFROM ".join(map(_file_reference, files)) + (f"\nADAPTER {_file_reference(adapter)}" if adapter else "")
    of_pictures = _PICTURES if projector is not None else ()
    text = template.substitute(gguf=lines, parameters="\n".join([*of_pictures, *parameters]))
    if BARE_TEMPLATE in parameters:  # the frame explains the missing TEMPLATE
        text = "\n".join(line for line in text.split("\n") if not line.startswith("# No TEMPLATE"))
    return text


def edits(text: str, written: str) -> list[str]:
    """How the text of a Modelfile differs from the text that the export wrote. Comments are ignored."""
    there, ours = (_commands(each) for each in (text, written))
    lacks = [f"it lacks {line}" for line in ours if line not in there]
    return lacks + [f"it has {line}" for line in there if line not in ours]


def _commands(text: str) -> list[str]:
    """The lines without comments, with their instructions in upper case. A system message becomes one line, because its
    lines may begin with `#`."""
    folded = re.sub(r'(?ms)^SYSTEM """.*?"""$', lambda found: "\\n".join(found[0].splitlines()), text)
    lines = [line for line in folded.splitlines() if line.strip() and line[0] != "#"]
    return [re.sub(r"^\w+", lambda word: word[0].upper(), line) for line in lines]


def _file_reference(file: str) -> str:
    if not file.isprintable() or not file:
        raise UsageError(
            f"the file name {file!r} cannot be written into a Modelfile", code="bad_usage", hint="rename the file"
        )
    return file if Path(file).is_absolute() or file.startswith("./") else f"./{file}"


def parameters_of(
    model: Path,
    trained_length: int | None = None,
    *,
    bare: bool = False,
    tokenizer: Any = None,
    system: str | None = None,
) -> tuple[list[str], list[Reason]]:
    """The lines that follow FROM, and the reason for each line and for each line that was left out.

    Args:
        model: the converted folder; its tokenizer, generation_config.json and config.json are read.
        trained_length: the longest training example in tokens, if known.
        bare: the rows were trained unchanged, without the chat template.
        tokenizer: the model's, if the caller has it. Its template is rendered in the main thread, which can be stopped.
        system: the system message of all rows, from `train_record.system_of`; None for none.

    Raises:
        UsageError: the template does not end.
    """
    tokenizer = tokenizer or load_tokenizer(model)
    generation, config = generation_config(model), read_json(model / "config.json")
    lines: list[str] = []
    reasons: list[Reason] = []

    def add(name: str, value: Any, because: str, source: str) -> None:
        lines.extend((f"# {because} ({source})", f"PARAMETER {name} {value}"))
        reasons.append(_reason(f"PARAMETER {name} {value}", because, source))

    for token, because, source in _stops(tokenizer, generation, config):
        if '"' in token or not token.isprintable():
            reasons.append(_reason(f"no stop {token!r}", "a Modelfile cannot quote it", source))
        else:
            add("stop", f'"{token}"', because, source)
    _add_sampling(generation, add, reasons)
    longest = {**text_config(config), **config}.get("max_position_embeddings")
    _add_context(longest, trained_length, add, reasons)
    if bare and tokenizer.chat_template:
        because = "trained on bare text: what a user types is the whole prompt, without the model's chat template"
        lines.extend((f"# {because} (recipe)", BARE_TEMPLATE))
        reasons.append(_reason(BARE_TEMPLATE, because, "recipe"))
    else:
        reasons.append(_template_reason(tokenizer))
    if system is not None:
        because = "every row was trained after this system message"
        if no := _why_not_quoted(system):
            reasons.append(_reason("no SYSTEM", f"{because}, and {no}", "samples.jsonl"))
        else:
            lines.extend((f"# {because} (samples.jsonl)", f'SYSTEM """{system}"""'))
            reasons.append(_reason("SYSTEM", because, "samples.jsonl"))
    return lines, reasons


def parameters_of_run(model: Path, run: RunDir | None, tokenizer: Any = None) -> tuple[list[str], list[Reason]]:
    """`parameters_of` with the training's facts from the run's records. `run` is None for a model without a run."""
    if run is None:
        return parameters_of(model, tokenizer=tokenizer)
    recipe, record = plan_record.read(run.plan).recipe, train_record.read(run.record("train"))
    bare, system = train_record.is_asked_bare(record, recipe.format), train_record.system_of(run.path)
    return parameters_of(model, recipe.max_length, bare=bare, tokenizer=tokenizer, system=system)


def _why_not_quoted(system: str) -> str:
    """Why a Modelfile cannot hold the system message; empty if it can. Ollama's parser (parser/parser.go) has no
    escapes, and drops characters that Go calls unprintable, such as no-break spaces and the joiners of emoji."""
    if not system:
        return "its text is not there any more"
    dropped = next((each for each in system if not each.isprintable() and each not in "\t\r\n"), "")
    if dropped:
        return f"Ollama drops the character U+{ord(dropped):04X} in it"
    return "a Modelfile cannot quote it" if '"""' in system else ""


def _reason(rule: str, because: str, source: str) -> Reason:
    return {"rule": rule, "because": because, "source": source}


def _stops(tokenizer: Any, generation: JsonObject, config: JsonObject) -> list[tuple[str, str, str]]:
    """The distinct texts that end an answer, as `(text, reason, source)`."""
    stops: dict[str, tuple[str, str, str]] = {}
    turn_end = _turn_end(tokenizer)
    if turn_end:
        stops[turn_end] = (turn_end, "the chat template writes it after an answer", "chat template")
    for source, ids in (
        ("generation_config.json", generation.get("eos_token_id")),
        ("config.json", config.get("eos_token_id")),
        ("tokenizer", tokenizer.eos_token_id),
    ):
        for number in ids if isinstance(ids, list) else [ids]:
            token = tokenizer.convert_ids_to_tokens(number) if isinstance(number, int) else None
            if token and token in tokenizer.get_added_vocab():  # a plain word as a stop would cut answers short
                stops.setdefault(token, (token, "an end-of-sequence token of the model", source))
    for word in read_sampling(generation).stops:
        stops.setdefault(word, (word, "a text that ends the model's answers", "generation_config.json"))
    return list(stops.values())


def _turn_end(tokenizer: Any) -> str | None:
    """The special token that the chat template writes after an answer; None if there is none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
    [rendered] = render_reference(tokenizer, [Conversation(messages, None, False)], seconds=TEMPLATE_SECONDS)
    if rendered.text is None:  # a template that refuses such a plain text shows no end
        return None
    after = rendered.text.rpartition(_PROBE)[2].lstrip()
    special = [token for token in tokenizer.get_added_vocab() if after.startswith(token)]
    return max(special, key=len, default=None)


def _add_sampling(generation: JsonObject, add: Callable[[str, Any, str, str], None], reasons: list[Reason]) -> None:
    source, ollama, sampling = "generation_config.json", "ollama api/types.go DefaultOptions", read_sampling(generation)
    greedy = not generation.get("do_sample")
    for name, parameter in _SAMPLING:
        value = generation.get(name)
        if greedy and name == "temperature":
            because = (
                "transformers decodes this model greedily, and so do the checks of `verify`; raise it for free text"
            )
            add(parameter, 0, because, source)
        elif type(value) in (int, float):
            add(parameter, json.dumps(value), f"the model's own {name}", source)
        elif name == "repetition_penalty":
            because = "transformers applies none, and Ollama before 0.32.10 applies 1.1: answers would differ"
            add(parameter, "1.0", because, ollama)
        elif not greedy and name != "min_p":
            because = "transformers takes it where a model names none, and Ollama another one"
            add(parameter, json.dumps(getattr(sampling, name)), because, ollama)
    if sampling.repetition_penalty != 1:
        add("repeat_last_n", -1, "transformers penalizes the whole text, and Ollama its last 64 tokens", ollama)
    for name in not_done(generation):
        reasons.append(
            _reason(f"no PARAMETER for {name}", "transformers applies it, and this Modelfile does not", source)
        )


def _add_context(
    longest: Any, trained: int | None, add: Callable[[str, Any, str, str], None], reasons: list[Reason]
) -> None:
    limit = longest if isinstance(longest, int) else None
    if limit is not None and limit < _OLLAMA_CONTEXT:
        add("num_ctx", limit, "the model cannot look further back", "config.json")
    elif trained is not None and trained > _OLLAMA_CONTEXT:
        because = f"it was trained on examples of up to {trained} tokens"
        if limit is not None and limit < trained:
            because += f", and the model takes {limit}"
        add("num_ctx", min(trained, limit or trained), because, "recipe")
    else:
        because = f"Ollama's own default holds; the model can use up to {limit or 'an unknown number of'} tokens"
        reasons.append(_reason("no PARAMETER num_ctx", because, "config.json"))


def _template_reason(tokenizer: Any) -> Reason:
    if not tokenizer.chat_template:
        because = "the model has no chat template; it continues plain text, as `ollama run` then does too"
        return _reason("no TEMPLATE", because, "tokenizer")
    because = (
        "the GGUF file carries the model's own chat template, and a TEMPLATE would override it. Ollama takes the one "
        "of its own templates that is nearest; where `ollama show --template NAME` prints only {{ .Prompt }}, it knew "
        "none: from 0.30 on it then renders the model's own, as llama.cpp does"
    )
    return _reason("no TEMPLATE", because, "chat template; ollama server/model.go detectChatTemplate")
