"""Nothing half-written under a final name, nothing overwritten, one process at a time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

import containers
import planning
from one_command import answered
from skill_train.core import files as parts
from skill_train.core.digests import FileDigest, digests
from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.files import whole_file, whole_folder
from skill_train.core.memory import peak_memory_bytes
from skill_train.gguf import export_files
from skill_train.run import records
from skill_train.run.export_record import ExportedFile, ExportRecord
from skill_train.run.folder import (
    RunDir,
    finished_record,
    note_of,
    open_run,
    require_space,
    require_unused,
    set_aside,
    versions,
)


def test_whole_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "merged"
    with whole_folder(final) as part:
        (part / "model.safetensors").write_bytes(b"12")
        assert not final.exists()
    assert _files(tmp_path) == ["deep/merged/model.safetensors"]


def test_whole_folder_vanishes_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "merged") as part:
        (part / "model.safetensors").write_bytes(b"12")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_whole_folder_takes_an_empty_place_and_refuses_a_full_one(tmp_path: Path) -> None:
    final = tmp_path / "merged"
    final.mkdir()
    with whole_folder(final) as part:
        (part / "a").write_text("first")
    with pytest.raises(UsageError) as caught, whole_folder(final):
        raise AssertionError("must not be entered")
    assert caught.value.code == "output_exists"
    assert (final / "a").read_text() == "first"


def test_whole_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "gguf" / "model-f16.gguf"
    with whole_file(final) as part:
        part.write_bytes(b"GGUF")
        assert not final.exists()
    assert _files(tmp_path) == ["gguf/model-f16.gguf"]


def test_an_error_of_the_file_system_names_the_file(tmp_path: Path) -> None:
    """And not the temporary one beside it, of which nobody knows."""
    (tmp_path / "final").mkdir()  # no file can be renamed to a folder
    with pytest.raises(OSError) as caught, whole_file(tmp_path / "final") as part:
        part.write_text("x")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "final"), None)
    assert _files(tmp_path) == []


def test_an_error_names_the_file_where_nothing_can_be_removed_either(tmp_path: Path) -> None:
    """As on a read-only disk. Here the name of the temporary file is too long, and that of the file is not."""
    final = tmp_path / ("x" * 250)
    with pytest.raises(OSError) as caught:
        parts.write_text(final, "x")
    assert caught.value.filename == str(final)


def test_whole_file_keeps_the_old_one_when_the_block_fails(tmp_path: Path) -> None:
    final = tmp_path / "model-f16.gguf"
    final.write_bytes(b"old")
    with pytest.raises(OSError, match="disk full"), whole_file(final) as part:
        part.write_bytes(b"half")
        raise OSError("disk full")
    assert _files(tmp_path) == ["model-f16.gguf"]
    assert final.read_bytes() == b"old"


@pytest.mark.parametrize("step", ["file", "folder"])
def test_parts_of_a_killed_process_are_removed_and_those_of_a_living_one_kept(tmp_path: Path, step: str) -> None:
    final = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    gone = ended.stdout.strip()
    dead = tmp_path / f".out.{parts.place()}-{gone}.aaaa.part"
    mine = tmp_path / f".out.{parts.owner()}.bbbb.part"
    other = tmp_path / f".outer.{parts.place()}-{gone}.cccc.part"
    elsewhere = tmp_path / f".out.0123456789ab-{gone}.dddd.part"
    for part in (dead, mine, other, elsewhere):
        if step == "folder":
            part.mkdir()
            (part / "shard").write_bytes(b"1")
        else:
            part.write_bytes(b"1")
    with whole_file(final) if step == "file" else whole_folder(final) as part:
        part.write_bytes(b"1") if step == "file" else (part / "x").write_bytes(b"1")
    assert (dead.exists(), mine.exists(), other.exists(), elsewhere.exists()) == (False, True, True, True)
    assert (parts.left_alone(), parts.left_alone()) == ([elsewhere], [])


@pytest.mark.skipif(not containers.possible(), reason="needs namespaces of processes")
@pytest.mark.parametrize("step", ["file", "folder"])
def test_a_part_that_another_container_works_on_stays(tmp_path: Path, step: str) -> None:
    """There the number of this process is of nobody."""
    program = (
        "import sys; from pathlib import Path; from skill_train.core import files as parts\n"
        f"with parts.whole_{step}(Path(sys.argv[1])) as part:\n"
        "    part.mkdir(exist_ok=True) if part.is_dir() else part.write_bytes(b'2')\n"
        "print(*parts.left_alone())\n"
    )
    final = tmp_path / "out"
    with whole_file(final) if step == "file" else whole_folder(final) as mine:
        (mine if step == "file" else mine / "x").write_bytes(b"1")
        done = containers.run([sys.executable, "-c", program, str(final)])
        assert mine.exists() and done.stdout.strip() == str(mine), done.stderr
        if step == "folder":
            final.rmdir()


def test_a_part_that_nobody_can_judge_is_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 4)
    part = tmp_path / ".fixed.jsonl.0123456789ab-1.dddd.part"
    part.write_bytes(b"1")
    code, answer = answered("data", rows, "--fix", tmp_path / "fixed.jsonl")
    messages = [warning["message"] for warning in answer["warnings"] if warning["code"] == "part_left_alone"]
    assert code == 0 and len(messages) == 1 and str(part) in messages[0] and part.exists()


def test_a_signal_just_after_a_temporary_folder_was_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = os.mkdir

    def interrupted(path: Any, *mode: int) -> None:
        own(path, *mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), parts.scratch_folder():
        pass
    assert list(tmp_path.iterdir()) == []


_HOLD = (
    "import sys, time\nfrom skill_train.core.files import scratch_folder\n"
    "with scratch_folder() as folder:\n    (folder / 'large').touch(); print(folder, flush=True); time.sleep(60)\n"
)


def _holder(environment: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    held = subprocess.Popen([sys.executable, "-c", _HOLD], env=environment, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    return held, Path(held.stdout.readline().strip())


def test_temporary_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    """One that lives keeps its own, and so do another machine, another program and another user; a link is followed
    nowhere."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    (killed, left), (living, kept) = _holder(environment), _holder(environment)
    killed.kill()
    killed.wait()
    dead = left.name.rpartition("-")[0]
    others = [tmp_path / name for name in ("skill-train-0123456789ab-1-x", "skill-train-canary-1", f"{dead}x-y")]
    for other in others:
        other.mkdir()
    (tmp_path / f"{dead}-link").symlink_to(others[1])
    if os.geteuid() == 0:
        others.append(tmp_path / f"{dead}-another")
        others[-1].mkdir()
        os.chown(others[-1], 65534, 65534)
    assert (left / "large").is_file()
    with_own, own = _holder(environment)
    for process in (living, with_own):
        process.terminate()
        process.wait()
    assert not left.exists() and (kept / "large").is_file() and (own / "large").is_file()
    assert all(other.is_dir() for other in others) and (tmp_path / f"{dead}-link").is_symlink()


