"""The console script as a program: bad input, kills, two calls in one folder. A good run is in test_chain.py."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killing
import shared_runs
import tiny
import training
from command_child import Commands
from skill_train.core.files import place

pytestmark = pytest.mark.slow

SMALL = shared_runs.SMALL


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run of tests/commands/test_chain.py: trained, merged, exported and verified."""
    return Path(shutil.copytree(shared_runs.chain().run, tmp_path / "run"))


# --- Bad input: one clear error, nothing left behind ---

GOOD = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
LINE = json.dumps(GOOD) + "\n"
BAD: list[tuple[str, str | None, str, str]] = [
    ("missing file", None, "missing_file", "rows.jsonl"),
    ("empty file", "", "empty_dataset", "no rows"),
    ("broken line", LINE + LINE + '{"messages": [\n' + LINE, "unreadable_dataset", "line 3 of"),
    ("wrong columns", '{"a": 1}\n', "wrong_columns", "rows.jsonl"),
    ("DPO pairs", '{"prompt": "2+2?", "chosen": "4", "rejected": "5"}\n', "wrong_columns", "DPO"),
    ("no answer", LINE + '{"messages": [{"role": "user", "content": "2+2?"}]}\n', "bad_row", "line 2 of"),
]


@pytest.mark.parametrize(("content", "code", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_data_is_refused(tmp_path: Path, content: str | None, code: str, words: str) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    before = _tree(tmp_path)
    done = _call(tmp_path, "local", "--model", tiny.cached("gemma"), "--data", "rows.jsonl", "--run-dir", "run")
    _assert_refused(done, code, words)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize(
    ("recipe", "code", "words"),
    [
        ("model: m\ndata: rows.jsonl\nlearning_rat: 1e-4\n", "bad_recipe", "did you mean 'learning_rate'"),
        ("model: m\ndata: rows.jsonl\nmax_length: long\n", "bad_recipe", "max_length"),
        ("data: rows.jsonl\n", "bad_recipe", "no model"),
        ("model: [\n", "bad_recipe", "recipe.yaml"),
        ("model: ./nowhere\ndata: rows.jsonl\n", "unknown_model", "nowhere"),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path: Path, recipe: str, code: str, words: str) -> None:
    (tmp_path / "rows.jsonl").write_text(LINE)
    (tmp_path / "recipe.yaml").write_text(recipe)
    before = _tree(tmp_path)
    _assert_refused(_call(tmp_path, "local", "recipe.yaml"), code, words)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "code"), [({"model_type": "brandnew"}, "unknown_model_type"), (None, "broken_model")]
)
def test_a_model_that_cannot_be_used_is_refused(tmp_path: Path, change: dict[str, str] | None, code: str) -> None:
    base = _base(tmp_path)
    if change:
        (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | change))
    else:
        (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-100])
    (tmp_path / "rows.jsonl").write_text(LINE)
    before = _tree(tmp_path)
    done = _call(tmp_path, "local", "--model", base, "--data", "rows.jsonl", "--run-dir", "run")
    _assert_refused(done, code, "brandnew" if change else "model.safetensors")
    assert _tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("lokal",), "bad_usage"),
        (("local", "--max-steps", "0"), "bad_usage"),
        (("local", "--device", "tpu"), "bad_usage"),
        (("export-gguf", "nowhere"), "not_a_run"),
        (("export-gguf",), "bad_usage"),
        (("merge", "nowhere"), "not_a_run"),
        (("verify", "nowhere"), "not_a_run"),
        (("local", "--resume", "--run-dir", "nowhere"), "not_a_run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_usage_is_refused(tmp_path: Path, arguments: tuple[str, ...], code: str) -> None:
    _assert_refused(_call(tmp_path, *arguments), code, "")
    assert not list(tmp_path.iterdir())


def test_rows_without_anything_to_learn_leave_no_run_behind(tmp_path: Path) -> None:
    """Known only after tokenizing, so the program finds it: the folder it had begun is taken away again."""
    (tmp_path / "rows.jsonl").write_text(LINE)
    before = _tree(tmp_path)
    arguments = ("--model", tiny.cached("gemma"), "--data", "rows.jsonl", "--max-length", "3", "--run-dir", "run")
    done = _call(tmp_path, "local", *arguments)
    _assert_refused(done, "nothing_to_train", "no token to train on (lines 1)")
    assert _tree(tmp_path) == before


@pytest.mark.parametrize(
    "words", [".", "..", *(pytest.param(w, marks=pytest.mark.torture) for w in ("./", "../model"))]
)
def test_a_model_folder_may_be_called_by_where_it_is(commands: Commands, tmp_path: Path, words: str) -> None:
    """Its files come beside it, whatever way leads there."""
    model = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "model"))
    place = model / "inside" if words == ".." else model
    place.mkdir(exist_ok=True)
    done = _warm(commands, place, "export-gguf", words, "--quant", "f16")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model-gguf" / "model-f16.gguf").is_file()
    assert _answer(_warm(commands, place, "export-gguf", words, "--quant", "f16"))["data"]["reused"] is True


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_the_shell_closed_changes_no_exit_code(tmp_path: Path, closed: str) -> None:
    training.write_data(tmp_path, [{"text": f"row {n}"} for n in range(3)])
    command = "from skill_train.cli import main; main()"
    for words, code in ((["data", "rows.jsonl"], 0), (["data", "none.jsonl"], 2), (["--version"], 0)):
        line = shlex.join([sys.executable, "-c", command, *words])
        done = subprocess.run(f"{line} {closed}", cwd=tmp_path, shell=True, capture_output=True, text=True, check=False)  # noqa: S602
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        if closed == "2>&-" and words[0] == "data":
            assert json.loads(done.stdout)["ok"] is (code == 0)  # one document, and no line of progress


