"""llama_cpp.server as `serve` starts it: a real client of OpenAI's, and prompts as transformers writes them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import gguf_maker
import serving
from skill_train.core.errors import SkillTrainError, UsageError, VerificationFailed
from skill_train.llama.engines.http import HttpRefusal, get, post
from skill_train.llama.engines.python_server import Served, ServerJob, served
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.sampling import Sampling
from skill_train.llama.template import special_texts
from skill_train.reference.load import load_tokenizer

pytestmark = pytest.mark.slow

KEY = "a-key-that-nobody-guesses"


def job(file: Path, **values: Any) -> ServerJob:
    gguf = read_gguf(file)
    bos, eos = special_texts(gguf)
    template = gguf.metadata.get("tokenizer.chat_template")
    own: dict[str, Any] = {"gguf": str(file), "name": "tiny", "template": template, "bos": bos, "eos": eos}
    return ServerJob(**{**own, "context_tokens": 2048, "threads": 2, "reports": True, **values})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder and its f16 file, with a template that takes tools. The tokenizer composes accents, as Qwen's does."""
    out = tmp_path_factory.mktemp("serve")
    folder, file = serving.with_template(gguf_maker.exported("llama-chatml"), out, serving.TOOLS)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
    return folder, file


@pytest.fixture(scope="module")
def server(made: tuple[Path, Path]) -> Iterator[Served]:
    with served(job(made[1], sampling=Sampling(temperature=0.0), composes=True)) as running:
        yield running


def client(server: Served, key: str = "none") -> Any:
    import openai

    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def test_thirty_prompts_are_those_of_apply_chat_template(made: tuple[Path, Path], server: Served) -> None:
    """As ids, as the model reads them, and counted in the answer."""
    tokenizer, asked, seen = load_tokenizer(made[0]), client(server), set()
    for messages, tools in serving.conversations():
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False).input_ids
        answer = asked.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, **({"tools": tools} if tools else {})
        )
        assert server.report().prompt_ids == expected, text
        assert answer.usage.prompt_tokens == len(expected)
        seen.add(text)
    assert len(seen) == 30


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("message.content ~ ''", ""),
        ("(message.content if '</think>' not in message.content else '')", ""),
        ("NULL", None),
    ],
)
def test_a_null_content_beside_calls_is_the_empty_text_of_rows(tmp_path: Path, text: str, sent: str | None) -> None:
    """As OpenAI's clients send it. Llama 3's template wrote `None`, and Qwen3's was refused; DeepSeek-R1's writes calls
    for null alone."""
    template = serving.TOOLS.replace("(message.content or '')", text.replace("NULL", "(message.content or '')"))
    if sent is None:
        template = template.replace(
            "in message.tool_calls or []", "in (message.tool_calls if message.content is none else [])"
        )
    folder, file = serving.with_template(gguf_maker.exported("llama-chatml"), tmp_path, template)
    messages, tools = next(pair for pair in serving.conversations() if any("tool_calls" in each for each in pair[0]))
    null = [message | {"content": None} if "tool_calls" in message else message for message in messages]
    tokenizer = load_tokenizer(folder)
    with served(job(file)) as running:
        post(f"{running.url}/chat/completions", {"messages": null, "tools": tools, "max_tokens": 1}, dict)
        ids = running.report().prompt_ids
    fed = tokenizer.decode(ids)
    assert "<tool_call>" in fed and "None" not in fed
    if sent is not None:  # as rows have it
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ids == tokenizer(text, add_special_tokens=False).input_ids