def test_a_killed_process_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal; from skill_train.core.files import whole_folder\n"
        f"with whole_folder(pathlib.Path({str(tmp_path / 'merged')!r})) as part:\n"
        "    (part / 'half').write_bytes(b'1'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    assert not (tmp_path / "merged").exists()
    with whole_folder(tmp_path / "merged") as part:
        (part / "whole").write_bytes(b"1")
    assert _files(tmp_path) == ["merged/whole"]


def test_write_json_is_whole_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    parts.write_json(path, {"name": "é", "n": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "é", "n": 1}
    with pytest.raises(ValueError, match="JSON"):
        parts.write_json(path, {"loss": float("nan")})  # NaN is not JSON
    assert json.loads(path.read_text(encoding="utf-8"))["n"] == 1
    assert _files(tmp_path) == ["plan.json"]


def test_read_json_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        records.read_json(tmp_path / "missing.json")
    assert caught.value.code == "missing_file"
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(UsageError) as caught:
            records.read_json(tmp_path / "bad.json")
        assert caught.value.code == "broken_record"


def test_open_run_wants_a_plan(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError) as caught:
            open_run(path)
        assert caught.value.code == "not_a_run"
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError) as caught:
        open_run(tmp_path / "file.gguf")
    assert caught.value.got == "a file" and "--gguf" in caught.value.hint
    (tmp_path / "plan.json").write_text("{}")
    assert open_run(tmp_path) == RunDir(tmp_path)


