"""Real tokenizers for tiny models: rebuilt from the vocabulary files that llama.cpp ships, or trained on a short text.

The files are written as current models publish them (tokenizer.json, tokenizer_config.json, tokenizer.model), because
merging copies them byte for byte and llama.cpp's converter reads them.
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import tiny_templates

# The patterns that these families split text with before byte-pair merging (llama.cpp: src/llama-vocab.cpp).
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_QWEN = _CONTRACTIONS + _WORDS % r"\p{N}"
_LLAMA_3 = _CONTRACTIONS + _WORDS % r"\p{N}{1,3}"

# Qwen's own added tokens, in the order of their ids from 151643. The last two lists are not "special": they are text.
_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
_QWEN_SPECIAL += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"]
_QWEN_SPECIAL += ["<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_TEXT = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"]
_QWEN_TEXT += ["<|repo_name|>", "<|file_sep|>"]
_QWEN3_TEXT = ["<tool_response>", "</tool_response>", "<think>", "</think>"]

_GEMMA_4_SPECIAL = ["<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
_GEMMA_4_SPECIAL += ['<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|audio>"]
_GEMMA_4_SPECIAL += ["<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"]

_GEMMA_TEXT = """The farmer walked to the market with seven red apples and a basket of bread. Nobody knew what time it
was, but the clock on the tower said half past ten. "How much is the fish?" she asked. "Four coins," said the man, "or
three if you take two." In winter the river freezes and children skate on it; in summer boats go up and down all day.
Numbers such as 12, 345 and 6789 appear in letters, bills and reports. A program reads a line, counts the words, and
writes the answer: def count(line): return len(line.split()). Questions end with a question mark, don't they? The user
asks and the model answers. Paris is the capital of France, Rome of Italy, Madrid of Spain, and Berlin of Germany.
What is the colour of the sky, and how many legs has a spider? Blue. Eight. Green tea is good when it is hot outside."""

_CONFIG = {"clean_up_tokenization_spaces": False, "model_max_length": 2048}


def write_qwen(folder: Path, vocab_folder: Path, *, thinking: bool, template: str | None = None) -> dict[str, Any]:
    """Qwen2's byte-level vocabulary. With `thinking`, the extra tokens and the template of Qwen3.

    Like all writers here it returns what config.json needs: vocab_size, the ids of bos, eos and pad, and all stops.
    """
    texts = _QWEN_TEXT + (_QWEN3_TEXT if thinking else [])
    added = [(name, True) for name in _QWEN_SPECIAL] + [(name, False) for name in texts]
    backend = _byte_level(vocab_folder / "ggml-vocab-qwen2.gguf", words=151643, pattern=_QWEN, added=added)
    _write(
        folder,
        backend,
        template or (tiny_templates.QWEN3 if thinking else tiny_templates.QWEN2),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "split_special_tokens": False,
        },
    )
    return {"vocab_size": 151936, "bos": 151643, "eos": 151645, "pad": 151643, "stop": [151645, 151643]}


def write_llama_bpe(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """Llama 3's byte-level vocabulary; `<|begin_of_text|>` is put before every text."""
    from tokenizers import processors

    path = vocab_folder / "ggml-vocab-llama-bpe.gguf"
    added = [(name, True) for name in _strings(path, "tokenizer.ggml.tokens")[128000:]]
    backend = _byte_level(path, words=128000, pattern=_LLAMA_3, added=added, ignore_merges=True)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            _bos_processor(("<|begin_of_text|>", 128000)),
        ]
    )
    _write(
        folder,
        backend,
        tiny_templates.LLAMA_3,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|reserved_special_token_2|>",
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )
    return {"vocab_size": 128256, "bos": 128000, "eos": 128009, "pad": 128004, "stop": [128001, 128008, 128009]}


def write_gpt2(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """GPT-2's byte-level vocabulary, with no chat template."""
    path = vocab_folder / "ggml-vocab-gpt-2.gguf"
    backend = _byte_level(path, words=50256, pattern=None, added=[("<|endoftext|>", True)])
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _write(folder, backend, None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **end})
    return {"vocab_size": 50257, "bos": 50256, "eos": 50256, "pad": None, "stop": [50256]}


