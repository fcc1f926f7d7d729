"""Requests about models and machines. The token stays inside huggingface_hub."""

import glob
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from skill_train.core.errors import SkillTrainError, Temporary, UsageError
from skill_train.facts import Flavor, ModelFacts
from skill_train.hub.address import endpoint
from skill_train.hub.client import REQUEST_SECONDS, api, ask
from skill_train.hub.errors import HubResource, understood
from skill_train.hub.repositories import is_id, or_other_kind
from skill_train.model import config as model_config
from skill_train.model.config import Origin, StoredWeights
from skill_train.model.folder import processor_files, read_config, read_model, used_weights
from skill_train.model.folder import tensor_shapes as tensor_shapes_in
from skill_train.model.tower import reads_processor, with_image_processor
from skill_train.program.events import json_object
from skill_train.program.model_files import BESIDE_WEIGHTS, OTHER_FORMATS
from skill_train.program.pictures.processor import PROCESSOR_FILES
from skill_train.run.folder import way_to_model

_FILES = [*BESIDE_WEIGHTS, "*.safetensors", "LICENSE*", "README.md"]
_FEW_SHARDS = 8  # the most headers to request, each with a request, if the Hub has not counted the parameters
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_MINUTES = {"minute": 1, "hour": 60}


def model_folder(model: str, revision: str | None, files: tuple[str, ...] = ()) -> tuple[Path, str | None]:
    """The folder and the commit of a model: a local folder (commit None), or a snapshot in the Hub cache, which is
    downloaded if needed.

    Args:
        files: the names of the files to fetch; all files of the model if empty.

    Raises:
        UsageError: `model` is neither a folder nor a model on the Hub.
        AccessError: the model is gated or private, or the token is refused.
        Temporary: the Hub cannot be reached and the model is not in the cache.
    """
    path = Path(model)
    if path.is_dir():
        return path, None
    check_id(model)
    resource = HubResource("model", model)
    try:
        folder = ask(resource, lambda: _download(model, revision, files), seconds=None)
        if not files and not any(folder.glob("*.safetensors")):  # without the Hub, the client gives what its cache has
            ask(resource, lambda: api().model_info(model, revision=revision, timeout=REQUEST_SECONDS))
            folder = ask(resource, lambda: _download(model, revision, files), seconds=None)
    except UsageError as error:
        raise or_other_kind(error, resource) from None
    return folder, folder.name


def model_facts(model: str, revision: str | None = None) -> ModelFacts:
    """The facts of a Hub model, from its metadata and not from its weights.

    If the Hub cannot be reached, the facts come from the snapshot in the cache.

    Raises:
        UsageError: the model or the revision does not exist, or cannot be trained: it has no config or no safetensors.
        AccessError: the model is gated, or the token is refused.
        Temporary: the Hub cannot be reached and the cache has no copy.
    """
    check_id(model)
    resource = HubResource("model", model)
    try:
        return ask(resource, lambda: _ask_model(model, revision))
    except Temporary:
        if (folder := snapshot(model, revision)) is None:
            raise
        facts = read_model(folder, weights_needed=False)
        return msgspec.structs.replace(facts, source=f"{model}, from the cache", revision=folder.name, fingerprint=None)
    except UsageError as error:
        raise or_other_kind(error, resource) from None


