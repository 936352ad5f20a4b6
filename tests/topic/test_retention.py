"""Decisions of retention and deletes over records in plain arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.tags import TagMatch
from ringlog.topic.config import TopicConfig
from ringlog.topic.retention import (
    Removal,
    RetentionState,
    advance_delete_floor,
    apply_removal,
    attribute_to_files,
    decide_delete,
    exceeds_cap,
    first_live_seq,
    retain,
    retention_state,
)
from ringlog.topic.state import ShardTopic


class Plain:
    """The stored records in arrays: seq, size, stamp and own expiry of each."""

    def __init__(self, sizes: list[int], stamps: list[int] | None = None, expires: list[int] | None = None):
        self.seqs = np.arange(1, len(sizes) + 1, dtype=np.uint64)
        self.sizes = np.array(sizes, dtype=np.int64)
        self.stamps = np.array(stamps or [0] * len(sizes), dtype=np.int64)
        self.own = np.array(expires or [0] * len(sizes), dtype=np.int64)
        self.looked_at = 0

    def positions(self, first, last):
        rows = slice(max(first - 1, 0), max(last, 0))
        self.looked_at += len(self.seqs[rows])
        return self.seqs[rows], self.sizes[rows], self.stamps[rows]

    def totals(self, first, last):
        _, sizes, _ = self.positions(first, last)
        return len(sizes), int(sizes.sum())

    def sizes_of(self, seqs):
        return seqs, self.sizes[seqs.astype(np.int64) - 1]

    def seek_time(self, ts_us):
        return int(np.searchsorted(self.stamps, ts_us)) + 1

    def tagged(self, match, below):
        return BitMap64(seq for seq in range(1, below) if seq % 2)

    def expired(self, now_us):
        return BitMap64(self.seqs[(self.own > 0) & (self.own <= now_us)].tolist())

    def next_expiry(self, now_us):
        return min(self.own[self.own > now_us].tolist(), default=0)


def standing_of(stored: Plain, dead: set[int] = frozenset(), front: int = 1, **config: int) -> RetentionState:
    live = [seq for seq in range(front, len(stored.seqs) + 1) if seq not in dead]
    own = [int(each) for each in stored.own if each]
    caps = [config.get(name, 0) for name in ("cap_records", "cap_bytes", "ttl_us")]
    size = sum(int(stored.sizes[seq - 1]) for seq in live)
    return RetentionState(
        front, len(stored.seqs) + 1, len(live), size, BitMap64(dead), *caps, min(own, default=0)
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=60),
    st.integers(0, 30),
    st.integers(0, 100),
)
def test_caps_evict_the_lowest_live_records_until_both_are_met(rows, cap_records, cap_bytes):
    """The bytes of dead records do not count."""
    stored = Plain([size for size, _ in rows])
    dead = {seq for seq, (_, is_dead) in enumerate(rows, 1) if is_dead and seq > 1}
    found = retain(standing_of(stored, dead, cap_records=cap_records, cap_bytes=cap_bytes), stored, 0)
    live = [seq for seq in range(1, len(rows) + 1) if seq not in dead]
    gone = []
    while live and (
        (cap_records and len(live) > cap_records)
        or (cap_bytes and sum(rows[seq - 1][0] for seq in live) > cap_bytes)
    ):
        gone.append(live.pop(0))
    assert found.cap_floor == (gone[-1] + 1 if gone else 0)
    assert (found.records, found.bytes) == (len(gone), sum(rows[seq - 1][0] for seq in gone))
    assert (found.floor_records, found.floor_bytes) == (found.records, found.bytes)
    assert found.is_empty == (not gone)


def test_a_cap_reads_only_the_records_near_the_evicted_ones():
    stored = Plain([1] * 1_000_000)
    found = retain(standing_of(stored, cap_records=999_990), stored, 0)
    assert (found.cap_floor, found.records) == (11, 10)
    assert stored.looked_at <= 2_048


def test_a_record_is_due_one_microsecond_after_its_ttl():
    """A record whose age equals the TTL is still live."""
    stored = Plain([1, 1, 1], [100, 100, 200])
    assert retain(standing_of(stored, ttl_us=50), stored, 150).due_us == 151
    found = retain(standing_of(stored, ttl_us=50), stored, 151)
    assert (found.ttl_floor, found.records, found.due_us) == (3, 2, 251)
    found = retain(standing_of(stored, ttl_us=50), stored, 10_000)
    assert (found.ttl_floor, found.records, found.due_us) == (4, 3, 0)


def test_ttl_is_applied_before_a_cap_and_both_set_floors():
    """Records that the TTL removes do not count for the cap."""
    stored = Plain([1] * 8, [0, 0, 100, 100, 100, 100, 100, 100])
    found = retain(standing_of(stored, ttl_us=50, cap_records=4), stored, 100)
    assert (found.ttl_floor, found.cap_floor, found.records, found.due_us) == (3, 5, 4, 151)


def test_records_with_their_own_expiry_below_a_cap_floor_count_once():
    """They are removed by the cap's floor."""
    stored = Plain([1, 2, 4, 8, 16], expires=[0, 10, 0, 10, 0])
    found = retain(standing_of(stored, cap_records=1), stored, 10)
    assert (found.cap_floor, found.seqs.to_array().tolist()) == (4, [4])
    assert (found.records, found.bytes) == (4, 15)
    assert (found.floor_records, found.floor_bytes) == (3, 7)


