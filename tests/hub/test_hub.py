"""What the Hub is asked and what it may answer: the real client, over real HTTP, against a Hub on this machine."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_child import ask
from hub_emulator import ALWAYS, Fault, Hub, Lie, Repository
from hub_models import add_model
from models import recorded
from skill_train.core.errors import SkillTrainError

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
WEIGHTS = r"/resolve/.*\.safetensors$"
HEADER_BYTES = 100_001  # what huggingface_hub asks for to read a header; source: parse_safetensors_file_metadata
# The shape of the API's answer: JobHardwareInfo in huggingface_hub 2.4. Prices are of 2026-08-22, a minute.
T4 = {"type": "gpu", "model": "T4", "quantity": "1", "vram": "16 GB", "manufacturer": "Nvidia"}
HARDWARE: list[dict[str, Any]] = [
    {
        "name": "cpu-basic", "prettyName": "CPU Basic", "cpu": "2 vCPU", "ram": "16 GB", "ephemeralStorage": "50 GB",
        "accelerator": None, "unitCostMicroUSD": 167, "unitCostUSD": 0.000167, "unitLabel": "minute",
    },
    {
        "name": "t4-small", "prettyName": "Nvidia T4 - small", "cpu": "4 vCPU", "ram": "15 GB",
        "ephemeralStorage": "50 GB", "accelerator": T4,
        "unitCostMicroUSD": 6667, "unitCostUSD": 0.006667, "unitLabel": "minute",
    },
    {
        "name": "l40sx8", "prettyName": "8x Nvidia L40S", "cpu": "192 vCPU", "ram": "1534 GB",
        "ephemeralStorage": "6.5 TB", "accelerator": T4 | {"model": "L40S", "quantity": "8", "vram": "384 GB"},
        "unitCostMicroUSD": 391667, "unitCostUSD": 0.391667, "unitLabel": "minute",
    },
    {
        "name": "v5e-1x1", "prettyName": "TPU", "cpu": "22 vCPU", "ram": "44 GB", "ephemeralStorage": "100 GB",
        "accelerator": T4 | {"type": "tpu", "manufacturer": "Google"},
        "unitCostMicroUSD": 20000, "unitCostUSD": 0.02, "unitLabel": "minute",
    },
]  # fmt: skip


@pytest.fixture
def hub(hub: Hub) -> Iterator[Hub]:
    hub.hardware = HARDWARE
    yield hub
    assert hub.sent(WEIGHTS) <= 8 * HEADER_BYTES


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


# --- A model ---


def test_the_facts_of_a_model(hub: Hub, home: Path) -> None:
    """The parameters as the Hub has counted them; the weights are never asked for."""
    repository = _model(hub)
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["source"], facts["revision"], facts["gated"]) == (MODEL, repository.commit("main"), False)
    assert (facts["parameters"], facts["parameters_from"]) == (494_032_768, "safetensors headers")
    assert (facts["layers"], facts["stored_dtype"], facts["has_chat_template"]) == (24, "BF16", True)
    assert facts["weight_bytes"] == len(repository.files["model.safetensors"])
    assert facts["unknown"] == {}
    assert hub.sent(WEIGHTS) == 0


def test_the_second_time_asks_only_for_what_may_have_changed(hub: Hub, home: Path) -> None:
    _model(hub)
    ask(hub, home, "hub.models.model_facts", MODEL, None)
    hub.log.clear()
    ask(hub, home, "hub.models.model_facts", MODEL, None)
    requests = [(request.method, request.path) for request in hub.log if "harness" not in request.path]
    assert requests == [("GET", f"/api/models/{MODEL}"), ("HEAD", f"/{MODEL}/resolve/main/config.json")]


def test_headers_are_read_where_the_hub_has_not_counted(hub: Hub, home: Path) -> None:
    _model(hub, safetensors=None, weights={"a": [1000, 1000], "b": [7]})
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["parameters"], facts["parameters_from"]) == (1_000_007, "safetensors headers")
    assert hub.sent(WEIGHTS) == HEADER_BYTES  # of 2 MB


def test_shards_count_once_and_copies_not_at_all(hub: Hub, home: Path) -> None:
    repository = _model(hub, safetensors=None, weights={"a": [5]})
    shard = repository.files.pop("model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"]
    repository.files |= dict.fromkeys(names, shard)
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["parameters"], facts["weight_bytes"]) == (10, 2 * len(shard))


def test_many_shards_are_not_asked_one_by_one(hub: Hub, home: Path) -> None:
    """The arithmetic answers, and no shard is touched."""
    repository = _model(hub, safetensors=None)
    shard = repository.files.pop("model.safetensors")
    repository.files |= {f"model-{n:05d}-of-00037.safetensors": shard for n in range(1, 38)}
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["parameters"], facts["parameters_from"]) == (494_032_768, "config arithmetic")
    assert hub.sent(WEIGHTS) == 0


@pytest.mark.parametrize(
    ("files", "info", "expected"),
    [
        ({"chat_template.jinja": b"{{ messages }}"}, {}, True),
        ({"chat_template.json": b"{}"}, {}, True),
        ({"tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'}, {}, True),
        ({"tokenizer_config.json": b"{}"}, {"config": {"tokenizer_config": {"chat_template": "{{ m }}"}}}, True),
        ({"tokenizer_config.json": b"{}"}, {}, False),
        ({"tokenizer_config.json": b"[" * 100_000}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_chat_template_is_found_wherever_it_is(
    hub: Hub, home: Path, files: dict[str, bytes], info: dict[str, Any], expected: bool
) -> None:
    repository = _model(hub)
    repository.files.pop("tokenizer_config.json")
    repository.files |= files
    repository.info |= info
    assert ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]["has_chat_template"] is expected


def test_a_revision_is_pinned(hub: Hub, home: Path) -> None:
    repository = _model(hub)
    config = recorded("qwen2.5-0.5b")["config"] | {"num_hidden_layers": 2}
    repository.branches["small"] = repository.files | {"config.json": json.dumps(config).encode()}
    facts = ask(hub, home, "hub.models.model_facts", MODEL, "small")["answer"]
    assert (facts["layers"], facts["revision"]) == (2, repository.commit("small"))
    error = ask(hub, home, "hub.models.model_facts", MODEL, "none")["error"]
    assert (error["code"], error["exit_code"]) == ("unknown_revision", 2)


# --- What it refuses ---


def test_an_unknown_model(hub: Hub, home: Path) -> None:
    for token in (hub.token, None):
        error = ask(hub, home, "hub.models.model_facts", "nobody/nothing", None, token=token)["error"]
        assert (error["code"], error["exit_code"], error["got"]) == ("unknown_model", 2, "nobody/nothing")
        assert "hf auth login" in error["hint"]


@pytest.mark.parametrize("name", ["me/x-", "me/a--b", "me/x.git", "me/" + "x" * 97])
def test_a_name_that_no_repository_can_have(hub: Hub, home: Path, name: str) -> None:
    """The client sends no request for it."""
    assert ask(hub, home, "hub.models.model_facts", name, None)["error"]["code"] == "unknown_model"
    assert ask(hub, home, "hub.datasets.inspect_dataset", {"data": name})["error"]["code"] == "unknown_dataset"


def test_a_private_model_is_there_for_its_token_only(hub: Hub, home: Path) -> None:
    _model(hub).private = True
    assert "answer" in ask(hub, home, "hub.models.model_facts", MODEL, None)
    assert ask(hub, home, "hub.models.model_facts", MODEL, None, token=None)["error"]["code"] == "unknown_model"


@pytest.mark.parametrize("function", ["hub.models.model_facts", "hub.models.model_folder"])
def test_a_gated_model(hub: Hub, home: Path, function: str) -> None:
    _model(hub).gated = True
    error = ask(hub, home, function, MODEL, None)["error"]
    assert (error["code"], error["exit_code"]) == ("gated", 4)
    assert error["hint"] == f"request access on https://huggingface.co/{MODEL}, then: hf auth login"


def test_a_token_that_is_not_valid_is_refused_and_never_shown(hub: Hub, home: Path) -> None:
    _model(hub)
    answer = ask(hub, home, "hub.models.model_facts", MODEL, None, token="hf_wrongAndSecret")
    assert (answer["error"]["code"], answer["error"]["exit_code"], answer["error"]["hint"]) == (
        "bad_token",
        4,
        "unset HF_TOKEN && hf auth login",
    )
    assert "hf_wrongAndSecret" not in answer["words"]
    assert "refused" in {request.who for request in hub.log}


def test_a_dataset_is_not_a_model(hub: Hub, home: Path) -> None:
    hub.add("dataset", "me/tickets", {"train.jsonl": b"{}"})
    for function in ("hub.models.model_facts", "hub.models.model_folder"):
        error = ask(hub, home, function, "me/tickets", None)["error"]
        assert (error["message"], error["exit_code"]) == ("me/tickets is a dataset on the Hub, not a model", 2)
        assert "--data me/tickets" in error["hint"]


@pytest.mark.parametrize(
    ("files", "code", "got"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "not_a_model", "a LoRA adapter"),
        (("model-q4_k_m.gguf",), "not_a_model", "GGUF files"),
        (("README.md",), "not_a_model", "no config.json"),
        (("config.json", "pytorch_model.bin"), "no_safetensors", "pytorch_model.bin"),
        (("config.json", "onnx/model.safetensors"), "no_safetensors", "no weights"),
    ],
)
def test_a_repository_without_a_model_to_train(
    hub: Hub, home: Path, files: tuple[str, ...], code: str, got: str
) -> None:
    hub.add("model", MODEL, dict.fromkeys(files, b"{}"))
    error = ask(hub, home, "hub.models.model_facts", MODEL, None)["error"]
    assert (error["code"], error["exit_code"], error["got"]) == (code, 2, got)
    assert hub.sent("resolve") == 0


# --- A Hub that fails ---


@pytest.mark.parametrize(
    ("trouble", "code", "exit_code", "hint"),
    [
        (Fault(429), "rate_limit", 8, "try again in five minutes"),
        (Fault(429, {"Retry-After": "55"}), "rate_limit", 8, "try again in 55 seconds"),
        (Fault(500), "hub_error", 8, "try again in a few minutes"),
        (Fault(503), "hub_error", 8, "try again in a few minutes"),
        (Fault(408), "hub_error", 8, "try again in a few minutes"),
        (Fault(416), "hub_error", 8, "try again in a few minutes"),
        (Fault(409), "conflict", 8, "run the same command again"),
        (Fault(412), "conflict", 8, "run the same command again"),
        (Fault(403, {"X-Error-Message": "no"}), "no_permission", 4, "unset HF_TOKEN && hf auth login"),
        (Fault(418), "hub_refused", 2, f"https://huggingface.co/{MODEL}"),
    ],
)
@pytest.mark.parametrize("function", ["hub.models.model_facts", "hub.models.model_folder"])
def test_a_server_in_trouble(
    hub: Hub, home: Path, trouble: Fault, code: str, exit_code: int, hint: str, function: str
) -> None:
    _model(hub)
    hub.faults.add("/api/models/", trouble, times=ALWAYS)
    error = ask(hub, home, function, MODEL, None)["error"]
    assert (error["code"], error["exit_code"]) == (code, exit_code)
    assert error["hint"].startswith(hint)


def test_something_else_that_answers(hub: Hub, home: Path) -> None:
    """A hotel's login page, say."""
    hub.faults.add("/api/models/", Fault(200, body=b"<html>", drop_seconds=0.001), times=ALWAYS)
    error = ask(hub, home, "hub.models.model_facts", MODEL, None)["error"]
    assert (error["code"], error["exit_code"]) == ("hub_error", 8)


