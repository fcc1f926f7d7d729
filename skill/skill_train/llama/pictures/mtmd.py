"""Runs llama.cpp's projector through its low-level bindings: pictures in, embeddings out. Imported only by workers.

The vision tower keeps llama.cpp's default, flash attention. Without it, a large photograph can need gigabytes for the
attention of each head (2000x1500 and Qwen2-VL: 15,000 patches, 0.9 GB). With it, keys and values are in f16: the
embeddings of tiny pairs then err by 9e-4 of their length instead of 5e-4.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.importance.nodes import GgmlTensor
from skill_train.llama.llama_cpp import Llama, LoadedFile, cannot, ggml, refused

if TYPE_CHECKING:
    import numpy as np

_TEXT = 0  # MTMD_INPUT_CHUNK_TYPE_TEXT
_MOST_TOKENS = 1 << 16  # the most tokens of a picture with `any_size`: in effect no limit
_PIXELS = b"inp_raw"  # the name of the input in llama.cpp's vision graphs
_F32 = 0
LINE_END_TENSOR = "v.token_embd.img_break"  # in the projectors of Pixtral and Mistral 3
_CHANNELS = 3
_LEAST_STEP = 128  # tokens read at once


@dataclass
class _Watch:
    """A graph callback that copies the tower's input pixels. llama.cpp shows all nodes before it computes the first."""

    name_of: Any
    pixels: np.ndarray | None = None
    why_not: str = "no step of the vision graph reads a tensor of that name"

    def __call__(self, pointer: int, ask: bool, _: int) -> bool:
        if ask and self.pixels is None:
            self._find_pixels(pointer)
        return False

    def _find_pixels(self, pointer: int) -> None:
        step = GgmlTensor.from_address(pointer)
        if self.name_of(pointer) != step.name:
            self.why_not = "this llama.cpp lays out its tensors in another way"
            return
        for source in filter(None, step.src):
            tensor = GgmlTensor.from_address(source)
            if tensor.name == _PIXELS:
                self._copy(tensor)
                return

    def _copy(self, tensor: GgmlTensor) -> None:
        import numpy as np

        width, height, channels, pictures = tensor.ne
        if tensor.type != _F32 or (channels, pictures) != (_CHANNELS, 1) or tensor.nb[1] != 4 * width:
            self.why_not = f"the tower reads a tensor of type {tensor.type} and shape {list(tensor.ne)}"
            return
        numbers = (ctypes.c_float * (width * height * channels)).from_address(tensor.data)
        self.pixels = np.array(numbers, dtype=np.float32).reshape(channels, height, width)


@dataclass
class Chunk:
    """A part of a prompt in llama.cpp's own memory. Its fields are as in `PictureChunk`."""

    pointer: Any
    ids: list[int] | None
    tokens: int
    positions: int


@dataclass(frozen=True)
class LineEnd:
    """The embedding of [IMG_BREAK]. `token_edge` is the width and height in pixels of one token of a picture."""

    embedding: np.ndarray
    token_edge: int


@dataclass
class Projector:
    """A loaded projector of a loaded language model."""

    api: Any  # the module llama_cpp.mtmd_cpp
    context: Any
    width: int  # the length of an embedding; with Qwen3-VL it includes the embeddings from the tower's inner layers
    watch: _Watch
    line_end: LineEnd | None  # what ends each line of a picture in Pixtral and Mistral 3; None for other models
    _owned: contextlib.ExitStack

    @property
    def looks_both_ways(self) -> bool:
        """Whether the parts of a picture attend to each other in both directions."""
        return bool(self.api.mtmd_decode_use_non_causal(self.context, None))

    def step_of(self, prompts: list[list[Chunk]]) -> int:
        """How many tokens to read at once. If a picture's tokens attend in both directions, one step must read all."""
        sizes = [chunk.tokens for chunks in prompts for chunk in chunks if chunk.ids is None]
        return max([_LEAST_STEP, *sizes]) if self.looks_both_ways else _LEAST_STEP

    def tokenize(self, text: str, pictures: list[np.ndarray]) -> list[Chunk]:
        """Divides a text, with a marker for each picture, into chunks. Pictures are uint8 [height, width, 3].

        Raises:
            VerificationFailed: llama.cpp refuses the text or a picture.
        """
        api, data = self.api, text.encode("utf-8", errors="replace")
        bitmaps = [self._bitmap(picture) for picture in pictures]
        chunks = api.mtmd_input_chunks_init()
        self._owned.callback(api.mtmd_input_chunks_free, chunks)
        input_text = api.mtmd_input_text(text=data, text_len=len(data), add_special=False, parse_special=True)
        pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
        status = api.mtmd_tokenize(self.context, chunks, ctypes.byref(input_text), pointers, len(bitmaps))
        for bitmap in bitmaps:
            api.mtmd_bitmap_free(bitmap)
        if status != 0:
            raise cannot(f"divide a prompt with {len(pictures)} pictures", status)
        chunk_pointers = (
            api.mtmd_input_chunks_get(chunks, number) for number in range(api.mtmd_input_chunks_size(chunks))
        )
        return [self._chunk(pointer) for pointer in chunk_pointers]

    def encode(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray | None]:
        """The embeddings of a picture [tokens, width], and the pixels that the tower read; None if they could not be
        copied. `with_line_ends` repairs the ends of lines."""
        import numpy as np

        self.watch.pixels = None
        status = self.api.mtmd_encode_chunk(self.context, chunk.pointer)
        if status != 0:
            raise cannot("encode a picture", status)
        pointer = self.api.mtmd_get_output_embd(self.context)
        embeddings = np.ctypeslib.as_array(pointer, shape=(chunk.tokens, self.width)).copy()
        if self.line_end is not None and self.watch.pixels is not None:
            _, height, width = self.watch.pixels.shape
            lines, columns = height // self.line_end.token_edge, width // self.line_end.token_edge
            embeddings = with_line_ends(embeddings, self.line_end.embedding, lines, columns)
        return embeddings, self.watch.pixels

    def decode(self, llama: Llama, chunk: Chunk, embeddings: np.ndarray, position: int, at_once: int) -> None:
        """Lets the language model read the embeddings of a picture from `position` on."""
        import numpy as np

        rows = np.ascontiguousarray(embeddings, dtype=np.float32)
        if rows.shape != (chunk.tokens, self.width):
            raise cannot(f"read embeddings of shape {list(rows.shape)}", f"{[chunk.tokens, self.width]} expected")
        status = self.api.mtmd_helper_decode_image_chunk(
            self.context,
            llama.context,
            chunk.pointer,
            rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            position,
            0,
            at_once,
            ctypes.byref(ctypes.c_int32()),
            self.api.mtmd_helper_post_decode_callback(),
            None,
        )
        if status != 0:
            raise cannot("read a picture", status)

    def read_prompt(self, llama: Llama, chunks: list[Chunk], step: int) -> tuple[np.ndarray, int]:
        """Lets the language model read a prompt from an empty context, `step` tokens at once.

        Returns the logits [vocabulary] after the last token, and the position of the next token.
        """
        llama.forget()
        position, row = 0, None
        for chunk in chunks:
            if chunk.ids is None:
                embeddings, _ = self.encode(chunk)
                self.decode(llama, chunk, embeddings, position, step)
            else:
                row = llama.read(chunk.ids, position, at_once=step)[0]
            position += chunk.positions
        assert row is not None and chunks[-1].ids is not None, "a prompt ends with text"
        return row, position

    def _bitmap(self, picture: np.ndarray) -> Any:
        import numpy as np

        pixels = np.ascontiguousarray(picture, dtype=np.uint8)
        height, width, _ = pixels.shape
        return self.api.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))

    def _chunk(self, pointer: Any) -> Chunk:
        api, ids = self.api, None
        if api.mtmd_input_chunk_get_type(pointer) == _TEXT:
            count = ctypes.c_size_t()
            tokens = api.mtmd_input_chunk_get_tokens_text(pointer, ctypes.byref(count))
            ids = list(tokens[: count.value])
        return Chunk(pointer, ids, api.mtmd_input_chunk_get_n_tokens(pointer), api.mtmd_input_chunk_get_n_pos(pointer))


