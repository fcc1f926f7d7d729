"""Finds llama.cpp's converter, and downloads it if there is none.

The converter is a program with its own packages (`conversion/`, `gguf-py/`), which must come from the same tag. The
`gguf` package on PyPI is too old for it. The source distribution of llama-cpp-python contains all of them, in the
version that will read the files. It is downloaded once, with the user's own pip and so their index and proxy, and
unpacked into the cache with a manifest of digests. The converter runs as a child process.
"""

import ast
import errno
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TypedDict

from skill_train.core.console import Bar
from skill_train.core.digests import FileDigest, digests, file_digest
from skill_train.core.errors import NotInstalled, SkillTrainError, Temporary, UsageError, quoted, system_error
from skill_train.core.files import scratch_folder, write_json
from skill_train.machine.read import cache_dir
from skill_train.model.convertible import architectures as llama_architectures
from skill_train.run import records

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "skill-train/llama.cpp/1"
FETCH_COMMAND = "skill-train export-gguf --fetch"
_ANOTHER_WAY = f"{FETCH_COMMAND}; or name a llama.cpp source folder with --llama-cpp DIR"

_NEEDED = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion/__init__.py", "gguf-py/gguf/__init__.py")
_FOLDERS = ("conversion/", "gguf-py/gguf/", "models/")
_SUFFIXES = (".py", ".gguf", ".jinja", "py.typed")
_TORN = (tarfile.TarError, EOFError, zlib.error)
_MOST_BYTES = 1_000_000_000  # the most to unpack; the expected archive has 80 MB


class _Manifest(TypedDict):
    files: dict[str, FileDigest]


@dataclass(frozen=True)
class Toolchain:
    """A llama.cpp source folder with a converter."""

    folder: Path  # contains the converters and their packages
    source: str  # `--llama-cpp`, `cached` or `PATH`
    version: str | None  # the llama-cpp-python release that contained the folder; None for other folders

    def architectures(self) -> frozenset[str]:
        """The architectures that this converter can convert: the keys of its TEXT_MODEL_MAP."""
        return self._registered("TEXT_MODEL_MAP", llama_architectures.NAMES)

    def projectors(self) -> frozenset[str]:
        """The architectures whose projector this converter can make: the keys of its MMPROJ_MODEL_MAP."""
        return self._registered("MMPROJ_MODEL_MAP", llama_architectures.PROJECTORS)

    def _registered(self, name: str, otherwise: frozenset[str]) -> frozenset[str]:
        """The keys of a table in conversion/__init__.py, which is parsed and not run. `otherwise` if there is no such
        table."""
        try:
            tree = ast.parse((self.folder / "conversion" / "__init__.py").read_text(encoding="utf-8"))
            tables = (node for node in tree.body if isinstance(node, ast.AnnAssign))
            table = next(node for node in tables if ast.unparse(node.target) == name)
            return frozenset(ast.literal_eval(table.value)) if table.value else otherwise
        except (OSError, StopIteration, SyntaxError, ValueError):
            return otherwise


def find(llama_cpp: Path | None = None) -> Toolchain:
    """Finds a converter: in `llama_cpp` if given, or else the cached one of the installed llama-cpp-python, or else on
    PATH.

    Raises:
        UsageError: `llama_cpp` is not a llama.cpp source folder.
        NotInstalled: there is no converter. The hint is the command that downloads one.
    """
    if llama_cpp is not None:
        return _named_toolchain(llama_cpp)
    toolchain = _cached() or _on_path()
    if toolchain is None:
        raise NotInstalled(
            "llama.cpp's converter has not been downloaded yet",
            code="no_converter",
            expected=f"the source of llama-cpp-python {_installed_version() or '(not installed)'} in {cache_dir()}",
            hint=_ANOTHER_WAY,
        )
    return toolchain