def test_a_hub_that_cannot_be_reached(home: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for function in ("hub.models.model_facts", "hub.models.model_folder"):
        answer = ask(url, home, function, MODEL, None)
        assert (answer["error"]["code"], answer["error"]["exit_code"]) == ("hub_unreachable", 8)
        assert answer["seconds"] < 20


def test_a_hub_that_does_not_answer_ends_after_its_time(hub: Hub, home: Path) -> None:
    hub.faults.add("/api/models/", Fault(seconds=30), times=ALWAYS)
    answer = ask(hub, home, "hub.models.model_facts", MODEL, None)
    assert (answer["error"]["code"], answer["error"]["exit_code"]) == ("hub_unreachable", 8)
    assert 7 < answer["seconds"] < 12  # the limit of one request


def test_a_hub_that_drips_ends_after_its_time(hub: Hub, home: Path) -> None:
    """Each byte comes in time; all of them do not."""
    hub.faults.add("/api/jobs/hardware", Fault(body=b" " * 100, drop_seconds=0.5), times=ALWAYS)
    answer = ask(hub, home, "hub.models.live_flavors")
    assert (answer["error"]["code"], answer["error"]["exit_code"]) == ("hub_unreachable", 8)
    assert answer["error"]["got"] == "no answer within 3 seconds"
    assert answer["seconds"] < 4.5


@pytest.mark.parametrize(
    ("number", "code", "exit_code"),
    [
        (errno.ENOSPC, "no_disk", 3),
        (errno.EDQUOT, "no_disk", 3),
        (errno.EACCES, "system_error", 2),
        (errno.ECONNRESET, "hub_unreachable", 8),
    ],
)
def test_what_the_system_refuses_hf_xet(number: int, code: str, exit_code: int) -> None:
    """It has one kind of error for all, with the number of the system in its words."""
    from skill_train.hub import client as hub_client

    words = f"Data processing error: IO Error: {os.strerror(number)} (os error {number})"

    def download() -> None:
        raise RuntimeError(words)

    with pytest.raises(SkillTrainError) as raised:
        hub_client.ask(hub_client.HubResource("model", MODEL), download, seconds=None)
    assert (raised.value.code, raised.value.exit_code) == (code, exit_code)
    assert words in raised.value.got


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("Internal error: the runtime is gone", "the Hub's file storage failed to answer"),
        ("Task error: task 5 was cancelled", "the Hub's file storage failed to answer"),
        ("Data integrity error: Xorb Hash Mismatch", "the Hub's file storage sent the wrong bytes"),
    ],
)
def test_what_goes_wrong_in_hf_xet_is_the_stores(words: str, told: str) -> None:
    error = _asked(RuntimeError(words))
    assert (error.code, error.exit_code) == ("hub_error", 8)
    assert error.message.startswith(told) and words in error.got


