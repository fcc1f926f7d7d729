"""Makes a text with one picture for a vision model, so that a merge is also compared on a picture."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 96, 64  # pixels: a few tokens, unless the model resizes every picture to one size


@dataclass(frozen=True)
class PictureInputs:
    """The inputs of a vision model for a text with a picture in it."""

    ids: list[int]  # with the image token for each feature of the picture
    inputs: dict[str, Any]  # the model's other inputs, by the names of its arguments


def picture_inputs(folder: Path, model: Any, ids: list[int]) -> PictureInputs | str:
    """The inputs for a generated picture in the middle of the text; or a sentence that says why there can be none.

    The model's own image processor, in its version for Pillow, reads the picture. The model itself computes how many
    tokens the picture takes.

    Args:
        model: the model of the folder, with or without an adapter.
        ids: the token ids of the text.
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    token, features = getattr(inner.config, "image_token_id", None), getattr(inner, "get_image_features", None)
    if token is None or features is None:
        return f"{type(inner).__name__} has no inputs for pictures"
    try:
        processed = _processed(folder)
        takes = inspect.signature(inner.forward).parameters
        inputs = {name: value for name, value in processed.items() if name in takes}
        places = _places(features(**inputs))
    except Exception as error:  # noqa: BLE001 - each family's code has another class of error
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    half = len(ids) // 2
    whole = [*ids[:half], *[token] * places, *ids[half:]]
    if "mm_token_type_ids" in takes:
        import torch

        inputs["mm_token_type_ids"] = torch.tensor([[int(one == token) for one in whole]])
    return PictureInputs(whole, inputs)


def _processed(folder: Path) -> Any:
    """The picture as tensors."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil", trust_remote_code=False)
    one_tile = {"do_image_splitting": False} if hasattr(processor, "do_image_splitting") else {}
    return processor(images=[_picture()], return_tensors="pt", **one_tile)


def _picture() -> Any:
    """Colours that change from left to right and from top to bottom, so that every patch is another."""
    import numpy as np
    from PIL import Image

    across, down = np.meshgrid(np.arange(_WIDTH), np.arange(_HEIGHT))
    colours = np.stack([across * 2, down * 3, (across * down) % 256], axis=-1)
    return Image.fromarray(colours.astype(np.uint8))


def _places(output: Any) -> int:
    """The number of tokens that a picture takes: one for each feature in the model's output."""
    embeddings = getattr(output, "pooler_output", output)
    return sum(part.reshape(-1, part.shape[-1]).shape[0] for part in embeddings)
