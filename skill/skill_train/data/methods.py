"""Judges from one row which training methods a dataset can serve, and suggests a mapping as recipe lines. Pure.

What each method needs: TRL, docs/source/dataset_formats.md, "Which dataset type to use?" (read 2026-11, and compared
with the `_prepare_dataset` of the trainers of trl 1.16.0): SFT language modeling or prompt-completion; DPO and reward
preference; KTO unpaired preference or preference; GRPO prompt-only. The only one that skill-train trains is sft.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skill_train.program.examples import Row, is_media, media_mark
from skill_train.program.pictures.in_rows import tells_which_picture
from skill_train.program.tables.shape import is_message
from skill_train.recipe.formats import (
    ONE_MESSAGE,
    OPTIONAL,
    PICTURE_COLUMNS,
    PICTURED,
    DetectedFormat,
    answer_apart,
    detect,
    kind,
    other_turns,
)

METHODS = ("sft", "dpo", "kto", "grpo", "reward")

# Names that datasets use for questions and for answers, as `_plain` writes them.
_ASKED = (
    "prompt", "question", "query", "problem", "instruction", "input", "q", "user", "human", "request", "ask",
    "inputs", "usermessage", "userinput", "inputtext", "userprompt", "src", "source",
)  # fmt: skip
_ANSWERED = (
    "completion", "response", "answer", "output", "a", "reply", "assistant", "bot", "gpt", "solution", "target",
    "targets", "outputs", "tgt", "assistantmessage", "botresponse", "modelresponse", "modelanswer", "outputtext",
    "answertext", "finalanswer",
)  # fmt: skip
_QUESTIONS = ("question", "query", "problem", "q", "user", "human", "request", "ask", "usermessage")
_QUESTION_MARKS = ("?", "？", "؟", "՞", "፧")  # without the Greek one, a semicolon, because code ends with it
_ENDS = (*_QUESTION_MARKS, ".", "!", "。", "！", "।", "۔")  # of a sentence
_FILE = re.compile(r"\S*[/\\]\S+[/\\.]\S*|\S+\.[A-Za-z]\w{1,4}")
_ABOUT = ("context", "passage", "background", "evidence", "paragraph")
_CHOSEN = (
    "chosen", "accepted", "preferred", "better", "winner", "positive", "responsechosen", "chosenresponse", "win",
    "good",
)  # fmt: skip
_REJECTED = (
    "rejected", "dispreferred", "worse", "loser", "negative", "responserejected", "rejectedresponse", "lose", "bad",
)  # fmt: skip
# Words in names of columns; also in German, Spanish, French, Italian, Portuguese and Dutch.
_ROLES = {
    "question": (
        "question", "query", "prompt", "asked", "customer", "user", "human", "message", "frage", "pregunta", "domanda",
        "pergunta", "vraag",
    ),
    "answer": (
        "answer", "response", "reply", "completion", "solution", "agent", "assistant", "bot", "summary", "translation",
        "antwort", "respuesta", "reponse", "réponse", "risposta", "resposta", "antwoord",
    ),
}  # fmt: skip
_WORDS = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+")
_NAMES_ROW = ("id", "uuid", "guid")  # the last word of a column that only tells rows apart
_LABEL = ("label", "preferred", "desirable", "thumbsup", "liked", "isgood")


@dataclass(frozen=True)
class Verdict:
    verdict: Literal["ready", "needs_mapping", "impossible"]
    because: str
    # the dataset's name of each column by the method's name; empty if the method is impossible
    columns: dict[str, str] = field(default_factory=dict)
    format: str | None = None  # set only for sft
    guessed: bool = False  # the mapping rests on the order of the columns, or a text may hold its question

    @property
    def lines(self) -> list[str]:
        """The mapping as lines of a recipe."""
        if self.verdict != "needs_mapping":
            return []
        import yaml

        values = ({"format": self.format} if self.format else {}) | {"columns": self.columns}
        text = yaml.safe_dump(values, default_flow_style=None, sort_keys=False, width=10**6, allow_unicode=True)
        return [line for line in text.splitlines() if line]


def judge(
    row: Row, detected: DetectedFormat | None, rows: Sequence[Row] = (), *, pictures: bool = False
) -> dict[str, Verdict]:
    """The verdict for every method.

    Args:
        row: a typical one.
        detected: the format that training would take it for, or that the recipe says.
        rows: the first ones, which tell questions from answers where no name does, and whether pairs differ.
        pictures: the model reads them.
    """
    sft = _sft_pictures(row, detected, rows) if pictures else _sft(row, detected, rows)
    pairs, reward = _preference(row, "DPO", rows), _preference(row, "a reward model", rows)
    return {"sft": sft, "dpo": pairs, "kto": _kto(row, rows), "grpo": _grpo(row), "reward": reward}


def _sft(row: Row, detected: DetectedFormat | None, rows: Sequence[Row]) -> Verdict:
    read = set() if detected is None else set(detected.columns.values())  # their rows are checked one by one
    media = [column for column, value in row.items() if column not in read and is_media(column, value)]
    if media and (detected is None or not detected.explicit):
        why = f"{', '.join(media)} contains images, audio or video, and without a vision model only text is trained"
        return Verdict("impossible", why)
    if detected is not None:
        because = detected.reason
        if "label" in row.keys() - read and detected.format == "prompt_completion":
            because += "; label is not read, so rows with a bad label are trained too"
        return Verdict("ready", because, detected.columns, detected.format)
    if is_message(row):
        return Verdict("impossible", ONE_MESSAGE)
    if (apart := answer_apart(row)) is not None:
        return Verdict("impossible", apart)
    filled = {column: value for column, value in row.items() if not _tells_nothing(column, rows)}
    for suggest in (_usual_columns, _chosen_answers, _odd_names):
        verdict = suggest(row)
        if verdict is not None:
            return verdict
    if (verdict := _single_column(filled) or (_two_texts(row, rows) if len(filled) == len(row) else None)) is not None:
        return verdict
    why = "several text columns, and no name shows which is the question and which the answer: map them in a recipe"
    if all(kind(value) != "text" for value in filled.values()):
        why = "no column holds conversations, answers or plain text"
    question = _question(row)
    return Verdict("impossible", f"{question} has no text of an answer beside it" if question else why)


def _sft_pictures(row: Row, detected: DetectedFormat | None, rows: Sequence[Row]) -> Verdict:
    marked = {name for name, value in row.items() if isinstance(value, str) and media_mark(value)}
    media = {name: value for name, value in row.items() if name not in marked and is_media(name, value)}
    read = set(detected.columns.values()) if detected is not None else set(PICTURE_COLUMNS)
    beside = [name for name in media if name not in read]
    if detected is None or "images" in detected.columns:
        beside = [name for name in beside if not tells_which_picture(name, media[name])]
    if detected is not None:
        if not beside or detected.explicit:
            return Verdict("ready", detected.reason, detected.columns, detected.format)
        why = "only one column of pictures is read beside turns; name it in a recipe"
        if "images" not in detected.columns and detected.format in PICTURED:
            why = f"pictures in it are read with images: {beside[0]} in the columns of a recipe"
        return Verdict("impossible", f"{', '.join(beside)} contains images, audio or video: {why}")
    column = next((name for name in PICTURE_COLUMNS if name in media), next(iter(beside), None))
    texts = {name: value for name, value in row.items() if name not in media}
    verdict = _sft(texts if column is not None else row, None, rows)
    if column is None or verdict.verdict == "impossible":
        return verdict
    if verdict.format not in PICTURED or len(beside) > (column in beside):
        return Verdict(
            "impossible", f"{column} contains images, audio or video, and no columns hold a question and an answer"
        )
    return replace(verdict, columns=verdict.columns | {"images": column})


def _tells_nothing(column: str, rows: Sequence[Row]) -> bool:
    """Whether a column names its row, or has the same text in all of the first rows, which differ. Nobody trains either
    alone."""
    if _words(column)[-1:] in ([word] for word in _NAMES_ROW):
        return True
    texts = _values(column, rows)
    same = len(texts) == len(rows) and len(set(texts)) == 1 and any(row != rows[0] for row in rows)
    return same and _plain(column) not in (*_ASKED, *_ANSWERED, *_ABOUT)


def _usual_columns(row: Row) -> Verdict | None:
    found = detect(row)
    return found and Verdict("needs_mapping", f"{found.reason}; the first row has others", found.columns, found.format)


def _chosen_answers(row: Row) -> Verdict | None:
    """The verdict for preference pairs, whose chosen answers can be trained."""
    prompt, chosen, because = _question(row), _column(row, _CHOSEN), "preference pairs: train on the chosen answers"
    if chosen is None:
        return None
    asked, answered = kind(row.get(prompt or "")), kind(row[chosen])
    if prompt is None and answered == "turns" and _column(row, _REJECTED):
        return Verdict("needs_mapping", because, {"conversations": chosen}, "sharegpt")
    if _pair(row) is None:
        return None
    mixed = asked in ("text", "messages") and not _holds_question(row[chosen])
    if prompt is not None and (asked == answered or mixed):
        return _pairs(row, prompt, chosen, because)
    if answered == "messages":
        return Verdict("needs_mapping", because, {"messages": chosen}, "messages")
    if prompt is not None:
        return Verdict("impossible", f"{prompt} holds {asked}, and must be text")
    because += f"; no prompt is beside {chosen}: a question in it is trained too"
    return Verdict("needs_mapping", because, {"text": chosen}, "text", guessed=True)


def _holds_question(answer: Any) -> bool:
    return kind(answer) == "messages" and answer[0].get("role") != "assistant"


def _odd_names(row: Row) -> Verdict | None:
    """The verdict for two columns with known names in another spelling or combination."""
    texts = {name: value for name, value in row.items() if kind(value) in ("text", "messages")}
    question, answer = _question(texts), _column(texts, _ANSWERED)
    if question is None or answer is None:
        return None
    return _pairs(row, question, answer, f"by their names, {question} is the question and {answer} the answer")


def _single_column(row: Row) -> Verdict | None:
    """The verdict for a single column that can only have one meaning."""
    if (other := other_turns(row)) is not None:
        return Verdict("impossible", other)
    for kind_wanted, data_format, name in (
        ("messages", "messages", "messages"),
        ("turns", "sharegpt", "conversations"),
        ("text", "text", "text"),
    ):
        columns = [column for column, value in row.items() if kind(value) == kind_wanted]
        asks = _column(row, _ASKED) or (columns and _role(columns[0]) == "question" and columns[0])
        only_asks = kind_wanted != "turns" and columns[:1] == [asks]
        if len(columns) == 1 and not only_asks:
            if (apart := answer_apart(row, columns)) is not None:
                return Verdict("impossible", apart)
            because = f"{columns[0]} is the only column of {kind_wanted}"
            return Verdict("needs_mapping", because, {name: columns[0]}, data_format)
    return None


def _two_texts(row: Row, rows: Sequence[Row]) -> Verdict | None:
    texts = [column for column, value in row.items() if kind(value) == "text"]
    if len(texts) != 2:
        return None
    if (why := _no_answer(row, texts)) is not None:
        return Verdict("impossible", why)
    roles = [_role(column) for column in texts]
    if roles == ["answer", "answer"]:
        return Verdict("impossible", f"{texts[0]} and {texts[1]} are both answers by their names; map them in a recipe")
    named = next((column for column in texts if _names_files(column, rows)), None)
    if named is not None:
        return Verdict("impossible", f"{named} names files or addresses, and what is in them is not read")
    if roles[0] == "answer" or roles[1] == "question":
        because = f"by its name, {texts[0]} is the answer" if roles[0] else f"by its name, {texts[1]} is the question"
        return _pairs(row, texts[1], texts[0], f"{because}: look at the example", guessed=True)
    if _asks(texts[1], rows) and not _asks(texts[0], rows):
        because = f"most values of {texts[1]} end with a question mark; that {texts[0]} answers is a guess: "
        return _pairs(row, texts[1], texts[0], because + "look at the example", guessed=True)
    because = f"two text columns; that {texts[0]} is asked and {texts[1]} answers is a guess: look at the example"
    if any(column.endswith(_ENDS) for column in texts):
        because += "; these names read like a row: a table begins with the names of its columns"
    return _pairs(row, texts[0], texts[1], because, guessed=True)


def _no_answer(row: Row, texts: list[str]) -> str | None:
    """Why neither of two columns can be the answer: it is not text, or it is the subject of the other."""
    answers = [column for column in row if column not in texts and _plain(column).rstrip("s") in _ANSWERED]
    if answers and (question := _question(row)) is not None:
        return f"{answers[0]} holds {kind(row[answers[0]])}, and the answer to {question} must be text"
    about = next((column for column in texts if _plain(column) in _ABOUT), None)
    if about is None or "answer" in map(_role, texts):
        return None
    return f"{about} is what a text is about by its name, and no answer is beside it"


def _role(column: str) -> str | None:
    """`question` or `answer`, by a word in the name of a column; None where no word, or one of both kinds, says it."""
    roles = [role for role, names in _ROLES.items() if set(_words(column)).intersection(names)]
    return roles[0] if len(roles) == 1 else None


def _words(column: str) -> list[str]:
    """The words of a name such as `ticket_id`, `ticketId` or `TICKET ID`, in lower case."""
    return [word.lower() for word in _WORDS.findall(column)]


def _asks(column: str, rows: Sequence[Row]) -> bool:
    """Whether most values end with a question mark: Latin, Chinese, Arabic, Armenian or Amharic."""
    texts = _values(column, rows)
    return 2 * sum(text.endswith(_QUESTION_MARKS) for text in texts) > len(texts)


def _names_files(column: str, rows: Sequence[Row]) -> bool:
    """Whether almost all values are single words with slashes or a file extension."""
    texts = _values(column, rows)
    return bool(texts) and 10 * sum(_FILE.fullmatch(text) is not None for text in texts) >= 9 * len(texts)


def _values(column: str, rows: Sequence[Row]) -> list[str]:
    return [value.strip() for row in rows if isinstance(value := row.get(column), str) and value.strip()]


def _pairs(row: Row, question: str, answer: str, because: str, *, guessed: bool = False) -> Verdict:
    """The verdict for a column of questions and one of answers. A question or an instruction is rendered as a chat turn
    together with its context. A prompt is used unchanged."""
    columns, data_format = {"prompt": question, "completion": answer}, "prompt_completion"
    if kind(row[question]) == kind(row[answer]) == "text":
        if _plain(question) in _QUESTIONS:
            columns, data_format = {"question": question, "answer": answer}, "question_answer"
        elif _plain(question) == "instruction":
            columns, data_format = {"instruction": question, "output": answer}, "instruction"
    if data_format != "prompt_completion":
        because += "; rendered as a chat (for a model without a chat template: format completion)"
        for key, names in OPTIONAL[data_format].items():
            column = _column(row, tuple(map(_plain, names)))
            columns |= {key: column} if column not in (None, question, answer) else {}
    return Verdict("needs_mapping", because, columns, data_format, guessed=guessed)


def _preference(row: Row, method: str, rows: Sequence[Row]) -> Verdict:
    pair = _pair(row)
    if pair is None:
        return Verdict("impossible", f"{method} needs a chosen and a rejected answer to each prompt")
    equal = sum(pair["chosen"] in each and each[pair["chosen"]] == each.get(pair["rejected"]) for each in rows)
    same = f"{pair['chosen']} and {pair['rejected']} are equal in {equal} of the first {len(rows)} rows"
    if rows and equal == len(rows):
        return Verdict("impossible", f"{same}, and {method} learns from how they differ")
    verdict = _preferred(row, pair)
    return replace(verdict, because=f"{verdict.because}; {same}") if equal else verdict


def _preferred(row: Row, pair: dict[str, str]) -> Verdict:
    prompt = _question(row)
    if prompt is not None and kind(row[prompt]) == kind(row[pair["chosen"]]):
        return _mapped(row, {"prompt": prompt, **pair}, f"{prompt}, {pair['chosen']} and {pair['rejected']}")
    if prompt is not None and not _holds_question(row[pair["chosen"]]):
        return Verdict("impossible", f"{prompt} and {pair['chosen']} must both be texts, or both messages")
    because = f"{pair['chosen']} and {pair['rejected']}, with the prompt inside them"
    if prompt == "prompt":  # TRL would concatenate a text and a list of messages
        because += f"; {prompt} is {kind(row[prompt])} beside {kind(row[pair['chosen']])} and must be left out"
        return Verdict("needs_mapping", because, pair)
    return _mapped(row, pair, because)


def _kto(row: Row, rows: Sequence[Row]) -> Verdict:
    if _pair(row) is not None:
        verdict = _preference(row, "KTO", rows)
        if verdict.verdict == "impossible":
            return verdict
        return replace(verdict, because=f"{verdict.because}; TRL makes two rows of each pair")
    prompt, answer, label = _question(row), _column(row, _ANSWERED), _column(row, _LABEL)
    if prompt is None or answer is None or label is None:
        return Verdict("impossible", "KTO needs a prompt, a completion and a label that is true or false, or pairs")
    if kind(row[label]) != "true or false":
        return Verdict("impossible", f"{label} holds {kind(row[label])}; KTO needs true or false")
    names, because = {"prompt": prompt, "completion": answer, "label": label}, f"{prompt}, {answer} and {label}"
    if len(rows) > 1 and len(labels := {str(each.get(label)).lower() for each in rows}) == 1:
        because += f"; {label} is {labels.pop()} in all of the first {len(rows)} rows, and KTO learns from both kinds"
    return _mapped(row, names, because)


def _grpo(row: Row) -> Verdict:
    prompt = _question(row)
    if prompt is None or kind(row[prompt]) not in ("text", "messages"):
        return Verdict("impossible", "GRPO needs a column of prompts; the model writes the answers")
    return _mapped(row, {"prompt": prompt}, f"{prompt}; a reward function must come with it")


def _mapped(row: Row, columns: dict[str, str], because: str) -> Verdict:
    ready = all(key == column for key, column in columns.items())
    return Verdict("ready" if ready else "needs_mapping", because, columns)


def _pair(row: Row) -> dict[str, str] | None:
    """Two columns of one type: a better and a worse answer."""
    chosen, rejected = _column(row, _CHOSEN), _column(row, _REJECTED)
    if chosen is None or rejected is None or kind(row[chosen]) != kind(row[rejected]):
        return None
    return {"chosen": chosen, "rejected": rejected} if kind(row[chosen]) in ("text", "messages") else None


def _column(row: Row, names: tuple[str, ...]) -> str | None:
    """The column with the first of these names, ignoring case, spaces and underscores."""
    plain = {_plain(column): column for column in reversed(row)}
    return next((plain[name] for name in names if name in plain), None)


def _question(row: Row) -> str | None:
    """The column that asks, by its name; `source` only beside a target."""
    return _column(row, _ASKED if _column(row, ("target", "targets", "tgt", "output", "outputs")) else _ASKED[:-2])


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