def test_an_error_of_ours_is_not_taken_for_the_stores() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        _asked(RuntimeError("a bug"))


def test_a_name_that_makes_no_address(hub: Hub, home: Path) -> None:
    """The Hub says whose token it is, and the client asks for that name's things."""
    import httpx2

    error = _asked(httpx2.InvalidURL("Invalid non-printable ASCII character in URL"))
    assert (error.code, error.exit_code) == ("hub_error", 8)
    assert "HF_ENDPOINT" in error.hint


def test_an_endpoint_that_is_no_address_is_told_at_once() -> None:
    """HF_ENDPOINT=foo: no request was sent, and none will be."""
    import httpx2

    with pytest.raises(httpx2.UnsupportedProtocol) as raised:
        httpx2.get("foo/api/models/me/tiny")
    error = _asked(raised.value)
    assert (error.code, error.exit_code, error.hint) == ("hub_refused", 2, "unset HF_ENDPOINT, or correct it")


def _asked(trouble: Exception) -> SkillTrainError:
    from skill_train.hub import client as hub_client

    def question() -> None:
        raise trouble

    with pytest.raises(SkillTrainError) as raised:
        hub_client.ask(hub_client.HubResource("model", MODEL), question, seconds=None)
    return raised.value


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (b"---\nlicense: mit\n---\n# A model\n", "mit"),
        (b"\xef\xbb\xbf---\nlicense: mit\n---\n", "mit"),
        (b"---\nlicense: m\0t\n---\n", None),
        (b"---\nlicense: [mit\n---\n", None),
        (b"---\n- license\n---\n", None),
        (b"---\n5: mit\n---\n", None),
        (b"---\nlicense: m\xefit\n---\n", None),
        (b"---\nx: " + b"[" * 5000 + b"\n---\n", None),
        (b"---\nlicense: mit\n---\n" + b"x" * 2_000_000, None),
    ],
)
def test_the_licence_of_a_model_folder(tmp_path: Path, card: bytes, licence: str | None) -> None:
    """A card that is none names no licence."""
    from skill_train.hub import upload

    (tmp_path / "README.md").write_bytes(card)
    assert upload.licence_in(tmp_path) == licence


