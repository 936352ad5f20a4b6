"""The links of a scheduler with their subscriptions and feeds: how they begin, change, move and end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlog.actors.scheduler.delivery.feeds import (
    FeedGrantState,
    FollowedShard,
    Link,
    SchedulerFeed,
    SchedulerSubscription,
    SchedulerTopic,
)
from ringlog.actors.scheduler.delivery.grants import GrantDispatcher
from ringlog.actors.scheduler.delivery.priority_changes import PriorityChanges
from ringlog.actors.scheduler.events import LinkRequestReceived, ReadSlots, SendToLink
from ringlog.envelope import messages as m
from ringlog.envelope.grant_rows import grant_return_rows
from ringlog.errors import InvalidRequest, Throttled
from ringlog.limits import (
    CREDIT_MAX,
    FEEDS_PER_MESSAGE_MAX,
    FEEDS_PER_SCHEDULER_MAX,
    FEEDS_PER_SUBSCRIPTION_MAX,
    LINKS_PER_SCHEDULER_MAX,
    SUBSCRIPTIONS_PER_LINK_MAX,
    WATCHED_SLOTS_MAX,
)
from ringlog.topic.priority import TopicPriority

NUMBER_MAX = (1 << 32) - 1
_RETRY_AFTER_MS = 1_000


class LinkSubscriptions:
    """All links, subscriptions and feeds of one scheduler. Replies and requests are appended to `effects`."""

    def __init__(
        self, number: int, incarnation: int, shards: Sequence[FollowedShard], grants: GrantDispatcher,
        priorities: PriorityChanges, effects: list[Any],
    ) -> None:  # fmt: skip
        self._number, self._incarnation = number, incarnation
        self._shards, self._grants, self._priorities, self._effects = shards, grants, priorities, effects
        self.links: dict[bytes, Link] = {}
        """In the order of the last message received; the link that has been silent for longest is first."""
        self.feed_count: int = 0
        self.count: int = 0
        """Number of subscriptions."""
        self.name_watchers: dict[bytes, None] = {}
        """Links that are notified of created and deleted topics."""

    def subscribe(self, request: LinkRequestReceived, message: m.Subscribe) -> None:
        """Create or change a subscription and its feeds. Raises Refused."""
        link = self.links.get(request.link)
        subscription = link.subscriptions.get(message.subscription) if link is not None else None
        self._check_limits(message, link, subscription)
        if link is None:
            link = self.links[request.link] = Link(request.link)
            link.last_heard_ms = self._grants.now_ms
        if subscription is None:
            subscription = SchedulerSubscription(
                link, message.subscription, message.credit, is_strong=message.strong
            )
            link.subscriptions[message.subscription] = subscription
            self.count += 1
        subscription.free += message.credit - subscription.credit
        subscription.credit = message.credit
        self._set_names(subscription, message.names)
        topics_by_shard: dict[int, dict[SchedulerTopic, None]] = {}
        for feed_request in message.feeds:
            topic = self._topic_of(feed_request, is_strong=subscription.is_strong)
            self._place_feed(subscription, feed_request.feed, topic, feed_request.after)
            topics_by_shard.setdefault(topic.shard, {})[topic] = None
        self._grants.serve_subscription(subscription)
        done = SendToLink(
            request.link, m.Subscribed(subscription.number, self._number, self._incarnation), request.corr
        )
        if not topics_by_shard:
            self._grants.send_message(link, done.message, request.corr)
        for n, (shard, topics) in enumerate(topics_by_shard.items(), 1):
            self._effects.append(ReadSlots(shard, tuple(topics), done if n == len(topics_by_shard) else None))

    def _check_limits(
        self, message: m.Subscribe, link: Link | None, found: SchedulerSubscription | None
    ) -> None:
        """Raise Refused if a value is out of range or a limit would be exceeded.

        Nothing is changed before.
        """
        if not 0 <= message.subscription <= NUMBER_MAX:
            raise InvalidRequest(
                f"subscription must be 0 to {NUMBER_MAX}, got {message.subscription}",
                found=message.subscription, max=NUMBER_MAX,
            )  # fmt: skip
        if not 0 <= message.credit <= CREDIT_MAX:
            raise InvalidRequest(
                f"credit must be 0 to {CREDIT_MAX}, got {message.credit}", found=message.credit, min=0,
                max=CREDIT_MAX,
            )  # fmt: skip
        if found is not None and found.is_strong != message.strong:
            raise InvalidRequest(
                "strong of a subscription cannot be changed: use another subscription number",
                subscription=message.subscription,
            )  # fmt: skip
        for feed in message.feeds:
            is_sane = 0 <= feed.feed <= NUMBER_MAX and feed.shard >= 0 and feed.after >= 0
            if not (is_sane and 0 <= feed.slot < WATCHED_SLOTS_MAX):
                raise InvalidRequest(
                    "feed, shard, slot or after of a feed is out of range", feed=feed.feed, shard=feed.shard,
                    slot=feed.slot,
                )  # fmt: skip
        known = found.feeds if found is not None else {}
        added = len({feed.feed for feed in message.feeds} - known.keys())
        for limit, count, maximum in (
            ("feeds_per_message", len(message.feeds), FEEDS_PER_MESSAGE_MAX),
            ("links", len(self.links) + (link is None), LINKS_PER_SCHEDULER_MAX),
            ("subscriptions_per_link", (len(link.subscriptions) if link else 0) + (found is None),
             SUBSCRIPTIONS_PER_LINK_MAX),
            ("feeds_per_subscription", len(known) + added, FEEDS_PER_SUBSCRIPTION_MAX),
            ("feeds_per_scheduler", self.feed_count + added, FEEDS_PER_SCHEDULER_MAX),
        ):  # fmt: skip
            if count > maximum:
                raise Throttled(
                    "subscription limit reached: end subscriptions or retry later", limit=limit, max=maximum,
                    retry_after_ms=_RETRY_AFTER_MS,
                )  # fmt: skip

    def _set_names(self, subscription: SchedulerSubscription, names: bool) -> None:
        link = subscription.link
        link.names += int(names) - int(subscription.names)
        subscription.names = names
        if link.names:
            self.name_watchers[link.id] = None
        else:
            self.name_watchers.pop(link.id, None)

    def _topic_of(self, feed_request: m.Feed, *, is_strong: bool) -> SchedulerTopic:
        """Return the topic of a feed; follow it if it is new.

        A client may have learned the topic's place from an engine with more shards. A shard number that does
        not exist is replaced by the last shard. If the slot there contains another topic, the topic is marked
        lost and the client receives a recheck grant.
        """
        number = min(feed_request.shard, len(self._shards) - 1)
        shard, key = self._shards[number], (feed_request.slot, feed_request.topic_id)
        own_topics, other_topics = (
            (shard.strong_topics, shard.topics) if is_strong else (shard.topics, shard.strong_topics)
        )
        topic = own_topics.get(key)
        if topic is None:
            priority = other_topics[key].priority if key in other_topics else TopicPriority()
            topic = SchedulerTopic(
                number, feed_request.slot, feed_request.topic_id, is_strong=is_strong, priority=priority
            )
            shard.follow_topic(topic)
        return topic

    def _place_feed(
        self, subscription: SchedulerSubscription, number: int, topic: SchedulerTopic, after: int
    ) -> None:
        """Create a feed or move an existing one. A granted feed stays granted."""
        feed = subscription.feeds.get(number)
        if feed is None:
            feed = subscription.feeds[number] = SchedulerFeed(subscription, number, topic, after)
            self.feed_count += 1
            topic.feeds[feed] = topic.idle[feed] = None
        else:
            is_granted = feed.state is FeedGrantState.GRANTED
            self._grants.reset_feed(feed)
            old, feed.topic, feed.after, feed.needs_recheck = feed.topic, topic, after, False
            if old is not topic:
                self._detach_feed(feed, old)
                topic.feeds[feed] = None
                old.idle.pop(feed, None)
            if is_granted:
                feed.state = FeedGrantState.GRANTED
                subscription.free -= 1
                topic.idle.pop(feed, None)
            else:
                topic.idle[feed] = None
        # The readers that were there when the topic was lost got a recheck grant then. This one did not.
        feed.needs_recheck |= topic.is_lost or self._shards[topic.shard].is_given_up
        if feed.state is FeedGrantState.IDLE and feed.is_lagging:
            self._grants.offer_feed(feed, self._grants.now_ms)

    def unsubscribe(self, request: LinkRequestReceived, message: m.Unsubscribe, link: Link | None) -> None:
        """End feeds of a subscription, or the subscription."""
        done = m.Unsubscribed(message.subscription)
        if link is None:
            self._effects.append(SendToLink(request.link, done, request.corr))
            return
        subscription = link.subscriptions.get(message.subscription)
        if subscription is not None:
            # Grants of this pass go out before the reply: after Unsubscribed the client receives none.
            self._grants.send_link_grants(link)
            if message.feeds:
                for number in message.feeds:
                    feed = subscription.feeds.get(number)
                    if feed is not None:
                        self._drop_feed(feed)
                self._grants.serve_subscription(subscription)
            else:
                self._drop_subscription(subscription)
        self._grants.send_message(link, done, request.corr)

    def return_grants(self, request: LinkRequestReceived, link: Link | None) -> None:
        """Process the positions of readers that return their grants."""
        if link is None:
            self._effects.append(SendToLink(request.link, m.SubscriptionsLost()))
            return
        rows = grant_return_rows(request.attachment)
        now_ms, subscriptions = self._grants.now_ms, link.subscriptions
        touched: dict[SchedulerSubscription, None] = {}
        for number, feed_number, after, is_consumed in rows:
            subscription = subscriptions.get(number)
            feed = subscription.feeds.get(feed_number) if subscription is not None else None
            if subscription is None or feed is None:
                continue
            feed.after = after
            topic = feed.topic
            if is_consumed:
                self._priorities.record_consumption(topic, now_ms)
            if topic.is_lost:
                # The reader still works with the topic, so the topic may exist again.
                self._shards[topic.shard].slots_to_read[topic] = None
            if feed.state is FeedGrantState.GRANTED:
                feed.state = FeedGrantState.IDLE
                subscription.free += 1
                is_behind = after < topic.readable_until and not topic.is_lost
                if is_behind and self._grants.coalescing and after >= topic.offered_until:
                    is_behind = topic not in self._grants.coalescing
                if is_behind:
                    feed.record_still_behind(now_ms)
                else:
                    feed.behind_since_ms = -1
                if feed.needs_recheck or is_behind:
                    self._grants.offer_feed(feed, now_ms)
                else:
                    topic.idle[feed] = None
            elif feed.state is FeedGrantState.READY and not feed.is_lagging:
                self._grants.reset_feed(feed)
            elif feed.state is FeedGrantState.IDLE and feed.is_lagging:
                self._grants.offer_feed(feed, now_ms)
            touched[subscription] = None
        for subscription in touched:
            if subscription.ready is not None:
                self._grants.serve_subscription(subscription)

    def _detach_feed(self, feed: SchedulerFeed, topic: SchedulerTopic) -> None:
        """Remove a feed from a topic. A topic without feeds is no longer followed."""
        topic.feeds.pop(feed, None)
        topic.idle.pop(feed, None)
        if not topic.feeds:
            self._priorities.forget(topic)
            self._grants.coalescing.pop(topic, None)
            self._shards[topic.shard].unfollow_topic(topic)

    def _drop_feed(self, feed: SchedulerFeed) -> None:
        self._grants.reset_feed(feed)
        self._detach_feed(feed, feed.topic)
        del feed.subscription.feeds[feed.number]
        self.feed_count -= 1

    def _drop_subscription(self, subscription: SchedulerSubscription) -> None:
        for feed in list(subscription.feeds.values()):
            self._drop_feed(feed)
        self._set_names(subscription, False)
        del subscription.link.subscriptions[subscription.number]
        self.count -= 1

    def drop_link(self, link: Link) -> None:
        """Remove a link with all its subscriptions."""
        for subscription in list(link.subscriptions.values()):
            self._drop_subscription(subscription)
        self._grants.forget_link(link)
        del self.links[link.id]
