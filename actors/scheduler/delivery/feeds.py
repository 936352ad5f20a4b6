"""State of a scheduler: links, subscriptions and feeds; followed topics and shards."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.scheduler.delivery.ready_set import ReadySet
from ringlog.governor import shed_bands
from ringlog.limits import HINTS_PER_TOPIC
from ringlog.topic.priority import TopicPriority

ROUTERS = b"\0routers"
"""Link id of the routers in this process. No socket peer can have it: peer ids that begin with a zero byte
do not continue with letters."""


class FeedGrantState(IntEnum):
    """State of a feed with respect to grants."""

    IDLE = 0
    """Its reader has a grant for every record, or received a recheck grant."""
    READY = 1
    """It waits for a grant in its subscription's ready set."""
    GRANTED = 2
    """It has a grant that the link has not returned."""


class SchedulerReadHint(NamedTuple):
    """Place of a range of records: seqs `first_seq` to `last_seq`, bytes `offset` to `stop` of a file.

    `file_id` 0 means that the place is unknown.
    """

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


NO_HINT = SchedulerReadHint(0, 0, 0, 0, 0)


class SchedulerTopic:
    """One followed topic. `readable_until` is the last seq that its readers may read.

    For eventual subscriptions that is the last published seq, for strong ones the last durable seq. A topic
    with subscriptions of both kinds has two objects.
    """

    __slots__ = (
        "epoch",
        "feeds",
        "hints",
        "idle",
        "is_lost",
        "is_strong",
        "offered_ns",
        "offered_until",
        "priority",
        "readable_until",
        "seen_ms",
        "shard",
        "slot",
        "topic_id",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, shard: int, slot: int, topic_id: int, *, is_strong: bool, priority: TopicPriority
    ) -> None:
        self.shard: int = shard
        self.slot: int = slot
        self.topic_id: int = topic_id
        self.is_strong: bool = is_strong
        self.priority: TopicPriority = priority
        """Priority of the topic, shared by the eventual and the strong object."""
        self.epoch: int = 0
        """0 = no published state was read yet."""
        self.readable_until: int = 0
        self.offered_ns: int = 0
        self.offered_until: int = 0
        """When, in ns, and up to which seq the readers were last woken up. Set only under pressure."""
        self.seen_ms: int = 0
        """When its slot was last read or scheduled to be read, in ms."""
        self.is_lost: bool = False
        """Its slot no longer contains this topic. All its feeds got or get a recheck grant."""
        self.hints: deque[SchedulerReadHint] = deque(maxlen=HINTS_PER_TOPIC)
        self.feeds: dict[SchedulerFeed, None] = {}
        self.idle: dict[SchedulerFeed, None] = {}
        self.waiting: dict[SchedulerFeed, None] = {}

    def find_hint(self, after: int) -> SchedulerReadHint:
        """Return the place of the records after seq `after`, or NO_HINT."""
        for hint in self.hints:
            if hint.first_seq == after + 1:
                return hint
        return NO_HINT


class SchedulerFeed:
    """One topic of one subscription, with the position `after` of its reader."""

    __slots__ = (
        "after",
        "behind_since_ms",
        "catch_up_ms",
        "catch_up_seq",
        "lagging_since_ms",
        "needs_recheck",
        "number",
        "state",
        "subscription",
        "topic",
    )  # fmt: skip

    def __init__(
        self, subscription: SchedulerSubscription, number: int, topic: SchedulerTopic, after: int
    ) -> None:
        self.subscription: SchedulerSubscription = subscription
        self.number: int = number
        self.topic: SchedulerTopic = topic
        self.after: int = after
        self.state: FeedGrantState = FeedGrantState.IDLE
        self.lagging_since_ms: int = 0
        """When the feed began to lag, for the grant that it waits for or has."""
        self.needs_recheck: bool = False
        """The topic was deleted, recreated or given up: a recheck grant is due at any position."""
        self.behind_since_ms: int = -1
        """Start of the current backlog, over several grants; -1 = none when the current grant was given."""
        self.catch_up_seq: int = 0
        self.catch_up_ms: int = 0
        """End of the topic and time at that moment. At this seq the reader's backlog is no older than
        this."""

    def record_still_behind(self, now_ms: int) -> None:
        """Update the start of the backlog after a returned grant if the feed is still lagging."""
        if self.behind_since_ms < 0:
            self.behind_since_ms = self.lagging_since_ms
        elif self.after < self.catch_up_seq:
            return
        else:
            self.behind_since_ms = self.catch_up_ms
        self.catch_up_seq, self.catch_up_ms = self.topic.readable_until, now_ms

    @property
    def since_ms(self) -> int:
        """When the reader's backlog began, in ms. Valid only while the feed has a grant or waits."""
        return self.lagging_since_ms if self.behind_since_ms < 0 else self.behind_since_ms

    @property
    def is_lagging(self) -> bool:
        """Whether the topic has records that the reader has no grant for, or a recheck grant is due."""
        return self.needs_recheck or (self.after < self.topic.readable_until and not self.topic.is_lost)


