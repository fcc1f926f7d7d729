"""What llama.cpp is told about a GPU. None is needed: only that the words reach it is shown here."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from skill_train.core.errors import NotInstalled
from skill_train.llama.llama_cpp import _model_parameters, bindings, refused, uses_gpu


def test_all_layers_or_none() -> None:
    """llama.h: a negative number is all layers."""
    api = bindings()
    assert [_model_parameters(api, gpu).n_gpu_layers for gpu in (True, False)] == [-1, 0]


def test_the_default_is_the_gpu_where_llama_cpp_has_one() -> None:
    has_gpu = bool(bindings().llama_supports_gpu_offload())
    assert uses_gpu(None) is has_gpu and uses_gpu("cpu") is False
    if has_gpu:
        assert uses_gpu("gpu") is True
        return
    with pytest.raises(NotInstalled, match=r"llama\.cpp has no GPU here") as caught:
        uses_gpu("gpu")
    assert (caught.value.code, caught.value.exit_code) == ("device_unavailable", 7)


def test_a_sound_file_may_be_too_large_for_the_gpu() -> None:
    lines = deque([(4, "unable to allocate CUDA0 buffer")])
    assert "--device cpu" in refused(Path("m.gguf"), lines, gpu=True).hint
    assert "--device cpu" not in refused(Path("m.gguf"), lines).hint
