"""The scheduler's decisions: which feed gets a grant to read, and when. Pure.

A link subscribes to feeds. A feed is *lagging* while its topic has records that its reader has no grant for.

- A lagging feed gets a *grant* at once if its subscription has credit and no other feed waits there.
  Otherwise it waits in the ready set of the subscription.
- The link returns each grant with the position of its reader. If that position is still below the end of
  the topic, the feed is lagging again.

The scheduler keeps no durable state. Readers read from the files, and after a restart they subscribe again
with their positions. subscriptions.py has the feeds and their positions, topic_progress.py the ends of the
topics. grants.py chooses the next feed and sends the grants.

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

from collections.abc import Callable, Sequence
from typing import Any

from ringlog.actors.scheduler.delivery.feeds import FeedGrantState, FollowedShard, SchedulerFeed
from ringlog.actors.scheduler.delivery.grants import GrantDispatcher
from ringlog.actors.scheduler.delivery.lag import Lag, largest_lags
from ringlog.actors.scheduler.delivery.priority_changes import PriorityChanges
from ringlog.actors.scheduler.delivery.subscriptions import LinkSubscriptions
from ringlog.actors.scheduler.delivery.topic_progress import TopicProgress
from ringlog.actors.scheduler.events import (
    DeliveryPressureChanged,
    DurableMarkMoved,
    GrantsUnsent,
    LinkRequestReceived,
    NewsRows,
    SendToLink,
    ShardGivenUp,
    SlotFactsRead,
    TopicNamesChanged,
)
from ringlog.contract import Tick
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.errors import InvalidRequest, InvariantViolation, Refused
from ringlog.limits import (
    AGING_TICK_MS,
    FEEDS_PER_SCHEDULER_MAX,
    LAGS_PER_MESSAGE_MAX,
    LINK_SILENCE_MS,
    LINKS_PER_SCHEDULER_MAX,
)

_TICK_NS = AGING_TICK_MS * 1_000_000


class Scheduler:
    """The core of one scheduler.

    Each call of `handle` starts with a Tick, or reports results of its effects.
    """

    def __init__(self, number: int, incarnation: int, shards: int) -> None:
        self.number = number
        self.shards: list[FollowedShard] = [FollowedShard(n) for n in range(shards)]
        self._tick_ns = 0
        self._effects: list[Any] = []
        self.grants: GrantDispatcher = GrantDispatcher(self.shards, self._effects)
        self._priorities = PriorityChanges()
        self._progress = TopicProgress(self.shards, self.grants, self._priorities, self._effects)
        self.subscriptions: LinkSubscriptions = LinkSubscriptions(
            number, incarnation, self.shards, self.grants, self._priorities, self._effects
        )
        self._names_changed = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            LinkRequestReceived: self._request_received,
            NewsRows: self._progress.news_rows,
            DurableMarkMoved: self._progress.durable_mark_moved,
            DeliveryPressureChanged: self._pressure_changed,
            TopicNamesChanged: self._topic_names_changed,
            ShardGivenUp: self._progress.shard_given_up,
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
        if not self._progress.slot_read_failed and any(shard.slots_to_read for shard in self.shards):
            return 0
        dispatcher = self.grants
        is_waiting = (
            dispatcher.ready_count
            or dispatcher.blocked_links
            or self._progress.slot_read_failed
            or self._names_changed
        )
        due_ns, coalesced_ns = self._tick_ns if is_waiting else None, dispatcher.coalesce_due_ns
        return min((each for each in (due_ns, coalesced_ns) if each is not None), default=None)

    @property
    def has_name_watchers(self) -> bool:
        """Whether any link is notified of created and deleted topics."""
        return bool(self.subscriptions.name_watchers)

    def awaits_durable(self, shard: int) -> bool:
        """Return whether any strong subscription waits for the shard's durable mark."""
        return bool(self.shards[shard].awaiting_durable)

    def is_followed(self, shard: int) -> bool:
        """Return whether any feed follows a topic of the shard, so that its news must be read."""
        return self.shards[shard].is_followed

    def furthest_behind(self) -> Lag | None:
        """Return the subscription with the largest lag, or None if there is no subscription."""
        return next(iter(largest_lags(self.subscriptions.links.values(), self.grants.now_ms, 1)), None)

    @property
    def topics(self) -> int:
        """Number of followed topics. A topic with eventual and strong feeds counts twice."""
        return sum(len(shard.slots) for shard in self.shards)

    # -- time -----------------------------------------------------------------------------------------

    def _tick(self, tick: Tick) -> None:
        self.grants.now_ms = tick.monotonic_ns // 1_000_000
        self.grants.now_ns = tick.monotonic_ns
        self.grants.offer_coalesced_due()
        if tick.monotonic_ns >= self._tick_ns:
            self._tick_ns = tick.monotonic_ns + _TICK_NS
            self._on_aging_tick()
        if not self._progress.slot_read_failed:
            for shard in self.shards:
                self._progress.read_due_slots(shard)

    def _on_aging_tick(self) -> None:
        self._progress.slot_read_failed = False
        for link in list(self.subscriptions.links.values()):
            if self.grants.now_ms - link.last_heard_ms < LINK_SILENCE_MS:
                break
            self.subscriptions.drop_link(link)
        if self._names_changed:
            self._names_changed = False
            for id in self.subscriptions.name_watchers:
                self.grants.send_message(self.subscriptions.links[id], m.TopicsChanged(), 0)
        self._priorities.refresh(self.grants.now_ms)
        self.grants.serve_shed()
        self.grants.retry_blocked_links(self.subscriptions.links)

    # -- requests of links ----------------------------------------------------------------------------

    def _request_received(self, request: LinkRequestReceived) -> None:
        link = self.subscriptions.links.get(request.link)
        if link is not None:
            link.last_heard_ms = self.grants.now_ms
            self.subscriptions.links[request.link] = self.subscriptions.links.pop(request.link)
        try:
            match request.message:
                case m.GrantsReturned():
                    self.subscriptions.return_grants(request, link)
                case m.Subscribe():
                    self.subscriptions.subscribe(request, request.message)
                case m.Unsubscribe():
                    self.subscriptions.unsubscribe(request, request.message, link)
                case m.ListConsumers():
                    self._effects.append(
                        SendToLink(request.link, self._consumers(request.message), request.corr)
                    )
                case _:
                    kind = type(request.message).__name__
                    raise InvalidRequest("a scheduler does not handle this kind of request", kind=kind)
        except Refused as e:
            error = error_reply(e)
            self._effects.append(SendToLink(request.link, error, request.corr))

    def _consumers(self, message: m.ListConsumers) -> m.ConsumersReply:
        most = min(max(message.most, 0), LAGS_PER_MESSAGE_MAX)
        found = largest_lags(self.subscriptions.links.values(), self.grants.now_ms, most)
        consumers = [m.Consumer(lag.link.hex(), lag.number, lag.lag_ms, *lag[3:]) for lag in found]
        return m.ConsumersReply(self.number, consumers)

    # -- facts -----------------------------------------------------------------------------------------

    def _topic_names_changed(self, _: TopicNamesChanged) -> None:
        """Record the change. Links are notified at the next aging tick: many changes cause one message."""
        self._names_changed = bool(self.subscriptions.name_watchers)

    def _slot_facts_read(self, result: SlotFactsRead) -> None:
        self._progress.slot_facts_read(result)
        reply = result.request.reply
        if reply is not None:
            link = self.subscriptions.links.get(reply.link)
            if link is not None:
                self.grants.send_message(link, reply.message, reply.corr)

    # -- under pressure -------------------------------------------------------------------------------

    def _pressure_changed(self, pressed: DeliveryPressureChanged) -> None:
        for shard, gap_ns in zip(self.shards, pressed.gaps_ns, strict=True):
            shard.gap_ns = gap_ns
        self.grants.is_shedding = pressed.is_shedding
        if not pressed.is_shedding:
            self.grants.serve_shed()

    # -- undelivered grants ---------------------------------------------------------------------------

    def _grants_unsent(self, unsent: GrantsUnsent) -> None:
        link = self.subscriptions.links.get(unsent.send.link)
        if link is None:
            return
        if unsent.is_disconnected:
            self.subscriptions.drop_link(link)
        else:
            self.grants.take_back_grants(link, unsent.send.feeds)

    # -- invariants -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check T1 to T6 with a full recount. Call it only between calls of `handle`.

        Raises:
            InvariantViolation: an invariant does not hold.
        """
        feeds = ready = subscriptions = 0
        for link in self.subscriptions.links.values():
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
        counted = (self.subscriptions.feed_count, self.grants.ready_count, self.subscriptions.count)
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
            feeds <= FEEDS_PER_SCHEDULER_MAX and len(self.subscriptions.links) <= LINKS_PER_SCHEDULER_MAX,
            "T6 bounds",
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