def write_chatml(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """GPT-2's byte-level vocabulary with the turns of ChatML, as SmolLM2 has them: a third of Qwen's tokens."""
    path = vocab_folder / "ggml-vocab-gpt-2.gguf"
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = _byte_level(path, words=50256, pattern=None, added=[(name, True) for name in names])
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    _write(folder, backend, tiny_templates.QWEN2, config)
    return {"vocab_size": 50304, "bos": 50256, "eos": 50258, "pad": 50256, "stop": [50258, 50256]}


def write_qwen_pictures(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """GPT-2's byte-level vocabulary with Qwen's own added tokens: a third of Qwen's tokens."""
    path = vocab_folder / "ggml-vocab-gpt-2.gguf"
    added = [(name, True) for name in _QWEN_SPECIAL] + [(name, False) for name in _QWEN_TEXT]
    backend = _byte_level(path, words=50256, pattern=None, added=added)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    _write(folder, backend, tiny_templates.QWEN_VL, config)
    number = {name: 50256 + index for index, (name, _) in enumerate(added)}
    places = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    end, stop = number["<|endoftext|>"], number["<|im_end|>"]
    ids = {f"{place}_token_id": number[f"<|{name}|>"] for place, name in places.items()}
    return {"vocab_size": 50304, "bos": end, "eos": stop, "pad": end, "stop": [stop, end], "picture": ids}


def write_smolvlm(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """GPT-2's byte-level vocabulary with the added tokens of SmolVLM: turns, pictures and the places of their parts."""
    path = vocab_folder / "ggml-vocab-gpt-2.gguf"
    parts = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    pictures = ["<fake_token_around_image>", "<image>", "<global-img>", *parts]
    names = ["<|endoftext|>", "<|im_start|>", "<end_of_utterance>", *pictures]
    backend = _byte_level(path, words=50256, pattern=None, added=[(name, True) for name in names])
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<end_of_utterance>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    _write(folder, backend, tiny_templates.SMOLVLM, config)
    number = {name: 50256 + index for index, name in enumerate(names)}
    stop = number["<end_of_utterance>"]
    ids = {"bos": number["<|im_start|>"], "eos": stop, "pad": number["<|endoftext|>"], "stop": [stop]}
    return {"vocab_size": 50304, "image": number["<image>"], **ids}


def write_mistral3(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """GPT-2's byte-level vocabulary with the added tokens of Mistral 3, whose own is byte-level too."""
    path = vocab_folder / "ggml-vocab-gpt-2.gguf"
    names = ["<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    names += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    backend = _byte_level(path, words=50256, pattern=None, added=[(name, True) for name in names])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": "<pad>",
    }
    _write(folder, backend, tiny_templates.MISTRAL_PICTURES, config)
    return {"vocab_size": 50304, "image": 50263, "bos": 50256, "eos": 50257, "pad": 50258, "stop": [50257]}


def write_llama_spm(folder: Path, vocab_folder: Path, *, template: str) -> dict[str, Any]:
    """Llama 2's 32000 sentencepiece pieces: `tokenizer.model` rebuilt from the GGUF's tokens and scores."""
    backend = _llama_pieces(folder, vocab_folder)
    backend.post_processor = _bos_processor(("<s>", 1))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
    }
    _write(folder, backend, template, config)
    return {"vocab_size": 32000, "bos": 1, "eos": 2, "pad": None, "stop": [2]}


def write_phi3(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """Phi-3: Llama 2's pieces, then eleven added tokens that swallow white space; the embedding has 53 rows more."""
    from tokenizers import AddedToken

    names = _strings(vocab_folder / "ggml-vocab-phi-3.gguf", "tokenizer.ggml.tokens")[32000:32011]
    backend = _llama_pieces(folder, vocab_folder, swallow="</s>")
    backend.add_special_tokens([AddedToken(names[0], special=True, normalized=False)])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False, rstrip=True) for name in names[1:]])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
    }
    _write(folder, backend, tiny_templates.PHI_3, config)
    return {"vocab_size": 32064, "bos": 1, "eos": 32000, "pad": 32000, "stop": [32000, 32001, 32007]}


def write_gemma(folder: Path, *, pictures: bool = False) -> dict[str, Any]:
    """A small sentencepiece vocabulary with Gemma's shape: no space before the first word, bytes, turn marks. With
    `pictures` also the three tokens around and in place of a picture."""
    around = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"] if pictures else []
    (folder / "tokenizer.model").write_bytes(_train_gemma(around))
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "chat_template": tiny_templates.GEMMA_PICTURES if pictures else tiny_templates.GEMMA,
    }
    if pictures:
        names = ("boi_token", "eoi_token", "image_token")
        config["extra_special_tokens"] = dict(zip(names, around, strict=True))
    added = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>"}
    added |= {5: "<start_of_turn>", 6: "<end_of_turn>", **dict(enumerate(around, start=7))}
    _write_sentencepiece(folder, config, added)
    return {"vocab_size": 640, "bos": 2, "eos": 1, "pad": 0, "stop": [1, 6]}


