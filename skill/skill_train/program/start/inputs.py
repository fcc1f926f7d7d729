"""The start of the training: the fields of its plan, its inputs, and the device that it names."""

import math
import os
import shlex
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints

from skill_train.program.events import EXIT_DOES_NOT_FIT, EXIT_NOT_INSTALLED, Refused, event, run_id
from skill_train.program.model_files import (
    ATTENTION,
    BESIDE_WEIGHTS,
    INDEX,
    OTHER_FORMATS,
    block_hub_kernels,
    check_files,
    check_model,
    foreign_json,
    model_file,
    require_announced,
    weight_map,
)
from skill_train.program.plan import TUNED, Placement, Plan, Recipe
from skill_train.program.rows import data_fingerprint

PLAN_SCHEMA = "skill-train/plan/1"
STRATEGIES = ("single", "ddp", "fsdp")


def load_plan(path: Path) -> Plan:
    """The plan, with every field present and of its type. No library is loaded, so a bad plan fails at once."""
    plan: Plan = plan_document(path)
    tuning = plan["recipe"]["finetuning_type"]
    if tuning not in TUNED:
        raise bad_plan("recipe.finetuning_type is unknown", expected=" or ".join(TUNED), got=tuning)
    check_batch(plan["recipe"], plan["placement"])
    attention = plan["placement"]["attn_implementation"]
    if attention not in ATTENTION:  # the name of a repository would be fetched from the Hub and run
        expected = " or ".join(ATTENTION)
        raise bad_plan("placement.attn_implementation is unknown", expected=expected, got=attention)
    return plan


def plan_document(path: Path) -> Any:
    """The JSON object of a plan. Its recipe and placement have all their fields."""
    document = read_document(path)
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        got = str(document.get("schema")) if isinstance(document, dict) else type(document).__name__
        raise bad_plan(f"{path} is not a plan", expected=PLAN_SCHEMA, got=got)
    check_fields(document.get("recipe"), Recipe, "recipe")
    check_fields(document.get("placement"), Placement, "placement")
    return document


def read_document(path: Path) -> Any:
    try:
        return foreign_json(path)
    except FileNotFoundError:
        raise Refused(
            f"{path} does not exist",
            code="missing_file",
            expected="the plan of a run",
            got=str(path),
            hint="check the path; skill-train local RECIPE makes a plan and trains it",
        ) from None
    except Refused as refusal:
        raise bad_plan(refusal.error["message"], expected="a plan in JSON", got=refusal.error["got"]) from None
    except OSError as error:  # a folder, a file of another user
        raise bad_plan(f"{path} cannot be read: {error.strerror}", expected="a plan in JSON") from None


def bad_plan(message: str, *, expected: str = "", got: str = "") -> Refused:
    hint = "make the plan again: skill-train local RECIPE, which trains it too"
    return Refused(message, code="bad_plan", expected=expected, got=got, hint=hint)


def json_types(fields: type) -> dict[str, tuple[type, ...]]:
    """The types of each field for `isinstance`, such as `list` for `list[str]`."""
    hints = get_type_hints(fields, globals()).items()
    parts = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints}
    return {name: tuple(get_origin(part) or part for part in types) for name, types in parts.items()}


