"""Delivery: the subscriptions of one client at the schedulers, restored on every new connection.

A *subscription* is a set of *feeds* (a topic and the position of its reader). Schedulers answer with *grants*
(*turns* in the messages): the reader may read a feed up to a position. Grants are hints and permissions,
never data, so all of this may be lost and requested again. On a new connection, or when a scheduler reports
that it does not know the client, Delivery sends all subscriptions again with the current positions of their
readers.

A client's session has one Delivery. The gateway has one for its clients. Nothing here blocks or locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ringlog.envelope.messages import (
    Feed,
    Grants,
    GrantsReturned,
    Subscribe,
    Subscribed,
    SubscriptionsLost,
    TopicInfo,
    TopicsChanged,
    Unsubscribe,
)
from ringlog.envelope.messages.delivery import GRANT_WORDS
from ringlog.errors import (
    InvalidRequest,
    RequestTimeout,
    RinglogError,
    Throttled,
    UsageError,
)
from ringlog.limits import CREDIT_MAX, FEEDS_PER_MESSAGE_MAX, FEEDS_PER_SUBSCRIPTION_MAX, LINK_SILENCE_MS
from ringlog.link.feed_relocation import RETRY_PAUSE_NS, TEMPORARY, FeedRelocation
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.grant_returns import RETURN_DELAY_NS, GrantReturns
from ringlog.link.peer import MS
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import DeliveryHost
from ringlog.link.subscription import UNBOUNDED, ClientSubscription, FeedState, LocationHint, ReadGrant
from ringlog.link.timers import Timer
from ringlog.placement import scheduler_of

KEEPALIVE_NS = LINK_SILENCE_MS * MS // 3
THROTTLED_PAUSE_NS_MAX = 1_000 * MS
"""Longest pause before a subscription that a limit refused is sent again."""
THROTTLED_NS_MAX = 2 * LINK_SILENCE_MS * MS
"""Time for which a subscription that was served before is sent again although a limit refuses it. Until then
the limit may count what ended with the connection: a scheduler forgets a silent client after
LINK_SILENCE_MS."""
NAMES_SCHEDULER = 0
"""The scheduler that reports changed topic names to this client. Each scheduler sees the names of all
shards."""
_LIMITS_OF_SCHEDULERS = {"feeds_per_scheduler", "subscriptions_per_link", "links"}
_THROTTLED_HINT = "use fewer subscriptions, or increase delivery.schedulers"


def _no_schedulers_error() -> InvalidRequest:
    return InvalidRequest(
        "this engine runs no scheduler (delivery.schedulers = 0): use reader()", instead="reader()"
    )


class Delivery:
    """All subscriptions of one host. Implements link.protocol.SchedulerListener."""

    def __init__(self, host: DeliveryHost, return_delay_ns: int = RETURN_DELAY_NS) -> None:
        """`return_delay_ns`: longest delay of returned grants if no reader requests more."""
        self._host = host
        self._subscriptions: dict[int, ClientSubscription] = {}
        self._numbers = 0
        self._alive: Timer | None = None
        self.returns: GrantReturns = GrantReturns(host, return_delay_ns)
        self._relocation = FeedRelocation(host, self._resubscribe_steps)

    # -- calls of a watch -------------------------------------------------------------------------------

    def open_subscription(self, *, credit: int, strong: bool, names: bool) -> ClientSubscription:
        """Return a new subscription without feeds. Raises UsageError for a credit out of range."""
        if not 1 <= credit <= CREDIT_MAX:
            raise UsageError(
                f"credit must be from 1 to {CREDIT_MAX}, got {credit}", found=credit, min=1, max=CREDIT_MAX
            )
        self._numbers += 1
        subscription = ClientSubscription(self._numbers, credit, strong, names)
        self._subscriptions[subscription.number] = subscription
        self._schedule_keepalive()
        return subscription

    def add_feeds(
        self, subscription: ClientSubscription, wanted: Iterable[tuple[TopicInfo, int]],
        on_numbered: Callable[[list[int]], None] = lambda numbers: None,
    ) -> Pending[list[int]]:  # fmt: skip
        """Add feeds, (topic, position) each.

        The result has their numbers and is done when the schedulers know them. `on_numbered` gets the numbers
        before that, and before the first grant. If a scheduler refuses, the result fails with the refusal,
        none of these feeds is added, and the other feeds of the subscription go on.

        Without feeds and with `names`, the result is done when changed topic names are reported.
        """
        return run_steps(self._add_steps(subscription, list(wanted), on_numbered))

    def self_grant(self, subscription: ClientSubscription, feed: int, *, after_ns: int = 0) -> None:
        """Create a grant for a feed without a scheduler, now or after `after_ns`."""
        if after_ns:
            now = self._host.clock.monotonic_ns()
            self._host.timers.call_at(now + after_ns, lambda: self.self_grant(subscription, feed))
            return
        state = subscription.feeds.get(feed)
        if state is not None and state.grant is None:
            subscription.offer(state, ReadGrant(feed, UNBOUNDED, None, self._now_ns(), is_self_granted=True))

    def check_names(self, subscription: ClientSubscription, *, after_ns: int) -> None:
        """Report changed topic names to a subscription with `names` after `after_ns`."""
        now_ns = self._host.clock.monotonic_ns()
        self._host.timers.call_at(now_ns + after_ns, lambda: self._names_may_have_changed(subscription))

    def drop_feeds(self, subscription: ClientSubscription, feeds: Iterable[int]) -> None:
        """Remove feeds. Numbers of feeds that do not exist are ignored."""
        by_scheduler: dict[int, list[int]] = {}
        for feed in feeds:
            state = subscription.feeds.pop(feed, None)
            if state is not None:
                by_scheduler.setdefault(state.scheduler, []).append(feed)
        for number, dropped in by_scheduler.items():
            for first in range(0, len(dropped), FEEDS_PER_MESSAGE_MAX):
                part = dropped[first : first + FEEDS_PER_MESSAGE_MAX]
                self._unsubscribe(number, Unsubscribe(subscription.number, part))

    def wait_for_work(self, *subscriptions: ClientSubscription) -> Pending[None]:
        """Return a result that is done when one of the subscriptions has work.

        Send all returned grants first.
        """
        self.returns.send_open()
        pending: Pending[None] = Pending()
        if any(subscription.has_work for subscription in subscriptions):
            pending.resolve(None)
            return pending
        for subscription in subscriptions:
            subscription.waiting = pending
        return pending

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """Close a subscription. Idempotent."""
        if self._subscriptions.pop(subscription.number, None) is None:
            return
        for number in list(subscription.schedulers):
            self._unsubscribe(number, Unsubscribe(subscription.number))
        subscription.feeds.clear()
        subscription.ready.clear()
        subscription.wake()
        if not self._subscriptions:
            if self._alive is not None:
                self._alive.cancel()
            self._alive = None
            self.returns.clear()

    # -- messages of schedulers --------------------------------------------------------------------------

    def schedulers_changed(self, schedulers: int) -> None:
        """Assign the feeds to the new number of schedulers.

        Each scheduler receives its feeds when it is connected. Without schedulers all subscriptions fail."""
        if not schedulers:
            self.fail_all(_no_schedulers_error())
            return
        for subscription in list(self._subscriptions.values()):
            if not subscription.schedulers:
                continue  # No scheduler received it yet.
            for state in list(subscription.feeds.values()):
                state.scheduler = scheduler_of(state.info.topic_id, schedulers)
            subscription.schedulers = {state.scheduler for state in subscription.feeds.values()}
            if subscription.names:
                subscription.schedulers.add(NAMES_SCHEDULER)
        for number in {number for each in self._subscriptions.values() for number in each.schedulers}:
            self._host.links.scheduler(number)

    def scheduler_connected(self, number: int) -> None:
        """Send all subscriptions of this scheduler again: it does not know them."""
        for subscription in list(self._subscriptions.values()):
            if number in subscription.schedulers:
                run_steps(self._send_again_steps(subscription, number))

    def scheduler_message(self, number: int, push: PeerReply) -> None:
        """Handle an unsolicited message: grants, changed topic names, or lost subscriptions."""
        message = push.message
        if isinstance(message, Grants):
            self._accept_grant_message(number, push.attachment)
        elif isinstance(message, TopicsChanged):
            # A reader that is woken may close subscriptions at once.
            for subscription in list(self._subscriptions.values()):
                self._names_may_have_changed(subscription)
        elif isinstance(message, SubscriptionsLost):
            # The scheduler considered this client dead and removed its ring.
            self._host.links.request_grants(number)
            self.scheduler_connected(number)

    def _names_may_have_changed(self, subscription: ClientSubscription) -> None:
        if subscription.names:
            subscription.names_changed = True
            subscription.wake()

    def _accept_grant_message(self, number: int, attachment: Any) -> None:
        if attachment is None or len(attachment) % (8 * GRANT_WORDS):
            return
        rows = np.frombuffer(attachment, dtype=np.uint64).reshape(-1, GRANT_WORDS).tolist()
        self._accept_grants(number, rows)

    def scheduler_grants(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Accept grants from shared memory.

        If some were lost, every feed without a grant is granted to its reader, which then checks it.
        """
        self._accept_grants(number, rows)
        if is_complete:
            return
        for subscription in list(self._subscriptions.values()):
            for feed, state in list(subscription.feeds.items()):
                if state.scheduler == number:
                    self.self_grant(subscription, feed)

    def _accept_grants(self, scheduler: int, rows: list[list[int]]) -> None:
        now_ns, subscriptions = self._now_ns(), self._subscriptions
        words: list[int] = []
        location: LocationHint | None = None
        unknown: dict[int, list[int]] = {}
        for number, feed, until, *hint in rows:
            subscription = subscriptions.get(number)
            if subscription is None or (state := subscription.feeds.get(feed)) is None:
                unknown.setdefault(number, []).append(feed)
                continue
            if until >= UNBOUNDED:
                self._relocation.relocate(subscription, feed, state)
            if state.grant is not None:
                # A second grant from a scheduler that has forgotten the first. Both are one grant.
                state.grant.until, state.grant.is_self_granted = max(state.grant.until, until), False
                continue
            if hint != words:
                # Many watches of one topic have grants with the same location.
                words, location = hint, LocationHint(*hint) if hint[2] else None
            subscription.offer(state, ReadGrant(feed, until, location, now_ns))
        for number, feeds in unknown.items():
            # A gateway may perform an Unsubscribe before the Subscribe that it received earlier. The grant of
            # the feed would then be out for as long as the connection lasts.
            request = Unsubscribe(number, feeds) if number in subscriptions else Unsubscribe(number)
            self._unsubscribe(scheduler, request)

    # -- subscribe ---------------------------------------------------------------------------------------

    def _add_steps(
        self, subscription: ClientSubscription, wanted: list[tuple[TopicInfo, int]],
        on_numbered: Callable[[list[int]], None],
    ) -> Steps[list[int]]:  # fmt: skip
        yield self._host.wait_connected()
        schedulers = self._host.links.schedulers
        if not schedulers:
            raise _no_schedulers_error()
        if len(subscription.feeds) + len(wanted) > FEEDS_PER_SUBSCRIPTION_MAX:
            raise UsageError(
                f"a subscription must have at most {FEEDS_PER_SUBSCRIPTION_MAX} topics, "
                f"got {len(subscription.feeds) + len(wanted)}: use several subscriptions",
                max=FEEDS_PER_SUBSCRIPTION_MAX,
            )
        numbers = []
        by_scheduler: dict[int, list[int]] = {}
        for info, after in wanted:
            subscription.feeds_made += 1
            feed = subscription.feeds_made
            number = scheduler_of(info.topic_id, schedulers)
            subscription.feeds[feed] = FeedState(info.topic, info, number, after)
            by_scheduler.setdefault(number, []).append(feed)
            numbers.append(feed)
        on_numbered(numbers)
        if subscription.names and NAMES_SCHEDULER not in subscription.schedulers:
            by_scheduler.setdefault(NAMES_SCHEDULER, [])
        # Registered before the first request is sent: if the number of schedulers changes, they are
        # reassigned.
        unserved = by_scheduler.keys() - subscription.schedulers
        subscription.schedulers.update(by_scheduler)
        try:
            for number, feeds in by_scheduler.items():
                if feeds and not self._is_followed(number, feeds, subscription):
                    self._host.links.request_grants(number)
                yield run_steps(self._send_steps(subscription, number, feeds))
                unserved.discard(number)
                if subscription.failure is not None:
                    raise subscription.failure
        except RinglogError:
            self.drop_feeds(subscription, numbers)
            # A scheduler that accepted nothing gets its next feeds, and the interest in names, as a new one.
            # It may have accepted a part, or all if its reply was lost: then nothing else would end that.
            refused = unserved - {each.scheduler for each in subscription.feeds.values()}
            subscription.schedulers -= refused
            for number in refused:
                self._unsubscribe(number, Unsubscribe(subscription.number))
            raise
        return numbers

    def _is_followed(self, number: int, feeds: list[int], subscription: ClientSubscription) -> bool:
        """Return True if this scheduler serves other feeds of this client than these."""
        new_feeds = set(feeds)
        return any(
            state.scheduler == number and not (each is subscription and feed in new_feeds)
            for each in self._subscriptions.values()
            for feed, state in each.feeds.items()
        )

    def _send_again_steps(self, subscription: ClientSubscription, number: int) -> Steps[None]:
        """Send a subscription to a scheduler that does not know it.

        Topic names may have changed in the meantime.
        """
        feeds = [feed for feed, state in subscription.feeds.items() if state.scheduler == number]
        yield from self._send_steps(subscription, number, feeds, is_known=True)
        if number == NAMES_SCHEDULER:
            self._names_may_have_changed(subscription)

    def _send_steps(
        self, subscription: ClientSubscription, number: int, feeds: list[int], *, is_known: bool = False
    ) -> Steps[None]:
        """Send feeds, and the interest in names, to one scheduler. Repeat after temporary refusals.

        Any other refusal is raised. With `is_known` the scheduler accepted them before: a request that timed
        out is repeated, too, and for THROTTLED_NS_MAX one that a limit refused. Any other refusal then ends
        the subscription."""
        host = self._host
        retriable = (*TEMPORARY, RequestTimeout) if is_known else TEMPORARY
        throttled_until_ns = self._now_ns() + THROTTLED_NS_MAX
        names = subscription.names and number == NAMES_SCHEDULER
        for first in range(0, len(feeds) or int(names), FEEDS_PER_MESSAGE_MAX):
            part = feeds[first : first + FEEDS_PER_MESSAGE_MAX]
            while self._is_open(subscription) and number in subscription.schedulers:
                part_feeds = self._feed_requests(subscription, number, part)
                if not part_feeds and not names:
                    break
                request = Subscribe(
                    subscription.number, part_feeds, subscription.credit, subscription.strong, names
                )
                try:
                    reply = yield host.links.scheduler(number).request(request, host.deadline_ns())
                except retriable:
                    yield host.pause(RETRY_PAUSE_NS / 1e9)
                    continue
                except RinglogError as e:
                    if e.detail.get("limit") in _LIMITS_OF_SCHEDULERS:
                        e.detail.setdefault("hint", _THROTTLED_HINT)
                    if not is_known:
                        raise
                    if not isinstance(e, Throttled) or self._now_ns() >= throttled_until_ns:
                        self._fail(subscription, e)
                        return
                    pause_ns = int(e.detail.get("retry_after_ms", 0)) * MS
                    yield host.pause(min(max(pause_ns, RETRY_PAUSE_NS), THROTTLED_PAUSE_NS_MAX) / 1e9)
                    continue
                assert isinstance(reply.message, Subscribed)
                break

    def _is_open(self, subscription: ClientSubscription) -> bool:
        return subscription.failure is None and subscription.number in self._subscriptions

    def _resubscribe_steps(
        self, subscription: ClientSubscription, number: int, feeds: list[int]
    ) -> Steps[None]:
        return self._send_steps(subscription, number, feeds, is_known=True)

    def _feed_requests(self, subscription: ClientSubscription, number: int, feeds: list[int]) -> list[Feed]:
        """Return the Feed entries of those feeds that this scheduler serves."""
        found = [(feed, state) for feed in feeds if (state := subscription.feeds.get(feed)) is not None]
        return [
            Feed(feed, state.topic, info.topic_id, info.shard, info.slot, state.after)
            for feed, state in found
            if state.scheduler == number and (info := state.info)
        ]

    def fail_all(self, error: RinglogError) -> None:
        """Fail all subscriptions with this error."""
        for subscription in list(self._subscriptions.values()):
            self._fail(subscription, error)

    def _fail(self, subscription: ClientSubscription, error: RinglogError) -> None:
        subscription.failure = error
        subscription.wake()

    def _unsubscribe(self, number: int, request: Unsubscribe) -> None:
        peer = self._host.links.scheduler(number)
        if peer.is_up:
            # If it is lost: the client ignores grants of unknown subscriptions, and silence ends the
            # subscription.
            peer.request(request, self._host.deadline_ns(), is_patient=False)

    def _schedule_keepalive(self) -> None:
        """Start the timer of the heartbeat. Without heartbeats a scheduler considers this client dead."""
        if self._alive is None and self._subscriptions:
            self._alive = self._host.timers.call_at(self._now_ns() + KEEPALIVE_NS, self._send_keepalive)

    def _send_keepalive(self) -> None:
        self._alive = None
        for number in {number for each in self._subscriptions.values() for number in each.schedulers}:
            self._host.links.scheduler(number).send_oneway(GrantsReturned(0), b"")
        self._schedule_keepalive()

    def _now_ns(self) -> int:
        return self._host.clock.monotonic_ns()
