"""The card of a pushed model: its description, its training and its proof. Pure; a card contains nothing from the data.

`templates/model_card.md` has the order of the card's parts.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from skill_train.core.errors import quoted
from skill_train.program.pictures.engine import ENGINE_NOTE
from skill_train.publish.records import CHECKS_WITH_DETAIL
from skill_train.run.evaluate_record import Evaluation, FigureDifference, ModelFigures
from skill_train.run.train_record import TrainRecord
from skill_train.run.verify_record import Check, Proof

# The checks that matter to a reader.
_PROOF = (
    "weights", "tokens", "chat_template", "logits", "tuned", "answers", "projector_weights", "pictures",
    "pictures_as_used",
)  # fmt: skip
_FACTS = (
    "finetuning_type", "lora_r", "lora_alpha", "lora_dropout", "target_modules", "learning_rate", "lr_scheduler_type",
    "max_steps", "effective_batch_size", "max_length", "loss_on", "seed", "load_in_4bit", "preprocess",
)  # fmt: skip


@dataclass(frozen=True)
class CardFacts:
    repo: str  # `name/of-repository`
    parts: tuple[str, ...]  # some of `adapter`, `merged`, `gguf`
    base: str  # the id of the base on the Hub if `base_on_hub`, otherwise the name of its folder
    base_on_hub: bool
    data: str  # the id of the dataset on the Hub if `data_on_hub`, otherwise the name of a file
    data_on_hub: bool
    recipe: Mapping[str, object]  # the recipe as the plan resolved it
    recipe_hash: str
    training: TrainRecord
    proof: Proof | None  # None if nothing was verified
    licence: str | None = None  # the licence of the base; None if unknown
    licence_reason: str = ""  # the source of the licence, or why it is unknown
    # the name and the bytes of each file that contains a whole model
    ggufs: dict[str, int] = field(default_factory=dict)
    # the importance matrix that a file was made with, in words, by the name of the file
    matrices: dict[str, str] = field(default_factory=dict)
    projector: str | None = None  # the name of the projector for all `ggufs`; None without one
    lora: str | None = None  # the name of the GGUF file of the adapter alone
    half_of_a_pair: str = ""  # a sentence if one of a vision model's two files is missing; otherwise empty
    evaluation: Evaluation | None = None  # the evaluation of these files; None if there is none
    base_may_know: bool = False  # the base was made by runs that may have trained on the evaluated rows
    private: bool = False


def card(facts: CardFacts, template: str) -> str:
    """The README.md of the repository: YAML for the Hub, then the page. Parts without content are left out."""
    import yaml

    page = Template(template).substitute(
        front=yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True).strip(),
        name=facts.repo.split("/")[-1],
        about=_introduction(facts),
        use=_how_to_use(facts),
        measured=_matrices(facts) + _measured(facts),
        proof=_proof(facts),
        made=_training(facts),
        licence=_licence(facts),
    )
    return re.sub(r"\n{3,}", "\n\n", page)


def _front(facts: CardFacts) -> dict[str, object]:
    """The YAML of the card, with the keys of huggingface.co/docs/hub/model-cards, 2026-11. `image-text-to-text` is the
    Hub's task, and transformers' pipeline, of a model that reads pictures and text and writes text."""
    front: dict[str, object] = {}
    if facts.licence is not None:
        front["license"] = facts.licence
    if facts.base_on_hub:
        front["base_model"] = facts.base
        front["base_model_relation"] = _relation(facts)
    front["library_name"] = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}[facts.parts[0]]
    front["pipeline_tag"] = "image-text-to-text" if _reads_pictures(facts) else "text-generation"
    tags = ["lora"] * ("adapter" in facts.parts) + ["gguf"] * ("gguf" in facts.parts)
    front["tags"] = ["skill-train", "sft", *tags]
    if facts.data_on_hub:
        front["datasets"] = [facts.data]
    return front


def _reads_pictures(facts: CardFacts) -> bool:
    """Whether the pushed model reads pictures. GGUF files do so only with a projector."""
    if "gguf" in facts.parts:
        return facts.projector is not None and bool(facts.ggufs)
    return bool(facts.recipe.get("images"))


def _relation(facts: CardFacts) -> str:
    if "merged" in facts.parts:
        return "finetune"
    return "quantized" if facts.ggufs or facts.projector else "adapter"


def _introduction(facts: CardFacts) -> str:
    how = "All weights" if facts.recipe.get("finetuning_type") == "full" else "A LoRA"
    base = (
        f"`{_safe(facts.base)}`" if facts.base_on_hub else f"`{_safe(facts.base)}` (a folder, not a model on the Hub)"
    )
    data = facts.training.data
    notes = "".join(f" Note: {_safe(note)}." for note in data.notes)
    trained = f"{how} of {base}, fine-tuned on {data.train_rows} rows of `{_safe(facts.data)}` with skill-train."
    half = f" **Not whole:** {facts.half_of_a_pair}." if facts.half_of_a_pair else ""
    failed = _checks_with(facts.training, "fail")
    smoke = f" **The training failed its smoke test:** {failed}." if failed else ""
    return f"{trained}{notes}{smoke} {_verdict(facts)}".rstrip() + half


def _checks_with(training: TrainRecord, verdict: str) -> str:
    """The names of the training's own checks with this verdict; empty without one."""
    return ", ".join(_safe(check.name) for check in training.checks if check.verdict == verdict)


