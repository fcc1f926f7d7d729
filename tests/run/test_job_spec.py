"""What a job is started with, and data on its way into it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import planning
from skill_train.cloud import stage_data, start_once
from skill_train.hub import account as hub_account
from skill_train.run import job_spec
from skill_train.run.cloud_record import CloudData, CloudJob, CloudRecord
from skill_train.run.folder import RunDir
from skill_train.run.job_spec import JobSpec, Mount
from skill_train.run.plan_record import Plan

RECORD = CloudRecord("0123456789ab", "0" * 16, "me", "me/tickets")
DATA = Mount("me/jobs-artifacts", "data-1", "/dataset", read_only=True)


def _plan(*, four_bit: bool = False, report_to: str = "none", images: bool = False) -> Plan:
    recipe = {"data": "/srv/me/my rows.jsonl", "load_in_4bit": four_bit}
    recipe |= {"images": True, "lora_parts": ["language"]} if images else {}
    policy, placement = {"hub_model_id": "me/tickets"}, {"report_to": report_to}
    return planning.plan_with(recipe=recipe, policy=policy, placement=placement)


def _spec(plan: Plan, record: CloudRecord = RECORD) -> JobSpec:
    job = CloudJob(1, "starting", "l4x1", 600, "2026-11-21T10:00:00Z")
    return start_once.specification(RunDir(Path("runs/x")), plan, record, job)


def test_trackio_is_brought_when_it_is_asked_for() -> None:
    spec = _spec(_plan(report_to="trackio"))
    assert job_spec.command(spec)[:4] == ["uv", "run", "--with", "trackio"]


def test_the_command_of_a_job() -> None:
    spec = _spec(_plan(), msgspec.structs.replace(RECORD, data=CloudData.of_mount(DATA)))
    assert job_spec.command(spec) == [
        "uv", "run", "/data/train.py", "/data/plan.json", "--job", "--data", "/dataset/my rows.jsonl"
    ]  # fmt: skip
    assert (spec.name, spec.environment["SKILL_TRAIN_RUN"]) == ("tickets", "0123456789ab")
    plain = _spec(_plan())
    assert job_spec.command(plain)[2:] == ["/data/train.py", "/data/plan.json", "--job"]
    assert plain.mounts == ()


def test_only_qlora_brings_bitsandbytes() -> None:
    """One exact version; transformers 5.23 wants 0.46.1 or newer (its BITSANDBYTES_MIN_VERSION)."""
    spec = _spec(_plan(four_bit=True))
    assert job_spec.command(spec)[:5] == ["uv", "run", "--with", job_spec.FOUR_BIT, "/data/train.py"]
    found = re.fullmatch(r"bitsandbytes==(\d+)\.(\d+)\.(\d+)", job_spec.FOUR_BIT)
    assert found and tuple(map(int, found.groups())) >= (0, 46, 1)
    assert _spec(_plan()).dependencies == ()
    package = Path(job_spec.__file__).parents[1]
    named = [path.name for path in package.rglob("*.py") if "bitsandbytes==" in path.read_text(encoding="utf-8")]
    assert named == ["job_spec.py"]


def test_only_pictures_bring_pillow() -> None:
    """In the version that this repository is tested with: another one may decode other pixels."""
    spec = _spec(_plan(images=True))
    assert job_spec.command(spec)[:5] == ["uv", "run", "--with", job_spec.PILLOW, "/data/train.py"]
    root = Path(__file__).resolve().parents[2]
    assert job_spec.PILLOW in (root / "requirements.lock").read_text().splitlines()
    assert "pillow" not in (root / "scripts" / "train.py").read_text().split("# ///")[1].lower()
    both = _spec(_plan(images=True, four_bit=True))
    assert both.dependencies == (job_spec.FOUR_BIT, job_spec.PILLOW)


# --- Data on its way ---


def test_a_file_and_a_folder_are_staged(tmp_path: Path) -> None:
    files = {"dataset_info.json": b"{}", "state.json": b'{"_data_files": [{"filename": "a.arrow"}]}', "a.arrow": b"12"}
    (tmp_path / "rows").mkdir()
    for name, content in files.items():
        (tmp_path / "rows" / name).write_bytes(content)
    (tmp_path / "beside.txt").write_bytes(b"not mine")
    staged = stage_data.stage(tmp_path / "rows")
    assert (set(staged.files), staged.bytes) == ({f"rows/{name}" for name in files}, 46)
    with stage_data.folder_of(staged) as folder:
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {f"rows/{name}": content for name, content in files.items()}
    assert not folder.exists() and (tmp_path / "rows" / "a.arrow").read_bytes() == b"12"
    alone = stage_data.stage(tmp_path / "rows" / "a.arrow")
    assert set(alone.files) == {"a.arrow"}


def test_the_same_files_have_the_same_name_in_the_bucket(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text("{}")
    first, second = (stage_data.stage(tmp_path / folder / "rows.jsonl").name for folder in ("one", "two"))
    assert first == second and re.fullmatch("data-[0-9a-f]{16}", first)
    (tmp_path / "two" / "rows.jsonl").write_text("{ }")
    assert stage_data.stage(tmp_path / "two" / "rows.jsonl").name != first
    (tmp_path / "one" / "rows.jsonl").rename(tmp_path / "one" / "other.jsonl")
    assert stage_data.stage(tmp_path / "one" / "other.jsonl").name != first


def test_no_argument_of_a_job_is_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client uploads every argument that is one (huggingface_hub 2.4, `run_uv_job`)."""
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "rows.jsonl").write_text("{}")
    staged = stage_data.stage(tmp_path / "dataset" / "rows.jsonl")
    monkeypatch.setattr(stage_data, "_MOUNT", str(tmp_path / "dataset"))
    assert stage_data.mount_path(staged) == f"{tmp_path}/dataset-2"
    monkeypatch.setattr(stage_data, "_MOUNT", str(tmp_path / "nothing"))
    assert stage_data.mount_path(staged) == f"{tmp_path}/nothing"


