"""A mirror of `struct ggml_tensor`, which no function of the library opens up.

Source: ggml/include/ggml.h of llama.cpp in llama-cpp-python 0.3.36. `importance.nodes` compares its size with the
library's.
"""

from __future__ import annotations

import ctypes


class GgmlTensor(ctypes.Structure):
    """A tensor. `ne` are the lengths and `nb` the strides in bytes, of the row first."""

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
