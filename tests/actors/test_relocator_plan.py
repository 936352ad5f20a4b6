"""Which segments go to the cold tier, and when a failed move is retried."""

from __future__ import annotations

from ringlog.actors.relocator.plan import MoveBackoff, placements, segments_due
from ringlog.envelope.messages import SegmentRef
from ringlog.limits import MOVE_BACKOFF_S_MAX
from ringlog.segment.layout import pack_stem, topic_stem

S = 1_000_000_000


def own(topic: int, first: int, number: int, *, tier: int = 0, size: int = 100) -> SegmentRef:
    return SegmentRef(number, topic_stem(topic, first, number), 1, size, 10, 1, 1, tier, number)


def pack(number: int, *, tier: int = 0, created_us: int = 0, size: int = 100) -> SegmentRef:
    return SegmentRef(number, pack_stem(number), 1, size, 10, 1, 5, tier, created_us or number)


def numbers(refs: list[SegmentRef], hot_segments: int, hot_bytes: int = 0) -> list[int]:
    found = segments_due(placements({0: refs}).values(), hot_segments, hot_bytes)
    return [each.ref.number for each in found]


def test_the_newest_segments_of_a_topic_stay_hot():
    """The setting is `cold.hot_segments`."""
    refs = [own(7, first, number) for number, first in enumerate(range(1, 61, 10), 1)]
    assert numbers(refs, 4) == [1, 2]
    assert numbers(refs, 6) == []
    assert numbers(refs, 0) == [1, 2, 3, 4, 5, 6]


def test_newest_is_decided_by_seq_and_not_by_segment_number():
    """A rewritten segment has a great number and contains old records."""
    assert numbers([own(7, 1, 99), own(7, 11, 2), own(7, 21, 3)], 2) == [99]


def test_the_stricter_limit_of_segments_and_bytes_decides():
    """A limit of 0 bytes does not apply."""
    refs = [own(7, 1, 1, size=500), own(7, 11, 2, size=500), own(7, 21, 3, size=400)]
    assert numbers(refs, 3, 1_000) == [1]
    assert numbers(refs, 1, 1_000) == [1, 2]
    assert numbers(refs, 3, 100) == [1, 2, 3]
    assert numbers(refs, 3, 0) == []


def test_each_topic_and_the_shared_segments_have_their_own_limits():
    refs = [own(7, 1, 1), own(7, 11, 2), own(8, 1, 3), pack(4), pack(5)]
    assert numbers(refs, 1) == [1, 4]


def test_shared_segments_move_by_age():
    assert numbers([pack(900, created_us=1), pack(2, created_us=5)], 1) == [900]


def test_a_segment_that_is_already_cold_is_not_due_and_counts_as_older():
    assert numbers([own(7, 1, 1, tier=2), own(7, 11, 2, tier=1), own(7, 21, 3)], 1) == [2]


def test_a_segment_of_two_shards_is_as_hot_as_the_hotter_shard_reports():
    placed = placements({0: [pack(4, tier=2)], 1: [pack(4, tier=0)]})
    assert (placed[4].shards, placed[4].tier) == ((0, 1), 0)


def patience() -> MoveBackoff:
    return MoveBackoff(5.0, lambda: 0.999999)


def test_a_failed_segment_is_retried_with_exponential_backoff():
    """The backoff starts at 5 s, doubles, and has a maximum. It affects only this segment."""
    waits, now = patience(), 0
    pauses = []
    for _ in range(12):
        waits.record_failure(1, now)
        step = next(s for s in range(1, 10_000) if waits.may_try(1, now + s * S))
        pauses.append(step)
        now += step * S
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == MOVE_BACKOFF_S_MAX
    assert waits.may_try(2, 0), "other segments must not wait"


def test_an_unavailable_store_delays_every_move_until_one_succeeds():
    waits = patience()
    waits.record_store_failure(0)
    assert not waits.may_try(1, 4 * S)
    assert waits.may_try(1, 5 * S)
    waits.record_success(1)
    assert waits.may_try(2, 0)


def test_a_damaged_segment_is_not_tried_again_until_it_is_deleted():
    """`retain_only` forgets the segments that do not exist any more."""
    waits = patience()
    waits.quarantined.add(1)
    assert not waits.may_try(1, 10**15)
    waits.retain_only([2])
    assert waits.may_try(1, 0)
