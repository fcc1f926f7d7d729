"""The whole of `cloud/test_fault_matrix.py`: 200 random schedules, and each fault at each request.

`SKILL_TRAIN_SEED` is added to the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fault_desk import desks, work_through
from fault_schedules import draw, each

SEED = int(os.environ.get("SKILL_TRAIN_SEED", "0"))
SCHEDULES = 200
pytestmark = [pytest.mark.torture, pytest.mark.xdist_group("cloud faults"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadPoolExecutor]:
    with desks(tmp_path_factory.mktemp) as made:
        yield made


def test_random_schedules(pool: ThreadPoolExecutor) -> None:
    work_through(pool, [draw(seed) for seed in range(SEED, SEED + SCHEDULES)])


def test_each_fault_at_each_request(pool: ThreadPoolExecutor) -> None:
    work_through(pool, each())
