"""The skill as agents get it, by each way: it passes the validators, its links hold, all manifests say the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from skill_rules import findings
from skill_train.skill.files import PROGRAMS, skill_files

pytestmark = pytest.mark.real_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FRONT = yaml.safe_load((ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n")[1])
PLUGIN = ROOT / "plugins" / "skill-train"
MANIFESTS = {
    name: PLUGIN / name
    for name in (
        "plugin.json",
        ".claude-plugin/plugin.json",
        ".codex-plugin/plugin.json",
        ".cursor-plugin/plugin.json",
        "gemini-extension.json",
    )
}
CATALOGUES = {
    "claude": ROOT / ".claude-plugin" / "marketplace.json",
    "codex": ROOT / ".agents" / "plugins" / "marketplace.json",
}
BUILD = [sys.executable, str(ROOT / "scripts" / "build_plugin.py")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files in a folder of the right name, as a clone or `npx skills add` has them."""
    return _checkout(tmp_path_factory.mktemp("clone") / "skill-train")


@pytest.fixture(scope="module", params=["checkout", "installed", "plugin"])
def skill(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    if request.param == "checkout":
        return checkout
    if request.param == "plugin":
        return PLUGIN / "skills" / "skill-train"
    project = tmp_path_factory.mktemp("project")
    program = [sys.executable, "-c", "from skill_train.cli import main; main(['skills', 'install'])"]
    subprocess.run(program, cwd=project, check=True, capture_output=True)
    return project / ".agents" / "skills" / "skill-train"


def test_the_reference_validator_takes_it(skill: Path) -> None:
    done = _validate(skill)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_validator_can_refuse(skill: Path, tmp_path: Path) -> None:
    copy = tmp_path / "skill-train"
    copy.mkdir()
    page = (skill / "SKILL.md").read_text(encoding="utf-8")
    (copy / "SKILL.md").write_text(page.replace("name: skill-train", "name: Skill_Train", 1), encoding="utf-8")
    assert _validate(copy).returncode == 1


def test_every_loader_takes_it(skill: Path) -> None:
    assert findings(skill) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("name: skill-train", "name: skill_train", "is not lowercase words"),
        ("name: skill-train", "name: skill-trainer", "in a folder 'skill-train'"),
        ("license:", "version: 1\nlicense:", "unknown keys ['version']"),
        ("license:", "allowed-tools: [Bash]\nlicense:", "allowed-tools"),
        ("license:", "metadata: {version: 0.1}\nlicense:", "metadata"),
        ('description: "', 'description: "<b>', "angle brackets"),
        ('description: "', 'description: "' + "x" * 500, "description of"),
        ('description: "', 'description: a: "', "not YAML"),
        ("---\n", "", "no frontmatter"),
        ("# skill-train", "# skill-train\n" + "line\n" * 150, "lines"),
        ("# skill-train", "# skill-train\n" + "x" * 20_000, "characters"),
        ("# skill-train", "# skill-train\n[gone](references/gone.md)", "links to references/gone.md"),
        ("# skill-train", "# skill-train\n[up](../../README.md)", "links to ../../README.md"),
        ("# skill-train", "# skill-train\n`templates/gone.yaml`", "names templates/gone.yaml"),
    ],
)
def test_each_rule_finds_what_breaks_it(tmp_path: Path, old: str, new: str, finding: str) -> None:
    folder = tmp_path / "skill-train"
    shutil.copytree(PLUGIN / "skills" / "skill-train", folder)
    page = (folder / "SKILL.md").read_text(encoding="utf-8")
    assert old in page
    (folder / "SKILL.md").write_text(page.replace(old, new, 1), encoding="utf-8")
    assert any(finding in found for found in findings(folder)), findings(folder)


def test_there_is_no_root_folder_called_skills() -> None:
    """Claude Code looks for a SKILL.md at the root of a plugin only where there is none."""
    assert not (ROOT / "skills").exists()


# --- Plugins ---


