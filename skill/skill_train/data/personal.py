"""Detects personal data: e-mail addresses, and telephone numbers with a country code. Names, streets and account
numbers look like any other text, so a dataset without a finding may still contain personal data."""

from __future__ import annotations

import re

WHAT = "an e-mail address or a telephone number"
_ADDRESS = re.compile(rb"[\w.%+-]@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[A-Za-z]{2,}", re.ASCII)
# E.164: at most 15 digits after the plus. Fewer than 8 digits are hardly a telephone number.
_NUMBER = re.compile(rb"(?:(?<![\w+])|(?<=\\[nrt]))\+[1-9](?:[ ()./-]{0,2}\d){7,14}(?!\d)", re.ASCII)


def holds_personal(line: bytes) -> bool:
    """Whether one row, as written, seems to contain personal data."""
    return (b"@" in line and _ADDRESS.search(line) is not None) or (b"+" in line and _NUMBER.search(line) is not None)
