"""`skills install` and `skills check`, as an agent calls them, in real folders."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from one_command import answered
from skill_train.skill import install as skill_install
from skill_train.skill.files import PROGRAMS, skill_files

ROOT = Path(__file__).resolve().parent.parent.parent
AGENTS, CLAUDE = Path(".agents/skills/skill-train"), Path(".claude/skills/skill-train")
MARKER = ".skill-train-manifest.json"


def _answer(*words: object, code: int = 0) -> dict[str, Any]:
    exit_code, answer = answered(*words)
    assert exit_code == code, answer
    return answer


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a project of its own, with a home of its own."""
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def test_a_project_gets_the_skill_once_and_a_link() -> None:
    answer = _answer("skills", "install")
    assert [place["state"] for place in answer["data"]["places"]] == ["written", "linked"]
    for name in ("SKILL.md", "references/cli.md", "templates/chat.yaml"):
        assert (AGENTS / name).read_bytes() == (ROOT / name).read_bytes()
    assert sorted(path.name for path in (AGENTS / "scripts").iterdir()) == sorted(PROGRAMS)
    assert os.readlink(CLAUDE) == "../../.agents/skills/skill-train"
    assert (CLAUDE / "SKILL.md").samefile(AGENTS / "SKILL.md")
    assert _leftovers() == []


@pytest.mark.parametrize("options", [(), ("--target", "claude"), ("--scope", "global"), ("--target", "{}/mine")])
def test_what_was_not_found_is_installed_by_the_hint(tmp_path: Path, options: tuple[str, ...]) -> None:
    words = [option.format(tmp_path) for option in options]
    [command] = _answer("skills", "check", *words, code=7)["next"]
    _answer(*shlex.split(command)[1:])
    assert _answer("skills", "check", *words)["ok"]


def test_a_second_time_writes_nothing() -> None:
    _answer("skills", "install")
    before = _times()
    answer = _answer("skills", "install")
    assert [place["state"] for place in answer["data"]["places"]] == ["current", "current"]
    assert _times() == before


def test_the_marker_names_every_file() -> None:
    _answer("skills", "install")
    marker = json.loads((AGENTS / MARKER).read_text())
    files = {path.relative_to(AGENTS).as_posix() for path in AGENTS.rglob("*") if path.is_file()}
    assert set(marker["files"]) == files - {MARKER}
    assert marker["files"]["SKILL.md"] == hashlib.sha256((ROOT / "SKILL.md").read_bytes()).hexdigest()


def test_the_home_gets_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "elsewhere" / "claude"))
    answer = _answer("skills", "install", "--scope", "global")
    home, claude = tmp_path / "home" / AGENTS, tmp_path / "elsewhere" / "claude" / "skills" / "skill-train"
    assert [place["path"] for place in answer["data"]["places"]] == [str(home), str(claude)]
    assert os.readlink(claude) == "../../../home/.agents/skills/skill-train"
    assert (claude / "SKILL.md").is_file()
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--target", "claude"], CLAUDE), (["--target", "./my skills"], Path("my skills/skill-train"))],
)
def test_one_folder_alone(arguments: list[str], expected: Path) -> None:
    answer = _answer("skills", "install", *arguments)
    assert [Path(place["path"]) for place in answer["data"]["places"]] == [Path.cwd() / expected]
    assert (expected / "SKILL.md").is_file() and not AGENTS.exists()
    assert _answer("skills", "check", *arguments)["data"]["places"][0]["state"] == "current"
    following = _answer(*shlex.split(answer["next"][0])[1:])
    assert [place["path"] for place in following["data"]["places"]] == [str(Path.cwd() / expected)]


def test_a_mistyped_target_is_not_a_folder() -> None:
    error = _answer("skills", "install", "--target", "claud", code=2)["error"]
    assert "did you mean 'claude'" in error["message"]
    assert _answer("skills", "install", "--target", "./x", "--scope", "global", code=2)["error"]["code"] == "bad_usage"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("where", [AGENTS, CLAUDE])
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_is_somebody_elses_is_refused_before_anything_is_written(where: Path, kind: str) -> None:
    _put(where, kind)
    before = _all_files()
    error = _answer("skills", "install", code=2)["error"]
    assert error["code"] == "output_exists" and str(where) in error["message"]
    assert _all_files() == before


