"""The Hub, or who stands before it, sends a request elsewhere: what it carries stays here, and no answer counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_child import Commands
from elsewhere import Elsewhere
from hub_emulator import ALWAYS, Fault, Hub
from hub_models import add_model

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SAID = ("submit", "--model", MODEL, "--data", "rows.jsonl", "--max-steps", "2", "--yes")


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    host = Elsewhere()
    yield host
    host.close()


@pytest.fixture(scope="module")
def desk(desk: tuple[Hub, Commands, Path]) -> tuple[Hub, Commands, Path]:
    add_model(desk[0])
    return desk


@pytest.fixture
def call(desk: Any, tmp_path: Path) -> Iterator[Any]:
    hub, commands, home = desk
    rows = [{"prompt": f"{tmp_path} {n}?", "completion": "The ticket."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words: str) -> Any:
        done = commands.run(tmp_path, hub.environment(home), *words)
        assert hub.token not in done.stdout + done.stderr
        return done

    yield run
    hub.faults.clear()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_request_that_makes_a_job_goes_to_no_other_host(
    desk: Any, call: Any, elsewhere: Elsewhere, tmp_path: Path, status: int
) -> None:
    """Its body holds the token. There is no job then, and the next call may ask for one."""
    hub = desk[0]
    hub.faults.add("POST /api/jobs/me$", Fault(status, {"Location": elsewhere.url}), times=ALWAYS)
    done = call(*SAID)
    assert done.error == (2, "redirected") and elsewhere.url in done.answer["error"]["got"]
    assert elsewhere.sent == [] and hub.jobs_created == 0
    [record] = tmp_path.glob("runs/*/cloud.json")
    assert json.loads(record.read_text())["jobs"] == []


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("GET .*/auth-check", (8, "hub_error")),
        ("GET /api/whoami-v2", (8, "hub_unreachable")),
        ("POST /api/buckets/.*/batch", (2, "redirected")),
    ],
)
def test_no_answer_of_another_host_counts(
    desk: Any, call: Any, elsewhere: Elsewhere, status: int, request_: str, error: Any
) -> None:
    hub = desk[0]
    hub.faults.add(request_, Fault(status, {"Location": elsewhere.url}), times=ALWAYS)
    assert call(*SAID).error == error
    assert elsewhere.sent == [] and hub.jobs_created == 0


def test_the_same_host_may_say_another_path(desk: Any, call: Any, elsewhere: Elsewhere) -> None:
    """As it does of a repository that was renamed."""
    hub = desk[0]
    moved = Fault(307, {"Location": "/api/whoami-v2"})
    hub.faults.add("GET .*/auth-check", moved, times=1)
    hub.faults.add("POST /api/jobs/me$", Fault(307, {"Location": f"{hub.endpoint}/api/jobs/me"}))
    assert call(*SAID).data["stage"] and hub.jobs_created == 1


def test_a_job_pushes_to_no_other_host(desk: Any, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """The training program alone, as it runs in a container."""
    hub = desk[0]
    program = (
        "import json, train\n"
        "try:\n"
        "    plan = {'policy': {'hub_model_id': 'me/new'}, 'recipe': {'finetuning_type': 'lora'}}\n"
        "    train.commit(plan, {'a.txt': b'a row'}, 'x')\n"
        "except train.Refused as refused:\n"
        "    print(json.dumps(refused.error))\n"
    )
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    env = hub.environment(tmp_path / "home") | {"PYTHONPATH": str(scripts)}
    hub.faults.add("POST /api/models/me/new/commit", Fault(307, {"Location": elsewhere.url}), times=ALWAYS)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    hub.faults.clear()
    assert json.loads(done.stdout.splitlines()[-1])["code"] == "redirected", done.stderr
    assert elsewhere.sent == []
