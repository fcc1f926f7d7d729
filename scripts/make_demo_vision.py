# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9,<2.16", "transformers>=5.23,<6", "sentencepiece>=0.2", "protobuf>=5", "pillow", "pyarrow"]
# ///
"""Makes the model and the dataset of `skill-train demo --method vision`, from nothing but this file and make_demo.py.

    python scripts/make_demo_vision.py [--out skill/skill_train/demo/vision] [--steps 300] [--seed 0]

The model is a small Qwen2-VL that is trained here, from random weights, to look at a square and to answer one question
at a time: which colour it has, how large it is, on which ground it lies. What it never saw is the dataset's question,
which wants all three at once:

    Describe the picture.
    It is large red on black

So before a fine-tune no answer is right. There are 36 answers, and no picture is in the dataset twice: a held-out row
can neither be guessed nor known by heart. Shapes other than squares were not learned in 800 steps.

Writes model/ (bf16 weights, sentencepiece tokenizer, chat template, image processor) and data.parquet with the bytes of
its pictures. On another machine the same seed gives other weights of the same ability: sums of floats depend on the
processor.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_demo import pace, save, say, turns_of, vocabulary, write_small

VOCAB_SIZE = 384
ROWS = 400
BATCH = 32
SMOOTHING = 0.1  # of the labels: without it logits grow so large that f16 shows
SIDE = 84  # pixels: three times 28, so nobody resizes it; nine tokens, and llama.cpp wants eight of a picture at least
HIDDEN = 256

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 40, 190),
    "orange": (250, 140, 20),
}
GROUNDS = {"white": (240, 240, 240), "grey": (125, 125, 125), "black": (15, 15, 15)}
SIZES = {"small": (14, 20), "large": (34, 44)}  # of the square's side in pixels
QUESTION = "Describe the picture."
PLACES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<unk>", "<s>", "<|im_end|>", "<|im_start|>", *PLACES)

TEMPLATE = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- else -%}{%- for part in content -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + parts(message['content']) + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=here / "skill" / "skill_train" / "demo" / "vision")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(args.out / "data.parquet", seed=args.seed)
    tokenizer = write_tokenizer(folder, seed=args.seed)
    processor = write_processor(folder)
    model = pretrain(tokenizer, processor, steps=args.steps, seed=args.seed)
    save(model, folder)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    say(f"wrote {args.out}: {size / 1e6:.2f} MB")
    return 0


@dataclass(frozen=True)
class Scene:
    """What a picture shows: one square, anywhere on its ground."""

    colour: str
    ground: str
    size: str
    pixels: int
    x: int
    y: int


def draw_scene(draw: random.Random) -> Scene:
    size = draw.choice(list(SIZES))
    pixels = draw.randint(*SIZES[size])
    x, y = draw.randint(0, SIDE - pixels), draw.randint(0, SIDE - pixels)
    return Scene(draw.choice(list(COLOURS)), draw.choice(list(GROUNDS)), size, pixels, x, y)


def picture(scene: Scene) -> Any:
    """The scene as a Pillow image."""
    from PIL import Image

    image = Image.new("RGB", (SIDE, SIDE), GROUNDS[scene.ground])
    square = (scene.x, scene.y, scene.x + scene.pixels, scene.y + scene.pixels)
    image.paste(COLOURS[scene.colour], square)
    return image


def lesson(draw: random.Random, scene: Scene) -> list[dict[str, str]]:
    """One conversation of the pretraining: three of the questions, in any order.

    The answers say every word of the dataset's: adapters cannot train embeddings that the model shares with its output.
    """
    answers = {
        "Which colour is the square?": f"It is {scene.colour}",
        "Is it large or small?": f"It is {scene.size}",
        "Which size and colour?": f"It is {scene.size} {scene.colour}",
        "Where is it?": f"It is on {scene.ground}",
    }
    turns: list[dict[str, str]] = []
    for question in draw.sample(list(answers), 3):
        turns += turns_of(question, answers[question])
    return turns


def example(scene: Scene) -> list[dict[str, str]]:
    """The turns of one row of the dataset."""
    return turns_of(QUESTION, f"It is {scene.size} {scene.colour} on {scene.ground}")


def write_dataset(path: Path, *, seed: int) -> None:
    """`ROWS` conversations about one picture each, with its bytes; no picture twice."""
    import pyarrow

    draw = random.Random(f"dataset {seed}")
    scenes: dict[bytes, Scene] = {}
    while len(scenes) < ROWS:
        scene = draw_scene(draw)
        scenes.setdefault(picture(scene).tobytes(), scene)
    rows = [{"images": [{"bytes": _png(scene), "path": None}], "messages": example(scene)} for scene in scenes.values()]
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    schema = pyarrow.schema([("images", pyarrow.list_(image)), ("messages", pyarrow.list_(message))])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_small(pyarrow.Table.from_pylist(rows, schema=schema), path)


def _png(scene: Scene) -> bytes:
    """A picture that is not packed: the rows are packed together, which makes two thirds of the size."""
    file = io.BytesIO()
    picture(scene).save(file, "PNG", compress_level=0)
    return file.getvalue()


def write_tokenizer(folder: Path, *, seed: int) -> Any:
    """Trains a sentencepiece vocabulary on lessons, writes its files and returns it as transformers reads it.

    llama.cpp's converter takes sentencepiece for a Qwen2-VL, and knows no byte-level vocabulary as small as this. It
    cannot be told to put no space before a text there, so the tokenizer puts one too, also after a special token.
    """
    from sentencepiece import sentencepiece_model_pb2
    from transformers import AutoTokenizer

    model = vocabulary(_corpus(seed), VOCAB_SIZE, control_symbols=list(SPECIAL[3:]))
    (folder / "tokenizer.model").write_bytes(model)
    pieces = sentencepiece_model_pb2.ModelProto.FromString(model).pieces
    _as_transformers_reads_it([piece.piece for piece in pieces]).save(str(folder / "tokenizer.json"), pretty=False)
    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(number): {"content": name, **marks} for number, name in enumerate(SPECIAL)},
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, separators=(",", ":")) + "\n", encoding="utf-8")
    return AutoTokenizer.from_pretrained(str(folder))


def _as_transformers_reads_it(pieces: list[str]) -> Any:
    """The same vocabulary for the tokenizers library. A piece with a lower number is merged first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _corpus(seed: int) -> Iterator[str]:
    draw = random.Random(f"corpus {seed}")
    for _ in range(1000):
        scene = draw_scene(draw)
        for message in lesson(draw, scene) + example(scene):
            yield message["content"]
        yield from ("user", "assistant", "system")


