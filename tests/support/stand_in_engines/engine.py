"""Speaks the protocols of `ollama` and `llama-server` as far as `verify --engine` asks them; llama-cpp-python answers.

Neither program is in the package registries as such. What is asked and answered here is taken from their sources:
Ollama's of 2026-08-21 (server/routes.go, api/types.go), llama.cpp's as in llama-cpp-python 0.3.36 (tools/server). FAULT
changes what it says: `chatml` writes another template than the file's, `ends` never ends an answer, `old` shows no
prompts as Ollama before 0.11.5, `crash` is what Ollama says when its runner ended, `silent` what both say when their
parser does not take an answer (Ollama 0.33.0-rc2, llama-server b10454), `blind` leaves pictures out, `grey` shows grey
ones, `larger` shows them twice as wide and high, `odd` answers with documents of another form, `dies` ends when it is
asked.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

FAULT = os.environ.get("TEST_STAND_IN_FAULT", "")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
MARKERS = {"llama-server": "<__media_StandIn__>", "ollama": "<__ollama_media_0a1b__>"}
loaded: list[Any] = []
projectors: list[Path] = []


def load(file: str, projector: str | None = None) -> None:
    loaded[:] = [llama_cpp.Llama(file, n_ctx=2048, verbose=False, flash_attn=False)]
    projectors[:] = [Path(projector)] if projector else []


def prompt(messages: list[Any], tools: Any) -> str:
    model = loaded[0]
    template = CHATML if FAULT == "chatml" else model.metadata["tokenizer.chat_template"]
    eos, bos = (
        model._model.token_get_text(token) if token >= 0 else "" for token in (model.token_eos(), model.token_bos())
    )
    return str(Jinja2ChatFormatter(template, eos, bos)(messages=messages, tools=tools).prompt)


def tokens(text: str) -> list[int]:
    ids: list[int] = loaded[0].tokenize(text.encode(), add_bos=False, special=True)
    return ids


def lifted(messages: list[Any]) -> tuple[list[Any], list[bytes]]:
    """OpenAI's messages with a marker in place of each picture, as llama.cpp's server gives them to the template."""
    pictures, found = list[bytes](), list[Any]()
    for message in messages:
        text = ""
        for part in message["content"]:
            if part["type"] == "text":
                text += part["text"]
            else:
                pictures.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
                text += marker("llama-server")
        found.append({**message, "content": [{"type": "text", "text": text}]})
    return found, [] if FAULT == "blind" else pictures


def behind(messages: list[Any]) -> tuple[list[Any], list[bytes]]:
    """Ollama's messages with the markers behind the words (llm/llama_server.go)."""
    found, pictures = list[Any](), list[bytes]()
    for message in messages:
        images = message.get("images", [])
        pictures += map(base64.b64decode, images)
        text = message["content"] + len(images) * marker("ollama")
        found.append({"role": message["role"], "content": [{"type": "text", "text": text}]})
    return found, [] if FAULT == "blind" else pictures


def marker(name: str) -> str:
    return "" if FAULT == "blind" else MARKERS[name]


def seen(text: str, pictures: list[bytes], most: int) -> tuple[list[int], str, int]:
    """The greedy answer of the pair to a prompt, without the token that ends it."""
    from skill_train.llama.pictures.answers_worker import PairQuestion, ask
    from skill_train.llama.pictures.compare import Pair

    for name in MARKERS.values():
        text = text.replace(name, "<__media__>")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.png" for number in range(len(pictures))]
        for name, picture in zip(names, pictures, strict=True):
            shown(picture).save(Path(folder) / name)
        asked = PairQuestion(text, names, [], most)
        pair = Pair(Path(loaded[0].model_path), projectors[0])
        result = ask(pair, [asked], folder=Path(folder), threads=1)
    (ids,), (ended,), (count,) = result.answers, result.stopped, result.prompt_tokens
    return (ids[:-1], "stop", count) if ended else (ids, "length", count)


