"""The machines of the cloud. Prices and sizes are those of huggingface.co/docs/hub/jobs-pricing, 2026-08-22."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from skill_train.hub import flavors

GB = 10**9
HUB = "https://huggingface.co"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKILL_TRAIN_CACHE", str(tmp_path))


def test_the_shipped_table_has_every_flavor_that_the_client_knows() -> None:
    hub = pytest.importorskip("huggingface_hub")
    assert {flavor.name for flavor in flavors.shipped()} == {flavor.value for flavor in hub.JobHardware}


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "each", "cores", "ram", "disk", "usd"),
    [
        ("cpu-basic", 0, None, None, 2, 16, 50, 0.01),
        ("t4-small", 1, "T4", 16, 4, 15, 50, 0.40),
        ("a10g-largex4", 4, "A10G", 24, 48, 184, 2000, 5.00),
        ("l40sx8", 8, "L40S", 48, 192, 1534, 6500, 23.50),
        ("h200x8", 8, "H200", 141, 184, 2048, 24_000, 40.00),
        ("rtx-pro-6000x2", 2, "RTX PRO 6000", 96, 46, 512, 950, 5.50),
    ],
)
def test_rows_of_the_shipped_table(name, gpus, gpu, each, cores, ram, disk, usd) -> None:  # type: ignore[no-untyped-def]
    flavor = next(f for f in flavors.shipped() if f.name == name)
    assert (flavor.gpus, flavor.gpu, flavor.cores, flavor.usd_per_hour) == (gpus, gpu, cores, usd)
    assert flavor.gpu_memory_bytes == (each * GB if each else None)
    assert (flavor.ram_bytes, flavor.disk_bytes) == (ram * GB, disk * GB)
    assert flavor.read_at == "2026-08-22"
    assert "jobs-pricing" in flavor.source


def test_the_table_is_read_in_two_milliseconds() -> None:
    def seconds() -> float:
        started = time.perf_counter()
        flavors.shipped()
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.002


def test_the_table_is_said_to_be_a_table_and_how_old() -> None:
    found, reason = flavors.current(live=False)
    assert found == flavors.shipped()
    assert reason == (
        "the table of huggingface.co shipped with skill-train, of 2026-08-22: "
        "the Jobs API of https://huggingface.co was not asked"
    )


def test_an_answer_of_today_serves_again_and_says_its_age(tmp_path: Path) -> None:
    _keep(tmp_path, hours=5)
    found, reason = flavors.current(live=False)
    assert [(f.name, f.usd_per_hour) for f in found] == [("t4-small", 0.7)]
    assert re.fullmatch(
        r"the Jobs API of https://huggingface\.co, asked 5\.0 hours ago \(20\d\d-\d\d-\d\d \d\d:\d\d UTC\)", reason
    )


def test_yesterdays_answer_serves_only_when_nothing_newer_is_there(tmp_path: Path) -> None:
    _keep(tmp_path, hours=72)
    found, reason = flavors.current(live=False)
    assert found[0].usd_per_hour == 0.7
    assert "3.0 days ago" in reason
    assert reason.endswith("the Jobs API of https://huggingface.co was not asked")
    _keep(tmp_path, hours=72, read_at="2026-01-01")
    assert flavors.current(live=False)[0] == flavors.shipped()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"asked": "today", "flavors": []}', '{"asked": 1, "flavors": [{"a": 1}]}']
)
def test_a_kept_answer_that_is_broken_counts_for_nothing(tmp_path: Path, text: str) -> None:
    _keep(tmp_path, hours=1)
    (kept,) = tmp_path.glob("flavors-*.json")
    kept.write_text(text)
    assert flavors.current(live=False)[0] == flavors.shipped()


@pytest.mark.parametrize("key", ["usd_per_hour", "cores"])
def test_a_kept_figure_that_is_half_a_character_counts_for_nothing(tmp_path: Path, key: str) -> None:
    _keep(tmp_path, hours=1)
    (kept,) = tmp_path.glob("flavors-*.json")
    kept.write_text(re.sub(f'"{key}": [^,}}]*', rf'"{key}": "\\ud800"', kept.read_text()))
    assert r"\ud800" in kept.read_text()
    assert flavors.current(live=False)[0] == flavors.shipped()


@pytest.mark.parametrize("endpoint", ["https://hub-ci.huggingface.co", None, 5])
def test_an_answer_that_says_another_hub_or_none_counts_for_nothing(tmp_path: Path, endpoint: object) -> None:
    """A file that was copied, or renamed, from where another Hub's prices are kept."""
    _keep(tmp_path, hours=1)
    (kept,) = tmp_path.glob("flavors-*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"endpoint": endpoint}))
    assert flavors.current(live=False)[0] == flavors.shipped()


def test_an_answer_from_the_future_counts_for_nothing(tmp_path: Path) -> None:
    _keep(tmp_path, hours=-1)
    assert flavors.current(live=False)[0] == flavors.shipped()


def _keep(folder: Path, *, hours: float, read_at: str = "2026-11-20") -> None:
    flavor = msgspec.structs.replace(flavors.shipped()[4], name="t4-small", usd_per_hour=0.7, read_at=read_at)
    flavors._keep((flavor,), HUB)
    (kept,) = folder.glob("flavors-*.json")
    document = json.loads(kept.read_text()) | {"asked": time.time() - hours * 3600}
    kept.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"HF_ENDPOINT": "https://hub.example.org:8443/base/"},
        {"HF_ENDPOINT": ""},
        {"HUGGINGFACE_CO_STAGING": "yes", "HF_ENDPOINT": "https://hub.example.org"},
        {"HUGGINGFACE_CO_STAGING": "0", "HF_ENDPOINT": "https://hub.example.org"},
    ],
)
def test_the_hub_is_the_one_that_the_client_asks(said: dict[str, str]) -> None:
    code = "from huggingface_hub import constants; from skill_train.hub import address as h"
    assert len(set(_said(f"{code}; print(constants.ENDPOINT); print(h.endpoint())", said))) == 1


def test_a_password_in_the_address_of_a_hub_is_not_kept() -> None:
    said = {"HF_ENDPOINT": "https://me:secret@Hub.example.org:8443/base/"}
    code = "from skill_train.hub import address as h; print(h.endpoint())"
    assert _said(code, said) == ["https://hub.example.org:8443/base"]


def _said(code: str, environment: dict[str, str]) -> list[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
