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
from ringlog.link.peer import MS, Reply
from ringlog.link.pending import Pending, Steps, start
from ringlog.link.protocol import Links
from ringlog.link.timers import Timer, Timers
from ringlog.placement import scheduler_of

WORD_OF_LIFE_NS = LINK_SILENCE_MS * MS // 3
AGAIN_NS = 100 * MS
"""Pause before a scheduler that refused is asked again."""
_LATER = (NotReady, NotConnected, ShuttingDown)
OPEN_END = (1 << 63) - 1
TAKEN_ROWS_MAX = 256
NAMES_SCHEDULER = 0
"""The scheduler that reports changed topic names to this client: each scheduler sees those of all shards."""
SEEK_AT_ONCE = 64
"""So many topics are looked for at the same time: a restarted shard has other things to do."""
GIVE_BACK_NS = 5 * MS
"""Turns that are over are said together: this late at most when their reader looks for more now and then."""
GIVE_BACK_BUSY_NS = 50 * MS
"""And this late in a client whose thread does not: it is busy, and another one would disturb it."""


class Host(Protocol):
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

    def met(self) -> Pending[None]:
        """Done once the engine was met."""
        ...


class Hint(NamedTuple):
    """Where the next frames of a feed lie, if the scheduler knew."""

    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


@dataclass(slots=True)
class Turn:
    """A feed may be read, up to `until`."""

    feed: int
    until: int
    hint: Hint | None
    since_ns: int
    """When it was offered."""
    is_own: bool = False
    """Nobody gave it: its reader wants to look, and nothing is to be given back."""
    error: RinglogError | None = None
    """What is to be said of the feed instead of reading it."""


@dataclass(slots=True)
class _FeedState:
    topic: str
    info: TopicInfo
    scheduler: int
    after: int
    turn: Turn | None = None
    error: RinglogError | None = None
    """To be said in the next turn, since one is out."""
    is_sought: bool = False
    """Its scheduler does not find it where we said it is; its shard is asked, or will be."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One ready set at the schedulers. Made by Delivery.open."""

    number: int
    credit: int
    strong: bool
    names: bool
    feeds: dict[int, _FeedState] = field(default_factory=dict)
    ready: deque[Turn] = field(default_factory=deque)
    """Turns that were not taken, in the order in which they were given."""
    names_changed: bool = False
    failure: RinglogError | None = None
    """Why there will be no turns any more."""
    waiting: Pending[None] | None = None
    feeds_made: int = 0
    schedulers: set[int] = field(default_factory=set)
    """Schedulers that were told of it; with `names` NAMES_SCHEDULER is one, also without a feed there."""

    @property
    def has_news(self) -> bool:
        """There is something to look at without waiting."""
        return bool(self.ready) or self.names_changed or self.failure is not None


def _nobody_tells() -> InvalidRequest:
    return InvalidRequest("nobody tells of news here: delivery.schedulers = 0", instead="reader()")