@pytest.mark.parametrize("where", [AGENTS, CLAUDE])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_force_replaces_the_same_names_and_nothing_else(where: Path, kind: str) -> None:
    _put(where, kind)
    _answer("skills", "install", "--force")
    for place in (AGENTS, CLAUDE):
        assert (place / "SKILL.md").read_bytes() == (ROOT / "SKILL.md").read_bytes()
    assert Path("theirs/SKILL.md").read_text() == "theirs"  # what a link led to is not touched
    assert (where / "notes.md").exists() == (kind == "folder")  # what has another name stays
    assert _answer("skills", "check")["ok"]
    assert _leftovers() == []


def test_an_edited_file_is_kept_and_named() -> None:
    _answer("skills", "install")
    page = AGENTS / "references" / "cli.md"
    page.write_text("mine")
    (AGENTS / "mine.md").write_text("mine")
    (AGENTS / "SKILL.md").unlink()
    answer = _answer("skills", "install")
    assert answer["data"]["places"][0]["kept"] == ["references/cli.md"]
    assert answer["warnings"][0]["code"] == "edited_files" and "references/cli.md" in answer["warnings"][0]["message"]
    assert (page.read_text(), (AGENTS / "mine.md").read_text()) == ("mine", "mine")
    assert (AGENTS / "SKILL.md").read_bytes() == (ROOT / "SKILL.md").read_bytes()
    assert _answer("skills", "check", code=3)["data"]["places"][0]["edited"] == ["references/cli.md"]
    _answer("skills", "install", "--force")
    assert page.read_bytes() == (ROOT / "references" / "cli.md").read_bytes()
    assert (AGENTS / "mine.md").read_text() == "mine"


def test_a_new_version_replaces_what_is_old_and_keeps_what_was_edited() -> None:
    _older("0.0.9")
    (AGENTS / "references" / "datasets.md").write_text("edited since")
    answer = _answer("skills", "check", code=3)
    assert (answer["error"]["code"], answer["data"]["places"][0]["state"]) == ("skill_outdated", "older")
    place = _answer("skills", "install")["data"]["places"][0]
    assert (place["state"], place["kept"], place["removed"]) == ("updated", ["references/datasets.md"], ["gone.md"])
    assert not (AGENTS / "gone.md").exists()
    assert (AGENTS / "SKILL.md").read_bytes() == (ROOT / "SKILL.md").read_bytes()
    assert (AGENTS / "references" / "datasets.md").read_text() == "edited since"
    place = _answer("skills", "check", code=3)["data"]["places"][0]  # still known as edited, not as old
    assert (place["state"], place["edited"]) == ("edited", ["references/datasets.md"])


@pytest.mark.parametrize(
    ("installed", "state"),
    [("0.0.9", "older"), ("0.1", "older"), ("0.10.0", "newer"), ("1.0.0rc1", "newer"), ("0.1.0rc1", "different")],
)
def test_check_compares_the_versions(installed: str, state: str) -> None:
    _older(installed)
    answer = _answer("skills", "check", code=3)
    assert (answer["data"]["places"][0]["state"], answer["error"]["got"]) == (state, installed)


def test_check_says_which_command_renews_it() -> None:
    _answer("skills", "install", "--scope", "global")
    (Path.home() / AGENTS / "SKILL.md").unlink()
    answer = _answer("skills", "check", code=3)
    assert answer["data"]["places"][0]["missing"] == ["SKILL.md"]
    assert answer["next"] == ["skill-train skills install --scope global"]
    _answer(*answer["next"][0].split()[1:])
    _answer("skills", "check")


def test_check_of_what_another_program_put_there() -> None:
    _put(AGENTS, "folder")
    answer = _answer("skills", "check", code=3)
    (place,) = answer["data"]["places"]
    assert (place["state"], place["version"]) == ("unmanaged", None)


def test_check_of_nothing() -> None:
    answer = _answer("skills", "check", code=7)
    assert answer["next"] == ["skill-train skills install"]


