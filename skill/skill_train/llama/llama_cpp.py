"""Runs a model in llama.cpp through its low-level bindings: tokens in, logits out. Imported only by workers.

The default settings favour exactness over speed: no GPU, no repacked weights, key-value cache in f32, no flash
attention.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skill_train.core.errors import NotInstalled, VerificationFailed, not_installed
from skill_train.llama.gguf_header import bad_gguf
from skill_train.llama.inference import Prompt, VocabularyFacts

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 128  # tokens decoded at a time: 128 x 152k logits in float32 are 78 MB
_GGML_TYPE_F32 = 0
_FLASH_ATTENTION_OFF = 0
_LOG_WARN, _LOG_ERROR = 3, 4


@dataclass
class Llama:
    """A loaded model and its context. `tokens` is the size of its vocabulary."""

    api: Any
    vocab: Any
    context: Any
    tokens: int

    def facts(self) -> VocabularyFacts:
        api, vocab = self.api, self.vocab
        ids = {name: getattr(api, f"llama_vocab_{name}")(vocab) for name in ("bos", "eos", "pad")}
        return VocabularyFacts(
            **{name: token if token >= 0 else None for name, token in ids.items()},
            add_bos=bool(api.llama_vocab_get_add_bos(vocab)),
            end_of_generation=[token for token in range(self.tokens) if self.ends(token)],
            tokens=self.tokens,
        )

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """The token ids of a text. Special tokens in the text are recognised, as in a rendered chat prompt."""
        data = text.encode("utf-8", errors="replace")
        room = len(data) + 2  # usually enough: a token has at least one byte, and two special tokens are added
        while True:
            ids = (self.api.llama_token * room)()
            count = self.api.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, True)
            if count >= 0:
                return list(ids[:count])
            room = -count  # a negative count is the size of the needed buffer

    def logits(self, ids: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The logits of one sequence in parts: `(first position, float32 [positions, vocabulary])`. A part is valid
        until the next one is requested."""
        self.forget()
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            yield start, self.decode(chunk, start, last=len(chunk))

    def greedy(self, prompt: list[int], *, most: int) -> list[int]:
        """The greedy answer of at most `most` tokens. It ends with llama.cpp's own end-of-generation tokens."""
        self.forget()
        return self.greedy_after(self.read(prompt)[0], len(prompt), most=most)

    def greedy_after(self, row: np.ndarray, position: int, *, most: int) -> list[int]:
        """`greedy` after a prompt that was read. `row` is its last logits [vocabulary], `position` the next one."""
        answer: list[int] = []
        while len(answer) < most:
            answer.append(int(row.argmax()))
            if len(answer) == most or self.ends(answer[-1]):
                break
            row = self.decode(answer[-1:], position + len(answer) - 1, last=1)[0]
        return answer

    def greedy_together(self, prompts: list[Prompt]) -> list[list[int]]:
        """`greedy` for several prompts in one batch. Each step reads the weights once for all prompts."""
        self.forget()
        answers = [[int(self.read(one.ids, sequence=number)[0].argmax())] for number, one in enumerate(prompts)]
        going = list(range(len(prompts)))
        while going := [n for n in going if len(answers[n]) < prompts[n].most and not self.ends(answers[n][-1])]:
            places = [len(prompts[n].ids) + len(answers[n]) - 1 for n in going]
            rows = self._decode([answers[n][-1] for n in going], places, going, last=len(going))
            for n, row in zip(going, rows, strict=True):
                answers[n].append(int(row.argmax()))
        return answers

    def ends(self, token: int) -> bool:
        """Whether llama.cpp ends an answer at this token."""
        return bool(self.api.llama_vocab_is_eog(self.vocab, token))

    def greedy_like(self, prompt: list[int], expected: list[int], *, most: int) -> list[int]:
        """The answer of `greedy` up to the first token that differs from `expected`. It is faster: one pass predicts
        the token after each expected token, while `greedy` reads all weights for each token."""
        answer: list[int] = []
        usable = list(takewhile(lambda token: token < self.tokens, expected[: most - 1]))  # ids in its vocabulary
        self.forget()
        for row in self.read(prompt + usable, last=1 + len(usable)):
            answer.append(int(row.argmax()))
            if self.ends(answer[-1]) or answer != expected[: len(answer)]:
                break
        return answer

    def read(
        self, ids: list[int], position: int = 0, *, at_once: int = _CHUNK, last: int = 1, sequence: int = 0
    ) -> np.ndarray:
        """Reads tokens into the context from `position` on. Returns the logits [last, vocabulary] of the last ones."""
        import numpy as np

        rows, first = [np.empty((0, self.tokens), dtype=np.float32)], len(ids) - last
        for start in range(0, len(ids), at_once):
            chunk = ids[start : start + at_once]
            wanted = min(len(chunk), max(0, start + len(chunk) - first))
            places = range(position + start, position + start + len(chunk))
            rows.append(self._decode(chunk, places, [sequence] * len(chunk), last=wanted).copy())
        return np.concatenate(rows)

    def forget(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def wait(self) -> None:
        """Waits until a GPU has finished its work."""
        self.api.llama_synchronize(self.context)

    def decode(self, ids: list[int], position: int, *, last: int) -> np.ndarray:
        """Reads tokens from `position` on. Returns the logits [last, vocabulary] of the last ones, in llama.cpp's own
        memory: the next call overwrites them."""
        return self._decode(ids, range(position, position + len(ids)), [0] * len(ids), last=last)

    def _decode(self, ids: list[int], positions: Iterable[int], sequences: list[int], *, last: int) -> np.ndarray:
        """`decode` for tokens of several sequences. Each token has its own position and sequence."""
        import numpy as np

        batch = self.api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, (token, position, sequence) in enumerate(zip(ids, positions, sequences, strict=True)):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index >= len(ids) - last
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if status != 0:
            raise cannot("run the model", f"status {status}")
        if not last:
            return np.empty((0, self.tokens), dtype=np.float32)
        pointer = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(last, self.tokens))