# --- A job ---


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ({"id": 5}, {"id": "5"}),
        ({"labels": {"run": 7}}, {"labels": {"run": "7"}}),
        ({"id": {"x": 1}}, None),
        ({"id": None}, None),
        ({"labels": {"run": ["x"]}}, None),
        ({"status": {"stage": "RUNNING", "message": {"x": 1}}}, None),
        ({"flavor": ["t4-small"]}, None),
        ({"volumes": [{"type": "bucket", "source": ["x"], "mountPath": "/data"}]}, None),
    ],
)
def test_a_field_of_a_job_that_has_another_type(
    hub: Hub, home: Path, change: dict[str, Any], read: dict[str, Any] | None
) -> None:
    """A number is read as a text; what is no text is a wrong answer."""
    spec = {"command": ["true"], "flavor": "cpu-basic", "dockerImage": "x"}
    job = hub.jobs.create(spec, "me", "me")
    hub.faults.add(f"{job.id}$", Lie(body=json.dumps(job.info() | change).encode()))
    answer = ask(hub, home, "hub.jobs.inspect", "me", job.id)
    if read is None:
        assert (answer["error"]["code"], answer["error"]["exit_code"]) == ("hub_error", 8), answer
    else:
        assert answer["answer"] == answer["answer"] | read


# --- The cache ---


