"""The training program stands alone, agrees with the plan field by field, and refuses a bad plan before torch loads."""

from __future__ import annotations

import ast
import dataclasses
import errno
import json
import os
import random
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import LocalEntryNotFoundError

from skill_train.facts import DatasetFacts, MachineFacts, ModelFacts
from skill_train.machine.training_program import train_program
from skill_train.plan.make import make_plan
from skill_train.program import plan as program_plan
from skill_train.program.checks import Checks
from skill_train.program.events import Refused, explanation
from skill_train.program.plan import Placement, held_out_count
from skill_train.program.split import chosen_groups, feeding_order, held_out_rows, joined, longest_first
from skill_train.program.start.inputs import json_types, load_plan, prepare_environment
from skill_train.program.trainer import replace_folder, settle_order
from skill_train.program.watch import Watch
from skill_train.recipe.fields import NOT_HASHED, Recipe, from_dict
from skill_train.run.plan_record import Facts

ROOT = Path(__file__).resolve().parents[2]
RECIPE_FIELDS = json_types(program_plan.Recipe)
SOURCE = train_program().read_text(encoding="utf-8")

MODEL = ModelFacts("m", "f" * 64, "llama", "LlamaForCausalLM", 10**6, 2, 64, 640, 2048, "F32", None, True)
DATA = DatasetFacts("d", "e" * 64, 100, ("messages",), "messages", {"messages": "messages"}, 1, "found")
CPU = MachineFacts("Linux", "a processor", "cpu", 16 << 30, 12 << 30, None, 2, False)


# --- One file, by itself ---


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("cuda", {}, "expandable_segments:True"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("cpu", {}, None),
    ],
)
def test_memory_of_a_gpu_grows_in_segments_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, device: str, own: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(own))
    prepare_environment({"device": device})  # type: ignore[typeddict-item]
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_the_header_is_what_uv_reads() -> None:
    header = tomllib.loads(_header())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert header["requires-python"] == project["requires-python"]
    assert set(header) == {"requires-python", "dependencies"}


def test_the_pins_are_those_of_the_lock() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lock = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = dict(pin.split("==") for pin in tomllib.loads(_header())["dependencies"])
    assert set(pins) >= {"torch", "transformers", "trl", "peft", "datasets", "accelerate"}
    assert pins == {name: lock[name.replace("_", "-")] for name in pins}


def test_every_library_that_it_imports_is_pinned_or_comes_with_one() -> None:
    pinned = {pin.split("==")[0] for pin in tomllib.loads(_header())["dependencies"]}
    comes_with = {
        "httpx2": "huggingface_hub",
        "PIL": "pillow",
        "jinja2": "transformers",
        "numpy": "transformers",
        "psutil": "accelerate",
        "pyarrow": "datasets",
        "safetensors": "transformers",
        "tokenizers": "transformers",
    }
    others = {name.split(".")[0] for name, _ in _imports()} - set(sys.stdlib_module_names)
    assert others - pinned <= set(comes_with)


def test_it_imports_nothing_of_ours_and_only_the_standard_library_at_its_top() -> None:
    assert not [name for name, _ in _imports() if name.startswith("skill_train")]
    at_top = {name.split(".")[0] for name, at_top in _imports() if at_top}
    assert at_top <= set(sys.stdlib_module_names) | {"__future__"}
    assert "json" in at_top


def test_every_recipe_field_is_read() -> None:
    """A field that the program declares and never reads would be a promise without effect."""
    for field in RECIPE_FIELDS:
        assert f'recipe["{field}"]' in SOURCE or f'recipe.get("{field}"' in SOURCE, field


# --- The same fields as the recipe and the plan ---


def test_its_recipe_fields_are_those_that_decide_the_model() -> None:
    declared = {field.name for field in dataclasses.fields(Recipe)}
    assert set(RECIPE_FIELDS) == declared - set(NOT_HASHED)