def write_processor(folder: Path) -> Any:
    """preprocessor_config.json, and the image processor that it describes."""
    from transformers import AutoImageProcessor

    document = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_pixels": 64 * 28 * 28,
        "merge_size": 2,
        "min_pixels": 8 * 28 * 28,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    return AutoImageProcessor.from_pretrained(str(folder), backend="pil")


def pretrain(tokenizer: Any, processor: Any, *, steps: int, seed: int) -> Any:
    """A model of 600,000 weights, trained on `steps` batches of lessons about pictures."""
    import torch

    torch.set_num_threads(1)  # its matrices are small: a second thread waits more than it works
    torch.manual_seed(seed)
    model = _new_model(tokenizer)
    say(f"{sum(weight.numel() for weight in model.parameters()):,} weights")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, steps))
    draw = random.Random(f"lessons {seed}")
    started = time.monotonic()
    for step in range(steps):
        scenes = [draw_scene(draw) for _ in range(BATCH)]
        inputs, trained = _batch(tokenizer, processor, scenes, [lesson(draw, scene) for scene in scenes])
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, trained[:, 1:].flatten(), label_smoothing=SMOOTHING)
        (loss + _certainty(model)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == trained[:, 1:].flatten())[trained[:, 1:].flatten() >= 0]
            seconds = time.monotonic() - started
            say(
                f"step {step}/{steps}  loss {loss.item():.3f}  right tokens {right.float().mean():.1%}  {seconds:.0f} s"
            )
    return model


def _certainty(model: Any) -> Any:
    """The loss on random words, of which nothing follows: every token is as likely. A model that is certain where it
    knows nothing has large logits there, and `verify` asks about texts that it never read."""
    import torch

    words = torch.randint(len(SPECIAL), VOCAB_SIZE, (8, 32))
    return -model(input_ids=words).logits.log_softmax(-1).mean()


def _new_model(tokenizer: Any) -> Any:
    """One layer of language model: its row lengths are 256, so that every K-quant takes every matrix of it. The tower
    and the projector stay in f16, and are narrow."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    number = tokenizer.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,  # as the published ones: llama.cpp computes with 0 (references/verification.md)
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.update(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    return model


def _batch(tokenizer: Any, processor: Any, scenes: list[Scene], lessons: list[Any]) -> tuple[dict[str, Any], Any]:
    """Inputs of the model, and the ids that are trained, -100 elsewhere; both padded at the end of rows."""
    import torch

    rows = [_ids(tokenizer, turns) for turns in lessons]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    trained = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    read = processor(images=[picture(scene) for scene in scenes], return_tensors="pt")
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    return inputs | {name: read[name] for name in ("pixel_values", "image_grid_thw")}, trained


def _ids(tokenizer: Any, turns: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids of a conversation about a picture; and the same where an answer, or the mark that ends it, stands."""
    ids: list[int] = []
    labels: list[int] = []
    parts = [{"type": "image"}, {"type": "text", "text": turns[0]["content"]}]
    messages = [turns[0] | {"content": parts}, *turns[1:]]
    tokens = (SIDE // 28) ** 2
    for end in range(1, len(messages) + 1):
        answered = end % 2 == 0
        text = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=not answered)
        longer = tokenizer(text.replace("<|image_pad|>", tokens * "<|image_pad|>"), add_special_tokens=False)
        new = longer["input_ids"][len(ids) :]
        labels += new if answered else [-100] * len(new)
        ids = longer["input_ids"]
    return ids, labels


if __name__ == "__main__":
    sys.exit(main())
