"""Child process: runs llama.cpp over texts, and sums the squares of the inputs of each weight matrix.

llama.cpp calls back for every node of its graph. The sources of MUL_MAT are the weights and their inputs. The sources
of MUL_MAT_ID are the experts' weights, the inputs, and the number of the expert that each token was sent to. The sums
are the same as in llama.cpp's tools/imatrix/imatrix.cpp of llama-cpp-python 0.3.36, except that batches of fewer than
16 tokens count too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skill_train.core.errors import UsageError
from skill_train.core.worker import report_progress, worker_main
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.importance.file import Entry, ImportanceMatrix, shape_of, wanted_matrices, write_matrix
from skill_train.llama.importance.nodes import GgmlTensor, Nodes, weight_name
from skill_train.llama.llama_cpp import bindings, ggml, in_context, loaded_model

if TYPE_CHECKING:
    import numpy as np

WORKER = "skill_train.llama.importance.collect_worker"
CONTEXT = 512  # tokens of one text, as in llama.cpp's own tool (tools/imatrix, n_ctx)


class CollectJob(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the texts to run. `out` is the file for the importance matrix."""

    gguf: str  # an unquantized file
    sequences: list[list[int]]  # token ids, at most `CONTEXT` in each sequence
    threads: int
    out: str
    datasets: list[str]  # the names of the data, for the metadata of `out`
    # model, data: the sha256 of the GGUF file and of the token ids
    model: str
    data: str


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what the callback saw."""

    tokens: int  # the number of tokens read
    entries: int  # matrices whose inputs were seen
    unused_experts: int  # experts that no token was sent to
    unseen: list[str]  # matrices of layers whose inputs were not seen


def windows(ids: list[int], first_token: int | None) -> list[list[int]]:
    """Divides a row into parts of at most `CONTEXT` tokens. As in llama.cpp's tool, each part is read from an empty
    context and begins with the model's first token.

    Args:
        first_token: the token that begins every text, such as BOS; None if the model has none. It is left out if the
            row does not begin with it.
    """
    lead = ids[:1] if ids[:1] == [first_token] else []
    width = CONTEXT - len(lead)
    return [lead + ids[at : at + width] for at in range(len(lead), max(len(ids), len(lead) + 1), width)]


class Sums:
    """The sums of squares and the counts, by the name of the matrix. `take` fills them."""

    def __init__(self, nodes: Nodes, shapes: dict[str, tuple[int, int]]) -> None:
        self.nodes, self.shapes = nodes, shapes
        self.squares: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        # an exception in the callback: llama.cpp's C code cannot pass it on, and reports success after a stopped graph
        self.error: BaseException | None = None

    def take(self, pointer: int, asks: bool, _: Any) -> bool:
        """The callback. With `asks`, it returns whether the node is wanted; the next call has the computed sources."""
        try:
            return self._take(pointer, asks)
        except BaseException as error:  # noqa: BLE001  C code calls this
            self.error = self.error or error
            return False

    def _take(self, pointer: int, asks: bool) -> bool:
        node = self.nodes.at(pointer)
        op = self.nodes.op(node)
        if op not in ("MUL_MAT", "MUL_MAT_ID"):
            return False
        weights = self.nodes.at(node.src[0])
        name = weight_name(weights.name)
        if name not in self.shapes:
            return False
        if not asks:
            add = self._add_experts if op == "MUL_MAT_ID" else self._add
            add(name, weights, node)
        return True

    def _entry(self, name: str, counts: int) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        if name not in self.squares:
            self.squares[name] = np.zeros(self.shapes[name])
            self.counts[name] = np.zeros(counts)
        return self.squares[name], self.counts[name]

    def _add(self, name: str, weights: GgmlTensor, node: GgmlTensor) -> None:
        """Adds all rows of the inputs. If the tensor holds several matrices, such as one for each head, each sum has
        the inputs of one matrix, and the count is the number of rows of one matrix."""
        import numpy as np

        inputs = self.nodes.values(node.src[1])
        squares, counts = self._entry(name, 1)
        outer, middle, rows, width = inputs.shape
        sums = np.einsum("abrw,abrw->abw", inputs, inputs, dtype=np.float64)
        ratio = (outer // weights.ne[3], middle // weights.ne[2])
        for i3 in range(outer):
            for i2 in range(middle):
                squares[(i3 // ratio[0]) * weights.ne[2] + i2 // ratio[1], :width] += sums[i3, i2]
        counts += outer * middle * rows / len(squares)

    def _add_experts(self, name: str, _: GgmlTensor, node: GgmlTensor) -> None:
        """Adds each row of the inputs to the experts that it was sent to."""
        import numpy as np

        inputs, chosen = self.nodes.values(node.src[1])[0], self.nodes.values(node.src[2])[0, 0]
        squares, counts = self._entry(name, self.shapes[name][0])
        for expert in np.unique(chosen):
            tokens, slots = np.nonzero(chosen == expert)
            rows = inputs[tokens, slots % inputs.shape[1]]
            squares[expert] += np.einsum("rw,rw->w", rows, rows, dtype=np.float64)
            counts[expert] += len(rows)


def run(job: CollectJob) -> Collected:
    matrices = wanted_matrices(read_gguf(Path(job.gguf)))
    sums = summed(job, {name: shape_of(tensor) for name, tensor in matrices.items()})
    entries = {name: _entry(name, sums.squares[name], sums.counts[name]) for name in sums.squares}
    tokens = sum(map(len, job.sequences))
    chunks = max(1, round(tokens / CONTEXT))
    write_matrix(Path(job.out), ImportanceMatrix(entries, job.datasets, chunks, CONTEXT, job.model, job.data))
    return Collected(
        tokens=tokens,
        entries=len(entries),
        unused_experts=sum(int((entry.counts == 0).sum()) for entry in entries.values()),
        unseen=[name for name in matrices if name not in entries],
    )


def summed(job: CollectJob, shapes: dict[str, tuple[int, int]]) -> Sums:
    """Runs the model over all texts, and returns the sums.

    Args:
        shapes: for each tensor, the number of its matrices and their columns.
    """
    sums = Sums(Nodes(ggml()), shapes)
    callback = bindings().ggml_backend_sched_eval_callback(sums.take)
    tokens, done = sum(map(len, job.sequences)), 0
    with (
        loaded_model(Path(job.gguf)) as file,
        in_context(file, context_tokens=CONTEXT, threads=job.threads, on_node=callback) as llama,
    ):
        for ids in job.sequences:
            # This computes logits for every token, because llama.cpp's last layer leaves out tokens without logits.
            for start, logits in llama.logits(ids):
                if sums.error is not None:
                    raise sums.error
                report_progress(done + start + len(logits), tokens, "tokens read for the importance matrix")
            done += len(ids)
    return sums


def _entry(name: str, squares: np.ndarray, counts: np.ndarray) -> Entry:
    import numpy as np

    if not np.isfinite(squares).all():
        raise UsageError(
            f"the inputs of {name} are not finite on this text",
            code="bad_weights",
            expected="finite activations",
            got=name,
            hint="check whether the training diverged; --imatrix none exports without an importance matrix",
        )
    return Entry(squares.astype(np.float32), counts.astype(np.float32))


if __name__ == "__main__":
    worker_main(run, CollectJob)
