"""`chat`: models of a run and files alone, once and in a terminal; what would answer as another model is refused."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gguf_maker
import serving
import shared_runs
from command_child import Commands, Done
from planning import write_recipe_hash
from skill_train.commands._chosen_model import chosen, gguf_of
from skill_train.core.errors import UsageError
from skill_train.evaluate.backends import Model
from skill_train.evaluate.chat.answering import Settings, answering
from skill_train.llama.sampling import Sampling
from skill_train.reference.load import load_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run() -> Path:
    return shared_runs.chain().run


@pytest.fixture(scope="module")
def made() -> gguf_maker.Export:
    return gguf_maker.exported("llama-chatml")


def asked(commands: Commands, *words: object) -> Done:
    return commands.run(Path.cwd(), dict(os.environ), "chat", *words)


def answers(commands: Commands, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(commands, *words).data["answers"]
    return found


def greedy(folder: Path, adapter: Path | None, messages: list[dict[str, str]], most: int) -> str:
    """The answer by transformers' own `generate`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    stops = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=0)
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


QUESTION = "Is it raining in Oslo?"
ENDLESS = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4


def test_each_model_of_a_run_answers_as_transformers_does(commands: Commands, run: Path) -> None:
    """The GGUF file is unquantized, and the same model: so it says what the merged model says."""
    base = Path(json.loads((run / "plan.json").read_text())["recipe"]["model"])
    messages = [{"role": "user", "content": QUESTION}]
    words = ("--prompt", QUESTION, "--max-tokens", 8, "--temperature", 0)
    base_answer, adapter_answer = answers(commands, run, *words, "--file", "base", "--compare", "adapter")
    assert base_answer["answer"] == greedy(base, None, messages, 8)
    assert adapter_answer["answer"] == greedy(base, run / "adapter", messages, 8)
    (merged,) = answers(commands, run, *words, "--file", "merged")
    assert merged["answer"] == greedy(run / "merged", None, messages, 8)
    f16, q8_0 = answers(commands, run, *words, "--file", "f16", "--compare", "q8_0")
    assert f16["answer"] == merged["answer"] and f16["prompt_ids_equal"] is True
    assert q8_0["prompt_tokens"] == f16["prompt_tokens"] == merged["prompt_tokens"]
    assert [each["model"] for each in (f16, q8_0)] == ["run-f16.gguf", "run-q8_0.gguf"]
    assert f16["sampling"] == {"temperature": 0.0} and not f16["stopped"] and f16["answer_tokens"] == 8
    assert f16["device"] == merged["device"] == "cpu"


def test_two_files_of_one_name_are_told_apart(commands: Commands, run: Path, tmp_path: Path) -> None:
    file = run / "gguf" / "run-q8_0.gguf"
    copy = Path(shutil.copy(file, tmp_path))
    both = answers(commands, file, "--prompt", QUESTION, "--max-tokens", 1, "--compare", copy)
    assert [each["model"] for each in both] == [str(file), str(copy)]


def test_where_it_ran_is_said_and_a_gpu_that_is_not_here_is_refused(commands: Commands, run: Path) -> None:
    words = ("--prompt", QUESTION, "--max-tokens", 1)
    both = answers(commands, run, *words, "--file", "f16", "--compare", "merged", "--device", "cpu")
    assert [each["device"] for each in both] == ["cpu", "cpu"]
    for file, program in (("f16", "llama.cpp"), ("merged", "torch")):
        done = asked(commands, run, *words, "--file", file, "--device", "gpu")
        assert done.error == (7, "device_unavailable")
        assert done.answer["error"]["message"].startswith(f"{program} has no GPU here")


def test_without_a_choice_it_is_the_file_of_the_modelfile(commands: Commands, run: Path) -> None:
    (answer,) = answers(commands, run, "--prompt", QUESTION, "--max-tokens", 1)
    assert f"FROM ./{answer['model']}\n" in (run / "gguf" / "Modelfile").read_text()


@pytest.mark.parametrize("word", ["Q4_K_M", "q4-k-m", "q4_k"])
def test_a_type_is_spelt_as_in_export_gguf(run: Path, word: str) -> None:
    assert gguf_of(run, word).model.name == "run-q4_k_m.gguf"


