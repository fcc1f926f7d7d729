"""The trainer: its arguments, their record, and the folder of what was trained."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypedDict

from skill_train.program.chat.labels import IGNORED, fed_digest, system_digest, trained_tokens
from skill_train.program.events import (
    PROGRAM,
    FileDigest,
    Refused,
    event,
    file_digest,
    is_main_process,
    wait_for_all,
    write_json,
    write_text,
)
from skill_train.program.examples import EncodedRow
from skill_train.program.folders.base import LEFT_OUT, add_stops, files_of_base, set_fields
from skill_train.program.folders.checkpoints import share_weights
from skill_train.program.model import (
    check_vocabulary,
    is_full,
    keep_input_types,
    load_model,
    lora_config,
    read_back,
    score_trained_tokens_only,
    trained_types,
)
from skill_train.program.pictures.tokens import Pictures, write_limits
from skill_train.program.plan import POSITIONS_IN_TABLE, Placement, Recipe
from skill_train.program.split import Data, longest_first
from skill_train.program.start.inputs import prepare_device, wrong_launch
from skill_train.program.watch import Watch

SETS_OF_NAMES = ("target_modules", "exclude_modules")  # in adapter_config.json
FIRST_BATCHES = 4  # each has a digest in the record, so that a difference can be located


def build_trainer(recipe: Recipe, placement: Placement, folder: Path, tokenizer: Any, data: Data, watch: Watch) -> Any:
    """TRL's trainer with every argument set. Rows are already tokenized and masked, so TRL prepares nothing."""
    import torch
    import transformers
    from trl import SFTTrainer

    quiet_libraries()
    prepare_device(torch, placement)
    transformers.set_seed(recipe["seed"])
    # Before the model is loaded: the arguments join the processes and select the GPU of this one, on which 4-bit
    # weights are loaded. Without that, every process of FSDP would read all the weights into RAM.
    arguments = trainer_arguments(recipe, placement, folder)
    watch.memory()  # the memory of the libraries, before the model is loaded
    model = load_model(recipe, placement)
    check_vocabulary(model, data)
    check_positions(model.config, data)
    pictures = data.get("pictures")

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def create_optimizer(self, *positional: Any) -> Any:
            """Restores the types of the run first: PEFT (0.21) reads the adapter of a checkpoint as float32."""
            for name, weight in self.model.named_parameters():
                if weight.dtype != types.get(name, weight.dtype):
                    weight.data = weight.data.to(types[name])
            return super().create_optimizer(*positional)

        def _load_from_checkpoint(self, checkpoint: str, *positional: Any) -> None:
            """Reads a whole model as `load_model` does. transformers (5.23) compares the names in the file with those
            of the modules, and leaves out, without an error, all that the model's class writes by other names."""
            if is_full(recipe) and not self.is_fsdp_enabled:
                self.model.load_state_dict(read_back(recipe, Path(checkpoint), self.model).state_dict())
            else:
                super()._load_from_checkpoint(checkpoint, *positional)

        def autocast_smart_context_manager(self, *positional: Any) -> Any:
            """Casts outside training too, where Accelerate (1.15) does not, and for float16 on a CPU. So the checks
            before the training compute as the training does."""
            half = torch.float16 if self.args.fp16 else torch.bfloat16 if self.args.bf16 else None
            plain = super().autocast_smart_context_manager
            return plain(*positional) if half is None else torch.autocast(placement["device"], half)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows_as_fed(recipe, data),
        processing_class=tokenizer,
        data_collator=None if pictures is None else PictureCollator(data["train"], pictures, tokenizer),
        peft_config=None if is_full(recipe) else lora_config(recipe, model),
        callbacks=[watch.callback()],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its print ends the training once nobody reads the output
    types = trained_types(trainer.model, placement)
    if (arguments.bf16 or arguments.fp16) and not recipe["use_dora"]:
        keep_input_types(trainer.model)
    require_plans_way(trainer, placement)
    score_trained_tokens_only(model, fused=placement["device"] == "cuda")
    # transformers (5.23) decides both by the model's class, wrongly for TRL's loss: GPT-2, and Qwen2.5-VL and Qwen3-VL,
    # whose tokens it would count in each batch alone, so that they weigh more in a batch with few of them.
    trainer._loss_shifts_labels = trainer.model_accepts_loss_kwargs = True
    return trainer


