"""The card of a pushed model, for each of its kinds: what the Hub reads of it, and what a reader is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

import step_records
import whole_records
from skill_train.core import resources
from skill_train.program.pictures.engine import ENGINE_NOTE
from skill_train.publish.model_card import CardFacts, card
from skill_train.run.evaluate_record import Evaluation
from skill_train.run.train_record import SmokeCheck
from skill_train.run.verify_record import Proof

Q8, F16 = "m-q8_0.gguf", "m-f16.gguf"
RECIPE = {"lora_r": 8, "learning_rate": 0.0002, "target_modules": ["q_proj", "v_proj"], "revision": "a" * 40}


def facts(*parts: str, **more: Any) -> CardFacts:
    given = {
        "repo": "me/tickets", "parts": parts, "base": "org/base", "base_on_hub": True, "data": "org/rows",
        "data_on_hub": True, "recipe": RECIPE, "recipe_hash": "f" * 64, "proof": None, "evaluation": None,
        "training": step_records.trained({}, first_loss=2.5, last_loss=0.123456),
    }  # fmt: skip
    return CardFacts(**given | more)


def made(*parts: str, **more: Any) -> tuple[dict[str, Any], str]:
    """The YAML for the Hub, and the page."""
    template = resources.template("model_card.md").read_text(encoding="utf-8")
    _, front, page = card(facts(*parts, **more), template).split("---\n", 2)
    return yaml.safe_load(front), page


def proof(**more: Any) -> Proof:
    return msgspec.convert(whole_records.proof(**more), Proof)


def test_an_adapter_alone() -> None:
    front, page = made("adapter", licence="apache-2.0", licence_reason="as its card says")
    assert front == {
        "license": "apache-2.0", "base_model": "org/base", "base_model_relation": "adapter", "library_name": "peft",
        "pipeline_tag": "text-generation", "tags": ["skill-train", "sft", "lora"], "datasets": ["org/rows"],
    }  # fmt: skip
    assert "A LoRA of `org/base`, fine-tuned on 40 rows of `org/rows` with skill-train.\n" in page
    assert 'AutoModelForCausalLM.from_pretrained("org/base", dtype="auto")' in page
    assert 'PeftModel.from_pretrained(model, "me/tickets")\n' in page
    assert f"Base `org/base` at revision `{'a' * 40}`; data `org/rows`; recipe hash `{'f' * 64}`." in page
    assert "| target_modules | q_proj, v_proj |\n" in page and "| last loss | 0.1235 |\n" in page
    assert "`apache-2.0`, that of the base (as its card says)." in page
    for absent in ("verified", "## Proof", "## Measured", "llama-cli", "ollama", "importance", "private", "\n\n\n"):
        assert absent not in page


@pytest.mark.parametrize(
    ("parts", "relation", "library", "tags"),
    [
        (("gguf",), "quantized", "gguf", ["gguf"]),
        (("gguf", "adapter"), "quantized", "gguf", ["lora", "gguf"]),
        (("merged",), "finetune", "transformers", []),
        (("gguf", "merged"), "finetune", "gguf", ["gguf"]),
        (("merged", "adapter"), "finetune", "transformers", ["lora"]),
    ],
)
def test_what_the_hub_reads_of_it(parts: tuple[str, ...], relation: str, library: str, tags: list[str]) -> None:
    front, page = made(*parts, ggufs={Q8: 1} if "gguf" in parts else {})
    assert (front["base_model_relation"], front["library_name"]) == (relation, library)
    assert front["tags"] == ["skill-train", "sft", *tags] and "license" not in front
    assert ('"me/tickets", subfolder="adapter")' in page) == ("adapter" in parts)
    assert ("**not verified**" in page) == ("gguf" in parts)


@pytest.mark.parametrize("parts", [("gguf",), ("gguf", "adapter")])
def test_the_file_of_an_adapter_is_no_quantized_model(parts: tuple[str, ...]) -> None:
    """`ggufs` are the files that hold a whole model; `export-gguf --lora` makes none."""
    assert made(*parts)[0]["base_model_relation"] == "adapter"


def test_a_folder_is_no_model_of_the_hub() -> None:
    front, page = made("adapter", base="base", base_on_hub=False, data="rows.jsonl", data_on_hub=False)
    assert not {"base_model", "base_model_relation", "datasets", "license"} & set(front)
    assert "`base` (a folder, not a model on the Hub)" in page and '("FOLDER_OF_THE_BASE", dtype' in page
    assert "Not known: " in page and "`rows.jsonl`" in page
    recipe = RECIPE | {"revision": None, "data_revision": "b" * 40}
    assert (
        f"Base `base`; data `rows.jsonl` at revision `{'b' * 40}`; recipe"
        in made("adapter", base="base", data="rows.jsonl", recipe=recipe)[1]
    )


def test_how_its_files_are_run() -> None:
    """The smallest first, for it is what most machines can run."""
    _, page = made("gguf", ggufs={F16: 400, Q8: 200}, private=True)
    first, second = (f"llama-cli -hf me/tickets -hff {name} -cnv\n" for name in (Q8, F16))
    assert first + second + f"ollama run hf.co/me/tickets:{Q8}\nhf download me/tickets\n" in page
    assert "a token that may read it (`hf auth login`, `HF_TOKEN`); Ollama needs its public key" in page
    assert "a token" not in made("gguf", ggufs={Q8: 200})[1]
    assert "Ollama" not in made("adapter", private=True)[1]
    assert "Ollama needs" not in made("gguf", ggufs={Q8: 200}, projector="mmproj.gguf", private=True)[1]


def test_the_file_of_an_adapter_is_run_on_one_of_its_base() -> None:
    _, page = made("gguf", lora="first lora.gguf")
    words = (
        "hf download me/tickets --local-dir tickets && cd tickets",
        "llama-cli -m BASE.gguf --lora 'first lora.gguf' -cnv",
    )
    assert "```sh\n" + "\n".join(words) + "\n```\n" in page and "ollama run" not in page
    assert "`BASE.gguf` is a GGUF file of the base.\n" in page
    assert "--lora" not in made("gguf", ggufs={Q8: 200})[1]


@pytest.mark.parametrize(("parts", "told"), [(("adapter",), True), (("merged",), True), (("gguf",), False)])
def test_who_loads_it_in_python_is_told_of_other_pixels(parts: tuple[str, ...], told: bool) -> None:
    """It was trained on those of llama.cpp, which its files get anyway."""
    recipe = RECIPE | {"images": True, "preprocess": "engine"}
    assert (ENGINE_NOTE in made(*parts, recipe=recipe)[1]) is told
    assert ENGINE_NOTE not in made(*parts, recipe=recipe | {"preprocess": "model"})[1]


def test_every_weight_was_trained() -> None:
    _, page = made("merged", recipe=RECIPE | {"finetuning_type": "full"})
    assert "All weights of `org/base`" in page and "| finetuning_type | full |" in page


def test_the_proof_is_of_the_checks_and_quotes_no_text() -> None:
    checks = [
        {"name": "weights", "file": Q8, "verdict": "pass", "figure": 0.00001234, "detail": "all as trained"},
        {"name": "tokens", "file": Q8, "verdict": "warn", "figure": 3, "threshold": 0.5, "detail": "a customer's row"},
        {"name": "answers", "file": Q8, "verdict": "pass", "figure": 0.00012345, "threshold": "words", "detail": ""},
        {"name": "logits", "file": F16, "verdict": "pass", "figure": 1, "detail": "1 | 2"},
        {"name": "pictures", "file": F16, "verdict": "pass", "figure": 0.123456, "threshold": 0.001, "detail": ""},
        {"name": "header", "file": Q8, "verdict": "pass", "detail": "not for the card"},
    ]
    _, page = made("gguf", ggufs={Q8: 1}, proof=proof(verdict="warn", checks=checks))
    assert "compared with the model that was trained: **warn**." in page and "on 2048 tokens" in page
    table = page.split("| --- | --- | --- | --- |\n")[1].split("\n\n")[0]
    assert table.splitlines() == [
        f"| {Q8} | weights | pass | all as trained |",
        f"| {Q8} | tokens | warn | 3 (limit 0.5) |",
        f"| {Q8} | answers | pass | 0.00012 (limit None) |",
        f"| {F16} | logits | pass | 1 / 2 |",
        f"| {F16} | pictures | pass | 0.1235 (limit 0.001) |",
    ]
    assert "compared with the model" not in made("adapter", proof=proof(checks=checks))[1]


def test_what_was_not_checked_is_in_the_table_of_the_proof() -> None:
    """The card said pass, and a reader could not see that no logits were compared. A reason may quote a row."""
    checks = [{"name": "weights", "file": Q8, "verdict": "pass", "detail": "all as trained"}]
    names = ("logits", "trained_is_shipped", "everything else")
    skipped = [{"name": name, "file": Q8, "reason": "of a row"} for name in names]
    _, page = made("gguf", ggufs={Q8: 1}, proof=proof(checks=checks, not_checked=skipped))
    table = page.split("## Proof")[1].split("| --- | --- | --- | --- |\n")[1].split("\n\n")[0]
    assert table.splitlines()[1:] == [f"| {Q8} | {name} | not checked | |" for name in ("logits", "everything else")]
    assert "of a row" not in page


def test_figures_are_of_the_files_that_are_pushed() -> None:
    model = {"loss": 0.51239, "exact_match": 0.756, "asked_rows": 41}
    shown = {"model": Q8, "against": "tuned", "difference": 0.01, "low": -0.02, "high": 0.04, "says": "no | difference"}
    given = whole_records.evaluation(
        models=[{"name": "base"}, model | {"name": Q8}, model | {"name": F16}],
        differences=[shown | {"measure": "loss"}, shown | {"measure": "exact_match", "difference": 0.5}],
    )
    measured = msgspec.convert(given, Evaluation)
    _, page = made("gguf", ggufs={Q8: 1}, evaluation=measured)
    assert "on 20 rows that this run never trained on. The interval is of 95 %." in page
    _, page_of_chain = made("gguf", ggufs={Q8: 1}, evaluation=measured, base_may_know=True)
    assert "never trained on, and on some of which its base may have been trained. The interval" in page_of_chain
    table = page.split("## Measured")[1].split("| --- | --- | --- | --- |\n")[1].split("\n\n")[0]
    assert table.splitlines() == [
        "| base | not measured | not asked |  |",
        f"| {Q8} | 0.5124 | 76% of 41 | +0.01 (-0.02 to +0.04) against tuned: no / difference |",
    ]


@pytest.mark.parametrize("seen", [2, msgspec.UNSET], ids=["some", "not known"])
def test_held_out_rows_that_may_have_trained_are_not_called_new(seen: Any) -> None:
    """`evaluate` warns of them, and the card said that none had trained."""
    training = step_records.trained({}, first_loss=2.5, last_loss=0.1)
    training = replace(training, data=replace(training.data, held_out_trained=seen))
    measured = msgspec.convert(whole_records.evaluation(), Evaluation)
    _, page = made("adapter", training=training, evaluation=measured)
    assert "never trained" not in page and "on 20 held-out rows, which may have been trained." in page


@pytest.mark.parametrize("verdict", ["pass", "warn", "fail"])
def test_checks_of_the_training_are_named(verdict: Any) -> None:
    checks = [SmokeCheck("model_loads", "pass"), SmokeCheck("loss_falls", verdict, 1.0, "a customer's row")]
    training = replace(step_records.trained({}), verdict=verdict, checks=checks)
    training = replace(training, data=replace(training.data, notes=["2 rows were cut"]))
    _, page = made("adapter", training=training)
    row = {"pass": "pass", "warn": "warn: loss_falls", "fail": "fail: loss_falls"}[verdict]
    assert f"| checks of the training | {row} |\n" in page and " Note: 2 rows were cut." in page
    assert ("**The training failed its smoke test:** loss_falls." in page) == (verdict == "fail")
    assert "customer" not in page


def test_no_name_breaks_the_page() -> None:
    odd = "a|b`c<script>\nd"
    _, page = made("gguf", data=odd, ggufs={"x y.gguf": 1}, matrices={"x y.gguf": odd, Q8: "gone"})
    assert "on 40 rows of `a/b'c‹script> d` with" in page and "- `x y.gguf`: a/b'c‹script> d\n" in page
    assert "<script" not in page and "a|b" not in page
    assert "-hff 'x y.gguf' -cnv" in page and "gone" not in page


def test_it_is_the_template_with_each_part_once() -> None:
    page = card(facts("adapter"), Path(resources.template("model_card.md")).read_text(encoding="utf-8"))
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == ["# tickets", "## Use", "## How it was made", "## Licence"]