def test_generated_plugins_are_up_to_date() -> None:
    done = subprocess.run([*BUILD, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_manifest_says_the_same() -> None:
    for name, path in MANIFESTS.items():
        manifest = _json(path)
        assert manifest["name"] == FRONT["name"] == PROJECT["name"], name
        assert manifest["version"] == PROJECT["version"], name
        assert manifest["description"] == FRONT["description"], name
        assert manifest.get("license", PROJECT["license"]) == FRONT["license"] == PROJECT["license"], name
    assert FRONT.get("metadata", {}).get("version", PROJECT["version"]) == PROJECT["version"]


def test_the_neutral_manifest_has_only_fields_of_its_schema() -> None:
    """Agent Plugins 1.0.0: a closed set of fields; without `$schema` a client rejects the plugin."""
    fields = {"$schema", "name", "version", "description", "author", "homepage", "repository", "license", "keywords"}
    manifest = _json(MANIFESTS["plugin.json"])
    assert set(manifest) <= fields | {"extensions"}
    assert manifest["$schema"] == "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"


def test_what_a_manifest_points_at_is_there() -> None:
    for name in (".codex-plugin/plugin.json", ".cursor-plugin/plugin.json"):
        folder = PLUGIN / _json(MANIFESTS[name])["skills"]
        assert [path.parent.name for path in folder.glob("*/SKILL.md")] == ["skill-train"], name
    claude, codex = (_json(path) for path in CATALOGUES.values())
    assert [(ROOT / plugin["source"]).resolve() for plugin in claude["plugins"]] == [PLUGIN]
    assert [(ROOT / plugin["source"]["path"]).resolve() for plugin in codex["plugins"]] == [PLUGIN]
    for catalogue in (claude, codex):
        assert catalogue["name"] == catalogue["plugins"][0]["name"] == "skill-train"  # the install id is name@name
    assert [path for path in PLUGIN.rglob("*") if path.is_symlink()] == []


def test_the_build_finds_what_is_out_of_date(checkout: Path) -> None:
    """A changed version, a changed page and a stray file, in a copy."""
    script = checkout / "scripts" / "build_plugin.py"
    command = [sys.executable, str(script), "--check"]
    environment = os.environ | {"PYTHONPATH": str(checkout / "skill")}

    def stale() -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == bool(done.stdout), done.stderr
        return [line.split()[0] for line in done.stdout.splitlines()]

    assert stale() == []
    page, project = checkout / "references" / "datasets.md", checkout / "pyproject.toml"
    (checkout / "plugins" / "skill-train" / "stray").touch()
    page.write_text(page.read_text() + "More.\n")
    project.write_text(re.sub(r'^version = ".*"', 'version = "9.9.9"', project.read_text(), flags=re.MULTILINE))
    found = stale()
    inside = "plugins/skill-train/skills/skill-train"
    assert {f"{inside}/references/datasets.md", f"{inside}/scripts/plan.py", "plugins/skill-train/stray"} <= set(found)
    assert {f"plugins/skill-train/{name}" for name in MANIFESTS} <= set(found)
    subprocess.run(command[:2], check=True, capture_output=True, env=environment)
    assert stale() == []


# --- Programs that run alone ---


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_command(name: str) -> None:
    """Its options, its JSON and its exit codes are those of the command that its page names."""
    command = {"plan.py": "plan", "inspect_dataset.py": "data", "export_gguf.py": "export-gguf"}[name]
    script = str(ROOT / "scripts" / name)
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and f"Usage: skill-train {command}" in shown.stdout and "Exit codes:" in shown.stdout
    wrong = subprocess.run([sys.executable, script, "nowhere", "--format", "json"], capture_output=True, text=True)
    answer = json.loads(wrong.stdout)
    assert (answer["command"], wrong.returncode) == (command, 2), answer


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_header_of_a_program(name: str) -> None:
    source = (ROOT / "scripts" / name).read_text(encoding="utf-8")
    here, copied = _header(source), _header(skill_files("1.2.3")[f"scripts/{name}"].decode())
    assert here["requires-python"] == PROJECT["requires-python"]
    assert (ROOT / "scripts" / here["tool"]["uv"]["sources"]["skill-train"]["path"]).resolve() == ROOT
    assert copied["dependencies"] == [f"{here['dependencies'][0]}==1.2.3"] and "tool" not in copied
    extras = re.findall(r"\w+", here["dependencies"][0].removeprefix("skill-train"))
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_uv_runs_a_program_without_an_installation(checkout: Path, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is late?", "completion": "The ticket."}\n' * 20)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    script = str(checkout / "scripts" / "inspect_dataset.py")
    command = [str(uv), "run", "--no-progress", script, "rows.jsonl", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=kept)
    if done.returncode and "skill-train" not in done.stdout:
        pytest.skip(f"uv could not fetch what the program needs: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["rows"] == 20


# --- npx skills add ---


def test_npx_skills_add_installs_it(checkout: Path, tmp_path: Path) -> None:
    """The installer of skills.sh takes the repository's root as the skill, and leaves the plugin's copy alone."""
    program = _npx_skills(tmp_path / "npm")
    project = tmp_path / "project"
    project.mkdir()
    quiet = os.environ | {"DISABLE_TELEMETRY": "1", "HOME": str(tmp_path)}
    command = [*program, "add", str(checkout), "-a", "claude-code", "-a", "codex", "-y"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=quiet, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = project / ".agents" / "skills"
    assert [path.name for path in installed.iterdir()] == ["skill-train"]
    assert findings(installed / "skill-train") == []
    assert (project / ".claude" / "skills" / "skill-train" / "SKILL.md").samefile(
        installed / "skill-train" / "SKILL.md"
    )
    plan = [sys.executable, str(installed / "skill-train" / "scripts" / "plan.py"), "--help"]
    assert subprocess.run(plan, capture_output=True).returncode == 0


def _npx_skills(folder: Path) -> list[str]:
    """`npx skills`, of a fixed version: needs Node 22.20 and the npm registry."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed")
    said = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    if tuple(map(int, re.findall(r"\d+", said)[:2])) < (22, 20):
        pytest.skip(f"skills 1.7.4 needs Node 22.20, this is {said.strip()}")
    command = [npm, "install", "--prefix", str(folder), "--no-save", "--ignore-scripts", "skills@1.7.4"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm could not fetch skills 1.7.4: {done.stderr[-300:]}")
    manifest = _json(folder / "node_modules" / "skills" / "package.json")
    return [node, str(folder / "node_modules" / "skills" / manifest["bin"]["skills"])]


def _checkout(folder: Path) -> Path:
    """What git has, and what is new and not ignored."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _validate(folder: Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("agentskills"))
    return subprocess.run([program, "validate", str(folder)], capture_output=True, text=True)


def _header(source: str) -> dict[str, Any]:
    block = re.search(r"^# /// script\n(.*?)^# ///$", source, re.DOTALL | re.MULTILINE)
    assert block is not None
    return tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))


def _json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
