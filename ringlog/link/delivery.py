"""Delivery: the subscriptions of one client at the schedulers, restored on every new connection.

A *subscription* is a set of *feeds* (a topic and the position of its reader). Schedulers answer with *grants*
(*turns* in the messages): the reader may read a feed up to a position. Grants are hints and permissions,
never data, so all of this may be lost and requested again. On a new connection, or when a scheduler reports
that it does not know the client, Delivery sends all subscriptions again with the current positions of their
readers.

A client's session has one Delivery. The gateway has one for its clients. Nothing here blocks or locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringlog.clock import Clock
from ringlog.envelope.messages import (
    Feed,
    Subscribe,
    Subscribed,
    SubscriptionsLost,
    Taken,
    TopicInfo,
    TopicResolve,
    TopicsChanged,
    Turns,
    Unsubscribe,
)
from ringlog.envelope.messages.delivery import TAKEN_WORDS, TURN_WORDS
from ringlog.errors import (
    ConnectionTrouble,
    InvalidRequest,
    NotConnected,
    NotReady,
    RequestTimeout,
    RinglogError,
    ShuttingDown,
    Throttled,
    UsageError,
    is_shard_failed,
)
from ringlog.limits import CREDIT_MAX, FEEDS_PER_MESSAGE_MAX, FEEDS_PER_SUBSCRIPTION_MAX, LINK_SILENCE_MS
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.peer import MS, PeerReply
from ringlog.link.protocol import Links
from ringlog.link.timers import Timer, Timers
from ringlog.placement import scheduler_of

KEEPALIVE_NS = LINK_SILENCE_MS * MS // 3
RETRY_PAUSE_NS = 100 * MS
"""Pause before the next request to a scheduler that refused."""
_TEMPORARY = (NotReady, NotConnected, ShuttingDown)
UNBOUNDED = (1 << 63) - 1
RETURNS_PER_MESSAGE_MAX = 256
NAMES_SCHEDULER = 0
"""The scheduler that reports changed topic names to this client. Each scheduler sees the names of all
shards."""
RELOCATIONS_AT_ONCE = 64
"""Number of topics that are located at the same time, to limit the load on a restarted shard."""
RETURN_DELAY_NS = 5 * MS
"""Longest delay of returned grants, which are sent together, if the reader requests more grants now and
then."""
RETURN_DELAY_BUSY_NS = 50 * MS
"""The same for a client whose thread is busy: a wake-up would disturb it."""


class DeliveryHost(Protocol):
    """Provides connections and time: a client's session, or the gateway."""

    @property
    def links(self) -> Links: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def timers(self) -> Timers: ...

    def deadline_ns(self) -> int:
        """Return the deadline of a request that is made now."""
        ...

    def pause(self, seconds: float) -> Pending[None]:
        """Return a result that is done after this time."""
        ...

    def wait_connected(self) -> Pending[None]:
        """Return a result that is done after the first connection to the engine."""
        ...


