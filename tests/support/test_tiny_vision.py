"""The tiny vision models see: two pictures give two answers, through the processor that their files describe."""

from __future__ import annotations

from typing import Any

import pytest

import tiny_vision

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def _logits(model: Any, processor: Any, ids: list[int], colour: str) -> Any:
    import torch
    from PIL import Image

    inputs = processor(images=[Image.new("RGB", (112, 112), colour)], return_tensors="pt")
    known = {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw", "image_sizes")}
    if "image_grid_thw" in known:
        kinds = torch.tensor([[int(token == model.config.image_token_id) for token in ids]])
        known["mm_token_type_ids"] = kinds
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **known).logits[0, -1]


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_another_picture_gives_another_answer(kind: str) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    folder = tiny_vision.cached(kind)
    model = AutoModelForImageTextToText.from_pretrained(str(folder)).eval()
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    count = {"qwen2-vl": 16, "qwen2.5-vl": 16, "qwen3-vl": 16, "gemma3": 4, "mistral3": 16, "pixtral": 64}.get(
        kind, 17 * 16
    )
    ids = [300, *[model.config.image_token_id] * count, 301, 302]
    red, blue = (_logits(model, processor, ids, colour) for colour in ("red", "blue"))
    assert (red.softmax(0) * (red.log_softmax(0) - blue.log_softmax(0))).sum() > 0.01
