"""Grants of one scheduler: credit, ready sets, coalesced wake-ups, and the messages to links. Pure.

A lagging feed gets a grant at once if its subscription has credit and no other feed waits there. Otherwise
it waits in the ready set. Under pressure a topic's wake-ups are coalesced, and shed bands get no grants.
Grants that are given during one call of the core go out in as few messages as possible. They precede any
other message to the same link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np

from ringlog.actors.scheduler.delivery.feeds import (
    NO_HINT,
    FeedGrantState,
    FollowedShard,
    Link,
    SchedulerFeed,
    SchedulerSubscription,
    SchedulerTopic,
)
from ringlog.actors.scheduler.delivery.ready_set import ReadySet
from ringlog.actors.scheduler.events import SendToLink
from ringlog.envelope import messages as m
from ringlog.envelope.messages.delivery import GRANT_WORDS
from ringlog.limits import BANDS, GRANTS_PER_MESSAGE_MAX
from ringlog.topic.priority import band_of

UNTIL_RECHECK = (1 << 63) - 1
"""`until` of a recheck grant. The topic was deleted or recreated, or its shard failed: resolve it again."""
PRIORITY_REREAD_MS = 1_000
"""A feed that starts to wait causes a new read of its topic's slot, at most once in this time."""
_ROW = Struct(f"<{GRANT_WORDS}Q")
_ONE_GRANT = m.Grants(1)