def _verdict(facts: CardFacts) -> str:
    if "gguf" not in facts.parts:  # `verify` judges only GGUF files
        return ""
    if facts.proof is None:
        return "The files were **not verified** against the trained model."
    return f"Each file in the table below was compared with the model that was trained: **{facts.proof.verdict}**."


def _how_to_use(facts: CardFacts) -> str:
    ggufs = sorted(facts.ggufs, key=lambda name: facts.ggufs[name])  # the smallest first, the unquantized one last
    lines = _use_of_pairs(facts, ggufs, facts.projector) if facts.projector and ggufs else _use_of_files(facts, ggufs)
    lines += ["", *_private(facts)] if facts.private else []
    in_python = facts.recipe.get("preprocess") == "engine" and {"adapter", "merged"} & set(facts.parts)
    lines += ["", ENGINE_NOTE] if in_python else []
    if "adapter" in facts.parts:
        where = "" if facts.parts == ("adapter",) else ', subfolder="adapter"'
        base = facts.base if facts.base_on_hub else "FOLDER_OF_THE_BASE"
        model = "AutoModelForImageTextToText" if facts.recipe.get("images") else "AutoModelForCausalLM"
        lines += ["", "```python", "from peft import PeftModel", f"from transformers import {model}", ""]
        lines.append(f'model = {model}.from_pretrained({json.dumps(base)}, dtype="auto")')
        lines += [f'model = PeftModel.from_pretrained(model, "{facts.repo}"{where})', "```"]
    return "\n".join(lines)


def _use_of_files(facts: CardFacts, ggufs: list[str]) -> list[str]:
    lines = [f"llama-cli -hf {facts.repo} -hff {quoted(name)} -cnv" for name in ggufs]
    if ggufs:
        lines.append(f"ollama run {quoted(f'hf.co/{facts.repo}:{ggufs[0]}')}")
    if facts.lora is None:
        return ["```sh", *lines, f"hf download {facts.repo}", "```"]
    lines += [_download(facts), f"llama-cli -m BASE.gguf --lora {quoted(facts.lora)} -cnv"]
    return ["```sh", *lines, "```", "", "`BASE.gguf` is a GGUF file of the base."]


def _download(facts: CardFacts) -> str:
    folder = facts.repo.split("/")[-1]
    return f"hf download {facts.repo} --local-dir {folder} && cd {folder}"


def _use_of_pairs(facts: CardFacts, ggufs: list[str], projector: str) -> list[str]:
    """How to run a language model with its projector, from references/vision.md. Each command names both files, so that
    no program has to find the projector by itself."""
    other = quoted(projector)
    both = [f"-m {quoted(name)} --mmproj {other}" for name in ggufs]
    rows = [f"| {_safe(name)} | {_safe(projector)} |" for name in ggufs]
    return [
        "Two files belong together. Without the projector the language model reads text only.",
        *("", "| language model | projector |", "| --- | --- |", *rows, ""),
        *("```sh", _download(facts)),
        *(f"llama-server {files}" for files in both),
        *(f"llama-mtmd-cli {both[0]} --image FILE -p QUESTION", "```", ""),
        "LM Studio: put both files into one folder, `~/.lmstudio/models/PUBLISHER/MODEL/`. Ollama: a Modelfile with "
        f"the lines `FROM ./{_safe(ggufs[0])}` and `FROM ./{_safe(projector)}`, then `ollama create NAME -f Modelfile`;"
        " whether it then reads pictures depends on family and version.",
    ]


def _private(facts: CardFacts) -> list[str]:
    """How to run a file of a private repository: https://huggingface.co/docs/hub/ollama, "Run Private GGUFs", 2026."""
    ollama = "; Ollama needs its public key in your account (https://huggingface.co/docs/hub/ollama)"
    signed = (
        "While this repository is private, each of these needs a token that may read it (`hf auth login`, `HF_TOKEN`)"
    )
    return [signed + (ollama if facts.ggufs and not facts.projector else "") + "."]