def test_an_export_of_a_model_writes_into_no_run(run: Path, tmp_path: Path) -> None:
    model = tiny.cached("gemma")
    before = sorted(path.name for path in (run / "gguf").iterdir())
    for out in (run, run / "gguf"):
        _assert_refused(_call(tmp_path, "export-gguf", model, "--out", out, "--quant", "f16"), "bad_usage", str(out))
    assert sorted(path.name for path in (run / "gguf").iterdir()) == before
    file = tmp_path / "model.gguf"
    file.write_bytes(b"mine")
    done = _call(tmp_path, "export-gguf", model, "--out", file, "--quant", "f16")
    _assert_refused(done, "output_exists", "model.gguf is a file")
    assert file.read_bytes() == b"mine"
    _assert_refused(_call(tmp_path, "export-gguf", model, "--lora"), "bad_usage", "--lora")


def test_a_proof_takes_the_place_of_a_proof_alone(run: Path, tmp_path: Path) -> None:
    """A user wrote one over the plan of her run, which was not a run then."""
    (tmp_path / "mine.json").write_text('{"my": 1}')
    (tmp_path / "list.json").write_text("[]")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    others = [tmp_path / "mine.json", tmp_path / "list.json"]
    kept = {path: path.read_bytes() for path in (run / "plan.json", run / "merge.json", *others)}
    for out in (*kept, tmp_path / "pipe", tmp_path / "loop"):
        _assert_refused(_call(tmp_path, "verify", run, "--out", out), "output_exists", str(out))
    for name in ("rows.jsonl", "notes.txt"):
        (tmp_path / name).write_text('{"text": "mine"}\n{"text": "too"}\n')
        said = f"{tmp_path / name} already exists and is not a proof"
        _assert_refused(_call(tmp_path, "verify", run, "--out", tmp_path / name), "output_exists", said)
    assert {path: path.read_bytes() for path in kept} == kept and (tmp_path / "pipe").is_fifo()


def test_places_without_a_name_are_refused_before_anything_is_written(commands: Commands, tmp_path: Path) -> None:
    """A merged model takes the place of an empty folder; a shell that stands in it would be left in none."""
    base = tiny.cached("gemma")
    adapter, empty = tiny.adapter(base, tmp_path / "adapter", targets=["q_proj"]), tmp_path / "empty"
    empty.mkdir()
    shutil.copy(base / "config.json", tmp_path / "model.gguf")
    before = _tree(tmp_path)
    for out, words in ((".", "is the current directory"), ("..", "not empty"), ("/", "not empty")):
        done = _warm(commands, empty, "merge", "--base", base, "--adapter", adapter, "--out", out)
        _assert_refused(done, "output_exists", words)
    for file in (".", "/"):
        _assert_refused(
            _warm(commands, empty, "verify", "--reference", base, "--gguf", file),
            "missing_file",
            f"{file} is not a file",
        )
    for out in (".", "..", "/"):
        done = _warm(commands, empty, "verify", "--reference", base, "--gguf", "../model.gguf", "--out", out)
        _assert_refused(done, "bad_usage", f"{out} is a folder")
    assert _tree(tmp_path) == before


# --- A run that fails, and one that is in use ---


