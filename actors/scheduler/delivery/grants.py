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

from actors.scheduler.delivery.feeds import (
    NO_HINT,
    FeedGrantState,
    FollowedShard,
    Link,
    SchedulerFeed,
    SchedulerSubscription,
    SchedulerTopic,
)
from actors.scheduler.delivery.ready_set import ReadySet
from actors.scheduler.events import SendToLink
from ringlog.envelope import messages as m
from ringlog.envelope.messages.delivery import TURN_WORDS
from ringlog.limits import BANDS, GRANTS_PER_MESSAGE_MAX
from ringlog.topic.priority import band_of

UNTIL_RECHECK = (1 << 63) - 1
"""`until` of a turn that says: this is not what it was, see for yourself."""
ORDER_LOOK_MS = 1_000
"""A topic that somebody waits for is looked at anew so often."""
_ROW = Struct(f"<{TURN_WORDS}Q")
_ONE_TURN = m.Turns(1)


class GrantDispatcher:
    """The turns of one scheduler. It keeps T1 to T4 between calls; Scheduler.check looks.

    `effects` is where what is said goes; `shards` are those of the scheduler.
    """

    def __init__(self, shards: Sequence[FollowedShard], effects: list[Any]) -> None:
        self._shards, self._effects = shards, effects
        self.now_ms = self.now_ns = 0
        self.ready_count = 0
        """Feeds in all ready sets (G-2)."""
        self.granted_count = 0
        """Turns told since the start."""
        self.ready_by_band = [0] * BANDS
        """The same by band, from the lowest."""
        self.coalesced_ns = 0
        """Time for which wake-ups were gathered, in all."""
        self.is_shedding = False
        """The lowest band gets no credit, nor does a router in the one above (governor.shed_bands)."""
        self.blocked_links: dict[bytes, None] = {}
        """Links that took nothing the last time."""
        self.coalescing: dict[SchedulerTopic, tuple[int, int]] = {}
        """Topics whose wake-ups are gathered: until when at the latest, since when."""
        self.shed_subscriptions: dict[SchedulerSubscription, None] = {}
        """Subscriptions in which only bands that are shed wait, and have credit, and get none."""
        self._granted_links: dict[Link, None] = {}
        self._first = 0
        """Grows, so that another link is told first each time."""

    @property
    def coalesce_due_ns(self) -> int | None:
        """When the first of the wake-ups that are gathered is due."""
        return next(iter(self.coalescing.values()))[0] if self.coalescing else None

    # -- under pressure -------------------------------------------------------------------------------

    def wake_topic(self, shard: FollowedShard, topic: SchedulerTopic) -> None:
        """A topic moved. Under pressure the next wake-up waits until the gap is over; the first does not."""
        due_ns = topic.offered_ns + shard.gap_ns
        if not shard.gap_ns:
            self.offer_topic(topic)
        elif self.now_ns >= due_ns:
            self.coalescing.pop(topic, None)
            self._offer_coalesced(topic)
        elif topic not in self.coalescing:
            self.coalescing[topic] = (due_ns, self.now_ns)

    def offer_coalesced_due(self) -> None:
        """Wake-ups that were gathered for long enough. Who stands behind one that is due later, since gaps
        differ, came after it and so waits no longer than the longest gap either."""
        while self.coalescing:
            topic, (due_ns, since_ns) = next(iter(self.coalescing.items()))
            if due_ns > self.now_ns:
                break
            del self.coalescing[topic]
            self.coalesced_ns += self.now_ns - since_ns
            self._offer_coalesced(topic)

    def _offer_coalesced(self, topic: SchedulerTopic) -> None:
        topic.offered_ns, topic.offered_until = self.now_ns, topic.readable_until
        self.offer_topic(topic)

    def serve_shed(self) -> None:
        """Those of bands that are shed may have risen, or may be given credit again."""
        shed_subscriptions, self.shed_subscriptions = self.shed_subscriptions, {}
        for subscription in shed_subscriptions:
            self.serve_subscription(subscription)

    def _band(self, topic: SchedulerTopic, dirty_ms: int) -> int:
        """The band of who waits for it since then; asked only while the governor sheds."""
        return band_of(topic.standing.effective(self.now_ms, dirty_ms))

    # -- who is given one -----------------------------------------------------------------------------

    def offer_topic(self, topic: SchedulerTopic) -> None:
        """A topic moved: those of its feeds that were up to date get a turn, or wait for one.

        A thousand may follow one topic, so this is written out rather than made of calls.
        """
        if not topic.idle:
            return
        idle, topic.idle = topic.idle, {}
        until, is_lost, now_ms = topic.readable_until, topic.is_lost, self.now_ms
        band = self._band(topic, now_ms) if self.is_shedding else BANDS
        told_after, words = -1, (until, *NO_HINT)
        for feed in idle:
            after = feed.after
            if feed.is_alarmed or is_lost or after >= until:
                if feed.is_alarmed:
                    self.offer_feed(feed, now_ms)
                else:
                    topic.idle[feed] = None
                continue
            subscription = feed.subscription
            link = subscription.link
            is_held = link.is_blocked or band < link.sheds_below
            if is_held or subscription.free <= 0 or subscription.ready is not None:
                self._enqueue(feed, now_ms)
                continue
            if after != told_after:
                told_after, words = after, (until, *topic.find_hint(after))
            subscription.free -= 1
            feed.state, feed.lagging_since_ms = FeedGrantState.GRANTED, now_ms
            if not link.granted_feeds:
                self._granted_links[link] = None
            link.granted_rows += (subscription.number, feed.number, *words)
            link.granted_feeds.append(feed)

    def offer_feed(self, feed: SchedulerFeed, dirty_ms: int) -> None:
        """A dirty feed gets a turn at once where nobody waits and credit is left, else it waits."""
        subscription, link = feed.subscription, feed.subscription.link
        may_go = subscription.free > 0 and subscription.ready is None and not link.is_blocked
        if may_go and not (self.is_shedding and self._band(feed.topic, dirty_ms) < link.sheds_below):
            feed.topic.idle.pop(feed, None)
            self._grant(feed, dirty_ms)
        else:
            self._enqueue(feed, dirty_ms)

    def _enqueue(self, feed: SchedulerFeed, dirty_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        topic.idle.pop(feed, None)
        feed.state, feed.lagging_since_ms = FeedGrantState.READY, dirty_ms
        if self.now_ms - topic.seen_ms >= ORDER_LOOK_MS:
            # Its order may have been configured since it was last looked at.
            topic.seen_ms = self.now_ms
            self._shards[topic.shard].to_look[topic] = None
        topic.waiting[feed] = None
        if subscription.ready is None:
            subscription.ready = ReadySet(self.ready_by_band)
            subscription.link.waiting[subscription] = None
        subscription.ready.add(feed, topic.standing, dirty_ms, self.now_ms)
        self.ready_count += 1
        if self.is_shedding:
            self.serve_subscription(
                subscription
            )  # Who waits beside a band that is shed need not wait for credit.

    def serve_subscription(self, subscription: SchedulerSubscription) -> None:
        """Give turns to those who wait, as long as there is credit."""
        link = subscription.link
        while subscription.ready is not None and subscription.free > 0 and not link.is_blocked:
            popped = subscription.ready.pop(self.now_ms, link.sheds_below if self.is_shedding else 0)
            if popped is None:
                self.shed_subscriptions[subscription] = None
                break
            feed, dirty_ms = popped
            self._left_ready(feed)
            self._grant(feed, dirty_ms)

    def _grant(self, feed: SchedulerFeed, dirty_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        link = subscription.link
        subscription.free -= 1
        feed.state, feed.lagging_since_ms = FeedGrantState.GRANTED, dirty_ms
        if feed.is_alarmed:
            feed.is_alarmed = False
            words = (UNTIL_RECHECK, *NO_HINT)
        else:
            words = (topic.readable_until, *topic.find_hint(feed.after))
        if not link.granted_feeds:
            self._granted_links[link] = None
        link.granted_rows += (subscription.number, feed.number, *words)
        link.granted_feeds.append(feed)

    def _left_ready(self, feed: SchedulerFeed) -> None:
        """It is out of its ready set."""
        subscription = feed.subscription
        del feed.topic.waiting[feed]
        self.ready_count -= 1
        if not subscription.ready:
            subscription.ready = None
            self.shed_subscriptions.pop(subscription, None)
            del subscription.link.waiting[subscription]

    def reset_feed(self, feed: SchedulerFeed) -> None:
        """Whatever it had or waited for, it has and waits for nothing."""
        if feed.state is FeedGrantState.READY:
            assert feed.subscription.ready is not None
            feed.subscription.ready.discard(feed)
            self._left_ready(feed)
        elif feed.state is FeedGrantState.GRANTED:
            feed.subscription.free += 1
        feed.state, feed.behind_since_ms = FeedGrantState.IDLE, -1
        feed.topic.idle[feed] = None

    # -- what links are told --------------------------------------------------------------------------

    def send_grants(self) -> None:
        """Say all turns that were given. Links take turns in being the first who is told: who is may begin to
        read while the others are told, and under load that is an advantage."""
        links = list(self._granted_links)
        if len(links) > 1:
            self._first += 1
            first = self._first % len(links)
            links = links[first:] + links[:first]
        for link in links:
            self.send_link_grants(link)

    def send_link_grants(self, link: Link) -> None:
        """Put what a link was given into messages."""
        if link not in self._granted_links:
            return
        del self._granted_links[link]
        rows, told = link.granted_rows, link.granted_feeds
        link.granted_rows, link.granted_feeds = [], []
        self.granted_count += len(told)
        if len(told) == 1:
            # One for each of many links is the common case beside many for one.
            self._effects.append(SendToLink(link.id, _ONE_TURN, 0, _ROW.pack(*rows), tuple(told)))
            return
        words = np.array(rows, dtype=np.uint64)
        for first in range(0, len(told), GRANTS_PER_MESSAGE_MAX):
            feeds = tuple(told[first : first + GRANTS_PER_MESSAGE_MAX])
            part = words[first * TURN_WORDS : (first + len(feeds)) * TURN_WORDS]
            self._effects.append(SendToLink(link.id, m.Turns(len(feeds)), 0, part.tobytes(), feeds))

    def send_message(self, link: Link, message: m.Message, corr: int) -> None:
        """Say something, behind the turns that were given before."""
        self.send_link_grants(link)
        self._effects.append(SendToLink(link.id, message, corr))

    def take_back_grants(self, link: Link, feeds: Sequence[SchedulerFeed]) -> None:
        """A link did not take the turns it was told: those they were for wait, until it is tried again."""
        link.is_blocked = True
        self.blocked_links[link.id] = None
        self.granted_count -= len(feeds)
        for feed in feeds:
            is_there = feed.subscription.feeds.get(feed.number) is feed
            if is_there and feed.state is FeedGrantState.GRANTED:
                feed.subscription.free += 1
                feed.state = FeedGrantState.IDLE
                # Not behind: then it was to find something out, and still is.
                feed.is_alarmed = feed.is_alarmed or not feed.is_lagging
                self._enqueue(feed, feed.lagging_since_ms)

    def retry_blocked_links(self, links: Mapping[bytes, Link]) -> None:
        """Offer those links something that took nothing before."""
        blocked_links, self.blocked_links = self.blocked_links, {}
        for link in [links[id] for id in blocked_links if id in links]:
            link.is_blocked = False
            for subscription in list(link.waiting):
                self.serve_subscription(subscription)

    def forget_link(self, link: Link) -> None:
        """A link is gone: what it was given is not said."""
        self._granted_links.pop(link, None)
        self.blocked_links.pop(link.id, None)
        link.granted_rows, link.granted_feeds = [], []