def test_a_conversation_is_rendered_as_a_row_of_the_training(tmp_path: Path) -> None:
    """Clients send arguments as JSON text, null for what is absent, and thoughts under another key. `tojson` wrote the
    arguments as a text in quotes, a null failed, and the thoughts were missing: the model read prompts of no row."""
    template = serving.TOOLS.replace("{%- if tools -%}", "{%- if tools is not none -%}", 1)
    template = template.replace("(message.content or '')", "(message.reasoning_content or '') + message.content")
    template = template.replace(
        "if message.role == 'tool' -", "if message.refusal is defined -%}NULL{%- elif message.role == 'tool' -"
    )
    folder, file = serving.with_template(gguf_maker.exported("llama-chatml"), tmp_path, template)
    tokenizer, question = load_tokenizer(folder), serving.user("Weather?")

    def called(arguments: object, **more: object) -> list[dict[str, Any]]:
        call = {"id": "call_0001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [question, {"role": "assistant", "content": "", "tool_calls": [call], **more}, question]

    taken = {"place": "Troms\u00f8", "days": 2}
    rows = (
        (called(json.dumps(taken)), [serving.WEATHER], called(taken)),
        (called(taken, refusal=None, content=None), [], called(taken)),
        (called("", thinking="I ask."), None, called({}, reasoning_content="I ask.")),
        (called(taken, reasoning="I ask."), None, called(taken, reasoning_content="I ask.")),
    )
    with served(job(file)) as running:
        for sent, tools, row in rows:
            text = tokenizer.apply_chat_template(row, tools=tools or None, tokenize=False, add_generation_prompt=True)
            post(f"{running.url}/chat/completions", {"messages": sent, "tools": tools, "max_tokens": 1}, dict)
            assert tokenizer.decode(running.report().prompt_ids) == text
        with pytest.raises(HttpRefusal, match=r"HTTP 400.*messages: .*arguments of a call"):
            post(f"{running.url}/chat/completions", {"messages": called("{place"), "max_tokens": 1}, dict)


def test_the_stock_server_orders_tools_in_its_own_way(made: tuple[Path, Path]) -> None:
    """Why messages and tools are taken as they were sent: a change of that in the server shows here."""
    tokenizer = load_tokenizer(made[0])
    messages, tools = serving.conversations()[22]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    with served(job(made[1], stock=True)) as stock:
        client(stock).chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=1)
        assert stock.report().prompt_ids != tokenizer(text, add_special_tokens=False).input_ids


def test_a_stream_is_the_answer_in_pieces(server: Served) -> None:
    asked, messages = client(server), [serving.user("Is it raining?")]
    whole = asked.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    server.report()
    chunks = asked.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    server.report()
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3 and whole.choices[0].finish_reason == "length"
    assert asked.completions.create(model="tiny", prompt="Once", max_tokens=3).choices[0].text
    server.report()
    assert [model.id for model in asked.models.list()] == ["tiny"]


@pytest.fixture(scope="module")
def shared(made: tuple[Path, Path]) -> Iterator[Served]:
    with served(job(made[1], sampling=Sampling(temperature=0.0), reports=False, threads=1)) as running:
        yield running


def test_two_streams_at_once_wait_for_each_other(made: tuple[Path, Path], shared: Served) -> None:
    """By itself the server cuts a stream short as soon as another request comes."""
    never = {str(read_gguf(made[1]).metadata["tokenizer.ggml.eos_token_id"]): -100}
    asked = client(shared).chat.completions.create
    ends: list[str | None] = []

    def read(chunks: Any) -> None:
        ends.append([chunk.choices[0].finish_reason for chunk in chunks][-1])

    def ask() -> Any:
        return asked(model="x", messages=[serving.user("x")], max_tokens=200, logit_bias=never, stream=True)

    first = ask()
    next(iter(first))
    second = threading.Thread(target=lambda: read(ask()))
    second.start()
    read(first)
    second.join(120)
    assert ends == ["length", "length"]


def test_nothing_is_computed_for_a_client_that_left(made: tuple[Path, Path], shared: Served) -> None:
    """The server wrote the whole answer, and everybody else waited for it. Streams ended already."""
    never = {str(read_gguf(made[1]).metadata["tokenizer.ggml.eos_token_id"]): -100}
    chat = {"messages": [serving.user("x")], "logit_bias": never}

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        post(f"{shared.url}/chat/completions", chat | {"max_tokens": tokens}, dict)
        return time.monotonic() - began

    whole, address = seconds(1900), urllib.parse.urlsplit(shared.url)
    for route, more in (("chat/completions", chat), ("completions", {"prompt": "x", "logit_bias": never})):
        for stream in (False, True):
            leaving = http.client.HTTPConnection(str(address.hostname), address.port)
            body = json.dumps(more | {"max_tokens": 1900, "stream": stream})
            leaving.request("POST", f"/v1/{route}", body, {"Content-Type": "application/json"})
            time.sleep(whole / 20)
            leaving.close()
            assert seconds(1) < whole / 2, (route, stream)


