"""`skill-train plan` and `submit` of rows with pictures, against the Hub for tests: what is said and sent."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_child import Commands, Done
from hub_emulator import Fault, Hub, JobFault
from hub_emulator.buckets import read_file
from hub_models import add_model
from models import recorded
from picture_bytes import numbered
from planning import plan_with
from skill_train.cloud.stage_data import stage
from skill_train.cloud.submit import upload
from skill_train.core import waiting
from skill_train.core.errors import SkillTrainError
from skill_train.recipe.resolved import ResolvedRecipe
from skill_train.run.job_spec import PILLOW

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL, ROWS = "Qwen/Qwen2.5-VL-7B-Instruct", "rows.jsonl"
SAID = ("--model", MODEL, "--data", ROWS, "--max-steps", "20")
NAMES = ("a.png", "A.png", "deep/er/50%20 #1?.png", "ä [b]*.png")


@pytest.fixture(scope="module")
def desk(desk: tuple[Hub, Commands, Path]) -> Iterator[tuple[Hub, Commands, Path]]:
    """With one vision model. No job gets a machine."""
    server = desk[0]
    server.faults.add_job(JobFault("stuck", attempt=None))
    pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    add_model(server, name="qwen2.5-vl-7b").files["preprocessor_config.json"] = json.dumps(pixels).encode()
    yield desk
    for job in server.jobs.all:
        job.cancelled.set()


@pytest.fixture
def call(desk: tuple[Hub, Commands, Path], tmp_path: Path) -> Any:
    server, commands, home = desk
    server.jobs.all.clear()
    for bucket in server.buckets.values():
        for claim in bucket.inside("claims"):
            del bucket.files[claim]
    server.log.clear()
    _write(tmp_path)

    def run(*arguments: object) -> Done:
        return commands.run(tmp_path, server.environment(home), *arguments)

    return run


@pytest.fixture
def hub(desk: tuple[Hub, Commands, Path]) -> Hub:
    return desk[0]


def _ask(image: Any) -> dict[str, Any]:
    return {"image": image, "question": "What is it?", "answer": "A cat."}


def _write(folder: Path) -> None:
    for number, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(numbered(number))
    (folder / "private.png").write_bytes(numbered(99))
    _write_rows(folder, *NAMES, *NAMES)


def _write_rows(folder: Path, *images: str) -> None:
    (folder / ROWS).write_text("".join(json.dumps(_ask(image)) + "\n" for image in images))


def _expected(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (ROWS, *NAMES)}


def _sent(hub: Hub) -> dict[str, bytes]:
    volume = next(v for v in hub.jobs.all[0].spec["volumes"] if v["mountPath"] == "/dataset")
    bucket = hub.buckets["me/jobs-artifacts"]
    return {path.split("/", 1)[1]: read_file(hub, bucket, path) for path in bucket.inside(volume["path"])}


def test_the_plan_and_the_decision_say_what_leaves_this_machine(hub: Hub, call: Any, tmp_path: Path) -> None:
    sizes = {name: len(content) for name, content in _expected(tmp_path).items()}
    done = call("plan", *SAID)
    assert (done.data["where"], done.data["blockers"]) == ("cloud", [])
    assert done.data["upload"] == {"files": 5, "picture_files": 4, "bytes": sum(sizes.values())}
    assert "upload to the job: the rows and 4 files of pictures" in call("plan", *SAID, "--format", "human").stdout
    rules = {reason["rule"]: reason for reason in done.data["reasons"]}
    assert (rules["picture tokens"]["value"], rules["picture tokens"]["source"]) == ("12", "preprocessor_config.json")
    asked = call("submit", *SAID)
    assert asked.error == (3, "confirm_cost") and hub.jobs_created == 0
    uploads = {upload["what"]: upload for upload in asked.answer["data"]["uploads"]}
    assert (uploads["data"]["files"], uploads["data"]["bytes"]) == (1, sizes[ROWS])
    assert (uploads["pictures"]["files"], uploads["pictures"]["bytes"]) == (4, sum(sizes.values()) - sizes[ROWS])
    assert uploads["pictures"]["to"] == "the private bucket me/jobs-artifacts"
    assert "upload: pictures of the rows, " in call("submit", *SAID, "--format", "human").stdout
    assert not [request for request in hub.log if request.method not in ("GET", "HEAD")]


def test_pictures_go_along_and_pillow_is_installed(hub: Hub, call: Any, tmp_path: Path) -> None:
    shown = call("submit", *SAID, "--dry-run").data["job"]["command"]
    assert call("submit", *SAID, "--yes").data["stage"] == "SCHEDULING"
    [job] = hub.jobs.all
    assert _sent(hub) == _expected(tmp_path)
    start = ["uv", "run", "--with", PILLOW, "/data/train.py", "/data/plan.json", "--job"]
    assert job.spec["command"] == shown == [*start, "--data", f"/dataset/{ROWS}"]


def test_pictures_go_into_a_private_dataset_repository(hub: Hub, call: Any, tmp_path: Path) -> None:
    call("submit", *SAID, "--data-repo", "me/pictures", "--yes")
    repository = hub.repositories["dataset", "me/pictures"]
    there = {name: content for name, content in repository.at("main").items() if name != ".gitattributes"}
    assert repository.private and there == _expected(tmp_path)


@pytest.mark.parametrize("backend", ["skypilot", "colab"])
def test_pictures_go_to_machines_of_others(hub: Hub, call: Any, tmp_path: Path, backend: str) -> None:
    more = () if backend == "skypilot" else ("--flavor", "a100-large")
    data = call("submit", *SAID, "--backend", backend, *more).answer["data"]
    run = tmp_path / data["run_dir"]
    if backend == "skypilot":
        there = run / "skypilot" / "data"
        sent = {path.relative_to(there).as_posix(): path.read_bytes() for path in there.rglob("*") if path.is_file()}
        assert sent == _expected(tmp_path)
        assert PILLOW in (run / "skypilot" / "requirements.txt").read_text().split()
    else:
        sizes = {f"data/{name}": len(content) for name, content in _expected(tmp_path).items()}
        assert {name: file["bytes"] for name, file in data["files"].items() if name.startswith("data/")} == sizes
        assert PILLOW in (run / "colab.ipynb").read_text()


def test_pictures_of_a_dataset_on_the_hub_need_no_upload(hub: Hub, call: Any) -> None:
    uri = "data:image/png;base64," + base64.b64encode(numbered(7)).decode()
    hub.add("dataset", "me/seen", {"train.jsonl": (json.dumps(_ask(uri)) + "\n").encode() * 40})
    words = ("--model", MODEL, "--data", "me/seen", "--max-steps", "20")
    assert "upload" not in call("plan", *words).data
    done = call("submit", *words, "--yes")
    assert [upload["what"] for upload in done.data["uploads"]] == ["program", "plan", "result"]
    [job] = hub.jobs.all
    assert [volume["mountPath"] for volume in job.spec["volumes"]] == ["/data"]
    assert job.spec["command"][2:4] == ["--with", PILLOW] and "--data" not in job.spec["command"]


@pytest.mark.parametrize("place", ["here", "on the Hub"])
@pytest.mark.parametrize("asked", ["plan", "submit"])
def test_an_address_is_refused_with_its_line(hub: Hub, call: Any, tmp_path: Path, place: str, asked: str) -> None:
    """What is there may change, or be another thing for a machine in the cloud."""
    address = "https://example.com/cat.png"
    rows = [_ask("data:image/png;base64," + base64.b64encode(numbered(7)).decode()), _ask(address)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / ROWS).write_text(content)
    hub.add("dataset", "me/addresses", {"train.jsonl": content.encode()})
    data = ROWS if place == "here" else "me/addresses"
    done = call(asked, "--model", MODEL, "--data", data, "--max-steps", "20", *["--yes"] * (asked == "submit"))
    error = done.answer["error"]
    assert done.error == (2, "bad_picture") and hub.jobs_created == 0
    assert error["message"] == f"line 2 of {data}: {address} is an address"
    assert error["got"] == address and error["hint"].startswith("download the pictures beside the rows")
    assert not [request for request in hub.log if "example.com" in request.path]


def test_a_path_in_rows_of_several_files_on_the_hub_is_refused_with_the_way_out(hub: Hub, call: Any) -> None:
    rows = (json.dumps(_ask("a.png")) + "\n").encode()
    hub.add("dataset", "me/paths", {"a.jsonl": rows, "b.jsonl": rows, "a.png": numbered(1)})
    done = call("plan", "--model", MODEL, "--data", "me/paths", "--max-steps", "20")
    error = done.answer["error"]
    assert done.error == (2, "bad_picture")
    assert error["message"] == "line 1 of me/paths: a.png has no folder"
    assert "metadata.jsonl" in error["expected"]
    assert error["hint"] == (
        "join the rows of a.jsonl, b.jsonl into one file of the repository, or train on one of them: "
        "data_file: a.jsonl in the recipe"
    )


@pytest.mark.parametrize("added", [("<image>", "<global-img>"), ("<image>",), ()])
def test_a_published_idefics3_without_a_token_for_tiles_is_told_before_it_is_trained(
    added: tuple[str, ...], hub: Hub, call: Any
) -> None:
    """From the two small files that a plan reads. Without a list of added tokens nothing is known of them."""
    config = {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"], "scale_factor": 2}
    text = recorded("llama-3.1-8b")["config"] | {"architectures": ["VLlama3ForCausalLM"]}
    config |= {"text_config": text, "vision_config": {"hidden_size": 1152, "image_size": 364, "patch_size": 14}}
    names = [*added, *["<fake_token_around_image>"] * bool(added)]
    tokens = {"added_tokens_decoder": {str(n): {"content": name} for n, name in enumerate(names)}}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(1000)}
    files["tokenizer_config.json"] = json.dumps({"chat_template": "{{ messages }}"} | tokens).encode()
    count = 8_000_000_000
    model = f"me/idefics3-{len(added)}"
    hub.add("model", model, files, info={"safetensors": {"parameters": {"BF16": count}, "total": count}})
    done = call("plan", "--model", model, "--data", ROWS, "--max-steps", "20", "--where", "cloud")
    messages = [warning["message"] for warning in done.answer["warnings"] if warning["code"] == "not_convertible"]
    assert ["the token <global-img> around a picture" in message for message in messages] == [True] * (
        added == ("<image>",)
    )


def test_sensitive_pictures_never_leave(hub: Hub, call: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: {MODEL}\ndata: {ROWS}\nsensitive: true\n")
    assert call("submit", "recipe.yaml", "--yes").error == (3, "sensitive")
    assert hub.log == [] and hub.jobs_created == 0


def test_a_path_that_a_job_cannot_have_blocks_the_plan(hub: Hub, call: Any, tmp_path: Path) -> None:
    _write_rows(tmp_path, "a.png", str(tmp_path.resolve() / "A.png"))
    done = call("plan", *SAID, "--out", "plan.json")
    assert done.error == (3, "local_input") and "--where local" in done.answer["error"]["hint"]
    assert [blocker["code"] for blocker in done.answer["data"]["blockers"]] == ["local_input"]
    assert call("submit", "plan.json", "--yes").error == (3, "local_input")
    assert call("submit", *SAID, "--yes").error == (2, "local_input")
    assert hub.jobs_created == 0
    local = call("plan", *SAID, "--where", "local").answer["data"]["blockers"]  # this machine is too small
    assert "local_input" not in {blocker["code"] for blocker in local}


def test_a_plan_is_outdated_when_a_picture_changed(hub: Hub, call: Any, tmp_path: Path) -> None:
    """The file of the rows is the same."""
    assert call("plan", *SAID, "--out", "plan.json").code == 0
    (tmp_path / "a.png").write_bytes(numbered(55))
    assert call("submit", "plan.json", "--yes").error == (2, "outdated_plan")
    assert hub.jobs_created == 0


@pytest.mark.parametrize("place", ["bucket", "repository", "bucket that keeps it"])
def test_a_picture_that_changes_while_it_is_sent_starts_no_job(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What was sent is taken back, so that the same pictures, older by then, are sent the next time. If it could not
    be taken back, as by a command that was killed before, it is replaced then."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # set for all other tests
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    _write(tmp_path)
    picture, before = tmp_path / "a.png", (tmp_path / "a.png").stat()
    content = picture.read_bytes()

    def change(_: str) -> None:
        """Said just before the upload: other bytes, as many, and a later time."""
        picture.write_bytes(content[:-1] + b"\0")
        os.utime(picture, (before.st_atime, before.st_mtime + 3600))

    staged = stage(tmp_path / ROWS, _recipe(tmp_path / ROWS))
    repository = "me/changing" if place == "repository" else None
    if place == "bucket that keeps it":
        hub.buckets.clear()
        hub.faults.add("POST /api/buckets/me/jobs-artifacts/batch", Fault(403), call=2)
    with waiting.of_command(change, []), pytest.raises(SkillTrainError) as caught:
        upload(staged, "me", repository)
    if place == "bucket that keeps it":
        files = hub.buckets["me/jobs-artifacts"].inside(staged.name)
        assert caught.value.code == "no_permission" and f"{staged.name}/a.png" in files
    else:
        assert (caught.value.code, caught.value.message.split()[0]) == ("input_changed", "a.png")
    picture.write_bytes(content)
    os.utime(picture, (before.st_atime, before.st_mtime))
    data = upload(staged, "me", repository)
    if place == "repository":
        assert hub.repositories["dataset", "me/changing"].at(str(data.revision))["a.png"] == content
    else:
        assert read_file(hub, hub.buckets[str(data.bucket)], f"{data.folder}/a.png") == content


def _recipe(data: Path) -> ResolvedRecipe:
    """One that reads these rows; nothing else of it matters here."""
    columns = {"question": "question", "answer": "answer", "images": "image"}
    return plan_with(recipe={"data": str(data), "columns": columns, "images": True, "lora_parts": ["language"]}).recipe