def check_fields(values: Any, described: Any, name: str) -> None:
    """Refuses what is not an object with the fields of the TypedDict `described`."""
    if not isinstance(values, dict):
        raise bad_plan(f"the plan has no {name}", expected=f"an object called {name}")
    fields, hints = json_types(described), get_type_hints(described, globals(), include_extras=True).items()
    newer = {key for key, hint in hints if get_origin(hint) is NotRequired}  # missing in plans of earlier versions
    for key in sorted(set(values) ^ set(fields)):
        if key in values or key not in newer:
            raise bad_plan(f"{name}.{key} is {'unknown' if key in values else 'missing'}")
    for key, value in values.items():
        types = fields[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(t.__name__ for t in types)
            raise bad_plan(f"{name}.{key} has the wrong type", expected=expected, got=repr(value))


def check_batch(recipe: Recipe, placement: Placement) -> None:
    processes = placement["num_processes"]
    parts = (placement["per_device_train_batch_size"], placement["gradient_accumulation_steps"], processes)
    if math.prod(parts) != recipe["effective_batch_size"]:
        raise bad_plan(
            "the batch split does not make the effective batch size",
            expected=f"effective_batch_size {recipe['effective_batch_size']}",
            got=" x ".join(map(str, parts)) + " (per device x accumulation x processes)",
        )
    strategy = placement["strategy"]
    if strategy not in STRATEGIES or (strategy == "single") != (processes == 1):
        raise bad_plan(
            "placement.strategy does not go with the number of processes",
            expected="single with one process, ddp or fsdp with several",
            got=f"{strategy} with {processes}",
        )


def check_processes(placement: Placement) -> None:
    """Refuses another number of processes than the plan's. A missing process would leave out its part of every batch,
    and the loss would look healthy. `accelerate launch --cpu --num_processes 2` starts one (accelerate 1.15)."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != placement["num_processes"]:
        raise wrong_launch(f"{placement['num_processes']} processes", f"{started}")


def wrong_launch(expected: str, got: str) -> Refused:
    return Refused(
        "the program was not started with the arguments of its plan",
        code="bad_plan",
        expected=expected,
        got=got,
        hint="start it with skill-train local, or with accelerate launch and the arguments under `launch` in the plan",
    )


def require_hub_inputs(plan: Plan) -> None:
    """Refuses a local folder or file with the name of the model or dataset on the Hub: it would be loaded instead."""
    prints = plan.get("fingerprints", {})
    places: list[tuple[Literal["model", "data"], str]] = [("model", "the model"), ("data", "the dataset")]
    for key, noun in places:
        name = plan["recipe"][key]
        if key in prints and prints[key] is None and Path(name).exists():
            raise Refused(
                f"the plan means {noun} {name} on the Hub, and {Path(name).resolve()} has the same name",
                code="input_changed",
                expected=f"no folder or file {name} where the training starts",
                got=str(Path(name).resolve()),
                hint="start the training from another folder; to train on what lies here, plan again",
            )


def use_data(plan: Plan, data: Path | None) -> None:
    """Reads the data of a plan from its place, or from another one. They must have the planned bytes; those of the Hub
    have a revision instead."""
    planned = plan.get("fingerprints", {}).get("data")
    if data is None and planned is None:
        return
    data = data or Path(plan["recipe"]["data"])
    if not data.exists():
        raise Refused(
            f"{data} does not exist",
            code="missing_file",
            expected="the file or folder that the plan was made with",
            got=str(data),
            hint=f"if it was moved, put a link there: ln -s NEW_PLACE {shlex.quote(str(data))}; or plan again",
        )
    try:
        fingerprint = data_fingerprint(data, plan["recipe"])
        got = f"sha256 {fingerprint[:12]}…"
    except Refused as refusal:  # a picture that is missing, or empty
        if refusal.error["code"] != "bad_picture":
            raise
        fingerprint, got = None, str(refusal)
    if fingerprint is None or fingerprint != planned:
        raise Refused(
            f"{data} is not the data that was planned",
            code="input_changed",
            expected=f"sha256 {planned[:12]}…" if planned else "a plan of a file or folder, with its fingerprint",
            got=got,
            hint="use the planned file, or plan again with this file",
        )
    plan["recipe"]["data"] = str(data)


def check_base(model: str, revision: str | None) -> None:
    """As `check_model`, for the model of a plan. For a model on the Hub it checks the config and the index, which name
    all files that are fetched later. A job has fetched nothing yet: all but the weights is fetched before, because
    transformers takes a file that it cannot fetch for one that the model does not have."""
    if Path(model).is_dir():
        return check_model(Path(model))
    if run_id() is not None:
        from huggingface_hub import snapshot_download

        snapshot_download(model, revision=revision, allow_patterns=BESIDE_WEIGHTS, ignore_patterns=OTHER_FORMATS)
    paths = [model_file(model, revision, name) for name in ("config.json", INDEX)]
    for file in filter(None, paths):
        check_files(Path(file).parent)
        for path in (path for kind in BESIDE_WEIGHTS for path in Path(file).parent.glob(kind)):
            require_announced(path)
        if Path(file).name == INDEX:
            weight_map(Path(file))
    return None


def prepare_environment(placement: Placement) -> None:
    """Sets variables of the environment. Call it before any library is imported."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    block_hub_kernels()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin while they wait slow each other down on a busy machine: by a factor of 10, measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Rows have many lengths. Without this, 58 GB are reserved on an H100 where 33 GB are in use.
    if placement["device"] == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if placement["device"] == "mps":
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        event("note", text="PYTORCH_ENABLE_MPS_FALLBACK=1: operators that MPS lacks run on the CPU, slower")


def prepare_device(torch: Any, placement: Placement) -> None:
    require_device(torch, placement)
    if placement["device"] == "cuda":  # cuDNN compiles anew for every length: without it, a quarter more tokens/s
        torch.backends.cuda.enable_cudnn_sdp(False)
        if not flash_attention_runs(placement["dtype"], torch.cuda.get_device_capability()):
            repeat_shared_heads()
    elif placement["device"] == "cpu" and placement["threads"]:
        torch.set_num_threads(placement["threads"])


def flash_attention_runs(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether torch's flash kernel computes this type on a GPU of this compute capability."""
    return dtype in ("bfloat16", "float16") and capability >= (8, 0)


def repeat_shared_heads() -> None:
    """Lets transformers repeat the keys and values that several query heads share, before attention.

    On CUDA only the flash kernel reads shared heads. Where it does not run, transformers 5.23 has torch fall back to
    the kernel that keeps every attention score for the backward pass (huggingface/transformers#45776): 0.35 GB more
    for 512 tokens of Qwen2.5-0.5B in float32 (bench/estimates), 16 times that for 2,048. The memory-efficient kernel
    keeps none, and takes repeated heads.
    """
    from transformers.integrations import sdpa_attention

    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


def require_device(torch: Any, placement: Placement) -> None:
    device = placement["device"]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device, False):
        raise Refused(
            f"torch {torch.__version__} cannot use {device} here",
            code="device_unavailable",
            exit_code=EXIT_NOT_INSTALLED,
            expected=f"a build of torch for {device}, and a driver",
            got=", ".join(name for name, there in available.items() if there),
            hint="use --device cpu, or install the torch build for this machine",
        )
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", placement["num_processes"]))  # the rest are elsewhere
    if device == "cuda" and torch.cuda.device_count() < processes_here:
        raise Refused(
            "the plan has more processes than this machine has GPUs",
            code="device_unavailable",
            exit_code=EXIT_DOES_NOT_FIT,
            expected=f"{processes_here} GPUs, one a process",
            got=f"{torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})",
            hint="plan again on this machine: skill-train local RECIPE",
        )
