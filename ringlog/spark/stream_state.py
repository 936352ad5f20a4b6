"""Compare the position of a stream with the state of its topics: new start, pending records, breaks. Pure.

When a start position changes (new topic, recreated topic, removed records), this batch only records the new
start. The records after it follow in the next micro-batch. So the start of every range is in Spark's offset
log before any of its records is read. A batch that Spark repeats after a crash covers the same positions.
This includes the first batch of a query.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ringlog.client.read.pages import Cursor
from ringlog.spark.catalog import TopicState
from ringlog.spark.offsets import TopicCursors
from ringlog.spark.slice_reader import DELETED
from ringlog.topic.tombstone import RECREATED

TopicsNow = Mapping[str, TopicState]


@dataclass(frozen=True, slots=True)
class TopicBreak:
    """A topic whose old positions are no longer valid, because it was deleted or recreated."""

    topic: str
    epoch: int
    seq: int
    """Last processed position."""
    reason: str


@dataclass(frozen=True, slots=True)
class StreamPendingRange:
    """Positions `after` + 1 .. `until` of a topic that are ready to be read."""

    after: int
    until: int

    def __len__(self) -> int:
        return self.until - self.after


@dataclass(slots=True)
class SparkStreamState:
    """`positions`: start positions; `pending`: ranges to read; `breaks`: deleted or recreated topics."""

    positions: TopicCursors = field(default_factory=dict)
    pending: dict[str, StreamPendingRange] = field(default_factory=dict)
    breaks: list[TopicBreak] = field(default_factory=list)


def compare_positions(
    positions: Mapping[str, Cursor],
    now: TopicsNow,
    *,
    subscribed: Collection[str],
    frozen: TopicsNow | None = None,
) -> SparkStreamState:
    """Compare the `positions` of a stream with its topics.

    Args:
        positions: last processed position of each topic.
        now: the topics of `subscribed` that exist.
        subscribed: topics that the query subscribes to. A subscribed topic that does not exist is a break. A
            topic that is no longer subscribed is dropped without a report.
        frozen: the topics at the start of an availableNow run. Later positions, epochs and topics are
            ignored.

    Returns:
        What the stream has to read, and the breaks of its topics.
    """
    found = SparkStreamState()
    for topic in sorted({*positions, *now}):
        at, cursor = now.get(topic), positions.get(topic)
        if at is None:
            if cursor is not None and topic in subscribed:
                found.breaks.append(TopicBreak(topic, cursor.epoch, cursor.seq, DELETED))
            continue
        limit = at if frozen is None else frozen.get(topic)
        if limit is None or limit.epoch != at.epoch:
            if cursor is not None:
                # The epoch is newer than the frozen one: left to the next run.
                found.positions[topic] = cursor
            continue
        _compare_topic(found, topic, cursor, at, min(at.head, limit.head))
    return found


def _compare_topic(
    found: SparkStreamState, topic: str, cursor: Cursor | None, at: TopicState, head: int
) -> None:
    if cursor is not None and (cursor.epoch != at.epoch or cursor.seq > at.head):
        # A head below the stream's position also means another life, even under the same epoch.
        found.breaks.append(TopicBreak(topic, cursor.epoch, cursor.seq, RECREATED))
        cursor = None
    if cursor is None:
        cursor = Cursor(at.epoch, at.earliest - 1)
    after = max(cursor.seq, min(at.earliest - 1, head))
    if after >= head > cursor.seq:
        cursor = Cursor(at.epoch, head)  # All pending records are removed; gap checks report them.
    found.positions[topic] = cursor
    if after < head:
        found.pending[topic] = StreamPendingRange(after, head)


def advance(positions: Mapping[str, Cursor], until: Mapping[str, int]) -> TopicCursors:
    """Return the positions with some of them moved forward to `until`. No position moves back."""
    return {
        topic: Cursor(cursor.epoch, max(cursor.seq, until.get(topic, 0)))
        for topic, cursor in positions.items()
    }