class GrantDispatcher:
    """The grants of one scheduler. T1 to T4 hold between calls; Scheduler.check verifies them.

    `shards` are the shards of the scheduler. Messages are appended to `effects`.
    """

    def __init__(self, shards: Sequence[FollowedShard], effects: list[Any]) -> None:
        self._shards, self._effects = shards, effects
        self.now_ms = self.now_ns = 0
        self.ready_count: int = 0
        """Number of feeds in all ready sets."""
        self.granted_count: int = 0
        """Number of grants sent since the start, without grants that could not be delivered."""
        self.ready_by_band: list[int] = [0] * BANDS
        """Number of feeds in all ready sets by band, lowest band first."""
        self.coalesced_ns: int = 0
        """Total time in ns by which wake-ups were delayed."""
        self.is_shedding = False
        """The lowest band gets no grants, for routers also the second lowest (governor.shed_bands)."""
        self.blocked_links: dict[bytes, None] = {}
        """Ids of links whose last message could not be delivered."""
        self.coalescing: dict[SchedulerTopic, tuple[int, int]] = {}
        """Topics with a delayed wake-up: (latest time of the wake-up, start of the delay), in ns."""
        self.shed_subscriptions: dict[SchedulerSubscription, None] = {}
        """Subscriptions that have credit and whose waiting feeds are all in shed bands."""
        self._granted_links: dict[Link, None] = {}
        self._first = 0
        """Rotates the order in which links receive their grants."""

    @property
    def coalesce_due_ns(self) -> int | None:
        """When the first delayed wake-up is due, in ns; None = there is none."""
        return next(iter(self.coalescing.values()))[0] if self.coalescing else None

    # -- under pressure -------------------------------------------------------------------------------

    def wake_topic(self, shard: FollowedShard, topic: SchedulerTopic) -> None:
        """Wake up the readers of a topic with new records.

        Under pressure a further wake-up waits until the gap is over.
        """
        due_ns = topic.offered_ns + shard.gap_ns
        if not shard.gap_ns:
            self.offer_topic(topic)
        elif self.now_ns >= due_ns:
            self.coalescing.pop(topic, None)
            self._offer_coalesced(topic)
        elif topic not in self.coalescing:
            self.coalescing[topic] = (due_ns, self.now_ns)

    def offer_coalesced_due(self) -> None:
        """Perform the delayed wake-ups that are due.

        They are kept in the order of their start. A topic with a short gap may wait for an earlier one with a
        long gap, but no topic waits longer than the longest gap.
        """
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
        """Serve subscriptions with shed feeds.

        Feeds may have risen to a higher band, or shedding has ended.
        """
        shed_subscriptions, self.shed_subscriptions = self.shed_subscriptions, {}
        for subscription in shed_subscriptions:
            self.serve_subscription(subscription)

    def _band(self, topic: SchedulerTopic, lag_start_ms: int) -> int:
        """Return the band of a feed that has been lagging since `lag_start_ms`.

        Called only while the governor sheds.
        """
        return band_of(topic.priority.effective(self.now_ms, lag_start_ms))

    # -- grants ---------------------------------------------------------------------------------------

    def offer_topic(self, topic: SchedulerTopic) -> None:
        """Give grants to the lagging feeds among the topic's idle ones, or add them to their ready sets.

        The code is inlined for speed: a thousand feeds may follow one topic.
        """
        if not topic.idle:
            return
        idle, topic.idle = topic.idle, {}
        until, is_lost, now_ms = topic.readable_until, topic.is_lost, self.now_ms
        band = self._band(topic, now_ms) if self.is_shedding else BANDS
        words_after, words = -1, (until, *NO_HINT)
        for feed in idle:
            after = feed.after
            if feed.needs_recheck or is_lost or after >= until:
                if feed.needs_recheck:
                    self.offer_feed(feed, now_ms)
                else:
                    topic.idle[feed] = None
                continue
            subscription = feed.subscription
            link = subscription.link
            must_wait = link.is_blocked or band < link.sheds_below
            if must_wait or subscription.free <= 0 or subscription.ready is not None:
                self._enqueue(feed, now_ms)
                continue
            if after != words_after:
                words_after, words = after, (until, *topic.find_hint(after))
            subscription.free -= 1
            feed.state, feed.lagging_since_ms = FeedGrantState.GRANTED, now_ms
            if not link.granted_feeds:
                self._granted_links[link] = None
            link.granted_rows += (subscription.number, feed.number, *words)
            link.granted_feeds.append(feed)

    def offer_feed(self, feed: SchedulerFeed, lag_start_ms: int) -> None:
        """Give a lagging feed a grant if it has credit and no other feed waits.

        Otherwise add it to the ready set.
        """
        subscription, link = feed.subscription, feed.subscription.link
        may_go = subscription.free > 0 and subscription.ready is None and not link.is_blocked
        if may_go and not (self.is_shedding and self._band(feed.topic, lag_start_ms) < link.sheds_below):
            feed.topic.idle.pop(feed, None)
            self._grant(feed, lag_start_ms)
        else:
            self._enqueue(feed, lag_start_ms)

    def _enqueue(self, feed: SchedulerFeed, lag_start_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        topic.idle.pop(feed, None)
        feed.state, feed.lagging_since_ms = FeedGrantState.READY, lag_start_ms
        if self.now_ms - topic.seen_ms >= PRIORITY_REREAD_MS:
            # The topic's priority may have been configured since its slot was last read.
            topic.seen_ms = self.now_ms
            self._shards[topic.shard].slots_to_read[topic] = None
        topic.waiting[feed] = None
        if subscription.ready is None:
            subscription.ready = ReadySet(self.ready_by_band)
            subscription.link.waiting[subscription] = None
        subscription.ready.add(feed, topic.priority, lag_start_ms, self.now_ms)
        self.ready_count += 1
        if self.is_shedding:
            self.serve_subscription(
                subscription
            )  # A feed of a band that is not shed may get the credit at once.

    def serve_subscription(self, subscription: SchedulerSubscription) -> None:
        """Give grants to waiting feeds while there is credit."""
        link = subscription.link
        while subscription.ready is not None and subscription.free > 0 and not link.is_blocked:
            popped = subscription.ready.pop(self.now_ms, link.sheds_below if self.is_shedding else 0)
            if popped is None:
                self.shed_subscriptions[subscription] = None
                break
            feed, lag_start_ms = popped
            self._on_removed_from_ready(feed)
            self._grant(feed, lag_start_ms)

    def _grant(self, feed: SchedulerFeed, lag_start_ms: int) -> None:
        subscription, topic = feed.subscription, feed.topic
        link = subscription.link
        subscription.free -= 1
        feed.state, feed.lagging_since_ms = FeedGrantState.GRANTED, lag_start_ms
        if feed.needs_recheck:
            feed.needs_recheck = False
            words = (UNTIL_RECHECK, *NO_HINT)
        else:
            words = (topic.readable_until, *topic.find_hint(feed.after))
        if not link.granted_feeds:
            self._granted_links[link] = None
        link.granted_rows += (subscription.number, feed.number, *words)
        link.granted_feeds.append(feed)

    def _on_removed_from_ready(self, feed: SchedulerFeed) -> None:
        """Update the counts after a feed has left its ready set."""
        subscription = feed.subscription
        del feed.topic.waiting[feed]
        self.ready_count -= 1
        if not subscription.ready:
            subscription.ready = None
            self.shed_subscriptions.pop(subscription, None)
            del subscription.link.waiting[subscription]

    def reset_feed(self, feed: SchedulerFeed) -> None:
        """Make a feed idle: remove it from the ready set, or return its grant."""
        if feed.state is FeedGrantState.READY:
            assert feed.subscription.ready is not None
            feed.subscription.ready.discard(feed)
            self._on_removed_from_ready(feed)
        elif feed.state is FeedGrantState.GRANTED:
            feed.subscription.free += 1
        feed.state, feed.behind_since_ms = FeedGrantState.IDLE, -1
        feed.topic.idle[feed] = None

    # -- messages to links ----------------------------------------------------------------------------

    def send_grants(self) -> None:
        """Send all grants that were given.

        The order of links rotates. The first link can start to read while the others receive their grants,
        which is an advantage under load.
        """
        links = list(self._granted_links)
        if len(links) > 1:
            self._first += 1
            first = self._first % len(links)
            links = links[first:] + links[:first]
        for link in links:
            self.send_link_grants(link)

    def send_link_grants(self, link: Link) -> None:
        """Send a link the grants that it was given."""
        if link not in self._granted_links:
            return
        del self._granted_links[link]
        rows, granted = link.granted_rows, link.granted_feeds
        link.granted_rows, link.granted_feeds = [], []
        self.granted_count += len(granted)
        if len(granted) == 1:
            # Fast path: many links with one grant each is the common case.
            self._effects.append(SendToLink(link.id, _ONE_GRANT, 0, _ROW.pack(*rows), tuple(granted)))
            return
        words = np.array(rows, dtype=np.uint64)
        for first in range(0, len(granted), GRANTS_PER_MESSAGE_MAX):
            feeds = tuple(granted[first : first + GRANTS_PER_MESSAGE_MAX])
            part = words[first * GRANT_WORDS : (first + len(feeds)) * GRANT_WORDS]
            self._effects.append(SendToLink(link.id, m.Grants(len(feeds)), 0, part.tobytes(), feeds))

    def send_message(self, link: Link, message: m.Message, corr: int) -> None:
        """Send a message to a link, after the grants that it was given before."""
        self.send_link_grants(link)
        self._effects.append(SendToLink(link.id, message, corr))

    def take_back_grants(self, link: Link, feeds: Sequence[SchedulerFeed]) -> None:
        """Take back grants that could not be delivered. Their feeds wait until the link is retried."""
        link.is_blocked = True
        self.blocked_links[link.id] = None
        self.granted_count -= len(feeds)
        for feed in feeds:
            is_there = feed.subscription.feeds.get(feed.number) is feed
            if is_there and feed.state is FeedGrantState.GRANTED:
                feed.subscription.free += 1
                feed.state = FeedGrantState.IDLE
                # A feed that is not lagging had a recheck grant, which is still due.
                feed.needs_recheck = feed.needs_recheck or not feed.is_lagging
                self._enqueue(feed, feed.lagging_since_ms)

    def retry_blocked_links(self, links: Mapping[bytes, Link]) -> None:
        """Try again to give grants to the links whose last message could not be delivered."""
        blocked_links, self.blocked_links = self.blocked_links, {}
        for link in [links[id] for id in blocked_links if id in links]:
            link.is_blocked = False
            for subscription in list(link.waiting):
                self.serve_subscription(subscription)

    def forget_link(self, link: Link) -> None:
        """Remove a link. Its grants are not sent."""
        self._granted_links.pop(link, None)
        self.blocked_links.pop(link.id, None)
        link.granted_rows, link.granted_feeds = [], []