def tensor_shapes(model: str, revision: str | None) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Hub model, by name, from the headers of its safetensors files.

    If the Hub cannot be reached, the shapes come from the cache; they are empty if the cache lacks the weights. Raises
    what `model_facts` raises.
    """

    def question() -> dict[str, tuple[int, ...]]:
        metadata = api().get_safetensors_metadata(model, revision=revision)
        with understood(HubResource("model", model)):
            files = metadata.files_metadata.values()
            return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}

    try:
        return ask(HubResource("model", model), question)
    except Temporary:
        folder = snapshot(model, revision)
        return {} if folder is None else tensor_shapes_in(folder)


def model_file(model: str, name: str) -> Path:
    """The path of a small file of a Hub model in the cache. Raises what `model_folder` raises."""
    return ask(HubResource("model", model), lambda: _file(model, name, None))


def live_flavors() -> tuple[Flavor, ...]:
    """The machines of Hugging Face Jobs with their current prices.

    Raises:
        Temporary: there is no answer in time, or it cannot be understood.
    """
    resource = HubResource("prices of Hugging Face Jobs")
    hardware = ask(resource, lambda: list(api().list_jobs_hardware()), seconds=3.0)
    with understood(resource):
        read = [flavor for flavor in map(_flavor, hardware) if flavor is not None]
    if not read:
        raise Temporary(
            "the Jobs API lists no machine in a form that skill-train understands",
            code="hub_error",
            hint="run the same command again later; `plan` uses the price table that comes with skill-train",
        )
    return tuple(read)


def check_id(model: str) -> None:
    """Refuses an id that cannot exist on the Hub. Sends no request."""
    path = Path(model)
    if path.is_absolute() or model.startswith(".") or path.is_file() or not is_id(model):
        raise UsageError(
            f"{model} is neither a model folder nor the id of a model on the Hub",
            code="unknown_model",
            expected="a folder with config.json and safetensors, or an id such as Qwen/Qwen2.5-0.5B-Instruct",
            got=f"{model}, a file" if path.is_file() else f"{model}, no such folder here",
            hint=way_to_model(path)
            or "check the path or the id; ids have the form NAMESPACE/NAME, as in the address of the model's page",
        )


def _download(model: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    if files:
        return Path(snapshot_download(model, revision=revision, allow_patterns=[glob.escape(name) for name in files]))
    return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES, ignore_patterns=OTHER_FORMATS))


def _ask_model(model: str, revision: str | None) -> ModelFacts:
    info = api().model_info(model, revision=revision, files_metadata=True, timeout=REQUEST_SECONDS)
    with understood(HubResource("model", model)):
        sizes = {str(file.rfilename): file.size for file in info.siblings or []}
        _check_files(model, set(sizes))
        config = read_config(_config_folder(model, revision, info.sha))
        facts = model_config.read(
            config,
            source=model,
            stored=_stored(model, info, sizes),
            has_chat_template=_has_chat_template(model, info, set(sizes)),
            origin=Origin(revision=info.sha, gated=bool(info.gated)),
            files=set(sizes),
        )
        documents = _processor_files(model, info.sha, set(sizes)) if reads_processor(config) else {}
        return with_image_processor(facts, config, documents)


def _processor_files(model: str, commit: str, names: set[str]) -> dict[str, object]:
    """The JSON documents of the image processor, by file name. Each has some hundred bytes."""
    folders = {_file(model, name, commit).parent for name in PROCESSOR_FILES if name in names}
    return {name: document for folder in folders for name, document in processor_files(folder).items()}


def _check_files(model: str, names: set[str]) -> None:
    """Refuses a repository without a trainable model."""
    if "config.json" not in names:
        adapter = "adapter_config.json" in names
        gguf = any(name.endswith(".gguf") for name in names)
        raise UsageError(
            f"{model} is not a model that transformers can load",
            code="not_a_model",
            expected="a repository with config.json and safetensors",
            got="a LoRA adapter" if adapter else "GGUF files" if gguf else "no config.json",
            hint="use the base model that it was made from",
        )
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf")))
        raise UsageError(
            f"{model} has no safetensors weights",
            code="no_safetensors",
            expected="model.safetensors or model-*-of-*.safetensors",
            got=", ".join(pickled[:3]) or "no weights",
            hint="use a copy with safetensors; pickle files are never opened",
        )


def _config_folder(model: str, revision: str | None, commit: str) -> Path:
    """The folder of `config.json` in the Hub cache.

    The request names the branch, so that the cache records its commit and can answer without the Hub.
    """
    folder = _file(model, "config.json", revision).parent
    return folder if folder.name == commit else _file(model, "config.json", commit).parent


def _file(model: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, name, revision=revision))


def _stored(model: str, info: Any, sizes: dict[str, int | None]) -> StoredWeights:
    """The size and the numbers of weights by type: as the Hub counted them, or else from the headers of a few files."""
    used = used_weights(name for name in sizes if name.endswith(".safetensors") and "/" not in name)
    known_sizes = [size for size in (sizes[name] for name in used) if size is not None]
    total = sum(known_sizes) if len(known_sizes) == len(used) else None
    unknown = "the Hub does not say" if total is None else ""
    elements: Counter[str] = Counter(info.safetensors.parameters if info.safetensors else {})
    if not elements and len(used) <= _FEW_SHARDS:
        for name in used:
            elements.update(api().parse_safetensors_file_metadata(model, name, revision=info.sha).parameter_count)
    return StoredWeights(dict(elements), total, unknown)


def _has_chat_template(model: str, info: Any, names: set[str]) -> bool:
    if names & {"chat_template.jinja", "chat_template.json"}:
        return True
    hub_copy = (info.config or {}).get("tokenizer_config")  # the Hub copies the template there
    if isinstance(hub_copy, dict) and hub_copy.get("chat_template"):
        return True
    if "tokenizer_config.json" not in names:
        return False
    config = json_object(_file(model, "tokenizer_config.json", info.sha).read_bytes()) or {}
    return bool(config.get("chat_template"))


def tokenizer_settings(model: str, revision: str | None) -> Path | None:
    """The folder with `tokenizer_config.json` in the Hub's cache; None if it cannot be fetched."""
    try:
        return ask(HubResource("model", model), lambda: _file(model, "tokenizer_config.json", revision)).parent
    except SkillTrainError:  # the training itself will need the file, and says what is wrong
        return None