class SchedulerSubscription:
    """Feeds that share one ready set and one credit."""

    __slots__ = ("credit", "feeds", "free", "is_strong", "link", "names", "number", "ready")

    def __init__(self, link: Link, number: int, credit: int, *, is_strong: bool) -> None:
        self.link: Link = link
        self.number: int = number
        self.credit: int = credit
        self.is_strong: bool = is_strong
        self.free: int = credit
        """Credit left. It is negative if the client lowered the credit below the outstanding grants."""
        self.names: bool = False
        self.feeds: dict[int, SchedulerFeed] = {}
        self.ready: ReadySet[SchedulerFeed] | None = None
        """None while no feed waits, which saves the memory of idle subscriptions."""


class Link:
    """One connection with subscriptions."""

    __slots__ = (
        "granted_feeds",
        "granted_rows",
        "id",
        "is_blocked",
        "last_heard_ms",
        "names",
        "sheds_below",
        "subscriptions",
        "waiting",
    )  # fmt: skip

    def __init__(self, id: bytes) -> None:
        self.id: bytes = id
        self.sheds_below: int = shed_bands(is_router=id == ROUTERS)
        """While the governor sheds, bands below this one get no grants."""
        self.last_heard_ms: int = 0
        self.subscriptions: dict[int, SchedulerSubscription] = {}
        self.is_blocked: bool = False
        """The last message could not be delivered. Retried at the next aging tick."""
        self.names: int = 0
        """Number of subscriptions that are notified of created and deleted topics."""
        self.waiting: dict[SchedulerSubscription, None] = {}
        """Subscriptions with a feed in the ready set."""
        self.granted_rows: list[int] = []
        self.granted_feeds: list[SchedulerFeed] = []
        """Grants that are given and not sent yet."""


class FollowedShard:
    """State of one shard: its followed topics and their slots."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.topics: dict[tuple[int, int], SchedulerTopic] = {}
        """By (slot, topic id): topics of eventual subscriptions, read up to the published mark."""
        self.strong_topics: dict[tuple[int, int], SchedulerTopic] = {}
        """By (slot, topic id): topics of strong subscriptions, read up to the durable mark."""
        self.slots: dict[int, int] = {}
        """Number of followed topics by slot. It exceeds 1 for both kinds, or for an old and a new topic."""
        self.is_watched: NDArray[np.bool_] = np.zeros(64, dtype=bool)
        """Whether a slot has followed topics, as an array that filters many rows at once."""
        self.awaiting_durable: deque[tuple[int, int, SchedulerTopic, int, SchedulerReadHint]] = deque()
        """(file_id, stop, topic, epoch, hint) of published ranges that may not be durable, in log order."""
        self.durable: tuple[int, int] = (0, 0)
        self.gap_ns = 0
        """Least time between two wake-ups of one topic, in ns; 0 = no pressure."""
        self.is_given_up = False
        """The shard failed permanently. Feeds of its topics receive recheck grants."""
        self.slots_to_read: dict[SchedulerTopic, None] = {}
        """Topics whose slots must be read again."""

    def follow_topic(self, topic: SchedulerTopic) -> None:
        """Add a topic to the followed ones."""
        (self.strong_topics if topic.is_strong else self.topics)[topic.slot, topic.topic_id] = topic
        self.slots[topic.slot] = self.slots.get(topic.slot, 0) + 1
        if topic.slot >= len(self.is_watched):
            grown = np.zeros(max(2 * len(self.is_watched), topic.slot + 1), dtype=bool)
            grown[: len(self.is_watched)] = self.is_watched
            self.is_watched = grown
        self.is_watched[topic.slot] = True

    def unfollow_topic(self, topic: SchedulerTopic) -> None:
        """Remove a topic whose last feed has ended."""
        del (self.strong_topics if topic.is_strong else self.topics)[topic.slot, topic.topic_id]
        self.slots_to_read.pop(topic, None)
        remaining = self.slots[topic.slot] - 1
        if remaining:
            self.slots[topic.slot] = remaining
        else:
            del self.slots[topic.slot]
            self.is_watched[topic.slot] = False
        if not self.strong_topics:
            self.awaiting_durable.clear()

    @property
    def is_followed(self) -> bool:
        """Whether any topic of the shard is followed."""
        return bool(self.slots)