def test_its_types_are_those_of_the_recipe() -> None:
    """What the plan has chosen is no longer None; a float may be written as an integer."""
    hints = typing.get_type_hints(Recipe)
    chosen = {"format", "columns", "loss_on", "max_steps", "warmup_steps", "target_modules", "learning_rate", "optim"}
    chosen |= {"images", "preprocess"}
    for name, types in RECIPE_FIELDS.items():
        declared = {typing.get_origin(t) or t for t in (typing.get_args(hints[name]) or (hints[name],))}
        if typing.get_origin(hints[name]) in (dict, list):
            declared = {typing.get_origin(hints[name])}
        expected = declared - ({type(None)} if name in chosen else set()) | ({int} if float in declared else set())
        assert set(types) == expected, name


def test_its_placement_fields_are_those_that_a_plan_writes() -> None:
    assert list(json_types(Placement)) == list(_plan()["placement"])


def test_it_reads_the_plan_that_is_made(tmp_path: Path) -> None:
    assert load_plan(_write(tmp_path, _plan())) == json.loads(json.dumps(_plan()))


# --- A bad plan ends at once ---

BAD: list[tuple[str, list[str], Any, str]] = [
    ("a missing recipe field", ["recipe", "seed"], None, "recipe.seed is missing"),
    ("an unknown recipe field", ["recipe", "sede"], 1, "recipe.sede is unknown"),
    ("a missing placement field", ["placement", "dtype"], None, "placement.dtype is missing"),
    ("an unknown placement field", ["placement", "fp16"], True, "placement.fp16 is unknown"),
    ("another way to tune", ["recipe", "finetuning_type"], "ful", "recipe.finetuning_type is unknown"),
    ("text for a number", ["recipe", "learning_rate"], "2e-4", "recipe.learning_rate has the wrong type"),
    ("true for a number", ["recipe", "max_steps"], True, "recipe.max_steps has the wrong type"),
    ("a float for steps", ["recipe", "max_steps"], 3.0, "recipe.max_steps has the wrong type"),
    ("a number for true", ["recipe", "use_dora"], 1, "recipe.use_dora has the wrong type"),
    ("no format", ["recipe", "format"], [], "recipe.format has the wrong type"),
    ("no recipe", ["recipe"], [], "the plan has no recipe"),
    ("no placement", ["placement"], None, "the plan has no placement"),
    ("another schema", ["schema"], "skill-train/plan/2", "is not a plan"),
    ("another batch", ["placement", "gradient_accumulation_steps"], 3, "the batch split does not make"),
]


@pytest.mark.parametrize(("path", "value", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_plan_is_refused(tmp_path: Path, path: list[str], value: Any, message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        load_plan(_write(tmp_path, _changed(path, value)))
    assert (caught.value.error["code"], caught.value.exit_code) == ("bad_plan", 2)
    assert "skill-train local RECIPE" in caught.value.error["hint"]


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"null"])
def test_a_plan_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(Refused) as caught:
        load_plan(tmp_path / "plan.json")
    assert caught.value.error["code"] == "bad_plan"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "a terabyte", "deep lists", "digits", "nothing"])
def test_a_plan_that_is_no_file_of_a_plan_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "plan.json"
    made: dict[str, typing.Callable[[], object]] = {
        "a pipe": lambda: os.mkfifo(path),
        "a device": lambda: path.symlink_to("/dev/zero"),
        "a folder": path.mkdir,
        "a terabyte": lambda: (path.touch(), os.truncate(path, 10**12)),
        "deep lists": lambda: path.write_text("[" * 100_000),
        "digits": lambda: path.write_text('{"schema": ' + "9" * 5000 + "}"),
        "nothing": lambda: None,
    }
    made[kind]()
    command = [sys.executable, "-X", "importtime", str(train_program()), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "missing_file" if kind == "nothing" else "bad_plan")
    assert str(path) in error["message"] and "skill-train local RECIPE" in error["hint"]
    assert "torch" not in done.stderr


