"""Figures on the pages are those of the program: limits, defaults, prices, names of checks. And the scorer runs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from skill_train.cloud import start_once
from skill_train.cloud.elsewhere import colab, skypilot
from skill_train.commands.evaluate import ROWS
from skill_train.data import count_tokens, problems, row_pictures
from skill_train.estimate import published, time
from skill_train.evaluate import bootstrap, figures, scores, step
from skill_train.gguf.quality import sensitivity, texts, training_rows
from skill_train.hub.flavors import shipped
from skill_train.llama.importance import collect_worker
from skill_train.llama.logit_distance import SAME_LOSS
from skill_train.model.families import ANSWERS_UP_TO
from skill_train.model.lora_targets import TARGETS
from skill_train.plan import launch_args, placement, places, where
from skill_train.program import checks, rows
from skill_train.program.pictures import decode, engine, locations
from skill_train.program.pictures.processor import PROCESSOR_DEFAULTS
from skill_train.program.plan import HELD_OUT_ROWS, held_out_count
from skill_train.recipe.fields import Recipe
from skill_train.report import thumbnails
from skill_train.verify import sample_texts, thresholds
from skill_train.verify.pictures import as_used, questions
from skill_train.verify.thresholds import limits

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = Recipe("model", "data")
SMALL, LARGE = (sample_texts.sample_of(weights, None) for weights in (ANSWERS_UP_TO, ANSWERS_UP_TO + 1))
MERGED = thresholds.limits("f16", merged_in_bf16=True)


def _page(name: str) -> str:
    return (ROOT / "references" / name).read_text(encoding="utf-8")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _percents(low: float, high: float) -> str:
    return f"{100 * low:g} to {100 * high:g} %"


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


STATED: dict[str, list[str]] = {
    "cloud_runs.md": [
        f"within {['no', 'one', 'two'][round(start_once.settled_seconds() / 60)]} minutes",
    ],
    "other_clouds.md": [
        f"SkyPilot {skypilot.VERSION} needs",
        f"released {skypilot.IDLE_MINUTES} minutes after the end",
        f"about {colab.LARGEST_BYTES * 3 // 4 // 1_000_000} MB of compressed data",  # base64 makes 4 bytes of 3
    ],
    "evaluation.md": [
        f"{_percent(DEFAULTS.held_out_fraction)} by default, with {HELD_OUT_ROWS} rows at most",
        f"`evaluate` takes {ROWS} held-out rows",
        f"or {step.ROOM} tokens after the length of the expected answer ({8 * step.ROOM} with a second score)",
        f"with {scores._START_SECONDS:.0f} seconds to load and {scores._ANSWER_SECONDS:.0f} for each answer",
        f"drawn {bootstrap.RESAMPLES:,} times",
        f"the middle {_percent(bootstrap.LEVEL)} of",
        f"less than {SAME_LOSS} nats a token ({_percent(SAME_LOSS)} of the perplexity",
        f"fewer than {figures.FEW_ROWS} rows",
        f"the first {step._LONGEST_TEXT:,} characters of each answer",
    ],
    "datasets.md": [
        f"one object of {rows.LINE_BYTES // 1_000_000} MB at most",
        f"has {rows.DOCUMENT_BYTES // 10**9} GB at most",
        f"{rows.CELL_CHARACTERS // 1_000_000} million characters at most",
        f"more than {decode.PICTURE_BYTES // 10**6} MB or {decode.PICTURE_PIXELS // 10**6} million pixels",
        f"more than {decode.PICTURE_RATIO} times the other",
        f"at most {count_tokens.SAMPLE} rows",
        f"first {problems.LOOKED_AT // 1_000_000} MB of text",
    ],
    "engines.md": [
        f"by {thresholds.ENGINE_GAP[0]} nats",
        f"Above {thresholds.ENGINE_GAP[0]} nats the check warns, and above {thresholds.ENGINE_GAP[1]:g}",
    ],
    "gguf_conversion.md": [
        f"takes {texts._MOST:,} tokens at most",
        f"more than {collect_worker.CONTEXT} tokens is read up to `max_length` in windows",
        f"Below {texts.FEWEST} tokens there is no matrix",
        f"({texts._WORK:.0e} weights x tokens".replace("e+", "e"),
        f"download of up to {training_rows._MOST_BYTES // 10**9} GB",
        f"measures for {sensitivity.MOST_SECONDS / 60:g} minutes at most",
        f"models of up to {ANSWERS_UP_TO // 10**6}M weights",
    ],
    "verification.md": [
        f"| up to {ANSWERS_UP_TO // 10**6}M weights | {SMALL.tokens} | {SMALL.prompts} | {SMALL.answer_tokens} |",
        f"| larger | {LARGE.tokens}; {LARGE.quantized_tokens} of a quantized file | {LARGE.prompts} |",
        f"fewer than {sample_texts._FEWEST}",
        f"above {_short(limits('f16').kl[0])} nats and fails above {_short(limits('f16').kl[1])}",
        f"the bounds are {_short(limits('bf16').kl[0])} and {_short(limits('bf16').kl[1])}",
        f"of a bf16 base are {_short(MERGED.kl[0])} and {_short(MERGED.kl[1])}",
        f"warns above {thresholds._FACTORS[0]:g} times the mean KL",
        f"above {thresholds._FACTORS[1]:g} times. The bounds of the perplexity",
        f"above {thresholds._OF_MEASURED[0]:g} times the mean KL that `export-gguf` measured",
        f"fails above {thresholds._OF_MEASURED[1]:g} times, each beyond",
        f"above {thresholds.FAR_TOKENS[0]} of them in sum warns, above {thresholds.FAR_TOKENS[1]} fails",
        f"more than {_short(as_used._TRAINED)} nats a token",
    ],
    "planning.md": [
        f"{placement._WORTH_IT} times as fast by the estimate",
        f"range is {_percent(published.SPREAD)} to both sides",
        f"lie within {_percent(published.WORST)} of the middle",
        f"with a factor of {time.SPREAD} to both sides",
        f"reaches {_percents(*time._CPU_REACHED)} of its peak",
        f"A Mac reaches {_percents(*time._MPS_REACHED)}",
        f"a GPU reaches {_percent(time._FLOAT_REACHED)} of its peak",
        f"{1000 * time._LAUNCHES[False][0]:g} to {1000 * time._LAUNCHES[False][1]:g} ms a layer",
        f"or {1000 * time._LAUNCHES[True][0]:g} to {1000 * time._LAUNCHES[True][1]:g} with checkpointing",
        f"{places._PROCESS_BYTES / 1e9:g} GB a process",
        f"cloud: {places._START_SECONDS[0] / 60:g} to {places._START_SECONDS[1] / 60:g} minutes",
        f"up to {where.SMALL_VISION / 1e9} billion parameters",
    ],
    "local_training.md": [
        f"within {_percent(placement.PROBE_LOSS_TOLERANCE)}.",
        f"{placement.PROBE_FASTER} times as fast with a loss within {_percent(placement.PROBE_LOSS_TOLERANCE)}",
        f"below {placement.PROBE_FROM_PARAMETERS // 1_000_000} million parameters are not probed",
        f"`effective_batch_size` ({DEFAULTS.effective_batch_size} unless",
        f"within {'ten' if launch_args.SHUTDOWN_SECONDS == 600 else '?'} minutes",
        f"first {checks.FIXED_ROWS} training rows",
        f"less than {_percent(checks.LEAST_FALL)}",
    ],
    "vision.md": [
        f"More than {row_pictures.MOST_FILES:,} files are refused too",
        f"with `--data-repo` more than {row_pictures.MOST_IN_A_FOLDER:,} in one folder",
        f"with {engine.ENGINE_TOKENS[0]} to {engine.ENGINE_TOKENS[1]:,} tokens",
        f"with {engine.LINED_TOKENS[0]} to {engine.LINED_TOKENS[1]:,} tokens",
        f"in llama-cpp-python {engine.ENGINE_VERSION} |",
        f"{locations.ROWS_AHEAD} rows at a time",
        f"up to {['no', 'one', 'two', 'three', 'four'][questions._QUESTIONS]} held-out rows",
        f"warns above {as_used._UNHEARD} nats",
        f"changes by {_short(checks.PICTURE_CHANGE)} of itself or less",
        f"at most {thumbnails.EDGE} pixels along",
        f"at most {thumbnails.MOST_CHARACTERS:,} characters",
    ],
}


@pytest.mark.parametrize("name", STATED)
def test_a_page_states_the_figures_of_the_program(name: str) -> None:
    text = re.sub(r"\s+", " ", _page(name))
    assert [phrase for phrase in STATED[name] if phrase not in text] == []


def test_none_is_held_out_below_the_rows_that_the_page_names() -> None:
    least = re.search(r"none if the data has fewer than (\d+) rows", re.sub(r"\s+", " ", _page("evaluation.md")))
    assert least is not None
    assert [held_out_count(int(least[1]) - n, 0.5) for n in (0, 1)] == [int(least[1]) // 2, 0]


def test_the_split_of_a_batch_is_that_of_the_plan() -> None:
    """The columns are those of a Mac and of a GPU, in the order of the rows at a time."""
    cells = re.findall(r"^\| (\d+) x (\d+) \| ([^|]+) \| ([^|]+) \|$", _page("local_training.md"), re.MULTILINE)
    assert [(int(rows), int(times)) for rows, times, *_ in cells] == [(n, 16 // n) for n in (1, 2, 4, 8, 16)]
    for column, device in ((2, "mps"), (3, "cuda")):
        limits = placement._ROWS_AT_ONCE[device]
        ends = [int(limit) for limit, _ in limits[:-1]]
        between = [f"{low} to {high - 1} GB" for low, high in pairwise(ends)]
        assert [cell[column] for cell in cells] == [f"below {ends[0]} GB", *between, f"{ends[-1]} GB and more"]
        assert [rows for _, rows in limits] == [1, 2, 4, 8, 16]


def test_prices_and_memory_of_the_flavors_are_those_that_are_shipped() -> None:
    text = re.sub(r"\s+", " ", _page("cloud_runs.md"))
    flavors = {flavor.name: flavor for flavor in shipped()}
    stated = re.findall(r"\$([\d.]+) \(([\w-]+)\)", text)
    assert len(stated) >= 5
    assert [(price, name) for price, name in stated if float(price) != flavors[name].usd_per_hour] == []
    memory = re.search(r"lacked host memory: ([\w-]+) and ([\w-]+) have (\d+) GB", text)
    assert memory is not None
    assert {(flavors[memory[n]].ram_bytes or 0) // 10**9 for n in (1, 2)} == {int(memory[3])}


def test_every_check_of_a_training_is_explained_and_no_other() -> None:
    """SKILL.md sends there who meets one that fails."""
    source = Path(checks.__file__).read_text(encoding="utf-8")
    made = set(re.findall(r'self\.add\(\s*"(\w+)"|name, reloaded = "(\w+)"', source))
    section = _page("local_training.md").split("## The smoke verdict")[1].split("\n## ")[0]
    named = [name for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for name in re.findall(r"\w+", row)]
    assert set(named) == {first or second for first, second in made} and len(named) == len(set(named))


def test_the_scorer_of_the_page_takes_every_answer() -> None:
    source = re.search(r"```python\n(def score.*?)```", _page("evaluation.md"), re.DOTALL)
    assert source is not None
    module: dict[str, Any] = {}
    exec(source[1], module)  # noqa: S102 - our own
    pairs = [("", "a b"), (" \n", "b"), ("a b", "b"), ("b a", "b")]
    assert [module["score"]("p", answer, expected) for answer, expected in pairs] == [0.0, 0.0, 1.0, 0.0]


def test_the_lora_targets_of_the_page_are_those_of_the_program() -> None:
    """In the column of attention, which is the default. Qwen3.5 has no list, so all of its layers get an adapter."""
    table = _page("training_methods.md").split("## Names of LoRA targets")[1]
    rows = re.findall(r"^\| (?!arch|---|Qwen3\.5)([^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    kinds = {"gptneox": "gpt_neox", "smollm": "smollm3"}
    stated = {
        kinds.get(slug, slug): re.findall(r"`(\w+)`", modules)
        for names, modules in rows
        for slug in re.sub(r"[^a-z0-9,]", "", names.lower()).split(",")
    }
    assert len(stated) > 10 and {kind: TARGETS.get(kind) for kind in stated} == stated
    assert not {"qwen3_5", "qwen3_5_text"} & set(TARGETS)


def test_the_families_that_train_on_pictures_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| yes \|", _page("vision.md"), re.MULTILINE)
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == set(PROCESSOR_DEFAULTS)


def test_the_clouds_of_the_page_are_those_of_the_program() -> None:
    """In the order of the task."""
    stated = re.search(r"the cheapest first: ([^.]+)\.", re.sub(r"\s+", " ", _page("other_clouds.md")))
    assert stated is not None
    names = [name.partition(" (")[0].lower() for name in stated[1].split(", ")]
    assert tuple({"kubernetes": "k8s"}.get(name, name) for name in names) == skypilot.CLOUDS