def test_an_error_in_a_stream_is_told_as_without_one(shared: Served) -> None:
    """By itself the server answers with HTTP 200 and nothing."""
    import openai

    asked = client(shared)
    for create, words in (
        (asked.chat.completions.create, {"messages": [serving.user("word " * 3000)]}),
        (asked.completions.create, {"prompt": "word " * 3000}),
        (asked.chat.completions.create, {"messages": [serving.user("x")], "logprobs": True, "top_logprobs": 1}),
    ):
        told = []
        for stream in (False, True):
            with pytest.raises(openai.APIError) as caught:
                list(create(model="x", max_tokens=4, stream=stream, **words))
            told.append(caught.value.body)
        assert told[0] == told[1] and told[0]["message"]
    assert asked.models.list().data  # it still answers


def test_a_prompt_that_no_context_holds_is_not_tokenized(shared: Served) -> None:
    """One word of 20 MB took llama.cpp minutes, in which nobody else was answered."""
    for route, asked in (
        ("chat/completions", {"messages": [serving.user("a" * 20_000_000)]}),
        ("completions", {"prompt": "a" * 20_000_000}),
    ):
        request = urllib.request.Request(
            f"{shared.url}/{route}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as answer:
            assert answer.code == 400 and "more than 2048 tokens" in json.load(answer)["error"]["message"]


def test_no_grammar_and_no_schema_ends_the_server(made: tuple[Path, Path], shared: Served) -> None:
    """llama.cpp crashes at most of these, and computes without end at one."""
    import openai

    half = load_tokenizer(made[0])("\N{GRINNING FACE}", add_special_tokens=False).input_ids[:1]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"enum": []}}}
    root = shared.url.removesuffix("/v1")
    chat, text = {"messages": [serving.user("x")]}, {"prompt": "x"}
    json_type, function = {"type": "json_object"}, {"type": "function", "function": {"name": "weather"}}
    for route, words, field in (
        ("v1/completions", text | {"grammar": "no grammar"}, "grammar"),
        ("v1/chat/completions", chat | {"grammar": "root ::= [b-a]"}, "grammar"),
        ("v1/chat/completions", chat | {"grammar": 'root ::= a root "x" | "b"\na ::= "q"?'}, "grammar"),
        ("v1/chat/completions", chat | {"response_format": json_type | {"schema": {"enum": []}}}, "response_format"),
        ("v1/chat/completions", chat | {"response_format": {"type": "json_schema"}}, "response_format"),
        ("v1/chat/completions", chat | {"tools": [tool], "tool_choice": function}, "tool_choice"),
        ("v1/chat/completions", chat | {"functions": [], "function_call": {"name": "weather"}}, "function_call"),
        ("extras/detokenize", {"tokens": [-5]}, "tokens"),
        ("extras/detokenize", {"tokens": [10**9]}, "tokens"),
        ("extras/detokenize", {"tokens": half}, "tokens"),
        ("v1/completions", text | {"model": 5}, "model"),
    ):
        with pytest.raises(HttpRefusal, match=f"400.*{field}: ") as caught:
            post(f"{root}/{route}", words, dict)
        assert ".py" not in str(caught.value)
    with pytest.raises(openai.APIError, match="grammar: "):
        list(client(shared).completions.create(model="x", stream=True, prompt="x", extra_body={"grammar": "no"}))
    answer = post(f"{root}/v1/chat/completions", chat | {"response_format": json_type, "max_tokens": 2}, dict)
    assert answer["choices"][0]["message"]["content"].lstrip()[0] in '{["-0123456789tfn'
    assert post(f"{root}/extras/detokenize", {"tokens": [64]}, dict)["text"]


def test_the_newer_name_of_the_most_tokens_and_the_number_of_answers(made: tuple[Path, Path], shared: Served) -> None:
    """By itself the server passes over both: an answer of any length, and one where two were asked for."""
    import openai

    asked, ask = client(shared), {"model": "x", "messages": [serving.user("x")]}
    never = {str(read_gguf(made[1]).metadata["tokenizer.ggml.eos_token_id"]): -100}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = asked.chat.completions.create(**ask, logit_bias=never, n=1, **{name: 3})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    with pytest.raises(openai.BadRequestError, match="n: "):
        asked.chat.completions.create(**ask, n=2, max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="n: "):
        asked.completions.create(model="x", prompt="x", n=2, max_tokens=3)


