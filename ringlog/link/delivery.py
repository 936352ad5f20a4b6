"""Delivery: what a client has asked the schedulers to be told of, kept true over any connection.

A *subscription* is a set of *feeds* (a topic, and how far its reader is). Schedulers answer with *turns*:
this feed may be read. Turns are hints and permissions, never data, so everything here may be lost and asked
for again: when a connection is new, or a scheduler says that it knows nothing of us, all subscriptions are
sent again with the positions their readers have by then.

A client's session has one Delivery, and so has a gateway, for the clients it speaks for. Nothing here waits
or locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
"""Pause before a scheduler that refused is asked again."""
_LATER = (NotReady, NotConnected, ShuttingDown)
UNBOUNDED = (1 << 63) - 1
RETURNS_PER_MESSAGE_MAX = 256
NAMES_SCHEDULER = 0
"""The scheduler that reports changed topic names to this client: each scheduler sees those of all shards."""
RELOCATIONS_AT_ONCE = 64
"""So many topics are looked for at the same time: a restarted shard has other things to do."""
RETURN_DELAY_NS = 5 * MS
"""Turns that are over are said together: this late at most when their reader looks for more now and then."""
RETURN_DELAY_BUSY_NS = 50 * MS
"""And this late in a client whose thread does not: it is busy, and another one would disturb it."""


class DeliveryHost(Protocol):
    """Who has the connections and the time: a client's session, or the gateway."""

    @property
    def links(self) -> Links: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def timers(self) -> Timers: ...

    def deadline_ns(self) -> int:
        """When a request made now is given up."""
        ...

    def pause(self, seconds: float) -> Pending[None]:
        """Done after a while."""
        ...

    def wait_connected(self) -> Pending[None]:
        """Done once the engine was met."""
        ...


