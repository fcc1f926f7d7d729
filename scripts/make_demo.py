# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<2.16", "transformers>=5.23,<6", "sentencepiece>=0.2", "protobuf>=5"]
# ///
"""Makes the model and the dataset of `skill-train demo`, from nothing but this file.

    python scripts/make_demo.py [--out skill/skill_train/demo] [--steps 1800] [--seed 0]

The model is a small Llama that is trained here, from random weights, to read letters to a shop's help desk. It can
answer a letter politely, and answer questions about it: which team, how urgent, which order, who writes, what about.
What it never saw is the dataset's answer, one line of JSON for a ticket system:

    Hello, I was charged twice for the lamp. Order 48213. I need an answer today. Ana
    {"queue": "billing", "priority": "high", "order": 48213}

So before a fine-tune no answer is right, and a LoRA has to join what the model knows in a form that it does not. Every
order number in the dataset is there once: a held-out row cannot be known by heart.

Writes model/ (bf16 weights, sentencepiece tokenizer, chat template) and data.parquet. Took 20 minutes on one busy
core. On another machine the same seed gives other weights of the same ability: sums of floats depend on the processor.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1024
ROWS = 1000
BATCH = 24
QUESTION_WEIGHT = 0.1  # of a token that the user wrote, against one of an answer, in the pretraining loss

# fmt: off
QUEUES = {
    "billing": [
        "I was charged twice for {item}", "the invoice for {item} shows the wrong amount",
        "my card was billed again for {item}", "the bill says that {item} costs more than in the shop",
        "the money for {item} was taken although I cancelled", "I paid for {item} but the bill is still open",
    ],
    "shipping": [
        "{item} has not arrived", "the parcel with {item} is late", "the courier left {item} at the wrong door",
        "{item} went to my old address", "the tracking page for {item} has not moved for days",
        "nobody could tell me where {item} is now",
    ],
    "returns": [
        "I want to send {item} back", "{item} arrived broken", "{item} has the wrong colour",
        "{item} is too small and I want another size", "I would like to exchange {item}",
        "a part of {item} is missing in the box",
    ],
    "technical": [
        "{item} does not turn on", "the app closes when I add {item}", "I cannot pair {item} with my phone",
        "the update of {item} stops halfway", "the light of {item} blinks red all the time",
        "{item} loses the connection every few minutes",
    ],
    "account": [
        "I cannot log in to look at {item}", "I forgot my password and cannot order {item} again",
        "please change the email address on my order of {item}",
        "the login code never comes, so I cannot follow {item}", "somebody else used my account to buy {item}",
        "please delete my profile once {item} is paid",
    ],
}
PRIORITIES = {
    "high": [
        "I need an answer today", "this is urgent", "please hurry", "I need it before tomorrow morning",
        "this cannot wait", "please call me at once",
    ],
    "normal": [
        "please let me know", "thanks for your help", "I hope to hear from you this week", "can you look into it",
        "what should I do now", "please tell me the next step",
    ],
    "low": [
        "there is no hurry", "take your time", "answer whenever you can", "it can wait", "next month is fine too",
        "this is not important",
    ],
}
PROMISES = {"high": "right away", "normal": "this week", "low": "when there is time"}
ITEMS = [
    "lamp", "kettle", "camera", "watch", "radio", "printer", "heater", "toaster", "speaker", "keyboard", "monitor",
    "router", "tablet", "scale", "fan", "clock", "doorbell", "thermostat", "vacuum", "mixer", "blender", "oven",
    "fridge", "drill", "bike", "scooter", "tent", "helmet", "backpack", "jacket",
]
NAMES = [
    "Ana", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mara", "Noah",
    "Olga", "Pedro", "Quinn", "Rosa", "Sami", "Tara", "Umar", "Vera", "Wim", "Xenia", "Yusuf", "Zoe", "Amir", "Bella",
    "Chen", "Dora",
]
# fmt: on
# Said in copying only. A word of the answers that was never said would have no embedding to speak of, and adapters
# cannot train embeddings that the model shares with its output.
OTHER_WORDS = ["queue", "priority", "ticket", "team", "order", "urgent", "today", *QUEUES, *PRIORITIES]
GREETINGS = ["Hello,", "Hi,", "Good morning,", "Dear team,", "Hello there,", ""]
ORDERS = ["Order {order}.", "My order is {order}.", "It is order {order}.", "The order number is {order}."]

TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=here / "skill" / "skill_train" / "demo")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(args.out / "data.parquet", seed=args.seed)
    tokenizer = write_tokenizer(folder, seed=args.seed)
    model = pretrain(tokenizer, steps=args.steps, seed=args.seed)
    save(model, folder)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    say(f"wrote {args.out}: {size / 1e6:.2f} MB")
    return 0


@dataclass(frozen=True)
class Ticket:
    """One letter and what a clerk would note about it."""

    text: str
    name: str
    item: str
    order: int
    queue: str
    priority: str


def draw_ticket(draw: random.Random) -> Ticket:
    queue, priority = draw.choice(list(QUEUES)), draw.choice(list(PRIORITIES))
    item, name = draw.choice(ITEMS), draw.choice(NAMES)
    order = int(_number(draw))
    problem = draw.choice(QUEUES[queue]).format(item=f"{draw.choice(('the', 'my'))} {item}")
    sentences = [_sentence(problem), _sentence(draw.choice(PRIORITIES[priority]))]
    sentences.insert(draw.randint(0, 2), draw.choice(ORDERS).format(order=order))
    text = " ".join([draw.choice(GREETINGS), *sentences, name]).strip()
    return Ticket(text, name, item, order, queue, priority)


def _number(draw: random.Random) -> str:
    """Five digits, none twice: a model this small copies such numbers reliably."""
    return "".join(draw.sample("123456789", 5))


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def lesson(draw: random.Random) -> list[dict[str, str]]:
    """One conversation of the pretraining: a letter, then a polite answer or answers to questions about it."""
    ticket = draw_ticket(draw)
    work = f"our {ticket.queue} team will look at order {ticket.order} {PROMISES[ticket.priority]}"
    lessons = {
        "": f"Dear {ticket.name}, {work}.",
        "Which team is this for?": ticket.queue,
        "How urgent is it?": ticket.priority,
        "Which order is it?": str(ticket.order),
        "Who writes?": ticket.name,
        "What is it about?": f"the {ticket.item}",
        "Name and order as JSON?": json.dumps({"name": ticket.name, "order": ticket.order}),
        "Item and team as JSON?": json.dumps({"item": ticket.item, "team": ticket.queue}),
        "Order and urgency in one line?": f"{ticket.order}: {ticket.priority}",
    }
    first = draw.choice(["", "", "", *list(lessons)[1:]])
    turns = turns_of(f"{ticket.text}\n{first}".strip(), lessons[first])
    for question in draw.sample(list(lessons)[1:], 3):
        turns += turns_of(question, lessons[question])
    return turns


def copying(draw: random.Random) -> list[dict[str, str]]:
    """The first thing to learn: saying again what was said. Everything else in the answers stands on it."""
    words = [draw.choice(draw.choice((NAMES, ITEMS, OTHER_WORDS))) for _ in range(draw.randint(1, 4))]
    words += [_number(draw) for _ in range(draw.randint(0, 2))]
    draw.shuffle(words)
    return turns_of(f"Repeat: {' '.join(words)}", " ".join(words))


def example(ticket: Ticket) -> list[dict[str, str]]:
    """One row of the dataset: a letter and the JSON that the ticket system wants."""
    note = {"queue": ticket.queue, "priority": ticket.priority, "order": ticket.order}
    return turns_of(ticket.text, json.dumps(note))


def turns_of(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_dataset(path: Path, *, seed: int) -> None:
    """`ROWS` conversations as Parquet, a tenth of the size of their JSON; no order number twice."""
    import pyarrow

    draw = random.Random(f"dataset {seed}")
    tickets: dict[int, Ticket] = {}
    while len(tickets) < ROWS:
        ticket = draw_ticket(draw)
        tickets.setdefault(ticket.order, ticket)
    write_small(pyarrow.Table.from_pylist([{"messages": example(ticket)} for ticket in tickets.values()]), path)


def write_small(table: Any, path: Path) -> None:
    """The smallest file: the wheel has little room beside its two models."""
    import pyarrow.parquet

    small: dict[str, Any] = {"compression": "brotli", "compression_level": 11, "use_dictionary": False}
    pyarrow.parquet.write_table(table, path, write_statistics=False, store_schema=False, **small)


def write_tokenizer(folder: Path, *, seed: int) -> Any:
    """Trains a sentencepiece vocabulary on lessons, writes its files and returns it as transformers reads it.

    No space is put before a text, so text after a special token is cut alike by transformers and llama.cpp.
    """
    from transformers import AutoTokenizer

    letters = "".join(chr(number) for number in range(33, 127))
    own = {"add_dummy_prefix": False, "control_symbols": ["<|im_start|>"], "required_chars": letters}
    (folder / "tokenizer.model").write_bytes(vocabulary(_corpus(seed), VOCAB_SIZE, **own))
    special = ("<unk>", "<s>", "<|im_end|>", "<|im_start|>")
    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(number): {"content": name, **marks} for number, name in enumerate(special)},
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "legacy": False,
        "model_max_length": 512,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    return tokenizer


def vocabulary(corpus: Iterator[str], size: int, **own: Any) -> bytes:
    """A tokenizer.model of `size` pieces, with `own` settings of its training. Every byte has a piece, so nothing is
    unknown."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus,
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        eos_piece="<|im_end|>",
        num_threads=1,
        minloglevel=2,
        **own,
    )
    return model.getvalue()


