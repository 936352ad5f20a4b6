"""What a scheduler knows: links, their subscriptions, the feeds of those; topics, and who follows them."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.scheduler.ready import ReadySet
from ringlog.governor import shed_bands
from ringlog.limits import HINTS_PER_TOPIC
from ringlog.topic.priority import Standing

ROUTERS = b"\0routers"
"""The link of the routers that run in this process: no peer of a socket has a name that begins with a zero
byte and goes on with letters."""


class State(IntEnum):
    """Of a feed."""

    IDLE = 0
    """Its reader has everything, or was told of all there is to find out."""
    READY = 1
    """It waits for a turn in its subscription's ready set."""
    TOLD = 2
    """It has a turn that was not given back."""


class Hint(NamedTuple):
    """Where a stretch of records lies."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


NO_HINT = Hint(0, 0, 0, 0, 0)


class Topic:
    """One topic that somebody follows: the eventual kind by what is published, the strong one by what is
    durable. `until` is how far its readers may read."""

    __slots__ = (
        "epoch", "feeds", "hints", "idle", "is_lost", "is_strong", "offered_ns", "offered_until", "seen_ms",
        "shard", "slot", "standing", "topic_id", "until", "waiting",
    )  # fmt: skip

    def __init__(self, shard: int, slot: int, topic_id: int, *, is_strong: bool, standing: Standing) -> None:
        self.shard, self.slot, self.topic_id, self.is_strong = shard, slot, topic_id, is_strong
        self.standing = standing
        """Shared by both kinds."""
        self.epoch = 0
        """0: nothing was seen of it yet."""
        self.until = 0
        self.offered_ns = self.offered_until = 0
        """Under pressure: when its readers were last offered a turn for what is new, and how far."""
        self.seen_ms = 0
        """When its slot was last looked at."""
        self.is_lost = False
        """Its slot says something else. Everybody was, or is being, told to find out."""
        self.hints: deque[Hint] = deque(maxlen=HINTS_PER_TOPIC)
        self.feeds: dict[Feed, None] = {}
        self.idle: dict[Feed, None] = {}
        self.waiting: dict[Feed, None] = {}

    def hint(self, after: int) -> Hint:
        """Where what follows `after` lies, if that is known."""
        for hint in self.hints:
            if hint.first_seq == after + 1:
                return hint
        return NO_HINT


class Feed:
    """One topic of one subscription."""

    __slots__ = (
        "after", "dirty_ms", "is_alarmed", "lacks_ms", "mark", "mark_ms", "number", "state", "subscription",
        "topic",
    )  # fmt: skip

    def __init__(self, subscription: Subscription, number: int, topic: Topic, after: int) -> None:
        self.subscription, self.number, self.topic = subscription, number, topic
        self.after = after
        self.state = State.IDLE
        self.dirty_ms = 0
        """Since when it has wanted the turn that it waits for or has."""
        self.is_alarmed = False
        """Its topic is not what it was: a turn is due whatever its position."""
        self.lacks_ms = -1
        """Since when there has been something that its reader does not have, over several turns; -1: it had
        everything when it was given the turn that it has."""
        self.mark = self.mark_ms = 0
        """How far its topic reached then: once its reader is there, what it lacks is no older than that."""

    def stays_behind(self, now_ms: int) -> None:
        """It gave a turn back, and there is more."""
        if self.lacks_ms < 0:
            self.lacks_ms = self.dirty_ms
        elif self.after < self.mark:
            return
        else:
            self.lacks_ms = self.mark_ms
        self.mark, self.mark_ms = self.topic.until, now_ms

    @property
    def since_ms(self) -> int:
        """Since when its reader has lacked something, of one that has a turn or waits."""
        return self.dirty_ms if self.lacks_ms < 0 else self.lacks_ms

    @property
    def is_dirty(self) -> bool:
        """There is something its reader does not have yet (SCH-1)."""
        return self.is_alarmed or (self.after < self.topic.until and not self.topic.is_lost)


class Subscription:
    """Feeds that share a ready set and a credit."""

    __slots__ = ("credit", "feeds", "free", "is_strong", "link", "names", "number", "ready")

    def __init__(self, link: Link, number: int, credit: int, *, is_strong: bool) -> None:
        self.link, self.number, self.credit, self.is_strong = link, number, credit, is_strong
        self.free = credit
        """Credit left. Below zero after a credit was lowered."""
        self.names = False
        self.feeds: dict[int, Feed] = {}
        self.ready: ReadySet[Feed] | None = None
        """None while nobody waits, so that who waits for nothing costs nothing."""


class Link:
    """A connection that subscribed to something."""

    __slots__ = (
        "heard_ms", "id", "is_blocked", "names", "rows", "sheds_below", "subscriptions", "told", "waiting",
    )  # fmt: skip

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.sheds_below = shed_bands(is_router=id == ROUTERS)
        """While the governor sheds, bands below this one get no credit."""
        self.heard_ms = 0
        self.subscriptions: dict[int, Subscription] = {}
        self.is_blocked = False
        """It took nothing the last time. Tried again at the next tick."""
        self.names = 0
        """Subscriptions that want to hear of changed names."""
        self.waiting: dict[Subscription, None] = {}
        """Subscriptions with somebody in the ready set."""
        self.rows: list[int] = []
        self.told: list[Feed] = []
        """Turns given and not said yet."""


class Shard:
    """What is followed of one shard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.topics: dict[tuple[int, int], Topic] = {}
        """By slot and topic id: those that go by what is published."""
        self.strong: dict[tuple[int, int], Topic] = {}
        self.slots: dict[int, int] = {}
        """How many topics of ours a slot has had that are still followed; two while one follows the other."""
        self.is_watched: NDArray[np.bool_] = np.zeros(64, dtype=bool)
        """The same by slot, to sift many rows at once."""
        self.pending: deque[tuple[int, int, Topic, int, Hint]] = deque()
        """(file_id, stop, topic, epoch, what): published, and not known to be durable yet; in order."""
        self.durable: tuple[int, int] = (0, 0)
        self.gap_ns = 0
        """Least time between two wake-ups of one of its topics; 0 = no pressure (G-3)."""
        self.is_given_up = False
        """It says nothing any more: those who follow its topics are told to find that out."""
        self.to_look: dict[Topic, None] = {}
        """Topics whose slots are to be read again."""

    def follow(self, topic: Topic) -> None:
        """Take a topic in."""
        (self.strong if topic.is_strong else self.topics)[topic.slot, topic.topic_id] = topic
        self.slots[topic.slot] = self.slots.get(topic.slot, 0) + 1
        if topic.slot >= len(self.is_watched):
            grown = np.zeros(max(2 * len(self.is_watched), topic.slot + 1), dtype=bool)
            grown[: len(self.is_watched)] = self.is_watched
            self.is_watched = grown
        self.is_watched[topic.slot] = True

    def leave(self, topic: Topic) -> None:
        """Nobody follows it any more."""
        del (self.strong if topic.is_strong else self.topics)[topic.slot, topic.topic_id]
        self.to_look.pop(topic, None)
        left = self.slots[topic.slot] - 1
        if left:
            self.slots[topic.slot] = left
        else:
            del self.slots[topic.slot]
            self.is_watched[topic.slot] = False
        if not self.strong:
            self.pending.clear()

    @property
    def is_followed(self) -> bool:
        """Somebody wants to know of it."""
        return bool(self.slots)