def quiet_libraries() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def rows_as_fed(recipe: Recipe, data: Data) -> Any:
    """The training rows, in the order in which the trainer reads them. Rows with pictures have their places."""
    import datasets

    rows: list[dict[str, Any]] = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in data["train"]]
    if data.get("pictures") is not None:
        rows = [row | {"place": place} for place, row in enumerate(rows)]
    order = longest_first(data["order"], [len(row["input_ids"]) for row in rows], recipe["effective_batch_size"])
    return datasets.Dataset.from_list(rows).select(order)


def require_plans_way(trainer: Any, placement: Placement) -> None:
    """Refuses a trainer whose sharding or mixed precision is not that of the plan."""
    if trainer.is_fsdp_enabled != (placement["strategy"] == "fsdp"):
        raise wrong_launch(f"strategy {placement['strategy']}", "FSDP" if trainer.is_fsdp_enabled else "no FSDP")
    precision = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "no"
    if trainer.accelerator.mixed_precision != precision:
        raise wrong_launch(f"mixed precision: {precision}", trainer.accelerator.mixed_precision)


def check_positions(config: Any, data: Data) -> None:
    """Refuses rows that are longer than a table of positions, which is an IndexError in the first step that has one."""
    longest = max(len(row["input_ids"]) for row in data["train"] + data["held_out"])
    if config.model_type in POSITIONS_IN_TABLE and longest > config.max_position_embeddings:
        raise Refused(
            f"a row has more tokens than {config.model_type} has positions",
            code="bad_recipe",
            expected=f"max_length of at most {config.max_position_embeddings}",
            got=f"{longest} tokens",
            hint=f"max_length: {config.max_position_embeddings} in the recipe",
        )