@contextlib.contextmanager
def loaded(
    path: Path, *, context_tokens: int, threads: int, lora: Path | None = None, sequences: int = 1
) -> Iterator[Llama]:
    """Loads a GGUF file. `lora` is the GGUF file of an adapter, which is applied with a scale of 1.

    Args:
        sequences: how many sequences of `context_tokens` tokens are in memory at a time.

    Raises:
        NotInstalled: llama-cpp-python is missing.
        VerificationFailed: llama.cpp refuses the file; `got` is the last line of its log.
    """
    with loaded_model(path) as file:
        parameters = _exact(_context_parameters(file, sequences * context_tokens, threads))
        parameters.n_seq_max = sequences
        with _opened(file, parameters) as llama:
            if lora is not None:
                _add_adapter(file, llama.context, lora)
            yield llama


@dataclass
class LoadedFile:
    """A model without a context. `lines` are llama.cpp's last log lines; with `gpu` the layers are on the GPU."""

    api: Any
    path: Path
    model: Any
    lines: deque[tuple[int, str]]
    gpu: bool


@contextlib.contextmanager
def loaded_model(
    path: Path, *, writable: bool = False, gpu: bool = False, repacked: bool = False
) -> Iterator[LoadedFile]:
    """Loads the weights without a context. Raises what `loaded` raises.

    Args:
        writable: the weights are copied into memory and may be changed. Otherwise the file is mapped.
        gpu: all layers are on the GPU.
        repacked: llama.cpp may repack weights for the processor. On processors with AMX, llama-cpp-python 0.3.36
            then segfaults with quantized weights.
    """
    api = bindings()
    with captured_log(api) as lines:
        parameters = _model_parameters(api, gpu, repacked)
        if writable:
            parameters.load_mode = api.LLAMA_LOAD_MODE_NONE
        model = api.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise refused(path, lines, gpu=gpu)
        try:
            yield LoadedFile(api, path, model, lines, gpu)
        finally:
            api.llama_model_free(model)


def uses_gpu(device: str | None) -> bool:
    """Whether models run on the GPU: if llama.cpp has one and `device` is not `cpu`.

    Raises:
        NotInstalled: `device` is `gpu`, but llama.cpp has none.
    """
    has_gpu = bool(bindings().llama_supports_gpu_offload())
    if device == "gpu" and not has_gpu:
        raise NotInstalled(
            "llama.cpp has no GPU here: none is in this machine, or llama-cpp-python was built without support for it",
            code="device_unavailable",
            expected="a GPU, and a llama-cpp-python that was built for it",
            hint="leave --device out; or pip uninstall llama-cpp-python, and build it for the GPU: "
            "CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python",
        )
    return has_gpu and device != "cpu"


@contextlib.contextmanager
def as_users_run(path: Path, *, context_tokens: int, threads: int, gpu: bool, repacked: bool) -> Iterator[Llama]:
    """Loads the model with llama.cpp's own fast defaults: key-value cache in f16, and its choice of flash attention.

    Args:
        gpu, repacked: as for `loaded_model`.

    Raises:
        VerificationFailed: llama.cpp refuses the file.
    """
    with loaded_model(path, gpu=gpu, repacked=repacked) as file:
        parameters = _context_parameters(file, context_tokens, threads)
        parameters.swa_full = False  # as in llama-server and llama-cli
        with _opened(file, parameters) as llama:
            yield llama


