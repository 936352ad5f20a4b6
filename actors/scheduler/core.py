"""The scheduler's decisions: which feed gets a grant to read, and when. Pure.

A link subscribes to feeds. A feed is *lagging* while its topic has records that its reader has no grant for.

- A lagging feed gets a *grant* at once if its subscription has credit and no other feed waits there.
  Otherwise it waits in the ready set of the subscription.
- The link returns each grant with the position of its reader. If that position is still below the end of
  the topic, the feed is lagging again.

The scheduler keeps no durable state. Readers read from the files, and after a restart they subscribe again
with their positions. This module tracks the feeds of each topic and their positions. grants.py chooses the
next feed and sends the grants.

Invariants (docs/reference/invariants.md):

- A subscription never has more outstanding grants than credit (T1).
- A feed has at most one grant, or waits once in its ready set, or neither (T2).
- No feed waits in a ready set while its subscription has credit and its link accepts messages. Bands that
  the governor sheds are the exception (T3).
- A lagging feed has a grant or waits, or the wake-ups of its topic are being coalesced (T4).
- Ended feeds, subscriptions and links receive nothing (T5).
- All limits hold, and counters equal a recount (T6).

States of a feed: *idle → granted*, *idle → ready → granted*, *granted → idle* or *ready*; any → removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringlog.actors.scheduler.delivery.feeds import (
    FeedGrantState,
    FollowedShard,
    Link,
    SchedulerFeed,
    SchedulerReadHint,
    SchedulerSubscription,
    SchedulerTopic,
)
from ringlog.actors.scheduler.delivery.grants import GrantDispatcher
from ringlog.actors.scheduler.delivery.lag import Lag, largest_lags
from ringlog.actors.scheduler.events import (
    BoardMark,
    DeliveryPressureChanged,
    DurableMarkMoved,
    GrantsUnsent,
    LinkRequestReceived,
    NewsRows,
    ReadSlots,
    SendToLink,
    ShardGivenUp,
    SlotFacts,
    SlotFactsRead,
    TopicNamesChanged,
)
from ringlog.board.layout import SLOT_MASK, VOLATILE_BIT
from ringlog.contract import Tick
from ringlog.envelope import messages as m
from ringlog.envelope.messages.delivery import TAKEN_WORDS
from ringlog.envelope.refusal import error_reply
from ringlog.errors import InvalidRequest, InvariantViolation, Refused, Throttled
from ringlog.limits import (
    AGING_TICK_MS,
    CREDIT_MAX,
    DURABLE_WAITS_MAX,
    FEEDS_PER_MESSAGE_MAX,
    FEEDS_PER_SCHEDULER_MAX,
    FEEDS_PER_SUBSCRIPTION_MAX,
    LAGS_PER_MESSAGE_MAX,
    LINK_SILENCE_MS,
    LINKS_PER_SCHEDULER_MAX,
    REFRESHES_PER_TICK_MAX,
    SLOTS_PER_SCAN_MAX,
    SUBSCRIPTIONS_PER_LINK_MAX,
    WATCHED_SLOTS_MAX,
)
from ringlog.topic.priority import TopicPriority, auto_of

NUMBER_MAX = (1 << 32) - 1
FILTER_ROWS_MIN = 16
"""From this many rows on, numpy filters the rows of watched slots in one operation."""
AUTO_STEP = AGING_TICK_MS // 10
"""Least rise of a topic's automatic priority, in points, that moves its waiting feeds in their ready sets."""
_RETRY_AFTER_MS = 1_000
_TICK_NS = AGING_TICK_MS * 1_000_000