def test_a_model_that_the_run_does_not_have_is_named(commands: Commands, run: Path) -> None:
    refused = asked(commands, run, "--prompt", "x", "--file", "q4_k_x")
    assert refused.error == (2, "missing_file") and "q4_k_m" in refused.answer["error"]["expected"]
    assert asked(commands, run, "--prompt", "x", "--compare", "nothing").error == (2, "missing_file")
    assert asked(commands, "gone.gguf", "--prompt", "x").error == (2, "missing_file")
    assert asked(commands, run, "--prompt", "x", "--image", "gone.png").error == (2, "missing_file")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("mergd", "give one of the expected names"),
        ("Q5_K_M", "skill-train export-gguf {run} --quant q5_k_m"),
        ("auto-4bpw", "give one of the expected names"),
    ],
)
def test_only_a_type_is_to_be_exported(run: Path, word: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(run, word)
    assert (caught.value.code, caught.value.hint) == ("missing_file", hint.format(run=run))


@pytest.mark.parametrize("kind", ["merged", "f16"])
def test_a_text_that_ends_answers_ends_them(made: gguf_maker.Export, kind: str) -> None:
    """`stop_strings`; with the text, as `generate` of transformers leaves it."""
    path, said = made.merged if kind == "merged" else made.file("f16"), []
    for stops in ((), ("a", "e", "i")):
        sampling = Sampling(stops=stops)
        settings = Settings(sampling=sampling, most=16, context=256, raw=False, tokenizer_of=None, device="cpu")
        with answering(Model("m", path), settings) as loaded:
            said.append(loaded.answer([serving.user("Hello")], [], lambda text: None).answer)
    assert not said[0].stopped and said[1].stopped and said[1].tokens < 16
    first = min(place for end in "aei" if (place := said[0].text.find(end)) >= 0)
    assert said[0].text.startswith(said[1].text) and first < len(said[1].text)


def test_seeds_give_other_answers_and_the_same_again(commands: Commands, made: gguf_maker.Export) -> None:
    words = (made.file("f16"), "--prompt", QUESTION, "--max-tokens", 6, "--temperature", 5)
    texts = [answers(commands, *words, "--seed", seed)[0]["answer"] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_a_file_alone_is_asked_with_its_own_template(commands: Commands, made: gguf_maker.Export) -> None:
    words = ("--prompt", QUESTION, "--system", "You are exact.", "--max-tokens", 6)
    (answer,) = answers(commands, made.file("f16"), *words)
    messages = [{"role": "system", "content": "You are exact."}, {"role": "user", "content": QUESTION}]
    assert answer["answer"] == greedy(made.merged, None, messages, 6)
    assert answer["prompt_ids_equal"] is None  # nobody knows the tokenizer
    (raw,) = answers(commands, made.file("f16"), "--prompt", QUESTION, "--max-tokens", 6, "--raw")
    assert raw["prompt_tokens"] < answer["prompt_tokens"] and raw["answer"] != answer["answer"]


def test_an_empty_system_message_is_sent(commands: Commands, made: gguf_maker.Export, tmp_path: Path) -> None:
    """It takes the place of the one that a template writes by itself."""
    folder, file = serving.with_template(made, tmp_path, serving.TOOLS)
    for system in ("", "Be brief."):
        (answer,) = answers(commands, file, "--prompt", QUESTION, "--max-tokens", 1, "--system", system)
        messages = [serving.system(system), serving.user(QUESTION)]
        ids = load_tokenizer(folder).apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert answer["prompt_tokens"] == len(ids["input_ids"])


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_what_is_not_utf_8_is_refused(commands: Commands, run: Path, option: str) -> None:
    words = ("--file", "merged", "--max-tokens", 1, "--prompt", QUESTION, option, os.fsdecode(b"na\xefve"))
    done = asked(commands, run, *words)
    assert done.code == 2 and "not UTF-8" in done.answer["error"]["message"]


def test_a_file_without_a_template_is_refused(commands: Commands, made: gguf_maker.Export, tmp_path: Path) -> None:
    """llama-cpp-python would put llama-2's in its place."""
    bare = serving.templated(made.file("f16"), tmp_path / "bare.gguf", None)
    refused = asked(commands, bare, "--prompt", QUESTION)
    assert refused.error == (2, "no_chat_template") and "--raw" in refused.answer["error"]["hint"]
    assert answers(commands, bare, "--prompt", QUESTION, "--max-tokens", 2, "--raw")


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (
            "{{ 'x' }}{% for m in messages %}{{ tool_choice is none }}{{ m.content }}{% endfor %}",
            (6, "template_mismatch"),
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('never') }}", (2, "template_mismatch")),
        (ENDLESS, (2, "unsafe_file")),
        ("{% for m in messages %}", (2, "template_mismatch")),
    ],
    ids=("differs", "refuses", "endless", "broken"),
)
def test_a_template_that_is_not_rendered_alike_is_refused(
    commands: Commands, made: gguf_maker.Export, tmp_path: Path, template: str, code: tuple[int, str]
) -> None:
    file = serving.templated(made.file("f16"), tmp_path / "model.gguf", template)
    assert asked(commands, file, "--prompt", QUESTION).error == code