@pytest.mark.parametrize(
    "command",
    ["merge", "export-gguf", "evaluate", "verify", pytest.param("data", marks=pytest.mark.slow), "plan", "local"],
)
def test_a_folder_that_is_no_model_names_the_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A run, its adapter, and an adapter from elsewhere, where a model is asked for, or the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    own, loose = Path("my run/adapter"), Path("loose adapter")
    for folder in (own, loose):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (own.parent / "plan.json").write_text("{}")
    of_run = command in ("merge", "export-gguf", "evaluate", "verify")
    rows = ["rows.jsonl"] if command == "data" else ["--data", "rows.jsonl"]
    words = [command, *([] if of_run else [*rows, "--model"])]

    def hint(folder: Path) -> str:
        code, answer = answered(*words, folder)
        assert code == 2, answer
        return str(answer["error"]["hint"])

    assert hint(loose) == "skill-train merge --base BASE --adapter 'loose adapter' --out MERGED"
    if of_run:
        assert hint(own) == "give the folder of the run: 'my run'"
        return
    assert {hint(own), hint(own.parent)} == {"skill-train merge 'my run'"}
    (own.parent / "merged").mkdir()
    (own.parent / "merged" / "config.json").write_text("{}")
    assert {hint(own), hint(own.parent)} == {"use the merged model: 'my run/merged'"}


