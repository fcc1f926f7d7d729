"""No run is lost and no job is there twice, whatever fails: random schedules by seed, and a slice of each fault at each
request. The whole of both is in `tests/torture`.

The commands are the package's own; a job runs `stand_in.py`. `SKILL_TRAIN_SEED` is added to the seeds, and turns the
slice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fault_desk import desks, work_through
from fault_schedules import draw, each

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub")

SEED = int(os.environ.get("SKILL_TRAIN_SEED", "0"))
SCHEDULES, EVERY = 8, 32


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadPoolExecutor]:
    with desks(tmp_path_factory.mktemp) as made:
        yield made


def test_random_schedules(pool: ThreadPoolExecutor) -> None:
    work_through(pool, [draw(seed) for seed in range(SEED, SEED + SCHEDULES)])


def test_each_fault_at_each_request(pool: ThreadPoolExecutor) -> None:
    work_through(pool, each()[SEED % EVERY :: EVERY])
