"""The files beside the weights: tokenizer, chat template, generation config, licence.

They are copied from the base byte for byte, except what a merge changes. transformers 5 would lose parts when it saves
them again (a GPT-2 config loses `n_ctx`, Phi-3 and Gemma lose `tokenizer.model`), which llama.cpp's converter needs.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from skill_train.core.console import Warn
from skill_train.core.digests import FileDigest, digests, file_digest
from skill_train.core.errors import UsageError
from skill_train.core.files import write_text
from skill_train.model.foreign_files import object_in
from skill_train.model.new_tokens import TOKENIZER, end_token, take_tokenizer, takes_tokenizer
from skill_train.program.folders.base import files_of_base, set_fields
from skill_train.program.model_files import INDEX, roots_of
from skill_train.program.pictures.processor import OWN_FILE, WHOLE_FILE
from skill_train.run.records import read_json

_PIECES = "tokenizer.model"
_TEMPLATE = "chat_template.jinja"


def prepares_pictures(folder: Path) -> bool:
    """Whether a file says how pictures are prepared. transformers 5 saves the image processor as a part of the whole
    processor."""
    return (folder / OWN_FILE).is_file() or isinstance(object_in(folder / WHOLE_FILE).get("image_processor"), dict)


def companion_files(folder: Path) -> list[Path]:
    """The files that belong to a model beside its weights. A link may lead to the `blobs` of the Hub's cache. Any other
    link is left out, because it could lead to a private file of this machine, which a push would publish."""
    roots = roots_of(folder)
    return [path for path in files_of_base(folder) if any(path.resolve().is_relative_to(root) for root in roots)]


def model_digests(folder: Path) -> dict[str, FileDigest]:
    """The digests of the companion files and the weights: everything that determines the answers of a model."""
    return digests(folder, {*companion_files(folder), *folder.glob("*.safetensors"), *folder.glob(INDEX)})


def adapter_files(adapter: Path) -> list[Path]:
    """The tokenizer files in an adapter folder."""
    return [adapter / name for name in (*TOKENIZER, _TEMPLATE) if (adapter / name).is_file()]


def copy_companions(base: Path, adapter: Path, part: Path, warn: Warn) -> list[str]:
    """Copies the files that belong beside the merged weights; returns the names of those from the adapter.

    The adapter's tokenizer is used if it has tokens that the base's lacks (`new_tokens`), and its chat template if the
    base has none. For any other difference the base's file is used, with a warning.
    """
    for file in companion_files(base):
        target = part / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    from_adapter = take_tokenizer(base, adapter, part) if takes_tokenizer(base, adapter) else []
    template, trained = chat_template(base), chat_template(adapter)
    if template is None and trained is not None:
        write_text(part / _TEMPLATE, trained)
        from_adapter.append(_TEMPLATE)
    elif template is not None and chat_template(part) != template:
        write_text(part / _TEMPLATE, template)  # the base has it inside its tokenizer_config.json
    for name, ours, theirs in (
        ("chat template", template, trained),
        ("eos_token", end_token(part), end_token(adapter)),
        (_PIECES, *(file_digest(each / _PIECES) if (each / _PIECES).is_file() else None for each in (part, adapter))),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            warn(
                "tokenizer_differs",
                f"the adapter's folder has another {name} than the merged model, which keeps the base's",
            )
    return from_adapter


def write_config(base: Path, part: Path, changes: Mapping[str, object], dtype: str | None) -> dict[str, object]:
    """Writes config.json with these fields and dtype, as `set_fields` sets them, and returns those that changed. Leaves
    the copy of the base's file if none did."""
    config = read_json(base / "config.json")
    changed = set_fields(config, changes, dtype)
    if changed:
        # Not `write_json`: a base's config may hold Infinity, which transformers reads.
        write_text(part / "config.json", json.dumps(config, indent=1) + "\n")
    return changed


def chat_template(folder: Path) -> str | None:
    """The only chat template of a folder; None without one, or with several named ones."""
    if (folder / _TEMPLATE).is_file():
        return _text(folder / _TEMPLATE)
    template = object_in(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 at byte {error.start}",
            code="broken_model",
            expected="text in UTF-8",
            hint="save the file as UTF-8, or download it again",
        ) from None
