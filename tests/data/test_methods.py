"""The verdict on each method. The rows are those of TRL's page on dataset formats, and well-known datasets' columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skill_train.data.methods import METHODS, judge
from skill_train.recipe.formats import DetectedFormat, detect

ASK = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = [{"role": "assistant", "content": "It is blue."}], [{"role": "assistant", "content": "It is green."}]
TURNS = [{"from": "human", "value": "What color?"}, {"from": "gpt", "value": "Blue."}]

# A row, and its verdicts on sft, dpo, kto, grpo, reward: r(eady), m(apping needed), i(mpossible).
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("language modeling", {"text": "The sky is blue."}, "riiii"),
    ("language modeling, conversational", {"messages": ASK + BLUE}, "riiii"),
    ("prompt-only", {"prompt": "The sky is"}, "iiiri"),
    ("prompt-only, conversational", {"prompt": ASK}, "iiiri"),
    ("prompt-completion", {"prompt": "The sky is", "completion": " blue."}, "riiri"),
    ("prompt-completion, conversational", {"prompt": ASK, "completion": BLUE}, "riiri"),
    ("preference", {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "mrrrr"),
    ("preference, implicit", {"chosen": "The sky is blue.", "rejected": "The sky is green."}, "mrrir"),
    ("preference, conversational", {"prompt": ASK, "chosen": BLUE, "rejected": GREEN}, "mrrrr"),
    ("preference, conversational, implicit", {"chosen": ASK + BLUE, "rejected": ASK + GREEN}, "mrrir"),
    ("unpaired preference", {"prompt": "The sky is", "completion": " blue.", "label": True}, "rirri"),
    ("unpaired, conversational", {"prompt": ASK, "completion": BLUE, "label": False}, "rirri"),
    ("alpaca", {"instruction": "Add.", "input": "2 2", "output": "4"}, "riimi"),
    ("gsm8k", {"question": "2+2?", "answer": "4"}, "riimi"),
    ("sharegpt", {"conversations": TURNS}, "riiii"),
    ("ultrafeedback", {"prompt": "Sky?", "chosen": ASK + BLUE, "rejected": ASK + GREEN}, "mmmrm"),
    ("preference, a text and messages", {"prompt": "Sky?", "chosen": BLUE, "rejected": GREEN}, "miiri"),
    ("preference, messages and a text", {"prompt": ASK, "chosen": "Blue.", "rejected": "Green."}, "miiri"),
    ("preference, a question of turns", {"prompt": TURNS[:1], "chosen": "Blue.", "rejected": "Green."}, "iiiii"),
    ("preference, turns", {"chosen": TURNS, "rejected": TURNS, "source": "a forum"}, "miiii"),
    ("a name of the place", {"source": "a forum", "chosen": "Sky? Blue.", "rejected": "Sky? Green."}, "mrrir"),
    ("translation", {"source": "Himmel", "target": "sky"}, "miimi"),
    ("odd names beside other turns", {"Q": "Sky?", "A": "Blue.", "messages": ["Sky?"]}, "miimi"),
    ("odd names", {"Q": "Sky?", "A": "Blue."}, "miimi"),
    ("odd pairs", {"question": "Sky?", "better": "Blue.", "worse": "Green."}, "mmmmm"),
    ("a label of 0 and 1", {"prompt": "a", "completion": "b", "label": 1}, "riiri"),
    ("messages under another name", {"id": 1, "dialog": ASK + BLUE}, "miiii"),
    ("turns under another name", {"dialog": TURNS}, "miiii"),
    ("text under another name", {"id": 1, "body": "Once."}, "miiii"),
    ("two texts", {"Frage": "Himmel?", "Antwort": "Blau."}, "miiii"),
    ("three texts", {"a1": "x", "b1": "y", "c1": "z"}, "iiiii"),
    ("numbers", {"x": 1, "y": 2.5}, "iiiii"),
    ("nothing", {}, "iiiii"),
]


@pytest.mark.parametrize(("row", "expected"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_each_method_has_its_verdict(row: dict[str, Any], expected: str) -> None:
    verdicts = judge(row, detect(row))
    assert tuple(verdicts) == METHODS
    assert "".join(verdict.verdict[0].replace("n", "m") for verdict in verdicts.values()) == expected
    assert all(verdict.because for verdict in verdicts.values())
    assert all(bool(verdict.lines) == (verdict.verdict == "needs_mapping") for verdict in verdicts.values())


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        ({"Q": "a", "A": "b"}, ["format: question_answer", "columns: {question: Q, answer: A}"]),
        ({"src": "a", "tgt": "b"}, ["format: prompt_completion", "columns: {prompt: src, completion: tgt}"]),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ["format: prompt_completion", "columns: {prompt: prompt, completion: chosen}"],
        ),
        (  # the question is not in the answers: it would be lost
            {"prompt": "Sky?", "chosen": BLUE, "rejected": GREEN},
            ["format: prompt_completion", "columns: {prompt: prompt, completion: chosen}"],
        ),
        (
            {"prompt": ASK, "chosen": "Blue.", "rejected": "Green."},
            ["format: prompt_completion", "columns: {prompt: prompt, completion: chosen}"],
        ),
        (
            {"prompt": "Sky?", "chosen": ASK + BLUE, "rejected": ASK + GREEN},
            ["format: messages", "columns: {messages: chosen}"],
        ),
        ({"chosen": ASK + BLUE, "rejected": ASK + GREEN}, ["format: messages", "columns: {messages: chosen}"]),
        (  # of LLaMA-Factory: without the input the question is lost
            {"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"},
            ["format: instruction", "columns: {instruction: instruction, output: chosen, input: input}"],
        ),
        (  # orca_dpo_pairs
            {"system": "s", "question": "a", "chosen": "c", "rejected": "d"},
            ["format: question_answer", "columns: {question: question, answer: chosen, system: system}"],
        ),
        (
            {"Instruction": "a", "Input": "b", "Output": "c"},
            ["format: instruction", "columns: {instruction: Instruction, output: Output, input: Input}"],
        ),
        (
            {"System Prompt": "s", "Instruction": "a", "Response": "c"},
            ["format: instruction", "columns: {instruction: Instruction, output: Response, system: System Prompt}"],
        ),
        (
            {"Q": "a", "A": "b", "System": "s"},
            ["format: question_answer", "columns: {question: Q, answer: A, system: System}"],
        ),
        (
            {"instruction": "a", "Completion": "c"},
            ["format: instruction", "columns: {instruction: instruction, output: Completion}"],
        ),
        (
            {"source": "a forum", "chosen": TURNS, "rejected": TURNS},
            ["format: sharegpt", "columns: {conversations: chosen}"],
        ),
        ({"source": "a forum", "chosen": "a", "rejected": "b"}, ["format: text", "columns: {text: chosen}"]),
        (
            {"source": "a", "target": "b"},
            ["format: prompt_completion", "columns: {prompt: source, completion: target}"],
        ),
        ({"the body: all": "Once."}, ["format: text", "columns: {text: 'the body: all'}"]),
    ],
    ids=str,
)
def test_the_mapping_is_recipe_lines(row: dict[str, Any], lines: list[str]) -> None:
    assert judge(row, detect(row))["sft"].lines == lines


def test_a_mapping_by_the_order_of_columns_is_called_a_guess() -> None:
    verdict = judge({"Frage": "a", "Antwort": "b"}, None)["sft"]
    assert verdict.guessed
    assert verdict.because.endswith("that Frage is asked and Antwort answers is a guess: look at the example")


@pytest.mark.parametrize("answer", ["completion", "label"])
def test_a_label_that_is_the_answer_is_read(answer: str) -> None:
    """As the hint for a labelled text maps it."""
    row = {"prompt": "It came late.", "completion": "Sorry.", "label": "bad"}
    columns = {"prompt": "prompt", "completion": answer}
    verdict = judge(row, DetectedFormat("prompt_completion", columns, "said", explicit=True))["sft"]
    assert ("label is not read" in verdict.because) is (answer == "completion")


def test_names_of_columns_that_read_like_a_row_are_told() -> None:
    """Of a table without a header, whose first row would be lost."""
    row = {"Where is my bill?": "Can I pay by card?", "Below Account": "Yes, we take all cards."}
    verdict = judge(row, None)["sft"]
    assert verdict.guessed
    assert "these names read like a row" in verdict.because


def test_a_prompt_of_another_kind_than_the_answers_is_left_out() -> None:
    verdict = judge({"prompt": "Sky?", "chosen": ASK + BLUE, "rejected": ASK + GREEN}, None)["dpo"]
    assert verdict.lines == ["columns: {chosen: chosen, rejected: rejected}"]


@pytest.mark.parametrize("row", [{}, {"prompt": "\n\nHuman: Sky?"}])
def test_a_pair_without_a_prompt_trains_its_questions_which_is_told(row: dict[str, Any]) -> None:
    """As HH-RLHF, whose texts hold both speakers."""
    row |= {"chosen": "\n\nHuman: Sky?\n\nAssistant: Blue.", "rejected": "\n\nHuman: Sky?\n\nAssistant: No."}
    verdict = judge(row, detect(row))["sft"]
    assert verdict.guessed is ("a question in it is trained too" in verdict.because) is ("prompt" not in row)


def test_the_mapping_makes_the_dataset_ready() -> None:
    """Each mapped row is what the same table calls ready."""
    for _, row, _ in TABLE:
        for name, verdict in judge(row, detect(row)).items():
            mapped = {wanted: row[column] for wanted, column in verdict.columns.items()}
            if verdict.verdict == "needs_mapping":
                assert judge(mapped, detect(mapped))[name].verdict == "ready", (name, row)


@pytest.mark.parametrize(("equal", "verdict"), [(0, "ready"), (1, "ready"), (3, "impossible")])
def test_pairs_of_equal_answers_teach_nothing(equal: int, verdict: str) -> None:
    rows = [{"prompt": "Sky?", "chosen": "Blue.", "rejected": "Blue." if n < equal else "Green."} for n in range(3)]
    for method in ("dpo", "kto", "reward"):
        found = judge(rows[2], None, rows)[method]
        assert found.verdict == verdict
        assert (f"chosen and rejected are equal in {equal} of the first 3 rows" in found.because) == (equal > 0)


@pytest.mark.parametrize(("labels", "told"), [((True, True), True), ((True, False), False)])
def test_kto_with_one_label_is_told(labels: tuple[bool, ...], told: bool) -> None:
    rows = [{"prompt": "Sky?", "completion": "Blue.", "label": label} for label in labels]
    assert ("label is true in all of the first 2 rows" in judge(rows[0], None, rows)["kto"].because) == told


SPOKEN = [{"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}, {"from": "human", "value": "Sea?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "ticket-{}", "turns": [{"speaker": "customer", "utterance": "Where is {}?"}]},
        {"lang": "de", "turns": [{"speaker": "customer", "utterance": "Where is {}?"}]},
        {"ticketId": "t{}", "lang": "de", "body": {"messages": []}},
        {"id": "t{}", "frage": "Wo ist {}?"},
        {"answer": "In hall {}.", "wrong_answer": "In {} halls."},
        {"response_a": "In hall {}.", "response_b": "In {} halls."},
        {"source": "site {}", "conversation": [{"input": "Sky?", "output": "Blue."}]},  # Capybara
        {"conversations": ["Sky?", "Blue."], "topic": "sky {}"},  # LIMA
        {"conversations": SPOKEN, "chosen": {"from": "gpt", "value": "{}"}, "rejected": {"from": "gpt", "value": "no"}},
        {"messages": ASK + BLUE + ASK, "response": "Blue {}."},
        {"messages": ASK + BLUE + ASK, "response_a": "Blue {}.", "response_b": "Green {}."},
        {
            "context": ASK + BLUE + ASK,
            "response1": "Blue {}.",
            "response2": "Green {}.",
            "language": "en",
        },  # HelpSteer3
        {"context": SPOKEN, "Answer": "Blue {}."},
        {"context": ASK, "response1": "Blue {}.", "response2": "Green {}.", "language": "en"},
    ],
)
def test_what_would_train_the_wrong_text_is_refused(row: dict[str, Any]) -> None:
    rows = [json.loads(json.dumps(row).replace("{}", str(number))) for number in range(3)]
    assert detect(rows[0]) is None
    assert judge(rows[0], None, rows)["sft"].verdict == "impossible"


@pytest.mark.parametrize("talk", [ASK + BLUE, ASK + BLUE + ASK])
@pytest.mark.parametrize(
    "other", [{"responses_rated": "3"}, {"language": "en"}, {"output_tokens": "7"}, {"answer": ""}]
)
@pytest.mark.parametrize("name", ["messages", "context"])
def test_a_conversation_beside_no_answer_is_trained(talk: list[Any], other: dict[str, Any], name: str) -> None:
    row = {name: talk} | other
    assert judge(row, detect(row), [row])["sft"].columns == {"messages": name}


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("question_text", "answerText"),
        ("customer", "agent"),
        ("message", "reply"),
        ("Frage", "Antwort"),
        ("FRAGE", "ANTWORT"),
        ("f", "reply_2"),
        ("Context", "Response"),  # of mental_health_counseling_conversations
        ("document", "summary"),
        ("en", "translation"),
    ],
)
def test_words_in_names_tell_the_answer_whatever_the_order(asked: str, answered: str) -> None:
    for names in ((asked, answered), (answered, asked)):
        rows = [{name: f"{name} {number}" for name in names} for number in range(3)]
        found = judge(rows[0], None, rows)["sft"]
        assert list(found.columns.values()) == [asked, answered] and found.verdict == "needs_mapping"


@pytest.mark.parametrize("name", ["paid", "Android", "valid_text"])
def test_a_name_that_only_ends_like_an_id_is_a_text(name: str) -> None:
    rows = [{name: f"Word {number}."} for number in range(3)]
    assert judge(rows[0], None, rows)["sft"].columns == {"text": name}


def test_an_instruction_is_asked_with_its_question() -> None:
    row = {"instruction": "Answer briefly.", "context": "A shop.", "question": "What is open?", "answer": "All of it."}
    found = judge(row, detect(row), [row])["sft"]
    assert found.columns == {"instruction": "instruction", "input": "question", "output": "answer"}