def test_the_batch_product_is_shown(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        load_plan(_write(tmp_path, _changed(["placement", "gradient_accumulation_steps"], 3)))
    assert caught.value.error["got"].startswith("8 x 3 x 1")
    assert caught.value.error["expected"] == "effective_batch_size 16"


def test_a_bad_plan_ends_before_torch_is_loaded(tmp_path: Path) -> None:
    """Run as a program; what it loaded is written by the interpreter itself (-X importtime)."""
    plan = _write(tmp_path, _changed(["recipe", "seed"], None))
    command = [sys.executable, "-X", "importtime", str(train_program()), str(plan)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    event = json.loads(done.stdout)
    assert event["event"] == "failed"
    assert event["error"]["message"] == "recipe.seed is missing"
    assert json.loads((tmp_path / "train.failed.json").read_text())["exit_code"] == 2
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded  # the list is there
    assert not loaded & {"torch", "transformers", "trl", "peft", "datasets", "numpy", "skill_train"}


def test_a_missing_plan_is_refused_and_makes_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(train_program()), str(tmp_path / "none" / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "missing_file")
    assert not list(tmp_path.iterdir())


# --- The order in which rows are fed ---


def test_the_order_is_decided_by_the_seed() -> None:
    assert feeding_order(10, 25, 42) == feeding_order(10, 25, 42)
    assert feeding_order(10, 25, 42) != feeding_order(10, 25, 43)


def test_each_epoch_feeds_every_row_once() -> None:
    order = feeding_order(10, 30, 7)
    epochs = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(10))


@pytest.mark.parametrize("needed", [1, 9, 10, 11, 47])
def test_a_longer_run_begins_like_a_shorter_one(needed: int) -> None:
    order = feeding_order(10, needed, 3)
    assert len(order) == needed
    assert feeding_order(10, 100, 3)[:needed] == order


def test_the_rows_of_a_step_are_fed_from_long_to_short() -> None:
    """Six rows in steps of four, fed twice: each step keeps its rows; equal lengths keep their order."""
    order, lengths = [3, 0, 5, 1, 4, 2, 2, 5, 1, 0, 3, 4], [10, 30, 20, 30, 50, 40]
    assert longest_first(order, lengths, 4) == [5, 3, 1, 0, 4, 5, 2, 2, 4, 1, 3, 0]


# --- Rows that never train ---


def _held_out(rows: int, fraction: float, seed: int) -> set[int]:
    """Of rows that are all different."""
    numbers = list(range(rows))
    return set(held_out_rows(numbers, [b"%d" % number for number in numbers], fraction, seed))


@pytest.mark.parametrize(("rows", "count"), [(1, 0), (19, 0), (20, 1), (39, 1), (40, 2), (4000, 200), (100_000, 200)])
def test_a_twentieth_is_held_out_and_200_at_most(rows: int, count: int) -> None:
    held_out = _held_out(rows, 0.05, 42)
    assert len(held_out) == held_out_count(rows, 0.05) == count
    assert held_out <= set(range(rows))
    # The rows that every version has held out of data without repeats, so that tunings stay comparable.
    assert held_out == set(random.Random(42).sample(range(rows), count))


def test_fewer_than_20_rows_are_all_trained() -> None:
    assert _held_out(19, 0.5, 42) == set()
    assert len(_held_out(20, 0.5, 42)) == 10


def test_another_seed_holds_out_other_rows() -> None:
    assert _held_out(1000, 0.05, 1) != _held_out(1000, 0.05, 2)


def test_nothing_is_held_out_when_the_recipe_says_so() -> None:
    assert _held_out(1000, 0.0, 42) == set()


@pytest.mark.parametrize(
    ("sizes", "count", "held_out"),
    [
        ([2] * 10, 1, 2),  # no pair fits into one row: one pair is held out all the same
        ([3] * 20, 3, 3),
        ([50, *[1] * 50], 5, 5),  # the large group is trained
        ([30, 30], 3, 0),  # half of the rows are too many
        ([60], 3, 0),
        ([400] * 10, 200, 0),  # 200 at most
    ],
)
def test_groups_are_held_out_whole(sizes: list[int], count: int, held_out: int) -> None:
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    for seed in range(20):
        chosen = chosen_groups(groups, count, seed)
        assert len(chosen) == held_out
        assert {groups[i] for i in chosen}.isdisjoint(groups[i] for i in range(len(groups)) if i not in chosen)


def test_groups_that_touch_are_one() -> None:
    """Rows 0 and 1 have a text in common, 1 and 2 a question: 0 and 2 belong together though they share nothing."""
    groups = joined(["a", "a", "b", "c"], ["q", "r", "r", "s"])
    assert groups[0] == groups[1] == groups[2] != groups[3]


# --- What a loss may be ---


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([2.0, float("nan")], "nan"),
        ([float("inf")], "inf"),
        ([0.0], "exactly 0"),
        ([3.0, 25.0], "exploded"),
        ([2.0, 1e-9], None),  # small is not zero: a demo may learn everything
        ([3.0, 19.0], None),
        ([11.0, 30.0], None),  # a large vocabulary starts high
    ],
)
def test_a_loss_that_ends_training(tmp_path: Path, losses: list[float], word: str | None) -> None:
    watch = Watch(tmp_path, {}, {}, None, keep=2)
    verdicts = [watch.bad_loss(step, loss, 1.0) for step, loss in enumerate(losses, start=1)]
    assert verdicts[:-1] == [None] * (len(losses) - 1)
    if word is None:
        assert verdicts[-1] is None
    else:
        assert verdicts[-1].exit_code == 5
        assert verdicts[-1].error["code"] == "bad_loss"
        assert f"{word}" in verdicts[-1].error["message"]
        assert f"step {len(losses)}" in verdicts[-1].error["message"]


