"""Speaks the protocols of `ollama` and `llama-server` as far as `verify --engine` asks them; llama-cpp-python answers.

Neither program is in the package registries as such. What is asked and answered here is taken from their sources:
Ollama's of 2026-08-21 (server/routes.go, api/types.go), llama.cpp's as in llama-cpp-python 0.3.36 (tools/server). FAULT
changes what it says: `chatml` writes another template than the file's, `ends` never ends an answer, `old` shows no
prompts as Ollama before 0.11.5, `crash` is what Ollama says when its runner ended, `silent` what both say when their
parser does not take an answer (Ollama 0.33.0-rc2, llama-server b10454).
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

FAULT = os.environ.get("STAND_IN_FAULT", "")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
loaded: list[Any] = []


def load(file: str) -> None:
    loaded[:] = [llama_cpp.Llama(file, n_ctx=2048, verbose=False, flash_attn=False)]


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


def greedy(text: str, most: int) -> tuple[str, str, int]:
    ids = tokens(text)
    done = loaded[0].create_completion(prompt=ids, max_tokens=most, temperature=0, repeat_penalty=1.0)["choices"][0]
    reason = "length" if FAULT == "ends" else done["finish_reason"]
    return done["text"] + (" and on" if FAULT == "ends" else ""), reason, len(ids)


def ollama(path: str, asked: Any) -> Any:
    if path == "/api/version":
        return {"version": "0.0.1-stand-in"}
    if path == "/stand-in/create":
        return load(asked["file"])
    if FAULT == "crash":
        raise RuntimeError("llama runner process has terminated: exit status 2")
    text = prompt(asked["messages"], asked.get("tools"))
    if asked.get("_debug_render_only") and FAULT != "old":
        return {"_debug_info": {"rendered_template": text}}
    if FAULT == "silent":
        raise RuntimeError("llama-server chat error: The model produced output that does not match the expected format")
    answer, reason, count = greedy(text, asked["options"]["num_predict"])
    return {"message": {"role": "assistant", "content": answer}, "done_reason": reason, "prompt_eval_count": count}


def llama_server(path: str, asked: Any) -> Any:
    if path == "/health":
        return {"status": "ok"}
    if path == "/props":
        return {"build_info": "b0-stand-in"}
    if path == "/tokenize":
        return {"tokens": tokens(asked["content"])}
    text = prompt(asked["messages"], asked.get("tools"))
    if path == "/apply-template":
        return {"prompt": text}
    if FAULT == "silent":
        raise RuntimeError("The model produced output that does not match the expected peg-native format")
    answer, reason, count = greedy(text, asked["max_tokens"])
    choice = {"message": {"content": answer}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": count}}


def serve(port: int, answer: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(answer(self.path, {}))

        def do_POST(self) -> None:
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
        load(words[words.index("-m") + 1])
        serve(int(words[words.index("--port") + 1]), llama_server)
    elif words == ["serve"]:
        serve(int(os.environ["OLLAMA_HOST"].split(":")[1]), ollama)
    else:  # create NAME -f Modelfile
        recipe = Path(words[words.index("-f") + 1])
        file = next(line for line in recipe.read_text().splitlines() if line.startswith("FROM ")).removeprefix("FROM ")
        if not (recipe.parent / file).is_file():
            sys.exit(f"Error: pull model manifest: https://{file}")  # it is the name of a model then
        data = json.dumps({"file": str(recipe.parent / file)}).encode()
        urllib.request.urlopen(f"http://{os.environ['OLLAMA_HOST']}/stand-in/create", data=data).read()


if __name__ == "__main__":
    main()