def find_or_fetch(llama_cpp: Path | None = None, *, progress: Bar = lambda done, total, text: None) -> Toolchain:
    """Finds a converter as `find` does. Downloads it first if there is none."""
    try:
        return find(llama_cpp)
    except NotInstalled:
        return fetch(progress=progress)


def fetch(*, progress: Bar = lambda done, total, text: None) -> Toolchain:
    """Downloads and unpacks the source of the installed llama-cpp-python. Does nothing if the cache has all of it.

    Raises:
        NotInstalled: llama-cpp-python or pip is missing, or the index does not have the archive.
        Temporary: the download failed.
    """
    if toolchain := _cached():
        return toolchain
    version = _installed_version()
    if version is None:
        raise NotInstalled(
            "llama-cpp-python is not installed, so the matching converter is unknown",
            code="missing_package",
            hint='pip install "skill-train[gguf]"',
        )
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_dir()).close()
    except OSError as error:
        refused = system_error(error)
        refused.hint += "; or export SKILL_TRAIN_CACHE=DIR first"
        raise refused from None
    with scratch_folder() as folder:
        progress(0, 3, f"downloading the source of llama-cpp-python {version} (about 80 MB, once)")
        archive = _download(version, folder)
        progress(1, 3, "unpacking the converter")
        unpack(archive, cache_dir() / f"llama.cpp-{version}", version=version)
    progress(3, 3, "converter ready")
    return find()


