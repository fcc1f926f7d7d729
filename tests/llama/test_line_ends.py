"""The ends of lines in the pictures of Pixtral and Mistral 3, which llama.cpp reads from memory that it never set."""

from __future__ import annotations

import numpy as np
import pytest

from skill_train.llama.pictures.mtmd import with_line_ends

END = np.array([7.0, 8.0], dtype=np.float32)


def picture() -> np.ndarray:
    """Two lines of three columns, and one end: a token more than there are patches."""
    return np.arange(14, dtype=np.float32).reshape(7, 2)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_no_number_at_the_end_of_a_line_becomes_its_embedding(odd: float) -> None:
    broken = picture()
    broken[3] = odd
    assert with_line_ends(broken, END, 2, 3)[3].tolist() == [7, 8]
    broken[3, 1] = 5
    assert with_line_ends(broken, END, 2, 3)[3].tolist() == [7, 5]  # a number stays


@pytest.mark.parametrize("token", [0, 1, 2, 4, 5, 6])
def test_a_patch_that_is_no_number_stays_one(token: int) -> None:
    """It is a fault of the file, which the checks must see."""
    broken = picture()
    broken[token, 0] = np.nan
    assert np.isnan(with_line_ends(broken, END, 2, 3)[token, 0])


def test_a_picture_of_another_shape_is_left_alone() -> None:
    broken = picture()
    broken[3] = np.nan
    assert np.isnan(with_line_ends(broken, END, 3, 2)[3]).all()