class Scheduler:
    """The core of one scheduler.

    Each call of `handle` starts with a Tick, or reports results of its effects.
    """

    def __init__(self, number: int, incarnation: int, shards: int) -> None:
        self.number, self.incarnation = number, incarnation
        self.shards = [FollowedShard(n) for n in range(shards)]
        self.links: dict[bytes, Link] = {}
        """In the order of the last message received; the link that has been silent for longest is first."""
        self.feeds = 0
        self.subscriptions = 0
        self._now_ms = self._tick_ns = 0
        self._effects: list[Any] = []
        self.grants = GrantDispatcher(self.shards, self._effects)
        self._name_watchers: dict[bytes, None] = {}
        """Links that are notified of created and deleted topics."""
        self._names_changed = False
        self._reprioritized: dict[SchedulerTopic, None] = {}
        """Topics whose priority changed while feeds waited for them."""
        self._to_refresh: deque[SchedulerFeed] = deque()
        self._slot_read_failed = False
        """True if a slot could not be read. Slots are read again from the next aging tick on."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            LinkRequestReceived: self._request_received,
            NewsRows: self._news_rows,
            DurableMarkMoved: self._durable_mark_moved,
            DeliveryPressureChanged: self._pressure_changed,
            TopicNamesChanged: self._topic_names_changed,
            ShardGivenUp: self._shard_given_up,
            GrantsUnsent: self._grants_unsent,
            SlotFactsRead: self._slot_facts_read,
        }

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Process events in order and return the resulting effects, in order."""
        for event in events:
            self._handlers[type(event)](event)
        self.grants.send_grants()
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # -- queries of the shell -------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next Tick in ns, 0 for at once, None if only other events need one."""
        if not self._slot_read_failed and any(shard.slots_to_read for shard in self.shards):
            return 0
        dispatcher = self.grants
        is_waiting = (
            dispatcher.ready_count
            or dispatcher.blocked_links
            or self._slot_read_failed
            or self._names_changed
        )
        due_ns, coalesced_ns = self._tick_ns if is_waiting else None, dispatcher.coalesce_due_ns
        return min((each for each in (due_ns, coalesced_ns) if each is not None), default=None)

    @property
    def has_name_watchers(self) -> bool:
        """Whether any link is notified of created and deleted topics."""
        return bool(self._name_watchers)

    def awaits_durable(self, shard: int) -> bool:
        """Return whether any strong subscription waits for the shard's durable mark."""
        return bool(self.shards[shard].awaiting_durable)

    def is_followed(self, shard: int) -> bool:
        """Return whether any feed follows a topic of the shard, so that its news must be read."""
        return self.shards[shard].is_followed

    def furthest_behind(self) -> Lag | None:
        """Return the subscription with the largest lag, or None if there is no subscription."""
        return next(iter(largest_lags(self.links.values(), self._now_ms, 1)), None)

    @property
    def topics(self) -> int:
        """Number of followed topics. A topic with eventual and strong feeds counts twice."""
        return sum(len(shard.slots) for shard in self.shards)

    # -- time -----------------------------------------------------------------------------------------

    def _tick(self, tick: Tick) -> None:
        self._now_ms = self.grants.now_ms = tick.monotonic_ns // 1_000_000
        self.grants.now_ns = tick.monotonic_ns
        self.grants.offer_coalesced_due()
        if tick.monotonic_ns >= self._tick_ns:
            self._tick_ns = tick.monotonic_ns + _TICK_NS
            self._on_aging_tick()
        if not self._slot_read_failed:
            for shard in self.shards:
                self._read_due_slots(shard)

    def _on_aging_tick(self) -> None:
        self._slot_read_failed = False
        for link in list(self.links.values()):
            if self._now_ms - link.last_heard_ms < LINK_SILENCE_MS:
                break
            self._drop_link(link)
        if self._names_changed:
            self._names_changed = False
            for id in self._name_watchers:
                self.grants.send_message(self.links[id], m.TopicsChanged(), 0)
        self._refresh()
        self.grants.serve_shed()
        self.grants.retry_blocked_links(self.links)

    def _read_due_slots(self, shard: FollowedShard) -> None:
        """Request the slots that are due, at most SLOTS_PER_SCAN_MAX of them."""
        if not shard.slots_to_read:
            return
        topics = []
        for topic in shard.slots_to_read:
            topics.append(topic)
            if len(topics) == SLOTS_PER_SCAN_MAX:
                break
        for topic in topics:
            del shard.slots_to_read[topic]
        self._effects.append(ReadSlots(shard.number, tuple(topics)))

    def _refresh(self) -> None:
        """Move waiting feeds of topics whose priority changed, at most REFRESHES_PER_TICK_MAX of them."""
        if not self._to_refresh:
            lifted, self._reprioritized = self._reprioritized, {}
            for topic in lifted:
                self._to_refresh.extend(topic.waiting)
        for _ in range(min(len(self._to_refresh), REFRESHES_PER_TICK_MAX)):
            feed = self._to_refresh.popleft()
            if feed.subscription.ready is not None:
                feed.subscription.ready.refresh(feed, self._now_ms)

    # -- requests of links ----------------------------------------------------------------------------

    def _request_received(self, request: LinkRequestReceived) -> None:
        link = self.links.get(request.link)
        if link is not None:
            link.last_heard_ms = self._now_ms
            self.links[request.link] = self.links.pop(request.link)
        try:
            match request.message:
                case m.Taken():
                    self._grants_returned(request, link)
                case m.Subscribe():
                    self._subscribe(request, request.message)
                case m.Unsubscribe():
                    self._unsubscribe(request, request.message, link)
                case m.ConsumersAsk():
                    self._effects.append(
                        SendToLink(request.link, self._consumers(request.message), request.corr)
                    )
                case _:
                    kind = type(request.message).__name__
                    raise InvalidRequest("a scheduler does not handle this kind of request", kind=kind)
        except Refused as e:
            error = error_reply(e)
            self._effects.append(SendToLink(request.link, error, request.corr))

    def _consumers(self, message: m.ConsumersAsk) -> m.ConsumersReply:
        most = min(max(message.most, 0), LAGS_PER_MESSAGE_MAX)
        found = largest_lags(self.links.values(), self._now_ms, most)
        consumers = [m.Consumer(lag.link.hex(), lag.number, lag.lag_ms, *lag[3:]) for lag in found]
        return m.ConsumersReply(self.number, consumers)

    def _subscribe(self, request: LinkRequestReceived, message: m.Subscribe) -> None:
        link = self.links.get(request.link)
        subscription = link.subscriptions.get(message.subscription) if link is not None else None
        self._check_limits(message, link, subscription)
        if link is None:
            link = self.links[request.link] = Link(request.link)
            link.last_heard_ms = self._now_ms
        if subscription is None:
            subscription = SchedulerSubscription(
                link, message.subscription, message.credit, is_strong=message.strong
            )
            link.subscriptions[message.subscription] = subscription
            self.subscriptions += 1
        subscription.free += message.credit - subscription.credit
        subscription.credit = message.credit
        self._set_names(subscription, message.names)
        topics_by_shard: dict[int, dict[SchedulerTopic, None]] = {}
        for feed_request in message.feeds:
            topic = self._topic_of(feed_request, is_strong=subscription.is_strong)
            self._place_feed(subscription, feed_request.feed, topic, feed_request.after)
            topics_by_shard.setdefault(topic.shard, {})[topic] = None
        self.grants.serve_subscription(subscription)
        done = SendToLink(
            request.link, m.Subscribed(subscription.number, self.number, self.incarnation), request.corr
        )
        if not topics_by_shard:
            self.grants.send_message(link, done.message, request.corr)
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
            ("feeds_per_scheduler", self.feeds + added, FEEDS_PER_SCHEDULER_MAX),
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
            self._name_watchers[link.id] = None
        else:
            self._name_watchers.pop(link.id, None)

    def _topic_of(self, feed_request: m.Feed, *, is_strong: bool) -> SchedulerTopic:
        """Return the topic of a feed; follow it if it is new.

        A client may have learned the topic's place from an engine with more shards. A shard number that does
        not exist is replaced by the last shard. If the slot there contains another topic, the topic is marked
        lost and the client receives a recheck grant.
        """
        number = min(feed_request.shard, len(self.shards) - 1)
        shard, key = self.shards[number], (feed_request.slot, feed_request.topic_id)
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
            self.feeds += 1
            topic.feeds[feed] = topic.idle[feed] = None
        else:
            is_granted = feed.state is FeedGrantState.GRANTED
            self.grants.reset_feed(feed)
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
        feed.needs_recheck |= topic.is_lost or self.shards[topic.shard].is_given_up
        if feed.state is FeedGrantState.IDLE and feed.is_lagging:
            self.grants.offer_feed(feed, self._now_ms)

    def _unsubscribe(self, request: LinkRequestReceived, message: m.Unsubscribe, link: Link | None) -> None:
        done = m.Unsubscribed(message.subscription)
        if link is None:
            self._effects.append(SendToLink(request.link, done, request.corr))
            return
        subscription = link.subscriptions.get(message.subscription)
        if subscription is not None:
            # Grants of this pass go out before the reply: after Unsubscribed the client receives none.
            self.grants.send_link_grants(link)
            if message.feeds:
                for number in message.feeds:
                    feed = subscription.feeds.get(number)
                    if feed is not None:
                        self._drop_feed(feed)
                self.grants.serve_subscription(subscription)
            else:
                self._drop_subscription(subscription)
        self.grants.send_message(link, done, request.corr)

    def _grants_returned(self, request: LinkRequestReceived, link: Link | None) -> None:
        if link is None:
            self._effects.append(SendToLink(request.link, m.SubscriptionsLost()))
            return
        data = request.attachment or b""
        if len(data) % (8 * TAKEN_WORDS):
            raise InvalidRequest(
                f"attachment of Taken must be a multiple of {8 * TAKEN_WORDS} bytes, got {len(data)}",
                bytes=len(data),
            )  # fmt: skip
        rows = np.frombuffer(data, dtype=np.uint64).reshape(-1, TAKEN_WORDS).tolist()
        now_ms, subscriptions = self._now_ms, link.subscriptions
        touched: dict[SchedulerSubscription, None] = {}
        for number, feed_number, after, is_consumed in rows:
            subscription = subscriptions.get(number)
            feed = subscription.feeds.get(feed_number) if subscription is not None else None
            if subscription is None or feed is None:
                continue
            feed.after = after
            topic = feed.topic
            if is_consumed:
                self._record_consumption(topic, now_ms)
            if topic.is_lost:
                # The reader still works with the topic, so the topic may exist again.
                self.shards[topic.shard].slots_to_read[topic] = None
            if feed.state is FeedGrantState.GRANTED:
                feed.state = FeedGrantState.IDLE
                subscription.free += 1
                is_behind = after < topic.readable_until and not topic.is_lost
                if is_behind and self.grants.coalescing and after >= topic.offered_until:
                    is_behind = topic not in self.grants.coalescing
                if is_behind:
                    feed.record_still_behind(now_ms)
                else:
                    feed.behind_since_ms = -1
                if feed.needs_recheck or is_behind:
                    self.grants.offer_feed(feed, now_ms)
                else:
                    topic.idle[feed] = None
            elif feed.state is FeedGrantState.READY and not feed.is_lagging:
                self.grants.reset_feed(feed)
            elif feed.state is FeedGrantState.IDLE and feed.is_lagging:
                self.grants.offer_feed(feed, now_ms)
            touched[subscription] = None
        for subscription in touched:
            if subscription.ready is not None:
                self.grants.serve_subscription(subscription)

    def _record_consumption(self, topic: SchedulerTopic, now_ms: int) -> None:
        """Record that a consumer read the topic, which raises its automatic priority.

        If the rise is at least AUTO_STEP points, the topic's waiting feeds are moved at the next aging tick.
        """
        priority = topic.priority
        before, priority.consumed_ms = priority.consumed_ms, now_ms
        if not topic.waiting or not priority.is_auto or topic in self._reprioritized:
            return
        if before is None or auto_of(0) - auto_of(now_ms - before) >= AUTO_STEP:
            self._reprioritized[topic] = None

    # -- reports of shards ----------------------------------------------------------------------------

    def _news_rows(self, news: NewsRows) -> None:
        shard = self.shards[news.shard]
        if not news.is_complete:
            self._reread_all_slots(shard)
        rows = news.rows
        if len(rows) >= FILTER_ROWS_MIN:
            slots = rows[:, 0] & SLOT_MASK
            rows = rows[slots < len(shard.is_watched)]
            rows = rows[shard.is_watched[(rows[:, 0] & SLOT_MASK).astype(np.intp)]]
        moved: dict[SchedulerTopic, None] = {}
        for packed, topic_id, epoch, *range_words in rows.tolist():
            key = (packed & SLOT_MASK, topic_id)
            hint = SchedulerReadHint._make(range_words)
            topic, strong = shard.topics.get(key), shard.strong_topics.get(key)
            if not hint.file_id:
                # A row without a place announces a deletion: read the slot again.
                shard.slots_to_read.update((each, None) for each in (topic, strong) if each is not None)
                continue
            if topic is not None and self._is_current_epoch(topic, epoch):
                self._extend(topic, hint)
                moved[topic] = None
            if strong is not None and self._is_current_epoch(strong, epoch):
                if packed & VOLATILE_BIT or (hint.file_id, hint.stop) <= shard.durable:
                    self._extend(strong, hint)
                    moved[strong] = None
                else:
                    shard.awaiting_durable.append((hint.file_id, hint.stop, strong, epoch, hint))
        for topic in moved:
            self.grants.wake_topic(shard, topic)
        if len(shard.awaiting_durable) > DURABLE_WAITS_MAX:
            shard.awaiting_durable.clear()
            shard.slots_to_read.update(dict.fromkeys(shard.strong_topics.values()))

    def _is_current_epoch(self, topic: SchedulerTopic, epoch: int) -> bool:
        """Return whether a row belongs to the topic's epoch or a later one. A later epoch is started here."""
        if epoch < topic.epoch:
            return False
        if epoch > topic.epoch:
            self._begin_epoch(topic, epoch)
        elif topic.is_lost:
            topic.is_lost = False
            self.grants.offer_topic(topic)
        return True

    @staticmethod
    def _extend(topic: SchedulerTopic, hint: SchedulerReadHint) -> None:
        topic.hints.append(hint)
        topic.readable_until = max(topic.readable_until, hint.last_seq)

    def _reread_all_slots(self, shard: FollowedShard) -> None:
        """Schedule a re-read of all slots, because rows of news were missed.

        The shard may have restarted, so positions that wait for its durable mark may no longer be valid.
        """
        shard.awaiting_durable.clear()
        shard.durable = (0, 0)
        for topics in (shard.topics, shard.strong_topics):
            for topic in topics.values():
                topic.hints.clear()
                shard.slots_to_read[topic] = None

    def _durable_mark_moved(self, moved: DurableMarkMoved) -> None:
        shard = self.shards[moved.shard]
        shard.durable = moved.mark
        pending = shard.awaiting_durable
        reached: dict[SchedulerTopic, None] = {}
        while pending and pending[0][:2] <= moved.mark:
            _, _, topic, epoch, hint = pending.popleft()
            if topic.epoch != epoch or not topic.feeds:
                continue
            if hint.file_id:
                self._extend(topic, hint)
            else:
                topic.readable_until = max(topic.readable_until, hint.last_seq)
            reached[topic] = None
        for topic in reached:
            self.grants.wake_topic(shard, topic)

    def _topic_names_changed(self, _: TopicNamesChanged) -> None:
        """Record the change. Links are notified at the next aging tick: many changes cause one message."""
        self._names_changed = bool(self._name_watchers)

    def _shard_given_up(self, given_up: ShardGivenUp) -> None:
        shard = self.shards[given_up.shard]
        shard.is_given_up = True
        for topics in (shard.topics, shard.strong_topics):
            for topic in topics.values():
                self._recheck_feeds(topic)

    def _slot_facts_read(self, result: SlotFactsRead) -> None:
        read_slots, shard = result.request, self.shards[result.request.shard]
        facts: Iterable[SlotFacts | None] = (
            result.facts if result.facts is not None else [None] * len(read_slots.topics)
        )
        for topic, fact in zip(read_slots.topics, facts, strict=True):
            if not topic.feeds:
                continue
            topic.seen_ms = self._now_ms
            if fact is None and shard.is_given_up:
                continue
            if fact is None:
                shard.slots_to_read[topic] = None
                self._slot_read_failed = True
            else:
                self._apply_slot_facts(shard, topic, fact, result.published)
        if read_slots.reply is not None:
            link = self.links.get(read_slots.reply.link)
            if link is not None:
                self.grants.send_message(link, read_slots.reply.message, read_slots.reply.corr)

    def _apply_slot_facts(
        self, shard: FollowedShard, topic: SchedulerTopic, fact: SlotFacts, published: BoardMark
    ) -> None:
        if fact.topic_id != topic.topic_id or not fact.is_live:
            self._mark_lost(topic)
            return
        if fact.epoch < topic.epoch:
            return  # These facts are older than a published row that was already processed.
        priority = topic.priority
        if (priority.base, priority.is_auto) != (fact.base, fact.is_auto):
            priority.base, priority.is_auto = fact.base, fact.is_auto
            self._reprioritized[topic] = None
        if fact.epoch > topic.epoch:
            self._begin_epoch(topic, fact.epoch)
        topic.is_lost = False
        if not topic.is_strong or not fact.is_logged or published <= shard.durable:
            topic.readable_until = max(topic.readable_until, fact.head)
        elif fact.head > topic.readable_until:
            shard.awaiting_durable.append(
                (*published, topic, fact.epoch, SchedulerReadHint(0, fact.head, 0, 0, 0))
            )
        self.grants.offer_topic(topic)

    def _begin_epoch(self, topic: SchedulerTopic, epoch: int) -> None:
        """Start an epoch of the topic.

        If it replaces an epoch, readers of that one receive recheck grants.
        """
        is_remade = bool(topic.epoch)
        topic.epoch, topic.readable_until, topic.is_lost = epoch, 0, False
        topic.hints.clear()
        if is_remade:
            self._recheck_feeds(topic)

    def _mark_lost(self, topic: SchedulerTopic) -> None:
        if not topic.is_lost:
            topic.is_lost = True
            topic.hints.clear()
            self._recheck_feeds(topic)

    def _recheck_feeds(self, topic: SchedulerTopic) -> None:
        for feed in topic.feeds:
            feed.needs_recheck = True
        self.grants.offer_topic(topic)

    # -- under pressure -------------------------------------------------------------------------------

    def _pressure_changed(self, pressed: DeliveryPressureChanged) -> None:
        for shard, gap_ns in zip(self.shards, pressed.gaps_ns, strict=True):
            shard.gap_ns = gap_ns
        self.grants.is_shedding = pressed.is_shedding
        if not pressed.is_shedding:
            self.grants.serve_shed()

    # -- undelivered grants ---------------------------------------------------------------------------

    def _grants_unsent(self, unsent: GrantsUnsent) -> None:
        link = self.links.get(unsent.send.link)
        if link is None:
            return
        if unsent.is_disconnected:
            self._drop_link(link)
        else:
            self.grants.take_back_grants(link, unsent.send.feeds)

    # -- removal --------------------------------------------------------------------------------------

    def _detach_feed(self, feed: SchedulerFeed, topic: SchedulerTopic) -> None:
        """Remove a feed from a topic. A topic without feeds is no longer followed."""
        topic.feeds.pop(feed, None)
        topic.idle.pop(feed, None)
        if not topic.feeds:
            self._reprioritized.pop(topic, None)
            self.grants.coalescing.pop(topic, None)
            self.shards[topic.shard].unfollow_topic(topic)

    def _drop_feed(self, feed: SchedulerFeed) -> None:
        self.grants.reset_feed(feed)
        self._detach_feed(feed, feed.topic)
        del feed.subscription.feeds[feed.number]
        self.feeds -= 1

    def _drop_subscription(self, subscription: SchedulerSubscription) -> None:
        for feed in list(subscription.feeds.values()):
            self._drop_feed(feed)
        self._set_names(subscription, False)
        del subscription.link.subscriptions[subscription.number]
        self.subscriptions -= 1

    def _drop_link(self, link: Link) -> None:
        for subscription in list(link.subscriptions.values()):
            self._drop_subscription(subscription)
        self.grants.forget_link(link)
        del self.links[link.id]

    # -- invariants -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check T1 to T6 with a full recount. Call it only between calls of `handle`.

        Raises:
            InvariantViolation: an invariant does not hold.
        """
        feeds = ready = subscriptions = 0
        for link in self.links.values():
            _require_invariant(not link.granted_feeds, "T5 every grant was sent")
            for subscription in link.subscriptions.values():
                granted = sum(feed.state is FeedGrantState.GRANTED for feed in subscription.feeds.values())
                waiting = [feed for feed in subscription.feeds.values() if feed.state is FeedGrantState.READY]
                _require_invariant(
                    subscription.free == subscription.credit - granted, "T1 free credit is credit less grants"
                )
                _require_invariant(
                    (subscription.ready is not None) == bool(waiting),
                    "T2 a ready set exists while feeds wait",
                )
                _require_invariant(
                    (subscription in link.waiting) == bool(waiting), "T2 the link lists waiting subscriptions"
                )
                if subscription.ready is not None:
                    _require_invariant(len(subscription.ready) == len(waiting), "T2 each feed waits once")
                    _require_invariant(
                        all(feed in subscription.ready for feed in waiting),
                        "T2 the ready set holds the waiting feeds",
                    )
                    may_wait = link.is_blocked or (
                        self.grants.is_shedding and subscription in self.grants.shed_subscriptions
                    )
                    _require_invariant(
                        subscription.free <= 0 or may_wait, "T3 no feed waits while credit is free"
                    )
                for feed in subscription.feeds.values():
                    self._check_feed(feed)
                feeds += len(subscription.feeds)
                ready += len(waiting)
            subscriptions += len(link.subscriptions)
            _require_invariant(
                link.names == sum(each.names for each in link.subscriptions.values()), "T6 names"
            )
            _require_invariant(
                link.is_blocked == (link.id in self.grants.blocked_links), "T6 a blocked link is retried"
            )
        counted = (self.feeds, self.grants.ready_count, self.subscriptions)
        _require_invariant(counted == (feeds, ready, subscriptions), "T6 counts")
        _require_invariant(
            sum(self.grants.ready_by_band) == ready and min(self.grants.ready_by_band) >= 0,
            "T6 counts by band",
        )
        _require_invariant(
            all(each.ready is not None for each in self.grants.shed_subscriptions),
            "T6 a shed subscription waits",
        )
        _require_invariant(
            all(topic.feeds for topic in self.grants.coalescing), "T6 a coalesced topic has feeds"
        )
        _require_invariant(
            feeds <= FEEDS_PER_SCHEDULER_MAX and len(self.links) <= LINKS_PER_SCHEDULER_MAX, "T6 bounds"
        )
        known = 0
        for shard in self.shards:
            for topics in (shard.topics, shard.strong_topics):
                for topic in topics.values():
                    known += len(topic.feeds)
                    _require_invariant(bool(topic.feeds), "T5 a topic without feeds is forgotten")
        _require_invariant(known == feeds, "T5 topics know the feeds there are")

    def _check_feed(self, feed: SchedulerFeed) -> None:
        topic = feed.topic
        _require_invariant(feed in topic.feeds, "T5 the topic knows its feed")
        _require_invariant((feed in topic.idle) == (feed.state is FeedGrantState.IDLE), "T2 idle")
        _require_invariant((feed in topic.waiting) == (feed.state is FeedGrantState.READY), "T2 ready")
        is_cared_for = feed.state is not FeedGrantState.IDLE or topic in self.grants.coalescing
        _require_invariant(is_cared_for or not feed.is_lagging, "T4 a lagging feed is granted or waits")


def _require_invariant(is_so: bool, what: str) -> None:
    if not is_so:
        raise InvariantViolation(what)
