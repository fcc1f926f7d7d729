"""`serve` as a process: it says where it listens, answers OpenAI's client, ends with Ctrl-C; and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import gguf_maker
import serving
import shared_runs
from command_child import Commands, Done

pytestmark = pytest.mark.slow

KEY = "s3cret-of-the-owner-0001"


@pytest.fixture(scope="module")
def file() -> Path:
    return gguf_maker.exported("llama-chatml").file("f16")


@contextmanager
def started(*words: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and its address."""
    command = [sys.executable, "-m", "skill_train", "serve", *map(str, words), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **environment)
    ) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "http://" in line)
            yield process, line.split()[2]
        finally:
            process.kill()


def refused(commands: Commands, *words: object, **environment: str) -> Done:
    return commands.run(Path.cwd(), dict(os.environ, **environment), "serve", *words)


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """`nohup make test` ignores SIGHUP, and so would what starts here."""
    own = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, own)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_it_is_ended_and_leaves_nothing(file: Path, tmp_path: Path, how: signal.Signals) -> None:
    """With Ctrl-C, `kill`, or the closing of the terminal."""
    import openai

    with started(file, TMPDIR=str(tmp_path)) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="x", messages=[serving.user("Hello")], max_tokens=4)
        assert answer.choices[0].message.content
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        out, rest = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in rest and not list(tmp_path.iterdir())
    data = json.loads(out)["data"]
    assert data["url"] == url and data["engine"].startswith("llama_cpp.server ") and data["device"] == "cpu"
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
    with socket.socket() as bound:  # the port is free again
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", int(url.split(":")[2].split("/")[0])))


def test_the_key_comes_from_a_variable_and_is_told_to_nobody(file: Path) -> None:
    import openai

    with started(file, "--api-key", "env:OWN_KEY", OWN_KEY=KEY) as (process, url):
        command = psutil.Process(process.pid)
        told = [word for each in [command, *command.children(recursive=True)] for word in each.cmdline()]
        assert not any(KEY in word for word in told)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
        assert openai.OpenAI(base_url=url, api_key=KEY, max_retries=0).models.list().data
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert process.returncode == 0 and KEY not in out + rest


def test_other_machines_need_a_key(commands: Commands, file: Path, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example"):  # noqa: S104
        done = refused(commands, file, "--host", host)
        assert done.error == (2, "bad_usage") and "--api-key" in done.answer["error"]["expected"]
    short = tmp_path / "short"
    short.write_text("short\n")
    for source in ("env:NOT_SET_ANYWHERE", "env:", short):
        assert refused(commands, file, "--host", "0.0.0.0", "--api-key", source).error == (2, "bad_usage")  # noqa: S104


def test_a_key_on_the_command_line_is_refused_and_not_repeated(commands: Commands, file: Path) -> None:
    done = refused(commands, file, "--api-key", KEY)
    assert done.error == (2, "secret_found")
    assert KEY not in done.stdout + done.stderr


def test_only_gguf_files_are_offered(commands: Commands, file: Path, tmp_path: Path) -> None:
    """It offered base, adapter and merged, which `chat` takes, and spoke of `chat` and its --file."""
    alone = refused(commands, file, "--quant", "q4_k_m").answer["error"]
    assert (alone["code"], alone["got"], alone["hint"]) == ("bad_usage", "--quant q4_k_m", "leave --quant out")
    made = shared_runs.chain().run
    files = "run-f16.gguf, run-q4_k_m.gguf, run-q8_0.gguf"
    for word in ("q9", "merged", "base"):
        none = refused(commands, made, "--quant", word).answer["error"]
        assert (none["code"], none["expected"]) == ("missing_file", files)
        assert none["message"].startswith(f"{made} has no GGUF file '{word}'")
        assert none["hint"] == "give one of the expected names"
    bare = shutil.copytree(made, tmp_path / "bare", ignore=shutil.ignore_patterns("gguf"))
    none = refused(commands, bare, "--quant", "merged").answer["error"]
    assert (none["expected"], none["hint"]) == ("a file in gguf/", f"skill-train export-gguf {bare}")
    # The file of an adapter alone, by its record: both commands said that there is no file.
    (bare / "gguf").mkdir()
    shutil.copy(made / "gguf" / "run-f16.gguf", bare / "gguf")
    (bare / "convert.json").rename(bare / "lora_gguf.json")
    benched = commands.run(tmp_path, dict(os.environ), "bench", bare)
    for none, code in ((refused(commands, bare), "missing_step"), (benched, "missing_file")):
        error = none.answer["error"]
        assert (error["code"], error["message"]) == (code, f"{bare} has no GGUF file of a whole model")


def test_what_it_cannot_serve_right_is_refused(commands: Commands, file: Path, tmp_path: Path) -> None:
    bare = serving.templated(file, tmp_path / "bare.gguf", None)
    assert refused(commands, bare, "--port", 0).error == (2, "no_chat_template")
    other = "{% for m in messages %}{{ tool_choice is none }}{{ m.content }}{% endfor %}"
    differs = serving.templated(file, tmp_path / "differs.gguf", other)
    assert refused(commands, differs, "--port", 0).error == (6, "template_mismatch")
    assert refused(commands, file, "--port", 0, "--device", "gpu").error == (7, "device_unavailable")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:100_000])
    assert refused(commands, cut, "--port", 0).error == (6, "bad_gguf")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = refused(commands, file, "--port", taken.getsockname()[1])
    assert done.error == (2, "system_error") and "--port" in done.answer["error"]["hint"]