class LocationHint(NamedTuple):
    """Where the next frames of a feed lie, if the scheduler knew."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


@dataclass(slots=True)
class ReadGrant:
    """A feed may be read, up to `until`."""

    feed: int
    until: int
    hint: LocationHint | None
    granted_ns: int
    """When it was offered."""
    is_self_granted: bool = False
    """Nobody gave it: its reader wants to look, and nothing is to be given back."""
    error: RinglogError | None = None
    """What is to be said of the feed instead of reading it."""


@dataclass(slots=True)
class _FeedState:
    topic: str
    info: TopicInfo
    scheduler: int
    after: int
    grant: ReadGrant | None = None
    error: RinglogError | None = None
    """To be said in the next turn, since one is out."""
    is_relocating: bool = False
    """Its scheduler does not find it where we said it is; its shard is asked, or will be."""


@dataclass(slots=True, eq=False)
class ClientSubscription:
    """One ready set at the schedulers. Made by Delivery.open."""

    number: int
    credit: int
    strong: bool
    names: bool
    feeds: dict[int, _FeedState] = field(default_factory=dict)
    ready: deque[ReadGrant] = field(default_factory=deque)
    """Turns that were not taken, in the order in which they were given."""
    names_changed: bool = False
    failure: RinglogError | None = None
    """Why there will be no turns any more."""
    waiting: Pending[None] | None = None
    feeds_made: int = 0
    schedulers: set[int] = field(default_factory=set)
    """Schedulers that were told of it; with `names` NAMES_SCHEDULER is one, also without a feed there."""

    @property
    def has_work(self) -> bool:
        """There is something to look at without waiting."""
        return bool(self.ready) or self.names_changed or self.failure is not None


def _no_schedulers_error() -> InvalidRequest:
    return InvalidRequest("nobody tells of news here: delivery.schedulers = 0", instead="reader()")


class Delivery:
    """All subscriptions of one host. Implements link.protocol.Hears."""

    def __init__(self, host: DeliveryHost, give_back_ns: int = RETURN_DELAY_NS) -> None:
        """`give_back_ns`: how late turns that are over are said when nobody asks for more."""
        self._host = host
        self._give_back_ns = give_back_ns
        self._subscriptions: dict[int, ClientSubscription] = {}
        self._numbers = 0
        self._alive: Timer | None = None
        self._taken: dict[int, list[int]] = {}
        """Words of rows of Taken that were not sent yet, by scheduler."""
        self._over: deque[tuple[ClientSubscription, ReadGrant, int, bool]] = deque()
        """Turns that are over and were not looked at yet: at most one a feed. See `return_grant_unlocked`."""
        self._giving_back: Timer | None = None
        self._over_since_ns = 0
        """When the first of the turns that are over and not said yet was noted."""
        self._sought: deque[tuple[ClientSubscription, int]] = deque()
        self._is_seeking = False

    # -- what a watch does ------------------------------------------------------------------------------

    def open_subscription(self, *, credit: int, strong: bool, names: bool) -> ClientSubscription:
        """A new subscription without feeds; raises UsageError for a credit out of range."""
        if not 1 <= credit <= CREDIT_MAX:
            raise UsageError("credit out of range", found=credit, min=1, max=CREDIT_MAX)
        self._numbers += 1
        made = ClientSubscription(self._numbers, credit, strong, names)
        self._subscriptions[made.number] = made
        self._schedule_keepalive()
        return made

    def add_feeds(
        self, subscription: ClientSubscription, wanted: Iterable[tuple[TopicInfo, int]]
    ) -> Pending[list[int]]:
        """Add feeds, (topic, position) each; done with their numbers once the schedulers know them.

        Without feeds: with `names`, done once changed topic names are reported.
        """
        return run_steps(self._add_steps(subscription, list(wanted)))

    @staticmethod
    def take_grant(subscription: ClientSubscription) -> ReadGrant | None:
        """The next turn in order of value, if there is one; its feed gets no other before `finished`.

        Only the subscription's reader calls it; that needs no lock.
        """
        ready = subscription.ready
        while ready:
            try:
                turn = ready.popleft()
            except IndexError:
                return None  # Closed just now.
            if turn.feed in subscription.feeds:
                return turn
        return None

    def self_grant(self, subscription: ClientSubscription, feed: int, *, after_ns: int = 0) -> None:
        """Give a feed a turn of its reader's own, now or in a while."""
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
        self, subscription: ClientSubscription, turn: ReadGrant, after: int, *, is_consumed: bool
    ) -> None:
        """The turn's feed was read up to `after`."""
        self._over.append((subscription, turn, after, is_consumed))
        self.collect_returns()

    def return_grant_unlocked(
        self, subscription: ClientSubscription, turn: ReadGrant, after: int, *, is_consumed: bool
    ) -> bool:
        """As `finished`, for a caller without the lock: two locks a turn are a good part of its cost.

        False when the caller has to `collect` with the lock, since nobody else will soon.
        """
        self._over.append((subscription, turn, after, is_consumed))
        # `give_back` forgets its timer before it looks what is over: who still sees one will be looked at.
        return self._giving_back is not None and len(self._over) < RETURNS_PER_MESSAGE_MAX

    def collect_returns(self) -> None:
        """Note which turns are over, and have that said soon."""
        self._apply_returns()
        if any(len(words) >= RETURNS_PER_MESSAGE_MAX * TAKEN_WORDS for words in self._taken.values()):
            self.send_returns()
        elif self._taken and self._giving_back is None:
            self._over_since_ns = now_ns = self._now_ns()
            self._giving_back = self._host.timers.call_at(now_ns + self._give_back_ns, self.send_returns)

    @property
    def is_return_overdue(self) -> bool:
        """Turns have been over for long enough; asked by readers that do not wait, without the lock."""
        return self._giving_back is not None and self._now_ns() - self._over_since_ns >= RETURN_DELAY_NS

    def _apply_returns(self) -> None:
        over = self._over
        while over:
            subscription, turn, after, is_consumed = over.popleft()
            state = subscription.feeds.get(turn.feed)
            if state is None:
                continue
            state.after = max(state.after, after)
            if state.grant is turn:
                state.grant = None
                if state.error is not None:
                    self._report_error(subscription, turn.feed, state, state.error)
            rows = self._taken.setdefault(state.scheduler, [])
            rows += (subscription.number, turn.feed, state.after, int(is_consumed))

    def send_returns(self) -> None:
        """Say which turns are over: together, when there are many, or when somebody waits for more."""
        timer, self._giving_back = self._giving_back, None
        if timer is not None:
            timer.cancel()
        self._apply_returns()
        taken, self._taken = self._taken, {}
        for number, words in taken.items():
            rows = np.array(words, dtype=np.uint64)
            peer = self._host.links.scheduler(number)
            peer.send_oneway(
                Taken(len(words) // TAKEN_WORDS), rows.tobytes()
            )  # Lost with its link: said anew then.

    def drop_feed(self, subscription: ClientSubscription, feed: int) -> None:
        """End one feed."""
        state = subscription.feeds.pop(feed, None)
        if state is not None:
            self._unsubscribe(state.scheduler, Unsubscribe(subscription.number, [feed]))

    def wait_for_work(self, *subscriptions: ClientSubscription) -> Pending[None]:
        """Done when one of the subscriptions has news."""
        if self._taken or self._over:
            self.send_returns()
        pending: Pending[None] = Pending()
        if any(subscription.has_work for subscription in subscriptions):
            pending.resolve(None)
            return pending
        for subscription in subscriptions:
            subscription.waiting = pending
        return pending

    def close_subscription(self, subscription: ClientSubscription) -> None:
        """End a subscription. Idempotent."""
        if self._subscriptions.pop(subscription.number, None) is None:
            return
        for number in subscription.schedulers:
            self._unsubscribe(number, Unsubscribe(subscription.number))
        subscription.feeds.clear()
        subscription.ready.clear()
        self._wake(subscription)
        if not self._subscriptions:
            for timer in (self._alive, self._giving_back):
                if timer is not None:
                    timer.cancel()
            self._alive = self._giving_back = None
            self._taken.clear()
            self._over.clear()

    # -- what schedulers say ----------------------------------------------------------------------------

    def schedulers_changed(self, schedulers: int) -> None:
        """Deal out feeds anew among those that there are. A connection to each comes, and with it is said
        what it is to look after; without schedulers all subscriptions end as a new one would."""
        if not schedulers:
            self.fail_all(_no_schedulers_error())
            return
        for subscription in self._subscriptions.values():
            if not subscription.schedulers:
                continue  # Not said to anybody yet.
            for state in subscription.feeds.values():
                state.scheduler = scheduler_of(state.info.topic_id, schedulers)
            subscription.schedulers = {state.scheduler for state in subscription.feeds.values()}
            if subscription.names:
                subscription.schedulers.add(NAMES_SCHEDULER)
        for number in {number for each in self._subscriptions.values() for number in each.schedulers}:
            self._host.links.scheduler(number)

    def scheduler_connected(self, number: int) -> None:
        """It knows nothing of us: say everything again."""
        for subscription in list(self._subscriptions.values()):
            if number in subscription.schedulers:
                run_steps(self._send_again_steps(subscription, number))

    def scheduler_message(self, number: int, said: PeerReply) -> None:
        """Turns, or a word of another kind."""
        message = said.message
        if isinstance(message, Turns):
            self._turns(said.attachment)
        elif isinstance(message, TopicsChanged):
            for subscription in self._subscriptions.values():
                self._names_may_have_changed(subscription)
        elif isinstance(message, SubscriptionsLost):
            # It took us for dead, and our ring away.
            self._host.links.request_grants(number)
            self.scheduler_connected(number)

    def _names_may_have_changed(self, subscription: ClientSubscription) -> None:
        if subscription.names:
            subscription.names_changed = True
            self._wake(subscription)

    def _turns(self, attachment: Any) -> None:
        if attachment is None or len(attachment) % (8 * TURN_WORDS):
            return
        self._accept_grants(np.frombuffer(attachment, dtype=np.uint64).reshape(-1, TURN_WORDS).tolist())

    def scheduler_grants(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Turns through shared memory. Who has none and may have missed one looks by himself."""
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
        place: LocationHint | None = None
        for number, feed, until, *hint in rows:
            subscription = subscriptions.get(number)
            if subscription is None or (state := subscription.feeds.get(feed)) is None:
                continue
            if until >= UNBOUNDED:
                self._relocate(subscription, feed, state)
            if state.grant is not None:
                # Told a second time, by a scheduler that has forgotten the first: it is one and the same.
                state.grant.until, state.grant.is_self_granted = max(state.grant.until, until), False
                continue
            if hint != words:
                # Many watches of a topic have turns at the same place.
                words, place = hint, LocationHint(*hint) if hint[2] else None
            self._offer(subscription, state, ReadGrant(feed, until, place, now_ns))

    def _offer(self, subscription: ClientSubscription, state: _FeedState, turn: ReadGrant) -> None:
        state.grant = turn
        subscription.ready.append(turn)
        self._wake(subscription)

    @staticmethod
    def _wake(subscription: ClientSubscription) -> None:
        waiting, subscription.waiting = subscription.waiting, None
        if waiting is not None:
            waiting.resolve(None)

    # -- saying it --------------------------------------------------------------------------------------

    def _add_steps(
        self, subscription: ClientSubscription, wanted: list[tuple[TopicInfo, int]]
    ) -> Steps[list[int]]:
        yield self._host.wait_connected()
        schedulers = self._host.links.schedulers
        if not schedulers:
            raise _no_schedulers_error()
        if len(subscription.feeds) + len(wanted) > FEEDS_PER_SUBSCRIPTION_MAX:
            raise UsageError("too many topics in one subscription", max=FEEDS_PER_SUBSCRIPTION_MAX)
        numbers = []
        by_scheduler: dict[int, list[int]] = {}
        for info, after in wanted:
            subscription.feeds_made += 1
            feed = subscription.feeds_made
            number = scheduler_of(info.topic_id, schedulers)
            subscription.feeds[feed] = _FeedState(info.topic, info, number, after)
            by_scheduler.setdefault(number, []).append(feed)
            numbers.append(feed)
        if subscription.names and NAMES_SCHEDULER not in subscription.schedulers:
            by_scheduler.setdefault(NAMES_SCHEDULER, [])
        # All before the first is told: with another number of schedulers they are dealt out anew.
        subscription.schedulers.update(by_scheduler)
        for number, feeds in by_scheduler.items():
            if feeds and not self._is_followed(number, feeds, subscription):
                self._host.links.request_grants(number)
            yield run_steps(self._send_steps(subscription, number, feeds))
            if subscription.failure is not None:
                raise subscription.failure
        return numbers

    def _is_followed(self, number: int, feeds: list[int], subscription: ClientSubscription) -> bool:
        """Has this scheduler been asked for turns of others than these feeds of the subscription?"""
        fresh = set(feeds)
        return any(
            state.scheduler == number and not (each is subscription and feed in fresh)
            for each in self._subscriptions.values()
            for feed, state in each.feeds.items()
        )

    def _send_again_steps(self, subscription: ClientSubscription, number: int) -> Steps[None]:
        """Tell a scheduler that has forgotten the subscription of it; names may have changed meanwhile."""
        feeds = [feed for feed, state in subscription.feeds.items() if state.scheduler == number]
        yield from self._send_steps(subscription, number, feeds, is_known=True)
        if number == NAMES_SCHEDULER:
            self._names_may_have_changed(subscription)

    def _send_steps(
        self, subscription: ClientSubscription, number: int, feeds: list[int], *, is_known: bool = False
    ) -> Steps[None]:
        """Tell one scheduler of feeds, and whether names are wanted of it; on refusals that pass, again.
        With `is_known` they were accepted before: a request without an answer is sent again, too."""
        host = self._host
        later = (*_LATER, RequestTimeout) if is_known else _LATER
        names = subscription.names and number == NAMES_SCHEDULER
        for first in range(0, len(feeds) or int(names), FEEDS_PER_MESSAGE_MAX):
            part = feeds[first : first + FEEDS_PER_MESSAGE_MAX]
            while subscription.failure is None and number in subscription.schedulers:
                told = self._feed_requests(subscription, number, part)
                if not told and not names:
                    break
                request = Subscribe(
                    subscription.number, told, subscription.credit, subscription.strong, names
                )
                try:
                    reply = yield host.links.scheduler(number).request(request, host.deadline_ns())
                except later:
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
        """What a scheduler is told of feeds: of those that it looks after."""
        found = [(feed, state) for feed in feeds if (state := subscription.feeds.get(feed)) is not None]
        return [
            Feed(feed, state.topic, info.topic_id, info.shard, info.slot, state.after)
            for feed, state in found
            if state.scheduler == number and (info := state.info)
        ]

    def _relocate(self, subscription: ClientSubscription, feed: int, state: _FeedState) -> None:
        """A shard that restarted may show a topic elsewhere. If the topic is no more its reader will see."""
        if state.is_relocating:
            return
        state.is_relocating = True
        self._sought.append((subscription, feed))
        if not self._is_seeking:
            self._is_seeking = True
            run_steps(self._relocate_steps())

    def _relocate_steps(self) -> Steps[None]:
        """Ask where topics are, some at a time, and subscribe to those that are elsewhere there."""
        host = self._host
        while self._sought:
            asked = []
            for _ in range(min(len(self._sought), RELOCATIONS_AT_ONCE)):
                subscription, feed = self._sought.popleft()
                state = subscription.feeds.get(feed)
                if state is None:
                    continue
                asked.append((subscription, feed, state, run_steps(self._ask_place(state))))
            moved: dict[tuple[ClientSubscription, int], list[int]] = {}
            again = []
            for subscription, feed, state, asking in asked:
                try:
                    info = yield asking
                except (*_LATER, ConnectionTrouble) as e:
                    if is_shard_failed(e):
                        state.is_relocating = False
                        self._report_error(subscription, feed, state, e)
                        continue
                    # Nor is no answer in time the word of its shard: nobody will tell us to look again.
                    again.append((subscription, feed))
                    continue
                except RinglogError:
                    info = state.info
                state.is_relocating = False
                is_it = info.topic_id == state.info.topic_id and info.epoch == state.info.epoch
                if is_it and (info.shard, info.slot) != (state.info.shard, state.info.slot):
                    state.info = info
                    moved.setdefault((subscription, state.scheduler), []).append(feed)
            for (subscription, number), feeds in moved.items():
                yield run_steps(self._send_steps(subscription, number, feeds, is_known=True))
            if again:
                self._sought.extend(again)
                yield host.pause(RETRY_PAUSE_NS / 1e9)
        self._is_seeking = False

    def _report_error(
        self, subscription: ClientSubscription, feed: int, state: _FeedState, error: RinglogError
    ) -> None:
        """Have a feed's reader hear why nothing comes, behind what it reads now."""
        state.error = error if state.grant is not None else None
        if state.grant is None:
            turn = ReadGrant(feed, UNBOUNDED, None, self._now_ns(), is_self_granted=True, error=error)
            self._offer(subscription, state, turn)

    def _ask_place(self, state: _FeedState) -> Steps[TopicInfo]:
        """Ask the name's home, or whom it points to."""
        links, request = self._host.links, TopicResolve(state.topic)
        shard = links.home_shard(state.topic)
        info: TopicInfo = (yield links.request(shard, request, self._host.deadline_ns())).message
        if not info.topic_id:
            info = (yield links.request(info.shard, request, self._host.deadline_ns())).message
        return info

    def fail_all(self, error: RinglogError) -> None:
        """No scheduler will be reached any more."""
        for subscription in list(self._subscriptions.values()):
            self._fail(subscription, error)

    def _fail(self, subscription: ClientSubscription, error: RinglogError) -> None:
        if isinstance(error, Throttled):
            error.detail.setdefault("hint", "fewer subscriptions, or delivery.schedulers")
        subscription.failure = error
        self._wake(subscription)

    def _unsubscribe(self, number: int, request: Unsubscribe) -> None:
        peer = self._host.links.scheduler(number)
        if peer.is_up:
            # Should it be lost: turns of unknown subscriptions are passed over, and silence ends them.
            peer.request(request, self._host.deadline_ns(), is_patient=False)

    def _schedule_keepalive(self) -> None:
        """Say a word now and then, so that a scheduler does not take us for dead."""
        if self._alive is None and self._subscriptions:
            self._alive = self._host.timers.call_at(self._now_ns() + KEEPALIVE_NS, self._send_keepalive)

    def _send_keepalive(self) -> None:
        self._alive = None
        for number in {number for each in self._subscriptions.values() for number in each.schedulers}:
            self._host.links.scheduler(number).send_oneway(Taken(0), b"")
        self._schedule_keepalive()

    def _now_ns(self) -> int:
        return self._host.clock.monotonic_ns()
