"""Where a stream stands against where its topics stand: what moves on, what waits, what was lost. Pure.

A place only ever *jumps* to where reading begins; the records behind it come with the next micro-batch. So
the start of every range is in Spark's offset log before anything of it is read, and a batch that a crash made
Spark repeat covers the very same positions (SP-8), the first batch of a query too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ringlog.client.read.pages import Cursor
from ringlog.spark.catalog import TopicAt
from ringlog.spark.offsets import TopicCursors
from ringlog.spark.slice_reader import DELETED
from ringlog.topic.tombstone import RECREATED

TopicsNow = Mapping[str, TopicAt]


@dataclass(frozen=True, slots=True)
class TopicBreak:
    """A topic whose positions mean nothing any more: it was deleted, or is another one now."""

    topic: str
    epoch: int
    seq: int
    """Last position that was dealt with."""
    reason: str


@dataclass(frozen=True, slots=True)
class StreamPendingRange:
    """Positions `after` + 1 .. `until` of a topic that are there to be read."""

    after: int
    until: int

    def __len__(self) -> int:
        return self.until - self.after


@dataclass(slots=True)
class SparkStreamState:
    """`places` to go on from, what is `waiting` behind them, and the topics that broke off."""

    places: TopicCursors = field(default_factory=dict)
    waiting: dict[str, StreamPendingRange] = field(default_factory=dict)
    breaks: list[TopicBreak] = field(default_factory=list)


def compare_positions(
    places: Mapping[str, Cursor],
    now: TopicsNow,
    *,
    subscribed: Collection[str],
    frozen: TopicsNow | None = None,
) -> SparkStreamState:
    """How a stream that stands at `places` stands against its topics.

    `now` holds those of `subscribed` that exist. A topic that is subscribed to and gone broke off; one that
    is not subscribed to any more is dropped without a word. Nothing beyond `frozen` is seen: neither
    positions above its heads nor lives and topics that began since.
    """
    found = SparkStreamState()
    for topic in sorted({*places, *now}):
        at, place = now.get(topic), places.get(topic)
        if at is None:
            if place is not None and topic in subscribed:
                found.breaks.append(TopicBreak(topic, place.epoch, place.seq, DELETED))
            continue
        limit = at if frozen is None else frozen.get(topic)
        if limit is None or limit.epoch != at.epoch:
            if place is not None:
                found.places[topic] = place  # Another life than the frozen one: for the next run.
            continue
        _compare_topic(found, topic, place, at, min(at.head, limit.head))
    return found


def _compare_topic(found: SparkStreamState, topic: str, place: Cursor | None, at: TopicAt, head: int) -> None:
    if place is not None and (place.epoch != at.epoch or place.seq > at.head):
        # A head below the place is another life too, whatever its epoch (E-11).
        found.breaks.append(TopicBreak(topic, place.epoch, place.seq, RECREATED))
        place = None
    if place is None:
        place = Cursor(at.epoch, at.earliest - 1)
    after = max(place.seq, min(at.earliest - 1, head))
    if after >= head > place.seq:
        place = Cursor(at.epoch, head)  # All of it has gone: nothing to share out, but to be looked into.
    found.places[topic] = place
    if after < head:
        found.waiting[topic] = StreamPendingRange(after, head)


def advance(places: Mapping[str, Cursor], until: Mapping[str, int]) -> TopicCursors:
    """The places with some of them moved on to `until`; none goes back."""
    return {
        topic: Cursor(place.epoch, max(place.seq, until.get(topic, 0))) for topic, place in places.items()
    }
