"""The address of the Hub, which a plan of local files asks for too. It loads no client."""

from __future__ import annotations

import os
from urllib.parse import urlsplit


def endpoint() -> str:
    """The address of the Hub, without a password. Read as huggingface_hub 2.4 reads it (constants.py), but without
    importing it."""
    staging = os.environ.get("HUGGINGFACE_CO_STAGING", "").upper() in ("1", "ON", "YES", "TRUE")
    address = "https://hub-ci.huggingface.co" if staging else os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    parts = urlsplit(address.rstrip("/"))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2].lower(), query="", fragment="").geturl()