def test_the_template_of_a_file_in_a_run_must_be_the_trained_one(commands: Commands, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "gguf" / "run-q8_0.gguf"
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    serving.templated(file, tmp_path / "other.gguf", template).replace(file)
    refused = asked(commands, tmp_path / "run", "--prompt", QUESTION, "--file", "q8_0")
    assert refused.error == (6, "template_mismatch") and "at character" in refused.answer["error"]["got"]


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "lying", "another architecture"])
def test_a_broken_file_is_one_clear_error(
    commands: Commands, made: gguf_maker.Export, tmp_path: Path, kind: str
) -> None:
    good, file = made.file("q8_0").read_bytes(), tmp_path / "bad.gguf"
    bad = {
        "empty": b"",
        "text": b"not a model\n" * 50,
        "cut": good[: len(good) // 2],
        "lying": good[:16] + b"\xff" * 8 + good[24:],
        "another architecture": good.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0nonet", 1),
    }
    file.write_bytes(bad[kind])
    refused = asked(commands, file, "--prompt", QUESTION)
    assert refused.error == (6, "bad_gguf")
    assert refused.answer["error"]["hint"] and "Traceback" not in refused.stderr


def test_a_prompt_that_is_too_long_says_so(commands: Commands, made: gguf_maker.Export, run: Path) -> None:
    for word in ("--file", "--raw"):
        extra = () if word == "--file" else (word,)
        refused = asked(commands, made.file("f16"), "--prompt", "word " * 600, "--context", 256, *extra)
        assert refused.error == (2, "bad_usage") and "256 tokens" in refused.answer["error"]["expected"]
        assert "--context" in refused.answer["error"]["hint"]
    for model in ((made.file("f16"),), (run, "--file", "merged")):  # 2048 is all that the models were made for
        refused = asked(commands, *model, "--prompt", "word " * 3000, "--context", 4096)
        assert refused.error == (2, "bad_usage") and "2048 tokens" in refused.answer["error"]["expected"]
        assert "--context" not in refused.answer["error"]["hint"]


def test_a_run_of_bare_text_continues_it(commands: Commands, run: Path, tmp_path: Path) -> None:
    """Its rows had no template, whatever the base's says."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    plan = json.loads((copy / "plan.json").read_text())
    plan["recipe"]["format"] = "completion"
    (copy / "plan.json").write_text(json.dumps(plan))
    write_recipe_hash(copy)
    done = asked(commands, copy, "--prompt", "Once upon", "--max-tokens", 4, "--file", "merged", "--compare", "f16")
    assert done.data["mode"] == "completion"
    merged, f16 = done.data["answers"]
    assert merged["answer"] == f16["answer"] and f16["prompt_ids_equal"] is True
    refused = asked(commands, copy, "--prompt", "Once", "--system", "Be exact.")
    assert refused.error == (2, "bad_usage")


def test_a_run_whose_base_is_away_has_files_to_give_alone(commands: Commands, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    plan = json.loads((copy / "plan.json").read_text())
    plan["recipe"]["model"] = str(tmp_path / "away")
    (copy / "plan.json").write_text(json.dumps(plan))
    write_recipe_hash(copy)
    words = ("--prompt", QUESTION, "--max-tokens", 2)
    done = asked(commands, copy, *words)
    hint = done.answer["error"]["hint"]
    assert done.error == (2, "missing_file") and "; or give a file alone, which needs no base: " in hint
    assert answers(commands, hint.split(": ")[-1], *words)


def test_nobody_in_a_terminal_needs_a_prompt(commands: Commands, made: gguf_maker.Export) -> None:
    refused = asked(commands, made.file("f16"))
    assert refused.error == (2, "bad_usage") and "--prompt" in refused.answer["error"]["expected"]


def typed(words: list[str], lines: list[str]) -> tuple[int, str]:
    """What a person sees who types these lines into a terminal, and the exit code."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "skill_train", "chat", *words]
    environment = dict(os.environ, TERM="dumb", COLUMNS="100")
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        seen, waiting, end, line = b"", list(lines), time.monotonic() + 60, ""
        while time.monotonic() < end:
            if not select.select([master], [], [], 5)[0]:
                if line == "\x03":  # Python loses one that comes right before it blocks in read()
                    process.send_signal(signal.SIGINT)
                continue
            try:
                part = os.read(master, 4096)
            except OSError:  # the other side has closed
                break
            seen += part
            if waiting and seen.endswith(b"> "):
                line = waiting.pop(0)
                if line == "\x03":  # this is not its controlling terminal
                    process.send_signal(signal.SIGINT)
                else:
                    os.write(master, line.encode(errors="surrogateescape"))
                seen += b"<typed>"
        if time.monotonic() > end:
            process.kill()
        code = process.wait(30)
    os.close(master)
    return code, seen.decode(errors="replace")


def test_a_conversation_in_a_terminal(made: gguf_maker.Export) -> None:
    """Two turns: the second is asked with the first, so its prompt is longer; Ctrl-D ends it."""
    file = str(made.file("f16"))
    code, seen = typed([file, "--max-tokens", "6"], ["Hello\n", "And now?\n", "\x04"])
    assert code == 0, seen
    assert "temperature 0 (the file names no temperature: greedy)" in seen
    first = [{"role": "user", "content": "Hello"}]
    answer = greedy(made.merged, None, first, 6)
    second = greedy(
        made.merged,
        None,
        [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}],
        6,
    )
    plain = seen.replace("\r", "")
    assert answer.replace("\x0c", "�") in plain and second.replace("\x0c", "�") in plain
    assert plain.count("(cut by --max-tokens, or by the context)") == 2
    code, seen = typed([file, "--max-tokens", "1"], ["\n", "na\udcefve\n", "\x04"])  # as Latin-1 has it
    assert code == 0 and "Traceback" not in seen and seen.count("(cut by") == 1, seen
    code, seen = typed([file, "--max-tokens", "200"], ["Hello\n", "\x03"])
    assert code == 0, seen


