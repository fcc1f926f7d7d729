"""Python's search for cycles of objects, made seldom.

While libraries are imported and vocabularies read, nearly every new object stays; by default the search comes after 700
of them and, now and then, looks at all there are. It took 2.0 of 28 processor seconds of `verify` at 494M weights, 0.8
of a conversion, and a third of the time in which transformers is imported (2 cores, 2026-11-22).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

NEW_OBJECTS = 200_000  # that stay, between two searches; mypy does the same with as many


def search_seldom() -> None:
    """For the start of a process, and for its end, when Python searches once more."""
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)


@contextlib.contextmanager
def searched_after() -> Iterator[None]:
    """What is made in the block and held by nothing but itself is freed at its end; what was there is not looked at."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
