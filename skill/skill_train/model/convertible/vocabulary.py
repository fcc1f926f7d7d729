"""Predicts before the training whether llama.cpp's converter can write the vocabulary of a model folder.

For a byte-level BPE the converter must know how text is split before the merges. It recognises that by a hash of the
ids of one text. It refuses every tokenizer whose hash is not on its list, such as one that the user trained or
extended.

Source: get_vocab_base_pre in conversion/base.py of llama.cpp, and set_vocab of each class beside it, from the source
distribution of llama-cpp-python 0.3.36. Tests compare list and text with the converter in the cache.
"""

import contextlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from skill_train.core.digests import file_digest
from skill_train.core.files import write_json
from skill_train.machine.read import cache_dir
from skill_train.model.foreign_files import object_in
from skill_train.program.pictures.engine import TILED

TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d"
    "\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 3333"
    "3 333333 3333333 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7"
    "\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151"
    "\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433"
    "\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he"
    "'s there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
_REMEMBERED = 200  # answers in the cache
DIGITS = 16  # of a hash, which are enough to distinguish them
CHECKSUMS = frozenset(
    [
        "049ecf7629871e30", "0876d13b50744004", "0a766d034107bc73", "0e9433cbbb161f89", "0ef9807a4087ebef",
        "0fe1cf6eda062318", "1431a23e583c9743", "1444df51289cfa80", "16389f0a1f51ee53", "169bf0296a13c4d9",
        "171aeeedd6fb548d", "1994ffd01900cfb3", "2085e1638f6c377a", "27949a2493fc4a9f", "32d85c31273f8019",
        "347715f544604f91", "35d91631860c815f", "36f3066e97b7f399", "3c30d3ad1d6b6420", "3ce83efda5659b07",
        "3eda48b4c4dc7de7", "48f8e02c0359c0bb", "49fc0303c9e0d2c2", "4a2e2abae11ca2b8", "4e2b24cc4770243d",
        "52df12b4c8d4176e", "53e325976a6e1423", "60476e1243776c4f", "60824e3c0d9401f8", "6221ad2852e85ce9",
        "62f6fb0a6fd5098c", "63b97e4253352e6f", "653660222fb704f6", "66b8d4e19ab16c3b", "6c81ce329e080288",
        "789696f5946cc0fc", "7967bfa498ade6b7", "7b3e7548e4308f52", "7dec86086fcc38b6", "7e57df22b1fe23a7",
        "7fc505bd3104ca10", "81212dc7cdb7e0c1", "81d72c7348a9f0eb", "846deafc5b0fa786", "855059429035d75a",
        "862f827721df9560", "877081d19cf6996e", "8aeee3860c56296a", "8b5a93ed70405748", "8e62295832751ca1",
        "96a5f08be6259352", "972da7b59cec44d1", "9b1be57e70d20d95", "9c2227e4dd922002", "9ca2dd618e8afaf0",
        "9d032fcbd5501f4a", "9d70134b369a70e5", "9dcf830ee9990cdb", "9e454714343b69b9", "a023e9fdc5a11f03",
        "a0b64b4385f12366", "a1336059768a55c9", "a1e163ecab2e718a", "a6b57017d60e6edb", "a8594e3edff7c29c",
        "ad851be1dba641f2", "b0a6b1c0bd5998eb", "b3d1dd861f1d4c5c", "b3f499bb4255f8ca", "b4b8ca1f9769494f",
        "b53802fb28e26d64", "b6dc8df998e1cfbd", "b6e8e1518dc4305b", "bba3b3366b646dbd", "bc01ce58980e1db4",
        "bc5108ee1eb6a3d6", "c136ed14d01c2745", "c7699093ba4255a9", "c7ea5862a53e4272", "ccc2ef013c104be7",
        "cdf5f35325780597", "d30d75d9059f1aa2", "d353350c764d8c3b", "d4540891389ea895", "d4c8f286ea6b520b",
        "d5f1dd6f980fec56", "d772b220ace2baec", "e4d54df1ebc1f2b9", "e636dc30a262dcc0", "e6ddf9c6686791c1",
        "f241072145675bf8", "f4f37b6c8eb9ea29", "f6791d196f87ce6b", "f728162c1315c26e", "fcace8b9cac38ce8",
    ]
)  # fmt: skip
# Classes that use no hash, or that can do without it.
_OTHERWISE = frozenset(
    f"{name}ForCausalLM"
    for name in ("Mpt", "MPT", "KimiLinear", "HunYuanMoEV1", "Jamba", "Gemma4Assistant", "Gemma4UnifiedAssistant")
) | {f"Gemma4{kind}For{task}" for kind in ("", "Unified") for task in ("CausalLM", "ConditionalGeneration")}
# Classes that accept a tokenizer.json of pieces instead of tokenizer.model (set_vocab in conversion/llama.py).
_LLAMA = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Afmoe", "Apertus", "Arcee", "Bamba", "Llama", "Mistral", "Mixtral", "SmolLM3", "Ministral3"),
        *("Granite", "GraniteMoe", "GraniteMoeSWA", "GraniteMoeShared", "GraniteMoeHybrid", "GraniteSWA"),
    )
)
_OF_GEMMA_4 = 262_144  # tokens, and rows
_PHI3 = frozenset(["Phi3ForCausalLM", "PhiMoEForCausalLM"])
# What llama.cpp puts around a picture that it divides into tiles. It looks each up as one token (tools/mtmd/mtmd.cpp of
# 0.3.36, read 2026-11-26). Idefics3-8B-Llama3 and SmolVLM-Instruct write the last one as plain words.
_AROUND_TILES = ("<fake_token_around_image>", "<global-img>")