# --- What a token may do ---

FINE = {
    "global": ["discussion.write"],
    "scoped": [
        {"entity": {"type": "user", "name": "ada"}, "permissions": ["repo.write", "job.write"]},
        {"entity": {"type": "org", "name": "acme"}, "permissions": ["job.write"]},
        {"entity": {"type": "model", "name": "acme/tickets"}, "permissions": ["repo.write"]},
    ],
}


def _account(token: dict[str, Any] | None) -> hub_account.Account:
    orgs = [{"type": "org", "name": "acme"}]
    return hub_account._account({"name": "ada", "orgs": orgs, "auth": {"accessToken": token}})


@pytest.mark.parametrize(
    ("token", "permission", "where", "may"),
    [
        ({"role": "write"}, "job.write", "acme", True),
        ({"role": "read"}, "repo.write", "ada", False),
        (None, "job.write", "ada", None),  # a sign-in by browser
        ({"role": "fineGrained", "fineGrained": FINE}, "job.write", "ada", True),
        ({"role": "fineGrained", "fineGrained": FINE}, "job.write", "acme", True),
        ({"role": "fineGrained", "fineGrained": FINE}, "repo.write", "ada/new", True),
        ({"role": "fineGrained", "fineGrained": FINE}, "repo.write", "acme", False),
        ({"role": "fineGrained", "fineGrained": FINE}, "repo.write", "acme/tickets", True),
        ({"role": "fineGrained", "fineGrained": FINE}, "repo.write", "acme/other", False),
        ({"role": "fineGrained", "fineGrained": {"global": ["job.write"]}}, "job.write", "ada", True),
        ({"role": "fineGrained", "fineGrained": {"scoped": [{"permissions": ["job.write"]}]}}, "job.write", "x", False),
    ],
)
def test_a_right_is_one_of_a_place(token: Any, permission: str, where: str, may: bool | None) -> None:
    assert _account(token).may(permission, where) is may
    assert _account(token).orgs == ("acme",)
