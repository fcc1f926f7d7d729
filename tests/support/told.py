"""What a step tells while it works: a bar that nobody sees, and its warnings as a list."""

from __future__ import annotations


def quiet(done: float, total: float, text: str) -> None:
    pass


class Warnings(list[tuple[str, str]]):
    def __call__(self, code: str, message: str) -> None:
        self.append((code, message))
