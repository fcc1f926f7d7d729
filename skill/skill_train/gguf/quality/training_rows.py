"""Reads the rows that a run trained on from its data again, without the rows that were held out.

The data is used only if all of these hold: it has the digest in the plan, or on the Hub the commit in the plan. The
held-out rows have the digest that the trainer recorded. Every row that the run keeps is encoded to the same ids and
labels that the trainer was fed.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path

from skill_train.core.errors import SkillTrainError
from skill_train.core.units import gigabytes
from skill_train.hub import dataset_library
from skill_train.program.chat.labels import fed_digest, trained_tokens
from skill_train.program.encode import Encoder, Feeding
from skill_train.program.events import Refused
from skill_train.program.examples import Row
from skill_train.program.pictures.locations import COMMIT, hub_file
from skill_train.program.rows import RowsRecipe, data_fingerprint, iter_hub, iter_hub_file, iter_rows
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.reference.load import load_tokenizer
from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir
from skill_train.run.plan_record import Plan
from skill_train.run.train_record import FedRow, read_environment, read_fed_rows

MOST_ROWS = 2048  # the most rows in memory; with 9 tokens each they are enough for an importance matrix
_MOST_BYTES = 2_000_000_000  # the most data on the Hub; it is downloaded unless the training did so on this machine

GOLDEN = (5**0.5 - 1) / 2


class RowsNotHere(Exception):
    """The training rows cannot be read again, or may have changed since the training. The text says why."""


def training_rows(run: RunDir) -> Iterator[list[int]]:
    """The token ids of at most about `MOST_ROWS` training rows. The first n rows are spread evenly over the data.

    Raises:
        RowsNotHere: the rows cannot be used. The caller must discard the rows that it already has.
    """
    try:
        yield from _training_rows(run)
    except (Refused, SkillTrainError, OSError, ImportError) as error:
        raise RowsNotHere(str(error)) from error


def _training_rows(run: RunDir) -> Iterator[list[int]]:
    plan = plan_record.read(run.plan)
    recipe = plan.recipe
    _require_unchanged_data(plan)
    held_out = _held_out(run)
    recorded = {row["row"]: row for row in [*read_fed_rows(run.samples), *held_out]}
    never = {row["row"] for row in held_out}
    order = [number for number in spread(_count(run), MOST_ROWS + len(never)) if number not in never]
    rows = _read(plan, {*order, *recorded})
    tokenizer, environment = load_tokenizer(run.merged), read_environment(run.record("environment"))
    if environment is not None and environment.day is not None:
        tokenizer.day = environment.day
    encode = Encoder(_feeding(recipe), tokenizer)
    _require_same_encoding(encode, rows, recorded)
    for number in order:
        row = encode(number, *rows[number])
        if trained_tokens(row):  # the trainer leaves out the others
            yield row["input_ids"]


def spread(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, ordered by the fraction of number x golden ratio. So the first n are spread
    evenly, and evenly over the remainders of a division, because data may repeat its kinds of rows in a fixed order."""
    return heapq.nsmallest(most, range(count), key=lambda number: number * GOLDEN % 1)


def _require_unchanged_data(plan: Plan) -> None:
    recipe = plan.recipe
    if recipe.images:
        raise RowsNotHere("rows with pictures are not read: the tokens in place of a picture are not text")
    if recipe.method != "sft":
        raise RowsNotHere(f"rows of the method {recipe.method} are not fed as they stand")
    if _is_on_hub(plan):
        _require_commit(plan)
        return
    data = Path(recipe.data)
    if not data.exists():
        raise RowsNotHere(f"{data.name} is not here")
    rows: RowsRecipe = {"split": recipe.split, "columns": recipe.columns}
    if data_fingerprint(data, rows) != plan.fingerprints["data"]:
        raise RowsNotHere(f"{data.name} has changed since the training")


def _is_on_hub(plan: Plan) -> bool:
    return plan.fingerprints.get("data") is None


def _require_commit(plan: Plan) -> None:
    """Checks that the plan names a commit, which is as good as a digest, and that the data is not too large."""
    if not COMMIT.fullmatch(plan.recipe.data_revision or ""):
        raise RowsNotHere(f"{plan.recipe.data} is on the Hub, and the plan does not say at which commit")
    n_bytes = plan.facts.dataset.bytes
    if n_bytes is not None and n_bytes > _MOST_BYTES:
        most = gigabytes(_MOST_BYTES)
        raise RowsNotHere(f"{plan.recipe.data} has {gigabytes(n_bytes)} on the Hub, and at most {most} are downloaded")


def _held_out(run: RunDir) -> list[FedRow]:
    """The rows that were held out, as the trainer recorded them."""
    environment = read_environment(run.record("environment"))
    fed = environment.data if environment is not None else None
    rows = read_fed_rows(run.held_out)
    if fed is None or fed.get("held_out_sha256") != fed_digest(rows):
        raise RowsNotHere(f"{run.held_out.name} is not what the trainer recorded in environment.json")
    return rows


def _count(run: RunDir) -> int:
    """The number of rows in the data, by the record of the training."""
    data = train_record.read(run.record("train")).data
    return data.rows + (data.skipped_rows or 0)


def _read(plan: Plan, numbers: set[int]) -> dict[int, tuple[int, Row]]:
    """The rows with these numbers, each with its line in the file."""
    rows = _from_hub(plan.recipe) if _is_on_hub(plan) else iter_rows(plan.recipe.data, split=plan.recipe.split)
    taken = {number: row for number, row in enumerate(rows) if number in numbers}
    if taken.keys() != numbers:
        raise RowsNotHere(f"{Path(plan.recipe.data).name} has fewer rows than the training read")
    return taken


def _from_hub(recipe: ResolvedRecipe) -> Iterator[tuple[int, Row]]:
    with dataset_library.promptly(recipe.data):
        if recipe.data_file is not None:
            yield from iter_hub_file(hub_file(recipe.data, recipe.data_revision, recipe.data_file), recipe.split)
            return
        yield from iter_hub(recipe.data, recipe.split, recipe.data_config, recipe.data_revision)


def _feeding(recipe: ResolvedRecipe) -> Feeding:
    return {
        "data": recipe.data,
        "format": recipe.format,
        "columns": recipe.columns,
        "loss_on": recipe.loss_on,
        "max_length": recipe.max_length,
    }


def _require_same_encoding(encode: Encoder, rows: dict[int, tuple[int, Row]], recorded: dict[int, FedRow]) -> None:
    if not recorded:
        raise RowsNotHere("the run keeps no row that the trainer was fed")
    for number, fed in recorded.items():
        again = encode(number, *rows[number])
        if (again["input_ids"], again["labels"]) != (fed["input_ids"], fed["labels"]):
            raise RowsNotHere(f"row {number} of the data is not encoded as the trainer was fed it")
