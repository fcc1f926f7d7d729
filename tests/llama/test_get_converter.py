"""Where the converter is looked for, and what an archive must be before anything of it is used. No network."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from skill_train.core.errors import NotInstalled, Temporary, UsageError
from skill_train.llama import get_converter

VERSION = metadata.version("llama-cpp-python")
ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
SOURCE = {
    "convert_hf_to_gguf.py": b"print('convert')\n",
    "convert_lora_to_gguf.py": b"print('lora')\n",
    "conversion/__init__.py": b"",
    "conversion/base.py": b"BASE = 1\n",
    "gguf-py/gguf/__init__.py": b"",
    "models/ggml-vocab-x.gguf": b"GGUF....",
    "LICENSE": b"MIT",
}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def archive(path: Path, files: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in others:
            tar.addfile(member)
    return path


def cached(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / f"llama.cpp-{VERSION}"
    get_converter.unpack(archive(tmp_path / "a.tar.gz", SOURCE), folder, version=VERSION)
    return folder


def llama_cpp_folder(folder: Path) -> Path:
    for name, content in SOURCE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_without_a_converter_the_error_names_the_one_command() -> None:
    with pytest.raises(NotInstalled) as caught:
        get_converter.find()
    assert caught.value.exit_code == 7
    assert caught.value.hint.startswith("skill-train export-gguf --fetch")
    assert VERSION in caught.value.expected


def test_unpacking_keeps_what_converting_needs_and_its_digests(tmp_path: Path) -> None:
    extra = {
        "src/llama.cpp": b"int main;",
        "tests/test.py": b"",
        "gguf-py/tests/t.py": b"",
        "conversion/notes.txt": b"",
    }
    path = archive(tmp_path / "a.tar.gz", SOURCE | extra)
    get_converter.unpack(path, tmp_path / "out", version=VERSION)
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {*SOURCE, "manifest.json"}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    # sha256 of the empty file, from FIPS 180-4's test values
    assert manifest["files"]["conversion/__init__.py"]["sha256"].startswith("e3b0c44298fc1c149afbf4c8996fb924")
    assert manifest["archive"]["bytes"] == path.stat().st_size
    assert get_converter.is_whole(tmp_path / "out")


def test_the_cached_one_is_found(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    found = get_converter.find()
    assert (found.folder, found.source, found.version) == (folder, "cached", VERSION)
    assert get_converter.fetch() == found  # nothing to do, no network


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "conversion/base.py").write_bytes(b"BASE = 2\n"),  # the same size
        lambda folder: (folder / "conversion/base.py").unlink(),
        lambda folder: (folder / "conversion/torch.py").write_bytes(b"evil = 1\n"),
        lambda folder: (folder / "models/ggml-vocab-x.gguf").write_bytes(b"GG"),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("{}"),
    ],
    ids=["changed", "removed", "added", "cut", "torn manifest", "empty manifest"],
)
def test_a_damaged_cache_is_not_used_and_is_replaced(tmp_path: Path, damage) -> None:
    folder = cached(tmp_path)
    damage(folder)
    assert not get_converter.is_whole(folder)
    with pytest.raises(NotInstalled):
        get_converter.find()
    assert cached(tmp_path) == folder
    assert get_converter.is_whole(folder)


def test_a_named_folder_wins_and_is_checked(tmp_path: Path) -> None:
    cached(tmp_path)
    found = get_converter.find(llama_cpp_folder(tmp_path / "mine"))
    assert (found.folder, found.source, found.version) == (tmp_path / "mine", "--llama-cpp", None)
    (tmp_path / "mine" / "conversion" / "__init__.py").unlink()
    with pytest.raises(UsageError, match="mine is not a llama") as caught:
        get_converter.find(tmp_path / "mine")
    assert caught.value.got == "without conversion/__init__.py"
    with pytest.raises(UsageError, match="is not a llama") as caught:
        get_converter.find(tmp_path / "nowhere")
    assert caught.value.got == "no such folder"


def test_a_cache_that_cannot_be_written_is_told_before_the_download(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "file" / "cache"))
    told: list[str] = []
    with pytest.raises(UsageError) as caught:
        get_converter.fetch(progress=lambda done, total, text: told.append(text))
    assert (caught.value.code, caught.value.got, told) == ("system_error", str(tmp_path / "file" / "cache"), [])
    assert "or export SKILL_TRAIN_CACHE=DIR" in caught.value.hint


def test_one_on_path_is_the_last_choice_and_needs_its_packages(tmp_path: Path, monkeypatch) -> None:
    folder = llama_cpp_folder(tmp_path / "checkout")
    (folder / "convert_hf_to_gguf.py").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert (get_converter.find().source, get_converter.find().folder) == ("PATH", folder.resolve())
    cached(tmp_path)
    assert get_converter.find().source == "cached"
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path / "other"))
    (folder / "gguf-py" / "gguf" / "__init__.py").unlink()
    with pytest.raises(NotInstalled):
        get_converter.find()


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "member",
    [
        link(f"{ROOT}/conversion/evil.py", tarfile.SYMTYPE),
        link(f"{ROOT}/conversion/evil.py", tarfile.LNKTYPE),
        link(f"{ROOT}/models/pipe.gguf", tarfile.FIFOTYPE),
        tarfile.TarInfo(f"{ROOT}/conversion/../../../evil.py"),
        tarfile.TarInfo(f"/x/{ROOT}/conversion/evil.py"),
    ],
    ids=["symbolic link", "hard link", "pipe", "upwards", "absolute"],
)
def test_unsafe_members_are_refused_and_leave_nothing(tmp_path: Path, member: tarfile.TarInfo) -> None:
    path = archive(tmp_path / "a.tar.gz", SOURCE, member)
    (tmp_path / "cache").mkdir()
    with pytest.raises(NotInstalled, match="unsafe member"):
        get_converter.unpack(path, tmp_path / "cache" / "out", version=VERSION)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not list(tmp_path.rglob("evil.py"))


def test_an_incomplete_or_torn_archive_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.tar.gz", SOURCE)
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(whole.read_bytes()[:-40])
    without = {name: content for name, content in SOURCE.items() if name != "convert_lora_to_gguf.py"}
    (tmp_path / "cache").mkdir()
    for path, why in (
        (torn, "end-of-stream"),
        (archive(tmp_path / "b.tar.gz", without), "convert_lora_to_gguf.py not in it"),
    ):
        with pytest.raises(NotInstalled, match=why):
            get_converter.unpack(path, tmp_path / "cache" / "out", version=VERSION)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_temporary_and_one_without_the_archive_is_not(
    tmp_path: Path, monkeypatch
) -> None:
    """The user's own pip runs; here it is sent to a closed port, then to an empty folder."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no pip in this environment")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(Temporary) as caught:
        get_converter.fetch()
    assert (caught.value.code, caught.value.exit_code) == ("no_converter", 8)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(NotInstalled) as missing:
        get_converter.fetch()
    assert (missing.value.code, missing.value.exit_code) == ("no_converter", 7)
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True