def test_without_the_hub_the_cache_answers(hub: Hub, home: Path) -> None:
    repository = _model(hub, weights={"a": [40], "b": [2]})
    folder = ask(hub, home, "hub.models.model_folder", MODEL, None)["answer"]
    assert folder[1] == repository.commit("main")
    assert (Path(folder[0]) / "model.safetensors").is_file()
    for trouble in (Fault(503), Fault(429)):
        hub.faults.clear()
        hub.faults.add("/api/models/", trouble, times=ALWAYS)
        facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
        assert (facts["source"], facts["revision"]) == (f"{MODEL}, from the cache", repository.commit("main"))
        assert facts["parameters"] == 42
    hub.log.clear()
    assert "answer" in ask(hub, home, "hub.models.model_facts", MODEL, None, HF_HUB_OFFLINE="1")
    assert hub.log == []


def test_a_download_that_was_cut_is_not_counted(hub: Hub, home: Path) -> None:
    """Two of three shards in the cache say nothing of the whole; the config does."""
    repository = _model(hub)
    shard = repository.files.pop("model.safetensors")
    repository.files |= {f"model-{n:05d}-of-00003.safetensors": shard for n in (1, 2)}
    ask(hub, home, "hub.models.model_folder", MODEL, None)
    hub.faults.add("/api/models/", Fault(503), times=ALWAYS)
    hub.log.clear()
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["parameters"], facts["parameters_from"]) == (494_032_768, "config arithmetic")
    assert facts["unknown"]["weight_bytes"] == "only 2 of 3 weight files are there"
    hub.log.clear()  # the two shards were meant to come


def test_a_config_in_the_cache_is_enough_for_a_plan(hub: Hub, home: Path) -> None:
    _model(hub)
    ask(hub, home, "hub.models.model_facts", MODEL, None)
    hub.faults.add("/api/models/", Fault(503), times=ALWAYS)
    facts = ask(hub, home, "hub.models.model_facts", MODEL, None)["answer"]
    assert (facts["parameters"], facts["parameters_from"]) == (494_032_768, "config arithmetic")
    assert facts["unknown"]["weight_bytes"] == "the folder holds no safetensors"


def test_a_copy_without_weights_is_not_taken_for_the_model(hub: Hub, home: Path) -> None:
    """The client gives what a plan left in the cache if the Hub does not answer. The model was said to have none."""
    _model(hub, weights={"a": [40]})
    ask(hub, home, "hub.models.model_facts", MODEL, None)
    hub.faults.add(f"/api/models/{MODEL}", Fault(503), times=ALWAYS)
    error = ask(hub, home, "hub.models.model_folder", MODEL, None)["error"]
    assert (error["code"], error["exit_code"]) == ("hub_error", 8)
    error = ask(hub, home, "hub.models.model_folder", MODEL, None, HF_HUB_OFFLINE="1")["error"]
    assert (error["code"], error["exit_code"]) == ("hub_unreachable", 8) and "HF_HUB_OFFLINE" in error["message"]
    hub.faults.clear()
    hub.faults.add(f"/api/models/{MODEL}", Fault(503), times=1)  # it comes back
    assert (Path(ask(hub, home, "hub.models.model_folder", MODEL, None)["answer"][0]) / "model.safetensors").is_file()