class PictureCollator:
    """Makes a batch of rows with pictures: padded ids and labels, and the tensors of the pictures, which it reads."""

    def __init__(self, rows: Sequence[EncodedRow], pictures: Pictures, tokenizer: Any) -> None:
        self.rows, self.pictures = rows, pictures
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """A feature holds the `place` of its row in `rows`, or is a row itself."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [self.rows[feature["place"]] if "place" in feature else feature for feature in features]
        each = [torch.tensor(row["input_ids"]) for row in rows]
        ids = pad_sequence(each, batch_first=True, padding_value=self.pad)
        mask = pad_sequence([torch.ones_like(own) for own in each], batch_first=True)
        batch = {"input_ids": ids, "attention_mask": mask}
        if all("labels" in row for row in rows):
            labels = [torch.tensor(row["labels"]) for row in rows]
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        tensors = self.pictures.tensors([self.pictures.read(row) for row in rows])
        return batch | tensors | self.pictures.token_types(ids * mask)


def may_leave_unused(recipe: Recipe) -> bool:
    """Whether a batch may use only a part of the weights that train: a row without pictures uses those of the language
    model alone. To look for the unused ones takes time in every pass."""
    parts = recipe.get("lora_parts") or ["language"]
    outside = is_full(recipe) or parts != ["language"] or bool(recipe["modules_to_save"])
    return bool(recipe.get("images")) and outside


def trainer_arguments(recipe: Recipe, placement: Placement, folder: Path) -> Any:
    """All arguments. None is left to a default of TRL (1.16: bf16 on every device, checkpointing on, 1024 tokens)."""
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=recipe["max_steps"],
        per_device_train_batch_size=placement["per_device_train_batch_size"],
        gradient_accumulation_steps=placement["gradient_accumulation_steps"],
        learning_rate=recipe["learning_rate"],
        lr_scheduler_type=recipe["lr_scheduler_type"],
        warmup_steps=recipe["warmup_steps"],
        weight_decay=recipe["weight_decay"],
        adam_beta1=recipe["adam_beta1"],
        adam_beta2=recipe["adam_beta2"],
        adam_epsilon=recipe["adam_epsilon"],
        max_grad_norm=recipe["max_grad_norm"],
        optim=recipe["optim"],
        seed=recipe["seed"],
        data_seed=recipe["seed"],
        bf16=placement["dtype"] == "bfloat16" and not recipe["pure_bf16"],
        fp16=placement["dtype"] == "float16",
        use_cpu=placement["device"] == "cpu",
        gradient_checkpointing=placement["gradient_checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False},
        # The rows arrive tokenized, masked, cut and in order.
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        max_length=None,
        packing=False,
        padding_free=False,
        completion_only_loss=False,
        assistant_only_loss=False,
        loss_type="nll",
        label_smoothing_factor=0.0,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=may_leave_unused(recipe),
        ddp_broadcast_buffers=False,
        dataloader_num_workers=0,
        dataloader_drop_last=False,
        remove_unused_columns=not recipe.get("images"),  # the collator of pictures reads `place`
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="steps",
        save_steps=placement["save_steps"],
        save_total_limit=None,  # `Watch` removes older ones
        save_only_model=False,
        report_to=reporter(placement["report_to"]),
        push_to_hub=False,
        disable_tqdm=True,
        torch_compile=False,
        trust_remote_code=False,
    )


def reporter(name: str) -> str:
    """The service that gets the metrics too; `none` if its package is not installed."""
    from importlib.util import find_spec

    if name == "none" or find_spec(name) is not None:
        return name
    event("note", text=f"report_to {name}: the package is not installed, so the metrics are in metrics.jsonl alone")
    return "none"


def train(trainer: Any, watch: Watch, seed: int, checkpoint: Path | None) -> None:
    """Trains, or continues from a checkpoint. The seed is set again, so that the checks before have no effect on it.
    Each process draws its own dropout."""
    import transformers

    # No card of TRL or PEFT beside a checkpoint: the one of the result is written when it is pushed.
    trainer.create_model_card = trainer.model.create_or_update_model_card = lambda *_, **__: None
    transformers.set_seed((seed + int(os.environ.get("RANK", "0"))) % 2**32)  # numpy takes no larger one
    with watch.signals():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        watch.asked_to_stop(trainer.args.device)  # also after the last step
    if watch.problem is not None:
        raise watch.problem


def save(trainer: Any, folder: Path, base: Path | None, pictures: Pictures | None = None) -> None:
    """Writes the adapter, or the whole model with the files of its `base`, under a temporary name first. When this
    returns, it exists for all processes."""
    part = folder.with_name(f".{folder.name}.part")
    weights = gathered_weights(trainer.model) if trainer.is_fsdp_enabled else None
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(str(part), state_dict=weights)
        settle_order(part / "adapter_config.json")
        share_weights(part, next(part.glob("*config.json")))
        if base is not None:
            take_files(base, part, str(model.dtype).removeprefix("torch."))
            add_stops(part, getattr(trainer.processing_class, "unlisted_ends", ()))
            if pictures is not None:  # whoever loads the model resizes them as the training did
                write_limits(part, pictures.kind, pictures.limits)
        replace_folder(part, folder)
    wait_for_all()


def settle_order(config: Path) -> None:
    """Sorts the sets of names in a config. PEFT (0.21) writes them in the order of Python's hashes, which differs in
    each process, so the same run would never give the same file twice."""
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        sets = {name: sorted(values[name]) for name in SETS_OF_NAMES if isinstance(values.get(name), list)}
        write_text(config, json.dumps(values | sets, indent=2, sort_keys=True))


def replace_folder(part: Path, folder: Path) -> None:
    """Replaces a folder of an earlier start as a whole. A kill must not leave a part of it under its name."""
    old = folder.with_name(f".{folder.name}.old.part")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def take_files(base: Path, part: Path, dtype: str) -> None:
    """Copies tokenizer, template and configs of the base, byte for byte: converters may not read what transformers
    saves. In config.json only the type of the weights changes. The card stays behind: a push writes one."""
    for new_file in part.iterdir():
        if ".safetensors" not in new_file.name:
            new_file.unlink()
    for file in files_of_base(base):
        if file == base / "README.md":
            continue
        target = part / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if set_fields(config, {}, dtype):
        write_json(part / "config.json", config)


def gathered_weights(model: Any) -> dict[str, Any]:
    """The trained weights of a sharded model, whole, in the RAM of the first process. Every process must call this. The
    second name of a weight that is tied to another one is left out."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: weight for name, weight in get_model_state_dict(model, options=options).items() if name in names}