def test_a_flat_loss_ends_training(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {}, {}, None, keep=2)
    assert watch.bad_loss(1, 2.0, None) is None  # not measured when gradients are not clipped
    assert watch.bad_loss(2, 2.0, 1e-9) is None
    assert watch.bad_loss(3, 0.0, 1e-5) is None  # short answers that the model knows by heart
    assert "gradient of exactly 0 at step 3" in watch.bad_loss(3, 2.0, 0.0).error["message"]


def test_a_figure_that_is_no_number_stays_out_of_the_record() -> None:
    checks = Checks(None, None, {"order": [0], "train": [{}]}, {})
    checks.add("adapter_reloads", "fail", float("nan"), "")
    checks.add("checkpoint_saves", "pass", 2, "")
    assert [check["figure"] for check in checks.results] == [None, 2]


def _header() -> str:
    lines = SOURCE.splitlines()
    start, end = lines.index("# /// script"), lines.index("# ///")
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[start + 1 : end])


def _imports() -> list[tuple[str, bool]]:
    """Every imported module, and whether at the top of the file."""
    tree = ast.parse(SOURCE)
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        found += [(name, node in tree.body) for name in names]
    return found


def _plan() -> dict[str, Any]:
    return make_plan(from_dict({"model": "m", "data": "d"}), Facts(MODEL, DATA, CPU)).as_dict()


def _changed(path: list[str], value: Any) -> dict[str, Any]:
    """The plan with one value set; None takes it out."""
    plan = _plan()
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return plan