@contextlib.contextmanager
def in_context(
    file: LoadedFile,
    *,
    context_tokens: int,
    threads: int,
    at_once: int = _CHUNK,
    exact: bool = True,
    on_node: Any = None,
) -> Iterator[Llama]:
    """Makes a context for a loaded model.

    Args:
        at_once: the most tokens of one step. If a picture's tokens attend in both directions, one step must take all.
        exact: keys and values in f32, and no flash attention. Otherwise llama.cpp's own defaults.
        on_node: a `ggml_backend_sched_eval_callback`, which is called for every node of the graph.
    """
    parameters = _context_parameters(file, context_tokens, threads)
    if exact:
        _exact(parameters)
    if on_node is not None:
        parameters.cb_eval = on_node
    parameters.n_batch = parameters.n_ubatch = at_once
    with _opened(file, parameters) as llama:
        yield llama


def _exact(parameters: Any) -> Any:
    parameters.type_k = parameters.type_v = _GGML_TYPE_F32
    parameters.flash_attn_type = _FLASH_ATTENTION_OFF
    parameters.n_batch = parameters.n_ubatch = _CHUNK
    return parameters


def _model_parameters(api: Any, gpu: bool, repacked: bool = False) -> Any:
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers, parameters.use_extra_bufts = (-1 if gpu else 0), repacked  # -1: all of them
    return parameters


def _context_parameters(file: LoadedFile, context_tokens: int, threads: int) -> Any:
    parameters = file.api.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = context_tokens, threads, threads
    parameters.offload_kqv = parameters.op_offload = file.gpu
    return parameters


@contextlib.contextmanager
def _opened(file: LoadedFile, parameters: Any) -> Iterator[Llama]:
    """A context with these parameters. It is freed at the end of the block."""
    api = file.api
    context = api.llama_init_from_model(file.model, parameters)
    if not context:
        raise refused(file.path, file.lines, gpu=file.gpu)
    vocab = api.llama_model_get_vocab(file.model)
    try:
        yield Llama(api, vocab, context, api.llama_vocab_n_tokens(vocab))
    finally:
        api.llama_free(context)


def _add_adapter(file: LoadedFile, context: Any, lora: Path) -> None:
    """Loads an adapter into the context. llama.cpp frees it with the model."""
    adapter = file.api.llama_adapter_lora_init(file.model, str(lora).encode())
    adapters = (file.api.llama_adapter_lora_p_ctypes * 1)(adapter)
    if not adapter or file.api.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) != 0:
        raise refused(lora, file.lines)


@contextlib.contextmanager
def captured_log(api: Any) -> Iterator[deque[tuple[int, str]]]:
    """Collects llama.cpp's last 200 log lines with their levels. Nothing is printed."""
    lines: deque[tuple[int, str]] = deque(maxlen=200)

    def keep(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        lines.append((level, text.decode("utf-8", errors="replace").strip()))

    callback = api.llama_log_callback(keep)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        # The callback must stay in memory, because llama.cpp may log a line while Python ends.
        _kept_alive.append(callback)


_kept_alive: list[Any] = []


def refused(path: Path, lines: deque[tuple[int, str]], *, gpu: bool = False) -> VerificationFailed:
    """The error for a file that llama.cpp does not load. With `gpu` the hint adds that the GPU's memory may be full."""
    errors = [text for level, text in lines if level == _LOG_ERROR and text]
    words = errors or [text for level, text in lines if level == _LOG_WARN and text] or ["it said nothing"]
    # The first error is the cause; the ones that follow say only that loading failed.
    return bad_gguf(
        f"llama.cpp cannot load {path.name}: {words[0]}",
        got=words[-1],
        hint=("--device cpu, if the GPU has too little memory for it; or " if gpu else "")
        + "export it again: skill-train export-gguf RUN; a new architecture needs a newer llama-cpp-python",
    )


def cannot(what: str, status: object) -> VerificationFailed:
    """The error for a failed operation on a loaded file. `what` completes "llama.cpp could not …"."""
    return bad_gguf(f"llama.cpp could not {what} ({status})", hint="skill-train doctor --self-test")


def bindings() -> Any:
    """llama-cpp-python's low-level functions. For workers only: native code can end the process."""
    try:
        import llama_cpp
    except ImportError:
        raise not_installed("llama-cpp-python", "gguf") from None
    return llama_cpp


def ggml() -> Any:
    """The library below llama.cpp, loaded by its bindings. For workers only."""
    bindings()
    from llama_cpp import _ggml

    return _ggml.libggml