def base_folder(recipe: Recipe) -> Path:
    """The folder with the base's files other than weights, fetched before a lost connection would cost the run."""
    if Path(recipe["model"]).is_dir():
        return Path(recipe["model"])
    from huggingface_hub import snapshot_download

    left_out = [f"*{suffix}" for suffix in LEFT_OUT.split()]
    return Path(snapshot_download(recipe["model"], revision=recipe["revision"], ignore_patterns=left_out))


class Processes(TypedDict):
    count: int
    distributed: str
    mixed_precision: str


class FedData(TypedDict):
    """Counts of tokens, and digests of token ids and labels: of all rows, and of the first batches of the trainer.
    `held_out_file_sha256` is of held_out.jsonl, `order_sha256` of the order, `system_sha256` from `system_digest`."""

    train_rows: int
    held_out_rows: int
    rows_sha256: str
    held_out_sha256: str
    held_out_file_sha256: str
    system_sha256: str
    order_sha256: str
    fed_rows: int
    fed_tokens: int
    fed_trained_tokens: int
    first_batches: list[str]


class Environment(TypedDict):
    """`environment.json` before training. Objects of libraries have the field names that the libraries chose."""

    program: FileDigest
    day: str
    python: str
    platform: str
    device: str
    device_name: str
    cuda: str | None
    threads: int
    versions: dict[str, str]
    processes: Processes
    model: dict[str, object]
    base_weights: dict[str, FileDigest]
    lora: dict[str, object] | None
    trainer: dict[str, object]
    data: FedData
    stops: list[int]


def environment(trainer: Any, data: Data, base_weights: dict[str, FileDigest], folder: Path) -> Environment:
    """Versions, device, what is fed, and every argument as the trainer holds it after construction. The optimizer and
    the schedule are added when training starts."""
    import platform
    from importlib import metadata

    import torch

    names = ["torch", "transformers", "trl", "peft", "datasets", "accelerate", "tokenizers", "safetensors", "numpy"]
    if data["pictures"] is not None:
        names.append("pillow")  # it decodes them: another version may give other pixels
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "program": file_digest(PROGRAM),
        "day": getattr(trainer.processing_class, "day", date.today()).isoformat(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(trainer.model.device),
        "device_name": device,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in names},
        "processes": {
            "count": trainer.accelerator.num_processes,
            "distributed": str(trainer.accelerator.distributed_type.value),
            "mixed_precision": trainer.accelerator.mixed_precision,
        },
        "model": built_model(trainer.model),
        "base_weights": base_weights,
        "lora": built_lora(trainer.model),
        "trainer": json.loads(trainer.args.to_json_string()),
        "data": fed_data(data, trainer.train_dataset, trainer.args.max_steps, folder),
        "stops": sorted(getattr(trainer.processing_class, "unlisted_ends", ())),
    }


def built_model(model: Any) -> dict[str, object]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        "class": type(base).__name__,
        "dtype": str(base.dtype),
        "attn_implementation": base.config._attn_implementation,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def built_lora(model: Any) -> dict[str, object] | None:
    """Every field of PEFT's configuration, with sorted sets; None if the model has no adapter."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return dict(json.loads(json.dumps(fields, default=str)))


def fed_data(data: Data, dataset: Any, steps: int, folder: Path) -> FedData:
    train, order = data["train"], data["order"]
    batch = len(order) // steps
    first_rows = dataset.select(range(min(len(order), FIRST_BATCHES * batch)))
    batches = [first_rows.select(range(at, at + batch)) for at in range(0, len(first_rows), batch)]
    return {
        "train_rows": len(train),
        "held_out_rows": len(data["held_out"]),
        "rows_sha256": fed_digest(train),
        "held_out_sha256": fed_digest(data["held_out"]),
        "held_out_file_sha256": file_digest(folder / "held_out.jsonl")["sha256"],
        "system_sha256": system_digest(train),
        "order_sha256": hashlib.sha256(json.dumps(order).encode()).hexdigest(),
        "fed_rows": len(order),
        "fed_tokens": sum(len(train[i]["input_ids"]) for i in order),
        "fed_trained_tokens": sum(trained_tokens(train[i]) for i in order),
        "first_batches": [fed_digest(rows)[:16] for rows in batches],
    }