def _write(folder: Path, plan: dict[str, Any]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    return path


def _of_hub(name: str, status: int) -> Exception:
    import httpx2
    from huggingface_hub import errors

    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/api/models/me/x"))
    error: Exception = getattr(errors, name)("words", response=response)
    return error


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # torch.save's words on a full disk, recorded on a 3 MB tmpfs on 2026-11-21 with torch 2.13
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 255040 vs 254928"), "no_disk"),
        (OSError(errno.ENOSPC, "No space left on device"), "no_disk"),
        (OSError(errno.EFBIG, "File too large"), "no_disk"),
        # safetensors' under a limit of the size of files, and under a quota [ran]
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "no_disk"),
        (RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), "no_disk"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        # with an address space of 1 to 1.5 GB [ran]
        (RuntimeError("unable to mmap 39195600 bytes from file <x>: Cannot allocate memory (12)"), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (ImportError("libarrow_compute.so.2600: failed to map segment from shared object"), None),
        (PermissionError(errno.EACCES, "Permission denied"), "system_error"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "RUN/metrics.jsonl"), "system_error"),
        (OSError(errno.EMFILE, "Too many open files"), "system_error"),
        (ModuleNotFoundError("No module named 'trl'", name="trl"), "missing_package"),
        # as transformers and datasets raise them: the Hub's own error is their cause
        (_caused(OSError("You are trying to access a gated repo."), _of_hub("GatedRepoError", 403)), "gated"),
        (_caused(OSError("not a valid git identifier"), _of_hub("RevisionNotFoundError", 404)), "input_changed"),
        (_of_hub("HfHubHTTPError", 401), "bad_token"),
        (_of_hub("HfHubHTTPError", 403), "no_permission"),
        (_of_hub("HfHubHTTPError", 503), "hub_unreachable"),
        (_caused(LocalEntryNotFoundError("no copy"), _of_hub("HfHubHTTPError", 429)), "hub_unreachable"),
        (httpx2.RemoteProtocolError("Server disconnected without sending a response."), "hub_unreachable"),
        (ConnectionError("Couldn't reach 'me/rows' on the Hub (ReadTimeout)"), "hub_unreachable"),
        # datasets 5.2 names no cause [ran]
        (DatasetNotFoundError("Dataset 'me/rows' is a gated dataset on the Hub. Visit the dataset page"), "gated"),
        (DatasetNotFoundError("Revision 'x' doesn't exist for dataset 'me/rows' on the Hub."), "input_changed"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (_caused(Refused("of its own", code="bad_row"), _of_hub("HfHubHTTPError", 503)), None),
        (RuntimeError("a bug"), None),
        (KeyError("a bug"), None),
    ],
)
def test_ends_that_are_explained_and_bugs_that_keep_their_traceback(error: Exception, code: str | None) -> None:
    refusal = explanation(error)
    assert (refusal.error["code"] if refusal else None) == code


def test_the_address_in_an_error_of_the_hub_has_no_secret() -> None:
    """A mirror may have a password in its address, and the storage signs the addresses of files."""
    from huggingface_hub.errors import HfHubHTTPError

    address = "https://me:password@mirror.org/x/resolve/main/a.bin?Expires=1&Signature=secret"
    response = httpx2.Response(403, request=httpx2.Request("GET", address))
    error = HfHubHTTPError(f"403 Forbidden: '{address}'. Denied.", response=response)
    refusal = explanation(error)
    assert refusal is not None and "password" not in str(refusal.error) and "secret" not in str(refusal.error)
    assert refusal.error["got"] == "403 Forbidden: 'https://mirror.org/x/resolve/main/a.bin Denied."


@pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps no limit of the address space")
def test_under_a_limit_of_the_address_space_it_is_memory(tmp_path: Path) -> None:
    """0.4 GB are enough for Python and not for torch, which is imported with the first library."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2); sys.argv.pop(0); "
    program = [sys.executable, "-c", limit + "runpy.run_path(sys.argv[0], run_name='__main__')", str(train_program())]
    path = _write(tmp_path, _changed(["fingerprints", "data"], None))  # the data would be missed before
    done = subprocess.run([*program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "out_of_memory"


def test_names_that_are_a_set_have_one_order(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    written = {"r": 8, "target_modules": ["v_proj", "k_proj", "q_proj"], "exclude_modules": None, "layers": [3, 1]}
    config.write_text(json.dumps(written))
    settle_order(config)
    assert json.loads(config.read_text()) == written | {"target_modules": ["k_proj", "q_proj", "v_proj"]}
    settle_order(tmp_path / "merged" / "adapter_config.json")  # every weight was trained: there is none


def test_a_folder_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    for name, content in ((".adapter.part", "new"), ("adapter", "old"), (".adapter.old.part", "left by a kill")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(content)
    replace_folder(tmp_path / ".adapter.part", tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "weights").read_text() == "new"


def test_it_starts_without_its_docstrings() -> None:
    """PYTHONOPTIMIZE=2 takes them away."""
    done = subprocess.run([sys.executable, "-OO", str(train_program()), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--attended" in done.stdout, done.stderr


def test_its_help_begins_with_whole_sentences() -> None:
    """The joined file, which has the docstring."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "--help"], capture_output=True, text=True
    )
    assert done.stdout.split("\n\n")[1].endswith("in a cloud job."), done.stdout
