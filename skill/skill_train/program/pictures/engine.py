"""A picture as llama.cpp feeds it to the tower: resized, padded and divided as its server does it.

Follows tools/mtmd of the llama.cpp in llama-cpp-python 0.3.36 (mtmd-image.cpp, clip.cpp, mtmd.cpp; read 2026-11-26).
It resamples with Pillow's own algorithm, in the same whole numbers, so Pillow does it here. Tests compare the tensors
with those that llama.cpp computes.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from skill_train.program.events import Refused
from skill_train.program.pictures.decode import PictureSize

TILED = ("smolvlm", "idefics3")  # families that divide a picture into tiles
LINED = ("mistral3", "llava")  # those with a token at the end of each line of a picture; Llava with Pixtral's tower
ENGINE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", *TILED, *LINED)  # their tensors are llama.cpp's own
ENGINE_LIMITS = dict.fromkeys(TILED, ("max_pixels",))  # limits of a recipe that a projector's file carries to llama.cpp
ENGINE_VERSION = "0.3.36"  # of llama-cpp-python
ENGINE_TOKENS = (8, 4096)  # least and most tokens of a picture of Qwen-VL, whatever the model's own limits are
LINED_TOKENS = (8, 1024)  # the same for Pixtral and Mistral 3, without the ends of lines
PADDING = (0, 0, 0)
ENGINE_NOTE = (
    "It was trained on the pixels and the text that llama.cpp makes of a picture (`preprocess: engine`). The model's "
    "own image processor, as transformers runs it, makes other ones."
)  # for the card


def ignored_limit(recipe: Mapping[str, object], kind: str) -> str | None:
    """The limit of a recipe that llama.cpp ignores for the family; None without one."""
    ignored = (name for name in ("min_pixels", "max_pixels") if name not in ENGINE_LIMITS.get(kind, ()))
    return next((name for name in ignored if recipe.get(name) is not None), None)


def require_engine(recipe: Mapping[str, object], kind: str) -> None:
    """Refuses `preprocess: engine` where the training could not see what llama.cpp would: for families whose tensors
    were not found equal, and with limits that llama.cpp ignores."""
    if kind not in ENGINE_FAMILIES:
        raise Refused(
            f"preprocess: engine is not known for the family {kind}",
            code="bad_recipe",
            expected=", ".join(ENGINE_FAMILIES),
            got=kind,
            hint="set preprocess: model, or remove preprocess",
        )
    limit = ignored_limit(recipe, kind)
    if limit is not None:
        raise Refused(
            f"{limit} and preprocess: engine cannot be used together: llama.cpp ignores the limit",
            code="bad_recipe",
            expected="one of the two",
            got=f"{limit}: {recipe.get(limit)}",
            hint="remove the limit and make the pictures smaller, or set preprocess: model",
        )


class TileGrid(NamedTuple):
    """How many rows and columns of tiles or tokens a picture has."""

    rows: int
    columns: int


class Engine:
    """llama.cpp's way to prepare pictures for one model. Its lengths are in pixels."""

    def __init__(self, processor: Any) -> None:
        """`processor` is an `ImageProcessor`."""
        self.kind, self.processor = processor.kind, processor
        self.patch, self.merge = processor.patch_size, processor.merge_size  # patches along a token
        self.square = processor.square or self.patch * self.merge  # of one token (Qwen-VL, Pixtral, Mistral 3)
        # The square that the tower reads: a whole picture (Gemma 3), or a tile (SmolVLM, Idefics3).
        own = {"gemma3": ("size", "height"), **dict.fromkeys(TILED, ("max_image_size", "longest_edge"))}.get(self.kind)
        self.side: int = processor.tower_side or getattr(processor, own[0])[own[1]] if own else 0
        # The longer side of a picture that is divided.
        self.longest = processor.size["longest_edge"] if self.kind in TILED else 0

    def size(self, size: PictureSize) -> PictureSize:
        """The size of a picture after all resizing; the size of all tiles together if it is divided."""
        if self.kind == "gemma3":
            return PictureSize(self.side, self.side)
        if self.kind in TILED:
            rows, columns = self.grid(size)
            return PictureSize(columns * self.side, rows * self.side)
        least, most = LINED_TOKENS if self.kind in LINED else ENGINE_TOKENS
        return aligned_size(size, self.square, (least * self.square**2, most * self.square**2))

    def grid(self, size: PictureSize) -> TileGrid:
        """The tokens of a picture of Qwen-VL, Pixtral or Mistral 3, or the tiles of a picture of SmolVLM or Idefics3:
        at least one tile, although the model's own processor does not divide small pictures."""
        if self.kind not in TILED:
            resized = self.size(size)
            return TileGrid(resized.height // self.square, resized.width // self.square)
        reduced = reduced_size(size, self.longest)
        return TileGrid(math.ceil(reduced.height / self.side), math.ceil(reduced.width / self.side))

    def parts(self, image: Any) -> list[Any]:
        """The PIL images in RGB that the tower reads: the picture, or its tiles and a small copy of it."""
        from PIL.Image import Resampling

        size = PictureSize(*image.size)
        if self.kind not in TILED:
            kernel = Resampling.BILINEAR if self.kind == "gemma3" else Resampling.BICUBIC
            return [letterboxed(image, self.size(size), kernel)]
        reduced = resampled(image, reduced_size(size, self.longest), Resampling.LANCZOS)
        whole = resampled(reduced, self.size(size), Resampling.LANCZOS)
        corners = [(x, y) for y in range(0, whole.height, self.side) for x in range(0, whole.width, self.side)]
        tiles = [whole.crop((x, y, x + self.side, y + self.side)) for x, y in corners]
        return [*tiles, resampled(whole, PictureSize(self.side, self.side), Resampling.LANCZOS)]

    def pixels(self, part: Any) -> Any:
        """The numbers that the tower reads of a part, float32 [3, height, width]."""
        import numpy as np

        mean, std = (np.array(getattr(self.processor, name), dtype=np.float32) for name in ("image_mean", "image_std"))
        whole = np.asarray(part).astype(np.float32) / np.float32(255)
        return ((whole - mean) / std).transpose(2, 0, 1)

    def tensors(self, rows: list[list[Any]]) -> dict[str, Any]:
        """The tensors of the pictures of each row, in the layout of the model's own processor."""
        import numpy as np
        import torch

        parts = [[self.pixels(part) for image in row for part in self.parts(image)] for row in rows]
        every = [part for row in parts for part in row]
        if self.kind == "gemma3":
            return {"pixel_values": torch.from_numpy(np.stack(every))}
        if self.kind in TILED:
            shape = (len(parts), max(map(len, parts)))
            values = np.zeros((*shape, 3, self.side, self.side), dtype=np.float32)
            mask = np.zeros((*shape, self.side, self.side), dtype=np.int64)
            for place, row in enumerate(parts):
                if row:
                    values[place, : len(row)], mask[place, : len(row)] = np.stack(row), 1
            return {"pixel_values": torch.from_numpy(values), "pixel_attention_mask": torch.from_numpy(mask)}
        if self.kind in LINED:
            return self.padded(every)
        grids = [[1, part.shape[1] // self.patch, part.shape[2] // self.patch] for part in every]
        patches = np.concatenate([self.patches(part) for part in every])
        return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(grids)}

    def padded(self, parts: list[Any]) -> dict[str, Any]:
        """The tensors of Pixtral and Mistral 3: each picture in the top left corner of a plane of one common size."""
        import numpy as np
        import torch

        sizes = [part.shape[1:] for part in parts]
        values = np.zeros((len(parts), 3, *map(max, zip(*sizes, strict=True))), dtype=np.float32)
        for place, (part, (height, width)) in enumerate(zip(parts, sizes, strict=True)):
            values[place, :, :height, :width] = part
        return {"pixel_values": torch.from_numpy(values), "image_sizes": torch.tensor(sizes)}

    def patches(self, pixels: Any) -> Any:
        """The patches of a picture of Qwen-VL, grouped by token. Each patch is repeated as the equal frames of a film.
        [3, height, width] -> [patches, numbers]"""
        import numpy as np

        size, merge, frames = self.patch, self.merge, int(self.processor.temporal_patch_size)
        high, wide = (side // size // merge for side in pixels.shape[1:])
        grid = pixels.reshape(3, high, merge, size, wide, merge, size).transpose(1, 4, 2, 5, 0, 3, 6)
        films = np.broadcast_to(grid[:, :, :, :, :, None], (*grid.shape[:5], frames, size, size))
        return films.reshape(high * wide * merge**2, -1)


def reduced_size(size: PictureSize, longest: int) -> PictureSize:
    """The size before both sides become whole tiles: the longer side is `longest`, the other one an even number."""
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return PictureSize(longest, height + height % 2)
    width = int(longest * ratio)
    return PictureSize(width + width % 2, longest)


def aligned_size(size: PictureSize, align: int, limits: tuple[int, int]) -> PictureSize:
    """The size with both sides a multiple of `align`, about in the shape of the picture, and its pixels within the
    limits. As llama.cpp computes it: in single precision, which changes some sides, and with halves rounded up."""
    least, most = limits

    def squares(side: float) -> float:
        return single(single(side) / align)

    width, height = (max(align, math.floor(squares(side) + 0.5) * align) for side in size)
    if width * height > most:
        shrink = single(math.sqrt(single(single(size.height * size.width) / most)))
        width, height = (max(align, math.floor(squares(side / shrink)) * align) for side in size)
    elif width * height < least:
        grow = single(math.sqrt(single(least / single(size.height * size.width))))
        width, height = (math.ceil(squares(side * grow)) * align for side in size)
    return PictureSize(width, height)


def single(number: float) -> float:
    """The nearest number in single precision. An operation in double precision, rounded so, equals one in single."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def letterboxed(image: Any, target: PictureSize, kernel: Any) -> Any:
    """The picture in its own shape, as large as it fits, centred on black; unchanged if it has the target size."""
    from PIL import Image

    if image.size == target:
        return image
    scale = min(single(target.width / image.width), single(target.height / image.height))
    width = min(math.ceil(single(image.width * scale)), target.width)
    height = min(math.ceil(single(image.height * scale)), target.height)
    inner = resampled(image, PictureSize(width, height), kernel)
    whole = Image.new("RGB", target, PADDING)
    whole.paste(inner, ((target.width - width) // 2, (target.height - height) // 2))
    return whole


def resampled(image: Any, size: PictureSize, kernel: Any) -> Any:
    """Along the lines first, then along the columns. Pillow 13 by itself begins with the columns of some pictures, and
    some pixels are one level off then."""
    return image.resize((size.width, image.height), kernel).resize(size, kernel)