def test_what_cannot_be_answered_is_refused_and_the_model_has_its_name(shared: Served) -> None:
    """By itself the server answers no messages with invented text, and probabilities with none; it tells the path of
    the file. HTTP 500 would be sent again by clients."""
    chat = f"{shared.url}/chat/completions"
    for body in (
        b'{"messages": [}',
        b"\xff",
        b"5",
        b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}',
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(chat, body, {"Content-Type": "application/json"}))
        assert (caught.value.code, bool(json.load(caught.value)["error"]["message"])) == (400, True), body
    ask = {"messages": [serving.user("x")], "max_tokens": 1}
    for words in (ask, ask | {"model": "gpt-4"}):
        assert post(chat, words, dict)["model"] == "tiny"
    assert post(f"{shared.url}/completions", {"prompt": "x", "max_tokens": 1}, dict)["model"] == "tiny"


def test_texts_in_parts_are_joined_as_those_of_rows_are(made: tuple[Path, Path], server: Served) -> None:
    """OpenAI's clients send a text so, and most templates write none of a list. Nothing else can be read."""
    import openai

    tokenizer, create = load_tokenizer(made[0]), client(server).chat.completions.create
    joined = [serving.system("Be brief."), serving.user("Is it raining?")]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "raining?"}]},
    ]
    expected = tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
    create(model="tiny", messages=parts, max_tokens=1)
    assert server.report().prompt_ids == tokenizer(expected, add_special_tokens=False).input_ids
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content in ([picture], [{"type": "text", "text": "x"}, picture], ["x"], [{"type": "text"}], 5):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=r"messages: .*content is a text"):
                create(model="tiny", messages=[{"role": "user", "content": content}], stream=stream)


def test_the_last_chunk_of_a_stream_has_its_usage_where_it_is_asked_for(
    made: tuple[Path, Path], server: Served
) -> None:
    asked, never = client(server), {str(read_gguf(made[1]).metadata["tokenizer.ggml.eos_token_id"]): -100}
    words: dict[str, Any] = {"model": "x", "max_tokens": 5, "logit_bias": never}
    for create, more in (
        (asked.chat.completions.create, {"messages": [serving.user("Is it raining?")]}),
        (asked.completions.create, {"prompt": "Is it raining?"}),
    ):
        usage = create(**words, **more).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(server.report().prompt_ids), 5)
        *chunks, last = create(**words, **more, stream=True, stream_options={"include_usage": True})
        assert len(server.report().prompt_ids) == usage.prompt_tokens
        assert last.choices == [] and last.usage.model_dump() == usage.model_dump()
        assert last.id == chunks[0].id and not any(chunk.usage for chunk in chunks)
        *_, last = create(**words, **more, stream=True, stream_options={"include_usage": False})
        server.report()
        assert last.choices and last.usage is None


