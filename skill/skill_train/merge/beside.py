"""What goes on beside the writing of a merge, while the base's bytes and the new ones are in the system's cache: the
comparison of weights and the digests of what was compared.

Where both models do not fit into memory together, the system is told then that these bytes are not needed any more. It
would let go of them itself, but late, and take new memory until then, which costs a virtual machine up to 3 s a GB.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skill_train.core.digests import PartialDigest
from skill_train.machine.address_space import require_room_for_torch
from skill_train.machine.read import available_memory_bytes, physical_cores
from skill_train.merge import check_weights as merge_weights
from skill_train.merge.plan import Base
from skill_train.model.adapter import Adapter
from skill_train.model.weight_files import Shard, read_shard

_AT_ONCE = 4  # tensors in work; the system lets one thread at a time write to a file
_AHEAD_BYTES = 1 << 30  # of the base, while torch is imported
_WAITING = 2  # parts that were written and not yet compared and digested; they fill the system's cache


class Beside:
    """A context. The base's first bytes are read for their digest at once, while torch is imported."""

    def __init__(self, base: Base, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._gate, self._summing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._comparing: list[Future[merge_weights.Found]] = []
        self._waiting: deque[Future[None]] = deque()
        self._digests: dict[Path, PartialDigest] = {}
        self._too_large = False
        self._scales: dict[str, float] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._given_up = threading.Event()

    def __enter__(self) -> Beside:
        require_room_for_torch()
        first = self._base.folder / self._base.shards[0].name
        self._summing.submit(self._sum_up, first, _AHEAD_BYTES)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # what failed, or was stopped, does not wait for digests of 5 GB
            self._given_up.set()
        for threads in (self._gate, self._summing):
            threads.shutdown(cancel_futures=kind is not None)
        for digest in self._digests.values():
            digest.close()

    @contextlib.contextmanager
    def computing(self, *, weights: bool, planned_bytes: int) -> Iterator[ThreadPoolExecutor]:
        """Threads in which torch computes alone: small blocks, one for each thread, are faster than sharing each block.

        Args:
            weights: `look` compares them.
            planned_bytes: of the new files.
        """
        import torch

        self._too_large = _outgrows_memory(self._base, planned_bytes)
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

    def look(self, shard: Shard, written: Path, names: list[str]) -> None:
        """Takes up tensors of a shard of the base and of the file that is made of it; others can be written meanwhile.
        Waits where too many are waiting."""
        compared = None
        if self._pool is not None:
            asked = (names, shard, written, self._adapter, self._scales, self._pool)
            compared = self._gate.submit(merge_weights.compare_tensors, *asked)
            self._comparing.append(compared)
        self._waiting.append(self._summing.submit(self._finish, shard, written, names, compared))
        while len(self._waiting) > _WAITING:
            self._waiting.popleft().result()

    def _finish(
        self, shard: Shard, written: Path, names: list[str], compared: Future[merge_weights.Found] | None
    ) -> None:
        if compared is not None:
            compared.exception()  # waits; `found` says what it was
        base = self._base.folder / shard.name
        for file, tensors in ((base, shard.tensors), (written, read_shard(written).tensors)):
            end = max((tensors[name].start + tensors[name].size for name in names if name in tensors), default=0)
            self._sum_up(file, end)
            if self._too_large:
                _let_go(file, end)

    def _sum_up(self, file: Path, end: int) -> None:
        if file not in self._digests:
            self._digests[file] = PartialDigest(file, filled_in=file.parent != self._base.folder)
        self._digests[file].read_to(end, self._given_up.is_set)

    def found(self) -> merge_weights.Found:
        """What all comparisons saw, in the order of the tensors."""
        found = merge_weights.Found()
        for one in self._comparing:
            found.add(one.result())
        return found


def _outgrows_memory(base: Base, planned_bytes: int) -> bool:
    """Both models together are more than the free memory. False where nobody knows, or can be told."""
    free = available_memory_bytes() if hasattr(os, "posix_fadvise") else None
    return free is not None and sum(stored.size for stored in base.tensors.values()) + planned_bytes > free


def _let_go(file: Path, end: int) -> None:
    """What stands before `end` leaves the system's cache; what is not on the disk yet is sent there, and leaves when it
    is asked the next time."""
    with open(file, "rb") as opened:
        to_its_end = end >= os.fstat(opened.fileno()).st_size
        os.posix_fadvise(opened.fileno(), 0, 0 if to_its_end else end, os.POSIX_FADV_DONTNEED)
