"""The counters of one topic: floors, jumps of the seq, publication."""

from __future__ import annotations

import pytest

from ringlog.errors import InvariantViolation
from ringlog.topic import retention
from ringlog.topic.config import TopicConfig
from ringlog.topic.state import ShardTopic


@pytest.fixture
def topic() -> ShardTopic:
    return ShardTopic(1, 1, "t", TopicConfig())


def test_staged_records_count_only_after_publication(topic):
    """Head, count and bytes change together."""
    topic.next_seq, topic.staged_count, topic.staged_bytes = 4, 3, 30
    assert (topic.head_seq, topic.count, topic.bytes) == (0, 0, 0)
    topic.check()
    topic.publish()
    assert (topic.head_seq, topic.count, topic.bytes) == (3, 3, 30)


def test_skip_to_records_a_lost_range_and_only_moves_forward(topic):
    """The skipped seqs are announced as lost."""
    topic.next_seq = 4
    topic.publish()
    assert topic.skip_to(3) is None
    assert topic.skip_to(9) == (4, 9)
    assert topic.skip_to(9) is None
    assert (topic.next_seq, topic.head_seq, topic.lost) == (10, 9, [(4, 9)])
    topic.check()


def test_a_lost_range_at_the_front_raises_earliest_seq_and_ends_with_the_floor(topic):
    """The range is kept until it is below the eviction floor."""
    topic.skip_to(5)
    assert topic.earliest_seq == 6
    topic.next_seq = 11
    topic.publish()
    assert topic.earliest_seq == 6
    retention.apply_removal(topic, retention.Removal(cap_floor=8))
    assert topic.lost == []
    assert topic.earliest_seq == 8


def test_floors_only_rise(topic):
    """A removal with a lower floor has no effect (X3)."""
    topic.next_seq = 20
    topic.publish()
    retention.apply_removal(topic, retention.Removal(cap_floor=9))
    retention.apply_removal(topic, retention.Removal(cap_floor=5))
    assert topic.evict_floor == 9


@pytest.mark.parametrize(
    "facts", [{"cap_floor": 9}, {"staged_count": -1}, {"head_seq": 5}, {"staged_bytes": -1}, {"ttl_floor": 0}]
)
def test_inconsistent_counters_violate_an_invariant(topic, facts):
    topic.next_seq = 4
    topic.publish()
    for name, value in facts.items():
        setattr(topic, name, value)
    if facts == {"ttl_floor": 0}:
        topic.cap_floor = topic.trim_floor = 0
    with pytest.raises(InvariantViolation, match="out of order"):
        topic.check()