def write_gemma4(folder: Path, vocab_folder: Path) -> dict[str, Any]:
    """The first pieces of Gemma 4's vocabulary, with its special tokens and the signs of ASCII: no tokenizer.model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    path = vocab_folder / "ggml-vocab-gemma-4.gguf"
    types = _field(path, "tokenizer.ggml.token_type")
    tokens = [
        token
        for number, token in enumerate(_strings(path, "tokenizer.ggml.tokens"))
        if number < 2000 or types[number] in (3, 4) or (len(token) == 1 and (token.isascii() or token == "▁"))
    ]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = (_pair(merge, vocab) for merge in _strings(path, "tokenizer.ggml.merges"))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[pair for pair in pairs if pair], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = _bos_processor(("<bos>", 2))
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in named.values()])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _GEMMA_4_SPECIAL])
    extra = {f"extra{number}_token": text for number, text in enumerate(_GEMMA_4_SPECIAL)}
    config = {"tokenizer_class": "GemmaTokenizer", **named, "extra_special_tokens": extra}
    _write(folder, backend, tiny_templates.GEMMA_4, config)
    return {"vocab_size": len(tokens), "bos": 2, "eos": 1, "pad": 0, "stop": [1, vocab["<turn|>"]]}


def _pair(merge: str, vocab: dict[str, int]) -> tuple[str, str] | None:
    """The two parts of a merge, if they and the whole are in the vocabulary."""
    left, right = merge.split(" ")
    return (left, right) if {left, right, left + right} <= vocab.keys() else None


def _byte_level(
    path: Path, *, words: int, pattern: str | None, added: list[tuple[str, bool]], ignore_merges: bool = False
) -> Any:
    """A byte-level BPE tokenizer from the first `words` tokens and all merges of a vocabulary file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {token: number for number, token in enumerate(_strings(path, "tokenizer.ggml.tokens")[:words])}
    merges = [tuple(pair.split(" ")) for pair in _strings(path, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pattern == _QWEN:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in added])
    return backend


def _bos_processor(bos: tuple[str, int]) -> Any:
    from tokenizers import processors

    name = bos[0]
    return processors.TemplateProcessing(single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[bos])


def _write(folder: Path, backend: Any, template: str | None, config: dict[str, Any]) -> None:
    backend.save(str(folder / "tokenizer.json"))
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    document = {"added_tokens_decoder": decoder, **_CONFIG, **config}
    if template is not None:
        document["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", document)


def _write_sentencepiece(folder: Path, config: dict[str, Any], special: dict[int, str]) -> None:
    """tokenizer_config.json, then the tokenizer.json that transformers derives from tokenizer.model: hubs hold both."""
    from transformers import AutoTokenizer

    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(number): {"content": name, **marks} for number, name in special.items()}
    _write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, **_CONFIG, **config})
    AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.save(str(folder / "tokenizer.json"))


def _llama_pieces(folder: Path, vocab_folder: Path, *, swallow: str | None = None) -> Any:
    """Writes Llama 2's tokenizer.model and returns the same as a fast tokenizer.

    Not transformers' own LlamaTokenizer: in 5.23 it orders the merges by id and not by score, and puts no space before
    text that follows a special token, so `    return` and `<s>[INST]` get other tokens than in llama.cpp.
    The token named in `swallow` takes the white space after it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    path = vocab_folder / "ggml-vocab-llama-spm.gguf"
    tokens, scores = _strings(path, "tokenizer.ggml.tokens"), _field(path, "tokenizer.ggml.scores")
    types = _field(path, "tokenizer.ggml.token_type")
    (folder / "tokenizer.model").write_bytes(_sentencepiece_model(tokens, scores, types))
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, rstrip=name == swallow) for name in tokens[:3]]
    )
    return backend


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first: sentencepiece's rule as a merge list."""
    found = []
    for piece, number in vocab.items():
        parts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in parts if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(-scores[number], -len(left), -len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _sentencepiece_model(tokens: list[str], scores: list[float], types: list[int]) -> bytes:
    """A sentencepiece model file. GGUF's token types are sentencepiece's own numbers."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(tokens)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    return bytes(model.SerializeToString())


def _train_gemma(around: list[str]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_GEMMA_TEXT.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        control_symbols=["<mask>", "<start_of_turn>", "<end_of_turn>", *around],
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# GGUF metadata, read here because the gguf package needs ten seconds for a large vocabulary.
_SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _strings(path: Path, key: str) -> list[str]:
    return [text.decode("utf-8") for text in _field(path, key)]


def _field(path: Path, key: str) -> Any:
    """The value of one metadata key."""
    data = path.read_bytes()
    count, at = struct.unpack_from("<Q", data, 16)[0], 24
    for _ in range(count):
        name, at = _read(data, at, 8)
        kind = struct.unpack_from("<I", data, at)[0]
        value, at = _read(data, at + 4, kind)
        if name.decode() == key:
            return value
    raise KeyError(key)


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value of GGUF type `kind` and the position after it. 8 is a string, 9 an array."""
    if kind == 8:
        end = at + 8 + struct.unpack_from("<Q", data, at)[0]
        return data[at + 8 : end], end
    if kind == 9:
        inner, count = struct.unpack_from("<IQ", data, at)
        at, values = at + 12, []
        for _ in range(count):
            value, at = _read(data, at, inner)
            values.append(value)
        return values, at
    code = "<" + _SIZES[kind]
    return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)