def test_a_loss_that_is_no_number_is_explained(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    base = _base(tmp_path)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    tiny.write_rows(tmp_path / "rows.jsonl", 4)
    arguments = ("--model", base, "--data", "rows.jsonl", *SMALL, "--run-dir", "run")
    done = _call(tmp_path, "local", *arguments)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    error = _answer(done)["error"]
    assert error["code"] == "bad_loss" and "is nan at step 1" in error["message"]
    assert (tmp_path / "run" / "train.failed.json").is_file() and not (tmp_path / "run" / "train.json").exists()


def test_an_interrupted_run_goes_on_as_its_hint_says(tmp_path: Path) -> None:
    """Ctrl-C without a terminal: the command passes it on, the program saves a checkpoint, and the hint finishes it."""
    tiny.write_rows(tmp_path / "rows.jsonl", 24)
    recipe = f"model: {tiny.cached('gemma')}\ndata: rows.jsonl\nmax_steps: 30\neffective_batch_size: 2\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    command = [shared_runs.script(), "local", "recipe.yaml", "--run-dir", "run"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        for line in process.stderr:
            if line.startswith("training: "):
                process.send_signal(signal.SIGINT)
                break
        stdout, stderr = process.communicate(timeout=100)
    stopped = _answer(subprocess.CompletedProcess(command, process.returncode, stdout, stderr))
    assert (process.returncode, stopped["error"]["code"]) == (130, "interrupted"), stderr
    assert stopped["error"]["hint"] == "skill-train local --resume --run-dir run"
    assert not (tmp_path / "run" / "train.json").exists()
    done = _call(tmp_path, *stopped["error"]["hint"].split()[1:])
    assert done.returncode == 0, done.stderr
    assert _answer(done)["data"]["steps"] == 30
    assert "resuming from checkpoint-" in done.stderr
    assert [line["step"] for line in training.metrics(tmp_path / "run")] == list(range(1, 31))


def test_ctrl_c_while_python_leaves_changes_nothing() -> None:
    """The result is said already. Python ends its modules after it has given up its own handler of the signal."""
    program = (
        "import os, signal\n"
        "from skill_train.cli import main\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGINT):\n"
        "        kill(me, number)\n"
        "late = Late()\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("skill-train")


# Where a kill leaves a result that no record names, which is the worst place: the next call finds a finished file, and
# the note that describes it.
UNRECORDED = {
    "merge": (("merge", "run"), "merge.json", "os.rename .merged.made.json"),
    "convert": (("export-gguf", "run", "--quant", "f16"), "convert.json", "os.rename .run-f16.gguf.made.json"),
    "quantize": (("export-gguf", "run", "--quant", "q8_0,q4_k_m"), "quantize.json", "open .quantize.json"),
}
FILES = {"merge": set(), "convert": {"run-f16.gguf"}, "quantize": {"run-f16.gguf", "run-q8_0.gguf", "run-q4_k_m.gguf"}}
LEFT = {"merge": "merged/model.safetensors", "convert": "gguf/run-f16.gguf", "quantize": "gguf/run-q8_0.gguf"}
MADE_BY = {"merge": ["merged", "merge.json"], "convert": ["gguf", "convert.json"], "quantize": ["quantize.json"]}


@pytest.mark.parametrize(
    "step", ["merge", *(pytest.param(s, marks=pytest.mark.torture) for s in ("convert", "quantize"))]
)
def test_a_kill_before_the_record_is_gone_on_from(run: Path, tmp_path: Path, step: str) -> None:
    """The long campaign is `make torture`."""
    command, record, moment = UNRECORDED[step]
    place = run.parent
    whole = {name: {digest} for name, digest in killing.contents(run).items()}
    for later in list(MADE_BY)[list(MADE_BY).index(step) :]:
        for made in (place / "run" / name for name in MADE_BY[later]):
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    for file in (place / "run").glob("gguf/*-q*.gguf"):
        file.unlink()
    killed = killing.Step(step, command, place, dict(os.environ))
    assert not killing.struck(killed, place, tmp_path / "log", killing.Moment(operation=moment))
    assert not (place / "run" / record).exists() and killing.torn(place / "run", whole) == []
    left = (place / "run" / LEFT[step]).stat().st_mtime_ns
    assert killing.finish(killed, place) == []
    (place / "run" / "gguf" / "Modelfile").unlink(missing_ok=True)  # it names another file
    assert (place / "run" / record).is_file() and killing.torn(place / "run", whole) == []
    assert (
        place / "run" / LEFT[step]
    ).stat().st_mtime_ns == left  # taken as it is, and neither made again nor set aside
    assert not any(".unrecorded-" in path.name or ".made." in path.name for path in (place / "run").rglob("*"))
    made = killing.contents(place / "run")
    assert {Path(name).name for name in made if Path(name).match("gguf/*.gguf")} == FILES[step]


# The result without a run, and what of it the kill finds: a whole result that has no record yet.
WITHOUT_A_RUN = {
    "merge": ("m", ("merge", "--base", "base", "--adapter", "adapter", "--out", "run/m"), "m.merge.json"),
    "convert": ("g/base-f16.gguf", ("export-gguf", "base", "--out", "run/g", "--quant", "f16"), "g/convert.json"),
    "quantize": ("g/base-q8_0.gguf", ("export-gguf", "base", "--out", "run/g", "--quant", "q8_0"), "g/quantize.json"),
}


@pytest.mark.parametrize(
    "step", ["quantize", *(pytest.param(s, marks=pytest.mark.torture) for s in ("merge", "convert"))]
)
def test_without_a_run_too_the_same_command_again_finishes(tmp_path: Path, step: str) -> None:
    """It takes over what it made, and nothing else: a result that was changed since is somebody's."""
    shutil.copytree(tiny.cached("gemma", hidden=256), tmp_path / "base")
    tiny.adapter(tmp_path / "base", tmp_path / "adapter", targets=["q_proj"])
    (tmp_path / "run").mkdir()
    result, command, record = WITHOUT_A_RUN[step]
    killed = killing.Step(step, command, tmp_path, dict(os.environ))
    made, record = tmp_path / "run" / result, tmp_path / "run" / record
    note = f".{made.name}.made.json" if step == "merge" else f"g/.{made.name}.made.json"
    moment = "open g/.quantize.json" if step == "quantize" else f"os.rename {note}"
    assert not killing.struck(killed, tmp_path, tmp_path / "log", killing.Moment(operation=moment))
    assert made.exists() and not record.exists()
    before, changed = made.stat().st_ino, Path(shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-changed"))
    assert killing.finish(killed, tmp_path) == []
    assert record.is_file() and made.stat().st_ino == before and not (tmp_path / "run" / note).exists()
    outputs = json.loads(record.read_text())["outputs"]
    assert all((record.parent / name).stat().st_size == digest["bytes"] for name, digest in outputs.items())
    file = changed / "run" / result / "config.json" if step == "merge" else changed / "run" / result
    file.write_bytes(file.read_bytes() + b" ")
    (refused,) = killing.finish(killed, changed)
    assert "output_exists" in refused and file.read_bytes().endswith(b" ")


def test_files_beside_the_weights_they_were_made_of_are_found_again(commands: Commands, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny.cached("gemma"), tmp_path / "model"))
    for reused in (False, True):
        done = _warm(commands, model, "export-gguf", ".", "--out", ".", "--quant", "q8_0")
        assert _answer(done)["ok"] and _answer(done)["data"]["reused"] is reused, done.stderr


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    data, run = training.write_data(tmp_path, [GOOD]), tmp_path / "run"
    run.mkdir()
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{place()}\nprocess 1 (another test)")
        lock.flush()
        done = _call(tmp_path, "local", "--model", tiny.cached("gemma"), "--data", data, "--run-dir", run)
    _assert_refused(done, "run_in_use", "process 1 (another test)")
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_another_recipe_in_the_same_folder_is_refused(run: Path, tmp_path: Path) -> None:
    before = (run / "train.json").read_bytes()
    arguments = ("--model", tiny.cached("gemma"), "--data", shared_runs.chain().rows, "--max-steps", "4")
    done = _call(tmp_path, "local", *arguments, "--run-dir", run)
    _assert_refused(done, "another_run", str(run))
    assert (run / "train.json").read_bytes() == before


def _call(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [shared_runs.script(), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def _warm(commands: Commands, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in a process that has loaded the libraries: for what is not about the start of a command."""
    done = commands.run(folder, dict(os.environ), *arguments)
    return subprocess.CompletedProcess([], done.code, done.stdout, done.stderr)


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one document on stdout: the envelope of the design, at most 8 KB, on one line, and nothing else."""
    assert len(done.stdout.encode()) <= 8192
    assert done.stdout.count("\n") == 1, done.stdout
    answer: dict[str, Any] = json.loads(done.stdout, parse_constant=_no_json)
    assert answer["schema"] == "skill-train/1"
    return answer


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _assert_refused(done: subprocess.CompletedProcess[str], code: str, words: str) -> None:
    assert done.returncode == 2, done.stderr
    answer = _answer(done)
    assert answer["ok"] is False
    assert set(answer["error"]) == {"code", "message", "expected", "got", "hint"}
    assert answer["error"]["code"] == code, answer["error"]
    assert words in answer["error"]["message"]
    assert "Traceback" not in done.stderr


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _base(folder: Path) -> Path:
    return Path(shutil.copytree(tiny.cached("gemma"), folder / "base"))