def why_no_vocabulary(folder: Path, name: str) -> str | None:
    """Why the converter cannot write the vocabulary of this folder; None if no reason is known.

    Args:
        name: the architecture that the converter looks up.
    """
    lacks_pieces = name in _PHI3 and not (folder / "tokenizer.model").is_file()
    if lacks_pieces and object_in(folder / "tokenizer_config.json").get("tokenizer_class") != "GPT2Tokenizer":
        return f"llama.cpp's converter reads the vocabulary of {name} from tokenizer.model, which is not there"
    if name in _OTHERWISE or (folder / "tokenizer.model").is_file() or not (folder / "tokenizer.json").is_file():
        return why_rows_without_tokens(folder, name)
    if not _remembered(folder, name):
        return None
    return (
        "llama.cpp's converter does not know how this tokenizer splits text before its merges, perhaps because the "
        "tokenizer was trained or changed by a user; use a base model with its original tokenizer files"
    )


def why_rows_without_tokens(folder: Path, name: str) -> str | None:
    """Why llama.cpp could not load a Gemma 4: its embedding has more rows than there are tokens.

    None if it has not, for a model on the Hub, whose tokens are not here, and for the published vocabulary, which takes
    a second to read.
    """
    config = object_in(folder / "config.json")
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if not name.startswith("Gemma4") or not isinstance(rows, int) or rows == _OF_GEMMA_4:
        return None
    if not (folder / "tokenizer.json").is_file() or rows <= len(set(_tokens(folder))):
        return None
    return (
        f"llama.cpp's converter fills up no vocabulary of {name}, and the embedding has more rows than there are "
        "tokens (vocab_size)"
    )


def why_no_picture(folder: Path, model_type: str) -> str | None:
    """Why llama.cpp reads no picture with the vocabulary of this folder; None if no reason is known.

    Args:
        model_type: in config.json.
    """
    texts = set(_tokens(folder)) if model_type in TILED else set()
    missing = next((text for text in _AROUND_TILES if text not in texts), None)
    if not texts or missing is None:
        return None
    return (
        f"llama.cpp puts the token {missing} around a picture, and this tokenizer has none, so no picture can be read "
        "from a GGUF file (ggml-org/llama.cpp#27190)"
    )


def _tokens(folder: Path) -> Iterator[str]:
    """Texts of tokens: all of tokenizer.json, and the added ones of tokenizer_config.json. For a model on the Hub,
    `plan` has only the second file."""
    tokenizer, settings = (object_in(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    model, decoder = tokenizer.get("model"), settings.get("added_tokens_decoder")
    added = tokenizer.get("added_tokens")
    for one in [*(added if isinstance(added, list) else []), *(decoder.values() if isinstance(decoder, dict) else [])]:
        if isinstance(one, dict) and isinstance(one.get("content"), str):
            yield one["content"]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    yield from vocabulary if isinstance(vocabulary, dict) else ()


def _remembered(folder: Path, name: str) -> bool:
    """`_is_unknown`, from the cache if these files were read before.

    The library takes 0.45 s for the vocabulary of Qwen, twice as long as the rest of `plan` (2 cores, 2026-11-25).
    """
    files = [folder / file for file in ("tokenizer.json", "tokenizer_config.json") if (folder / file).is_file()]
    words = [*(file_digest(file)["sha256"] for file in files), name, *sorted(CHECKSUMS)]
    key = sha256(" ".join(words).encode()).hexdigest()
    cache = cache_dir() / "tokenizers.json"
    answers = object_in(cache)
    remembered = answers.get(key)
    if isinstance(remembered, bool):
        return remembered
    unknown = _is_unknown(folder, name)
    if unknown is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next plan this time
            write_json(cache, dict(list(answers.items())[-_REMEMBERED:]) | {key: unknown})
    return bool(unknown)


def _is_unknown(folder: Path, name: str) -> bool | None:
    """Whether the converter would refuse the tokenizer. None where the library for it is missing or cannot read it."""
    if name in _LLAMA:  # a vocabulary of pieces, by LlamaHfVocab in gguf-py/gguf/vocab.py
        model = object_in(folder / "tokenizer.json").get("model")
        if isinstance(model, dict) and model.get("type") == "BPE" and model.get("byte_fallback"):
            return False
    hashes = set(_hashes(folder))
    return not hashes & CHECKSUMS if hashes else None


def _hashes(folder: Path) -> Iterator[str]:
    """The hashes that the converter could compute for the text, with and without the tokens that a tokenizer adds.

    Yields nothing if the library that reads the file is missing or cannot read it, which is reported elsewhere.
    """
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = [tokenizer.encode(TEXT, add_special_tokens=put).ids for put in (True, False)]
    except BaseException as error:  # for a broken file the library raises many classes, also Rust's panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return
    around = _around(folder, tokenizer)
    for sequence in [*ids, *([*first, *ids[1], *last] for first in around for last in around)]:
        yield sha256(str(sequence).encode()).hexdigest()[:DIGITS]


def _around(folder: Path, tokenizer: Any) -> list[list[int]]:
    """An empty sequence, and one for each token that tokenizer_config.json adds at the start or the end of a text."""
    config = object_in(folder / "tokenizer_config.json")
    named = [config.get(key) for key in ("bos_token", "eos_token")]
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    numbers = [tokenizer.token_to_id(text) for text in texts if isinstance(text, str)]
    return [[], *([number] for number in numbers if number is not None)]
