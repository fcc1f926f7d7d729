"""What a user installs: the exact files of the wheel, and versions that were tested together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.real_python]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "skill" / "skill_train"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = dict(line.split("==") for line in LOCK.splitlines() if not line.startswith("#"))
# The skill, as `skill-train skills install` copies it.
SKILL = {"SKILL.md", *(f"scripts/{name}.py" for name in ("export_gguf", "inspect_dataset", "plan"))} | {
    path.relative_to(ROOT).as_posix() for folder in ("references", "templates") for path in (ROOT / folder).iterdir()
}
PROGRAMS = {"skill_train/shipped/skypilot_node.py"}
# Everything in the package that is not a Python module, by name: a stray file must not travel.
DATA = {
    "skill_train/demo/data.parquet",
    "skill_train/demo/recipe.yaml",
    "skill_train/demo/model/config.json",
    "skill_train/demo/model/generation_config.json",
    "skill_train/demo/model/model.safetensors",
    "skill_train/demo/model/tokenizer.json",
    "skill_train/demo/model/tokenizer.model",
    "skill_train/demo/model/tokenizer_config.json",
    "skill_train/demo/vision/data.parquet",
    "skill_train/demo/vision/recipe.yaml",
    "skill_train/demo/vision/model/config.json",
    "skill_train/demo/vision/model/generation_config.json",
    "skill_train/demo/vision/model/model.safetensors",
    "skill_train/demo/vision/model/preprocessor_config.json",
    "skill_train/demo/vision/model/tokenizer.json",
    "skill_train/demo/vision/model/tokenizer.model",
    "skill_train/demo/vision/model/tokenizer_config.json",
    "skill_train/estimate/targets.json",
    "skill_train/hub/flavors.json",
    "skill_train/report/page.html",
    "skill_train/report/run.html",
    "skill_train/report/style.css",
    "skill_train/commands/tested.json",
    "skill_train/program/train.sha256",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    assert path.name == f"skill_train-{PROJECT['version']}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_the_wheel_holds_exactly_these_files(wheel: zipfile.ZipFile) -> None:
    modules = {f"skill_train/{path.relative_to(PACKAGE).as_posix()}" for path in PACKAGE.rglob("*.py")}
    info = f"skill_train-{PROJECT['version']}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    skill = {f"skill_train/shipped/skill/{name}" for name in SKILL}
    assert set(wheel.namelist()) == modules | DATA | skill | about | PROGRAMS


def test_the_wheel_installs_the_skill(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """From the files of the wheel alone, in a project of its own, without a network."""
    wheel.extractall(tmp_path / "site")
    project = tmp_path / "project"
    project.mkdir()
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from skill_train.cli import main; main()"
    command = [sys.executable, "-c", program, str(tmp_path / "site"), "skills", "install", "--format", "json"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    copy = project / ".agents" / "skills" / "skill-train"
    assert (copy / "SKILL.md").read_bytes() == (ROOT / "SKILL.md").read_bytes()
    written = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert written == SKILL | {".skill-train-manifest.json"}


def test_the_wheel_is_light(wheel: zipfile.ZipFile) -> None:
    """5 MB is the limit for the embedded model of text, and 1.2 MB for that of pictures; 3.5 MB for everything else,
    before it is packed."""
    sizes = {entry.filename.removeprefix("skill_train/"): entry.file_size for entry in wheel.infolist()}
    models = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    text, pictures = (f"demo/{folder}/model.safetensors" for folder in ("model", "vision/model"))
    assert set(models) == {text, pictures}
    assert models[text] < 5_000_000 and models[pictures] < 1_200_000
    assert sum(sizes.values()) - sum(models.values()) < 3_500_000


def test_the_wheel_has_the_program_of_a_machine(wheel: zipfile.ZipFile) -> None:
    name = "skypilot_node.py"
    assert wheel.read(f"skill_train/shipped/{name}") == (ROOT / "scripts" / name).read_bytes()
    assert not (PACKAGE / name).exists()


def test_the_wheel_joins_the_training_program_to_the_bytes_of_the_checkout(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """What lies in the cache is not believed, and a part that was edited is refused."""
    wheel.extractall(tmp_path / "site")
    code = "from skill_train.machine.training_program import train_program as of; print(of())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "SKILL_TRAIN_CACHE": str(tmp_path / "cache")}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    path = Path(run().stdout.strip())
    assert path.is_relative_to(tmp_path / "cache") and path.name == "train.py"
    assert path.read_bytes() == (ROOT / "scripts" / "train.py").read_bytes()
    path.write_text("print('another')")
    assert Path(run().stdout.strip()).read_bytes() == (ROOT / "scripts" / "train.py").read_bytes()
    with open(tmp_path / "site" / "skill_train" / "program" / "rows.py", "a") as part:
        part.write("\n# edited\n")
    assert "was changed after it was installed" in run().stderr


def test_the_wheel_names_no_place_on_this_machine(wheel: zipfile.ZipFile) -> None:
    places = [str(place).encode() for place in (ROOT, Path.home(), sys.prefix) if len(str(place)) > 5]
    found = [(entry, place) for entry in wheel.namelist() for place in places if place in wheel.read(entry)]
    assert found == []


def test_the_light_base_needs_no_heavy_library() -> None:
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert base == {"click", "huggingface_hub", "msgspec", "pyyaml", "rich", "safetensors"}
    assert set(PROJECT["optional-dependencies"]) == {"train", "gguf", "serve", "vision", "report", "dev"}


def test_the_lock_holds_versions_and_nothing_else() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line)] == []
    assert list(PINS) == sorted(PINS)
    assert len(PINS) == len(lines)
    assert [name for name in PINS if name.startswith(("nvidia-", "cuda-", "triton"))] == []


def test_the_lock_pins_every_dependency_within_its_range() -> None:
    extras = PROJECT["optional-dependencies"].values()
    requirements = [
        Requirement(line) for line in [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]
    ]
    wrong = [str(r) for r in requirements if not r.specifier.contains(PINS.get(_normalized(r.name), "0"))]
    assert wrong == []


def test_the_training_program_pins_what_the_lock_pins() -> None:
    source = (ROOT / "scripts" / "train.py").read_text(encoding="utf-8")
    header = re.search(r"^# /// script\n(.*?)^# ///$", source, re.DOTALL | re.MULTILINE)
    assert header is not None
    script = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE))
    assert script["requires-python"] == PROJECT["requires-python"]
    pins = dict(line.split("==") for line in script["dependencies"])
    assert pins == {name: PINS[_normalized(name)] for name in pins}
    needed = {Requirement(line).name for line in PROJECT["optional-dependencies"]["train"]}
    assert needed - {"numpy"} <= set(pins)  # numpy comes with the others


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
