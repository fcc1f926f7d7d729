# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0",
#   "transformers==5.24.0",
#   "trl==1.16.0",
#   "peft==0.21.2",
#   "datasets==5.2.0",
#   "accelerate==1.15.0",
#   "jinja2==3.1.6",
#   "huggingface_hub==2.4.0",
#   "sentencepiece==0.2.3",
#   "protobuf==7.36.2",
# ]
# ///
"""Fine-tunes a model exactly as a plan says: a LoRA adapter, or every weight. The same bytes run on a laptop and in a
cloud job.

    python train.py RUN/plan.json             train; the run directory is the plan's own folder
    python train.py RUN/plan.json --resume    go on from the newest complete checkpoint
    python train.py RUN/plan.json --probe     time this model in fp32 and bf16 on this processor; print one JSON line
    python train.py RUN/plan.json --job       as a cloud job: see below
    python train.py … --data PATH             read the plan's data from PATH; its fingerprint must match
    python train.py … --attended              end at a checkpoint when standard input closes: who started it has ended

Rows with pictures need Pillow too: `uv run --with pillow train.py …`.

Every value comes from the plan. `accelerate launch` starts a plan of several processes, with the arguments and the
environment under `launch` in the plan. On stdout: one JSON event a line. In the run directory:

    environment.json    versions, device, and every argument of the trainer as the trainer saw it
    samples.jsonl       rows as they were fed: text, token ids, labels        held_out.jsonl    rows that never train
    metrics.jsonl       one line a step                                       checkpoints/      each with complete.json
    adapter/            the adapter, in PEFT's format, or merged/: the whole model, where every weight was trained
    train.json          last: figures, verdict

With `--job` the run directory is a mounted bucket, and the job's own disk is lost with it. The program proves that the
token can write to `policy.hub_model_id`, starts itself without `--job` in a folder of that disk, and brings back each
complete checkpoint (the newest two stay), then everything above with train.log, each folder's kept.json last. Then it
pushes the adapter, with its records and no row of the data. A second start goes on from the newest kept checkpoint, or
with the push. `--rehearse` writes nothing to the Hub.

Exit codes: 0 done · 2 bad plan or data · 3 does not fit · 4 not signed in, or no permission to write · 5 training or
the push failed · 7 a package is missing · 8 the Hub cannot be reached before training. train.failed.json says why.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from skill_train.program.chat.labels import marked_text, trained_tokens
from skill_train.program.checks import Answer, Checks, TrainingCheck, Verdict
from skill_train.program.cloud.job import run_job
from skill_train.program.cloud.push import files_of, limit_requests
from skill_train.program.encode import Encoder
from skill_train.program.events import (
    FileDigest,
    Refused,
    event,
    explained_errors,
    file_digest,
    is_main_process,
    number,
    run_id,
    seek_cycles_seldom,
    tell_failure,
    write_json,
    write_rows,
    write_whole,
)
from skill_train.program.model import base_weights, check_optimizer, is_full, load_model
from skill_train.program.pictures.locations import picture_folder
from skill_train.program.pictures.tokens import Pictures, encoded_bytes, picture_format
from skill_train.program.plan import (
    MEASURING,
    SAMPLE_ROWS,
    SMALLER,
    TRAINS,
    TUNED,
    Plan,
    Reason,
    Recipe,
    forget_launchers,
)
from skill_train.program.rows import iter_rows
from skill_train.program.split import (
    Data,
    DataFigures,
    contents_of,
    digest_of,
    exchanges_of,
    feeding_order,
    held_out_rows,
    normalised,
    question_of,
    recorded_split,
    repeated,
    trainable_rows,
)
from skill_train.program.start.inputs import (
    check_base,
    check_processes,
    load_plan,
    prepare_environment,
    require_hub_inputs,
    use_data,
)
from skill_train.program.tokenizer import load_tokenizer
from skill_train.program.trainer import base_folder, build_trainer, environment, save, train
from skill_train.program.watch import (
    ROWS,
    Watch,
    check_inputs,
    check_split,
    first_day,
    in_place,
    newest_checkpoint,
    watch_standard_input,
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])  # none with PYTHONOPTIMIZE=2
    parser.add_argument("plan", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--probe", action="store_true", help="time fp32 and bf16 on this processor and stop")
    parser.add_argument("--data", type=Path, help="path of the plan's data on this machine")
    parser.add_argument("--attended", action="store_true", help="end at a checkpoint when standard input closes")
    parser.add_argument("--job", action="store_true", help="as a cloud job: keep what it makes in the plan's folder")
    parser.add_argument("--rehearse", action="store_true", help="with --job: write nothing to the Hub")
    arguments = parser.parse_args(argv)
    if arguments.rehearse and not arguments.job:
        parser.error("--rehearse goes with --job")
    if arguments.job or arguments.probe or "TORCHELASTIC_RUN_ID" not in os.environ:  # no launcher started this process
        forget_launchers()
    if arguments.job:
        return run_job(arguments.plan, arguments.data, rehearse=arguments.rehearse)
    folder = arguments.plan.resolve().parent
    if is_main_process() and not arguments.probe:  # at once: another process of this run may write it later
        with suppress(OSError):
            (folder / "train.failed.json").unlink(missing_ok=True)
    try:
        plan = load_plan(arguments.plan)
        if not arguments.probe:
            check_processes(plan["placement"])
        prepare_environment(plan["placement"])
        with explained_errors():
            if arguments.probe:
                event("probe", **probe(plan))
            else:
                if arguments.attended:
                    watch_standard_input(folder)
                use_data(plan, arguments.data)
                limit_requests()
                require_hub_inputs(plan)
                with in_place(folder):
                    run(plan, folder, resume=arguments.resume)
    except Refused as refusal:
        tell_failure(refusal, None if arguments.probe else folder)
        return refusal.exit_code
    return 0


def run(plan: Plan, folder: Path, *, resume: bool) -> None:
    """Reads the data, loads the model, checks, trains and checks again. Writes `train.json` last."""
    started = time.monotonic()
    recipe, placement = plan["recipe"], plan["placement"]
    tuned = folder / TUNED[recipe["finetuning_type"]]
    check_optimizer(recipe)
    event("stage", text="reading the data")
    check_base(recipe["model"], recipe["revision"])
    tokenizer = load_tokenizer(recipe["model"], recipe["revision"])
    checkpoint = newest_checkpoint(folder / "checkpoints") if resume else None
    if checkpoint is not None:
        tokenizer.day = first_day(folder) or tokenizer.day
    pictures = load_pictures(recipe, tokenizer)
    named = plan.get("asked", {}).get("columns", True) is not None
    recorded = recorded_split(folder, checkpoint, plan.get("recipe_hash"))
    data = load_data(recipe, tokenizer, recorded, pictures, named=named)
    event("data", **data["figures"])
    keep_rows(data, pictures, folder)

    event("stage", text="loading the model")
    base = base_folder(recipe) if is_full(recipe) else None
    if checkpoint is not None:
        check_split(checkpoint, placement)
    watch = Watch(folder, data, recipe, checkpoint, keep=placement["save_total_limit"])
    watch.recipe_hash = plan.get("recipe_hash")
    trainer = build_trainer(recipe, placement, folder, tokenizer, data, watch)
    watch.require_folder()  # the trainer makes one if there is none
    if is_main_process():
        started_with = environment(trainer, data, base_weights(recipe), folder)
        if checkpoint is not None:
            check_inputs(folder, started_with["base_weights"], started_with["data"]["rows_sha256"])
        write_json(folder / "environment.json", started_with)
    # Every process takes part in the checks: the loss is gathered from all, and they would wait for a missing one.
    event("stage", text=MEASURING)
    checks = Checks(trainer, tokenizer, data, recipe)
    checks.before_training(resumed=checkpoint is not None, folder=folder)

    event("stage", text=TRAINS)
    train(trainer, watch, recipe["seed"], checkpoint)
    event("stage", text=f"saving {tuned.name}/")
    save(trainer, tuned, base, pictures)
    checks.after_training(folder, tuned)
    if is_main_process():
        write_json(folder / "train.json", report(plan, watch, checks, tuned, time.monotonic() - started))
        event("done", verdict=checks.verdict())
    trainer.accelerator.end_training()


def keep_rows(data: Data, pictures: Pictures | None, folder: Path) -> None:
    """Writes samples.jsonl and held_out.jsonl, and the pictures of their rows. Only the main process writes them."""
    if not is_main_process():
        return
    write_rows(folder / "samples.jsonl", keep_pictures(data["train"][:SAMPLE_ROWS], pictures, folder))
    write_rows(folder / "held_out.jsonl", keep_pictures(data["held_out"], pictures, folder))


def keep_pictures(rows: list[Any], pictures: Pictures | None, folder: Path) -> list[Any]:
    """Stores the pictures of rows under `images/` of the run directory. Returns the rows with the names of these files.
    A file is named by its digest, so a picture of many rows is stored once."""
    if pictures is None:
        return rows
    images = folder / "images"
    images.mkdir(exist_ok=True)
    named = []
    for row in rows:
        names = []
        for image, digest in zip(row.get("images") or (), row.get("image_sha256") or (), strict=True):
            name = f"{digest}.{picture_format(image, pictures.folder)}"
            if not (images / name).is_file():
                write_whole(images / name, encoded_bytes(image, digest, pictures.folder))
            names.append(f"images/{name}")
        named.append({**row, "images": names} if names else row)
    return named


def load_pictures(recipe: Recipe, tokenizer: Any) -> Pictures | None:
    """The reader of the pictures in rows; None for a recipe of text."""
    if not recipe.get("images"):
        return None
    folder = picture_folder(recipe["data"], recipe.get("data_file"), recipe["data_revision"])
    return Pictures(recipe, tokenizer, folder)


def load_data(
    recipe: Recipe,
    tokenizer: Any,
    recorded: set[int] | None = None,
    pictures: Pictures | None = None,
    *,
    named: bool = True,
) -> Data:
    """Encoded rows, split into `train` and `held_out`, with their figures and the order in which they are fed. The rows
    with the numbers `recorded` stay held out, as in an earlier start. `named`: the user chose the columns."""
    encode = Encoder(recipe, tokenizer, pictures)
    if not Path(recipe["data"]).exists():  # the planner has seen only the first rows
        encode.decodes, encode.leaves_out = True, named
    source = iter_rows(
        recipe["data"],
        split=recipe["split"],
        config=recipe["data_config"],
        revision=recipe["data_revision"],
        file=recipe.get("data_file"),
    )
    rows = [encode(index, line, row) for index, (line, row) in enumerate(source)]
    if not rows:
        raise Refused(
            f"{recipe['data']} has no rows",
            code="empty_dataset",
            expected="at least one row",
            got=f"no rows in {recipe['split']}",
            hint="use another file, or another split, such as split: train",
        )
    rows = trainable_rows(rows, recipe)
    contents, questions = contents_of(rows), [digest_of(normalised(question_of(row))) for row in rows]
    if recorded is None:
        images = [row.get("image_sha256", []) for row in rows]
        exchanges = exchanges_of(rows)
        held_out = held_out_rows(contents, questions, recipe["held_out_fraction"], recipe["seed"], images, exchanges)
    else:
        held_out = {index for index, row in enumerate(rows) if row["row"] in recorded}
    train = [row for index, row in enumerate(rows) if index not in held_out]
    lengths, trained = [len(r["input_ids"]) for r in train], [trained_tokens(r) for r in train]
    figures: DataFigures = {
        "rows": len(rows),
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "truncated_rows": sum(r["truncated"] for r in rows),
        "skipped_rows": encode.count - len(rows),
        "tokens": sum(lengths),
        "longest_row_tokens": max(lengths),
        "trained_token_share": round(sum(trained) / sum(lengths), 4),
        **repeated(contents, questions, held_out),
        "notes": encode.notes,
    }
    order = feeding_order(len(train), recipe["max_steps"] * recipe["effective_batch_size"], recipe["seed"])
    rows_held_out = [rows[i] for i in sorted(held_out)]
    return {"train": train, "held_out": rows_held_out, "figures": figures, "order": order, "pictures": pictures}


class TrainFigures(TypedDict):
    """Figures that were measured during training. Memory is by kind: `rss`, `cuda`, `mps`."""

    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    peak_memory_bytes: dict[str, int]
    baseline_memory_bytes: dict[str, int]


class TrainRecord(TypedDict):
    """`train.json`."""

    schema: Literal["skill-train/step/1"]
    step: Literal["train"]
    run: str | None  # the id of a run in the cloud
    recipe_hash: str | None
    steps: int
    verdict: Verdict
    outputs: dict[str, FileDigest]
    saved_dtype: str
    smaller_layout: Reason | None  # why a second try trained with smaller batches
    checks: list[TrainingCheck]
    example: str
    answer: Answer
    data: DataFigures
    figures: TrainFigures
    seconds: float
    finished_at: str


def report(plan: Plan, watch: Watch, checks: Checks, tuned: Path, seconds: float) -> TrainRecord:
    """Builds `train.json`. `seconds` are those of this start; the record adds the steps of earlier starts."""
    steps = [line for line in watch.lines if line["tokens_per_second"]]
    last = [line for line in steps if line.get("start", 1) == watch.start]
    settled = last[1:] or steps[1:] or steps  # the first step warms up
    timed = sum(line["seconds"] or 0.0 for line in settled)
    earlier = sum(line["seconds"] or 0.0 for line in steps if line.get("start", 1) < watch.start)
    beside = (tuned.with_name(name) for name in ("environment.json", watch.metrics.name, ROWS[0]))
    described = [*files_of(tuned), *(path for file in beside for path in files_of(file))]
    smaller = [reason for reason in plan.get("reasons") or [] if reason.get("rule") == SMALLER]
    return {
        "schema": "skill-train/step/1",
        "step": "train",
        "run": run_id(),
        "recipe_hash": plan.get("recipe_hash"),
        "steps": checks.trainer.state.global_step,
        "verdict": checks.verdict(),
        "outputs": {str(path.relative_to(tuned.parent)): file_digest(path) for path in described},
        "saved_dtype": saved_type(tuned),
        "smaller_layout": smaller[-1] if smaller else None,
        "checks": checks.results,
        "example": marked_text(checks.tokenizer, checks.rows[0])[:2000],
        "answer": checks.answer,
        "data": checks.data["figures"],
        "figures": {
            "first_loss": watch.lines[0]["loss"],
            "last_loss": watch.lines[-1]["loss"],
            "tokens_per_second": round(sum(line["tokens"] for line in settled) / timed, 1) if timed else None,
            "seconds_per_step": round(timed / len(settled), 4) if timed else None,
            "peak_memory_bytes": watch.peak_bytes,
            "baseline_memory_bytes": watch.baseline_bytes,
        },
        "seconds": round(seconds + earlier, 2),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def saved_type(folder: Path) -> str:
    """The dtype of the first weight in the first file of a folder, by torch's name. Other weights may differ."""
    from safetensors import safe_open

    with safe_open(str(min(folder.glob("*.safetensors"))), "pt") as file:
        weight = file.get_tensor(min(file.keys()))
    return str(weight.dtype).removeprefix("torch.")


class TimedPass(TypedDict):
    seconds: float
    loss: float | None


def probe(plan: Plan) -> dict[str, TimedPass]:
    """Seconds of a forward and backward pass, and the loss, in fp32 and in bf16: the plan's model on its device."""
    import torch

    recipe, placement = plan["recipe"], plan["placement"]
    if placement["threads"]:
        torch.set_num_threads(placement["threads"])
    check_base(recipe["model"], recipe["revision"])
    model = load_model(recipe, placement | {"dtype": "float32"})
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(0, size, (1, 128), generator=torch.manual_seed(0)).to(placement["device"])
    figures: dict[str, TimedPass] = {}
    for name in ("float32", "bfloat16"):
        model.to(device=placement["device"], dtype=getattr(torch, name))
        model.requires_grad_(False)  # as with an adapter: only activations get gradients
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            loss = model(inputs_embeds=embedded, labels=ids).loss
            loss.backward()
            value = number(loss.item())  # waits for the device
            seconds.append(time.monotonic() - started)
        figures[name] = {"seconds": min(seconds), "loss": value}
    return figures


if __name__ == "__main__":
    seek_cycles_seldom()
    sys.exit(main(sys.argv[1:]))
