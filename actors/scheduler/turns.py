"""Whose turn it is: credit, ready sets, wake-ups that are gathered, and what links are told of it. Pure.

A dirty feed is told at once while its subscription has credit and nobody waits there, else when its ready set
says that it is next; under pressure a topic's wake-ups are gathered, and bands that are shed wait. What a
link is given while events are taken goes out in as few messages as there can be, before anything else that it
is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np

from actors.scheduler.events import Tell
from actors.scheduler.feeds import NO_HINT, Feed, Link, Shard, State, Subscription, Topic
from actors.scheduler.ready import ReadySet
from ringlog.envelope import messages as m
from ringlog.envelope.messages.delivery import TURN_WORDS
from ringlog.limits import BANDS, TURNS_PER_MESSAGE_MAX
from ringlog.topic.priority import band_of

FIND_OUT = (1 << 63) - 1
"""`until` of a turn that says: this is not what it was, see for yourself."""
ORDER_LOOK_MS = 1_000
"""A topic that somebody waits for is looked at anew so often."""
_ROW = Struct(f"<{TURN_WORDS}Q")
_ONE_TURN = m.Turns(1)


class Turns:
    """The turns of one scheduler. It keeps T1 to T4 between calls; Scheduler.check looks.

    `effects` is where what is said goes; `shards` are those of the scheduler.
    """

    def __init__(self, shards: Sequence[Shard], effects: list[Any]) -> None:
        self._shards, self._effects = shards, effects
        self.now_ms = self.now_ns = 0
        self.ready = 0
        """Feeds in all ready sets (G-2)."""
        self.told = 0
        """Turns told since the start."""
        self.by_band = [0] * BANDS
        """The same by band, from the lowest."""
        self.gathered_ns = 0
        """Time for which wake-ups were gathered, in all."""
        self.is_shedding = False
        """The lowest band gets no credit, nor does a router in the one above (governor.shed_bands)."""
        self.blocked: dict[bytes, None] = {}
        """Links that took nothing the last time."""
        self.gathering: dict[Topic, tuple[int, int]] = {}
        """Topics whose wake-ups are gathered: until when at the latest, since when."""
        self.shed: dict[Subscription, None] = {}
        """Subscriptions in which only bands that are shed wait, and have credit, and get none."""
        self._telling: dict[Link, None] = {}
        self._first = 0
        """Grows, so that another link is told first each time."""

    @property
    def gathered_due_ns(self) -> int | None:
        """When the first of the wake-ups that are gathered is due."""
        return next(iter(self.gathering.values()))[0] if self.gathering else None

    # -- under pressure -------------------------------------------------------------------------------

    def wake(self, shard: Shard, topic: Topic) -> None:
        """A topic moved. Under pressure the next wake-up waits until the gap is over; the first does not."""
        due_ns = topic.offered_ns + shard.gap_ns
        if not shard.gap_ns:
            self.offer_all(topic)
        elif self.now_ns >= due_ns:
            self.gathering.pop(topic, None)
            self._offer_gathered(topic)
        elif topic not in self.gathering:
            self.gathering[topic] = (due_ns, self.now_ns)

    def end_gathering(self) -> None:
        """Wake-ups that were gathered for long enough. Who stands behind one that is due later, since gaps
        differ, came after it and so waits no longer than the longest gap either."""
        while self.gathering:
            topic, (due_ns, since_ns) = next(iter(self.gathering.items()))
            if due_ns > self.now_ns:
                break
            del self.gathering[topic]
            self.gathered_ns += self.now_ns - since_ns
            self._offer_gathered(topic)

    def _offer_gathered(self, topic: Topic) -> None:
        topic.offered_ns, topic.offered_until = self.now_ns, topic.until
        self.offer_all(topic)

    def serve_shed(self) -> None:
        """Those of bands that are shed may have risen, or may be given credit again."""
        shed, self.shed = self.shed, {}
        for subscription in shed:
            self.serve(subscription)

    def _band(self, topic: Topic, dirty_ms: int) -> int:
        """The band of who waits for it since then; asked only while the governor sheds."""
        return band_of(topic.standing.effective(self.now_ms, dirty_ms))

    # -- who is given one -----------------------------------------------------------------------------

    def offer_all(self, topic: Topic) -> None:
        """A topic moved: those of its feeds that were up to date get a turn, or wait for one.

        A thousand may follow one topic, so this is written out rather than made of calls.
        """
        if not topic.idle:
            return
        idle, topic.idle = topic.idle, {}
        until, is_lost, now_ms = topic.until, topic.is_lost, self.now_ms
        band = self._band(topic, now_ms) if self.is_shedding else BANDS
        told_after, words = -1, (until, *NO_HINT)
        for feed in idle:
            after = feed.after
            if feed.is_alarmed or is_lost or after >= until:
                if feed.is_alarmed:
                    self.offer(feed, now_ms)
                else:
                    topic.idle[feed] = None
                continue
            subscription = feed.subscription
            link = subscription.link
            is_held = link.is_blocked or band < link.sheds_below
            if is_held or subscription.free <= 0 or subscription.ready is not None:
                self._wait(feed, now_ms)
                continue
            if after != told_after:
                told_after, words = after, (until, *topic.hint(after))
            subscription.free -= 1
            feed.state, feed.dirty_ms = State.TOLD, now_ms
            if not link.told:
                self._telling[link] = None
            link.rows += (subscription.number, feed.number, *words)
            link.told.append(feed)

    def offer(self, feed: Feed, dirty_ms: int) -> None:
        """A dirty feed gets a turn at once where nobody waits and credit is left, else it waits."""
        subscription, link = feed.subscription, feed.subscription.link
        may_go = subscription.free > 0 and subscription.ready is None and not link.is_blocked
        if may_go and not (self.is_shedding and self._band(feed.topic, dirty_ms) < link.sheds_below):
            feed.topic.idle.pop(feed, None)
            self._give(feed, dirty_ms)
        else:
            self._wait(feed, dirty_ms)

    def _wait(self, feed: Feed, dirty_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        topic.idle.pop(feed, None)
        feed.state, feed.dirty_ms = State.READY, dirty_ms
        if self.now_ms - topic.seen_ms >= ORDER_LOOK_MS:
            # Its order may have been configured since it was last looked at.
            topic.seen_ms = self.now_ms
            self._shards[topic.shard].to_look[topic] = None
        topic.waiting[feed] = None
        if subscription.ready is None:
            subscription.ready = ReadySet(self.by_band)
            subscription.link.waiting[subscription] = None
        subscription.ready.add(feed, topic.standing, dirty_ms, self.now_ms)
        self.ready += 1
        if self.is_shedding:
            self.serve(subscription)  # Who waits beside a band that is shed need not wait for credit.

    def serve(self, subscription: Subscription) -> None:
        """Give turns to those who wait, as long as there is credit."""
        link = subscription.link
        while subscription.ready is not None and subscription.free > 0 and not link.is_blocked:
            popped = subscription.ready.pop(self.now_ms, link.sheds_below if self.is_shedding else 0)
            if popped is None:
                self.shed[subscription] = None
                break
            feed, dirty_ms = popped
            self._left_ready(feed)
            self._give(feed, dirty_ms)

    def _give(self, feed: Feed, dirty_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        link = subscription.link
        subscription.free -= 1
        feed.state, feed.dirty_ms = State.TOLD, dirty_ms
        if feed.is_alarmed:
            feed.is_alarmed = False
            words = (FIND_OUT, *NO_HINT)
        else:
            words = (topic.until, *topic.hint(feed.after))
        if not link.told:
            self._telling[link] = None
        link.rows += (subscription.number, feed.number, *words)
        link.told.append(feed)

    def _left_ready(self, feed: Feed) -> None:
        """It is out of its ready set."""
        subscription = feed.subscription
        del feed.topic.waiting[feed]
        self.ready -= 1
        if not subscription.ready:
            subscription.ready = None
            self.shed.pop(subscription, None)
            del subscription.link.waiting[subscription]

    def rest(self, feed: Feed) -> None:
        """Whatever it had or waited for, it has and waits for nothing."""
        if feed.state is State.READY:
            assert feed.subscription.ready is not None
            feed.subscription.ready.discard(feed)
            self._left_ready(feed)
        elif feed.state is State.TOLD:
            feed.subscription.free += 1
        feed.state, feed.lacks_ms = State.IDLE, -1
        feed.topic.idle[feed] = None

    # -- what links are told --------------------------------------------------------------------------

    def say_turns(self) -> None:
        """Say all turns that were given. Links take turns in being the first who is told: who is may begin to
        read while the others are told, and under load that is an advantage."""
        links = list(self._telling)
        if len(links) > 1:
            self._first += 1
            first = self._first % len(links)
            links = links[first:] + links[:first]
        for link in links:
            self.say_turns_of(link)

    def say_turns_of(self, link: Link) -> None:
        """Put what a link was given into messages."""
        if link not in self._telling:
            return
        del self._telling[link]
        rows, told = link.rows, link.told
        link.rows, link.told = [], []
        self.told += len(told)
        if len(told) == 1:
            # One for each of many links is the common case beside many for one.
            self._effects.append(Tell(link.id, _ONE_TURN, 0, _ROW.pack(*rows), tuple(told)))
            return
        words = np.array(rows, dtype=np.uint64)
        for first in range(0, len(told), TURNS_PER_MESSAGE_MAX):
            feeds = tuple(told[first : first + TURNS_PER_MESSAGE_MAX])
            part = words[first * TURN_WORDS : (first + len(feeds)) * TURN_WORDS]
            self._effects.append(Tell(link.id, m.Turns(len(feeds)), 0, part.tobytes(), feeds))

    def say(self, link: Link, message: m.Message, corr: int) -> None:
        """Say something, behind the turns that were given before."""
        self.say_turns_of(link)
        self._effects.append(Tell(link.id, message, corr))

    def take_back(self, link: Link, feeds: Sequence[Feed]) -> None:
        """A link did not take the turns it was told: those they were for wait, until it is tried again."""
        link.is_blocked = True
        self.blocked[link.id] = None
        self.told -= len(feeds)
        for feed in feeds:
            is_there = feed.subscription.feeds.get(feed.number) is feed
            if is_there and feed.state is State.TOLD:
                feed.subscription.free += 1
                feed.state = State.IDLE
                # Not behind: then it was to find something out, and still is.
                feed.is_alarmed = feed.is_alarmed or not feed.is_dirty
                self._wait(feed, feed.dirty_ms)

    def try_again(self, links: Mapping[bytes, Link]) -> None:
        """Offer those links something that took nothing before."""
        blocked, self.blocked = self.blocked, {}
        for link in [links[id] for id in blocked if id in links]:
            link.is_blocked = False
            for subscription in list(link.waiting):
                self.serve(subscription)

    def forget(self, link: Link) -> None:
        """A link is gone: what it was given is not said."""
        self._telling.pop(link, None)
        self.blocked.pop(link.id, None)
        link.rows, link.told = [], []