class LocationHint(NamedTuple):
    """Location of the next frames of a feed, if the scheduler knows it."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


@dataclass(slots=True)
class ReadGrant:
    """Permission to read a feed up to `until`."""

    feed: int
    until: int
    hint: LocationHint | None
    granted_ns: int
    """Time at which the client received it."""
    is_self_granted: bool = False
    """The client made this grant itself so that the reader checks the feed. It is not returned to a
    scheduler."""
    error: RinglogError | None = None
    """Error to raise for the feed instead of reading it."""


@dataclass(slots=True)
class _FeedState:
    topic: str
    info: TopicInfo
    scheduler: int
    after: int
    grant: ReadGrant | None = None
    error: RinglogError | None = None
    """Error for the next grant, because one is outstanding."""
    is_relocating: bool = False
    """Its scheduler does not find the topic in its slot. The client requests its location from the shard, or
    will do so."""
    must_relocate_again: bool = False
    """The scheduler reported this again during the request. The reply may come from before a restart."""


@dataclass(slots=True, eq=False)
class ClientSubscription:
    """One ready set at the schedulers. Created by Delivery.open_subscription."""

    number: int
    credit: int
    strong: bool
    names: bool
    feeds: dict[int, _FeedState] = field(default_factory=dict)
    ready: deque[ReadGrant] = field(default_factory=deque)
    """Grants that the reader did not take, in the order of arrival."""
    names_changed: bool = False
    failure: RinglogError | None = None
    """Why there will be no more grants."""
    waiting: Pending[None] | None = None
    feeds_made: int = 0
    schedulers: set[int] = field(default_factory=set)
    """Schedulers that received a part of the subscription. With `names` NAMES_SCHEDULER is one of them, even
    without a feed."""

    @property
    def has_work(self) -> bool:
        """The reader has something to process without waiting."""
        return bool(self.ready) or self.names_changed or self.failure is not None


def _no_schedulers_error() -> InvalidRequest:
    return InvalidRequest(
        "this engine runs no scheduler (delivery.schedulers = 0): use reader()", instead="reader()"
    )


class Delivery:
    """All subscriptions of one host. Implements link.protocol.SchedulerListener."""

    def __init__(self, host: DeliveryHost, return_delay_ns: int = RETURN_DELAY_NS) -> None:
        """`return_delay_ns`: longest delay of returned grants if no reader requests more."""
        self._host = host
        self._return_delay_ns = return_delay_ns
        self._subscriptions: dict[int, ClientSubscription] = {}
        self._numbers = 0
        self._alive: Timer | None = None
        self._unsent_returns: dict[int, list[int]] = {}
        """Words of rows of Taken that were not sent yet, by scheduler."""
        self._returned: deque[tuple[ClientSubscription, ReadGrant, int, bool]] = deque()
        """Returned grants that are not processed yet: at most one for each feed. See
        `return_grant_unlocked`."""
        self._return_timer: Timer | None = None
        self._returned_since_ns = 0
        """Time at which the first returned grant that was not sent was noted."""
        self._to_locate: deque[tuple[ClientSubscription, int]] = deque()
        self._is_locating = False

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
        before that, and before the first grant.

        Without feeds and with `names`, the result is done when changed topic names are reported.
        """
        return run_steps(self._add_steps(subscription, list(wanted), on_numbered))

    @staticmethod
    def take_grant(subscription: ClientSubscription) -> ReadGrant | None:
        """Return the next grant in order of priority; None if there is none.

        The feed gets no other grant before `return_grant`. Only the subscription's reader calls this; it
        needs no lock.
        """
        ready = subscription.ready
        while ready:
            try:
                grant = ready.popleft()
            except IndexError:
                return None  # The subscription was closed at this moment.
            if grant.feed in subscription.feeds:
                return grant
        return None

    def self_grant(self, subscription: ClientSubscription, feed: int, *, after_ns: int = 0) -> None:
        """Create a grant for a feed without a scheduler, now or after `after_ns`."""
        if after_ns:
            now = self._host.clock.monotonic_ns()
            self._host.timers.call_at(now + after_ns, lambda: self.self_grant(subscription, feed))
            return
        state = subscription.feeds.get(feed)
        if state is not None and state.grant is None:
            self._offer(
                subscription, state, ReadGrant(feed, UNBOUNDED, None, self._now_ns(), is_self_granted=True)
            )

    def return_grant(
        self, subscription: ClientSubscription, grant: ReadGrant, after: int, *, is_consumed: bool
    ) -> None:
        """Return a grant: the feed was read up to `after`."""
        self._returned.append((subscription, grant, after, is_consumed))
        self.collect_returns()

    def return_grant_unlocked(
        self, subscription: ClientSubscription, grant: ReadGrant, after: int, *, is_consumed: bool
    ) -> bool:
        """Return a grant without the lock.

        Two lock operations for each grant would be a large part of its cost. Return False if the caller must
        call `collect_returns` with the lock, because no timer will do it soon.
        """
        self._returned.append((subscription, grant, after, is_consumed))
        # `send_returns` clears its timer before it reads `_returned`. If the timer is still set here, this
        # entry is read.
        return self._return_timer is not None and len(self._returned) < RETURNS_PER_MESSAGE_MAX

    def collect_returns(self) -> None:
        """Process returned grants, and arrange that they are sent soon."""
        self._apply_returns()
        if any(
            len(words) >= RETURNS_PER_MESSAGE_MAX * TAKEN_WORDS for words in self._unsent_returns.values()
        ):
            self.send_returns()
        elif self._unsent_returns and self._return_timer is None:
            self._returned_since_ns = now_ns = self._now_ns()
            self._return_timer = self._host.timers.call_at(now_ns + self._return_delay_ns, self.send_returns)

    @property
    def is_return_overdue(self) -> bool:
        """Returned grants have waited long enough. Readers that do not wait check this without the lock."""
        return self._return_timer is not None and self._now_ns() - self._returned_since_ns >= RETURN_DELAY_NS

    def _apply_returns(self) -> None:
        returned = self._returned
        while returned:
            subscription, read_grant, after, is_consumed = returned.popleft()
            state = subscription.feeds.get(read_grant.feed)
            if state is None:
                continue
            state.after = max(state.after, after)
            if state.grant is read_grant:
                state.grant = None
                if state.error is not None:
                    self._report_error(subscription, read_grant.feed, state, state.error)
            rows = self._unsent_returns.setdefault(state.scheduler, [])
            rows += (subscription.number, read_grant.feed, state.after, int(is_consumed))

    def send_returns(self) -> None:
        """Send all returned grants now."""
        timer, self._return_timer = self._return_timer, None
        if timer is not None:
            timer.cancel()
        self._apply_returns()
        returns, self._unsent_returns = self._unsent_returns, {}
        for number, words in returns.items():
            rows = np.array(words, dtype=np.uint64)
            peer = self._host.links.scheduler(number)
            peer.send_oneway(
                Taken(len(words) // TAKEN_WORDS), rows.tobytes()
            )  # If it is lost with the connection, the next Subscribe sends the positions.

    def drop_feed(self, subscription: ClientSubscription, feed: int) -> None:
        """Remove one feed."""
        state = subscription.feeds.pop(feed, None)
        if state is not None:
            self._unsubscribe(state.scheduler, Unsubscribe(subscription.number, [feed]))

    def wait_for_work(self, *subscriptions: ClientSubscription) -> Pending[None]:
        """Return a result that is done when one of the subscriptions has work.

        Send all returned grants first.
        """
        if self._unsent_returns or self._returned:
            self.send_returns()
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
        for number in subscription.schedulers:
            self._unsubscribe(number, Unsubscribe(subscription.number))
        subscription.feeds.clear()
        subscription.ready.clear()
        self._wake(subscription)
        if not self._subscriptions:
            for timer in (self._alive, self._return_timer):
                if timer is not None:
                    timer.cancel()
            self._alive = self._return_timer = None
            self._unsent_returns.clear()
            self._returned.clear()

    # -- messages of schedulers --------------------------------------------------------------------------

    def schedulers_changed(self, schedulers: int) -> None:
        """Assign the feeds to the new number of schedulers.

        Each scheduler receives its feeds when it is connected. Without schedulers all subscriptions fail."""
        if not schedulers:
            self.fail_all(_no_schedulers_error())
            return
        for subscription in self._subscriptions.values():
            if not subscription.schedulers:
                continue  # No scheduler received it yet.
            for state in subscription.feeds.values():
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
        if isinstance(message, Turns):
            self._accept_grant_message(push.attachment)
        elif isinstance(message, TopicsChanged):
            for subscription in self._subscriptions.values():
                self._names_may_have_changed(subscription)
        elif isinstance(message, SubscriptionsLost):
            # The scheduler considered this client dead and removed its ring.
            self._host.links.request_grants(number)
            self.scheduler_connected(number)

    def _names_may_have_changed(self, subscription: ClientSubscription) -> None:
        if subscription.names:
            subscription.names_changed = True
            self._wake(subscription)

    def _accept_grant_message(self, attachment: Any) -> None:
        if attachment is None or len(attachment) % (8 * TURN_WORDS):
            return
        self._accept_grants(np.frombuffer(attachment, dtype=np.uint64).reshape(-1, TURN_WORDS).tolist())

    def scheduler_grants(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Accept grants from shared memory.

        If some were lost, every feed without a grant is granted to its reader, which then checks it.
        """
        self._accept_grants(rows)
        if is_complete:
            return
        for subscription in self._subscriptions.values():
            for feed, state in subscription.feeds.items():
                if state.scheduler == number:
                    self.self_grant(subscription, feed)

    def _accept_grants(self, rows: list[list[int]]) -> None:
        now_ns, subscriptions = self._now_ns(), self._subscriptions
        words: list[int] = []
        location: LocationHint | None = None
        for number, feed, until, *hint in rows:
            subscription = subscriptions.get(number)
            if subscription is None or (state := subscription.feeds.get(feed)) is None:
                continue
            if until >= UNBOUNDED:
                self._relocate(subscription, feed, state)
            if state.grant is not None:
                # A second grant from a scheduler that has forgotten the first. Both are one grant.
                state.grant.until, state.grant.is_self_granted = max(state.grant.until, until), False
                continue
            if hint != words:
                # Many watches of one topic have grants with the same location.
                words, location = hint, LocationHint(*hint) if hint[2] else None
            self._offer(subscription, state, ReadGrant(feed, until, location, now_ns))

    def _offer(self, subscription: ClientSubscription, state: _FeedState, read_grant: ReadGrant) -> None:
        state.grant = read_grant
        subscription.ready.append(read_grant)
        self._wake(subscription)

    @staticmethod
    def _wake(subscription: ClientSubscription) -> None:
        waiting, subscription.waiting = subscription.waiting, None
        if waiting is not None:
            waiting.resolve(None)

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
            subscription.feeds[feed] = _FeedState(info.topic, info, number, after)
            by_scheduler.setdefault(number, []).append(feed)
            numbers.append(feed)
        on_numbered(numbers)
        if subscription.names and NAMES_SCHEDULER not in subscription.schedulers:
            by_scheduler.setdefault(NAMES_SCHEDULER, [])
        # Registered before the first request is sent: if the number of schedulers changes, they are
        # reassigned.
        subscription.schedulers.update(by_scheduler)
        for number, feeds in by_scheduler.items():
            if feeds and not self._is_followed(number, feeds, subscription):
                self._host.links.request_grants(number)
            yield run_steps(self._send_steps(subscription, number, feeds))
            if subscription.failure is not None:
                raise subscription.failure
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

        With `is_known` the scheduler accepted them before; then a request that timed out is repeated, too."""
        host = self._host
        retriable = (*_TEMPORARY, RequestTimeout) if is_known else _TEMPORARY
        names = subscription.names and number == NAMES_SCHEDULER
        for first in range(0, len(feeds) or int(names), FEEDS_PER_MESSAGE_MAX):
            part = feeds[first : first + FEEDS_PER_MESSAGE_MAX]
            while subscription.failure is None and number in subscription.schedulers:
                part_feeds = self._feed_requests(subscription, number, part)
                if not part_feeds and not names:
                    break
                request = Subscribe(
                    subscription.number, part_feeds, subscription.credit, subscription.strong, names
                )
                try:
                    reply = yield host.links.scheduler(number).request(request, host.deadline_ns())
                except retriable:
                    if subscription.number not in self._subscriptions:
                        return
                    yield host.pause(RETRY_PAUSE_NS / 1e9)
                    continue
                except RinglogError as e:
                    self._fail(subscription, e)
                    return
                assert isinstance(reply.message, Subscribed)
                break

    def _feed_requests(self, subscription: ClientSubscription, number: int, feeds: list[int]) -> list[Feed]:
        """Return the Feed entries of those feeds that this scheduler serves."""
        found = [(feed, state) for feed in feeds if (state := subscription.feeds.get(feed)) is not None]
        return [
            Feed(feed, state.topic, info.topic_id, info.shard, info.slot, state.after)
            for feed, state in found
            if state.scheduler == number and (info := state.info)
        ]

    def _relocate(self, subscription: ClientSubscription, feed: int, state: _FeedState) -> None:
        """Locate a topic again: a restarted shard may have moved it.

        If the topic is deleted, its reader detects that.
        """
        if state.is_relocating:
            state.must_relocate_again = True
            return
        state.is_relocating = True
        self._to_locate.append((subscription, feed))
        if not self._is_locating:
            self._is_locating = True
            run_steps(self._relocate_steps())

    def _relocate_steps(self) -> Steps[None]:
        """Locate topics, some at a time, and send moved feeds to their schedulers."""
        host = self._host
        while self._to_locate:
            lookups = []
            for _ in range(min(len(self._to_locate), RELOCATIONS_AT_ONCE)):
                subscription, feed = self._to_locate.popleft()
                state = subscription.feeds.get(feed)
                if state is None:
                    continue
                state.must_relocate_again = False
                lookups.append((subscription, feed, state, run_steps(self._ask_location(state))))
            moved: dict[tuple[ClientSubscription, int], list[int]] = {}
            to_retry = []
            for subscription, feed, state, lookup in lookups:
                try:
                    info = yield lookup
                except (*_TEMPORARY, ConnectionTrouble) as e:
                    if is_shard_failed(e):
                        state.is_relocating = False
                        self._report_error(subscription, feed, state, e)
                        continue
                    # A timeout does not come from the shard: no process would report the move later.
                    to_retry.append((subscription, feed))
                    continue
                except RinglogError:
                    info = state.info
                state.is_relocating = state.must_relocate_again
                if state.must_relocate_again:
                    to_retry.append((subscription, feed))
                is_it = info.topic_id == state.info.topic_id and info.epoch == state.info.epoch
                if is_it and (info.shard, info.slot) != (state.info.shard, state.info.slot):
                    state.info = info
                    moved.setdefault((subscription, state.scheduler), []).append(feed)
            for (subscription, number), feeds in moved.items():
                yield run_steps(self._send_steps(subscription, number, feeds, is_known=True))
            if to_retry:
                self._to_locate.extend(to_retry)
                yield host.pause(RETRY_PAUSE_NS / 1e9)
        self._is_locating = False

    def _report_error(
        self, subscription: ClientSubscription, feed: int, state: _FeedState, error: RinglogError
    ) -> None:
        """Report an error to the reader of a feed, after the grant that it processes now."""
        state.error = error if state.grant is not None else None
        if state.grant is None:
            read_grant = ReadGrant(feed, UNBOUNDED, None, self._now_ns(), is_self_granted=True, error=error)
            self._offer(subscription, state, read_grant)

    def _ask_location(self, state: _FeedState) -> Steps[TopicInfo]:
        """Query the home shard of the name, and then the shard that it names."""
        links, request = self._host.links, TopicResolve(state.topic)
        shard = links.home_shard(state.topic)
        info: TopicInfo = (yield links.request(shard, request, self._host.deadline_ns())).message
        if not info.topic_id:
            info = (yield links.request(info.shard, request, self._host.deadline_ns())).message
        return info

    def fail_all(self, error: RinglogError) -> None:
        """Fail all subscriptions with this error."""
        for subscription in list(self._subscriptions.values()):
            self._fail(subscription, error)

    def _fail(self, subscription: ClientSubscription, error: RinglogError) -> None:
        if isinstance(error, Throttled):
            error.detail.setdefault("hint", "use fewer subscriptions, or increase delivery.schedulers")
        subscription.failure = error
        self._wake(subscription)

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
            self._host.links.scheduler(number).send_oneway(Taken(0), b"")
        self._schedule_keepalive()

    def _now_ns(self) -> int:
        return self._host.clock.monotonic_ns()
