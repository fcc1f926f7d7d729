"""Reads the nodes of a graph in llama.cpp's callback. The library has no functions for the fields of a tensor, so the
layout of its struct is repeated here, and checked against the library."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from skill_train.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

_OBJECT_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead() includes
_F32, _F16, _I32 = 0, 1, 26  # enum ggml_type
_NUMPY = {_F32: "<f4", _F16: "<f2", _I32: "<i4"}


class GgmlTensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml/include/ggml.h in llama-cpp-python 0.3.36. `ne` are the lengths of the dimensions,
    row length first, and `nb` their strides in bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


class Nodes:
    """Reads the nodes of a graph.

    Args:
        ggml: the library, from `llama_cpp.ggml`.

    Raises:
        UsageError: the library's tensors have another layout.
    """

    def __init__(self, ggml: Any) -> None:
        self.ggml = ggml
        self._ops: dict[int, str] = {}
        self._compared = False
        ggml.ggml_tensor_overhead.restype = ctypes.c_size_t
        for function in (ggml.ggml_op_name, ggml.ggml_get_name):
            function.restype = ctypes.c_char_p
        ggml.ggml_get_name.argtypes = ggml.ggml_get_data.argtypes = [ctypes.c_void_p]
        ggml.ggml_get_data.restype = ctypes.c_void_p
        ggml.ggml_nbytes.argtypes, ggml.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        ggml.ggml_nelements.argtypes, ggml.ggml_nelements.restype = [ctypes.c_void_p], ctypes.c_int64
        moved = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        ggml.ggml_backend_tensor_get.argtypes = ggml.ggml_backend_tensor_set.argtypes = moved
        self._require(
            ggml.ggml_tensor_overhead() == ctypes.sizeof(GgmlTensor) + _OBJECT_BYTES, "its tensors have another size"
        )

    def at(self, pointer: int) -> GgmlTensor:
        """The node at an address. The first node's fields are compared with the library's own functions."""
        node = GgmlTensor.from_address(pointer)
        if not self._compared:
            same = (
                self.ggml.ggml_get_name(pointer) == node.name
                and self.ggml.ggml_get_data(pointer) == node.data
                and self.ggml.ggml_nelements(pointer) == math.prod(node.ne)
            )
            self._require(same, "its tensors have other fields")
            self._compared = True
        return node

    def op(self, node: GgmlTensor) -> str:
        """The name of the operation, such as `MUL_MAT`: its number differs between versions."""
        if node.op not in self._ops:
            self._ops[node.op] = self.ggml.ggml_op_name(node.op).decode()
        return self._ops[node.op]

    def values(self, pointer: int) -> np.ndarray:
        """A copy of the values [ne3, ne2, ne1, ne0] of a node, from the memory of any backend.

        Raises:
            UsageError: the values are not F32, F16 or I32.
        """
        import numpy as np

        node, size = self.at(pointer), self.ggml.ggml_nbytes(pointer)
        self._require(node.type in _NUMPY, f"{node.name.decode()} has the type {node.type}, not a plain one")
        data = np.empty(size, dtype=np.uint8)
        self.ggml.ggml_backend_tensor_get(pointer, data.ctypes.data, 0, size)
        code = np.dtype(_NUMPY[node.type])
        return np.ndarray(tuple(node.ne)[::-1], dtype=code, buffer=data, strides=tuple(node.nb)[::-1])

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise UsageError(
                f"the activations of this llama.cpp cannot be read: {otherwise}",
                code="cannot_quantize",
                expected="llama-cpp-python 0.3.36, or a version with the same tensors",
                got=otherwise,
                hint="skill-train export-gguf RUN --imatrix none",
            )


def weight_name(name: bytes) -> str:
    """The name of a weight, without the scheduler's prefix and suffix, as in `CPU#blk.0.attn_k.weight#0`."""
    text = name.decode("utf-8", errors="replace")
    return text.split("#")[1] if "#" in text else text