@contextlib.contextmanager
def projector(file: LoadedFile, path: Path, *, threads: int, any_size: bool) -> Iterator[Projector]:
    """Loads the projector in the GGUF file `path` for the language model `file`.

    Args:
        any_size: pictures are not resized to llama.cpp's limits of their number of tokens.

    Raises:
        VerificationFailed: llama.cpp refuses the projector.
    """
    name_of = ggml().ggml_get_name
    name_of.argtypes, name_of.restype = [ctypes.c_void_p], ctypes.c_char_p
    from llama_cpp import mtmd_cpp

    watch = _Watch(name_of)
    log = file.api.llama_log_callback(lambda level, text, _: file.lines.append((level, text.decode(errors="replace"))))
    callback = file.api.ggml_backend_sched_eval_callback(watch)
    mtmd_cpp.mtmd_helper_log_set(log, None)  # the log of mtmd too
    _kept_alive.extend((log, callback))
    parameters = mtmd_cpp.mtmd_context_params_default()
    parameters.use_gpu = parameters.print_timings = parameters.warmup = False
    parameters.n_threads, parameters.cb_eval = threads, callback
    if any_size:
        parameters.image_min_tokens, parameters.image_max_tokens = 1, _MOST_TOKENS
    file.lines.clear()  # the lines that follow are about the projector
    context = mtmd_cpp.mtmd_init_from_file(str(path).encode(), file.model, parameters)
    if not context:
        raise refused(path, file.lines)
    with contextlib.ExitStack() as owned:
        owned.callback(mtmd_cpp.mtmd_free, context)
        width = file.api.llama_model_n_embd_inp(file.model)
        yield Projector(mtmd_cpp, context, width, watch, _line_end(path), owned)


def _line_end(path: Path) -> LineEnd | None:
    import numpy as np

    gguf = read_gguf(path)
    tensor, patch = gguf.tensors.get(LINE_END_TENSOR), gguf.metadata.get("clip.vision.patch_size")
    if tensor is None or tensor.kind != "F32" or not isinstance(patch, int) or patch < 1:
        return None
    merged = gguf.metadata.get("clip.vision.spatial_merge_size")
    embedding = np.fromfile(path, dtype=np.float32, count=tensor.elements, offset=tensor.offset)
    return LineEnd(embedding, patch * merged if isinstance(merged, int) and merged > 0 else patch)


def with_line_ends(embeddings: np.ndarray, line_end: np.ndarray, lines: int, columns: int) -> np.ndarray:
    """Replaces NaN and infinity at the ends of a picture's lines by the embedding of [IMG_BREAK].

    For the end of a line llama.cpp 0.3.36 multiplies uninitialized memory by 0 and adds the embedding of [IMG_BREAK]
    (clip_graph_pixtral in tools/mtmd/models/pixtral.cpp). A NaN or infinity in that memory becomes NaN. Other tokens
    [tokens, width] stay unchanged, because a NaN there is a fault of the file.
    """
    import numpy as np

    if len(embeddings) != lines * (columns + 1) - 1:  # the last line has no end
        return embeddings
    ends = np.arange(len(embeddings)) % (columns + 1) == columns
    return np.where(ends[:, None] & ~np.isfinite(embeddings), line_end, embeddings)


_kept_alive: list[Any] = []