def test_what_the_engine_does_not_do_is_refused_by_name(made: tuple[Path, Path], shared: Served) -> None:
    """By itself the server passes over these, generates, or answers with HTTP 500."""
    words = len(read_gguf(made[1]).tokens)
    chat, text = {"messages": [serving.user("x")]}, {"prompt": "x"}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": ""}), ("prompt", {"prompt": []}), ("prompt", {"prompt": [""]}),
        ("prompt", {"prompt": ["a", "b"]}), ("prompt", {"max_tokens": 2}), ("best_of", text | {"best_of": 2}),
        ("suffix", text | {"suffix": "y"}),
        ("logprobs", text | {"logprobs": 0}),
        ("max_completion_tokens", chat | {"max_completion_tokens": 0}),
        ("tool_choice", chat | {"tool_choice": "required"}), ("reasoning_effort", chat | {"reasoning_effort": "high"}),
        ("modalities", chat | {"modalities": ["audio"]}),
        ("functions", chat | {"functions": [{"name": "f", "parameters": {}}]}),
    ]  # fmt: skip
    for name, value in (
        ("max_tokens", 0),
        ("min_tokens", 4),
        ("logit_bias", {str(words): 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 5}),
        ("stream_options", {"include_usage": True}),  # of no stream
        ("stream_options", {"include_all": True}),
        ("temperature", -1),
        ("temperature", 1e39),  # more than 32 bits hold
        ("logit_bias", {"5": -1e39}),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("repeat_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 10**30),
        ("n", 0),
        ("ignore_eos", True),
        ("repetition_penalty", 1.2),
        ("guided_json", {"type": "object"}),
    ):
        refused += [(name, asked | {name: value}) for asked in (chat, text)]
    for name, body in refused:
        route = "chat/completions" if "messages" in body else "completions"
        with pytest.raises(HttpRefusal, match=f"HTTP 400.*{name}"):
            post(f"{shared.url}/{route}", body, dict)


def test_what_changes_no_answer_is_taken(shared: Served) -> None:
    """Clients send these beside each request."""
    bounds = {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1, "seed": -1, "presence_penalty": -2}
    of_all = {"user": "u", "metadata": {}, "repetition_penalty": 1.0, "ignore_eos": False, "guided_json": None}
    of_chats = {"tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "functions": []}
    for route, asked in (
        ("chat/completions", {"messages": [serving.user("x \U0001f600")]} | of_chats),
        ("completions", {"prompt": "x \U0001f600"}),
    ):
        answers = [
            post(f"{shared.url}/{route}", asked | more | {"max_tokens": 2}, dict)["choices"]
            for more in ({"presence_penalty": -2}, bounds | of_all)
        ]
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("v1/chat/completions", '{"messages": [{"role": "user", "content": "Hi \\ud83d"}]}'),
        ("v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud83d"}], "stream": true}'),
        ("v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": "\\ude00"}]}'),
        ("v1/completions", '{"prompt": "\\ud83d"}'),
        ("v1/completions", '{"prompt": "x", "stop": ["\\ud83d"]}'),
        ("extras/tokenize", '{"input": "\\ud83d"}'),
    ],
)
def test_half_of_a_character_is_no_text(shared: Served, route: str, body: str) -> None:
    url = f"{shared.url.removesuffix('/v1')}/{route}"
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == 400 and "is half of a character" in json.load(answer)["error"]["message"]


@pytest.mark.parametrize("body", ["", "{", "[" * 100_000, '{"seed": ' + "9" * 5000 + "}", b'{"prompt": "\xe9"}'])
def test_what_is_no_json_is_told(shared: Served, body: str | bytes) -> None:
    """A deep one was HTTP 500 without a word."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        request = urllib.request.Request(
            f"{shared.url}/completions", body if isinstance(body, bytes) else body.encode()
        )
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == 400 and "the request is not JSON" in json.load(answer)["error"]["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])  # the first is curl's own
def test_json_that_is_sent_as_something_else_is_told(shared: Served, kind: str) -> None:
    body = json.dumps({"messages": [serving.user("x")], "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{shared.url}/chat/completions", body, {"Content-Type": kind})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert "the body, sent as Content-Type application/json" in json.load(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "NaN"), ("presence_penalty", "-Infinity"), ("logit_bias", '{"5": NaN}')]
)
def test_what_is_no_number_is_refused_by_name(shared: Served, name: str, value: str) -> None:
    """Python reads these words in JSON."""
    body = f'{{"prompt": "x", "max_tokens": 1, "{name}": {value}}}'.encode()
    request = urllib.request.Request(f"{shared.url}/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == 400 and name in json.load(answer)["error"]["message"]


def test_a_prompt_that_begins_with_the_start_token_gets_no_second_one() -> None:
    """As rows that were trained as they stand; `chat --raw` reads them so too."""
    exported = gguf_maker.exported("llama-spm")
    file, tokenizer = exported.file("f16"), load_tokenizer(exported.merged)
    bos, _ = special_texts(read_gguf(file))
    text = f"{bos}Is it raining?"
    expected = tokenizer(text, add_special_tokens=False).input_ids
    assert expected.count(tokenizer.bos_token_id) == 1 and tokenizer(text).input_ids != expected
    with served(job(file)) as running:
        for prompt in (text, text.removeprefix(bos), [text]):
            post(f"{running.url}/completions", {"prompt": prompt, "max_tokens": 1}, dict)
            assert running.report().prompt_ids == expected
        with pytest.raises(HttpRefusal, match=r"HTTP 400.*prompt: the start token alone"):
            post(f"{running.url}/completions", {"prompt": bos}, dict)


NULLABLE = (
    *("temperature", "top_p", "stream", "stop", "n", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "user", "tools", "tool_choice", "parallel_tool_calls", "echo", "best_of", "suffix"),
)


def test_null_and_empty_stops_say_as_much_as_nothing(server: Served) -> None:
    """OpenAI's protocol allows the first, and clients send the second."""
    for route, asked in (("chat/completions", {"messages": [serving.user("x")]}), ("completions", {"prompt": "x"})):
        answers = []
        nothing = dict.fromkeys(NULLABLE, None) | {"stream_options": None, "response_format": {}}
        for more in ({}, nothing, {"stop": [""]}):
            answer = post(f"{server.url}/{route}", asked | {"max_tokens": 4} | more, dict)
            answers.append([answer["choices"], server.report().answer_ids])
        assert answers[0] == answers[1] == answers[2] and len(answers[0][1]) == 4


