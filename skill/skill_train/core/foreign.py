"""The type of JSON objects that others wrote: a model's config.json, an answer of the Hub."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""An object whose keys and values others chose. Nothing of it is checked: each reader says what it expects there.

What skill-train itself writes and answers has types of its own.
"""
