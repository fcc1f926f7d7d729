"""120 kills: whenever a command dies, nothing half-written has a final name, and going on gives the undisturbed bytes.

`SKILL_TRAIN_SEED` is added to the seed; `SKILL_TRAIN_KILLS` scales the counts (0.1 is a tenth).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from killing import MIX, Chain, Struck, moments, trained_chain
from pulling import fetched_run

pytestmark = [pytest.mark.torture, pytest.mark.xdist_group("kills"), pytest.mark.timeout(7200)]

SEED = int(os.environ.get("SKILL_TRAIN_SEED", "0"))
SCALE = float(os.environ.get("SKILL_TRAIN_KILLS", "1"))
WORKERS = 2
Record = Callable[[str, object], None]
PULLS = 14
# Step, a part of its changes of files, and kills: 120 with those of `pull`.
KILLS = [
    ("train", "", 22),
    ("train", "checkpoints/checkpoint-", 14),
    ("merge", "", 16),
    ("convert", "", 12),
    ("quantize", "", 12),
    ("quantize", "imatrix", 6),
    ("mix", "", 10),
    ("mix", "auto-6bpw", 4),
    ("verify", "", 10),
]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = trained_chain(tmp_path_factory.mktemp("kills") / "chain")
    chain.add("mix", MIX, chain.root / "undisturbed", dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    return chain


@pytest.mark.parametrize(("name", "inside", "count"), KILLS, ids=[f"{k[0]} {k[1]}".strip() for k in KILLS])
def test_a_step_on_this_machine(chain: Chain, name: str, inside: str, count: int, record_property: Record) -> None:
    _kill(chain, name, inside, count, record_property)


def test_a_pull(tmp_path: Path, record_property: Record) -> None:
    with fetched_run(tmp_path) as chain:
        _kill(chain, "pull", "", PULLS, record_property)


def _kill(chain: Chain, name: str, inside: str, count: int, record_property: Record) -> None:
    planned = moments(chain.steps[name], max(1, round(count * SCALE)), SEED, inside=inside)
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(lambda moment: chain.strike(name, moment), planned))
    failed = [one for one in done if one.wrong]
    record_property("counts", _counted(f"{name} {inside}".strip(), done))
    assert not failed, "\n".join(f"{one.moment}, hit {one.hit}: {'; '.join(one.wrong)}" for one in failed)


def _counted(name: str, done: list[Struck]) -> str:
    hits = Counter(one.hit for one in done)
    where = ", ".join(f"{hits[hit]} {hit}" for hit in ("before", "during", "after"))
    return f"{name}: {len(done)} kills ({where} its changes of files), {sum(bool(one.wrong) for one in done)} failed"
