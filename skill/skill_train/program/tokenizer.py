"""The model's tokenizer, read so that llama.cpp gives the same ids."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from skill_train.program.events import Refused, readable
from skill_train.program.model_files import JsonObject, check_files, model_file
from skill_train.program.pictures.tokens import model_document

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
# The fields of a tokenizer.json that decide which ids a text gets: of its model, and of each added token.
FLAGS = ("byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix", "fuse_unk", "ignore_merges")
MARKS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
PROBES = ("    two  words", " word", "1234 don't\n\n x", "<s>[INST] hi [/INST]", "<s>hi", "é🙂 你好")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer. Without one, transformers makes an empty one of the model's type."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def load_tokenizer(model: str, revision: str | None) -> Any:
    """The model's own tokenizer, with its chat template. Its attribute `ends` holds the ids at which answers end."""
    check_files(Path(model))
    if Path(model).is_dir() and not has_tokenizer(Path(model)):
        raise no_tokenizer(model, f"one of {', '.join(TOKENIZERS)} in the model folder", "none of them")
    with readable(model):
        tokenizer = read_tokenizer(model, revision)
    special = {*tokenizer.all_special_tokens}
    if len(tokenizer) <= len(special) and {*tokenizer.get_vocab()} <= special:  # listing a large one takes 0.1 s
        raise no_tokenizer(model, "a vocabulary", f"{len(tokenizer)} special tokens and nothing else")
    require_one_vocabulary(model, revision, tokenizer)
    if not tokenizer.chat_template:  # older processors kept it in a file that llama.cpp's converter reads too
        template = (model_document(model, revision, "chat_template.json") or {}).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    names = ("generation_config.json", "config.json")  # transformers reads the second without the first
    documents = (model_document(model, revision, name) for name in names)
    stated = next((document for document in documents if document), {}).get("eos_token_id")
    tokenizer.ends = set(stated) if isinstance(stated, list) else {stated, tokenizer.eos_token_id}
    tokenizer.unlisted_ends = frozenset()  # other ids at which rows end, added as the rows are encoded
    tokenizer.day = date.today()  # for templates that write the date; `main` sets that of an earlier start
    return tokenizer


def set_date(tokenizer: Any, written: Callable[[str], str]) -> None:
    """Makes `strftime_now` of the chat template call `written`, which gets the format of the time. transformers (5.23)
    gives a template the present time, and accepts no function of the caller."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokenizer.chat_template
    if isinstance(template, str) and "strftime_now" in template:
        _compile_jinja_template(template).environment.globals["strftime_now"] = written


def require_one_vocabulary(model: str, revision: str | None, tokenizer: Any) -> None:
    """Refuses a tokenizer.model with another vocabulary than the tokenizer.json beside it, which training uses. For
    most families that have both, llama.cpp's converter reads tokenizer.model."""
    pieces = model_file(model, revision, "tokenizer.model")
    if pieces is None or model_file(model, revision, "tokenizer.json") is None:
        return
    try:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=pieces)
    except (ImportError, RuntimeError):
        return  # the file is not of sentencepiece, with which the converter reads it; or sentencepiece is not here
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    marks = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
    for number in range(processor.get_piece_size()):
        piece = processor.id_to_piece(number)
        if vocabulary.get(piece) != number and number not in added and not any(is_mark(number) for is_mark in marks):
            raise Refused(
                f"tokenizer.model and tokenizer.json of {model} have different vocabularies",
                code="bad_tokenizer",
                expected="one vocabulary: training uses tokenizer.json, llama.cpp's converter tokenizer.model",
                got=f"{piece!r} is {number} in tokenizer.model and {vocabulary.get(piece)} in tokenizer.json",
                hint="restore the published files of the model, or remove the file that does not belong to it",
            )


def read_tokenizer(model: str, revision: str | None) -> Any:
    """The tokenizer with the ids of llama.cpp.

    llama.cpp makes the ids of tokenizer.json, whatever class tokenizer_config.json names (measured for each class of
    transformers 5.23 that a decoder uses). Classes such as LlamaTokenizer take the vocabulary of that file, and split
    text in a way of their own. If the two disagree, `tokenizer.read_as` says so.
    """
    # Not transformers.AutoTokenizer: skill-train puts its own class there for llama.cpp's converter.
    from transformers.models.auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    published = model_file(model, revision, "tokenizer.json")
    pieces = model_file(model, revision, "tokenizer.model") if published is None else None
    if pieces is not None:
        return by_scores(tokenizer, pieces)
    # TokenizersBackend uses tokenizer.json unchanged. Other fast classes build it anew.
    if published is not None and tokenizer.is_fast and type(tokenizer).__name__ != "TokenizersBackend":
        tokenizer = as_published(tokenizer, published, model, revision)
    return with_prefix_of_llama_cpp(tokenizer)