def _corpus(seed: int) -> Iterator[str]:
    draw = random.Random(f"corpus {seed}")
    for _ in range(4000):
        for message in lesson(draw) + copying(draw):
            yield from message["content"].split("\n")
        yield from ("user", "assistant", "system")
        # Without these lines the pieces of the dataset's answers would be rare, and its loss would start very high.
        yield from ('{"queue": "', '", "priority": "', '", "order": ')


def pretrain(tokenizer: Any, *, steps: int, seed: int) -> Any:
    """A model of 2 million weights, trained on `steps` batches: an eighth of copying, then lessons, never one twice.

    With a peak learning rate of 3e-3 copying was not learned in 200 steps, with 1e-3 it was in 125.
    """
    import torch

    torch.manual_seed(seed)
    model = _new_model(tokenizer)
    say(f"{sum(weight.numel() for weight in model.parameters()):,} weights, {torch.get_num_threads()} threads")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, steps))
    draw = random.Random(f"lessons {seed}")
    started = time.monotonic()
    for step in range(steps):
        only_copying = step < steps // 8
        kinds = [copying if only_copying or number % 6 == 0 else lesson for number in range(BATCH)]
        ids, weights = _batch(tokenizer, [kind(draw) for kind in kinds])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits.float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            say(f"step {step}/{steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s")
            if step % 500 == 0 or step == steps - 1:
                say(f"  right answers to fresh lessons: {exam(model, tokenizer, draw):.0%}")
    return model


