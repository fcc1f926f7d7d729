"""The unmodified client, in the test's own process, with the emulator as its Hub."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def hub(hub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # set for all other tests
    return hub


@pytest.fixture
def api(hub: Any) -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.endpoint, token=hub.token)