def test_retention_depends_on_the_time_and_not_on_the_number_of_runs():
    """A record that expired earlier belongs to the prefix when the prefix reaches it."""
    stored = Plain([1, 1, 1], expires=[20, 10, 0])
    at_once = retain(standing_of(stored), stored, 20)
    first = retain(standing_of(stored), stored, 10)
    assert (first.ttl_floor, first.seqs.to_array().tolist(), first.due_us) == (0, [2], 20)
    then = retain(standing_of(stored, dead={2}), stored, 20)
    assert at_once.ttl_floor == then.ttl_floor == 3


def test_a_delete_of_all_records_reads_no_record():
    """The counters of the topic are sufficient."""
    stored = Plain([7] * 100)
    found = decide_delete(standing_of(stored), stored, 1 << 60, None, None)
    assert (found.delete_floor, found.records, found.bytes, stored.looked_at) == (101, 100, 700, 0)


def test_a_delete_selects_live_records_below_its_bound():
    """The bound, the tag filter and the list of seqs each select only live records."""
    stored = Plain([1, 2, 4, 8, 16, 32])
    held = standing_of(stored, dead={3}, front=2)
    assert decide_delete(held, stored, 5, None, None).records == 2
    found = decide_delete(held, stored, 6, TagMatch(b"odd", False), None)
    assert (found.seqs.to_array().tolist(), found.records, found.bytes) == ([5], 1, 16)
    found = decide_delete(held, stored, 0, None, BitMap64([1, 2, 3, 6, 7, 99]))
    assert (found.seqs.to_array().tolist(), found.bytes) == ([2, 6], 34)
    found = decide_delete(held, stored, 2, None, None)
    assert found.is_empty
    assert not found.seqs


def test_a_removal_is_attributed_to_volatile_files():
    """Each volatile file is evicted as a whole later, and its removed records must not be counted twice."""
    stored = Plain([1, 2, 4, 8, 16, 32])
    held = standing_of(stored, dead={2})
    removal = Removal(cap_floor=4, seqs=BitMap64([6]), records=3, bytes=37)
    attribute_to_files(held, stored, removal, [(70, 3), (71, 5), (72, 7)])
    assert removal.shares == [(70, 1, 1), (71, 1, 4), (72, 1, 32)]


def topic_of(**facts: object) -> ShardTopic:
    topic = ShardTopic(1, 1, "t", TopicConfig(cap_records=3))
    topic.next_seq, topic.head_seq = 11, 10
    for name, value in facts.items():
        setattr(topic, name, value)
    return topic


def test_the_delete_floor_passes_dead_seqs_and_lost_ranges_at_the_front():
    """The eviction floor does not move (X5)."""
    topic = topic_of(dead=BitMap64([1, 2, 5, 6, 9]), lost=[(3, 4)])
    advance_delete_floor(topic)
    assert (topic.delete_floor, topic.dead.to_array().tolist(), first_live_seq(topic)) == (7, [9], 7)
    assert topic.evict_floor == 1


def test_dead_seqs_below_a_floor_are_dropped():
    topic = topic_of(dead=BitMap64([2, 3]), staged_count=8, staged_bytes=80)
    apply_removal(topic, Removal(cap_floor=6, records=3, bytes=30))
    assert (topic.dead, topic.cap_floor, topic.staged_count, topic.staged_bytes) == (None, 6, 5, 50)
    apply_removal(topic, Removal(cap_floor=2))
    assert topic.cap_floor == 6, "floors only rise"


def test_only_a_topic_with_discard_old_exceeds_its_cap():
    """A topic with discard=reject refuses writes instead."""
    topic = topic_of(staged_count=4)
    assert exceeds_cap(topic, topic.config)
    assert not exceeds_cap(topic, TopicConfig(cap_records=3, discard="reject"))
    assert not exceeds_cap(topic, TopicConfig(cap_records=4))
    assert exceeds_cap(topic_of(staged_bytes=4), TopicConfig(cap_bytes=3))
    assert retention_state(topic).cap_records == 3