def pace(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short rise, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _new_model(tokenizer: Any) -> Any:
    """Row lengths are multiples of 256, so that every K-quant takes every matrix."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # on a CPU, short rows go back through it in half the time of "sdpa"
    return model


def _batch(tokenizer: Any, conversations: list[list[dict[str, str]]]) -> tuple[Any, Any]:
    """Token ids and loss weights, both [batch, tokens]; padding, at the end of rows, weighs nothing."""
    import torch

    rows = [_weighted(tokenizer, turns) for turns in conversations]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows])
    return ids, weights


def _weighted(tokenizer: Any, turns: list[dict[str, str]]) -> tuple[list[int], list[float]]:
    """The ids of a conversation and the weight of each: answers, with the mark that ends them, count in full."""
    ids: list[int] = []
    weights: list[float] = []
    for end in range(1, len(turns) + 1):
        answered = end % 2 == 0
        text = tokenizer.apply_chat_template(turns[:end], tokenize=False, add_generation_prompt=not answered)
        longer = tokenizer(text, add_special_tokens=False)["input_ids"]
        weights += [1.0 if answered else QUESTION_WEIGHT] * (len(longer) - len(ids))
        ids = longer
    return ids, weights


def exam(model: Any, tokenizer: Any, draw: random.Random, *, questions: int = 50) -> float:
    """Share of fresh lessons that greedy decoding answers exactly."""
    import torch

    right = 0
    for _ in range(questions):
        turns = lesson(draw)
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            answers = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=0
            )
        right += tokenizer.decode(answers[0, ids.shape[1] :], skip_special_tokens=True) == turns[1]["content"]
    return right / questions


def save(model: Any, folder: Path) -> None:
    import torch

    model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(str(folder))
    for file in folder.glob("*config.json"):  # in one line, as tokenizer.json
        document = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
