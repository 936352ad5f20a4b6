"""Histograms: the bucket of a value, percentiles, and values recorded several times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.board.histogram import (
    BUCKETS,
    COUNT_SHIFT,
    LAST,
    NS_SHIFT,
    Histogram,
    bucket_floor,
    bucket_of,
)  # fmt: skip
from ringlog.board.layout import HISTOGRAM_WORDS

SHIFTS = pytest.mark.parametrize("shift", [NS_SHIFT, COUNT_SHIFT])


def histogram(shift: int = NS_SHIFT) -> Histogram:
    return Histogram(memoryview(bytearray(8 * HISTOGRAM_WORDS)).cast("Q"), 0, shift)


@given(st.integers(0, (1 << 53) - 1), st.sampled_from([NS_SHIFT, COUNT_SHIFT]))
def test_a_value_lies_within_its_bucket(value: int, shift: int) -> None:
    bucket = bucket_of(value, shift)
    assert 0 <= bucket <= LAST < BUCKETS
    assert bucket_floor(bucket, shift) <= value
    assert bucket == LAST or value < bucket_floor(bucket + 1, shift)


@SHIFTS
def test_there_are_four_rising_buckets_per_octave(shift: int) -> None:
    floors = [bucket_floor(bucket, shift) for bucket in range(LAST + 1)]
    assert floors == sorted(set(floors))
    assert all(floors[i + 4] == 2 * floors[i] for i in range(1, LAST - 4))


def test_times_reach_from_a_microsecond_to_more_than_a_minute() -> None:
    assert bucket_floor(1, NS_SHIFT) <= 1_100
    assert bucket_floor(LAST, NS_SHIFT) > 60e9
    assert HISTOGRAM_WORDS >= BUCKETS + 1 >= 65


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=200), st.floats(0, 100))
def test_a_percentile_is_within_one_bucket_of_the_exact_value(values: list[int], p: float) -> None:
    one = histogram()
    for value in values:
        one.record(value)
    snapshot = one.snapshot()
    assert (snapshot.count, snapshot.total) == (len(values), sum(values))
    assert snapshot.mean == pytest.approx(sum(values) / len(values))
    truth = float(np.percentile(values, p, method="inverted_cdf"))
    found = snapshot.percentile(p)
    bucket = bucket_of(int(truth), NS_SHIFT)
    assert bucket_floor(bucket, NS_SHIFT) * 0.999 <= found <= bucket_floor(bucket + 1, NS_SHIFT) * 1.001


def test_one_call_can_record_a_value_many_times() -> None:
    counts = histogram(COUNT_SHIFT)
    counts.record(8, 5)
    counts.record(0)
    assert (counts.snapshot().count, counts.snapshot().total) == (6, 40)
    assert 8 <= counts.percentile(90) < 10


def test_an_empty_histogram_returns_zero() -> None:
    empty = histogram()
    assert (empty.percentile(99), empty.snapshot().mean, empty.snapshot().count) == (0.0, 0.0, 0)


def test_since_returns_the_values_between_two_snapshots() -> None:
    times = histogram()
    times.record(1_000_000, 100)
    before = times.snapshot()
    times.record(9_000_000, 10)
    between = times.snapshot().since(before)
    assert (between.count, between.total) == (10, 90_000_000)
    assert between.percentile(50) > 7_000_000
    times.clear()
    assert times.snapshot().count == 0