def test_what_the_model_is_not_loaded_for_is_not_there(shared: Served) -> None:
    with pytest.raises(HttpRefusal, match="HTTP 404"):
        post(f"{shared.url}/embeddings", {"input": "x"}, dict)


def test_a_bias_moves_every_token_of_an_answer(server: Served) -> None:
    """It is added to the logits of any sampling."""
    for route, asked in (("chat/completions", {"messages": [serving.user("x")]}), ("completions", {"prompt": "x"})):
        for temperature in (0, 1):
            words = asked | {"max_tokens": 3, "temperature": temperature, "logit_bias": {"70": 1000}}
            post(f"{server.url}/{route}", words, dict)
            assert server.report().answer_ids == [70, 70, 70]


def test_special_tokens_of_a_call_stay_in_the_answer(made: tuple[Path, Path], server: Served) -> None:
    """Mistral's models begin a call with `[TOOL_CALLS]`. It was left out, so nobody could tell a call from a text."""
    (mark,) = load_tokenizer(made[0])("<|im_start|>", add_special_tokens=False).input_ids
    chat = {"messages": [serving.user("x")], "max_tokens": 2, "logit_bias": {str(mark): 1000}}
    for more, text in (({"tools": [serving.WEATHER]}, "<|im_start|>" * 2), ({}, ""), ({"tools": []}, "")):
        for stream in (False, True):
            if stream:
                chunks = client(server).chat.completions.create(model="x", stream=True, **chat, **more)
                answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                answer = post(f"{server.url}/chat/completions", chat | more, dict)["choices"][0]["message"]["content"]
            assert server.report().answer_ids == [mark, mark] and answer == text
            root = server.url.removesuffix("/v1")
            assert post(f"{root}/extras/detokenize", {"tokens": [mark]}, dict)["text"] == ""
            with pytest.raises(HttpRefusal, match=r"400.*tokens: "):
                post(f"{root}/extras/detokenize", {"tokens": [10**9]}, dict)


def test_with_tool_choice_none_the_model_reads_no_tools(made: tuple[Path, Path], server: Served) -> None:
    """As OpenAI has it, the model then calls none. It read them all, and could call one."""
    chat, prompts = {"messages": [serving.user("Weather?")], "max_tokens": 1}, []
    for more in ({"tool_choice": "none"}, {}, {"tool_choice": "auto"}):
        post(f"{server.url}/chat/completions", chat | more | {"tools": [serving.WEATHER]}, dict)
        prompts.append(load_tokenizer(made[0]).decode(server.report().prompt_ids))
    assert "weather" not in prompts[0] and "weather" in prompts[1] and prompts[1] == prompts[2]


def test_the_models_own_sampling_is_the_default(made: tuple[Path, Path], server: Served) -> None:
    """The server's own class of a request has a penalty of 1.1 and a temperature of 0.8."""
    schemas = get(server.url.removesuffix("/v1") + "/openapi.json", dict)["components"]["schemas"]
    for name in ("CreateChatCompletionRequest", "CreateCompletionRequest"):
        fields = schemas[name]["properties"]
        defaults = {field: fields[field]["default"] for field in ("temperature", "top_k", "top_p", "min_p")}
        assert defaults == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        assert fields["repeat_penalty"]["default"] == 1.0
    repeated = {"messages": [serving.user("again " * 40)], "max_tokens": 12}
    texts = []
    for options in ({}, {"repeat_penalty": 1.0}, {"repeat_penalty": 4.0}):
        answer = post(f"{server.url}/chat/completions", repeated | options, dict)
        texts.append(answer["choices"][0]["message"]["content"])
        server.report()
    assert texts[0] == texts[1] != texts[2]


