"""Pictures that go to a job with their rows: which files leave this machine, and that a job trains on no others.

A job is a folder with copies of what was staged; `use_data` of the training program is what it asks of it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL.PngImagePlugin import PngInfo

from machines import recorded_machine
from models import recorded_model
from one_command import called
from picture_bytes import numbered
from skill_train.cloud import stage_data
from skill_train.cloud.stage_data import Staged, changed_files, folder_of, require_no_secrets, stage_plan
from skill_train.commands._planning import blocked
from skill_train.commands.plan import _with_pictures as with_pictures
from skill_train.core.errors import UsageError
from skill_train.data import row_pictures, scan
from skill_train.data.row_pictures import require_folders_of_a_repository
from skill_train.hub import flavors
from skill_train.plan.make import make_plan
from skill_train.plan.placement import Choices
from skill_train.program.events import Refused
from skill_train.program.pictures.decode import picture_digest
from skill_train.program.pictures.in_rows import lift_pictures
from skill_train.program.rows import iter_rows, picture_folder
from skill_train.program.start.inputs import use_data
from skill_train.recipe.fields import from_dict
from skill_train.run import plan_record
from skill_train.run.plan_record import Facts, Plan

NAMES = ("a.png", "b.png", "deep/er/c.png")


def _ask(image: Any) -> dict[str, Any]:
    return {"image": image, "question": "What is it?", "answer": "A cat."}


def _files(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(numbered(number))


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _plan(data: Path, **recipe: Any) -> Plan:
    wanted = from_dict({"model": "m", "data": str(data.resolve()), "max_steps": 10, **recipe})
    facts = Facts(recorded_model("qwen2.5-vl-7b"), scan.scan(wanted, pictures=True), recorded_machine("rtx_4090"))
    plan = make_plan(wanted, facts, choices=Choices(where="cloud"), offered=flavors.shipped())
    assert plan.recipe.images and plan.where == "cloud" and "vision" not in {each.code for each in plan.blockers}
    return plan


def _staged(plan: Plan) -> Staged:
    staged = stage_plan(plan)
    assert staged is not None
    return staged


def _job(staged: Staged, place: Path) -> Path:
    """What a job finds: copies, and no links."""
    with folder_of(staged) as made:
        shutil.copytree(made, place)
    return place


def _use(plan: Plan, job: Path) -> None:
    document: Any = plan.as_dict()
    use_data(document, job / Path(plan.recipe.data).name)


def _read(data: Path, plan: Plan) -> list[list[str]]:
    folder = picture_folder(str(data))
    rows = [lift_pictures(row, plan.recipe.columns)[1] for _, row in iter_rows(str(data), split=plan.recipe.split)]
    return [[picture_digest(source, folder) for source in sources] for sources in rows]


# --- What goes along ---


def _beside(here: Path) -> Path:
    _files(here, *NAMES, "not named.png")
    return _lines(
        here / "rows.jsonl", [_ask([*NAMES]), _ask("./deep/../b.png"), _ask({"bytes": None, "path": "a.png"})]
    )


def _llava(here: Path) -> Path:
    _files(here, *NAMES)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    rows = [{"image": name, "conversations": turns} for name in NAMES]
    (here / "llava.json").write_text(json.dumps(rows))
    return here / "llava.json"


def _parts(here: Path) -> Path:
    _files(here, *NAMES)
    content = [*({"type": "image", "image": name} for name in NAMES), {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    return _lines(here / "rows.jsonl", [{"messages": turns}])


def _image_folder(here: Path) -> Path:
    folder = here / "photos"
    _files(folder, *(f"train/{name}" for name in NAMES), "train/not named.png")
    rows = [{"file_name": name, "question": "What?", "answer": "A cat."} for name in NAMES]
    _lines(folder / "train" / "metadata.jsonl", rows)
    return folder


def _table(here: Path) -> Path:
    _files(here, *NAMES)
    (here / "rows.csv").write_text("image,question,answer\n" + "".join(f"{name},What?,A cat.\n" for name in NAMES))
    return here / "rows.csv"


def _odd_names(here: Path) -> Path:
    """Two that differ only by case, and what a URL, a shell or a pattern would take for something else."""
    names = ("a.png", "A.png", "50%20 #1?.png", "[ab]*.png", "ä 猫.png", ".hidden.png", "-x.png", "data/rows.jsonl.png")
    _files(here, *names)
    return _lines(here / "rows.jsonl", [_ask(name) for name in names])


def _links(here: Path) -> Path:
    """A link goes along as the file that it leads to, under its own name."""
    _files(here, "real/a.png", "b.png")
    (here / "a.png").symlink_to("real/a.png")
    (here / "folder").symlink_to("real")
    return _lines(here / "rows.jsonl", [_ask("a.png"), _ask("folder/a.png"), _ask("b.png")])


def _mixed(here: Path) -> Path:
    _files(here, "a.png")
    uri = "data:image/png;base64," + base64.b64encode(numbered(9)).decode()
    return _lines(here / "rows.jsonl", [_ask(uri), _ask("a.png"), _ask([uri, "a.png"])])


PLACES: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "beside the rows": (_beside, {"rows.jsonl", *NAMES}),
    "LLaVA": (_llava, {"llava.json", *NAMES}),
    "parts of a message": (_parts, {"rows.jsonl", *NAMES}),
    "a table": (_table, {"rows.csv", *NAMES}),
    "an imagefolder": (
        _image_folder,
        {"photos/train/metadata.jsonl", *(f"photos/train/{name}" for name in NAMES)},
    ),
    "links inside of the folder": (_links, {"rows.jsonl", "a.png", "folder/a.png", "b.png"}),
    "data URIs too": (_mixed, {"rows.jsonl", "a.png"}),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_pictures_that_rows_name_go_along_under_their_names(tmp_path: Path, name: str) -> None:
    write, expected = PLACES[name]
    data = write(tmp_path / "here")
    plan = _plan(data)
    staged = _staged(plan)
    assert set(staged.files) == expected
    assert set(staged.pictures) == {each for each in expected if each.endswith(".png")}
    job = _job(staged, tmp_path / "job")
    _use(plan, job)
    assert _read(job / data.name, plan) == _read(data, plan)
    again = _staged(plan)
    assert (again.name, again.digests) == (staged.name, staged.digests)


def test_odd_names_are_the_same_in_a_job(tmp_path: Path) -> None:
    data = _odd_names(tmp_path / "here")
    plan = _plan(data)
    staged = _staged(plan)
    assert len(staged.pictures) == 8
    job = _job(staged, tmp_path / "job")
    _use(plan, job)
    assert (job / "a.png").read_bytes() != (job / "A.png").read_bytes()
    assert _read(job / data.name, plan) == _read(data, plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_pictures_in_the_rows_need_no_file(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([_ask({"bytes": numbered(n), "path": None}) for n in range(3)])
    data = tmp_path / "here" / ("rows.parquet" if kind == "parquet" else "rows")
    (rows.to_parquet if kind == "parquet" else rows.save_to_disk)(str(data))
    plan = _plan(data)
    staged = _staged(plan)
    assert staged.pictures == frozenset() and plan.facts.dataset.images == 3
    job = _job(staged, tmp_path / "job")
    _use(plan, job)
    assert _read(job / data.name, plan) == _read(data, plan)


def test_pictures_of_rows_that_are_not_read_stay_here(tmp_path: Path) -> None:
    plan = _plan(_llava(tmp_path), split="train[:2]")
    assert set(_staged(plan).pictures) == {"a.png", "b.png"}


def test_what_lies_in_an_imagefolder_beside_the_pictures_stays_and_is_told(tmp_path: Path) -> None:
    folder = _image_folder(tmp_path)
    (folder / "id_rsa").write_text("a private key")
    assert set(_staged(_plan(folder)).left_out) == {"id_rsa", "train/not named.png"}


def test_a_program_that_follows_no_link_gets_files(tmp_path: Path) -> None:
    plan = _plan(_links(tmp_path / "here"))
    with folder_of(_staged(plan), links=False) as made:
        assert not [path for path in made.rglob("*") if path.is_symlink()]
        _use(plan, made)


def test_rows_behind_a_link_name_pictures_beside_the_file_itself(tmp_path: Path) -> None:
    """The plan names the file itself. Beside the link lies another picture of the same name."""
    data = _llava(tmp_path / "here")
    _files(tmp_path / "link", *reversed(NAMES))
    (tmp_path / "link" / "llava.json").symlink_to(data)
    assert _plan(tmp_path / "link" / "llava.json").fingerprints["data"] == _plan(data).fingerprints["data"]
    recipe = from_dict({"model": "m", "data": str(tmp_path / "link" / "llava.json")})
    assert scan.scan(recipe, pictures=True).fingerprint == _plan(data).fingerprints["data"]


# --- A job trains on these pictures, or not at all ---


def _other_pixels(job: Path) -> None:
    (job / "b.png").write_bytes(numbered(77))


def _one_bit(job: Path) -> None:
    """Behind the pixels, so that the picture looks the same."""
    with open(job / "b.png", "ab") as file:
        file.write(b"\0")


def _exchanged(job: Path) -> None:
    """The same files, each under the other's name."""
    first, second = (job / "a.png").read_bytes(), (job / "b.png").read_bytes()
    (job / "a.png").write_bytes(second)
    (job / "b.png").write_bytes(first)


