"""The batched copy, in C and in Python: one contract."""

from __future__ import annotations

import ctypes
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.transfer import native
from engine_core.transfer.copy_plan import CopyOps

IMPLEMENTATIONS = (native.batch_copy(), native.copy_in_python)


def ops(*pieces: tuple[int, int, int]) -> CopyOps:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return CopyOps(columns[:, 0], columns[:, 1], columns[:, 2])


def span(array: np.ndarray) -> native.Span:  # type: ignore[type-arg]
    return int(array.ctypes.data), array.nbytes


def test_this_host_runs_the_native_copy() -> None:
    assert native.batch_copy() is not native.copy_in_python
    path = native._library()
    assert path.suffix == ".so" and stat.S_IMODE(path.parent.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize("copy", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 63), st.integers(0, 63), st.integers(0, 64)).filter(
            lambda p: p[0] + p[2] <= 64 and p[1] + p[2] <= 64
        ),
        max_size=12,
    )
)
def test_copies_piece_by_piece_in_order(copy: native.BatchCopy, pieces: list[tuple[int, int, int]]) -> None:
    src, dst = np.arange(1, 65, dtype=np.uint8), np.zeros(64, np.uint8)
    expected = dst.copy()
    for s, d, n in pieces:
        expected[d : d + n] = src[s : s + n]
    assert copy(span(dst), span(src), ops(*pieces), ctypes.c_int32(0)) == sum(n for _, _, n in pieces)
    assert np.array_equal(dst, expected)


@pytest.mark.parametrize("copy", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "bad", [(60, 0, 5), (0, 60, 5), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 0, 1 << 62), ((1 << 63) - 1, 0, 2)]
)
def test_one_piece_outside_and_nothing_is_copied(copy: native.BatchCopy, bad: tuple[int, int, int]) -> None:
    src, dst = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="piece 1 of 2 lies outside"):
        copy(span(dst), span(src), ops((0, 0, 8), bad), ctypes.c_int32(0))
    assert not dst.any()


@pytest.mark.parametrize("copy", IMPLEMENTATIONS)
def test_a_set_flag_copies_nothing(copy: native.BatchCopy) -> None:
    src, dst = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    assert copy(span(dst), span(src), ops((0, 0, 64)), ctypes.c_int32(1)) == 0
    assert not dst.any()


def test_no_pieces() -> None:
    src = np.ones(4, np.uint8)
    for copy in IMPLEMENTATIONS:
        assert copy(span(src), span(src), ops(), ctypes.c_int32(0)) == 0


def test_strided_columns_are_read_right() -> None:
    """Columns of a 2-D array are not contiguous; the native side must not read them as if."""
    src, dst = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    pieces = ops((0, 4, 2), (6, 0, 2))
    assert not pieces.src_offset.flags.c_contiguous
    assert native.batch_copy()(span(dst), span(src), pieces, ctypes.c_int32(0)) == 4
    assert dst.tolist() == [6, 7, 0, 0, 0, 1, 0, 0]