def _matrices(facts: CardFacts) -> str:
    """The importance matrix of each quantized file."""
    lines = [f"- `{_safe(name)}`: {_safe(words)}" for name, words in facts.matrices.items() if name in facts.ggufs]
    return "Made with an importance matrix:\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _measured(facts: CardFacts) -> str:
    """The figures of evaluate.json: how good the pushed models are on held-out rows."""
    if facts.evaluation is None:
        return ""
    evaluation = facts.evaluation
    loss = {row.model: row for row in evaluation.differences if row.measure == "loss"}
    rows = [row for row in evaluation.models if not row.name.endswith(".gguf") or row.name in facts.ggufs]
    table = [
        f"| {_safe(row.name)} | {_digits(row.loss)} | {_exact(row)} | {_against(loss.get(row.name))} |" for row in rows
    ]
    never = facts.training.data.held_out_trained == 0  # earlier versions trained on some of them
    which = "rows that this run never trained on" if never else "held-out rows, which may have been trained"
    which += ", and on some of which its base may have been trained" if facts.base_may_know else ""
    basis = f"By `skill-train evaluate`, on {evaluation.rows} {which}. The interval is of 95 %."
    head = f"## Measured\n\n{basis}\n\n"
    return head + "| model | loss | exact match | difference in loss |\n| --- | --- | --- | --- |\n" + "\n".join(table)


def _digits(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _exact(figures: ModelFigures) -> str:
    return "not asked" if figures.exact_match is None else f"{figures.exact_match:.0%} of {figures.asked_rows}"


def _against(difference: FigureDifference | None) -> str:
    if difference is None:
        return ""
    interval = f"{difference.difference:+.3g} ({difference.low:+.3g} to {difference.high:+.3g})"
    return f"{interval} against {_safe(difference.against)}: {_safe(difference.says)}"


def _proof(facts: CardFacts) -> str:
    """A table with a row for each file and check, with the figures of verify.json."""
    if facts.proof is None:
        return ""
    rows = [check for check in facts.proof.checks if check.name in _PROOF]
    table = [f"| {_safe(check.file)} | {check.name} | {check.verdict} | {_cell(check)} |" for check in rows]
    skipped = [one for one in facts.proof.not_checked if one.name in (*_PROOF, "everything else")]
    table += [f"| {_safe(one.file)} | {one.name} | not checked | |" for one in skipped]
    tokens = facts.proof.samples.get("tokens")
    head = (
        f"## Proof\n\nBy `skill-train verify`, on {tokens} tokens. All checks: `skill-train/verify.json`. It proves "
        "that each file is the model that was trained; it does not say that the model is good.\n\n"
    )
    return head + "| file | check | verdict | found |\n| --- | --- | --- | --- |\n" + "\n".join(table)


def _cell(check: Check) -> str:
    """The sentence of a check; only its numbers if the sentence can quote texts."""
    if check.name in CHECKS_WITH_DETAIL:
        return _safe(check.detail)
    return f"{_number(check.figure)} (limit {_number(check.threshold)})"


def _number(value: Any) -> Any:
    if isinstance(value, float) and 0 < abs(value) < 0.001:
        return f"{value:.2g}"
    return None if isinstance(value, str) else _round(value)


def _training(facts: CardFacts) -> str:
    figures = facts.training.figures
    rows = [(key, facts.recipe[key]) for key in _FACTS if key in facts.recipe]
    rows += [("first loss", _round(figures.first_loss)), ("last loss", _round(figures.last_loss))]
    verdict = facts.training.verdict
    names = "" if verdict == "pass" else _checks_with(facts.training, verdict)
    rows += [("checks of the training", f"{verdict}: {names}" if names else verdict)]
    table = "\n".join(f"| {key} | {_plain(value)} |" for key, value in rows)
    revisions = (facts.recipe.get(key) for key in ("revision", "data_revision"))
    pinned, data_pinned = (f" at revision `{_safe(revision)}`" if revision else "" for revision in revisions)
    return (
        f"Base `{_safe(facts.base)}`{pinned}; data `{_safe(facts.data)}`{data_pinned}; recipe hash "
        f"`{facts.recipe_hash}`. The whole recipe: `skill-train/recipe.yaml`.\n\n| | |\n| --- | --- |\n{table}"
    )


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _plain(value: Any) -> str:
    return _safe(", ".join(map(str, value)) if isinstance(value, list) else value)


def _safe(value: Any) -> str:
    """A value as safe text in a line of Markdown: it ends no table cell, code span or line, and opens no tag."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(value))
    return text.replace("|", "/").replace("`", "'").replace("<", "‹")


def _licence(facts: CardFacts) -> str:
    if facts.licence is None:
        return f"Not known: {facts.licence_reason}. Look at the base before you pass this model on."
    return f"`{_safe(facts.licence)}`, that of the base ({facts.licence_reason})."