def _missing(job: Path) -> None:
    (job / "deep" / "er" / "c.png").unlink()


def _emptied(job: Path) -> None:
    (job / "a.png").write_bytes(b"")


def _other_case(job: Path) -> None:
    (job / "a.png").rename(job / "A.png")


def _link(job: Path) -> None:
    (job.parent / "elsewhere.png").write_bytes((job / "a.png").read_bytes())
    (job / "a.png").unlink()
    (job / "a.png").symlink_to(job.parent / "elsewhere.png")


@pytest.mark.parametrize("damage", [_other_pixels, _one_bit, _exchanged, _missing, _emptied, _other_case, _link])
def test_a_job_with_other_pictures_trains_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    plan = _plan(_llava(tmp_path / "here"))
    job = _job(_staged(plan), tmp_path / "job")
    _use(plan, job)
    damage(job)
    with pytest.raises(Refused) as caught:
        _use(plan, job)
    assert (caught.value.error["code"], caught.value.exit_code) == ("input_changed", 2)
    if damage is _missing:
        assert "deep/er/c.png does not exist" in caught.value.error["got"]


@pytest.mark.parametrize("damage", [_other_pixels, _one_bit, _exchanged])
def test_pictures_that_changed_after_the_plan_are_not_sent(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    plan = _plan(_llava(tmp_path))
    damage(tmp_path)
    with pytest.raises(UsageError) as caught:
        stage_plan(plan)
    assert caught.value.code == "input_changed"


def test_a_picture_that_changes_while_it_is_sent_is_noticed(tmp_path: Path) -> None:
    plan = _plan(_llava(tmp_path / "here"))
    staged = _staged(plan)
    assert changed_files(staged) == []
    picture, old = tmp_path / "here" / "b.png", (tmp_path / "here" / "b.png").read_bytes()
    os.utime(picture)  # touched, with the same bytes
    assert changed_files(staged) == []
    _other_pixels(tmp_path / "here")
    assert changed_files(staged) == ["b.png"]
    picture.unlink()
    assert changed_files(staged) == ["b.png"]
    picture.write_bytes(old)
    assert changed_files(staged) == []


def test_a_change_that_no_time_shows_is_seen_in_the_job(tmp_path: Path) -> None:
    plan = _plan(_llava(tmp_path / "here"))
    staged, picture = _staged(plan), tmp_path / "here" / "b.png"
    before = picture.stat()
    content = bytearray(picture.read_bytes())
    content[-1] ^= 1
    picture.write_bytes(content)
    os.utime(picture, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed_files(staged) == []
    with pytest.raises(Refused) as caught:
        _use(plan, _job(staged, tmp_path / "job"))
    assert caught.value.error["code"] == "input_changed"


# --- What cannot be sent ---


def _absolute(here: Path) -> str:
    return str(here / "a.png")


def _through_a_link(here: Path) -> str:
    """It is `deep/b.png` here, and would be `b.png`, another picture, where there is no link."""
    (here / "link").symlink_to("deep/er")
    (here / "deep" / "b.png").write_bytes(numbered(200))
    return "link/../b.png"


def _backslash(here: Path) -> str:
    (here / "deep\\a.png").write_bytes(numbered(1))
    return "deep\\a.png"


def _of_git(here: Path) -> str:
    """`upload_folder` leaves it out without a word."""
    _files(here, ".git/a.png")
    return ".git/a.png"


@pytest.mark.parametrize("path", [_absolute, _through_a_link, _backslash, _of_git])
def test_a_path_that_means_something_else_in_a_job_is_refused(tmp_path: Path, path: Callable[[Path], str]) -> None:
    """Each can be trained on this machine."""
    here = tmp_path.resolve()
    _files(here, *NAMES)
    data = _lines(here / "rows.jsonl", [_ask("a.png"), _ask(path(here))])
    with pytest.raises(UsageError) as caught:
        stage_plan(_plan(data))
    assert caught.value.code == "local_input" and "line 2" in caught.value.message


def test_too_many_files_are_refused_with_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(_llava(tmp_path))
    monkeypatch.setattr(row_pictures, "MOST_FILES", 2)
    with pytest.raises(UsageError, match="too many files") as caught:
        stage_plan(plan)
    assert "Parquet" in (caught.value.hint or "")


def test_a_blocked_plan_names_that_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other paths would not help. `submit` of the plan's file says it again."""
    plan = _plan(_llava(tmp_path))
    monkeypatch.setattr(row_pictures, "MOST_FILES", 2)
    plan_record.write(tmp_path / "plan.json", with_pictures(plan)[0])
    error = blocked(plan_record.read(tmp_path / "plan.json"))
    assert error.code == "local_input" and "too many files" in error.message
    assert error.hint.startswith("--where local, or write the pictures as bytes into one Parquet file")


def test_a_folder_of_a_repository_has_a_limit(tmp_path: Path) -> None:
    """Fewer than 10k entries in a folder: huggingface.co/docs/hub/repositories-recommendations."""
    names = [f"photos/{number}.png" for number in range(10_000)]
    require_folders_of_a_repository(tmp_path, [*names, "other/1.png"])
    require_folders_of_a_repository(tmp_path, [])
    with pytest.raises(UsageError, match="too many files"):
        require_folders_of_a_repository(tmp_path, [*names, "photos/more.png"])


def test_a_token_in_a_picture_is_not_sent(tmp_path: Path) -> None:
    _files(tmp_path, *NAMES)
    metadata = PngInfo()
    metadata.add_text("Comment", "hf_" + "a1B2c3D4" * 4)
    (tmp_path / "b.png").write_bytes(numbered(3, pnginfo=metadata))
    plan = _plan(_llava_without_files(tmp_path))
    with pytest.raises(UsageError, match=r"b\.png seems to contain") as caught:
        require_no_secrets(_staged(plan))
    assert caught.value.code == "secret_found"


def _llava_without_files(here: Path) -> Path:
    return _lines(here / "rows.jsonl", [_ask(name) for name in NAMES])


def test_two_spellings_of_one_file_are_refused_where_the_disk_has_one(tmp_path: Path) -> None:
    """As on a Mac: the second name is there already when it is made."""
    plan = _plan(_llava(tmp_path / "here"))
    staged = _staged(plan)
    twice = dict(staged.files) | {"./a.png": staged.files["a.png"]}
    doubled = dataclasses.replace(staged, files=twice)
    with pytest.raises(UsageError, match="in two ways"), stage_data.folder_of(doubled):
        pass


def test_fixed_rows_name_the_picture_that_was_meant(tmp_path: Path) -> None:
    """The way out of the refusals: paths that mean the same in a job."""
    here = tmp_path.resolve()
    _files(here, *NAMES)
    data = _lines(here / "rows.jsonl", [_ask(_through_a_link(here)), _ask(_absolute(here))])
    plan = _plan(data)
    done = called("data", data, "--fix", here / "fixed.jsonl")
    assert done.code == 0, done
    fixed = _plan(here / "fixed.jsonl")
    assert _read(here / "fixed.jsonl", fixed) == _read(data, plan)
    assert set(_staged(fixed).pictures) == {"deep/b.png", "a.png"}