def test_a_download_leaves_out_the_second_copy_of_the_weights(hub: Hub, home: Path) -> None:
    repository = _model(hub, weights={"a": [40]})
    repository.files |= dict.fromkeys(["consolidated.safetensors", "original/model.safetensors"], b"x" * 1000)
    repository.files |= {"pytorch_model.bin": b"x", "modeling.py": b"x"}
    folder = Path(ask(hub, home, "hub.models.model_folder", MODEL, None)["answer"][0])
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer_config.json"}


def test_a_cache_that_cannot_be_written(hub: Hub, home: Path) -> None:
    _model(hub)
    home.mkdir()
    (home / "hub").write_text("a file where the cache should be")
    error = ask(hub, home, "hub.models.model_facts", MODEL, None)["error"]
    assert (error["code"], error["exit_code"]) == ("system_error", 2)


# --- Machines to rent ---


def test_live_flavors(hub: Hub, home: Path) -> None:
    """GPU memory of one GPU, prices an hour; what is not an NVIDIA GPU is left out."""
    flavors = {f["name"]: f for f in ask(hub, home, "hub.models.live_flavors")["answer"]}
    assert set(flavors) == {"cpu-basic", "t4-small", "l40sx8"}
    large = flavors["l40sx8"]
    assert (large["gpu"], large["gpus"], large["gpu_memory_bytes"]) == ("L40S", 8, 48_000_000_000)
    assert (large["cores"], large["ram_bytes"], large["disk_bytes"]) == (192, 1534 * 10**9, 6500 * 10**9)
    assert [flavors[n]["usd_per_hour"] for n in ("cpu-basic", "t4-small", "l40sx8")] == [0.01, 0.4, 23.5]
    assert (flavors["cpu-basic"]["gpu"], flavors["cpu-basic"]["gpu_memory_bytes"]) == (None, None)


def test_a_live_answer_is_kept_for_a_day(hub: Hub, home: Path) -> None:
    offers, reason = ask(hub, home, "hub.flavors.current", True)["answer"]
    assert (len(offers), reason) == (3, f"the Jobs API of {hub.endpoint}, asked now")
    hub.log.clear()
    offers, reason = ask(hub, home, "hub.flavors.current", True)["answer"]
    assert len(offers) == 3
    assert reason.startswith(f"the Jobs API of {hub.endpoint}, asked 0.0 hours ago")
    assert hub.log == []


def test_without_the_jobs_api_the_dated_table_answers(hub: Hub, home: Path) -> None:
    hub.faults.add("/api/jobs/hardware", Fault(500), times=ALWAYS)
    offers, reason = ask(hub, home, "hub.flavors.current", True)["answer"]
    assert len(offers) == 26
    assert reason == (
        "the table of huggingface.co shipped with skill-train, of 2026-08-22: "
        "the Hub failed to answer for the prices of Hugging Face Jobs"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"ram": "plenty"},
        {"cpu": "many"},
        {"unitLabel": "moon"},
        {"accelerator": T4 | {"vram": "?"}},
    ],
)
def test_a_row_that_cannot_be_read_is_left_out(hub: Hub, home: Path, changes: dict[str, Any]) -> None:
    hub.hardware = [HARDWARE[1] | changes]
    assert ask(hub, home, "hub.models.live_flavors")["error"]["code"] == "hub_error"


def test_a_disk_that_is_not_told_is_unknown(hub: Hub, home: Path) -> None:
    """The client's own class allows it; the machine can be rented all the same."""
    hub.hardware = [HARDWARE[1] | {"ephemeralStorage": "N/A"}]
    [flavor] = ask(hub, home, "hub.models.live_flavors")["answer"]
    assert (flavor["name"], flavor["disk_bytes"]) == (HARDWARE[1]["name"], None)


def _model(hub: Hub, *, safetensors: Any = 494_032_768, weights: Any = None) -> Repository:
    """A model as the Hub shows it. Its weights are small, or as large as said; a whole download of them would show."""
    repository = add_model(hub, weights=_safetensors(weights or {"a": [1000, 1000]}))
    repository.info = (
        {"safetensors": {"parameters": {"BF16": safetensors}, "total": safetensors}} if safetensors else {}
    )
    return repository


def _safetensors(shapes: dict[str, list[int]]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)