def by_scores(tokenizer: Any, file: str) -> Any:
    """The tokenizer of a model that has only a tokenizer.model, as llama.cpp reads that file: it joins pieces by their
    scores, and puts a space before the text if the file says so. transformers 5.23 joins them by their ids, and decides
    about the space by the class."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import decoders, models, normalizers

    model_proto = sentencepiece_model_pb2.ModelProto.FromString(Path(file).read_bytes())
    if not tokenizer.is_fast or model_proto.trainer_spec.model_type != model_proto.trainer_spec.BPE:
        return tokenizer
    before = {text: ids_of(tokenizer, text) for text in PROBES}
    vocab = {piece.piece: number for number, piece in enumerate(model_proto.pieces)}
    unknown = next((piece.piece for piece in model_proto.pieces if piece.type == piece.UNKNOWN), None)
    bytes_too = any(piece.type == piece.BYTE for piece in model_proto.pieces)
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE(
        vocab=vocab, merges=merges_of(model_proto, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too
    )
    space = model_proto.normalizer_spec.add_dummy_prefix
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(steps if space else steps[1:]), None
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(joined if space else joined[:-1])
    differing = next((text for text, ids in before.items() if ids_of(tokenizer, text) != ids), None)
    if differing is not None:
        tokenizer.read_as = (
            f"the tokenizer is read from tokenizer.model by the scores of its pieces, which is how llama.cpp reads it: "
            f"transformers' {type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return tokenizer


def merges_of(model_proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first."""
    merges = []
    for piece in model_proto.pieces:
        if piece.type == piece.NORMAL:
            parts = ((piece.piece[:cut], piece.piece[cut:]) for cut in range(1, len(piece.piece)))
            merges += [(-piece.score, left, right) for left, right in parts if left in vocab and right in vocab]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def as_published(tokenizer: Any, file: str, model: str, revision: str | None) -> Any:
    """The tokenizer itself if it does all that its tokenizer.json says, or else the tokenizer of that file."""
    from transformers import PreTrainedTokenizerFast

    document = json.loads(Path(file).read_text(encoding="utf-8"))
    added = {token["id"]: [token[name] for name in MARKS] for token in document["added_tokens"]}
    done = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    same = added == {number: [getattr(token, name) for name in MARKS] for number, token in done.items()}
    if same and splitting(without_words(document)) == splitting(tokenizer.backend_tokenizer):
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(model, revision=revision, trust_remote_code=False)
    differing = next((text for text in PROBES if ids_of(plain, text) != ids_of(tokenizer, text)), None)
    if differing is not None:
        plain.read_as = (
            f"the tokenizer is read as tokenizer.json has it, which is how llama.cpp reads it: transformers' "
            f"{type(tokenizer).__name__} gives {differing!r} other ids"
        )
    return plain


def without_words(document: JsonObject) -> Any:
    """The tokenizer of a tokenizer.json, without its vocabulary, which transformers always takes from the file."""
    from tokenizers import Tokenizer

    empty: JsonObject = {"vocab": {}, "merges": []} if document["model"].get("type") == "BPE" else {}
    return Tokenizer.from_str(json.dumps({**document, "model": {**document["model"], **empty}, "added_tokens": []}))


def splitting(backend: Any) -> list[Any]:
    """The settings, beside vocabulary and merges, that decide which ids a text gets. An empty prefix or suffix of
    pieces, which Qwen's class sets, counts as none."""
    steps = [step and step.__getstate__() for step in (backend.normalizer, backend.pre_tokenizer)]
    return [type(backend.model), *steps, *(getattr(backend.model, name, None) or None for name in FLAGS)]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def with_prefix_of_llama_cpp(tokenizer: Any) -> Any:
    """Puts a space before text that follows a special token, if the tokenizer puts one only before the first word. For
    pieces of sentencepiece, llama.cpp does so before each stretch of text between special tokens."""
    if not tokenizer.is_fast:
        return tokenizer
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    step = backend.pre_tokenizer
    splitter = json.loads(step.__getstate__()) if step else {}
    is_sentencepiece = type(backend.model).__name__ == "BPE" and backend.model.byte_fallback
    if not is_sentencepiece or backend.normalizer or splitter.get("prepend_scheme", "never") == "never":
        return tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    if splitter["prepend_scheme"] == "first":
        tokenizer.read_as = (
            "text after a special token begins with a space, as llama.cpp reads this vocabulary; "
            "tokenizer.json puts one before the first word only"
        )
    return tokenizer


def no_tokenizer(model: str, expected: str, got: str) -> Refused:
    return Refused(
        f"{model} has no tokenizer",
        code="bad_tokenizer",
        expected=expected,
        got=got,
        hint="download the whole model, or copy the tokenizer files from its base model",
    )


def begins_itself(text: str, bos: str | None) -> bool:
    """Whether a text begins with the start token, as rendered rows do, so that none is to be put before it."""
    return bool(bos) and text.startswith(str(bos))