def test_a_turn_beyond_the_context_leaves_the_conversation(made: gguf_maker.Export, run: Path) -> None:
    """It ended the command, and with it the conversation. The refused turn is not a part of the next prompt."""
    turns = ["Hello\n", "word " * 200 + "\n", "And now?\n", "\x04"]
    for words, model in (([str(made.file("f16"))], made.merged), ([str(run), "--file", "merged"], run / "merged")):
        code, seen = typed([*words, "--max-tokens", "6", "--context", "128"], turns)
        assert code == 0, seen
        assert seen.count("the prompt is longer than the context") == 1 and "fewer than 128 tokens" in seen
        messages = [{"role": "user", "content": "Hello"}]
        messages.append({"role": "assistant", "content": greedy(model, None, messages, 6)})
        messages.append({"role": "user", "content": "And now?"})
        assert greedy(model, None, messages, 6).replace("\x0c", "�") in seen.replace("\r", "")


def test_a_file_that_failed_its_proof_or_changed_since_is_told(commands: Commands, run: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(run, tmp_path / "run"))
    words = ("--prompt", QUESTION, "--max-tokens", 1, "--compare")
    file = mine / "gguf" / "run-q8_0.gguf"
    content = file.read_bytes()
    file.write_bytes(content + bytes(32))
    assert _unproven(asked(commands, mine, "--file", "q4_k_m", *words, "q8_0")) == ["run-q8_0.gguf changed after it"]
    file.write_bytes(content)
    assert _unproven(asked(commands, mine, "--file", "q4_k_m", *words, "q8_0")) == []
    (tmp_path / "other.gguf").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(tmp_path / "other.gguf", (0, 0))
    (tmp_path / "other.gguf").rename(file)
    assert _unproven(asked(commands, mine, "--file", "q4_k_m", *words, "q8_0")) == ["run-q8_0.gguf changed after it"]
    assert commands.run(Path.cwd(), dict(os.environ), "verify", mine, "--tokens", 64).code == 6
    said = _unproven(asked(commands, mine, "--file", "q8_0", *words, "q4_k_m"))
    assert len(said) == 1 and said[0].startswith("run-q8_0.gguf failed it: digest")
    assert _unproven(asked(commands, mine, "--file", "q4_k_m", *words, "merged")) == []
    (mine / "verify.json").unlink()
    for command in (("chat", mine, "--file", "q8_0", *words, "q4_k_m"), ("bench", mine, "--rounds", 1)):
        done = commands.run(Path.cwd(), dict(os.environ), *command)
        (said,) = [each["message"] for each in done.answer["warnings"] if each["code"] == "not_proven"]
        assert said.startswith(f"{mine / 'quantize.json'}: run-q8_0.gguf is not the file that was exported; ")
        assert said.endswith(f"then skill-train export-gguf {mine} --quant q8_0")
    file.write_bytes(content)  # the exported one again, at another time
    assert _unproven(asked(commands, mine, "--file", "q8_0", *words, "q4_k_m")) == []


def _unproven(done: Done) -> list[str]:
    """What the warnings say of files and their proof, without its path."""
    said = [each["message"] for each in done.answer["warnings"] if each["code"] == "not_proven"]
    assert all("verify.json: " in each for each in said)
    return [each.partition("verify.json: ")[2] for each in said]