def snapshot(model: str, revision: str | None) -> Path | None:
    """The folder of a model in the Hub cache; None if there is none with a config."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _flavor(hardware: Any) -> Flavor | None:
    """The flavor in a row of the Jobs API (huggingface_hub 2.4, JobHardwareInfo); None if it is unusable or unreadable.

    Sizes in the row are texts such as `16 GB`. `vram` is the memory of all GPUs together. The price is per minute or
    per hour, by `unit_label`.
    """
    gpus = _amount(hardware.accelerator.quantity) if hardware.accelerator else 0
    memory = _bytes(hardware.accelerator.vram) if hardware.accelerator else 0
    cores, ram, disk = _amount(hardware.cpu), _bytes(hardware.ram), _bytes(hardware.ephemeral_storage)
    minutes = _MINUTES.get(hardware.unit_label)
    usable = not hardware.accelerator or hardware.accelerator.manufacturer.lower() == "nvidia"
    priced = 0 <= hardware.unit_cost_usd < 1e6  # for a minute or an hour; excludes NaN
    if not (cores and ram and minutes and usable and priced) or gpus is None or memory is None:
        return None
    return Flavor(
        name=hardware.name,
        gpu=hardware.accelerator.model if gpus else None,
        gpus=gpus,
        gpu_memory_bytes=memory // gpus if gpus else None,
        cores=cores,
        ram_bytes=ram,
        disk_bytes=disk,
        usd_per_hour=round(hardware.unit_cost_usd * 60 / minutes, 4),
        read_at=datetime.now(UTC).strftime("%Y-%m-%d"),
        source=f"{endpoint()}/api/jobs/hardware",
    )


def _amount(text: str) -> int | None:
    """The number at the start of a text such as `2 vCPU`."""
    match = re.match(r"\s*(\d+)", str(text))
    return int(match[1]) if match else None


def _bytes(text: str) -> int | None:
    """The bytes of a text such as `16 GB`. A GB counts as 1e9 bytes, which is less than a GiB."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([MGT]B)\s*", str(text))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