def shown(picture: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if FAULT == "grey":
        return Image.new("RGB", image.size, (127, 127, 127))
    return image.resize((2 * image.width, 2 * image.height)) if FAULT == "larger" else image


def written(ids: list[int]) -> str:
    return str(loaded[0].detokenize(ids).decode(errors="replace"))


def greedy(text: str, most: int) -> tuple[str, str, int]:
    ids = tokens(text)
    done = loaded[0].create_completion(prompt=ids, max_tokens=most, temperature=0, repeat_penalty=1.0)["choices"][0]
    reason = "length" if FAULT == "ends" else done["finish_reason"]
    return done["text"] + (" and on" if FAULT == "ends" else ""), reason, len(ids)


def ollama(path: str, asked: Any) -> Any:
    if path == "/api/version":
        return {"version": "0.0.1-stand-in"}
    if path == "/stand-in/create":
        return load(*asked["files"])
    if FAULT == "odd":
        return {"_debug_info": ["a", "b"]}
    if FAULT == "crash":
        raise RuntimeError("llama runner process has terminated: exit status 2")
    pictures: list[bytes] = []
    if projectors:
        asked["messages"], pictures = behind(asked["messages"])
    text = prompt(asked["messages"], asked.get("tools"))
    if asked.get("_debug_render_only") and FAULT != "old":
        return {"_debug_info": {"rendered_template": text}}
    if FAULT == "silent":
        raise RuntimeError("llama-server chat error: The model produced output that does not match the expected format")
    most = asked["options"]["num_predict"]
    if pictures:
        ids, reason, count = seen(text, pictures, most)
        answer = written(ids)
    else:
        answer, reason, count = greedy(text, most)
    return {"message": {"role": "assistant", "content": answer}, "done_reason": reason, "prompt_eval_count": count}


def llama_server(path: str, asked: Any) -> Any:
    if path == "/health":
        return {"status": "ok"}
    if path == "/props":
        return {"build_info": "b0-stand-in", "media_marker": MARKERS["llama-server"]}
    if FAULT == "odd":
        return {"text": "Hi"}
    if path == "/tokenize":
        return {"tokens": tokens(asked["content"])}
    pictures: list[bytes] = []
    if projectors:
        asked["messages"], pictures = lifted(asked["messages"])
    text = prompt(asked["messages"], asked.get("tools"))
    if path == "/apply-template":
        return {"prompt": text}
    if FAULT == "silent":
        raise RuntimeError("The model produced output that does not match the expected peg-native format")
    most = asked["max_tokens"]
    if pictures:
        ids, reason, count = seen(text, pictures, most)
        told = {"content": [{"id": token, "bytes": [0]} for token in ids]}
        choice = {"message": {"content": written(ids)}, "finish_reason": reason, "logprobs": told}
    else:
        answer, reason, count = greedy(text, most)
        choice = {"message": {"content": answer}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": count}}


def serve(port: int, answer: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(answer(self.path, {}))

        def do_POST(self) -> None:
            if FAULT == "dies" and "create" not in self.path:
                os._exit(3)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._say(answer(self.path, asked))
            except RuntimeError as error:
                self._say({"error": str(error)}, status=500)

        def _say(self, document: Any, status: int = 200) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    name, words = sys.argv[1], sys.argv[2:]
    if words == ["--version"]:
        print(f"{name} version 0.0.1-stand-in")
    elif name == "llama-server":
        load(*(words[words.index(name) + 1] for name in ("-m", "--mmproj") if name in words))
        serve(int(words[words.index("--port") + 1]), llama_server)
    elif words == ["serve"]:
        serve(int(os.environ["OLLAMA_HOST"].split(":")[1]), ollama)
    else:  # create NAME -f Modelfile
        recipe = Path(words[words.index("-f") + 1])
        lines = recipe.read_text(errors="replace").splitlines()
        files = [line.removeprefix("FROM ") for line in lines if line.startswith("FROM ")]
        for file in files:
            if not (recipe.parent / file).is_file():
                sys.exit(f"Error: pull model manifest: https://{file}")  # it is the name of a model then
        data = json.dumps({"files": [str(recipe.parent / file) for file in files]}).encode()
        urllib.request.urlopen(f"http://{os.environ['OLLAMA_HOST']}/stand-in/create", data=data).read()


if __name__ == "__main__":
    main()
