"""Child process: runs llama.cpp over texts, and sums the squares of what goes into each weight matrix.

llama.cpp calls back for every node of its graph. MUL_MAT has the weights as its first source and their inputs as its
second; MUL_MAT_ID has the experts' weights, the inputs, and the number of the expert that each token was sent to. The
sums are those of llama.cpp's tools/imatrix/imatrix.cpp in llama-cpp-python 0.3.36. It leaves out batches of fewer than
16 tokens; here they count.
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
CONTEXT = 512  # tokens of one text, as llama.cpp's own tool takes them (tools/imatrix, n_ctx)


class CollectJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, and the file for the matrix."""

    gguf: str  # an unquantized file
    sequences: list[list[int]]  # token ids, at most `CONTEXT` of each
    threads: int
    out: str
    datasets: list[str]  # the names of the data, for the metadata of the file
    # model, data: the sha256 of the model's file and of the token ids
    model: str
    data: str


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    tokens: int  # that were read
    entries: int  # matrices whose inputs were seen
    unused_experts: int  # experts that no token was sent to
    unseen: list[str]  # matrices of layers whose inputs were not seen


def windows(ids: list[int], first_token: int | None) -> list[list[int]]:
    """A row in parts of `CONTEXT` tokens, as llama.cpp's tool reads its text: each from an empty context, and each with
    the token that begins every text of the model.

    Args:
        first_token: that token; None if the model has none. A row that begins without it has no part with it.
    """
    lead = ids[:1] if ids[:1] == [first_token] else []
    width = CONTEXT - len(lead)
    return [lead + ids[at : at + width] for at in range(len(lead), max(len(ids), len(lead) + 1), width)]


class Sums:
    """The sums of squares by matrix, filled by `take`."""

    def __init__(self, nodes: Nodes, shapes: dict[str, tuple[int, int]]) -> None:
        self.nodes, self.shapes = nodes, shapes
        self.squares: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        # of the callback: llama.cpp's C code cannot pass it on; it stops the graph, and says that all went well
        self.error: BaseException | None = None

    def take(self, pointer: int, asks: bool, _: Any) -> bool:
        """The callback. llama.cpp asks for each node whether it is wanted, and comes again with its sources filled."""
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
        """All rows of the inputs. Where the weights are several matrices, such as one for each head, each gets the
        inputs of its own, and the count is the rows of one of them."""
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
        """Each row of the inputs counts for the experts that it was sent to."""
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
    """The sums over all texts, by matrix.

    Args:
        shapes: how many matrices, and of how many columns, are in each tensor.
    """
    sums = Sums(Nodes(ggml()), shapes)
    callback = bindings().ggml_backend_sched_eval_callback(sums.take)
    tokens, done = sum(map(len, job.sequences)), 0
    with (
        loaded_model(Path(job.gguf)) as file,
        in_context(file, context_tokens=CONTEXT, threads=job.threads, on_node=callback) as llama,
    ):
        for ids in job.sequences:
            # With logits for every token: llama.cpp leaves the others out of the last layer.
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
