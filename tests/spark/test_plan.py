"""Planning of partitions from stored ranges: pure functions, tested with tables and properties."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.spark.plan import COLD, HOT, WAL, Bounds, StoredRange, plan_slices


def bounds(topic, after, until):
    return Bounds(topic, len(topic), 1, after, until)


def stretches(sizes, tier=HOT, first=1, records=10):
    return [
        StoredRange(first + records * i, first + records * (i + 1) - 1, size, records, tier)
        for i, size in enumerate(sizes)
    ]


def sealed(sizes, tier=HOT, topic="t"):
    found = stretches(sizes, tier)
    return bounds(topic, 0, found[-1].last_seq), found


def ranges(partitions):
    return [
        [(each.bounds.topic, each.bounds.after, each.bounds.until) for each in part] for part in partitions
    ]


def test_an_empty_range_has_no_partition():
    assert plan_slices([], max_bytes=100) == []
    assert plan_slices([(bounds("t", 5, 5), [])], max_bytes=100) == []


def test_adjacent_frames_are_packed_and_never_split():
    """A frame larger than the target gets its own partition."""
    found = plan_slices([sealed([40, 40, 40, 200, 10])], max_bytes=100)
    assert ranges(found) == [[("t", 0, 20)], [("t", 20, 30)], [("t", 30, 40)], [("t", 40, 50)]]
    assert [sum(each.bytes for each in part) for part in found] == [80, 40, 200, 10]


def test_min_partitions_makes_partitions_smaller():
    found = plan_slices([sealed([10] * 8)], max_bytes=1000, min_partitions=4)
    assert [part[0].bytes for part in found] == [20, 20, 20, 20]


def test_small_topics_share_a_partition():
    found = plan_slices(
        [sealed([10], topic="t"), sealed([10], topic="uu"), sealed([90], topic="vvv")], max_bytes=100
    )
    assert ranges(found) == [[("t", 0, 10), ("uu", 0, 10)], [("vvv", 0, 10)]]


def test_records_in_the_log_are_split_by_seq():
    found = plan_slices([(bounds("t", 0, 100), [StoredRange(1, 100, 400, 100, WAL)])], max_bytes=100)
    assert ranges(found) == [[("t", 0, 25)], [("t", 25, 50)], [("t", 50, 75)], [("t", 75, 100)]]


def test_one_record_is_not_split():
    found = plan_slices([(bounds("t", 0, 1), [StoredRange(1, 1, 400, 1, WAL)])], max_bytes=100)
    assert ranges(found) == [[("t", 0, 1)]]


@pytest.mark.parametrize(
    ("cold", "hot", "expected"),
    [
        ([60, 60], [10], [{COLD}, {COLD}, {HOT}]),
        ([10], [60, 60], [{COLD}, {HOT}, {HOT}]),
        ([10], [10], [{COLD, HOT}]),
        ([40], [40], [{COLD, HOT}]),
    ],
)
def test_cold_and_hot_share_a_partition_only_when_both_are_small(cold, hot, expected):
    """They share one only if neither part reaches the target size alone."""
    first = stretches(cold, COLD)
    second = stretches(hot, HOT, first=first[-1].last_seq + 1)
    found = plan_slices([(bounds("t", 0, second[-1].last_seq), first + second)], max_bytes=100)
    assert [{each.tier for each in part} for part in found] == expected


def test_adjacent_ranges_become_one_slice_and_slices_pickle_small():
    (part,) = plan_slices([sealed([1] * 1000)], max_bytes=10_000)
    assert len(part) == 1
    assert len(pickle.dumps(part)) < 300
    assert pickle.loads(pickle.dumps(part)) == part


def test_ranges_that_are_not_adjacent_stay_separate():
    """With tags, frames between selected ones are skipped, and a slice must not cover them."""
    found = plan_slices(
        [(bounds("t", 0, 30), [stretches([1, 1, 1])[0], stretches([1, 1, 1])[2]])], max_bytes=100
    )
    assert ranges(found) == [[("t", 0, 10), ("t", 20, 30)]]


topic_parts = st.lists(st.tuples(st.integers(1, 500), st.sampled_from([HOT, COLD])), min_size=1, max_size=30)


@given(st.lists(topic_parts, min_size=1, max_size=4), st.integers(1, 600), st.integers(1, 20), st.booleans())
def test_every_position_is_in_exactly_one_slice(topics, max_bytes, min_partitions, with_log):
    """No partition exceeds the target unless it is one frame, whatever the sizes."""
    listed = []
    for number, parts in enumerate(topics):
        found = [StoredRange(10 * i + 1, 10 * i + 10, size, 10, tier) for i, (size, tier) in enumerate(parts)]
        if with_log:
            last = found[-1].last_seq
            found.append(StoredRange(last + 1, last + 57, 57 * 7, 57, WAL))
        listed.append((bounds("t" * (number + 1), 0, found[-1].last_seq), found))
    found = plan_slices(listed, max_bytes=max_bytes, min_partitions=min_partitions)
    total = sum(each.bytes for _, parts in listed for each in parts)
    target = max(min(max_bytes, -(-total // min_partitions)), 1)
    edges = {own.topic: 0 for own, _ in listed}
    for part in found:
        size = sum(each.bytes for each in part)
        assert size <= target or sum(each.bounds.until - each.bounds.after for each in part) <= 57
        cold = sum(each.bytes for each in part if each.tier == COLD)
        assert not cold or cold == size or size <= target
        for each in part:
            assert each.bounds.after == edges[each.bounds.topic] < each.bounds.until
            edges[each.bounds.topic] = each.bounds.until
    assert edges == {own.topic: own.until for own, _ in listed}
    assert sum(each.bytes for part in found for each in part) == total
