"""Values of many frames are copied in few runs, and the result equals the single values for any positions."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.segment.frame_encoder import _regular_runs, copy_values, value_list
from ringlog.segment.records import BytesColumnValues

BUFFER = os.urandom(1 << 16)


def as_values(starts: list[int], lengths: list[int]) -> BytesColumnValues:
    return BytesColumnValues(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))


@st.composite
def places(draw):
    """Draw runs of equally long values at a constant step, some single values, and some values of another
    length."""
    starts, lengths = [], []
    length = draw(st.integers(0, 40))
    for _ in range(draw(st.integers(1, 8))):
        at, step = draw(st.integers(0, 30_000)), length + draw(st.sampled_from([0, 0, 8, 80]))
        size = draw(st.sampled_from([length] * 6 + [draw(st.integers(0, 40))]))
        for i in range(draw(st.integers(1, 60))):
            starts.append(at + i * step)
            lengths.append(size)
    return starts, lengths


@given(places())
def test_copy_values_returns_every_value_in_order(found):
    starts, lengths = found
    expected = b"".join(BUFFER[a : a + n] for a, n in zip(starts, lengths, strict=True))
    values = as_values(starts, lengths)
    assert b"".join(copy_values(memoryview(BUFFER), values)) == expected
    assert b"".join(value_list(memoryview(BUFFER), values)) == expected


def test_runs_of_one_step_are_copied_run_by_run():
    """The one-record frames between two chain marks have this layout, for which the function is optimised."""
    starts = [100 + i * 184 for i in range(250)] + [50_000 + i * 48 for i in range(250)]
    values = as_values(starts, [40] * 500)
    assert len(copy_values(memoryview(BUFFER), values)) == 2


@pytest.mark.parametrize("count", [2, 3, 17])
def test_a_single_last_value_is_a_separate_run(count):
    starts = np.array([i * 64 for i in range(40)] + [5_000 + i * 1_000 for i in range(count)], dtype=np.int64)
    runs = _regular_runs(starts, np.diff(starts), 40)
    assert runs is not None
    assert [a for a, _, _ in runs] == [0, *[b for _, b, _ in runs[:-1]]]
    assert runs[-1][1] == len(starts)