def test_a_folder_that_is_no_run_names_what_can_be_done_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan --out plan.json` does not make a run of the folder in which it is called."""
    monkeypatch.chdir(tmp_path)
    for file in ("plan.json", "my adapter/adapter_config.json", "my model/config.json", "a b.gguf"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("{}")
    hints = {name: answered("verify", name)[1]["error"]["hint"] for name in ("my adapter", "my model", "a b.gguf")}
    assert hints == {
        "my adapter": "skill-train merge --base BASE --adapter 'my adapter' --out MERGED",
        "my model": "a model goes to --model, --base or --reference; its GGUF files: "
        "skill-train export-gguf 'my model'",
        "a b.gguf": "skill-train verify --reference MODEL --gguf 'a b.gguf'",
    }


def test_what_lies_in_a_run_or_around_runs_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a run led to `verify --reference`, whatever was asked for, and the folder of all runs to a training."""
    monkeypatch.chdir(tmp_path)
    for file in ("my runs/a/plan.json", "my runs/a/gguf/a-f16.gguf", "my runs/a/checkpoints/checkpoint-2/x"):
        Path(file).parent.mkdir(exist_ok=True, parents=True)
        Path(file).write_text("{}")
    for name in ("my runs", "my runs/a/gguf", "my runs/a/gguf/a-f16.gguf", "my runs/a/checkpoints/checkpoint-2"):
        for command in ("evaluate", "export-gguf", "report", "merge", "verify"):
            hint = answered(command, name)[1]["error"]["hint"]
            assert hint == "give the folder of the run: 'my runs/a'", (command, name)
    hint = answered("report", "my runs/b")[1]["error"]["hint"]
    assert hint.startswith("check the path, or train a run: skill-train local ")


def test_a_run_that_is_not_merged_yet_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run is continued with --model RUN/merged."""
    monkeypatch.chdir(tmp_path)
    Path("my run").mkdir()
    Path("my run/plan.json").write_text(json.dumps(planning.plan_document(policy={}, fingerprints={})))
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for command in ("plan", "local"):
        code, answer = answered(command, "--data", "rows.jsonl", "--model", "my run/merged")
        assert (code, answer["error"]["hint"]) == (2, "skill-train merge 'my run'")


def test_an_adapters_own_file_is_told_by_its_record_not_by_its_name(tmp_path: Path) -> None:
    """A run may be called qwen-lora-v2, and its files are called as it is."""
    run = RunDir(tmp_path / "qwen-lora-v2")
    run.gguf.mkdir(parents=True)
    for name in ("qwen-lora-v2-f16.gguf", "qwen-lora-v2-lora-f16.gguf"):
        (run.gguf / name).write_bytes(b"GGUF")
    assert [path.name for path in run.ggufs] == ["qwen-lora-v2-f16.gguf", "qwen-lora-v2-lora-f16.gguf"]
    made: ExportedFile = {"bytes": 4, "sha256": "x", "quant": "f16"}
    records.write(run.record("lora_gguf"), ExportRecord(outputs={"gguf/qwen-lora-v2-lora-f16.gguf": made}))
    assert run.ggufs == [run.gguf / "qwen-lora-v2-f16.gguf"]
    writer = gguf.GGUFWriter(run.gguf / "mmproj-qwen-lora-v2-f16.gguf", "clip")  # a projector without its record
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert run.ggufs == [run.gguf / "qwen-lora-v2-f16.gguf"]


def test_gguf_files_are_files_of_a_folder_that_may_be_read(tmp_path: Path) -> None:
    """`push`, `chat` and `verify` waited for a pipe without end, and saw no files in a folder that may not be read."""
    run = RunDir(tmp_path)
    run.gguf.mkdir()
    os.mkfifo(run.gguf / "pipe-f16.gguf")
    (run.gguf / "folder.gguf").mkdir()
    (run.gguf / "link.gguf").symlink_to("nowhere")
    (run.gguf / "model-f16.gguf").write_bytes(b"GGUF")
    tmp_path.chmod(0o755)
    files = (
        "import os; from pathlib import Path; from skill_train.run.folder import RunDir; import sys\n"
        "os.geteuid() or os.setuid(65534)\n"
        "print([path.name for path in RunDir(Path()).ggufs])"
    )
    for mode, told in ((0o755, "['model-f16.gguf']\n"), (0, "Permission denied: 'gguf'\n")):
        run.gguf.chmod(mode)
        done = subprocess.run([sys.executable, "-c", files], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.stdout + done.stderr).endswith(told)
    run.gguf.chmod(0o755)


def test_digests_are_sha256_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"abc")
    (tmp_path / "b.bin").write_bytes(b"")
    # Published test vectors of FIPS 180-2: "abc" and the empty message.
    assert digests(tmp_path) == {
        "b.bin": {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        "sub/a.bin": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    }
    assert list(digests(tmp_path, [tmp_path / "b.bin"])) == ["b.bin"]


INPUTS: dict[str, FileDigest] = {"model.safetensors": {"bytes": 2, "sha256": "x"}}
OPTIONS = {"outtype": "f16"}


def _finished(folder: Path) -> Path:
    (folder / "gguf").mkdir(parents=True)
    output = folder / "gguf" / "m.gguf"
    output.write_bytes(b"12")
    made: ExportedFile = {"bytes": 2, "sha256": hashlib.sha256(b"12").hexdigest(), "quant": "f16"}
    record = ExportRecord(step="convert", inputs=INPUTS, options=OPTIONS, outputs={"gguf/m.gguf": made})
    records.write(folder / "convert.json", record)
    return folder / "convert.json"


def test_no_record_means_work_to_do(tmp_path: Path) -> None:
    assert finished_record(tmp_path / "convert.json", ExportRecord, inputs=INPUTS, options=OPTIONS) is None


def test_a_matching_record_is_the_answer(tmp_path: Path) -> None:
    record = finished_record(_finished(tmp_path), ExportRecord, inputs=INPUTS, options=OPTIONS)
    assert record is not None
    assert (record.schema, record.step) == ("skill-train/step/1", "convert")


@pytest.mark.parametrize(
    ("inputs", "options", "different"), [({}, OPTIONS, "inputs"), (INPUTS, {"outtype": "bf16"}, "options")]
)
def test_other_work_is_not_overwritten(
    tmp_path: Path, inputs: dict[str, str], options: dict[str, str], different: str
) -> None:
    path = _finished(tmp_path)
    with pytest.raises(UsageError, match=different) as caught:
        finished_record(path, ExportRecord, inputs=inputs, options=options)
    assert caught.value.code == "output_exists"
    assert caught.value.hint == f"move {path} and what it made away, or use another --out"
    (tmp_path / "plan.json").touch()
    with pytest.raises(UsageError, match=different) as caught:
        finished_record(path, ExportRecord, inputs=inputs, options=options)
    assert caught.value.hint == f"move {path} and what it made away"  # a run has one place for each step


def test_work_of_which_nothing_is_left_is_to_be_done_again(tmp_path: Path) -> None:
    path = _finished(tmp_path)
    (tmp_path / "gguf" / "m.gguf").unlink()
    assert finished_record(path, ExportRecord, inputs=INPUTS, options=OPTIONS) is None


def test_a_record_of_nothing_is_no_work_done(tmp_path: Path) -> None:
    """Edited by hand, say: what reads the name of the file in it would find none."""
    path = _finished(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outputs": {}}))
    assert finished_record(path, ExportRecord, inputs=INPUTS, options=OPTIONS) is None
    assert export_files.outtype(path, ["f16"]) == "f16"


@pytest.mark.parametrize("damage", ["same size", "shorter"])
def test_a_changed_output_is_noticed(tmp_path: Path, damage: str) -> None:
    path = _finished(tmp_path)
    output = tmp_path / "gguf" / "m.gguf"
    output.write_bytes(b"13" if damage == "same size" else b"1")
    with pytest.raises(UsageError) as caught:
        finished_record(path, ExportRecord, inputs=INPUTS, options=OPTIONS)
    assert caught.value.code == "output_changed"


def test_space_is_asked_before_work_starts(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet" / "there", 1, "a byte")
    with pytest.raises(DecisionNeeded, match=r"a moon: needs 1000000000\.00 GB") as caught:
        require_space(tmp_path / "not" / "yet" / "there", 10**18, "a moon")
    assert (caught.value.code, caught.value.expected) == ("no_disk", f"{10**18} bytes free")
    assert not (tmp_path / "not").exists()


def test_versions_and_peak_memory_are_facts_or_none() -> None:
    installed = versions("no-such-package")
    assert installed["python"] == sys.version.split()[0]
    assert installed["no-such-package"] is None
    peak = peak_memory_bytes()
    assert peak is None or 10**7 < peak < 10**12  # a Python process has tens of megabytes


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_result_without_its_record_is_set_aside(tmp_path: Path) -> None:
    """A kill between the two: the result is whole, but nobody can say what it was made from."""
    made, record = tmp_path / "merged", tmp_path / "merge.json"
    assert set_aside(made, record) is None
    for number in (1, 2):
        made.mkdir()
        (made / "weights").write_text(str(number))
        aside = set_aside(made, record)
        assert aside is not None and (aside / "weights").read_text() == str(number)
        assert not made.exists()
    made.mkdir()
    record.write_text("{}")
    assert set_aside(made, record) is None and made.is_dir()


def test_a_note_becomes_the_record_of_what_it_describes_and_of_nothing_else(tmp_path: Path) -> None:
    """A kill came between the two."""
    record = _finished(tmp_path)
    file = tmp_path / "gguf" / "m.gguf"
    note = note_of(file, record)
    arguments: dict[str, Any] = {"inputs": INPUTS, "options": OPTIONS, "result": file}
    os.rename(record, note)
    assert finished_record(record, ExportRecord, **arguments | {"options": {}}) is None and not record.exists()
    file.write_bytes(b"13")
    assert finished_record(record, ExportRecord, **arguments) is None and not record.exists()
    file.write_bytes(b"12")
    assert finished_record(record, ExportRecord, **arguments) is not None and record.is_file() and not note.exists()
    note.write_text(json.dumps({"inputs": INPUTS, "options": OPTIONS, "outputs": {"../secret": {}}}))
    record.unlink()
    with pytest.raises(UsageError) as caught:
        finished_record(record, ExportRecord, **arguments)
    assert caught.value.code == "broken_record"


def test_a_merge_that_is_refused_does_not_wait_for_digests(tmp_path: Path) -> None:
    """A terabyte without content would take a quarter of an hour to read."""
    from types import SimpleNamespace

    from skill_train.merge.step import _digesting

    with open(tmp_path / "shard", "wb") as file:
        file.truncate(10**12)
    model: Any = SimpleNamespace(folder=tmp_path, shards=[SimpleNamespace(name="shard")])
    with pytest.raises(UsageError), _digesting(model, model):
        raise UsageError("refused", code="bad_usage")


@pytest.mark.parametrize(
    "name", ["cloud.json", "pull.json", "push.json", "demo.json", "colab.ipynb", "skypilot", "train.json"]
)
def test_a_new_run_overwrites_no_file_that_a_later_step_would_write(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(UsageError) as caught:
        require_unused(RunDir(tmp_path))
    assert (caught.value.code, caught.value.got) == ("output_exists", name)