def unpack(archive: Path, final: Path, *, version: str) -> None:
    """Unpacks the converter's files and a manifest into the folder `final`, completely or not at all.

    Raises:
        NotInstalled: the archive has an unsafe name or a link, or lacks a file.
    """
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    part.mkdir(parents=True)
    try:
        for name, member, source in _wanted_members(archive):
            _unpack_member(source, member, part / name)
        if missing := _missing(part):
            raise _bad_archive(f"{', '.join(missing)} not in it")
        manifest = {"schema": MANIFEST_SCHEMA, "version": version, "archive": file_digest(archive)}
        write_json(part / MANIFEST, manifest | {"files": digests(part)})
        _take_name(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unpack_member(source: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Unpacks one file of the archive. The error of a full disk is not translated.

    Raises:
        NotInstalled: the archive is torn, or the name is not a valid file name here.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.extractfile(member) as reader, open(target, "wb") as writer:  # type: ignore[union-attr]
            shutil.copyfileobj(reader, writer)
    except (FileExistsError, NotADirectoryError, IsADirectoryError, ValueError, *_TORN) as error:
        raise _bad_archive(f"{member.name[:80]!r} cannot be unpacked: {error}") from None
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise
        raise _bad_archive(f"{member.name[:80]!r} is not a valid file name") from None


def is_whole(folder: Path) -> bool:
    """Whether the folder matches its manifest: Python files by digest, other files by size, no further Python file."""
    try:
        files = records.read(folder / MANIFEST, _Manifest)["files"]
    except (OSError, UsageError):  # no manifest, or not ours
        return False
    programs = {name for name in files if name.endswith(".py")}
    if {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} != programs:
        return False
    return all(
        (folder / name).is_file()
        and (folder / name).stat().st_size == digest["bytes"]
        and (name not in programs or file_digest(folder / name) == digest)
        for name, digest in files.items()
    )


def _missing(folder: Path) -> list[str]:
    return [name for name in _NEEDED if not (folder / name).is_file()]


def _named_toolchain(folder: Path) -> Toolchain:
    if missing := _missing(folder):
        raise UsageError(
            f"{folder} is not a llama.cpp source folder with a converter",
            code="no_converter",
            expected=", ".join(_NEEDED),
            got="no such folder" if not folder.is_dir() else f"without {', '.join(missing)}",
            hint="git clone https://github.com/ggml-org/llama.cpp, or omit --llama-cpp",
        )
    return Toolchain(folder, "--llama-cpp", None)


def _cached() -> Toolchain | None:
    version = _installed_version()
    folder = cache_dir() / f"llama.cpp-{version}"
    return Toolchain(folder, "cached", version) if version and is_whole(folder) else None


def _on_path() -> Toolchain | None:
    script = shutil.which("convert_hf_to_gguf.py")
    folder = Path(script).resolve().parent if script else None
    if folder is None or _missing(folder):
        return None  # an older converter, or one without its packages: it would not run
    return Toolchain(folder, "PATH", None)


def _installed_version() -> str | None:
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def _download(version: str, folder: Path) -> Path:
    # After the download pip builds the package's metadata. It installs the build tools in a separate folder for that,
    # which takes seconds and compiles nothing.
    arguments = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--retries", "2", "--dest", str(folder)]
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_NO_COLOR="1")
    uv_index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    if uv_index:
        environment.setdefault("PIP_INDEX_URL", uv_index)
    done = subprocess.run(
        [*_pip(), *arguments, f"llama-cpp-python=={version}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    archives = sorted(folder.glob("llama_cpp_python-*.tar.gz"))
    if done.returncode != 0 or not archives:
        raise _download_failed(done.stderr, version)
    return archives[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")  # environments made by uv have no pip of their own
    if uv is not None:
        return [uv, "run", "--no-project", "--python", sys.executable, "--with", "pip", "--", "python", "-m", "pip"]
    raise NotInstalled(
        "downloading the converter needs pip or uv, and neither is installed",
        code="missing_package",
        hint=f"{quoted(sys.executable)} -m ensurepip, then {FETCH_COMMAND}",
    )


def _download_failed(log: str, version: str) -> SkillTrainError:
    errors = [line for line in log.splitlines() if line.startswith(("ERROR", "error"))]
    got = errors[-1] if errors else (log.strip().splitlines() or ["pip said nothing"])[-1]
    message = f"pip could not download the source of llama-cpp-python {version}"
    if "No matching distribution" in log and "connection" not in log.lower():
        return NotInstalled(
            message, code="no_converter", expected="an index that has its .tar.gz", got=got, hint=_ANOTHER_WAY
        )
    return Temporary(message, code="no_converter", got=got, hint=_ANOTHER_WAY)


def _wanted_members(archive: Path) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo, tarfile.TarFile]]:
    """For each file to unpack: its path below `vendor/llama.cpp/`, its member, and the open archive."""
    total = 0
    try:
        with tarfile.open(archive, mode="r:gz") as source:
            for member in source:
                name = member.name.partition("/vendor/llama.cpp/")[2]
                if not _is_wanted(name):
                    continue
                leads_out = ".." in PurePosixPath(member.name).parts or member.name.startswith("/")
                if leads_out or not member.isfile() or not member.name.isprintable():
                    raise _bad_archive(f"unsafe member {member.name}")
                total += member.size
                if total > _MOST_BYTES:
                    raise _bad_archive(f"more than {_MOST_BYTES} bytes")
                yield PurePosixPath(name), member, source
    except (*_TORN, OSError, ValueError) as error:
        raise _bad_archive(str(error)) from None


def _is_wanted(name: str) -> bool:
    if "/" not in name:
        return name in ("LICENSE", "convert_hf_to_gguf.py", "convert_lora_to_gguf.py")
    return name.startswith(_FOLDERS) and name.endswith(_SUFFIXES)


def _bad_archive(why: str) -> NotInstalled:
    return NotInstalled(
        f"the source archive of llama-cpp-python cannot be used: {why}",
        code="no_converter",
        expected=", ".join(_NEEDED),
        got=why,
        hint="run pip cache purge and try again, or use a llama.cpp source folder with --llama-cpp DIR",
    )


def _take_name(part: Path, final: Path) -> None:
    if final.exists() and not is_whole(final):
        shutil.rmtree(final)  # the folder is ours, and damaged
    try:
        os.replace(part, final)
    except OSError:
        if not is_whole(final):  # otherwise another process has finished the same work
            raise