class Delivery:
    """All subscriptions of one host. Implements link.protocol.Hears."""

    def __init__(self, host: Host, give_back_ns: int = GIVE_BACK_NS) -> None:
        """`give_back_ns`: how late turns that are over are said when nobody asks for more."""
        self._host = host
        self._give_back_ns = give_back_ns
        self._subscriptions: dict[int, Subscription] = {}
        self._numbers = 0
        self._alive: Timer | None = None
        self._taken: dict[int, list[int]] = {}
        """Words of rows of Taken that were not sent yet, by scheduler."""
        self._over: deque[tuple[Subscription, Turn, int, bool]] = deque()
        """Turns that are over and were not looked at yet: at most one a feed. See `finish_later`."""
        self._giving_back: Timer | None = None
        self._over_since_ns = 0
        """When the first of the turns that are over and not said yet was noted."""
        self._sought: deque[tuple[Subscription, int]] = deque()
        self._is_seeking = False

    # -- what a watch does ------------------------------------------------------------------------------

    def open(self, *, credit: int, strong: bool, names: bool) -> Subscription:
        """A new subscription without feeds; raises UsageError for a credit out of range."""
        if not 1 <= credit <= CREDIT_MAX:
            raise UsageError("credit out of range", found=credit, min=1, max=CREDIT_MAX)
        self._numbers += 1
        made = Subscription(self._numbers, credit, strong, names)
        self._subscriptions[made.number] = made
        self._stay_alive()
        return made

    def add(self, subscription: Subscription, wanted: Iterable[tuple[TopicInfo, int]]) -> Pending[list[int]]:
        """Add feeds, (topic, position) each; done with their numbers once the schedulers know them.

        Without feeds: with `names`, done once changed topic names are reported.
        """
        return start(self._add_steps(subscription, list(wanted)))

    @staticmethod
    def take(subscription: Subscription) -> Turn | None:
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

    def look(self, subscription: Subscription, feed: int, *, after_ns: int = 0) -> None:
        """Give a feed a turn of its reader's own, now or in a while."""
        if after_ns:
            now = self._host.clock.monotonic_ns()
            self._host.timers.at(now + after_ns, lambda: self.look(subscription, feed))
            return
        state = subscription.feeds.get(feed)
        if state is not None and state.turn is None:
            self._offer(subscription, state, Turn(feed, OPEN_END, None, self._now_ns(), is_own=True))

    def finished(self, subscription: Subscription, turn: Turn, after: int, *, is_consumed: bool) -> None:
        """The turn's feed was read up to `after`."""
        self._over.append((subscription, turn, after, is_consumed))
        self.collect()

    def finish_later(self, subscription: Subscription, turn: Turn, after: int, *, is_consumed: bool) -> bool:
        """As `finished`, for a caller without the lock: two locks a turn are a good part of its cost.

        False when the caller has to `collect` with the lock, since nobody else will soon.
        """
        self._over.append((subscription, turn, after, is_consumed))
        # `give_back` forgets its timer before it looks what is over: who still sees one will be looked at.
        return self._giving_back is not None and len(self._over) < TAKEN_ROWS_MAX

    def collect(self) -> None:
        """Note which turns are over, and have that said soon."""
        self._note()
        if any(len(words) >= TAKEN_ROWS_MAX * TAKEN_WORDS for words in self._taken.values()):
            self.give_back()
        elif self._taken and self._giving_back is None:
            self._over_since_ns = now_ns = self._now_ns()
            self._giving_back = self._host.timers.at(now_ns + self._give_back_ns, self.give_back)

    @property
    def is_late(self) -> bool:
        """Turns have been over for long enough; asked by readers that do not wait, without the lock."""
        return self._giving_back is not None and self._now_ns() - self._over_since_ns >= GIVE_BACK_NS

    def _note(self) -> None:
        over = self._over
        while over:
            subscription, turn, after, is_consumed = over.popleft()
            state = subscription.feeds.get(turn.feed)
            if state is None:
                continue
            state.after = max(state.after, after)
            if state.turn is turn:
                state.turn = None
                if state.error is not None:
                    self._say(subscription, turn.feed, state, state.error)
            rows = self._taken.setdefault(state.scheduler, [])
            rows += (subscription.number, turn.feed, state.after, int(is_consumed))

    def give_back(self) -> None:
        """Say which turns are over: together, when there are many, or when somebody waits for more."""
        timer, self._giving_back = self._giving_back, None
        if timer is not None:
            timer.cancel()
        self._note()
        taken, self._taken = self._taken, {}
        for number, words in taken.items():
            rows = np.array(words, dtype=np.uint64)
            peer = self._host.links.scheduler(number)
            peer.tell(Taken(len(words) // TAKEN_WORDS), rows.tobytes())  # Lost with its link: said anew then.

    def drop(self, subscription: Subscription, feed: int) -> None:
        """End one feed."""
        state = subscription.feeds.pop(feed, None)
        if state is not None:
            self._unsubscribe(state.scheduler, Unsubscribe(subscription.number, [feed]))

    def waits(self, *subscriptions: Subscription) -> Pending[None]:
        """Done when one of the subscriptions has news."""
        if self._taken or self._over:
            self.give_back()
        pending: Pending[None] = Pending()
        if any(subscription.has_news for subscription in subscriptions):
            pending.resolve(None)
            return pending
        for subscription in subscriptions:
            subscription.waiting = pending
        return pending

    def close(self, subscription: Subscription) -> None:
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
            self.fail_all(_nobody_tells())
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

    def scheduler_up(self, number: int) -> None:
        """It knows nothing of us: say everything again."""
        for subscription in list(self._subscriptions.values()):
            if number in subscription.schedulers:
                start(self._send_again_steps(subscription, number))

    def scheduler_said(self, number: int, said: Reply) -> None:
        """Turns, or a word of another kind."""
        message = said.message
        if isinstance(message, Turns):
            self._turns(said.attachment)
        elif isinstance(message, TopicsChanged):
            for subscription in self._subscriptions.values():
                self._names_may_have_changed(subscription)
        elif isinstance(message, SubscriptionsLost):
            # It took us for dead, and our ring away.
            self._host.links.expect_turns(number)
            self.scheduler_up(number)

    def _names_may_have_changed(self, subscription: Subscription) -> None:
        if subscription.names:
            subscription.names_changed = True
            self._wake(subscription)

    def _turns(self, attachment: Any) -> None:
        if attachment is None or len(attachment) % (8 * TURN_WORDS):
            return
        self._take_rows(np.frombuffer(attachment, dtype=np.uint64).reshape(-1, TURN_WORDS).tolist())

    def scheduler_turned(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Turns through shared memory. Who has none and may have missed one looks by himself."""
        self._take_rows(rows)
        if is_complete:
            return
        for subscription in self._subscriptions.values():
            for feed, state in subscription.feeds.items():
                if state.scheduler == number:
                    self.look(subscription, feed)

    def _take_rows(self, rows: list[list[int]]) -> None:
        now_ns, subscriptions = self._now_ns(), self._subscriptions
        words: list[int] = []
        place: Hint | None = None
        for number, feed, until, *hint in rows:
            subscription = subscriptions.get(number)
            if subscription is None or (state := subscription.feeds.get(feed)) is None:
                continue
            if until >= OPEN_END:
                self._seek(subscription, feed, state)
            if state.turn is not None:
                # Told a second time, by a scheduler that has forgotten the first: it is one and the same.
                state.turn.until, state.turn.is_own = max(state.turn.until, until), False
                continue
            if hint != words:
                # Many watches of a topic have turns at the same place.
                words, place = hint, Hint(*hint) if hint[2] else None
            self._offer(subscription, state, Turn(feed, until, place, now_ns))

    def _offer(self, subscription: Subscription, state: _FeedState, turn: Turn) -> None:
        state.turn = turn
        subscription.ready.append(turn)
        self._wake(subscription)

    @staticmethod
    def _wake(subscription: Subscription) -> None:
        waiting, subscription.waiting = subscription.waiting, None
        if waiting is not None:
            waiting.resolve(None)

    # -- saying it --------------------------------------------------------------------------------------

    def _add_steps(self, subscription: Subscription, wanted: list[tuple[TopicInfo, int]]) -> Steps[list[int]]:
        yield self._host.met()
        schedulers = self._host.links.schedulers
        if not schedulers:
            raise _nobody_tells()
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
                self._host.links.expect_turns(number)
            yield start(self._send_steps(subscription, number, feeds))
            if subscription.failure is not None:
                raise subscription.failure
        return numbers

    def _is_followed(self, number: int, feeds: list[int], subscription: Subscription) -> bool:
        """Has this scheduler been asked for turns of others than these feeds of the subscription?"""
        fresh = set(feeds)
        return any(
            state.scheduler == number and not (each is subscription and feed in fresh)
            for each in self._subscriptions.values()
            for feed, state in each.feeds.items()
        )

    def _send_again_steps(self, subscription: Subscription, number: int) -> Steps[None]:
        """Tell a scheduler that has forgotten the subscription of it; names may have changed meanwhile."""
        feeds = [feed for feed, state in subscription.feeds.items() if state.scheduler == number]
        yield from self._send_steps(subscription, number, feeds, is_known=True)
        if number == NAMES_SCHEDULER:
            self._names_may_have_changed(subscription)

    def _send_steps(
        self, subscription: Subscription, number: int, feeds: list[int], *, is_known: bool = False
    ) -> Steps[None]:
        """Tell one scheduler of feeds, and whether names are wanted of it; on refusals that pass, again.
        With `is_known` they were accepted before: a request without an answer is sent again, too."""
        host = self._host
        later = (*_LATER, RequestTimeout) if is_known else _LATER
        names = subscription.names and number == NAMES_SCHEDULER
        for first in range(0, len(feeds) or int(names), FEEDS_PER_MESSAGE_MAX):
            part = feeds[first : first + FEEDS_PER_MESSAGE_MAX]
            while subscription.failure is None and number in subscription.schedulers:
                told = self._told(subscription, number, part)
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
                    yield host.pause(AGAIN_NS / 1e9)
                    continue
                except RinglogError as e:
                    self._fail(subscription, e)
                    return
                assert isinstance(reply.message, Subscribed)
                break

    def _told(self, subscription: Subscription, number: int, feeds: list[int]) -> list[Feed]:
        """What a scheduler is told of feeds: of those that it looks after."""
        found = [(feed, state) for feed in feeds if (state := subscription.feeds.get(feed)) is not None]
        return [
            Feed(feed, state.topic, info.topic_id, info.shard, info.slot, state.after)
            for feed, state in found
            if state.scheduler == number and (info := state.info)
        ]

    def _seek(self, subscription: Subscription, feed: int, state: _FeedState) -> None:
        """A shard that restarted may show a topic elsewhere. If the topic is no more its reader will see."""
        if state.is_sought:
            return
        state.is_sought = True
        self._sought.append((subscription, feed))
        if not self._is_seeking:
            self._is_seeking = True
            start(self._seek_steps())

    def _seek_steps(self) -> Steps[None]:
        """Ask where topics are, some at a time, and subscribe to those that are elsewhere there."""
        host = self._host
        while self._sought:
            asked = []
            for _ in range(min(len(self._sought), SEEK_AT_ONCE)):
                subscription, feed = self._sought.popleft()
                state = subscription.feeds.get(feed)
                if state is None:
                    continue
                asked.append((subscription, feed, state, start(self._ask_place(state))))
            moved: dict[tuple[Subscription, int], list[int]] = {}
            again = []
            for subscription, feed, state, asking in asked:
                try:
                    info = yield asking
                except (*_LATER, ConnectionTrouble) as e:
                    if is_shard_failed(e):
                        state.is_sought = False
                        self._say(subscription, feed, state, e)
                        continue
                    # Nor is no answer in time the word of its shard: nobody will tell us to look again.
                    again.append((subscription, feed))
                    continue
                except RinglogError:
                    info = state.info
                state.is_sought = False
                is_it = info.topic_id == state.info.topic_id and info.epoch == state.info.epoch
                if is_it and (info.shard, info.slot) != (state.info.shard, state.info.slot):
                    state.info = info
                    moved.setdefault((subscription, state.scheduler), []).append(feed)
            for (subscription, number), feeds in moved.items():
                yield start(self._send_steps(subscription, number, feeds, is_known=True))
            if again:
                self._sought.extend(again)
                yield host.pause(AGAIN_NS / 1e9)
        self._is_seeking = False

    def _say(self, subscription: Subscription, feed: int, state: _FeedState, error: RinglogError) -> None:
        """Have a feed's reader hear why nothing comes, behind what it reads now."""
        state.error = error if state.turn is not None else None
        if state.turn is None:
            turn = Turn(feed, OPEN_END, None, self._now_ns(), is_own=True, error=error)
            self._offer(subscription, state, turn)

    def _ask_place(self, state: _FeedState) -> Steps[TopicInfo]:
        """Ask the name's home, or whom it points to."""
        links, request = self._host.links, TopicResolve(state.topic)
        shard = links.home(state.topic)
        info: TopicInfo = (yield links.request(shard, request, self._host.deadline_ns())).message
        if not info.topic_id:
            info = (yield links.request(info.shard, request, self._host.deadline_ns())).message
        return info

    def fail_all(self, error: RinglogError) -> None:
        """No scheduler will be reached any more."""
        for subscription in list(self._subscriptions.values()):
            self._fail(subscription, error)

    def _fail(self, subscription: Subscription, error: RinglogError) -> None:
        if isinstance(error, Throttled):
            error.detail.setdefault("hint", "fewer subscriptions, or delivery.schedulers")
        subscription.failure = error
        self._wake(subscription)

    def _unsubscribe(self, number: int, request: Unsubscribe) -> None:
        peer = self._host.links.scheduler(number)
        if peer.is_up:
            # Should it be lost: turns of unknown subscriptions are passed over, and silence ends them.
            peer.request(request, self._host.deadline_ns(), is_patient=False)

    def _stay_alive(self) -> None:
        """Say a word now and then, so that a scheduler does not take us for dead."""
        if self._alive is None and self._subscriptions:
            self._alive = self._host.timers.at(self._now_ns() + WORD_OF_LIFE_NS, self._say_a_word)

    def _say_a_word(self) -> None:
        self._alive = None
        for number in {number for each in self._subscriptions.values() for number in each.schedulers}:
            self._host.links.scheduler(number).tell(Taken(0), b"")
        self._stay_alive()

    def _now_ns(self) -> int:
        return self._host.clock.monotonic_ns()
