"""A prompt and its completion as messages: which texts hold them."""

from __future__ import annotations

import re
from typing import Any

TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")  # as a text: of JSON, or of Python
ROLE_KEY = re.compile(r"""["']role["']\s*:\s*["'](?:system|developer|user|assistant|tool)["']""")


def hold_turns(pair: tuple[Any, Any]) -> list[bool]:
    """Which sides are texts of turns. One alone may be another text that begins like them, so it is whole."""
    like = [isinstance(side, str) and TURNS.match(side) is not None for side in pair]
    return [
        alike and (all(like) or (side.rstrip()[-1:] == "]" and ROLE_KEY.search(side) is not None))
        for alike, side in zip(like, pair, strict=True)
    ]
