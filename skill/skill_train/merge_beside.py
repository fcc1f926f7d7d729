"""What goes on beside the writing of a merge: digests of each shard and the comparison of its weights, while the base's
file and the new one are in the system's cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skill_train import merge_weights
from skill_train.adapter import Adapter
from skill_train.machine import physical_cores
from skill_train.merge_plan import Base
from skill_train.run_dir import file_digest
from skill_train.shards import Shard

_AT_ONCE = 4  # tensors in work; the system lets one thread at a time write to a file


class Beside:
    """A context. The base's first shard is read for its digest at once, while torch is imported."""

    def __init__(self, base: Base, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._digests, self._gate = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._comparing: list[Future[merge_weights.Found]] = []
        self._scales: dict[str, float] = {}
        self._pool: ThreadPoolExecutor | None = None

        self._given_up = threading.Event()

    def __enter__(self) -> Beside:
        self._digest(self._base.folder / self._base.shards[0].name)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # what failed, or was stopped, does not wait for digests of 5 GB
            self._given_up.set()
        for threads in (self._gate, self._digests):
            threads.shutdown(cancel_futures=kind is not None)

    def _digest(self, file: Path) -> None:
        self._digests.submit(file_digest, file, self._given_up.is_set)

    @contextlib.contextmanager
    def computing(self, *, weights: bool) -> Iterator[ThreadPoolExecutor]:
        """Threads in which torch computes alone: small blocks, one for each thread, are faster than sharing each block.

        Args:
            weights: `look` compares them.
        """
        import torch

        before = torch.get_num_threads()
        count = min(_AT_ONCE, physical_cores())
        try:
            with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                if weights:
                    self._pool, self._scales = pool, merge_weights.scales_of(self._adapter, list(self._base.tensors))
                try:
                    yield pool
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            torch.set_num_threads(before)

    def look(self, shard: Shard, written: Path) -> None:
        """Takes up a shard of the base and the file that was made of it; the next one can be written meanwhile."""
        for file in (self._base.folder / shard.name, written):
            self._digest(file)
        if self._pool is not None:
            asked = (shard, written, self._adapter, self._scales, self._pool)
            self._comparing.append(self._gate.submit(merge_weights.compare_shard, *asked))

    def found(self) -> merge_weights.Found:
        """What all comparisons saw, in the order of the shards."""
        found = merge_weights.Found()
        for one in self._comparing:
            found.add(one.result())
        return found
