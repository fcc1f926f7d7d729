"""node-llama-cpp, the independent engine that is known to write another prompt.

Optional: NODE_LLAMA_CPP names a folder in which `npm install node-llama-cpp@3.22.1 --ignore-scripts` was run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import serving
from skill_train.reference.load import load_tokenizer
from skill_train.verify.engines.prompts import difference_of_texts

FOLDER = os.environ.get("NODE_LLAMA_CPP", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="NODE_LLAMA_CPP is not set")]

SCRIPT = Path(__file__).parents[1] / "support" / "node_llama_cpp_prompt.mjs"


def written(file: Path, how: str) -> dict[str, Any]:
    words = ["node", str(SCRIPT), FOLDER, str(file), how]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "in_front"),
    [(CHATML, "<|endoftext|><|im_start|>system\\nYou are"), (serving.TOOLS, "<|im_start|>system\\nYou are a helpful")],
    ids=("a family that it knows", "another template"),
)
def test_its_default_prompt_is_named_and_what_to_set_mends_it(tmp_path: Path, template: str, in_front: str) -> None:
    folder, file = serving.with_template(gguf_maker.exported("qwen2"), tmp_path, template)
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(
        [serving.user("Is it raining in Oslo?")], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(text, add_special_tokens=False).input_ids
    default = tokenizer.decode(written(file, "default")["ids"])
    prompt = default[: default.index(text) + len(text)]
    said = difference_of_texts(prompt, text, tokenizer)
    assert said.startswith(f"it puts '{in_front}") and said.endswith("in front of the prompt"), said
    own = written(file, "own")
    assert own["wrapper"] == "JinjaTemplate"
    assert own["ids"][: len(expected)] == expected and len(own["ids"]) <= len(expected) + 1
