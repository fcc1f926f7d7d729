"""A model folder from elsewhere: files of bounded size, checked before a library reads them."""

import json
import math
import os
import re
import shlex
import stat
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict

from skill_train.program.events import Refused, file_digest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# In a model's repository: the files beside its weights, and copies of the weights in other formats.
BESIDE_WEIGHTS = ["*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]
# The files of a model folder that libraries read, with the most bytes of each: several times the largest published one.
FOREIGN_JSON = {
    **dict.fromkeys(("config.json", "generation_config.json", "adapter_config.json", "chat_template.json"), 1 << 24),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), 1 << 26),
    **dict.fromkeys(("tokenizer.json", "vocab.json", INDEX), 1 << 28),
}
VOCABULARIES = ("tokenizer.json", "vocab.json", INDEX)  # read only where needed, because one takes half a second
FOREIGN_BYTES = {".jinja": 1 << 22, ".model": 1 << 27, ".tiktoken": 1 << 27, ".txt": 1 << 27}
# Values take time and memory, not bytes: each takes 64 bytes or more in Python. 85 million empty objects in 256 MB took
# 27 s and 7.5 GB. A tokenizer.json of 33 MB has 2 million values.
BYTES_A_VALUE = 32
MOST_MARKS = 8_000_000  # in the header of a safetensors file: a million tensors
DEEPEST = 64  # levels of nested lists and objects; the deepest published config has 6
MOST_DIGITS = 40  # `model_max_length` of many tokenizers is 10**30
LARGEST = (1 << 63) - 1
HALF = re.compile("[\ud800-\udfff]")
MOST_HEADER = 100_000_000  # bytes, as safetensors allows
MOST_AXES = 64  # of a tensor, as numpy allows
# Bits of one number by dtype (safetensors 0.8, `Dtype`).
ITEM_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
PARTS = ("text_config", "vision_config", "llm_config", "language_config", "thinker_config", "quantization_config")
KINDS_OF_JSON = {
    list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value", type(None): "null"
}  # fmt: skip
# Keys of config.json that say how many or how large tensors a loader creates.
COUNTS = re.compile(r"(layer|block|expert|head)s?(_per_\w+)?$|(^|_)depth$")
SIZES = re.compile(
    r"(hidden|intermediate|vocab|inner|ffn|embed|embedding|model|state|proj)_size$|^n_(embd|inner)$|^d_|_(dim|rank)$"
    r"|^num_labels$"
)
MANY, WIDE = 256, 1 << 18  # always allowed, because so much is created in a moment
MOST_LAYERS, WIDEST = 10_000, 1 << 21  # of a folder without weights; published models have 126 layers, 262,208 rows
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
EXPERTS = ("eager", "grouped_mm", "batched_mm")
# Keys in which transformers 5.23 accepts the name of code or of another file to load, with the values that are neither.
NAMES_OF_CODE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), ATTENTION),
    **dict.fromkeys(("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), EXPERTS),
    **dict.fromkeys(
        ("kernel_config", "use_kernels", "allow_all_kernels", "custom_generate", "transformers_weights"), ()
    ),
}


JsonObject = dict[str, Any]  # of a document that somebody else wrote


def check_model(folder: Path) -> None:
    """Refuses a model folder that leads libraries to files outside it, or to endless work. Call it before a library
    reads the folder. It looks for devices, pipes, links to elsewhere, files that are too large or not JSON, an index of
    files that are not safetensors files of this folder, and a config that claims far more than the weights hold. It
    refuses an adapter beside a model too: transformers would load it silently, and other programs would not."""
    check_files(folder)
    if all((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise Refused(
            f"{folder} holds an adapter beside its model",
            code="not_a_model",
            expected="a folder with the whole model alone",
            got="adapter_config.json in it",
            hint="move adapter_config.json and the adapter's weights out of the folder",
        )
    check_claims(folder, stored_shapes(weight_files(folder)))


def check_files(folder: Path) -> None:
    """As `check_model`, for any folder of such files, such as an adapter or a tokenizer."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        check_file(path, folder)
    for name in FOREIGN_JSON:
        if name not in VOCABULARIES and (folder / name).is_file():
            document = foreign_json(folder / name)
            if not isinstance(document, dict):
                raise unsound(folder / name, f"it holds {KINDS_OF_JSON.get(type(document), 'a value')}, not an object")
            check_values(document, folder / name)
            if name.endswith("config.json"):
                check_settings(document, folder / name)
            if name in ("config.json", "generation_config.json"):
                check_ids(document, folder / name)


def check_settings(document: Any, path: Path) -> None:
    """Refuses settings that name code to fetch and run, at any depth. `auto_map` and `custom_pipelines` are allowed:
    they have an effect only with trust_remote_code, which is off everywhere."""
    for holder in (value for _, value in nodes_in(document) if isinstance(value, dict)):
        for key, allowed in NAMES_OF_CODE.items():
            setting = holder.get(key)
            for value in setting.values() if isinstance(setting, dict) else [setting]:
                if value and not (isinstance(value, str) and value in allowed):
                    raise Refused(
                        f"{path} requests code to be loaded: {key}",
                        code="unsafe_file",
                        expected=" or ".join(allowed) or f"no {key}",
                        got=repr(value)[:200],
                        hint=f"remove {key} from the file if you trust the rest of the model",
                    )


def check_values(document: JsonObject, path: Path) -> None:
    """Refuses values that libraries in C or Rust cannot store: whole numbers above 2**63, and half a surrogate pair as
    a character. `model_max_length` may be 10**30, for "no limit"."""
    for key, value in nodes_in(document):
        if isinstance(value, int) and abs(value) > LARGEST and key != "model_max_length":
            raise unsound(path, f"{key} is a number of {len(str(value))} digits")
        if isinstance(value, str) and HALF.search(value):
            raise unsound(path, f"{key} holds half of a character")


def check_ids(document: JsonObject, path: Path) -> None:
    """Refuses token ids, parts and a model type of the wrong JSON type. Libraries would fail on them much later."""
    if not isinstance(document.get("model_type", ""), str):
        raise unsound(path, f"model_type is {json.dumps(document['model_type'])[:100]}, not text")
    for key, value in document.items():
        if key in PARTS and value is not None and not isinstance(value, dict):
            raise unsound(path, f"{key} is {json.dumps(value)[:100]}, not an object")
        listed = value if isinstance(value, list) else [value]
        if key.endswith(("_token_id", "suppress_tokens")) and not all(is_id(element) for element in listed):
            raise unsound(path, f"{key} is {json.dumps(value)[:100]}, not a token id or a list of token ids")


def is_id(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 31)


def check_claims(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Refuses a config that claims far more layers, experts or columns than the weights hold, or, without weights, than
    any published model has. A loader would create them all before it sees that their weights are missing."""
    if not (folder / "config.json").is_file():
        return
    for key, value in nodes_in(foreign_json(folder / "config.json")):
        most = most_claimed(key, shapes)
        if most is not None and isinstance(value, (int, float)) and value > most:
            message = f"{folder / 'config.json'} does not match the weights: {key} is {value:g}"
            expected = f"at most {most}" + (f" of a model of {len(shapes)} tensors" if shapes else "")
            raise broken_model(message, expected, f"{value:g}")


def most_claimed(key: str, shapes: dict[str, list[int]]) -> int | None:
    """The largest value that a key of a config may have with these weights; None for a key that creates nothing."""
    if "window" in key:  # Qwen 2 counts layers there that its small models do not have
        return None
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    if COUNTS.search(key):  # experts lie in a tensor each, or all in one
        return max(MANY, len(shapes), widest if "expert" in key else 0) if shapes else MOST_LAYERS
    return (max(WIDE, widest) if shapes else WIDEST) if SIZES.search(key) else None


def stored_shapes(files: list[Path]) -> dict[str, list[int]]:
    """The shapes of the tensors in these files, by name; empty if a file is missing or broken, which the reader of its
    weights reports. Empty tensors are left out, because they may claim any shape."""
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            tensors = safetensors_header(path).tensors
        except (FileNotFoundError, Refused):
            return {}
        shapes |= {name: entry["shape"] for name, entry in tensors.items() if 0 not in entry["shape"]}
    return shapes


class TensorEntry(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


class Header(NamedTuple):
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int  # the byte of the file from which the offsets of the tensors count


def safetensors_header(path: Path) -> Header:
    """The header of a safetensors file: dtype, shape and byte range by tensor, and its `__metadata__`.

    Source: https://github.com/huggingface/safetensors, README, "Format". The tensors lie one after the other, from the
    end of the header to the end of the file.
    """
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MOST_HEADER):
            raise broken_weights(path, f"its header claims {length} bytes, the file has {size}")
        content = file.read(length)
    if marks_in(content) > MOST_MARKS:
        raise broken_weights(path, "its header has more values than a million tensors need")
    try:
        document = json.loads(content.decode("utf-8"), parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        raise broken_weights(path, f"its header is not JSON: {error}") from None
    metadata = document.get("__metadata__", {}) if isinstance(document, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken_weights(path, "its header is not an object of tensors")
    header = Header(metadata=document.pop("__metadata__", {}), tensors=document, data_start=8 + length)
    check_ranges(path, header.tensors, size - 8 - length)
    return header


def check_ranges(path: Path, tensors: dict[str, TensorEntry], size: int) -> None:
    """Refuses tensors that do not fill these bytes exactly, each with the bytes that its dtype and shape need."""
    for name, entry in tensors.items():
        if not is_entry(entry):
            raise broken_weights(path, f"the entry of {name!r} is malformed")
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != position or (end - begin) * 8 != math.prod(entry["shape"]) * ITEM_BITS[entry["dtype"]]:
            raise broken_weights(path, f"{name!r} does not lie at the bytes {begin} to {end}")
        position = end
    if position != size:
        raise broken_weights(path, f"its tensors have {position} bytes, the file has {size} for them")


def is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in ITEM_BITS:
        return False
    return are_sizes(entry.get("shape"), range(MOST_AXES + 1)) and are_sizes(entry.get("data_offsets"), (2,))


def are_sizes(values: Any, lengths: Container[int]) -> bool:
    """Whether this is a list of such a length, of whole numbers that are not below zero."""
    is_list = isinstance(values, list) and len(values) in lengths
    return is_list and all(type(value) is int and value >= 0 for value in values)


def broken_weights(path: Path, why: str) -> Refused:
    return broken_model(f"{path} is broken: {why}", "a whole safetensors file", why, hint="download it again")


def broken_model(message: str, expected: str, got: str, *, hint: str = "download the model again") -> Refused:
    return Refused(message, code="broken_model", expected=expected, got=got[:300], hint=hint)


def nodes_in(document: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a document, the outer before the inner, with its key or the key of its list."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, part) for part in value]


def block_hub_kernels() -> None:
    """Hides the package `kernels`; call it before transformers is imported. With that package, transformers would fetch
    compiled code from the Hub for a kind of attention, of experts or of quantization that a config names."""
    sys.modules["kernels"] = None  # type: ignore[assignment]


def check_regular(path: Path, *, hint: str = "download the model again") -> None:
    """Refuses a pipe, a device or a socket. A missing file is reported by its reader."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise not_a_file(path, str(error), hint=hint) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise not_a_file(path, KINDS.get(stat.S_IFMT(mode), "something else"), hint=hint)


def check_file(path: Path, folder: Path) -> None:
    """Refuses all but regular files of this folder, and links to files in it or in the `blobs` of its Hub cache."""
    check_regular(path)
    if not path.is_file():
        return
    target = path.resolve()
    if path.is_symlink() and not any(target.is_relative_to(root) for root in roots_of(folder)):
        raise Refused(
            f"{path} is a link that points outside its folder",
            code="unsafe_link",
            expected="files inside the folder, or links of the Hugging Face cache",
            got=os.readlink(path),
            hint="if you trust the file, copy it into the folder",
        )
    most = FOREIGN_JSON.get(path.name) or FOREIGN_BYTES.get(path.suffix)
    if most is not None and path.stat().st_size > most:
        got = f"{path.stat().st_size} bytes"
        raise broken_model(f"{path} is too large for a file of this name", f"at most {most} bytes", got)


KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def roots_of(folder: Path) -> list[Path]:
    """The folders that may hold the files of a model folder: itself, and the blobs beside a snapshot of the cache."""
    real = folder.resolve()
    cache = real.parent.parent
    in_cache = real.parent.name == "snapshots" and cache.name.startswith("models--")
    return [real, *([cache / "blobs"] if in_cache else [])]


def not_a_file(path: Path, got: str, *, hint: str = "download the model again") -> Refused:
    return Refused(f"{path} is not a regular file", code="missing_file", expected="a regular file", got=got, hint=hint)


@contextmanager
def regular_file(path: Path, *, hint: str = "download the model again") -> Iterator[IO[bytes]]:
    """A regular file, open for reading. A pipe is never waited for, and a device is never read."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise not_a_file(path, KINDS.get(stat.S_IFMT(status.st_mode), "something else"), hint=hint)
        yield file


def read_foreign(path: Path, most: int) -> bytes:
    """The bytes of a regular file. Refuses one that has more than `most` bytes."""
    with regular_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise unsound(path, f"it has more than {most} bytes")
    return content


def foreign_json(path: Path) -> Any:
    """A JSON document that somebody else wrote. It must not have numbers of too many digits, nor be nested too deep."""
    most = FOREIGN_JSON.get(path.name, FOREIGN_JSON["config.json"])
    content = read_foreign(path, most)
    if marks_in(content) > most // BYTES_A_VALUE:
        raise unsound(path, f"it has more than {most // BYTES_A_VALUE} values")
    try:
        document = json.loads(content.decode("utf-8"), parse_int=whole_number)
    except (ValueError, RecursionError) as error:
        raise unsound(path, f"it is not JSON: {error}") from None
    if depth_of(document) > DEEPEST:
        raise unsound(path, f"its values are nested more than {DEEPEST} deep")
    return document


def marks_in(content: bytes) -> int:
    """An upper limit for the number of values in a JSON document, counted before it is parsed."""
    return sum(content.count(mark) for mark in (b",", b"[", b"{"))


def whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def depth_of(document: Any) -> int:
    """How deep lists and objects are nested, counted up to one more than `DEEPEST`."""
    level, depth = [document], 0
    while depth <= DEEPEST:
        level = [value for value in level if isinstance(value, (dict, list))]
        if not level:
            break
        depth += 1
        level = [part for value in level for part in (value.values() if isinstance(value, dict) else value)]
    return depth


def unsound(path: Path, why: str) -> Refused:
    expected, hint = "a JSON file as transformers writes it", "download the file again"
    return broken_model(f"{path} cannot be read: {why}", expected, why, hint=hint)


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights: the single one, or those that the index names. They may be
    missing, but an index must not disagree with a single file."""
    if not (folder / INDEX).is_file():
        return [folder / SINGLE]
    names = sorted(set(weight_map(folder / INDEX).values()))
    if (folder / SINGLE).is_file() and names != [SINGLE]:
        raise bad_index(folder, f"{SINGLE}, and an index that names {names[0]}", "one of the two, or the same in both")
    return [folder / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names: each a plain name of a safetensors file, no path and no pickle."""
    document = foreign_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names:
        raise bad_index(index.parent, "no weight_map", "file names by tensor name")
    bad = [name for name in names.values() if not is_plain_name(name)]
    if bad:
        raise bad_index(index.parent, repr(bad[0])[:200], "names of safetensors files in the same folder")
    return names


def is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not any(mark in name for mark in ("/", "\\", "\0")) and not name.startswith(".")


def bad_index(folder: Path, got: str, expected: str) -> Refused:
    return broken_model(f"{folder / INDEX} does not match the weights in this folder", expected, got)


def require_announced(path: Path, sha256: str | None = None) -> None:
    """Refuses a file in the cache of the Hub with other bytes than the Hub announced: its client checks their number
    only, and names a file of LFS by its SHA-256. `sha256` is that of the bytes, where it is known."""
    blob = path.resolve()
    announced = re.search(r"/(model|dataset)s--[^/]+/blobs/([0-9a-f]{64})$", blob.as_posix())
    if announced is None or (found := sha256 or file_digest(blob)["sha256"]) == announced[2]:
        return
    raise Refused(
        f"{blob} has other bytes than the Hub announced",
        code="broken_model" if announced[1] == "model" else "unreadable_dataset",
        expected=f"sha256 {announced[2]}, by the name of the file",
        got=f"sha256 {found}",
        hint=f"run the same command again, which downloads the file anew, after: rm {shlex.quote(str(blob))}",
    )


def model_file(model: str, revision: str | None, name: str) -> str | None:
    """The path of one file of a model, which is fetched if needed; None if the model does not have it."""
    from transformers.utils import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(model, name, revision=revision, **missing)  # type: ignore[no-any-return]
