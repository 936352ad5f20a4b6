"""What a scheduler knows: links, their subscriptions, the feeds of those; topics, and who follows them."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.scheduler.delivery.ready_set import ReadySet
from ringlog.governor import shed_bands
from ringlog.limits import HINTS_PER_TOPIC
from ringlog.topic.priority import TopicPriority

ROUTERS = b"\0routers"
"""The link of the routers that run in this process: no peer of a socket has a name that begins with a zero
byte and goes on with letters."""


class FeedGrantState(IntEnum):
    """Of a feed."""

    IDLE = 0
    """Its reader has everything, or was told of all there is to find out."""
    READY = 1
    """It waits for a turn in its subscription's ready set."""
    GRANTED = 2
    """It has a turn that was not given back."""


class SchedulerReadHint(NamedTuple):
    """Where a stretch of records lies."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


NO_HINT = SchedulerReadHint(0, 0, 0, 0, 0)


class SchedulerTopic:
    """One topic that somebody follows: the eventual kind by what is published, the strong one by what is
    durable. `until` is how far its readers may read."""

    __slots__ = (
        "epoch",
        "feeds",
        "hints",
        "idle",
        "is_lost",
        "is_strong",
        "offered_ns",
        "offered_until",
        "readable_until",
        "seen_ms",
        "shard",
        "slot",
        "standing",
        "topic_id",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, shard: int, slot: int, topic_id: int, *, is_strong: bool, standing: TopicPriority
    ) -> None:
        self.shard, self.slot, self.topic_id, self.is_strong = shard, slot, topic_id, is_strong
        self.standing = standing
        """Shared by both kinds."""
        self.epoch = 0
        """0: nothing was seen of it yet."""
        self.readable_until = 0
        self.offered_ns = self.offered_until = 0
        """Under pressure: when its readers were last offered a turn for what is new, and how far."""
        self.seen_ms = 0
        """When its slot was last looked at."""
        self.is_lost = False
        """Its slot says something else. Everybody was, or is being, told to find out."""
        self.hints: deque[SchedulerReadHint] = deque(maxlen=HINTS_PER_TOPIC)
        self.feeds: dict[SchedulerFeed, None] = {}
        self.idle: dict[SchedulerFeed, None] = {}
        self.waiting: dict[SchedulerFeed, None] = {}

    def find_hint(self, after: int) -> SchedulerReadHint:
        """Where what follows `after` lies, if that is known."""
        for hint in self.hints:
            if hint.first_seq == after + 1:
                return hint
        return NO_HINT


class SchedulerFeed:
    """One topic of one subscription."""

    __slots__ = (
        "after",
        "behind_since_ms",
        "catch_up_ms",
        "catch_up_seq",
        "is_alarmed",
        "lagging_since_ms",
        "number",
        "state",
        "subscription",
        "topic",
    )  # fmt: skip

    def __init__(
        self, subscription: SchedulerSubscription, number: int, topic: SchedulerTopic, after: int
    ) -> None:
        self.subscription, self.number, self.topic = subscription, number, topic
        self.after = after
        self.state = FeedGrantState.IDLE
        self.lagging_since_ms = 0
        """Since when it has wanted the turn that it waits for or has."""
        self.is_alarmed = False
        """Its topic is not what it was: a turn is due whatever its position."""
        self.behind_since_ms = -1
        """Since when there has been something that its reader does not have, over several turns; -1: it had
        everything when it was given the turn that it has."""
        self.catch_up_seq = self.catch_up_ms = 0
        """How far its topic reached then: once its reader is there, what it lacks is no older than that."""

    def record_still_behind(self, now_ms: int) -> None:
        """It gave a turn back, and there is more."""
        if self.behind_since_ms < 0:
            self.behind_since_ms = self.lagging_since_ms
        elif self.after < self.catch_up_seq:
            return
        else:
            self.behind_since_ms = self.catch_up_ms
        self.catch_up_seq, self.catch_up_ms = self.topic.readable_until, now_ms

    @property
    def since_ms(self) -> int:
        """Since when its reader has lacked something, of one that has a turn or waits."""
        return self.lagging_since_ms if self.behind_since_ms < 0 else self.behind_since_ms

    @property
    def is_lagging(self) -> bool:
        """There is something its reader does not have yet (SCH-1)."""
        return self.is_alarmed or (self.after < self.topic.readable_until and not self.topic.is_lost)


class SchedulerSubscription:
    """Feeds that share a ready set and a credit."""

    __slots__ = ("credit", "feeds", "free", "is_strong", "link", "names", "number", "ready")

    def __init__(self, link: Link, number: int, credit: int, *, is_strong: bool) -> None:
        self.link, self.number, self.credit, self.is_strong = link, number, credit, is_strong
        self.free = credit
        """Credit left. Below zero after a credit was lowered."""
        self.names = False
        self.feeds: dict[int, SchedulerFeed] = {}
        self.ready: ReadySet[SchedulerFeed] | None = None
        """None while nobody waits, so that who waits for nothing costs nothing."""


class Link:
    """A connection that subscribed to something."""

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
        self.id = id
        self.sheds_below = shed_bands(is_router=id == ROUTERS)
        """While the governor sheds, bands below this one get no credit."""
        self.last_heard_ms = 0
        self.subscriptions: dict[int, SchedulerSubscription] = {}
        self.is_blocked = False
        """It took nothing the last time. Tried again at the next tick."""
        self.names = 0
        """Subscriptions that want to hear of changed names."""
        self.waiting: dict[SchedulerSubscription, None] = {}
        """Subscriptions with somebody in the ready set."""
        self.granted_rows: list[int] = []
        self.granted_feeds: list[SchedulerFeed] = []
        """Turns given and not said yet."""


class FollowedShard:
    """What is followed of one shard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.topics: dict[tuple[int, int], SchedulerTopic] = {}
        """By slot and topic id: those that go by what is published."""
        self.strong_topics: dict[tuple[int, int], SchedulerTopic] = {}
        self.slots: dict[int, int] = {}
        """How many topics of ours a slot has had that are still followed; two while one follows the other."""
        self.is_watched: NDArray[np.bool_] = np.zeros(64, dtype=bool)
        """The same by slot, to sift many rows at once."""
        self.awaiting_durable: deque[tuple[int, int, SchedulerTopic, int, SchedulerReadHint]] = deque()
        """(file_id, stop, topic, epoch, what): published, and not known to be durable yet; in order."""
        self.durable: tuple[int, int] = (0, 0)
        self.gap_ns = 0
        """Least time between two wake-ups of one of its topics; 0 = no pressure (G-3)."""
        self.is_given_up = False
        """It says nothing any more: those who follow its topics are told to find that out."""
        self.to_look: dict[SchedulerTopic, None] = {}
        """Topics whose slots are to be read again."""

    def follow_topic(self, topic: SchedulerTopic) -> None:
        """Take a topic in."""
        (self.strong_topics if topic.is_strong else self.topics)[topic.slot, topic.topic_id] = topic
        self.slots[topic.slot] = self.slots.get(topic.slot, 0) + 1
        if topic.slot >= len(self.is_watched):
            grown = np.zeros(max(2 * len(self.is_watched), topic.slot + 1), dtype=bool)
            grown[: len(self.is_watched)] = self.is_watched
            self.is_watched = grown
        self.is_watched[topic.slot] = True

    def unfollow_topic(self, topic: SchedulerTopic) -> None:
        """Nobody follows it any more."""
        del (self.strong_topics if topic.is_strong else self.topics)[topic.slot, topic.topic_id]
        self.to_look.pop(topic, None)
        left = self.slots[topic.slot] - 1
        if left:
            self.slots[topic.slot] = left
        else:
            del self.slots[topic.slot]
            self.is_watched[topic.slot] = False
        if not self.strong_topics:
            self.awaiting_durable.clear()

    @property
    def is_followed(self) -> bool:
        """Somebody wants to know of it."""
        return bool(self.slots)