def first_logits(folder: Path, text: str) -> tuple[list[int], Any]:
    """The ids of a prompt, and the scores of the token behind it by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = load_tokenizer(folder).apply_chat_template(
        [serving.user(text)], tokenize=False, add_generation_prompt=True
    )
    ids = load_tokenizer(folder)(prompt, add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0, -1].tolist()


def test_a_penalty_counts_the_prompt_and_the_whole_answer(made: tuple[Path, Path]) -> None:
    """As transformers has it. By itself the server counts the last 64 tokens of the answer."""
    ids, _ = first_logits(made[0], "Oslo Oslo")
    (there,) = load_tokenizer(made[0])(" Oslo", add_special_tokens=False).input_ids
    assert there in ids and 70 not in ids
    words = {"messages": [serving.user("Oslo Oslo")], "max_tokens": 4, "logit_bias": {there: 300, 70: 250}}
    with served(job(made[1], sampling=Sampling(repetition_penalty=1.5))) as running:
        for more, expected in (({}, [70, there, there, there]), ({"repeat_penalty": 1}, [there] * 4)):
            post(f"{running.url}/chat/completions", words | more, dict)
            assert running.report().answer_ids == expected
        others = {token: 290 for token in range(100, 168) if token not in ids}  # all of them before 70 again
        bias = {"max_tokens": 1 + len(others), "logit_bias": {70: 300, **others}}
        post(f"{running.url}/chat/completions", words | bias, dict)
        assert sorted(running.report().answer_ids[: 1 + len(others)]) == [70, *others] and len(others) > 64


def test_the_temperature_comes_first(made: tuple[Path, Path], server: Served) -> None:
    """Of two tokens with 73 % and 27 %, `top_p` 0.7 takes both at a temperature of 3, where they have 58 % and 42 %."""
    _, scores = first_logits(made[0], "x")
    bias = {"70": 90 - scores[70], "80": 89 - scores[80]}
    words = {"messages": [serving.user("x")], "max_tokens": 1, "logit_bias": bias, "temperature": 3, "top_p": 0.7}
    found = []
    for seed in range(24):
        post(f"{server.url}/chat/completions", words | {"top_k": 2, "seed": seed}, dict)
        found += server.report().answer_ids
    assert set(found) == {70, 80} and 4 <= found.count(80) <= 18


def test_without_a_seed_each_answer_is_another(server: Served) -> None:
    """The server took it from the answer before: behind one with a seed, the next was always the same."""
    words, answers = {"messages": [serving.user("x")], "max_tokens": 6, "temperature": 1}, []
    for seed in (5, None, 5, None):
        post(f"{server.url}/chat/completions", words | {"seed": seed}, dict)
        answers.append(server.report().answer_ids)
    assert answers[0] == answers[2] and answers[1] != answers[3]


def test_texts_that_end_the_models_answers_end_them_here(made: tuple[Path, Path], shared: Served) -> None:
    asked = {"messages": [serving.user("Is it raining?")], "max_tokens": 12}
    whole = post(f"{shared.url}/chat/completions", asked, dict)["choices"][0]["message"]["content"]
    ends = whole[len(whole) // 2 :][:3]
    with served(job(made[1], sampling=Sampling(stops=(ends,)))) as running:
        for more in ({}, {"stop": ["never there"]}, {"stop": None}):
            choice = post(f"{running.url}/chat/completions", asked | more, dict)["choices"][0]
            assert choice["message"]["content"] == whole.partition(ends)[0] and choice["finish_reason"] == "stop"


def test_the_text_of_the_end_token_ends_no_answer(made: tuple[Path, Path], shared: Served) -> None:
    """The token does. `</s>` is HTML too, and a file without an end token got empty answers with HTTP 200."""
    asked = {"messages": [serving.user("Is it raining?")], "max_tokens": 12}
    whole = post(f"{shared.url}/chat/completions", asked, dict)["choices"][0]
    for text in ("", whole["message"]["content"][5:9]):
        with served(job(made[1], eos=text, reports=False)) as running:
            assert post(f"{running.url}/chat/completions", asked, dict)["choices"][0] == whole


def test_a_key_is_asked_for_and_shown_nowhere(made: tuple[Path, Path]) -> None:
    import openai

    with served(job(made[1], api_key=KEY, reports=False)) as locked:
        child = psutil.Process(locked.worker.process.pid)
        told = [*child.cmdline(), *child.environ().values(), locked.worker.log.read_text()]
        assert not any(KEY in text for text in told)
        for wrong in ("another-key-of-somebody", "none"):
            with pytest.raises(openai.AuthenticationError) as caught:
                client(locked, wrong).models.list()
            assert KEY not in str(caught.value)
        assert client(locked, KEY).models.list().data[0].id == "tiny"
        assert KEY not in locked.worker.log.read_text()


def test_pages_of_other_sites_get_nothing(server: Served) -> None:
    """Neither by asking from their own page, nor under a name of theirs that leads here."""
    request = urllib.request.Request(f"{server.url}/models", headers={"Origin": "http://example.com"})
    with urllib.request.urlopen(request) as response:
        assert "access-control-allow-origin" not in {name.lower() for name in response.headers}
    renamed = urllib.request.Request(f"{server.url}/models", headers={"Host": "example.com"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(renamed)
    assert caught.value.code == 400


def test_pages_of_other_sites_get_nothing_at_the_other_address_of_this_machine(made: tuple[Path, Path]) -> None:
    """A name of theirs can lead to ::1 as well as to 127.0.0.1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with served(job(made[1], host="::1", reports=False)) as six:
        assert client(six).models.list().data[0].id == "tiny"
        renamed = urllib.request.Request(f"{six.url}/models", headers={"Host": "example.com"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(renamed)
    assert caught.value.code == 400


def test_it_listens_on_this_machine_alone(server: Served) -> None:
    """Whichever process has the port."""
    port = urllib.parse.urlsplit(server.url).port
    listening = [each.laddr for each in psutil.net_connections() if each.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == port] == ["127.0.0.1"]


def test_a_port_that_is_taken_is_said(made: tuple[Path, Path]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = job(made[1], port=other.getsockname()[1])
        with pytest.raises(UsageError, match=r"cannot listen at 127\.0\.0\.1") as caught, served(taken):
            pass
    assert caught.value.code == "system_error" and "--port" in caught.value.hint


def test_a_template_of_1024_bytes_is_whole(tmp_path: Path) -> None:
    """llama-cpp-python 0.3.36 reads a value of exactly that length without its last byte."""
    template = "{{- 'A' -}}{#-" + "x" * (1024 - len("{{- 'A' -}}{#--#}{{- 'END!' -}}")) + "-#}{{- 'END!' -}}"
    assert len(template.encode()) == 1024
    folder, file = serving.with_template(gguf_maker.exported("llama-chatml"), tmp_path, template)
    expected = load_tokenizer(folder)("AEND!", add_special_tokens=False).input_ids
    with served(job(file)) as own:
        client(own).chat.completions.create(model="tiny", messages=[serving.user("x")], max_tokens=1)
        assert own.report().prompt_ids == expected
    with pytest.raises(VerificationFailed, match="cannot read the chat template"), served(job(file, stock=True)):
        pass


def test_a_file_without_a_template_serves_no_chats(tmp_path: Path, made: tuple[Path, Path]) -> None:
    import openai

    bare = serving.templated(made[1], tmp_path / "bare.gguf", None)
    with served(job(bare)) as text_alone:
        with pytest.raises(openai.NotFoundError):
            client(text_alone).chat.completions.create(model="tiny", messages=[serving.user("x")], max_tokens=1)
        assert client(text_alone).completions.create(model="tiny", prompt="Once", max_tokens=2).choices[0].text


def test_a_broken_file_is_an_error_of_the_command(tmp_path: Path, made: tuple[Path, Path]) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(made[1].read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0nonet", 1))
    with (
        pytest.raises(VerificationFailed, match=r"llama\.cpp cannot load") as caught,
        served(job(made[1], gguf=str(other))),
    ):
        pass
    assert caught.value.code == "bad_gguf"


def test_a_server_that_is_ended_is_an_error_of_the_command(made: tuple[Path, Path]) -> None:
    with pytest.raises(SkillTrainError) as caught, served(job(made[1], reports=False)) as running:
        threading.Timer(0.5, running.worker.process.terminate).start()
        running.wait()
    assert (caught.value.code, caught.value.exit_code) == ("interrupted", 130)