def test_where_links_cannot_be_made_a_copy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(Path, "symlink_to", refused)
    answer = _answer("skills", "install")
    assert [place["state"] for place in answer["data"]["places"]] == ["written", "written"]
    assert (CLAUDE / "SKILL.md").is_file() and not CLAUDE.is_symlink()
    assert [place["state"] for place in _answer("skills", "install")["data"]["places"]] == ["current", "current"]


def test_one_folder_under_both_names() -> None:
    """Some keep `.claude` as a link to `.agents`, or the other way round."""
    Path(".agents").mkdir()
    Path(".claude").symlink_to(".agents")
    _answer("skills", "install")
    assert not CLAUDE.is_symlink() and (CLAUDE / "SKILL.md").is_file()
    assert len(_answer("skills", "check")["data"]["places"]) == 1


def test_a_kill_between_the_two_renames_loses_nothing() -> None:
    _answer("skills", "install")
    (AGENTS / "mine.md").write_text("mine")
    AGENTS.rename(AGENTS.with_name(".skill-train.before"))
    _answer("skills", "install")
    assert (AGENTS / "mine.md").read_text() == "mine"
    assert _leftovers() == []


def test_two_at_once_do_not_meet() -> None:
    """One renamed what the other was about to rename: `Directory not empty`, and a half that stayed."""
    AGENTS.parent.mkdir(parents=True)
    with open(AGENTS.with_name(".skill-train.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = _answer("skills", "install", code=2)["error"]
        assert (error["code"], error["hint"]) == ("run_in_use", "wait for it to end")
        assert not AGENTS.exists()
    _answer("skills", "install")
    assert _leftovers() == []


def test_a_failure_while_writing_leaves_the_old_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    _older("0.0.9")
    before = _all_files()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(skill_install, "write_json", full)
    _answer("skills", "install", code=3)
    assert _all_files() == before
    assert _leftovers() == []


def test_a_damaged_marker_keeps_what_it_cannot_account_for() -> None:
    _answer("skills", "install")
    (AGENTS / MARKER).write_text("{")
    (AGENTS / "SKILL.md").write_text("mine")
    assert _answer("skills", "install")["data"]["places"][0]["kept"] == ["SKILL.md"]
    _answer("skills", "install", "--force")
    assert _answer("skills", "check")["ok"]


def test_programs_of_a_copy_ask_for_the_version_that_made_it() -> None:
    """In a checkout `..` is the package; beside an installed skill nothing is."""
    files = skill_files("1.2.3")
    for name in PROGRAMS:
        header = files[f"scripts/{name}"].decode().split("# ///\n")[0]
        assert "==1.2.3" in header and "tool.uv" not in header, name
    assert b'path = ".."' in (ROOT / "scripts" / "plan.py").read_bytes()


def test_it_needs_no_heavy_library() -> None:
    program = (
        "import sys\nfrom skill_train.cli import main\ntry:\n    main(['skills', 'install'])\n"
        "except SystemExit:\n    sys.exit(len({'torch', 'huggingface_hub', 'yaml', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def _older(version: str) -> None:
    """What a package of that version had left: another page, and one that is gone now."""
    files = {**skill_files(version), "SKILL.md": b"old", "references/datasets.md": b"old", "gone.md": b"old"}
    skill_install.install(skill_install.Skill(version, files), Path.cwd() / AGENTS, force=False)


def _put(where: Path, kind: str) -> None:
    """Something with the same name, of somebody else."""
    theirs = Path("theirs")
    theirs.mkdir(exist_ok=True)
    (theirs / "SKILL.md").write_text("theirs")
    where.parent.mkdir(parents=True)
    if kind == "link":
        (theirs / MARKER).write_text("{}")  # even to another copy of ours: it is not written through a link
        where.symlink_to(theirs.absolute())
    elif kind == "file":
        where.write_text("theirs")
    else:
        where.mkdir()
        (where / "SKILL.md").write_text("theirs")
        (where / "notes.md").write_text("theirs")


def _all_files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def _times() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(Path().rglob("*"))}


def _leftovers() -> list[str]:
    return [str(path) for path in Path().rglob(".skill-train.*")] + [str(path) for path in Path().rglob("*.part")]
