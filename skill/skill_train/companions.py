"""The files beside the weights: tokenizer, chat template, generation config, licence.

They are the base's, byte for byte. transformers 5 drops things when it saves them again (a GPT-2 config loses `n_ctx`,
Phi-3 and Gemma lose `tokenizer.model`), and llama.cpp's converter needs those. Only what a merge changed is changed.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skill_train.resources import train_module
from skill_train.run_dir import digests, read_json, write_text
from skill_train.shards import INDEX

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_READ = {*_TOKENIZER, "config.json", "generation_config.json", "chat_template.jinja"}  # by programs that check them
_TEMPLATE = "chat_template.jinja"


def companion_files(folder: Path) -> list[Path]:
    """The files that go along with a model: what `train.files_of_base` takes, but for links that lead elsewhere."""
    found: list[Path] = train_module().files_of_base(folder)
    return [path for path in found if path.name in _READ or _is_own(path, folder)]


def model_digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Of these and of the weights: all that decides what a model says, and nothing else that lies in its folder."""
    return digests(folder, {*companion_files(folder), *folder.glob("*.safetensors"), *folder.glob(INDEX)})


def adapter_files(adapter: Path) -> list[Path]:
    """The tokenizer files that lie beside an adapter."""
    return [adapter / name for name in (*_TOKENIZER, _TEMPLATE) if (adapter / name).is_file()]


def copy_companions(base: Path, adapter: Path, part: Path, warn: Callable[[str, str], None]) -> list[str]:
    """Copies what belongs beside the merged weights, and returns the names that come from the adapter.

    The adapter's tokenizer is taken when it has tokens that the base's lacks, and its chat template when the base has
    none. Any other difference is the base's, with a warning.
    """
    for file in companion_files(base):
        target = part / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    taken = [adapter / name for name in _TOKENIZER if (adapter / name).is_file()] if _adds_tokens(base, adapter) else []
    for file in taken:
        shutil.copyfile(file, part / file.name)
    template, trained = chat_template(base), chat_template(adapter)
    if template is None and trained is not None:
        write_text(part / _TEMPLATE, trained)
        taken.append(part / _TEMPLATE)
    elif template is not None and chat_template(part) != template:
        write_text(part / _TEMPLATE, template)  # it was inside the base's tokenizer_config.json
    for name, ours, theirs in (
        ("chat template", template, trained),
        ("eos_token", _eos(part), _eos(adapter)),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            warn(
                "tokenizer_differs",
                f"the adapter's folder has another {name} than the merged model, which keeps the base's",
            )
    return [file.name for file in taken]


def write_config(base: Path, part: Path, changes: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Writes config.json with the changed fields, at each level that has them, and returns those; as it is without any.

    Args:
        dtype: a torch name when every weight has a new dtype.
    """
    config = read_json(base / "config.json")
    levels = [level for level in (config, config.get("text_config")) if isinstance(level, dict)]
    changed: dict[str, Any] = {}
    names = [name for name in ("dtype", "torch_dtype") if any(name in level for level in levels)] or ["dtype"]
    for name, value in (*changes.items(), *((name, dtype) for name in names if dtype)):
        holders = [level for level in levels if name in level] or [config]
        if any(level.get(name) != value for level in holders):
            changed[name] = value
            for level in holders:
                level[name] = value
    if changed:
        # Not `write_json`: a base's config may hold Infinity, which transformers reads.
        write_text(part / "config.json", json.dumps(config, indent=1) + "\n")
    return changed


def chat_template(folder: Path) -> str | None:
    """The one chat template of a folder; None without one, or with several named ones."""
    if (folder / _TEMPLATE).is_file():
        return (folder / _TEMPLATE).read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _is_own(path: Path, folder: Path) -> bool:
    """It lies in the folder, or is a link to the `blobs` of the Hub's cache. Another link could bring in any file of
    this machine, and a push would publish it."""
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent.resolve() / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)


def _adds_tokens(base: Path, adapter: Path) -> bool:
    """The adapter's tokenizer knows a token or an id that the base's does not."""
    if not any((base / name).is_file() for name in _TOKENIZER):
        return any((adapter / name).is_file() for name in _TOKENIZER)
    if all(_same_file(adapter / name, base / name) for name in _TOKENIZER):
        return False  # to read a tokenizer of 150,000 tokens takes 80 MB
    return bool(set(_added_tokens(adapter)) - set(_added_tokens(base)))


def _same_file(own: Path, other: Path) -> bool:
    """There is none, or it is the other byte for byte."""
    return not own.is_file() or (other.is_file() and filecmp.cmp(own, other, shallow=False))


def _added_tokens(folder: Path) -> Iterator[tuple[str, str]]:
    """`(content, id)` of each."""
    listed = _json(folder / "tokenizer.json").get("added_tokens")
    decoder = _json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for token in listed if isinstance(listed, list) else ():
        yield _said(token, "content"), str(_said(token, "id"))
    for content, number in _json(folder / "added_tokens.json").items():
        yield content, str(number)
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        yield _said(token, "content"), number


def _said(token: Any, key: str) -> str:
    """What an entry says, as text: it is compared, and can be anything."""
    return str(token.get(key)) if isinstance(token, dict) else ""


def _eos(folder: Path) -> Any:
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that is not ours to judge; empty when there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
