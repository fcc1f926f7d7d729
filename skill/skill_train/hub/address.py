"""The address of the Hub. A plan of local files needs it too, so this module does not load the Hub's client."""

import os
from urllib.parse import urlsplit


def endpoint() -> str:
    """The address of the Hub, without a password. It is read as in huggingface_hub 2.4 (constants.py), without an
    import."""
    staging = os.environ.get("HUGGINGFACE_CO_STAGING", "").upper() in ("1", "ON", "YES", "TRUE")
    address = "https://hub-ci.huggingface.co" if staging else os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    parts = urlsplit(address.rstrip("/"))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2].lower(), query="", fragment="").geturl()
